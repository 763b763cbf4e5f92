//! `berth config`: prints configuration defaults and validates a file, without starting the agent.

use std::process::ExitCode;

use anyhow::{Context, Result, bail};
use clap::{Subcommand, ValueEnum};

use berth_config::{Notice, configz, defaults};

#[derive(Subcommand, Debug)]
pub(super) enum ConfigSubcommand {
    /// Print the default configuration
    Defaults {
        /// Output format
        #[arg(long, short, value_enum, default_value_t = ConfigOutputFormat::Yaml)]
        output: ConfigOutputFormat,
    },
    /// Validate a configuration file
    Validate {
        /// Configuration file, as passed to --config
        file: String,
        /// Directory of drop-in files, as passed to --config-dir
        #[arg(long)]
        config_dir: Option<String>,
        /// Reject unknown and duplicate fields
        #[arg(long)]
        strict: bool,
    },
}

#[derive(Clone, Copy, Debug, ValueEnum)]
pub(super) enum ConfigOutputFormat {
    /// YAML on multiple lines
    Yaml,
    /// JSON on one line
    Json,
}

pub(super) fn run(command: &ConfigSubcommand) -> ExitCode {
    let done = match command {
        ConfigSubcommand::Defaults { output } => print_defaults(*output),
        ConfigSubcommand::Validate { file, config_dir, strict } => validate(file, config_dir.as_deref(), *strict),
    };
    match done {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("{error:#}");
            ExitCode::FAILURE
        }
    }
}

fn print_defaults(output: ConfigOutputFormat) -> Result<()> {
    let mut config = defaults::defaults();
    config.eviction_hard = defaults::hard_eviction();
    match output {
        ConfigOutputFormat::Json => println!("{}", configz::to_json(&config)),
        ConfigOutputFormat::Yaml => {
            print!("{}", serde_saphyr::to_string(&config).context("cannot serialize the defaults as YAML")?)
        }
    }
    Ok(())
}

fn validate(file: &str, drop_ins: Option<&str>, strict: bool) -> Result<()> {
    let notices = berth_config::check(file, drop_ins)?;
    for notice in &notices {
        eprintln!("warning: {}", shown(notice));
    }
    if strict && let Some(error) = notices.iter().find_map(Notice::strict_error) {
        bail!("{error}");
    }
    println!("{file}: valid");
    Ok(())
}

fn shown(notice: &Notice) -> String {
    match notice {
        Notice::LenientDecoding { error, hints } if hints.is_empty() => error.clone(),
        Notice::LenientDecoding { error, hints } => format!("{error} ({})", hints.join("; ")),
        Notice::NotYetEffective(not_yet) => {
            format!("{} is not supported yet and has no effect: {}", not_yet.setting, not_yet.feature)
        }
        Notice::GateOff { setting, gate } => format!("{setting} has no effect: the feature gate {gate} is off"),
        Notice::AppliedDropin { path, fields, unknown } if unknown.is_empty() => {
            format!("{path} sets {}", fields.join(", "))
        }
        Notice::AppliedDropin { path, fields, unknown } => {
            format!("{path} sets {}; unknown fields: {}", fields.join(", "), unknown.join(", "))
        }
        other => format!("{other:?}"),
    }
}
