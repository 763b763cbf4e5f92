//! Logs the notices from loading the configuration, each with its own message and keys.

use tracing::{info, warn};

use berth_config::{Notice, UnimplementedSetting};

/// Logs a notice from loading the configuration at its own level, with its own message and keys.
pub fn log_notice(notice: &Notice) {
    match notice {
        Notice::LenientDecoding { error, hints } => {
            warn!(err = %error, hints = ?hints, "Using lenient decoding as strict decoding failed");
        }
        Notice::DeprecatedFlag(line) => warn!("{line}"),
        Notice::GaGate { name, value } => warn!(
            featureGate = name,
            value, "Warning: setting GA feature gate. It will be removed in a future release."
        ),
        Notice::DeprecatedGate { name, value } => warn!(
            featureGate = name,
            value, "Warning: setting deprecated feature gate. It will be removed in a future release."
        ),
        Notice::Insecure { field, value } => {
            warn!(field, value = %value, "Insecure setting: clients are not authenticated or not authorized");
        }
        Notice::NotYetEffective(UnimplementedSetting { setting, feature }) => {
            warn!(setting, feature, "Setting has no effect: feature is not implemented in this release");
        }
        Notice::GateOff { setting, gate } => {
            warn!(setting, featureGate = gate, "Setting has no effect: its feature gate is off");
        }
        Notice::EvictionSignalsUnset { signals } => {
            warn!(signals = ?signals, "Hard eviction has no threshold for some disk or inode signals");
        }
        Notice::CipherSuitesIgnored => warn!("TLS 1.3 cipher suites are not configurable. Ignoring tlsCipherSuites"),
        Notice::InsecureCipher { name } => warn!(cipher = %name, "Use of insecure cipher detected."),
        Notice::BadNodeIps { ips } => warn!(IPs = ?ips, "Could not parse some node IP(s), ignoring them"),
        Notice::BadClusterDns { ip } => warn!(IP = %ip, "Invalid clusterDNS IP"),
        Notice::CpusOverwritten { before: (kube, system), after: (kube_now, system_now) } => {
            let message = "Option --reserved-cpus is specified, it will overwrite the cpu setting in KubeReserved and SystemReserved";
            info!(kubeReservedCPUs = ?kube, systemReservedCPUs = ?system, "{message}");
            let message = "After cpu setting is overwritten";
            info!(kubeReservedCPUs = ?kube_now, systemReservedCPUs = ?system_now, "{message}");
        }
        Notice::SwapIsOn => warn!("Swap is enabled, memory of pods may be written to disk"),
        Notice::CgroupOutsideReservation => {
            warn!("Kubelet cgroup is outside of the cgroup that enforces its reservation");
        }
        dropin => log_dropin_notice(dropin),
    }
}

fn log_dropin_notice(notice: &Notice) {
    match notice {
        Notice::SkippedDropin { path } => {
            info!(v = 4, file = %path, "Skipped file in drop-in directory (does not have .conf extension)");
        }
        Notice::AppliedDropin { path, fields, unknown } if unknown.is_empty() => {
            info!(file = %path, fields = ?fields, "Merged drop-in");
        }
        Notice::AppliedDropin { path, fields, unknown } => {
            warn!(file = %path, fields = ?fields, unknown = ?unknown, "Merged drop-in with unknown fields");
        }
        Notice::LinkedDropinDirectory { path } => {
            warn!(path = %path, "Drop-in directory is a symbolic link, ignoring it");
        }
        Notice::LateDefault { path, field, keeps } => {
            warn!(file = %path, field, keeps, "Drop-in is merged after the default of a dependent field was set, the default is not changed");
        }
        other => warn!(notice = ?other, "Configuration notice"),
    }
}
