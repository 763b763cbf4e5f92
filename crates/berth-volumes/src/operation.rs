//! One operation on a volume, as long as anything of it runs.
//!
//! An owner gives up on an operation at its deadline; what blocks in a file system that hangs goes on all the same,
//! and so does a program in it. Whatever was begun keeps a copy of this, and with it the volume's turn: nothing else
//! is begun on the volume before that, so that a volume that hangs takes one thread and not one with every attempt.
//! Behaviour: spec 07 §10, §17.

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
    device::OpError,
    hands::{HandError, Hands},
};
use berth_metrics::VolumeMetrics;
use berth_ports::EventSink;

/// What an operation needs of others.
#[derive(Default)]
pub struct OperationDeps {
    /// Threads that may block.
    pub hands: Hands,
    /// Where it is told that something takes long.
    pub events: Option<Arc<dyn EventSink>>,
    /// What is counted.
    pub metrics: Option<VolumeMetrics>,
    /// Where tasks are counted.
    pub tasks: TaskTracker,
    /// Nobody wants it any more, or the agent stops.
    pub unwanted: CancellationToken,
    /// The agent stops.
    pub stop: CancellationToken,
}

/// The operation. Copies are the same one.
#[derive(Clone, Default)]
pub struct Operation {
    inner: Arc<Inner>,
}

#[derive(Default)]
struct Inner {
    deps: OperationDeps,
    /// Nothing else is done with the volume meanwhile.
    _turn: Option<OwnedSemaphorePermit>,
    signs: AtomicU64,
}

impl std::fmt::Debug for Operation {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Operation").field("signs", &self.signs()).finish_non_exhaustive()
    }
}

impl Operation {
    /// Begins, in the volume's turn.
    pub fn new(turn: OwnedSemaphorePermit, deps: OperationDeps) -> Self {
        Self { inner: Arc::new(Inner { deps, _turn: Some(turn), signs: AtomicU64::new(0) }) }
    }

    /// What it needs of others.
    pub fn deps(&self) -> &OperationDeps {
        &self.inner.deps
    }

    /// Something of it is done: it takes long, and does not hang.
    pub fn is_alive(&self) {
        self.inner.signs.fetch_add(1, Ordering::Relaxed);
    }

    /// Moves while something is done.
    pub fn signs(&self) -> u64 {
        self.inner.signs.load(Ordering::Relaxed)
    }

    /// Whether nobody wants it any more.
    pub fn is_unwanted(&self) -> bool {
        self.deps().unwanted.is_cancelled()
    }

    /// Does it where it may block.
    ///
    /// # Errors
    /// What the work says, as one that may have happened where it came to no end.
    pub async fn blocking<T: Send + 'static>(
        &self,
        work: impl FnOnce() -> Result<T, OpError> + Send + 'static,
    ) -> Result<T, OpError> {
        let own = self.clone();
        let done = self.deps().hands.work(move || {
            let _own = own;
            work()
        });
        match done.await {
            Ok(done) => done,
            Err(error @ HandError::Crowded) => Err(OpError::transient(error.to_string())),
            Err(error @ HandError::Aborted(_)) => Err(OpError::uncertain(error.to_string())),
        }
    }

    /// Runs a program to its end. Nothing kills it where that takes longer than anybody waits: a file system is not
    /// left half made, and what hangs in the kernel could not be killed.
    ///
    /// # Errors
    /// It cannot be started.
    pub async fn run(&self, mut command: Command) -> io::Result<Output> {
        let (own, stop) = (self.clone(), self.deps().stop.clone());
        let running = self.deps().tasks.spawn(async move {
            let _own = own;
            stop.run_until_cancelled(command.output()).await
        });
        match running.await {
            Ok(Some(done)) => done,
            Ok(None) => Err(io::Error::other("the agent stops")),
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
