//! Evaluates thresholds: which are met, for how long, and which node conditions result. Pure.
//!
//! Implements spec 05 §3.4 steps 4-7, §4.5.

use std::{
    collections::{BTreeMap, BTreeSet},
    time::Duration,
};

use super::signals::{Observations, PressureCondition, Uptime, is_short};
use berth_config::eviction::{Signal, Threshold};

/// State kept between two observations.
#[derive(Clone, Debug, Default)]
pub struct PressureState {
    /// Thresholds that are met, each with the time since when.
    first: Vec<(Threshold, Uptime)>,
    /// Reported conditions, each with the time until which it is reported unless a threshold of it is met again.
    conditions: BTreeMap<PressureCondition, Uptime>,
    /// Conditions of these that only an earlier agent observed.
    restored: BTreeSet<PressureCondition>,
    /// Thresholds that were due: they stay met until their minimum reclaim is available as well.
    due_before: Vec<Threshold>,
    /// Time of the last observation of each signal.
    seen: BTreeMap<Signal, Uptime>,
}

/// Result of one evaluation.
#[derive(Clone, PartialEq, Debug, Default)]
pub struct Evaluation {
    /// Conditions to report.
    pub conditions: BTreeSet<PressureCondition>,
    /// Conditions of these that only an earlier agent observed: they do not reject pods at admission.
    pub restored: BTreeSet<PressureCondition>,
    /// Time until which each condition is reported, unless a threshold of it is met again.
    pub until: Vec<(PressureCondition, Uptime)>,
    /// Thresholds that require action now, the first one first, each with the time since when it is due.
    pub due: Vec<(Threshold, Uptime)>,
    /// Whether any threshold is met, regardless of its grace period.
    pub is_met: bool,
}

impl PressureState {
    /// State with the conditions that an earlier agent would still report for these durations, each limited to
    /// `transition`: a restart does not end a pressure.
    pub fn restored(left: impl IntoIterator<Item = (PressureCondition, Duration)>, transition: Duration) -> Self {
        let conditions: BTreeMap<_, _> =
            left.into_iter().map(|(condition, left)| (condition, left.min(transition))).collect();
        let restored = conditions.keys().copied().collect();
        Self { conditions, restored, ..Self::default() }
    }

    /// Evaluates an observation. `thresholds` are those in force, sorted by signal; `transition` is how long a
    /// condition is reported after its cause has ended.
    pub fn evaluate(
        &mut self,
        thresholds: &[Threshold],
        seen: &Observations,
        now: Uptime,
        transition: Duration,
    ) -> Evaluation {
        let is_met = |threshold: &&Threshold| {
            let Some(seen) = seen.get(&threshold.signal) else { return false };
            let more = threshold.min_reclaim.filter(|_| self.due_before.contains(threshold));
            is_short(seen, threshold.below, None) || (more.is_some() && is_short(seen, threshold.below, more))
        };
        let met: Vec<&Threshold> = thresholds.iter().filter(is_met).collect();
        let since = |threshold: &Threshold| {
            let known = self.first.iter().find(|(known, _)| known == threshold);
            known.map_or(now, |(_, since)| *since)
        };
        // A signal that is missing once neither ends a pressure nor requires an eviction.
        let is_lost = |signal: &Signal| {
            let last = self.seen.get(signal).filter(|_| !seen.contains_key(signal));
            last.is_some_and(|last| now.saturating_sub(*last) < BLIND)
        };
        let kept = self.first.iter().filter(|(known, _)| is_lost(&known.signal) && thresholds.contains(known)).cloned();
        let first = met.iter().map(|threshold| ((*threshold).clone(), since(threshold))).chain(kept).collect();
        self.first = first;
        let until = now.saturating_add(transition);
        self.conditions.extend(met.iter().map(|threshold| (PressureCondition::of(threshold.signal), until)));
        for threshold in &met {
            self.restored.remove(&PressureCondition::of(threshold.signal));
        }
        self.conditions.retain(|_, until| now < *until);
        self.restored.retain(|condition| self.conditions.contains_key(condition));
        let called: Vec<(Threshold, Uptime)> = self
            .first
            .iter()
            .map(|(threshold, since)| (threshold.clone(), since.saturating_add(threshold.grace.unwrap_or_default())))
            .filter(|(_, due)| *due <= now)
            .filter(|(threshold, _)| seen.contains_key(&threshold.signal) || self.due_before.contains(threshold))
            .collect();
        self.due_before = called.iter().map(|(threshold, _)| threshold.clone()).collect();
        let is_news = |signal: &Signal| {
            let at = seen.get(signal).map(|seen| seen.at);
            self.seen.get(signal).is_none_or(|last| at.is_some_and(|at| at > *last))
        };
        let due = called.into_iter().filter(|(threshold, _)| is_news(&threshold.signal)).collect();
        self.seen.extend(seen.iter().map(|(signal, seen)| (*signal, seen.at)));
        let until: Vec<_> = self.conditions.iter().map(|(condition, until)| (*condition, *until)).collect();
        let conditions = self.conditions.keys().copied().collect();
        Evaluation { conditions, restored: self.restored.clone(), until, due, is_met: !self.first.is_empty() }
    }
}

/// Returns whether no threshold is met, minimum reclaim included.
pub fn is_resolved(thresholds: &[Threshold], seen: &Observations) -> bool {
    let is_short = |threshold: &Threshold| {
        seen.get(&threshold.signal).is_some_and(|seen| is_short(seen, threshold.below, threshold.min_reclaim))
    };
    !thresholds.iter().any(is_short)
}

/// Amount of a signal that is missing until no threshold is met, and the amount that has to be available then, both in
/// the signal's unit.
pub fn missing(thresholds: &[Threshold], seen: &Observations, signal: Signal) -> Option<(u64, u64)> {
    let seen = seen.get(&signal)?;
    let level = |threshold: &Threshold| {
        let below = threshold.below.of(seen.capacity);
        threshold.min_reclaim.map_or(below, |more| below.plus(more.of(seen.capacity))).value()
    };
    let least = thresholds.iter().filter(|threshold| threshold.signal == signal).map(level).max()?;
    let missing = least.saturating_sub(seen.available.value());
    Some((u64::try_from(missing).ok().filter(|bytes| *bytes > 0)?, least.unsigned_abs()))
}

/// How long the state of a signal is kept that cannot be observed.
const BLIND: Duration = Duration::from_secs(30);
/// Minimum interval between observations close to a file system's threshold, for which the kernel has no notification.
pub const NEAR: Duration = Duration::from_millis(100);
/// Minimum interval between observations otherwise, also while a threshold is met, which may last long.
pub const SOONEST: Duration = Duration::from_millis(250);
/// Maximum interval between observations.
pub const LATEST: Duration = Duration::from_secs(10);

/// Delay until the next observation: at most the time until a threshold can be met at the fastest plausible rate. It is
/// short while a threshold is met, while a condition is reported, which has to end in time, and while memory or
/// processes could not be observed.
pub fn next_interval(thresholds: &[Threshold], seen: &Observations, turn: &Evaluation) -> Duration {
    if turn.is_met {
        return SOONEST;
    }
    // Memory and processes always exist, and the node fails without them.
    let is_lost = |threshold: &Threshold| {
        matches!(threshold.signal, Signal::Memory | Signal::Pid) && !seen.contains_key(&threshold.signal)
    };
    let is_calm = turn.conditions.is_empty() && !thresholds.iter().any(is_lost);
    let latest = if is_calm { LATEST } else { Duration::from_secs(1) };
    let until = |threshold: &Threshold| {
        let seen = seen.get(&threshold.signal)?;
        let left = seen.available.minus(threshold.below.of(seen.capacity)).value().max(0).unsigned_abs();
        let left = Duration::from_millis(left.saturating_mul(1000) / fastest(threshold.signal));
        let soonest = if PressureCondition::of(threshold.signal) == PressureCondition::Disk { NEAR } else { SOONEST };
        Some(if left < SOONEST { soonest } else { left })
    };
    thresholds.iter().filter_map(until).min().unwrap_or(latest).min(latest)
}

/// Fastest plausible consumption of a signal's resource, per second.
const fn fastest(signal: Signal) -> u64 {
    match signal {
        Signal::Memory | Signal::AllocatableMemory => 4 << 30,
        Signal::NodeFs | Signal::ImageFs | Signal::ContainerFs => 2 << 30,
        Signal::NodeFsInodes | Signal::ImageFsInodes | Signal::ContainerFsInodes => 200_000,
        Signal::Pid => 20_000,
    }
}

/// Grace period, in seconds, of a pod that is evicted for that threshold; `own` is the one of its spec.
pub fn grace(threshold: &Threshold, longest: i64, own: Option<i64>) -> i64 {
    if threshold.is_hard() { 1 } else { own.map_or(longest, |own| own.min(longest)) }
}

#[cfg(test)]
mod tests {
    use super::{super::signals::SignalObservation, *};
    use berth_config::eviction::ThresholdValue;
    use berth_types::quantity::Amount;

    const MINUTE: Duration = Duration::from_secs(60);
    const TRANSITION: Duration = Duration::from_secs(300);

    fn amount(text: &str) -> Amount {
        Amount::parse(text).expect("a quantity")
    }

    fn hard(signal: Signal, below: &str) -> Threshold {
        Threshold { signal, below: ThresholdValue::Quantity(amount(below)), grace: None, min_reclaim: None }
    }

    fn seen(signal: Signal, available: &str, at: Uptime) -> Observations {
        [(signal, SignalObservation { available: amount(available), capacity: 8 << 30, at })].into()
    }

    /// Evaluates these memory readings at these seconds; returns whether a condition is reported, and the number of due
    /// thresholds.
    fn evaluations(threshold: &Threshold, readings: &[(u64, &str)]) -> Vec<(bool, usize)> {
        let mut pressure = PressureState::default();
        let all = [threshold.clone()];
        let mut turn = |(second, available): &(u64, &str)| {
            let now = Uptime::from_secs(*second);
            let turn = pressure.evaluate(&all, &seen(threshold.signal, available, now), now, TRANSITION);
            (turn.conditions.contains(&PressureCondition::of(threshold.signal)), turn.due.len())
        };
        readings.iter().map(&mut turn).collect()
    }

    #[test]
    fn a_hard_threshold_calls_at_once() {
        // AC-05-14
        let threshold = hard(Signal::Memory, "2Gi");
        assert_eq!(evaluations(&threshold, &[(0, "2Gi"), (1, "1500Mi")]), [(false, 0), (true, 1)]);
    }

    #[test]
    fn a_soft_threshold_waits_for_its_grace() {
        // AC-05-15, AC-05-16
        let threshold = Threshold { grace: Some(2 * MINUTE), ..hard(Signal::Memory, "2Gi") };
        let readings = [(0, "1Gi"), (60, "1Gi"), (119, "1Gi"), (120, "1Gi"), (180, "1Gi")];
        assert_eq!(evaluations(&threshold, &readings), [(true, 0), (true, 0), (true, 0), (true, 1), (true, 1)]);
        let interrupted = [(0, "1Gi"), (100, "3Gi"), (110, "1Gi"), (200, "1Gi"), (230, "1Gi")];
        assert_eq!(evaluations(&threshold, &interrupted), [(true, 0), (true, 0), (true, 0), (true, 0), (true, 1)]);
        assert_eq!((grace(&threshold, 5, Some(30)), grace(&threshold, 5, Some(3))), (5, 3));
        assert_eq!((grace(&threshold, 5, None), grace(&hard(Signal::Memory, "1"), 5, Some(30))), (5, 1));
    }

    #[test]
    fn a_pressure_outlasts_its_cause() {
        // AC-05-17
        let readings = [(10, "1Gi"), (11, "3Gi"), (10 + 299, "3Gi"), (10 + 300, "3Gi"), (400, "3Gi")];
        let conditions: Vec<bool> =
            evaluations(&hard(Signal::Memory, "2Gi"), &readings).iter().map(|(condition, _)| *condition).collect();
        assert_eq!(conditions, [true, true, true, false, false], "4m59s, 5m");
    }

    #[test]
    fn a_pressure_outlasts_the_agent() {
        let all = [hard(Signal::Memory, "2Gi")];
        let minutes = |left: u32| [(PressureCondition::Memory, MINUTE * left)];
        for (left, at, expected) in [(2, 119, true), (2, 120, false), (60, 299, true), (60, 300, false), (0, 0, false)]
        {
            let mut pressure = PressureState::restored(minutes(left), TRANSITION);
            let now = Uptime::from_secs(at);
            let turn = pressure.evaluate(&all, &seen(Signal::Memory, "3Gi", now), now, TRANSITION);
            assert_eq!(turn.conditions.contains(&PressureCondition::Memory), expected, "{left} {at}");
            assert!(turn.due.is_empty(), "nobody has to go for what was");
            assert_eq!(turn.restored, turn.conditions, "nobody is refused for it either");
        }
        let mut pressure = PressureState::restored(minutes(2), TRANSITION);
        let now = Uptime::from_secs(1);
        let turn = pressure.evaluate(&all, &seen(Signal::Memory, "1Gi", now), now, TRANSITION);
        assert!(turn.conditions.contains(&PressureCondition::Memory) && turn.restored.is_empty(), "it is met again");
    }

    #[test]
    fn what_called_holds_until_enough_is_free() {
        let threshold =
            Threshold { min_reclaim: Some(ThresholdValue::Quantity(amount("500Mi"))), ..hard(Signal::NodeFs, "1Gi") };
        let readings = [(0, "1200Mi"), (1, "1000Mi"), (2, "1200Mi"), (3, "1524Mi"), (4, "1200Mi")];
        let due: Vec<usize> = evaluations(&threshold, &readings).iter().map(|(_, due)| *due).collect();
        assert_eq!(due, [0, 1, 1, 0, 0]);
        let at = |available| seen(Signal::NodeFs, available, Uptime::ZERO);
        let all = [threshold];
        assert!(is_resolved(&all, &at("1524Mi")) && !is_resolved(&all, &at("1200Mi")));
        assert!(is_resolved(&all, &Observations::new()), "nothing is known");
    }

    #[test]
    fn an_observation_makes_a_threshold_due_once() {
        let (mut pressure, all) = (PressureState::default(), [hard(Signal::Memory, "2Gi")]);
        let mut due = |at: u64, now: u64| {
            let seen = seen(Signal::Memory, "1Gi", Uptime::from_secs(at));
            pressure.evaluate(&all, &seen, Uptime::from_secs(now), TRANSITION).due.len()
        };
        assert_eq!([due(1, 1), due(1, 2), due(3, 3)], [1, 0, 1]);
    }

    #[test]
    fn without_an_observation_there_is_no_shortage() {
        let mut pressure = PressureState::default();
        let all = [hard(Signal::ImageFs, "2Gi"), hard(Signal::Pid, "10")];
        let turn = pressure.evaluate(&all, &seen(Signal::Pid, "5", MINUTE), MINUTE, TRANSITION);
        assert_eq!(turn.conditions, [PressureCondition::Pid].into());
        assert_eq!((turn.due.len(), turn.due[0].0.signal, turn.due[0].1), (1, Signal::Pid, MINUTE));
    }

    /// Evaluates these readings at these seconds; returns since when the threshold is due, where it is. `None` is a
    /// missing observation.
    fn calls(threshold: &Threshold, readings: &[(u64, Option<&str>)]) -> Vec<Option<u64>> {
        let (mut pressure, all) = (PressureState::default(), [threshold.clone()]);
        let turn = |(second, available): &(u64, Option<&str>)| {
            let now = Uptime::from_secs(*second);
            let seen = available.map(|available| seen(threshold.signal, available, now)).unwrap_or_default();
            pressure.evaluate(&all, &seen, now, TRANSITION).due.first().map(|(_, since)| since.as_secs())
        };
        readings.iter().map(turn).collect()
    }

    #[test]
    fn a_failed_observation_keeps_the_state_and_makes_nothing_due() {
        let soft = Threshold { grace: Some(MINUTE), ..hard(Signal::Memory, "2Gi") };
        let one = [(0, Some("1Gi")), (50, Some("1Gi")), (58, None), (62, None), (63, Some("1Gi"))];
        assert_eq!(calls(&soft, &one), [None, None, None, None, Some(60)], "its grace goes on");
        let long = [(0, Some("1Gi")), (29, None), (30, None), (63, Some("1Gi")), (123, Some("1Gi"))];
        assert_eq!(calls(&soft, &long), [None, None, None, None, Some(123)], "for a while");
        let over = [(0, Some("1Gi")), (1, None), (2, Some("3Gi")), (61, Some("1Gi"))];
        assert_eq!(calls(&soft, &over), [None; 4], "it was over meanwhile");
        let more =
            Threshold { min_reclaim: Some(ThresholdValue::Quantity(amount("1Gi"))), ..hard(Signal::Memory, "2Gi") };
        let called = [(0, Some("1Gi")), (1, None), (2, Some("2500Mi")), (40, Some("2500Mi"))];
        assert_eq!(calls(&more, &called), [Some(0), None, Some(0), Some(0)]);
        // The threshold was not due while the signal was missing.
        let more = Threshold { grace: Some(Duration::from_secs(1)), ..more };
        assert_eq!(calls(&more, &called), [None; 4]);
    }

    #[test]
    fn shares_that_are_never_or_always_met() {
        let share = |share| Threshold { below: ThresholdValue::Share(share), ..hard(Signal::Memory, "1") };
        assert_eq!(evaluations(&share(0.0), &[(0, "0")]), [(false, 0)]);
        assert_eq!(evaluations(&share(1.0), &[(0, "7Gi")]), [(true, 1)]);
    }

    #[test]
    fn observations_are_more_frequent_near_a_threshold() {
        let quiet = Evaluation::default();
        let pause_at =
            |signal, available| next_interval(&[hard(signal, "1Gi")], &seen(signal, available, MINUTE), &quiet);
        for (signal, available, expected) in [
            (Signal::Memory, "101Gi", LATEST),
            (Signal::Memory, "9Gi", Duration::from_secs(2)),
            (Signal::Memory, "1025Mi", SOONEST),
            (Signal::NodeFs, "9Gi", Duration::from_secs(4)),
            (Signal::NodeFs, "1536Mi", SOONEST),
            (Signal::NodeFs, "1535Mi", NEAR),
            (Signal::NodeFs, "1Mi", NEAR),
        ] {
            assert_eq!(pause_at(signal, available), expected, "{} {available}", signal.as_str());
        }
        assert_eq!(next_interval(&[], &Observations::new(), &quiet), LATEST);
        for (signal, expected) in [(Signal::Memory, 1), (Signal::Pid, 1), (Signal::AllocatableMemory, 10)] {
            let pause = next_interval(&[hard(signal, "1Gi")], &Observations::new(), &quiet);
            assert_eq!(pause.as_secs(), expected, "{} cannot be seen", signal.as_str());
        }
        let reported = Evaluation { conditions: [PressureCondition::Disk].into(), ..Evaluation::default() };
        assert_eq!(next_interval(&[], &Observations::new(), &reported), Duration::from_secs(1));
        let met = Evaluation { is_met: true, ..Evaluation::default() };
        assert_eq!(next_interval(&[], &Observations::new(), &met), SOONEST);
    }
}
