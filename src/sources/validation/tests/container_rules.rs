//! Table tests of containers: ports, environment, resources, security, mounts, probes, and hooks.

use serde_json::{Value, json};

use super::{container_refused, spec_refused};

#[test]
fn names_and_enumerations() {
    container_refused(json!({"name": ""}), &["name: Required value"]);
    container_refused(
        json!({"terminationMessagePolicy": "X"}),
        &["terminationMessagePolicy: Unsupported value: \"X\": supported values: \"File\", \"FallbackToLogsOnError\""],
    );
    container_refused(
        json!({"restartPolicy": ""}),
        &["restartPolicy: Unsupported value: \"\": supported values: \"Always\", \"Never\", \"OnFailure\""],
    );
    let empty = json!([{"action": "", "exitCodes": {"operator": "", "values": [1]}}]);
    container_refused(
        json!({"restartPolicy": "Never", "restartPolicyRules": empty}),
        &[
            "restartPolicyRules[0].action: Unsupported value: \"\": supported values: \"Restart\", \"RestartAllContainers\"",
            "restartPolicyRules[0].exitCodes.operator: Unsupported value: \"\": supported values: \"In\", \"NotIn\"",
        ],
    );
}

#[test]
fn resize_policies() {
    let policy = |resource: &str, restart: &str| json!({"resourceName": resource, "restartPolicy": restart});
    let restarts = json!([policy("cpu", "RestartContainer")]);
    container_refused(json!({"resizePolicy": restarts}), &[]);
    container_refused(
        json!({"resizePolicy": [policy("cpu", "NotRequired"), policy("cpu", "NotRequired")]}),
        &["resizePolicy[1]: Duplicate value: \"cpu\""],
    );
    container_refused(
        json!({"resizePolicy": [policy("", "X")]}),
        &[
            "resizePolicy: Required value",
            "resizePolicy: Unsupported value: \"X\": supported values: \"NotRequired\", \"RestartContainer\"",
        ],
    );
    let container = json!({"name": "c", "image": "b", "resizePolicy": restarts});
    spec_refused(
        json!({"restartPolicy": "Never", "containers": [container]}),
        &["containers[0].resizePolicy: Invalid value: \"RestartContainer\": must be 'NotRequired' when pod \
           `restartPolicy` is 'Never'"],
    );
    let init = |policy: Value| json!([{"name": "i", "image": "b", "restartPolicy": policy, "resizePolicy": restarts}]);
    spec_refused(json!({"initContainers": init(json!("Always"))}), &[]);
    spec_refused(
        json!({"initContainers": init(Value::Null)}),
        &["initContainers[0].resizePolicy[0].restartPolicy: Invalid value: \"RestartContainer\": must not be set to \
           'RestartContainer' for non-sidecar initContainers"],
    );
}

#[test]
fn names_of_ports() {
    let port = |name: &str, number: i32| json!({"name": name, "containerPort": number});
    container_refused(json!({"ports": [port("a", 1), port("", 2), port("", 3)]}), &[]);
    container_refused(json!({"ports": [port("a", 1), port("a", 2)]}), &["ports[1].name: Duplicate value: \"a\""]);
    let text = "ports[0].name: Invalid value: \"80\": must contain at least one letter (a-z)";
    container_refused(json!({"ports": [port("80", 1)]}), &[text]);
    let host = json!({"containerPort": 1, "hostPort": 9});
    let init = |name: &str, ports: Value| json!({"name": name, "image": "b", "ports": ports});
    spec_refused(json!({"initContainers": [init("i", json!([host])), init("j", json!([host]))]}), &[]);
    spec_refused(
        json!({"initContainers": [init("i", json!([host, host]))]}),
        &["initContainers[0].ports[1].hostPort: Duplicate value: \"TCP//9\""],
    );
}

#[test]
fn values_from_elsewhere() {
    let check = |from: Value, text: &str| {
        let text = format!("env[0].valueFrom.{text}");
        container_refused(json!({"env": [{"name": "A", "valueFrom": from}]}), &[&text]);
    };
    let name = json!({"fieldPath": "metadata.name"});
    container_refused(
        json!({"env": [{"name": "A", "value": "x", "valueFrom": {}}]}),
        &["env[0].valueFrom: Invalid value: \"\": must specify one of: `fieldRef`"],
    );
    container_refused(
        json!({"env": [{"name": "A", "valueFrom": {"fieldRef": name, "resourceFieldRef": {"resource": "limits.cpu"}}}]}),
        &["env[0].valueFrom: Invalid value: \"\": may not have more than one field specified at a time"],
    );
    for path in ["metadata.labels['a']", "metadata.annotations['A/b']", "spec.host", "status.hostIPs"] {
        container_refused(json!({"env": [{"name": "A", "valueFrom": {"fieldRef": {"fieldPath": path}}}]}), &[]);
    }
    for (field, text) in [
        (json!({"fieldPath": ""}), "fieldPath: Required value"),
        (
            json!({"fieldPath": "metadata.name", "apiVersion": "v2"}),
            "fieldPath: Invalid value: \"metadata.name\": error converting fieldPath: unsupported pod version: v2",
        ),
        (
            json!({"fieldPath": "metadata.name['a']"}),
            "fieldPath: Invalid value: \"metadata.name['a']\": error converting fieldPath: field label does not support \
             subscript: metadata.name['a']",
        ),
        (
            json!({"fieldPath": "status.phase"}),
            "fieldPath: Unsupported value: \"status.phase\": supported values: \"meta",
        ),
        (json!({"fieldPath": "metadata.labels"}), "fieldPath: Unsupported value: \"metadata.labels\""),
    ] {
        check(json!({"fieldRef": field}), &format!("fieldRef.{text}"));
    }
    check(
        json!({"fieldRef": {"fieldPath": "metadata.labels['a b']"}}),
        "fieldRef: Invalid value: \"a b\": name part must consist",
    );
    for (member, name, key, text) in [
        ("configMapKeyRef", "A", "k", "name: Invalid value: \"A\": a lowercase RFC 1123 subdomain must"),
        ("secretKeyRef", "s", "", "key: Required value"),
        ("secretKeyRef", "s", "a b", "key: Invalid value: \"a b\": a valid config key must consist of"),
        ("secretKeyRef", "s", "..", "key: Invalid value: \"..\": must not be '..'"),
    ] {
        check(json!({member: {"name": name, "key": key}}), &format!("{member}.{text}"));
    }
}

#[test]
fn values_from_files() {
    let file = |key: &str, volume: &str, path: &str| json!({"key": key, "volumeName": volume, "path": path});
    let check = |file: Value, texts: &[&str]| {
        let texts: Vec<String> = texts.iter().map(|text| format!("env[0].valueFrom.fileKeyRef.{text}")).collect();
        let texts: Vec<&str> = texts.iter().map(String::as_str).collect();
        container_refused(json!({"env": [{"name": "A", "valueFrom": {"fileKeyRef": file}}]}), &texts);
    };
    check(file("K", "v", "a.env"), &[]);
    check(file("", "v", ""), &["key: Required value", "path: Required value"]);
    check(file("A=B", "v", "a"), &["key: Invalid value: \"A=B\": a valid environment variable name must"]);
    check(file("K", "v", "../a"), &["path: Invalid value: \"../a\": must not contain '..'"]);
    check(file("K", "w", "a"), &["volumeName: Not found: \"w\""]);
    check(file("K", "", "a"), &["volumeName: Required value", "volumeName: Not found: \"\""]);
    let env = json!([{"name": "A", "valueFrom": {"fileKeyRef": file("K", "h", "a")}}]);
    spec_refused(
        json!({
            "containers": [{"name": "c", "image": "b", "env": env}],
            "volumes": [{"name": "h", "hostPath": {"path": "/h"}}],
        }),
        &[
            "containers[0].env[0].valueFrom.fileKeyRef.volumeName: Invalid value: \"h\": referenced volume must be of type \
           emptyDir",
        ],
    );
}

#[test]
fn divisors() {
    let check = |resource: &str, divisor: &str, texts: &[&str]| {
        let texts: Vec<String> = texts.iter().map(|text| format!("env[0].valueFrom.resourceFieldRef.{text}")).collect();
        let texts: Vec<&str> = texts.iter().map(String::as_str).collect();
        let source = json!({"resourceFieldRef": {"resource": resource, "divisor": divisor}});
        container_refused(json!({"env": [{"name": "A", "valueFrom": source}]}), &texts);
    };
    for (resource, divisor) in [
        ("limits.cpu", "1m"),
        ("limits.cpu", "1000m"),
        ("limits.memory", "1Mi"),
        ("requests.ephemeral-storage", "1024Ki"),
        ("limits.hugepages-2Mi", "1"),
        ("limits.memory", "0"),
    ] {
        check(resource, divisor, &[]);
    }
    check(
        "limits.cpu",
        "1k",
        &["divisor: Invalid value: \"limits.cpu\": only divisor's values 1m and 1 are supported with the cpu resource"],
    );
    for (resource, kind) in
        [("memory", "memory"), ("ephemeral-storage", "local ephemeral storage"), ("hugepages-2Mi", "hugepages")]
    {
        let text = format!(
            "divisor: Invalid value: \"limits.{resource}\": only divisor's values 1, 1k, 1M, 1G, 1T, 1P, 1E, 1Ki, 1Mi, \
             1Gi, 1Ti, 1Pi, 1Ei are supported with the {kind} resource"
        );
        check(&format!("limits.{resource}"), "1m", &[&text]);
    }
    check("", "0", &["resource: Required value"]);
}

#[test]
fn whole_environments() {
    let check = |source: Value, text: &str| {
        container_refused(json!({"envFrom": [source]}), &[&format!("envFrom[0]{text}")]);
    };
    check(
        json!({"prefix": "A=", "configMapRef": {"name": "m"}}),
        ".prefix: Invalid value: \"A=\": a valid environment variable name must",
    );
    check(json!({"configMapRef": {"name": ""}}), ".configMapRef.name: Required value");
    check(json!({"secretRef": {"name": "A"}}), ".secretRef.name: Invalid value: \"A\": a lowercase RFC 1123 subdomain");
    check(json!({}), ": Invalid value: \"\": must specify one of: `configMapRef` or `secretRef`");
    check(
        json!({"configMapRef": {"name": "m"}, "secretRef": {"name": "s"}}),
        ": Invalid value: \"\": may not have more than one field specified at a time",
    );
}

#[test]
fn amounts_and_claims() {
    let check = |resources: Value, texts: &[&str]| {
        let texts: Vec<String> = texts.iter().map(|text| format!("resources{text}")).collect();
        let texts: Vec<&str> = texts.iter().map(String::as_str).collect();
        container_refused(json!({"resources": resources}), &texts);
    };
    check(json!({"limits": {"cpu": "1", "hugepages-2Mi": "4Mi", "example.com/gpu": "1"}}), &[]);
    check(json!({"limits": {"hugepages-2Mi": "4Mi"}}), &[": Forbidden: HugePages require cpu or memory"]);
    check(
        json!({"limits": {"cpu": "1", "hugepages-2Mi": "3Mi"}}),
        &[
            ".limits[hugepages-2Mi]: Invalid value: \"3Mi\": 3Mi is not positive integer multiple of hugepages-2Mi",
            ".requests[hugepages-2Mi]: Invalid value: \"3Mi\": 3Mi is not positive integer multiple of hugepages-2Mi",
        ],
    );
    check(
        json!({"limits": {"cpu": "1", "hugepages-2Mi": "4Mi"}, "requests": {"hugepages-2Mi": "2Mi"}}),
        &[".requests: Invalid value: \"2Mi\": must be equal to hugepages-2Mi limit of 4Mi"],
    );
    check(json!({"requests": {"kubernetes.io/x": "1"}}), &[]);
    check(
        json!({"requests": {"pods": "1"}}),
        &[".requests[pods]: Invalid value: \"pods\": must be a standard resource for containers"],
    );
    check(json!({"requests": {"a b": "1"}}), &[".requests[a b]: Invalid value: \"a b\": name part must consist"]);
    check(
        json!({"limits": {"requests.example.com/x": "1"}, "requests": {"requests.example.com/x": "1"}}),
        &[
            ".limits[requests.example.com/x]: Invalid value: \"requests.example.com/x\": doesn't follow extended resource",
            ".requests[requests.example.com/x]: Invalid value: \"requests.example.com/x\": doesn't follow extended",
        ],
    );
    check(
        json!({"claims": [{"name": "a"}]}),
        &[".claims[0]: Not found: \"a\": must be one of the names in pod.spec.resourceClaims which is empty"],
    );
    let claims = |claims: Value, texts: &[&str]| {
        let texts: Vec<String> = texts.iter().map(|text| format!("containers[0].resources.claims{text}")).collect();
        let texts: Vec<&str> = texts.iter().map(String::as_str).collect();
        let container = json!({"name": "c", "image": "b", "resources": {"claims": claims}});
        spec_refused(json!({"resourceClaims": [{"name": "a"}], "containers": [container]}), &texts);
    };
    claims(json!([{"name": "a", "request": "x"}, {"name": "a", "request": "y"}]), &[]);
    claims(json!([{"name": ""}]), &["[0]: Required value"]);
    claims(json!([{"name": "a"}, {"name": "a", "request": "x"}]), &["[1]: Duplicate value: \"a\""]);
    claims(json!([{"name": "a", "request": "x"}, {"name": "a"}]), &["[1]: Duplicate value: \"a\""]);
    claims(json!([{"name": "a", "request": "A"}]), &["[0].request: Invalid value: \"A\": a lowercase RFC 1123 label"]);
    claims(json!([{"name": "b"}]), &["[0]: Not found: \"b\": must be one of the names in pod.spec.resourceClaims: a"]);
}

#[test]
fn container_security() {
    let check = |security: Value, text: &str| {
        container_refused(json!({"securityContext": security}), &[&format!("securityContext{text}")]);
    };
    check(json!({"runAsUser": -1}), ".runAsUser: Invalid value: -1: must be between 0 and 2147483647, inclusive");
    check(json!({"runAsGroup": -1}), ".runAsGroup: Invalid value: -1: must be between 0 and 2147483647, inclusive");
    check(
        json!({"procMount": "X"}),
        ".procMount: Unsupported value: \"X\": supported values: \"Default\", \"Unmasked\"",
    );
    check(
        json!({"allowPrivilegeEscalation": false, "privileged": true}),
        ": Invalid value: \"allowPrivilegeEscalation\": cannot set `allowPrivilegeEscalation` to false and `privileged`",
    );
    check(
        json!({"allowPrivilegeEscalation": false, "capabilities": {"add": ["CAP_SYS_ADMIN"]}}),
        ": Invalid value: \"allowPrivilegeEscalation\": cannot set `allowPrivilegeEscalation` to false and `capabilities",
    );
    check(
        json!({"windowsOptions": {"runAsUserName": ""}}),
        ".windowsOptions.runAsUserName: Invalid value: \"\": runAsUserName cannot be an empty string",
    );
}

#[test]
fn details_of_probes() {
    let check = |member: &str, probe: Value, texts: &[&str]| {
        let texts: Vec<String> = texts.iter().map(|text| format!("{member}.{text}")).collect();
        let texts: Vec<&str> = texts.iter().map(String::as_str).collect();
        container_refused(json!({member: probe}), &texts);
    };
    let grace = |seconds: i64| json!({"tcpSocket": {"port": 1}, "terminationGracePeriodSeconds": seconds});
    check("livenessProbe", grace(1), &[]);
    check("startupProbe", grace(0), &["terminationGracePeriodSeconds: Invalid value: 0: must be greater than 0"]);
    check(
        "readinessProbe",
        grace(1),
        &["terminationGracePeriodSeconds: Invalid value: 1: must not be set for readinessProbes"],
    );
    for member in ["initialDelaySeconds", "timeoutSeconds", "periodSeconds", "failureThreshold"] {
        let text = format!("{member}: Invalid value: -1: must be greater than or equal to 0");
        check("readinessProbe", json!({"tcpSocket": {"port": 1}, member: -1}), &[&text]);
    }
    check(
        "readinessProbe",
        json!({"tcpSocket": {"port": 1}, "successThreshold": -1}),
        &["successThreshold: Invalid value: -1: must be greater than or equal to 0"],
    );
    check(
        "livenessProbe",
        json!({"httpGet": {"port": "Web", "httpHeaders": [{"name": "X Y", "value": ""}]}}),
        &[
            "httpGet.port: Invalid value: \"Web\": must contain only alpha-numeric characters",
            "httpGet.httpHeaders: Invalid value: \"X Y\": a valid HTTP header must consist of alphanumeric characters",
        ],
    );
    check("livenessProbe", json!({"tcpSocket": {"port": 0}}), &["tcpSocket.port: Invalid value: 0: must be between 1"]);
    check("livenessProbe", json!({"grpc": {"port": 65_536}}), &["grpc.port: Invalid value: 65536: must be between 1"]);
}

#[test]
fn details_of_hooks() {
    let check = |lifecycle: Value, texts: &[&str]| {
        let texts: Vec<String> = texts.iter().map(|text| format!("lifecycle.{text}")).collect();
        let texts: Vec<&str> = texts.iter().map(String::as_str).collect();
        container_refused(json!({"lifecycle": lifecycle}), &texts);
    };
    check(json!({"preStop": {"sleep": {"seconds": 0}}, "postStart": {"exec": {"command": ["a"]}}}), &[]);
    check(json!({"preStop": {}}), &["preStop: Required value: must specify a handler type"]);
    check(
        json!({"postStart": {"exec": {"command": ["a"]}, "sleep": {"seconds": 1}}}),
        &["postStart.sleep: Forbidden: may not specify more than 1 handler type"],
    );
    check(
        json!({"postStart": {"sleep": {"seconds": -1}}}),
        &["postStart.sleep: Invalid value: -1: must be non-negative and less than terminationGracePeriodSeconds (30)"],
    );
    let container = |signal: &str| json!([{"name": "c", "image": "b", "lifecycle": {"stopSignal": signal}}]);
    spec_refused(json!({"os": {"name": "windows"}, "containers": container("SIGTERM")}), &[]);
    spec_refused(
        json!({"os": {"name": "windows"}, "containers": container("SIGHUP")}),
        &[
            "containers[0].lifecycle.stopSignal: Unsupported value: \"SIGHUP\": supported values: \"SIGKILL\", \"SIGTERM\"",
        ],
    );
}

#[test]
fn mounts_that_are_alike() {
    let mount = |changes: Value| {
        let mut mount = json!({"name": "v", "mountPath": "/m"});
        super::merge(&mut mount, changes);
        mount
    };
    container_refused(json!({"volumeMounts": [mount(json!({"name": ""}))]}), &["volumeMounts[0].name: Required value"]);
    let text = "volumeMounts[0].mountPropagation: Forbidden: Bidirectional mount propagation is available only to";
    container_refused(json!({"volumeMounts": [mount(json!({"mountPropagation": "Bidirectional"}))]}), &[text]);
    let privileged = json!({"privileged": true});
    let bidirectional = mount(json!({"mountPropagation": "Bidirectional"}));
    container_refused(json!({"securityContext": privileged, "volumeMounts": [bidirectional]}), &[]);
    let recursive = |changes: Value| {
        let mut mount = mount(json!({"readOnly": true, "recursiveReadOnly": "IfPossible"}));
        super::merge(&mut mount, changes);
        json!({"volumeMounts": [mount]})
    };
    container_refused(recursive(json!({"mountPropagation": "None"})), &[]);
    container_refused(
        recursive(json!({"mountPropagation": "HostToContainer"})),
        &["volumeMounts[0].recursiveReadOnly: Forbidden: may only be specified when mountPropagation is None or not"],
    );
    container_refused(
        recursive(json!({"recursiveReadOnly": "X"})),
        &["volumeMounts[0].recursiveReadOnly: Unsupported value: \"X\": supported values: \"Disabled\", \"Enabled\", \
           \"IfPossible\""],
    );
}

#[test]
fn devices() {
    let check = |devices: Value, mounts: Value, texts: &[&str]| {
        let container = json!({"name": "c", "image": "b", "volumeDevices": devices, "volumeMounts": mounts});
        let volumes = json!([
            {"name": "p", "persistentVolumeClaim": {"claimName": "p"}},
            {"name": "q", "persistentVolumeClaim": {"claimName": "q"}},
            {"name": "v", "emptyDir": {}}]);
        let texts: Vec<String> = texts.iter().map(|text| format!("containers[0].{text}")).collect();
        let texts: Vec<&str> = texts.iter().map(String::as_str).collect();
        spec_refused(json!({"containers": [container], "volumes": volumes}), &texts);
    };
    let device = |name: &str, path: &str| json!({"name": name, "devicePath": path});
    check(json!([device("p", "/p"), device("q", "/q")]), json!([]), &[]);
    check(
        json!([device("", "")]),
        json!([]),
        &["volumeDevices[0].name: Required value", "volumeDevices[0].devicePath: Required value"],
    );
    check(json!([device("x", "/p")]), json!([]), &["volumeDevices[0].name: Not found: \"x\""]);
    check(
        json!([device("v", "/p")]),
        json!([]),
        &["volumeDevices[0].name: Invalid value: \"v\": can only use volume source type of PersistentVolumeClaim or"],
    );
    check(
        json!([device("p", "/p"), device("p", "/p")]),
        json!([]),
        &[
            "volumeDevices[1].name: Invalid value: \"p\": must be unique",
            "volumeDevices[1].devicePath: Invalid value: \"/p\": must be unique",
        ],
    );
    check(
        json!([device("p", "/a/../b")]),
        json!([]),
        &["volumeDevices[0].devicePath: Invalid value: \"/a/../b\": can not contain backsteps ('..')"],
    );
    check(
        json!([device("p", "/p")]),
        json!([{"name": "p", "mountPath": "/p"}]),
        &[
            "volumeMounts[0].name: Invalid value: \"p\": must not already exist in volumeDevices",
            "volumeMounts[0].mountPath: Invalid value: \"/p\": must not already exist as a path in volumeDevices",
            "volumeDevices[0].name: Invalid value: \"p\": must not already exist in volumeMounts",
            "volumeDevices[0].devicePath: Invalid value: \"/p\": must not already exist as a path in volumeMounts",
        ],
    );
}
