//! Feature gates: known gates, their values, and their dependencies. Pure. Spec 01 §5.
//!
//! Values accumulate: flags first, then the file, then flags again. A gate set by name takes precedence over
//! `AllAlpha` and `AllBeta`, which take precedence over the defaults.

mod table;

use std::collections::BTreeMap;

pub use table::{DEPENDENCIES, GATES};

use super::notice::Notice;

/// Maturity of a gate.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Stage {
    /// Off by default; may be removed.
    Alpha,
    /// Mostly on by default.
    Beta,
    /// Always on; the gate will be removed.
    Ga,
    /// The feature or the gate will be removed.
    Deprecated,
}

impl Stage {
    /// Label value of `kubernetes_feature_enabled`.
    pub fn label(self) -> &'static str {
        match self {
            Self::Alpha => "ALPHA",
            Self::Beta => "BETA",
            Self::Ga => "",
            Self::Deprecated => "DEPRECATED",
        }
    }
}

/// A feature gate.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Gate {
    /// Name of the gate.
    pub name: &'static str,
    /// Maturity of the gate.
    pub stage: Stage,
    /// Value if the gate is not set.
    pub default: bool,
    /// Whether the gate cannot be set to another value.
    pub locked: bool,
}

/// Sets all alpha gates that are not set by name.
pub const ALL_ALPHA: &str = "AllAlpha";
/// Sets all beta gates that are not set by name.
pub const ALL_BETA: &str = "AllBeta";

fn known(name: &str) -> Option<&'static Gate> {
    GATES.binary_search_by(|gate| gate.name.cmp(name)).ok().and_then(|at| GATES.get(at))
}

/// Error of setting a gate.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum GateError {
    /// No gate has that name.
    #[error("unrecognized feature gate: {0}")]
    Unknown(String),
    /// The gate is locked to its value.
    #[error("cannot set feature gate {name} to {value}, feature is locked to {locked_to}")]
    Locked {
        /// Name of the gate.
        name: String,
        /// Requested value.
        value: bool,
        /// Actual value.
        locked_to: bool,
    },
}

/// Values of all gates.
#[derive(Clone, PartialEq, Eq, Debug, Default)]
pub struct FeatureGates {
    set: BTreeMap<&'static str, bool>,
}

impl FeatureGates {
    /// Creates the gates with their default values.
    pub fn new() -> Self {
        Self::default()
    }

    /// Whether a gate is on; unknown gates are off.
    pub fn enabled(&self, name: &str) -> bool {
        known(name).is_some_and(|gate| self.value(gate))
    }

    fn value(&self, gate: &Gate) -> bool {
        if let Some(value) = self.set.get(gate.name) {
            return *value;
        }
        let all = match gate.stage {
            Stage::Alpha => ALL_ALPHA,
            Stage::Beta => ALL_BETA,
            Stage::Ga | Stage::Deprecated => return gate.default,
        };
        if gate.name == all {
            return gate.default;
        }
        self.set.get(all).copied().unwrap_or(gate.default)
    }

    /// Iterates over all gates with their values, sorted by name.
    pub fn all(&self) -> impl Iterator<Item = (&'static Gate, bool)> + '_ {
        GATES.iter().map(|gate| (gate, self.value(gate)))
    }

    /// Sets gates in addition to those already set.
    ///
    /// # Errors
    /// A gate is unknown, or locked to another value; no gate is set in that case.
    pub fn set_from_map(&mut self, values: &BTreeMap<String, bool>) -> Result<Vec<Notice>, GateError> {
        let mut notices = Vec::new();
        let mut set = self.set.clone();
        for (name, &value) in values {
            let gate = known(name).ok_or_else(|| GateError::Unknown(name.clone()))?;
            if gate.locked && gate.default != value {
                return Err(GateError::Locked { name: name.clone(), value, locked_to: gate.default });
            }
            match gate.stage {
                Stage::Ga => notices.push(Notice::GaGate { name: gate.name, value }),
                Stage::Deprecated => notices.push(Notice::DeprecatedGate { name: gate.name, value }),
                Stage::Alpha | Stage::Beta => {}
            }
            set.insert(gate.name, value);
        }
        self.set = set;
        Ok(notices)
    }

    /// Returns a text per gate that is on while a gate it depends on is off.
    pub fn unmet_dependencies(&self) -> Vec<String> {
        let unmet = |(name, needs): &(&str, &[&str])| {
            let off: Vec<&str> = needs.iter().copied().filter(|need| !self.enabled(need)).collect();
            (self.enabled(name) && !off.is_empty()).then(|| {
                format!("{name} is enabled, but depends on features that are disabled: {}", super::text::list(off))
            })
        };
        DEPENDENCIES.iter().filter_map(unmet).collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn gates(values: &[(&str, bool)]) -> Result<(FeatureGates, Vec<Notice>), GateError> {
        let mut gates = FeatureGates::new();
        let values = values.iter().map(|(name, value)| ((*name).to_owned(), *value)).collect();
        gates.set_from_map(&values).map(|notices| (gates, notices))
    }

    #[test]
    fn the_table_is_sorted_and_its_dependencies_exist() {
        assert!(GATES.windows(2).all(|pair| pair[0].name < pair[1].name));
        assert!(
            DEPENDENCIES.iter().all(|(name, needs)| known(name).is_some() && needs.iter().all(|n| known(n).is_some()))
        );
        assert_eq!(FeatureGates::new().unmet_dependencies(), Vec::<String>::new());
    }

    #[test]
    fn a_gate_set_by_name_wins_over_its_stage() {
        for (set, gate, enabled) in [
            (&[][..], "EventedPLEG", false),
            (&[][..], "NodeSwap", true),
            (&[][..], "NoSuchGate", false),
            (&[("EventedPLEG", true)], "EventedPLEG", true),
            (&[("AllAlpha", true)], "EventedPLEG", true),
            (&[("AllAlpha", true)], "ClusterTrustBundle", false),
            (&[("AllAlpha", true), ("EventedPLEG", false)], "EventedPLEG", false),
            (&[("AllBeta", false)], "EnvFiles", false),
            (&[("AllBeta", false)], "NodeSwap", true),
            (&[("AllBeta", true)], "GitRepoVolumeDriver", false),
        ] {
            let (gates, _) = gates(set).expect("nothing locked is changed");
            assert_eq!(gates.enabled(gate), enabled, "{set:?} {gate}");
        }
    }

    #[test]
    fn locks_hold_and_old_gates_warn() {
        let error = gates(&[("NodeSwap", false)]).expect_err("AC-01-20");
        assert_eq!(error.to_string(), "cannot set feature gate NodeSwap to false, feature is locked to true");
        let error = gates(&[("NodeSwap", true), ("Bogus", true)]).expect_err("AC-01-21");
        assert_eq!(error.to_string(), "unrecognized feature gate: Bogus");
        let (_, notices) = gates(&[("NodeSwap", true), ("AllowDNSOnlyNodeCSR", true)]).expect("allowed");
        assert_eq!(
            notices,
            [
                Notice::DeprecatedGate { name: "AllowDNSOnlyNodeCSR", value: true },
                Notice::GaGate { name: "NodeSwap", value: true },
            ]
        );
    }

    #[test]
    fn dependants_of_a_disabled_gate_are_listed() {
        let (gates, _) = gates(&[("NodeDeclaredFeatures", false)]).expect("AC-01-22");
        assert_eq!(
            gates.unmet_dependencies(),
            [
                "ExtendWebSocketsToKubelet is enabled, but depends on features that are disabled: [NodeDeclaredFeatures]",
                "InPlacePodLevelResourcesVerticalScaling is enabled, but depends on features that are disabled: \
                 [NodeDeclaredFeatures]",
                "InPlacePodVerticalScalingInitContainers is enabled, but depends on features that are disabled: \
                 [NodeDeclaredFeatures]",
                "RestartAllContainersOnContainerExits is enabled, but depends on features that are disabled: \
                 [NodeDeclaredFeatures]",
            ]
        );
    }

    #[test]
    fn stages_have_the_metric_s_labels() {
        assert_eq!(
            [Stage::Alpha, Stage::Beta, Stage::Ga, Stage::Deprecated].map(Stage::label),
            ["ALPHA", "BETA", "", "DEPRECATED"]
        );
    }
}
