//! Supervisor of the tasks that run as long as the agent.
//!
//! A panic in one of them stops the agent: nothing else would do that task's work, and the failure would go unnoticed.
//! systemd restarts the agent; pods keep running meanwhile.

use std::{
    panic::{AssertUnwindSafe, Location},
    sync::Arc,
};

use futures::FutureExt;
use tokio::sync::watch;
use tokio_util::task::TaskTracker;
use tracing::error;

use berth_sys::panics::panic_message;

/// All tasks of the agent. Cheap to clone.
#[derive(Clone, Debug, Default)]
pub struct TaskSupervisor {
    tracker: TaskTracker,
    /// Text of the first panic.
    lost: Arc<watch::Sender<Option<String>>>,
}

impl TaskSupervisor {
    /// Spawns a task. If it panics, the log names the caller of this function.
    #[track_caller]
    pub fn spawn<T: Send + 'static>(&self, task: impl Future<Output = T> + Send + 'static) {
        let (place, lost) = (Location::caller(), self.lost.clone());
        self.tracker.spawn(async move {
            let Err(panic) = AssertUnwindSafe(task).catch_unwind().await else { return };
            let message = panic_message(&*panic);
            error!(task = %place, err = message, "Task panicked, stopping the agent so that it is restarted");
            lost.send_if_modified(|lost| {
                let is_first = lost.is_none();
                lost.get_or_insert(format!("task at {place}: {message}"));
                is_first
            });
        });
    }

    /// Waits until a task has panicked; returns the caller that spawned it, and the text of the panic.
    pub async fn wait_for_panic(&self) -> String {
        let mut lost = self.lost.subscribe();
        match lost.wait_for(Option::is_some).await.as_deref() {
            Ok(Some(message)) => message.clone(),
            Ok(None) | Err(_) => std::future::pending().await, // unreachable: `self` owns the sender
        }
    }

    /// Tracker for short tasks whose panics their spawners handle.
    pub fn tracker(&self) -> &TaskTracker {
        &self.tracker
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use tokio::time::{sleep, timeout};

    use super::*;

    #[tokio::test(start_paused = true)]
    async fn a_panic_is_reported_with_its_spawn_location() {
        let tasks = TaskSupervisor::default();
        tasks.spawn(async { "it ends well" });
        let minute = Duration::from_secs(60);
        assert!(timeout(minute, tasks.wait_for_panic()).await.is_err());
        tasks.spawn(async {
            sleep(Duration::from_secs(5)).await;
            panic!("on {}", "purpose");
        });
        let report = timeout(minute, tasks.wait_for_panic()).await.expect("received");
        assert!(
            report.starts_with("task at src/task_supervisor.rs:") && report.ends_with(": panic: on purpose"),
            "{report}"
        );
        tasks.spawn(async { panic!("another") });
        tasks.tracker().close();
        tasks.tracker().wait().await;
        assert_eq!(tasks.wait_for_panic().await, report, "the first one counts");
    }
}
