//! Idempotent creation of sandboxes and containers when responses are late or lost.

use std::time::Duration;

use berth_ports::PodRuntime;
use serde_json::json;
use tokio::time::Instant;
use tonic::Code;

use crate::runtime::fixture::Fixture;
use berth_testkit::{
    pods::{pod, simple},
    scripted_cri::Fault,
};

#[tokio::test(start_paused = true)]
async fn a_sandbox_that_comes_late_is_adopted_and_none_is_made_twice() {
    let bench = Fixture::new();
    let web = simple("web");
    bench.cri.fault("run_podsandbox", "", Fault::Delay(Duration::from_secs(300)), Some(1));
    let began = Instant::now();
    let blind = bench.request(&web);
    let outcome = bench.runtime.sync_pod(blind.clone()).await;
    assert_eq!(began.elapsed().as_secs(), 240);
    assert!(outcome.error_text().is_some());
    // The outcome is still unknown: nothing new is created.
    let outcome = bench.runtime.sync_pod(blind.clone()).await;
    assert!(outcome.error_text().is_some_and(|t| t.contains("may still be running")), "{outcome:?}");
    tokio::time::sleep(Duration::from_secs(70)).await;
    let outcome = bench.runtime.sync_pod(blind).await;
    assert_eq!(outcome.error_text(), None);
    assert_eq!((bench.cri.count("run_podsandbox"), bench.cri.sandboxes().len()), (1, 1));
    assert_eq!(bench.cri.running("web", "main").len(), 1);
}

#[tokio::test(start_paused = true)]
async fn a_create_whose_answer_was_lost_is_adopted_at_once() {
    let bench = Fixture::new();
    let web = simple("web");
    let lost = || Fault::ErrorAfter(Code::Unavailable, "connection reset".to_owned());
    bench.cri.fault("run_podsandbox", "", lost(), Some(1));
    bench.cri.fault("create_container", "", lost(), Some(1));
    bench.good_turn(&web).await;
    assert_eq!((bench.cri.count("run_podsandbox"), bench.cri.count("create_container")), (1, 1));
    assert_eq!(bench.cri.running("web", "main").len(), 1);
}

#[tokio::test(start_paused = true)]
async fn an_attempt_of_a_former_life_that_holds_the_name_is_adopted() {
    let bench = Fixture::new();
    let web = simple("web");
    let blind = bench.request(&web);
    bench.good_turn(&web).await;
    // A new agent that has not observed the sandbox yet.
    let outcome = bench.runtime.sync_pod(blind).await;
    assert_eq!(bench.cri.sandboxes().len(), 1, "{outcome:?}");
    assert!(bench.cri.targets("list_podsandbox").contains(&"uid-web".to_owned()));
}

/// A previous agent was killed during RunPodSandbox; the runtime then rolls the sandbox back.
#[tokio::test(start_paused = true)]
async fn a_name_that_is_reserved_for_a_moment_is_asked_for_again_soon() {
    let bench = Fixture::new();
    let web = simple("web");
    for (op, target) in [("run_podsandbox", "sandbox"), ("create_container", "container")] {
        let text = format!("failed to reserve {target} name \"web\": name \"web\" is reserved for \"abc\"");
        bench.cri.fault(op, "", Fault::Error(Code::Unknown, text), Some(3));
        for wait in [500, 1000, 2000] {
            let outcome = bench.turn(&web).await;
            assert!(outcome.error_text().is_some_and(|text| text.contains("is reserved for")), "{outcome:?}");
            assert_eq!(outcome.retry_at, Some(Instant::now() + Duration::from_millis(wait)), "{op}");
            tokio::time::sleep(Duration::from_millis(wait)).await;
        }
        if op == "run_podsandbox" {
            bench.cri.fault("create_container", "", Fault::Error(Code::Unknown, "no".to_owned()), Some(1));
            bench.turn(&web).await;
        }
    }
    bench.good_turn(&web).await;
    assert_eq!(bench.cri.running("web", "main").len(), 1);
}

#[tokio::test(start_paused = true)]
async fn after_the_doubt_a_create_is_tried_again() {
    let bench = Fixture::new();
    let web = simple("web");
    bench.cri.fault("create_container", "", Fault::Hang, Some(1));
    let outcome = bench.turn(&web).await;
    assert!(outcome.error_text().is_some_and(|t| t.contains("CreateContainerError")), "{outcome:?}");
    assert!(bench.turn(&web).await.error_text().is_some());
    assert_eq!(bench.cri.count("create_container"), 1);
    tokio::time::sleep(Duration::from_secs(121)).await;
    bench.good_turn(&web).await;
    assert_eq!(bench.cri.running("web", "main").len(), 1);
}

#[tokio::test(start_paused = true)]
async fn a_created_container_is_started_not_doubled() {
    let bench = Fixture::new();
    let web = simple("web");
    bench.cri.fault("start_container", "", Fault::Error(Code::Unavailable, "gone away".to_owned()), Some(1));
    assert!(bench.turn(&web).await.error_text().is_some());
    bench.good_turn(&web).await;
    assert_eq!((bench.cri.count("create_container"), bench.cri.running("web", "main").len()), (1, 1));
    assert!(bench.cri.violations().is_empty());
}

#[tokio::test(start_paused = true)]
async fn a_created_container_that_never_starts_is_made_again() {
    let bench = Fixture::new();
    let web = simple("web");
    bench.cri.fault("start_container", "", Fault::Error(Code::Unknown, "no".to_owned()), Some(2));
    assert!(bench.turn(&web).await.error_text().is_some());
    assert!(bench.turn(&web).await.error_text().is_some());
    bench.good_turn(&web).await;
    assert_eq!((bench.cri.count("create_container"), bench.cri.listed().len()), (2, 1));
    assert!(bench.cri.violations().is_empty());
}

#[tokio::test(start_paused = true)]
async fn a_created_container_of_another_definition_is_removed() {
    let bench = Fixture::new();
    bench.cri.fault("start_container", "", Fault::Error(Code::Unavailable, "gone away".to_owned()), Some(1));
    assert!(bench.turn(&simple("web")).await.error_text().is_some());
    bench.cri.add_image("docker.io/library/busybox:2", 1);
    let newer = pod("web", json!({"containers": [{"name": "main", "image": "busybox:2"}]}));
    bench.good_turn(&newer).await;
    assert_eq!(bench.cri.listed().len(), 1);
    assert!(bench.cri.violations().is_empty());
}

#[tokio::test(start_paused = true)]
async fn termination_does_not_wait_for_a_slow_create_and_leaves_nothing_behind() {
    let bench = Fixture::new();
    let web = simple("web");
    bench.cri.fault("run_podsandbox", "", Fault::Delay(Duration::from_secs(100)), Some(1));
    let stopping = bench.stopping.clone();
    tokio::spawn(async move {
        tokio::time::sleep(Duration::from_secs(5)).await;
        stopping.cancel();
    });
    let began = Instant::now();
    let outcome = bench.turn(&web).await;
    assert_eq!((began.elapsed().as_secs(), outcome.error_text()), (5, None));
    bench.kill(&web, Some(10)).await.expect("killed");
    assert_eq!(began.elapsed().as_secs(), 15);
    let stopped = |c: &berth_testkit::scripted_cri::ScriptedCri| c.count("stop_podsandbox") == 1;
    bench.cri.until("the late sandbox is stopped", Duration::from_secs(100), stopped).await;
    assert_eq!(bench.cri.sandboxes().len(), 1);
}

#[tokio::test(start_paused = true)]
async fn whatever_fails_no_container_is_doubled_and_the_pod_comes_up() {
    use rand::{Rng, SeedableRng, rngs::SmallRng};
    for seed in 0..40 {
        let bench = Fixture::new();
        let mut chance = SmallRng::seed_from_u64(seed);
        for op in ["run_podsandbox", "create_container", "start_container", "podsandbox_status", "stop_podsandbox"] {
            for _ in 0..chance.random_range(0..4) {
                let fault = match chance.random_range(0..5) {
                    0 => Fault::Error(Code::Unavailable, "gone away".to_owned()),
                    1 => Fault::ErrorAfter(Code::Unavailable, "gone away".to_owned()),
                    2 => Fault::ErrorAfter(Code::Unknown, "half done".to_owned()),
                    3 => Fault::Delay(Duration::from_secs(chance.random_range(1..400))),
                    _ => Fault::Hang,
                };
                bench.cri.fault(op, "", fault, Some(1));
            }
        }
        let all = pod(
            "p",
            json!({"initContainers": [{"name": "s", "restartPolicy": "Always"}],
            "containers": [{"name": "a"}, {"name": "b"}]}),
        );
        for _ in 0..60 {
            let _outcome = bench.turn(&all).await;
            tokio::time::sleep(Duration::from_secs(10)).await;
        }
        for name in ["s", "a", "b"] {
            assert_eq!(bench.cri.running("p", name).len(), 1, "seed {seed}: {name}");
        }
        assert!(bench.cri.violations().is_empty(), "seed {seed}: {:?}", bench.cri.violations());
    }
}
