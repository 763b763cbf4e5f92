//! Embedded runtime for test agents: own directories, bridge, subnet, and socket, cleaned up on drop.
//!
//! [`in_process`] runs the runtime in the test process itself.

pub mod cleanup;
pub mod fixture;
pub mod in_process;

use std::{
    fs,
    path::{Path, PathBuf},
    sync::atomic::{AtomicU32, Ordering},
};

use serde_json::json;

use super::{
    image::{BUSYBOX, Image, write_archive},
    subnet::Subnet,
};

/// Settings of an embedded runtime that an agent opens; drop cleans up after it.
pub struct EmbeddedFixture {
    dir: tempfile::TempDir,
    bridge: String,
    _subnet: Subnet,
}

static NEXT: AtomicU32 = AtomicU32::new(0);

/// Reason why pods cannot run here; `None` if they can.
pub fn missing() -> Option<String> {
    if !nix::unistd::geteuid().is_root() {
        return Some("needs root to start containers".to_owned());
    }
    let is_there = Path::new("/bin/busybox").exists() || Path::new("/usr/bin/busybox").exists();
    (!is_there).then(|| "needs busybox-static to build the test images".to_owned())
}

/// Returns whether a test must be skipped and prints its name and the reason.
///
/// # Panics
/// The test would be skipped on CI.
pub fn skips(test: &str) -> bool {
    let Some(why) = missing() else { return false };
    skipped(test, &why);
    true
}

/// Prints that a test is skipped; panics on CI.
fn skipped(test: &str, why: &str) {
    assert!(std::env::var_os("CI").is_none(), "{test} may not be skipped on CI: {why}");
    println!("skipped: {test}: {why}");
}

impl EmbeddedFixture {
    /// Writes the settings, and test images into the import directory.
    pub fn new() -> Self {
        let dir = tempfile::Builder::new().prefix("berth-emb-").tempdir().expect("failed to create directory");
        let number = NEXT.fetch_add(1, Ordering::Relaxed);
        let bridge = format!("be{}x{number}", std::process::id() % 100_000);
        let subnet = Subnet::take(100);
        let below = |name: &str| dir.path().join(name);
        let settings = json!({"embeddedRuntime": {
            "root": below("root"),
            "state": below("state"),
            "serveSocket": format!("unix://{}", below("cri.sock").display()),
            "importDir": below("images"),
            "cgroupDriver": "cgroupfs",
            "network": {"mode": "builtin", "bridge": bridge, "defaultPodCIDR": subnet.cidr()},
        }});
        fs::write(below("berth.yaml"), settings.to_string()).expect("written");
        fs::create_dir(below("images")).expect("failed to create directory");
        let made = Self { dir, bridge, _subnet: subnet };
        made.import("first", &[Image::busybox(BUSYBOX), Image::pause()]);
        made
    }

    /// Settings file, for `BERTH_CONFIG`.
    pub fn settings(&self) -> PathBuf {
        self.dir.path().join("berth.yaml")
    }

    /// Temporary directory, removed on drop.
    pub fn dir(&self) -> &Path {
        self.dir.path()
    }

    /// CRI endpoint that the agent serves while it runs.
    pub fn endpoint(&self) -> String {
        format!("unix://{}", self.dir.path().join("cri.sock").display())
    }

    /// PID of a sandbox's shim.
    pub fn shim(&self, sandbox: &str) -> u32 {
        let text = fs::read_to_string(self.dir.path().join("state/s").join(sandbox).join("shim.pid"));
        text.expect("no shim found").split_whitespace().next().and_then(|pid| pid.parse().ok()).expect("invalid PID")
    }

    /// Puts images into the import directory, atomically by rename.
    pub fn import(&self, name: &str, images: &[Image<'_>]) {
        let draft = self.dir.path().join("draft.tar");
        write_archive(images, &draft).expect("failed to write the image archive");
        fs::rename(draft, self.dir.path().join("images").join(format!("{name}.tar"))).expect("renamed");
    }
}

impl Drop for EmbeddedFixture {
    fn drop(&mut self) {
        cleanup::end_shims(&self.dir.path().join("state"));
        cleanup::remove_network(&self.bridge);
        cleanup::unmount_below(&self.dir.path().to_string_lossy());
    }
}
