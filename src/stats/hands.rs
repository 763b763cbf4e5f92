//! Work that blocks, with a deadline, and never more of it than a few: a thread that hangs with a
//! disk cannot be stopped, but it need not be followed by others.

use std::{
    sync::{
        Arc,
        atomic::{AtomicUsize, Ordering},
    },
    time::Duration,
};

/// Threads for one kind of work.
#[derive(Clone)]
pub struct Hands {
    busy: Arc<AtomicUsize>,
    max: usize,
}

struct Busy(Arc<AtomicUsize>);

impl Drop for Busy {
    fn drop(&mut self) {
        self.0.fetch_sub(1, Ordering::Relaxed);
    }
}

impl Hands {
    /// At most `max` at a time.
    pub fn new(max: usize) -> Self {
        Self { busy: Arc::default(), max }
    }

    /// Does the work in a thread; `None` where it takes longer than `limit`, panics, or too much hangs already.
    pub async fn work<T: Send + 'static>(
        &self,
        limit: Duration,
        work: impl FnOnce() -> T + Send + 'static,
    ) -> Option<T> {
        if self.busy.fetch_add(1, Ordering::Relaxed) >= self.max {
            self.busy.fetch_sub(1, Ordering::Relaxed);
            return None;
        }
        let busy = Busy(self.busy.clone());
        let task = tokio::task::spawn_blocking(move || {
            let _busy = busy;
            work()
        });
        tokio::time::timeout(limit, task).await.ok()?.ok()
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
        assert_eq!(hands.work(Duration::from_secs(60), || 1).await, None, "no hand is free");
        drop(release);
        while hands.busy.load(Ordering::Relaxed) > 0 {
            tokio::task::yield_now().await;
        }
        assert_eq!(hands.work(Duration::from_secs(60), || 1).await, Some(1));
    }
}
