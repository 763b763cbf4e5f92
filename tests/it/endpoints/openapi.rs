//! Consistency of `api/openapi.yaml` and the routing table: same paths and methods.

use std::collections::{BTreeMap, BTreeSet};

use berth_server::routing::{self, EnabledEndpoints, Endpoint, PathRoute, PlainEndpoint, ServiceRoute};
use serde_json::Value;

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
const METHODS: [&str; 5] = ["GET", "POST", "PUT", "DELETE", "PATCH"];

/// Path templates of the document with their methods.
fn described() -> BTreeMap<String, BTreeSet<String>> {
    let text = std::fs::read_to_string(concat!(env!("CARGO_MANIFEST_DIR"), "/api/openapi.yaml")).expect("readable");
    let document: Value = serde_saphyr::from_str(&text).expect("YAML");
    assert_eq!(document["openapi"], "3.1.0");
    let paths = document["paths"].as_object().expect("paths");
    let methods = |operations: &Value| {
        let names = operations.as_object().expect("operations").keys().map(|key| key.to_uppercase());
        names.filter(|name| METHODS.contains(&name.as_str())).collect()
    };
    paths.iter().map(|(path, operations)| (path.clone(), methods(operations))).collect()
}

/// An example path of a template.
fn example(template: &str) -> String {
    let values = [("{check}", "ping"), ("{path}", "a/b"), ("{name}", "profile")];
    let mut path = values.iter().fold(template.to_owned(), |path, (name, value)| path.replace(name, value));
    for name in ["namespace", "pod", "uid", "container"] {
        path = path.replace(&format!("{{{name}}}"), name);
    }
    assert!(!path.contains('{'), "{template} has a parameter the test does not know");
    path
}

/// The template of a routed endpoint. The match is exhaustive: a new endpoint does not compile without an arm.
fn template(endpoint: &Endpoint) -> String {
    let container = |path: &routing::ContainerPath, root: &str| match path.pod.uid {
        Some(_) => format!("/{root}/{{namespace}}/{{pod}}/{{uid}}/{{container}}"),
        None => format!("/{root}/{{namespace}}/{{pod}}/{{container}}"),
    };
    match endpoint {
        Endpoint::Pods => "/pods".to_owned(),
        Endpoint::Summary => "/stats/summary".to_owned(),
        Endpoint::Run(path) => container(path, "run"),
        Endpoint::Exec(path) => container(path, "exec"),
        Endpoint::Attach(path) => container(path, "attach"),
        Endpoint::PortForward(path) if path.uid.is_some() => "/portForward/{namespace}/{pod}/{uid}".to_owned(),
        Endpoint::PortForward(_) => "/portForward/{namespace}/{pod}".to_owned(),
        Endpoint::ContainerLogs(path) => container(path, "containerLogs"),
        Endpoint::RunningPods => "/runningpods/".to_owned(),
        Endpoint::Checkpoint(path) => container(path, "checkpoint"),
        Endpoint::Logs(rest) if rest.is_empty() => "/logs/".to_owned(),
        Endpoint::Logs(_) => "/logs/{path}".to_owned(),
        Endpoint::Pprof(rest) if rest.is_empty() => "/debug/pprof/".to_owned(),
        Endpoint::Why(_) => "/debug/why/{namespace}/{pod}".to_owned(),
        Endpoint::Devices => "/debug/devices".to_owned(),
        Endpoint::Topology => "/debug/topology".to_owned(),
        Endpoint::Pprof(_) => "/debug/pprof/{name}".to_owned(),
    }
}

/// The template and the intended methods of a plain handler.
fn plain(plain: &PlainEndpoint) -> (&'static str, &'static [&'static str]) {
    match plain {
        PlainEndpoint::Healthz => ("/healthz", &["GET"]),
        PlainEndpoint::HealthCheck(_) => ("/healthz/{check}", &["GET"]),
        PlainEndpoint::Metrics => ("/metrics", &["GET"]),
        PlainEndpoint::Cadvisor => ("/metrics/cadvisor", &["GET"]),
        PlainEndpoint::Resource => ("/metrics/resource", &["GET"]),
        PlainEndpoint::Probes => ("/metrics/probes", &["GET"]),
        PlainEndpoint::Slis => ("/metrics/slis", &["GET", "DELETE"]),
        PlainEndpoint::Configz => ("/configz", &["GET"]),
        PlainEndpoint::Statusz => ("/statusz", &["GET"]),
        PlainEndpoint::Flagz => ("/flagz", &["GET"]),
        PlainEndpoint::Verbosity => ("/debug/flags/v", &["PUT"]),
        PlainEndpoint::Disabled(_) => panic!("everything is switched on"),
    }
}

/// Example paths for every route of the routing table.
const PROBES: &[&str] = &[
    "/healthz",
    "/healthz/ping",
    "/pods",
    "/stats/summary",
    "/metrics",
    "/metrics/cadvisor",
    "/metrics/resource",
    "/metrics/probes",
    "/metrics/slis",
    "/run/n/p/c",
    "/run/n/p/u/c",
    "/exec/n/p/c",
    "/exec/n/p/u/c",
    "/attach/n/p/c",
    "/attach/n/p/u/c",
    "/portForward/n/p",
    "/portForward/n/p/u",
    "/containerLogs/n/p/c",
    "/runningpods/",
    "/configz",
    "/checkpoint/n/p/c",
    "/logs/",
    "/logs/x/y",
    "/debug/pprof/",
    "/debug/pprof/profile",
    "/debug/why/n/p",
    "/debug/devices",
    "/debug/topology",
    "/debug/flags/v",
    "/flagz",
    "/statusz",
];

/// The template and methods that the routing table yields for a path; `None` if it is unknown.
fn routed(path: &str) -> Option<(String, BTreeSet<String>)> {
    let named = |methods: &[&str]| methods.iter().map(|method| (*method).to_owned()).collect();
    match routing::outer(path, None, &ALL, CHECKS) {
        PathRoute::Plain(handler) => {
            let (template, methods) = plain(&handler);
            Some((template.to_owned(), named(methods)))
        }
        PathRoute::Service(path) => {
            let mut found = None;
            let mut methods = BTreeSet::new();
            for method in METHODS {
                if let ServiceRoute::Found(endpoint) = routing::service(method, &path, None) {
                    methods.insert(method.to_owned());
                    found = Some(template(&endpoint));
                }
            }
            Some((found?, methods))
        }
        _ => None,
    }
}

#[test]
fn what_is_described_is_routed() {
    for (template, methods) in described() {
        let path = example(&template);
        assert_eq!(routed(&path), Some((template.clone(), methods)), "{template}, asked as {path}");
    }
}

#[test]
fn what_is_routed_is_described() {
    let described = described();
    let routed: BTreeMap<String, BTreeSet<String>> = PROBES.iter().filter_map(|path| routed(path)).collect();
    assert_eq!(routed.len(), PROBES.len(), "a probe that is not routed, or two of one template");
    assert_eq!(routed.keys().collect::<Vec<_>>(), described.keys().collect::<Vec<_>>());
}
