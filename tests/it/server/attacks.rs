//! Hostile and slow HTTP/2 clients against the server: hand-written frames, over TLS.

use std::{sync::Arc, sync::atomic::Ordering, time::Duration};

use berth_sys::tls::SignatureOnly;
use rustls::{ClientConfig, pki_types::ServerName};
use tokio::{
    io::{AsyncReadExt, AsyncWriteExt},
    net::TcpStream,
    time::{Instant, timeout},
};
use tokio_rustls::{TlsConnector, client::TlsStream};

use crate::server::fixture::{PATIENCE, RunningListener};

const DATA: u8 = 0;
const HEADERS: u8 = 1;
const RST_STREAM: u8 = 3;
const SETTINGS: u8 = 4;
const PING: u8 = 6;
const GOAWAY: u8 = 7;
const WINDOW_UPDATE: u8 = 8;
const CONTINUATION: u8 = 9;
const END_STREAM: u8 = 1;
const END_HEADERS: u8 = 4;

/// A received frame.
#[derive(Debug, PartialEq, Eq)]
struct Frame {
    kind: u8,
    flags: u8,
    stream: u32,
    payload: Vec<u8>,
}

/// A client that sends arbitrary bytes.
struct Hostile {
    stream: TlsStream<TcpStream>,
}

impl Hostile {
    /// Completes the TLS handshake and sends nothing.
    async fn silent(served: &RunningListener) -> Self {
        let provider = Arc::new(rustls::crypto::ring::default_provider());
        let mut config = ClientConfig::builder_with_provider(provider.clone())
            .with_safe_default_protocol_versions()
            .expect("versions")
            .dangerous()
            .with_custom_certificate_verifier(Arc::new(SignatureOnly::of_servers(&provider)))
            .with_no_client_auth();
        config.alpn_protocols = vec![b"h2".to_vec()];
        let name = ServerName::try_from("x").expect("a name");
        let stream = TlsConnector::from(Arc::new(config)).connect(name, served.connect().await).await;
        Self { stream: stream.expect("TLS") }
    }

    /// Sends the preface, with these settings.
    async fn new(served: &RunningListener, settings: &[(u16, u32)]) -> Self {
        let mut client = Self::silent(served).await;
        client.send(b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n").await.expect("taken");
        let payload: Vec<u8> =
            settings.iter().flat_map(|(id, value)| [&id.to_be_bytes()[..], &value.to_be_bytes()].concat()).collect();
        client.send(&frame(SETTINGS, 0, 0, &payload)).await.expect("taken");
        client
    }

    async fn send(&mut self, bytes: &[u8]) -> std::io::Result<()> {
        self.stream.write_all(bytes).await?;
        self.stream.flush().await
    }

    /// The next frame; `None` at the end of the connection.
    async fn frame(&mut self) -> Option<Frame> {
        let mut head = [0; 9];
        self.stream.read_exact(&mut head).await.ok()?;
        let [a, b, c, kind, flags, stream @ ..] = head;
        let mut payload = vec![0; usize::from(a) << 16 | usize::from(b) << 8 | usize::from(c)];
        self.stream.read_exact(&mut payload).await.ok()?;
        Some(Frame { kind, flags, stream: u32::from_be_bytes(stream), payload })
    }

    /// The first frame of that kind; `None` if the connection ends before.
    async fn until(&mut self, kind: u8) -> Option<Frame> {
        loop {
            let next = timeout(PATIENCE, self.frame()).await.expect("something comes")?;
            if next.kind == kind {
                return Some(next);
            }
        }
    }

    /// All frames until the end of the connection.
    async fn rest(&mut self) -> Vec<Frame> {
        let mut frames = Vec::new();
        while let Some(next) = self.frame().await {
            frames.push(next);
        }
        frames
    }
}

fn frame(kind: u8, flags: u8, stream: u32, payload: &[u8]) -> Vec<u8> {
    let length = u32::try_from(payload.len()).expect("short");
    let mut bytes = length.to_be_bytes()[1..].to_vec();
    bytes.extend([kind, flags]);
    bytes.extend(stream.to_be_bytes());
    bytes.extend(payload);
    bytes
}

/// GET of a path with the valid token, in HPACK.
fn get(path: &str) -> Vec<u8> {
    let text = |text: &str| [&[u8::try_from(text.len()).expect("short")][..], text.as_bytes()].concat();
    // :method GET, :scheme https, :authority, :path, authorization
    [&[0x82, 0x87, 0x01][..], &text("x"), &[0x04], &text(path), &[0x0f, 0x08], &text("Bearer good")].concat()
}

fn ask(stream: u32, path: &str) -> Vec<u8> {
    frame(HEADERS, END_STREAM | END_HEADERS, stream, &get(path))
}

/// Other clients are served; the hostile client's handlers have ended.
async fn is_well(served: &RunningListener) {
    let gone = async {
        while served.players.readers.load(Ordering::SeqCst) > 0 {
            tokio::time::sleep(Duration::from_millis(5)).await;
        }
    };
    timeout(PATIENCE, gone).await.expect("nothing is left of the attack");
    let mut other = Hostile::new(served, &[]).await;
    other.send(&ask(1, "/healthz")).await.expect("taken");
    let answer = other.until(HEADERS).await.expect("an answer");
    assert_eq!(answer.payload.first(), Some(&0x88), "200");
}

#[tokio::test]
async fn streams_have_a_cap() {
    let served = RunningListener::secured(&[("*", "*")]).await;
    let mut client = Hostile::new(&served, &[]).await;
    let settings = client.until(SETTINGS).await.expect("settings").payload;
    let parameters: Vec<(u16, u32)> = settings
        .chunks_exact(6)
        .map(|s| (u16::from_be_bytes([s[0], s[1]]), u32::from_be_bytes([s[2], s[3], s[4], s[5]])))
        .collect();
    assert!(parameters.contains(&(3, 100)) && parameters.contains(&(6, 64 << 10)), "{parameters:?}");
    for n in 0..101 {
        client.send(&ask(2 * n + 1, "/containerLogs/n/p/silent?follow=1")).await.expect("taken");
    }
    let refused = client.until(RST_STREAM).await.expect("one too many");
    assert_eq!((refused.stream, refused.payload), (201, 7_u32.to_be_bytes().to_vec()), "REFUSED_STREAM");
    let all = async {
        while served.players.readers.load(Ordering::SeqCst) < 100 {
            tokio::time::sleep(Duration::from_millis(5)).await;
        }
    };
    timeout(PATIENCE, all).await.expect("the others are served");
    drop(client);
    is_well(&served).await;
}

#[tokio::test]
async fn rapid_resets_end_the_connection() {
    // CVE-2023-44487: before the handler runs, and while it does.
    let served = RunningListener::secured(&[("*", "*")]).await;
    for waits in [false, true] {
        let mut client = Hostile::new(&served, &[]).await;
        let mut sent = 0_u32;
        let begun = Instant::now();
        while sent < 20_000 {
            let stream = 2 * sent + 1;
            let mut bytes = ask(stream, "/containerLogs/n/p/silent?follow=1");
            if waits {
                if client.send(&bytes).await.is_err() {
                    break;
                }
                let Ok(head) = timeout(PATIENCE, client.until(HEADERS)).await else { break };
                if head.is_none() {
                    break;
                }
                bytes.clear();
            }
            bytes.extend(frame(RST_STREAM, 0, stream, &8_u32.to_be_bytes()));
            if client.send(&bytes).await.is_err() {
                break;
            }
            sent += 1;
        }
        let slow = u32::try_from(begun.elapsed().as_millis() / 100).expect("short");
        // Frames in flight when the server closes the connection cause no more work.
        assert!(sent < if waits { 110 + slow } else { 20_000 }, "waits {waits}: {sent} resets are taken");
        timeout(PATIENCE, client.rest()).await.expect("an end");
        is_well(&served).await;
    }
}

#[tokio::test]
async fn heads_without_end_end_the_connection() {
    // CVE-2023-45288
    let served = RunningListener::secured(&[("*", "*")]).await;
    let mut client = Hostile::new(&served, &[]).await;
    client.send(&frame(HEADERS, END_STREAM, 1, &get("/pods"))).await.expect("taken");
    // A literal header field, repeated; the header block never ends.
    let field: Vec<u8> = [&[0x00, 0x01, b'x', 0x64][..], &[b'y'; 100]].concat();
    let piece = frame(CONTINUATION, 0, 1, &field.repeat(150));
    let mut sent = 0;
    while sent < 64 << 20 && client.send(&piece).await.is_ok() {
        sent += piece.len();
    }
    assert!(sent < 4 << 20, "{sent} bytes of a head are taken");
    timeout(PATIENCE, client.rest()).await.expect("an end");
    is_well(&served).await;
}

#[tokio::test]
async fn a_list_of_headers_has_a_size() {
    let served = RunningListener::secured(&[("*", "*")]).await;
    let mut client = Hostile::new(&served, &[]).await;
    client.send(&frame(HEADERS, END_STREAM, 1, &get("/pods"))).await.expect("taken");
    let field: Vec<u8> = [&[0x00, 0x01, b'x', 0x64][..], &[b'y'; 100]].concat();
    for last in [false, false, false, false, true] {
        let flags = if last { END_HEADERS } else { 0 };
        // 5 × 150 × 133 bytes as the protocol counts them: more than 64 KiB.
        client.send(&frame(CONTINUATION, flags, 1, &field.repeat(150))).await.expect("taken");
    }
    let frames = timeout(PATIENCE, async {
        loop {
            match client.frame().await {
                Some(f) if f.kind == HEADERS || f.kind == RST_STREAM || f.kind == GOAWAY => return Some(f),
                Some(_) => {}
                None => return None,
            }
        }
    });
    let answer = frames.await.expect("an answer or an end");
    assert!(answer.as_ref().is_none_or(|f| f.payload.first() != Some(&0x88)), "not served: {answer:?}");
    is_well(&served).await;
}

#[tokio::test(start_paused = true)]
async fn silent_clients_are_disconnected() {
    let served = RunningListener::secured(&[("*", "*")]).await;
    let begun = Instant::now();
    // No preface; then a preface and nothing else but ping responses.
    let mut silent = Hostile::silent(&served).await;
    silent.rest().await;
    assert!((85..110).contains(&begun.elapsed().as_secs()), "{:?}", begun.elapsed());
    let mut idle = Hostile::new(&served, &[]).await;
    let begun = Instant::now();
    idle.send(&frame(SETTINGS, 1, 0, &[])).await.expect("taken");
    while let Some(f) = idle.frame().await {
        if f.kind == PING && f.flags == 0 {
            idle.send(&frame(PING, 1, 0, &f.payload)).await.expect("taken");
        }
    }
    assert!((85..110).contains(&begun.elapsed().as_secs()), "{:?}", begun.elapsed());
}

#[tokio::test(start_paused = true)]
async fn clients_that_read_nothing_are_disconnected() {
    let served = RunningListener::secured(&[("*", "*")]).await;
    // A flow control window of 0: the response body cannot be sent, while pings are exchanged.
    let mut client = Hostile::new(&served, &[(4, 0)]).await;
    let begun = Instant::now();
    client.send(&ask(1, "/metrics")).await.expect("taken");
    while let Some(f) = client.frame().await {
        if f.kind == PING && f.flags == 0 {
            client.send(&frame(PING, 1, 0, &f.payload)).await.expect("taken");
        }
    }
    assert!((295..400).contains(&begun.elapsed().as_secs()), "{:?}", begun.elapsed());
}

#[tokio::test(start_paused = true)]
async fn who_takes_nothing_of_one_answer_keeps_the_others() {
    // An API server proxies many users over one connection: one of them has paused a pager.
    let served = RunningListener::secured(&[("*", "*")]).await;
    let mut client = Hostile::new(&served, &[(4, 0)]).await;
    client.send(&ask(1, "/metrics")).await.expect("taken");
    client.send(&ask(3, "/containerLogs/n/p/silent?follow=1")).await.expect("taken");
    let begun = Instant::now();
    while begun.elapsed() < Duration::from_secs(1000) {
        let next = client.frame().await.expect("the connection lives");
        assert_ne!(next.kind, GOAWAY, "after {:?}", begun.elapsed());
        if next.kind == PING && next.flags == 0 {
            client.send(&frame(PING, 1, 0, &next.payload)).await.expect("taken");
        }
    }
    assert_eq!(served.players.readers.load(Ordering::SeqCst), 1);
}

#[tokio::test(start_paused = true)]
async fn who_reads_slowly_gets_the_whole_page() {
    const WINDOW: usize = 65_535;
    let served = RunningListener::secured(&[("*", "*")]).await;
    let page = 20 * WINDOW;
    served.players.page_bytes.store(page, Ordering::SeqCst);
    let mut client = Hostile::new(&served, &[]).await;
    let begun = Instant::now();
    client.send(&ask(1, "/metrics/cadvisor")).await.expect("taken");
    let (mut read, mut taken) = (0, 0);
    while let Some(f) = client.frame().await {
        match f.kind {
            6 if f.flags == 0 => client.send(&frame(6, 1, 0, &f.payload)).await.expect("taken"),
            DATA => {
                (read, taken) = (read + f.payload.len(), taken + f.payload.len());
                if f.flags & END_STREAM != 0 {
                    break;
                }
            }
            _ => {}
        }
        if taken == WINDOW {
            taken = 0;
            tokio::time::sleep(Duration::from_secs(20)).await;
            let more = u32::try_from(WINDOW).expect("short").to_be_bytes();
            let both = [frame(WINDOW_UPDATE, 0, 1, &more), frame(WINDOW_UPDATE, 0, 0, &more)].concat();
            client.send(&both).await.expect("taken");
        }
    }
    assert_eq!(read, page, "{:?}", begun.elapsed());
    assert!(begun.elapsed().as_secs() > 300, "{:?}", begun.elapsed());
}

#[tokio::test]
async fn a_head_has_no_body() {
    let served = RunningListener::secured(&[("*", "*")]).await;
    let mut client = Hostile::new(&served, &[]).await;
    for (stream, path) in [(1, "/healthz"), (3, "/pods"), (5, "/nope"), (7, "/stats")] {
        let mut head = get(path);
        head.splice(..1, [&[0x02, 4][..], b"HEAD"].concat());
        client.send(&frame(HEADERS, END_STREAM | END_HEADERS, stream, &head)).await.expect("taken");
        let answer = loop {
            let f = timeout(PATIENCE, client.frame()).await.expect("in time").expect("an answer");
            if f.stream == stream {
                break f;
            }
        };
        assert_eq!((answer.kind, answer.flags & END_STREAM), (HEADERS, END_STREAM), "{path} {answer:?}");
    }
    is_well(&served).await;
}
