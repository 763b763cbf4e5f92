//! Order of checks in the request pipeline (spec 04 §3), and request metrics.

use crate::server::fixture::{ALL, PATIENCE, RunningListener, SLOW};
use berth_server::routing::EnabledEndpoints;

#[tokio::test]
async fn unauthenticated_requests_get_redirects_not_found_or_unauthorized() {
    // AC-04-1, AC-04-2, AC-04-3, AC-08-13
    let served = RunningListener::guarded(&[("*", "*")]).await;
    for (method, target, status, body) in [
        ("GET", "/pods", 401, "Unauthorized"),
        ("GET", "/nope", 404, "404 page not found\n"),
        ("GET", "/runningpods?x=1", 307, "<a href=\"/runningpods/?x=1\">Temporary Redirect</a>.\n\n"),
        ("POST", "/runningpods", 307, ""),
        ("GET", "/a//b", 307, "<a href=\"/a/b\">Temporary Redirect</a>.\n\n"),
        ("GET", "/pods/none", 401, "Unauthorized"),
        ("DELETE", "/exec/x", 401, "Unauthorized"),
        ("GET", "/%zz", 400, "400 Bad Request\n"),
    ] {
        let (got, _, text) = served.ask_as_stranger(method, target).await;
        assert_eq!((got, text.as_str()), (status, body), "{method} {target}");
    }
    let labels = [("path", "pods"), ("server_type", "readwrite"), ("method", "GET")];
    assert_eq!(served.metric("kubelet_http_requests_total", &labels), 2.0);
    let (_, head, _) = served.ask_as_stranger("GET", "/runningpods?x=1").await;
    assert!(head.contains("location: /runningpods/?x=1"), "{head}");
}

#[tokio::test]
async fn authorized_requests_reach_the_router() {
    // AC-04-9, AC-04-10, AC-04-25
    let served = RunningListener::guarded(&[("*", "*")]).await;
    for (method, target, headers, status, body) in [
        ("GET", "/pods/", "", 200, "pods\n"),
        ("GET", "/pods/none", "", 404, "404: Page Not Found"),
        ("HEAD", "/pods", "", 405, ""),
        ("PATCH", "/pods", "", 405, "405: Method Not Allowed"),
        ("GET", "/run/a/b/c", "", 405, "405: Method Not Allowed"),
        (
            "GET",
            "/pods",
            "Accept: text/plain\r\n",
            406,
            "406: Not Acceptable\n\nAvailable representations: application/json",
        ),
        ("GET", "/runningpods/", "", 500, "the runtime says no"),
        ("PATCH", "/healthz", "", 200, "ok"),
        ("GET", "/configz", "", 200, "{}"),
        ("GET", "/metrics", "Accept-Encoding: gzip\r\n", 200, "zipped"),
        ("GET", "/metrics", "Accept-Encoding: gzip;q=0\r\n", 200, "metrics"),
    ] {
        let (got, _, text) = served.ask(method, target, headers).await;
        assert_eq!((got, text.as_str()), (status, body), "{method} {target}");
    }
    let (_, head, _) = served.ask("GET", "/run/a/b/c", "").await;
    assert!(head.contains("allow: post"), "{head}");
    assert_eq!(served.metric("kubelet_http_requests_total", &[("method", "other"), ("path", "pods")]), 1.0);
    assert_eq!(served.metric("kubelet_http_inflight_requests", &[]), 0.0);
    let off = RunningListener::start(EnabledEndpoints { debugging: false, ..ALL }, Some(vec![("*", "*")]), false).await;
    let (status, _, text) = off.ask("DELETE", "/exec/xxx", "").await;
    assert_eq!((status, text.as_str()), (405, "Debug endpoints are disabled.\n"));
    assert_eq!(off.ask_as_stranger("DELETE", "/exec/xxx").await.0, 401, "after the door");
}

#[tokio::test]
async fn the_subresources_are_asked_for_in_their_order() {
    // AC-04-4, AC-04-5, AC-04-8
    for (allowed, target, status, asked) in [
        (&[("get", "pods")][..], "/pods", 200, &["get pods"][..]),
        (&[("get", "proxy")], "/configz", 200, &["get configz", "get proxy"]),
        (&[("get", "configz")], "/flagz", 200, &["get configz"]),
        (&[], "/healthz", 403, &["get healthz", "get proxy"]),
        (&[("get", "metrics")], "/metrics", 200, &["get metrics"]),
    ] {
        let served = RunningListener::guarded(allowed).await;
        assert_eq!(served.ask("GET", target, "").await.0, status, "{target}");
        assert_eq!(*served.auth_filter.asked.lock().expect("whole"), asked, "{target}");
    }
}

#[tokio::test]
async fn a_get_opens_no_stream_for_who_may_only_read() {
    // AC-04-24
    let upgrade = "Connection: Upgrade\r\nUpgrade: websocket\r\n";
    let reader = RunningListener::guarded(&[("get", "proxy")]).await;
    for target in ["/exec/a/b/c?command=id", "/attach/a/b/c", "/portForward/a/b"] {
        assert_eq!(reader.ask("GET", target, upgrade).await.0, 403, "{target}");
    }
    let writer = RunningListener::guarded(&[("get", "proxy"), ("create", "proxy")]).await;
    assert_ne!(writer.ask("GET", "/exec/a/b/c?command=id", upgrade).await.0, 403);
}

#[tokio::test]
async fn the_open_port_has_the_open_set() {
    // AC-04-11, AC-04-12
    let served = RunningListener::start(EnabledEndpoints::READ_ONLY, None, false).await;
    for (method, target, status, body) in [
        ("GET", "/pods", 200, "pods\n"),
        ("POST", "/checkpoint/a/b/c", 404, "404 page not found\n"),
        ("GET", "/logs/x", 405, "Debug endpoints are disabled.\n"),
        ("GET", "/configz", 404, "404 page not found\n"),
        ("GET", "/exec", 307, "<a href=\"/exec/\">Temporary Redirect</a>.\n\n"),
    ] {
        let (got, _, text) = served.ask_as_stranger(method, target).await;
        assert_eq!((got, text.as_str()), (status, body), "{method} {target}");
    }
    assert_eq!(served.metric("kubelet_http_requests_total", &[("server_type", "readonly")]), 5.0);
}

/// AC-08-14
#[tokio::test]
async fn the_duration_of_a_request_includes_its_handler() {
    let served = RunningListener::guarded(&[("*", "*")]).await;
    served.ask("GET", "/runningpods/", "").await;
    let seconds = served.metric("kubelet_http_requests_duration_seconds", &[("path", "runningpods")]);
    assert!((SLOW.as_secs_f64()..PATIENCE.as_secs_f64()).contains(&seconds), "{seconds}");
}

#[tokio::test]
async fn nothing_a_client_writes_becomes_a_label() {
    // CVE-2020-8551
    let served = RunningListener::guarded(&[("*", "*")]).await;
    for n in 0..100 {
        served.ask_as_stranger(&format!("M{n}"), &format!("/p{n}/x?y={n}")).await;
        served.ask_as_stranger("GET", &format!("/metrics/{n}")).await;
        served.ask("GET", &format!("/containerLogs/n{n}/q/c"), "").await;
        served.ask("GET", &format!("/logs/{n}"), "").await;
    }
    for family in ["kubelet_http_requests_total", "kubelet_http_inflight_requests"] {
        let families = served.registry.gather();
        let series: usize = families.iter().filter(|f| f.name() == family).map(|f| f.get_metric().len()).sum();
        assert!((1..=4).contains(&series), "{family}: {series}");
    }
}

/// All root paths.
const ROOTS: [&str; 26] = [
    "/healthz",
    "/healthz/ping",
    "/healthz/log",
    "/healthz/syncloop",
    "/pods",
    "/stats/summary",
    "/metrics",
    "/metrics/cadvisor",
    "/metrics/resource",
    "/metrics/probes",
    "/metrics/slis",
    "/run/a/b/c",
    "/exec/a/b/c",
    "/attach/a/b/c",
    "/portForward/a/b",
    "/containerLogs/a/b/c",
    "/runningpods/",
    "/configz",
    "/checkpoint/a/b/c",
    "/logs/",
    "/logs/syslog",
    "/debug/pprof/",
    "/debug/pprof/profile",
    "/debug/flags/v",
    "/flagz",
    "/statusz",
];

#[tokio::test]
async fn each_listener_has_its_own_paths() {
    // CVE-2019-11248: a shared router must not expose a path of one port on another.
    let open = [
        "/healthz",
        "/healthz/ping",
        "/healthz/syncloop",
        "/pods",
        "/stats/summary",
        "/metrics",
        "/metrics/cadvisor",
        "/metrics/resource",
        "/metrics/probes",
        "/metrics/slis",
    ];
    let gone = ["/healthz/log", "/configz", "/checkpoint/a/b/c", "/debug/flags/v", "/flagz", "/statusz"];
    let read_only = RunningListener::start(EnabledEndpoints::READ_ONLY, None, false).await;
    let healthz = RunningListener::healthz().await;
    for path in ROOTS {
        let expected = if open.contains(&path) {
            200
        } else if gone.contains(&path) {
            404
        } else {
            405
        };
        assert_eq!(read_only.ask_as_stranger("GET", path).await.0, expected, "read-only {path}");
        let expected = if ["/healthz", "/healthz/ping"].contains(&path) { 200 } else { 404 };
        assert_eq!(healthz.ask_as_stranger("GET", path).await.0, expected, "healthz {path}");
    }
    assert_eq!(
        healthz.ask_as_stranger("GET", "/healthz?full=1&verbose").await.2,
        "[+]ping ok\n[+]syncloop ok\nhealthz check passed\n"
    );
}

#[tokio::test]
async fn a_handler_that_panics_affects_no_other_request() {
    let served = RunningListener::start(ALL, None, true).await;
    let (status, _, text) = served.ask("GET", "/pods", "").await;
    assert_eq!((status, text.as_str()), (500, "500 Internal Server Error\n"));
    assert_eq!(served.ask("GET", "/healthz", "").await.0, 200);
    assert_eq!(served.metric("kubelet_http_panics_total", &[]), 1.0);
}

#[tokio::test]
async fn odd_targets_do_not_bypass_authentication() {
    // Status without credentials, and with all permissions.
    let served = RunningListener::guarded(&[("*", "*")]).await;
    for (line, stranger, master) in [
        ("OPTIONS *", 404, 404),
        ("CONNECT x:80", 404, 404),
        ("CONNECT /pods", 401, 405),
        ("TRACE /pods", 401, 405),
        ("GET http://x", 404, 404),
        ("GET http://x/pods", 401, 200),
        ("GET http://x//pods", 307, 307),
        ("GET //x/pods", 307, 307),
        ("GET /pods;x", 404, 404),
        ("GET /pods#x", 401, 200),
        ("GET /pods%00", 404, 404),
        ("GET /%2fpods", 404, 404),
        ("GET /pods/%2e%2e/exec/n/p/c", 401, 404),
        ("GET /metrics/%2e%2e/exec/n/p/c", 404, 404),
        ("GET /healthz%2f..%2fpods", 404, 404),
    ] {
        let (method, target) = line.split_once(' ').expect("two words");
        let (as_stranger, head, _) = served.ask_as_stranger(method, target).await;
        let as_master = served.ask(method, target, "").await.0;
        assert_eq!((as_stranger, as_master), (stranger, master), "{line}");
        assert!(!head.contains("location: //") && !head.contains("location: http"), "{line}: {head}");
    }
}
