//! Bounded pool of threads for blocking calls that may hang.
//!
//! A call that hangs in a file system cannot be stopped, only abandoned: it keeps its thread until it returns, also
//! after its caller has timed out. The bound keeps the other threads of the process available.

use std::{sync::Arc, time::Duration};

use tokio::{sync::Semaphore, task::spawn_blocking, time::timeout};

use crate::panics::panic_message;

/// Error of a call that was not started or not completed.
#[derive(Clone, PartialEq, Eq, Debug, thiserror::Error)]
pub enum BlockingError {
    /// All threads of the pool are in use; nothing was attempted. Contains the name of the pool.
    #[error("too many operations on {0} have not returned")]
    PoolExhausted(&'static str),
    /// The call panicked, or the process stops.
    #[error("the operation was aborted: {0}")]
    Aborted(String),
}

/// Threads of the blocking pool of tokio, at most as many as a semaphore permits. Clones share them.
#[derive(Clone, Debug)]
pub struct BlockingPool {
    name: &'static str,
    permits: Arc<Semaphore>,
}

impl BlockingPool {
    /// Creates a pool of at most `threads`; `name` names the object of its work in errors.
    pub fn new(name: &'static str, threads: usize) -> Self {
        Self { name, permits: Arc::new(Semaphore::new(threads)) }
    }

    /// Runs the call on a thread of the pool, and waits at most `wait` for a free one. The call itself has no time limit.
    ///
    /// # Errors
    /// No thread becomes free in time, or the call panics.
    pub async fn run<T: Send + 'static>(
        &self,
        wait: Duration,
        call: impl FnOnce() -> T + Send + 'static,
    ) -> Result<T, BlockingError> {
        let exhausted = || BlockingError::PoolExhausted(self.name);
        let permit = match self.permits.clone().try_acquire_owned() {
            Ok(permit) => permit,
            Err(_) if wait.is_zero() => return Err(exhausted()),
            Err(_) => {
                let acquired = timeout(wait, self.permits.clone().acquire_owned()).await;
                acquired.map_err(|_| exhausted())?.map_err(|_| exhausted())?
            }
        };
        let task = spawn_blocking(move || {
            let _permit = permit;
            call()
        });
        task.await.map_err(|error| {
            let cause = error.try_into_panic().map_or_else(|error| error.to_string(), |panic| panic_message(&*panic));
            BlockingError::Aborted(cause)
        })
    }

    /// Runs the call on a thread of the pool; `None` if it panics or exceeds `limit`, the wait for a thread included.
    pub async fn run_within<T: Send + 'static>(
        &self,
        limit: Duration,
        call: impl FnOnce() -> T + Send + 'static,
    ) -> Option<T> {
        timeout(limit, self.run(limit, call)).await.ok()?.ok()
    }
}

#[cfg(test)]
mod tests {
    use std::sync::mpsc;

    use super::*;

    /// Maximum wait for a free thread.
    const WAIT: Duration = Duration::from_secs(30);

    #[tokio::test]
    async fn what_hangs_takes_no_more_than_its_share() {
        let pool = BlockingPool::new("volumes", 2);
        let mut stuck = Vec::new();
        for _ in 0..2 {
            let (release, hangs) = mpsc::channel::<()>();
            let pool = pool.clone();
            let (began, begins) = tokio::sync::oneshot::channel();
            let work = tokio::spawn(async move {
                pool.run(WAIT, move || {
                    let _sent = began.send(());
                    let _released = hangs.recv();
                })
                .await
            });
            begins.await.expect("it begins");
            // The caller abandons the work.
            work.abort();
            stuck.push(release);
        }
        assert_eq!(pool.permits.available_permits(), 0);
        let next = timeout(Duration::from_millis(20), pool.run(WAIT, || 1)).await;
        assert!(next.is_err(), "both still hang: {next:?}");
        let refused = pool.run(Duration::ZERO, || 1).await.map_err(|error| error.to_string());
        assert_eq!(refused, Err("too many operations on volumes have not returned".to_owned()));
        stuck.pop();
        assert_eq!(pool.run(WAIT, || 2).await, Ok(2));
    }

    #[tokio::test]
    async fn a_panic_is_reported_and_releases_its_thread() {
        let pool = BlockingPool::new("volumes", 1);
        let failed = pool.run(WAIT, || -> u8 { panic!("on {}", "purpose") }).await;
        assert_eq!(failed, Err(BlockingError::Aborted("panic: on purpose".to_owned())));
        assert_eq!(pool.run(WAIT, || 1).await, Ok(1));
    }

    #[tokio::test]
    async fn work_that_hangs_is_not_followed_by_more() {
        let pool = BlockingPool::new("disks", 1);
        let (release, hang) = mpsc::channel::<()>();
        let stuck = pool
            .run_within(Duration::from_millis(1), move || {
                let _ = hang.recv();
            })
            .await;
        assert_eq!(stuck, None);
        assert_eq!(pool.run_within(Duration::from_millis(1), || 1).await, None, "no thread is free");
        drop(release);
        assert_eq!(pool.run_within(Duration::from_secs(60), || 1).await, Some(1));
    }
}
