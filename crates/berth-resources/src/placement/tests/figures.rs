//! Figures of the placement manager against the bars of issue 37. Debug builds have bars of their own.

use std::time::{Duration, Instant};

use super::fixture::{Agent, StateDirectory, machine_of, pod, static_cpus, with_topology};
use crate::{devices::alignment::ResourceAlignment, topology::machines::machine};
use berth_types::Pod;

/// Pods of a full node.
const PODS: usize = 110;
/// Runs of a measurement; the shortest counts, which other processes disturb least.
const RUNS: usize = 5;

/// Measures admissions of these pods together; they are released after each run.
fn shortest(agent: &Agent, pods: &[Pod]) -> Duration {
    let run = |_| {
        let began = Instant::now();
        for pod in pods {
            agent.admit(pod).expect("CPUs are free");
        }
        let took = began.elapsed();
        assert_eq!(agent.manager.snapshot().exclusive.len(), pods.len());
        for pod in pods {
            agent.manager.release(pod.uid());
        }
        took
    };
    (0..RUNS).map(run).min().expect("runs")
}

fn check(what: &str, took: Duration, release: Duration, debug: Duration) {
    let bar = if cfg!(debug_assertions) { debug } else { release };
    println!("{what}: {took:?}, bar {bar:?}");
    assert!(took <= bar, "{what} took {took:?}, bar {bar:?}");
}

#[tokio::test]
async fn a_full_node_is_admitted_quickly() {
    let files = StateDirectory::new();
    let settings = with_topology(static_cpus("2"), "restricted", "container");
    let agent = files.start(&settings, machine_of(machine(2, 1, 32, 2))).await;
    let pods: Vec<Pod> = (0..PODS).map(|number| pod(&format!("pod{number}"), &["c=1"])).collect();
    let took = shortest(&agent, &pods);
    check("admission of 110 pods", took, Duration::from_millis(100), Duration::from_secs(1));
    agent.stop().await;
}

#[tokio::test]
async fn one_of_512_cpus_is_allocated_quickly() {
    let files = StateDirectory::new();
    let agent = files.start(&static_cpus("2"), machine_of(machine(4, 2, 32, 2))).await;
    let took = shortest(&agent, &[pod("p", &["c=1"])]);
    check("allocation of 1 of 512 CPUs", took, Duration::from_millis(1), Duration::from_millis(50));
    agent.stop().await;
}
