//! Settings without effect because the feature gate that they require is off. Pure.
//!
//! kubelet ignores them silently. Other settings of this kind are refused without their gate.

use super::{defaults, fields::KubeletConfiguration, gates::FeatureGates, notice::Notice};

type Differs = fn(&KubeletConfiguration, &KubeletConfiguration) -> bool;

/// Setting, its gate, and whether it differs from the default.
const GATED: &[(&str, &str, Differs)] = &[
    ("qosReserved", "QOSReserved", |mine, default| mine.qos_reserved != default.qos_reserved),
    ("memoryThrottlingFactor", "MemoryQoS", |mine, default| {
        mine.memory_throttling_factor != default.memory_throttling_factor
    }),
];

/// Returns the settings that differ from their defaults while their gate is off.
pub(super) fn settings_without_gate(config: &KubeletConfiguration, gates: &FeatureGates) -> Vec<Notice> {
    let default = defaults::defaults();
    let idle = GATED.iter().filter(|(_, gate, differs)| differs(config, &default) && !gates.enabled(gate));
    idle.map(|(setting, gate, _)| Notice::GateOff { setting, gate }).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn settings_whose_gate_is_off_are_reported() {
        let mut config = defaults::defaults();
        let gates = |names: &[&str]| {
            let mut gates = FeatureGates::new();
            let values = names.iter().map(|name| ((*name).to_owned(), true)).collect();
            gates.set_from_map(&values).expect("known");
            gates
        };
        assert_eq!(settings_without_gate(&config, &gates(&[])), []);
        config.qos_reserved = [("memory".to_owned(), "50%".to_owned())].into();
        config.memory_throttling_factor = Some(0.8);
        let off = |setting, gate| Notice::GateOff { setting, gate };
        let (reserved, factor) = (off("qosReserved", "QOSReserved"), off("memoryThrottlingFactor", "MemoryQoS"));
        assert_eq!(settings_without_gate(&config, &gates(&[])), [reserved.clone(), factor]);
        assert_eq!(settings_without_gate(&config, &gates(&["MemoryQoS"])), [reserved]);
        assert_eq!(settings_without_gate(&config, &gates(&["AllAlpha"])), []);
    }
}
