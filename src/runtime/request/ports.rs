//! CRI port mappings of a sandbox. Pure. Implements spec 03a §5.3.

use std::{collections::HashSet, net::Ipv6Addr};

use berth_proto::cri;
use berth_types::{Pod, api};

/// The port mappings of all regular containers, in order. Within one container duplicates are dropped:
/// the same name or, for unnamed ports, the same address and numbers.
pub fn of_pod(pod: &Pod) -> Vec<cri::PortMapping> {
    pod.containers().iter().flat_map(of_container).collect()
}

fn of_container(container: &api::Container) -> Vec<cri::PortMapping> {
    let mut seen = HashSet::new();
    container.ports.iter().flatten().filter(|port| seen.insert(key(port))).map(mapping).collect()
}

fn key(port: &api::ContainerPort) -> String {
    if let Some(name) = port.name.as_deref().filter(|n| !n.is_empty()) {
        return name.to_owned();
    }
    let host_ip = port.host_ip.as_deref().unwrap_or_default();
    let family = match host_ip {
        "" => "any",
        ip if ip.parse::<Ipv6Addr>().is_ok() => "v6",
        _ => "v4",
    };
    let protocol = port.protocol.as_deref().unwrap_or_default();
    format!("{family}-{protocol}-{host_ip}:{}:{}", port.container_port, port.host_port.unwrap_or(0))
}

fn mapping(port: &api::ContainerPort) -> cri::PortMapping {
    let protocol = match port.protocol.as_deref() {
        Some("UDP") => cri::Protocol::Udp,
        Some("SCTP") => cri::Protocol::Sctp,
        _ => cri::Protocol::Tcp,
    };
    cri::PortMapping {
        protocol: protocol.into(),
        container_port: port.container_port,
        host_port: port.host_port.unwrap_or(0),
        host_ip: port.host_ip.clone().unwrap_or_default(),
    }
}

#[cfg(test)]
mod tests {
    use serde_json::{Value, json};

    use super::*;

    fn numbers(ports: Value) -> Vec<(i32, i32, i32)> {
        let object = json!({"metadata": {"name": "p", "namespace": "n", "uid": "u"}, "spec": {
            "initContainers": [{"name": "i", "ports": [{"containerPort": 1}]}],
            "containers": [{"name": "c", "ports": ports}]}});
        let pod = Pod::new(serde_json::from_value(object).expect("a pod")).expect("complete");
        of_pod(&pod).iter().map(|m| (m.protocol, m.container_port, m.host_port)).collect()
    }

    #[test]
    fn each_port_of_a_regular_container_counts_once() {
        for (ports, expected) in [
            (json!([{"containerPort": 80}]), vec![(0, 80, 0)]),
            (json!([{"containerPort": 80, "hostPort": 8080, "protocol": "UDP"}]), vec![(1, 80, 8080)]),
            (
                json!([{"containerPort": 80, "protocol": "SCTP"}, {"containerPort": 80, "protocol": "Odd"}]),
                vec![(2, 80, 0), (0, 80, 0)],
            ),
            (json!([{"containerPort": 80}, {"containerPort": 80}]), vec![(0, 80, 0)]),
            (json!([{"containerPort": 80, "name": "a"}, {"containerPort": 81, "name": "a"}]), vec![(0, 80, 0)]),
            (
                json!([{"containerPort": 80, "hostIP": "::1"}, {"containerPort": 80, "hostIP": "127.0.0.1"}]),
                vec![(0, 80, 0), (0, 80, 0)],
            ),
            (json!([]), vec![]),
        ] {
            assert_eq!(numbers(ports.clone()), expected, "{ports}");
        }
    }
}
