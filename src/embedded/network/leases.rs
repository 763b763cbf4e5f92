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
    time::Instant,
};

use rustix::fs::{FlockOperation, flock};
use serde_json::json;

use super::{cidr::Cidr, errors::NetworkError, ipam::Ipam};
use crate::sys::atomic_file;

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

    /// Leases addresses for a pod.
    ///
    /// # Errors
    /// Where none is left or the file cannot be written; nothing is leased then.
    pub fn lease(&mut self, pod: &str) -> Result<Vec<IpAddr>, NetworkError> {
        let given = self.ipam.lease(pod, Instant::now())?;
        if let Err(e) = self.write() {
            self.ipam.release(pod, Instant::now());
            return Err(NetworkError::kernel("leases file", e));
        }
        Ok(given)
    }

    /// Takes back what a pod has.
    ///
    /// # Errors
    /// Where the file cannot be written; they are free all the same.
    pub fn release(&mut self, pod: &str) -> Result<(), NetworkError> {
        if !self.ipam.release(pod, Instant::now()) {
            return Ok(());
        }
        self.write().map_err(|e| NetworkError::kernel("leases file", e))
    }

    /// Forgets everything but what these pods have.
    ///
    /// # Errors
    /// Where the file cannot be written.
    pub fn restore<'a>(&mut self, pods: impl IntoIterator<Item = (&'a str, &'a [IpAddr])>) -> Result<(), NetworkError> {
        self.ipam.restore(pods);
        self.write().map_err(|e| NetworkError::kernel("leases file", e))
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
    fn lock(&self) -> io::Result<File> {
        if !self.directory.is_dir() {
            fs::DirBuilder::new().recursive(true).mode(0o700).create(&self.directory)?;
        }
        let file = OpenOptions::new()
            .create(true)
            .truncate(false)
            .write(true)
            .mode(0o600)
            .open(self.directory.join("lock"))?;
        flock(&file, FlockOperation::NonBlockingLockExclusive)?;
        Ok(file)
    }
}
