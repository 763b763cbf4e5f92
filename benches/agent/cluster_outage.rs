//! Benchmarks: API server outage, agent restart, and the cost of a node with and without pods.

use std::time::{Duration, Instant};

use anyhow::{Context, Result};
use futures::FutureExt;
use serde_json::json;

use crate::{
    agent::{Agent, Target},
    cluster::{Cluster, begun, is_write, kinds},
    figures::{Bar, Figure, Samples, Unit, median, p99},
    manifest::NODE,
    measurements::{BenchContext, Group, Measurement},
    process,
    scripted_runtime::{first, ms},
};

const BLACK: &[Figure] = &[
    p99("renewal", "black-holed connections → lease renewed, worst", Unit::Seconds, Bar::AtMost(15.0)),
    p99("pod", "black-holed connections → pod assigned meanwhile is Running, worst", Unit::Seconds, Bar::Open),
];
const RESTART: &[Figure] = &[
    median("patches", "restart with 110 ready pods: status PATCHes", Unit::Count, Bar::AtMost(0.0)),
    median("pod", "restart → sandbox of a pod assigned meanwhile", Unit::Seconds, Bar::AtMost(1.0)),
    median("node", "restart → Node reported Ready", Unit::Seconds, Bar::Open),
    median("healthz", "restart → healthz, 110 pods", Unit::Milliseconds, Bar::Open),
    median("requests", "restart: total requests", Unit::Count, Bar::Open),
];
const COST: &[Figure] = &[
    median("anonymous", "anonymous memory, 110 API pods", Unit::Megabytes, Bar::AtMost(30.0)),
    median("pss", "PSS, 110 API pods", Unit::Megabytes, Bar::Open),
    median("rss", "RSS, 110 API pods", Unit::Megabytes, Bar::Open),
    median("cpu", "CPU, 110 idle API pods, percent of a core", Unit::Percent, Bar::Open),
    median("idle", "requests per minute, 110 idle API pods", Unit::Count, Bar::Open),
    median("outage", "CPU during an outage, percent of a core", Unit::Percent, Bar::AtMost(1.0)),
    median("log", "log lines per minute during an outage", Unit::Count, Bar::Open),
    median("back", "API server is back → lease renewed", Unit::Seconds, Bar::Open),
    median("lists", "full lists after the outage", Unit::Count, Bar::Open),
    median("writes", "status PATCHes after the outage", Unit::Count, Bar::AtMost(0.0)),
    median("rss_end", "RSS after the outage", Unit::Megabytes, Bar::Open),
];
const MANY: &[Figure] = &[
    median(
        "anonymous",
        "anonymous memory, 500 API pods with 4 ConfigMaps each (2,000 in total)",
        Unit::Megabytes,
        Bar::AtMost(40.0),
    ),
    median("rss", "… RSS", Unit::Megabytes, Bar::Open),
    median("ready", "… time until all are Ready", Unit::Seconds, Bar::Open),
    median("streams", "… open watches of ConfigMaps", Unit::Count, Bar::Open),
    median("connections", "… open connections, at most 100 concurrent requests each", Unit::Count, Bar::Open),
    median("gap", "… longest gap between lease renewals", Unit::Seconds, Bar::AtMost(11.0)),
    median("cpu", "… CPU when idle, percent of a core", Unit::Percent, Bar::Open),
];

/// Measurements of this module.
pub fn measurements() -> Vec<Measurement> {
    let base =
        |name, figures, rounds, agent| Measurement { name, group: Group::Cluster, figures, rounds, agent, raw: None };
    vec![
        base("black", BLACK, (1, 1), |g, t| black(g, t).boxed_local()),
        base("api-restart", RESTART, (3, 1), |g, t| restart(g, t).boxed_local()),
        base("api-many", MANY, (1, 1), |g, t| many(g, t).boxed_local()),
        base("api-cost", COST, (1, 1), |g, t| cost(g, t).boxed_local()),
    ]
}

/// Longer than any agent needs to detect a dead connection.
const DEAD: Duration = Duration::from_secs(120);

/// All connections stop delivering packets at once: soon after a lease renewal, between two, and right before the next.
/// New connections work.
async fn black(ctx: &BenchContext<'_>, target: &Target) -> Result<Samples> {
    let (cluster, agent) = Cluster::joined(target, 10_000).await?;
    let mut samples = Samples::default();
    for (number, after) in ctx.options.amount(&[0.2, 3.0, 6.0, 8.0, 9.5][..], &[3.0][..]).iter().enumerate() {
        let renewed = renewal(&cluster, &agent, cluster.api.last()).await?;
        tokio::time::sleep_until((renewed + Duration::from_secs_f64(*after)).into()).await;
        let (last, before) = (last_renewal(&cluster, renewed), cluster.api.last());
        cluster.api.connections().iter().for_each(|connection| connection.set_black_hole(true));
        let name = format!("dark{number}");
        cluster.create(&name, json!({}));
        let bound = cluster.bind(&name);
        let next = renewal(&cluster, &agent, before).await?;
        samples.add("renewal", (next - last).as_secs_f64());
        let running = cluster.until_within(DEAD, &format!("{name} is Running"), &agent, |c| c.is_ready(&name)).await?;
        samples.add("pod", (running - bound).as_secs_f64());
    }
    Ok(samples)
}

/// Waits for the first successful lease renewal after a request.
async fn renewal(cluster: &Cluster, agent: &Agent, since: u64) -> Result<Instant> {
    let is_there = |c: &Cluster| !c.renewals(since).is_empty();
    cluster.until_within(DEAD, "the lease was renewed", agent, is_there).await?;
    cluster.renewals(since).first().copied().context("just seen")
}

/// Time of the last successful lease renewal; `known` if there was none since.
fn last_renewal(cluster: &Cluster, known: Instant) -> Instant {
    cluster.renewals(0).into_iter().fold(known, Instant::max)
}

/// The agent is killed and restarted. Meanwhile one more pod is bound, which shows when the agent works again: by then
/// it knows the running pods and has synced every pod source.
async fn restart(ctx: &BenchContext<'_>, target: &Target) -> Result<Samples> {
    let (cluster, mut agent) = Cluster::joined(target, 10_000).await?;
    let names = cluster.run_pods(&agent, "old", 110, &json!({})).await?;
    cluster.quiet().await;
    agent.kill()?;
    cluster.create("new", json!({}));
    cluster.bind("new");
    cluster.runtime.cri.clear_calls();
    let before = cluster.api.last();
    let began = agent.start_again().await?;
    cluster.until("the new pod is Ready", &agent, |c| c.is_ready("new")).await?;
    // Status updates that are still pending arrive now.
    tokio::time::sleep(Duration::from_secs(5)).await;
    let calls = cluster.runtime.cri.calls();
    let sandbox = first(&calls, "run_podsandbox", "new").context("the new pod has a sandbox")?.at.into_std();
    let asked = cluster.node_requests(before);
    if ctx.options.keep {
        eprintln!("\nrequests of a restart:\n{}", kinds(&asked));
    }
    let old = asked.of("pods").filter(|logged| is_write(logged) && names.contains(&logged.name));
    let mut samples = Samples::default();
    samples.add("patches", count(old.len())?);
    samples.add("pod", (sandbox - began).as_secs_f64());
    if let Some(at) = begun(&asked.at("nodes", "", NODE).sub("status"), is_write) {
        samples.add("node", (at - began).as_secs_f64());
    }
    samples.add("healthz", ms(agent.ready_after));
    samples.add("requests", count(asked.len())?);
    Ok(samples)
}

async fn cost(ctx: &BenchContext<'_>, target: &Target) -> Result<Samples> {
    let (cluster, agent) = Cluster::joined(target, 10_000).await?;
    let names = cluster.run_pods(&agent, "idle", 110, &json!({})).await?;
    tokio::time::sleep(Duration::from_secs(ctx.options.amount(15, 8))).await;
    let mut samples = Samples::default();
    let before = cluster.api.last();
    process::add_memory(&mut samples, agent.pid(), ["rss", "pss", "anonymous"])?;
    let window = Duration::from_secs(ctx.options.amount(60, 20));
    samples.add("cpu", busy(&agent, window).await?);
    samples.add("idle", count(cluster.node_requests(before).len())? * 60.0 / window.as_secs_f64());

    cluster.api.take_offline().await;
    let (outage, lines) = (Duration::from_secs(ctx.options.amount(600, 60)), agent.log_lines());
    samples.add("outage", busy(&agent, outage).await?);
    samples.add("log", count(agent.log_lines() - lines)? * 60.0 / outage.as_secs_f64());

    let (before, back) = (cluster.api.last(), Instant::now());
    cluster.api.bring_online().await;
    samples.add("back", (renewal(&cluster, &agent, before).await? - back).as_secs_f64());
    tokio::time::sleep(Duration::from_secs(ctx.options.amount(60, 20))).await;
    let asked = cluster.node_requests(before);
    if ctx.options.keep {
        eprintln!("\nrequests after an outage:\n{}", kinds(&asked));
    }
    samples.add("lists", count(asked.verb("list").len())?);
    let writes = asked.of("pods").filter(|logged| is_write(logged) && names.contains(&logged.name));
    samples.add("writes", count(writes.len())?);
    samples.add("rss_end", process::resident(agent.pid())?);
    Ok(samples)
}

/// Memory of a node with 500 pods and the 2,000 objects that they reference.
async fn many(ctx: &BenchContext<'_>, target: &Target) -> Result<Samples> {
    const PODS: usize = 500;
    const LIMIT: Duration = Duration::from_secs(300);
    let (cluster, agent) = Cluster::joined(target, 10_000).await?;
    let began = Instant::now();
    for pod in 0..PODS {
        let maps: Vec<String> = (0..4).map(|map| format!("map{pod}-{map}")).collect();
        for map in &maps {
            cluster.api.create(json!({
                "apiVersion": "v1", "kind": "ConfigMap", "metadata": {"name": map, "namespace": "default"},
                "data": {"settings.yaml": "x".repeat(1024)},
            }));
        }
        let volumes = maps.iter().map(|map| json!({"name": map, "configMap": {"name": map}}));
        let name = format!("many{pod}");
        cluster.create(&name, json!({"volumes": volumes.collect::<Vec<_>>()}));
        cluster.bind(&name);
    }
    let are_ready = |c: &Cluster| (0..PODS).rev().all(|pod| c.is_ready(&format!("many{pod}")));
    let ready = cluster.until_within(LIMIT, "all pods are Ready", &agent, are_ready).await?;
    cluster.quiet().await;
    tokio::time::sleep(Duration::from_secs(15)).await;
    let mut samples = Samples::default();
    samples.add("ready", (ready - began).as_secs_f64());
    let maps = cluster.node_requests(0).of("configmaps").filter(|logged| logged.end.is_none());
    samples.add("streams", count(maps.len())?);
    samples.add("connections", count(cluster.api.connections().len())?);
    let renewals = cluster.renewals(0);
    let gaps = renewals.windows(2).map(|pair| (pair[1] - pair[0]).as_secs_f64());
    samples.add("gap", gaps.fold(0.0, f64::max));
    let window = Duration::from_secs(ctx.options.amount(60, 20));
    samples.add("cpu", busy(&agent, window).await?);
    samples.add("anonymous", process::anonymous(agent.pid())?);
    samples.add("rss", process::resident(agent.pid())?);
    Ok(samples)
}

/// CPU usage in that window, percent of a core.
async fn busy(agent: &Agent, window: Duration) -> Result<f64> {
    let (began, before) = (Instant::now(), process::cpu_seconds(agent.pid())?);
    tokio::time::sleep(window).await;
    Ok((process::cpu_seconds(agent.pid())? - before) / began.elapsed().as_secs_f64() * 100.0)
}

fn count(things: usize) -> Result<f64> {
    Ok(f64::from(u32::try_from(things)?))
}
