//! Benchmarks of log rotation under fast writers, and of graceful node shutdown.

use std::{
    fs::{self, File, OpenOptions},
    io::Write,
    path::{Path, PathBuf},
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering},
    },
    time::{Duration, Instant},
};

use anyhow::{Context, Result, ensure};
use futures::FutureExt;
use serde_json::{Value, json};

use crate::{
    agent::Target,
    cluster::{Cluster, is_write},
    figures::{Bar, Figure, Samples, Unit, median, p99},
    followers::logs,
    manifest,
    measurements::{BenchContext, Group, Measurement},
    scripted_runtime::{PATIENCE, Runtime},
};
use berth_testkit::scripted_cri::{Behaviour, ScriptedCri};

const ROTATION: &[Figure] = &[
    p99("over", "log at 100 MB/s: size beyond the limit in seconds of writing, worst", Unit::Seconds, Bar::AtMost(1.0)),
    median("rotated", "… rotations", Unit::Count, Bar::Open),
    p99("slow", "log at 10 MB/s: size beyond the limit, worst", Unit::Percent, Bar::AtMost(10.0)),
];
const SHUTDOWN: &[Figure] = &[
    median(
        "early",
        "shutdown of 110 pods: final statuses unsent when the first critical pod stops",
        Unit::Count,
        Bar::AtMost(0.0),
    ),
    median("quick", "… pods that exit at once: total time", Unit::Seconds, Bar::Open),
    median("stubborn_early", "… pods that must be killed: final statuses unsent then", Unit::Count, Bar::AtMost(0.0)),
    median("over", "… total time beyond the configured period", Unit::Seconds, Bar::AtMost(1.0)),
];
/// Longer than the interval in which the agent checks the size of all logs.
const ROUND: Duration = Duration::from_secs(11);
const MB: u64 = 1_000_000;
const PODS: usize = 110;
const CRITICAL: usize = 10;
const PERIODS: [Duration; 2] = [Duration::from_secs(8), Duration::from_secs(4)];

/// Measurements of this module.
pub fn measurements() -> Vec<Measurement> {
    let base =
        |name, figures, agent| Measurement { name, group: Group::Health, figures, rounds: (1, 1), agent, raw: None };
    vec![
        base("rotation", ROTATION, |g, t| rotation(g, t).boxed_local()),
        base("shutdown", SHUTDOWN, |g, t| shutdown(g, t).boxed_local()),
    ]
}

/// Writes at a constant rate; like a runtime, it keeps writing to the renamed file until ReopenContainerLog.
struct Writer {
    log: PathBuf,
    rate: u64,
    stop: Arc<AtomicBool>,
}

impl Writer {
    fn write(&self, cri: &ScriptedCri) -> Result<()> {
        let line = format!("2026-01-01T00:00:00.123456789Z stdout F {}\n", "x".repeat(959));
        let piece = line.repeat(100).into_bytes();
        let open = || OpenOptions::new().create(true).append(true).open(&self.log);
        let (mut file, mut opened) = (open()?, cri.count("reopen_container_log"));
        let (began, mut written) = (Instant::now(), 0_u64);
        while !self.stop.load(Ordering::Relaxed) {
            let asked = cri.count("reopen_container_log");
            if asked != opened {
                (file, opened) = (open()?, asked);
            }
            file.write_all(&piece)?;
            written += u64::try_from(piece.len())?;
            let due = Duration::from_micros(written * 1_000_000 / self.rate);
            std::thread::sleep(due.saturating_sub(began.elapsed()));
        }
        Ok(())
    }
}

/// Largest observed sizes of rotated files, by polling: they are compressed or deleted afterwards.
async fn watch(log: &Path, limit: Duration) -> Vec<u64> {
    let name = log.file_name().map(|name| format!("{}.", name.to_string_lossy())).unwrap_or_default();
    let (began, mut seen) = (Instant::now(), std::collections::HashMap::<String, u64>::new());
    while began.elapsed() < limit {
        for entry in log.parent().into_iter().filter_map(|folder| fs::read_dir(folder).ok()).flatten().flatten() {
            let file = entry.file_name().to_string_lossy().into_owned();
            let is_rotated = file.starts_with(&name) && !file.ends_with(".gz") && !file.ends_with(".tmp");
            if let (true, Ok(meta)) = (is_rotated, entry.metadata()) {
                let size = seen.entry(file).or_default();
                *size = meta.len().max(*size);
            }
        }
        tokio::time::sleep(Duration::from_millis(20)).await;
    }
    seen.into_values().collect()
}

/// Bytes by which rotated files exceed the configured size.
async fn overshoot(target: &Target, rate: u64, max: u64, limit: Duration) -> Result<Vec<u64>> {
    let runtime = Runtime::start(10_000).await?;
    let fields = json!({"containerLogMaxSize": max.to_string(), "containerLogMaxFiles": 3});
    let agent = runtime.agent_with(target, &fields).await?;
    agent.put("writes", &manifest::scripted("writes", 1))?;
    agent.until_running(1, PATIENCE).await?;
    let log = logs(&runtime).await?.pop().context("the container has a log file")?;
    File::create(&log)?;
    // A real runtime creates the log before it starts a container; the scripted one does not. After one round the
    // missing log has no effect on the agent any more.
    tokio::time::sleep(ROUND).await;
    let stop = Arc::new(AtomicBool::new(false));
    let writer = Writer { log: log.clone(), rate, stop: stop.clone() };
    let cri = runtime.cri.clone();
    let writing = tokio::task::spawn_blocking(move || writer.write(&cri));
    let sizes = watch(&log, limit).await;
    stop.store(true, Ordering::Relaxed);
    writing.await??;
    ensure!(!sizes.is_empty(), "no log was rotated\n{}", agent.log_end());
    Ok(sizes.into_iter().map(|size| size.saturating_sub(max)).collect())
}

#[allow(clippy::cast_precision_loss, reason = "sizes of files")]
async fn rotation(ctx: &BenchContext<'_>, target: &Target) -> Result<Samples> {
    let mut samples = Samples::default();
    let limit = Duration::from_secs(ctx.options.amount(40, 20));
    let (rate, max) = (100 * MB, 200 * MB);
    let over = overshoot(target, rate, max, limit).await?;
    samples.add("rotated", over.len() as f64);
    over.into_iter().for_each(|bytes| samples.add("over", bytes as f64 / rate as f64));
    let (rate, max) = (10 * MB, 20 * MB);
    let over = overshoot(target, rate, max, limit).await?;
    over.into_iter().for_each(|bytes| samples.add("slow", bytes as f64 / max as f64 * 100.0));
    Ok(samples)
}

/// Spec fields of a pod with a long grace period.
fn fields(is_critical: bool) -> Value {
    let mut fields = json!({"terminationGracePeriodSeconds": 600});
    if is_critical {
        fields["priorityClassName"] = json!("system-cluster-critical");
    }
    fields
}

struct ShutdownOutcome {
    early: f64,
    took: Duration,
}

async fn go_down(target: &Target, behaviour: &Behaviour) -> Result<ShutdownOutcome> {
    let settings = tempfile::NamedTempFile::new()?;
    fs::write(settings.path(), "shutdown: {onTermination: true}\n")?;
    let total: Duration = PERIODS.iter().sum();
    let config = json!({
        "shutdownGracePeriod": format!("{}s", total.as_secs()),
        "shutdownGracePeriodCriticalPods": format!("{}s", PERIODS[1].as_secs()),
    });
    let (cluster, mut agent) = Cluster::joined_with(target, 10_000, &config, Some(settings.path())).await?;
    cluster.runtime.cri.behave("c0", [behaviour.clone()]);
    let name = |i: usize| if i < CRITICAL { format!("critical{i}") } else { format!("plain{i}") };
    for i in 0..PODS {
        cluster.create(&name(i), fields(i < CRITICAL));
        cluster.bind(&name(i));
    }
    cluster.until("all pods are Ready", &agent, |cluster| (0..PODS).all(|i| cluster.is_ready(&name(i)))).await?;
    cluster.quiet().await;
    cluster.runtime.cri.clear_calls();
    let (since, began) = (cluster.api.last(), Instant::now());
    let ended = agent.end(total + PATIENCE).await?;
    let calls = cluster.runtime.cri.calls();
    let touched = calls.iter().find(|call| call.op == "stop_container" && call.target.starts_with("critical"));
    let touched = touched.context("no critical pod was terminated")?.at.into_std();
    let asked = cluster.node_requests(since);
    let mut early = 0.0;
    for i in CRITICAL..PODS {
        let name = name(i);
        let pod = cluster.pod(&name).with_context(|| format!("{name} is gone"))?;
        ensure!(pod["status"]["phase"] == "Failed", "{name} is {}\n{}", pod["status"]["phase"], agent.log_end());
        let writes = asked.at("pods", "default", &name).sub("status").filter(is_write);
        let last = writes.iter().filter_map(|logged| logged.ended).map(|at| at.into_std()).max();
        if last.is_none_or(|last| last > touched) {
            early += 1.0;
        }
    }
    Ok(ShutdownOutcome { early, took: ended - began })
}

async fn shutdown(_: &BenchContext<'_>, target: &Target) -> Result<Samples> {
    let mut samples = Samples::default();
    let quick = go_down(target, &Behaviour::default()).await?;
    samples.add("early", quick.early);
    samples.add("quick", quick.took.as_secs_f64());
    let stubborn = go_down(target, &Behaviour::stubborn()).await?;
    samples.add("stubborn_early", stubborn.early);
    let total: Duration = PERIODS.iter().sum();
    samples.add("over", stubborn.took.saturating_sub(total).as_secs_f64());
    Ok(samples)
}
