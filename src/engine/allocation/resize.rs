//! In-place pod resize: infeasibility rules, retry order, and event summaries.
//!
//! Pure. Implements spec 02a §8.3, 06a §11.1.

use std::{cmp::Reverse, collections::BTreeMap};

use jiff::Timestamp;
use serde::Serialize;

use berth_types::{
    Pod, api,
    qos::Qos,
    quantity::Amount,
    resource_state::{PodResources, same},
    resources::{CPU, MEMORY, Overhead, View, amount_of, amounts, pod_requests, request_of, requests, zero},
};

/// Settings of configuration and machine that make resizes infeasible.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct ResizeRules {
    /// Gate `InPlacePodLevelResourcesVerticalScaling`.
    pub pod_level: bool,
    /// `swapBehavior: LimitedSwap`, and the machine can account for swap.
    pub swap_is_limited: bool,
    /// CPU manager policy `static` (and no gate for resizes of exclusive CPUs).
    pub cpu_manager_is_static: bool,
    /// Memory manager policy `Static` (and no gate for resizes of exclusive memory).
    pub memory_manager_is_static: bool,
    /// CPU manager policy `static` and the gate `InPlacePodVerticalScalingExclusiveCPUs`: a resize to whole CPUs needs
    /// exclusive ones.
    pub allocates_cpus: bool,
}

/// Why a resize can never be granted on this node.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Infeasible {
    /// Pod-level resources change, and their gate is off.
    PodLevelGate,
    /// The memory request of a container that may swap changes.
    Swap,
    /// The cpu request of a Guaranteed pod changes under the static CPU manager.
    StaticCpu,
    /// The memory request of a Guaranteed pod changes under the static memory manager.
    StaticMemory,
}

impl Infeasible {
    /// The refusal's message.
    pub fn message(self) -> &'static str {
        match self {
            Self::PodLevelGate => "InPlacePodLevelResourcesVerticalScaling is disabled",
            Self::Swap => "In-place resize of containers with swap is not supported.",
            Self::StaticCpu => "Resize is infeasible for Guaranteed Pods alongside CPU Manager policy \"static\"",
            Self::StaticMemory => "Resize is infeasible for Guaranteed Pods alongside Memory Manager policy \"Static\"",
        }
    }

    /// Label `reason_detail` of `kubelet_pod_infeasible_resizes_total`.
    pub fn detail(self) -> &'static str {
        match self {
            Self::PodLevelGate => "plr_feature_gate_off",
            Self::Swap => "swap_limitation",
            Self::StaticCpu => "guaranteed_pod_cpu_manager_static_policy",
            Self::StaticMemory => "guaranteed_pod_memory_manager_static_policy",
        }
    }
}

/// Returns why a resize from the allocated to the desired resources is infeasible, if it is.
pub fn infeasible(desired: &Pod, allocated: &Pod, rules: &ResizeRules) -> Option<Infeasible> {
    let level = |pod: &Pod| pod.spec().resources.clone().unwrap_or_default();
    if !rules.pod_level && !same(&level(desired), &level(allocated)) {
        return Some(Infeasible::PodLevelGate);
    }
    let guaranteed = Qos::of(desired) == Qos::Guaranteed;
    if pairs(desired, allocated).any(|(new, old)| {
        request_or_zero(new, MEMORY) != request_or_zero(old, MEMORY)
            && !restarts_for_memory(old)
            && (may_swap(desired, new, rules) || may_swap(allocated, old, rules))
    }) {
        Some(Infeasible::Swap)
    } else if rules.cpu_manager_is_static && changes_exclusive_cpus(desired, allocated) {
        Some(Infeasible::StaticCpu)
    } else if guaranteed && rules.memory_manager_is_static && changes_request(desired, allocated, MEMORY) {
        Some(Infeasible::StaticMemory)
    } else {
        None
    }
}

/// Whether a resize concerns the static CPU manager: the cpu request of a container of a Guaranteed pod changes.
pub fn changes_exclusive_cpus(desired: &Pod, allocated: &Pod) -> bool {
    Qos::of(desired) == Qos::Guaranteed && changes_request(desired, allocated, CPU)
}

fn changes_request(desired: &Pod, allocated: &Pod, resource: &str) -> bool {
    let mut pairs = pairs(desired, allocated);
    pairs.any(|(new, old)| request_or_zero(new, resource) != request_or_zero(old, resource))
}

/// The reference compares an absent request as zero.
fn request_or_zero(container: &api::Container, resource: &str) -> Amount {
    request_of(container, resource).unwrap_or_else(zero)
}

/// Pairs of regular and init containers that exist in both pods: desired, allocated.
fn pairs<'a>(desired: &'a Pod, allocated: &'a Pod) -> impl Iterator<Item = (&'a api::Container, &'a api::Container)> {
    let all = desired.containers().iter().chain(desired.init_containers());
    all.filter_map(|new| allocated.container(&new.name).map(|(_, old)| (new, old)))
}

fn restarts_for_memory(container: &api::Container) -> bool {
    let policy = container.resize_policy.iter().flatten().find(|p| p.resource_name == MEMORY);
    policy.is_some_and(|p| p.restart_policy == "RestartContainer")
}

/// Whether the container may use swap (spec 03a §6.5).
fn may_swap(pod: &Pod, container: &api::Container, rules: &ResizeRules) -> bool {
    let resources = container.resources.as_ref();
    let of = |list: Option<&BTreeMap<_, _>>| amount_of(&amounts(list), MEMORY);
    let request = of(resources.and_then(|r| r.requests.as_ref()));
    let limit = of(resources.and_then(|r| r.limits.as_ref()));
    rules.swap_is_limited && Qos::of(pod) == Qos::Burstable && !pod.is_critical() && request != limit
}

/// Whether resizable containers, or the pod level, request other resources than allocated. Ephemeral
/// containers have no resources.
pub fn is_wanted(desired: &Pod, allocated: &PodResources) -> bool {
    allocated.differs_from(desired)
}

/// Whether the pod's effective total request of CPU or memory shrank, by its specification and by the
/// resources in its status.
pub fn has_shrunk(before: &Pod, after: &Pod) -> bool {
    let (before, after) = (requests(before, View::Effective), requests(after, View::Effective));
    [CPU, MEMORY].iter().any(|name| amount_of(&after, name) < amount_of(&before, name))
}

/// A pod with a pending resize, with the inputs of its retry order.
#[derive(Clone, Debug)]
pub struct PendingResize<'a> {
    /// The pod as desired.
    pub desired: &'a Pod,
    /// The pod as allocated.
    pub allocated: &'a Pod,
    /// Transition time of its pending condition; `None` without one.
    pub since: Option<Timestamp>,
}

/// Sorts pods into retry order: resizes that increase no request, then higher priority, then
/// Guaranteed, then longest pending; ties keep their order.
pub fn order(waiting: &mut [PendingResize<'_>]) {
    waiting.sort_by_key(|w| {
        (
            grows(w.desired, w.allocated),
            Reverse(w.desired.spec().priority.unwrap_or(0)),
            Qos::of(w.desired) != Qos::Guaranteed,
            w.since.is_none(),
            w.since,
        )
    });
}

/// Whether any total request exceeds the allocated one.
fn grows(desired: &Pod, allocated: &Pod) -> bool {
    let had = pod_requests(allocated.spec(), Overhead::Included);
    pod_requests(desired.spec(), Overhead::Included).iter().any(|(name, amount)| *amount > amount_of(&had, name))
}

/// One requested change: labels of `kubelet_container_requested_resizes_total`.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct RequestedChange {
    /// Label `resource`: `cpu` or `memory`.
    pub resource: &'static str,
    /// Label `requirement`: `requests` or `limits`.
    pub requirement: &'static str,
    /// Label `operation`: `add`, `remove`, `increase`, or `decrease`.
    pub operation: &'static str,
}

/// The resource changes that an update of the specification requests, per container.
pub fn requested_changes(old: &Pod, new: &Pod) -> Vec<RequestedChange> {
    let mut changes = Vec::new();
    for (now, before) in pairs(new, old) {
        for requirement in ["requests", "limits"] {
            let of = |c: &api::Container, resource: &str| {
                let r = c.resources.as_ref()?;
                let list = if requirement == "requests" { r.requests.as_ref() } else { r.limits.as_ref() };
                Amount::try_from(list?.get(resource)?).ok().filter(|a| !a.is_zero())
            };
            for resource in [CPU, MEMORY] {
                let operation = match (of(before, resource), of(now, resource)) {
                    (None, Some(_)) => "add",
                    (Some(_), None) => "remove",
                    (Some(old), Some(new)) if new > old => "increase",
                    (Some(old), Some(new)) if new < old => "decrease",
                    _ => continue,
                };
                changes.push(RequestedChange { resource, requirement, operation });
            }
        }
    }
    changes
}

/// JSON summary for resize events:
/// `{"initContainers":[…],"containers":[…],"generation":N,"error":"…"}`; empty parts are omitted.
pub fn summary(pod: &Pod, error: &str) -> String {
    let list = |containers: &[api::Container]| -> Vec<ContainerSummary> {
        let one = |c: &api::Container| {
            let resources = c.resources.clone().unwrap_or_default();
            ContainerSummary {
                name: c.name.clone(),
                resources: Requirements { limits: resources.limits, requests: resources.requests },
            }
        };
        containers.iter().map(one).collect()
    };
    let summary = ResizeSummary {
        init_containers: list(pod.init_containers()),
        containers: list(pod.containers()),
        generation: pod.generation(),
        error,
    };
    serde_json::to_string(&summary).expect("strings and numbers always serialize")
}

#[derive(Serialize)]
#[serde(rename_all = "camelCase")]
struct ResizeSummary<'a> {
    #[serde(skip_serializing_if = "Vec::is_empty")]
    init_containers: Vec<ContainerSummary>,
    #[serde(skip_serializing_if = "Vec::is_empty")]
    containers: Vec<ContainerSummary>,
    generation: i64,
    #[serde(skip_serializing_if = "str::is_empty")]
    error: &'a str,
}

#[derive(Serialize)]
struct ContainerSummary {
    name: String,
    resources: Requirements,
}

/// Field order as upstream serializes it.
#[derive(Serialize)]
struct Requirements {
    #[serde(skip_serializing_if = "Option::is_none")]
    limits: Option<berth_types::resources::Quantities>,
    #[serde(skip_serializing_if = "Option::is_none")]
    requests: Option<berth_types::resources::Quantities>,
}

#[cfg(test)]
mod tests {
    use serde_json::{Value, json};

    use super::*;

    fn pod(spec: Value) -> Pod {
        let object = json!({"metadata": {"name": "p", "namespace": "n", "uid": "u", "generation": 2}, "spec": spec});
        Pod::new(serde_json::from_value(object).expect("a pod")).expect("complete")
    }

    fn guaranteed(cpu: &str, memory: &str) -> Value {
        let both = json!({"cpu": cpu, "memory": memory});
        json!({"containers": [{"name": "c", "resources": {"requests": both, "limits": both}}]})
    }

    fn burstable(memory: &str, policy: Value) -> Value {
        json!({"containers": [{"name": "c", "resources": {"requests": {"memory": memory}}, "resizePolicy": policy}]})
    }

    #[test]
    fn some_resizes_can_never_be_granted() {
        let gate = ResizeRules { pod_level: true, ..ResizeRules::default() };
        let cpu = ResizeRules { cpu_manager_is_static: true, ..gate };
        let memory = ResizeRules { memory_manager_is_static: true, ..gate };
        let both = ResizeRules { cpu_manager_is_static: true, ..memory };
        let swap = ResizeRules { swap_is_limited: true, ..gate };
        let restart = json!([{"resourceName": "memory", "restartPolicy": "RestartContainer"}]);
        let level = |cpu: &str| json!({"containers": [], "resources": {"requests": {"cpu": cpu}}});
        let with_sidecar = |cpu: &str| {
            let mut spec = guaranteed("1", "1Gi");
            let amounts = json!({"cpu": cpu, "memory": "1Gi"});
            spec["initContainers"] = json!([{"name": "s", "restartPolicy": "Always",
                "resources": {"requests": amounts, "limits": amounts}}]);
            spec
        };
        let of_level = |requests: Value| {
            let both = json!({"cpu": "2", "memory": "2Gi"});
            json!({"containers": [{"name": "c", "resources": {"requests": requests}}],
                   "resources": {"requests": both, "limits": both}})
        };
        for (name, new, old, rules, expected) in [
            ("plain", guaranteed("2", "1Gi"), guaranteed("1", "1Gi"), gate, None),
            ("static cpu", guaranteed("2", "1Gi"), guaranteed("1", "1Gi"), cpu, Some(Infeasible::StaticCpu)),
            ("other cpu", guaranteed("1", "2Gi"), guaranteed("1", "1Gi"), cpu, None),
            ("static memory", guaranteed("1", "2Gi"), guaranteed("1", "1Gi"), memory, Some(Infeasible::StaticMemory)),
            ("other memory", guaranteed("2", "1Gi"), guaranteed("1", "1Gi"), memory, None),
            ("cpu first", guaranteed("2", "2Gi"), guaranteed("1", "1Gi"), both, Some(Infeasible::StaticCpu)),
            ("less cpu", guaranteed("1", "1Gi"), guaranteed("2", "1Gi"), cpu, Some(Infeasible::StaticCpu)),
            // The class decides, not whether the container has exclusive CPUs.
            ("shared pool", guaranteed("1500m", "1Gi"), guaranteed("1200m", "1Gi"), cpu, Some(Infeasible::StaticCpu)),
            ("sidecar", with_sidecar("2"), with_sidecar("1"), cpu, Some(Infeasible::StaticCpu)),
            ("equal amounts", guaranteed("1000m", "1Gi"), guaranteed("1", "1024Mi"), both, None),
            ("burstable", burstable("2Gi", json!([])), burstable("1Gi", json!([])), both, None),
            ("absent and zero", of_level(json!({"cpu": "0"})), of_level(json!({})), both, None),
            ("swap", burstable("2Gi", json!([])), burstable("1Gi", json!([])), swap, Some(Infeasible::Swap)),
            ("swap, restart", burstable("2Gi", restart.clone()), burstable("1Gi", restart), swap, None),
            ("no swap for guaranteed", guaranteed("1", "2Gi"), guaranteed("1", "1Gi"), swap, None),
            ("gate on", level("2"), level("1"), gate, None),
            ("gate off", level("2"), level("1"), ResizeRules::default(), Some(Infeasible::PodLevelGate)),
        ] {
            assert_eq!(infeasible(&pod(new), &pod(old), &rules), expected, "{name}");
        }
    }

    /// With the gates a resize is admitted like a new pod.
    #[test]
    fn gates_make_resizes_beside_static_policies_feasible() {
        let rules = ResizeRules { pod_level: true, allocates_cpus: true, ..ResizeRules::default() };
        for (name, new, old, changes_cpus) in [
            ("cpu", guaranteed("2", "1Gi"), guaranteed("1500m", "1Gi"), true),
            ("memory", guaranteed("2", "2Gi"), guaranteed("2", "1Gi"), false),
            ("equal amounts", guaranteed("2", "1Gi"), guaranteed("2000m", "1Gi"), false),
            ("burstable", burstable("2Gi", json!([])), burstable("1Gi", json!([])), false),
        ] {
            let (new, old) = (pod(new), pod(old));
            assert_eq!(infeasible(&new, &old, &rules), None, "{name}");
            assert_eq!(changes_exclusive_cpus(&new, &old), changes_cpus, "{name}");
        }
    }

    #[test]
    fn shrinking_then_priority_then_class_then_age_decide_the_turn() {
        let at = |second| Timestamp::from_second(second).ok();
        let (small, large) = (pod(guaranteed("1", "1Gi")), pod(guaranteed("2", "1Gi")));
        let burst = |cpu: &str, priority: i32, name: &str| {
            let object = json!({"metadata": {"name": name, "namespace": "n", "uid": name}, "spec": {"priority": priority,
                "containers": [{"name": "c", "resources": {"requests": {"cpu": cpu}}}]}});
            Pod::new(serde_json::from_value(object).expect("a pod")).expect("complete")
        };
        let one = burst("1", 0, "held");
        let (high, old, new) = (burst("2", 9, "high"), burst("2", 0, "old"), burst("2", 0, "new"));
        let mut waiting = [
            PendingResize { desired: &new, allocated: &one, since: None },
            PendingResize { desired: &old, allocated: &one, since: at(5) },
            PendingResize { desired: &large, allocated: &small, since: at(9) },
            PendingResize { desired: &high, allocated: &one, since: at(7) },
            PendingResize { desired: &one, allocated: &new, since: at(9) },
        ];
        order(&mut waiting);
        let names: Vec<&str> = waiting.iter().map(|w| w.desired.name()).collect();
        assert_eq!(names, ["held", "high", "p", "old", "new"]);
    }

    #[test]
    fn each_changed_value_is_one_operation() {
        let spec = |resources: Value| pod(json!({"containers": [{"name": "c", "resources": resources}]}));
        let found = requested_changes(
            &spec(json!({"requests": {"cpu": "1", "memory": "1Gi"}, "limits": {"memory": "2Gi"}})),
            &spec(json!({"requests": {"cpu": "2", "memory": "512Mi"}, "limits": {"cpu": "2"}})),
        );
        let text: Vec<String> =
            found.iter().map(|c| format!("{} {} {}", c.operation, c.resource, c.requirement)).collect();
        assert_eq!(
            text,
            ["increase cpu requests", "decrease memory requests", "add cpu limits", "remove memory limits"]
        );
    }

    #[test]
    fn the_summary_leaves_out_what_is_empty() {
        let pod = pod(json!({"containers": [{"name": "c1", "resources": {"requests": {"cpu": "5"}}}]}));
        let expected = r#"{"containers":[{"name":"c1","resources":{"requests":{"cpu":"5"}}}],"generation":2}"#;
        assert_eq!(summary(&pod, ""), expected);
        assert!(summary(&pod, "no").ends_with(r#","generation":2,"error":"no"}"#));
    }
}
