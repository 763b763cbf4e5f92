//! Connection and request limits of the listeners against hostile HTTP/1.1 clients.

use std::{sync::atomic::Ordering, time::Duration};

use berth_server::routing::EnabledEndpoints;
use tokio::{
    io::{AsyncReadExt, AsyncWriteExt},
    net::TcpStream,
    time::Instant,
};

use crate::server::fixture::{PATIENCE, RunningListener};

#[tokio::test]
async fn a_thousand_idle_connections_block_no_request() {
    let served = RunningListener::guarded(&[("*", "*")]).await;
    let mut idle = Vec::new();
    for _ in 0..1_000 {
        idle.push(served.connect().await);
    }
    assert_eq!(served.ask("GET", "/healthz", "").await.0, 200);
}

/// More connections than one address may keep, all of them unauthenticated.
#[tokio::test]
async fn silent_connections_give_way_to_later_ones() {
    let served = RunningListener::guarded(&[("*", "*")]).await;
    let mut idle = Vec::new();
    for _ in 0..2_100 {
        idle.push(served.connect().await);
    }
    assert_eq!(served.ask("GET", "/healthz", "").await.0, 200);
}

#[tokio::test]
async fn half_a_head_and_heads_without_end_are_cut_off() {
    let served = RunningListener::guarded(&[("*", "*")]).await;
    let mut slow = served.connect().await;
    slow.write_all(b"GET /pods HTTP/1.1\r\nHos").await.expect("taken");
    let mut large = served.connect().await;
    let line = format!("X: {}\r\n", "y".repeat(8 << 10));
    let mut answer = Vec::new();
    let flood = async {
        if large.write_all(b"GET /pods HTTP/1.1\r\nHost: x\r\n").await.is_err() {
            return;
        }
        for _ in 0..400 {
            if large.write_all(line.as_bytes()).await.is_err() {
                return;
            }
        }
    };
    tokio::time::timeout(PATIENCE, flood).await.expect("cut off, or taken");
    let _ = tokio::time::timeout(PATIENCE, large.read_to_end(&mut answer)).await.expect("an end");
    let answer = String::from_utf8_lossy(&answer);
    assert!(answer.is_empty() || answer.starts_with("HTTP/1.1 431"), "{answer}");
    assert_eq!(served.ask("GET", "/healthz", "").await.0, 200);
    drop(slow);
}

#[tokio::test(start_paused = true)]
async fn who_is_slow_is_let_go() {
    // Slowloris: a byte now and then does not help; nor does silence, before a request head or after a response.
    let served = RunningListener::guarded(&[("*", "*")]).await;
    for (begins, drips) in [("GET /pods HTTP/1.1\r\nX: ", true), ("GET /pods HTTP/1.1\r\nHos", false), ("", false)] {
        let (mut stream, begun) = (served.connect().await, tokio::time::Instant::now());
        stream.write_all(begins.as_bytes()).await.expect("taken");
        let (mut reading, mut writing) = stream.split();
        let drip = async {
            while drips && writing.write_all(b"y").await.is_ok() {
                tokio::time::sleep(Duration::from_secs(5)).await;
            }
            std::future::pending::<()>().await;
        };
        let mut rest = Vec::new();
        tokio::select! {
            _ = reading.read_to_end(&mut rest) => {}
            () = drip => {}
        }
        assert!((85..100).contains(&begun.elapsed().as_secs()), "{begins:?} {:?}", begun.elapsed());
        assert!(!rest.starts_with(b"HTTP/1.1 200"), "{begins:?}");
    }
    let (mut stream, begun) = (served.connect().await, tokio::time::Instant::now());
    stream.write_all(b"GET /healthz HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer good\r\n\r\n").await.expect("taken");
    let mut rest = Vec::new();
    stream.read_to_end(&mut rest).await.expect("an end");
    assert!(
        rest.starts_with(b"HTTP/1.1 200") && (85..100).contains(&begun.elapsed().as_secs()),
        "{:?}",
        begun.elapsed()
    );
}

#[tokio::test(start_paused = true)]
async fn a_body_that_does_not_come_is_not_waited_for() {
    // On the read-only port anybody may announce a form body.
    let served = RunningListener::start(EnabledEndpoints::READ_ONLY, None, false).await;
    for drips in [false, true] {
        let (mut stream, begun) = (served.connect().await, tokio::time::Instant::now());
        let head = "POST /stats/summary HTTP/1.1\r\nHost: x\r\nContent-Length: 1000\r\n\
                    Content-Type: application/x-www-form-urlencoded\r\n\r\n";
        stream.write_all(head.as_bytes()).await.expect("taken");
        let (mut reading, mut writing) = stream.split();
        let drip = async {
            while drips && writing.write_all(b"y").await.is_ok() {
                tokio::time::sleep(Duration::from_secs(5)).await;
            }
            std::future::pending::<()>().await;
        };
        let mut answer = Vec::new();
        tokio::select! {
            _ = reading.read_to_end(&mut answer) => {}
            () = drip => {}
        }
        let answer = String::from_utf8_lossy(&answer);
        assert!((85..100).contains(&begun.elapsed().as_secs()), "{drips} {:?}", begun.elapsed());
        assert!(
            answer.starts_with("HTTP/1.1 500") && answer.contains("timed out reading request body after 90s"),
            "{answer}"
        );
    }
}

/// One response with a Content-Length.
async fn answer(stream: &mut TcpStream) -> String {
    let mut read = Vec::new();
    loop {
        let text = String::from_utf8_lossy(&read).to_lowercase();
        if let Some((head, body)) = text.split_once("\r\n\r\n") {
            let length = head.lines().find_map(|line| line.strip_prefix("content-length: ")?.parse::<usize>().ok());
            if body.len() >= length.unwrap_or_default() {
                return text;
            }
        }
        assert!(stream.read_buf(&mut read).await.expect("no reset") > 0, "it ended: {text}");
    }
}

#[tokio::test]
async fn an_unread_body_does_not_cost_the_connection() {
    let served = RunningListener::start(EnabledEndpoints::READ_ONLY, None, false).await;
    let mut stream = served.connect().await;
    let head = |length: usize| format!("POST /nothing HTTP/1.1\r\nHost: x\r\nContent-Length: {length}\r\n\r\n");
    for _ in 0..3 {
        stream.write_all(head(5).as_bytes()).await.expect("taken");
        let mut early = [0];
        let moment = tokio::time::timeout(Duration::from_millis(50), stream.read(&mut early)).await;
        assert!(moment.is_err(), "answered before the body came");
        stream.write_all(b"hello").await.expect("taken");
        let answer = answer(&mut stream).await;
        assert!(answer.starts_with("http/1.1 404") && !answer.contains("connection: close"), "{answer}");
    }
    // A body that never arrives, one that the client sends only after 100 Continue, and one that is too large.
    let expects = head(5).replace("Host", "Expect: 100-continue\r\nHost");
    for (head, body) in [(head(5), 0), (expects, 0), (head(1 << 20), 300 << 10)] {
        let mut stream = served.connect().await;
        stream.write_all(head.as_bytes()).await.expect("taken");
        stream.write_all(&vec![b'x'; body]).await.expect("taken");
        let answer = answer(&mut stream).await;
        assert!(answer.starts_with("http/1.1 404") && answer.contains("connection: close"), "{head}{answer}");
    }
}

#[tokio::test(start_paused = true)]
async fn who_reads_slowly_gets_the_whole_page() {
    // The response is entirely in buffers when the first byte is read; reading it takes longer than the idle timeout.
    let served = RunningListener::guarded(&[("*", "*")]).await;
    served.players.page_bytes.store(32 << 20, Ordering::SeqCst);
    let (mut stream, begun) = (served.connect().await, Instant::now());
    let ask = b"GET /metrics/cadvisor HTTP/1.1\r\nHost: x\r\nConnection: close\r\nAuthorization: Bearer good\r\n\r\n";
    stream.write_all(ask).await.expect("taken");
    let (mut read, mut piece) = (0, vec![0; 1 << 20]);
    loop {
        match stream.read(&mut piece).await.expect("no reset") {
            0 => break,
            bytes => read += bytes,
        }
        tokio::time::sleep(Duration::from_secs(10)).await;
    }
    assert!(read > 32 << 20, "{read} bytes in {:?}", begun.elapsed());
    assert!(begun.elapsed().as_secs() > 150, "{:?}", begun.elapsed());
}

#[tokio::test]
async fn http_without_tls_gets_a_bad_request() {
    let served = RunningListener::secured(&[("*", "*")]).await;
    let expected = "HTTP/1.0 400 Bad Request\r\n\r\nClient sent an HTTP request to an HTTPS server.\n";
    for method in ["GET", "HEAD", "POST", "PUT", "OPTIONS", "DELETE", "PATCH"] {
        assert_eq!(served.raw(&format!("{method} /pods HTTP/1.1\r\nHost: x\r\n\r\n")).await, expected, "{method}");
    }
}

#[tokio::test]
async fn who_loses_power_is_missed() {
    // TCP keep-alive probes a silent peer: nothing else would detect that a silent stream has lost its client.
    let served = RunningListener::guarded(&[("*", "*")]).await;
    let mut stream = served.connect().await;
    let request = "GET /containerLogs/n/p/silent?follow=1 HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer good\r\n\r\n";
    stream.write_all(request.as_bytes()).await.expect("taken");
    let mut head = [0; 12];
    stream.read_exact(&mut head).await.expect("a head");
    let port = |address: std::io::Result<std::net::SocketAddr>| format!(":{:04X}", address.expect("bound").port());
    let (client, server) = (port(stream.local_addr()), port(stream.peer_addr()));
    // sl local_address rem_address st tx_queue:rx_queue timer:when …; timer 2 is keep-alive.
    let asks = || {
        let table = std::fs::read_to_string("/proc/net/tcp").expect("readable");
        table.lines().any(|line| {
            let fields: Vec<&str> = line.split_whitespace().collect();
            let is = |place: usize, end: &str| fields.get(place).is_some_and(|field| field.ends_with(end));
            is(1, &server) && is(2, &client) && fields.get(5).is_some_and(|timer| timer.starts_with("02:"))
        })
    };
    // Until the response head is acknowledged, the timer is another one.
    let soon = async {
        while !asks() {
            tokio::time::sleep(Duration::from_millis(5)).await;
        }
    };
    tokio::time::timeout(PATIENCE, soon).await.expect("the kernel asks after the client");
}

#[tokio::test]
async fn http_2_is_spoken_over_tls_only() {
    let served = RunningListener::guarded(&[("*", "*")]).await;
    let answer = served.raw("PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n").await;
    assert!(answer.is_empty() || answer.starts_with("HTTP/1.1 4"), "{answer:?}");
}

#[tokio::test(start_paused = true)]
async fn half_a_handshake_is_let_go() {
    let served = RunningListener::secured(&[("*", "*")]).await;
    for begins in [&b""[..], b"\x16\x03\x01\x02\x00\x01"] {
        let (mut stream, begun) = (served.connect().await, tokio::time::Instant::now());
        stream.write_all(begins).await.expect("taken");
        let mut rest = Vec::new();
        let _ = stream.read_to_end(&mut rest).await;
        assert!((9..12).contains(&begun.elapsed().as_secs()), "{:?}", begun.elapsed());
    }
}

#[tokio::test]
async fn garbage_is_answered_and_forgotten() {
    let served = RunningListener::guarded(&[("*", "*")]).await;
    for garbage in ["\u{0}\u{1}\u{2}\r\n\r\n", "GET\r\n\r\n", "GET / HTTP/9.9\r\n\r\n", "\u{16}\u{3}\u{1}\u{2}\u{0}"] {
        let mut stream = served.connect().await;
        stream.write_all(garbage.as_bytes()).await.expect("taken");
        stream.shutdown().await.expect("closed");
        let mut answer = Vec::new();
        let _ = tokio::time::timeout(PATIENCE, stream.read_to_end(&mut answer)).await.expect("an end");
        assert!(answer.is_empty() || answer.starts_with(b"HTTP/1.1 400") || answer.starts_with(b"HTTP/1.0 400"));
    }
    assert_eq!(served.ask("GET", "/healthz", "").await.0, 200);
}

#[tokio::test]
async fn a_request_of_http_1_1_names_one_host() {
    let served = RunningListener::guarded(&[("get", "pods")]).await;
    let head =
        |lines: &str| format!("GET /pods HTTP/1.1\r\nAuthorization: Bearer good\r\n{lines}Connection: close\r\n\r\n");
    for (lines, message) in [("", "missing required Host header"), ("Host: a\r\nHost: b\r\n", "too many Host headers")]
    {
        let answer = served.raw(&head(lines)).await;
        assert!(answer.starts_with("HTTP/1.1 400 Bad Request\r\n"), "{answer}");
        assert!(answer.ends_with(&format!("\r\n\r\n400 Bad Request: {message}")), "{answer}");
    }
    let answer = served.raw(&head("Host:\r\n")).await;
    assert!(answer.starts_with("HTTP/1.1 200 OK\r\n"), "an empty one is one: {answer}");
    let answer = served.raw("GET /pods HTTP/1.0\r\nAuthorization: Bearer good\r\n\r\n").await;
    assert!(answer.contains(" 200 OK\r\n"), "HTTP/1.0 needs none: {answer}");
}
