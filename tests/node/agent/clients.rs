//! `berth pods`, `why`, `devices`, `logs`, and `top` against a real agent on the scripted runtime.
//!
//! With the certificate that a standalone node creates for its administrator, and with invalid credentials. Commands
//! that need containers are in `tests/real/commands.rs`.

use std::{fs, path::Path, process::Stdio};

use serde_json::{Value, json};
use tokio::process::Command;

use crate::agent::ScriptedServer;
use berth_proto::device_plugin::DevicePluginOptions;
use berth_testkit::{
    device_plugin::{SamplePlugin, healthy},
    process::{Agent, BinaryName, Home, PATIENCE, container, manifest, manifest_of, skips},
    reservation::free_ports,
    scripted_cri::Fault,
};

/// A standalone node with an open main port.
struct StandaloneNode {
    runtime: ScriptedServer,
    home: Home,
    agent: Agent,
    port: u16,
    certificates: tempfile::TempDir,
}

impl StandaloneNode {
    async fn new() -> Self {
        Self::prepared(|_| {}).await
    }

    /// Starts the agent once `prepare` has written files into its home.
    async fn prepared(prepare: impl FnOnce(&Home)) -> Self {
        let (runtime, certificates) = (ScriptedServer::new().await, tempfile::tempdir().expect("a folder"));
        let [port] = free_ports();
        let flag = format!("--cert-dir={}", certificates.path().display());
        let home = runtime.home().binary_name(BinaryName::Berth).flag(flag).with(json!({
            "enableServer": true, "port": port, "authentication": null, "authorization": null,
        }));
        prepare(&home);
        let agent = home.start().await;
        agent.until_log("List the pods with this command").await;
        Self { runtime, home, agent, port, certificates }
    }

    async fn call(&self, args: &[&str]) -> CommandOutput {
        call(self.port, self.certificates.path(), args).await
    }

    async fn json(&self, args: &[&str]) -> Value {
        let output = self.call(&[args, &["-o", "json"]].concat()).await;
        assert_eq!(output.code, Some(0), "{args:?}: {}", output.err);
        serde_json::from_str(&output.out).expect("JSON")
    }
}

/// Result of a command.
#[derive(Debug)]
struct CommandOutput {
    code: Option<i32>,
    out: String,
    err: String,
}

async fn call(port: u16, certificates: &Path, args: &[&str]) -> CommandOutput {
    let (name, rest) = args.split_first().expect("a command");
    let mut command = Command::new(env!("CARGO_BIN_EXE_berth"));
    command.args([*name, "--server", &format!("127.0.0.1:{port}")]).arg("--cert-dir").arg(certificates).args(rest);
    command.env_remove("BERTH_SERVER").env_remove("BERTH_CERT_DIR").stdin(Stdio::null()).kill_on_drop(true);
    let output = tokio::time::timeout(PATIENCE, command.output()).await.expect("it ends").expect("it starts");
    let text = |bytes: &[u8]| String::from_utf8_lossy(bytes).into_owned();
    CommandOutput { code: output.status.code(), out: text(&output.stdout), err: text(&output.stderr) }
}

/// The administrator's certificate is found where the agent created it; no other argument is needed.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn the_local_administrator_needs_no_credential_flags() {
    if skips("the_local_administrator_needs_no_credential_flags") {
        return;
    }
    let alone = StandaloneNode::new().await;
    let gate = Fault::Error(tonic::Code::Unknown, "no network for it".to_owned());
    alone.runtime.cri.fault("run_podsandbox", "homeless", gate, None);
    let gated = json!({"containers": [{"name": "main"}], "readinessGates": [{"conditionType": "example.com/up"}]});
    alone.home.put_pod(&manifest_of("gated", gated));
    for name in ["web", "homeless"] {
        alone.home.put_pod(&manifest(name));
    }
    alone.agent.until_ready("web").await;

    let table = alone.call(&["pods", "-A"]).await;
    assert!(table.code == Some(0) && table.out.contains("web-test-node") && !table.out.contains('\u{1b}'), "{table:?}");
    assert_eq!(alone.json(&["pods", "-n", "nobody"]).await["items"], json!([]));

    // The wait of a pod spans several attempts, and so does its count.
    let waits = async |pod: &str| alone.json(&["why", pod]).await["waits"].clone();
    alone
        .agent
        .until("the sandbox's error is told", async || {
            alone.json(&["why", "homeless"]).await["errors"][0]["text"]
                .as_str()
                .is_some_and(|text| text.contains("no network for it"))
        })
        .await;
    alone
        .agent
        .until("the next try is told", async || {
            let wait = waits("homeless").await;
            wait["stage"] == "retry of RunPodSandbox" && wait["reason"] == "retry"
        })
        .await;
    alone
        .agent
        .until("the gate is told", async || waits("gated").await["stage"] == "readiness gate example.com/up")
        .await;
    let series = "berth_pod_waiting_seconds{reason=\"gate\"}";
    alone.agent.until("the gate is counted", async || alone.agent.metric(series).await.is_some()).await;
    alone.agent.until("nothing is waited for", async || waits("web").await.is_null()).await;

    // JSON output contains the whole summary, filtered by the given namespace.
    let whole = alone.json(&["top"]).await;
    assert!(whole["node"]["memory"]["availableBytes"].is_number() && whole["node"]["fs"].is_object(), "{whole:#}");
    assert_eq!(alone.json(&["top", "-n", "nobody"]).await["pods"], json!([]));
    assert_eq!(alone.json(&["devices"]).await, json!({"devices": []}));
}

/// After a restart of the agent, `why` names the device plugin that a pod waits for, and `devices` what the pod gets.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_pod_that_waits_for_its_device_plugin_is_explained() {
    if skips("a_pod_that_waits_for_its_device_plugin_is_explained") {
        return;
    }
    // A checkpoint of kubelet that names the resource.
    let data = r#"{"PodDeviceEntries":null,"RegisteredDevices":{"example.com/res":["dev1","dev2"]}}"#;
    let limits = json!({"limits": {"example.com/res": "1"}});
    let pod = manifest_of("late", json!({"containers": [{"name": "main", "resources": limits}]}));
    let alone = StandaloneNode::prepared(|home| {
        let directory = home.path().join("device-plugins");
        fs::create_dir(&directory).expect("a directory");
        let content = format!(r#"{{"Data":{data},"Checksum":2068760492}}"#);
        fs::write(directory.join("kubelet_internal_checkpoint"), content).expect("written");
        home.put_pod(&pod);
    })
    .await;
    let message = "waiting for device plugin example.com/res to register";
    let reason = json!({"reason": "WaitingForDevicePlugin", "message": message});
    let waits = |pod: &Value| container(pod, "main")["state"]["waiting"] == reason;
    alone.agent.until_pod("late", "waiting for its device plugin", waits).await;
    let why = alone.json(&["why", "late"]).await;
    assert_eq!(why["containers"][0]["reason"], "WaitingForDevicePlugin", "{why:#}");
    assert_eq!((&why["life"], &why["waits"]["reason"]), (&json!("admission"), &json!("devices")), "{why:#}");
    assert!(alone.call(&["why", "late"]).await.out.contains(message));

    let directory = alone.home.path().join("device-plugins");
    let plugin = SamplePlugin::start(&directory, "res.sock", "example.com/res", DevicePluginOptions::default());
    plugin.set_devices(vec![healthy("dev1"), healthy("dev2")]);
    plugin.register(&directory.join("kubelet.sock")).await.expect("registered");
    alone.agent.until_ready("late").await;
    let devices = alone.json(&["devices"]).await;
    let owners: Vec<(&Value, &Value)> = (devices["devices"].as_array().expect("a list").iter())
        .map(|device| (&device["id"], &device["assignedTo"][0]["pod"]))
        .collect();
    assert_eq!(owners, [(&json!("dev1"), &json!("late-test-node")), (&json!("dev2"), &Value::Null)], "{devices:#}");
}

/// An error is one line and an exit code: 1 for a failure, 2 for a usage error.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn failures_are_one_line_and_an_exit_code() {
    if skips("failures_are_one_line_and_an_exit_code") {
        return;
    }
    let alone = StandaloneNode::new().await;
    alone.home.put_pod(&manifest("web"));
    alone.agent.until_ready("web").await;
    for (args, code, words) in [
        (&["why", "nobody"][..], 1, "pod \"nobody\" not found on this node"),
        (&["why", "-n", "x", "y/web"], 1, "but --namespace is \"x\""),
        (&["why", "default/we b"], 1, "not found on this node"),
        (&["logs", "web", "-c", "none"], 1, "has no container \"none\""),
        (&["logs", "web", "--since", "5x"], 2, "unknown unit"),
        (&["logs", "web", "--tail=-2"], 2, "--tail"),
        (&["pods", "-o", "yaml"], 2, "possible values"),
        (&["pods", "-A", "-n", "x"], 2, "cannot be used with"),
        (&["why"], 2, "required"),
    ] {
        let output = alone.call(args).await;
        assert!(
            output.code == Some(code) && output.err.contains(words) && output.out.is_empty(),
            "{args:?}: {output:?}"
        );
    }

    // Certificates of another node: neither side trusts the other.
    let other = tempfile::tempdir().expect("a folder");
    let output = call(alone.port, other.path(), &["pods"]).await;
    assert!(output.code == Some(1) && output.err.contains("check that --cert-dir is the agent's"), "{output:?}");
    let stranger = StandaloneNode::new().await;
    let output = call(alone.port, stranger.certificates.path(), &["pods"]).await;
    assert!(output.code == Some(1) && output.err.contains("the server's certificate is not the node's"), "{output:?}");
    for file in ["berth-admin.crt", "berth-admin.key"] {
        std::fs::copy(stranger.certificates.path().join(file), other.path().join(file)).expect("copied");
    }
    std::fs::copy(alone.certificates.path().join("kubelet.crt"), other.path().join("kubelet.crt")).expect("copied");
    let output = call(alone.port, other.path(), &["pods"]).await;
    assert!(output.code == Some(1) && output.err.contains("certificate") && output.out.is_empty(), "{output:?}");

    // No agent is running.
    let StandaloneNode { runtime: _runtime, home: _home, agent, port, certificates } = alone;
    drop(agent);
    let output = call(port, certificates.path(), &["pods"]).await;
    assert!(output.code == Some(1) && output.err.contains("cannot connect to the node at 127.0.0.1:"), "{output:?}");
}
