//! Programs of others on a container's way, as a plan has them. Pure. Behaviour: spec 09a §8.4; OCI runtime specification 1.2.

use std::path::PathBuf;

use serde::{Deserialize, Serialize};

/// Programs of others that are executed on a container's way: hooks of the OCI runtime specification.
#[derive(Clone, PartialEq, Eq, Debug, Default, Serialize, Deserialize)]
pub struct Hooks {
    /// Those of one moment in their order.
    pub all: Vec<Hook>,
    /// Directory with the container's `config.json`.
    pub bundle: PathBuf,
    /// What they read on standard input, JSON: what does not change of the container's state, without the first brace.
    pub state: String,
}

impl Hooks {
    /// Those of a moment.
    pub fn of(&self, moment: Moment) -> impl Iterator<Item = &Hook> {
        self.all.iter().filter(move |hook| hook.moment == moment)
    }
}

/// A program of somebody else.
#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub struct Hook {
    /// When.
    pub moment: Moment,
    /// The program, absolute.
    pub path: PathBuf,
    /// Its arguments, its own name first; none: only that.
    pub args: Vec<String>,
    /// Its whole environment, `KEY=value`.
    pub env: Vec<String>,
    /// How long it may take, milliseconds; none: as long as the start.
    pub limit_ms: Option<u64>,
}

/// When a hook is executed.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub enum Moment {
    /// Once the root is put together; on the host. An older name of the next.
    Prestart,
    /// Likewise.
    CreateRuntime,
    /// Then, in the container's namespaces, where the host's files are still seen.
    CreateContainer,
    /// Before the program is executed, as its user, of the container's files.
    StartContainer,
    /// Once the program runs; on the host.
    Poststart,
    /// Once it is over, or has come to nothing; on the host.
    Poststop,
}

impl Moment {
    /// All of them, in the order of a container's life.
    pub const ALL: [Self; 6] = [
        Self::Prestart,
        Self::CreateRuntime,
        Self::CreateContainer,
        Self::StartContainer,
        Self::Poststart,
        Self::Poststop,
    ];

    /// As files spell it.
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

    /// The container's state then, as hooks are told.
    pub fn status(self) -> &'static str {
        match self {
            Self::Prestart | Self::CreateRuntime | Self::CreateContainer => "creating",
            Self::StartContainer => "created",
            Self::Poststart => "running",
            Self::Poststop => "stopped",
        }
    }
}
