//! `berth logs`: what a container wrote.

use std::process::ExitCode;

use anyhow::{Result, bail};
use clap::Args;
use http_body_util::BodyExt;

use super::{
    Reader,
    door::{self, Door},
    names::{self, PodArguments},
    print,
};

/// Which log, and how much of it.
#[derive(Args, Debug)]
#[allow(clippy::struct_excessive_bools, reason = "each is a flag")]
pub(in crate::cli) struct Logs {
    #[command(flatten)]
    pod: PodArguments,
    /// The container [default: the pod's first]
    #[arg(short, long)]
    container: Option<String>,
    /// Go on as it writes
    #[arg(short, long)]
    follow: bool,
    /// Of the instance before
    #[arg(short, long)]
    previous: bool,
    /// With the time of each line
    #[arg(long)]
    timestamps: bool,
    /// Only so many lines from the end
    #[arg(long, value_name = "LINES")]
    tail: Option<u32>,
    /// Only what is not older than so many seconds
    #[arg(long, value_name = "SECONDS", value_parser = clap::value_parser!(u32).range(1..))]
    since: Option<u32>,
    #[command(flatten)]
    door: door::Arguments,
}

/// Prints it.
pub(in crate::cli) async fn print_log(wanted: Logs) -> Result<ExitCode> {
    let door = Door::open(&wanted.door)?;
    let pod = wanted.pod.find(&door).await?;
    let container = names::container(&pod, wanted.container.as_deref())?;
    let (namespace, name) = (names::namespace(&pod), names::name(&pod));
    let path = format!("/containerLogs/{namespace}/{name}/{container}?{}", query(&wanted));
    let mut body = door.ask(&path, &[]).await?.into_body();
    while let Some(frame) = body.frame().await {
        let Ok(frame) = frame else { bail!("the log breaks off here: the node ended the connection") };
        if let Some(bytes) = frame.data_ref()
            && print(bytes)? == Reader::Left
        {
            break;
        }
    }
    Ok(ExitCode::SUCCESS)
}

fn query(wanted: &Logs) -> String {
    let mut query = form_urlencoded::Serializer::new(String::new());
    for (name, set) in [("follow", wanted.follow), ("previous", wanted.previous), ("timestamps", wanted.timestamps)] {
        if set {
            query.append_pair(name, "true");
        }
    }
    for (name, number) in [("tailLines", wanted.tail), ("sinceSeconds", wanted.since)] {
        if let Some(number) = number {
            query.append_pair(name, &number.to_string());
        }
    }
    query.finish()
}
