//! System cgroups: moves the agent, and the processes of the root cgroup, into configured cgroups.
//!
//! ```text
//!  kubeletCgroups ─► agent        ─┐
//!                                  ├─► Hierarchy::attach, in rounds, each on the blocking pool
//!  systemCgroups  ─► root cgroup  ─┘
//! ```
//!
//! The first round runs at once, each further one a minute after the end of the one before. In a round system
//! processes move before the agent. Moves into one cgroup use one thread. A write that hangs keeps that thread: it
//! delays the moves into the other cgroup once, by the limit of a round, and never pods. `process_moves` decides; this
//! file reads and writes. Implements spec 06a §8.5.

mod process_moves;

use std::{fs, io, path::PathBuf, sync::Arc, thread, time::Duration};

use tokio::{
    sync::oneshot,
    time::{sleep, timeout},
};
use tokio_util::sync::CancellationToken;
use tracing::{debug, info};

use berth_ports::ResourceError;
use berth_sys::{blocking_pool::BlockingPool, cgroup::Hierarchy};

pub use process_moves::{SystemCgroupConfig, TargetCgroup};

/// Delay before the second and last attempt to write the OOM score.
const SCORE_PAUSE: Duration = Duration::from_millis(100);

/// Processes of the machine, and which of them is the agent.
#[derive(Clone, Debug)]
pub struct ProcessTable {
    /// Directory with one directory per process: `/proc`.
    pub directory: PathBuf,
    /// The process that moves to the agent's cgroup.
    pub agent: i32,
    /// A process of the machine's own PID namespace: PID 1.
    pub init: i32,
}

impl Default for ProcessTable {
    fn default() -> Self {
        Self { directory: PathBuf::from("/proc"), agent: nix::unistd::getpid().as_raw(), init: 1 }
    }
}

impl ProcessTable {
    fn path(&self, pid: i32, file: &str) -> PathBuf {
        self.directory.join(pid.to_string()).join(file)
    }

    /// Whether the process has an executable: kernel threads and processes that have exited have none. Other
    /// failures, such as a denied permission, count as an executable.
    fn has_executable(&self, pid: i32) -> bool {
        !fs::read_link(self.path(pid, "exe")).is_err_and(|error| error.kind() == io::ErrorKind::NotFound)
    }

    /// Whether the agent is in the PID namespace of PID 1.
    fn is_in_host_namespace(&self) -> Result<bool, ResourceError> {
        let namespace = |pid| fs::read_link(self.path(pid, "ns/pid"));
        let init = namespace(self.init)
            .map_err(|_| ResourceError("failed to find pid namespace of init process".to_owned()))?;
        let own = namespace(self.agent)
            .map_err(|_| ResourceError(format!("failed to find pid namespace of process {}", self.agent)))?;
        Ok(init == own)
    }

    fn write_oom_score(&self, score: i32) -> io::Result<()> {
        let (path, score) = (self.path(self.agent, "oom_score_adj"), score.to_string());
        fs::write(&path, &score).or_else(|_| {
            thread::sleep(SCORE_PAUSE);
            fs::write(&path, &score)
        })
    }
}

/// Moves processes in rounds. Owns no state but its threads.
pub struct SystemCgroups {
    hierarchy: Hierarchy,
    processes: ProcessTable,
    config: SystemCgroupConfig,
    kubelet_moves: BlockingPool,
    system_moves: BlockingPool,
}

impl SystemCgroups {
    /// Creates the mover without moving any process.
    pub fn new(hierarchy: Hierarchy, processes: ProcessTable, config: SystemCgroupConfig) -> Arc<Self> {
        let kubelet_moves = BlockingPool::new("the cgroup of the kubelet", 1);
        let system_moves = BlockingPool::new("the system cgroup", 1);
        Arc::new(Self { hierarchy, processes, config, kubelet_moves, system_moves })
    }

    /// Runs a round at once and then periodically, until stopped. `first` is sent after the first round, whether it
    /// succeeded or not.
    pub async fn run(self: Arc<Self>, first: oneshot::Sender<()>, stop: CancellationToken) {
        let mut first = Some(first);
        while stop.run_until_cancelled(self.ensure()).await.is_some() {
            if let Some(first) = first.take() {
                // Fails if the receiver no longer waits.
                let _ = first.send(());
            }
            if stop.run_until_cancelled(sleep(self.config.period)).await.is_none() {
                return;
            }
        }
    }

    /// One round. System processes first: an agent in the root cgroup passes through the system cgroup to its own.
    async fn ensure(self: &Arc<Self>) {
        if let Some(target) = &self.config.system {
            self.ensure_one(target, &self.system_moves, Self::ensure_system).await;
        }
        if let Some(target) = &self.config.kubelet {
            self.ensure_one(target, &self.kubelet_moves, Self::ensure_kubelet).await;
        }
    }

    async fn ensure_one(
        self: &Arc<Self>,
        cgroup: &TargetCgroup,
        pool: &BlockingPool,
        work: fn(&Self, &TargetCgroup) -> Result<(), ResourceError>,
    ) {
        let (this, moved_to) = (self.clone(), cgroup.clone());
        let call = pool.run(Duration::ZERO, move || work(&this, &moved_to));
        let result = match timeout(self.config.limit, call).await {
            Ok(Ok(result)) => result,
            Ok(Err(error)) => Err(ResourceError(error.to_string())),
            Err(_) => Err(ResourceError(format!("timed out after {:?}", self.config.limit))),
        };
        if let Err(err) = result {
            info!(containerName = cgroup.text.as_str(), %err, "Failed to ensure state");
        }
    }

    /// Moves the processes of the source cgroup, not those of its descendants. Blocks.
    fn ensure_system(&self, target: &TargetCgroup) -> Result<(), ResourceError> {
        let list = || -> Result<Vec<i32>, ResourceError> {
            let listed = self.hierarchy.processes(&self.config.source);
            let listed = listed.map_err(|e| ResourceError(format!("failed to list PIDs for root: {e}")))?;
            let pids = process_moves::movable(listed, |pid| self.processes.has_executable(pid));
            if !pids.is_empty() {
                debug!(?pids, "Moving non-kernel processes");
            }
            Ok(pids)
        };
        process_moves::sweep(list, |pid| {
            // Since it was listed, others may have moved it: its runtime a container, or `ensure_kubelet` the agent,
            // which does not wait longer than the limit for this. Its ID may belong to another process by now.
            if self.hierarchy.processes(&self.config.source).is_ok_and(|now| !now.contains(&pid)) {
                return Ok(());
            }
            self.hierarchy.attach(&target.group, pid).map_err(|e| {
                ResourceError(format!("failed to move PID {pid} into the system container {:?}: {e}", target.text))
            })
        })
    }

    /// Moves the agent and writes its OOM score, unless it is in a PID namespace of its own: then it is in a container,
    /// whose cgroup and score belong to others. Blocks.
    fn ensure_kubelet(&self, target: &TargetCgroup) -> Result<(), ResourceError> {
        let (pid, score) = (self.processes.agent, self.config.oom_score_adj);
        if !self.processes.is_in_host_namespace()? {
            debug!(pid, "PID is not running in the host namespace");
            return Ok(());
        }
        let mut failures = Vec::new();
        let table = fs::read_to_string(self.processes.path(pid, "cgroup")).unwrap_or_else(|e| {
            failures.push(format!("failed to find container of PID {pid}: {e}"));
            String::new()
        });
        let own = process_moves::cgroup_of(&table, self.hierarchy.version()).unwrap_or_default();
        let wanted = target.group.to_string();
        if own != wanted
            && let Err(e) = self.hierarchy.attach(&target.group, pid)
        {
            failures.push(format!("failed to move PID {pid} (in {own:?}) to {:?}: {e}", target.text));
        }
        if let Err(e) = self.processes.write_oom_score(score) {
            failures.push(format!("failed to apply oom score {score} to PID {pid}: {e}"));
        }
        process_moves::combined(&failures)
    }
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::symlink;

    use berth_sys::cgroup::v2::UnifiedHierarchy;

    use super::*;

    /// Maximum wait in these tests.
    const PATIENCE: Duration = Duration::from_secs(30);

    /// Directories that imitate `/proc` and cgroup v2. The agent is process 7, beside kernel thread 2.
    struct Fixture(tempfile::TempDir);

    impl Fixture {
        fn new(namespace_of_agent: &str) -> Self {
            let fixture = Self(tempfile::tempdir().expect("a directory"));
            for directory in ["proc/1/ns", "proc/2", "proc/7/ns", "cgroup/kubelet", "cgroup/system"] {
                fs::create_dir_all(fixture.path(directory)).expect("makeable");
            }
            for (link, to) in [
                ("proc/1/ns/pid", "pid:[1]"),
                ("proc/1/exe", "/sbin/init"),
                ("proc/7/ns/pid", namespace_of_agent),
                ("proc/7/exe", "/usr/bin/berth"),
            ] {
                symlink(to, fixture.path(link)).expect("a link");
            }
            for (file, text) in [
                ("proc/7/cgroup", "0::/\n"),
                ("proc/7/oom_score_adj", "0"),
                ("cgroup/cgroup.controllers", ""),
                ("cgroup/cgroup.procs", "1\n2\n0\n7\n"),
                ("cgroup/kubelet/cgroup.procs", ""),
                ("cgroup/system/cgroup.procs", ""),
            ] {
                fixture.write(file, text);
            }
            fixture
        }

        fn path(&self, below: &str) -> PathBuf {
            self.0.path().join(below)
        }

        fn write(&self, file: &str, text: &str) {
            fs::write(self.path(file), text).expect("writable");
        }

        fn read(&self, file: &str) -> String {
            fs::read_to_string(self.path(file)).expect("readable")
        }

        fn config(&self) -> SystemCgroupConfig {
            SystemCgroupConfig::new("kubelet", "/system", -999).expect("valid")
        }

        fn mover(&self, config: SystemCgroupConfig) -> Arc<SystemCgroups> {
            let unified = UnifiedHierarchy::at(self.path("cgroup")).expect("readable");
            let processes = ProcessTable { directory: self.path("proc"), agent: 7, init: 1 };
            SystemCgroups::new(Hierarchy::V2(unified), processes, config)
        }

        fn ensure_kubelet(&self) -> Result<(), String> {
            let mover = self.mover(self.config());
            mover.ensure_kubelet(mover.config.kubelet.as_ref().expect("configured")).map_err(|error| error.0)
        }

        fn ensure_system(&self) -> Result<(), String> {
            let mover = self.mover(self.config());
            mover.ensure_system(mover.config.system.as_ref().expect("configured")).map_err(|error| error.0)
        }
    }

    #[test]
    fn the_agent_moves_once_and_its_score_is_written_each_time() {
        let fixture = Fixture::new("pid:[1]");
        assert_eq!(fixture.ensure_kubelet(), Ok(()));
        let files = ["cgroup/kubelet/cgroup.procs", "proc/7/oom_score_adj"];
        assert_eq!(files.map(|file| fixture.read(file)), ["7", "-999"]);
        fixture.write("proc/7/cgroup", "0::/kubelet\n");
        for file in files {
            fixture.write(file, "");
        }
        assert_eq!(fixture.ensure_kubelet(), Ok(()));
        assert_eq!(files.map(|file| fixture.read(file)), ["", "-999"]);
    }

    #[test]
    fn an_agent_in_a_container_is_not_touched() {
        let fixture = Fixture::new("pid:[2]");
        assert_eq!(fixture.ensure_kubelet(), Ok(()));
        assert_eq!(fixture.read("cgroup/kubelet/cgroup.procs"), "");
        assert_eq!(fixture.read("proc/7/oom_score_adj"), "0");
        for (link, expected) in [
            ("proc/7/ns/pid", "failed to find pid namespace of process 7"),
            ("proc/1/ns/pid", "failed to find pid namespace of init process"),
        ] {
            fs::remove_file(fixture.path(link)).expect("removable");
            assert_eq!(fixture.ensure_kubelet(), Err(expected.to_owned()));
        }
        assert_eq!(fixture.read("proc/7/oom_score_adj"), "0");
    }

    #[test]
    fn every_failure_of_the_agent_is_reported() {
        let fixture = Fixture::new("pid:[1]");
        for file in ["proc/7/cgroup", "proc/7/oom_score_adj", "cgroup/kubelet/cgroup.procs"] {
            fs::remove_file(fixture.path(file)).expect("removable");
        }
        fs::create_dir(fixture.path("proc/7/oom_score_adj")).expect("makeable");
        let error = fixture.ensure_kubelet().expect_err("all steps fail");
        let parts = [
            "[failed to find container of PID 7: ",
            ", failed to move PID 7 (in \"\") to \"kubelet\": write \"7\" to ",
            ", failed to apply oom score -999 to PID 7: ",
        ];
        assert!(parts.iter().all(|part| error.contains(part)), "{error}");
    }

    #[test]
    fn only_processes_with_an_executable_leave_the_root() {
        let fixture = Fixture::new("pid:[1]");
        // The list is a plain file here, which never shrinks.
        assert_eq!(fixture.ensure_system(), Ok(()));
        assert_eq!(fixture.read("cgroup/system/cgroup.procs"), "7");
        fs::remove_file(fixture.path("cgroup/system/cgroup.procs")).expect("removable");
        let error = fixture.ensure_system().expect_err("not movable");
        let start = "failed to move PID 7 into the system container \"/system\": write \"7\" to ";
        assert!(error.starts_with(start) && error.contains("No such file"), "{error}");
        fixture.write("cgroup/cgroup.procs", "1\n2\n");
        assert_eq!(fixture.ensure_system(), Ok(()));
        fs::remove_file(fixture.path("cgroup/cgroup.procs")).expect("removable");
        let error = fixture.ensure_system().expect_err("not listed");
        assert!(error.starts_with("failed to list PIDs for root: read "), "{error}");
    }

    #[tokio::test]
    async fn a_write_that_hangs_delays_neither_the_start_nor_the_other_cgroup() {
        let fixture = Fixture::new("pid:[1]");
        let pipe = fixture.path("proc/7/oom_score_adj");
        fs::remove_file(&pipe).expect("removable");
        // Opening it for writing blocks until a reader opens it.
        nix::unistd::mkfifo(&pipe, nix::sys::stat::Mode::S_IRWXU).expect("a FIFO");
        let (period, limit) = (Duration::from_millis(5), Duration::from_millis(50));
        let mover = fixture.mover(SystemCgroupConfig { period, limit, ..fixture.config() });
        let (sender, first) = oneshot::channel();
        let stop = CancellationToken::new();
        let task = tokio::spawn(mover.run(sender, stop.clone()));
        let first = timeout(PATIENCE, first).await;
        fixture.write("cgroup/system/cgroup.procs", "");
        let again = timeout(PATIENCE, async {
            while fixture.read("cgroup/system/cgroup.procs").is_empty() {
                sleep(Duration::from_millis(5)).await;
            }
        });
        let again = again.await;
        stop.cancel();
        let stopped = timeout(PATIENCE, task).await;
        // Releases the thread: the end of the test waits for it.
        let score = tokio::task::spawn_blocking(move || fs::read_to_string(pipe)).await.expect("joined");
        assert_eq!(first, Ok(Ok(())));
        assert_eq!(again, Ok(()));
        assert!(stopped.is_ok_and(|joined| joined.is_ok()));
        assert_eq!(score.expect("readable"), "-999");
    }
}
