//! Background writer of the allocation checkpoint: pod starts never wait for the disk.
//!
//! Admissions are batched and written shortly after the first of them; an admission lost in a crash is
//! repeated after the restart. A granted resize is a synchronous request, answered once it is on disk,
//! because a grant must outlive the agent (spec 02a §8.3: a checkpoint error holds it back).

use std::{io, sync::Arc, time::Duration};

use tokio::{
    sync::{Notify, mpsc, oneshot},
    time::{Instant, sleep_until},
};
use tokio_util::sync::CancellationToken;
use tracing::error;

use super::{Allocations, Checkpoint};
use berth_types::resource_state::ResourceEntries;

/// Debounce from the first unwritten admission to the write: longer than a pod takes to start, because
/// a runtime on the same disk would wait for our fsync.
const GATHER: Duration = Duration::from_secs(1);
/// Retry delay after a failed write.
const RETRY: Duration = Duration::from_secs(10);

/// Request to write these entries before the caller continues.
struct WriteRequest {
    entries: ResourceEntries,
    written: oneshot::Sender<io::Result<()>>,
}

/// The allocator's handle to the writer.
pub(super) struct WriterHandle {
    dirty: Arc<Notify>,
    orders: mpsc::Sender<WriteRequest>,
}

/// Owner of the checkpoint file; run it as a task.
pub struct Writer {
    checkpoint: Checkpoint,
    shared: Allocations,
    dirty: Arc<Notify>,
    orders: mpsc::Receiver<WriteRequest>,
}

pub(super) fn pair(checkpoint: Checkpoint, shared: Allocations) -> (WriterHandle, Writer) {
    let dirty = Arc::new(Notify::new());
    let (sender, orders) = mpsc::channel(1);
    let writer = Writer { checkpoint, shared, dirty: dirty.clone(), orders };
    (WriterHandle { dirty, orders: sender }, writer)
}

impl WriterHandle {
    /// Schedules a write of the shared allocations.
    pub(super) fn schedule_write(&self) {
        self.dirty.notify_one();
    }

    /// Returns once these entries are on disk.
    ///
    /// # Errors
    /// The write failed, or the writer has ended.
    pub(super) async fn write(&self, entries: ResourceEntries) -> io::Result<()> {
        let ended = || io::Error::other("allocation writer stopped");
        let (written, answer) = oneshot::channel();
        self.orders.send(WriteRequest { entries, written }).await.map_err(|_| ended())?;
        answer.await.unwrap_or_else(|_| Err(ended()))
    }
}

impl Writer {
    /// Writes after changes until stopped, then flushes pending changes.
    pub async fn run(mut self, stop: CancellationToken) {
        let mut due: Option<Instant> = None;
        loop {
            tokio::select! {
                biased;
                () = stop.cancelled() => break,
                Some(order) = self.orders.recv() => {
                    let done = self.checkpoint.store(&order.entries).await;
                    let _ = order.written.send(done); // the caller may have been stopped
                }
                () = self.dirty.notified() => due = due.or_else(|| Some(Instant::now() + GATHER)),
                () = at(due) => due = self.save().await.then(|| Instant::now() + RETRY),
            }
        }
        self.save().await;
    }

    /// Writes the shared allocations; returns whether to retry.
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
