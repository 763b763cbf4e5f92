//! The role of the logs room for who builds container states.

use std::path::PathBuf;

use async_trait::async_trait;

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
