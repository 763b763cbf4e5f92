//! Unpacks the shim binary and starts shims.
//!
//! The binary resides on its own tmpfs, which becomes read-only after the write: nothing that a container does through
//! `/proc/<shim>/exe` can change what the host executes next (CVE-2019-5736). Where such a mount is not permitted, a
//! directory that only root can enter must suffice. Implements spec 09 §2 (D5, D6).
//!
//! Every function blocks briefly: call it from the blocking pool.

use std::{
    fs::{self, OpenOptions},
    io,
    os::unix::fs::{DirBuilderExt, MetadataExt, OpenOptionsExt},
    path::{Path, PathBuf},
    process::Stdio,
};

use rustix::mount::{MountFlags, UnmountFlags, mount, mount_remount, unmount};
use sha2::{Digest, Sha256};
use tokio::process::Command;

use berth_shim::socket;
use berth_sys::{failpoint, tree_removal::remove_tree};

/// Name of the shim binary.
pub const PROGRAM: &str = "berth-shim";
/// Log file of a shim, in its directory.
pub const LOG: &str = "shim.log";
/// Directory of unpacked binaries, below the state directory.
const EXE: &str = "exe";
/// Name of an unpacked binary.
const UNPACKED: &str = "shim";
/// Maximum size of a neighboring binary to copy, bytes; a larger one is a development build and runs in place.
const LONGEST_COPY: u64 = 16 << 20;

/// The embedded shim binary, zstd-compressed.
#[cfg(embeds_shim)]
const EMBEDDED: Option<&[u8]> = Some(include_bytes!(concat!(env!("OUT_DIR"), "/shim.zst")));
/// No shim binary is embedded.
#[cfg(not(embeds_shim))]
const EMBEDDED: Option<&[u8]> = None;

/// A failure to unpack or start a shim.
#[derive(Debug, thiserror::Error)]
pub enum SpawnError {
    /// The shim binary is missing.
    #[error("berth was built without an embedded shim, and {PROGRAM} was not found beside {}", beside.display())]
    Missing {
        /// Path of the running executable.
        beside: PathBuf,
    },
    /// A file operation failed.
    #[error("{what} {}: {source}", path.display())]
    File {
        /// Operation that failed.
        what: &'static str,
        /// Path of the file.
        path: PathBuf,
        /// Error of the system call.
        source: io::Error,
    },
}

fn file(what: &'static str, path: &Path) -> impl FnOnce(io::Error) -> SpawnError {
    let path = path.to_owned();
    move |source| SpawnError::File { what, path, source }
}

/// How the shim binary is protected against modification.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Protection {
    /// By its own read-only file system.
    Sealed,
    /// Only by a directory that other users cannot enter: mounting is not permitted.
    Folder,
    /// Not at all: a development build that runs in place.
    None,
}

/// Unpacks the shim binary into the state directory, and returns its path. Idempotent.
///
/// # Errors
/// The binary is missing, or the state directory is not writable.
pub fn unpack(state: &Path) -> Result<(PathBuf, Protection), SpawnError> {
    if let Some(packed) = EMBEDDED {
        let bytes = zstd::decode_all(packed).map_err(file("unpack the shim in", Path::new("/proc/self/exe")))?;
        return unpack_bytes(state, &bytes);
    }
    let beside = beside()?;
    let length = fs::metadata(&beside).map_err(file("stat", &beside))?.len();
    if length > LONGEST_COPY {
        return Ok((beside, Protection::None));
    }
    let bytes = fs::read(&beside).map_err(file("read", &beside))?;
    unpack_bytes(state, &bytes)
}

/// The shim binary in the executable's directory, or in its parent for test executables.
fn beside() -> Result<PathBuf, SpawnError> {
    let own = std::env::current_exe().map_err(file("find", Path::new("/proc/self/exe")))?;
    let candidates = own.ancestors().skip(1).take(2).map(|folder| folder.join(PROGRAM));
    candidates.into_iter().find(|path| path.is_file()).ok_or(SpawnError::Missing { beside: own })
}

/// Writes a binary into the state directory.
///
/// # Errors
/// The state directory is not writable.
pub fn unpack_bytes(state: &Path, bytes: &[u8]) -> Result<(PathBuf, Protection), SpawnError> {
    let folder = state.join(EXE).join(hex::encode(Sha256::digest(bytes)));
    let program = folder.join(UNPACKED);
    let made = fs::DirBuilder::new().recursive(true).mode(0o700).create(&folder);
    made.map_err(file("create", &folder))?;
    let is_there = || fs::read(&program).is_ok_and(|there| there == bytes);
    let is_mounted = is_mount(&folder)?;
    if is_there() && (!is_mounted || is_read_only(&folder)) {
        return Ok((program, if is_mounted { Protection::Sealed } else { Protection::Folder }));
    }
    let is_mounted = is_mounted || mount_own(&folder, bytes.len())?;
    let temporary = folder.join(".new");
    let result = write(&temporary, bytes).and_then(|()| fs::rename(&temporary, &program));
    result.map_err(file("write", &program))?;
    if !is_mounted {
        return Ok((program, Protection::Folder));
    }
    let flags = MountFlags::RDONLY | MountFlags::NOSUID | MountFlags::NODEV;
    mount_remount(&folder, flags, c"").map_err(|e| file("make read-only", &folder)(e.into()))?;
    Ok((program, Protection::Sealed))
}

fn write(path: &Path, bytes: &[u8]) -> io::Result<()> {
    // World-executable: pods' process 1 runs it too, and in a user namespace that is not the host's root. The directory
    // belongs to root alone.
    let mut file = OpenOptions::new().write(true).create(true).truncate(true).mode(0o555).open(path)?;
    io::Write::write_all(&mut file, bytes)
}

/// Mounts a tmpfs with space for this many bytes; false where mounting is not permitted.
fn mount_own(folder: &Path, bytes: usize) -> Result<bool, SpawnError> {
    let size = (bytes >> 10) + 64; // the file and its directory
    let data = format!("mode=0700,size={size}k");
    let data = std::ffi::CString::new(data).map_err(|e| file("mount", folder)(e.into()))?;
    match mount("shim", folder, "tmpfs", MountFlags::NOSUID | MountFlags::NODEV, data.as_c_str()) {
        Ok(()) => Ok(true),
        Err(rustix::io::Errno::PERM | rustix::io::Errno::ACCESS) => Ok(false),
        Err(e) => Err(file("mount a tmpfs on", folder)(e.into())),
    }
}

fn is_mount(folder: &Path) -> Result<bool, SpawnError> {
    let device = |path: &Path| fs::metadata(path).map(|m| m.dev()).map_err(file("stat", path));
    let above = folder.parent().unwrap_or(folder);
    Ok(device(folder)? != device(above)?)
}

fn is_read_only(folder: &Path) -> bool {
    let flags = rustix::fs::statvfs(folder).map(|stat| stat.f_flag);
    flags.is_ok_and(|flags| flags.contains(rustix::fs::StatVfsMountFlags::RDONLY))
}

/// Removes binaries of other versions that no shim runs. Returns how many cannot be removed yet.
pub fn remove_others(state: &Path, program: &Path) -> usize {
    let own = program.parent().and_then(Path::file_name);
    let entries = fs::read_dir(state.join(EXE)).into_iter().flatten().flatten();
    let others = entries.filter(|entry| Some(&*entry.file_name()) != own);
    others.filter(|entry| remove(&entry.path()).is_err()).count()
}

fn remove(folder: &Path) -> io::Result<()> {
    if is_mount(folder).map_err(io::Error::other)? {
        unmount(folder, UnmountFlags::NOFOLLOW)?; // busy while a shim runs from it
        return fs::remove_dir(folder);
    }
    remove_tree(folder)
}

/// Creates a directory and starts its shim. Returns the process id; the shim accepts connections at once.
///
/// The shim leaves the agent's session by itself, and the agent's cgroup when it receives the pod's. Must be called
/// within a Tokio runtime, which reaps the shim if it ends during the agent's lifetime.
///
/// # Errors
/// The directory or the socket cannot be created, or the binary cannot be executed.
pub fn start(program: &Path, folder: &Path) -> Result<u32, SpawnError> {
    fs::DirBuilder::new().recursive(true).mode(0o700).create(folder).map_err(file("create", folder))?;
    let listener = socket::listen(folder).map_err(file("listen in", folder))?;
    let log_path = folder.join(LOG);
    let log = OpenOptions::new().read(true).append(true).create(true).mode(0o600).open(&log_path);
    let log = log.map_err(file("open", &log_path))?;
    let mut command = Command::new(program);
    command.arg(folder).env_clear().current_dir("/").kill_on_drop(false);
    command.stdin(Stdio::from(listener)).stdout(Stdio::null()).stderr(Stdio::from(log));
    failpoint::pass_variable(|name, value| {
        command.env(name, value);
    });
    let child = command.spawn().map_err(file("execute", program))?;
    child.id().ok_or_else(|| file("execute", program)(io::Error::other("exited immediately")))
}

#[cfg(test)]
mod tests {
    use super::*;

    /// State directory of a test; removes the mounts below it on drop.
    struct State(tempfile::TempDir);

    impl Drop for State {
        fn drop(&mut self) {
            for entry in fs::read_dir(self.0.path().join(EXE)).into_iter().flatten().flatten() {
                let _ = unmount(entry.path(), UnmountFlags::DETACH);
            }
        }
    }

    #[test]
    fn a_program_is_unpacked_once_and_cannot_be_written() {
        let state = State(tempfile::tempdir().expect("a folder"));
        let (old, protection) = unpack_bytes(state.0.path(), b"old").expect("unpacked");
        let inode = |path: &Path| fs::metadata(path).expect("there").ino();
        let first = inode(&old);
        assert_eq!(unpack_bytes(state.0.path(), b"old").expect("unpacked").0, old);
        assert_eq!(inode(&old), first, "nothing was written");
        if protection == Protection::Sealed {
            let refused = fs::write(&old, "evil").expect_err("read-only");
            assert_eq!(refused.kind(), io::ErrorKind::ReadOnlyFilesystem);
        }
        let (new, _) = unpack_bytes(state.0.path(), b"new").expect("unpacked");
        let used = fs::File::open(&old).expect("open");
        if protection == Protection::Sealed {
            assert_eq!(remove_others(state.0.path(), &new), 1, "somebody runs it");
        }
        drop(used);
        assert_eq!(remove_others(state.0.path(), &new), 0);
        assert!(!old.exists());
        assert_eq!(fs::read(&new).expect("there"), b"new");
    }
}
