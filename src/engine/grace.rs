//! Termination grace period of a pod. Pure. Implements spec 02a §7.

use std::time::Duration;

/// Shortest timeout for a kill by a worker.
const MIN_WAIT: Duration = Duration::from_secs(10);

/// Inputs of the effective grace period, in whole seconds.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct GraceInputs {
    /// The grace period in effect so far; `None` while the pod was not being stopped.
    pub stored: Option<i64>,
    /// `metadata.deletionGracePeriodSeconds`.
    pub deletion: Option<i64>,
    /// Grace period of the kill request.
    pub kill: Option<i64>,
    /// `spec.terminationGracePeriodSeconds`.
    pub spec: Option<i64>,
}

/// The effective grace period.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct EffectiveGrace {
    /// Whole seconds, at least 1.
    pub seconds: i64,
    /// Whether a grace period in effect became shorter: the running kill has to be shortened.
    pub is_shortened: bool,
}

/// The shorter of the grace periods of deletion and kill request; that of the specification without
/// either; at least 1 second. Evaluate it on every update while the pod is being stopped: only a
/// deletion grace period of 0 is replaced by a longer kill request, otherwise it only gets shorter.
pub fn effective(inputs: GraceInputs) -> EffectiveGrace {
    let stored = inputs.stored.unwrap_or(0);
    let (mut grace, mut is_asked_for) = (stored, false);
    for asked in [inputs.deletion, inputs.kill].into_iter().flatten() {
        if grace == 0 || asked < grace {
            (grace, is_asked_for) = (asked, true);
        }
    }
    if !is_asked_for && grace == 0 {
        grace = inputs.spec.unwrap_or(0);
    }
    let seconds = grace.max(1);
    EffectiveGrace { seconds, is_shortened: stored > 0 && seconds < stored }
}

/// How long the caller of a kill waits for the worker: one and a half times the grace period (that of
/// the request, else of the specification, else 0), at least 10 seconds.
pub fn kill_wait(kill: Option<i64>, spec: Option<i64>) -> Duration {
    let grace = kill.or(spec).unwrap_or(0).max(0).unsigned_abs();
    Duration::from_millis(grace.saturating_mul(1500)).max(MIN_WAIT)
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    #[test]
    fn the_shortest_grace_period_wins() {
        let row = |stored, deletion, kill, spec| {
            let effective = effective(GraceInputs { stored, deletion, kill, spec });
            (effective.seconds, effective.is_shortened)
        };
        assert_eq!(row(None, None, None, Some(30)), (30, false));
        assert_eq!(row(None, None, None, None), (1, false));
        assert_eq!(row(None, None, None, Some(0)), (1, false));
        assert_eq!(row(None, Some(10), None, Some(30)), (10, false));
        // AC-02a-9
        assert_eq!(row(None, Some(60), None, Some(30)), (60, false));
        assert_eq!(row(None, Some(10), Some(5), Some(30)), (5, false));
        assert_eq!(row(None, Some(5), Some(10), Some(30)), (5, false));
        // A deletion grace of 0 is replaced by any kill request.
        assert_eq!(row(None, Some(0), Some(20), Some(30)), (20, false));
        assert_eq!(row(None, Some(0), None, Some(30)), (1, false));
        assert_eq!(row(None, None, Some(0), Some(30)), (1, false));
        // AC-02a-18
        assert_eq!(row(Some(30), Some(0), None, Some(30)), (1, true));
        assert_eq!(row(Some(30), Some(30), None, Some(30)), (30, false));
        assert_eq!(row(Some(30), None, None, Some(5)), (30, false));
        assert_eq!(row(Some(30), None, Some(2), None), (2, true));
        assert_eq!(row(Some(1), Some(0), None, None), (1, false));
        // AC-02a-17: a pod that only the runtime knows.
        assert_eq!(row(None, None, Some(1), None), (1, false));
    }

    #[test]
    fn the_wait_for_a_kill_is_bounded_below() {
        for (kill, spec, seconds) in
            [(None, Some(30), 45.0), (Some(4), Some(30), 10.0), (None, None, 10.0), (Some(-5), None, 10.0)]
        {
            assert_eq!(kill_wait(kill, spec), Duration::from_secs_f64(seconds), "{kill:?} {spec:?}");
        }
    }

    proptest! {
        #[test]
        fn it_is_at_least_one_second_and_never_grows(
            stored in prop::option::of(1..i64::MAX), deletion in any::<Option<i64>>(), kill in any::<Option<i64>>(),
            spec in any::<Option<i64>>(),
        ) {
            let inputs = GraceInputs { stored, deletion, kill: kill.filter(|k| deletion != Some(0) || *k < 1), spec };
            let found = effective(inputs);
            prop_assert!(found.seconds >= 1 && stored.is_none_or(|s| found.seconds <= s));
            prop_assert_eq!(found.is_shortened, stored.is_some_and(|s| found.seconds < s));
        }
    }
}
