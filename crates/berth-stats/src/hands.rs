//! Work that blocks, with a deadline, and never more of it than a few: a thread that hangs with a
//! disk cannot be stopped, but it need not be followed by others.

use std::{sync::Arc, time::Duration};

use tokio::sync::Semaphore;

/// Threads for one kind of work.
#[derive(Clone)]
pub struct Hands {
    free: Arc<Semaphore>,
}

impl Hands {
    /// At most `max` at a time.
    pub fn new(max: usize) -> Self {
        Self { free: Arc::new(Semaphore::new(max)) }
    }

    /// Does the work in a thread; `None` where it takes longer than `limit`, the wait for a hand included, or panics.
    pub async fn work<T: Send + 'static>(
        &self,
        limit: Duration,
        work: impl FnOnce() -> T + Send + 'static,
    ) -> Option<T> {
        let done = async {
            let hand = self.free.clone().acquire_owned().await.ok()?;
            // The hand is kept as long as the thread hangs, however long anybody waits for it.
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
