//! Admission predicate `NodePorts`: host port conflicts between pods. Pure. Implements spec 02a §6.2.

use std::sync::Arc;

use super::PredicateFailure;
use berth_types::{Pod, api};

pub(super) fn check<'a>(pod: &Pod, others: impl Iterator<Item = &'a Arc<Pod>>) -> Option<PredicateFailure> {
    let wanted: Vec<HostPort<'_>> = host_ports(pod).collect();
    if wanted.is_empty() {
        return None;
    }
    let mut taken = others.flat_map(|other| host_ports(other));
    taken.any(|port| wanted.iter().any(|own| own.conflicts(&port))).then_some(PredicateFailure::Predicate {
        name: "NodePorts",
        text: "node(s) didn't have free ports for the requested pod ports",
    })
}

struct HostPort<'a> {
    protocol: &'a str,
    port: i32,
    address: &'a str,
}

impl HostPort<'_> {
    fn conflicts(&self, other: &Self) -> bool {
        const ANY: &str = "0.0.0.0";
        self.protocol == other.protocol
            && self.port == other.port
            && (self.address == ANY || other.address == ANY || self.address == other.address)
    }
}

/// Host ports of regular containers and sidecars.
fn host_ports(pod: &Pod) -> impl Iterator<Item = HostPort<'_>> {
    let sidecars = pod.init_containers().iter().filter(|c| Pod::is_sidecar(c));
    pod.containers().iter().chain(sidecars).flat_map(|c| c.ports.iter().flatten()).filter_map(host_port)
}

fn host_port(port: &api::ContainerPort) -> Option<HostPort<'_>> {
    let filled = |text: &'_ Option<String>| text.as_ref().is_some_and(|t| !t.is_empty());
    Some(HostPort {
        port: port.host_port.filter(|p| *p > 0)?,
        protocol: port.protocol.as_deref().filter(|_| filled(&port.protocol)).unwrap_or("TCP"),
        address: port.host_ip.as_deref().filter(|_| filled(&port.host_ip)).unwrap_or("0.0.0.0"),
    })
}
