//! `berth logs`: prints the log of a container.

use std::process::ExitCode;

use anyhow::{Result, bail};
use clap::Args;
use http_body_util::BodyExt;
use jiff::Timestamp;

use super::{
    OutputReader,
    node_client::{self, NodeClient},
    pod_lookup::{self, PodArguments},
    print,
};
use berth_config::GoDuration;

/// Which log, and how much of it.
#[derive(Args, Debug)]
#[allow(clippy::struct_excessive_bools, reason = "each is a flag")]
pub(in crate::cli) struct Logs {
    #[command(flatten)]
    pod: PodArguments,
    /// Container name [default: the pod's default container]
    #[arg(short, long)]
    container: Option<String>,
    /// Follow the log output
    #[arg(short, long)]
    follow: bool,
    /// Print the logs of the previous instance of the container
    #[arg(short, long)]
    previous: bool,
    /// Include timestamps on each line in the log output
    #[arg(long)]
    timestamps: bool,
    /// Number of recent log lines to print; -1 prints all lines
    #[arg(long, value_name = "LINES", allow_negative_numbers = true, value_parser = clap::value_parser!(i64).range(-1..))]
    tail: Option<i64>,
    /// Only return logs newer than a relative duration like 10s, 5m, 1h30m, or a number of seconds
    #[arg(long, value_name = "DURATION", value_parser = seconds)]
    since: Option<i64>,
    /// Only return logs after a specific date (RFC 3339)
    #[arg(long, value_name = "TIME", conflicts_with = "since")]
    since_time: Option<Timestamp>,
    /// Maximum bytes of logs to return
    #[arg(long, value_name = "BYTES", value_parser = clap::value_parser!(i64).range(1..))]
    limit_bytes: Option<i64>,
    #[command(flatten)]
    connection: node_client::ConnectionArguments,
}

/// Prints the log of a container to standard output until it ends or the reader is gone.
pub(in crate::cli) async fn print_log(wanted: Logs) -> Result<ExitCode> {
    let client = NodeClient::open(&wanted.connection)?;
    let pod = wanted.pod.find(&client).await?;
    let container = pod_lookup::container(&pod, wanted.container.as_deref())?;
    let (namespace, name) = (pod_lookup::namespace(&pod), pod_lookup::name(&pod));
    let path = format!("/containerLogs/{}?{}", pod_lookup::path(&[namespace, name, &container]), query(&wanted));
    let mut body = client.get(&path, &[]).await?.into_body();
    while let Some(frame) = body.frame().await {
        let Ok(frame) = frame else { bail!("log output is incomplete: the node closed the connection") };
        if let Some(bytes) = frame.data_ref()
            && print(bytes)? == OutputReader::Left
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
    let tail = wanted.tail.filter(|lines| *lines >= 0);
    for (name, number) in [("tailLines", tail), ("sinceSeconds", wanted.since), ("limitBytes", wanted.limit_bytes)] {
        if let Some(number) = number {
            query.append_pair(name, &number.to_string());
        }
    }
    if let Some(time) = wanted.since_time {
        query.append_pair("sinceTime", &time.to_string());
    }
    query.finish()
}

/// Parses a Go duration or seconds, rounded up to whole seconds. Pure.
fn seconds(text: &str) -> Result<i64, String> {
    let duration = match text.parse::<u32>() {
        Ok(seconds) => GoDuration::from_secs(seconds.into()),
        Err(_) => text.parse::<GoDuration>().map_err(|error| error.to_string())?,
    };
    let whole = duration.std().as_millis().div_ceil(1000);
    i64::try_from(whole).ok().filter(|seconds| *seconds > 0).ok_or_else(|| "must be greater than 0".to_owned())
}

#[cfg(test)]
mod tests {
    use clap::Parser;

    use super::*;

    #[derive(Parser)]
    struct Line {
        #[command(flatten)]
        logs: Logs,
    }

    #[test]
    fn flags_become_query_parameters() {
        for (words, expected) in [
            ("", Some("")),
            ("-f -p --timestamps", Some("follow=true&previous=true&timestamps=true")),
            ("--since 5m", Some("sinceSeconds=300")),
            ("--since 1h30m", Some("sinceSeconds=5400")),
            ("--since 10s", Some("sinceSeconds=10")),
            ("--since 30", Some("sinceSeconds=30")),
            ("--since 1500ms", Some("sinceSeconds=2")),
            ("--since 0", None),
            ("--since=-5m", None),
            ("--since 5x", None),
            ("--tail=-1", Some("")),
            ("--tail -1", Some("")),
            ("--tail 0", Some("tailLines=0")),
            ("--tail=-2", None),
            ("--limit-bytes 10", Some("limitBytes=10")),
            ("--limit-bytes 0", None),
            ("--since-time 2026-01-01T01:00:00+01:00", Some("sinceTime=2026-01-01T00%3A00%3A00Z")),
            ("--since-time today", None),
            ("--since-time 2026-01-01T00:00:00Z --since 5m", None),
        ] {
            let line = Line::try_parse_from(["logs", "web"].into_iter().chain(words.split_whitespace()));
            assert_eq!(line.ok().map(|line| query(&line.logs)).as_deref(), expected, "{words}");
        }
    }
}
