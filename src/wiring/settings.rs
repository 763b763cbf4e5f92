//! Maps the configuration to the settings of each module. Pure.
//!
//! One function per module, without IO.

use std::{collections::BTreeMap, num::NonZeroU32, path::PathBuf, time::Duration};

use jiff::SignedDuration;

use super::composition_root::BuildError;
use crate::{
    eviction::EvictionConfig,
    images::{self, DockerFolders, ImagesConfig, Parallelism, PluginFlags, VerificationPolicy},
    logs::LogsConfig,
    node::{
        self, NodeConfig,
        reservations::{ReservationConfig, Reservations},
    },
    resources::{self, Enforcement, ManagerConfig, PodRules, Reservation, ReservedFor, kernel_flags::OnDifference},
    runtime::{
        RuntimeConfig,
        backoff::BackoffLimits,
        preparer::PreparerConfig,
        request::resources::{NodeSwap, ResourceInputs, SwapBehavior},
    },
    sources::SourcesConfig,
};
use berth_config::{KubeletConfiguration, LoadedConfig};
use berth_cri::CriConfig;
use berth_otel::TraceExportSettings;
use berth_types::{
    api,
    memory_qos::{MemoryQos, MemoryReservationPolicy},
    quantity::Amount,
};

/// Settings of the export of traces; `None` if `tracing` is not configured.
pub fn traces(loaded: &LoadedConfig, host_name: &str) -> Option<TraceExportSettings> {
    loaded.config.tracing.as_ref().map(|tracing| TraceExportSettings {
        endpoint: tracing.endpoint.clone(),
        sampling_rate_per_million: tracing.sampling_rate_per_million.and_then(|rate| rate.try_into().ok()).unwrap_or(0),
        host_name: host_name.to_owned(),
    })
}

/// Settings of the CRI client.
pub fn cri(loaded: &LoadedConfig) -> CriConfig {
    let config = &loaded.config;
    CriConfig {
        endpoint: config.container_runtime_endpoint.clone(),
        image_endpoint: config.image_service_endpoint.clone(),
        request_timeout: config.runtime_request_timeout.std(),
        list_streaming: loaded.gates.enabled("CRIListStreaming"),
    }
}

/// Policy for kernel settings that differ from what pods need.
pub fn kernel_flags(loaded: &LoadedConfig, in_user_namespace: bool) -> OnDifference {
    if loaded.config.protect_kernel_defaults {
        OnDifference::Refuse
    } else if in_user_namespace && loaded.gates.enabled("KubeletInUserNamespace") {
        OnDifference::TryToWrite
    } else {
        OnDifference::Write
    }
}

/// Settings of the node's facts.
pub fn node(loaded: &LoadedConfig) -> NodeConfig {
    let config = &loaded.config;
    let hard = if loaded.flags.experimental_allocatable_ignore_eviction {
        Default::default()
    } else {
        config.eviction_hard.clone()
    };
    NodeConfig {
        hostname_override: loaded.flags.hostname_override.clone(),
        max_pods: config.max_pods,
        pods_per_core: config.pods_per_core,
        reserved: ReservationConfig {
            kube: config.kube_reserved.clone(),
            system: config.system_reserved.clone(),
            cpus: config.reserved_system_cpus.clone(),
            eviction_hard: hard,
        },
        local_storage_isolation: config.local_storage_capacity_isolation,
        labels: loaded.flags.node_labels.clone(),
        taints: config.register_with_taints.iter().map(taint).collect(),
        is_cloud_external: loaded.flags.cloud_provider == "external",
        declared_features: crate::node::declared_features(|gate| loaded.gates.enabled(gate)),
    }
}

fn taint(taint: &berth_config::fields::Taint) -> api::Taint {
    let value = (!taint.value.is_empty()).then(|| taint.value.clone());
    api::Taint { key: taint.key.clone(), value, effect: taint.effect.clone(), time_added: None }
}

/// Settings of the pod sources.
pub fn sources(loaded: &LoadedConfig, node_name: &str, has_objects: bool) -> SourcesConfig {
    let config = &loaded.config;
    let some = |text: &String| (!text.is_empty()).then(|| text.clone());
    let headers = config.static_pod_url_header.iter();
    SourcesConfig {
        node_name: node_name.to_owned(),
        static_pod_path: some(&config.static_pod_path).map(PathBuf::from),
        file_check_frequency: config.file_check_frequency.std(),
        static_pod_url: some(&config.static_pod_url),
        static_pod_url_headers: headers
            .flat_map(|(name, values)| values.iter().map(|value| (name.clone(), value.clone())))
            .collect(),
        http_check_frequency: config.http_check_frequency.std(),
        // Objects that are provided beside the pods may be referred to.
        prevent_api_references: loaded.gates.enabled("PreventStaticPodAPIReferences") && !has_objects,
    }
}

/// Settings of the image manager.
pub fn images(loaded: &LoadedConfig) -> ImagesConfig {
    let config = &loaded.config;
    let whole = |number: i32| u32::try_from(number).unwrap_or(0);
    ImagesConfig {
        root: loaded.root_directory(),
        max_pods: whole(config.max_pods),
        registry_qps: whole(config.registry_pull_qps),
        registry_burst: whole(config.registry_burst),
        parallelism: parallelism(config),
        verification: verification(loaded),
        handler_in_calls: loaded.gates.enabled("RuntimeClassInImageCriApi"),
        docker: DockerFolders {
            root: loaded.root_directory(),
            working: std::env::current_dir().ok(),
            home: std::env::var_os("HOME").map(PathBuf::from),
        },
        plugins: plugins(loaded),
        gc: images::GcPolicy {
            high_percent: whole(config.image_gc_high_threshold_percent),
            low_percent: whole(config.image_gc_low_threshold_percent),
            minimum_age: config.image_minimum_gc_age.std(),
            maximum_age: config.image_maximum_gc_age.std(),
        },
    }
}

/// Either flag enables the plugins; a missing counterpart is reported when they are loaded.
fn plugins(loaded: &LoadedConfig) -> Option<PluginFlags> {
    let (config, bin_dir) =
        (&loaded.flags.image_credential_provider_config, &loaded.flags.image_credential_provider_bin_dir);
    let is_asked_for = !config.is_empty() || !bin_dir.is_empty();
    is_asked_for.then(|| PluginFlags { config: PathBuf::from(config), bin_dir: PathBuf::from(bin_dir) })
}

fn parallelism(config: &KubeletConfiguration) -> Parallelism {
    if config.serialize_image_pulls {
        return Parallelism::Serial;
    }
    let limit = config.max_parallel_image_pulls.and_then(|n| u32::try_from(n).ok()).and_then(NonZeroU32::new);
    limit.map_or(Parallelism::Unlimited, Parallelism::Limited)
}

fn verification(loaded: &LoadedConfig) -> Option<VerificationPolicy> {
    let config = &loaded.config;
    loaded.gates.enabled("KubeletEnsureSecretPulledImages").then(|| {
        match config.image_pull_credentials_verification_policy.as_str() {
            "NeverVerify" => VerificationPolicy::Never,
            "NeverVerifyAllowlistedImages" => {
                VerificationPolicy::Allowlist(config.preloaded_images_verification_allowlist.clone())
            }
            "AlwaysVerify" => VerificationPolicy::Always,
            _ => VerificationPolicy::PulledImages,
        }
    })
}

/// Settings of container logs; validation has rejected sizes that are no whole quantity.
pub fn logs(loaded: &LoadedConfig) -> LogsConfig {
    let config = &loaded.config;
    let size = Amount::parse(&config.container_log_max_size).ok().map(Amount::value);
    LogsConfig {
        pod_logs_dir: PathBuf::from(&config.pod_logs_dir),
        max_size: size.and_then(|size| u64::try_from(size).ok()),
        max_files: usize::try_from(config.container_log_max_files).unwrap_or(2),
        max_workers: usize::try_from(config.container_log_max_workers).unwrap_or(1),
        monitor_interval: config.container_log_monitor_interval.std(),
        ..LogsConfig::default()
    }
}

/// Settings of the runtime manager.
pub fn runtime(loaded: &LoadedConfig, name: &str) -> RuntimeConfig {
    let config = &loaded.config;
    let flags = &loaded.flags;
    let longest = config.crash_loop_back_off.max_container_restart_period.map(|period| period.std());
    let min_age = SignedDuration::try_from(flags.minimum_container_ttl_duration.std()).unwrap_or_default();
    RuntimeConfig {
        request_timeout: config.runtime_request_timeout.std(),
        pod_logs_dir: PathBuf::from(&config.pod_logs_dir),
        backoff: BackoffLimits::new(
            loaded.gates.enabled("ReduceDefaultCrashLoopBackOffDecay"),
            backoff_limit(loaded, longest),
        ),
        gc: crate::runtime::gc_rank::GcPolicy {
            min_age,
            max_per_container: flags.maximum_dead_containers_per_container,
            max_total: flags.maximum_dead_containers,
        },
        gates: crate::runtime::actions::Gates {
            resize_init: loaded.gates.enabled("InPlacePodVerticalScalingInitContainers"),
            resize_pod_level: loaded.gates.enabled("InPlacePodLevelResourcesVerticalScaling"),
        },
        ..RuntimeConfig::new(name)
    }
}

/// The configured maximum takes precedence over the reducing gate only if it differs from the default of 5 min.
fn backoff_limit(loaded: &LoadedConfig, longest: Option<Duration>) -> Option<Duration> {
    let reduced = loaded.gates.enabled("ReduceDefaultCrashLoopBackOffDecay");
    longest.filter(|longest| !reduced || *longest != Duration::from_secs(300))
}

/// Settings of the preparer of sandboxes and containers.
pub fn preparer(
    loaded: &LoadedConfig,
    machine: &node::MachineInfo,
    node_name: &str,
    kernel: Kernel,
    memory_qos: Option<MemoryQos>,
) -> PreparerConfig {
    let config = &loaded.config;
    let resolv_conf = (!config.resolv_conf.is_empty()).then(|| PathBuf::from(&config.resolv_conf));
    PreparerConfig {
        root_dir: loaded.root_directory(),
        pod_logs_dir: PathBuf::from(&config.pod_logs_dir),
        resolv_conf,
        node_hosts_file: "/etc/hosts".into(),
        // Parsed like the pod's resolver does; invalid addresses were logged at startup.
        cluster_dns: config
            .cluster_dns
            .iter()
            .filter_map(|ip| berth_config::sloppy_ip(ip))
            .map(|ip| ip.to_string())
            .collect(),
        cluster_domain: config.cluster_domain.clone(),
        node_name: node_name.to_owned(),
        seccomp_default: loaded.seccomp_default(),
        stop_signals: loaded.gates.enabled("ContainerStopSignals"),
        selinux: kernel.selinux,
        machine_masked: kernel.masked,
        machine: ResourceInputs {
            cpu_cfs_quota: config.cpu_cfs_quota,
            cpu_period_us: cpu_period_us(config),
            memory_bytes: machine.memory,
            hugepage_sizes: kernel.hugepage_sizes,
            cgroup_v2: kernel.cgroup_v2,
            single_process_oom_kill: config.single_process_oom_kill.unwrap_or(!kernel.cgroup_v2),
            swap: NodeSwap {
                controllable: kernel.swap_controllable,
                behavior: match config.memory_swap.swap_behavior.as_str() {
                    "LimitedSwap" => SwapBehavior::LimitedSwap,
                    _ => SwapBehavior::NoSwap,
                },
                bytes: machine.swap,
            },
            memory_qos,
        },
    }
}

/// Settings of eviction.
///
/// # Errors
/// Invalid thresholds.
pub fn eviction(loaded: &LoadedConfig) -> Result<EvictionConfig, BuildError> {
    let config = &loaded.config;
    Ok(EvictionConfig {
        thresholds: berth_config::eviction::thresholds(config).map_err(BuildError)?,
        transition: config.eviction_pressure_transition_period.std(),
        max_pod_grace: i64::from(config.eviction_max_pod_grace_period),
        local_storage: config.local_storage_capacity_isolation,
    })
}

/// Settings of the resource manager.
///
/// # Errors
/// Reservations that are invalid or exceed the machine's capacity.
pub fn resources(
    loaded: &LoadedConfig,
    machine: &node::MachineInfo,
    driver: resources::CgroupDriver,
) -> Result<ManagerConfig, BuildError> {
    let config = &loaded.config;
    let node = node(loaded);
    let capacity = node::capacity(&node, machine);
    let wrong = |error: node::reservations::ReservationError| BuildError(error.to_string());
    let reserved = Reservations::new(&node.reserved, &machine.cpus, &capacity).map_err(wrong)?;
    let enforces = |what: &str| config.enforce_node_allocatable.iter().any(|value| value == what);
    let enforcement = |who: &str| match (enforces(who), enforces(&format!("{who}-compressible"))) {
        (true, _) => Enforcement::Full,
        (false, true) => Enforcement::Compressible,
        (false, false) => Enforcement::None,
    };
    Ok(ManagerConfig {
        cgroup_root: config.cgroup_root.clone(),
        cgroups_per_qos: config.cgroups_per_qos,
        rules: PodRules {
            cpu_cfs_quota: config.cpu_cfs_quota,
            cpu_period_us: cpu_period_us(config),
            pids_limit: config.pod_pids_limit,
            hugepage_sizes: machine.hugepages.keys().copied().collect(),
            driver,
            memory_qos: memory_reservation_policy(loaded),
        },
        capacity: enforceable(&capacity),
        reservations: vec![
            Reservation {
                for_whom: ReservedFor::System,
                amounts: enforceable(&reserved.system),
                cgroup: config.system_reserved_cgroup.clone(),
                enforcement: enforcement("system-reserved"),
            },
            Reservation {
                for_whom: ReservedFor::Kube,
                amounts: enforceable(&reserved.kube),
                cgroup: config.kube_reserved_cgroup.clone(),
                enforcement: enforcement("kube-reserved"),
            },
        ],
        enforce_pods: enforces("pods"),
        online_cpus: None,
        qos_reserved_memory: loaded
            .gates
            .enabled("QOSReserved")
            .then(|| berth_config::reserved_memory_percent(&config.qos_reserved))
            .flatten(),
    })
}

/// `memoryReservationPolicy`; `None` without the gate `MemoryQoS`.
pub fn memory_reservation_policy(loaded: &LoadedConfig) -> Option<MemoryReservationPolicy> {
    let policy = match loaded.config.memory_reservation_policy.as_str() {
        "TieredReservation" => MemoryReservationPolicy::TieredReservation,
        _ => MemoryReservationPolicy::None,
    };
    loaded.gates.enabled("MemoryQoS").then_some(policy)
}

/// Memory that the reservations leave, in bytes, whether or not they are enforced.
///
/// # Errors
/// Reservations that are invalid.
pub fn absolute_allocatable_memory(loaded: &LoadedConfig, machine: &node::MachineInfo) -> Result<u64, BuildError> {
    let node = node(loaded);
    let capacity = node::capacity(&node, machine);
    let reserved = Reservations::new(&node.reserved, &machine.cpus, &capacity);
    let reserved = reserved.map_err(|error| BuildError(error.to_string()))?;
    let memory = |amounts: &BTreeMap<String, Amount>| amounts.get("memory").map_or(0, |amount| amount.value());
    let left = memory(&capacity).saturating_sub(memory(&reserved.system)).saturating_sub(memory(&reserved.kube));
    Ok(left.max(0).unsigned_abs())
}

/// Amounts that can be enforced by cgroups.
fn enforceable(amounts: &BTreeMap<String, Amount>) -> resources::Amounts {
    let hugepages = amounts.iter().filter_map(|(name, amount)| {
        let size = Amount::parse(name.strip_prefix("hugepages-")?).ok()?.value();
        Some((u64::try_from(size).ok()?, u64::try_from(amount.value()).ok()?))
    });
    resources::Amounts {
        cpu_milli: amounts.get("cpu").map(|amount| amount.milli()),
        memory_bytes: amounts.get("memory").map(|amount| amount.value()),
        pids: amounts.get("pid").map(|amount| amount.value()),
        hugepages: hugepages.collect(),
    }
}

fn cpu_period_us(config: &KubeletConfiguration) -> u64 {
    u64::try_from(config.cpu_cfs_quota_period.std().as_micros()).unwrap_or(100_000)
}

/// Features of the kernel that affect containers.
#[derive(Clone, Debug)]
pub struct Kernel {
    /// Whether SELinux is enabled.
    pub selinux: bool,
    /// Paths to mask in addition to the default ones.
    pub masked: Vec<String>,
    /// Huge page sizes, in bytes.
    pub hugepage_sizes: Vec<u64>,
    /// Whether cgroup v2 is mounted as the only hierarchy.
    pub cgroup_v2: bool,
    /// Whether swap can be limited per cgroup.
    pub swap_controllable: bool,
}

/// Settings of `kubeletCgroups` and `systemCgroups`.
///
/// # Errors
/// Paths that are invalid.
pub fn system_cgroups(loaded: &LoadedConfig) -> Result<resources::system_cgroups::SystemCgroupConfig, BuildError> {
    let config = &loaded.config;
    let (kubelet, system) = (&config.kubelet_cgroups, &config.system_cgroups);
    resources::system_cgroups::SystemCgroupConfig::new(kubelet, system, config.oom_score_adj)
        .map_err(|error| BuildError(error.to_string()))
}

#[cfg(test)]
mod tests {
    use super::*;
    use berth_config::{HostFacts, Personality, StartupAction, load};

    fn loaded(args: &[&str]) -> LoadedConfig {
        let args: Vec<_> = args.iter().map(std::ffi::OsString::from).collect();
        match load(Personality::Kubelet, &args, &HostFacts::default()).outcome {
            Ok(StartupAction::Run(loaded)) => *loaded,
            other => panic!("{other:?}"),
        }
    }

    #[test]
    fn protected_kernel_settings_are_never_written() {
        use OnDifference::{Refuse, TryToWrite, Write};
        let (protect, gate) = ("--protect-kernel-defaults", "--feature-gates=KubeletInUserNamespace=true");
        for (args, namespaced, expected) in [
            (&[][..], false, Write),
            (&[], true, Write),
            (&[gate], false, Write),
            (&[gate], true, TryToWrite),
            (&[protect], false, Refuse),
            (&[protect, gate], true, Refuse),
        ] {
            assert_eq!(kernel_flags(&loaded(args), namespaced), expected, "{args:?} {namespaced}");
        }
    }

    #[test]
    fn gates_switch_memory_qos_and_reserved_requests() {
        let (gates, percent) = ("--feature-gates=MemoryQoS=true,QOSReserved=true", "--qos-reserved=memory=50%");
        let machine = node::MachineInfo { memory: 8 << 30, ..node::MachineInfo::default() };
        for (args, policy, reserved) in [
            (&[][..], None, None),
            (&[percent], None, None),
            (&[gates], Some(MemoryReservationPolicy::None), None),
            (&[gates, percent], Some(MemoryReservationPolicy::None), Some(50)),
        ] {
            let loaded = loaded(args);
            let config = resources(&loaded, &machine, resources::CgroupDriver::Cgroupfs).expect("valid");
            assert_eq!((config.rules.memory_qos, config.qos_reserved_memory), (policy, reserved), "{args:?}");
            assert_eq!(memory_reservation_policy(&loaded), policy, "{args:?}");
        }
        let mut tiered = loaded(&[gates]);
        tiered.config.memory_reservation_policy = "TieredReservation".to_owned();
        assert_eq!(memory_reservation_policy(&tiered), Some(MemoryReservationPolicy::TieredReservation));
    }

    #[test]
    fn memory_that_reservations_leave_does_not_depend_on_eviction() {
        let machine = node::MachineInfo { memory: 8 << 30, ..node::MachineInfo::default() };
        for (args, expected) in [
            (&[][..], 8 << 30),
            (&["--system-reserved=memory=1Gi", "--kube-reserved=memory=512Mi"], (6 << 30) + (512 << 20)),
            (&["--eviction-hard=memory.available<1Gi", "--enforce-node-allocatable="], 8 << 30),
        ] {
            assert_eq!(absolute_allocatable_memory(&loaded(args), &machine).expect("valid"), expected, "{args:?}");
        }
    }
}
