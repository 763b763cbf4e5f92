//! Resource leak benchmark: RSS, threads, and descriptors of an agent over 10,000 short-lived pods.
//!
//! The pods are created and deleted in batches of 100.

use std::time::Duration;

use anyhow::Result;
use futures::FutureExt;

use crate::{
    agent::{Agent, Target},
    figures::{Bar, Figure, Samples, Unit, median},
    manifest,
    measurements::{BenchContext, Group, Measurement},
    process,
    scripted_runtime::{PATIENCE, Runtime},
};

const CHURN: &[Figure] = &[
    median("rss", "RSS after 10,000 pods / after the first 1,000", Unit::Times, Bar::AtMost(1.05)),
    median("rss_end", "RSS after 10,000 pods", Unit::Megabytes, Bar::Open),
    median("threads", "additional threads", Unit::Count, Bar::AtMost(0.0)),
    median("fds", "additional file descriptors", Unit::Count, Bar::AtMost(0.0)),
];
const BATCH: usize = 100;

/// Measurements of this module.
pub fn measurements() -> Vec<Measurement> {
    vec![Measurement {
        name: "churn",
        group: Group::Scripted,
        figures: CHURN,
        rounds: (1, 1),
        agent: |g, t| churn(g, t).boxed_local(),
        raw: None,
    }]
}

/// Process resources between batches, once the agent is idle.
struct ProcessResources {
    rss: f64,
    threads: usize,
    fds: usize,
}

async fn idle_resources(agent: &Agent) -> Result<ProcessResources> {
    // Idle pooled threads and connections time out.
    tokio::time::sleep(Duration::from_secs(15)).await;
    let pid = agent.pid();
    Ok(ProcessResources {
        rss: process::resident(pid)?,
        threads: process::threads(pid)?,
        fds: process::descriptors(pid)?,
    })
}

#[allow(clippy::cast_precision_loss, reason = "no process has 2^52 threads")]
async fn churn(ctx: &BenchContext<'_>, target: &Target) -> Result<Samples> {
    let runtime = Runtime::start(10_000).await?;
    let agent = runtime.agent(target).await?;
    let (warm, all) = ctx.options.amount((10, 100), (3, 9));
    let start = idle_resources(&agent).await?;
    for number in 0..warm {
        batch(&runtime, &agent, number).await?;
    }
    let warmed = idle_resources(&agent).await?;
    for number in warm..all {
        batch(&runtime, &agent, number).await?;
    }
    let end = idle_resources(&agent).await?;
    let mut samples = Samples::default();
    samples.add("rss", end.rss / warmed.rss);
    samples.add("rss_end", end.rss);
    samples.add("threads", end.threads as f64 - start.threads as f64);
    samples.add("fds", end.fds as f64 - start.fds as f64);
    Ok(samples)
}

async fn batch(runtime: &Runtime, agent: &Agent, number: usize) -> Result<()> {
    let names: Vec<String> = (0..BATCH).map(|i| format!("b{number}x{i}")).collect();
    for name in &names {
        agent.put(name, &manifest::scripted(name, 1))?;
    }
    agent.until_running(BATCH, PATIENCE).await?;
    for name in &names {
        agent.remove(name)?;
    }
    // A terminated pod counts as gone: other agents leave its dead containers to garbage collection.
    let gone = |cri: &berth_testkit::scripted_cri::ScriptedCri| {
        cri.running("", "c0").is_empty() && cri.sandboxes().iter().all(|s| s.state != 0)
    };
    runtime.until("all pods of the batch are removed", agent, gone).await?;
    runtime.cri.clear_calls();
    Ok(())
}
