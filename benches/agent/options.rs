//! The bench's command line.

use std::path::PathBuf;

use anyhow::{Context, Result, bail};

const HELP: &str = "\
Measures a kubelet-compatible binary.

  --agent BIN     the binary to measure (default: target/release/berth)
  --against BIN   another one, measured side by side in the same run
  --only NAMES    comma separated: scripted, server, cluster, volumes, health, containerd, runtime, or
                  names of measurements
  --quick         smaller counts, 10 s of idling instead of 60 s, 1 min of outage instead of 10
  --list          the names of the measurements
  --keep          leave the folder with the agents' logs behind

Root is needed for everything on containerd; without it, that part is left out by name.";

/// What was asked for.
pub enum Asked {
    /// A table.
    Measure(Options),
    /// A text.
    Help(String),
}

/// What to measure, and how much of it.
#[derive(Debug, Clone)]
pub struct Options {
    /// The binary.
    pub agent: PathBuf,
    /// The other binary.
    pub against: Option<PathBuf>,
    /// Groups or measurements; empty for all.
    pub only: Vec<String>,
    /// Less of everything.
    pub quick: bool,
    /// Whether the logs stay.
    pub keep: bool,
}

impl Options {
    /// Reads the arguments (without the program's name).
    ///
    /// # Errors
    /// Unknown arguments and missing values.
    pub fn parse(args: impl Iterator<Item = String>) -> Result<Asked> {
        let default = PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("target/release/berth");
        let mut options = Self { agent: default, against: None, only: Vec::new(), quick: false, keep: false };
        let (mut args, mut is_bench) = (args.peekable(), false);
        while let Some(arg) = args.next() {
            let mut value = || args.next().with_context(|| format!("{arg} needs a value"));
            match arg.as_str() {
                // What cargo says when it is to measure; `cargo test --all-targets` does not.
                "--bench" => is_bench = true,
                "--agent" => options.agent = value()?.into(),
                "--against" => options.against = Some(value()?.into()),
                "--only" => options.only = value()?.split(',').map(str::to_owned).collect(),
                "--quick" => options.quick = true,
                "--keep" => options.keep = true,
                "--list" => return Ok(Asked::Help(crate::run::list())),
                "--help" | "-h" => return Ok(Asked::Help(HELP.to_owned())),
                other => bail!("unknown argument {other}\n\n{HELP}"),
            }
        }
        if !is_bench {
            return Ok(Asked::Help("nothing measured: run `make bench`".to_owned()));
        }
        Ok(Asked::Measure(options))
    }

    /// `full`, or `quick` under `--quick`.
    pub fn amount<T>(&self, full: T, quick: T) -> T {
        if self.quick { quick } else { full }
    }
}
