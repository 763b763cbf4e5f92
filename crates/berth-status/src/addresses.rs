//! Pod IPs and host IPs of a pod status, IPv4 and IPv6. Pure. Implements spec 02b §6.1-6.2.

use std::net::IpAddr;

use berth_types::{Pod, api};

/// Selects at most two addresses: the first of the preferred family, then the first of the other.
pub fn pod_ips(reported: &[IpAddr], prefer_v6: bool) -> Vec<IpAddr> {
    let first_of = |v6: bool| reported.iter().find(|ip| ip.is_ipv6() == v6).copied();
    first_of(prefer_v6).into_iter().chain(first_of(!prefer_v6)).collect()
}

/// Selects at most two addresses: the first, then the first of the other family.
pub fn host_ips(node: &[IpAddr]) -> Vec<IpAddr> {
    let Some(first) = node.first() else { return Vec::new() };
    let other = node.iter().find(|ip| ip.is_ipv6() != first.is_ipv6());
    std::iter::once(*first).chain(other.copied()).collect()
}

/// Sets the pod IPs of a status.
pub(super) fn set_pod_ips(status: &mut api::PodStatus, ips: Vec<String>) {
    status.pod_ip = ips.first().cloned();
    status.pod_ips = Some(ips.into_iter().map(|ip| api::PodIP { ip }).collect()).filter(|l: &Vec<_>| !l.is_empty());
}

/// Pod IPs of a status.
pub(super) fn known_pod_ips(status: &api::PodStatus) -> Vec<String> {
    status.pod_ips.iter().flatten().map(|ip| ip.ip.clone()).collect()
}

/// Sets the host IPs, and the pod IPs of a host-network pod. Pod IPs of the previous status stay; an address of the
/// second family may be added.
pub(super) fn set_host_ips(status: &mut api::PodStatus, pod: &Pod, node: &[IpAddr], old: &api::PodStatus) {
    let hosts = host_ips(node);
    if hosts.is_empty() {
        status.host_ip.clone_from(&old.host_ip);
        status.host_ips.clone_from(&old.host_ips);
    } else {
        status.host_ip = hosts.first().map(IpAddr::to_string);
        status.host_ips = Some(hosts.iter().map(|ip| api::HostIP { ip: ip.to_string() }).collect());
    }
    if !pod.is_host_network() {
        return;
    }
    let mut ips = known_pod_ips(status);
    if ips.is_empty() {
        ips = known_pod_ips(old);
    }
    if ips.is_empty() {
        ips = hosts.first().map(IpAddr::to_string).into_iter().collect();
    }
    if let ([only], [_, second]) = (ips.as_slice(), hosts.as_slice())
        && only.parse::<IpAddr>().is_ok_and(|ip| ip.is_ipv6() != second.is_ipv6())
    {
        ips.push(second.to_string());
    }
    set_pod_ips(status, ips);
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::fixture::{pod, pod_with};

    fn ips(list: &[&str]) -> Vec<IpAddr> {
        list.iter().map(|ip| ip.parse().expect("an address")).collect()
    }

    #[test]
    fn pods_show_one_address_per_family_the_preferred_first() {
        for (reported, prefer_v6, expected) in [
            (&["10.0.0.1", "10.0.0.2", "fd::1"][..], false, &["10.0.0.1", "fd::1"][..]),
            // AC-02b-16
            (&["10.0.0.1", "fd::1"][..], true, &["fd::1", "10.0.0.1"][..]),
            (&["10.0.0.1"][..], true, &["10.0.0.1"][..]),
            (&[][..], false, &[][..]),
        ] {
            assert_eq!(pod_ips(&ips(reported), prefer_v6), ips(expected), "{reported:?}");
        }
        assert_eq!(host_ips(&ips(&["fd::1", "fd::2", "10.0.0.1"])), ips(&["fd::1", "10.0.0.1"]));
    }

    #[test]
    fn pods_on_the_nodes_network_keep_their_addresses() {
        let host = pod_with(serde_json::json!({"hostNetwork": true, "containers": []}));
        let old = |list: &[&str]| {
            let mut status = api::PodStatus::default();
            set_pod_ips(&mut status, list.iter().map(|s| (*s).to_owned()).collect());
            status
        };
        for (case, pod, node, before, expected) in [
            ("first time", &host, &["10.0.0.1"][..], old(&[]), &["10.0.0.1"][..]),
            ("set once", &host, &["10.0.0.9"][..], old(&["10.0.0.1"]), &["10.0.0.1"][..]),
            ("second family", &host, &["10.0.0.9", "fd::1"][..], old(&["10.0.0.1"]), &["10.0.0.1", "fd::1"][..]),
            ("same family", &host, &["fd::1", "10.0.0.9"][..], old(&["10.0.0.1"]), &["10.0.0.1"][..]),
            ("node unknown", &host, &[][..], old(&["10.0.0.1"]), &["10.0.0.1"][..]),
            ("own network", &pod("Always", &["c"]), &["10.0.0.1"][..], old(&[]), &[][..]),
        ] {
            let mut status = api::PodStatus::default();
            set_host_ips(&mut status, pod, &ips(node), &before);
            assert_eq!(known_pod_ips(&status), expected, "{case}");
            assert_eq!(status.host_ip.as_deref(), node.first().copied(), "{case}");
        }
    }
}
