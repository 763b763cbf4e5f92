//! Built-in `pause` image, so that a pod without a program of its own needs no registry.
//!
//! Its layer contains the shim's program, a link to it named `pause`, `passwd`, `group`, and `/tmp`. The
//! shim's program is a tenth the size of the agent's, static in releases, and keeps few pages in memory per container.
//! A dynamically linked one, as in development, adds its loader and the libraries that this process has mapped.
//! Blocking. Implements spec 09b §8.

use std::{
    collections::BTreeSet,
    fs::{self, File},
    io::{self, Cursor, Read},
    os::unix::fs::MetadataExt,
    path::{Path, PathBuf},
};

use serde::{Deserialize, Serialize};

use super::{
    archive::ArchiveImage,
    digest::{Digest, HashingReader},
    elf,
    error::{ImageError, IoContext},
    model::{Descriptor, Manifest, OCI_CONFIG, OCI_LAYER, OCI_MANIFEST},
    names::Name,
    platform,
    tar::writer,
};
use crate::store::record::{self, Durability};
use berth_shim::pause;

/// Registry names that are never contacted: their images are built in, or imported from an archive.
pub const HOSTS: [&str; 2] = ["builtin.local", "berth.local"];
/// Names of the images and their default commands.
const IMAGES: [(&str, &[&str]); 1] = [(pause::NAME, &["/bin/pause"])];
/// Path of the program in the layer.
const PROGRAM: &str = "bin/berth";
/// Bytes of a program that are read to find its loader.
const LONGEST_HEAD: u64 = 64 << 10;
const PASSWD: &[u8] = b"root:x:0:0:root:/:/bin/sh\nnobody:x:65534:65534:nobody:/:/bin/sh\n";
const GROUP: &[u8] = b"root:x:0:\nnobody:x:65534:\n";

/// The layer built from one program.
pub struct Layer {
    program: PathBuf,
    libraries: Vec<PathBuf>,
    diff_id: Digest,
    size: u64,
}

/// Cached digest of a layer, so that the program is hashed only once.
#[derive(Serialize, Deserialize)]
struct CachedDigest {
    v: u64,
    fingerprint: String,
    diff_id: Digest,
    size: u64,
}

impl Layer {
    /// Builds the layer of a program; its digest is cached in `$ROOT/builtin.json`.
    ///
    /// # Errors
    /// The program cannot be read, or the cache cannot be written.
    pub fn of(program: &Path, root: &Path) -> Result<Self, ImageError> {
        let program = fs::canonicalize(program).attempt("resolve own executable")?;
        let mut out = Self { libraries: libraries(&program)?, program, diff_id: Digest::of(b""), size: 0 };
        let fingerprint = out.fingerprint()?;
        let path = root.join("builtin.json");
        if let Ok(Some(known)) = record::read::<CachedDigest>(&path)
            && known.fingerprint == fingerprint
        {
            (out.diff_id, out.size) = (known.diff_id, known.size);
            return Ok(out);
        }
        let mut stream = HashingReader::new(out.stream()?);
        out.size = io::copy(&mut stream, &mut io::sink()).attempt("read own executable")?;
        out.diff_id = stream.finish();
        let known = CachedDigest { v: record::VERSION, fingerprint, diff_id: out.diff_id, size: out.size };
        record::write(&path, &known, Durability::Unsynced).attempt("write builtin.json")?;
        Ok(out)
    }

    fn fingerprint(&self) -> Result<String, ImageError> {
        let mut text = String::from(env!("CARGO_PKG_VERSION"));
        for path in std::iter::once(&self.program).chain(&self.libraries) {
            let stat = fs::metadata(path).attempt("stat own executable")?;
            let facts = (stat.dev(), stat.ino(), stat.len(), stat.mtime(), stat.mtime_nsec());
            text.push_str(&format!(";{}:{facts:?}", path.display()));
        }
        text.push_str(pause::NAME);
        Ok(text)
    }

    /// The layer as an uncompressed tar stream.
    ///
    /// # Errors
    /// The program or a library cannot be opened.
    pub fn stream(&self) -> Result<Box<dyn Read + Send>, ImageError> {
        let mut out: Box<dyn Read + Send> = Box::new(io::empty());
        let mut add = |more: Box<dyn Read + Send>| {
            let before = std::mem::replace(&mut out, Box::new(io::empty()));
            out = Box::new(before.chain(more));
        };
        let mut head = Vec::new();
        let mut folders: BTreeSet<String> = ["bin", "etc", "dev", "proc", "sys", "var"].map(str::to_owned).into();
        let names = self.libraries.iter().filter_map(|path| path.to_str()).map(|path| path.trim_start_matches('/'));
        for name in names.clone() {
            folders.extend(name.match_indices('/').filter_map(|(at, _)| name.get(..at)).map(str::to_owned));
        }
        for folder in &folders {
            head.extend(writer::entry(&format!("{folder}/"), b'5', 0o755, 0, ""));
        }
        head.extend(writer::entry("tmp/", b'5', 0o1777, 0, ""));
        for (name, content) in [("etc/passwd", PASSWD), ("etc/group", GROUP)] {
            head.extend(writer::entry(name, b'0', 0o644, content.len() as u64, ""));
            head.extend_from_slice(content);
            head.resize(head.len().next_multiple_of(512), 0);
        }
        head.extend(writer::entry(&format!("bin/{}", pause::NAME), b'2', 0o777, 0, "berth"));
        let files = std::iter::once((PROGRAM, &self.program)).chain(names.zip(&self.libraries));
        for (name, path) in files {
            let file = File::open(path).attempt("open own executable")?;
            let length = file.metadata().attempt("stat own executable")?.len();
            head.extend(writer::entry(name, b'0', 0o755, length, ""));
            add(Box::new(Cursor::new(std::mem::take(&mut head))));
            add(Box::new(file.take(length)));
            let padding = (512 - length % 512) % 512;
            add(Box::new(io::repeat(0).take(padding)));
        }
        add(Box::new(io::repeat(0).take(1024)));
        Ok(out)
    }

    /// The images that consist of this layer.
    ///
    /// # Errors
    /// A manifest cannot be serialized.
    pub fn images(&self) -> Result<Vec<ArchiveImage>, ImageError> {
        IMAGES.iter().map(|(name, command)| self.image(name, command)).collect()
    }

    fn image(&self, name: &str, command: &[&str]) -> Result<ArchiveImage, ImageError> {
        let machine = platform::host();
        let config = serde_json::json!({
            "architecture": machine.architecture, "os": machine.os,
            "config": {
                "Cmd": command, "Env": ["PATH=/bin"], "WorkingDir": "/",
                "Labels": {"org.opencontainers.image.title": name},
            },
            "rootfs": {"type": "layers", "diff_ids": [self.diff_id]},
        });
        let config = config.to_string().into_bytes();
        let parsed = Manifest {
            schema_version: 2,
            media_type: OCI_MANIFEST.to_owned(),
            config: Descriptor::of(OCI_CONFIG, &config),
            layers: vec![Descriptor::new(OCI_LAYER, self.diff_id, self.size)],
        };
        let failed = |error| ImageError::bad_content(format!("write manifest: {error}"));
        let manifest_bytes = serde_json::to_vec(&parsed).map_err(failed)?;
        let manifest = Descriptor::of(OCI_MANIFEST, &manifest_bytes);
        let mut names = Vec::new();
        for host in HOSTS {
            for tag in [env!("CARGO_PKG_VERSION"), "latest"] {
                names.push(Name::parse(&format!("{host}/{name}:{tag}"))?);
            }
        }
        Ok(ArchiveImage {
            names,
            target: manifest.clone(),
            target_bytes: manifest_bytes.clone(),
            manifest,
            manifest_bytes,
            parsed,
            config,
            layers: vec![String::new()],
        })
    }
}

/// The program's loader and libraries; none if it is static. The libraries are those that this process has mapped,
/// because it was built the same way.
fn libraries(program: &Path) -> Result<Vec<PathBuf>, ImageError> {
    let mut head = Vec::new();
    let file = File::open(program).attempt("open executable of the built-in images")?;
    file.take(LONGEST_HEAD).read_to_end(&mut head).attempt("read executable of the built-in images")?;
    let Some(loader) = elf::loader(&head) else { return Ok(Vec::new()) };
    let maps = fs::read_to_string("/proc/self/maps").unwrap_or_default();
    let paths = maps.lines().filter_map(|line| line.find('/').and_then(|at| line.get(at..)));
    let objects: BTreeSet<&str> = paths.filter(|path| path.contains(".so") && !path.ends_with("(deleted)")).collect();
    if objects.is_empty() {
        let text = format!("{} is linked dynamically and its shared libraries are unknown", program.display());
        return Err(ImageError::bad_content(text));
    }
    // The loader is named by a path that is a symbolic link on most machines.
    let all: BTreeSet<PathBuf> = objects.into_iter().map(PathBuf::from).chain([PathBuf::from(loader)]).collect();
    Ok(all.into_iter().collect())
}
