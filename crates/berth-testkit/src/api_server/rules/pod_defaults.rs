//! Pod defaults that matter to an agent. Pure.
//!
//! Implements spec 10a §4.

use serde_json::{Value, json};

use super::fields::{fields, fill, is_true, list, list_mut, set, text};

/// Annotation of a mirror pod.
pub const MIRROR: &str = "kubernetes.io/config.mirror";

/// Whether the pod is a mirror pod.
pub fn is_mirror(pod: &Value) -> bool {
    fields(pod, "/metadata/annotations").any(|(key, _)| key == MIRROR)
}

/// Sets the default values of unset fields.
pub fn apply(pod: &mut Value) {
    let is_mirror = is_mirror(pod);
    let spec = &mut pod["spec"];
    for (key, value) in [
        ("restartPolicy", json!("Always")),
        ("terminationGracePeriodSeconds", json!(30)),
        ("dnsPolicy", json!("ClusterFirst")),
        ("schedulerName", json!("default-scheduler")),
        ("enableServiceLinks", json!(true)),
        ("securityContext", json!({})),
        ("preemptionPolicy", json!("PreemptLowerPriority")),
    ] {
        fill(spec, key, value);
    }
    let priority = match text(spec, "/priorityClassName") {
        "system-node-critical" => 2_000_001_000,
        "system-cluster-critical" => 2_000_000_000,
        _ => 0,
    };
    fill(spec, "priority", priority);
    if !text(spec, "/serviceAccountName").is_empty() {
        let account = spec["serviceAccountName"].clone();
        fill(spec, "serviceAccount", account);
    }
    let on_host = is_true(spec, "/hostNetwork");
    for lists in ["containers", "initContainers", "ephemeralContainers"] {
        list_mut(spec, lists).iter_mut().for_each(|container| container_defaults(container, on_host));
    }
    list_mut(spec, "volumes").iter_mut().for_each(volume_defaults);
    if !is_mirror {
        add_tolerations(spec);
    }
}

fn container_defaults(container: &mut Value, on_host: bool) {
    let image = text(container, "/image");
    let name = image.rsplit('/').next().unwrap_or_default();
    let is_latest = !name.contains('@') && name.split_once(':').is_none_or(|(_, tag)| tag == "latest");
    fill(container, "imagePullPolicy", if is_latest { "Always" } else { "IfNotPresent" });
    fill(container, "terminationMessagePath", "/dev/termination-log");
    fill(container, "terminationMessagePolicy", "File");
    fill(container, "resources", json!({}));
    let limits: Vec<(String, Value)> =
        fields(container, "/resources/limits").map(|(name, value)| (name.clone(), value.clone())).collect();
    for (name, value) in limits {
        fill(&mut container["resources"]["requests"], &name, value);
    }
    for port in list_mut(container, "ports") {
        fill(port, "protocol", "TCP");
        if on_host {
            let number = port["containerPort"].clone();
            fill(port, "hostPort", number);
        }
    }
    for variable in list_mut(container, "env") {
        if let Some(reference) = variable.pointer_mut("/valueFrom/fieldRef") {
            fill(reference, "apiVersion", "v1");
        }
    }
    for probe in ["livenessProbe", "readinessProbe", "startupProbe"] {
        if let Some(probe) = container.get_mut(probe).filter(|probe| probe.is_object()) {
            for (key, value) in
                [("timeoutSeconds", 1), ("periodSeconds", 10), ("successThreshold", 1), ("failureThreshold", 3)]
            {
                fill(probe, key, value);
            }
            handler_defaults(probe);
        }
    }
    for hook in ["/lifecycle/postStart", "/lifecycle/preStop"] {
        container.pointer_mut(hook).into_iter().for_each(handler_defaults);
    }
}

fn handler_defaults(handler: &mut Value) {
    if let Some(get) = handler.get_mut("httpGet").filter(|get| get.is_object()) {
        fill(get, "path", "/");
        fill(get, "scheme", "HTTP");
    }
    if let Some(grpc) = handler.get_mut("grpc").filter(|grpc| grpc.is_object()) {
        fill(grpc, "service", "");
    }
}

fn volume_defaults(volume: &mut Value) {
    if volume.as_object().is_some_and(|fields| fields.len() == 1) {
        set(volume, "emptyDir", json!({}));
    }
    for source in ["secret", "configMap", "downwardAPI", "projected"] {
        if let Some(source) = volume.get_mut(source).filter(|source| source.is_object()) {
            fill(source, "defaultMode", 420);
            downward_defaults(source);
            for projection in list_mut(source, "sources") {
                projection.get_mut("downwardAPI").into_iter().for_each(downward_defaults);
                if let Some(token) = projection.get_mut("serviceAccountToken") {
                    fill(token, "expirationSeconds", 3600);
                }
            }
        }
    }
    if let Some(path) = volume.get_mut("hostPath").filter(|path| path.is_object()) {
        fill(path, "type", "");
    }
}

fn downward_defaults(source: &mut Value) {
    for item in list_mut(source, "items") {
        if let Some(reference) = item.get_mut("fieldRef") {
            fill(reference, "apiVersion", "v1");
        }
    }
}

fn add_tolerations(spec: &mut Value) {
    for key in ["node.kubernetes.io/not-ready", "node.kubernetes.io/unreachable"] {
        let tolerated = list(spec, "/tolerations").iter().any(|toleration| {
            let (of, effect) = (text(toleration, "/key"), text(toleration, "/effect"));
            (of.is_empty() || of == key) && (effect.is_empty() || effect == "NoExecute")
        });
        if !tolerated {
            let toleration = json!({"key": key, "operator": "Exists", "effect": "NoExecute", "tolerationSeconds": 300});
            fill(spec, "tolerations", json!([]));
            spec["tolerations"].as_array_mut().into_iter().for_each(|list| list.push(toleration.clone()));
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Spec 10a §4, the paragraph after the table.
    #[test]
    fn missing_pod_fields_get_their_defaults() {
        let mut pod = json!({"metadata": {}, "spec": {"hostNetwork": true,
            "containers": [{"name": "c", "image": "registry:5000/a", "ports": [{"containerPort": 80}],
                "resources": {"limits": {"cpu": "1"}}, "livenessProbe": {"httpGet": {"port": 80}},
                "env": [{"name": "n", "valueFrom": {"fieldRef": {"fieldPath": "metadata.name"}}}]}],
            "volumes": [{"name": "e"}, {"name": "h", "hostPath": {"path": "/"}}, {"name": "p", "projected": {"sources": [{"serviceAccountToken": {"path": "t"}}]}}]}});
        apply(&mut pod);
        let seconds =
            |key: &str| json!({"key": key, "operator": "Exists", "effect": "NoExecute", "tolerationSeconds": 300});
        let expected = json!({"hostNetwork": true, "restartPolicy": "Always", "terminationGracePeriodSeconds": 30,
            "dnsPolicy": "ClusterFirst", "schedulerName": "default-scheduler", "enableServiceLinks": true,
            "securityContext": {}, "priority": 0, "preemptionPolicy": "PreemptLowerPriority",
            "containers": [{"name": "c", "image": "registry:5000/a", "imagePullPolicy": "Always",
                "terminationMessagePath": "/dev/termination-log", "terminationMessagePolicy": "File",
                "ports": [{"containerPort": 80, "hostPort": 80, "protocol": "TCP"}],
                "resources": {"limits": {"cpu": "1"}, "requests": {"cpu": "1"}},
                "livenessProbe": {"httpGet": {"port": 80, "path": "/", "scheme": "HTTP"}, "timeoutSeconds": 1,
                    "periodSeconds": 10, "successThreshold": 1, "failureThreshold": 3},
                "env": [{"name": "n", "valueFrom": {"fieldRef": {"apiVersion": "v1", "fieldPath": "metadata.name"}}}]}],
            "volumes": [{"name": "e", "emptyDir": {}}, {"name": "h", "hostPath": {"path": "/", "type": ""}},
                {"name": "p", "projected": {"defaultMode": 420, "sources": [{"serviceAccountToken": {"path": "t", "expirationSeconds": 3600}}]}}],
            "tolerations": [seconds("node.kubernetes.io/not-ready"), seconds("node.kubernetes.io/unreachable")]});
        assert_eq!(pod["spec"], expected);
        let again = pod.clone();
        apply(&mut pod);
        assert_eq!(pod, again, "explicit values are kept");
    }

    #[test]
    fn the_pull_policy_follows_the_tag() {
        for (image, policy) in [
            ("a", "Always"),
            ("a:latest", "Always"),
            ("a:1", "IfNotPresent"),
            ("a@sha256:00", "IfNotPresent"),
            ("h:1/a:2", "IfNotPresent"),
        ] {
            let mut container = json!({"image": image});
            container_defaults(&mut container, false);
            assert_eq!(container["imagePullPolicy"], policy, "{image}");
        }
    }

    #[test]
    fn a_mirror_pod_gets_no_tolerations() {
        let mut pod = json!({"metadata": {"annotations": {MIRROR: "hash"}}, "spec": {"containers": []}});
        apply(&mut pod);
        assert_eq!(pod["spec"]["tolerations"], Value::Null);
    }
}
