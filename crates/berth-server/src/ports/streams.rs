//! What the stream endpoints ask of the rest of the agent.

use std::sync::Arc;

use async_trait::async_trait;

use berth_types::{ContainerId, Pod, SandboxId};

/// Why the runtime gives no stream; the texts are shown as they are.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum StreamError {
    /// The runtime does not know the object.
    NotFound(String),
    /// The runtime has no room for another stream.
    Exhausted(String),
    /// Anything else.
    Other(String),
}

/// The streams a runtime is to prepare.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct StreamSet {
    /// Standard input.
    pub stdin: bool,
    /// Standard output.
    pub stdout: bool,
    /// Standard error.
    pub stderr: bool,
    /// A terminal.
    pub tty: bool,
}

/// The place where a pod's ports are.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Sandbox {
    /// The newest one.
    Newest(SandboxId),
    /// The pod runs, but has none.
    None,
    /// Nothing of the pod runs.
    NotRunning,
}

/// Pods, and streams into them.
#[async_trait]
pub trait Streams: Send + Sync + 'static {
    /// A pod the agent has been told to run.
    fn pod(&self, namespace: &str, name: &str) -> Option<Arc<Pod>>;
    /// The running instance of a container.
    async fn running(&self, pod: &Pod, container: &str) -> Option<ContainerId>;
    /// The newest sandbox of a pod.
    async fn sandbox(&self, pod: &Pod) -> Sandbox;

    /// Prepares a command; returns the URL at which its streams are met.
    async fn exec(&self, id: &ContainerId, command: Vec<String>, set: StreamSet) -> Result<String, StreamError>;
    /// Prepares streams to a container's process; returns the URL at which they are met.
    async fn attach(&self, id: &ContainerId, set: StreamSet) -> Result<String, StreamError>;
    /// Prepares connections into a pod's network; returns the URL at which they are met.
    async fn port_forward(&self, sandbox: &SandboxId, ports: &[u16]) -> Result<String, StreamError>;
    /// Runs a command to its end; returns what it printed, standard error behind standard output.
    async fn run(&self, id: &ContainerId, command: &[String]) -> Result<Vec<u8>, StreamError>;
}
