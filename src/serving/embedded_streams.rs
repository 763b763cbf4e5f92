//! Streams of the embedded runtime: adapts its processes and port forwards to the server's ports.

use std::sync::Arc;

use async_trait::async_trait;
use tokio::net::TcpStream;

use berth_runtime::{
    runtime::Runtime,
    streams::{self, PreparedStream, StreamRequest},
};
use berth_server::ports::{
    stream_targets::{
        CommandKind, PodPorts, ProcessStreams, ProcessTarget, Size, StreamTarget, StreamTargets, Terminal,
    },
    streams::StreamSet,
};

/// Prepared streams of the embedded runtime.
pub struct RuntimeTargets(pub Arc<Runtime>);

impl StreamTargets for RuntimeTargets {
    fn take(&self, path: &str) -> Option<StreamTarget> {
        let prepared = PreparedStream::take(&self.0, path)?;
        let set = |wanted: &streams::StdioStreams| {
            let streams::StdioStreams { stdin, stdout, stderr, tty } = *wanted;
            StreamSet { stdin, stdout, stderr, tty }
        };
        Some(match &prepared.ask {
            StreamRequest::Exec { wanted, .. } => StreamTarget::Command {
                verb: CommandKind::Exec,
                set: set(wanted),
                process: Box::new(PreparedProcess(prepared)),
            },
            StreamRequest::Attach { wanted, .. } => StreamTarget::Command {
                verb: CommandKind::Attach,
                set: set(wanted),
                process: Box::new(PreparedProcess(prepared)),
            },
            StreamRequest::Forward { sandbox, ports } => {
                let (sandbox, ports) = (sandbox.clone(), ports.clone());
                StreamTarget::Forward { ports, pod: Box::new(Ports { sandbox, prepared }) }
            }
        })
    }
}

struct PreparedProcess(PreparedStream);

#[async_trait]
impl ProcessTarget for PreparedProcess {
    async fn start(self: Box<Self>, size: Option<Size>) -> Result<ProcessStreams, String> {
        let size = size.map(|Size { columns, rows }| (columns, rows));
        let command = self.0.start(size).await.map_err(|error| error.text)?;
        let streams::CommandStreams { stdin, stdout, stderr, terminal, end } = command;
        let terminal = terminal.map(|terminal| Box::new(ResizableTerminal(terminal)) as Box<dyn Terminal>);
        let end = Box::pin(async move { end.await.map_err(|error| error.text) });
        Ok(ProcessStreams { stdin, stdout, stderr, terminal, end })
    }
}

struct ResizableTerminal(streams::Terminal);

#[async_trait]
impl Terminal for ResizableTerminal {
    async fn resize(&self, size: Size) {
        if let Err(cause) = self.0.resize(size.columns, size.rows).await {
            tracing::debug!(err = %cause, "Failed to resize terminal");
        }
    }
}

struct Ports {
    sandbox: String,
    prepared: PreparedStream,
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
