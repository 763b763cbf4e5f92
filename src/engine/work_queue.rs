//! When a pod's worker takes its next turn. Pure.
//!
//! Upstream's shared queue fires on a one-second tick and clamps crash back-off to the sync
//! frequency; here each worker sleeps exactly until its own time (spec 02a §9.4, §14).

use std::time::Duration;

/// How a turn ended, as far as the next one's time is concerned.
#[derive(Clone, PartialEq, Eq, Debug)]
pub enum TurnEnd {
    /// The state moved on, or an action was carried out: again as soon as a fresh look is there.
    Again,
    /// All is as it should be.
    Settled,
    /// The pod's network is not ready.
    NetworkNotReady,
    /// Something is held back until then.
    HeldBack(Duration),
    /// It failed, and is tried again then.
    Retries(Duration),
    /// It failed.
    Failed,
}

impl TurnEnd {
    /// What the next turn waits for; `blocked` says that the runtime, or its network, is in the way.
    pub fn waits_for(&self, blocked: bool) -> &'static str {
        match self {
            Self::NetworkNotReady => "network",
            Self::HeldBack(_) => "back-off",
            Self::Failed if blocked => "runtime",
            Self::Failed | Self::Retries(_) => "next try",
            Self::Again | Self::Settled => "idle",
        }
    }
}

/// Back-off after an error that carries none.
pub const ERROR_BACKOFF: Duration = Duration::from_secs(10);
/// Back-off while the network is not ready.
pub const NETWORK_BACKOFF: Duration = Duration::from_secs(1);

/// Least time between the end of a failed turn and the next one, unless the desired state changes: a failed action
/// is followed by a look at the runtime, and what that look shows does not start the next turn at once.
pub const LEAST_AFTER_FAILURE: Duration = Duration::from_secs(1);

/// How long nothing that is observed starts the next turn after one that ended so.
pub fn observation_delay(end: &TurnEnd) -> Duration {
    match end {
        TurnEnd::Failed | TurnEnd::Retries(_) => LEAST_AFTER_FAILURE,
        TurnEnd::Again | TurnEnd::Settled | TurnEnd::NetworkNotReady | TurnEnd::HeldBack(_) => Duration::ZERO,
    }
}

/// The delay until the next turn; `chance` is uniform in 0..1 and spreads the turns of many pods
/// over 1 to 1.5 times the delay. Times that are held back exactly are not spread.
pub fn delay(end: &TurnEnd, sync_frequency: Duration, chance: f64) -> Duration {
    let spread = |base: Duration| base.mul_f64(1.0 + 0.5 * chance.clamp(0.0, 1.0));
    match end {
        TurnEnd::Again => Duration::ZERO,
        TurnEnd::Settled => spread(sync_frequency),
        TurnEnd::NetworkNotReady => spread(NETWORK_BACKOFF),
        TurnEnd::HeldBack(exactly) | TurnEnd::Retries(exactly) => *exactly,
        TurnEnd::Failed => spread(ERROR_BACKOFF.min(sync_frequency)),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn delays_are_spread_except_where_exact() {
        let minute = Duration::from_secs(60);
        for (end, chance, expected) in [
            (TurnEnd::Again, 1.0, 0),
            (TurnEnd::Settled, 0.0, 60_000),
            (TurnEnd::Settled, 1.0, 90_000),
            (TurnEnd::NetworkNotReady, 0.5, 1_250),
            (TurnEnd::HeldBack(Duration::from_secs(20)), 1.0, 20_000),
            (TurnEnd::Retries(Duration::from_secs(12)), 1.0, 12_000),
            (TurnEnd::Failed, 0.0, 10_000),
            (TurnEnd::Failed, 1.0, 15_000),
        ] {
            assert_eq!(delay(&end, minute, chance).as_millis(), expected, "{end:?} {chance}");
        }
        assert_eq!(delay(&TurnEnd::Failed, Duration::from_secs(2), 0.0), Duration::from_secs(2));
    }

    #[test]
    fn a_try_after_an_error_is_no_back_off() {
        let soon = Duration::from_secs(1);
        for (end, blocked, expected) in [
            (TurnEnd::HeldBack(soon), false, "back-off"),
            (TurnEnd::Retries(soon), false, "next try"),
            (TurnEnd::Failed, false, "next try"),
            (TurnEnd::Failed, true, "runtime"),
            (TurnEnd::NetworkNotReady, true, "network"),
            (TurnEnd::Settled, false, "idle"),
        ] {
            assert_eq!(end.waits_for(blocked), expected, "{end:?}");
        }
    }
}
