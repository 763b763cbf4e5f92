//! Container runtime faults at the agent's start and later: missing, restarted, or not a CRI runtime.

use std::time::{Duration, Instant};

use berth_proto::cri::image_service_server::ImageServiceServer;
use serde_json::json;
use tokio::net::UnixListener;
use tokio_stream::wrappers::UnixListenerStream;

use crate::agent::ScriptedServer;
use berth_testkit::{
    process::{container, is_ready, manifest, skips},
    scripted_cri::{Fault, server},
};

/// Asserts that an agent fails to start with this last log line.
async fn refuses(runtime: &ScriptedServer, words: &str) {
    let home = runtime.home().with(json!({"runtimeRequestTimeout": "1s"}));
    let begun = Instant::now();
    let mut agent = home.spawn();
    assert_eq!(agent.end().await.code(), Some(1), "{}", agent.log_end());
    let log = agent.log();
    let last = log.lines().last().unwrap_or_default();
    let prefix = "\"command failed\" err=\"failed to run Kubelet: ";
    assert!(last.contains(prefix) && last.replace("\\\"", "\"").contains(words), "{words}\n{last}");
    assert!(begun.elapsed() < Duration::from_secs(30), "patience has a limit");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn without_a_runtime_it_gives_up() {
    if skips("without_a_runtime_it_gives_up") {
        return;
    }
    let runtime = ScriptedServer::unserved();
    let (endpoint, socket) = (runtime.endpoint(), runtime.socket());
    let words = format!(
        "validate service connection: validate CRI v1 runtime API for endpoint \"{endpoint}\": rpc error: code = \
         Unavailable desc = connection error: desc = \"transport: Error while dialing: dial unix {}: connect: no such \
         file or directory\"",
        socket.display()
    );
    refuses(&runtime, &words).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_runtime_that_comes_late_is_waited_for() {
    if skips("a_runtime_that_comes_late_is_waited_for") {
        return;
    }
    let mut runtime = ScriptedServer::unserved();
    let home = runtime.home();
    home.put_pod(&manifest("one"));
    let mut agent = home.spawn();
    agent.until_log("Waiting for the container runtime's socket").await;
    runtime.serve().await;
    agent.healthy().await;
    agent.until_ready("one").await;
}

/// containerd listens a moment before its CRI service responds.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_runtime_that_is_just_starting_is_waited_for() {
    if skips("a_runtime_that_is_just_starting_is_waited_for") {
        return;
    }
    let runtime = ScriptedServer::new().await;
    for op in ["version", "image_fs_info"] {
        let not_yet = Fault::Error(tonic::Code::Unknown, "server is not initialized yet".to_owned());
        runtime.cri.fault(op, "", not_yet, Some(3));
    }
    let agent = runtime.home().start().await;
    agent.until_log("Waiting for the container runtime").await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn another_service_on_the_socket_is_reported_as_unimplemented() {
    if skips("another_service_on_the_socket_is_reported_as_unimplemented") {
        return;
    }
    let runtime = ScriptedServer::unserved();
    let listener = UnixListener::bind(runtime.socket()).expect("a socket");
    let images = ImageServiceServer::new(server::Rpc(runtime.cri.clone()));
    let serving =
        tonic::transport::Server::builder().add_service(images).serve_with_incoming(UnixListenerStream::new(listener));
    let serving = tokio::spawn(serving);
    let words = "rpc error: code = Unimplemented desc = unknown service runtime.v1.RuntimeService";
    refuses(&runtime, words).await;
    serving.abort();
}

/// A server that does not speak gRPC, and one that never responds.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_stranger_on_the_socket_does_not_hold_it_up() {
    if skips("a_stranger_on_the_socket_does_not_hold_it_up") {
        return;
    }
    for greeting in [&b"SSH-2.0-OpenSSH_9.0\r\n"[..], b""] {
        let runtime = ScriptedServer::unserved();
        let listener = UnixListener::bind(runtime.socket()).expect("a socket");
        let stranger = tokio::spawn(async move {
            let mut connections = Vec::new();
            while let Ok((mut stream, _)) = listener.accept().await {
                use tokio::io::AsyncWriteExt;
                let _ = stream.write_all(greeting).await; // the client may have disconnected
                connections.push(stream);
            }
        });
        refuses(&runtime, "validate service connection: validate CRI v1 runtime API for endpoint").await;
        stranger.abort();
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn another_version_of_the_contract_is_refused() {
    if skips("another_version_of_the_contract_is_refused") {
        return;
    }
    let runtime = ScriptedServer::new().await;
    runtime.cri.set_version("0.2.0");
    refuses(&runtime, "runtime api version is not supported").await;
}

/// The agent sets the kernel parameters that pods rely on; afterwards, one that only checks them starts too.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn the_kernel_is_set_up_for_pods() {
    if skips("the_kernel_is_set_up_for_pods") {
        return;
    }
    let runtime = ScriptedServer::new().await;
    let setting =
        |name: &str| std::fs::read_to_string(format!("/proc/sys/{name}")).expect("readable").trim().to_owned();
    let agent = runtime.home().start().await;
    for (name, value) in [("vm/overcommit_memory", "1"), ("vm/panic_on_oom", "0"), ("kernel/panic", "10")] {
        assert_eq!(setting(name), value, "{name}");
    }
    drop(agent);
    runtime.home().with(json!({"protectKernelDefaults": true})).start().await;
}

/// A runtime without RuntimeConfig: the configured cgroup driver stays, and a metric reports it.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn an_older_runtime_keeps_the_configured_driver() {
    if skips("an_older_runtime_keeps_the_configured_driver") {
        return;
    }
    // AC-01-37, AC-06-2
    let runtime = ScriptedServer::new().await;
    let unknown = "unknown method RuntimeConfig for service runtime.v1.RuntimeService".to_owned();
    runtime.cri.fault("runtime_config", "", Fault::Error(tonic::Code::Unimplemented, unknown), None);
    let agent = runtime.home().start().await;
    agent.until_log("Falling back to using cgroupDriver from kubelet config.").await;
    assert_eq!(agent.metric("kubelet_cri_losing_support{version=\"1.37.0\"}").await, Some(1.0));
}

/// The runtime is down for a while: running pods keep their status, and missed changes are synced afterwards.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_runtime_that_goes_and_returns() {
    if skips("a_runtime_that_goes_and_returns") {
        return;
    }
    let mut runtime = ScriptedServer::new().await;
    let home = runtime.home();
    for name in ["stays", "dies", "goes"] {
        home.put_pod(&manifest(name));
    }
    let agent = home.start().await;
    let before = agent.until_ready("stays").await;
    for name in ["dies", "goes"] {
        agent.until_ready(name).await;
    }

    runtime.vanish().await;
    home.put_pod(&manifest("comes"));
    home.remove("goes.json");
    for id in runtime.cri.running("dies-test-node", "main") {
        runtime.cri.kill(&id, 7, "");
    }
    agent.until_pod("comes", "there", |pod| pod["status"]["phase"] == "Pending").await;
    agent.until_log("connect: no such file or directory").await;
    let shown = agent.pod("stays").await.expect("shown");
    assert!(is_ready(&shown), "{shown:#}");
    assert_eq!(agent.healthz("/healthz").await.map(|answer| answer.status), Some(200));

    runtime.serve().await;
    agent.until_ready("comes").await;
    let pod = agent.until_pod("dies", "restarted", |pod| container(pod, "main")["restartCount"] == 1).await;
    assert_eq!(container(&pod, "main")["lastState"]["terminated"]["exitCode"], 7);
    agent.until_gone("goes").await;
    let after = agent.until_ready("stays").await;
    assert_eq!(container(&after, "main"), container(&before, "main"));
    runtime.until("three sandboxes are left", &agent, |cri| cri.sandboxes().len() == 3).await;
    assert!(runtime.cri.violations().is_empty());
}

/// The configured pod CIDR reaches the runtime before the first sandbox, and an empty one is not sent.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn the_configured_pod_cidr_precedes_the_first_pod() {
    if skips("the_configured_pod_cidr_precedes_the_first_pod") {
        return;
    }
    let ops = ["update_runtime_config", "run_podsandbox"];
    for (cidr, expected) in [("10.9.0.0/24,fd00:9::/64", &ops[..]), ("", &ops[1..])] {
        let runtime = ScriptedServer::new().await;
        let home = runtime.home().with(json!({"podCIDR": cidr}));
        home.put_pod(&manifest("one"));
        let agent = home.start().await;
        agent.until_ready("one").await;
        let calls = runtime.cri.calls();
        let seen: Vec<&str> = calls.iter().map(|call| call.op).filter(|op| ops.contains(op)).collect();
        assert_eq!(seen, expected, "{cidr}");
        assert!(runtime.cri.targets("update_runtime_config").iter().all(|target| target == cidr));
        assert!(!agent.log().contains("Setting has no effect"), "{}", agent.log_end());
    }
}

/// A runtime that does not accept the pod CIDR delays the first pod only briefly, and gets the CIDR again.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_pod_cidr_that_is_not_accepted_is_sent_again() {
    if skips("a_pod_cidr_that_is_not_accepted_is_sent_again") {
        return;
    }
    for fault in [Fault::Hang, Fault::Error(tonic::Code::Unknown, "not yet".to_owned())] {
        let runtime = ScriptedServer::new().await;
        runtime.cri.fault("update_runtime_config", "", fault, None);
        let home = runtime.home().with(json!({"podCIDR": "10.9.0.0/24"}));
        home.put_pod(&manifest("one"));
        let agent = home.start().await;
        agent.until_ready("one").await;
        assert!(!agent.log().contains("Updated pod CIDR of the runtime"), "{}", agent.log_end());
        runtime.cri.heal();
        runtime.cri.restart(); // ends the call that hangs
        agent.until_log("Updated pod CIDR of the runtime").await;
    }
}
