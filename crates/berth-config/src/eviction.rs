//! Eviction signals and thresholds of the configuration. Pure.
//! Implements spec 05 §3.1-3.2.

use std::{collections::BTreeMap, time::Duration};

use super::{GoDuration, KubeletConfiguration};
use berth_types::quantity::{Amount, QuantityFormat};

/// Eviction signal. Ordered as pressure is relieved: memory first.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug)]
pub enum Signal {
    /// Available memory of the machine.
    Memory,
    /// Available memory below the limit of all pods; hard thresholds of [`Signal::Memory`] are copied to it.
    AllocatableMemory,
    /// Available bytes on the file system of the root directory.
    NodeFs,
    /// Free inodes on the file system of the root directory.
    NodeFsInodes,
    /// Available bytes on the file system of images.
    ImageFs,
    /// Free inodes on the file system of images.
    ImageFsInodes,
    /// Available bytes on the file system of writable layers; not configurable.
    ContainerFs,
    /// Free inodes on the file system of writable layers; not configurable.
    ContainerFsInodes,
    /// Available process IDs.
    Pid,
}

impl Signal {
    /// All signals, in order.
    pub const ALL: [Self; 9] = [
        Self::Memory,
        Self::AllocatableMemory,
        Self::NodeFs,
        Self::NodeFsInodes,
        Self::ImageFs,
        Self::ImageFsInodes,
        Self::ContainerFs,
        Self::ContainerFsInodes,
        Self::Pid,
    ];

    /// Name of the signal in the configuration and in metrics.
    pub const fn as_str(self) -> &'static str {
        match self {
            Self::Memory => "memory.available",
            Self::AllocatableMemory => "allocatableMemory.available",
            Self::NodeFs => "nodefs.available",
            Self::NodeFsInodes => "nodefs.inodesFree",
            Self::ImageFs => "imagefs.available",
            Self::ImageFsInodes => "imagefs.inodesFree",
            Self::ContainerFs => "containerfs.available",
            Self::ContainerFsInodes => "containerfs.inodesFree",
            Self::Pid => "pid.available",
        }
    }

    fn parse(text: &str) -> Result<Self, String> {
        let known = Self::ALL.into_iter().find(|signal| signal.as_str() == text);
        known.ok_or_else(|| format!("unsupported eviction signal {text}"))
    }
}

/// An amount as configured: absolute, or relative to the capacity.
#[derive(Clone, Copy, PartialEq, Debug)]
pub enum ThresholdValue {
    /// An absolute amount.
    Quantity(Amount),
    /// Share of the capacity, 0 to 1. Single precision as in the reference, because it affects the reported values.
    Share(f32),
}

impl ThresholdValue {
    /// Absolute amount for a capacity.
    pub fn of(self, capacity: i64) -> Amount {
        match self {
            Self::Quantity(amount) => amount,
            #[allow(
                clippy::cast_possible_truncation,
                clippy::cast_precision_loss,
                reason = "the reference calculates in floating point and truncates"
            )]
            Self::Share(share) => {
                Amount::from_value((capacity as f64 * f64::from(share)) as i64, QuantityFormat::BinarySi)
            }
        }
    }
}

/// An eviction threshold.
#[derive(Clone, PartialEq, Debug)]
pub struct Threshold {
    /// The observed signal.
    pub signal: Signal,
    /// The threshold is crossed when less than this is available.
    pub below: ThresholdValue,
    /// Time for which a soft threshold must be crossed before pods are evicted; `None` for a hard one.
    pub grace: Option<Duration>,
    /// Additional amount that must be available before the pressure ends.
    pub min_reclaim: Option<ThresholdValue>,
}

impl Threshold {
    /// Whether pods are evicted without a grace period.
    pub fn is_hard(&self) -> bool {
        self.grace.is_none_or(|grace| grace.is_zero())
    }
}

/// Returns all thresholds of a configuration: hard, soft, and those of allocatable memory.
///
/// # Errors
/// The first invalid value, with the reference's text.
pub fn thresholds(config: &KubeletConfiguration) -> Result<Vec<Threshold>, String> {
    let mut all = Vec::new();
    for (signal, text) in &config.eviction_hard {
        let signal = Signal::parse(signal)?;
        if let Some(below) = level(signal, text)? {
            all.push(Threshold { signal, below, grace: None, min_reclaim: None });
        }
    }
    let graces = graces(&config.eviction_soft_grace_period)?;
    for (name, text) in &config.eviction_soft {
        let signal = Signal::parse(name)?;
        let Some(below) = level(signal, text)? else { continue };
        let Some(grace) = graces.get(&signal) else {
            return Err(format!("grace period must be specified for the soft eviction threshold {name}"));
        };
        all.push(Threshold { signal, below, grace: Some(*grace), min_reclaim: None });
    }
    let reclaims = reclaims(&config.eviction_minimum_reclaim)?;
    for threshold in &mut all {
        threshold.min_reclaim = reclaims.get(&threshold.signal).copied();
    }
    if config.enforce_node_allocatable.iter().any(|what| what == "pods") {
        let hard = all.iter().filter(|threshold| threshold.signal == Signal::Memory && threshold.is_hard());
        let copies: Vec<Threshold> =
            hard.map(|threshold| Threshold { signal: Signal::AllocatableMemory, ..threshold.clone() }).collect();
        all.extend(copies);
    }
    Ok(all)
}

/// Parses the level of a threshold; `None` if it disables the threshold.
///
/// # Errors
/// The text is invalid; contains the reference's text.
pub fn level(signal: Signal, text: &str) -> Result<Option<ThresholdValue>, String> {
    let (signal, text) = (signal.as_str(), text.trim());
    if matches!(text, "0%" | "100%") {
        return Ok(None);
    }
    if let Some(share) = percentage(text) {
        let share = share.ok_or_else(|| format!("eviction percentage threshold {signal} cannot be parsed: {text}"))?;
        if share.is_nan() || share < 0.0 {
            return Err(format!("eviction percentage threshold {signal} must be >= 0%: {text}"));
        }
        if share > 1.0 {
            return Err(format!("eviction percentage threshold {signal} must be <= 100%: {text}"));
        }
        return Ok(Some(ThresholdValue::Share(share)));
    }
    let amount = Amount::parse(text).map_err(|cause| cause.to_string())?;
    if amount.is_zero() || amount.is_negative() {
        return Err(format!("eviction threshold {signal} must be positive: {}", amount.canonical()));
    }
    Ok(Some(ThresholdValue::Quantity(amount)))
}

/// Parses a percentage; `None` if the text is not one, `Some(None)` if its number is malformed.
fn percentage(text: &str) -> Option<Option<f32>> {
    let number = text.strip_suffix('%')?;
    Some(number.parse::<f32>().ok().map(|percent| percent / 100.0))
}

fn graces(list: &BTreeMap<String, String>) -> Result<BTreeMap<Signal, Duration>, String> {
    let grace = |(signal, text): (&String, &String)| {
        let signal = Signal::parse(signal)?;
        let period: GoDuration = text.parse().map_err(|cause| format!("{cause}"))?;
        if period.is_negative() {
            return Err(format!("invalid eviction grace period specified: {text}, must be a positive value"));
        }
        Ok((signal, period.std()))
    };
    list.iter().map(grace).collect()
}

fn reclaims(list: &BTreeMap<String, String>) -> Result<BTreeMap<Signal, ThresholdValue>, String> {
    let reclaim = |(name, text): (&String, &String)| {
        let signal = Signal::parse(name)?;
        if let Some(share) = percentage(text.trim()) {
            return match share {
                Some(share) if share > 0.0 => Ok((signal, ThresholdValue::Share(share))),
                _ => Err(format!("eviction percentage minimum reclaim {name} must be positive: {text}")),
            };
        }
        let amount = Amount::parse(text).map_err(|cause| cause.to_string())?;
        if amount.is_negative() {
            return Err(format!("negative eviction minimum reclaim specified for {name}"));
        }
        Ok((signal, ThresholdValue::Quantity(amount)))
    };
    list.iter().map(reclaim).collect()
}

#[cfg(test)]
mod tests {
    use serde_json::{Value, json};

    use super::*;
    use crate::defaults;

    fn parsed(fields: &Value) -> Result<Vec<Threshold>, String> {
        let map = |name: &str| serde_json::from_value(fields[name].clone()).unwrap_or_default();
        let mut config = defaults::defaults();
        config.eviction_hard = map("hard");
        config.eviction_soft = map("soft");
        config.eviction_soft_grace_period = map("graces");
        config.eviction_minimum_reclaim = map("reclaims");
        config.enforce_node_allocatable = serde_json::from_value(fields["enforce"].clone()).unwrap_or_default();
        thresholds(&config)
    }

    fn shown(fields: &Value) -> Vec<String> {
        let level = |level: ThresholdValue| match level {
            ThresholdValue::Quantity(amount) => amount.canonical(),
            ThresholdValue::Share(share) => format!("{share}"),
        };
        let show = |t: &Threshold| {
            let grace = t.grace.map(|grace| format!(" for {grace:?}")).unwrap_or_default();
            let more = t.min_reclaim.map(|more| format!(" and {}", level(more))).unwrap_or_default();
            format!("{}<{}{grace}{more}", t.signal.as_str(), level(t.below))
        };
        parsed(fields).expect("usable").iter().map(show).collect()
    }

    #[test]
    fn thresholds_are_hard_soft_and_of_all_pods() {
        assert_eq!(shown(&json!({})), Vec::<String>::new());
        assert_eq!(
            shown(&json!({
                "hard": {"memory.available": "1.5Gi", "nodefs.available": "10%", "imagefs.available": "0%",
                         "pid.available": "0.0%", "imagefs.inodesFree": "100.0%", "nodefs.inodesFree": "100%"},
                "soft": {"memory.available": "2Gi"}, "graces": {"memory.available": "1m30s"},
                "reclaims": {"memory.available": "500Mi", "nodefs.available": "5%", "imagefs.inodesFree": "0"},
                "enforce": ["pods"],
            })),
            [
                "imagefs.inodesFree<1 and 0",
                "memory.available<1536Mi and 500Mi",
                "nodefs.available<0.1 and 0.05",
                "pid.available<0",
                "memory.available<2Gi for 90s and 500Mi",
                "allocatableMemory.available<1536Mi and 500Mi",
            ]
        );
        assert_eq!(shown(&json!({"hard": {"memory.available": "1Gi"}, "enforce": ["none"]})).len(), 1);
        // A grace period of zero makes the threshold a hard one.
        for (grace, expected) in [("0s", 2), ("1s", 1)] {
            let soft = json!({"soft": {"memory.available": "1Gi"}, "graces": {"memory.available": grace},
                "enforce": ["pods"]});
            assert_eq!(shown(&soft).len(), expected, "{grace}");
        }
    }

    #[test]
    fn what_cannot_be_used_is_refused_by_name() {
        for (fields, text) in [
            (json!({"hard": {"disk.free": "1"}}), "unsupported eviction signal disk.free"),
            (json!({"soft": {"disk.free": "1"}}), "unsupported eviction signal disk.free"),
            (json!({"graces": {"x": "1s"}}), "unsupported eviction signal x"),
            (json!({"reclaims": {"x": "1"}}), "unsupported eviction signal x"),
            (
                json!({"soft": {"memory.available": "1Gi"}}),
                "grace period must be specified for the soft eviction threshold memory.available",
            ),
            (
                json!({"graces": {"memory.available": "-1s"}}),
                "invalid eviction grace period specified: -1s, must be a positive value",
            ),
            (json!({"hard": {"memory.available": "0"}}), "eviction threshold memory.available must be positive: 0"),
            (
                json!({"hard": {"memory.available": "-1%"}}),
                "eviction percentage threshold memory.available must be >= 0%: -1%",
            ),
            (
                json!({"hard": {"memory.available": "NaN%"}}),
                "eviction percentage threshold memory.available must be >= 0%: NaN%",
            ),
            (
                json!({"hard": {"memory.available": "101%"}}),
                "eviction percentage threshold memory.available must be <= 100%: 101%",
            ),
            (
                json!({"hard": {"memory.available": "x%"}}),
                "eviction percentage threshold memory.available cannot be parsed: x%",
            ),
            (
                json!({"reclaims": {"nodefs.available": "0%"}}),
                "eviction percentage minimum reclaim nodefs.available must be positive: 0%",
            ),
            (
                json!({"reclaims": {"nodefs.available": "-1"}}),
                "negative eviction minimum reclaim specified for nodefs.available",
            ),
        ] {
            assert_eq!(parsed(&fields), Err(text.to_owned()), "{fields}");
        }
        assert!(parsed(&json!({"graces": {"memory.available": "soon"}})).is_err());
        assert!(parsed(&json!({"hard": {"memory.available": "much"}})).is_err());
    }

    #[test]
    fn shares_are_of_single_precision() {
        let below = level(Signal::NodeFs, "10%").expect("usable").expect("on");
        assert_eq!(below.of(41_218_252 * 1024).value(), 4_220_749_067);
        assert_eq!(ThresholdValue::Quantity(Amount::parse("2Gi").expect("a quantity")).of(1).canonical(), "2Gi");
    }
}
