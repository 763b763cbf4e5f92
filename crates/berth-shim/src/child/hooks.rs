//! OCI hooks: the process that runs them, and its protocol with the container's start.
//!
//! ```text
//!  shim ─clone3─► runner: stays in the shim's namespaces
//!                    ◄── P pid ───── helper
//!                    ◄── R ───────── the container's process has assembled its root, and waits
//!                  prestart, createRuntime
//!                    ─── G ────────► it continues: runs createContainer and startContainer itself
//!                    ◄── X ───────── it executes its program next; end of stream: it has done so
//!                  poststart
//! ```
//! The runner reports failures like a helper, and the start is not finished before the runner has exited. The text of a
//! failure contains the output of the hook. Implements spec 09a §8.4; OCI runtime specification 1.2 (Lifecycle,
//! POSIX-platform Hooks).

use std::{
    ffi::CString,
    io::{self, Write},
    os::{
        fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd, RawFd},
        unix::ffi::OsStrExt,
    },
    path::Path,
    time::{Duration, Instant},
};

use nix::fcntl::OFlag;
use rustix::{
    event::{PollFd, PollFlags, Timespec, poll},
    io::Errno,
    net::{AddressFamily, RecvFlags, SendFlags, SocketFlags, SocketType, recv, send, socketpair},
    process::{Pid, Signal, WaitOptions, kill_process_group, setsid, waitpid},
};

use super::{
    error_context::{ErrorContext, Step, failure, reason},
    exec_setup::report_failure,
    process_setup,
    progress_report::Reporter,
};
use crate::plan::{Hook, HookPoint, Hooks};
use berth_sys::child_process::{self, NewParent, SingleThreaded};

/// Default timeout of a hook. The whole start has its own deadline.
const LIMIT: Duration = Duration::from_secs(60);
/// Bytes of a hook's output that are reported; the rest is read and dropped.
const MAX_OUTPUT: usize = 1024;
/// Hooks that the runner executes.
const RUNNER_HOOKS: [HookPoint; 3] = [HookPoint::Prestart, HookPoint::CreateRuntime, HookPoint::Poststart];

/// Socket to the runner, shared by the helper and the container's process.
pub(super) struct RunnerSocket(OwnedFd);

/// A runner and the socket to it.
pub(super) struct HookRunner {
    /// PID of the runner, a child of the shim.
    pub(super) runner: u32,
    /// Closed by the shim once the helper has inherited it.
    pub(super) line: RunnerSocket,
}

/// Creates a runner if there are hooks for it.
pub(super) fn begin(alone: SingleThreaded, hooks: Option<&Hooks>, reporter: &Reporter) -> Step<Option<HookRunner>> {
    let Some(hooks) = hooks.filter(|hooks| RUNNER_HOOKS.iter().any(|moment| hooks.of(*moment).next().is_some())) else {
        return Ok(None);
    };
    let pair = socketpair(AddressFamily::UNIX, SocketType::SEQPACKET, SocketFlags::CLOEXEC, None);
    let (ours, line) = pair.context(|| "create socket pair")?;
    let parent = rustix::process::getpid();
    let runner = child_process::spawn(alone, NewParent::Child, None, || {
        let run = || {
            child_process::close_all_but(alone, &[reporter.number(), ours.as_raw_fd()])
                .context(|| "close descriptors")?;
            process_setup::setup_helper(parent)?;
            process_setup::set_oom_score(None);
            run_runner(alone, hooks, ours.as_fd())
        };
        run().map_or_else(|failure| report_failure(reporter, &failure), |()| 0)
    });
    let runner = runner.context(|| "fork hook process")?;
    Ok(Some(HookRunner { runner, line: RunnerSocket(line) }))
}

/// Body of the runner process.
fn run_runner(alone: SingleThreaded, hooks: &Hooks, line: BorrowedFd<'_>) -> Step<()> {
    let (mut process, mut executes) = (None, false);
    loop {
        let mut request = [0_u8; 8];
        let count = match recv(line, &mut request, RecvFlags::empty()) {
            Err(Errno::INTR) => continue,
            // The peer exited with unread data from us in its queue.
            Err(Errno::CONNRESET) => 0,
            other => other.context(|| "read request of the hook process")?.1,
        };
        match request.get(..count).unwrap_or_default() {
            [b'P', number @ ..] => process = number.first_chunk().map(|bytes| u32::from_le_bytes(*bytes)),
            [b'R'] => {
                execute(alone, hooks, HookPoint::Prestart, process)?;
                execute(alone, hooks, HookPoint::CreateRuntime, process)?;
                write_command(line, b"G")?;
                if hooks.of(HookPoint::Poststart).next().is_none() {
                    return Ok(());
                }
            }
            [b'X'] => executes = true,
            [b'F'] => executes = false,
            [] if executes => return execute(alone, hooks, HookPoint::Poststart, process),
            [] => return Ok(()),
            _ => return Err(failure("invalid request of the hook process")),
        }
    }
}

fn write_command(line: BorrowedFd<'_>, what: &[u8]) -> Step<()> {
    send(line, what, SendFlags::NOSIGNAL).map(drop).context(|| "send result to the hook process")
}

impl RunnerSocket {
    /// The descriptor's number.
    pub(super) fn number(&self) -> RawFd {
        self.0.as_raw_fd()
    }

    /// Sends the PID of the container's process.
    pub(super) fn process(&self, pid: u32) -> Step<()> {
        let [a, b, c, d] = pid.to_le_bytes();
        write_command(self.0.as_fd(), &[b'P', a, b, c, d])
    }

    /// Runs the hooks on the host and waits for them, before the container's own hooks.
    pub(super) fn rooted(&self) -> Step<()> {
        write_command(self.0.as_fd(), b"R")?;
        let mut byte = [0_u8; 1];
        loop {
            match recv(&self.0, &mut byte, RecvFlags::empty()) {
                Err(Errno::INTR) => {}
                // The runner has reported the cause.
                Ok((_, 0)) | Err(Errno::CONNRESET) => return Err(failure("a hook on the host failed")),
                other => return other.map(drop).context(|| "wait for hook process"),
            }
        }
    }

    /// Reports that the program is executed next. Without poststart hooks the runner has exited.
    pub(super) fn executes(&self) {
        let _peer_may_have_exited = write_command(self.0.as_fd(), b"X");
    }

    /// Reports that the execution failed.
    pub(super) fn failed(&self) {
        let _peer_may_have_exited = write_command(self.0.as_fd(), b"F");
    }
}

/// Begins the poststop hooks of a container. Failures are logged by the shim: nobody waits for them.
///
/// # Errors
/// If the shim has more than one thread, or no process can be created.
pub fn begin_poststop(container: &str, hooks: &Hooks) -> Step<()> {
    if hooks.of(HookPoint::Poststop).next().is_none() {
        return Ok(());
    }
    let alone = SingleThreaded::check().context(|| "execute hooks")?;
    let spawned = child_process::spawn(alone, NewParent::Child, None, || {
        let run = || {
            child_process::close_all_but(alone, &[]).context(|| "close descriptors")?;
            // The shim may exit before the hooks do.
            setsid().context(|| "create session")?;
            process_setup::set_oom_score(None);
            execute(alone, hooks, HookPoint::Poststop, None)
        };
        run().map_or_else(
            |failure| {
                let _ = writeln!(io::stderr(), "container {container}: {failure}");
                1
            },
            |()| 0,
        )
    });
    spawned.map(drop).context(|| "fork hook process")
}

/// Runs the hooks of one lifecycle point in order, until one fails; poststop runs all of them.
pub(super) fn execute(alone: SingleThreaded, hooks: &Hooks, moment: HookPoint, process: Option<u32>) -> Step<()> {
    let process = process.map(|pid| format!("\"pid\":{pid},")).unwrap_or_default();
    let state = format!("{{\"status\":\"{}\",{process}{}", moment.status(), hooks.state);
    let cwd = if moment == HookPoint::StartContainer { Path::new("/") } else { &hooks.bundle };
    let mut first = Ok(());
    for hook in hooks.of(moment) {
        let to_failure = |what| failure(format!("{} hook {} failed: {what}", moment.name(), hook.path.display()));
        let done = run_hook(alone, hook, &state, cwd).map_err(to_failure);
        first = first.and(done);
        if first.is_err() && moment != HookPoint::Poststop {
            break;
        }
    }
    first
}

/// Runs one hook and waits for its exit.
fn run_hook(alone: SingleThreaded, hook: &Hook, state: &str, cwd: &Path) -> Result<(), String> {
    let describe = |what: &str, error: io::Error| format!("{what}: {}", reason(&error));
    let pipe = || nix::unistd::pipe2(OFlag::O_CLOEXEC).map_err(|error| describe("create pipe", error.into()));
    let ((input, to), (from, output)) = (pipe()?, pipe()?);
    let spawned = child_process::spawn(alone, NewParent::Child, None, || {
        let error = become_hook(alone, hook, cwd, [&input, &output]);
        let _ = writeln!(io::stderr(), "execute hook: {}", reason(&error));
        127
    });
    let pid = spawned.map_err(|error| describe("fork process", error))?;
    drop((input, output));
    let process = i32::try_from(pid).ok().and_then(Pid::from_raw).ok_or("PID out of range")?;
    let handle = process_setup::process(pid).map_err(|failure| failure.text)?;
    for fd in [&to, &from] {
        rustix::io::ioctl_fionbio(fd, true).map_err(|error| describe("set up a pipe", error.into()))?;
    }
    let limit = hook.limit_ms.map_or(LIMIT, Duration::from_millis);
    let mut hook_io = HookIo { to: Some(to), from: Some(from), state: state.as_bytes(), output: Vec::new() };
    let ended = hook_io.until(&handle, limit).map_err(|error| describe("wait for process", error));
    if !matches!(ended, Ok(true)) {
        // It leads a process group of its own from its first step on; the group before that is ours.
        let _has_ended = kill_process_group(process, Signal::KILL);
        let _has_ended = rustix::process::pidfd_send_signal(&handle, Signal::KILL);
    }
    let status =
        waitpid(Some(process), WaitOptions::empty()).map_err(|error| describe("wait for process", error.into()))?;
    let _only_words_are_missing = hook_io.read_output();
    if !ended? {
        return Err(format!("timed out after {limit:?}{}", hook_io.output_text()));
    }
    let status = status.map(|(_, status)| status);
    let what = match status.map(|status| (status.exit_status(), status.terminating_signal())) {
        Some((Some(0), _)) => return Ok(()),
        Some((Some(code), _)) => format!("exit status {code}"),
        Some((_, Some(signal))) => format!("killed by signal {signal}"),
        _ => "exit status unknown".to_owned(),
    };
    Err(format!("{what}{}", hook_io.output_text()))
}

/// Returns only if the execution failed.
fn become_hook(alone: SingleThreaded, hook: &Hook, cwd: &Path, [input, output]: [&OwnedFd; 2]) -> io::Error {
    let zero_ended = |text: &[u8]| CString::new(text).map_err(io::Error::from);
    let all = |texts: &[String]| texts.iter().map(|text| zero_ended(text.as_bytes())).collect::<io::Result<Vec<_>>>();
    let attempt = || -> io::Result<()> {
        setsid()?;
        // The waiting process may be killed.
        rustix::process::set_parent_process_death_signal(Some(Signal::KILL))?;
        rustix::stdio::dup2_stdin(input)?;
        rustix::stdio::dup2_stdout(output)?;
        rustix::stdio::dup2_stderr(output)?;
        child_process::close_all_but(alone, &[])?;
        // A bundle directory that the hook's user may not enter is only a wrong working directory.
        let _elsewhere = rustix::process::chdir(cwd);
        rustix::process::umask(rustix::fs::Mode::from_raw_mode(0o022));
        child_process::reset_signals()?;
        let path = zero_ended(hook.path.as_os_str().as_bytes())?;
        let args = if hook.args.is_empty() { vec![path.clone()] } else { all(&hook.args)? };
        match nix::unistd::execve(&path, &args, &all(&hook.env)?) {
            Err(error) => Err(error.into()),
            Ok(never) => match never {},
        }
    };
    attempt().err().unwrap_or_else(|| io::Error::other("hook was not executed"))
}

/// Standard input and output of a hook.
struct HookIo<'a> {
    to: Option<OwnedFd>,
    from: Option<OwnedFd>,
    state: &'a [u8],
    output: Vec<u8>,
}

impl HookIo<'_> {
    /// Returns whether the hook exited within the limit; processes it left behind may still write.
    fn until(&mut self, process: &OwnedFd, limit: Duration) -> io::Result<bool> {
        let until = Instant::now() + limit;
        loop {
            let left = until.saturating_duration_since(Instant::now());
            let timeout = Timespec::try_from(left).map_err(io::Error::other)?;
            let mut wanted = vec![PollFd::new(process, PollFlags::IN)];
            wanted.extend(self.from.iter().map(|from| PollFd::new(from, PollFlags::IN)));
            wanted.extend(self.to.iter().map(|to| PollFd::new(to, PollFlags::OUT)));
            match poll(&mut wanted, Some(&timeout)) {
                Err(Errno::INTR) => continue,
                Ok(0) => return Ok(false),
                polled => drop(polled?),
            }
            let has_ended = wanted.first().is_some_and(|process| !process.revents().is_empty());
            drop(wanted);
            if has_ended {
                return Ok(true);
            }
            self.write_state();
            self.read_output()?;
        }
    }

    /// Writes the container state to the hook's stdin, which the hook need not read.
    fn write_state(&mut self) {
        let Some(to) = &self.to else { return };
        match rustix::io::write(to, self.state) {
            Ok(count) => self.state = self.state.get(count..).unwrap_or_default(),
            Err(Errno::AGAIN | Errno::INTR) => return,
            Err(_) => self.state = &[],
        }
        if self.state.is_empty() {
            self.to = None;
        }
    }

    fn read_output(&mut self) -> io::Result<()> {
        let mut buffer = [0_u8; 512];
        while let Some(from) = &self.from {
            match rustix::io::read(from, &mut buffer) {
                Err(Errno::AGAIN) => return Ok(()),
                Err(Errno::INTR) => {}
                Ok(0) => self.from = None,
                Ok(count) => {
                    let room = MAX_OUTPUT.saturating_sub(self.output.len()).min(count);
                    self.output.extend_from_slice(buffer.get(..room).unwrap_or_default());
                }
                Err(error) => return Err(error.into()),
            }
        }
        Ok(())
    }

    fn output_text(&self) -> String {
        let text = String::from_utf8_lossy(&self.output);
        match text.trim() {
            "" => String::new(),
            text => format!(": {text}"),
        }
    }
}
