//! Script of the scripted CRI: container behavior, faults, latencies, exec results, and the call log.

use std::{collections::HashMap, time::Duration};

use tokio::time::Instant;
use tokio_util::sync::CancellationToken;
use tonic::Code;

/// Behavior of a container after its start.
#[derive(Debug, Clone)]
pub struct Behaviour {
    /// Delay until it exits by itself; `None` runs forever.
    pub exits_after: Option<Duration>,
    /// Exit code of the exit after `exits_after`; default 0.
    pub exit_code: i32,
    /// `reason` of that exit; empty means `Completed` or `Error`, by exit code.
    pub reason: String,
    /// Error text of a failing `StartContainer`; the container then has exited with code 128.
    pub start_error: Option<String>,
    /// Delay between the stop signal and the exit; `None` ignores the signal until it is killed.
    pub stops_after: Option<Duration>,
    /// Exit code after the stop signal.
    pub stop_code: i32,
}

impl Default for Behaviour {
    fn default() -> Self {
        Self {
            exits_after: None,
            exit_code: 0,
            reason: String::new(),
            start_error: None,
            stops_after: Some(Duration::from_millis(1)),
            stop_code: 143,
        }
    }
}

impl Behaviour {
    /// Exits with `code` after `after`.
    pub fn exits(code: i32, after: Duration) -> Self {
        Self { exits_after: Some(after), exit_code: code, ..Self::default() }
    }

    /// Ignores the stop signal.
    pub fn stubborn() -> Self {
        Self { stops_after: None, ..Self::default() }
    }
}

/// Fault of one call.
#[derive(Debug, Clone)]
pub enum Fault {
    /// Returns this error without doing anything.
    Error(Code, String),
    /// Carries out the call, but returns this error.
    ErrorAfter(Code, String),
    /// Never carries out the call and never returns (the deadline ends it).
    Hang,
    /// Carries out the call after a delay.
    Delay(Duration),
    /// Carries out the call once the test cancels the token.
    Blocked(CancellationToken),
}

/// Fault with its match conditions.
#[derive(Debug, Clone)]
pub struct Rule {
    /// Metric label of the operation: `run_podsandbox`, `start_container`, …
    pub op: String,
    /// Substring of the call's target (pod or container name, or ID); empty matches all.
    pub target: String,
    /// Fault to inject.
    pub fault: Fault,
    /// Remaining number of injections; `None` is unlimited.
    pub times: Option<u32>,
}

/// Ordinary latency per operation.
#[derive(Debug, Clone, Default)]
pub struct Latency(pub HashMap<String, Duration>);

/// Faults of outgoing events; each is a probability in 0..=1.
#[derive(Debug, Clone, Copy, Default)]
pub struct EventFaults {
    /// Probability that an event is lost.
    pub lose: f64,
    /// Probability that an event is sent twice.
    pub duplicate: f64,
    /// Probability that an event is delayed until after the next one.
    pub reorder: f64,
}

/// Recorded call, at its arrival.
#[derive(Debug, Clone)]
pub struct Call {
    /// Time of arrival.
    pub at: Instant,
    /// Metric label of the operation.
    pub op: &'static str,
    /// Pod name, `pod/container`, ID, or image.
    pub target: String,
    /// Operation-specific detail for assertions, for example the grace period in seconds.
    pub detail: String,
}

/// Complete script of a runtime.
#[derive(Debug, Default)]
pub struct Script {
    /// Faults; the first match wins.
    pub rules: Vec<Rule>,
    /// Latencies by operation.
    pub latency: Latency,
    /// Behavior by `pod/container` or `container`: each start consumes one entry of the list; the last one stays.
    pub behaviour: HashMap<String, Vec<Behaviour>>,
    /// Results of `ExecSync` by joined command: exit code, stdout, stderr, duration.
    pub exec: HashMap<String, (i32, String, String, Duration)>,
    /// Faults of outgoing events.
    pub events: EventFaults,
    /// Whether the event stream is disabled.
    pub no_events: bool,
    /// Recorded calls.
    pub calls: Vec<Call>,
}

impl Script {
    /// Fault for a call; decrements its remaining count.
    pub fn fault(&mut self, op: &str, target: &str) -> Option<Fault> {
        let at = self.rules.iter().position(|r| r.op == op && target.contains(&r.target) && r.times != Some(0))?;
        let rule = &mut self.rules[at];
        if let Some(times) = &mut rule.times {
            *times -= 1;
        }
        Some(rule.fault.clone())
    }

    /// Behavior of the next start of a container.
    pub fn next_behaviour(&mut self, pod: &str, container: &str) -> Behaviour {
        let key = format!("{pod}/{container}");
        let key = if self.behaviour.contains_key(&key) { key.as_str() } else { container };
        match self.behaviour.get_mut(key) {
            Some(list) if list.len() > 1 => list.remove(0),
            Some(list) => list.first().cloned().unwrap_or_default(),
            None => Behaviour::default(),
        }
    }
}
