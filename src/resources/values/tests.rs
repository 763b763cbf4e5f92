//! Table tests of cgroup values. Pure.

use proptest::prelude::*;
use serde_json::{Value, json};

use super::*;

const MIB: u64 = 1 << 20;
const GIB: u64 = 1 << 30;

fn rules() -> PodRules {
    PodRules {
        cpu_cfs_quota: true,
        cpu_period_us: 100_000,
        pids_limit: -1,
        hugepage_sizes: vec![],
        driver: CgroupDriver::Cgroupfs,
        memory_qos: None,
    }
}

fn pod(spec: Value) -> Pod {
    let object = json!({"metadata": {"name": "p", "namespace": "n", "uid": "u"}, "spec": spec});
    Pod::new(serde_json::from_value(object).expect("a pod")).expect("complete")
}

fn container(name: &str, resources: Value) -> Value {
    json!({"name": name, "resources": resources})
}

fn files(spec: Value, rules: &PodRules, version: CgroupVersion) -> Vec<(String, String)> {
    writes(&of_pod(&pod(spec), rules), version).into_iter().map(|w| (w.file, w.value)).collect()
}

fn check_v2(spec: Value, rules: &PodRules, expected: &[(&str, &str)]) {
    let got = files(spec.clone(), rules, CgroupVersion::V2);
    let got: Vec<(&str, &str)> = got.iter().map(|(file, value)| (file.as_str(), value.as_str())).collect();
    assert_eq!(got, expected, "{spec}");
}

#[test]
fn a_pods_files_follow_its_class() {
    let full = json!({"requests": {"cpu": "1", "memory": "1Gi"}, "limits": {"cpu": "1", "memory": "1Gi"}});
    let half = json!({"limits": {"cpu": "500m", "memory": "512Mi"}, "requests": {"cpu": "250m"}});
    // AC-06a-2
    check_v2(
        json!({"containers": [container("a", full)]}),
        &rules(),
        &[("memory.max", "1073741824"), ("cpu.weight", "39"), ("cpu.max", "100000 100000")],
    );
    // AC-06a-3: a value that is not written stays `max`.
    let partly = json!({"containers": [container("a", half.clone()), container("b", json!({}))]});
    check_v2(partly.clone(), &rules(), &[("cpu.weight", "10")]);
    // AC-06a-4
    let mut level = partly;
    level["resources"] = json!({"limits": {"cpu": "1", "memory": "1Gi"}});
    check_v2(level, &rules(), &[("memory.max", "1073741824"), ("cpu.weight", "10"), ("cpu.max", "100000 100000")]);
    // AC-06a-5
    check_v2(json!({"containers": [container("a", json!({}))]}), &rules(), &[("cpu.weight", "1")]);
    // AC-06a-8
    let off = PodRules { cpu_cfs_quota: false, ..rules() };
    check_v2(
        json!({"containers": [container("a", half)]}),
        &off,
        &[("memory.max", "536870912"), ("cpu.weight", "10"), ("cpu.max", "max 100000")],
    );
    // AC-06a-6
    check_v2(
        json!({"containers": [container("a", json!({"limits": {"cpu": "5m"}, "requests": {"cpu": "5m"}}))]}),
        &rules(),
        &[("cpu.weight", "1"), ("cpu.max", "1000 100000")],
    );
}

#[test]
fn the_old_hierarchies_have_other_files() {
    let full = json!({"requests": {"cpu": "1", "memory": "1Gi"}, "limits": {"cpu": "1", "memory": "1Gi"}});
    let limited = PodRules { pids_limit: 1024, hugepage_sizes: vec![2 * MIB], ..rules() };
    let got = files(json!({"containers": [container("a", full)]}), &limited, CgroupVersion::V1);
    let expected = [
        // AC-06a-9
        ("pids.max", "1024"),
        ("memory.limit_in_bytes", "1073741824"),
        ("cpu.shares", "1024"),
        ("cpu.cfs_period_us", "100000"),
        ("cpu.cfs_quota_us", "100000"),
        ("hugetlb.2MB.limit_in_bytes", "0"),
        ("hugetlb.2MB.rsvd.limit_in_bytes", "0"),
    ];
    assert_eq!(got, expected.map(|(file, value)| (file.to_owned(), value.to_owned())));
}

#[test]
fn overhead_counts_in_the_pods_group() {
    // AC-06a-13
    let full = json!({"requests": {"cpu": "1", "memory": "1Gi"}, "limits": {"cpu": "1", "memory": "1Gi"}});
    let spec = json!({"overhead": {"cpu": "100m", "memory": "120Mi"}, "containers": [container("a", full)]});
    let memory = (GIB + 120 * MIB).to_string();
    check_v2(spec, &rules(), &[("memory.max", &memory), ("cpu.weight", "43"), ("cpu.max", "110000 100000")]);
}

#[test]
fn huge_pages_come_from_requests() {
    // AC-06a-10
    let rules = PodRules { hugepage_sizes: vec![2 * MIB, GIB], ..rules() };
    let spec = json!({"containers": [container("a", json!({"requests": {"hugepages-2Mi": "4Mi"}}))]});
    check_v2(
        spec,
        &rules,
        &[
            ("cpu.weight", "1"),
            ("hugetlb.2MB.max", "4194304"),
            ("hugetlb.2MB.rsvd.max", "4194304"),
            ("hugetlb.1GB.max", "0"),
            ("hugetlb.1GB.rsvd.max", "0"),
        ],
    );
}

#[test]
fn every_container_must_be_limited_but_init_after_a_limited_sidecar() {
    let limits = json!({"limits": {"cpu": "1"}, "requests": {"cpu": "1"}});
    let mut sidecar = container("s", limits.clone());
    sidecar["restartPolicy"] = "Always".into();
    let plain = container("i", json!({}));
    let app = container("a", limits);
    for (init, expected) in
        [(json!([]), true), (json!([plain]), false), (json!([sidecar, plain]), true), (json!([plain, sidecar]), false)]
    {
        let spec = json!({"initContainers": init, "containers": [app]});
        assert_eq!(of_pod(&pod(spec.clone()), &rules()).cpu_quota.is_some(), expected, "{spec}");
    }
}

#[test]
fn systemd_rounds_quotas_up() {
    for (quota, period, expected) in [
        // AC-06a-7
        (41_700, 100_000, 42_000),
        (42_000, 100_000, 42_000),
        (1000, 100_000, 1000),
        (-1, 100_000, -1),
        (0, 100_000, 0),
        (5, 0, 5),
    ] {
        assert_eq!(rounded_quota(quota, period), expected, "{quota} {period}");
    }
    let rules = PodRules { driver: CgroupDriver::Systemd, ..rules() };
    let spec = json!({"containers": [container("a", json!({"limits": {"cpu": "417m"}, "requests": {"cpu": "417m"}}))]});
    assert_eq!(of_pod(&pod(spec), &rules).cpu_quota, Some(42_000));
}

#[test]
fn requests_are_protected_in_the_pod_cgroup() {
    // AC-06a-26
    let rules = PodRules { memory_qos: Some(MemoryReservationPolicy::TieredReservation), ..rules() };
    let request = |memory: &str| json!({"requests": {"memory": memory}});
    let equal = json!({"cpu": "1", "memory": "100Mi"});
    for (spec, min, low) in [
        (json!({"containers": [container("a", request("100Mi")), container("b", json!({}))]}), None, Some(100 * MIB)),
        (json!({"containers": [container("a", json!({"requests": equal, "limits": equal}))]}), Some(100 * MIB), None),
        (json!({"containers": [container("a", json!({}))]}), None, None),
        (json!({"containers": [container("a", json!({}))], "overhead": {"memory": "1Mi"}}), None, Some(MIB)),
    ] {
        let limits = of_pod(&pod(spec.clone()), &rules);
        assert_eq!((limits.memory_min, limits.memory_low), (min, low), "{spec}");
        let none = PodRules { memory_qos: Some(MemoryReservationPolicy::None), ..rules.clone() };
        let limits = of_pod(&pod(spec), &none);
        assert_eq!((limits.memory_min, limits.memory_low), (None, None));
    }
    let limits = CgroupLimits { memory_min: Some(0), memory_low: Some(5), ..CgroupLimits::default() };
    let files = |version| -> Vec<(String, String)> {
        writes(&limits, version).into_iter().map(|write| (write.file, write.value)).collect()
    };
    let expected = [("memory.min", "0"), ("memory.low", "5")].map(|(file, value)| (file.to_owned(), value.to_owned()));
    assert_eq!(files(CgroupVersion::V2), expected);
    assert_eq!(files(CgroupVersion::V1), []);
}

#[test]
fn a_share_of_the_node_limits_what_it_names() {
    let capacity = Amounts {
        cpu_milli: Some(4000),
        memory_bytes: Some(8 << 30),
        pids: Some(32_768),
        hugepages: BTreeMap::from([(2 * MIB, 64 * MIB)]),
    };
    let reserved =
        Amounts { cpu_milli: Some(500), memory_bytes: Some(1 << 30), pids: Some(1000), ..Amounts::default() };
    let got: Vec<_> = writes(&of_amounts(&capacity.less(&reserved), &[2 * MIB, GIB]), CgroupVersion::V2)
        .into_iter()
        .filter(|w| !w.optional)
        .map(|w| (w.file, w.value))
        .collect();
    let expected = [
        // AC-06a-9
        ("pids.max", "31768"),
        ("memory.max", "7516192768"),
        ("cpu.weight", "137"),
        ("hugetlb.2MB.max", "67108864"),
        ("hugetlb.1GB.max", "0"),
    ];
    assert_eq!(got, expected.map(|(file, value)| (file.to_owned(), value.to_owned())));
    let more = Amounts { memory_bytes: Some(1 << 40), ..Amounts::default() };
    assert_eq!(capacity.less(&more).memory_bytes, Some(0));
}

#[test]
fn special_values_have_special_texts() {
    let limits = CgroupLimits {
        pids: Some(0),
        memory: Some(-1),
        cpu_quota: Some(-1),
        cpuset_cpus: Some("0-3".into()),
        ..CgroupLimits::default()
    };
    let got: Vec<_> = writes(&limits, CgroupVersion::V2).into_iter().map(|w| (w.file, w.value)).collect();
    let expected = [("pids.max", "1"), ("memory.max", "max"), ("cpu.max", "max"), ("cpuset.cpus", "0-3")];
    assert_eq!(got, expected.map(|(file, value)| (file.to_owned(), value.to_owned())));
    assert_eq!(
        writes(&CgroupLimits { memory: Some(0), cpu_quota: Some(0), ..CgroupLimits::default() }, CgroupVersion::V2),
        []
    );
    assert_eq!(writes(&CgroupLimits { pids: Some(-1), ..CgroupLimits::default() }, CgroupVersion::V1)[0].value, "max");
}

proptest! {
    #[test]
    fn rounding_for_systemd_never_lowers(milli in 1_i64..256_000, period in 1000_u64..=1_000_000) {
        let quota = cpu::quota(milli, period);
        let rounded = rounded_quota(quota, period);
        let slack = i64::try_from(period / 100).expect("small") + 1;
        prop_assert!(rounded + 1 >= quota && rounded <= quota + slack, "{quota} {rounded}");
    }

    #[test]
    fn a_larger_pod_never_gets_less(cpu in 1_i64..100_000, memory in 1_i64..1 << 40, more in 0_i64..1 << 20) {
        let of = |cpu: i64, memory: i64| {
            let amounts = json!({"cpu": format!("{cpu}m"), "memory": memory.to_string()});
            let resources = json!({"requests": amounts, "limits": amounts});
            of_pod(&pod(json!({"containers": [container("a", resources)]})), &rules())
        };
        let (small, large) = (of(cpu, memory), of(cpu + more, memory + more));
        prop_assert!(small.cpu_shares <= large.cpu_shares);
        prop_assert!(small.cpu_quota <= large.cpu_quota);
        prop_assert!(small.memory <= large.memory);
    }

    #[test]
    fn what_is_left_is_never_negative(own: Option<i64>, other: Option<i64>) {
        let amounts = |n: Option<i64>| Amounts { memory_bytes: n.map(|n| n.saturating_abs()), ..Amounts::default() };
        prop_assert!(amounts(own).less(&amounts(other)).memory_bytes.is_none_or(|n| n >= 0));
    }
}
