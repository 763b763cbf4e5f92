//! Memory leak test: the agent keeps nothing of deleted pods, whatever happened to them.
//!
//! A program of its own, so that no other test uses its heap.

#[allow(unsafe_code, reason = "an allocator that counts can only be written so")]
mod heap;

use std::{sync::Arc, time::Duration};

use berth_testkit::{
    agent::{Agent, Machine, Setup},
    pods::pod_with,
    scripted_cri::{Behaviour, Fault},
};
use berth_types::{Pod, PodUid};
use serde_json::json;
use tonic::Code;

/// Pods per round: as many as the node admits at a time.
const PODS: usize = 100;
/// Rounds until everything that is allocated on first use exists.
const WARM_UP: usize = 2;
/// Measured rounds.
const ROUNDS: usize = 5;
/// Maximum number of additional blocks afterwards: fewer than one per pod of any kind.
const LEFT: usize = PODS * ROUNDS / 10;

/// A pod of one of ten kinds; names repeat, UIDs do not.
fn draw(round: usize, number: usize) -> Arc<Pod> {
    let name = format!("pod-{number}");
    let uid = format!("uid-{round}-{number}");
    let main = json!({"name": "main"});
    let (name, spec) = match number % 10 {
        0 => (name, json!({"containers": [{"name": "crashes"}, main]})),
        1 => (name, json!({"containers": [{"name": "main", "image": "refused:1"}]})),
        2 => (
            name,
            json!({
                "initContainers": [{"name": "once"}, {"name": "side", "restartPolicy": "Always"}],
                "containers": [main],
            }),
        ),
        3 => (name, json!({"restartPolicy": "Never", "containers": [{"name": "once"}]})),
        4 => (name, json!({"containers": [{"name": "main", "resources": {"requests": {"cpu": "100"}}}]})),
        5 => ("unmountable".to_owned(), json!({"containers": [main]})),
        6 => (format!("roofless-{number}"), json!({"containers": [main]})),
        7 => (format!("hangs-{number}"), json!({"containers": [main]})),
        8 => (name, json!({"terminationGracePeriodSeconds": 5, "containers": [{"name": "stubborn"}]})),
        _ => (name, json!({"containers": [{"name": "main", "resources": {"requests": {"cpu": "1m"}}}]})),
    };
    let source = if is_static(number) { "file" } else { "api" };
    let annotations = json!({"kubernetes.io/config.source": source, "kubernetes.io/config.hash": uid});
    pod_with(&name, json!({"uid": uid, "annotations": annotations}), spec)
}

fn is_static(number: usize) -> bool {
    (number / 10).is_multiple_of(2)
}

/// The same pods, those of the last kind with more resources than the node has.
fn grown(pods: &[Arc<Pod>]) -> Vec<Arc<Pod>> {
    let grow = |(number, pod): (usize, &Arc<Pod>)| {
        let mut spec = pod.spec().clone();
        if number % 10 == 9 {
            spec.containers[0].resources = serde_json::from_value(json!({"requests": {"cpu": "200"}})).ok();
        }
        Arc::new(pod.with_spec(spec))
    };
    pods.iter().enumerate().map(grow).collect()
}

async fn hand_in(agent: &Agent, pods: &[Arc<Pod>]) {
    let of = |wanted: bool| {
        let all = pods.iter().enumerate();
        all.filter(move |(number, _)| is_static(*number) == wanted).map(|(_, pod)| pod)
    };
    agent.files(of(true)).await;
    agent.api(of(false)).await;
}

/// Adds, updates, and removes a hundred pods.
async fn live_through(machine: &Machine, agent: &Agent, round: usize) {
    let pods: Vec<Arc<Pod>> = (0..PODS).map(|number| draw(round, number)).collect();
    hand_in(agent, &pods).await;
    tokio::time::sleep(Duration::from_secs(10)).await;
    hand_in(agent, &grown(&pods)).await;
    tokio::time::sleep(Duration::from_secs(20)).await;
    hand_in(agent, &[]).await;
    // Hanging calls reach their deadlines; images are forgotten ten minutes after a failure.
    tokio::time::sleep(Duration::from_secs(900)).await;
    agent.events.clear();
    machine.cri.forget_past();
    agent.mirrors.clear();
    agent.probes.clear();
    tokio::time::sleep(Duration::from_secs(130)).await; // lists and sweeps after that
}

async fn nothing_is_known(machine: &Machine, agent: &Agent) {
    let none: Vec<PodUid> = Vec::new();
    assert_eq!(agent.describe().await.into_iter().map(|view| view.id.uid).collect::<Vec<_>>(), none, "workers");
    assert_eq!(agent.status.snapshot().into_iter().map(|(id, _)| id.uid).collect::<Vec<_>>(), none, "statuses");
    assert!(agent.engine.pods.desired().is_empty(), "desired pods");
    assert!(machine.cri.sandboxes().is_empty() && machine.cri.containers().is_empty(), "objects of the runtime");
    assert!(machine.disk.pods().is_empty() && machine.disk.cgroups().is_empty(), "directories and cgroups");
}

fn series(agent: &Agent) -> usize {
    agent.registry.gather().iter().map(|family| family.get_metric().len()).sum()
}

#[tokio::test(start_paused = true)]
async fn of_pods_that_are_gone_nothing_stays_in_memory() {
    let machine = Machine::with(Setup { reads_logins: true, ..Setup::default() });
    let cri = &machine.cri;
    let crash = Behaviour::exits(1, Duration::from_secs(1));
    cri.behave("crashes", [crash]);
    cri.behave("once", [Behaviour::exits(0, Duration::from_millis(100))]);
    cri.behave("stubborn", [Behaviour::stubborn()]);
    let refused = |text: &str| Fault::Error(Code::Unknown, text.to_owned());
    cri.fault("pull_image", "refused", refused("no such host"), None);
    cri.fault("run_podsandbox", "roofless", refused("no network"), None);
    cri.fault("run_podsandbox", "hangs", Fault::Hang, None);
    machine.disk.refuse_mounts("unmountable");
    let agent = machine.start().await;
    hand_in(&agent, &[]).await;
    for round in 0..WARM_UP {
        live_through(&machine, &agent, round).await;
    }
    let (before, tasks, known) = (heap::allocated_blocks(), agent.tasks.len(), series(&agent));
    for round in WARM_UP..WARM_UP + ROUNDS {
        live_through(&machine, &agent, round).await;
    }
    nothing_is_known(&machine, &agent).await;
    let left = heap::allocated_blocks().saturating_sub(before);
    assert!(left < LEFT, "{left} blocks are left of {} pods", PODS * ROUNDS);
    assert_eq!((agent.tasks.len(), series(&agent)), (tasks, known), "tasks and series");
    agent.stop(Duration::from_secs(1)).await;
}
