//! Ports of container logs: termination messages, log files, and their symbolic links.

use std::{collections::HashSet, path::PathBuf, sync::Arc};

use async_trait::async_trait;

use berth_types::{ContainerId, PodRef, PodUid};

/// `terminationMessagePolicy` of a container.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum LogPolicy {
    /// Only the termination-message file.
    File,
    /// The end of the log if the file is empty and the container failed.
    FallbackToLogsOnError,
}

/// Data of an exited container for its termination message.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct ContainerExit {
    /// Host path of the termination-message file, if one is mounted.
    pub message_file: Option<PathBuf>,
    /// `terminationMessagePolicy`.
    pub policy: LogPolicy,
    /// Path of the container's log.
    pub log_path: PathBuf,
    /// Exit code; after 0 the log is not used as the message.
    pub exit_code: i32,
    /// Reason reported by the runtime.
    pub reason: String,
    /// Message reported by the runtime.
    pub message: String,
}

/// Reads termination messages (spec 03b §9). Bounded: 4096 bytes of file, 2048 of log.
#[async_trait]
pub trait TerminationMessages: Send + Sync + 'static {
    /// Termination message; read errors become its text.
    async fn message(&self, exit: ContainerExit) -> String;
}

/// Log file of one container instance.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct ContainerLogFile {
    /// Pod of the container.
    pub pod: PodRef,
    /// Container name.
    pub container: Arc<str>,
    /// Container id.
    pub id: ContainerId,
    /// Full path of the log file.
    pub path: PathBuf,
}

/// Predicate: whether everything of a pod may be removed from this node.
pub type RemovalPredicate = Arc<dyn Fn(&PodUid) -> bool + Send + Sync>;

/// Manages log files and the symbolic links to them (spec 03a §7 step 8, §11).
#[async_trait]
pub trait ContainerLogs: Send + Sync + 'static {
    /// Links `/var/log/containers/<pod>_<namespace>_<container>-<id>.log` to the log.
    /// The implementation logs errors.
    async fn link(&self, file: ContainerLogFile);
    /// Deletes `<path>*` and the link of a container that is about to be removed.
    ///
    /// # Errors
    /// The error text; the container is not removed then.
    async fn remove(&self, file: ContainerLogFile) -> Result<(), String>;
    /// Deletes the log directory of a pod whose containers and sandboxes are removed.
    ///
    /// # Errors
    /// The error text; garbage collection retries later. A missing directory counts as deleted.
    async fn remove_directory(&self, pod: PodRef) -> Result<(), String>;
    /// Deletes the log directories of all pods for which the predicate holds.
    async fn remove_directories(&self, may_go: RemovalPredicate);
    /// Deletes dangling links, except those of the given containers, which have not exited.
    async fn remove_dangling_links(&self, alive: HashSet<ContainerId>);
}
