//! The built-in seccomp profile on a real kernel: a process that runs under it, as any user.
#![allow(unsafe_code, reason = "filters are set between fork and exec")]

use std::{env, io, os::unix::process::CommandExt, process::Command, thread};

use berth_runtime::seccomp::{Conditions, CpuArchitecture, DEFAULT_PROFILE, Filter, SeccompProfile, compile};
use nix::libc;

/// Environment variable that marks the test program's child.
const CHILD: &str = "BERTH_TEST_FILTERED";

fn built_in() -> Filter {
    let profile = SeccompProfile::parse(DEFAULT_PROFILE.as_bytes()).expect("a profile");
    let conditions = Conditions {
        machine: CpuArchitecture::current().expect("a processor we know"),
        capabilities: Vec::new(),
        kernel: (5, 12),
        has_spec_allow: true,
    };
    compile(&profile, &conditions).expect("a program")
}

/// Sets no_new_privs irrevocably, then the filter.
fn set(records: &[u8], flags: u32) -> io::Result<()> {
    let length = u16::try_from(records.len() / 8).map_err(io::Error::other)?;
    let program = libc::sock_fprog { len: length, filter: records.as_ptr().cast_mut().cast() };
    // SAFETY: prctl takes numbers; seccomp reads `length` records of 8 bytes, which outlive the call, and writes
    // nothing.
    let result = unsafe {
        match libc::prctl(libc::PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0) {
            0 => libc::syscall(libc::SYS_seccomp, libc::SECCOMP_SET_MODE_FILTER, flags, &raw const program),
            failed => failed.into(),
        }
    };
    if result == 0 { Ok(()) } else { Err(io::Error::last_os_error()) }
}

/// The errno of a system call; 0 if it succeeds.
fn answer(number: libc::c_long, first: libc::c_long) -> i32 {
    // SAFETY: all calls below take numbers, or null where they would take a pointer.
    let result = unsafe { libc::syscall(number, first, 0, 0, 0, 0, 0) };
    if result >= 0 { 0 } else { io::Error::last_os_error().raw_os_error().unwrap_or(-1) }
}

/// AC-09a-X17, and the process's side of AC-09a-X9.
#[test]
fn programs_run_under_the_built_in_profile() {
    if env::var_os(CHILD).is_some() {
        return inside();
    }
    let filter = built_in();
    let records = filter.bytes();
    let mut child = Command::new(env::current_exe().expect("this program"));
    child.args(["--exact", "programs_run_under_the_built_in_profile", "--nocapture"]).env(CHILD, "1");
    // SAFETY: between fork and exec there are two system calls, and no allocation.
    unsafe { child.pre_exec(move || set(&records, filter.flags)) };
    let output = child.output().expect("a child");
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
}

fn inside() {
    let status = std::fs::read_to_string("/proc/self/status").expect("a status");
    assert!(status.contains("\nSeccomp:\t2\n"), "{status}");
    for (name, number, first, expected) in [
        ("newer than the table", 4000, 0, libc::ENOSYS),
        ("mount", libc::SYS_mount, 0, libc::EPERM),
        ("unshare", libc::SYS_unshare, libc::CLONE_NEWUSER.into(), libc::EPERM),
        ("keyctl", libc::SYS_keyctl, 0, libc::EPERM),
        ("io_uring_setup", libc::SYS_io_uring_setup, 1, libc::EPERM),
        ("clone3", libc::SYS_clone3, 0, libc::ENOSYS),
        ("socket of AF_VSOCK", libc::SYS_socket, libc::AF_VSOCK.into(), libc::EPERM),
        ("socket of AF_ALG", libc::SYS_socket, libc::AF_ALG.into(), libc::EPERM),
        ("getppid", libc::SYS_getppid, 0, 0),
        ("personality", libc::SYS_personality, 0, 0),
    ] {
        assert_eq!(answer(number, first), expected, "{name}");
    }
    // The C library falls back to an older system call for threads and processes.
    assert_eq!(thread::spawn(|| 7).join().ok(), Some(7));
    let output = Command::new("/bin/sh").args(["-c", "echo $((6 * 7)) | cat"]).output().expect("a shell");
    assert_eq!((output.status.success(), output.stdout.as_slice()), (true, &b"42\n"[..]));
}
