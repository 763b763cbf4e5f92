//! Benchmark of 200 clients that follow container logs: memory, descriptors, and latency of a line.

use std::{
    io::Write,
    path::PathBuf,
    time::{Duration, Instant},
};

use anyhow::{Context, Result, ensure};
use berth_cri::RuntimeService;
use futures::FutureExt;
use tokio::{
    io::{AsyncReadExt, AsyncWriteExt},
    net::TcpStream,
    time::timeout,
};
use tokio_rustls::client::TlsStream;

use crate::{
    agent::{Agent, Target},
    figures::{Bar, Figure, Samples, Unit, median, p99},
    manifest,
    measurements::{BenchContext, Group, Measurement},
    private_ca::{self, Secure},
    process,
    scripted_runtime::{PATIENCE, Runtime, ms},
};

const FIGURES: &[Figure] = &[
    median("rss", "RSS of 200 × logs -f, over idle", Unit::Megabytes, Bar::AtMost(10.0)),
    p99("received", "log line written → received by its follower, p99 of 200", Unit::Milliseconds, Bar::AtMost(100.0)),
    median("descriptors", "file descriptors of 200 followers", Unit::Count, Bar::Open),
    median("cpu", "CPU of 200 followers of idle logs, percent of a core", Unit::Percent, Bar::Open),
];
const PODS: usize = 20;
const FOLLOWERS: usize = 200;
/// Longer than the agent keeps idle resources.
const SETTLED: Duration = Duration::from_secs(16);

/// Measurements of this module.
pub fn measurements() -> Vec<Measurement> {
    vec![Measurement {
        name: "followers",
        group: Group::Server,
        figures: FIGURES,
        rounds: (3, 1),
        agent: |g, t| followers(g, t).boxed_local(),
        raw: None,
    }]
}

async fn followers(ctx: &BenchContext<'_>, target: &Target) -> Result<Samples> {
    let (runtime, secure) = (Runtime::start(10_000).await?, Secure::new()?);
    let agent = runtime.secured_agent(target, &secure).await?;
    for number in 0..PODS {
        let name = format!("p{number}");
        agent.put(&name, &manifest::scripted(&name, 1))?;
    }
    agent.until_running(PODS, PATIENCE).await?;
    let logs = logs(&runtime).await?;
    for log in &logs {
        write(log, "the first line")?;
    }
    // A first follower connects and disconnects: one-time costs do not count toward the followers.
    drop(follow(&agent, &secure, 0).await?);
    tokio::time::sleep(SETTLED).await;
    let (rss, descriptors) = (process::resident(agent.pid())?, process::descriptors(agent.pid())?);
    let mut all = Vec::new();
    for number in 0..FOLLOWERS {
        all.push(follow(&agent, &secure, number % PODS).await?);
    }
    tokio::time::sleep(SETTLED).await;
    let mut samples = Samples::default();
    samples.add("rss", process::resident(agent.pid())? - rss);
    #[allow(clippy::cast_precision_loss, reason = "hundreds")]
    samples.add("descriptors", (process::descriptors(agent.pid())? - descriptors) as f64);
    let (begun, before) = (Instant::now(), process::cpu_seconds(agent.pid())?);
    tokio::time::sleep(ctx.options.amount(Duration::from_secs(20), Duration::from_secs(5))).await;
    let spent = process::cpu_seconds(agent.pid())? - before;
    samples.add("cpu", 100.0 * spent / begun.elapsed().as_secs_f64());

    let written = Instant::now();
    for log in &logs {
        write(log, "the second line")?;
    }
    let latencies = all.into_iter().map(|stream| async move {
        timeout(PATIENCE, until(stream, "the second line")).await??;
        anyhow::Ok(written.elapsed())
    });
    for after in futures::future::try_join_all(latencies).await? {
        samples.add("received", ms(after));
    }
    Ok(samples)
}

/// A follower that has read the first line.
async fn follow(agent: &Agent, secure: &Secure, pod: usize) -> Result<TlsStream<TcpStream>> {
    let mut stream = private_ca::connect(agent.secure(), &secure.client(false)?).await?;
    let name = manifest::full_name(&format!("p{pod}"));
    let head = format!("GET /containerLogs/default/{name}/c0?follow=true HTTP/1.1\r\nHost: node\r\n\r\n");
    stream.write_all(head.as_bytes()).await?;
    timeout(PATIENCE, until(stream, "the first line")).await?
}

async fn until(mut stream: TlsStream<TcpStream>, text: &str) -> Result<TlsStream<TcpStream>> {
    let mut shown = String::new();
    while !shown.contains(text) {
        let mut bytes = [0; 1024];
        let read = stream.read(&mut bytes).await?;
        ensure!(read > 0, "connection closed: {shown}");
        shown.push_str(&String::from_utf8_lossy(&bytes[..read]));
    }
    Ok(stream)
}

/// Log paths of all containers, as the runtime reports them.
pub async fn logs(runtime: &Runtime) -> Result<Vec<PathBuf>> {
    let client = runtime.client()?;
    let mut logs = Vec::new();
    for container in client.list_containers(None).await? {
        let path = PathBuf::from(client.container_status(&container.id).await?.log_path);
        std::fs::create_dir_all(path.parent().context("a folder")?)?;
        logs.push(path);
    }
    Ok(logs)
}

fn write(log: &PathBuf, text: &str) -> Result<()> {
    let mut file = std::fs::OpenOptions::new().create(true).append(true).open(log)?;
    Ok(file.write_all(format!("2026-01-01T00:00:00.123456789Z stdout F {text}\n").as_bytes())?)
}
