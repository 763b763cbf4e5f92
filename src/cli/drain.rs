//! `berth drain`: stops the pods of this node in graceful-shutdown order; `--cancel` admits pods again.

use std::{path::PathBuf, process::ExitCode, time::Duration};

use anyhow::{Context, Result, bail};
use clap::Args;
use tokio::{
    io::{AsyncBufReadExt, AsyncReadExt, AsyncWriteExt, BufReader, Lines},
    net::{UnixStream, unix::OwnedReadHalf},
    time::timeout,
};

use crate::wiring::drain::{DrainRequest, DrainResponse, DrainSocket};

/// Default root directory of the agent.
const ROOT: &str = "/var/lib/kubelet";
/// Timeout of an answer, in addition to the grace period that the agent announces.
const PATIENCE: Duration = Duration::from_secs(30);
/// Maximum size of all answers, in bytes.
const LONGEST: u64 = 4 << 10;

/// What is to become of the pods.
#[derive(Args, Debug)]
pub(super) struct DrainArguments {
    /// Cancel the drain and admit new pods again; stopped pods are not restarted
    #[arg(long)]
    cancel: bool,
    /// Root directory of the agent, as passed to its --root-dir
    #[arg(long, value_name = "DIR", default_value = ROOT)]
    root_dir: PathBuf,
}

/// Sends the request to the agent and waits until it is done.
pub(super) async fn drain(wanted: DrainArguments) -> Result<ExitCode> {
    let socket = wanted.root_dir.join(DrainSocket::NAME);
    let stream = UnixStream::connect(&socket).await.with_context(|| {
        format!(
            "cannot connect to the agent at {socket:?}; is shutdownGracePeriod or shutdownGracePeriodByPodPriority set?"
        )
    })?;
    let (read, mut write) = stream.into_split();
    let ask = if wanted.cancel { DrainRequest::Cancel } else { DrainRequest::Drain };
    write.write_all(format!("{}\n", ask.as_str()).as_bytes()).await.context("cannot send the request to the agent")?;
    let mut answers = BufReader::new(read.take(LONGEST)).lines();
    let mut patience = PATIENCE;
    loop {
        match next(&mut answers, patience).await? {
            DrainResponse::Begun(seconds) => {
                println!("Stopping pods (timeout {seconds}s)");
                patience = PATIENCE.saturating_add(Duration::from_secs(seconds));
            }
            DrainResponse::Refused(why) => bail!("the agent refused the request: {why}"),
            DrainResponse::Done if wanted.cancel => break println!("Drain cancelled: pods are admitted again"),
            DrainResponse::Done => {
                println!("Node drained: no pods are admitted until `berth drain --cancel` or a restart of the agent");
                break;
            }
        }
    }
    Ok(ExitCode::SUCCESS)
}

async fn next(
    answers: &mut Lines<BufReader<tokio::io::Take<OwnedReadHalf>>>,
    patience: Duration,
) -> Result<DrainResponse> {
    let line = timeout(patience, answers.next_line()).await;
    let line = line.with_context(|| format!("timed out waiting for the agent after {patience:?}"))?;
    let line = line
        .context("cannot read the agent's response")?
        .context("the agent closed the connection without a response")?;
    line.parse().map_err(anyhow::Error::msg)
}
