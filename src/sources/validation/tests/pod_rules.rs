//! Table tests of metadata, and of the specification apart from containers and volumes.

use serde_json::{Value, json};

use super::{refused, spec_refused};

#[test]
fn owners() {
    let at = "/metadata/ownerReferences";
    let owner = |version: &str, kind: &str, name: &str| json!({"apiVersion": version, "kind": kind, "name": name, "uid": "u", "controller": true});
    refused(at, json!([owner("apps/v1", "ReplicaSet", "a")]), &[]);
    refused(
        at,
        json!([owner("a/b/c", "", "")]),
        &[
            "metadata.ownerReferences[0].apiVersion: Invalid value: \"a/b/c\": version must not be empty",
            "metadata.ownerReferences[0].kind: Invalid value: \"\": must not be empty",
            "metadata.ownerReferences[0].name: Invalid value: \"\": must not be empty",
        ],
    );
    refused(
        at,
        json!([owner("v1", "Event", "e")]),
        &["metadata.ownerReferences[0]: Invalid value: \"e\": /v1, Kind=Event is disallowed from being an owner"],
    );
    refused(
        at,
        json!([owner("v1", "A", "a"), owner("v1", "B", "b")]),
        &[
            "metadata.ownerReferences: Invalid value: \"B/b\": Only one reference can have Controller set to true. Found \
           \"true\" in references for A/a and B/b",
        ],
    );
}

#[test]
fn other_metadata() {
    refused("/metadata/generateName", json!("web-"), &[]);
    let text = "metadata.generateName: Invalid value: \"Web-\": a lowercase RFC 1123 subdomain must";
    refused("/metadata/generateName", json!("Web-"), &[text]);
    refused("/metadata/generation", json!(-1), &["metadata.generation: Invalid value: -1: must be greater than or"]);
    let text = "metadata.uid: Invalid value: \"../a\": must not be '.' or '..' and must not contain '/'";
    refused("/metadata/uid", json!("../a"), &[text]);
    refused("/metadata/annotations", json!({"A/b": ""}), &[]);
    let text = "metadata.annotations: Invalid value: \"a b\": name part must consist";
    refused("/metadata/annotations", json!({"a b": ""}), &[text]);
    let at = "/metadata/finalizers";
    refused(at, json!(["example.com/a", "orphan"]), &[]);
    refused(
        at,
        json!(["mine"]),
        &["metadata.finalizers[0]: Invalid value: \"mine\": name is neither a standard finalizer name nor is it fully"],
    );
    refused(at, json!(["x/a b"]), &["metadata.finalizers[0]: Invalid value: \"x/a b\": name part must consist"]);
    refused(
        at,
        json!(["orphan", "foregroundDeletion"]),
        &["metadata.finalizers: Invalid value: [\"orphan\",\"foregroundDeletion\"]: finalizer orphan and \
           foregroundDeletion cannot be both set"],
    );
    let at = "/metadata/managedFields";
    refused(at, json!([{"manager": "m", "operation": "Update", "fieldsType": "FieldsV1"}]), &[]);
    refused(
        at,
        json!([{"manager": "m\u{7}", "operation": "Replace", "fieldsType": "FieldsV2"}]),
        &[
            "metadata.managedFields[0].operation: Invalid value: \"Replace\": must be `Apply` or `Update`",
            "metadata.managedFields[0].fieldsType: Invalid value: \"FieldsV2\": must be `FieldsV1`",
            "metadata.managedFields[0].manager: Invalid value: \"m\\a\": invalid character U+0007 (at position 1)",
        ],
    );
    refused(
        at,
        json!([{"manager": "m".repeat(129), "operation": "Apply", "subresource": "s".repeat(257)}]),
        &[
            "metadata.managedFields[0].manager: Too long: may not be more than 128 bytes",
            "metadata.managedFields[0].subresource: Too long: may not be more than 256 bytes",
        ],
    );
}

#[test]
fn annotations_that_are_part_of_the_api() {
    let check = |key: &str, value: &str, texts: &[&str]| refused("/metadata/annotations", json!({key: value}), texts);
    let cost = "controller.kubernetes.io/pod-deletion-cost";
    for value in ["0", "-10", "2147483647"] {
        check(cost, value, &[]);
    }
    for value in ["", "+1", "008", "-", "2147483648", "x"] {
        let text = format!("metadata.annotations[{cost}]: Invalid value: \"{value}\": must be a 32bit integer");
        check(cost, value, &[&text]);
    }
    let tolerations = "scheduler.alpha.kubernetes.io/tolerations";
    for value in ["", "null", "[]", "[{\"key\": \"a\", \"operator\": \"Exists\"}]"] {
        check(tolerations, value, &[]);
    }
    check(
        tolerations,
        "[{\"key\": \"a b\", \"operator\": \"Exists\"}]",
        &[&format!("metadata.annotations.{tolerations}[0].key: Invalid value: \"a b\": name part must consist")],
    );
    check(tolerations, "[", &[&format!("metadata.annotations: Invalid value: \"{tolerations}\": EOF")]);
    let pod = "seccomp.security.alpha.kubernetes.io/pod";
    check(pod, "docker/default", &[]);
    let text = format!("metadata.annotations[{pod}]: Invalid value: \"x\": must be a valid seccomp profile");
    check(pod, "x", &[&text]);
    let text = format!("metadata.annotations[{pod}]: Invalid value: \"../a\": must not contain '..'");
    check(pod, "localhost/../a", &[&text]);
    let container = "container.apparmor.security.beta.kubernetes.io/c";
    check(container, "localhost/a", &[]);
    let text = format!("metadata.annotations[{container}]: Invalid value: \"x\": invalid AppArmor profile name: \"x\"");
    check(container, "x", &[&text]);
    let other = "container.apparmor.security.beta.kubernetes.io/other";
    let text = format!("metadata.annotations[{other}]: Invalid value: \"other\": container not found");
    check(other, "unconfined", &[&text]);
}

#[test]
fn dns() {
    let check = |config: Value, texts: &[&str]| spec_refused(json!({"dnsConfig": config}), texts);
    check(json!({"searches": [".", "a.b.", "_tcp.a_b"], "options": [{"name": "ndots", "value": "5"}]}), &[]);
    spec_refused(
        json!({"dnsPolicy": "None", "dnsConfig": {"searches": ["A"]}}),
        &["dnsConfig.nameservers: Required value: must provide at least one DNS nameserver when `dnsPolicy` is None"],
    );
    spec_refused(
        json!({"dnsPolicy": "X"}),
        &["dnsPolicy: Unsupported value: \"X\": supported values: \"ClusterFirstWithHostNet\", \"ClusterFirst\", \
           \"Default\", \"None\""],
    );
    for (address, text) in [
        ("010.0.0.1", "must not have leading 0s"),
        ("::ffff:10.0.0.1", "must not be an IPv4-mapped IPv6 address"),
        ("a", "must be a valid IP address, (e.g. 10.9.8.7 or 2001:db8::ffff)"),
    ] {
        let text = format!("dnsConfig.nameservers[0]: Invalid value: \"{address}\": {text}");
        check(json!({"nameservers": [address]}), &[&text]);
    }
    check(json!({"searches": ["A"]}), &["dnsConfig.searches[0]: Invalid value: \"A\": a lowercase RFC 1123 subdomain"]);
    check(json!({"searches": vec!["a"; 33]}), &["dnsConfig.searches: Invalid value: [\"a\",\"a\","]);
    check(json!({"searches": vec!["a".repeat(250); 9]}), &["dnsConfig.searches: Invalid value: [\"aaa"]);
    check(json!({"options": [{"value": "5"}]}), &["dnsConfig.options[0]: Required value: must not be empty"]);
}

#[test]
fn host_names_and_aliases() {
    spec_refused(json!({"hostnameOverride": "a.b"}), &[]);
    spec_refused(
        json!({"hostnameOverride": "a", "setHostnameAsFQDN": true, "hostNetwork": true}),
        &[
            "hostnameOverride: Forbidden: may not be specified when setHostnameAsFQDN is true",
            "hostnameOverride: Forbidden: may not be specified when hostNetwork is true",
        ],
    );
    let text = "hostnameOverride: Too long: may not be more than 64 bytes";
    spec_refused(json!({"hostnameOverride": "a".repeat(65)}), &[text]);
    spec_refused(json!({"hostnameOverride": ""}), &["hostnameOverride: Invalid value: \"\": a lowercase RFC 1123"]);
    spec_refused(json!({"subdomain": "a.b"}), &["subdomain: Invalid value: \"a.b\": must not contain dots"]);
    spec_refused(
        json!({"hostAliases": [{"ip": "10.0.0.01", "hostnames": ["A"]}]}),
        &[
            "hostAliases[0].ip: Invalid value: \"10.0.0.01\": must not have leading 0s",
            "hostAliases[0].hostnames[0]: Invalid value: \"A\": a lowercase RFC 1123 subdomain must",
        ],
    );
}

#[test]
fn names_of_classes_and_groups() {
    for (member, name) in
        [("serviceAccountName", "A"), ("priorityClassName", "A"), ("runtimeClassName", "A"), ("runtimeClassName", "")]
    {
        let text = format!("{member}: Invalid value: \"{name}\": a lowercase RFC 1123 subdomain must");
        spec_refused(json!({member: name}), &[&text]);
    }
    spec_refused(json!({"schedulingGroup": {"podGroupName": "a"}}), &[]);
    let at = "schedulingGroup.podGroupName: Invalid value:";
    spec_refused(json!({"schedulingGroup": {}}), &[&format!("{at} \"null\": must specify one of: `podGroupName`")]);
    spec_refused(json!({"schedulingGroup": {"podGroupName": "A"}}), &[&format!("{at} \"A\": a lowercase RFC 1123")]);
}

#[test]
fn policies_and_overhead() {
    spec_refused(
        json!({"preemptionPolicy": "X"}),
        &["preemptionPolicy: Unsupported value: \"X\": supported values: \"PreemptLowerPriority\", \"Never\""],
    );
    spec_refused(json!({"preemptionPolicy": ""}), &["preemptionPolicy: Required value"]);
    spec_refused(json!({"overhead": {"cpu": "250m"}}), &[]);
    spec_refused(json!({"overhead": {"cpu": "-1"}}), &["overhead.limits[cpu]: Invalid value: \"-1\": must be greater"]);
}

#[test]
fn gates() {
    spec_refused(
        json!({"readinessGates": [{"conditionType": "a b"}]}),
        &["readinessGates[0].conditionType: Invalid value: \"a b\": name part must consist"],
    );
    spec_refused(
        json!({"schedulingGates": [{"name": "a"}, {"name": "a"}, {"name": "a b"}]}),
        &[
            "schedulingGates[1]: Duplicate value: \"a\"",
            "schedulingGates[2]: Invalid value: \"a b\": name part must consist",
        ],
    );
}

#[test]
fn tolerations() {
    for (toleration, text) in [
        (json!({"key": "a b"}), "key: Invalid value: \"a b\": name part must consist"),
        (json!({"key": "a", "value": "a b"}), "operator: Invalid value: \"a b\": a valid label must be"),
        (
            json!({"key": "a", "operator": "Exists", "value": "b"}),
            "operator: Invalid value: \"b\": value must be empty when `operator` is 'Exists'",
        ),
        (
            json!({"key": "a", "operator": "Lt", "value": "1"}),
            "operator: Unsupported value: \"Lt\": supported values: \"Equal\", \"Exists\", \"Lt\", \"Gt\"",
        ),
        (
            json!({"key": "a", "operator": "In"}),
            "operator: Unsupported value: \"In\": supported values: \"Equal\", \"Exists\"",
        ),
        (
            json!({"key": "a", "effect": "NoSchedule", "tolerationSeconds": 1}),
            "effect: Invalid value: \"NoSchedule\": effect must be 'NoExecute' when `tolerationSeconds` is set",
        ),
        (
            json!({"key": "a", "effect": "X"}),
            "effect: Unsupported value: \"X\": supported values: \"NoSchedule\", \"PreferNoSchedule\", \"NoExecute\"",
        ),
    ] {
        spec_refused(json!({"tolerations": [toleration]}), &[&format!("tolerations[0].{text}")]);
    }
}

#[test]
fn node_selectors_and_node_affinity() {
    spec_refused(json!({"nodeSelector": {"a b": "c"}}), &["nodeSelector: Invalid value: \"a b\": name part must"]);
    let required = "requiredDuringSchedulingIgnoredDuringExecution";
    let preferred = "preferredDuringSchedulingIgnoredDuringExecution";
    let check = |term: Value, text: &str| {
        let terms = json!({"nodeAffinity": {required: {"nodeSelectorTerms": [term]}}});
        let text = format!("affinity.nodeAffinity.{required}.nodeSelectorTerms[0].{text}");
        spec_refused(json!({"affinity": terms}), &[&text]);
    };
    for (expression, text) in [
        (json!({"key": "a", "operator": "In"}), "values: Required value: must be specified when `operator` is 'In' or"),
        (
            json!({"key": "a", "operator": "Exists", "values": ["b"]}),
            "values: Forbidden: may not be specified when `operator` is 'Exists' or 'DoesNotExist'",
        ),
        (
            json!({"key": "a", "operator": "Gt", "values": ["1", "2"]}),
            "values: Required value: must be specified single value when `operator` is 'Lt' or 'Gt'",
        ),
        (json!({"key": "a", "operator": "Is"}), "operator: Invalid value: \"Is\": not a valid selector operator"),
        (json!({"key": "a b", "operator": "Exists"}), "key: Invalid value: \"a b\": name part must consist"),
        (
            json!({"key": "a", "operator": "In", "values": ["b c"]}),
            "values[0]: Invalid value: \"b c\": a valid label must be",
        ),
    ] {
        check(json!({"matchExpressions": [expression]}), &format!("matchExpressions[0].{text}"));
    }
    for (field, text) in [
        (json!({"key": "metadata.name", "operator": "In"}), "values: Required value: must be only one value when"),
        (
            json!({"key": "metadata.name", "operator": "Exists"}),
            "operator: Invalid value: \"Exists\": not a valid selector operator",
        ),
        (
            json!({"key": "spec.x", "operator": "In", "values": ["a"]}),
            "key: Invalid value: \"spec.x\": not a valid field selector key",
        ),
        (
            json!({"key": "metadata.name", "operator": "In", "values": ["A"]}),
            "values[0]: Invalid value: \"A\": a lowercase RFC 1123 subdomain must",
        ),
    ] {
        check(json!({"matchFields": [field]}), &format!("matchFields[0].{text}"));
    }
    let any_value = json!({"matchExpressions": [{"key": "a", "operator": "In", "values": ["b c"]}]});
    let soft = |weight: i32| json!({"nodeAffinity": {preferred: [{"weight": weight, "preference": any_value}]}});
    spec_refused(json!({"affinity": soft(1)}), &[]);
    spec_refused(
        json!({"affinity": soft(101)}),
        &[&format!("affinity.nodeAffinity.{preferred}[0].weight: Invalid value: 101: must be in the range 1-100")],
    );
}

#[test]
fn pod_affinity() {
    let required = "requiredDuringSchedulingIgnoredDuringExecution";
    let preferred = "preferredDuringSchedulingIgnoredDuringExecution";
    let selector = json!({"matchLabels": {"a": "x"}, "matchExpressions": [{"key": "a", "operator": "Exists"}]});
    for (term, text) in [
        (json!({"namespaces": ["a.b"]}), "namespace: Invalid value: \"a.b\": must not contain dots"),
        (
            json!({"labelSelector": {"matchExpressions": [{"key": "a", "operator": "Gt"}]}}),
            "labelSelector.matchExpressions[0].operator: Invalid value: \"Gt\": not a valid selector operator",
        ),
        (
            json!({"namespaceSelector": {"matchLabels": {"a": "b c"}}}),
            "namespaceSelector.matchLabels: Invalid value: \"b c\": a valid label must be",
        ),
        (
            json!({"matchLabelKeys": ["a"]}),
            "matchLabelKeys: Forbidden: must not be specified when labelSelector is not set",
        ),
        (
            json!({"labelSelector": {}, "mismatchLabelKeys": ["a b"]}),
            "mismatchLabelKeys[0]: Invalid value: \"a b\": name part must consist",
        ),
        (
            json!({"labelSelector": {}, "matchLabelKeys": ["a"], "mismatchLabelKeys": ["a"]}),
            "matchLabelKeys[0]: Invalid value: \"a\": exists in both matchLabelKeys and mismatchLabelKeys",
        ),
        (
            json!({"labelSelector": selector, "matchLabelKeys": ["a"]}),
            "matchLabelKeys[0]: Invalid value: \"a\": exists in both matchLabelKeys and labelSelector",
        ),
    ] {
        let mut term = term;
        term["topologyKey"] = json!("t");
        let text = format!("affinity.podAffinity.{required}[0].{text}");
        spec_refused(json!({"affinity": {"podAffinity": {required: [term]}}}), &[&text]);
    }
    let soft = json!([{"weight": 0, "podAffinityTerm": {"topologyKey": "t"}}]);
    spec_refused(
        json!({"affinity": {"podAntiAffinity": {preferred: soft}}}),
        &[&format!("affinity.podAntiAffinity.{preferred}[0].weight: Invalid value: 0: must be in the range 1-100")],
    );
}

#[test]
fn topology_spread() {
    let check = |changes: Value, texts: &[&str]| {
        let mut one = json!({"maxSkew": 1, "topologyKey": "a", "whenUnsatisfiable": "DoNotSchedule"});
        super::merge(&mut one, changes);
        let texts: Vec<String> = texts.iter().map(|text| format!("topologySpreadConstraints[0].{text}")).collect();
        let texts: Vec<&str> = texts.iter().map(String::as_str).collect();
        spec_refused(json!({"topologySpreadConstraints": [one]}), &texts);
    };
    check(json!({"minDomains": 1, "nodeAffinityPolicy": "Honor", "nodeTaintsPolicy": "Ignore"}), &[]);
    check(json!({"topologyKey": ""}), &["topologyKey: Required value: can not be empty"]);
    check(
        json!({"whenUnsatisfiable": "X"}),
        &["whenUnsatisfiable: Unsupported value: \"X\": supported values: \"DoNot"],
    );
    check(json!({"minDomains": 0}), &["minDomains: Invalid value: 0: must be greater than zero"]);
    check(
        json!({"minDomains": 1, "whenUnsatisfiable": "ScheduleAnyway"}),
        &[
            "minDomains: Invalid value: 1: can only use minDomains if whenUnsatisfiable=DoNotSchedule, not ScheduleAnyway",
        ],
    );
    for member in ["nodeAffinityPolicy", "nodeTaintsPolicy"] {
        let text = format!("{member}: Unsupported value: \"X\": supported values: \"Honor\", \"Ignore\"");
        check(json!({member: "X"}), &[&text]);
    }
    check(
        json!({"matchLabelKeys": ["a"]}),
        &["matchLabelKeys: Forbidden: must not be specified when labelSelector is not set"],
    );
    check(
        json!({"labelSelector": {"matchLabels": {"a": "b c"}}}),
        &["labelSelector.matchLabels: Invalid value: \"b c\": a valid label must be"],
    );
    let one = json!({"maxSkew": 1, "topologyKey": "a", "whenUnsatisfiable": "DoNotSchedule"});
    spec_refused(
        json!({"topologySpreadConstraints": [one, one]}),
        &["topologySpreadConstraints[0].{topologyKey, whenUnsatisfiable}: Duplicate value: \"{a, DoNotSchedule}\""],
    );
}

#[test]
fn operating_systems() {
    let os = |name: &str, changes: Value| {
        let mut spec = json!({"os": {"name": name}});
        super::merge(&mut spec, changes);
        spec
    };
    spec_refused(os("windows", json!({})), &[]);
    spec_refused(os("", json!({})), &["os.name: Required value"]);
    spec_refused(os("x", json!({})), &["os: Unsupported value: \"x\": supported values: \"linux\", \"windows\""]);
    let options = json!({"windowsOptions": {}});
    let container = json!({"name": "c", "image": "b", "securityContext": options});
    spec_refused(
        os("linux", json!({"securityContext": options, "containers": [container]})),
        &[
            "securityContext.windowsOptions: Forbidden: windows options cannot be set for a linux pod",
            "containers[0].securityContext.windowsOptions: Forbidden: windows options cannot be set for a linux pod",
        ],
    );
    let container = json!({"name": "c", "image": "b", "securityContext": {"privileged": false}});
    spec_refused(
        os(
            "windows",
            json!({
                "hostPID": true, "securityContext": {"runAsUser": 1}, "containers": [container],
                "resources": {"limits": {"cpu": "1"}}
            }),
        ),
        &[
            "resources: Forbidden: may not be set for a windows pod",
            "hostPID: Forbidden: cannot be set for a windows pod",
            "securityContext.runAsUser: Forbidden: cannot be set for a windows pod",
            "containers[0].securityContext.privileged: Forbidden: cannot be set for a windows pod",
        ],
    );
}

#[test]
fn windows_options() {
    let check = |options: Value, texts: &[&str]| {
        let texts: Vec<String> = texts.iter().map(|text| format!("securityContext.windowsOptions.{text}")).collect();
        let texts: Vec<&str> = texts.iter().map(String::as_str).collect();
        spec_refused(json!({"securityContext": {"windowsOptions": options}}), &texts);
    };
    check(json!({"runAsUserName": "example.com\\me", "gmsaCredentialSpecName": "a", "gmsaCredentialSpec": "{}"}), &[]);
    check(json!({"gmsaCredentialSpecName": "A"}), &["gmsaCredentialSpecName: Invalid value: \"A\": a lowercase RFC"]);
    check(
        json!({"gmsaCredentialSpec": ""}),
        &["gmsaCredentialSpec: Invalid value: \"\": gmsaCredentialSpec cannot be an empty string"],
    );
    for (name, text) in [
        ("", "runAsUserName cannot be an empty string"),
        ("a\nb", "runAsUserName cannot contain control characters"),
        ("a\\b\\c", "runAsUserName cannot contain more than one backslash"),
        ("*\\me", "runAsUserName's Domain doesn't match the NetBios nor the DNS format"),
        ("a\\", "runAsUserName's User cannot be empty"),
        ("..", "runAsUserName's User cannot contain only periods or spaces"),
        ("a@b", "runAsUserName's User cannot contain the following characters: \"/\\:;|=,+*?<>@[]"),
    ] {
        let shown = berth_types::fieldpath::quoted(name);
        check(json!({"runAsUserName": name}), &[&format!("runAsUserName: Invalid value: {shown}: {text}")]);
    }
    let host_process = json!({"windowsOptions": {"hostProcess": true}});
    spec_refused(
        json!({"securityContext": host_process}),
        &["hostNetwork: Invalid value: false: hostNetwork must be true if pod contains any hostProcess containers"],
    );
    let plain = json!({"name": "d", "image": "b"});
    let of_host = json!({"name": "c", "image": "b", "securityContext": host_process});
    let text = "spec: Invalid value: \"\": If pod contains any hostProcess containers then all containers must be";
    refused("/spec", json!({"hostNetwork": true, "containers": [of_host, plain]}), &[text]);
    let not_of_host = json!({"windowsOptions": {"hostProcess": false}});
    spec_refused(
        json!({"securityContext": not_of_host, "hostNetwork": true, "containers": [of_host]}),
        &[
            "containers[0].securityContext.windowsOptions.hostProcess: Invalid value: true: pod hostProcess value must be \
           identical if both are specified, was false",
        ],
    );
}

#[test]
fn pod_security() {
    let check = |security: Value, text: &str| {
        spec_refused(json!({"securityContext": security}), &[&format!("securityContext.{text}")]);
    };
    for member in ["fsGroup", "runAsUser", "runAsGroup"] {
        let text = format!("{member}: Invalid value: 2147483648: must be between 0 and 2147483647, inclusive");
        check(json!({member: 2_147_483_648_i64}), &text);
    }
    check(json!({"supplementalGroups": [0, -1]}), "supplementalGroups[1]: Invalid value: -1: must be between 0 and");
    for (member, supported) in [
        ("fsGroupChangePolicy", "\"Always\", \"OnRootMismatch\""),
        ("supplementalGroupsPolicy", "\"Merge\", \"Strict\""),
        ("seLinuxChangePolicy", "\"MountOption\", \"Recursive\""),
    ] {
        for value in ["X", ""] {
            let text = format!("{member}: Unsupported value: \"{value}\": supported values: {supported}");
            check(json!({member: value}), &text);
        }
    }
    check(
        json!({"seccompProfile": {"type": ""}}),
        "seccompProfile.type: Required value: type is required when seccomp",
    );
    check(json!({"appArmorProfile": {"type": ""}}), "appArmorProfile.type: Required value: type is required when app");
    check(
        json!({"appArmorProfile": {"type": "X"}}),
        "appArmorProfile.type: Unsupported value: \"X\": supported values",
    );
    let local = |name: String| json!({"appArmorProfile": {"type": "Localhost", "localhostProfile": name}});
    check(local(" a".to_owned()), "appArmorProfile.localhostProfile: Invalid value: \" a\": must not be padded with");
    check(local("a".repeat(4096)), "appArmorProfile.localhostProfile: Too long: may not be more than 4095 bytes");
}

#[test]
fn sysctls() {
    let check = |host: Value, names: &[&str], texts: &[&str]| {
        let sysctls: Vec<Value> = names.iter().map(|name| json!({"name": name, "value": "1"})).collect();
        let mut spec = json!({"securityContext": {"sysctls": sysctls}});
        super::merge(&mut spec, host);
        let texts: Vec<String> = texts.iter().map(|text| format!("securityContext.sysctls{text}")).collect();
        let texts: Vec<&str> = texts.iter().map(String::as_str).collect();
        spec_refused(spec, &texts);
    };
    check(json!({}), &["net.core.somaxconn", "kernel/shm_rmid_forced"], &[]);
    check(json!({}), &[""], &["[0].name: Required value"]);
    check(json!({}), &["a.b", "a.b"], &["[1].name: Duplicate value: \"a.b\""]);
    for name in ["A.b", "a..b", "a.b-"] {
        let text =
            format!("[0].name: Invalid value: \"{name}\": must have at most 253 characters and match regex ^([a-z");
        check(json!({}), &[name], &[&text]);
    }
    let text = "[0].name: Invalid value: \"net.core.somaxconn\": may not be specified when 'hostNetwork' is true";
    check(json!({"hostNetwork": true}), &["net.core.somaxconn", "kernel.shmmax"], &[text]);
    let text = "[0].name: Invalid value: \"net/ipv4/x\": may not be specified when 'hostNetwork' is true";
    check(json!({"hostNetwork": true}), &["net/ipv4/x"], &[text]);
    let text = "[1].name: Invalid value: \"kernel.shmmax\": may not be specified when 'hostIPC' is true";
    check(json!({"hostIPC": true}), &["net.core.somaxconn", "kernel.shmmax"], &[text]);
}

#[test]
fn pod_level_resources() {
    let container = |resources: Value| json!([{"name": "c", "image": "b", "resources": resources}]);
    let check = |pod: Value, of_container: Value, texts: &[&str]| {
        spec_refused(json!({"resources": pod, "containers": container(of_container)}), texts);
    };
    check(json!({"limits": {"cpu": "1"}}), json!({"requests": {"cpu": "1"}}), &[]);
    check(
        json!({"requests": {"cpu": "1"}}),
        json!({"requests": {"cpu": "2"}}),
        &[
            "resources.requests[cpu]: Invalid value: \"1\": must be greater than or equal to aggregate container requests \
           of 2",
        ],
    );
    check(
        json!({"limits": {"cpu": "1"}}),
        json!({"requests": {"cpu": "1"}, "limits": {"cpu": "2"}}),
        &["containers[0].resources.limits[cpu]: Invalid value: \"2\": must be less than or equal to pod limits of 1"],
    );
    check(
        json!({"limits": {"cpu": "1", "hugepages-2Mi": "2Mi"}}),
        json!({"limits": {"cpu": "100m", "hugepages-2Mi": "4Mi"}}),
        &[
            "resources.requests[hugepages-2Mi]: Invalid value: \"2Mi\": must be greater than or equal to aggregate",
            "resources.limits[hugepages-2Mi]: Invalid value: \"2Mi\": must be greater than or equal to aggregate container \
             limits of 4Mi",
            "containers[0].resources.limits[hugepages-2Mi]: Invalid value: \"4Mi\": must be less than or equal to pod",
        ],
    );
    spec_refused(
        json!({"resources": {"claims": []}}),
        &["resources.claims: Forbidden: claims may not be set for Resources"],
    );
    spec_refused(
        json!({"resources": {"requests": {"gpus": "1"}}}),
        &["resources.requests[gpus]: Invalid value: \"gpus\": must be a standard resource type or fully qualified"],
    );
}

#[test]
fn users_of_the_pod_and_devices() {
    let container = json!({"name": "c", "image": "b", "volumeDevices": [{"name": "v", "devicePath": "/d"}]});
    let volume = json!({"name": "v", "persistentVolumeClaim": {"claimName": "c"}});
    spec_refused(
        json!({"hostUsers": false, "hostNetwork": true, "containers": [container], "volumes": [volume]}),
        &[
            "hostNetwork: Forbidden: when `hostUsers` is false",
            "containers[0].volumeDevices: Forbidden: when `hostUsers` is false",
        ],
    );
}
