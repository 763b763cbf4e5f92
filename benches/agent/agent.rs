//! Runs a kubelet-compatible binary as a child process and drives it through kubelet's interface.
//!
//! That interface is the command line, the configuration file, the static pod directory, healthz, and the read-only
//! port.

use std::{
    fs,
    net::TcpListener,
    path::{Path, PathBuf},
    process::{Child, Command, Stdio},
    time::{Duration, Instant},
};

use anyhow::{Context, Result, bail, ensure};
use serde_json::{Value, json};
use tokio::{
    io::{AsyncReadExt, AsyncWriteExt},
    net::TcpStream,
};

use crate::manifest::NODE;

/// The binary to benchmark.
#[derive(Debug, Clone)]
pub struct Target {
    /// Label in progress output and errors.
    pub label: &'static str,
    /// Path of the binary.
    pub binary: PathBuf,
    /// Directory in which the agent's temporary directories are created.
    pub home: PathBuf,
}

/// A running agent process; terminated when dropped.
pub struct Agent {
    child: Child,
    command: Command,
    healthz: u16,
    dir: PathBuf,
    cgroup: String,
    read_only: u16,
    secure: u16,
    /// Time from the start of the process to the first successful healthz response.
    pub ready_after: Duration,
}

/// Name prefix of the agents' cgroups.
const GROUP: &str = "bench-";
/// Timeout of a start.
const START: Duration = Duration::from_secs(60);

impl Agent {
    /// Starts an agent on a CRI socket with an empty root directory, and waits until it is healthy.
    ///
    /// # Errors
    /// It does not start, or does not become healthy; the error contains the end of its log.
    pub async fn start(target: &Target, socket: &Path) -> Result<Self> {
        Self::start_with(target, socket, &json!({})).await
    }

    /// Like [`Self::start`], with these fields of the kubelet configuration set.
    ///
    /// # Errors
    /// As [`Self::start`].
    pub async fn start_with(target: &Target, socket: &Path, fields: &Value) -> Result<Self> {
        Self::launch(target, fields, |command| {
            command.arg("--container-runtime-endpoint").arg(format!("unix://{}", socket.display()));
        })
        .await
    }

    /// Like [`Self::start`], with that Berth settings file.
    ///
    /// # Errors
    /// As [`Self::start`].
    pub async fn start_with_settings(target: &Target, socket: &Path, settings: &Path) -> Result<Self> {
        Self::launch(target, &json!({}), |command| {
            command.arg("--container-runtime-endpoint").arg(format!("unix://{}", socket.display()));
            command.env("BERTH_CONFIG", settings);
        })
        .await
    }

    /// Starts an agent on its embedded runtime, with that Berth settings file.
    ///
    /// # Errors
    /// As [`Self::start`].
    pub async fn start_embedded(target: &Target, settings: &Path) -> Result<Self> {
        Self::launch(target, &json!({}), |command| {
            command.args(["--container-runtime-endpoint", "embedded"]).env("BERTH_CONFIG", settings);
        })
        .await
    }

    /// Starts an agent as a node of the cluster of that kubeconfig, with these fields of the kubelet configuration set,
    /// and with that Berth settings file.
    ///
    /// # Errors
    /// As [`Self::start`].
    pub async fn start_in_cluster_with(
        target: &Target,
        socket: &Path,
        kubeconfig: &Path,
        fields: &Value,
        settings: Option<&Path>,
    ) -> Result<Self> {
        // Without clusterDNS the kubelet records a warning event for each pod and for the node.
        let mut all = json!({"clusterDNS": ["10.96.0.10"], "clusterDomain": "cluster.local", "maxPods": 600});
        for (key, value) in fields.as_object().into_iter().flatten() {
            all[key] = value.clone();
        }
        Self::launch(target, &all, |command| {
            command.arg("--container-runtime-endpoint").arg(format!("unix://{}", socket.display()));
            command.arg("--kubeconfig").arg(kubeconfig);
            if let Some(settings) = settings {
                command.env("BERTH_CONFIG", settings);
            }
        })
        .await
    }

    /// Sends SIGTERM and waits for the exit. Returns the time of the exit.
    ///
    /// # Errors
    /// It does not exit before the limit.
    pub async fn end(&mut self, limit: Duration) -> Result<Instant> {
        let began = Instant::now();
        let pid = nix::unistd::Pid::from_raw(i32::try_from(self.child.id())?);
        nix::sys::signal::kill(pid, nix::sys::signal::Signal::SIGTERM)?;
        while self.child.try_wait()?.is_none() {
            ensure!(began.elapsed() < limit, "the agent has not exited after {limit:?}\n{}", self.log_end());
            tokio::time::sleep(Duration::from_millis(2)).await;
        }
        Ok(Instant::now())
    }

    /// Sends SIGKILL and reaps the process.
    ///
    /// # Errors
    /// It cannot be killed.
    pub fn kill(&mut self) -> Result<()> {
        self.child.kill()?;
        self.child.wait()?;
        Ok(())
    }

    /// Starts a killed agent again with the same command, and waits until it is healthy. Returns the time of the start.
    ///
    /// # Errors
    /// As [`Self::start`].
    pub async fn start_again(&mut self) -> Result<Instant> {
        let began = Instant::now();
        self.child = self.command.spawn()?;
        self.until_healthy(self.healthz, began).await?;
        self.ready_after = began.elapsed();
        Ok(began)
    }

    async fn launch(target: &Target, fields: &Value, on_runtime: impl Fn(&mut Command)) -> Result<Self> {
        let dir = tempfile::Builder::new().prefix(target.label).tempdir_in(&target.home)?.keep();
        for folder in ["pods", "root", "logs"] {
            fs::create_dir(dir.join(folder))?;
        }
        let [healthz, read_only, secure] = free_ports()?;
        let cgroup =
            dir.file_name().map(|n| format!("{GROUP}{}", n.to_string_lossy())).context("directory has no name")?;
        cgroups(&cgroup, fs::create_dir);
        let mut config = configuration(&dir, &cgroup, [healthz, read_only, secure]);
        for (key, value) in fields.as_object().into_iter().flatten() {
            config[key] = value.clone();
        }
        fs::write(dir.join("config.yaml"), serde_json::to_vec_pretty(&config)?)?;
        // Invoked under the name `kubelet`, a multi-call binary runs as the kubelet.
        let program = dir.join("kubelet");
        std::os::unix::fs::symlink(&target.binary, &program)?;
        let log = fs::File::create(dir.join("log"))?;
        let mut command = Command::new(&program);
        command
            .arg("--config")
            .arg(dir.join("config.yaml"))
            .arg("--root-dir")
            .arg(dir.join("root"))
            .args(["--hostname-override", NODE])
            .stdin(Stdio::null())
            .stdout(log.try_clone()?)
            .stderr(log);
        on_runtime(&mut command);
        let began = Instant::now();
        let child = command.spawn().with_context(|| format!("cannot start {}", target.binary.display()))?;
        let mut agent = Self { child, command, healthz, dir, cgroup, read_only, secure, ready_after: Duration::ZERO };
        agent.until_healthy(healthz, began).await?;
        agent.ready_after = began.elapsed();
        Ok(agent)
    }

    async fn until_healthy(&mut self, port: u16, began: Instant) -> Result<()> {
        while get(port, "/healthz").await.is_none_or(|answer| !answer.ends_with("ok")) {
            if let Some(end) = self.child.try_wait()? {
                bail!("the agent exited with {end}\n{}", self.log_end());
            }
            ensure!(began.elapsed() < START, "timed out after {START:?} waiting for /healthz\n{}", self.log_end());
            tokio::time::sleep(Duration::from_micros(500)).await;
        }
        Ok(())
    }

    /// Process id of the agent.
    pub fn pid(&self) -> u32 {
        self.child.id()
    }

    /// Read-only port.
    pub fn read_only(&self) -> u16 {
        self.read_only
    }

    /// Main (HTTPS) port.
    pub fn secure(&self) -> u16 {
        self.secure
    }

    /// Writes a pod's static manifest atomically, by rename. Returns the time of the rename.
    pub fn put(&self, name: &str, manifest: &Value) -> Result<Instant> {
        let draft = self.dir.join("draft");
        fs::write(&draft, serde_json::to_vec(manifest)?)?;
        let at = Instant::now();
        fs::rename(draft, self.manifest(name))?;
        Ok(at)
    }

    /// Removes a pod's static manifest. Returns the time of the removal.
    pub fn remove(&self, name: &str) -> Result<Instant> {
        let at = Instant::now();
        fs::remove_file(self.manifest(name))?;
        Ok(at)
    }

    fn manifest(&self, name: &str) -> PathBuf {
        self.dir.join("pods").join(format!("{name}.json"))
    }

    /// Creates a cgroup of that name below the pod's in every hierarchy and moves a process into it.
    pub fn enter(&self, pod: &str, name: &str, process: u32) {
        cgroups(&self.cgroup, |root| {
            let Some(pod) = find(&root, pod) else { return Ok(()) };
            let group = pod.join(name);
            fs::create_dir(&group)?;
            // A cpuset accepts no process until its CPUs and memory nodes are set.
            for file in ["cpuset.cpus", "cpuset.mems"] {
                if let Ok(value) = fs::read(pod.join(file)) {
                    fs::write(group.join(file), value)?;
                }
            }
            fs::write(group.join("cgroup.procs"), process.to_string())
        });
    }

    /// Number of pods in phase Running on the agent's `/pods` page.
    pub async fn running(&self) -> usize {
        get(self.read_only, "/pods").await.map_or(0, |page| page.matches(r#""phase":"Running""#).count())
    }

    /// Waits until the agent reports that many Running pods.
    pub async fn until_running(&self, count: usize, limit: Duration) -> Result<Instant> {
        let deadline = Instant::now() + limit;
        loop {
            let running = self.running().await;
            if running == count {
                return Ok(Instant::now());
            }
            let text = || format!("{running} of {count} pods are Running after {limit:?}\n{}", self.log_end());
            ensure!(Instant::now() < deadline, text());
            tokio::time::sleep(Duration::from_millis(5)).await;
        }
    }

    /// The agent's root directory.
    pub fn root(&self) -> PathBuf {
        self.dir.join("root")
    }

    /// A page of the read-only port, response head included; `None` if nobody responds.
    pub async fn page(&self, path: &str) -> Option<String> {
        get(self.read_only, path).await
    }

    /// Number of log lines written so far.
    pub fn log_lines(&self) -> usize {
        fs::read(self.dir.join("log")).unwrap_or_default().iter().filter(|byte| **byte == b'\n').count()
    }

    /// The last 15 log lines.
    pub fn log_end(&self) -> String {
        let log = fs::read(self.dir.join("log")).unwrap_or_default();
        let text = String::from_utf8_lossy(&log).into_owned();
        let lines: Vec<&str> = text.lines().collect();
        lines.get(lines.len().saturating_sub(15)..).unwrap_or_default().join("\n")
    }
}

impl Drop for Agent {
    fn drop(&mut self) {
        let pid = nix::unistd::Pid::from_raw(i32::try_from(self.child.id()).unwrap_or(i32::MAX));
        let _ = nix::sys::signal::kill(pid, nix::sys::signal::Signal::SIGTERM); // it may have exited by itself
        let deadline = Instant::now() + Duration::from_secs(5);
        while matches!(self.child.try_wait(), Ok(None)) && Instant::now() < deadline {
            std::thread::sleep(Duration::from_millis(5));
        }
        let _ = self.child.kill(); // likewise
        let _ = self.child.wait();
        cgroups(&self.cgroup, remove_tree);
        unmount(&self.dir);
    }
}

/// Unmounts everything below a directory (token volumes of pods that outlive the agent), so that it can be removed.
fn unmount(folder: &Path) {
    let mounts = fs::read_to_string("/proc/self/mountinfo").unwrap_or_default();
    let places = mounts.lines().filter_map(|line| line.split(' ').nth(4));
    let below: Vec<&str> = places.filter(|at| Path::new(at).starts_with(folder)).collect();
    for place in below.into_iter().rev() {
        let _ = nix::mount::umount2(place, nix::mount::MntFlags::MNT_DETACH); // it may have been unmounted with another
    }
}

fn configuration(dir: &Path, cgroup: &str, [healthz, read_only, secure]: [u16; 3]) -> Value {
    json!({
        "apiVersion": "kubelet.config.k8s.io/v1beta1",
        "kind": "KubeletConfiguration",
        "staticPodPath": dir.join("pods"),
        "podLogsDir": dir.join("logs"),
        "address": "127.0.0.1",
        "port": secure,
        "readOnlyPort": read_only,
        "healthzPort": healthz,
        "authentication": {"anonymous": {"enabled": false}, "webhook": {"enabled": false}},
        "authorization": {"mode": "AlwaysAllow"},
        "failCgroupV1": false,
        "failSwapOn": false,
        "cgroupRoot": format!("/{cgroup}"),
        "enforceNodeAllocatable": ["none"],
        "maxPods": 250,
        // Disk pressure on the measuring machine must not affect the figures.
        "evictionHard": {"memory.available": "1Mi", "nodefs.available": "1%", "imagefs.available": "1%"},
    })
}

fn free_ports<const N: usize>() -> Result<[u16; N]> {
    let mut ports = [0; N];
    // All listeners are bound at once, so that the ports differ.
    let listeners: Vec<TcpListener> =
        (0..N).map(|_| TcpListener::bind("127.0.0.1:0")).collect::<Result<_, std::io::Error>>()?;
    for (port, listener) in ports.iter_mut().zip(&listeners) {
        *port = listener.local_addr()?.port();
    }
    Ok(ports)
}

/// The response to a GET, status line included; `None` if nobody responds.
async fn get(port: u16, path: &str) -> Option<String> {
    let mut stream = TcpStream::connect(("127.0.0.1", port)).await.ok()?;
    // HTTP/1.0: one response without chunked encoding, until the end of the stream.
    stream.write_all(format!("GET {path} HTTP/1.0\r\nHost: localhost\r\n\r\n").as_bytes()).await.ok()?;
    let mut answer = Vec::new();
    stream.read_to_end(&mut answer).await.ok()?;
    Some(String::from_utf8_lossy(&answer).into_owned())
}

/// Calls a function with the path of that cgroup in every mounted hierarchy; errors are ignored, because the agent
/// cannot use such a hierarchy either.
fn cgroups<T>(name: &str, act: impl Fn(PathBuf) -> std::io::Result<T>) {
    let mounts = fs::read_to_string("/proc/self/mounts").unwrap_or_default();
    for line in mounts.lines() {
        let fields: Vec<&str> = line.split(' ').collect();
        if let [_, target, "cgroup" | "cgroup2", ..] = fields.as_slice() {
            let _ = act(Path::new(target).join(name)); // without root there are no cgroups, and none are needed
        }
    }
}

/// Finds the directory of that name below another.
fn find(below: &Path, name: &str) -> Option<PathBuf> {
    let folders = fs::read_dir(below).ok()?.flatten().filter(|entry| entry.file_type().is_ok_and(|kind| kind.is_dir()));
    let mut folders: Vec<PathBuf> = folders.map(|entry| entry.path()).collect();
    let own = folders.iter().position(|folder| folder.file_name().is_some_and(|own| own == name));
    match own {
        Some(at) => Some(folders.swap_remove(at)),
        None => folders.iter().find_map(|folder| find(folder, name)),
    }
}

/// Removes cgroups of agents that have exited. Groups whose containers outlived their agent are empty only now. The
/// agent reports every cgroup of the machine on its pages, so leftovers of one measurement would distort the next.
pub fn sweep() {
    let mounts = fs::read_to_string("/proc/self/mounts").unwrap_or_default();
    let hierarchies =
        mounts.lines().map(|line| line.split(' ').collect::<Vec<_>>()).filter_map(|f| match f.as_slice() {
            [_, target, "cgroup" | "cgroup2", ..] => Some(PathBuf::from(target)),
            _ => None,
        });
    for entry in hierarchies.flat_map(|root| fs::read_dir(root).into_iter().flatten().flatten()) {
        if entry.file_name().to_string_lossy().starts_with(GROUP) {
            let _ = remove_tree(entry.path()); // a cgroup with processes cannot be removed
        }
    }
}

fn remove_tree(folder: PathBuf) -> std::io::Result<()> {
    for entry in fs::read_dir(&folder)?.flatten() {
        if entry.file_type()?.is_dir() {
            remove_tree(entry.path())?;
        }
    }
    fs::remove_dir(folder)
}
