//! State machine of the scripted CRI; `now` is a parameter, no I/O.

use std::collections::{BTreeMap, HashMap};

use berth_proto::cri;
use tonic::Code;

use super::history::{History, LifecycleEvent};

/// gRPC error of the runtime: code and message.
pub type Refusal = (Code, String);

/// Sandbox of a pod.
#[derive(Debug, Clone)]
pub struct Sandbox {
    pub id: String,
    pub config: cri::PodSandboxConfig,
    pub handler: String,
    pub ready: bool,
    pub created_at: i64,
    pub ip: String,
}

/// Container in a sandbox.
#[derive(Debug, Clone)]
pub struct Container {
    pub id: String,
    pub sandbox: String,
    pub config: cri::ContainerConfig,
    pub state: cri::ContainerState,
    pub created_at: i64,
    pub started_at: i64,
    pub finished_at: i64,
    pub exit_code: i32,
    pub reason: String,
    pub message: String,
    pub log_path: String,
}

/// Complete state of the runtime.
#[derive(Debug, Default)]
pub struct RuntimeState {
    pub sandboxes: BTreeMap<String, Sandbox>,
    pub containers: BTreeMap<String, Container>,
    pub images: HashMap<String, cri::Image>,
    next: u64,
    /// Invariant violations: two live containers with one name in one sandbox.
    pub violations: Vec<String>,
    /// Lifecycle events so far.
    pub history: History,
    /// Attempt of the last container instance with a log file, by pod UID and container name: a runtime creates the
    /// file when it starts the container.
    pub logs: HashMap<(String, String), u32>,
}

/// Name, namespace, UID, and attempt of a sandbox.
fn sandbox_key(config: &cri::PodSandboxConfig) -> (String, String, String, u32) {
    let meta = config.metadata.clone().unwrap_or_default();
    (meta.name, meta.namespace, meta.uid, meta.attempt)
}

impl Sandbox {
    pub fn pod_name(&self) -> &str {
        self.config.metadata.as_ref().map_or("", |m| &m.name)
    }

    fn is_static(&self) -> bool {
        self.config.annotations.get("kubernetes.io/config.source").is_some_and(|source| source != "api")
    }

    fn is_host_network(&self) -> bool {
        let options = self
            .config
            .linux
            .as_ref()
            .and_then(|l| l.security_context.as_ref())
            .and_then(|s| s.namespace_options.as_ref());
        options.is_some_and(|o| o.network == cri::NamespaceMode::Node as i32)
    }

    pub fn listed(&self) -> cri::PodSandbox {
        cri::PodSandbox {
            id: self.id.clone(),
            metadata: self.config.metadata.clone(),
            state: self.state() as i32,
            created_at: self.created_at,
            labels: self.config.labels.clone(),
            annotations: self.config.annotations.clone(),
            runtime_handler: self.handler.clone(),
        }
    }

    pub fn stats(&self, containers: Vec<cri::ContainerStats>) -> cri::PodSandboxStats {
        cri::PodSandboxStats {
            attributes: Some(cri::PodSandboxAttributes {
                id: self.id.clone(),
                metadata: self.config.metadata.clone(),
                labels: self.config.labels.clone(),
                annotations: self.config.annotations.clone(),
            }),
            linux: Some(cri::LinuxPodSandboxStats { containers, ..Default::default() }),
            ..Default::default()
        }
    }

    fn state(&self) -> cri::PodSandboxState {
        if self.ready { cri::PodSandboxState::SandboxReady } else { cri::PodSandboxState::SandboxNotready }
    }

    pub fn status(&self) -> cri::PodSandboxStatus {
        let options = self
            .config
            .linux
            .as_ref()
            .and_then(|l| l.security_context.as_ref())
            .and_then(|s| s.namespace_options.clone())
            .unwrap_or_default();
        cri::PodSandboxStatus {
            id: self.id.clone(),
            metadata: self.config.metadata.clone(),
            state: self.state() as i32,
            created_at: self.created_at,
            network: Some(cri::PodSandboxNetworkStatus {
                ip: if self.ready { self.ip.clone() } else { String::new() },
                additional_ips: Vec::new(),
            }),
            linux: Some(cri::LinuxPodSandboxStatus { namespaces: Some(cri::Namespace { options: Some(options) }) }),
            labels: self.config.labels.clone(),
            annotations: self.config.annotations.clone(),
            runtime_handler: self.handler.clone(),
        }
    }
}

impl RuntimeState {
    /// Adds a sandbox `<id>-sandbox` and a running container with that ID.
    pub fn add_running(&mut self, sandbox: cri::PodSandboxConfig, config: cri::ContainerConfig, id: &str, now: i64) {
        let of = format!("{id}-sandbox");
        let sandbox = Sandbox {
            id: of.clone(),
            config: sandbox,
            handler: String::new(),
            ready: true,
            created_at: now,
            ip: String::new(),
        };
        self.sandboxes.insert(of.clone(), sandbox);
        let container = Container {
            id: id.to_owned(),
            sandbox: of,
            config,
            state: cri::ContainerState::ContainerRunning,
            created_at: now,
            started_at: now,
            finished_at: 0,
            exit_code: 0,
            reason: String::new(),
            message: String::new(),
            log_path: String::new(),
        };
        self.containers.insert(id.to_owned(), container);
    }
}

impl Container {
    pub fn name(&self) -> &str {
        self.config.metadata.as_ref().map_or("", |m| &m.name)
    }

    fn attempt(&self) -> u32 {
        self.config.metadata.as_ref().map_or(0, |m| m.attempt)
    }

    pub fn is_running(&self) -> bool {
        self.state == cri::ContainerState::ContainerRunning
    }

    /// Constant resource usage; real CPU and memory usage comes from the cgroup.
    pub fn stats(&self, now: i64) -> cri::ContainerStats {
        let value = |value| Some(cri::UInt64Value { value });
        cri::ContainerStats {
            attributes: Some(cri::ContainerAttributes {
                id: self.id.clone(),
                metadata: self.config.metadata.clone(),
                labels: self.config.labels.clone(),
                annotations: self.config.annotations.clone(),
            }),
            cpu: Some(cri::CpuUsage {
                timestamp: now,
                usage_core_nano_seconds: value(1_000_000),
                ..Default::default()
            }),
            memory: Some(cri::MemoryUsage {
                timestamp: now,
                working_set_bytes: value(1 << 20),
                usage_bytes: value(1 << 20),
                ..Default::default()
            }),
            writable_layer: Some(cri::FilesystemUsage {
                timestamp: now,
                fs_id: Some(cri::FilesystemIdentifier { mountpoint: "/".to_owned() }),
                used_bytes: value(24_576),
                inodes_used: value(6),
            }),
            ..Default::default()
        }
    }

    pub fn is_live(&self) -> bool {
        matches!(self.state, cri::ContainerState::ContainerRunning | cri::ContainerState::ContainerCreated)
    }

    pub fn listed(&self) -> cri::Container {
        cri::Container {
            id: self.id.clone(),
            pod_sandbox_id: self.sandbox.clone(),
            metadata: self.config.metadata.clone(),
            image: self.config.image.clone(),
            image_ref: self.image_ref(),
            state: self.state as i32,
            created_at: self.created_at,
            labels: self.config.labels.clone(),
            annotations: self.config.annotations.clone(),
            ..Default::default()
        }
    }

    fn image_ref(&self) -> String {
        self.config.image.as_ref().map_or_else(String::new, |i| i.image.clone())
    }

    pub fn status(&self) -> cri::ContainerStatus {
        let exited = self.state == cri::ContainerState::ContainerExited;
        cri::ContainerStatus {
            id: self.id.clone(),
            metadata: self.config.metadata.clone(),
            state: self.state as i32,
            created_at: self.created_at,
            started_at: self.started_at,
            finished_at: if exited { self.finished_at } else { 0 },
            exit_code: self.exit_code,
            image: self.config.image.as_ref().map(|i| cri::ImageSpec {
                image: if i.user_specified_image.is_empty() { i.image.clone() } else { i.user_specified_image.clone() },
                ..Default::default()
            }),
            image_ref: self.image_ref(),
            reason: self.reason.clone(),
            message: self.message.clone(),
            labels: self.config.labels.clone(),
            annotations: self.config.annotations.clone(),
            mounts: self.config.mounts.clone(),
            log_path: self.log_path.clone(),
            resources: self
                .config
                .linux
                .as_ref()
                .and_then(|linux| linux.resources.clone())
                .map(|linux| cri::ContainerResources { linux: Some(linux), ..Default::default() }),
            ..Default::default()
        }
    }
}

impl RuntimeState {
    fn id(&mut self) -> String {
        self.next += 1;
        format!("{:064x}", 0xabc0_0000_0000_u64 + self.next)
    }

    /// Creates a sandbox; its name stays reserved until it is removed.
    ///
    /// # Errors
    /// The name is reserved.
    pub fn run_sandbox(&mut self, config: cri::PodSandboxConfig, handler: &str, now: i64) -> Result<String, Refusal> {
        let key = sandbox_key(&config);
        if let Some(taken) = self.sandboxes.values().find(|s| sandbox_key(&s.config) == key) {
            let name = format!("{}_{}_{}_{}", key.0, key.1, key.2, key.3);
            let text = format!("failed to reserve sandbox name {name:?}: name {name:?} is reserved for {:?}", taken.id);
            return Err((Code::Unknown, text));
        }
        let id = self.id();
        let mut sandbox = Sandbox {
            id: id.clone(),
            config,
            handler: handler.to_owned(),
            ready: true,
            created_at: now,
            ip: String::new(),
        };
        if !sandbox.is_host_network() {
            sandbox.ip = format!("10.88.{}.{}", (self.next >> 8) & 0xff, self.next & 0xff);
        }
        let (_, _, uid, attempt) = key;
        let (pod, is_static) = (sandbox.pod_name().to_owned(), sandbox.is_static());
        self.history.note(LifecycleEvent::SandboxReady { sandbox: id.clone(), uid, pod, attempt, is_static });
        self.sandboxes.insert(id.clone(), sandbox);
        Ok(id)
    }

    /// Stops a sandbox; returns the IDs of the containers that died with it.
    pub fn stop_sandbox(&mut self, id: &str, now: i64) -> Vec<String> {
        let Some(sandbox) = self.sandboxes.get_mut(id) else { return Vec::new() };
        if std::mem::replace(&mut sandbox.ready, false) {
            self.history.note(LifecycleEvent::SandboxStopped(id.to_owned()));
        }
        let running: Vec<String> = self
            .containers
            .values()
            .filter(|c| c.sandbox == id && c.state == cri::ContainerState::ContainerRunning)
            .map(|c| c.id.clone())
            .collect();
        for container in &running {
            self.exit(container, 137, "", now);
        }
        running
    }

    /// Removes a sandbox and its containers; returns the IDs of those containers.
    pub fn remove_sandbox(&mut self, id: &str, now: i64) -> Vec<String> {
        self.stop_sandbox(id, now);
        if self.sandboxes.remove(id).is_some() {
            self.history.note(LifecycleEvent::SandboxRemoved(id.to_owned()));
        }
        let gone: Vec<String> = self.containers.values().filter(|c| c.sandbox == id).map(|c| c.id.clone()).collect();
        for container in &gone {
            self.remove(container, now);
        }
        gone
    }

    /// Creates a container; its name stays reserved in its sandbox until it is removed.
    ///
    /// # Errors
    /// Sandbox or image is unknown, the sandbox is not ready, or the name is reserved.
    pub fn create(&mut self, sandbox: &str, config: cri::ContainerConfig, now: i64) -> Result<String, Refusal> {
        let Some(parent) = self.sandboxes.get(sandbox) else {
            return Err((Code::NotFound, format!("failed to find sandbox id {sandbox:?}: not found")));
        };
        if !parent.ready {
            return Err((Code::Unknown, format!("sandbox container {sandbox:?} is not running")));
        }
        let log_path = format!("{}/{}", parent.config.log_directory, config.log_path);
        let image = config.image.as_ref().map_or("", |i| i.image.as_str());
        if self.image(image).is_none() {
            return Err((Code::NotFound, format!("failed to resolve image {image:?}: not found")));
        }
        let meta = config.metadata.clone().unwrap_or_default();
        let mut same = self.containers.values().filter(|c| c.sandbox == sandbox && c.name() == meta.name);
        if let Some(taken) = same.clone().find(|c| c.attempt() == meta.attempt) {
            let text = format!("failed to reserve container name {:?}: name is reserved for {:?}", meta.name, taken.id);
            return Err((Code::Unknown, text));
        }
        if let Some(live) = same.find(|c| c.is_live()) {
            let text = format!("container {} of sandbox {sandbox} created while {} is live", meta.name, live.id);
            self.violations.push(text);
        }
        let id = self.id();
        let (container, name) = (id.clone(), meta.name);
        self.history.note(LifecycleEvent::Created { container, sandbox: sandbox.to_owned(), name });
        self.containers.insert(
            id.clone(),
            Container {
                id: id.clone(),
                sandbox: sandbox.to_owned(),
                config,
                state: cri::ContainerState::ContainerCreated,
                created_at: now,
                started_at: 0,
                finished_at: 0,
                exit_code: 0,
                reason: String::new(),
                message: String::new(),
                log_path,
            },
        );
        Ok(id)
    }

    fn make_log(&mut self, id: &str) {
        let Some(container) = self.containers.get(id) else { return };
        let Some(sandbox) = self.sandboxes.get(&container.sandbox) else { return };
        let uid = sandbox_key(&sandbox.config).2;
        self.logs.insert((uid, container.name().to_owned()), container.attempt());
    }

    /// Checks that a container runs.
    ///
    /// # Errors
    /// The container is unknown or not running.
    pub fn running(&self, id: &str) -> Result<(), Refusal> {
        let container = self.containers.get(id).ok_or_else(|| not_found("container", id))?;
        if container.state == cri::ContainerState::ContainerRunning {
            return Ok(());
        }
        Err((Code::Unknown, format!("container is in {} state", container.state.as_str_name())))
    }

    /// Starts a created container.
    ///
    /// # Errors
    /// The container is unknown or not in state created, or its sandbox is not ready.
    pub fn start(&mut self, id: &str, now: i64) -> Result<(), Refusal> {
        let container = self.containers.get_mut(id).ok_or_else(|| not_found("container", id))?;
        if !self.sandboxes.get(&container.sandbox).is_some_and(|s| s.ready) {
            return Err((Code::Unknown, format!("sandbox container {:?} is not running", container.sandbox)));
        }
        if container.state != cri::ContainerState::ContainerCreated {
            let text = format!("container is in {} state", container.state.as_str_name());
            return Err((Code::Unknown, format!("failed to set starting state for container {id:?}: {text}")));
        }
        container.state = cri::ContainerState::ContainerRunning;
        container.started_at = now;
        self.history.note(LifecycleEvent::Started(id.to_owned()));
        self.make_log(id);
        Ok(())
    }

    /// Ends a container's process; returns whether it ran.
    pub fn exit(&mut self, id: &str, code: i32, reason: &str, now: i64) -> bool {
        let Some(container) = self.containers.get_mut(id) else { return false };
        if container.state != cri::ContainerState::ContainerRunning {
            return false;
        }
        fail(container, code, reason, now);
        self.history.note(LifecycleEvent::Exited(id.to_owned(), code));
        true
    }

    /// Removes a container, and kills it first if it runs; returns whether it existed.
    pub fn remove(&mut self, id: &str, now: i64) -> bool {
        self.exit(id, 137, "", now);
        let known = self.containers.remove(id).is_some();
        if known {
            self.history.note(LifecycleEvent::Removed(id.to_owned()));
        }
        known
    }

    /// Marks a created container as failed to start.
    pub fn fail_start(&mut self, id: &str, message: &str, now: i64) {
        self.make_log(id);
        if let Some(container) = self.containers.get_mut(id) {
            container.started_at = now;
            container.message = message.to_owned();
            fail(container, 128, "StartError", now);
            self.history.note(LifecycleEvent::Exited(id.to_owned(), 128));
        }
    }

    /// Image by ID, tag, digest, or tag without registry and repository prefix.
    pub fn image(&self, name: &str) -> Option<&cri::Image> {
        self.images.values().find(|i| {
            i.id == name
                || i.repo_tags.iter().chain(&i.repo_digests).any(|t| t == name || t.ends_with(&format!("/{name}")))
        })
    }
}

fn fail(container: &mut Container, code: i32, reason: &str, now: i64) {
    container.state = cri::ContainerState::ContainerExited;
    container.exit_code = code;
    container.finished_at = now.max(container.started_at);
    container.reason = match (reason, code) {
        ("", 0) => "Completed".to_owned(),
        ("", _) => "Error".to_owned(),
        (given, _) => given.to_owned(),
    };
}

/// Error for an unknown ID.
pub fn not_found(kind: &str, id: &str) -> Refusal {
    (Code::NotFound, format!("an error occurred when try to find {kind} {id:?}: not found"))
}
