//! Benchmarks of volumes: mount, update, idle cost, reconstruction after a restart, and orphans.

use std::{
    collections::BTreeMap,
    fs,
    path::{Path, PathBuf},
    time::{Duration, Instant},
};

use anyhow::{Context, Result, ensure};
use futures::FutureExt;
use serde_json::{Value, json};

use crate::{
    agent::{Agent, Target},
    cluster::Cluster,
    figures::{Bar, Figure, Samples, Unit, median, p99},
    measurements::{BenchContext, Group, Measurement},
    process,
    scripted_runtime::{Runtime, ms},
};

const MOUNT: &[Figure] = &[
    median(
        "mounted",
        "token, 2 ConfigMaps, Secret, emptyDir: first request → last volume mounted, agent time, median",
        Unit::Milliseconds,
        Bar::AtMost(5.0),
    ),
    p99("mounted", "… p99", Unit::Milliseconds, Bar::Open),
    median("token", "… time of the server to issue the token, median", Unit::Milliseconds, Bar::Open),
    median("fresh", "… objects fetched as well, median", Unit::Milliseconds, Bar::Open),
    median("sandbox", "pod bound → RunPodSandbox, with these volumes, median", Unit::Milliseconds, Bar::Open),
    median("again", "… objects known, median", Unit::Milliseconds, Bar::Open),
    median("bare", "… token only, median", Unit::Milliseconds, Bar::Open),
];
const CHANGE: &[Figure] = &[
    p99("change", "ConfigMap changed → its file changed, p99", Unit::Milliseconds, Bar::AtMost(50.0)),
    median("change", "… median", Unit::Milliseconds, Bar::Open),
];
const IDLE: &[Figure] = &[
    median("with", "CPU, 110 idle pods with 5 volumes each, percent of a core", Unit::Percent, Bar::Open),
    median("without", "CPU, 110 idle pods without volumes, percent of a core", Unit::Percent, Bar::Open),
    median("more", "… the difference", Unit::Percent, Bar::AtMost(0.1)),
    median("found", "agent restarted → 550 volumes reconstructed", Unit::Seconds, Bar::AtMost(1.0)),
];
const ORPHANS: &[Figure] = &[
    median(
        "lines",
        "log lines per minute, 1,000 pod directories that cannot be removed",
        Unit::Count,
        Bar::AtMost(10.0),
    ),
    median("cpu", "CPU, 1,000 such directories, percent of a core", Unit::Percent, Bar::AtMost(1.0)),
];

/// Measurements of this module.
pub fn measurements() -> Vec<Measurement> {
    let base =
        |name, figures, rounds, agent| Measurement { name, group: Group::Volumes, figures, rounds, agent, raw: None };
    vec![
        base("mount", MOUNT, (1, 1), |g, t| mount(g, t).boxed_local()),
        base("follow", CHANGE, (1, 1), |g, t| change(g, t).boxed_local()),
        base("keep", IDLE, (1, 1), |g, t| idle(g, t).boxed_local()),
        base("orphans", ORPHANS, (1, 1), |g, t| orphans(g, t).boxed_local()),
    ]
}

/// Spec fields of a pod with four volumes besides its token.
fn fields(name: &str) -> Value {
    let mounts: Vec<Value> = ["one", "two", "secret", "scratch"]
        .iter()
        .map(|volume| json!({"name": volume, "mountPath": format!("/{volume}")}))
        .collect();
    let image = "docker.io/library/busybox:1";
    json!({
        "volumes": [
            {"name": "one", "configMap": {"name": format!("{name}-1")}},
            {"name": "two", "configMap": {"name": format!("{name}-2")}},
            {"name": "secret", "secret": {"secretName": name}},
            {"name": "scratch", "emptyDir": {}}],
        "containers": [{"name": "c0", "image": image, "imagePullPolicy": "IfNotPresent", "volumeMounts": mounts}],
    })
}

fn put_objects(cluster: &Cluster, name: &str) {
    for n in [1, 2] {
        cluster.api.create(json!({"apiVersion": "v1", "kind": "ConfigMap",
            "metadata": {"name": format!("{name}-{n}"), "namespace": "default"},
            "data": {"key": "0", "other": "x".repeat(1_000)}}));
    }
    cluster.api.create(json!({"apiVersion": "v1", "kind": "Secret",
        "metadata": {"name": name, "namespace": "default"}, "data": {"password": "c2VjcmV0"}}));
}

/// Sum of seconds from request to mount over all volumes so far, and their number, by plugin.
type Overall = BTreeMap<String, (f64, f64)>;

async fn overall(agent: &Agent) -> Result<Overall> {
    let page = agent.page("/metrics").await.context("GET /metrics failed")?;
    let mut found = Overall::new();
    for line in page.lines().filter(|line| line.contains("operation_name=\"overall_volume_mount\"")) {
        let Some((series, value)) = line.rsplit_once(' ') else { continue };
        let plugin = series.split("plugin_name=\"").nth(1).and_then(|rest| rest.split('"').next()).unwrap_or_default();
        let value = value.parse::<f64>()?;
        if series.starts_with("volume_operation_total_seconds_sum{") {
            found.entry(plugin.to_owned()).or_default().0 = value;
        } else if series.starts_with("volume_operation_total_seconds_count{") {
            found.entry(plugin.to_owned()).or_default().1 = value;
        }
    }
    Ok(found)
}

fn count(all: &Overall) -> f64 {
    all.values().map(|(_, count)| count).sum()
}

/// Mean mount time per plugin since `before`; returns the longest, in milliseconds.
fn longest(before: &Overall, now: &Overall) -> f64 {
    let each = now.iter().filter_map(|(plugin, (sum, count))| {
        let (old, seen) = before.get(plugin).copied().unwrap_or_default();
        (*count > seen).then(|| (sum - old) / (count - seen) * 1e3)
    });
    each.fold(0.0, f64::max)
}

/// Like [`overall`], once that many more volumes are counted: the agent renders the page once a second at most.
async fn overall_with(agent: &Agent, before: &Overall, volumes: usize) -> Result<Overall> {
    let (began, before) = (Instant::now(), count(before));
    loop {
        let now = overall(agent).await?;
        if count(&now) >= before + volumes as f64 {
            return Ok(now);
        }
        ensure!(
            began.elapsed() < Duration::from_secs(10),
            "timed out waiting for {volumes} mounted volumes after {before}"
        );
        tokio::time::sleep(Duration::from_millis(50)).await;
    }
}

/// Milliseconds that the server itself took for the one token request since then.
fn issued(cluster: &Cluster, since: u64) -> Option<f64> {
    let asked = cluster.api.log().since(since).of("serviceaccounts").sub("token");
    let one = asked.iter().find(|request| request.code == Some(201))?;
    Some(ms(one.ended?.duration_since(one.begun)))
}

async fn mount(ctx: &BenchContext<'_>, target: &Target) -> Result<Samples> {
    let (cluster, agent) = Cluster::joined(target, 10_000).await?;
    // Measures the agent, not the server's delay in updating the node authorizer's graph.
    cluster.api.rules(|rules| rules.graph_lag = Duration::ZERO);
    let mut samples = Samples::default();
    let mut before = overall(&agent).await?;
    for i in 0..ctx.options.amount(50, 10) {
        // The third pod uses the objects cached for the second; its token is its own.
        let objects = format!("full{i}");
        put_objects(&cluster, &objects);
        for (name, of, key) in [
            (format!("bare{i}"), None, "bare"),
            (objects.clone(), Some("fresh"), "sandbox"),
            (format!("again{i}"), Some("mounted"), "again"),
        ] {
            cluster.create(&name, of.map_or_else(|| json!({}), |_| fields(&objects)));
            let since = cluster.api.last();
            let at = cluster.bind(&name);
            cluster.until(&format!("{name} is Ready"), &agent, |c| c.is_ready(&name)).await?;
            let calls = cluster.runtime.cri.calls();
            let asked = crate::scripted_runtime::first(&calls, "run_podsandbox", &name);
            samples.add(key, ms(asked.context("the pod has a sandbox")?.at.into_std() - at));
            let pod = cluster.pod(&name).context("just seen")?;
            let volumes = pod["spec"]["volumes"].as_array().map_or(0, Vec::len);
            let after = overall_with(&agent, &before, volumes).await?;
            match of {
                Some("mounted") => {
                    let issued = issued(&cluster, since).context("no token request recorded")?;
                    samples.add("token", issued);
                    samples.add("mounted", longest(&before, &after) - issued);
                }
                Some(of) => samples.add(of, longest(&before, &after)),
                None => {}
            }
            before = after;
            // Other agents are limited to 50 requests a second; the pause keeps that out of the measurement.
            tokio::time::sleep(Duration::from_millis(400)).await;
        }
    }
    Ok(samples)
}

/// Path of the only volume of that plugin and name in the agent's root directory.
fn volume(agent: &Agent, pod: &Value, plugin: &str, name: &str) -> PathBuf {
    let uid = pod["metadata"]["uid"].as_str().unwrap_or_default();
    agent.root().join("pods").join(uid).join("volumes").join(plugin).join(name)
}

async fn change(ctx: &BenchContext<'_>, target: &Target) -> Result<Samples> {
    let (cluster, agent) = Cluster::joined(target, 10_000).await?;
    put_objects(&cluster, "follow");
    cluster.create("follow", fields("follow"));
    cluster.bind("follow");
    cluster.until("the pod is Ready", &agent, |c| c.is_ready("follow")).await?;
    let pod = cluster.pod("follow").context("just seen")?;
    let file = volume(&agent, &pod, "kubernetes.io~configmap", "one").join("key");
    let mut samples = Samples::default();
    for n in 1..=ctx.options.amount(50, 10) {
        tokio::time::sleep(Duration::from_millis(200)).await;
        let value = n.to_string();
        let began = Instant::now();
        cluster.api.patch("configmaps", "default", "follow-1", json!({"data": {"key": value}}));
        while !has_content(&file, &value) {
            ensure!(began.elapsed() < Duration::from_secs(150), "the file did not change\n{}", agent.log_end());
            tokio::time::sleep(Duration::from_micros(500)).await;
        }
        samples.add("change", ms(began.elapsed()));
    }
    Ok(samples)
}

fn has_content(file: &Path, value: &str) -> bool {
    fs::read_to_string(file).is_ok_and(|text| text == value)
}

async fn cpu(agent: &Agent, window: Duration) -> Result<f64> {
    let (began, before) = (Instant::now(), process::cpu_seconds(agent.pid())?);
    tokio::time::sleep(window).await;
    Ok((process::cpu_seconds(agent.pid())? - before) / began.elapsed().as_secs_f64() * 100.0)
}

/// Number of volumes in the agent's actual state of world.
async fn known(agent: &Agent) -> f64 {
    let page = agent.page("/metrics").await.unwrap_or_default();
    let lines = page
        .lines()
        .filter(|line| line.starts_with("volume_manager_total_volumes{") && line.contains("actual_state_of_world"));
    lines.filter_map(|line| line.rsplit(' ').next()?.parse::<f64>().ok()).sum()
}

async fn idle(ctx: &BenchContext<'_>, target: &Target) -> Result<Samples> {
    let settle = Duration::from_secs(ctx.options.amount(20, 5));
    let window = Duration::from_secs(ctx.options.amount(120, 10));
    let count = ctx.options.amount(110, 30);
    let mut samples = Samples::default();
    // Without the service account token either.
    let (cluster, agent) = Cluster::joined(target, 10_000).await?;
    cluster.run_pods(&agent, "bare", count, &json!({"automountServiceAccountToken": false})).await?;
    tokio::time::sleep(settle).await;
    let without = cpu(&agent, window).await?;
    drop((agent, cluster));
    let (cluster, mut agent) = Cluster::joined(target, 10_000).await?;
    for i in 0..count {
        let name = format!("full{i}");
        put_objects(&cluster, &name);
        cluster.create(&name, fields(&name));
        cluster.bind(&name);
    }
    let ready = |c: &Cluster| (0..count).all(|i| c.is_ready(&format!("full{i}")));
    cluster.until("all pods are Ready", &agent, ready).await?;
    tokio::time::sleep(settle).await;
    let with = cpu(&agent, window).await?;
    samples.add("without", without);
    samples.add("with", with);
    samples.add("more", with - without);
    let volumes = f64::from(u32::try_from(count * 5)?);
    agent.kill()?;
    let began = agent.start_again().await?;
    while known(&agent).await < volumes {
        ensure!(began.elapsed() < Duration::from_secs(60), "not all volumes were reconstructed\n{}", agent.log_end());
        tokio::time::sleep(Duration::from_millis(5)).await;
    }
    samples.add("found", began.elapsed().as_secs_f64());
    Ok(samples)
}

async fn orphans(ctx: &BenchContext<'_>, target: &Target) -> Result<Samples> {
    let runtime = Runtime::start(10_000).await?;
    let agent = runtime.agent(target).await?;
    for i in 0..1_000 {
        let volume = agent.root().join(format!("pods/orphan-{i:04}/volumes/kubernetes.io~nfs/v"));
        fs::create_dir_all(&volume)?;
        fs::write(volume.join("data"), "somebody's")?;
    }
    let window = Duration::from_secs(ctx.options.amount(180, 60));
    let before = agent.log_lines();
    let spent = cpu(&agent, window).await?;
    let lines = f64::from(u32::try_from(agent.log_lines().saturating_sub(before))?);
    let kept = fs::read_dir(agent.root().join("pods"))?.count();
    ensure!(kept == 1_000, "{kept} of 1,000 directories are left");
    let mut samples = Samples::default();
    samples.add("lines", lines * 60.0 / window.as_secs_f64());
    samples.add("cpu", spent);
    Ok(samples)
}
