//! Brings allocations to disk beside the sync loop: a pod's start never waits for a disk.
//!
//! Admissions are written together, soon after the first of them; what a crash loses in between
//! is admitted anew. A granted resize is asked for by name and answered once it is on disk, for
//! what was granted must outlive the agent (spec 02a §8.3: a checkpoint error holds it back).

use std::{io, sync::Arc, time::Duration};

use tokio::{
    sync::{Notify, mpsc, oneshot},
    time::{Instant, sleep_until},
};
use tokio_util::sync::CancellationToken;
use tracing::error;

use super::{Allocations, Checkpoint};
use berth_types::resource_state::ResourceEntries;

/// From the first unwritten admission to the write: longer than a pod takes to start, because a
/// runtime on the same disk would wait for our fsync.
const GATHER: Duration = Duration::from_secs(1);
/// After a failed write.
const RETRY: Duration = Duration::from_secs(10);

/// Entries that must be on disk before anything else happens.
struct Order {
    entries: ResourceEntries,
    written: oneshot::Sender<io::Result<()>>,
}

/// How the allocator reaches the writer.
pub(super) struct WriterHandle {
    dirty: Arc<Notify>,
    orders: mpsc::Sender<Order>,
}

/// The owner of the file; run it as a task.
pub struct Writer {
    checkpoint: Checkpoint,
    shared: Allocations,
    dirty: Arc<Notify>,
    orders: mpsc::Receiver<Order>,
}

pub(super) fn pair(checkpoint: Checkpoint, shared: Allocations) -> (WriterHandle, Writer) {
    let dirty = Arc::new(Notify::new());
    let (sender, orders) = mpsc::channel(1);
    let writer = Writer { checkpoint, shared, dirty: dirty.clone(), orders };
    (WriterHandle { dirty, orders: sender }, writer)
}

impl WriterHandle {
    /// What is shared now shall reach the disk soon.
    pub(super) fn soon(&self) {
        self.dirty.notify_one();
    }

    /// Returns once these entries are on disk.
    ///
    /// # Errors
    /// They are not: the write failed, or the writer has ended.
    pub(super) async fn now(&self, entries: ResourceEntries) -> io::Result<()> {
        let ended = || io::Error::other("the writer of allocations has ended");
        let (written, answer) = oneshot::channel();
        self.orders.send(Order { entries, written }).await.map_err(|_| ended())?;
        answer.await.unwrap_or_else(|_| Err(ended()))
    }
}

impl Writer {
    /// Writes after changes until stopped, and then what is left.
    pub async fn run(mut self, stop: CancellationToken) {
        let mut due: Option<Instant> = None;
        loop {
            tokio::select! {
                biased;
                () = stop.cancelled() => break,
                Some(order) = self.orders.recv() => {
                    let done = self.checkpoint.store(&order.entries).await;
                    let _ = order.written.send(done); // who asked may have been stopped
                }
                () = self.dirty.notified() => due = due.or_else(|| Some(Instant::now() + GATHER)),
                () = at(due) => due = self.save().await.then(|| Instant::now() + RETRY),
            }
        }
        self.save().await;
    }

    /// Writes what is shared; tells whether that must be tried again.
    async fn save(&mut self) -> bool {
        let entries = self.shared.read(|state| state.entries.clone());
        match self.checkpoint.store(&entries).await {
            Ok(()) => false,
            Err(e) => {
                error!(err = %e, path = %self.checkpoint.path().display(), "Failed to store allocated resources");
                true
            }
        }
    }
}

async fn at(due: Option<Instant>) {
    match due {
        Some(due) => sleep_until(due).await,
        None => std::future::pending().await,
    }
}
