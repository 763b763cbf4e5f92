//! Reconciles the runtime's nf_tables table: host ports, masquerading, and forwarding rules.
//!
//! Owns the host port assignments. Pods add and remove single map elements; one transaction replaces the whole table at
//! start, when ranges change, and when another program removed part of it. Blocking. Implements spec 09b §12.

use std::{
    fs, io,
    net::IpAddr,
    sync::{
        Mutex, MutexGuard, PoisonError,
        atomic::{AtomicU64, Ordering},
    },
};

use nix::errno::Errno;
use tracing::{info, warn};

use super::{
    errors::NetworkError,
    host_ports::{HostPortEntry, HostPorts, PortMapping, TransportProtocol},
    rules::{self, Rules},
};
use berth_sys::netlink::{
    self, Socket,
    conntrack::{self, ConntrackEntry, End},
    nf_tables,
};

/// Number of tracked connections from which the kernel filters the list by address.
const MANY: usize = 10_000;

/// The nf_tables table and the host port assignments.
#[derive(Debug)]
pub struct Firewall {
    state: Mutex<FirewallState>,
    has_filter: bool,
    reapplied: AtomicU64,
}

#[derive(Debug)]
struct FirewallState {
    rules: Rules,
    ports: HostPorts,
}

impl Firewall {
    /// Probes for nf_tables; changes nothing.
    pub fn new(rules: Rules) -> Self {
        let has_filter = probe().inspect_err(|e| warn!(err = %e, "Kernel does not support nf_tables")).is_ok();
        Self {
            state: Mutex::new(FirewallState { rules, ports: HostPorts::default() }),
            has_filter,
            reapplied: AtomicU64::new(0),
        }
    }

    /// Whether the kernel supports nf_tables.
    pub fn has_filter(&self) -> bool {
        self.has_filter
    }

    /// Number of times the table was restored after another program removed part of it.
    pub fn reapplied(&self) -> u64 {
        self.reapplied.load(Ordering::Relaxed)
    }

    /// Changes the rules and replaces the table.
    ///
    /// # Errors
    /// The nf_tables transaction fails.
    pub fn set(&self, change: impl FnOnce(&mut Rules)) -> Result<(), NetworkError> {
        let mut state = self.state();
        change(&mut state.rules);
        self.apply(&state)
    }

    fn apply(&self, state: &FirewallState) -> Result<(), NetworkError> {
        if !self.has_filter {
            return Ok(());
        }
        transact(rules::whole(&state.rules, &state.ports.all())).map_err(|e| NetworkError::kernel("nf_tables", e))
    }

    /// Replaces all host port assignments. Of two pods with the same port, the first one keeps it. Does not touch the
    /// table; [`Self::set`] applies it.
    pub fn restore(&self, pods: &[(String, Vec<HostPortEntry>)]) {
        let mut state = self.state();
        state.ports.clear();
        for (pod, entries) in pods {
            if let Err(e) = state.ports.take(pod, entries) {
                warn!(podSandboxID = %pod, err = %e, "Host port of the sandbox is in use by another sandbox");
            }
        }
    }

    /// Opens a pod's host ports. Removes tracked UDP flows to these ports, because they lead to an earlier destination.
    ///
    /// # Errors
    /// Another pod owns a port, the kernel has no nf_tables, or the transaction fails. The pod gets none of the ports
    /// then.
    pub fn open(&self, pod: &str, mappings: &[PortMapping], addresses: &[IpAddr]) -> Result<(), NetworkError> {
        let entries = HostPorts::entries(mappings, addresses)?;
        if entries.is_empty() {
            return Ok(());
        }
        if !self.has_filter {
            return Err(NetworkError::NoFilter);
        }
        let mut state = self.state();
        state.ports.release(pod);
        state.ports.take(pod, &entries)?;
        if let Err(e) = self.add(&state, &entries) {
            state.ports.release(pod);
            return Err(e);
        }
        drop(state);
        let udp: Vec<u16> =
            entries.iter().filter(|e| e.key.protocol == TransportProtocol::Udp).map(|e| e.key.port).collect();
        if !udp.is_empty() {
            forget(|c| c.original.protocol == TransportProtocol::Udp.number() && udp.contains(&c.original.port), &[]);
        }
        Ok(())
    }

    /// Adds elements. Replaces the whole table if an element already exists or the table is gone.
    fn add(&self, state: &FirewallState, entries: &[HostPortEntry]) -> Result<(), NetworkError> {
        match transact(rules::added(&state.rules.table, entries)) {
            Err(e) if matches!(errno(&e), Errno::EEXIST | Errno::ENOENT) => self.apply(state),
            other => other.map_err(|e| NetworkError::kernel("nf_tables", e)),
        }
    }

    /// Closes a pod's host ports, and removes tracked connections of its addresses.
    ///
    /// # Errors
    /// The transaction fails; missing elements are not an error.
    pub fn close(&self, pod: &str, addresses: &[IpAddr]) -> Result<(), NetworkError> {
        let mut state = self.state();
        let entries = state.ports.release(pod);
        if !entries.is_empty() && self.has_filter {
            match transact(rules::removed(&state.rules.table, &entries)) {
                Err(e) if errno(&e) == Errno::ENOENT => self.apply(&state)?,
                other => other.map_err(|e| NetworkError::kernel("nf_tables", e))?,
            }
        }
        drop(state);
        if !addresses.is_empty() && self.has_filter {
            forget(|c| addresses.iter().any(|a| c.has(*a)), addresses);
        }
        Ok(())
    }

    /// Restores the table if it is incomplete. Returns whether it had to.
    ///
    /// # Errors
    /// A kernel request fails.
    pub fn restore_if_incomplete(&self) -> Result<bool, NetworkError> {
        let state = self.state();
        if !self.has_filter || is_whole(&state.rules).map_err(|e| NetworkError::kernel("nf_tables", e))? {
            return Ok(false);
        }
        self.apply(&state)?;
        self.reapplied.fetch_add(1, Ordering::Relaxed);
        info!(table = %state.rules.table, "Restored nf_tables rules after external removal");
        Ok(true)
    }

    /// Name of the table.
    pub fn table(&self) -> String {
        self.state().rules.table.clone()
    }

    /// Forward chains of other tables whose policy is to drop.
    pub fn dropping_chains(&self) -> Vec<String> {
        let own = self.table();
        let listed = Socket::open(netlink::NetlinkFamily::Netfilter)
            .and_then(|mut socket| socket.dump(&nf_tables::get_chains(nf_tables::FAMILY_ANY)));
        // A kernel without nf_tables has no such chains.
        let chains = listed.unwrap_or_default();
        let drops = chains.iter().filter_map(nf_tables::chain).filter(|c| c.drops && c.forwards() && c.table != own);
        drops.map(|c| format!("chain {} of table {}", c.name, c.table)).collect()
    }

    /// Ignores lock poisoning: the state is consistent after every statement, even if a thread panicked.
    fn state(&self) -> MutexGuard<'_, FirewallState> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

fn probe() -> io::Result<()> {
    let mut socket = Socket::open(netlink::NetlinkFamily::Netfilter)?;
    match socket.query(nf_tables::get_table(super::names::NAME)) {
        Err(e) if errno(&e) != Errno::ENOENT => Err(e),
        _ => Ok(()),
    }
}

fn transact(messages: Vec<netlink::Message>) -> io::Result<()> {
    let (begin, end) = nf_tables::batch_messages();
    Ok(Socket::open(netlink::NetlinkFamily::Netfilter)?.transaction(begin, messages, end)?)
}

fn errno(e: &io::Error) -> Errno {
    Errno::from_raw(e.raw_os_error().unwrap_or(0))
}

fn is_whole(rules: &Rules) -> io::Result<bool> {
    let mut socket = Socket::open(netlink::NetlinkFamily::Netfilter)?;
    let chains = socket.dump(&nf_tables::get_chains(nf_tables::FAMILY_INET))?;
    let ours = chains.iter().filter_map(nf_tables::chain).filter(|c| c.table == rules.table);
    if ours.filter(|c| rules::CHAINS.contains(&c.name.as_str())).count() != rules::CHAINS.len() {
        return Ok(false);
    }
    let listed = socket.dump(&nf_tables::get_rules())?;
    let ours = listed.iter().filter_map(nf_tables::rule_location).filter(|(table, _)| *table == rules.table);
    Ok(ours.count() == rules::count(rules))
}

/// Removes tracked connections. Logs failures only at debug level, because remaining entries expire by themselves.
fn forget(chosen: impl Fn(&ConntrackEntry) -> bool, of: &[IpAddr]) {
    if let Err(e) = try_forget(chosen, of) {
        tracing::debug!(err = %e, "Failed to flush conntrack entries");
    }
}

/// Each dump walks the kernel's whole connection table. Lists all if there are few; otherwise the kernel filters them
/// by address.
fn try_forget(chosen: impl Fn(&ConntrackEntry) -> bool, of: &[IpAddr]) -> io::Result<()> {
    let tracked = fs::read_to_string("/proc/sys/net/netfilter/nf_conntrack_count");
    // Without the file, the count is unknown and may be large.
    let tracked: Option<usize> = tracked.ok().and_then(|text| text.trim().parse().ok());
    if tracked == Some(0) {
        return Ok(());
    }
    let mut socket = Socket::open(netlink::NetlinkFamily::Netfilter)?;
    let mut found = Vec::new();
    if of.is_empty() || tracked.is_some_and(|count| count < MANY) {
        found = socket.dump(&conntrack::list())?;
    } else {
        for (address, end) in of.iter().flat_map(|a| [(a, End::Client), (a, End::Server)]) {
            let some = socket.dump(&conntrack::list_of(*address, end));
            found.extend(some.or_else(|_| socket.dump(&conntrack::list()))?);
        }
    }
    let gone = found.iter().filter_map(conntrack::connection).filter(|c| chosen(c));
    // A connection that ended in the meantime needs no removal.
    socket.request_each(gone.map(|c| c.delete_message()).collect()).map(drop)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_kernel_without_a_filter_runs_pods_without_host_ports() {
        let rules = Rules {
            table: "none".to_owned(),
            bridge: "none0".to_owned(),
            pods: Vec::new(),
            no_masquerade: Vec::new(),
            masquerade: true,
        };
        let state = Mutex::new(FirewallState { rules, ports: HostPorts::default() });
        let firewall = Firewall { state, has_filter: false, reapplied: AtomicU64::new(0) };
        firewall.set(|rules| rules.masquerade = true).expect("nothing to do");
        let port = |host_port| PortMapping {
            protocol: TransportProtocol::Tcp,
            host_port,
            container_port: 80,
            host_ip: String::new(),
        };
        let addresses = [[10, 9, 0, 2].into()];
        firewall.open("pod", &[port(0)], &addresses).expect("no host port");
        let refused = firewall.open("pod", &[port(80)], &addresses).expect_err("a host port");
        assert_eq!(refused.to_string(), "hostPort needs nf_tables");
        firewall.close("pod", &addresses).expect("nothing to do");
        assert!(!firewall.restore_if_incomplete().expect("nothing to do"));
    }
}
