//! Plain text error responses, HTML escaping, and path cleaning, shared by all handlers.

use axum::{
    http::{HeaderName, HeaderValue, StatusCode, header},
    response::{IntoResponse, Response},
};

/// `Content-Type` of plain text, as kubelet spells it.
pub const PLAIN: &str = "text/plain; charset=utf-8";

/// Header with a machine-readable error code, in addition to kubelet's text (spec 04 §11).
const CODE: HeaderName = HeaderName::from_static("x-node-agent-error");

/// Adds the machine-readable error code.
pub fn coded(mut response: Response, code: &'static str) -> Response {
    response.headers_mut().insert(CODE, HeaderValue::from_static(code));
    response
}

/// Error of a plain handler: one line, with `nosniff`.
pub fn plain_error(status: StatusCode, line: &str) -> Response {
    let headers = [(header::CONTENT_TYPE, PLAIN), (header::X_CONTENT_TYPE_OPTIONS, "nosniff")];
    (status, headers, format!("{line}\n")).into_response()
}

/// Error of the service router or its handlers: the text without a newline.
pub fn router_error(status: StatusCode, body: &str) -> Response {
    (status, [(header::CONTENT_TYPE, PLAIN)], body.to_owned()).into_response()
}

/// Escapes a text for HTML, as Go's `http` package does.
pub fn escaped(text: &str) -> String {
    text.replace('&', "&amp;").replace('<', "&lt;").replace('>', "&gt;").replace('"', "&#34;").replace('\'', "&#39;")
}

/// Cleans a path of `//`, `/./`, and `/../`; `None` where it is clean already.
pub fn cleaned(path: &str) -> Option<String> {
    let mut kept: Vec<&str> = Vec::new();
    for part in path.split('/') {
        match part {
            "" | "." => {}
            ".." => {
                kept.pop();
            }
            part => kept.push(part),
        }
    }
    let mut clean = String::with_capacity(path.len());
    for part in &kept {
        clean.push('/');
        clean.push_str(part);
    }
    if clean.is_empty() || path.ends_with('/') {
        clean.push('/');
    }
    (clean != path).then_some(clean)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_unclean_paths_are_sent_elsewhere() {
        for (path, clean) in [
            ("/", None),
            ("/pods", None),
            ("/pods/", None),
            ("/a//b", Some("/a/b")),
            ("/a/./b/", Some("/a/b/")),
            ("/../../etc", Some("/etc")),
            ("/a/..", Some("/")),
            ("//", Some("/")),
        ] {
            assert_eq!(cleaned(path).as_deref(), clean, "{path}");
        }
    }
}
