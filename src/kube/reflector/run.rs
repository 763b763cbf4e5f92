//! Asks what `step.rs` says and keeps what comes. Spec 10 §3.2.

use std::{collections::BTreeMap, sync::Arc, time::Duration};

use bytes::Bytes;
use tokio::{
    sync::{Notify, watch},
    time::{Instant, sleep, timeout_at},
};
use tracing::{debug, warn};

use super::{
    ReflectorDeps, Selection,
    event::{self, Event, Kept, Key, Page},
    step::{Ask, Machine, Moment, Next},
};
use crate::{
    kube::{
        api::{ApiClient, ApiError, LIST_LIMIT, WatchStream},
        store::Snapshot,
    },
    metrics::{Following, ReflectorMeter},
};

/// What there is should be there after so long; if not, that is told.
const SLOW: Duration = Duration::from_secs(10);
/// So long after its end a watch is taken for dead.
const OVERDUE: Duration = Duration::from_secs(60);
/// A longer list is read where it holds up nobody, in bytes.
const LONG: usize = 256 << 10;

type Objects<T> = BTreeMap<Key, Arc<T>>;

/// Owner of the objects of one selection.
pub struct Reflector<T> {
    api: Arc<dyn ApiClient>,
    selection: Selection,
    snapshots: watch::Sender<Arc<Snapshot<T>>>,
    nudge: Arc<Notify>,
    meter: ReflectorMeter,
    machine: Machine,
    started: Instant,
}

/// How a watch came to its end.
enum End {
    /// It failed, or the server said why it ends.
    Failed(ApiError),
    /// It ended, or was lost.
    Over,
}

/// One watch.
struct Watch<T> {
    stream: Box<dyn WatchStream>,
    /// What there is, until all of it is there.
    incoming: Option<Incoming<T>>,
    began: Instant,
    /// When it is taken for dead.
    overdue: Instant,
    silent: bool,
}

struct Incoming<T> {
    objects: Objects<T>,
    bytes: usize,
}

impl<T: Kept> Reflector<T> {
    /// Sends what it sees to `snapshots`.
    pub fn new(
        api: Arc<dyn ApiClient>,
        selection: Selection,
        deps: ReflectorDeps,
        snapshots: watch::Sender<Arc<Snapshot<T>>>,
    ) -> Self {
        Self {
            meter: deps.metrics.follow(selection.resource().plural),
            machine: Machine::new(selection.patience()),
            started: Instant::now(),
            nudge: deps.nudge,
            api,
            selection,
            snapshots,
        }
    }

    /// Never returns.
    pub async fn run(mut self) {
        let mut next = self.machine.first();
        loop {
            if let Some(reason) = next.why.relist() {
                self.meter.relisted(reason);
            }
            if !next.pause.is_zero() {
                self.meter.set(Following::Waiting);
                tokio::select! {
                    () = sleep(next.pause) => {}
                    () = self.nudge.notified() => self.machine.nudged(),
                }
            }
            self.meter.set(if matches!(next.ask, Ask::Watch(_)) { Following::Watching } else { Following::Init });
            next = match &next.ask {
                Ask::List(_) => self.list(&next.ask).await,
                ask => self.watch(ask).await,
            };
        }
    }

    fn moment(&self) -> Moment {
        Moment { now: self.started.elapsed(), chance: rand::random() }
    }

    /// Tells a failure and says what comes next.
    fn failed(&mut self, error: &ApiError) -> Next {
        let next = self.machine.failed(error.into(), self.moment());
        let (resource, retry) = (self.selection.resource().plural, next.pause);
        if error.is_invalid() {
            debug!(resource, err = %error, "The server begins no watch with what there is, listing instead");
        } else if error.is_forbidden() && retry <= Duration::from_secs(1) {
            debug!(resource, err = %error, ?retry, "Not yet allowed to watch");
        } else {
            warn!(resource, err = %error, ?retry, "Failed to watch");
        }
        next
    }

    async fn list(&mut self, ask: &Ask) -> Next {
        let (mut call, _) = self.selection.call(ask, 0.0);
        let mut objects = Objects::new();
        loop {
            let page = match self.api.call(call).await {
                Ok(text) => read::<T>(text).await,
                Err(error) => Err(error),
            };
            let page = match page {
                Ok(page) => page,
                Err(error) => return self.failed(&error),
            };
            self.meter.heard();
            page.broken.iter().for_each(|(name, cause)| self.broken(name, cause));
            objects.extend(page.items.into_iter().map(|(key, object)| (key, Arc::new(object))));
            if page.next.is_empty() {
                self.replace(objects, &page.version);
                return self.machine.listed(&page.version);
            }
            call = self.selection.next_page(&page.next);
        }
    }

    async fn watch(&mut self, ask: &Ask) -> Next {
        let (call, lasts) = self.selection.call(ask, rand::random());
        let began = Instant::now();
        let stream = match self.api.watch(call).await {
            Ok(stream) => stream,
            Err(error) => return self.failed(&error),
        };
        let incoming = matches!(ask, Ask::Stream(_)).then(|| Incoming { objects: Objects::new(), bytes: 0 });
        let mut watch = Watch { stream, incoming, began, overdue: began + lasts + OVERDUE, silent: true };
        match self.follow(&mut watch).await {
            End::Failed(error) => self.failed(&error),
            End::Over => self.machine.ended(began.elapsed(), watch.silent, self.moment()),
        }
    }

    /// Takes events until there are no more.
    async fn follow(&mut self, watch: &mut Watch<T>) -> End {
        loop {
            let line = match self.line(watch).await {
                Some(Ok(line)) => line,
                Some(Err(error @ ApiError::Malformed(_))) => return End::Failed(error),
                Some(Err(error)) => {
                    debug!(resource = self.selection.resource().plural, err = %error, "A watch was lost");
                    return End::Over;
                }
                None => return End::Over,
            };
            self.meter.heard();
            match event::event::<T>(&line) {
                Ok((event, version)) => {
                    if let Err(end) = self.take(watch, event, &version, line.len()) {
                        return end;
                    }
                    // From what has no version nobody can go on: it is no reason to ask again at once.
                    watch.silent &= version.is_empty();
                }
                // What came before it is kept, and the rest is asked for again.
                Err(error) => {
                    warn!(resource = self.selection.resource().plural, err = %error, "A watch broke off");
                    return End::Over;
                }
            }
        }
    }

    /// The next line of a watch; says so if what there is takes long to come.
    async fn line(&self, watch: &mut Watch<T>) -> Option<Result<Bytes, ApiError>> {
        if watch.incoming.is_some() {
            let slow = watch.began + SLOW;
            match timeout_at(slow, watch.stream.next()).await {
                Ok(line) => return line,
                Err(_) if watch.silent => {
                    let resource = self.selection.resource().plural;
                    warn!(resource, waited = ?watch.began.elapsed(), "Still waiting for what there is");
                }
                Err(_) => {}
            }
        }
        timeout_at(watch.overdue, watch.stream.next()).await.unwrap_or(None)
    }

    fn take(&mut self, watch: &mut Watch<T>, event: Event<T>, version: &str, bytes: usize) -> Result<(), End> {
        match (event, &mut watch.incoming) {
            (Event::Put(key, object), Some(incoming)) => {
                incoming.bytes = incoming.bytes.saturating_add(bytes);
                if incoming.bytes > LIST_LIMIT {
                    return Err(End::Failed(ApiError::Malformed(format!("more than {LIST_LIMIT} bytes of objects"))));
                }
                incoming.objects.insert(key, Arc::new(object));
            }
            (Event::Gone(key), Some(incoming)) => {
                incoming.objects.remove(&key);
            }
            (Event::Bookmark(true), incoming @ Some(_)) => {
                let objects = incoming.take().map(|incoming| incoming.objects).unwrap_or_default();
                self.replace(objects, version);
                self.machine.streamed(version);
                self.meter.set(Following::Watching);
            }
            (Event::Put(key, mut object), None) => {
                self.change(version, |objects| {
                    if let Some(older) = objects.get(&key) {
                        object.share(older);
                    }
                    objects.insert(key, Arc::new(object))
                });
            }
            (Event::Gone(key), None) => self.change(version, |objects| objects.remove(&key)),
            (Event::Bookmark(_), _) => self.machine.moved(version),
            (Event::Broken(name, cause), _) => {
                self.broken(&name, &cause);
                self.machine.moved(version);
            }
            (Event::Unknown(kind), _) => {
                warn!(resource = self.selection.resource().plural, kind, "Skipped an event of unknown type");
            }
            (Event::Error(error), _) => return Err(End::Failed(error)),
        }
        Ok(())
    }

    fn change(&mut self, version: &str, change: impl FnOnce(&mut Objects<T>) -> Option<Arc<T>>) {
        self.machine.moved(version);
        // The map is copied only while somebody holds the last one.
        self.snapshots.send_modify(|snapshot| {
            let snapshot = Arc::make_mut(snapshot);
            self.machine.version().clone_into(&mut snapshot.version);
            change(&mut snapshot.objects);
        });
    }

    /// Takes a full set. Objects that are the same stay the same, so that whoever compares sees it.
    fn replace(&self, mut objects: Objects<T>, version: &str) {
        let known = self.snapshots.borrow().clone();
        let mut changed = !known.synced || known.objects.len() != objects.len();
        for (key, object) in &mut objects {
            let older = known.objects.get(key);
            match older.filter(|old| is_same(old.as_ref(), object.as_ref())) {
                Some(old) => *object = old.clone(),
                None => {
                    if let (Some(older), Some(own)) = (older, Arc::get_mut(object)) {
                        own.share(older);
                    }
                    changed = true;
                }
            }
        }
        drop(known);
        debug!(resource = self.selection.resource().plural, count = objects.len(), version, "Caches populated");
        let snapshot = Arc::new(Snapshot { synced: true, version: version.to_owned(), objects });
        self.snapshots.send_if_modified(|known| {
            *known = snapshot;
            changed
        });
    }

    fn broken(&self, name: &str, cause: &str) {
        let resource = self.selection.resource().plural;
        warn!(resource, name, err = cause, "Skipped an object that cannot be read");
    }
}

fn is_same<T: Kept>(old: &T, new: &T) -> bool {
    let (old, new) = (old.meta(), new.meta());
    old.resource_version.is_some() && old.resource_version == new.resource_version && old.uid == new.uid
}

async fn read<T: Kept>(text: Bytes) -> Result<Page<T>, ApiError> {
    if text.len() < LONG {
        return event::page(&text);
    }
    let reading = tokio::task::spawn_blocking(move || event::page(&text));
    reading.await.unwrap_or_else(|e| Err(ApiError::Malformed(format!("reading a list failed: {e}"))))
}
