//! What one probe does at one of its moments, and what its results come to. Pure. Behaviour: spec 05 §1.3, §1.4.
//!
//! Where the reference differs: results of one instance never count for the next (§1.10), and the delay after a
//! container's start is measured by a clock that is not set.

use std::time::Duration;

use jiff::Timestamp;

use super::{
    kind::{Kind, Pace},
    seen::{Instance, Seen, State},
};
use berth_ports::ProbeResult;
use berth_types::ContainerId;

/// Containers that are this much older than the agent were started by an earlier one.
const BEFORE_AGENT: Duration = Duration::from_secs(10);

/// In its first second a container that fails is asked again soon, and that does not count: the reference sees a
/// container so late that most servers listen by its first attempt.
const EARLY: Duration = Duration::from_secs(1);
/// The first pause between such attempts; each one is twice as long as the one before.
const EARLY_PAUSE: Duration = Duration::from_millis(100);

/// Both clocks.
#[derive(Clone, Copy, Debug)]
pub struct Now {
    /// Since the agent's start; never set back.
    pub uptime: Duration,
    /// The wall's.
    pub wall: Timestamp,
}

/// What is always the same for one probe.
#[derive(Clone, Copy, Debug)]
pub struct Fixed {
    /// For what it is.
    pub kind: Kind,
    /// Its numbers.
    pub pace: Pace,
    /// Whether its container is a sidecar.
    pub is_sidecar: bool,
    /// When the agent started.
    pub agent_started: Timestamp,
}

/// What comes next.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Next {
    /// Nothing until the next moment.
    Wait,
    /// An attempt.
    Probe,
    /// The probe is over.
    Stop,
}

/// What one moment asks for, in this order.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Step {
    /// Forget the result of an instance that is gone.
    pub forget: Option<ContainerId>,
    /// The result to begin with, unless there is one.
    pub seed: Option<ProbeResult>,
    /// The result from now on.
    pub set: Option<ProbeResult>,
    /// Then.
    pub next: Next,
}

impl Step {
    fn of(next: Next) -> Self {
        Self { forget: None, seed: None, set: None, next }
    }
}

/// What one probe remembers.
#[derive(Clone, Debug)]
pub struct Turn {
    fixed: Fixed,
    instance: Option<ContainerId>,
    running_since: Option<Duration>,
    last: Option<ProbeResult>,
    run: u32,
    /// Until when failures do not count, on the clock of [`Now::uptime`].
    early_until: Option<Duration>,
    /// Failures so far that did not count.
    early_failures: u32,
    on_hold: bool,
}

impl Turn {
    /// Before its first moment.
    pub fn new(fixed: Fixed) -> Self {
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

    /// What is always the same.
    pub fn fixed(&self) -> &Fixed {
        &self.fixed
    }

    /// The instance it asks.
    pub fn instance(&self) -> Option<&ContainerId> {
        self.instance.as_ref()
    }

    /// One moment. `seen` is `None` where the pod has no status yet.
    pub fn begin(&mut self, seen: Option<&Seen>, now: Now) -> Step {
        let Some(seen) = seen else { return Step::of(Next::Wait) };
        if seen.is_over {
            return Step::of(Next::Stop);
        }
        let Some(instance) = &seen.instance else { return Step::of(Next::Wait) };
        let mut step = Step::of(Next::Wait);
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
            State::Running(at) => at,
            State::Waiting | State::WillRestart | State::Ended => {
                step.set = Some(ProbeResult::Failure);
                step.next = if instance.state == State::Ended { Next::Stop } else { Next::Wait };
                return step;
            }
        };
        if seen.is_deleting && self.fixed.kind != Kind::Readiness {
            step.set = Some(ProbeResult::Success); // so that it is left in peace
            step.next = Next::Stop;
            return step;
        }
        if self.running_since.is_none() {
            let since = began(started_at, now);
            self.running_since = Some(since);
            // Times of starts may be in whole seconds: what counts is when it was first seen.
            let is_new = started_at.is_some() && now.uptime.saturating_sub(since) < 2 * EARLY;
            self.early_until = is_new.then_some(now.uptime + EARLY);
        }
        let since = self.running_since.unwrap_or(now.uptime);
        let is_early = now.uptime.saturating_sub(since).as_secs() < self.fixed.pace.initial_delay;
        // A startup probe ends where the others begin.
        if !is_early && instance.is_started != (self.fixed.kind == Kind::Startup) {
            step.next = Next::Probe;
        }
        step
    }

    /// After an attempt that failed: the pause until the next one, where it was so early that it does not count; `begun`
    /// and `now` are on the clock of [`Now::uptime`].
    pub fn early_failure(&mut self, begun: Duration, now: Duration) -> Option<Duration> {
        let ends = self.early_until.filter(|ends| begun < *ends)?;
        let pause = EARLY_PAUSE * 2_u32.saturating_pow(self.early_failures.min(8));
        self.early_failures = self.early_failures.saturating_add(1);
        Some(pause.min(ends.saturating_sub(now)))
    }

    /// Counts the result of an attempt; returns what the container's result becomes.
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
        // The container will be restarted, or has started: whichever it is, nothing is to be asked until then.
        if self.fixed.kind == Kind::Startup || (self.fixed.kind, result) == (Kind::Liveness, ProbeResult::Failure) {
            self.on_hold = true;
            self.run = 0;
        }
        Some(result)
    }

    fn seed(&self, instance: &Instance) -> Option<ProbeResult> {
        let started_at = match instance.state {
            State::Running(at) => at,
            State::Waiting | State::WillRestart | State::Ended => None,
        };
        let border = self.fixed.agent_started.checked_sub(BEFORE_AGENT);
        if matches!((started_at, border), (Some(at), Ok(border)) if at < border) {
            // An earlier agent's word stands; a sidecar without a result would be waited for.
            let has_started = self.fixed.kind == Kind::Startup && self.fixed.is_sidecar && instance.is_started;
            return has_started.then_some(ProbeResult::Success);
        }
        match self.fixed.kind {
            Kind::Readiness => Some(ProbeResult::Failure),
            Kind::Liveness => Some(ProbeResult::Success),
            Kind::Startup => None,
        }
    }
}

/// When an instance that runs began to, on the clock that is never set.
fn began(started_at: Option<Timestamp>, now: Now) -> Duration {
    let ago = started_at.map(|at| now.wall.duration_since(at)).unwrap_or_default();
    now.uptime.saturating_sub(Duration::try_from(ago).unwrap_or_default())
}

#[cfg(test)]
mod tests;
