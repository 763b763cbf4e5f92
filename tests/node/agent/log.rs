//! Log output of the agent process: klog lines, JSON, and flushing of buffers.

use serde_json::{Value, json};

use crate::agent::ScriptedServer;
use berth_testkit::{
    process::{manifest, skips},
    scripted_cri::Fault,
};

/// Causes the events that are logged with the most fields.
async fn eventful(runtime: &ScriptedServer) {
    let refusal = Fault::Error(tonic::Code::Unknown, "not\nso \"simple\"".into());
    runtime.cri.fault("create_container", "", refusal, Some(1));
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn every_line_is_json() {
    if skips("every_line_is_json") {
        return;
    }
    // AC-01-41, AC-08-25
    let runtime = ScriptedServer::new().await;
    eventful(&runtime).await;
    let home = runtime.home().flag("-v=6").flag("--logging-format=json");
    home.put_pod(&manifest("one"));
    home.put("broken.yaml", "{");
    let agent = home.start().await;
    agent.until_ready("one").await;
    let log = agent.whole_log();
    for line in log.lines() {
        let record: Value = serde_json::from_str(line).unwrap_or_else(|error| panic!("{error}: {line}"));
        let known = record["ts"].is_f64() && record["caller"].is_string() && record["msg"].is_string();
        assert!(known, "{line}");
        assert!(record["pod"].is_null() || record["pod"]["name"].is_string(), "{line}");
    }
    for text in ["FLAG: --", "Kubelet version", "Started kubelet", "Event occurred"] {
        assert!(log.contains(text), "{text} is not there");
    }
}

/// `Lmmdd hh:mm:ss.uuuuuu PPPPPPP file:line] `, or the continuation of a value with newlines.
fn is_klog(line: &str) -> bool {
    let mut parts = line.split_ascii_whitespace();
    let (Some(first), Some(time)) = (parts.next(), parts.next()) else { return line.trim() == ">" };
    let is_head = first.len() == 5
        && first.starts_with(['I', 'W', 'E', 'F'])
        && first.get(1..).is_some_and(|date| date.bytes().all(|byte| byte.is_ascii_digit()));
    is_head && time.len() == 15 && line.contains("] ") || line.starts_with('\t') || line.starts_with(" >")
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn every_line_is_klogs() {
    if skips("every_line_is_klogs") {
        return;
    }
    let runtime = ScriptedServer::new().await;
    eventful(&runtime).await;
    let home = runtime.home().flag("-v=4");
    home.put_pod(&manifest("one"));
    home.put("broken.yaml", "{");
    let agent = home.start().await;
    agent.until_ready("one").await;
    let log = agent.whole_log();
    let strange: Vec<&str> = log.lines().filter(|line| !is_klog(line) && !line.starts_with("Flag --")).collect();
    assert!(strange.is_empty(), "{strange:#?}");
    let event = agent.until_log("reason=\"Starting\"").await;
    assert!(event.contains("\"Event occurred\"") && event.contains("kind=\"Node\""), "{event}");
    assert!(event.contains("object=\"test-node\"") && event.contains("message=\"Starting kubelet.\""), "{event}");
    if !std::path::Path::new("/sys/fs/cgroup/cgroup.controllers").exists() {
        agent.until_log("reason=\"CgroupV1\"").await;
    }
}

/// A buffer that never fills is flushed every flush period and at exit.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_buffered_log_is_flushed() {
    if skips("a_buffered_log_is_flushed") {
        return;
    }
    let runtime = ScriptedServer::new().await;
    let options = json!({"text": {"splitStream": true, "infoBufferSize": "8Mi"}});
    let gates = json!({"LoggingAlphaOptions": true});
    let logging = |period| json!({"logging": {"flushFrequency": period, "options": options}, "featureGates": gates});
    let home = runtime.home().with(logging("200ms"));
    let agent = home.start().await;
    agent.until_log("Started kubelet").await;

    let home = runtime.home().with(logging("1h"));
    let mut agent = home.start().await;
    agent.signal(nix::sys::signal::Signal::SIGTERM);
    agent.end().await;
    assert!(agent.log().contains("Stopping; pods keep running"), "{}", agent.log());
}
