//! Persists address leases to a file for operators and tools.
//!
//! The in-memory state is authoritative; each change rewrites the file. It resides on a tmpfs: a reboot releases all
//! leases. Blocking. Implements spec 09b §11.2, §14.

use std::{
    fs::{self, File, OpenOptions},
    io,
    net::IpAddr,
    os::unix::fs::{DirBuilderExt, OpenOptionsExt},
    path::PathBuf,
    thread,
    time::{Duration, Instant},
};

use rustix::fs::{FlockOperation, flock};
use serde_json::json;
use tracing::warn;

use super::{cidr::Cidr, errors::NetworkError, ipam::Ipam};
use berth_sys::atomic_file;

/// How long to wait for a tool's lock before writing the file without it.
const LONGEST_HOLD: Duration = Duration::from_secs(1);
/// Delay between two attempts to lock.
const BETWEEN_ATTEMPTS: Duration = Duration::from_millis(2);

/// Address leases of pods with their file.
#[derive(Debug)]
pub struct Leases {
    ipam: Ipam,
    directory: PathBuf,
}

impl Leases {
    /// Creates an empty set; writes nothing.
    pub fn new(directory: PathBuf) -> Self {
        Self { ipam: Ipam::default(), directory }
    }

    /// The leases; see [`Ipam`].
    pub fn ipam(&self) -> &Ipam {
        &self.ipam
    }

    /// Sets the networks for new leases.
    pub fn set_nets(&mut self, nets: &[Cidr]) {
        self.ipam.set_nets(nets);
    }

    /// Leases addresses to a pod. A failure to write the file does not delay the pod: the in-memory state is
    /// authoritative.
    ///
    /// # Errors
    /// A network has no free address; then nothing is leased.
    pub fn lease(&mut self, pod: &str) -> Result<Vec<IpAddr>, NetworkError> {
        let given = self.ipam.lease(pod, Instant::now())?;
        self.write_or_warn();
        Ok(given)
    }

    /// Releases the addresses of a pod.
    pub fn release(&mut self, pod: &str) {
        if self.ipam.release(pod, Instant::now()) {
            self.write_or_warn();
        }
    }

    /// Replaces all leases with those of these pods.
    pub fn restore<'a>(&mut self, pods: impl IntoIterator<Item = (&'a str, &'a [IpAddr])>) {
        self.ipam.restore(pods);
        self.write_or_warn();
    }

    fn write_or_warn(&self) {
        if let Err(error) = self.write() {
            warn!(path = %self.directory.join("leases.json").display(), err = %error, "Failed to write IP address leases file");
        }
    }

    fn write(&self) -> io::Result<()> {
        let _lock = self.lock()?;
        let leases: Vec<_> =
            self.ipam.leases().iter().map(|(address, pod)| json!({"address": address, "sandbox": pod})).collect();
        let mut text = serde_json::to_vec(&json!({"v": 1, "leases": leases}))?;
        text.push(b'\n');
        atomic_file::replace_unsynced(&self.directory.join("leases.json"), &text, 0o600)
    }

    /// Locks the file; tools that change it take the same lock.
    fn lock(&self) -> io::Result<Lock> {
        if !self.directory.is_dir() {
            fs::DirBuilder::new().recursive(true).mode(0o700).create(&self.directory)?;
        }
        let file = OpenOptions::new()
            .create(true)
            .truncate(false)
            .write(true)
            .mode(0o600)
            .open(self.directory.join("lock"))?;
        let begun = Instant::now();
        while let Err(error) = flock(&file, FlockOperation::NonBlockingLockExclusive) {
            if begun.elapsed() > LONGEST_HOLD {
                warn!(err = %error, "Timed out waiting for the lock of the leases file, writing without it");
                break;
            }
            thread::sleep(BETWEEN_ATTEMPTS);
        }
        Ok(Lock(file))
    }
}

/// Guard of the file lock.
struct Lock(File);

impl Drop for Lock {
    /// Unlocks explicitly: a child process between fork and exec has a copy of the descriptor that would keep the lock.
    fn drop(&mut self) {
        let _ = flock(&self.0, FlockOperation::Unlock); // closing the file releases it as well
    }
}

#[cfg(test)]
mod tests {
    use std::os::fd::AsFd;

    use super::*;

    /// critest 1: a child process that is being started keeps a copy of the lock's descriptor for a while.
    #[test]
    fn a_copy_of_the_descriptor_does_not_keep_the_lock() {
        let dir = tempfile::tempdir().expect("a directory");
        let leases = Leases::new(dir.path().to_owned());
        let lock = leases.lock().expect("locked");
        let copy = lock.0.as_fd().try_clone_to_owned().expect("a copy");
        drop(lock);
        let begun = Instant::now();
        drop(leases.lock().expect("locked again"));
        assert!(begun.elapsed() < LONGEST_HOLD, "{:?}", begun.elapsed());
        drop(copy);
    }

    #[test]
    fn leases_fail_for_no_lock_and_for_no_disk() {
        let dir = tempfile::tempdir().expect("a directory");
        let mut leases = Leases::new(dir.path().to_owned());
        leases.set_nets(&["10.9.0.0/24".parse().expect("a net")]);
        let lock = leases.lock().expect("locked");
        leases.lease("a").expect("leased while a tool holds the lock");
        drop(lock);
        // The directory's path is a file: nothing can be written.
        let mut leases = Leases::new(dir.path().join("leases.json"));
        leases.set_nets(&["10.9.0.0/24".parse().expect("a net")]);
        leases.lease("a").expect("leased without a file");
        leases.release("a");
        assert!(leases.ipam().leases().is_empty());
    }
}
