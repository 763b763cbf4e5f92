//! Running pods while their environment changes: cgroups, resizes, readiness gates, and the clock.

use std::{
    collections::{BTreeMap, HashSet},
    sync::{Arc, Mutex},
    time::Duration,
};

use async_trait::async_trait;
use berth_ports::{AllocationRefusal, ContainerDevices, DeviceAdmission, PodDevices};
use berth_types::{Pod, PodUid, api};
use serde_json::{Value, json};

use berth_testkit::{
    agent::{Agent, Machine, Setup},
    pods::{pod, pod_with, simple},
    scripted_cri::{Behaviour, Fault},
};

const SOON: Duration = Duration::from_secs(2);
/// Maximum time between two syncs of a settled pod: 1.5 times `syncFrequency`.
const NEXT_TURN: Duration = Duration::from_secs(92);

#[tokio::test(start_paused = true)]
async fn a_cgroup_that_vanishes_is_made_again() {
    // AC-06a-17
    let machine = Machine::new();
    let agent = machine.start().await;
    let web = pod("web", json!({"containers": [{"name": "main"}, {"name": "other"}]}));
    agent.only_static([&web]).await;
    agent.until_ready(web.uid(), SOON).await;
    let before = machine.cri.running("web", "main");
    machine.cri.clear_calls();
    machine.disk.lose_cgroup(web.uid());
    let again = |c: &berth_testkit::scripted_cri::ScriptedCri| c.count("start_container") == 2;
    machine.cri.until("both run again", NEXT_TURN, again).await;
    agent.until_ready(web.uid(), SOON).await;
    assert!(machine.disk.cgroups().contains(web.uid()));
    assert_ne!(machine.cri.running("web", "main"), before);
    tokio::time::sleep(2 * NEXT_TURN).await;
    assert_eq!(machine.cri.count("stop_container"), 2, "each is killed once");
    assert_eq!(machine.cri.count("run_podsandbox"), 1);
    assert_eq!(machine.cri.count("start_container"), 2);
    assert_eq!(machine.cri.history().overlaps(), Vec::<String>::new());
    agent.stop(SOON).await;
}

#[tokio::test(start_paused = true)]
async fn a_pod_that_dies_with_its_cgroup_comes_back_in_a_new_one() {
    let machine = Machine::new();
    let agent = machine.start().await;
    let (web, job) = (simple("web"), pod("job", json!({"restartPolicy": "Never", "containers": [{"name": "job"}]})));
    agent.only_static([&web, &job]).await;
    agent.until_ready(web.uid(), SOON).await;
    agent.until_ready(job.uid(), SOON).await;
    machine.cri.clear_calls();
    for uid in [web.uid(), job.uid()] {
        machine.disk.lose_cgroup(uid);
    }
    for sandbox in machine.cri.sandboxes() {
        machine.cri.kill_sandbox(&sandbox.id);
    }
    agent.until(job.uid(), "failed", SOON, |s| s.phase.as_deref() == Some("Failed")).await;
    machine.cri.until("it runs again", SOON, |c| c.running("web", "main").len() == 1).await;
    assert!(machine.disk.cgroups().contains(web.uid()), "before anything was put into it");
    assert!(!machine.disk.cgroups().contains(job.uid()), "nothing will ever run in it");
    assert_eq!(machine.cri.count("stop_container"), 0, "nobody is killed twice");
    agent.stop(SOON).await;
}

/// An API pod with a CPU request, and the allocation in its status.
fn sized(name: &str, cpu: &str, seen: &str) -> Arc<Pod> {
    let resources = json!({"requests": {"cpu": cpu}});
    let metadata = json!({"annotations": null, "generation": if cpu == seen { 1 } else { 2 }});
    let plain = pod_with(name, metadata, json!({"containers": [{"name": "main", "resources": resources}]}));
    let mut object = plain.to_object();
    object.status = serde_json::from_value(json!({"phase": "Running", "containerStatuses": [{
        "name": "main", "image": "", "imageID": "", "ready": true, "restartCount": 0,
        "resources": {"requests": {"cpu": seen}}, "allocatedResources": {"cpu": seen},
    }]}))
    .expect("a status");
    Arc::new(Pod::new(object).expect("complete"))
}

fn condition(status: &api::PodStatus, kind: &str) -> Option<String> {
    let found = status.conditions.iter().flatten().find(|c| c.type_ == kind);
    found.map(|c| format!("{} {}", c.status, c.reason.as_deref().unwrap_or_default()))
}

async fn with_pods(machine: &Machine, pods: &[&Arc<Pod>]) -> Agent {
    let agent = machine.start().await;
    agent.files([]).await;
    agent.api(pods.iter().copied()).await;
    for pod in pods {
        agent.until_ready(pod.uid(), SOON).await;
    }
    agent
}

#[tokio::test(start_paused = true)]
async fn a_resize_reports_its_start_error_and_completion() {
    let machine = Machine::new();
    let web = sized("web", "1", "1");
    let agent = with_pods(&machine, &[&web]).await;
    machine.cri.fault("update_container", "", Fault::Error(tonic::Code::Unknown, "busy".to_owned()), Some(1));
    agent.api([&sized("web", "2", "1")]).await;
    let failed = |s: &api::PodStatus| condition(s, "PodResizeInProgress").as_deref() == Some("True Error");
    agent.until(web.uid(), "the first attempt failed", SOON, failed).await;
    let done = |s: &api::PodStatus| condition(s, "PodResizeInProgress").is_none();
    agent.until(web.uid(), "applied", Duration::from_secs(20), done).await;
    let resize_events: Vec<String> = agent.events.texts().into_iter().filter(|t| t.contains("Pod resize ")).collect();
    let starts =
        ["ResizeStarted: Pod resize started", "ResizeError: Pod resize error", "ResizeCompleted: Pod resize completed"];
    assert_eq!(resize_events.len(), starts.len(), "{resize_events:#?}");
    assert!(resize_events.iter().zip(starts).all(|(text, start)| text.starts_with(start)), "{resize_events:#?}");
    agent.stop(SOON).await;
}

#[tokio::test(start_paused = true)]
async fn memory_that_is_in_use_is_not_taken_away() {
    // AC-06a-21
    let limited = |memory: &str, generation: i64| {
        let resources = json!({"requests": {"memory": "10"}, "limits": {"memory": memory}});
        let metadata = json!({"annotations": null, "generation": generation});
        pod_with("web", metadata, json!({"containers": [{"name": "main", "resources": resources}]}))
    };
    let machine = Machine::new();
    machine.disk.use_memory(150);
    let web = limited("200", 1);
    let agent = with_pods(&machine, &[&web]).await;
    agent.api([&limited("100", 2)]).await;
    let failed = |s: &api::PodStatus| condition(s, "PodResizeInProgress").as_deref() == Some("True Error");
    let status = agent.until(web.uid(), "refused", SOON, failed).await;
    let text = "cannot decrease memory limits: attempting to set container \"main\" memory limit (100) below current usage (150)";
    let resize_condition = status.conditions.iter().flatten().find(|c| c.type_ == "PodResizeInProgress");
    assert_eq!(resize_condition.and_then(|c| c.message.as_deref()), Some(text));
    assert_eq!(machine.cri.count("update_container"), 0);
    machine.disk.use_memory(50);
    let done = |s: &api::PodStatus| condition(s, "PodResizeInProgress").is_none();
    agent.until(web.uid(), "applied once it is free", Duration::from_secs(20), done).await;
    assert_eq!(machine.cri.count("update_container"), 1);
    agent.stop(SOON).await;
}

#[tokio::test(start_paused = true)]
async fn a_resize_that_was_cut_short_is_in_progress_after_a_restart() {
    let machine = Machine::new();
    let web = sized("web", "1", "1");
    let agent = with_pods(&machine, &[&web]).await;
    machine.cri.fault("update_container", "", Fault::Hang, None);
    let wanted = sized("web", "2", "1");
    agent.api([&wanted]).await;
    machine.cri.until("being applied", SOON, |c| c.count("update_container") == 1).await;
    tokio::time::sleep(SOON).await; // the allocation is written to disk
    agent.kill();
    let agent = machine.start().await;
    agent.files([]).await;
    agent.api([&wanted]).await;
    let progress = |s: &api::PodStatus| condition(s, "PodResizeInProgress").is_some();
    agent.until(web.uid(), "in progress", SOON, progress).await;
    machine.cri.heal();
    let done = |s: &api::PodStatus| condition(s, "PodResizeInProgress").is_none();
    agent.until(web.uid(), "applied", Duration::from_secs(300), done).await;
    agent.stop(SOON).await;
}

#[tokio::test(start_paused = true)]
async fn room_that_a_shrunk_pod_leaves_goes_to_who_waits() {
    let machine = Machine::new();
    let (large, small) = (sized("large", "2", "2"), sized("small", "1", "1"));
    let agent = with_pods(&machine, &[&large, &small]).await;
    // The large pod requests less, but still has its old allocation; so the small one cannot grow.
    let (shrinking, growing) = (sized("large", "1", "2"), sized("small", "3", "1"));
    agent.api([&shrinking, &growing]).await;
    let deferred = |s: &api::PodStatus| condition(s, "PodResizePending").as_deref() == Some("True Deferred");
    agent.until(small.uid(), "deferred", SOON, deferred).await;
    agent.api([&sized("large", "1", "1"), &growing]).await;
    agent.until(small.uid(), "granted", SOON, |s| condition(s, "PodResizePending").is_none()).await;
    assert_eq!(agent.metric("kubelet_pod_deferred_accepted_resizes_total", "pod_resized"), 1.0);
    agent.stop(SOON).await;
}

/// Records the CPU request of each pod whose devices, CPUs, and memory are allocated.
#[derive(Default)]
struct AllocationRecorder(Mutex<Vec<String>>);

#[async_trait]
impl PodDevices for AllocationRecorder {
    fn admit(&self, pod: &Arc<Pod>, _: bool, _: &dyn Fn() -> Option<HashSet<PodUid>>) -> DeviceAdmission {
        let resources = pod.containers()[0].resources.clone().unwrap_or_default();
        let cpu = resources.requests.unwrap_or_default().remove("cpu").expect("a CPU request");
        self.0.lock().expect("whole").push(cpu.0);
        DeviceAdmission::Allocated
    }

    fn admit_resize(&self, _: &Pod) -> Result<(), AllocationRefusal> {
        Ok(())
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

/// Otherwise a pod with exclusive CPUs would be refused after a restart, because it has another number of them.
#[tokio::test(start_paused = true)]
async fn a_pending_resize_does_not_count_when_resources_are_allocated_after_a_restart() {
    let devices = Arc::<AllocationRecorder>::default();
    let machine = Machine::with(Setup { devices: devices.clone(), ..Setup::default() });
    let web = sized("web", "1", "1");
    let agent = with_pods(&machine, &[&web]).await;
    // The node has four CPUs.
    let wanted = sized("web", "5", "1");
    agent.api([&wanted]).await;
    let deferred = |s: &api::PodStatus| condition(s, "PodResizePending").as_deref() == Some("True Deferred");
    agent.until(web.uid(), "deferred", SOON, deferred).await;
    tokio::time::sleep(SOON).await; // the allocation is written to disk
    agent.kill();
    let agent = machine.start().await;
    agent.files([]).await;
    agent.api([&wanted]).await;
    agent.until(web.uid(), "deferred again", Duration::from_secs(60), deferred).await;
    assert_eq!(*devices.0.lock().expect("whole"), ["1", "1"]);
    agent.stop(SOON).await;
}

/// An API pod with a readiness gate, and that condition in its API status.
fn gated(gate: &str) -> Arc<Pod> {
    let spec = json!({"containers": [{"name": "main"}], "readinessGates": [{"conditionType": "lb"}]});
    let mut object = pod_with("web", json!({"annotations": null}), spec).to_object();
    object.status =
        serde_json::from_value(json!({"phase": "Running", "conditions": [{"type": "lb", "status": gate}]})).ok();
    Arc::new(Pod::new(object).expect("complete"))
}

#[tokio::test(start_paused = true)]
async fn a_readiness_gate_that_opens_makes_the_pod_ready_at_once() {
    let machine = Machine::new();
    let agent = machine.start().await;
    agent.files([]).await;
    let web = gated("False");
    agent.api([&web]).await;
    let running = |s: &api::PodStatus| condition(s, "ContainersReady").as_deref() == Some("True ");
    let status = agent.until(web.uid(), "running", SOON, running).await;
    assert_eq!(condition(&status, "Ready").as_deref(), Some("False ReadinessGatesNotReady"));
    agent.api([&gated("True")]).await;
    agent.until_ready(web.uid(), SOON).await;
    agent.stop(SOON).await;
}

#[tokio::test(start_paused = true)]
async fn what_an_evicted_pod_left_is_removed() {
    let machine = Machine::new();
    let agent = machine.start().await;
    machine.cri.behave("main", [Behaviour::exits(1, Duration::from_millis(10))]);
    agent.files([]).await;
    let object = |status: Value| {
        let spec = json!({"restartPolicy": "Never", "containers": [{"name": "main"}]});
        let mut object = pod_with("web", json!({"annotations": null}), spec).to_object();
        object.status = serde_json::from_value(status).ok();
        Arc::new(Pod::new(object).expect("complete"))
    };
    let web = object(json!({"phase": "Running"}));
    agent.api([&web]).await;
    agent.until(web.uid(), "failed", SOON, |s| s.phase.as_deref() == Some("Failed")).await;
    tokio::time::sleep(SOON).await;
    assert_eq!(machine.cri.containers().len(), 1, "a pod that failed keeps what it left");
    agent.api([&object(json!({"phase": "Failed", "reason": "Evicted"}))]).await;
    machine.cri.until("removed", SOON, |c| c.containers().is_empty()).await;
    agent.stop(SOON).await;
}

const YEAR: i64 = 365 * 24 * 3_600_000;

#[tokio::test(start_paused = true)]
async fn a_clock_that_is_set_moves_no_pod() {
    for by in [YEAR, -YEAR, 3_600_000, -3_600_000] {
        let machine = Machine::new();
        machine.cri.behave("crasher", [Behaviour::exits(1, Duration::from_millis(100))]);
        let agent = machine.start().await;
        let crasher = pod("crasher", json!({"containers": [{"name": "crasher"}]}));
        let (web, new) = (simple("web"), simple("new"));
        agent.only_static([&web, &crasher]).await;
        let before = agent.until_ready(web.uid(), SOON).await;
        machine.cri.until("it backs off", SOON, |c| c.history().starts("uid-crasher", "crasher") == 2).await;
        tokio::time::sleep(Duration::from_secs(2)).await;
        machine.clock.set(by);
        // The back-off of 10 seconds is neither reset nor extended.
        let third = |c: &berth_testkit::scripted_cri::ScriptedCri| c.history().starts("uid-crasher", "crasher") == 3;
        tokio::time::sleep(Duration::from_secs(5)).await;
        assert!(!third(&machine.cri), "{by}: too early");
        machine.cri.until("the third start", Duration::from_secs(5), third).await;
        agent.files([&web, &crasher, &new]).await;
        agent.until_ready(new.uid(), SOON).await;
        tokio::time::sleep(Duration::from_secs(300)).await;
        let after = agent.status.status(web.uid()).expect("a status");
        assert_eq!(after.container_statuses, before.container_statuses, "{by}");
        assert_eq!(after.start_time, before.start_time, "{by}");
        agent.files([]).await;
        machine.cri.until("all is gone", SOON, |c| c.sandboxes().is_empty()).await;
        agent.stop(SOON).await;
    }
}
