//! Benchmark of agent overhead in pod starts, on a runtime with zero or scripted latency.

use std::time::{Duration, Instant};

use anyhow::{Context, Result};
use futures::FutureExt;

use crate::{
    agent::{Agent, Target},
    figures::{Bar, Figure, Samples, Unit, median, p99},
    manifest,
    measurements::{BenchContext, Group, Measurement},
    scripted_runtime::{PATIENCE, Runtime, ms},
};
use berth_testkit::scripted_cri::{Behaviour, Fault, ScriptedCri};

const COLD: &[Figure] = &[median("healthz", "cold start → healthz (scripted)", Unit::Milliseconds, Bar::AtMost(60.0))];
const STARTS: &[Figure] = &[
    p99("sandbox", "manifest → RunPodSandbox, p99", Unit::Milliseconds, Bar::AtMost(30.0)),
    p99("overhead", "agent overhead per pod start, p99", Unit::Milliseconds, Bar::AtMost(20.0)),
    median("overhead", "agent overhead per pod start, median", Unit::Milliseconds, Bar::Open),
    median("calls", "CRI calls until the container starts", Unit::Count, Bar::Open),
];
const BURST: &[Figure] =
    &[median("last", "110 pods at once, last Running (scripted)", Unit::Seconds, Bar::AtMost(3.0))];
const INIT: &[Figure] =
    &[median("init", "10 instant init containers → main starts", Unit::Milliseconds, Bar::AtMost(150.0))];
const RESTART: &[Figure] = &[
    p99("decision", "container exit → restart begins, p99", Unit::Milliseconds, Bar::AtMost(30.0)),
    median("decision", "container exit → restart begins, median", Unit::Milliseconds, Bar::Open),
];
const HUNG: &[Figure] = &[
    median("p99", "overhead p99 beside a hung pod / without", Unit::Times, Bar::AtMost(1.05)),
    median("p50", "overhead median beside a hung pod / without", Unit::Times, Bar::Open),
];

/// Measurements of this module.
pub fn measurements() -> Vec<Measurement> {
    let base =
        |name, figures, rounds, agent| Measurement { name, group: Group::Scripted, figures, rounds, agent, raw: None };
    vec![
        base("cold", COLD, (20, 5), |g, t| cold(g, t).boxed_local()),
        base("starts", STARTS, (2, 1), |g, t| starts(g, t).boxed_local()),
        base("burst", BURST, (3, 1), |g, t| burst(g, t).boxed_local()),
        base("init", INIT, (2, 1), |g, t| init(g, t).boxed_local()),
        base("restart", RESTART, (2, 1), |g, t| restart(g, t).boxed_local()),
        base("hung", HUNG, (1, 1), |g, t| hung(g, t).boxed_local()),
    ]
}

async fn cold(_: &BenchContext<'_>, target: &Target) -> Result<Samples> {
    let runtime = Runtime::start(10_000).await?;
    let mut samples = Samples::default();
    samples.add("healthz", ms(runtime.agent(target).await?.ready_after));
    Ok(samples)
}

async fn starts(ctx: &BenchContext<'_>, target: &Target) -> Result<Samples> {
    let runtime = Runtime::start(10_000).await?;
    let agent = runtime.agent(target).await?;
    let mut samples = Samples::default();
    for i in 0..ctx.options.amount(200, 60) {
        let name = format!("p{i}");
        let start = runtime.start_pod(&agent, &name, &manifest::scripted(&name, 1)).await?;
        samples.add("sandbox", ms(start.sandbox));
        samples.add("overhead", ms(start.container));
        samples.add("calls", f64::from(u32::try_from(start.calls)?));
        settle().await;
    }
    Ok(samples)
}

async fn burst(_: &BenchContext<'_>, target: &Target) -> Result<Samples> {
    let runtime = Runtime::start(10).await?;
    for (op, millis) in [("run_podsandbox", 50), ("create_container", 10), ("start_container", 20)] {
        runtime.cri.latency(op, Duration::from_millis(millis));
    }
    let agent = runtime.agent(target).await?;
    settle().await;
    let began = Instant::now();
    for i in 0..110 {
        let name = format!("p{i}");
        agent.put(&name, &manifest::scripted(&name, 1))?;
    }
    runtime.until("110 containers are running", &agent, |cri| cri.running("", "c0").len() == 110).await?;
    let last = agent.until_running(110, PATIENCE).await?;
    let mut samples = Samples::default();
    samples.add("last", (last - began).as_secs_f64());
    Ok(samples)
}

async fn init(ctx: &BenchContext<'_>, target: &Target) -> Result<Samples> {
    let runtime = Runtime::start(10_000).await?;
    for i in 0..10 {
        runtime.cri.behave(&format!("i{i}"), [Behaviour::exits(0, Duration::ZERO)]);
    }
    let agent = runtime.agent(target).await?;
    let mut samples = Samples::default();
    for i in 0..ctx.options.amount(10, 5) {
        let name = format!("p{i}");
        let start = runtime.start_pod(&agent, &name, &manifest::with_init(&name, 10)).await?;
        samples.add("init", ms(start.container));
        settle().await;
    }
    Ok(samples)
}

async fn restart(ctx: &BenchContext<'_>, target: &Target) -> Result<Samples> {
    let runtime = Runtime::start(10_000).await?;
    let agent = runtime.agent(target).await?;
    let pods: u32 = ctx.options.amount(110, 30);
    for i in 0..pods {
        let name = format!("p{i}");
        agent.put(&name, &manifest::scripted(&name, 1))?;
    }
    agent.until_running(usize::try_from(pods)?, PATIENCE).await?;
    let mut samples = Samples::default();
    for i in 0..pods {
        settle().await;
        let pod = manifest::full_name(&format!("p{i}"));
        let id = runtime.cri.running(&pod, "c0").pop().context("the container is running")?;
        runtime.cri.clear_calls();
        let at = Instant::now();
        runtime.cri.kill(&id, 137, "");
        runtime.until("the container was restarted", &agent, |cri| !cri.running(&pod, "c0").is_empty()).await?;
        let calls = runtime.cri.calls();
        let begin = calls.iter().find(|c| ["image_status", "create_container"].contains(&c.op));
        samples.add("decision", ms(begin.context("creation of the container not recorded")?.at.into_std() - at));
    }
    Ok(samples)
}

/// Pause between a block of starts and the work before it.
const SETTLED: Duration = Duration::from_millis(200);

async fn hung(ctx: &BenchContext<'_>, target: &Target) -> Result<Samples> {
    let runtime = Runtime::start(10_000).await?;
    runtime.cri.fault("run_podsandbox", "hung", Fault::Hang, None);
    let agent = runtime.agent(target).await?;
    let arrive = |neighbor: String| {
        let (runtime, agent) = (&runtime, &agent);
        async move {
            agent.put(&neighbor, &manifest::scripted(&neighbor, 1))?;
            let is_hung = |cri: &ScriptedCri| cri.targets("run_podsandbox").len() == 1;
            runtime.until("the neighbor pod hangs in RunPodSandbox", agent, is_hung).await
        }
    };
    starts_beside(ctx, &runtime, &agent, arrive).await
}

/// Measures starts beside a hung neighbor, over starts without one, as `p99` and `p50`. `arrive` creates the neighbor of
/// that name and returns once it hangs.
///
/// Blocks of starts with and without a neighbor alternate under one agent, so that a drift affects both. Each side has
/// thousands of starts: the 99th percentile of a few hundred is not accurate to 5 %.
pub async fn starts_beside<F: Future<Output = Result<()>>>(
    ctx: &BenchContext<'_>,
    runtime: &Runtime,
    agent: &Agent,
    arrive: impl Fn(String) -> F,
) -> Result<Samples> {
    let (mut beside, mut without) = (Vec::new(), Vec::new());
    let blocks = ctx.options.amount(100, 4);
    for block in 0..blocks {
        let hangs = block % 2 == 0;
        let neighbor = format!("hung{block}");
        if hangs {
            arrive(neighbor.clone()).await?;
        }
        // Only the hanging neighbor is measured, not its arrival.
        tokio::time::sleep(SETTLED).await;
        for i in 0..50 {
            let name = format!("p{block}x{i}");
            let start = runtime.start_pod(agent, &name, &manifest::scripted(&name, 1)).await?;
            if hangs {
                beside.push(ms(start.container))
            } else {
                without.push(ms(start.container))
            }
            tokio::time::sleep(Duration::from_millis(10)).await;
        }
        if hangs {
            agent.remove(&neighbor)?;
        }
        for i in 0..50 {
            agent.remove(&format!("p{block}x{i}"))?;
        }
        runtime.until("all pods of the block are removed", agent, |cri| cri.running("", "c0").is_empty()).await?;
        runtime.cri.clear_calls();
    }
    let mut samples = Samples::default();
    for (key, how) in [("p99", crate::figures::Reduce::P99), ("p50", crate::figures::Reduce::Median)] {
        let value = |all: &[f64]| crate::figures::reduce(all, how).context("samples");
        samples.add(key, value(&beside)? / value(&without)?);
    }
    Ok(samples)
}

/// Waits until the follow-up work of a start (runtime reads, status, files) is done, before the next one begins.
async fn settle() {
    tokio::time::sleep(Duration::from_millis(20)).await;
}
