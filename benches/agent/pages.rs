//! Benchmark of pages per second that an agent serves to eight clients on keep-alive connections.

use std::{
    collections::HashMap,
    process::{Child, Command, Stdio},
    time::{Duration, Instant},
};

use anyhow::{Context, Result, bail, ensure};
use futures::FutureExt;
use tokio::{
    io::{AsyncReadExt, AsyncWriteExt},
    net::TcpStream,
};

use crate::{
    agent::{Agent, Target},
    figures::{Bar, Figure, Samples, Unit, median},
    manifest,
    measurements::{BenchContext, Group, Measurement},
    process,
    scripted_runtime::{PATIENCE, Runtime},
};
use berth_testkit::scripted_cri::ScriptedCri;

/// Pages, and the required rate per second: the reference's rate on a machine of this kind times the required factor.
const PAGES: &[(&str, &str, f64)] = &[
    ("pods", "/pods", 1_126.0 * 20.0),
    ("metrics", "/metrics", 13.6 * 100.0),
    ("resource", "/metrics/resource", 25.0 * 50.0),
    ("summary", "/stats/summary", 24.0 * 50.0),
    ("cadvisor", "/metrics/cadvisor", 18.5 * 50.0),
];
const RATES: &[Figure] = &[
    median("pods", "/pods per second, 50 pods, 8 connections", Unit::Count, Bar::AtLeast(PAGES[0].2)),
    median("metrics", "/metrics per second", Unit::Count, Bar::AtLeast(PAGES[1].2)),
    median("resource", "/metrics/resource per second", Unit::Count, Bar::AtLeast(PAGES[2].2)),
    median("summary", "/stats/summary per second", Unit::Count, Bar::AtLeast(PAGES[3].2)),
    median("cadvisor", "/metrics/cadvisor per second", Unit::Count, Bar::AtLeast(PAGES[4].2)),
];
const SCRAPED: &[Figure] = &[
    median("cpu", "CPU of scraping three pages every 15 s, 110 pods", Unit::Percent, Bar::AtMost(0.3)),
    median("idle", "CPU of the same agent without scrapes", Unit::Percent, Bar::Open),
    median(STATISTICS[0], "/metrics/resource recomputed, 110 pods", Unit::Milliseconds, Bar::AtMost(15.0)),
    median(STATISTICS[1], "/stats/summary recomputed, 110 pods", Unit::Milliseconds, Bar::AtMost(15.0)),
    median(STATISTICS[2], "/metrics/cadvisor recomputed, 110 pods", Unit::Milliseconds, Bar::AtMost(15.0)),
    median("first", "all three, first scrape", Unit::Milliseconds, Bar::Open),
    median("size", "size of /metrics/cadvisor", Unit::Megabytes, Bar::Open),
];
/// AC-08-23.
const STEADY: &[Figure] = &[
    median("cpu", "CPU of five pages every 30 s for 10 min, 110 pods", Unit::Percent, Bar::AtMost(1.0)),
    median("growth", "anonymous memory after them / after the first two minutes", Unit::Times, Bar::AtMost(1.05)),
    median("rss_growth", "RSS likewise", Unit::Times, Bar::AtMost(1.05)),
    median("anonymous", "anonymous memory after them", Unit::Megabytes, Bar::Open),
    median("rss", "RSS after them", Unit::Megabytes, Bar::Open),
];
/// The metrics pages, which a monitoring system scrapes.
const MONITORED: &[&str] = &["/metrics", "/metrics/cadvisor", "/metrics/resource", "/metrics/probes", "/metrics/slis"];
const CLIENTS: usize = 8;
/// Statistics pages.
const STATISTICS: &[&str] = &["/metrics/resource", "/stats/summary", "/metrics/cadvisor"];

/// Measurements of this module.
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
        Measurement {
            name: "steady-scrapes",
            group: Group::Server,
            figures: STEADY,
            rounds: (1, 1),
            agent: |g, t| steady(g, t).boxed_local(),
            raw: None,
        },
    ]
}

async fn rates(ctx: &BenchContext<'_>, target: &Target) -> Result<Samples> {
    let runtime = Runtime::start(10_000).await?;
    let agent = runtime.agent(target).await?;
    for i in 0..50 {
        let name = format!("p{i}");
        agent.put(&name, &manifest::scripted(&name, 1))?;
    }
    agent.until_running(50, PATIENCE).await?;
    let span = ctx.options.amount(Duration::from_secs(5), Duration::from_secs(1));
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

/// A keep-alive connection of a minimal client.
struct Connection {
    stream: TcpStream,
    buffer: Vec<u8>,
}

impl Connection {
    async fn open(port: u16) -> Result<Self> {
        Ok(Self { stream: TcpStream::connect(("127.0.0.1", port)).await?, buffer: vec![0; 1 << 20] })
    }

    /// Requests a page and reads all of it; returns the size of its body.
    async fn get(&mut self, path: &str) -> Result<usize> {
        self.stream.write_all(format!("GET {path} HTTP/1.1\r\nHost: x\r\n\r\n").as_bytes()).await?;
        let mut filled = 0;
        let head = loop {
            let read = self.stream.read(&mut self.buffer[filled..]).await?;
            ensure!(read > 0, "{path}: connection closed");
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
            ensure!(read > 0, "{path}: connection closed");
            missing -= read;
        }
        Ok(length)
    }

    /// Reads until the last chunk; the bytes of its marker do not occur in a page of text.
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

/// Scrapes three pages every 15 s as Prometheus does; then each page alone, after any cached copy has expired. The
/// cgroups have a process each, as on a real runtime.
#[allow(clippy::cast_precision_loss, reason = "pages are smaller than 2^52 bytes")]
async fn scraped(ctx: &BenchContext<'_>, target: &Target) -> Result<Samples> {
    let runtime = Runtime::start(10_000).await?;
    let agent = runtime.agent(target).await?;
    for i in 0..110 {
        let name = format!("p{i}");
        agent.put(&name, &manifest::scripted(&name, 2))?;
    }
    agent.until_running(110, PATIENCE).await?;
    let _populated = Population::new(&agent, &runtime.cri)?;
    let pause = Duration::from_secs(15);
    // All pods started at once, and so do their first periodic syncs a minute later; those must not overlap with a
    // scrape.
    tokio::time::sleep(ctx.options.amount(pause * 8, pause)).await;
    let rounds = ctx.options.amount(4_u32, 2);
    let mut samples = Samples::default();
    let idle = share(&agent, tokio::time::sleep(pause * rounds).map(Ok)).await?;
    let mut connection = Connection::open(agent.read_only()).await?;
    let begun = Instant::now();
    all(&mut connection).await?;
    samples.add("first", crate::scripted_runtime::ms(begun.elapsed()));
    let busy = share(&agent, async {
        for _ in 0..rounds {
            tokio::time::sleep(pause).await;
            all(&mut connection).await?;
        }
        Ok(())
    });
    samples.add("cpu", busy.await? - idle);
    samples.add("idle", idle);
    for _ in 0..ctx.options.amount(7, 2) {
        for page in STATISTICS.iter().copied() {
            tokio::time::sleep(Duration::from_millis(1_200)).await;
            let asked = Instant::now();
            let size = connection.get(page).await?;
            samples.add(page, crate::scripted_runtime::ms(asked.elapsed()));
            if page.ends_with("cadvisor") {
                samples.add("size", size as f64 / 1e6);
            }
        }
    }
    Ok(samples)
}

/// Scrapes the five metrics pages every 30 s for ten minutes, as a monitoring system does with its default interval.
async fn steady(ctx: &BenchContext<'_>, target: &Target) -> Result<Samples> {
    let runtime = Runtime::start(10_000).await?;
    let agent = runtime.agent(target).await?;
    for i in 0..110 {
        let name = format!("p{i}");
        agent.put(&name, &manifest::scripted(&name, 2))?;
    }
    agent.until_running(110, PATIENCE).await?;
    let _populated = Population::new(&agent, &runtime.cri)?;
    let pause = Duration::from_secs(30);
    let mut connection = Connection::open(agent.read_only()).await?;
    // Caches fill, and the allocator returns what the start took.
    scrape(&mut connection, 4, pause).await?;
    let (resident, anonymous) = (process::resident(agent.pid())?, process::anonymous(agent.pid())?);
    let mut samples = Samples::default();
    samples.add("cpu", share(&agent, scrape(&mut connection, ctx.options.amount(20, 2), pause)).await?);
    samples.add("anonymous", process::anonymous(agent.pid())?);
    samples.add("growth", process::anonymous(agent.pid())? / anonymous);
    samples.add("rss", process::resident(agent.pid())?);
    samples.add("rss_growth", process::resident(agent.pid())? / resident);
    Ok(samples)
}

async fn scrape(connection: &mut Connection, rounds: u32, pause: Duration) -> Result<()> {
    for _ in 0..rounds {
        for path in MONITORED {
            connection.get(path).await?;
        }
        tokio::time::sleep(pause).await;
    }
    Ok(())
}

async fn all(connection: &mut Connection) -> Result<()> {
    for page in STATISTICS {
        connection.get(page).await?;
    }
    Ok(())
}

/// CPU usage of the agent while a future runs, percent of a core.
async fn share(agent: &Agent, goes_on: impl Future<Output = Result<()>>) -> Result<f64> {
    let (begun, before) = (Instant::now(), process::cpu_seconds(agent.pid())?);
    goes_on.await?;
    Ok(100.0 * (process::cpu_seconds(agent.pid())? - before) / begun.elapsed().as_secs_f64())
}

/// A process in its own cgroup for each sandbox and container of a scripted runtime; killed when dropped.
struct Population(Vec<Child>);

impl Population {
    fn new(agent: &Agent, cri: &ScriptedCri) -> Result<Self> {
        let pod_of =
            |labels: &HashMap<String, String>| labels.get("io.kubernetes.pod.uid").cloned().unwrap_or_default();
        let sandboxes = cri.sandboxes().into_iter().map(|sandbox| (pod_of(&sandbox.labels), sandbox.id));
        let containers = cri.listed().into_iter().map(|container| (pod_of(&container.labels), container.id));
        let mut all = Self(Vec::new());
        for (pod, id) in sandboxes.chain(containers) {
            let child = Command::new("sleep").arg("100000").stdin(Stdio::null()).spawn()?;
            agent.enter(&format!("pod{pod}"), &id, child.id());
            all.0.push(child);
        }
        Ok(all)
    }
}

impl Drop for Population {
    fn drop(&mut self) {
        for child in &mut self.0 {
            let _ = child.kill(); // it may have exited by itself
            let _ = child.wait();
        }
    }
}
