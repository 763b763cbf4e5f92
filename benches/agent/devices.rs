//! Benchmarks of device plugins: admission, pod-resources, a plugin that hangs, restart, and memory.
//!
//! The plugins are those of the test kit, on real sockets in a directory of their own, which the Berth settings file
//! names. kubelet has a fixed directory: another binary cannot be measured.

use std::{
    cell::Cell,
    fs,
    path::PathBuf,
    time::{Duration, Instant},
};

use anyhow::{Context, Result, ensure};
use futures::FutureExt;
use hyper_util::rt::TokioIo;
use serde_json::{Value, json};
use tokio::net::UnixStream;
use tonic::transport::{Channel, Endpoint};

use crate::{
    agent::{Agent, Target},
    cluster::{Cluster, is_write},
    figures::{Bar, Figure, Reduce, Samples, Unit, median, p99, reduce},
    manifest::{self, NODE},
    measurements::{BenchContext, Group, Measurement},
    process,
    scripted_runtime::{PATIENCE, Runtime, ms},
    scripted_starts::starts_beside,
};
use berth_proto::{
    device_plugin::DevicePluginOptions,
    pod_resources::{ListPodResourcesRequest, pod_resources_lister_client::PodResourcesListerClient},
};
use berth_testkit::{
    device_plugin::{PluginMethod, SamplePlugin, numbered},
    plugin_server::PluginFault,
};

const STARTS: &[Figure] = &[
    p99(
        "admission",
        "pod with 1 of 1,000 devices: manifest → RunPodSandbox, over a pod without, p99",
        Unit::Milliseconds,
        Bar::AtMost(5.0),
    ),
    median("admission", "… median", Unit::Milliseconds, Bar::Open),
    median("all", "… pod with 1,000 devices, median", Unit::Milliseconds, Bar::Open),
];
const LIST: &[Figure] = &[
    p99("list", "pod-resources List, 110 pods with 2 devices each, p99", Unit::Milliseconds, Bar::AtMost(5.0)),
    median("list", "… median", Unit::Milliseconds, Bar::Open),
];
const HUNG: &[Figure] = &[
    median("p99", "overhead p99 beside a pod whose device plugin hangs / without", Unit::Times, Bar::AtMost(1.05)),
    median("p50", "… median", Unit::Times, Bar::Open),
];
const RESTART: &[Figure] = &[
    median("allocations", "restart with 110 device pods: Allocate calls", Unit::Count, Bar::AtMost(0.0)),
    median("patches", "restart with 110 device pods: status PATCHes of pods", Unit::Count, Bar::AtMost(0.0)),
];
const MEMORY: &[Figure] =
    &[median("memory", "anonymous memory with 1,000 devices, over one device", Unit::Megabytes, Bar::AtMost(3.0))];

const GPU: &str = "example.com/gpu";
/// Resource of a second plugin.
const NIC: &str = "example.com/nic";
/// Devices of a plugin with many.
const DEVICES: usize = 1_000;
const PODS: usize = 110;
const DEVICES_PER_POD: usize = 2;

/// Measurements of this module.
pub fn measurements() -> Vec<Measurement> {
    let base =
        |name, figures, rounds, agent| Measurement { name, group: Group::Devices, figures, rounds, agent, raw: None };
    vec![
        base("device-starts", STARTS, (2, 1), |g, t| starts(g, t).boxed_local()),
        base("device-list", LIST, (2, 1), |g, t| list(g, t).boxed_local()),
        base("device-hung", HUNG, (1, 1), |g, t| hung(g, t).boxed_local()),
        base("device-restart", RESTART, (2, 1), |_, t| restart(t).boxed_local()),
        base("device-memory", MEMORY, (3, 1), |g, t| memory(g, t).boxed_local()),
    ]
}

/// Directory of device plugins, and the Berth settings file that names it.
struct PluginDirectory(tempfile::TempDir);

impl PluginDirectory {
    fn new() -> Result<Self> {
        let directory = Self(tempfile::tempdir()?);
        fs::create_dir(directory.sockets())?;
        let settings = json!({"devices": {"pluginDirectory": directory.sockets()}});
        fs::write(directory.settings(), settings.to_string())?;
        Ok(directory)
    }

    fn sockets(&self) -> PathBuf {
        self.0.path().join("device-plugins")
    }

    fn settings(&self) -> PathBuf {
        self.0.path().join("berth.json")
    }

    /// Starts a plugin with that many devices.
    fn plugin(&self, resource: &str, devices: usize) -> SamplePlugin {
        let socket = format!("{}.sock", resource.replace('/', "-"));
        let plugin = SamplePlugin::start(&self.sockets(), &socket, resource, DevicePluginOptions::default());
        plugin.set_devices(numbered(devices));
        plugin
    }

    /// Registers a plugin as soon as the agent accepts connections; it listens again first where the start of the agent
    /// has removed its socket. Returns once the agent follows its devices.
    async fn register(&self, plugin: &mut SamplePlugin) -> Result<()> {
        let socket = self.sockets().join("kubelet.sock");
        let deadline = Instant::now() + PATIENCE;
        while UnixStream::connect(&socket).await.is_err() {
            ensure!(Instant::now() < deadline, "timed out after {PATIENCE:?} waiting for {}", socket.display());
            tokio::time::sleep(Duration::from_millis(2)).await;
        }
        if !plugin.socket.exists() {
            plugin.restart();
        }
        let streams = count(plugin, PluginMethod::ListAndWatch);
        plugin.register(&socket).await.context("the agent refuses the device plugin")?;
        plugin.wait_for_calls(PluginMethod::ListAndWatch, streams + 1).await;
        Ok(())
    }

    /// Waits until the checkpoint lists a device: the agent knows all devices of its plugin.
    async fn until_known(&self, device: &str) -> Result<()> {
        let (path, deadline) = (self.sockets().join("kubelet_internal_checkpoint"), Instant::now() + PATIENCE);
        let text = format!("\"{device}\"");
        while !fs::read_to_string(&path).is_ok_and(|content| content.contains(&text)) {
            ensure!(Instant::now() < deadline, "timed out after {PATIENCE:?} waiting for the device {device}");
            tokio::time::sleep(Duration::from_millis(2)).await;
        }
        Ok(())
    }
}

/// Number of calls of a method of a plugin.
fn count(plugin: &SamplePlugin, method: PluginMethod) -> usize {
    plugin.calls().iter().filter(|call| call.method() == method).count()
}

fn as_f64(count: usize) -> Result<f64> {
    Ok(f64::from(u32::try_from(count)?))
}

/// A pod whose container `c0` requests that many devices.
fn with_devices(name: &str, resource: &str, number: usize) -> Value {
    let mut pod = manifest::scripted(name, 1);
    pod["spec"]["containers"][0]["resources"] = json!({"limits": {resource: number.to_string()}});
    pod
}

/// Pods with and without a device alternate under one agent, so that a drift affects both.
async fn starts(ctx: &BenchContext<'_>, target: &Target) -> Result<Samples> {
    let (runtime, directory) = (Runtime::start(10_000).await?, PluginDirectory::new()?);
    let agent = runtime.agent_with_settings(target, &directory.settings()).await?;
    let (mut gpu, mut nic) = (directory.plugin(GPU, DEVICES), directory.plugin(NIC, DEVICES));
    directory.register(&mut gpu).await?;
    directory.until_known(&format!("dev{}", DEVICES - 1)).await?;
    directory.register(&mut nic).await?;
    let (mut with, mut all, mut without) = (Vec::new(), Vec::new(), Vec::new());
    for i in 0..ctx.options.amount(100, 30) {
        let name = format!("plain{i}");
        without.push(start(&runtime, &agent, &name, &manifest::scripted(&name, 1)).await?);
        let name = format!("device{i}");
        with.push(start(&runtime, &agent, &name, &with_devices(&name, GPU, 1)).await?);
    }
    for i in 0..5 {
        let name = format!("all{i}");
        all.push(start(&runtime, &agent, &name, &with_devices(&name, NIC, DEVICES)).await?);
        agent.remove(&name)?;
        let full = manifest::full_name(&name);
        runtime.until("the container has ended", &agent, |cri| cri.running(&full, "c0").is_empty()).await?;
        // The devices are free when the worker of the pod has ended.
        tokio::time::sleep(Duration::from_secs(1)).await;
    }
    let base = reduce(&without, Reduce::Median).context("samples")?;
    let mut samples = Samples::default();
    with.iter().for_each(|took| samples.add("admission", took - base));
    all.iter().for_each(|took| samples.add("all", took - base));
    Ok(samples)
}

/// Milliseconds from the manifest of a pod to its RunPodSandbox call.
async fn start(runtime: &Runtime, agent: &Agent, name: &str, manifest: &Value) -> Result<f64> {
    let start = runtime.start_pod(agent, name, manifest).await?;
    settle().await;
    Ok(ms(start.sandbox))
}

async fn list(ctx: &BenchContext<'_>, target: &Target) -> Result<Samples> {
    let (runtime, directory) = (Runtime::start(10_000).await?, PluginDirectory::new()?);
    let agent = runtime.agent_with_settings(target, &directory.settings()).await?;
    let mut plugin = directory.plugin(GPU, PODS * DEVICES_PER_POD);
    directory.register(&mut plugin).await?;
    directory.until_known("dev0").await?;
    for i in 0..PODS {
        let name = format!("p{i}");
        agent.put(&name, &with_devices(&name, GPU, DEVICES_PER_POD))?;
    }
    agent.until_running(PODS, PATIENCE).await?;
    let mut lister = PodResourcesListerClient::new(connect(agent.root().join("pod-resources/kubelet.sock")).await?);
    let mut samples = Samples::default();
    for _ in 0..ctx.options.amount(300, 100) {
        let began = Instant::now();
        let listed = lister.list(ListPodResourcesRequest {}).await?.into_inner().pod_resources;
        samples.add("list", ms(began.elapsed()));
        let devices = listed.iter().flat_map(|pod| &pod.containers).map(|container| container.devices.len());
        ensure!(devices.sum::<usize>() == PODS * DEVICES_PER_POD, "the list has other devices");
        // Below the rate limit of 100 per second.
        settle().await;
    }
    Ok(samples)
}

async fn connect(socket: PathBuf) -> Result<Channel> {
    let connector = tower::service_fn(move |_: http::Uri| {
        let socket = socket.clone();
        async move { UnixStream::connect(socket).await.map(TokioIo::new) }
    });
    Ok(Endpoint::from_static("http://localhost").connect_with_connector(connector).await?)
}

async fn hung(ctx: &BenchContext<'_>, target: &Target) -> Result<Samples> {
    let (runtime, directory) = (Runtime::start(10_000).await?, PluginDirectory::new()?);
    let agent = runtime.agent_with_settings(target, &directory.settings()).await?;
    let mut plugin = directory.plugin(GPU, 1);
    directory.register(&mut plugin).await?;
    directory.until_known("dev0").await?;
    plugin.fail(PluginMethod::Allocate, PluginFault::Hang);
    let (plugin, calls) = (&plugin, Cell::new(0));
    let arrive = |neighbor: String| {
        calls.set(calls.get() + 1);
        let (calls, agent) = (calls.get(), &agent);
        async move {
            agent.put(&neighbor, &with_devices(&neighbor, GPU, 1))?;
            plugin.wait_for_calls(PluginMethod::Allocate, calls).await;
            anyhow::Ok(())
        }
    };
    starts_beside(ctx, &runtime, &agent, arrive).await
}

/// As a node of a cluster, because only its API server shows status changes.
async fn restart(target: &Target) -> Result<Samples> {
    let directory = PluginDirectory::new()?;
    let settings = directory.settings();
    let (cluster, mut agent) = Cluster::joined_with(target, 10_000, &json!({}), Some(&settings)).await?;
    let total = PODS * DEVICES_PER_POD;
    let mut plugin = directory.plugin(GPU, total);
    directory.register(&mut plugin).await?;
    let has_devices = |cluster: &Cluster| {
        let node = cluster.api.get("nodes", "", NODE);
        node.is_some_and(|node| node["status"]["allocatable"][GPU] == json!(total.to_string()))
    };
    cluster.until("the node has all devices", &agent, has_devices).await?;
    let pod = with_devices("pod", GPU, DEVICES_PER_POD);
    let spec = json!({"containers": pod["spec"]["containers"]});
    let names = cluster.run_pods(&agent, "device", PODS, &spec).await?;
    cluster.quiet().await;
    let (before, allocations) = (cluster.api.last(), count(&plugin, PluginMethod::Allocate));
    ensure!(allocations == PODS, "{allocations} Allocate calls for {PODS} pods");
    agent.kill()?;
    agent.start_again().await?;
    directory.register(&mut plugin).await?;
    cluster.until("the node has all devices again", &agent, has_devices).await?;
    // Status updates that are still pending arrive now.
    tokio::time::sleep(Duration::from_secs(5)).await;
    let written = cluster.node_requests(before).of("pods").sub("status");
    let written = written.filter(|logged| is_write(logged) && names.contains(&logged.name));
    let mut samples = Samples::default();
    samples.add("allocations", as_f64(count(&plugin, PluginMethod::Allocate) - allocations)?);
    samples.add("patches", as_f64(written.len())?);
    Ok(samples)
}

/// The plugin is registered before: what a connection costs is not part of the figure.
async fn memory(ctx: &BenchContext<'_>, target: &Target) -> Result<Samples> {
    let (runtime, directory) = (Runtime::start(10_000).await?, PluginDirectory::new()?);
    let agent = runtime.agent_with_settings(target, &directory.settings()).await?;
    let mut plugin = directory.plugin(GPU, 1);
    directory.register(&mut plugin).await?;
    let idle = Duration::from_secs(ctx.options.amount(10, 5));
    tokio::time::sleep(idle).await;
    let before = process::anonymous(agent.pid())?;
    plugin.set_devices(numbered(DEVICES));
    directory.until_known(&format!("dev{}", DEVICES - 1)).await?;
    tokio::time::sleep(idle).await;
    let mut samples = Samples::default();
    samples.add("memory", process::anonymous(agent.pid())? - before);
    Ok(samples)
}

/// Waits until the follow-up work of a step is done, before the next one begins.
async fn settle() {
    tokio::time::sleep(Duration::from_millis(20)).await;
}
