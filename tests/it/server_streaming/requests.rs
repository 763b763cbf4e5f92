//! Streaming requests before a stream begins: validation, cross-site and per-caller limits, runtime errors; and `/run`.

use std::time::Duration;

use berth_server::streaming::StreamingConfig;
use tokio::{
    io::{AsyncReadExt, AsyncWriteExt},
    net::TcpStream,
    time::timeout,
};

use crate::server_streaming::fixture::{EXEC, RuntimeKind, RuntimeUnderTest, Terminal};
use berth_testkit::{
    scripted_cri::Fault,
    streams::clients::{LIMIT, web_socket_head, words},
};

on_both_runtimes! {
    what_is_refused_and_how
    flags_come_from_a_form_too
    run_prints_what_a_command_printed
    a_caller_may_hold_so_many_streams
    web_pages_of_other_sites_cannot_use_a_browsers_certificate
    requests_that_are_no_web_sockets
}

async fn what_is_refused_and_how(on: RuntimeKind) {
    let Some(world) = on.world().await else { return };
    let rows = [
        // AC-04b-S1
        (format!("GET {EXEC}?command=sh HTTP/1.1"), 400, "you must specify at least 1 of stdin, stdout, stderr"),
        ("GET /exec/default/nope/c?output=1 HTTP/1.1".to_owned(), 404, "pod does not exist"),
        ("GET /exec/default/web/uid-other/c?output=1 HTTP/1.1".to_owned(), 404, "pod not found"),
        ("GET /attach/default/web/uid-other/c?output=1 HTTP/1.1".to_owned(), 404, "pod not found"),
        ("GET /exec/default/web/nope?output=1 HTTP/1.1".to_owned(), 500, "container not found (\"nope\")"),
        (
            "GET /attach/default/web/nope?output=1 HTTP/1.1".to_owned(),
            500,
            "container nope not found in pod web_default",
        ),
        // AC-04b-S2
        (format!("GET {EXEC}?output=1 HTTP/1.1"), 500, "Upgrade request required\n"),
        ("GET /attach/default/web/c?output=1 HTTP/1.1".to_owned(), 500, "Upgrade request required\n"),
        ("POST /portForward/default/web HTTP/1.1".to_owned(), 500, "Upgrade request required\n"),
        ("GET /portForward/default/nope HTTP/1.1".to_owned(), 404, "pod does not exist"),
        ("GET /portForward/default/web/uid-other HTTP/1.1".to_owned(), 404, "pod not found"),
        (web_socket_head("/portForward/default/web", "v4.channel.k8s.io"), 400, "query parameter \"port\" is required"),
        ("POST /run/default/nope/c?cmd=ls HTTP/1.1".to_owned(), 404, "pod does not exist"),
        ("POST /run/default/web/nope?cmd=ls HTTP/1.1".to_owned(), 500, "container not found (\"nope\")"),
    ];
    for (head, status, body) in rows {
        assert_eq!(world.endpoint.ask(&head).await, (status, body.to_owned()), "{head}");
    }
    assert_eq!(world.prepared(), 0, "no one-time URL was wasted");
    world.end().await;
}

#[tokio::test]
async fn what_the_runtime_refuses_has_its_status() {
    let world = RuntimeKind::Scripted.world().await.expect("runs everywhere");
    let RuntimeUnderTest::Scripted { cri, .. } = &world.below else { panic!("it is scripted") };
    for (code, status) in
        [(tonic::Code::NotFound, 404), (tonic::Code::ResourceExhausted, 429), (tonic::Code::Internal, 500)]
    {
        cri.fault("exec", "", Fault::Error(code, "m".to_owned()), Some(1));
        let upgrade = "Connection: Upgrade\r\nUpgrade: SPDY/3.1\r\nContent-Length: 0";
        let (head, _) = world.endpoint.request(&format!("POST {EXEC}?output=1 HTTP/1.1\r\n{upgrade}")).await;
        assert_eq!(head.status, status);
        assert_eq!(head.header("retry-after"), if status == 429 { vec!["60"] } else { vec![] });
    }
}

async fn flags_come_from_a_form_too(on: RuntimeKind) {
    let Some(world) = on.world().await else { return };
    let form = "input=1&output=1";
    let head = format!(
        "POST {EXEC}?command=cat HTTP/1.1\r\nConnection: Upgrade\r\nUpgrade: SPDY/3.1\r\n\
         X-Stream-Protocol-Version: v4.channel.k8s.io\r\nContent-Type: application/x-www-form-urlencoded\r\n\
         Content-Length: {}\r\nHost: node\r\n\r\n{form}",
        form.len()
    );
    let mut tcp = TcpStream::connect(world.endpoint.0).await.expect("it listens");
    tcp.write_all(head.as_bytes()).await.expect("sent");
    let mut answer = [0; 12];
    timeout(LIMIT, tcp.read_exact(&mut answer)).await.expect("in time").expect("an answer");
    assert_eq!(&answer, b"HTTP/1.1 101");
    drop(tcp);
    world.end().await;
}

async fn run_prints_what_a_command_printed(on: RuntimeKind) {
    let Some(world) = on.world().await else { return };
    let why = "cat: can't open '/nowhere': No such file or directory\n";
    if let RuntimeUnderTest::Scripted { cri, .. } = &world.below {
        cri.on_exec("echo -x", 0, "-x\n", "", Duration::ZERO);
        cri.on_exec("tail -n 1 /nowhere /etc/hostname", 0, "out", "err", Duration::ZERO);
        cri.on_exec("cat /nowhere", 1, "", why, Duration::ZERO);
        let both = "POST /run/default/web/c?cmd=tail%20-n%201%20/nowhere%20/etc/hostname HTTP/1.1";
        assert_eq!(world.endpoint.ask(both).await, (200, "outerr".to_owned()));
    }
    assert_eq!(world.endpoint.ask("POST /run/default/web/c?cmd=echo%20-x HTTP/1.1").await, (200, "-x\n".to_owned()));
    assert_eq!(world.endpoint.ask("POST /run/default/web/uid-web/c?cmd=true HTTP/1.1").await, (200, String::new()));
    let failed = (500, format!("command 'cat /nowhere' exited with 1: {why}"));
    assert_eq!(world.endpoint.ask("POST /run/default/web/c?cmd=cat%20/nowhere HTTP/1.1").await, failed);
    let (head, _) = world.endpoint.request("POST /run/default/web/c?cmd=echo%20-x HTTP/1.1").await;
    assert_eq!(head.header("content-type"), ["application/json"]);
    world.end().await;
}

async fn a_caller_may_hold_so_many_streams(on: RuntimeKind) {
    let config = StreamingConfig { most_per_caller: 2, ..StreamingConfig::default() };
    let Some(world) = on.with(config, Terminal::None).await else { return };
    let head = |user: &str| {
        format!(
            "POST {EXEC}?output=1{} HTTP/1.1\r\nConnection: Upgrade\r\nUpgrade: SPDY/3.1\r\n\
             X-Stream-Protocol-Version: v4.channel.k8s.io\r\nX-User: {user}",
            words(&["sleep", "1000"])
        )
    };
    let mut connections = Vec::new();
    for _ in 0..2 {
        let (answer, tcp) = world.endpoint.request(&head("a")).await;
        assert_eq!(answer.status, 101);
        connections.push(tcp);
    }
    let (answer, _) = world.endpoint.request(&head("a")).await;
    assert_eq!((answer.status, answer.header("retry-after")), (429, vec!["60"]));
    let (answer, _) = world.endpoint.request(&head("b")).await;
    assert_eq!(answer.status, 101, "others have their own share");
    connections.clear();
    let given_back = async {
        while world.endpoint.request(&head("a")).await.0.status != 101 {
            tokio::time::sleep(Duration::from_millis(10)).await;
        }
    };
    timeout(LIMIT, given_back).await.expect("what is closed is given back");
    world.end().await;
}

async fn web_pages_of_other_sites_cannot_use_a_browsers_certificate(on: RuntimeKind) {
    // Spec 04 §10, cross-site WebSocket.
    let Some(world) = on.world().await else { return };
    let exec = format!("{EXEC}?output=1&command=cat");
    for (target, protocols) in [
        (exec.as_str(), ["v4.channel.k8s.io", "v5.channel.k8s.io"]),
        ("/portForward/default/web?port=80", ["v4.channel.k8s.io", "SPDY/3.1+portforward.k8s.io"]),
    ] {
        for (lines, refused) in [
            ("X-Via: x509\r\nX-User: kate\r\nOrigin: https://evil.example", true),
            ("X-Via: x509\r\nX-User: kate\r\nOrigin: null", true),
            ("X-Via: x509\r\nX-User: kate\r\nOrigin: https://node.evil.example", true),
            ("X-Via: x509\r\nX-User: kate\r\nOrigin: https://node", false),
            ("X-Via: x509\r\nX-User: kate", false),
            ("X-Via: x509\r\nX-User: kube-apiserver-kubelet-client\r\nOrigin: https://dashboard.example", false),
            ("X-User: kate\r\nOrigin: https://evil.example", false),
        ] {
            for protocol in protocols {
                let asked = format!("{}\r\n{lines}", web_socket_head(target, protocol));
                let (answer, _) = world.endpoint.request(&asked).await;
                let expected = if refused { 403 } else { 101 };
                assert_eq!(answer.status, expected, "{target} {protocol} {lines}");
            }
        }
    }
    let run = "POST /run/default/web/c?cmd=touch%20/tmp/ran HTTP/1.1\r\nX-Via: x509\r\nX-User: kate";
    assert_eq!(world.endpoint.ask(&format!("{run}\r\nOrigin: https://evil.example")).await.0, 403);
    if let RuntimeUnderTest::Scripted { cri, .. } = &world.below {
        assert!(cri.calls().iter().all(|call| call.op != "exec_sync"), "and nothing was run");
    } else {
        assert_eq!(world.endpoint.ask("POST /run/default/web/c?cmd=ls%20/tmp HTTP/1.1").await, (200, String::new()));
    }
    world.end().await;
}

async fn requests_that_are_no_web_sockets(on: RuntimeKind) {
    let Some(world) = on.world().await else { return };
    let head = web_socket_head(&format!("{EXEC}?output=1&command=cat"), "v5.channel.k8s.io");
    let without = |name: &str| head.lines().filter(|line| !line.starts_with(name)).collect::<Vec<_>>().join("\r\n");
    let (status, _) = world.endpoint.ask(&without("Sec-WebSocket-Key")).await;
    assert_eq!(status, 400);
    let (answer, _) = world.endpoint.request(&without("Sec-WebSocket-Version")).await;
    assert_eq!((answer.status, answer.header("sec-websocket-version")), (400, vec!["13"]));
    let (status, _) = world.endpoint.ask(&head.replacen("GET", "POST", 1)).await;
    assert_eq!(status, 405);
    world.end().await;
}
