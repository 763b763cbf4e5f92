//! Container garbage collection: dead containers, sandboxes, and log directories.

use std::{
    collections::HashSet,
    sync::{
        Arc, Mutex,
        atomic::{AtomicBool, Ordering},
    },
    time::Duration,
};

use berth::runtime::GcMode;
use berth_ports::{PodRuntime, PodStateProvider};
use berth_types::PodUid;
use tokio::time::Instant;
use tokio_util::sync::CancellationToken;
use tonic::Code;

use crate::runtime::fixture::Fixture;
use berth_testkit::{
    pods::simple,
    scripted_cri::{Behaviour, Fault},
};

#[derive(Default)]
struct FakePodStates {
    unready: AtomicBool,
    gone: Mutex<HashSet<PodUid>>,
    terminated: Mutex<HashSet<PodUid>>,
}

impl PodStateProvider for FakePodStates {
    fn sources_ready(&self) -> bool {
        !self.unready.load(Ordering::Relaxed)
    }
    fn should_pod_content_be_removed(&self, pod: &PodUid) -> bool {
        self.gone.lock().expect("unpoisoned").contains(pod)
    }
    fn is_terminated(&self, pod: &PodUid) -> bool {
        self.terminated.lock().expect("unpoisoned").contains(pod)
    }
}

async fn crash(bench: &Fixture, times: u64) {
    let web = simple("web");
    bench.cri.behave("main", [Behaviour::exits(1, Duration::from_secs(700))]);
    for _ in 0..times {
        bench.good_turn(&web).await;
        bench.cri.until("it ends", Duration::from_secs(701), |c| c.running("web", "main").is_empty()).await;
    }
}

#[tokio::test(start_paused = true)]
async fn the_newest_dead_container_of_a_living_pod_stays() {
    let bench = Fixture::new();
    crash(&bench, 3).await;
    let pod_states: Arc<dyn PodStateProvider> = Arc::new(FakePodStates::default());
    bench.runtime.collect_garbage(&pod_states, GcMode::Normal).await.expect("collected");
    assert_eq!((bench.cri.listed().len(), bench.cri.sandboxes().len()), (1, 1));
    let logs = bench.world.removed_logs.lock().expect("unpoisoned").clone();
    assert_eq!(logs[0].path.to_str(), Some("/var/log/pods/web/main/1.log"));
}

#[tokio::test(start_paused = true)]
async fn of_a_pod_that_is_gone_nothing_stays() {
    let bench = Fixture::new();
    crash(&bench, 2).await;
    bench.kill(&simple("web"), None).await.expect("killed");
    let pod_states = Arc::new(FakePodStates::default());
    let as_port: Arc<dyn PodStateProvider> = pod_states.clone();
    bench.runtime.collect_garbage(&as_port, GcMode::Normal).await.expect("collected");
    assert_eq!(bench.cri.sandboxes().len(), 1);
    pod_states.terminated.lock().expect("unpoisoned").insert("uid-web".into());
    bench.runtime.collect_garbage(&as_port, GcMode::Normal).await.expect("collected");
    assert_eq!(bench.cri.sandboxes().len(), 1, "terminated pods keep theirs until space is short");
    bench.runtime.collect_garbage(&as_port, GcMode::EvictTerminated).await.expect("collected");
    assert!(bench.cri.sandboxes().is_empty() && bench.cri.listed().is_empty());
}

#[tokio::test(start_paused = true)]
async fn a_pod_that_has_ended_goes_at_once_with_its_log_directory() {
    let bench = Fixture::new();
    let web = simple("web");
    crash(&bench, 2).await;
    bench.good_turn(&web).await;
    bench.runtime.remove_pod(&bench.observe(&web)).await.expect_err("it runs");
    bench.kill(&web, None).await.expect("killed");
    let directories = || bench.world.removed_log_directories.lock().expect("unpoisoned").clone();
    bench.cri.fault("remove_podsandbox", "", Fault::Error(Code::Unknown, "busy".to_owned()), Some(1));
    bench.runtime.remove_pod(&bench.observe(&web)).await.expect_err("busy");
    assert!(directories().is_empty(), "not before the sandbox has gone");
    bench.runtime.remove_pod(&bench.observe(&web)).await.expect("removed");
    assert!(bench.cri.sandboxes().is_empty() && bench.cri.listed().is_empty());
    assert_eq!(directories(), [web.id().clone()]);
    bench.runtime.remove_pod(&bench.observe(&web)).await.expect("nothing in the runtime, but perhaps logs");
    assert_eq!(directories().len(), 2);
}

/// Leftovers of a killed agent are collected once all pods are known; what does not depend on that, after a minute at
/// the latest.
#[tokio::test(start_paused = true)]
async fn the_first_round_waits_for_the_sources_but_no_longer() {
    for (ready_after, gone_after) in [(Some(5), 6), (None, 60)] {
        let bench = Fixture::new();
        crash(&bench, 2).await;
        let pod_states = Arc::new(FakePodStates::default());
        pod_states.unready.store(true, Ordering::Relaxed);
        let (stop, begun) = (CancellationToken::new(), Instant::now());
        let gc = tokio::spawn(bench.runtime.clone().run_gc(pod_states.clone(), stop.clone()));
        if let Some(seconds) = ready_after {
            tokio::time::sleep(Duration::from_secs(seconds)).await;
            assert_eq!(bench.cri.listed().len(), 2);
            pod_states.unready.store(false, Ordering::Relaxed);
        }
        bench.cri.until("the older one is removed", Duration::from_secs(100), |c| c.listed().len() == 1).await;
        assert_eq!(begun.elapsed().as_secs(), gone_after);
        stop.cancel();
        gc.await.expect("it ends");
    }
}

#[tokio::test(start_paused = true)]
async fn failures_are_reported_once_and_collection_continues() {
    let bench = Fixture::new();
    crash(&bench, 2).await;
    bench.cri.fault("remove_container", "", Fault::Error(Code::Unknown, "busy".to_owned()), Some(2));
    let stop = CancellationToken::new();
    let gc = tokio::spawn(bench.runtime.clone().run_gc(Arc::new(FakePodStates::default()), stop.clone()));
    bench.cri.until("removed", Duration::from_secs(200), |c| c.listed().len() == 1).await;
    stop.cancel();
    gc.await.expect("it ends");
    let failures = bench.events().into_iter().filter(|e| e.starts_with("ContainerGCFailed: ")).count();
    assert_eq!(failures, 1);
}

#[tokio::test(start_paused = true)]
async fn dead_instances_go_soon_after_the_next_death() {
    let bench = Fixture::new();
    crash(&bench, 3).await;
    let stop = CancellationToken::new();
    let work = tokio::spawn(bench.runtime.clone().run(stop.clone()));
    let seen = bench.observe(&simple("web"));
    let died = seen.newest("main").expect("an instance").id.clone();
    bench.runtime.prune(&seen, Some(("main", &died)), false);
    bench.cri.until("pruned", Duration::from_secs(1), |c| c.listed().len() == 1).await;
    assert_eq!(bench.cri.listed()[0].id, died.as_str());
    bench.runtime.prune(&bench.observe(&simple("web")), None, true);
    bench.cri.until("all gone", Duration::from_secs(1), |c| c.listed().is_empty()).await;
    stop.cancel();
    work.await.expect("it ends");
}
