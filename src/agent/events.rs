//! Where events go: the log, folded so that a failing pod does not flood it.
//!
//! In cluster mode the recorder sends them to the API server; standalone the log is all there
//! is (spec 01 §9 step 12).

use std::{
    num::NonZeroUsize,
    sync::{Mutex, PoisonError},
    time::Duration,
};

use lru::LruCache;
use tokio::time::Instant;
use tracing::{info, warn};

use crate::engine::ports::{Event, EventKind, EventSink, EventTarget};

/// How many distinct events are remembered for folding.
const REMEMBERED: usize = 1024;
/// The same event is logged at most this often.
const QUIET: Duration = Duration::from_secs(60);

/// Logs events; the same one at most once a minute, then with how often it occurred.
pub struct EventLog {
    seen: Mutex<LruCache<u64, (Instant, u64)>>,
}

impl EventLog {
    /// An empty memory.
    pub fn new() -> Self {
        let size = NonZeroUsize::new(REMEMBERED).expect("not zero");
        Self { seen: Mutex::new(LruCache::new(size)) }
    }

    /// `None` where the event is folded; else how often it was since it was last logged.
    fn due(&self, event: &Event) -> Option<u64> {
        use std::hash::{DefaultHasher, Hash, Hasher};
        let mut hasher = DefaultHasher::new();
        (format!("{:?}", event.target), &event.reason, &event.message).hash(&mut hasher);
        let mut seen = self.seen.lock().unwrap_or_else(PoisonError::into_inner);
        let entry = seen.get_or_insert_mut(hasher.finish(), || (Instant::now() - QUIET, 0));
        entry.1 += 1;
        if entry.1 > 1 && entry.0.elapsed() < QUIET {
            return None;
        }
        *entry = (Instant::now(), 0);
        Some(1)
    }
}

impl Default for EventLog {
    fn default() -> Self {
        Self::new()
    }
}

impl EventSink for EventLog {
    fn record(&self, event: Event) {
        if self.due(&event).is_none() {
            return;
        }
        let (object, path) = match &event.target {
            EventTarget::Pod { pod, field_path } => {
                (format!("{}/{}", pod.namespace, pod.name), field_path.clone().unwrap_or_default())
            }
            EventTarget::Node => ("node".to_owned(), String::new()),
        };
        let reason = &*event.reason;
        match event.kind {
            EventKind::Normal => {
                info!(object, fieldPath = path, kind = "Pod", r#type = "Normal", reason, message_ = %event.message, "Event occurred");
            }
            EventKind::Warning => {
                warn!(object, fieldPath = path, kind = "Pod", r#type = "Warning", reason, message_ = %event.message, "Event occurred");
            }
        }
    }
}
