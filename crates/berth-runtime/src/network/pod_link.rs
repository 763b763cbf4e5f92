//! The pair of links that joins a pod to the bridge.
//!
//! The host's end carries the sandbox's id as its alias, so that it is found again whatever its name. Blocking.
//! Behaviour: spec 09b §11.2-§11.4, §14.

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
        Protocol, Socket,
        route::{self, Link, Pair},
    },
};

/// The loopback's number, in every namespace.
const LOOPBACK: u32 = 1;
/// Looks at a link that does not run yet, and the time between them: half a second.
const LOOKS: u32 = 250;
const BETWEEN_LOOKS: Duration = Duration::from_millis(2);

/// What is joined to what.
#[derive(Clone, Copy, Debug)]
pub struct Join<'a> {
    /// The sandbox.
    pub sandbox: &'a str,
    /// Its network namespace.
    pub namespace: BorrowedFd<'a>,
    /// The bridge.
    pub bridge: Bridge,
    /// Its name.
    pub bridge_name: &'a str,
    /// The pod's addresses, each with its range.
    pub addresses: &'a [(IpAddr, Cidr)],
    /// How fast it may be.
    pub bandwidth: Bandwidth,
}

/// Makes the pair, addresses and routes. Whatever was made is removed when something fails.
///
/// # Errors
/// What the kernel says.
pub fn attach(join: &Join<'_>) -> io::Result<()> {
    let mut socket = Socket::open(Protocol::Route)?;
    let name = make_pair(&mut socket, join)?;
    let configured = configure(&mut socket, join, &name);
    if configured.is_err() {
        // What counts is why it could not be configured.
        let _ = detach(join.sandbox);
    }
    configured
}

fn make_pair(socket: &mut Socket, join: &Join<'_>) -> io::Result<String> {
    let addresses: Vec<IpAddr> = join.addresses.iter().map(|(a, _)| *a).collect();
    for name in names::host_ends(join.sandbox) {
        let pair = Pair {
            name: &name,
            bridge: join.bridge.index,
            peer: names::POD_LINK,
            mac: names::pod_mac(&addresses),
            namespace: join.namespace.as_raw_fd(),
            mtu: join.bridge.mtu,
        };
        let made = socket.all(vec![route::new_pair(&pair), route::set_port(&name, join.sandbox)]);
        match made {
            Ok(()) => return Ok(name),
            Err(e) if e.index == 0 && e.is(Errno::EEXIST) => {
                if bridge::find(socket, &name)?.is_none() {
                    return Err(io::Error::new(io::ErrorKind::AlreadyExists, "the pod has a link eth0 already"));
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

/// A pair that was made, but whose host's end could not be marked as ours.
fn remove_unnamed(socket: &mut Socket, name: &str, failed_at: usize) {
    if let (1, Ok(Some(link))) = (failed_at, bridge::find(socket, name)) {
        // The failure before is the one that is told.
        let _ = socket.request(route::delete_link(link.index));
    }
}

fn configure(socket: &mut Socket, join: &Join<'_>, host_end: &str) -> io::Result<()> {
    // Another pod may have had the address a while ago: answers come back to this one at once.
    socket.each(join.addresses.iter().map(|(a, _)| route::delete_neighbour(join.bridge.index, *a)).collect())?;
    bridge::attempt(&format!("ipv6/conf/{host_end}/accept_ra"), "0");
    if let Some(bits) = join.bandwidth.ingress {
        let link = bridge::find(socket, host_end)?.ok_or(Errno::ENODEV)?;
        socket.request(route::set_bucket(link.index, &bandwidth::bucket(bits, join.bridge.mtu)))?;
    }
    net_namespace::within(join.namespace, || inside(join))?;
    wait_until_running(socket, host_end)?;
    wait_until_running(socket, join.bridge_name)
}

/// What is sent before a link runs is lost, and the pod's first datagrams with it.
fn wait_until_running(socket: &mut Socket, link: &str) -> io::Result<()> {
    for _ in 0..LOOKS {
        if bridge::find(socket, link)?.ok_or(Errno::ENODEV)?.is_running {
            return Ok(());
        }
        thread::sleep(BETWEEN_LOOKS);
    }
    warn!(link, "Link does not run yet");
    Ok(())
}

fn inside(join: &Join<'_>) -> io::Result<()> {
    let link = names::POD_LINK;
    // Other pods may send router advertisements, also where no pod has an address of IPv6 (CVE-2020-10749).
    bridge::attempt(&format!("ipv6/conf/{link}/accept_ra"), "0");
    if join.addresses.iter().any(|(a, _)| a.is_ipv6()) {
        for (key, value) in [("disable_ipv6", "0"), ("accept_dad", "0")] {
            bridge::attempt(&format!("ipv6/conf/{link}/{key}"), value);
        }
    }
    // Says who has the address as soon as the link is up.
    bridge::attempt(&format!("ipv4/conf/{link}/arp_notify"), "1");
    let mut socket = Socket::open(Protocol::Route)?;
    let link = bridge::find(&mut socket, link)?.ok_or(Errno::ENODEV)?.index;
    let of = |is_v6| join.addresses.iter().filter(move |(a, _)| a.is_ipv6() == is_v6);
    let address = |(a, net): &(IpAddr, Cidr)| route::new_address(link, *a, net.prefix());
    let mut all = vec![route::up(LOOPBACK)];
    all.extend(of(false).map(address));
    all.push(route::up(link));
    all.extend(of(true).map(address));
    all.extend(join.addresses.iter().map(|(_, net)| route::new_default_route(link, net.gateway())));
    if let Some(bits) = join.bandwidth.egress {
        all.push(route::set_bucket(link, &bandwidth::bucket(bits, join.bridge.mtu)));
    }
    socket.all(all)?;
    wait_until_running(&mut socket, names::POD_LINK)?;
    wait_until_asked(join)
}

/// The kernel listens for questions after an address of version 6 a moment after it has taken it; a question that comes
/// before is repeated after a second only.
fn wait_until_asked(join: &Join<'_>) -> io::Result<()> {
    let groups: Vec<String> = join.addresses.iter().filter_map(|(a, _)| names::solicited_group(*a)).collect();
    for _ in 0..LOOKS {
        let joined = if groups.is_empty() { String::new() } else { fs::read_to_string("/proc/thread-self/net/igmp6")? };
        let of_pod: Vec<&str> = joined.lines().filter(|line| line.contains(names::POD_LINK)).collect();
        if groups.iter().all(|group| of_pod.iter().any(|line| line.contains(group))) {
            return Ok(());
        }
        thread::sleep(BETWEEN_LOOKS);
    }
    warn!(podSandboxID = join.sandbox, "Pod does not listen for neighbours yet");
    Ok(())
}

/// Takes the loopback of a namespace up.
///
/// # Errors
/// What the kernel says.
pub fn loopback_up(namespace: BorrowedFd<'_>) -> io::Result<()> {
    net_namespace::within(namespace, || Socket::open(Protocol::Route)?.request(route::up(LOOPBACK)))
}

/// Removes the pair of a sandbox. One that is gone is fine.
///
/// # Errors
/// What the kernel says.
pub fn detach(sandbox: &str) -> io::Result<()> {
    let mut socket = Socket::open(Protocol::Route)?;
    for name in names::host_ends(sandbox) {
        match bridge::find(&mut socket, &name)? {
            Some(link) if link.alias == sandbox => return gone(socket.request(route::delete_link(link.index))),
            // Ours may have a later name: others had the first.
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

/// The hosts' ends of pods on a bridge.
///
/// # Errors
/// What the kernel says.
pub fn ports(bridge: Bridge) -> io::Result<Vec<Link>> {
    let all = Socket::open(Protocol::Route)?.dump(&route::get_links())?;
    let links = all.iter().filter_map(route::link);
    Ok(links.filter(|l| l.master == bridge.index && l.kind == "veth" && names::is_host_end(&l.name)).collect())
}

/// Sandboxes that have a link on this machine, whatever it is a port of.
///
/// # Errors
/// What the kernel says.
pub fn linked() -> io::Result<BTreeSet<String>> {
    let all = Socket::open(Protocol::Route)?.dump(&route::get_links())?;
    let links = all.iter().filter_map(route::link);
    Ok(links.filter(|l| l.kind == "veth" && names::is_host_end(&l.name)).map(|l| l.alias).collect())
}

/// Removes links.
///
/// # Errors
/// What the kernel says, other than that they are gone.
pub fn delete(links: &[Link]) -> io::Result<()> {
    let mut socket = Socket::open(Protocol::Route)?;
    links.iter().try_for_each(|link| gone(socket.request(route::delete_link(link.index))))
}

/// Makes links ports of a bridge, and lets them send back what they received.
///
/// # Errors
/// What the kernel says.
pub fn adopt(bridge: Bridge, chosen: impl Fn(&Link) -> bool) -> io::Result<()> {
    let mut socket = Socket::open(Protocol::Route)?;
    let all = socket.dump(&route::get_links())?;
    for link in all.iter().filter_map(route::link).filter(|l| l.kind == "veth" && chosen(l)) {
        socket.all(vec![route::set_master(link.index, bridge.index), route::set_port(&link.name, &link.alias)])?;
    }
    Ok(())
}
