//! API defaults of static pods. Pure. Implements spec 02a §1.3.
//!
//! Only defaults that a pod on a node needs; those of volume types that a static pod must not use are
//! omitted. They are part of the hash that becomes a static pod's UID: see [`super::static_pod`] before
//! changing anything.

use std::collections::BTreeMap;

use k8s_openapi::apimachinery::pkg::api::resource::Quantity;

use berth_types::{api, quantity::Amount, resources, volume};

type Amounts = BTreeMap<String, Quantity>;

/// Default mode of files in atomic volumes.
const FILE_MODE: i32 = 0o644;
/// Default lifetime of a projected token, in seconds.
const TOKEN_SECONDS: i64 = 3600;

/// Applies all defaults. Idempotent.
pub fn apply(pod: &mut api::Pod) {
    let spec = pod.spec.get_or_insert_default();
    fill(&mut spec.restart_policy, "Always");
    fill(&mut spec.dns_policy, "ClusterFirst");
    fill(&mut spec.scheduler_name, "default-scheduler");
    spec.termination_grace_period_seconds.get_or_insert(30);
    spec.security_context.get_or_insert_default();
    spec.enable_service_links.get_or_insert(true);
    // The deprecated field is an alias of the same value.
    let account = [&spec.service_account_name, &spec.service_account];
    let account = account.into_iter().flatten().find(|name| !name.is_empty()).cloned();
    spec.service_account_name.clone_from(&account);
    spec.service_account = account;

    let host_network = spec.host_network == Some(true);
    for one in spec.containers.iter_mut().chain(spec.init_containers.iter_mut().flatten()) {
        container(one, host_network);
    }
    for one in spec.ephemeral_containers.iter_mut().flatten() {
        fill(&mut one.termination_message_path, "/dev/termination-log");
        fill(&mut one.termination_message_policy, "File");
        let policy = pull_policy(one.image.as_deref().unwrap_or_default());
        fill(&mut one.image_pull_policy, policy);
    }
    spec.volumes.iter_mut().flatten().for_each(a_volume);
    round(spec.overhead.as_mut());
    if let Some(resources) = spec.resources.as_mut() {
        round(resources.limits.as_mut());
        round(resources.requests.as_mut());
    }
    resources::default_pod_level(spec);
}

fn container(one: &mut api::Container, host_network: bool) {
    fill(&mut one.termination_message_path, "/dev/termination-log");
    fill(&mut one.termination_message_policy, "File");
    let policy = pull_policy(one.image.as_deref().unwrap_or_default());
    fill(&mut one.image_pull_policy, policy);
    for port in one.ports.iter_mut().flatten() {
        fill(&mut port.protocol, "TCP");
        if host_network && port.host_port.unwrap_or(0) == 0 {
            port.host_port = Some(port.container_port);
        }
    }
    if let Some(resources) = one.resources.as_mut() {
        round(resources.limits.as_mut());
        round(resources.requests.as_mut());
        requests_from_limits(resources);
    }
    for each in [&mut one.liveness_probe, &mut one.readiness_probe, &mut one.startup_probe].into_iter().flatten() {
        probe(each);
    }
    if let Some(hooks) = one.lifecycle.as_mut() {
        for hook in [&mut hooks.post_start, &mut hooks.pre_stop].into_iter().flatten() {
            hook.http_get.iter_mut().for_each(http_get);
        }
    }
    for variable in one.env.iter_mut().flatten() {
        if let Some(field) = variable.value_from.as_mut().and_then(|from| from.field_ref.as_mut()) {
            fill(&mut field.api_version, "v1");
        }
    }
}

/// `Always` for the tag `latest` and for an image without tag and digest, else `IfNotPresent`.
fn pull_policy(image: &str) -> &'static str {
    if image.contains('@') {
        return "IfNotPresent";
    }
    let last = image.rsplit('/').next().unwrap_or_default();
    match last.split_once(':') {
        None if !image.is_empty() => "Always",
        Some((_, "latest")) => "Always",
        _ => "IfNotPresent",
    }
}

fn probe(probe: &mut api::Probe) {
    let at_least = |value: &mut Option<i32>, default| {
        if value.unwrap_or(0) == 0 {
            *value = Some(default);
        }
    };
    at_least(&mut probe.timeout_seconds, 1);
    at_least(&mut probe.period_seconds, 10);
    at_least(&mut probe.success_threshold, 1);
    at_least(&mut probe.failure_threshold, 3);
    probe.http_get.iter_mut().for_each(http_get);
    if let Some(grpc) = probe.grpc.as_mut() {
        grpc.service.get_or_insert_default();
    }
}

fn http_get(action: &mut api::HTTPGetAction) {
    fill(&mut action.path, "/");
    fill(&mut action.scheme, "HTTP");
}

fn a_volume(one: &mut api::Volume) {
    if volume::kinds(one).is_empty() {
        one.empty_dir = Some(api::EmptyDirVolumeSource::default());
    }
    if let Some(source) = one.secret.as_mut() {
        source.default_mode.get_or_insert(FILE_MODE);
    }
    if let Some(source) = one.config_map.as_mut() {
        source.default_mode.get_or_insert(FILE_MODE);
    }
    if let Some(source) = one.downward_api.as_mut() {
        source.default_mode.get_or_insert(FILE_MODE);
        downward_items(source.items.as_mut());
    }
    if let Some(source) = one.host_path.as_mut() {
        source.type_.get_or_insert_default();
    }
    if let Some(source) = one.image.as_mut() {
        let policy = pull_policy(source.reference.as_deref().unwrap_or_default());
        fill(&mut source.pull_policy, policy);
    }
    if let Some(source) = one.iscsi.as_mut() {
        fill(&mut source.iscsi_interface, "default");
    }
    if let Some(source) = one.empty_dir.as_mut()
        && let Some(limit) = source.size_limit.as_mut()
    {
        canonical(limit);
    }
    if let Some(source) = one.projected.as_mut() {
        source.default_mode.get_or_insert(FILE_MODE);
        for part in source.sources.iter_mut().flatten() {
            if let Some(token) = part.service_account_token.as_mut() {
                token.expiration_seconds.get_or_insert(TOKEN_SECONDS);
            }
            downward_items(part.downward_api.as_mut().and_then(|d| d.items.as_mut()));
        }
    }
}

fn downward_items(items: Option<&mut Vec<api::DownwardAPIVolumeFile>>) {
    for item in items.into_iter().flatten() {
        if let Some(field) = item.field_ref.as_mut() {
            fill(&mut field.api_version, "v1");
        }
    }
}

/// Each missing request defaults to the limit of the same resource.
fn requests_from_limits(resources: &mut api::ResourceRequirements) {
    let Some(limits) = resources.limits.as_ref().filter(|limits| !limits.is_empty()) else { return };
    let requests = resources.requests.get_or_insert_default();
    for (name, amount) in limits {
        requests.entry(name.clone()).or_insert_with(|| amount.clone());
    }
}

fn round(amounts: Option<&mut Amounts>) {
    amounts.into_iter().flat_map(BTreeMap::values_mut).for_each(canonical);
}

fn canonical(quantity: &mut Quantity) {
    if let Ok(amount) = Amount::try_from(&*quantity) {
        *quantity = amount.rounded_to_milli().into();
    }
}

fn fill(value: &mut Option<String>, default: &str) {
    if value.as_deref().unwrap_or_default().is_empty() {
        *value = Some(default.to_owned());
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::{Value, json};

    fn defaulted(spec: Value) -> Value {
        let mut pod: api::Pod = serde_json::from_value(json!({"spec": spec})).expect("a pod");
        apply(&mut pod);
        let once = pod.clone();
        apply(&mut pod);
        assert_eq!(pod, once, "defaults are idempotent");
        serde_json::to_value(pod).expect("JSON")["spec"].take()
    }

    #[test]
    fn a_bare_pod_gets_all_defaults() {
        assert_eq!(
            defaulted(json!({"containers": [{"name": "c", "image": "busybox"}]})),
            json!({
                "containers": [{"image": "busybox", "imagePullPolicy": "Always", "name": "c",
                    "terminationMessagePath": "/dev/termination-log", "terminationMessagePolicy": "File"}],
                "dnsPolicy": "ClusterFirst", "enableServiceLinks": true, "restartPolicy": "Always",
                "schedulerName": "default-scheduler", "securityContext": {}, "terminationGracePeriodSeconds": 30,
            })
        );
    }

    #[test]
    fn the_pull_policy_follows_the_tag() {
        for (image, policy) in [
            ("busybox", "Always"),
            ("busybox:latest", "Always"),
            ("busybox:1.36", "IfNotPresent"),
            ("registry:5000/busybox", "Always"),
            ("registry:5000/busybox:1", "IfNotPresent"),
            ("busybox@sha256:abc", "IfNotPresent"),
            ("busybox:latest@sha256:abc", "IfNotPresent"),
            ("", "IfNotPresent"),
        ] {
            assert_eq!(pull_policy(image), policy, "{image}");
        }
    }

    #[test]
    fn missing_requests_are_the_limits_and_quantities_are_canonical() {
        let resources = json!({"limits": {"cpu": "0.0005", "memory": "1024Mi"}, "requests": {"memory": "1Mi"}});
        let spec = defaulted(json!({"containers": [{"name": "c", "resources": resources}]}));
        assert_eq!(
            spec["containers"][0]["resources"],
            json!({"limits": {"cpu": "1m", "memory": "1Gi"}, "requests": {"cpu": "1m", "memory": "1Mi"}})
        );
    }

    #[test]
    fn pod_level_requests_come_from_containers_then_from_limits() {
        let spec = defaulted(json!({
            "resources": {"limits": {"cpu": "4", "memory": "2Gi", "hugepages-2Mi": "4Mi"}},
            "containers": [{"name": "c", "resources": {"requests": {"cpu": "1"}}}],
            "initContainers": [
                {"name": "s", "restartPolicy": "Always", "resources": {"requests": {"cpu": "500m"}}},
                {"name": "i", "resources": {"requests": {"cpu": "2"}}}],
        }));
        assert_eq!(spec["resources"]["requests"], json!({"cpu": "2500m", "memory": "2Gi", "hugepages-2Mi": "4Mi"}));
    }

    #[test]
    fn ports_probes_hooks_and_references() {
        let spec = defaulted(json!({"hostNetwork": true, "serviceAccount": "sa", "containers": [{
            "name": "c", "ports": [{"containerPort": 80}],
            "livenessProbe": {"httpGet": {"port": 8080}, "periodSeconds": 0},
            "readinessProbe": {"grpc": {"port": 1}, "failureThreshold": 9},
            "lifecycle": {"preStop": {"httpGet": {"port": "web"}}},
            "env": [{"name": "A", "valueFrom": {"fieldRef": {"fieldPath": "metadata.name"}}}],
        }]}));
        let c = &spec["containers"][0];
        assert_eq!(c["ports"][0], json!({"containerPort": 80, "hostPort": 80, "protocol": "TCP"}));
        assert_eq!(
            c["livenessProbe"],
            json!({"failureThreshold": 3, "httpGet": {"path": "/", "port": 8080, "scheme": "HTTP"},
                   "periodSeconds": 10, "successThreshold": 1, "timeoutSeconds": 1})
        );
        assert_eq!(c["readinessProbe"]["grpc"], json!({"port": 1, "service": ""}));
        assert_eq!(c["readinessProbe"]["failureThreshold"], 9);
        assert_eq!(c["lifecycle"]["preStop"]["httpGet"]["scheme"], "HTTP");
        assert_eq!(c["env"][0]["valueFrom"]["fieldRef"]["apiVersion"], "v1");
        assert_eq!(spec["serviceAccountName"], "sa");
    }

    #[test]
    fn volumes() {
        let spec = defaulted(json!({"containers": [], "volumes": [
            {"name": "none"}, {"name": "h", "hostPath": {"path": "/x"}}, {"name": "d", "downwardAPI": {}},
            {"name": "s", "secret": {"defaultMode": 256}}, {"name": "i", "image": {"reference": "a:1"}},
            {"name": "p", "projected": {"sources": [{"serviceAccountToken": {"path": "t"}}]}}]}));
        let v = &spec["volumes"];
        assert_eq!(v[0]["emptyDir"], json!({}));
        assert_eq!(v[1]["hostPath"]["type"], "");
        assert_eq!(v[2]["downwardAPI"]["defaultMode"], 420);
        assert_eq!(v[3]["secret"]["defaultMode"], 256);
        assert_eq!(v[4]["image"]["pullPolicy"], "IfNotPresent");
        assert_eq!(v[5]["projected"]["sources"][0]["serviceAccountToken"]["expirationSeconds"], 3600);
    }
}
