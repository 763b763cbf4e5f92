//! Child reaping: attribution of exits to containers and execs, and exit records.

use std::time::{Instant, SystemTime, UNIX_EPOCH};

use rustix::process::{WaitOptions, WaitStatus};

use super::{
    super::{
        exit_record::ExitRecord,
        plan::{Exit, PidNamespace, ProcessTarget},
    },
    Worker, cgroup_signals,
    container::{ContainerState, DRAIN, ShimContainer},
    exit_rules::{self, ExitFacts},
    oom_counter::{FinalRead, OomCounter},
    shim_log,
};
use berth_sys::failpoint;

/// Maximum number of unattributed exits stored during a start.
const MOST_UNCLAIMED: usize = 256;

/// Wait status of a reaped child, before OOM attribution.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct ChildExit {
    /// Exit code, 0 to 255; 128 plus the signal number for signals.
    pub code: i32,
    /// Whether a signal terminated it.
    pub is_signal: bool,
    /// Wall-clock exit time, nanoseconds since the epoch.
    pub at_ns: i64,
}

impl ChildExit {
    fn of(status: WaitStatus) -> Option<Self> {
        let at_ns = wall_ns();
        match (status.exit_status(), status.terminating_signal()) {
            (Some(code), _) => Some(Self { code, is_signal: false, at_ns }),
            (None, Some(signal)) => Some(Self { code: 128 + signal, is_signal: true, at_ns }),
            (None, None) => None,
        }
    }

    fn exit(self) -> Exit {
        let Self { code, is_signal, at_ns } = self;
        Exit { code, is_signal, at_ns, is_oom: false, oom_kills: 0, lost_lines: 0 }
    }
}

/// Current wall-clock time, nanoseconds since the epoch.
pub(super) fn wall_ns() -> i64 {
    let now = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
    i64::try_from(now.as_nanos()).unwrap_or(i64::MAX)
}

impl Worker<'_> {
    /// Reaps all exited children. Advances starts first: a process that has executed its program may have exited
    /// already, and is a known child then.
    pub(super) fn reap(&mut self, now: Instant) {
        self.advance_starts(now);
        let mut ends = Vec::new();
        while let Ok(Some((pid, status))) = rustix::process::wait(WaitOptions::NOHANG) {
            let pid = u32::try_from(pid.as_raw_nonzero().get()).unwrap_or_default();
            ends.extend(ChildExit::of(status).map(|ended| (pid, ended)));
        }
        // The order of reaping may differ from the order of the exits.
        for (at, (pid, ended)) in ends.iter().enumerate() {
            let later = ends.iter().skip(at + 1);
            let rivals = later.filter(|(pid, ended)| self.may_be_late_kill(*pid, *ended)).count();
            self.ended(*pid, *ended, u64::try_from(rivals).unwrap_or(u64::MAX), now);
        }
    }

    fn first_of(&self, pid: u32) -> Option<u32> {
        let is_first = |container: &ShimContainer| container.is_running() && container.started.pid == pid;
        self.containers.iter().find_map(|(key, container)| is_first(container).then_some(*key))
    }

    /// Whether an exited child may be a container's first process that was OOM-killed and whose cgroup is gone.
    fn may_be_late_kill(&self, pid: u32, ended: ChildExit) -> bool {
        let container = self.first_of(pid).and_then(|key| self.containers.get(&key));
        container.is_some_and(|container| {
            may_be_oom(container, ended) && container.memory.as_ref().is_some_and(OomCounter::is_gone)
        })
    }

    /// Handles the exit of a child. `rivals`: number of children reaped with it, but not handled yet, that may have
    /// been OOM-killed without an observed count.
    pub(super) fn ended(&mut self, pid: u32, ended: ChildExit, rivals: u64, now: Instant) {
        if self.pod.init == Some(pid) {
            self.pod.init = None;
            self.events.push(ProcessTarget::Init, ended.exit());
            return;
        }
        if let Some(key) = self.first_of(pid) {
            self.container_ended(key, ended, rivals, now);
            return;
        }
        for container in self.containers.values_mut() {
            let id = container.execs.iter().find(|(_, exec)| **exec == pid).map(|(id, _)| id.clone());
            if let Some(id) = id {
                container.execs.remove(&id);
                self.events.push(ProcessTarget::Exec(container.id.clone(), id), ended.exit());
                return;
            }
        }
        if !self.starts.is_empty() && self.unclaimed.len() < MOST_UNCLAIMED {
            self.unclaimed.push((pid, ended));
        }
    }

    /// Handles the exit of a container's first process.
    fn container_ended(&mut self, key: u32, ended: ChildExit, rivals: u64, now: Instant) {
        failpoint::reached("shim.reaped");
        let is_late_kill = self.is_late_kill(key, ended, rivals, now);
        let Some(container) = self.containers.get_mut(&key) else { return };
        let exit = final_exit(container, ended, is_late_kill, now);
        let record = ExitRecord::of(container.started, exit);
        if let Err(e) = record.write(&self.folder, &container.id) {
            shim_log::log(&format!("container {}: failed to write exit record: {e}", container.id));
        }
        failpoint::reached("shim.recorded");
        container.state = ContainerState::Draining { exit, until: now + DRAIN };
    }

    /// Whether an OOM kill in an exited container has not been observed before.
    fn is_late_kill(&mut self, key: u32, ended: ChildExit, rivals: u64, now: Instant) -> bool {
        match self.memory_of(key).map(OomCounter::final_read) {
            None | Some(FinalRead::Same) => false,
            Some(FinalRead::Killed) => true,
            // A container that exited otherwise leaves the kill to those that were killed.
            Some(FinalRead::Gone) if self.containers.get(&key).is_some_and(|c| may_be_oom(c, ended)) => {
                let others = self.kills(Some(key), now);
                self.memory_of(key).is_some_and(|memory| memory.attribute_kills(others, rivals))
            }
            Some(FinalRead::Gone) => false,
        }
    }

    fn memory_of(&mut self, key: u32) -> Option<&mut OomCounter> {
        self.containers.get_mut(&key)?.memory.as_mut()
    }

    /// OOM kills so far in all containers but one; reads the counters of running ones.
    pub(super) fn kills(&mut self, but: Option<u32>, now: Instant) -> u64 {
        let others = self.containers.iter_mut().filter(|(key, _)| Some(**key) != but);
        let kills = others.map(|(_, container)| {
            container.memory.iter_mut().for_each(|memory| memory.read_count(now));
            container.kills()
        });
        self.kills_before + kills.sum::<u64>()
    }

    /// Ends containers whose output is drained or whose drain deadline passed.
    pub(super) fn finish_drained(&mut self, now: Instant) {
        let mut over = Vec::new();
        for container in self.containers.values_mut() {
            let ContainerState::Draining { mut exit, until } = container.state else { continue };
            if !container.is_drained() && now < until {
                continue;
            }
            container.release();
            exit.lost_lines = container.log.lost();
            if exit.lost_lines > 0 {
                let record = ExitRecord::of(container.started, exit);
                // On a failure, the existing record only lacks the count.
                let _ = record.write(&self.folder, &container.id);
            }
            container.state = ContainerState::Ended { exit, since: now };
            self.events.push(ProcessTarget::Container(container.id.clone()), exit);
            over.extend(container.hooks.take().map(|hooks| (container.id.clone(), hooks)));
        }
        for (id, hooks) in over {
            self.poststop(&id, Some(&hooks));
        }
    }
}

/// Whether an exit of a container is consistent with an OOM kill.
fn may_be_oom(container: &ShimContainer, ended: ChildExit) -> bool {
    exit_rules::may_be_oom(ended.code, container.is_killed)
}

/// Determines the exit of a container whose first process exited; kills its remaining processes.
fn final_exit(container: &mut ShimContainer, ended: ChildExit, is_late_kill: bool, now: Instant) -> Exit {
    let ending = ExitFacts {
        code: ended.code,
        is_ours: container.is_killed,
        last_kill: container.memory.as_ref().and_then(OomCounter::last_kill),
        is_late_kill,
    };
    let oom_kills = container.kills();
    // The kernel has killed the processes of its own PID namespace already.
    if container.processes != PidNamespace::Own {
        cgroup_signals::kill(&container.groups);
    }
    container.ends.input.closed();
    Exit { is_oom: ending.is_oom(now), oom_kills, ..ended.exit() }
}
