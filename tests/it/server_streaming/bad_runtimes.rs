//! Misbehaving streaming servers of runtimes: redirects, silence, and other protocols.
//!
//! Only the scripted runtime can misbehave so; the embedded runtime has no URL that is dialed.

use std::{sync::Arc, time::Duration};

use berth_ports::SystemClock;
use berth_server::streaming::StreamingConfig;
use tokio::{
    io::{AsyncReadExt, AsyncWriteExt},
    net::TcpListener,
};

use crate::server_streaming::fixture::{EXEC, Terminal, serve};
use berth_testkit::{
    misbehaving_server::{Answer, Server},
    scripted_cri::ScriptedCri,
    streams::{clients::next, endpoints::Endpoints},
};

const UPGRADE: &str = "Connection: Upgrade\r\nUpgrade: SPDY/3.1\r\nX-Stream-Protocol-Version: v4.channel.k8s.io";

/// Serves the endpoints in front of a runtime whose streaming server is at `base`.
async fn ends_at(base: &str) -> Endpoints {
    let cri = ScriptedCri::new(Arc::new(SystemClock));
    cri.stream_at(base);
    serve(&cri, StreamingConfig::default(), Terminal::None).await
}

async fn spdy_answer(base: &str) -> (u16, String) {
    ends_at(base).await.endpoint.ask(&format!("POST {EXEC}?output=1&command=cat HTTP/1.1\r\n{UPGRADE}")).await
}

/// The status on channel 3, as received by a v5 client.
async fn v5_status(ends: &Endpoints) -> String {
    let (_, mut socket) = ends.endpoint.web_socket(&format!("{EXEC}?output=1&command=cat"), "v5.channel.k8s.io").await;
    assert_eq!(next(&mut socket).await, [1]);
    let message = next(&mut socket).await;
    assert_eq!(message[0], 3);
    String::from_utf8(message[1..].to_vec()).expect("text")
}

/// A runtime that sends this text and then nothing, on every connection.
async fn runtime_sending(text: &'static [u8]) -> String {
    let listener = TcpListener::bind("127.0.0.1:0").await.expect("a port");
    let url = format!("http://{}", listener.local_addr().expect("an address"));
    tokio::spawn(async move {
        while let Ok((mut tcp, _)) = listener.accept().await {
            tokio::spawn(async move {
                let mut request = vec![0; 64 << 10];
                let _ = tcp.read(&mut request).await;
                let _ = tcp.write_all(text).await;
                while tcp.read(&mut request).await.is_ok_and(|read| read > 0) {}
            });
        }
    });
    url
}

#[tokio::test]
async fn a_runtime_that_sends_us_elsewhere_is_not_followed() {
    // AC-04b-S12
    let mut server = Server::start([Answer::Redirect("http://127.0.0.1:1/secret")]).await;
    let base = server.url().trim_end_matches("/pods").to_owned();
    let (status, body) = spdy_answer(&base).await;
    assert_eq!((status, body.as_str()), (500, "invalid upgrade response: status code 302\n"));
    let head = server.heads.recv().await.expect("one request");
    assert!(head.starts_with("POST /exec/token001 HTTP/1.1\r\n") && !head.contains("output=1"), "{head}");
    assert!(server.heads.try_recv().is_err());
    assert!(v5_status(&ends_at(&base).await).await.contains("Internal error occurred: unable to upgrade connection: "));

    let server = Server::start([Answer::Plain(200, "hello".to_owned())]).await;
    let base = server.url().trim_end_matches("/pods").to_owned();
    let (status, body) = spdy_answer(&base).await;
    assert_eq!((status, body.as_str()), (500, "invalid upgrade response: status code 200\n"));
    let server = Server::start([Answer::Plain(404, "404 page not found\n".to_owned())]).await;
    let base = server.url().trim_end_matches("/pods").to_owned();
    assert_eq!(spdy_answer(&base).await, (404, "404 page not found\n".to_owned()), "an expired token");
    assert!(v5_status(&ends_at(&base).await).await.contains("unable to upgrade connection: 404 page not found"));
    let server = Server::start([Answer::Garbage]).await;
    let (status, body) = spdy_answer(server.url().trim_end_matches("/pods")).await;
    assert_eq!((status, body.starts_with("error sending request: ")), (500, true), "{body}");
}

#[tokio::test]
async fn a_runtime_that_is_gone_or_elsewhere() {
    let (status, body) = spdy_answer("http://127.0.0.1:1").await;
    let refused = "error dialing backend: dial tcp 127.0.0.1:1: connect: connection refused\n";
    assert_eq!((status, body.as_str()), (500, refused));
    let status = v5_status(&ends_at("http://127.0.0.1:1").await).await;
    assert!(
        status.contains(
            "Internal error occurred: error sending request: dial tcp 127.0.0.1:1: connect: connection refused"
        ),
        "{status}"
    );
    for elsewhere in ["http://192.0.2.1:80", "http://metadata.example", "http://user@127.0.0.1:1"] {
        let (status, body) = spdy_answer(elsewhere).await;
        assert_eq!(
            (status, body.starts_with("error dialing backend: the runtime's streaming URL")),
            (500, true),
            "{body}"
        );
    }
}

#[tokio::test]
async fn a_runtime_that_never_answers() {
    let cri = ScriptedCri::new(Arc::new(SystemClock));
    cri.stream_at(&runtime_sending(b"").await);
    let config = StreamingConfig { answer: Duration::from_millis(50), ..StreamingConfig::default() };
    let ends = serve(&cri, config, Terminal::None).await;
    let (status, body) = ends.endpoint.ask(&format!("POST {EXEC}?output=1&command=cat HTTP/1.1\r\n{UPGRADE}")).await;
    assert_eq!((status, body.as_str()), (500, "error sending request: no response within 50ms\n"));
    let status = v5_status(&ends).await;
    assert!(status.contains("error sending request: no response within 50ms"), "{status}");
    ends.no_stream_is_left().await;
}

#[tokio::test]
async fn a_runtime_that_does_not_speak_spdy() {
    let switched = |rest: &str| {
        format!("HTTP/1.1 101 Switching Protocols\r\nConnection: Upgrade\r\nUpgrade: SPDY/3.1\r\n\r\n{rest}")
    };
    let mut garbage = switched("").into_bytes();
    garbage.extend_from_slice(b"\xffnothing of the kind");
    let status = v5_status(&ends_at(&runtime_sending(garbage.leak()).await).await).await;
    assert!(status.contains("error creating streams: the connection ended"), "{status}");
    let mut oversized = switched("").into_bytes();
    oversized.extend_from_slice(&[0x80, 3, 0, 2, 0, 0xff, 0xff, 0xff]);
    let status = v5_status(&ends_at(&runtime_sending(oversized.leak()).await).await).await;
    assert!(status.contains("error creating streams: the connection ended"), "{status}");
}
