//! Verification of images: rehashes blobs and restored layer streams; optional repair.
//!
//! A repair downloads or unpacks broken content again, under new layer numbers; running containers keep their old layers
//! until they exit. Implements spec 09b §6.

use std::{
    collections::{BTreeMap, BTreeSet},
    ffi::OsStr,
    io,
    os::{fd::AsFd, unix::ffi::OsStrExt},
    sync::Arc,
};

use rustix::fs::{FileType, OFlags};

use super::{
    ImageStore, ImageStoreInner, blocking,
    pull::{PresentImagePolicy, PullRequest, pull_now},
};
use crate::images::{
    archive::ArchiveImage,
    digest::{Digest, HashingReader},
    error::{ImageError, ImageErrorKind, IoContext},
    model::{self, Descriptor, LONGEST_CONFIG, ManifestOrIndex, OCI_LAYER},
    names::Name,
    platform,
    progress::{ImageProgress, ProgressReader, Stage},
    record::{ImageOrigin, ImageRecord, Platform},
    registry::RegistryCredentials,
    tar::reader::{TarEntryKind as TarKind, TarReader},
    unpacker::{
        path,
        root::{NameInDirectory, RootDir},
        whiteouts::{NameKind, classify},
    },
};

/// Whether to repair broken images.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum RepairMode {
    /// Report only.
    No,
    /// Restore broken content.
    Yes,
}

/// A broken image.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Finding {
    /// Name or ID of the image.
    pub image: String,
    /// The broken parts and the reasons.
    pub cause: String,
    /// Result of the repair; none: not attempted.
    pub repair: Option<Result<(), String>>,
}

/// Result of a verification.
#[derive(Clone, PartialEq, Eq, Debug, Default)]
pub struct VerificationReport {
    /// Number of images verified.
    pub images: usize,
    /// Number of layers verified.
    pub layers: usize,
    /// Broken images.
    pub findings: Vec<Finding>,
}

/// Broken content of the store, with reasons.
#[derive(Default)]
struct BrokenContent {
    layers: BTreeMap<u64, String>,
    blobs: BTreeMap<Digest, String>,
    /// Compressed layers that the store kept.
    packed: BTreeMap<Digest, String>,
}

impl ImageStore {
    /// Reads and verifies all content of images.
    ///
    /// # Errors
    /// The blocking pool has shut down; broken content is a finding, not an error.
    pub async fn verify(
        &self,
        mode: RepairMode,
        progress: Arc<ImageProgress>,
    ) -> Result<VerificationReport, ImageError> {
        let (inner, watched) = (Arc::clone(&self.inner), progress);
        let (records, broken) = blocking(move || Ok(inner.scan(&watched))).await?;
        let used: BTreeSet<u64> = records.iter().flat_map(|record| record.layers.iter().copied()).collect();
        let mut out = VerificationReport { images: records.len(), layers: used.len(), findings: Vec::new() };
        for record in &records {
            let packed = self.inner.packed(record).into_iter().map(|layer| layer.digest);
            let packed: Vec<Digest> = packed.filter(|digest| broken.packed.contains_key(digest)).collect();
            let causes = causes(record, &broken, &packed);
            if causes.is_empty() {
                continue;
            }
            let repair = match mode {
                RepairMode::No => None,
                RepairMode::Yes => Some(self.repair(record, &broken, &packed).await.map_err(|error| error.text)),
            };
            let names = record.repo_tags().into_iter().chain(record.repo_digests());
            let image = names.into_iter().next().unwrap_or_else(|| record.id());
            out.findings.push(Finding { image, cause: causes.join("; "), repair });
        }
        if mode == RepairMode::Yes && !out.findings.is_empty() {
            self.collect().await?;
        }
        Ok(out)
    }

    /// Disowns or deletes the broken content, then restores the image from its source.
    async fn repair(
        &self,
        record: &Arc<ImageRecord>,
        broken: &BrokenContent,
        packed: &[Digest],
    ) -> Result<(), ImageError> {
        let inner = Arc::clone(&self.inner);
        // Compressed layers are optional: the image is complete without them.
        packed.iter().try_for_each(|digest| inner.content.remove(digest))?;
        record
            .layers
            .iter()
            .filter(|number| broken.layers.contains_key(number))
            .for_each(|n| inner.layers.mark_broken(*n));
        for digest in blobs(record).into_iter().filter(|digest| broken.blobs.contains_key(digest)) {
            inner.content.remove(&digest)?;
        }
        if causes(record, broken, &[]).is_empty() {
            return Ok(());
        }
        match record.source {
            ImageOrigin::Pull => {
                let digests = record.repo_digests().into_iter().filter_map(|name| Name::parse(&name).ok());
                let nowhere = || ImageError::not_found("unknown source: the image has no repository digest");
                let name = digests.into_iter().next().ok_or_else(nowhere)?;
                // Select this image of the index, whatever its platform.
                let asked = PullRequest { name, credentials: RegistryCredentials::default(), machine: machine(record) };
                pull_now(&inner, &asked, &Arc::default(), PresentImagePolicy::Fetched).await.map(drop)
            }
            ImageOrigin::Import => {
                let record = Arc::clone(record);
                blocking(move || inner.restore_import(&record)).await
            }
            ImageOrigin::Builtin => {
                let id = record.id();
                blocking(move || {
                    inner.remove(&id)?;
                    let missing = || ImageError::not_found("the image is recreated when the runtime starts");
                    let program = inner.settings.program.clone().ok_or_else(missing)?;
                    inner.make_builtin(&program)
                })
                .await
            }
        }
    }
}

/// Platform to request when an image is pulled again; none for this machine's architecture, as in an ordinary pull.
fn machine(record: &ImageRecord) -> Option<Platform> {
    let platform = Some(record.platform.clone()).filter(|platform| !platform.architecture.is_empty());
    platform.filter(|platform| platform.architecture != platform::host().architecture)
}

fn blobs(record: &ImageRecord) -> BTreeSet<Digest> {
    [record.id, record.manifest.digest, record.target.digest].into()
}

fn causes(record: &ImageRecord, broken: &BrokenContent, packed: &[Digest]) -> Vec<String> {
    let layers =
        record.layers.iter().filter_map(|number| Some(format!("layer {number}: {}", broken.layers.get(number)?)));
    let blobs = blobs(record).into_iter().filter_map(|digest| broken.blobs.get(&digest).cloned());
    let packed = packed.iter().filter_map(|digest| broken.packed.get(digest).cloned());
    layers.chain(blobs).chain(packed).collect()
}

impl ImageStoreInner {
    fn scan(&self, progress: &ImageProgress) -> (Vec<Arc<ImageRecord>>, BrokenContent) {
        let records = self.catalogue().list();
        // Layers of images removed in the meantime stay readable.
        let _leases: Vec<_> = records.iter().filter_map(|record| self.layers.lease_all(&record.layers)).collect();
        let numbers: BTreeSet<u64> = records.iter().flat_map(|record| record.layers.iter().copied()).collect();
        let metas = numbers.iter().filter_map(|number| Some((*number, self.layers.meta(*number)?)));
        let metas: Vec<_> = metas.map(|(number, meta)| (number, meta.diff_id, meta.stream)).collect();
        let entries: Vec<Descriptor> =
            metas.iter().map(|(_, digest, stream)| Descriptor::new(OCI_LAYER, *digest, *stream)).collect();
        progress.begin(&entries);
        let mut broken = BrokenContent::default();
        for (number, diff_id, stream) in metas {
            if stream > 0
                && let Err(error) = self.check_layer(number, diff_id, progress)
            {
                broken.layers.insert(number, error.text);
            }
            progress.enter(diff_id, Stage::Done, 0);
        }
        for digest in records.iter().flat_map(|record| blobs(record)).collect::<BTreeSet<_>>() {
            let read = self.content.read(&digest, LONGEST_CONFIG);
            let missing = || ImageError::new(ImageErrorKind::DataLoss, format!("blob {digest} is missing"));
            if let Err(error) = read.and_then(|bytes| bytes.ok_or_else(missing)) {
                broken.blobs.insert(digest, error.text);
            }
        }
        let packed = records.iter().flat_map(|record| self.packed(record)).map(|layer| layer.digest);
        for digest in packed.collect::<BTreeSet<_>>().into_iter().filter(|digest| self.content.has(digest)) {
            if let Err(error) = self.content.verify(&digest) {
                broken.packed.insert(digest, error.text);
            }
        }
        (records, broken)
    }

    /// Restores an image from its compressed layers, if they were kept.
    fn restore_import(&self, record: &ImageRecord) -> Result<(), ImageError> {
        let missing = || ImageError::not_found("the image was imported: import its archive again");
        let read = |digest: &Digest| self.content.read(digest, LONGEST_CONFIG)?.ok_or_else(missing);
        let manifest_bytes = read(&record.manifest.digest)?;
        let ManifestOrIndex::Manifest(parsed) =
            model::parse_manifest_or_index(&manifest_bytes, &record.manifest.media_type)?
        else {
            return Err(missing());
        };
        let found = ArchiveImage {
            names: Vec::new(),
            target: record.target.clone(),
            target_bytes: read(&record.target.digest)?,
            manifest: record.manifest.clone(),
            manifest_bytes,
            parsed,
            config: read(&record.id)?,
            layers: Vec::new(),
        };
        let _hold = self.hold_packed(&found.parsed.layers);
        let open = |at: usize| {
            let layer = found.parsed.layers.get(at).filter(|layer| self.content.has(&layer.digest));
            self.content.open_blob(&layer.ok_or_else(missing)?.digest)
        };
        self.commit(&found, record.source, &ImageProgress::default(), open).map(drop)
    }

    /// Verifies the digest of a layer's stream, and that the entries it names exist.
    fn check_layer(&self, number: u64, diff_id: Digest, progress: &ImageProgress) -> Result<(), ImageError> {
        let broken = |error: &dyn std::fmt::Display| ImageError::new(ImageErrorKind::DataLoss, error.to_string());
        let mut stream = HashingReader::new(ProgressReader::new(self.layers.stream(number)?, diff_id, progress));
        progress.enter(diff_id, Stage::Checking, 0);
        let mut entries = BTreeMap::new();
        let mut reader = TarReader::new(&mut stream);
        while let Some(entry) = reader.next_entry().map_err(|error| broken(&error))? {
            let parts = path::parts(&entry.name)?;
            if parts.last().is_none_or(|last| classify(last) != NameKind::Ordinary) {
                continue;
            }
            let key = parts.join(&b'/');
            let kind = match entry.kind {
                TarKind::Directory => FileType::Directory,
                TarKind::Symlink(_) => FileType::Symlink,
                TarKind::Regular => FileType::RegularFile,
                // A hard link, or a node that may have been omitted for lack of privilege.
                _ => continue,
            };
            if kind != FileType::Directory {
                entries.retain(|known: &Vec<u8>, _| !is_below(known, &key));
            }
            entries.insert(key, kind);
        }
        io::copy(&mut stream, &mut io::sink()).map_err(|error| broken(&error))?;
        if stream.finish() != diff_id {
            return Err(broken(&"digest mismatch: files of the layer have changed"));
        }
        let root = RootDir::open(&self.layers.path(number)).attempt("open layer")?;
        for (path, kind) in &entries {
            check_entry(&root, path, *kind).map_err(|error| broken(&error))?;
        }
        Ok(())
    }
}

fn is_below(path: &[u8], folder: &[u8]) -> bool {
    path.strip_prefix(folder).is_some_and(|rest| rest.starts_with(b"/"))
}

fn check_entry(root: &RootDir, path: &[u8], kind: FileType) -> Result<(), String> {
    let shown = || String::from_utf8_lossy(path).into_owned();
    let at = path.iter().rposition(|byte| *byte == b'/');
    let (folder, name) = at.map_or((&b""[..], path), |at| {
        let (folder, name) = path.split_at(at);
        (folder, name.get(1..).unwrap_or_default())
    });
    let folder = root.resolve(folder, OFlags::PATH | OFlags::DIRECTORY);
    let folder = folder.map_err(|error| format!("{}: {}", shown(), io::Error::from(error)))?;
    let stat = NameInDirectory { parent: folder.as_fd(), name: OsStr::from_bytes(name) }.stat();
    match stat.map_err(|error| format!("{}: {}", shown(), io::Error::from(error)))? {
        None => Err(format!("{} is missing", shown())),
        Some(stat) if FileType::from_raw_mode(stat.st_mode) != kind => {
            Err(format!("{}: unexpected file type", shown()))
        }
        Some(_) => Ok(()),
    }
}

#[cfg(test)]
mod tests {
    use std::fs;

    use super::{
        super::tests::{imported, is_root, layer, oci, opened, with_program},
        *,
    };

    async fn found(store: &ImageStore, mode: RepairMode) -> Vec<(String, Option<bool>)> {
        let verified = store.verify(mode, Arc::default()).await.expect("verified");
        let of = |finding: Finding| (finding.cause, finding.repair.map(|repair| repair.is_ok()));
        verified.findings.into_iter().map(of).collect()
    }

    #[tokio::test]
    async fn damaged_content_is_found_and_repaired_if_its_source_exists() {
        if !is_root() {
            return;
        }
        let dir = tempfile::tempdir().expect("a directory");
        let root = dir.path().join("root");
        let store = opened(&root).await;
        let files = [("a/f", "right"), ("a/g", ""), (".wh.x", ""), ("a/.wh..wh..opq", "")];
        let archive = oci("x.tld/a:1", &[layer(&files), layer(&[("h", "h")])], "");
        let image = imported(&store, dir.path(), &archive).await.remove(0);
        assert_eq!(found(&store, RepairMode::No).await, []);
        let at = |name: &str| root.join("layers/1/d").join(name);
        for (name, change) in [("a/f", Some("wrong")), ("a/f", None), ("a/g", None)] {
            match change {
                Some(content) => fs::write(at(name), content).expect("writable"),
                None => fs::remove_file(at(name)).expect("removable"),
            }
            let causes = found(&store, RepairMode::No).await;
            let is_reported = causes.len() == 1 && causes[0].0.starts_with("layer 1: ");
            assert!(is_reported, "{name}: {change:?}: {causes:?}");
            fs::write(at("a/f"), "right").expect("writable");
            fs::write(at("a/g"), "").expect("writable");
        }
        fs::write(at("a/f"), "wrong").expect("writable");
        assert_eq!(found(&store, RepairMode::Yes).await[0].1, Some(false), "its archive is unknown");
        // A new import unpacks a complete layer; a container keeps the old one.
        store.prepare_root("c", "x.tld/a:1").await.expect("made");
        let again = imported(&store, dir.path(), &archive).await.remove(0);
        assert_eq!((again.id, &again.layers[..]), (image.id, &[3, 2][..]));
        assert_eq!(found(&store, RepairMode::No).await, []);
        drop(store);
        let store = opened(&root).await;
        assert_eq!(found(&store, RepairMode::No).await, []);
        assert!(root.join("layers/1").exists(), "the container's");
        store.release_root("c").await.expect("released");
        store.collect().await.expect("collected");
        assert!(!root.join("layers/1").exists());

        let blob = root.join("content/blobs/sha256").join(image.id.hex());
        fs::write(&blob, "{}").expect("writable");
        assert!(found(&store, RepairMode::No).await[0].0.contains("digest mismatch"));
        fs::remove_file(&blob).expect("removable");
        assert!(found(&store, RepairMode::No).await[0].0.ends_with("is missing"));
    }

    #[tokio::test]
    async fn built_in_images_are_made_again() {
        if !is_root() {
            return;
        }
        let dir = tempfile::tempdir().expect("a directory");
        let root = dir.path().join("root");
        let store = ImageStore::open(with_program(dir.path())).await.expect("opens");
        fs::write(root.join("layers/1/d/bin/berth"), "#!another!!!\n").expect("writable");
        let causes = found(&store, RepairMode::Yes).await;
        assert_eq!(causes.len(), 1, "{causes:?}");
        assert!(causes.iter().all(|(_, repaired)| *repaired == Some(true)), "{causes:?}");
        assert_eq!(found(&store, RepairMode::No).await, []);
        assert_eq!(store.list("").expect("a list").len(), 1);
    }
}
