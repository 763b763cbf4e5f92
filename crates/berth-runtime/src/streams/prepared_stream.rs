//! Prepared streams: storage by token, and start or connection when the client claims them.

use std::{
    sync::{Arc, Mutex, PoisonError},
    time::Instant,
};

use base64::{Engine, prelude::BASE64_URL_SAFE_NO_PAD};
use tokio::net::TcpStream;

use super::{
    attach,
    command::CommandStreams,
    exec,
    request::{StdioStreams, StreamRequest},
    tokens::{TokenLimitReached, Tokens},
};
use crate::{
    errors::{ErrorKind, RuntimeError, RuntimeResult, outcome},
    runtime::Runtime,
};

/// URL prefix of streams that are served within this process; a path follows: `/exec/token`.
pub const IN_PROCESS: &str = "in-process://";

/// Streaming requests that wait for their client.
#[derive(Debug, Default)]
pub struct PendingStreams(Mutex<Tokens<StreamRequest>>);

impl PendingStreams {
    /// Stores a request for a minute. Returns its path: `/exec/token`.
    ///
    /// # Errors
    /// The maximum number of requests is waiting.
    pub fn keep(&self, ask: StreamRequest) -> RuntimeResult<String> {
        let token = BASE64_URL_SAFE_NO_PAD.encode(rand::random::<[u8; 6]>());
        let path = format!("/{}/{token}", ask.verb());
        let mut tokens = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        let kept = tokens.keep(path.clone(), ask, Instant::now());
        kept.map_err(|TokenLimitReached| {
            RuntimeError::new(ErrorKind::Exhausted, "maximum number of in-flight requests exceeded")
        })?;
        Ok(path)
    }

    fn take(&self, path: &str) -> Option<StreamRequest> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner).take(path, Instant::now())
    }
}

/// A claimed streaming request; no one else can claim it. Nothing runs yet.
pub struct PreparedStream {
    runtime: Arc<Runtime>,
    /// The validated request.
    pub ask: StreamRequest,
}

impl PreparedStream {
    /// Claims the request of a path; `None` where none waits or it has expired.
    pub fn take(runtime: &Arc<Runtime>, path: &str) -> Option<Self> {
        let ask = runtime.streams.take(path)?;
        Some(Self { runtime: runtime.clone(), ask })
    }

    /// Starts the process, or attaches to the container's. `size` is that of a new terminal: columns, rows.
    ///
    /// # Errors
    /// The container is no longer running, or the program cannot be executed.
    pub async fn start(self, size: Option<(u16, u16)>) -> RuntimeResult<CommandStreams> {
        let Self { runtime, ask } = self;
        match ask {
            StreamRequest::Exec { container, command, wanted } => {
                let started = exec::start(&runtime, &container, &command, (wanted, size)).await;
                runtime.shell.metrics.executed(outcome(&started));
                started.map_err(|error| error.during("failed to exec in container"))
            }
            StreamRequest::Attach { container, wanted } => attach::attach(&runtime, &container, wanted).await,
            StreamRequest::Forward { .. } => {
                Err(RuntimeError::invalid("expected an exec or attach request, found port-forward"))
            }
        }
    }

    /// Connects to a port inside the sandbox.
    ///
    /// # Errors
    /// The sandbox is no longer ready, or the connection fails.
    pub async fn dial(&self, port: u16) -> RuntimeResult<TcpStream> {
        let StreamRequest::Forward { sandbox, .. } = &self.ask else {
            return Err(RuntimeError::invalid("expected a port-forward request"));
        };
        let pod = self.runtime.pod(sandbox)?.now();
        pod.ready()?;
        self.runtime.ports.network.dial(pod.meta.netns.as_deref(), pod.id(), port).await
    }

    /// The requested streams; `None` for a port-forward.
    pub fn wanted(&self) -> Option<StdioStreams> {
        match &self.ask {
            StreamRequest::Exec { wanted, .. } | StreamRequest::Attach { wanted, .. } => Some(*wanted),
            StreamRequest::Forward { .. } => None,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn tokens_are_short_and_bound_to_their_verb() {
        let places = PendingStreams::default();
        let ask = StreamRequest::Forward { sandbox: "s".to_owned(), ports: Vec::new() };
        let path = places.keep(ask.clone()).expect("room");
        let token = path.strip_prefix("/portforward/").expect("its verb");
        assert_eq!(token.len(), 8);
        assert_eq!(places.take(&format!("/exec/{token}")), None, "another verb");
        assert_eq!(places.take(&path), Some(ask));
        assert_eq!(places.take(&path), None);
    }
}
