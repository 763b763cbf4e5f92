//! Span of a request that was admitted: route template, peer, status (spec 08 §13).

use axum::http::{Request, StatusCode, header};

use super::pipeline::Peer;
use berth_otel::{KeyValue, Span};

/// Routes of the server; a part in braces stands for one segment, `*` for the rest of the path.
const ROUTES: &[&str] = &[
    "/healthz",
    "/healthz/{check}",
    "/metrics",
    "/metrics/cadvisor",
    "/metrics/probes",
    "/metrics/resource",
    "/metrics/slis",
    "/configz",
    "/statusz",
    "/flagz",
    "/pods",
    "/runningpods",
    "/stats/summary",
    "/containerLogs/{podNamespace}/{podID}/{containerName}",
    "/run/{podNamespace}/{podID}/{containerName}",
    "/run/{podNamespace}/{podID}/{uid}/{containerName}",
    "/exec/{podNamespace}/{podID}/{containerName}",
    "/exec/{podNamespace}/{podID}/{uid}/{containerName}",
    "/attach/{podNamespace}/{podID}/{containerName}",
    "/attach/{podNamespace}/{podID}/{uid}/{containerName}",
    "/portForward/{podNamespace}/{podID}",
    "/portForward/{podNamespace}/{podID}/{uid}",
    "/checkpoint/{podNamespace}/{podID}/{containerName}",
    "/logs/*",
    "/debug/flags/v",
    "/debug/pprof/*",
    "/debug/why/{podNamespace}/{podID}",
    "/debug/devices",
    "/debug/topology",
];

/// Starts the span of a request, whose percent-decoded path is `path`. Paths outside the routes share one name, so that
/// clients cannot create names.
pub(super) fn start<B>(request: &Request<B>, path: &str) -> Span {
    berth_otel::server_span(request.headers(), || {
        let route = template(path);
        let peer = request.extensions().get::<Peer>();
        let mut attributes = vec![
            KeyValue::new("server.address", "kubelet"),
            KeyValue::new("http.request.method", request.method().to_string()),
            KeyValue::new("url.path", path.to_owned()),
        ];
        if let Some(route) = route {
            attributes.push(KeyValue::new("http.route", route));
        }
        if let Some(peer) = peer {
            attributes.push(KeyValue::new("network.peer.address", peer.address.ip().to_string()));
            attributes.push(KeyValue::new("network.peer.port", i64::from(peer.address.port())));
        }
        if let Some(agent) = request.headers().get(header::USER_AGENT).and_then(|value| value.to_str().ok()) {
            attributes.push(KeyValue::new("user_agent.original", agent.to_owned()));
        }
        (route.unwrap_or("other"), attributes)
    })
}

/// Records the status; only a fault of the server is an error of its span.
pub(super) fn record_status(span: &Span, status: StatusCode) {
    span.set_attribute("http.response.status_code", || i64::from(status.as_u16()).into());
    if status.is_server_error() {
        span.set_error(String::new);
    }
}

/// The route that a path belongs to.
fn template(path: &str) -> Option<&'static str> {
    let path = path.trim_matches('/');
    ROUTES.iter().copied().find(|route| {
        let mut parts = path.split('/');
        for expected in route.trim_matches('/').split('/') {
            match (expected, parts.next()) {
                ("*", _) => return true,
                (expected, Some(part)) if expected == part || (expected.starts_with('{') && !part.is_empty()) => {}
                _ => return false,
            }
        }
        parts.next().is_none()
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_described_path_has_a_route() {
        let document = include_str!("../../../api/openapi.yaml");
        let paths: Vec<String> = document
            .lines()
            .filter_map(|line| line.strip_prefix("  /")?.strip_suffix(':'))
            .map(|path| format!("/{}", path.replace(['{', '}'], "")))
            .collect();
        assert!(paths.len() > 20, "{paths:?}");
        let unknown: Vec<&String> = paths.iter().filter(|path| template(path).is_none()).collect();
        assert!(unknown.is_empty(), "{unknown:?}");
    }

    #[test]
    fn a_path_belongs_to_one_route() {
        for (path, route) in [
            ("/pods", Some("/pods")),
            ("/runningpods/", Some("/runningpods")),
            ("/healthz/ping", Some("/healthz/{check}")),
            ("/metrics/cadvisor", Some("/metrics/cadvisor")),
            ("/containerLogs/ns/pod/c", Some("/containerLogs/{podNamespace}/{podID}/{containerName}")),
            ("/exec/ns/pod/uid/c", Some("/exec/{podNamespace}/{podID}/{uid}/{containerName}")),
            ("/portForward/ns/pod", Some("/portForward/{podNamespace}/{podID}")),
            ("/logs/", Some("/logs/*")),
            ("/logs/pods/a/b", Some("/logs/*")),
            ("/debug/pprof/heap", Some("/debug/pprof/*")),
            ("/exec/ns/pod", None),
            ("/exec/ns//c", None),
            ("/", None),
            ("/nothing", None),
            ("/pods/a", None),
        ] {
            assert_eq!(template(path), route, "{path}");
        }
    }
}
