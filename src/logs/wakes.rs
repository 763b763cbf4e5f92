//! Hears of the first write to logs that nobody wrote to: one inotify instance, a watch per log that ends with its first
//! event. What cannot be watched is found by the round of all logs.

use std::{collections::HashMap, io, path::PathBuf};

use futures::StreamExt;
use inotify::{EventMask, EventStream, Inotify, WatchDescriptor, WatchMask, Watches};
use tracing::debug;

/// Bytes of events read at once.
const EVENTS: usize = 4096;

/// Sets watches; blocks as little as a file does.
#[derive(Clone)]
pub struct Armer(Option<Watches>);

/// See the file's documentation.
pub struct Wakes {
    events: Option<EventStream<Vec<u8>>>,
    armer: Armer,
    logs: HashMap<WatchDescriptor, PathBuf>,
}

impl Armer {
    /// Has the next write to a log told; `None` where that cannot be.
    pub fn arm(&mut self, log: &PathBuf) -> Option<WatchDescriptor> {
        self.0.as_mut()?.add(log, WatchMask::MODIFY | WatchMask::ONESHOT).ok()
    }
}

impl Wakes {
    /// Hears of no log yet. Must be called within a runtime.
    pub fn new() -> Self {
        let opened = || -> io::Result<_> {
            let inotify = Inotify::init()?;
            let watches = inotify.watches();
            Ok((inotify.into_event_stream(vec![0; EVENTS])?, watches))
        };
        let (events, watches) = match opened() {
            Ok((events, watches)) => (Some(events), Some(watches)),
            Err(err) => {
                debug!(%err, "The kernel does not tell of writes to logs");
                (None, None)
            }
        };
        Self { events, armer: Armer(watches), logs: HashMap::new() }
    }

    /// Sets watches.
    pub fn armer(&self) -> Armer {
        self.armer.clone()
    }

    /// Such a watch was set.
    pub fn armed(&mut self, watch: WatchDescriptor, log: PathBuf) {
        self.logs.insert(watch, log);
    }

    /// Waits for the first write to a log; for ever where nothing is told. Safe to drop.
    pub async fn next(&mut self) -> PathBuf {
        loop {
            let Some(events) = &mut self.events else { return std::future::pending().await };
            match events.next().await {
                // Their end comes with a word of its own, also where there was no event.
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
    async fn the_first_write_is_told_once() {
        let dir = tempfile::tempdir().expect("a folder");
        let log = dir.path().join("0.log");
        let mut wakes = Wakes::new();
        assert!(wakes.armer().arm(&log).is_none(), "there is none");
        let mut file = fs::File::create(&log).expect("created");
        for _ in 0..2 {
            let watch = wakes.armer().arm(&log).expect("watched");
            wakes.armed(watch, log.clone());
            for _ in 0..3 {
                file.write_all(b"line\n").expect("written");
            }
            assert_eq!(timeout(Duration::from_secs(60), wakes.next()).await.expect("told"), log);
            assert!(timeout(Duration::from_millis(50), wakes.next()).await.is_err(), "once");
            assert!(wakes.logs.is_empty());
        }
    }
}
