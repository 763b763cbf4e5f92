//! Request routing: path, method, and `Accept` header to endpoint. Pure. Implements spec 04 §3, §4.
//!
//! Checks run in kubelet's order, in two layers with authentication between them. The *outer* layer reads the raw path
//! only (redirects, unknown paths, plain handlers, roots of services); the *service router* checks methods, parameters,
//! and media types. The layer that returns the 404 decides whether an unauthenticated client can see it.

use super::routes::text::cleaned;

/// Enabled optional endpoints (spec 04 §4 "Switches").
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[allow(clippy::struct_excessive_bools, reason = "each is a switch of the configuration")]
pub struct EnabledEndpoints {
    /// `enableDebuggingHandlers`; always false on the read-only port.
    pub debugging: bool,
    /// `enableSystemLogHandler`
    pub system_log: bool,
    /// `enableProfilingHandler`
    pub profiling: bool,
    /// `enableDebugFlagsHandler`
    pub debug_flags: bool,
    /// Feature gate `ContainerCheckpoint`.
    pub checkpoint: bool,
    /// Feature gate `ComponentFlagz`.
    pub flagz: bool,
    /// Feature gate `ComponentStatusz`.
    pub statusz: bool,
}

impl EnabledEndpoints {
    /// Switches of the read-only port: only the endpoints without a switch, and stubs for the debug endpoints.
    pub const READ_ONLY: Self = Self {
        debugging: false,
        system_log: false,
        profiling: false,
        debug_flags: false,
        checkpoint: false,
        flagz: false,
        statusz: false,
    };
}

/// Result of the outer layer for a path.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum PathRoute {
    /// 307 to this location, before authentication.
    Redirect(String),
    /// 404, before authentication.
    Unknown,
    /// 400: the percent-decoded path is malformed or not UTF-8.
    Malformed,
    /// A plain handler; takes any method.
    Plain(PlainEndpoint),
    /// Percent-decoded path for the service router.
    Service(String),
}

/// Handlers that match a path exactly and take any method.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum PlainEndpoint {
    /// `/healthz`
    Healthz,
    /// `/healthz/{check}`
    HealthCheck(String),
    /// `/metrics`
    Metrics,
    /// `/metrics/cadvisor`
    Cadvisor,
    /// `/metrics/resource`
    Resource,
    /// `/metrics/probes`
    Probes,
    /// `/metrics/slis`
    Slis,
    /// `/configz`
    Configz,
    /// `/statusz`
    Statusz,
    /// `/flagz`
    Flagz,
    /// `/debug/flags/v`
    Verbosity,
    /// 405 with this text: the endpoint is disabled.
    Disabled(&'static str),
}

/// Pod identified by a request path.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct PodPath {
    /// First path segment after the endpoint's root.
    pub namespace: String,
    /// Name.
    pub pod: String,
    /// UID, if the path contains one.
    pub uid: Option<String>,
}

/// Container identified by a request path.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ContainerPath {
    /// Pod of the container.
    pub pod: PodPath,
    /// Container name.
    pub container: String,
}

/// An endpoint of the service router.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Endpoint {
    /// `/pods`
    Pods,
    /// `/stats/summary`
    Summary,
    /// `/run/…`
    Run(ContainerPath),
    /// `/exec/…`
    Exec(ContainerPath),
    /// `/attach/…`
    Attach(ContainerPath),
    /// `/portForward/…`
    PortForward(PodPath),
    /// `/containerLogs/…`
    ContainerLogs(ContainerPath),
    /// `/runningpods/`
    RunningPods,
    /// `/checkpoint/…`
    Checkpoint(ContainerPath),
    /// `/logs/` and below, with the decoded rest of the path; a trailing slash is kept.
    Logs(String),
    /// `/debug/pprof/` and below, with the rest of the path.
    Pprof(String),
    /// `/debug/why/{namespace}/{pod}`; Berth's own endpoint, absent in kubelet.
    Why(PodPath),
    /// `/debug/devices`; Berth's own endpoint, absent in kubelet.
    Devices,
    /// `/debug/topology`; Berth's own endpoint, absent in kubelet.
    Topology,
}

/// Result of the service router.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum ServiceRoute {
    /// The endpoint to call.
    Found(Endpoint),
    /// 404 of the service router, after authentication.
    NotFound,
    /// 405 with this `Allow` header.
    MethodNotAllowed(&'static str),
    /// 406 that lists this media type.
    NotAcceptable(&'static str),
}

/// Service roots: path, declared media type, and whether the root also matches without its trailing slash.
const SERVICES: &[(&str, &str, bool)] = &[
    ("/pods/", JSON, true),
    ("/stats/", JSON, false),
    ("/run/", "", true),
    ("/exec/", "", true),
    ("/attach/", "", true),
    ("/portForward/", "", true),
    ("/containerLogs/", "", true),
    ("/runningpods/", JSON, false),
    ("/checkpoint/", JSON, false),
    ("/logs/", "", false),
    ("/debug/pprof/", "", false),
    ("/debug/why/", JSON, false),
    ("/debug/devices/", JSON, true),
    ("/debug/topology/", JSON, true),
];
const JSON: &str = "application/json";
/// Roots that only debugging handlers serve; a stub with a 405 replaces them when debugging is off.
const DEBUG_ROOTS: &[&str] = &[
    "/run/",
    "/exec/",
    "/attach/",
    "/portForward/",
    "/containerLogs/",
    "/runningpods/",
    "/debug/pprof/",
    "/debug/why/",
    "/debug/devices/",
    "/debug/topology/",
    "/logs/",
];
const DEBUG_OFF: &str = "Debug endpoints are disabled.";
const LOGS_OFF: &str = "logs endpoint is disabled.";
const PROFILING_OFF: &str = "profiling endpoint is disabled.";
const FLAGS_OFF: &str = "flags endpoint is disabled.";

/// Routes a raw (percent-encoded) path before authentication. `checks` lists the names of the health checks.
pub fn outer(path: &str, query: Option<&str>, switches: &EnabledEndpoints, checks: &[&str]) -> PathRoute {
    let redirect = |path: &str| match query {
        Some(query) => PathRoute::Redirect(format!("{path}?{query}")),
        None => PathRoute::Redirect(path.to_owned()),
    };
    if !path.starts_with('/') {
        return PathRoute::Unknown; // `*`, or the authority of a CONNECT
    }
    if let Some(clean) = cleaned(path) {
        return redirect(&clean);
    }
    let Some(decoded) = decode(path) else { return PathRoute::Malformed };
    if let Some(plain) = plain(&decoded, switches, checks) {
        return PathRoute::Plain(plain);
    }
    for (root, _, bare) in SERVICES {
        let name = root.trim_end_matches('/');
        let is_debug = DEBUG_ROOTS.contains(root);
        if *root == "/checkpoint/" && !(switches.debugging && switches.checkpoint) {
            continue;
        }
        let off = match *root {
            _ if is_debug && !switches.debugging => Some(DEBUG_OFF),
            "/logs/" if !switches.system_log => Some(LOGS_OFF),
            "/debug/pprof/" if !switches.profiling => Some(PROFILING_OFF),
            _ => None,
        };
        if decoded == name {
            let knows_bare = *bare && off.is_none();
            return if knows_bare { PathRoute::Service(decoded) } else { redirect(&format!("{path}/")) };
        }
        if decoded.starts_with(root) {
            return off.map_or(PathRoute::Service(decoded), |text| PathRoute::Plain(PlainEndpoint::Disabled(text)));
        }
    }
    PathRoute::Unknown
}

fn plain(path: &str, switches: &EnabledEndpoints, checks: &[&str]) -> Option<PlainEndpoint> {
    if let Some(check) = path.strip_prefix("/healthz/") {
        return (check == "ping" || checks.contains(&check)).then(|| PlainEndpoint::HealthCheck(check.to_owned()));
    }
    match path {
        "/healthz" => return Some(PlainEndpoint::Healthz),
        "/metrics" => return Some(PlainEndpoint::Metrics),
        "/metrics/cadvisor" => return Some(PlainEndpoint::Cadvisor),
        "/metrics/resource" => return Some(PlainEndpoint::Resource),
        "/metrics/probes" => return Some(PlainEndpoint::Probes),
        "/metrics/slis" => return Some(PlainEndpoint::Slis),
        _ if !switches.debugging => return None,
        _ => {}
    }
    match path {
        "/configz" => Some(PlainEndpoint::Configz),
        "/statusz" if switches.statusz => Some(PlainEndpoint::Statusz),
        "/flagz" if switches.flagz => Some(PlainEndpoint::Flagz),
        "/debug/flags/v" if switches.debug_flags => Some(PlainEndpoint::Verbosity),
        "/debug/flags/v" => Some(PlainEndpoint::Disabled(FLAGS_OFF)),
        _ => None,
    }
}

/// Routes a decoded path that [`outer`] returned as [`PathRoute::Service`].
pub fn service(method: &str, path: &str, accept: Option<&str>) -> ServiceRoute {
    let of_root = |(root, _, _): &&(&str, &str, bool)| path.starts_with(root) || path == root.trim_end_matches('/');
    let Some((root, produces, _)) = SERVICES.iter().find(of_root) else { return ServiceRoute::NotFound };
    let rest = path.get(root.len()..).unwrap_or_default();
    let Some((endpoint, allow)) = endpoint(root, rest) else { return ServiceRoute::NotFound };
    if !allow.split(", ").any(|allowed| allowed == method) {
        return ServiceRoute::MethodNotAllowed(allow);
    }
    if !is_acceptable(accept, produces) {
        return ServiceRoute::NotAcceptable(produces);
    }
    ServiceRoute::Found(endpoint)
}

fn endpoint(root: &str, rest: &str) -> Option<(Endpoint, &'static str)> {
    const BOTH: &str = "GET, POST";
    let parts: Vec<&str> = rest.trim_end_matches('/').split('/').filter(|part| !part.is_empty()).collect();
    let found = match (root, parts.as_slice()) {
        ("/pods/", []) => (Endpoint::Pods, "GET"),
        ("/stats/", ["summary"]) => (Endpoint::Summary, BOTH),
        ("/run/", parts) => (Endpoint::Run(container(parts, true)?), "POST"),
        ("/exec/", parts) => (Endpoint::Exec(container(parts, true)?), BOTH),
        ("/attach/", parts) => (Endpoint::Attach(container(parts, true)?), BOTH),
        ("/portForward/", [namespace, pod]) => (Endpoint::PortForward(pod_path(namespace, pod, None)), BOTH),
        ("/portForward/", [namespace, pod, uid]) => (Endpoint::PortForward(pod_path(namespace, pod, Some(uid))), BOTH),
        ("/containerLogs/", parts) => (Endpoint::ContainerLogs(container(parts, false)?), "GET"),
        ("/runningpods/", []) => (Endpoint::RunningPods, "GET"),
        ("/checkpoint/", parts) => (Endpoint::Checkpoint(container(parts, false)?), "POST"),
        ("/logs/", _) => (Endpoint::Logs(rest.to_owned()), "GET"),
        ("/debug/pprof/", _) => (Endpoint::Pprof(rest.to_owned()), "GET"),
        ("/debug/why/", [namespace, pod]) => (Endpoint::Why(pod_path(namespace, pod, None)), "GET"),
        ("/debug/devices/", []) => (Endpoint::Devices, "GET"),
        ("/debug/topology/", []) => (Endpoint::Topology, "GET"),
        _ => return None,
    };
    Some(found)
}

fn pod_path(namespace: &str, pod: &str, uid: Option<&str>) -> PodPath {
    PodPath { namespace: namespace.to_owned(), pod: pod.to_owned(), uid: uid.map(str::to_owned) }
}

fn container(parts: &[&str], may_have_uid: bool) -> Option<ContainerPath> {
    match parts {
        [namespace, pod, container] => {
            Some(ContainerPath { pod: pod_path(namespace, pod, None), container: (*container).to_owned() })
        }
        [namespace, pod, uid, container] if may_have_uid => {
            Some(ContainerPath { pod: pod_path(namespace, pod, Some(uid)), container: (*container).to_owned() })
        }
        _ => None,
    }
}

/// Whether `Accept` allows the media type of the route. A route that declares no media type matches only an absent or
/// empty header, or `*/*`.
fn is_acceptable(accept: Option<&str>, produces: &str) -> bool {
    let accept = accept.unwrap_or_default();
    if accept.is_empty() {
        return true;
    }
    let types = accept.split(',').map(|entry| entry.split(';').next().unwrap_or_default().trim());
    types.into_iter().any(|accepted| accepted == "*/*" || (accepted == produces && !produces.is_empty()))
}

/// Percent-decodes a path; `None` where a percent sign is not followed by two hexadecimal digits, or the result is not
/// UTF-8.
pub fn decode(path: &str) -> Option<String> {
    if !path.contains('%') {
        return Some(path.to_owned());
    }
    let digit = |byte: Option<u8>| char::from(byte?).to_digit(16).and_then(|digit| u8::try_from(digit).ok());
    let mut bytes = Vec::with_capacity(path.len());
    let mut rest = path.bytes();
    while let Some(byte) = rest.next() {
        bytes.push(if byte == b'%' { digit(rest.next())? << 4 | digit(rest.next())? } else { byte });
    }
    String::from_utf8(bytes).ok()
}

/// Value of the label `path` of the request metrics: one of a fixed set, so that clients cannot create series (spec 04
/// §8).
pub fn bucket(path: &str) -> &'static str {
    const PAGES: &[&str] = &["metrics/cadvisor", "metrics/probes", "metrics/resource"];
    const ROOTS: &[&str] = &[
        "healthz",
        "pods",
        "stats",
        "metrics",
        "run",
        "exec",
        "attach",
        "portForward",
        "containerLogs",
        "configz",
        "runningpods",
        "checkpoint",
        "logs",
        "debug",
        "flagz",
        "statusz",
    ];
    let path = path.trim_matches('/');
    let first = path.split('/').next().unwrap_or_default();
    let known = if first == "metrics" && path != first { PAGES.iter().find(|p| **p == path) } else { None };
    let root = || ROOTS.iter().find(|root| **root == first && (first != "metrics" || path == first));
    known.or_else(root).copied().unwrap_or("other")
}

/// Value of the label `method` of the request metrics; PATCH maps to `other` (spec 04 §8).
pub fn method_label(method: &str) -> &'static str {
    const METHODS: &[&str] = &["OPTIONS", "GET", "HEAD", "POST", "PUT", "DELETE", "TRACE", "CONNECT"];
    METHODS.iter().find(|known| **known == method).copied().unwrap_or("other")
}

/// Value of the label `long_running`; kubelet's table misspells the third one, which is kept (spec 04 §8).
pub fn is_long_running(bucket: &str) -> bool {
    matches!(bucket, "exec" | "attach" | "debug")
}

/// Whether an upgrade turns a GET of this endpoint into more than a read (spec 04 §10, first row).
pub fn opens_a_stream(endpoint: &Endpoint) -> bool {
    matches!(endpoint, Endpoint::Exec(_) | Endpoint::Attach(_) | Endpoint::Run(_) | Endpoint::PortForward(_))
}

#[cfg(test)]
mod tests {
    use super::*;

    const ALL: EnabledEndpoints = EnabledEndpoints {
        debugging: true,
        system_log: true,
        profiling: true,
        debug_flags: true,
        checkpoint: true,
        flagz: true,
        statusz: true,
    };
    const CHECKS: &[&str] = &["log", "syncloop"];

    fn to(path: &str) -> PathRoute {
        PathRoute::Redirect(path.to_owned())
    }

    fn on(path: &str) -> PathRoute {
        PathRoute::Service(path.to_owned())
    }

    #[test]
    fn the_outer_layer_knows_paths_only() {
        // AC-04-2, AC-04-3
        for (path, query, wanted) in [
            ("/", None, PathRoute::Unknown),
            ("*", None, PathRoute::Unknown),
            ("", None, PathRoute::Unknown),
            ("/nope", None, PathRoute::Unknown),
            ("/healthz/", None, PathRoute::Unknown),
            ("/metrics/", None, PathRoute::Unknown),
            ("/livez", None, PathRoute::Unknown),
            ("/spec/", None, PathRoute::Unknown),
            ("/debug", None, PathRoute::Unknown),
            ("/debug/flags/v/", None, PathRoute::Unknown),
            ("/a//b", Some("x=1"), to("/a/b?x=1")),
            ("/runningpods", Some("x=1"), to("/runningpods/?x=1")),
            ("/stats", None, to("/stats/")),
            ("/logs", None, to("/logs/")),
            ("/checkpoint", None, to("/checkpoint/")),
            ("/debug/pprof", None, to("/debug/pprof/")),
            ("/debug/why", None, to("/debug/why/")),
            ("/debug/devices", None, on("/debug/devices")),
            ("/debug/devicesx", None, PathRoute::Unknown),
            ("/debug/topology", None, on("/debug/topology")),
            ("/debug/topology/", None, on("/debug/topology/")),
            ("/run", None, on("/run")),
            ("/pods/", None, on("/pods/")),
            ("/pods/x", None, on("/pods/x")),
            ("/containerLogs/a%2Fb/c", None, on("/containerLogs/a/b/c")),
            ("/%zz", None, PathRoute::Malformed),
            ("/%ff", None, PathRoute::Malformed),
            ("/healthz", None, PathRoute::Plain(PlainEndpoint::Healthz)),
            ("/healthz/log", None, PathRoute::Plain(PlainEndpoint::HealthCheck("log".to_owned()))),
            ("/healthz/other", None, PathRoute::Unknown),
            ("/metrics/slis", None, PathRoute::Plain(PlainEndpoint::Slis)),
            ("/debug/flags/v", None, PathRoute::Plain(PlainEndpoint::Verbosity)),
            ("/flagz", None, PathRoute::Plain(PlainEndpoint::Flagz)),
        ] {
            assert_eq!(outer(path, query, &ALL, CHECKS), wanted, "{path}");
        }
    }

    #[test]
    fn what_is_switched_off_is_a_stub_or_unknown() {
        // AC-04-10, AC-04-11, AC-04-12
        let stub = |text| PathRoute::Plain(PlainEndpoint::Disabled(text));
        for path in [
            "/debug/why/a/b",
            "/debug/devices/",
            "/debug/topology/",
            "/run/x",
            "/exec/xxx",
            "/attach/",
            "/portForward/a",
            "/containerLogs/a",
            "/runningpods/",
            "/logs/x",
        ] {
            assert_eq!(
                outer(path, None, &EnabledEndpoints::READ_ONLY, CHECKS),
                stub("Debug endpoints are disabled."),
                "{path}"
            );
        }
        for path in ["/configz", "/checkpoint/a/b/c", "/checkpoint", "/statusz", "/flagz", "/debug/flags/v"] {
            assert_eq!(outer(path, None, &EnabledEndpoints::READ_ONLY, CHECKS), PathRoute::Unknown, "{path}");
        }
        for path in ["/run", "/exec", "/attach", "/portForward", "/containerLogs", "/debug/devices", "/debug/topology"]
        {
            assert_eq!(outer(path, None, &EnabledEndpoints::READ_ONLY, CHECKS), to(&format!("{path}/")), "{path}");
        }
        for path in ["/pods", "/stats/summary"] {
            assert_eq!(outer(path, None, &EnabledEndpoints::READ_ONLY, CHECKS), on(path), "{path}");
        }
        let each = [
            (EnabledEndpoints { system_log: false, ..ALL }, "/logs/x", "logs endpoint is disabled."),
            (EnabledEndpoints { profiling: false, ..ALL }, "/debug/pprof/heap", "profiling endpoint is disabled."),
            (EnabledEndpoints { debug_flags: false, ..ALL }, "/debug/flags/v", "flags endpoint is disabled."),
        ];
        for (switches, path, text) in each {
            assert_eq!(outer(path, None, &switches, CHECKS), stub(text), "{path}");
        }
        assert_eq!(outer("/flagz", None, &EnabledEndpoints { flagz: false, ..ALL }, CHECKS), PathRoute::Unknown);
        assert_eq!(
            outer("/checkpoint/a/b/c", None, &EnabledEndpoints { checkpoint: false, ..ALL }, CHECKS),
            PathRoute::Unknown
        );
    }

    #[test]
    fn the_service_router_knows_methods_and_types() {
        // AC-04-9
        let pod = |uid: Option<&str>| pod_path("a", "b", uid);
        let at = |uid| ContainerPath { pod: pod(uid), container: "c".to_owned() };
        for (method, path, accept, wanted) in [
            ("GET", "/pods", None, ServiceRoute::Found(Endpoint::Pods)),
            ("GET", "/pods/", Some("text/plain, */*;q=0.1"), ServiceRoute::Found(Endpoint::Pods)),
            ("GET", "/pods", Some("text/plain"), ServiceRoute::NotAcceptable("application/json")),
            ("HEAD", "/pods", None, ServiceRoute::MethodNotAllowed("GET")),
            ("GET", "/pods/x", None, ServiceRoute::NotFound),
            ("POST", "/stats/summary/", None, ServiceRoute::Found(Endpoint::Summary)),
            ("GET", "/stats/", None, ServiceRoute::NotFound),
            ("GET", "/run/a/b/c", None, ServiceRoute::MethodNotAllowed("POST")),
            ("POST", "/run/a/b/u/c", None, ServiceRoute::Found(Endpoint::Run(at(Some("u"))))),
            ("GET", "/exec/a/b/c", None, ServiceRoute::Found(Endpoint::Exec(at(None)))),
            ("PUT", "/attach/a/b/c", None, ServiceRoute::MethodNotAllowed("GET, POST")),
            ("GET", "/exec/a/b", None, ServiceRoute::NotFound),
            ("POST", "/portForward/a/b", None, ServiceRoute::Found(Endpoint::PortForward(pod(None)))),
            ("GET", "/portForward/a/b/u", None, ServiceRoute::Found(Endpoint::PortForward(pod(Some("u"))))),
            ("GET", "/containerLogs/a/b/c", None, ServiceRoute::Found(Endpoint::ContainerLogs(at(None)))),
            ("GET", "/containerLogs/a/b/c", Some("text/plain"), ServiceRoute::NotAcceptable("")),
            ("GET", "/containerLogs/a/b/u/c", None, ServiceRoute::NotFound),
            ("GET", "/runningpods/", None, ServiceRoute::Found(Endpoint::RunningPods)),
            ("POST", "/checkpoint/a/b/c", None, ServiceRoute::Found(Endpoint::Checkpoint(at(None)))),
            ("GET", "/logs/x/y/", None, ServiceRoute::Found(Endpoint::Logs("x/y/".to_owned()))),
            ("GET", "/logs/", None, ServiceRoute::Found(Endpoint::Logs(String::new()))),
            ("GET", "/debug/pprof/heap", None, ServiceRoute::Found(Endpoint::Pprof("heap".to_owned()))),
            ("GET", "/debug/why/a/b", None, ServiceRoute::Found(Endpoint::Why(pod(None)))),
            ("GET", "/debug/why/a", None, ServiceRoute::NotFound),
            ("POST", "/debug/why/a/b", None, ServiceRoute::MethodNotAllowed("GET")),
            ("GET", "/debug/devices", None, ServiceRoute::Found(Endpoint::Devices)),
            ("GET", "/debug/devices/", None, ServiceRoute::Found(Endpoint::Devices)),
            ("GET", "/debug/devices/a", None, ServiceRoute::NotFound),
            ("POST", "/debug/devices", None, ServiceRoute::MethodNotAllowed("GET")),
            ("GET", "/debug/topology", None, ServiceRoute::Found(Endpoint::Topology)),
            ("GET", "/debug/topology/", None, ServiceRoute::Found(Endpoint::Topology)),
            ("GET", "/debug/topology/0", None, ServiceRoute::NotFound),
            ("POST", "/debug/topology", None, ServiceRoute::MethodNotAllowed("GET")),
        ] {
            assert_eq!(service(method, path, accept), wanted, "{method} {path}");
        }
    }

    #[test]
    fn labels_come_from_fixed_sets() {
        // AC-08-12
        // AC-04-25
        for (path, label) in [
            ("/pods", "pods"),
            ("/metrics", "metrics"),
            ("/metrics/cadvisor", "metrics/cadvisor"),
            ("/metrics/slis", "other"),
            ("/exec/a/b/c", "exec"),
            ("/debug/pprof/heap", "debug"),
            ("/", "other"),
            ("/podsx", "other"),
            ("/healthz/log", "healthz"),
        ] {
            assert_eq!(bucket(path), label, "{path}");
        }
        assert_eq!((method_label("PATCH"), method_label("BREW"), method_label("GET")), ("other", "other", "GET"));
        assert!(is_long_running("exec") && !is_long_running("portForward"));
    }
}
