//! Retries of TokenReview and SubjectAccessReview requests: classification and back-off. Pure.
//!
//! Implements spec 04 §6.4.

use std::time::Duration;

use super::api::ApiError;
use berth_sys::backoff::Backoff;

/// Maximum number of attempts, the first included.
pub const ATTEMPTS: u32 = 5;
/// Back-off after the first failure.
const PAUSE: Duration = Duration::from_millis(500);
/// Back-off; the number of attempts bounds it. Its jitter keeps retries of many callers from coinciding.
const BACKOFF: Backoff = Backoff::new(PAUSE, Duration::MAX).with_factor(1.5).with_jitter(1.0, 1.2);

/// Failed attempt.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct AttemptFailure {
    /// Human-readable error.
    pub text: String,
    /// Retry classification.
    pub retry: Retry,
}

/// Whether and when a retry may succeed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Retry {
    /// A retry cannot succeed.
    Never,
    /// Retry after the usual back-off.
    Soon,
    /// Retry after at least the delay that the server requests.
    After(Duration),
}

/// Back-off after the `review_retry`-th failure (from 0), `None` if there is no retry; `chance` in 0..1 is the jitter.
pub fn pause(attempt: u32, chance: f64, retry: Retry) -> Option<Duration> {
    let usual = BACKOFF.nth_with(attempt.min(ATTEMPTS), chance);
    match retry {
        _ if attempt + 1 >= ATTEMPTS => None,
        Retry::Never => None,
        Retry::Soon => Some(usual),
        Retry::After(asked) => Some(usual.max(asked)),
    }
}

/// Classifies an API error.
///
/// A lost connection is worth a retry; a connection that could not be established is not.
pub fn classify(error: &ApiError) -> AttemptFailure {
    let retry = match error {
        ApiError::Lost(_) => Retry::Soon,
        ApiError::Unreachable(_) | ApiError::Timeout(_) | ApiError::Malformed(_) => Retry::Never,
        ApiError::Refused(status) => match status.retry_after {
            Some(asked) => Retry::After(asked),
            None if matches!(status.reason.as_str(), "InternalError" | "Timeout" | "TooManyRequests") => Retry::Soon,
            None => Retry::Never,
        },
    };
    AttemptFailure { text: error.to_string(), retry }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::api::ApiStatus;

    #[test]
    fn pauses_grow_and_end() {
        let milliseconds = |attempt, chance| pause(attempt, chance, Retry::Soon).map(|pause| pause.as_millis());
        let all: Vec<_> = (0..5).map(|attempt| milliseconds(attempt, 0.0)).collect();
        assert_eq!(all, [Some(500), Some(750), Some(1125), Some(1687), None]);
        assert_eq!(milliseconds(0, 1.0), Some(600));
        assert_eq!(milliseconds(0, 7.0), Some(600));
        let asked = |seconds| Retry::After(Duration::from_secs(seconds));
        assert_eq!(pause(0, 0.0, asked(3)), Some(Duration::from_secs(3)));
        assert_eq!(pause(0, 0.0, asked(0)), Some(PAUSE));
        assert_eq!((pause(0, 0.0, Retry::Never), pause(4, 0.0, asked(3))), (None, None));
    }

    #[test]
    fn only_what_may_pass_is_tried_again() {
        let second = Duration::from_secs(1);
        let refused = |code, reason: &str, retry_after| {
            let status =
                ApiStatus { code, reason: reason.to_owned(), message: "m".to_owned(), causes: Vec::new(), retry_after };
            ApiError::Refused(Box::new(status))
        };
        for (error, retry) in [
            (refused(401, "Unauthorized", None), Retry::Never),
            (refused(403, "Forbidden", None), Retry::Never),
            (refused(429, "TooManyRequests", None), Retry::Soon),
            (refused(429, "TooManyRequests", Some(second)), Retry::After(second)),
            (refused(500, "InternalError", None), Retry::Soon),
            (refused(500, "Invalid", None), Retry::Never),
            (refused(503, "ServiceUnavailable", None), Retry::Never),
            (refused(503, "ServiceUnavailable", Some(second)), Retry::After(second)),
            (refused(504, "Timeout", None), Retry::Soon),
        ] {
            assert_eq!(classify(&error), AttemptFailure { text: "m".to_owned(), retry }, "{error:?}");
        }
        for (error, retry) in [
            (ApiError::Lost("m".into()), Retry::Soon),
            (ApiError::Unreachable("m".into()), Retry::Never),
            (ApiError::Timeout(second), Retry::Never),
            (ApiError::Malformed("m".into()), Retry::Never),
        ] {
            assert_eq!(classify(&error).retry, retry, "{error:?}");
        }
    }
}
