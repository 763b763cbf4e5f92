//! Quality-of-service class. Pure. Behaviour: spec 02b §6.5.

use std::collections::BTreeMap;

use k8s_openapi::apimachinery::pkg::api::resource::Quantity;

use super::{Pod, PodSpec, api, quantity::Amount};

/// QoS class of a pod.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug)]
pub enum Qos {
    /// No requests or limits.
    BestEffort,
    /// Anything between.
    Burstable,
    /// Every container's requests equal its limits.
    Guaranteed,
}

impl Qos {
    /// The API's text.
    pub fn as_str(self) -> &'static str {
        match self {
            Self::BestEffort => "BestEffort",
            Self::Burstable => "Burstable",
            Self::Guaranteed => "Guaranteed",
        }
    }

    /// The class of a pod: the API's word where it is set, else computed.
    pub fn of(pod: &Pod) -> Self {
        match pod.status.as_ref().and_then(|s| s.qos_class.as_deref()) {
            Some("Guaranteed") => Self::Guaranteed,
            Some("Burstable") => Self::Burstable,
            Some("BestEffort") => Self::BestEffort,
            _ => Self::compute(pod.spec()),
        }
    }

    /// Computes the class: only cpu and memory above zero count; pod-level resources decide
    /// alone where set, else all regular and init containers.
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

/// Adds the positive cpu and memory amounts; returns how many there were.
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
