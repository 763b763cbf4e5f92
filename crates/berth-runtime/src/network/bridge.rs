//! The bridge pods hang on, and the machine's settings they need.
//!
//! Idempotent: called at start, when ranges change, and when the bridge was lost. Blocking. Behaviour: spec 09b §11.1.

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
    Protocol, Socket,
    route::{self, Link},
};

/// MTU where the machine has no default route.
const USUAL_MTU: u32 = 1500;

/// The bridge as it should be.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Wanted {
    /// Its name.
    pub name: String,
    /// MTU of it and of pods; `None`: that of the default route's link.
    pub mtu: Option<u32>,
    /// Ranges whose gateway it is.
    pub nets: Vec<Cidr>,
}

/// The bridge as it is.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Bridge {
    /// Its number.
    pub index: u32,
    /// Its MTU.
    pub mtu: u32,
}

/// Makes it, or puts it right. Addresses of other ranges stay: pods may use them.
///
/// # Errors
/// What the kernel says.
pub fn ensure(wanted: &Wanted) -> Result<Bridge, NetworkError> {
    let failed = |e: io::Error| NetworkError::kernel(format!("bridge {}", wanted.name), e);
    let mut socket = Socket::open(Protocol::Route).map_err(failed)?;
    let mtu = wanted.mtu.unwrap_or_else(|| default_mtu(&mut socket));
    let mac = names::bridge_mac(&machine_id(), &wanted.name);
    match socket.request(route::new_bridge(&wanted.name, mac, mtu)) {
        Err(e) if e.raw_os_error() != Some(Errno::EEXIST as i32) => return Err(failed(e)),
        made => made.map(|()| info!(bridge = %wanted.name, mtu, "Bridge made")).unwrap_or_default(),
    }
    let link = find(&mut socket, &wanted.name).map_err(failed)?.ok_or_else(|| failed(Errno::ENODEV.into()))?;
    if link.kind != "bridge" {
        return Err(failed(io::Error::other("a link of that name is no bridge")));
    }
    let has_v6 = wanted.nets.iter().any(|n| n.is_v6());
    // Pods may send router advertisements, also where no pod has an address of IPv6 (CVE-2020-10749).
    attempt(&format!("ipv6/conf/{}/accept_ra", wanted.name), "0");
    if has_v6 {
        for (key, value) in [("disable_ipv6", "0"), ("accept_dad", "0")] {
            attempt(&format!("ipv6/conf/{}/{key}", wanted.name), value);
        }
    }
    socket.request(route::set_bridge(link.index, mac, mtu)).map_err(failed)?;
    for net in &wanted.nets {
        socket.request(route::new_address(link.index, net.gateway(), net.prefix())).map_err(failed)?;
    }
    settings(&wanted.name, has_v6)?;
    Ok(Bridge { index: link.index, mtu })
}

/// The bridge, where it is there and up.
///
/// # Errors
/// What the kernel says.
pub fn look(name: &str) -> io::Result<Option<Bridge>> {
    let link = find(&mut Socket::open(Protocol::Route)?, name)?;
    Ok(link.filter(|l| l.kind == "bridge" && l.is_up).map(|l| Bridge { index: l.index, mtu: l.mtu }))
}

/// A link by its name.
///
/// # Errors
/// What the kernel says, other than that there is none.
pub fn find(socket: &mut Socket, name: &str) -> io::Result<Option<Link>> {
    match socket.ask(route::get_link(name)) {
        Ok(reply) => Ok(reply.as_ref().and_then(route::link)),
        Err(e) if e.raw_os_error() == Some(Errno::ENODEV as i32) => Ok(None),
        Err(e) => Err(e),
    }
}

/// Ranges this machine has routes to, those by way of the bridge left out.
///
/// # Errors
/// What the kernel says.
pub fn routes(bridge: &str) -> io::Result<Vec<Cidr>> {
    let mut socket = Socket::open(Protocol::Route)?;
    let own = find(&mut socket, bridge)?.map_or(0, |l| l.index);
    let all = socket.dump(&route::get_routes(false))?;
    let others = all.iter().filter_map(route::route).filter(|r| own == 0 || r.link != own);
    Ok(others.filter_map(|r| Cidr::of(r.destination?, r.prefix)).collect())
}

/// Ranges whose gateway is one of the bridge's addresses.
///
/// # Errors
/// What the kernel says.
pub fn gateways(bridge: &Bridge) -> io::Result<Vec<(IpAddr, u8)>> {
    let all = Socket::open(Protocol::Route)?.dump(&route::get_addresses())?;
    let own = all.iter().filter_map(route::address_of).filter(|(link, ..)| *link == bridge.index);
    Ok(own.map(|(_, address, prefix)| (address, prefix)).collect())
}

/// Takes the gateway of a range that no pod uses any more from the bridge.
///
/// # Errors
/// What the kernel says, other than that it is gone.
pub fn drop_gateway(bridge: &Bridge, address: IpAddr, prefix: u8) -> io::Result<()> {
    match Socket::open(Protocol::Route)?.request(route::delete_address(bridge.index, address, prefix)) {
        Err(e) if e.raw_os_error() == Some(Errno::EADDRNOTAVAIL as i32) => Ok(()),
        other => other,
    }
}

fn default_mtu(socket: &mut Socket) -> u32 {
    let mut of = |is_v6| {
        let routes = socket.dump(&route::get_routes(is_v6)).ok()?;
        let link = routes.iter().filter_map(route::route).find(|r| r.destination.is_none() && r.prefix == 0)?.link;
        let links = socket.dump(&route::get_links()).ok()?;
        links.iter().filter_map(route::link).find(|l| l.index == link).map(|l| l.mtu)
    };
    of(false).or_else(|| of(true)).unwrap_or(USUAL_MTU)
}

fn machine_id() -> String {
    // A machine without one gets a bridge whose address other such machines have too: they are not on one network.
    fs::read_to_string("/etc/machine-id").unwrap_or_default()
}

fn settings(bridge: &str, has_v6: bool) -> Result<(), NetworkError> {
    set("ipv4/ip_forward", "1").map_err(|e| NetworkError::kernel("net.ipv4.ip_forward", e))?;
    if has_v6 {
        keep_router_advertisements();
        set("ipv6/conf/all/forwarding", "1").map_err(|e| NetworkError::kernel("net.ipv6.conf.all.forwarding", e))?;
    }
    attempt(&format!("ipv4/conf/{bridge}/route_localnet"), "1");
    if read(&format!("ipv4/conf/{bridge}/rp_filter")).as_deref() == Some("1") {
        attempt(&format!("ipv4/conf/{bridge}/rp_filter"), "0");
    }
    for key in ["bridge/bridge-nf-call-iptables", "bridge/bridge-nf-call-ip6tables"] {
        if read(key).is_some() {
            attempt(key, "1");
        }
    }
    Ok(())
}

/// A machine that forwards no longer listens to routers, and loses the route it had from one, unless it is told to.
fn keep_router_advertisements() {
    if read("ipv6/conf/all/forwarding").as_deref() == Some("1") {
        return;
    }
    let uplinks = || {
        let mut socket = Socket::open(Protocol::Route)?;
        let routes = socket.dump(&route::get_routes(true))?;
        let links = socket.dump(&route::get_links())?;
        let by_default: Vec<u32> =
            routes.iter().filter_map(route::route).filter(|r| r.destination.is_none()).map(|r| r.link).collect();
        let links = links.iter().filter_map(route::link);
        Ok::<_, io::Error>(links.filter(|l| by_default.contains(&l.index)).map(|l| l.name).collect::<Vec<_>>())
    };
    // Without the list nothing is known to be lost.
    for link in uplinks().unwrap_or_default() {
        let key = format!("ipv6/conf/{link}/accept_ra");
        if read(&key).as_deref() == Some("1") {
            info!(link, "Router advertisements are listened to although the machine forwards");
            attempt(&key, "2");
        }
    }
}

fn read(key: &str) -> Option<String> {
    fs::read_to_string(Path::new("/proc/sys/net").join(key)).ok().map(|text| text.trim().to_owned())
}

/// Sets a kernel setting of the thread's network namespace, below `/proc/sys/net`. What is so already is not written: the
/// file may be read-only.
///
/// # Errors
/// What the kernel says.
pub fn set(key: &str, value: &str) -> io::Result<()> {
    if read(key).as_deref() == Some(value) {
        return Ok(());
    }
    fs::write(Path::new("/proc/sys/net").join(key), value)
}

/// Like [`set`], for settings a network works without.
pub fn attempt(key: &str, value: &str) {
    match set(key, value) {
        Err(e) if e.kind() != ErrorKind::NotFound => warn!(sysctl = key, err = %e, "Kernel setting not made"),
        _ => {}
    }
}
