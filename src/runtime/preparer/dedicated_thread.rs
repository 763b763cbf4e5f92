//! File work inside volumes: one dedicated thread per container, because a file server may hang.
//!
//! A container gets no second thread before the first has returned; no other container waits for it.
//! Implements spec 07 §13.2, §17.

use std::{
    collections::HashSet,
    sync::{Arc, Mutex, MutexGuard, PoisonError},
    thread,
};

use tokio::sync::oneshot;

use super::{PrepareError, within};
use berth_types::PodUid;

/// Pod UID and container name.
type Whose = (PodUid, String);

/// Containers with a running thread.
#[derive(Clone, Debug, Default)]
pub(super) struct VolumeThreads {
    busy: Arc<Mutex<HashSet<Whose>>>,
}

/// Guard of a container's thread slot: released when the thread returns or panics.
struct ThreadSlot {
    lone: VolumeThreads,
    whose: Whose,
}

impl Drop for ThreadSlot {
    fn drop(&mut self) {
        self.lone.busy().remove(&self.whose);
    }
}

impl VolumeThreads {
    fn busy(&self) -> MutexGuard<'_, HashSet<Whose>> {
        self.busy.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Runs the job in the container's thread. A job that hangs is abandoned.
    ///
    /// # Errors
    /// The error of the job, or a timeout of this job or an earlier one.
    pub(super) async fn work<T: Send + 'static>(
        &self,
        what: &str,
        whose: Whose,
        job: impl FnOnce() -> Result<T, PrepareError> + Send + 'static,
    ) -> Result<T, PrepareError> {
        if !self.busy().insert(whose.clone()) {
            return Err(PrepareError(format!("{what}: previous attempt is still running")));
        }
        let turn = ThreadSlot { lone: self.clone(), whose };
        let (sender, receiver) = oneshot::channel();
        let begun = thread::Builder::new().name("sub-paths".to_owned()).spawn(move || {
            let done = job();
            drop(turn);
            // The caller may be gone.
            let _ = sender.send(done);
        });
        begun.map_err(|error| PrepareError(format!("{what}: {error}")))?;
        within(what, receiver).await?.map_err(|_| PrepareError(format!("{what}: thread panicked")))?
    }
}

#[cfg(test)]
mod tests {
    use std::sync::mpsc;

    use super::*;

    #[tokio::test(start_paused = true)]
    async fn what_hangs_takes_one_thread_of_its_own() {
        let lone = VolumeThreads::default();
        let (release, hangs) = mpsc::channel::<()>();
        let whose = |pod: &str| (PodUid::from(pod), "c".to_owned());
        let stuck = lone.work("files", whose("a"), move || {
            let _released = hangs.recv();
            Ok(1)
        });
        assert_eq!(stuck.await.map_err(|e| e.0), Err("files: timed out after 60s".to_owned()));
        for _ in 0..3 {
            let again = lone.work("files", whose("a"), || Ok(2)).await;
            assert_eq!(again.map_err(|e| e.0), Err("files: previous attempt is still running".to_owned()));
        }
        assert_eq!(lone.busy().len(), 1);
        drop(release);
        while lone.busy().len() == 1 {
            thread::yield_now();
        }
    }

    #[tokio::test]
    async fn others_do_not_notice() {
        let lone = VolumeThreads::default();
        let whose = |pod: &str| (PodUid::from(pod), "c".to_owned());
        let broken = lone.work("files", whose("a"), || -> Result<u8, PrepareError> { panic!("on purpose") }).await;
        assert_eq!(broken.map_err(|e| e.0), Err("files: thread panicked".to_owned()));
        assert_eq!(lone.work("files", whose("a"), || Ok(1)).await.map_err(|e| e.0), Ok(1));
        assert_eq!(lone.work("files", whose("b"), || Ok(2)).await.map_err(|e| e.0), Ok(2));
        assert!(lone.busy().is_empty());
    }
}
