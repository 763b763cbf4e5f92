//! Main port of a real agent: start-up errors, callers without an API server, and TLS.

use std::{
    fs,
    net::TcpListener,
    path::Path,
    process::Stdio,
    time::{Duration, Instant},
};

use berth::certificates::{Authority, CertificatePairPaths};
use serde_json::{Value, json};
use tokio::{
    io::{AsyncReadExt, AsyncWriteExt},
    process::{ChildStdin, ChildStdout, Command},
};

use crate::agent::ScriptedServer;
use berth_testkit::{
    main_port::MainPort,
    process::{BinaryName, Home, PATIENCE, get, skips},
    reservation::free_ports,
};

/// Asserts that an agent fails to start, soon, and with this last log line.
async fn refuses(home: Home, words: &str) {
    let begun = Instant::now();
    let mut agent = home.spawn();
    assert_eq!(agent.end().await.code(), Some(1), "{}", agent.log_end());
    let log = agent.log().replace("\\\"", "\"");
    let last = log.lines().last().unwrap_or_default();
    let prefix = "\"command failed\" err=\"failed to run Kubelet: ";
    assert!(last.contains(&format!("{prefix}{words}")), "{words}\n{last}");
    assert!(begun.elapsed() < Duration::from_secs(20), "no runtime is waited for: {:?}", begun.elapsed());
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn server_setup_errors_are_reported_before_the_wait_for_the_runtime() {
    if skips("server_setup_errors_are_reported_before_the_wait_for_the_runtime") {
        return;
    }
    // AC-01-24, AC-01-31
    let (runtime, port) = (ScriptedServer::unserved(), MainPort::new());
    let home = || runtime.home().with(port.fields());
    let manager = "failed to initialize file based certificate manager: open /nonexistent/x: ";
    refuses(home().with(json!({"tlsCertFile": "/nonexistent/x"})), manager).await;
    let other = CertificatePairPaths::of(&port.path(""), "other");
    let issued = port.authority.serving("other", &[], MainPort::valid()).expect("issued");
    other.write(&issued).expect("written");
    let (serving, key) = (port.path("serving.crt"), other.key.display().to_string());
    let manager = "failed to initialize file based certificate manager: tls: private key does not match public key";
    let mismatch = format!("{manager} (certificate {}, key {key})", serving.display());
    refuses(home().with(json!({"tlsPrivateKeyFile": key})), &mismatch).await;
    let together = "tlsCertFile and tlsPrivateKeyFile must be set together: tlsPrivateKeyFile is empty";
    refuses(home().with(json!({"tlsPrivateKeyFile": ""})), together).await;
    let ca = json!({"authentication": {"webhook": {"enabled": false}, "x509": {"clientCAFile": "/nonexistent/ca"}}});
    refuses(home().with(ca), "unable to load client CA file /nonexistent/ca: open /nonexistent/ca: ").await;
    let missing = "invalid kubeconfig: stat /nonexistent/k: no such file or directory";
    refuses(home().with(port.webhook_fields()).flag("--kubeconfig=/nonexistent/k"), missing).await;
    let half = tempfile::tempdir().expect("a folder");
    fs::write(half.path().join("kubelet.crt"), "x").expect("written");
    let none = json!({"tlsCertFile": "", "tlsPrivateKeyFile": ""});
    let (flag, key) = (format!("--cert-dir={}", half.path().display()), half.path().join("kubelet.key"));
    let pair = format!("error reading {}, certificate and key must be supplied as a pair", key.display());
    refuses(home().with(none).flag(flag), &pair).await;
    let alone = json!({"authorization": {"mode": "Webhook"}});
    refuses(home().with(alone), "no client provided, cannot use webhook authorization").await;
    let tokens = json!({"authentication": {"webhook": {"enabled": true}}});
    refuses(home().with(tokens), "no client provided, cannot use webhook authentication").await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn ports_that_are_taken() {
    if skips("ports_that_are_taken") {
        return;
    }
    let runtime = ScriptedServer::new().await;
    let [number] = free_ports();
    let taken = TcpListener::bind(("127.0.0.1", number)).expect("a free port");
    let busy = |what: &str| format!("failed to listen on {what} 127.0.0.1:{number}: Address already in use");
    refuses(runtime.home().with(json!({"readOnlyPort": number})), &busy("the read-only port")).await;
    let port = MainPort::new();
    refuses(runtime.home().with(port.fields()).with(json!({"port": number})), &busy("port")).await;
    refuses(runtime.home().with(json!({"address": "1.2.3"})), "address: \"1.2.3\" is not an IP address").await;
    // A busy healthz port is never fatal; the agent retries until it is free.
    let home = runtime.home().with(json!({"healthzPort": number}));
    let agent = home.spawn();
    agent.until_log("Failed to start healthz server").await;
    drop(taken);
    agent.until("healthz answers", async || get(number, "/healthz").await.is_some_and(|a| a.body == "ok")).await;
    assert_eq!(get(number, "/healthz?full=1&verbose").await.expect("an answer").status, 200);
    assert_eq!(get(number, "/debug/pprof/").await.expect("an answer").status, 404);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn the_read_only_port_is_local_unless_configured_otherwise() {
    if skips("the_read_only_port_is_local_unless_configured_otherwise") {
        return;
    }
    let runtime = ScriptedServer::new().await;
    // Other addresses of this machine could serve as a probe; all of 127/8 is loopback, so the test reads the log.
    let home = runtime.home().with(json!({"address": null}));
    let agent = home.start().await;
    agent.until("it serves", async || agent.get("/pods").await.is_some()).await;
    let line = agent.until_log("Starting to listen read-only").await;
    assert!(line.contains("127.0.0.1"), "{line}");
    let log = agent.log();
    assert!(log.contains("since `address` is not set"), "{log}");
    assert!(log.contains("readOnlyPort"), "the setting is reported as insecure: {log}");
    for (method, path) in [("exec", "/exec/a/b/c"), ("logs", "/containerLogs/a/b/c"), ("run", "/run/a/b/c")] {
        assert_eq!(agent.get(path).await.expect("an answer").status, 405, "{method}");
    }
    drop(agent);
    let home = runtime.home().with(json!({"address": "0.0.0.0"}));
    let agent = home.start().await;
    let line = agent.until_log("Starting to listen read-only").await;
    assert!(line.contains("0.0.0.0"), "{line}");
}

/// Closed by default: without authentication settings, only the local administrator has access.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn standalone_only_the_local_administrator_has_access() {
    if skips("standalone_only_the_local_administrator_has_access") {
        return;
    }
    let (runtime, certificates) = (ScriptedServer::new().await, tempfile::tempdir().expect("a folder"));
    let [number] = free_ports();
    let flag = format!("--cert-dir={}", certificates.path().display());
    let home = runtime.home().binary_name(BinaryName::Berth).flag(flag).with(json!({
        "enableServer": true, "port": number, "readOnlyPort": null, "authentication": null, "authorization": null,
    }));
    let agent = home.start().await;
    let line = agent.until_log("List the pods with this command").await;
    let command = line.split("command=").nth(1).expect("a command").trim().trim_matches('"').to_owned();
    assert!(command.starts_with("curl "), "{command}");
    let shell = |text: String| async move {
        let output = Command::new("sh").args(["-c", &text]).output().await.expect("a shell");
        String::from_utf8_lossy(&output.stdout).into_owned()
    };
    let page = shell(format!("{command} -s")).await;
    assert!(page.starts_with("{\"kind\":\"PodList\""), "{command}: {page}");
    let url = format!("https://127.0.0.1:{number}");
    for path in ["/pods", "/metrics", "/exec/a/b/c", "/logs/", "/debug/pprof/", "/configz", "/healthz"] {
        let status = shell(format!("curl -sko /dev/null -w '%{{http_code}}' {url}{path}")).await;
        assert_eq!(status, "401", "{path}");
        let status =
            shell(format!("curl -sko /dev/null -w '%{{http_code}}' -H 'Authorization: Bearer x' {url}{path}")).await;
        assert_eq!(status, "401", "{path} with a token nobody can check");
    }
    use std::os::unix::fs::PermissionsExt;
    for key in ["berth-ca.key", "berth-admin.key", "kubelet.key"] {
        let mode = fs::metadata(certificates.path().join(key)).expect(key).permissions().mode();
        assert_eq!(mode & 0o777, 0o600, "{key}");
    }
}

#[test]
fn the_example_has_no_authentication_settings() {
    let text = include_str!("../../../examples/standalone.yaml");
    let example: Value = serde_saphyr::from_str(text).expect("YAML");
    assert!(example["authentication"].is_null() && example["authorization"].is_null() && example["address"].is_null());
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn curl_speaks_both_protocols() {
    if skips("curl_speaks_both_protocols") {
        return;
    }
    let (runtime, port) = (ScriptedServer::new().await, MainPort::new());
    let _agent = runtime.home().with(port.fields()).start().await;
    port.open().await;
    let kate = port.client("kate", &["dev"]);
    let (certificate, key) = (kate.certificate.display().to_string(), kate.key.display().to_string());
    let shown = port.curl_with(&kate, "/configz").await.body;
    let shown: Value = serde_json::from_str(&shown).expect("JSON");
    let suites = shown["kubeletconfig"]["tlsCipherSuites"].as_array().expect("what is really offered");
    assert!(
        suites.len() == 6
            && suites.iter().all(|s| s.as_str().is_some_and(|s| s.contains("_GCM_") || s.contains("CHACHA20")))
    );
    for (protocol, begins) in [("--http1.1", "http/1.1 200"), ("--http2", "http/2 200")] {
        let answer = port.curl("/healthz", &[protocol, "--cert", &certificate, "--key", &key]).await;
        assert!(answer.head.starts_with(begins) && answer.body == "ok", "{answer:?}");
        let stranger = port.curl("/healthz", &[protocol]).await;
        assert_eq!((stranger.status, stranger.body.as_str()), (401, "Unauthorized"), "{protocol}");
    }
    let old = port.curl("/healthz", &["--tls-max", "1.1"]).await;
    assert_eq!(old.status, 0, "TLS 1.1 is refused: {old:?}");
    for name in ["localhost", "anything"] {
        // One certificate for all names: with -k, curl does not verify the name.
        let resolve = format!("{name}:{}:127.0.0.1", port.port);
        let url = format!("https://{name}:{}/nope", port.port);
        let output = Command::new("curl").args(["-sk", "--resolve", &resolve, &url]).output().await.expect("curl");
        assert_eq!(String::from_utf8_lossy(&output.stdout), "404 page not found\n", "{name}");
    }
}

/// A keep-alive connection.
struct KeepAliveConnection {
    stdin: ChildStdin,
    stdout: ChildStdout,
    _child: tokio::process::Child,
}

impl KeepAliveConnection {
    fn open(port: &MainPort, client: &CertificatePairPaths) -> Self {
        let mut command = Command::new("openssl");
        command.args(["s_client", "-quiet", "-connect", &format!("127.0.0.1:{}", port.port)]);
        command.arg("-cert").arg(&client.certificate).arg("-key").arg(&client.key);
        command.stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::null()).kill_on_drop(true);
        let mut child = command.spawn().expect("openssl is installed");
        let (stdin, stdout) = (child.stdin.take().expect("piped"), child.stdout.take().expect("piped"));
        Self { stdin, stdout, _child: child }
    }

    /// Status of one more request.
    async fn ask(&mut self, path: &str) -> String {
        let request = format!("GET {path} HTTP/1.1\r\nHost: x\r\n\r\n");
        self.stdin.write_all(request.as_bytes()).await.expect("taken");
        let mut answer = Vec::new();
        let reading = async {
            loop {
                let text = String::from_utf8_lossy(&answer).into_owned();
                if let Some((head, body)) = text.split_once("\r\n\r\n") {
                    let length = head
                        .to_lowercase()
                        .split("content-length: ")
                        .nth(1)
                        .and_then(|rest| rest.split("\r\n").next()?.parse::<usize>().ok());
                    if body.len() >= length.unwrap_or_default() {
                        return head.split(' ').nth(1).unwrap_or_default().to_owned();
                    }
                }
                let mut piece = [0; 4096];
                match self.stdout.read(&mut piece).await {
                    Ok(read) if read > 0 => answer.extend_from_slice(&piece[..read]),
                    _ => return String::new(),
                }
            }
        };
        tokio::time::timeout(PATIENCE, reading).await.expect("an answer")
    }
}

fn text(path: &Path) -> String {
    fs::read_to_string(path).expect("readable")
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn files_are_replaced_under_connections_that_live() {
    if skips("files_are_replaced_under_connections_that_live") {
        return;
    }
    // AC-04-20, AC-04-21, with the whole agent.
    let (runtime, port) = (ScriptedServer::new().await, MainPort::new());
    let agent = runtime.home().with(port.fields()).start().await;
    port.open().await;
    let kate = port.client("kate", &["dev"]);
    let mut kept = KeepAliveConnection::open(&port, &kate);
    assert_eq!(kept.ask("/pods").await, "200");

    // A mismatched pair is not served; a matching one is, and live connections continue.
    let other = Authority::create("other", MainPort::valid()).expect("an authority");
    let serving = CertificatePairPaths::of(&port.path(""), "serving");
    let (old, key) = (text(&serving.certificate), text(&serving.key));
    fs::write(&serving.key, &other.own().key).expect("written");
    agent.until_log("private key does not match public key").await;
    assert_eq!(port.curl_with(&kate, "/pods").await.status, 200, "the old pair is served");
    fs::write(&serving.key, key).expect("written");
    port.serve(&other);
    assert_ne!(text(&serving.certificate), old);
    agent.until("the new pair is served", async || port.curl_with(&kate, "/pods").await.status == 0).await;
    assert_eq!(kept.ask("/pods").await, "200");
    fs::write(port.path("ca.crt"), &other.own().certificate).expect("written");
    assert_eq!(port.curl_with(&kate, "/pods").await.status, 200);

    // A client whose CA is no longer trusted loses access, also on its open connection.
    let draft = port.path("draft");
    fs::write(&draft, &other.own().certificate).expect("written");
    fs::rename(&draft, port.path("clients.crt")).expect("renamed");
    agent.until("the new bundle counts", async || port.curl_with(&kate, "/pods").await.status == 401).await;
    assert_eq!(kept.ask("/pods").await, "401");
    let files = CertificatePairPaths::of(&port.path(""), "new");
    files.write(&other.client("new", &[], MainPort::valid()).expect("issued")).expect("written");
    assert_eq!(port.curl_with(&files, "/pods").await.status, 200);
}

/// A log that is a symlink, or no regular file, is not read; names in paths are only names.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn logs_are_read_from_the_pods_own_directory_only() {
    if skips("logs_are_read_from_the_pods_own_directory_only") {
        return;
    }
    let (runtime, port) = (ScriptedServer::new().await, MainPort::new());
    let home = runtime.home().with(port.fields());
    home.put_pod(&berth_testkit::process::manifest("one"));
    let agent = home.start().await;
    port.open().await;
    let pod: Value = agent.until_ready("one").await;
    let kate = port.client("kate", &[]);
    let uid = pod["metadata"]["uid"].as_str().expect("a uid");
    let log = home.logs().join(format!("default_one-test-node_{uid}/main/0.log"));
    fs::create_dir_all(log.parent().expect("a parent")).expect("made");
    let write = |text: &str| {
        let _ = fs::remove_file(&log);
        fs::write(&log, format!("2026-01-01T00:00:00Z stdout F {text}\n")).expect("written");
    };
    let path = "/containerLogs/default/one-test-node/main";
    write("hello");
    let answer = port.curl_with(&kate, path).await;
    assert_eq!((answer.status, answer.body.as_str()), (200, "hello\n"));

    let secret = home.path().join("secret");
    fs::write(&secret, "2026-01-01T00:00:00Z stdout F secret\n").expect("written");
    let refused = async |why: &str| {
        for query in ["", "?follow=true", "?tailLines=1"] {
            let (certificate, key) = (kate.certificate.display().to_string(), kate.key.display().to_string());
            let url = format!("https://127.0.0.1:{}{path}{query}", port.port);
            let mut curl = Command::new("curl");
            curl.args(["-sk", "--max-time", "20", "--cert", &certificate, "--key", &key, &url]);
            let output = curl.output().await.expect("curl");
            let stdout = String::from_utf8_lossy(&output.stdout).into_owned();
            assert!(!stdout.contains("secret\n") && !output.status.success(), "{why} {query}: {stdout}");
        }
    };
    fs::remove_file(&log).expect("removed");
    std::os::unix::fs::symlink(&secret, &log).expect("linked");
    refused("a link out of the directory").await;
    fs::remove_file(&log).expect("removed");
    nix::unistd::mkfifo(&log, nix::sys::stat::Mode::S_IRWXU).expect("made");
    refused("a pipe").await;
    fs::remove_file(&log).expect("removed");
    fs::create_dir(&log).expect("made");
    refused("a directory").await;
    fs::remove_dir(&log).expect("removed");
    let directory = log.parent().expect("a parent");
    fs::remove_dir(directory).expect("removed");
    fs::create_dir(home.path().join("elsewhere")).expect("made");
    fs::rename(&secret, home.path().join("elsewhere/0.log")).expect("moved");
    std::os::unix::fs::symlink(home.path().join("elsewhere"), directory).expect("linked");
    refused("a directory that is a link").await;
    fs::remove_file(directory).expect("removed");
    fs::create_dir(directory).expect("made");
    write("back");
    assert_eq!(port.curl_with(&kate, path).await.body, "back\n");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn streams_lead_to_this_machine_or_an_allowed_host() {
    if skips("streams_lead_to_this_machine_or_an_allowed_host") {
        return;
    }
    let foreign = "the runtime's streaming URL has host \"streams.invalid\", expected this machine or one of";
    for (flag, leads_away) in
        [("--streaming-allowed-hosts=", true), ("--streaming-allowed-hosts=a,streams.invalid", false)]
    {
        let (runtime, port) = (ScriptedServer::new().await, MainPort::new());
        runtime.cri.stream_at("http://streams.invalid:1");
        let home = runtime.home().with(port.fields()).flag(flag);
        home.put_pod(&berth_testkit::process::manifest("one"));
        let agent = home.start().await;
        port.open().await;
        agent.until_ready("one").await;
        let kate = port.client("kate", &[]);
        let (certificate, key) = (kate.certificate.display().to_string(), kate.key.display().to_string());
        let upgrade = ["--http1.1", "-XPOST", "-H", "Connection: Upgrade", "-H", "Upgrade: SPDY/3.1"];
        let options = [&upgrade[..], &["--cert", &certificate, "--key", &key]].concat();
        let answer = port.curl("/exec/default/one-test-node/main?command=id&output=1", &options).await;
        assert_eq!(answer.status, 500, "{flag}: {answer:?}");
        assert!(answer.body.starts_with("error dialing backend: "), "{flag}: {answer:?}");
        assert_eq!(answer.body.contains(foreign), leads_away, "{flag}: {answer:?}");
    }
}
