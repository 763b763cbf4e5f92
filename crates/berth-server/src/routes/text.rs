//! Small texts all routes share.

use axum::{
    http::{HeaderName, HeaderValue, StatusCode, header},
    response::{IntoResponse, Response},
};

/// `Content-Type` of plain text, as the reference spells it.
pub const PLAIN: &str = "text/plain; charset=utf-8";

/// The cause of an error for programs, beside the reference's text (spec 04 §11).
const CODE: HeaderName = HeaderName::from_static("x-node-agent-error");

/// Names the cause of an error for programs.
pub fn coded(mut response: Response, code: &'static str) -> Response {
    response.headers_mut().insert(CODE, HeaderValue::from_static(code));
    response
}

/// An error of a plain handler: one line, never sniffed.
pub fn plain_error(status: StatusCode, line: &str) -> Response {
    let headers = [(header::CONTENT_TYPE, PLAIN), (header::X_CONTENT_TYPE_OPTIONS, "nosniff")];
    (status, headers, format!("{line}\n")).into_response()
}

/// An error of the router, or of a handler behind it: a bare string, no newline.
pub fn router_error(status: StatusCode, body: &str) -> Response {
    (status, [(header::CONTENT_TYPE, PLAIN)], body.to_owned()).into_response()
}

/// A text inside a page, as Go's `http` writes it.
pub fn escaped(text: &str) -> String {
    text.replace('&', "&amp;").replace('<', "&lt;").replace('>', "&gt;").replace('"', "&#34;").replace('\'', "&#39;")
}

/// The clean form of a path with `//`, `/./` or `/../`; `None` where it is clean already.
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
