//! Pods that cannot run, beside one that does: the status has the reason, other pods are unaffected.

use std::time::Duration;

use serde_json::{Value, json};

use crate::agent::ScriptedServer;
use berth_testkit::{
    process::{container, manifest, manifest_of, skips},
    scripted_cri::{Behaviour, Fault},
};

fn waits(pod: &Value, reason: &str) -> bool {
    container(pod, "main")["state"]["waiting"]["reason"] == reason
}

fn message(pod: &Value) -> String {
    container(pod, "main")["state"]["waiting"]["message"].as_str().unwrap_or_default().to_owned()
}

/// Unavailable images, each for a different reason.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn images_that_cannot_be_had() {
    if skips("images_that_cannot_be_had") {
        return;
    }
    let runtime = ScriptedServer::new().await;
    let code = tonic::Code::NotFound;
    runtime.cri.fault("pull_image", "absent", Fault::Error(code, "no such image".into()), None);
    let home = runtime.home();
    let rows = [
        ("never", json!({"name": "main", "image": "example.com/never:1", "imagePullPolicy": "Never"})),
        ("invalid", json!({"name": "main", "image": "Not A Reference"})),
        ("absent", json!({"name": "main", "image": "example.com/absent:1"})),
    ];
    home.put_pod(&manifest("good"));
    for (name, spec) in rows {
        home.put_pod(&manifest_of(name, json!({"containers": [spec]})));
    }
    let agent = home.start().await;
    let good = agent.until_ready("good").await;

    let pod = agent.until_pod("never", "waiting", |pod| waits(pod, "ErrImageNeverPull")).await;
    let text = "Container image \"example.com/never:1\" is not present with pull policy of Never";
    assert!(message(&pod).contains(text), "{pod:#}");
    let pod = agent.until_pod("invalid", "waiting", |pod| waits(pod, "InvalidImageName")).await;
    assert!(message(&pod).contains("Failed to apply default image tag \"Not A Reference\""), "{pod:#}");
    agent.until_pod("absent", "failing", |pod| waits(pod, "ErrImagePull")).await;
    let pod = agent.until_pod("absent", "backing off", |pod| waits(pod, "ImagePullBackOff")).await;
    assert!(message(&pod).contains("Back-off pulling image \"example.com/absent:1\""), "{pod:#}");
    assert_eq!(pod["status"]["phase"], "Pending");
    assert_eq!(agent.until_ready("good").await["status"], good["status"]);

    // An image that becomes available is used.
    runtime.cri.add_image("example.com/never:1", 1);
    agent.until_ready("never").await;
}

/// A container that cannot be created, one that cannot be started, and one that crashes.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn containers_that_do_not_come_up() {
    if skips("containers_that_do_not_come_up") {
        return;
    }
    let runtime = ScriptedServer::new().await;
    let refusal = || Fault::Error(tonic::Code::Unknown, "the runtime does not like it".into());
    runtime.cri.fault("create_container", "uncreatable", refusal(), Some(2));
    let text = "exec: \"nonsense\": executable file not found in $PATH".to_owned();
    runtime.cri.behave("unstartable-test-node/main", [Behaviour { start_error: Some(text), ..Behaviour::default() }]);
    runtime.cri.behave("crasher-test-node/main", [Behaviour::exits(3, Duration::from_millis(10))]);
    runtime.cri.fault("run_podsandbox", "homeless", refusal(), Some(2));
    let home = runtime.home();
    for name in ["good", "uncreatable", "unstartable", "crasher", "homeless"] {
        home.put_pod(&manifest(name));
    }
    let agent = home.start().await;
    let good = agent.until_ready("good").await;

    let pod = agent.until_pod("unstartable", "failing", |pod| waits(pod, "CrashLoopBackOff")).await;
    let last = &container(&pod, "main")["lastState"]["terminated"];
    assert_eq!((&last["exitCode"], &last["reason"]), (&json!(128), &json!("StartError")), "{pod:#}");
    let pod = agent.until_pod("crasher", "backing off", |pod| waits(pod, "CrashLoopBackOff")).await;
    assert!(message(&pod).contains("back-off 10s restarting failed container=main pod=crasher-test-node"), "{pod:#}");
    assert_eq!(container(&pod, "main")["lastState"]["terminated"]["exitCode"], 3);
    agent.until_log("the runtime does not like it").await;
    for name in ["uncreatable", "homeless"] {
        let pod = agent.until_ready(name).await;
        assert_eq!(container(&pod, "main")["restartCount"], 0, "{pod:#}");
    }
    assert_eq!(agent.until_ready("good").await["status"], good["status"]);
    assert!(runtime.cri.violations().is_empty());
}

/// A pod that exceeds the node's capacity is rejected for good, with its reason.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_pod_without_room_is_refused() {
    if skips("a_pod_without_room_is_refused") {
        return;
    }
    let runtime = ScriptedServer::new().await;
    let home = runtime.home();
    let wants = json!({"requests": {"cpu": "4000"}});
    home.put_pod(&manifest_of("greedy", json!({"containers": [{"name": "main", "resources": wants}]})));
    home.put_pod(&manifest("good"));
    let agent = home.start().await;
    agent.until_ready("good").await;
    let pod = agent.until_pod("greedy", "refused", |pod| pod["status"]["phase"] == "Failed").await;
    // Static pods may preempt others; the reason is then that no pod can be preempted.
    assert_eq!(pod["status"]["reason"], "UnexpectedAdmissionError", "{pod:#}");
    let text = "no set of running pods found to reclaim resources: [(res: cpu, q: ";
    assert!(pod["status"]["message"].as_str().is_some_and(|message| message.contains(text)), "{pod:#}");
    let series = "kubelet_admission_rejections_total{reason=\"UnexpectedAdmissionError\"}";
    assert_eq!(agent.metric(series).await, Some(1.0));
    assert_eq!(runtime.cri.sandboxes().len(), 1);
}
