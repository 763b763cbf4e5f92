//! Graceful node shutdown in the engine, and agents that start during it (spec 05 §7).

use std::{sync::Arc, time::Duration};

use berth::engine::{
    kill_and_wait,
    lifecycle::{StatusOverride, StopCause},
};
use berth_types::Pod;

use berth_testkit::{
    agent::{Agent, Machine},
    pods::simple,
};

const SOON: Duration = Duration::from_secs(2);

/// Terminates a pod, as the drain and eviction managers do.
async fn end(agent: &Agent, pod: &Arc<Pod>, cause: StopCause, reason: &str) {
    let status = StatusOverride {
        reason: reason.to_owned(),
        message: "It goes.".to_owned(),
        disruption: None,
        keeps_success: true,
        is_unready: false,
        status_reserve: Duration::ZERO,
    };
    kill_and_wait(&agent.engine.commands, pod, cause, Some(5), Some(status)).await.expect("it ends");
    agent.engine.pods.finished(pod.uid()).await;
}

#[tokio::test(start_paused = true)]
async fn who_goes_with_the_node_leaves_logs_and_dead_containers_and_who_is_evicted_nothing() {
    // Spec 05 §7.4, 02a §9.7
    let machine = Machine::new();
    let agent = machine.start().await;
    let (web, victim) = (simple("web"), simple("victim"));
    agent.only_static([&web, &victim]).await;
    for (pod, cause, reason) in
        [(&victim, StopCause::Evicted, "Evicted"), (&web, StopCause::NodeShutdown, "Terminated")]
    {
        agent.until_ready(pod.uid(), SOON).await;
        end(&agent, pod, cause, reason).await;
        let status = agent.status.status(pod.uid()).expect("it is kept");
        assert_eq!((status.phase.as_deref(), status.reason.as_deref()), (Some("Failed"), Some(reason)));
    }
    tokio::time::sleep(Duration::from_secs(200)).await; // garbage collectors have run
    let uid = |container: berth_proto::cri::Container| container.labels["io.kubernetes.pod.uid"].clone();
    assert_eq!(machine.cri.listed().into_iter().map(uid).collect::<Vec<_>>(), ["uid-web"]);
    assert!(machine.cri.running("web", "main").is_empty() && machine.cri.sandboxes().len() == 1);
    assert_eq!(machine.disk.pods().into_iter().collect::<Vec<_>>(), [web.uid().clone()]);
    // The node boots again.
    agent.kill();
    let agent = machine.start().await;
    agent.only_static([&web]).await;
    let again = agent.until_ready(web.uid(), SOON).await;
    assert_eq!(
        again.container_statuses.as_ref().expect("one")[0].restart_count,
        1,
        "it can be told what it was before"
    );
    end(&agent, &web, StopCause::NodeShutdown, "Terminated").await;
    agent.files([]).await;
    let nothing =
        |cri: &berth_testkit::scripted_cri::ScriptedCri| cri.sandboxes().is_empty() && cri.containers().is_empty();
    machine.cri.until("nothing is left of what nobody wants", SOON, nothing).await;
    agent.stop(SOON).await;
}

#[tokio::test(start_paused = true)]
async fn what_runs_when_an_agent_starts_while_its_node_goes_down_can_go_in_its_turn() {
    // Spec 05 §7.3
    let mut machine = Machine::new();
    let agent = machine.start().await;
    let (web, late) = (simple("web"), simple("late"));
    agent.only_static([&web]).await;
    agent.until_ready(web.uid(), SOON).await;
    tokio::time::sleep(SOON).await; // its state is written to disk
    agent.kill();
    machine.setup.node.shutting_down = true;
    let agent = machine.start().await;
    assert!(!agent.engine.pods.is_active(web.uid()));
    let sources_ready = agent.engine.pods.sources_ready();
    agent.only_static([&web, &late]).await;
    tokio::time::timeout(SOON, sources_ready).await.expect("all have reported");
    assert!(agent.engine.pods.is_active(web.uid()), "whoever waited for that finds it");
    assert!(!agent.engine.pods.is_active(late.uid()));
    assert_eq!(agent.status.status(late.uid()).and_then(|s| s.reason.clone()).as_deref(), Some("NodeShutdown"));
    end(&agent, &web, StopCause::NodeShutdown, "Terminated").await;
    assert!(machine.cri.running("web", "main").is_empty());
    agent.stop(SOON).await;
}
