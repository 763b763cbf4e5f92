//! What a test tells the scripted CRI to do.

use std::{collections::HashMap, time::Duration};

use tokio::time::Instant;
use tokio_util::sync::CancellationToken;
use tonic::Code;

/// How a container behaves once started.
#[derive(Debug, Clone)]
pub struct Behaviour {
    /// Exits by itself after that time; `None` runs for ever.
    pub exits_after: Option<Duration>,
    /// The code of that exit.
    pub exit_code: i32,
    /// `reason` of that exit; empty means `Completed`/`Error`.
    pub reason: String,
    /// `StartContainer` fails with this text; the container is then exited with code 128.
    pub start_error: Option<String>,
    /// How long it takes to end after the stop signal; `None` ignores the signal until killed.
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

/// A fault for calls of one operation.
#[derive(Debug, Clone)]
pub enum Fault {
    /// Answer this error, do nothing.
    Error(Code, String),
    /// Do it, but answer this error.
    ErrorAfter(Code, String),
    /// Never answer and never do it (the deadline ends it).
    Hang,
    /// Do it, but only after that time.
    Delay(Duration),
    /// Do it, but only once the test lets go.
    Held(CancellationToken),
}

/// One scripted fault.
#[derive(Debug, Clone)]
pub struct Rule {
    /// The operation's metric label, `run_podsandbox`, `start_container`, …
    pub op: String,
    /// Substring of the call's target (pod or container name, or id); empty matches all.
    pub target: String,
    /// What happens.
    pub fault: Fault,
    /// How often it still happens; `None` for ever.
    pub times: Option<u32>,
}

/// Ordinary latencies per operation.
#[derive(Debug, Clone, Default)]
pub struct Latency(pub HashMap<String, Duration>);

/// What happens to events on their way out; each a probability in 0..=1.
#[derive(Debug, Clone, Copy, Default)]
pub struct EventFaults {
    /// Lost.
    pub lose: f64,
    /// Sent twice.
    pub duplicate: f64,
    /// Held back behind the next one.
    pub reorder: f64,
}

/// One call, as it arrived.
#[derive(Debug, Clone)]
pub struct Call {
    /// When.
    pub at: Instant,
    /// The operation's metric label.
    pub op: &'static str,
    /// Pod name, `pod/container`, id or image.
    pub target: String,
    /// Anything else worth asserting on, e.g. the grace period in seconds.
    pub detail: String,
}

/// All of the script.
#[derive(Debug, Default)]
pub struct Script {
    /// Faults, first match wins.
    pub rules: Vec<Rule>,
    /// Latencies.
    pub latency: Latency,
    /// Behaviour by `pod/container` or `container`; a list is used up start by start, the last
    /// one stays.
    pub behaviour: HashMap<String, Vec<Behaviour>>,
    /// Outputs of `ExecSync` by joined command: exit code, stdout, stderr, duration.
    pub exec: HashMap<String, (i32, String, String, Duration)>,
    /// Event faults.
    pub events: EventFaults,
    /// Whether events are offered at all.
    pub no_events: bool,
    /// Call log.
    pub calls: Vec<Call>,
}

impl Script {
    /// The fault for a call, used up by one.
    pub fn fault(&mut self, op: &str, target: &str) -> Option<Fault> {
        let at = self.rules.iter().position(|r| r.op == op && target.contains(&r.target) && r.times != Some(0))?;
        let rule = &mut self.rules[at];
        if let Some(times) = &mut rule.times {
            *times -= 1;
        }
        Some(rule.fault.clone())
    }

    /// The behaviour of the next start of a container.
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
