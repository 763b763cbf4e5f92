//! Table tests of resource values. Pure.

use berth_types::memory_qos::MemoryReservationPolicy;
use proptest::prelude::*;
use serde_json::{Value, json};

use super::*;

const GIB: u64 = 1 << 30;

fn machine() -> ResourceInputs {
    ResourceInputs {
        cpu_cfs_quota: true,
        cpu_period_us: 100_000,
        memory_bytes: 8_000_000_000,
        hugepage_sizes: vec![2 << 20, GIB],
        cgroup_v2: false,
        single_process_oom_kill: true,
        swap: NodeSwap::default(),
        memory_qos: None,
    }
}

fn pod(spec: Value) -> Pod {
    let object = json!({"metadata": {"name": "p", "namespace": "n", "uid": "u"}, "spec": spec});
    Pod::new(serde_json::from_value(object).expect("a pod")).expect("complete")
}

fn single(resources: Value) -> Pod {
    pod(json!({"containers": [{"name": "c", "resources": resources}]}))
}

fn linux(pod: &Pod, machine: &ResourceInputs) -> cri::LinuxContainerResources {
    of_container(pod, &pod.containers()[0], Cpus::Shared, machine)
}

#[test]
fn cpu_and_memory_of_a_container() {
    for (resources, shares, quota, memory) in [
        (json!({}), 2, 0, 0),
        // AC-03a-14
        (json!({"limits": {"cpu": "2"}}), 2048, 200_000, 0),
        // AC-03a-15
        (json!({"requests": {"cpu": "0"}, "limits": {"cpu": "2"}}), 2, 200_000, 0),
        (json!({"requests": {"cpu": "250m"}, "limits": {"memory": "1Gi"}}), 256, 0, 1 << 30),
        (json!({"limits": {"cpu": "5m"}}), 5, 1000, 0),
    ] {
        let got = linux(&single(resources.clone()), &machine());
        assert_eq!((got.cpu_shares, got.cpu_quota, got.memory_limit_in_bytes), (shares, quota, memory), "{resources}");
        assert_eq!(got.cpu_period, 100_000);
    }
}

#[test]
fn limits_fall_back_to_the_pod_level() {
    let pod = pod(json!({"resources": {"limits": {"cpu": "1", "memory": "1Gi"}},
        "containers": [{"name": "a"}, {"name": "b", "resources": {"limits": {"memory": "1Mi"}}}]}));
    let got: Vec<_> = pod.containers().iter().map(|c| of_container(&pod, c, Cpus::Shared, &machine())).collect();
    assert_eq!((got[0].cpu_quota, got[0].memory_limit_in_bytes), (100_000, 1 << 30));
    assert_eq!((got[1].cpu_quota, got[1].memory_limit_in_bytes), (100_000, 1 << 20));
}

#[test]
fn quota_is_off_for_own_cpus_and_by_configuration() {
    let pod = single(json!({"limits": {"cpu": "1"}}));
    let own = of_container(&pod, &pod.containers()[0], Cpus::Exclusive, &machine());
    assert_eq!((own.cpu_quota, own.cpu_period), (-1, 100_000));
    let off = linux(&pod, &ResourceInputs { cpu_cfs_quota: false, ..machine() });
    assert_eq!((off.cpu_quota, off.cpu_period), (0, 0));
}

#[test]
fn pod_totals_and_overhead_are_separate() {
    // AC-06a-13
    let pod = pod(json!({"overhead": {"cpu": "100m", "memory": "120Mi"},
        "containers": [{"name": "c", "resources": {"limits": {"cpu": "1", "memory": "1Gi"}, "requests": {"cpu": "1"}}}]}));
    let totals = of_pod(&pod, &machine());
    assert_eq!((totals.cpu_shares, totals.cpu_quota, totals.memory_limit_in_bytes), (1024, 100_000, 1 << 30));
    let overhead = of_overhead(&pod, &machine());
    assert_eq!((overhead.cpu_shares, overhead.cpu_quota, overhead.memory_limit_in_bytes), (102, 10_000, 120 << 20));
    assert_eq!(of_overhead(&single(json!({})), &machine()), cri::LinuxContainerResources::default());
}

#[test]
fn processes_are_killed_together_on_the_unified_hierarchy() {
    // AC-06a-22
    for (v2, single_kill, expected) in [(true, false, Some("1")), (true, true, None), (false, false, None)] {
        let machine = ResourceInputs { cgroup_v2: v2, single_process_oom_kill: single_kill, ..machine() };
        let got = linux(&single(json!({})), &machine);
        assert_eq!(got.unified.get("memory.oom.group").map(String::as_str), expected, "{v2} {single_kill}");
    }
}

#[test]
fn every_huge_page_size_of_the_node_has_a_limit() {
    let limits = |pod: &Pod| -> Vec<(String, u64)> {
        linux(pod, &machine()).hugepage_limits.into_iter().map(|l| (l.page_size, l.limit)).collect()
    };
    assert_eq!(limits(&single(json!({}))), [("2MB".to_owned(), 0), ("1GB".to_owned(), 0)]);
    let own = json!({"limits": {"hugepages-2Mi": "4Mi", "hugepages-64Ki": "64Ki"}});
    assert_eq!(limits(&single(own.clone())), [("2MB".to_owned(), 4 << 20), ("1GB".to_owned(), 0)]);
    let both = pod(json!({"resources": {"limits": {"hugepages-2Mi": "8Mi", "hugepages-1Gi": "1Gi"}},
        "containers": [{"name": "c", "resources": own}]}));
    assert_eq!(limits(&both), [("2MB".to_owned(), 4 << 20), ("1GB".to_owned(), GIB)]);
}

#[test]
fn oom_scores_equal_the_table_of_the_specification() {
    let memory = |bytes: u64| json!({"requests": {"memory": bytes.to_string()}});
    let container = |name: &str, resources: Value| json!({"name": name, "resources": resources});
    let sidecar = |bytes: u64| json!({"name": "s", "restartPolicy": "Always", "resources": memory(bytes)});
    let giga = 1_000_000_000;
    for (capacity, spec, expected) in [
        (8 * giga, json!({"containers": [container("c", json!({"requests": {"cpu": "1"}}))]}), vec![999]),
        // AC-06a-23
        (8 * giga, json!({"containers": [container("c", memory(4 * giga))]}), vec![500]),
        // AC-03a-16
        (8 * giga, json!({"containers": [container("c", memory(8 * giga - 1))]}), vec![3]),
        (8 * giga, json!({"containers": [container("c", memory(16 * giga))]}), vec![3]),
        (8 * giga, json!({"containers": [container("c", memory(giga))]}), vec![875]),
        (
            8 * giga,
            json!({"containers": [container("c", memory(giga))], "initContainers": [sidecar(1000)]}),
            vec![875, 875],
        ),
        (
            8 * giga,
            json!({"containers": [container("c", memory(giga))], "initContainers": [sidecar(4 * giga)]}),
            vec![875, 500],
        ),
        (
            4 * giga,
            json!({"resources": memory(2 * giga), "containers": [container("a", json!({})), container("b", json!({}))]}),
            vec![750, 750],
        ),
        (
            4 * giga,
            json!({"resources": memory(2 * giga), "containers": [container("a", memory(giga)), container("b", json!({}))]}),
            vec![625, 875],
        ),
        (
            4 * giga,
            json!({"resources": memory(2 * giga), "initContainers": [sidecar(200_000_000)],
                   "containers": [container("a", memory(giga)), container("b", memory(500_000_000))]}),
            vec![725, 850, 850],
        ),
        // AC-06a-5
        (8 * giga, json!({"containers": [container("c", json!({}))]}), vec![1000]),
        (0, json!({"containers": [container("c", memory(giga))]}), vec![999]),
    ] {
        let pod = pod(spec.clone());
        let all = pod.containers().iter().chain(pod.init_containers());
        let got: Vec<i64> = all.map(|c| oom_score_adj(&pod, c, capacity)).collect();
        assert_eq!(got, expected, "{spec}");
    }
}

#[test]
fn node_critical_and_guaranteed_pods_die_last() {
    let guaranteed = json!({"requests": {"cpu": "1", "memory": "1Gi"}, "limits": {"cpu": "1", "memory": "1Gi"}});
    assert_eq!(linux(&single(guaranteed), &machine()).oom_score_adj, -997);
    let critical = |class: &str| {
        let pod = pod(json!({"priority": 2_000_001_000, "priorityClassName": class, "containers": [{"name": "c"}]}));
        linux(&pod, &machine()).oom_score_adj
    };
    assert_eq!(critical("system-node-critical"), -997);
    assert_eq!(critical("system-cluster-critical"), 1000);
}

#[test]
fn swap_is_shared_in_proportion_to_memory() {
    let machine = |v2, behavior| ResourceInputs {
        cgroup_v2: v2,
        memory_bytes: 40 * GIB,
        swap: NodeSwap { controllable: true, behavior, bytes: 5 * GIB },
        ..machine()
    };
    let limited = machine(true, SwapBehavior::LimitedSwap);
    let swap = |pod: &Pod, machine: &ResourceInputs| linux(pod, machine).unified.remove("memory.swap.max");
    let burstable = single(json!({"requests": {"memory": "1Gi"}, "limits": {"memory": "1Mi"}}));
    // AC-06a-19
    assert_eq!(swap(&burstable, &limited).as_deref(), Some("134217728"));
    assert_eq!(swap(&burstable, &machine(true, SwapBehavior::NoSwap)).as_deref(), Some("0"));
    for resources in [
        json!({}),
        json!({"requests": {"cpu": "1"}}),
        json!({"requests": {"memory": "1Gi"}, "limits": {"memory": "1Gi"}}),
        json!({"requests": {"memory": "41Gi"}}),
        json!({"requests": {"cpu": "1", "memory": "1Gi"}, "limits": {"cpu": "1", "memory": "1Gi"}}),
    ] {
        assert_eq!(swap(&single(resources.clone()), &limited).as_deref(), Some("0"), "{resources}");
    }
    let critical = pod(json!({"priority": 2_000_000_000, "containers": [
        {"name": "c", "resources": {"requests": {"memory": "1Gi"}}}]}));
    assert_eq!(swap(&critical, &limited).as_deref(), Some("0"));
    let old = machine(false, SwapBehavior::NoSwap);
    let got = linux(&burstable, &old);
    assert_eq!((got.memory_swap_limit_in_bytes, got.unified.len()), (1 << 20, 0));
    let none = ResourceInputs { swap: NodeSwap::default(), ..limited };
    assert_eq!(swap(&burstable, &none), None);
}

#[test]
fn memory_qos_depends_on_the_containers_own_request_and_limit() {
    let qos = MemoryQos {
        policy: MemoryReservationPolicy::TieredReservation,
        throttling_factor: 0.9,
        allocatable_bytes: 32 * GIB,
        page_bytes: 4096,
    };
    let v2 = ResourceInputs { cgroup_v2: true, single_process_oom_kill: true, memory_qos: Some(qos), ..machine() };
    let files =
        |linux: cri::LinuxContainerResources| -> BTreeMap<String, String> { linux.unified.into_iter().collect() };
    let map = |pairs: &[(&str, &str)]| -> BTreeMap<String, String> {
        pairs.iter().map(|(file, value)| ((*file).to_owned(), (*value).to_owned())).collect()
    };
    let pod = pod(json!({"resources": {"limits": {"memory": "1Gi"}}, "containers": [
        {"name": "a", "resources": {"requests": {"memory": "128Mi"}, "limits": {"memory": "256Mi"}}},
        {"name": "b", "resources": {"requests": {"memory": "128Mi"}}}, {"name": "c"}]}));
    let of = |index: usize| files(of_container(&pod, &pod.containers()[index], Cpus::Shared, &v2));
    // AC-06a-25
    assert_eq!(of(0), map(&[("memory.low", "134217728"), ("memory.high", "255012864")]));
    assert_eq!(of(1), map(&[("memory.low", "134217728"), ("memory.high", "30937186304")]));
    assert_eq!(of(2), map(&[("memory.min", "0"), ("memory.low", "0")]));
    let equal = json!({"cpu": "1", "memory": "1Gi"});
    let guaranteed = single(json!({"requests": equal, "limits": equal}));
    assert_eq!(files(linux(&guaranteed, &v2)), map(&[("memory.min", "1073741824")]));
    // AC-06a-30
    let running = |machine: &ResourceInputs| {
        files(of_running_container(&guaranteed, &guaranteed.containers()[0], Cpus::Shared, machine))
    };
    assert_eq!(running(&v2), map(&[("memory.min", "1073741824"), ("memory.high", "max")]));
    for off in [ResourceInputs { memory_qos: None, ..v2.clone() }, ResourceInputs { cgroup_v2: false, ..v2.clone() }] {
        assert_eq!((files(linux(&guaranteed, &off)), running(&off)), (map(&[]), map(&[])));
    }
}

proptest! {
    #[test]
    fn a_larger_request_never_dies_earlier(a in 0_u64..1 << 40, more in 0_u64..1 << 40, capacity in 1_u64..1 << 45) {
        let score = |bytes: u64| {
            let pod = single(json!({"requests": {"cpu": "1", "memory": bytes.to_string()}}));
            oom_score_adj(&pod, &pod.containers()[0], capacity)
        };
        prop_assert!(score(a + more) <= score(a));
        prop_assert!((3..=999).contains(&score(a)));
    }

    #[test]
    fn swap_never_exceeds_the_nodes(request in 1_u64..1 << 45, memory in 1_u64..1 << 45, swap in 0_u64..1 << 45) {
        let pod = single(json!({"requests": {"memory": request.to_string()}}));
        let machine = ResourceInputs {
            cgroup_v2: true, memory_bytes: memory,
            swap: NodeSwap { controllable: true, behavior: SwapBehavior::LimitedSwap, bytes: swap },
            ..machine()
        };
        prop_assert!(swap_share(&pod, &pod.containers()[0], &machine) <= swap);
    }
}
