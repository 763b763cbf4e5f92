//! Attaches a client to the stdio of a container's first process.
//! Implements spec 09a §4.

use std::{
    io,
    os::fd::OwnedFd,
    pin::Pin,
    task::{Context, Poll},
    time::Duration,
};

use rustix::pipe::{PipeFlags, pipe_with};
use tokio::{
    io::{AsyncRead, AsyncWrite, ReadBuf},
    net::unix::pipe,
    time::timeout,
};
use tokio_util::sync::{CancellationToken, WaitForCancellationFutureOwned};

use super::{
    command::CommandStreams,
    exec::{receiver, sender},
    request::StdioStreams,
    terminal::Terminal,
};
use crate::{
    actor::{SHIM_ANSWER, SandboxHandle},
    errors::{RuntimeError, RuntimeResult},
    runtime::Runtime,
};
use berth_shim::plan::{Reply, ShimRequest};

/// Maximum delay between the end of a container's output and the report of its exit.
const KNOWN: Duration = Duration::from_secs(5);

/// Attaches to a container. Its stdin comes from the client if the container has one. The end of the client's input
/// closes the container's stdin with `stdin_once` and without a terminal; otherwise it detaches the client, as with
/// containerd, and the container keeps running.
///
/// # Errors
/// The container is not running, or has too many clients.
pub async fn attach(runtime: &Runtime, container: &str, wanted: StdioStreams) -> RuntimeResult<CommandStreams> {
    let (pod, container) = runtime.container(container)?;
    let (has_terminal, is_once) = {
        let sandbox = pod.now();
        let of = sandbox.container(&container)?;
        of.running()?;
        (of.plan.process.terminal.is_some(), of.plan.stdin_once)
    };
    let (ours, theirs) = pipes(wanted)?;
    let request = ShimRequest::Attach { container: container.clone(), stdin: wanted.stdin };
    let (reply, _) = pod.shim()?.request(request, theirs, SHIM_ANSWER).await?;
    if reply != Reply::Done {
        return Err(RuntimeError::other("unexpected response from shim"));
    }
    let (stdin, stdout, stderr) = ours;
    let terminal = has_terminal.then(|| Terminal::Shim { pod: pod.clone(), container: container.clone() });
    let detached = CancellationToken::new();
    let ends_with_input = has_terminal || !is_once;
    let stdin = stdin.map(|to| StdinWriter { to, detached: ends_with_input.then(|| detached.clone()) });
    let detachable = |from: pipe::Receiver| {
        Box::new(DetachableReader { from, detached: Box::pin(detached.clone().cancelled_owned()) })
    };
    let end = ended(pod, container);
    Ok(CommandStreams {
        stdin: stdin.map(|to| Box::new(to) as _),
        stdout: Some(detachable(stdout)),
        stderr: stderr.map(|from| detachable(from) as _),
        terminal,
        end: Box::pin(async move { detached.run_until_cancelled(end).await.unwrap_or(Ok(0)) }),
    })
}

/// Writes to the container's stdin; dropping it detaches the client, unless the container closed its stdin.
struct StdinWriter {
    to: pipe::Sender,
    detached: Option<CancellationToken>,
}

impl AsyncWrite for StdinWriter {
    fn poll_write(mut self: Pin<&mut Self>, context: &mut Context<'_>, bytes: &[u8]) -> Poll<io::Result<usize>> {
        let written = Pin::new(&mut self.to).poll_write(context, bytes);
        if matches!(written, Poll::Ready(Err(_))) {
            self.detached = None;
        }
        written
    }

    fn poll_flush(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.to).poll_flush(context)
    }

    fn poll_shutdown(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.to).poll_shutdown(context)
    }
}

impl Drop for StdinWriter {
    fn drop(&mut self) {
        if let Some(detached) = &self.detached {
            detached.cancel();
        }
    }
}

/// Reads the container's output until the client detaches.
struct DetachableReader {
    from: pipe::Receiver,
    detached: Pin<Box<WaitForCancellationFutureOwned>>,
}

impl AsyncRead for DetachableReader {
    fn poll_read(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
        buffer: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        let read = Pin::new(&mut self.from).poll_read(context, buffer);
        // Delivers output that is already available first.
        if read.is_pending() && self.detached.as_mut().poll(context).is_ready() {
            return Poll::Ready(Ok(()));
        }
        read
    }
}

/// Waits for the exit of a container whose output has ended. The output ends early only for a client that was too slow.
async fn ended(pod: SandboxHandle, container: String) -> RuntimeResult<i32> {
    let over = pod.wait_for(|sandbox| sandbox.container(&container).map_or(true, |c| c.finished().is_some()));
    match timeout(KNOWN, over).await {
        // Also if the sandbox is gone: then so is the container.
        Ok(_) => Ok(0),
        Err(_) => Err(RuntimeError::other("the container goes on, but its output was not taken for too long")),
    }
}

type RuntimePipeEnds = (Option<pipe::Sender>, pipe::Receiver, Option<pipe::Receiver>);

/// Creates pipes and returns both sides, the runtime's and the shim's: stdin, stdout, stderr. Creates stdin and stderr
/// only on request.
fn pipes(wanted: StdioStreams) -> RuntimeResult<(RuntimePipeEnds, Vec<OwnedFd>)> {
    let failed = |error: io::Error| RuntimeError::other(format!("create pipe: {error}"));
    let pair = || pipe_with(PipeFlags::CLOEXEC).map_err(|e| failed(e.into()));
    let mut theirs = Vec::new();
    let mut stdin = None;
    if wanted.stdin {
        let (read, write) = pair()?;
        stdin = Some(sender(write).map_err(failed)?);
        theirs.push(read);
    }
    let (read, write) = pair()?;
    let stdout = receiver(read).map_err(failed)?;
    theirs.push(write);
    let mut stderr = None;
    if wanted.stderr {
        let (read, write) = pair()?;
        stderr = Some(receiver(read).map_err(failed)?);
        theirs.push(write);
    }
    Ok(((stdin, stdout, stderr), theirs))
}
