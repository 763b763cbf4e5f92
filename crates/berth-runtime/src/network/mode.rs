//! Who makes the pods' network, and whether it is ready. Pure.
//!
//! Behaviour: spec 09b §10.

use super::cidr::Cidr;

/// What is configured.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub enum Wanted {
    /// Plugins where they are configured, else the built-in network.
    #[default]
    Auto,
    /// The built-in network.
    Builtin,
    /// Plugins.
    Cni,
}

/// Who makes a pod's network. A pod keeps what it began with.
#[derive(Clone, Copy, PartialEq, Eq, Debug, serde::Serialize, serde::Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Mode {
    /// The built-in bridge.
    Builtin,
    /// CNI plugins.
    Cni,
}

/// The mode of new pods, by what is configured and whether a configuration of plugins is there.
pub fn choose(wanted: Wanted, has_plugins: bool) -> Mode {
    match wanted {
        Wanted::Cni => Mode::Cni,
        Wanted::Auto if has_plugins => Mode::Cni,
        Wanted::Auto | Wanted::Builtin => Mode::Builtin,
    }
}

/// What readiness depends on.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Facts {
    /// The mode of new pods.
    pub mode: Mode,
    /// Why the plugins' configuration cannot be used, where it cannot.
    pub cni_failure: Option<String>,
    /// Whether a range for pods is known.
    pub has_pod_cidr: bool,
    /// Why the bridge could not be made.
    pub bridge_failure: Option<String>,
}

/// Whether pods can have a network.
///
/// # Errors
/// Why not; the node's condition says `Network plugin returns error: ` before it.
pub fn readiness(facts: &Facts) -> Result<(), String> {
    let trouble = match facts.mode {
        Mode::Cni => facts.cni_failure.clone(),
        Mode::Builtin if !facts.has_pod_cidr => Some("pod CIDR not set".to_owned()),
        Mode::Builtin => facts.bridge_failure.clone(),
    };
    trouble.map_or(Ok(()), Err)
}

/// What is said where no plugin is configured.
pub fn no_plugins(directory: &str) -> String {
    format!("no network config found in {directory}: cni plugin not initialized")
}

/// Ranges that are tried where nobody gives one.
pub const DEFAULT_NETS: [&str; 3] = ["10.87.0.0/16", "10.215.0.0/16", "172.29.0.0/16"];

/// The first of them that meets no route.
pub fn default_net(routes: &[Cidr]) -> Option<Cidr> {
    let is_free = |net: &Cidr| !routes.iter().any(|route| route.prefix() > 0 && route.overlaps(*net));
    DEFAULT_NETS.iter().filter_map(|net| net.parse().ok()).find(is_free)
}

/// What is said of chains that drop what they do not know: no rule of ours can let it pass.
pub fn dropping_chains(chains: &[String]) -> Option<String> {
    (!chains.is_empty())
        .then(|| format!("pods may not reach other machines: {} drops forwarded packets by default", chains.join(", ")))
}

/// What is said where the kernel has no nf_tables.
pub const NO_FILTER: &str = "the kernel has no nf_tables: hostPorts and masquerading are off";

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn plugins_are_used_where_they_are_configured() {
        for (wanted, has, expected) in [
            (Wanted::Auto, true, Mode::Cni),
            (Wanted::Auto, false, Mode::Builtin),
            (Wanted::Builtin, true, Mode::Builtin),
            (Wanted::Cni, false, Mode::Cni),
        ] {
            assert_eq!(choose(wanted, has), expected);
        }
    }

    #[test]
    fn readiness_says_why_not() {
        let builtin = Facts { mode: Mode::Builtin, cni_failure: None, has_pod_cidr: true, bridge_failure: None };
        let cni = Facts { mode: Mode::Cni, cni_failure: Some(no_plugins("/etc/cni/net.d")), ..builtin.clone() };
        assert_eq!(readiness(&builtin), Ok(()));
        assert_eq!(
            readiness(&Facts { has_pod_cidr: false, ..builtin.clone() }).expect_err("not ready"),
            "pod CIDR not set"
        );
        assert_eq!(
            readiness(&cni).expect_err("not ready"),
            "no network config found in /etc/cni/net.d: cni plugin not initialized"
        );
        assert_eq!(readiness(&Facts { cni_failure: None, ..cni }), Ok(()));
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
