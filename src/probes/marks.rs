//! Where the regular moments of probes lie: on marks of a clock that tests can stop.
//!
//! What a probe costs a node at rest is above all waking up for it. So all moments lie on marks that probes of the same
//! period have in common. Pods that begin together would be asked together for ever after; where many share a mark,
//! those that come later lie on one nearby.

use std::time::Duration;

use tokio::time::Instant;

use super::kind::Kind;

/// A period has so many marks…
const IN_A_PERIOD: u32 = 10;
/// … and they are at most so far apart.
const APART: Duration = Duration::from_secs(1);
/// Where any moment will do, only one in so many marks is one to wake up for.
const ONE_IN: u32 = 2;
/// Marks lie so far behind the agent's start, and whole seconds after that: its other work, which takes tens of
/// milliseconds a minute it does on whole ones.
pub const OFF_THE_SECOND: Duration = Duration::from_millis(170);
/// So many probes of one period may share a mark.
const FEW: usize = 16;
/// Where more do, so many marks nearby are looked at.
const NEARBY: u32 = 2;

/// The marks of an agent.
#[derive(Clone, Copy, Debug)]
pub struct Marks {
    first: Instant,
}

impl Marks {
    /// For an agent that starts now.
    pub fn from(now: Instant) -> Self {
        Self { first: now + OFF_THE_SECOND }
    }

    /// The first mark that is not before `at`, of those of that period. A period is a whole number of marks, so what
    /// begins on one stays on them.
    pub fn after(&self, at: Instant, period: Duration) -> Instant {
        let passed = at.saturating_duration_since(self.first).as_nanos().next_multiple_of(apart(period).as_nanos());
        self.first + Duration::from_nanos(passed.try_into().unwrap_or(u64::MAX))
    }

    /// Where the first moment of a probe lies that may as well lie anywhere in a period that begins now: on a mark shortly
    /// before `at`, so that none comes later than by a period.
    pub fn anywhere(&self, at: Instant, period: Duration) -> Instant {
        let passed = at.saturating_duration_since(self.first).as_nanos();
        let rest = passed % (apart(period) * ONE_IN).as_nanos();
        self.first + Duration::from_nanos((passed - rest).try_into().unwrap_or(u64::MAX))
    }

    /// Where the second moment of a probe lies, of which the first has come `period` before `at`. `shared` says how many
    /// probes of that period lie on a mark already.
    ///
    /// Its first period, and no other, is longer than declared by a mark at most. Where many share that mark, a
    /// container may be found ready sooner, and dead later, than by a period: by a fifth at most. Nothing moves what has
    /// to start first.
    pub fn place(&self, kind: Kind, at: Instant, period: Duration, shared: impl Fn(Instant) -> usize) -> Instant {
        let (natural, apart) = (self.after(at, period), apart(period));
        let nearby = |steps: u32| match kind {
            Kind::Startup => natural,
            Kind::Readiness => natural - apart * steps,
            Kind::Liveness => natural + apart * steps,
        };
        let load = |mark: &Instant| shared(*mark).max(FEW);
        (0..=NEARBY).map(nearby).min_by_key(load).unwrap_or(natural)
    }
}

/// From one mark of a period to the next.
fn apart(period: Duration) -> Duration {
    (period / IN_A_PERIOD).clamp(Duration::from_nanos(1), APART)
}

/// Whether moments a period apart that begin with one come to the other.
pub fn is_shared(one: Instant, other: Instant, period: Duration) -> bool {
    let between = one.max(other) - one.min(other);
    between.as_nanos().is_multiple_of(period.as_nanos().max(1))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn seconds(number: f64) -> Duration {
        Duration::from_secs_f64(number)
    }

    fn marks() -> (Instant, Marks) {
        let first = Instant::now() + Duration::from_secs(100);
        (first, Marks { first })
    }

    #[test]
    fn moments_of_probes_with_the_same_period_lie_on_common_marks() {
        let (first, marks) = marks();
        for (period, at, expected) in [
            (10.0, 0.0, 0.0),
            (10.0, 0.001, 1.0),
            (10.0, 1.0, 1.0),
            (10.0, 13.26, 14.0),
            (1.0, 7.013, 7.1),
            (3.0, 0.2, 0.3),
            (41.0, 41.5, 42.0),
            (3600.0, 3600.1, 3601.0),
        ] {
            let mark = marks.after(first + seconds(at), seconds(period));
            assert_eq!(mark, first + seconds(expected), "{period} {at}");
            assert!(is_shared(mark, mark + 3 * seconds(period), seconds(period)));
        }
        let now = Instant::now();
        assert_eq!(Marks::from(now).after(now, seconds(10.0)), now + OFF_THE_SECOND);
        assert_eq!(marks.after(now, Duration::ZERO), first, "whatever the period");
    }

    #[test]
    fn where_any_moment_will_do_only_every_second_mark_is_one() {
        let (first, marks) = marks();
        for (period, at, expected) in [
            (10.0, 0.0, 0.0),
            (10.0, 1.999, 0.0),
            (10.0, 2.0, 2.0),
            (10.0, 13.26, 12.0),
            (1.0, 7.3, 7.2),
            (41.0, 41.5, 40.0),
            (3600.0, 3600.1, 3600.0),
        ] {
            let mark = marks.anywhere(first + seconds(at), seconds(period));
            assert_eq!(mark, first + seconds(expected), "{period} {at}");
            assert_eq!(marks.after(mark, seconds(period)), mark, "one of all marks");
        }
        let now = Instant::now();
        assert_eq!(marks.anywhere(now, seconds(10.0)), first, "before all marks");
        assert_eq!(marks.anywhere(now, Duration::ZERO), first, "whatever the period");
    }

    /// Places so many probes that begin at the same time; returns how many lie where, in seconds after that.
    fn placed(kind: Kind, count: usize) -> Vec<(f64, usize)> {
        let (first, marks) = marks();
        let (period, begun) = (seconds(10.0), first + seconds(50.2));
        let mut bases: Vec<Instant> = Vec::new();
        for _ in 0..count {
            let shared = |mark: Instant| bases.iter().filter(|base| is_shared(**base, mark, period)).count();
            bases.push(marks.place(kind, begun + period, period, shared));
        }
        bases.sort_unstable();
        bases.chunk_by(|a, b| a == b).map(|same| ((same[0] - begun).as_secs_f64(), same.len())).collect()
    }

    #[test]
    fn where_many_begin_together_they_part() {
        for (kind, count, expected) in [
            (Kind::Readiness, 1, vec![(10.8, 1)]),
            (Kind::Readiness, 16, vec![(10.8, 16)]),
            (Kind::Readiness, 20, vec![(9.8, 3), (10.8, 17)]),
            (Kind::Readiness, 99, vec![(8.8, 33), (9.8, 33), (10.8, 33)]),
            (Kind::Liveness, 99, vec![(10.8, 33), (11.8, 33), (12.8, 33)]),
            (Kind::Startup, 99, vec![(10.8, 99)]),
        ] {
            assert_eq!(placed(kind, count), expected, "{kind:?} {count}");
        }
    }
}
