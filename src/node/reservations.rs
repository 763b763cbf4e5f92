//! Node reservations: `kubeReserved`, `systemReserved`, and hard eviction thresholds. Pure.
//!
//! Implements spec 01 §14, 05 §3.2, 06a §8.1.

use std::collections::BTreeMap;

use berth_config::eviction::{Signal, level};
use berth_types::{
    CpuSet, CpuSetError,
    quantity::{Amount, QuantityError, QuantityFormat},
    resources::{Amounts, CPU, EPHEMERAL_STORAGE, MEMORY, add, amount_of},
};

/// The `pid` resource, which exists only in reservations.
pub const PID: &str = "pid";

/// Invalid reservations or thresholds; the agent does not start.
#[derive(Clone, PartialEq, Eq, Debug, thiserror::Error)]
pub enum ReservationError {
    /// A value of `kubeReserved` or `systemReserved` is invalid.
    #[error("--{flag} value failed to parse: {cause}")]
    List {
        /// `kube-reserved` or `system-reserved`.
        flag: &'static str,
        /// The invalid item.
        cause: ItemError,
    },
    /// `reservedSystemCPUs` is not a CPU list.
    #[error("unable to parse reserved-cpus list: {0}")]
    Cpus(#[from] CpuSetError),
    /// `reservedSystemCPUs` contains CPUs that are not online.
    #[error("reserved-cpus: {reserved} is not a subset of online-cpus: {online}")]
    NotOnline {
        /// Configured CPUs.
        reserved: CpuSet,
        /// Online CPUs.
        online: CpuSet,
    },
    /// A hard eviction threshold is invalid.
    #[error("{0}")]
    Threshold(String),
    /// Reservations exceed the capacity.
    #[error("invalid Node Allocatable configuration. {0}")]
    ExceedsCapacity(String),
}

/// Error of one reserved resource.
#[derive(Clone, PartialEq, Eq, Debug, thiserror::Error)]
pub enum ItemError {
    /// The resource cannot be reserved.
    #[error("cannot reserve {0:?} resource")]
    Unknown(String),
    /// The quantity cannot be parsed.
    #[error("failed to parse quantity {quantity:?} for {resource:?} resource: {cause}")]
    Quantity {
        /// Resource name.
        resource: String,
        /// Configured quantity.
        quantity: String,
        /// Parse error.
        cause: QuantityError,
    },
    /// The quantity is negative.
    #[error("resource quantity for {resource:?} cannot be negative: {quantity}")]
    Negative {
        /// Resource name.
        resource: String,
        /// Configured quantity.
        quantity: String,
    },
}

/// Parses `kubeReserved` or `systemReserved`; `flag` names the setting in errors.
///
/// # Errors
/// The first item that cannot be reserved or parsed.
pub fn parse(flag: &'static str, list: &BTreeMap<String, String>) -> Result<Amounts, ReservationError> {
    let mut reserved = Amounts::new();
    for (resource, quantity) in list {
        let error = |cause| ReservationError::List { flag, cause };
        if !matches!(resource.as_str(), CPU | MEMORY | EPHEMERAL_STORAGE | PID) {
            return Err(error(ItemError::Unknown(resource.clone())));
        }
        let (resource, quantity) = (resource.clone(), quantity.clone());
        match Amount::parse(&quantity) {
            Ok(amount) if amount.is_negative() => return Err(error(ItemError::Negative { resource, quantity })),
            Ok(amount) => reserved.insert(resource, amount),
            Err(cause) => return Err(error(ItemError::Quantity { resource, quantity, cause })),
        };
    }
    Ok(reserved)
}

/// Configured reservations, unparsed.
#[derive(Clone, PartialEq, Eq, Debug, Default)]
pub struct ReservationConfig {
    /// `kubeReserved`.
    pub kube: BTreeMap<String, String>,
    /// `systemReserved`.
    pub system: BTreeMap<String, String>,
    /// `reservedSystemCPUs`; replaces cpu in both lists where set.
    pub cpus: String,
    /// `evictionHard`.
    pub eviction_hard: BTreeMap<String, String>,
}

/// Parsed reservations.
#[derive(Clone, PartialEq, Eq, Debug, Default)]
pub struct Reservations {
    /// Reserved for Kubernetes components: the agent and the runtime.
    pub kube: Amounts,
    /// Reserved for other system processes.
    pub system: Amounts,
    /// Memory and ephemeral storage below the hard eviction thresholds, never allocatable.
    pub eviction: Amounts,
}

impl Reservations {
    /// Parses the configuration and checks it against the machine.
    ///
    /// # Errors
    /// The first value that cannot be parsed, or the reservations that exceed `capacity`.
    pub fn new(config: &ReservationConfig, online: &CpuSet, capacity: &Amounts) -> Result<Self, ReservationError> {
        let mut kube = parse("kube-reserved", &config.kube)?;
        let mut system = parse("system-reserved", &config.system)?;
        if !config.cpus.is_empty() {
            let reserved = CpuSet::parse(&config.cpus)?;
            if !reserved.is_subset(online) {
                return Err(ReservationError::NotOnline { reserved, online: online.clone() });
            }
            kube.remove(CPU);
            let count = i64::try_from(reserved.len()).unwrap_or(i64::MAX);
            system.insert(CPU.to_owned(), Amount::from_value(count, QuantityFormat::DecimalSi));
        }
        let reserved = Self { kube, system, eviction: eviction(&config.eviction_hard, capacity)? };
        reserved.check(capacity)?;
        Ok(reserved)
    }

    /// Sum of all reservations, as subtracted from capacity to get allocatable.
    pub fn total(&self) -> Amounts {
        let mut total = self.kube.clone();
        add(&mut total, &self.system);
        add(&mut total, &self.eviction);
        total.retain(|_, amount| !amount.is_zero());
        total
    }

    fn check(&self, capacity: &Amounts) -> Result<(), ReservationError> {
        let total = self.total();
        let short = total.iter().filter_map(|(name, kept)| {
            let has = capacity.get(name).filter(|has| *has < kept)?;
            let (kept, has) = (kept.canonical(), has.canonical());
            Some(format!(
                "Resource {name:?} has a reservation of {kept} but capacity of {has}. Expected capacity >= reservation."
            ))
        });
        let text = short.collect::<Vec<_>>().join(" ");
        if text.is_empty() { Ok(()) } else { Err(ReservationError::ExceedsCapacity(text)) }
    }
}

/// Amounts reserved by hard eviction thresholds: memory and the root directory's file system.
fn eviction(hard: &BTreeMap<String, String>, capacity: &Amounts) -> Result<Amounts, ReservationError> {
    let mut kept = Amounts::new();
    for (signal, resource) in [(Signal::Memory, MEMORY), (Signal::NodeFs, EPHEMERAL_STORAGE)] {
        let Some(text) = hard.get(signal.as_str()) else { continue };
        if let Some(below) = level(signal, text).map_err(ReservationError::Threshold)? {
            kept.insert(resource.to_owned(), below.of(amount_of(capacity, resource).value()));
        }
    }
    Ok(kept)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn list(pairs: &[(&str, &str)]) -> BTreeMap<String, String> {
        pairs.iter().map(|(k, v)| ((*k).to_owned(), (*v).to_owned())).collect()
    }

    fn capacity() -> Amounts {
        list(&[("cpu", "4"), ("memory", "41218252Ki"), ("ephemeral-storage", "100Gi")])
            .into_iter()
            .map(|(k, v)| (k, Amount::parse(&v).expect("a quantity")))
            .collect()
    }

    fn total(config: &ReservationConfig) -> Result<String, String> {
        let online = CpuSet::parse("0-3").expect("a set");
        let reserved = Reservations::new(config, &online, &capacity()).map_err(|e| e.to_string())?;
        Ok(reserved.total().iter().map(|(k, v)| format!("{k}={} ", v.canonical())).collect())
    }

    #[test]
    fn reservations_add_up() {
        let config = ReservationConfig {
            kube: list(&[("cpu", "100m"), ("memory", "1Gi"), ("pid", "0")]),
            system: list(&[("cpu", "400m"), ("ephemeral-storage", "1Gi")]),
            eviction_hard: list(&[("memory.available", "100Mi"), ("nodefs.available", "0%"), ("pid.available", "10%")]),
            ..ReservationConfig::default()
        };
        assert_eq!(total(&config).as_deref(), Ok("cpu=500m ephemeral-storage=1Gi memory=1124Mi "));
        let config = ReservationConfig { cpus: "0-1".to_owned(), ..config };
        assert_eq!(total(&config).as_deref(), Ok("cpu=2 ephemeral-storage=1Gi memory=1124Mi "));
    }

    #[test]
    fn percentages_are_single_precision() {
        let config =
            ReservationConfig { eviction_hard: list(&[("memory.available", "10%")]), ..ReservationConfig::default() };
        assert_eq!(total(&config).as_deref(), Ok("memory=4220749067 "));
    }

    #[test]
    fn mistakes_are_named() {
        let kube = |k: &str, v: &str| ReservationConfig { kube: list(&[(k, v)]), ..ReservationConfig::default() };
        let system = |k: &str, v: &str| ReservationConfig { system: list(&[(k, v)]), ..ReservationConfig::default() };
        let cpus = |text: &str| ReservationConfig { cpus: text.to_owned(), ..ReservationConfig::default() };
        let hard = |v: &str| ReservationConfig {
            eviction_hard: list(&[("memory.available", v)]),
            ..ReservationConfig::default()
        };
        for (config, text) in [
            // AC-01-39
            (kube("gpu", "1"), r#"--kube-reserved value failed to parse: cannot reserve "gpu" resource"#),
            (
                system("cpu", "1x"),
                r#"--system-reserved value failed to parse: failed to parse quantity "1x" for "cpu" resource: unable to parse quantity's suffix"#,
            ),
            (
                kube("cpu", "-1"),
                r#"--kube-reserved value failed to parse: resource quantity for "cpu" cannot be negative: -1"#,
            ),
            (cpus("2-5"), "reserved-cpus: 2-5 is not a subset of online-cpus: 0-3"),
            (
                kube("cpu", "5"),
                r#"invalid Node Allocatable configuration. Resource "cpu" has a reservation of 5 but capacity of 4. Expected capacity >= reservation."#,
            ),
            (hard("0"), "eviction threshold memory.available must be positive: 0"),
            (hard("-1%"), "eviction percentage threshold memory.available must be >= 0%: -1%"),
            (hard("NaN%"), "eviction percentage threshold memory.available must be >= 0%: NaN%"),
            (hard("101%"), "eviction percentage threshold memory.available must be <= 100%: 101%"),
        ] {
            assert_eq!(total(&config).expect_err(text), text);
        }
    }
}
