//! Tests of whole flows: a node joins, and an agent restarts on a registered node.

use serde_json::json;

use super::{ClusterConfig, StopTokens, start};
use crate::node::fixture::{Fixture, config, line};
use berth_api::api::ApiError;
use berth_ports::{RuntimeState, TaskLiveness};
use std::{sync::Arc, time::Duration};

use tokio::time::{Instant, sleep};

#[tokio::test(start_paused = true)]
async fn a_node_joins() {
    // AC-10-1 (node and lease), 10a §12 rows 8-13, AC-05-22
    let world = Fixture::new();
    let began = Instant::now();
    world.start(config());
    world.until("ready", |world| world.condition("Ready")["status"] == "True").await;
    assert!(began.elapsed() < Duration::from_secs(5), "{:?}", began.elapsed());
    world.until("lease", |world| world.get("leases").is_object()).await;
    let lines = world.lines("");
    let at = |line: &str| lines.iter().position(|asked| asked == line).unwrap_or_else(|| panic!("{line}: {lines:?}"));
    assert!(at("POST nodes") < at("GET leases"), "{lines:?}");
    assert!(at("GET leases") < at("POST leases"), "{lines:?}");
    assert!(at("POST nodes") < at("POST csinodes"), "{lines:?}");
    assert!(at("POST csinodes") < at("PATCH nodes/status"), "{lines:?}");
    world.until("slices", |world| world.lines("").contains(&"DELETE resourceslices".to_owned())).await;
    assert_eq!(world.calls("POST nodes").len(), 1);
    assert_eq!(world.calls("PATCH nodes/status").len(), 1);
    let events = world.events.take();
    assert_eq!(events, ["NodeHasSufficientMemory", "NodeHasNoDiskPressure", "NodeHasSufficientPID", "NodeReady"]);
}

#[tokio::test(start_paused = true)]
async fn an_agent_is_started_again() {
    // 10a §22 rows 2, 3, 6, 8
    let first = Fixture::new();
    first.start(config());
    first.until("ready", |world| world.condition("Ready")["status"] == "True").await;
    first.until("lease", |world| world.get("leases").is_object()).await;
    first.stop.cancel();
    let world = Fixture::new();
    for resource in ["nodes", "leases", "csinodes"] {
        world.put(resource, Some(first.get(resource)));
    }
    // The runtime is not checked yet; meanwhile the node must not be reported NotReady.
    let unknown = "container runtime status check may not have completed yet".to_owned();
    world.runtime.send_replace(Arc::new(RuntimeState { runtime_error: Some(unknown), ..RuntimeState::default() }));
    world.start(config());
    let runtime = world.runtime.clone();
    tokio::spawn(async move {
        sleep(Duration::from_millis(700)).await;
        runtime.send_replace(Arc::default());
    });
    world.until("heartbeat", |world| !world.calls("PATCH nodes/status").is_empty()).await;
    sleep(Duration::from_secs(5)).await;
    let calls = world.api.calls();
    let lines: Vec<String> = calls.iter().map(line).filter(|line| !line.ends_with("slices")).collect();
    for (kind, count) in [("POST nodes", 1), ("GET nodes", 1), ("PATCH nodes/status", 1), ("GET csinodes", 1)] {
        assert_eq!(lines.iter().filter(|line| *line == kind).count(), count, "{kind}: {lines:?}");
    }
    assert_eq!(lines.iter().filter(|line| line.ends_with("leases")).collect::<Vec<_>>(), ["GET leases", "PUT leases"]);
    assert!(!world.events.take().contains(&"NodeNotReady".to_owned()));
    assert_eq!(world.condition("Ready")["lastTransitionTime"], first.condition("Ready")["lastTransitionTime"]);
    assert_eq!(
        world.get("nodes")["metadata"]["annotations"],
        json!({super::super::initial_node::ATTACH_DETACH: "true"})
    );
}

#[tokio::test(start_paused = true)]
async fn tasks_report_liveness_whatever_the_server_answers() {
    for (lease_seconds, update_seconds, failures, is_gone) in [
        (40, 10, 0, false),
        (40_000, 10, 0, false),
        (40, 10, 2000, false),
        // Each call takes longer than the liveness timeout of a task.
        (400, 400, 200, false),
        (40, 10, 0, true),
    ] {
        let world = Fixture::new();
        for line in ["PUT leases", "GET leases", "PATCH nodes/status", "GET nodes"] {
            (0..failures).for_each(|_| world.fail(line, ApiError::Timeout(Duration::from_secs(10))));
        }
        let deps = world.deps();
        let liveness = deps.liveness.clone();
        let stops = StopTokens { work: world.stop.clone(), lease: world.stop.clone() };
        let update_frequency = Duration::from_secs(update_seconds);
        for (_, task) in start(ClusterConfig { lease_seconds, update_frequency, ..config() }, deps, &stops) {
            tokio::spawn(task);
        }
        sleep(Duration::from_secs(60)).await;
        if is_gone {
            world.put("nodes", None);
        }
        for minute in 0..180 {
            sleep(Duration::from_secs(60)).await;
            let silent = [&liveness.lease, &liveness.status].map(TaskLiveness::overdue_for);
            assert_eq!(silent, [None, None], "{lease_seconds} {update_seconds} {failures} {is_gone} {minute}");
        }
        world.stop.cancel();
    }
}
