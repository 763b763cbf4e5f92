//! Effective requests and limits of a pod. Pure. Behaviour: spec 06a §2, 02a §6.

use std::collections::BTreeMap;

use k8s_openapi::apimachinery::pkg::api::resource::Quantity;

use super::{Pod, api, quantity::Amount};

/// Amounts by resource name. Malformed quantities are left out (the API refuses them at the door).
pub type Amounts = BTreeMap<String, Amount>;

/// Whether the pod's overhead is added.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Overhead {
    /// As the scheduler and the pod cgroup count.
    Included,
    /// Containers alone.
    Excluded,
}

/// What a pod requests in total.
pub fn pod_requests(spec: &api::PodSpec, overhead: Overhead) -> Amounts {
    let mut total = aggregate(spec, |r| r.requests.as_ref());
    override_with(&mut total, spec.resources.as_ref().and_then(|r| r.requests.as_ref()));
    if overhead == Overhead::Included {
        add(&mut total, &amounts(spec.overhead.as_ref()));
    }
    total
}

/// What a pod is limited to in total; a resource that not every container limits counts only
/// what is limited. Overhead is added only where there is a limit above zero.
pub fn pod_limits(spec: &api::PodSpec, overhead: Overhead) -> Amounts {
    let mut total = aggregate(spec, |r| r.limits.as_ref());
    override_with(&mut total, spec.resources.as_ref().and_then(|r| r.limits.as_ref()));
    if overhead == Overhead::Included {
        for (name, more) in amounts(spec.overhead.as_ref()) {
            if let Some(amount) = total.get_mut(&name).filter(|a| !a.is_zero()) {
                *amount = amount.plus(more);
            }
        }
    }
    total
}

/// The amounts of a list, parsed.
pub fn amounts(list: Option<&BTreeMap<String, Quantity>>) -> Amounts {
    list.into_iter().flatten().filter_map(|(name, q)| Some((name.clone(), Amount::try_from(q).ok()?))).collect()
}

/// The list of amounts, as the API writes it.
pub fn quantities(amounts: Amounts) -> BTreeMap<String, Quantity> {
    amounts.into_iter().map(|(name, amount)| (name, amount.into())).collect()
}

/// Whether a pod-level value of that resource replaces the sum of the containers.
pub fn is_pod_level(resource: &str) -> bool {
    matches!(resource, "cpu" | "memory") || resource.starts_with("hugepages-")
}

type Pick = for<'a> fn(&'a api::ResourceRequirements) -> Option<&'a BTreeMap<String, Quantity>>;

/// Long-running containers together, or the highest point of initialisation, whichever is more.
fn aggregate(spec: &api::PodSpec, pick: Pick) -> Amounts {
    let of = |c: &api::Container| amounts(c.resources.as_ref().and_then(pick));
    let mut running = Amounts::new();
    for container in &spec.containers {
        add(&mut running, &of(container));
    }
    let mut sidecars = Amounts::new();
    let mut peak = Amounts::new();
    for container in spec.init_containers.iter().flatten() {
        let own = of(container);
        if Pod::is_sidecar(container) {
            add(&mut running, &own);
            add(&mut sidecars, &own);
            raise(&mut peak, &sidecars);
        } else {
            let mut moment = sidecars.clone();
            add(&mut moment, &own);
            raise(&mut peak, &moment);
        }
    }
    raise(&mut running, &peak);
    running
}

fn override_with(total: &mut Amounts, level: Option<&BTreeMap<String, Quantity>>) {
    total.extend(amounts(level).into_iter().filter(|(name, _)| is_pod_level(name)));
}

fn add(total: &mut Amounts, more: &Amounts) {
    for (name, amount) in more {
        total.entry(name.clone()).and_modify(|sum| *sum = sum.plus(*amount)).or_insert(*amount);
    }
}

fn raise(total: &mut Amounts, other: &Amounts) {
    for (name, amount) in other {
        total.entry(name.clone()).and_modify(|max| *max = (*max).max(*amount)).or_insert(*amount);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    fn both(spec: serde_json::Value) -> (String, String) {
        let spec: api::PodSpec = serde_json::from_value(spec).expect("a spec");
        let text = |amounts: Amounts| serde_json::to_string(&quantities(amounts)).expect("JSON");
        (text(pod_requests(&spec, Overhead::Included)), text(pod_limits(&spec, Overhead::Included)))
    }

    fn container(cpu: &str, sidecar: bool) -> serde_json::Value {
        let mut c = json!({"name": "c", "resources": {"requests": {"cpu": cpu}, "limits": {"cpu": cpu}}});
        if sidecar {
            c["restartPolicy"] = "Always".into();
        }
        c
    }

    #[test]
    fn totals_follow_the_life_of_a_pod() {
        for (init, regular, cpu) in [
            (vec![], vec![container("1", false), container("500m", false)], "1500m"),
            (vec![container("2", false)], vec![container("1", false)], "2"),
            (vec![container("1", true)], vec![container("1", false)], "2"),
            (vec![container("1", true), container("2", false)], vec![container("1", false)], "3"),
            (vec![container("2", false), container("1", true)], vec![container("100m", false)], "2"),
        ] {
            let (requests, limits) = both(json!({"initContainers": init, "containers": regular}));
            assert_eq!(requests, format!(r#"{{"cpu":"{cpu}"}}"#));
            assert_eq!(limits, requests);
        }
    }

    #[test]
    fn pod_level_values_replace_and_overhead_adds() {
        let level = json!({"requests": {"cpu": "5", "example.com/x": "9"}, "limits": {"memory": "0"}});
        let overhead = json!({"cpu": "100m", "memory": "1Mi"});
        let (requests, limits) =
            both(json!({"containers": [container("1", false)], "resources": level, "overhead": overhead}));
        assert_eq!(requests, r#"{"cpu":"5100m","memory":"1Mi"}"#);
        assert_eq!(limits, r#"{"cpu":"1100m","memory":"0"}"#);
    }
}
