//! Network mode (built-in or CNI) and network readiness. Pure.
//!
//! Implements spec 09b §10.

use super::cidr::Cidr;

/// Configured network mode.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub enum ConfiguredMode {
    /// CNI plugins if a configuration exists, else the built-in network.
    #[default]
    Auto,
    /// Always the built-in network.
    Builtin,
    /// Always CNI plugins.
    Cni,
}

/// Network mode of a pod. A pod keeps the mode of its creation.
#[derive(Clone, Copy, PartialEq, Eq, Debug, serde::Serialize, serde::Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Mode {
    /// The built-in bridge.
    Builtin,
    /// CNI plugins.
    Cni,
}

/// The mode for new pods, from the configured mode and the existence of a CNI configuration.
pub fn choose(wanted: ConfiguredMode, has_plugins: bool) -> Mode {
    match wanted {
        ConfiguredMode::Cni => Mode::Cni,
        ConfiguredMode::Auto if has_plugins => Mode::Cni,
        ConfiguredMode::Auto | ConfiguredMode::Builtin => Mode::Builtin,
    }
}

/// Inputs of network readiness.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct ReadinessInputs {
    /// The mode for new pods.
    pub mode: Mode,
    /// Error of the CNI configuration or its plugins; `None` if usable.
    pub cni_failure: Option<String>,
    /// Whether a pod CIDR is set.
    pub has_pod_cidr: bool,
    /// Error of the bridge setup; `None` if it succeeded.
    pub bridge_failure: Option<String>,
}

/// Whether pods can have a network.
///
/// # Errors
/// The reason; the node condition prefixes it with `Network plugin returns error: `.
pub fn readiness(facts: &ReadinessInputs) -> Result<(), String> {
    let trouble = match facts.mode {
        Mode::Cni => facts.cni_failure.clone(),
        Mode::Builtin if !facts.has_pod_cidr => Some("pod CIDR not set".to_owned()),
        Mode::Builtin => facts.bridge_failure.clone(),
    };
    trouble.map_or(Ok(()), Err)
}

/// Message for a missing CNI configuration.
pub fn no_plugins(directory: &str) -> String {
    format!("no network config found in {directory}: cni plugin not initialized")
}

/// Candidate pod ranges where none is configured.
pub const DEFAULT_NETS: [&str; 3] = ["10.87.0.0/16", "10.215.0.0/16", "172.29.0.0/16"];

/// The first default range that overlaps no route.
pub fn default_net(routes: &[Cidr]) -> Option<Cidr> {
    let is_free = |net: &Cidr| !routes.iter().any(|route| route.prefix() > 0 && route.overlaps(*net));
    DEFAULT_NETS.iter().filter_map(|net| net.parse().ok()).find(is_free)
}

/// Warning about foreign forward chains with a drop policy, which no rule of the runtime's table can override.
pub fn dropping_chains(chains: &[String]) -> Option<String> {
    (!chains.is_empty())
        .then(|| format!("pods may not reach other hosts: {} drops forwarded packets by default", chains.join(", ")))
}

/// Warning for a kernel without nf_tables.
pub const NO_FILTER: &str = "kernel does not support nf_tables: hostPorts and masquerading are disabled";

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn plugins_are_used_where_they_are_configured() {
        for (wanted, has, expected) in [
            (ConfiguredMode::Auto, true, Mode::Cni),
            (ConfiguredMode::Auto, false, Mode::Builtin),
            (ConfiguredMode::Builtin, true, Mode::Builtin),
            (ConfiguredMode::Cni, false, Mode::Cni),
        ] {
            assert_eq!(choose(wanted, has), expected);
        }
    }

    #[test]
    fn readiness_errors_state_the_cause() {
        let builtin =
            ReadinessInputs { mode: Mode::Builtin, cni_failure: None, has_pod_cidr: true, bridge_failure: None };
        let cni =
            ReadinessInputs { mode: Mode::Cni, cni_failure: Some(no_plugins("/etc/cni/net.d")), ..builtin.clone() };
        assert_eq!(readiness(&builtin), Ok(()));
        assert_eq!(
            readiness(&ReadinessInputs { has_pod_cidr: false, ..builtin.clone() }).expect_err("not ready"),
            "pod CIDR not set"
        );
        assert_eq!(
            readiness(&cni).expect_err("not ready"),
            "no network config found in /etc/cni/net.d: cni plugin not initialized"
        );
        assert_eq!(readiness(&ReadinessInputs { cni_failure: None, ..cni }), Ok(()));
    }

    #[test]
    fn the_default_range_meets_no_route() {
        // AC-09b-N14
        let default = |routes: &[&str]| {
            let routes: Vec<Cidr> = routes.iter().map(|r| r.parse().expect("a net")).collect();
            default_net(&routes).map(|net| net.to_string())
        };
        assert_eq!(default(&["0.0.0.0/0", "192.168.0.0/24"]).as_deref(), Some("10.87.0.0/16"));
        assert_eq!(default(&["10.87.3.0/24"]).as_deref(), Some("10.215.0.0/16"));
        assert_eq!(default(&["10.0.0.0/8"]).as_deref(), Some("172.29.0.0/16"));
        assert_eq!(default(&["10.0.0.0/8", "172.16.0.0/12"]), None);
    }
}
