//! In-place resize plan: compares desired resources with those last applied. Pure.
//!
//! The baseline is the checkpoint of resources last *applied*, because the runtime reports rounded
//! values (spec 03a §3.8, §10).

use std::collections::BTreeMap;

use k8s_openapi::apimachinery::pkg::api::resource::Quantity;

use super::actions::Gates;
use berth_types::{
    ContainerId, ContainerKind, Pod, api,
    observation::{ContainerState, ObservedPod},
    quantity::Amount,
    resource_state::PodResources,
};

/// Requests and limits as numbers; 0 if unset.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct Amounts {
    /// CPU request in milli-CPU.
    pub cpu_request: i64,
    /// CPU limit in milli-CPU.
    pub cpu_limit: i64,
    /// Memory request in bytes.
    pub memory_request: i64,
    /// Memory limit in bytes.
    pub memory_limit: i64,
}

impl Amounts {
    /// Reads a container's resources; limits it does not set default to the pod level.
    pub fn of(own: Option<&api::ResourceRequirements>, pod_level: Option<&api::ResourceRequirements>) -> Self {
        let requests = own.and_then(|r| r.requests.as_ref());
        let limit = |name| {
            amount(own.and_then(|r| r.limits.as_ref()), name)
                .or_else(|| amount(pod_level.and_then(|r| r.limits.as_ref()), name))
        };
        Self {
            cpu_request: amount(requests, "cpu").map_or(0, Amount::milli),
            cpu_limit: limit("cpu").map_or(0, Amount::milli),
            memory_request: amount(requests, "memory").map_or(0, Amount::value),
            memory_limit: limit("memory").map_or(0, Amount::value),
        }
    }
}

fn amount(list: Option<&BTreeMap<String, Quantity>>, name: &str) -> Option<Amount> {
    list.and_then(|all| all.get(name)).and_then(|quantity| Amount::try_from(quantity).ok())
}

/// Whether a value increases or decreases.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum ResizeDirection {
    /// The value increases.
    Up,
    /// The value decreases.
    Down,
}

/// Changes of one container by resource.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct Update {
    /// Direction of the CPU limit, else of the request.
    pub cpu: Option<ResizeDirection>,
    /// Direction of the memory limit, else of the request.
    pub memory: Option<ResizeDirection>,
    /// Resources last applied.
    pub from: Amounts,
    /// Desired resources.
    pub to: Amounts,
}

/// Result of checking one container.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Check {
    /// No resources differ.
    Keep,
    /// Its resize policy requires a restart.
    Restart,
    /// It can be updated while it runs.
    Update(Update),
}

/// A container to resize.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct ResizeTarget {
    /// Kind of the container: selects the list.
    pub kind: ContainerKind,
    /// Index in that list.
    pub index: usize,
    /// ID of the running instance.
    pub id: ContainerId,
}

/// All in-place changes of one sync.
#[derive(Clone, PartialEq, Eq, Debug, Default)]
pub struct ResizePlan {
    /// Whether the pod-level cgroup values have to be checked, even without container updates.
    pub pod: bool,
    /// Whether the pod-level resources differ.
    pub pod_level: bool,
    /// CPU updates: decreases before increases.
    pub cpu: Vec<(ResizeTarget, Update)>,
    /// Memory updates: decreases before increases.
    pub memory: Vec<(ResizeTarget, Update)>,
}

impl ResizePlan {
    /// Whether there is nothing to change.
    pub fn is_empty(&self) -> bool {
        !self.pod && !self.pod_level && self.cpu.is_empty() && self.memory.is_empty()
    }

    /// Adds the changes of one container in the order in which they are applied.
    pub fn add(&mut self, target: ResizeTarget, update: Update) {
        for (list, direction) in [(&mut self.cpu, update.cpu), (&mut self.memory, update.memory)] {
            match direction {
                Some(ResizeDirection::Up) => list.push((target.clone(), update)),
                Some(ResizeDirection::Down) => list.insert(0, (target.clone(), update)),
                None => {}
            }
        }
    }
}

/// Compares one running container with the resources last applied to it. Static pods are never resized.
pub fn check(pod: &Pod, container: &api::Container, actuated: Option<&PodResources>) -> Check {
    if pod.is_static() {
        return Check::Keep;
    }
    let to = Amounts::of(container.resources.as_ref(), pod.spec().resources.as_ref());
    let applied = actuated.and_then(|a| a.containers.get(&container.name));
    let from = match applied {
        Some(applied) => Amounts::of(Some(applied), actuated.and_then(|a| a.pod_level.as_ref())),
        None => Amounts::default(),
    };
    if from == to {
        return Check::Keep;
    }
    let changed = |resource: &str| match resource {
        "cpu" => (from.cpu_request, from.cpu_limit) != (to.cpu_request, to.cpu_limit),
        "memory" => (from.memory_request, from.memory_limit) != (to.memory_request, to.memory_limit),
        _ => false,
    };
    let policies = container.resize_policy.as_deref().unwrap_or_default();
    if policies.iter().any(|p| p.restart_policy == "RestartContainer" && changed(&p.resource_name)) {
        return Check::Restart;
    }
    Check::Update(Update {
        cpu: direction(from.cpu_limit, to.cpu_limit).or_else(|| direction(from.cpu_request, to.cpu_request)),
        memory: direction(from.memory_limit, to.memory_limit)
            .or_else(|| direction(from.memory_request, to.memory_request)),
        from,
        to,
    })
}

fn direction(from: i64, to: i64) -> Option<ResizeDirection> {
    match to.cmp(&from) {
        std::cmp::Ordering::Greater => Some(ResizeDirection::Up),
        std::cmp::Ordering::Less => Some(ResizeDirection::Down),
        std::cmp::Ordering::Equal => None,
    }
}

/// Whether the pod-level resources differ from those last applied.
pub fn pod_level_changed(pod: &Pod, actuated: Option<&PodResources>) -> bool {
    if pod.is_static() {
        return false;
    }
    let applied = actuated.and_then(|a| a.pod_level.as_ref());
    Amounts::of(pod.spec().resources.as_ref(), None) != Amounts::of(applied, None)
}

/// Whether any running container has other resources than allocated; containers that do not run get
/// them at their next start.
pub fn is_in_progress(pod: &Pod, observed: &ObservedPod, gates: &Gates, actuated: Option<&PodResources>) -> bool {
    let runs = |container: &&api::Container| {
        observed.newest(&container.name).is_some_and(|instance| instance.state == ContainerState::Running)
    };
    let init = pod.init_containers().iter().filter(|c| gates.resize_init || Pod::is_sidecar(c));
    let mut running = pod.containers().iter().chain(init).filter(runs).peekable();
    (gates.resize_pod_level && running.peek().is_some() && pod_level_changed(pod, actuated))
        || running.any(|container| check(pod, container, actuated) != Check::Keep)
}

/// The container's requirements with one resource (`cpu` or `memory`) as desired and all others as
/// applied: passed to the runtime, and recorded, when only that resource is updated.
pub fn with_resource(
    applied: Option<&api::ResourceRequirements>,
    wanted: Option<&api::ResourceRequirements>,
    resource: &str,
) -> api::ResourceRequirements {
    let merge = |of: fn(&api::ResourceRequirements) -> Option<&BTreeMap<String, Quantity>>| {
        let mut list = applied.and_then(of).cloned().unwrap_or_default();
        list.remove(resource);
        if let Some(quantity) = wanted.and_then(of).and_then(|all| all.get(resource)) {
            list.insert(resource.to_owned(), quantity.clone());
        }
        (!list.is_empty()).then_some(list)
    };
    api::ResourceRequirements {
        requests: merge(|r| r.requests.as_ref()),
        limits: merge(|r| r.limits.as_ref()),
        claims: wanted.and_then(|r| r.claims.clone()),
    }
}

#[cfg(test)]
mod tests {
    use serde_json::{Value, json};

    use super::*;

    fn pod(containers: Value, static_pod: bool) -> Pod {
        let annotations = if static_pod { json!({"kubernetes.io/config.source": "file"}) } else { json!({}) };
        let object = json!({
            "metadata": {"name": "p", "namespace": "n", "uid": "u", "annotations": annotations},
            "spec": {"containers": containers, "resources": {"limits": {"memory": "1Gi"}}},
        });
        Pod::new(serde_json::from_value(object).expect("a pod")).expect("complete")
    }

    fn applied(resources: Value) -> PodResources {
        let mut actuated = PodResources::default();
        actuated.containers.insert("c".to_owned(), serde_json::from_value(resources).expect("resources"));
        actuated
    }

    fn outcome(now: Value, before: Value, policy: Value) -> Check {
        let pod = pod(json!([{"name": "c", "resources": now, "resizePolicy": policy}]), false);
        let mut actuated = applied(before);
        actuated.pod_level = pod.spec().resources.clone();
        check(&pod, &pod.containers()[0], Some(&actuated))
    }

    fn directions(now: Value, before: Value) -> (Option<ResizeDirection>, Option<ResizeDirection>) {
        match outcome(now, before, json!([])) {
            Check::Update(update) => (update.cpu, update.memory),
            other => panic!("{other:?}"),
        }
    }

    #[test]
    fn equal_amounts_are_kept_however_they_are_written() {
        let before = json!({"requests": {"cpu": "1", "memory": "1024Mi"}});
        assert_eq!(outcome(json!({"requests": {"cpu": "1000m", "memory": "1Gi"}}), before, json!([])), Check::Keep);
        let pod_limit = json!({"limits": {"memory": "1Gi"}});
        assert_eq!(outcome(json!({}), pod_limit, json!([])), Check::Keep, "the pod's limit stands in");
    }

    #[test]
    fn limits_decide_the_direction_before_requests() {
        use ResizeDirection::{Down, Up};
        let cpu = |request: &str, limit: &str| json!({"requests": {"cpu": request}, "limits": {"cpu": limit}});
        assert_eq!(directions(cpu("1", "3"), cpu("2", "2")), (Some(Up), None));
        assert_eq!(directions(cpu("1", "2"), cpu("2", "2")), (Some(Down), None));
        let memory = |limit: &str| json!({"limits": {"memory": limit}});
        assert_eq!(directions(memory("64Mi"), memory("128Mi")), (None, Some(Down)));
    }

    #[test]
    fn a_policy_counts_only_for_its_own_resource() {
        let policy = json!([{"resourceName": "memory", "restartPolicy": "RestartContainer"}]);
        let (one, two) = (json!({"requests": {"cpu": "1"}}), json!({"requests": {"cpu": "2"}}));
        assert!(matches!(outcome(two, one.clone(), policy.clone()), Check::Update(_)));
        let memory = json!({"requests": {"cpu": "1", "memory": "1Mi"}});
        assert_eq!(outcome(memory, one, policy), Check::Restart);
    }

    #[test]
    fn without_a_record_everything_counts_as_zero_but_static_pods_stay() {
        let containers = json!([{"name": "c", "resources": {"requests": {"cpu": "1"}}}]);
        let moving = pod(containers.clone(), false);
        assert!(matches!(check(&moving, &moving.containers()[0], None), Check::Update(_)));
        assert!(pod_level_changed(&moving, None));
        let fixed = pod(containers, true);
        assert_eq!(check(&fixed, &fixed.containers()[0], None), Check::Keep);
        assert!(!pod_level_changed(&fixed, None));
    }

    #[test]
    fn decreases_come_before_increases() {
        let target = |index| ResizeTarget { kind: ContainerKind::Regular, index, id: "x".into() };
        let mut plan = ResizePlan::default();
        plan.add(target(0), Update { cpu: Some(ResizeDirection::Up), ..Update::default() });
        plan.add(target(1), Update { cpu: Some(ResizeDirection::Down), ..Update::default() });
        plan.add(target(2), Update { cpu: Some(ResizeDirection::Up), ..Update::default() });
        assert_eq!(plan.cpu.iter().map(|(t, _)| t.index).collect::<Vec<_>>(), [1, 0, 2]);
        assert!(plan.memory.is_empty());
    }

    #[test]
    fn one_resource_changes_while_the_other_stays_applied() {
        let read = |value: Value| -> api::ResourceRequirements { serde_json::from_value(value).expect("resources") };
        let before = read(json!({"requests": {"cpu": "1", "memory": "1Mi"}, "limits": {"cpu": "1"}}));
        let wanted = read(json!({"requests": {"cpu": "2", "memory": "2Mi"}}));
        let expected = read(json!({"requests": {"cpu": "1", "memory": "2Mi"}, "limits": {"cpu": "1"}}));
        assert_eq!(with_resource(Some(&before), Some(&wanted), "memory"), expected);
    }
}
