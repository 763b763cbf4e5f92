//! Benchmarks of pod status in the API server: requests per pod and latency of status updates.

use std::time::{Duration, Instant};

use anyhow::{Context, Result};
use futures::FutureExt;
use serde_json::{Value, json};

use crate::{
    agent::{Agent, Target},
    cluster::{Cluster, LEASES, begun, kinds, once},
    figures::{Bar, Figure, Samples, Unit, median, p99},
    measurements::{BenchContext, Group, Measurement},
    scripted_runtime::ms,
};
use berth_testkit::api_server::RecordedRequest;

const LIFE: &[Figure] = &[
    median("all", "requests per pod life (create → running → deleted)", Unit::Count, Bar::Open),
    median("patch", "… PATCH pods/status", Unit::Count, Bar::Open),
    median("get", "… GET pods", Unit::Count, Bar::Open),
    median("delete", "… DELETE pods", Unit::Count, Bar::Open),
    median("events", "… events", Unit::Count, Bar::Open),
    median("tokens", "… POST serviceaccounts/token", Unit::Count, Bar::Open),
    median("maps", "… GET, LIST and WATCH configmaps", Unit::Count, Bar::Open),
    median("rest", "… other requests", Unit::Count, Bar::Open),
];
const REPORT: &[Figure] = &[
    p99("over", "container exit → status PATCH started, p99 (pod terminated)", Unit::Milliseconds, Bar::AtMost(30.0)),
    median("over", "container exit → status PATCH started, median (pod terminated)", Unit::Milliseconds, Bar::Open),
    p99(
        "back",
        "container exit → status PATCH started, p99 (container restarted)",
        Unit::Milliseconds,
        Bar::AtMost(30.0),
    ),
    median(
        "back",
        "container exit → status PATCH started, median (container restarted)",
        Unit::Milliseconds,
        Bar::Open,
    ),
];
const DELETE: &[Figure] = &[
    p99("delete", "last container exit → DELETE, p99", Unit::Milliseconds, Bar::AtMost(100.0)),
    median("delete", "last container exit → DELETE, median", Unit::Milliseconds, Bar::Open),
];
const BURST: &[Figure] = &[
    median("last", "110 pods assigned at once, last Running PATCH", Unit::Seconds, Bar::AtMost(4.0)),
    median("first", "110 pods assigned at once, first Running PATCH", Unit::Seconds, Bar::Open),
    median("requests", "requests until the last Running PATCH", Unit::Count, Bar::Open),
];

/// Measurements of this module.
pub fn measurements() -> Vec<Measurement> {
    let base =
        |name, figures, rounds, agent| Measurement { name, group: Group::Cluster, figures, rounds, agent, raw: None };
    vec![
        base("pod-life", LIFE, (1, 1), |g, t| life(g, t).boxed_local()),
        base("report", REPORT, (2, 1), |g, t| report(g, t).boxed_local()),
        base("delete", DELETE, (2, 1), |g, t| delete(g, t).boxed_local()),
        base("assigned", BURST, (3, 1), |g, t| burst(g, t).boxed_local()),
    ]
}

/// The figure a request counts for; `None` for requests that a node makes without pods.
fn figure_of(logged: &RecordedRequest) -> Option<&'static str> {
    let key = match (logged.verb, logged.resource.as_str(), logged.subresource.as_str()) {
        (_, "nodes" | LEASES, _) => return None,
        ("patch" | "update", "pods", "status") => "patch",
        ("get", "pods", _) => "get",
        ("delete", "pods", _) => "delete",
        (_, "events" | "events.events.k8s.io", _) => "events",
        (_, "serviceaccounts", "token") => "tokens",
        (_, "configmaps", _) => "maps",
        _ => "rest",
    };
    Some(key)
}

/// One pod after the other, so that no pod reuses cached objects of another.
async fn life(ctx: &BenchContext<'_>, target: &Target) -> Result<Samples> {
    let (cluster, agent) = Cluster::joined(target, 10_000).await?;
    let mut samples = Samples::default();
    for i in 0..ctx.options.amount(20, 5) {
        let before = cluster.api.last();
        let name = format!("life{i}");
        cluster.create(&name, json!({}));
        cluster.bind(&name);
        cluster.until(&format!("{name} is Ready"), &agent, |c| c.is_ready(&name)).await?;
        cluster.quiet().await;
        cluster.delete(&name);
        cluster.until(&format!("{name} is gone"), &agent, |c| c.pod(&name).is_none()).await?;
        cluster.quiet().await;
        let asked = cluster.node_requests(before);
        let keys: Vec<&str> = asked.iter().filter_map(|logged| figure_of(logged)).collect();
        for figure in LIFE {
            let count = keys.iter().filter(|key| **key == figure.key || figure.key == "all").count();
            samples.add(figure.key, f64::from(u32::try_from(count)?));
        }
        if i == 0 && ctx.options.keep {
            eprintln!("\nrequests of one pod:\n{asked}");
        }
    }
    Ok(samples)
}

/// Containers exit one after the other, in pods that are complete then and in pods that restart them.
async fn report(ctx: &BenchContext<'_>, target: &Target) -> Result<Samples> {
    let (cluster, agent) = Cluster::joined(target, 10_000).await?;
    let count = ctx.options.amount(100, 30);
    let mut samples = Samples::default();
    for (key, fields) in [("over", once()), ("back", json!({}))] {
        let names = cluster.run_pods(&agent, key, count, &fields).await?;
        cluster.quiet().await;
        for name in &names {
            samples.add(key, ms(exit(&cluster, &agent, name).await?));
        }
    }
    Ok(samples)
}

async fn exit(cluster: &Cluster, agent: &Agent, name: &str) -> Result<Duration> {
    let (id, before, at) = (cluster.container(name)?, cluster.api.last(), Instant::now());
    cluster.runtime.cri.kill(&id, 1, "Error");
    cluster
        .until(&format!("status of the exited container of {name} is published"), agent, |c| {
            c.first_status_update(before, name, at).is_some()
        })
        .await?;
    settle().await;
    Ok(cluster.first_status_update(before, name, at).context("just seen")? - at)
}

async fn delete(ctx: &BenchContext<'_>, target: &Target) -> Result<Samples> {
    let (cluster, agent) = Cluster::joined(target, 10_000).await?;
    let names = cluster.run_pods(&agent, "gone", ctx.options.amount(100, 30), &json!({})).await?;
    cluster.quiet().await;
    let mut samples = Samples::default();
    for name in &names {
        let (id, before) = (cluster.container(name)?, cluster.api.last());
        cluster.delete(name);
        cluster.until(&format!("{name} is gone"), &agent, |c| c.pod(name).is_none()).await?;
        let ended = cluster.exit_of(&id).context("exit of the container not recorded")?;
        samples.add("delete", ms(cluster.deleted(before, name).context("DELETE not recorded")? - ended));
        settle().await;
    }
    Ok(samples)
}

async fn burst(ctx: &BenchContext<'_>, target: &Target) -> Result<Samples> {
    let (cluster, agent) = Cluster::joined(target, 10).await?;
    for (op, millis) in [("run_podsandbox", 50), ("create_container", 10), ("start_container", 20)] {
        cluster.runtime.cri.latency(op, Duration::from_millis(millis));
    }
    let names: Vec<String> = (0..110).map(|i| format!("burst{i}")).collect();
    names.iter().for_each(|name| cluster.create(name, json!({})));
    cluster.quiet().await;
    let (before, began) = (cluster.api.last(), Instant::now());
    for name in &names {
        cluster.bind(name);
    }
    cluster.until("all pods are Ready", &agent, |c| names.iter().all(|name| c.is_ready(name))).await?;
    let asked = cluster.node_requests(before);
    if ctx.options.keep {
        eprintln!("\nrequests of 110 starting pods:\n{}", kinds(&asked));
    }
    let reported_at = names.iter().map(|name| {
        let is_it = |logged: &RecordedRequest| logged.name == *name && reports_running(&logged.body);
        begun(&asked, is_it).with_context(|| format!("no status PATCH with phase Running for {name}"))
    });
    let reported_at: Vec<Instant> = reported_at.collect::<Result<_>>()?;
    let mut samples = Samples::default();
    samples.add("last", (*reported_at.iter().max().context("pods")? - began).as_secs_f64());
    samples.add("first", (*reported_at.iter().min().context("pods")? - began).as_secs_f64());
    samples.add("requests", f64::from(u32::try_from(asked.len())?));
    Ok(samples)
}

fn reports_running(body: &Value) -> bool {
    body["status"]["phase"] == "Running"
}

/// Waits until the follow-up work of a step (restarts, events) is done, before the next one begins.
async fn settle() {
    tokio::time::sleep(Duration::from_millis(20)).await;
}
