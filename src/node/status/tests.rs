//! Tests of the whole status, and of events on changes.

use super::*;
use berth_ports::HandlerFeatures;
use berth_types::{
    CpuSet,
    quantity::{Amount, QuantityFormat},
};

pub(in crate::node) fn known() -> NodeObservation {
    NodeObservation {
        now: "2026-01-01T00:00:00Z".parse().expect("a time"),
        network: addresses::HostNetworkState::default(),
        facts: Arc::default(),
        runtime: Arc::default(),
        runtime_version: "containerd://2.1.0".to_owned(),
        images: None,
        devices: Arc::default(),
        volumes_in_use: None,
        storage_error: None,
    }
}

pub(in crate::node) fn settings() -> StatusSettings {
    StatusSettings {
        name: "n".to_owned(),
        hostname: "10.0.0.1".to_owned(),
        node: NodeConfig { max_pods: 110, local_storage_isolation: true, ..NodeConfig::default() },
        machine: MachineInfo {
            cpus: CpuSet::parse("0-3").expect("a set"),
            memory: 8 << 30,
            root_filesystem: Some(100 << 30),
            boot_id: "b2".to_owned(),
            machine_id: "m".to_owned(),
            system_uuid: "u".to_owned(),
            kernel_release: "6.8.0".to_owned(),
            os_image: "Some Linux".to_owned(),
            hugepages: [(2 << 20, 1 << 30)].into(),
            ..MachineInfo::default()
        },
        max_images: 50,
        port: 10250,
        kubelet_version: "v1.36.2".to_owned(),
        ..StatusSettings::default()
    }
}

fn texts(events: &[EventRecord]) -> Vec<String> {
    events.iter().map(|event| format!("{}: {}", event.reason, event.message)).collect()
}

fn condition(node: &api::Node, kind: &str) -> (String, String, String) {
    let conditions = node.status.as_ref().and_then(|status| status.conditions.as_ref()).expect("conditions");
    let found = conditions.iter().find(|condition| condition.type_ == kind).expect("there");
    (found.status.clone(), found.message.clone().unwrap_or_default(), transition(found))
}

fn transition(condition: &api::NodeCondition) -> String {
    condition.last_transition_time.as_ref().expect("set").0.to_string()
}

#[test]
fn a_new_node_reports_everything_and_ready_last() {
    // AC-05-22 (status)
    let mut known = known();
    known.facts = Arc::new(NodeFacts { declared_features: vec!["A".to_owned()], ..NodeFacts::default() });
    let handlers = [("".to_owned(), HandlerFeatures { user_namespaces: true, ..HandlerFeatures::default() })].into();
    known.runtime = Arc::new(RuntimeState { handlers, supplemental_groups_policy: true, ..RuntimeState::default() });
    known.volumes_in_use = Some(vec!["v".to_owned()]);
    let draft = draft(&settings(), &api::Node::default(), &known, &mut ReportedState::default());
    let status = serde_json::to_value(draft.node.status.as_ref().expect("set")).expect("JSON");
    assert_eq!(draft.errors, Vec::<String>::new());
    let kinds: Vec<&str> =
        status["conditions"].as_array().expect("a list").iter().filter_map(|c| c["type"].as_str()).collect();
    assert_eq!(kinds, ["MemoryPressure", "DiskPressure", "PIDPressure", "Ready"]);
    assert_eq!(
        condition(&draft.node, "Ready"),
        ("True".to_owned(), "kubelet is posting ready status".to_owned(), "2026-01-01T00:00:00Z".to_owned())
    );
    assert_eq!(status["nodeInfo"]["containerRuntimeVersion"], "containerd://2.1.0");
    assert_eq!(status["nodeInfo"]["osImage"], "Some Linux");
    assert_eq!(status["nodeInfo"]["kubeletVersion"], "v1.36.2");
    assert_eq!(status["daemonEndpoints"]["kubeletEndpoint"]["Port"], 10250);
    assert_eq!(status["runtimeHandlers"][0]["features"]["userNamespaces"], true);
    assert_eq!(status["features"]["supplementalGroupsPolicy"], true);
    assert_eq!(status["declaredFeatures"][0], "A");
    assert_eq!(status["volumesInUse"][0], "v");
    assert_eq!(status["allocatable"]["memory"], "7Gi");
    assert_eq!(
        texts(&draft.events),
        [
            "NodeHasSufficientMemory: Node n status is now: NodeHasSufficientMemory",
            "NodeHasNoDiskPressure: Node n status is now: NodeHasNoDiskPressure",
            "NodeHasSufficientPID: Node n status is now: NodeHasSufficientPID",
        ]
    );
}

#[test]
fn transitions_are_reported_once_and_keep_their_time() {
    let (settings, mut known, mut memory) = (settings(), known(), ReportedState::default());
    let base = draft(&settings, &api::Node::default(), &known, &mut memory).node;
    let later = |known: &NodeObservation, seconds: i64| known.now + jiff::SignedDuration::from_secs(seconds);
    known.now = later(&known, 60);
    let trouble = "container runtime network not ready: NetworkReady=false reason:NetworkPluginNotReady message:x";
    // AC-05-28
    known.runtime = Arc::new(RuntimeState { network_error: Some(trouble.to_owned()), ..RuntimeState::default() });
    known.facts = Arc::new(NodeFacts { pressures: vec!["DiskPressure".to_owned()], ..NodeFacts::default() });
    let first = draft(&settings, &base, &known, &mut memory);
    assert_eq!(condition(&first.node, "Ready"), ("False".into(), trouble.into(), "2026-01-01T00:01:00Z".into()));
    assert_eq!(condition(&first.node, "DiskPressure").1, "kubelet has disk pressure");
    assert_eq!(first.events.len(), 2, "{:?}", first.events);
    assert_eq!(first.events[1].message, "Node n status is now: NodeNotReady");
    // The API server was not reached; a minute later the same is reported with the same time, and no event.
    known.now = later(&known, 60);
    let second = draft(&settings, &base, &known, &mut memory);
    assert_eq!(condition(&second.node, "Ready").2, "2026-01-01T00:01:00Z");
    assert_eq!(second.events, Vec::new());
    known.runtime = Arc::default();
    let third = draft(&settings, &second.node, &known, &mut memory);
    assert_eq!(condition(&third.node, "Ready").2, "2026-01-01T00:02:00Z");
    assert_eq!(texts(&third.events), ["NodeReady: Node n status is now: NodeReady"]);
}

#[test]
fn every_cause_of_an_unready_node_is_reported() {
    // AC-05-29 (the condition)
    let mut known = known();
    known.runtime = Arc::new(RuntimeState {
        runtime_error: Some("container runtime is down".to_owned()),
        network_error: Some("no net".to_owned()),
        ..RuntimeState::default()
    });
    known.storage_error = Some("CSINode is not yet initialized".to_owned());
    known.facts = Arc::new(NodeFacts { shutting_down: true, ..NodeFacts::default() });
    let mut settings = settings();
    settings.machine.root_filesystem = None;
    settings.soft_problem = Some("CPU hardcapping unsupported".to_owned());
    let node = draft(&settings, &api::Node::default(), &known, &mut ReportedState::default()).node;
    assert_eq!(
        condition(&node, "Ready").1,
        "[container runtime is down, no net, CSINode is not yet initialized, node is shutting down, \
         missing node capacity for resources: ephemeral-storage]. WARNING: CPU hardcapping unsupported"
    );
    settings.node.local_storage_isolation = false;
    let node = draft(&settings, &api::Node::default(), &super::tests::known(), &mut ReportedState::default()).node;
    assert_eq!(condition(&node, "Ready").1, "kubelet is posting ready status. WARNING: CPU hardcapping unsupported");
}

#[test]
fn images_are_the_largest_with_a_few_names() {
    // AC-05-26
    let names = |kind: &str, count: usize| (0..count).map(|i| format!("{kind}{i}")).collect::<Vec<_>>();
    let image = |i: u64| NodeImage { id: format!("{i:02}"), size: i / 2, digests: names("d", 3), tags: names("t", 5) };
    let mut known = known();
    known.images = Some((0..60).map(image).collect());
    let node = draft(&settings(), &api::Node::default(), &known, &mut ReportedState::default()).node;
    let images = node.status.and_then(|status| status.images).expect("images");
    assert_eq!((images.len(), images[0].size_bytes, images[49].size_bytes), (50, Some(29), Some(5)));
    assert_eq!(images[0].names.as_deref().expect("names"), ["d0", "d1", "d2", "t0", "t1"]);
    let all = StatusSettings { max_images: -1, ..settings() };
    let node = draft(&all, &api::Node::default(), &known, &mut ReportedState::default()).node;
    assert_eq!(node.status.and_then(|status| status.images).map(|images| images.len()), Some(60));
}

#[test]
fn resources_of_others_stay_and_devices_are_added() {
    let amount = |count| Amount::from_value(count, QuantityFormat::DecimalSi);
    let quantity = |text: &str| k8s_openapi::apimachinery::pkg::api::resource::Quantity(text.to_owned());
    let mut base = api::Node::default();
    let status = base.status.get_or_insert_default();
    status.capacity =
        Some([("example.com/own".to_owned(), quantity("3")), ("memory".to_owned(), quantity("8388608Ki"))].into());
    status.allocatable = Some([("example.com/gone".to_owned(), quantity("1"))].into());
    let mut known = known();
    known.devices = Arc::new(DevicePluginResources {
        capacity: [("x.y/gpu".to_owned(), amount(4))].into(),
        allocatable: [("x.y/gpu".to_owned(), amount(3))].into(),
        removed: ["x.y/old".to_owned()].into(),
    });
    let node = draft(&settings(), &base, &known, &mut ReportedState::default()).node;
    let status = node.status.expect("set");
    let line = |list: Option<BTreeMap<String, _>>| {
        let list: BTreeMap<String, k8s_openapi::apimachinery::pkg::api::resource::Quantity> = list.expect("set");
        list.iter().map(|(name, quantity)| format!("{name}={}", quantity.0)).collect::<Vec<_>>().join(" ")
    };
    // Memory keeps its original text: the amount is equal.
    assert_eq!(
        line(status.capacity),
        "cpu=4 ephemeral-storage=100Gi example.com/own=3 hugepages-2Mi=1Gi memory=8388608Ki pods=110 x.y/gpu=4 \
         x.y/old=0"
    );
    assert_eq!(
        line(status.allocatable),
        "cpu=4 ephemeral-storage=100Gi example.com/own=3 hugepages-2Mi=1Gi memory=7Gi pods=110 x.y/gpu=3 x.y/old=0"
    );
}

#[test]
fn reboots_and_cordons_are_reported_once() {
    let (settings, known, mut memory) = (settings(), known(), ReportedState::default());
    let mut base = draft(&settings, &api::Node::default(), &known, &mut memory).node;
    if let Some(info) = base.status.as_mut().and_then(|status| status.node_info.as_mut()) {
        info.boot_id = "b1".to_owned();
    }
    base.spec.get_or_insert_default().unschedulable = Some(true);
    let first = draft(&settings, &base, &known, &mut memory);
    assert_eq!(
        texts(&first.events),
        [
            "Rebooted: Node n has been rebooted, boot id: b2",
            "NodeNotSchedulable: Node n status is now: NodeNotSchedulable"
        ]
    );
    assert_eq!(draft(&settings, &base, &known, &mut memory).events, Vec::new());
    base.spec = None;
    assert_eq!(
        texts(&draft(&settings, &base, &known, &mut memory).events),
        ["NodeSchedulable: Node n status is now: NodeSchedulable"]
    );
}

#[test]
fn swap_that_is_off_is_forgotten() {
    let mut settings = settings();
    settings.machine.swap = 8192;
    let on = draft(&settings, &api::Node::default(), &known(), &mut ReportedState::default()).node;
    let swap = |node: &api::Node| {
        let info = node.status.as_ref().and_then(|status| status.node_info.as_ref()).expect("set");
        info.swap.as_ref().and_then(|swap| swap.capacity)
    };
    assert_eq!(swap(&on), Some(8192));
    settings.machine.swap = 0;
    assert_eq!(swap(&draft(&settings, &on, &known(), &mut ReportedState::default()).node), None);
}
