//! Starts an exec process in a container with streams for its client.
//! Implements spec 09a §4, §11.

use std::{io, os::fd::OwnedFd, sync::Arc};

use rustix::{
    fs::{Gid, Mode, OFlags, Uid, fchown, open},
    pipe::{PipeFlags, pipe_with},
};
use tokio::{
    net::unix::pipe,
    sync::{oneshot, watch},
};

use super::{
    command::{CommandStreams, Reader},
    exec_output::ExecOutput,
    request::StdioStreams,
    terminal::Master,
};
use crate::{
    actor::{SHIM_ANSWER, SandboxHandle},
    errors::{ErrorKind, RuntimeError, RuntimeResult},
    ids,
    runtime::Runtime,
};
use berth_proto::cri;
use berth_shim::plan::{Exit, ProcessPlan, ProcessTarget, Reply, ShimRequest};

/// Maximum number of concurrent exec processes per container.
const AT_ONCE: usize = 64;

/// Requested streams, and the initial terminal size (columns, rows) if known.
type Shape = (StdioStreams, Option<(u16, u16)>);

/// Starts an exec process.
///
/// # Errors
/// The container is not running, has too many processes, or the program cannot be executed.
pub async fn start(
    runtime: &Arc<Runtime>,
    container: &str,
    args: &[String],
    shape: Shape,
) -> RuntimeResult<CommandStreams> {
    let (wanted, size) = shape;
    let (pod, container) = runtime.container(container)?;
    let sandbox = pod.now();
    let of = sandbox.container(&container)?;
    of.running()?;
    check_exec_limit(&pod, &container)?;
    let exec = ids::new_id();
    let mut plan = runtime.ports.planner.exec(&of.plan, &exec, args, wanted.tty)?;
    if let (Some(terminal), Some(size)) = (&mut plan.process.terminal, size) {
        *terminal = size;
    }
    let (ours, theirs) = if wanted.tty { (RuntimePipeEnds::default(), Vec::new()) } else { pipes(wanted)? };
    chown_pipes(&theirs, owner(&sandbox.config, &plan.process));
    let exit = pod.await_exit(ProcessTarget::Exec(container, exec.clone()));
    let asked = pod.shim()?.request(ShimRequest::Exec(Box::new(plan)), theirs, SHIM_ANSWER).await;
    let (reply, files) = asked.map_err(|error| error.during(&format!("failed to start exec \"{exec}\"")))?;
    if !matches!(reply, Reply::Started(_)) {
        return Err(RuntimeError::other("unexpected response from shim: expected a process"));
    }
    let end = ExitWatcher::over(runtime, exit);
    match files.into_iter().next() {
        Some(master) if wanted.tty => at_terminal(wanted, master, end),
        None if wanted.tty => Err(RuntimeError::other("shim did not send a terminal")),
        _ => Ok(over_pipes(runtime, ours, end)),
    }
}

/// Checks that another exec process is permitted.
///
/// # Errors
/// The container has the maximum number of exec processes.
pub fn check_exec_limit(pod: &SandboxHandle, container: &str) -> RuntimeResult<()> {
    if pod.executing(container) < AT_ONCE {
        return Ok(());
    }
    let text = format!("container \"{container}\" already has {AT_ONCE} exec sessions");
    Err(RuntimeError::new(ErrorKind::Exhausted, text))
}

/// Waits for the exit of a process even if the client has disconnected: until then the process counts against the
/// limit.
struct ExitWatcher {
    has_ended: watch::Receiver<bool>,
    exit: oneshot::Receiver<Exit>,
}

impl ExitWatcher {
    fn over(runtime: &Runtime, exit: oneshot::Receiver<Exit>) -> Self {
        let ((ended, has_ended), (exit_sender, how)) = (watch::channel(false), oneshot::channel());
        let stop = runtime.shell.stop.clone();
        runtime.shell.spawn(async move {
            tokio::select! {
                exit = exit => if let Ok(exit) = exit {
                    // The client may have disconnected.
                    let _ = exit_sender.send(exit);
                },
                () = stop.cancelled() => {}
            }
            ended.send_replace(true);
        });
        Self { has_ended, exit: how }
    }

    async fn code(self) -> RuntimeResult<i32> {
        let exit = self.exit.await.map_err(|_| RuntimeError::other("shim of the container exited"))?;
        Ok(exit.code)
    }
}

fn at_terminal(wanted: StdioStreams, master: OwnedFd, end: ExitWatcher) -> RuntimeResult<CommandStreams> {
    let master = Master::new(master).map_err(|e| RuntimeError::other(format!("watch a terminal: {e}")))?;
    let terminal = Some(master.terminal());
    Ok(CommandStreams {
        stdin: wanted.stdin.then(|| Box::new(master.clone()) as _),
        stdout: Some(Box::new(master)),
        stderr: None,
        terminal,
        end: Box::pin(end.code()),
    })
}

fn over_pipes(runtime: &Runtime, ours: RuntimePipeEnds, end: ExitWatcher) -> CommandStreams {
    let limit = runtime.shell.config.exec_io_drain;
    let drained = |from: pipe::Receiver| -> Reader {
        Box::new(ExecOutput::new(from, end.has_ended.clone(), limit, runtime.shell.clone()))
    };
    let (stdout, stderr) = (ours.stdout.map(drained), ours.stderr.map(drained));
    let stdin = ours.stdin.map(|to| Box::new(to) as _);
    CommandStreams { stdin, stdout, stderr, terminal: None, end: Box::pin(end.code()) }
}

/// The runtime's ends of a process's pipes.
#[derive(Default)]
struct RuntimePipeEnds {
    stdin: Option<pipe::Sender>,
    stdout: Option<pipe::Receiver>,
    stderr: Option<pipe::Receiver>,
}

/// Creates pipes and returns both sides, the runtime's and the process's: stdin, stdout, stderr.
fn pipes(wanted: StdioStreams) -> RuntimeResult<(RuntimePipeEnds, Vec<OwnedFd>)> {
    let failed = |error: io::Error| RuntimeError::other(format!("create pipe: {error}"));
    let mut ours = RuntimePipeEnds::default();
    let mut theirs = Vec::new();
    if wanted.stdin {
        let (read, write) = pipe_with(PipeFlags::CLOEXEC).map_err(|e| failed(e.into()))?;
        ours.stdin = Some(sender(write).map_err(failed)?);
        theirs.push(read);
    } else {
        theirs.push(null().map_err(failed)?);
    }
    for (is_wanted, place) in [(wanted.stdout, &mut ours.stdout), (wanted.stderr, &mut ours.stderr)] {
        if is_wanted {
            let (read, write) = pipe_with(PipeFlags::CLOEXEC).map_err(|e| failed(e.into()))?;
            *place = Some(receiver(read).map_err(failed)?);
            theirs.push(write);
        } else {
            theirs.push(null().map_err(failed)?);
        }
    }
    Ok((ours, theirs))
}

fn null() -> io::Result<OwnedFd> {
    Ok(open("/dev/null", OFlags::RDWR | OFlags::CLOEXEC, Mode::empty())?)
}

/// Converts the write end of a pipe to a non-blocking async sender.
pub fn sender(end: OwnedFd) -> io::Result<pipe::Sender> {
    rustix::io::ioctl_fionbio(&end, true)?;
    pipe::Sender::from_owned_fd(end)
}

/// Converts the read end of a pipe to a non-blocking async receiver.
pub fn receiver(end: OwnedFd) -> io::Result<pipe::Receiver> {
    rustix::io::ioctl_fionbio(&end, true)?;
    pipe::Receiver::from_owned_fd(end)
}

/// Changes the owner of pipes to the process's user, who may reopen them through `/dev/stdout`. Ignores failures: the
/// process can still write to them.
fn chown_pipes(ends: &[OwnedFd], (uid, gid): (u32, u32)) {
    for end in ends {
        let is_pipe = rustix::fs::fstat(end)
            .is_ok_and(|stat| rustix::fs::FileType::from_raw_mode(stat.st_mode) == rustix::fs::FileType::Fifo);
        if is_pipe {
            let _ = fchown(end, Some(Uid::from_raw(uid)), Some(Gid::from_raw(gid)));
        }
    }
}

/// A process's user and group ids on the host, outside its user namespace.
fn owner(pod: &cri::PodSandboxConfig, process: &ProcessPlan) -> (u32, u32) {
    let context = pod.linux.as_ref().and_then(|linux| linux.security_context.as_ref());
    let options = context.and_then(|context| context.namespace_options.as_ref());
    let users = options.and_then(|options| options.userns_options.as_ref());
    let users = users.filter(|users| users.mode() == cri::NamespaceMode::Pod);
    let outside = |maps: Option<&Vec<cri::IdMapping>>, id: u32| {
        let map = maps.and_then(|maps| maps.first());
        map.map_or(id, |map| map.host_id.saturating_add(id.saturating_sub(map.container_id)))
    };
    (outside(users.map(|u| &u.uids), process.uid), outside(users.map(|u| &u.gids), process.gid))
}
