//! Registry and order of measurements: round by round, with alternating binaries.

use std::{
    io::Write,
    path::{Path, PathBuf},
};

use anyhow::{Context, Result, ensure};
use futures::future::LocalBoxFuture;

use crate::{
    agent::{self, Target},
    bytes, churn, cluster_outage, cluster_pods, containerd_cost, containerd_pods, devices, embedded_image,
    embedded_pods,
    figures::{Figure, Samples},
    followers, handshakes, health,
    options::Options,
    pages,
    report::{self, MeasurementResults},
    rotation_and_shutdown, scripted_cost, scripted_starts, streams, volumes,
};
use berth_testkit::containerd::{self, Containerd};

/// Context of a measurement.
pub struct BenchContext<'a> {
    /// Options of the command line.
    pub options: &'a Options,
    /// Private containerd, for measurements that need it.
    pub containerd: Option<&'a Containerd>,
}

impl BenchContext<'_> {
    /// The private containerd.
    ///
    /// # Errors
    /// There is none: the measurement belongs to another group.
    pub fn containerd(&self) -> Result<&Containerd> {
        self.containerd.context("containerd was not started for this measurement")
    }
}

/// Environment of a measurement.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Group {
    /// Scripted CRI.
    Scripted,
    /// Scripted CRI, and clients of the agent's server.
    Server,
    /// Private containerd.
    Containerd,
    /// Embedded runtime, and a private containerd beside it.
    Runtime,
    /// Scripted CRI and the test API server.
    Cluster,
    /// As `Cluster`, with volumes.
    Volumes,
    /// Probes, pressure, log rotation, and node shutdown.
    Health,
    /// Scripted CRI and device plugins; for restarts also the test API server.
    Devices,
}

impl Group {
    fn name(self) -> &'static str {
        match self {
            Self::Scripted => "scripted",
            Self::Server => "server",
            Self::Containerd => "containerd",
            Self::Runtime => "runtime",
            Self::Cluster => "cluster",
            Self::Volumes => "volumes",
            Self::Health => "health",
            Self::Devices => "devices",
        }
    }
}

/// One round of the plain CRI client.
pub type RawRound = for<'a> fn(&'a BenchContext<'a>) -> LocalBoxFuture<'a, Result<Samples>>;

/// One measurement: starts, drives, and stops an agent, and returns samples of its figures.
pub struct Measurement {
    /// Name, for `--only`.
    pub name: &'static str,
    /// Environment.
    pub group: Group,
    /// Figures it yields.
    pub figures: &'static [Figure],
    /// Number of rounds: full, quick.
    pub rounds: (usize, usize),
    /// One round of one binary.
    pub agent: for<'a> fn(&'a BenchContext<'a>, &'a Target) -> LocalBoxFuture<'a, Result<Samples>>,
    /// One round of the plain CRI client, if there is a baseline.
    pub raw: Option<RawRound>,
}

fn measurements() -> Vec<Measurement> {
    let mut all = scripted_starts::measurements();
    all.extend(scripted_cost::measurements());
    all.extend(churn::measurements());
    all.extend(pages::measurements());
    all.extend(handshakes::measurements());
    all.extend(streams::measurements());
    all.extend(bytes::measurements());
    all.extend(followers::measurements());
    all.extend(cluster_pods::measurements());
    all.extend(cluster_outage::measurements());
    all.extend(volumes::measurements());
    all.extend(health::measurements());
    all.extend(rotation_and_shutdown::measurements());
    all.extend(devices::measurements());
    all.extend(containerd_pods::measurements());
    all.extend(containerd_cost::measurements());
    all.extend(embedded_pods::measurements());
    all.extend(embedded_image::measurements());
    all
}

/// Names of all measurements, one per line.
pub fn list() -> String {
    let lines: Vec<String> = measurements().iter().map(|m| format!("{:<12} {}", m.group.name(), m.name)).collect();
    lines.join("\n")
}

/// Runs the selected measurements and prints the table.
///
/// # Errors
/// The benchmark itself cannot run; a failed measurement appears in the table.
pub async fn all(options: &Options) -> Result<()> {
    let home = tempfile::Builder::new().prefix("agent-bench-").tempdir()?;
    let target = |label, binary: &Path| -> Result<Target> {
        ensure!(binary.exists(), "{} not found: build it with `cargo build --release`", binary.display());
        Ok(Target { label, binary: binary.canonicalize()?, home: home.path().to_owned() })
    };
    let agent = target("agent", &options.agent)?;
    let other = options.against.as_deref().map(|binary| target("other", binary)).transpose()?;
    let wanted =
        |m: &Measurement| options.only.is_empty() || options.only.iter().any(|o| o == m.name || o == m.group.name());
    let mut measured = Vec::new();
    let mut runtime: Option<Containerd> = None;
    for measurement in measurements().into_iter().filter(wanted) {
        if matches!(measurement.group, Group::Containerd | Group::Runtime) && runtime.is_none() {
            if let Some(why) = containerd::missing() {
                eprintln!("skipped: {}: {why}", measurement.name);
                continue;
            }
            runtime = Some(tokio::task::spawn_blocking(Containerd::start).await?);
        }
        let ctx = BenchContext { options, containerd: runtime.as_ref() };
        measured.push(measure(&ctx, &measurement, &agent, other.as_ref()).await);
    }
    drop(runtime);
    eprintln!();
    report::print(&measured);
    if options.keep {
        let kept: PathBuf = home.keep();
        println!("\nlogs: {}", kept.display());
    }
    Ok(())
}

async fn measure(
    ctx: &BenchContext<'_>,
    m: &Measurement,
    agent: &Target,
    other: Option<&Target>,
) -> MeasurementResults {
    let mut measured = MeasurementResults {
        figures: m.figures,
        agent: Ok(Samples::default()),
        other: other.map(|_| Ok(Samples::default())),
        raw: m.raw.map(|_| Ok(Samples::default())),
    };
    let (full, quick) = m.rounds;
    for round in 0..ctx.options.amount(full, quick) {
        eprint!("\r{} {}: round {}          ", m.group.name(), m.name, round + 1);
        let _ = std::io::stderr().flush(); // progress only
        if let (Some(raw), Some(all)) = (m.raw, &mut measured.raw) {
            gather(all, raw(ctx).await, m.name, "raw");
        }
        // The second binary runs on a warmer machine: the order alternates.
        let mut turns = vec![(agent, &mut measured.agent)];
        turns.extend(other.zip(measured.other.as_mut()));
        if round % 2 == 1 {
            turns.reverse();
        }
        for (target, all) in turns {
            gather(all, (m.agent)(ctx, target).await, m.name, target.label);
            agent::sweep();
        }
    }
    measured
}

fn gather(all: &mut Result<Samples, String>, round: Result<Samples>, name: &str, who: &str) {
    match (all.as_mut(), round) {
        (Ok(all), Ok(samples)) => all.extend(samples),
        (Ok(_), Err(error)) => *all = Err(format!("{name} ({who}): {error:#}")),
        (Err(_), _) => {} // the first failure is reported
    }
}
