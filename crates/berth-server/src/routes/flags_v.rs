//! Handler of `/debug/flags/v`: changes the log verbosity (spec 04 §5.7).

use axum::{
    body::Body,
    http::{Method, Request, StatusCode, header},
    response::{IntoResponse, Response},
};
use http_body_util::{BodyExt, Limited};

use crate::ports::Verbosity;

/// Maximum length of the body, in bytes; a level has at most ten digits.
const MOST: usize = 1 << 10;

/// Handles a `PUT` with the new level as body.
pub async fn set(verbosity: &dyn Verbosity, request: Request<Body>) -> Response {
    if request.method() != Method::PUT {
        return plain(StatusCode::NOT_ACCEPTABLE, "unsupported http method");
    }
    let body = match Limited::new(request.into_body(), MOST).collect().await {
        Ok(body) => body.to_bytes(),
        Err(error) => return plain(StatusCode::BAD_REQUEST, &format!("error reading request body: {error}")),
    };
    let text = String::from_utf8_lossy(&body);
    match level(&text) {
        Ok(level) => {
            verbosity.set(level);
            plain(StatusCode::OK, &format!("successfully set klog.logging.verbosity to {text}"))
        }
        Err(why) => plain(StatusCode::BAD_REQUEST, &format!("strconv.ParseUint: parsing {text:?}: {why}")),
    }
}

/// Parses a level as Go's `strconv.ParseUint` does: only digits.
fn level(text: &str) -> Result<u32, &'static str> {
    if text.is_empty() || !text.bytes().all(|byte| byte.is_ascii_digit()) {
        return Err("invalid syntax");
    }
    text.parse().map_err(|_| "value out of range")
}

fn plain(status: StatusCode, line: &str) -> Response {
    (status, [(header::CONTENT_TYPE, "text/plain")], format!("{line}\n")).into_response()
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::{AtomicU32, Ordering};

    use super::*;

    #[derive(Default)]
    struct Level(AtomicU32);

    impl Verbosity for Level {
        fn set(&self, level: u32) {
            self.0.store(level, Ordering::Relaxed);
        }
    }

    #[tokio::test]
    async fn the_level_is_put() {
        // AC-04-16
        let level = Level::default();
        for (method, body, status, text) in [
            ("PUT", "7", 200, "successfully set klog.logging.verbosity to 7\n"),
            ("GET", "", 406, "unsupported http method\n"),
            ("POST", "9", 406, "unsupported http method\n"),
            ("PUT", "x", 400, "strconv.ParseUint: parsing \"x\": invalid syntax\n"),
            ("PUT", "", 400, "strconv.ParseUint: parsing \"\": invalid syntax\n"),
            ("PUT", "-1", 400, "strconv.ParseUint: parsing \"-1\": invalid syntax\n"),
            ("PUT", "4294967296", 400, "strconv.ParseUint: parsing \"4294967296\": value out of range\n"),
        ] {
            let request = Request::builder().method(method).body(Body::from(body)).expect("a request");
            let response = set(&level, request).await;
            assert_eq!(
                (response.status().as_u16(), &response.headers()["content-type"]),
                (status, "text/plain".parse().as_ref().expect("a value"))
            );
            let answered = response.into_body().collect().await.expect("a body").to_bytes();
            assert_eq!(answered, text.as_bytes(), "{method} {body}");
        }
        assert_eq!(level.0.load(Ordering::Relaxed), 7);
        let large = Request::put("/debug/flags/v").body(Body::from("1".repeat(MOST + 1))).expect("a request");
        assert_eq!(set(&level, large).await.status(), 400);
    }
}
