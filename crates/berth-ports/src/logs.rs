//! The roles of the logs room: messages for who builds container states, files for who starts
//! and removes containers.

use std::{collections::HashSet, path::PathBuf, sync::Arc};

use async_trait::async_trait;

use berth_types::{ContainerId, PodRef, PodUid};

/// `terminationMessagePolicy`.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum LogPolicy {
    /// Only the file.
    File,
    /// The end of the log where the file is empty and the container failed.
    FallbackToLogsOnError,
}

/// What is known of an exited container when its message is wanted.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct ContainerExit {
    /// Host path of the termination-message file, where one is mounted.
    pub message_file: Option<PathBuf>,
    /// Policy.
    pub policy: LogPolicy,
    /// Path of the log.
    pub log_path: PathBuf,
    /// Exit code.
    pub exit_code: i32,
    /// The runtime's reason.
    pub reason: String,
    /// The runtime's message.
    pub message: String,
}

/// Reads termination messages (spec 03b §9). Bounded: 4096 bytes of file, 2048 of log.
#[async_trait]
pub trait TerminationMessages: Send + Sync + 'static {
    /// The message to show; read errors become its text.
    async fn message(&self, exit: ContainerExit) -> String;
}

/// Where one container instance logs to.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct ContainerLogFile {
    /// Its pod.
    pub pod: PodRef,
    /// Its name.
    pub container: Arc<str>,
    /// The instance.
    pub id: ContainerId,
    /// Full path of the log.
    pub path: PathBuf,
}

/// Whether everything of a pod may be removed from this node.
pub type MayGo = Arc<dyn Fn(&PodUid) -> bool + Send + Sync>;

/// Log files and the links to them (spec 03a §7 step 8, §11).
#[async_trait]
pub trait ContainerLogs: Send + Sync + 'static {
    /// Makes `/var/log/containers/<pod>_<namespace>_<container>-<id>.log` point to the log.
    /// Errors are logged there.
    async fn link(&self, file: ContainerLogFile);
    /// Deletes `<path>*` and the link of a container that is about to be removed.
    ///
    /// # Errors
    /// The text; the container is not removed then.
    async fn remove(&self, file: ContainerLogFile) -> Result<(), String>;
    /// Removes the log directory of a pod whose containers and sandboxes are gone.
    ///
    /// # Errors
    /// The text; garbage collection finds the directory later. Absent counts as removed.
    async fn remove_directory(&self, pod: PodRef) -> Result<(), String>;
    /// Removes the log directories of pods that may go.
    async fn remove_directories(&self, may_go: MayGo);
    /// Removes dangling links, except those of the containers named, which have not exited.
    async fn remove_dangling_links(&self, alive: HashSet<ContainerId>);
}
