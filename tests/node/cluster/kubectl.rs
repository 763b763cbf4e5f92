//! kubectl on a cluster of the test API server and one agent, with streams through the server.
//!
//! The server proxies requests about pods to the agent's main port, with the server's own certificate.

use std::{
    process::{Command as Plain, Stdio},
    time::Duration,
};

use serde_json::json;
use tokio::{
    io::{AsyncBufReadExt, AsyncWriteExt, BufReader},
    process::{Child, Command},
    time::timeout,
};

use crate::cluster::{ClusterFixture, NAMESPACE, pod};
use berth_testkit::{
    main_port::MainPort,
    process::{Agent, NODE, skips},
    scripted_cri::streaming::StreamServer,
};

/// Timeout of a kubectl call.
const LIMIT: Duration = Duration::from_secs(90);

/// A node whose main port is open to the API server.
pub async fn open_world() -> (ClusterFixture, MainPort) {
    let (mut world, port) = (ClusterFixture::new().await, MainPort::new());
    let callers = port.path("callers.crt");
    std::fs::write(&callers, world.api.authority_pem()).expect("written");
    let mut fields = port.webhook_fields();
    // The API server connects to the node's own address.
    fields["address"] = "0.0.0.0".into();
    fields["authentication"]["x509"]["clientCAFile"] = json!(callers);
    // The default directory may contain certificates of the machine's own kubelet.
    let pki = world.home.path().join("pki");
    std::fs::create_dir(&pki).expect("made");
    world.home = world.home.with(fields).flag(format!("--cert-dir={}", pki.display()));
    world.api.rules(|rules| rules.scheduler = Some(NODE.to_owned()));
    (world, port)
}

struct Cluster {
    world: ClusterFixture,
    agent: Agent,
    _port: MainPort,
}

/// Result of a call.
#[derive(Debug)]
struct CommandOutput {
    code: Option<i32>,
    out: String,
    err: String,
}

impl Cluster {
    /// Starts the cluster; `None`, with a report, if the test is skipped.
    async fn new(test: &str) -> Option<Self> {
        if skips(test) {
            return None;
        }
        if Plain::new("kubectl").args(["version", "--client"]).output().is_err() {
            println!("skipped: {test}: kubectl is not installed");
            return None;
        }
        let (world, port) = open_world().await;
        let agent = world.start().await;
        Some(Self { world, agent, _port: port })
    }

    /// Starts kubectl.
    fn spawn(&self, args: &[&str]) -> Child {
        let mut command = Command::new("kubectl");
        command.arg("--kubeconfig").arg(self.world.api.kubeconfig()).args(["--namespace", NAMESPACE]).args(args);
        command.env("HOME", self.world.home.path()).kill_on_drop(true);
        command.stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::piped());
        command.spawn().expect("kubectl starts")
    }

    async fn kubectl(&self, args: &[&str], input: &str) -> CommandOutput {
        let mut child = self.spawn(args);
        let mut stdin = child.stdin.take().expect("a pipe");
        let _ = stdin.write_all(input.as_bytes()).await; // kubectl may not read its stdin
        drop(stdin);
        let output = timeout(LIMIT, child.wait_with_output()).await.expect("kubectl ends").expect("it ran");
        let text = |bytes: &[u8]| String::from_utf8_lossy(bytes).into_owned();
        CommandOutput { code: output.status.code(), out: text(&output.stdout), err: text(&output.stderr) }
    }

    /// Output of a successful call.
    async fn stdout_of(&self, args: &[&str], input: &str) -> String {
        let output = self.kubectl(args, input).await;
        assert_eq!(output.code, Some(0), "{args:?}: {output:?}\n{}", self.agent.log_end());
        output.out
    }

    /// Words of each output line.
    async fn rows(&self, args: &[&str]) -> Vec<Vec<String>> {
        words(&self.stdout_of(args, "").await)
    }
}

fn words(text: &str) -> Vec<Vec<String>> {
    text.lines().map(|line| line.split_whitespace().map(str::to_owned).collect()).collect()
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn kubectl_applies_reads_and_deletes() {
    let Some(cluster) = Cluster::new("kubectl_applies_reads_and_deletes").await else { return };
    let mut manifest = pod("web");
    assert_eq!(cluster.stdout_of(&["apply", "-f", "-"], &manifest.to_string()).await, "pod/web created\n");
    let ready = ["wait", "--for=condition=Ready", "pod/web", "--timeout=30s"];
    assert_eq!(cluster.stdout_of(&ready, "").await, "pod/web condition met\n");
    let phase = ["get", "pods", "-o", "jsonpath={.items[*].status.phase}"];
    assert_eq!(cluster.stdout_of(&phase, "").await, "Running");
    assert!(cluster.stdout_of(&["get", "nodes"], "").await.contains(NODE));
    let description = cluster.stdout_of(&["describe", "pod", "web"], "").await;
    for words in [&format!("Node:             {NODE}/"), "Running", "Started", "Container started"] {
        assert!(description.contains(words), "no {words:?} in\n{description}");
    }
    let description = cluster.stdout_of(&["describe", "node", NODE], "").await;
    for words in ["KubeletReady", "RenewTime:", "web", "v1.36"] {
        assert!(description.contains(words), "no {words:?} in\n{description}");
    }
    assert_eq!(cluster.stdout_of(&["apply", "-f", "-"], &manifest.to_string()).await, "pod/web unchanged\n");
    manifest["metadata"]["labels"] = json!({"colour": "blue"});
    assert_eq!(cluster.stdout_of(&["apply", "-f", "-"], &manifest.to_string()).await, "pod/web configured\n");
    let before = cluster.world.api.last();
    let output = cluster.stdout_of(&["delete", "pod", "web", "--grace-period=5"], "").await;
    assert!(output.starts_with("pod \"web\" deleted"), "{output}");
    assert!(cluster.world.pod("web").is_none(), "it waits for the end");
    let deletes = cluster.world.agent_requests().since(before).of("pods").verb("delete");
    assert_eq!(deletes.len(), 1, "{deletes}");
    let missing = cluster.kubectl(&["get", "pod", "web"], "").await;
    assert!(missing.code == Some(1) && missing.err.contains("NotFound"), "{missing:?}");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn kubectl_reads_logs_and_runs_commands() {
    let Some(cluster) = Cluster::new("kubectl_reads_logs_and_runs_commands").await else { return };
    let _streams = StreamServer::start(&cluster.world.runtime.cri).await;
    cluster.world.api.create(pod("web"));
    cluster.world.until_ready(&cluster.agent, "web").await;
    let logs = cluster.world.runtime.cri.containers();
    let log = std::path::Path::new(&logs.first().expect("a container").log_path);
    std::fs::create_dir_all(log.parent().expect("a folder")).expect("made");
    let lines = ["one", "two", "three"].map(|line| format!("2026-01-01T00:00:00Z stdout F {line}\n"));
    std::fs::write(log, lines.concat()).expect("written");
    assert_eq!(cluster.stdout_of(&["logs", "web"], "").await, "one\ntwo\nthree\n");
    assert_eq!(cluster.stdout_of(&["logs", "web", "-c", "main", "--tail=1"], "").await, "three\n");
    let wrong = cluster.kubectl(&["logs", "web", "-c", "other"], "").await;
    assert!(wrong.code == Some(1) && wrong.err.contains("other"), "{wrong:?}");
    let earlier = cluster.kubectl(&["logs", "web", "--previous"], "").await;
    let text = "(BadRequest): previous terminated container \"main\" in pod \"web\" not found";
    assert!(earlier.code == Some(1) && earlier.err.contains(text), "{earlier:?}");

    assert_eq!(cluster.stdout_of(&["exec", "-i", "web", "--", "cat"], "hello").await, "hello");
    let ended = cluster.kubectl(&["exec", "web", "--", "sh", "-c", "exit 7"], "").await;
    assert!(ended.code == Some(7) && ended.err.contains("exit code 7"), "{ended:?}");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn kubectl_prints_the_columns_of_each_kind() {
    let Some(cluster) = Cluster::new("kubectl_prints_the_columns_of_each_kind").await else { return };
    let mut watch = cluster.spawn(&["get", "pods", "--watch"]);
    let mut seen = BufReader::new(watch.stdout.take().expect("a pipe")).lines();
    cluster.world.api.create(pod("web"));
    let pod = cluster.world.until_ready(&cluster.agent, "web").await;
    let rows = cluster.rows(&["get", "pods"]).await;
    assert_eq!(rows[0], ["NAME", "READY", "STATUS", "RESTARTS", "AGE"]);
    assert_eq!(rows[1][..4], ["web", "1/1", "Running", "0"]);
    let rows = cluster.rows(&["get", "pod", "web", "-o", "wide", "--no-headers"]).await;
    let address = pod["status"]["podIP"].as_str().expect("an address");
    assert_eq!(rows[0][5..], [address, NODE, "<none>", "<none>"]);
    let rows = cluster.rows(&["get", "nodes"]).await;
    assert_eq!(rows[0], ["NAME", "STATUS", "ROLES", "AGE", "VERSION"]);
    assert_eq!(rows[1][..3], [NODE, "Ready", "<none>"]);
    let rows = cluster.rows(&["get", "events"]).await;
    assert_eq!(rows[0], ["LAST", "SEEN", "TYPE", "REASON", "OBJECT", "MESSAGE"]);
    let started = |row: &Vec<String>| row[1..] == ["Normal", "Started", "pod/web", "Container", "started"];
    assert!(rows.iter().any(started), "{rows:?}");
    for kind in ["ConfigMap", "Secret"] {
        let metadata = json!({"name": "words", "namespace": NAMESPACE});
        cluster.world.api.create(json!({"kind": kind, "apiVersion": "v1", "metadata": metadata}));
    }
    for (kind, expected) in [
        ("configmaps", vec!["NAME", "DATA", "AGE"]),
        ("secrets", vec!["NAME", "TYPE", "DATA", "AGE"]),
        ("serviceaccounts", vec!["NAME", "AGE"]),
        ("namespaces", vec!["NAME", "STATUS", "AGE"]),
    ] {
        assert_eq!(cluster.rows(&["get", kind]).await[0], expected, "{kind}");
    }
    let leases = cluster.rows(&["get", "leases", "--namespace", "kube-node-lease"]).await;
    assert_eq!(leases[1][..2], [NODE, NODE]);
    let rows = cluster.rows(&["get", "pods", "--sort-by", "{.metadata.name}", "--output", "wide"]).await;
    assert_eq!(rows[1][..3], ["web", "1/1", "Running"]);

    cluster.stdout_of(&["delete", "pod", "web", "--grace-period=1"], "").await;
    let mut shown = Vec::new();
    while shown.last().is_none_or(|row: &Vec<String>| row[2] != "Terminating") {
        let line = timeout(LIMIT, seen.next_line()).await;
        let line = line.unwrap_or_else(|_| panic!("it only told {shown:?}")).expect("readable").expect("it goes on");
        shown.extend(words(&line));
    }
    assert_eq!(shown[0], ["NAME", "READY", "STATUS", "RESTARTS", "AGE"]);
    assert_eq!(shown.iter().filter(|row| row[0] == "NAME").count(), 1, "{shown:?}");
    assert!(shown.iter().any(|row| row[..3] == ["web", "1/1", "Running"]), "{shown:?}");
    watch.kill().await.expect("killed");
}
