//! Startup errors: one variant per stage of spec 01 §1, with the reference's wrapper text. Pure.

use super::gates::GateError;

/// Reason for a failed start, reported as the text of the stage followed by the cause.
#[derive(Debug, Clone, PartialEq, thiserror::Error)]
pub enum StartupError {
    /// Stage 1: the command line is malformed.
    #[error("failed to parse kubelet flag: {0}")]
    ParseFlag(String),
    /// Stage 1: the kubelet has no subcommands.
    #[error("unknown command {0}")]
    UnknownCommand(String),
    /// Stage 3: feature gates on the command line.
    #[error("failed to set feature gates from initial flags-based config: {0}")]
    InitialGates(GateError),
    /// Stage 3: settings that exist as flags only.
    #[error("failed to validate kubelet flags: {0}")]
    ValidateFlags(String),
    /// Stage 4: the main configuration file.
    #[error("failed to load kubelet config file, path: {path}, error: {cause}")]
    LoadFile {
        /// Path as given.
        path: String,
        /// The error.
        cause: String,
    },
    /// Stage 5: the drop-ins.
    #[error("failed to merge kubelet configs: {0}")]
    MergeDropins(String),
    /// Stage 6: flags take precedence over files.
    #[error("failed to precedence kubeletConfigFlag: {0}")]
    FlagPrecedence(String),
    /// Stage 6: feature gates of the merged configuration.
    #[error("failed to set feature gates from initial flags-based config: {0}")]
    Gates(GateError),
    /// Stage 7: the logging configuration.
    #[error("initialize logging: {0}")]
    Logging(String),
    /// Stage 8: the merged configuration.
    #[error("failed to validate kubelet configuration, error: {errors}, path: {dump}")]
    Validate {
        /// All validation errors.
        errors: String,
        /// The rejected configuration with masked secrets.
        dump: String,
    },
    /// Stage 9: the TLS options.
    #[error("failed to construct kubelet dependencies: {0}")]
    Dependencies(String),
    /// Stage 11: settings that are checked last.
    #[error("failed to run Kubelet: {0}")]
    Run(String),
}
