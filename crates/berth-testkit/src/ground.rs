//! A scripted runtime that is served on a socket, for agents that are processes.

use std::{path::PathBuf, sync::Arc};

use berth_ports::SystemClock;
use tokio::{net::UnixStream, task::JoinHandle};
use tokio_util::sync::CancellationToken;

use super::{
    process::{Agent, Home, PATIENCE},
    scripted::{ScriptedCri, server},
};

/// A scripted runtime on a socket of its own.
pub struct Ground {
    /// The runtime.
    pub cri: Arc<ScriptedCri>,
    dir: tempfile::TempDir,
    serving: Option<(CancellationToken, JoinHandle<()>)>,
}

impl Ground {
    /// A runtime that is served.
    pub async fn new() -> Self {
        let mut ground = Self::silent();
        ground.serve().await;
        ground
    }

    /// A runtime that is not served yet.
    pub fn silent() -> Self {
        let dir = tempfile::Builder::new().prefix("berth-cri-").tempdir().expect("a folder");
        Self { cri: ScriptedCri::new(Arc::new(SystemClock)), dir, serving: None }
    }

    /// Where the socket is, or will be.
    pub fn socket(&self) -> PathBuf {
        self.dir.path().join("cri.sock")
    }

    /// As `containerRuntimeEndpoint` takes it.
    pub fn endpoint(&self) -> String {
        format!("unix://{}", self.socket().display())
    }

    /// A home for an agent on it.
    pub fn home(&self) -> Home {
        Home::new(&self.endpoint())
    }

    /// Serves it.
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
        tokio::time::timeout(PATIENCE, listening).await.expect("the scripted runtime is served");
    }

    /// Takes it away: calls under way fail, the socket is gone.
    pub async fn vanish(&mut self) {
        let (stop, task) = self.serving.take().expect("it is served");
        self.cri.restart();
        stop.cancel();
        // Streams that are open would be waited for.
        task.abort();
        let _ = task.await; // cancelled
        std::fs::remove_file(self.socket()).expect("the socket was there");
    }

    /// Waits until something holds of what the runtime saw.
    pub async fn until(&self, what: &str, agent: &Agent, holds: impl Fn(&ScriptedCri) -> bool) {
        agent.until(what, async || holds(&self.cri)).await;
    }
}
