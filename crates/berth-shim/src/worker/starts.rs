//! Starts in progress of containers and execs: begin, advance on reports, kill at the deadline.

use std::{
    collections::BTreeMap,
    os::fd::{AsFd, OwnedFd},
    path::PathBuf,
    time::{Duration, Instant},
};

use rustix::process::{Pid, PidfdFlags, Signal, kill_process, pidfd_open};

use super::{
    super::plan::{ExecPlan, FailureKind, Hooks, LaunchPlan, PidNamespace, Reply, ShimFailure, StartedProcess},
    RequestOrigin, Worker, cgroup_signals, child_reaper,
    container::{ContainerState, ShimContainer},
    exit_rules,
    launcher::{ExecTarget, PendingStart, PodContext, StartProgress, Stdio},
    log::Log,
    oom_counter::OomCounter,
    shim_log,
    stdio::{self, StreamEnds},
};
use berth_sys::failpoint;

/// Deadline of a start if the plan sets none.
const LIMIT: Duration = Duration::from_secs(60);
/// Maximum number of concurrent execs per container. Spec 09a §11.
const MOST_EXECS: usize = 64;

/// A start in progress.
pub(super) struct Start {
    origin: RequestOrigin,
    until: Instant,
    limit: Duration,
    /// `None` only while it is being advanced.
    pub(super) launching: Option<Box<dyn PendingStart>>,
    what: StartKind,
}

enum StartKind {
    Launch(Box<Launch>),
    Exec { container: u32, id: String },
}

/// State of a future container, moved into it once it runs.
struct Launch {
    id: String,
    groups: Vec<PathBuf>,
    processes: PidNamespace,
    memory: Option<OomCounter>,
    log: Log,
    ends: Option<StreamEnds>,
    has_stdin: bool,
    longest_record: usize,
    hooks: Option<Box<Hooks>>,
}

/// Builds a failure.
pub(super) fn failure(kind: FailureKind, text: impl Into<String>) -> ShimFailure {
    ShimFailure { kind, text: text.into() }
}

impl Start {
    /// Deadline of the start.
    pub(super) fn until(&self) -> Instant {
        self.until
    }

    /// Container id, if a container is being started.
    pub(super) fn container(&self) -> Option<&str> {
        match &self.what {
            StartKind::Launch(launch) => Some(&launch.id),
            StartKind::Exec { .. } => None,
        }
    }
}

impl Worker<'_> {
    /// Begins the start of a container. The reply follows when it has finished.
    pub(super) fn begin_launch(
        &mut self,
        plan: &LaunchPlan,
        origin: RequestOrigin,
        now: Instant,
    ) -> Result<(), ShimFailure> {
        let id = &plan.container;
        if !exit_rules::is_name(id) {
            return Err(failure(FailureKind::Other, format!("invalid id {id:?}")));
        }
        if self.container(id).is_some() || self.starts.values().any(|start| start.container() == Some(id)) {
            return Err(failure(FailureKind::State, format!("container {id:?} was already started")));
        }
        let other = |e: std::io::Error| failure(FailureKind::Other, e.to_string());
        let log = Log::open(plan.log.as_deref()).map_err(other)?;
        let (stdio, ends) = stdio::make(plan, self.pod.users).map_err(other)?;
        let target = self.target(&plan.processes)?;
        let target = target.as_ref().map(AsFd::as_fd);
        let around = PodContext { namespaces: &self.pod.namespaces, target, users: self.pod.users };
        let launching = self.launcher.begin_launch(plan, around, stdio)?;
        failpoint::reached("shim.begun");
        let kills = self.kills(None, now);
        let launch = Launch {
            id: id.clone(),
            groups: plan.groups.clone(),
            processes: plan.processes.clone(),
            memory: OomCounter::watch(&plan.groups, kills),
            log,
            ends,
            has_stdin: plan.stdin,
            longest_record: plan.longest_record,
            hooks: plan.hooks.clone(),
        };
        let limit = if plan.limit_ms == 0 { LIMIT } else { Duration::from_millis(plan.limit_ms).min(10 * LIMIT) };
        self.start(origin, now, limit, launching, StartKind::Launch(Box::new(launch)));
        Ok(())
    }

    /// Pidfd of the process whose PID namespace a container joins. Only this loop reaps, so the PID is valid until it
    /// is opened here, and it is not used afterwards.
    fn target(&self, processes: &PidNamespace) -> Result<Option<OwnedFd>, ShimFailure> {
        let pid = match processes {
            PidNamespace::Own | PidNamespace::Host => return Ok(None),
            PidNamespace::Pod => self.pod.init,
            PidNamespace::Of(id) => {
                let target = self.container(id).map(|(_, container)| container);
                let target = target
                    .ok_or_else(|| failure(FailureKind::Unknown, format!("target container {id:?} not found")))?;
                if !target.is_running() {
                    return Err(failure(FailureKind::State, format!("target container {id:?} has exited")));
                }
                Some(target.started.pid)
            }
        };
        let pid = pid.and_then(|pid| Pid::from_raw(i32::try_from(pid).ok()?));
        let pid = pid.ok_or_else(|| failure(FailureKind::Other, "pod does not share its PID namespace"))?;
        let opened = pidfd_open(pid, PidfdFlags::empty());
        opened.map(Some).map_err(|e| failure(FailureKind::Other, format!("open process {}: {e}", pid.as_raw_nonzero())))
    }

    /// Begins the start of an exec. The reply follows when it has finished.
    pub(super) fn begin_exec(
        &mut self,
        plan: &ExecPlan,
        stdio: Stdio,
        origin: RequestOrigin,
        now: Instant,
    ) -> Result<(), ShimFailure> {
        let Some((key, container)) = self.container(&plan.container) else {
            return Err(failure(FailureKind::Unknown, format!("container {:?} not found", plan.container)));
        };
        if !container.is_running() {
            return Err(failure(FailureKind::State, format!("container {:?} has exited", plan.container)));
        }
        let starting = |start: &&Start| matches!(&start.what, StartKind::Exec { container, .. } if *container == key);
        let is_same = |start: &Start| matches!(&start.what, StartKind::Exec { id, .. } if *id == plan.exec);
        if container.execs.contains_key(&plan.exec) || self.starts.values().filter(starting).any(is_same) {
            return Err(failure(FailureKind::State, format!("process {:?} was already started", plan.exec)));
        }
        if container.execs.len() + self.starts.values().filter(starting).count() >= MOST_EXECS {
            let text = format!("container {:?} already has {MOST_EXECS} exec processes", plan.container);
            return Err(failure(FailureKind::State, text));
        }
        let inside = ExecTarget { init: container.started.pid, groups: &container.groups };
        let launching = self.launcher.begin_exec(plan, inside, stdio)?;
        let what = StartKind::Exec { container: key, id: plan.exec.clone() };
        self.start(origin, now, LIMIT, launching, what);
        Ok(())
    }

    fn start(
        &mut self,
        origin: RequestOrigin,
        now: Instant,
        limit: Duration,
        launching: Box<dyn PendingStart>,
        what: StartKind,
    ) {
        let key = self.next_key();
        self.starts.insert(key, Start { origin, until: now + limit, limit, launching: Some(launching), what });
    }

    /// Advances all starts.
    pub(super) fn advance_starts(&mut self, now: Instant) {
        let keys: Vec<u32> = self.starts.keys().copied().collect();
        for key in keys {
            self.advance_start(key, now);
        }
    }

    /// Advances a start that has a report or may have passed its deadline.
    pub(super) fn advance_start(&mut self, key: u32, now: Instant) {
        let Some(start) = self.starts.get_mut(&key) else { return };
        let Some(launching) = start.launching.take() else { return };
        match launching.advance() {
            StartProgress::Pending(launching) if now < start.until => start.launching = Some(launching),
            StartProgress::Pending(launching) => {
                let text = format!("start timed out after {:?}", start.limit);
                launching.kill();
                self.fail_start(key, failure(FailureKind::Deadline, text));
            }
            StartProgress::Failed(reason) => self.fail_start(key, reason),
            StartProgress::Started { pid, start_ticks, terminal, took } => {
                let started = StartedProcess { pid, start_ticks, at_ns: child_reaper::wall_ns(), took };
                self.started(key, started, terminal, now);
            }
        }
        if self.starts.is_empty() {
            self.unclaimed = Vec::new();
        }
    }

    /// Kills the start of a container, which then fails; returns false if it is not being started.
    pub(super) fn kill_start(&mut self, id: &str) -> bool {
        let Some(start) = self.starts.values().find(|start| start.container() == Some(id)) else { return false };
        start.launching.iter().for_each(|launching| launching.kill());
        true
    }

    /// Replies to a failed start and cleans up.
    fn fail_start(&mut self, key: u32, reason: ShimFailure) {
        let Some(mut start) = self.starts.remove(&key) else { return };
        if let StartKind::Launch(launch) = &mut start.what {
            cgroup_signals::kill_each(&launch.groups); // no process stays, and the container may be started again
            // No other container may attribute these kills to itself.
            self.kills_before += launch.memory.as_mut().map_or(0, |memory| {
                memory.final_read();
                memory.kills()
            });
            self.poststop(&launch.id, launch.hooks.as_deref());
        }
        self.reply(start.origin, &Reply::Failed(reason), Vec::new());
    }

    /// Begins a container's poststop hooks.
    pub(super) fn poststop(&self, container: &str, hooks: Option<&Hooks>) {
        let begun = hooks.map(|hooks| self.launcher.begin_poststop(container, hooks));
        if let Some(Err(failure)) = begun {
            shim_log::log(&format!("container {container}: {failure}"));
        }
    }

    /// Handles a start whose program was executed.
    fn started(&mut self, key: u32, started: StartedProcess, terminal: Option<OwnedFd>, now: Instant) {
        let Some(Start { origin, what, .. }) = self.starts.remove(&key) else { return };
        match what {
            StartKind::Launch(launch) => {
                let container = launch.into_container(started, terminal);
                self.containers.insert(key, container);
                failpoint::reached("shim.started");
                self.reply(origin, &Reply::Started(started), Vec::new());
                failpoint::reached("shim.replied");
            }
            StartKind::Exec { container, id } => {
                match self.containers.get_mut(&container) {
                    Some(container) => {
                        if !container.is_running() {
                            kill(started.pid, Signal::KILL); // too late
                        }
                        container.execs.insert(id, started.pid);
                    }
                    None => kill(started.pid, Signal::KILL),
                }
                self.reply(origin, &Reply::Started(started), terminal.into_iter().collect());
            }
        }
        if let Some(at) = self.unclaimed.iter().position(|(pid, _)| *pid == started.pid) {
            let (pid, ended) = self.unclaimed.swap_remove(at);
            self.ended(pid, ended, 0, now);
        }
    }
}

impl Launch {
    fn into_container(self, started: StartedProcess, terminal: Option<OwnedFd>) -> ShimContainer {
        let Self { id, groups, processes, memory, log, ends, has_stdin, longest_record, hooks } = self;
        let of_terminal = |master: &OwnedFd| stdio::of_terminal(master, has_stdin, longest_record).ok();
        let ends = ends.or_else(|| of_terminal(terminal.as_ref()?)).unwrap_or_else(StreamEnds::none);
        ShimContainer {
            id,
            groups,
            processes,
            started,
            state: ContainerState::Running,
            is_killed: false,
            memory,
            execs: BTreeMap::new(),
            terminal,
            log,
            ends,
            clients: Vec::new(),
            hooks,
        }
    }
}

/// Signals a child that was not reaped yet, so its PID is still its own.
pub(super) fn kill(pid: u32, signal: Signal) {
    if let Some(pid) = i32::try_from(pid).ok().and_then(Pid::from_raw) {
        let _ended = kill_process(pid, signal);
    }
}
