//! One blocking piece of work per pod at a time, with a deadline.
//!
//! Work that outlives its deadline goes on in its thread, because nothing can stop it, and keeps
//! its pod's turn: what comes next for that pod waits until its own deadline and is told so. Other
//! pods do not notice.

use std::{
    collections::HashMap,
    sync::{Arc, Mutex, PoisonError, Weak},
    time::Duration,
};

use tokio::{sync::Semaphore, task::spawn_blocking, time::timeout};

use crate::pod::PodUid;

/// The work did not end in time, or not well.
#[derive(Clone, PartialEq, Eq, Debug, thiserror::Error)]
pub enum TurnError {
    /// The pod's previous work still hangs.
    #[error("context deadline exceeded: an earlier operation on this pod's volumes has not returned")]
    Busy,
    /// The work itself hangs.
    #[error("context deadline exceeded")]
    TimedOut,
    /// The work panicked, or the agent stops.
    #[error("the operation was aborted")]
    Aborted,
}

/// Whose turn it is. A pod without work takes no memory.
#[derive(Debug, Default)]
pub struct Turns(Mutex<HashMap<PodUid, Weak<Semaphore>>>);

impl Turns {
    /// Does the work on the blocking pool when it is the pod's turn.
    ///
    /// # Errors
    /// If the deadline passes while waiting or working.
    pub async fn take<T: Send + 'static>(
        &self,
        pod: &PodUid,
        limit: Duration,
        work: impl FnOnce() -> T + Send + 'static,
    ) -> Result<T, TurnError> {
        let turn = self.of(pod);
        let permit = timeout(limit, turn.clone().acquire_owned()).await.map_err(|_| TurnError::Busy)?;
        let permit = permit.map_err(|_| TurnError::Aborted)?;
        let task = spawn_blocking(move || {
            let _turn = (turn, permit);
            work()
        });
        timeout(limit, task).await.map_err(|_| TurnError::TimedOut)?.map_err(|_| TurnError::Aborted)
    }

    fn of(&self, pod: &PodUid) -> Arc<Semaphore> {
        let mut all = self.0.lock().unwrap_or_else(PoisonError::into_inner);
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

    const LIMIT: Duration = Duration::from_millis(50);

    #[tokio::test]
    async fn work_that_hangs_holds_up_its_pod_only() {
        let turns = Turns::default();
        let (release, hangs) = mpsc::channel::<()>();
        let stuck = turns.take(&"a".into(), LIMIT, move || hangs.recv()).await;
        assert_eq!(stuck.map(drop), Err(TurnError::TimedOut));
        assert_eq!(turns.take(&"a".into(), LIMIT, || 1).await, Err(TurnError::Busy));
        assert_eq!(turns.take(&"b".into(), LIMIT, || 2).await, Ok(2));
        drop(release);
        assert_eq!(turns.take(&"a".into(), Duration::from_secs(10), || 3).await, Ok(3));
        assert!(turns.0.lock().expect("not poisoned").len() <= 2);
    }

    #[tokio::test]
    async fn a_panic_is_an_error_of_its_pod() {
        let turns = Turns::default();
        let failed = turns.take(&"a".into(), Duration::from_secs(10), || panic!("on purpose")).await;
        assert_eq!(failed, Err::<(), _>(TurnError::Aborted));
        assert_eq!(turns.take(&"a".into(), LIMIT, || 1).await, Ok(1));
    }
}
