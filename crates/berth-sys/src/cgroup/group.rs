//! Cgroup paths, and file operations shared by cgroup v1 and v2.

use std::{
    fmt, fs,
    io::{self, BufRead, BufReader, Write},
    path::{Path, PathBuf},
    thread,
    time::Duration,
};

use rustix::io::Errno;

use super::{CgroupError, CgroupResult, process_killer};

/// Maximum attempts to remove a busy directory.
const REMOVE_ATTEMPTS: u32 = 10;
/// Delay after the first attempt; doubles.
const REMOVE_PAUSE: Duration = Duration::from_millis(1);
/// Maximum attempts to move a process.
const ATTACH_ATTEMPTS: u32 = 5;
/// Delay between these attempts.
const ATTACH_PAUSE: Duration = Duration::from_millis(30);
/// Maximum of `kernel.pid_max`: no cgroup has more processes.
const MAX_PROCESSES: usize = 1 << 22;

/// Path of a cgroup below the root of its hierarchy: plain names without `..`. The default is the root.
#[derive(Clone, PartialEq, Eq, Hash, PartialOrd, Ord, Debug, Default)]
pub struct GroupPath(Vec<String>);

impl GroupPath {
    /// Parses `/kubepods/burstable`; `None` if a name is empty, `.`, or `..`.
    pub fn parse(path: &str) -> Option<Self> {
        let names = path.trim_matches('/');
        if names.is_empty() {
            return Some(Self(Vec::new()));
        }
        let names: Vec<String> = names.split('/').map(str::to_owned).collect();
        let plain = |name: &String| !matches!(name.as_str(), "" | "." | "..") && !name.contains('\0');
        names.iter().all(plain).then_some(Self(names))
    }

    /// Child cgroup of that name; `None` if the name is not plain.
    pub fn child(&self, name: &str) -> Option<Self> {
        if name.contains('/') {
            return None;
        }
        Self::parse(&format!("{self}/{name}"))
    }

    /// Parent cgroup; `None` for the root.
    pub fn parent(&self) -> Option<Self> {
        let (_, above) = self.0.split_last()?;
        Some(Self(above.to_vec()))
    }

    /// Last name of the path; `None` for the root.
    pub fn name(&self) -> Option<&str> {
        self.0.last().map(String::as_str)
    }

    /// Whether it is the root of the hierarchy.
    pub fn is_root(&self) -> bool {
        self.0.is_empty()
    }

    /// Directory of the cgroup in a hierarchy mounted at `root`.
    pub(super) fn below(&self, root: &Path) -> PathBuf {
        let mut path = root.to_owned();
        path.extend(&self.0);
        path
    }
}

impl fmt::Display for GroupPath {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "/{}", self.0.join("/"))
    }
}

/// Whether this call created the directory.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum DirectoryCreation {
    Now,
    Before,
}

/// Creates one directory; an existing one is success.
pub(super) fn make(path: &Path) -> CgroupResult<DirectoryCreation> {
    match fs::create_dir(path) {
        Ok(()) => Ok(DirectoryCreation::Now),
        Err(e) if e.kind() == io::ErrorKind::AlreadyExists => Ok(DirectoryCreation::Before),
        Err(e) => Err(CgroupError::file("create", path, e)),
    }
}

/// Writes a value in a single `write`, as interface files require; never creates a missing file.
pub(super) fn write(path: &Path, value: &str) -> CgroupResult<()> {
    let wrote = fs::OpenOptions::new().write(true).open(path).and_then(|mut file| file.write_all(value.as_bytes()));
    wrote.map_err(|e| CgroupError::file(format!("write {value:?} to"), path, e))
}

pub(super) fn read(path: &Path) -> CgroupResult<String> {
    let text = fs::read_to_string(path).map_err(|e| CgroupError::file("read", path, e))?;
    Ok(text.trim_end().to_owned())
}

/// Processes of the cgroup itself, without those of its descendants.
pub(super) fn members(directory: &Path) -> CgroupResult<Vec<i32>> {
    let path = directory.join("cgroup.procs");
    let failed = |source| CgroupError::file("read", &path, source);
    let file = fs::File::open(&path).map_err(failed)?;
    let mut pids = Vec::new();
    for line in BufReader::new(file).lines().take(MAX_PROCESSES) {
        pids.extend(process_killer::parse(&line.map_err(failed)?));
    }
    Ok(pids)
}

/// Moves a process into the cgroup. Retries EINVAL, the kernel's answer while the process is being created.
pub(super) fn attach(directory: &Path, pid: i32) -> CgroupResult<()> {
    let (file, pid) = (directory.join("cgroup.procs"), pid.to_string());
    for _ in 1..ATTACH_ATTEMPTS {
        match write(&file, &pid) {
            Err(e) if e.errno() == Some(Errno::INVAL.raw_os_error()) => thread::sleep(ATTACH_PAUSE),
            other => return other,
        }
    }
    write(&file, &pid)
}

/// Names of the subdirectories; none if the directory does not exist.
pub(super) fn children(path: &Path) -> CgroupResult<Vec<String>> {
    let list = match fs::read_dir(path) {
        Err(e) if e.kind() == io::ErrorKind::NotFound => return Ok(Vec::new()),
        other => other.map_err(|e| CgroupError::file("list", path, e))?,
    };
    let directories = list.flatten().filter(|entry| entry.file_type().is_ok_and(|kind| kind.is_dir()));
    Ok(directories.filter_map(|entry| entry.file_name().into_string().ok()).collect())
}

/// Removes a cgroup's directory and its descendants, deepest first. Interface files are not unlinked: they disappear
/// with their directory.
pub(super) fn remove_tree(path: &Path) -> CgroupResult<()> {
    for child in children(path)? {
        remove_tree(&path.join(child))?;
    }
    let mut pause = REMOVE_PAUSE;
    for attempt in 1.. {
        match fs::remove_dir(path) {
            Err(e) if e.kind() == io::ErrorKind::NotFound => return Ok(()),
            // The kernel releases a cgroup a moment after its last process has exited.
            Err(e) if e.kind() == io::ErrorKind::ResourceBusy && attempt < REMOVE_ATTEMPTS => thread::sleep(pause),
            other => return other.map_err(|e| CgroupError::file("remove", path, e)),
        }
        pause *= 2;
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn paths_never_lead_upwards() {
        for (text, expected) in [
            ("/", Some("/")),
            ("", Some("/")),
            ("/kubepods/burstable", Some("/kubepods/burstable")),
            ("kubepods/", Some("/kubepods")),
            ("/a//b", None),
            ("/a/../b", None),
            ("/a/.", None),
        ] {
            assert_eq!(GroupPath::parse(text).map(|p| p.to_string()).as_deref(), expected, "{text}");
        }
        let group = GroupPath::parse("/a").expect("plain");
        assert_eq!(group.child("b").map(|p| p.to_string()).as_deref(), Some("/a/b"));
        assert_eq!((group.child("b/c"), group.child(".."), group.child("")), (None, None, Some(group.clone())));
        assert_eq!(group.parent().and_then(|p| p.parent()), None);
    }

    #[test]
    fn a_missing_file_is_never_created() {
        let directory = tempfile::tempdir().expect("a directory");
        let error = write(&directory.path().join("cpu.max"), "max 100000").expect_err("missing");
        assert!(error.is_missing());
        assert!(error.to_string().starts_with("write \"max 100000\" to /"), "{error}");
    }
}
