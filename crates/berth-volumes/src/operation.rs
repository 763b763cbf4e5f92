//! Volume operation: keeps the volume's permit until all of its blocking work has returned.
//!
//! The owner task abandons an operation at its timeout; a blocking call in a hanging file system continues anyway, and
//! so does a program. All such work keeps a clone of the operation and with it the permit of the volume: nothing else
//! starts on the volume before it returns, so that a hanging volume takes one thread rather than one per attempt.
//! Implements spec 07 §10, §17.

use std::{
    io,
    process::Output,
    sync::{
        Arc,
        atomic::{AtomicU64, Ordering},
    },
};

use tokio::{process::Command, sync::OwnedSemaphorePermit};
use tokio_util::{sync::CancellationToken, task::TaskTracker};

use super::{
    attachable::OpError,
    blocking_pools::{self, WAIT},
};
use berth_metrics::VolumeMetrics;
use berth_ports::EventSink;
use berth_sys::blocking_pool::{BlockingError, BlockingPool};

/// Dependencies of an operation.
pub struct OperationDeps {
    /// Thread pool for blocking calls.
    pub pool: BlockingPool,
    /// Sink for events about slow operations.
    pub events: Option<Arc<dyn EventSink>>,
    /// Volume metrics.
    pub metrics: Option<VolumeMetrics>,
    /// Tracker of spawned tasks.
    pub tasks: TaskTracker,
    /// Canceled when the operation is no longer needed, or the agent stops.
    pub canceled: CancellationToken,
    /// Canceled when the agent stops.
    pub stop: CancellationToken,
}

impl Default for OperationDeps {
    fn default() -> Self {
        Self {
            pool: blocking_pools::operations(),
            events: None,
            metrics: None,
            tasks: TaskTracker::default(),
            canceled: CancellationToken::default(),
            stop: CancellationToken::default(),
        }
    }
}

/// Handle to one operation. Clones share it.
#[derive(Clone, Default)]
pub struct Operation {
    inner: Arc<OperationInner>,
}

#[derive(Default)]
struct OperationInner {
    deps: OperationDeps,
    /// Prevents other operations on the volume until the last clone is dropped.
    _turn: Option<OwnedSemaphorePermit>,
    signs: AtomicU64,
}

impl std::fmt::Debug for Operation {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Operation").field("signs", &self.progress()).finish_non_exhaustive()
    }
}

impl Operation {
    /// Starts an operation with the volume's permit.
    pub fn new(turn: OwnedSemaphorePermit, deps: OperationDeps) -> Self {
        Self { inner: Arc::new(OperationInner { deps, _turn: Some(turn), signs: AtomicU64::new(0) }) }
    }

    /// Dependencies of the operation.
    pub fn deps(&self) -> &OperationDeps {
        &self.inner.deps
    }

    /// Records progress: the operation is slow but does not hang.
    pub fn report_progress(&self) {
        self.inner.signs.fetch_add(1, Ordering::Relaxed);
    }

    /// Progress counter; unchanged while nothing is done.
    pub fn progress(&self) -> u64 {
        self.inner.signs.load(Ordering::Relaxed)
    }

    /// Whether the operation is canceled.
    pub fn is_canceled(&self) -> bool {
        self.deps().canceled.is_cancelled()
    }

    /// Runs blocking work on the thread pool.
    ///
    /// # Errors
    /// The error of the work; a transient one if no thread is available, an uncertain one if the work is aborted.
    pub async fn blocking<T: Send + 'static>(
        &self,
        work: impl FnOnce() -> Result<T, OpError> + Send + 'static,
    ) -> Result<T, OpError> {
        let own = self.clone();
        let done = self.deps().pool.run(WAIT, move || {
            let _own = own;
            work()
        });
        match done.await {
            Ok(done) => done,
            Err(error @ BlockingError::PoolExhausted(_)) => Err(OpError::transient(error.to_string())),
            Err(error @ BlockingError::Aborted(_)) => Err(OpError::uncertain(error.to_string())),
        }
    }

    /// Runs a program to its end. No timeout kills it: a file system must not be left half created, and a program that
    /// hangs in the kernel cannot be killed.
    ///
    /// # Errors
    /// If the program cannot be started, or the agent stops.
    pub async fn run(&self, mut command: Command) -> io::Result<Output> {
        let (own, stop) = (self.clone(), self.deps().stop.clone());
        let running = self.deps().tasks.spawn(async move {
            let _own = own;
            stop.run_until_cancelled(command.output()).await
        });
        match running.await {
            Ok(Some(done)) => done,
            Ok(None) => Err(io::Error::other("the agent is shutting down")),
            Err(error) => Err(io::Error::other(error)),
        }
    }
}

#[cfg(test)]
mod tests {
    use std::{sync::mpsc, time::Duration};

    use tokio::{sync::Semaphore, time::timeout};

    use super::*;

    #[tokio::test]
    async fn what_runs_on_keeps_the_turn() {
        let turn = Arc::new(Semaphore::new(1));
        let operation = Operation::new(turn.clone().try_acquire_owned().expect("free"), OperationDeps::default());
        let (release, hangs) = mpsc::channel::<()>();
        let stuck = operation.blocking(move || {
            let _released = hangs.recv();
            Ok(())
        });
        assert!(timeout(Duration::from_millis(20), stuck).await.is_err());
        let folder = tempfile::tempdir().expect("a folder");
        let pipe = folder.path().join("pipe");
        let mut reads = Command::new("sh");
        reads.arg("-c").arg(format!("mkfifo {0} && cat {0}", pipe.display()));
        let program = timeout(Duration::from_millis(20), operation.run(reads)).await;
        assert!(program.is_err(), "{program:?}");
        drop(operation);
        assert_eq!(turn.available_permits(), 0);
        drop(release);
        let written = tokio::task::spawn_blocking(move || {
            while std::fs::OpenOptions::new().write(true).open(&pipe).is_err() {
                std::thread::yield_now();
            }
        });
        timeout(Duration::from_secs(60), written).await.expect("in time").expect("written");
        let free = timeout(Duration::from_secs(60), turn.acquire()).await;
        assert!(free.is_ok(), "both returned");
    }

    #[tokio::test]
    async fn a_panic_may_have_done_something() {
        let failed = Operation::default().blocking(|| -> Result<(), OpError> { panic!("on purpose") }).await;
        assert_eq!(failed, Err(OpError::uncertain("the operation was aborted: panic: on purpose")));
    }
}
