//! What was used to add pods, kept until they are removed.
//!
//! Files as the reference library writes them, so that either finds the other's. Blocking: small files.
//! Behaviour: spec 09b §13.2.

use std::{
    collections::BTreeMap,
    fs, io,
    path::{Path, PathBuf},
};

use base64::{Engine, engine::general_purpose::STANDARD};
use serde::{Deserialize, Serialize};
use serde_json::{Map, Value};

use super::config::{self, Network};
use berth_sys::atomic_file;

/// A file that is larger is not ours.
const LONGEST: u64 = 4 << 20;
const KIND: &str = "cniCacheV1";

/// A pod that was added.
#[derive(Clone, PartialEq, Debug, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct Attachment {
    kind: String,
    /// The sandbox.
    pub container_id: String,
    config: String,
    /// The pod's link.
    pub if_name: String,
    /// The network.
    pub network_name: String,
    /// The file that names the network namespace; not of the reference's older versions.
    #[serde(default)]
    pub netns: String,
    /// Arguments.
    #[serde(default)]
    pub cni_args: Vec<(String, String)>,
    /// What is known about the pod.
    #[serde(default)]
    pub capability_args: Map<String, Value>,
    /// What the last plugin answered.
    #[serde(default)]
    pub result: Option<Value>,
}

impl Attachment {
    /// One that begins.
    pub fn new(network: &Network, sandbox: &str, netns: &str, link: &str) -> Self {
        Self {
            kind: KIND.to_owned(),
            container_id: sandbox.to_owned(),
            config: STANDARD.encode(&network.text),
            if_name: link.to_owned(),
            network_name: network.name.clone(),
            netns: netns.to_owned(),
            cni_args: Vec::new(),
            capability_args: Map::new(),
            result: None,
        }
    }

    /// The configuration it was added by.
    ///
    /// # Errors
    /// Where it cannot be read.
    pub fn network(&self) -> Result<Network, String> {
        let bytes = STANDARD.decode(&self.config).map_err(|e| format!("cached CNI config: {e}"))?;
        config::parse("cached.conflist", &String::from_utf8_lossy(&bytes))
    }

    fn file(&self, directory: &Path) -> PathBuf {
        directory.join(format!("{}-{}-{}", self.network_name, self.container_id, self.if_name))
    }

    /// Writes it.
    ///
    /// # Errors
    /// What writing says.
    pub fn save(&self, directory: &Path) -> io::Result<()> {
        fs::create_dir_all(directory)?;
        let text = serde_json::to_vec(self).map_err(io::Error::other)?;
        atomic_file::replace_unsynced(&self.file(directory), &text, 0o600)
    }

    /// Removes it. One that is gone is fine.
    ///
    /// # Errors
    /// What removing says.
    pub fn remove(&self, directory: &Path) -> io::Result<()> {
        match fs::remove_file(self.file(directory)) {
            Err(e) if e.kind() != io::ErrorKind::NotFound => Err(e),
            _ => Ok(()),
        }
    }
}

/// Every attachment, by sandbox. Files that are no attachments of pods are left alone.
pub fn all(directory: &Path) -> BTreeMap<String, Vec<Attachment>> {
    let mut found: BTreeMap<String, Vec<Attachment>> = BTreeMap::new();
    for entry in fs::read_dir(directory).into_iter().flatten().flatten() {
        if let Some(attachment) = read(&entry) {
            found.entry(attachment.container_id.clone()).or_default().push(attachment);
        }
    }
    found
}

/// The attachments of a sandbox.
pub fn of(directory: &Path, sandbox: &str) -> Vec<Attachment> {
    let mut found = Vec::new();
    for entry in fs::read_dir(directory).into_iter().flatten().flatten() {
        if entry.file_name().to_string_lossy().contains(sandbox) {
            found.extend(read(&entry).filter(|a| a.container_id == sandbox));
        }
    }
    found
}

fn read(entry: &fs::DirEntry) -> Option<Attachment> {
    let is_fine = entry.metadata().is_ok_and(|m| m.is_file() && m.len() <= LONGEST);
    let text = is_fine.then(|| fs::read(entry.path()).ok()).flatten()?;
    serde_json::from_slice(&text).ok().filter(|a: &Attachment| a.kind == KIND)
}
