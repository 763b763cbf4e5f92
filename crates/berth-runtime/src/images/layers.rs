//! Unpacked layers: a directory each, by a counting number.
//!
//! A layer that has a `layer.json` is whole, whatever happened: its file system was synced before that file was written.
//! What has none is removed at the next start. Who uses a layer holds a lease or is an owner the collector asks. Blocking.
//! Behaviour: spec 09 §6, §7; 09b §5.1, §6.

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
    apply::{
        self, Form, Policy,
        apart::{self, Job},
        root::RootDir,
    },
    digest::Digest,
    error::{Attempt, ImageError, Kind},
    recipe::Rebuilt,
};
use crate::store::record::{self, Durability};
use berth_metrics::Unpacks;
use berth_sys::{remove_tree::remove_tree_at, step};

/// How a layer's stream is put together again, in its folder.
const RECIPE: &str = "recipe";

/// What is remembered of a layer.
#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub struct LayerMeta {
    /// The version of this form.
    pub v: u64,
    /// What it and all below it are together.
    pub chain_id: Digest,
    /// Digest of its unpacked stream.
    pub diff_id: Digest,
    /// The layer below it.
    pub parent: Option<u64>,
    /// Bytes of its files.
    pub size: u64,
    /// Entries.
    pub inodes: u64,
    /// Whether the layers below it are in it: for machines without overlays.
    #[serde(default)]
    pub merged: bool,
    /// Bytes of its unpacked stream, where that can be put together again; else 0.
    #[serde(default)]
    pub stream: u64,
    /// Whether it was found broken: only containers that have it keep it.
    #[serde(default)]
    pub disowned: bool,
}

#[derive(Default)]
struct Table {
    layers: BTreeMap<u64, LayerMeta>,
    chains: BTreeMap<Digest, u64>,
    /// Chains somebody unpacks now.
    busy: BTreeSet<Digest>,
    /// Layers in the hands of somebody who has no record yet, how often.
    leased: BTreeMap<u64, usize>,
    next: u64,
}

/// Who helps with unpacking.
#[derive(Clone, Debug, Default)]
pub struct Helpers {
    /// The program that does it in a process of its own (`berth`); none: we do it ourselves.
    pub unpacker: Option<PathBuf>,
    /// Who counts.
    pub unpacks: Option<Unpacks>,
}

/// The layers.
pub struct Layers {
    folder: PathBuf,
    policy: Policy,
    helpers: Helpers,
    table: Mutex<Table>,
    freed: Condvar,
}

/// Keeps layers from being collected until a record owns them.
pub struct Lease {
    of: Arc<Layers>,
    numbers: Vec<u64>,
}

impl Lease {
    /// The layers from the bottom.
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

/// A chain that this thread unpacks; others wait.
struct Claim<'a> {
    of: &'a Layers,
    chain: Digest,
}

impl Drop for Claim<'_> {
    fn drop(&mut self) {
        self.of.table().busy.remove(&self.chain);
        self.of.freed.notify_all();
    }
}

impl Layers {
    /// Under which rules layers are unpacked here.
    pub fn form(&self) -> Form {
        self.policy.form
    }

    /// Those below `$ROOT/layers`. What was not committed, and what was being deleted, goes; so do layers of the other form.
    ///
    /// # Errors
    /// What the kernel says.
    pub fn open(root: &Path, policy: Policy, helpers: Helpers) -> Result<Arc<Self>, ImageError> {
        let folder = root.join("layers");
        fs::DirBuilder::new().recursive(true).mode(0o700).create(&folder).attempt("create layers")?;
        let mut table = Table { next: 1, ..Table::default() };
        for entry in fs::read_dir(&folder).attempt("list layers")? {
            let name = entry.attempt("list layers")?.file_name();
            let name = name.to_string_lossy().into_owned();
            let number = name.trim_start_matches(".del-").parse::<u64>().ok();
            table.next = table.next.max(number.unwrap_or(0).saturating_add(1));
            match name.parse::<u64>().ok().and_then(|number| Some((number, load(&folder.join(&name))?))) {
                Some((number, meta)) if meta.merged == (policy.form == Form::Merged) => {
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

    fn table(&self) -> MutexGuard<'_, Table> {
        self.table.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// The directory of all of them.
    pub fn folder(&self) -> &Path {
        &self.folder
    }

    /// Under which rules layers are unpacked.
    pub fn policy(&self) -> &Policy {
        &self.policy
    }

    /// Where a layer's files are.
    pub fn path(&self, number: u64) -> PathBuf {
        self.folder.join(number.to_string()).join("d")
    }

    /// Bytes and inodes of all layers.
    pub fn usage(&self) -> (u64, u64) {
        let table = self.table();
        let sum = |of: fn(&LayerMeta) -> u64| table.layers.values().map(of).fold(0u64, u64::saturating_add);
        (sum(|meta| meta.size), sum(|meta| meta.inodes))
    }

    /// How many there are.
    pub fn count(&self) -> usize {
        self.table().layers.len()
    }

    /// What is remembered of a layer.
    pub fn meta(&self, number: u64) -> Option<LayerMeta> {
        self.table().layers.get(&number).cloned()
    }

    /// A layer's stream, put together from its files.
    ///
    /// # Errors
    /// Where it is not there, or was unpacked without noting how.
    pub fn stream(&self, number: u64) -> Result<Rebuilt, ImageError> {
        let missing = || ImageError::not_found(format!("layer {number} is not here"));
        let meta = self.meta(number).ok_or_else(missing)?;
        if meta.stream == 0 {
            return Err(ImageError::bad_content(format!("layer {number} cannot be put together from its files")));
        }
        let recipe = File::open(self.folder.join(number.to_string()).join(RECIPE)).attempt("open the recipe")?;
        Rebuilt::new(recipe, RootDir::open(&self.path(number)).attempt("open layer")?)
    }

    /// From now on a layer is only for those who have it: the next who wants its content unpacks it again.
    pub fn disown(&self, number: u64) {
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
            warn!(layer = number, err = %error, "A broken layer may be used again after a restart");
        }
    }

    /// A lease of nothing yet.
    pub fn lease(self: &Arc<Self>) -> Lease {
        Lease { of: Arc::clone(self), numbers: Vec::new() }
    }

    /// Holds these layers; `None` where one is not there.
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

    /// How many layers of these chains, from the bottom, are there.
    pub fn known(&self, chains: &[Digest]) -> usize {
        let table = self.table();
        chains.iter().rposition(|chain| table.chains.contains_key(chain)).map_or(0, |at| at + 1)
    }

    /// Whether all these layers are there.
    pub fn has_all(&self, numbers: &[u64]) -> bool {
        let table = self.table();
        numbers.iter().all(|number| table.layers.contains_key(number))
    }

    /// Adds the next layer to a lease: the one that is there, or what `open` gives, unpacked and committed. `open` is asked
    /// only where it is needed, and nobody else unpacks the same chain meanwhile.
    ///
    /// # Errors
    /// Where the stream is broken, is not what `diff_id` says, or cannot be written; nothing stays behind.
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

    /// Waits until nobody unpacks a chain; `None` where it is there then, and leased.
    fn claim(&self, lease: &mut Lease, chain: Digest) -> Option<Claim<'_>> {
        let mut table = self.table();
        loop {
            if let Some(number) = table.chains.get(&chain).copied() {
                *table.leased.entry(number).or_default() += 1;
                lease.numbers.push(number);
                return None;
            }
            if table.busy.insert(chain) {
                return Some(Claim { of: self, chain });
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
        let is_merged = self.policy.form == Form::Merged;
        if let Some(parent) = parent.filter(|_| is_merged) {
            super::copy::tree(&self.path(parent), &target, super::copy::Budget::UNLIMITED)?;
        }
        let recipe = folder.join(RECIPE);
        let applied = match &self.helpers.unpacker {
            Some(program) => {
                let job = Job { into: target, recipe, policy: self.policy, parent: std::process::id() };
                apart::apply(packed, program, &job)?
            }
            None => {
                let recipe = File::create_new(recipe).attempt("create layer")?;
                apply::apply_noting(packed, &target, &self.policy, Some(recipe))?
            }
        };
        if applied.diff_id != diff_id {
            let text = format!("layer digest mismatch: {} instead of {diff_id}", applied.diff_id);
            return Err(ImageError::new(Kind::DataLoss, text));
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

    /// Layers in somebody's hands.
    pub fn leased(&self) -> Vec<u64> {
        self.table().leased.keys().copied().collect()
    }

    /// Deletes every layer that is in nobody's hands; how many.
    pub fn sweep(&self, owned: &BTreeSet<u64>) -> usize {
        let doomed: Vec<u64> = {
            let mut table = self.table();
            let is_free = |number: &u64| !owned.contains(number) && !table.leased.contains_key(number);
            let doomed: Vec<u64> = table.layers.keys().copied().filter(is_free).collect();
            for number in &doomed {
                let chain = table.layers.remove(number).map(|meta| meta.chain_id);
                // Where it was broken another has its place.
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
            warn!(layer = %folder.display(), error = %error, "Broken layer is removed");
            None
        }
    }
}

/// Files first, then what says that they are whole, then that it is there.
fn commit(all: &Path, folder: &Path, meta: &LayerMeta) -> Result<(), ImageError> {
    let handle = File::open(folder).attempt("open layer")?;
    step::reached("layer.unpacked");
    rustix::fs::syncfs(&handle).attempt("sync layer")?;
    step::reached("layer.synced");
    record::write(&folder.join("layer.json"), meta, Durability::Synced).attempt("write layer.json")?;
    step::reached("layer.written");
    File::open(all).and_then(|folder| folder.sync_all()).attempt("sync layers")
}

/// Deletes `name` of `folder`, out of everybody's sight first. What cannot be deleted now is tried again at the next start.
pub fn delete(folder: &Path, name: &str) {
    let hidden = if name.starts_with(".del-") { name.to_owned() } else { format!(".del-{name}") };
    let renamed = hidden == name || fs::rename(folder.join(name), folder.join(&hidden)).is_ok();
    step::reached("layer.hidden");
    let removed = RootDir::open(folder).and_then(|folder| {
        let name = if renamed { &hidden } else { name };
        remove_tree_at(folder.fd(), name.as_ref())
    });
    if let Err(error) = removed {
        warn!(path = %folder.join(&hidden).display(), error = %error, "Cannot delete");
    }
}
