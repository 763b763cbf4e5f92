//! Agent process for tests: starts the real binary in its own temporary home directory.
//!
//! The home has its own manifests, root directory, logs, and ports. Tests observe the agent only through its public
//! interfaces: healthz, `/pods`, `/metrics`, and its log.
//!
//! Every wait has a deadline; a timeout panics with the last lines of the log.

use std::{
    fs,
    os::unix::process::ExitStatusExt,
    path::{Path, PathBuf},
    process::{Child, Command, ExitStatus, Stdio},
    sync::Arc,
    time::{Duration, Instant},
};

use nix::{sys::signal::Signal, unistd::Pid};
use serde_json::{Value, json};
use tokio::{
    io::{AsyncReadExt, AsyncWriteExt},
    net::TcpStream,
};

use crate::{programs, reservation::free_ports};

/// Deadline of every wait; generous, because the machine may be busy.
pub const PATIENCE: Duration = Duration::from_secs(60);
/// Polling interval of the waits.
const POLL_INTERVAL: Duration = Duration::from_millis(5);
/// Name of the node in tests.
pub const NODE: &str = "test-node";

/// Reason why the agent cannot run here; `None` if it can.
pub fn missing() -> Option<String> {
    let is_root = nix::unistd::geteuid().is_root();
    (!is_root).then(|| "needs root: the agent creates /var/log/containers and mounts volumes".to_owned())
}

/// Returns whether the test must be skipped and prints its name and the reason.
///
/// # Panics
/// The test would be skipped on CI, where no test may be skipped.
pub fn skips(test: &str) -> bool {
    let Some(why) = missing() else { return false };
    assert!(std::env::var_os("CI").is_none(), "{test} may not be skipped on CI: {why}");
    println!("skipped: {test}: {why}");
    true
}

/// Name by which the binary is started.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum BinaryName {
    /// `kubelet`: the drop-in replacement.
    Kubelet,
    /// `berth run`.
    Berth,
}

/// Temporary directory; drop unmounts everything below it before the directory is removed.
struct Folder(tempfile::TempDir);

impl Drop for Folder {
    fn drop(&mut self) {
        unmount_below(self.0.path());
    }
}

/// Unmounts every mount below a directory (lazily, innermost first), as a reboot does.
pub fn unmount_below(folder: &Path) {
    let mounts = fs::read_to_string("/proc/self/mountinfo").unwrap_or_default();
    let places =
        mounts.lines().filter_map(|line| line.split(' ').nth(4)).filter(|at| Path::new(at).starts_with(folder));
    let places: Vec<&str> = places.collect();
    for place in places.iter().rev() {
        let _ = nix::mount::umount2(*place, nix::mount::MntFlags::MNT_DETACH); // an earlier unmount may have removed it
    }
}

/// Home directory and configuration of an agent: outlives its process.
pub struct Home {
    dir: Arc<Folder>,
    config: Value,
    settings: Value,
    flags: Vec<String>,
    environment: Vec<(String, String)>,
    called: BinaryName,
    healthz: u16,
    read_only: u16,
}

impl Home {
    /// Creates a home for an agent on the CRI runtime at `endpoint`, with free ports.
    pub fn new(endpoint: &str) -> Self {
        let dir = tempfile::Builder::new().prefix("berth-home-").tempdir().expect("failed to create directory");
        for folder in ["pods", "root", "logs"] {
            fs::create_dir(dir.path().join(folder)).expect("failed to create directory");
        }
        let [healthz, read_only] = free_ports();
        let config = json!({
            "apiVersion": "kubelet.config.k8s.io/v1beta1",
            "kind": "KubeletConfiguration",
            "staticPodPath": dir.path().join("pods"),
            "podLogsDir": dir.path().join("logs"),
            "containerRuntimeEndpoint": endpoint,
            "address": "127.0.0.1",
            "readOnlyPort": read_only,
            "healthzPort": healthz,
            "enableServer": false,
            "authentication": {"anonymous": {"enabled": false}, "webhook": {"enabled": false}},
            "authorization": {"mode": "AlwaysAllow"},
            "failCgroupV1": false,
            "failSwapOn": false,
            "cgroupsPerQOS": false,
            "enforceNodeAllocatable": ["none"],
            "maxPods": 250,
            // Test images stay, however full the machine's disk is.
            "imageGCHighThresholdPercent": 100,
            "imageGCLowThresholdPercent": 99,
            // No pod is evicted.
            "evictionHard": {},
        });
        let flags =
            vec![format!("--root-dir={}", dir.path().join("root").display()), format!("--hostname-override={NODE}")];
        // Each agent has a directory of device plugins of its own: agents of other tests run at the same time.
        let settings = json!({"devices": {"pluginDirectory": dir.path().join("device-plugins")}});
        Self {
            dir: Arc::new(Folder(dir)),
            config,
            settings,
            flags,
            environment: Vec::new(),
            called: BinaryName::Kubelet,
            healthz,
            read_only,
        }
    }

    /// Sets top-level fields of the `KubeletConfiguration`.
    #[must_use]
    pub fn with(mut self, fields: Value) -> Self {
        for (key, value) in fields.as_object().expect("not a JSON object") {
            self.config[key] = value.clone();
        }
        self
    }

    /// Sets sections of the agent's own settings file (`BERTH_CONFIG`).
    #[must_use]
    pub fn settings(mut self, sections: Value) -> Self {
        for (key, value) in sections.as_object().expect("not a JSON object") {
            self.settings[key] = value.clone();
        }
        self
    }

    /// Adds a command-line flag; the last of several equal flags wins.
    #[must_use]
    pub fn flag(mut self, flag: impl Into<String>) -> Self {
        self.flags.push(flag.into());
        self
    }

    /// Sets an environment variable of the process.
    #[must_use]
    pub fn environment(mut self, key: &str, value: impl Into<String>) -> Self {
        self.environment.push((key.to_owned(), value.into()));
        self
    }

    /// Sets the name by which the binary is started.
    #[must_use]
    pub fn binary_name(mut self, name: BinaryName) -> Self {
        self.called = name;
        self
    }

    /// The home directory.
    pub fn path(&self) -> &Path {
        self.dir.0.path()
    }

    /// The static pod directory (`staticPodPath`).
    pub fn manifests(&self) -> PathBuf {
        self.path().join("pods")
    }

    /// The agent's root directory (`--root-dir`).
    pub fn root(&self) -> PathBuf {
        self.path().join("root")
    }

    /// The pod log directory (`podLogsDir`).
    pub fn logs(&self) -> PathBuf {
        self.path().join("logs")
    }

    /// The read-only port (`readOnlyPort`).
    pub fn read_only_port(&self) -> u16 {
        self.read_only
    }

    /// Writes a file into the static pod directory, atomically by rename.
    pub fn put(&self, file: &str, content: impl AsRef<[u8]>) {
        // One draft per file name: tests that share a home write at the same time.
        let draft = self.path().join(format!("{file}.draft"));
        fs::write(&draft, content).expect("written");
        fs::rename(draft, self.manifests().join(file)).expect("renamed");
    }

    /// Writes the manifest of a static pod into `<name>.json`.
    pub fn put_pod(&self, manifest: &Value) {
        let name = manifest["metadata"]["name"].as_str().expect("manifest without name");
        self.put(&format!("{name}.json"), manifest.to_string());
    }

    /// Removes a file from the static pod directory.
    pub fn remove(&self, file: &str) {
        fs::remove_file(self.manifests().join(file)).expect("removed");
    }

    /// Starts the process and returns without waiting for it.
    pub fn spawn(&self) -> Agent {
        let program = self.path().join(if self.called == BinaryName::Kubelet { "kubelet" } else { "berth" });
        if !program.exists() {
            std::os::unix::fs::symlink(programs::berth(), &program).expect("failed to create symbolic link");
        }
        let config = self.path().join("config.json");
        fs::write(&config, self.config.to_string()).expect("written");
        let settings = self.path().join("berth.json");
        fs::write(&settings, self.settings.to_string()).expect("written");
        let path = self.path().join("log");
        let log = fs::OpenOptions::new().create(true).append(true).open(&path).expect("failed to open the log file");
        let log_start = log.metadata().expect("failed to stat the log file").len();
        let mut command = Command::new(program);
        if self.called == BinaryName::Berth {
            command.arg("run");
        }
        let child = command
            .arg(format!("--config={}", config.display()))
            .args(&self.flags)
            .env("BERTH_CONFIG", settings)
            .envs(self.environment.iter().map(|(key, value)| (key, value)))
            .stdin(Stdio::null())
            .stdout(log.try_clone().expect("failed to duplicate the log file"))
            .stderr(log)
            .spawn()
            .expect("failed to start the agent");
        Agent { child, _dir: self.dir.clone(), log: path, log_start, healthz: self.healthz, read_only: self.read_only }
    }

    /// Starts the process and waits until it is healthy.
    pub async fn start(&self) -> Agent {
        let mut agent = self.spawn();
        agent.healthy().await;
        agent
    }
}

/// Agent process: drop kills it; its pods keep running.
pub struct Agent {
    child: Child,
    /// Keeps the directory as long as the process runs.
    _dir: Arc<Folder>,
    log: PathBuf,
    log_start: u64,
    healthz: u16,
    read_only: u16,
}

impl Agent {
    /// Waits until `/healthz` answers `ok`.
    ///
    /// # Panics
    /// The process exited, or the deadline passed.
    pub async fn healthy(&mut self) {
        let deadline = Instant::now() + PATIENCE;
        while get(self.healthz, "/healthz").await.is_none_or(|answer| answer.body != "ok") {
            if let Some(end) = self.child.try_wait().expect("failed to wait for the agent") {
                panic!("the agent exited: {end}\n{}", self.log_end());
            }
            assert!(Instant::now() < deadline, "timed out after {PATIENCE:?} waiting for /healthz\n{}", self.log_end());
            tokio::time::sleep(POLL_INTERVAL).await;
        }
    }

    /// Process ID.
    pub fn pid(&self) -> u32 {
        self.child.id()
    }

    /// Sends a GET to the read-only port; `None` if there is no response.
    pub async fn get(&self, path: &str) -> Option<Answer> {
        get(self.read_only, path).await
    }

    /// Sends a GET to the healthz port; `None` if there is no response.
    pub async fn healthz(&self, path: &str) -> Option<Answer> {
        get(self.healthz, path).await
    }

    /// The items of `/pods`; `None` if there is no valid response.
    pub async fn try_pods(&self) -> Option<Vec<Value>> {
        let page: Value = serde_json::from_str(&self.get("/pods").await?.body).ok()?;
        Some(page["items"].as_array().cloned().unwrap_or_default())
    }

    /// The items of `/pods`.
    ///
    /// # Panics
    /// There is no valid response.
    pub async fn pods(&self) -> Vec<Value> {
        self.try_pods().await.unwrap_or_else(|| panic!("GET /pods failed\n{}", self.log_end()))
    }

    /// The pod `<name>-<node>` of a static manifest; `None` if `/pods` does not list it.
    pub async fn pod(&self, name: &str) -> Option<Value> {
        let full = format!("{name}-{NODE}");
        self.pods().await.into_iter().find(|pod| pod["metadata"]["name"] == full.as_str())
    }

    /// The response body of `/metrics`.
    pub async fn metrics(&self) -> String {
        let answer = self.get("/metrics").await;
        answer.unwrap_or_else(|| panic!("GET /metrics failed\n{}", self.log_end())).body
    }

    /// Value of one series, spelled as in `/metrics` (with labels); `None` if there is none.
    pub async fn metric(&self, series: &str) -> Option<f64> {
        let page = self.metrics().await;
        let line = page.lines().find_map(|line| line.strip_prefix(series)?.strip_prefix(' '))?;
        Some(line.parse().expect("invalid number"))
    }

    /// Waits until `holds` returns true for a static pod, and returns the pod.
    pub async fn until_pod(&self, name: &str, what: &str, holds: impl Fn(&Value) -> bool) -> Value {
        let deadline = Instant::now() + PATIENCE;
        loop {
            let pod = self.pod(name).await;
            if let Some(pod) = pod.as_ref().filter(|pod| holds(pod)) {
                return pod.clone();
            }
            let shown = || pod.map_or("pod not found".to_owned(), |pod| format!("{:#}", pod["status"]));
            assert!(
                Instant::now() < deadline,
                "{name}: timed out waiting for: {what}: {}\n{}",
                shown(),
                self.log_end()
            );
            tokio::time::sleep(POLL_INTERVAL).await;
        }
    }

    /// Waits until a static pod is Running and Ready.
    pub async fn until_ready(&self, name: &str) -> Value {
        self.until_pod(name, "ready", is_ready).await
    }

    /// Waits until `/pods` lists a static pod no longer.
    pub async fn until_gone(&self, name: &str) {
        self.until(&format!("pod {name} is gone"), async || self.pod(name).await.is_none()).await;
    }

    /// Waits until the log contains `text`, and returns the first line that does.
    pub async fn until_log(&self, text: &str) -> String {
        self.until(&format!("the log contains {text:?}"), async || self.log().contains(text)).await;
        let log = self.log();
        log.lines().find(|line| line.contains(text)).unwrap_or(&log).to_owned()
    }

    /// Waits until `holds` returns true; `what` describes the condition in the panic message.
    pub async fn until(&self, what: &str, holds: impl AsyncFn() -> bool) {
        let deadline = Instant::now() + PATIENCE;
        while !holds().await {
            assert!(Instant::now() < deadline, "timed out after {PATIENCE:?} waiting for: {what}\n{}", self.log_end());
            tokio::time::sleep(POLL_INTERVAL).await;
        }
    }

    /// Log output of this process; excludes that of earlier processes in the same home.
    pub fn log(&self) -> String {
        let bytes = fs::read(&self.log).unwrap_or_default();
        let start = usize::try_from(self.log_start).unwrap_or(usize::MAX);
        String::from_utf8_lossy(bytes.get(start..).unwrap_or_default()).into_owned()
    }

    /// Log output of this process without an incomplete last line.
    pub fn whole_log(&self) -> String {
        let mut log = self.log();
        log.truncate(log.rfind('\n').map_or(0, |end| end + 1));
        log
    }

    /// The last 25 lines of the log.
    pub fn log_end(&self) -> String {
        let log = self.log();
        let lines: Vec<&str> = log.lines().collect();
        lines.get(lines.len().saturating_sub(25)..).unwrap_or_default().join("\n")
    }

    /// Sends a signal.
    pub fn signal(&self, signal: Signal) {
        let pid = Pid::from_raw(i32::try_from(self.child.id()).expect("invalid PID"));
        nix::sys::signal::kill(pid, signal).expect("failed to signal the agent");
    }

    /// Whether the process has exited.
    pub fn has_ended(&mut self) -> bool {
        self.child.try_wait().expect("failed to wait for the agent").is_some()
    }

    /// Waits until the process exits.
    pub async fn end(&mut self) -> ExitStatus {
        let deadline = Instant::now() + PATIENCE;
        loop {
            if let Some(end) = self.child.try_wait().expect("failed to wait for the agent") {
                return end;
            }
            assert!(Instant::now() < deadline, "the agent has not exited after {PATIENCE:?}\n{}", self.log_end());
            tokio::time::sleep(POLL_INTERVAL).await;
        }
    }

    /// Sends a signal and waits until the process exits.
    pub async fn end_with(&mut self, signal: Signal) -> ExitStatus {
        self.signal(signal);
        self.end().await
    }

    /// Stops the process with SIGTERM; returns its exit code.
    pub async fn stop(mut self) -> Option<i32> {
        self.end_with(Signal::SIGTERM).await.code()
    }

    /// Kills the process with SIGKILL, as a crash would end it.
    pub async fn kill(mut self) {
        assert_eq!(self.end_with(Signal::SIGKILL).await.signal(), Some(9));
    }
}

impl Drop for Agent {
    fn drop(&mut self) {
        let _ = self.child.kill(); // it may have exited already
        let _ = self.child.wait();
        let is_sound = !self.log().contains("panicked at");
        assert!(is_sound || std::thread::panicking(), "the agent panicked\n{}", self.log_end());
    }
}

/// Whether a pod is Running and Ready.
pub fn is_ready(pod: &Value) -> bool {
    pod["status"]["phase"] == "Running" && condition(pod, "Ready") == Some("True")
}

/// Status of a pod condition (`True`, `False`, `Unknown`); `None` if the condition is absent.
pub fn condition<'a>(pod: &'a Value, kind: &str) -> Option<&'a str> {
    let conditions = pod["status"]["conditions"].as_array()?;
    conditions.iter().find(|condition| condition["type"] == kind)?["status"].as_str()
}

/// Status of an app or init container; null if absent.
pub fn container<'a>(pod: &'a Value, name: &str) -> &'a Value {
    let lists = ["containerStatuses", "initContainerStatuses"];
    let mut all = lists.iter().filter_map(|list| pod["status"][list].as_array()).flatten();
    all.find(|status| status["name"] == name).unwrap_or(&Value::Null)
}

/// Manifest of a pod with one container `main`, with an image that every test runtime has.
pub fn manifest(name: &str) -> Value {
    manifest_of(name, json!({"containers": [{"name": "main"}]}))
}

/// Manifest of a pod; containers without an image or pull policy get defaults.
pub fn manifest_of(name: &str, mut spec: Value) -> Value {
    for list in ["containers", "initContainers"] {
        for container in spec.get_mut(list).and_then(Value::as_array_mut).into_iter().flatten() {
            let fields = container.as_object_mut().expect("container is not a JSON object");
            fields.entry("image").or_insert("docker.io/library/busybox:1".into());
            fields.entry("imagePullPolicy").or_insert("IfNotPresent".into());
        }
    }
    json!({"apiVersion": "v1", "kind": "Pod", "metadata": {"name": name}, "spec": spec})
}

/// HTTP response.
#[derive(Debug, Clone, Default)]
pub struct Answer {
    /// HTTP status code.
    pub status: u16,
    /// Status line and headers.
    pub head: String,
    /// Response body.
    pub body: String,
}

/// Sends a GET to a port on loopback; `None` if there is no response.
pub async fn get(port: u16, path: &str) -> Option<Answer> {
    let exchange = async {
        let mut stream = TcpStream::connect(("127.0.0.1", port)).await.ok()?;
        // HTTP/1.0: one response, not chunked, until the end of the stream.
        stream.write_all(format!("GET {path} HTTP/1.0\r\nHost: localhost\r\n\r\n").as_bytes()).await.ok()?;
        let mut answer = Vec::new();
        stream.read_to_end(&mut answer).await.ok()?;
        Some(String::from_utf8_lossy(&answer).into_owned())
    };
    let answer = tokio::time::timeout(PATIENCE, exchange).await.ok()??;
    let (head, body) = answer.split_once("\r\n\r\n")?;
    let status = head.split(' ').nth(1)?.parse().ok()?;
    Some(Answer { status, head: head.to_owned(), body: body.to_owned() })
}
