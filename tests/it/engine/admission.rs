//! Pod admission in the engine: rejection, preemption, and scheduling gates.

use std::{sync::Arc, time::Duration};

use berth_types::Pod;
use serde_json::{Value, json};

use berth_testkit::{
    agent::Machine,
    pods::pod_with,
    scripted_cri::{Behaviour, Fault, ScriptedCri},
};

const SOON: Duration = Duration::from_secs(2);

/// An API pod with a CPU request; the node has four CPUs.
fn asking(name: &str, cpu: &str, priority: i64, label: &str, status: Value) -> Arc<Pod> {
    let metadata = json!({"annotations": null, "labels": {"l": label}});
    let containers = json!([{"name": "main", "resources": {"requests": {"cpu": cpu}}}]);
    let spec = json!({
        "priority": priority,
        "terminationGracePeriodSeconds": 5,
        "readinessGates": [{"conditionType": "example.com/gate"}],
        "containers": containers,
    });
    let mut object = pod_with(name, metadata, spec).to_object();
    object.status = serde_json::from_value(status).expect("a status");
    Arc::new(Pod::new(object).expect("complete"))
}

fn gate(status: &str) -> Value {
    json!({"phase": "Pending", "conditions": [{"type": "example.com/gate", "status": status}]})
}

#[tokio::test(start_paused = true)]
async fn a_rejected_pod_stays_rejected_whatever_its_readiness_gates_are() {
    let machine = Machine::new();
    let agent = machine.start().await;
    agent.files([]).await;
    let big = asking("big", "100", 0, "1", gate("False"));
    agent.api([&big]).await;
    agent.until(big.uid(), "refused", SOON, |s| s.reason.as_deref() == Some("OutOfcpu")).await;
    agent.api([&asking("big", "100", 0, "1", gate("True"))]).await;
    agent.api([&asking("big", "100", 0, "2", gate("True"))]).await;
    tokio::time::sleep(Duration::from_secs(10)).await;
    assert!(machine.cri.targets("run_podsandbox").is_empty());
    assert!(agent.describe().await.is_empty(), "nobody works on it");
    agent.stop(SOON).await;
}

#[tokio::test(start_paused = true)]
async fn a_pod_for_which_others_go_starts_when_they_are_gone_and_not_by_an_update() {
    let machine = Machine::new();
    let agent = machine.start().await;
    machine.cri.behave("small/main", [Behaviour::stubborn()]);
    agent.files([]).await;
    let small = asking("small", "3", 0, "1", gate("True"));
    agent.api([&small]).await;
    machine.cri.until("it runs", SOON, |cri| cri.running("small", "main").len() == 1).await;
    let critical = |label: &str, status| asking("critical", "3", 2_000_001_000, label, status);
    agent.api([&small, &critical("1", gate("False"))]).await;
    machine.cri.until("the other is stopped", SOON, |cri| cri.count("stop_container") == 1).await;
    assert_eq!(agent.waits_for(critical("1", gate("False")).uid()).as_deref(), Some("preemption of other pods"));
    assert_eq!(agent.waits_for(small.uid()).as_deref(), Some("StopContainer main"));
    agent.api([&small, &critical("2", gate("False"))]).await;
    agent.api([&small, &critical("2", gate("True"))]).await;
    let both = |cri: &ScriptedCri| cri.targets("run_podsandbox").len() == 2;
    machine.cri.until("it starts", Duration::from_secs(15), both).await;
    assert!(machine.cri.running("small", "main").is_empty(), "not before the other was gone");
    machine.cri.until("it runs", SOON, |cri| cri.running("critical", "main").len() == 1).await;
    agent.stop(SOON).await;
}

#[tokio::test(start_paused = true)]
async fn a_pod_that_does_not_die_keeps_no_critical_pod_out() {
    // spec 02a §6.3: a failed kill is reported once and skipped.
    let machine = Machine::new();
    let agent = machine.start().await;
    machine.cri.fault("stop_container", "stuck", Fault::Hang, None);
    agent.files([]).await;
    let stuck = asking("stuck", "3", 0, "1", gate("True"));
    agent.api([&stuck]).await;
    machine.cri.until("it runs", SOON, |cri| cri.running("stuck", "main").len() == 1).await;
    let first = asking("first", "3", 2_000_000_000, "1", gate("True"));
    agent.api([&stuck, &first]).await;
    machine.cri.until("the other is to stop", SOON, |cri| cri.count("stop_container") == 1).await;
    // A pod of higher priority arrives while the first one waits: nothing of that one could be killed.
    let second = asking("second", "3", 2_000_001_000, "1", gate("True"));
    agent.api([&stuck, &first, &second]).await;
    let is_in = |cri: &ScriptedCri| cri.running("first", "main").len() + cri.running("second", "main").len() == 1;
    machine.cri.until("one of them starts", Duration::from_secs(30), is_in).await;
    let count_events = |reason: &str| agent.events.texts().iter().filter(|text| text.starts_with(reason)).count();
    assert!((1..=2).contains(&count_events("ExceededGracePeriod")), "{:?}", agent.events.texts());
    machine
        .cri
        .until("the worthier one runs", Duration::from_secs(30), |cri| cri.running("second", "main").len() == 1)
        .await;
    assert!((2..=3).contains(&count_events("Preempting")), "{:?}", agent.events.texts());
    agent.stop(SOON).await;
}

#[tokio::test(start_paused = true)]
async fn the_room_that_is_made_for_a_pod_is_not_taken_by_a_lesser_one() {
    let machine = Machine::new();
    let agent = machine.start().await;
    machine.cri.behave("large/main", [Behaviour::stubborn()]);
    agent.files([]).await;
    let large = asking("large", "3", 0, "1", gate("True"));
    agent.api([&large]).await;
    machine.cri.until("it runs", SOON, |cri| cri.running("large", "main").len() == 1).await;
    let critical = asking("critical", "4", 2_000_000_000, "1", gate("True"));
    agent.api([&large, &critical]).await;
    machine.cri.until("the large one is to stop", SOON, |cri| cri.count("stop_container") == 1).await;
    // It would fit beside the large pod, but then the waiting pod would have to preempt it, too.
    let plain = asking("plain", "1", 0, "1", gate("True"));
    agent.api([&large, &critical, &plain]).await;
    agent.until(plain.uid(), "refused", SOON, |s| s.reason.as_deref() == Some("OutOfcpu")).await;
    machine
        .cri
        .until("what waited runs", Duration::from_secs(30), |cri| cri.running("critical", "main").len() == 1)
        .await;
    agent.stop(SOON).await;
}
