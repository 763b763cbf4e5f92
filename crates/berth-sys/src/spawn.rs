//! Processes made by `clone3` without a program of their own, and what they do to themselves before they execute one.
//!
//! A child that goes on in our code inherits only the calling thread: a lock another thread holds stays locked for
//! ever. So only a process that has one thread may do it; [`Alone`] is the proof, and a child that has it keeps it.
//! Behaviour: spec 09 D8, 09a §7.5, §10, §11.

use std::{
    fs,
    io::{self, Read},
    os::fd::{AsRawFd, BorrowedFd, FromRawFd, OwnedFd, RawFd},
    panic::{AssertUnwindSafe, catch_unwind},
};

use nix::libc;

/// Proof that the process has one thread.
#[derive(Clone, Copy, Debug)]
pub struct Alone(());

impl Alone {
    /// Counts the threads.
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

/// Whose child a new process is.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Kin {
    /// Ours.
    Child,
    /// Our parent's.
    Sibling,
}

/// Makes a process that does `body` and ends with its result; returns its number as this process sees it.
///
/// `group` is a directory of the unified hierarchy it is born into. Nothing of `body` returns to the caller's stack.
///
/// # Errors
/// What the kernel says: `EBUSY` where the group has groups of its own, `EOPNOTSUPP` where its type forbids it.
pub fn spawn(_: Alone, kin: Kin, group: Option<BorrowedFd<'_>>, body: impl FnOnce() -> i32) -> io::Result<u32> {
    match clone3(kin, group)? {
        0 => {
            let code = catch_unwind(AssertUnwindSafe(body)).unwrap_or(127);
            // SAFETY: ends this process without running what the parent registered for its own end.
            unsafe { libc::_exit(code) }
        }
        child => u32::try_from(child).map_err(|_| io::Error::other("the child's number is out of range")),
    }
}

/// The C library's constant is too narrow for its own value.
const INTO_CGROUP: u64 = 1 << 33;

fn clone3(kin: Kin, group: Option<BorrowedFd<'_>>) -> io::Result<i64> {
    let mut flags = 0_u64;
    let mut target = 0_u64;
    if let Some(group) = group {
        flags |= INTO_CGROUP;
        target = u64::try_from(group.as_raw_fd()).unwrap_or_default(); // an open descriptor is never negative
    }
    // A sibling tells our parent what we would tell it; the kernel refuses a signal of its own.
    let exit_signal = match kin {
        Kin::Child => libc::SIGCHLD as u64,
        Kin::Sibling => {
            flags |= libc::CLONE_PARENT as u64;
            0
        }
    };
    // SAFETY: all zeros is a valid value of this plain record of numbers.
    let mut args: libc::clone_args = unsafe { std::mem::zeroed() };
    args.flags = flags;
    args.exit_signal = exit_signal;
    args.cgroup = target;
    // SAFETY: `args` is a whole record of that size; no memory is shared and no stack is given, so the child goes on
    // in its own copy. The caller proved (`Alone`) that no other thread can hold a lock the copy inherits.
    let done = unsafe { libc::syscall(libc::SYS_clone3, &raw const args, size_of::<libc::clone_args>()) };
    match (done, io::Error::last_os_error()) {
        (-1, error) if error.raw_os_error() == Some(libc::ENOSYS) && group.is_none() => old_clone(kin),
        (-1, error) => Err(error),
        (child, _) => Ok(child),
    }
}

/// Where a filter answers `clone3` with ENOSYS, as those of containers do.
fn old_clone(kin: Kin) -> io::Result<i64> {
    let flags = match kin {
        Kin::Child => i64::from(libc::SIGCHLD),
        Kin::Sibling => i64::from(libc::SIGCHLD | libc::CLONE_PARENT),
    };
    // SAFETY: as in `clone3`: nothing is shared, no stack, no thread-local storage.
    let done = unsafe { libc::syscall(libc::SYS_clone, flags, 0_usize, 0_usize, 0_usize, 0_usize) };
    if done == -1 { Err(io::Error::last_os_error()) } else { Ok(done) }
}

/// Closes every descriptor but standard input, output, error and those given.
///
/// Only for a process that [`spawn`] made: the owners of the closed descriptors never run again.
///
/// # Errors
/// What the kernel says.
pub fn close_all_but(_: Alone, keep: &[RawFd]) -> io::Result<()> {
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

/// Makes every descriptor but standard input, output and error close at the next `execve`.
///
/// # Errors
/// What the kernel says.
pub fn close_on_exec() -> io::Result<()> {
    close_range(3, u32::MAX, libc::CLOSE_RANGE_CLOEXEC)
}

fn close_range(first: u32, last: u32, flags: u32) -> io::Result<()> {
    // SAFETY: three numbers. With flags nothing is closed; without, the caller says nobody uses them any more.
    match unsafe { libc::syscall(libc::SYS_close_range, first, last, flags) } {
        -1 => Err(io::Error::last_os_error()),
        _ => Ok(()),
    }
}

/// Makes every signal do again what it does by itself, and lets all through.
///
/// # Errors
/// What the kernel says.
pub fn reset_signals() -> io::Result<()> {
    // Past the C library: it keeps 32 and 33 to itself and refuses to touch them, and an ignored one outlives execve.
    let default = [0_u64; 4];
    for signal in 1..=libc::SIGRTMAX() {
        // SAFETY: all zero is the kernel's sigaction with the default action, no flags and an empty mask, which runs no
        // code of ours; nothing is asked back. The refusals (KILL, STOP) have no other action than the default.
        unsafe {
            libc::syscall(libc::SYS_rt_sigaction, signal, default.as_ptr(), std::ptr::null_mut::<u64>(), 8_usize);
        }
    }
    nix::sys::signal::SigSet::empty().thread_set_mask().map_err(io::Error::from)
}

/// Sets a resource limit of this process by its number.
///
/// # Errors
/// What the kernel says; raising the hard limit needs a capability.
pub fn set_limit(resource: u32, soft: u64, hard: u64) -> io::Result<()> {
    let limit = libc::rlimit64 { rlim_cur: soft, rlim_max: hard };
    // SAFETY: `limit` lives over the call, and nothing is asked back.
    let done = unsafe {
        libc::syscall(libc::SYS_prlimit64, 0, resource, &raw const limit, std::ptr::null_mut::<libc::rlimit64>())
    };
    if done == -1 { Err(io::Error::last_os_error()) } else { Ok(()) }
}

/// The hard limit of a resource.
///
/// # Errors
/// What the kernel says.
pub fn hard_limit(resource: u32) -> io::Result<u64> {
    let mut limit = libc::rlimit64 { rlim_cur: 0, rlim_max: 0 };
    // SAFETY: nothing is set, and `limit` has room for the answer.
    let done =
        unsafe { libc::syscall(libc::SYS_prlimit64, 0, resource, std::ptr::null::<libc::rlimit64>(), &raw mut limit) };
    if done == -1 { Err(io::Error::last_os_error()) } else { Ok(limit.rlim_max) }
}

/// Joins the session keyring of a name, or a nameless new one where that is another's, so that keys of the session that
/// started us are out of reach.
///
/// # Errors
/// What the kernel says; `ENOSYS` and `EDQUOT` mean that there are none to be had.
pub fn join_keyring(name: &str) -> io::Result<()> {
    const JOIN_SESSION_KEYRING: i32 = 1;
    let name = std::ffi::CString::new(name)?;
    for name in [name.as_ptr(), std::ptr::null()] {
        // SAFETY: the name ends with a zero and lives over the call; none is allowed too.
        if unsafe { libc::syscall(libc::SYS_keyctl, JOIN_SESSION_KEYRING, name) } != -1 {
            return Ok(());
        }
    }
    Err(io::Error::last_os_error())
}

/// Sets a seccomp filter: `sock_filter` records of 8 bytes in the machine's byte order.
///
/// # Errors
/// If the length is odd, or what the kernel says: `EACCES` without `no_new_privs` and CAP_SYS_ADMIN.
pub fn load_filter(program: &[u8], flags: u32) -> io::Result<()> {
    let (records, rest) = program.as_chunks::<8>();
    let length = u16::try_from(records.len()).ok().filter(|length| *length > 0 && rest.is_empty());
    let length = length.ok_or_else(|| io::Error::other("the filter has no valid length"))?;
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
    // SAFETY: the kernel copies `length` records during the call and checks them; `records` outlives it.
    let done = unsafe { libc::syscall(libc::SYS_seccomp, libc::SECCOMP_SET_MODE_FILTER, flags, &raw const program) };
    if done == 0 { Ok(()) } else { Err(io::Error::last_os_error()) }
}

/// A descriptor by the number the process that executed us gave it.
///
/// # Errors
/// If nothing is open under that number.
pub fn inherited(number: RawFd) -> io::Result<OwnedFd> {
    // SAFETY: only asks for a flag.
    if unsafe { libc::fcntl(number, libc::F_GETFD) } == -1 {
        return Err(io::Error::last_os_error());
    }
    // SAFETY: it is open, and by agreement with who executed us nobody else in this process knows it.
    Ok(unsafe { OwnedFd::from_raw_fd(number) })
}

/// Field 22 of `<pid>/stat` in a `/proc`: when the process started, in clock ticks since boot.
///
/// # Errors
/// If there is no such process, or the file is not understood.
pub fn start_ticks(proc: BorrowedFd<'_>, pid: u32) -> io::Result<u64> {
    use rustix::fs::{Mode, OFlags, openat};
    let file = openat(proc, format!("{pid}/stat"), OFlags::RDONLY | OFlags::CLOEXEC, Mode::empty())?;
    let mut stat = String::new();
    fs::File::from(file).read_to_string(&mut stat)?;
    ticks_of(&stat).ok_or_else(|| io::Error::other(format!("stat of process {pid} is not understood")))
}

/// The name in the second field may hold anything, also parentheses and blanks.
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
        assert!(Alone::check().is_err());
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
