//! Recent probe outcomes of container instances, for diagnostics. Equal consecutive ones are merged.
//!
//! Users query why an instance was killed after its end, so the histories of the latest failing instances are retained.

use std::{
    collections::{HashMap, VecDeque},
    sync::{Arc, Mutex, MutexGuard, PoisonError},
};

use jiff::Timestamp;

use super::{kind::ProbeKind, outcome::Outcome};
use berth_types::ContainerId;

/// Maximum number of runs per probe.
const RUNS: usize = 4;
/// Maximum length of a text, in characters.
const TEXT: usize = 256;
/// Maximum number of ended instances that are retained, of all pods together.
const GONE: usize = 128;

/// Consecutive attempts with the same outcome.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Run {
    /// `success`, `warning`, `failure` or `error`.
    pub outcome: &'static str,
    /// Text of the last attempt.
    pub text: String,
    /// Number of attempts.
    pub times: u64,
    /// End of the first attempt.
    pub first: Timestamp,
    /// End of the last attempt.
    pub last: Timestamp,
}

/// History of one probe, the latest run last.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct History {
    /// `Liveness`, `Readiness` or `Startup`.
    pub kind: &'static str,
    /// Runs of the probe.
    pub runs: Vec<Run>,
}

const SUCCESS: &str = "success";

/// Runs of one probe of an instance. The probe keeps this handle, which avoids a map lookup per attempt.
#[derive(Clone, Default)]
pub struct Runs(Arc<Mutex<VecDeque<Run>>>);

type Probes = Vec<(ProbeKind, Runs)>;

#[derive(Default)]
struct HistoryMaps {
    current: HashMap<ContainerId, Probes>,
    /// Instances that are no longer probed, the latest last.
    gone: VecDeque<(ContainerId, Probes)>,
}

/// Histories of all probed instances, and of some ended ones.
#[derive(Default)]
pub struct Histories(Mutex<HistoryMaps>);

impl Histories {
    /// Returns the runs of one probe; empty at first.
    pub fn begin(&self, container: &ContainerId, kind: ProbeKind) -> Runs {
        let mut all = self.lock();
        let probes = all.current.entry(container.clone()).or_default();
        if let Some((_, runs)) = probes.iter().find(|(known, _)| *known == kind) {
            return runs.clone();
        }
        // Most instances have one or two probes: do not allocate more.
        probes.reserve_exact(1);
        let runs = Runs::default();
        probes.push((kind, runs.clone()));
        runs
    }

    /// Ends the history of a probe. A probe that only succeeded does not explain the end of its instance and is
    /// dropped.
    pub fn forget(&self, container: &ContainerId, kind: ProbeKind) {
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

    /// History of the probes of an instance, also of an ended one.
    pub fn of(&self, container: &ContainerId) -> Vec<History> {
        let all = self.lock();
        let current = all.current.get(container).map(Vec::as_slice).unwrap_or_default();
        let gone = all.gone.iter().find(|(known, _)| known == container).map(|(_, probes)| probes.as_slice());
        let is_over = |kind: &ProbeKind| !current.iter().any(|(known, _)| known == kind);
        let gone = gone.unwrap_or_default().iter().filter(|(kind, _)| is_over(kind));
        let to_history = |(kind, runs): &(ProbeKind, Runs)| History {
            kind: kind.label(),
            runs: runs.lock().iter().cloned().collect(),
        };
        current.iter().chain(gone).map(to_history).collect()
    }

    fn lock(&self) -> MutexGuard<'_, HistoryMaps> {
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
        // Most probes have a single run.
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
        all.begin(&id, ProbeKind::Readiness).add(&failure("a"), at(1));
        all.begin(&id, ProbeKind::Readiness).add(&failure("b"), at(2));
        all.begin(&id, ProbeKind::Readiness).add(&Outcome::Success, at(3));
        all.begin(&id, ProbeKind::Liveness).add(&Outcome::Success, at(3));
        let histories = all.of(&id);
        let run = Run { outcome: "failure", text: "b".to_owned(), times: 2, first: at(1), last: at(2) };
        assert_eq!((histories.len(), &histories[0].runs[0]), (2, &run));
        assert_eq!(histories[0].runs[1].outcome, "success");
        for second in 0..100 {
            all.begin(&id, ProbeKind::Readiness).add(&failure(&"x".repeat(10_000)), at(second));
            all.begin(&id, ProbeKind::Readiness).add(&Outcome::Success, at(second));
        }
        let runs = &all.of(&id)[0].runs;
        assert!(runs.len() == RUNS && runs.iter().all(|run| run.text.len() <= TEXT));
    }

    #[test]
    fn why_an_instance_was_killed_is_known_when_it_is_gone() {
        let all = Histories::default();
        let failure = Outcome::Failure("HTTP probe failed with statuscode: 500".to_owned());
        let (id, well) = (ContainerId::from("c"), ContainerId::from("w"));
        all.begin(&id, ProbeKind::Liveness).add(&Outcome::Success, at(1));
        all.begin(&id, ProbeKind::Liveness).add(&failure, at(2));
        all.begin(&id, ProbeKind::Readiness).add(&Outcome::Success, at(1));
        all.begin(&well, ProbeKind::Liveness).add(&Outcome::Success, at(1));
        for kind in [ProbeKind::Liveness, ProbeKind::Readiness] {
            all.forget(&id, kind);
            all.forget(&well, kind);
        }
        let histories = all.of(&id);
        assert_eq!((histories.len(), histories[0].kind, histories[0].runs[1].times), (1, "Liveness", 1));
        assert!(all.of(&well).is_empty(), "it was never in trouble");
        assert!(all.lock().current.is_empty());
        for number in 0..1000 {
            let id = ContainerId::from(format!("{number}").as_str());
            all.begin(&id, ProbeKind::Startup).add(&failure, at(number));
            all.forget(&id, ProbeKind::Startup);
        }
        assert_eq!(all.lock().gone.len(), GONE);
        assert!(all.of(&id).is_empty() && all.of(&ContainerId::from("999")).len() == 1);
    }
}
