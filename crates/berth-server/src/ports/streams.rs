//! Port of the streaming endpoints (exec, attach, port-forward): pods and runtime stream URLs.

use std::sync::Arc;

use async_trait::async_trait;

use berth_types::{ContainerId, Pod, SandboxId};

/// Reason why the runtime provides no stream; clients get the text unchanged.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum StreamError {
    /// The runtime does not know the object.
    NotFound(String),
    /// The runtime has reached its limit of streams.
    Exhausted(String),
    /// Any other reason.
    Other(String),
}

/// Streams that the runtime prepares.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct StreamSet {
    /// Standard input.
    pub stdin: bool,
    /// Standard output.
    pub stdout: bool,
    /// Standard error.
    pub stderr: bool,
    /// Whether the process gets a terminal.
    pub tty: bool,
}

/// Sandbox that a port forward targets.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Sandbox {
    /// The newest sandbox of the pod.
    Newest(SandboxId),
    /// The pod runs but has no sandbox.
    None,
    /// The pod does not run.
    NotRunning,
}

/// Finds pods and prepares streams into them.
#[async_trait]
pub trait StreamProvider: Send + Sync + 'static {
    /// Finds a pod assigned to this agent.
    fn pod(&self, namespace: &str, name: &str) -> Option<Arc<Pod>>;
    /// ID of the running instance of a container.
    async fn running(&self, pod: &Pod, container: &str) -> Option<ContainerId>;
    /// Newest sandbox of a pod.
    async fn sandbox(&self, pod: &Pod) -> Sandbox;

    /// Prepares a command; returns the URL of its streams.
    async fn exec(&self, id: &ContainerId, command: Vec<String>, set: StreamSet) -> Result<String, StreamError>;
    /// Prepares streams to a container's process; returns their URL.
    async fn attach(&self, id: &ContainerId, set: StreamSet) -> Result<String, StreamError>;
    /// Prepares port forwarding into a pod; returns the URL of its streams.
    async fn port_forward(&self, sandbox: &SandboxId, ports: &[u16]) -> Result<String, StreamError>;
    /// Runs a command to completion; returns its standard output followed by its standard error.
    async fn run(&self, id: &ContainerId, command: &[String]) -> Result<Vec<u8>, StreamError>;
}
