//! Every path of spec 04 §4 over real sockets: methods, permissions, switches, and other ports.

use berth_server::{ListenerService, routing::EnabledEndpoints};
use std::net::{IpAddr, Ipv4Addr};
use tokio_util::sync::CancellationToken;

use crate::server::fixture::{ALL, RunningListener};

/// What a path serves without debugging handlers, and on the read-only port.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Remainder {
    /// Everything.
    Open,
    /// 405 Method Not Allowed.
    Stub,
    /// 404 Not Found, for any caller.
    Nothing,
}
use Remainder::{Nothing, Open, Stub};

/// Method, path, remainder, subresources in the order of their checks, and status.
type Row = (&'static str, &'static str, Remainder, &'static [&'static str], u16);

const TABLE: &[Row] = &[
    ("GET", "/healthz", Open, &["healthz", "proxy"], 200),
    ("PATCH", "/healthz", Open, &["healthz", "proxy"], 200),
    ("GET", "/healthz/ping", Open, &["healthz", "proxy"], 200),
    ("POST", "/healthz/syncloop", Open, &["healthz", "proxy"], 200),
    ("GET", "/pods", Open, &["pods", "proxy"], 200),
    ("GET", "/pods/", Open, &["pods", "proxy"], 200),
    ("POST", "/pods", Open, &["pods", "proxy"], 405),
    ("HEAD", "/pods", Open, &["pods", "proxy"], 405),
    ("OPTIONS", "/pods", Open, &["pods", "proxy"], 405),
    ("GET", "/pods/x", Open, &["pods", "proxy"], 404),
    ("GET", "/stats/summary", Open, &["stats"], 200),
    ("GET", "/stats/summary/", Open, &["stats"], 200),
    ("POST", "/stats/summary", Open, &["stats"], 200),
    ("PUT", "/stats/summary", Open, &["stats"], 405),
    ("GET", "/stats/", Open, &["stats"], 404),
    ("GET", "/stats/container", Open, &["stats"], 404),
    ("GET", "/metrics", Open, &["metrics"], 200),
    ("PUT", "/metrics", Open, &["metrics"], 200),
    ("GET", "/metrics/cadvisor", Open, &["metrics"], 200),
    ("GET", "/metrics/resource", Open, &["metrics"], 200),
    ("GET", "/metrics/probes", Open, &["metrics"], 200),
    ("GET", "/metrics/slis", Open, &["metrics"], 200),
    ("DELETE", "/metrics/slis", Open, &["metrics"], 200),
    ("GET", "/run/n/p/c", Stub, &["proxy"], 405),
    ("GET", "/run", Stub, &["proxy"], 404),
    ("PUT", "/exec/n/p/c", Stub, &["proxy"], 405),
    ("GET", "/exec/n/p", Stub, &["proxy"], 404),
    ("DELETE", "/attach/n/p/u/c", Stub, &["proxy"], 405),
    ("GET", "/attach/", Stub, &["proxy"], 404),
    ("HEAD", "/portForward/n/p", Stub, &["proxy"], 405),
    ("POST", "/portForward/n/p/u/c", Stub, &["proxy"], 404),
    ("GET", "/containerLogs/n/p/c", Stub, &["proxy"], 200),
    ("GET", "/containerLogs/n/p/c/", Stub, &["proxy"], 200),
    ("GET", "/containerLogs/n/p%2Fc", Stub, &["proxy"], 200),
    ("GET", "/containerLogs/n/p/c%2Fd", Stub, &["proxy"], 404),
    ("POST", "/containerLogs/n/p/c", Stub, &["proxy"], 405),
    ("GET", "/runningpods/", Stub, &["pods", "proxy"], 500),
    ("POST", "/runningpods/", Stub, &["pods", "proxy"], 405),
    ("GET", "/configz", Nothing, &["configz", "proxy"], 200),
    ("DELETE", "/configz", Nothing, &["configz", "proxy"], 200),
    ("POST", "/checkpoint/n/p/c", Nothing, &["checkpoint"], 404),
    ("GET", "/checkpoint/n/p/c", Nothing, &["checkpoint"], 405),
    ("GET", "/logs/", Stub, &["log"], 404),
    ("GET", "/logs/x", Stub, &["log"], 404),
    ("GET", "/logs/%2e%2e/%2e%2e/etc/passwd", Stub, &["log"], 404),
    ("HEAD", "/logs/x", Stub, &["log"], 405),
    ("GET", "/debug/pprof/", Stub, &["proxy"], 200),
    ("GET", "/debug/pprof/cmdline", Stub, &["proxy"], 200),
    ("GET", "/debug/pprof/heap", Stub, &["proxy"], 200),
    ("GET", "/debug/pprof/nope", Stub, &["proxy"], 404),
    ("POST", "/debug/pprof/profile", Stub, &["proxy"], 405),
    ("GET", "/debug/why/n/p", Stub, &["pods", "proxy"], 200),
    ("GET", "/debug/why/n/q", Stub, &["pods", "proxy"], 404),
    ("GET", "/debug/why/n", Stub, &["pods", "proxy"], 404),
    ("POST", "/debug/why/n/p", Stub, &["pods", "proxy"], 405),
    ("GET", "/debug/devices/", Stub, &["pods", "proxy"], 200),
    ("GET", "/debug/devices/x", Stub, &["pods", "proxy"], 404),
    ("POST", "/debug/devices/", Stub, &["pods", "proxy"], 405),
    ("GET", "/debug/topology/", Stub, &["pods", "proxy"], 200),
    ("GET", "/debug/topology/x", Stub, &["pods", "proxy"], 404),
    ("POST", "/debug/topology/", Stub, &["pods", "proxy"], 405),
    ("PUT", "/debug/flags/v", Nothing, &["proxy"], 400),
    ("GET", "/debug/flags/v", Nothing, &["proxy"], 406),
    ("GET", "/flagz", Nothing, &["configz"], 200),
    ("POST", "/flagz", Nothing, &["configz"], 200),
    ("GET", "/statusz", Nothing, &["statusz"], 200),
    ("PATCH", "/statusz", Nothing, &["statusz"], 200),
];

/// Unknown paths, for any caller.
const UNKNOWN: &[&str] = &[
    "/",
    "/foo",
    "/healthz/",
    "/healthz/nope",
    "/healthz/ping/",
    "/metrics/",
    "/metrics/nope",
    "/livez",
    "/readyz",
    "/version",
    "/spec/",
    "/debug/",
    "/debug/flags/",
    "/debug/flags/v/",
    "/configz/",
    "/flagz/",
    "/statusz/",
    "/Pods",
    "/podsx",
];

/// Redirects: from, to, and whether only without debugging handlers.
const SENT: &[(&str, &str, bool)] = &[
    ("/stats", "/stats/", false),
    ("/logs", "/logs/", false),
    ("/runningpods", "/runningpods/", false),
    ("/debug/pprof", "/debug/pprof/", false),
    ("/debug/why", "/debug/why/", false),
    ("/debug/devices", "/debug/devices/", true),
    ("/debug/topology", "/debug/topology/", true),
    ("/run", "/run/", true),
    ("/exec", "/exec/", true),
    ("/attach", "/attach/", true),
    ("/portForward", "/portForward/", true),
    ("/containerLogs", "/containerLogs/", true),
    ("//pods", "/pods", false),
    ("/a/../pods?x=%2F", "/pods?x=%2F", false),
    ("/./healthz", "/healthz", false),
];

const STRANGE: &str = "404 page not found\n";

fn verb(method: &str) -> &'static str {
    match method {
        "POST" => "create",
        "GET" => "get",
        "PUT" => "update",
        "PATCH" => "patch",
        "DELETE" => "delete",
        _ => "",
    }
}

#[tokio::test]
async fn every_path_asks_who_it_is_and_answers_who_may() {
    let site = RunningListener::guarded(&[("*", "*")]).await;
    for (method, path, _, _, status) in TABLE {
        assert_eq!(site.ask_as_stranger(method, path).await.0, 401, "{method} {path}");
        let (got, head, body) = site.ask(method, path, "").await;
        assert_eq!(got, *status, "{method} {path}: {body}");
        assert_eq!(got == 405, head.contains("\r\nallow: "), "{method} {path}: {head}");
    }
    let none = RunningListener::guarded(&[]).await;
    for (method, path, _, subresources, _) in TABLE {
        none.auth_filter.asked.lock().expect("whole").clear();
        assert_eq!(none.ask(method, path, "").await.0, 403, "{method} {path}");
        let wanted: Vec<String> = subresources.iter().map(|name| format!("{} {name}", verb(method))).collect();
        assert_eq!(*none.auth_filter.asked.lock().expect("whole"), wanted, "{method} {path}");
    }
}

#[tokio::test]
async fn what_is_left_without_debugging_and_on_the_read_only_port() {
    // AC-04-10, AC-04-11, AC-04-12
    let off = EnabledEndpoints { debugging: false, ..ALL };
    let guarded = RunningListener::start(off, Some(vec![("*", "*")]), false).await;
    let read_only = RunningListener::start(EnabledEndpoints::READ_ONLY, None, false).await;
    for (method, path, left, _, status) in TABLE {
        let stranger = guarded.ask_as_stranger(method, path).await;
        let known = guarded.ask(method, path, "").await;
        let open = read_only.ask_as_stranger(method, path).await;
        // These two are redirected, like the others of their kind.
        let bare = *path == "/run";
        let stub = match (bare, *method) {
            (true, _) => (307, None),
            (_, "HEAD") => (405, Some("")),
            _ => (405, Some("Debug endpoints are disabled.\n")),
        };
        let wanted = match left {
            Open => (*status, None),
            Stub => stub,
            Nothing => (404, Some(STRANGE)),
        };
        for (who, answer) in [("who may", &known), ("anybody", &open)] {
            assert_eq!(answer.0, wanted.0, "{method} {path} by {who}");
            assert!(wanted.1.is_none_or(|body| body == answer.2), "{method} {path} by {who}: {}", answer.2);
        }
        let before = if *left == Nothing || bare { wanted.0 } else { 401 };
        assert_eq!(stranger.0, before, "{method} {path} by a stranger");
    }
}

#[tokio::test]
async fn unauthenticated_requests_get_redirects_and_not_found() {
    // AC-04-2, AC-04-3
    let on = RunningListener::guarded(&[("*", "*")]).await;
    let off = RunningListener::start(EnabledEndpoints::READ_ONLY, None, false).await;
    for path in UNKNOWN {
        for site in [&on, &off] {
            for method in ["GET", "POST"] {
                let (status, head, body) = site.ask_as_stranger(method, path).await;
                assert_eq!((status, body.as_str()), (404, STRANGE), "{method} {path}");
                assert!(head.contains("x-content-type-options: nosniff"), "{head}");
                assert!(head.contains("content-type: text/plain; charset=utf-8"), "{head}");
            }
        }
    }
    for (path, location, only_off) in SENT {
        for (site, is_off) in [(&on, false), (&off, true)] {
            let (status, head, body) = site.ask_as_stranger("GET", path).await;
            if *only_off && !is_off {
                assert_eq!(status, 401, "{path} is a root of its own");
                continue;
            }
            assert_eq!(status, 307, "{path}");
            assert!(
                format!("{head}\r\n").contains(&format!("location: {}\r\n", location.to_lowercase())),
                "{path}: {head}"
            );
            assert!(head.contains("content-type: text/html; charset=utf-8"), "{path}: {head}");
            assert_eq!(body, format!("<a href=\"{location}\">Temporary Redirect</a>.\n\n"), "{path}");
            let (status, head, body) = site.ask_as_stranger("POST", path).await;
            assert_eq!((status, body.as_str()), (307, ""), "{path}: {head}");
        }
    }
}

#[tokio::test]
async fn each_switch_takes_its_own() {
    for (switches, path, status, body) in [
        (EnabledEndpoints { system_log: false, ..ALL }, "/logs/x", 405, "logs endpoint is disabled.\n"),
        (EnabledEndpoints { profiling: false, ..ALL }, "/debug/pprof/heap", 405, "profiling endpoint is disabled.\n"),
        (EnabledEndpoints { debug_flags: false, ..ALL }, "/debug/flags/v", 405, "flags endpoint is disabled.\n"),
        (EnabledEndpoints { checkpoint: false, ..ALL }, "/checkpoint/n/p/c", 404, STRANGE),
        (EnabledEndpoints { flagz: false, ..ALL }, "/flagz", 404, STRANGE),
        (EnabledEndpoints { statusz: false, ..ALL }, "/statusz", 404, STRANGE),
        // The switches of single handlers have no effect where all are off.
        (
            EnabledEndpoints { debugging: false, system_log: false, ..ALL },
            "/logs/x",
            405,
            "Debug endpoints are disabled.\n",
        ),
        (EnabledEndpoints { debugging: false, debug_flags: false, ..ALL }, "/debug/flags/v", 404, STRANGE),
    ] {
        let site = RunningListener::start(switches, Some(vec![("*", "*")]), false).await;
        let (got, _, text) = site.ask("GET", path, "").await;
        assert_eq!((got, text.as_str()), (status, body), "{path}");
        let before = if status == 404 { 404 } else { 401 };
        assert_eq!(site.ask_as_stranger("GET", path).await.0, before, "{path}");
        let others = TABLE.iter().filter(|row| row.2 == Open && row.4 == 200);
        for (method, path, ..) in others {
            assert_eq!(site.ask(method, path, "").await.0, 200, "{method} {path}");
        }
    }
}

#[tokio::test]
async fn not_acceptable_lists_the_available_representations() {
    let site = RunningListener::guarded(&[("*", "*")]).await;
    let none = "406: Not Acceptable\n\nAvailable representations: ";
    for (path, accept, status, list) in [
        ("/pods", "text/plain", 406, "application/json"),
        ("/pods", "application/*", 406, "application/json"),
        ("/pods", "application/json;q=0.5, text/plain", 200, ""),
        ("/pods", "text/html, */*;q=0.1", 200, ""),
        ("/stats/summary", "application/yaml", 406, "application/json"),
        ("/runningpods/", "text/plain", 406, "application/json"),
        ("/containerLogs/n/p/c", "text/plain", 406, ""),
        ("/containerLogs/n/p/c", "*/*", 200, ""),
        ("/logs/x", "text/html", 406, ""),
        ("/debug/pprof/", "text/html", 406, ""),
        // Plain handlers ignore Accept.
        ("/healthz", "image/png", 200, ""),
        ("/configz", "image/png", 200, ""),
    ] {
        let (got, _, body) = site.ask("GET", path, &format!("Accept: {accept}\r\n")).await;
        assert_eq!(got, status, "{path} as {accept}");
        assert!(status != 406 || body == format!("{none}{list}"), "{path} as {accept}: {body}");
    }
}

#[tokio::test]
async fn the_healthz_port_has_healthz_and_nothing_else() {
    // CVE-2019-11248
    let players = RunningListener::guarded(&[]).await.players.clone();
    let listening = berth_server::bind(IpAddr::V4(Ipv4Addr::LOCALHOST), 0).await.expect("a port");
    let address = listening.address().expect("bound");
    let stop = CancellationToken::new();
    let _stop = stop.clone().drop_guard();
    tokio::spawn(berth_server::serve(
        listening,
        ListenerService::Router(berth_server::healthz_router(players)),
        None,
        stop,
    ));
    let ask = async |path: &str| {
        crate::server::fixture::raw(address, &format!("GET {path} HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n"))
            .await
    };
    for (path, body) in
        [("/healthz", "ok"), ("/healthz/ping", "ok"), ("/healthz?verbose", "[+]ping ok\nhealthz check passed\n")]
    {
        let (status, _, text) = ask(path).await;
        assert_eq!((status, text.as_str()), (200, body), "{path}");
    }
    let others = TABLE.iter().map(|row| row.1).filter(|path| !matches!(*path, "/healthz" | "/healthz/ping"));
    for path in others {
        assert_eq!(ask(path).await.0, 404, "{path}");
    }
}
