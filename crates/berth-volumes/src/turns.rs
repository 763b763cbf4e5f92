//! One blocking piece of work per pod at a time, with a deadline.
//!
//! Work that outlives its deadline goes on in its thread, because nothing can stop it, and keeps
//! its pod's turn: what comes next for that pod waits until its own deadline and is told so. Other
//! pods do not notice, as long as there are threads (`hands.rs`).

use std::{
    collections::HashMap,
    sync::{Arc, Mutex, MutexGuard, PoisonError, Weak},
    time::Duration,
};

use tokio::{sync::Semaphore, time::timeout};

use super::hands::{HandError, Hands};
use berth_types::PodUid;

/// The work did not end in time, or not well.
#[derive(Clone, PartialEq, Eq, Debug, thiserror::Error)]
pub enum TurnError {
    /// The pod's previous work still hangs.
    #[error("context deadline exceeded: an earlier operation on the same volumes has not returned")]
    Busy,
    /// The work itself hangs.
    #[error("context deadline exceeded")]
    TimedOut,
    /// It was not done, or not to its end.
    #[error(transparent)]
    NotDone(#[from] HandError),
}

/// Work that comes one after the other.
#[derive(Clone, Debug)]
pub struct Lane {
    hands: Hands,
    turn: Arc<Semaphore>,
}

impl Lane {
    /// Nothing is done yet.
    pub fn new(hands: Hands) -> Self {
        Self { hands, turn: Arc::new(Semaphore::new(1)) }
    }

    /// Does the work in a thread when its turn has come.
    ///
    /// # Errors
    /// If the deadline passes while waiting or working.
    pub async fn take<T: Send + 'static>(
        &self,
        limit: Duration,
        work: impl FnOnce() -> T + Send + 'static,
    ) -> Result<T, TurnError> {
        let permit = timeout(limit, self.turn.clone().acquire_owned()).await;
        let permit = permit.map_err(|_| TurnError::Busy)?.map_err(|_| TurnError::Busy)?;
        let turn = self.turn.clone();
        let done = self.hands.work(move || {
            let _turn = (turn, permit);
            work()
        });
        Ok(timeout(limit, done).await.map_err(|_| TurnError::TimedOut)??)
    }
}

/// Work that is done once: where it outlived its deadline, who asks next gets what it brought.
#[derive(Debug)]
pub struct Once<T> {
    lane: Lane,
    brought: Arc<Mutex<Option<T>>>,
}

impl<T: Send + 'static> Once<T> {
    /// Nothing is done yet.
    pub fn new(hands: Hands) -> Self {
        Self { lane: Lane::new(hands), brought: Arc::default() }
    }

    /// Does the work, or waits for what was begun before.
    ///
    /// # Errors
    /// If the deadline passes while waiting or working.
    pub async fn take(&self, limit: Duration, work: impl FnOnce() -> T + Send + 'static) -> Result<T, TurnError> {
        let brought = self.brought.clone();
        let taken = self.lane.take(limit, move || {
            if held(&brought).is_none() {
                let done = work();
                *held(&brought) = Some(done);
            }
        });
        taken.await?;
        // Several may have waited for one.
        held(&self.brought).take().ok_or(TurnError::Busy)
    }
}

fn held<T>(brought: &Mutex<T>) -> MutexGuard<'_, T> {
    brought.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Whose turn it is. A pod without work takes no memory.
#[derive(Debug, Default)]
pub struct Turns {
    hands: Hands,
    pods: Mutex<HashMap<PodUid, Weak<Semaphore>>>,
}

impl Turns {
    /// Nothing is done yet.
    pub fn new(hands: Hands) -> Self {
        Self { hands, pods: Mutex::default() }
    }

    /// Does the work in a thread when it is the pod's turn.
    ///
    /// # Errors
    /// If the deadline passes while waiting or working.
    pub async fn take<T: Send + 'static>(
        &self,
        pod: &PodUid,
        limit: Duration,
        work: impl FnOnce() -> T + Send + 'static,
    ) -> Result<T, TurnError> {
        Lane { hands: self.hands.clone(), turn: self.of(pod) }.take(limit, work).await
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

    /// For what hangs.
    const LIMIT: Duration = Duration::from_millis(50);
    /// For what ends.
    const PATIENCE: Duration = Duration::from_secs(60);

    #[tokio::test]
    async fn work_that_hangs_holds_up_its_pod_only() {
        let turns = Turns::default();
        let (release, hangs) = mpsc::channel::<()>();
        let stuck = turns.take(&"a".into(), LIMIT, move || hangs.recv()).await;
        assert_eq!(stuck.map(drop), Err(TurnError::TimedOut));
        assert_eq!(turns.take(&"a".into(), LIMIT, || 1).await, Err(TurnError::Busy));
        assert_eq!(turns.take(&"b".into(), PATIENCE, || 2).await, Ok(2));
        drop(release);
        assert_eq!(turns.take(&"a".into(), PATIENCE, || 3).await, Ok(3));
        assert!(turns.pods.lock().expect("not poisoned").len() <= 2);
    }

    #[tokio::test]
    async fn what_took_too_long_is_not_begun_again() {
        let once = Once::new(Hands::new(2));
        let (release, hangs) = mpsc::channel::<()>();
        let late = once.take(LIMIT, move || {
            let _released = hangs.recv();
            1
        });
        assert_eq!(late.await, Err(TurnError::TimedOut));
        assert_eq!(once.take(LIMIT, || 2).await, Err(TurnError::Busy));
        drop(release);
        assert_eq!(once.take(PATIENCE, || 3).await, Ok(1));
        assert_eq!(once.take(PATIENCE, || 4).await, Ok(4), "what was taken is done anew");
    }

    #[tokio::test]
    async fn a_panic_is_an_error_of_its_pod() {
        let turns = Turns::default();
        let failed = turns.take(&"a".into(), PATIENCE, || panic!("on purpose")).await;
        let aborted = HandError::Aborted("panic: on purpose".to_owned());
        assert_eq!(failed, Err::<(), _>(TurnError::NotDone(aborted)));
        assert_eq!(turns.take(&"a".into(), PATIENCE, || 1).await, Ok(1));
    }
}
