//! Many concurrent pods: none delays another, none leaks tasks or records.

use std::{sync::Arc, time::Duration};

use berth_types::Pod;
use serde_json::json;
use tokio::time::Instant;

use berth_testkit::{
    agent::Machine,
    pods::{pod, simple},
    scripted_cri::{Behaviour, Fault},
};

const SOON: Duration = Duration::from_secs(2);

/// CRI operations about one pod.
const OPERATIONS: [&str; 9] = [
    "run_podsandbox",
    "podsandbox_status",
    "list_podsandbox",
    "list_containers",
    "container_status",
    "create_container",
    "start_container",
    "stop_container",
    "stop_podsandbox",
];

#[tokio::test(start_paused = true)]
async fn a_hung_pod_delays_no_other_pod() {
    for operation in OPERATIONS {
        let machine = Machine::new();
        let agent = machine.start().await;
        machine.cri.fault(operation, "stuck", Fault::Hang, None);
        let stuck: Vec<Arc<Pod>> = (0..20).map(|i| simple(&format!("stuck{i}"))).collect();
        let others: Vec<Arc<Pod>> = (0..5).map(|i| simple(&format!("free{i}"))).collect();
        agent.only_static(&stuck).await;
        tokio::time::sleep(Duration::from_secs(1)).await;
        let began = Instant::now();
        agent.files(stuck.iter().chain(&others)).await;
        for other in &others {
            agent.until_ready(other.uid(), SOON).await;
        }
        assert!(began.elapsed() < Duration::from_millis(1100), "{operation}: {:?}", began.elapsed());
        let crashed = machine.cri.running("free0", "main").remove(0);
        machine.cri.kill(&crashed, 1, "");
        machine.cri.until("restarted", SOON, |c| c.running("free0", "main").len() == 1).await;
        agent.files([]).await;
        let gone = |c: &berth_testkit::scripted_cri::ScriptedCri| c.running("", "main").len() <= 20;
        machine.cri.until("the others are gone", SOON, gone).await;
        machine
            .cri
            .until("and leave nothing", SOON, |c| {
                c.sandboxes().iter().all(|s| s.metadata.as_ref().is_some_and(|m| m.name.starts_with("stuck")))
            })
            .await;
        agent.stop(SOON).await;
    }
}

#[tokio::test(start_paused = true)]
async fn churn_leaves_no_tasks_and_no_records() {
    let machine = Machine::new();
    let agent = machine.start().await;
    machine.cri.behave("job", [Behaviour::exits(0, Duration::from_millis(20))]);
    agent.only_static([]).await;
    tokio::time::sleep(Duration::from_secs(5)).await;
    let tasks = tokio::runtime::Handle::current().metrics().num_alive_tasks();
    for round in 0..40 {
        let web: Vec<Arc<Pod>> = (0..3).map(|i| simple(&format!("web{}", (round * 3 + i) % 7))).collect();
        let job = pod(&format!("job{round}"), json!({"restartPolicy": "Never", "containers": [{"name": "job"}]}));
        agent.files(web.iter().chain([&job])).await;
        tokio::time::sleep(Duration::from_millis(7 * (round % 5) as u64)).await;
    }
    agent.files([]).await;
    tokio::time::sleep(Duration::from_secs(5)).await;
    assert!(agent.describe().await.is_empty());
    assert!(agent.status.snapshot().is_empty());
    assert!(machine.cri.sandboxes().is_empty() && machine.cri.containers().is_empty());
    assert!(machine.disk.pods().is_empty() && machine.disk.cgroups().is_empty());
    assert_eq!(tokio::runtime::Handle::current().metrics().num_alive_tasks(), tasks, "no task is left");
    assert_eq!(machine.cri.violations(), Vec::<String>::new());
    assert_eq!(machine.cri.history().overlaps(), Vec::<String>::new());
    agent.stop(SOON).await;
    let left = tokio::runtime::Handle::current().metrics().num_alive_tasks();
    assert_eq!(left, 0, "not even one of the agent itself");
}

#[tokio::test(start_paused = true)]
async fn shutdown_waits_for_no_runtime() {
    let machine = Machine::new();
    let agent = machine.start().await;
    machine.cri.behave("main", [Behaviour::stubborn()]);
    let (going, coming) = (simple("going"), simple("coming"));
    agent.only_static([&going]).await;
    agent.until_ready(going.uid(), SOON).await;
    machine.cri.fault("run_podsandbox", "", Fault::Hang, None);
    agent.files([&coming]).await;
    tokio::time::sleep(Duration::from_secs(1)).await;
    agent.stop(Duration::from_millis(100)).await;
    assert_eq!(machine.cri.running("going", "main").len(), 1, "pods go on");
}
