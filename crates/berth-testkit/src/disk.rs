//! A small file system that can be filled.

use std::{
    fs,
    io::Write,
    path::{Path, PathBuf},
};

use nix::mount::{MntFlags, MsFlags, mount, umount2};

/// A tmpfs; unmounted when dropped. Needs root.
pub struct Small(PathBuf);

impl Small {
    /// Mounts one of `size` (as tmpfs takes it) over a directory.
    pub fn at(path: &Path, size: &str) -> Self {
        let options = format!("size={size},mode=0750");
        mount(Some("tmpfs"), path, Some("tmpfs"), MsFlags::empty(), Some(options.as_str())).expect("mounted");
        Self(path.to_owned())
    }

    /// Leaves no byte free.
    pub fn fill(&self) {
        let mut file = fs::File::create(self.filler()).expect("a file");
        while file.write_all(&[0; 4096]).is_ok() {}
    }

    /// Makes room again.
    pub fn empty(&self) {
        fs::remove_file(self.filler()).expect("removed");
    }

    fn filler(&self) -> PathBuf {
        self.0.join("filler")
    }
}

impl Drop for Small {
    fn drop(&mut self) {
        let _ = umount2(&self.0, MntFlags::MNT_DETACH); // files in it may be open
    }
}
