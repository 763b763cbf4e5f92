//! critest's pod and container lifecycle cases on this machine's kernel. Spec 09 §11.2 (AC-09-E1).
//!
//! Each block names the critest cases that it restates. Streamed lists are in critest's main branch, and not in the
//! spec's table.

use std::collections::HashMap;

use berth_proto::cri;
use tonic::Code;

use berth_testkit::embedded::{
    fixture::in_network_namespace,
    in_process::{Daemon, container, daemon, pod},
};

const ASLEEP: &str = "while :; do sleep 0.1; done";

fn labels(value: &str) -> HashMap<String, String> {
    HashMap::from([("critest".to_owned(), value.to_owned())])
}

fn config_with(name: &str, value: &str) -> cri::ContainerConfig {
    cri::ContainerConfig { labels: labels(value), annotations: labels(name), ..container(name, ASLEEP) }
}

async fn create(daemon: &Daemon, sandbox: &str, config: cri::ContainerConfig) -> String {
    daemon.calls.create(sandbox, &config).await.expect("made")
}

async fn remove(daemon: &Daemon, id: &str) {
    daemon.calls.remove_container(id).await.expect("goes");
}

async fn stop(daemon: &Daemon, id: &str, timeout: i64) {
    daemon.calls.stop_container(id, timeout).await.expect("stops");
}

async fn stop_pod(daemon: &Daemon, id: &str) {
    daemon.calls.stop(id).await.expect("stops");
}

async fn containers(daemon: &Daemon, filter: Option<cri::ContainerFilter>) -> Vec<String> {
    let listed = daemon.calls.rpc.clone().list_containers(cri::ListContainersRequest { filter }).await.expect("listed");
    listed.into_inner().containers.into_iter().map(|container| container.id).collect()
}

/// Collects the ids of all items of a streamed list.
macro_rules! streamed {
    ($client:expr, $call:ident, $request:expr, $items:ident, $id:expr) => {{
        let mut stream = $client.clone().$call($request).await.expect("a stream").into_inner();
        let mut ids: Vec<String> = Vec::new();
        while let Some(part) = stream.message().await.expect("a part") {
            ids.extend(part.$items.iter().filter_map($id));
        }
        ids
    }};
}

/// Fields that scripts with `crictl inspect … | jq` rely on.
#[test]
fn verbose_answers_have_the_shape_of_containerds() {
    in_network_namespace("verbose_answers_have_the_shape_of_containerds", async |place| {
        let daemon = daemon(place.path()).await;
        let sandbox = daemon.run(pod(place.path(), "a")).await;
        let id = daemon.start(&sandbox, container("c", ASLEEP)).await;
        let mut rpc = daemon.calls.rpc.clone();
        let read = |info: std::collections::HashMap<String, String>| -> serde_json::Value {
            serde_json::from_str(&info["info"]).expect("JSON")
        };
        let asked = cri::ContainerStatusRequest { container_id: id.clone(), verbose: true };
        let info = read(rpc.container_status(asked).await.expect("received").into_inner().info);
        let spec = &info["runtimeSpec"];
        assert_eq!((&info["config"]["metadata"]["name"], &spec["root"]["readonly"]), (&"c".into(), &false.into()));
        let kinds: Vec<_> =
            spec["linux"]["namespaces"].as_array().expect("a list").iter().map(|n| &n["type"]).collect();
        assert!(["pid", "ipc", "mount"].iter().all(|kind| kinds.iter().any(|k| *k == kind)), "{kinds:?}");
        let names = &spec["process"]["capabilities"]["bounding"];
        assert!(names.as_array().is_some_and(|names| names.iter().any(|name| name == "CAP_CHOWN")), "{names}");
        let mounts = spec["mounts"].as_array().expect("a list");
        assert!(mounts.iter().any(|mount| mount["destination"] == "/proc"), "{mounts:?}");
        assert!(spec["linux"]["cgroupsPath"].as_str().is_some_and(|path| path.contains(&id)), "{spec}");
        let asked = cri::PodSandboxStatusRequest { pod_sandbox_id: sandbox.clone(), verbose: true };
        let pod = read(rpc.pod_sandbox_status(asked).await.expect("received").into_inner().info);
        assert_eq!((&pod["pid"], &pod["config"]["metadata"]["name"]), (&info["pid"], &"a".into()));
        assert!(info["pid"].as_u64().is_some_and(|pid| pid > 0), "{info}");
        daemon.remove(&sandbox).await;
        daemon.stop.cancel();
    });
}

/// On cgroup v1, killed processes of a frozen group do not exit.
#[test]
fn a_frozen_container_is_stopped_and_removed() {
    in_network_namespace("a_frozen_container_is_stopped_and_removed", async |place| {
        let daemon = daemon(place.path()).await;
        for is_stopped in [true, false] {
            let sandbox = daemon.run(pod(place.path(), "a")).await;
            let id = daemon.start(&sandbox, container("c", ASLEEP)).await;
            let (groups, _) = daemon.exec(&id, "cat /proc/self/cgroup").await;
            let Some(group) = groups.lines().find_map(|line| line.split_once(":freezer:").map(|(_, group)| group))
            else {
                println!("skipped a_frozen_container_is_stopped_and_removed: no freezer hierarchy");
                daemon.stop.cancel();
                return;
            };
            let file = format!("/sys/fs/cgroup/freezer{group}/freezer.state");
            std::fs::write(&file, "FROZEN").expect(&file);
            if is_stopped {
                stop(&daemon, &id, 1).await;
                assert_eq!(daemon.exited(&id).await.exit_code, 137);
            }
            stop_pod(&daemon, &sandbox).await;
            daemon.remove(&sandbox).await;
        }
        place.assert_clean();
        daemon.stop.cancel();
    });
}

// "Runtime info", "PodSandbox": basic operations, "Idempotence", "Container": basic operations
#[test]
fn pods_and_containers_are_stopped_and_removed_idempotently() {
    in_network_namespace("pods_and_containers_are_stopped_and_removed_idempotently", async |place| {
        let daemon = daemon(place.path()).await;
        let version =
            daemon.calls.rpc.clone().version(cri::VersionRequest::default()).await.expect("received").into_inner();
        assert_eq!((version.version.as_str(), version.runtime_api_version.as_str()), ("0.1.0", "v1"));
        assert!(!version.runtime_name.is_empty() && !version.runtime_version.is_empty());
        let pod_config = cri::PodSandboxConfig {
            labels: labels("pod"),
            annotations: labels("kept as it is"),
            ..pod(place.path(), "a")
        };
        let sandbox = daemon.run(pod_config.clone()).await;
        let status =
            daemon.calls.rpc.clone().status(cri::StatusRequest::default()).await.expect("received").into_inner();
        for wanted in ["RuntimeReady", "NetworkReady"] {
            let conditions = status.status.iter().flat_map(|status| &status.conditions);
            assert!(conditions.into_iter().any(|c| c.r#type == wanted && c.status), "{wanted}: {status:?}");
        }
        let handler = status.runtime_handlers.iter().find(|handler| handler.name.is_empty()).expect("the usual one");
        let can = handler.features.expect("received");
        let features = status.features.expect("received");
        assert!(features.supplemental_groups_policy);
        let can_share = can.user_namespaces && can.recursive_read_only_mounts;
        assert_eq!(features.user_namespaces_host_network, can_share);
        let request = cri::PodSandboxStatusRequest { pod_sandbox_id: sandbox.clone(), verbose: false };
        let response = daemon.calls.rpc.clone().pod_sandbox_status(request).await.expect("received").into_inner();
        let pod_status = response.status.expect("a status");
        assert_eq!((pod_status.labels, pod_status.annotations), (pod_config.labels, pod_config.annotations));
        assert_eq!(pod_status.metadata, pod_config.metadata);

        let config = config_with("created", "1");
        let id = create(&daemon, &sandbox, config.clone()).await;
        let status = daemon.status(&id).await;
        assert_eq!(status.state(), cri::ContainerState::ContainerCreated);
        assert_eq!((status.labels, status.annotations), (config.labels, config.annotations));
        assert_eq!((status.metadata, status.started_at, status.finished_at), (config.metadata, 0, 0));
        // Removed when created, running, and exited.
        remove(&daemon, &id).await;
        let running = daemon.start(&sandbox, container("running", ASLEEP)).await;
        remove(&daemon, &running).await;
        let stopped = daemon.start(&sandbox, container("stopped", "trap 'exit 0' TERM; while :; do sleep 0.1; done"));
        let stopped = stopped.await;
        for _ in 0..2 {
            stop(&daemon, &stopped, 10).await;
            assert_eq!(daemon.status(&stopped).await.state(), cri::ContainerState::ContainerExited);
        }
        for _ in 0..2 {
            remove(&daemon, &stopped).await;
        }
        assert_eq!(containers(&daemon, None).await, Vec::<String>::new());
        // Unknown ids count as stopped and removed.
        let unknown_id = "0123456789abcdef".repeat(4);
        stop(&daemon, &unknown_id, 0).await;
        remove(&daemon, &unknown_id).await;
        stop_pod(&daemon, &unknown_id).await;
        daemon.remove(&unknown_id).await;
        daemon.images.remove("docker.io/library/nobody-has-it:1").await.expect("unknown is good");
        for _ in 0..2 {
            stop_pod(&daemon, &sandbox).await;
        }
        for _ in 0..2 {
            daemon.remove(&sandbox).await;
        }
        place.assert_clean();
        daemon.stop.cancel();
    });
}

// "Container": execSync, execSync with timeout
#[test]
fn a_command_that_takes_too_long_is_killed_and_nothing_else() {
    in_network_namespace("a_command_that_takes_too_long_is_killed_and_nothing_else", async |place| {
        let daemon = daemon(place.path()).await;
        let sandbox = daemon.run(pod(place.path(), "a")).await;
        let id = daemon.start(&sandbox, container("c", ASLEEP)).await;
        assert_eq!(daemon.exec(&id, "echo hello").await, ("hello\n".to_owned(), 0));
        let cmd = ["sleep", "4321"].map(str::to_owned).to_vec();
        let request = cri::ExecSyncRequest { container_id: id.clone(), cmd, timeout: 1 };
        let refused = daemon.calls.rpc.clone().exec_sync(request).await.expect_err("too long");
        assert_eq!(refused.code(), Code::DeadlineExceeded, "{refused:?}");
        let (out, _) = daemon.exec(&id, "ps | grep '[s]leep 4321'").await;
        assert_eq!(out, "");
        assert_eq!(daemon.status(&id).await.state(), cri::ContainerState::ContainerRunning);
        daemon.remove(&sandbox).await;
        daemon.stop.cancel();
    });
}

// "Container": listing stats; "PodSandbox": metrics operations; "Streaming List"
#[test]
fn lists_by_stream_are_those_by_answer() {
    in_network_namespace("lists_by_stream_are_those_by_answer", async |place| {
        let daemon = daemon(place.path()).await;
        let labelled = |name, value| cri::PodSandboxConfig { labels: labels(value), ..pod(place.path(), name) };
        let (one, two) = (daemon.run(labelled("one", "yes")).await, daemon.run(labelled("two", "no")).await);
        stop_pod(&daemon, &two).await;
        let sandbox = Some(cri::PodSandboxFilter { id: one.clone(), ..Default::default() });
        let is_ready = Some(cri::PodSandboxStateValue { state: cri::PodSandboxState::SandboxReady.into() });
        let ready = Some(cri::PodSandboxFilter { state: is_ready, ..Default::default() });
        let of_label = Some(cri::PodSandboxFilter { label_selector: labels("yes"), ..Default::default() });
        let unknown = Some(cri::PodSandboxFilter { id: "non-existent-id".to_owned(), ..Default::default() });
        for (filter, count) in [(sandbox, 1), (ready, 1), (of_label, 1), (unknown, 0), (None, 2)] {
            let request = cri::StreamPodSandboxesRequest { filter: filter.clone() };
            let ids =
                streamed!(daemon.calls.rpc, stream_pod_sandboxes, request, pod_sandboxes, |pod| Some(pod.id.clone()));
            let listed = daemon.calls.rpc.clone().list_pod_sandbox(cri::ListPodSandboxRequest { filter }).await;
            let listed: Vec<_> = listed.expect("listed").into_inner().items.into_iter().map(|pod| pod.id).collect();
            assert_eq!((&ids, ids.len()), (&listed, count));
        }
        let mut ids = Vec::new();
        for (name, value) in [("a", "yes"), ("b", "no"), ("c", "yes")] {
            ids.push(daemon.start(&one, config_with(name, value)).await);
        }
        let made = create(&daemon, &one, config_with("d", "no")).await;
        let is_running = Some(cri::ContainerStateValue { state: cri::ContainerState::ContainerRunning.into() });
        for (filter, count) in [
            (Some(cri::ContainerFilter { id: made.clone(), ..Default::default() }), 1),
            (Some(cri::ContainerFilter { pod_sandbox_id: one.clone(), ..Default::default() }), 4),
            (Some(cri::ContainerFilter { state: is_running, ..Default::default() }), 3),
            (Some(cri::ContainerFilter { label_selector: labels("yes"), ..Default::default() }), 2),
            (Some(cri::ContainerFilter { pod_sandbox_id: two.clone(), ..Default::default() }), 0),
            (None, 4),
        ] {
            let request = cri::StreamContainersRequest { filter: filter.clone() };
            let got = streamed!(daemon.calls.rpc, stream_containers, request, containers, |c| Some(c.id.clone()));
            assert_eq!((&got, got.len()), (&containers(&daemon, filter).await, count));
        }
        remove(&daemon, &made).await;
        let gone = Some(cri::ContainerFilter { id: made, ..Default::default() });
        assert_eq!(containers(&daemon, gone).await, Vec::<String>::new());
        statistics(&daemon, &one, &ids).await;
        for sandbox in [&one, &two] {
            daemon.remove(sandbox).await;
        }
        daemon.stop.cancel();
    });
}

async fn statistics(daemon: &Daemon, sandbox: &str, ids: &[String]) {
    let own = |stats: &cri::ContainerStats| stats.attributes.as_ref().map(|attributes| attributes.id.clone());
    for (filter, count) in [
        (Some(cri::ContainerStatsFilter { id: ids[0].clone(), ..Default::default() }), 1),
        (Some(cri::ContainerStatsFilter { label_selector: labels("yes"), ..Default::default() }), 2),
        (Some(cri::ContainerStatsFilter { label_selector: labels("never"), ..Default::default() }), 0),
        (None, 3),
    ] {
        let request = cri::StreamContainerStatsRequest { filter: filter.clone() };
        let got = streamed!(daemon.calls.rpc, stream_container_stats, request, container_stats, own);
        let listed = daemon.calls.rpc.clone().list_container_stats(cri::ListContainerStatsRequest { filter }).await;
        let listed: Vec<_> = listed.expect("listed").into_inner().stats.iter().filter_map(own).collect();
        assert_eq!((&got, got.len()), (&listed, count));
    }
    let own = |stats: &cri::PodSandboxStats| stats.attributes.as_ref().map(|attributes| attributes.id.clone());
    for filter in [
        Some(cri::PodSandboxStatsFilter { id: sandbox.to_owned(), ..Default::default() }),
        Some(cri::PodSandboxStatsFilter { label_selector: labels("yes"), ..Default::default() }),
        None,
    ] {
        let request = cri::StreamPodSandboxStatsRequest { filter };
        let got = streamed!(daemon.calls.rpc, stream_pod_sandbox_stats, request, pod_sandbox_stats, own);
        assert_eq!(got, [sandbox], "only those that run have any");
    }
    let request = cri::StreamPodSandboxMetricsRequest::default();
    let own = |metrics: &cri::PodSandboxMetrics| Some(metrics.pod_sandbox_id.clone());
    let got = streamed!(daemon.calls.rpc, stream_pod_sandbox_metrics, request, pod_sandbox_metrics, own);
    assert!(got.contains(&sandbox.to_owned()), "{got:?}");
    let response = daemon.calls.rpc.clone().list_metric_descriptors(cri::ListMetricDescriptorsRequest::default()).await;
    let keys: HashMap<_, _> =
        response.expect("received").into_inner().descriptors.into_iter().map(|d| (d.name.clone(), d)).collect();
    let response =
        daemon.calls.rpc.clone().list_pod_sandbox_metrics(cri::ListPodSandboxMetricsRequest::default()).await;
    let pod_metrics = response.expect("received").into_inner().pod_metrics;
    let of_pod = pod_metrics.iter().find(|metrics| metrics.pod_sandbox_id == sandbox).expect("this pod's");
    let all = of_pod.metrics.iter().chain(of_pod.container_metrics.iter().flat_map(|container| &container.metrics));
    let mut seen = std::collections::BTreeSet::new();
    for metric in all {
        let descriptor = keys.get(&metric.name).expect(&metric.name);
        assert_eq!(metric.label_values.len(), descriptor.label_keys.len(), "{}", metric.name);
        assert!(!descriptor.help.is_empty(), "{}", metric.name);
        seen.insert(metric.name.clone());
    }
    assert!(!seen.is_empty());
}
