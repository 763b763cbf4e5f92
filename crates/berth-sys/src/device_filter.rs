//! eBPF device filter of a cgroup v2: loads and attaches the program (`bpf(2)`).
//!
//! Implements spec 09a §9.4.

use std::{
    io,
    os::fd::{AsRawFd, BorrowedFd, FromRawFd, OwnedFd},
};

use nix::libc;

const LOAD: libc::c_int = 5;
const ATTACH: libc::c_int = 8;
const DETACH: libc::c_int = 9;
const BY_ID: libc::c_int = 13;
const QUERY: libc::c_int = 16;
/// `BPF_PROG_TYPE_CGROUP_DEVICE`
const DEVICE_PROGRAM: u32 = 15;
/// `BPF_CGROUP_DEVICE`
const DEVICE: u32 = 6;
/// `BPF_F_ALLOW_MULTI`
const ALLOW_MULTI: u32 = 2;
/// Maximum number of attached programs queried; a cgroup of ours has one, or two during a replacement.
const MOST: usize = 16;

#[repr(C)]
#[derive(Default)]
struct Load {
    kind: u32,
    count: u32,
    instructions: u64,
    license: u64,
    log_level: u32,
    log_size: u32,
    log: u64,
    kernel_version: u32,
    flags: u32,
}

#[repr(C)]
#[derive(Default)]
struct Attach {
    group: u32,
    program: u32,
    kind: u32,
    flags: u32,
}

#[repr(C)]
#[derive(Default)]
struct Query {
    group: u32,
    kind: u32,
    flags: u32,
    attached_flags: u32,
    ids: u64,
    count: u32,
    padding: u32,
}

#[repr(C)]
#[derive(Default)]
struct ById {
    id: u32,
    next: u32,
    flags: u32,
}

/// Replaces the programs attached to a cgroup. At no time is the cgroup without a program.
///
/// # Errors
/// The kernel's error: it lacks such programs, rejects this one, or denies permission.
pub fn replace(group: BorrowedFd<'_>, program: &[u64]) -> io::Result<()> {
    let earlier = attached(group)?;
    let new = load(program)?;
    let attach =
        |program: &OwnedFd, flags| Attach { group: number(&group), program: number(program), kind: DEVICE, flags };
    // SAFETY: the struct contains integers only.
    unsafe { bpf(ATTACH, &mut attach(&new, ALLOW_MULTI)) }?;
    for old in &earlier {
        // SAFETY: the struct contains integers only.
        unsafe { bpf(DETACH, &mut attach(old, 0)) }?;
    }
    Ok(())
}

fn load(program: &[u64]) -> io::Result<OwnedFd> {
    let mut record = Load {
        kind: DEVICE_PROGRAM,
        count: u32::try_from(program.len()).map_err(io::Error::other)?,
        instructions: address(program.as_ptr()),
        license: address(c"Apache-2.0".as_ptr()),
        ..Load::default()
    };
    // SAFETY: the addresses are those of `count` instructions and of a NUL-terminated text, both alive; there is no
    // log.
    let fd = unsafe { bpf(LOAD, &mut record) }?;
    // SAFETY: the kernel has just opened it for this process.
    Ok(unsafe { OwnedFd::from_raw_fd(fd) })
}

/// Programs attached to the cgroup itself.
fn attached(group: BorrowedFd<'_>) -> io::Result<Vec<OwnedFd>> {
    let mut ids = [0_u32; MOST];
    let count = u32::try_from(MOST).map_err(io::Error::other)?;
    let mut record =
        Query { group: number(&group), kind: DEVICE, ids: address(ids.as_mut_ptr()), count, ..Query::default() };
    // SAFETY: the address is that of `count` writable integers.
    unsafe { bpf(QUERY, &mut record) }?;
    let found = ids.iter().take(usize::try_from(record.count).unwrap_or_default());
    let open = |id: &u32| {
        // SAFETY: the struct contains integers only.
        let fd = unsafe { bpf(BY_ID, &mut ById { id: *id, ..ById::default() }) }?;
        // SAFETY: the kernel has just opened it for this process.
        Ok(unsafe { OwnedFd::from_raw_fd(fd) })
    };
    found.map(open).collect()
}

fn number(fd: &impl AsRawFd) -> u32 {
    u32::try_from(fd.as_raw_fd()).unwrap_or_default() // an open descriptor is never negative
}

fn address<T>(pointer: *const T) -> u64 {
    pointer.expose_provenance() as u64
}

/// # Safety
/// Addresses in the struct must be valid for what the command reads and writes.
unsafe fn bpf<T>(command: libc::c_int, record: &mut T) -> io::Result<libc::c_int> {
    // SAFETY: the struct has the given size and outlives the call; the caller guarantees its addresses.
    let result = unsafe { libc::syscall(libc::SYS_bpf, command, std::ptr::from_mut(record), size_of::<T>()) };
    if result < 0 { Err(io::Error::last_os_error()) } else { libc::c_int::try_from(result).map_err(io::Error::other) }
}

#[cfg(test)]
mod tests {
    use std::{fs, os::fd::AsFd, path::PathBuf, process::Command};

    use super::*;

    /// A program that returns the same decision for every access.
    fn always(answer: u8) -> [u64; 2] {
        [u64::from_ne_bytes([0xb7, 0, 0, 0, answer, 0, 0, 0]), u64::from_ne_bytes([0x95, 0, 0, 0, 0, 0, 0, 0])]
    }

    struct Group(PathBuf);

    impl Drop for Group {
        fn drop(&mut self) {
            let _left = fs::remove_dir(&self.0); // empty: its processes were waited for
        }
    }

    #[test]
    fn a_program_takes_the_place_of_another() {
        let mounts = crate::mount_table::read().expect("a table");
        let unified = mounts.iter().find(|mount| mount.kind == "cgroup2").map(|mount| mount.target.clone());
        let Some(unified) = unified.filter(|_| nix::unistd::geteuid().is_root()) else {
            return println!("skipped: needs root and the unified hierarchy");
        };
        let group = Group(unified.join(format!("berth-devices-{}", std::process::id())));
        match fs::create_dir(&group.0) {
            Err(error) if error.kind() == io::ErrorKind::ReadOnlyFilesystem => return println!("skipped: {error}"),
            made => made.expect("a group"),
        }
        let directory = fs::File::open(&group.0).expect("a directory");
        let can_read = || {
            let script = format!("echo $$ > {}/cgroup.procs && head -c 1 /dev/zero", group.0.display());
            Command::new("/bin/sh").args(["-c", &script]).output().expect("a shell").stdout == [0]
        };
        assert!(can_read());
        match replace(directory.as_fd(), &always(0)) {
            Err(error) if error.raw_os_error() == Some(libc::EPERM) => return println!("skipped: needs root: {error}"),
            done => done.expect("a program"),
        }
        assert!(!can_read());
        for _ in 0..2 {
            replace(directory.as_fd(), &always(1)).expect("a program");
            assert!(can_read());
            assert_eq!(attached(directory.as_fd()).expect("programs").len(), 1);
        }
        let refusal = replace(directory.as_fd(), &[0]).expect_err("a refusal");
        assert_eq!(refusal.raw_os_error(), Some(libc::EINVAL));
        assert!(can_read());
    }
}
