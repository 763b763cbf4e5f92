//! Metrics of the CPU, memory, and topology managers after admissions, refusals, and releases.

use super::fixture::{
    Agent, StateDirectory, machine_of, pod, static_cpus, with_option, with_static_memory, with_topology,
};
use crate::{
    devices::alignment::ResourceAlignment,
    placement::PlacementSettings,
    topology::machines::{machine_a, machine_b},
};

const SHARED_POOL: &str = "kubelet_cpu_manager_shared_pool_size_millicores";
const EXCLUSIVE: &str = "kubelet_cpu_manager_exclusive_cpu_allocation_count";
const PER_NODE: &str = "kubelet_cpu_manager_allocation_per_numa";
const CPU_REQUESTS: &str = "kubelet_cpu_manager_pinning_requests_total";
const CPU_ERRORS: &str = "kubelet_cpu_manager_pinning_errors_total";
const MEMORY_REQUESTS: &str = "kubelet_memory_manager_pinning_requests_total";
const MEMORY_ERRORS: &str = "kubelet_memory_manager_pinning_errors_total";
const ADMISSIONS: &str = "kubelet_topology_manager_admission_requests_total";
const ADMISSION_ERRORS: &str = "kubelet_topology_manager_admission_errors_total";
const ALIGNED: &str = "kubelet_container_aligned_compute_resources_count";
const NOT_ALIGNED: &str = "kubelet_container_aligned_compute_resources_failure_count";

/// Checks that these series have these values.
fn check(agent: &Agent, expected: &[(&str, &[&str], Option<f64>)]) {
    for (name, labels, value) in expected {
        assert_eq!(agent.metric(name, labels), *value, "{name} {labels:?}");
    }
}

#[tokio::test]
async fn cpus_are_counted_by_numa_node_and_return_to_zero() {
    let files = StateDirectory::new();
    let settings = with_topology(static_cpus("2"), "single-numa-node", "container");
    let agent = files.start(&settings, machine_of(machine_b())).await;
    let aligned = &["container", "numa_node"][..];
    check(&agent, &[(SHARED_POOL, &[], Some(10000.0)), (EXCLUSIVE, &[], Some(0.0)), (PER_NODE, &["0"], None)]);
    check(&agent, &[(ALIGNED, aligned, Some(0.0)), (NOT_ALIGNED, aligned, Some(0.0))]);

    let (small, large) = (pod("small", &["c=4"]), pod("large", &["c=7"]));
    agent.admit(&small).expect("node 0 has four CPUs");
    agent.admit(&large).expect_err("no node has seven CPUs");
    check(
        &agent,
        &[
            (SHARED_POOL, &[], Some(6000.0)),
            (EXCLUSIVE, &[], Some(4.0)),
            (PER_NODE, &["0"], Some(4.0)),
            (PER_NODE, &["1"], None),
            (CPU_REQUESTS, &[], Some(1.0)),
            (CPU_ERRORS, &[], Some(0.0)),
            (ADMISSIONS, &[], Some(2.0)),
            (ADMISSION_ERRORS, &[], Some(1.0)),
            (ALIGNED, aligned, Some(1.0)),
            (NOT_ALIGNED, aligned, Some(1.0)),
        ],
    );

    // A pod that has its CPUs counts again as a request, not as an allocation.
    agent.admit(&small).expect("it has its CPUs");
    check(&agent, &[(CPU_REQUESTS, &[], Some(2.0)), (EXCLUSIVE, &[], Some(4.0))]);
    agent.manager.release(small.uid());
    check(&agent, &[(SHARED_POOL, &[], Some(10000.0)), (EXCLUSIVE, &[], Some(0.0)), (PER_NODE, &["0"], Some(0.0))]);
    agent.stop().await;

    // The gauges of a restored state.
    let agent = files.start(&settings, machine_of(machine_b())).await;
    agent.admit(&pod("other", &["c=6"])).expect("node 1 is free");
    agent.stop().await;
    let agent = files.start(&settings, machine_of(machine_b())).await;
    check(&agent, &[(SHARED_POOL, &[], Some(4000.0)), (EXCLUSIVE, &[], Some(6.0)), (PER_NODE, &["1"], Some(6.0))]);
    agent.stop().await;
}

#[tokio::test]
async fn alignment_of_a_pod_is_counted_once() {
    let files = StateDirectory::new();
    let settings = with_topology(static_cpus("2"), "single-numa-node", "pod");
    let agent = files.start(&settings, machine_of(machine_b())).await;
    let (of_pod, of_container) = (&["pod", "numa_node"][..], &["container", "numa_node"][..]);
    agent.admit(&pod("small", &["a=1", "b=2"])).expect("a node has both");
    check(&agent, &[(ALIGNED, of_pod, Some(1.0)), (NOT_ALIGNED, of_pod, Some(0.0)), (ALIGNED, of_container, None)]);
    agent.admit(&pod("large", &["a=4", "b=4"])).expect_err("no node has eight CPUs");
    check(&agent, &[(ALIGNED, of_pod, Some(1.0)), (NOT_ALIGNED, of_pod, Some(1.0)), (NOT_ALIGNED, of_container, None)]);
    agent.stop().await;
}

/// The reference counts a common cache whether it is preferred or not.
#[tokio::test]
async fn caches_are_counted_without_an_option() {
    let files = StateDirectory::new();
    let agent = files.start(&static_cpus("2"), machine_of(machine_b())).await;
    let (core, cache) = (&["container", "physical_cpu"][..], &["container", "uncore_cache"][..]);
    check(&agent, &[(ALIGNED, core, Some(0.0)), (NOT_ALIGNED, core, Some(0.0)), (ALIGNED, cache, Some(0.0))]);
    let within = pod("within", &["c=2"]);
    agent.admit(&within).expect("CPUs are free");
    check(&agent, &[(ALIGNED, core, Some(0.0)), (ALIGNED, cache, Some(1.0))]);
    // The CPUs that are left are on both sockets.
    agent.admit(&pod("across", &["c=8"])).expect("eight CPUs are left");
    agent.admit(&within).expect("it has its CPUs");
    check(&agent, &[(ALIGNED, cache, Some(1.0))]);
    agent.stop().await;
}

#[tokio::test]
async fn whole_cores_and_caches_are_counted_with_their_options() {
    let files = StateDirectory::new();
    let settings = with_option(static_cpus("1"), "full-pcpus-only");
    let settings = with_option(settings, "prefer-align-cpus-by-uncorecache");
    let agent = files.start(&settings, machine_of(machine_a())).await;
    let (core, cache) = (&["container", "physical_cpu"][..], &["container", "uncore_cache"][..]);
    check(&agent, &[(ALIGNED, core, Some(0.0)), (NOT_ALIGNED, core, Some(0.0)), (ALIGNED, cache, Some(0.0))]);
    check(&agent, &[(ALIGNED, &["container", "numa_node"], None)]);
    agent.admit(&pod("half", &["c=1"])).expect_err("half a core");
    check(&agent, &[(CPU_REQUESTS, &[], Some(1.0)), (CPU_ERRORS, &[], Some(1.0)), (NOT_ALIGNED, core, Some(1.0))]);
    let whole = pod("whole", &["c=2"]);
    agent.admit(&whole).expect("a core is free");
    check(&agent, &[(CPU_REQUESTS, &[], Some(2.0)), (ALIGNED, core, Some(1.0)), (ALIGNED, cache, Some(1.0))]);
    // Containers of the shared pool are not counted.
    agent.admit(&pod("shared", &["c=500m"])).expect("the shared pool has no limit");
    check(&agent, &[(CPU_REQUESTS, &[], Some(2.0)), (ALIGNED, core, Some(1.0)), (ALIGNED, cache, Some(1.0))]);
    agent.stop().await;
}

#[tokio::test]
async fn memory_requests_and_their_errors_are_counted() {
    let files = StateDirectory::new();
    let agent = files.start(&with_static_memory(PlacementSettings::default()), machine_of(machine_a())).await;
    let (small, large) = (pod("small", &["a=1/1Gi", "b=1/1Gi"]), pod("large", &["c=1/6Gi"]));
    agent.admit(&small).expect("7 GiB are free");
    check(&agent, &[(MEMORY_REQUESTS, &[], Some(2.0)), (MEMORY_ERRORS, &[], Some(0.0))]);
    agent.admit(&large).expect_err("5 GiB are free");
    check(&agent, &[(MEMORY_REQUESTS, &[], Some(3.0)), (MEMORY_ERRORS, &[], Some(1.0))]);
    check(&agent, &[(CPU_REQUESTS, &[], Some(0.0)), (SHARED_POOL, &[], Some(0.0))]);
    agent.stop().await;
}
