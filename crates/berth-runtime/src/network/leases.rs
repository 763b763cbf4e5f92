//! The file that says which pod has which address.
//!
//! Memory is what counts; the file is for people and for tools, and is written anew after every change. It lies on a tmpfs:
//! a reboot frees everything. Blocking. Behaviour: spec 09b §11.2, §14.

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

/// How long a tool may hold the lock before the file is written without it.
const LONGEST_HOLD: Duration = Duration::from_secs(1);
/// Pause between two attempts to lock.
const BETWEEN_ATTEMPTS: Duration = Duration::from_millis(2);

/// Addresses of pods, and their file.
#[derive(Debug)]
pub struct Leases {
    ipam: Ipam,
    directory: PathBuf,
}

impl Leases {
    /// None yet.
    pub fn new(directory: PathBuf) -> Self {
        Self { ipam: Ipam::default(), directory }
    }

    /// See [`Ipam`].
    pub fn ipam(&self) -> &Ipam {
        &self.ipam
    }

    /// Leases from these nets from now on.
    pub fn set_nets(&mut self, nets: &[Cidr]) {
        self.ipam.set_nets(nets);
    }

    /// Leases addresses for a pod. A file that cannot be written delays no pod: memory is what counts.
    ///
    /// # Errors
    /// Where none is left; nothing is leased then.
    pub fn lease(&mut self, pod: &str) -> Result<Vec<IpAddr>, NetworkError> {
        let given = self.ipam.lease(pod, Instant::now())?;
        self.write_or_warn();
        Ok(given)
    }

    /// Takes back what a pod has.
    pub fn release(&mut self, pod: &str) {
        if self.ipam.release(pod, Instant::now()) {
            self.write_or_warn();
        }
    }

    /// Forgets everything but what these pods have.
    pub fn restore<'a>(&mut self, pods: impl IntoIterator<Item = (&'a str, &'a [IpAddr])>) {
        self.ipam.restore(pods);
        self.write_or_warn();
    }

    fn write_or_warn(&self) {
        if let Err(error) = self.write() {
            warn!(path = %self.directory.join("leases.json").display(), err = %error, "Leases file not written");
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

    /// Tools that change the file take it too.
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
                warn!(err = %error, "A tool holds the lock of the leases file; it is written all the same");
                break;
            }
            thread::sleep(BETWEEN_ATTEMPTS);
        }
        Ok(Lock(file))
    }
}

/// The lock of the file.
struct Lock(File);

impl Drop for Lock {
    /// Closing is not enough: a process that is being started has a copy of the descriptor until it executes its program.
    fn drop(&mut self) {
        let _ = flock(&self.0, FlockOperation::Unlock); // closing it ends it, too
    }
}

#[cfg(test)]
mod tests {
    use std::os::fd::AsFd;

    use super::*;

    /// critest 1: a process that is being started holds a copy of the lock's descriptor for a while.
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
        let held = leases.lock().expect("locked");
        leases.lease("a").expect("leased while a tool holds the lock");
        drop(held);
        // In place of the directory is a file: nothing can be written.
        let mut leases = Leases::new(dir.path().join("leases.json"));
        leases.set_nets(&["10.9.0.0/24".parse().expect("a net")]);
        leases.lease("a").expect("leased without a file");
        leases.release("a");
        assert!(leases.ipam().leases().is_empty());
    }
}
