//! What a failed write of an event means. Pure. Spec 10 §4.9, §7 row "events".

use std::time::Duration;

use crate::api::ApiError;

/// Tries where the server said that it cannot now.
const BUSY_TRIES: u32 = 5;
/// Tries where it is not known what became of the request.
const LOST_TRIES: u32 = 12;
/// Between tries after the connection failed.
const AFTER_LOSS: Duration = Duration::from_secs(10);

/// What is to be done after a write that failed.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Verdict {
    /// The server does not want it.
    Refused,
    /// It was tried often enough.
    Undeliverable,
    /// The event is forgotten there: make it anew.
    Create,
    /// Again after that time.
    Again(Duration),
}

/// Whether a series was to begin or to go on.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Kind {
    /// POST.
    First,
    /// PATCH.
    Again,
}

/// After the `tries`-th try (from 1); `chance` in 0..1 spreads what failed together.
pub fn after(error: &ApiError, kind: Kind, tries: u32, chance: f64) -> Verdict {
    let within = |limit: u32, wait: Duration| if tries < limit { Verdict::Again(wait) } else { Verdict::Undeliverable };
    match error {
        ApiError::Unreachable(_) => Verdict::Again(AFTER_LOSS), // it was not asked: that is no try
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
            assert_eq!(after(&error, kind, tries, 0.5), verdict, "{error:?} {kind:?} {tries}");
        }
    }
}
