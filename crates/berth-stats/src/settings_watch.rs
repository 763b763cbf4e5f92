//! inotify watch on cgroup settings (limits and shares), which change only when they are written.
//!
//! The kernel notifies of writes, so settings, which are half of all files, are read once instead of in every pass.
//! A cgroup that cannot be watched (too many watches) has its settings read every time.

use std::{collections::HashMap, io, path::PathBuf};

use inotify::{EventMask, Inotify, WatchDescriptor, WatchMask};

use super::reader::CgroupKey;

/// Size of the event buffer, bytes: about thirty events.
const BUFFER: usize = 4096;

/// Cgroups whose settings were written.
#[derive(Clone, PartialEq, Eq, Debug)]
pub enum ChangedCgroups {
    /// The cgroups.
    Groups(Vec<CgroupKey>),
    /// Unknown: the inotify queue overflowed or could not be read.
    Any,
}

/// Watches the settings of cgroups.
#[derive(Default)]
pub struct SettingsWatch {
    inotify: Option<Inotify>,
    groups: HashMap<WatchDescriptor, CgroupKey>,
}

impl SettingsWatch {
    /// Starts to watch the directories of a cgroup; returns no descriptors if one of them cannot be watched.
    pub fn add(&mut self, key: &CgroupKey, directories: impl IntoIterator<Item = PathBuf>) -> Vec<WatchDescriptor> {
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

    /// Removes watches.
    pub fn remove(&mut self, descriptors: Vec<WatchDescriptor>) {
        for descriptor in descriptors {
            self.groups.remove(&descriptor);
            if let Some(inotify) = &self.inotify {
                let _ = inotify.watches().remove(descriptor); // the kernel may have removed it with its directory
            }
        }
    }

    /// Returns the cgroups written since the last call.
    pub fn written(&mut self) -> ChangedCgroups {
        let mut groups = Vec::new();
        let Some(inotify) = &mut self.inotify else { return ChangedCgroups::Groups(groups) };
        let mut buffer = [0; BUFFER];
        loop {
            match inotify.read_events(&mut buffer) {
                Ok(events) => {
                    for event in events {
                        if event.mask.contains(EventMask::Q_OVERFLOW) {
                            return ChangedCgroups::Any;
                        }
                        let key = self.groups.get(&event.wd).cloned();
                        groups.extend(key.filter(|key| groups.last() != Some(key)));
                    }
                }
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => return ChangedCgroups::Groups(groups),
                Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                Err(_) => return ChangedCgroups::Any,
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use std::fs;

    use super::*;

    fn key(path: &str) -> CgroupKey {
        CgroupKey::At(path.into())
    }

    #[test]
    fn writes_are_reported() {
        let root = tempfile::tempdir().expect("a directory");
        let mut watch = SettingsWatch::default();
        let [a, b] = ["a", "b"].map(|name| root.path().join(name));
        for directory in [&a, &b] {
            fs::create_dir(directory).expect("made");
            fs::write(directory.join("limit"), "1").expect("written");
        }
        let of_a = watch.add(&key("/a"), [a.clone()]);
        assert_eq!((of_a.len(), watch.add(&key("/b"), [b.clone()]).len()), (1, 1));
        assert_eq!(watch.written(), ChangedCgroups::Groups(Vec::new()));
        fs::read(a.join("limit")).expect("read");
        assert_eq!(watch.written(), ChangedCgroups::Groups(Vec::new()), "reading is no writing");
        fs::write(a.join("limit"), "2").expect("written");
        fs::write(b.join("limit"), "2").expect("written");
        assert_eq!(watch.written(), ChangedCgroups::Groups(vec![key("/a"), key("/b")]));
        watch.remove(of_a);
        fs::write(a.join("limit"), "3").expect("written");
        assert_eq!(watch.written(), ChangedCgroups::Groups(Vec::new()));
        assert!(watch.add(&key("/c"), [b, root.path().join("c")]).is_empty(), "all or nothing");
    }
}
