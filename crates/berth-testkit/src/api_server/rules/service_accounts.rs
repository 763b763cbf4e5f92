//! Admission plugin ServiceAccount: a pod's account and token volume. Pure.
//!
//! Implements spec 10 §6.3, spec 10a §4.

use serde_json::{Value, json};

use super::{
    super::{refusal::Refusal, view::View},
    fields::{fill, list, list_mut, set, text},
    graph::references,
    pod_defaults::is_mirror,
};

const MOUNT: &str = "/var/run/secrets/kubernetes.io/serviceaccount";

/// Sets account, token volume, and pull secrets of a new pod; a mirror pod must not have an account.
///
/// # Errors
/// 403.
pub fn admit(view: &dyn View, pod: &mut Value) -> Result<(), Refusal> {
    if is_mirror(pod) {
        return check_mirror(pod);
    }
    fill(&mut pod["spec"], "serviceAccountName", "default");
    if text(pod, "/spec/serviceAccountName").is_empty() {
        set(&mut pod["spec"], "serviceAccountName", "default");
    }
    let (namespace, name) = (text(pod, "/metadata/namespace"), text(pod, "/spec/serviceAccountName"));
    let account = view.get("serviceaccounts", namespace, name);
    if account.is_none() && name != "default" {
        let why = format!("error looking up service account {namespace}/{name}: serviceaccount \"{name}\" not found");
        return Err(refuse(pod, &why));
    }
    let account = account.as_deref().unwrap_or(&Value::Null);
    let flag = |object: &Value, pointer: &str| object.pointer(pointer).and_then(Value::as_bool);
    let automount = flag(pod, "/spec/automountServiceAccountToken").or(flag(account, "/automountServiceAccountToken"));
    if automount.unwrap_or(true) {
        mount(view, pod);
    }
    if list(pod, "/spec/imagePullSecrets").is_empty() && !list(account, "/imagePullSecrets").is_empty() {
        set(&mut pod["spec"], "imagePullSecrets", account["imagePullSecrets"].clone());
    }
    Ok(())
}

fn refuse(pod: &Value, why: &str) -> Refusal {
    Refusal::forbidden("pods", text(pod, "/metadata/name"), why)
}

fn check_mirror(pod: &Value) -> Result<(), Refusal> {
    if !text(pod, "/spec/serviceAccountName").is_empty() {
        return Err(refuse(pod, "a mirror pod may not reference service accounts"));
    }
    if !references(pod, "secrets").is_empty() {
        return Err(refuse(pod, "a mirror pod may not reference secrets"));
    }
    let sources = list(pod, "/spec/volumes").iter().flat_map(|volume| list(volume, "/projected/sources"));
    if sources.into_iter().any(|source| source.get("serviceAccountToken").is_some()) {
        return Err(refuse(pod, "a mirror pod may not use service account token volume projections"));
    }
    Ok(())
}

fn mount(view: &dyn View, pod: &mut Value) {
    const LETTERS: &[u8] = b"bcdfghjklmnpqrstvwxz2456789";
    let mut random = view.random();
    let mut name = "kube-api-access-".to_owned();
    for _ in 0..5 {
        name.push(char::from(LETTERS[usize::try_from(random % LETTERS.len() as u64).unwrap_or_default()]));
        random /= LETTERS.len() as u64;
    }
    let mut is_used = false;
    for lists in ["initContainers", "containers"] {
        for container in list_mut(&mut pod["spec"], lists) {
            if list(container, "/volumeMounts").iter().any(|mount| text(mount, "/mountPath") == MOUNT) {
                continue;
            }
            is_used = true;
            push(container, "volumeMounts", json!({"name": name, "readOnly": true, "mountPath": MOUNT}));
        }
    }
    if !is_used {
        return;
    }
    let volume = json!({"name": name, "projected": {"defaultMode": 420, "sources": [
        {"serviceAccountToken": {"expirationSeconds": 3607, "path": "token"}},
        {"configMap": {"name": "kube-root-ca.crt", "items": [{"key": "ca.crt", "path": "ca.crt"}]}},
        {"downwardAPI": {"items": [{"path": "namespace", "fieldRef": {"apiVersion": "v1", "fieldPath": "metadata.namespace"}}]}},
    ]}});
    push(&mut pod["spec"], "volumes", volume);
}

fn push(object: &mut Value, key: &str, item: Value) {
    fill(object, key, json!([]));
    if let Some(items) = object[key].as_array_mut() {
        items.push(item);
    }
}

#[cfg(test)]
mod tests {
    use super::{
        super::{pod_defaults::MIRROR, tests::FixedView},
        *,
    };

    fn world() -> FixedView {
        let account = |name: &str, automount: bool| {
            json!({"metadata": {"name": name, "namespace": "a"},
            "automountServiceAccountToken": automount, "imagePullSecrets": [{"name": "pull"}]})
        };
        FixedView::with(&[("serviceaccounts", account("default", true)), ("serviceaccounts", account("shy", false))])
    }

    fn pod(spec: Value) -> Value {
        json!({"metadata": {"name": "p", "namespace": "a"}, "spec": spec})
    }

    #[test]
    fn a_pod_gets_the_default_account_and_its_token() {
        let mut pod = pod(
            json!({"containers": [{"name": "c"}, {"name": "own", "volumeMounts": [{"name": "x", "mountPath": MOUNT}]}]}),
        );
        admit(&world(), &mut pod).expect("fine");
        let name = text(&pod, "/spec/volumes/0/name").to_owned();
        assert!(name.starts_with("kube-api-access-") && name.len() == 21, "{name}");
        assert_eq!(pod["spec"]["serviceAccountName"], "default");
        assert_eq!(pod["spec"]["imagePullSecrets"], json!([{"name": "pull"}]));
        assert_eq!(
            pod["spec"]["containers"][0]["volumeMounts"],
            json!([{"name": name, "readOnly": true, "mountPath": MOUNT}])
        );
        assert_eq!(list(&pod, "/spec/containers/1/volumeMounts").len(), 1);
        assert_eq!(
            pod["spec"]["volumes"][0]["projected"]["sources"][0]["serviceAccountToken"]["expirationSeconds"],
            3607
        );
    }

    #[test]
    fn a_token_may_be_unwanted() {
        for spec in [
            json!({"serviceAccountName": "shy", "containers": [{"name": "c"}]}),
            json!({"automountServiceAccountToken": false, "containers": [{"name": "c"}]}),
            json!({"containers": []}),
        ] {
            let mut pod = pod(spec);
            admit(&world(), &mut pod).expect("fine");
            assert!(list(&pod, "/spec/volumes").is_empty(), "{pod}");
        }
        let refusal = admit(&world(), &mut pod(json!({"serviceAccountName": "gone"}))).expect_err("no account");
        let text =
            "pods \"p\" is forbidden: error looking up service account a/gone: serviceaccount \"gone\" not found";
        assert_eq!((refusal.code, refusal.message.as_str()), (403, text));
    }

    /// AC-10-27: such a pod never gets a mirror pod.
    #[test]
    fn a_mirror_pod_has_no_account() {
        for (spec, expected) in [
            (json!({"containers": [{"name": "c"}]}), ""),
            (json!({"serviceAccountName": "default"}), "a mirror pod may not reference service accounts"),
            (json!({"imagePullSecrets": [{"name": "x"}]}), "a mirror pod may not reference secrets"),
            (
                json!({"volumes": [{"projected": {"sources": [{"serviceAccountToken": {}}]}}]}),
                "a mirror pod may not use service account token volume projections",
            ),
        ] {
            let mut pod = pod(spec);
            pod["metadata"]["annotations"] = json!({MIRROR: "h"});
            let before = pod.clone();
            match admit(&world(), &mut pod) {
                Ok(()) => assert_eq!((expected, &pod), ("", &before)),
                Err(refusal) => assert_eq!(refusal.message, format!("pods \"p\" is forbidden: {expected}")),
            }
        }
    }
}
