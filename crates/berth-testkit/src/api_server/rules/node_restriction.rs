//! Admission plugin NodeRestriction: writes that a node may make. Pure.
//!
//! Implements spec 10 §6.2, all rows.

use std::collections::BTreeSet;

use serde_json::{Value, json};

use super::{
    super::{
        refusal::Refusal,
        view::{Request, View},
    },
    authorizer::{AccessAttributes, decide},
    csr,
    fields::{fields, is_true, list, remove, text},
    graph,
    pod_defaults::is_mirror,
};

/// Labels in Kubernetes domains that a node may set on itself. Implements spec 01 §12.3.
const OWN_LABELS: &[&str] = &[
    "beta.kubernetes.io/arch",
    "beta.kubernetes.io/instance-type",
    "beta.kubernetes.io/os",
    "failure-domain.beta.kubernetes.io/region",
    "failure-domain.beta.kubernetes.io/zone",
    "kubernetes.io/arch",
    "kubernetes.io/hostname",
    "kubernetes.io/os",
    "node.kubernetes.io/instance-type",
    "topology.kubernetes.io/region",
    "topology.kubernetes.io/zone",
];

type Verdict = Result<(), Refusal>;

fn refuse(request: &Request, why: &str) -> Verdict {
    Err(Refusal::forbidden(&request.resource, &request.name, why))
}

/// Admits a create.
///
/// # Errors
/// 403; 404 for a mirror pod whose node is unknown.
pub fn create(view: &dyn View, request: &Request, object: &Value) -> Verdict {
    let Some(node) = request.caller.node() else { return Ok(()) };
    match request.resource.as_str() {
        "pods" => create_pod(view, request, node, object),
        "nodes" => create_node(request, node, object),
        "leases.coordination.k8s.io" if request.namespace != "kube-node-lease" => {
            refuse(request, "can only access leases in the \"kube-node-lease\" system namespace")
        }
        "leases.coordination.k8s.io" if request.name != node => {
            refuse(request, "can only access node lease with the same name as the requesting node")
        }
        "csinodes.storage.k8s.io" if request.name != node => {
            refuse(request, "can only access CSINode with the same name as the requesting node")
        }
        "resourceslices.resource.k8s.io" if text(object, "/spec/nodeName") != node => {
            refuse(request, "can only create ResourceSlice with the same NodeName as the requesting node")
        }
        "certificatesigningrequests.certificates.k8s.io" => {
            let of_kubelets = [csr::CLIENT_SIGNER, csr::SERVING_SIGNER].contains(&text(object, "/spec/signerName"));
            let name = format!("system:node:{node}");
            if of_kubelets && csr::common_name(object).is_some_and(|asked| asked != name) {
                return refuse(request, &format!("can only create a node CSR with CN={name}"));
            }
            Ok(())
        }
        _ => Ok(()),
    }
}

fn create_pod(view: &dyn View, request: &Request, node: &str, pod: &Value) -> Verdict {
    let only = |what: &str| refuse(request, &format!("node \"{node}\" can only create pods with {what}"));
    if !is_mirror(pod) {
        let mirror = super::pod_defaults::MIRROR;
        let why = format!("pod does not have \"{mirror}\" annotation, node \"{node}\" can only create mirror pods");
        return refuse(request, &why);
    }
    if text(pod, "/spec/nodeName") != node {
        return only("spec.nodeName set to itself");
    }
    let owner = match list(pod, "/metadata/ownerReferences") {
        [] => return only("an owner reference set to itself"),
        [owner] => owner,
        _ => return only("a single owner reference set to itself"),
    };
    if text(owner, "/apiVersion") != "v1" || text(owner, "/kind") != "Node" || text(owner, "/name") != node {
        return only("an owner reference set to itself");
    }
    if !is_true(owner, "/controller") {
        return only("a controller owner reference set to itself");
    }
    if is_true(owner, "/blockOwnerDeletion") {
        return refuse(request, &format!("node \"{node}\" must not set blockOwnerDeletion on an owner reference"));
    }
    let stored = view.get("nodes", "", node).ok_or_else(|| Refusal::not_found("nodes", node))?;
    let (expected, got) = (text(owner, "/uid"), text(&stored, "/metadata/uid"));
    if expected != got {
        return refuse(request, &format!("node {node} UID mismatch: expected {expected} got {got}"));
    }
    match graph::foreign_reference(pod) {
        Some(what) => refuse(request, &format!("node \"{node}\" can not create pods that reference {what}")),
        None => Ok(()),
    }
}

fn create_node(request: &Request, node: &str, object: &Value) -> Verdict {
    if request.name != node {
        return refuse(request, &format!("node \"{node}\" is not allowed to modify node \"{}\"", request.name));
    }
    if object.pointer("/spec/configSource").is_some() {
        let why = format!("node \"{node}\" is not allowed to create pods with a non-nil configSource");
        return refuse(request, &why);
    }
    let forbidden = forbidden_labels(&json!({}), object);
    if forbidden.is_empty() {
        return Ok(());
    }
    refuse(request, &format!("node \"{node}\" is not allowed to set the following labels: {forbidden}"))
}

/// Admits an update; `new` is the object as the request would have it, before immutable fields are restored.
///
/// # Errors
/// 403.
pub fn update(request: &Request, old: &Value, new: &Value) -> Verdict {
    let Some(node) = request.caller.node() else { return Ok(()) };
    match (request.resource.as_str(), request.subresource.as_str()) {
        ("pods", "status") => update_pod_status(request, node, old, new),
        ("pods", "") => {
            let why =
                format!("unexpected operation \"UPDATE\", node \"{node}\" can only create and delete mirror pods");
            refuse(request, &why)
        }
        ("pods", other) => {
            let why = format!("unexpected pod subresource \"{other}\", only 'status' and 'eviction' are allowed");
            refuse(request, &why)
        }
        ("nodes", _) => update_node(request, node, old, new),
        ("persistentvolumeclaims", "status") => {
            let bare = |claim: &Value| {
                let mut claim = claim.clone();
                remove(&mut claim["metadata"], "resourceVersion");
                remove(&mut claim["metadata"], "managedFields");
                for key in ["capacity", "conditions", "allocatedResources", "allocatedResourceStatuses"] {
                    remove(&mut claim["status"], key);
                }
                claim
            };
            if bare(old) == bare(new) {
                return Ok(());
            }
            let why = "is not allowed to update fields other than status.quantity and status.conditions: ";
            refuse(request, &format!("node \"{node}\" {why}"))
        }
        ("persistentvolumeclaims", _) => refuse(request, "may only update PVC status"),
        ("resourceslices.resource.k8s.io", _) if text(new, "/spec/nodeName") != node => {
            refuse(request, "can only update ResourceSlice with the same NodeName as the requesting node")
        }
        _ => Ok(()),
    }
}

fn update_pod_status(request: &Request, node: &str, old: &Value, new: &Value) -> Verdict {
    let changed = |pointer: &str| {
        let some = |object: &Value| {
            object.pointer(pointer).filter(|value| **value != json!({}) && **value != json!([])).cloned()
        };
        some(old) != some(new)
    };
    let why = match () {
        () if text(old, "/spec/nodeName") != node => {
            "can only update pod status for pods with spec.nodeName set to itself"
        }
        () if changed("/metadata/labels") => "cannot update labels through pod status",
        () if changed("/status/resourceClaimStatuses") => "cannot update resource claim statues",
        () if changed("/status/extendedResourceClaimStatus") => "cannot update extended resource claim status",
        () => return Ok(()),
    };
    refuse(request, &format!("node \"{node}\" {why}"))
}

fn update_node(request: &Request, node: &str, old: &Value, new: &Value) -> Verdict {
    if request.name != node {
        return refuse(request, &format!("node \"{node}\" is not allowed to modify node \"{}\"", request.name));
    }
    let source = new.pointer("/spec/configSource");
    if source.is_some() && source != old.pointer("/spec/configSource") {
        let why = format!("node \"{node}\" is not allowed to update configSource to a new non-nil configSource");
        return refuse(request, &why);
    }
    for (pointer, what) in [("/spec/taints", "taints"), ("/metadata/ownerReferences", "ownerReferences")] {
        if list(old, pointer) != list(new, pointer) {
            return refuse(request, &format!("node \"{node}\" is not allowed to modify {what}"));
        }
    }
    let forbidden = forbidden_labels(old, new);
    if forbidden.is_empty() {
        Ok(())
    } else {
        refuse(request, &format!("is not allowed to modify labels: {forbidden}"))
    }
}

/// Changed labels that the node may not change, sorted and joined.
fn forbidden_labels(old: &Value, new: &Value) -> String {
    let keys = |object| fields(object, "/metadata/labels").map(|(key, _)| key);
    let value =
        |object: &Value, key: &str| object.pointer("/metadata/labels").and_then(|labels| labels.get(key)).cloned();
    let all: BTreeSet<&String> = keys(old).chain(keys(new)).collect();
    let changed = all.into_iter().filter(|key| value(old, key) != value(new, key));
    let forbidden: Vec<&str> = changed.map(String::as_str).filter(|key| is_forbidden(key)).collect();
    forbidden.join(", ")
}

fn is_forbidden(label: &str) -> bool {
    let domain = label.split_once('/').map_or("", |(domain, _)| domain);
    let within = |of: &str| domain == of || domain.ends_with(&format!(".{of}"));
    if within("node-restriction.kubernetes.io") {
        return true;
    }
    let own = within("kubelet.kubernetes.io") || within("node.kubernetes.io") || OWN_LABELS.contains(&label);
    (within("kubernetes.io") || within("k8s.io")) && !own
}

/// Admits a delete.
///
/// # Errors
/// 403.
pub fn delete(request: &Request, old: &Value) -> Verdict {
    let Some(node) = request.caller.node() else { return Ok(()) };
    let is_own = text(old, "/spec/nodeName") == node;
    match request.resource.as_str() {
        "pods" if !is_own => {
            refuse(request, &format!("node \"{node}\" can only delete pods with spec.nodeName set to itself"))
        }
        "resourceslices.resource.k8s.io" if !is_own => {
            refuse(request, "can only delete ResourceSlice with the same NodeName as the requesting node")
        }
        _ => Ok(()),
    }
}

/// Admits an eviction.
///
/// # Errors
/// 403, 404.
pub fn evict(view: &dyn View, request: &Request) -> Verdict {
    let Some(node) = request.caller.node() else { return Ok(()) };
    let pod = view.get("pods", &request.namespace, &request.name);
    let pod = pod.ok_or_else(|| Refusal::not_found("pods", &request.name))?;
    if text(&pod, "/spec/nodeName") == node {
        return Ok(());
    }
    refuse(request, &format!("node {node} can only evict pods with spec.nodeName set to itself"))
}

/// Admits a TokenRequest.
///
/// # Errors
/// 403; 404: no such pod.
pub fn token(view: &dyn View, request: &Request, body: &Value) -> Verdict {
    let Some(node) = request.caller.node() else { return Ok(()) };
    let bound = |field: &str| text(body, &format!("/spec/boundObjectRef/{field}"));
    if bound("apiVersion") != "v1" || bound("kind") != "Pod" || bound("name").is_empty() {
        return refuse(request, "node requested token not bound to a pod");
    }
    let uid = bound("uid");
    if uid.is_empty() {
        return refuse(request, "node requested token with a pod binding without a uid");
    }
    let name = bound("name");
    let pod = view.get("pods", &request.namespace, name).ok_or_else(|| Refusal::not_found("pods", name))?;
    if text(&pod, "/metadata/uid") != uid {
        let why = format!(
            "the UID in the bound object reference ({uid}) does not match the UID in record. \
             The object might have been deleted and then recreated"
        );
        return refuse(request, &why);
    }
    if text(&pod, "/spec/nodeName") != node {
        return refuse(request, "node requested token bound to a pod scheduled on a different node");
    }
    let audiences = list(body, "/spec/audiences");
    if audiences.len() > 1 {
        return refuse(request, "node may only request 0 or 1 audiences");
    }
    let audience = audiences.first().and_then(Value::as_str).unwrap_or_default();
    if is_audience_of(view, &pod, audience) || may_request(view, request, audience) {
        return Ok(());
    }
    let who = &request.caller.name;
    let why = format!(
        "audience \"{audience}\" not found in pod spec volume, {who} is not authorized to request tokens for this audience"
    );
    refuse(request, &why)
}

fn is_audience_of(view: &dyn View, pod: &Value, audience: &str) -> bool {
    let volumes = list(pod, "/spec/volumes");
    let projected = volumes.iter().flat_map(|volume| list(volume, "/projected/sources"));
    let mut tokens = projected.filter_map(|source| source.get("serviceAccountToken"));
    if tokens.any(|token| text(token, "/audience") == audience) {
        return true;
    }
    let space = text(pod, "/metadata/namespace");
    let of_volume =
        |name: &str| view.get("persistentvolumes", "", name).map(|pv| text(&pv, "/spec/csi/driver").to_owned());
    let of_claim = |name: &String| {
        let claim = view.get("persistentvolumeclaims", space, name)?;
        of_volume(text(&claim, "/spec/volumeName"))
    };
    let claims = graph::references(pod, "persistentvolumeclaims");
    let inline = volumes.iter().map(|volume| text(volume, "/csi/driver").to_owned());
    inline.chain(claims.iter().filter_map(of_claim)).filter(|driver| !driver.is_empty()).any(|driver| {
        let driver = view.get("csidrivers.storage.k8s.io", "", &driver);
        driver
            .is_some_and(|driver| list(&driver, "/spec/tokenRequests").iter().any(|r| text(r, "/audience") == audience))
    })
}

fn may_request(view: &dyn View, request: &Request, audience: &str) -> bool {
    let asked = AccessAttributes {
        verb: "request-serviceaccounts-token-audience".to_owned(),
        resource: audience.to_owned(),
        namespace: request.namespace.clone(),
        name: request.name.clone(),
        ..AccessAttributes::default()
    };
    decide(view, &request.caller, &asked).is_ok()
}

#[cfg(test)]
mod tests {
    use super::{
        super::{
            pod_defaults::MIRROR,
            tests::{FixedView, node},
        },
        *,
    };

    fn request(resource: &str, subresource: &str, name: &str) -> Request {
        Request {
            caller: node("n"),
            resource: resource.to_owned(),
            subresource: subresource.to_owned(),
            namespace: "a".to_owned(),
            name: name.to_owned(),
            ..Request::default()
        }
    }

    fn check(result: Verdict, resource: &str, name: &str, expected: &str) {
        match result {
            Ok(()) => assert_eq!("", expected),
            Err(refusal) => {
                assert_eq!(refusal.message, format!("{resource} \"{name}\" is forbidden: {expected}"));
                assert_eq!(refusal.code, 403);
            }
        }
    }

    fn mirror() -> Value {
        json!({"metadata": {"name": "p", "annotations": {MIRROR: "h"}, "ownerReferences": [
            {"apiVersion": "v1", "kind": "Node", "name": "n", "uid": "u", "controller": true}]}, "spec": {"nodeName": "n"}})
    }

    #[test]
    fn a_node_creates_mirror_pods_of_its_own_only() {
        let view = FixedView::with(&[("nodes", json!({"metadata": {"name": "n", "uid": "u"}}))]);
        let with = |pointer: &str, value: Value| {
            let mut pod = mirror();
            let (parent, key) = pointer.rsplit_once('/').expect("a path");
            super::super::fields::set(pod.pointer_mut(parent).expect("there"), key, value);
            pod
        };
        let owner = "/metadata/ownerReferences/0";
        for (pod, expected) in [
            (mirror(), ""),
            (
                with("/metadata/annotations", json!({})),
                "pod does not have \"kubernetes.io/config.mirror\" annotation, node \"n\" can only create mirror pods",
            ),
            (with("/spec/nodeName", json!("m")), "node \"n\" can only create pods with spec.nodeName set to itself"),
            (
                with("/metadata/ownerReferences", json!([])),
                "node \"n\" can only create pods with an owner reference set to itself",
            ),
            (
                with("/metadata/ownerReferences", json!([{}, {}])),
                "node \"n\" can only create pods with a single owner reference set to itself",
            ),
            (
                with(&format!("{owner}/name"), json!("m")),
                "node \"n\" can only create pods with an owner reference set to itself",
            ),
            (
                with(&format!("{owner}/controller"), json!(false)),
                "node \"n\" can only create pods with a controller owner reference set to itself",
            ),
            (
                with(&format!("{owner}/blockOwnerDeletion"), json!(true)),
                "node \"n\" must not set blockOwnerDeletion on an owner reference",
            ),
            (with(&format!("{owner}/uid"), json!("x")), "node n UID mismatch: expected x got u"),
            (
                with("/spec/serviceAccountName", json!("x")),
                "node \"n\" can not create pods that reference serviceaccounts",
            ),
            (with("/spec/volumes", json!([{"name": "v", "emptyDir": {}}])), ""),
        ] {
            check(create(&view, &request("pods", "", "p"), &pod), "pods", "p", expected);
        }
        let refusal = create(&FixedView::with(&[]), &request("pods", "", "p"), &mirror()).expect_err("no node");
        assert_eq!((refusal.code, refusal.message.as_str()), (404, "nodes \"n\" not found"));
        let mut user = request("pods", "", "p");
        user.caller.groups.clear();
        assert_eq!(create(&view, &user, &json!({})), Ok(()), "others are not restricted");
    }

    #[test]
    fn a_node_describes_itself_within_limits() {
        let view = FixedView::with(&[]);
        let labelled = |labels: Value| json!({"metadata": {"name": "n", "labels": labels}});
        let own = labelled(
            json!({"kubernetes.io/hostname": "n", "node.kubernetes.io/x": "1", "a.kubelet.kubernetes.io/x": "1", "example.com/x": "1", "x": "1"}),
        );
        check(create(&view, &request("nodes", "", "n"), &own), "nodes", "n", "");
        let foreign = labelled(json!({"node-restriction.kubernetes.io/x": "1", "a.k8s.io/y": "1"}));
        check(
            create(&view, &request("nodes", "", "n"), &foreign),
            "nodes",
            "n",
            "node \"n\" is not allowed to set the following labels: a.k8s.io/y, node-restriction.kubernetes.io/x",
        );
        check(
            create(&view, &request("nodes", "", "m"), &own),
            "nodes",
            "m",
            "node \"n\" is not allowed to modify node \"m\"",
        );
        let old = json!({"metadata": {"name": "n", "labels": {"kubernetes.io/role": "x"}}, "spec": {"taints": [{"key": "k"}]}});
        for (pointer, value, expected) in [
            ("/spec/taints", json!([]), "node \"n\" is not allowed to modify taints"),
            ("/metadata/ownerReferences", json!([{"uid": "x"}]), "node \"n\" is not allowed to modify ownerReferences"),
            ("/metadata/labels", json!({}), "is not allowed to modify labels: kubernetes.io/role"),
            (
                "/spec/configSource",
                json!({}),
                "node \"n\" is not allowed to update configSource to a new non-nil configSource",
            ),
            ("/spec/podCIDR", json!("10.0.0.0/24"), ""),
        ] {
            let mut new = old.clone();
            let (parent, key) = pointer.rsplit_once('/').expect("a path");
            super::super::fields::set(new.pointer_mut(parent).expect("there"), key, value);
            check(update(&request("nodes", "status", "n"), &old, &new), "nodes", "n", expected);
        }
    }

    /// AC-10a-6 and the rest of the row.
    #[test]
    fn a_node_writes_the_status_of_its_own_pods() {
        let old = json!({"metadata": {"labels": {"a": "b"}}, "spec": {"nodeName": "n"}, "status": {"resourceClaimStatuses": [{"name": "c"}]}});
        for (change, expected) in [
            (json!({"status": {"phase": "Running"}}), ""),
            (json!({"metadata": {"labels": {"a": "c"}}}), "node \"n\" cannot update labels through pod status"),
            (json!({"status": {"resourceClaimStatuses": []}}), "node \"n\" cannot update resource claim statues"),
            (
                json!({"status": {"extendedResourceClaimStatus": {"resourceClaimName": "x"}}}),
                "node \"n\" cannot update extended resource claim status",
            ),
        ] {
            let new = super::super::merge_patch::json_merge(&old, &change);
            check(update(&request("pods", "status", "p"), &old, &new), "pods", "p", expected);
        }
        let other = json!({"spec": {"nodeName": "m"}});
        let expected = "node \"n\" can only update pod status for pods with spec.nodeName set to itself";
        check(update(&request("pods", "status", "p"), &other, &other), "pods", "p", expected);
        check(
            delete(&request("pods", "", "p"), &other),
            "pods",
            "p",
            "node \"n\" can only delete pods with spec.nodeName set to itself",
        );
        check(delete(&request("pods", "", "p"), &old), "pods", "p", "");
        let expected = "unexpected operation \"UPDATE\", node \"n\" can only create and delete mirror pods";
        check(update(&request("pods", "", "p"), &old, &old), "pods", "p", expected);
        let expected = "unexpected pod subresource \"resize\", only 'status' and 'eviction' are allowed";
        check(update(&request("pods", "resize", "p"), &old, &old), "pods", "p", expected);
    }

    #[test]
    fn a_node_reports_the_size_of_a_claim_only() {
        let old = json!({"metadata": {}, "spec": {}, "status": {"phase": "Bound", "capacity": {"storage": "1Gi"}}});
        let mut new = old.clone();
        new["status"]["capacity"]["storage"] = json!("2Gi");
        check(update(&request("persistentvolumeclaims", "status", "c"), &old, &new), "persistentvolumeclaims", "c", "");
        new["status"]["phase"] = json!("Lost");
        let expected = "node \"n\" is not allowed to update fields other than status.quantity and status.conditions: ";
        check(
            update(&request("persistentvolumeclaims", "status", "c"), &old, &new),
            "persistentvolumeclaims",
            "c",
            expected,
        );
    }

    #[test]
    fn other_objects_carry_the_nodes_name() {
        let view = FixedView::with(&[]);
        let csr = |name: &str| csr::tests::request(name, "system:nodes", &[], &["client auth"], "x");
        let mut lease = request("leases.coordination.k8s.io", "", "m");
        lease.namespace = "kube-node-lease".to_owned();
        for (request, object, expected) in [
            (lease, json!({}), "can only access node lease with the same name as the requesting node"),
            (
                request("csinodes.storage.k8s.io", "", "m"),
                json!({}),
                "can only access CSINode with the same name as the requesting node",
            ),
            (
                request("resourceslices.resource.k8s.io", "", "s"),
                json!({"spec": {"nodeName": "m"}}),
                "can only create ResourceSlice with the same NodeName as the requesting node",
            ),
            (
                request("certificatesigningrequests.certificates.k8s.io", "", "c"),
                csr("system:node:m"),
                "can only create a node CSR with CN=system:node:n",
            ),
            (request("certificatesigningrequests.certificates.k8s.io", "", "c"), csr("system:node:n"), ""),
        ] {
            check(create(&view, &request, &object), &request.resource, &request.name, expected);
        }
    }

    /// AC-10a-23 and the rest of the row.
    #[test]
    fn a_node_gets_tokens_for_its_pods_only() {
        let pod = |name: &str, node: &str| {
            json!({"metadata": {"name": name, "namespace": "a", "uid": "u"}, "spec": {"nodeName": node, "volumes": [
            {"projected": {"sources": [{"serviceAccountToken": {}}, {"serviceAccountToken": {"audience": "vault"}}]}}, {"csi": {"driver": "d"}}]}})
        };
        let driver = json!({"metadata": {"name": "d"}, "spec": {"tokenRequests": [{"audience": "csi"}]}});
        let mut view = FixedView::with(&[
            ("pods", pod("p", "n")),
            ("pods", pod("other", "m")),
            ("csidrivers.storage.k8s.io", driver),
        ]);
        let reference = |name: &str, uid: &str| json!({"kind": "Pod", "apiVersion": "v1", "name": name, "uid": uid});
        let ask = request("serviceaccounts", "token", "sa");
        let unknown = "audience \"x\" not found in pod spec volume, system:node:n is not authorized to request tokens for this audience";
        for (spec, expected) in [
            (json!({"boundObjectRef": reference("p", "u")}), ""),
            (json!({"boundObjectRef": reference("p", "u"), "audiences": ["vault"]}), ""),
            (json!({"boundObjectRef": reference("p", "u"), "audiences": ["csi"]}), ""),
            (json!({}), "node requested token not bound to a pod"),
            (json!({"boundObjectRef": reference("p", "")}), "node requested token with a pod binding without a uid"),
            (
                json!({"boundObjectRef": reference("p", "old")}),
                "the UID in the bound object reference (old) does not match the UID in record. The object might have been deleted and then recreated",
            ),
            (
                json!({"boundObjectRef": reference("other", "u")}),
                "node requested token bound to a pod scheduled on a different node",
            ),
            (
                json!({"boundObjectRef": reference("p", "u"), "audiences": ["a", "b"]}),
                "node may only request 0 or 1 audiences",
            ),
            (json!({"boundObjectRef": reference("p", "u"), "audiences": ["x"]}), unknown),
        ] {
            check(token(&view, &ask, &json!({"spec": spec})), "serviceaccounts", "sa", expected);
        }
        let wanted = json!({"spec": {"boundObjectRef": reference("p", "u"), "audiences": ["x"]}});
        view.rules.grants.push(super::super::Grant::new(
            "system:nodes",
            &["request-serviceaccounts-token-audience"],
            &["x"],
        ));
        assert_eq!(token(&view, &ask, &wanted), Ok(()));
        let gone = json!({"spec": {"boundObjectRef": reference("gone", "u")}});
        assert_eq!(token(&view, &ask, &gone).expect_err("gone").code, 404);
    }
}
