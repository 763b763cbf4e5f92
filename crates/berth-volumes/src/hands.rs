//! Bounded blocking pool for volume operations.
//!
//! A call that hangs in a file system cannot be stopped, only abandoned. It keeps its thread until it returns, so this
//! pool bounds the threads that all volumes together take: logs, exec, and the rest of the agent use the remaining
//! ones. Implements spec 07 §17.

use std::{sync::Arc, time::Duration};

use tokio::{sync::Semaphore, task::spawn_blocking, time::timeout};

use berth_sys::panics::said;

/// Threads for all volumes of the node: two thirds of the blocking pool.
pub const THREADS: usize = 32;
/// Share of [`THREADS`] for the agent's own files, directories, and leftovers on disk.
pub const OF_FILES: usize = 8;
/// Share of [`THREADS`] for usage measurements.
pub const LOOKS: usize = 4;
/// The remaining share is for volume operations.
const MOST: usize = THREADS - OF_FILES - LOOKS;
/// How long to wait for a free thread.
const WAIT: Duration = Duration::from_secs(30);

/// Error of work that was not started or not completed.
#[derive(Clone, PartialEq, Eq, Debug, thiserror::Error)]
pub enum HandError {
    /// All threads are in use; nothing was attempted.
    #[error("too many operations on volumes have not returned")]
    Crowded,
    /// The work panicked, or the agent stops.
    #[error("the operation was aborted: {0}")]
    Aborted(String),
}

/// Pool of threads, bounded by a semaphore.
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
    /// Creates a pool with that many threads.
    pub fn new(most: usize) -> Self {
        Self { free: Arc::new(Semaphore::new(most)) }
    }

    /// Runs the work on a thread of the pool.
    ///
    /// # Errors
    /// If no thread becomes free in time, or the work panics.
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
            // The caller abandons the work.
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
