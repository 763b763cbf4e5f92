//! Scripted CRI on a Unix socket, for agents that run as processes.

use std::{path::PathBuf, sync::Arc};

use berth_ports::SystemClock;
use tokio::{net::UnixStream, task::JoinHandle};
use tokio_util::sync::CancellationToken;

use super::{
    process::{Agent, Home, PATIENCE},
    scripted_cri::{ScriptedCri, server},
};

/// Scripted CRI with its own socket.
pub struct ScriptedServer {
    /// The scripted CRI.
    pub cri: Arc<ScriptedCri>,
    dir: tempfile::TempDir,
    serving: Option<(CancellationToken, JoinHandle<()>)>,
}

impl ScriptedServer {
    /// Creates a runtime and serves it.
    pub async fn new() -> Self {
        let mut server = Self::unserved();
        server.serve().await;
        server
    }

    /// Creates a runtime that is not served yet.
    pub fn unserved() -> Self {
        let dir =
            tempfile::Builder::new().prefix("berth-cri-").tempdir().expect("failed to create temporary directory");
        Self { cri: ScriptedCri::new(Arc::new(SystemClock)), dir, serving: None }
    }

    /// Path of the socket, served or not.
    pub fn socket(&self) -> PathBuf {
        self.dir.path().join("cri.sock")
    }

    /// CRI endpoint, as in `containerRuntimeEndpoint`.
    pub fn endpoint(&self) -> String {
        format!("unix://{}", self.socket().display())
    }

    /// Creates a home for an agent on this runtime.
    pub fn home(&self) -> Home {
        Home::new(&self.endpoint())
    }

    /// Serves the runtime and waits until it accepts connections.
    pub async fn serve(&mut self) {
        let stop = CancellationToken::new();
        let (cri, socket, stopped) = (self.cri.clone(), self.socket(), stop.clone());
        let task = tokio::spawn(async move { server::serve(cri, &socket, stopped).await });
        self.serving = Some((stop, task));
        let socket = self.socket();
        let listening = async {
            while UnixStream::connect(&socket).await.is_err() {
                tokio::time::sleep(std::time::Duration::from_millis(1)).await;
            }
        };
        tokio::time::timeout(PATIENCE, listening).await.expect("timed out waiting for the scripted runtime");
    }

    /// Stops serving: pending calls fail, and the socket is removed.
    pub async fn vanish(&mut self) {
        let (stop, task) = self.serving.take().expect("the scripted runtime is not running");
        self.cri.restart();
        stop.cancel();
        // A graceful shutdown would wait for open streams.
        task.abort();
        let _ = task.await; // the expected cancellation error
        std::fs::remove_file(self.socket()).expect("failed to remove the socket");
    }

    /// Waits until `holds` returns true for the runtime.
    pub async fn until(&self, what: &str, agent: &Agent, holds: impl Fn(&ScriptedCri) -> bool) {
        agent.until(what, async || holds(&self.cri)).await;
    }
}
