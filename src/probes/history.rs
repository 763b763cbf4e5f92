//! What probes of an instance came to lately, for people who ask why. Runs of the same outcome are one entry.

use std::{
    collections::{HashMap, VecDeque},
    sync::{Mutex, MutexGuard, PoisonError},
};

use jiff::Timestamp;

use super::{kind::Kind, outcome::Outcome};
use crate::pod::ContainerId;

/// Runs that are kept of a probe.
const RUNS: usize = 4;
/// Longest text that is kept, characters.
const TEXT: usize = 256;

/// Attempts in a row that came to the same.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Run {
    /// `success`, `warning`, `failure` or `error`.
    pub outcome: &'static str,
    /// What was said with it, the first time.
    pub text: String,
    /// How many attempts.
    pub times: u64,
    /// When the first of them ended.
    pub first: Timestamp,
    /// When the last of them ended.
    pub last: Timestamp,
}

/// What one probe came to, the latest last.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct History {
    /// `Liveness`, `Readiness` or `Startup`.
    pub kind: &'static str,
    /// Its runs.
    pub runs: Vec<Run>,
}

type Runs = Vec<(Kind, VecDeque<Run>)>;

/// Histories of all instances that are probed.
#[derive(Default)]
pub struct Histories(Mutex<HashMap<ContainerId, Runs>>);

impl Histories {
    /// An attempt has ended.
    pub fn add(&self, container: &ContainerId, kind: Kind, outcome: &Outcome, at: Timestamp) {
        let (outcome, text) = words(outcome);
        let mut all = self.lock();
        let probes = all.entry(container.clone()).or_default();
        let found = probes.iter().position(|(known, _)| *known == kind);
        let index = found.unwrap_or_else(|| {
            // Most have one run for ever, of one probe or two: what is not needed is not taken.
            probes.reserve_exact(1);
            probes.push((kind, VecDeque::with_capacity(1)));
            probes.len() - 1
        });
        let Some((_, runs)) = probes.get_mut(index) else { return };
        if let Some(run) = runs.back_mut().filter(|run| run.outcome == outcome) {
            (run.times, run.last) = (run.times.saturating_add(1), at);
            return;
        }
        if runs.len() == RUNS {
            runs.pop_front();
        }
        let text = text.chars().take(TEXT).collect();
        runs.push_back(Run { outcome, text, times: 1, first: at, last: at });
    }

    /// A probe is no more.
    pub fn forget(&self, container: &ContainerId, kind: Kind) {
        let mut all = self.lock();
        if let Some(probes) = all.get_mut(container) {
            probes.retain(|(known, _)| *known != kind);
            if probes.is_empty() {
                all.remove(container);
            }
        }
    }

    /// What the probes of an instance came to.
    pub fn of(&self, container: &ContainerId) -> Vec<History> {
        let all = self.lock();
        let probes = all.get(container).map(Vec::as_slice).unwrap_or_default();
        let told =
            |(kind, runs): &(Kind, VecDeque<Run>)| History { kind: kind.label(), runs: runs.iter().cloned().collect() };
        probes.iter().map(told).collect()
    }

    fn lock(&self) -> MutexGuard<'_, HashMap<ContainerId, Runs>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

fn words(outcome: &Outcome) -> (&'static str, &str) {
    match outcome {
        Outcome::Success => ("success", ""),
        Outcome::Warning(text) => ("warning", text),
        Outcome::Failure(text) => ("failure", text),
        Outcome::Error { text, .. } => ("error", text),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn at(second: i64) -> Timestamp {
        Timestamp::from_second(second).expect("a time")
    }

    #[test]
    fn runs_are_gathered_and_bounded() {
        let (all, id) = (Histories::default(), ContainerId::from("c"));
        let failure = |text: &str| Outcome::Failure(text.to_owned());
        all.add(&id, Kind::Readiness, &failure("a"), at(1));
        all.add(&id, Kind::Readiness, &failure("b"), at(2));
        all.add(&id, Kind::Readiness, &Outcome::Success, at(3));
        all.add(&id, Kind::Liveness, &Outcome::Success, at(3));
        let told = all.of(&id);
        let run = Run { outcome: "failure", text: "a".to_owned(), times: 2, first: at(1), last: at(2) };
        assert_eq!((told.len(), &told[0].runs[0]), (2, &run));
        assert_eq!(told[0].runs[1].outcome, "success");
        for second in 0..100 {
            all.add(&id, Kind::Readiness, &failure(&"x".repeat(10_000)), at(second));
            all.add(&id, Kind::Readiness, &Outcome::Success, at(second));
        }
        let runs = &all.of(&id)[0].runs;
        assert!(runs.len() == RUNS && runs.iter().all(|run| run.text.len() <= TEXT));
        all.forget(&id, Kind::Readiness);
        assert_eq!(all.of(&id).len(), 1);
        all.forget(&id, Kind::Liveness);
        assert!(all.lock().is_empty());
    }
}
