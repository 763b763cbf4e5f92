//! State machine of one probe: what a scheduled attempt does, and what its results become. Pure.
//!
//! Implements spec 05 §1.3, §1.4.
//!
//! Differences from kubelet: results of one instance never count for the next (§1.10), and the delay after a
//! container's start is measured by a monotonic clock.

use std::time::Duration;

use jiff::Timestamp;

use super::{
    kind::{ProbeKind, ProbeTiming},
    pod_observation::{Instance, InstanceState, PodObservation},
};
use berth_ports::ProbeResult;
use berth_types::ContainerId;

/// Minimum age relative to the agent's start by which a container was started under an earlier agent.
const BEFORE_AGENT: Duration = Duration::from_secs(10);

/// Period after an instance is first observed in which a failure is retried soon and does not count: kubelet observes a
/// container so late that most servers listen by its first attempt.
const EARLY: Duration = Duration::from_secs(1);
/// Delay before the first such retry; it doubles for each further one.
const EARLY_PAUSE: Duration = Duration::from_millis(100);

/// Current time of both clocks.
#[derive(Clone, Copy, Debug)]
pub struct ClockReading {
    /// Time since the agent's start; monotonic.
    pub uptime: Duration,
    /// Wall clock time.
    pub wall: Timestamp,
}

/// Constant properties of one probe.
#[derive(Clone, Copy, Debug)]
pub struct ProbeProperties {
    /// Kind of the probe.
    pub kind: ProbeKind,
    /// Timing and thresholds.
    pub pace: ProbeTiming,
    /// Whether its container is a sidecar.
    pub is_sidecar: bool,
    /// Start of the agent, by the wall clock.
    pub agent_started: Timestamp,
}

/// Next step of a probe.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Next {
    /// Wait for the next scheduled attempt.
    Wait,
    /// Make an attempt.
    Probe,
    /// End the probe.
    Stop,
}

/// Actions of one scheduled attempt, in this order.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct ProbeStep {
    /// Delete the result of an instance that no longer exists.
    pub forget: Option<ContainerId>,
    /// Initial result, unless there is one.
    pub seed: Option<ProbeResult>,
    /// New result.
    pub set: Option<ProbeResult>,
    /// Next step.
    pub next: Next,
}

impl ProbeStep {
    fn of(next: Next) -> Self {
        Self { forget: None, seed: None, set: None, next }
    }
}

/// State of one probe.
#[derive(Clone, Debug)]
pub struct ProbeStateMachine {
    fixed: ProbeProperties,
    instance: Option<ContainerId>,
    running_since: Option<Duration>,
    last: Option<ProbeResult>,
    run: u32,
    /// Time until which failures do not count, on the clock of [`ClockReading::uptime`].
    early_until: Option<Duration>,
    /// Number of failures that did not count.
    early_failures: u32,
    on_hold: bool,
}

impl ProbeStateMachine {
    /// Creates the state before the first attempt.
    pub fn new(fixed: ProbeProperties) -> Self {
        Self {
            fixed,
            instance: None,
            running_since: None,
            last: None,
            run: 0,
            early_until: None,
            early_failures: 0,
            on_hold: false,
        }
    }

    /// The constant properties.
    pub fn fixed(&self) -> &ProbeProperties {
        &self.fixed
    }

    /// The instance that is probed.
    pub fn instance(&self) -> Option<&ContainerId> {
        self.instance.as_ref()
    }

    /// Evaluates a scheduled attempt. `observed` is `None` if the pod has no status yet.
    pub fn begin(&mut self, seen: Option<&PodObservation>, now: ClockReading) -> ProbeStep {
        let Some(seen) = seen else { return ProbeStep::of(Next::Wait) };
        if seen.is_over {
            return ProbeStep::of(Next::Stop);
        }
        let Some(instance) = &seen.instance else { return ProbeStep::of(Next::Wait) };
        let mut step = ProbeStep::of(Next::Wait);
        if self.instance.as_ref() != Some(&instance.id) {
            step.forget = self.instance.replace(instance.id.clone());
            step.seed = self.seed(instance);
            (self.running_since, self.last, self.run, self.on_hold) = (None, None, 0, false);
            (self.early_until, self.early_failures) = (None, 0);
        }
        if self.on_hold {
            return step;
        }
        let started_at = match instance.state {
            InstanceState::Running(at) => at,
            InstanceState::Waiting | InstanceState::WillRestart | InstanceState::Ended => {
                step.set = Some(ProbeResult::Failure);
                step.next = if instance.state == InstanceState::Ended { Next::Stop } else { Next::Wait };
                return step;
            }
        };
        if seen.is_deleting && self.fixed.kind != ProbeKind::Readiness {
            step.set = Some(ProbeResult::Success); // so that no restart is caused
            step.next = Next::Stop;
            return step;
        }
        if self.running_since.is_none() {
            let since = began(started_at, now);
            self.running_since = Some(since);
            // Start times may be in whole seconds: the period begins at the first observation.
            let is_new = started_at.is_some() && now.uptime.saturating_sub(since) < 2 * EARLY;
            self.early_until = is_new.then_some(now.uptime + EARLY);
        }
        let since = self.running_since.unwrap_or(now.uptime);
        let is_early = now.uptime.saturating_sub(since).as_secs() < self.fixed.pace.initial_delay;
        // A startup probe ends when the others begin.
        if !is_early && instance.is_started != (self.fixed.kind == ProbeKind::Startup) {
            step.next = Next::Probe;
        }
        step
    }

    /// Handles a failed attempt: returns the delay of the retry if it was so early that it does not count. `begun` and
    /// `now` are on the clock of [`ClockReading::uptime`].
    pub fn early_failure(&mut self, begun: Duration, now: Duration) -> Option<Duration> {
        let ends = self.early_until.filter(|ends| begun < *ends)?;
        let pause = EARLY_PAUSE * 2_u32.saturating_pow(self.early_failures.min(8));
        self.early_failures = self.early_failures.saturating_add(1);
        Some(pause.min(ends.saturating_sub(now)))
    }

    /// Counts the result of an attempt; returns the new result of the container, if a threshold is reached.
    pub fn count(&mut self, result: ProbeResult) -> Option<ProbeResult> {
        self.run = if self.last == Some(result) { self.run.saturating_add(1) } else { 1 };
        self.last = Some(result);
        let threshold = match result {
            ProbeResult::Success => self.fixed.pace.success_threshold,
            ProbeResult::Failure => self.fixed.pace.failure_threshold,
        };
        if self.run < threshold {
            return None;
        }
        // The container will be restarted, or has started: either way, no attempt is needed until the instance changes.
        if self.fixed.kind == ProbeKind::Startup
            || (self.fixed.kind, result) == (ProbeKind::Liveness, ProbeResult::Failure)
        {
            self.on_hold = true;
            self.run = 0;
        }
        Some(result)
    }

    fn seed(&self, instance: &Instance) -> Option<ProbeResult> {
        let started_at = match instance.state {
            InstanceState::Running(at) => at,
            InstanceState::Waiting | InstanceState::WillRestart | InstanceState::Ended => None,
        };
        let border = self.fixed.agent_started.checked_sub(BEFORE_AGENT);
        if matches!((started_at, border), (Some(at), Ok(border)) if at < border) {
            // The result of an earlier agent stays valid; a sidecar without a result would block the start of the pod.
            let has_started = self.fixed.kind == ProbeKind::Startup && self.fixed.is_sidecar && instance.is_started;
            return has_started.then_some(ProbeResult::Success);
        }
        match self.fixed.kind {
            ProbeKind::Readiness => Some(ProbeResult::Failure),
            ProbeKind::Liveness => Some(ProbeResult::Success),
            ProbeKind::Startup => None,
        }
    }
}

/// Start of a running instance, on the monotonic clock.
fn began(started_at: Option<Timestamp>, now: ClockReading) -> Duration {
    let ago = started_at.map(|at| now.wall.duration_since(at)).unwrap_or_default();
    now.uptime.saturating_sub(Duration::try_from(ago).unwrap_or_default())
}

#[cfg(test)]
mod tests;
