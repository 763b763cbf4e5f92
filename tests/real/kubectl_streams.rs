//! kubectl exec, attach, cp, and port-forward with real kubectl, over WebSocket and SPDY.
//!
//! WebSocket streams end in the agent; SPDY is passed through.

use std::{fs, os::unix::fs::PermissionsExt, path::Path, process::Stdio, time::Duration};

use serde_json::{Value, json};
use tokio::{
    io::{AsyncReadExt, AsyncWriteExt},
    net::TcpStream,
    process::Command,
    time::timeout,
};

use crate::{
    kubectl::{Cluster, PATIENCE, cluster, code_and_output, ended},
    node::{UNTIL_STOPPED, name_of, shell},
};
use berth_testkit::{
    process::{self, manifest_of},
    reservation,
};

/// kubectl's switches for its two streaming protocols.
const WEB_SOCKETS: [&str; 2] = ["KUBECTL_REMOTE_COMMAND_WEBSOCKETS", "KUBECTL_PORT_FORWARD_WEBSOCKETS"];

/// A streaming protocol.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum StreamProtocol {
    WebSocket,
    Spdy,
}

const WAYS: [StreamProtocol; 2] = [StreamProtocol::WebSocket, StreamProtocol::Spdy];

impl StreamProtocol {
    fn set(self, command: &mut Command) {
        for name in WEB_SOCKETS {
            command.env(name, if self == Self::WebSocket { "true" } else { "false" });
        }
    }
}

/// A cluster, and the protocol that kubectl uses.
struct KubectlSession<'a> {
    cluster: &'a Cluster,
    way: StreamProtocol,
}

impl KubectlSession<'_> {
    fn kubectl(&self, args: &[&str]) -> Command {
        let mut command = self.cluster.kubectl(args);
        self.way.set(&mut command);
        command
    }

    /// Exit code, stdout, and stderr of a call.
    async fn call(&self, args: &[&str], input: Option<&[u8]>) -> (Option<i32>, String, String) {
        let (code, out, err) = code_and_output(&ended(self.kubectl(args), input).await);
        // kubectl starts reading before it has created its streams. The first message, an empty one that confirms the
        // stream (as the reference sends it), may find none, and kubectl prints a warning.
        let err = err
            .lines()
            .filter(|line| !line.contains("Unknown stream id"))
            .fold(String::new(), |text, line| text + line + "\n");
        (code, out, err)
    }

    /// Number of streams that ended in the agent so far.
    async fn translated(&self, what: &str) -> f64 {
        let series = format!("kubelet_websocket_streaming_requests_total{{subresource=\"{what}\"}}");
        self.cluster.node.agent.metric(&series).await.unwrap_or_default()
    }
}

/// AC-04b-S5, AC-04b-S6
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn kubectl_runs_commands() {
    let Some(cluster) = cluster("kubectl_runs_commands").await else { return };
    let containers = [shell("main", UNTIL_STOPPED), shell("other", UNTIL_STOPPED)];
    let spec = json!({"terminationGracePeriodSeconds": 1, "containers": containers});
    let pod = cluster.node.run(&manifest_of("commands", spec)).await;
    for way in WAYS {
        let road = KubectlSession { cluster: &cluster, way };
        let before = road.translated("exec").await;
        commands(&road, name_of(&pod)).await;
        terminal(&road, name_of(&pod)).await;
        copies(&road, name_of(&pod)).await;
        let ended_here = road.translated("exec").await - before;
        assert_eq!(ended_here > 0.0, way == StreamProtocol::WebSocket, "{way:?}: {ended_here}");
    }
    // Arguments of commands must not be logged.
    let log = cluster.node.agent.log();
    assert!(log.contains("/exec/default/"), "requests are logged");
    assert!(!log.contains("s3cret"), "{}", log.lines().find(|line| line.contains("s3cret")).unwrap_or_default());
    a_container_that_dies(&cluster, &pod).await;
    assert_eq!(cluster.node.agent.metric(INFLIGHT).await.unwrap_or_default(), 0.0, "no stream is left");
    cluster.node.until_nothing_is_left(&pod).await;
}

const INFLIGHT: &str =
    r#"kubelet_http_inflight_requests{long_running="true",method="GET",path="exec",server_type="readwrite"}"#;

async fn commands(road: &KubectlSession<'_>, pod: &str) {
    let (code, out, err) = road.call(&["exec", pod, "-c", "main", "--", "echo", "s3cret", "a  b", "ü"], None).await;
    assert_eq!((code, out.as_str()), (Some(0), "s3cret a  b ü\n"), "{:?}: {err}", road.way);
    let script = "echo out; echo no >&2; exit 7";
    let (code, out, err) = road.call(&["exec", pod, "-c", "other", "--", "sh", "-c", script], None).await;
    assert_eq!((code, out.as_str()), (Some(7), "out\n"), "{:?}: {err}", road.way);
    assert!(err.starts_with("no\n") && err.contains("command terminated with exit code 7"), "{err}");

    // More than any buffer, in both directions; the end of the input ends the command.
    let lots: Vec<u8> = (0..3_000_000_u32).flat_map(|n| n.to_le_bytes()).collect();
    let output = ended(road.kubectl(&["exec", "-i", pod, "-c", "main", "--", "cat"]), Some(&lots)).await;
    assert!(output.status.success() && output.stdout == lots, "{:?}: {} bytes", road.way, output.stdout.len());
    // A command that ignores its input. Only a little input: containerd's SPDY has one queue for all streams, and stops
    // reading when 50 frames of one wait for a process that has exited.
    let some = &lots[..40_000];
    let (code, out, err) = road.call(&["exec", "-i", pod, "-c", "main", "--", "echo", "done"], Some(some)).await;
    assert_eq!((code, out.as_str()), (Some(0), "done\n"), "{:?}: {err}", road.way);

    let (code, _, err) = road.call(&["exec", pod, "-c", "main", "--", "nothing-of-that-name"], None).await;
    assert!(code.is_some_and(|code| code != 0) && err.contains("nothing-of-that-name"), "{code:?}: {err}");
    let (code, _, err) = road.call(&["exec", pod, "-c", "nobody", "--", "true"], None).await;
    assert!(code == Some(1) && err.contains("nobody"), "{code:?}: {err}");
}

/// Both ends are terminals, and the size is set before the command starts.
async fn terminal(road: &KubectlSession<'_>, pod: &str) {
    let command = road.kubectl(&["exec", "-it", pod, "-c", "main", "--", "sh", "-c", TERMINAL]);
    let words: Vec<String> = command.as_std().get_args().map(|word| quoted(&word.to_string_lossy())).collect();
    let folder = tempfile::tempdir().expect("a folder");
    let go = folder.path().join("go");
    // Resizing a terminal signals its foreground process.
    let script = format!(
        "stty rows 33 cols 101; (until [ -e {} ]; do sleep 0.05; done; stty -F /dev/tty rows 44 cols 122) & exec kubectl {}",
        go.display(),
        words.join(" ")
    );
    let mut whole = Command::new("script");
    whole.args(["--quiet", "--return", "--command", &script, "/dev/null"]);
    whole.env("KUBECONFIG", "/dev/null").env("HOME", folder.path()).env("SHELL", "/bin/sh").kill_on_drop(true);
    whole.stdin(Stdio::piped()).stdout(Stdio::piped());
    road.way.set(&mut whole);
    let mut child = whole.spawn().expect("script runs");
    let (mut keys, mut screen) = (child.stdin.take().expect("keys"), child.stdout.take().expect("a screen"));
    let mut shown = String::new();
    until(&mut screen, &mut shown, "size 33 101").await;
    fs::write(&go, "").expect("written");
    until(&mut screen, &mut shown, "size 44 122").await;
    keys.write_all(b"typed\r").await.expect("taken");
    until(&mut screen, &mut shown, "heard typed").await;
    let end = timeout(PATIENCE, child.wait()).await.expect("it ends").expect("it ran");
    assert_eq!(end.code(), Some(5), "{:?}: {shown}", road.way);
    drop(keys);
}

const TERMINAL: &str = r#"
    tty > /dev/null || exit 1
    until [ "$(stty size)" = "33 101" ]; do sleep 0.05; done; echo size $(stty size)
    until [ "$(stty size)" = "44 122" ]; do sleep 0.05; done; echo size $(stty size)
    read line; echo "heard $line"; exit 5"#;

fn quoted(word: &str) -> String {
    format!("'{}'", word.replace('\'', r"'\''"))
}

/// Reads until a text occurs.
async fn until(from: &mut (impl AsyncReadExt + Unpin), so_far: &mut String, text: &str) {
    let reading = async {
        while !so_far.contains(text) {
            let mut bytes = [0; 4096];
            let read = from.read(&mut bytes).await.expect("readable");
            assert!(read > 0, "it ended before {text:?}: {so_far}");
            so_far.push_str(&String::from_utf8_lossy(&bytes[..read]));
        }
    };
    let done = timeout(PATIENCE, reading).await;
    assert!(done.is_ok(), "no {text:?}: {so_far}");
}

/// Copies in both directions: a big file, and a directory with a program and a name with special characters.
async fn copies(road: &KubectlSession<'_>, pod: &str) {
    let folder = tempfile::tempdir().expect("a folder");
    let (there, back) = (folder.path().join("there"), folder.path().join("back"));
    fs::create_dir_all(there.join("deep/er")).expect("made");
    let big: Vec<u8> = (0..5_000_000_u32).map(|n| (n.wrapping_mul(2_654_435_761) >> 24) as u8).collect();
    fs::write(there.join("big"), &big).expect("written");
    fs::write(there.join("deep/er/a name"), "small").expect("written");
    fs::write(there.join("deep/run"), "#!/bin/sh\necho ran\n").expect("written");
    fs::set_permissions(there.join("deep/run"), fs::Permissions::from_mode(0o755)).expect("set");
    let inside = format!("{pod}:/tmp/{:?}", road.way);
    let (code, _, err) = road.call(&["cp", "-c", "main", &path(&there), &inside], None).await;
    assert_eq!(code, Some(0), "{:?}: {err}", road.way);
    let run = format!("/tmp/{:?}/deep/run", road.way);
    let (code, out, err) = road.call(&["exec", pod, "-c", "main", "--", &run], None).await;
    assert_eq!((code, out.as_str()), (Some(0), "ran\n"), "{:?}: {err}", road.way);
    let (code, _, err) = road.call(&["cp", "-c", "main", &inside, &path(&back)], None).await;
    assert_eq!(code, Some(0), "{:?}: {err}", road.way);
    assert!(fs::read(back.join("big")).expect("copied") == big);
    assert_eq!(fs::read_to_string(back.join("deep/er/a name")).expect("copied"), "small");
}

fn path(path: &Path) -> String {
    path.display().to_string()
}

/// A command ends with its container, and so do the clients, over either protocol.
async fn a_container_that_dies(cluster: &Cluster, pod: &Value) {
    let mut children = Vec::new();
    for way in WAYS {
        let road = KubectlSession { cluster, way };
        let mut command = road.kubectl(&["exec", name_of(pod), "-c", "main", "--", "sh", "-c", "echo up; sleep 1000"]);
        let mut child = command.spawn().expect("kubectl starts");
        until(child.stdout.as_mut().expect("its output"), &mut String::new(), "up\n").await;
        children.push(child);
    }
    cluster.node.home.remove("commands.json");
    for child in children {
        let output = timeout(PATIENCE, child.wait_with_output()).await.expect("it ends").expect("it ran");
        assert_eq!(output.status.code(), Some(137), "{output:?}");
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn kubectl_attaches() {
    let Some(cluster) = cluster("kubectl_attaches").await else { return };
    for way in WAYS {
        let road = KubectlSession { cluster: &cluster, way };
        let label = format!("{way:?}").to_lowercase();
        attach(&road, &format!("once-{label}")).await;
        watch(&road, &format!("watched-{label}")).await;
    }
}

/// Input reaches the container's own process, and its end closes that process's stdin.
async fn attach(road: &KubectlSession<'_>, name: &str) {
    let script = "while read line; do echo heard $line; done; echo over; exit 3";
    let mut container = shell("main", script);
    container["stdin"] = true.into();
    container["stdinOnce"] = true.into();
    let spec = json!({"restartPolicy": "Never", "containers": [container]});
    let pod = road.cluster.node.run(&manifest_of(name, spec)).await;
    let (code, out, err) = road.call(&["attach", "-i", name_of(&pod)], Some(b"one\ntwo\n")).await;
    assert_eq!((code, out.as_str()), (Some(0), "heard one\nheard two\nover\n"), "{:?}: {err}", road.way);
    road.cluster.node.agent.until_pod(name, "failed", |pod| pod["status"]["phase"] == "Failed").await;
    road.cluster.node.remove(&pod).await;
}

/// A watching client may detach and attach again; the process is unaffected.
async fn watch(road: &KubectlSession<'_>, name: &str) {
    let script = "trap 'exit 0' TERM; n=0; while true; do n=$((n+1)); echo tick $n; sleep 0.1; done";
    let spec = json!({"terminationGracePeriodSeconds": 1, "containers": [shell("main", script)]});
    let pod = road.cluster.node.run(&manifest_of(name, spec)).await;
    for _ in 0..2 {
        let mut child = road.kubectl(&["attach", name_of(&pod)]).spawn().expect("kubectl starts");
        until(child.stdout.as_mut().expect("its output"), &mut String::new(), "tick").await;
        child.kill().await.expect("it ran");
    }
    let shown = road.cluster.node.agent.pod(name).await.expect("it is there");
    assert_eq!(process::container(&shown, "main")["restartCount"], 0);
    road.cluster.node.remove(&pod).await;
}

/// AC-04b-S10
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn kubectl_forwards_ports() {
    let Some(cluster) = cluster("kubectl_forwards_ports").await else { return };
    let script = format!(
        "mkdir -p /www; echo served > /www/index.html; httpd -p 8080 -h /www; nc -ll -p 7000 -e cat & {UNTIL_STOPPED}"
    );
    let spec = json!({"terminationGracePeriodSeconds": 1, "containers": [shell("main", &script)]});
    let pod = cluster.node.run(&manifest_of("ports", spec)).await;
    for way in WAYS {
        let road = KubectlSession { cluster: &cluster, way };
        let before = road.translated("portforward").await;
        let [web, echo] = reservation::free_ports();
        let ports = [format!("{web}:8080"), format!("{echo}:7000")];
        let mut child = road.kubectl(&["port-forward", name_of(&pod), &ports[0], &ports[1]]).spawn().expect("starts");
        until(child.stdout.as_mut().expect("its output"), &mut String::new(), &format!("127.0.0.1:{echo} ->")).await;
        for _ in 0..3 {
            let answer = process::get(web, "/index.html").await.expect("forwarded");
            assert_eq!(answer.body, "served\n", "{way:?}");
        }
        let all = (0..4_u8).map(|number| echoed(echo, number));
        timeout(PATIENCE, futures::future::join_all(all)).await.expect("in time");
        // The metrics page may be slightly outdated.
        let is_counted = async || road.translated("portforward").await > before;
        match way {
            StreamProtocol::WebSocket => cluster.node.agent.until("the tunnel is counted", is_counted).await,
            StreamProtocol::Spdy => assert!(!is_counted().await, "nothing ends here"),
        }
        child.kill().await.expect("it ran");
    }
    cluster.node.remove(&pod).await;
}

/// A megabyte through an echo server, half-closed at its end.
async fn echoed(port: u16, number: u8) {
    let (mut from, mut to) = TcpStream::connect(("127.0.0.1", port)).await.expect("forwarded").into_split();
    let sent: Vec<u8> = (0..1_000_000_u32).map(|n| n.to_le_bytes()[0] ^ number).collect();
    let expected = sent.clone();
    let sending = tokio::spawn(async move {
        to.write_all(&sent).await.expect("taken");
        to
    });
    let mut got = vec![0; expected.len()];
    timeout(Duration::from_secs(20), from.read_exact(&mut got)).await.expect("in time").expect("whole");
    assert!(got == expected, "connection {number} has its own bytes");
    drop(sending.await.expect("no panic"));
}
