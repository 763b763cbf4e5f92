//! Quality-of-service (QoS) class of a pod. Pure. Implements spec 02b §6.5.

use std::collections::BTreeMap;

use k8s_openapi::apimachinery::pkg::api::resource::Quantity;

use super::{Pod, PodSpec, api, quantity::Amount};

/// QoS class of a pod.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug)]
pub enum Qos {
    /// No container has requests or limits.
    BestEffort,
    /// Neither best-effort nor guaranteed.
    Burstable,
    /// All containers have cpu and memory limits, and requests equal limits.
    Guaranteed,
}

impl Qos {
    /// Name of the class in the API.
    pub fn as_str(self) -> &'static str {
        match self {
            Self::BestEffort => "BestEffort",
            Self::Burstable => "Burstable",
            Self::Guaranteed => "Guaranteed",
        }
    }

    /// Returns the class of a pod: as in its API status, else computed from its spec.
    pub fn of(pod: &Pod) -> Self {
        match pod.status.as_ref().and_then(|s| s.qos_class.as_deref()) {
            Some("Guaranteed") => Self::Guaranteed,
            Some("Burstable") => Self::Burstable,
            Some("BestEffort") => Self::BestEffort,
            _ => Self::compute(pod.spec()),
        }
    }

    /// Computes the class. Only cpu and memory above zero count; pod-level resources, where set, decide alone,
    /// otherwise all regular and init containers.
    pub fn compute(spec: &PodSpec) -> Self {
        if let Some(level) = spec.resources.as_ref().filter(|r| r.requests.is_some() || r.limits.is_some()) {
            return classify(std::iter::once(Some(level)));
        }
        let containers = spec.containers.iter().chain(spec.init_containers.iter().flatten());
        classify(containers.map(|c| c.resources.as_ref()))
    }
}

fn classify<'a>(all: impl Iterator<Item = Option<&'a api::ResourceRequirements>>) -> Qos {
    let mut requests: BTreeMap<&str, Amount> = BTreeMap::new();
    let mut limits: BTreeMap<&str, Amount> = BTreeMap::new();
    let mut limited_everywhere = true;
    for resources in all {
        add(&mut requests, resources.and_then(|r| r.requests.as_ref()));
        let own = add(&mut limits, resources.and_then(|r| r.limits.as_ref()));
        limited_everywhere &= own == 2;
    }
    if requests.is_empty() && limits.is_empty() {
        return Qos::BestEffort;
    }
    let equal =
        requests.len() == limits.len() && requests.iter().all(|(name, amount)| limits.get(name) == Some(amount));
    if limited_everywhere && equal { Qos::Guaranteed } else { Qos::Burstable }
}

/// Adds the positive cpu and memory amounts; returns their number.
fn add<'a>(sum: &mut BTreeMap<&'a str, Amount>, list: Option<&'a BTreeMap<String, Quantity>>) -> usize {
    let mut found = 0;
    for (name, quantity) in list.into_iter().flatten().filter(|(name, _)| matches!(name.as_str(), "cpu" | "memory")) {
        let Ok(amount) = Amount::try_from(quantity) else { continue };
        if amount.is_zero() || amount.is_negative() {
            continue;
        }
        found += 1;
        sum.entry(name).and_modify(|total| *total = total.plus(amount)).or_insert(amount);
    }
    found
}

#[cfg(test)]
mod tests {
    use super::*;

    fn class(resources: serde_json::Value) -> Qos {
        let containers: Vec<serde_json::Value> = resources
            .as_array()
            .expect("a list")
            .iter()
            .enumerate()
            .map(|(i, r)| serde_json::json!({"name": format!("c{i}"), "resources": r}))
            .collect();
        let spec: api::PodSpec = serde_json::from_value(serde_json::json!({"containers": containers})).expect("a spec");
        Qos::compute(&spec.into())
    }

    #[test]
    fn the_class_follows_requests_and_limits() {
        use serde_json::json;
        let full = json!({"requests": {"cpu": "1", "memory": "1Gi"}, "limits": {"cpu": "1000m", "memory": "1024Mi"}});
        assert_eq!(class(json!([{}])), Qos::BestEffort);
        assert_eq!(class(json!([{"requests": {"cpu": "0"}}])), Qos::BestEffort);
        assert_eq!(class(json!([{"requests": {"ephemeral-storage": "1Gi"}}])), Qos::BestEffort);
        assert_eq!(class(json!([full.clone()])), Qos::Guaranteed);
        assert_eq!(class(json!([full.clone(), full.clone()])), Qos::Guaranteed);
        assert_eq!(class(json!([full, {}])), Qos::Burstable);
        assert_eq!(class(json!([{"limits": {"cpu": "1"}, "requests": {"cpu": "1"}}])), Qos::Burstable);
        assert_eq!(class(json!([{"requests": {"memory": "1Mi"}}])), Qos::Burstable);
    }
}
