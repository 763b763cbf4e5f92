//! One blocking piece of work per pod at a time, with a deadline.
//!
//! Work that outlives its deadline goes on in its thread, because nothing can stop it, and keeps
//! its pod's turn: what comes next for that pod waits until its own deadline and is told so. Other
//! pods do not notice, as long as there are threads (`hands.rs`).

use std::{
    collections::HashMap,
    sync::{Arc, Mutex, PoisonError, Weak},
    time::Duration,
};

use tokio::{sync::Semaphore, time::timeout};

use super::hands::{HandError, Hands};
use crate::pod::PodUid;

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
    async fn a_panic_is_an_error_of_its_pod() {
        let turns = Turns::default();
        let failed = turns.take(&"a".into(), PATIENCE, || panic!("on purpose")).await;
        let aborted = HandError::Aborted("panic: on purpose".to_owned());
        assert_eq!(failed, Err::<(), _>(TurnError::NotDone(aborted)));
        assert_eq!(turns.take(&"a".into(), PATIENCE, || 1).await, Ok(1));
    }
}
