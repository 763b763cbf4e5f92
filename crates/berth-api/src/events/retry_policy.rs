//! Retry policy of failed event writes. Pure.
//!
//! Implements spec 10 §4.9, §7 row "events".

use std::time::Duration;

use crate::api::ApiError;

/// Maximum attempts if the server is overloaded or throttles.
const BUSY_TRIES: u32 = 5;
/// Maximum attempts if the outcome of the request is unknown.
const LOST_TRIES: u32 = 12;
/// Back-off after a connection failure.
const AFTER_LOSS: Duration = Duration::from_secs(10);

/// Action after a failed write.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Verdict {
    /// Drop the event: the server rejected it.
    Refused,
    /// Drop the event: the retry limit is exceeded.
    Undeliverable,
    /// Create the event: the one to patch no longer exists.
    Create,
    /// Retry after that back-off.
    Again(Duration),
}

/// Write of an event.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Kind {
    /// POST of the first event of a series.
    First,
    /// PATCH of an existing event.
    Again,
}

/// Decides after the `tries`-th attempt (from 1); `chance` in 0..1 spreads the first retries.
pub fn classify_failure(error: &ApiError, kind: Kind, tries: u32, chance: f64) -> Verdict {
    let within = |limit: u32, wait: Duration| if tries < limit { Verdict::Again(wait) } else { Verdict::Undeliverable };
    match error {
        ApiError::Unreachable(_) => Verdict::Again(AFTER_LOSS), // the request was not sent: no retry limit
        ApiError::Lost(_) | ApiError::Timeout(_) if tries == 1 => {
            Verdict::Again(AFTER_LOSS.mul_f64(chance.clamp(0.0, 1.0)))
        }
        ApiError::Lost(_) | ApiError::Timeout(_) => within(LOST_TRIES, AFTER_LOSS),
        ApiError::Refused(status) if status.code == 429 || status.code >= 500 => {
            let delay = Duration::from_secs(1 << tries.min(3));
            within(BUSY_TRIES, status.retry_after.unwrap_or(delay))
        }
        ApiError::Refused(status) if status.code == 404 && kind == Kind::Again => Verdict::Create,
        ApiError::Refused(_) | ApiError::Malformed(_) => Verdict::Refused,
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::testing::refused;

    #[test]
    fn a_failure_by_its_kind() {
        let seconds = |s| Verdict::Again(Duration::from_secs(s));
        let lost = || ApiError::Lost("reset".into());
        for (error, kind, tries, verdict) in [
            (refused(404, "NotFound", ""), Kind::Again, 1, Verdict::Create), // AC-10-33
            (refused(404, "NotFound", ""), Kind::First, 1, Verdict::Refused),
            (refused(409, "AlreadyExists", ""), Kind::First, 1, Verdict::Refused),
            (refused(401, "Unauthorized", ""), Kind::First, 1, Verdict::Refused),
            (refused(403, "Forbidden", ""), Kind::First, 1, Verdict::Refused),
            (refused(422, "Invalid", ""), Kind::First, 1, Verdict::Refused),
            (refused(503, "ServiceUnavailable", ""), Kind::First, 1, seconds(2)),
            (refused(429, "TooManyRequests", ""), Kind::First, 4, seconds(8)),
            (refused(500, "InternalError", ""), Kind::First, 5, Verdict::Undeliverable),
            (lost(), Kind::First, 1, seconds(5)),
            (lost(), Kind::First, 11, seconds(10)),
            (lost(), Kind::First, 12, Verdict::Undeliverable),
            (ApiError::Unreachable("refused".into()), Kind::First, 99, seconds(10)),
            (ApiError::Malformed("?".into()), Kind::First, 1, Verdict::Refused),
        ] {
            assert_eq!(classify_failure(&error, kind, tries, 0.5), verdict, "{error:?} {kind:?} {tries}");
        }
    }
}
