//! Image export: OCI layout in a tar file, with Docker's `manifest.json`.
//!
//! Layers are restored from their files and exported uncompressed, as the configuration names them: the image keeps its
//! ID wherever it is imported. Only its manifest differs, because it names layers by their compressed digests.
//! Blocking. Implements spec 09b §7.

use std::{
    collections::BTreeSet,
    io::{self, Read, Write},
    sync::Arc,
};

use super::{ImageStore, ImageStoreInner, blocking};
use crate::images::{
    digest::{Digest, HashingReader},
    error::{ImageError, ImageErrorKind, IoContext},
    model::{self, Descriptor, LONGEST_CONFIG, Manifest, OCI_CONFIG, OCI_INDEX, OCI_LAYER, OCI_MANIFEST},
    names::Name,
    progress::{ImageProgress, Stage},
    record::ImageRecord,
    tar::writer,
};

/// Content of one image for an archive, with the names it is exported under.
struct ExportImage {
    names: Vec<Name>,
    config: Vec<u8>,
    manifest: Manifest,
    manifest_bytes: Vec<u8>,
    /// Layer numbers, bottom first.
    numbers: Vec<u64>,
}

impl ImageStore {
    /// Writes images into an archive; a name selects the image under that name, an ID all its names.
    ///
    /// # Errors
    /// There is no such image, one of its layers is broken, or the archive cannot be written.
    pub async fn export<W: Write + Send + 'static>(
        &self,
        references: Vec<String>,
        into: W,
        progress: Arc<ImageProgress>,
    ) -> Result<W, ImageError> {
        let inner = Arc::clone(&self.inner);
        blocking(move || inner.export(&references, into, &progress)).await
    }
}

impl ImageStoreInner {
    fn export<W: Write>(&self, references: &[String], mut into: W, progress: &ImageProgress) -> Result<W, ImageError> {
        let mut leases = Vec::new();
        let mut images: Vec<ExportImage> = Vec::new();
        for reference in references {
            leases.push(self.lease_of(reference)?);
            let missing = || ImageError::not_found(format!("image {reference:?}: not found"));
            let record = self.catalogue().find(reference)?.ok_or_else(missing)?;
            let image = self.outgoing(reference, &record).map_err(|error| error.within(reference))?;
            match images.iter_mut().find(|known| known.manifest == image.manifest) {
                Some(known) => known.names.extend(image.names),
                None => images.push(image),
            }
        }
        progress.begin(images.iter().flat_map(|image| &image.manifest.layers));
        let failed = "write archive";
        writer::file(&mut into, "oci-layout", br#"{"imageLayoutVersion":"1.0.0"}"#).attempt(failed)?;
        let mut written = BTreeSet::new();
        for image in &images {
            for (layer, number) in image.manifest.layers.iter().zip(&image.numbers) {
                if written.insert(layer.digest) {
                    self.write_layer(&mut into, layer, *number, progress)?;
                }
                progress.enter(layer.digest, Stage::Done, 0);
            }
            for bytes in [&image.config, &image.manifest_bytes] {
                let digest = Digest::of(bytes);
                if written.insert(digest) {
                    writer::file(&mut into, &blob(&digest), bytes).attempt(failed)?;
                }
            }
        }
        let json = |value: serde_json::Value| value.to_string().into_bytes();
        writer::file(&mut into, "index.json", &json(index(&images))).attempt(failed)?;
        writer::file(&mut into, "manifest.json", &json(for_docker(&images))).attempt(failed)?;
        writer::end(&mut into).attempt(failed)?;
        into.flush().attempt(failed)?;
        Ok(into)
    }

    fn outgoing(&self, reference: &str, record: &ImageRecord) -> Result<ExportImage, ImageError> {
        let missing = || ImageError::new(ImageErrorKind::DataLoss, "image configuration not found");
        let config = self.content.read(&record.id, LONGEST_CONFIG)?.ok_or_else(missing)?;
        let diff_ids = model::config(&config, record.layers.len())?.diff_ids;
        let mut layers = Vec::new();
        for (number, diff_id) in record.layers.iter().zip(diff_ids) {
            let meta = self.layers.meta(*number).ok_or_else(|| ImageError::not_found("layer not found"))?;
            if meta.stream == 0 {
                let text = format!("layer {diff_id} cannot be restored from its files: pull or import the image again");
                return Err(ImageError::bad_content(text));
            }
            layers.push(Descriptor::new(OCI_LAYER, diff_id, meta.stream));
        }
        let manifest = Manifest {
            schema_version: 2,
            media_type: OCI_MANIFEST.to_owned(),
            config: Descriptor::of(OCI_CONFIG, &config),
            layers,
        };
        let failed = |error| ImageError::bad_content(format!("write manifest: {error}"));
        let manifest_bytes = serde_json::to_vec(&manifest).map_err(failed)?;
        // A digest reference names other bytes than the exported manifest: omit it.
        let tags = record.repo_tags().into_iter().filter_map(|tag| Name::parse(&tag).ok());
        let names = match Name::parse(reference).ok().filter(|name| tags.clone().any(|tag| tag == *name)) {
            Some(name) => vec![name],
            None if Name::parse(reference).is_ok_and(|name| name.tag().is_none()) => Vec::new(),
            None => tags.collect(),
        };
        Ok(ExportImage { names, config, manifest, manifest_bytes, numbers: record.layers.clone() })
    }

    fn write_layer(
        &self,
        into: &mut impl Write,
        layer: &Descriptor,
        number: u64,
        progress: &ImageProgress,
    ) -> Result<(), ImageError> {
        progress.enter(layer.digest, Stage::Writing, 0);
        writer::header(into, &blob(&layer.digest), layer.size).attempt("write archive")?;
        let broken = |error: &dyn std::fmt::Display| {
            let text = format!("layer {}: {error}; run `berth images verify --repair` to repair it", layer.digest);
            ImageError::new(ImageErrorKind::DataLoss, text)
        };
        let mut stream = HashingReader::new(self.layers.stream(number)?);
        let mut buffer = vec![0; 256 << 10];
        loop {
            let count = stream.read(&mut buffer).map_err(|error| broken(&error))?;
            if count == 0 {
                break;
            }
            into.write_all(buffer.get(..count).unwrap_or_default()).attempt("write archive")?;
            progress.add(layer.digest, count as u64);
        }
        let (length, digest) = (stream.length(), stream.finish());
        if (length, digest) != (layer.size, layer.digest) {
            return Err(broken(&"files of the layer have changed"));
        }
        writer::pad(into, length).attempt("write archive")
    }
}

fn blob(digest: &Digest) -> String {
    format!("blobs/sha256/{}", digest.hex())
}

/// One index entry per name, as in containerd; a nameless one for an image without names.
fn index(images: &[ExportImage]) -> serde_json::Value {
    let mut manifests = Vec::new();
    for image in images {
        let mut entry = Descriptor::of(OCI_MANIFEST, &image.manifest_bytes);
        for name in &image.names {
            let tag = name.tag().unwrap_or_default().to_owned();
            entry.annotations = [
                ("io.containerd.image.name".to_owned(), name.to_string()),
                ("org.opencontainers.image.ref.name".to_owned(), tag),
            ]
            .into();
            manifests.push(entry.clone());
        }
        if image.names.is_empty() {
            manifests.push(entry);
        }
    }
    serde_json::json!({"schemaVersion": 2, "mediaType": OCI_INDEX, "manifests": manifests})
}

fn for_docker(images: &[ExportImage]) -> serde_json::Value {
    let image = |image: &ExportImage| {
        serde_json::json!({
            "Config": blob(&image.manifest.config.digest),
            "RepoTags": image.names.iter().map(Name::to_string).collect::<Vec<_>>(),
            "Layers": image.manifest.layers.iter().map(|layer| blob(&layer.digest)).collect::<Vec<_>>(),
        })
    };
    images.iter().map(image).collect()
}

/// A writer to a non-blocking pipe that waits for the reader, up to a timeout.
pub struct TimedPipeWriter<W> {
    /// The underlying writer.
    pub inner: W,
}

/// Timeout of a write, milliseconds.
const PATIENCE_MS: i64 = 60_000;

impl<W: Write + std::os::fd::AsFd> Write for TimedPipeWriter<W> {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        loop {
            match self.inner.write(bytes) {
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => {
                    let mut wait = [rustix::event::PollFd::new(&self.inner, rustix::event::PollFlags::OUT)];
                    let limit = rustix::event::Timespec { tv_sec: PATIENCE_MS / 1000, tv_nsec: 0 };
                    if rustix::event::poll(&mut wait, Some(&limit))? == 0 {
                        return Err(io::Error::new(io::ErrorKind::TimedOut, "timed out: the reader does not read"));
                    }
                }
                other => return other,
            }
        }
    }

    fn flush(&mut self) -> io::Result<()> {
        self.inner.flush()
    }
}

#[cfg(test)]
mod tests {
    use std::fs;

    use super::{
        super::tests::{imported, is_root, layer, oci, opened},
        *,
    };

    #[tokio::test]
    async fn what_is_exported_is_the_same_image_where_it_is_imported() {
        if !is_root() {
            return;
        }
        let dir = tempfile::tempdir().expect("a directory");
        let store = opened(&dir.path().join("a")).await;
        let base = layer(&[("bin/sh", "x"), ("d/.wh.gone", ""), ("d/kept", &"long ".repeat(100_000))]);
        let top = layer(&[("etc/x", ""), ("bin/sh", "another")]);
        let archive = oci("docker.io/library/a:1", &[base.clone(), top], "7");
        let image = imported(&store, dir.path(), &archive).await.remove(0);
        let second = imported(&store, dir.path(), &oci("x.tld/b:2", &[base], "")).await.remove(0);
        let references = vec!["a:1".to_owned(), second.id(), image.id()];
        let bytes = store.export(references, Vec::new(), Arc::default()).await.expect("written");
        fs::write(dir.path().join("out.tar"), &bytes).expect("writable");

        let other = opened(&dir.path().join("b")).await;
        let images = other.import(&dir.path().join("out.tar"), None).await.expect("imports");
        let mut known: Vec<_> = images.iter().map(|image| (image.id(), image.repo_tags())).collect();
        known.sort();
        let mut expected = vec![(image.id(), image.repo_tags()), (second.id(), second.repo_tags())];
        expected.sort();
        assert_eq!(known, expected);
        let shared = images[0].layers.iter().filter(|number| images[1].layers.contains(number)).count();
        assert_eq!(shared, 1, "layers are shared there as here");
        let of_first = images.iter().find(|known| known.id == image.id).expect("there");
        let path = |name: &str| dir.path().join(format!("b/layers/{}/d/{name}", of_first.layers[0]));
        assert_eq!(fs::read_to_string(path("d/kept")).expect("there").len(), 500_000);
        assert!(rustix::fs::lstat(path("d/gone")).is_ok(), "the deletion came along");
        let again = other.export(vec!["a:1".to_owned()], Vec::new(), Arc::default()).await.expect("written");
        let once = store.export(vec!["a:1".to_owned()], Vec::new(), Arc::default()).await.expect("written");
        assert_eq!(again, once, "to the byte");
        let unknown = store.export(vec!["nothing".to_owned()], Vec::new(), Arc::default()).await.expect_err("unknown");
        assert_eq!(unknown.kind, ImageErrorKind::NotFound);
    }

    #[tokio::test]
    async fn files_that_changed_are_not_exported_as_if_they_had_not() {
        if !is_root() {
            return;
        }
        let dir = tempfile::tempdir().expect("a directory");
        let store = opened(&dir.path().join("a")).await;
        imported(&store, dir.path(), &oci("x.tld/a:1", &[layer(&[("f", "right")])], "")).await;
        fs::write(dir.path().join("a/layers/1/d/f"), "wrong").expect("writable");
        let error = store.export(vec!["x.tld/a:1".to_owned()], Vec::new(), Arc::default()).await.expect_err("changed");
        assert_eq!(error.kind, ImageErrorKind::DataLoss);
        assert!(error.text.contains("verify --repair"), "{error}");
    }
}
