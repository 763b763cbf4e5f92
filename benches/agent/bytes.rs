//! Throughput benchmark: bytes per second of port-forward and container logs through an agent.
//!
//! Client, agent, and runtime share the machine, so each rate comes with the agent's own CPU time per 10^9 bytes: below
//! one second, a dedicated core would carry more than 1 GB/s. The runtime's side is a socket that writes (or reads) as
//! fast as it can; a proxy that forwards SPDY does not inspect the content. `raw` is the same client on that socket,
//! without an agent and without TLS: the limit of the machine itself.

use std::{
    io::Write,
    net::SocketAddr,
    sync::{
        Arc,
        atomic::{AtomicU64, Ordering},
    },
    time::{Duration, Instant},
};

use anyhow::{Context, Result, ensure};
use berth::logs::{LogOptions, LogReader};
use berth_cri::RuntimeService;
use futures::{FutureExt, Sink, SinkExt, StreamExt};
use tokio::{
    io::{AsyncRead, AsyncReadExt, AsyncWrite, AsyncWriteExt},
    net::{TcpListener, TcpStream},
    task::AbortHandle,
    time::timeout,
};
use tokio_tungstenite::{
    WebSocketStream,
    tungstenite::{Message, protocol},
};

use crate::{
    agent::{Agent, Target},
    figures::{Bar, Figure, Samples, Unit, median},
    followers, manifest,
    measurements::{BenchContext, Group, Measurement},
    plain::Proxy,
    private_ca::{self, Secure},
    process,
    scripted_runtime::{PATIENCE, Runtime},
};

const FORWARD: &[Figure] = &[
    median("down", "port-forward over TLS to the client, SPDY", Unit::Throughput, Bar::AtLeast(1.0)),
    median("down-cpu", "… CPU of the agent per GB", Unit::Seconds, Bar::AtMost(1.0)),
    median("up", "port-forward over TLS to the pod, SPDY", Unit::Throughput, Bar::AtLeast(1.0)),
    median("up-cpu", "… CPU of the agent per GB", Unit::Seconds, Bar::AtMost(1.0)),
    median("tunnel", "port-forward over TLS to the client, WebSocket tunnel", Unit::Throughput, Bar::Open),
    median("tunnel-cpu", "… CPU of the agent per GB", Unit::Seconds, Bar::Open),
    median("plain-down", "in-process proxy without TLS, to the client", Unit::Throughput, Bar::Open),
    median("plain-up", "in-process proxy without TLS, to the pod", Unit::Throughput, Bar::Open),
];
const LOGS: &[Figure] = &[
    median("logs", "/containerLogs from page cache, over TLS", Unit::Throughput, Bar::AtLeast(1.0)),
    median("logs-cpu", "… CPU of the agent per GB", Unit::Seconds, Bar::AtMost(1.0)),
    median("reader", "in-process log reader, output discarded", Unit::Throughput, Bar::Open),
];
const UPGRADE: &str = "Connection: Upgrade\r\nUpgrade: SPDY/3.1\r\nX-Stream-Protocol-Version: portforward.k8s.io";
const TUNNEL: &str = "Connection: Upgrade\r\nUpgrade: websocket\r\nSec-WebSocket-Version: 13\r\n\
     Sec-WebSocket-Key: dGhlIHNhbXBsZSBub25jZQ==\r\nSec-WebSocket-Protocol: SPDY/3.1+portforward.k8s.io";
/// Bytes per read or write of the two ends.
const BLOCK: usize = 128 << 10;
/// Size of the log, and of the content of each line, in bytes.
const LOG: usize = 256 << 20;
const LINE: usize = 160;

/// Measurements of this module.
pub fn measurements() -> Vec<Measurement> {
    vec![
        Measurement {
            name: "forward",
            group: Group::Server,
            figures: FORWARD,
            rounds: (3, 1),
            agent: |g, t| forward(g, t).boxed_local(),
            raw: Some(|g| raw(g).boxed_local()),
        },
        Measurement {
            name: "logs",
            group: Group::Server,
            figures: LOGS,
            rounds: (3, 1),
            agent: |g, t| logs(g, t).boxed_local(),
            raw: None,
        },
    ]
}

/// Streaming server of a runtime that only sends or only receives bytes, whatever the request is.
struct Pipe {
    url: String,
    taken: Arc<AtomicU64>,
    task: AbortHandle,
}

impl Drop for Pipe {
    fn drop(&mut self) {
        self.task.abort();
    }
}

impl Pipe {
    async fn start(gives: bool) -> Result<Self> {
        let listener = TcpListener::bind("127.0.0.1:0").await?;
        let url = format!("http://{}", listener.local_addr()?);
        let taken = Arc::new(AtomicU64::new(0));
        let counted = taken.clone();
        let task = tokio::spawn(async move {
            while let Ok((tcp, _)) = listener.accept().await {
                tokio::spawn(serve(tcp, gives, counted.clone()));
            }
        });
        Ok(Self { url, taken, task: task.abort_handle() })
    }
}

/// Responds to one upgrade request; ends with its connection.
async fn serve(mut tcp: TcpStream, gives: bool, taken: Arc<AtomicU64>) -> Result<()> {
    let mut head = Vec::new();
    while !head.ends_with(b"\r\n\r\n") {
        ensure!(tcp.read_buf(&mut head).await? > 0, "closed");
    }
    tcp.write_all(format!("HTTP/1.1 101 Switching Protocols\r\n{UPGRADE}\r\n\r\n").as_bytes()).await?;
    let mut block = vec![0; BLOCK];
    loop {
        if gives {
            tcp.write_all(&block).await?;
        } else {
            let read = tcp.read(&mut block).await?;
            ensure!(read > 0, "closed");
            taken.fetch_add(read as u64, Ordering::Relaxed);
        }
    }
}

/// Reads for a time span; returns the number of bytes.
async fn drain(mut io: impl AsyncRead + Unpin, span: Duration) -> Result<u64> {
    let (mut block, until, mut total) = (vec![0; BLOCK], Instant::now() + span, 0);
    while Instant::now() < until {
        let read = timeout(PATIENCE, io.read(&mut block)).await??;
        ensure!(read > 0, "closed");
        total += read as u64;
    }
    Ok(total)
}

/// Writes for a time span.
async fn fill(mut io: impl AsyncWrite + Unpin, span: Duration) -> Result<()> {
    let (block, until) = (vec![0; BLOCK], Instant::now() + span);
    while Instant::now() < until {
        timeout(PATIENCE, io.write_all(&block)).await??;
    }
    Ok(())
}

/// Baseline without an agent: the limit of the machine.
async fn raw(ctx: &BenchContext<'_>) -> Result<Samples> {
    let mut samples = Samples::default();
    for (key, gives) in [("down", true), ("up", false)] {
        let pipe = Pipe::start(gives).await?;
        let address = pipe.url.trim_start_matches("http://").parse()?;
        samples.add(key, over_tcp(address, &pipe, gives, span(ctx)).await?);
    }
    Ok(samples)
}

/// Through the streaming proxy alone, without TLS.
async fn plainly(ctx: &BenchContext<'_>, samples: &mut Samples) -> Result<()> {
    for (key, gives) in [("plain-down", true), ("plain-up", false)] {
        let pipe = Pipe::start(gives).await?;
        let proxy = Proxy::start(&pipe.url).await?;
        samples.add(key, over_tcp(proxy.address, &pipe, gives, span(ctx)).await?);
    }
    Ok(())
}

/// Throughput in 10^9 bytes per second between a client and a pipe behind that address.
async fn over_tcp(address: SocketAddr, pipe: &Pipe, gives: bool, span: Duration) -> Result<f64> {
    let mut tcp = TcpStream::connect(address).await?;
    private_ca::ask(&mut tcp, &format!("POST /portForward/default/web HTTP/1.1\r\n{UPGRADE}"), 101).await?;
    let begun = Instant::now();
    let moved = if gives {
        drain(tcp, span).await?
    } else {
        fill(tcp, span).await?;
        pipe.taken.load(Ordering::Relaxed)
    };
    Ok(rate(moved, begun.elapsed()))
}

fn span(ctx: &BenchContext<'_>) -> Duration {
    ctx.options.amount(Duration::from_secs(4), Duration::from_secs(1))
}

/// Throughput in 10^9 bytes per second.
#[allow(clippy::cast_precision_loss, reason = "a rate")]
fn rate(bytes: u64, span: Duration) -> f64 {
    bytes as f64 / 1e9 / span.as_secs_f64()
}

/// Starts an agent with one running pod.
async fn one_pod(runtime: &Runtime, secure: &Secure, target: &Target) -> Result<Agent> {
    let agent = runtime.secured_agent(target, secure).await?;
    agent.put("p", &manifest::scripted("p", 1))?;
    agent.until_running(1, PATIENCE).await?;
    Ok(agent)
}

async fn forward(ctx: &BenchContext<'_>, target: &Target) -> Result<Samples> {
    let (runtime, secure) = (Runtime::start(10_000).await?, Secure::new()?);
    let agent = one_pod(&runtime, &secure, target).await?;
    let (client, span) = (secure.client(false)?, span(ctx));
    let path = format!("/portForward/default/{}", manifest::full_name("p"));
    let mut samples = Samples::default();
    for (key, cpu) in [("down", "down-cpu"), ("up", "up-cpu"), ("tunnel", "tunnel-cpu")] {
        let pipe = Pipe::start(key != "up").await?;
        runtime.cri.stream_at(&pipe.url);
        let mut tls = private_ca::connect(agent.secure(), &client).await?;
        let head = match key {
            "tunnel" => format!("GET {path} HTTP/1.1\r\n{TUNNEL}"),
            _ => format!("POST {path} HTTP/1.1\r\n{UPGRADE}"),
        };
        let first = private_ca::ask(&mut tls, &head, 101).await?;
        let (begun, before) = (Instant::now(), process::cpu_seconds(agent.pid())?);
        let moved = match key {
            "down" => drain(tls, span).await?,
            "up" => {
                fill(tls, span).await?;
                pipe.taken.load(Ordering::Relaxed)
            }
            _ => messages(tls, first, span).await?,
        };
        let (rate, spent) = (rate(moved, begun.elapsed()), process::cpu_seconds(agent.pid())? - before);
        samples.add(key, rate);
        samples.add(cpu, spent / (rate * begun.elapsed().as_secs_f64()));
    }
    plainly(ctx, &mut samples).await?;
    Ok(samples)
}

/// Reads binary WebSocket messages for a time span; returns the number of payload bytes.
async fn messages(io: impl AsyncRead + AsyncWrite + Unpin, first: Vec<u8>, span: Duration) -> Result<u64> {
    let mut socket = WebSocketStream::from_partially_read(io, first, protocol::Role::Client, None).await;
    let (until, mut total) = (Instant::now() + span, 0);
    while Instant::now() < until {
        match timeout(PATIENCE, socket.next()).await?.context("closed")?? {
            Message::Binary(bytes) => total += bytes.len() as u64,
            other => anyhow::bail!("{other:?}"),
        }
    }
    Ok(total)
}

async fn logs(ctx: &BenchContext<'_>, target: &Target) -> Result<Samples> {
    let (runtime, secure) = (Runtime::start(10_000).await?, Secure::new()?);
    let agent = one_pod(&runtime, &secure, target).await?;
    let log = followers::logs(&runtime).await?.pop().context("a log")?;
    let line = format!("2026-01-01T00:00:00.123456789Z stdout F {}\n", "x".repeat(LINE - 1));
    let piece = line.repeat((1 << 20) / line.len());
    let mut file = std::fs::File::create(&log)?;
    let pieces = ctx.options.amount(LOG, LOG / 4) / piece.len();
    for _ in 0..pieces {
        file.write_all(piece.as_bytes())?;
    }
    file.sync_all()?; // the kernel must not write it back during the measurement
    let expected = pieces * (piece.len() / line.len()) * LINE;
    let client = secure.client(false)?;
    let path = format!("/containerLogs/default/{}/c0", manifest::full_name("p"));
    let mut samples = Samples::default();
    for _ in 0..ctx.options.amount(4, 2) {
        let mut tls = private_ca::connect(agent.secure(), &client).await?;
        let (begun, before) = (Instant::now(), process::cpu_seconds(agent.pid())?);
        let first = private_ca::ask(&mut tls, &format!("GET {path} HTTP/1.1\r\nConnection: close"), 200).await?;
        let (mut block, mut total) = (vec![0; BLOCK], first.len());
        loop {
            let read = timeout(PATIENCE, tls.read(&mut block)).await??;
            if read == 0 {
                break;
            }
            total += read;
        }
        ensure!(total >= expected && total < expected + expected / 100, "received {total} of {expected} bytes");
        let (rate, spent) = (rate(expected as u64, begun.elapsed()), process::cpu_seconds(agent.pid())? - before);
        samples.add("logs", rate);
        samples.add("logs-cpu", spent / (rate * begun.elapsed().as_secs_f64()));
    }
    let client = runtime.client()?;
    let id = client.list_containers(None).await?.pop().context("a container")?.id.as_str().into();
    let root = log.ancestors().nth(3).context("a folder of logs")?;
    let begun = Instant::now();
    LogReader::new(client, root).read(&log, &id, &LogOptions::default(), &mut nowhere()).await?;
    samples.add("reader", rate(expected as u64, begun.elapsed()));
    Ok(samples)
}

/// A sink that discards a log.
fn nowhere() -> impl Sink<Vec<u8>, Error = std::io::Error> + Unpin + Send {
    futures::sink::drain().sink_map_err(|never| match never {})
}
