//! Fixture: a shim in its own directory, and its client. Dropping it kills the shim and its children.

use std::{
    fs,
    future::Future,
    io::Read,
    os::fd::{AsFd, OwnedFd},
    path::{Path, PathBuf},
    time::Duration,
};

use berth_runtime::shim::{
    client::{self, Events, Shim, ShimError},
    launcher,
};
use berth_shim::plan::{ExitEvent, FailureKind, Hello, LaunchPlan, ProcessTarget, Scope, StartedProcess};
use rustix::{
    pipe::{PipeFlags, pipe_with},
    process::{Pid, Signal, kill_process},
};
use tokio::{task::JoinHandle, time::timeout};

use berth_testkit::plans;

/// Timeout of a step.
const LIMIT: Duration = Duration::from_secs(60);

/// A shim, a client, and the last hello.
pub struct Fixture {
    pub folder: tempfile::TempDir,
    pub pid: u32,
    pub shim: Shim,
    pub events: Events,
    pub hello: Hello,
    driver: JoinHandle<std::io::Error>,
}

/// Runs a test with a timeout.
pub fn run<F: Future<Output = ()>>(test: impl FnOnce() -> F) {
    let runtime = tokio::runtime::Builder::new_multi_thread().worker_threads(1).enable_all().build();
    let runtime = runtime.expect("a runtime");
    runtime.block_on(async { timeout(3 * LIMIT, test()).await.expect("the test hangs") });
    runtime.shutdown_background();
}

impl Fixture {
    /// Starts a shim of plain processes and connects to it.
    pub async fn new() -> Self {
        Self::of(&std::env::current_exe().expect("this program")).await
    }

    /// Starts a shim of that program and connects to it.
    pub async fn of(program: &Path) -> Self {
        let folder = tempfile::tempdir().expect("a folder");
        let pid = launcher::start(program, folder.path()).expect("started");
        let (shim, events, hello, driver) = greet(folder.path()).await;
        assert_eq!(hello.pid, pid);
        Self { folder, pid, shim, events, hello, driver }
    }

    /// Drops the client's connection without a message.
    pub fn cut(&mut self) {
        self.driver.abort();
    }

    /// Connects another client.
    pub async fn again(&mut self) {
        self.cut();
        (self.shim, self.events, self.hello, self.driver) = greet(self.folder.path()).await;
    }

    /// Starts a container that runs a script; its log is named after it.
    pub async fn launch(&self, id: &str, script: &str) -> StartedProcess {
        self.shim.launch(self.plan(id, script)).await.expect("launched")
    }

    /// Launch plan of such a container.
    pub fn plan(&self, id: &str, script: &str) -> LaunchPlan {
        LaunchPlan { log: Some(self.log(id)), ..plans::plain(id, &["sh", "-c", script]) }
    }

    /// Path of a container's log.
    pub fn log(&self, id: &str) -> PathBuf {
        self.folder.path().join("logs").join(format!("{id}.log"))
    }

    /// Records of a container's log: stream, tag, and content.
    pub fn records(&self, id: &str) -> Vec<String> {
        records(&self.log(id))
    }

    /// The next event.
    pub async fn event(&mut self) -> ExitEvent {
        timeout(LIMIT, self.events.next()).await.expect("an event").expect("a connection")
    }

    /// Starts an exec process that runs a script; returns its output pipe.
    pub async fn exec(&self, container: &str, id: &str, script: &str) -> Result<(StartedProcess, OwnedFd), ShimError> {
        let (stdin, _) = pipe();
        let (output, stdout) = pipe();
        let plan = plans::exec(container, id, &["sh", "-c", script]);
        let (started, terminal) = self.shim.exec(plan, Some([stdin.as_fd(), stdout.as_fd(), stdout.as_fd()])).await?;
        assert!(terminal.is_none());
        Ok((started, output))
    }

    /// A value of the shim's `/proc/<pid>/status` in kB.
    pub fn memory(&self, name: &str) -> u64 {
        let status = fs::read_to_string(format!("/proc/{}/status", self.pid)).expect("a process");
        let line = status.lines().find_map(|line| line.strip_prefix(name)?.strip_prefix(':')).expect("a figure");
        line.trim().trim_end_matches(" kB").parse().expect("a number")
    }

    /// Kills a container.
    pub async fn kill(&self, id: &str) {
        let to = ProcessTarget::Container(id.to_owned());
        self.shim.signal(to, 9, Scope::Group).await.expect("signalled");
    }

    /// Waits until the log has that many records.
    pub async fn until_records(&self, id: &str, count: usize) -> Vec<String> {
        until(|| Some(self.records(id)).filter(|records| records.len() >= count)).await
    }
}

impl Drop for Fixture {
    fn drop(&mut self) {
        self.driver.abort();
        // Children first: they would be reparented once the shim is dead.
        let children = fs::read_to_string(format!("/proc/{0}/task/{0}/children", self.pid)).unwrap_or_default();
        for pid in children.split_whitespace().chain([&*self.pid.to_string()]) {
            let pid = pid.parse().ok().and_then(Pid::from_raw);
            pid.map(|pid| kill_process(pid, Signal::KILL));
        }
    }
}

async fn greet(folder: &Path) -> (Shim, Events, Hello, JoinHandle<std::io::Error>) {
    let (shim, events, connection) = client::connect(folder, LIMIT).await.expect("connected");
    let driver = tokio::spawn(connection.run());
    let (hello, _) = shim.hello().await.expect("an answer");
    (shim, events, hello, driver)
}

/// Records of a log: stream, tag, and content.
pub fn records(log: &Path) -> Vec<String> {
    let text = fs::read_to_string(log).unwrap_or_default();
    // A reader sees a write page by page: the last line may be partial.
    let whole = text.rfind('\n').map_or("", |end| &text[..end]);
    whole.lines().map(|line| line.get(31..).expect("a stamp").to_owned()).collect()
}

pub fn pipe() -> (OwnedFd, OwnedFd) {
    pipe_with(PipeFlags::CLOEXEC).expect("a pipe")
}

/// Reads until end of file.
pub async fn read_all(fd: OwnedFd) -> String {
    let read = tokio::task::spawn_blocking(move || {
        let mut text = String::new();
        fs::File::from(fd).read_to_string(&mut text).expect("text");
        text
    });
    timeout(LIMIT, read).await.expect("an end").expect("read")
}

/// Polls until a condition is met. Files have no notification here; the pause only saves CPU time.
pub async fn until<T>(mut condition: impl FnMut() -> Option<T>) -> T {
    let polling = async {
        loop {
            match condition() {
                Some(found) => return found,
                None => tokio::time::sleep(Duration::from_millis(5)).await,
            }
        }
    };
    timeout(LIMIT, polling).await.expect("it never came so")
}

/// The failure kind of a rejected request.
pub fn kind<T: std::fmt::Debug>(result: Result<T, ShimError>) -> FailureKind {
    result.expect_err("refused").kind().expect("refused by the shim")
}
