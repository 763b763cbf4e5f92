//! Fault profile of a seed: the kinds of faults that its run contains.

use rand::{Rng, rngs::SmallRng};

/// A kind of fault.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum FaultKind {
    /// Containers crash, fail to start, or are killed.
    Crashes,
    /// Containers have their own restart policies and rules, and exit with codes that the rules match: a restart of one
    /// container, or of all in the pod.
    Rules,
    /// Containers ignore signals.
    Stubborn,
    /// Sandboxes die.
    SandboxesDie,
    /// Calls return errors.
    Errors,
    /// Calls succeed, but return an error.
    LostAnswers,
    /// Calls never return.
    Hangs,
    /// Some calls take long.
    Delays,
    /// Every call has a latency.
    Latency,
    /// Events are lost, duplicated, and reordered.
    Events,
    /// Event streams break.
    Streams,
    /// The runtime or its network reports that it is not ready.
    NotReady,
    /// The agent is killed, at once or at one of its next calls and writes.
    AgentKilled,
    /// The agent is stopped gracefully.
    AgentStopped,
    /// The runtime restarts.
    RuntimeRestarts,
    /// The machine reboots.
    Reboots,
    /// Calls about one pod never return.
    Victim,
    /// Image pulls fail at first.
    Pulls,
    /// Sources take long to sync after a start.
    SlowSources,
    /// Volumes cannot be mounted or take long, state files cannot be written.
    Disk,
    /// The wall clock is changed.
    ClockSet,
}

const ALL: [FaultKind; 21] = [
    FaultKind::Crashes,
    FaultKind::Rules,
    FaultKind::Stubborn,
    FaultKind::SandboxesDie,
    FaultKind::Errors,
    FaultKind::LostAnswers,
    FaultKind::Hangs,
    FaultKind::Delays,
    FaultKind::Latency,
    FaultKind::Events,
    FaultKind::Streams,
    FaultKind::NotReady,
    FaultKind::AgentKilled,
    FaultKind::AgentStopped,
    FaultKind::RuntimeRestarts,
    FaultKind::Reboots,
    FaultKind::Victim,
    FaultKind::Pulls,
    FaultKind::SlowSources,
    FaultKind::Disk,
    FaultKind::ClockSet,
];

/// Kinds of faults in a run.
#[derive(Clone, Debug)]
pub struct Profile(Vec<FaultKind>);

impl Profile {
    /// One seed in six has none; the others have each kind with a drawn probability.
    pub fn draw(chance: &mut SmallRng) -> Self {
        let likely = if chance.random_ratio(1, 6) { 0.0 } else { chance.random_range(0.1..0.6) };
        Self(ALL.into_iter().filter(|_| chance.random_bool(likely)).collect())
    }

    /// Whether the profile contains a kind.
    pub fn has(&self, trouble: FaultKind) -> bool {
        self.0.contains(&trouble)
    }
}
