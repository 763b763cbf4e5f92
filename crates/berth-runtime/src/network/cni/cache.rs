//! CNI result cache: what each pod was added with, kept until its removal.
//!
//! The file format is that of the reference library (libcni), so either can read the other's files. Blocking: small
//! files.
//! Implements spec 09b §13.2.

use std::{
    collections::BTreeMap,
    fs, io,
    path::{Path, PathBuf},
};

use base64::{Engine, engine::general_purpose::STANDARD};
use serde::{Deserialize, Serialize};
use serde_json::{Map, Value};

use super::config::{self, CniNetwork};
use berth_sys::atomic_file;

/// Maximum size of a cache file, bytes; larger files are foreign.
const LONGEST: u64 = 4 << 20;
const KIND: &str = "cniCacheV1";

/// A cached attachment of a pod to a network.
#[derive(Clone, PartialEq, Debug, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct Attachment {
    kind: String,
    /// Sandbox id.
    pub container_id: String,
    config: String,
    /// Interface name in the pod.
    pub if_name: String,
    /// `name` of the CNI network configuration.
    pub network_name: String,
    /// Path of the network namespace; absent in files of older libcni versions.
    #[serde(default)]
    pub netns: String,
    /// `CNI_ARGS` as key-value pairs.
    #[serde(default)]
    pub cni_args: Vec<(String, String)>,
    /// Capability arguments (`runtimeConfig`).
    #[serde(default)]
    pub capability_args: Map<String, Value>,
    /// Result of the last plugin.
    #[serde(default)]
    pub result: Option<Value>,
}

impl Attachment {
    /// A new attachment without arguments and result.
    pub fn new(network: &CniNetwork, sandbox: &str, netns: &str, link: &str) -> Self {
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

    /// The network configuration that the pod was added with.
    ///
    /// # Errors
    /// The cached configuration is malformed.
    pub fn network(&self) -> Result<CniNetwork, String> {
        let bytes = STANDARD.decode(&self.config).map_err(|e| format!("cached CNI config: {e}"))?;
        config::parse("cached.conflist", &String::from_utf8_lossy(&bytes))
    }

    fn file(&self, directory: &Path) -> PathBuf {
        directory.join(format!("{}-{}-{}", self.network_name, self.container_id, self.if_name))
    }

    /// Writes the cache file.
    ///
    /// # Errors
    /// The write fails.
    pub fn save(&self, directory: &Path) -> io::Result<()> {
        fs::create_dir_all(directory)?;
        let text = serde_json::to_vec(self).map_err(io::Error::other)?;
        atomic_file::replace_unsynced(&self.file(directory), &text, 0o600)
    }

    /// Removes the cache file; a missing file is not an error.
    ///
    /// # Errors
    /// The removal fails.
    pub fn remove(&self, directory: &Path) -> io::Result<()> {
        match fs::remove_file(self.file(directory)) {
            Err(e) if e.kind() != io::ErrorKind::NotFound => Err(e),
            _ => Ok(()),
        }
    }
}

/// All attachments by sandbox id. Ignores other files.
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
