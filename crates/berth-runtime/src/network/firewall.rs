//! Keeps our table of the packet filter as it should be.
//!
//! Owns who has which host port. Single entries come and go with pods; the whole table is put in place, in one transaction,
//! at start, when ranges change, and when somebody removed something of it. Blocking. Behaviour: spec 09b §12.

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
    host_ports::{Entry, HostPorts, PortMapping, Protocol},
    rules::{self, Rules},
};
use berth_sys::netlink::{
    self, Socket,
    connections::{self, Connection, End},
    filter,
};

/// Tracked connections from which on the kernel chooses among them.
const MANY: usize = 10_000;

/// Our table and who has which port of the machine.
#[derive(Debug)]
pub struct Firewall {
    state: Mutex<State>,
    has_filter: bool,
    reapplied: AtomicU64,
}

#[derive(Debug)]
struct State {
    rules: Rules,
    ports: HostPorts,
}

impl Firewall {
    /// Looks whether the kernel has a packet filter; changes nothing.
    pub fn new(rules: Rules) -> Self {
        let has_filter = probe().inspect_err(|e| warn!(err = %e, "No nf_tables in this kernel")).is_ok();
        Self {
            state: Mutex::new(State { rules, ports: HostPorts::default() }),
            has_filter,
            reapplied: AtomicU64::new(0),
        }
    }

    /// Whether the kernel has a packet filter.
    pub fn has_filter(&self) -> bool {
        self.has_filter
    }

    /// Times the table was put in place because somebody had removed something of it.
    pub fn reapplied(&self) -> u64 {
        self.reapplied.load(Ordering::Relaxed)
    }

    /// Changes what the table is made from, and puts it in place.
    ///
    /// # Errors
    /// What the kernel says.
    pub fn set(&self, change: impl FnOnce(&mut Rules)) -> Result<(), NetworkError> {
        let mut state = self.state();
        change(&mut state.rules);
        self.apply(&state)
    }

    fn apply(&self, state: &State) -> Result<(), NetworkError> {
        if !self.has_filter {
            return Ok(());
        }
        transact(rules::whole(&state.rules, &state.ports.all())).map_err(|e| NetworkError::kernel("nf_tables", e))
    }

    /// Forgets who has which port, and lets these pods have theirs. A port two of them want is the first one's. The table
    /// is put in place by [`Self::set`].
    pub fn restore(&self, pods: &[(String, Vec<Entry>)]) {
        let mut state = self.state();
        state.ports.clear();
        for (pod, entries) in pods {
            if let Err(e) = state.ports.take(pod, entries) {
                warn!(podSandboxID = %pod, err = %e, "Host port of a sandbox is another's");
            }
        }
    }

    /// Leads the machine's ports to a pod. Old datagram flows to those ports are forgotten: they lead elsewhere.
    ///
    /// # Errors
    /// A port another pod has; no packet filter; what the kernel says. Nothing is changed then.
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
        let udp: Vec<u16> = entries.iter().filter(|e| e.key.protocol == Protocol::Udp).map(|e| e.key.port).collect();
        if !udp.is_empty() {
            forget(|c| c.original.protocol == Protocol::Udp.number() && udp.contains(&c.original.port), &[]);
        }
        Ok(())
    }

    /// An entry that is there already, or a table that is gone: then the whole of it is put in place.
    fn add(&self, state: &State, entries: &[Entry]) -> Result<(), NetworkError> {
        match transact(rules::added(&state.rules.table, entries)) {
            Err(e) if matches!(errno(&e), Errno::EEXIST | Errno::ENOENT) => self.apply(state),
            other => other.map_err(|e| NetworkError::kernel("nf_tables", e)),
        }
    }

    /// Takes a pod's ports back, and forgets connections of its addresses.
    ///
    /// # Errors
    /// What the kernel says, other than that they are gone.
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

    /// Looks whether the table is whole, and puts it in place where it is not. Whether it had to.
    ///
    /// # Errors
    /// What the kernel says.
    pub fn mend(&self) -> Result<bool, NetworkError> {
        let state = self.state();
        if !self.has_filter || is_whole(&state.rules).map_err(|e| NetworkError::kernel("nf_tables", e))? {
            return Ok(false);
        }
        self.apply(&state)?;
        self.reapplied.fetch_add(1, Ordering::Relaxed);
        info!(table = %state.rules.table, "Packet filter put in place again: somebody removed it");
        Ok(true)
    }

    /// The table's name.
    pub fn table(&self) -> String {
        self.state().rules.table.clone()
    }

    /// Chains of others that drop what they do not know among forwarded packets.
    pub fn dropping_chains(&self) -> Vec<String> {
        let own = self.table();
        let listed = Socket::open(netlink::Protocol::Netfilter)
            .and_then(|mut socket| socket.dump(&filter::get_chains(filter::FAMILY_ANY)));
        // A kernel without the filter has no such chains.
        let chains = listed.unwrap_or_default();
        let drops = chains.iter().filter_map(filter::chain).filter(|c| c.drops && c.forwards() && c.table != own);
        drops.map(|c| format!("chain {} of table {}", c.name, c.table)).collect()
    }

    /// The state is whole after every statement, also where a thread died.
    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

fn probe() -> io::Result<()> {
    let mut socket = Socket::open(netlink::Protocol::Netfilter)?;
    match socket.ask(filter::get_table(super::names::NAME)) {
        Err(e) if errno(&e) != Errno::ENOENT => Err(e),
        _ => Ok(()),
    }
}

fn transact(messages: Vec<netlink::Message>) -> io::Result<()> {
    let (begin, end) = filter::marks();
    Ok(Socket::open(netlink::Protocol::Netfilter)?.transaction(begin, messages, end)?)
}

fn errno(e: &io::Error) -> Errno {
    Errno::from_raw(e.raw_os_error().unwrap_or(0))
}

fn is_whole(rules: &Rules) -> io::Result<bool> {
    let mut socket = Socket::open(netlink::Protocol::Netfilter)?;
    let chains = socket.dump(&filter::get_chains(filter::FAMILY_INET))?;
    let ours = chains.iter().filter_map(filter::chain).filter(|c| c.table == rules.table);
    if ours.filter(|c| rules::CHAINS.contains(&c.name.as_str())).count() != rules::CHAINS.len() {
        return Ok(false);
    }
    let listed = socket.dump(&filter::get_rules())?;
    let ours = listed.iter().filter_map(filter::rule_of).filter(|(table, _)| *table == rules.table);
    Ok(ours.count() == rules::count(rules))
}

/// Forgets tracked connections. What cannot be forgotten ends by itself, so that failures are only noted.
fn forget(chosen: impl Fn(&Connection) -> bool, of: &[IpAddr]) {
    if let Err(e) = try_forget(chosen, of) {
        tracing::debug!(err = %e, "Tracked connections not forgotten");
    }
}

/// Each list is a walk through the kernel's whole table, so that few connections are listed at once; of many the kernel
/// chooses those of the addresses.
fn try_forget(chosen: impl Fn(&Connection) -> bool, of: &[IpAddr]) -> io::Result<()> {
    let tracked = fs::read_to_string("/proc/sys/net/netfilter/nf_conntrack_count");
    // Without the file there may be any number.
    let tracked: Option<usize> = tracked.ok().and_then(|text| text.trim().parse().ok());
    if tracked == Some(0) {
        return Ok(());
    }
    let mut socket = Socket::open(netlink::Protocol::Netfilter)?;
    let mut found = Vec::new();
    if of.is_empty() || tracked.is_some_and(|count| count < MANY) {
        found = socket.dump(&connections::list())?;
    } else {
        for (address, end) in of.iter().flat_map(|a| [(a, End::Client), (a, End::Server)]) {
            let some = socket.dump(&connections::list_of(*address, end));
            found.extend(some.or_else(|_| socket.dump(&connections::list()))?);
        }
    }
    let gone = found.iter().filter_map(connections::connection).filter(|c| chosen(c));
    // One that ended meanwhile is as good as forgotten.
    socket.each(gone.map(|c| c.forget()).collect()).map(drop)
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
        let state = Mutex::new(State { rules, ports: HostPorts::default() });
        let firewall = Firewall { state, has_filter: false, reapplied: AtomicU64::new(0) };
        firewall.set(|rules| rules.masquerade = true).expect("nothing to do");
        let port =
            |host_port| PortMapping { protocol: Protocol::Tcp, host_port, container_port: 80, host_ip: String::new() };
        let addresses = [[10, 9, 0, 2].into()];
        firewall.open("pod", &[port(0)], &addresses).expect("no host port");
        let refused = firewall.open("pod", &[port(80)], &addresses).expect_err("a host port");
        assert_eq!(refused.to_string(), "hostPort needs nf_tables");
        firewall.close("pod", &addresses).expect("nothing to do");
        assert!(!firewall.mend().expect("nothing to do"));
    }
}
