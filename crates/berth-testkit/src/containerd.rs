//! Private containerd for tests: own root, state, socket, and bridge, cleaned up on drop.
//!
//! Needs root, containerd, runc, the CNI plugins, and busybox-static. If one is missing, the test prints its name and
//! is skipped; if `CI` is set, it fails.

use std::{
    fs,
    path::{Path, PathBuf},
    process::{Child, Command, Stdio},
    sync::atomic::{AtomicU32, Ordering},
    time::{Duration, Instant},
};

use berth_cri::{CriConfig, RuntimeService, connect};
use berth_metrics::Registry;
use futures::future::join_all;

use super::{
    embedded::cleanup::unmount_below,
    image::{BUSYBOX, Image, write_archive},
    subnet::Subnet,
};

/// Running containerd; drop stops it and cleans up.
pub struct Containerd {
    dir: tempfile::TempDir,
    child: Child,
    bridge: String,
    _subnet: Subnet,
}

static NEXT: AtomicU32 = AtomicU32::new(0);

/// Reason why real-runtime tests cannot run here; `None` if they can.
pub fn missing() -> Option<String> {
    if !nix::unistd::geteuid().is_root() {
        return Some("needs root to run containerd".to_owned());
    }
    let found = |name: &str| {
        std::env::var("PATH")
            .unwrap_or_default()
            .split(':')
            .chain(["/usr/sbin", "/sbin"])
            .any(|p| Path::new(p).join(name).exists())
    };
    let programs = ["containerd", "runc", "ctr", "busybox"].into_iter().filter(|name| !found(name));
    let absent: Vec<&str> = programs.collect();
    (!absent.is_empty()).then(|| format!("needs {}", absent.join(", ")))
}

/// Returns whether a test must be skipped and prints its name and the reason.
///
/// # Panics
/// The test would be skipped on CI.
pub fn skips(test: &str) -> bool {
    let Some(why) = missing() else { return false };
    assert!(std::env::var_os("CI").is_none(), "{test} may not be skipped on CI: {why}");
    println!("skipped: {test}: {why}");
    true
}

/// Starts containerd; prints the test's name and returns `None` if this machine cannot run it.
pub fn start_or_skip(test: &str) -> Option<Containerd> {
    (!skips(test)).then(Containerd::start)
}

impl Containerd {
    /// Starts containerd and imports the test images.
    pub fn start() -> Self {
        Self::configured(|config| config)
    }

    /// Starts containerd with a changed `config.toml`.
    pub fn configured(change: impl FnOnce(String) -> String) -> Self {
        let dir = tempfile::Builder::new().prefix("berth-ctd-").tempdir().expect("failed to create directory");
        let number = NEXT.fetch_add(1, Ordering::Relaxed);
        let bridge = format!("bt{}x{number}", std::process::id() % 100_000);
        let subnet = Subnet::take(200);
        fs::create_dir_all(dir.path().join("cni")).expect("failed to create directory");
        fs::write(dir.path().join("cni/10-berth.conflist"), fill("cni.conflist", dir.path(), &bridge, subnet.cidr()))
            .expect("written");
        let config = change(fill("containerd.toml", dir.path(), &bridge, subnet.cidr()));
        fs::write(dir.path().join("config.toml"), config).expect("written");
        let child = spawn(dir.path());
        let started = Self { dir, child, bridge, _subnet: subnet };
        started.wait_until_ready();
        started.import(&[Image::busybox(BUSYBOX), Image::pause()]);
        started
    }

    /// Kills containerd and removes its socket; containers keep running.
    pub fn crash(&mut self) {
        self.child.kill().expect("failed to kill containerd");
        self.child.wait().expect("failed to wait for containerd");
        fs::remove_file(self.socket()).expect("failed to remove the socket");
    }

    /// Starts containerd again after a crash.
    pub fn restart(&mut self) {
        self.child = spawn(self.dir.path());
        self.wait_until_ready();
    }

    /// CRI endpoint, as in `containerRuntimeEndpoint`.
    pub fn endpoint(&self) -> String {
        format!("unix://{}", self.socket().display())
    }

    /// Path of the socket.
    pub fn socket(&self) -> PathBuf {
        self.dir.path().join("containerd.sock")
    }

    /// Process ID of containerd.
    pub fn pid(&self) -> u32 {
        self.child.id()
    }

    /// Temporary directory, removed on drop.
    pub fn dir(&self) -> &Path {
        self.dir.path()
    }

    /// Log of containerd so far, for failure messages.
    pub fn log(&self) -> String {
        fs::read_to_string(self.dir.path().join("log")).unwrap_or_default()
    }

    /// Builds and imports images.
    pub fn import(&self, images: &[Image<'_>]) {
        let archive = self.dir.path().join("images.tar");
        write_archive(images, &archive).expect("failed to write the image archive");
        let out = self.ctr(&["images", "import", "--no-unpack=false", &archive.to_string_lossy()]);
        let out = if out.0 { out } else { self.ctr(&["images", "import", &archive.to_string_lossy()]) };
        assert!(out.0, "import: {}\n{}", out.1, self.log());
    }

    /// Runs `ctr` in the CRI namespace; returns whether it succeeded, and its output.
    pub fn ctr(&self, args: &[&str]) -> (bool, String) {
        let out = Command::new("ctr")
            .arg("-a")
            .arg(self.socket())
            .args(["-n", "k8s.io"])
            .args(args)
            .output()
            .expect("failed to run ctr");
        (out.status.success(), String::from_utf8_lossy(&[out.stdout, out.stderr].concat()).into_owned())
    }

    fn wait_until_ready(&self) {
        let deadline = Instant::now() + Duration::from_secs(30);
        while !(self.socket().exists() && self.ctr(&["version"]).0) {
            assert!(Instant::now() < deadline, "containerd is not ready\n{}", self.log());
            std::thread::sleep(Duration::from_millis(50));
        }
    }
}

fn fill(template: &str, dir: &Path, bridge: &str, subnet: &str) -> String {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../examples").join(template);
    fs::read_to_string(path)
        .expect("failed to write the configuration file")
        .replace("@DIR@", &dir.to_string_lossy())
        .replace("@CNI@", "/usr/lib/cni")
        .replace("@BRIDGE@", bridge)
        .replace("@SUBNET@", subnet)
}

/// Starts the process, with its log file.
fn spawn(dir: &Path) -> Child {
    let log =
        fs::OpenOptions::new().create(true).append(true).open(dir.join("log")).expect("failed to open the log file");
    Command::new("containerd")
        .arg("--config")
        .arg(dir.join("config.toml"))
        .stdin(Stdio::null())
        .stdout(log.try_clone().expect("failed to duplicate the log file"))
        .stderr(log)
        .spawn()
        .expect("failed to start containerd")
}

/// Removes every sandbox through CRI: only the runtime knows what its network plugins have set up.
fn remove_sandboxes(endpoint: String) {
    let limit = Duration::from_secs(10);
    let config = CriConfig { endpoint, image_endpoint: String::new(), request_timeout: limit, list_streaming: false };
    let work = async {
        let Ok(connection) = connect(&config, &Registry::new()) else { return };
        let cri = &connection.runtime;
        let left = cri.list_pod_sandbox(None).await.unwrap_or_default(); // some tests run without CRI
        let remove = |sandbox: berth_proto::cri::PodSandbox| async move {
            let _ = cri.stop_pod_sandbox(&sandbox.id).await; // the caller cleans up what remains
            let _ = cri.remove_pod_sandbox(&sandbox.id).await;
        };
        join_all(left.into_iter().map(remove)).await;
    };
    let runtime =
        tokio::runtime::Builder::new_current_thread().enable_all().build().expect("failed to build the tokio runtime");
    let _ = runtime.block_on(async { tokio::time::timeout(limit, work).await });
}

impl Drop for Containerd {
    fn drop(&mut self) {
        if self.child.try_wait().is_ok_and(|end| end.is_none()) {
            // In a separate thread, because a tokio runtime may run in this one.
            let endpoint = self.endpoint();
            let _ = std::thread::spawn(|| remove_sandboxes(endpoint)).join();
        }
        let (_, tasks) = self.ctr(&["tasks", "ls", "-q"]);
        for task in tasks.lines() {
            self.ctr(&["tasks", "kill", "-s", "SIGKILL", "-a", task]);
        }
        for task in tasks.lines() {
            self.ctr(&["tasks", "rm", "-f", task]);
        }
        let _ = self.child.kill(); // a test may have killed it
        let _ = self.child.wait();
        let needle = self.dir.path().to_string_lossy().into_owned();
        kill_shims(&needle);
        unmount_below(&needle);
        let _ = Command::new("ip").args(["link", "del", &self.bridge]).output(); // absent if no pod had a network
    }
}

/// Kills the shims of this containerd, which outlive it by design; their command line contains the socket path.
fn kill_shims(needle: &str) {
    for entry in fs::read_dir("/proc").into_iter().flatten().flatten() {
        let Some(pid) = entry.file_name().to_str().and_then(|n| n.parse::<i32>().ok()) else { continue };
        let command = fs::read(entry.path().join("cmdline")).unwrap_or_default();
        if String::from_utf8_lossy(&command).contains(needle) {
            let _ = nix::sys::signal::kill(nix::unistd::Pid::from_raw(pid), nix::sys::signal::Signal::SIGKILL);
        }
    }
}
