//! Pod namespaces: user, network, IPC, and UTS, and the pod's process 1 for a shared PID namespace.
//!
//! A child creates them, the user namespace first so that it owns the others, and sends their descriptors.
//! Implements spec 09a §2.3-§2.5.

use std::{
    collections::BTreeMap,
    fs::{self, File},
    os::fd::{AsFd, BorrowedFd, OwnedFd},
    path::{Component, Path},
    time::{Duration, Instant},
};

use nix::sched::{CloneFlags, unshare};
use rustix::{
    event::{PollFd, PollFlags, Timespec, poll},
    process::{Pid, Signal, WaitOptions, getpid, kill_process, waitpid},
};

use super::{
    error_context::{ErrorContext, Step, failure},
    pod_init, process_setup,
    progress_report::{self, Message, Reporter, Reports},
};
use crate::plan::{FailureKind, IdMap, Namespace, NamespacePlan, ShimFailure};
use berth_sys::{
    child_process::{self, NewParent, SingleThreaded},
    interface,
};

/// Deadline of the creation, which waits for nothing external.
const LIMIT: Duration = Duration::from_secs(10);

/// Result of creating the pod's namespaces.
#[derive(Debug)]
pub struct CreatedNamespaces {
    /// Descriptors of the namespaces, in the order of [`Namespace`].
    pub namespaces: Vec<(Namespace, OwnedFd)>,
    /// PID of the pod's process 1, a child of the shim.
    pub init: Option<u32>,
}

/// Creates a pod's namespaces; its process 1 executes the shim's own program with [`super::POD_INIT`].
///
/// # Errors
/// If the shim has more than one thread, or the kernel's error; nothing is left then.
pub fn make_namespaces(plan: &NamespacePlan) -> Result<CreatedNamespaces, ShimFailure> {
    let program = File::open("/proc/self/exe").context(|| "open shim executable")?;
    make_namespaces_with(plan, program.as_fd())
}

/// As [`make_namespaces`], with the program of process 1 as a descriptor.
///
/// # Errors
/// As [`make_namespaces`].
pub fn make_namespaces_with(plan: &NamespacePlan, program: BorrowedFd<'_>) -> Result<CreatedNamespaces, ShimFailure> {
    let alone = SingleThreaded::check().context(|| "create namespaces")?;
    let (reports, reporter) = progress_report::pair()?;
    let parent = getpid();
    let maker = child_process::spawn(alone, NewParent::Child, None, || {
        let done = make((alone, parent), plan, &reporter, program);
        done.map_or_else(|failure| super::exec_setup::report_failure(&reporter, &failure), |()| 0)
    });
    let maker = maker.context(|| "fork process")?;
    drop(reporter);
    let gathered = collect_reports(plan, &reports, maker);
    end(maker);
    match gathered {
        (made, None) if plan.shares_processes == made.init.is_some() => Ok(made),
        (made, reason) => {
            made.init.into_iter().for_each(end);
            Err(reason.unwrap_or_else(|| failure("init process of the pod was not created")))
        }
    }
}

/// Kills and reaps a child that has no more work.
fn end(child: u32) {
    if let Some(pid) = i32::try_from(child).ok().and_then(Pid::from_raw) {
        let _gone = kill_process(pid, Signal::KILL);
        // The event loop may have reaped it.
        let _gone = waitpid(Some(pid), WaitOptions::empty());
    }
}

/// Collects the child's reports until it ends.
fn collect_reports(plan: &NamespacePlan, reports: &Reports, maker: u32) -> (CreatedNamespaces, Option<ShimFailure>) {
    let deadline = Instant::now() + LIMIT;
    let mut made = CreatedNamespaces { namespaces: Vec::new(), init: None };
    loop {
        let message = match next(reports, deadline) {
            Ok(Some(message)) => message,
            Ok(None) => break,
            Err(failure) => return (made, Some(failure)),
        };
        match message {
            Message::Unmapped => {
                let mapped = plan.users.ok_or_else(|| failure("no ID mappings for the user namespace"));
                if let Err(failure) = mapped.and_then(|maps| map_ids(maker, maps)).and_then(|()| reports.go()) {
                    return (made, Some(failure));
                }
            }
            Message::Namespace(kind, fd) => made.namespaces.push((kind, fd)),
            Message::Process { pid, .. } => made.init = Some(pid),
            Message::Failed(failure) => return (made, Some(failure)),
            Message::Terminal(_) | Message::Executes => {}
        }
    }
    made.namespaces.sort_by_key(|(kind, _)| *kind);
    let kinds: Vec<Namespace> = made.namespaces.iter().map(|(kind, _)| *kind).collect();
    let mut wanted = plan.made.clone();
    wanted.sort_unstable();
    wanted.dedup();
    let missing = (kinds != wanted).then(|| failure("process creating namespaces was killed"));
    (made, missing)
}

fn next(reports: &Reports, deadline: Instant) -> Step<Option<Message>> {
    loop {
        match reports.next() {
            Err(error) if error.kind() == std::io::ErrorKind::WouldBlock => {}
            other => return other.context(|| "read report of child process"),
        }
        let left = deadline.saturating_duration_since(Instant::now());
        if left.is_zero() {
            let text = format!("creating namespaces timed out after {LIMIT:?}");
            return Err(ShimFailure { kind: FailureKind::Deadline, text });
        }
        let left = Timespec { tv_sec: i64::try_from(left.as_secs()).unwrap_or(1), tv_nsec: left.subsec_nanos().into() };
        match poll(&mut [PollFd::new(reports, PollFlags::IN)], Some(&left)) {
            Ok(_) | Err(rustix::io::Errno::INTR) => {}
            Err(error) => return Err(error).context(|| "wait for child process"),
        }
    }
}

fn map_ids(pid: u32, (users, groups): (IdMap, IdMap)) -> Step<()> {
    for (file, map) in [("gid_map", groups), ("uid_map", users)] {
        let line = format!("{} {} {}\n", map.inside, map.outside, map.count);
        fs::write(format!("/proc/{pid}/{file}"), &line).context(|| format!("write {:?} to {file}", line.trim()))?;
    }
    Ok(())
}

/// Creates the namespaces; runs in the child.
fn make(
    (alone, parent): (SingleThreaded, Pid),
    plan: &NamespacePlan,
    reporter: &Reporter,
    program: BorrowedFd<'_>,
) -> Step<()> {
    process_setup::setup_helper(parent)?;
    let has = |kind| plan.made.contains(&kind);
    if has(Namespace::User) {
        unshare(CloneFlags::CLONE_NEWUSER).context(|| "create user namespace")?;
        reporter.unmapped()?;
        reporter.wait()?;
        process_setup::become_root()?;
    }
    let mut flags = CloneFlags::empty();
    flags.set(CloneFlags::CLONE_NEWNET, has(Namespace::Network));
    flags.set(CloneFlags::CLONE_NEWIPC, has(Namespace::Ipc));
    flags.set(CloneFlags::CLONE_NEWUTS, has(Namespace::Uts));
    unshare(flags).context(|| "create namespaces")?;
    if has(Namespace::Uts) {
        nix::unistd::sethostname(&plan.hostname).context(|| format!("set hostname {:?}", plan.hostname))?;
    }
    if has(Namespace::Network) {
        interface::set_loopback_up().context(|| "set lo up")?;
    }
    set_kernel(&plan.sysctls)?;
    for (kind, name) in
        [(Namespace::User, "user"), (Namespace::Network, "net"), (Namespace::Ipc, "ipc"), (Namespace::Uts, "uts")]
    {
        if has(kind) {
            let file = File::open(format!("/proc/self/ns/{name}")).context(|| format!("open {name} namespace"))?;
            reporter.namespace(kind, file.as_fd())?;
        }
    }
    if plan.shares_processes { pod_init::start(alone, reporter, program) } else { Ok(()) }
}

/// Writes sysctls; those of networking and IPC apply to this process's namespaces.
fn set_kernel(settings: &BTreeMap<String, String>) -> Step<()> {
    for (name, value) in settings {
        let is_plain = Path::new(name).components().all(|part| matches!(part, Component::Normal(_)));
        if !is_plain {
            return Err(failure(format!("invalid sysctl {name:?}")));
        }
        fs::write(Path::new("/proc/sys").join(name), value).context(|| format!("set sysctl {name} to {value:?}"))?;
    }
    Ok(())
}

/// Creates a user namespace with these mappings and without a process.
pub(super) fn user_namespace(alone: SingleThreaded, maps: (IdMap, IdMap)) -> Step<OwnedFd> {
    let (reports, reporter) = progress_report::pair()?;
    let parent = getpid();
    let holder = child_process::spawn(alone, NewParent::Child, None, || {
        let hold = || -> Step<()> {
            process_setup::setup_helper(parent)?;
            unshare(CloneFlags::CLONE_NEWUSER).context(|| "create user namespace")?;
            let file = File::open("/proc/self/ns/user").context(|| "open user namespace")?;
            reporter.namespace(Namespace::User, file.as_fd())?;
            reporter.wait()
        };
        hold().map_or_else(|failure| super::exec_setup::report_failure(&reporter, &failure), |()| 0)
    });
    let holder = holder.context(|| "fork process")?;
    drop(reporter);
    let made = match next(&reports, Instant::now() + LIMIT) {
        Ok(Some(Message::Namespace(_, namespace))) => map_ids(holder, maps).map(|()| namespace),
        Ok(Some(Message::Failed(failure))) | Err(failure) => Err(failure),
        Ok(_) => Err(failure("process creating the user namespace was killed")),
    };
    end(holder);
    made
}
