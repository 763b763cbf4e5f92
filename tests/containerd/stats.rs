//! Statistics of pods that really run, as consumers read them.

use serde_json::{Value, json};

use crate::{
    kit::process::manifest_of,
    node::{Node, UNTIL_STOPPED, name_of, shell, uid_of},
};

/// A page of the read-only port as text.
async fn page(node: &Node, path: &str) -> String {
    let answer = node.agent.get(path).await.expect("an answer");
    assert_eq!(answer.status, 200, "{path}: {}", answer.body);
    answer.body
}

/// The lines of a family that belong to a pod.
fn of_pod<'a>(page: &'a str, family: &str, pod: &str) -> Vec<&'a str> {
    let (family, pod) = (format!("{family}{{"), format!("pod=\"{pod}\""));
    page.lines().filter(|line| line.starts_with(&family) && line.contains(&pod)).collect()
}

/// A pod of two containers stands on all three pages, with values that can be.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_pod_stands_on_every_page() {
    let Some(node) = Node::shared("a_pod_stands_on_every_page").await else { return };
    let busy = format!(
        "echo begun; dd if=/dev/zero of=/file bs=64k count=16 2>/dev/null; i=0; while [ $i -lt 200000 ]; do i=$((i+1)); done; echo done; {UNTIL_STOPPED}"
    );
    let spec = json!({
        "terminationGracePeriodSeconds": 5,
        "volumes": [{"name": "cache", "emptyDir": {}}],
        "containers": [
            {"name": "main", "command": ["sh", "-c", busy], "resources": {"limits": {"memory": "64Mi", "cpu": "500m"}},
             "volumeMounts": [{"name": "cache", "mountPath": "/cache"}]},
            shell("side", &format!("dd if=/dev/zero of=/dev/null bs=1k count=10; {UNTIL_STOPPED}")),
        ],
    });
    let pod = node.run(&manifest_of("measured", spec)).await;
    node.until_output(&pod, "main", "done").await;
    let name = name_of(&pod).to_owned();

    let shown = async || {
        let summary: Value = serde_json::from_str(&page(&node, "/stats/summary").await).expect("JSON");
        summary["pods"].as_array().expect("pods").iter().find(|p| p["podRef"]["uid"] == uid_of(&pod)).cloned()
    };
    let complete = async || {
        let Some(pod) = shown().await else { return false };
        let main = &pod["containers"][0];
        // What is measured in the background comes a moment later.
        main["rootfs"]["usedBytes"].as_u64().is_some_and(|used| used >= 1 << 20)
            && main["logs"]["usedBytes"].as_u64().is_some()
            && main["cpu"].get("usageNanoCores").is_some()
            && pod["volume"].as_array().is_some_and(|volumes| !volumes.is_empty())
    };
    node.agent.until("the summary tells of its disk too", complete).await;
    let told = shown().await.expect("it runs");
    let names: Vec<&str> =
        told["containers"].as_array().expect("two").iter().filter_map(|c| c["name"].as_str()).collect();
    assert_eq!(names, ["main", "side"]);
    let main = &told["containers"][0];
    let number = |value: &Value| value.as_u64().unwrap_or_else(|| panic!("a number: {told:#}"));
    assert!(number(&main["cpu"]["usageCoreNanoSeconds"]) > 1_000_000, "{told:#}");
    assert!(
        number(&main["memory"]["workingSetBytes"]) + number(&main["memory"]["availableBytes"]) == 64 << 20,
        "{told:#}"
    );
    assert!(told["containers"][1]["memory"].get("availableBytes").is_none(), "AC-04b-M6: {told:#}");
    assert_eq!(told["network"]["name"], "eth0");
    assert!(number(&told["process_stats"]["process_count"]) >= 2);
    assert!(number(&told["ephemeral-storage"]["usedBytes"]) >= number(&main["rootfs"]["usedBytes"]));
    assert_eq!(told["volume"][0]["name"], "cache");

    // AC-04b-M12: pod, sandbox and two containers; the network is the sandbox's.
    let cadvisor = page(&node, "/metrics/cadvisor").await;
    assert_eq!(of_pod(&cadvisor, "container_memory_working_set_bytes", &name).len(), 4, "{cadvisor}");
    let network = of_pod(&cadvisor, "container_network_receive_bytes_total", &name);
    assert!(
        !network.is_empty()
            && network.iter().all(|line| line.contains("image=\"") && line.contains("interface=\"eth0\""))
    );
    assert!(network[0].contains("pause:berth"), "the sandbox's image is told: {}", network[0]);
    let quota = of_pod(&cadvisor, "container_spec_cpu_quota", &name);
    assert!(quota.iter().any(|line| line.contains("container=\"main\"") && line.ends_with("} 50000")), "{quota:#?}");
    let limits = of_pod(&cadvisor, "container_spec_memory_limit_bytes", &name);
    assert!(
        limits.iter().any(|line| line.contains("container=\"main\"") && line.ends_with("} 6.7108864e+07")),
        "{limits:#?}"
    );
    let files = of_pod(&cadvisor, "container_file_descriptors", &name);
    assert!(files.iter().any(|line| line.contains("container=\"main\"")), "{files:#?}");

    let resource = page(&node, "/metrics/resource").await;
    assert!(resource.ends_with("resource_scrape_error 0\n"), "{resource}");
    for family in
        ["container_cpu_usage_seconds_total", "container_memory_working_set_bytes", "container_start_time_seconds"]
    {
        assert_eq!(of_pod(&resource, family, &name).len(), 2, "{family}: {resource}");
    }
    assert_eq!(of_pod(&resource, "pod_memory_working_set_bytes", &name).len(), 1);

    node.remove(&pod).await;
    let gone = async || of_pod(&page(&node, "/metrics/cadvisor").await, "container_last_seen", &name).is_empty();
    node.agent.until("its series are gone with it", gone).await;
}
