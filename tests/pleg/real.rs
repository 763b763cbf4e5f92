//! PLEG over a real containerd: its own events, since 1.6 has none on the CRI. Needs root.

use std::{
    sync::Arc,
    time::{Duration, Instant},
};

use berth::{
    cri::{self as room, CriConfig, RuntimeService},
    engine::ports::{Observation, PodObserver, SystemClock},
    metrics::{PlegMetrics, Registry},
    pleg::{self, ContainerdEvents, CriEvents, EventHints, PlegConfig, PlegDeps},
    pod::observed::ContainerState,
    proto::cri,
};
use tokio_util::sync::CancellationToken;

use crate::{
    house::{NoMessages, ended, labels, until, who},
    kit::containerd,
};

fn sandbox(name: &str) -> cri::PodSandboxConfig {
    let options = cri::NamespaceOption { network: cri::NamespaceMode::Node as i32, ..Default::default() };
    let security = cri::LinuxSandboxSecurityContext { namespace_options: Some(options), ..Default::default() };
    cri::PodSandboxConfig {
        metadata: Some(cri::PodSandboxMetadata {
            name: name.into(),
            namespace: "default".into(),
            uid: format!("uid-{name}"),
            attempt: 0,
        }),
        labels: labels(name),
        linux: Some(cri::LinuxPodSandboxConfig { security_context: Some(security), ..Default::default() }),
        ..Default::default()
    }
}

fn container(name: &str, command: &[&str]) -> cri::ContainerConfig {
    cri::ContainerConfig {
        metadata: Some(cri::ContainerMetadata { name: "main".into(), attempt: 0 }),
        image: Some(cri::ImageSpec { image: "docker.io/library/busybox:1".into(), ..Default::default() }),
        command: command.iter().map(ToString::to_string).collect(),
        labels: labels(name),
        linux: Some(cri::LinuxContainerConfig {
            security_context: Some(cri::LinuxContainerSecurityContext {
                namespace_options: Some(cri::NamespaceOption {
                    network: cri::NamespaceMode::Node as i32,
                    ..Default::default()
                }),
                ..Default::default()
            }),
            ..Default::default()
        }),
        ..Default::default()
    }
}

fn finished(seen: &Observation) -> Option<jiff::Timestamp> {
    seen.pod.newest("main").filter(|c| c.state == ContainerState::Exited)?.finished_at
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn an_exit_is_observed_by_containerds_own_events() {
    let Some(runtime) = containerd::start_or_skip("an_exit_is_observed_by_containerds_own_events") else { return };
    let config = CriConfig {
        endpoint: runtime.endpoint(),
        image_endpoint: String::new(),
        request_timeout: Duration::from_secs(30),
        list_streaming: false,
    };
    let registry = Registry::new();
    let connection = room::connect(&config, &registry).expect("a socket");
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
    // Lists are switched off as far as can be: what is seen comes from events.
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
        let pod = cri.run_pod_sandbox(sandbox(&name), "").await.unwrap_or_else(|e| panic!("{e}\n{}", runtime.log()));
        let command = ["/bin/sh", "-c", "trap 'exit 3' TERM; sleep 1000 & wait"];
        let id = cri.create_container(&pod, container(&name, &command), sandbox(&name)).await.expect("a container");
        cri.start_container(&id).await.expect("started");
        let seen = view.fresh(pleg.acted(&who(&name).uid)).await;
        assert_eq!((seen.error.as_deref(), seen.pod.running().count()), (None, 1), "{seen:?}");
        tokio::time::sleep(Duration::from_millis(700)).await;

        let (ok, out) = runtime.ctr(&["tasks", "kill", "-s", "SIGTERM", &id]);
        assert!(ok, "{out}");
        let asked = Instant::now();
        let seen = until(&mut view, "the exit", Duration::from_secs(5), ended).await;
        assert_eq!(seen.pod.newest("main").map(|c| c.exit_code), Some(3));
        let behind = jiff::Timestamp::now().duration_since(finished(&seen).expect("a time"));
        latencies.push((behind.as_millis(), asked.elapsed().as_millis()));
    }
    println!("exit to observation, ms (by the runtime's time, by ours): {latencies:?}");
    latencies.sort_unstable();
    // containerd itself takes most of it: it clears up before its CRI part says "exited".
    assert!(latencies[2].0 <= 500, "the median of {latencies:?} is too long");
    stop.cancel();
    task.await.expect("ended");
}
