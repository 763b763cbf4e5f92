//! Table tests across the admission handlers: order, reasons, and messages.

use std::{collections::HashSet, sync::Arc};

use serde_json::{Value, json};

use super::{
    Admission, AdmissionRejection, AdmissionRules, AdmitInput, Purpose, admit, missing_for_update, sysctls::Allowlist,
};
use berth_ports::NodeFacts;
use berth_types::Pod;

fn pod(name: &str, object: Value) -> Arc<Pod> {
    let mut object = object;
    object["metadata"]["name"] = name.into();
    object["metadata"]["namespace"] = "default".into();
    object["metadata"]["uid"] = name.into();
    if object["spec"].get("containers").is_none() {
        object["spec"]["containers"] = json!([{"name": "c"}]);
    }
    Arc::new(Pod::new(serde_json::from_value(object).expect("a pod")).expect("complete"))
}

fn requesting(name: &str, cpu: &str) -> Arc<Pod> {
    pod(name, json!({"spec": {"containers": [{"name": "c", "resources": {"requests": {"cpu": cpu}}}]}}))
}

fn static_pod(object: Value) -> Arc<Pod> {
    let mut object = object;
    object["metadata"]["annotations"] = json!({"kubernetes.io/config.source": "file"});
    pod("static", object)
}

fn node() -> NodeFacts {
    let list = |pairs: &[(&str, &str)]| pairs.iter().map(|(k, v)| ((*k).to_owned(), (*v).to_owned())).collect();
    NodeFacts {
        name: "node-1".to_owned(),
        labels: list(&[("zone", "a")]),
        allocatable: list(&[("pods", "110"), ("cpu", "4"), ("memory", "8Gi"), ("ephemeral-storage", "100Gi")]),
        ..NodeFacts::default()
    }
}

fn rules() -> AdmissionRules {
    let sysctls = Allowlist::new(Some((6, 1)), &[]).expect("no patterns");
    AdmissionRules { sysctls, pod_level_resources: true, node_declared_features: true, ..AdmissionRules::default() }
}

struct Case {
    node: NodeFacts,
    rules: AdmissionRules,
    active: Vec<Arc<Pod>>,
    rejected: HashSet<berth_types::PodUid>,
}

impl Case {
    fn new() -> Self {
        Self { node: node(), rules: rules(), active: Vec::new(), rejected: HashSet::new() }
    }

    fn tainted(effect: &str) -> Self {
        let mut case = Self::new();
        case.node.taints = vec![serde_json::from_value(json!({"key": "k", "effect": effect})).expect("a taint")];
        case
    }

    fn ask(&self, pod: &Arc<Pod>, purpose: Purpose<'_>) -> Result<Admission, AdmissionRejection> {
        let (active, rejected, node, rules) = (&self.active[..], &self.rejected, &self.node, &self.rules);
        admit(&AdmitInput { pod, purpose, active, rejected, node, rules })
    }

    fn refused(&self, pod: &Arc<Pod>) -> Option<(String, String)> {
        self.ask(pod, Purpose::New).err().map(|r| (r.reason.into_owned(), r.message.into_owned()))
    }
}

fn refusal(reason: &str, message: &str) -> Option<(String, String)> {
    Some((reason.to_owned(), message.to_owned()))
}

#[test]
fn a_pod_that_does_not_fit_is_refused() {
    // AC-02a-10
    let case = Case { active: vec![requesting("other", "1")], ..Case::new() };
    let refused = case.ask(&requesting("web", "8"), Purpose::New).expect_err("too large");
    assert_eq!(refused.reason, "OutOfcpu");
    assert_eq!(
        refused.status_message(),
        "Pod was rejected: Node didn't have enough resource: cpu, requested: 8000, used: 1000, capacity: 4000"
    );
    assert!(!refused.is_node_affinity_only());
}

#[test]
fn only_no_execute_taints_refuse_and_never_static_pods() {
    let plain = pod("web", json!({"spec": {}}));
    // AC-02a-11
    assert_eq!(Case::tainted("NoSchedule").refused(&plain), None);
    assert_eq!(
        Case::tainted("NoExecute").refused(&plain),
        refusal("TaintToleration", "Predicate TaintToleration failed: node(s) had taints that the pod didn't tolerate")
    );
    // AC-02a-12
    assert_eq!(Case::tainted("NoExecute").refused(&static_pod(json!({"spec": {}}))), None);
    let tolerating = pod("web", json!({"spec": {"tolerations": [{"key": "k", "operator": "Exists"}]}}));
    assert_eq!(Case::tainted("NoExecute").refused(&tolerating), None);
}

#[test]
fn pressure_refuses_best_effort_and_more() {
    // AC-02a-13, AC-05-21
    let mut case = Case::new();
    case.node.pressures = vec!["MemoryPressure".to_owned()];
    let best_effort = pod("web", json!({"spec": {}}));
    let evicted = |conditions: &str| refusal("Evicted", &format!("The node had condition: [{conditions}]. "));
    assert_eq!(case.refused(&best_effort), evicted("MemoryPressure"));
    assert_eq!(case.refused(&requesting("burstable", "1m")), None);
    assert_eq!(case.refused(&static_pod(json!({"spec": {}}))), None);
    let tolerating = json!({"key": "node.kubernetes.io/memory-pressure", "operator": "Exists", "effect": "NoSchedule"});
    assert_eq!(case.refused(&pod("web", json!({"spec": {"tolerations": [tolerating]}}))), None);
    case.node.pressures.push("DiskPressure".to_owned());
    assert_eq!(case.refused(&requesting("burstable", "1m")), evicted("MemoryPressure DiskPressure"));
    assert!(case.ask(&best_effort, Purpose::Restored).is_ok(), "it runs");
    let mut case = Case::new();
    case.node.restored_pressures = vec!["DiskPressure".to_owned()];
    assert_eq!(case.refused(&best_effort), None, "nobody has seen it in this life");
}

#[test]
fn what_runs_is_let_in_while_the_node_goes_down() {
    // Spec 05 §7.3: new pods are refused; running pods stay admitted until shutdown terminates them.
    let mut case = Case::new();
    case.node.shutting_down = true;
    let web = pod("web", json!({"spec": {}}));
    assert!(case.refused(&web).is_some());
    assert!(case.ask(&web, Purpose::Restored).is_ok());
}

#[test]
#[allow(clippy::too_many_lines, reason = "a table")]
fn each_handler_has_its_words() {
    let mut shutting_down = Case::new();
    shutting_down.node.shutting_down = true;
    let mut no_level = Case::new();
    no_level.rules.pod_level_resources = false;
    let mut no_node = Case::new();
    no_node.node.name = String::new();
    let plain = Case::new();
    let context = |c: Value| json!({"spec": {"securityContext": c}});
    let sysctl = |name: &str| json!({"sysctls": [{"name": name, "value": "1"}]});
    let with = |mut object: Value, key: &str| {
        object["spec"][key] = true.into();
        object
    };
    let pending = |mut object: Value| {
        object["status"] = json!({"phase": "Pending"});
        object
    };
    for (name, case, object, expected) in [
        (
            "sysctl",
            &plain,
            context(sysctl("vm.swappiness")),
            refusal("SysctlForbidden", "forbidden sysctl: \"vm.swappiness\" not allowlisted"),
        ),
        (
            "AC-06-13",
            &plain,
            with(context(sysctl("net.ipv4.tcp_syncookies")), "hostNetwork"),
            refusal(
                "SysctlForbidden",
                "forbidden sysctl: \"net.ipv4.tcp_syncookies\" not allowed with host Net enabled",
            ),
        ),
        (
            "AC-06-14",
            &plain,
            with(context(sysctl("kernel/shm_rmid_forced")), "hostIPC"),
            refusal(
                "SysctlForbidden",
                "forbidden sysctl: \"kernel.shm_rmid_forced\" not allowed with host IPC enabled",
            ),
        ),
        ("safe sysctl", &plain, context(sysctl("net.ipv4.tcp_syncookies")), None),
        ("no node", &no_node, json!({"spec": {}}), refusal("InvalidNodeInfo", "Kubelet cannot get node info.")),
        (
            "os label",
            &plain,
            json!({"metadata": {"labels": {"kubernetes.io/os": "windows"}}, "spec": {}}),
            refusal(
                "PodOSSelectorNodeLabelDoesNotMatch",
                "Failed to admit pod as the `kubernetes.io/os` label doesn't match node label",
            ),
        ),
        ("os label of ours", &plain, json!({"metadata": {"labels": {"kubernetes.io/os": "linux"}}, "spec": {}}), None),
        ("os selected", &plain, json!({"spec": {"nodeSelector": {"kubernetes.io/os": "linux"}}}), None),
        (
            "os field",
            &plain,
            json!({"spec": {"os": {"name": "windows"}}}),
            refusal("PodOSNotSupported", "Failed to admit pod as the OS field doesn't match node OS"),
        ),
        (
            "groups",
            &plain,
            context(json!({"supplementalGroupsPolicy": "Strict"})),
            refusal(
                "SupplementalGroupsPolicyNotSupported",
                "SupplementalGroupsPolicy=Strict is not supported in this node",
            ),
        ),
        (
            "affinity",
            &plain,
            json!({"spec": {"nodeSelector": {"zone": "b"}}}),
            refusal("NodeAffinity", "Predicate NodeAffinity failed: node(s) didn't match Pod's node affinity/selector"),
        ),
        (
            "name",
            &plain,
            json!({"spec": {"nodeName": "node-2"}}),
            refusal("NodeName", "Predicate NodeName failed: node(s) didn't match the requested node name"),
        ),
        (
            "apparmor",
            &plain,
            pending(context(json!({"appArmorProfile": {"type": "RuntimeDefault"}}))),
            refusal("AppArmor", "Cannot enforce AppArmor: AppArmor is not enabled on the host"),
        ),
        ("apparmor later", &plain, context(json!({"appArmorProfile": {"type": "RuntimeDefault"}})), None),
        ("unconfined", &plain, pending(context(json!({"appArmorProfile": {"type": "Unconfined"}}))), None),
        (
            "pod level",
            &no_level,
            json!({"spec": {"resources": {"limits": {"cpu": "1"}}}}),
            refusal("PodLevelResourcesNotSupported", "PodLevelResources feature gate is disabled"),
        ),
        (
            "features",
            &plain,
            json!({"spec": {"hostNetwork": true, "hostUsers": false, "containers": [{"name": "c",
                "restartPolicy": "Never", "restartPolicyRules": [{"action": "RestartAllContainers"}]}]}}),
            refusal(
                "PodFeatureUnsupported",
                "Pod requires node features that are not available: RestartAllContainersOnContainerExits, UserNamespacesHostNetworkSupport",
            ),
        ),
        (
            "shutdown",
            &shutting_down,
            json!({"spec": {}}),
            refusal("NodeShutdown", "Pod was rejected as the node is shutting down."),
        ),
    ] {
        assert_eq!(case.refused(&pod("web", object)), expected, "{name}");
    }
}

#[test]
fn an_empty_apparmor_profile_is_refused_where_apparmor_works() {
    let mut case = Case::new();
    case.rules.apparmor_enabled = true;
    let with = |profile: Value, annotation: &str| {
        let annotations = json!({"container.apparmor.security.beta.kubernetes.io/c": annotation});
        let metadata = json!({"annotations": annotations});
        let spec = json!({"securityContext": {"appArmorProfile": profile}});
        pod("web", json!({"metadata": metadata, "spec": spec, "status": {"phase": "Pending"}}))
    };
    let empty = json!({"type": "Localhost", "localhostProfile": " "});
    let text = "Cannot enforce AppArmor: invalid empty AppArmor profile name: \"&AppArmorProfile{Type:Localhost,LocalhostProfile:* ,}\"";
    assert_eq!(case.refused(&with(empty.clone(), "")), refusal("AppArmor", text));
    assert_eq!(case.refused(&with(empty, "localhost/web")), None, "the annotation comes before the pod");
    assert_eq!(case.refused(&with(json!({"type": "Localhost", "localhostProfile": "p"}), "")), None);
}

#[test]
fn the_first_failure_speaks_and_all_are_kept() {
    let object = json!({"spec": {"nodeName": "node-2", "nodeSelector": {"zone": "b"},
        "containers": [{"name": "c", "resources": {"requests": {"cpu": "8"}}}]}});
    let refused = Case::new().ask(&pod("web", object), Purpose::New).expect_err("all wrong");
    assert_eq!((refused.reason.as_ref(), refused.failures.len()), ("OutOfcpu", 3));
    let only_labels = pod("web", json!({"spec": {"nodeSelector": {"zone": "b"}}}));
    assert!(Case::new().ask(&only_labels, Purpose::New).expect_err("wrong zone").is_node_affinity_only());
}

#[test]
fn host_ports_conflict_by_protocol_port_and_address() {
    let with = |name: &str, port: Value| pod(name, json!({"spec": {"containers": [{"name": "c", "ports": [port]}]}}));
    let taken = with("taken", json!({"containerPort": 80, "hostPort": 80, "hostIP": "127.0.0.1"}));
    let case = Case { active: vec![taken], ..Case::new() };
    for (port, conflicts) in [
        (json!({"containerPort": 80, "hostPort": 80}), true),
        (json!({"containerPort": 80, "hostPort": 80, "hostIP": "127.0.0.1"}), true),
        (json!({"containerPort": 80, "hostPort": 80, "hostIP": "10.0.0.1"}), false),
        (json!({"containerPort": 80, "hostPort": 80, "protocol": "UDP"}), false),
        (json!({"containerPort": 80, "hostPort": 81}), false),
        (json!({"containerPort": 80}), false),
    ] {
        assert_eq!(case.refused(&with("web", port.clone())).is_some(), conflicts, "{port}");
    }
    let sidecar = json!({"spec": {"initContainers": [{"name": "s", "restartPolicy": "Always",
        "ports": [{"containerPort": 80, "hostPort": 80}]}]}});
    let text = "Predicate NodePorts failed: node(s) didn't have free ports for the requested pod ports";
    assert_eq!(case.refused(&pod("web", sidecar)), refusal("NodePorts", text));
}

#[test]
fn a_critical_pod_takes_what_it_lacks() {
    // AC-02a-14
    let object = |cpu: &str, port: Value| {
        json!({"spec": {"priority": 2_000_000_000, "containers": [
            {"name": "c", "resources": {"requests": {"cpu": cpu}}, "ports": [port]}]}})
    };
    let port = json!({"containerPort": 1});
    let case = Case {
        active: vec![requesting("large", "300m"), requesting("small", "100m"), requesting("rest", "3600m")],
        ..Case::new()
    };
    let admitted = case.ask(&pod("critical", object("100m", port.clone())), Purpose::New).expect("recovers");
    assert_eq!(admitted.victims.iter().map(|p| p.name()).collect::<Vec<_>>(), ["small"]);
    assert_eq!(admitted.signal, "cpu");
    assert_eq!(
        case.refused(&pod("critical", object("4050m", port))),
        refusal(
            "UnexpectedAdmissionError",
            "Unexpected error while attempting to recover from admission failure: preemption: error finding a set of pods to preempt: no set of running pods found to reclaim resources: [(res: cpu, q: 50), ]"
        )
    );
    // AC-06-16
    let port = json!({"containerPort": 80, "hostPort": 80});
    let taken = pod("taken", json!({"spec": {"containers": [{"name": "c", "ports": [port]}]}}));
    let case = Case { active: vec![taken], ..case };
    assert_eq!(case.refused(&pod("critical", object("9", port))).map(|r| r.0).as_deref(), Some("NodePorts"));
}

#[test]
fn rejected_pods_hold_nothing_and_running_ones_are_not_allocated_again() {
    let mut case = Case { active: vec![requesting("refused", "4"), requesting("web", "4")], ..Case::new() };
    let web = requesting("web", "2");
    assert!(case.refused(&web).is_some());
    assert!(case.ask(&web, Purpose::Restored).is_ok());
    case.rejected.insert("refused".into());
    assert_eq!(case.refused(&web), None, "neither the refused pod nor the candidate itself counts");
}

#[test]
fn an_update_may_need_features_too() {
    let of = |cpu: &str, level: Value| {
        pod(
            "web",
            json!({"spec": {"resources": level, "initContainers": [
            {"name": "i", "resources": {"requests": {"cpu": cpu}}}]}}),
        )
    };
    let (old, new) = (of("1", json!({})), of("2", json!({"limits": {"cpu": "1"}})));
    let text = "Pod requires node features that are not available: InPlacePodLevelResourcesVerticalScaling, InPlacePodVerticalScalingInitContainers";
    assert_eq!(missing_for_update(&old, &new, &[]).as_deref(), Some(text));
    assert_eq!(missing_for_update(&old, &of("1000m", json!({})), &[]), None);
    let declared = ["InPlacePodLevelResourcesVerticalScaling", "InPlacePodVerticalScalingInitContainers"];
    assert_eq!(missing_for_update(&old, &new, &declared.map(str::to_owned)), None);
}
