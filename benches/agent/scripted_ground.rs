//! The scripted runtime on a socket of its own, and waiting for what it sees.

use std::{
    path::{Path, PathBuf},
    sync::Arc,
    time::{Duration, Instant},
};

use anyhow::{Result, ensure};
use berth_cri::{CriConfig, RuntimeClient};
use berth_metrics::Registry;
use berth_ports::SystemClock;
use serde_json::Value;
use tokio_util::sync::{CancellationToken, DropGuard};

use crate::{
    agent::{Agent, Target},
    manifest,
    secure::Secure,
};
use berth_testkit::scripted::{Call, ScriptedCri, server};

/// Patience with anything that should take milliseconds.
pub const PATIENCE: Duration = Duration::from_secs(30);

/// A scripted runtime that is served until dropped.
pub struct Runtime {
    /// What it does and saw.
    pub cri: Arc<ScriptedCri>,
    socket: PathBuf,
    _dir: tempfile::TempDir,
    _server: DropGuard,
}

impl Runtime {
    /// Serves a runtime that does at most `parallel` changing calls at once.
    pub async fn start(parallel: usize) -> Result<Self> {
        let dir = tempfile::tempdir()?;
        let socket = dir.path().join("cri.sock");
        let cri = ScriptedCri::with_parallel(Arc::new(SystemClock), parallel);
        let stop = CancellationToken::new();
        let (served, path, stopped) = (cri.clone(), socket.clone(), stop.clone());
        tokio::spawn(async move { server::serve(served, &path, stopped).await });
        let begun = Instant::now();
        while !socket.exists() {
            ensure!(begun.elapsed() < PATIENCE, "the scripted runtime is not served");
            tokio::time::sleep(Duration::from_millis(1)).await;
        }
        Ok(Self { cri, socket, _dir: dir, _server: stop.drop_guard() })
    }

    /// An agent on it.
    pub async fn agent(&self, target: &Target) -> Result<Agent> {
        Agent::start(target, &self.socket).await
    }

    /// An agent on it that is a node of a cluster, with these fields of its configuration set, and with the settings of
    /// that file.
    pub async fn agent_in_cluster_with(
        &self,
        target: &Target,
        kubeconfig: &Path,
        fields: &Value,
        settings: Option<&Path>,
    ) -> Result<Agent> {
        Agent::start_in_cluster_with(target, &self.socket, kubeconfig, fields, settings).await
    }

    /// An agent on it with these fields of its configuration set.
    pub async fn agent_with(&self, target: &Target, fields: &Value) -> Result<Agent> {
        Agent::start_with(target, &self.socket, fields).await
    }

    /// An agent on it whose main port lets somebody in.
    pub async fn secured_agent(&self, target: &Target, secure: &Secure) -> Result<Agent> {
        Agent::start_with(target, &self.socket, &secure.fields()).await
    }

    /// A plain client of it.
    pub fn client(&self) -> Result<Arc<RuntimeClient>> {
        let config = CriConfig {
            endpoint: format!("unix://{}", self.socket.display()),
            image_endpoint: String::new(),
            request_timeout: PATIENCE,
            list_streaming: false,
        };
        Ok(berth_cri::connect(&config, &Registry::new())?.runtime)
    }

    /// Waits until something holds of what the runtime saw.
    pub async fn until(&self, what: &str, agent: &Agent, holds: impl Fn(&ScriptedCri) -> bool) -> Result<()> {
        let deadline = Instant::now() + PATIENCE;
        while !holds(&self.cri) {
            ensure!(Instant::now() < deadline, "not within {PATIENCE:?}: {what}\n{}", agent.log_end());
            tokio::time::sleep(Duration::from_millis(2)).await;
        }
        Ok(())
    }

    /// Starts one pod and tells how long its steps took from the manifest on.
    pub async fn start_pod(&self, agent: &Agent, name: &str, manifest: &serde_json::Value) -> Result<Start> {
        self.cri.clear_calls();
        let full = manifest::full_name(name);
        let at = agent.put(name, manifest)?;
        self.until(&format!("{name} runs"), agent, |cri| !cri.running(&full, "c0").is_empty()).await?;
        let calls = self.cri.calls();
        let sandbox = first(&calls, "run_podsandbox", &full).map_or(at, |c| c.at.into_std());
        let container = first(&calls, "start_container", &format!("{full}/c0")).map_or(at, |c| c.at.into_std());
        Ok(Start { sandbox: sandbox - at, container: container - at, calls: calls.len() })
    }
}

/// How one pod started.
pub struct Start {
    /// Until the runtime was asked for the sandbox.
    pub sandbox: Duration,
    /// Until the runtime was told to start the container.
    pub container: Duration,
    /// Calls until then.
    pub calls: usize,
}

/// The first call of an operation on a target.
pub fn first<'a>(calls: &'a [Call], op: &str, target: &str) -> Option<&'a Call> {
    calls.iter().find(|c| c.op == op && c.target == target)
}

/// In milliseconds.
pub fn ms(duration: Duration) -> f64 {
    duration.as_secs_f64() * 1e3
}
