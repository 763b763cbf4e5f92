//! Agent memory under unlimited container output: logs, messages, probes, volumes (spec 03b §9, §10).

use serde_json::{Value, json};

use crate::node::{Node, UNTIL_STOPPED, shell};
use berth_testkit::{
    process::{container, get, manifest_of},
    real,
};

/// Peak memory of the agent in KiB, without file-backed pages, which are many in a debug build.
fn peak(node: &Node) -> u64 {
    let status = std::fs::read_to_string(format!("/proc/{}/status", node.agent.pid())).expect("it runs");
    let field = |name: &str| -> u64 {
        let line = status.lines().find_map(|line| line.strip_prefix(name)).expect("a field");
        line.trim_end_matches("kB").trim().parse().expect("a number")
    };
    field("VmHWM:").saturating_sub(field("RssFile:"))
}

fn reason(pod: &Value, name: &str) -> Option<String> {
    let ended = &container(pod, name)["state"]["terminated"];
    ended["reason"].as_str().map(str::to_owned)
}

/// Every file and stream that a container controls, 4 GiB long (sparse) or endless: its mounted files, its termination
/// message, its log, volumes, output of exec probes and hooks, and responses to probes.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn what_a_container_grows_costs_the_agent_no_memory() {
    let Some(node) = Node::own("what_a_container_grows_costs_the_agent_no_memory").await else { return };
    // containerd returns up to 16 MiB of both streams in one message; the agent limits its embedded runtime to 10 KiB
    // of each.
    let printed = if real::is_embedded() { "32m" } else { "2m" };
    let prints = format!("head -c {printed} /dev/zero; head -c {printed} /dev/zero >&2");
    let exec = json!({"command": ["sh", "-c", prints]});
    let noisy = |name: &str| {
        let mut noisy = shell(name, UNTIL_STOPPED);
        noisy["readinessProbe"] = json!({"exec": exec, "periodSeconds": 1, "timeoutSeconds": 30});
        noisy["lifecycle"] = json!({"postStart": {"exec": exec}, "preStop": {"exec": exec}});
        noisy
    };
    let mounted = "/etc/hosts /etc/hostname /etc/resolv.conf /dev/termination-log /cache/file /tmp/file /www/answer";
    let grow = format!("mkdir /www; for file in {mounted}; do truncate -s 4G $file || exit 3; done");
    let mut grower = shell("grower", &format!("{grow}; httpd -p 8080 -h /www; echo grown; {UNTIL_STOPPED}"));
    grower["volumeMounts"] = json!([{"name": "cache", "mountPath": "/cache"}]);
    let answer = json!({"path": "/answer", "port": 8080});
    grower["readinessProbe"] = json!({"httpGet": answer, "periodSeconds": 1, "timeoutSeconds": 30});
    let spec = json!({
        "terminationGracePeriodSeconds": 20,
        "volumes": [{"name": "cache", "emptyDir": {}}],
        "containers": [grower, noisy("one"), noisy("two"), noisy("three"), noisy("four")],
    });
    let pod = node.run(&manifest_of("grown", spec)).await;

    let mut message = shell("message", "truncate -s 4G /dev/termination-log");
    message["terminationMessagePolicy"] = json!("File");
    let mut line = shell("line", "head -c 64m /dev/zero | tr '\\000' x; exit 1");
    line["terminationMessagePolicy"] = json!("FallbackToLogsOnError");
    let spec = json!({"restartPolicy": "Never", "containers": [message, line]});
    node.home.put_pod(&manifest_of("ended", spec));
    let is_over = |pod: &Value| reason(pod, "message").is_some() && reason(pod, "line").is_some();
    let ended = node.agent.until_pod("ended", "over", is_over).await;
    let message = |name: &str| container(&ended, name)["state"]["terminated"]["message"].as_str().map_or(0, str::len);
    assert!(message("message") <= 4096 && message("line") <= 4096, "spec 03b §9");

    for page in ["/stats/summary", "/metrics/cadvisor", "/metrics/resource", "/pods"] {
        let answer = get(node.home.read_only_port(), page).await.expect("it answers");
        assert!(answer.body.len() < 4 << 20, "{page} has {} bytes", answer.body.len());
    }
    assert!(node.agent.pod("grown").await.is_some(), "it still serves");
    node.remove(&pod).await;
    node.remove(&ended).await;
    let peak = peak(&node);
    println!("{peak} KiB at most");
    assert!(peak < 80 << 10, "{peak} KiB of memory");
}
