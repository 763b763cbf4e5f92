//! Metadata store: a directory per object, with small checksummed files.
//!
//! Each record is written to a temporary file and renamed. Records are not synced: after a power loss, none of the
//! processes they describe exists. A deletion renames the directory first, so that a half-deleted object is never read.
//! Every call blocks. Implements spec 09 §6-§8.

pub mod layout;
pub mod objects;
pub mod record;

use std::{
    fs::{self, DirBuilder, File, OpenOptions},
    io::{self, Read, Write},
    os::unix::fs::{DirBuilderExt, MetadataExt, OpenOptionsExt, PermissionsExt},
    path::Path,
    thread,
    time::{Duration, Instant},
};

use nix::fcntl::{Flock, FlockArg};
use serde::{Serialize, de::DeserializeOwned};

pub use layout::Layout;
use layout::{DOOMED, deletion_path};
use objects::{ContainerMeta, ContainerState, SandboxMeta, SandboxState, Spec, VERSION};
use record::Durability;

use super::{
    errors::{ErrorKind, RuntimeError, RuntimeResult},
    ids,
};
use berth_sys::{atomic_file, failpoint, tree_removal::remove_tree};

/// Maximum time to wait for the lock of a dead daemon: a child it was starting keeps the descriptor until it executes
/// its program.
const LAST_HOLD: Duration = Duration::from_secs(2);
/// Delay between two attempts to take the lock.
const TRY: Duration = Duration::from_millis(5);

/// Exclusive lock on the store: at most one daemon has it.
#[derive(Debug)]
pub struct Lock(#[expect(dead_code, reason = "held, never used")] Flock<File>);

/// An object that was read from disk.
#[derive(Debug)]
pub enum StoredObject<M, S> {
    /// A complete object.
    Whole {
        /// Immutable metadata.
        meta: M,
        /// Mutable state; `None` where it was never written.
        state: Option<S>,
        /// Last write of the state, nanoseconds since the epoch; 0 if unknown.
        written_ns: i64,
    },
    /// An unreadable object, whose remains must be removed.
    Broken {
        /// Name of its directory.
        id: String,
        /// Reason why `meta.json` or `state.json` is rejected.
        cause: String,
    },
}

/// Creates the directories, and takes the lock.
///
/// # Errors
/// Another daemon has the lock, or a later release wrote the store.
pub fn open(layout: &Layout) -> RuntimeResult<Lock> {
    for (path, mode) in layout.directories() {
        make_directory(&path, mode)?;
    }
    let lock = lock(&layout.root.join("lock"))?;
    check_version(&layout.root.join("version"))?;
    Ok(lock)
}

fn lock(path: &Path) -> RuntimeResult<Lock> {
    let mut options = OpenOptions::new();
    let mut file = options
        .read(true)
        .write(true)
        .create(true)
        .truncate(false)
        .mode(0o600)
        .open(path)
        .map_err(|e| RuntimeError::file("open", path, &e))?;
    let mut holder = String::new();
    // Used only for the error message and to detect a dead owner.
    let _ = (&mut file).take(20).read_to_string(&mut holder);
    let mut lock = take(file, holder.trim())?;
    let written = lock.set_len(0).and_then(|()| {
        io::Seek::rewind(&mut *lock)?;
        writeln!(lock, "{}", std::process::id())
    });
    written.map_err(|e| RuntimeError::file("write", path, &e))?;
    Ok(Lock(lock))
}

/// Takes the lock if it is free, or waits for the remaining holders of a dead owner.
fn take(mut file: File, holder: &str) -> RuntimeResult<Flock<File>> {
    let begun = Instant::now();
    loop {
        file = match Flock::lock(file, FlockArg::LockExclusiveNonblock) {
            Ok(lock) => return Ok(lock),
            Err((file, _)) => file,
        };
        let is_dead = !holder.is_empty() && !is_alive(holder);
        if !is_dead || begun.elapsed() > LAST_HOLD {
            let text = format!("embedded runtime is already running (pid {holder})");
            return Err(RuntimeError::new(ErrorKind::Unavailable, text));
        }
        thread::sleep(TRY);
    }
}

/// Whether a process is alive; a zombie or a dying process is not.
fn is_alive(pid: &str) -> bool {
    let Ok(stat) = fs::read_to_string(Path::new("/proc").join(pid).join("stat")) else { return false };
    let state = stat.rsplit_once(") ").and_then(|(_, rest)| rest.chars().next());
    !matches!(state, Some('Z' | 'X'))
}

fn check_version(path: &Path) -> RuntimeResult<()> {
    let text = atomic_file::read(path).map_err(|e| RuntimeError::file("read", path, &e))?;
    let Some(text) = text else {
        let ours = format!("{VERSION}\n");
        return atomic_file::replace(path, ours.as_bytes(), 0o600).map_err(|e| RuntimeError::file("write", path, &e));
    };
    match String::from_utf8_lossy(&text).trim().parse::<u64>() {
        Ok(version) if version <= VERSION => Ok(()),
        _ => Err(RuntimeError::other(format!(
            "{} has version {:?}: written by a later release",
            path.display(),
            String::from_utf8_lossy(&text).trim()
        ))),
    }
}

/// Creates a directory with its parents; sets the mode even if it exists.
///
/// # Errors
/// The creation or the change of mode fails.
pub fn make_directory(path: &Path, mode: u32) -> RuntimeResult<()> {
    let made = DirBuilder::new().recursive(true).mode(mode).create(path);
    let made = made.and_then(|()| fs::set_permissions(path, fs::Permissions::from_mode(mode)));
    made.map_err(|e| RuntimeError::file("create", path, &e))
}

/// Writes a record.
///
/// # Errors
/// The write fails; the previous content remains.
pub fn save(path: &Path, value: &impl Serialize) -> RuntimeResult<()> {
    record::write(path, value, Durability::Unsynced).map_err(|e| RuntimeError::file("write", path, &e))
}

fn load<T: DeserializeOwned>(path: &Path) -> Result<Option<T>, String> {
    record::read(path).map_err(|e| format!("{}: {e}", path.display()))
}

/// Deletes a directory of the store: renames it first, so that a partial deletion is never read. A missing directory is
/// success.
///
/// # Errors
/// The deletion fails; the next start deletes what remains.
pub fn delete(path: &Path) -> RuntimeResult<()> {
    let doomed = deletion_path(path);
    match fs::rename(path, &doomed) {
        Err(e) if e.kind() == io::ErrorKind::NotFound => {}
        // An earlier attempt left a partly deleted directory.
        Err(e) if e.kind() == io::ErrorKind::DirectoryNotEmpty => remove_all(path)?,
        other => other.map_err(|e| RuntimeError::file("rename", path, &e))?,
    }
    failpoint::reached("delete.renamed");
    remove_all(&doomed)
}

fn remove_all(path: &Path) -> RuntimeResult<()> {
    remove_tree(path).map_err(|e| RuntimeError::file("delete", path, &e))
}

/// All sandboxes; completes interrupted deletions.
///
/// # Errors
/// The directory is unreadable.
pub fn sandboxes(layout: &Layout) -> RuntimeResult<Vec<StoredObject<SandboxMeta, SandboxState>>> {
    objects(&layout.sandboxes(), |meta: &SandboxMeta, id| meta.v == VERSION && meta.id == id)
}

/// All containers; completes interrupted deletions.
///
/// # Errors
/// The directory is unreadable.
pub fn containers(layout: &Layout) -> RuntimeResult<Vec<StoredObject<ContainerMeta, ContainerState>>> {
    objects(&layout.containers(), |meta: &ContainerMeta, id| meta.v == VERSION && meta.id == id)
}

fn objects<M: DeserializeOwned, S: DeserializeOwned>(
    directory: &Path,
    fits: impl Fn(&M, &str) -> bool,
) -> RuntimeResult<Vec<StoredObject<M, S>>> {
    let mut all = Vec::new();
    for id in names(directory)? {
        let path = directory.join(&id);
        if id.starts_with(DOOMED) {
            remove_all(&path)?;
        } else if ids::is_id(&id) {
            all.push(match object(&path, &id, &fits) {
                Ok((meta, state, written_ns)) => StoredObject::Whole { meta, state, written_ns },
                Err(cause) => StoredObject::Broken { id, cause },
            });
        }
    }
    Ok(all)
}

type Object<M, S> = (M, Option<S>, i64);

fn object<M: DeserializeOwned, S: DeserializeOwned>(
    path: &Path,
    id: &str,
    fits: &impl Fn(&M, &str) -> bool,
) -> Result<Object<M, S>, String> {
    let meta: M = load(&path.join("meta.json"))?.ok_or("meta.json is missing")?;
    if !fits(&meta, id) {
        return Err("meta.json has another ID or version".to_owned());
    }
    let file = path.join("state.json");
    let state = load(&file)?;
    let written = fs::metadata(&file).map(|m| m.mtime().saturating_mul(1_000_000_000).saturating_add(m.mtime_nsec()));
    Ok((meta, state, written.unwrap_or_default()))
}

/// The launch plan record of a container; `None` where it is absent or unreadable.
pub fn spec(layout: &Layout, id: &str) -> Option<Spec> {
    load(&layout.container(id).join("spec.json")).ok().flatten()
}

/// Names in a directory of the store; empty where it does not exist.
///
/// # Errors
/// The directory is unreadable.
pub fn names(directory: &Path) -> RuntimeResult<Vec<String>> {
    let list = match fs::read_dir(directory) {
        Err(e) if e.kind() == io::ErrorKind::NotFound => return Ok(Vec::new()),
        other => other.map_err(|e| RuntimeError::file("list", directory, &e))?,
    };
    Ok(list.flatten().filter_map(|entry| entry.file_name().into_string().ok()).collect())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn layout(root: &Path) -> Layout {
        Layout { root: root.join("root"), state: root.join("state") }
    }

    fn meta(id: &str) -> SandboxMeta {
        SandboxMeta {
            v: VERSION,
            id: id.to_owned(),
            name: "p_ns_u_0".to_owned(),
            created_ns: 7,
            config: String::new(),
            runtime_handler: String::new(),
            netns: None,
            ips: Vec::new(),
            group: "/berth".to_owned(),
            network: serde_json::Value::Null,
        }
    }

    /// Creates nested directories as a container can: too deep for any path.
    fn nest(directory: &Path, depth: usize) {
        fs::create_dir_all(directory).expect("makeable");
        let flags = rustix::fs::OFlags::DIRECTORY;
        let mut here = rustix::fs::open(directory, flags, rustix::fs::Mode::empty()).expect("open");
        for _ in 0..depth {
            rustix::fs::mkdirat(&here, "d", rustix::fs::Mode::RWXU).expect("makeable");
            here = rustix::fs::openat(&here, "d", flags, rustix::fs::Mode::empty()).expect("open");
        }
    }

    /// 60,000 levels below an image volume, deleted with the container and at the next start.
    #[test]
    fn what_containers_nest_deeply_is_deleted() {
        let dir = tempfile::tempdir().expect("a directory");
        let layout = layout(dir.path());
        let _lock = open(&layout).expect("free");
        let (live, interrupted) = (layout.container("c"), layout.containers().join(".del-d"));
        nest(&live.join("volumes/v"), 60_000);
        nest(&interrupted.join("volumes/v"), 60_000);
        delete(&live).expect("deleted");
        assert!(containers(&layout).expect("listed").is_empty());
        assert_eq!(names(&layout.containers()).expect("listed"), Vec::<String>::new());
    }

    #[test]
    fn directories_are_roots_alone_also_where_an_earlier_release_made_them() {
        let dir = tempfile::tempdir().expect("a directory");
        let layout = layout(dir.path());
        drop(open(&layout).expect("free"));
        for (path, _) in layout.directories() {
            fs::set_permissions(&path, fs::Permissions::from_mode(0o711)).expect("set");
        }
        drop(open(&layout).expect("free"));
        for (path, _) in layout.directories() {
            let mode = fs::metadata(&path).expect("there").permissions().mode() & 0o7777;
            assert_eq!(mode, 0o700, "{}", path.display());
        }
    }

    #[test]
    fn a_holder_of_the_lock_that_is_a_zombie_is_dead() {
        let mut child = std::process::Command::new("true").spawn().expect("started");
        let (pid, begun) = (child.id().to_string(), Instant::now());
        assert!(is_alive(&std::process::id().to_string()));
        while is_alive(&pid) {
            assert!(begun.elapsed() < Duration::from_secs(20), "{pid} lives");
            thread::sleep(TRY);
        }
        assert!(Path::new("/proc").join(&pid).exists(), "the zombie is not reaped yet");
        child.wait().expect("waited for");
    }

    #[test]
    fn only_one_daemon_and_no_later_disk() {
        let dir = tempfile::tempdir().expect("a directory");
        let layout = layout(dir.path());
        let first = open(&layout).expect("free");
        let refused = open(&layout).expect_err("taken").to_string();
        assert_eq!(refused, format!("embedded runtime is already running (pid {})", std::process::id()));
        drop(first);
        fs::write(layout.root.join("version"), "2\n").expect("writable");
        assert!(open(&layout).expect_err("later").to_string().ends_with("written by a later release"));
    }

    #[test]
    fn a_lock_with_a_stale_pid_is_waited_for() {
        let dir = tempfile::tempdir().expect("a directory");
        let layout = layout(dir.path());
        drop(open(&layout).expect("free"));
        let file = File::options().write(true).open(layout.root.join("lock")).expect("there");
        let lock = Flock::lock(file, FlockArg::LockExclusiveNonblock).expect("free");
        // Greater than any process id.
        fs::write(layout.root.join("lock"), "99999999\n").expect("writable");
        let executes = thread::spawn(move || {
            thread::sleep(10 * TRY);
            drop(lock);
        });
        open(&layout).expect("a moment later");
        executes.join().expect("no panic");
    }

    #[test]
    fn objects_are_whole_broken_or_finished_off() {
        let dir = tempfile::tempdir().expect("a directory");
        let layout = layout(dir.path());
        let _lock = open(&layout).expect("free");
        let (whole, cut, other) = (ids::new_id(), ids::new_id(), ids::new_id());
        for id in [&whole, &cut, &other] {
            make_directory(&layout.sandbox(id), 0o700).expect("makeable");
            save(&layout.sandbox(id).join("meta.json"), &meta(id)).expect("writable");
        }
        let path = layout.sandbox(&cut).join("meta.json");
        let bytes = fs::read(&path).expect("readable");
        fs::write(&path, &bytes[..bytes.len() / 2]).expect("writable");
        save(&layout.sandbox(&other).join("meta.json"), &meta(&whole)).expect("writable");
        make_directory(&layout.sandboxes().join(".del-x/deep"), 0o700).expect("makeable");
        fs::write(layout.sandboxes().join("stray"), "x").expect("writable");
        let (mut found, mut broken) = (Vec::new(), Vec::new());
        for object in sandboxes(&layout).expect("readable") {
            match object {
                StoredObject::Whole { meta, state, .. } => found.push((meta.id, state.is_some())),
                StoredObject::Broken { id, .. } => broken.push(id),
            }
        }
        assert_eq!(found, [(whole.clone(), false)]);
        broken.sort();
        let mut expected = vec![cut, other];
        expected.sort();
        assert_eq!(broken, expected);
        assert!(!layout.sandboxes().join(".del-x").exists(), "an interrupted deletion is finished");
        delete(&layout.sandbox(&whole)).expect("deletable");
        delete(&layout.sandbox(&whole)).expect("nothing there is success");
        assert!(!layout.sandbox(&whole).exists());
    }
}
