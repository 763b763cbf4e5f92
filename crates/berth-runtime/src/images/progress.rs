//! Progress of image operations by layer, for clients and the log.

use std::sync::{
    OnceLock,
    atomic::{AtomicU8, AtomicU64, Ordering},
};

use serde::{Deserialize, Serialize};

use super::{digest::Digest, model::Descriptor};

/// Operation in progress on a layer.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Stage {
    /// Not started.
    Waiting,
    /// Downloading from a registry.
    Downloading,
    /// Unpacking into files.
    Unpacking,
    /// Writing to an archive.
    Writing,
    /// Verifying its files.
    Checking,
    /// Complete.
    Done,
}

const STAGES: [Stage; 6] =
    [Stage::Waiting, Stage::Downloading, Stage::Unpacking, Stage::Writing, Stage::Checking, Stage::Done];

/// Progress of one layer.
#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub struct LayerProgress {
    /// Digest of the layer.
    pub digest: Digest,
    /// Total size, bytes.
    pub size: u64,
    /// Bytes completed in the current stage.
    pub done: u64,
    /// Current stage.
    pub stage: Stage,
}

#[derive(Debug)]
struct Layer {
    digest: Digest,
    size: u64,
    done: AtomicU64,
    stage: AtomicU8,
}

/// Progress shared by the operation and its observers; the layers are known once the manifest is.
#[derive(Debug, Default)]
pub struct ImageProgress(OnceLock<Vec<Layer>>);

impl ImageProgress {
    /// Sets the layers; only the first call has an effect.
    pub fn begin<'a>(&self, layers: impl IntoIterator<Item = &'a Descriptor>) {
        let layer = |layer: &Descriptor| Layer {
            digest: layer.digest,
            size: layer.size,
            done: AtomicU64::new(0),
            stage: AtomicU8::new(0),
        };
        self.0.get_or_init(|| layers.into_iter().map(layer).collect());
    }

    fn layers(&self, digest: Digest) -> impl Iterator<Item = &Layer> {
        self.0.get().into_iter().flatten().filter(move |layer| layer.digest == digest)
    }

    /// Starts a stage of a layer, at `done` bytes.
    pub fn enter(&self, digest: Digest, stage: Stage, done: u64) {
        let number = STAGES.iter().position(|known| *known == stage).unwrap_or_default();
        for layer in self.layers(digest) {
            layer.done.store(if stage == Stage::Done { layer.size } else { done }, Ordering::Relaxed);
            layer.stage.store(u8::try_from(number).unwrap_or_default(), Ordering::Relaxed);
        }
    }

    /// Adds completed bytes of a layer.
    pub fn add(&self, digest: Digest, bytes: u64) {
        for layer in self.layers(digest) {
            layer.done.fetch_add(bytes, Ordering::Relaxed);
        }
    }

    /// Progress of all layers, bottom first; empty before they are known.
    pub fn snapshot(&self) -> Vec<LayerProgress> {
        let shown = |layer: &Layer| LayerProgress {
            digest: layer.digest,
            size: layer.size,
            done: layer.done.load(Ordering::Relaxed).min(layer.size),
            stage: STAGES.get(usize::from(layer.stage.load(Ordering::Relaxed))).copied().unwrap_or(Stage::Waiting),
        };
        self.0.get().into_iter().flatten().map(shown).collect()
    }
}

/// A reader that records progress of a layer.
pub struct ProgressReader<'a, R> {
    inner: R,
    digest: Digest,
    progress: &'a ImageProgress,
}

impl<'a, R> ProgressReader<'a, R> {
    /// Wraps a reader and starts the unpacking stage of the layer.
    pub fn new(inner: R, digest: Digest, progress: &'a ImageProgress) -> Self {
        progress.enter(digest, Stage::Unpacking, 0);
        Self { inner, digest, progress }
    }
}

impl<R: std::io::Read> std::io::Read for ProgressReader<'_, R> {
    fn read(&mut self, buffer: &mut [u8]) -> std::io::Result<usize> {
        let count = self.inner.read(buffer)?;
        self.progress.add(self.digest, count as u64);
        Ok(count)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn layers_are_watched_by_their_digest() {
        let progress = ImageProgress::default();
        let layer = |text: &str| Descriptor::of("x", text.as_bytes());
        let (a, b) = (layer("four"), layer("longer"));
        progress.add(a.digest, 3);
        assert!(progress.snapshot().is_empty(), "not known yet");
        progress.begin([&a, &b, &a]);
        progress.enter(a.digest, Stage::Downloading, 1);
        progress.add(a.digest, 9);
        progress.enter(b.digest, Stage::Done, 0);
        let shown: Vec<_> =
            progress.snapshot().into_iter().map(|layer| (layer.done, layer.size, layer.stage)).collect();
        assert_eq!(shown, [(4, 4, Stage::Downloading), (6, 6, Stage::Done), (4, 4, Stage::Downloading)]);
    }
}
