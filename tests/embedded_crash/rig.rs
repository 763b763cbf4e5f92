//! A daemon to be killed, and what the kubelet asks of it.

use std::{
    collections::BTreeSet,
    fs,
    path::{Path, PathBuf},
    process::{Child, Command, Stdio},
    time::{Duration, Instant},
};

use berth::{
    proto::cri::{self, runtime_service_client::RuntimeServiceClient},
    sys::step,
};
use hyper_util::rt::TokioIo;
use tokio::{net::UnixStream, time::sleep};
use tonic::{
    Status,
    transport::{Channel, Endpoint},
};

use crate::{daemon, ground};

#[path = "../kit/image.rs"]
#[allow(dead_code, reason = "only the archive is made here")]
pub mod image;

/// Nothing here takes that long.
pub const LIMIT: Duration = Duration::from_secs(60);
/// Pause between two looks at what nobody tells of.
const LOOK: Duration = Duration::from_millis(5);
/// How long what was told to go may take to have gone.
const LEFT_LIMIT: Duration = Duration::from_secs(3);

type Rpc = RuntimeServiceClient<Channel>;

/// A daemon, and its place.
pub struct Rig {
    pub place: PathBuf,
    daemon: Child,
    pub rpc: Rpc,
    snapshotter: &'static str,
    /// What was on the machine.
    before: BTreeSet<String>,
    leaks: Vec<String>,
}

impl Drop for Rig {
    fn drop(&mut self) {
        let _ = self.daemon.kill();
        let _ = self.daemon.wait();
        if std::thread::panicking() {
            // The next test begins without what this one has left.
            ground::end_processes();
            let log = fs::read_to_string(self.place.join("daemon.log")).unwrap_or_default();
            let lines: Vec<&str> = log.lines().collect();
            for folder in fs::read_dir(self.place.join("state/s")).into_iter().flatten().flatten() {
                let log = fs::read_to_string(folder.path().join("shim.log")).unwrap_or_default();
                println!("--- a shim's words\n{log}");
            }
            println!("--- the daemon's last words\n{}\n---", lines[lines.len().saturating_sub(30)..].join("\n"));
        }
    }
}

impl Rig {
    /// A daemon in a place of its own.
    pub async fn start() -> Self {
        Self::with("").await
    }

    /// Likewise, with that snapshotter.
    pub async fn with(snapshotter: &'static str) -> Self {
        static COUNT: std::sync::atomic::AtomicU32 = std::sync::atomic::AtomicU32::new(0);
        let number = COUNT.fetch_add(1, std::sync::atomic::Ordering::Relaxed);
        // A slow machine imports its image once.
        let place = Path::new(ground::PLACE).join(if ground::is_virtual() { 0 } else { number }.to_string());
        fs::create_dir_all(&place).expect("a place");
        let daemon = spawn(&place, snapshotter);
        let rpc = connect(&place).await;
        Self { place, daemon, rpc, snapshotter, before: BTreeSet::new(), leaks: Vec::new() }
    }

    /// Whoever comes to that step does so.
    pub fn arm(&self, step: &str, act: &str) {
        // Never seen half written.
        let (new, file) = (self.place.join("steps.new"), self.place.join("steps"));
        fs::write(&new, format!("{step} {act}")).and_then(|()| fs::rename(&new, &file)).expect("armed");
    }

    /// Whether somebody came to the step.
    pub fn has_fired(&self) -> bool {
        !self.place.join("steps").exists()
    }

    /// Nobody came to the step: nobody shall.
    pub fn disarm(&self) {
        let _ = fs::remove_file(self.place.join("steps"));
    }

    /// Waits until the daemon has ended.
    pub async fn until_dead(&mut self, what: &str) {
        let begun = Instant::now();
        while self.daemon.try_wait().expect("a child").is_none() {
            assert!(begun.elapsed() < LIMIT, "{what}: the daemon lives");
            sleep(LOOK).await;
        }
    }

    /// Kills the daemon.
    pub fn kill(&mut self) {
        self.daemon.kill().expect("killed");
        self.daemon.wait().expect("a child");
    }

    /// Another daemon takes over; returns when it has found again what was there.
    pub async fn again(&mut self) {
        self.kill();
        self.daemon = spawn(&self.place, self.snapshotter);
        self.rpc = connect(&self.place).await;
    }

    /// Asks for a sandbox.
    pub async fn run(&self, config: &cri::PodSandboxConfig) -> Result<String, Status> {
        let request = cri::RunPodSandboxRequest { config: Some(config.clone()), runtime_handler: String::new() };
        Ok(self.rpc.clone().run_pod_sandbox(request).await?.into_inner().pod_sandbox_id)
    }

    /// Asks for a container.
    pub async fn create(&self, sandbox: &str, config: &cri::ContainerConfig) -> Result<String, Status> {
        let (pod_sandbox_id, config) = (sandbox.to_owned(), Some(config.clone()));
        let request = cri::CreateContainerRequest { pod_sandbox_id, config, sandbox_config: None };
        Ok(self.rpc.clone().create_container(request).await?.into_inner().container_id)
    }

    /// Starts a container.
    pub async fn start_container(&self, id: &str) -> Result<(), Status> {
        let request = cri::StartContainerRequest { container_id: id.to_owned() };
        self.rpc.clone().start_container(request).await.map(drop)
    }

    /// A container that runs, of a sandbox.
    pub async fn running(&self, sandbox: &str, config: &cri::ContainerConfig) -> String {
        let id = self.create(sandbox, config).await.expect("made");
        self.start_container(&id).await.expect("starts");
        id
    }

    /// Stops a container within so many seconds.
    pub async fn stop_container(&self, id: &str, timeout: i64) -> Result<(), Status> {
        let request = cri::StopContainerRequest { container_id: id.to_owned(), timeout };
        self.rpc.clone().stop_container(request).await.map(drop)
    }

    /// Removes a container.
    pub async fn remove_container(&self, id: &str) -> Result<(), Status> {
        let request = cri::RemoveContainerRequest { container_id: id.to_owned() };
        self.rpc.clone().remove_container(request).await.map(drop)
    }

    /// Stops a sandbox.
    pub async fn stop(&self, id: &str) -> Result<(), Status> {
        let request = cri::StopPodSandboxRequest { pod_sandbox_id: id.to_owned() };
        self.rpc.clone().stop_pod_sandbox(request).await.map(drop)
    }

    /// Removes a sandbox.
    pub async fn remove(&self, id: &str) -> Result<(), Status> {
        let request = cri::RemovePodSandboxRequest { pod_sandbox_id: id.to_owned() };
        self.rpc.clone().remove_pod_sandbox(request).await.map(drop)
    }

    /// Runs a script in a container: what it writes, and its code.
    pub async fn exec(&self, id: &str, script: &str) -> Result<(String, i32), Status> {
        let cmd = ["/bin/sh", "-c", script].map(str::to_owned).to_vec();
        let request = cri::ExecSyncRequest { container_id: id.to_owned(), cmd, timeout: 20 };
        let reply = self.rpc.clone().exec_sync(request).await?.into_inner();
        Ok((String::from_utf8_lossy(&reply.stdout).into_owned(), reply.exit_code))
    }

    /// All sandboxes.
    pub async fn sandboxes(&self) -> Vec<cri::PodSandbox> {
        let reply = self.rpc.clone().list_pod_sandbox(cri::ListPodSandboxRequest::default()).await;
        reply.expect("listed").into_inner().items
    }

    /// All containers.
    pub async fn containers(&self) -> Vec<cri::Container> {
        let reply = self.rpc.clone().list_containers(cri::ListContainersRequest::default()).await;
        reply.expect("listed").into_inner().containers
    }

    /// What a container is.
    pub async fn status(&self, id: &str) -> cri::ContainerStatus {
        let request = cri::ContainerStatusRequest { container_id: id.to_owned(), verbose: false };
        self.rpc.clone().container_status(request).await.expect("known").into_inner().status.expect("a status")
    }

    /// Waits until a container has ended.
    pub async fn exited(&self, id: &str) -> cri::ContainerStatus {
        let begun = Instant::now();
        loop {
            let status = self.status(id).await;
            if status.state() == cri::ContainerState::ContainerExited {
                return status;
            }
            assert!(begun.elapsed() < LIMIT, "{id} does not end: {status:?}");
            sleep(LOOK).await;
        }
    }

    /// Waits until a sandbox is not ready.
    pub async fn until_not_ready(&self, id: &str) -> Duration {
        let begun = Instant::now();
        let ready = cri::PodSandboxState::SandboxReady;
        while self.sandboxes().await.iter().any(|sandbox| sandbox.id == id && sandbox.state() == ready) {
            assert!(begun.elapsed() < LIMIT, "{id} is ready still");
            sleep(LOOK).await;
        }
        begun.elapsed()
    }

    /// Removes all that is listed, as the kubelet does.
    pub async fn remove_all(&self, what: &str) {
        for sandbox in self.sandboxes().await {
            self.stop(&sandbox.id).await.unwrap_or_else(|e| panic!("{what}: stop: {e}"));
            self.remove(&sandbox.id).await.unwrap_or_else(|e| panic!("{what}: remove: {e}"));
        }
        assert_eq!(self.containers().await, [], "{what}");
    }

    /// Waits until the machine is as it was; what is left is told by [`Rig::leaks`].
    pub async fn nothing_left(&mut self, what: &str) {
        let begun = Instant::now();
        loop {
            let now = ground::inventory(&self.place);
            let left: Vec<_> = now.difference(&self.before).collect();
            let missing: Vec<_> = self.before.difference(&now).collect();
            if left.is_empty() && missing.is_empty() {
                return;
            }
            if begun.elapsed() > LEFT_LIMIT {
                self.leaks.push(format!("{what}: left {left:#?}, missing {missing:#?}"));
                // The next one is not to blame.
                self.before = now;
                return;
            }
            sleep(LOOK).await;
        }
    }

    /// From now on nothing more may be left.
    pub fn look_around(&mut self) {
        self.before = ground::inventory(&self.place);
    }

    /// Nothing was left, ever.
    pub fn no_leaks(&self) {
        assert!(self.leaks.is_empty(), "{}", self.leaks.join("\n"));
    }
}

fn spawn(place: &Path, snapshotter: &str) -> Child {
    let log = fs::OpenOptions::new().create(true).append(true).open(place.join("daemon.log")).expect("a log");
    let mut daemon = Command::new(std::env::current_exe().expect("this program"));
    daemon.arg("daemon").arg(place).env(step::VARIABLE, place.join("steps")).env(daemon::SNAPSHOTTER, snapshotter);
    daemon.stdin(Stdio::null()).stdout(Stdio::null()).stderr(log).spawn().expect("started")
}

/// Connects to a daemon that is starting; returns when it has found again what was there.
async fn connect(place: &Path) -> Rpc {
    let socket = daemon::socket(place);
    // That of the one before leads nowhere.
    let begun = Instant::now();
    loop {
        let path = socket.clone();
        let connector = tower::service_fn(move |_: http::Uri| {
            let path = path.clone();
            async move { UnixStream::connect(path).await.map(TokioIo::new) }
        });
        if let Ok(channel) = Endpoint::from_static("http://socket").connect_with_connector(connector).await {
            let rpc = RuntimeServiceClient::new(channel);
            if rpc.clone().list_pod_sandbox(cri::ListPodSandboxRequest::default()).await.is_ok() {
                return rpc;
            }
        }
        assert!(begun.elapsed() < LIMIT, "the daemon does not answer");
        sleep(LOOK).await;
    }
}

/// Whose processes a pod's containers see.
pub type Pids = cri::NamespaceMode;

/// A pod with a network and a port of the host's.
pub fn pod(rig: &Rig, name: &str, pids: Pids) -> cri::PodSandboxConfig {
    let options = cri::NamespaceOption { pid: pids.into(), ..cri::NamespaceOption::default() };
    let context = cri::LinuxSandboxSecurityContext { namespace_options: Some(options), ..Default::default() };
    let port = cri::PortMapping { container_port: 80, host_port: 18_080, ..cri::PortMapping::default() };
    cri::PodSandboxConfig {
        metadata: Some(cri::PodSandboxMetadata {
            name: name.to_owned(),
            namespace: "ns".to_owned(),
            uid: format!("uid-{name}"),
            attempt: 0,
        }),
        log_directory: rig.place.join("logs").display().to_string(),
        // Without a packet filter nobody has one.
        port_mappings: if ground::is_virtual() { Vec::new() } else { vec![port] },
        linux: Some(cri::LinuxPodSandboxConfig {
            cgroup_parent: ground::parent(),
            security_context: Some(context),
            ..Default::default()
        }),
        ..Default::default()
    }
}

/// A container that runs a script.
pub fn container(name: &str, script: &str, pids: Pids) -> cri::ContainerConfig {
    let options = cri::NamespaceOption { pid: pids.into(), ..Default::default() };
    let context = cri::LinuxContainerSecurityContext { namespace_options: Some(options), ..Default::default() };
    cri::ContainerConfig {
        metadata: Some(cri::ContainerMetadata { name: name.to_owned(), attempt: 0 }),
        image: Some(cri::ImageSpec { image: image::BUSYBOX.to_owned(), ..Default::default() }),
        command: ["/bin/sh", "-c", script].map(str::to_owned).to_vec(),
        log_path: format!("{name}.log"),
        linux: Some(cri::LinuxContainerConfig {
            resources: Some(cri::LinuxContainerResources { cpu_shares: 100, ..Default::default() }),
            security_context: Some(context),
        }),
        ..Default::default()
    }
}
