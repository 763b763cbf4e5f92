//! Settings that are read, checked and shown, but whose feature is not there yet. Pure.
//!
//! A table, so that whoever builds a feature deletes its row. Each setting that differs from its
//! default is told once at start: nothing is ignored without a word.

use super::{defaults, fields::KubeletConfiguration, flags::KubeletFlags};

/// A setting without effect.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct NotYet {
    /// The field, or the flag with its dashes.
    pub setting: &'static str,
    /// What is missing.
    pub feature: &'static str,
}

type Differs<T> = fn(&T, &T) -> bool;

/// A field, the feature it waits for, and whether it differs from the default.
type Row<T> = (&'static str, &'static str, Differs<T>);

macro_rules! waiting {
    ($($feature:literal: $($setting:literal => $($part:ident).+),+;)+) => {
        &[$($(($setting, $feature, |mine, default| mine.$($part).+ != default.$($part).+)),+),+]
    };
}

const FIELDS: &[Row<KubeletConfiguration>] = waiting! {
    "profiles of locks": "enableContentionProfiling" => enable_contention_profiling;
    "an API client that speaks anything but JSON": "contentType" => content_type;
    "the CPU manager":
        "cpuManagerPolicy" => cpu_manager_policy, "cpuManagerPolicyOptions" => cpu_manager_policy_options,
        "cpuManagerReconcilePeriod" => cpu_manager_reconcile_period;
    "the memory manager":
        "memoryManagerPolicy" => memory_manager_policy, "reservedMemory" => reserved_memory;
    "the topology manager":
        "topologyManagerPolicy" => topology_manager_policy, "topologyManagerScope" => topology_manager_scope,
        "topologyManagerPolicyOptions" => topology_manager_policy_options;
    "memory QoS":
        "qosReserved" => qos_reserved, "memoryThrottlingFactor" => memory_throttling_factor,
        "memoryReservationPolicy" => memory_reservation_policy;
    "tracing": "tracing" => tracing;
    "user namespaces": "userNamespaces" => user_namespaces;
    "volume plugins": "volumePluginDir" => volume_plugin_dir;
};

const FLAGS: &[Row<KubeletFlags>] = waiting! {
    "container statistics":
        "--runtime-cgroups" => runtime_cgroups, "--housekeeping-interval" => housekeeping_interval,
        "--max-housekeeping-interval" => max_housekeeping_interval;
};

/// The settings that differ from their defaults and have no effect yet, in the order of the table.
pub fn not_yet_effective(config: &KubeletConfiguration, flags: &KubeletFlags) -> Vec<NotYet> {
    let (default, default_flags) = (defaults::defaults(), KubeletFlags::default());
    let told = |(setting, feature): (&'static str, &'static str)| NotYet { setting, feature };
    let fields = FIELDS.iter().filter(|row| row.2(config, &default)).map(|row| told((row.0, row.1)));
    let flags = FLAGS.iter().filter(|row| row.2(flags, &default_flags)).map(|row| told((row.0, row.1)));
    fields.chain(flags).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_what_differs_is_told() {
        let mut config = defaults::defaults();
        let mut flags = KubeletFlags::default();
        assert_eq!(not_yet_effective(&config, &flags), []);
        config.cpu_manager_policy = "static".to_owned();
        config.max_pods = 5;
        flags.runtime_cgroups = "/k".to_owned();
        let told: Vec<_> = not_yet_effective(&config, &flags).iter().map(|n| n.setting).collect();
        assert_eq!(told, ["cpuManagerPolicy", "--runtime-cgroups"]);
    }
}
