//! Event recorder: correlates events and writes them to the API server.
//!
//! ```text
//!  EventSink ──bounded queue──► correlate ──► a lane per object ──POST, PATCH──► ApiClient
//!      └──► log
//! ```
//!
//! Recording never blocks: a full queue drops its oldest event and counts the loss. One task takes events from the
//! queue, correlates them ([`correlator`]), and writes them: sequentially per object, concurrently across objects, so
//! that a write that hangs does not delay other objects' events.
//!
//! Implements spec 05 §13, 10 §4.9, §7.

mod correlator;
mod object_queues;
mod retry_policy;
mod series;
#[cfg(test)]
mod tests;

use std::{
    collections::VecDeque,
    sync::{Arc, Mutex, PoisonError},
    time::Duration,
};

use bytes::Bytes;
use futures::{StreamExt, future::BoxFuture, stream::FuturesUnordered};
use jiff::Timestamp;
use rand::Rng;
use tokio::{sync::Notify, time::Instant};
use tokio_util::sync::CancellationToken;
use tracing::{debug, warn};

use self::{
    correlator::{Correlator, RecordedEvent, Send},
    object_queues::{ObjectQueues, QueuedWrite, object_of},
    retry_policy::{EventFailureAction, EventWrite, classify_failure},
    series::InvolvedObject,
};
use super::api::{ApiClient, ApiError, Call, RequestClass, Resource};
use berth_metrics::{ApiWriteMetrics, EventLoss};
use berth_ports::{Clock, EventKind, EventRecord, EventSink, EventTarget};

/// Maximum number of events in the inbox, and of writes in the queues.
const WAITING: usize = 1000;
/// Maximum number of concurrent writes.
const IN_FLIGHT: usize = 16;
/// Deadline of a write.
const DEADLINE: Duration = Duration::from_secs(30);

/// Dependencies of the recorder.
pub struct EventDeps {
    /// Name of this node.
    pub node: String,
    /// Client of the API server.
    pub api: Arc<dyn ApiClient>,
    /// Second sink of every event: the log.
    pub log: Arc<dyn EventSink>,
    /// Wall clock.
    pub clock: Arc<dyn Clock>,
    /// Counters of dropped events, and gauge of queued ones.
    pub metrics: ApiWriteMetrics,
}

struct Inbox {
    queue: Mutex<VecDeque<(EventRecord, Timestamp)>>,
    more: Notify,
}

/// Accepts events and queues them for the [`EventSender`]; see the module's documentation.
pub struct EventRecorder {
    inbox: Arc<Inbox>,
    log: Arc<dyn EventSink>,
    clock: Arc<dyn Clock>,
    metrics: ApiWriteMetrics,
}

impl EventSink for EventRecorder {
    fn record(&self, event: EventRecord) {
        self.log.record(event.clone());
        let overrun = {
            let mut queue = self.inbox.queue.lock().unwrap_or_else(PoisonError::into_inner);
            queue.push_back((event, self.clock.now()));
            queue.len() > WAITING && queue.pop_front().is_some()
        };
        if overrun {
            self.metrics.events_lost(EventLoss::Overrun);
        }
        self.inbox.more.notify_one();
    }
}

/// Task that writes the recorded events.
pub struct EventSender {
    node: String,
    api: Arc<dyn ApiClient>,
    metrics: ApiWriteMetrics,
    inbox: Arc<Inbox>,
    correlator: Correlator,
    lanes: ObjectQueues,
    flights: FuturesUnordered<BoxFuture<'static, (QueuedWrite, Result<Bytes, ApiError>)>>,
}

/// Returns a recorder, and the task that writes what it records.
pub fn recorder(deps: EventDeps) -> (EventRecorder, EventSender) {
    let inbox = Arc::new(Inbox { queue: Mutex::default(), more: Notify::new() });
    let recorder =
        EventRecorder { inbox: inbox.clone(), log: deps.log, clock: deps.clock, metrics: deps.metrics.clone() };
    let sender = EventSender {
        node: deps.node,
        api: deps.api,
        metrics: deps.metrics,
        inbox,
        correlator: Correlator::default(),
        lanes: ObjectQueues::default(),
        flights: FuturesUnordered::new(),
    };
    (recorder, sender)
}

impl EventSender {
    /// Runs until stopped; queued events are lost then.
    pub async fn run(mut self, stop: CancellationToken) {
        let inbox = self.inbox.clone();
        loop {
            self.take_in();
            let wake = self.launch();
            self.metrics.events_queued.set(i64::try_from(self.lanes.waiting()).unwrap_or(i64::MAX));
            tokio::select! {
                biased;
                () = stop.cancelled() => return,
                Some((sent, answer)) = self.flights.next(), if !self.flights.is_empty() => self.landed(sent, answer),
                () = inbox.more.notified() => {}
                () = super::sleep_until(wake) => {}
            }
        }
    }

    fn take_in(&mut self) {
        let taken = std::mem::take(&mut *self.inbox.queue.lock().unwrap_or_else(PoisonError::into_inner));
        for (event, at) in taken {
            let about = match event.target {
                EventTarget::Pod { pod, field_path } => InvolvedObject::of_pod(&pod, field_path),
                EventTarget::Node => InvolvedObject::of_node(&self.node),
                EventTarget::Storage { kind, namespace, name, uid } => {
                    InvolvedObject { kind, namespace, name, uid, field_path: None }
                }
            };
            let happened = RecordedEvent {
                about,
                warning: event.kind == EventKind::Warning,
                reason: event.reason.into_owned(),
                message: event.message,
                annotations: event.annotations,
            };
            match self.correlator.take(happened, at, random_name) {
                Some(Send::First(series)) => self.lanes.push(series, EventWrite::First),
                Some(Send::Again(series)) => self.lanes.push(series, EventWrite::Again),
                None => self.metrics.events_lost(EventLoss::Spam),
            }
            if self.lanes.waiting() > WAITING {
                self.lanes.drop_oldest();
                self.metrics.events_lost(EventLoss::Overrun);
            }
        }
    }

    /// Starts writes that are due while fewer than [`IN_FLIGHT`] run; returns when the next becomes due.
    fn launch(&mut self) -> Option<Instant> {
        let now = Instant::now();
        while self.flights.len() < IN_FLIGHT {
            let Some(waiting) = self.lanes.take(now) else { break };
            let call = self.call(&waiting);
            let api = self.api.clone();
            self.flights.push(Box::pin(async move {
                let answer = match tokio::time::timeout(DEADLINE, api.call(call)).await {
                    Ok(answer) => answer,
                    Err(_) => Err(ApiError::Timeout(DEADLINE)),
                };
                (waiting, answer)
            }));
        }
        if self.flights.len() < IN_FLIGHT { self.lanes.wakes_at() } else { None }
    }

    fn call(&self, waiting: &QueuedWrite) -> Call {
        let series = &waiting.series;
        let namespace = series.about.event_namespace();
        let call = match waiting.kind {
            EventWrite::First => Call::create(Resource::EVENTS, namespace, series.object(&self.node).to_string()),
            EventWrite::Again => Call::patch(Resource::EVENTS, namespace, &series.name, series.change().to_string()),
        };
        call.on(RequestClass::Events).within(DEADLINE)
    }

    fn landed(&mut self, mut sent: QueuedWrite, answer: Result<Bytes, ApiError>) {
        let object = object_of(&sent.series.about);
        let Err(error) = answer else { return self.lanes.complete(&object) };
        sent.tries = sent.tries.saturating_add(1);
        let name = &sent.series.name;
        match classify_failure(&error, sent.kind, sent.tries, rand::rng().random()) {
            EventFailureAction::Create => {
                sent.kind = EventWrite::First;
                self.lanes.requeue(sent, None);
            }
            EventFailureAction::Again(wait) => {
                debug!(event = %name, err = %error, retryIn = ?wait, "Unable to write event, may retry after sleeping");
                self.lanes.requeue(sent, Some(Instant::now() + wait));
            }
            EventFailureAction::Refused => {
                warn!(event = %name, reason = %sent.series.reason, err = %error, "Server rejected event, will not retry");
                self.metrics.events_lost(EventLoss::Refused);
                self.lanes.complete(&object);
            }
            EventFailureAction::Undeliverable => {
                warn!(event = %name, reason = %sent.series.reason, err = %error, "Unable to write event, retry limit exceeded");
                self.metrics.events_lost(EventLoss::Undeliverable);
                self.lanes.complete(&object);
            }
        }
    }
}

/// Random UUID, version 4.
fn random_name() -> String {
    let bits: u128 = rand::rng().random();
    let bits = (bits & !(0xf << 76) & !(0x3 << 62)) | (0x4 << 76) | (0x2 << 62);
    let text = format!("{bits:032x}");
    let part = |range: std::ops::Range<usize>| text.get(range).unwrap_or_default();
    [part(0..8), part(8..12), part(12..16), part(16..20), part(20..32)].join("-")
}
