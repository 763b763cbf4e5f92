//! Pod strategy and validation: create, update, status, resize, and ephemeral containers. Pure.
//!
//! Implements spec 10a §4, spec 10 §6.4.

use serde_json::{Value, json};

use super::{
    super::refusal::{Cause, Refusal},
    fields::{fill, list, list_mut, number, set, take_over, text},
    pod_defaults::{self, MIRROR, is_mirror},
    qos,
};

const CONTAINER_LISTS: &[&str] = &["containers", "initContainers", "ephemeralContainers"];

/// Prepares a new pod: defaults, generation 1, and the initial status.
///
/// # Errors
/// 422: a required field is missing.
pub fn create(pod: &mut Value) -> Result<(), Refusal> {
    let mut causes = Vec::new();
    if list(pod, "/spec/containers").is_empty() {
        causes.push(Cause::required("spec.containers", ""));
    }
    for (index, container) in list(pod, "/spec/containers").iter().enumerate() {
        for field in ["name", "image"] {
            if text(container, &format!("/{field}")).is_empty() {
                causes.push(Cause::required(&format!("spec.containers[{index}].{field}"), ""));
            }
        }
    }
    refuse(pod, causes)?;
    pod_defaults::apply(pod);
    set(&mut pod["metadata"], "generation", 1);
    let class = qos::class(&pod["spec"]);
    set(pod, "status", json!({"phase": "Pending", "qosClass": class}));
    Ok(())
}

/// Validates an update of the pod itself: its spec is immutable except for a few fields.
///
/// # Errors
/// 422.
pub fn update(old: &Value, pod: &mut Value) -> Result<(), Refusal> {
    let mut causes = Vec::new();
    if old.pointer("/metadata/annotations").and_then(|a| a.get(MIRROR))
        != pod.pointer("/metadata/annotations").and_then(|a| a.get(MIRROR))
    {
        let field = format!("metadata.annotations[{MIRROR}]");
        causes.push(Cause::forbidden(&field, "may not remove or update mirror pod annotation"));
    }
    let mut comparable = pod["spec"].clone();
    for lists in ["containers", "initContainers"] {
        let olds = list(&old["spec"], &format!("/{lists}"));
        for (container, old) in list_mut(&mut comparable, lists).iter_mut().zip(olds) {
            take_over(container, "image", old);
        }
    }
    take_over(&mut comparable, "activeDeadlineSeconds", &old["spec"]);
    let (olds, news) = (list(old, "/spec/tolerations"), list(pod, "/spec/tolerations"));
    if olds.iter().all(|toleration| news.contains(toleration)) {
        take_over(&mut comparable, "tolerations", &old["spec"]);
    }
    let (olds, news) = (list(old, "/spec/schedulingGates"), list(pod, "/spec/schedulingGates"));
    if news.iter().all(|gate| olds.contains(gate)) {
        take_over(&mut comparable, "schedulingGates", &old["spec"]);
    }
    if comparable != old["spec"] {
        let detail = "pod updates may not change fields other than `spec.containers[*].image`,\
            `spec.initContainers[*].image`,`spec.activeDeadlineSeconds`,`spec.tolerations` (only additions to existing \
            tolerations),`spec.terminationGracePeriodSeconds` (allow it to be set to 1 if it was previously negative)";
        causes.push(Cause::forbidden("spec", detail));
    }
    refuse(pod, causes)?;
    count_generation(old, pod);
    Ok(())
}

/// Validates an in-place resize of requests and limits.
///
/// # Errors
/// 422: the pod is a mirror pod, or other fields change.
pub fn resize(old: &Value, pod: &mut Value) -> Result<(), Refusal> {
    let mut causes = Vec::new();
    if is_mirror(old) {
        causes.push(Cause::forbidden("", "static pods cannot be resized"));
    }
    let mut comparable = pod["spec"].clone();
    take_over(&mut comparable, "resources", &old["spec"]);
    for lists in ["containers", "initContainers"] {
        let olds = list(&old["spec"], &format!("/{lists}"));
        for (container, old) in list_mut(&mut comparable, lists).iter_mut().zip(olds) {
            take_over(container, "resources", old);
            take_over(container, "resizePolicy", old);
        }
    }
    if comparable != old["spec"] {
        causes.push(Cause::forbidden("spec", "only cpu and memory resources are mutable"));
    } else if qos::class(&old["spec"]) != qos::class(&pod["spec"]) {
        let class = json!(qos::class(&pod["spec"]));
        causes.push(Cause::invalid("metadata", &class, "Pod QOS Class may not change as a result of resizing"));
    }
    refuse(pod, causes)?;
    count_generation(old, pod);
    Ok(())
}

/// Validates added ephemeral containers; existing ones are immutable.
///
/// # Errors
/// 422.
pub fn debug(old: &Value, pod: &mut Value) -> Result<(), Refusal> {
    let mut causes = Vec::new();
    let mut comparable = pod["spec"].clone();
    take_over(&mut comparable, "ephemeralContainers", &old["spec"]);
    pod_defaults::apply(pod);
    let news = list(pod, "/spec/ephemeralContainers");
    if comparable != old["spec"] || !list(old, "/spec/ephemeralContainers").iter().all(|old| news.contains(old)) {
        let detail = "existing ephemeral containers may not be changed";
        causes.push(Cause::forbidden("spec.ephemeralContainers", detail));
    }
    if is_mirror(old) {
        causes.push(Cause::forbidden("", "static pods do not support ephemeral containers"));
    }
    refuse(pod, causes)?;
    count_generation(old, pod);
    Ok(())
}

fn count_generation(old: &Value, pod: &mut Value) {
    let generation = number(old, "/metadata/generation").unwrap_or_default();
    let changed = i64::from(old["spec"] != pod["spec"]);
    set(&mut pod["metadata"], "generation", generation + changed);
}

/// Prints unset condition times as null, as upstream does.
pub fn print_times(pod: &mut Value) {
    let Some(status) = pod.get_mut("status") else { return };
    for condition in list_mut(status, "conditions") {
        fill(condition, "lastProbeTime", Value::Null);
        fill(condition, "lastTransitionTime", Value::Null);
    }
}

/// Prepares and validates a new status. Owner references and generation are the old ones; fields that an older writer
/// may not know are kept if cleared.
///
/// # Errors
/// 422: see spec 10 §6.4.
pub fn status(old: &Value, pod: &mut Value) -> Result<(), Refusal> {
    let owners = &old["metadata"];
    take_over(&mut pod["metadata"], "ownerReferences", owners);
    take_over(&mut pod["metadata"], "generation", owners);
    let (olds, status) = (&old["status"], &mut pod["status"]);
    if text(status, "/qosClass").is_empty() {
        take_over(status, "qosClass", olds);
    }
    if number(status, "/observedGeneration").unwrap_or_default() == 0 {
        take_over(status, "observedGeneration", olds);
    }
    one_ip(status, "podIP", "podIPs");
    let causes = wrong_status(old, pod);
    refuse(pod, causes)
}

/// Syncs the single address and the list; the single one takes precedence.
fn one_ip(status: &mut Value, single: &str, several: &str) {
    let (ip, first) = (text(status, &format!("/{single}")), text(status, &format!("/{several}/0/ip")));
    if ip.is_empty() && !first.is_empty() {
        let first = first.to_owned();
        set(status, single, first);
    } else if !ip.is_empty() && ip != first {
        let only = json!([{"ip": ip}]);
        set(status, several, only);
    }
}

fn wrong_status(old: &Value, pod: &Value) -> Vec<Cause> {
    let (olds, status) = (&old["status"], &pod["status"]);
    let mut causes = Vec::new();
    if text(status, "/qosClass") != text(olds, "/qosClass") {
        causes.push(Cause::invalid("status.qosClass", &status["qosClass"], "field is immutable"));
    }
    if let Some(observed) = number(status, "/observedGeneration").filter(|observed| *observed < 0) {
        let detail = "must be greater than or equal to 0";
        causes.push(Cause::invalid("status.observedGeneration", &json!(observed), detail));
    }
    for (index, condition) in list(status, "/conditions").iter().enumerate() {
        if !is_qualified(text(condition, "/type")) {
            let field = format!("status.conditions[{index}].type");
            let detail = "name part must consist of alphanumeric characters, '-', '_' or '.', and must start and end \
                with an alphanumeric character (e.g. 'MyName',  or 'my.name',  or '123-abc', regex used for \
                validation is '([A-Za-z0-9][-A-Za-z0-9_.]*)?[A-Za-z0-9]')";
            causes.push(Cause::invalid(&field, &condition["type"], detail));
        }
    }
    wrong_ips(status, "podIPs", &mut causes);
    wrong_ips(status, "hostIPs", &mut causes);
    let bound = !text(pod, "/spec/nodeName").is_empty();
    if bound
        && !text(status, "/nominatedNodeName").is_empty()
        && olds.get("nominatedNodeName") != status.get("nominatedNodeName")
    {
        causes.push(Cause::forbidden("status.nominatedNodeName", "may not be set on a pod that is bound to a node"));
    }
    wrong_transitions(old, pod, &mut causes);
    unknown_resources(pod, &mut causes);
    causes
}

fn wrong_ips(status: &Value, field: &str, causes: &mut Vec<Cause>) {
    let path = format!("status.{field}");
    let addresses: Vec<&str> = list(status, &format!("/{field}")).iter().map(|entry| text(entry, "/ip")).collect();
    for (index, address) in addresses.iter().enumerate() {
        if address.parse::<std::net::IpAddr>().is_err() {
            let detail = "must be a valid IP address, (e.g. 10.9.8.7 or 2001:db8::ffff)";
            causes.push(Cause::invalid(&format!("{path}[{index}]"), &json!(address), detail));
        }
    }
    let sixes = addresses.iter().filter(|address| address.contains(':')).count();
    if sixes > 1 || addresses.len() - sixes > 1 {
        let printed: Vec<Value> = addresses.iter().map(|address| json!({"IP": address})).collect();
        causes.push(Cause::invalid(&path, &json!(printed), "may specify no more than one IP for each IP family"));
    }
}

/// Refuses a non-terminated state of a terminated container that will not restart.
fn wrong_transitions(old: &Value, pod: &Value, causes: &mut Vec<Cause>) {
    let policy = text(old, "/spec/restartPolicy");
    for (statuses, containers) in [
        ("containerStatuses", "containers"),
        ("initContainerStatuses", "initContainers"),
        ("ephemeralContainerStatuses", ""),
    ] {
        for (index, before) in list(old, &format!("/status/{statuses}")).iter().enumerate() {
            let Some(exit) = number(before, "/state/terminated/exitCode") else { continue };
            let name = text(before, "/name");
            let named = |entry: &&Value| text(entry, "/name") == name;
            let container = list(old, &format!("/spec/{containers}")).iter().find(named);
            let restarts = container.is_some_and(|container| {
                let own = container.get("restartPolicy").and_then(Value::as_str).unwrap_or(policy);
                own == "Always"
                    || policy == "Always"
                    || own == "OnFailure" && exit != 0
                    || container.get("restartPolicyRules").is_some()
            });
            let after = list(pod, &format!("/status/{statuses}")).iter().find(named);
            if !restarts && after.is_some_and(|after| after.pointer("/state/terminated").is_none()) {
                let field = format!("status.{statuses}[{index}].state");
                causes.push(Cause::forbidden(&field, "may not be transitioned to non-terminated state"));
            }
        }
    }
}

fn unknown_resources(pod: &Value, causes: &mut Vec<Cause>) {
    for (index, status) in list(pod, "/status/containerStatuses").iter().enumerate() {
        let containers = CONTAINER_LISTS.iter().flat_map(|lists| list(&pod["spec"], &format!("/{lists}")));
        let container = containers.into_iter().find(|container| container["name"] == status["name"]);
        for (at, resource) in list(status, "/allocatedResourcesStatus").iter().enumerate() {
            let name = text(resource, "/name");
            let asked = |which: &str| container.and_then(|c| c.pointer(which)).and_then(|map| map.get(name)).is_some();
            if !name.starts_with("claim:") && !asked("/resources/requests") && !asked("/resources/limits") {
                let field = format!("status.containerStatuses[{index}].allocatedResourcesStatus[{at}].name");
                let detail = "must match one of the container's resource requirements";
                causes.push(Cause::invalid(&field, &resource["name"], detail));
            }
        }
    }
}

/// Whether the name is a qualified name: `prefix/name` or `name`, as for labels and condition types.
fn is_qualified(name: &str) -> bool {
    let local = match name.split_once('/') {
        Some((prefix, local)) if !prefix.is_empty() => local,
        Some(_) => return false,
        None => name,
    };
    let ends = |c: Option<char>| c.is_some_and(|c| c.is_ascii_alphanumeric());
    ends(local.chars().next())
        && ends(local.chars().last())
        && local.len() <= 63
        && local.chars().all(|c| c.is_ascii_alphanumeric() || "-_.".contains(c))
}

fn refuse(pod: &Value, causes: Vec<Cause>) -> Result<(), Refusal> {
    if causes.is_empty() { Ok(()) } else { Err(Refusal::invalid("Pod", text(pod, "/metadata/name"), causes)) }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn stored() -> Value {
        let mut pod = json!({"metadata": {"name": "p", "ownerReferences": [{"uid": "o"}]},
            "spec": {"nodeName": "n", "restartPolicy": "Never", "containers": [{"name": "c", "image": "i:1"}], "initContainers": [{"name": "i", "image": "i:1"}]}});
        create(&mut pod).expect("a pod");
        pod
    }

    fn with_status(changes: &Value) -> Value {
        let mut pod = stored();
        super::super::merge_patch::json_merge(&pod, &json!({"status": changes})).clone_into(&mut pod);
        pod
    }

    #[test]
    fn a_new_pod_has_a_status_of_the_servers_own() {
        let mut pod = json!({"metadata": {"name": "p"}, "spec": {"containers": [{"name": "c", "image": "i"}]}, "status": {"phase": "Running"}});
        create(&mut pod).expect("a pod");
        assert_eq!(pod["status"], json!({"phase": "Pending", "qosClass": "BestEffort"}));
        assert_eq!(pod["metadata"]["generation"], 1);
        let refusal = create(&mut json!({"metadata": {"name": "p"}, "spec": {}})).expect_err("no containers");
        assert_eq!(
            (refusal.code, refusal.message.as_str()),
            (422, "Pod \"p\" is invalid: spec.containers: Required value")
        );
    }

    #[test]
    fn the_spec_is_fixed_but_for_a_few_fields() {
        let old = stored();
        for (at, value, fine) in [
            ("/spec/containers/0/image", json!("i:2"), true),
            ("/spec/activeDeadlineSeconds", json!(3), true),
            ("/spec/tolerations", json!([{"operator": "Exists"}]), false),
            ("/spec/nodeName", json!("m"), false),
            ("/spec/containers/0/name", json!("d"), false),
        ] {
            let mut pod = old.clone();
            let (parent, key) = at.rsplit_once('/').expect("a path");
            set(pod.pointer_mut(parent).expect("there"), key, value);
            let result = update(&old, &mut pod);
            assert_eq!(result.is_ok(), fine, "{at}");
            if fine {
                assert_eq!(pod["metadata"]["generation"], 2, "{at}");
            }
        }
        let mut same = old.clone();
        update(&old, &mut same).expect("nothing changed");
        assert_eq!(same, old);
    }

    /// AC-10a-5 (owners; the core keeps the spec), and fields that are kept when cleared.
    #[test]
    fn a_status_keeps_what_its_writer_may_not_know() {
        let old = with_status(&json!({"observedGeneration": 3}));
        let mut pod = old.clone();
        pod["metadata"]["ownerReferences"] = json!([]);
        pod["status"] = json!({"phase": "Running", "podIP": "10.0.0.2", "podIPs": [{"ip": "10.0.0.1"}], "conditions": [{"type": "Ready", "status": "True"}]});
        print_times(&mut pod);
        status(&old, &mut pod).expect("fine");
        assert_eq!(pod["metadata"], old["metadata"]);
        let expected = json!({"phase": "Running", "qosClass": "BestEffort", "observedGeneration": 3, "podIP": "10.0.0.2", "podIPs": [{"ip": "10.0.0.2"}],
            "conditions": [{"type": "Ready", "status": "True", "lastProbeTime": null, "lastTransitionTime": null}]});
        assert_eq!(pod["status"], expected);
    }

    /// Spec 10 §6.4; AC-10a-17, AC-10-22.
    #[test]
    fn a_status_that_cannot_be_is_refused() {
        let done = |statuses: &str, name: &str, exit: i32| json!({statuses: [{"name": name, "state": {"terminated": {"exitCode": exit}}}]});
        let again = |statuses: &str, name: &str| json!({statuses: [{"name": name, "state": {"running": {}}}]});
        for (before, after, expected) in [
            (
                json!({}),
                json!({"qosClass": "Burstable"}),
                "status.qosClass: Invalid value: \"Burstable\": field is immutable",
            ),
            (
                json!({}),
                json!({"observedGeneration": -1}),
                "status.observedGeneration: Invalid value: -1: must be greater than or equal to 0",
            ),
            (
                json!({}),
                json!({"podIP": "10.0.0.2", "podIPs": [{"ip": "10.0.0.2"}, {"ip": "10.0.0.1"}]}),
                "status.podIPs: Invalid value: [{\"IP\":\"10.0.0.2\"},{\"IP\":\"10.0.0.1\"}]: may specify no more than one IP for each IP family",
            ),
            (
                json!({}),
                json!({"hostIPs": [{"ip": "x"}]}),
                "status.hostIPs[0]: Invalid value: \"x\": must be a valid IP address, (e.g. 10.9.8.7 or 2001:db8::ffff)",
            ),
            (
                done("containerStatuses", "c", 1),
                again("containerStatuses", "c"),
                "status.containerStatuses[0].state: Forbidden: may not be transitioned to non-terminated state",
            ),
            (
                done("initContainerStatuses", "i", 0),
                again("initContainerStatuses", "i"),
                "status.initContainerStatuses[0].state: Forbidden: may not be transitioned to non-terminated state",
            ),
            (
                done("ephemeralContainerStatuses", "e", 1),
                again("ephemeralContainerStatuses", "e"),
                "status.ephemeralContainerStatuses[0].state: Forbidden: may not be transitioned to non-terminated state",
            ),
            (
                json!({}),
                json!({"containerStatuses": [{"name": "c", "allocatedResourcesStatus": [{"name": "x.y/z"}]}]}),
                "status.containerStatuses[0].allocatedResourcesStatus[0].name: Invalid value: \"x.y/z\": must match one of the container's resource requirements",
            ),
            (
                json!({}),
                json!({"nominatedNodeName": "m"}),
                "status.nominatedNodeName: Forbidden: may not be set on a pod that is bound to a node",
            ),
        ] {
            let refusal = status(&with_status(&before), &mut with_status(&after)).expect_err(expected);
            assert_eq!((refusal.code, refusal.message), (422, format!("Pod \"p\" is invalid: {expected}")));
        }
        let refusal = status(&stored(), &mut with_status(&json!({"conditions": [{"type": "not good"}]})))
            .expect_err("a bad type");
        assert!(
            refusal.message.contains("status.conditions[0].type: Invalid value: \"not good\""),
            "{}",
            refusal.message
        );
    }

    #[test]
    fn a_container_that_restarts_may_run_again() {
        for (policy, exit, fine) in
            [("Always", 0, true), ("OnFailure", 1, true), ("OnFailure", 0, false), ("Never", 1, false)]
        {
            let mut old = with_status(
                &json!({"containerStatuses": [{"name": "c", "state": {"terminated": {"exitCode": exit}}}]}),
            );
            old["spec"]["restartPolicy"] = json!(policy);
            let mut pod = old.clone();
            pod["status"]["containerStatuses"][0]["state"] = json!({"waiting": {}});
            assert_eq!(status(&old, &mut pod).is_ok(), fine, "{policy} {exit}");
        }
    }

    /// Spec 10a §4 row resize; AC-10a-35 needs its generation.
    #[test]
    fn a_resize_changes_resources_only() {
        let mut old = stored();
        old["spec"]["containers"][0]["resources"] = json!({"requests": {"cpu": "1"}});
        let mut pod = old.clone();
        pod["spec"]["containers"][0]["resources"]["requests"]["cpu"] = json!("2");
        resize(&old, &mut pod).expect("fine");
        assert_eq!(pod["metadata"]["generation"], 2);
        let refused = |old: &Value, change: &dyn Fn(&mut Value)| {
            let mut pod = old.clone();
            change(&mut pod);
            resize(old, &mut pod).expect_err("not fine").message
        };
        let text = refused(&old, &|pod| pod["spec"]["containers"][0]["image"] = json!("i:2"));
        assert_eq!(text, "Pod \"p\" is invalid: spec: Forbidden: only cpu and memory resources are mutable");
        let text = refused(&old, &|pod| pod["spec"]["containers"][0]["resources"] = json!({}));
        assert!(text.contains("Pod QOS Class may not change"), "{text}");
        old["metadata"]["annotations"] = json!({MIRROR: "hash"});
        let text = refused(&old, &|pod| pod["spec"]["containers"][0]["resources"]["requests"]["cpu"] = json!("2"));
        assert!(text.contains("static pods cannot be resized"), "{text}");
    }

    #[test]
    fn containers_for_debugging_are_only_added() {
        let old = stored();
        let mut pod = old.clone();
        pod["spec"]["ephemeralContainers"] = json!([{"name": "d", "image": "i"}]);
        debug(&old, &mut pod).expect("fine");
        assert_eq!(pod["metadata"]["generation"], 2);
        assert_eq!(pod["spec"]["ephemeralContainers"][0]["imagePullPolicy"], "Always");
        assert!(debug(&pod, &mut old.clone()).is_err());
    }
}
