//! Landlock sandbox: permanently restricts file changes of a thread and its children to a directory.

use std::{
    io,
    os::fd::{AsRawFd, BorrowedFd, FromRawFd, OwnedFd},
};

use nix::libc;

/// `LANDLOCK_CREATE_RULESET_VERSION`.
const ASK_VERSION: u32 = 1;
/// `LANDLOCK_RULE_PATH_BENEATH`.
const PATH_BENEATH: u32 = 1;
/// Write, remove, and create rights: bits 1 and 4 to 12 of `LANDLOCK_ACCESS_FS_*`.
const CHANGE: u64 = 1 << 1 | 0x1ff0;
/// Linking or renaming between directories; Landlock version 1 denies that everywhere.
const REFER: u64 = 1 << 13;
/// Truncating files.
const TRUNCATE: u64 = 1 << 14;

/// First field of `struct landlock_ruleset_attr`.
#[repr(C)]
struct Ruleset {
    handled: u64,
}

/// `struct landlock_path_beneath_attr`.
#[repr(C, packed)]
struct Beneath {
    allowed: u64,
    parent: i32,
}

/// Restricts this thread, and the processes it starts, to change files only beneath a directory. Open descriptors stay
/// usable.
///
/// # Errors
/// `Unsupported` if the kernel lacks Landlock or has version 1 only; otherwise the kernel's error. Needs CAP_SYS_ADMIN
/// or `no_new_privs`.
pub fn change_only_beneath(directory: BorrowedFd<'_>) -> io::Result<()> {
    // SAFETY: with this flag nothing is read: the kernel returns its version.
    let version =
        unsafe { libc::syscall(libc::SYS_landlock_create_ruleset, std::ptr::null::<Ruleset>(), 0_usize, ASK_VERSION) };
    let changes = match version {
        ..2 => return Err(io::ErrorKind::Unsupported.into()),
        2 => CHANGE | REFER,
        _ => CHANGE | REFER | TRUNCATE,
    };
    let rules = Ruleset { handled: changes };
    // SAFETY: `rules` is a complete struct of that size, and is only read.
    let made =
        unsafe { libc::syscall(libc::SYS_landlock_create_ruleset, &raw const rules, size_of::<Ruleset>(), 0_u32) };
    let made = i32::try_from(checked(made)?).map_err(io::Error::other)?;
    // SAFETY: the kernel has just created it for this process alone.
    let set = unsafe { OwnedFd::from_raw_fd(made) };
    let beneath = Beneath { allowed: changes, parent: directory.as_raw_fd() };
    // SAFETY: `beneath` is a complete struct for this rule type, and is only read; both descriptors are open.
    let added =
        unsafe { libc::syscall(libc::SYS_landlock_add_rule, set.as_raw_fd(), PATH_BENEATH, &raw const beneath, 0_u32) };
    checked(added)?;
    // SAFETY: a descriptor and an integer.
    checked(unsafe { libc::syscall(libc::SYS_landlock_restrict_self, set.as_raw_fd(), 0_u32) }).map(drop)
}

fn checked(done: i64) -> io::Result<i64> {
    if done == -1 { Err(io::Error::last_os_error()) } else { Ok(done) }
}

#[cfg(test)]
mod tests {
    use std::{fs, os::fd::AsFd};

    use super::*;

    #[test]
    fn only_what_is_beneath_can_be_changed() {
        let (inside, outside) = (tempfile::tempdir().expect("a folder"), tempfile::tempdir().expect("a folder"));
        let (kept, other) = (inside.path().to_owned(), outside.path().to_owned());
        // A thread of its own: the restriction is permanent.
        let done = std::thread::spawn(move || {
            let folder = fs::File::open(&kept).expect("there");
            match change_only_beneath(folder.as_fd()) {
                Err(error) if error.kind() == io::ErrorKind::Unsupported => return None,
                // Without the privilege it needs `no_new_privs`, which would persist in the test's other threads.
                Err(error) if error.raw_os_error() == Some(libc::EPERM) => return None,
                restricted => restricted.expect("restricted"),
            }
            fs::create_dir_all(kept.join("a/b")).expect("beneath");
            fs::write(kept.join("a/f"), "x").expect("beneath");
            fs::hard_link(kept.join("a/f"), kept.join("a/b/f")).expect("beneath");
            fs::remove_file(kept.join("a/f")).expect("beneath");
            Some(fs::write(other.join("f"), "x").is_err() && fs::create_dir(other.join("d")).is_err())
        });
        match done.join().expect("no panic") {
            Some(is_kept) => assert!(is_kept),
            None => println!("skipped: no Landlock here"),
        }
    }
}
