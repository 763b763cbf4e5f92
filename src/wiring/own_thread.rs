//! A thread of its own for one lasting task and all that it starts.
//!
//! Where a task wakes often and does little each time, passing it between workers costs more than it does. Here nothing
//! is passed on, and nothing that keeps the workers busy delays it.

use std::{
    io,
    panic::{AssertUnwindSafe, catch_unwind, resume_unwind},
    thread,
    time::Duration,
};

use tokio::{runtime::Runtime, sync::oneshot, task::JoinError};

/// How long threads for what blocks stay when they have nothing to do.
const KEEP: Duration = Duration::from_secs(5);

/// The thread, not yet begun.
pub(super) struct OwnThread(Runtime);

impl OwnThread {
    /// With so many threads beside it for what blocks.
    ///
    /// # Errors
    /// There are no descriptors left for it.
    pub(super) fn new(blocking: usize) -> io::Result<Self> {
        let mut builder = tokio::runtime::Builder::new_current_thread();
        builder.max_blocking_threads(blocking).thread_keep_alive(KEEP).thread_name("berth");
        builder.enable_all().build().map(Self)
    }

    /// Makes something whose tasks are to run there.
    pub(super) fn make<T>(&self, make: impl FnOnce() -> T) -> T {
        let _there = self.0.enter();
        make()
    }

    /// Begins; what is returned ends when the task has, and panics where it did.
    ///
    /// # Errors
    /// There is no thread to be had.
    pub(super) fn run(
        self,
        name: &str,
        task: impl Future<Output = ()> + Send + 'static,
    ) -> io::Result<impl Future<Output = ()> + Send + 'static> {
        let (over, ended) = oneshot::channel();
        thread::Builder::new().name(name.to_owned()).spawn(move || {
            // As a task: what it is woken by is mostly on this thread, and each time something wakes the future that
            // the runtime was told to wait for, it is a system call.
            let outcome = catch_unwind(AssertUnwindSafe(|| self.0.block_on(self.0.spawn(task))));
            let outcome = outcome.and_then(|ended| ended.map_err(JoinError::into_panic));
            self.0.shutdown_background(); // what hangs is not waited for
            let _ = over.send(outcome); // nobody waits at the end of the process
        })?;
        Ok(async move {
            if let Ok(Err(panic)) = ended.await {
                resume_unwind(panic);
            }
        })
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use futures::FutureExt;

    use super::*;
    use berth_sys::panics::said;

    fn thread() -> OwnThread {
        OwnThread::new(1).expect("a thread")
    }

    #[tokio::test]
    async fn what_it_makes_and_what_it_does_run_on_one_thread_that_ends_with_it() {
        let own = thread();
        let name = || std::thread::current().name().map(str::to_owned);
        let (made, told) = (own.make(|| tokio::spawn(async move { name() })), Arc::<std::sync::OnceLock<_>>::default());
        let tell = told.clone();
        let stuck = std::sync::mpsc::channel::<()>();
        let wait = stuck.1;
        let task = async move {
            tokio::task::spawn_blocking(move || wait.recv());
            let _ = tell.set((name(), made.await.expect("it ends"))); // set once
        };
        let ended = tokio::time::timeout(Duration::from_secs(60), own.run("own", task).expect("begun")).await;
        assert!(ended.is_ok(), "what blocks is not waited for");
        let own = Some("own".to_owned());
        assert_eq!(told.get(), Some(&(own.clone(), own)));
        drop(stuck.0);
    }

    #[tokio::test]
    async fn a_panic_there_is_one_here() {
        let ended = thread().run("own", async { panic!("on {}", "purpose") }).expect("begun");
        let panic = AssertUnwindSafe(ended).catch_unwind().await.expect_err("it panicked");
        assert_eq!(said(&*panic), "panic: on purpose");
    }
}
