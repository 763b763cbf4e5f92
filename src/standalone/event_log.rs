//! Event sink of a node without API server: logs each event at most once a minute.
//!
//! The limit keeps a failing pod from flooding the log (spec 01 §9 step 12).

use std::{
    collections::HashMap,
    sync::{Mutex, PoisonError},
    time::Duration,
};

use tokio::time::Instant;
use tracing::{info, warn};

use berth_ports::{EventKind, EventRecord, EventSink, EventTarget};

/// Maximum number of distinct events in the deduplication table.
const REMEMBERED: usize = 1024;
/// Minimum interval between records of the same event.
const QUIET: Duration = Duration::from_secs(60);

/// Logs events; the same one at most once a minute.
pub struct EventLog {
    node: String,
    /// Time of the last record per event, by hash. The table is allocated once at the start: single allocations between
    /// those of short-lived pods would keep their pages from returning to the kernel.
    seen: Mutex<HashMap<u64, Instant>>,
}

impl EventLog {
    /// Creates a sink with an empty table; `node` is the name of this node.
    pub fn new(node: impl Into<String>) -> Self {
        Self { node: node.into(), seen: Mutex::new(HashMap::with_capacity(REMEMBERED)) }
    }

    /// True if the event is to be logged; false if it repeats a recent one.
    fn is_due(&self, event: &EventRecord) -> bool {
        use std::hash::{DefaultHasher, Hash, Hasher};
        let mut hasher = DefaultHasher::new();
        (format!("{:?}", event.target), &event.reason, &event.message).hash(&mut hasher);
        let (key, now) = (hasher.finish(), Instant::now());
        let mut seen = self.seen.lock().unwrap_or_else(PoisonError::into_inner);
        let is_recent = |last: &Instant| now.duration_since(*last) < QUIET;
        if seen.get(&key).is_some_and(is_recent) {
            return false;
        }
        if seen.len() >= REMEMBERED {
            seen.retain(|_, last| is_recent(last));
        }
        if seen.len() >= REMEMBERED {
            seen.clear(); // more distinct events than that per minute: each may be logged once more
        }
        seen.insert(key, now);
        true
    }
}

impl EventSink for EventLog {
    fn record(&self, event: EventRecord) {
        if !self.is_due(&event) {
            return;
        }
        let (object, path, kind) = match &event.target {
            EventTarget::Pod { pod, field_path } => (pod.object_name(), field_path.clone().unwrap_or_default(), "Pod"),
            EventTarget::Node => (self.node.clone(), String::new(), "Node"),
            EventTarget::Storage { kind, namespace, name, .. } => {
                let object = if namespace.is_empty() { name.clone() } else { format!("{namespace}/{name}") };
                (object, String::new(), *kind)
            }
        };
        let reason = &*event.reason;
        match event.kind {
            EventKind::Normal => {
                info!(object, fieldPath = path, kind, r#type = "Normal", reason, eventMessage = %event.message, "Event occurred");
            }
            EventKind::Warning => {
                warn!(object, fieldPath = path, kind, r#type = "Warning", reason, eventMessage = %event.message, "Event occurred");
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use berth_types::PodRef;

    #[tokio::test(start_paused = true)]
    async fn the_same_event_is_logged_once_a_minute() {
        let log = EventLog::new("node");
        let pod = PodRef { uid: "u".into(), name: "p".into(), namespace: "n".into() };
        let (one, other) = (EventRecord::warning(&pod, "BackOff", "a"), EventRecord::warning(&pod, "BackOff", "b"));
        assert!(log.is_due(&one) && !log.is_due(&one) && log.is_due(&other));
        tokio::time::advance(QUIET).await;
        assert!(log.is_due(&one) && !log.is_due(&one));
    }

    #[tokio::test(start_paused = true)]
    async fn a_flood_of_different_events_makes_no_memory() {
        let log = EventLog::new("node");
        let pod = PodRef { uid: "u".into(), name: "p".into(), namespace: "n".into() };
        for i in 0..3 * REMEMBERED {
            assert!(log.is_due(&EventRecord::warning(&pod, "BackOff", i.to_string())));
            assert!(log.seen.lock().expect("whole").len() <= REMEMBERED);
        }
    }
}
