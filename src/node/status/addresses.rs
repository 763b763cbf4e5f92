//! Node addresses setter: `--node-ip`, host name, name resolution, default route. Pure.
//!
//! Implements spec 01 §12.2, 05 §4.4. Precedence as in kubelet: configured addresses, the host name, the default route.
//! A configured or resolved address counts only if it is usable by others and assigned to this machine; a host name
//! that is itself an IP address is taken as it is.

use std::net::IpAddr;

use super::{StatusBuilder, StatusSettings};
use berth_types::api;

/// Annotation with the configured node IPs, read by an external cloud provider.
const PROVIDED: &str = "alpha.kubernetes.io/provided-node-ip";

/// IP address of a network interface, as `getifaddrs` reports it.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct InterfaceAddress {
    /// Interface name.
    pub interface: String,
    /// IP address.
    pub ip: IpAddr,
    /// Whether the interface is up.
    pub is_up: bool,
}

/// Observation of the machine's network.
#[derive(Clone, PartialEq, Eq, Debug, Default)]
pub struct HostNetworkState {
    /// Addresses of all interfaces, in the kernel's order.
    pub addresses: Vec<InterfaceAddress>,
    /// Interfaces of IPv4 default routes, in the order of the kernel's table.
    pub default_v4: Vec<String>,
    /// Interfaces of IPv6 default routes, in the order of the kernel's table.
    pub default_v6: Vec<String>,
    /// Addresses that the node's name resolves to; empty if it was not resolved.
    pub resolved: Vec<IpAddr>,
}

/// Whether the node's name has to be resolved to find an address.
pub fn needs_name(settings: &StatusSettings) -> bool {
    specific(settings).is_empty() && !expects_cloud_addresses(settings) && settings.hostname.parse::<IpAddr>().is_err()
}

/// Whether an external cloud provider reports the addresses and no `--node-ip` is set. With an unspecified `--node-ip`
/// (`0.0.0.0`, `::`), the node starts with the address it would have without a cloud.
fn expects_cloud_addresses(settings: &StatusSettings) -> bool {
    settings.node.is_cloud_external && settings.node_ips.is_empty()
}

/// Configured addresses without unspecified ones.
fn specific(settings: &StatusSettings) -> Vec<IpAddr> {
    settings.node_ips.iter().copied().filter(|ip| !ip.is_unspecified()).collect()
}

pub(super) fn set(work: &mut StatusBuilder<'_>) {
    let given = specific(work.settings);
    if let Some(why) = given.iter().find_map(|ip| invalid(*ip, &work.known.network)) {
        work.errors.push(format!("failed to validate nodeIP: {why}"));
        return;
    }
    annotate(work, &given);
    let is_cloud = work.settings.node.is_cloud_external;
    if is_cloud && work.status.addresses.as_ref().is_some_and(|known| !known.is_empty()) {
        return;
    }
    let ips = match &*given {
        [] if expects_cloud_addresses(work.settings) => Vec::new(),
        [] => match detect(work.settings, &work.known.network) {
            Ok(ip) => vec![ip],
            Err(why) => return work.errors.push(why),
        },
        given => given.to_vec(),
    };
    let address = |kind: &str, address: String| api::NodeAddress { type_: kind.to_owned(), address };
    let mut addresses: Vec<_> = ips.iter().map(|ip| address("InternalIP", ip.to_string())).collect();
    addresses.push(address("Hostname", work.settings.hostname.clone()));
    work.status.addresses = Some(addresses);
}

fn annotate(work: &mut StatusBuilder<'_>, given: &[IpAddr]) {
    let annotations = &mut work.node.metadata.annotations;
    if work.settings.node.is_cloud_external && !given.is_empty() {
        let text = given.iter().map(IpAddr::to_string).collect::<Vec<_>>().join(",");
        annotations.get_or_insert_default().insert(PROVIDED.to_owned(), text);
    } else if let Some(annotations) = annotations {
        annotations.remove(PROVIDED);
    }
}

fn detect(settings: &StatusSettings, network: &HostNetworkState) -> Result<IpAddr, String> {
    if let Ok(ip) = settings.hostname.parse::<IpAddr>() {
        return Ok(ip);
    }
    let prefers_v6 = settings.node_ips.first().is_some_and(IpAddr::is_ipv6);
    let valid: Vec<IpAddr> = network.resolved.iter().copied().filter(|ip| invalid(*ip, network).is_none()).collect();
    let preferred = valid.iter().find(|ip| ip.is_ipv6() == prefers_v6).or(valid.first()).copied();
    preferred.or_else(|| by_default_route(network, prefers_v6)).ok_or_else(|| {
        let name = &settings.name;
        let why = "no default routes found in \"/proc/net/route\" or \"/proc/net/ipv6_route\"";
        format!("can't get ip address of node {name}. error: {why}")
    })
}

/// First usable address of the interface of the default route; falls back to the other IP version if the preferred one
/// has none.
pub(in crate::node) fn by_default_route(network: &HostNetworkState, prefers_v6: bool) -> Option<IpAddr> {
    let of_version = |is_v6: bool| {
        let interfaces = if is_v6 { &network.default_v6 } else { &network.default_v4 };
        interfaces.iter().find_map(|interface| {
            let own = network.addresses.iter().filter(|own| own.interface == *interface && own.is_up);
            own.map(|own| own.ip).find(|ip| ip.is_ipv6() == is_v6 && unusable(*ip).is_none())
        })
    };
    of_version(prefers_v6).or_else(|| of_version(!prefers_v6))
}

/// Why an address can never be a node address; `None` if it can.
fn unusable(ip: IpAddr) -> Option<&'static str> {
    let link_local = match ip {
        IpAddr::V4(ip) => ip.is_link_local(),
        IpAddr::V6(ip) => ip.is_unicast_link_local(),
    };
    if ip.is_loopback() {
        Some("nodeIP can't be loopback address")
    } else if ip.is_multicast() {
        Some("nodeIP can't be a multicast address")
    } else if link_local {
        Some("nodeIP can't be a link-local unicast address")
    } else {
        ip.is_unspecified().then_some("nodeIP can't be an all zeros address")
    }
}

/// Why an address cannot be this node's; `None` if it can.
pub fn invalid(ip: IpAddr, network: &HostNetworkState) -> Option<String> {
    let known = || network.addresses.iter().any(|own| own.ip == ip);
    match unusable(ip) {
        Some(why) => Some(why.to_owned()),
        None if known() => None,
        None => Some(format!("node IP: \"{ip}\" not found in the host's network interfaces")),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::node::{
        NodeConfig,
        status::{ReportedState, draft, tests::known},
    };

    fn network(resolved: &[&str]) -> HostNetworkState {
        let own = |interface: &str, ip: &str, is_up| InterfaceAddress {
            interface: interface.to_owned(),
            ip: ip.parse().expect("an address"),
            is_up,
        };
        HostNetworkState {
            addresses: vec![
                own("lo", "127.0.0.1", true),
                own("eth1", "192.168.0.9", false),
                own("eth0", "10.0.0.2", true),
                own("eth0", "fe80::1", true),
                own("eth0", "fd00::2", true),
            ],
            default_v4: vec!["eth1".to_owned(), "eth0".to_owned()],
            default_v6: vec!["eth0".to_owned()],
            resolved: resolved.iter().map(|ip| ip.parse().expect("an address")).collect(),
        }
    }

    struct Case {
        node_ips: &'static str,
        hostname: &'static str,
        resolved: &'static [&'static str],
        external: bool,
        before: &'static str,
    }

    const PLAIN: Case = Case { node_ips: "", hostname: "n", resolved: &[], external: false, before: "" };

    fn addresses(case: &Case, network: HostNetworkState) -> (String, Option<String>, Vec<String>) {
        let node_ips: Vec<IpAddr> = case.node_ips.split(',').filter_map(|ip| ip.parse().ok()).collect();
        let settings = StatusSettings {
            name: "n".to_owned(),
            hostname: case.hostname.to_owned(),
            node_ips,
            node: NodeConfig { is_cloud_external: case.external, ..NodeConfig::default() },
            ..StatusSettings::default()
        };
        let before = api::NodeAddress { type_: "ExternalIP".to_owned(), address: case.before.to_owned() };
        let mut base = api::Node::default();
        base.metadata.annotations = Some([(PROVIDED.to_owned(), "old".to_owned())].into());
        base.status.get_or_insert_default().addresses = (!case.before.is_empty()).then(|| vec![before]);
        let known = super::super::NodeObservation { network, ..known() };
        let draft = draft(&settings, &base, &known, &mut ReportedState::default());
        let addresses = draft.node.status.expect("set").addresses.unwrap_or_default();
        let texts: Vec<String> = addresses.iter().map(|a| format!("{}={}", a.type_, a.address)).collect();
        let annotation = draft.node.metadata.annotations.and_then(|mut a| a.remove(PROVIDED));
        (texts.join(" "), annotation, draft.errors)
    }

    #[test]
    fn addresses_are_chosen_in_the_references_order() {
        let check = |case: Case, expected: &str| {
            let (reported, _, errors) = addresses(&case, network(case.resolved));
            assert_eq!((reported.as_str(), errors), (expected, Vec::new()));
        };
        check(Case { node_ips: "10.0.0.2", ..PLAIN }, "InternalIP=10.0.0.2 Hostname=n");
        check(Case { node_ips: "fd00::2,10.0.0.2", ..PLAIN }, "InternalIP=fd00::2 InternalIP=10.0.0.2 Hostname=n");
        check(Case { hostname: "10.9.9.9", ..PLAIN }, "InternalIP=10.9.9.9 Hostname=10.9.9.9");
        check(Case { resolved: &["127.0.1.1", "fd00::2", "10.0.0.2"], ..PLAIN }, "InternalIP=10.0.0.2 Hostname=n");
        check(Case { resolved: &["fd00::2", "8.8.8.8"], ..PLAIN }, "InternalIP=fd00::2 Hostname=n");
        check(PLAIN, "InternalIP=10.0.0.2 Hostname=n");
        check(Case { node_ips: "::", ..PLAIN }, "InternalIP=fd00::2 Hostname=n");
        check(Case { node_ips: "::", resolved: &["10.0.0.2", "fd00::2"], ..PLAIN }, "InternalIP=fd00::2 Hostname=n");
        check(Case { external: true, ..PLAIN }, "Hostname=n");
        for (all, own) in [("0.0.0.0", "10.0.0.2"), ("::", "fd00::2")] {
            check(Case { external: true, node_ips: all, ..PLAIN }, &format!("InternalIP={own} Hostname=n"));
        }
        check(Case { external: true, before: "1.1.1.1", ..PLAIN }, "ExternalIP=1.1.1.1");
        check(Case { external: true, node_ips: "10.0.0.2", ..PLAIN }, "InternalIP=10.0.0.2 Hostname=n");
    }

    #[test]
    fn what_cannot_be_an_address_leaves_them_as_they_were() {
        for (ip, why) in [
            ("127.0.0.1", "nodeIP can't be loopback address"), // AC-05-25
            ("224.0.0.1", "nodeIP can't be a multicast address"),
            ("fe80::1", "nodeIP can't be a link-local unicast address"),
            ("10.0.0.7", "node IP: \"10.0.0.7\" not found in the host's network interfaces"),
        ] {
            let case = Case { node_ips: ip, before: "1.1.1.1", ..PLAIN };
            let (reported, _, errors) = addresses(&case, network(&[]));
            assert_eq!(reported, "ExternalIP=1.1.1.1");
            assert_eq!(errors, [format!("failed to validate nodeIP: {why}")]);
        }
        let (_, _, errors) = addresses(&PLAIN, HostNetworkState::default());
        assert!(errors[0].starts_with("can't get ip address of node n. error: no default routes"), "{errors:?}");
    }

    #[test]
    fn configured_node_ips_are_annotated_for_an_external_cloud() {
        let annotation = |case: Case| addresses(&case, network(&[])).1;
        let given = Case { external: true, node_ips: "10.0.0.2,fd00::2", ..PLAIN };
        assert_eq!(annotation(given).as_deref(), Some("10.0.0.2,fd00::2"));
        assert_eq!(annotation(Case { external: true, ..PLAIN }), None);
        assert_eq!(annotation(Case { node_ips: "10.0.0.2", ..PLAIN }), None);
    }
}
