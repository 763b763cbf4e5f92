//! Mapping of HTTP error responses to API errors. Pure.
//!
//! Implements spec 10 §2.6, §2.5.

use std::time::Duration;

use http::{HeaderMap, StatusCode, header::RETRY_AFTER};
use jiff::Timestamp;
use serde::Deserialize;

use crate::api::{ApiStatus, ApiStatusCause, Call, Verb};

/// Bytes kept of an error body that is no `Status`.
const TEXT_LIMIT: usize = 2048;
/// Upper limit of the server's `Retry-After`.
const LONGEST: Duration = Duration::from_secs(3600);

#[derive(Deserialize, Default)]
#[serde(default)]
struct Status {
    kind: String,
    status: String,
    message: Option<String>,
    reason: Option<String>,
    details: Option<Details>,
}

#[derive(Deserialize, Default)]
#[serde(default, rename_all = "camelCase")]
struct Details {
    causes: Option<Vec<RawCause>>,
    retry_after_seconds: Option<u64>,
}

#[derive(Deserialize, Default)]
#[serde(default)]
struct RawCause {
    reason: Option<String>,
    message: Option<String>,
    field: Option<String>,
}

/// Converts an HTTP error response to an API status.
pub fn refusal(call: &Call, code: StatusCode, headers: &HeaderMap, body: &[u8], now: Timestamp) -> ApiStatus {
    let parsed = serde_json::from_slice::<Status>(body).ok();
    // A `Status` of success, or another object, contradicts the error code and is ignored.
    let parsed = parsed.filter(|status| status.kind == "Status" && status.status != "Success");
    let mut status = match parsed {
        Some(parsed) => of_status(parsed, call, code),
        None => made_up(call, code, text(body)),
    };
    status.retry_after = header(headers, now).or(status.retry_after).map(|asked| asked.min(LONGEST));
    status
}

fn of_status(status: Status, call: &Call, code: StatusCode) -> ApiStatus {
    let details = status.details.unwrap_or_default();
    let cause = |raw: RawCause| ApiStatusCause {
        reason: raw.reason.unwrap_or_default(),
        message: raw.message.unwrap_or_default(),
        field: raw.field.unwrap_or_default(),
    };
    let plain = made_up(call, code, String::new());
    ApiStatus {
        code: code.as_u16(),
        reason: status.reason.filter(|reason| !reason.is_empty()).unwrap_or(plain.reason),
        message: status.message.filter(|message| !message.is_empty()).unwrap_or(plain.message),
        causes: details.causes.unwrap_or_default().into_iter().map(cause).collect(),
        retry_after: details.retry_after_seconds.filter(|seconds| *seconds > 0).map(Duration::from_secs),
    }
}

/// Synthesizes a status from the HTTP code alone, with client-go's texts.
fn made_up(call: &Call, code: StatusCode, text: String) -> ApiStatus {
    let detail = if text.is_empty() { "unknown" } else { text.as_str() };
    let (reason, message) = match code.as_u16() {
        400 => ("BadRequest", "the server rejected our request for an unknown reason".to_owned()),
        401 => ("Unauthorized", "the server has asked for the client to provide credentials".to_owned()),
        403 => ("Forbidden", detail.to_owned()),
        404 => ("NotFound", "the server could not find the requested resource".to_owned()),
        405 => ("MethodNotAllowed", "the server does not allow this method on the requested resource".to_owned()),
        406 => ("NotAcceptable", detail.to_owned()),
        409 if call.verb == Verb::Create => ("AlreadyExists", "the server reported a conflict".to_owned()),
        409 => ("Conflict", "the server reported a conflict".to_owned()),
        410 => ("Gone", "the server reported that the requested version is gone".to_owned()),
        413 => ("RequestEntityTooLarge", detail.to_owned()),
        415 => ("UnsupportedMediaType", detail.to_owned()),
        422 => ("Invalid", "the server rejected our request due to an error in our request".to_owned()),
        429 => (
            "TooManyRequests",
            "the server has received too many requests and has asked us to try again later".to_owned(),
        ),
        503 => ("ServiceUnavailable", "the server is currently unable to handle the request".to_owned()),
        504 => (
            "Timeout",
            "the server was unable to return a response in the time allotted, but may still be processing the request"
                .to_owned(),
        ),
        500.. => {
            let text = format!("an error on the server ({detail:?}) has prevented the request from succeeding");
            ("InternalError", text)
        }
        other => (
            "Unknown",
            format!("the server responded with the status code {other} but did not return more information"),
        ),
    };
    let cause = ApiStatusCause {
        reason: "UnexpectedServerResponse".to_owned(),
        message: detail.to_owned(),
        field: String::new(),
    };
    ApiStatus {
        code: code.as_u16(),
        reason: reason.to_owned(),
        message: format!("{message} ({})", asked(call)),
        causes: vec![cause],
        retry_after: None,
    }
}

/// Request in client-go's format: `patch pods p`.
fn asked(call: &Call) -> String {
    let Call { verb, resource, name, .. } = call;
    let method = super::request::method(*verb).as_str().to_lowercase();
    let resource = match resource.group {
        "" => resource.plural.to_owned(),
        group => format!("{}.{group}", resource.plural),
    };
    if name.is_empty() { format!("{method} {resource}") } else { format!("{method} {resource} {name}") }
}

fn text(body: &[u8]) -> String {
    let kept = body.get(..TEXT_LIMIT).unwrap_or(body);
    String::from_utf8_lossy(kept).trim().to_owned()
}

/// Parses `Retry-After`: seconds, or a date (which client-go ignores).
fn header(headers: &HeaderMap, now: Timestamp) -> Option<Duration> {
    let value = headers.get(RETRY_AFTER)?.to_str().ok()?.trim();
    if let Ok(seconds) = value.parse::<u64>() {
        return Some(Duration::from_secs(seconds));
    }
    let at = Timestamp::try_from(httpdate::parse_http_date(value).ok()?).ok()?;
    Some(Duration::try_from(at.duration_since(now)).unwrap_or_default())
}

/// Checks that a response of that content type can be parsed.
///
/// # Errors
/// A text that names the content type.
pub fn check_content_type(content_type: Option<&str>) -> Result<(), String> {
    let kind = content_type.map(|kind| kind.split(';').next().unwrap_or_default().trim().to_ascii_lowercase());
    match kind.as_deref() {
        None | Some("" | "application/json") => Ok(()),
        Some(other) => Err(format!("unsupported content type: {other}")),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::api::Resource;

    fn refusal_of(verb: Verb, code: u16, after: Option<&str>, body: &str) -> ApiStatus {
        let mut headers = HeaderMap::new();
        headers.extend(after.map(|value| (RETRY_AFTER, value.parse().expect("a value"))));
        let code = StatusCode::from_u16(code).expect("a code");
        let now = "2026-01-01T00:00:00Z".parse().expect("a time");
        refusal(&Call::new(verb, Resource::PODS, "ns", "p"), code, &headers, body.as_bytes(), now)
    }

    #[test]
    fn the_code_speaks_where_nothing_else_does() {
        for (verb, code, body, reason, message) in [
            (
                Verb::Get,
                401,
                "",
                "Unauthorized",
                "the server has asked for the client to provide credentials (get pods p)",
            ),
            (Verb::Get, 403, "no entry\n", "Forbidden", "no entry (get pods p)"),
            (
                Verb::Get,
                404,
                "404 page not found",
                "NotFound",
                "the server could not find the requested resource (get pods p)",
            ),
            (Verb::Create, 409, "", "AlreadyExists", "the server reported a conflict (post pods p)"),
            (Verb::Update, 409, "", "Conflict", "the server reported a conflict (put pods p)"),
            (
                Verb::Patch,
                422,
                "",
                "Invalid",
                "the server rejected our request due to an error in our request (patch pods p)",
            ),
            (
                Verb::Get,
                503,
                "",
                "ServiceUnavailable",
                "the server is currently unable to handle the request (get pods p)",
            ),
            (
                Verb::Get,
                502,
                "bad\n",
                "InternalError",
                "an error on the server (\"bad\") has prevented the request from succeeding (get pods p)",
            ),
            (
                Verb::Get,
                418,
                "",
                "Unknown",
                "the server responded with the status code 418 but did not return more information (get pods p)",
            ),
        ] {
            let status = refusal_of(verb, code, None, body);
            assert_eq!((status.code, status.reason.as_str(), status.message.as_str()), (code, reason, message));
            assert_eq!(status.causes[0].reason, "UnexpectedServerResponse");
        }
        let long = refusal_of(Verb::Get, 403, None, &"x".repeat(5000));
        assert_eq!(long.causes[0].message.len(), TEXT_LIMIT);
        let throttled = refusal_of(Verb::Patch, 429, Some("3"), "Too many requests, please try again later.\n");
        assert_eq!(
            (throttled.reason.as_str(), throttled.retry_after),
            ("TooManyRequests", Some(Duration::from_secs(3)))
        );
    }

    #[test]
    fn a_status_speaks_for_itself() {
        let body = r#"{"kind":"Status","status":"Failure","message":"m","reason":"Expired","code":410,
            "details":{"retryAfterSeconds":4,"causes":[{"reason":"ResourceVersionTooLarge","message":"c","field":"f"}]}}"#;
        let status = refusal_of(Verb::Get, 410, None, body);
        assert_eq!((status.reason.as_str(), status.message.as_str()), ("Expired", "m"));
        assert_eq!(status.retry_after, Some(Duration::from_secs(4)));
        let cause = ApiStatusCause { reason: "ResourceVersionTooLarge".into(), message: "c".into(), field: "f".into() };
        assert_eq!(status.causes, [cause]);
        for useless in [
            r#"{"kind":"Status","status":"Success","reason":"Odd"}"#,
            r#"{"status":"Failure","reason":"Odd"}"#,
            r#"{"kind":"Pod"}"#,
            r#"{"kind":7}"#,
        ] {
            assert_eq!(refusal_of(Verb::Get, 404, None, useless).reason, "NotFound", "{useless}");
        }
        let silent =
            refusal_of(Verb::Get, 403, None, r#"{"kind":"Status","status":"Failure","message":null,"details":null}"#);
        assert_eq!((silent.reason.as_str(), silent.causes.len()), ("Forbidden", 0));
    }

    #[test]
    fn when_to_come_back_may_be_a_date() {
        let after = |value| refusal_of(Verb::Get, 503, Some(value), "").retry_after.map(|asked| asked.as_secs());
        for (value, expected) in [
            ("7", Some(7)),
            ("0", Some(0)),
            ("99999999999", Some(3600)),
            ("-1", None),
            ("soon", None),
            ("Thu, 01 Jan 2026 00:00:05 GMT", Some(5)),
            ("Wed, 31 Dec 2025 00:00:05 GMT", Some(0)),
        ] {
            assert_eq!(after(value), expected, "{value}");
        }
    }

    #[test]
    fn only_json_is_understood() {
        for fine in [None, Some("application/json"), Some("application/JSON; charset=utf-8"), Some("")] {
            assert!(check_content_type(fine).is_ok());
        }
        // AC-10-44
        let error = check_content_type(Some("application/vnd.kubernetes.protobuf;stream=watch")).expect_err("not JSON");
        assert_eq!(error, "unsupported content type: application/vnd.kubernetes.protobuf");
    }
}
