//! Where everything lies on disk. Pure. Behaviour: spec 09 §6.

use std::path::{Path, PathBuf};

/// The directories of the runtime.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Layout {
    /// What survives a reboot.
    pub root: PathBuf,
    /// What a reboot takes with it.
    pub state: PathBuf,
}

impl Layout {
    /// A sandbox's records and files.
    pub fn sandbox(&self, id: &str) -> PathBuf {
        self.sandboxes().join(id)
    }

    /// All sandboxes.
    pub fn sandboxes(&self) -> PathBuf {
        self.root.join("sandboxes")
    }

    /// A container's records.
    pub fn container(&self, id: &str) -> PathBuf {
        self.containers().join(id)
    }

    /// Writable content of volumes that a container's image names.
    pub fn volumes(&self, id: &str) -> PathBuf {
        self.container(id).join("volumes")
    }

    /// All containers.
    pub fn containers(&self) -> PathBuf {
        self.root.join("containers")
    }

    /// What a container writes: `u` and `w`.
    pub fn snapshot(&self, id: &str) -> PathBuf {
        self.snapshots().join(id)
    }

    /// All of these.
    pub fn snapshots(&self) -> PathBuf {
        self.root.join("snap")
    }

    /// Layers of images.
    pub fn layers(&self) -> PathBuf {
        self.root.join("layers")
    }

    /// A sandbox's shim: socket, log, exits, shared memory.
    pub fn shim(&self, id: &str) -> PathBuf {
        self.shims().join(id)
    }

    /// All of these.
    pub fn shims(&self) -> PathBuf {
        self.state.join("s")
    }

    /// A sandbox's shared memory.
    pub fn shared_memory(&self, id: &str) -> PathBuf {
        self.shim(id).join("shm")
    }

    /// A directory to mount on while a root is put together.
    pub fn stage(&self) -> PathBuf {
        self.state.join("stage")
    }

    /// Directories that must be there, with their modes: root's alone, because they hold programs of images with their
    /// owners and set-user-ID bits, which users of the host could run (CVE-2021-41103, CVE-2024-25621).
    pub fn directories(&self) -> Vec<(PathBuf, u32)> {
        vec![
            (self.root.clone(), 0o700),
            (self.sandboxes(), 0o700),
            (self.containers(), 0o700),
            (self.snapshots(), 0o700),
            (self.layers(), 0o700),
            (self.state.clone(), 0o700),
            (self.shims(), 0o700),
            (self.stage(), 0o700),
        ]
    }
}

/// The name under which a directory waits to be deleted.
pub fn doomed(path: &Path) -> PathBuf {
    let name = path.file_name().unwrap_or_default().to_string_lossy();
    path.with_file_name(format!("{DOOMED}{name}"))
}

/// What such names begin with.
pub const DOOMED: &str = ".del-";
