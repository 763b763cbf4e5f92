//! Directory layout of the runtime on disk. Pure.
//! Implements spec 09 §6.

use std::path::{Path, PathBuf};

/// Directories of the runtime.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Layout {
    /// Persistent root directory; survives a reboot.
    pub root: PathBuf,
    /// State directory on a tmpfs; a reboot empties it.
    pub state: PathBuf,
}

impl Layout {
    /// Records and files of a sandbox.
    pub fn sandbox(&self, id: &str) -> PathBuf {
        self.sandboxes().join(id)
    }

    /// Directory of all sandboxes.
    pub fn sandboxes(&self) -> PathBuf {
        self.root.join("sandboxes")
    }

    /// Records of a container.
    pub fn container(&self, id: &str) -> PathBuf {
        self.containers().join(id)
    }

    /// Writable content of the volumes that a container's image declares.
    pub fn volumes(&self, id: &str) -> PathBuf {
        self.container(id).join("volumes")
    }

    /// Directory of all containers.
    pub fn containers(&self) -> PathBuf {
        self.root.join("containers")
    }

    /// Writable layer of a container: `u` and `w`.
    pub fn snapshot(&self, id: &str) -> PathBuf {
        self.snapshots().join(id)
    }

    /// Directory of all writable layers.
    pub fn snapshots(&self) -> PathBuf {
        self.root.join("snap")
    }

    /// Directory of image layers.
    pub fn layers(&self) -> PathBuf {
        self.root.join("layers")
    }

    /// Directory of a sandbox's shim: socket, log, exits, shared memory.
    pub fn shim(&self, id: &str) -> PathBuf {
        self.shims().join(id)
    }

    /// Directory of all shims.
    pub fn shims(&self) -> PathBuf {
        self.state.join("s")
    }

    /// Shared memory of a sandbox.
    pub fn shared_memory(&self, id: &str) -> PathBuf {
        self.shim(id).join("shm")
    }

    /// Mount point for the assembly of a container's root.
    pub fn stage(&self) -> PathBuf {
        self.state.join("stage")
    }

    /// Required directories with their modes. Only root may enter them: they contain programs of images with their
    /// owners and set-user-ID bits, which users of the host could execute (CVE-2021-41103, CVE-2024-25621).
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

/// The name of a directory that waits for its deletion.
pub fn deletion_path(path: &Path) -> PathBuf {
    let name = path.file_name().unwrap_or_default().to_string_lossy();
    path.with_file_name(format!("{DOOMED}{name}"))
}

/// Prefix of such names.
pub const DOOMED: &str = ".del-";
