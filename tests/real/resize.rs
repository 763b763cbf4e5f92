//! In-place pod resize on a real runtime, down to its cgroups (spec 10a §18).

use std::{fs, path::PathBuf};

use serde_json::{Value, json};

use crate::node::{Node, UNTIL_STOPPED, shell};
use berth_testkit::{
    api_server::ApiServer,
    process::{NODE, PATIENCE, condition, container, is_ready},
};

const NAMESPACE: &str = "default";

fn resources(cpu: &str, memory: &str) -> Value {
    json!({"requests": {"cpu": cpu, "memory": memory}, "limits": {"cpu": cpu, "memory": memory}})
}

/// CPU and memory limits of a cgroup, from the files of either cgroup version.
fn limits(groups: &[PathBuf]) -> Vec<String> {
    let files = ["cpu.max", "memory.max", "cpu.cfs_quota_us", "memory.limit_in_bytes"];
    let read = |file: &str| groups.iter().find_map(|group| fs::read_to_string(group.join(file)).ok());
    files.into_iter().filter_map(read).map(|text| text.trim().replace(" 100000", "")).collect()
}

async fn until_pod(api: &ApiServer, what: &str, holds: impl Fn(&Value) -> bool) -> Value {
    let of_it = |pod: &Value| holds(pod);
    api.wait_until(what, PATIENCE, |seen| seen.object("pods", NAMESPACE, "web").is_some_and(|pod| of_it(&pod))).await;
    Value::clone(&api.get("pods", NAMESPACE, "web").expect("it is there"))
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_resize_reaches_the_control_groups() {
    // AC-06a-20
    let api = ApiServer::start().await;
    let kubeconfig = format!("--kubeconfig={}", api.node_kubeconfig(NODE).display());
    let Some(node) = Node::with_flags("a_resize_reaches_the_control_groups", json!({}), &[kubeconfig]).await else {
        return;
    };
    let mut main = shell("main", UNTIL_STOPPED);
    main["resources"] = resources("100m", "32Mi");
    let mut pod = berth_testkit::process::manifest_of("web", json!({"containers": [main]}));
    pod["metadata"]["namespace"] = json!(NAMESPACE);
    api.create(pod);
    api.bind(NAMESPACE, "web", NODE);
    let pod = until_pod(&api, "the pod is ready", is_ready).await;
    let pid = node.pid(&pod, "main");
    let of_pod = node.cgroups(&pod);
    let of_main: Vec<PathBuf> = {
        let id = node.ids(&pod, "container").remove(0);
        let below =
            |group: &PathBuf| fs::read_dir(group).into_iter().flatten().flatten().map(|entry| entry.path()).collect();
        let all: Vec<PathBuf> = of_pod.iter().flat_map(|group| -> Vec<PathBuf> { below(group) }).collect();
        all.into_iter().filter(|group| group.to_string_lossy().contains(&id)).collect()
    };
    let before = ["10000".to_owned(), (32 << 20).to_string()];
    assert_eq!((limits(&of_pod), limits(&of_main)), (before.to_vec(), before.to_vec()));

    for (cpu, quota, memory, size) in [("200m", "20000", "64Mi", 64 << 20), ("50m", "5000", "48Mi", 48 << 20)] {
        let patch = json!({"spec": {"containers": [{"name": "main", "resources": resources(cpu, memory)}]}});
        api.admin().patch_sub("pods", NAMESPACE, "web", "resize", patch).expect("accepted");
        let is_done = |pod: &Value| {
            let shown = &container(pod, "main")["resources"];
            condition(pod, "PodResizeInProgress").is_none()
                && *shown == resources(cpu, memory)
                && pod["status"]["resources"] == resources(cpu, memory)
        };
        let pod = until_pod(&api, &format!("the pod has {cpu} and {memory}"), is_done).await;
        let expected = [quota.to_owned(), size.to_string()];
        assert_eq!((limits(&of_pod), limits(&of_main)), (expected.to_vec(), expected.to_vec()));
        assert_eq!((node.pid(&pod, "main"), &container(&pod, "main")["restartCount"]), (pid, &json!(0)));
    }

    // The kernel would OOM-kill a container above the new limit.
    let patch = json!({"spec": {"containers": [{"name": "main", "resources": resources("50m", "4Ki")}]}});
    api.admin().patch_sub("pods", NAMESPACE, "web", "resize", patch).expect("accepted");
    let refused = |pod: &Value| {
        let all = pod["status"]["conditions"].as_array().into_iter().flatten();
        let message = all.filter(|c| c["type"] == "PodResizeInProgress").find_map(|c| c["message"].as_str());
        message.is_some_and(|text| text.starts_with("cannot decrease memory limits: "))
    };
    until_pod(&api, "it is told that memory is in use", refused).await;
    assert_eq!(limits(&of_pod)[1], (48 << 20).to_string());
}
