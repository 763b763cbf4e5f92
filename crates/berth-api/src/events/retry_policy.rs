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
pub enum EventFailureAction {
    /// Drop the event: the server rejected it.
    Refused,
    /// Drop the event: the retry limit is exceeded.
    Undeliverable,
    /// Create the event: the one to patch no longer exists.
    Create,
    /// Retry after that back-off.
    Again(Duration),
}

/// Creation of an event, or a patch of its series.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum EventWrite {
    /// POST of the first event of a series.
    First,
    /// PATCH of an existing event.
    Again,
}

/// Decides after the `tries`-th attempt (from 1); `chance` in 0..1 spreads the first retries.
pub fn classify_failure(error: &ApiError, kind: EventWrite, tries: u32, chance: f64) -> EventFailureAction {
    let within = |limit: u32, wait: Duration| {
        if tries < limit { EventFailureAction::Again(wait) } else { EventFailureAction::Undeliverable }
    };
    match error {
        ApiError::Unreachable(_) => EventFailureAction::Again(AFTER_LOSS), // the request was not sent: no retry limit
        ApiError::Lost(_) | ApiError::Timeout(_) if tries == 1 => {
            EventFailureAction::Again(AFTER_LOSS.mul_f64(chance.clamp(0.0, 1.0)))
        }
        ApiError::Lost(_) | ApiError::Timeout(_) => within(LOST_TRIES, AFTER_LOSS),
        ApiError::Refused(status) if status.code == 429 || status.code >= 500 => {
            let delay = Duration::from_secs(1 << tries.min(3));
            within(BUSY_TRIES, status.retry_after.unwrap_or(delay))
        }
        ApiError::Refused(status) if status.code == 404 && kind == EventWrite::Again => EventFailureAction::Create,
        ApiError::Refused(_) | ApiError::Malformed(_) => EventFailureAction::Refused,
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::testing::refused;

    #[test]
    fn a_failure_by_its_kind() {
        let seconds = |s| EventFailureAction::Again(Duration::from_secs(s));
        let lost = || ApiError::Lost("reset".into());
        for (error, kind, tries, verdict) in [
            (refused(404, "NotFound", ""), EventWrite::Again, 1, EventFailureAction::Create), // AC-10-33
            (refused(404, "NotFound", ""), EventWrite::First, 1, EventFailureAction::Refused),
            (refused(409, "AlreadyExists", ""), EventWrite::First, 1, EventFailureAction::Refused),
            (refused(401, "Unauthorized", ""), EventWrite::First, 1, EventFailureAction::Refused),
            (refused(403, "Forbidden", ""), EventWrite::First, 1, EventFailureAction::Refused),
            (refused(422, "Invalid", ""), EventWrite::First, 1, EventFailureAction::Refused),
            (refused(503, "ServiceUnavailable", ""), EventWrite::First, 1, seconds(2)),
            (refused(429, "TooManyRequests", ""), EventWrite::First, 4, seconds(8)),
            (refused(500, "InternalError", ""), EventWrite::First, 5, EventFailureAction::Undeliverable),
            (lost(), EventWrite::First, 1, seconds(5)),
            (lost(), EventWrite::First, 11, seconds(10)),
            (lost(), EventWrite::First, 12, EventFailureAction::Undeliverable),
            (ApiError::Unreachable("refused".into()), EventWrite::First, 99, seconds(10)),
            (ApiError::Malformed("?".into()), EventWrite::First, 1, EventFailureAction::Refused),
        ] {
            assert_eq!(classify_failure(&error, kind, tries, 0.5), verdict, "{error:?} {kind:?} {tries}");
        }
    }
}
