//! Delay until a pod worker's next sync. Pure.
//!
//! Upstream's shared queue fires on a one-second tick and clamps crash back-off to the sync frequency;
//! here each worker sleeps exactly until its own deadline (spec 02a §9.4, §14).

use std::time::Duration;

/// Result of a sync, as far as it determines the next one.
#[derive(Clone, PartialEq, Eq, Debug)]
pub enum SyncResult {
    /// The lifecycle moved on, or an action was executed: sync again with a fresh observation.
    SyncAgain,
    /// The pod is in its desired state.
    Settled,
    /// The pod's network is not ready.
    NetworkNotReady,
    /// An action is in back-off for that long.
    InBackOff(Duration),
    /// The sync failed, and is retried after that long.
    RetryAfter(Duration),
    /// The sync failed; retried after the default error back-off.
    Failed,
}

impl SyncResult {
    /// Step name while waiting for the next sync; `blocked`: the runtime, or its network, is not
    /// ready.
    pub fn waits_for(&self, blocked: bool) -> &'static str {
        match self {
            Self::NetworkNotReady => "network",
            Self::InBackOff(_) => "back-off",
            Self::Failed if blocked => "runtime",
            Self::Failed | Self::RetryAfter(_) => "retry",
            Self::SyncAgain | Self::Settled => "idle",
        }
    }
}

/// Back-off after an error without a back-off of its own.
pub const ERROR_BACKOFF: Duration = Duration::from_secs(10);
/// Back-off while the network is not ready.
pub const NETWORK_BACKOFF: Duration = Duration::from_secs(1);

/// Minimum delay between a failed sync and the next one, unless the desired state changes: a failed
/// action is followed by an observation, and the change it shows must not start the next sync at once.
pub const LEAST_AFTER_FAILURE: Duration = Duration::from_secs(1);

/// How long observations do not start the next sync after a sync with that result.
pub fn observation_delay(end: &SyncResult) -> Duration {
    match end {
        SyncResult::Failed | SyncResult::RetryAfter(_) => LEAST_AFTER_FAILURE,
        SyncResult::SyncAgain | SyncResult::Settled | SyncResult::NetworkNotReady | SyncResult::InBackOff(_) => {
            Duration::ZERO
        }
    }
}

/// The delay until the next sync; `chance` is uniform in 0..1 and adds jitter of 0 to 50 percent of the
/// delay. Exact delays (back-off, retry) get no jitter.
pub fn delay(end: &SyncResult, sync_frequency: Duration, chance: f64) -> Duration {
    let spread = |base: Duration| base.mul_f64(1.0 + 0.5 * chance.clamp(0.0, 1.0));
    match end {
        SyncResult::SyncAgain => Duration::ZERO,
        SyncResult::Settled => spread(sync_frequency),
        SyncResult::NetworkNotReady => spread(NETWORK_BACKOFF),
        SyncResult::InBackOff(exactly) | SyncResult::RetryAfter(exactly) => *exactly,
        SyncResult::Failed => spread(ERROR_BACKOFF.min(sync_frequency)),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn delays_are_spread_except_where_exact() {
        let minute = Duration::from_secs(60);
        for (end, chance, expected) in [
            (SyncResult::SyncAgain, 1.0, 0),
            (SyncResult::Settled, 0.0, 60_000),
            (SyncResult::Settled, 1.0, 90_000),
            (SyncResult::NetworkNotReady, 0.5, 1_250),
            (SyncResult::InBackOff(Duration::from_secs(20)), 1.0, 20_000),
            (SyncResult::RetryAfter(Duration::from_secs(12)), 1.0, 12_000),
            (SyncResult::Failed, 0.0, 10_000),
            (SyncResult::Failed, 1.0, 15_000),
        ] {
            assert_eq!(delay(&end, minute, chance).as_millis(), expected, "{end:?} {chance}");
        }
        assert_eq!(delay(&SyncResult::Failed, Duration::from_secs(2), 0.0), Duration::from_secs(2));
    }

    #[test]
    fn a_try_after_an_error_is_no_back_off() {
        let soon = Duration::from_secs(1);
        for (end, blocked, expected) in [
            (SyncResult::InBackOff(soon), false, "back-off"),
            (SyncResult::RetryAfter(soon), false, "retry"),
            (SyncResult::Failed, false, "retry"),
            (SyncResult::Failed, true, "runtime"),
            (SyncResult::NetworkNotReady, true, "network"),
            (SyncResult::Settled, false, "idle"),
        ] {
            assert_eq!(end.waits_for(blocked), expected, "{end:?}");
        }
    }
}
