//! Shared inotify instance for all log followers.
//!
//! A user may have 128 inotify instances, for all processes of root together; one per follower would
//! use up those of the whole machine (and later followers would depend on the tick). So there is one,
//! opened with the first follower and closed after the last, and a task that notifies each follower of
//! changes in its directory. Directories are watched, since a rename would lose a watch on the file. If
//! no watch can be added, a follower depends on the tick alone.

use std::{
    collections::HashMap,
    io,
    path::Path,
    sync::{Arc, Mutex, MutexGuard, PoisonError, Weak},
    time::Duration,
};

use futures::StreamExt;
use inotify::{Event, EventMask, EventStream, Inotify, WatchDescriptor, WatchMask};
use tokio::{sync::watch, task::AbortHandle, time::timeout};
use tracing::debug;

/// Period of re-checks without any event.
const TICK: Duration = Duration::from_secs(1);
/// Size of the event buffer in bytes.
const EVENTS: usize = 4096;
/// Maximum number of events processed per lock.
const BURST: usize = 64;

/// Handle to the shared instance.
#[derive(Clone, Default)]
pub struct Watches(Arc<Mutex<WatchState>>);

#[derive(Default)]
struct WatchState {
    kernel: Option<Kernel>,
    folders: HashMap<WatchDescriptor, Folder>,
}

/// The instance, and the task that reads its events.
struct Kernel {
    watches: inotify::Watches,
    task: AbortHandle,
}

impl Drop for Kernel {
    fn drop(&mut self) {
        self.task.abort();
    }
}

/// A watched directory.
struct Folder {
    followers: usize,
    moved: watch::Sender<()>,
}

impl Watches {
    /// Watches the directory of a log from now on.
    pub fn watch(&self, log: &Path) -> Watch {
        let added = log.parent().ok_or(io::ErrorKind::InvalidInput.into()).and_then(|folder| self.add(folder));
        if let Err(error) = &added {
            debug!(path = %log.display(), err = %error, "Failed to watch log directory");
        }
        Watch { watches: self.clone(), folder: added.ok() }
    }

    fn state(&self) -> MutexGuard<'_, WatchState> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn add(&self, folder: &Path) -> io::Result<(WatchDescriptor, watch::Receiver<()>)> {
        let mask = WatchMask::MODIFY | WatchMask::CREATE | WatchMask::MOVE | WatchMask::DELETE | WatchMask::ATTRIB;
        let mut state = self.state();
        if state.kernel.is_none() {
            state.kernel = Some(open(Arc::downgrade(&self.0))?);
        }
        let kernel = state.kernel.as_mut().ok_or(io::ErrorKind::NotFound)?;
        let descriptor = match kernel.watches.add(folder, mask) {
            Ok(descriptor) => descriptor,
            Err(error) => {
                state.close_unused();
                return Err(error);
            }
        };
        let new = || Folder { followers: 0, moved: watch::channel(()).0 };
        let known = state.folders.entry(descriptor.clone()).or_insert_with(new);
        known.followers += 1;
        Ok((descriptor, known.moved.subscribe()))
    }

    fn leave(&self, descriptor: &WatchDescriptor) {
        let mut state = self.state();
        let Some(folder) = state.folders.get_mut(descriptor) else { return };
        folder.followers -= 1;
        if folder.followers == 0 {
            state.folders.remove(descriptor);
            if let Some(kernel) = &mut state.kernel {
                let _ = kernel.watches.remove(descriptor.clone()); // it may be gone with its directory
            }
        }
        state.close_unused();
    }
}

impl WatchState {
    fn close_unused(&mut self) {
        if self.folders.is_empty() {
            self.kernel = None;
        }
    }

    fn dispatch<T>(&self, event: &Event<T>) {
        if event.mask.contains(EventMask::Q_OVERFLOW) {
            // The lost events may concern any follower.
            for folder in self.folders.values() {
                folder.moved.send_replace(());
            }
        } else if let Some(folder) = self.folders.get(&event.wd) {
            folder.moved.send_replace(());
        }
    }
}

fn open(state: Weak<Mutex<WatchState>>) -> io::Result<Kernel> {
    let inotify = Inotify::init()?;
    let watches = inotify.watches();
    let events = inotify.into_event_stream(vec![0; EVENTS])?;
    let task = tokio::spawn(pass_on(events, state)).abort_handle();
    Ok(Kernel { watches, task })
}

async fn pass_on(events: EventStream<Vec<u8>>, state: Weak<Mutex<WatchState>>) {
    let mut bursts = events.ready_chunks(BURST);
    while let Some(burst) = bursts.next().await {
        let Some(state) = state.upgrade() else { return };
        let mut state = state.lock().unwrap_or_else(PoisonError::into_inner);
        for event in &burst {
            match event {
                Ok(event) => state.dispatch(event),
                // Followers observe closed channels, and depend on the tick.
                Err(error) => {
                    debug!(err = %error, "Watch of log directories failed");
                    state.folders.clear();
                    state.kernel = None;
                    return;
                }
            }
        }
    }
}

/// Watch of one follower.
pub struct Watch {
    watches: Watches,
    folder: Option<(WatchDescriptor, watch::Receiver<()>)>,
}

impl Watch {
    /// Waits for a change in the directory, at most for one tick.
    pub async fn changed(&mut self) {
        let Some((_, moved)) = &mut self.folder else {
            tokio::time::sleep(TICK).await;
            return;
        };
        if let Ok(Err(_)) = timeout(TICK, moved.changed()).await {
            self.folder = None;
        }
    }
}

impl Drop for Watch {
    fn drop(&mut self) {
        if let Some((descriptor, _)) = &self.folder {
            self.watches.leave(descriptor);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn followers_share_one_instance_and_the_last_closes_it() {
        let (a, b) = (tempfile::tempdir().expect("a folder"), tempfile::tempdir().expect("a folder"));
        let watches = Watches::default();
        let mut of_a: Vec<Watch> = (0..200).map(|_| watches.watch(&a.path().join("0.log"))).collect();
        let mut of_b = watches.watch(&b.path().join("0.log"));
        assert_eq!(watches.state().folders.len(), 2);
        std::fs::write(a.path().join("0.log"), "x").expect("written");
        for watch in &mut of_a {
            let (_, moved) = watch.folder.as_mut().expect("watched");
            timeout(Duration::from_secs(20), moved.changed()).await.expect("in time").expect("received");
        }
        assert!(!of_b.folder.as_mut().expect("watched").1.has_changed().expect("open"), "that was elsewhere");
        drop(of_a);
        assert_eq!(watches.state().folders.len(), 1);
        std::fs::write(b.path().join("0.log"), "x").expect("written");
        of_b.changed().await;
        drop(of_b);
        assert!(watches.state().kernel.is_none());
        let missing = watches.watch(&a.path().join("gone/0.log"));
        assert!(missing.folder.is_none() && watches.state().kernel.is_none());
    }
}
