//! Starting pods and containers: order, number of calls, failures, and back-off.

use std::time::Duration;

use berth_ports::{ActionKind, SyncOutcome};
use serde_json::json;
use tonic::Code;

use crate::runtime::fixture::Fixture;
use berth_testkit::{
    pods::{pod, simple},
    scripted_cri::{Behaviour, Fault},
};

fn failure(outcome: &SyncOutcome, target: &str) -> (String, String) {
    let found = outcome.actions.iter().find(|a| &*a.target == target).and_then(|a| a.failure.clone());
    let failure = found.expect("it failed");
    (failure.reason, failure.message)
}

#[tokio::test(start_paused = true)]
async fn a_simple_start_costs_four_calls_and_an_image_status() {
    let bench = Fixture::new();
    let web = simple("web");
    let outcome = bench.good_turn(&web).await;
    let expected = ["podsandbox_status", "image_status", "create_container", "start_container"];
    assert_eq!(bench.ops(), [&["run_podsandbox"][..], &expected].concat());
    let kinds: Vec<ActionKind> = outcome.actions.iter().map(|a| a.action).collect();
    assert_eq!(kinds, [ActionKind::CreatePodSandbox, ActionKind::StartContainer]);
    assert!(outcome.acted);
    assert_eq!(*bench.world.ready_calls.lock().expect("unpoisoned"), 1);
    assert_eq!(bench.events(), ["Created: Container created", "Started: Container started"]);
    let links = bench.world.links.lock().expect("unpoisoned").clone();
    assert_eq!(links[0].path.to_str(), Some("/var/log/pods/web/main/0.log"));
    bench.cri.clear_calls();
    let settled = bench.good_turn(&web).await;
    assert_eq!((settled.acted, settled.actions.len(), bench.ops().len()), (false, 0, 0));
    assert_eq!(bench.metric("kubelet_started_pods_total", ""), 1.0);
    assert_eq!(bench.metric("kubelet_started_containers_total", "container"), 1.0);
    assert_eq!(bench.metric("kubelet_run_podsandbox_duration_seconds", ""), 1.0);
}

#[tokio::test(start_paused = true)]
async fn containers_are_created_in_order() {
    // AC-03a-1
    let bench = Fixture::new();
    let three = pod("p", json!({"containers": [{"name": "a"}, {"name": "b"}, {"name": "c"}]}));
    bench.good_turn(&three).await;
    let expected: Vec<String> = ["a", "b", "c"]
        .iter()
        .flat_map(|c| [format!("create_container p/{c}"), format!("start_container p/{c}")])
        .collect();
    assert_eq!(bench.changes(), [vec!["run_podsandbox p".to_owned()], expected].concat());
}

#[tokio::test(start_paused = true)]
async fn images_are_pulled_together_and_containers_still_created_in_order() {
    let bench = Fixture::new();
    let slow = pod("p", json!({"containers": [{"name": "a", "image": "slow:1"}, {"name": "b", "image": "quick:1"}]}));
    let takes = [("slow:1", 30), ("quick:1", 20)].map(|(i, s)| (i.to_owned(), Duration::from_secs(s)));
    bench.world.pull_takes.lock().expect("unpoisoned").extend(takes);
    let began = tokio::time::Instant::now();
    bench.good_turn(&slow).await;
    assert_eq!(began.elapsed().as_secs(), 30);
    assert_eq!(bench.cri.targets("create_container"), ["p/a", "p/b"]);
}

#[tokio::test(start_paused = true)]
async fn a_container_that_cannot_start_does_not_hold_up_the_next() {
    let bench = Fixture::new();
    let two = pod("p", json!({"containers": [{"name": "a", "image": "none:1"}, {"name": "b"}]}));
    bench.world.missing_images.lock().expect("unpoisoned").insert("none:1".to_owned());
    let outcome = bench.turn(&two).await;
    assert_eq!(failure(&outcome, "a"), ("ErrImagePull".to_owned(), "no none:1".to_owned()));
    assert_eq!(bench.cri.targets("start_container"), ["p/b"]);
    assert!(bench.events().contains(&"Failed: Error: ErrImagePull".to_owned()));
    assert_eq!(bench.metric("kubelet_started_containers_errors_total", "ErrImagePull"), 1.0);
}

#[tokio::test(start_paused = true)]
async fn failures_carry_the_message_of_the_runtime_without_ids() {
    let bench = Fixture::new();
    let web = simple("web");
    bench.cri.fault("create_container", "", Fault::Error(Code::Unknown, "no space".to_owned()), Some(1));
    let outcome = bench.turn(&web).await;
    assert_eq!(failure(&outcome, "main"), ("CreateContainerError".to_owned(), "no space".to_owned()));
    let id = bench.cri.listed().len();
    assert_eq!(id, 0);
    bench.cri.behave("main", [Behaviour { start_error: Some("exec: not found".to_owned()), ..Behaviour::default() }]);
    let outcome = bench.turn(&web).await;
    assert_eq!(failure(&outcome, "main"), ("RunContainerError".to_owned(), "exec: not found".to_owned()));
    assert!(bench.events().contains(&"Failed: Error: exec: not found".to_owned()));
}

#[tokio::test(start_paused = true)]
async fn a_sandbox_that_cannot_be_created_is_reported_unless_the_pod_stops() {
    let bench = Fixture::new();
    let web = simple("web");
    let refuse = || bench.cri.fault("run_podsandbox", "", Fault::Error(Code::Unknown, "no cni".to_owned()), Some(1));
    refuse();
    let outcome = bench.turn(&web).await;
    let text = "Failed to create sandbox for pod \"web_default(uid-web)\": rpc error: code = Unknown desc = no cni";
    assert_eq!(failure(&outcome, "web"), ("CreatePodSandboxError".to_owned(), text.to_owned()));
    let event = "FailedCreatePodSandBox: Failed to create pod sandbox: rpc error: code = Unknown desc = no cni";
    assert_eq!(bench.events(), [event]);
    assert_eq!(bench.metric("kubelet_started_pods_errors_total", ""), 1.0);
    assert_eq!(bench.metric("kubelet_run_podsandbox_errors_total", ""), 1.0);
    refuse();
    bench.stopping.cancel();
    let outcome = bench.turn(&web).await;
    assert_eq!((outcome.error_text(), bench.events().len()), (None, 1));
}

#[tokio::test(start_paused = true)]
async fn a_dead_sandbox_is_replaced_and_init_starts_over() {
    // AC-03a-2
    let bench = Fixture::new();
    let both = pod("p", json!({"initContainers": [{"name": "i"}, {"name": "j"}], "containers": [{"name": "a"}]}));
    bench.cri.behave("i", [Behaviour::exits(0, Duration::ZERO)]);
    bench.good_turn(&both).await;
    bench.cri.until("i ends", Duration::from_secs(1), |c| c.running("p", "i").is_empty()).await;
    let sandbox = bench.cri.sandboxes()[0].id.clone();
    bench.cri.kill_sandbox(&sandbox);
    bench.cri.clear_calls();
    bench.good_turn(&both).await;
    let expected = [
        "stop_podsandbox p",
        "remove_container p/i",
        "run_podsandbox p",
        "create_container p/i",
        "start_container p/i",
    ];
    assert_eq!(bench.changes(), expected);
    let call = bench.cri.calls().into_iter().find(|c| c.op == "run_podsandbox").expect("created");
    assert_eq!(call.detail, "1");
    let changed = "SandboxChanged: Pod sandbox changed, it will be killed and re-created.";
    assert!(bench.events().contains(&changed.to_owned()));
    assert_eq!(bench.world.removed_logs.lock().expect("unpoisoned").len(), 1);
}

#[tokio::test(start_paused = true)]
async fn ten_init_containers_that_exit_at_once_need_no_waiting() {
    let bench = Fixture::new();
    let names: Vec<String> = (0..10).map(|i| format!("i{i}")).collect();
    let init: Vec<_> = names.iter().map(|name| json!({"name": name})).collect();
    let many = pod("p", json!({"initContainers": init, "containers": [{"name": "a"}]}));
    for name in &names {
        bench.cri.behave(name, [Behaviour::exits(0, Duration::ZERO)]);
    }
    let began = tokio::time::Instant::now();
    for name in &names {
        bench.good_turn(&many).await;
        bench.cri.until("it ends", Duration::from_secs(1), |c| c.running("p", name).is_empty()).await;
    }
    bench.good_turn(&many).await;
    assert_eq!(bench.cri.running("p", "a").len(), 1);
    assert!(began.elapsed() < Duration::from_millis(20), "{:?}", began.elapsed());
    assert!(bench.ops().iter().all(|op| !op.starts_with("list")), "{:?}", bench.ops());
    assert_eq!(bench.ops().len(), 2 + 11 * 3);
}

#[tokio::test(start_paused = true)]
async fn a_crashing_container_waits_longer_each_time() {
    // AC-03a-17
    let bench = Fixture::new();
    let web = simple("web");
    bench.cri.behave("main", [Behaviour::exits(1, Duration::from_secs(5))]);
    bench.good_turn(&web).await;
    for delay in [0, 10, 20, 40] {
        bench.cri.until("it ends", Duration::from_secs(6), |c| c.running("web", "main").is_empty()).await;
        let crashed = tokio::time::Instant::now();
        if delay > 0 {
            let backed_off = bench.turn(&web).await;
            let (reason, message) = failure(&backed_off, "main");
            assert_eq!(reason, "CrashLoopBackOff");
            let text = format!("back-off {delay}s restarting failed container=main pod=web_default(uid-web)");
            assert_eq!(message, text);
            assert!(!backed_off.acted, "nothing was done");
            tokio::time::sleep_until(backed_off.retry_at.expect("it has a time")).await;
        }
        assert_eq!(crashed.elapsed().as_secs(), delay);
        bench.good_turn(&web).await;
    }
    let event = "BackOff: Back-off restarting failed container main in pod web_default(uid-web)";
    assert_eq!(bench.events().iter().filter(|e| *e == event).count(), 3);
    assert_eq!(bench.metric("kubelet_started_containers_total", "container"), 5.0);
    assert!(bench.cri.violations().is_empty());
}

#[tokio::test(start_paused = true)]
async fn a_restart_of_all_keeps_the_logs() {
    let bench = Fixture::new();
    let two = pod("p", json!({"containers": [{"name": "a"}, {"name": "b"}]}));
    bench.good_turn(&two).await;
    bench.cri.clear_calls();
    let mut request = bench.request(&two);
    request.restart_all = true;
    let outcome = berth_ports::PodRuntime::sync_pod(&*bench.runtime, request).await;
    assert!(outcome.reset);
    assert_eq!(outcome.error_text(), None);
    let expected = ["stop_container p/a", "remove_container p/a", "stop_container p/b", "remove_container p/b"];
    assert_eq!(bench.changes(), expected);
    assert_eq!(bench.graces(), ["p/a 2", "p/b 2"]);
    assert!(bench.world.removed_logs.lock().expect("unpoisoned").is_empty());
}

#[tokio::test(start_paused = true)]
async fn an_unknown_target_of_an_ephemeral_container_is_a_configuration_error() {
    let bench = Fixture::new();
    let with = pod(
        "p",
        json!({"containers": [{"name": "a"}],
            "ephemeralContainers": [{"name": "e", "image": "busybox:1", "targetContainerName": "x"}]}),
    );
    bench.good_turn(&simple("q")).await;
    let _first = bench.turn(&with).await;
    let outcome = bench.turn(&with).await;
    let expected = ("CreateContainerConfigError".to_owned(), "unable to find target container x".to_owned());
    assert_eq!(failure(&outcome, "e"), expected);
}
