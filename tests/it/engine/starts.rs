//! Pod starts, crash loops, and loss of sandboxes, containers, and network.

use std::time::Duration;

use berth_types::{Pod, api};
use serde_json::json;

use berth_testkit::{
    agent::Machine,
    pods::{pod, simple},
    scripted_cri::{Behaviour, ScriptedCri},
};

const SOON: Duration = Duration::from_secs(2);

/// Mutating CRI calls, without ids.
fn changes(cri: &ScriptedCri) -> Vec<String> {
    let changing = ["run_podsandbox", "stop_podsandbox", "create_container", "start_container", "remove_container"];
    let calls = cri.calls().into_iter().filter(|call| changing.contains(&call.op));
    calls
        .map(|call| match call.op {
            "run_podsandbox" => format!("{} {} attempt {}", call.op, call.target, call.detail),
            _ => format!("{} {}", call.op, call.target),
        })
        .collect()
}

fn main_status(status: &api::PodStatus) -> &api::ContainerStatus {
    status.container_statuses.iter().flatten().next().expect("a container status")
}

fn condition<'a>(status: &'a api::PodStatus, kind: &str) -> &'a str {
    status.conditions.iter().flatten().find(|c| c.type_ == kind).map_or("", |c| &c.status)
}

#[tokio::test(start_paused = true)]
async fn a_pod_starts_in_the_order_of_its_specification() {
    // AC-03a-1
    let machine = Machine::new();
    let agent = machine.start().await;
    let web = pod("web", json!({"containers": [{"name": "a"}, {"name": "b"}, {"name": "c"}]}));
    agent.only_static([&web]).await;
    let status = agent.until_ready(web.uid(), SOON).await;
    assert_eq!(
        changes(&machine.cri),
        [
            "run_podsandbox web attempt 0",
            "create_container web/a",
            "start_container web/a",
            "create_container web/b",
            "start_container web/b",
            "create_container web/c",
            "start_container web/c",
        ]
    );
    assert_eq!(status.phase.as_deref(), Some("Running"));
    agent.stop(SOON).await;
}

#[tokio::test(start_paused = true)]
async fn a_lost_sandbox_is_made_again_init_containers_first() {
    // AC-03a-2
    let machine = Machine::new();
    let agent = machine.start().await;
    machine.cri.behave("prepare", [Behaviour::exits(0, Duration::from_millis(10))]);
    let web = pod("web", json!({"initContainers": [{"name": "prepare"}], "containers": [{"name": "main"}]}));
    agent.only_static([&web]).await;
    agent.until_ready(web.uid(), SOON).await;
    machine.cri.clear_calls();
    let sandbox = machine.cri.sandboxes().remove(0).id;
    machine.cri.kill_sandbox(&sandbox);
    agent.until(web.uid(), "not ready", SOON, |s| condition(s, "Ready") == "False").await;
    agent.until_ready(web.uid(), Duration::from_secs(15)).await;
    assert_eq!(
        changes(&machine.cri),
        [
            "stop_podsandbox web",
            "remove_container web/prepare",
            "run_podsandbox web attempt 1",
            "create_container web/prepare",
            "start_container web/prepare",
            "create_container web/main",
            "start_container web/main",
        ]
    );
    agent.stop(SOON).await;
}

#[tokio::test(start_paused = true)]
async fn a_crashing_container_waits_for_its_back_off() {
    // AC-02b-2
    let machine = Machine::new();
    let agent = machine.start().await;
    machine.cri.behave("main", [Behaviour::exits(1, Duration::from_millis(100))]);
    let web = simple("web");
    agent.only_static([&web]).await;
    let waits = |s: &api::PodStatus| {
        let waiting = main_status(s).state.as_ref().and_then(|state| state.waiting.as_ref());
        waiting.is_some_and(|w| w.reason.as_deref() == Some("CrashLoopBackOff"))
    };
    let status = agent.until(web.uid(), "backs off", SOON, waits).await;
    let ended = main_status(&status).last_state.as_ref().and_then(|state| state.terminated.as_ref());
    assert_eq!(ended.map(|t| t.exit_code), Some(1));
    assert_eq!(status.phase.as_deref(), Some("Running"));
    assert_eq!(condition(&status, "ContainersReady"), "False");
    assert_eq!(main_status(&status).restart_count, 1, "the second start comes at once");
    // It restarts exactly when the back-off ends, not at the next tick.
    machine.cri.clear_calls();
    let began = tokio::time::Instant::now();
    machine.cri.until("the third start", Duration::from_secs(11), |c| c.count("start_container") == 1).await;
    let waited = began.elapsed();
    assert!((Duration::from_millis(9_500)..=Duration::from_secs(10)).contains(&waited), "{waited:?}");
    agent.stop(SOON).await;
}

#[tokio::test(start_paused = true)]
async fn a_container_that_vanished_is_started_again() {
    // AC-02b-9
    let machine = Machine::new();
    let agent = machine.start().await;
    let web = simple("web");
    agent.only_static([&web]).await;
    agent.until_ready(web.uid(), SOON).await;
    let mut status_events = agent.status.events();
    let [id] = machine.cri.running("web", "main").try_into().expect("one container");
    use berth_cri::RuntimeService;
    machine.cri.remove_container(&id).await.expect("removed behind the agent's back");
    machine.cri.until("another one", SOON, |c| !c.running("web", "main").is_empty()).await;
    agent.until_ready(web.uid(), SOON).await;
    let mut seen = Vec::new();
    while let Ok(event) = status_events.try_recv() {
        if let berth_status::StatusEvent::Updated(_, status) = event {
            seen.push(status);
        }
    }
    let gone = seen.iter().find(|s| main_status(s).state.as_ref().is_some_and(|state| state.waiting.is_some()));
    let gone = gone.expect("a status that shows it waiting");
    let last = main_status(gone).last_state.as_ref().and_then(|state| state.terminated.as_ref()).expect("ended");
    assert_eq!((last.exit_code, last.reason.as_deref()), (137, Some("ContainerStatusUnknown")));
    assert_eq!((main_status(gone).restart_count, gone.phase.as_deref()), (1, Some("Running")));
    agent.stop(SOON).await;
}

/// A pod with a label.
fn labelled(name: &str, label: &str) -> std::sync::Arc<Pod> {
    berth_testkit::pods::pod_with(name, json!({"labels": {"l": label}}), json!({"containers": [{"name": "main"}]}))
}

#[tokio::test(start_paused = true)]
async fn a_new_set_stops_starts_and_changes_what_differs() {
    // AC-02a-6
    let machine = Machine::new();
    let agent = machine.start().await;
    let (a, b, c) = (labelled("a", "1"), labelled("b", "1"), labelled("c", "1"));
    agent.only_static([&a, &b]).await;
    agent.until_ready(a.uid(), SOON).await;
    agent.until_ready(b.uid(), SOON).await;
    let kept = machine.cri.running("b", "main");
    agent.files([&labelled("b", "2"), &c]).await;
    agent.until_ready(c.uid(), SOON).await;
    machine.cri.until("a is gone", SOON, |cri| cri.sandboxes().len() == 2).await;
    assert!(machine.cri.running("a", "main").is_empty());
    assert_eq!(machine.cri.running("b", "main"), kept, "a label restarts nothing");
    let shown = agent.engine.pods.desired();
    let labels: Vec<_> = shown.iter().map(|p| (p.name().to_owned(), p.labels()["l"].clone())).collect();
    assert_eq!(labels, [("b".to_owned(), "2".to_owned()), ("c".to_owned(), "1".to_owned())]);
    agent.stop(SOON).await;
}

#[tokio::test(start_paused = true)]
async fn without_a_network_only_pods_of_the_hosts_run() {
    // AC-05-28
    let machine = Machine::new();
    machine.cri.set_conditions(true, false);
    let agent = machine.start().await;
    let host = pod("host", json!({"hostNetwork": true, "containers": [{"name": "main"}]}));
    let plain = simple("plain");
    agent.only_static([&host, &plain]).await;
    agent.until_ready(host.uid(), SOON).await;
    let text = "NetworkNotReady: network is not ready: container runtime network not ready: NetworkReady=false \
                reason:Scripted message:not ready";
    let event_recorded = async {
        while !agent.events.texts().iter().any(|event| event == text) {
            tokio::time::sleep(Duration::from_millis(10)).await;
        }
    };
    tokio::time::timeout(SOON, event_recorded).await.unwrap_or_else(|_| panic!("{:?}", agent.events.texts()));
    assert_eq!(machine.cri.sandboxes().len(), 1, "the other waits");
    machine.cri.set_conditions(true, true);
    agent.until_ready(plain.uid(), Duration::from_secs(10)).await;
    agent.stop(SOON).await;
}
