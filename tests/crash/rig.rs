//! A daemon to be killed, and what the kubelet asks of it.

use std::{
    collections::BTreeSet,
    fs,
    ops::Deref,
    path::{Path, PathBuf},
    process::{Child, Command, Stdio},
    time::{Duration, Instant},
};

use berth_proto::cri;
use berth_sys::step;
use hyper_util::rt::TokioIo;
use tokio::{net::UnixStream, time::sleep};
use tonic::transport::Endpoint;

use crate::{daemon, ground};
pub use berth_testkit::cri_calls::container;
use berth_testkit::cri_calls::{self, Calls};

/// Nothing here takes that long.
pub const LIMIT: Duration = Duration::from_secs(60);
/// Pause between two looks at what nobody tells of.
const LOOK: Duration = Duration::from_millis(5);
/// How long what was told to go may take to have gone.
const LEFT_LIMIT: Duration = Duration::from_secs(30);

/// How daemons are started.
#[derive(Clone, Default)]
pub struct Manner {
    /// How roots are made; empty: as is best.
    pub snapshotter: &'static str,
    /// This program, where another place has another shim beside it.
    pub program: Option<PathBuf>,
    /// Whether they look through all images first.
    pub verifies: bool,
}

/// A daemon, and its place.
pub struct Rig {
    pub place: PathBuf,
    daemon: Child,
    calls: Calls,
    /// How daemons are started.
    pub manner: Manner,
    /// What was on the machine.
    before: BTreeSet<String>,
    leaks: Vec<String>,
}

/// Asked like any runtime.
impl Deref for Rig {
    type Target = Calls;

    fn deref(&self) -> &Calls {
        &self.calls
    }
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
        Self::with(|_| Manner::default()).await
    }

    /// Likewise, in that manner; its place can be made ready.
    pub async fn with(ready: impl FnOnce(&Path) -> Manner) -> Self {
        static COUNT: std::sync::atomic::AtomicU32 = std::sync::atomic::AtomicU32::new(0);
        let number = COUNT.fetch_add(1, std::sync::atomic::Ordering::Relaxed);
        // A slow machine imports its image once.
        let place = Path::new(ground::PLACE).join(if ground::is_virtual() { 0 } else { number }.to_string());
        fs::create_dir_all(&place).expect("a place");
        let manner = ready(&place);
        let daemon = spawn(&place, &manner);
        let calls = connect(&place).await;
        Self { place, daemon, calls, manner, before: BTreeSet::new(), leaks: Vec::new() }
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
        self.daemon = spawn(&self.place, &self.manner);
        self.calls = connect(&self.place).await;
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

    /// Waits until a container has said that.
    pub async fn until_said(&self, id: &str, what: &str) {
        let (begun, log) = (Instant::now(), self.status(id).await.log_path);
        while !fs::read_to_string(&log).is_ok_and(|text| text.contains(what)) {
            assert!(begun.elapsed() < LIMIT, "{id} does not say \"{what}\" in {log}");
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

fn spawn(place: &Path, manner: &Manner) -> Child {
    let log = fs::OpenOptions::new().create(true).append(true).open(place.join("daemon.log")).expect("a log");
    let own = std::env::current_exe().expect("this program");
    let mut daemon = Command::new(manner.program.as_ref().unwrap_or(&own));
    daemon.arg("daemon").arg(place).env(step::VARIABLE, place.join("steps"));
    daemon.env(daemon::SNAPSHOTTER, manner.snapshotter);
    if manner.verifies {
        daemon.env(daemon::VERIFIES, "1");
    }
    daemon.stdin(Stdio::null()).stdout(Stdio::null()).stderr(log).spawn().expect("started")
}

/// Connects to a daemon that is starting; returns when it has found again what was there.
async fn connect(place: &Path) -> Calls {
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
            let calls = Calls::over(channel);
            if calls.rpc.clone().list_pod_sandbox(cri::ListPodSandboxRequest::default()).await.is_ok() {
                return calls;
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
    let port = cri::PortMapping { container_port: 80, host_port: 18_080, ..cri::PortMapping::default() };
    let namespaces = cri::NamespaceOption { pid: pids.into(), ..cri::NamespaceOption::default() };
    let mut config = cri_calls::sandbox(name, namespaces);
    config.log_directory = rig.place.join("logs").display().to_string();
    // Without a packet filter nobody has one.
    config.port_mappings.extend((!ground::is_virtual()).then_some(port));
    config.linux.as_mut().expect("given").cgroup_parent = ground::parent();
    config
}
