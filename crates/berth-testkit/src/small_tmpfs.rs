//! Small tmpfs that tests can fill up.

use std::{
    fs,
    io::Write,
    path::{Path, PathBuf},
};

use nix::mount::{MntFlags, MsFlags, mount, umount2};

/// Mounted tmpfs; drop unmounts it. Needs root.
pub struct SmallTmpfs(PathBuf);

impl SmallTmpfs {
    /// Mounts a tmpfs of `size` (in tmpfs syntax) on a directory.
    pub fn at(path: &Path, size: &str) -> Self {
        let options = format!("size={size},mode=0750");
        mount(Some("tmpfs"), path, Some("tmpfs"), MsFlags::empty(), Some(options.as_str())).expect("mounted");
        Self(path.to_owned())
    }

    /// Fills the file system completely.
    pub fn fill(&self) {
        let mut file = fs::File::create(self.filler()).expect("failed to create the file");
        while file.write_all(&[0; 4096]).is_ok() {}
    }

    /// Frees the space that [`Self::fill`] has used.
    pub fn empty(&self) {
        fs::remove_file(self.filler()).expect("removed");
    }

    fn filler(&self) -> PathBuf {
        self.0.join("filler")
    }
}

impl Drop for SmallTmpfs {
    fn drop(&mut self) {
        let _ = umount2(&self.0, MntFlags::MNT_DETACH); // lazy: files in it may be open
    }
}
