//! Setup of a child process: cgroups, session keyring, and the pod's namespaces.

use std::{
    fs, io,
    os::fd::{AsFd, BorrowedFd, OwnedFd},
    path::{Path, PathBuf},
};

use nix::{
    libc,
    sched::{CloneFlags, unshare},
};
use rustix::{
    fs::{CWD, Mode, OFlags},
    process::{DumpableBehavior, Pid, PidfdFlags, Signal, pidfd_open},
    thread::{Gid, LinkNameSpaceType, ThreadNameSpaceType, Uid},
};

use super::{
    PodContext,
    error_context::{ErrorContext, Step, failure, reason},
};
use crate::plan::{IdMap, Namespace, PidNamespace};
use berth_sys::child_process;

/// Sets up a helper: it dies with its parent, usually the shim, and its memory is not dumpable.
pub(super) fn setup_helper(parent: Pid) -> Step<()> {
    rustix::process::set_parent_process_death_signal(Some(Signal::KILL)).context(|| "set parent death signal")?;
    // A parent that died before sends no signal any more.
    if rustix::process::getppid() != Some(parent) {
        return Err(failure("shim exited"));
    }
    rustix::process::set_dumpable_behavior(DumpableBehavior::NotDumpable).context(|| "set process not dumpable")
}

/// Joins a session keyring of the container's own, if the kernel provides one.
pub(super) fn join_keyring(container: &str) {
    let _none = child_process::join_keyring(&format!("_ses.{container}"));
}

/// Whether a directory belongs to the cgroup v2 hierarchy.
fn is_unified(group: &Path) -> bool {
    nix::sys::statfs::statfs(group).is_ok_and(|found| found.filesystem_type() == nix::sys::statfs::CGROUP2_SUPER_MAGIC)
}

/// Mount point of cgroup v2, alone or beside v1 (hybrid mode).
pub(super) fn unified_root() -> &'static Path {
    let beside = Path::new("/sys/fs/cgroup/unified");
    if is_unified(beside) { beside } else { Path::new("/sys/fs/cgroup") }
}

/// Whether the cgroups belong to v1 hierarchies.
pub(super) fn is_old(groups: &[PathBuf]) -> bool {
    groups.first().is_some_and(|group| !is_unified(group))
}

/// Opens the cgroup directory in which a process can be created (`CLONE_INTO_CGROUP`); `None` if there is none.
pub(super) fn birth_group(groups: &[PathBuf]) -> Step<Option<OwnedFd>> {
    // Beside v1 hierarchies it would save one move of many, and a cgroup that was killed once accepts no process by
    // creation (`worker::groups::kill_each`).
    let [group] = groups else { return Ok(None) };
    if !is_unified(group) {
        return Ok(None);
    }
    let flags = OFlags::PATH | OFlags::DIRECTORY | OFlags::CLOEXEC;
    let opened = rustix::fs::open(group, flags, Mode::empty());
    opened.map(Some).context(|| format!("open cgroup {}", group.display()))
}

/// Creates a process in its cgroup, by `CLONE_INTO_CGROUP`, or outside it if the kernel refuses; then runs `body`.
///
/// `EBUSY`: the cgroup has child cgroups. `EOPNOTSUPP`: its type accepts no processes. `ENOSYS`, `EINVAL`, and `E2BIG`:
/// the kernel does not support the flag.
pub(super) fn spawn_into(
    alone: child_process::SingleThreaded,
    group: Option<BorrowedFd<'_>>,
    body: impl FnOnce(CreatedIn) -> i32,
) -> Step<u32> {
    let mut body = Some(body);
    let mut run = |born| body.take().map_or(127, |body| body(born));
    let kin = child_process::NewParent::Child;
    let made = match group {
        Some(group) => match child_process::spawn(alone, kin, Some(group), || run(CreatedIn::Inside)) {
            Err(error) if is_refusal(&error) => child_process::spawn(alone, kin, None, || run(CreatedIn::Outside)),
            other => other,
        },
        None => child_process::spawn(alone, kin, None, || run(CreatedIn::Outside)),
    };
    made.context(|| "fork process")
}

/// Cgroup in which a process was created.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum CreatedIn {
    /// In its own cgroup v2 directory.
    Inside,
    /// In the cgroup of the shim.
    Outside,
}

fn is_refusal(error: &io::Error) -> bool {
    matches!(error.raw_os_error(), Some(libc::EBUSY | libc::EOPNOTSUPP | libc::ENOSYS | libc::EINVAL | libc::E2BIG))
}

/// Moves this process into the cgroups that it was not created in.
pub(super) fn enter(groups: &[PathBuf], born: CreatedIn) -> Step<()> {
    for group in groups {
        if born == CreatedIn::Inside && is_unified(group) {
            continue;
        }
        let file = group.join("cgroup.procs");
        fs::write(&file, "0").context(|| format!("join cgroup {}", group.display()))?;
    }
    Ok(())
}

/// Joins the pod's namespaces, the user namespace first, and becomes user 0 there.
pub(super) fn join_pod(around: &PodContext<'_>) -> Step<()> {
    if let Some(users) = around.namespace(Namespace::User) {
        join(users.as_fd(), LinkNameSpaceType::User)?;
        become_root()?;
    }
    for (kind, name) in [
        (Namespace::Network, LinkNameSpaceType::Network),
        (Namespace::Ipc, LinkNameSpaceType::InterProcessCommunication),
        (Namespace::Uts, LinkNameSpaceType::HostNameAndNISDomainName),
    ] {
        if let Some(namespace) = around.namespace(kind) {
            join(namespace.as_fd(), name)?;
        }
    }
    Ok(())
}

fn join(namespace: BorrowedFd<'_>, kind: LinkNameSpaceType) -> Step<()> {
    rustix::thread::move_into_link_name_space(namespace, Some(kind)).context(|| format!("join the {kind:?} namespace"))
}

/// Becomes user and group 0 of a user namespace that was just joined or created.
pub(super) fn become_root() -> Step<()> {
    rustix::thread::set_thread_groups(&[]).context(|| "drop supplementary groups")?;
    let (user, group) = (Uid::ROOT, Gid::ROOT);
    rustix::thread::set_thread_res_gid(group, group, group).context(|| "set gid 0 in the user namespace")?;
    rustix::thread::set_thread_res_uid(user, user, user).context(|| "set uid 0 in the user namespace")?;
    // The kernel clears the signal when the user changes.
    rustix::process::set_parent_process_death_signal(Some(Signal::KILL)).context(|| "set parent death signal")?;
    rustix::process::set_dumpable_behavior(DumpableBehavior::NotDumpable).context(|| "set process not dumpable")
}

/// Opens a process as a pidfd.
pub(super) fn process(pid: u32) -> Step<OwnedFd> {
    let number = i32::try_from(pid).ok().and_then(Pid::from_raw);
    let number = number.ok_or_else(|| failure(format!("process {pid} not found")))?;
    pidfd_open(number, PidfdFlags::empty()).context(|| format!("open process {pid}"))
}

/// Opens the `/proc` directory of a process. It never refers to a later process with the same PID.
pub(super) fn proc_directory(pid: u32) -> Step<OwnedFd> {
    let flags = OFlags::PATH | OFlags::DIRECTORY | OFlags::CLOEXEC;
    rustix::fs::openat(CWD, format!("/proc/{pid}"), flags, Mode::empty()).context(|| format!("open process {pid}"))
}

/// Process whose PID namespace the next child joins; `None` if it joins none.
pub(super) fn target<'a>(processes: &PidNamespace, around: &PodContext<'a>) -> Step<Option<BorrowedFd<'a>>> {
    let (PidNamespace::Of(_) | PidNamespace::Pod) = processes else { return Ok(None) };
    around.target.map(Some).ok_or_else(|| failure("pod does not share its PID namespace"))
}

/// Selects the PID namespace of the next child.
pub(super) fn enter_processes(processes: &PidNamespace, target: Option<BorrowedFd<'_>>) -> Step<()> {
    match target {
        Some(target) => rustix::thread::move_into_thread_name_spaces(target, ThreadNameSpaceType::PROCESS_ID)
            .context(|| "join PID namespace"),
        None if *processes == PidNamespace::Own => unshare(CloneFlags::CLONE_NEWPID).context(|| "create PID namespace"),
        None => Ok(()),
    }
}

/// Opens the host's `/proc`: a container may mount anything there.
pub(super) fn host_proc() -> Step<OwnedFd> {
    rustix::fs::openat(CWD, "/proc", OFlags::PATH | OFlags::DIRECTORY | OFlags::CLOEXEC, Mode::empty())
        .context(|| "open /proc")
}

/// Maps an id of the container to the host; `None` if it is not mapped.
pub(super) fn on_host(id: u32, map: Option<IdMap>) -> Option<u32> {
    let Some(map) = map else { return Some(id) };
    let offset = id.checked_sub(map.inside)?;
    if offset < map.count { map.outside.checked_add(offset) } else { None }
}

/// Sets the OOM score of this process and its descendants; on a refusal the inherited score stays.
pub(super) fn set_oom_score(wanted: Option<i32>) {
    // The shim's own score is -998: a container must not inherit it.
    let text = wanted.unwrap_or(0).to_string();
    if let Err(error) = fs::write("/proc/self/oom_score_adj", text) {
        // AC-09a-X16: without CAP_SYS_RESOURCE the score cannot be lowered.
        let _is_logged_nowhere = reason(&error);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ids_are_mapped_within_their_range() {
        let map = Some(IdMap { inside: 0, outside: 100_000, count: 65_536 });
        assert_eq!(on_host(0, map), Some(100_000));
        assert_eq!(on_host(65_535, map), Some(165_535));
        assert_eq!(on_host(65_536, map), None);
        assert_eq!(on_host(7, None), Some(7));
        assert_eq!(on_host(9, Some(IdMap { inside: 0, outside: u32::MAX, count: 20 })), None);
    }
}
