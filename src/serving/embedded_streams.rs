//! Streams of the embedded runtime: adapts its processes and port forwards to the server's ports.

use std::sync::Arc;

use async_trait::async_trait;
use tokio::net::TcpStream;

use berth_runtime::{
    runtime::Runtime,
    streams::{self, Ask, Prepared},
};
use berth_server::ports::{
    streams::StreamSet,
    targets::{PodPorts, Process, Running, Size, Target, Targets, Terminal, Verb},
};

/// Prepared streams of the embedded runtime.
pub struct RuntimeTargets(pub Arc<Runtime>);

impl Targets for RuntimeTargets {
    fn take(&self, path: &str) -> Option<Target> {
        let prepared = Prepared::take(&self.0, path)?;
        let set = |wanted: &streams::Wanted| {
            let streams::Wanted { stdin, stdout, stderr, tty } = *wanted;
            StreamSet { stdin, stdout, stderr, tty }
        };
        Some(match &prepared.ask {
            Ask::Exec { wanted, .. } => {
                Target::Command { verb: Verb::Exec, set: set(wanted), process: Box::new(Waiting(prepared)) }
            }
            Ask::Attach { wanted, .. } => {
                Target::Command { verb: Verb::Attach, set: set(wanted), process: Box::new(Waiting(prepared)) }
            }
            Ask::Forward { sandbox, ports } => {
                let (sandbox, ports) = (sandbox.clone(), ports.clone());
                Target::Forward { ports, pod: Box::new(Ports { sandbox, prepared }) }
            }
        })
    }
}

struct Waiting(Prepared);

#[async_trait]
impl Process for Waiting {
    async fn start(self: Box<Self>, size: Option<Size>) -> Result<Running, String> {
        let size = size.map(|Size { columns, rows }| (columns, rows));
        let command = self.0.start(size).await.map_err(|error| error.text)?;
        let streams::Command { stdin, stdout, stderr, terminal, end } = command;
        let terminal = terminal.map(|terminal| Box::new(Sized(terminal)) as Box<dyn Terminal>);
        let end = Box::pin(async move { end.await.map_err(|error| error.text) });
        Ok(Running { stdin, stdout, stderr, terminal, end })
    }
}

struct Sized(streams::Terminal);

#[async_trait]
impl Terminal for Sized {
    async fn resize(&self, size: Size) {
        if let Err(cause) = self.0.resize(size.columns, size.rows).await {
            tracing::debug!(err = %cause, "A terminal was not resized");
        }
    }
}

struct Ports {
    sandbox: String,
    prepared: Prepared,
}

#[async_trait]
impl PodPorts for Ports {
    fn sandbox(&self) -> &str {
        &self.sandbox
    }

    async fn dial(&self, port: u16) -> Result<TcpStream, String> {
        self.prepared.dial(port).await.map_err(|error| error.text)
    }
}
