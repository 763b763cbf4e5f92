//! Handlers of `/healthz` and its individual checks (spec 04 §5.1, spec 01 §7.1).

use axum::{
    http::{StatusCode, header},
    response::{IntoResponse, Response},
};

use super::text::{PLAIN, plain_error};
use crate::ports::Health;

/// Health without checks besides `ping`.
pub struct PingOnly;

impl Health for PingOnly {
    fn names(&self) -> &[&'static str] {
        &[]
    }

    fn check(&self, _name: &str) -> Option<String> {
        None
    }
}

/// Handles `/healthz`.
pub fn all(health: &dyn Health, query: Option<&str>) -> Response {
    let (verbose, excluded) = options(query.unwrap_or_default());
    let mut lines = String::new();
    let mut healthy = true;
    let names = || std::iter::once("ping").chain(health.names().iter().copied());
    for name in names() {
        if excluded.iter().any(|e| e == name) {
            lines.push_str(&format!("[+]{name} excluded: ok\n"));
            continue;
        }
        let passed = name == "ping" || health.check(name).is_none();
        health.checked(name, passed);
        healthy &= passed;
        let line = if passed { format!("[+]{name} ok\n") } else { format!("[-]{name} failed: reason withheld\n") };
        lines.push_str(&line);
    }
    let mut unknown: Vec<&String> = excluded.iter().filter(|e| !names().any(|name| name == **e)).collect();
    unknown.sort();
    if !unknown.is_empty() {
        let quoted: Vec<String> = unknown.iter().map(|name| format!("{name:?}")).collect();
        let list = quoted.join(",");
        lines.push_str(&format!("warn: some health checks cannot be excluded: no matches for {list}\n"));
    }
    if !healthy {
        return plain_error(StatusCode::INTERNAL_SERVER_ERROR, &format!("{lines}healthz check failed"));
    }
    let body = if verbose { format!("{lines}healthz check passed\n") } else { "ok".to_owned() };
    let headers = [(header::CONTENT_TYPE, PLAIN), (header::X_CONTENT_TYPE_OPTIONS, "nosniff")];
    (headers, body).into_response()
}

/// Handles `/healthz/{name}`.
pub fn one(health: &dyn Health, name: &str) -> Response {
    if name != "ping" && !health.names().contains(&name) {
        return plain_error(StatusCode::NOT_FOUND, "404 page not found");
    }
    match health.check(name) {
        None => ([(header::CONTENT_TYPE, PLAIN)], "ok").into_response(),
        Some(why) => plain_error(StatusCode::INTERNAL_SERVER_ERROR, &format!("internal server error: {why}")),
    }
}

/// Whether a request to the healthz port asks for all checks.
pub fn is_full(query: Option<&str>) -> bool {
    let mut pairs = form_urlencoded::parse(query.unwrap_or_default().as_bytes());
    pairs.any(|(key, value)| key == "full" && value != "0" && !value.eq_ignore_ascii_case("false"))
}

/// Parses `verbose` and the excluded checks.
fn options(query: &str) -> (bool, Vec<String>) {
    let mut verbose = false;
    let mut excluded = Vec::new();
    for (key, value) in form_urlencoded::parse(query.as_bytes()) {
        match &*key {
            "verbose" => verbose = true,
            "exclude" => excluded.push(value.into_owned()),
            _ => {}
        }
    }
    (verbose, excluded)
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use axum::{body::Body, http::Request};
    use http_body_util::BodyExt;
    use tower::ServiceExt;

    use super::*;
    use crate::healthz_router;

    #[derive(Default)]
    struct Stuck(std::sync::Mutex<Vec<(String, bool)>>);

    impl Health for Stuck {
        fn names(&self) -> &[&'static str] {
            &["log", "syncloop"]
        }

        fn check(&self, name: &str) -> Option<String> {
            (name == "syncloop").then(|| "sync Loop took longer than expected".to_owned())
        }

        fn checked(&self, name: &str, passed: bool) {
            self.0.lock().expect("whole").push((name.to_owned(), passed));
        }
    }

    async fn status_and_body(response: Response) -> (u16, String) {
        let status = response.status().as_u16();
        let body = response.into_body().collect().await.expect("a body").to_bytes();
        (status, String::from_utf8(body.to_vec()).expect("text"))
    }

    async fn get(path: &str) -> (u16, String) {
        let request = Request::get(path).body(Body::empty()).expect("a request");
        status_and_body(healthz_router(Arc::new(Stuck::default())).oneshot(request).await.expect("infallible")).await
    }

    #[tokio::test]
    async fn the_healthz_port_knows_ping_only() {
        // AC-01-25
        for (path, status, body) in [
            ("/healthz", 200, "ok"),
            ("/healthz?verbose", 200, "[+]ping ok\nhealthz check passed\n"),
            ("/healthz?verbose&exclude=ping", 200, "[+]ping excluded: ok\nhealthz check passed\n"),
            (
                "/healthz?verbose&exclude=x",
                200,
                "[+]ping ok\nwarn: some health checks cannot be excluded: no matches for \"x\"\nhealthz check passed\n",
            ),
            ("/healthz?full=0", 200, "ok"),
            (
                "/healthz?full=1",
                500,
                "[+]ping ok\n[+]log ok\n[-]syncloop failed: reason withheld\nhealthz check failed\n",
            ),
            ("/healthz?full=1&exclude=syncloop", 200, "ok"),
            ("/healthz/ping", 200, "ok"),
            ("/healthz/log", 404, "404 page not found\n"),
            ("/other", 404, "404 page not found\n"),
        ] {
            assert_eq!(get(path).await, (status, body.to_owned()), "{path}");
        }
    }

    #[tokio::test]
    async fn a_stuck_loop_fails_the_check_and_its_own_path_returns_the_reason() {
        let failed = "[+]ping ok\n[+]log ok\n[-]syncloop failed: reason withheld\nhealthz check failed\n";
        assert_eq!(status_and_body(all(&Stuck::default(), None)).await, (500, failed.to_owned()));
        let reason = "internal server error: sync Loop took longer than expected\n";
        assert_eq!(status_and_body(one(&Stuck::default(), "syncloop")).await, (500, reason.to_owned()));
        assert_eq!(status_and_body(all(&Stuck::default(), Some("exclude=syncloop"))).await, (200, "ok".to_owned()));
        // AC-04-17
        let lines = "[+]ping ok\n[+]log ok\n[+]syncloop excluded: ok\nhealthz check passed\n";
        assert_eq!(
            status_and_body(all(&Stuck::default(), Some("exclude=syncloop&verbose"))).await,
            (200, lines.to_owned())
        );
    }

    #[test]
    fn only_checks_of_the_combined_endpoint_are_recorded() {
        // AC-08-11: excluded checks and single ones do not count.
        let stuck = Stuck::default();
        all(&stuck, Some("exclude=log"));
        one(&stuck, "log");
        let recorded = stuck.0.into_inner().expect("whole");
        assert_eq!(recorded, [("ping".to_owned(), true), ("syncloop".to_owned(), false)]);
    }
}
