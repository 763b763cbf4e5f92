//! Probe request: target, action, and timeout of one probe. Pure.
//!
//! Built once per state of the container and reused for each attempt: its inputs are spread over the pod, and reading
//! them each time costs cache misses. Implements spec 05 §1.7.

use std::{
    sync::{Arc, OnceLock},
    time::Duration,
};

use super::{
    kind::{ProbeKind, ProbeTiming},
    outcome::Outcome,
    target::{self, HttpRequest},
};
use berth_types::{ContainerId, Pod, api};

/// Inputs of a probe's attempts on one container instance, with the request resolved once.
pub struct ProbeRequest {
    /// Pod of the probe.
    pub pod: Arc<Pod>,
    /// Name of the container.
    pub container: Arc<str>,
    /// Kind of the probe.
    pub kind: ProbeKind,
    /// Container instance.
    pub id: ContainerId,
    /// Address of the pod, if it has one.
    pub ip: Option<String>,
    made: OnceLock<ResolvedRequest>,
}

/// Request, resolved for the probe's handler.
pub struct ResolvedRequest {
    /// Timeout of one attempt.
    pub timeout: Duration,
    /// Target and action.
    pub what: ProbeAction,
}

/// Target and action of an attempt.
pub enum ProbeAction {
    /// exec: a command in the container.
    Command(Vec<String>),
    /// httpGet: an HTTP request.
    Http(Box<HttpRequest>),
    /// tcpSocket: a connection to a port.
    Tcp {
        /// Host of the port.
        host: String,
        /// Port number.
        port: u16,
    },
    /// grpc: a health check.
    Grpc {
        /// Host of the server.
        host: String,
        /// Port of the server.
        port: u16,
        /// Name of the service; empty for the server itself.
        service: String,
    },
    /// The request cannot be built; the outcome of each attempt.
    Invalid(Outcome),
}

impl ProbeRequest {
    /// Creates the request of one probe of an instance; `ip` is the address of its pod.
    pub fn new(pod: Arc<Pod>, container: Arc<str>, kind: ProbeKind, id: ContainerId, ip: Option<String>) -> Self {
        Self { pod, container, kind, id, ip, made: OnceLock::new() }
    }

    /// The request for the probe's handler, built at the first call.
    pub fn resolved(&self) -> &ResolvedRequest {
        self.made.get_or_init(|| self.make())
    }

    /// Returns whether the request for the handler has been built.
    #[cfg(test)]
    pub fn is_made(&self) -> bool {
        self.made.get().is_some()
    }

    fn make(&self) -> ResolvedRequest {
        let found =
            self.pod.container(&self.container).and_then(|(_, container)| Some((container, self.kind.of(container)?)));
        let Some((container, probe)) = found else {
            let what = ProbeAction::Invalid(Outcome::unknown("probe not found in the pod spec"));
            return ResolvedRequest { timeout: Duration::MAX / 2, what };
        };
        let what = what(container, probe, self.ip.as_deref()).unwrap_or_else(ProbeAction::Invalid);
        ResolvedRequest { timeout: ProbeTiming::of(probe).timeout, what }
    }
}

fn what(container: &api::Container, probe: &api::Probe, ip: Option<&str>) -> Result<ProbeAction, Outcome> {
    if let Some(action) = &probe.exec {
        let command = target::command(action, container).map_err(|e| Outcome::unknown(e.to_string()))?;
        return Ok(ProbeAction::Command(command));
    }
    if let Some(action) = &probe.http_get {
        return Ok(ProbeAction::Http(Box::new(HttpRequest::new(action, container, ip)?)));
    }
    if let Some(action) = &probe.tcp_socket {
        let port = target::port(&action.port, container).map_err(Outcome::unknown)?;
        let host = action.host.as_deref().filter(|host| !host.is_empty()).or(ip);
        let host = host.ok_or_else(|| Outcome::unknown(target::NO_ADDRESS))?.to_owned();
        return Ok(ProbeAction::Tcp { host, port });
    }
    if let Some(action) = &probe.grpc {
        let port = target::port_number(i64::from(action.port)).map_err(Outcome::unknown)?;
        let service = action.service.clone().unwrap_or_default();
        let host = ip.ok_or_else(|| Outcome::unknown(target::NO_ADDRESS))?.to_owned();
        return Ok(ProbeAction::Grpc { host, port, service });
    }
    Err(Outcome::unknown("missing probe handler"))
}

#[cfg(test)]
mod tests {
    use serde_json::{Value, json};

    use super::*;
    use crate::probes::testing::pod;

    fn ask(probe: &Value, ip: Option<&str>) -> ProbeRequest {
        let pod = pod(json!({"containers": [{"name": "c", "readinessProbe": probe}]}));
        ProbeRequest::new(pod, "c".into(), ProbeKind::Readiness, "c-0".into(), ip.map(str::to_owned))
    }

    #[test]
    fn who_is_asked_for_what_is_made_once() {
        let ask = ask(&json!({"exec": {"command": ["a", "b"]}, "timeoutSeconds": 7}), None);
        let ResolvedRequest { timeout, what: ProbeAction::Command(command) } = ask.resolved() else {
            panic!("a command")
        };
        assert_eq!((timeout.as_secs(), command.as_slice()), (7, &["a".to_owned(), "b".to_owned()][..]));
        assert!(std::ptr::eq(ask.resolved(), ask.resolved()));
    }

    #[test]
    fn a_pod_without_an_address_is_probed_at_the_host_of_the_probe() {
        let nowhere = Outcome::unknown(target::NO_ADDRESS);
        for (probe, has_host) in [
            (json!({"httpGet": {"port": 1}}), false),
            (json!({"httpGet": {"port": 1, "host": "h"}}), true),
            (json!({"tcpSocket": {"port": 1}}), false),
            (json!({"tcpSocket": {"port": 1, "host": ""}}), false),
            (json!({"tcpSocket": {"port": 1, "host": "h"}}), true),
            (json!({"grpc": {"port": 1}}), false),
        ] {
            for ip in [None, Some("10.0.0.1")] {
                let ask = ask(&probe, ip);
                let expected = (!has_host && ip.is_none()).then_some(&nowhere);
                let invalid = match &ask.resolved().what {
                    ProbeAction::Invalid(outcome) => Some(outcome),
                    ProbeAction::Tcp { host, .. } if has_host => {
                        assert_eq!(host, "h");
                        None
                    }
                    ProbeAction::Tcp { host, .. } | ProbeAction::Grpc { host, .. } => {
                        assert_eq!(Some(host.as_str()), ip);
                        None
                    }
                    ProbeAction::Http(_) | ProbeAction::Command(_) => None,
                };
                assert_eq!(invalid, expected, "{probe} {ip:?}");
            }
        }
    }

    #[test]
    fn a_missing_probe_sends_no_request() {
        let of = |container: &str, kind| {
            let there = ask(&json!({"tcpSocket": {"port": 1}}), None);
            ProbeRequest::new(there.pod.clone(), container.into(), kind, "c-0".into(), None)
        };
        for ask in [of("d", ProbeKind::Readiness), of("c", ProbeKind::Liveness)] {
            let ProbeAction::Invalid(outcome) = &ask.resolved().what else { panic!("nobody") };
            assert_eq!(*outcome, Outcome::unknown("probe not found in the pod spec"));
        }
    }
}
