//! Fixture: a daemon that can be killed and restarted, and its CRI client.

use std::{
    collections::BTreeSet,
    fs,
    ops::Deref,
    path::{Path, PathBuf},
    process::{Child, Command, Stdio},
    time::{Duration, Instant},
};

use berth_proto::cri;
use berth_sys::failpoint;
use hyper_util::rt::TokioIo;
use tokio::{net::UnixStream, time::sleep};
use tonic::transport::Endpoint;

use crate::{daemon, test_machine};
pub use berth_testkit::cri_calls::container;
use berth_testkit::cri_calls::{self, Calls};

/// Timeout of a step.
pub const LIMIT: Duration = Duration::from_secs(60);
/// Polling interval of states without a notification.
const POLL_INTERVAL: Duration = Duration::from_millis(5);
/// Timeout of asynchronous cleanup.
const LEFT_LIMIT: Duration = Duration::from_secs(30);

/// How daemons are started.
#[derive(Clone, Default)]
pub struct DaemonOptions {
    /// Snapshotter of the daemon; empty selects the best one.
    pub snapshotter: &'static str,
    /// This program, if it is bind-mounted to another directory with another shim beside it.
    pub program: Option<PathBuf>,
    /// Whether the daemon verifies all images before it serves.
    pub verifies: bool,
}

/// A daemon and its directory.
pub struct Fixture {
    pub place: PathBuf,
    daemon: Child,
    calls: Calls,
    /// How daemons are started.
    pub options: DaemonOptions,
    /// Inventory of the machine to compare with.
    before: BTreeSet<String>,
    leaks: Vec<String>,
}

/// CRI calls of the fixture.
impl Deref for Fixture {
    type Target = Calls;

    fn deref(&self) -> &Calls {
        &self.calls
    }
}

impl Drop for Fixture {
    fn drop(&mut self) {
        let _ = self.daemon.kill();
        let _ = self.daemon.wait();
        if std::thread::panicking() {
            // The next test starts without leftovers of this one.
            test_machine::end_processes();
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

impl Fixture {
    /// Starts a daemon in its own directory.
    pub async fn start() -> Self {
        Self::with(|_| DaemonOptions::default()).await
    }

    /// Like [`Fixture::start`], with options; `ready` prepares the directory.
    pub async fn with(ready: impl FnOnce(&Path) -> DaemonOptions) -> Self {
        static COUNT: std::sync::atomic::AtomicU32 = std::sync::atomic::AtomicU32::new(0);
        let number = COUNT.fetch_add(1, std::sync::atomic::Ordering::Relaxed);
        // A slow machine imports the image once.
        let place =
            Path::new(test_machine::PLACE).join(if test_machine::is_virtual() { 0 } else { number }.to_string());
        fs::create_dir_all(&place).expect("a place");
        let manner = ready(&place);
        let daemon = spawn(&place, &manner);
        let calls = connect(&place).await;
        Self { place, daemon, calls, options: manner, before: BTreeSet::new(), leaks: Vec::new() }
    }

    /// Arms a step: the first process that reaches it runs the action.
    pub fn arm(&self, step: &str, act: &str) {
        // Renamed, so that no process reads a partial file.
        let (new, file) = (self.place.join("steps.new"), self.place.join("steps"));
        fs::write(&new, format!("{step} {act}")).and_then(|()| fs::rename(&new, &file)).expect("armed");
    }

    /// Whether a process reached the armed step.
    pub fn has_fired(&self) -> bool {
        !self.place.join("steps").exists()
    }

    /// Disarms a step that no process reached.
    pub fn disarm(&self) {
        let _ = fs::remove_file(self.place.join("steps"));
    }

    /// Waits until the daemon has exited.
    pub async fn until_dead(&mut self, what: &str) {
        let begun = Instant::now();
        while self.daemon.try_wait().expect("a child").is_none() {
            assert!(begun.elapsed() < LIMIT, "{what}: the daemon lives");
            sleep(POLL_INTERVAL).await;
        }
    }

    /// Kills the daemon.
    pub fn kill(&mut self) {
        self.daemon.kill().expect("killed");
        self.daemon.wait().expect("a child");
    }

    /// Replaces the daemon; returns once the new one has recovered its state.
    pub async fn restart(&mut self) {
        self.kill();
        self.daemon = spawn(&self.place, &self.options);
        self.calls = connect(&self.place).await;
    }

    /// Waits until a container has exited.
    pub async fn exited(&self, id: &str) -> cri::ContainerStatus {
        let begun = Instant::now();
        loop {
            let status = self.status(id).await;
            if status.state() == cri::ContainerState::ContainerExited {
                return status;
            }
            assert!(begun.elapsed() < LIMIT, "{id} does not end: {status:?}");
            sleep(POLL_INTERVAL).await;
        }
    }

    /// Waits until a container's log contains a text.
    pub async fn until_logged(&self, id: &str, what: &str) {
        let (begun, log) = (Instant::now(), self.status(id).await.log_path);
        while !fs::read_to_string(&log).is_ok_and(|text| text.contains(what)) {
            assert!(begun.elapsed() < LIMIT, "{id} does not log \"{what}\" in {log}");
            sleep(POLL_INTERVAL).await;
        }
    }

    /// Waits until a sandbox is not ready; returns the elapsed time.
    pub async fn until_not_ready(&self, id: &str) -> Duration {
        let begun = Instant::now();
        let ready = cri::PodSandboxState::SandboxReady;
        while self.sandboxes().await.iter().any(|sandbox| sandbox.id == id && sandbox.state() == ready) {
            assert!(begun.elapsed() < LIMIT, "{id} is ready still");
            sleep(POLL_INTERVAL).await;
        }
        begun.elapsed()
    }

    /// Removes everything that is listed, as the kubelet does.
    pub async fn remove_all(&self, what: &str) {
        for sandbox in self.sandboxes().await {
            self.stop(&sandbox.id).await.unwrap_or_else(|e| panic!("{what}: stop: {e}"));
            self.remove(&sandbox.id).await.unwrap_or_else(|e| panic!("{what}: remove: {e}"));
        }
        assert_eq!(self.containers().await, [], "{what}");
    }

    /// Waits until the machine matches the inventory; differences are recorded for [`Fixture::leaks`].
    pub async fn nothing_left(&mut self, what: &str) {
        let begun = Instant::now();
        loop {
            let now = test_machine::inventory(&self.place);
            let left: Vec<_> = now.difference(&self.before).collect();
            let missing: Vec<_> = self.before.difference(&now).collect();
            if left.is_empty() && missing.is_empty() {
                return;
            }
            if begun.elapsed() > LEFT_LIMIT {
                self.leaks.push(format!("{what}: left {left:#?}, missing {missing:#?}"));
                // Later checks must not report these differences again.
                self.before = now;
                return;
            }
            sleep(POLL_INTERVAL).await;
        }
    }

    /// Takes the inventory that later checks compare with.
    pub fn take_inventory(&mut self) {
        self.before = test_machine::inventory(&self.place);
    }

    /// Fails the test if any difference was recorded.
    pub fn no_leaks(&self) {
        assert!(self.leaks.is_empty(), "{}", self.leaks.join("\n"));
    }
}

fn spawn(place: &Path, manner: &DaemonOptions) -> Child {
    let log = fs::OpenOptions::new().create(true).append(true).open(place.join("daemon.log")).expect("a log");
    let own = std::env::current_exe().expect("this program");
    let mut daemon = Command::new(manner.program.as_ref().unwrap_or(&own));
    daemon.arg("daemon").arg(place).env(failpoint::VARIABLE, place.join("steps"));
    daemon.env(daemon::SNAPSHOTTER, manner.snapshotter);
    if manner.verifies {
        daemon.env(daemon::VERIFIES, "1");
    }
    daemon.stdin(Stdio::null()).stdout(Stdio::null()).stderr(log).spawn().expect("started")
}

/// Connects to a starting daemon; returns once it has recovered its state.
async fn connect(place: &Path) -> Calls {
    let socket = daemon::socket(place);
    // The previous daemon's socket has no listener.
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
        sleep(POLL_INTERVAL).await;
    }
}

/// PID namespace mode of a pod's containers.
pub type Pids = cri::NamespaceMode;

/// A pod with a network and a host port.
pub fn pod(rig: &Fixture, name: &str, pids: Pids) -> cri::PodSandboxConfig {
    let port = cri::PortMapping { container_port: 80, host_port: 18_080, ..cri::PortMapping::default() };
    let namespaces = cri::NamespaceOption { pid: pids.into(), ..cri::NamespaceOption::default() };
    let mut config = cri_calls::sandbox(name, namespaces);
    config.log_directory = rig.place.join("logs").display().to_string();
    // Host ports need a packet filter.
    config.port_mappings.extend((!test_machine::is_virtual()).then_some(port));
    config.linux.as_mut().expect("given").cgroup_parent = test_machine::parent();
    config
}
