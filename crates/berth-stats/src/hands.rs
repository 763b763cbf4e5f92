//! Bounded pool for blocking work with a timeout.
//!
//! A thread that hangs with a disk cannot be stopped; the bound keeps further threads from hanging too.

use std::{sync::Arc, time::Duration};

use tokio::sync::Semaphore;

/// Bounded set of blocking threads for one kind of work.
#[derive(Clone)]
pub struct Hands {
    free: Arc<Semaphore>,
}

impl Hands {
    /// Creates a pool of at most `max` concurrent threads.
    pub fn new(max: usize) -> Self {
        Self { free: Arc::new(Semaphore::new(max)) }
    }

    /// Runs the work on a blocking thread; `None` if it panics or exceeds `limit`, the wait for a permit included.
    pub async fn work<T: Send + 'static>(
        &self,
        limit: Duration,
        work: impl FnOnce() -> T + Send + 'static,
    ) -> Option<T> {
        let done = async {
            let hand = self.free.clone().acquire_owned().await.ok()?;
            // The thread keeps its permit while it hangs, also after the caller has timed out.
            let task = tokio::task::spawn_blocking(move || {
                let _hand = hand;
                work()
            });
            task.await.ok()
        };
        tokio::time::timeout(limit, done).await.ok().flatten()
    }
}

#[cfg(test)]
mod tests {
    use std::sync::mpsc;

    use super::*;

    #[tokio::test]
    async fn work_that_hangs_is_not_followed_by_more() {
        let hands = Hands::new(1);
        let (release, hang) = mpsc::channel::<()>();
        let stuck = hands
            .work(Duration::from_millis(1), move || {
                let _ = hang.recv();
            })
            .await;
        assert_eq!(stuck, None);
        assert_eq!(hands.work(Duration::from_millis(1), || 1).await, None, "no hand is free");
        drop(release);
        assert_eq!(hands.work(Duration::from_secs(60), || 1).await, Some(1));
    }
}
