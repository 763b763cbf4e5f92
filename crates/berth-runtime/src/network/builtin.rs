//! Built-in pod network: sets up and tears down bridge, leases, links, and packet filter.
//!
//! Owns the leases. Every teardown step treats "already gone" as success. Blocking. Implements spec 09b §11, §14.

use std::{
    net::IpAddr,
    os::fd::AsFd,
    path::PathBuf,
    sync::{Mutex, MutexGuard, PoisonError},
};

use serde_json::json;
use tracing::warn;

use super::{
    bandwidth,
    bridge::{self, Bridge, DesiredBridge},
    cidr::Cidr,
    errors::NetworkError,
    firewall::Firewall,
    host_ports::HostPorts,
    leases::Leases,
    mode::{self, Mode},
    names,
    pod_link::{self, PodLinkSpec},
    rules::Rules,
    sandbox::{PodNetwork, SandboxNetwork},
};
use berth_sys::failpoint;

/// Ranges that are never masqueraded, besides pod ranges: link-local and multicast.
const KNOWN: [&str; 4] = ["169.254.0.0/16", "224.0.0.0/4", "fe80::/10", "ff00::/8"];

/// Settings of the built-in network.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct BuiltinNetworkSettings {
    /// Name of the bridge.
    pub bridge: String,
    /// MTU; `None`: that of the default route's link.
    pub mtu: Option<u32>,
    /// Whether traffic from pods to other destinations is masqueraded with the host's address.
    pub masquerade: bool,
    /// Destinations without masquerading, besides pod ranges, link-local, and multicast.
    pub no_masquerade: Vec<Cidr>,
    /// Whether host ports are enabled.
    pub host_ports: bool,
    /// Pod ranges until the kubelet sets a pod CIDR; empty: the first default range that overlaps no route.
    pub nets: Vec<Cidr>,
    /// Directory of the leases file.
    pub directory: PathBuf,
}

/// The built-in network.
#[derive(Debug)]
pub struct BuiltinNetwork {
    settings: BuiltinNetworkSettings,
    leases: Mutex<Leases>,
    firewall: Firewall,
    failure: Mutex<Option<String>>,
}

impl BuiltinNetwork {
    /// Probes for nf_tables; does not change the host.
    pub fn new(settings: BuiltinNetworkSettings) -> Self {
        let rules = Rules {
            table: names::owner(&settings.bridge).to_owned(),
            bridge: settings.bridge.clone(),
            pods: Vec::new(),
            no_masquerade: Vec::new(),
            masquerade: settings.masquerade,
        };
        let leases = Mutex::new(Leases::new(settings.directory.clone()));
        Self { settings, leases, firewall: Firewall::new(rules), failure: Mutex::new(None) }
    }

    /// The packet filter.
    pub fn firewall(&self) -> &Firewall {
        &self.firewall
    }

    /// Name of the bridge.
    pub fn bridge(&self) -> &str {
        &self.settings.bridge
    }

    /// Error of the last attempt to set up the host; `None` if it succeeded.
    pub fn failure(&self) -> Option<String> {
        self.failure.lock().unwrap_or_else(PoisonError::into_inner).clone()
    }

    /// The ranges that new leases come from.
    pub fn nets(&self) -> Vec<Cidr> {
        self.leases().ipam().nets()
    }

    /// Leased addresses of a pod.
    pub fn addresses(&self, pod: &str) -> Vec<IpAddr> {
        self.leases().ipam().of(pod)
    }

    /// Number of leased IPv4 and IPv6 addresses.
    pub fn leased(&self) -> (usize, usize) {
        let leases = self.leases();
        let v6 = leases.ipam().leases().keys().filter(|a| a.is_ipv6()).count();
        (leases.ipam().leases().len() - v6, v6)
    }

    /// Sets up the host: default ranges if none are set, bridge, sysctls, packet filter.
    ///
    /// # Errors
    /// The step that failed; [`Self::failure`] returns it too.
    pub fn prepare(&self) -> Result<Bridge, NetworkError> {
        let prepared = self.try_prepare();
        let failure = prepared.as_ref().err().map(ToString::to_string);
        *self.failure.lock().unwrap_or_else(PoisonError::into_inner) = failure;
        prepared
    }

    fn try_prepare(&self) -> Result<Bridge, NetworkError> {
        if self.nets().is_empty() {
            let nets = self.first_nets()?;
            self.leases().set_nets(&nets);
        }
        let nets = self.nets();
        let wanted = DesiredBridge { name: self.settings.bridge.clone(), mtu: self.settings.mtu, nets: nets.clone() };
        let bridge = bridge::ensure(&wanted)?;
        self.adopt(bridge)?;
        self.set_rules(&bridge)?;
        Ok(bridge)
    }

    fn first_nets(&self) -> Result<Vec<Cidr>, NetworkError> {
        if !self.settings.nets.is_empty() {
            return Ok(self.settings.nets.clone());
        }
        let routes = bridge::routes(&self.settings.bridge).map_err(|e| NetworkError::kernel("routes", e))?;
        let net = mode::default_net(&routes).ok_or_else(|| NetworkError::NotReady("pod CIDR not set".to_owned()))?;
        Ok(vec![net])
    }

    /// Attaches the links of pods to the bridge again: removing the bridge detached them.
    fn adopt(&self, bridge: Bridge) -> Result<(), NetworkError> {
        let pods: Vec<String> = self.leases().ipam().leases().values().cloned().collect();
        let strays = |l: &berth_sys::netlink::rtnetlink::Link| l.master != bridge.index && pods.contains(&l.alias);
        pod_link::adopt(bridge, strays).map_err(|e| NetworkError::kernel("pod network interfaces", e))
    }

    fn set_rules(&self, bridge: &Bridge) -> Result<(), NetworkError> {
        let gateways = bridge::gateways(bridge).map_err(|e| NetworkError::kernel("bridge addresses", e))?;
        let used = gateways.iter().filter_map(|(address, prefix)| Cidr::of(*address, *prefix));
        let link_local = |net: &Cidr| KNOWN.iter().filter_map(|k| k.parse::<Cidr>().ok()).any(|k| k.overlaps(*net));
        let pods: Vec<Cidr> = used.chain(self.nets()).filter(|net| !link_local(net)).collect();
        let known = KNOWN.iter().filter_map(|net| net.parse().ok()).chain(self.settings.no_masquerade.iter().copied());
        let known: Vec<Cidr> = pods.iter().copied().chain(known).collect();
        self.firewall.set(|rules| (rules.pods, rules.no_masquerade) = (pods, known))
    }

    /// Sets the ranges for new leases. Existing pods keep their addresses and gateway. `prepares` is false where CNI
    /// plugins make the networks: the host is then not set up for the ranges.
    ///
    /// # Errors
    /// The step that failed.
    pub fn set_nets(&self, nets: &[Cidr], prepares: bool) -> Result<(), NetworkError> {
        if self.nets() == nets {
            return Ok(());
        }
        self.leases().set_nets(nets);
        if !prepares {
            return Ok(());
        }
        let bridge = self.prepare()?;
        self.prune(&bridge)
    }

    /// Removes the gateways of unused ranges from the bridge.
    fn prune(&self, bridge: &Bridge) -> Result<(), NetworkError> {
        let failed = |e| NetworkError::kernel("bridge addresses", e);
        let (nets, leased): (Vec<Cidr>, Vec<IpAddr>) = {
            let leases = self.leases();
            (leases.ipam().nets(), leases.ipam().leases().keys().copied().collect())
        };
        let mut pruned = false;
        for (address, prefix) in bridge::gateways(bridge).map_err(failed)? {
            let Some(net) = Cidr::of(address, prefix) else { continue };
            let is_ours = net.gateway() == address;
            if is_ours && !nets.contains(&net) && !leased.iter().any(|a| net.contains(*a)) {
                bridge::drop_gateway(bridge, address, prefix).map_err(failed)?;
                pruned = true;
            }
        }
        if pruned { self.set_rules(bridge) } else { Ok(()) }
    }

    /// Sets up the network of a pod. Rolls back all steps on failure.
    ///
    /// # Errors
    /// The step that failed.
    pub fn setup(&self, pod: &SandboxNetwork) -> Result<PodNetwork, NetworkError> {
        let attached = self.try_setup(pod);
        if attached.is_err()
            && let Err(e) = self.teardown(pod)
        {
            warn!(podSandboxID = %pod.id, err = %e, "Failed to roll back pod network");
        }
        attached
    }

    fn try_setup(&self, pod: &SandboxNetwork) -> Result<PodNetwork, NetworkError> {
        let bandwidth = bandwidth::of(&pod.annotations)?;
        let namespace = pod.netns.as_ref().ok_or_else(|| NetworkError::NotReady("no network namespace".to_owned()))?;
        let ports = if self.settings.host_ports { pod.ports.as_slice() } else { &[] };
        HostPorts::entries(ports, &[])?;
        let found = bridge::find_up(&self.settings.bridge).map_err(|e| NetworkError::kernel("bridge", e))?;
        let bridge = match found.filter(|_| !self.nets().is_empty() && self.failure().is_none()) {
            Some(bridge) => bridge,
            None => self.prepare()?,
        };
        let (ips, nets) = {
            let mut leases = self.leases();
            (leases.lease(&pod.id)?, leases.ipam().nets())
        };
        let net_of = |ip: IpAddr| nets.iter().find(|net| net.contains(ip)).copied();
        let addresses: Vec<(IpAddr, Cidr)> = ips.iter().filter_map(|ip| Some((*ip, net_of(*ip)?))).collect();
        let bridge_name = self.settings.bridge.as_str();
        let namespace = namespace.as_fd();
        let join = PodLinkSpec { sandbox: &pod.id, namespace, bridge, bridge_name, addresses: &addresses, bandwidth };
        failpoint::reached("network.leased");
        // First, because it fails if another pod owns a host port, and links are expensive.
        self.firewall.open(&pod.id, ports, &ips)?;
        failpoint::reached("network.ports");
        pod_link::attach(&join).map_err(|e| NetworkError::kernel("pod's links", e))?;
        failpoint::reached("network.links");
        Ok(PodNetwork { mode: Mode::Builtin, result: cni_result(&addresses), ips })
    }

    /// Tears down a pod's network.
    ///
    /// # Errors
    /// The first step that failed; links and ports are both attempted.
    pub fn teardown(&self, pod: &SandboxNetwork) -> Result<(), NetworkError> {
        let mut addresses = self.leases().ipam().of(&pod.id);
        let recorded = pod.attached.iter().filter(|a| a.mode == Mode::Builtin).flat_map(|a| a.ips.iter().copied());
        // Skips addresses that are leased to another pod by now.
        let others = |ip: &IpAddr| self.leases().ipam().leases().get(ip).is_some_and(|p| *p != pod.id);
        let more: Vec<IpAddr> = recorded.filter(|ip| !addresses.contains(ip) && !others(ip)).collect();
        addresses.extend(more);
        let closed = self.firewall.close(&pod.id, &addresses);
        failpoint::reached("unnetwork.ports");
        let detached = pod_link::detach(&pod.id).map_err(|e| NetworkError::kernel("pod's links", e));
        failpoint::reached("unnetwork.links");
        closed.and(detached)?;
        self.leases().release(&pod.id);
        failpoint::reached("unnetwork.lease");
        self.forget_ranges(&addresses)
    }

    fn forget_ranges(&self, released: &[IpAddr]) -> Result<(), NetworkError> {
        let nets = self.nets();
        if released.iter().all(|ip| nets.iter().any(|net| net.contains(*ip))) {
            return Ok(());
        }
        let found = bridge::find_up(&self.settings.bridge).map_err(|e| NetworkError::kernel("bridge", e))?;
        found.map_or(Ok(()), |bridge| self.prune(&bridge))
    }

    /// Recovers after a start: leases, host ports, and links of these pods stay, all others are removed. Returns the
    /// ids of pods whose link is lost. Sets up the host if `prepares` is true or the bridge exists.
    ///
    /// # Errors
    /// The step that failed.
    pub fn recover(&self, pods: &[SandboxNetwork], prepares: bool) -> Result<Vec<String>, NetworkError> {
        let ours: Vec<(&SandboxNetwork, &PodNetwork)> = pods
            .iter()
            .filter_map(|pod| Some((pod, pod.attached.as_ref().filter(|a| a.mode == Mode::Builtin)?)))
            .collect();
        self.leases().restore(ours.iter().map(|(pod, attached)| (pod.id.as_str(), attached.ips.as_slice())));
        let mut entries = Vec::new();
        for (pod, attached) in ours.iter().filter(|_| self.settings.host_ports) {
            match HostPorts::entries(&pod.ports, &attached.ips) {
                Ok(of_pod) => entries.push((pod.id.clone(), of_pod)),
                Err(e) => warn!(podSandboxID = %pod.id, err = %e, "Failed to restore host ports of the sandbox"),
            }
        }
        self.firewall.restore(&entries);
        let has_bridge =
            bridge::find_up(&self.settings.bridge).map_err(|e| NetworkError::kernel("bridge", e))?.is_some();
        if !(prepares || has_bridge) {
            return Ok(ours.iter().map(|(pod, _)| pod.id.clone()).collect());
        }
        let bridge = self.prepare()?;
        let failed = |e| NetworkError::kernel("pod network interfaces", e);
        let ports = pod_link::ports(bridge).map_err(failed)?;
        let (known, strays): (Vec<_>, Vec<_>) =
            ports.into_iter().partition(|port| ours.iter().any(|(pod, _)| pod.id == port.alias));
        pod_link::delete(&strays).map_err(failed)?;
        self.prune(&bridge)?;
        let lost = ours.iter().filter(|(pod, _)| !known.iter().any(|port| port.alias == pod.id));
        Ok(lost.map(|(pod, _)| pod.id.clone()).collect())
    }

    fn leases(&self) -> MutexGuard<'_, Leases> {
        self.leases.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// The result in the form of a CNI plugin's.
fn cni_result(addresses: &[(IpAddr, Cidr)]) -> serde_json::Value {
    let ips: Vec<_> = addresses
        .iter()
        .map(|(ip, net)| {
            json!({"address": format!("{ip}/{}", net.prefix()), "gateway": net.gateway().to_string(), "interface": 0})
        })
        .collect();
    json!({"cniVersion": "1.0.0", "interfaces": [{"name": names::POD_LINK}], "ips": ips})
}
