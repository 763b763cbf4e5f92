//! Serves a file over HTTP: content type, byte ranges, and conditional requests.
//!
//! Implements spec 04 §5.6. A request for several ranges gets the whole file, as HTTP permits.

use std::{io::SeekFrom, time::SystemTime};

use axum::{
    body::Body,
    http::{HeaderMap, HeaderValue, Response, StatusCode, header},
    response::IntoResponse,
};
use tokio::io::{AsyncReadExt, AsyncSeekExt};
use tokio_util::io::ReaderStream;

use super::text::plain_error;
use crate::ports::NodeFile;

/// Read buffer size, in bytes.
const CHUNK: usize = 64 << 10;

/// Responds with the file or the requested range.
pub async fn file(name: &str, file: NodeFile, asked: &HeaderMap) -> Response<Body> {
    if let Some(answer) = precondition(asked, file.modified) {
        return answer;
    }
    let range = match range(asked, file.bytes, file.modified) {
        Ok(range) => range,
        Err(why) => {
            let mut response = plain_error(StatusCode::RANGE_NOT_SATISFIABLE, why);
            if why == NO_OVERLAP {
                set(&mut response, header::CONTENT_RANGE, &format!("bytes */{}", file.bytes));
            }
            return response;
        }
    };
    let (status, start, length) = match range {
        Some((start, length)) => (StatusCode::PARTIAL_CONTENT, start, length),
        None => (StatusCode::OK, 0, file.bytes),
    };
    let mut content = tokio::fs::File::from_std(file.file);
    if start > 0 && content.seek(SeekFrom::Start(start)).await.is_err() {
        return plain_error(StatusCode::INTERNAL_SERVER_ERROR, "seeker can't seek");
    }
    // Limited to the announced length, because the file may grow meanwhile.
    let body = Body::from_stream(ReaderStream::with_capacity(content.take(length), CHUNK));
    let mut response = (status, body).into_response();
    set(&mut response, header::CONTENT_TYPE, &content_type(name, &file.head));
    set(&mut response, header::CONTENT_LENGTH, &length.to_string());
    set(&mut response, header::ACCEPT_RANGES, "bytes");
    set_modified(&mut response, file.modified);
    if status == StatusCode::PARTIAL_CONTENT {
        let end = (start + length).saturating_sub(1);
        set(&mut response, header::CONTENT_RANGE, &format!("bytes {start}-{end}/{}", file.bytes));
    }
    response
}

/// 304 or 412, where a condition of the request requires it.
pub fn precondition(asked: &HeaderMap, modified: Option<SystemTime>) -> Option<Response<Body>> {
    let since = |name| asked.get(name).and_then(|value| httpdate::parse_http_date(value.to_str().ok()?).ok());
    let modified = modified.map(whole_seconds)?;
    if since(header::IF_UNMODIFIED_SINCE).is_some_and(|limit| modified > limit) {
        return Some(StatusCode::PRECONDITION_FAILED.into_response());
    }
    // There are no entity tags, so only `*` matches.
    let none_match = asked.get(header::IF_NONE_MATCH).and_then(|value| value.to_str().ok());
    let is_unchanged = match none_match {
        Some(tags) => tags.trim() == "*",
        None => since(header::IF_MODIFIED_SINCE).is_some_and(|known| modified <= known),
    };
    is_unchanged.then(|| {
        let mut response = StatusCode::NOT_MODIFIED.into_response();
        set_modified(&mut response, Some(modified));
        response
    })
}

/// Sets the header `Last-Modified`.
pub fn set_modified(response: &mut Response<Body>, modified: Option<SystemTime>) {
    if let Some(modified) = modified {
        set(response, header::LAST_MODIFIED, &httpdate::fmt_http_date(modified));
    }
}

fn set(response: &mut Response<Body>, name: header::HeaderName, value: &str) {
    if let Ok(value) = HeaderValue::try_from(value) {
        response.headers_mut().insert(name, value);
    }
}

/// Truncates a time to the precision of HTTP headers.
fn whole_seconds(time: SystemTime) -> SystemTime {
    let since = time.duration_since(SystemTime::UNIX_EPOCH).unwrap_or_default();
    SystemTime::UNIX_EPOCH + std::time::Duration::from_secs(since.as_secs())
}

const INVALID: &str = "invalid range";
const NO_OVERLAP: &str = "invalid range: failed to overlap";

/// Start and length of the requested range, if there is exactly one.
fn range(asked: &HeaderMap, bytes: u64, modified: Option<SystemTime>) -> Result<Option<(u64, u64)>, &'static str> {
    let Some(text) = asked.get(header::RANGE) else { return Ok(None) };
    if let Some(condition) = asked.get(header::IF_RANGE) {
        let date = condition.to_str().ok().and_then(|text| httpdate::parse_http_date(text).ok());
        if date.is_none() || date != modified.map(whole_seconds) {
            return Ok(None);
        }
    }
    parse_range(text.to_str().map_err(|_| INVALID)?, bytes)
}

fn parse_range(text: &str, bytes: u64) -> Result<Option<(u64, u64)>, &'static str> {
    let list = text.strip_prefix("bytes=").ok_or(INVALID)?;
    let mut found = Vec::new();
    let mut is_beyond = false;
    for part in list.split(',').map(str::trim).filter(|part| !part.is_empty()) {
        let (first, last) = part.split_once('-').ok_or(INVALID)?;
        let number = |text: &str| -> Result<u64, &'static str> {
            let is_number = !text.is_empty() && text.bytes().all(|b| b.is_ascii_digit());
            if is_number { Ok(text.parse().unwrap_or(u64::MAX)) } else { Err(INVALID) }
        };
        let (first, last) = (first.trim(), last.trim());
        if first.is_empty() {
            let length = number(last)?.min(bytes);
            found.push((bytes - length, length));
            continue;
        }
        let start = number(first)?;
        let end = if last.is_empty() { u64::MAX } else { number(last)? };
        if start > end {
            return Err(INVALID);
        }
        if start >= bytes {
            is_beyond = true;
        } else {
            found.push((start, end.min(bytes - 1) - start + 1));
        }
    }
    match found.as_slice() {
        [] if is_beyond && bytes > 0 => Err(NO_OVERLAP),
        [one] => Ok(Some(*one)),
        _ => Ok(None),
    }
}

/// Content type by file extension, otherwise by the first bytes. Only the extension selects HTML, never the content.
fn content_type(name: &str, head: &[u8]) -> String {
    let known = name.rsplit_once('.').and_then(|(_, ending)| mime_guess::from_ext(ending).first_raw());
    if let Some(known) = known {
        return if known.starts_with("text/") { format!("{known}; charset=utf-8") } else { known.to_owned() };
    }
    let is_binary = |b: &u8| matches!(b, 0..=8 | 0x0b | 0x0e..=0x1a | 0x1c..=0x1f);
    let kind = if head.starts_with(b"\x1f\x8b\x08") {
        "application/x-gzip"
    } else if head.iter().any(is_binary) {
        "application/octet-stream"
    } else {
        "text/plain; charset=utf-8"
    };
    kind.to_owned()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ranges_are_parsed_as_http_defines() {
        for (text, bytes, expected) in [
            ("bytes=0-3", 10, Ok(Some((0, 4)))),
            ("bytes=5-", 10, Ok(Some((5, 5)))),
            ("bytes=-4", 10, Ok(Some((6, 4)))),
            ("bytes=-40", 10, Ok(Some((0, 10)))),
            ("bytes=8-99", 10, Ok(Some((8, 2)))),
            ("bytes=0-1,3-4", 10, Ok(None)),
            ("bytes=", 10, Ok(None)),
            ("bytes=10-", 10, Err(NO_OVERLAP)),
            ("bytes=0-", 0, Ok(None)),
            ("bytes=4-2", 10, Err(INVALID)),
            ("bytes=x-2", 10, Err(INVALID)),
            ("bytes=-", 10, Err(INVALID)),
            ("bytes=--1", 10, Err(INVALID)),
            ("lines=0-3", 10, Err(INVALID)),
            ("bytes=99999999999999999999999-", 10, Err(NO_OVERLAP)),
        ] {
            assert_eq!(parse_range(text, bytes), expected, "{text} of {bytes}");
        }
    }

    #[test]
    fn the_content_type_is_detected_by_name_then_by_content() {
        for (name, head, kind) in [
            ("a.log", &b"x"[..], "text/plain; charset=utf-8"),
            ("a.html", b"x", "text/html; charset=utf-8"),
            ("a.json", b"x", "application/json"),
            ("syslog", b"<html>", "text/plain; charset=utf-8"),
            ("syslog.1", b"", "text/plain; charset=utf-8"),
            ("wtmp", b"a\0", "application/octet-stream"),
            ("old", b"\x1f\x8b\x08\x00", "application/x-gzip"),
        ] {
            assert_eq!(content_type(name, head), kind, "{name}");
        }
    }

    #[test]
    fn what_has_not_changed_is_not_sent() {
        let modified = Some(SystemTime::UNIX_EPOCH + std::time::Duration::from_millis(1_000_000_500));
        let status = |name: &'static str, value: &str| {
            let asked =
                HeaderMap::from_iter([(header::HeaderName::from_static(name), value.parse().expect("a value"))]);
            precondition(&asked, modified).map(|response| response.status().as_u16())
        };
        let (same, before) = ("Mon, 12 Jan 1970 13:46:40 GMT", "Mon, 12 Jan 1970 13:46:39 GMT");
        assert_eq!(status("if-modified-since", same), Some(304));
        assert_eq!(status("if-modified-since", before), None);
        assert_eq!(status("if-modified-since", "yesterday"), None);
        assert_eq!(status("if-unmodified-since", before), Some(412));
        assert_eq!(status("if-unmodified-since", same), None);
        assert_eq!(status("if-none-match", "*"), Some(304));
        assert_eq!(status("if-none-match", "\"a\""), None);
    }
}
