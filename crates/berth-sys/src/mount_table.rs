//! Mount table of this process, parsed from `/proc/self/mountinfo` and cached.
//!
//! Reading it accesses no file system, so it does not hang where a `stat` would.

use std::{
    ffi::OsString,
    fs::{self, File},
    io::{self, Read, Seek},
    os::unix::ffi::OsStringExt,
    path::{Path, PathBuf},
    sync::{Arc, Mutex, PoisonError},
};

use rustix::event::{PollFd, PollFlags, Timespec, poll};

const TABLE: &str = "/proc/self/mountinfo";

/// One entry of the mount table.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Mount {
    /// Device number, `major:minor`: equal for all mounts of the same file system.
    pub device: String,
    /// Mount point.
    pub target: PathBuf,
    /// File system type, e.g. `tmpfs`.
    pub kind: String,
    /// Whether it is in a peer group (`shared:`).
    pub is_shared: bool,
    /// Whether it receives propagation from another peer group (`master:`).
    pub is_slave: bool,
    /// Super block options, e.g. `rw,cpu,cpuacct`.
    pub options: String,
}

/// Reads all mounts, in the order of the mount table.
///
/// # Errors
/// If `/proc` cannot be read.
pub fn read() -> io::Result<Vec<Mount>> {
    Ok(parse(&fs::read(TABLE)?))
}

/// Mounts at or below a path, which must not contain symbolic links.
///
/// The table is read again only if something was mounted or unmounted since: a caller with a thousand paths in a row
/// reads it once. For the agent itself, not for a child that enters another mount namespace.
///
/// # Errors
/// If `/proc` cannot be read.
pub fn below(path: &Path) -> io::Result<Vec<Mount>> {
    static SEEN: Mutex<Option<CachedTable>> = Mutex::new(None);
    let mounts = {
        let mut seen = SEEN.lock().unwrap_or_else(PoisonError::into_inner);
        // After a failure the file is reopened next time.
        let mut table = match seen.take() {
            Some(table) => table,
            None => CachedTable::open()?,
        };
        let mounts = table.current()?;
        *seen = Some(table);
        mounts
    };
    Ok(mounts.iter().filter(|mount| mount.target.starts_with(path)).cloned().collect())
}

/// The mount that contains a path without symbolic links: the last one of the deepest.
pub fn containing_mount<'a>(mounts: &'a [Mount], path: &Path) -> Option<&'a Mount> {
    let leading = mounts.iter().filter(|mount| path.starts_with(&mount.target));
    leading.max_by_key(|mount| mount.target.components().count())
}

/// Cached table. The kernel notifies each open file of a change once, by `POLLPRI`.
struct CachedTable {
    file: File,
    mounts: Option<Arc<[Mount]>>,
}

impl CachedTable {
    fn open() -> io::Result<Self> {
        Ok(Self { file: File::open(TABLE)?, mounts: None })
    }

    fn current(&mut self) -> io::Result<Arc<[Mount]>> {
        // Before the read: a change during the read is noticed the next time.
        let is_old = self.is_stale()?;
        if let Some(mounts) = self.mounts.as_ref().filter(|_| !is_old) {
            return Ok(mounts.clone());
        }
        let mut text = Vec::new();
        self.file.rewind()?;
        self.file.read_to_end(&mut text)?;
        let mounts: Arc<[Mount]> = parse(&text).into();
        self.mounts = Some(mounts.clone());
        Ok(mounts)
    }

    fn is_stale(&self) -> io::Result<bool> {
        let mut asked = [PollFd::new(&self.file, PollFlags::PRI)];
        poll(&mut asked, Some(&Timespec { tv_sec: 0, tv_nsec: 0 }))?;
        Ok(asked.iter().any(|one| one.revents().intersects(PollFlags::PRI | PollFlags::ERR)))
    }
}

/// Parses the table; malformed lines are skipped.
pub fn parse(text: &[u8]) -> Vec<Mount> {
    text.split(|b| *b == b'\n').filter_map(mount).collect()
}

/// Parses a line: `36 35 98:0 /root /target opts shared:1 - ext3 /dev/x rw`.
fn mount(line: &[u8]) -> Option<Mount> {
    let fields: Vec<&[u8]> = line.split(|b| *b == b' ').collect();
    let device = String::from_utf8_lossy(fields.get(2)?).into_owned();
    let target = unescaped(fields.get(4)?);
    let separator = fields.iter().position(|field| *field == b"-")?;
    let kind = String::from_utf8_lossy(fields.get(separator.checked_add(1)?)?).into_owned();
    let tags = fields.get(6..separator)?;
    let has = |tag: &[u8]| tags.iter().any(|field| field.starts_with(tag));
    let options = fields.get(separator.checked_add(3)?).map(|o| String::from_utf8_lossy(o).into_owned());
    Some(Mount {
        device,
        target: OsString::from_vec(target).into(),
        kind,
        is_shared: has(b"shared:"),
        is_slave: has(b"master:"),
        options: options.unwrap_or_default(),
    })
}

/// Decodes octal escapes: the kernel escapes blank, tab, newline, and backslash.
fn unescaped(field: &[u8]) -> Vec<u8> {
    let mut out = Vec::with_capacity(field.len());
    let mut rest = field;
    while let Some((&first, tail)) = rest.split_first() {
        let digits =
            tail.get(..3).and_then(|d| std::str::from_utf8(d).ok()).and_then(|d| u8::from_str_radix(d, 8).ok());
        match (first, digits) {
            (b'\\', Some(byte)) => {
                out.push(byte);
                rest = tail.get(3..).unwrap_or_default();
            }
            _ => {
                out.push(first);
                rest = tail;
            }
        }
    }
    out
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lines_are_understood() {
        let text = b"36 35 98:0 /m /a\\040b rw,noatime shared:1 master:2 - ext3 /dev/root rw\n\
                     1 0 0:1 / / rw - tmpfs none rw\nbroken line\n\n1 2 3 4 5\n";
        assert_eq!(
            parse(text),
            [
                Mount {
                    device: "98:0".into(),
                    target: "/a b".into(),
                    kind: "ext3".into(),
                    is_shared: true,
                    is_slave: true,
                    options: "rw".into()
                },
                Mount {
                    device: "0:1".into(),
                    target: "/".into(),
                    kind: "tmpfs".into(),
                    is_shared: false,
                    is_slave: false,
                    options: "rw".into()
                },
            ]
        );
        assert_eq!(unescaped(b"a\\\\1\\134\\0"), b"a\\\\1\\\\0");
    }

    #[test]
    fn a_path_lies_in_the_last_of_the_deepest_mounts() {
        let table = parse(
            b"1 0 0:1 / / rw shared:1 - a none rw\n2 1 0:2 / /var/lib rw - b none rw\n3 1 0:3 / /var rw - c none rw\n\
              4 2 0:4 / /var/lib/k rw - d none rw\n5 4 0:5 / /var/lib/k rw shared:2 - e none rw\n",
        );
        for (path, expected) in
            [("/", "a"), ("/v", "a"), ("/var", "c"), ("/var/libx", "c"), ("/var/lib", "b"), ("/var/lib/k/pods", "e")]
        {
            assert_eq!(
                containing_mount(&table, Path::new(path)).map(|mount| mount.kind.as_str()),
                Some(expected),
                "{path}"
            );
        }
        assert_eq!(containing_mount(&[], Path::new("/")), None);
    }

    /// Needs root.
    #[test]
    fn what_is_mounted_is_seen_at_once() {
        use rustix::mount::{MountFlags, UnmountFlags, mount, unmount};
        let dir = tempfile::tempdir().expect("a directory");
        let path = dir.path().canonicalize().expect("it is there");
        for _ in 0..50 {
            assert_eq!(below(&path).expect("readable").len(), 0, "nothing there");
            if let Err(e) = mount("none", &path, "tmpfs", MountFlags::empty(), None) {
                eprintln!("skipped: what_is_mounted_is_seen_at_once needs root ({e})");
                return;
            }
            assert_eq!(below(&path).expect("readable").len(), 1, "at once");
            assert_eq!(below(&path).expect("readable").len(), 1, "and still");
            unmount(&path, UnmountFlags::empty()).expect("mounted");
        }
    }

    #[test]
    fn this_machine_has_a_root() {
        assert!(read().expect("a table").iter().any(|mount| mount.target == Path::new("/")));
    }
}
