//! Command line of the agent benchmark.

use std::path::PathBuf;

use anyhow::{Context, Result, bail};

const HELP: &str = "\
Measure a kubelet-compatible binary.

  --agent BIN     Binary to measure (default: target/release/berth)
  --against BIN   Second binary, measured in the same run for comparison
  --only NAMES    Comma-separated list of groups (scripted, server, cluster, volumes, health,
                  devices, containerd, runtime) or measurements
  --quick         Use smaller counts, 10 s of idle time instead of 60 s, 1 min of outage instead of 10
  --list          List the measurements
  --keep          Keep the directory with the logs of the agents

Measurements on containerd require root and are skipped without it.";

/// Result of parsing the arguments.
pub enum Invocation {
    /// Run measurements and print the table.
    Measure(Options),
    /// Print a text: the help or the list of measurements.
    Help(String),
}

/// Which measurements to run, on which binaries, and how extensively.
#[derive(Debug, Clone)]
pub struct Options {
    /// Binary to benchmark.
    pub agent: PathBuf,
    /// Second binary to compare with.
    pub against: Option<PathBuf>,
    /// Selected groups or measurements; empty selects all.
    pub only: Vec<String>,
    /// Reduced amounts and rounds.
    pub quick: bool,
    /// Keep the logs.
    pub keep: bool,
}

impl Options {
    /// Parses the arguments (without the program's name).
    ///
    /// # Errors
    /// Unknown arguments and missing values.
    pub fn parse(args: impl Iterator<Item = String>) -> Result<Invocation> {
        let default = PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("target/release/berth");
        let mut options = Self { agent: default, against: None, only: Vec::new(), quick: false, keep: false };
        let (mut args, mut is_bench) = (args.peekable(), false);
        while let Some(arg) = args.next() {
            let mut value = || args.next().with_context(|| format!("a value is required for '{arg}'"));
            match arg.as_str() {
                // cargo passes this for `cargo bench`, but not for `cargo test --all-targets`.
                "--bench" => is_bench = true,
                "--agent" => options.agent = value()?.into(),
                "--against" => options.against = Some(value()?.into()),
                "--only" => options.only = value()?.split(',').map(str::to_owned).collect(),
                "--quick" => options.quick = true,
                "--keep" => options.keep = true,
                "--list" => return Ok(Invocation::Help(crate::measurements::list())),
                "--help" | "-h" => return Ok(Invocation::Help(HELP.to_owned())),
                other => bail!("unexpected argument '{other}'\n\n{HELP}"),
            }
        }
        if !is_bench {
            return Ok(Invocation::Help("nothing measured: run `make bench`".to_owned()));
        }
        Ok(Invocation::Measure(options))
    }

    /// `full`, or `quick` under `--quick`.
    pub fn amount<T>(&self, full: T, quick: T) -> T {
        if self.quick { quick } else { full }
    }
}
