//! Why the agent cannot start: one variant per stage of spec 01 §1, with the reference's wrapper text. Pure.

use super::gates::GateError;

/// A failed start, as it is reported: the stage's text, then the cause.
#[derive(Debug, Clone, PartialEq, thiserror::Error)]
pub enum StartupError {
    /// Stage 1: the command line cannot be read.
    #[error("failed to parse kubelet flag: {0}")]
    ParseFlag(String),
    /// Stage 1: there are no commands.
    #[error("unknown command {0}")]
    UnknownCommand(String),
    /// Stage 3: gates on the command line.
    #[error("failed to set feature gates from initial flags-based config: {0}")]
    InitialGates(GateError),
    /// Stage 3: settings that exist as flags only.
    #[error("failed to validate kubelet flags: {0}")]
    ValidateFlags(String),
    /// Stage 4: the main file.
    #[error("failed to load kubelet config file, path: {path}, error: {cause}")]
    LoadFile {
        /// As given.
        path: String,
        /// What is wrong.
        cause: String,
    },
    /// Stage 5: drop-ins.
    #[error("failed to merge kubelet configs: {0}")]
    MergeDropins(String),
    /// Stage 6: flags over files.
    #[error("failed to precedence kubeletConfigFlag: {0}")]
    FlagPrecedence(String),
    /// Stage 6: gates of the whole.
    #[error("failed to set feature gates from initial flags-based config: {0}")]
    Gates(GateError),
    /// Stage 7: the log.
    #[error("initialize logging: {0}")]
    Logging(String),
    /// Stage 8: the whole.
    #[error("failed to validate kubelet configuration, error: {errors}, path: {dump}")]
    Validate {
        /// All of them.
        errors: String,
        /// The configuration that was refused, secrets masked.
        dump: String,
    },
    /// Stage 9: TLS options.
    #[error("failed to construct kubelet dependencies: {0}")]
    Dependencies(String),
    /// Stage 11: settings that are looked at last.
    #[error("failed to run Kubelet: {0}")]
    Run(String),
}
