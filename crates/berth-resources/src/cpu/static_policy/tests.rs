//! Tests of the static policy: which containers get CPUs, allocation, reuse, options, restart. Pure.

use berth_types::quantity::Amount;
use serde_json::{Value, json};

use super::*;
use crate::{
    cpu::{
        checkpoint::{InitialContainers, decode, encode},
        fixtures::{Containers, Entries, cpus, pod, pod_of, state},
    },
    topology::machines::{machine, machine_a, machine_b},
};

/// A policy with its state after the start on a new node.
struct Fixture {
    policy: StaticPolicy,
    state: CpuState,
    reusable: ReusableCpus,
}

impl Fixture {
    fn new(topology: CpuTopology, reservation: &str, explicit: &str, options: StaticOptions) -> Self {
        let reservation = Amount::parse(reservation).expect(reservation);
        let reserved = ReservedCpus::choose(&topology, reservation, &cpus(explicit), options).expect("reserved CPUs");
        let policy = StaticPolicy { topology, reserved, options };
        let mut state = CpuState::default();
        assert_eq!(policy.initialize(&mut state), Ok(true));
        Self { policy, state, reusable: ReusableCpus::default() }
    }

    /// Allocates all containers of a pod, in order.
    fn admit(&mut self, pod: &Pod, affinity: Option<NumaMask>) -> Result<Vec<CpuAllocation>, CpuAllocationError> {
        let containers = pod.init_containers().iter().chain(pod.containers());
        let allocate = |container| self.policy.allocate(&mut self.state, &mut self.reusable, pod, container, affinity);
        containers.map(allocate).collect()
    }

    /// Writes the checkpoint, and starts again with it.
    fn restart(&mut self) {
        let content = encode("static", &self.state);
        let mut state = decode(&content, "static", &InitialContainers::new()).expect("a checkpoint");
        assert_eq!(self.policy.initialize(&mut state), Ok(false));
        assert_eq!(state, self.state);
        self.reusable = ReusableCpus::default();
    }
}

fn nodes(nodes: &[u32]) -> Option<NumaMask> {
    Some(nodes.iter().copied().collect())
}

/// Name, machine, reservation, options, init and regular containers, affinity.
type Case<'a> = (&'a str, CpuTopology, &'a str, StaticOptions, [Containers<'a>; 2], Option<NumaMask>);

#[test]
fn containers_get_cpus_in_order() {
    let (a, b) = (machine_a, machine_b);
    let none = StaticOptions::default();
    let strict = StaticOptions { strict_reservation: true, ..none };
    let cases: [(Case<'_>, Entries<'_>, &str); 11] = [
        (("AC-06b-11", a(), "1", none, [&[], &["c=1"]], None), &[("p/c", "4")], "0-3,5-7"),
        (("AC-06b-13", a(), "1", none, [&[], &["c=1500m"]], None), &[], "0-7"),
        (("AC-06b-27", a(), "1", none, [&["i=2"], &["c=4"]], None), &[("p/i", "1,5"), ("p/c", "1-2,5-6")], "0,3-4,7"),
        (("strict", a(), "1", strict, [&[], &["c=1"]], None), &[("p/c", "4")], "1-3,5-7"),
        (
            ("sidecars keep their CPUs", a(), "1", none, [&["s*=2"], &["c=2"]], None),
            &[("p/s", "1,5"), ("p/c", "2,6")],
            "0,3-4,7",
        ),
        (
            ("a sidecar takes reusable CPUs", a(), "1", none, [&["i=2", "s*=2"], &["c=2"]], None),
            &[("p/i", "1,5"), ("p/s", "1,5"), ("p/c", "2,6")],
            "0,3-4,7",
        ),
        (
            ("containers share reusable CPUs", a(), "1", none, [&["i=4"], &["c=2", "d=2"]], None),
            &[("p/i", "1-2,5-6"), ("p/c", "1,5"), ("p/d", "2,6")],
            "0,3-4,7",
        ),
        (
            ("init containers reuse each other's CPUs", a(), "1", none, [&["i=2", "j=2"], &["c=2"]], None),
            &[("p/i", "1,5"), ("p/j", "1,5"), ("p/c", "1,5")],
            "0,2-4,6-7",
        ),
        (("affinity", b(), "2", none, [&[], &["c=2"]], nodes(&[1])), &[("p/c", "1,7")], "0,2-6,8-11"),
        (
            ("other nodes after the affinity", b(), "2", none, [&[], &["c=8"]], nodes(&[1])),
            &[("p/c", "1-3,5,7-9,11")],
            "0,4,6,10",
        ),
        (
            ("an affinity without CPUs", b(), "2", none, [&[], &["c=6"]], nodes(&[5])),
            &[("p/c", "1,3,5,7,9,11")],
            "0,2,4,6,8,10",
        ),
    ];
    for ((case, topology, reservation, options, [init, regular], affinity), entries, default) in cases {
        let mut fixture = Fixture::new(topology, reservation, "", options);
        let pod = pod("p", init, regular);
        let allocations = fixture.admit(&pod, affinity).expect(case);
        assert_eq!(fixture.state, state(default, entries), "{case}");
        // AC-06b-18: a restart changes nothing.
        fixture.restart();
        let again = fixture.admit(&pod, affinity).expect(case);
        assert_eq!(fixture.state, state(default, entries), "{case}");
        for (first, second) in allocations.into_iter().zip(again) {
            match first {
                CpuAllocation::Exclusive { cpus, .. } => assert_eq!(second, CpuAllocation::Unchanged(cpus), "{case}"),
                other => assert_eq!(second, other, "{case}"),
            }
        }
    }
}

#[test]
fn refused_containers_change_nothing() {
    let none = StaticOptions::default();
    let full = StaticOptions { full_cores_only: true, ..none };
    let smt = Some("SMTAlignmentError");
    for (case, topology, explicit, options, cpu, affinity, reason, expected) in [
        (
            "AC-06b-12",
            machine_a(),
            "0-1",
            full,
            1,
            None,
            smt,
            "SMT Alignment Error: requested 1 cpus not multiple cpus per core = 2",
        ),
        (
            "siblings of reserved CPUs",
            machine_b(),
            "1,6",
            full,
            10,
            None,
            smt,
            "SMT Alignment Error: not enough free physical CPUs: available physical CPUs = 8, requested CPUs = 10, \
             CPUs per core = 2",
        ),
        (
            "too many",
            machine_a(),
            "0,4",
            none,
            7,
            None,
            None,
            "not enough cpus available to satisfy request: requested=7, available=6",
        ),
        (
            "too many after those of the affinity",
            machine_b(),
            "0,6",
            none,
            12,
            nodes(&[0]),
            None,
            "not enough cpus available to satisfy request: requested=8, available=6",
        ),
    ] {
        let mut fixture = Fixture::new(topology, "2", explicit, options);
        let before = fixture.state.clone();
        let error = fixture.admit(&pod("p", &[], &[&format!("c={cpu}")]), affinity).expect_err(case);
        assert_eq!((error.to_string().as_str(), error.reason()), (expected, reason), "{case}");
        assert_eq!(fixture.state, before, "{case}");
        assert_eq!(fixture.reusable, ReusableCpus::default(), "{case}");
    }
}

#[test]
fn a_container_with_cpus_is_admitted_again_on_a_full_node() {
    let options = StaticOptions { full_cores_only: true, ..StaticOptions::default() };
    let mut fixture = Fixture::new(machine_a(), "2", "", options);
    let pod = pod("p", &[], &["c=6"]);
    fixture.admit(&pod, None).expect("all free CPUs");
    fixture.restart();
    assert_eq!(fixture.admit(&pod, None), Ok(vec![CpuAllocation::Unchanged(cpus("1-3,5-7"))]));
}

#[test]
fn a_strict_reservation_survives_a_restart() {
    // AC-06b-15
    let options = StaticOptions { strict_reservation: true, ..StaticOptions::default() };
    let mut fixture = Fixture::new(machine_a(), "1", "", options);
    let pod = pod_of("p", json!({ "containers": [{ "name": "c" }] }));
    for _ in 0..2 {
        assert_eq!(fixture.admit(&pod, None), Ok(vec![CpuAllocation::SharedPool]));
        assert_eq!(fixture.state.default, cpus("1-7"));
        fixture.restart();
    }
}

#[test]
fn a_new_node_writes_the_file_of_the_reference() {
    // AC-06-6
    let fixture = Fixture::new(machine(1, 1, 16, 2), "1", "", StaticOptions::default());
    let content = String::from_utf8(encode("static", &fixture.state)).expect("UTF-8");
    assert_eq!(content, r#"{"policyName":"static","defaultCpuSet":"0-31","checksum":3540042759}"#);
}

#[test]
fn reusable_cpus_are_those_of_each_pod() {
    let mut fixture = Fixture::new(machine_a(), "1", "", StaticOptions::default());
    let (p, q) = (pod("p", &["i=2"], &[]), pod("q", &["i=2"], &[]));
    fixture.admit(&p, None).expect("enough CPUs");
    assert_eq!(fixture.reusable.of(p.uid()), cpus("1,5"));
    assert_eq!(fixture.reusable.of(q.uid()), cpus(""));
    fixture.admit(&q, None).expect("enough CPUs");
    assert_eq!(fixture.reusable.of(p.uid()), cpus("1,5"));
    assert_eq!(fixture.reusable.of(q.uid()), cpus("2,6"));
    // CPUs that returned to the shared pool and went to another pod are not taken again.
    fixture.state.release_pod(q.uid());
    fixture.state.assign(&"r".into(), "c", cpus("2,6"));
    fixture.admit(&q, None).expect("enough CPUs");
    assert_eq!(fixture.state.pod(q.uid()), cpus("3,7"));
}

#[test]
fn whole_cpus_of_guaranteed_pods_are_exclusive() {
    let resources = |requests: Value, limits: Value| json!({ "requests": requests, "limits": limits });
    let equal = |cpu: &str| {
        let list = json!({ "cpu": cpu, "memory": "1Gi" });
        resources(list.clone(), list)
    };
    let spec = |resources: Value| json!({ "containers": [{ "name": "c", "resources": resources }] });
    let pod_level = |level: Value| {
        let mut spec = spec(equal("2"));
        spec["resources"] = level;
        spec
    };
    for (case, spec, expected) in [
        ("whole", spec(equal("2")), 2),
        ("whole in thousandths", spec(equal("3000m")), 3),
        ("AC-06b-13", spec(equal("1500m")), 0),
        ("less than a thousandth more", spec(equal("2000100u")), 0),
        ("burstable", spec(resources(json!({ "cpu": "2" }), json!({ "cpu": "2" }))), 0),
        ("best-effort", spec(json!({})), 0),
        ("pod-level resources", pod_level(equal("4")), 0),
        ("pod-level limits", pod_level(json!({ "limits": { "cpu": "4", "memory": "4Gi" } })), 0),
        ("no pod-level resources", pod_level(json!({})), 2),
    ] {
        let pod = pod_of("p", spec);
        assert_eq!(exclusive_cpus(&pod, &pod.containers()[0]), expected, "{case}");
        assert_eq!(pod_exclusive_cpus(&pod), expected, "{case}");
    }
}

#[test]
fn cpus_of_a_mask_are_those_of_nodes_or_sockets() {
    for (aligns_by_socket, mask, expected) in [
        (false, &[2][..], "4-5,12-13"),
        (true, &[2][..], "4-7,12-15"),
        (false, &[0, 2][..], "0-1,4-5,8-9,12-13"),
        (true, &[0, 2][..], "0-15"),
        (true, &[][..], ""),
    ] {
        let options = StaticOptions { aligns_by_socket, ..StaticOptions::default() };
        let policy = StaticPolicy { topology: machine(2, 2, 2, 2), reserved: ReservedCpus::default(), options };
        let mask: NumaMask = mask.iter().copied().collect();
        assert_eq!(policy.cpus_of_mask(mask), cpus(expected), "{aligns_by_socket} {mask}");
    }
}

#[test]
fn alignment_is_to_whole_cores_and_to_one_cache() {
    // Siblings (i, i+4); the caches are those of the sockets with the cores 0 and 1, and 2 and 3.
    let fixture = Fixture::new(machine(2, 1, 2, 2), "1", "", StaticOptions::default());
    for (list, has_whole_cores, has_one_uncore_cache) in [
        ("0,4", true, true),
        ("0-1,4-5", true, true),
        ("0", false, true),
        ("0-1", false, true),
        ("0-1,4", false, true),
        ("0,2,4,6", true, false),
        ("0,2", false, false),
        ("", true, true),
    ] {
        let expected = CpuAlignment { has_whole_cores, has_one_uncore_cache };
        assert_eq!(fixture.policy.alignment(&cpus(list)), expected, "{list}");
    }
}

#[test]
fn pools_leave_reserved_cpus_out() {
    let mut fixture = Fixture::new(machine_a(), "1", "", StaticOptions::default());
    fixture.admit(&pod("p", &[], &["c=2"]), None).expect("enough CPUs");
    assert_eq!(fixture.policy.allocatable(), cpus("1-7"));
    assert_eq!(fixture.policy.available(&fixture.state), cpus("2-4,6-7"));
}
