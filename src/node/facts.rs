//! Node facts derived from the machine and the configuration: capacity, allocatable, labels, taints.
//!
//! Implements spec 01 §12.3, 05 §4.2-4.3.

use std::collections::BTreeMap;

use super::{
    MachineInfo,
    identity::{IdentityError, hostname},
    reservations::{ReservationConfig, ReservationError, Reservations},
};
use berth_ports::NodeFacts;
use berth_types::{
    api,
    quantity::{Amount, QuantityFormat},
    resources::{Amounts, CPU, EPHEMERAL_STORAGE, HUGEPAGES_PREFIX, MEMORY, PODS, amount_of, is_hugepage, zero},
};

/// Node section of the configuration.
#[derive(Clone, PartialEq, Debug, Default)]
pub struct NodeConfig {
    /// `--hostname-override`; empty to use the machine's host name.
    pub hostname_override: String,
    /// `maxPods`.
    pub max_pods: i32,
    /// `podsPerCore`; 0 for no limit.
    pub pods_per_core: i32,
    /// Configured reservations.
    pub reserved: ReservationConfig,
    /// `localStorageCapacityIsolation`; if off, no ephemeral storage is reported.
    pub local_storage_isolation: bool,
    /// `--node-labels`, validated; they override default labels.
    pub labels: BTreeMap<String, String>,
    /// `registerWithTaints`.
    pub taints: Vec<api::Taint>,
    /// `--cloud-provider=external`: a new node gets the `uninitialized` taint.
    pub is_cloud_external: bool,
    /// Result of [`declared_features`].
    pub declared_features: Vec<String>,
}

/// The configuration does not fit the machine; the agent does not start.
#[derive(Clone, PartialEq, Eq, Debug, thiserror::Error)]
pub enum NodeError {
    /// Invalid host name.
    #[error(transparent)]
    Identity(#[from] IdentityError),
    /// Invalid reservations or thresholds.
    #[error(transparent)]
    Reserved(#[from] ReservationError),
}

/// Initial facts, used without an API server or before the node object was read. No addresses, no pressure, not
/// shutting down; features of the runtime are added later.
///
/// # Errors
/// The configuration does not fit the machine.
pub fn facts(config: &NodeConfig, machine: &MachineInfo) -> Result<NodeFacts, NodeError> {
    let name = hostname(&config.hostname_override, &machine.hostname)?;
    let capacity = capacity(config, machine);
    let reserved = Reservations::new(&config.reserved, &machine.cpus, &capacity)?;
    Ok(NodeFacts {
        labels: labels(&name, &config.labels),
        taints: taints(config),
        allocatable: texts(allocatable(&capacity, &reserved)),
        capacity: texts(capacity),
        declared_features: config.declared_features.clone(),
        hostname: name.clone(),
        name,
        ..NodeFacts::default()
    })
}

/// Node capacity.
pub fn capacity(config: &NodeConfig, machine: &MachineInfo) -> Amounts {
    let binary = |bytes: u64| Amount::from_value(i64::try_from(bytes).unwrap_or(i64::MAX), QuantityFormat::BinarySi);
    let decimal = |count: i64| Amount::from_value(count, QuantityFormat::DecimalSi);
    let cores = i64::try_from(machine.cpus.len()).unwrap_or(i64::MAX);
    let max_pods = i64::from(config.max_pods);
    let pods = match i64::from(config.pods_per_core) {
        per_core if per_core > 0 => cores.saturating_mul(per_core).min(max_pods),
        _ => max_pods,
    };
    let mut capacity: Amounts = [
        (CPU.to_owned(), decimal(cores)),
        (MEMORY.to_owned(), binary(machine.memory)),
        (PODS.to_owned(), decimal(pods)),
    ]
    .into();
    for (size, bytes) in &machine.hugepages {
        capacity.insert(format!("{HUGEPAGES_PREFIX}{}", binary(*size).canonical()), binary(*bytes));
    }
    if let Some(size) = machine.root_filesystem.filter(|_| config.local_storage_isolation) {
        capacity.insert(EPHEMERAL_STORAGE.to_owned(), binary(size));
    }
    capacity
}

/// Node allocatable: capacity minus reservations, at least 0; huge pages are subtracted from memory too.
pub fn allocatable(capacity: &Amounts, reserved: &Reservations) -> Amounts {
    let kept = reserved.total();
    let less = |amount: Amount, by: Amount| {
        let left = amount.minus(by);
        if left.is_negative() { zero() } else { left }
    };
    let mut allocatable: Amounts =
        capacity.iter().map(|(name, amount)| (name.clone(), less(*amount, amount_of(&kept, name)))).collect();
    let pages = capacity.iter().filter(|(name, _)| is_hugepage(name)).map(|(_, amount)| *amount);
    if let Some(memory) = allocatable.get_mut(MEMORY) {
        *memory = pages.fold(*memory, less);
    }
    allocatable
}

/// Declared node features whose gates are on, sorted. `UserNamespacesHostNetworkSupport` is left out: it also needs a
/// runtime that supports it.
pub fn declared_features(is_gate_on: impl Fn(&str) -> bool) -> Vec<String> {
    const FEATURES: &[&str] = &[
        "ExtendWebSocketsToKubelet",
        "InPlacePodLevelResourcesVerticalScaling",
        "InPlacePodVerticalScalingInitContainers",
        "RestartAllContainersOnContainerExits",
    ];
    FEATURES.iter().filter(|feature| is_gate_on(feature)).map(|feature| (*feature).to_owned()).collect()
}

/// Default labels, overridden by configured ones.
pub(super) fn labels(hostname: &str, own: &BTreeMap<String, String>) -> BTreeMap<String, String> {
    let default = [
        ("kubernetes.io/hostname", hostname),
        ("kubernetes.io/os", "linux"),
        ("kubernetes.io/arch", architecture()),
        ("beta.kubernetes.io/os", "linux"),
        ("beta.kubernetes.io/arch", architecture()),
    ];
    let mut labels: BTreeMap<String, String> = default.map(|(k, v)| (k.to_owned(), v.to_owned())).into();
    labels.extend(own.clone());
    labels
}

/// Go's name of the architecture (`GOARCH`).
pub fn architecture() -> &'static str {
    match std::env::consts::ARCH {
        "x86_64" => "amd64",
        "x86" => "386",
        "aarch64" => "arm64",
        "powerpc64" => "ppc64le",
        other => other,
    }
}

/// Taints of a newly registered node.
pub(super) fn taints(config: &NodeConfig) -> Vec<api::Taint> {
    let uninitialised = api::Taint {
        key: "node.cloudprovider.kubernetes.io/uninitialized".to_owned(),
        value: Some("true".to_owned()),
        effect: "NoSchedule".to_owned(),
        time_added: None,
    };
    config.taints.iter().cloned().chain(config.is_cloud_external.then_some(uninitialised)).collect()
}

fn texts(amounts: Amounts) -> BTreeMap<String, String> {
    amounts.into_iter().map(|(name, amount)| (name, amount.canonical())).collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use berth_types::CpuSet;

    fn machine() -> MachineInfo {
        MachineInfo {
            cpus: CpuSet::parse("0-3").expect("a set"),
            memory: 8 << 30,
            hugepages: [(2 << 20, 1 << 30), (1 << 30, 0)].into(),
            root_filesystem: Some(100 << 30),
            hostname: "Node-A".to_owned(),
            ..MachineInfo::default()
        }
    }

    fn config() -> NodeConfig {
        NodeConfig { max_pods: 110, local_storage_isolation: true, ..NodeConfig::default() }
    }

    fn line(list: &BTreeMap<String, String>) -> String {
        list.iter().map(|(k, v)| format!("{k}={v}")).collect::<Vec<_>>().join(" ")
    }

    #[test]
    fn capacity_and_allocatable_follow_machine_and_reservations() {
        let list = |pairs: &[(&str, &str)]| pairs.iter().map(|(k, v)| ((*k).to_owned(), (*v).to_owned())).collect();
        let reserved = ReservationConfig {
            kube: list(&[("cpu", "100m"), ("memory", "512Mi")]),
            eviction_hard: list(&[("memory.available", "100Mi"), ("nodefs.available", "10%")]),
            ..ReservationConfig::default()
        };
        let config = NodeConfig { reserved, pods_per_core: 10, ..config() };
        let facts = facts(&config, &machine()).expect("suits");
        assert_eq!(
            line(&facts.capacity),
            "cpu=4 ephemeral-storage=100Gi hugepages-1Gi=0 hugepages-2Mi=1Gi memory=8Gi pods=40"
        );
        assert_eq!(
            line(&facts.allocatable),
            "cpu=3900m ephemeral-storage=96636764000 hugepages-1Gi=0 hugepages-2Mi=1Gi memory=6556Mi pods=40"
        );
    }

    #[test]
    fn ephemeral_storage_needs_isolation_and_pods_have_a_maximum() {
        let config = NodeConfig { local_storage_isolation: false, pods_per_core: 100, ..config() };
        let facts = facts(&config, &machine()).expect("suits");
        assert_eq!(facts.capacity.get("ephemeral-storage"), None);
        assert_eq!(facts.capacity.get("pods").map(String::as_str), Some("110"));
    }

    #[test]
    fn names_labels_and_taints_are_those_of_a_new_node() {
        let taint = api::Taint { key: "k".to_owned(), effect: "NoSchedule".to_owned(), ..api::Taint::default() };
        let config = NodeConfig {
            labels: [("zone".to_owned(), "a".to_owned())].into(),
            taints: vec![taint],
            is_cloud_external: true,
            ..config()
        };
        let facts = facts(&config, &machine()).expect("suits");
        assert_eq!((facts.name.as_str(), facts.hostname.as_str()), ("node-a", "node-a"));
        let arch = architecture();
        assert_eq!(
            line(&facts.labels),
            format!(
                "beta.kubernetes.io/arch={arch} beta.kubernetes.io/os=linux kubernetes.io/arch={arch} kubernetes.io/hostname=node-a kubernetes.io/os=linux zone=a"
            )
        );
        let keys: Vec<&str> = facts.taints.iter().map(|t| t.key.as_str()).collect();
        assert_eq!(keys, ["k", "node.cloudprovider.kubernetes.io/uninitialized"]);
        assert!(facts.host_ips.is_empty());
    }

    #[test]
    fn features_follow_their_gates() {
        assert_eq!(declared_features(|_| true).len(), 4);
        assert_eq!(declared_features(|gate| gate.starts_with("Extend")), ["ExtendWebSocketsToKubelet"]);
    }
}
