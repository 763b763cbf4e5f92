//! Benchmark of the exec round trip through an agent, beside the runtime's streaming server directly.
//!
//! The same command of the scripted runtime runs on the runtime's streaming server, and through the agent on a new TLS
//! connection with a client certificate, alternately.

use std::time::{Duration, Instant};

use anyhow::{Context, Result, ensure};
use berth_cri::RuntimeService;
use berth_proto::cri;
use berth_server::streaming::spdy::{ConnectionLimits, Headers, Role, SpdyStream, session};
use futures::{FutureExt, StreamExt};
use tokio::{
    io::{AsyncRead, AsyncWrite},
    net::TcpStream,
    time::timeout,
};
use tokio_tungstenite::{
    WebSocketStream,
    tungstenite::{Message, protocol},
};

use crate::{
    agent::Target,
    figures::{Bar, Figure, Samples, Unit, median},
    manifest,
    measurements::{BenchContext, Group, Measurement},
    private_ca::{self, Secure},
    scripted_runtime::{PATIENCE, Runtime, ms},
};
use berth_testkit::scripted_cri::streaming::StreamServer;

const FIGURES: &[Figure] = &[
    median("spdy", "exec over the runtime's own time, SPDY, new TLS connection", Unit::Milliseconds, Bar::AtMost(2.0)),
    median("v5", "exec over the runtime's own time, WebSocket v5", Unit::Milliseconds, Bar::AtMost(2.0)),
    median("own", "exec directly at the runtime's streaming server", Unit::Milliseconds, Bar::Open),
];
const UPGRADE: &str = "Connection: Upgrade\r\nUpgrade: SPDY/3.1\r\nX-Stream-Protocol-Version: v4.channel.k8s.io";
const WEB_SOCKET: &str = "Connection: Upgrade\r\nUpgrade: websocket\r\nSec-WebSocket-Version: 13\r\n\
     Sec-WebSocket-Key: dGhlIHNhbXBsZSBub25jZQ==\r\nSec-WebSocket-Protocol: v5.channel.k8s.io";

/// Measurements of this module.
pub fn measurements() -> Vec<Measurement> {
    vec![Measurement {
        name: "exec",
        group: Group::Server,
        figures: FIGURES,
        rounds: (3, 1),
        agent: |g, t| exec(g, t).boxed_local(),
        raw: None,
    }]
}

async fn exec(ctx: &BenchContext<'_>, target: &Target) -> Result<Samples> {
    let (runtime, secure) = (Runtime::start(10_000).await?, Secure::new()?);
    let server = StreamServer::start(&runtime.cri).await;
    let agent = runtime.secured_agent(target, &secure).await?;
    agent.put("p", &manifest::scripted("p", 1))?;
    agent.until_running(1, PATIENCE).await?;
    let (direct, client) = (runtime.client()?, secure.client(false)?);
    let container = direct.list_containers(None).await?.first().context("a container")?.id.clone();
    let path = format!("/exec/default/{}/c0?output=1&command=flood&command=2", manifest::full_name("p"));
    let mut samples = Samples::default();
    for number in 0..ctx.options.amount(300, 30) {
        let begun = Instant::now();
        let request = cri::ExecRequest {
            container_id: container.clone(),
            cmd: vec!["flood".to_owned(), "2".to_owned()],
            stdout: true,
            ..Default::default()
        };
        let url = direct.exec(request).await?;
        let (host, token) = parts(&url)?;
        let mut tcp = TcpStream::connect(host).await?;
        tcp.set_nodelay(true)?;
        private_ca::ask(&mut tcp, &format!("POST {token} HTTP/1.1\r\n{UPGRADE}"), 101).await?;
        over_spdy(tcp).await?;
        let own = begun.elapsed();

        let begun = Instant::now();
        let mut tls = private_ca::connect(agent.secure(), &client).await?;
        private_ca::ask(&mut tls, &format!("POST {path} HTTP/1.1\r\n{UPGRADE}"), 101).await?;
        over_spdy(tls).await?;
        let spdy = begun.elapsed();

        let begun = Instant::now();
        let mut tls = private_ca::connect(agent.secure(), &client).await?;
        let first = private_ca::ask(&mut tls, &format!("GET {path} HTTP/1.1\r\n{WEB_SOCKET}"), 101).await?;
        over_web_socket(tls, first).await?;
        let v5 = begun.elapsed();
        if number >= 10 {
            samples.add("own", ms(own));
            samples.add("spdy", ms(spdy) - ms(own));
            samples.add("v5", ms(v5) - ms(own));
        }
    }
    drop(server);
    Ok(samples)
}

/// Splits a URL into host with port, and path.
pub fn parts(url: &str) -> Result<(&str, &str)> {
    let rest = url.strip_prefix("http://").context("a URL")?;
    let at = rest.find('/').context("a path")?;
    Ok(rest.split_at(at))
}

/// Opens a command's streams, reads two bytes and the status, and closes.
async fn over_spdy<T: AsyncRead + AsyncWrite + Send + 'static>(io: T) -> Result<()> {
    let limits = ConnectionLimits { idle: None, ping: None, streams: 8 };
    let (connection, _incoming, driver) = session(io, Role::Client, limits);
    let task = tokio::spawn(driver.run());
    let mut error = connection.open(Headers::of(&[("streamType", "error")])).await?;
    let mut stdout = connection.open(Headers::of(&[("streamType", "stdout")])).await?;
    let (printed, status) = timeout(PATIENCE, async { (all(&mut stdout).await, all(&mut error).await) }).await?;
    ensure!(printed == 2 && status > 0, "unexpected output: {printed} bytes, status of {status} bytes");
    drop((error, stdout, connection));
    task.abort();
    Ok(())
}

async fn all(stream: &mut SpdyStream) -> usize {
    let mut size = 0;
    while let Ok(Some(bytes)) = stream.read().await {
        size += bytes.len();
    }
    size
}

async fn over_web_socket<T: AsyncRead + AsyncWrite + Unpin>(io: T, first: Vec<u8>) -> Result<()> {
    let mut socket = WebSocketStream::from_partially_read(io, first, protocol::Role::Client, None).await;
    let mut printed = 0;
    loop {
        match timeout(PATIENCE, socket.next()).await?.context("connection closed before the exit status")?? {
            Message::Binary(bytes) if bytes.first() == Some(&1) => printed += bytes.len() - 1,
            Message::Binary(bytes) if bytes.first() == Some(&3) => break,
            other => anyhow::bail!("{other:?}"),
        }
    }
    ensure!(printed == 2, "{printed} bytes");
    let _ = timeout(Duration::from_secs(1), socket.close(None)).await; // everything was exchanged
    Ok(())
}
