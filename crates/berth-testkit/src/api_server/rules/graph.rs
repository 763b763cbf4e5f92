//! Object references of pods, and the relationships that authorize a node. Pure.
//!
//! Upstream keeps a graph fed by watches; this module computes it per request from the pods as they were `graph_lag`
//! ago. Implements spec 10 §6.1.

use serde_json::Value;

use super::{
    super::view::View,
    fields::{list, text},
    pod_defaults::is_mirror,
};

const CONTAINER_LISTS: &[&str] = &["/spec/containers", "/spec/initContainers", "/spec/ephemeralContainers"];

/// Whether the object is a pod of the node, or one that a pod of the node refers to.
pub fn is_related(view: &dyn View, node: &str, resource: &str, namespace: &str, name: &str) -> bool {
    let then = view.now().checked_sub(view.rules().graph_lag).unwrap_or(view.now());
    let on_node = |object: &Value| text(object, "/spec/nodeName") == node;
    if resource == "volumeattachments.storage.k8s.io" || resource == "resourceslices.resource.k8s.io" {
        let all = view.list_at(resource, then);
        return all.iter().any(|object| on_node(object) && text(object, "/metadata/name") == name);
    }
    let pods = view.list_at("pods", then);
    let mut own = pods.iter().filter(|pod| on_node(pod));
    if resource == "pods" {
        return own.any(|pod| text(pod, "/metadata/name") == name && text(pod, "/metadata/namespace") == namespace);
    }
    let own = own.map(AsRef::as_ref).filter(|pod| !is_mirror(pod));
    let refers = own.clone().any(|pod| {
        text(pod, "/metadata/namespace") == namespace && references(pod, resource).iter().any(|other| other == name)
    });
    refers || through_volumes(view, &own.collect::<Vec<_>>(), resource, namespace, name)
}

/// Follows a pod's claim to its volume, and the volume to its secrets.
fn through_volumes(view: &dyn View, pods: &[&Value], resource: &str, namespace: &str, name: &str) -> bool {
    if resource != "persistentvolumes" && resource != "secrets" {
        return false;
    }
    let claimed = |volume: &Value| {
        let (space, claim) = (text(volume, "/spec/claimRef/namespace"), text(volume, "/spec/claimRef/name"));
        pods.iter().any(|pod| {
            text(pod, "/metadata/namespace") == space
                && references(pod, "persistentvolumeclaims").iter().any(|other| other == claim)
        })
    };
    view.list("persistentvolumes").iter().filter(|volume| claimed(volume)).any(|volume| {
        let secret = |(space, other): &(String, String)| space == namespace && other == name;
        if resource == "secrets" {
            secrets_of_volume(volume).iter().any(secret)
        } else {
            text(volume, "/metadata/name") == name
        }
    })
}

/// Names of objects of that resource that a pod refers to, in its namespace.
pub fn references(pod: &Value, resource: &str) -> Vec<String> {
    let mut names = Vec::new();
    let mut add = |object: &Value, pointer: &str| {
        let name = text(object, pointer);
        if !name.is_empty() {
            names.push(name.to_owned());
        }
    };
    match resource {
        "serviceaccounts" => add(pod, "/spec/serviceAccountName"),
        "secrets" => {
            list(pod, "/spec/imagePullSecrets").iter().for_each(|secret| add(secret, "/name"));
            of_variables(pod, "secretKeyRef", "secretRef", &mut add);
            for volume in list(pod, "/spec/volumes") {
                add(volume, "/secret/secretName");
                add(volume, "/azureFile/secretName");
                for (plugin, key) in PLUGIN_SECRETS {
                    add(volume, &format!("/{plugin}/{key}/name"));
                }
                list(volume, "/projected/sources").iter().for_each(|source| add(source, "/secret/name"));
            }
        }
        "configmaps" => {
            of_variables(pod, "configMapKeyRef", "configMapRef", &mut add);
            for volume in list(pod, "/spec/volumes") {
                add(volume, "/configMap/name");
                list(volume, "/projected/sources").iter().for_each(|source| add(source, "/configMap/name"));
            }
        }
        "persistentvolumeclaims" => {
            for volume in list(pod, "/spec/volumes") {
                add(volume, "/persistentVolumeClaim/claimName");
                if volume.get("ephemeral").is_some() {
                    let name = format!("{}-{}", text(pod, "/metadata/name"), text(volume, "/name"));
                    add(&Value::String(name), "");
                }
            }
        }
        "resourceclaims.resource.k8s.io" => {
            list(pod, "/spec/resourceClaims").iter().for_each(|claim| add(claim, "/resourceClaimName"));
            list(pod, "/status/resourceClaimStatuses").iter().for_each(|claim| add(claim, "/resourceClaimName"));
            add(pod, "/status/extendedResourceClaimStatus/resourceClaimName");
        }
        _ => {}
    }
    names
}

const PLUGIN_SECRETS: &[(&str, &str)] = &[
    ("cephfs", "secretRef"),
    ("cinder", "secretRef"),
    ("flexVolume", "secretRef"),
    ("iscsi", "secretRef"),
    ("rbd", "secretRef"),
    ("scaleIO", "secretRef"),
    ("storageos", "secretRef"),
    ("csi", "nodePublishSecretRef"),
];

fn of_variables(pod: &Value, key: &str, all: &str, add: &mut impl FnMut(&Value, &str)) {
    for container in CONTAINER_LISTS.iter().flat_map(|lists| list(pod, lists)) {
        list(container, "/env").iter().for_each(|variable| add(variable, &format!("/valueFrom/{key}/name")));
        list(container, "/envFrom").iter().for_each(|source| add(source, &format!("/{all}/name")));
    }
}

/// Namespace and name of each secret that a persistent volume needs.
fn secrets_of_volume(volume: &Value) -> Vec<(String, String)> {
    let claim = text(volume, "/spec/claimRef/namespace");
    let mut secrets = Vec::new();
    let mut add = |at: &str| {
        let (space, name) = (text(volume, &format!("{at}/namespace")), text(volume, &format!("{at}/name")));
        if !name.is_empty() {
            secrets.push((if space.is_empty() { claim } else { space }.to_owned(), name.to_owned()));
        }
    };
    for (plugin, key) in PLUGIN_SECRETS {
        add(&format!("/spec/{plugin}/{key}"));
    }
    for key in ["controllerPublishSecretRef", "nodeStageSecretRef", "controllerExpandSecretRef", "nodeExpandSecretRef"]
    {
        add(&format!("/spec/csi/{key}"));
    }
    let azure = (text(volume, "/spec/azureFile/secretNamespace"), text(volume, "/spec/azureFile/secretName"));
    if !azure.1.is_empty() {
        secrets.push((if azure.0.is_empty() { claim } else { azure.0 }.to_owned(), azure.1.to_owned()));
    }
    secrets
}

/// First API object that a pod refers to, which prevents it from being a mirror pod. Implements spec 10 §6.2.
pub fn foreign_reference(pod: &Value) -> Option<&'static str> {
    for (resource, name) in
        [("serviceaccounts", "serviceaccounts"), ("secrets", "secrets"), ("configmaps", "configmaps")]
    {
        if !references(pod, resource).is_empty() {
            return Some(name);
        }
    }
    if !list(pod, "/spec/resourceClaims").is_empty() {
        return Some("resourceclaims");
    }
    list(pod, "/spec/volumes").iter().find_map(|volume| {
        let of_volume = [
            ("configMap", "configmaps (via configmap volumes)"),
            ("secret", "secrets (via secret volumes)"),
            ("csi", "csidrivers (via CSI volumes)"),
            ("glusterfs", "endpoints (via glusterFS volumes)"),
            ("persistentVolumeClaim", "persistentvolumeclaims"),
            ("ephemeral", "persistentvolumeclaims (via ephemeral volumes)"),
            ("azureFile", "secrets (via azureFile volumes)"),
        ];
        let of_source = [
            ("configMap", "configmaps (via projected volumes)"),
            ("secret", "secrets (via projected volumes)"),
            ("serviceAccountToken", "serviceaccounts (via projected volumes)"),
            ("clusterTrustBundle", "clustertrustbundles"),
            ("podCertificate", "podcertificates"),
        ];
        let named = |object: &Value, table: &[(&str, &'static str)]| {
            table.iter().find(|(key, _)| object.get(key).is_some()).map(|(_, name)| *name)
        };
        let sources = list(volume, "/projected/sources").iter();
        named(volume, &of_volume).or_else(|| sources.into_iter().find_map(|source| named(source, &of_source)))
    })
}

#[cfg(test)]
mod tests {
    use jiff::SignedDuration;
    use serde_json::json;

    use super::{super::tests::FixedView, *};

    fn pod() -> Value {
        json!({"metadata": {"name": "p", "namespace": "a"}, "spec": {"nodeName": "n", "serviceAccountName": "sa",
            "imagePullSecrets": [{"name": "pull"}],
            "containers": [{"env": [{"valueFrom": {"secretKeyRef": {"name": "env-secret"}}}], "envFrom": [{"configMapRef": {"name": "env-map"}}]}],
            "volumes": [{"name": "v", "secret": {"secretName": "volume-secret"}}, {"name": "c", "persistentVolumeClaim": {"claimName": "claim"}},
                {"name": "e", "ephemeral": {}}, {"name": "t", "projected": {"sources": [{"configMap": {"name": "projected-map"}}]}}],
            "resourceClaims": [{"name": "r", "resourceClaimName": "rc"}]}})
    }

    /// Spec 10 §6.1: what a node's pods refer to, and nothing else; a mirror pod refers to nothing.
    #[test]
    fn a_node_knows_what_its_pods_refer_to() {
        let volume = json!({"metadata": {"name": "pv"}, "spec": {"claimRef": {"namespace": "a", "name": "claim"},
            "csi": {"nodeStageSecretRef": {"namespace": "kube-system", "name": "stage"}}}});
        let attachment = json!({"metadata": {"name": "va"}, "spec": {"nodeName": "n"}});
        let view = FixedView::with(&[
            ("pods", pod()),
            ("persistentvolumes", volume),
            ("volumeattachments.storage.k8s.io", attachment),
        ]);
        for (resource, namespace, name, expected) in [
            ("pods", "a", "p", true),
            ("pods", "b", "p", false),
            ("secrets", "a", "pull", true),
            ("secrets", "a", "env-secret", true),
            ("secrets", "a", "volume-secret", true),
            ("secrets", "b", "pull", false),
            ("secrets", "kube-system", "stage", true),
            ("secrets", "a", "stage", false),
            ("configmaps", "a", "env-map", true),
            ("configmaps", "a", "projected-map", true),
            ("configmaps", "a", "other", false),
            ("serviceaccounts", "a", "sa", true),
            ("persistentvolumeclaims", "a", "claim", true),
            ("persistentvolumeclaims", "a", "p-e", true),
            ("persistentvolumes", "", "pv", true),
            ("persistentvolumes", "", "other", false),
            ("resourceclaims.resource.k8s.io", "a", "rc", true),
            ("volumeattachments.storage.k8s.io", "", "va", true),
        ] {
            assert_eq!(is_related(&view, "n", resource, namespace, name), expected, "{resource} {namespace}/{name}");
            assert!(!is_related(&view, "m", resource, namespace, name), "{resource} {name}: another node");
        }
        let mut mirror = pod();
        mirror["metadata"]["annotations"] = json!({super::super::pod_defaults::MIRROR: "h"});
        let view = FixedView::with(&[("pods", mirror)]);
        assert!(is_related(&view, "n", "pods", "a", "p") && !is_related(&view, "n", "secrets", "a", "pull"));
    }

    #[test]
    fn the_graph_is_a_little_behind() {
        let mut view = FixedView::with(&[("pods", pod())]);
        view.since = view.now;
        assert!(!is_related(&view, "n", "pods", "a", "p"));
        view.now += SignedDuration::from_millis(20);
        assert!(is_related(&view, "n", "pods", "a", "p"));
    }

    #[test]
    fn the_first_foreign_reference_is_named() {
        let with_volume = |volume: Value| json!({"spec": {"volumes": [volume]}});
        for (pod, expected) in [
            (json!({"spec": {"serviceAccountName": "x"}}), Some("serviceaccounts")),
            (with_volume(json!({"secret": {"secretName": "x"}})), Some("secrets")),
            (with_volume(json!({"configMap": {}})), Some("configmaps (via configmap volumes)")),
            (with_volume(json!({"csi": {"driver": "d"}})), Some("csidrivers (via CSI volumes)")),
            (with_volume(json!({"ephemeral": {}})), Some("persistentvolumeclaims (via ephemeral volumes)")),
            (
                with_volume(json!({"projected": {"sources": [{"serviceAccountToken": {}}]}})),
                Some("serviceaccounts (via projected volumes)"),
            ),
            (with_volume(json!({"projected": {"sources": [{"downwardAPI": {}}]}})), None),
            (with_volume(json!({"hostPath": {}})), None),
            (with_volume(json!({"iscsi": {}})), None),
        ] {
            assert_eq!(foreign_reference(&pod), expected, "{pod}");
        }
    }
}
