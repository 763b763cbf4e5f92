//! Benchmarks of probe cost and jitter, latency of node pressure conditions, and of `berth why`.

use std::{
    collections::HashMap,
    fs::{self, File},
    io::{Read, Write},
    path::Path,
    process::{Command, Stdio},
    sync::{Arc, Mutex, PoisonError},
    time::{Duration, Instant},
};

use anyhow::{Context, Result, ensure};
use futures::FutureExt;
use nix::mount::{MntFlags, MsFlags};
use rustix::fs::{FallocateFlags, fallocate};
use serde_json::{Value, json};
use tokio::{
    io::{AsyncReadExt, AsyncWriteExt},
    net::{TcpListener, TcpStream},
    task::JoinHandle,
};

use crate::{
    agent::{Agent, Target},
    cluster::{Cluster, has_condition},
    figures::{Bar, Figure, Samples, Unit, median, p99},
    manifest::{self, NODE},
    measurements::{BenchContext, Group, Measurement},
    private_ca::{self, Secure},
    process,
    scripted_runtime::{PATIENCE, Runtime, first, ms},
};

const PROBES: &[Figure] = &[
    median(
        "cpu",
        "CPU of 330 probes every 10 s, over the same pods without, percent of a core",
        Unit::Percent,
        Bar::AtMost(1.0),
    ),
    median("memory", "anonymous memory of 330 probes, over the same pods without", Unit::Megabytes, Bar::AtMost(10.0)),
    p99("jitter", "deviation of a probe's start from its period, p99", Unit::Milliseconds, Bar::AtMost(10.0)),
    median("bare_cpu", "CPU, the same 110 pods without probes, percent of a core", Unit::Percent, Bar::Open),
    median("bare_memory", "anonymous memory, the same 110 pods without probes", Unit::Megabytes, Bar::Open),
];
const PRESSURE: &[Figure] = &[
    p99("memory", "memory pressure → node condition, p99", Unit::Milliseconds, Bar::AtMost(500.0)),
    median("memory_median", "… median", Unit::Milliseconds, Bar::Open),
    p99("evicted", "memory pressure → eviction starts, p99", Unit::Milliseconds, Bar::AtMost(500.0)),
    p99("disk", "disk pressure → node condition, p99", Unit::Milliseconds, Bar::AtMost(500.0)),
    median("disk_median", "… median", Unit::Milliseconds, Bar::Open),
];
const WHY: &[Figure] = &[
    p99("answer", "/debug/why, connection and TLS included, p99", Unit::Milliseconds, Bar::AtMost(20.0)),
    median("command", "berth why, total run time, median", Unit::Milliseconds, Bar::Open),
];
const PODS: usize = 110;
const PERIOD: Duration = Duration::from_secs(10);
/// Longer than an agent keeps idle resources.
const SETTLED: Duration = Duration::from_secs(20);
/// More bytes than the machine's free memory varies during the measurement.
const MARGIN: u64 = 96 << 20;

/// Measurements of this module.
pub fn measurements() -> Vec<Measurement> {
    let base =
        |name, figures, agent| Measurement { name, group: Group::Health, figures, rounds: (1, 1), agent, raw: None };
    vec![
        Measurement {
            raw: Some(|g| connections(g).boxed_local()),
            ..base("probes", PROBES, |g, t| probes(g, t).boxed_local())
        },
        base("pressure", PRESSURE, |g, t| pressure(g, t).boxed_local()),
        base("why", WHY, |g, t| why(g, t).boxed_local()),
    ]
}

/// Probe target that records the arrival time of each probe.
struct ProbeTarget {
    http: u16,
    tcp: u16,
    came: Arc<Mutex<HashMap<String, Vec<Instant>>>>,
    serving: [JoinHandle<()>; 2],
}

impl ProbeTarget {
    async fn start() -> Result<Self> {
        let (web, plain) = (TcpListener::bind("127.0.0.1:0").await?, TcpListener::bind("127.0.0.1:0").await?);
        let (http, tcp) = (web.local_addr()?.port(), plain.local_addr()?.port());
        let came = Arc::<Mutex<HashMap<String, Vec<Instant>>>>::default();
        let arrivals = came.clone();
        let serving = [
            tokio::spawn(async move {
                while let Ok((stream, _)) = web.accept().await {
                    tokio::spawn(answer(stream, Instant::now(), arrivals.clone()));
                }
            }),
            tokio::spawn(async move { while plain.accept().await.is_ok() {} }),
        ];
        Ok(Self { http, tcp, came, serving })
    }

    /// Discards the arrivals so far.
    fn begin(&self) {
        self.came.lock().unwrap_or_else(PoisonError::into_inner).clear();
    }

    /// Deviation of each probe from one period after the previous one, in milliseconds.
    fn jitter(&self) -> Vec<f64> {
        let came = self.came.lock().unwrap_or_else(PoisonError::into_inner);
        let off = |pair: &[Instant]| match pair {
            [before, after] => Some(ms((*after - *before).abs_diff(PERIOD))),
            _ => None,
        };
        came.values().flat_map(|times| times.windows(2).filter_map(off)).collect()
    }
}

impl Drop for ProbeTarget {
    fn drop(&mut self) {
        self.serving.iter().for_each(JoinHandle::abort);
    }
}

async fn answer(mut stream: TcpStream, at: Instant, came: Arc<Mutex<HashMap<String, Vec<Instant>>>>) {
    let mut head = Vec::with_capacity(512);
    while !head.ends_with(b"\r\n\r\n") {
        if !matches!(stream.read_buf(&mut head).await, Ok(1..)) {
            return;
        }
    }
    let path = String::from_utf8_lossy(&head).split(' ').nth(1).unwrap_or_default().to_owned();
    came.lock().unwrap_or_else(PoisonError::into_inner).entry(path).or_default().push(at);
    let _ = stream.write_all(b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\nConnection: close\r\n\r\nok").await; // it may be gone
}

/// A pod of two containers with HTTP, TCP, and exec probes.
fn probed(name: &str, ports: Option<(u16, u16)>) -> Value {
    let mut pod = manifest::scripted(name, 2);
    let Some((http, tcp)) = ports else { return pod };
    let often = |mut probe: Value| {
        probe["periodSeconds"] = json!(PERIOD.as_secs());
        probe["timeoutSeconds"] = json!(5);
        probe
    };
    let containers = &mut pod["spec"]["containers"];
    containers[0]["readinessProbe"] =
        often(json!({"httpGet": {"host": "127.0.0.1", "port": http, "path": format!("/{name}")}}));
    containers[0]["livenessProbe"] = often(json!({"tcpSocket": {"host": "127.0.0.1", "port": tcp}}));
    containers[1]["readinessProbe"] = often(json!({"exec": {"command": ["true"]}}));
    pod
}

/// Cost of an agent with [`PODS`] such pods.
struct Cost {
    /// CPU usage, percent of a core.
    cpu: f64,
    /// Anonymous memory in megabytes: median of one sample per second.
    memory: f64,
}

impl Cost {
    fn mean(all: &[Self]) -> Self {
        #[allow(clippy::cast_precision_loss, reason = "a few")]
        let mean = |of: fn(&Self) -> f64| all.iter().map(of).sum::<f64>() / all.len() as f64;
        Self { cpu: mean(|cost| cost.cpu), memory: mean(|cost| cost.memory) }
    }
}

/// Cost of a dedicated agent, once it has settled.
async fn cost(ctx: &BenchContext<'_>, target: &Target, probes: Option<&ProbeTarget>) -> Result<Cost> {
    let runtime = Runtime::start(10_000).await?;
    let agent = runtime.agent(target).await?;
    for i in 0..PODS {
        let name = format!("p{i}");
        agent.put(&name, &probed(&name, probes.map(|probes| (probes.http, probes.tcp))))?;
    }
    agent.until_running(PODS, PATIENCE).await?;
    tokio::time::sleep(ctx.options.amount(SETTLED, Duration::from_secs(11))).await;
    if let Some(probes) = probes {
        probes.begin();
    }
    let (began, before) = (Instant::now(), process::cpu_seconds(agent.pid())?);
    let mut memory = Vec::new();
    for _ in 0..ctx.options.amount(90, 25) {
        tokio::time::sleep(Duration::from_secs(1)).await;
        memory.push(process::anonymous(agent.pid())?);
    }
    let cpu = (process::cpu_seconds(agent.pid())? - before) / began.elapsed().as_secs_f64() * 100.0;
    memory.sort_by(f64::total_cmp);
    Ok(Cost { cpu, memory: memory[memory.len() / 2] })
}

/// In the order without, with, with, without probes: a drift of the machine's speed affects both sides.
async fn probes(ctx: &BenchContext<'_>, target: &Target) -> Result<Samples> {
    let (probed, mut samples) = (ProbeTarget::start().await?, Samples::default());
    let (mut bare, mut with) = (Vec::new(), Vec::new());
    for turn in [[false, true], [true, false]].iter().take(ctx.options.amount(2, 1)).flatten() {
        if !turn {
            bare.push(cost(ctx, target, None).await?);
            continue;
        }
        with.push(cost(ctx, target, Some(&probed)).await?);
        let jitter = probed.jitter();
        ensure!(jitter.len() >= PODS, "only {} probe starts were recorded", jitter.len());
        jitter.into_iter().for_each(|off| samples.add("jitter", off));
    }
    let (bare, with) = (Cost::mean(&bare), Cost::mean(&with));
    samples.add("bare_cpu", bare.cpu);
    samples.add("bare_memory", bare.memory);
    samples.add("cpu", with.cpu - bare.cpu);
    samples.add("memory", with.memory - bare.memory);
    Ok(samples)
}

/// Kernel cost of the probes' connections on this machine: the same number of connections and requests per period, made
/// by consecutive system calls. Exec probes are not included.
async fn connections(ctx: &BenchContext<'_>) -> Result<Samples> {
    let probed = ProbeTarget::start().await?;
    let (http, tcp, seconds) = (probed.http, probed.tcp, ctx.options.amount(60, 10));
    let mut samples = Samples::default();
    samples.add("cpu", tokio::task::spawn_blocking(move || connect_for(seconds, http, tcp)).await??);
    Ok(samples)
}

/// CPU usage of this thread, percent of a core.
fn connect_for(seconds: usize, http: u16, tcp: u16) -> Result<f64> {
    let spent = || -> Result<f64> {
        let text = fs::read_to_string("/proc/thread-self/schedstat")
            .context("the kernel does not provide /proc/thread-self/schedstat")?;
        Ok(text.split(' ').next().unwrap_or_default().parse::<f64>()? / 1e9)
    };
    let (began, before) = (Instant::now(), spent()?);
    for _ in 0..seconds {
        std::thread::sleep(PERIOD / 10);
        for i in 0..PODS / 10 {
            let mut stream = std::net::TcpStream::connect(("127.0.0.1", http))?;
            stream.write_all(format!("GET /p{i} HTTP/1.1\r\nHost: p\r\nConnection: close\r\n\r\n").as_bytes())?;
            stream.read_to_end(&mut Vec::new())?;
            drop(std::net::TcpStream::connect(("127.0.0.1", tcp))?);
        }
    }
    Ok((spent()? - before) / began.elapsed().as_secs_f64() * 100.0)
}

/// A tmpfs; unmounted when dropped.
struct Tmpfs(tempfile::TempDir);

impl Tmpfs {
    fn mount(megabytes: u64) -> Result<Self> {
        let dir = tempfile::tempdir()?;
        let size = format!("size={megabytes}m");
        let mounted =
            nix::mount::mount(Some("tmpfs"), dir.path(), Some("tmpfs"), MsFlags::empty(), Some(size.as_str()));
        mounted.context("cannot mount a tmpfs: needs root")?;
        Ok(Self(dir))
    }

    fn path(&self) -> &Path {
        self.0.path()
    }

    /// Allocates that many bytes; removing the file releases them.
    fn take(&self, bytes: u64) -> Result<()> {
        Ok(fallocate(&File::create(self.ballast())?, FallocateFlags::empty(), 0, bytes)?)
    }

    fn give_back(&self) -> Result<()> {
        Ok(fs::remove_file(self.ballast())?)
    }

    fn ballast(&self) -> std::path::PathBuf {
        self.path().join("ballast")
    }
}

impl Drop for Tmpfs {
    fn drop(&mut self) {
        let _ = nix::mount::umount2(self.path(), MntFlags::MNT_DETACH); // nothing depends on it
    }
}

/// Idle time of the node status before a shortage begins: the agent writes the status twice a second at most, and
/// updates pending from a previous round would distort the measurement.
const QUIET: Duration = Duration::from_secs(1);

/// Waits until the node has a condition with that value; returns the time.
async fn until_condition(cluster: &Cluster, agent: &Agent, condition: &str, is: bool) -> Result<Instant> {
    let is_met = |cluster: &Cluster| {
        let node = cluster.api.get("nodes", "", NODE);
        node.is_some_and(|node| has_condition(&node, condition) == is)
    };
    cluster.until(&format!("{condition} is {is}"), agent, is_met).await
}

fn thresholds(memory: u64, disk: &str) -> Value {
    json!({
        "evictionHard": {"memory.available": memory.to_string(), "nodefs.available": disk},
        "evictionPressureTransitionPeriod": "1s",
    })
}

async fn pressure(ctx: &BenchContext<'_>, target: &Target) -> Result<Samples> {
    let rounds = ctx.options.amount(50, 5);
    let mut samples = Samples::default();
    disk_short(target, rounds, &mut samples).await?;
    memory_short(target, rounds, &mut samples).await?;
    Ok(samples)
}

/// The clock starts before the space is allocated: the time of the allocation counts.
async fn disk_short(target: &Target, rounds: usize, samples: &mut Samples) -> Result<()> {
    let disk = Tmpfs::mount(256)?;
    let target = Target { home: disk.path().to_owned(), ..target.clone() };
    let (cluster, agent) = Cluster::joined_with(&target, 10_000, &thresholds(1 << 20, "64Mi"), None).await?;
    until_condition(&cluster, &agent, "DiskPressure", false).await?;
    for _ in 0..rounds {
        tokio::time::sleep(QUIET).await;
        let began = Instant::now();
        disk.take(208 << 20)?;
        let after = ms(until_condition(&cluster, &agent, "DiskPressure", true).await? - began);
        samples.add("disk", after);
        samples.add("disk_median", after);
        disk.give_back()?;
        until_condition(&cluster, &agent, "DiskPressure", false).await?;
    }
    Ok(())
}

/// Bytes of a metric value.
#[allow(clippy::cast_possible_truncation, clippy::cast_sign_loss, reason = "bytes of a machine")]
fn whole(bytes: f64) -> u64 {
    bytes as u64
}

/// Available memory of the machine in bytes, by the agent's eviction metric.
async fn memory_left(agent: &Agent) -> Result<u64> {
    let page = agent.page("/metrics").await.context("GET /metrics failed")?;
    let line = page
        .lines()
        .find(|line| line.starts_with("berth_eviction_available{") && line.contains("\"memory.available\""));
    let value = line.and_then(|line| line.rsplit(' ').next()).context("metric for memory.available not found")?;
    Ok(whole(value.parse()?))
}

async fn memory_short(target: &Target, rounds: usize, samples: &mut Samples) -> Result<()> {
    let free = {
        let (_cluster, agent) = Cluster::joined_with(target, 10_000, &thresholds(1 << 20, "1%"), None).await?;
        memory_left(&agent).await?
    };
    let taken = Tmpfs::mount(4096)?;
    let below = free.saturating_sub(MARGIN);
    let (cluster, agent) = Cluster::joined_with(target, 10_000, &thresholds(below, "1%"), None).await?;
    until_condition(&cluster, &agent, "MemoryPressure", false).await?;
    for round in 0..rounds {
        let name = format!("m{round}");
        cluster.create(&name, json!({}));
        cluster.bind(&name);
        cluster.until(&format!("{name} is Ready"), &agent, |cluster| cluster.is_ready(&name)).await?;
        cluster.runtime.cri.clear_calls();
        tokio::time::sleep(QUIET).await;
        // Other processes may have allocated or released memory since the threshold was set.
        let spare = memory_left(&agent).await?.saturating_sub(below);
        let began = Instant::now();
        taken.take(spare + MARGIN)?;
        let after = ms(until_condition(&cluster, &agent, "MemoryPressure", true).await? - began);
        samples.add("memory", after);
        samples.add("memory_median", after);
        let stop = |cluster: &Cluster| {
            let calls = cluster.runtime.cri.calls();
            first(&calls, "stop_container", &format!("{name}/c0")).map(|call| call.at.into_std())
        };
        cluster.until(&format!("{name} is being terminated"), &agent, |cluster| stop(cluster).is_some()).await?;
        samples.add("evicted", ms(stop(&cluster).context("just seen")? - began));
        taken.give_back()?;
        until_condition(&cluster, &agent, "MemoryPressure", false).await?;
        cluster.delete(&name);
        cluster.until(&format!("{name} is gone"), &agent, |cluster| cluster.pod(&name).is_none()).await?;
    }
    Ok(())
}

async fn why(ctx: &BenchContext<'_>, target: &Target) -> Result<Samples> {
    let (runtime, secure) = (Runtime::start(10_000).await?, Secure::new()?);
    let agent = runtime.secured_agent(target, &secure).await?;
    for i in 0..PODS {
        let name = format!("p{i}");
        agent.put(&name, &manifest::scripted(&name, 2))?;
    }
    agent.until_running(PODS, PATIENCE).await?;
    let client = secure.client(true)?;
    let mut samples = Samples::default();
    for i in 0..ctx.options.amount(1_000, 100) {
        let name = manifest::full_name(&format!("p{}", i % PODS));
        let began = Instant::now();
        let mut stream = private_ca::connect(agent.secure(), &client).await?;
        let head = format!("GET /debug/why/default/{name} HTTP/1.1\r\nConnection: close");
        private_ca::ask(&mut stream, &head, 200).await?;
        samples.add("answer", ms(began.elapsed()));
    }
    let admin = secure.admin();
    for i in 0..ctx.options.amount(50, 5) {
        let began = Instant::now();
        let mut command = Command::new(&target.binary);
        command.arg("why").arg(manifest::full_name(&format!("p{i}")));
        command.args(["--server", &format!("127.0.0.1:{}", agent.secure())]).arg("--cacert").arg(secure.ca());
        command.arg("--cert").arg(&admin.certificate).arg("--key").arg(&admin.key);
        let ended = command.stdin(Stdio::null()).stdout(Stdio::null()).stderr(Stdio::piped()).output()?;
        if !ended.status.success() {
            // Other binaries do not have this command; Berth prints the cause.
            eprintln!("why: {}", String::from_utf8_lossy(&ended.stderr).trim());
            break;
        }
        samples.add("command", ms(began.elapsed()));
    }
    Ok(samples)
}
