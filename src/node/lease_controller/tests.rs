//! Tests of the lease against a server that loses it, rejects it, hangs, or has no node.

use serde_json::json;
use tokio::time::Instant;

use super::*;
use crate::node::fixture::{Fixture, config};
use berth_api::testing::refused;

fn controller(world: &Fixture) -> LeaseController {
    let deps = world.deps();
    LeaseController {
        api: deps.api,
        beat: HeartbeatDeadline(Duration::from_secs(10)),
        holder: Holder { node: "n".to_owned(), seconds: config().lease_seconds },
        nodes: deps.nodes,
        registered: watch::channel(false).1,
        reached: watch::channel(0).1,
        clock: deps.clock,
        random: deps.random,
        metrics: deps.metrics,
        last: None,
        node_observed: false,
        events: deps.events,
        conflicts: 0,
        own_renew_times: Vec::new(),
        reported_conflict: None,
        liveness: deps.liveness.lease,
    }
}

fn node(world: &Fixture) {
    world.put("nodes", Some(json!({"metadata": {"name": "n"}})));
}

#[tokio::test(start_paused = true)]
async fn a_lease_is_made_and_renewed_every_quarter() {
    let world = Fixture::new();
    node(&world);
    let began = Instant::now();
    tokio::spawn(controller(&world).run(world.stop.clone()));
    world.until("made and renewed", |world| world.lines("").len() >= 4).await;
    assert_eq!(world.lines(""), ["GET leases", "GET nodes", "POST leases", "PUT leases"]);
    assert!((10_000..10_100).contains(&began.elapsed().as_millis()), "{:?}", began.elapsed());
    let lease = world.get("leases");
    assert_eq!(lease["metadata"]["ownerReferences"][0]["uid"], "uid-1");
    assert_eq!(lease["spec"]["holderIdentity"], "n");
    let renewed = lease["spec"]["renewTime"].as_str().expect("a text");
    assert!(renewed.starts_with("2026-01-01T00:00:10.") && renewed.len() == 27, "{renewed}");
    for call in world.api.calls() {
        assert_eq!(call.line, berth_api::api::RequestClass::Heartbeat);
        assert_eq!(call.query, [("timeout", "10s".to_owned())]);
    }
}

#[tokio::test(start_paused = true)]
async fn a_conflict_is_settled_in_the_same_round() {
    // AC-10-4, AC-05-27
    let world = Fixture::new();
    node(&world);
    tokio::spawn(controller(&world).run(world.stop.clone()));
    world.until("made", |world| world.lines("").len() == 3).await;
    let mut lease = world.get("leases");
    lease["spec"]["unknown"] = json!("kept");
    world.put("leases", Some(lease)); // another client wrote it: our version is old
    world.until("renewed", |world| world.lines("").len() == 6).await;
    assert_eq!(world.lines("")[3..], ["PUT leases", "GET leases", "PUT leases"]);
    assert_eq!(world.get("leases")["spec"]["unknown"], "kept");
}

#[tokio::test(start_paused = true)]
async fn a_deleted_lease_is_made_again_at_once() {
    // AC-10-4
    let world = Fixture::new();
    node(&world);
    tokio::spawn(controller(&world).run(world.stop.clone()));
    world.until("made", |world| world.lines("").len() == 3).await;
    world.put("leases", None);
    world.until("tried", |world| world.lines("").len() > 3).await;
    let began = Instant::now();
    world.until("made again", |world| world.lines("").len() == 7).await;
    assert_eq!(world.lines("")[3..], ["PUT leases", "GET leases", "GET nodes", "POST leases"]);
    assert!(began.elapsed() < Duration::from_secs(1));
}

#[tokio::test(start_paused = true)]
async fn a_renewal_that_fails_is_tried_again_at_once() {
    // AC-10-5: the first attempts have short timeouts, so that a dead connection costs seconds.
    let world = Fixture::new();
    node(&world);
    tokio::spawn(controller(&world).run(world.stop.clone()));
    world.until("made", |world| world.lines("").len() == 3).await;
    world.fail("PUT leases", ApiError::Timeout(Duration::from_secs(3)));
    world.until("renewed", |world| world.calls("PUT leases").len() == 2).await;
    let deadlines: Vec<u64> = world.calls("PUT leases").iter().map(|call| call.deadline.as_secs()).collect();
    assert_eq!(deadlines, [3, 5]);
    for _ in 0..5 {
        world.fail("PUT leases", refused(500, "InternalError", "x"));
    }
    world.until("all tries failed", |world| world.calls("PUT leases").len() == 8).await;
    world
        .until("looked at again", |world| world.lines("").ends_with(&["GET leases".into(), "PUT leases".into()]))
        .await;
}

#[tokio::test(start_paused = true)]
async fn the_lease_is_renewed_at_once_when_the_server_is_back() {
    // AC-10-43: before the back-off ends.
    let world = Fixture::new();
    node(&world);
    let (back, reached) = watch::channel(0);
    tokio::spawn(LeaseController { reached, ..controller(&world) }.run(world.stop.clone()));
    world.until("made", |world| world.lines("").len() == 3).await;
    for _ in 0..TRIES {
        world.fail("PUT leases", ApiError::Unreachable("away".to_owned()));
    }
    world.fail("GET leases", ApiError::Unreachable("away".to_owned()));
    world.until("looked at again", |world| world.calls("GET leases").len() == 2).await;
    let began = Instant::now();
    back.send_replace(1);
    world.until("renewed", |world| world.calls("PUT leases").len() == 1 + TRIES).await;
    assert!(began.elapsed() < FIRST_PAUSE, "{:?}", began.elapsed());
}

#[tokio::test(start_paused = true)]
async fn another_holder_of_the_lease_is_reported_once() {
    let world = Fixture::new();
    node(&world);
    let theirs = json!({"metadata": {"name": "n"}, "spec": {"holderIdentity": "m", "leaseDurationSeconds": 40,
        "renewTime": "2026-01-01T00:00:00.000000Z"}});
    world.put("leases", Some(theirs));
    let stop = world.stop.child_token();
    tokio::spawn(controller(&world).run(stop.clone()));
    world.until("renewed twice", |world| world.calls("PUT leases").len() == 2).await;
    assert_eq!(world.get("leases")["spec"]["holderIdentity"], "m", "as the reference has it");
    assert!(world.events.take().is_empty(), "whoever held it may be gone, or be us");
    for _ in 0..2 {
        let mut lease = world.get("leases");
        lease["spec"]["renewTime"] = json!("2026-01-01T00:00:07.000000Z"); // the other agent renews it
        world.put("leases", Some(lease));
        let before = world.calls("PUT leases").len();
        world.until("renewed", |world| world.calls("PUT leases").len() == before + 2).await;
    }
    assert_eq!(world.events.take(), [name_conflict::REASON]);
    stop.cancel();
    let before = world.calls("PUT leases").len();
    tokio::spawn(controller(&world).run(world.stop.clone()));
    world.until("renewed after a restart", |world| world.calls("PUT leases").len() == before + 2).await;
    assert!(world.events.take().is_empty(), "what is there is our own");
}

#[tokio::test(start_paused = true)]
async fn another_writer_of_the_lease_is_reported_once() {
    let world = Fixture::new();
    node(&world);
    tokio::spawn(controller(&world).run(world.stop.clone()));
    world.until("made", |world| world.lines("").len() == 3).await;
    for round in 1..=5 {
        world.put("leases", Some(world.get("leases"))); // another client wrote it
        world.until("renewed", |world| world.calls("PUT leases").len() == 2 * round).await;
        tokio::time::sleep(Duration::from_secs(1)).await;
        let events = world.events.take();
        assert_eq!(events.len(), usize::from(round == 3), "{round}: {events:?}");
    }
}

#[tokio::test(start_paused = true)]
async fn without_a_node_there_is_no_lease_until_it_comes() {
    let world = Fixture::new();
    world.fail("GET leases", refused(403, "Forbidden", "x"));
    tokio::spawn(controller(&world).run(world.stop.clone()));
    world.until("nobody to own it", |world| world.lines("").len() == 3).await;
    assert_eq!(world.lines(""), ["GET leases", "GET leases", "GET nodes"]);
    node(&world);
    let began = Instant::now();
    world.until("made", |world| world.get("leases").is_object()).await;
    assert!(began.elapsed() < Duration::from_secs(1));
}

#[tokio::test(start_paused = true)]
async fn the_lease_of_a_deleted_node_rests() {
    let world = Fixture::new();
    node(&world);
    tokio::spawn(controller(&world).run(world.stop.clone()));
    world.until("made", |world| world.lines("").len() == 3).await;
    world.put("nodes", None);
    tokio::time::sleep(Duration::from_secs(600)).await;
    assert!(world.lines("").len() <= 4, "{:?}", world.lines(""));
    let before = world.calls("PUT leases").len();
    node(&world);
    world.until("renewed again", |world| world.calls("PUT leases").len() > before).await;
}

#[tokio::test(start_paused = true)]
async fn a_lease_without_owner_is_given_one_and_renewed_without() {
    let world = Fixture::new();
    let lease = json!({"metadata": {"name": "n"}, "spec": {"holderIdentity": "n"}});
    world.put("leases", Some(lease));
    tokio::spawn(controller(&world).run(world.stop.clone()));
    world.until("renewed", |world| world.calls("PUT leases").len() == 1).await;
    assert!(world.get("leases")["metadata"]["ownerReferences"].is_null());
    node(&world);
    world.until("owned", |world| world.get("leases")["metadata"]["ownerReferences"].is_array()).await;
}
