//! PLEG over real runtimes and their event streams: containerd and the embedded runtime.
//!
//! containerd's own events, since 1.6 has none on the CRI, and the embedded runtime's on the CRI. Needs root.

use std::{
    sync::Arc,
    time::{Duration, Instant},
};

use berth::pleg::{self, ContainerdEvents, CriEvents, EventHints, PlegConfig, PlegDeps};
use berth_cri::RuntimeService;
use berth_metrics::{PlegMetrics, Registry};
use berth_ports::{LatestObservation, PodObserver, SystemClock};
use berth_proto::cri;
use berth_types::observation::ContainerState;
use tokio_util::sync::CancellationToken;

use crate::pleg::fixture::{NoMessages, ended, labels, until, who};
use berth_testkit::{cri_calls, runtimes::TestRuntime};

berth_testkit::on_real_runtimes! {
    an_exit_is_observed_by_the_runtimes_events
}

fn finished(seen: &LatestObservation) -> Option<jiff::Timestamp> {
    seen.pod.newest("main").filter(|c| c.state == ContainerState::Exited)?.finished_at
}

async fn an_exit_is_observed_by_the_runtimes_events(on: TestRuntime) {
    let Some(runtime) = on.runtime().await else { return };
    let registry = Registry::new();
    let connection = runtime.connection(&registry);
    let cri: Arc<dyn RuntimeService> = connection.runtime.clone();
    let hints: Vec<Arc<dyn EventHints>> =
        vec![Arc::new(CriEvents::new(cri.clone())), Arc::new(ContainerdEvents::new(connection.runtime_channel()))];
    let deps = PlegDeps {
        cri: cri.clone(),
        hints,
        messages: Arc::new(NoMessages),
        clock: Arc::new(SystemClock),
        metrics: PlegMetrics::new(&registry),
        died: None,
    };
    // Lists are practically disabled: observations come from events.
    let config = PlegConfig {
        relist_period: Duration::from_secs(600),
        open_patience: Duration::from_millis(200),
        ..PlegConfig::default()
    };
    let stop = CancellationToken::new();
    let (pleg, task) = pleg::start(deps, config, stop.clone());

    let mut latencies = Vec::new();
    for at in 0..5 {
        let name = format!("web-{at}");
        let mut view = pleg.view(&who(&name));
        let config = cri::PodSandboxConfig { labels: labels(&name), ..runtime.pod(&name) };
        let pod = cri.run_pod_sandbox(config.clone(), "").await.expect("a sandbox");
        let script = "trap 'exit 3' TERM; sleep 1000 & wait";
        let container = cri_calls::container("main", script, cri::NamespaceMode::Container);
        let container = cri::ContainerConfig { labels: labels(&name), ..container };
        let id = cri.create_container(&pod, container, config).await.expect("a container");
        cri.start_container(&id).await.expect("started");
        let seen = view.fresh(pleg.action_completed(&who(&name).uid)).await;
        assert_eq!((seen.error.as_deref(), seen.pod.running().count()), (None, 1), "{seen:?}");
        tokio::time::sleep(Duration::from_millis(700)).await;

        let kill = ["/bin/kill", "-TERM", "1"].map(str::to_owned);
        let _ = cri.exec_sync(&id, &kill, Duration::from_secs(10), usize::MAX).await; // it kills its own container
        let asked = Instant::now();
        let seen = until(&mut view, "the exit", Duration::from_secs(30), ended).await;
        assert_eq!(seen.pod.newest("main").map(|c| c.exit_code), Some(3));
        let behind = jiff::Timestamp::now().duration_since(finished(&seen).expect("a time"));
        latencies.push((behind.as_millis(), asked.elapsed().as_millis()));
    }
    println!("exit to observation, ms (by the runtime's time, by ours): {latencies:?}");
    latencies.sort_unstable();
    // containerd itself takes most of it: it cleans up before its CRI part reports the exit.
    assert!(latencies[0].0 <= 500, "even the shortest of {latencies:?} is too long");
    let streams = if matches!(on, TestRuntime::Embedded(_)) { 1.0 } else { 0.0 };
    let connections =
        registry.gather().into_iter().find(|f| f.name() == "kubelet_evented_pleg_connection_success_count");
    let connections = connections.and_then(|family| Some(family.get_metric().first()?.get_counter().get_value()));
    assert!(connections.unwrap_or_default() >= streams, "the embedded runtime has events on the CRI: {connections:?}");
    stop.cancel();
    task.await.expect("ended");
}
