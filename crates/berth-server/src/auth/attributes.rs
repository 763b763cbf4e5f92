//! Authorization attributes of a request: verb and subresources of `nodes`. Pure. Spec 04 §6.3.
//!
//! `pipeline.rs` demands `create` in addition for a GET that opens a stream.

use http::Method;

/// Path prefix, and the subresources of `nodes` that allow it.
type Row = (&'static str, &'static [&'static str]);

/// The first row whose prefix matches whole segments of the path applies; otherwise `proxy`.
const ROWS: [Row; 13] = [
    ("/pods", &["pods", "proxy"]),
    ("/healthz", &["healthz", "proxy"]),
    ("/configz", &["configz", "proxy"]),
    ("/runningpods", &["pods", "proxy"]),
    ("/debug/why", &["pods", "proxy"]), // shows what `/pods` shows, and diagnostics
    ("/debug/devices", &["pods", "proxy"]),
    ("/debug/topology", &["pods", "proxy"]),
    ("/stats", &["stats"]),
    ("/metrics", &["metrics"]),
    ("/logs", &["log"]),
    ("/checkpoint", &["checkpoint"]),
    ("/statusz", &["statusz"]),
    ("/flagz", &["configz"]),
];
const REST: &[&str] = &["proxy"];

/// Authorization verb of a method; empty where there is none.
pub fn verb(method: &Method) -> &'static str {
    match *method {
        Method::POST => "create",
        Method::GET => "get",
        Method::PUT => "update",
        Method::PATCH => "patch",
        Method::DELETE => "delete",
        _ => "",
    }
}

/// Subresources of `nodes`, any of which allows a (decoded) path, in the order of the checks.
///
/// Matches whole segments, case-sensitively: `/podsx` and `/Pods` do not match `/pods`.
pub fn subresources(path: &str) -> &'static [&'static str] {
    let begins = |prefix: &str| path.strip_prefix(prefix).is_some_and(|rest| rest.is_empty() || rest.starts_with('/'));
    ROWS.iter().find(|(prefix, _)| begins(prefix)).map_or(REST, |(_, subresources)| subresources)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_method_has_its_verb_or_none() {
        for (method, expected) in [
            (Method::POST, "create"),
            (Method::GET, "get"),
            (Method::PUT, "update"),
            (Method::PATCH, "patch"),
            (Method::DELETE, "delete"),
            (Method::HEAD, ""),
            (Method::OPTIONS, ""),
            (Method::CONNECT, ""),
            (Method::TRACE, ""),
        ] {
            assert_eq!(verb(&method), expected, "{method}");
        }
    }

    #[test]
    fn paths_ask_for_whole_segments() {
        for (path, expected) in [
            ("/pods", "pods proxy"), // AC-04-4
            ("/pods/", "pods proxy"),
            ("/podsx", "proxy"),
            ("/Pods", "proxy"),
            ("/healthz", "healthz proxy"), // AC-04-6
            ("/healthz/log", "healthz proxy"),
            ("/healthzz", "proxy"),
            ("/configz", "configz proxy"), // AC-04-5
            ("/runningpods/", "pods proxy"),
            ("/stats/summary", "stats"),
            ("/stats/", "stats"),
            ("/metrics", "metrics"),
            ("/metrics/cadvisor", "metrics"),
            ("/logs/", "log"),
            ("/logs/a/b", "log"),
            ("/checkpoint/a/b/c", "checkpoint"),
            ("/statusz", "statusz"),
            ("/flagz", "configz"), // AC-04-8
            ("/exec/a/b/c", "proxy"),
            ("/containerLogs/a/b/c", "proxy"),
            ("/debug/why/a/b", "pods proxy"),
            ("/debug/whyx", "proxy"),
            ("/debug/devices", "pods proxy"),
            ("/debug/topology", "pods proxy"),
            ("/debug/topologyx", "proxy"),
            ("/debug/pprof/", "proxy"),
            ("/spec/", "proxy"),
            ("/", "proxy"),
            ("", "proxy"),
        ] {
            assert_eq!(subresources(path).join(" "), expected, "{path}");
        }
    }
}
