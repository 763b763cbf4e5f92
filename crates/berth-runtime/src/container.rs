//! Container state machine: phases, permitted transitions, exit reasons. Pure.
//!
//! Implements spec 09a §3, §12.

use std::sync::Arc;

use super::{
    config::OomRule,
    errors::RuntimeError,
    launch::devices::Rule,
    store::objects::{ContainerMeta, ContainerState, Spec, VERSION, pack, unpack},
};
use berth_proto::cri;
use berth_shim::plan::{Exit, LaunchPlan, StartedProcess};

/// Exit code of a container that could not be started.
const START_FAILED: i32 = 128;
/// Exit code of a container whose exit was not observed.
const LOST: i32 = 255;
/// Exit code after SIGKILL; a shell reports the same for a killed child.
const KILLED: i32 = 137;

/// State machine of one container, from creation to removal.
#[derive(Clone, Debug)]
pub struct Container {
    /// Immutable metadata.
    pub meta: Arc<ContainerMeta>,
    /// Configuration of the create request.
    pub config: Arc<cri::ContainerConfig>,
    /// Current phase.
    pub phase: Phase,
    /// Resources in force: those of the request with later updates merged in.
    pub resources: Option<cri::LinuxContainerResources>,
    /// Whether resources were updated after creation.
    pub is_updated: bool,
    /// Whether the stop signal was sent.
    pub is_stop_signal_sent: bool,
    /// Whether the runtime sent SIGKILL.
    pub is_killed: bool,
    /// Whether a removal is in progress.
    pub is_removing: bool,
    /// The exit, where it was reported before the start was.
    pub early_exit: Option<Exit>,
    /// Launch plan for the shim; made at creation.
    pub plan: Arc<LaunchPlan>,
    /// Device access rules.
    pub devices: Arc<Vec<Rule>>,
}

/// Phase of a container.
#[derive(Clone, PartialEq, Eq, Debug)]
pub enum Phase {
    /// Created, never started.
    Created,
    /// The shim is starting it.
    Starting,
    /// Its process runs.
    Running(StartedProcess),
    /// Its process exited or never started.
    Exited(ContainerExit),
}

/// Result of a container that exited.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct ContainerExit {
    /// PID of the first process; 0: it never ran.
    pub pid: u32,
    /// Start time, nanoseconds since the epoch; 0: it never ran.
    pub started_ns: i64,
    /// Exit time, nanoseconds since the epoch.
    pub finished_ns: i64,
    /// Exit code.
    pub code: i32,
    /// Reason as CRI reports it, such as `Completed`, `Error`, `OOMKilled`.
    pub reason: String,
    /// Message for people; empty unless the start failed.
    pub message: String,
}

impl Container {
    /// The CRI state; `Starting` is reported as created.
    pub fn state(&self) -> cri::ContainerState {
        match self.phase {
            Phase::Created | Phase::Starting => cri::ContainerState::ContainerCreated,
            Phase::Running(_) => cri::ContainerState::ContainerRunning,
            Phase::Exited(_) => cri::ContainerState::ContainerExited,
        }
    }

    /// The container ID.
    pub fn id(&self) -> &str {
        &self.meta.id
    }

    /// Moves from `Created` to `Starting`.
    ///
    /// # Errors
    /// The container is in another phase or is being removed.
    pub fn begin_start(&mut self) -> Result<(), RuntimeError> {
        match self.phase {
            _ if self.is_removing => Err(RuntimeError::state("container is being removed")),
            Phase::Created => {
                self.phase = Phase::Starting;
                Ok(())
            }
            Phase::Starting => Err(RuntimeError::state("container is already in starting state")),
            _ => Err(RuntimeError::state(format!("container is in {} state", self.state().as_str_name()))),
        }
    }

    /// Moves to `Running`. Returns the exit if it arrived before the start: the two arrive on different channels.
    pub fn mark_started(&mut self, started: StartedProcess) -> Option<Exit> {
        if matches!(self.phase, Phase::Starting | Phase::Created) {
            self.phase = Phase::Running(started);
        }
        self.early_exit.take()
    }

    /// Moves to `Exited` with reason `StartError`.
    pub fn start_failed(&mut self, text: &str, now_ns: i64) {
        self.phase = Phase::Exited(ContainerExit {
            pid: 0,
            started_ns: 0,
            finished_ns: now_ns,
            code: START_FAILED,
            reason: "StartError".to_owned(),
            message: text.to_owned(),
        });
    }

    /// Moves to `Exited`; returns whether the phase changed. An exit that arrives before the start is kept for
    /// `mark_started`.
    pub fn mark_exited(&mut self, exit: &Exit, rule: OomRule) -> bool {
        if self.phase == Phase::Starting {
            self.early_exit = Some(*exit);
        }
        let Phase::Running(started) = &self.phase else { return false };
        let reason = reason(exit, self.is_killed, rule);
        let code = if reason == OOM { KILLED } else { exit.code };
        self.phase = Phase::Exited(ContainerExit {
            pid: started.pid,
            started_ns: started.at_ns,
            finished_ns: exit.at_ns.max(started.at_ns),
            code,
            reason: reason.to_owned(),
            message: String::new(),
        });
        true
    }

    /// Moves to `Exited` with reason `Unknown`, because the exit was not observed. Returns whether the phase changed.
    pub fn mark_lost(&mut self, at_ns: i64) -> bool {
        let (pid, started_ns) = match &self.phase {
            Phase::Running(started) => (started.pid, started.at_ns),
            Phase::Starting => (0, 0),
            Phase::Created | Phase::Exited(_) => return false,
        };
        self.phase = Phase::Exited(ContainerExit {
            pid,
            started_ns,
            finished_ns: at_ns.max(started_ns),
            code: LOST,
            reason: "Unknown".to_owned(),
            message: String::new(),
        });
        true
    }

    /// The running process.
    ///
    /// # Errors
    /// The container does not run.
    pub fn running(&self) -> Result<StartedProcess, RuntimeError> {
        match &self.phase {
            Phase::Running(started) => Ok(*started),
            _ => Err(RuntimeError::state(format!("container is in {} state", self.state().as_str_name()))),
        }
    }

    /// Exit time, nanoseconds since the epoch; `None` unless exited.
    pub fn finished(&self) -> Option<i64> {
        match &self.phase {
            Phase::Exited(ended) => Some(ended.finished_ns),
            _ => None,
        }
    }

    /// The record that is persisted.
    pub fn record(&self) -> ContainerState {
        let state = ContainerState {
            v: VERSION,
            resources: self.is_updated.then_some(self.resources.as_ref()).flatten().map(pack),
            ..ContainerState::default()
        };
        match &self.phase {
            // A start whose result was not recorded counts as never started.
            Phase::Created | Phase::Starting => state,
            Phase::Running(started) => ContainerState {
                pid: started.pid,
                start_ticks: started.start_ticks,
                started_ns: started.at_ns,
                ..state
            },
            Phase::Exited(ended) => ContainerState {
                pid: ended.pid,
                started_ns: ended.started_ns,
                finished_ns: ended.finished_ns,
                exit_code: ended.code,
                reason: ended.reason.clone(),
                message: ended.message.clone(),
                ..state
            },
        }
    }

    /// Restores a container from its records; `None` if its configuration cannot be parsed.
    pub fn restore(meta: ContainerMeta, state: Option<ContainerState>, spec: Spec) -> Option<Self> {
        let config: cri::ContainerConfig = unpack(&meta.config)?;
        let state = state.unwrap_or_default();
        let updated = state.resources.as_deref().and_then(unpack);
        let is_updated = updated.is_some();
        let requested = config.linux.as_ref().and_then(|linux| linux.resources.clone());
        let (pid, started_ns) = (state.pid, state.started_ns);
        let phase = if state.finished_ns != 0 {
            Phase::Exited(ContainerExit {
                pid,
                started_ns,
                finished_ns: state.finished_ns,
                code: state.exit_code,
                reason: state.reason,
                message: state.message,
            })
        } else if started_ns != 0 {
            Phase::Running(StartedProcess {
                pid,
                start_ticks: state.start_ticks,
                at_ns: started_ns,
                ..StartedProcess::default()
            })
        } else {
            Phase::Created
        };
        Some(Self {
            meta: Arc::new(meta),
            config: Arc::new(config),
            phase,
            resources: updated.or(requested),
            is_updated,
            // Unknown after a restart. A second stop signal is better than none.
            is_stop_signal_sent: false,
            is_killed: false,
            is_removing: false,
            early_exit: None,
            plan: Arc::new(spec.plan),
            devices: Arc::new(spec.devices),
        })
    }
}

const OOM: &str = "OOMKilled";

/// CRI reason of an exit.
fn reason(exit: &Exit, is_killed: bool, rule: OomRule) -> &'static str {
    let is_oom = match rule {
        OomRule::Strict => exit.is_oom && exit.code == KILLED && !is_killed,
        OomRule::Any => exit.oom_kills > 0,
    };
    match exit.code {
        _ if is_oom => OOM,
        0 => "Completed",
        _ => "Error",
    }
}

/// Action of a stop request.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum StopAction {
    /// Nothing: the container does not run.
    Nothing,
    /// Sends the stop signal, waits, then kills.
    SendSignal,
    /// The stop signal was sent before: waits, then kills.
    Wait,
    /// Kills immediately.
    Kill,
}

/// Decides what a stop request with this grace period (seconds) does; records that the stop signal is sent.
pub fn decide_stop(container: &mut Container, seconds: i64) -> StopAction {
    match container.phase {
        Phase::Created | Phase::Exited(_) => StopAction::Nothing,
        _ if seconds <= 0 => StopAction::Kill,
        _ if container.is_stop_signal_sent => StopAction::Wait,
        _ => {
            container.is_stop_signal_sent = true;
            StopAction::SendSignal
        }
    }
}

/// Merges an update into the resources in force: values of the update win; zero and empty mean unchanged.
pub fn merge(old: &cri::LinuxContainerResources, new: &cri::LinuxContainerResources) -> cri::LinuxContainerResources {
    let mut all = old.clone();
    let number = |to: &mut i64, from: i64| {
        if from != 0 {
            *to = from;
        }
    };
    number(&mut all.cpu_period, new.cpu_period);
    number(&mut all.cpu_quota, new.cpu_quota);
    number(&mut all.cpu_shares, new.cpu_shares);
    number(&mut all.memory_limit_in_bytes, new.memory_limit_in_bytes);
    number(&mut all.memory_swap_limit_in_bytes, new.memory_swap_limit_in_bytes);
    number(&mut all.oom_score_adj, new.oom_score_adj);
    for (to, from) in [(&mut all.cpuset_cpus, &new.cpuset_cpus), (&mut all.cpuset_mems, &new.cpuset_mems)] {
        if !from.is_empty() {
            to.clone_from(from);
        }
    }
    for limit in &new.hugepage_limits {
        all.hugepage_limits.retain(|old| old.page_size != limit.page_size);
        all.hugepage_limits.push(limit.clone());
    }
    all.unified.extend(new.unified.clone());
    all
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::fixture::container;
    use berth_shim::plan::StartTimings;

    const RUN: StartedProcess =
        StartedProcess { pid: 7, start_ticks: 9, at_ns: 100, took: StartTimings { root: 0, clone: 0 } };

    fn exit(code: i32, is_signal: bool, is_oom: bool) -> Exit {
        Exit { code, is_signal, at_ns: 200, is_oom, oom_kills: u64::from(is_oom), lost_lines: 0 }
    }

    fn ended(mut container: Container, exit: &Exit, rule: OomRule) -> (i32, String) {
        container.begin_start().expect("created");
        container.mark_started(RUN);
        assert!(container.mark_exited(exit, rule));
        let Phase::Exited(ended) = &container.phase else { panic!("ended") };
        (ended.code, ended.reason.clone())
    }

    #[test]
    fn how_it_ended_has_a_word() {
        // spec 09a §12, and k8s #104454: an OOM-killed child does not make the parent's exit an OOM kill.
        let (strict, any) = (OomRule::Strict, OomRule::Any);
        for (exit, killed, rule, code, reason) in [
            (exit(0, false, false), false, strict, 0, "Completed"),
            (exit(0, false, true), false, strict, 0, "Completed"),
            (exit(0, false, true), false, any, 137, "OOMKilled"),
            (exit(3, false, false), false, strict, 3, "Error"),
            (exit(143, true, false), false, strict, 143, "Error"),
            (exit(137, true, true), false, strict, 137, "OOMKilled"),
            (exit(137, false, true), false, strict, 137, "OOMKilled"),
            (exit(137, true, true), true, strict, 137, "Error"),
            (exit(137, true, false), false, strict, 137, "Error"),
        ] {
            let container = Container { is_killed: killed, ..container("c") };
            assert_eq!(ended(container, &exit, rule), (code, reason.to_owned()), "{exit:?} {killed} {rule:?}");
        }
    }

    #[test]
    fn only_what_was_created_starts_and_once() {
        let mut c = container("c");
        c.begin_start().expect("created");
        assert_eq!(c.state(), cri::ContainerState::ContainerCreated);
        let text = |c: &mut Container| c.begin_start().expect_err("not created").text;
        assert_eq!(text(&mut c), "container is already in starting state");
        assert_eq!(c.mark_started(RUN), None);
        assert_eq!(text(&mut c), "container is in CONTAINER_RUNNING state");
        assert!(c.mark_exited(&exit(0, false, false), OomRule::Strict));
        assert!(!c.mark_exited(&exit(1, false, false), OomRule::Strict), "reported twice");
        assert_eq!(text(&mut c), "container is in CONTAINER_EXITED state");
    }

    #[test]
    fn an_exit_reported_before_the_start_is_kept() {
        let mut c = container("c");
        c.begin_start().expect("created");
        let early = exit(3, false, false);
        assert!(!c.mark_exited(&early, OomRule::Strict), "it has not started yet");
        assert_eq!(c.mark_started(RUN), Some(early));
        assert_eq!(c.state(), cri::ContainerState::ContainerRunning);
        assert!(c.mark_exited(&early, OomRule::Strict));
        assert_eq!(c.record().exit_code, 3);
    }

    #[test]
    fn a_failed_start_is_recorded_as_start_error() {
        // AC-09a-X6
        let mut c = container("c");
        c.begin_start().expect("created");
        c.start_failed("exec: \"x\": executable file not found in $PATH", 500);
        let record = c.record();
        assert_eq!((record.exit_code, record.reason.as_str(), record.started_ns), (128, "StartError", 0));
        assert_eq!(
            (record.finished_ns, record.message.as_str()),
            (500, "exec: \"x\": executable file not found in $PATH")
        );
    }

    #[test]
    fn a_stop_asks_once() {
        // AC-09a-X5: only one SIGTERM
        let mut c = container("c");
        assert_eq!(decide_stop(&mut c, 10), StopAction::Nothing);
        c.begin_start().expect("created");
        assert_eq!(c.mark_started(RUN), None);
        assert_eq!(decide_stop(&mut c, 10), StopAction::SendSignal);
        assert_eq!(decide_stop(&mut c, 1), StopAction::Wait);
        assert_eq!(decide_stop(&mut c, 0), StopAction::Kill);
    }

    #[test]
    fn what_is_written_down_is_recalled() {
        let mut c = container("c");
        let again = |c: &Container| {
            let meta = (*c.meta).clone();
            let spec = Spec { v: VERSION, plan: (*c.plan).clone(), devices: Vec::new() };
            Container::restore(meta, Some(c.record()), spec).expect("readable")
        };
        assert_eq!(again(&c).phase, Phase::Created);
        c.begin_start().expect("created");
        assert_eq!(again(&c).phase, Phase::Created, "half started is not started");
        assert_eq!(c.mark_started(RUN), None);
        c.resources = Some(cri::LinuxContainerResources { cpu_quota: 5, ..Default::default() });
        c.is_updated = true;
        let recalled = again(&c);
        assert_eq!(recalled.phase, Phase::Running(RUN));
        assert_eq!(recalled.resources.map(|r| r.cpu_quota), Some(5));
        assert!(c.mark_lost(50));
        let Phase::Exited(ended) = again(&c).phase else { panic!("ended") };
        assert_eq!(
            (ended.code, ended.reason.as_str(), ended.finished_ns),
            (255, "Unknown", 100),
            "never before its start"
        );
    }

    #[test]
    fn an_update_changes_only_the_fields_it_sets() {
        let old = cri::LinuxContainerResources {
            cpu_quota: 1,
            cpu_shares: 2,
            cpuset_cpus: "0".to_owned(),
            ..Default::default()
        };
        let new = cri::LinuxContainerResources { cpu_quota: 9, cpuset_cpus: "1".to_owned(), ..Default::default() };
        let all = merge(&old, &new);
        assert_eq!((all.cpu_quota, all.cpu_shares, all.cpuset_cpus.as_str()), (9, 2, "1"));
    }
}
