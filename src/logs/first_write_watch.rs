//! inotify watches for the first write to idle logs.
//!
//! One inotify instance, a one-shot watch per log. Logs that cannot be watched are checked in the
//! periodic round.

use std::{collections::HashMap, io, path::PathBuf};

use futures::StreamExt;
use inotify::{EventMask, EventStream, Inotify, WatchDescriptor, WatchMask, Watches};
use tracing::debug;

/// Size of the event buffer in bytes.
const EVENTS: usize = 4096;

/// Adds watches; blocks only like a file operation.
#[derive(Clone)]
pub struct WatchAdder(Option<Watches>);

/// inotify instance with its watches; see the module documentation.
pub struct FirstWriteWatcher {
    events: Option<EventStream<Vec<u8>>>,
    armer: WatchAdder,
    logs: HashMap<WatchDescriptor, PathBuf>,
}

impl WatchAdder {
    /// Adds a one-shot watch for the next write to a log; `None` if that fails.
    pub fn arm(&mut self, log: &PathBuf) -> Option<WatchDescriptor> {
        self.0.as_mut()?.add(log, WatchMask::MODIFY | WatchMask::ONESHOT).ok()
    }
}

impl FirstWriteWatcher {
    /// Creates the instance without watches. Must be called within a Tokio runtime.
    pub fn new() -> Self {
        let opened = || -> io::Result<_> {
            let inotify = Inotify::init()?;
            let watches = inotify.watches();
            Ok((inotify.into_event_stream(vec![0; EVENTS])?, watches))
        };
        let (events, watches) = match opened() {
            Ok((events, watches)) => (Some(events), Some(watches)),
            Err(err) => {
                debug!(%err, "Failed to create inotify watch for log writes, falling back to polling");
                (None, None)
            }
        };
        Self { events, armer: WatchAdder(watches), logs: HashMap::new() }
    }

    /// Returns a handle that adds watches.
    pub fn armer(&self) -> WatchAdder {
        self.armer.clone()
    }

    /// Records an added watch.
    pub fn armed(&mut self, watch: WatchDescriptor, log: PathBuf) {
        self.logs.insert(watch, log);
    }

    /// Waits for the first write to a log; pending forever without inotify. Cancel-safe.
    pub async fn next(&mut self) -> PathBuf {
        loop {
            let Some(events) = &mut self.events else { return std::future::pending().await };
            match events.next().await {
                // The end of a watch is a separate event, even if there was no other.
                Some(Ok(event)) if event.mask.contains(EventMask::IGNORED) => {
                    self.logs.remove(&event.wd);
                }
                Some(Ok(event)) => {
                    if let Some(log) = self.logs.remove(&event.wd) {
                        return log;
                    }
                }
                Some(Err(_)) | None => self.events = None,
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use std::{fs, io::Write, time::Duration};

    use tokio::time::timeout;

    use super::*;

    #[tokio::test]
    async fn the_first_write_is_reported_once() {
        let dir = tempfile::tempdir().expect("a folder");
        let log = dir.path().join("0.log");
        let mut wakes = FirstWriteWatcher::new();
        assert!(wakes.armer().arm(&log).is_none(), "there is none");
        let mut file = fs::File::create(&log).expect("created");
        for _ in 0..2 {
            let watch = wakes.armer().arm(&log).expect("watched");
            wakes.armed(watch, log.clone());
            for _ in 0..3 {
                file.write_all(b"line\n").expect("written");
            }
            assert_eq!(timeout(Duration::from_secs(60), wakes.next()).await.expect("received"), log);
            assert!(timeout(Duration::from_millis(50), wakes.next()).await.is_err(), "once");
            assert!(wakes.logs.is_empty());
        }
    }
}
