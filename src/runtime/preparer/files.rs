//! Files of a container: log directory, subpaths, hosts file, termination message.
//!
//! Blocking: runs on the blocking pool, all files of one container in one job.

use std::{
    fs::{self, DirBuilder, OpenOptions, Permissions},
    io::{self, Read},
    os::unix::fs::{DirBuilderExt, OpenOptionsExt, PermissionsExt},
    path::{Path, PathBuf},
    time::SystemTime,
};

use nix::libc;
use tracing::{error, warn};

use super::{PrepareError, file_name, hosts, mounts::PlannedMount};
use berth_proto::cri;
use berth_sys::{atomic_file, sub_path};
use berth_types::api;

/// Termination message files kept per container: those of instances that may still be read, and not one
/// for every crash.
const KEPT_MESSAGES: usize = 8;
/// Attempts to find an unused file name.
const ATTEMPTS: u32 = 16;
const NODE_HOSTS_MAX: u64 = 10 << 20;

/// Source of `/etc/hosts`.
pub(super) enum HostsFile {
    /// The file is not mounted.
    None,
    /// The managed file with this text.
    Pod(String),
    /// The node's file plus aliases.
    Node {
        /// Path of the node's file.
        file: PathBuf,
        /// `spec.hostAliases`.
        aliases: Vec<api::HostAlias>,
    },
}

/// File work of one container.
pub(super) struct ContainerFiles {
    /// Name of the container.
    pub container: String,
    /// `<root>/pods/<uid>`.
    pub pod_directory: PathBuf,
    /// Log directory of the container.
    pub log_directory: PathBuf,
    /// Volume mounts of the container.
    pub planned: Vec<PlannedMount>,
    /// Source of `/etc/hosts`.
    pub hosts: HostsFile,
    /// `terminationMessagePath`; empty for none.
    pub message_path: String,
    /// Whether SELinux is enabled.
    pub selinux: bool,
    /// ID mappings of the pod's user namespace.
    pub id_mappings: Vec<cri::IdMapping>,
}

impl ContainerFiles {
    /// Creates all files and returns the mounts: volumes, hosts file, termination message.
    pub(super) fn make(mut self) -> Result<Vec<cri::Mount>, PrepareError> {
        make_log_directory(&self.log_directory)?;
        let planned = std::mem::take(&mut self.planned);
        let mut mounts = planned.into_iter().map(|mount| self.volume_mount(mount)).collect::<Result<Vec<_>, _>>()?;
        if let Some(path) = self.write_hosts()? {
            mounts.push(self.own_mount(hosts::PATH.to_owned(), &path));
        }
        if !self.message_path.is_empty() {
            match self.termination_file() {
                Ok(path) => mounts.push(self.own_mount(self.message_path.clone(), &path)),
                // The container can run without it; its termination message will be missing.
                Err(e) => error!(containerName = %self.container, err = %e, "Error on creating termination-log file"),
            }
        }
        Ok(mounts)
    }

    fn volume_mount(&self, planned: PlannedMount) -> Result<cri::Mount, PrepareError> {
        let mut mount = planned.mount;
        let Some(sub) = planned.sub_path else { return Ok(mount) };
        let holder = self.pod_directory.join("volume-subpaths");
        let index = sub.index.to_string();
        let target = holder.join(file_name(&sub.volume)?).join(file_name(&self.container)?).join(index);
        // Details of the host belong in the log, not in the pod owner's events.
        let refused = |what: &str, e: io::Error| {
            error!(volumeName = %sub.volume, containerName = %self.container, path = %sub.path.display(), err = %e,
                "Failed to prepare subPath");
            PrepareError(format!("failed to {what} for volumeMount {:?} of container {:?}", sub.volume, self.container))
        };
        // The opened file is bound; the path is not resolved again.
        let opened = match sub_path::find_inside(&sub.volume_path, &sub.path) {
            Err(e) if e.kind() == io::ErrorKind::NotFound => {
                sub_path::make_inside(&sub.volume_path, &sub.path, sub.mode)
                    .map_err(|e| refused("create subPath directory", e))?
            }
            other => other.map_err(|e| refused("prepare subPath", e))?,
        };
        sub_path::bind_opened(&opened, &holder, &target).map_err(|e| refused("prepare subPath", e))?;
        mount.host_path = target.to_string_lossy().into_owned();
        Ok(mount)
    }

    /// Writes the hosts file only if its content differs, to preserve its inode.
    fn write_hosts(&self) -> Result<Option<PathBuf>, PrepareError> {
        let content = match &self.hosts {
            HostsFile::None => return Ok(None),
            HostsFile::Pod(text) => text.clone().into_bytes(),
            HostsFile::Node { file, aliases } => hosts::of_node(&read_limited(file, NODE_HOSTS_MAX)?, aliases),
        };
        let path = self.pod_directory.join("etc-hosts");
        if has_content(&path, &content) {
            return Ok(Some(path));
        }
        make_private_directory(&self.pod_directory)?;
        atomic_file::replace_unsynced(&path, &content, 0o644).map_err(|e| at(&path, e))?;
        Ok(Some(path))
    }

    fn termination_file(&self) -> Result<PathBuf, PrepareError> {
        let directory = self.pod_directory.join("containers").join(file_name(&self.container)?);
        make_private_directory(&directory)?;
        drop_oldest(&directory, KEPT_MESSAGES - 1);
        for _ in 0..ATTEMPTS {
            let path = directory.join(format!("{:08x}", rand::random::<u32>()));
            match OpenOptions::new().write(true).create_new(true).mode(0o666).open(&path) {
                Ok(file) => {
                    file.set_permissions(Permissions::from_mode(0o666)).map_err(|e| at(&path, e))?;
                    return Ok(path);
                }
                Err(e) if e.kind() == io::ErrorKind::AlreadyExists => {}
                Err(e) => return Err(at(&path, e)),
            }
        }
        Err(PrepareError(format!("{}: failed to find an unused file name", directory.display())))
    }

    fn own_mount(&self, container_path: String, host_path: &Path) -> cri::Mount {
        cri::Mount {
            container_path,
            host_path: host_path.to_string_lossy().into_owned(),
            selinux_relabel: self.selinux,
            uid_mappings: self.id_mappings.clone(),
            gid_mappings: self.id_mappings.clone(),
            ..Default::default()
        }
    }
}

/// Creates a log directory readable by all users.
pub(super) fn make_log_directory(path: &Path) -> Result<(), PrepareError> {
    DirBuilder::new().recursive(true).mode(0o755).create(path).map_err(|e| at(path, e))
}

fn make_private_directory(path: &Path) -> Result<(), PrepareError> {
    DirBuilder::new().recursive(true).mode(0o750).create(path).map_err(|e| at(path, e))
}

/// Whether a file has exactly this content. Containers can write to it: at most one byte more than
/// `content` is read.
fn has_content(path: &Path, content: &[u8]) -> bool {
    let Ok(file) = OpenOptions::new().read(true).custom_flags(libc::O_NOFOLLOW | libc::O_NONBLOCK).open(path) else {
        return false;
    };
    let length = content.len() as u64;
    if !file.metadata().is_ok_and(|metadata| metadata.is_file() && metadata.len() == length) {
        return false;
    }
    let mut present = Vec::with_capacity(content.len());
    file.take(length + 1).read_to_end(&mut present).is_ok() && present == content
}

/// Reads a file that must not be longer than `limit` bytes.
pub(super) fn read_limited(path: &Path, limit: u64) -> Result<Vec<u8>, PrepareError> {
    let mut content = Vec::new();
    let file = fs::File::open(path).map_err(|e| at(path, e))?;
    file.take(limit + 1).read_to_end(&mut content).map_err(|e| at(path, e))?;
    if content.len() as u64 > limit {
        return Err(PrepareError(format!("{}: file exceeds {limit} bytes", path.display())));
    }
    Ok(content)
}

/// Names of the files (not directories) in a directory; empty if it does not exist.
pub(super) fn file_names(directory: &Path) -> Result<Vec<String>, PrepareError> {
    let list = match fs::read_dir(directory) {
        Err(e) if e.kind() == io::ErrorKind::NotFound => return Ok(Vec::new()),
        other => other.map_err(|e| at(directory, e))?,
    };
    let files = list.flatten().filter(|entry| entry.file_type().is_ok_and(|kind| !kind.is_dir()));
    Ok(files.filter_map(|entry| entry.file_name().into_string().ok()).collect())
}

fn drop_oldest(directory: &Path, keep: usize) {
    let modified = |entry: &fs::DirEntry| entry.metadata().and_then(|m| m.modified()).unwrap_or(SystemTime::UNIX_EPOCH);
    let mut files: Vec<_> = fs::read_dir(directory).into_iter().flatten().flatten().collect();
    files.sort_by_key(|entry| std::cmp::Reverse(modified(entry)));
    for old in files.into_iter().skip(keep) {
        if let Err(e) = fs::remove_file(old.path()) {
            warn!(path = %old.path().display(), err = %e, "Failed to remove old termination message");
        }
    }
}

fn at(path: &Path, error: io::Error) -> PrepareError {
    PrepareError(format!("{}: {error}", path.display()))
}

#[cfg(test)]
mod tests {
    use std::{
        os::unix::fs::symlink,
        sync::atomic::{AtomicBool, Ordering},
        time::Instant,
    };

    use rustix::{
        fs::{CWD, RenameFlags, renameat_with},
        mount::{UnmountFlags, unmount},
    };

    use super::{super::mounts::SubPath, *};

    /// How often a container is prepared, and the timeout.
    const TRIES: usize = 1_000;
    const PATIENCE: std::time::Duration = std::time::Duration::from_secs(60);

    /// Races container starts against a volume in which a directory and a link to the host are swapped
    /// all the time.
    fn raced(path: &dyn Fn(usize) -> String, check: &dyn Fn(&Path)) -> (usize, usize, tempfile::TempDir) {
        let [volume, host, pod] = [(); 3].map(|()| tempfile::tempdir().expect("a directory"));
        fs::create_dir_all(volume.path().join("sub/dir")).expect("makeable");
        fs::write(volume.path().join("sub/dir/own"), "x").expect("writable");
        fs::create_dir(host.path().join("dir")).expect("makeable");
        fs::write(host.path().join("dir/secret"), "x").expect("writable");
        symlink(host.path(), volume.path().join("link")).expect("makeable");
        let (over, began) = (AtomicBool::new(false), Instant::now());
        let (mut bound, mut refused) = (0, 0);
        std::thread::scope(|scope| {
            // Ends the swapping even if the test fails.
            let ends = Ends(&over);
            scope.spawn(|| {
                let (one, other) = (volume.path().join("sub"), volume.path().join("link"));
                while !over.load(Ordering::Relaxed) {
                    renameat_with(CWD, &one, CWD, &other, RenameFlags::EXCHANGE).expect("exchangeable");
                }
            });
            for index in 0..TRIES {
                match files(pod.path(), volume.path(), &path(index)).make() {
                    Ok(mounts) => {
                        let target = Path::new(&mounts.first().expect("one").host_path).to_owned();
                        check(&target);
                        unmount(&target, UnmountFlags::DETACH).expect("it was bound");
                        bound += 1;
                    }
                    Err(PrepareError(text)) => {
                        let generic = "subPath for volumeMount \"v\" of container \"c\"";
                        let is_generic = text.ends_with(generic) || text.contains("create subPath directory");
                        assert!(is_generic, "no host path is disclosed: {text}");
                        refused += 1;
                    }
                }
                if began.elapsed() > PATIENCE {
                    println!("stopped after {index} tries");
                    break;
                }
            }
            drop(ends);
        });
        (bound, refused, host)
    }

    struct Ends<'a>(&'a AtomicBool);

    impl Drop for Ends<'_> {
        fn drop(&mut self) {
            self.0.store(true, Ordering::Relaxed);
        }
    }

    /// A container that mounts that path of the volume.
    fn files(pod: &Path, volume: &Path, path: &str) -> ContainerFiles {
        let sub_path = SubPath {
            volume: "v".to_owned(),
            volume_path: volume.to_owned(),
            path: path.into(),
            mode: 0o755,
            index: 0,
        };
        ContainerFiles {
            container: "c".to_owned(),
            pod_directory: pod.to_owned(),
            log_directory: pod.join("logs"),
            planned: vec![PlannedMount { mount: cri::Mount::default(), sub_path: Some(sub_path) }],
            hosts: HostsFile::None,
            message_path: String::new(),
            selinux: false,
            id_mappings: Vec::new(),
        }
    }

    fn skips(test: &str) -> bool {
        let skips = !rustix::process::geteuid().is_root();
        if skips {
            println!("skipped: {test}: needs root to bind");
        }
        skips
    }

    #[test]
    fn a_sub_path_swapped_for_a_link_while_its_container_starts_is_never_the_hosts() {
        // AC-07-26, CVE-2021-25741
        if skips("a_sub_path_swapped_for_a_link_while_its_container_starts_is_never_the_hosts") {
            return;
        }
        let (bound, refused, _host) = raced(&|_| "sub/dir".to_owned(), &|target| {
            assert!(!target.join("secret").exists(), "the host is not shown");
            assert!(target.join("own").exists(), "what was opened is");
        });
        assert!(bound > 0, "{bound} bound, {refused} refused");
    }

    #[test]
    fn a_sub_path_that_is_made_while_it_is_swapped_is_never_made_on_the_host() {
        // AC-07-25, CVE-2017-1002101
        if skips("a_sub_path_that_is_made_while_it_is_swapped_is_never_made_on_the_host") {
            return;
        }
        let (_, _, host) = raced(&|index| format!("sub/dir/new-{index}/deep"), &|target| {
            assert!(fs::read_dir(target).is_ok_and(|mut entries| entries.next().is_none()), "one that was made");
        });
        let left: Vec<_> = fs::read_dir(host.path().join("dir")).expect("there").flatten().collect();
        assert!(left.len() == 1 && fs::read_dir(host.path()).expect("there").count() == 1, "{left:?}");
    }
}
