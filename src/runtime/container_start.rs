//! Container start: back-off, image, configuration, create, start, postStart hook (spec 03a §7, §8).
//!
//! The images of independent regular containers are pulled concurrently; the containers are created in
//! the order of the specification.

use std::sync::Arc;

use tokio::time::Instant;
use tokio_util::task::AbortOnDropHandle;
use tracing::{error, info};

use super::{
    actions::{self, ContainerKillReason, Kill},
    backoff::{BackoffKey, Now, StartDecision},
    config_preparation::ContainerRequest,
    container_kill::KillRequest,
    creation::{CreateError, CreateKey},
    hooks::LifecycleHook,
    image_volumes::{self, ImageTask, VolumeImages},
    manager::bare,
    pod_sync::{PodSync, SyncHalted},
};
use berth_ports::{ActionKind, ContainerLogFile, EnsureImage, EventRecord, ImageError, PullPolicy, ResolvedImage};
use berth_proto::cri;
use berth_types::{
    ContainerId, ContainerKind, SandboxId, api,
    go_duration::GoDuration,
    observation::{ContainerState, ObservedContainer},
};

/// Why a container was not started.
pub(super) enum NotStarted {
    /// Termination was requested in the meantime: not reported.
    Stopped,
    /// The container is in crash loop back-off.
    BackOff,
    /// Any other failure.
    Failed,
}

/// Result of a start step; the error is `None` if the pod is stopping and nothing is reported.
type Attempt<T> = Result<T, Option<ContainerStartError>>;

struct ContainerStartError {
    code: &'static str,
    message: String,
    retry_at: Option<Instant>,
}

impl ContainerStartError {
    fn new(code: &'static str, message: impl Into<String>) -> Option<Self> {
        Some(Self { code, message: message.into(), retry_at: None })
    }
}

/// The container to start.
#[derive(Clone, Copy)]
struct StartTarget<'a> {
    kind: ContainerKind,
    container: &'a api::Container,
    /// For ephemeral containers: the container whose namespaces it joins.
    target: Option<&'a str>,
}

/// A created container with its log path.
struct CreatedContainer {
    id: ContainerId,
    log_path: std::path::PathBuf,
}

impl PodSync<'_> {
    /// Starts one container, including its image.
    pub(super) async fn start(
        &mut self,
        kind: ContainerKind,
        container: &api::Container,
        target: Option<&str>,
    ) -> Result<(), NotStarted> {
        let subject = StartTarget { kind, container, target };
        self.admit(subject)?;
        let image = self.image(subject).await;
        self.start_admitted(subject, image).await
    }

    /// Starts the regular containers; a failed one does not block the next.
    pub(super) async fn start_regular(&mut self) -> Result<(), SyncHalted> {
        let pod = self.req.pod.clone();
        let mut admitted = Vec::new();
        for container in self.actions.start.clone().into_iter().filter_map(|i| pod.containers().get(i)) {
            let subject = StartTarget { kind: ContainerKind::Regular, container, target: None };
            if self.admit(subject).is_ok() {
                let image = self.image(subject).await;
                admitted.push((subject, image));
            }
        }
        for (subject, image) in admitted {
            let started = self.start_admitted(subject, image).await;
            if self.stopping() || matches!(started, Err(NotStarted::Stopped)) {
                return Err(SyncHalted);
            }
        }
        Ok(())
    }

    /// Checks the crash loop back-off and counts the attempt.
    fn admit(&mut self, subject: StartTarget) -> Result<(), NotStarted> {
        if self.stopping() {
            return Err(NotStarted::Stopped);
        }
        if let Some((message, until)) = self.backing_off(subject.container) {
            let pod = self.req.pod.id();
            let text = format!("Back-off restarting failed container {} in pod {pod}", subject.container.name);
            self.record_event(subject, EventRecord::warning(pod, "BackOff", text));
            let failure = ContainerStartError { code: "CrashLoopBackOff", message, retry_at: Some(until) };
            self.record(subject, failure);
            return Err(NotStarted::BackOff);
        }
        let label = subject.kind.metric_label();
        self.rt.deps.metrics.started_containers.with_label_values(&[label]).inc();
        Ok(())
    }

    fn backing_off(&self, container: &api::Container) -> Option<(String, Instant)> {
        let exited = |c: &&ObservedContainer| *c.name == *container.name && c.state == ContainerState::Exited;
        let newest = self.req.observed.containers.iter().find(exited)?;
        let finished = newest.finished_at.unwrap_or(newest.created_at);
        let now = Now { wall: self.rt.deps.clock.now(), steady: Instant::now().into_std() };
        let key = BackoffKey::of(&self.req.pod, container);
        match self.rt.backoff().turn(key, finished, now) {
            StartDecision::Start => None,
            StartDecision::Wait { delay, until } => {
                let delay = GoDuration::from(delay);
                let message = format!(
                    "back-off {delay} restarting failed container={} pod={}",
                    container.name,
                    self.req.pod.id()
                );
                Some((message, Instant::from_std(until)))
            }
        }
    }

    /// Starts pulling the image; `None` if a created instance is waiting to be started.
    async fn image(&mut self, subject: StartTarget<'_>) -> Attempt<Option<ImageTask>> {
        if self.created_instance(subject).is_some() {
            return Ok(None);
        }
        let config_error = |text: String| ContainerStartError::new("CreateContainerConfigError", text);
        let sandbox = self.sandbox_config().await.map_err(config_error)?;
        let handler = self.handler().await.map_err(config_error)?;
        let request = EnsureImage {
            pod: self.req.pod.clone(),
            image: subject.container.image.clone().unwrap_or_default(),
            policy: PullPolicy::parse(subject.container.image_pull_policy.as_deref()),
            secrets: self.req.secrets.clone(),
            sandbox: Some(sandbox),
            handler,
            field_path: Some(subject.kind.field_path(&subject.container.name)),
            progress: self.req.progress.clone(),
        };
        let images = self.rt.deps.images.clone();
        self.image_volumes.begin(&images, subject.container, &request);
        let pull = berth_otel::in_current_span(async move { images.ensure(request).await });
        Ok(Some(AbortOnDropHandle::new(tokio::spawn(pull))))
    }

    async fn start_admitted(
        &mut self,
        subject: StartTarget<'_>,
        image: Attempt<Option<ImageTask>>,
    ) -> Result<(), NotStarted> {
        let started = match image {
            Ok(image) => self.create_and_start(subject, image).await,
            Err(failure) => {
                self.record_failure_event(subject, &failure);
                Err(failure)
            }
        };
        match started {
            Ok(()) => {
                self.succeeded(ActionKind::StartContainer, &subject.container.name);
                Ok(())
            }
            Err(None) => Err(NotStarted::Stopped),
            Err(Some(_)) if self.stopping() => Err(NotStarted::Stopped),
            Err(Some(failure)) => {
                let labels = [subject.kind.metric_label(), failure.code];
                self.rt.deps.metrics.started_containers_errors.with_label_values(&labels).inc();
                self.record(subject, failure);
                Err(NotStarted::Failed)
            }
        }
    }

    async fn create_and_start(&mut self, subject: StartTarget<'_>, image: Option<ImageTask>) -> Attempt<()> {
        let made = match image {
            Some(image) => {
                let image = self.resolved(subject, image).await?;
                let volume_images = self.volume_images(subject).await?;
                self.create(subject, &image, &volume_images).await
            }
            None => self.adopt(subject).await,
        };
        let made = made.inspect_err(|failure| self.record_failure_event(subject, failure))?;
        let pod = self.req.pod.clone();
        self.record_event(subject, EventRecord::normal(pod.id(), "Created", "Container created"));
        self.start_created(subject, &made).await?;
        self.record_event(subject, EventRecord::normal(pod.id(), "Started", "Container started"));
        let file = ContainerLogFile {
            pod: pod.id().clone(),
            container: subject.container.name.as_str().into(),
            id: made.id.clone(),
            path: made.log_path,
        };
        self.rt.deps.logs.link(file).await;
        self.post_start(subject, &made.id).await
    }

    async fn resolved(&mut self, subject: StartTarget<'_>, image: ImageTask) -> Attempt<ResolvedImage> {
        let answer = tokio::select! {
            biased;
            answer = image => answer,
            () = self.req.stopping.cancelled() => return Err(None),
        };
        let failed = match answer {
            Ok(Ok(image)) => return Ok(image),
            Ok(Err(failed)) => failed,
            Err(gone) => ImageError { reason: "ErrImagePull", message: gone.to_string(), retry_at: None },
        };
        Err(self.not_pulled(subject, failed))
    }

    /// Waits for the images that are mounted as volumes.
    async fn volume_images(&mut self, subject: StartTarget<'_>) -> Attempt<VolumeImages> {
        let pod = self.req.pod.clone();
        let answer = tokio::select! {
            biased;
            answer = self.image_volumes.of(&pod, subject.container) => answer,
            () = self.req.stopping.cancelled() => return Err(None),
        };
        answer.map_err(|failed| self.not_pulled(subject, failed))
    }

    fn not_pulled(&self, subject: StartTarget<'_>, failed: ImageError) -> Option<ContainerStartError> {
        let text = format!("Error: {}", failed.reason);
        self.record_event(subject, EventRecord::warning(self.req.pod.id(), "Failed", text));
        Some(ContainerStartError { code: failed.reason, message: failed.message, retry_at: failed.retry_at })
    }

    /// A created instance in the newest sandbox that still matches the specification: an earlier start
    /// was interrupted between create and start.
    fn created_instance(&self, subject: StartTarget<'_>) -> Option<&ObservedContainer> {
        let newest = self.req.observed.newest(&subject.container.name)?;
        let fits = newest.state == ContainerState::Created
            && Some(&newest.sandbox) == self.sandbox.as_ref()
            && !actions::definition_changed(subject.container, newest);
        fits.then_some(newest)
    }

    async fn adopt(&mut self, subject: StartTarget<'_>) -> Attempt<CreatedContainer> {
        let Some(created) = self.created_instance(subject) else {
            return Err(ContainerStartError::new("CreateContainerError", "created container not found"));
        };
        let made = CreatedContainer { id: created.id.clone(), log_path: created.log_path.clone().into() };
        info!(pod = %self.req.pod.object_name(), podUID = %self.req.pod.uid(),
            containerName = subject.container.name, containerID = %made.id, "Starting previously created container");
        let started = self.rt.deps.resources.before_start(&self.req.pod, &subject.container.name, &made.id).await;
        started.map_err(|e| ContainerStartError::new("PreStartHookError", e.to_string()))?;
        Ok(made)
    }

    async fn create(
        &mut self,
        subject: StartTarget<'_>,
        image: &ResolvedImage,
        volume_images: &VolumeImages,
    ) -> Attempt<CreatedContainer> {
        let StartTarget { container, .. } = subject;
        let rt = self.rt;
        let pod = self.req.pod.clone();
        let config_error = |text: String| ContainerStartError::new("CreateContainerConfigError", text);
        let sandbox = self.sandbox.clone().ok_or_else(|| config_error("the pod has no sandbox".to_owned()))?;
        self.clear_stale(container).await;
        let sandbox_config = self.sandbox_config().await.map_err(config_error)?;
        let restart_count = self.restart_count(container).await;
        let images = (image, volume_images);
        let mut config = self.configure(subject, images, restart_count).await.map_err(config_error)?;
        let applied = container.resources.clone().unwrap_or_default();
        rt.deps.actuated.set_container(pod.uid(), &container.name, applied);
        if pod.spec().resources.is_some() {
            rt.deps.actuated.set_pod_level(pod.uid(), pod.spec().resources.clone());
        }
        let cpus = rt.deps.resources.before_create(&pod, &container.name).await;
        let cpus = cpus.map_err(|e| ContainerStartError::new("PreCreateHookError", e.to_string()))?;
        if let Some(resources) = config.linux.as_mut().and_then(|linux| linux.resources.as_mut()) {
            resources.cpuset_cpus = cpus.unwrap_or_else(|| std::mem::take(&mut resources.cpuset_cpus));
        }
        let log_path = std::path::Path::new(&sandbox_config.log_directory).join(&config.log_path);
        let id = self.create_once(container, (sandbox, sandbox_config), config).await?;
        rt.deps
            .resources
            .before_start(&pod, &container.name, &id)
            .await
            .map_err(|e| ContainerStartError::new("PreStartHookError", e.to_string()))?;
        Ok(CreatedContainer { id, log_path })
    }

    async fn restart_count(&self, container: &api::Container) -> u32 {
        let newest = self.req.observed.newest(&container.name);
        self.rt.deps.prepare.restart_count(&self.req.pod, &container.name, newest).await
    }

    async fn configure(
        &mut self,
        subject: StartTarget<'_>,
        (image, volume_images): (&ResolvedImage, &VolumeImages),
        restart_count: u32,
    ) -> Result<cri::ContainerConfig, String> {
        let handler = self.handler().await?;
        let target = match subject.target.filter(|name| !name.is_empty()) {
            None => None,
            Some(name) => {
                let found = self.req.observed.newest(name);
                Some(&found.ok_or_else(|| format!("unable to find target container {name}"))?.id)
            }
        };
        let step = self.req.progress.start_concurrent(format!("configuration of {}", subject.container.name));
        let request = ContainerRequest {
            pod: &self.req.pod,
            kind: subject.kind,
            container: subject.container,
            target,
            restart_count,
            image,
            volume_images,
            pod_ips: &self.ips,
            volumes: &self.req.volumes,
            handler: &handler,
        };
        let configured = self.rt.deps.prepare.container(request).await;
        configured.map_err(|error| {
            step.fail();
            error.to_string()
        })
    }

    async fn create_once(
        &mut self,
        container: &api::Container,
        (sandbox, sandbox_config): (SandboxId, Arc<cri::PodSandboxConfig>),
        config: cri::ContainerConfig,
    ) -> Attempt<ContainerId> {
        let key = CreateKey::Container {
            pod: self.req.pod.uid().clone(),
            sandbox: sandbox.clone(),
            name: container.name.clone(),
            attempt: config.metadata.as_ref().map_or(0, |m| m.attempt),
        };
        let (images, metrics) = (image_volumes::count(&config), &self.rt.deps.metrics);
        metrics.image_volumes_requested.inc_by(images);
        let cri = self.rt.deps.cri.clone();
        let call = async move { cri.create_container(sandbox.as_str(), config, (*sandbox_config).clone()).await };
        let step = self.req.progress.start_concurrent(format!("CreateContainer {}", container.name));
        self.outcome.acted = true;
        let created = self.rt.creates.create(key, call, &self.req.stopping).await;
        if matches!(created, Err(CreateError::Cri(_) | CreateError::Reserved(..))) {
            step.fail();
        }
        match created {
            Ok(id) => {
                metrics.image_volumes_mounted.inc_by(images);
                Ok(id.into())
            }
            Err(CreateError::Stopped) => Err(None),
            Err(CreateError::Cri(err)) => {
                if image_volumes::is_mount_failure(&err) {
                    metrics.image_volumes_failed.inc_by(images);
                }
                Err(ContainerStartError::new("CreateContainerError", bare(&err)))
            }
            Err(CreateError::Reserved(err, again)) => {
                let retry_at = Some(Instant::now() + again);
                Err(Some(ContainerStartError { code: "CreateContainerError", message: bare(&err), retry_at }))
            }
        }
    }

    /// A created instance that no longer matches would stay forever, and block its name.
    async fn clear_stale(&mut self, container: &api::Container) {
        let Some(newest) = self.req.observed.newest(&container.name) else { return };
        if newest.state == ContainerState::Created && Some(&newest.sandbox) == self.sandbox.as_ref() {
            self.discard(&newest.id.clone()).await;
        }
    }

    async fn discard(&mut self, id: &ContainerId) {
        self.outcome.acted = true;
        if let Err(err) = self.rt.deps.cri.remove_container(id.as_str()).await {
            error!(containerID = %id, %err, "Failed to remove container that was never started");
        }
    }

    async fn start_created(&mut self, subject: StartTarget<'_>, made: &CreatedContainer) -> Attempt<()> {
        let name = &subject.container.name;
        let step = self.req.progress.start_concurrent(format!("StartContainer {name}"));
        self.outcome.acted = true;
        let Err(err) = self.rt.deps.cri.start_container(made.id.as_str()).await else { return Ok(()) };
        step.fail();
        let failure = ContainerStartError::new("RunContainerError", bare(&err).replace(made.id.as_str(), name));
        self.record_failure_event(subject, &failure);
        // Second failed start of a created instance: the next sync creates a new one.
        if self.created_instance(subject).is_some() && !err.is_timeout() {
            self.discard(&made.id).await;
        }
        Err(failure)
    }

    async fn post_start(&mut self, subject: StartTarget<'_>, id: &ContainerId) -> Attempt<()> {
        let container = subject.container;
        let Some(handler) = container.lifecycle.as_ref().and_then(|l| l.post_start.as_ref()) else { return Ok(()) };
        let pod = self.req.pod.clone();
        let path = subject.kind.field_path(&container.name);
        let hook = LifecycleHook {
            handler,
            pod: pod.id(),
            container: &container.name,
            id,
            ips: &self.ips,
            ports: container.ports.as_deref().unwrap_or_default(),
            field_path: Some(&path),
        };
        let step = self.req.progress.start_concurrent(format!("postStart hook of {}", container.name));
        let ran = tokio::select! {
            biased;
            ran = self.rt.run_hook(&hook) => ran,
            () = self.req.stopping.cancelled() => return Err(None),
        };
        drop(step);
        let Err(message) = ran else { return Ok(()) };
        error!(pod = %pod.object_name(), podUID = %pod.uid(), containerName = container.name, containerID = %id,
            err = message, "Failed to execute PostStartHook");
        self.record_event(subject, EventRecord::warning(pod.id(), "FailedPostStartHook", "PostStartHook failed"));
        let kill = Kill {
            id: id.clone(),
            name: container.name.clone(),
            message: "FailedPostStartHook".to_owned(),
            cause: ContainerKillReason::FailedPostStartHook,
        };
        let killed = tokio::select! {
            biased;
            killed = self.rt.kill_container(KillRequest::of(&pod, &kill), &self.ips, &self.req.progress) => killed,
            () = self.req.stopping.cancelled() => return Err(None),
        };
        if let Err(err) = killed {
            error!(containerID = %id, %err, "Failed to kill container after PostStartHook failed");
        }
        Err(ContainerStartError::new("PostStartHookError", message))
    }

    fn record_event(&self, subject: StartTarget, event: EventRecord) {
        self.event(event.at(subject.kind.field_path(&subject.container.name)));
    }

    /// Records the event of a failed step.
    fn record_failure_event(&self, subject: StartTarget, failure: &Option<ContainerStartError>) {
        let Some(failure) = failure else { return };
        let before = match failure.code {
            "PreCreateHookError" => "Internal PreCreateContainer hook failed",
            "PreStartHookError" => "Internal PreStartContainer hook failed",
            _ => "Error",
        };
        let text = format!("{before}: {}", failure.message);
        self.record_event(subject, EventRecord::warning(self.req.pod.id(), "Failed", text));
    }

    fn record(&mut self, subject: StartTarget, failure: ContainerStartError) {
        if let Some(at) = failure.retry_at {
            self.outcome.retry_at = Some(self.outcome.retry_at.map_or(at, |known| known.min(at)));
        }
        self.failed(ActionKind::StartContainer, &subject.container.name, failure.code, failure.message);
    }
}
