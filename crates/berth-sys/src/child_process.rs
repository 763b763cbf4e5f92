//! `clone3` without exec, and the setup a child performs on itself before `execve`.
//!
//! A child that continues in our code inherits only the calling thread: a lock that another thread holds stays locked
//! forever. Therefore only a single-threaded process may clone; [`SingleThreaded`] is the proof, and stays valid in the child.
//! Implements spec 09 D8, 09a §7.5, §10, §11.

use std::{
    fs,
    io::{self, Read},
    os::fd::{AsRawFd, BorrowedFd, FromRawFd, OwnedFd, RawFd},
    panic::{AssertUnwindSafe, catch_unwind},
};

use nix::libc;

/// Proof that the process is single-threaded.
#[derive(Clone, Copy, Debug)]
pub struct SingleThreaded(());

impl SingleThreaded {
    /// Counts the threads of this process.
    ///
    /// # Errors
    /// If there is more than one, or `/proc` cannot be read.
    pub fn check() -> io::Result<Self> {
        match fs::read_dir("/proc/self/task")?.count() {
            1 => Ok(Self(())),
            threads => Err(io::Error::other(format!("cannot fork with {threads} threads"))),
        }
    }
}

/// Parent of a new process.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum NewParent {
    /// The calling process.
    Child,
    /// The parent of the calling process (`CLONE_PARENT`).
    Sibling,
}

/// Creates a process that runs `body` and exits with its result; returns its PID in the caller's namespace.
///
/// `group` is a cgroup v2 directory in which the child is created. `body` never returns to the caller's stack.
///
/// # Errors
/// The kernel's error: `EBUSY` if the cgroup has children of its own, `EOPNOTSUPP` if its type forbids it.
pub fn spawn(
    _: SingleThreaded,
    kin: NewParent,
    group: Option<BorrowedFd<'_>>,
    body: impl FnOnce() -> i32,
) -> io::Result<u32> {
    match clone3(kin, group)? {
        0 => {
            let code = catch_unwind(AssertUnwindSafe(body)).unwrap_or(127);
            // SAFETY: terminates this process without running exit handlers that the parent registered for itself.
            unsafe { libc::_exit(code) }
        }
        child => u32::try_from(child).map_err(|_| io::Error::other("child PID out of range")),
    }
}

/// `CLONE_INTO_CGROUP`: the C library's constant is too narrow for its own value.
const INTO_CGROUP: u64 = 1 << 33;

fn clone3(kin: NewParent, group: Option<BorrowedFd<'_>>) -> io::Result<i64> {
    let mut flags = 0_u64;
    let mut target = 0_u64;
    if let Some(group) = group {
        flags |= INTO_CGROUP;
        target = u64::try_from(group.as_raw_fd()).unwrap_or_default(); // an open descriptor is never negative
    }
    // A sibling notifies our parent as our own exit would; the kernel rejects an exit signal of its own.
    let exit_signal = match kin {
        NewParent::Child => libc::SIGCHLD as u64,
        NewParent::Sibling => {
            flags |= libc::CLONE_PARENT as u64;
            0
        }
    };
    // SAFETY: all zeros is a valid value of this plain struct of integers.
    let mut args: libc::clone_args = unsafe { std::mem::zeroed() };
    args.flags = flags;
    args.exit_signal = exit_signal;
    args.cgroup = target;
    // SAFETY: `args` is a complete struct of that size; no memory is shared and no stack is given, so the child
    // continues in its own copy. The caller proved (`SingleThreaded`) that no other thread can hold a lock the copy inherits.
    let done = unsafe { libc::syscall(libc::SYS_clone3, &raw const args, size_of::<libc::clone_args>()) };
    match (done, io::Error::last_os_error()) {
        (-1, error) if error.raw_os_error() == Some(libc::ENOSYS) && group.is_none() => old_clone(kin),
        (-1, error) => Err(error),
        (child, _) => Ok(child),
    }
}

/// Fallback for a seccomp filter that answers `clone3` with ENOSYS, as those of containers do.
fn old_clone(kin: NewParent) -> io::Result<i64> {
    let flags = match kin {
        NewParent::Child => i64::from(libc::SIGCHLD),
        NewParent::Sibling => i64::from(libc::SIGCHLD | libc::CLONE_PARENT),
    };
    // SAFETY: as in `clone3`: nothing is shared, no stack, no thread-local storage.
    let done = unsafe { libc::syscall(libc::SYS_clone, flags, 0_usize, 0_usize, 0_usize, 0_usize) };
    if done == -1 { Err(io::Error::last_os_error()) } else { Ok(done) }
}

/// Closes every descriptor except standard input, output, and error and those in `keep`.
///
/// Only for a process that [`spawn`] created: the owners of the closed descriptors never run again.
///
/// # Errors
/// The kernel's error.
pub fn close_all_but(_: SingleThreaded, keep: &[RawFd]) -> io::Result<()> {
    let mut keep: Vec<u32> = keep.iter().filter_map(|fd| u32::try_from(*fd).ok()).filter(|fd| *fd > 2).collect();
    keep.sort_unstable();
    keep.dedup();
    let mut first = 3;
    for kept in keep.into_iter().map(Some).chain([None]) {
        let last = kept.map_or(u32::MAX, |kept| kept - 1);
        if first <= last {
            close_range(first, last, 0)?;
        }
        first = kept.map_or(u32::MAX, |kept| kept + 1);
    }
    Ok(())
}

/// Sets close-on-exec on every descriptor except standard input, output, and error.
///
/// # Errors
/// The kernel's error.
pub fn close_on_exec() -> io::Result<()> {
    close_range(3, u32::MAX, libc::CLOSE_RANGE_CLOEXEC)
}

fn close_range(first: u32, last: u32, flags: u32) -> io::Result<()> {
    // SAFETY: three integers. With CLOEXEC nothing is closed; without it, the caller guarantees that nobody uses them.
    match unsafe { libc::syscall(libc::SYS_close_range, first, last, flags) } {
        -1 => Err(io::Error::last_os_error()),
        _ => Ok(()),
    }
}

/// Resets every signal to its default action and unblocks all signals.
///
/// # Errors
/// The kernel's error.
pub fn reset_signals() -> io::Result<()> {
    // Bypasses the C library, which reserves 32 and 33 and rejects changes to them: an ignored one survives execve.
    let default = [0_u64; 4];
    for signal in 1..=libc::SIGRTMAX() {
        // SAFETY: all zeros is the kernel's sigaction with the default action, no flags, and empty mask, which runs no
        // code of ours; no old action is requested. The refusals (KILL, STOP) have no other action than the default.
        unsafe {
            libc::syscall(libc::SYS_rt_sigaction, signal, default.as_ptr(), std::ptr::null_mut::<u64>(), 8_usize);
        }
    }
    nix::sys::signal::SigSet::empty().thread_set_mask().map_err(io::Error::from)
}

/// Sets a resource limit of this process by its number.
///
/// # Errors
/// The kernel's error; raising the hard limit needs a capability.
pub fn set_limit(resource: u32, soft: u64, hard: u64) -> io::Result<()> {
    let limit = libc::rlimit64 { rlim_cur: soft, rlim_max: hard };
    // SAFETY: `limit` outlives the call, and no old limit is requested.
    let done = unsafe {
        libc::syscall(libc::SYS_prlimit64, 0, resource, &raw const limit, std::ptr::null_mut::<libc::rlimit64>())
    };
    if done == -1 { Err(io::Error::last_os_error()) } else { Ok(()) }
}

/// Returns the hard limit of a resource.
///
/// # Errors
/// The kernel's error.
pub fn hard_limit(resource: u32) -> io::Result<u64> {
    let mut limit = libc::rlimit64 { rlim_cur: 0, rlim_max: 0 };
    // SAFETY: no new limit is set, and `limit` is large enough for the result.
    let done =
        unsafe { libc::syscall(libc::SYS_prlimit64, 0, resource, std::ptr::null::<libc::rlimit64>(), &raw mut limit) };
    if done == -1 { Err(io::Error::last_os_error()) } else { Ok(limit.rlim_max) }
}

/// Joins the session keyring of this name, or a new anonymous one if that keyring belongs to another user, so that
/// keys of the session that started the agent are out of reach.
///
/// # Errors
/// The kernel's error; `ENOSYS` and `EDQUOT` mean that no keyring is available.
pub fn join_keyring(name: &str) -> io::Result<()> {
    const JOIN_SESSION_KEYRING: i32 = 1;
    let name = std::ffi::CString::new(name)?;
    for name in [name.as_ptr(), std::ptr::null()] {
        // SAFETY: the name is NUL-terminated and outlives the call; a null pointer is allowed too.
        if unsafe { libc::syscall(libc::SYS_keyctl, JOIN_SESSION_KEYRING, name) } != -1 {
            return Ok(());
        }
    }
    Err(io::Error::last_os_error())
}

/// Loads a seccomp filter: `sock_filter` records of 8 bytes in native byte order.
///
/// # Errors
/// If the length is invalid, or the kernel's error: `EACCES` without `no_new_privs` and CAP_SYS_ADMIN.
pub fn load_filter(program: &[u8], flags: u32) -> io::Result<()> {
    let (records, rest) = program.as_chunks::<8>();
    let length = u16::try_from(records.len()).ok().filter(|length| *length > 0 && rest.is_empty());
    let length = length.ok_or_else(|| io::Error::other("invalid filter length"))?;
    let records: Vec<libc::sock_filter> = records
        .iter()
        .map(|[a, b, jt, jf, k @ ..]| libc::sock_filter {
            code: u16::from_ne_bytes([*a, *b]),
            jt: *jt,
            jf: *jf,
            k: u32::from_ne_bytes(*k),
        })
        .collect();
    let program = libc::sock_fprog { len: length, filter: records.as_ptr().cast_mut() };
    // SAFETY: the kernel copies and verifies `length` records during the call; `records` outlives it.
    let done = unsafe { libc::syscall(libc::SYS_seccomp, libc::SECCOMP_SET_MODE_FILTER, flags, &raw const program) };
    if done == 0 { Ok(()) } else { Err(io::Error::last_os_error()) }
}

/// Takes ownership of a descriptor by the number that the executing process assigned.
///
/// # Errors
/// If no descriptor is open under that number.
pub fn inherited(number: RawFd) -> io::Result<OwnedFd> {
    // SAFETY: only reads a descriptor flag.
    if unsafe { libc::fcntl(number, libc::F_GETFD) } == -1 {
        return Err(io::Error::last_os_error());
    }
    // SAFETY: it is open, and by agreement with the executing process no other owner exists in this process.
    Ok(unsafe { OwnedFd::from_raw_fd(number) })
}

/// Start time of a process in clock ticks since boot (field 22 of `<pid>/stat`), read in the given `/proc`.
///
/// # Errors
/// If there is no such process, or the file cannot be parsed.
pub fn start_ticks(proc: BorrowedFd<'_>, pid: u32) -> io::Result<u64> {
    use rustix::fs::{Mode, OFlags, openat};
    let file = openat(proc, format!("{pid}/stat"), OFlags::RDONLY | OFlags::CLOEXEC, Mode::empty())?;
    let mut stat = String::new();
    fs::File::from(file).read_to_string(&mut stat)?;
    ticks_of(&stat).ok_or_else(|| io::Error::other(format!("failed to parse stat of process {pid}")))
}

/// Parses from the last `)`: the name in the second field may contain anything, also parentheses and blanks.
fn ticks_of(stat: &str) -> Option<u64> {
    stat.rsplit_once(')')?.1.split_ascii_whitespace().nth(19)?.parse().ok()
}

#[cfg(test)]
mod tests {
    use std::os::fd::AsFd;

    use super::*;

    #[test]
    fn a_process_with_threads_may_not_fork() {
        let _other = std::thread::spawn(std::thread::park);
        assert!(SingleThreaded::check().is_err());
    }

    #[test]
    fn start_ticks_come_after_any_name() {
        let stat = "12 (a) b ) S 1 2 3 4 5 6 7 8 9 10 11 12 13 14 15 16 17 18 4711 20";
        assert_eq!(ticks_of(stat), Some(4711));
        assert_eq!(ticks_of("12 (a) S 1"), None);
        let proc = fs::File::open("/proc").expect("openable");
        assert!(start_ticks(proc.as_fd(), std::process::id()).expect("ours") > 0);
    }

    #[test]
    fn a_filter_has_whole_records() {
        assert!(load_filter(&[], 0).is_err());
        assert!(load_filter(&[0; 7], 0).is_err());
    }
}
