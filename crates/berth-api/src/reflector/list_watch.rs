//! Reflector task: performs the requests that `state_machine.rs` decides and feeds the follower.
//!
//! There may be thousands of reflectors, nearly all idle: state that only requests need is in a separate box, which is
//! dropped after the request. Implements spec 10 §3.2, I/O part.

use std::{
    future::{pending, poll_fn},
    ops::ControlFlow,
    sync::Arc,
    time::Duration,
};

use bytes::Bytes;
use tokio::{
    sync::watch,
    time::{Instant, sleep, timeout_at},
};
use tracing::{debug, warn};

use super::{
    event::{self, Page, ReflectedObject, WatchEvent},
    follower::Follower,
    state_machine::{Next, OutcomeTime, ReflectorRequest, StateMachine},
};
use crate::api::{ApiClient, ApiError, LIST_LIMIT, WatchStream};
use berth_metrics::{ReflectorMeter, ReflectorMetrics, WatchState};

/// Time after which missing initial events are logged.
const SLOW: Duration = Duration::from_secs(10);
/// Time after its requested duration when a watch counts as dead.
const OVERDUE: Duration = Duration::from_secs(60);
/// Size from which on a list is parsed in the blocking pool, in bytes.
const LONG: usize = 256 << 10;

/// Lists and watches the objects of one follower.
pub struct Reflector<F: Follower> {
    api: Arc<dyn ApiClient>,
    credentials_changed: watch::Receiver<u64>,
    follower: F,
    meter: ReflectorMeter,
    machine: StateMachine,
    started: Instant,
}

/// What follows a list or a watch request: events, another request, or the end.
enum RequestOutcome<A> {
    /// A watch was established.
    Watch(EstablishedWatch<A>),
    /// The next request is due.
    Again(Next),
    /// The follower needs no more objects.
    Done,
}

/// How a watch ended.
enum End {
    /// It failed, or the server sent an error.
    Failed(ApiError),
    /// It ended regularly, or the connection was lost.
    Over,
    /// The follower needs no more objects.
    Done,
}

/// Open watch stream, with its deadline and the initial objects received so far.
struct EstablishedWatch<A> {
    stream: Box<dyn WatchStream>,
    /// Initial objects until the set is complete.
    incoming: Option<Box<InitialList<A>>>,
    began: Instant,
    /// When the watch counts as dead.
    overdue: Instant,
    silent: bool,
}

struct InitialList<A> {
    objects: A,
    bytes: usize,
}

impl<F: Follower> Reflector<F> {
    /// Returns a reflector that feeds `follower`.
    pub fn new(api: Arc<dyn ApiClient>, follower: F, metrics: &ReflectorMetrics) -> Self {
        let selection = follower.selection();
        Self {
            meter: metrics.follow(selection.resource().plural),
            machine: StateMachine::new(selection.patience()),
            started: Instant::now(),
            credentials_changed: api.credentials_changed(),
            api,
            follower,
        }
    }

    /// Runs until the follower breaks.
    pub async fn run(&mut self) {
        let mut next = self.machine.first();
        loop {
            let mut watch = match Box::pin(self.ask(next)).await {
                RequestOutcome::Watch(watch) => watch,
                RequestOutcome::Again(again) => {
                    next = again;
                    continue;
                }
                RequestOutcome::Done => return,
            };
            next = match self.follow(&mut watch).await {
                End::Failed(error) => self.failed(&error),
                End::Over => self.machine.ended(watch.began.elapsed(), watch.silent, self.moment()),
                End::Done => return,
            };
        }
    }

    fn moment(&self) -> OutcomeTime {
        OutcomeTime { now: self.started.elapsed(), chance: rand::random() }
    }

    fn resource(&self) -> &'static str {
        self.follower.selection().resource().plural
    }

    /// Logs a failure and returns the next request.
    fn failed(&mut self, error: &ApiError) -> Next {
        let next = self.machine.failed(error.into(), self.moment());
        let (resource, retry) = (self.resource(), next.pause);
        if error.is_invalid() {
            debug!(resource, err = %error, "The watch-list request ended with an error, falling back to the standard LIST/WATCH semantics");
        } else if error.is_forbidden() && retry <= Duration::from_secs(1) {
            debug!(resource, err = %error, ?retry, "Watch is forbidden, retrying");
        } else {
            warn!(resource, err = %error, ?retry, "Failed to watch");
        }
        next
    }

    /// Waits for the back-off and performs the request.
    async fn ask(&mut self, next: Next) -> RequestOutcome<F::All> {
        if let Some(reason) = next.why.relist() {
            self.meter.relisted(reason);
        }
        if !next.pause.is_zero() {
            self.meter.set(WatchState::Waiting);
            tokio::select! {
                () = sleep(next.pause) => {}
                () = self.follower.nudged() => self.machine.nudged(),
                () = changed(&mut self.credentials_changed) => self.machine.nudged(),
            }
        }
        self.meter.set(if matches!(next.ask, ReflectorRequest::Watch(_)) {
            WatchState::Watching
        } else {
            WatchState::Init
        });
        match &next.ask {
            ReflectorRequest::List(_) => self.list(&next.ask).await,
            ask => self.begin(ask).await,
        }
    }

    async fn list(&mut self, ask: &ReflectorRequest) -> RequestOutcome<F::All> {
        let selection = self.follower.selection();
        let (mut call, _) = selection.call(ask, 0.0);
        let mut objects = F::All::default();
        loop {
            let page = match self.api.call(call).await {
                Ok(text) => read::<F::Object>(text).await,
                Err(error) => Err(error),
            };
            let page = match page {
                Ok(page) => page,
                Err(error) => return RequestOutcome::Again(self.failed(&error)),
            };
            self.meter.event_received();
            page.broken.iter().for_each(|(name, cause)| self.broken(name, cause));
            for (key, object) in page.items {
                self.follower.gather(&mut objects, key, Some(object));
            }
            if page.next.is_empty() {
                let next = self.machine.listed(&page.version);
                return match self.follower.replace(objects, &page.version) {
                    ControlFlow::Continue(()) => RequestOutcome::Again(next),
                    ControlFlow::Break(()) => RequestOutcome::Done,
                };
            }
            call = selection.next_page(&page.next);
        }
    }

    async fn begin(&mut self, ask: &ReflectorRequest) -> RequestOutcome<F::All> {
        let (call, lasts) = self.follower.selection().call(ask, rand::random());
        let began = Instant::now();
        match self.api.watch(call).await {
            Ok(stream) => {
                let begins = matches!(ask, ReflectorRequest::Stream(_));
                let incoming = begins.then(|| Box::new(InitialList { objects: F::All::default(), bytes: 0 }));
                RequestOutcome::Watch(EstablishedWatch {
                    stream,
                    incoming,
                    began,
                    overdue: began + lasts + OVERDUE,
                    silent: true,
                })
            }
            Err(error) => RequestOutcome::Again(self.failed(&error)),
        }
    }

    /// Processes events until the watch ends.
    async fn follow(&mut self, watch: &mut EstablishedWatch<F::All>) -> End {
        loop {
            let line = match self.line(watch).await {
                Some(Ok(line)) => line,
                Some(Err(error @ ApiError::Malformed(_))) => return End::Failed(error),
                Some(Err(error)) => {
                    debug!(resource = self.resource(), err = %error, "Watch connection lost");
                    return End::Over;
                }
                None => return End::Over,
            };
            if let ControlFlow::Break(end) = self.process_event(watch, &line) {
                return end;
            }
        }
    }

    /// Returns the next line of a watch; logs if the initial events are slow.
    async fn line(&self, watch: &mut EstablishedWatch<F::All>) -> Option<Result<Bytes, ApiError>> {
        let mut may_be_slow = watch.incoming.is_some();
        loop {
            let until = if may_be_slow { watch.began + SLOW } else { watch.overdue };
            let stream = &mut watch.stream;
            match timeout_at(until, poll_fn(|context| stream.poll_next(context))).await {
                Ok(line) => return line,
                Err(_) if !may_be_slow => return None,
                Err(_) => may_be_slow = false,
            }
            if watch.silent {
                let (resource, waited) = (self.resource(), watch.began.elapsed());
                warn!(
                    resource,
                    ?waited,
                    "Hasn't received required bookmark event marking the end of initial events stream"
                );
            }
        }
    }

    fn process_event(&mut self, watch: &mut EstablishedWatch<F::All>, line: &[u8]) -> ControlFlow<End> {
        self.meter.event_received();
        match event::event::<F::Object>(line) {
            Ok((event, version)) => {
                self.take(watch, event, &version, line.len())?;
                // An event without a version is no progress: it does not justify an immediate retry.
                watch.silent &= version.is_empty();
                ControlFlow::Continue(())
            }
            // Events before the malformed one are kept; the next watch sends the rest.
            Err(error) => {
                warn!(resource = self.resource(), err = %error, "Failed to decode watch event, closing watch");
                ControlFlow::Break(End::Over)
            }
        }
    }

    fn take(
        &mut self,
        watch: &mut EstablishedWatch<F::All>,
        event: WatchEvent<F::Object>,
        version: &str,
        bytes: usize,
    ) -> ControlFlow<End> {
        match (event, &mut watch.incoming) {
            (WatchEvent::Put(key, object), Some(incoming)) => {
                incoming.bytes = incoming.bytes.saturating_add(bytes);
                if incoming.bytes > LIST_LIMIT {
                    let text = format!("list exceeds {LIST_LIMIT} bytes");
                    return ControlFlow::Break(End::Failed(ApiError::Malformed(text)));
                }
                self.follower.gather(&mut incoming.objects, key, Some(object));
            }
            (WatchEvent::Gone(key), Some(incoming)) => self.follower.gather(&mut incoming.objects, key, None),
            (WatchEvent::Bookmark(true), incoming @ Some(_)) => {
                let objects = incoming.take().map(|incoming| incoming.objects).unwrap_or_default();
                self.machine.streamed(version);
                self.meter.set(WatchState::Watching);
                return enough(self.follower.replace(objects, version));
            }
            (WatchEvent::Put(key, object), None) => {
                self.machine.moved(version);
                return enough(self.follower.change(key, Some(object), self.machine.version()));
            }
            (WatchEvent::Gone(key), None) => {
                self.machine.moved(version);
                return enough(self.follower.change(key, None, self.machine.version()));
            }
            (WatchEvent::Bookmark(_), _) => self.machine.moved(version),
            (WatchEvent::Broken(name, cause), _) => {
                self.broken(&name, &cause);
                self.machine.moved(version);
            }
            (WatchEvent::Unknown(kind), _) => {
                warn!(resource = self.resource(), kind, "Skipped watch event of unknown type");
            }
            (WatchEvent::Error(error), _) => return ControlFlow::Break(End::Failed(error)),
        }
        ControlFlow::Continue(())
    }

    fn broken(&self, name: &str, cause: &str) {
        warn!(resource = self.resource(), name, err = cause, "Skipped object that cannot be decoded");
    }
}

/// Waits for a change; pends forever once the sender is gone.
async fn changed(receiver: &mut watch::Receiver<u64>) {
    if receiver.changed().await.is_err() {
        pending::<()>().await;
    }
}

fn enough(goes_on: ControlFlow<()>) -> ControlFlow<End> {
    match goes_on {
        ControlFlow::Continue(()) => ControlFlow::Continue(()),
        ControlFlow::Break(()) => ControlFlow::Break(End::Done),
    }
}

async fn read<T: ReflectedObject>(text: Bytes) -> Result<Page<T>, ApiError> {
    if text.len() < LONG {
        return event::page(&text);
    }
    let reading = tokio::task::spawn_blocking(move || event::page(&text));
    reading.await.unwrap_or_else(|e| Err(ApiError::Malformed(format!("decoding list failed: {e}"))))
}
