//! A kubelet-compatible binary as a process, reached through kubelet's interface only: command
//! line, configuration file, folder of static pods, healthz and read-only port.

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

/// A binary to measure.
#[derive(Debug, Clone)]
pub struct Target {
    /// How it is called in texts.
    pub label: &'static str,
    /// Where it is.
    pub binary: PathBuf,
    /// Where its folders are made.
    pub home: PathBuf,
}

/// A running agent; stopped when dropped.
pub struct Agent {
    child: Child,
    command: Command,
    healthz: u16,
    dir: PathBuf,
    cgroup: String,
    read_only: u16,
    secure: u16,
    /// From the start of the process to the first good answer of healthz.
    pub ready_after: Duration,
}

/// How the control groups of agents begin.
const GROUP: &str = "bench-";
/// Patience with a start.
const START: Duration = Duration::from_secs(60);

impl Agent {
    /// Starts it on a runtime's socket, with nothing on disk from before, and waits until it is
    /// healthy.
    ///
    /// # Errors
    /// It does not start, or does not become healthy; the end of its log is in the text.
    pub async fn start(target: &Target, socket: &Path) -> Result<Self> {
        Self::start_with(target, socket, &json!({})).await
    }

    /// The same with these fields of its configuration set.
    ///
    /// # Errors
    /// As [`Self::start`].
    pub async fn start_with(target: &Target, socket: &Path, fields: &Value) -> Result<Self> {
        Self::launch(target, fields, |command| {
            command.arg("--container-runtime-endpoint").arg(format!("unix://{}", socket.display()));
        })
        .await
    }

    /// Starts it on the runtime it has within, with the settings of that file.
    ///
    /// # Errors
    /// As [`Self::start`].
    pub async fn start_embedded(target: &Target, settings: &Path) -> Result<Self> {
        Self::launch(target, &json!({}), |command| {
            command.args(["--container-runtime-endpoint", "embedded"]).env("BERTH_CONFIG", settings);
        })
        .await
    }

    /// Starts it as a node of the cluster that a kubeconfig says how to reach, with these fields of its configuration
    /// set, and with the settings of that file.
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
        // A node without it tells each pod and itself that it has none.
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

    /// It is asked to end. Returns when it had ended.
    ///
    /// # Errors
    /// It does not end in time.
    pub async fn end(&mut self, limit: Duration) -> Result<Instant> {
        let began = Instant::now();
        let pid = nix::unistd::Pid::from_raw(i32::try_from(self.child.id())?);
        nix::sys::signal::kill(pid, nix::sys::signal::Signal::SIGTERM)?;
        while self.child.try_wait()?.is_none() {
            ensure!(began.elapsed() < limit, "it has not ended after {limit:?}\n{}", self.log_end());
            tokio::time::sleep(Duration::from_millis(2)).await;
        }
        Ok(Instant::now())
    }

    /// It is killed, without a chance to tell anybody.
    ///
    /// # Errors
    /// It cannot be killed.
    pub fn kill(&mut self) -> Result<()> {
        self.child.kill()?;
        self.child.wait()?;
        Ok(())
    }

    /// Starts what was killed, as it was started at first, and waits until it is healthy. Returns when it began.
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
            dir.file_name().map(|n| format!("{GROUP}{}", n.to_string_lossy())).context("a folder has a name")?;
        cgroups(&cgroup, fs::create_dir);
        let mut config = configuration(&dir, &cgroup, [healthz, read_only, secure]);
        for (key, value) in fields.as_object().into_iter().flatten() {
            config[key] = value.clone();
        }
        fs::write(dir.join("config.yaml"), serde_json::to_vec_pretty(&config)?)?;
        // Called by kubelet's name, an agent that is more than a kubelet knows what is meant.
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
                bail!("the agent ended with {end}\n{}", self.log_end());
            }
            ensure!(began.elapsed() < START, "not healthy after {START:?}\n{}", self.log_end());
            tokio::time::sleep(Duration::from_micros(500)).await;
        }
        Ok(())
    }

    /// Its process.
    pub fn pid(&self) -> u32 {
        self.child.id()
    }

    /// Its read-only port.
    pub fn read_only(&self) -> u16 {
        self.read_only
    }

    /// Its main port.
    pub fn secure(&self) -> u16 {
        self.secure
    }

    /// Writes a pod's manifest: complete at once, by renaming. Returns when that was.
    pub fn put(&self, name: &str, manifest: &Value) -> Result<Instant> {
        let draft = self.dir.join("draft");
        fs::write(&draft, serde_json::to_vec(manifest)?)?;
        let at = Instant::now();
        fs::rename(draft, self.manifest(name))?;
        Ok(at)
    }

    /// Removes a pod's manifest. Returns when that was.
    pub fn remove(&self, name: &str) -> Result<Instant> {
        let at = Instant::now();
        fs::remove_file(self.manifest(name))?;
        Ok(at)
    }

    fn manifest(&self, name: &str) -> PathBuf {
        self.dir.join("pods").join(format!("{name}.json"))
    }

    /// Makes a group of that name in that of a pod, in every hierarchy, and puts a process there.
    pub fn enter(&self, pod: &str, name: &str, process: u32) {
        cgroups(&self.cgroup, |root| {
            let Some(pod) = find(&root, pod) else { return Ok(()) };
            let group = pod.join(name);
            fs::create_dir(&group)?;
            // In a cpuset nothing runs before it has processors.
            for file in ["cpuset.cpus", "cpuset.mems"] {
                if let Ok(value) = fs::read(pod.join(file)) {
                    fs::write(group.join(file), value)?;
                }
            }
            fs::write(group.join("cgroup.procs"), process.to_string())
        });
    }

    /// How many pods it says are Running.
    pub async fn running(&self) -> usize {
        get(self.read_only, "/pods").await.map_or(0, |page| page.matches(r#""phase":"Running""#).count())
    }

    /// Waits until it says that so many pods are Running.
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

    /// Its root directory.
    pub fn root(&self) -> PathBuf {
        self.dir.join("root")
    }

    /// A page of its read-only port, head included; `None` where nobody answers.
    pub async fn page(&self, path: &str) -> Option<String> {
        get(self.read_only, path).await
    }

    /// How many lines it wrote.
    pub fn log_lines(&self) -> usize {
        fs::read(self.dir.join("log")).unwrap_or_default().iter().filter(|byte| **byte == b'\n').count()
    }

    /// The last lines it wrote.
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
        let _ = nix::sys::signal::kill(pid, nix::sys::signal::Signal::SIGTERM); // it may have ended by itself
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

/// Takes away what is mounted below a folder (tokens of pods that live on), so that it can be removed.
fn unmount(folder: &Path) {
    let mounts = fs::read_to_string("/proc/self/mountinfo").unwrap_or_default();
    let places = mounts.lines().filter_map(|line| line.split(' ').nth(4));
    let below: Vec<&str> = places.filter(|at| Path::new(at).starts_with(folder)).collect();
    for place in below.into_iter().rev() {
        let _ = nix::mount::umount2(place, nix::mount::MntFlags::MNT_DETACH); // it may be gone with another
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
        // A full disk of the machine that measures is not what is measured.
        "evictionHard": {"memory.available": "1Mi", "nodefs.available": "1%", "imagefs.available": "1%"},
    })
}

fn free_ports<const N: usize>() -> Result<[u16; N]> {
    let mut ports = [0; N];
    // All at once, so that they differ.
    let held: Vec<TcpListener> =
        (0..N).map(|_| TcpListener::bind("127.0.0.1:0")).collect::<Result<_, std::io::Error>>()?;
    for (port, listener) in ports.iter_mut().zip(&held) {
        *port = listener.local_addr()?.port();
    }
    Ok(ports)
}

/// The answer to a GET, status line included; `None` where nobody answers.
async fn get(port: u16, path: &str) -> Option<String> {
    let mut stream = TcpStream::connect(("127.0.0.1", port)).await.ok()?;
    // HTTP 1.0: one answer, without chunks, until the end of the stream.
    stream.write_all(format!("GET {path} HTTP/1.0\r\nHost: localhost\r\n\r\n").as_bytes()).await.ok()?;
    let mut answer = Vec::new();
    stream.read_to_end(&mut answer).await.ok()?;
    Some(String::from_utf8_lossy(&answer).into_owned())
}

/// Does something with a cgroup of that name in every hierarchy there is; a hierarchy that
/// refuses is none the agent could use either.
fn cgroups<T>(name: &str, act: impl Fn(PathBuf) -> std::io::Result<T>) {
    let mounts = fs::read_to_string("/proc/self/mounts").unwrap_or_default();
    for line in mounts.lines() {
        let fields: Vec<&str> = line.split(' ').collect();
        if let [_, target, "cgroup" | "cgroup2", ..] = fields.as_slice() {
            let _ = act(Path::new(target).join(name)); // without root there are none, and none are needed
        }
    }
}

/// The folder of that name below another.
fn find(below: &Path, name: &str) -> Option<PathBuf> {
    let folders = fs::read_dir(below).ok()?.flatten().filter(|entry| entry.file_type().is_ok_and(|kind| kind.is_dir()));
    let mut folders: Vec<PathBuf> = folders.map(|entry| entry.path()).collect();
    let own = folders.iter().position(|folder| folder.file_name().is_some_and(|own| own == name));
    match own {
        Some(at) => Some(folders.swap_remove(at)),
        None => folders.iter().find_map(|folder| find(folder, name)),
    }
}

/// Removes the groups of agents that are gone: those in which containers outlived their agent are empty only now. Every
/// group of the machine is on an agent's pages, so what is left of one measurement would weigh on the next.
pub fn sweep() {
    let mounts = fs::read_to_string("/proc/self/mounts").unwrap_or_default();
    let hierarchies =
        mounts.lines().map(|line| line.split(' ').collect::<Vec<_>>()).filter_map(|f| match f.as_slice() {
            [_, target, "cgroup" | "cgroup2", ..] => Some(PathBuf::from(target)),
            _ => None,
        });
    for entry in hierarchies.flat_map(|root| fs::read_dir(root).into_iter().flatten().flatten()) {
        if entry.file_name().to_string_lossy().starts_with(GROUP) {
            let _ = remove_tree(entry.path()); // who is still in one keeps it
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
