//! In-place resize of container and pod resources.

use berth_ports::{ActionKind, PodCgroupValues};
use berth_types::Pod;
use serde_json::json;
use std::sync::Arc;
use tonic::Code;

use crate::runtime::fixture::Fixture;
use berth_testkit::{pods::pod_with, scripted_cri::Fault};

const API: &str = "api";

fn limited(memory: &str) -> Arc<Pod> {
    let resources = json!({"limits": {"memory": memory}, "requests": {"memory": "10"}});
    let metadata = json!({"annotations": {"kubernetes.io/config.source": API}});
    pod_with("web", metadata, json!({"containers": [{"name": "main", "resources": resources}]}))
}

fn memory(limit: i64) -> PodCgroupValues {
    PodCgroupValues { memory_limit: Some(limit), ..PodCgroupValues::default() }
}

async fn started(from: i64, to: i64) -> Fixture {
    let bench = Fixture::new();
    bench.good_turn(&limited(&from.to_string())).await;
    *bench.world.values.lock().expect("unpoisoned") = Some((memory(from), memory(to)));
    bench.cri.clear_calls();
    bench
}

#[tokio::test(start_paused = true)]
async fn growth_goes_from_the_pod_to_the_container() {
    // AC-03a-19
    let bench = started(100, 200).await;
    let vague = Fault::Error(Code::Unknown, "not implemented yet".to_owned());
    bench.cri.fault("update_podsandbox_resources", "", vague, None);
    let outcome = bench.good_turn(&limited("200")).await;
    assert_eq!(outcome.actions.last().map(|a| a.action), Some(ActionKind::ResizePodInPlace));
    assert_eq!(bench.ops(), ["update_podsandbox_resources", "update_container"]);
    assert_eq!(*bench.world.written.lock().expect("unpoisoned"), [memory(200)]);
    bench.cri.clear_calls();
    bench.good_turn(&limited("200")).await;
    assert!(bench.ops().is_empty(), "what was applied is remembered");
    assert_eq!(bench.metric("kubelet_pod_resize_duration_milliseconds", "true"), 1.0);
}

#[tokio::test(start_paused = true)]
async fn shrinking_goes_from_the_container_to_the_pod() {
    let bench = started(200, 100).await;
    *bench.world.memory_in_use.lock().expect("unpoisoned") = Some(50);
    bench.good_turn(&limited("100")).await;
    assert_eq!(bench.ops(), ["update_container", "update_podsandbox_resources"]);
}

#[tokio::test(start_paused = true)]
async fn memory_in_use_is_not_taken_away() {
    // AC-03a-20
    let bench = started(200, 100).await;
    *bench.world.memory_in_use.lock().expect("unpoisoned") = Some(150);
    let outcome = bench.turn(&limited("100")).await;
    let failure = outcome.actions.last().and_then(|a| a.failure.clone()).expect("refused");
    assert_eq!(failure.reason, "ResizePodInPlaceError");
    let text = "cannot decrease memory limits: [attempting to set pod memory limit (100) below current usage (150), \
                attempting to set container \"main\" memory limit (100) below current usage (150)]";
    assert_eq!(failure.message, text);
    assert!(bench.ops().is_empty() && bench.world.written.lock().expect("unpoisoned").is_empty());
}

#[tokio::test(start_paused = true)]
async fn a_runtime_that_refuses_rejects_the_resize() {
    let bench = started(100, 200).await;
    let refuse = Fault::Error(Code::Internal, "no".to_owned());
    bench.cri.fault("update_podsandbox_resources", "", refuse, None);
    let outcome = bench.turn(&limited("200")).await;
    assert!(outcome.error_text().is_some_and(|t| t.contains("ResizePodInPlaceError")));
    assert!(bench.world.written.lock().expect("unpoisoned").is_empty());
    assert_eq!(bench.cri.count("update_container"), 0);
}

#[tokio::test(start_paused = true)]
async fn without_cgroups_of_pods_containers_are_resized() {
    let bench = Fixture::new();
    bench.good_turn(&limited("4194304")).await;
    let none = PodCgroupValues::default();
    *bench.world.values.lock().expect("unpoisoned") = Some((none, none));
    bench.cri.clear_calls();
    bench.good_turn(&limited("2097152")).await;
    assert_eq!(bench.ops(), ["list_container_stats", "update_container"], "the runtime knows what is in use");
    let outcome = bench.turn(&limited("524288")).await;
    let failure = outcome.actions.last().and_then(|a| a.failure.clone()).expect("refused");
    let text = "cannot decrease memory limits: \
                attempting to set container \"main\" memory limit (524288) below current usage (1048576)";
    assert_eq!(failure.message, text);
    assert_eq!(bench.cri.count("update_container"), 1);
}
