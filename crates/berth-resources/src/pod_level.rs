//! Pods with pod-level resources: parts of containers, and the pool that the others share. Pure. Spec 06b §1.12.
//!
//! With the gate `PodLevelResourceManagers` and the topology scope `pod`, such a pod gets CPUs and memory as a whole. A
//! container that could be a Guaranteed pod of its own gets a part; all others share the rest: the pool of the pod.

use berth_types::{
    Pod, api,
    quantity::Amount,
    resources::{CPU, MEMORY, is_pod_level, request_of},
};

/// Whether the CPU and memory managers serve pods with pod-level resources.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub enum PodLevelManagement {
    /// These pods run on the shared pool and on any NUMA node.
    #[default]
    Off,
    /// Gates `PodLevelResourceManagers` and `PodLevelResources`.
    On,
}

impl PodLevelManagement {
    /// Whether a pod has pod-level resources that the managers serve.
    pub fn manages(self, pod: &Pod) -> bool {
        self == Self::On && has_pod_level_resources(pod)
    }
}

/// Whether a pod requests or limits CPUs, memory, or huge pages at the pod level.
pub fn has_pod_level_resources(pod: &Pod) -> bool {
    let Some(resources) = &pod.spec().resources else { return false };
    let lists = [&resources.requests, &resources.limits];
    lists.into_iter().flatten().flat_map(|list| list.keys()).any(|name| is_pod_level(name))
}

/// Whether a container can have a part of its own: it requests CPUs and memory, and the limits are the same.
pub fn has_equal_limits(container: &api::Container) -> bool {
    [CPU, MEMORY].into_iter().all(|resource| {
        let request = request_of(container, resource).filter(|request| !request.is_zero());
        request.is_some() && request == limit_of(container, resource)
    })
}

fn limit_of(container: &api::Container, resource: &str) -> Option<Amount> {
    let quantity = container.resources.as_ref()?.limits.as_ref()?.get(resource)?;
    Amount::try_from(quantity).ok()
}

/// Request of a container for a part of what its pod has.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct PartRequest {
    /// Whether the container ends before the next one starts.
    pub is_plain_init: bool,
    /// Number of CPUs, or bytes; `None` if the container shares the pool of the pod.
    pub amount: Option<u64>,
}

/// Requests of all containers in the order in which they start; `amount` returns that of a container.
pub fn part_requests<'a>(
    pod: &'a Pod,
    amount: impl Fn(&api::Container) -> Option<u64> + 'a,
) -> impl Iterator<Item = PartRequest> + 'a {
    let init = pod.init_containers().iter().map(|container| (container, !Pod::is_sidecar(container)));
    let all = init.chain(pod.containers().iter().map(|container| (container, false)));
    all.map(move |(container, is_plain_init)| PartRequest { is_plain_init, amount: amount(container) })
}

/// Contradiction between the requests of containers and what their pod has.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum PoolConflict {
    /// An init container requests more than the sidecars before it leave.
    InitRequest {
        /// Request of the init container.
        requested: u64,
        /// What is left for it.
        available: u64,
    },
    /// The sidecars before an init container leave nothing for the pool in which it runs.
    EmptyInitPool,
    /// Containers that run until the pod ends leave nothing for the pool of the others.
    EmptyPool,
}

/// A pod of which some containers would have no CPUs or no memory. The texts are the reference's.
#[derive(Clone, PartialEq, Eq, Debug, thiserror::Error)]
#[error("pod rejected, {0}")]
pub struct EmptyPodPoolError(String);

impl EmptyPodPoolError {
    /// Reason of the pod's status.
    pub const REASON: &'static str = "EmptyPodSharedPoolError";

    /// The error of the CPU manager.
    pub fn of_cpus(conflict: PoolConflict) -> Self {
        Self(match conflict {
            PoolConflict::InitRequest { requested, available } => {
                format!("largest exclusive init container requests {requested} cpus, but only {available} available")
            }
            PoolConflict::EmptyInitPool => "pod has shared init containers but no cpus available for them".to_owned(),
            PoolConflict::EmptyPool => {
                "sum of exclusive container cpu requests equals pod budget, leaving no cpus for \
                                        shared containers"
                    .to_owned()
            }
        })
    }

    /// The error of the memory manager; `resource` is `memory`, `hugepages-2Mi`, …
    pub fn of_memory(conflict: PoolConflict, resource: &str) -> Self {
        Self(match conflict {
            PoolConflict::InitRequest { requested, available } => format!(
                "largest exclusive init container requests {requested} of {resource}, but only {available} available"
            ),
            PoolConflict::EmptyInitPool => {
                format!("pod has shared init containers but no {resource} available for them")
            }
            PoolConflict::EmptyPool => format!(
                "sum of exclusive container {resource} requests equals pod budget, leaving no memory for shared \
                 containers"
            ),
        })
    }
}

/// Checks that the parts fit into the `total` of the pod, and that each container without a part has a pool to run in.
///
/// # Errors
/// The first contradiction in the order of the containers.
pub fn check_parts(total: u64, requests: impl Iterator<Item = PartRequest>) -> Result<(), PoolConflict> {
    let (mut taken, mut has_shared) = (0_u64, false);
    for PartRequest { is_plain_init, amount } in requests {
        match (is_plain_init, amount) {
            (true, Some(requested)) => {
                let available = total.saturating_sub(taken);
                if requested > available {
                    return Err(PoolConflict::InitRequest { requested, available });
                }
            }
            (true, None) if taken >= total => return Err(PoolConflict::EmptyInitPool),
            (true, None) => {}
            (false, Some(requested)) => taken = taken.saturating_add(requested),
            (false, None) => has_shared = true,
        }
    }
    if has_shared && taken >= total { Err(PoolConflict::EmptyPool) } else { Ok(()) }
}

#[cfg(test)]
mod tests {
    use serde_json::{Value, json};

    use super::*;

    fn pod(spec: Value) -> Pod {
        let object = json!({ "metadata": { "name": "p", "namespace": "n", "uid": "p" }, "spec": spec });
        Pod::new(serde_json::from_value(object).expect("a pod")).expect("complete")
    }

    #[test]
    fn only_pods_with_pod_level_resources_are_managed() {
        let amounts = json!({ "cpu": "2", "memory": "1Gi" });
        for (resources, expected) in [
            (json!({ "requests": amounts, "limits": amounts }), true),
            (json!({ "limits": amounts }), true),
            (json!({ "requests": { "hugepages-2Mi": "2Mi" } }), true),
            (json!({ "requests": {}, "limits": {} }), false),
            (json!({}), false),
            (Value::Null, false),
        ] {
            let pod = pod(json!({ "containers": [{ "name": "c" }], "resources": resources }));
            assert_eq!(PodLevelManagement::On.manages(&pod), expected, "{resources}");
            assert!(!PodLevelManagement::Off.manages(&pod), "{resources}");
        }
    }

    #[test]
    fn a_part_needs_equal_requests_and_limits() {
        let both = json!({ "cpu": "2", "memory": "1Gi" });
        for (requests, limits, expected) in [
            (both.clone(), both.clone(), true),
            (json!({ "cpu": "2000m", "memory": "1024Mi" }), both.clone(), true),
            (json!({ "cpu": "1", "memory": "1Gi" }), both.clone(), false),
            (json!({ "cpu": "2", "memory": "1Mi" }), both.clone(), false),
            (json!({ "cpu": "2" }), json!({ "cpu": "2" }), false),
            (json!({ "memory": "1Gi" }), json!({ "memory": "1Gi" }), false),
            (json!({ "cpu": "0", "memory": "1Gi" }), json!({ "cpu": "0", "memory": "1Gi" }), false),
            (both, json!({}), false),
            (json!({}), json!({}), false),
        ] {
            let resources = json!({ "requests": requests, "limits": limits });
            let pod = pod(json!({ "containers": [{ "name": "c", "resources": resources }] }));
            assert_eq!(has_equal_limits(&pod.containers()[0]), expected, "{resources}");
        }
    }

    #[test]
    fn parts_leave_something_for_the_pool() {
        let init = |amount| PartRequest { is_plain_init: true, amount };
        let running = |amount| PartRequest { is_plain_init: false, amount };
        type Case<'a> = (u64, &'a [PartRequest], Result<(), PoolConflict>);
        let cases: [Case<'_>; 12] = [
            (4, &[running(Some(1)), running(Some(2)), running(None)], Ok(())),
            (4, &[running(Some(1)), running(Some(3))], Ok(())),
            (4, &[running(None)], Ok(())),
            (4, &[running(Some(1)), running(Some(3)), running(None)], Err(PoolConflict::EmptyPool)),
            (4, &[running(None), running(Some(5))], Err(PoolConflict::EmptyPool)),
            // Without a pool the allocation itself fails.
            (4, &[running(Some(5))], Ok(())),
            (4, &[init(Some(4)), running(Some(3)), running(None)], Ok(())),
            (4, &[init(Some(5)), running(None)], Err(PoolConflict::InitRequest { requested: 5, available: 4 })),
            // Sidecars count for the init containers behind them only.
            (4, &[init(Some(4)), running(Some(1)), init(Some(3)), running(Some(3))], Ok(())),
            (
                4,
                &[running(Some(1)), init(Some(4)), running(Some(3))],
                Err(PoolConflict::InitRequest { requested: 4, available: 3 }),
            ),
            (4, &[running(Some(4)), init(None)], Err(PoolConflict::EmptyInitPool)),
            (4, &[init(None), running(Some(4))], Ok(())),
        ];
        for (total, requests, expected) in cases {
            assert_eq!(check_parts(total, requests.iter().copied()), expected, "{total} {requests:?}");
        }
    }

    #[test]
    fn requests_are_in_the_order_of_the_start() {
        let spec = json!({
            "initContainers": [{ "name": "i" }, { "name": "s", "restartPolicy": "Always" }],
            "containers": [{ "name": "c" }],
        });
        let pod = pod(spec);
        let requests: Vec<PartRequest> =
            part_requests(&pod, |container| (container.name != "c").then_some(7)).collect();
        let expected = [(true, Some(7)), (false, Some(7)), (false, None)];
        assert_eq!(requests, expected.map(|(is_plain_init, amount)| PartRequest { is_plain_init, amount }));
    }

    #[test]
    fn errors_have_the_texts_of_the_reference() {
        let request = PoolConflict::InitRequest { requested: 3, available: 2 };
        let memory = |conflict| EmptyPodPoolError::of_memory(conflict, "hugepages-2Mi").to_string();
        let cpus = |conflict| EmptyPodPoolError::of_cpus(conflict).to_string();
        for (text, expected) in [
            (cpus(request), "pod rejected, largest exclusive init container requests 3 cpus, but only 2 available"),
            (
                cpus(PoolConflict::EmptyInitPool),
                "pod rejected, pod has shared init containers but no cpus available for them",
            ),
            (
                cpus(PoolConflict::EmptyPool),
                "pod rejected, sum of exclusive container cpu requests equals pod budget, leaving no cpus for shared \
                 containers",
            ),
            (
                memory(request),
                "pod rejected, largest exclusive init container requests 3 of hugepages-2Mi, but only 2 available",
            ),
            (
                memory(PoolConflict::EmptyInitPool),
                "pod rejected, pod has shared init containers but no hugepages-2Mi available for them",
            ),
            (
                memory(PoolConflict::EmptyPool),
                "pod rejected, sum of exclusive container hugepages-2Mi requests equals pod budget, leaving no memory \
                 for shared containers",
            ),
        ] {
            assert_eq!(text, expected);
        }
    }
}
