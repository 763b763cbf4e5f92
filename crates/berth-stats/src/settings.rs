//! Settings of groups: limits and shares, which change only when somebody writes them. The kernel
//! tells when that happens, so they are read once and not with every look: half of all files.
//!
//! Where the kernel cannot tell (too many watches) a group is not watched, and its settings are
//! read every time.

use std::{collections::HashMap, io, path::PathBuf};

use inotify::{EventMask, Inotify, WatchDescriptor, WatchMask};

use super::reader::GroupKey;

/// Room for some thirty events.
const BUFFER: usize = 4096;

/// What the files that are settings say.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct Settings {
    /// `cpu.max`: quota and period.
    pub cpu_max: Option<(Option<u64>, u64)>,
    /// Weight in shares.
    pub shares: Option<u64>,
    /// `cpu.cfs_period_us`.
    pub period: Option<u64>,
    /// `cpu.cfs_quota_us`, where there is one.
    pub quota: Option<u64>,
    /// Limit of memory.
    pub memory_limit: Option<u64>,
    /// Limit of swap.
    pub swap_limit: Option<u64>,
    /// Limit of both together.
    pub memory_and_swap_limit: Option<u64>,
    /// Memory that is kept for the group.
    pub reserved: u64,
    /// The most threads there may be; 0 without a limit.
    pub threads_max: u64,
}

/// Groups some of whose files were written.
#[derive(Clone, PartialEq, Eq, Debug)]
pub enum Written {
    /// These.
    Groups(Vec<GroupKey>),
    /// Nobody knows which: the kernel had more to tell than it can remember.
    Any,
}

/// Hears of writes.
#[derive(Default)]
pub struct Watch {
    inotify: Option<Inotify>,
    groups: HashMap<WatchDescriptor, GroupKey>,
}

impl Watch {
    /// Hears of writes to the files of a group from now on; nothing where the kernel cannot tell.
    pub fn add(&mut self, key: &GroupKey, directories: impl IntoIterator<Item = PathBuf>) -> Vec<WatchDescriptor> {
        let mut added = Vec::new();
        for directory in directories {
            match self.add_one(directory) {
                Ok(descriptor) => {
                    self.groups.insert(descriptor.clone(), key.clone());
                    added.push(descriptor);
                }
                Err(_) => {
                    self.remove(added);
                    return Vec::new();
                }
            }
        }
        added
    }

    fn add_one(&mut self, directory: PathBuf) -> io::Result<WatchDescriptor> {
        let inotify = match &mut self.inotify {
            Some(inotify) => inotify,
            none => none.insert(Inotify::init()?),
        };
        inotify.watches().add(directory, WatchMask::MODIFY)
    }

    /// Hears no more of these.
    pub fn remove(&mut self, descriptors: Vec<WatchDescriptor>) {
        for descriptor in descriptors {
            self.groups.remove(&descriptor);
            if let Some(inotify) = &self.inotify {
                let _ = inotify.watches().remove(descriptor); // it went with its directory, maybe
            }
        }
    }

    /// What was written since the last call.
    pub fn written(&mut self) -> Written {
        let mut groups = Vec::new();
        let Some(inotify) = &mut self.inotify else { return Written::Groups(groups) };
        let mut buffer = [0; BUFFER];
        loop {
            match inotify.read_events(&mut buffer) {
                Ok(events) => {
                    for event in events {
                        if event.mask.contains(EventMask::Q_OVERFLOW) {
                            return Written::Any;
                        }
                        let key = self.groups.get(&event.wd).cloned();
                        groups.extend(key.filter(|key| groups.last() != Some(key)));
                    }
                }
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => return Written::Groups(groups),
                Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                Err(_) => return Written::Any,
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use std::fs;

    use super::*;

    fn key(path: &str) -> GroupKey {
        GroupKey::At(path.into())
    }

    #[test]
    fn writes_are_heard_of() {
        let root = tempfile::tempdir().expect("a directory");
        let mut watch = Watch::default();
        let [a, b] = ["a", "b"].map(|name| root.path().join(name));
        for directory in [&a, &b] {
            fs::create_dir(directory).expect("made");
            fs::write(directory.join("limit"), "1").expect("written");
        }
        let of_a = watch.add(&key("/a"), [a.clone()]);
        assert_eq!((of_a.len(), watch.add(&key("/b"), [b.clone()]).len()), (1, 1));
        assert_eq!(watch.written(), Written::Groups(Vec::new()));
        fs::read(a.join("limit")).expect("read");
        assert_eq!(watch.written(), Written::Groups(Vec::new()), "reading is no writing");
        fs::write(a.join("limit"), "2").expect("written");
        fs::write(b.join("limit"), "2").expect("written");
        assert_eq!(watch.written(), Written::Groups(vec![key("/a"), key("/b")]));
        watch.remove(of_a);
        fs::write(a.join("limit"), "3").expect("written");
        assert_eq!(watch.written(), Written::Groups(Vec::new()));
        assert!(watch.add(&key("/c"), [b, root.path().join("c")]).is_empty(), "all or nothing");
    }
}
