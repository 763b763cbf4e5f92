//! Benchmark of the embedded runtime beside containerd and runc, by the same CRI calls.
//!
//! It measures runtimes through a plain CRI client, without an agent. Pods use the host network on both sides, so that
//! neither waits for CNI plugins.

use std::{
    fs,
    process::{Child, Command, Stdio},
    time::{Duration, Instant},
};

use anyhow::{Context, Result, ensure};
use futures::FutureExt;

use crate::{
    agent::{Agent, Target},
    figures::{Bar, Figure, Samples, Unit, median},
    manifest,
    measurements::{BenchContext, Group, Measurement},
    process,
    raw::Raw,
};
use berth_testkit::embedded::EmbeddedFixture;

const FIGURES: &[Figure] = &[
    median("start", "pod create → running, image present", Unit::Milliseconds, Bar::AtMost(60.0)),
    median("start", "… bar relative to containerd", Unit::Milliseconds, Bar::TimesRaw(0.4)),
    median("exec", "ExecSync of `true`", Unit::Milliseconds, Bar::TimesRaw(0.2)),
    median("exec_cpu", "CPU of all processes per ExecSync", Unit::Milliseconds, Bar::AtMost(10.0)),
    median("exec_cpu", "… bar relative to containerd", Unit::Milliseconds, Bar::TimesRaw(0.2)),
    median("stop", "stop of a container that exits on SIGTERM", Unit::Milliseconds, Bar::AtMost(30.0)),
    median("burst", "110 pods at once → all running", Unit::Seconds, Bar::AtMost(6.0)),
    median("shim", "PSS of a pod's shim, 110 pods", Unit::Megabytes, Bar::AtMost(1.2)),
    median("shim", "… bar relative to containerd", Unit::Megabytes, Bar::TimesRaw(0.4)),
    median("daemon", "RSS of the daemon, 110 pods", Unit::Megabytes, Bar::Open),
];
const WITH_AGENT: &[Figure] = &[
    median("first", "agent with embedded runtime: manifest written → container running", Unit::Milliseconds, Bar::Open),
    median(
        "anonymous",
        "anonymous memory of the agent with embedded runtime, 110 pods",
        Unit::Megabytes,
        Bar::AtMost(30.0),
    ),
    median("pss", "PSS of the agent with embedded runtime, 110 pods", Unit::Megabytes, Bar::Open),
    median("rss", "RSS of the agent with embedded runtime, 110 pods", Unit::Megabytes, Bar::Open),
    median("cpu", "CPU of the agent with embedded runtime per minute, 110 idle pods", Unit::Seconds, Bar::Open),
];
/// Execs per measurement of CPU time, which the kernel counts in hundredths of a second.
const EXECS: u32 = 20;
const LIMIT: Duration = Duration::from_secs(120);

/// Measurements of this module.
pub fn measurements() -> Vec<Measurement> {
    vec![
        Measurement {
            name: "pods",
            group: Group::Runtime,
            figures: FIGURES,
            rounds: (3, 1),
            agent: |g, t| embedded(g, t).boxed_local(),
            raw: Some(|g| containerd(g).boxed_local()),
        },
        Measurement {
            name: "all-in-one",
            group: Group::Runtime,
            figures: WITH_AGENT,
            rounds: (1, 1),
            agent: |g, t| with_agent(g, t).boxed_local(),
            raw: None,
        },
    ]
}

/// The agent with its embedded runtime, as `make run` starts it.
async fn with_agent(ctx: &BenchContext<'_>, target: &Target) -> Result<Samples> {
    let place = EmbeddedFixture::new();
    let agent = Agent::start_embedded(target, &place.settings()).await?;
    let mut samples = Samples::default();
    for i in 0..110 {
        let name = format!("p{i}");
        let begun = Instant::now();
        agent.put(&name, &manifest::real(&name))?;
        // The first ones one by one; the others as fast as possible.
        if i < 10 {
            agent.until_running(i + 1, LIMIT).await?;
            samples.add("first", ms(begun));
        }
    }
    agent.until_running(110, LIMIT).await?;
    tokio::time::sleep(ctx.options.amount(Duration::from_secs(10), Duration::from_secs(5))).await;
    process::add_memory(&mut samples, agent.pid(), ["rss", "pss", "anonymous"])?;
    let (begun, before) = (Instant::now(), process::cpu_seconds(agent.pid())?);
    tokio::time::sleep(ctx.options.amount(Duration::from_secs(60), Duration::from_secs(10))).await;
    samples.add("cpu", (process::cpu_seconds(agent.pid())? - before) * 60.0 / begun.elapsed().as_secs_f64());
    drop(agent);
    Ok(samples)
}

/// A `berth cri` process; killed when dropped.
struct Daemon(Child);

impl Drop for Daemon {
    fn drop(&mut self) {
        let _ = self.0.kill(); // it may have exited
        let _ = self.0.wait();
    }
}

async fn embedded(ctx: &BenchContext<'_>, target: &Target) -> Result<Samples> {
    let place = EmbeddedFixture::new();
    let log = fs::File::create(place.dir().join("log"))?;
    let mut command = Command::new(&target.binary);
    command.arg("cri").env("BERTH_CONFIG", place.settings()).stdin(Stdio::null());
    let daemon = Daemon(command.stdout(log.try_clone()?).stderr(log).spawn()?);
    let socket = place.dir().join("cri.sock");
    let raw = Raw::new(&socket)?;
    let deadline = Instant::now() + LIMIT;
    while !socket.exists() || raw.count().await.is_err() {
        ensure!(Instant::now() < deadline, "berth cri is not ready");
        tokio::time::sleep(Duration::from_millis(20)).await;
    }
    let shims = || -> Result<Vec<u32>> {
        let pods = fs::read_dir(place.dir().join("state/s"))?.flatten();
        Ok(pods.map(|pod| place.shim(&pod.file_name().to_string_lossy())).collect())
    };
    measured(ctx, &raw, daemon.0.id(), shims).await
}

async fn containerd(ctx: &BenchContext<'_>) -> Result<Samples> {
    let containerd = ctx.containerd()?;
    let raw = Raw::new(&containerd.socket())?;
    let place = containerd.dir().display().to_string();
    let shims = || -> Result<Vec<u32>> {
        let all = fs::read_dir("/proc")?.flatten().filter_map(|entry| entry.file_name().to_str()?.parse().ok());
        let is_shim = |pid: &u32| {
            let line = fs::read(format!("/proc/{pid}/cmdline")).unwrap_or_default();
            let line = String::from_utf8_lossy(&line).into_owned();
            line.contains("containerd-shim") && line.contains(&place)
        };
        Ok(all.filter(is_shim).collect())
    };
    measured(ctx, &raw, containerd.pid(), shims).await
}

async fn measured(
    ctx: &BenchContext<'_>,
    raw: &Raw,
    daemon: u32,
    shims: impl Fn() -> Result<Vec<u32>>,
) -> Result<Samples> {
    let mut samples = Samples::default();
    raw.remove_all().await?;
    for i in 0..ctx.options.amount(20, 8) {
        tokio::time::sleep(Duration::from_millis(100)).await;
        let begun = Instant::now();
        raw.start(&format!("one{i}")).await?;
        samples.add("start", ms(begun));
        let containers = raw.running().await?;
        let container = containers.first().context("no running container")?;
        for _ in 0..5 {
            let begun = Instant::now();
            raw.exec(container, &["true"]).await?;
            samples.add("exec", ms(begun));
        }
        let before = process::busy_seconds()?;
        for _ in 0..EXECS {
            raw.exec(container, &["true"]).await?;
        }
        samples.add("exec_cpu", (process::busy_seconds()? - before) * 1e3 / f64::from(EXECS));
        let begun = Instant::now();
        raw.stop(container).await?;
        samples.add("stop", ms(begun));
        raw.remove_all().await?;
    }
    raw.until_empty(LIMIT).await?;
    let begun = Instant::now();
    let names: Vec<String> = (0..110).map(|i| format!("p{i}")).collect();
    raw.start_all(&names).await?;
    raw.until_running(110, LIMIT).await?;
    samples.add("burst", begun.elapsed().as_secs_f64());
    tokio::time::sleep(ctx.options.amount(Duration::from_secs(10), Duration::from_secs(5))).await;
    let shim_pids = shims()?;
    ensure!(!shim_pids.is_empty(), "no shim found");
    for shim in shim_pids {
        samples.add("shim", process::proportional(shim)?);
    }
    samples.add("daemon", process::resident(daemon)?);
    raw.remove_all().await?;
    raw.until_empty(LIMIT).await?;
    Ok(samples)
}

fn ms(since: Instant) -> f64 {
    since.elapsed().as_secs_f64() * 1e3
}
