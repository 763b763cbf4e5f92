//! Benchmark of an idle agent: memory, CPU time, and size of the binary.

use std::time::{Duration, Instant};

use anyhow::Result;
use futures::FutureExt;

use crate::{
    agent::Target,
    figures::{Bar, Figure, Samples, Unit, median},
    manifest,
    measurements::{BenchContext, Group, Measurement},
    process,
    scripted_runtime::{PATIENCE, Runtime},
};

const COST: &[Figure] = &[
    median("anonymous0", "anonymous memory, 0 pods (scripted)", Unit::Megabytes, Bar::AtMost(12.0)),
    median("pss0", "PSS, 0 pods (scripted)", Unit::Megabytes, Bar::Open),
    median("rss0", "RSS, 0 pods (scripted)", Unit::Megabytes, Bar::Open),
    median(
        "anonymous110",
        "anonymous memory, 110 pods / 220 containers (scripted)",
        Unit::Megabytes,
        Bar::AtMost(25.0),
    ),
    median("pss110", "PSS, 110 pods / 220 containers (scripted)", Unit::Megabytes, Bar::Open),
    median("rss110", "RSS, 110 pods / 220 containers (scripted)", Unit::Megabytes, Bar::Open),
    median("cpu", "CPU, 110 idle pods, percent of a core (scripted)", Unit::Percent, Bar::AtMost(0.3)),
    median("idle_calls", "CRI calls per minute, 110 idle pods", Unit::Count, Bar::Open),
    median("threads", "threads, 110 pods", Unit::Count, Bar::Open),
];
const SIZE: &[Figure] = &[median("size", "size of the binary", Unit::Megabytes, Bar::AtMost(25.0))];

/// Measurements of this module.
pub fn measurements() -> Vec<Measurement> {
    vec![
        Measurement {
            name: "cost",
            group: Group::Scripted,
            figures: COST,
            rounds: (1, 1),
            agent: |g, t| cost(g, t).boxed_local(),
            raw: None,
        },
        Measurement {
            name: "size",
            group: Group::Scripted,
            figures: SIZE,
            rounds: (1, 1),
            agent: |_, t| size(t).boxed_local(),
            raw: None,
        },
    ]
}

async fn cost(ctx: &BenchContext<'_>, target: &Target) -> Result<Samples> {
    let runtime = Runtime::start(10_000).await?;
    let agent = runtime.agent(target).await?;
    let settle = Duration::from_secs(ctx.options.amount(10, 5));
    let mut samples = Samples::default();
    tokio::time::sleep(settle).await;
    process::add_memory(&mut samples, agent.pid(), ["rss0", "pss0", "anonymous0"])?;
    for i in 0..110 {
        let name = format!("p{i}");
        agent.put(&name, &manifest::scripted(&name, 2))?;
    }
    agent.until_running(110, PATIENCE).await?;
    tokio::time::sleep(settle).await;
    let window = Duration::from_secs(ctx.options.amount(60, 10));
    runtime.cri.clear_calls();
    let (began, before) = (Instant::now(), process::cpu_seconds(agent.pid())?);
    tokio::time::sleep(window).await;
    let (spent, passed) = (process::cpu_seconds(agent.pid())? - before, began.elapsed().as_secs_f64());
    samples.add("cpu", spent / passed * 100.0);
    samples.add("idle_calls", f64::from(u32::try_from(runtime.cri.calls().len())?) * 60.0 / passed);
    process::add_memory(&mut samples, agent.pid(), ["rss110", "pss110", "anonymous110"])?;
    samples.add("threads", f64::from(u32::try_from(process::threads(agent.pid())?)?));
    Ok(samples)
}

#[allow(clippy::cast_precision_loss, reason = "no binary has 2^52 bytes")]
async fn size(target: &Target) -> Result<Samples> {
    let mut samples = Samples::default();
    samples.add("size", std::fs::metadata(&target.binary)?.len() as f64 / 1e6);
    Ok(samples)
}
