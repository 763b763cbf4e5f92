//! `berth pods`, `why`, `logs`, `exec`, and `top` on a standalone node, as its administrator.

use std::process::Stdio;

use berth::certificates::CertificatePairPaths;
use serde_json::{Value, json};
use tokio::{
    io::{AsyncBufReadExt, AsyncReadExt, AsyncWriteExt, BufReader},
    process::Command,
};

use crate::node::{Node, UNTIL_STOPPED, name_of, shell};
use berth_testkit::{
    main_port::MainPort,
    process::{PATIENCE, container, manifest_of},
};

/// Result of a command.
struct CommandOutput {
    code: Option<i32>,
    out: String,
    err: String,
}

/// A node whose main port is open.
pub struct NodeWithMainPort {
    pub node: Node,
    pub port: MainPort,
    pub client: CertificatePairPaths,
}

impl NodeWithMainPort {
    async fn new(test: &str) -> Option<Self> {
        Self::with(test, &json!({})).await
    }

    /// A node with these fields of the kubelet configuration; `None` if this machine cannot run one.
    pub async fn with(test: &str, fields: &Value) -> Option<Self> {
        let port = MainPort::new();
        let mut all = port.fields();
        for (key, value) in fields.as_object().expect("fields") {
            all[key] = value.clone();
        }
        let node = Node::with(test, all).await?;
        let client = port.client("kate", &["system:masters"]);
        let open = Self { node, port, client };
        open.port.open().await;
        Some(open)
    }

    fn command(&self, args: &[&str]) -> Command {
        let mut command = Command::new(env!("CARGO_BIN_EXE_berth"));
        let (name, rest) = args.split_first().expect("a command");
        command
            .arg(name)
            .args(["--server", &format!("127.0.0.1:{}", self.port.port)])
            .args(["--cacert".as_ref(), self.port.path("ca.crt").as_os_str()])
            .args(["--cert".as_ref(), self.client.certificate.as_os_str()])
            .args(["--key".as_ref(), self.client.key.as_os_str()])
            .args(rest)
            .stdin(Stdio::null())
            .stdout(Stdio::piped())
            .stderr(Stdio::piped())
            .kill_on_drop(true);
        command
    }

    async fn call(&self, args: &[&str], input: Option<&str>) -> CommandOutput {
        let mut command = self.command(args);
        if input.is_some() {
            command.stdin(Stdio::piped());
        }
        let mut child = command.spawn().expect("it starts");
        if let (Some(mut stdin), Some(input)) = (child.stdin.take(), input) {
            stdin.write_all(input.as_bytes()).await.expect("it reads");
        }
        let ended = tokio::time::timeout(PATIENCE, child.wait_with_output()).await.expect("it ends").expect("output");
        let text = |bytes: &[u8]| String::from_utf8_lossy(bytes).into_owned();
        CommandOutput { code: ended.status.code(), out: text(&ended.stdout), err: text(&ended.stderr) }
    }

    /// Output of a successful command.
    pub async fn stdout_of(&self, args: &[&str]) -> String {
        let output = self.call(args, None).await;
        assert_eq!(output.code, Some(0), "{args:?}: {}{}", output.out, output.err);
        output.out
    }

    async fn why(&self, pod: &str) -> Value {
        serde_json::from_str(&self.stdout_of(&["why", pod, "-o", "json"]).await).expect("JSON")
    }
}

/// Lists, explains, reads logs of, enters, and measures a pod.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_pod_from_the_command_line() {
    let Some(open) = NodeWithMainPort::new("a_pod_from_the_command_line").await else { return };
    let mut main = shell("main", &format!("echo hello; {UNTIL_STOPPED}"));
    main["readinessProbe"] = json!({"exec": {"command": ["test", "-e", "/ready"]}, "periodSeconds": 1});
    let crashing =
        json!({"terminationGracePeriodSeconds": 1, "containers": [main, shell("bad", "echo one; echo two; exit 3")]});
    open.node.home.put_pod(&manifest_of("asked", crashing));
    let agent = &open.node.agent;
    let crashes = |pod: &Value| {
        container(pod, "bad").pointer("/state/waiting/reason") == Some(&json!("CrashLoopBackOff"))
            && container(pod, "main").pointer("/state/running").is_some()
    };
    let pod = agent.until_pod("asked", "one runs, one crashes", crashes).await;
    let name = name_of(&pod);

    let table = open.stdout_of(&["pods"]).await;
    let line = table.lines().find(|line| line.contains(name)).expect("a line");
    assert!(table.starts_with("NAMESPACE") && line.starts_with("default") && line.contains("0/2"), "{table}");
    assert!(!table.contains('\u{1b}'), "no colours where nobody sees them");
    let all: Value = serde_json::from_str(&open.stdout_of(&["pods", "-o", "json"]).await).expect("JSON");
    assert_eq!(all["items"][0]["metadata"]["name"], name);
    assert!(open.stdout_of(&["pods", "-o", "wide"]).await.contains("file"));

    // The name without the node's suffix is sufficient if it is unambiguous.
    agent.until("the back-off is told", async || open.why("asked").await["waits"]["reason"] == "back_off").await;
    let why = open.why("asked").await;
    assert_eq!((&why["namespace"], &why["name"], &why["life"]), (&json!("default"), &json!(name), &json!("sync")));
    assert!(why["waits"]["until"].is_string(), "its end is known: {why}");
    let bad = why["containers"].as_array().expect("a list").iter().find(|c| c["name"] == "bad").expect("it is there");
    assert_eq!((&bad["reason"], &bad["lastExit"]["code"]), (&json!("CrashLoopBackOff"), &json!(3)), "{why}");
    let probed = async || {
        let why = open.why("asked").await;
        let run = &why["probes"][0]["runs"][0];
        why["probes"][0]["kind"] == "Readiness" && run["outcome"] == "failure" && run["times"].as_u64() > Some(1)
    };
    agent.until("the probe's failures are told", probed).await;
    let took = |stage: &str| why["stages"].as_array().is_some_and(|all| all.iter().any(|one| one["stage"] == stage));
    assert!(took("RunPodSandbox") && took("volumes") && took("StartContainer main"), "{why}");
    let screen = open.stdout_of(&["why", "default/asked"]).await;
    assert!(screen.contains("Waits for  back-off") && screen.contains("CrashLoopBackOff"), "{screen}");
    let series = "berth_pod_waiting_seconds{reason=\"back_off\"}";
    agent.until("the wait is counted", async || agent.metric(series).await.is_some_and(|wait| wait > 0.0)).await;
    let gone = open.call(&["why", "-n", "default", "nobody"], None).await;
    assert_eq!(gone.code, Some(1));
    assert_eq!(gone.err, "error: pod \"default/nobody\" not found on this node\n");

    assert_eq!(open.stdout_of(&["logs", "asked"]).await, "hello\n");
    assert_eq!(open.stdout_of(&["logs", "asked", "-c", "main", "--tail", "0"]).await, "");
    for (args, expected) in [
        (&["--tail=-1"][..], "hello\n"),
        (&["--since", "1h30m"], "hello\n"),
        (&["--since-time", "2100-01-01T00:00:00Z"], ""),
        (&["--limit-bytes", "4"], "hell"),
    ] {
        assert_eq!(open.stdout_of(&[&["logs", "asked", "-c", "main"], args].concat()).await, expected, "{args:?}");
    }
    agent
        .until("the instance before is read", async || {
            let output = open.call(&["logs", "asked", "-c", "bad", "--previous", "--tail", "1"], None).await;
            output.code == Some(0) && output.out == "two\n"
        })
        .await;
    let none = open.call(&["logs", "asked", "-c", "none"], None).await;
    assert!(
        none.code == Some(1) && none.err.contains("has no container \"none\", choose one of: main, bad"),
        "{}",
        none.err
    );

    let node = async || open.stdout_of(&["top"]).await;
    agent.until("what it uses is told", async || node().await.lines().any(|line| line.contains(name))).await;
    assert!(node().await.starts_with("NODE"));
    open.node.remove(&pod).await;
}

/// Commands use our stdin and stdout, and we return their exit code.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn commands_in_containers() {
    let Some(open) = NodeWithMainPort::new("commands_in_containers").await else { return };
    let spec = json!({"terminationGracePeriodSeconds": 1, "containers": [shell("main", UNTIL_STOPPED)]});
    let pod = open.node.run(&manifest_of("entered", spec)).await;
    let script = "echo to you; echo to others >&2; exit 7";
    let output = open.call(&["exec", "entered", "--", "sh", "-c", script], None).await;
    assert_eq!((output.code, output.out.as_str(), output.err.as_str()), (Some(7), "to you\n", "to others\n"));
    let output = open.call(&["exec", "-i", "entered", "--", "sh", "-c", "cat; echo end"], Some("a\nb")).await;
    assert_eq!(
        (output.code, output.out.as_str(), output.err.as_str()),
        (Some(0), "a\nbend\n", ""),
        "standard input ends"
    );
    let output =
        open.call(&["exec", "-it", "entered", "--", "sh", "-c", "test -t 0 && echo tty; cat"], Some("x")).await;
    assert_eq!((output.code, output.out.as_str()), (Some(0), "x"), "{}", output.err);
    assert!(output.err.contains("not a terminal"), "{}", output.err);
    // A reader that closes the pipe early is no failure; a terminal's settings are restored.
    let berth = |args: &[&str]| {
        let command = open.command(args);
        let words = std::iter::once(command.as_std().get_program()).chain(command.as_std().get_args());
        let quoted: Vec<String> = words.map(|word| format!("'{}'", word.to_string_lossy())).collect();
        quoted.join(" ")
    };
    let sh = async |script: String| {
        let output = Command::new("bash").args(["-c", &script]).stdin(Stdio::null()).output();
        let output = tokio::time::timeout(PATIENCE, output).await.expect("it ends").expect("a shell");
        let text = |bytes: &[u8]| String::from_utf8_lossy(bytes).into_owned();
        CommandOutput { code: output.status.code(), out: text(&output.stdout), err: text(&output.stderr) }
    };
    let endless = berth(&["exec", "entered", "--", "yes"]);
    let output = sh(format!("set -o pipefail; {endless} | head -n 1")).await;
    assert_eq!((output.code, output.out.as_str(), output.err.as_str()), (Some(0), "y\n", ""));
    let inside = berth(&["exec", "-it", "entered", "--", "sh", "-c", "test -t 0 && test -t 1 && echo both; exit 4"]);
    let session = open.port.path("session.sh");
    let script = format!(
        "before=$(stty -g)\n{inside}\ncode=$?\ntest \"$before\" = \"$(stty -g)\" && echo restored\nexit $code\n"
    );
    std::fs::write(&session, script).expect("written");
    let output = sh(format!("script -qec 'sh {}' /dev/null", session.display())).await;
    assert!(
        output.code == Some(4) && output.out.contains("both") && output.out.contains("restored"),
        "{} {}",
        output.out,
        output.err
    );
    let output = open.call(&["exec", "entered", "--", "/no/such/program"], None).await;
    assert!(output.code != Some(0) && !output.err.is_empty(), "{:?} {}", output.code, output.err);
    open.node.remove(&pod).await;
}

/// A followed log arrives as it is written, until the container exits.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_log_that_is_followed() {
    let Some(open) = NodeWithMainPort::new("a_log_that_is_followed").await else { return };
    let script = "echo first; until test -e /go; do sleep 0.1; done; echo second; exit 0";
    let spec = json!({"restartPolicy": "Never", "terminationGracePeriodSeconds": 1,
                      "containers": [shell("main", script)]});
    open.node.home.put_pod(&manifest_of("told", spec));
    let runs = |pod: &Value| container(pod, "main").pointer("/state/running").is_some();
    let pod = open.node.agent.until_pod("told", "it runs", runs).await;
    let mut following = open.command(&["logs", "-f", "told"]).spawn().expect("it starts");
    let mut out = BufReader::new(following.stdout.take().expect("piped"));
    let mut log = String::new();
    let first = tokio::time::timeout(PATIENCE, out.read_line(&mut log)).await.expect("it comes");
    assert!(first.is_ok() && log == "first\n", "{log:?} {first:?}");
    assert_eq!(open.call(&["exec", "told", "--", "touch", "/go"], None).await.code, Some(0));
    tokio::time::timeout(PATIENCE, out.read_to_string(&mut log)).await.expect("it ends").expect("text");
    let ended = tokio::time::timeout(PATIENCE, following.wait_with_output()).await.expect("it ends").expect("output");
    assert!(ended.status.success() && log == "first\nsecond\n", "{log:?} {ended:?}");
    open.node.remove(&pod).await;
}
