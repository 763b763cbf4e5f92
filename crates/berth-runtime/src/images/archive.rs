//! Reads image archives: OCI layouts (directory or tar) and `docker save` archives.
//!
//! An uncompressed archive file is read in place; a compressed one, or a pipe, is first unpacked into a scratch file.
//! No network access. Blocking. Implements spec 09b §7.

use std::{
    collections::BTreeMap,
    fs::{self, File},
    io::{self, Read, Seek, SeekFrom, Write},
    os::unix::fs::FileExt,
    path::{Component, Path, PathBuf},
    sync::Arc,
};

use serde::Deserialize;

use super::{
    compression::Decompressor,
    content::{self, ContentStore},
    digest::{Digest, Hasher},
    error::{ImageError, ImageErrorKind, IoContext},
    model::{
        self, Descriptor, LONGEST_CONFIG, LONGEST_MANIFEST, Manifest, ManifestOrIndex, OCI_CONFIG, OCI_LAYER,
        OCI_MANIFEST,
    },
    names::Name,
    platform::{self, PlatformSelection},
    tar::reader::{TarEntryKind as TarKind, TarReader},
    unpacker::path::parts,
};

/// Maximum number of files in an archive.
const MOST_FILES: usize = 100_000;
/// Maximum nesting depth of indexes.
const DEEPEST: usize = 3;
const IMAGE_NAME: &str = "io.containerd.image.name";
const REF_NAME: &str = "org.opencontainers.image.ref.name";

/// Location of an archive's files.
enum ArchiveFiles {
    Folder(PathBuf),
    /// Offset and length of each file in an uncompressed tar archive.
    Tar(Arc<File>, BTreeMap<String, (u64, u64)>),
}

/// An open image archive.
pub struct Archive {
    files: ArchiveFiles,
    scratch: Option<PathBuf>,
}

impl Drop for Archive {
    fn drop(&mut self) {
        if let Some(scratch) = &self.scratch {
            // Left-overs are deleted at the next startup.
            let _ = fs::remove_file(scratch);
        }
    }
}

/// A byte range of a file.
pub struct FileRange {
    file: Arc<File>,
    at: u64,
    left: u64,
}

impl Read for FileRange {
    fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
        let most = usize::try_from(self.left).unwrap_or(usize::MAX).min(buffer.len());
        let count = self.file.read_at(buffer.get_mut(..most).unwrap_or_default(), self.at)?;
        self.at += count as u64;
        self.left -= count as u64;
        Ok(count)
    }
}

/// An image found in an archive.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct ArchiveImage {
    /// References of the image.
    pub names: Vec<Name>,
    /// What the references point to: an index or the manifest.
    pub target: Descriptor,
    /// Content of the target.
    pub target_bytes: Vec<u8>,
    /// The image's manifest.
    pub manifest: Descriptor,
    /// Content of the manifest.
    pub manifest_bytes: Vec<u8>,
    /// Parsed manifest.
    pub parsed: Manifest,
    /// Content of the configuration.
    pub config: Vec<u8>,
    /// Names of the layer files in the archive, bottom first.
    pub layers: Vec<String>,
}

#[derive(Deserialize)]
struct Layout {
    #[serde(rename = "imageLayoutVersion")]
    version: String,
}

#[derive(Deserialize)]
#[serde(rename_all = "PascalCase")]
struct SavedImage {
    config: String,
    repo_tags: Option<Vec<String>>,
    #[serde(default)]
    layers: Vec<String>,
}

impl Archive {
    /// Opens a directory or a file.
    ///
    /// # Errors
    /// The path is neither, cannot be read, or its compression is not supported.
    pub fn open(path: &Path, content: &ContentStore) -> Result<Self, ImageError> {
        let metadata = fs::metadata(path).attempt(format!("open {}", path.display()))?;
        if metadata.is_dir() {
            return Ok(Self { files: ArchiveFiles::Folder(path.to_owned()), scratch: None });
        }
        let file = File::open(path).attempt(format!("open {}", path.display()))?;
        let is_file = metadata.is_file();
        Self::from_stream(file, is_file, content)
    }

    /// Opens a stream; an uncompressed seekable file is read in place.
    fn from_stream(file: File, is_seekable: bool, content: &ContentStore) -> Result<Self, ImageError> {
        let mut unpacked = Decompressor::new(file)?;
        if is_seekable && matches!(unpacked, Decompressor::Plain(_)) {
            let mut file = unpacked.into_packed();
            file.seek(SeekFrom::Start(0)).attempt("rewind archive")?;
            return Self::index(file, None);
        }
        let scratch = content.scratch();
        let mut file = content::create(&scratch)?;
        // From here on the scratch file is deleted on every path.
        let holder = Self { files: ArchiveFiles::Folder(PathBuf::new()), scratch: Some(scratch.clone()) };
        let mut buffer = vec![0; 1 << 20];
        loop {
            let count = unpacked.read(&mut buffer).map_err(|error| broken(&error))?;
            if count == 0 {
                break;
            }
            let disk = rustix::fs::fstatvfs(&file).attempt("stat filesystem")?;
            if disk.f_bavail.saturating_mul(disk.f_frsize) < 1 << 30 {
                return Err(ImageError::new(ImageErrorKind::ResourceExhausted, "not enough disk space"));
            }
            file.write_all(buffer.get(..count).unwrap_or_default()).attempt("unpack archive")?;
        }
        file.seek(SeekFrom::Start(0)).attempt("rewind archive")?;
        let mut holder = holder;
        Self::index(file, holder.scratch.take())
    }

    fn index(mut file: File, scratch: Option<PathBuf>) -> Result<Self, ImageError> {
        let mut out = Self { files: ArchiveFiles::Folder(PathBuf::new()), scratch };
        let mut found = BTreeMap::new();
        let mut links: Vec<(String, String)> = Vec::new();
        // Unbuffered, so that the file offset is at the start of the content.
        let mut reader = TarReader::new(&mut file);
        while let Some(entry) = reader.next_entry().map_err(|error| broken(&error))? {
            let name = normal(&entry.name)?;
            if found.len() >= MOST_FILES {
                return Err(ImageError::bad_content("archive has too many files"));
            }
            match &entry.kind {
                TarKind::Regular if entry.sparse.is_none() => {
                    let at = reader.get_mut().stream_position().attempt("read archive")?;
                    found.insert(name, (at, entry.size));
                    reader.pass(entry.size).map_err(|error| broken(&error))?;
                }
                TarKind::HardLink(target) => links.push((name, normal(target)?)),
                TarKind::Symlink(target) => {
                    // Docker's archives represent a repeated layer as a symbolic link.
                    let folder = name.rsplit_once('/').map_or("", |(folder, _)| folder);
                    let text = String::from_utf8_lossy(target);
                    links.push((name.clone(), normal(format!("{folder}/{text}").as_bytes())?));
                }
                _ => {}
            }
        }
        for (name, target) in links {
            if let Some(place) = found.get(&target).copied() {
                found.insert(name, place);
            }
        }
        out.files = ArchiveFiles::Tar(Arc::new(file), found);
        Ok(out)
    }

    /// Opens a file of the archive; `None` if there is none.
    ///
    /// # Errors
    /// The name is invalid, or the file cannot be opened.
    pub fn file(&self, name: &str) -> Result<Option<FileRange>, ImageError> {
        match &self.files {
            ArchiveFiles::Tar(file, found) => {
                Ok(found.get(name).map(|(at, left)| FileRange { file: Arc::clone(file), at: *at, left: *left }))
            }
            ArchiveFiles::Folder(folder) => {
                let plain = Path::new(name).components().all(|part| matches!(part, Component::Normal(_)));
                if !plain {
                    return Err(ImageError::bad_content(format!("invalid name {name:?} in archive")));
                }
                match berth_sys::beneath::open(folder, Path::new(name)) {
                    Ok(berth_sys::beneath::OpenedEntry::File(file)) => {
                        let left = file.metadata().attempt("stat file of the archive")?.len();
                        Ok(Some(FileRange { file: Arc::new(file), at: 0, left }))
                    }
                    Ok(_) => Ok(None),
                    Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(None),
                    Err(error) => Err(ImageError::io(format!("open {name:?} of the archive"), &error)),
                }
            }
        }
    }

    fn bytes(&self, name: &str, limit: u64) -> Result<Option<Vec<u8>>, ImageError> {
        let Some(window) = self.file(name)? else { return Ok(None) };
        if window.left > limit {
            return Err(ImageError::bad_content(format!("{name:?} in archive is longer than {limit} bytes")));
        }
        let mut bytes = Vec::new();
        window.take(limit).read_to_end(&mut bytes).attempt(format!("read {name:?} of the archive"))?;
        Ok(Some(bytes))
    }

    /// The requested images of the archive. Of several platforms under one name, one image gets the name: that for this
    /// machine, if there is one; the others are named by digest.
    ///
    /// # Errors
    /// It is no image archive, or a file it names is missing or does not match its digest.
    pub fn images(
        &self,
        wanted: &PlatformSelection,
        reference: Option<&Name>,
    ) -> Result<Vec<ArchiveImage>, ImageError> {
        if let Some(layout) = self.bytes("oci-layout", 4096)? {
            let layout: Layout = model::json(&layout, "oci-layout")?;
            if layout.version != "1.0.0" {
                return Err(ImageError::bad_content(format!("unknown image layout version {:?}", layout.version)));
            }
            return self.oci(wanted, reference);
        }
        if let Some(saved) = self.bytes("manifest.json", LONGEST_MANIFEST)? {
            let saved: Vec<SavedImage> = model::json(&saved, "manifest.json")?;
            return collect_images(
                saved
                    .iter()
                    .map(|image| self.docker(image, reference).and_then(|found| require_platform(found, wanted))),
            );
        }
        let legacy = self.file("repositories")?.is_some();
        let hint = if legacy { ": Docker format before 1.10" } else { "" };
        Err(ImageError::bad_content(format!("not an image archive{hint}")))
    }

    fn oci(&self, wanted: &PlatformSelection, reference: Option<&Name>) -> Result<Vec<ArchiveImage>, ImageError> {
        let index = self.bytes("index.json", LONGEST_MANIFEST)?;
        let index = index.ok_or_else(|| ImageError::bad_content("archive has no index.json"))?;
        let ManifestOrIndex::Index(index) = model::parse_manifest_or_index(&index, "")? else {
            return Err(ImageError::bad_content("index.json is not an index"));
        };
        let mut images = Vec::new();
        for entry in &index.manifests {
            let named = name_of(entry, reference)?;
            match (self.oci_images(entry, wanted, DEEPEST), named) {
                (Ok(found), named) => images.extend(assign_names(found, named.as_ref(), wanted).into_iter().map(Ok)),
                (Err(error), _) => images.push(Err(error)),
            }
        }
        collect_images(images.into_iter())
    }

    /// The images of an index entry: one image, or all that the archive contains of a nested index.
    fn oci_images(
        &self,
        top: &Descriptor,
        wanted: &PlatformSelection,
        depth: usize,
    ) -> Result<Vec<ArchiveImage>, ImageError> {
        let deeper = depth.checked_sub(1).ok_or_else(|| ImageError::bad_content("indexes are nested too deeply"))?;
        let bytes = self.blob(top, LONGEST_MANIFEST)?;
        let below = match (model::parse_manifest_or_index(&bytes, &top.media_type)?, wanted) {
            (ManifestOrIndex::Manifest(parsed), _) => {
                let config = self.blob(&parsed.config, LONGEST_CONFIG)?;
                let layers = parsed.layers.iter().map(|layer| blob_name(&layer.digest)).collect();
                let found = ArchiveImage {
                    names: Vec::new(),
                    target: top.clone(),
                    target_bytes: bytes.clone(),
                    manifest: top.clone(),
                    manifest_bytes: bytes,
                    parsed,
                    config,
                    layers,
                };
                return require_platform(found, wanted).map(|found| vec![found]);
            }
            (ManifestOrIndex::Index(index), PlatformSelection::All) => {
                let all = platform::images(&index).map(|entry| self.oci_images(entry, wanted, deeper));
                let all: Vec<_> = all
                    .flat_map(|found| found.map_or_else(|e| vec![Err(e)], |f| f.into_iter().map(Ok).collect()))
                    .collect();
                collect_images(all.into_iter())?
            }
            (ManifestOrIndex::Index(index), _) => {
                self.oci_images(platform::choose(&index, &wanted.machine())?, wanted, deeper)?
            }
        };
        Ok(below
            .into_iter()
            .map(|found| ArchiveImage { target: top.clone(), target_bytes: bytes.clone(), ..found })
            .collect())
    }

    fn blob(&self, entry: &Descriptor, limit: u64) -> Result<Vec<u8>, ImageError> {
        let missing = || ImageError::not_found(format!("content {} is not in the archive: not found", entry.digest));
        let bytes = self.bytes(&blob_name(&entry.digest), limit)?.ok_or_else(missing)?;
        content::check(&entry.digest, Some(entry.size), Digest::of(&bytes), bytes.len() as u64)?;
        Ok(bytes)
    }

    fn docker(&self, saved: &SavedImage, reference: Option<&Name>) -> Result<ArchiveImage, ImageError> {
        let missing = |name: &str| ImageError::bad_content(format!("{name:?} is not in the archive"));
        let config = self.bytes(&normal(saved.config.as_bytes())?, LONGEST_CONFIG)?;
        let config = config.ok_or_else(|| missing(&saved.config))?;
        let mut layers = Vec::new();
        let mut descriptors = Vec::new();
        for name in &saved.layers {
            let name = normal(name.as_bytes())?;
            let mut window = self.file(&name)?.ok_or_else(|| missing(&name))?;
            let mut hasher = Hasher::default();
            let mut buffer = vec![0; 256 << 10];
            loop {
                let count = window.read(&mut buffer).attempt(format!("read {name:?} of the archive"))?;
                if count == 0 {
                    break;
                }
                hasher.update(buffer.get(..count).unwrap_or_default());
            }
            let size = hasher.length();
            descriptors.push(Descriptor::new(OCI_LAYER, hasher.finish(), size));
            layers.push(name);
        }
        let config_descriptor = Descriptor::of(OCI_CONFIG, &config);
        let media_type = OCI_MANIFEST.to_owned();
        let parsed = Manifest { schema_version: 2, media_type, config: config_descriptor, layers: descriptors };
        let manifest_bytes = serde_json::to_vec(&parsed).map_err(|error| broken(&error))?;
        let manifest = Descriptor::of(OCI_MANIFEST, &manifest_bytes);
        // Apply the same limits as to any other manifest.
        model::parse_manifest_or_index(&manifest_bytes, "")?;
        let mut names = match reference {
            Some(name) => vec![name.clone()],
            None => Vec::new(),
        };
        for tag in saved.repo_tags.iter().flatten() {
            names.push(Name::parse(tag)?);
        }
        let target = manifest.clone();
        Ok(ArchiveImage {
            names,
            target,
            target_bytes: manifest_bytes.clone(),
            manifest,
            manifest_bytes,
            parsed,
            config,
            layers,
        })
    }
}

/// Collects the images; missing content is an error only if no image is complete.
fn collect_images(
    images: impl Iterator<Item = Result<ArchiveImage, ImageError>>,
) -> Result<Vec<ArchiveImage>, ImageError> {
    let mut out: Vec<ArchiveImage> = Vec::new();
    let mut others = None;
    for image in images {
        match image {
            Ok(mut found) => match out.iter_mut().find(|known| known.manifest.digest == found.manifest.digest) {
                Some(known) => known.names.append(&mut found.names),
                None => out.push(found),
            },
            Err(error) if error.kind == ImageErrorKind::NotFound => others = Some(error),
            Err(error) => return Err(error),
        }
    }
    match (out.is_empty(), others) {
        (true, Some(error)) => Err(error),
        _ => Ok(out),
    }
}

/// Fails unless the image is for the platform it was requested for.
fn require_platform(found: ArchiveImage, wanted: &PlatformSelection) -> Result<ArchiveImage, ImageError> {
    let PlatformSelection::Only(machine) = wanted else { return Ok(found) };
    let platform = model::config(&found.config, found.parsed.layers.len())?.platform;
    platform::rank_image(&platform, machine).map(|_| found).ok_or_else(platform::no_match)
}

/// Assigns names to the images of one index entry.
fn assign_names(mut images: Vec<ArchiveImage>, name: Option<&Name>, wanted: &PlatformSelection) -> Vec<ArchiveImage> {
    let Some(name) = name else { return images };
    let (machine, mut best) = (wanted.machine(), (None, 0));
    for (at, image) in images.iter().enumerate() {
        let platform = model::config(&image.config, image.parsed.layers.len()).map(|config| config.platform);
        let rank = platform.ok().and_then(|platform| platform::rank_image(&platform, &machine));
        if rank > best.0 {
            best = (rank, at);
        }
    }
    for (at, image) in images.iter_mut().enumerate() {
        if at == best.1 {
            image.names.push(name.clone());
        } else {
            image.names.push(name.at(image.manifest.digest));
            (image.target, image.target_bytes) = (image.manifest.clone(), image.manifest_bytes.clone());
        }
    }
    images
}

fn broken(error: &dyn std::fmt::Display) -> ImageError {
    ImageError::bad_content(format!("invalid archive: {error}"))
}

fn normal(name: &[u8]) -> Result<String, ImageError> {
    Ok(String::from_utf8_lossy(&parts(name)?.join(&b'/')).into_owned())
}

fn blob_name(digest: &Digest) -> String {
    format!("blobs/sha256/{}", digest.hex())
}

/// Name of an entry of `index.json`. A bare tag is no name without a repository.
fn name_of(entry: &Descriptor, reference: Option<&Name>) -> Result<Option<Name>, ImageError> {
    let annotation = |key: &str| entry.annotations.get(key);
    if let Some(name) = reference {
        return Ok(Some(name.clone()));
    }
    if let Some(name) = annotation(IMAGE_NAME) {
        return Name::parse(name).map(Some);
    }
    let full = annotation(REF_NAME).filter(|name| name.contains('/') || name.contains(':'));
    full.map(|name| Name::parse(name)).transpose()
}
