//! Pod cgroups on cgroup v2, created through systemd. Behavior: spec 06a §4-8, §11, §12.

use std::fs;

use serde_json::{Value, json};

use crate::node::inside::{
    ClusterFixture, NAMESPACE, NODE, PODS, counted, file, files, memory_of_the_machine, only, page, processes,
    property, scope, shell, sized, slice, until,
};
use berth_testkit::process::{condition, container};

const WAITS: &str = "exec sleep 100000";
const MEBI: u64 = 1 << 20;
const NAMES: [&str; 3] = ["guaranteed", "burstable", "best-effort"];

pub async fn pods_get_their_shares_of_the_unified_hierarchy(world: &ClusterFixture) {
    let limits = json!({"cpu": "500m", "memory": "32Mi"});
    world.run("guaranteed", sized(WAITS, json!({"requests": limits, "limits": limits})));
    let resources = json!({"requests": {"cpu": "250m", "memory": "16Mi"}, "limits": {"cpu": "417m", "memory": "48Mi"}});
    // A tmpfs volume with data, so that there is memory to count.
    let mut filled = sized(&format!("dd if=/dev/zero of=/memory/data bs=1M count=10; {WAITS}"), resources);
    filled["containers"][0]["volumeMounts"] = json!([{"name": "memory", "mountPath": "/memory"}]);
    filled["volumes"] = json!([{"name": "memory", "emptyDir": {"medium": "Memory"}}]);
    world.run("burstable", filled);
    world.run("best-effort", only(shell(WAITS)));
    let [guaranteed, burstable, best_effort] = world.until_ready(NAMES).await;

    // AC-06a-1, AC-06a-2, AC-06a-5, AC-06a-7, AC-06a-9: pods' weights are linear, containers' quadratic.
    let of_pod = |pod: &Value| files(&slice(pod), &["cpu.weight", "cpu.max", "memory.max", "pids.max"]);
    let of_main = |pod: &Value| {
        files(
            &scope(pod),
            &["cpu.weight", "cpu.max", "memory.max", "memory.swap.max", "memory.oom.group", "memory.min"],
        )
    };
    for (pod, pod_has, main_has) in [
        (
            &guaranteed,
            ["cpu.weight=20", "cpu.max=50000 100000", "memory.max=33554432", "pids.max=100"],
            ["cpu.weight=59", "cpu.max=50000 100000", "memory.max=33554432"],
        ),
        (
            &burstable,
            ["cpu.weight=10", "cpu.max=42000 100000", "memory.max=50331648", "pids.max=100"],
            ["cpu.weight=35", "cpu.max=42000 100000", "memory.max=50331648"],
        ),
        (
            &best_effort,
            ["cpu.weight=1", "cpu.max=max 100000", "memory.max=max", "pids.max=100"],
            ["cpu.weight=1", "cpu.max=max 100000", "memory.max=max"],
        ),
    ] {
        assert_eq!(of_pod(pod), pod_has);
        assert_eq!(of_main(pod)[..3], main_has);
        assert_eq!(of_main(pod)[3..], ["memory.swap.max=0", "memory.oom.group=1", "memory.min=0"]);
    }
    // AC-06a-11
    let classes = ["kubepods-burstable", "kubepods-besteffort"];
    let weights = classes.map(|class| file(&format!("/kubepods.slice/{class}.slice"), "cpu.weight"));
    assert_eq!(weights, ["10", "1"]);
    // The node has four CPUs, and the memory that is not reserved for the system is for pods.
    assert_eq!(
        files("/kubepods.slice", &["cpu.weight", "memory.max"]),
        ["cpu.weight=157".to_owned(), format!("memory.max={PODS}")]
    );
    let score = |pod: &Value| {
        let path = format!("/proc/{}/oom_score_adj", processes(pod)[0]);
        fs::read_to_string(path).expect("it runs").trim().parse::<u64>().unwrap_or(0)
    };
    // AC-06a-23
    let expected = 1000 - 1000 * 16 * MEBI / memory_of_the_machine();
    assert_eq!((score(&burstable), score(&best_effort), score(&guaranteed)), (expected, 1000, 0));
    let units = [&guaranteed, &burstable, &best_effort].map(|pod| {
        let scope = scope(pod);
        property(scope.rsplit('/').next().expect("a name"), "ActiveState")
    });
    assert_eq!(units, ["active", "active", "active"]);
}

pub async fn statistics_come_from_the_unified_hierarchy(world: &ClusterFixture) {
    let pod = world.pod("burstable");
    let (of_main, of_pod) = (scope(&pod), slice(&pod));
    let summary = until("the summary tells of the pod", async || {
        let summary: Value = serde_json::from_str(&page("/stats/summary").await?).ok()?;
        let pods = summary["pods"].as_array()?;
        let of_it = pods.iter().find(|stats| stats["podRef"]["name"] == "burstable")?;
        // A rate needs two samples.
        of_it["containers"][0]["cpu"]["usageNanoCores"].as_u64().map(|_| summary.clone())
    })
    .await;
    let find = |name: &str| {
        let pods = summary["pods"].as_array().expect("pods");
        pods.iter().find(|stats| stats["podRef"]["name"] == name).expect("received").clone()
    };
    let (pod_stats, number) = (find("burstable"), |value: &Value| value.as_u64().unwrap_or_else(|| panic!("{value}")));
    let main = &pod_stats["containers"][0];
    // The container sleeps: the reported values stay constant, except for a few pages.
    let near = |reported: u64, now: u64| assert!(reported.abs_diff(now) <= MEBI, "reported {reported}, is {now}");
    let working_set = |group: &str| {
        let used: u64 = file(group, "memory.current").parse().expect("a number");
        used - counted(group, "memory.stat", "inactive_file")
    };
    near(number(&main["memory"]["workingSetBytes"]), working_set(&of_main));
    near(number(&pod_stats["memory"]["workingSetBytes"]), working_set(&of_pod));
    assert!(number(&main["memory"]["workingSetBytes"]) >= 10 * MEBI, "{main:#}");
    near(number(&main["memory"]["rssBytes"]), counted(&of_main, "memory.stat", "anon"));
    near(number(&main["memory"]["availableBytes"]), 48 * MEBI - working_set(&of_main));
    let used = counted(&of_main, "cpu.stat", "usage_usec") * 1000;
    let reported_cpu = number(&main["cpu"]["usageCoreNanoSeconds"]);
    assert!(reported_cpu > 0 && reported_cpu <= used, "reported {reported_cpu}, is {used}");
    assert_eq!(number(&pod_stats["process_stats"]["process_count"]), processes(&pod).len() as u64, "{pod_stats:#}");
    // AC-06a-24
    for (of, stats) in [("node", &summary["node"]), ("pod", &pod_stats), ("container", main)] {
        for resource in ["cpu", "memory", "io"] {
            let stalls = &stats[resource]["psi"]["some"];
            assert!(stalls["total"].is_u64() && stalls["avg10"].is_number(), "{of} {resource}: {stalls}");
        }
    }
    let metrics = page("/metrics/cadvisor").await.expect("answered");
    for family in ["container_pressure_cpu_waiting_seconds_total", "container_pressure_memory_stalled_seconds_total"] {
        let is_of_it = |line: &str| line.starts_with(family) && line.contains("pod=\"burstable\"");
        assert!(metrics.lines().any(is_of_it), "{family}");
    }
    let is_limit = |line: &&str| {
        line.starts_with("container_spec_memory_limit_bytes{container=\"main\"") && line.contains("pod=\"burstable\"")
    };
    let limit = |line: &str| line.rsplit_once(' ')?.1.parse::<f64>().ok();
    let limits: Vec<f64> = metrics.lines().filter(is_limit).filter_map(limit).collect();
    assert_eq!(limits, [f64::from(48 << 20)]);
    let node = world.api.get("nodes", "", NODE).expect("it joined");
    assert_eq!(condition(&node, "MemoryPressure"), Some("False"));
}

pub async fn a_resize_reaches_groups_and_units(world: &ClusterFixture) {
    let pod = world.pod("burstable");
    let (of_main, of_pod, before) = (scope(&pod), slice(&pod), processes(&pod));
    let resources = |cpu: &str, memory: &str| json!({"requests": {"cpu": cpu, "memory": "16Mi"}, "limits": {"cpu": cpu, "memory": memory}});
    // AC-06a-20
    for (cpu, weights, quota, per_second, memory, bytes) in [
        ("1", ["39", "100"], "100000 100000", "1s", "64Mi", 64 * MEBI),
        ("333m", ["13", "43"], "34000 100000", "340ms", "40Mi", 40 * MEBI),
    ] {
        let patch = json!({"spec": {"containers": [{"name": "main", "resources": resources(cpu, memory)}]}});
        world.api.admin().patch_sub("pods", NAMESPACE, "burstable", "resize", patch).expect("accepted");
        let is_done = |pod: &Value| {
            let shown = &container(pod, "main")["resources"]["limits"];
            condition(pod, "PodResizeInProgress").is_none() && *shown == resources(cpu, memory)["limits"]
        };
        let pod = world.until_pod("burstable", &format!("has {cpu} and {memory}"), is_done).await;
        for (group, weight) in [(&of_pod, weights[0]), (&of_main, weights[1])] {
            let expected = [format!("cpu.weight={weight}"), format!("cpu.max={quota}"), format!("memory.max={bytes}")];
            assert_eq!(files(group, &["cpu.weight", "cpu.max", "memory.max"]), expected, "{group}");
            // systemd must know the value too: otherwise its next reload would revert it.
            let unit = group.rsplit('/').next().expect("a name");
            assert_eq!(property(unit, "CPUQuotaPerSecUSec"), per_second, "{unit}");
            assert_eq!(property(unit, "MemoryMax"), bytes.to_string(), "{unit}");
        }
        assert_eq!((processes(&pod), &container(&pod, "main")["restartCount"]), (before.clone(), &json!(0)));
    }
    // AC-06a-21: ten mebibytes are in use.
    let patch = json!({"spec": {"containers": [{"name": "main", "resources": resources("333m", "8Mi")}]}});
    world.api.admin().patch_sub("pods", NAMESPACE, "burstable", "resize", patch).expect("accepted");
    let is_refused = |pod: &Value| {
        let all = pod["status"]["conditions"].as_array().into_iter().flatten();
        let message = all.filter(|c| c["type"] == "PodResizeInProgress").find_map(|c| c["message"].as_str());
        message.is_some_and(|text| text.starts_with("cannot decrease memory limits: "))
    };
    world.until_pod("burstable", "is told that its memory is in use", is_refused).await;
    assert_eq!(file(&of_main, "memory.max"), (40 * MEBI).to_string());
    world.remove(NAMES).await;
    assert_eq!(file("/kubepods.slice/kubepods-burstable.slice", "cpu.weight"), "1");
}
