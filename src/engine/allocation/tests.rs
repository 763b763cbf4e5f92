//! Tests of the allocator with an in-memory checkpoint.

use std::{
    collections::{BTreeMap, HashSet},
    io,
    path::Path,
    sync::{Arc, Mutex},
    time::Duration,
};

use async_trait::async_trait;
use jiff::Timestamp;
use serde_json::{Value, json};
use tokio_util::sync::CancellationToken;

use super::{
    ActuationProgress, Allocator, AllocatorDeps, Candidate, Retry, RetryResult, RuntimePresence, Trigger,
    resize::ResizeRules,
};
use crate::engine::admission::{AdmissionRejection, AdmissionRules};
use berth_metrics::{AdmissionMetrics, AllocationMetrics, Registry};
use berth_ports::{
    AllocationRefusal, Clock, ContainerDevices, DeviceAdmission, EventRecord, EventSink, NoDevices, NodeFacts,
    PodDevices, StateFile,
};
use berth_types::{Pod, PodUid, api};

#[derive(Default)]
struct MemoryFile {
    content: Mutex<Option<Vec<u8>>>,
    writes: Mutex<usize>,
}

#[async_trait]
impl StateFile for MemoryFile {
    fn path(&self) -> &Path {
        Path::new("/state/allocated_pods_state")
    }

    async fn read(&self) -> io::Result<Option<Vec<u8>>> {
        Ok(self.content.lock().expect("unpoisoned").clone())
    }

    async fn replace(&self, content: Vec<u8>) -> io::Result<()> {
        *self.content.lock().expect("unpoisoned") = Some(content);
        *self.writes.lock().expect("unpoisoned") += 1;
        Ok(())
    }
}

#[derive(Default)]
struct Events(Mutex<Vec<String>>);

impl EventSink for Events {
    fn record(&self, event: EventRecord) {
        let text = format!("{:?} {} {}", event.kind, event.reason, event.message);
        self.0.lock().expect("unpoisoned").push(text);
    }
}

struct FixedClock;

impl Clock for FixedClock {
    fn now(&self) -> Timestamp {
        Timestamp::UNIX_EPOCH
    }
}

/// CPU manager that refuses resizes as long as it has a reason.
#[derive(Default)]
struct CpuRefusal {
    refusal: Mutex<Option<AllocationRefusal>>,
    /// CPU requests of the pods that were to be resized.
    requests: Mutex<Vec<String>>,
}

#[async_trait]
impl PodDevices for CpuRefusal {
    fn admit(&self, _: &Arc<Pod>, _: bool, _: &dyn Fn() -> Option<HashSet<PodUid>>) -> DeviceAdmission {
        DeviceAdmission::Allocated
    }

    fn admit_resize(&self, pod: &Pod) -> Result<(), AllocationRefusal> {
        self.requests.lock().expect("unpoisoned").push(cpu(pod));
        self.refusal.lock().expect("unpoisoned").clone().map_or(Ok(()), Err)
    }

    async fn settled(&self, _: &PodUid) {}

    fn allocatable(&self, _: &PodUid) -> BTreeMap<String, u64> {
        BTreeMap::new()
    }

    fn release(&self, _: &PodUid) {}

    async fn container_devices(&self, _: &Arc<Pod>, _: &api::Container) -> Result<ContainerDevices, String> {
        Ok(ContainerDevices::default())
    }

    fn health(&self, _: &PodUid, _: &str) -> Vec<api::ResourceStatus> {
        Vec::new()
    }
}

struct Bench {
    file: Arc<MemoryFile>,
    rules: AdmissionRules,
    devices: Arc<dyn PodDevices>,
    events: Arc<Events>,
    metrics: AllocationMetrics,
    rejections: AdmissionMetrics,
    node: NodeFacts,
}

impl Bench {
    fn new() -> Self {
        let registry = Registry::new();
        let list = |pairs: [(&str, &str); 3]| pairs.map(|(k, v)| (k.to_owned(), v.to_owned())).into_iter().collect();
        let allocatable: BTreeMap<String, String> = list([("pods", "110"), ("cpu", "4"), ("memory", "8Gi")]);
        Self {
            file: Arc::default(),
            rules: AdmissionRules::default(),
            devices: Arc::new(NoDevices),
            events: Arc::default(),
            metrics: AllocationMetrics::new(&registry),
            rejections: AdmissionMetrics::new(&registry),
            node: NodeFacts { name: "n".to_owned(), allocatable, ..NodeFacts::default() },
        }
    }

    async fn load(&self) -> Result<Allocator, super::StateError> {
        let mut allocator = Allocator::load(AllocatorDeps {
            file: self.file.clone(),
            events: self.events.clone(),
            clock: Arc::new(FixedClock),
            rules: self.rules.clone(),
            admission: self.rejections.clone(),
            allocation: self.metrics.clone(),
        })
        .await?;
        let writer = allocator.take_writer().expect("not taken yet");
        tokio::spawn(writer.run(CancellationToken::new()));
        Ok(allocator)
    }

    fn admit(&self, to: &mut Allocator, pod: &Arc<Pod>, active: &[Arc<Pod>]) -> bool {
        to.admit(Candidate { pod, presence: RuntimePresence::Absent, active, node: &self.node }).is_ok()
    }

    async fn retry(&self, on: &mut Allocator, trigger: Trigger, active: &[Arc<Pod>]) -> RetryResult {
        let (node, devices) = (&self.node, &*self.devices);
        on.retry(Retry { trigger, sources_ready: true, active, node, devices }).await
    }

    fn events(&self) -> Vec<String> {
        std::mem::take(&mut self.events.0.lock().expect("unpoisoned"))
    }
}

fn pod(name: &str, cpu: &str, generation: i64) -> Arc<Pod> {
    build(json!({"metadata": {"name": name, "namespace": "n", "uid": name, "generation": generation},
        "spec": {"containers": [{"name": "c", "resources": {"requests": {"cpu": cpu}}}]}}))
}

fn build(object: Value) -> Arc<Pod> {
    Arc::new(Pod::new(serde_json::from_value(object).expect("a pod")).expect("complete"))
}

fn cpu(pod: &Pod) -> String {
    let requests = pod.containers()[0].resources.as_ref().and_then(|r| r.requests.clone());
    requests.and_then(|mut r| r.remove("cpu")).map(|q| q.0).unwrap_or_default()
}

fn conditions(of: &Allocator, pod: &Pod) -> Vec<String> {
    let all = of.allocations().conditions(pod.uid());
    all.into_iter()
        .map(|c| format!("{} {} {}", c.type_, c.reason.unwrap_or_default(), c.observed_generation.unwrap_or(0)))
        .collect()
}

#[tokio::test]
async fn a_resize_waits_for_room_and_is_then_granted() {
    // AC-02a-19
    let bench = Bench::new();
    let mut allocator = bench.load().await.expect("no file yet");
    let (web, other) = (pod("web", "1", 1), pod("other", "2", 1));
    assert!(bench.admit(&mut allocator, &web, std::slice::from_ref(&other)));
    assert!(bench.admit(&mut allocator, &other, std::slice::from_ref(&web)));
    let wanted = pod("web", "3", 2);
    assert!(allocator.updated(&web, &wanted));
    let active = [wanted.clone(), other];
    let tried = bench.retry(&mut allocator, Trigger::PodUpdated, &active).await;
    assert_eq!((tried.next, tried.changed.len()), (Duration::from_secs(180), 1));
    assert_eq!(conditions(&allocator, &wanted), ["PodResizePending Deferred 2"]);
    assert_eq!(cpu(&allocator.allocated(&wanted)), "1", "the worker sees the allocation");
    let summary = r#"{"containers":[{"name":"c","resources":{"requests":{"cpu":"3"}}}],"generation":2}"#;
    assert_eq!(bench.events(), [format!("Warning ResizeDeferred Pod resize OutOfcpu: {summary}")]);
    bench.retry(&mut allocator, Trigger::Periodic, &active).await;
    assert_eq!(bench.events(), Vec::<String>::new(), "reported once");
    assert_eq!(bench.metrics.pending.with_label_values(&["deferred"]).get(), 1);

    allocator.forget(&"other".into());
    let tried = bench.retry(&mut allocator, Trigger::PodsRemoved, std::slice::from_ref(&wanted)).await;
    assert_eq!(tried.changed, ["web".into()]);
    assert_eq!(bench.events(), [format!("Normal ResizeStarted Pod resize started: {summary}")]);
    assert_eq!(conditions(&allocator, &wanted), ["PodResizeInProgress  2"]);
    assert_eq!(cpu(&allocator.allocated(&wanted)), "3");
    assert_eq!(bench.metrics.deferred_accepted.with_label_values(&["pods_removed"]).get(), 1);
    assert_eq!(bench.metrics.in_progress.get(), 1);
    assert!(!allocator.has_pending());

    let shared = allocator.allocations();
    shared.progress(&web, ActuationProgress::Done);
    assert_eq!(conditions(&allocator, &wanted).len(), 1, "news about the old allocation are ignored");
    shared.progress(&wanted, ActuationProgress::Failed("no"));
    shared.progress(&wanted, ActuationProgress::Failed("no"));
    shared.progress(&wanted, ActuationProgress::Ongoing);
    assert_eq!(conditions(&allocator, &wanted), ["PodResizeInProgress Error 2"]);
    shared.progress(&wanted, ActuationProgress::Done);
    shared.progress(&wanted, ActuationProgress::Done);
    let failed = summary.strip_suffix('}').expect("an object");
    assert_eq!(
        bench.events(),
        [
            format!("Warning ResizeError Pod resize error: {failed},\"error\":\"no\"}}"),
            format!("Normal ResizeCompleted Pod resize completed: {summary}"),
        ]
    );
    assert_eq!((conditions(&allocator, &wanted).len(), bench.metrics.in_progress.get()), (0, 0));
}

#[tokio::test]
async fn a_resize_beyond_the_node_is_deferred_and_may_be_taken_back() {
    // AC-02a-20
    let bench = Bench::new();
    let mut allocator = bench.load().await.expect("no file yet");
    let (web, wanted) = (pod("web", "1", 1), pod("web", "100", 2));
    assert!(bench.admit(&mut allocator, &web, &[]));
    allocator.updated(&web, &wanted);
    bench.retry(&mut allocator, Trigger::PodUpdated, std::slice::from_ref(&wanted)).await;
    assert_eq!(conditions(&allocator, &wanted), ["PodResizePending Deferred 2"]);
    let back = pod("web", "1", 3);
    assert!(!allocator.updated(&wanted, &back));
    assert_eq!((conditions(&allocator, &back).len(), allocator.has_pending()), (0, false));
    let labels = ["cpu", "requests", "increase"];
    assert_eq!(bench.metrics.requested.with_label_values(&labels).get(), 1);
}

#[tokio::test]
async fn an_infeasible_resize_leaves_the_list() {
    let bench = Bench::new();
    let mut allocator = bench.load().await.expect("no file yet");
    let level = |cpu: &str| {
        build(json!({"metadata": {"name": "web", "namespace": "n", "uid": "web"},
            "spec": {"containers": [{"name": "c"}], "resources": {"requests": {"cpu": cpu}}}}))
    };
    allocator.store(&level("1"));
    assert!(allocator.updated(&level("1"), &level("2")));
    bench.retry(&mut allocator, Trigger::PodUpdated, &[level("2")]).await;
    assert_eq!(conditions(&allocator, &level("2")), ["PodResizePending Infeasible 0"]);
    assert!(!allocator.has_pending());
    assert_eq!(bench.metrics.infeasible.with_label_values(&["plr_feature_gate_off"]).get(), 1);
    let events = bench.events();
    assert!(events[0].starts_with("Warning ResizeInfeasible Pod resize Infeasible: {"), "{events:?}");
}

#[tokio::test]
async fn a_resize_without_exclusive_cpus_is_deferred_until_there_are_some() {
    let devices = Arc::new(CpuRefusal::default());
    let resize = ResizeRules { allocates_cpus: true, ..ResizeRules::default() };
    let rules = AdmissionRules { resize, ..AdmissionRules::default() };
    let bench = Bench { rules, devices: devices.clone(), ..Bench::new() };
    let mut allocator = bench.load().await.expect("no file yet");
    let guaranteed = |cpu: &str, memory: &str, generation: i64| {
        let amounts = json!({"cpu": cpu, "memory": memory});
        build(json!({"metadata": {"name": "web", "namespace": "n", "uid": "web", "generation": generation},
            "spec": {"containers": [{"name": "c", "resources": {"requests": amounts, "limits": amounts}}]}}))
    };
    let (web, wanted) = (guaranteed("1500m", "1Gi", 1), guaranteed("2", "1Gi", 2));
    assert!(bench.admit(&mut allocator, &web, &[]));
    let locality = "Resources cannot be allocated with Topology locality";
    let refusal =
        AllocationRefusal { reason: Some("TopologyAffinityError"), ..AllocationRefusal::from(locality.to_owned()) };
    *devices.refusal.lock().expect("unpoisoned") = Some(refusal);
    assert!(allocator.updated(&web, &wanted));
    bench.retry(&mut allocator, Trigger::PodUpdated, std::slice::from_ref(&wanted)).await;
    let pending = allocator.allocations().conditions(wanted.uid());
    assert_eq!(conditions(&allocator, &wanted), ["PodResizePending Deferred 2"]);
    assert_eq!(pending[0].message.as_deref(), Some(locality));
    assert_eq!((cpu(&allocator.allocated(&wanted)).as_str(), allocator.has_pending()), ("1500m", true));

    *devices.refusal.lock().expect("unpoisoned") = None;
    bench.retry(&mut allocator, Trigger::PodsRemoved, std::slice::from_ref(&wanted)).await;
    assert_eq!(conditions(&allocator, &wanted), ["PodResizeInProgress  2"]);
    assert_eq!(cpu(&allocator.allocated(&wanted)), "2");
    // More than the node has, and more memory: no CPUs are allocated.
    for next in [guaranteed("5", "1Gi", 3), guaranteed("2", "2Gi", 4)] {
        allocator.updated(&wanted, &next);
        bench.retry(&mut allocator, Trigger::PodUpdated, std::slice::from_ref(&next)).await;
    }
    assert_eq!(*devices.requests.lock().expect("unpoisoned"), ["2", "2"]);
}

#[tokio::test]
async fn nothing_is_tried_before_all_sources_are_ready() {
    let bench = Bench::new();
    let mut allocator = bench.load().await.expect("no file yet");
    let (trigger, node) = (Trigger::Periodic, &bench.node);
    let retry = Retry { trigger, sources_ready: false, active: &[], node, devices: &NoDevices };
    assert_eq!(allocator.retry(retry).await.next, Duration::from_secs(30));
}

#[tokio::test(start_paused = true)]
async fn allocations_outlive_the_agent() {
    let bench = Bench::new();
    let web = pod("web", "4", 1);
    let mut first = bench.load().await.expect("no file yet");
    assert!(bench.admit(&mut first, &web, &[]));
    first.store(&web);
    tokio::time::sleep(Duration::from_secs(2)).await;
    first.store(&web);
    tokio::time::sleep(Duration::from_secs(2)).await;
    assert_eq!(*bench.file.writes.lock().expect("unpoisoned"), 1, "not rewritten when unchanged");

    let mut second = bench.load().await.expect("sound");
    let changed = pod("web", "5", 2);
    assert_eq!(cpu(&second.allocated(&changed)), "4");
    let blocker = [pod("blocker", "1", 1)];
    let mut ask = Candidate { pod: &changed, presence: RuntimePresence::Absent, active: &blocker, node: &bench.node };
    assert_eq!(second.admit(ask).expect_err("no room").reason, "OutOfcpu");
    ask.presence = RuntimePresence::Running;
    assert!(second.admit(ask).is_ok(), "it held this before the restart and runs");
    second.added(&changed);
    assert!(second.has_pending());
    assert_eq!(cpu(&second.allocated(&changed)), "4");
}

#[tokio::test]
async fn a_damaged_file_stops_the_start() {
    // AC-02a-21
    let bench = Bench::new();
    *bench.file.content.lock().expect("unpoisoned") = Some(br#"{"data":"{}","checksum":1}"#.to_vec());
    let error = bench.load().await.err().map(|e| e.to_string());
    let text = "could not restore state from checkpoint: checkpoint is corrupted, please drain this node and delete pod allocation checkpoint file \"/state/allocated_pods_state\" before restarting Kubelet";
    assert_eq!(error.as_deref(), Some(text));
}

#[tokio::test]
async fn a_rejected_pod_is_counted_gets_an_event_and_has_no_allocation() {
    let bench = Bench::new();
    let mut allocator = bench.load().await.expect("no file yet");
    let (large, small) = (pod("large", "5", 1), pod("small", "4", 1));
    let ask = Candidate { pod: &large, presence: RuntimePresence::Absent, active: &[], node: &bench.node };
    let refusal = allocator.admit(ask).expect_err("no room");
    allocator.reject(&large, &refusal);
    assert_eq!(bench.rejections.rejections.with_label_values(&["OutOfcpu"]).get(), 1);
    let text = "Warning OutOfcpu Node didn't have enough resource: cpu, requested: 5000, used: 0, capacity: 4000";
    assert_eq!(bench.events(), [text]);
    assert!(bench.admit(&mut allocator, &small, std::slice::from_ref(&large)));
}

#[tokio::test]
async fn the_event_of_a_refused_alignment_has_an_explanation() {
    let bench = Bench::new();
    let mut allocator = bench.load().await.expect("no file yet");
    let refusal = AdmissionRejection::failed_allocation(&AllocationRefusal {
        reason: Some("TopologyAffinityError"),
        message: "Resources cannot be allocated with Topology locality".to_owned(),
        detail: Some("cpu: available on nodes 0,1".to_owned()),
    });
    allocator.reject(&pod("web", "4", 1), &refusal);
    let text = "Warning TopologyAffinityError Resources cannot be allocated with Topology locality: cpu: available on \
                nodes 0,1";
    assert_eq!(bench.events(), [text]);
}

#[tokio::test]
async fn conditions_are_rebuilt_from_the_api() {
    let bench = Bench::new();
    let mut allocator = bench.load().await.expect("no file yet");
    let mut object = pod("web", "1", 1).to_object();
    object.status = serde_json::from_value(json!({"conditions": [
        {"type": "PodResizePending", "status": "True", "reason": "Deferred", "observedGeneration": 7}]}))
    .expect("a status");
    let web = Arc::new(Pod::new(object).expect("complete"));
    allocator.added(&web);
    assert_eq!(conditions(&allocator, &web), ["PodResizePending Deferred 7"]);
    allocator.allocations().finished(web.uid());
    assert_eq!(conditions(&allocator, &web).len(), 0);
}

#[tokio::test]
async fn a_critical_pods_resize_names_its_victims_once() {
    let bench = Bench::new();
    let mut allocator = bench.load().await.expect("no file yet");
    let critical = |cpu: &str| {
        build(json!({"metadata": {"name": "critical", "namespace": "n", "uid": "critical"},
            "spec": {"priority": 2_000_000_000,
                "containers": [{"name": "c", "resources": {"requests": {"cpu": cpu}}}]}}))
    };
    let (old, wanted, victim) = (critical("1"), critical("3"), pod("victim", "2", 1));
    allocator.store(&old);
    allocator.store(&victim);
    assert!(allocator.updated(&old, &wanted));
    let active = [wanted.clone(), victim];
    let tried = bench.retry(&mut allocator, Trigger::PodUpdated, &active).await;
    assert_eq!(tried.preempt.len(), 1);
    allocator.victims_of(&tried.preempt[0].admitted)();
    assert_eq!(bench.rejections.preemptions.with_label_values(&["cpu"]).get(), 1);
    assert!(bench.retry(&mut allocator, Trigger::PodsAdded, &active).await.preempt.is_empty());
    assert_eq!(bench.retry(&mut allocator, Trigger::Periodic, &active).await.preempt.len(), 1, "it stayed");
    allocator.forget(&"victim".into());
    let tried = bench.retry(&mut allocator, Trigger::PodsRemoved, std::slice::from_ref(&wanted)).await;
    assert_eq!((tried.changed.len(), cpu(&allocator.allocated(&wanted)).as_str()), (1, "3"));
}
