//! Veth pair between a pod and the bridge.
//!
//! The host end has the sandbox id as its alias, so that it is found whatever its name. Blocking.
//! Implements spec 09b §11.2-§11.4, §14.

use std::{
    collections::BTreeSet,
    fs, io,
    net::IpAddr,
    os::fd::{AsRawFd, BorrowedFd},
    thread,
    time::Duration,
};

use nix::errno::Errno;
use tracing::warn;

use super::{
    bandwidth::{self, Bandwidth},
    bridge::{self, Bridge},
    cidr::Cidr,
    names,
};
use berth_sys::{
    net_namespace,
    netlink::{
        NetlinkFamily, Socket,
        rtnetlink::{self, Link, VethPair},
    },
};

/// Interface index of the loopback, in every namespace.
const LOOPBACK: u32 = 1;
/// Number of polls for a running link and the delay between them: half a second in total.
const POLLS: u32 = 250;
const POLL_INTERVAL: Duration = Duration::from_millis(2);

/// Inputs of a pod's attachment to the bridge.
#[derive(Clone, Copy, Debug)]
pub struct PodLinkSpec<'a> {
    /// Sandbox id.
    pub sandbox: &'a str,
    /// The pod's network namespace.
    pub namespace: BorrowedFd<'a>,
    /// Index and MTU of the bridge that the host end joins.
    pub bridge: Bridge,
    /// Interface name of the bridge, to wait until its link runs.
    pub bridge_name: &'a str,
    /// The pod's addresses, each with its range.
    pub addresses: &'a [(IpAddr, Cidr)],
    /// Bandwidth limits.
    pub bandwidth: Bandwidth,
}

/// Creates the veth pair, addresses, and routes. Removes them on failure.
///
/// # Errors
/// A kernel request fails.
pub fn attach(join: &PodLinkSpec<'_>) -> io::Result<()> {
    let mut socket = Socket::open(NetlinkFamily::Route)?;
    let name = make_pair(&mut socket, join)?;
    let configured = configure(&mut socket, join, &name);
    if configured.is_err() {
        // The error to report is that of the configuration.
        let _ = detach(join.sandbox);
    }
    configured
}

fn make_pair(socket: &mut Socket, join: &PodLinkSpec<'_>) -> io::Result<String> {
    let addresses: Vec<IpAddr> = join.addresses.iter().map(|(a, _)| *a).collect();
    for name in names::host_ends(join.sandbox) {
        let pair = VethPair {
            name: &name,
            bridge: join.bridge.index,
            peer: names::POD_LINK,
            mac: names::pod_mac(&addresses),
            namespace: join.namespace.as_raw_fd(),
            mtu: join.bridge.mtu,
        };
        let made = socket.request_all(vec![rtnetlink::new_veth_pair(&pair), rtnetlink::set_port(&name, join.sandbox)]);
        match made {
            Ok(()) => return Ok(name),
            Err(e) if e.index == 0 && e.is(Errno::EEXIST) => {
                if bridge::find(socket, &name)?.is_none() {
                    return Err(io::Error::new(io::ErrorKind::AlreadyExists, "pod already has an interface eth0"));
                }
            }
            Err(e) => {
                remove_unnamed(socket, &name, e.index);
                return Err(e.into());
            }
        }
    }
    Err(Errno::EEXIST.into())
}

/// Removes a pair whose host end could not be marked with the sandbox id.
fn remove_unnamed(socket: &mut Socket, name: &str, failed_at: usize) {
    if let (1, Ok(Some(link))) = (failed_at, bridge::find(socket, name)) {
        // The earlier failure is the one to report.
        let _ = socket.request(rtnetlink::delete_link(link.index));
    }
}

fn configure(socket: &mut Socket, join: &PodLinkSpec<'_>, host_end: &str) -> io::Result<()> {
    // Another pod may have had the address recently: without stale neighbor entries, replies reach this pod at once.
    socket.request_each(
        join.addresses.iter().map(|(a, _)| rtnetlink::delete_neighbour(join.bridge.index, *a)).collect(),
    )?;
    bridge::set_optional(&format!("ipv6/conf/{host_end}/accept_ra"), "0");
    if let Some(bits) = join.bandwidth.ingress {
        let link = bridge::find(socket, host_end)?.ok_or(Errno::ENODEV)?;
        socket.request(rtnetlink::set_bucket(link.index, &bandwidth::bucket(bits, join.bridge.mtu)))?;
    }
    net_namespace::within(join.namespace, || inside(join))?;
    wait_until_running(socket, host_end)?;
    wait_until_running(socket, join.bridge_name)
}

/// Waits for the link to run: packets sent earlier are lost, and the pod's first datagrams with them.
fn wait_until_running(socket: &mut Socket, link: &str) -> io::Result<()> {
    for _ in 0..POLLS {
        if bridge::find(socket, link)?.ok_or(Errno::ENODEV)?.is_running {
            return Ok(());
        }
        thread::sleep(POLL_INTERVAL);
    }
    warn!(link, "Timed out waiting for network interface to be running");
    Ok(())
}

fn inside(join: &PodLinkSpec<'_>) -> io::Result<()> {
    let link = names::POD_LINK;
    // Other pods may send router advertisements even where no pod has an IPv6 address (CVE-2020-10749).
    bridge::set_optional(&format!("ipv6/conf/{link}/accept_ra"), "0");
    if join.addresses.iter().any(|(a, _)| a.is_ipv6()) {
        for (key, value) in [("disable_ipv6", "0"), ("accept_dad", "0")] {
            bridge::set_optional(&format!("ipv6/conf/{link}/{key}"), value);
        }
    }
    // Announces the address by gratuitous ARP as soon as the link is up.
    bridge::set_optional(&format!("ipv4/conf/{link}/arp_notify"), "1");
    let mut socket = Socket::open(NetlinkFamily::Route)?;
    let link = bridge::find(&mut socket, link)?.ok_or(Errno::ENODEV)?.index;
    let of = |is_v6| join.addresses.iter().filter(move |(a, _)| a.is_ipv6() == is_v6);
    let address = |(a, net): &(IpAddr, Cidr)| rtnetlink::new_address(link, *a, net.prefix());
    let mut all = vec![rtnetlink::up(LOOPBACK)];
    all.extend(of(false).map(address));
    all.push(rtnetlink::up(link));
    all.extend(of(true).map(address));
    all.extend(join.addresses.iter().map(|(_, net)| rtnetlink::new_default_route(link, net.gateway())));
    if let Some(bits) = join.bandwidth.egress {
        all.push(rtnetlink::set_bucket(link, &bandwidth::bucket(bits, join.bridge.mtu)));
    }
    socket.request_all(all)?;
    wait_until_running(&mut socket, names::POD_LINK)?;
    wait_until_asked(join)
}

/// Waits until the kernel has joined the solicited-node groups, shortly after it accepted an IPv6 address: an earlier
/// neighbor solicitation is only repeated after a second.
fn wait_until_asked(join: &PodLinkSpec<'_>) -> io::Result<()> {
    let groups: Vec<String> = join.addresses.iter().filter_map(|(a, _)| names::solicited_group(*a)).collect();
    for _ in 0..POLLS {
        let joined = if groups.is_empty() { String::new() } else { fs::read_to_string("/proc/thread-self/net/igmp6")? };
        let of_pod: Vec<&str> = joined.lines().filter(|line| line.contains(names::POD_LINK)).collect();
        if groups.iter().all(|group| of_pod.iter().any(|line| line.contains(group))) {
            return Ok(());
        }
        thread::sleep(POLL_INTERVAL);
    }
    warn!(podSandboxID = join.sandbox, "Timed out waiting for pod to join its solicited-node multicast groups");
    Ok(())
}

/// Sets the loopback of a namespace up.
///
/// # Errors
/// A kernel request fails.
pub fn loopback_up(namespace: BorrowedFd<'_>) -> io::Result<()> {
    net_namespace::within(namespace, || Socket::open(NetlinkFamily::Route)?.request(rtnetlink::up(LOOPBACK)))
}

/// Removes the veth pair of a sandbox; a missing pair is not an error.
///
/// # Errors
/// A kernel request fails.
pub fn detach(sandbox: &str) -> io::Result<()> {
    let mut socket = Socket::open(NetlinkFamily::Route)?;
    for name in names::host_ends(sandbox) {
        match bridge::find(&mut socket, &name)? {
            Some(link) if link.alias == sandbox => return gone(socket.request(rtnetlink::delete_link(link.index))),
            // The pair may have a later candidate name, if the first one was taken.
            _ => {}
        }
    }
    Ok(())
}

fn gone(result: io::Result<()>) -> io::Result<()> {
    match result {
        Err(e) if e.raw_os_error() == Some(Errno::ENODEV as i32) => Ok(()),
        other => other,
    }
}

/// The host ends of pods on a bridge.
///
/// # Errors
/// The kernel request fails.
pub fn ports(bridge: Bridge) -> io::Result<Vec<Link>> {
    let all = Socket::open(NetlinkFamily::Route)?.dump(&rtnetlink::get_links())?;
    let links = all.iter().filter_map(rtnetlink::link);
    Ok(links.filter(|l| l.master == bridge.index && l.kind == "veth" && names::is_host_end(&l.name)).collect())
}

/// The ids of sandboxes with a link on this host, whatever bridge it belongs to.
///
/// # Errors
/// The kernel request fails.
pub fn linked() -> io::Result<BTreeSet<String>> {
    let all = Socket::open(NetlinkFamily::Route)?.dump(&rtnetlink::get_links())?;
    let links = all.iter().filter_map(rtnetlink::link);
    Ok(links.filter(|l| l.kind == "veth" && names::is_host_end(&l.name)).map(|l| l.alias).collect())
}

/// Removes links.
///
/// # Errors
/// A kernel request fails; a missing link is not an error.
pub fn delete(links: &[Link]) -> io::Result<()> {
    let mut socket = Socket::open(NetlinkFamily::Route)?;
    links.iter().try_for_each(|link| gone(socket.request(rtnetlink::delete_link(link.index))))
}

/// Attaches links to a bridge, and sets their port options (hairpin mode).
///
/// # Errors
/// A kernel request fails.
pub fn adopt(bridge: Bridge, chosen: impl Fn(&Link) -> bool) -> io::Result<()> {
    let mut socket = Socket::open(NetlinkFamily::Route)?;
    let all = socket.dump(&rtnetlink::get_links())?;
    for link in all.iter().filter_map(rtnetlink::link).filter(|l| l.kind == "veth" && chosen(l)) {
        socket.request_all(vec![
            rtnetlink::set_master(link.index, bridge.index),
            rtnetlink::set_port(&link.name, &link.alias),
        ])?;
    }
    Ok(())
}
