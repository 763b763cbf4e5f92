//! Benchmark of memory and CPU time of an agent and its containerd with running pods.

use std::time::{Duration, Instant};

use anyhow::Result;
use futures::FutureExt;

use crate::{
    agent::{Agent, Target},
    figures::{Bar, Figure, Samples, Unit, median},
    manifest,
    measurements::{BenchContext, Group, Measurement},
    process,
    raw::Raw,
};

const COST: &[Figure] = &[
    median("anonymous0", "anonymous memory, 0 pods", Unit::Megabytes, Bar::AtMost(10.0)),
    median("pss0", "PSS, 0 pods", Unit::Megabytes, Bar::Open),
    median("rss0", "RSS, 0 pods", Unit::Megabytes, Bar::Open),
    median("anonymous50", "anonymous memory, 50 pods", Unit::Megabytes, Bar::AtMost(15.0)),
    median("pss50", "PSS, 50 pods", Unit::Megabytes, Bar::Open),
    median("rss50", "RSS, 50 pods", Unit::Megabytes, Bar::Open),
    median("anonymous110", "anonymous memory, 110 pods", Unit::Megabytes, Bar::AtMost(20.0)),
    median("pss110", "PSS, 110 pods", Unit::Megabytes, Bar::Open),
    median("rss110", "RSS, 110 pods", Unit::Megabytes, Bar::Open),
    median("cpu", "CPU of the agent per minute, 110 idle pods", Unit::Seconds, Bar::AtMost(0.15)),
    median("containerd", "CPU of containerd per minute, 110 idle pods", Unit::Seconds, Bar::AtMost(0.1)),
];
const LIMIT: Duration = Duration::from_secs(180);

/// Measurements of this module. `raw` is containerd without any agent.
pub fn measurements() -> Vec<Measurement> {
    vec![Measurement {
        name: "real-cost",
        group: Group::Containerd,
        figures: COST,
        rounds: (1, 1),
        agent: |g, t| cost(g, t).boxed_local(),
        raw: Some(|g| alone(g).boxed_local()),
    }]
}

async fn cost(ctx: &BenchContext<'_>, target: &Target) -> Result<Samples> {
    let containerd = ctx.containerd()?;
    let raw = Raw::new(&containerd.socket())?;
    raw.remove_all().await?;
    let agent = Agent::start(target, &containerd.socket()).await?;
    let settle = Duration::from_secs(ctx.options.amount(10, 5));
    let mut samples = Samples::default();
    let mut next = 0;
    let keys = [
        (0, ["rss0", "pss0", "anonymous0"]),
        (50, ["rss50", "pss50", "anonymous50"]),
        (110, ["rss110", "pss110", "anonymous110"]),
    ];
    for (count, keys) in keys {
        while next < count {
            let name = format!("p{next}");
            agent.put(&name, &manifest::real(&name))?;
            next += 1;
        }
        agent.until_running(count, LIMIT).await?;
        tokio::time::sleep(settle).await;
        process::add_memory(&mut samples, agent.pid(), keys)?;
    }
    let before = process::cpu_seconds(agent.pid())?;
    samples.add("containerd", per_minute(ctx, containerd.pid()).await?);
    let window = window(ctx).as_secs_f64();
    samples.add("cpu", (process::cpu_seconds(agent.pid())? - before) * 60.0 / window);
    drop(agent);
    raw.remove_all().await?;
    Ok(samples)
}

async fn alone(ctx: &BenchContext<'_>) -> Result<Samples> {
    let containerd = ctx.containerd()?;
    let raw = Raw::new(&containerd.socket())?;
    raw.remove_all().await?;
    let names: Vec<String> = (0..110).map(|i| format!("p{i}")).collect();
    raw.start_all(&names).await?;
    raw.until_running(110, LIMIT).await?;
    tokio::time::sleep(Duration::from_secs(ctx.options.amount(10, 5))).await;
    let mut samples = Samples::default();
    samples.add("containerd", per_minute(ctx, containerd.pid()).await?);
    raw.remove_all().await?;
    Ok(samples)
}

/// CPU seconds that a process spends per minute, extrapolated from the window.
async fn per_minute(ctx: &BenchContext<'_>, pid: u32) -> Result<f64> {
    let (began, before) = (Instant::now(), process::cpu_seconds(pid)?);
    tokio::time::sleep(window(ctx)).await;
    Ok((process::cpu_seconds(pid)? - before) * 60.0 / began.elapsed().as_secs_f64())
}

fn window(ctx: &BenchContext<'_>) -> Duration {
    Duration::from_secs(ctx.options.amount(60, 10))
}
