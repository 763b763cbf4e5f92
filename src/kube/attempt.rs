//! What one attempt came to, and whether another is worth while. Pure. Spec 04 §6.4.

use std::time::Duration;

use http::{HeaderMap, StatusCode, header::RETRY_AFTER};
use serde::Deserialize;

/// Attempts in all.
pub const ATTEMPTS: u32 = 5;
/// The first pause.
const PAUSE: Duration = Duration::from_millis(500);
/// Each pause is so many times the last one.
const FACTOR: f64 = 1.5;
/// By so much of itself a pause may be longer, so that not all come back at once.
const JITTER: f64 = 0.2;

/// Why an attempt failed.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Failure {
    /// In words.
    pub text: String,
    /// Whether the next attempt may succeed.
    pub retry: Retry,
}

/// Whether the next attempt may succeed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Retry {
    /// No.
    Never,
    /// After the usual pause.
    Soon,
    /// After that pause, which the server asks for.
    After(Duration),
}

/// The pause after the `attempt`-th failure (from 0); `chance` is between 0 and 1.
pub fn pause(attempt: u32, chance: f64, retry: Retry) -> Option<Duration> {
    let exponent = i32::try_from(attempt.min(ATTEMPTS)).unwrap_or_default();
    let usual = PAUSE.mul_f64(FACTOR.powi(exponent) * (1.0 + JITTER * chance.clamp(0.0, 1.0)));
    match retry {
        _ if attempt + 1 >= ATTEMPTS => None,
        Retry::Never => None,
        Retry::Soon => Some(usual),
        Retry::After(asked) => Some(usual.max(asked)),
    }
}

#[derive(Deserialize, Default)]
#[serde(default)]
struct Status {
    message: String,
    reason: String,
    details: Details,
}

#[derive(Deserialize, Default)]
#[serde(default, rename_all = "camelCase")]
struct Details {
    retry_after_seconds: u64,
}

/// What an answer that is no success means.
pub fn refused(status: StatusCode, headers: &HeaderMap, body: &[u8]) -> Failure {
    let told: Status = serde_json::from_slice(body).unwrap_or_default();
    let by_code = match status.as_u16() {
        429 => "TooManyRequests",
        500 => "InternalError",
        504 => "Timeout",
        _ => "",
    };
    let reason = if told.reason.is_empty() { by_code } else { told.reason.as_str() };
    let header = headers.get(RETRY_AFTER).and_then(|value| value.to_str().ok()?.parse::<u64>().ok());
    let asked = header.or(Some(told.details.retry_after_seconds).filter(|seconds| *seconds > 0));
    let retry = match asked {
        Some(seconds) => Retry::After(Duration::from_secs(seconds)),
        None if matches!(reason, "InternalError" | "Timeout" | "TooManyRequests") => Retry::Soon,
        None => Retry::Never,
    };
    let message = if told.message.is_empty() { status.to_string() } else { told.message };
    Failure { text: message, retry }
}

#[cfg(test)]
mod tests {
    use super::*;

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
        let after = |seconds| Retry::After(Duration::from_secs(seconds));
        for (status, header, body, text, retry) in [
            (401, None, "", "401 Unauthorized", Retry::Never),
            (403, None, r#"{"message":"no","reason":"Forbidden"}"#, "no", Retry::Never),
            (429, None, "", "429 Too Many Requests", Retry::Soon),
            (429, Some("7"), "", "429 Too Many Requests", after(7)),
            (500, None, "not json", "500 Internal Server Error", Retry::Soon),
            (500, None, r#"{"message":"x","reason":"Invalid"}"#, "x", Retry::Never),
            (503, None, "", "503 Service Unavailable", Retry::Never),
            (503, Some("1"), "", "503 Service Unavailable", after(1)),
            (503, Some("soon"), "", "503 Service Unavailable", Retry::Never),
            (504, None, r#"{"reason":"Timeout","details":{"retryAfterSeconds":2}}"#, "504 Gateway Timeout", after(2)),
        ] {
            let mut headers = HeaderMap::new();
            headers.extend(header.map(|value| (RETRY_AFTER, value.parse().expect("a value"))));
            let status = StatusCode::from_u16(status).expect("a status");
            assert_eq!(refused(status, &headers, body.as_bytes()), Failure { text: text.to_owned(), retry }, "{body}");
        }
    }
}
