//! Joins the first process of a container: what it prints from now on, and its input. Behaviour: spec 09a §4.

use std::{io, os::fd::OwnedFd, time::Duration};

use rustix::pipe::{PipeFlags, pipe_with};
use tokio::{net::unix::pipe, time::timeout};

use super::{
    ask::Wanted,
    command::Command,
    exec::{receiver, sender},
    terminal::Terminal,
};
use crate::embedded::{
    actor::{Pod, SHIM_ANSWER},
    errors::{RuntimeError, RuntimeResult},
    runtime::Runtime,
    shim::plan::{Reply, Request},
};

/// How long after the end of its output the end of a container is known.
const KNOWN: Duration = Duration::from_secs(5);

/// Joins it. Its input is the client's where the container has one; the end of that ends it only where the container
/// says so.
///
/// # Errors
/// The container does not run, or has too many clients.
pub async fn join(runtime: &Runtime, container: &str, wanted: Wanted) -> RuntimeResult<Command> {
    let (pod, container) = runtime.container(container)?;
    let has_terminal = {
        let sandbox = pod.now();
        let of = sandbox.container(&container)?;
        of.running()?;
        of.plan.process.terminal.is_some()
    };
    let (ours, theirs) = pipes(wanted)?;
    let request = Request::Attach { container: container.clone(), stdin: wanted.stdin };
    let (reply, _) = pod.shim()?.ask(request, theirs, SHIM_ANSWER).await?;
    if reply != Reply::Done {
        return Err(RuntimeError::other("the shim answered something else than asked"));
    }
    let (stdin, stdout, stderr) = ours;
    let terminal = has_terminal.then(|| Terminal::Shim { pod: pod.clone(), container: container.clone() });
    Ok(Command {
        stdin: stdin.map(|to| Box::new(to) as _),
        stdout: Some(Box::new(stdout)),
        stderr: stderr.map(|from| Box::new(from) as _),
        terminal,
        end: Box::pin(ended(pod, container)),
    })
}

/// The end of a container whose output has ended. That ends early only for a client that was too slow.
async fn ended(pod: Pod, container: String) -> RuntimeResult<i32> {
    let over = pod.wait_for(|sandbox| sandbox.container(&container).map_or(true, |c| c.finished().is_some()));
    match timeout(KNOWN, over).await {
        // Also where the sandbox is gone: then so is the container.
        Ok(_) => Ok(0),
        Err(_) => Err(RuntimeError::other("the container goes on, but its output was not taken for too long")),
    }
}

type Ours = (Option<pipe::Sender>, pipe::Receiver, Option<pipe::Receiver>);

/// Our ends, and those of the shim: stdin, stdout, stderr, the first and the last only where wanted.
fn pipes(wanted: Wanted) -> RuntimeResult<(Ours, Vec<OwnedFd>)> {
    let failed = |error: io::Error| RuntimeError::other(format!("no pipe: {error}"));
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
