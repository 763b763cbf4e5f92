//! Benchmark of pod start, restart, and removal on a real containerd, beside a plain CRI client.
//!
//! A container counts as running when containerd publishes its task start event.

use std::time::{Duration, Instant};

use anyhow::{Context, Result};
use futures::FutureExt;

use crate::{
    agent::{Agent, Target},
    events::Events,
    figures::{Bar, Figure, Samples, Unit, median},
    manifest,
    measurements::{BenchContext, Group, Measurement},
    raw::Raw,
};

const COLD: &[Figure] = &[median("healthz", "cold start → healthz", Unit::Seconds, Bar::AtMost(0.06))];
const ONE: &[Figure] = &[
    median("start", "one pod, manifest written → container running", Unit::Seconds, Bar::AtMost(0.17)),
    median("restart", "kill -9 of a container → running again", Unit::Seconds, Bar::AtMost(0.2)),
];
const FIFTY: &[Figure] = &[median("all", "50 pods at once → all running", Unit::Seconds, Bar::TimesRaw(1.2))];
const MANY: &[Figure] = &[
    median("all", "110 pods at once → all running", Unit::Seconds, Bar::TimesRaw(1.2)),
    median("gone", "110 manifests removed → nothing left", Unit::Seconds, Bar::TimesRaw(1.3)),
];
const LIMIT: Duration = Duration::from_secs(120);

/// Measurements of this module.
pub fn measurements() -> Vec<Measurement> {
    let base = |name, figures, rounds, agent| Measurement {
        name,
        group: Group::Containerd,
        figures,
        rounds,
        agent,
        raw: None,
    };
    vec![
        base("real-cold", COLD, (20, 5), |g, t| cold(g, t).boxed_local()),
        Measurement {
            raw: Some(|g| raw_one(g).boxed_local()),
            ..base("one", ONE, (3, 1), |g, t| one(g, t).boxed_local())
        },
        Measurement {
            raw: Some(|g| raw_many(g, 50).boxed_local()),
            ..base("fifty", FIFTY, (3, 1), |g, t| many(g, t, 50).boxed_local())
        },
        Measurement {
            raw: Some(|g| raw_many(g, 110).boxed_local()),
            ..base("many", MANY, (3, 1), |g, t| many(g, t, 110).boxed_local())
        },
    ]
}

async fn cold(ctx: &BenchContext<'_>, target: &Target) -> Result<Samples> {
    let mut samples = Samples::default();
    let agent = Agent::start(target, &ctx.containerd()?.socket()).await?;
    samples.add("healthz", agent.ready_after.as_secs_f64());
    Ok(samples)
}

/// Tools of both sides: event stream, plain CRI client, and an empty runtime.
async fn tools(ctx: &BenchContext<'_>) -> Result<(Events, Raw)> {
    let socket = ctx.containerd()?.socket();
    let raw = Raw::new(&socket)?;
    raw.remove_all().await?;
    raw.until_empty(LIMIT).await?;
    Ok((Events::follow(&socket).await?, raw))
}

async fn one(ctx: &BenchContext<'_>, target: &Target) -> Result<Samples> {
    let (events, raw) = tools(ctx).await?;
    let agent = Agent::start(target, &ctx.containerd()?.socket()).await?;
    let mut samples = Samples::default();
    for i in 0..ctx.options.amount(7, 5) {
        tokio::time::sleep(Duration::from_millis(300)).await;
        events.clear();
        let name = format!("p{i}");
        let at = agent.put(&name, &manifest::real(&name))?;
        let started = events.until("/tasks/start", 2, LIMIT).await.with_context(|| agent.log_end())?;
        samples.add("start", (started.at - at).as_secs_f64());
        tokio::time::sleep(Duration::from_millis(300)).await;
        events.clear();
        let at = Instant::now();
        nix::sys::signal::kill(
            nix::unistd::Pid::from_raw(i32::try_from(started.pid)?),
            nix::sys::signal::Signal::SIGKILL,
        )?;
        let again = events.until("/tasks/start", 1, LIMIT).await.with_context(|| agent.log_end())?;
        samples.add("restart", (again.at - at).as_secs_f64());
        agent.remove(&name)?;
        raw.until_empty(LIMIT).await.with_context(|| agent.log_end())?;
    }
    Ok(samples)
}

async fn raw_one(ctx: &BenchContext<'_>) -> Result<Samples> {
    let (events, raw) = tools(ctx).await?;
    let mut samples = Samples::default();
    for i in 0..ctx.options.amount(7, 5) {
        tokio::time::sleep(Duration::from_millis(300)).await;
        events.clear();
        let at = Instant::now();
        raw.start(&format!("p{i}")).await?;
        let started = events.until("/tasks/start", 2, LIMIT).await?;
        samples.add("start", (started.at - at).as_secs_f64());
        raw.remove_all().await?;
    }
    Ok(samples)
}

async fn many(ctx: &BenchContext<'_>, target: &Target, count: usize) -> Result<Samples> {
    let (events, raw) = tools(ctx).await?;
    let agent = Agent::start(target, &ctx.containerd()?.socket()).await?;
    tokio::time::sleep(Duration::from_secs(1)).await;
    events.clear();
    let mut samples = Samples::default();
    let began = Instant::now();
    for name in names(count) {
        agent.put(&name, &manifest::real(&name))?;
    }
    let last = events.until("/tasks/start", 2 * count, LIMIT).await.with_context(|| agent.log_end())?;
    samples.add("all", (last.at - began).as_secs_f64());
    agent.until_running(count, LIMIT).await?;
    tokio::time::sleep(Duration::from_secs(2)).await;
    events.clear();
    let began = Instant::now();
    for name in names(count) {
        agent.remove(&name)?;
    }
    gone(&events, &raw, count).await.with_context(|| agent.log_end())?;
    samples.add("gone", began.elapsed().as_secs_f64());
    Ok(samples)
}

async fn raw_many(ctx: &BenchContext<'_>, count: usize) -> Result<Samples> {
    let (events, raw) = tools(ctx).await?;
    let mut samples = Samples::default();
    let began = Instant::now();
    raw.start_all(&names(count)).await?;
    let last = events.until("/tasks/start", 2 * count, LIMIT).await?;
    samples.add("all", (last.at - began).as_secs_f64());
    tokio::time::sleep(Duration::from_secs(2)).await;
    events.clear();
    let began = Instant::now();
    raw.remove_all().await?;
    gone(&events, &raw, count).await?;
    samples.add("gone", began.elapsed().as_secs_f64());
    Ok(samples)
}

/// Waits until containers and sandboxes are gone. Reads the lists only when the events suggest that they may be empty:
/// polling them would load the runtime.
async fn gone(events: &Events, raw: &Raw, count: usize) -> Result<()> {
    let last = events.until("/containers/delete", 2 * count, LIMIT).await;
    if last.is_err() {
        let (sandboxes, running) = raw.count().await?;
        last.with_context(|| format!("{sandboxes} sandboxes and {running} running containers left"))?;
    }
    raw.until_empty(LIMIT).await
}

fn names(count: usize) -> Vec<String> {
    (0..count).map(|i| format!("p{i}")).collect()
}
