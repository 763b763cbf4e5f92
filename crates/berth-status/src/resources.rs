//! Resources in the pod status: allocated and actual. Pure. Implements spec 02b §6.3-6.4.

use std::collections::BTreeMap;

use k8s_openapi::apimachinery::pkg::api::resource::Quantity;

use super::{
    PodCgroup,
    lookup::{ContainerStateRef, state},
    phase::Phase,
};
use berth_types::{
    Pod, api,
    observation::{ContainerState, ObservedContainer},
    quantity::{Amount, QuantityFormat},
    resources::{EPHEMERAL_STORAGE, Overhead, is_extended, pod_limits, pod_requests, quantities},
};

type List = BTreeMap<String, Quantity>;

/// Minimum CPU limit in milli-CPU that the kernel can represent; lower actual and allocated values are equivalent.
const LEAST_LIMIT_MILLI: i64 = 10;
/// Minimum CPU request in milli-CPU that a CPU weight can represent.
const LEAST_REQUEST_MILLI: i64 = 2;

/// Resources of a container with an instance: the allocated ones, overlaid with the actual ones of a running instance.
/// Values that the runtime does not report keep their last published value.
pub(super) fn container_resources(
    container: &api::Container,
    instance: &ObservedContainer,
    full_id: Option<&str>,
    old: Option<&api::ContainerStatus>,
) -> api::ResourceRequirements {
    let mut resources = container.resources.clone().unwrap_or_default();
    if instance.state != ContainerState::Running {
        return resources;
    }
    let before = old
        .filter(|o| state(o) == ContainerStateRef::Running && o.container_id.as_deref() == full_id)
        .and_then(|o| o.resources.as_ref());
    let seen = instance.resources.clone().unwrap_or_default();
    if let Some(limits) = resources.limits.as_mut() {
        let before = before.and_then(|b| b.limits.as_ref());
        overlay(limits, "cpu", seen.cpu_limit_milli.map(milli_cpu), before, LEAST_LIMIT_MILLI);
        overlay(limits, "memory", seen.memory_limit_bytes.map(bytes), before, 0);
    }
    if let Some(requests) = resources.requests.as_mut() {
        let before = before.and_then(|b| b.requests.as_ref());
        overlay(requests, "cpu", seen.cpu_request_milli.map(milli_cpu), before, LEAST_REQUEST_MILLI);
    }
    resources
}

/// `status.allocatedResources` of a pod: its effective requests.
pub(super) fn pod_allocated(pod: &Pod) -> Option<List> {
    some(quantities(pod_requests(pod.spec(), Overhead::Included)))
}

/// `status.resources` of a pod. While it runs, values come from its cgroup; a value that the cgroup does not have keeps
/// its last published value, else is the allocated one.
pub(super) fn pod_resources(pod: &Pod, cgroup: Option<PodCgroup>, old: &api::PodStatus) -> api::ResourceRequirements {
    let requests = quantities(pod_requests(pod.spec(), Overhead::Included));
    let limits = quantities(pod_limits(pod.spec(), Overhead::Included));
    if pod.api_phase() != Phase::Running.as_str() {
        // Extended resources are not listed once the pod runs: the status would change for no other reason.
        let own = |list: List| list.into_iter().filter(|(name, _)| !is_extended(name)).collect();
        return requirements(pod, own(requests), own(limits));
    }
    let seen = cgroup.unwrap_or_default();
    let level = pod.spec().resources.clone().unwrap_or_default();
    let mut shown_requests = level.requests.unwrap_or_default();
    let mut shown_limits = level.limits.unwrap_or_default();
    for (shown, granted) in [(&mut shown_requests, &requests), (&mut shown_limits, &limits)] {
        // Pod-level values exclude the overhead, effective ones include it.
        for (name, value) in shown.iter_mut() {
            if let Some(effective) = granted.get(name) {
                value.clone_from(effective);
            }
        }
    }
    let before = old.resources.as_ref().filter(|_| Phase::of(old) == Some(Phase::Running));
    let old_requests = before.and_then(|b| b.requests.as_ref());
    let old_limits = before.and_then(|b| b.limits.as_ref());
    overlay(&mut shown_requests, "cpu", seen.cpu_request_milli.map(milli_cpu), old_requests, LEAST_REQUEST_MILLI);
    // The kernel has no memory requests.
    if let Some(memory) = requests.get("memory") {
        shown_requests.insert("memory".to_owned(), memory.clone());
    }
    overlay(&mut shown_limits, "cpu", seen.cpu_limit_milli.map(milli_cpu), old_limits, LEAST_LIMIT_MILLI);
    overlay(&mut shown_limits, "memory", seen.memory_limit_bytes.map(bytes), old_limits, 0);
    requirements(pod, shown_requests, shown_limits)
}

impl PodCgroup {
    /// Values that the pod's cgroup would have: the allocated ones.
    pub fn granted(pod: &Pod) -> Self {
        let requests = pod_requests(pod.spec(), Overhead::Included);
        let limits = pod_limits(pod.spec(), Overhead::Included);
        Self {
            cpu_request_milli: requests.get("cpu").copied().map(Amount::milli),
            cpu_limit_milli: limits.get("cpu").copied().map(Amount::milli),
            memory_limit_bytes: limits.get("memory").copied().map(Amount::value),
        }
    }
}

fn requirements(pod: &Pod, mut requests: List, mut limits: List) -> api::ResourceRequirements {
    // Pod-level resources exclude ephemeral storage.
    for list in [&mut requests, &mut limits] {
        list.retain(|name, _| name != EPHEMERAL_STORAGE);
    }
    let claims = pod.spec().resources.as_ref().and_then(|r| r.claims.clone());
    api::ResourceRequirements { claims, requests: some(requests), limits: some(limits) }
}

/// Inserts the actual value, unless both it and the allocated value are at or below `least` (in thousandths), where the
/// kernel cannot distinguish them.
fn overlay(list: &mut List, name: &str, seen: Option<Amount>, before: Option<&List>, least: i64) {
    let value = match seen {
        Some(seen) => {
            let granted = list.get(name).and_then(|q| Amount::try_from(q).ok()).map_or(0, Amount::milli);
            if seen.milli() <= least && granted <= least {
                return;
            }
            Some(seen.into())
        }
        None => before.and_then(|b| b.get(name)).cloned(),
    };
    if let Some(value) = value {
        list.insert(name.to_owned(), value);
    }
}

fn milli_cpu(milli: i64) -> Amount {
    Amount::from_milli(milli, QuantityFormat::DecimalSi)
}

fn bytes(bytes: i64) -> Amount {
    Amount::from_value(bytes, QuantityFormat::BinarySi)
}

fn some(list: List) -> Option<List> {
    Some(list).filter(|l| !l.is_empty())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::fixture::{RuntimeState, instance, pod_with, running, status};
    use berth_types::observation::ObservedResources;
    use serde_json::{Value, json};

    fn shown(granted: Value, seen: RuntimeState, reported: ObservedResources, old: Option<Value>) -> Value {
        let container = api::Container {
            resources: Some(serde_json::from_value(granted).expect("resources")),
            ..Default::default()
        };
        let instance = ObservedContainer { resources: Some(reported), ..instance("c", 0, seen) };
        let old = old.map(|resources| api::ContainerStatus {
            container_id: Some("containerd://c-0".to_owned()),
            resources: Some(serde_json::from_value(resources).expect("resources")),
            ..status("c", running())
        });
        let resources = container_resources(&container, &instance, Some("containerd://c-0"), old.as_ref());
        serde_json::to_value(resources).expect("JSON")
    }

    #[test]
    fn a_running_container_shows_what_is_in_force() {
        let granted = || json!({"limits": {"cpu": "1", "memory": "1Gi"}, "requests": {"cpu": "500m", "memory": "1Gi"}});
        let reported = ObservedResources {
            cpu_limit_milli: Some(2000),
            cpu_request_milli: Some(700),
            memory_limit_bytes: Some(512 << 20),
        };
        assert_eq!(
            shown(granted(), RuntimeState::Running, reported.clone(), None),
            json!({"limits": {"cpu": "2", "memory": "512Mi"}, "requests": {"cpu": "700m", "memory": "1Gi"}})
        );
        assert_eq!(shown(granted(), RuntimeState::Exited(0), reported.clone(), None), granted(), "not running");
        assert_eq!(shown(json!({}), RuntimeState::Running, reported, None), json!({}), "only inside maps that exist");
    }

    #[test]
    fn values_below_the_kernel_minimum_are_shown_as_allocated() {
        let granted = || json!({"limits": {"cpu": "5m"}, "requests": {"cpu": "1m"}});
        let reported = |limit, request| ObservedResources {
            cpu_limit_milli: Some(limit),
            cpu_request_milli: Some(request),
            memory_limit_bytes: None,
        };
        assert_eq!(shown(granted(), RuntimeState::Running, reported(10, 2), None), granted());
        let larger = json!({"limits": {"cpu": "11m"}, "requests": {"cpu": "3m"}});
        assert_eq!(shown(granted(), RuntimeState::Running, reported(11, 3), None), larger);
    }

    #[test]
    fn values_the_runtime_does_not_report_are_kept() {
        let granted = || json!({"limits": {"cpu": "1"}, "requests": {"cpu": "1"}});
        let before = json!({"limits": {"cpu": "2", "memory": "1Gi"}, "requests": {"cpu": "3"}});
        assert_eq!(shown(granted(), RuntimeState::Running, ObservedResources::default(), Some(before.clone())), before);
        assert_eq!(shown(granted(), RuntimeState::Running, ObservedResources::default(), None), granted());
    }

    #[test]
    fn a_pod_shows_only_cpu_and_memory() {
        let all = json!({"cpu": "1", "memory": "1Gi", "ephemeral-storage": "1Gi"});
        let spec = json!({"containers": [{"name": "c", "resources": {"requests": all, "limits": all}}]});
        let shown = pod_resources(&pod_with(spec), None, &api::PodStatus::default());
        let compute = json!({"cpu": "1", "memory": "1Gi"});
        let shown = serde_json::to_value(shown).expect("JSON");
        assert_eq!(shown, json!({"requests": compute, "limits": compute}));
    }

    #[test]
    fn a_pod_shows_its_cgroup_while_it_runs() {
        let spec = json!({"containers": [{"name": "c", "resources": {
            "requests": {"cpu": "1", "memory": "1Gi"}, "limits": {"cpu": "2"}}}]});
        let mut pod = pod_with(spec);
        let none = api::PodStatus::default();
        let value = |r| serde_json::to_value(r).expect("JSON");
        let cgroup =
            Some(PodCgroup { cpu_request_milli: Some(1500), cpu_limit_milli: Some(2500), memory_limit_bytes: None });
        assert_eq!(
            value(pod_resources(&pod, cgroup, &none)),
            json!({"requests": {"cpu": "1", "memory": "1Gi"}, "limits": {"cpu": "2"}}),
            "not running yet"
        );
        crate::fixture::set_status(&mut pod, json!({"phase": "Running"}));
        assert_eq!(
            value(pod_resources(&pod, cgroup, &none)),
            json!({"requests": {"cpu": "1500m", "memory": "1Gi"}, "limits": {"cpu": "2500m"}})
        );
        let before = api::PodStatus {
            phase: Some("Running".to_owned()),
            resources: Some(pod_resources(&pod, cgroup, &none)),
            ..Default::default()
        };
        assert_eq!(pod_resources(&pod, None, &before), pod_resources(&pod, cgroup, &none), "not read this time");
        assert_eq!(
            value(pod_resources(&pod, Some(PodCgroup::granted(&pod)), &before)),
            json!({"requests": {"cpu": "1", "memory": "1Gi"}, "limits": {"cpu": "2"}}),
            "without a cgroup of its own"
        );
    }
}
