//! Validates requests, limits, and claims of containers and of a pod. Pure.

use std::collections::{BTreeMap, BTreeSet};

use k8s_openapi::apimachinery::pkg::api::resource::Quantity;

use super::field::{FieldErrors, Path};
use berth_types::{
    Pod, api, names,
    quantity::Amount,
    resources::{self, Amounts, HUGEPAGES_PREFIX, Quantities},
};

/// Standard resource names without a domain; huge pages are valid too.
const STANDARD: [&str; 20] = [
    "configmaps",
    "cpu",
    "ephemeral-storage",
    "limits.cpu",
    "limits.ephemeral-storage",
    "limits.memory",
    "memory",
    "persistentvolumeclaims",
    "pods",
    "replicationcontrollers",
    "requests.cpu",
    "requests.ephemeral-storage",
    "requests.memory",
    "requests.storage",
    "resourcequotas",
    "secrets",
    "services",
    "services.loadbalancers",
    "services.nodeports",
    "storage",
];

/// Level of the resources: the valid names differ.
#[derive(Clone, Copy, PartialEq, Eq)]
enum ResourceLevel {
    Container,
    Pod,
}

/// Checks the resources of a container; `pod_claims` are the names of the pod's resource claims.
pub fn container(own: &api::ResourceRequirements, pod_claims: &BTreeSet<&str>, at: &Path, errors: &mut FieldErrors) {
    requirements(own, ResourceLevel::Container, at, errors);
    claims(own.claims.as_deref().unwrap_or_default(), pod_claims, &at.child("claims"), errors);
}

/// Checks the pod-level resources, alone and against those of the containers.
pub fn pod(spec: &api::PodSpec, at: &Path, errors: &mut FieldErrors) {
    let Some(own) = spec.resources.as_ref() else { return };
    let at_own = at.child("resources");
    if spec.os.as_ref().is_some_and(|os| os.name == "windows") {
        errors.forbidden(&at_own, "may not be set for a windows pod");
        return;
    }
    if own.claims.is_some() {
        errors.forbidden(&at_own.child("claims"), "claims may not be set for Resources at pod-level");
    }
    requirements(own, ResourceLevel::Pod, &at_own, errors);
    consistency(spec, own, at, errors);
}

/// Checks the overhead of a pod: like limits of a container.
pub fn overhead(overhead: &BTreeMap<String, Quantity>, at: &Path, errors: &mut FieldErrors) {
    let as_limits = api::ResourceRequirements { limits: Some(overhead.clone()), ..Default::default() };
    requirements(&as_limits, ResourceLevel::Container, at, errors);
}

fn requirements(own: &api::ResourceRequirements, level: ResourceLevel, at: &Path, errors: &mut FieldErrors) {
    let (mut has_cpu_or_memory, mut has_huge_pages) = (false, false);
    for (member, list) in [("limits", &own.limits), ("requests", &own.requests)] {
        let at = at.child(member);
        for (name, quantity) in list.iter().flatten() {
            let at = at.key(name);
            resource_name(name, level, &at, errors);
            resource_quantity(name, quantity, &at, errors);
            has_cpu_or_memory |= matches!(name.as_str(), resources::CPU | resources::MEMORY);
            has_huge_pages |= resources::is_hugepage(name);
        }
    }
    for (name, request) in own.requests.iter().flatten() {
        let limit = own.limits.as_ref().and_then(|limits| limits.get(name));
        within_limit(name, request, limit, at, errors);
    }
    if has_huge_pages && !has_cpu_or_memory {
        errors.forbidden(at, "HugePages require cpu or memory");
    }
}

fn resource_name(name: &str, level: ResourceLevel, at: &Path, errors: &mut FieldErrors) {
    let complaints = names::qualified_name(name);
    if !complaints.is_empty() {
        errors.complaints(at, name, complaints);
        return;
    }
    let is_bare = !name.contains('/');
    let is_standard = STANDARD.contains(&name)
        || resources::is_hugepage(name)
        || name.strip_prefix("requests.").is_some_and(resources::is_hugepage);
    if is_bare && !is_standard {
        errors.invalid(at, name, "must be a standard resource type or fully qualified");
    }
    match level {
        ResourceLevel::Container if is_bare => {
            let is_of_containers = matches!(name, resources::CPU | resources::MEMORY | resources::EPHEMERAL_STORAGE);
            if !(is_of_containers || resources::is_hugepage(name)) {
                errors.invalid(at, name, "must be a standard resource for containers");
            }
        }
        ResourceLevel::Container if !name.contains("kubernetes.io/") && !is_extended(name) => {
            errors.invalid(at, name, "doesn't follow extended resource name standard");
        }
        ResourceLevel::Pod if (is_standard || !is_bare) && !resources::is_pod_level(name) => {
            errors.unsupported(at, name, &["cpu", "hugepages-", "memory"]);
        }
        ResourceLevel::Container | ResourceLevel::Pod => {}
    }
}

/// Whether the name is that of an extended resource, and valid in a quota too.
fn is_extended(name: &str) -> bool {
    resources::is_extended(name) && names::qualified_name(&format!("requests.{name}")).is_empty()
}

fn resource_quantity(name: &str, quantity: &Quantity, at: &Path, errors: &mut FieldErrors) {
    let amount = match Amount::try_from(quantity) {
        Ok(amount) => amount,
        Err(e) => return errors.invalid(at, &quantity.0, &e.to_string()),
    };
    if amount.is_negative() {
        errors.invalid(at, &quantity.0, "must be greater than or equal to 0");
    }
    if is_extended(name) && amount.milli() % 1000 != 0 {
        errors.invalid(at, &quantity.0, "must be an integer");
    }
    if resources::is_hugepage(name) && !is_whole_pages(name, amount) {
        errors.invalid(at, &quantity.0, &format!("{} is not positive integer multiple of {name}", quantity.0));
    }
}

fn is_whole_pages(name: &str, amount: Amount) -> bool {
    let size = name.strip_prefix(HUGEPAGES_PREFIX).and_then(|size| Amount::parse(size).ok());
    size.is_some_and(|size| size.value() > 0 && size.milli() % 1000 == 0 && amount.value() % size.value() == 0)
}

/// Checks a request against the limit of the same resource; `at` is the path of the resources.
fn within_limit(name: &str, request: &Quantity, limit: Option<&Quantity>, at: &Path, errors: &mut FieldErrors) {
    let is_native = !name.contains('/') || name.contains("kubernetes.io/");
    let may_overcommit = is_native && !resources::is_hugepage(name);
    let Some(limit) = limit else {
        if !may_overcommit {
            errors.required(&at.child("limits"), "Limit must be set for non overcommitable resources");
        }
        return;
    };
    let (Ok(asked), Ok(most)) = (Amount::try_from(request), Amount::try_from(limit)) else { return };
    let at = at.child("requests");
    if asked != most && !may_overcommit {
        errors.invalid(&at, &request.0, &format!("must be equal to {name} limit of {}", limit.0));
    } else if asked > most {
        errors.invalid(&at, &request.0, &format!("must be less than or equal to {name} limit of {}", limit.0));
    }
}

/// Checks the claims that a container uses against those of its pod.
fn claims(claims: &[api::ResourceClaim], pod_claims: &BTreeSet<&str>, at: &Path, errors: &mut FieldErrors) {
    let mut seen: BTreeSet<String> = BTreeSet::new();
    for (i, claim) in claims.iter().enumerate() {
        let at = at.index(i);
        let name = claim.name.as_str();
        if name.is_empty() {
            errors.required(&at, "");
            continue;
        }
        let request = claim.request.as_deref().unwrap_or_default();
        let key = if request.is_empty() { name.to_owned() } else { format!("{name}/{request}") };
        let has_all_requests = seen.contains(name);
        let has_a_request = seen.iter().any(|one| one.split_once('/').is_some_and(|(claim, _)| claim == name));
        if has_all_requests {
            errors.duplicate(&at, name);
        } else if seen.contains(&key) || (request.is_empty() && has_a_request) {
            errors.duplicate(&at, &key);
        }
        if !(request.is_empty() || has_all_requests) {
            errors.complaints(&at.child("request"), request, names::dns_label(request));
        }
        seen.insert(key);
        if !pod_claims.contains(name) {
            let there = match pod_claims.iter().copied().collect::<Vec<_>>().join(", ") {
                none if none.is_empty() => " which is empty".to_owned(),
                some => format!(": {some}"),
            };
            errors.not_found_among(&at, name, &format!("must be one of the names in pod.spec.resourceClaims{there}"));
        }
    }
}

/// Checks that the containers' resources fit into the pod-level ones; `at` is the path of the
/// specification.
fn consistency(spec: &api::PodSpec, own: &api::ResourceRequirements, at: &Path, errors: &mut FieldErrors) {
    let at_own = at.child("resources");
    let (requests, limits) = (own.requests.as_ref(), own.limits.as_ref());
    let of_containers = total(spec, |one| one.requests.as_ref());
    for (name, pod, sum) in pairs(requests, &of_containers).filter(|(_, pod, sum)| sum > pod) {
        let text = format!("must be greater than or equal to aggregate container requests of {}", sum.canonical());
        errors.invalid(&at_own.child("requests").key(name), &pod.canonical(), &text);
    }
    let of_containers = total(spec, |one| one.limits.as_ref());
    for (name, pod, sum) in pairs(limits, &of_containers).filter(|(_, pod, sum)| sum > pod) {
        if resources::is_hugepage(name) {
            let text = format!("must be greater than or equal to aggregate container limits of {}", sum.canonical());
            errors.invalid(&at_own.child("limits").key(name), &pod.canonical(), &text);
        }
    }
    for (i, one) in spec.containers.iter().enumerate() {
        let of_container = resources::amounts(one.resources.as_ref().and_then(|r| r.limits.as_ref()));
        for (name, pod, limit) in pairs(limits, &of_container).filter(|(_, pod, limit)| limit > pod) {
            let at = at.child("containers").index(i).child("resources").child("limits").key(name);
            let text = format!("must be less than or equal to pod limits of {}", pod.canonical());
            errors.invalid(&at, &limit.canonical(), &text);
        }
    }
}

/// Resources that both the pod and its containers name, with both amounts.
fn pairs<'a>(
    of_pod: Option<&Quantities>,
    of_containers: &'a Amounts,
) -> impl Iterator<Item = (&'a str, Amount, Amount)> {
    let of_pod = resources::amounts(of_pod);
    of_containers.iter().filter_map(move |(name, amount)| Some((name.as_str(), *of_pod.get(name)?, *amount)))
}

/// The sum over the containers, or the peak of the init containers if that is higher.
fn total(spec: &api::PodSpec, list: impl Fn(&api::ResourceRequirements) -> Option<&Quantities>) -> Amounts {
    let of = |one: &api::Container| resources::amounts(one.resources.as_ref().and_then(&list));
    let (mut running, mut sidecars, mut peak) = (Amounts::new(), Amounts::new(), Amounts::new());
    for one in &spec.containers {
        resources::add(&mut running, &of(one));
    }
    for one in spec.init_containers.iter().flatten() {
        let mut needed = of(one);
        if Pod::is_sidecar(one) {
            resources::add(&mut running, &needed);
            resources::add(&mut sidecars, &needed);
        } else {
            resources::add(&mut needed, &sidecars);
            resources::raise(&mut peak, &needed);
        }
    }
    resources::raise(&mut running, &peak);
    running
}

/// Whether a quantity is negative; false for an invalid one.
pub fn is_negative(quantity: &Quantity) -> bool {
    Amount::try_from(quantity).is_ok_and(Amount::is_negative)
}
