//! Total resource requests and limits of a pod. Pure. Implements spec 02a §6.2, 06a §2.
//!
//! ```text
//! long-running = Σ regular + Σ sidecars
//! init peak    = max over plain init containers of (Σ sidecars before it + itself)
//! total        = max(long-running, init peak), then pod-level values replace, then overhead
//! ```

use std::collections::BTreeMap;

use k8s_openapi::apimachinery::pkg::api::resource::Quantity;

use super::{
    Pod, PodSpec, api,
    quantity::{Amount, QuantityFormat},
};

/// Name of the cpu resource.
pub const CPU: &str = "cpu";
/// Name of the memory resource.
pub const MEMORY: &str = "memory";
/// Name of the ephemeral storage resource.
pub const EPHEMERAL_STORAGE: &str = "ephemeral-storage";
/// Name of the pods resource.
pub const PODS: &str = "pods";
/// Name prefix of huge page resources.
pub const HUGEPAGES_PREFIX: &str = "hugepages-";

/// Quantities in API form, by resource name.
pub type Quantities = BTreeMap<String, Quantity>;

/// Parsed amounts by resource name.
pub type Amounts = BTreeMap<String, Amount>;

/// Parses a list of quantities; malformed ones are omitted.
pub fn amounts(list: Option<&Quantities>) -> Amounts {
    list.into_iter().flatten().filter_map(|(name, q)| Some((name.clone(), Amount::try_from(q).ok()?))).collect()
}

/// Converts amounts to quantities in API form.
pub fn quantities(amounts: Amounts) -> Quantities {
    amounts.into_iter().map(|(name, amount)| (name, amount.into())).collect()
}

/// An amount of zero.
pub fn zero() -> Amount {
    Amount::from_value(0, QuantityFormat::DecimalSi)
}

/// Amount of a resource; zero if it is absent.
pub fn amount_of(list: &Amounts, name: &str) -> Amount {
    list.get(name).copied().unwrap_or_else(zero)
}

/// Amount in the unit in which the resource is accounted: thousandths for cpu, base units (bytes, pieces) for all
/// others; rounded up.
pub fn units(name: &str, amount: Amount) -> i64 {
    if name == CPU { amount.milli() } else { amount.value() }
}

/// Adds each amount of `other` to `sum`.
pub fn add(sum: &mut Amounts, other: &Amounts) {
    for (name, amount) in other {
        sum.entry(name.clone()).and_modify(|total| *total = total.plus(*amount)).or_insert(*amount);
    }
}

/// Raises each amount to that of `other` if that is larger.
pub fn raise(to: &mut Amounts, other: &Amounts) {
    for (name, amount) in other {
        to.entry(name.clone()).and_modify(|own| *own = (*own).max(*amount)).or_insert(*amount);
    }
}

/// Whether the name is that of a huge page resource, such as `hugepages-2Mi`.
pub fn is_hugepage(name: &str) -> bool {
    name.starts_with(HUGEPAGES_PREFIX)
}

/// Page size as the kernel's cgroup files and CRI spell it: `2MB`, `1GB`.
pub fn page_size_name(bytes: u64) -> String {
    let (mut value, mut unit) = (bytes, "B");
    for next in ["KB", "MB", "GB", "TB", "PB"] {
        if value < 1024 || value % 1024 != 0 {
            break;
        }
        value /= 1024;
        unit = next;
    }
    format!("{value}{unit}")
}

/// Page size of a huge page resource (`hugepages-2Mi`), bytes; `None` for other names.
pub fn page_size_of(resource: &str) -> Option<u64> {
    let size = Amount::parse(resource.strip_prefix(HUGEPAGES_PREFIX)?).ok()?.value();
    u64::try_from(size).ok()
}

/// Whether pod-level resources support the resource.
pub fn is_pod_level(name: &str) -> bool {
    matches!(name, CPU | MEMORY) || is_hugepage(name)
}

/// Whether the name is that of an extended resource: with a domain outside of `kubernetes.io`.
pub fn is_extended(name: &str) -> bool {
    name.contains('/') && !name.contains("kubernetes.io/") && !name.starts_with("requests.")
}

/// Which resource requests of a pod are counted.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum View {
    /// The requests in the pod spec.
    Spec,
    /// The maximum of spec, `status.allocatedResources`, and `status.resources`; without the spec if the pod's pending
    /// resize is infeasible. For running pods.
    Effective,
    /// The requests in the pod spec without the extended resources that DRA claims provide.
    WithoutClaimed,
}

/// Total requests of a pod, overhead included.
pub fn requests(pod: &Pod, view: View) -> Amounts {
    let mut total = aggregate(pod.containers(), pod.init_containers(), |container, sidecar_or_regular| {
        let own = amounts(container.resources.as_ref().and_then(|r| r.requests.as_ref()));
        match view {
            View::Spec => own,
            View::Effective if sidecar_or_regular => effective(pod, &container.name, own),
            View::Effective => own,
            View::WithoutClaimed => without_claimed(pod, &container.name, own),
        }
    });
    if let Some(level) = pod.spec().resources.as_ref() {
        replace(&mut total, level.requests.as_ref());
    }
    add(&mut total, &amounts(pod.spec().overhead.as_ref()));
    total
}

/// Whether a total includes the pod's overhead.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Overhead {
    /// With overhead, as the scheduler and the pod cgroup count.
    Included,
    /// Containers only.
    Excluded,
}

/// Total requests of a pod spec.
pub fn pod_requests(spec: &PodSpec, overhead: Overhead) -> Amounts {
    let mut total = container_requests(spec);
    replace(&mut total, spec.resources.as_ref().and_then(|level| level.requests.as_ref()));
    if overhead == Overhead::Included {
        add(&mut total, &amounts(spec.overhead.as_ref()));
    }
    total
}

/// Total limits of a pod spec. Containers without a limit of a resource do not contribute to its total. Overhead is
/// added only to limits above zero.
pub fn pod_limits(spec: &PodSpec, overhead: Overhead) -> Amounts {
    let mut total = container_limits(spec);
    replace(&mut total, spec.resources.as_ref().and_then(|level| level.limits.as_ref()));
    if overhead == Overhead::Included {
        for (name, more) in amounts(spec.overhead.as_ref()) {
            if let Some(limit) = total.get_mut(&name).filter(|limit| !limit.is_zero()) {
                *limit = limit.plus(more);
            }
        }
    }
    total
}

/// Total requests of the containers, without pod-level resources and overhead.
pub fn container_requests(spec: &PodSpec) -> Amounts {
    requests_of(&spec.containers, spec.init_containers.as_deref().unwrap_or_default())
}

/// Total limits of the containers, without pod-level resources and overhead.
pub fn container_limits(spec: &PodSpec) -> Amounts {
    limits_of(&spec.containers, spec.init_containers.as_deref().unwrap_or_default())
}

fn requests_of(regular: &[api::Container], init: &[api::Container]) -> Amounts {
    aggregate(regular, init, |container, _| amounts(container.resources.as_ref().and_then(|r| r.requests.as_ref())))
}

fn limits_of(regular: &[api::Container], init: &[api::Container]) -> Amounts {
    aggregate(regular, init, |container, _| amounts(container.resources.as_ref().and_then(|r| r.limits.as_ref())))
}

/// Effective limit of a container: its own, else that of the pod level.
pub fn limit_of(spec: &PodSpec, container: &api::Container, resource: &str) -> Option<Amount> {
    let limit = |from: Option<&api::ResourceRequirements>| {
        from.and_then(|r| r.limits.as_ref()?.get(resource)).and_then(|q| Amount::try_from(q).ok())
    };
    limit(container.resources.as_ref()).or_else(|| limit(spec.resources.as_ref()).filter(|_| is_pod_level(resource)))
}

/// Request that a container specifies itself.
pub fn request_of(container: &api::Container, resource: &str) -> Option<Amount> {
    let quantity = container.resources.as_ref()?.requests.as_ref()?.get(resource)?;
    Amount::try_from(quantity).ok()
}

/// Sets the pod-level requests and huge page limits that follow from the containers and from the pod-level limits, as
/// the API server does; without effect if `spec.resources` is missing.
pub fn default_pod_level(spec: &mut api::PodSpec) {
    let (regular, init) = (&spec.containers, spec.init_containers.as_deref().unwrap_or_default());
    let (from_requests, from_limits) = (requests_of(regular, init), limits_of(regular, init));
    let Some(level) = spec.resources.as_mut() else { return };
    if level.limits.is_none() && level.requests.is_none() {
        return;
    }
    let mut limits = level.limits.take().unwrap_or_default();
    for (name, amount) in from_limits.into_iter().filter(|(name, _)| is_hugepage(name)) {
        limits.entry(name).or_insert_with(|| amount.into());
    }
    let mut requests = level.requests.take().unwrap_or_default();
    for (name, amount) in from_requests.into_iter().filter(|(name, _)| is_pod_level(name) && !is_hugepage(name)) {
        requests.entry(name).or_insert_with(|| amount.into());
    }
    for (name, quantity) in limits.iter().filter(|(name, _)| is_pod_level(name)) {
        requests.entry(name.clone()).or_insert_with(|| quantity.clone());
    }
    level.limits = Some(limits).filter(|l| !l.is_empty());
    level.requests = Some(requests).filter(|r| !r.is_empty());
}

/// Combines the lists of all containers; `list` receives whether a container is long-running.
fn aggregate(
    regular: &[api::Container],
    init: &[api::Container],
    list: impl Fn(&api::Container, bool) -> Amounts,
) -> Amounts {
    let mut long_running = Amounts::new();
    for container in regular {
        add(&mut long_running, &list(container, true));
    }
    let (mut sidecars, mut peak) = (Amounts::new(), Amounts::new());
    for container in init {
        let sidecar = Pod::is_sidecar(container);
        let mut needed = list(container, sidecar);
        if sidecar {
            add(&mut long_running, &needed);
            add(&mut sidecars, &needed);
        } else {
            add(&mut needed, &sidecars);
            raise(&mut peak, &needed);
        }
    }
    raise(&mut long_running, &peak);
    long_running
}

/// Replaces the totals of the containers with pod-level values.
fn replace(total: &mut Amounts, level: Option<&Quantities>) {
    total.extend(amounts(level).into_iter().filter(|(name, _)| is_pod_level(name)));
}

/// Whether the API status reports the pod's resize as infeasible.
fn is_resize_infeasible(pod: &Pod) -> bool {
    let conditions = pod.status.as_ref().and_then(|s| s.conditions.as_deref()).unwrap_or_default();
    conditions.iter().any(|c| c.type_ == "PodResizePending" && c.reason.as_deref() == Some("Infeasible"))
}

fn effective(pod: &Pod, container: &str, own: Amounts) -> Amounts {
    let Some(status) = pod.status.as_ref() else { return own };
    let all = status.container_statuses.iter().flatten().chain(status.init_container_statuses.iter().flatten());
    let Some(seen) = all.into_iter().find(|s| s.name == container && s.resources.is_some()) else { return own };
    let mut most = if is_resize_infeasible(pod) { Amounts::new() } else { own };
    raise(&mut most, &amounts(seen.resources.as_ref().and_then(|r| r.requests.as_ref())));
    raise(&mut most, &amounts(seen.allocated_resources.as_ref()));
    most
}

fn without_claimed(pod: &Pod, container: &str, mut own: Amounts) -> Amounts {
    let claimed = pod.status.as_ref().and_then(|s| s.extended_resource_claim_status.as_ref());
    for mapping in claimed.iter().flat_map(|c| &c.request_mappings).filter(|m| m.container_name == container) {
        own.remove(&mapping.resource_name);
    }
    own
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;
    use serde_json::{Value, json};

    use super::*;

    fn pod(spec: Value, status: Value) -> Pod {
        let object = json!({"metadata": {"name": "p", "namespace": "n", "uid": "u"}, "spec": spec, "status": status});
        Pod::new(serde_json::from_value(object).expect("a pod")).expect("complete")
    }

    fn container(cpu: &str) -> Value {
        json!({"name": format!("c{cpu}"), "resources": {"requests": {"cpu": cpu}, "limits": {"cpu": cpu}}})
    }

    fn sidecar(cpu: &str) -> Value {
        let mut sidecar = container(cpu);
        sidecar["restartPolicy"] = "Always".into();
        sidecar
    }

    fn milli(spec: Value) -> i64 {
        amount_of(&requests(&pod(spec, json!({})), View::Spec), CPU).milli()
    }

    #[test]
    fn the_total_is_the_larger_of_running_and_starting() {
        for (spec, expected) in [
            (json!({"containers": [container("1"), container("500m")]}), 1500),
            (json!({"containers": [container("100m")], "initContainers": [container("2")]}), 2000),
            // AC-06a-14: a sidecar counts beside init containers that start after it.
            (json!({"containers": [container("300m")], "initContainers": [sidecar("200m"), container("500m")]}), 700),
            (json!({"containers": [container("300m")], "initContainers": [container("500m"), sidecar("200m")]}), 500),
            (json!({"containers": [container("100m")], "overhead": {"cpu": "50m"}}), 150),
            (json!({"containers": [container("100m")], "resources": {"requests": {"cpu": "1"}}}), 1000),
            (
                json!({"containers": [container("100m")], "resources": {"requests": {"cpu": "1"}},
                       "overhead": {"cpu": "1m"}}),
                1001,
            ),
            (json!({"containers": [container("100m")], "resources": {"requests": {"memory": "1Gi"}}}), 100),
        ] {
            assert_eq!(milli(spec.clone()), expected, "{spec}");
        }
    }

    #[test]
    fn page_sizes_have_names() {
        for (bytes, name) in [(64 << 10, "64KB"), (2 << 20, "2MB"), (1 << 30, "1GB"), (1000, "1000B"), (0, "0B")] {
            assert_eq!(page_size_name(bytes), name);
        }
        for (name, bytes) in
            [("hugepages-2Mi", Some(2 << 20)), ("hugepages-x", None), ("hugepages--1", None), ("cpu", None)]
        {
            assert_eq!(page_size_of(name), bytes, "{name}");
        }
    }

    #[test]
    fn overhead_raises_only_limits_that_exist() {
        let spec = json!({"containers": [container("1")], "overhead": {"cpu": "100m", "memory": "120Mi"}});
        let limits = pod_limits(pod(spec, json!({})).spec(), Overhead::Included);
        assert_eq!((limits.len(), amount_of(&limits, CPU).milli()), (1, 1100));
    }

    #[test]
    fn a_running_pod_counts_with_the_largest_of_what_is_known() {
        let spec = json!({"containers": [{"name": "c", "resources": {"requests": {"cpu": "2"}}}]});
        let status = |reason: &str| {
            json!({"containerStatuses": [{"name": "c", "image": "i", "imageID": "", "ready": true, "restartCount": 0,
                "allocatedResources": {"cpu": "1"}, "resources": {"requests": {"cpu": "1500m"}}}],
                "conditions": [{"type": "PodResizePending", "status": "True", "reason": reason}]})
        };
        for (reason, expected) in [("Deferred", 2000), ("Infeasible", 1500)] {
            let total = requests(&pod(spec.clone(), status(reason)), View::Effective);
            assert_eq!(amount_of(&total, CPU).milli(), expected, "{reason}");
        }
    }

    #[test]
    fn what_claims_provide_is_not_requested_again() {
        let spec = json!({"containers": [
            {"name": "a", "resources": {"requests": {"example.com/gpu": "1"}}},
            {"name": "b", "resources": {"requests": {"example.com/gpu": "2"}}}]});
        let status = json!({"extendedResourceClaimStatus": {"resourceClaimName": "r", "requestMappings": [
            {"containerName": "a", "requestName": "x", "resourceName": "example.com/gpu"}]}});
        let pod = pod(spec, status);
        assert_eq!(amount_of(&requests(&pod, View::WithoutClaimed), "example.com/gpu").value(), 2);
        assert_eq!(amount_of(&requests(&pod, View::Spec), "example.com/gpu").value(), 3);
    }

    #[test]
    fn pod_level_requests_follow_containers_and_then_limits() {
        let mut spec = pod(
            json!({"containers": [container("300m"), {"name": "h", "resources":
                {"limits": {"hugepages-2Mi": "4Mi"}, "requests": {"hugepages-2Mi": "4Mi"}}}],
                "resources": {"limits": {"cpu": "1", "memory": "1Gi"}}}),
            json!({}),
        )
        .spec()
        .to_object();
        default_pod_level(&mut spec);
        let level = spec.resources.expect("kept");
        let text =
            |list: Option<Quantities>| list.map(|l| l.into_iter().map(|(k, q)| format!("{k}={}", q.0)).collect());
        let expected = ["cpu=300m", "hugepages-2Mi=4Mi", "memory=1Gi"].map(str::to_owned).to_vec();
        assert_eq!(text(level.requests), Some(expected));
        assert_eq!(level.limits.map(|l| l.len()), Some(3));
    }

    #[test]
    fn limits_fall_back_to_the_pod_level() {
        let pod = pod(
            json!({"containers": [container("1"), {"name": "b"}], "resources": {"limits": {"cpu": "4", "memory": "1Gi"}}}),
            json!({}),
        );
        let of = |i: usize, name: &str| limit_of(pod.spec(), &pod.containers()[i], name).map(Amount::milli);
        assert_eq!((of(0, CPU), of(1, CPU), of(1, EPHEMERAL_STORAGE)), (Some(1000), Some(4000), None));
    }

    #[test]
    fn extended_names_have_a_foreign_domain() {
        for (name, extended) in [
            ("cpu", false),
            ("hugepages-2Mi", false),
            ("example.com/gpu", true),
            ("kubernetes.io/x", false),
            ("a.kubernetes.io/x", false),
            ("requests.example.com/x", false),
        ] {
            assert_eq!(is_extended(name), extended, "{name}");
        }
    }

    fn both(spec: serde_json::Value) -> (String, String) {
        let spec: api::PodSpec = serde_json::from_value(spec).expect("a spec");
        let spec = PodSpec::from(spec);
        let text = |amounts: Amounts| serde_json::to_string(&quantities(amounts)).expect("JSON");
        (text(pod_requests(&spec, Overhead::Included)), text(pod_limits(&spec, Overhead::Included)))
    }

    fn shaped(cpu: &str, sidecar: bool) -> serde_json::Value {
        let mut c = json!({"name": "c", "resources": {"requests": {"cpu": cpu}, "limits": {"cpu": cpu}}});
        if sidecar {
            c["restartPolicy"] = "Always".into();
        }
        c
    }

    #[test]
    fn totals_follow_the_life_of_a_pod() {
        for (init, regular, cpu) in [
            (vec![], vec![shaped("1", false), shaped("500m", false)], "1500m"),
            (vec![shaped("2", false)], vec![shaped("1", false)], "2"),
            (vec![shaped("1", true)], vec![shaped("1", false)], "2"),
            (vec![shaped("1", true), shaped("2", false)], vec![shaped("1", false)], "3"),
            (vec![shaped("2", false), shaped("1", true)], vec![shaped("100m", false)], "2"),
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
            both(json!({"containers": [shaped("1", false)], "resources": level, "overhead": overhead}));
        assert_eq!(requests, r#"{"cpu":"5100m","memory":"1Mi"}"#);
        assert_eq!(limits, r#"{"cpu":"1100m","memory":"0"}"#);
    }

    proptest! {
        #[test]
        fn the_total_covers_every_moment(
            regular in prop::collection::vec(0_i64..5000, 1..4),
            init in prop::collection::vec((any::<bool>(), 0_i64..5000), 0..5),
        ) {
            let make = |m: &i64| container(&format!("{m}m"));
            let spec = json!({
                "containers": regular.iter().map(make).collect::<Vec<_>>(),
                "initContainers": init.iter().map(|(s, m)| if *s { sidecar(&format!("{m}m")) } else { make(m) })
                    .collect::<Vec<_>>(),
            });
            let total = milli(spec);
            let (mut sidecars, mut moments) = (0, Vec::new());
            for (is_sidecar, m) in &init {
                if *is_sidecar { sidecars += m } else { moments.push(sidecars + m) }
            }
            moments.push(sidecars + regular.iter().sum::<i64>());
            prop_assert_eq!(Some(total), moments.into_iter().max());
        }
    }
}
