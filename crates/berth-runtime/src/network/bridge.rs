//! Pod bridge: creation, gateway addresses, and the sysctls it needs.
//!
//! Idempotent: runs at start, when pod ranges change, and when the bridge was removed. Blocking. Implements
//! spec 09b §11.1.

use std::{
    fs,
    io::{self, ErrorKind},
    net::IpAddr,
    path::Path,
};

use nix::errno::Errno;
use tracing::{info, warn};

use super::{cidr::Cidr, errors::NetworkError, names};
use berth_sys::netlink::{
    NetlinkFamily, Socket,
    rtnetlink::{self, Link},
};

/// MTU of the bridge where the host has no default route.
const USUAL_MTU: u32 = 1500;

/// Desired state of the bridge.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct DesiredBridge {
    /// Interface name.
    pub name: String,
    /// MTU of the bridge and of pods; `None`: that of the default route's link.
    pub mtu: Option<u32>,
    /// Pod ranges whose gateway is the bridge.
    pub nets: Vec<Cidr>,
}

/// Observed state of the bridge.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Bridge {
    /// Interface index.
    pub index: u32,
    /// MTU in bytes.
    pub mtu: u32,
}

/// Creates or repairs the bridge. Keeps addresses of other ranges, because pods may still use them.
///
/// # Errors
/// The kernel rejects a request, or a link of another kind has the name.
pub fn ensure(wanted: &DesiredBridge) -> Result<Bridge, NetworkError> {
    let failed = |e: io::Error| NetworkError::kernel(format!("bridge {}", wanted.name), e);
    let mut socket = Socket::open(NetlinkFamily::Route).map_err(failed)?;
    let mtu = wanted.mtu.unwrap_or_else(|| default_mtu(&mut socket));
    let mac = names::bridge_mac(&machine_id(), &wanted.name);
    match socket.request(rtnetlink::new_bridge(&wanted.name, mac, mtu)) {
        Err(e) if e.raw_os_error() != Some(Errno::EEXIST as i32) => return Err(failed(e)),
        made => made.map(|()| info!(bridge = %wanted.name, mtu, "Created bridge")).unwrap_or_default(),
    }
    let link = find(&mut socket, &wanted.name).map_err(failed)?.ok_or_else(|| failed(Errno::ENODEV.into()))?;
    if link.kind != "bridge" {
        return Err(failed(io::Error::other("existing interface is not a bridge")));
    }
    let has_v6 = wanted.nets.iter().any(|n| n.is_v6());
    // Pods may send router advertisements even where no pod has an IPv6 address (CVE-2020-10749).
    set_optional(&format!("ipv6/conf/{}/accept_ra", wanted.name), "0");
    if has_v6 {
        for (key, value) in [("disable_ipv6", "0"), ("accept_dad", "0")] {
            set_optional(&format!("ipv6/conf/{}/{key}", wanted.name), value);
        }
    }
    socket.request(rtnetlink::set_bridge(link.index, mac, mtu)).map_err(failed)?;
    for net in &wanted.nets {
        socket.request(rtnetlink::new_address(link.index, net.gateway(), net.prefix())).map_err(failed)?;
    }
    settings(&wanted.name, has_v6)?;
    Ok(Bridge { index: link.index, mtu })
}

/// The bridge, if it exists and is up.
///
/// # Errors
/// The kernel rejects a request.
pub fn find_up(name: &str) -> io::Result<Option<Bridge>> {
    let link = find(&mut Socket::open(NetlinkFamily::Route)?, name)?;
    Ok(link.filter(|l| l.kind == "bridge" && l.is_up).map(|l| Bridge { index: l.index, mtu: l.mtu }))
}

/// Finds a link by its name; `None` if it does not exist.
///
/// # Errors
/// The kernel rejects the request for any other reason.
pub fn find(socket: &mut Socket, name: &str) -> io::Result<Option<Link>> {
    match socket.query(rtnetlink::get_link(name)) {
        Ok(reply) => Ok(reply.as_ref().and_then(rtnetlink::link)),
        Err(e) if e.raw_os_error() == Some(Errno::ENODEV as i32) => Ok(None),
        Err(e) => Err(e),
    }
}

/// Destination ranges of the host's IPv4 routes, without those that use the bridge.
///
/// # Errors
/// The kernel rejects a request.
pub fn routes(bridge: &str) -> io::Result<Vec<Cidr>> {
    let mut socket = Socket::open(NetlinkFamily::Route)?;
    let own = find(&mut socket, bridge)?.map_or(0, |l| l.index);
    let all = socket.dump(&rtnetlink::get_routes(false))?;
    let others = all.iter().filter_map(rtnetlink::route).filter(|r| own == 0 || r.link != own);
    Ok(others.filter_map(|r| Cidr::of(r.destination?, r.prefix)).collect())
}

/// All addresses of the bridge with their prefix lengths.
///
/// # Errors
/// The kernel rejects the request.
pub fn gateways(bridge: &Bridge) -> io::Result<Vec<(IpAddr, u8)>> {
    let all = Socket::open(NetlinkFamily::Route)?.dump(&rtnetlink::get_addresses())?;
    let own = all.iter().filter_map(rtnetlink::address_of).filter(|(link, ..)| *link == bridge.index);
    Ok(own.map(|(_, address, prefix)| (address, prefix)).collect())
}

/// Removes the gateway of an unused range from the bridge.
///
/// # Errors
/// The kernel rejects the request; an address that is already gone is not an error.
pub fn drop_gateway(bridge: &Bridge, address: IpAddr, prefix: u8) -> io::Result<()> {
    match Socket::open(NetlinkFamily::Route)?.request(rtnetlink::delete_address(bridge.index, address, prefix)) {
        Err(e) if e.raw_os_error() == Some(Errno::EADDRNOTAVAIL as i32) => Ok(()),
        other => other,
    }
}

fn default_mtu(socket: &mut Socket) -> u32 {
    let mut of = |is_v6| {
        let routes = socket.dump(&rtnetlink::get_routes(is_v6)).ok()?;
        let link = routes.iter().filter_map(rtnetlink::route).find(|r| r.destination.is_none() && r.prefix == 0)?.link;
        let links = socket.dump(&rtnetlink::get_links()).ok()?;
        links.iter().filter_map(rtnetlink::link).find(|l| l.index == link).map(|l| l.mtu)
    };
    of(false).or_else(|| of(true)).unwrap_or(USUAL_MTU)
}

fn machine_id() -> String {
    // Without a machine id, several hosts derive the same MAC address, which is harmless on separate networks.
    fs::read_to_string("/etc/machine-id").unwrap_or_default()
}

fn settings(bridge: &str, has_v6: bool) -> Result<(), NetworkError> {
    set("ipv4/ip_forward", "1").map_err(|e| NetworkError::kernel("net.ipv4.ip_forward", e))?;
    if has_v6 {
        keep_router_advertisements();
        set("ipv6/conf/all/forwarding", "1").map_err(|e| NetworkError::kernel("net.ipv6.conf.all.forwarding", e))?;
    }
    set_optional(&format!("ipv4/conf/{bridge}/route_localnet"), "1");
    if read(&format!("ipv4/conf/{bridge}/rp_filter")).as_deref() == Some("1") {
        set_optional(&format!("ipv4/conf/{bridge}/rp_filter"), "0");
    }
    for key in ["bridge/bridge-nf-call-iptables", "bridge/bridge-nf-call-ip6tables"] {
        if read(key).is_some() {
            set_optional(key, "1");
        }
    }
    Ok(())
}

/// Keeps the default route that a router advertised: a forwarding host ignores router advertisements unless `accept_ra`
/// is 2.
fn keep_router_advertisements() {
    if read("ipv6/conf/all/forwarding").as_deref() == Some("1") {
        return;
    }
    let uplinks = || {
        let mut socket = Socket::open(NetlinkFamily::Route)?;
        let routes = socket.dump(&rtnetlink::get_routes(true))?;
        let links = socket.dump(&rtnetlink::get_links())?;
        let by_default: Vec<u32> =
            routes.iter().filter_map(rtnetlink::route).filter(|r| r.destination.is_none()).map(|r| r.link).collect();
        let links = links.iter().filter_map(rtnetlink::link);
        Ok::<_, io::Error>(links.filter(|l| by_default.contains(&l.index)).map(|l| l.name).collect::<Vec<_>>())
    };
    // Without the list, no link is known to be affected.
    for link in uplinks().unwrap_or_default() {
        let key = format!("ipv6/conf/{link}/accept_ra");
        if read(&key).as_deref() == Some("1") {
            info!(link, "Accepting IPv6 router advertisements despite forwarding (accept_ra=2)");
            set_optional(&key, "2");
        }
    }
}

fn read(key: &str) -> Option<String> {
    fs::read_to_string(Path::new("/proc/sys/net").join(key)).ok().map(|text| text.trim().to_owned())
}

/// Sets a sysctl below `/proc/sys/net` in the thread's network namespace. Does not write an equal value, because the
/// file may be read-only.
///
/// # Errors
/// The write fails.
pub fn set(key: &str, value: &str) -> io::Result<()> {
    if read(key).as_deref() == Some(value) {
        return Ok(());
    }
    fs::write(Path::new("/proc/sys/net").join(key), value)
}

/// Sets an optional sysctl like [`set`]: logs a failure, ignores a missing file.
pub fn set_optional(key: &str, value: &str) {
    match set(key, value) {
        Err(e) if e.kind() != ErrorKind::NotFound => warn!(sysctl = key, err = %e, "Failed to set sysctl"),
        _ => {}
    }
}
