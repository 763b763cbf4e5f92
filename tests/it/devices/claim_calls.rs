//! Calls to DRA drivers: versions, endpoints, deadlines, incomplete answers, metrics.
//!
//! Spec 06c §3.1, §3.3, §3.5, §3.8.

use std::{collections::BTreeMap, sync::Arc, time::Duration};

use tokio::{task::yield_now, time::timeout};

use berth_ports::PodClaims;
use berth_resources::dra::checkpoint;
use berth_testkit::{
    dra_driver::{SampleDriver, V1, V1BETA1},
    plugin_server::PluginFault,
};

use super::{
    claim_fixture::{ClaimAgent, ClaimNode, DRIVER, PREPARE, UNPREPARE, calls},
    fixture::{EVER, RecordedFile, pass, series},
};

/// A node whose driver has these services, with an agent and its checkpoint.
async fn start(services: &[&str], claims: &[&str]) -> (ClaimNode, Arc<RecordedFile>, ClaimAgent) {
    let (node, file) = (ClaimNode::new(services, claims), RecordedFile::containing(None));
    let agent = node.start(file.clone()).await;
    (node, file, agent)
}

/// Numbers of devices of all claims in the newest checkpoint.
fn device_counts(file: &RecordedFile) -> Vec<usize> {
    let contents = file.contents();
    let claims = contents.last().map(|content| checkpoint::decode(content).expect("a valid checkpoint"));
    let claims = claims.unwrap_or_default().into_values();
    claims.map(|claim| claim.drivers.values().map(Vec::len).sum()).collect()
}

#[tokio::test]
async fn the_first_service_that_the_driver_lists_is_called() {
    // AC-06c-17
    for (services, expected) in [(&[V1BETA1, V1], V1BETA1), (&[V1, V1BETA1], V1)] {
        let (node, _, agent) = start(services, &["one"]).await;
        agent.claims.prepare(&node.pod).await.expect("the driver works");
        assert_eq!(agent.cdi_devices(&node.pod), Ok(vec![node.cdi_id("one")]));
        agent.claims.unprepare(node.pod.uid()).await.expect("the driver works");
        let called: Vec<&str> = node.driver.calls().iter().map(|call| call.service).collect();
        // The driver serves both, and no health.
        assert_eq!(called, [expected, expected]);
        agent.stop().await;
    }
}

#[tokio::test]
async fn calls_follow_the_newest_connected_endpoint() {
    let (node, _, agent) = start(&[V1], &["one"]).await;
    let mut new = SampleDriver::start_at(&node.directory.path().join("new/dra.sock"), DRIVER, &[V1]);
    agent.register(&new).await;
    agent.claims.prepare(&node.pod).await.expect("the driver works");
    assert_eq!((calls(&node.driver, PREPARE), calls(&new, PREPARE)), (0, 1));
    // A rolling update that is rolled back: the first endpoint is the only one that is connected.
    new.stop();
    let released = async {
        while agent.claims.unprepare(node.pod.uid()).await.is_err() {
            yield_now().await;
        }
    };
    timeout(EVER, released).await.expect("the other endpoint is called");
    assert_eq!(calls(&node.driver, UNPREPARE), 1);
    agent.stop().await;
}

#[tokio::test]
async fn a_prepare_call_that_hangs_ends_after_45_seconds() {
    let (node, file, agent) = start(&[V1], &["one"]).await;
    node.driver.fail(PREPARE, PluginFault::Hang);
    let meanwhile = async {
        node.driver.wait_for_calls(PREPARE, 1).await;
        pass(Duration::from_secs(46)).await;
    };
    let (failed, ()) = tokio::join!(agent.claims.prepare(&node.pod), meanwhile);
    let text = "prepare dynamic resources: NodePrepareResources: rpc error: code = DeadlineExceeded desc = context \
                deadline exceeded";
    assert_eq!(failed, Err(text.to_owned()));
    // The driver may have prepared it: the claim is released with its pod.
    assert_eq!(device_counts(&file), [0]);
    node.driver.heal();
    agent.claims.unprepare(node.pod.uid()).await.expect("the driver works");
    assert_eq!((calls(&node.driver, UNPREPARE), device_counts(&file)), (1, vec![]));
    agent.stop().await;
}

#[tokio::test]
async fn a_driver_that_prepares_half_of_the_claims_is_called_again() {
    // AC-06c-21
    let (node, file, agent) = start(&[V1], &["one", "two"]).await;
    let error = |cause: &str| Err(format!("prepare dynamic resources: NodePrepareResources {cause}"));
    node.driver.change_behavior(|behavior| behavior.answered_claims = Some(1));
    assert_eq!(agent.claims.prepare(&node.pod).await, error("skipped 1 ResourceClaims"));
    node.driver.heal();
    node.driver.fail_claim(PREPARE, "two", "no memory");
    let failed = agent.claims.prepare(&node.pod).await;
    assert_eq!(failed, error("failed for ResourceClaim two: no memory"));
    node.driver.heal();
    node.driver.change_behavior(|behavior| behavior.unknown_uids = vec!["x".to_owned()]);
    let failed = agent.claims.prepare(&node.pod).await;
    assert_eq!(failed, error("returned result for unknown claim UID x"));
    node.driver.heal();
    for _ in 0..2 {
        agent.claims.prepare(&node.pod).await.expect("the driver works");
    }
    assert_eq!(agent.cdi_devices(&node.pod), Ok(vec![node.cdi_id("one"), node.cdi_id("two")]));
    assert_eq!(device_counts(&file), [1, 1], "no device is doubled");
    let requested: Vec<usize> = node.driver.calls().iter().map(|call| call.claims.len()).collect();
    assert_eq!(requested, [2; 4], "a prepared claim is not prepared again");
    agent.stop().await;
}

#[tokio::test]
async fn operations_and_calls_are_measured() {
    // Spec 06c §3.8, 08 §4.10
    let (node, _, agent) = start(&[V1], &["one"]).await;
    let in_use = || series(&agent.registry, "dra_resource_claims_in_use");
    let labels = |values: &[&str]| values.iter().map(|value| (*value).to_owned()).collect::<Vec<String>>();
    node.driver.fail(PREPARE, PluginFault::Fail(tonic::Status::unavailable("busy")));
    assert!(agent.claims.prepare(&node.pod).await.is_err());
    let unused = BTreeMap::from([(labels(&["<any>"]), 0.0)]);
    assert_eq!(in_use(), unused, "only prepared claims count");
    node.driver.heal();
    agent.claims.prepare(&node.pod).await.expect("the driver works");
    assert_eq!(in_use(), BTreeMap::from([(labels(&["<any>"]), 1.0), (labels(&[DRIVER]), 1.0)]));
    agent.claims.unprepare(node.pod.uid()).await.expect("the driver works");
    assert_eq!(in_use(), unused);

    // `is_error`, `operation_name`
    let operations = [["false", "PrepareResources"], ["false", "UnprepareResources"], ["true", "PrepareResources"]];
    let operations = operations.map(|values| (labels(&values), 1.0));
    assert_eq!(series(&agent.registry, "dra_operations_duration_seconds"), BTreeMap::from(operations));
    // `driver_name`, `grpc_status_code`, `method_name`
    let method = |name: &str| format!("/k8s.io.kubelet.pkg.apis.dra.v1.DRAPlugin/{name}");
    let (prepare, unprepare) = (method("NodePrepareResources"), method("NodeUnprepareResources"));
    let calls = [[DRIVER, "OK", &prepare], [DRIVER, "OK", &unprepare], [DRIVER, "Unavailable", &prepare]];
    let calls = calls.map(|values| (labels(&values), 1.0));
    assert_eq!(series(&agent.registry, "dra_grpc_operations_duration_seconds"), BTreeMap::from(calls));
    agent.stop().await;
}
