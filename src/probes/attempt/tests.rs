//! Tests of the probe handlers against healthy, failing, and hostile servers on real sockets.

use std::{net::SocketAddr, sync::Mutex};

use bytes::Bytes;
use http_body_util::Full;
use hyper::{Request, Response, body::Incoming, service::service_fn};
use hyper_util::rt::{TokioExecutor, TokioIo};
use rustls::{ServerConfig, crypto::ring, pki_types::PrivatePkcs8KeyDer};
use serde_json::{Value, json};
use tokio::{
    io::{AsyncReadExt, AsyncWriteExt},
    net::{TcpListener, TcpStream},
};
use tokio_rustls::TlsAcceptor;
use tonic::Status;

use super::*;
use crate::probes::{kind::ProbeKind, outcome::ErrorState, testing::pod};
use berth_cri::{CriConfig, connect};
use berth_metrics::Registry;
use berth_proto::health::{
    HealthCheckRequest, HealthCheckResponse,
    health_check_response::ServingStatus,
    health_server::{Health, HealthServer},
};

fn nowhere() -> CriConfig {
    CriConfig {
        endpoint: "unix:///nowhere.sock".to_owned(),
        image_endpoint: String::new(),
        request_timeout: Duration::from_secs(1),
        list_streaming: false,
    }
}

/// Runs a probe of container `c`, whose pod has that address.
async fn asked_at(ip: &str, probe: Value) -> Outcome {
    let pod = pod(json!({"containers": [{"name": "c", "readinessProbe": probe}]}));
    let cri = connect(&nowhere(), &Registry::new()).expect("lazily");
    let handlers = Handlers::new(cri.runtime).expect("TLS");
    let ask = ProbeRequest::new(pod, "c".into(), ProbeKind::Readiness, "c-0".into(), Some(ip.to_owned()));
    handlers.probe_once(&ask).await
}

async fn asked(probe: Value) -> Outcome {
    asked_at("127.0.0.1", probe).await
}

fn http(port: u16) -> Value {
    json!({"httpGet": {"port": port, "path": "/x"}, "timeoutSeconds": 30})
}

/// Like [`http`], with a timeout in which no response is expected.
fn hasty(port: u16) -> Value {
    json!({"httpGet": {"port": port, "path": "/x"}, "timeoutSeconds": 1})
}

fn failure(outcome: Outcome) -> String {
    match outcome {
        Outcome::Failure(text) => text,
        other => panic!("no failure: {other:?}"),
    }
}

/// A server that reads the head of each request, records it, and runs `serve`.
async fn server<F>(serve: impl Fn(TcpStream, String) -> F + Send + Sync + 'static) -> (u16, Arc<Mutex<Vec<String>>>)
where
    F: Future<Output = std::io::Result<()>> + Send + 'static,
{
    let listener = TcpListener::bind("127.0.0.1:0").await.expect("a port");
    let port = listener.local_addr().expect("bound").port();
    let heads = Arc::<Mutex<Vec<String>>>::default();
    let kept = heads.clone();
    let serve = Arc::new(serve);
    tokio::spawn(async move {
        while let Ok((mut stream, _)) = listener.accept().await {
            let (serve, kept) = (serve.clone(), kept.clone());
            tokio::spawn(async move {
                let mut head = Vec::new();
                while !head.ends_with(b"\r\n\r\n") && head.len() < 64 << 10 {
                    match stream.read_u8().await {
                        Ok(byte) => head.push(byte),
                        Err(_) => return,
                    }
                }
                let head = String::from_utf8_lossy(&head).into_owned();
                kept.lock().expect("no panic").push(head.clone());
                // Many tests disconnect the client.
                let _ = serve(stream, head).await;
            });
        }
    });
    (port, heads)
}

async fn answers(answer: impl Into<String>) -> (u16, Arc<Mutex<Vec<String>>>) {
    let answer = answer.into();
    server(move |mut stream, _| {
        let answer = answer.clone();
        async move { stream.write_all(answer.as_bytes()).await }
    })
    .await
}

#[tokio::test]
async fn verdicts_follow_the_status() {
    for (head, expected) in [
        ("200 OK\r\nContent-Length: 2\r\n\r\nok", Outcome::Success),
        ("204 No Content\r\n\r\n", Outcome::Success),
        ("304 Not Modified\r\n\r\n", Outcome::Warning("Probe terminated redirects, Response body: ".to_owned())),
        (
            // AC-05-1
            "500 Oh\r\nContent-Length: 6\r\n\r\nsecret",
            Outcome::Failure("HTTP probe failed with statuscode: 500".to_owned()),
        ),
        ("404 No\r\nContent-Length: 0\r\n\r\n", Outcome::Failure("HTTP probe failed with statuscode: 404".to_owned())),
    ] {
        let (port, _) = answers(format!("HTTP/1.1 {head}")).await;
        assert_eq!(asked(http(port)).await, expected, "{head}");
    }
}

#[tokio::test]
async fn ac_05_2_a_bare_probe_sends_just_these() {
    let (port, heads) = answers("HTTP/1.1 200 OK\r\nContent-Length: 0\r\n\r\n").await;
    assert_eq!(asked(http(port)).await, Outcome::Success);
    let head = heads.lock().expect("no panic")[0].clone();
    let mut lines: Vec<&str> = head.trim_end().split("\r\n").collect();
    assert_eq!(lines.remove(0), "GET /x HTTP/1.1");
    lines.sort_unstable();
    let host = format!("Host: 127.0.0.1:{port}");
    assert_eq!(lines, ["Accept: */*", "Connection: close", host.as_str(), "User-Agent: kube-probe/1.36"]);
    // AC-05-3
    let headers = json!([{"name": "User-Agent", "value": ""}, {"name": "Accept", "value": ""},
        {"name": "host", "value": "virtual"}, {"name": "foo-bar", "value": "1"}, {"name": "Foo-Bar", "value": "2"}]);
    let probe = json!({"httpGet": {"port": port, "httpHeaders": headers}});
    assert_eq!(asked(probe).await, Outcome::Success);
    let head = heads.lock().expect("no panic")[1].clone();
    let mut lines: Vec<&str> = head.trim_end().split("\r\n").skip(1).collect();
    lines.sort_unstable();
    assert_eq!(lines, ["Connection: close", "Foo-Bar: 1", "Foo-Bar: 2", "Host: virtual"]);
}

/// A certificate that was never valid, for a name that no client requests.
fn pair() -> ServerConfig {
    let key = rcgen::KeyPair::generate().expect("a key");
    let mut params = rcgen::CertificateParams::new(vec!["elsewhere.example".to_owned()]).expect("a name");
    params.not_before = rcgen::date_time_ymd(2001, 1, 1);
    params.not_after = rcgen::date_time_ymd(2002, 1, 1);
    let certificate = params.self_signed(&key).expect("signed").der().clone();
    ServerConfig::builder_with_provider(Arc::new(ring::default_provider()))
        .with_safe_default_protocol_versions()
        .expect("versions")
        .with_no_client_auth()
        .with_single_cert(vec![certificate], PrivatePkcs8KeyDer::from(key.serialize_der()).into())
        .expect("a pair")
}

#[tokio::test]
async fn ac_05_4_any_certificate_is_taken_over_either_http() {
    // AC-05-4
    for protocol in ["h2", "http/1.1"] {
        let mut config = pair();
        config.alpn_protocols = vec![protocol.as_bytes().to_vec()];
        let acceptor = TlsAcceptor::from(Arc::new(config));
        let listener = TcpListener::bind("127.0.0.1:0").await.expect("a port");
        let port = listener.local_addr().expect("bound").port();
        let serving = tokio::spawn(async move {
            let (stream, _) = listener.accept().await.expect("a client");
            let stream = TokioIo::new(acceptor.accept(stream).await.expect("TLS"));
            let seen = Arc::<Mutex<Vec<String>>>::default();
            let kept = seen.clone();
            let answer = service_fn(move |request: Request<Incoming>| {
                let host = request.uri().authority().map(ToString::to_string);
                let line =
                    format!("{:?} {:?} {}", request.version(), host, request.headers().contains_key("connection"));
                kept.lock().expect("no panic").push(line);
                async { Ok::<_, std::convert::Infallible>(Response::new(Full::new(Bytes::from("fine")))) }
            });
            let builder = hyper::server::conn::http2::Builder::new(TokioExecutor::new());
            // The client closes as soon as it has the response.
            let _ = match protocol {
                "h2" => builder.serve_connection(stream, answer).await,
                _ => hyper::server::conn::http1::Builder::new().serve_connection(stream, answer).await,
            };
            seen.lock().expect("no panic").clone()
        });
        let probe = json!({"httpGet": {"port": port, "scheme": "HTTPS"}, "timeoutSeconds": 30});
        assert_eq!(asked(probe).await, Outcome::Success, "{protocol}");
        let expected = match protocol {
            "h2" => format!("HTTP/2.0 Some(\"127.0.0.1:{port}\") false"),
            _ => "HTTP/1.1 None true".to_owned(),
        };
        assert_eq!(serving.await.expect("no panic"), [expected]);
    }
}

/// A TLS server that reads a request head and sends `answer`; returns the connection's end, once it has ended.
async fn over_tls(
    config: ServerConfig,
    answer: impl Into<String>,
) -> (u16, tokio::task::JoinHandle<tokio_rustls::server::TlsStream<TcpStream>>) {
    let (acceptor, answer) = (TlsAcceptor::from(Arc::new(config)), answer.into());
    let listener = TcpListener::bind("127.0.0.1:0").await.expect("a port");
    let port = listener.local_addr().expect("bound").port();
    let serving = tokio::spawn(async move {
        let (stream, _) = listener.accept().await.expect("a client");
        let mut stream = acceptor.accept(stream).await.expect("TLS");
        let mut head = Vec::new();
        while !head.ends_with(b"\r\n\r\n") {
            head.push(stream.read_u8().await.expect("a head"));
        }
        stream.write_all(answer.as_bytes()).await.expect("taken");
        stream.flush().await.expect("taken");
        stream
    });
    (port, serving)
}

/// Like [`over_tls`], but closes without `close_notify`.
async fn rude(config: ServerConfig, answer: &'static str) -> u16 {
    let (port, _server) = over_tls(config, answer).await;
    port
}

fn https(port: u16) -> Value {
    json!({"httpGet": {"port": port, "path": "/x", "scheme": "HTTPS"}, "timeoutSeconds": 30})
}

#[tokio::test]
async fn the_end_of_a_tls_connection_need_not_be_announced() {
    let failed = Outcome::Failure("HTTP probe failed with statuscode: 500".to_owned());
    for (answer, expected) in [
        ("HTTP/1.1 200 OK\r\n\r\nall there is", Some(Outcome::Success)),
        ("HTTP/1.0 500 Oh\r\n\r\n", Some(failed)),
        ("HTTP/1.1 200 OK\r\nContent-Length: 100\r\n\r\nshort", None),
        ("HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n5\r\nshort\r\n", None),
    ] {
        let port = rude(pair(), answer).await;
        match (asked(https(port)).await, expected) {
            (outcome, Some(expected)) => assert_eq!(outcome, expected, "{answer}"),
            (outcome, None) => {
                assert!(matches!(outcome, Outcome::Error { state: ErrorState::Failure, .. }), "{answer}: {outcome:?}");
            }
        }
    }
    let port = rude(pair(), "").await;
    assert_eq!(failure(asked(https(port)).await), format!("Get \"https://127.0.0.1:{port}/x\": EOF"));
}

#[tokio::test]
async fn the_end_of_a_tls_connection_is_announced_to_who_is_asked() {
    let long = format!("HTTP/1.1 200 OK\r\nContent-Length: 4000\r\n\r\n{}", "busy".repeat(1000));
    for answer in ["HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nok".to_owned(), long] {
        let (port, serving) = over_tls(pair(), answer.clone()).await;
        assert_eq!(asked(https(port)).await, Outcome::Success, "{answer}");
        let end = serving.await.expect("no panic").read(&mut [0]).await;
        assert!(matches!(end, Ok(0)), "{answer}: {end:?}");
    }
}

/// Presents bytes that are no certificate, and signs as if they were.
#[derive(Debug)]
struct Garbage(Arc<rustls::sign::CertifiedKey>);

impl rustls::server::ResolvesServerCert for Garbage {
    fn resolve(&self, _hello: rustls::server::ClientHello<'_>) -> Option<Arc<rustls::sign::CertifiedKey>> {
        Some(self.0.clone())
    }
}

#[tokio::test]
async fn ac_05_4_a_certificate_that_cannot_be_read_is_taken_too() {
    for version in [&rustls::version::TLS12, &rustls::version::TLS13] {
        let key = rcgen::KeyPair::generate().expect("a key");
        let key = ring::sign::any_ecdsa_type(&PrivatePkcs8KeyDer::from(key.serialize_der()).into()).expect("a key");
        let shown = rustls::sign::CertifiedKey::new(vec![vec![0x30_u8, 0x03, 0x02, 0x01, 0x2a].into()], key);
        let config = ServerConfig::builder_with_provider(Arc::new(ring::default_provider()))
            .with_protocol_versions(&[version])
            .expect("a version")
            .with_no_client_auth()
            .with_cert_resolver(Arc::new(Garbage(Arc::new(shown))));
        let port = rude(config, "HTTP/1.1 200 OK\r\nContent-Length: 0\r\n\r\n").await;
        assert_eq!(asked(https(port)).await, Outcome::Success, "{version:?}");
    }
}

#[tokio::test]
async fn ac_05_5_redirects_are_followed_to_the_same_host_only() {
    // AC-05-5
    let (there, _) = answers("HTTP/1.1 200 OK\r\nContent-Length: 0\r\n\r\n").await;
    let moved = |to: String| format!("HTTP/1.1 302 Found\r\nLocation: {to}\r\nContent-Length: 4\r\n\r\ngone");
    let (port, _) = answers(moved(format!("http://127.0.0.1:{there}/"))).await;
    assert_eq!(asked(http(port)).await, Outcome::Success, "another port is the same host");
    let (port, _) = answers(moved(format!("http://127.0.0.2:{there}/"))).await;
    let warning = Outcome::Warning("Probe terminated redirects, Response body: gone".to_owned());
    assert_eq!(asked(http(port)).await, warning, "another host is not called");
    let (port, heads) = answers(moved("/again".to_owned())).await;
    let text = failure(asked(http(port)).await);
    assert_eq!(text, format!("Get \"http://127.0.0.1:{port}/again\": stopped after 10 redirects"));
    assert_eq!(heads.lock().expect("no panic").len(), 11);
    let (port, _) = answers(moved("http://[".to_owned())).await;
    assert!(failure(asked(http(port)).await).contains("failed to parse Location header"));
}

#[tokio::test]
async fn one_deadline_covers_all_redirects() {
    let (port, heads) = server(|mut stream, _| async move {
        tokio::time::sleep(Duration::from_millis(900)).await;
        stream.write_all(b"HTTP/1.1 302 Found\r\nLocation: /again\r\nContent-Length: 0\r\n\r\n").await
    })
    .await;
    let patient = json!({"httpGet": {"port": port, "path": "/x"}, "timeoutSeconds": 3});
    let text = failure(asked(patient).await);
    assert!(text.starts_with(&format!("Get \"http://127.0.0.1:{port}/again\": context deadline exceeded")), "{text}");
    assert!((2..=4).contains(&heads.lock().expect("no panic").len()), "each takes a part of it");
    let (port, _) = answers("HTTP/1.1 302 Found\r\nLocation: \r\nContent-Length: 4\r\n\r\ngone").await;
    let warning = Outcome::Warning("Probe terminated redirects, Response body: gone".to_owned());
    assert_eq!(asked(http(port)).await, warning, "nowhere is no place");
}

#[tokio::test]
async fn only_the_beginning_of_a_body_is_read() {
    let (port, _) = server(|mut stream, _| async move {
        stream.write_all(b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n").await?;
        loop {
            stream.write_all(format!("1000\r\n{}\r\n", "x".repeat(0x1000)).as_bytes()).await?;
        }
    })
    .await;
    assert_eq!(asked(http(port)).await, Outcome::Success, "a body without end");
    let body = "y".repeat(30_000);
    let (port, _) = answers(format!("HTTP/1.1 300 X\r\nContent-Length: 30000\r\n\r\n{body}")).await;
    let expected = format!("Probe terminated redirects, Response body: {}", "y".repeat(10_240));
    assert_eq!(asked(http(port)).await, Outcome::Warning(expected));
}

#[tokio::test]
async fn who_does_not_answer_in_time_has_failed() {
    let (port, _) = server(|stream, _| async move {
        let _open = stream;
        std::future::pending().await
    })
    .await;
    let expected = format!(
        "Get \"http://127.0.0.1:{port}/x\": context deadline exceeded (Client.Timeout exceeded while awaiting headers)"
    );
    assert_eq!(failure(asked(hasty(port)).await), expected);
    let (port, _) = server(|mut stream, _| async move {
        loop {
            stream.write_all(b"HTTP/1.1 100 Continue\r\n\r\n").await?;
            tokio::time::sleep(Duration::from_millis(5)).await;
        }
    })
    .await;
    assert!(failure(asked(hasty(port)).await).contains("awaiting headers"), "never more than promises");
    let (port, _) = server(|mut stream, _| async move {
        stream.write_all(b"HTTP/1.1 200 OK\r\nContent-Length: 100\r\n\r\n").await?;
        loop {
            stream.write_all(b"z").await?;
            tokio::time::sleep(Duration::from_millis(200)).await;
        }
    })
    .await;
    let text = failure(asked(hasty(port)).await);
    assert!(text.ends_with("(Client.Timeout or context cancellation while reading body)"), "{text}");
}

#[tokio::test]
async fn a_response_over_the_size_limit_is_aborted() {
    let promises = "HTTP/1.1 100 Continue\r\n\r\n".repeat(1000);
    let (port, _) = server(move |mut stream, _| {
        let promises = promises.clone();
        async move {
            loop {
                stream.write_all(promises.as_bytes()).await?;
            }
        }
    })
    .await;
    let text = failure(asked(http(port)).await);
    assert!(text.ends_with("response exceeds the size limit"), "long before it is late: {text}");
}

#[tokio::test]
async fn a_body_that_breaks_off_is_an_error() {
    let (port, _) = answers("HTTP/1.1 200 OK\r\nContent-Length: 100\r\n\r\nshort").await;
    let outcome = asked(http(port)).await;
    assert!(matches!(&outcome, Outcome::Error { state: ErrorState::Failure, .. }), "{outcome:?}");
}

#[tokio::test]
async fn an_answer_may_come_in_pieces() {
    let answer = "HTTP/1.1 503 Oh\r\nContent-Length: 4\r\n\r\nbusy";
    let chunked = "HTTP/1.1 503 Oh\r\nTransfer-Encoding: chunked\r\n\r\n4\r\nbusy\r\n0\r\n\r\n";
    let promised = format!("HTTP/1.1 100 Continue\r\n\r\n{answer}");
    let long = format!("HTTP/1.1 503 Oh\r\nContent-Length: 4000\r\n\r\n{}", "busy".repeat(1000));
    for answer in [answer.to_owned(), chunked.to_owned(), promised, long] {
        for at in [1, 20, answer.len() - 2, answer.len()] {
            let (first, rest) = answer.split_at(at);
            let (first, rest) = (first.to_owned(), rest.to_owned());
            let (sender, receiver) = tokio::sync::mpsc::unbounded_channel();
            let (port, heads) = server(move |mut stream, _| {
                let (first, rest, sender) = (first.clone(), rest.clone(), sender.clone());
                async move {
                    stream.set_nodelay(true)?;
                    stream.write_all(first.as_bytes()).await?;
                    tokio::time::sleep(Duration::from_millis(20)).await; // so that it is read separately
                    stream.write_all(rest.as_bytes()).await?;
                    stream.shutdown().await?;
                    let mut more = Vec::new();
                    let read = stream.read_to_end(&mut more).await;
                    let _ = sender.send((read.is_ok(), more)); // the test may be over
                    Ok(())
                }
            })
            .await;
            assert_eq!(failure(asked(http(port)).await), "HTTP probe failed with statuscode: 503", "{answer} {at}");
            let mut receiver = receiver;
            let more = tokio::time::timeout(Duration::from_secs(60), receiver.recv()).await.expect("in time");
            let (is_end, more) = more.expect("the server has an end");
            // Closing with unread data resets the connection.
            assert!(more.is_empty() && (is_end || answer.len() > 4000), "{answer} {at}: one request, not {more:?} too");
            assert_eq!(heads.lock().expect("no panic").len(), 1);
        }
    }
}

#[tokio::test]
async fn a_long_request_is_made_and_answered_before_it_is_read() {
    for length in [7 << 10, 8 << 10, 600 << 10] {
        long_request(length).await;
    }
}

async fn long_request(length: usize) {
    let value = "v".repeat(length);
    let headers = json!([{"name": "Long", "value": value}]);
    let long = |port| json!({"httpGet": {"port": port, "httpHeaders": headers}, "timeoutSeconds": 30});
    let listener = TcpListener::bind("127.0.0.1:0").await.expect("a port");
    let port = listener.local_addr().expect("bound").port();
    let reads = tokio::spawn(async move {
        let (mut stream, _) = listener.accept().await.expect("accepted");
        let mut head = Vec::new();
        while !head.ends_with(b"\r\n\r\n") {
            assert_ne!(stream.read_buf(&mut head).await.expect("open"), 0, "it has an end");
        }
        stream.write_all(b"HTTP/1.1 200 OK\r\nContent-Length: 0\r\n\r\n").await.expect("open");
        head.len()
    });
    assert_eq!(asked(long(port)).await, Outcome::Success);
    assert!(reads.await.expect("no panic") > value.len());

    let listener = TcpListener::bind("127.0.0.1:0").await.expect("a port");
    let port = listener.local_addr().expect("bound").port();
    let _deaf = tokio::spawn(async move {
        let (mut stream, _) = listener.accept().await.expect("accepted");
        stream.write_all(b"HTTP/1.1 431 Too much\r\nContent-Length: 0\r\n\r\n").await.expect("open");
        std::future::pending::<()>().await;
    });
    assert_eq!(failure(asked(long(port)).await), "HTTP probe failed with statuscode: 431");
}

#[tokio::test]
async fn a_connection_reset_is_reported() {
    let reset = |after: &'static [u8]| {
        server(move |mut stream, _| async move {
            stream.write_all(after).await?;
            if !after.is_empty() {
                tokio::time::sleep(Duration::from_millis(20)).await; // so that it is read separately
            }
            rustix::net::sockopt::set_socket_linger(&stream, Some(Duration::ZERO))?;
            Ok(())
        })
    };
    for after in ["", "HTTP/1.1 200 OK\r\nX"] {
        let (port, _) = reset(after.as_bytes()).await;
        let expected = format!("Get \"http://127.0.0.1:{port}/x\": connection error: connection reset by peer");
        assert_eq!(failure(asked(http(port)).await), expected, "{after:?}");
    }
}

#[tokio::test]
async fn a_head_of_many_lines_is_read() {
    for lines in [1, 99, 101, 1000] {
        let (port, _) = answers(format!("HTTP/1.1 200 OK\r\n{}\r\n", "X-Header: value\r\n".repeat(lines))).await;
        assert_eq!(asked(http(port)).await, Outcome::Success, "{lines} lines");
    }
}

#[tokio::test]
async fn a_header_that_is_none_does_not_count() {
    // Go accepts such responses as well.
    let (port, _) = answers("HTTP/1.1 200 OK\r\nX Y: a\r\nContent-Length: 2\r\n\r\nok").await;
    assert_eq!(asked(http(port)).await, Outcome::Success);
}

#[tokio::test]
async fn hostile_answers_are_failures() {
    let many = "X-Header: value\r\n".repeat(70_000);
    for (case, answer) in [
        ("a megabyte of headers", format!("HTTP/1.1 200 OK\r\n{many}\r\n")),
        ("a header of a megabyte", format!("HTTP/1.1 200 OK\r\nX: {}\r\n\r\n", "x".repeat(1 << 20))),
        ("a head without end", format!("HTTP/1.1 200 {}", "x".repeat(4 << 20))),
        ("no HTTP", "SSH-2.0-OpenSSH_9.7\r\n".to_owned()),
        ("nothing", String::new()),
        ("bytes", "\u{0}\u{1}\u{2}\u{16}\u{3}\u{1}".repeat(100)),
        ("a length that is none", "HTTP/1.1 200 OK\r\nContent-Length: -5\r\n\r\n".to_owned()),
        ("HTTP/2 to who asked in HTTP/1", "PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n".to_owned()),
    ] {
        let (port, _) = answers(answer).await;
        let text = failure(asked(http(port)).await);
        assert!(text.starts_with("Get \"http://127.0.0.1:") && text.len() < 500, "{case}: {text}");
        println!("{case}: {text}");
    }
}

#[tokio::test]
async fn tls_garbage_is_a_failure() {
    for (bytes, expected) in [
        (b"HTTP/1.1 400 Bad Request\r\n\r\n".to_vec(), "http: server gave HTTP response to HTTPS client"),
        (b"SSH-2.0-OpenSSH_9.7\r\n".to_vec(), "tls: first record does not look like a TLS handshake"),
        (vec![0xff; 4096], "tls: first record does not look like a TLS handshake"),
        (vec![0x16, 0x03, 0x03, 0x40, 0x00, 0x02], "EOF"),
        (vec![0x15, 0x03, 0x03, 0x00, 0x02, 0x02, 0x28], "tls: received fatal alert: "),
        (vec![], "EOF"),
    ] {
        let listener = TcpListener::bind("127.0.0.1:0").await.expect("a port");
        let port = listener.local_addr().expect("bound").port();
        tokio::spawn(async move {
            while let Ok((mut stream, _)) = listener.accept().await {
                let _ = stream.write_all(&bytes).await; // the client may have disconnected
                let _ = stream.shutdown().await;
                let mut rest = Vec::new();
                let _ = stream.read_to_end(&mut rest).await;
            }
        });
        let probe = json!({"httpGet": {"port": port, "scheme": "HTTPS"}, "timeoutSeconds": 5});
        let text = failure(asked(probe).await);
        assert!(text.starts_with(&format!("Get \"https://127.0.0.1:{port}/\": {expected}")), "{text}");
    }
}

/// A server that sends `first` once, and then `rest` repeatedly.
async fn babbler(first: Vec<u8>, rest: Vec<u8>, pause: Duration) -> u16 {
    let listener = TcpListener::bind("127.0.0.1:0").await.expect("a port");
    let port = listener.local_addr().expect("bound").port();
    tokio::spawn(async move {
        while let Ok((stream, _)) = listener.accept().await {
            tokio::spawn(babble(stream, first.clone(), rest.clone(), pause));
        }
    });
    port
}

async fn babble(stream: TcpStream, first: Vec<u8>, rest: Vec<u8>, pause: Duration) -> std::io::Result<()> {
    let (mut read, mut write) = stream.into_split();
    tokio::spawn(async move { tokio::io::copy(&mut read, &mut tokio::io::sink()).await });
    write.write_all(&first).await?;
    loop {
        write.write_all(&rest).await?;
        tokio::time::sleep(pause).await;
    }
}

/// An HTTP/2 frame on stream 0.
fn frame(kind: u8, payload: &[u8]) -> Vec<u8> {
    let length = u32::try_from(payload.len()).expect("short").to_be_bytes();
    [&length[1..], &[kind, 0, 0, 0, 0, 0], payload].concat()
}

#[tokio::test]
async fn who_never_comes_to_the_point_has_failed_in_time() {
    const SETTINGS: u8 = 4;
    const PING: u8 = 6;
    let begun = std::time::Instant::now();
    // A handshake of which one more byte arrives repeatedly, at most a record of it.
    let port = babbler(vec![0x16, 0x03, 0x03, 0x40, 0x00, 0x02], vec![0], Duration::from_millis(20)).await;
    let text = failure(asked(json!({"httpGet": {"port": port, "scheme": "HTTPS"}, "timeoutSeconds": 1})).await);
    assert!(text.contains("TLS handshake timeout"), "{text}");
    for (case, rest) in [("settings", frame(SETTINGS, &[])), ("pings", frame(PING, &[7; 8]))] {
        let port = babbler(frame(SETTINGS, &[]), rest.repeat(100), Duration::from_millis(1)).await;
        println!("{case}: {}", failure(asked(json!({"grpc": {"port": port}, "timeoutSeconds": 1})).await));
    }
    let port = babbler(Vec::new(), vec![b'x'; 64 << 10], Duration::ZERO).await;
    println!("no HTTP/2: {}", failure(asked(json!({"grpc": {"port": port}, "timeoutSeconds": 1})).await));
    assert!(begun.elapsed() < Duration::from_secs(30), "{:?}", begun.elapsed());
}

#[tokio::test]
async fn a_megabyte_of_headers_over_http2_is_a_failure() {
    let mut config = pair();
    config.alpn_protocols = vec![b"h2".to_vec()];
    let acceptor = TlsAcceptor::from(Arc::new(config));
    let listener = TcpListener::bind("127.0.0.1:0").await.expect("a port");
    let port = listener.local_addr().expect("bound").port();
    tokio::spawn(async move {
        let (stream, _) = listener.accept().await.expect("a client");
        let stream = TokioIo::new(acceptor.accept(stream).await.expect("TLS"));
        let answer = service_fn(|_: Request<Incoming>| async {
            let mut response = Response::new(Full::new(Bytes::new()));
            for at in 0..1024_u32 {
                let name = hyper::header::HeaderName::try_from(format!("x-{at}")).expect("a name");
                response.headers_mut().insert(name, "v".repeat(1024).parse().expect("a value"));
            }
            Ok::<_, std::convert::Infallible>(response)
        });
        hyper::server::conn::http2::Builder::new(TokioExecutor::new()).serve_connection(stream, answer).await
    });
    let text = failure(asked(json!({"httpGet": {"port": port, "scheme": "HTTPS"}, "timeoutSeconds": 60})).await);
    assert!(text.starts_with("Get \"https://127.0.0.1:") && text.len() < 500, "{text}");
    assert!(!text.contains("deadline exceeded"), "{text}");
}

#[tokio::test]
async fn who_half_closes_may_still_answer() {
    let (port, _) = server(|mut stream, _| async move {
        stream.write_all(b"HTTP/1.1 200 OK\r\nConnection: close\r\n\r\nall there is").await?;
        stream.shutdown().await?;
        std::future::pending().await
    })
    .await;
    assert_eq!(asked(http(port)).await, Outcome::Success);
    let (port, _) = server(|mut stream, _| async move {
        rustix::net::shutdown(&stream, rustix::net::Shutdown::Read)?;
        tokio::time::sleep(Duration::from_millis(50)).await; // simulates a slow server
        stream.write_all(b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nok").await
    })
    .await;
    assert_eq!(asked(http(port)).await, Outcome::Success, "who hears no more");
}

#[tokio::test]
async fn who_cannot_be_reached_has_failed() {
    // Bound, so that no other process gets it, but not listening.
    let closed = tokio::net::TcpSocket::new_v4().expect("a socket");
    closed.bind("127.0.0.1:0".parse().expect("an address")).expect("a port");
    let port = closed.local_addr().expect("bound").port();
    let refused = format!("dial tcp 127.0.0.1:{port}: connect: connection refused");
    assert_eq!(failure(asked(http(port)).await), format!("Get \"http://127.0.0.1:{port}/x\": {refused}"));
    assert_eq!(failure(asked(json!({"tcpSocket": {"port": port}})).await), refused);
    let text = failure(asked(json!({"tcpSocket": {"port": 1, "host": "no.such.host.invalid"}})).await);
    assert!(text.starts_with("dial tcp: lookup no.such.host.invalid: "), "{text}");
    let text = failure(asked(json!({"grpc": {"port": port}, "timeoutSeconds": 1})).await);
    let expected =
        format!("timeout: failed to connect service \"127.0.0.1:{port}\" within 1s: context deadline exceeded");
    assert_eq!(text, expected);
}

#[tokio::test]
async fn a_port_that_takes_connections_is_enough() {
    let listener = TcpListener::bind("[::1]:0").await.expect("a port");
    let port = listener.local_addr().expect("bound").port();
    assert_eq!(asked_at("::1", json!({"tcpSocket": {"port": port}})).await, Outcome::Success);
    let (mut stream, _) = listener.accept().await.expect("it came");
    assert_eq!(stream.read(&mut [0]).await.expect("closed in peace"), 0, "and went");
    let probe = json!({"tcpSocket": {"port": port, "host": "::1"}});
    assert_eq!(asked(probe).await, Outcome::Success, "its own host");
}

#[tokio::test]
async fn what_cannot_be_asked_is_an_error() {
    for (probe, expected) in [
        (json!({"tcpSocket": {"port": "nope"}}), r#"strconv.Atoi: parsing "nope": invalid syntax"#),
        (json!({"httpGet": {"port": 0}}), "invalid port number: 0"),
        (json!({"grpc": {"port": 70000}}), "invalid port number: 70000"),
        (json!({}), "missing probe handler"),
    ] {
        let Outcome::Error { state: ErrorState::Unknown, text } = asked(probe.clone()).await else { panic!("{probe}") };
        assert!(text.starts_with(expected), "{probe}: {text}");
    }
}

/// A health service that reports the status that the service name requests.
struct Clinic;

#[tonic::async_trait]
impl Health for Clinic {
    async fn check(
        &self,
        request: tonic::Request<HealthCheckRequest>,
    ) -> Result<tonic::Response<HealthCheckResponse>, Status> {
        let agent = request.metadata().get("user-agent").and_then(|a| a.to_str().ok()).unwrap_or_default();
        assert!(agent.starts_with("kube-probe/1.36"), "{agent}");
        let status = match request.get_ref().service.as_str() {
            "" => ServingStatus::Serving,
            "ill" => ServingStatus::NotServing,
            "slow" => std::future::pending().await,
            "broken" => return Err(Status::unimplemented("no health here")),
            other => return Err(Status::not_found(format!("unknown service {other}"))),
        };
        Ok(tonic::Response::new(HealthCheckResponse { status: status.into() }))
    }

    type WatchStream = futures::stream::Empty<Result<HealthCheckResponse, Status>>;

    async fn watch(
        &self,
        _request: tonic::Request<HealthCheckRequest>,
    ) -> Result<tonic::Response<Self::WatchStream>, Status> {
        Err(Status::unimplemented("not asked for"))
    }
}

#[tokio::test]
async fn grpc_servers_are_asked_for_their_health() {
    let listener = TcpListener::bind("127.0.0.1:0").await.expect("a port");
    let address: SocketAddr = listener.local_addr().expect("bound");
    let incoming = tokio_stream::wrappers::TcpListenerStream::new(listener);
    tokio::spawn(
        tonic::transport::Server::builder().add_service(HealthServer::new(Clinic)).serve_with_incoming(incoming),
    );
    let port = address.port();
    let probe = |service: &str| {
        let timeout = if service == "slow" { 1 } else { 30 };
        json!({"grpc": {"port": port, "service": service}, "timeoutSeconds": timeout})
    };
    assert_eq!(asked(probe("")).await, Outcome::Success);
    for (service, expected) in [
        ("ill", "service unhealthy (responded with \"NOT_SERVING\")"),
        ("slow", "timeout: health rpc did not complete within 1s"),
        (
            "broken",
            "error: this server does not implement the grpc health protocol (grpc.health.v1.Health): no health here",
        ),
        ("who", "error: health rpc probe failed: rpc error: code = NotFound desc = unknown service who"),
    ] {
        assert_eq!(failure(asked(probe(service)).await), expected);
    }
}

#[tokio::test]
async fn a_grpc_server_that_speaks_something_else_has_failed() {
    let (port, _) = answers("HTTP/1.1 200 OK\r\nContent-Length: 0\r\n\r\n").await;
    println!("{}", failure(asked(json!({"grpc": {"port": port}, "timeoutSeconds": 2})).await));
    let listener = TcpListener::bind("127.0.0.1:0").await.expect("a port");
    let port = listener.local_addr().expect("bound").port();
    println!("{}", failure(asked(json!({"grpc": {"port": port}})).await));
    drop(listener);
}

#[tokio::test]
async fn what_an_attempt_keeps_while_it_waits_is_small() {
    let cri = connect(&nowhere(), &Registry::new()).expect("lazily");
    let (command, second) = (["true".to_owned()], Duration::from_secs(1));
    let exec = size_of_val(&*cri.runtime.exec_sync("c", &command, second, 1));
    let handlers = Handlers::new(cri.runtime).expect("TLS");
    let pod = pod(json!({"containers": [{"name": "c", "readinessProbe": http(1)}]}));
    let ask = ProbeRequest::new(pod, "c".into(), ProbeKind::Readiness, "c-0".into(), Some("127.0.0.1".to_owned()));
    let dialler = handlers.dialler.of(ask.pod.uid());
    let ProbeAction::Http(get) = &ask.resolved().what else { panic!("it asks a server") };
    let http = size_of_val(&http::probe(dialler, get, second));
    let any = size_of_val(&*handlers.probe_once(&ask));
    // Memory that each attempt in flight takes: 330 of them stay within 3 MB.
    for (what, bytes) in [("exec", exec), ("http", http), ("any", any)] {
        println!("{what}: {bytes}");
        assert!(bytes <= 8192, "{what}: {bytes} bytes");
    }
}
