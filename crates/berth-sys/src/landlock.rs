//! Landlock sandbox: permanently restricts file changes of a thread and its children to a directory.

use std::{error::Error, io, os::fd::BorrowedFd};

use landlock::{
    ABI, AccessFs, CompatLevel, Compatible, PathBeneath, Ruleset, RulesetAttr, RulesetCreatedAttr, RulesetError,
};

/// Restricts this thread, and the processes it starts, to change files only beneath a directory. Open descriptors stay
/// usable.
///
/// # Errors
/// `Unsupported` if the kernel lacks Landlock or has version 1 only; otherwise the kernel's error. Needs CAP_SYS_ADMIN
/// or `no_new_privs`.
pub fn change_only_beneath(directory: BorrowedFd<'_>) -> io::Result<()> {
    // Version 1 denies linking and renaming between directories everywhere; truncation is restricted since version 3.
    let required = Ruleset::default()
        .set_compatibility(CompatLevel::HardRequirement)
        .handle_access(AccessFs::from_write(ABI::V2))
        .map_err(|_| io::ErrorKind::Unsupported)?;
    restrict(required, directory).map_err(kernel_error)
}

fn restrict(required: Ruleset, directory: BorrowedFd<'_>) -> Result<(), RulesetError> {
    let rules = required.set_compatibility(CompatLevel::BestEffort).handle_access(AccessFs::Truncate)?.create()?;
    let beneath = PathBeneath::new(directory, AccessFs::from_write(ABI::V3));
    rules.add_rule(beneath)?.no_new_privs(false).restrict_self().map(drop)
}

/// The error of the failed system call, where one is the cause.
fn kernel_error(error: RulesetError) -> io::Error {
    let cause = error.source().and_then(|cause| cause.downcast_ref::<io::Error>());
    match cause.and_then(io::Error::raw_os_error) {
        Some(code) => io::Error::from_raw_os_error(code),
        None => io::Error::other(error),
    }
}

#[cfg(test)]
mod tests {
    use std::{fs, os::fd::AsFd};

    use nix::libc;

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
