//! Retry policy of the API client. Pure.
//!
//! Implements spec 10 §2.6, §11.

use std::time::Duration;

use crate::api::{ApiError, Verb};

/// Maximum number of retries.
const MOST: u32 = 10;
/// Back-off after a lost connection.
const PAUSE: Duration = Duration::from_secs(1);

/// Back-off before attempt `attempt + 1` (attempts count from 0); `None` if the error is not retried.
///
/// A 429 or 5xx response with `Retry-After` is retried for every verb. A request that was lost may have been processed:
/// only reads are retried.
pub fn pause(verb: Verb, error: &ApiError, attempt: u32) -> Option<Duration> {
    if attempt >= MOST {
        return None;
    }
    match error {
        ApiError::Refused(status) if status.code == 429 || status.code >= 500 => status.retry_after,
        ApiError::Lost(_) if is_reading(verb) => Some(PAUSE),
        _ => None,
    }
}

fn is_reading(verb: Verb) -> bool {
    matches!(verb, Verb::Get | Verb::List | Verb::Watch)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::api::ApiStatus;

    fn refused(code: u16, seconds: Option<u64>) -> ApiError {
        let retry_after = seconds.map(Duration::from_secs);
        ApiError::Refused(Box::new(ApiStatus { code, retry_after, ..ApiStatus::default() }))
    }

    #[test]
    fn only_what_may_be_asked_twice_is() {
        let lost = || ApiError::Lost(String::new());
        for (id, verb, error, attempt, expected) in [
            ("AC-10-35", Verb::Patch, refused(429, Some(3)), 0, Some(3)),
            ("AC-10-13", Verb::Watch, refused(429, Some(2)), 9, Some(2)),
            ("ten retries", Verb::Get, refused(429, Some(2)), 10, None),
            ("AC-10-36", Verb::Create, refused(503, None), 0, None),
            ("no promise", Verb::Get, refused(500, None), 0, None),
            ("not of these", Verb::Get, refused(409, Some(1)), 0, None),
            ("AC-10-26", Verb::Delete, lost(), 0, None),
            ("lost read", Verb::Get, lost(), 0, Some(1)),
            ("lost list", Verb::List, lost(), 9, Some(1)),
            ("lost watch", Verb::Watch, lost(), 10, None),
            ("timeout", Verb::Get, ApiError::Timeout(PAUSE), 0, None),
            ("refused", Verb::Get, ApiError::Unreachable(String::new()), 0, None),
        ] {
            assert_eq!(pause(verb, &error, attempt), expected.map(Duration::from_secs), "{id}");
        }
    }
}
