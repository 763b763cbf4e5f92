//! Graceful node shutdown by logind signals: pod order, inhibitor lock, and rejection of new pods.
//!
//! A fake logind runs on a private bus.

use std::{
    collections::HashMap,
    fs::File,
    io::Read,
    os::unix::fs::PermissionsExt,
    path::PathBuf,
    process::{Child, Command, Stdio},
    sync::{Arc, Mutex},
    time::Duration,
};

use berth_proto::cri::ContainerState;
use nix::sys::signal::Signal;
use serde_json::{Value, json};
use tokio::{
    io::{AsyncReadExt, AsyncWriteExt},
    net::UnixStream,
    task::JoinHandle,
};
use tokio_stream::StreamExt;
use zbus::{Connection, Message, MessageStream, Variant, connection::Builder};

use crate::agent::ScriptedServer;
use berth_testkit::{
    process::{Home, PATIENCE, condition, manifest_of, skips},
    scripted_cri::Behaviour,
};

const OBJECT: &str = "/org/freedesktop/login1";
const MANAGER: &str = "org.freedesktop.login1.Manager";
const CONFIG: &str = r#"<busconfig><type>system</type><listen>unix:path=SOCKET</listen><policy context="default">
<allow send_destination="*" eavesdrop="true"/><allow eavesdrop="true"/><allow own="*"/></policy></busconfig>"#;

/// A private D-Bus daemon; killed when dropped.
struct Bus {
    dir: tempfile::TempDir,
    daemon: Child,
}

impl Bus {
    /// Starts a bus; `None`, with a report, if this machine has no D-Bus.
    async fn start(test: &str) -> Option<Self> {
        let dir = tempfile::tempdir().expect("a folder");
        let config = CONFIG.replace("SOCKET", &dir.path().join("bus").display().to_string());
        std::fs::write(dir.path().join("bus.conf"), config).expect("written");
        let Some(daemon) = daemon(&dir).await else {
            assert!(std::env::var_os("CI").is_none(), "{test} needs dbus-daemon");
            println!("skipped: {test}: dbus-daemon is not installed");
            return None;
        };
        Some(Self { dir, daemon })
    }

    /// Stops and starts the bus.
    async fn restart(&mut self) {
        self.end();
        std::fs::remove_file(self.socket()).expect("it was there");
        self.daemon = daemon(&self.dir).await.expect("as before");
    }

    fn socket(&self) -> PathBuf {
        self.dir.path().join("bus")
    }

    fn end(&mut self) {
        let _ = self.daemon.kill(); // it may have exited
        let _ = self.daemon.wait();
    }
}

impl Drop for Bus {
    fn drop(&mut self) {
        self.end();
    }
}

/// Starts a listening bus; `None` if `dbus-daemon` is missing.
async fn daemon(dir: &tempfile::TempDir) -> Option<Child> {
    let mut command = Command::new("dbus-daemon");
    command.args(["--nofork", "--nopidfile", "--nosyslog", "--config-file"]).arg(dir.path().join("bus.conf"));
    let daemon = command.stderr(Stdio::null()).spawn().ok()?;
    let listens = async {
        while UnixStream::connect(dir.path().join("bus")).await.is_err() {
            tokio::time::sleep(Duration::from_millis(5)).await;
        }
    };
    tokio::time::timeout(PATIENCE, listens).await.expect("the bus listens");
    Some(daemon)
}

/// A fake logind.
struct Logind {
    connection: Connection,
    state: Arc<State>,
    serving: JoinHandle<()>,
}

#[derive(Default)]
struct State {
    /// Our ends of the inhibitor locks.
    locks: Mutex<Vec<File>>,
    /// For each lock, whether the previous one was still held when it was taken.
    handed_over: Mutex<Vec<bool>>,
    is_preparing: Mutex<bool>,
    /// Properties without a response.
    silent_on: Mutex<Vec<&'static str>>,
    asked: Mutex<Vec<String>>,
}

impl State {
    fn locks(&self) -> usize {
        self.locks.lock().expect("whole").len()
    }

    /// Whether the latest lock is held.
    fn is_inhibited(&self) -> bool {
        self.locks.lock().expect("whole").last().is_some_and(is_open)
    }

    /// Number of held locks.
    fn open_locks(&self) -> usize {
        self.locks.lock().expect("whole").iter().filter(|lock| is_open(lock)).count()
    }
}

/// A read returns end of file once the holder has closed its end.
fn is_open(mut lock: &File) -> bool {
    matches!(lock.read(&mut [0; 1]), Err(error) if error.kind() == std::io::ErrorKind::WouldBlock)
}

impl Logind {
    async fn on(bus: &Bus) -> Self {
        Self::again(bus, Arc::default()).await
    }

    /// The same logind on another bus: locks survive that.
    async fn again(bus: &Bus, state: Arc<State>) -> Self {
        let socket = UnixStream::connect(bus.socket()).await.expect("a socket").into_std().expect("a socket");
        let connection = Builder::unix_stream(socket).build().await.expect("a connection");
        let messages = MessageStream::from(&connection);
        connection.request_name("org.freedesktop.login1").await.expect("ours");
        let serving = tokio::spawn(serve(messages, connection.clone(), state.clone()));
        Self { connection, state, serving }
    }

    /// Announces or cancels the shutdown.
    async fn prepare(&self, begins: bool) {
        *self.state.is_preparing.lock().expect("whole") = begins;
        let how = HashMap::from([("type", Variant::new("soft-reboot"))]);
        let body = (begins, how);
        let result =
            self.connection.emit_signal(None::<()>, OBJECT, MANAGER, "PrepareForShutdownWithMetadata", &body).await;
        result.expect("sent");
        let result = self.connection.emit_signal(None::<()>, OBJECT, MANAGER, "PrepareForShutdown", &begins).await;
        result.expect("sent");
    }

    fn locks(&self) -> usize {
        self.state.locks()
    }

    /// Whether the latest lock is held.
    fn is_inhibited(&self) -> bool {
        self.state.is_inhibited()
    }
}

impl Drop for Logind {
    fn drop(&mut self) {
        self.serving.abort();
    }
}

async fn serve(mut messages: MessageStream, connection: Connection, state: Arc<State>) {
    while let Some(Ok(message)) = messages.next().await {
        if message.header().message_type() == zbus::message::Type::MethodCall {
            answer(&connection, &state, &message).await;
        }
    }
}

async fn answer(connection: &Connection, state: &State, message: &Message) {
    let (header, body) = (message.header(), message.body());
    let member = header.member().map(|member| member.to_string()).unwrap_or_default();
    match member.as_str() {
        "Get" => {
            let (_, name): (String, String) = body.deserialize().expect("its arguments");
            let preparing = *state.is_preparing.lock().expect("whole");
            if state.silent_on.lock().expect("whole").contains(&name.as_str()) {
                let refused = connection.reply_error(&header, "org.freedesktop.DBus.Error.Failed", &"no");
                return refused.await.expect("sent");
            }
            let value = match name.as_str() {
                "InhibitDelayMaxUSec" => Variant::new(600_000_000_u64),
                "PreparingForShutdown" => Variant::new(preparing),
                other => panic!("unexpected property: {other}"),
            };
            connection.reply(&header, &value).await.expect("sent");
        }
        "Inhibit" => {
            let asked: (String, String, String, String) = body.deserialize().expect("its arguments");
            let (kept, given) = rustix::pipe::pipe_with(rustix::pipe::PipeFlags::NONBLOCK).expect("a pipe");
            state.asked.lock().expect("whole").push(format!("{} {} {}", asked.0, asked.1, asked.3));
            state.handed_over.lock().expect("whole").push(state.is_inhibited());
            connection.reply(&header, &zbus::Fd::from(&given)).await.expect("sent");
            state.locks.lock().expect("whole").push(File::from(kept));
        }
        _ => {} // signals of the bus itself
    }
}

fn home(runtime: &ScriptedServer, bus: &Bus) -> Home {
    let address = format!("unix:path={}", bus.socket().display());
    runtime.home().environment("DBUS_SYSTEM_BUS_ADDRESS", address).with(json!({
        "shutdownGracePeriod": "30s",
        "shutdownGracePeriodCriticalPods": "10s",
    }))
}

fn pod(name: &str, priority: i32) -> Value {
    manifest_of(
        name,
        json!({
            "priority": priority,
            "terminationGracePeriodSeconds": 15,
            "containers": [{"name": "main", "image": "busybox:1"}],
        }),
    )
}

/// AC-05-29, AC-05-30
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn pods_go_before_the_machine_does() {
    let test = "pods_go_before_the_machine_does";
    if skips(test) {
        return;
    }
    let Some(mut bus) = Bus::start(test).await else { return };
    let runtime = ScriptedServer::new().await;
    let home = home(&runtime, &bus);
    home.put_pod(&pod("plain", 0));
    home.put_pod(&pod("critical", 2_000_000_000));
    let agent = home.start().await;
    agent.until_ready("plain").await;
    agent.until_ready("critical").await;
    agent.until_log("Failed to watch for machine shutdown").await;
    let logind = Logind::on(&bus).await;
    agent.until("the lock is held", async || logind.is_inhibited()).await;
    assert_eq!(*logind.state.asked.lock().expect("whole"), ["shutdown kubelet delay"]);

    runtime.cri.clear_calls();
    logind.prepare(true).await;
    agent.until("the lock is let go", async || !logind.is_inhibited()).await;
    let exited = ContainerState::ContainerExited as i32;
    assert!(
        runtime.cri.containers().iter().all(|container| container.state == exited),
        "whoever lets go waits for none"
    );
    assert_eq!(runtime.cri.containers().len(), 2, "what they were can still be read");
    let ended = |pod: &Value| pod["status"]["phase"] == "Failed" && pod["status"]["reason"] == "Terminated";
    for name in ["plain", "critical"] {
        let pod = agent.until_pod(name, "gone with the machine", ended).await;
        assert_eq!(pod["status"]["message"], "Pod was terminated in response to imminent node shutdown.");
        assert_eq!(condition(&pod, "DisruptionTarget"), Some("True"));
    }
    let log = agent.log();
    let killed: Vec<&str> = log.lines().filter(|line| line.contains("killing pod with gracePeriod")).collect();
    let [plain, critical] = killed.as_slice() else { panic!("{killed:?}") };
    assert!(plain.contains("default/plain-") && plain.contains("gracePeriod=15"), "{plain}");
    assert!(critical.contains("default/critical-") && critical.contains("gracePeriod=10"), "{critical}");
    assert_eq!(runtime.cri.count("stop_container"), 2);
    assert_eq!(log.matches("Shutdown manager detected shutdown event").count(), 1, "{log}");
    assert_eq!(log.matches("how=\"soft-reboot\"").count(), 1, "{log}");

    home.put_pod(&pod("late", 0));
    let refused = agent.until_pod("late", "refused", |pod| pod["status"]["reason"] == "NodeShutdown").await;
    assert_eq!(refused["status"]["message"], "Pod was rejected: Pod was rejected as the node is shutting down.");
    let file = home.root().join("graceful_node_shutdown_state");
    assert_eq!(std::fs::metadata(&file).expect("it is there").permissions().mode() & 0o777, 0o644);
    let written = std::fs::read_to_string(file).expect("it is there");
    assert!(written.starts_with("{\"startTime\":\"2") && !written.contains("0001-01-01"), "{written}");
    let start = agent.metric("kubelet_graceful_shutdown_start_time_seconds").await.expect("received");
    let end = agent.metric("kubelet_graceful_shutdown_end_time_seconds").await.expect("received");
    assert!(start > 0.0 && end >= start, "{start} {end}");

    // The shutdown is canceled.
    logind.prepare(false).await;
    agent.until("another lock is held", async || logind.locks() == 2 && logind.is_inhibited()).await;
    home.put_pod(&pod("next", 0));
    agent.until_ready("next").await;

    // The agent reconnects to a bus that is restarted.
    let state = logind.state.clone();
    drop(logind);
    bus.restart().await;
    assert!(state.is_inhibited(), "a lock is no matter of the bus");
    let logind = Logind::again(&bus, state).await;
    agent.until("a lock of the new bus is held", async || logind.locks() == 3 && logind.state.open_locks() == 1).await;
    assert!(logind.is_inhibited());
    assert_eq!(*logind.state.handed_over.lock().expect("whole"), [false, false, true], "none was missing in between");
    assert_eq!(agent.stop().await, Some(0));
}

/// If logind does not confirm the signal, the agent trusts it: the lock is held until the pods have terminated.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_signal_that_cannot_be_checked_is_believed() {
    let test = "a_signal_that_cannot_be_checked_is_believed";
    if skips(test) {
        return;
    }
    let Some(bus) = Bus::start(test).await else { return };
    let runtime = ScriptedServer::new().await;
    let home = home(&runtime, &bus);
    home.put_pod(&pod("plain", 0));
    let slow = Behaviour { stops_after: Some(Duration::from_secs(2)), ..Behaviour::default() };
    runtime.cri.behave("plain-test-node/main", [slow]);
    let logind = Logind::on(&bus).await;
    let agent = home.start().await;
    agent.until_ready("plain").await;
    agent.until("the lock is held", async || logind.is_inhibited()).await;
    logind.state.silent_on.lock().expect("whole").push("PreparingForShutdown");
    logind.prepare(true).await;
    agent.until("the lock is let go", async || !logind.is_inhibited()).await;
    assert_eq!(runtime.cri.running("plain-test-node", "main"), [""; 0], "not before the pod has gone");
    assert_eq!(agent.stop().await, Some(0));
}

/// An agent that starts during the shutdown terminates pods of a previous agent, rather than rejecting them.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn an_agent_that_starts_late_lets_pods_go_that_run() {
    let test = "an_agent_that_starts_late_lets_pods_go_that_run";
    if skips(test) {
        return;
    }
    let Some(bus) = Bus::start(test).await else { return };
    let runtime = ScriptedServer::new().await;
    let home = home(&runtime, &bus);
    home.put_pod(&pod("plain", 0));
    home.put_pod(&pod("critical", 2_000_000_000));
    let logind = Logind::on(&bus).await;
    let agent = home.start().await;
    agent.until_ready("plain").await;
    agent.until_ready("critical").await;
    agent.until("the lock is held", async || logind.is_inhibited()).await;
    assert_eq!(agent.stop().await, Some(0));
    *logind.state.is_preparing.lock().expect("whole") = true;
    let agent = home.start().await;
    agent.until_log("Shutdown manager completed processing shutdown event").await;
    for name in ["plain", "critical"] {
        assert_eq!(runtime.cri.running(&format!("{name}-test-node"), "main"), [""; 0], "{name}");
        agent.until_pod(name, "gone with the machine", |pod| pod["status"]["reason"] == "Terminated").await;
    }
    assert_eq!(logind.locks(), 1, "there is none to be had any more");
    assert_eq!(agent.stop().await, Some(0));
}

/// If configured, a termination signal does the same, without any bus.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_signal_takes_the_pods_along_where_that_is_asked_for() {
    if skips("a_signal_takes_the_pods_along_where_that_is_asked_for") {
        return;
    }
    let runtime = ScriptedServer::new().await;
    let home = runtime
        .home()
        .settings(json!({"shutdown": {"onTermination": true}}))
        .environment("DBUS_SYSTEM_BUS_ADDRESS", "unix:path=/no/such/bus")
        .with(json!({"shutdownGracePeriod": "30s", "shutdownGracePeriodCriticalPods": "10s"}));
    home.put_pod(&pod("plain", 0));
    let mut agent = home.start().await;
    agent.until_ready("plain").await;
    agent.signal(Signal::SIGTERM);
    assert_eq!(agent.end().await.code(), Some(0), "{}", agent.log_end());
    assert_eq!(runtime.cri.running("plain-test-node", "main"), [""; 0]);
}

/// Runs `berth drain`; returns whether it succeeded, and its output.
async fn drain(home: &Home, more: &[&str]) -> (bool, String) {
    let mut command = tokio::process::Command::new(env!("CARGO_BIN_EXE_berth"));
    command.args(["drain", "--root-dir"]).arg(home.root()).args(more);
    let output = tokio::time::timeout(PATIENCE, command.output()).await.expect("it ends").expect("it begins");
    let [out, err] = [output.stdout, output.stderr].map(|text| String::from_utf8(text).expect("text"));
    (output.status.success(), out + &err)
}

/// Response of the drain socket to a request, once the client has shut down its side.
async fn drain_response(home: &Home, question: &[u8]) -> String {
    let mut socket = UnixStream::connect(home.root().join("drain.sock")).await.expect("it is there");
    let _ = socket.write_all(question).await; // the server may close before it has read everything
    let _ = socket.shutdown().await;
    let mut answer = Vec::new();
    let _ = tokio::time::timeout(PATIENCE, socket.read_to_end(&mut answer)).await.expect("it answers");
    String::from_utf8(answer).expect("text")
}

/// Spec 05 §7.7: root drains the node and cancels the drain, without bus or signal.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn pods_stop_on_drain_and_return_on_cancel() {
    if skips("pods_stop_on_drain_and_return_on_cancel") {
        return;
    }
    let runtime = ScriptedServer::new().await;
    let home = runtime
        .home()
        .environment("DBUS_SYSTEM_BUS_ADDRESS", "unix:path=/no/such/bus")
        .with(json!({"shutdownGracePeriod": "30s", "shutdownGracePeriodCriticalPods": "10s"}));
    home.put_pod(&pod("plain", 0));
    home.put_pod(&pod("critical", 2_000_000_000));
    let (went, output) = drain(&home, &[]).await;
    assert!(!went && output.contains("is shutdownGracePeriod"), "{output}");
    let agent = home.start().await;
    agent.until_ready("plain").await;
    agent.until_ready("critical").await;
    let mode = std::fs::metadata(home.root().join("drain.sock")).expect("it is there").permissions().mode();
    assert_eq!(mode & 0o777, 0o600);
    for (question, why) in [
        (&b"reboot\n"[..], "refused unknown request \"reboot\": expected drain or cancel\n"),
        (&b""[..], "refused unknown request \"\": expected drain or cancel\n"),
        (&b"\xff\xfe\n"[..], "refused no request received\n"),
        (&b"cancel\n"[..], "done\n"),
    ] {
        assert_eq!(drain_response(&home, question).await, why);
    }
    assert!(!drain_response(&home, &[b'd'; 1 << 20]).await.contains("done"));
    assert!(runtime.cri.count("stop_container") == 0, "nobody has to go for that");

    let (went, output) = drain(&home, &[]).await;
    let expected = "Stopping pods (timeout 30s)\n\
                    Node drained: no pods are admitted until `berth drain --cancel` or a restart of the \
                    agent\n";
    assert_eq!((went, output.as_str()), (true, expected), "{}", agent.log_end());
    let exited = ContainerState::ContainerExited as i32;
    assert!(runtime.cri.containers().iter().all(|container| container.state == exited), "they have gone");
    let stopped: Vec<_> = runtime.cri.calls().into_iter().filter(|call| call.op == "stop_container").collect();
    let order: Vec<&str> = stopped.iter().map(|call| call.target.as_str()).collect();
    assert!(order.len() == 2 && order[0].starts_with("plain") && order[1].starts_with("critical"), "{order:?}");
    home.put_pod(&pod("late", 0));
    agent.until_pod("late", "refused", |pod| pod["status"]["reason"] == "NodeShutdown").await;

    assert_eq!(drain(&home, &["--cancel"]).await, (true, "Drain cancelled: pods are admitted again\n".to_owned()));
    home.put_pod(&pod("next", 0));
    agent.until_ready("next").await;
    assert_eq!(agent.stop().await, Some(0));
    let (went, output) = drain(&home, &["--cancel"]).await;
    assert!(!went && output.contains("cannot connect to the agent"), "{output}");
}

/// The bus is lost for good during a shutdown: pods terminate in order nevertheless, and the agent exits cleanly.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_bus_that_is_lost_meanwhile_stops_no_shutdown() {
    let test = "a_bus_that_is_lost_meanwhile_stops_no_shutdown";
    if skips(test) {
        return;
    }
    let Some(mut bus) = Bus::start(test).await else { return };
    let runtime = ScriptedServer::new().await;
    let home = home(&runtime, &bus);
    home.put_pod(&pod("plain", 0));
    home.put_pod(&pod("critical", 2_000_000_000));
    let slow = Behaviour { stops_after: Some(Duration::from_secs(3)), ..Behaviour::default() };
    runtime.cri.behave("plain-test-node/main", [slow]);
    let logind = Logind::on(&bus).await;
    let agent = home.start().await;
    agent.until_ready("plain").await;
    agent.until_ready("critical").await;
    agent.until("the lock is held", async || logind.is_inhibited()).await;
    logind.prepare(true).await;
    agent.until("the first pod is stopped", async || runtime.cri.count("stop_container") >= 1).await;
    drop(logind);
    bus.end();
    let ended = |pod: &Value| pod["status"]["phase"] == "Failed" && pod["status"]["reason"] == "Terminated";
    for name in ["plain", "critical"] {
        agent.until_pod(name, "gone with the machine", ended).await;
    }
    agent.until_log("Shutdown manager completed processing shutdown event").await;
    agent.until_log("Failed to watch for machine shutdown").await;
    home.put_pod(&pod("late", 0));
    agent.until_pod("late", "refused as before", |pod| pod["status"]["reason"] == "NodeShutdown").await;
    assert_eq!(agent.stop().await, Some(0));
}
