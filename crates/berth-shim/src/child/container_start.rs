//! Container start: the helper's work and the first process up to `execve`.
//!
//! Implements spec 09a §10, steps 3 to 9.

use std::{
    io::Read,
    os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd},
    path::Path,
    time::Instant,
};

use nix::{
    fcntl::OFlag,
    libc,
    sched::{CloneFlags, unshare},
};
use rustix::{
    fs::{FileType, Mode, Uid},
    process::{Pid, getpid, setsid},
};

use super::{
    PodContext, ProcessLaunch, Stdio, devices,
    error_context::{ErrorContext, Step, failure},
    exec_setup::{self, ExecSetup, report_failure},
    hooks, identity, mount_setup,
    mounts::{self, PreparedMount},
    process_setup::{self, CreatedIn},
    progress_report::{self, Reporter},
    root, terminal,
};
use crate::plan::{HookPoint, IdMap, LaunchPlan, MountKind, Namespace, StartTimings};
use berth_sys::{
    child_process::{self, NewParent, SingleThreaded},
    failpoint,
    in_root::{self, CreateKind},
    mount_api::{self, Change, MountScope},
};

/// Starts a container. Only operations that cannot hang happen before this returns; poll the result.
///
/// # Errors
/// If the shim has more than one thread, or no process can be created.
pub fn begin_launch(plan: &LaunchPlan, around: &PodContext<'_>, stdio: Stdio) -> Step<ProcessLaunch> {
    let alone = SingleThreaded::check().context(|| "start container")?;
    let (reports, reporter) = progress_report::pair()?;
    let group = process_setup::birth_group(&plan.groups)?;
    let parent = getpid();
    let hooks = hooks::begin(alone, plan.hooks.as_deref(), &reporter)?;
    let line = hooks.as_ref().map(|begun| &begun.line);
    let helper = process_setup::spawn_into(alone, group.as_ref().map(AsFd::as_fd), |born| {
        let helper = Helper { alone, parent, plan, around, reporter: &reporter, line };
        helper.run(stdio, born).map_or_else(|failure| report_failure(&reporter, &failure), |()| 0)
    })?;
    ProcessLaunch::new(reports, helper, hooks.map(|begun| begun.runner))
}

/// Results of the helper that the container's process uses.
struct LaunchState {
    root: OwnedFd,
    mounts: Vec<PreparedMount>,
    devices: Option<Vec<OwnedFd>>,
    host_proc: OwnedFd,
    stdio: Stdio,
    /// When the helper began, and when the root was assembled.
    times: [Instant; 2],
}

struct Helper<'a> {
    alone: SingleThreaded,
    parent: Pid,
    plan: &'a LaunchPlan,
    around: &'a PodContext<'a>,
    reporter: &'a Reporter,
    line: Option<&'a hooks::RunnerSocket>,
}

impl Helper<'_> {
    /// Does everything that needs the host's paths and privileges, then joins the pod's namespaces.
    fn run(&self, stdio: Stdio, born: CreatedIn) -> Step<()> {
        let begun = Instant::now();
        let (plan, around) = (self.plan, self.around);
        self.close_others(&stdio)?;
        process_setup::setup_helper(self.parent)?;
        failpoint::reached("helper.born");
        process_setup::enter(&plan.groups, born)?;
        failpoint::reached("helper.grouped");
        process_setup::join_keyring(&plan.container);
        process_setup::set_oom_score(plan.process.oom_score_adj);
        identity::raise_limits(&plan.process);
        rustix::process::umask(Mode::empty());
        let users = around.users.filter(|_| around.namespace(Namespace::User).is_some());
        chown_pipes(&stdio, plan.process.uid, users.map(|(users, _)| users));
        let target = process_setup::target(&plan.processes, around)?;
        let host_proc = process_setup::host_proc()?;
        let mut mounts = mounts::prepare(self.alone, &plan.mounts, &plan.groups, around)?;
        unshare(CloneFlags::CLONE_NEWNS).context(|| "create mount namespace")?;
        mount_api::change_root(libc::MS_SLAVE, MountScope::Tree).context(|| "set mount propagation to slave")?;
        root::open_stage(&plan.root.stage)?;
        for (mount, ready) in plan.mounts.iter().zip(&mut mounts) {
            if matches!(mount.source, MountKind::Layers { .. }) {
                *ready = root::layers(self.alone, plan, mount, around)?;
            }
        }
        let root = root::make(plan, around)?;
        let times = [begun, Instant::now()];
        failpoint::reached("helper.rooted");
        let devices = users_devices(plan, around)?;
        process_setup::join_pod(around)?;
        let mut more = CloneFlags::empty();
        more.set(CloneFlags::CLONE_NEWCGROUP, plan.has_group_namespace);
        more.set(CloneFlags::CLONE_NEWNS, users.is_some());
        unshare(more).context(|| "create namespaces of the container")?;
        process_setup::enter_processes(&plan.processes, target)?;
        failpoint::reached("helper.joined");
        self.start(LaunchState { root, mounts, devices, host_proc, stdio, times })
    }

    /// Closes descriptors that the shim has open for other containers.
    fn close_others(&self, stdio: &Stdio) -> Step<()> {
        let mut keep = vec![self.reporter.number()];
        keep.extend(self.line.map(hooks::RunnerSocket::number));
        keep.extend(self.around.target.map(|target| target.as_raw_fd()));
        keep.extend(self.around.namespaces.iter().map(|(_, fd)| fd.as_raw_fd()));
        if let Stdio::Files(files) = stdio {
            keep.extend(files.iter().map(AsRawFd::as_raw_fd));
        }
        child_process::close_all_but(self.alone, &keep).context(|| "close descriptors")
    }

    /// Creates the container's process as a child of the shim, and releases it once the shim knows about it.
    fn start(&self, parts: LaunchState) -> Step<()> {
        let host_proc = rustix::io::fcntl_dupfd_cloexec(&parts.host_proc, 3).context(|| "duplicate descriptor")?;
        let StartGate { wait, release } = StartGate::new()?;
        let [begun, rooted] = parts.times;
        let mut waiting = Some((parts, wait, release));
        let spawned = child_process::spawn(self.alone, NewParent::Sibling, None, || {
            let Some((parts, wait, release)) = waiting.take() else { return 127 };
            drop(release);
            let run = || -> Step<i32> {
                StartGate::wait(wait)?;
                Inside { alone: self.alone, plan: self.plan, reporter: self.reporter, line: self.line, parts }.run()
            };
            run().unwrap_or_else(|failure| report_failure(self.reporter, &failure))
        });
        let pid = spawned.context(|| "fork container process")?;
        failpoint::reached("helper.spawned");
        let micros = |from: Instant, to: Instant| u32::try_from((to - from).as_micros()).unwrap_or(u32::MAX);
        let took = StartTimings { root: micros(begun, rooted), clone: micros(rooted, Instant::now()) };
        announce(self.reporter, host_proc.as_fd(), pid, took)?;
        self.line.map_or(Ok(()), |line| line.process(pid))?;
        failpoint::reached("helper.announced");
        let (_, _, release) = waiting.ok_or_else(|| failure("forked process returned in its parent's role"))?;
        StartGate::release(release)
    }
}

/// Reports the process to the shim while it cannot have exited unobserved.
pub(super) fn announce(reporter: &Reporter, host_proc: BorrowedFd<'_>, pid: u32, took: StartTimings) -> Step<()> {
    let ticks = child_process::start_ticks(host_proc, pid).context(|| format!("read start time of process {pid}"))?;
    reporter.process(pid, ticks, took)
}

/// Pipe that blocks a new process until the shim knows about it; the process exits if its helper dies before.
pub(super) struct StartGate {
    pub(super) wait: OwnedFd,
    pub(super) release: OwnedFd,
}

impl StartGate {
    pub(super) fn new() -> Step<Self> {
        let (wait, release) = nix::unistd::pipe2(OFlag::O_CLOEXEC).context(|| "create pipe")?;
        Ok(Self { wait, release })
    }

    pub(super) fn wait(wait: OwnedFd) -> Step<()> {
        let mut byte = [0_u8; 1];
        std::fs::File::from(wait).read_exact(&mut byte).context(|| "helper process was killed")
    }

    pub(super) fn release(release: OwnedFd) -> Step<()> {
        rustix::io::write(&release, b"G").map(drop).context(|| "resume container process")
    }
}

/// Changes the owner of pipes to the container's user, who may reopen them as `/dev/stdout`.
pub(super) fn chown_pipes(stdio: &Stdio, uid: u32, users: Option<IdMap>) {
    let (Stdio::Files(files), Some(uid)) = (stdio, process_setup::on_host(uid, users)) else { return };
    for file in files {
        let is_pipe = rustix::fs::fstat(file).is_ok_and(|s| FileType::from_raw_mode(s.st_mode) == FileType::Fifo);
        if is_pipe {
            // A failure only prevents the reopen.
            let _refused = rustix::fs::fchown(file, Some(Uid::from_raw(uid)), None);
        }
    }
}

/// Whether `/dev` is a file system of the container's own.
fn has_own_dev(plan: &LaunchPlan) -> bool {
    let last = plan.mounts.iter().rev().find(|mount| Path::new(&mount.target) == Path::new("/dev"));
    !last.is_some_and(|mount| matches!(mount.source, MountKind::Bind(_) | MountKind::Layers { .. }))
}

fn users_devices(plan: &LaunchPlan, around: &PodContext<'_>) -> Step<Option<Vec<OwnedFd>>> {
    match (around.users, around.namespace(Namespace::User)) {
        (Some(users), Some(_)) if has_own_dev(plan) => devices::stage(&plan.devices, users).map(Some),
        _ => Ok(None),
    }
}

/// The container's process, in all its namespaces.
struct Inside<'a> {
    alone: SingleThreaded,
    plan: &'a LaunchPlan,
    reporter: &'a Reporter,
    line: Option<&'a hooks::RunnerSocket>,
    parts: LaunchState,
}

impl Inside<'_> {
    /// Sets up the process and executes the program. Returns only on failure.
    fn run(self) -> Step<i32> {
        let plan = self.plan;
        setsid().context(|| "create session")?;
        let profile = exec_setup::open_profile(&plan.process, self.parts.host_proc.as_fd())?;
        let root = self.parts.root.as_fd();
        mount_setup::root(root)?;
        for (mount, ready) in plan.mounts.iter().zip(&self.parts.mounts) {
            mount_setup::mount(root, mount, ready)?;
        }
        let slave = self.dev(root)?;
        self.line.map_or(Ok(()), hooks::RunnerSocket::rooted)?;
        if let Some(hooks) = &plan.hooks {
            hooks::execute(self.alone, hooks, HookPoint::CreateContainer, Some(std::process::id()))?;
        }
        mount_setup::mask(root, &plan.masked)?;
        mount_setup::protect(root, &plan.read_only)?;
        in_root::open_or_make(root, Path::new(&plan.process.cwd), CreateKind::Directory)
            .context(|| format!("create working directory {}", plan.process.cwd))?;
        if plan.root.is_read_only {
            let change = Change { set: libc::MOUNT_ATTR_RDONLY, ..Change::default() };
            mount_api::change(root, MountScope::Top, change).context(|| "remount root read-only")?;
        }
        mount_setup::pivot(root, plan.root.is_shared)?;
        exec_setup::take_stdio(self.parts.stdio, slave)?;
        let hooks = plan.hooks.as_deref();
        let last = ExecSetup { process: &plan.process, reporter: self.reporter, profile, hooks, line: self.line };
        Ok(exec_setup::execute(self.alone, last))
    }

    /// Sets up devices, links, and terminal; returns the pty's slave.
    fn dev(&self, root: BorrowedFd<'_>) -> Step<Option<OwnedFd>> {
        let is_ours = has_own_dev(self.plan);
        if is_ours {
            devices::install(root, &self.plan.devices, self.parts.devices.as_deref())?;
            devices::link(root)?;
        }
        let Stdio::Terminal = self.parts.stdio else { return Ok(None) };
        let size = self.plan.process.terminal.unwrap_or_default();
        let made = terminal::make(root, size, self.plan.process.uid)?;
        self.reporter.terminal(made.master.as_fd())?;
        if is_ours {
            devices::console(root, &made.slave)?;
        }
        Ok(Some(made.slave))
    }
}
