//! Which measurements there are, and their order: round by round, the binaries taking turns.

use std::{
    io::Write,
    path::{Path, PathBuf},
};

use anyhow::{Context, Result, ensure};
use futures::future::LocalBoxFuture;

use crate::{
    agent::{self, Target},
    bytes, churn, cluster_outage, cluster_pods, containerd_cost, containerd_pods, embedded_image, embedded_pods,
    figures::{Figure, Samples},
    followers, handshakes, health, health_ends,
    options::Options,
    pages,
    report::{self, Measured},
    scripted_cost, scripted_starts, streams, volumes,
};
use berth_testkit::containerd::{self, Containerd};

/// What a measurement works with.
pub struct Ground<'a> {
    /// What was asked for.
    pub options: &'a Options,
    /// The real runtime, for those that need it.
    pub containerd: Option<&'a Containerd>,
}

impl Ground<'_> {
    /// The real runtime.
    ///
    /// # Errors
    /// There is none: a measurement of the wrong group asks.
    pub fn containerd(&self) -> Result<&Containerd> {
        self.containerd.context("this measurement has no containerd")
    }
}

/// On which runtime.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Group {
    /// The scripted CRI.
    Scripted,
    /// The scripted CRI, and clients of the agent's server.
    Server,
    /// A private containerd.
    Containerd,
    /// Our own runtime, and a private containerd beside it.
    Runtime,
    /// The scripted CRI, and the test API server.
    Cluster,
    /// The same, and volumes.
    Volumes,
    /// Probes, pressure, logs, the end of a node.
    Health,
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
        }
    }
}

/// Drives a plain CRI client.
pub type RawRound = for<'a> fn(&'a Ground<'a>) -> LocalBoxFuture<'a, Result<Samples>>;

/// One measurement: an agent is started, driven, stopped; some figures come of it.
pub struct Measurement {
    /// For `--only`.
    pub name: &'static str,
    /// Ground.
    pub group: Group,
    /// What it yields.
    pub figures: &'static [Figure],
    /// Rounds, in full and quick.
    pub rounds: (usize, usize),
    /// One round of one binary.
    pub agent: for<'a> fn(&'a Ground<'a>, &'a Target) -> LocalBoxFuture<'a, Result<Samples>>,
    /// One round of the plain CRI client.
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
    all.extend(health_ends::measurements());
    all.extend(containerd_pods::measurements());
    all.extend(containerd_cost::measurements());
    all.extend(embedded_pods::measurements());
    all.extend(embedded_image::measurements());
    all
}

/// The names of all measurements.
pub fn list() -> String {
    let lines: Vec<String> = measurements().iter().map(|m| format!("{:<12} {}", m.group.name(), m.name)).collect();
    lines.join("\n")
}

/// Measures what was asked for and prints the table.
///
/// # Errors
/// The bench itself cannot run; a measurement that fails is told in the table.
pub async fn all(options: &Options) -> Result<()> {
    let home = tempfile::Builder::new().prefix("agent-bench-").tempdir()?;
    let target = |label, binary: &Path| -> Result<Target> {
        ensure!(binary.exists(), "{} is not there: `cargo build --release` builds it", binary.display());
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
                eprintln!("left out: {}: {why}", measurement.name);
                continue;
            }
            runtime = Some(tokio::task::spawn_blocking(Containerd::start).await?);
        }
        let ground = Ground { options, containerd: runtime.as_ref() };
        measured.push(measure(&ground, &measurement, &agent, other.as_ref()).await);
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

async fn measure(ground: &Ground<'_>, m: &Measurement, agent: &Target, other: Option<&Target>) -> Measured {
    let mut measured = Measured {
        figures: m.figures,
        agent: Ok(Samples::default()),
        other: other.map(|_| Ok(Samples::default())),
        raw: m.raw.map(|_| Ok(Samples::default())),
    };
    let (full, quick) = m.rounds;
    for round in 0..ground.options.amount(full, quick) {
        eprint!("\r{} {}: round {}          ", m.group.name(), m.name, round + 1);
        let _ = std::io::stderr().flush(); // progress only
        if let (Some(raw), Some(all)) = (m.raw, &mut measured.raw) {
            gather(all, raw(ground).await, m.name, "raw");
        }
        // Who is second finds a warmer machine: they take turns at that, too.
        let mut turns = vec![(agent, &mut measured.agent)];
        turns.extend(other.zip(measured.other.as_mut()));
        if round % 2 == 1 {
            turns.reverse();
        }
        for (target, all) in turns {
            gather(all, (m.agent)(ground, target).await, m.name, target.label);
            agent::sweep();
        }
    }
    measured
}

fn gather(all: &mut Result<Samples, String>, round: Result<Samples>, name: &str, who: &str) {
    match (all.as_mut(), round) {
        (Ok(all), Ok(samples)) => all.extend(samples),
        (Ok(_), Err(error)) => *all = Err(format!("{name} ({who}): {error:#}")),
        (Err(_), _) => {} // the first failure is told
    }
}
