//! Scripted runtime on its own socket, with agents and waits on its recorded calls.

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
    private_ca::Secure,
};
use berth_testkit::scripted_cri::{Call, ScriptedCri, server};

/// Timeout of steps that take milliseconds.
pub const PATIENCE: Duration = Duration::from_secs(30);

/// A scripted runtime, served until dropped.
pub struct Runtime {
    /// Script and record of calls.
    pub cri: Arc<ScriptedCri>,
    socket: PathBuf,
    _dir: tempfile::TempDir,
    _server: DropGuard,
}

impl Runtime {
    /// Serves a runtime that runs at most `parallel` mutating calls at once.
    pub async fn start(parallel: usize) -> Result<Self> {
        let dir = tempfile::tempdir()?;
        let socket = dir.path().join("cri.sock");
        let cri = ScriptedCri::with_parallel(Arc::new(SystemClock), parallel);
        let stop = CancellationToken::new();
        let (served, path, stopped) = (cri.clone(), socket.clone(), stop.clone());
        tokio::spawn(async move { server::serve(served, &path, stopped).await });
        let begun = Instant::now();
        while !socket.exists() {
            ensure!(begun.elapsed() < PATIENCE, "timed out waiting for the scripted runtime");
            tokio::time::sleep(Duration::from_millis(1)).await;
        }
        Ok(Self { cri, socket, _dir: dir, _server: stop.drop_guard() })
    }

    /// Starts an agent on this runtime.
    pub async fn agent(&self, target: &Target) -> Result<Agent> {
        Agent::start(target, &self.socket).await
    }

    /// Starts an agent on this runtime as a node of a cluster, with these fields of the kubelet configuration, and that
    /// Berth settings file.
    pub async fn agent_in_cluster_with(
        &self,
        target: &Target,
        kubeconfig: &Path,
        fields: &Value,
        settings: Option<&Path>,
    ) -> Result<Agent> {
        Agent::start_in_cluster_with(target, &self.socket, kubeconfig, fields, settings).await
    }

    /// Starts an agent on this runtime with these fields of the kubelet configuration.
    pub async fn agent_with(&self, target: &Target, fields: &Value) -> Result<Agent> {
        Agent::start_with(target, &self.socket, fields).await
    }

    /// Starts an agent on this runtime with that Berth settings file.
    pub async fn agent_with_settings(&self, target: &Target, settings: &Path) -> Result<Agent> {
        Agent::start_with_settings(target, &self.socket, settings).await
    }

    /// Starts an agent on this runtime whose main port accepts the admin client certificate.
    pub async fn secured_agent(&self, target: &Target, secure: &Secure) -> Result<Agent> {
        Agent::start_with(target, &self.socket, &secure.fields()).await
    }

    /// A plain CRI client of this runtime.
    pub fn client(&self) -> Result<Arc<RuntimeClient>> {
        let config = CriConfig {
            endpoint: format!("unix://{}", self.socket.display()),
            image_endpoint: String::new(),
            request_timeout: PATIENCE,
            list_streaming: false,
        };
        Ok(berth_cri::connect(&config, &Registry::new())?.runtime)
    }

    /// Waits until a condition on the runtime's record is met.
    pub async fn until(&self, what: &str, agent: &Agent, holds: impl Fn(&ScriptedCri) -> bool) -> Result<()> {
        let deadline = Instant::now() + PATIENCE;
        while !holds(&self.cri) {
            ensure!(Instant::now() < deadline, "timed out after {PATIENCE:?} waiting for: {what}\n{}", agent.log_end());
            tokio::time::sleep(Duration::from_millis(2)).await;
        }
        Ok(())
    }

    /// Starts one pod and returns the latency of its steps since the manifest was written.
    pub async fn start_pod(&self, agent: &Agent, name: &str, manifest: &serde_json::Value) -> Result<Start> {
        self.cri.clear_calls();
        let full = manifest::full_name(name);
        let at = agent.put(name, manifest)?;
        self.until(&format!("{name} is running"), agent, |cri| !cri.running(&full, "c0").is_empty()).await?;
        let calls = self.cri.calls();
        let sandbox = first(&calls, "run_podsandbox", &full).map_or(at, |c| c.at.into_std());
        let container = first(&calls, "start_container", &format!("{full}/c0")).map_or(at, |c| c.at.into_std());
        Ok(Start { sandbox: sandbox - at, container: container - at, calls: calls.len() })
    }
}

/// Start latency of one pod.
pub struct Start {
    /// Until the RunPodSandbox call.
    pub sandbox: Duration,
    /// Until the StartContainer call.
    pub container: Duration,
    /// Number of CRI calls until then.
    pub calls: usize,
}

/// The first call of an operation on a target.
pub fn first<'a>(calls: &'a [Call], op: &str, target: &str) -> Option<&'a Call> {
    calls.iter().find(|c| c.op == op && c.target == target)
}

/// Milliseconds.
pub fn ms(duration: Duration) -> f64 {
    duration.as_secs_f64() * 1e3
}
