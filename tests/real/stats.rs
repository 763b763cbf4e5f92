//! Statistics of real pods on the summary, resource, and cAdvisor pages.

use std::collections::BTreeMap;

use jiff::Timestamp;
use serde_json::{Value, json};

use crate::node::{Node, UNTIL_STOPPED, name_of, shell, uid_of};
use berth_testkit::process::manifest_of;

/// A page of the read-only port as text.
async fn page(node: &Node, path: &str) -> String {
    let answer = node.agent.get(path).await.expect("an answer");
    assert_eq!(answer.status, 200, "{path}: {}", answer.body);
    answer.body
}

/// Lines of a family with that pod label.
fn of_pod<'a>(page: &'a str, family: &str, pod: &str) -> Vec<&'a str> {
    let (family, pod) = (format!("{family}{{"), format!("pod=\"{pod}\""));
    page.lines().filter(|line| line.starts_with(&family) && line.contains(&pod)).collect()
}

/// A pod of two containers is on all three pages, with plausible values.
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
        // Values measured in the background appear a moment later.
        main["rootfs"]["usedBytes"].as_u64().is_some_and(|used| used >= 1 << 20)
            && main["logs"]["usedBytes"].as_u64().is_some()
            && main["cpu"].get("usageNanoCores").is_some()
            && pod["volume"].as_array().is_some_and(|volumes| !volumes.is_empty())
    };
    node.agent.until("the summary tells of its disk too", complete).await;
    let pod_stats = shown().await.expect("it runs");
    let names: Vec<&str> =
        pod_stats["containers"].as_array().expect("two").iter().filter_map(|c| c["name"].as_str()).collect();
    assert_eq!(names, ["main", "side"]);
    let main = &pod_stats["containers"][0];
    let number = |value: &Value| value.as_u64().unwrap_or_else(|| panic!("a number: {pod_stats:#}"));
    assert!(number(&main["cpu"]["usageCoreNanoSeconds"]) > 1_000_000, "{pod_stats:#}");
    assert!(
        number(&main["memory"]["workingSetBytes"]) + number(&main["memory"]["availableBytes"]) == 64 << 20,
        "{pod_stats:#}"
    );
    assert!(pod_stats["containers"][1]["memory"].get("availableBytes").is_none(), "AC-04b-M6: {pod_stats:#}");
    assert_eq!(pod_stats["network"]["name"], "eth0");
    assert!(number(&pod_stats["process_stats"]["process_count"]) >= 2);
    assert!(number(&pod_stats["ephemeral-storage"]["usedBytes"]) >= number(&main["rootfs"]["usedBytes"]));
    assert_eq!(pod_stats["volume"][0]["name"], "cache");

    // AC-04b-M12: pod, sandbox, and two containers; the network series belong to the sandbox.
    let cadvisor = page(&node, "/metrics/cadvisor").await;
    assert_eq!(of_pod(&cadvisor, "container_memory_working_set_bytes", &name).len(), 4, "{cadvisor}");
    let network = of_pod(&cadvisor, "container_network_receive_bytes_total", &name);
    assert!(
        !network.is_empty()
            && network.iter().all(|line| line.contains("image=\"") && line.contains("interface=\"eth0\"")),
        "{network:#?}"
    );
    assert!(network[0].contains("/pause:"), "the sandbox's image is reported: {}", network[0]);
    let quota = of_pod(&cadvisor, "container_spec_cpu_quota", &name);
    assert!(quota.iter().any(|line| line.contains("container=\"main\"") && line.ends_with("} 50000")), "{quota:#?}");
    let limits = of_pod(&cadvisor, "container_spec_memory_limit_bytes", &name);
    assert!(
        limits.iter().any(|line| line.contains("container=\"main\"") && line.ends_with("} 6.7108864e+07")),
        "{limits:#?}"
    );
    let counts_files = async || {
        let page = page(&node, "/metrics/cadvisor").await;
        of_pod(&page, "container_file_descriptors", &name).iter().any(|line| line.contains("container=\"main\""))
    };
    node.agent.until("open files are counted, every half minute", counts_files).await;

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

/// Value and timestamp of every series of a page, as metrics-server reads them; asserts that none is duplicated.
fn samples(page: &str) -> BTreeMap<&str, (f64, Option<i64>)> {
    let mut all = BTreeMap::new();
    for line in page.lines().filter(|line| !line.starts_with('#')) {
        let end = line.rfind('}').map_or_else(|| line.find(' ').expect("a value"), |end| end + 1);
        let mut rest = line[end..].split_whitespace();
        let value = rest.next().and_then(|value| value.parse().ok()).expect("a number");
        let at = rest.next().map(|at| at.parse().expect("milliseconds"));
        assert!(all.insert(&line[..end], (value, at)).is_none(), "twice: {line}");
    }
    all
}

/// Cores used between two samples of a counter; asserts that time advances and the counter does not decrease.
fn cores(series: &str, before: &BTreeMap<&str, (f64, Option<i64>)>, after: &BTreeMap<&str, (f64, Option<i64>)>) -> f64 {
    let of =
        |page: &BTreeMap<&str, (f64, Option<i64>)>| *page.get(series).unwrap_or_else(|| panic!("{series}: {page:#?}"));
    let ((used_before, at_before), (used, at)) = (of(before), of(after));
    let window = at.zip(at_before).map(|(at, before)| at - before).expect("samples carry their times");
    assert!(window > 0 && used >= used_before && used_before > 0.0, "{series}: {used_before}, {used}, {window} ms");
    (used - used_before) / (window as f64 / 1000.0)
}

/// `kubectl top` is based on two scrapes of `/metrics/resource` by metrics-server, and a division.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn metrics_server_can_compute_usage_per_container() {
    let Some(node) = Node::shared("metrics_server_can_compute_usage_per_container").await else { return };
    let mut busy = shell("busy", &format!("(while true; do :; done) & {UNTIL_STOPPED}"));
    busy["resources"] = json!({"limits": {"cpu": "200m"}});
    let spec = json!({"terminationGracePeriodSeconds": 2, "containers": [busy, shell("idle", UNTIL_STOPPED)]});
    let pod = node.run(&manifest_of("topped", spec)).await;
    let labels =
        |container: &str| format!("{{container=\"{container}\",namespace=\"default\",pod=\"{}\"}}", name_of(&pod));
    let cpu = |container: &str| format!("container_cpu_usage_seconds_total{}", labels(container));
    let scrape = async || page(&node, "/metrics/resource").await;
    let is_complete = async || {
        let page = scrape().await;
        ["busy", "idle"].iter().all(|name| samples(&page).contains_key(&*cpu(name)))
    };
    node.agent.until("both containers were seen", is_complete).await;

    // A recent page is returned again unchanged; none is older than a second.
    let mut again = 0;
    for _ in 0..20 {
        let asked = Timestamp::now().as_millisecond();
        let (one, two) = (scrape().await, scrape().await);
        let newest = |page: &str| samples(page).values().filter_map(|sample| sample.1).max();
        assert!(samples(&one).values().filter_map(|sample| sample.1).all(|at| at >= asked - 1000), "{asked}: {one}");
        if newest(&one) == newest(&two) {
            assert_eq!(one, two);
            again += 1;
        }
    }
    assert!(again > 0, "twenty pairs of pages, all different");

    let first = scrape().await;
    let before = samples(&first);
    let at_node =
        |page: &BTreeMap<&str, (f64, Option<i64>)>| page["node_cpu_usage_seconds_total"].1.unwrap_or_default();
    let is_later = async || at_node(&samples(&scrape().await)) >= at_node(&before) + 3000;
    node.agent.until("three seconds have passed", is_later).await;
    let second = scrape().await;
    let after = samples(&second);
    let machine = std::thread::available_parallelism().expect("known").get() as f64;
    let of_node = cores("node_cpu_usage_seconds_total", &before, &after);
    let (of_busy, of_idle) = (cores(&cpu("busy"), &before, &after), cores(&cpu("idle"), &before, &after));
    let of_pod = format!("pod_cpu_usage_seconds_total{{namespace=\"default\",pod=\"{}\"}}", name_of(&pod));
    let of_pod = cores(&of_pod, &before, &after);
    assert!(of_node > 0.0 && of_node < machine * 1.05, "{of_node} of {machine} cores");
    // The kernel enforces the quota per period.
    assert!(of_busy > 0.01 && of_busy < 0.25 && of_idle < of_busy, "busy {of_busy}, idle {of_idle}");
    assert!(of_pod > of_busy * 0.5 && of_pod < 0.5, "pod {of_pod}, busy {of_busy}");
    for name in ["busy", "idle"] {
        let memory = after[&*format!("container_memory_working_set_bytes{}", labels(name))];
        let started = after[&*format!("container_start_time_seconds{}", labels(name))];
        assert!(memory.0 > 0.0 && started.0 > 1.6e9 && started.1.is_none(), "{memory:?} {started:?}");
    }
    node.remove(&pod).await;
}
