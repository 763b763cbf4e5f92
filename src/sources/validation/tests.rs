//! Table tests of rejected values, by field and error text.

use serde_json::{Value, json};

use super::*;

#[cfg(test)]
mod container_rules;
#[cfg(test)]
mod pod_rules;
#[cfg(test)]
mod volume_rules;

/// A valid pod as the agent builds it, with one member changed (JSON pointer).
fn errors_with(pointer: &str, value: Value) -> Vec<String> {
    let mut pod = json!({
        "metadata": {"name": "web-node", "namespace": "default"},
        "spec": {
            "nodeName": "node",
            "volumes": [{"name": "v", "emptyDir": {}}],
            "initContainers": [{"name": "i", "image": "b"}],
            "containers": [{"name": "c", "image": "b", "volumeMounts": [{"name": "v", "mountPath": "/v"}]}],
        },
    });
    if !pointer.is_empty() {
        let (at, key) = pointer.rsplit_once('/').expect("a path");
        match pod.pointer_mut(at).expect("an existing parent") {
            Value::Array(items) => items[key.parse::<usize>().expect("an index")] = value,
            object => object[key] = value,
        }
    }
    let mut pod: api::Pod = serde_json::from_value(pod).expect("a pod");
    crate::sources::defaults::apply(&mut pod);
    new_pod(&pod).texts()
}

fn refused(pointer: &str, value: Value, texts: &[&str]) {
    let found = errors_with(pointer, value.clone());
    assert_eq!(found.len(), texts.len(), "{pointer} = {value}: {found:#?}");
    for (found, text) in found.iter().zip(texts) {
        assert!(found.starts_with(text), "{pointer} = {value}: {found}");
    }
}

/// Checks a pod of one container with these members of its specification; the texts follow `spec.`.
fn spec_refused(changes: Value, texts: &[&str]) {
    let mut spec = json!({"containers": [{"name": "c", "image": "b"}]});
    merge(&mut spec, changes);
    let texts: Vec<String> = texts.iter().map(|text| format!("spec.{text}")).collect();
    let texts: Vec<&str> = texts.iter().map(String::as_str).collect();
    refused("/spec", spec, &texts);
}

/// Checks a container with these members, in a pod with the volume `v`; the texts follow its path.
fn container_refused(changes: Value, texts: &[&str]) {
    let mut container = json!({"name": "c", "image": "b"});
    merge(&mut container, changes);
    let texts: Vec<String> = texts.iter().map(|text| format!("containers[0].{text}")).collect();
    let texts: Vec<&str> = texts.iter().map(String::as_str).collect();
    spec_refused(json!({"containers": [container], "volumes": [{"name": "v", "emptyDir": {}}]}), &texts);
}

/// Checks a volume of that source; the texts follow its path.
fn volume_refused(source: Value, texts: &[&str]) {
    let mut volume = json!({"name": "v"});
    merge(&mut volume, source);
    let texts: Vec<String> = texts.iter().map(|text| format!("volumes[0].{text}")).collect();
    let texts: Vec<&str> = texts.iter().map(String::as_str).collect();
    spec_refused(json!({"volumes": [volume]}), &texts);
}

fn merge(into: &mut Value, changes: Value) {
    let Value::Object(changes) = changes else { panic!("an object with members") };
    for (key, value) in changes {
        into[key] = value;
    }
}

#[test]
fn a_good_pod_passes() {
    refused("/spec/containers/0/volumeMounts/0/mountPath", json!("/a:b"), &[]);
    refused("/spec/terminationGracePeriodSeconds", json!(-5), &[]);
    refused("", Value::Null, &[]);
    refused("/spec/containers/0/livenessProbe", json!({"tcpSocket": {"port": "web"}}), &[]);
    refused(
        "/spec/containers/0/env",
        json!([{"name": "A", "valueFrom": {"fieldRef": {"fieldPath": "spec.host"}}}]),
        &[],
    );
    refused("/spec/containers/0/ports", json!([{"containerPort": 53, "protocol": "UDP"}, {"containerPort": 53}]), &[]);
}

#[test]
fn metadata() {
    refused(
        "/metadata/name",
        json!("A"),
        &["metadata.name: Invalid value: \"A\": a lowercase RFC 1123 subdomain must"],
    );
    refused("/metadata/name", json!("a".repeat(254)), &["metadata.name: Invalid value: \"aaa"]);
    refused(
        "/metadata/namespace",
        json!("a.b"),
        &["metadata.namespace: Invalid value: \"a.b\": must not contain dots"],
    );
    refused("/metadata/labels", json!({"a b": "ok"}), &["metadata.labels: Invalid value: \"a b\": name part must"]);
    refused("/metadata/labels", json!({"a": "not ok"}), &["metadata.labels: Invalid value: \"not ok\": a valid label"]);
    let large = json!({"a": "x".repeat(256 * 1024)});
    refused("/metadata/annotations", large, &["metadata.annotations: Too long: may not be more than 262144 bytes"]);
}

#[test]
fn containers() {
    let c = "spec.containers[0]";
    refused("/spec/containers", json!([]), &["spec.containers: Required value"]);
    refused("/spec/containers/0/name", json!("A"), &["spec.containers[0].name: Invalid value: \"A\""]);
    refused("/spec/containers/0/name", json!("i"), &["spec.initContainers[0].name: Duplicate value: \"i\""]);
    refused("/spec/containers/0/image", json!(""), &["spec.containers[0].image: Required value"]);
    let spaced = "spec.containers[0].image: Invalid value: \" b\": must not have leading or trailing whitespace";
    refused("/spec/containers/0/image", json!(" b"), &[spaced]);
    refused(
        "/spec/containers/0/imagePullPolicy",
        json!("Sometimes"),
        &["spec.containers[0].imagePullPolicy: Unsupported value: \"Sometimes\": supported values: \"Always\", \
           \"IfNotPresent\", \"Never\""],
    );
    refused(
        "/spec/containers/0/terminationMessagePolicy",
        json!("X"),
        &[&format!("{c}.terminationMessagePolicy: Unsupp")],
    );
    let twice = json!([{"name": "c", "image": "b"}, {"name": "c", "image": "b"}]);
    refused("/spec/containers", twice, &["spec.containers[1].name: Duplicate value: \"c\""]);
    refused(
        "/spec/ephemeralContainers",
        json!([{"name": "e", "image": "b"}]),
        &["spec.ephemeralContainers: Forbidden: cannot be set on create"],
    );
}

#[test]
fn ports() {
    let at = "spec.containers[0].ports[0]";
    let one = |port: Value| json!([port]);
    refused("/spec/containers/0/ports", one(json!({})), &[&format!("{at}.containerPort: Required value")]);
    refused(
        "/spec/containers/0/ports",
        one(json!({"containerPort": 65536})),
        &[&format!("{at}.containerPort: Invalid value: 65536: must be between 1 and 65535, inclusive")],
    );
    refused(
        "/spec/containers/0/ports",
        one(json!({"containerPort": 1, "hostPort": -1})),
        &[&format!("{at}.hostPort: Invalid value: -1")],
    );
    refused(
        "/spec/containers/0/ports",
        one(json!({"containerPort": 1, "protocol": "ICMP"})),
        &[&format!("{at}.protocol: Unsupported value: \"ICMP\": supported values: \"SCTP\", \"TCP\", \"UDP\"")],
    );
    refused(
        "/spec/containers/0/ports",
        json!([{"containerPort": 1, "hostPort": 9}, {"containerPort": 2, "hostPort": 9}]),
        &["spec.containers[0].ports[1].hostPort: Duplicate value: \"TCP//9\""],
    );
    let spec = json!({"hostNetwork": true, "containers": [
        {"name": "c", "image": "b", "ports": [{"containerPort": 1, "hostPort": 2}]}]});
    refused(
        "/spec",
        spec,
        &[
            "spec.containers[0].ports[0].hostPort: Invalid value: 2: must match `containerPort` when `hostNetwork` is true",
        ],
    );
}

#[test]
fn volumes_and_mounts() {
    refused(
        "/spec/volumes/0/name",
        json!("V"),
        &["spec.volumes[0].name: Invalid value: \"V\"", "spec.containers[0].volumeMounts[0].name: Not found: \"v\""],
    );
    let twice = json!([{"name": "v"}, {"name": "v"}]);
    refused("/spec/volumes", twice, &["spec.volumes[1].name: Duplicate value: \"v\""]);
    refused(
        "/spec/volumes/0/hostPath",
        json!({"path": "/x"}),
        &["spec.volumes[0].hostPath: Forbidden: may not specify more than 1 volume type"],
    );
    let only = |source: Value| {
        let mut volume = source;
        volume["name"] = "v".into();
        volume
    };
    for (source, text) in [
        (json!({"hostPath": {"path": "/a/../b"}}), "hostPath.path: Invalid value: \"/a/../b\": must not contain '..'"),
        (json!({"hostPath": {"path": ""}}), "hostPath.path: Required value"),
        (json!({"hostPath": {"path": "/a", "type": "Dir"}}), "hostPath.type: Unsupported value: \"Dir\""),
        (json!({"emptyDir": {"sizeLimit": "-1"}}), "emptyDir.sizeLimit: Forbidden: SizeLimit field must be a valid"),
        (
            json!({"downwardAPI": {"defaultMode": 512}}),
            "downwardAPI.defaultMode: Invalid value: 512: must be a number between 0 and 0777 (octal), both inclusive",
        ),
        (
            json!({"downwardAPI": {"items": [{"path": "../a", "fieldRef": {"fieldPath": "metadata.name"}}]}}),
            "downwardAPI.items[0].path: Invalid value: \"../a\": must not contain '..'",
        ),
        (
            json!({"downwardAPI": {"items": [{"path": "..a", "fieldRef": {"fieldPath": "metadata.name"}}]}}),
            "downwardAPI.items[0].path: Invalid value: \"..a\": must not start with '..'",
        ),
        (
            json!({"downwardAPI": {"items": [{"path": "a", "fieldRef": {"fieldPath": "status.podIP"}}]}}),
            "downwardAPI.items[0].fieldRef.fieldPath: Unsupported value: \"status.podIP\"",
        ),
        (json!({"downwardAPI": {"items": [{"path": "a"}]}}), "downwardAPI.items[0]: Required value: one of"),
        (json!({"nfs": {"server": "s", "path": "p"}}), "nfs.path: Invalid value: \"p\": must be an absolute path"),
    ] {
        refused("/spec/volumes/0", only(source), &[&format!("spec.volumes[0].{text}")]);
    }
    let at = "spec.containers[0].volumeMounts[0]";
    for (mount, text) in [
        (json!({"mountPath": ""}), "mountPath: Required value"),
        (json!({"mountPath": "/a", "subPath": "/x"}), "subPath: Invalid value: \"/x\": must be a relative path"),
        (json!({"mountPath": "/a", "subPath": "a/../b"}), "subPath: Invalid value: \"a/../b\": must not contain '..'"),
        (
            json!({"mountPath": "/a", "subPath": "a", "subPathExpr": "b"}),
            "subPathExpr: Invalid value: \"b\": subPathExpr",
        ),
        (json!({"mountPath": "/a", "mountPropagation": "Bidirectional"}), "mountPropagation: Forbidden: Bidirectional"),
        (json!({"mountPath": "/a", "mountPropagation": "X"}), "mountPropagation: Unsupported value: \"X\""),
        (json!({"mountPath": "/a", "recursiveReadOnly": "Enabled"}), "recursiveReadOnly: Forbidden: may only"),
    ] {
        refused("/spec/containers/0/volumeMounts/0", only(mount), &[&format!("{at}.{text}")]);
    }
    let twice = json!([{"name": "v", "mountPath": "/a"}, {"name": "v", "mountPath": "/a"}]);
    refused(
        "/spec/containers/0/volumeMounts",
        twice,
        &["spec.containers[0].volumeMounts[1].mountPath: Invalid value: \"/a\": must be unique"],
    );
}

#[test]
fn environment() {
    let at = "spec.containers[0].env[0]";
    for (env, text) in [
        (json!({"name": ""}), "name: Required value"),
        (json!({"name": "A=B"}), "name: Invalid value: \"A=B\": a valid environment variable name must"),
        (
            json!({"name": "A", "value": "x", "valueFrom": {"fieldRef": {"fieldPath": "metadata.name"}}}),
            "valueFrom: Invalid value: \"\": may not be specified when `value` is not empty",
        ),
        (json!({"name": "A", "valueFrom": {}}), "valueFrom: Invalid value: \"\": must specify one of: `fieldRef`"),
        (
            json!({"name": "A", "valueFrom": {"fieldRef": {"fieldPath": "spec.x"}}}),
            "valueFrom.fieldRef.fieldPath: Invalid value: \"spec.x\": error converting fieldPath: field label not supported",
        ),
        (
            json!({"name": "A", "valueFrom": {"resourceFieldRef": {"resource": "x"}}}),
            "valueFrom.resourceFieldRef.resource: Unsupported value: \"x\"",
        ),
    ] {
        refused("/spec/containers/0/env", json!([env]), &[&format!("{at}.{text}")]);
    }
}

#[test]
fn resources() {
    let at = "/spec/containers/0/resources";
    refused(
        at,
        json!({"requests": {"cpu": "2"}, "limits": {"cpu": "1"}}),
        &["spec.containers[0].resources.requests: Invalid value: \"2\": must be less than or equal to cpu limit of 1"],
    );
    refused(
        at,
        json!({"requests": {"memory": "-1"}}),
        &["spec.containers[0].resources.requests[memory]: Invalid value: \"-1\": must be greater than or equal to 0"],
    );
    refused(
        at,
        json!({"requests": {"gpus": "1"}}),
        &[
            "spec.containers[0].resources.requests[gpus]: Invalid value: \"gpus\": must be a standard resource type or",
            "spec.containers[0].resources.requests[gpus]: Invalid value: \"gpus\": must be a standard resource for",
        ],
    );
    refused(
        at,
        json!({"requests": {"example.com/a": "1"}}),
        &["spec.containers[0].resources.limits: Required value: Limit must be set for non overcommitable resources"],
    );
    refused(
        "/spec/resources",
        json!({"limits": {"ephemeral-storage": "1"}}),
        &["spec.resources.limits[ephemeral-storage]"],
    );
}

#[test]
fn probes_and_hooks() {
    let liveness = "/spec/containers/0/livenessProbe";
    let at = "spec.containers[0].livenessProbe";
    refused(
        liveness,
        json!({"exec": {"command": ["a"]}, "successThreshold": 2}),
        &[&format!("{at}.successThreshold: Invalid value: 2: must be 1")],
    );
    refused(liveness, json!({}), &[&format!("{at}: Required value: must specify a handler type")]);
    refused(liveness, json!({"exec": {}}), &[&format!("{at}.exec.command: Required value")]);
    refused(
        liveness,
        json!({"exec": {"command": ["a"]}, "tcpSocket": {"port": 1}}),
        &[&format!("{at}.tcpSocket: Forbidden: may not specify more than 1 handler type")],
    );
    refused(liveness, json!({"httpGet": {"port": 0}}), &[&format!("{at}.httpGet.port: Invalid value: 0")]);
    refused(liveness, json!({"httpGet": {"port": 1, "scheme": "FTP"}}), &[&format!("{at}.httpGet.scheme: Unsupp")]);
    refused(liveness, json!({"exec": {"command": ["a"]}, "periodSeconds": -1}), &[&format!("{at}.periodSeconds: Inv")]);
    refused(
        "/spec/containers/0/startupProbe",
        json!({"tcpSocket": {"port": 1}, "successThreshold": 3}),
        &["spec.containers[0].startupProbe.successThreshold: Invalid value: 3"],
    );
    refused("/spec/containers/0/readinessProbe", json!({"tcpSocket": {"port": 1}, "successThreshold": 3}), &[]);
    refused(
        "/spec/containers/0/lifecycle",
        json!({"preStop": {"sleep": {"seconds": 31}}}),
        &["spec.containers[0].lifecycle.preStop.sleep: Invalid value: 31: must be non-negative and less than \
           terminationGracePeriodSeconds (30)"],
    );
    for member in ["livenessProbe", "readinessProbe", "startupProbe", "lifecycle"] {
        let value = if member == "lifecycle" { json!({}) } else { json!({"tcpSocket": {"port": 1}}) };
        let text = format!(
            "spec.initContainers[0].{member}: Forbidden: may not be set for init containers without restartPolicy=Always"
        );
        refused(&format!("/spec/initContainers/0/{member}"), value.clone(), &[&text]);
    }
    let sidecar =
        json!({"name": "i", "image": "b", "restartPolicy": "Always", "livenessProbe": {"tcpSocket": {"port": 1}}});
    refused("/spec/initContainers/0", sidecar, &[]);
}

#[test]
fn restart_rules() {
    let rule = json!({"action": "Restart", "exitCodes": {"operator": "In", "values": [1]}});
    let at = "spec.containers[0].restartPolicyRules";
    let with = |policy: Value, rules: Value| json!({"name": "c", "image": "b", "restartPolicy": policy, "restartPolicyRules": rules});
    let check = |container: Value, texts: &[&str]| refused("/spec/containers/0", container, texts);
    check(with(json!("Never"), json!([rule])), &[]);
    check(with(Value::Null, json!([rule])), &["spec.containers[0].restartPolicy: Required value: must specify"]);
    check(with(json!("Maybe"), json!([])), &["spec.containers[0].restartPolicy: Unsupported value: \"Maybe\""]);
    check(with(json!("Never"), json!(vec![rule.clone(); 21])), &[&format!("{at}: Too many: 21")]);
    check(with(json!("Never"), json!([{"action": "Restart"}])), &[&format!("{at}[0].exitCodes: Required value")]);
    check(
        with(json!("Never"), json!([{"action": "Stop", "exitCodes": {"operator": "In", "values": [1]}}])),
        &[&format!("{at}[0].action: Unsupported value: \"Stop\"")],
    );
    check(
        with(json!("Never"), json!([{"action": "Restart", "exitCodes": {"operator": "Is", "values": [1]}}])),
        &[&format!("{at}[0].exitCodes.operator: Unsupported value: \"Is\"")],
    );
    let codes: Vec<i32> = (0..256).collect();
    check(
        with(json!("Never"), json!([{"action": "Restart", "exitCodes": {"operator": "In", "values": codes}}])),
        &[&format!("{at}[0].exitCodes.values: Too many: 256")],
    );
}

#[test]
fn pod_fields() {
    for (field, value, text) in [
        (
            "restartPolicy",
            json!("Maybe"),
            "restartPolicy: Unsupported value: \"Maybe\": supported values: \"Always\", \"OnFailure\", \"Never\"",
        ),
        ("dnsPolicy", json!("X"), "dnsPolicy: Unsupported value: \"X\""),
        ("dnsPolicy", json!("None"), "dnsConfig: Required value: must provide `dnsConfig` when `dnsPolicy` is None"),
        (
            "activeDeadlineSeconds",
            json!(0),
            "activeDeadlineSeconds: Invalid value: 0: must be between 1 and 2147483647",
        ),
        ("activeDeadlineSeconds", json!(2_147_483_648_i64), "activeDeadlineSeconds: Invalid value: 2147483648"),
        ("schedulingGates", json!([{"name": "g"}]), "nodeName: Forbidden: cannot be set until all schedulingGates"),
        ("hostname", json!("A"), "hostname: Invalid value: \"A\""),
        ("hostAliases", json!([{"ip": "x"}]), "hostAliases[0].ip: Invalid value: \"x\""),
        (
            "tolerations",
            json!([{"operator": "Equal"}]),
            "tolerations[0].operator: Invalid value: \"Equal\": operator must be",
        ),
        ("securityContext", json!({"runAsUser": -1}), "securityContext.runAsUser: Invalid value: -1"),
        (
            "securityContext",
            json!({"seccompProfile": {"type": "X"}}),
            "securityContext.seccompProfile.type: Unsupported",
        ),
    ] {
        refused(&format!("/spec/{field}"), value, &[&format!("spec.{text}")]);
    }
}

#[test]
fn annotations_and_fields_of_profiles_agree() {
    let with = |annotations: Value, security: Value| {
        let mut pod: api::Pod = serde_json::from_value(json!({
            "metadata": {"name": "a", "namespace": "b", "annotations": annotations},
            "spec": {"containers": [{"name": "c", "image": "b", "securityContext": security}]},
        }))
        .expect("a pod");
        crate::sources::defaults::apply(&mut pod);
        new_pod(&pod).texts()
    };
    let seccomp = json!({"container.seccomp.security.alpha.kubernetes.io/c": "runtime/default"});
    assert_eq!(with(seccomp.clone(), json!({"seccompProfile": {"type": "RuntimeDefault"}})), Vec::<String>::new());
    assert_eq!(
        with(seccomp, json!({"seccompProfile": {"type": "Unconfined"}})),
        [
            "spec.containers[0].securityContext.seccompProfile.type: Forbidden: seccomp type in annotation and field must match"
        ]
    );
    let apparmor = json!({"container.apparmor.security.beta.kubernetes.io/c": "localhost/a"});
    assert_eq!(
        with(apparmor, json!({"appArmorProfile": {"type": "Localhost", "localhostProfile": "b"}})),
        [
            "spec.containers[0].securityContext.appArmorProfile.localhostProfile: Forbidden: apparmor profile in annotation \
          and field must match"
        ]
    );
}

#[test]
fn profiles_are_named_as_what_they_are() {
    for (field, what) in [("seccompProfile", "seccomp"), ("appArmorProfile", "AppArmor")] {
        let at = format!("spec.containers[0].securityContext.{field}.localhostProfile");
        for (profile, text) in [
            (json!({"type": "Localhost"}), format!("{at}: Required value: must be set when {what} type is Localhost")),
            (
                json!({"type": "RuntimeDefault", "localhostProfile": "p"}),
                format!("{at}: Invalid value: \"p\": can only be set when {what} type is Localhost"),
            ),
        ] {
            refused("/spec/containers/0/securityContext", json!({field: profile}), &[&text]);
        }
    }
}

#[test]
fn what_the_reference_accepts_passes() {
    let rule = json!({"action": "Restart", "exitCodes": {"operator": "In", "values": []}});
    let container = json!({"name": "c", "image": "b", "restartPolicy": "Never", "restartPolicyRules": [rule]});
    refused("/spec/containers/0", container, &[]);
    let sysctls = json!({"sysctls": [{"name": "a.b", "value": "1"}, {"name": "a/b", "value": "1"}]});
    refused("/spec/securityContext", sysctls, &[]);
    refused("/spec/volumes/0", json!({"name": "v", "image": {"reference": ""}}), &[]);
}

#[test]
#[allow(clippy::too_many_lines, reason = "a table")]
fn errors_name_the_field() {
    let wide = |changes: Value| {
        let mut spec = json!({"containers": [{"name": "c", "image": "b"}]});
        for (key, value) in changes.as_object().expect("an object") {
            spec[key] = value.clone();
        }
        spec
    };
    let container = |member: &str, value: Value| json!({"containers": [{"name": "c", "image": "b", member: value}]});
    let stop = |os: Value| {
        let mut spec = container("lifecycle", json!({"stopSignal": "SIGFOO"}));
        spec["os"] = os;
        spec
    };
    let unmasked = json!({"procMount": "Unmasked"});
    let local =
        |field: &str, name: &str| json!({"securityContext": {field: {"type": "Localhost", "localhostProfile": name}}});
    let node = |required: Value| json!({"affinity": {"nodeAffinity": {REQUIRED: required}}});
    let pods = |term: Value| json!({"affinity": {"podAntiAffinity": {REQUIRED: [term]}}});
    let spread = |one: Value| json!({"topologySpreadConstraints": [one]});
    let item = json!({"downwardAPI": {"items": [{"path": "a", "fieldRef": {"fieldPath": "metadata.name"}}]}});
    for (changes, texts) in [
        (
            stop(Value::Null),
            vec![
                "containers[0].lifecycle.stopSignal: Forbidden: may not be set for containers with empty `spec.os.name`",
            ],
        ),
        (
            stop(json!({"name": "linux"})),
            vec!["containers[0].lifecycle.stopSignal: Unsupported value: \"SIGFOO\": supported values: \"SIGABRT\""],
        ),
        (
            container("securityContext", unmasked),
            vec![
                "containers[0].securityContext.procMount: Invalid value: \"Unmasked\": `hostUsers` must be false to use",
            ],
        ),
        (
            json!({"hostUsers": false, "hostPID": true, "hostIPC": true}),
            vec!["hostPID: Forbidden: when `hostUsers` is false", "hostIPC: Forbidden: when `hostUsers` is false"],
        ),
        (
            json!({"shareProcessNamespace": true, "hostPID": true}),
            vec![
                "securityContext.shareProcessNamespace: Invalid value: true: ShareProcessNamespace and HostPID cannot both \
                 be enabled",
            ],
        ),
        (
            local("seccompProfile", "../x"),
            vec!["securityContext.seccompProfile.localhostProfile: Invalid value: \"../x\": must not contain '..'"],
        ),
        (local("appArmorProfile", "../x"), vec![]),
        (
            json!({"dnsConfig": {"nameservers": ["1.1.1.1", "1.1.1.2", "1.1.1.3", "1.1.1.4"]}}),
            vec![
                "dnsConfig.nameservers: Invalid value: [\"1.1.1.1\",\"1.1.1.2\",\"1.1.1.3\",\"1.1.1.4\"]: must not have \
                 more than 3 nameservers",
            ],
        ),
        (
            container("resources", json!({"limits": {"example.com/x": "1.5"}})),
            vec![
                "containers[0].resources.limits[example.com/x]: Invalid value: \"1500m\": must be an integer",
                "containers[0].resources.requests[example.com/x]: Invalid value: \"1500m\": must be an integer",
            ],
        ),
        (container("resources", json!({"limits": {"example.com/x": "2"}})), vec![]),
        (
            container("resizePolicy", json!([{"resourceName": "x", "restartPolicy": "NotRequired"}])),
            vec!["containers[0].resizePolicy: Unsupported value: \"x\": supported values: \"cpu\", \"memory\""],
        ),
        (
            node(json!({"nodeSelectorTerms": []})),
            vec![
                "affinity.nodeAffinity.requiredDuringSchedulingIgnoredDuringExecution.nodeSelectorTerms: Required value: \
                 must have at least one node selector term",
            ],
        ),
        (
            node(
                json!({"nodeSelectorTerms": [{"matchExpressions": [{"key": "a", "operator": "Gt", "values": ["1"]}]}]}),
            ),
            vec![],
        ),
        (
            pods(json!({"topologyKey": ""})),
            vec![
                "affinity.podAntiAffinity.requiredDuringSchedulingIgnoredDuringExecution[0].topologyKey: Required value: \
                 can not be empty",
                "affinity.podAntiAffinity.requiredDuringSchedulingIgnoredDuringExecution[0].topologyKey: Invalid value: \"\"",
                "affinity.podAntiAffinity.requiredDuringSchedulingIgnoredDuringExecution[0].topologyKey: Invalid value: \"\"",
            ],
        ),
        (pods(json!({"topologyKey": "kubernetes.io/hostname"})), vec![]),
        (
            spread(json!({"maxSkew": 0, "topologyKey": "a", "whenUnsatisfiable": "DoNotSchedule"})),
            vec!["topologySpreadConstraints[0].maxSkew: Invalid value: 0: must be greater than zero"],
        ),
        (spread(json!({"maxSkew": 1, "topologyKey": "a", "whenUnsatisfiable": "DoNotSchedule"})), vec![]),
        (
            json!({"volumes": [{"name": "p", "projected": {"sources": [item, item]}}]}),
            vec!["volumes[0].projected: Invalid value: \"a\": conflicting duplicate paths"],
        ),
    ] {
        let texts: Vec<String> = texts.into_iter().map(|text| format!("spec.{text}")).collect();
        let texts: Vec<&str> = texts.iter().map(String::as_str).collect();
        refused("/spec", wide(changes), &texts);
    }
}

const REQUIRED: &str = "requiredDuringSchedulingIgnoredDuringExecution";
