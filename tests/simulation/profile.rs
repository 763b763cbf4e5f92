//! Which kinds of trouble a seed knows.

use rand::{Rng, rngs::SmallRng};

/// A kind of trouble.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Trouble {
    /// Containers crash, fail to start, or are killed.
    Crashes,
    /// Containers have restart policies and rules of their own, and exit as the rules say: one
    /// again, or all of the pod.
    Rules,
    /// Containers do not heed signals.
    Stubborn,
    /// Sandboxes die.
    SandboxesDie,
    /// Calls are refused.
    Errors,
    /// Calls are carried out, but the answer is an error.
    LostAnswers,
    /// Calls are never answered.
    Hangs,
    /// Calls take long.
    Delays,
    /// Every call takes its time.
    Latency,
    /// Events are lost, doubled, re-ordered.
    Events,
    /// Event streams break.
    Streams,
    /// The runtime, or its network, says that it is not ready.
    NotReady,
    /// The agent is killed, at once or at one of its next calls and writes.
    AgentKilled,
    /// The agent is stopped.
    AgentStopped,
    /// The runtime starts anew.
    RuntimeRestarts,
    /// The machine reboots.
    Reboots,
    /// Whatever is asked about one pod is never answered.
    Victim,
    /// Images cannot be pulled at first.
    Pulls,
    /// Sources take long to answer after a start.
    SlowSources,
    /// Volumes cannot be mounted or take long, state files cannot be written.
    Disk,
    /// The clock is set.
    ClockSet,
}

const ALL: [Trouble; 21] = [
    Trouble::Crashes,
    Trouble::Rules,
    Trouble::Stubborn,
    Trouble::SandboxesDie,
    Trouble::Errors,
    Trouble::LostAnswers,
    Trouble::Hangs,
    Trouble::Delays,
    Trouble::Latency,
    Trouble::Events,
    Trouble::Streams,
    Trouble::NotReady,
    Trouble::AgentKilled,
    Trouble::AgentStopped,
    Trouble::RuntimeRestarts,
    Trouble::Reboots,
    Trouble::Victim,
    Trouble::Pulls,
    Trouble::SlowSources,
    Trouble::Disk,
    Trouble::ClockSet,
];

/// What a seed knows of trouble.
#[derive(Clone, Debug)]
pub struct Profile(Vec<Trouble>);

impl Profile {
    /// One seed in six knows none, the others each kind by a chance of their own.
    pub fn draw(chance: &mut SmallRng) -> Self {
        let likely = if chance.random_ratio(1, 6) { 0.0 } else { chance.random_range(0.1..0.6) };
        Self(ALL.into_iter().filter(|_| chance.random_bool(likely)).collect())
    }

    /// Whether it knows that.
    pub fn has(&self, trouble: Trouble) -> bool {
        self.0.contains(&trouble)
    }
}
