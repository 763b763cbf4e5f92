//! What probes of an instance came to lately, for people who ask why. Runs of the same outcome are one entry.
//!
//! Why an instance was killed is asked once it is gone: of the latest that were in trouble it is kept for that.

use std::{
    collections::{HashMap, VecDeque},
    sync::{Arc, Mutex, MutexGuard, PoisonError},
};

use jiff::Timestamp;

use super::{kind::Kind, outcome::Outcome};
use berth_types::ContainerId;

/// Runs that are kept of a probe.
const RUNS: usize = 4;
/// Longest text that is kept, characters.
const TEXT: usize = 256;
/// Instances of the past that are remembered, of all pods together.
const GONE: usize = 128;

/// Attempts in a row that came to the same.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Run {
    /// `success`, `warning`, `failure` or `error`.
    pub outcome: &'static str,
    /// What was said with it, the last time.
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

const SUCCESS: &str = "success";

/// The runs of one probe of an instance. Whoever adds to them keeps them: they are not looked for each time.
#[derive(Clone, Default)]
pub struct Runs(Arc<Mutex<VecDeque<Run>>>);

type Probes = Vec<(Kind, Runs)>;

#[derive(Default)]
struct State {
    current: HashMap<ContainerId, Probes>,
    /// Those that are probed no more, the latest last.
    gone: VecDeque<(ContainerId, Probes)>,
}

/// Histories of all instances that are probed, and of some that were.
#[derive(Default)]
pub struct Histories(Mutex<State>);

impl Histories {
    /// Those of one probe; none at first.
    pub fn begin(&self, container: &ContainerId, kind: Kind) -> Runs {
        let mut all = self.lock();
        let probes = all.current.entry(container.clone()).or_default();
        if let Some((_, runs)) = probes.iter().find(|(known, _)| *known == kind) {
            return runs.clone();
        }
        // Most are the only one, or one of two: what is not needed is not taken.
        probes.reserve_exact(1);
        let runs = Runs::default();
        probes.push((kind, runs.clone()));
        runs
    }

    /// A probe is no more. One that only ever succeeded says nothing about the end of its instance.
    pub fn forget(&self, container: &ContainerId, kind: Kind) {
        let mut all = self.lock();
        let Some(probes) = all.current.get_mut(container) else { return };
        let Some(at) = probes.iter().position(|(known, _)| *known == kind) else { return };
        let ended = probes.remove(at);
        if probes.is_empty() {
            all.current.remove(container);
        }
        if ended.1.lock().iter().all(|run| run.outcome == SUCCESS) {
            return;
        }
        match all.gone.iter_mut().find(|(known, _)| known == container) {
            Some((_, probes)) => {
                probes.retain(|(known, _)| *known != kind);
                probes.push(ended);
            }
            None => {
                if all.gone.len() == GONE {
                    all.gone.pop_front();
                }
                all.gone.push_back((container.clone(), vec![ended]));
            }
        }
    }

    /// What the probes of an instance came to, also where it is gone.
    pub fn of(&self, container: &ContainerId) -> Vec<History> {
        let all = self.lock();
        let current = all.current.get(container).map(Vec::as_slice).unwrap_or_default();
        let gone = all.gone.iter().find(|(known, _)| known == container).map(|(_, probes)| probes.as_slice());
        let is_over = |kind: &Kind| !current.iter().any(|(known, _)| known == kind);
        let gone = gone.unwrap_or_default().iter().filter(|(kind, _)| is_over(kind));
        let told =
            |(kind, runs): &(Kind, Runs)| History { kind: kind.label(), runs: runs.lock().iter().cloned().collect() };
        current.iter().chain(gone).map(told).collect()
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Runs {
    /// An attempt has ended.
    pub fn add(&self, outcome: &Outcome, at: Timestamp) {
        let (outcome, text) = words(outcome);
        let mut runs = self.lock();
        if let Some(run) = runs.back_mut().filter(|run| run.outcome == outcome) {
            (run.times, run.last) = (run.times.saturating_add(1), at);
            if !text.chars().take(TEXT).eq(run.text.chars()) {
                run.text = text.chars().take(TEXT).collect();
            }
            return;
        }
        if runs.len() == RUNS {
            runs.pop_front();
        }
        // Most have one run for ever.
        runs.reserve_exact(1);
        let text = text.chars().take(TEXT).collect();
        runs.push_back(Run { outcome, text, times: 1, first: at, last: at });
    }

    fn lock(&self) -> MutexGuard<'_, VecDeque<Run>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

fn words(outcome: &Outcome) -> (&'static str, &str) {
    match outcome {
        Outcome::Success => (SUCCESS, ""),
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
        all.begin(&id, Kind::Readiness).add(&failure("a"), at(1));
        all.begin(&id, Kind::Readiness).add(&failure("b"), at(2));
        all.begin(&id, Kind::Readiness).add(&Outcome::Success, at(3));
        all.begin(&id, Kind::Liveness).add(&Outcome::Success, at(3));
        let told = all.of(&id);
        let run = Run { outcome: "failure", text: "b".to_owned(), times: 2, first: at(1), last: at(2) };
        assert_eq!((told.len(), &told[0].runs[0]), (2, &run));
        assert_eq!(told[0].runs[1].outcome, "success");
        for second in 0..100 {
            all.begin(&id, Kind::Readiness).add(&failure(&"x".repeat(10_000)), at(second));
            all.begin(&id, Kind::Readiness).add(&Outcome::Success, at(second));
        }
        let runs = &all.of(&id)[0].runs;
        assert!(runs.len() == RUNS && runs.iter().all(|run| run.text.len() <= TEXT));
    }

    #[test]
    fn why_an_instance_was_killed_is_known_when_it_is_gone() {
        let all = Histories::default();
        let failure = Outcome::Failure("HTTP probe failed with statuscode: 500".to_owned());
        let (id, well) = (ContainerId::from("c"), ContainerId::from("w"));
        all.begin(&id, Kind::Liveness).add(&Outcome::Success, at(1));
        all.begin(&id, Kind::Liveness).add(&failure, at(2));
        all.begin(&id, Kind::Readiness).add(&Outcome::Success, at(1));
        all.begin(&well, Kind::Liveness).add(&Outcome::Success, at(1));
        for kind in [Kind::Liveness, Kind::Readiness] {
            all.forget(&id, kind);
            all.forget(&well, kind);
        }
        let told = all.of(&id);
        assert_eq!((told.len(), told[0].kind, told[0].runs[1].times), (1, "Liveness", 1));
        assert!(all.of(&well).is_empty(), "it was never in trouble");
        assert!(all.lock().current.is_empty());
        for number in 0..1000 {
            let id = ContainerId::from(format!("{number}").as_str());
            all.begin(&id, Kind::Startup).add(&failure, at(number));
            all.forget(&id, Kind::Startup);
        }
        assert_eq!(all.lock().gone.len(), GONE);
        assert!(all.of(&id).is_empty() && all.of(&ContainerId::from("999")).len() == 1);
    }
}
