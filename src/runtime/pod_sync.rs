//! Executes the actions of one pod sync in the order of spec 03a §4, and returns their results.
//!
//! The decisions are made in [`actions`](super::actions).

use std::{collections::HashMap, net::IpAddr, sync::Arc};

use tokio::time::Instant;
use tracing::{error, warn};

use super::{
    actions::{self, ContainerProbeResults, PodActionInputs, PodActions, ProbeVerdict},
    config_preparation::SandboxRequest,
    container_kill::KillRequest,
    creation::{CreateError, CreateKey},
    image_volumes::ImageVolumes,
    manager::RuntimeManager,
};
use berth_cri::CriError;
use berth_ports::{
    ActionKind, ActionOutcome, ContainerLogFile, EventRecord, KillPod, ProbeResult, ProbeResults, StartFailure,
    SyncOutcome, SyncPod,
};
use berth_proto::cri;
use berth_types::{
    ContainerId, ContainerKind, Pod, SandboxId,
    observation::{ContainerState, ObservedContainer},
    resource_state::PodResources,
};

/// The sync ends early; the outcome contains the reason, unless the pod is stopping.
pub(super) struct SyncHalted;

/// State of one sync.
pub(super) struct PodSync<'a> {
    pub(super) rt: &'a RuntimeManager,
    pub(super) req: &'a SyncPod,
    pub(super) actions: PodActions,
    pub(super) actuated: Option<PodResources>,
    pub(super) outcome: SyncOutcome,
    /// Addresses of the pod; empty for host network.
    pub(super) ips: Vec<IpAddr>,
    /// The sandbox that containers are created in.
    pub(super) sandbox: Option<SandboxId>,
    /// The sandbox configuration, built on first use.
    pub(super) sandbox_config: Option<Arc<cri::PodSandboxConfig>>,
    /// The runtime handler, read on first use.
    handler: Option<String>,
    /// Images that are mounted as volumes.
    pub(super) image_volumes: ImageVolumes,
}

/// Computes and executes the actions of one sync.
pub(super) async fn pass(rt: &RuntimeManager, req: &SyncPod) -> SyncOutcome {
    let actuated = rt.deps.actuated.get(req.pod.uid());
    let probes = probed(rt, req);
    let actions = actions::compute(&PodActionInputs {
        pod: &req.pod,
        observed: &req.observed,
        probes: &probes,
        actuated: actuated.as_ref(),
        restart_all: req.restart_all,
        gates: rt.config.gates,
    });
    release_resources(rt, req, &actions);
    let mut pass = PodSync {
        rt,
        req,
        actuated,
        outcome: SyncOutcome::default(),
        ips: if req.pod.is_host_network() { Vec::new() } else { req.observed.ips.clone() },
        sandbox: actions.sandbox.clone(),
        sandbox_config: None,
        handler: None,
        image_volumes: ImageVolumes::default(),
        actions,
    };
    let userns = pass.actions.create_sandbox && req.pod.spec().host_users == Some(false);
    // Halted or not: the outcome contains the results.
    let _ended = pass.carry_out().await;
    if userns && pass.outcome.error_text().is_some() {
        rt.deps.metrics.started_userns_pods_errors.inc();
    }
    pass.outcome
}

fn probed(rt: &RuntimeManager, req: &SyncPod) -> HashMap<ContainerId, ContainerProbeResults> {
    let verdict = |result: ProbeResult| match result {
        ProbeResult::Success => ProbeVerdict::Success,
        ProbeResult::Failure => ProbeVerdict::Failure,
    };
    let ask = |c: &ObservedContainer| {
        let ProbeResults { startup, liveness, .. } = rt.deps.probes.results(&c.id);
        (c.id.clone(), ContainerProbeResults { startup: startup.map(verdict), liveness: liveness.map(verdict) })
    };
    req.observed.running().map(ask).collect()
}

/// Releases exclusive resources of regular containers that have exited and are not restarted.
fn release_resources(rt: &RuntimeManager, req: &SyncPod, actions: &PodActions) {
    for (index, container) in req.pod.containers().iter().enumerate() {
        let ended = req.observed.newest(&container.name).is_some_and(|c| c.state == ContainerState::Exited);
        if ended && !actions.start.contains(&index) && !actions.create_sandbox {
            rt.deps.resources.released(req.pod.uid(), &container.name);
        }
    }
}

impl PodSync<'_> {
    async fn carry_out(&mut self) -> Result<(), SyncHalted> {
        if self.actions.kill_pod {
            self.kill_pod().await?;
        } else {
            self.kill_containers().await?;
            self.reset().await?;
        }
        self.prune_init().await?;
        if self.actions.create_sandbox {
            self.create_sandbox().await?;
        }
        self.start_ephemeral().await?;
        self.start_init().await?;
        if !self.actions.resize.is_empty() {
            self.resize().await;
        }
        self.start_regular().await
    }

    /// Whether termination was requested: nothing more is started.
    pub(super) fn stopping(&self) -> bool {
        self.req.stopping.is_cancelled()
    }

    pub(super) fn event(&self, event: EventRecord) {
        self.rt.deps.events.record(event);
    }

    pub(super) fn succeeded(&mut self, action: ActionKind, target: &str) {
        self.outcome.actions.push(ActionOutcome { action, target: target.into(), failure: None });
    }

    pub(super) fn failed(&mut self, action: ActionKind, target: &str, reason: &str, message: String) {
        let failure = Some(StartFailure { reason: reason.to_owned(), message });
        self.outcome.actions.push(ActionOutcome { action, target: target.into(), failure });
    }

    async fn kill_pod(&mut self) -> Result<(), SyncHalted> {
        if self.actions.create_sandbox && self.actions.sandbox.is_some() {
            let message = "Pod sandbox changed, it will be killed and re-created.";
            self.event(EventRecord::normal(self.req.pod.id(), "SandboxChanged", message));
        }
        if !self.actions.create_sandbox && !self.req.observed.is_alive() {
            self.outcome.is_finished = true;
            return Err(SyncHalted);
        }
        if !self.req.observed.is_absent() {
            self.outcome.acted = true;
            let (_keep, grace) = tokio::sync::watch::channel(None);
            let order = KillPod {
                pod: Some(self.req.pod.clone()),
                observed: self.req.observed.clone(),
                grace,
                progress: self.req.progress.clone(),
            };
            let outcomes = tokio::select! {
                biased;
                outcomes = self.rt.kill_observed(&order) => outcomes,
                () = self.req.stopping.cancelled() => return Err(SyncHalted),
            };
            let failed = outcomes.iter().any(|o| o.failure.is_some());
            self.outcome.actions.extend(outcomes);
            if failed {
                return Err(SyncHalted);
            }
        }
        if !self.actions.create_sandbox {
            return Err(SyncHalted);
        }
        let init = self.req.pod.init_containers();
        let doomed = self.req.observed.containers.iter().filter(|c| init.iter().any(|i| *i.name == *c.name));
        for instance in doomed.cloned().collect::<Vec<_>>() {
            self.rt.deps.resources.released(self.req.pod.uid(), &instance.name);
            self.remove(&instance, Logs::Remove).await;
        }
        Ok(())
    }

    async fn kill_containers(&mut self) -> Result<(), SyncHalted> {
        for kill in self.actions.kill.clone() {
            let order = KillRequest::of(&self.req.pod, &kill);
            self.kill_one(order, &kill.name).await?;
        }
        Ok(())
    }

    async fn reset(&mut self) -> Result<(), SyncHalted> {
        for reset in self.actions.reset.clone() {
            let Some(instance) = self.req.observed.containers.iter().find(|c| c.id == reset.id).cloned() else {
                continue;
            };
            if reset.kill_first {
                let order = KillRequest::at_once(&self.req.pod, &instance);
                self.kill_one(order, &reset.name).await?;
            }
            self.outcome.acted = true;
            if let Err(err) = self.rt.remove_container(&self.req.pod, &instance, Logs::Keep).await {
                self.failed(ActionKind::RemoveContainer, &reset.name, "RemoveContainerError", err);
                return Err(SyncHalted);
            }
            self.rt.deps.resources.released(self.req.pod.uid(), &reset.name);
            self.succeeded(ActionKind::RemoveContainer, &reset.name);
            self.outcome.reset = true;
        }
        Ok(())
    }

    async fn kill_one(&mut self, order: KillRequest, name: &str) -> Result<(), SyncHalted> {
        self.outcome.acted = true;
        let ips = self.ips.clone();
        let killed = tokio::select! {
            biased;
            killed = self.rt.kill_container(order, &ips, &self.req.progress) => killed,
            () = self.req.stopping.cancelled() => return Err(SyncHalted),
        };
        match killed {
            Ok(()) => {
                self.succeeded(ActionKind::KillContainer, name);
                Ok(())
            }
            Err(err) => {
                self.failed(ActionKind::KillContainer, name, "KillContainerError", err.to_string());
                Err(SyncHalted)
            }
        }
    }

    /// Removes all but the newest exited instance of each init container.
    async fn prune_init(&mut self) -> Result<(), SyncHalted> {
        if self.actions.create_sandbox {
            return Ok(());
        }
        let ended = |c: &&ObservedContainer| matches!(c.state, ContainerState::Exited | ContainerState::Unknown);
        let doomed: Vec<ObservedContainer> = self
            .req
            .pod
            .init_containers()
            .iter()
            .flat_map(|init| {
                let same = self.req.observed.containers.iter().filter(move |c| *c.name == *init.name);
                same.filter(ended).skip(1).cloned()
            })
            .filter(|c| !self.actions.reset.iter().any(|r| r.id == c.id))
            .collect();
        for instance in doomed {
            self.remove(&instance, Logs::Remove).await;
        }
        Ok(())
    }

    /// Removes an unneeded instance; garbage collection retries after a failure. Does not set
    /// `outcome.acted`: a removal that fails, or whose container the runtime still lists, would start
    /// the next sync at once, without a pause.
    async fn remove(&mut self, instance: &ObservedContainer, logs: Logs) {
        let _removes = self.req.progress.start_concurrent(format!("RemoveContainer {}", instance.name));
        if let Err(err) = self.rt.remove_container(&self.req.pod, instance, logs).await {
            error!(pod = %self.req.pod.object_name(), podUID = %self.req.pod.uid(), containerName = %instance.name,
                containerID = %instance.id, err, "Failed to remove container");
        }
    }

    async fn create_sandbox(&mut self) -> Result<(), SyncHalted> {
        let pod = &self.req.pod;
        let metrics = &self.rt.deps.metrics;
        if self.stopping() {
            return Err(SyncHalted);
        }
        metrics.started_pods.inc();
        if pod.spec().host_users == Some(false) {
            metrics.started_userns_pods.inc();
        }
        let id = match self.run_sandbox().await {
            Ok(id) => id,
            Err(SandboxError::Stopped) => return Err(SyncHalted),
            Err(SandboxError::Failed(err)) => {
                if !self.stopping() {
                    metrics.started_pods_errors.inc();
                    let text = format!("Failed to create pod sandbox: {err}");
                    self.event(EventRecord::warning(pod.id(), "FailedCreatePodSandBox", text));
                    let message = format!("Failed to create sandbox for pod \"{}\": {err}", pod.id());
                    let name = pod.name().to_owned();
                    self.failed(ActionKind::CreatePodSandbox, &name, "CreatePodSandboxError", message);
                }
                return Err(SyncHalted);
            }
        };
        self.succeeded(ActionKind::CreatePodSandbox, self.req.pod.name());
        self.read_addresses(&id).await?;
        self.sandbox = Some(id);
        (self.req.sandbox_ready)();
        Ok(())
    }

    async fn run_sandbox(&mut self) -> Result<SandboxId, SandboxError> {
        let attempt = self.actions.attempt;
        let config = self.sandbox_config().await.map_err(SandboxError::Failed)?;
        let handler = self.handler().await.map_err(SandboxError::Failed)?;
        let step = self.req.progress.start_concurrent("RunPodSandbox");
        self.outcome.acted = true;
        let began = Instant::now();
        let (cri, under) = (self.rt.deps.cri.clone(), handler.clone());
        let call = async move { cri.run_pod_sandbox((*config).clone(), &under).await };
        let key = CreateKey::Sandbox { pod: self.req.pod.uid().clone(), attempt };
        let created = self.rt.creates.create(key, call, &self.req.stopping).await;
        let metrics = &self.rt.deps.metrics;
        metrics.run_sandbox.with_label_values(&[handler.as_str()]).observe(began.elapsed().as_secs_f64());
        if let Err(CreateError::Reserved(_, again)) = &created {
            self.outcome.retry_at = Some(Instant::now() + *again);
        }
        match created {
            Ok(id) => Ok(id.into()),
            Err(CreateError::Stopped) => Err(SandboxError::Stopped),
            Err(CreateError::Cri(err) | CreateError::Reserved(err, _)) => {
                step.fail();
                metrics.run_sandbox_errors.with_label_values(&[handler.as_str()]).inc();
                Err(SandboxError::Failed(err.to_string()))
            }
        }
    }

    async fn read_addresses(&mut self, id: &SandboxId) -> Result<(), SyncHalted> {
        // Its addresses are the node's; the runtime reports none.
        if self.req.pod.is_host_network() {
            return Ok(());
        }
        let step = self.req.progress.start_concurrent("PodSandboxStatus");
        let answer = self.rt.deps.cri.pod_sandbox_status(id.as_str()).await;
        let status = answer.and_then(|reply| reply.status.ok_or(CriError::Invalid("sandbox status is nil".to_owned())));
        match status {
            Ok(status) => {
                self.ips = addresses(status.network);
                Ok(())
            }
            Err(err) => {
                step.fail();
                let text = format!("Unable to get pod sandbox status: {err}");
                self.event(EventRecord::warning(self.req.pod.id(), "FailedPodSandBoxStatus", text));
                self.outcome.error = Some(err.to_string());
                Err(SyncHalted)
            }
        }
    }

    /// The sandbox configuration, built once per sync and only if needed.
    pub(super) async fn sandbox_config(&mut self) -> Result<Arc<cri::PodSandboxConfig>, String> {
        if let Some(known) = &self.sandbox_config {
            return Ok(known.clone());
        }
        let handler = self.handler().await?;
        let request = SandboxRequest {
            pod: &self.req.pod,
            attempt: self.actions.attempt,
            cgroup_parent: &self.req.cgroup_parent,
            handler: &handler,
        };
        let config = Arc::new(self.rt.deps.prepare.sandbox(request).await.map_err(|e| e.to_string())?);
        self.sandbox_config = Some(config.clone());
        Ok(config)
    }

    /// The runtime handler of the pod's RuntimeClass.
    pub(super) async fn handler(&mut self) -> Result<String, String> {
        if let Some(known) = &self.handler {
            return Ok(known.clone());
        }
        let class = self.req.pod.spec().runtime_class_name.as_deref();
        let handler = self.rt.deps.objects.runtime_handler(class).await.map_err(|e| e.to_string())?;
        self.handler = Some(handler.clone());
        Ok(handler)
    }

    async fn start_ephemeral(&mut self) -> Result<(), SyncHalted> {
        for index in self.actions.start_ephemeral.clone() {
            let Some(ephemeral) = self.req.pod.ephemeral_containers().get(index) else { continue };
            let container = berth_types::spec::ephemeral_as_container(ephemeral);
            let target = ephemeral.target_container_name.clone();
            // A failed ephemeral container does not block the others.
            let _started = self.start(ContainerKind::Ephemeral, &container, target.as_deref()).await;
            if self.stopping() {
                return Err(SyncHalted);
            }
        }
        Ok(())
    }

    async fn start_init(&mut self) -> Result<(), SyncHalted> {
        let pod = self.req.pod.clone();
        for container in self.actions.start_init.clone().into_iter().filter_map(|i| pod.init_containers().get(i)) {
            let started = self.start(ContainerKind::Init, container, None).await;
            if self.stopping() || (started.is_err() && !Pod::is_sidecar(container)) {
                return Err(SyncHalted);
            }
        }
        Ok(())
    }
}

enum SandboxError {
    Stopped,
    Failed(String),
}

/// Whether the logs of a removed container are removed.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum Logs {
    /// Logs are kept.
    Keep,
    /// Logs are removed first; if that fails the container is kept too.
    Remove,
}

impl RuntimeManager {
    /// Removes one exited instance.
    pub(super) async fn remove_container(
        &self,
        pod: &Pod,
        instance: &ObservedContainer,
        logs: Logs,
    ) -> Result<(), String> {
        let file = ContainerLogFile {
            pod: pod.id().clone(),
            container: instance.name.clone(),
            id: instance.id.clone(),
            path: instance.log_path.clone().into(),
        };
        self.remove_instance(file, logs).await
    }

    /// Removes one exited instance and, depending on `logs`, its logs.
    pub(super) async fn remove_instance(&self, file: ContainerLogFile, logs: Logs) -> Result<(), String> {
        let id = file.id.clone();
        match logs {
            Logs::Keep => {}
            // An empty path must never become a pattern that matches other files.
            Logs::Remove if file.path.as_os_str().is_empty() => {
                warn!(containerID = %id, "Runtime reports no log path of container, not removing its logs");
            }
            Logs::Remove => self.deps.logs.remove(file).await?,
        }
        match self.deps.cri.remove_container(id.as_str()).await {
            Err(error) if !error.is_not_found() => Err(error.to_string()),
            _ => Ok(()),
        }
    }
}

/// Primary address first; empty if any address does not parse.
fn addresses(network: Option<cri::PodSandboxNetworkStatus>) -> Vec<IpAddr> {
    let Some(network) = network else { return Vec::new() };
    let all = std::iter::once(network.ip).chain(network.additional_ips.into_iter().map(|a| a.ip));
    all.map(|text| text.parse().ok()).collect::<Option<Vec<_>>>().unwrap_or_default()
}
