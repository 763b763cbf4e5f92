//! Pod termination: deletion, replacement, orphans, and active deadlines.

use std::{sync::Arc, time::Duration};

use berth_ports::{Clock, MirrorPodState};
use berth_types::Pod;
use serde_json::json;
use tokio::time::Instant;
use tonic::Code;

use berth_testkit::{
    agent::{Agent, Machine},
    pods::{pod, pod_with, simple},
    scripted_cri::{Behaviour, Fault, ScriptedCri},
};

const SOON: Duration = Duration::from_secs(2);

fn nothing_left(cri: &ScriptedCri) -> bool {
    cri.sandboxes().is_empty() && cri.containers().is_empty()
}

/// Grace periods of StopContainer calls, in seconds.
fn graces(cri: &ScriptedCri) -> Vec<String> {
    cri.calls().into_iter().filter(|c| c.op == "stop_container").map(|c| c.detail).collect()
}

/// An API pod, optionally with a requested deletion.
fn api_pod(name: &str, deleted_with_grace: Option<i64>) -> Arc<Pod> {
    let mut metadata = json!({"annotations": null});
    if let Some(grace) = deleted_with_grace {
        metadata["deletionTimestamp"] = "2026-01-01T00:00:00Z".into();
        metadata["deletionGracePeriodSeconds"] = grace.into();
    }
    pod_with(name, metadata, json!({"containers": [{"name": "main"}]}))
}

#[tokio::test(start_paused = true)]
async fn a_deletion_ends_the_pod_within_its_own_grace() {
    // AC-02a-9
    let machine = Machine::new();
    let agent = machine.start().await;
    machine.cri.behave("main", [Behaviour::stubborn()]);
    agent.files([]).await;
    agent.api([&api_pod("web", None)]).await;
    let web = api_pod("web", Some(7));
    agent.until_ready(web.uid(), SOON).await;
    let began = Instant::now();
    agent.api([&web]).await;
    machine.cri.until("nothing is left", Duration::from_secs(9), nothing_left).await;
    assert_eq!(began.elapsed().as_secs(), 7);
    assert_eq!(graces(&machine.cri), ["7"]);
    let last = agent.status.unsent().into_iter().find(|u| u.pod.uid == *web.uid()).expect("a last word");
    assert!(last.finished, "the API server may delete it now");
    assert_eq!(last.status.phase.as_deref(), Some("Failed"));
    agent.api([]).await;
    agent.stop(SOON).await;
}

#[tokio::test(start_paused = true)]
async fn a_shorter_grace_cuts_a_kill_short() {
    // AC-02a-18
    let machine = Machine::new();
    let agent = machine.start().await;
    machine.cri.behave("main", [Behaviour::stubborn()]);
    agent.files([]).await;
    agent.api([&api_pod("web", None)]).await;
    let first = api_pod("web", Some(30));
    agent.until_ready(first.uid(), SOON).await;
    agent.api([&first]).await;
    machine.cri.until("it is being stopped", SOON, |c| c.count("stop_container") == 1).await;
    tokio::time::sleep(Duration::from_secs(3)).await;
    let began = Instant::now();
    agent.api([&api_pod("web", Some(0))]).await;
    machine.cri.until("it is gone", Duration::from_secs(3), |c| c.running("web", "main").is_empty()).await;
    assert_eq!(began.elapsed().as_secs(), 2, "the runtime is never given less than 2 s");
    assert_eq!(graces(&machine.cri), ["30", "2"]);
    agent.stop(SOON).await;
}

#[tokio::test(start_paused = true)]
async fn a_manifest_that_comes_back_starts_after_its_first_life() {
    // AC-02a-15
    let machine = Machine::new();
    let agent = machine.start().await;
    let slow = Behaviour { stops_after: Some(Duration::from_secs(5)), ..Behaviour::default() };
    machine.cri.behave("main", [slow]);
    let web = simple("web");
    agent.only_static([&web]).await;
    agent.until_ready(web.uid(), SOON).await;
    let first = machine.cri.running("web", "main");
    agent.files([]).await;
    agent.files([&web]).await; // before its worker has reported the termination
    machine.cri.until("the first life ends", Duration::from_secs(6), |c| c.running("web", "main") != first).await;
    machine.cri.until("a second begins", SOON, |c| c.running("web", "main").len() == 1).await;
    agent.until_ready(web.uid(), SOON).await;
    assert_eq!(agent.metric("kubelet_restarted_pods_total", "true"), 1.0);
    assert_eq!(machine.cri.history().starts("uid-web", "main"), 2);
    assert_eq!(machine.cri.sandboxes().len(), 1, "of the first life nothing stays");
    agent.stop(SOON).await;
}

#[tokio::test(start_paused = true)]
async fn a_changed_manifest_waits_for_the_old_pod() {
    // AC-02a-16
    let machine = Machine::new();
    let agent = machine.start().await;
    machine.cri.behave("main", [Behaviour::stubborn()]);
    let revision = |uid: &str| pod_with("web", json!({"uid": uid}), json!({"containers": [{"name": "main"}]}));
    let (old, new) = (revision("old"), revision("new"));
    agent.only_static([&old]).await;
    agent.until_ready(old.uid(), SOON).await;
    let began = Instant::now();
    agent.files([&new]).await;
    agent.until_ready(new.uid(), Duration::from_secs(32)).await;
    assert_eq!(began.elapsed().as_secs(), 30);
    assert_eq!(machine.cri.history().overlaps(), Vec::<String>::new());
    assert!(agent.status.status(old.uid()).is_none(), "the old one is forgotten");
    agent.stop(SOON).await;
}

#[tokio::test(start_paused = true)]
async fn pods_unknown_to_every_source_are_terminated() {
    // AC-02a-17
    let machine = Machine::new();
    let agent = machine.start().await;
    let (alive, dead) =
        (simple("alive"), pod("dead", json!({"restartPolicy": "Never", "containers": [{"name": "job"}]})));
    machine.cri.behave("job", [Behaviour::exits(0, Duration::from_millis(10))]);
    machine.cri.behave("main", [Behaviour::stubborn()]);
    agent.only_static([&alive, &dead]).await;
    agent.until_ready(alive.uid(), SOON).await;
    agent.until(dead.uid(), "done", SOON, |s| s.phase.as_deref() == Some("Succeeded")).await;
    agent.kill();
    machine.cri.clear_calls();
    let agent = machine.start().await;
    tokio::time::sleep(Duration::from_secs(10)).await;
    assert_eq!(machine.cri.sandboxes().len(), 2, "nothing is taken down before the sources have told");
    let began = Instant::now();
    agent.only_static([]).await;
    machine.cri.until("nothing is left", Duration::from_secs(5), nothing_left).await;
    assert!(began.elapsed() <= Duration::from_millis(4_100), "a tick and the least grace: {:?}", began.elapsed());
    assert_eq!(graces(&machine.cri), ["2"], "1 s, as the runtime is told it");
    assert_eq!(agent.metric("kubelet_orphaned_runtime_pods_total", ""), 1.0, "the dead one was no pod any more");
    assert!(agent.status.snapshot().is_empty(), "no status of an unknown pod");
    agent.stop(SOON).await;
}

#[tokio::test(start_paused = true)]
async fn a_removed_pod_leaves_nothing_and_at_once() {
    let machine = Machine::new();
    let agent = machine.start().await;
    let job = pod("job", json!({"restartPolicy": "Never", "containers": [{"name": "once"}]}));
    machine.cri.behave("once", [Behaviour::exits(0, Duration::from_millis(10))]);
    let web = simple("web");
    agent.only_static([&web, &job]).await;
    agent.until_ready(web.uid(), SOON).await;
    agent.until(job.uid(), "done", SOON, |s| s.phase.as_deref() == Some("Succeeded")).await;
    tokio::time::sleep(Duration::from_secs(5)).await;
    assert_eq!(machine.cri.containers().len(), 2, "a pod that is done keeps what it left");
    agent.files([]).await;
    machine.cri.until("nothing is left", SOON, nothing_left).await;
    tokio::time::sleep(Duration::from_secs(4)).await; // two ticks: the one that terminated the orphan swept too early
    assert!(machine.disk.pods().is_empty() && machine.disk.cgroups().is_empty());
    agent.stop(SOON).await;
}

#[tokio::test(start_paused = true)]
async fn a_pod_whose_volumes_the_node_cannot_take_has_failed() {
    // Spec 07 §5.1
    let machine = Machine::new();
    let agent = machine.start().await;
    machine.disk.exhaust_mounts("web");
    let web = simple("web");
    agent.only_static([&web]).await;
    let is_rejected = |status: &berth_types::api::PodStatus| {
        status.phase.as_deref() == Some("Failed")
            && status.reason.as_deref() == Some("VolumeAttachmentLimitExceeded")
            && status.message.as_deref() == Some("Pod was rejected: Node has reached its volume attachment limit")
    };
    agent.until(web.uid(), "rejected", SOON, is_rejected).await;
    tokio::time::sleep(Duration::from_secs(120)).await;
    assert!(agent.status.status(web.uid()).is_some_and(|status| is_rejected(&status)), "and stays so");
    assert!(machine.cri.sandboxes().is_empty(), "nothing of it was begun");
    agent.stop(SOON).await;
}

#[tokio::test(start_paused = true)]
async fn what_cannot_be_removed_is_tried_again() {
    let machine = Machine::new();
    let agent = machine.start().await;
    let web = simple("web");
    agent.only_static([&web]).await;
    agent.until_ready(web.uid(), SOON).await;
    machine.cri.fault("remove_podsandbox", "", Fault::Error(tonic::Code::Unknown, "busy".to_owned()), Some(2));
    agent.files([]).await;
    machine.cri.until("nothing is left", Duration::from_secs(20), nothing_left).await;
    assert_eq!(agent.metric("kubelet_orphaned_runtime_pods_total", ""), 0.0);
    agent.stop(SOON).await;
}

#[tokio::test(start_paused = true)]
async fn no_turn_that_fails_is_started_by_what_it_did_itself() {
    let refusal = |code| Fault::Error(code, "no".to_owned());
    for (op, is_known) in [("remove_container", true), ("remove_container", false), ("stop_container", true)] {
        for code in [Code::Unknown, Code::NotFound] {
            let machine = Machine::new();
            let mut agent = machine.start().await;
            let web = simple("web");
            agent.only_static([&web]).await;
            agent.until_ready(web.uid(), SOON).await;
            if !is_known {
                agent.kill();
                agent = machine.start().await;
            }
            // Not forever: a retry without a pause would keep the paused clock from advancing.
            machine.cri.fault(op, "", refusal(code), Some(1000));
            agent.only_static([]).await;
            tokio::time::sleep(Duration::from_secs(60)).await;
            let calls = machine.cri.count(op);
            assert!(calls <= 60, "{op} answered by {code:?} was called {calls} times in a minute");
            agent.kill();
        }
    }
}

#[tokio::test(start_paused = true)]
async fn a_pod_that_comes_back_while_its_end_is_cleared_up_has_a_second_life() {
    let machine = Machine::new();
    let agent = machine.start().await;
    let job = pod("job", json!({"activeDeadlineSeconds": 5, "containers": [{"name": "main"}]}));
    agent.only_static([&job]).await;
    agent.until_ready(job.uid(), SOON).await;
    machine.disk.set_pace(Duration::from_secs(3));
    machine.cri.until("its end", Duration::from_secs(6), |cri| cri.running("job", "main").is_empty()).await;
    tokio::time::sleep(Duration::from_secs(1)).await; // its volumes are being unmounted
    agent.files([]).await;
    agent.files([&job]).await;
    agent.until_ready(job.uid(), Duration::from_secs(10)).await;
    let over = |s: &berth_types::api::PodStatus| s.reason.as_deref() == Some("DeadlineExceeded");
    agent.until(job.uid(), "over once more", Duration::from_secs(6), over).await;
    agent.stop(SOON).await;
}

#[tokio::test(start_paused = true)]
async fn a_deadline_passes_while_the_machine_sleeps_and_never_before_its_time() {
    // AC-05-13, spec 05 §2: a suspend is a wall clock that jumps ahead
    let machine = Machine::new();
    let agent = machine.start().await;
    let [job, other] = [3600, 36_000].map(|seconds| {
        pod(&format!("job-{seconds}"), json!({"activeDeadlineSeconds": seconds, "containers": [{"name": "main"}]}))
    });
    agent.only_static([&job, &other]).await;
    for pod in [&job, &other] {
        agent.until_ready(pod.uid(), SOON).await;
    }
    let is_over = |s: &berth_types::api::PodStatus| s.reason.as_deref() == Some("DeadlineExceeded");
    // Set back by a day: the deadline moves with it.
    machine.clock.set(-86_400_000);
    tokio::time::sleep(Duration::from_secs(4000)).await;
    assert!(!agent.status.status(job.uid()).is_some_and(|status| is_over(&status)));
    machine.clock.set(86_400_000);
    let seconds = Duration::from_secs(5);
    agent.until(job.uid(), "past its deadline as soon as the clock is right", seconds, is_over).await;
    assert!(!agent.status.status(other.uid()).is_some_and(|status| is_over(&status)));
    machine.clock.set(36_000_000);
    agent.until(other.uid(), "past its deadline when the machine wakes up", seconds, is_over).await;
    agent.stop(SOON).await;
}

fn is_past_deadline(status: &berth_types::api::PodStatus) -> bool {
    let words = (status.phase.as_deref(), status.reason.as_deref(), status.message.as_deref());
    words
        == (
            Some("Failed"),
            Some("DeadlineExceeded"),
            Some("Pod was active on the node longer than the specified deadline"),
        )
}

fn deadline_events(agent: &Agent) -> usize {
    let text = "DeadlineExceeded: Pod was active on the node longer than the specified deadline";
    let events = agent.events.texts();
    assert!(events.iter().all(|event| event == text || !event.starts_with("DeadlineExceeded")), "{events:?}");
    events.iter().filter(|event| *event == text).count()
}

#[tokio::test(start_paused = true)]
async fn a_passed_deadline_is_reported_once() {
    // AC-05-13, spec 05 §2
    let machine = Machine::new();
    let agent = machine.start().await;
    let polite = Behaviour { stops_after: Some(Duration::from_secs(3)), stop_code: 0, ..Behaviour::default() };
    machine.cri.behave("main", [polite]);
    let spec = json!({"activeDeadlineSeconds": 5, "restartPolicy": "Never", "containers": [{"name": "main"}]});
    let job = pod("job", spec);
    agent.only_static([&job]).await;
    let started = agent.until_ready(job.uid(), SOON).await.start_time.clone().expect("it has started").0;
    agent.until(job.uid(), "past its deadline", Duration::from_secs(7), is_past_deadline).await;
    let took = machine.clock.now().duration_since(started);
    assert!((5000..=6000).contains(&took.as_millis()), "{took:?}");
    let ended = |cri: &ScriptedCri| cri.running("job", "main").is_empty();
    machine.cri.until("it has ended", Duration::from_secs(4), ended).await;
    tokio::time::sleep(Duration::from_secs(300)).await;
    assert!(agent.status.status(job.uid()).is_some_and(|s| is_past_deadline(&s)), "to end with 0 is no success then");
    assert_eq!(deadline_events(&agent), 1, "{:?}", agent.events.texts());
    agent.stop(SOON).await;
}

#[tokio::test(start_paused = true)]
async fn who_has_ended_is_not_past_its_deadline() {
    for (phase, reason) in [("Succeeded", None), ("Failed", None), ("Failed", Some("DeadlineExceeded"))] {
        let machine = Machine::new();
        let agent = machine.start().await;
        machine.cri.behave("main", [Behaviour::exits(0, Duration::from_millis(10))]);
        let spec = json!({"activeDeadlineSeconds": 5, "restartPolicy": "Never", "containers": [{"name": "main"}]});
        let job = pod_with("job", json!({"annotations": null}), spec);
        agent.files([]).await;
        agent.api([&job]).await;
        let done = |s: &berth_types::api::PodStatus| s.phase.as_deref() == Some("Succeeded");
        agent.until(job.uid(), "done", SOON, done).await;
        tokio::time::sleep(Duration::from_secs(200)).await;
        assert!(agent.status.status(job.uid()).is_some_and(|s| done(&s) && s.reason.is_none()));
        // Another agent reads from the API server that the pod completed long ago.
        agent.kill();
        let agent = machine.start().await;
        let reported_status = json!({"phase": phase, "reason": reason, "startTime": "2020-01-01T00:00:00Z"});
        let job = Arc::new(job.with_status(serde_json::from_value(reported_status).expect("a status")));
        agent.files([]).await;
        agent.api([&job]).await;
        tokio::time::sleep(Duration::from_secs(200)).await;
        let status = agent.status.status(job.uid()).expect("it is kept");
        assert_eq!((status.phase.as_deref(), status.reason.as_deref()), (Some(phase), reason));
        assert_eq!(deadline_events(&agent), 0, "{phase}: {:?}", agent.events.texts());
        agent.stop(SOON).await;
    }
}

#[tokio::test(start_paused = true)]
async fn a_deadline_that_is_due_while_the_runtime_fails_is_tried_as_any_other() {
    let machine = Machine::new();
    let agent = machine.start().await;
    let job = pod("job", json!({"activeDeadlineSeconds": 5, "containers": [{"name": "main"}]}));
    agent.only_static([&job]).await;
    agent.until_ready(job.uid(), SOON).await;
    machine.cri.fault("podsandbox_status", "", Fault::Error(Code::Unavailable, "no".to_owned()), None);
    machine.cri.fault("list_podsandbox", "", Fault::Error(Code::Unavailable, "no".to_owned()), None);
    let asked = || machine.cri.count("list_podsandbox") + machine.cri.count("podsandbox_status");
    let before = asked();
    tokio::time::sleep(Duration::from_secs(60)).await;
    let calls = asked() - before;
    assert!(calls < 600, "it does not spin: {calls} looks in a minute");
    agent.kill();
}

#[tokio::test(start_paused = true)]
async fn liveness_ends_before_a_runtime_that_hangs_is_asked() {
    let machine = Machine::new();
    machine.cri.fault("list_podsandbox", "", Fault::Hang, None);
    let agent = machine.start().await;
    let web = api_pod("web", Some(7));
    agent.files([]).await;
    agent.api([&web]).await;
    let until = Instant::now() + Duration::from_secs(30);
    while agent.probes.calls().len() < 2 && Instant::now() < until {
        tokio::time::sleep(Duration::from_millis(100)).await;
    }
    assert_eq!(agent.probes.calls(), [format!("add {}", web.uid()), format!("stop liveness {}", web.uid())]);
    agent.kill();
}

#[tokio::test(start_paused = true)]
async fn a_deadline_is_known_from_the_first_turn_on() {
    // AC-05-13
    let machine = Machine::new();
    let job = pod("job", json!({"activeDeadlineSeconds": 5, "containers": [{"name": "main"}]}));
    let agent = machine.start().await;
    agent.only_static([&job]).await;
    agent.until_ready(job.uid(), SOON).await;
    agent.kill();
    // The pod is in its desired state: there is no second sync for a minute.
    let agent = machine.start().await;
    agent.only_static([&job]).await;
    agent.until(job.uid(), "past its deadline", Duration::from_secs(6), is_past_deadline).await;
    machine.cri.until("it ends", SOON, |cri| cri.running("job", "main").is_empty()).await;
    agent.stop(SOON).await;
}

#[tokio::test(start_paused = true)]
async fn a_deadline_passes_while_a_turn_takes_its_time() {
    // AC-05-13
    for hangs in ["volumes", "pull_image", "run_podsandbox", "create_container", "hook"] {
        let machine = Machine::new();
        let agent = machine.start().await;
        match hangs {
            "volumes" => machine.disk.set_pace(Duration::from_secs(123)),
            "hook" => machine.cri.on_exec("hello", 0, "", "", Duration::from_secs(123)),
            call => machine.cri.fault(call, "", Fault::Hang, None),
        }
        let hook = json!({"postStart": {"exec": {"command": ["hello"]}}});
        let main = json!({"name": "main", "lifecycle": if hangs == "hook" { hook } else { json!(null) }});
        let job = pod("job", json!({"activeDeadlineSeconds": 5, "containers": [main]}));
        agent.only_static([&job]).await;
        let limit = Duration::from_millis(6_100);
        agent.until(job.uid(), hangs, limit, is_past_deadline).await;
        assert_eq!(deadline_events(&agent), 1, "{hangs}: {:?}", agent.events.texts());
        agent.kill();
    }
}

#[tokio::test(start_paused = true)]
async fn a_static_pod_is_mirrored_until_it_is_gone() {
    // AC-10a-33: the engine's part; the mirror pod writer has its own tests
    let machine = Machine::new();
    let agent = machine.start().await;
    machine.cri.behave("main", [Behaviour::stubborn()]);
    let (web, db) = (simple("web"), api_pod("db", None));
    agent.files([&web]).await;
    agent.api([&db]).await;
    agent.until_ready(web.uid(), SOON).await;
    agent.until_ready(db.uid(), SOON).await;
    assert!(agent.mirrors.wanted(web.uid()) && !agent.mirrors.wanted(db.uid()), "static pods only");
    let housekeeping = SOON + Duration::from_millis(100);
    tokio::time::sleep(housekeeping).await;
    let mirror_state = || agent.mirrors.last_state(&web.full_name());
    assert_eq!(mirror_state(), Some(MirrorPodState::Desired(web.uid().clone())));
    agent.files([]).await;
    tokio::time::sleep(housekeeping).await;
    assert_eq!(mirror_state(), Some(MirrorPodState::Terminating), "it is being stopped");
    agent.api([]).await;
    machine.cri.until("nothing is left", Duration::from_secs(60), nothing_left).await;
    tokio::time::sleep(housekeeping).await;
    assert_eq!(mirror_state(), None);
    agent.stop(SOON).await;
}
