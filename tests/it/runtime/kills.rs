//! Stopping containers and pods: grace periods, preStop hooks, and sidecar order.

use std::{sync::Arc, time::Duration};

use berth_ports::{Grace, PodRuntime};
use serde_json::{Value, json};
use tokio::{sync::watch, time::Instant};
use tonic::Code;

use crate::runtime::fixture::Fixture;
use berth_testkit::{
    pods::{pod, pod_with, simple},
    scripted_cri::{Behaviour, Fault},
};

fn with_pre_stop(grace: i64, hook: Value) -> Value {
    json!({"terminationGracePeriodSeconds": grace, "containers": [{"name": "main", "lifecycle": {"preStop": hook}}]})
}

#[tokio::test(start_paused = true)]
async fn a_probes_own_grace_period_counts_when_it_fails() {
    // AC-03a-9
    let bench = Fixture::new();
    let probe = json!({"terminationGracePeriodSeconds": 5, "exec": {"command": ["x"]}});
    let web = pod(
        "web",
        json!({"terminationGracePeriodSeconds": 60, "containers": [{"name": "main", "livenessProbe": probe}]}),
    );
    bench.good_turn(&web).await;
    bench.world.fail_liveness(&bench.cri.running("web", "main")[0]);
    bench.good_turn(&web).await;
    assert_eq!(bench.graces(), ["web/main 5"]);
    assert!(bench.events().contains(&"Killing: Container main failed liveness probe, will be restarted".to_owned()));
    assert_eq!(bench.cri.running("web", "main").len(), 1, "and was started again in the same pass");
}

#[tokio::test(start_paused = true)]
async fn no_grace_means_no_hook_and_two_seconds() {
    // AC-03a-10
    let bench = Fixture::new();
    let web = pod("web", with_pre_stop(30, json!({"exec": {"command": ["bye"]}})));
    bench.good_turn(&web).await;
    let (_sender, grace) = watch::channel(Some(Grace::from_secs(0)));
    let request = bench.kill_request(Some(&web), bench.observe(&web), grace);
    let progress = request.progress.clone();
    bench.runtime.kill_pod(request).await.expect("killed");
    assert_eq!(bench.graces(), ["web/main 2"]);
    assert_eq!(bench.cri.count("exec_sync"), 0);
    assert_eq!(bench.cri.count("stop_podsandbox"), 1);
    let passed: Vec<_> = progress.timings().into_iter().map(|step| step.name).collect();
    assert_eq!(passed, ["StopContainer main", "StopPodSandbox"]);
    assert!(bench.events().contains(&"Killing: Stopping container main".to_owned()));
}

#[tokio::test(start_paused = true)]
async fn a_hook_uses_up_grace() {
    // AC-03a-11
    let bench = Fixture::new();
    let web = pod("web", with_pre_stop(10, json!({"exec": {"command": ["bye"]}})));
    bench.cri.on_exec("bye", 0, "", "", Duration::from_secs(7));
    bench.good_turn(&web).await;
    bench.kill(&web, None).await.expect("killed");
    assert_eq!(bench.graces(), ["web/main 3"]);
}

#[tokio::test(start_paused = true)]
async fn a_hook_ends_with_the_grace_period_and_its_failure_is_reported() {
    let bench = Fixture::new();
    let sleeper = pod("sleeper", with_pre_stop(4, json!({"sleep": {"seconds": 60}})));
    bench.good_turn(&sleeper).await;
    let began = Instant::now();
    bench.kill(&sleeper, None).await.expect("killed");
    assert_eq!((bench.graces(), began.elapsed().as_secs()), (vec!["sleeper/main 2".to_owned()], 4));
    assert_eq!(bench.metric("kubelet_sleep_action_terminated_early_total", ""), 1.0);
    let failed = || bench.events().iter().filter(|event| *event == "FailedPreStopHook: PreStopHook failed").count();
    assert_eq!(failed(), 1);
    let failing = pod("failing", with_pre_stop(4, json!({"exec": {"command": ["no"]}})));
    bench.cri.on_exec("no", 1, "", "", Duration::ZERO);
    bench.good_turn(&failing).await;
    bench.kill(&failing, None).await.expect("killed");
    assert_eq!(bench.graces().last().map(String::as_str), Some("failing/main 4"));
    assert_eq!(failed(), 2);
    let late = pod("late", with_pre_stop(4, json!({"exec": {"command": ["late"]}})));
    bench.cri.on_exec("late", 1, "", "", Duration::from_secs(60));
    bench.good_turn(&late).await;
    bench.kill(&late, None).await.expect("killed");
    assert_eq!((bench.graces().last().map(String::as_str), failed()), (Some("late/main 2"), 2), "no event");
}

#[tokio::test(start_paused = true)]
async fn a_shorter_grace_cuts_a_stop_short() {
    // AC-02a-18
    let bench = Fixture::new();
    let web = pod("web", json!({"terminationGracePeriodSeconds": 600, "containers": [{"name": "main"}]}));
    bench.cri.behave("main", [Behaviour::stubborn()]);
    bench.good_turn(&web).await;
    let (sender, receiver) = watch::channel(None);
    let request = bench.kill_request(Some(&web), bench.observe(&web), receiver);
    let (runtime, progress) = (bench.runtime.clone(), request.progress.clone());
    let began = Instant::now();
    let kill = tokio::spawn(async move { runtime.kill_pod(request).await });
    tokio::time::sleep(Duration::from_secs(10)).await;
    let ends_at = || (progress.view().name.into_owned(), progress.view().until.map(|until| until - began));
    assert_eq!(ends_at(), ("StopContainer main".to_owned(), Some(Duration::from_secs(600))));
    sender.send_replace(Some(Grace::from_secs(1)));
    tokio::time::sleep(Duration::from_millis(1)).await;
    assert_eq!(ends_at(), ("StopContainer main".to_owned(), Some(Duration::from_secs(11))));
    kill.await.expect("it does not panic").expect("killed");
    assert_eq!(began.elapsed().as_secs(), 12);
    assert_eq!(bench.graces(), ["web/main 600", "web/main 2"]);
}

#[tokio::test(start_paused = true)]
async fn a_shorter_grace_cuts_a_hook_short_and_a_longer_one_changes_nothing() {
    let bench = Fixture::new();
    let web = pod("web", with_pre_stop(100, json!({"sleep": {"seconds": 90}})));
    bench.good_turn(&web).await;
    let (sender, receiver) = watch::channel(None);
    let request = bench.kill_request(Some(&web), bench.observe(&web), receiver);
    let runtime = bench.runtime.clone();
    let began = Instant::now();
    let kill = tokio::spawn(async move { runtime.kill_pod(request).await });
    tokio::time::sleep(Duration::from_secs(10)).await;
    sender.send_replace(Some(Grace::from_secs(500)));
    tokio::time::sleep(Duration::from_secs(10)).await;
    sender.send_replace(Some(Grace::from_secs(5)));
    kill.await.expect("it does not panic").expect("killed");
    assert_eq!((began.elapsed().as_secs(), bench.graces()), (25, vec!["web/main 2".to_owned()]));
}

#[tokio::test(start_paused = true)]
async fn sidecars_stop_last_and_in_reverse() {
    let bench = Fixture::new();
    let sidecar = |name: &str| json!({"name": name, "restartPolicy": "Always"});
    let all = pod(
        "p",
        json!({"initContainers": [sidecar("s1"), sidecar("s2")], "containers": [{"name": "a"}],
            "terminationGracePeriodSeconds": 30}),
    );
    for _ in 0..3 {
        bench.good_turn(&all).await;
    }
    assert_eq!(bench.cri.running("p", "a").len(), 1);
    let slow = Behaviour { stops_after: Some(Duration::from_secs(3)), ..Behaviour::default() };
    for name in ["a", "s1", "s2"] {
        bench.cri.behave(name, [slow.clone()]);
    }
    bench.kill(&all, None).await.expect("killed");
    assert_eq!(bench.graces(), ["p/a 30", "p/s2 27", "p/s1 24"]);
}

#[tokio::test(start_paused = true)]
async fn a_stop_that_fails_does_not_hold_up_sidecars_or_the_sandbox() {
    let bench = Fixture::new();
    let all =
        pod("p", json!({"initContainers": [{"name": "s", "restartPolicy": "Always"}], "containers": [{"name": "a"}]}));
    bench.good_turn(&all).await;
    bench.good_turn(&all).await;
    bench.cri.fault("stop_container", "p/a", Fault::Error(Code::Unknown, "stuck".to_owned()), None);
    let began = Instant::now();
    let text = bench.kill(&all, None).await.expect_err("one did not stop");
    assert!(text.contains("KillContainerError") && text.contains("stuck"), "{text}");
    assert!(began.elapsed() < Duration::from_secs(1));
    assert_eq!(bench.cri.count("stop_podsandbox"), 1);
}

#[tokio::test(start_paused = true)]
async fn what_is_gone_counts_as_stopped() {
    let bench = Fixture::new();
    let web = simple("web");
    bench.good_turn(&web).await;
    let gone = Fault::Error(Code::NotFound, "gone".to_owned());
    bench.cri.fault("stop_container", "", gone.clone(), None);
    bench.cri.fault("stop_podsandbox", "", gone, None);
    bench.kill(&web, None).await.expect("killed");
}

#[tokio::test(start_paused = true)]
async fn a_pod_known_to_the_runtime_alone_is_stopped_by_its_annotations() {
    let bench = Fixture::new();
    let web = pod("web", json!({"terminationGracePeriodSeconds": 7, "containers": [{"name": "main"}]}));
    bench.good_turn(&web).await;
    let (_sender, receiver) = watch::channel(None);
    let request = bench.kill_request(None, bench.observe(&web), receiver);
    bench.runtime.kill_pod(request).await.expect("killed");
    assert_eq!(bench.graces(), ["web/main 7"]);
    // AC-03a-18: a container that vanished meanwhile is no error.
    let other = simple("other");
    bench.good_turn(&other).await;
    bench.cri.fault("container_status", "", Fault::Error(Code::NotFound, "gone".to_owned()), None);
    let (_sender, receiver) = watch::channel(None);
    bench.runtime.kill_pod(bench.kill_request(None, bench.observe(&other), receiver)).await.expect("killed");
    assert_eq!(bench.graces().last().map(String::as_str), Some("other/main 2"));
}

#[tokio::test(start_paused = true)]
async fn termination_interrupts_a_slow_kill_of_a_pass() {
    let bench = Fixture::new();
    let probe = json!({"exec": {"command": ["x"]}});
    let web = pod(
        "web",
        json!({"terminationGracePeriodSeconds": 600, "containers": [{"name": "main", "livenessProbe": probe}]}),
    );
    bench.cri.behave("main", [Behaviour::stubborn()]);
    bench.good_turn(&web).await;
    bench.world.fail_liveness(&bench.cri.running("web", "main")[0]);
    let stopping = bench.stopping.clone();
    tokio::spawn(async move {
        tokio::time::sleep(Duration::from_secs(20)).await;
        stopping.cancel();
    });
    let began = Instant::now();
    let outcome = bench.turn(&web).await;
    assert_eq!((began.elapsed().as_secs(), outcome.error_text()), (20, None));
    let deleted =
        pod_with("web", json!({"deletionGracePeriodSeconds": 3}), serde_json::to_value(web.spec()).expect("JSON"));
    bench.kill(&Arc::clone(&deleted), None).await.expect("killed");
    assert_eq!(began.elapsed().as_secs(), 23);
    assert!(bench.cri.running("web", "main").is_empty());
}

#[tokio::test(start_paused = true)]
async fn a_failed_post_start_hook_kills_the_container() {
    let bench = Fixture::new();
    let hook = json!({"postStart": {"exec": {"command": ["hello", "x"]}}});
    let web = pod("web", json!({"containers": [{"name": "main", "lifecycle": hook}]}));
    bench.cri.on_exec("hello x", 3, "out", "err", Duration::ZERO);
    let outcome = bench.turn(&web).await;
    let failure = outcome.actions.last().and_then(|a| a.failure.clone()).expect("it failed");
    assert_eq!(failure.reason, "PostStartHookError");
    let text = "Exec lifecycle hook ([hello x]) for Container \"main\" in Pod \"web_default(uid-web)\" failed - \
                error: command 'hello x' exited with 3: err, message: \"outerr\"";
    assert_eq!(failure.message, text);
    assert_eq!(bench.graces(), ["web/main 30"]);
    assert!(bench.events().contains(&"FailedPostStartHook: PostStartHook failed".to_owned()));
}
