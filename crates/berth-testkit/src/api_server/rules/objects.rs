//! Strategy and validation of objects other than pods. Pure.
//!
//! Implements spec 10a §4, spec 10 §6.4.

use serde_json::{Value, json};

use super::{
    super::{
        refusal::{Cause, Refusal},
        view::Request,
    },
    csr,
    fields::{fields, fill, is_true, list, list_mut, number, remove, set, text},
};

/// Prepares and validates a new object of any kind except pods.
///
/// # Errors
/// 422.
pub fn create(request: &Request, object: &mut Value) -> Result<(), Refusal> {
    let mut causes = Vec::new();
    match request.kind {
        "Node" => twice_the_same_address(object, &mut causes),
        "Lease" => wrong_lease(object, &mut causes),
        "Secret" => secret(object),
        "Service" => service(object),
        "Namespace" => {
            set(&mut object["spec"], "finalizers", json!(["kubernetes"]));
            set(object, "status", json!({"phase": "Active"}));
        }
        "PersistentVolumeClaim" => {
            fill(&mut object["spec"], "volumeMode", "Filesystem");
            set(object, "status", json!({"phase": "Pending"}));
        }
        "PersistentVolume" => {
            for (key, value) in [("volumeMode", "Filesystem"), ("persistentVolumeReclaimPolicy", "Retain")] {
                fill(&mut object["spec"], key, value);
            }
            set(object, "status", json!({"phase": "Pending"}));
        }
        "VolumeAttachment" => set(object, "status", json!({"attached": false})),
        "ResourceClaim" => remove(object, "status"),
        "CertificateSigningRequest" => csr::create(&request.caller, object, &mut causes),
        "Event" => foreign_event(object, &mut causes),
        _ => {}
    }
    refuse(request, object, causes)
}

/// Validates a changed object of any kind except pods.
///
/// # Errors
/// 422.
pub fn update(request: &Request, old: &Value, new: &mut Value) -> Result<(), Refusal> {
    let mut causes = Vec::new();
    match (request.kind, request.subresource.as_str()) {
        ("Node", "status") => twice_the_same_address(new, &mut causes),
        ("Node", _) => {
            for (key, name) in [("podCIDR", "podCIDR"), ("podCIDRs", "podCIDR"), ("providerID", "providerID")] {
                let (before, after) = (old["spec"].get(key), new["spec"].get(key));
                if before.is_some_and(|before| *before != json!("")) && before != after {
                    let detail = format!("node updates may not change {name} except from \"\" to valid");
                    causes.push(Cause::forbidden(&format!("spec.{key}"), &detail));
                }
            }
        }
        ("Lease", _) => wrong_lease(new, &mut causes),
        ("Secret", _) => {
            secret(new);
            if old["type"] != new["type"] {
                causes.push(Cause::invalid("type", &new["type"], "field is immutable"));
            }
            immutable_data(old, new, &mut causes);
        }
        ("ConfigMap", _) => immutable_data(old, new, &mut causes),
        ("CSINode", _) => changed_drivers(old, new, &mut causes),
        ("CertificateSigningRequest", subresource) => csr::update(subresource, old, new),
        ("ResourceClaim" | "VolumeAttachment", "") if old["spec"] != new["spec"] => {
            causes.push(Cause::forbidden("spec", "field is immutable"));
        }
        _ => {}
    }
    refuse(request, new, causes)
}

fn refuse(request: &Request, object: &Value, causes: Vec<Cause>) -> Result<(), Refusal> {
    if causes.is_empty() {
        return Ok(());
    }
    Err(Refusal::invalid(&request.group_kind(), text(object, "/metadata/name"), causes))
}

fn twice_the_same_address(node: &Value, causes: &mut Vec<Cause>) {
    let addresses = list(node, "/status/addresses");
    for (index, address) in addresses.iter().enumerate() {
        if addresses[..index].contains(address) {
            causes.push(Cause::duplicate(&format!("status.addresses[{index}]"), address));
        }
    }
}

fn wrong_lease(lease: &Value, causes: &mut Vec<Cause>) {
    if let Some(seconds) = number(lease, "/spec/leaseDurationSeconds").filter(|seconds| *seconds <= 0) {
        causes.push(Cause::invalid("spec.leaseDurationSeconds", &json!(seconds), "must be greater than 0"));
    }
}

fn secret(secret: &mut Value) {
    use base64::{Engine, engine::general_purpose::STANDARD};
    fill(secret, "type", "Opaque");
    let plain: Vec<(String, String)> = fields(secret, "/stringData")
        .map(|(key, value)| (key.clone(), STANDARD.encode(value.as_str().unwrap_or_default())))
        .collect();
    for (key, value) in plain {
        set(&mut secret["data"], &key, value);
    }
    remove(secret, "stringData");
}

fn immutable_data(old: &Value, new: &Value, causes: &mut Vec<Cause>) {
    if !is_true(old, "/immutable") {
        return;
    }
    let detail = "field is immutable when `immutable` is set";
    if !is_true(new, "/immutable") {
        causes.push(Cause::forbidden("immutable", detail));
    }
    for field in ["data", "binaryData"] {
        if old.get(field) != new.get(field) {
            causes.push(Cause::forbidden(field, detail));
        }
    }
}

fn changed_drivers(old: &Value, new: &Value, causes: &mut Vec<Cause>) {
    for (index, driver) in list(new, "/spec/drivers").iter().enumerate() {
        let before = list(old, "/spec/drivers").iter().find(|before| before["name"] == driver["name"]);
        let changed = |before: &Value| ["nodeID", "topologyKeys"].iter().any(|key| before.get(key) != driver.get(key));
        if before.is_some_and(changed) {
            causes.push(Cause::invalid(&format!("spec.drivers[{index}]"), driver, "field is immutable"));
        }
    }
}

fn service(service: &mut Value) {
    let uid: u32 = text(service, "/metadata/uid").bytes().fold(7, |sum, byte| sum.wrapping_mul(31) + u32::from(byte));
    let spec = &mut service["spec"];
    fill(spec, "type", "ClusterIP");
    fill(spec, "sessionAffinity", "None");
    if text(spec, "/type") != "ExternalName" {
        fill(spec, "clusterIP", format!("10.96.{}.{}", (uid >> 8) % 256, uid % 254 + 1));
        let ip = spec["clusterIP"].clone();
        fill(spec, "clusterIPs", json!([ip]));
    }
    for port in list_mut(spec, "ports") {
        fill(port, "protocol", "TCP");
        let number = port["port"].clone();
        fill(port, "targetPort", number);
    }
    set(service, "status", json!({"loadBalancer": {}}));
}

/// Checks the namespace of an event; events of cluster-scoped objects belong to the namespace `default`.
fn foreign_event(event: &Value, causes: &mut Vec<Cause>) {
    let (own, of) = (text(event, "/metadata/namespace"), text(event, "/involvedObject/namespace"));
    if own != of && !(of.is_empty() && own == "default") {
        let value = json!(of);
        causes.push(Cause::invalid("involvedObject.namespace", &value, "does not match event.namespace"));
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn of(kind: &'static str, subresource: &str) -> Request {
        Request { kind, subresource: subresource.to_owned(), resource: "things".to_owned(), ..Request::default() }
    }

    #[test]
    fn changes_that_cannot_be_are_refused() {
        let map = json!({"metadata": {"name": "x"}, "immutable": true, "data": {"a": "1"}});
        let node = |spec: Value, addresses: Value| json!({"metadata": {"name": "x"}, "spec": spec, "status": {"addresses": addresses}});
        let same = json!({"type": "InternalIP", "address": "1.1.1.1"});
        for (request, old, new, expected) in [
            (
                of("ConfigMap", ""),
                map.clone(),
                json!({"metadata": {"name": "x"}, "immutable": true, "data": {"a": "2"}}),
                "data: Forbidden: field is immutable when `immutable` is set",
            ),
            (
                of("Secret", ""),
                json!({"metadata": {"name": "x"}, "type": "Opaque"}),
                json!({"metadata": {"name": "x"}, "type": "other"}),
                "type: Invalid value: \"other\": field is immutable",
            ),
            (
                of("Node", "status"),
                json!({}),
                node(json!({}), json!([same, same])),
                "status.addresses[1]: Duplicate value: {\"type\":\"InternalIP\",\"address\":\"1.1.1.1\"}",
            ),
            (
                of("Node", ""),
                node(json!({"providerID": "a"}), json!([])),
                node(json!({"providerID": "b"}), json!([])),
                "spec.providerID: Forbidden: node updates may not change providerID except from \"\" to valid",
            ),
            (
                of("Lease", ""),
                json!({}),
                json!({"metadata": {"name": "x"}, "spec": {"leaseDurationSeconds": 0}}),
                "spec.leaseDurationSeconds: Invalid value: 0: must be greater than 0",
            ),
            (
                of("CSINode", ""),
                json!({"spec": {"drivers": [{"name": "d", "nodeID": "1"}]}}),
                json!({"metadata": {"name": "x"}, "spec": {"drivers": [{"name": "d", "nodeID": "2"}]}}),
                "spec.drivers[0]: Invalid value: {\"name\":\"d\",\"nodeID\":\"2\"}: field is immutable",
            ),
        ] {
            let refusal = update(&request, &old, &mut new.clone()).expect_err(expected);
            assert_eq!(
                (refusal.code, refusal.message),
                (422, format!("{} \"x\" is invalid: {expected}", request.kind))
            );
        }
        assert!(update(&of("ConfigMap", ""), &map, &mut map.clone()).is_ok());
    }

    #[test]
    fn a_secret_is_stored_encoded() {
        let mut secret = json!({"metadata": {"name": "s"}, "stringData": {"a": "b"}});
        create(&of("Secret", ""), &mut secret).expect("fine");
        assert_eq!(secret, json!({"metadata": {"name": "s"}, "type": "Opaque", "data": {"a": "Yg=="}}));
    }

    #[test]
    fn an_event_lies_beside_its_object() {
        for (own, of_object, fine) in [("a", "a", true), ("default", "", true), ("a", "", false), ("a", "b", false)] {
            let mut event =
                json!({"metadata": {"name": "e", "namespace": own}, "involvedObject": {"namespace": of_object}});
            assert_eq!(create(&of("Event", ""), &mut event).is_ok(), fine, "{own} {of_object}");
        }
    }
}
