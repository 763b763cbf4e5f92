//! Decisions on the claims of a pod: names, checks, batches, results, CDI devices. Pure.
//!
//! ```text
//!  prepare:   claim_names ─► GET claims ─► check ─► add_reference ─► checkpoint ─► batches
//!             ─► NodePrepareResources ─► merge_prepared (per driver) ─► mark_prepared ─► checkpoint
//!  use:       cdi_devices
//!  unprepare: unprepare_plan ─► NodeUnprepareResources ─► merge_unprepared ─► checkpoint
//! ```
//!
//! The caller owns the claims and serializes the calls to drivers for the same claim. Error texts are those of the
//! reference kubelet; the caller adds `prepare dynamic resources: ` or `unprepare dynamic resources: `.
//! Implements spec 06c §3.3-3.5, §3.7.

use std::collections::{BTreeMap, BTreeSet};

use berth_types::{Pod, PodUid, api, quantity::Amount, resources::is_extended};
use k8s_openapi::api::resource::v1::ResourceClaim;

use super::{
    claim_error::{ClaimError, DriverMethod},
    model::{ClaimKey, ClaimState, Claims, PreparedDevice},
};

/// Name prefix of extended resources that stand for a device class.
const DEVICE_CLASS_PREFIX: &str = "deviceclass.resource.kubernetes.io/";

/// Answer to NodePrepareResources: devices or the driver's error text, by UID of the claim.
pub type PreparedResults = BTreeMap<String, Result<Vec<PreparedDevice>, String>>;

/// Answer to NodeUnprepareResources: success or the driver's error text, by UID of the claim.
pub type UnpreparedResults = BTreeMap<String, Result<(), String>>;

/// A claim that a pod refers to.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct PodClaim {
    /// Name in `spec.resourceClaims`; empty for the claim of extended resources.
    pub pod_claim: String,
    /// Name of the ResourceClaim object in the pod's namespace; `None` if the pod needs none.
    pub claim: Option<String>,
    /// Whether the claim was created from a template for this pod, which then must own it.
    pub from_template: bool,
}

/// A claim that the pod may use and whose drivers are registered.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct CheckedClaim {
    /// Namespace and name of the object.
    pub key: ClaimKey,
    /// `metadata.uid` of the object.
    pub uid: String,
    /// Drivers of the allocated devices.
    pub drivers: BTreeSet<String>,
}

/// What to do before the last containers of a pod are reported as terminated.
#[derive(Clone, PartialEq, Eq, Debug, Default)]
pub struct UnpreparePlan {
    /// Claims that only this pod uses. [`merge_unprepared`] removes them.
    pub claims: BTreeSet<ClaimKey>,
    /// Claims to pass to NodeUnprepareResources, by driver. A claim without devices is in no batch.
    pub batches: BTreeMap<String, Vec<ClaimKey>>,
    /// Whether the pod was removed from a claim that other pods use: the checkpoint must be written.
    pub has_dropped_reference: bool,
}

/// Result of [`merge_unprepared`].
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct UnprepareOutcome {
    /// Whether an entry was changed or removed: the checkpoint must be written, even after an error.
    pub is_checkpoint_due: bool,
    /// The first error, in the order of the driver names.
    pub result: Result<(), ClaimError>,
}

/// Claims of a pod: those of `spec.resourceClaims` in order, then the claim of its extended resources.
///
/// # Errors
/// The claim of a template is not in the pod status, or an entry names neither a claim nor a template.
pub fn claim_names(pod: &Pod) -> Result<Vec<PodClaim>, ClaimError> {
    let mut names = Vec::new();
    for entry in pod.spec().resource_claims.iter().flatten() {
        names.push(PodClaim {
            pod_claim: entry.name.clone(),
            claim: object_name(pod, entry)?.map(str::to_owned),
            from_template: entry.resource_claim_name.is_none(),
        });
    }
    names.extend(extended_resource_claim(pod).map(|status| PodClaim {
        pod_claim: String::new(),
        claim: Some(status.resource_claim_name.clone()),
        from_template: false,
    }));
    Ok(names)
}

/// Name of the ResourceClaim object of an entry of `spec.resourceClaims`; `None` if no object is needed.
fn object_name<'a>(pod: &'a Pod, entry: &'a api::PodResourceClaim) -> Result<Option<&'a str>, ClaimError> {
    if let Some(name) = &entry.resource_claim_name {
        return Ok(Some(name));
    }
    if entry.resource_claim_template_name.is_none() {
        return Err(ClaimError::UnsupportedEntry { pod: pod.object_name(), pod_claim: entry.name.clone() });
    }
    let statuses = pod.status.as_ref().and_then(|status| status.resource_claim_statuses.as_ref());
    let status = statuses.into_iter().flatten().find(|status| status.name == entry.name);
    let status = status.ok_or_else(|| ClaimError::NotCreated { pod: pod.object_name() })?;
    Ok(status.resource_claim_name.as_deref())
}

/// Claim that the scheduler created for the extended resources of a pod.
fn extended_resource_claim(pod: &Pod) -> Option<&api::PodExtendedResourceClaimStatus> {
    pod.status.as_ref()?.extended_resource_claim_status.as_ref()
}

/// Checks that a pod may use a claim and that the drivers of its devices are registered.
///
/// # Errors
/// The first failed check: owner (claims of templates only), reservation, allocation, drivers by name.
pub fn check(
    pod: &Pod,
    pod_claim: &PodClaim,
    claim: &ResourceClaim,
    is_registered: &dyn Fn(&str) -> bool,
) -> Result<CheckedClaim, ClaimError> {
    let key = ClaimKey {
        namespace: claim.metadata.namespace.clone().unwrap_or_default(),
        name: claim.metadata.name.clone().unwrap_or_default(),
    };
    let uid = claim.metadata.uid.clone().unwrap_or_default();
    if pod_claim.from_template && !is_controlled_by(claim, pod) {
        return Err(ClaimError::NotOwner { claim: key, pod: pod.object_name() });
    }
    let status = claim.status.as_ref();
    let mut consumers = status.and_then(|status| status.reserved_for.as_ref()).into_iter().flatten();
    if !consumers.any(|consumer| consumer.uid == pod.uid().as_str()) {
        return Err(ClaimError::NotReserved {
            pod: pod.name().to_owned(),
            pod_uid: pod.uid().clone(),
            claim: key.name,
            claim_uid: uid,
        });
    }
    let Some(allocation) = status.and_then(|status| status.allocation.as_ref()) else {
        return Err(ClaimError::NotAllocated { claim: key.name });
    };
    let results = allocation.devices.iter().flat_map(|devices| devices.results.iter().flatten());
    let drivers: BTreeSet<String> = results.map(|result| result.driver.clone()).collect();
    if let Some(driver) = drivers.iter().find(|driver| !is_registered(driver.as_str())) {
        return Err(ClaimError::DriverNotRegistered { driver: driver.clone() });
    }
    Ok(CheckedClaim { key, uid, drivers })
}

/// Whether the pod is the controller of a claim in its own namespace.
fn is_controlled_by(claim: &ResourceClaim, pod: &Pod) -> bool {
    let mut owners = claim.metadata.owner_references.iter().flatten();
    let controller = owners.find(|owner| owner.controller == Some(true));
    claim.metadata.namespace.as_deref() == Some(pod.namespace())
        && controller.is_some_and(|owner| owner.uid == pod.uid().as_str())
}

/// Adds a pod to its claims. Returns the claims that must be prepared, in order, each once.
///
/// A claim that is in the cache keeps its drivers and devices; drivers of a later allocation are added.
///
/// # Errors
/// A claim of the same name has another UID. No claim is changed then.
pub fn add_reference(claims: &mut Claims, pod: &PodUid, checked: &[CheckedClaim]) -> Result<Vec<ClaimKey>, ClaimError> {
    for claim in checked {
        let cached = claims.get(&claim.key).map(|state| &state.uid);
        let earlier = checked.iter().find(|other| other.key == claim.key).map(|other| &other.uid);
        if let Some(uid) = cached.or(earlier).filter(|uid| **uid != claim.uid) {
            return Err(ClaimError::FormerClaim { claim: claim.key.name.clone(), uid: uid.clone() });
        }
    }
    let mut unprepared = Vec::new();
    for claim in checked {
        let state = claims.entry(claim.key.clone()).or_default();
        state.uid.clone_from(&claim.uid);
        state.pods.insert(pod.clone());
        for driver in &claim.drivers {
            if !state.drivers.contains_key(driver) {
                state.drivers.insert(driver.clone(), Vec::new());
                state.is_prepared = false;
            }
        }
        if !state.is_prepared && !unprepared.contains(&claim.key) {
            unprepared.push(claim.key.clone());
        }
    }
    Ok(unprepared)
}

/// Claims to pass to each driver, in the given order. Claims that are not in the cache are omitted.
pub fn batches(claims: &Claims, keys: &[ClaimKey]) -> BTreeMap<String, Vec<ClaimKey>> {
    let mut batches: BTreeMap<String, Vec<ClaimKey>> = BTreeMap::new();
    for key in keys {
        for driver in claims.get(key).into_iter().flat_map(|state| state.drivers.keys()) {
            batches.entry(driver.clone()).or_default().push(key.clone());
        }
    }
    batches
}

/// Records the devices that a driver has prepared for a batch. They replace the driver's former devices of the claim.
///
/// Devices of the claims that succeeded are recorded even if others fail.
///
/// # Errors
/// A claim of the batch is not in the cache, or the first error in the answer.
pub fn merge_prepared(
    claims: &mut Claims,
    driver: &str,
    batch: &[ClaimKey],
    results: PreparedResults,
) -> Result<(), ClaimError> {
    let by_uid = keys_by_uid(claims, batch)?;
    let result = first_error(DriverMethod::Prepare, &by_uid, &results);
    for (uid, devices) in results {
        let (Some(key), Ok(devices)) = (by_uid.get(&uid), devices) else { continue };
        if let Some(state) = claims.get_mut(key) {
            state.drivers.insert(driver.to_owned(), devices);
        }
    }
    result
}

/// Marks claims as prepared, once all of their drivers have succeeded.
///
/// # Errors
/// A claim is not in the cache.
pub fn mark_prepared(claims: &mut Claims, keys: &[ClaimKey]) -> Result<(), ClaimError> {
    for key in keys {
        let state = claims.get_mut(key).ok_or_else(|| ClaimError::NotCached { claim: key.clone() })?;
        state.is_prepared = true;
    }
    Ok(())
}

/// Keys of a batch by the UID of the claim.
fn keys_by_uid(claims: &Claims, batch: &[ClaimKey]) -> Result<BTreeMap<String, ClaimKey>, ClaimError> {
    let entries = batch.iter().map(|key| match claims.get(key) {
        Some(state) => Ok((state.uid.clone(), key.clone())),
        None => Err(ClaimError::NotCached { claim: key.clone() }),
    });
    entries.collect()
}

/// First error in the answer of a driver: by UID, then claims without a result.
fn first_error<T>(
    method: DriverMethod,
    batch: &BTreeMap<String, ClaimKey>,
    results: &BTreeMap<String, Result<T, String>>,
) -> Result<(), ClaimError> {
    for (uid, result) in results {
        let Some(key) = batch.get(uid) else {
            return Err(ClaimError::UnknownUid { method, uid: uid.clone() });
        };
        if let Err(text) = result {
            return Err(ClaimError::Driver { method, claim: key.name.clone(), text: text.clone() });
        }
    }
    // All results are for claims of the batch.
    match batch.len().saturating_sub(results.len()) {
        0 => Ok(()),
        number => Err(ClaimError::Skipped { method, number }),
    }
}

/// Removes a pod from the claims that other pods use too, and plans how to unprepare those that only it uses.
///
/// The latter count as not prepared from now on: a pod that uses one later prepares it again, even if the drivers fail.
pub fn unprepare_plan(claims: &mut Claims, pod: &PodUid) -> UnpreparePlan {
    let mut plan = UnpreparePlan::default();
    for (key, state) in claims.iter_mut().filter(|(_, state)| state.pods.contains(pod)) {
        if state.pods.len() > 1 {
            state.pods.remove(pod);
            plan.has_dropped_reference = true;
            continue;
        }
        state.is_prepared = false;
        plan.claims.insert(key.clone());
        for driver in state.drivers.keys() {
            plan.batches.entry(driver.clone()).or_default().push(key.clone());
        }
    }
    plan
}

/// Removes the claims of a plan that all of their drivers have unprepared.
///
/// `results` has the answer or the error of each driver; a driver without an entry counts as not registered. A claim
/// that another pod uses meanwhile stays, without this pod.
pub fn merge_unprepared(
    claims: &mut Claims,
    pod: &PodUid,
    plan: &UnpreparePlan,
    results: &BTreeMap<String, Result<UnpreparedResults, ClaimError>>,
) -> UnprepareOutcome {
    let mut result = Ok(());
    let mut failed: BTreeSet<&ClaimKey> = BTreeSet::new();
    for (driver, batch) in &plan.batches {
        let answer = match results.get(driver) {
            Some(answer) => answer.as_ref().map_err(ClaimError::clone),
            None => Err(ClaimError::DriverNotRegistered { driver: driver.clone() }),
        };
        let is_unprepared = |key: &ClaimKey| {
            let uid = claims.get(key).map(|state| &state.uid);
            answer.as_ref().is_ok_and(|results| uid.is_some_and(|uid| matches!(results.get(uid), Some(Ok(())))))
        };
        failed.extend(batch.iter().filter(|key| !is_unprepared(key)));
        let answer = answer.and_then(|results| {
            let by_uid = keys_by_uid(claims, batch)?;
            first_error(DriverMethod::Unprepare, &by_uid, results)
        });
        result = result.and(answer);
    }
    let mut is_checkpoint_due = false;
    for key in plan.claims.iter().filter(|key| !failed.contains(key)) {
        let Some(state) = claims.get_mut(key) else { continue };
        is_checkpoint_due |= state.pods.remove(pod);
        if state.pods.is_empty() {
            claims.remove(key);
        }
    }
    UnprepareOutcome { is_checkpoint_due, result }
}

/// Qualified CDI device names of a container, each once: by claim in the order of the pod spec, then by request; last
/// those of its extended resources.
///
/// # Errors
/// A claim of the container has no name yet or is not in the cache.
pub fn cdi_devices(pod: &Pod, container: &api::Container, claims: &Claims) -> Result<Vec<String>, ClaimError> {
    let mut names: Vec<String> = Vec::new();
    for (claim, request) in container_requests(pod, container)? {
        let key = ClaimKey { namespace: pod.namespace().to_owned(), name: claim.to_owned() };
        let Some(state) = claims.get(&key) else {
            return Err(ClaimError::NotCached { claim: key });
        };
        for name in request_devices(state, request).flat_map(|device| &device.cdi_ids) {
            if !names.contains(name) {
                names.push(name.clone());
            }
        }
    }
    Ok(names)
}

/// Devices that satisfy a request of a claim; all devices for the empty request.
pub fn request_devices<'a>(state: &'a ClaimState, request: &'a str) -> impl Iterator<Item = &'a PreparedDevice> {
    state.drivers.values().flatten().filter(move |device| {
        request.is_empty() || device.requests.is_empty() || device.requests.iter().any(|own| own == request)
    })
}

/// Names of the claim objects that a container uses, each with a request; the empty request stands for all devices.
fn container_requests<'a>(pod: &'a Pod, container: &'a api::Container) -> Result<Vec<(&'a str, &'a str)>, ClaimError> {
    let resources = container.resources.as_ref();
    let used: &[api::ResourceClaim] = resources.and_then(|resources| resources.claims.as_deref()).unwrap_or_default();
    let mut requests: Vec<(&str, &str)> = Vec::new();
    for entry in pod.spec().resource_claims.iter().flatten() {
        // The name of a claim that the container does not use may be missing.
        if !used.iter().any(|claim| claim.name == entry.name) {
            continue;
        }
        let Some(name) = object_name(pod, entry)? else { continue };
        let own = used.iter().filter(|claim| claim.name == entry.name);
        requests.extend(own.map(|claim| (name, claim.request.as_deref().unwrap_or_default())));
    }
    let Some(status) = extended_resource_claim(pod) else { return Ok(requests) };
    let quantities = resources.and_then(|resources| resources.requests.as_ref());
    let is_requested = |resource: &str| {
        let amount = quantities.and_then(|list| list.get(resource)).map(Amount::try_from);
        let is_device = is_extended(resource) || resource.starts_with(DEVICE_CLASS_PREFIX);
        is_device && amount.is_some_and(|amount| amount.is_ok_and(|amount| amount.value() > 0))
    };
    for mapping in status.request_mappings.iter().filter(|mapping| mapping.container_name == container.name) {
        if is_requested(&mapping.resource_name) {
            requests.push((status.resource_claim_name.as_str(), mapping.request_name.as_str()));
        }
    }
    Ok(requests)
}

/// A claim that a container uses, with all of its devices.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct ContainerClaim {
    /// Namespace and name of the object.
    pub key: ClaimKey,
    /// Devices, each with its driver.
    pub devices: Vec<(String, PreparedDevice)>,
}

/// Claims that a container uses, each once, for the PodResources API.
///
/// # Errors
/// A claim of the container has no name yet or is not in the cache.
pub fn container_claims(
    pod: &Pod,
    container: &api::Container,
    claims: &Claims,
) -> Result<Vec<ContainerClaim>, ClaimError> {
    let mut found: Vec<ContainerClaim> = Vec::new();
    for (claim, _) in container_requests(pod, container)? {
        let key = ClaimKey { namespace: pod.namespace().to_owned(), name: claim.to_owned() };
        if found.iter().any(|known| known.key == key) {
            continue;
        }
        let Some(state) = claims.get(&key) else {
            return Err(ClaimError::NotCached { claim: key });
        };
        let devices = state
            .drivers
            .iter()
            .flat_map(|(driver, devices)| devices.iter().map(move |device| (driver.clone(), device.clone())));
        found.push(ContainerClaim { devices: devices.collect(), key });
    }
    Ok(found)
}

/// Claims of a container by their names in the pod: name, request (empty for all), and the object's key.
pub fn named_requests(pod: &Pod, container: &api::Container) -> Vec<(String, String, ClaimKey)> {
    let used = container.resources.as_ref().and_then(|resources| resources.claims.as_deref()).unwrap_or_default();
    let key = |claim: &api::ResourceClaim| {
        let mut entries = pod.spec().resource_claims.iter().flatten();
        let name = object_name(pod, entries.find(|entry| entry.name == claim.name)?).ok()??;
        Some(ClaimKey { namespace: pod.namespace().to_owned(), name: name.to_owned() })
    };
    let named =
        |claim: &api::ResourceClaim| Some((claim.name.clone(), claim.request.clone().unwrap_or_default(), key(claim)?));
    used.iter().filter_map(named).collect()
}

/// Pods that use at least one claim. They count as pods that may have running containers.
pub fn pods_in_use(claims: &Claims) -> BTreeSet<PodUid> {
    claims.values().flat_map(|state| &state.pods).cloned().collect()
}

/// Whether a pod uses a claim.
pub fn uses(claims: &Claims, pod: &PodUid) -> bool {
    claims.values().any(|state| state.pods.contains(pod))
}

#[cfg(test)]
mod tests {
    use serde_json::{Value, json};

    use super::*;

    fn pod(claims: Value, containers: Value, status: Value) -> Pod {
        let spec = json!({"resourceClaims": claims, "containers": containers});
        let object = json!({"metadata": {"name": "p", "namespace": "n", "uid": "u"}, "spec": spec, "status": status});
        Pod::new(serde_json::from_value(object).expect("a pod")).expect("complete")
    }

    fn key(name: &str) -> ClaimKey {
        ClaimKey { namespace: "n".into(), name: name.into() }
    }

    /// A claim `<name>` with the UID `<name>-uid` and devices of these drivers.
    fn checked(name: &str, drivers: &[&str]) -> CheckedClaim {
        let drivers = drivers.iter().map(|driver| (*driver).to_owned()).collect();
        CheckedClaim { key: key(name), uid: format!("{name}-uid"), drivers }
    }

    fn device(name: &str, requests: &[&str], cdi_ids: &[&str]) -> PreparedDevice {
        let owned = |texts: &[&str]| texts.iter().map(|text| (*text).to_owned()).collect();
        PreparedDevice {
            pool: "pool".into(),
            device: name.into(),
            share_id: None,
            requests: owned(requests),
            cdi_ids: owned(cdi_ids),
        }
    }

    fn text<T>(result: Result<T, ClaimError>) -> String {
        result.err().map(|error| error.to_string()).unwrap_or_default()
    }

    fn reference(claims: &mut Claims, pod: &str, checked: &[CheckedClaim]) -> Vec<ClaimKey> {
        add_reference(claims, &pod.into(), checked).expect("no former claim")
    }

    #[test]
    fn names_come_from_the_spec_and_the_status() {
        let claims = json!([
            {"name": "a", "resourceClaimName": "direct"},
            {"name": "b", "resourceClaimTemplateName": "t"},
            {"name": "c", "resourceClaimTemplateName": "t"},
        ]);
        let status = json!({
            "resourceClaimStatuses": [{"name": "c"}, {"name": "b", "resourceClaimName": "p-b-x"}],
            "extendedResourceClaimStatus": {"resourceClaimName": "extended", "requestMappings": []},
        });
        let names = claim_names(&pod(claims, json!([]), status)).expect("names");
        let names: Vec<_> = names.iter().map(|n| (n.pod_claim.as_str(), n.claim.as_deref(), n.from_template)).collect();
        let expected = [
            ("a", Some("direct"), false),
            ("b", Some("p-b-x"), true),
            ("c", None, true),
            ("", Some("extended"), false),
        ];
        assert_eq!(names, expected);
        assert_eq!(claim_names(&pod(json!([]), json!([]), json!({}))), Ok(vec![]));
        for (entry, error) in [
            (json!({"name": "b", "resourceClaimTemplateName": "t"}), r#"pod "n/p": ResourceClaim not created yet"#),
            (json!({"name": "b"}), r#"pod "n/p", spec.resourceClaim "b": none of the supported fields are set"#),
        ] {
            assert_eq!(text(claim_names(&pod(json!([entry]), json!([]), json!({})))), error);
        }
    }

    #[test]
    fn a_claim_is_owned_reserved_allocated_and_its_drivers_are_registered() {
        let pod = pod(json!([]), json!([]), json!({}));
        let reference = json!({"apiVersion": "v1", "kind": "Pod", "name": "p", "controller": true});
        let owner = |uid: &str| {
            let mut owner = reference.clone();
            owner["uid"] = json!(uid);
            json!([owner])
        };
        let claim = |owners: Value, consumer: &str, allocation: Value| -> ResourceClaim {
            let consumers = json!([{"resource": "pods", "name": "p", "uid": consumer}]);
            let metadata = json!({"name": "c", "namespace": "n", "uid": "c-uid", "ownerReferences": owners});
            let status = json!({"reservedFor": consumers, "allocation": allocation});
            serde_json::from_value(json!({"metadata": metadata, "spec": {}, "status": status})).expect("a claim")
        };
        let allocation = |drivers: &[&str]| {
            let result = |driver: &&str| json!({"driver": driver, "pool": "x", "device": "d", "request": "r"});
            json!({"devices": {"results": drivers.iter().map(result).collect::<Vec<_>>()}})
        };
        let not_owner = "ResourceClaim n/c was not created for Pod n/p (Pod is not owner)";
        let not_controlled = json!([{"apiVersion": "v1", "kind": "Pod", "name": "p", "uid": "u"}]);
        for (from_template, claim, error) in [
            (true, claim(owner("u"), "u", allocation(&["gpu", "nic", "gpu"])), ""),
            (false, claim(json!([]), "u", allocation(&["gpu", "nic"])), ""),
            (true, claim(json!([]), "u", allocation(&["gpu"])), not_owner),
            (true, claim(owner("other"), "u", allocation(&["gpu"])), not_owner),
            (true, claim(not_controlled, "u", allocation(&["gpu"])), not_owner),
            // AC-06c-19
            (
                false,
                claim(json!([]), "other", allocation(&["gpu"])),
                "pod p (u) is not allowed to use ResourceClaim c (c-uid)",
            ),
            (false, claim(json!([]), "u", json!(null)), "ResourceClaim c: not allocated"),
            (false, claim(json!([]), "u", allocation(&["gpu", "fpga"])), "DRA driver fpga is not registered"),
        ] {
            let pod_claim = PodClaim { pod_claim: "a".into(), claim: Some("c".into()), from_template };
            let result = check(&pod, &pod_claim, &claim, &|driver| matches!(driver, "gpu" | "nic"));
            if error.is_empty() {
                assert_eq!(result, Ok(checked("c", &["gpu", "nic"])));
            } else {
                assert_eq!(text(result), error);
            }
        }
        let mut elsewhere = claim(owner("u"), "u", allocation(&[]));
        elsewhere.metadata.namespace = Some("m".into());
        let pod_claim = PodClaim { pod_claim: "a".into(), claim: Some("c".into()), from_template: true };
        let error = "ResourceClaim m/c was not created for Pod n/p (Pod is not owner)";
        assert_eq!(text(check(&pod, &pod_claim, &elsewhere, &|_| true)), error);
    }

    #[test]
    fn a_claim_with_another_uid_changes_nothing() {
        let mut claims = Claims::new();
        reference(&mut claims, "u", &[checked("a", &["gpu"])]);
        let before = claims.clone();
        let mut recreated = checked("a", &["gpu"]);
        recreated.uid = "new".into();
        let error = "old ResourceClaim with same name a and different UID a-uid still exists (previous pod \
                     force-deleted?!)";
        assert_eq!(text(add_reference(&mut claims, &"v".into(), &[checked("b", &["gpu"]), recreated.clone()])), error);
        assert_eq!(claims, before);
        assert_eq!(text(add_reference(&mut Claims::new(), &"v".into(), &[checked("a", &["gpu"]), recreated])), error);
    }

    /// AC-06c-20
    #[test]
    fn two_pods_that_share_a_claim_prepare_and_unprepare_it_once() {
        let mut claims = Claims::new();
        let shared = [checked("c", &["gpu", "nic"]), checked("c", &["gpu", "nic"])];
        let keys = reference(&mut claims, "u", &shared);
        assert_eq!(keys, [key("c")], "a claim that the pod names twice is prepared once");
        let both = BTreeMap::from([("gpu".to_owned(), vec![key("c")]), ("nic".to_owned(), vec![key("c")])]);
        assert_eq!(batches(&claims, &keys), both);
        mark_prepared(&mut claims, &keys).expect("in the cache");
        assert!(reference(&mut claims, "v", &shared).is_empty());
        assert_eq!(pods_in_use(&claims), BTreeSet::from([PodUid::from("u"), PodUid::from("v")]));

        // A pod that never got a reference unprepares nothing.
        assert_eq!(unprepare_plan(&mut claims, &"other".into()), UnpreparePlan::default());
        let first = unprepare_plan(&mut claims, &"u".into());
        assert_eq!(first, UnpreparePlan { has_dropped_reference: true, ..UnpreparePlan::default() });
        assert!(!uses(&claims, &"u".into()) && uses(&claims, &"v".into()));
        assert_eq!(unprepare_plan(&mut claims, &"u".into()), UnpreparePlan::default());

        let second = unprepare_plan(&mut claims, &"v".into());
        assert_eq!((&second.batches, second.has_dropped_reference), (&both, false));
        let success = || Ok(UnpreparedResults::from([("c-uid".to_owned(), Ok(()))]));
        let results = BTreeMap::from([("gpu".to_owned(), success()), ("nic".to_owned(), success())]);
        let outcome = merge_unprepared(&mut claims, &"v".into(), &second, &results);
        assert_eq!(outcome, UnprepareOutcome { is_checkpoint_due: true, result: Ok(()) });
        assert!(claims.is_empty());
    }

    /// AC-06c-21
    #[test]
    fn answers_to_prepare() {
        let keys = [key("a"), key("b")];
        let success = || Ok(vec![device("d", &[], &[])]);
        let failure = || Err("no memory".to_owned());
        for (answer, error) in [
            (vec![("a-uid", success()), ("b-uid", success())], ""),
            (vec![("a-uid", success())], "NodePrepareResources skipped 1 ResourceClaims"),
            (vec![], "NodePrepareResources skipped 2 ResourceClaims"),
            (
                vec![("a-uid", success()), ("b-uid", failure())],
                "NodePrepareResources failed for ResourceClaim b: no memory",
            ),
            (
                vec![("a-uid", success()), ("x", success())],
                "NodePrepareResources returned result for unknown claim UID x",
            ),
        ] {
            let mut claims = Claims::new();
            reference(&mut claims, "u", &[checked("a", &["gpu"]), checked("b", &["gpu"])]);
            let has_first = answer.iter().any(|(uid, _)| *uid == "a-uid");
            let answer = answer.into_iter().map(|(uid, result)| (uid.to_owned(), result)).collect();
            assert_eq!(text(merge_prepared(&mut claims, "gpu", &keys, answer)), error);
            assert_eq!(claims[&key("a")].drivers["gpu"].len(), usize::from(has_first), "{error}");
            assert!(!claims[&key("a")].is_prepared);
        }
        let error = "internal error: unable to get claim info for ResourceClaim a in namespace n";
        assert_eq!(text(merge_prepared(&mut Claims::new(), "gpu", &keys, PreparedResults::new())), error);
        assert_eq!(text(mark_prepared(&mut Claims::new(), &keys)), error);
        let failed = ClaimError::Rpc { method: DriverMethod::Prepare, text: "deadline exceeded".into() };
        assert_eq!(failed.to_string(), "NodePrepareResources: deadline exceeded");
    }

    /// AC-06c-22
    #[test]
    fn a_repeated_prepare_replaces_the_devices_of_its_driver() {
        let mut claims = Claims::new();
        let checked = [checked("c", &["gpu", "nic"])];
        for round in ["first", "second"] {
            assert_eq!(reference(&mut claims, "u", &checked), [key("c")], "{round}");
            for driver in ["gpu", "nic"] {
                let answer = PreparedResults::from([("c-uid".to_owned(), Ok(vec![device(round, &[], &[])]))]);
                merge_prepared(&mut claims, driver, &[key("c")], answer).expect("success");
            }
            mark_prepared(&mut claims, &[key("c")]).expect("in the cache");
            assert!(reference(&mut claims, "u", &checked).is_empty());
            for devices in claims[&key("c")].drivers.values() {
                assert_eq!(devices, &[device(round, &[], &[])]);
            }
            // The agent restarts: the checkpoint does not contain this member.
            claims.get_mut(&key("c")).expect("a claim").is_prepared = false;
        }
    }

    #[test]
    fn claims_stay_until_all_their_drivers_have_unprepared_them() {
        let claims_of = |gpu: &[&str], nic: &[&str]| {
            let mut claims = Claims::new();
            let of_gpu = gpu.iter().map(|name| checked(name, &["gpu"]));
            let of_nic = nic.iter().map(|name| checked(name, &["nic"]));
            reference(&mut claims, "u", &of_gpu.chain(of_nic).collect::<Vec<_>>());
            claims
        };
        let answer = |results: &[(&str, Result<(), &str>)]| -> Result<UnpreparedResults, ClaimError> {
            Ok(results.iter().map(|(uid, result)| ((*uid).to_owned(), result.map_err(str::to_owned))).collect())
        };
        let rpc = || Err(ClaimError::Rpc { method: DriverMethod::Unprepare, text: "deadline exceeded".into() });
        let both = [("a-uid", Ok(())), ("b-uid", Ok(()))];
        // Claim a has devices of both drivers, claim b of gpu, and claim c none.
        for (gpu, nic, remaining, error) in [
            (Some(answer(&both)), Some(answer(&both[..1])), "", ""),
            (Some(answer(&both)), None, "a", "DRA driver nic is not registered"),
            (Some(answer(&both)), Some(rpc()), "a", "NodeUnprepareResources: deadline exceeded"),
            (Some(rpc()), None, "ab", "NodeUnprepareResources: deadline exceeded"),
            (
                Some(answer(&both[1..])),
                Some(answer(&both[..1])),
                "a",
                "NodeUnprepareResources skipped 1 ResourceClaims",
            ),
            (
                Some(answer(&[("a-uid", Ok(())), ("b-uid", Err("busy"))])),
                Some(answer(&both[..1])),
                "b",
                "NodeUnprepareResources failed for ResourceClaim b: busy",
            ),
            (
                Some(answer(&both)),
                Some(answer(&[("x", Ok(()))])),
                "a",
                "NodeUnprepareResources returned result for unknown claim UID x",
            ),
        ] {
            let mut claims = claims_of(&["a", "b"], &["a"]);
            reference(&mut claims, "u", &[checked("c", &[])]);
            let plan = unprepare_plan(&mut claims, &"u".into());
            let answers = [("gpu", gpu), ("nic", nic)].into_iter();
            let results: BTreeMap<String, Result<UnpreparedResults, ClaimError>> =
                answers.filter_map(|(driver, answer)| Some((driver.to_owned(), answer?))).collect();
            let outcome = merge_unprepared(&mut claims, &"u".into(), &plan, &results);
            assert_eq!(text(outcome.result), error);
            assert!(outcome.is_checkpoint_due, "claim c needs no driver: {error}");
            assert_eq!(claims.keys().map(|key| key.name.as_str()).collect::<String>(), remaining, "{error}");
        }
    }

    #[test]
    fn a_claim_that_another_pod_uses_meanwhile_is_prepared_again() {
        let mut claims = Claims::new();
        let keys = reference(&mut claims, "u", &[checked("c", &["gpu"])]);
        mark_prepared(&mut claims, &keys).expect("in the cache");
        let plan = unprepare_plan(&mut claims, &"u".into());
        assert_eq!(reference(&mut claims, "v", &[checked("c", &["gpu"])]), [key("c")]);
        let results = BTreeMap::from([("gpu".to_owned(), Ok(UnpreparedResults::from([("c-uid".to_owned(), Ok(()))])))]);
        let outcome = merge_unprepared(&mut claims, &"u".into(), &plan, &results);
        assert_eq!(outcome, UnprepareOutcome { is_checkpoint_due: true, result: Ok(()) });
        assert_eq!(pods_in_use(&claims), BTreeSet::from([PodUid::from("v")]));
    }

    /// AC-06c-24
    #[test]
    fn a_container_gets_the_cdi_devices_of_its_requests() {
        let entries = json!([
            {"name": "first", "resourceClaimName": "c"},
            {"name": "none", "resourceClaimTemplateName": "t"},
            {"name": "pending", "resourceClaimTemplateName": "t"},
            {"name": "second", "resourceClaimName": "missing"},
        ]);
        let mapping = |container: &str, resource: &str, request: &str| json!({"containerName": container, "resourceName": resource, "requestName": request});
        let status = json!({"resourceClaimStatuses": [{"name": "none"}], "extendedResourceClaimStatus": {
            "resourceClaimName": "extended",
            "requestMappings": [
                mapping("c", "example.com/gpu", "r1"),
                mapping("c", "deviceclass.resource.kubernetes.io/nic", "r2"),
                mapping("c", "example.com/zero", "r3"),
                mapping("other", "example.com/gpu", "r3"),
            ],
        }});
        let mut claims = Claims::new();
        reference(&mut claims, "u", &[checked("c", &["gpu", "nic"]), checked("extended", &["gpu"])]);
        let mut prepare = |driver: &str, claim: &str, devices: Vec<PreparedDevice>| {
            let answer = PreparedResults::from([(format!("{claim}-uid"), Ok(devices))]);
            merge_prepared(&mut claims, driver, &[key(claim)], answer).expect("success");
        };
        let of_gpu = [device("d0", &["gpu"], &["v/gpu=0", "v/gpu=all"]), device("d1", &["gpu"], &["v/gpu=1"])];
        prepare("gpu", "c", of_gpu.to_vec());
        prepare("nic", "c", vec![device("d0", &["nic"], &["v/nic=0"]), device("d1", &[], &["v/common=0"])]);
        let extended = ["r1", "r2", "r3"].map(|request| device(request, &[request], &[&*format!("v/{request}=0")]));
        prepare("gpu", "extended", extended.to_vec());

        let missing = "internal error: unable to get claim info for ResourceClaim missing in namespace n";
        let not_created = r#"pod "n/p": ResourceClaim not created yet"#;
        let gpu = ["v/gpu=0", "v/gpu=all", "v/gpu=1", "v/common=0"];
        let all = ["v/gpu=0", "v/gpu=all", "v/gpu=1", "v/nic=0", "v/common=0"];
        let nic_first = ["v/nic=0", "v/common=0", "v/gpu=0", "v/gpu=all", "v/gpu=1"];
        let nothing = json!({});
        let quantities = json!({
            "example.com/gpu": "1", "deviceclass.resource.kubernetes.io/nic": "2", "example.com/zero": "0", "cpu": "1",
        });
        for (used, requests, expected) in [
            (json!([]), &nothing, Ok(vec![])),
            (json!([{"name": "first", "request": "gpu"}]), &nothing, Ok(gpu.to_vec())),
            (json!([{"name": "first"}]), &nothing, Ok(all.to_vec())),
            (json!([{"name": "first", "request": "nic"}, {"name": "first"}]), &nothing, Ok(nic_first.to_vec())),
            (json!([{"name": "none"}]), &nothing, Ok(vec![])),
            (json!([{"name": "pending"}]), &nothing, Err(not_created)),
            (json!([{"name": "second"}]), &nothing, Err(missing)),
            (json!([]), &quantities, Ok(vec!["v/r1=0", "v/r2=0"])),
        ] {
            let container = json!({"name": "c", "resources": {"claims": used, "requests": requests}});
            let pod = pod(entries.clone(), json!([container]), status.clone());
            let result = cdi_devices(&pod, &pod.containers()[0], &claims);
            match expected {
                Ok(names) => assert_eq!(result.expect("devices"), names, "{used}"),
                Err(error) => assert_eq!(text(result), error),
            }
        }
    }
}
