//! Miniature shim: single-threaded process that launches containers from a busybox root and reaps them.

use std::{
    fs,
    io::{Read, Write},
    os::{
        fd::{AsFd, OwnedFd},
        unix::fs::symlink,
    },
    path::{Path, PathBuf},
    sync::{
        Mutex, PoisonError,
        atomic::{AtomicU32, Ordering},
    },
    time::{Duration, Instant},
};

use berth_shim::{
    child::{LaunchProgress, PodContext, ProcessLaunch, Stdio, begin_exec, begin_launch},
    plan::{
        Access, Capabilities, Device, ExecPlan, IdMap, LaunchPlan, Mount, MountKind, ProcessPlan, Propagation, Root,
        RootKind, ShimFailure,
    },
};
use nix::{
    poll::{PollFd, PollFlags, PollTimeout, poll},
    sys::{
        signal::{SigHandler, Signal, signal},
        wait::{WaitPidFlag, WaitStatus, waitpid},
    },
    unistd::Pid,
};
use tempfile::TempDir;

use super::plans;

/// Deadline of every wait.
pub const PATIENCE: Duration = Duration::from_secs(60);
/// ID mapping of a pod's user namespace.
pub const MAP: IdMap = IdMap { inside: 0, outside: 200_000, count: 65_536 };

/// Capability set of a container whose pod asks for none (spec 09a §7.1).
pub const DEFAULT_CAPABILITIES: u64 = 0xa804_25fb;

/// Returns whether the test runs as root; otherwise prints that it is skipped.
///
/// # Panics
/// The test would be skipped on CI.
pub fn is_root() -> bool {
    let is_root = nix::unistd::geteuid().is_root();
    if !is_root {
        assert!(std::env::var_os("CI").is_none(), "may not be skipped on CI: needs root");
        eprintln!("skipped: needs root");
    }
    is_root
}

/// Fixture of a launch test: layers, upper and work directories, a mount stage, and cgroups; removed on drop.
pub struct LaunchFixture {
    /// Root directory of the fixture.
    pub dir: TempDir,
    groups: Vec<PathBuf>,
}

impl LaunchFixture {
    /// Creates two layers: busybox, and `/etc`.
    pub fn new() -> Self {
        static NUMBER: AtomicU32 = AtomicU32::new(0);
        let dir =
            tempfile::Builder::new().prefix("berth-launch-").tempdir().expect("failed to create temporary directory");
        fs::set_permissions(dir.path(), std::os::unix::fs::PermissionsExt::from_mode(0o711)).expect("settable");
        let at = |name: &str| dir.path().join(name);
        for name in ["layers/1/d/bin", "layers/1/d/tmp", "layers/2/d/etc", "u", "w", "stage"] {
            fs::create_dir_all(at(name)).expect("makeable");
        }
        let busybox = ["/bin/busybox", "/usr/bin/busybox"].into_iter().find(|path| Path::new(path).exists());
        fs::copy(busybox.expect("busybox-static is installed"), at("layers/1/d/bin/busybox"))
            .expect("failed to copy busybox");
        for applet in [
            "sh", "cat", "echo", "id", "ls", "touch", "true", "sleep", "env", "pwd", "hostname", "stat", "mount", "ps",
            "stty", "tty", "kill", "readlink", "grep", "mkdir", "chmod", "wc", "umount",
        ] {
            symlink("busybox", at("layers/1/d/bin").join(applet)).expect("makeable");
        }
        fs::write(at("layers/2/d/etc/passwd"), "root:x:0:0::/:/bin/sh\n").expect("writable");
        let number = NUMBER.fetch_add(1, Ordering::Relaxed);
        let name = format!("berth-launch-{}-{number}", std::process::id());
        let groups = groups().into_iter().map(|root| root.join(&name)).collect::<Vec<_>>();
        for group in &groups {
            fs::create_dir(group).expect("failed to create cgroup");
        }
        Self { dir, groups }
    }

    /// Path below the fixture's directory.
    pub fn at(&self, name: &str) -> PathBuf {
        self.dir.path().join(name)
    }

    /// Creates a directory with one file, `file`, and returns its path.
    pub fn volume(&self, name: &str) -> PathBuf {
        let path = self.at(name);
        fs::create_dir_all(&path).expect("makeable");
        fs::write(path.join("file"), "content\n").expect("writable");
        path
    }

    /// Launch plan of a container with the base mounts.
    pub fn plan(&self, args: &[&str]) -> LaunchPlan {
        LaunchPlan {
            groups: self.groups.clone(),
            root: Root {
                stage: self.at("stage"),
                kind: RootKind::Overlay {
                    layers: self.at("layers"),
                    lower: vec!["2/d".to_owned(), "1/d".to_owned()],
                    upper: self.at("u"),
                    work: self.at("w"),
                    userxattr: false,
                },
                is_read_only: false,
                is_shared: false,
            },
            mounts: base_mounts(),
            devices: vec![device("/dev/null", 3), device("/dev/zero", 5), device("/dev/urandom", 9)],
            process: process(args),
            longest_record: 0,
            ..plans::plain("c", args)
        }
    }

    /// Runs `body` in a forked single-threaded process and panics with the message of its panic.
    ///
    /// # Panics
    /// `body` panicked, or mounts or processes remain afterwards.
    #[allow(unsafe_code, reason = "only a process of one thread may start containers; a test has many")]
    pub fn shim(&self, body: impl FnOnce(&Self)) {
        // Serializes the forks: a child forked while another test prints a failure inherits the lock of the output.
        static ONE: Mutex<()> = Mutex::new(());
        let _one = ONE.lock().unwrap_or_else(PoisonError::into_inner);
        let (mut reader, writer) = std::io::pipe().expect("failed to create pipe");
        // SAFETY: the C library's fork leaves its own locks usable in the child, and the child exits by `_exit`.
        match unsafe { nix::unistd::fork() }.expect("failed to fork") {
            nix::unistd::ForkResult::Child => {
                let hook = writer.try_clone().expect("failed to duplicate descriptor");
                std::panic::set_hook(Box::new(move |info| drop((&hook).write_all(info.to_string().as_bytes()))));
                nix::sys::prctl::set_child_subreaper(true).expect("settable");
                // Another test of the same process may have installed a SIGCHLD handler, which would interrupt system
                // calls.
                // SAFETY: installs no handler, only restores the default, in a single-threaded process.
                unsafe { signal(Signal::SIGCHLD, SigHandler::SigDfl) }.expect("failed to reset SIGCHLD");
                let done = std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| body(self)));
                end_children();
                // SAFETY: ends the copy of the test without running the exit handlers that the test registered.
                unsafe { nix::libc::_exit(i32::from(done.is_err())) }
            }
            nix::unistd::ForkResult::Parent { child } => {
                drop(writer);
                let mut text = String::new();
                reader.read_to_string(&mut text).expect("readable");
                let status = waitpid(child, None).expect("reaped");
                let left = self.left();
                assert_eq!((status, text.as_str()), (WaitStatus::Exited(child, 0), ""), "left: {left:?}");
                assert_eq!(left, Vec::<String>::new());
            }
        }
    }

    /// Mounts and processes that remain.
    fn left(&self) -> Vec<String> {
        let table = fs::read_to_string("/proc/self/mountinfo").expect("readable");
        let name = self.dir.path().display().to_string();
        let mut left: Vec<String> = table.lines().filter(|line| line.contains(&name)).map(str::to_owned).collect();
        for group in &self.groups {
            let text = fs::read_to_string(group.join("cgroup.procs")).expect("readable");
            left.extend(text.lines().map(|pid| format!("process {pid} in {}", group.display())));
        }
        left
    }
}

impl Drop for LaunchFixture {
    fn drop(&mut self) {
        for group in &self.groups {
            let _reported_by_left = fs::remove_dir(group);
        }
    }
}

fn groups() -> Vec<PathBuf> {
    let root = Path::new("/sys/fs/cgroup");
    if root.join("cgroup.controllers").exists() {
        return vec![root.to_owned()];
    }
    let names = ["memory", "pids", "unified"].map(|name| root.join(name));
    names.into_iter().filter(|path| path.is_dir()).collect()
}

/// Kills and reaps the remaining children of a shim.
fn end_children() {
    loop {
        let path = format!("/proc/self/task/{}/children", nix::unistd::gettid());
        let children = fs::read_to_string(path).unwrap_or_default();
        for child in children.split_ascii_whitespace().filter_map(|pid| pid.parse().ok()) {
            let _gone = nix::sys::signal::kill(Pid::from_raw(child), nix::sys::signal::Signal::SIGKILL);
        }
        if waitpid(Pid::from_raw(-1), None).is_err() {
            return;
        }
    }
}

/// Process of user 0 with the default capabilities.
pub fn process(args: &[&str]) -> ProcessPlan {
    let default = DEFAULT_CAPABILITIES;
    ProcessPlan {
        args: args.iter().map(|arg| (*arg).to_owned()).collect(),
        env: vec!["PATH=/usr/bin:/bin".to_owned(), "A=b c".to_owned()],
        cwd: "/".to_owned(),
        groups: vec![0],
        capabilities: Capabilities {
            bounding: default,
            effective: default,
            permitted: default,
            ..Capabilities::default()
        },
        ..ProcessPlan::default()
    }
}

fn device(path: &str, minor: u32) -> Device {
    Device { path: path.to_owned(), kind: 'c', numbers: (1, minor), mode: 0o666, uid: 0, gid: 0 }
}

/// Bind mount of a host path.
pub fn bind(source: &Path, target: &str, access: Access, propagation: Propagation) -> Mount {
    let source = MountKind::Bind(source.to_owned());
    Mount { target: target.to_owned(), source, access, propagation, flags: 0, ids: None }
}

/// Read-only overlay mount of image layers.
pub fn image(bench: &LaunchFixture, target: &str, lower: &[&str]) -> Mount {
    let lower = lower.iter().map(|layer| (*layer).to_owned()).collect();
    let source = MountKind::Layers { layers: bench.at("layers"), lower, sub_path: String::new() };
    let (access, propagation) = (Access::ReadOnly, Propagation::Private);
    Mount { target: target.to_owned(), source, access, propagation, flags: 0, ids: None }
}

/// Mount of a new file system instance of type `kind`.
pub fn new(kind: &str, target: &str, data: &str, access: Access) -> Mount {
    let source = MountKind::New { kind: kind.to_owned(), data: data.to_owned() };
    let flags = nix::libc::MS_NOSUID | nix::libc::MS_NOEXEC | if kind == "devpts" { 0 } else { nix::libc::MS_NODEV };
    let flags = if target == "/dev" { nix::libc::MS_NOSUID | nix::libc::MS_STRICTATIME } else { flags };
    Mount { target: target.to_owned(), source, access, propagation: Propagation::Private, flags, ids: None }
}

fn base_mounts() -> Vec<Mount> {
    vec![
        new("proc", "/proc", "", Access::ReadWrite),
        new("tmpfs", "/dev", "mode=755,size=65536k", Access::ReadWrite),
        new("devpts", "/dev/pts", "newinstance,ptmxmode=0666,mode=0620,gid=5", Access::ReadWrite),
        new("mqueue", "/dev/mqueue", "", Access::ReadWrite),
        new("sysfs", "/sys", "", Access::ReadOnly),
        new("cgroup", "/sys/fs/cgroup", "", Access::ReadOnly),
    ]
}

/// No namespaces of a pod to join.
pub const NOTHING: PodContext<'static> = PodContext { namespaces: &[], target: None, users: None };

/// Running container or exec process.
pub struct RunningProcess {
    /// Process ID in the host's PID namespace.
    pub pid: u32,
    /// Master side of the terminal, if it has one.
    pub terminal: Option<OwnedFd>,
    input: Option<std::io::PipeWriter>,
    output: Option<(std::io::PipeReader, std::io::PipeReader)>,
}

/// Output and exit code of a process that ended.
#[derive(Debug, PartialEq, Eq)]
pub struct ProcessOutput {
    /// Standard output.
    pub out: String,
    /// Standard error.
    pub err: String,
    /// Exit code; 128 + signal number if a signal killed it.
    pub code: i32,
}

type Pipes = (Stdio, std::io::PipeWriter, std::io::PipeReader, std::io::PipeReader);

fn pipes() -> Pipes {
    let ((input, to), (out, output), (err, error)) = (
        std::io::pipe().expect("failed to create pipe"),
        std::io::pipe().expect("failed to create pipe"),
        std::io::pipe().expect("failed to create pipe"),
    );
    (Stdio::Files([input.into(), output.into(), error.into()]), to, out, err)
}

/// Starts a container.
///
/// # Errors
/// The launch failed.
pub fn start(plan: &LaunchPlan, around: &PodContext<'_>) -> Result<RunningProcess, ShimFailure> {
    if plan.process.terminal.is_some() {
        return finish(begin_launch(plan, around, Stdio::Terminal)?, None, None);
    }
    let (stdio, input, out, err) = pipes();
    finish(begin_launch(plan, around, stdio)?, Some(input), Some((out, err)))
}

/// Pending launch, and the pipes of its standard input, output, and error.
pub type PendingLaunch =
    (ProcessLaunch, Option<std::io::PipeWriter>, Option<(std::io::PipeReader, std::io::PipeReader)>);

/// Begins an exec in a container; `init` is the PID of its first process.
///
/// # Errors
/// The exec cannot begin.
pub fn begin(plan: &LaunchPlan, init: u32, process: ProcessPlan) -> Result<PendingLaunch, ShimFailure> {
    let is_terminal = process.terminal.is_some();
    let asked = ExecPlan { container: plan.container.clone(), exec: "e".to_owned(), process, keeps_orphans: false };
    if is_terminal {
        return Ok((begin_exec(&asked, init, &plan.groups, Stdio::Terminal)?, None, None));
    }
    let (stdio, input, out, err) = pipes();
    Ok((begin_exec(&asked, init, &plan.groups, stdio)?, Some(input), Some((out, err))))
}

/// Waits until a pending launch runs.
///
/// # Errors
/// The launch failed.
pub fn conclude_begun(begun: Result<PendingLaunch, ShimFailure>) -> Result<RunningProcess, ShimFailure> {
    begun.and_then(|(launching, input, output)| finish(launching, input, output))
}

/// Runs a process in a container and waits until it runs.
///
/// # Errors
/// The exec failed.
pub fn exec(plan: &LaunchPlan, init: u32, process: ProcessPlan) -> Result<RunningProcess, ShimFailure> {
    conclude_begun(begin(plan, init, process))
}

fn finish(
    launching: ProcessLaunch,
    input: Option<std::io::PipeWriter>,
    output: Option<(std::io::PipeReader, std::io::PipeReader)>,
) -> Result<RunningProcess, ShimFailure> {
    let (pid, terminal) = conclude(launching)?;
    Ok(RunningProcess { pid, terminal, input, output })
}

/// Waits until the program runs; returns its PID and terminal.
///
/// # Errors
/// The launch failed.
pub fn conclude(mut launching: ProcessLaunch) -> Result<(u32, Option<OwnedFd>), ShimFailure> {
    let deadline = Instant::now() + PATIENCE;
    loop {
        match launching.advance() {
            LaunchProgress::Pending(more) => launching = more,
            LaunchProgress::Started { pid, start_ticks, terminal, .. } => {
                assert!(start_ticks > 0);
                return Ok((pid, terminal));
            }
            LaunchProgress::Failed(failure) => return Err(failure),
        }
        assert!(Instant::now() < deadline, "timed out waiting for the launch");
        readable(&launching, deadline);
    }
}

/// Waits until `fd` is readable or the deadline has passed.
pub fn readable(fd: &impl AsFd, deadline: Instant) {
    let left = u16::try_from(deadline.saturating_duration_since(Instant::now()).as_millis()).unwrap_or(u16::MAX);
    poll(&mut [PollFd::new(fd.as_fd(), PollFlags::POLLIN)], PollTimeout::from(left)).expect("pollable");
}

impl RunningProcess {
    /// Closes standard input, reads all output, and waits for the exit.
    pub fn end(mut self) -> ProcessOutput {
        drop(self.input.take());
        let (mut out, mut err) = (String::new(), String::new());
        if let Some((mut from_out, mut from_err)) = self.output.take() {
            from_out.read_to_string(&mut out).expect("text");
            from_err.read_to_string(&mut err).expect("text");
        }
        ProcessOutput { out, err, code: reap(self.pid) }
    }

    /// Reads one line of standard output.
    pub fn line(&mut self) -> String {
        let (out, _) = self.output.as_mut().expect("pipes");
        let (mut line, mut byte) = (Vec::new(), [0]);
        let deadline = Instant::now() + PATIENCE;
        readable(out, deadline);
        while out.read(&mut byte).expect("readable") == 1 && byte != *b"\n" {
            line.extend(byte);
            readable(out, deadline);
        }
        String::from_utf8(line).expect("text")
    }

    /// Writes to standard input.
    pub fn write_input(&mut self, text: &str) {
        self.input.as_mut().expect("pipes").write_all(text.as_bytes()).expect("writable");
    }

    /// Kills the process and waits. PID 1 ends only once its namespace is fully reaped: every child is reaped.
    pub fn kill(self) {
        let pid = Pid::from_raw(self.pid.cast_signed());
        nix::sys::signal::kill(pid, nix::sys::signal::Signal::SIGKILL).expect("there");
        while waitpid(Pid::from_raw(-1), None).expect("no such child process").pid() != Some(pid) {}
    }
}

/// Waits for the exit of a child; returns its exit code, or 128 + signal number.
pub fn reap(pid: u32) -> i32 {
    let deadline = Instant::now() + PATIENCE;
    let pid = Pid::from_raw(pid.cast_signed());
    let fd = rustix::process::pidfd_open(
        rustix::process::Pid::from_raw(pid.as_raw()).expect("invalid PID"),
        rustix::process::PidfdFlags::empty(),
    );
    readable(&fd.expect("no such child process"), deadline);
    match waitpid(pid, Some(WaitPidFlag::WNOHANG)).expect("no such child process") {
        WaitStatus::Exited(_, code) => code,
        WaitStatus::Signaled(_, signal, _) => 128 + signal as i32,
        other => panic!("{other:?}"),
    }
}

/// Runs a container to completion.
///
/// # Errors
/// The launch failed.
pub fn run(plan: &LaunchPlan) -> Result<ProcessOutput, ShimFailure> {
    start(plan, &NOTHING).map(RunningProcess::end)
}

/// Standard output of a shell script in a container; the script must succeed.
pub fn shell(bench: &LaunchFixture, change: impl FnOnce(&mut LaunchPlan), script: &str) -> String {
    let mut plan = bench.plan(&["sh", "-c", script]);
    change(&mut plan);
    stdout_of(run(&plan))
}

/// Standard output of a program that succeeded: exit code 0 and no standard error.
pub fn stdout_of(ended: Result<ProcessOutput, ShimFailure>) -> String {
    let ended = ended.expect("failed to run the container");
    assert_eq!((ended.err.as_str(), ended.code), ("", 0), "{}", ended.out);
    ended.out
}
