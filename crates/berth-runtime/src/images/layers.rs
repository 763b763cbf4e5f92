//! Store of unpacked layers: one numbered directory each.
//!
//! A layer with a `layer.json` is complete even after a crash: its file system is synced before that file is written.
//! Layers without one are removed at the next startup. A layer in use is protected by a lease, or by an owner passed to
//! the collector. Blocking. Implements spec 09 §6, §7; 09b §5.1, §6.

use std::{
    collections::{BTreeMap, BTreeSet},
    fs::{self, File},
    io::Read,
    os::unix::fs::DirBuilderExt,
    path::{Path, PathBuf},
    sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError},
    time::Instant,
};

use serde::{Deserialize, Serialize};
use tracing::warn;

use super::{
    digest::Digest,
    error::{ImageError, ImageErrorKind, IoContext},
    tar_split::RestoredStream,
    unpacker::{
        self, LayerFormat, UnpackPolicy,
        root::RootDir,
        unpack_process::{self, UnpackJob},
    },
};
use crate::store::record::{self, Durability};
use berth_metrics::Unpacks;
use berth_sys::{failpoint, tree_removal::remove_tree_at};

/// File in a layer's directory that describes how to restore its tar stream.
const RECIPE: &str = "recipe";

/// Record of a layer, `layer.json`.
#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub struct LayerMeta {
    /// Version of the format.
    pub v: u64,
    /// Chain ID: identifies the layer together with those below it.
    pub chain_id: Digest,
    /// Digest of the uncompressed tar stream.
    pub diff_id: Digest,
    /// Number of the layer below; none for the bottom layer.
    pub parent: Option<u64>,
    /// Total size of its files, bytes.
    pub size: u64,
    /// Number of entries.
    pub inodes: u64,
    /// Whether the directory includes the layers below, for machines without overlayfs.
    #[serde(default)]
    pub merged: bool,
    /// Length of the uncompressed tar stream, bytes, if it can be restored; otherwise 0.
    #[serde(default)]
    pub stream: u64,
    /// Whether the layer was found broken: only containers that use it keep it.
    #[serde(default)]
    pub disowned: bool,
}

#[derive(Default)]
struct LayerTable {
    layers: BTreeMap<u64, LayerMeta>,
    chains: BTreeMap<Digest, u64>,
    /// Chains being unpacked now.
    busy: BTreeSet<Digest>,
    /// Lease count of each layer.
    leased: BTreeMap<u64, usize>,
    next: u64,
}

/// Helpers for unpacking.
#[derive(Clone, Debug, Default)]
pub struct UnpackHelpers {
    /// Program that unpacks in a child process (`berth`); none: unpack in this process.
    pub unpacker: Option<PathBuf>,
    /// Metrics of unpacks.
    pub unpacks: Option<Unpacks>,
}

/// The store of unpacked layers.
pub struct Layers {
    folder: PathBuf,
    policy: UnpackPolicy,
    helpers: UnpackHelpers,
    table: Mutex<LayerTable>,
    freed: Condvar,
}

/// Protects layers from collection until a record owns them.
pub struct Lease {
    of: Arc<Layers>,
    numbers: Vec<u64>,
}

impl Lease {
    /// Numbers of the layers, bottom first.
    pub fn numbers(&self) -> &[u64] {
        &self.numbers
    }
}

impl Drop for Lease {
    fn drop(&mut self) {
        let mut table = self.of.table();
        for number in &self.numbers {
            if let Some(count) = table.leased.get_mut(number) {
                *count = count.saturating_sub(1);
            }
        }
        table.leased.retain(|_, count| *count > 0);
    }
}

/// Exclusive right to unpack a chain; other threads wait.
struct UnpackClaim<'a> {
    of: &'a Layers,
    chain: Digest,
}

impl Drop for UnpackClaim<'_> {
    fn drop(&mut self) {
        self.of.table().busy.remove(&self.chain);
        self.of.freed.notify_all();
    }
}

impl Layers {
    /// Format in which layers are unpacked.
    pub fn form(&self) -> LayerFormat {
        self.policy.form
    }

    /// Opens the store below `$ROOT/layers`. Deletes layers that are uncommitted, partially deleted, or of the other
    /// format.
    ///
    /// # Errors
    /// The directory cannot be created or read.
    pub fn open(root: &Path, policy: UnpackPolicy, helpers: UnpackHelpers) -> Result<Arc<Self>, ImageError> {
        let folder = root.join("layers");
        fs::DirBuilder::new().recursive(true).mode(0o700).create(&folder).attempt("create layers")?;
        let mut table = LayerTable { next: 1, ..LayerTable::default() };
        for entry in fs::read_dir(&folder).attempt("list layers")? {
            let name = entry.attempt("list layers")?.file_name();
            let name = name.to_string_lossy().into_owned();
            let number = name.trim_start_matches(".del-").parse::<u64>().ok();
            table.next = table.next.max(number.unwrap_or(0).saturating_add(1));
            match name.parse::<u64>().ok().and_then(|number| Some((number, load(&folder.join(&name))?))) {
                Some((number, meta)) if meta.merged == (policy.form == LayerFormat::Merged) => {
                    if !meta.disowned {
                        table.chains.insert(meta.chain_id, number);
                    }
                    table.layers.insert(number, meta);
                }
                _ => delete(&folder, &name),
            }
        }
        Ok(Arc::new(Self { folder, policy, helpers, table: Mutex::new(table), freed: Condvar::new() }))
    }

    fn table(&self) -> MutexGuard<'_, LayerTable> {
        self.table.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Directory of all layers.
    pub fn folder(&self) -> &Path {
        &self.folder
    }

    /// Limits and format for unpacking.
    pub fn policy(&self) -> &UnpackPolicy {
        &self.policy
    }

    /// Directory of a layer's files.
    pub fn path(&self, number: u64) -> PathBuf {
        self.folder.join(number.to_string()).join("d")
    }

    /// Total bytes and inodes of all layers.
    pub fn usage(&self) -> (u64, u64) {
        let table = self.table();
        let sum = |of: fn(&LayerMeta) -> u64| table.layers.values().map(of).fold(0u64, u64::saturating_add);
        (sum(|meta| meta.size), sum(|meta| meta.inodes))
    }

    /// Number of layers.
    pub fn count(&self) -> usize {
        self.table().layers.len()
    }

    /// Record of a layer.
    pub fn meta(&self, number: u64) -> Option<LayerMeta> {
        self.table().layers.get(&number).cloned()
    }

    /// Restores a layer's tar stream from its files.
    ///
    /// # Errors
    /// The layer does not exist, or was unpacked without a recipe.
    pub fn stream(&self, number: u64) -> Result<RestoredStream, ImageError> {
        let missing = || ImageError::not_found(format!("layer {number} not found"));
        let meta = self.meta(number).ok_or_else(missing)?;
        if meta.stream == 0 {
            return Err(ImageError::bad_content(format!("layer {number} cannot be restored from its files")));
        }
        let recipe = File::open(self.folder.join(number.to_string()).join(RECIPE)).attempt("open recipe")?;
        RestoredStream::new(recipe, RootDir::open(&self.path(number)).attempt("open layer")?)
    }

    /// Marks a layer as broken: containers that use it keep it, the next request for its content unpacks it again.
    pub fn mark_broken(&self, number: u64) {
        let meta = {
            let mut table = self.table();
            let Some(meta) = table.layers.get_mut(&number) else { return };
            meta.disowned = true;
            let meta = meta.clone();
            if table.chains.get(&meta.chain_id) == Some(&number) {
                table.chains.remove(&meta.chain_id);
            }
            meta
        };
        let path = self.folder.join(number.to_string()).join("layer.json");
        if let Err(error) = record::write(&path, &meta, Durability::Synced) {
            warn!(layer = number, err = %error, "Failed to persist the removal of a corrupt layer, it may be reused after a restart");
        }
    }

    /// An empty lease.
    pub fn lease(self: &Arc<Self>) -> Lease {
        Lease { of: Arc::clone(self), numbers: Vec::new() }
    }

    /// Leases these layers; `None` if one does not exist.
    pub fn lease_all(self: &Arc<Self>, numbers: &[u64]) -> Option<Lease> {
        let mut table = self.table();
        if !numbers.iter().all(|number| table.layers.contains_key(number)) {
            return None;
        }
        for number in numbers {
            *table.leased.entry(*number).or_default() += 1;
        }
        Some(Lease { of: Arc::clone(self), numbers: numbers.to_vec() })
    }

    /// Number of layers present of these chains, counted from the bottom.
    pub fn known(&self, chains: &[Digest]) -> usize {
        let table = self.table();
        chains.iter().rposition(|chain| table.chains.contains_key(chain)).map_or(0, |at| at + 1)
    }

    /// Whether all these layers exist.
    pub fn has_all(&self, numbers: &[u64]) -> bool {
        let table = self.table();
        numbers.iter().all(|number| table.layers.contains_key(number))
    }

    /// Extends a lease by the next layer: an existing one, or the stream from `open`, unpacked and committed.
    /// Single-flight per chain; `open` is called only if the layer must be unpacked.
    ///
    /// # Errors
    /// The stream is invalid, does not match `diff_id`, or cannot be written; partial results are deleted.
    pub fn extend<R: Read>(
        &self,
        lease: &mut Lease,
        chain: Digest,
        diff_id: Digest,
        open: impl FnOnce() -> Result<R, ImageError>,
    ) -> Result<(), ImageError> {
        let Some(claim) = self.claim(lease, chain) else { return Ok(()) };
        let packed = open()?;
        let parent = lease.numbers.last().copied();
        let number = {
            let mut table = self.table();
            let number = table.next;
            table.next = number.saturating_add(1);
            number
        };
        let begun = Instant::now();
        let made = self.unpack(number, parent, packed, diff_id, chain);
        if let Some(unpacks) = self.helpers.unpacks.as_ref().filter(|_| made.is_ok()) {
            unpacks.took(begun.elapsed());
        }
        let meta = made.inspect_err(|_| delete(&self.folder, &number.to_string()))?;
        let mut table = self.table();
        table.layers.insert(number, meta);
        table.chains.insert(chain, number);
        *table.leased.entry(number).or_default() += 1;
        lease.numbers.push(number);
        drop(table);
        drop(claim);
        Ok(())
    }

    /// Waits until no thread unpacks the chain; `None` if the layer exists then, and is leased.
    fn claim(&self, lease: &mut Lease, chain: Digest) -> Option<UnpackClaim<'_>> {
        let mut table = self.table();
        loop {
            if let Some(number) = table.chains.get(&chain).copied() {
                *table.leased.entry(number).or_default() += 1;
                lease.numbers.push(number);
                return None;
            }
            if table.busy.insert(chain) {
                return Some(UnpackClaim { of: self, chain });
            }
            table = self.freed.wait(table).unwrap_or_else(PoisonError::into_inner);
        }
    }

    fn unpack<R: Read>(
        &self,
        number: u64,
        parent: Option<u64>,
        packed: R,
        diff_id: Digest,
        chain_id: Digest,
    ) -> Result<LayerMeta, ImageError> {
        let folder = self.folder.join(number.to_string());
        fs::DirBuilder::new().mode(0o700).create(&folder).attempt("create layer")?;
        let target = folder.join("d");
        fs::DirBuilder::new().mode(0o755).create(&target).attempt("create layer")?;
        let is_merged = self.policy.form == LayerFormat::Merged;
        if let Some(parent) = parent.filter(|_| is_merged) {
            super::tree_copy::copy_tree(&self.path(parent), &target, super::tree_copy::Budget::UNLIMITED)?;
        }
        let recipe = folder.join(RECIPE);
        let applied = match &self.helpers.unpacker {
            Some(program) => {
                let job = UnpackJob { into: target, recipe, policy: self.policy, parent: std::process::id() };
                unpack_process::apply(packed, program, &job)?
            }
            None => {
                let recipe = File::create_new(recipe).attempt("create layer")?;
                unpacker::apply_noting(packed, &target, &self.policy, Some(recipe))?
            }
        };
        if applied.diff_id != diff_id {
            let text = format!("layer digest mismatch: {} instead of {diff_id}", applied.diff_id);
            return Err(ImageError::new(ImageErrorKind::DataLoss, text));
        }
        let (size, inodes) = (applied.bytes, applied.entries);
        let stream = if applied.is_noted { applied.stream } else { 0 };
        let meta = LayerMeta {
            v: record::VERSION,
            chain_id,
            diff_id,
            parent,
            size,
            inodes,
            merged: is_merged,
            stream,
            disowned: false,
        };
        commit(&self.folder, &folder, &meta)?;
        Ok(meta)
    }

    /// Numbers of leased layers.
    pub fn leased(&self) -> Vec<u64> {
        self.table().leased.keys().copied().collect()
    }

    /// Deletes all layers that are neither owned nor leased; returns their number.
    pub fn sweep(&self, owned: &BTreeSet<u64>) -> usize {
        let doomed: Vec<u64> = {
            let mut table = self.table();
            let is_free = |number: &u64| !owned.contains(number) && !table.leased.contains_key(number);
            let doomed: Vec<u64> = table.layers.keys().copied().filter(is_free).collect();
            for number in &doomed {
                let chain = table.layers.remove(number).map(|meta| meta.chain_id);
                // For a broken layer another one may have taken over the chain.
                if let Some(chain) = chain.filter(|chain| table.chains.get(chain) == Some(number)) {
                    table.chains.remove(&chain);
                }
            }
            doomed
        };
        for number in &doomed {
            delete(&self.folder, &number.to_string());
        }
        doomed.len()
    }
}

fn load(folder: &Path) -> Option<LayerMeta> {
    match record::read::<LayerMeta>(&folder.join("layer.json")) {
        Ok(meta) => meta,
        Err(error) => {
            warn!(layer = %folder.display(), error = %error, "Removing corrupt layer");
            None
        }
    }
}

/// Syncs the files, then writes the record, then syncs the directory.
fn commit(all: &Path, folder: &Path, meta: &LayerMeta) -> Result<(), ImageError> {
    let handle = File::open(folder).attempt("open layer")?;
    failpoint::reached("layer.unpacked");
    rustix::fs::syncfs(&handle).attempt("sync layer")?;
    failpoint::reached("layer.synced");
    record::write(&folder.join("layer.json"), meta, Durability::Synced).attempt("write layer.json")?;
    failpoint::reached("layer.written");
    File::open(all).and_then(|folder| folder.sync_all()).attempt("sync layers")
}

/// Deletes `name` in `folder`, renaming it out of the way first. A failed deletion is retried at the next startup.
pub fn delete(folder: &Path, name: &str) {
    let hidden = if name.starts_with(".del-") { name.to_owned() } else { format!(".del-{name}") };
    let renamed = hidden == name || fs::rename(folder.join(name), folder.join(&hidden)).is_ok();
    failpoint::reached("layer.hidden");
    let removed = RootDir::open(folder).and_then(|folder| {
        let name = if renamed { &hidden } else { name };
        remove_tree_at(folder.fd(), name.as_ref())
    });
    if let Err(error) = removed {
        warn!(path = %folder.join(&hidden).display(), error = %error, "Failed to delete layer directory");
    }
}
