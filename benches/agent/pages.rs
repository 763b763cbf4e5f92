//! How many pages a second an agent serves, eight clients at a time on connections they keep.

use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail, ensure};
use futures::FutureExt;
use tokio::{
    io::{AsyncReadExt, AsyncWriteExt},
    net::TcpStream,
};

use crate::{
    agent::Target,
    figures::{Bar, Figure, Samples, Unit, median},
    manifest, process,
    run::{Ground, Group, Measurement},
    scripted_ground::{PATIENCE, Runtime},
};

/// Pages, and how many a second the reference serves on a machine of this kind times what is asked of us.
const PAGES: &[(&str, &str, f64)] = &[
    ("pods", "/pods", 1_126.0 * 20.0),
    ("metrics", "/metrics", 13.6 * 100.0),
    ("resource", "/metrics/resource", 25.0 * 50.0),
    ("summary", "/stats/summary", 24.0 * 50.0),
    ("cadvisor", "/metrics/cadvisor", 18.5 * 50.0),
];
const RATES: &[Figure] = &[
    median("pods", "/pods a second, 50 pods, 8 connections", Unit::Count, Bar::AtLeast(PAGES[0].2)),
    median("metrics", "/metrics a second", Unit::Count, Bar::AtLeast(PAGES[1].2)),
    median("resource", "/metrics/resource a second", Unit::Count, Bar::AtLeast(PAGES[2].2)),
    median("summary", "/stats/summary a second", Unit::Count, Bar::AtLeast(PAGES[3].2)),
    median("cadvisor", "/metrics/cadvisor a second", Unit::Count, Bar::AtLeast(PAGES[4].2)),
];
const SCRAPED: &[Figure] = &[
    median("cpu", "CPU of scraping three pages every 15 s, 110 pods", Unit::Percent, Bar::AtMost(0.3)),
    median("uncached", "slowest page that is made anew, 110 pods", Unit::Milliseconds, Bar::AtMost(15.0)),
];
const CLIENTS: usize = 8;
/// The statistics pages.
const STATISTICS: &[&str] = &["/metrics/resource", "/stats/summary", "/metrics/cadvisor"];

/// What is measured here.
pub fn measurements() -> Vec<Measurement> {
    vec![
        Measurement {
            name: "pages",
            group: Group::Server,
            figures: RATES,
            rounds: (3, 1),
            agent: |g, t| rates(g, t).boxed_local(),
            raw: None,
        },
        Measurement {
            name: "scrapes",
            group: Group::Server,
            figures: SCRAPED,
            rounds: (1, 1),
            agent: |g, t| scraped(g, t).boxed_local(),
            raw: None,
        },
    ]
}

async fn rates(ground: &Ground<'_>, target: &Target) -> Result<Samples> {
    let runtime = Runtime::start(10_000).await?;
    let agent = runtime.agent(target).await?;
    for i in 0..50 {
        let name = format!("p{i}");
        agent.put(&name, &manifest::scripted(&name, 1))?;
    }
    agent.until_running(50, PATIENCE).await?;
    let span = ground.options.amount(Duration::from_secs(5), Duration::from_secs(1));
    let mut samples = Samples::default();
    for (key, path, _) in PAGES {
        samples.add(key, rate(agent.read_only(), path, span).await?);
    }
    Ok(samples)
}

#[allow(clippy::cast_precision_loss, reason = "fewer than 2^52 answers")]
async fn rate(port: u16, path: &str, span: Duration) -> Result<f64> {
    let until = Instant::now() + span;
    let clients = (0..CLIENTS).map(|_| client(port, path, until));
    let answers: usize = futures::future::try_join_all(clients).await?.into_iter().sum();
    Ok(answers as f64 / span.as_secs_f64())
}

async fn client(port: u16, path: &str, until: Instant) -> Result<usize> {
    let mut connection = Connection::open(port).await?;
    let mut answers = 0;
    while Instant::now() < until {
        connection.get(path).await?;
        answers += 1;
    }
    Ok(answers)
}

/// A kept connection of a client that does as little as it can.
struct Connection {
    stream: TcpStream,
    buffer: Vec<u8>,
}

impl Connection {
    async fn open(port: u16) -> Result<Self> {
        Ok(Self { stream: TcpStream::connect(("127.0.0.1", port)).await?, buffer: vec![0; 1 << 20] })
    }

    /// Asks for a page and reads all of it; the size of its body.
    async fn get(&mut self, path: &str) -> Result<usize> {
        self.stream.write_all(format!("GET {path} HTTP/1.1\r\nHost: x\r\n\r\n").as_bytes()).await?;
        let mut filled = 0;
        let head = loop {
            let read = self.stream.read(&mut self.buffer[filled..]).await?;
            ensure!(read > 0, "{path}: closed");
            filled += read;
            if let Some(end) = self.buffer[..filled].windows(4).position(|four| four == b"\r\n\r\n") {
                break end + 4;
            }
        };
        let text = String::from_utf8_lossy(&self.buffer[..head]).to_lowercase();
        ensure!(text.starts_with("http/1.1 200"), "{path}: {text}");
        if text.contains("transfer-encoding: chunked") {
            return self.until_last_chunk(filled - head, head).await;
        }
        let length = text.lines().find_map(|line| line.strip_prefix("content-length: "));
        let length: usize = length.context("a length")?.trim().parse()?;
        let mut missing = length.saturating_sub(filled - head);
        while missing > 0 {
            let most = missing.min(self.buffer.len());
            let read = self.stream.read(&mut self.buffer[..most]).await?;
            ensure!(read > 0, "{path}: closed");
            missing -= read;
        }
        Ok(length)
    }

    /// Reads until the empty chunk; a page of text never holds its bytes.
    async fn until_last_chunk(&mut self, mut size: usize, head: usize) -> Result<usize> {
        let mut tail: Vec<u8> = self.buffer[head..head + size].to_vec();
        loop {
            if tail.ends_with(b"\r\n0\r\n\r\n") {
                return Ok(size);
            }
            let read = self.stream.read(&mut self.buffer).await?;
            if read == 0 {
                bail!("closed");
            }
            size += read;
            tail.extend_from_slice(&self.buffer[..read]);
            tail.drain(..tail.len().saturating_sub(16));
        }
    }
}

/// Prometheus' habit: three pages every 15 s, each older than any memo.
async fn scraped(ground: &Ground<'_>, target: &Target) -> Result<Samples> {
    let runtime = Runtime::start(10_000).await?;
    let agent = runtime.agent(target).await?;
    for i in 0..110 {
        let name = format!("p{i}");
        agent.put(&name, &manifest::scripted(&name, 2))?;
    }
    agent.until_running(110, PATIENCE).await?;
    let mut connection = Connection::open(agent.read_only()).await?;
    let pause = Duration::from_secs(15);
    tokio::time::sleep(pause).await;
    let (begun, before) = (Instant::now(), process::cpu_seconds(agent.pid())?);
    let mut slowest = Duration::ZERO;
    for _ in 0..ground.options.amount(4, 2) {
        for page in STATISTICS {
            let asked = Instant::now();
            connection.get(page).await?;
            slowest = slowest.max(asked.elapsed());
        }
        tokio::time::sleep(pause).await;
    }
    let spent = process::cpu_seconds(agent.pid())? - before;
    let mut samples = Samples::default();
    samples.add("cpu", 100.0 * spent / begun.elapsed().as_secs_f64());
    samples.add("uncached", crate::scripted_ground::ms(slowest));
    Ok(samples)
}
