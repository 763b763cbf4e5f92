//! Benchmark of importing a large image into the embedded runtime's store, beside containerd.
//!
//! The baseline is the work that no importer avoids on this machine: decompressing the layer, digesting the result (its
//! diff ID), and writing its files to disk.

use std::{
    fs::{self, File},
    io::{Read, Write},
    path::{Path, PathBuf},
    process::{Command, Stdio},
    time::Instant,
};

use anyhow::{Result, ensure};
use flate2::{Compression, read::GzDecoder, write::GzEncoder};
use futures::FutureExt;
use serde_json::json;
use sha2::{Digest, Sha256};

use crate::{
    agent::Target,
    figures::{Bar, Figure, Samples, Unit, median},
    measurements::{BenchContext, Group, Measurement},
};
use berth_testkit::{embedded::EmbeddedFixture, image};

const FIGURES: &[Figure] = &[
    median("import", "import and unpack of a 500 MB image (gzip)", Unit::Seconds, Bar::TimesRaw(1.0)),
    median("inflate", "decompression of that layer, output discarded", Unit::Seconds, Bar::Open),
    median("decompressor", "decompression and digest of the output", Unit::Seconds, Bar::Open),
    median("disk", "disk only: the same files written and synced", Unit::Seconds, Bar::Open),
    median("share", "slower of the last two / import", Unit::Times, Bar::AtLeast(0.9)),
];
/// Number of files in the layer, and the size of each: typical of libraries and programs.
const FILES: usize = 500;
const SIZE: usize = 1_000_000;
/// Bytes decompressed per read.
const PIECE: usize = 256 << 10;
const NAME: &str = "docker.io/library/big:1";

/// Measurements of this module.
pub fn measurements() -> Vec<Measurement> {
    vec![Measurement {
        name: "image",
        group: Group::Runtime,
        figures: FIGURES,
        rounds: (3, 1),
        agent: |g, t| embedded(g, t).boxed_local(),
        raw: Some(|g| containerd(g).boxed_local()),
    }]
}

async fn embedded(_ctx: &BenchContext<'_>, target: &Target) -> Result<Samples> {
    let place = EmbeddedFixture::new();
    let folder = tempfile::tempdir()?;
    let layer = layer()?;
    let archive = archive(&layer, folder.path())?;
    let mut samples = Samples::default();
    settle();
    let begun = Instant::now();
    let out = Command::new(&target.binary)
        .args(["images", "import"])
        .arg(&archive)
        .env("BERTH_CONFIG", place.settings())
        .stdin(Stdio::null())
        .output()?;
    let import = begun.elapsed().as_secs_f64();
    ensure!(out.status.success(), "import: {}", String::from_utf8_lossy(&out.stderr));
    let inflate = decompressed(&layer, |_| {})?;
    let mut digest = Sha256::new();
    let decompressor = decompressed(&layer, |bytes| digest.update(bytes))?;
    let disk = disk(place.dir())?;
    samples.add("import", import);
    samples.add("inflate", inflate);
    samples.add("decompressor", decompressor);
    samples.add("disk", disk);
    samples.add("share", decompressor.max(disk) / import);
    Ok(samples)
}

async fn containerd(ctx: &BenchContext<'_>) -> Result<Samples> {
    let containerd = ctx.containerd()?;
    let folder = tempfile::tempdir()?;
    let archive = archive(&layer()?, folder.path())?;
    settle();
    let begun = Instant::now();
    let (imported, out) = containerd.ctr(&["images", "import", &archive.to_string_lossy()]);
    let mut samples = Samples::default();
    samples.add("import", begun.elapsed().as_secs_f64());
    ensure!(imported, "ctr: {out}");
    let (removed, out) = containerd.ctr(&["images", "rm", "--sync", NAME]);
    ensure!(removed, "ctr: {out}");
    Ok(samples)
}

/// Seconds in which one thread decompresses a layer, in pieces as large as the importer's, and passes them to a
/// function.
fn decompressed(layer: &[u8], mut with: impl FnMut(&[u8])) -> Result<f64> {
    let (mut decoder, mut buffer, mut length) = (GzDecoder::new(layer), vec![0; PIECE], 0);
    let begun = Instant::now();
    loop {
        let count = decoder.read(&mut buffer)?;
        if count == 0 {
            break;
        }
        length += count;
        with(&buffer[..count]);
    }
    ensure!(length > FILES * SIZE, "the layer is truncated");
    Ok(begun.elapsed().as_secs_f64())
}

/// Syncs the disks, so that earlier writes do not delay the next measurement.
fn settle() {
    nix::unistd::sync();
}

/// Seconds to write a layer's files and sync them to disk.
fn disk(below: &Path) -> Result<f64> {
    let folder = tempfile::tempdir_in(below)?;
    let files: Vec<Vec<u8>> = (0..8).map(content).collect();
    settle();
    let begun = Instant::now();
    for (at, content) in files.iter().cycle().take(FILES).enumerate() {
        fs::write(folder.path().join(at.to_string()), content)?;
    }
    nix::unistd::syncfs(File::open(folder.path())?)?;
    Ok(begun.elapsed().as_secs_f64())
}

/// Content that compresses to half its size, as programs do: noise alternates with repeated bytes.
fn content(seed: usize) -> Vec<u8> {
    let mut state = 0x9e37_79b9_7f4a_7c15_u64.wrapping_mul(seed as u64 + 1);
    let mut bytes = Vec::with_capacity(SIZE);
    while bytes.len() < SIZE {
        // xorshift: the same bytes on every machine.
        state ^= state << 13;
        state ^= state >> 7;
        state ^= state << 17;
        let word = state.to_le_bytes();
        bytes.extend_from_slice(&word[..4]);
        bytes.extend_from_slice(b"berth: ");
        bytes.extend_from_slice(&word[..1]);
    }
    bytes.truncate(SIZE);
    bytes
}

fn layer() -> Result<Vec<u8>> {
    let mut archive = tar::Builder::new(GzEncoder::new(Vec::new(), Compression::default()));
    for at in 0..FILES {
        let mut header = tar::Header::new_gnu();
        header.set_mode(0o644);
        header.set_size(SIZE as u64);
        archive.append_data(&mut header, format!("usr/lib/{}/{at}", at % 50), content(at).as_slice())?;
    }
    Ok(archive.into_inner()?.finish()?)
}

/// Writes an OCI archive of one image with that layer.
fn archive(layer: &[u8], folder: &Path) -> Result<PathBuf> {
    let config = json!({
        "architecture": image::architecture(), "os": "linux", "config": {"Cmd": ["sh"]},
        "rootfs": {"type": "layers", "diff_ids": [unpacked_digest(layer)?]},
    });
    let config = serde_json::to_vec(&config)?;
    let manifest = serde_json::to_vec(&json!({
        "schemaVersion": 2, "mediaType": "application/vnd.oci.image.manifest.v1+json",
        "config": image::descriptor("application/vnd.oci.image.config.v1+json", &config),
        "layers": [image::descriptor("application/vnd.oci.image.layer.v1.tar+gzip", layer)],
    }))?;
    let mut entry = image::descriptor("application/vnd.oci.image.manifest.v1+json", &manifest);
    entry["annotations"] = json!({"io.containerd.image.name": NAME, "org.opencontainers.image.ref.name": "1"});
    let index = serde_json::to_vec(&json!({"schemaVersion": 2, "manifests": [entry]}))?;
    let path = folder.join("big.tar");
    let mut archive = tar::Builder::new(File::create(&path)?);
    image::file(&mut archive, "oci-layout", br#"{"imageLayoutVersion":"1.0.0"}"#, 0o644)?;
    image::file(&mut archive, "index.json", &index, 0o644)?;
    for blob in [config.as_slice(), &manifest, layer] {
        let name = format!("blobs/{}", image::digest(blob).replace(':', "/"));
        image::file(&mut archive, &name, blob, 0o644)?;
    }
    archive.into_inner()?.flush()?;
    Ok(path)
}

/// Diff ID: digest of the uncompressed layer, as the image configuration lists it.
fn unpacked_digest(layer: &[u8]) -> Result<String> {
    let mut unpacked = Vec::new();
    GzDecoder::new(layer).read_to_end(&mut unpacked)?;
    Ok(image::digest(&unpacked))
}
