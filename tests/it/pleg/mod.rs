//! PLEG over the scripted CRI: pod refreshes, lists, events, and recovery from faults.

mod fixture;
mod races;
mod real;

use std::{sync::Arc, time::Duration};

use berth::pleg::{CriEvents, EventHints, Expect, Hint, PlegConfig};
use berth_cri::RuntimeService;
use berth_ports::PodObserver;
use berth_testkit::scripted_cri::{EventFaults, Fault};
use berth_types::observation::ContainerState;
use fixture::{Fixture, container, ended, event_source, sandbox, settle, until, who};
use tokio::time::{Instant, sleep};
use tonic::Code;

const SECOND: Duration = Duration::from_secs(1);

#[tokio::test(start_paused = true)]
async fn a_pod_that_the_runtime_does_not_hold_is_empty_without_asking() {
    let house = Fixture::new();
    let mut early = house.pleg.view(&who("early"));
    assert!(early.latest().is_none(), "nothing is known before the first list");
    assert!(house.pleg.known().is_none());
    assert_eq!(house.pleg.health().as_deref(), Some("pleg has yet to be successful"));
    until(&mut early, "listed", SECOND, |seen| seen.pod.is_absent()).await;
    assert!(house.pleg.view(&who("late")).latest().expect("at once").pod.is_absent());
    assert!(house.cri.targets("list_containers").iter().all(String::is_empty), "no pod was asked for");
    assert_eq!(house.pleg.health(), None);
}

#[tokio::test(start_paused = true)]
async fn pods_of_before_the_start_are_known_after_the_first_list() {
    let cri = Fixture::runtime();
    let id = sandbox(&cri, "web", 0).await;
    container(&cri, &id, "web", "main", 0).await;
    let mut house = Fixture::over(cri, Vec::new(), PlegConfig::default());
    let mut view = house.pleg.view(&who("web"));
    let seen = until(&mut view, "a look", SECOND, |seen| seen.pod.running().count() == 1).await;
    assert_eq!((seen.pod.ips.len(), seen.pod.id.clone()), (1, who("web")));
    let known = house.pleg.list().await.expect("a list");
    assert_eq!(known.pods.keys().map(ToString::to_string).collect::<Vec<_>>(), ["uid-web"]);
    assert_eq!(house.metric("kubelet_running_pods", ""), 1.0);
    assert!(house.died.try_recv().is_err());
}

#[tokio::test(start_paused = true)]
async fn a_list_contains_pods_whose_inspection_hangs() {
    let house = Fixture::without_events();
    house.cri.fault("podsandbox_status", "web", Fault::Hang, None);
    house.sandbox("web", 0).await;
    let known = house.pleg.list().await.expect("a list");
    assert!(known.pods.get("uid-web").expect("held").is_alive());
}

#[tokio::test(start_paused = true)]
async fn an_exit_between_lists_is_reported_once() {
    // AC-03b-23
    let mut house = Fixture::without_events();
    let (id, mut view) = house.running("web").await;
    let before = house.pleg.action_completed(&who("web").uid);
    view.fresh(before).await;
    house.cri.kill(&id, 7, "");
    let seen = until(&mut view, "the exit", SECOND * 2, ended).await;
    assert!(seen.generation >= before, "a look that began after the last action");
    let report = house.died.recv().await.expect("a report");
    assert_eq!((report.id.as_str(), &*report.container), (id.as_str(), "main"));
    assert_eq!(report.pod.newest("main").map(|c| c.exit_code), Some(7));
    sleep(SECOND * 5).await;
    assert!(house.died.try_recv().is_err(), "once");
    assert_eq!(house.metric("kubelet_running_containers", "exited"), 1.0);
    // AC-08-7
    house.cri.remove_container(&id).await.expect("removed");
    until(&mut view, "the removal", SECOND * 2, |seen| seen.pod.containers.is_empty()).await;
    assert_eq!(house.metric("kubelet_running_containers", "exited"), 0.0);
    assert!(house.died.try_recv().is_err(), "a removal is no death");
}

#[tokio::test(start_paused = true)]
async fn containers_that_come_and_go_between_lists_are_never_reported() {
    // AC-03b-24
    let mut house = Fixture::without_events();
    let id = house.sandbox("web", 0).await;
    house.pleg.list().await.expect("a list");
    settle().await;
    house.cri.clear_calls();
    let short = house.container(&id, "web", "short", 0).await;
    house.cri.kill(&short, 0, "");
    house.cri.remove_container(&short).await.expect("removed");
    sleep(SECOND * 3).await;
    assert!(house.died.try_recv().is_err());
    assert!(house.cri.targets("list_containers").iter().all(String::is_empty), "and costs no look");
}

#[tokio::test(start_paused = true)]
async fn running_then_gone_is_a_death() {
    // AC-03b-25
    let mut house = Fixture::without_events();
    let (id, mut view) = house.running("web").await;
    house.cri.remove_container(&id).await.expect("removed");
    until(&mut view, "gone", SECOND * 2, |seen| seen.pod.containers.is_empty()).await;
    assert_eq!(house.died.recv().await.expect("a report").id.as_str(), id);
}

#[tokio::test(start_paused = true)]
async fn an_exit_is_observed_within_milliseconds() {
    let house = Fixture::new();
    for op in ["list_podsandbox", "list_containers", "container_status"] {
        house.cri.latency(op, Duration::from_millis(2));
    }
    let (id, mut view) = house.running("web").await;
    sleep(SECOND * 5).await;
    let killed = Instant::now();
    house.cri.kill(&id, 0, "");
    until(&mut view, "the exit", SECOND, ended).await;
    assert!(killed.elapsed() <= Duration::from_millis(10), "{:?}", killed.elapsed());
}

#[tokio::test(start_paused = true)]
async fn a_pod_that_hangs_delays_no_other() {
    // AC-03b-26
    let config = PlegConfig { parallel_queries: 2, ..PlegConfig::default() };
    let house = Fixture::over(Fixture::runtime(), Vec::new(), config);
    let (id, mut good) = house.running("good").await;
    house.cri.fault("container_status", "bad", Fault::Hang, None);
    for at in 0..5 {
        let name = format!("bad-{at}");
        let sandbox = house.sandbox(&name, 0).await;
        house.container(&sandbox, &name, "main", 0).await;
    }
    sleep(SECOND * 10).await;
    house.cri.kill(&id, 0, "");
    until(&mut good, "the exit of the good one", SECOND * 2, ended).await;
    sleep(SECOND * 30).await;
    assert_eq!(house.pleg.health(), None, "pods that hang do not make the node unhealthy");
    let mut stuck: Vec<String> = house.pleg.stuck(SECOND * 30).into_iter().map(|s| s.pod.to_string()).collect();
    stuck.sort();
    assert_eq!(stuck.len(), 5, "{stuck:?}");
    assert!(stuck[0].starts_with("bad-0_default"), "a stuck pod is named");
    sleep(SECOND * 120).await;
    let mut bad = house.pleg.view(&who("bad-0"));
    let error = bad.latest().and_then(|seen| seen.error).expect("an error");
    assert!(error.contains("deadline") || error.contains("no response") || error.contains("timed out"), "{error}");
}

#[tokio::test(start_paused = true)]
async fn a_failed_inspection_is_flagged_and_repeated() {
    let house = Fixture::new();
    let (id, mut view) = house.running("web").await;
    house.cri.fault("container_status", "web", Fault::Error(Code::Internal, "boom".into()), Some(2));
    house.cri.kill(&id, 3, "");
    let seen = until(&mut view, "the error", SECOND, |seen| seen.error.is_some()).await;
    assert_eq!(seen.pod.running().count(), 1, "the last good look is kept");
    let seen = until(&mut view, "the repetition", SECOND * 4, ended).await;
    assert_eq!(seen.pod.newest("main").map(|c| c.exit_code), Some(3));
}

#[tokio::test(start_paused = true)]
async fn an_action_during_an_inspection_requests_exactly_one_more() {
    let house = Fixture::new();
    let (_, mut view) = house.running("web").await;
    house.cri.latency("list_containers", Duration::from_millis(100));
    house.cri.clear_calls();
    let first = house.pleg.action_completed(&who("web").uid);
    sleep(Duration::from_millis(50)).await;
    for _ in 0..9 {
        house.pleg.action_completed(&who("web").uid);
    }
    let last = house.pleg.action_completed(&who("web").uid);
    assert!(view.fresh(first).await.generation < last, "the look under way does not count for what came later");
    assert!(view.fresh(last).await.generation >= last);
    sleep(SECOND).await;
    assert_eq!(house.cri.targets("list_containers").iter().filter(|t| *t == "uid-web").count(), 2);
}

#[tokio::test(start_paused = true)]
async fn known_ends_are_never_asked_for_again() {
    let house = Fixture::new();
    let (id, mut view) = house.running("web").await;
    house.cri.kill(&id, 0, "");
    until(&mut view, "the exit", SECOND, ended).await;
    house.cri.clear_calls();
    let sandbox = house.cri.sandboxes().first().expect("one").id.clone();
    let next = house.container(&sandbox, "web", "main", 1).await;
    let seen = view.fresh(house.pleg.action_completed(&who("web").uid)).await;
    assert_eq!(seen.pod.containers.len(), 2);
    let asked: Vec<String> =
        house.cri.calls().into_iter().filter(|c| c.op == "container_status").map(|c| c.detail).collect();
    assert_eq!(asked, [next]);
    assert_eq!(house.cri.count("podsandbox_status"), 0, "an address does not change");
}

#[tokio::test(start_paused = true)]
async fn addresses_are_kept_when_the_sandbox_dies() {
    let house = Fixture::new();
    let (_, mut view) = house.running("web").await;
    let ips = view.latest().expect("a look").pod.ips.clone();
    let sandbox = house.cri.sandboxes().first().expect("one").id.clone();
    house.cri.kill_sandbox(&sandbox);
    let seen = until(&mut view, "the end", SECOND, |seen| !seen.pod.is_alive()).await;
    assert_eq!((seen.pod.ips.len(), &seen.pod.ips), (1, &ips));
}

#[tokio::test(start_paused = true)]
async fn a_quiet_node_costs_one_list_a_minute() {
    let house = Fixture::new();
    let (_, _view) = house.running("web").await;
    sleep(SECOND * 10).await;
    house.cri.clear_calls();
    sleep(SECOND * 600).await;
    assert!((9..=11).contains(&(house.cri.calls().len() / 2)), "{:#?}", house.cri.calls());
}

#[tokio::test(start_paused = true)]
async fn without_events_a_list_follows_each_second() {
    let cri = Fixture::runtime();
    cri.without_events();
    let hints: Arc<dyn EventHints> = Arc::new(CriEvents::new(cri.clone()));
    let house = Fixture::over(cri, vec![hints], PlegConfig::default());
    let (id, mut view) = house.running("web").await;
    house.cri.clear_calls();
    sleep(SECOND * 10).await;
    assert!((9..=11).contains(&house.cri.count("list_containers")));
    house.cri.kill(&id, 0, "");
    until(&mut view, "the exit", SECOND + SECOND / 10, ended).await;
}

#[tokio::test(start_paused = true)]
async fn a_broken_stream_is_followed_by_a_list_and_opened_again() {
    // AC-03b-28 differs on purpose (spec 03b §15 item 2): no permanent fallback, ends of streams are counted and
    // recovered from.
    let house = Fixture::new();
    let (id, mut view) = house.running("web").await;
    sleep(SECOND * 10).await;
    house.cri.break_streams();
    house.cri.kill(&id, 0, "");
    until(&mut view, "the exit that no event told of", SECOND / 2, ended).await;
    for _ in 0..6 {
        sleep(SECOND * 40).await;
        house.cri.break_streams();
    }
    sleep(SECOND * 40).await;
    let (id, mut view) = house.running("other").await;
    sleep(SECOND * 10).await;
    let killed = Instant::now();
    house.cri.kill(&id, 0, "");
    until(&mut view, "events come again", SECOND, ended).await;
    assert!(killed.elapsed() < SECOND / 10);
    assert_eq!(house.metric("kubelet_evented_pleg_connection_error_count", ""), 7.0, "each end is counted");
}

#[tokio::test(start_paused = true)]
async fn a_runtime_that_comes_back_is_asked_for_events_again() {
    let cri = Fixture::runtime();
    cri.fault("get_container_events", "", Fault::Error(Code::Unimplemented, "old".into()), Some(1));
    let hints: Vec<Arc<dyn EventHints>> = vec![Arc::new(CriEvents::new(cri.clone()))];
    let house = Fixture::over(cri, hints, PlegConfig::default());
    sleep(SECOND * 60).await;
    assert_eq!(house.metric("kubelet_evented_pleg_connection_success_count", ""), 0.0);
    house.cri.fault("list_podsandbox", "", Fault::Error(Code::Unavailable, "upgrading".into()), Some(3));
    sleep(SECOND * 10).await;
    assert_eq!(house.metric("kubelet_evented_pleg_connection_success_count", ""), 1.0);
}

#[tokio::test(start_paused = true)]
async fn lost_events_are_made_good_by_the_audit() {
    let house = Fixture::new();
    let (id, mut view) = house.running("web").await;
    sleep(SECOND * 10).await;
    house.cri.event_faults(EventFaults { lose: 1.0, ..EventFaults::default() });
    house.cri.kill(&id, 0, "");
    until(&mut view, "the exit", SECOND * 61, ended).await;
    house.cri.clear_calls();
    sleep(SECOND * 20).await;
    assert!(house.cri.count("list_containers") > 2, "a stream that loses events is audited more often");
}

#[tokio::test(start_paused = true)]
async fn the_runtime_being_gone_makes_the_node_unhealthy() {
    // AC-03b-27
    let house = Fixture::new();
    sleep(SECOND * 5).await;
    house.cri.fault("list_podsandbox", "", Fault::Error(Code::Unavailable, "no socket".into()), None);
    sleep(SECOND * 240).await;
    let text = house.pleg.health().expect("unhealthy");
    assert!(text.starts_with("pleg was last seen active 4m") && text.ends_with(" ago; threshold is 3m0s"), "{text}");
    assert!(house.pleg.list().await.is_err());
    house.cri.heal();
    sleep(SECOND * 2).await;
    assert_eq!(house.pleg.health(), None);
}

#[tokio::test(start_paused = true)]
async fn a_hint_that_comes_before_the_fact_is_followed_up() {
    let (source, feed) = event_source();
    let house = Fixture::over(Fixture::runtime(), vec![source], PlegConfig::default());
    let (id, mut view) = house.running("web").await;
    sleep(SECOND * 5).await;
    let hint = |object: &str| Hint { object: object.into(), pod: None, expect: Expect::Stopped, created_at: None };
    feed.send(Ok(hint(&id))).expect("followed");
    sleep(Duration::from_millis(30)).await;
    house.cri.kill(&id, 0, "");
    until(&mut view, "the exit", SECOND / 10, ended).await;
}

#[tokio::test(start_paused = true)]
async fn a_hint_about_an_unknown_object_leads_to_one_list() {
    let (source, feed) = event_source();
    let house = Fixture::over(Fixture::runtime(), vec![source], PlegConfig::default());
    sleep(SECOND * 5).await;
    house.cri.clear_calls();
    house.sandbox("web", 0).await;
    for at in 0..100 {
        let hint = Hint { object: format!("x{at}"), pod: None, expect: Expect::Started, created_at: None };
        feed.send(Ok(hint)).expect("followed");
    }
    sleep(SECOND).await;
    assert!(house.pleg.known().expect("listed").pods.contains_key("uid-web"));
    assert!(house.cri.targets("list_containers").iter().filter(|t| t.is_empty()).count() <= 2);
}

#[tokio::test(start_paused = true)]
async fn resources_are_read_again_after_an_action_only() {
    let house = Fixture::new();
    let (_, mut view) = house.running("web").await;
    house.cri.clear_calls();
    view.fresh(house.pleg.action_completed(&who("web").uid)).await;
    assert_eq!(house.cri.count("container_status"), 1);
    assert_eq!(view.latest().and_then(|s| s.pod.newest("main").map(|c| c.state)), Some(ContainerState::Running));
}

#[tokio::test(start_paused = true)]
async fn it_ends_when_stopped() {
    let Fixture { task, stop, .. } = Fixture::new();
    drop(stop);
    task.await.expect("ended");
}
