//! `berth exec`: runs a command in a container.

use std::{
    io::{self, IsTerminal},
    process::ExitCode,
};

use anyhow::Result;
use clap::Args;

use super::{
    node_client::{self, NodeClient},
    pod_lookup::{self, PodArguments},
    session::{self, SessionStreams},
    terminal::RawMode,
};

/// Where, and what.
#[derive(Args, Debug)]
pub(in crate::cli) struct Exec {
    #[command(flatten)]
    pod: PodArguments,
    /// Container name [default: the pod's default container]
    #[arg(short, long)]
    container: Option<String>,
    /// Pass stdin to the container
    #[arg(short = 'i', long)]
    stdin: bool,
    /// Stdin is a TTY
    #[arg(short = 't', long)]
    tty: bool,
    /// Command to execute and its arguments
    #[arg(last = true, required = true, value_name = "COMMAND")]
    command: Vec<String>,
    #[command(flatten)]
    connection: node_client::ConnectionArguments,
}

/// Runs the command and returns its exit code.
pub(in crate::cli) async fn run(wanted: Exec) -> Result<ExitCode> {
    let client = NodeClient::open(&wanted.connection)?;
    let pod = wanted.pod.find(&client).await?;
    let container = pod_lookup::container(&pod, wanted.container.as_deref())?;
    let terminal = wanted.tty && io::stdin().is_terminal();
    if wanted.tty && !terminal {
        eprintln!("Unable to use a TTY - input is not a terminal or the right kind of file");
    }
    let streams = SessionStreams { input: wanted.stdin, terminal };
    let (namespace, name) = (pod_lookup::namespace(&pod), pod_lookup::name(&pod));
    let path =
        format!("/exec/{}?{}", pod_lookup::path(&[namespace, name, &container]), query(&wanted.command, streams));
    let raw = if terminal && wanted.stdin { Some(RawMode::enter()?) } else { None };
    let code = session::run(&client, &path, streams).await;
    drop(raw);
    Ok(ExitCode::from(code?))
}

fn query(command: &[String], streams: SessionStreams) -> String {
    let mut query = form_urlencoded::Serializer::new(String::new());
    for word in command {
        query.append_pair("command", word);
    }
    query.append_pair("output", "1");
    // A terminal combines output and error in one stream.
    query.append_pair(if streams.terminal { "tty" } else { "error" }, "1");
    if streams.input {
        query.append_pair("input", "1");
    }
    query.finish()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn queries_name_words_and_streams() {
        let command = ["sh", "-c", "echo a&b"].map(str::to_owned);
        let words = "command=sh&command=-c&command=echo+a%26b&output=1";
        for (input, terminal, rest) in
            [(false, false, "&error=1"), (true, false, "&error=1&input=1"), (true, true, "&tty=1&input=1")]
        {
            assert_eq!(query(&command, SessionStreams { input, terminal }), format!("{words}{rest}"));
        }
    }
}
