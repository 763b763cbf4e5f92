//! Tests of the scripted CRI itself: it keeps the contract of a runtime.

use std::{sync::Arc, time::Duration};

use berth_cri::{CriError, ImageService, RuntimeService};
use berth_proto::cri;
use berth_testkit::{
    clock::TokioClock,
    scripted_cri::{Behaviour, Fault, ScriptedCri},
};
use futures::StreamExt;

fn sandbox(attempt: u32) -> cri::PodSandboxConfig {
    let metadata = cri::PodSandboxMetadata { name: "p".into(), namespace: "n".into(), uid: "u".into(), attempt };
    cri::PodSandboxConfig { metadata: Some(metadata), ..Default::default() }
}

fn container(name: &str, attempt: u32) -> cri::ContainerConfig {
    cri::ContainerConfig {
        metadata: Some(cri::ContainerMetadata { name: name.into(), attempt }),
        image: Some(cri::ImageSpec { image: "busybox:1".into(), ..Default::default() }),
        ..Default::default()
    }
}

#[tokio::test(start_paused = true)]
async fn names_are_reserved_and_a_container_lives_and_dies() {
    let cri = ScriptedCri::new(Arc::new(TokioClock::new()));
    cri.behave("p/c", [Behaviour::exits(3, Duration::from_secs(1))]);
    let mut events = cri.container_events().await.expect("a stream");
    let pod = cri.run_pod_sandbox(sandbox(0), "").await.expect("a sandbox");
    assert!(cri.run_pod_sandbox(sandbox(0), "").await.unwrap_err().to_string().contains("is reserved for"));
    let id = cri.create_container(&pod, container("c", 0), sandbox(0)).await.expect("a container");
    assert!(cri.create_container(&pod, container("c", 0), sandbox(0)).await.is_err());
    cri.start_container(&id).await.expect("started");
    assert!(cri.start_container(&id).await.is_err(), "only a created container starts");
    cri.until("exit", Duration::from_secs(2), |c| c.running("p", "c").is_empty()).await;
    let status = cri.container_status(&id).await.expect("a status");
    assert_eq!((status.exit_code, status.reason.as_str()), (3, "Error"));
    let kinds: Vec<i32> =
        events.by_ref().take(5).map(|e| e.expect("an event").container_event_type).collect::<Vec<_>>().await;
    assert_eq!(kinds, [0, 1, 0, 1, 2]);
    cri.remove_pod_sandbox(&pod).await.expect("removed");
    cri.remove_pod_sandbox(&pod).await.expect("idempotent");
    assert!(cri.containers().is_empty() && cri.violations().is_empty());
}

#[tokio::test(start_paused = true)]
async fn a_late_call_is_carried_out_in_the_background() {
    let cri = ScriptedCri::new(Arc::new(TokioClock::new()));
    cri.fault("run_podsandbox", "p", Fault::Delay(Duration::from_secs(300)), Some(1));
    let error = cri.run_pod_sandbox(sandbox(0), "").await.unwrap_err();
    assert!(matches!(error, CriError::TimedOut { op: "run_podsandbox", .. }), "{error}");
    cri.until("the sandbox", Duration::from_secs(61), |c| c.sandboxes().len() == 1).await;
}

#[tokio::test(start_paused = true)]
async fn a_stubborn_container_is_killed_after_its_grace() {
    let cri = ScriptedCri::new(Arc::new(TokioClock::new()));
    cri.behave("c", [Behaviour::stubborn()]);
    let pod = cri.run_pod_sandbox(sandbox(0), "").await.expect("a sandbox");
    let id = cri.create_container(&pod, container("c", 0), sandbox(0)).await.expect("a container");
    cri.start_container(&id).await.expect("started");
    let begin = tokio::time::Instant::now();
    cri.stop_container(&id, Duration::from_secs(5)).await.expect("stopped");
    assert_eq!(begin.elapsed().as_secs(), 5);
    assert_eq!(cri.container_status(&id).await.expect("a status").exit_code, 137);
}

#[tokio::test(start_paused = true)]
async fn a_second_live_container_of_one_name_is_a_violation() {
    let cri = ScriptedCri::new(Arc::new(TokioClock::new()));
    let pod = cri.run_pod_sandbox(sandbox(0), "").await.expect("a sandbox");
    for attempt in 0..2 {
        cri.create_container(&pod, container("c", attempt), sandbox(0)).await.expect("a container");
    }
    assert_eq!(cri.violations().len(), 1);
    let absent = cri::ImageSpec { image: "absent".into(), ..Default::default() };
    assert_eq!(cri.image_status(absent).await.expect("an answer"), None);
}

#[tokio::test]
async fn the_scripted_runtime_answers_on_a_socket_too() {
    let dir = tempfile::tempdir().expect("a folder");
    let socket = dir.path().join("cri.sock");
    let scripted = ScriptedCri::new(Arc::new(TokioClock::new()));
    let cancel = tokio_util::sync::CancellationToken::new();
    let server = tokio::spawn({
        let (scripted, socket, cancel) = (scripted.clone(), socket.clone(), cancel.clone());
        async move { berth_testkit::scripted_cri::server::serve(scripted, &socket, cancel).await }
    });
    let config = berth_cri::CriConfig {
        endpoint: format!("unix://{}", socket.display()),
        image_endpoint: String::new(),
        request_timeout: Duration::from_secs(5),
        list_streaming: false,
    };
    let client = berth_cri::connect(&config, &berth_metrics::Registry::new()).expect("a client");
    let pod = loop {
        match client.runtime.run_pod_sandbox(sandbox(0), "").await {
            Ok(pod) => break pod,
            Err(error) if error.is_unavailable() => tokio::task::yield_now().await,
            Err(error) => panic!("{error}"),
        }
    };
    let id = client.runtime.create_container(&pod, container("c", 0), sandbox(0)).await.expect("a container");
    client.runtime.start_container(&id).await.expect("started");
    assert_eq!(scripted.running("p", "c"), [id]);
    cancel.cancel();
    server.await.expect("the server ends");
}
