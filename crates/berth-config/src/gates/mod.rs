//! Feature gates: which exist, which are on, and what may not be combined. Pure. Spec 01 §5.
//!
//! Values accumulate: flags first, then the file, then flags again; what is set by name wins over
//! `AllAlpha` and `AllBeta`, which win over the defaults.

mod table;

use std::collections::BTreeMap;

pub use table::{DEPENDENCIES, GATES};

use super::notice::Notice;

/// How mature a gate is.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Stage {
    /// Off by default, may vanish.
    Alpha,
    /// Mostly on by default.
    Beta,
    /// Always on, the gate will vanish.
    Ga,
    /// On its way out.
    Deprecated,
}

impl Stage {
    /// The label of `kubernetes_feature_enabled`.
    pub fn label(self) -> &'static str {
        match self {
            Self::Alpha => "ALPHA",
            Self::Beta => "BETA",
            Self::Ga => "",
            Self::Deprecated => "DEPRECATED",
        }
    }
}

/// One gate.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Gate {
    /// Its name.
    pub name: &'static str,
    /// Its maturity.
    pub stage: Stage,
    /// Its value when nobody sets it.
    pub default: bool,
    /// Whether it cannot be set to anything else.
    pub locked: bool,
}

/// Switches all gates in alpha that are not set themselves.
pub const ALL_ALPHA: &str = "AllAlpha";
/// Switches all gates in beta that are not set themselves.
pub const ALL_BETA: &str = "AllBeta";

fn known(name: &str) -> Option<&'static Gate> {
    GATES.binary_search_by(|gate| gate.name.cmp(name)).ok().and_then(|at| GATES.get(at))
}

/// A gate that cannot be set so.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum GateError {
    /// No gate has that name.
    #[error("unrecognized feature gate: {0}")]
    Unknown(String),
    /// Its value cannot be changed.
    #[error("cannot set feature gate {name} to {value}, feature is locked to {locked_to}")]
    Locked {
        /// The gate.
        name: String,
        /// What it was to be.
        value: bool,
        /// What it is.
        locked_to: bool,
    },
}

/// The values of all gates.
#[derive(Clone, PartialEq, Eq, Debug, Default)]
pub struct FeatureGates {
    set: BTreeMap<&'static str, bool>,
}

impl FeatureGates {
    /// All at their defaults.
    pub fn new() -> Self {
        Self::default()
    }

    /// Whether the gate is on; unknown gates are off.
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

    /// Every gate with its stage and value, sorted by name.
    pub fn all(&self) -> impl Iterator<Item = (&'static Gate, bool)> + '_ {
        GATES.iter().map(|gate| (gate, self.value(gate)))
    }

    /// Adds values to those already set.
    ///
    /// # Errors
    /// A gate is unknown, or locked and was to change; nothing is set then.
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

    /// One text per gate that is on while something it depends on is off.
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
