//! Threads for work of volumes that may block, and never all that there are.
//!
//! What hangs in a file system cannot be stopped, only left alone. It keeps its thread until it returns, so that
//! volumes together take no more threads than these: logs, exec and all else of the agent go on with the others.
//! Behaviour: spec 07 §17.

use std::{sync::Arc, time::Duration};

use tokio::{sync::Semaphore, task::spawn_blocking, time::timeout};

use berth_sys::panics::said;

/// Threads for all volumes of the node: two thirds of the blocking pool.
pub const THREADS: usize = 32;
/// Those of them that are for files of the agent, directories and what is left on disk.
pub const OF_FILES: usize = 8;
/// Those of them that are for mere looks at how full volumes are.
pub const LOOKS: usize = 4;
/// What is left is for what is done with volumes.
const MOST: usize = THREADS - OF_FILES - LOOKS;
/// How long to wait for one that is free.
const WAIT: Duration = Duration::from_secs(30);

/// The work was not done, or not to its end.
#[derive(Clone, PartialEq, Eq, Debug, thiserror::Error)]
pub enum HandError {
    /// All threads are taken; nothing was tried.
    #[error("too many operations on volumes have not returned")]
    Crowded,
    /// It panicked, or the agent stops.
    #[error("the operation was aborted: {0}")]
    Aborted(String),
}

/// The threads.
#[derive(Clone, Debug)]
pub struct Hands {
    free: Arc<Semaphore>,
}

impl Default for Hands {
    fn default() -> Self {
        Self::new(MOST)
    }
}

impl Hands {
    /// So many.
    pub fn new(most: usize) -> Self {
        Self { free: Arc::new(Semaphore::new(most)) }
    }

    /// Does the work in a thread of its own.
    ///
    /// # Errors
    /// No thread was to be had, or the work panicked.
    pub async fn work<T: Send + 'static>(&self, work: impl FnOnce() -> T + Send + 'static) -> Result<T, HandError> {
        let hand = timeout(WAIT, self.free.clone().acquire_owned()).await.map_err(|_| HandError::Crowded)?;
        let hand = hand.map_err(|_| HandError::Crowded)?;
        let task = spawn_blocking(move || {
            let _hand = hand;
            work()
        });
        task.await.map_err(|error| {
            let cause = error.try_into_panic().map_or_else(|error| error.to_string(), |panic| said(&*panic));
            HandError::Aborted(cause)
        })
    }
}

#[cfg(test)]
mod tests {
    use std::sync::mpsc;

    use super::*;

    #[tokio::test]
    async fn what_hangs_takes_no_more_than_its_share() {
        let hands = Hands::new(2);
        let mut stuck = Vec::new();
        for _ in 0..2 {
            let (release, hangs) = mpsc::channel::<()>();
            let hands = hands.clone();
            let (began, begins) = tokio::sync::oneshot::channel();
            let work = tokio::spawn(async move {
                hands
                    .work(move || {
                        let _told = began.send(());
                        let _released = hangs.recv();
                    })
                    .await
            });
            begins.await.expect("it begins");
            // Nobody waits for it any more.
            work.abort();
            stuck.push(release);
        }
        assert_eq!(hands.free.available_permits(), 0);
        let next = timeout(Duration::from_millis(20), hands.work(|| 1)).await;
        assert!(next.is_err(), "both still hang: {next:?}");
        stuck.pop();
        assert_eq!(hands.work(|| 2).await, Ok(2));
    }

    #[tokio::test]
    async fn a_panic_is_told_and_gives_its_thread_back() {
        let hands = Hands::new(1);
        let failed = hands.work(|| -> u8 { panic!("on {}", "purpose") }).await;
        assert_eq!(failed, Err(HandError::Aborted("panic: on purpose".to_owned())));
        assert_eq!(hands.work(|| 1).await, Ok(1));
    }
}
