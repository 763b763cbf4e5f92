//! OCI hooks of a container as part of its plan. Pure.
//!
//! Implements spec 09a §8.4; OCI runtime specification 1.2.

use std::path::PathBuf;

use serde::{Deserialize, Serialize};

/// Hooks of a container, per OCI runtime specification.
#[derive(Clone, PartialEq, Eq, Debug, Default, Serialize, Deserialize)]
pub struct Hooks {
    /// All hooks; those of one lifecycle point are in execution order.
    pub all: Vec<Hook>,
    /// Directory with the container's `config.json` (OCI bundle).
    pub bundle: PathBuf,
    /// JSON for their standard input: the constant part of the container's state, without the opening brace.
    pub state: String,
}

impl Hooks {
    /// Hooks of a lifecycle point, in execution order.
    pub fn of(&self, moment: HookPoint) -> impl Iterator<Item = &Hook> {
        self.all.iter().filter(move |hook| hook.moment == moment)
    }
}

/// An OCI hook.
#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub struct Hook {
    /// Lifecycle point.
    pub moment: HookPoint,
    /// Absolute path of the program.
    pub path: PathBuf,
    /// Arguments including `argv[0]`; empty for only the program's path.
    pub args: Vec<String>,
    /// Complete environment, entries of the form `KEY=value`.
    pub env: Vec<String>,
    /// Timeout, milliseconds; `None` for 60 s.
    pub limit_ms: Option<u64>,
}

/// Lifecycle point at which a hook runs.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub enum HookPoint {
    /// On the host, once the root is assembled. Deprecated name of the next.
    Prestart,
    /// On the host, once the root is assembled.
    CreateRuntime,
    /// Then, in the container's namespaces, while the host's files are still visible.
    CreateContainer,
    /// Before the program is executed, as its user, with the container's files.
    StartContainer,
    /// On the host, once the program runs.
    Poststart,
    /// On the host, once the container has ended or its start has failed.
    Poststop,
}

impl HookPoint {
    /// All lifecycle points, in chronological order.
    pub const ALL: [Self; 6] = [
        Self::Prestart,
        Self::CreateRuntime,
        Self::CreateContainer,
        Self::StartContainer,
        Self::Poststart,
        Self::Poststop,
    ];

    /// Name in `config.json`.
    pub fn name(self) -> &'static str {
        match self {
            Self::Prestart => "prestart",
            Self::CreateRuntime => "createRuntime",
            Self::CreateContainer => "createContainer",
            Self::StartContainer => "startContainer",
            Self::Poststart => "poststart",
            Self::Poststop => "poststop",
        }
    }

    /// Container status passed to hooks at this point.
    pub fn status(self) -> &'static str {
        match self {
            Self::Prestart | Self::CreateRuntime | Self::CreateContainer => "creating",
            Self::StartContainer => "created",
            Self::Poststart => "running",
            Self::Poststop => "stopped",
        }
    }
}
