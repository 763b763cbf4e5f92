//! Per-pod serialization of blocking volume work: one task per pod at a time, with a timeout.
//!
//! Work that outlives its timeout continues on its thread, because nothing can stop it, and keeps the permit of its
//! pod: the next work for that pod waits for its own timeout and returns [`PendingOperationError::Busy`]. Other pods are not
//! affected while threads are available (`blocking_pools.rs`).

use std::{
    collections::HashMap,
    sync::{Arc, Mutex, MutexGuard, PoisonError, Weak},
    time::Duration,
};

use tokio::{sync::Semaphore, time::timeout};

use super::blocking_pools::WAIT;
use berth_sys::blocking_pool::{BlockingError, BlockingPool};
use berth_types::PodUid;

/// Error of work that timed out or did not complete.
#[derive(Clone, PartialEq, Eq, Debug, thiserror::Error)]
pub enum PendingOperationError {
    /// Earlier work of the pod still hangs.
    #[error("context deadline exceeded: an earlier operation on the same volumes has not returned")]
    Busy,
    /// The work itself timed out.
    #[error("context deadline exceeded")]
    TimedOut,
    /// The work was not started or not completed.
    #[error(transparent)]
    NotDone(#[from] BlockingError),
}

/// Serialized queue of blocking work.
#[derive(Clone, Debug)]
pub struct SerialQueue {
    pool: BlockingPool,
    turn: Arc<Semaphore>,
}

impl SerialQueue {
    /// Creates an idle lane.
    pub fn new(pool: BlockingPool) -> Self {
        Self { pool, turn: Arc::new(Semaphore::new(1)) }
    }

    /// Runs the work on a thread, after all earlier work of this lane.
    ///
    /// # Errors
    /// If the timeout passes while waiting or while working.
    pub async fn take<T: Send + 'static>(
        &self,
        limit: Duration,
        work: impl FnOnce() -> T + Send + 'static,
    ) -> Result<T, PendingOperationError> {
        let permit = timeout(limit, self.turn.clone().acquire_owned()).await;
        let permit = permit.map_err(|_| PendingOperationError::Busy)?.map_err(|_| PendingOperationError::Busy)?;
        let turn = self.turn.clone();
        let done = self.pool.run(WAIT, move || {
            let _turn = (turn, permit);
            work()
        });
        Ok(timeout(limit, done).await.map_err(|_| PendingOperationError::TimedOut)??)
    }
}

/// Work that runs once: if it outlives its timeout, the next caller receives its result.
#[derive(Debug)]
pub struct Once<T> {
    lane: SerialQueue,
    result: Arc<Mutex<Option<T>>>,
}

impl<T: Send + 'static> Once<T> {
    /// Creates an instance without a result.
    pub fn new(pool: BlockingPool) -> Self {
        Self { lane: SerialQueue::new(pool), result: Arc::default() }
    }

    /// Runs the work, or waits for the work that an earlier caller started.
    ///
    /// # Errors
    /// If the timeout passes while waiting or while working.
    pub async fn take(
        &self,
        limit: Duration,
        work: impl FnOnce() -> T + Send + 'static,
    ) -> Result<T, PendingOperationError> {
        let brought = self.result.clone();
        let taken = self.lane.take(limit, move || {
            if lock(&brought).is_none() {
                let done = work();
                *lock(&brought) = Some(done);
            }
        });
        taken.await?;
        // Several callers may have waited for one result.
        lock(&self.result).take().ok_or(PendingOperationError::Busy)
    }
}

fn lock<T>(brought: &Mutex<T>) -> MutexGuard<'_, T> {
    brought.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Semaphores by pod. A pod without work takes no memory.
#[derive(Debug)]
pub struct PendingOperations {
    pool: BlockingPool,
    pods: Mutex<HashMap<PodUid, Weak<Semaphore>>>,
}

impl PendingOperations {
    /// Creates an instance without pods.
    pub fn new(pool: BlockingPool) -> Self {
        Self { pool, pods: Mutex::default() }
    }

    /// Runs the work on a thread, after all earlier work of the pod.
    ///
    /// # Errors
    /// If the timeout passes while waiting or while working.
    pub async fn take<T: Send + 'static>(
        &self,
        pod: &PodUid,
        limit: Duration,
        work: impl FnOnce() -> T + Send + 'static,
    ) -> Result<T, PendingOperationError> {
        SerialQueue { pool: self.pool.clone(), turn: self.of(pod) }.take(limit, work).await
    }

    fn of(&self, pod: &PodUid) -> Arc<Semaphore> {
        let mut all = self.pods.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(turn) = all.get(pod).and_then(Weak::upgrade) {
            return turn;
        }
        all.retain(|_, turn| turn.strong_count() > 0);
        let turn = Arc::new(Semaphore::new(1));
        all.insert(pod.clone(), Arc::downgrade(&turn));
        turn
    }
}

#[cfg(test)]
mod tests {
    use std::sync::mpsc;

    use super::*;
    use crate::blocking_pools::{self, NAME};

    /// Timeout for work that hangs.
    const LIMIT: Duration = Duration::from_millis(50);
    /// Timeout for work that completes.
    const PATIENCE: Duration = Duration::from_secs(60);

    #[tokio::test]
    async fn work_that_hangs_holds_up_its_pod_only() {
        let turns = PendingOperations::new(blocking_pools::files());
        let (release, hangs) = mpsc::channel::<()>();
        let stuck = turns.take(&"a".into(), LIMIT, move || hangs.recv()).await;
        assert_eq!(stuck.map(drop), Err(PendingOperationError::TimedOut));
        assert_eq!(turns.take(&"a".into(), LIMIT, || 1).await, Err(PendingOperationError::Busy));
        assert_eq!(turns.take(&"b".into(), PATIENCE, || 2).await, Ok(2));
        drop(release);
        assert_eq!(turns.take(&"a".into(), PATIENCE, || 3).await, Ok(3));
        assert!(turns.pods.lock().expect("not poisoned").len() <= 2);
    }

    #[tokio::test]
    async fn what_took_too_long_is_not_begun_again() {
        let once = Once::new(BlockingPool::new(NAME, 2));
        let (release, hangs) = mpsc::channel::<()>();
        let late = once.take(LIMIT, move || {
            let _released = hangs.recv();
            1
        });
        assert_eq!(late.await, Err(PendingOperationError::TimedOut));
        assert_eq!(once.take(LIMIT, || 2).await, Err(PendingOperationError::Busy));
        drop(release);
        assert_eq!(once.take(PATIENCE, || 3).await, Ok(1));
        assert_eq!(once.take(PATIENCE, || 4).await, Ok(4), "what was taken is done again");
    }

    #[tokio::test]
    async fn a_panic_is_an_error_of_its_pod() {
        let turns = PendingOperations::new(blocking_pools::files());
        let failed = turns.take(&"a".into(), PATIENCE, || panic!("on purpose")).await;
        let aborted = BlockingError::Aborted("panic: on purpose".to_owned());
        assert_eq!(failed, Err::<(), _>(PendingOperationError::NotDone(aborted)));
        assert_eq!(turns.take(&"a".into(), PATIENCE, || 1).await, Ok(1));
    }
}
