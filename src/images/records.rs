//! Image pull records: intents before pulls, credentials after them (spec 03b §3.3).
//!
//! Both are on disk, so that a crash in between is detected at start. All file work runs on the
//! blocking pool under one mutex that is never held across an await; callers wait with a timeout.

use std::{
    collections::{HashMap, HashSet},
    io,
    num::NonZeroUsize,
    path::Path,
    sync::{Arc, Mutex, PoisonError},
    time::Duration,
};

use jiff::Timestamp;
use tracing::{info, warn};

use super::{
    record_documents::{
        PreloadedImage, Proof, PulledRecord, decode_intent, decode_preloaded, decode_pulled, encode_intent,
        encode_preloaded, encode_pulled,
    },
    reference::ImageReference,
    store::{Form, RecordStore},
};
use berth_metrics::Images;
use berth_ports::Clock;
use berth_proto::cri;

/// Timeout of one disk operation.
const DEADLINE: Duration = Duration::from_secs(10);

/// Records of one image.
pub struct KnownImage {
    /// The record; `Err` if it could not be read.
    pub record: Result<Option<PulledRecord>, ()>,
    /// Whether a pull was started but not recorded.
    pub intent: bool,
}

/// A successful pull.
#[derive(Clone, Debug)]
pub struct Pull {
    /// The image as the pod writes it.
    pub image: String,
    /// The runtime's image reference.
    pub image_ref: String,
    /// Image name without tag and digest.
    pub repository: String,
    /// Credential that was used.
    pub proof: Proof,
}

struct RecordsInner {
    counts: HashMap<String, usize>,
    intents: RecordStore<String>,
    pulled: RecordStore<PulledRecord>,
    /// For intents: images that were present before, and not by a pull.
    preloaded: RecordStore<PreloadedImage>,
    clock: Arc<dyn Clock>,
}

/// Handle to the pull records. Cheap to clone.
#[derive(Clone)]
pub struct Records(Arc<Mutex<RecordsInner>>);

fn capacity(wanted: usize, cap: usize) -> NonZeroUsize {
    NonZeroUsize::new(wanted.min(cap)).unwrap_or(NonZeroUsize::MIN)
}

impl Records {
    /// Opens `<root>/image_manager`. Blocks.
    ///
    /// # Errors
    /// The directories cannot be created or listed.
    pub fn open(
        root: &Path,
        max_pods: usize,
        max_parallel: usize,
        clock: Arc<dyn Clock>,
        metrics: &Images,
    ) -> io::Result<Self> {
        let folder = root.join("image_manager");
        let intents_capacity = capacity(max_pods.saturating_mul(2).max(max_parallel.saturating_mul(2)), 1024);
        let intents = RecordStore::open(
            folder.join("pulling"),
            Form { key: |image: &String| image.as_str(), encode: |image| encode_intent(image), decode: decode_intent },
            intents_capacity,
            Some(metrics.intents.clone()),
        )?;
        let pulled = RecordStore::open(
            folder.join("pulled"),
            Form {
                key: |record: &PulledRecord| record.image_ref.as_str(),
                encode: encode_pulled,
                decode: decode_pulled,
            },
            capacity(max_pods.saturating_mul(5), 2000),
            Some(metrics.records.clone()),
        )?;
        let preloaded = RecordStore::open(
            folder.join("preloaded"),
            Form {
                key: |preloaded: &PreloadedImage| preloaded.image.as_str(),
                encode: encode_preloaded,
                decode: decode_preloaded,
            },
            intents_capacity,
            None,
        )?;
        Ok(Self(Arc::new(Mutex::new(RecordsInner { counts: HashMap::new(), intents, pulled, preloaded, clock }))))
    }

    async fn run<T: Send + 'static>(
        &self,
        work: impl FnOnce(&mut RecordsInner) -> io::Result<T> + Send + 'static,
    ) -> io::Result<T> {
        let inner = self.0.clone();
        let task = tokio::task::spawn_blocking(move || work(&mut inner.lock().unwrap_or_else(PoisonError::into_inner)));
        match tokio::time::timeout(DEADLINE, task).await {
            Err(_) => {
                Err(io::Error::new(io::ErrorKind::TimedOut, format!("disk operation timed out after {DEADLINE:?}")))
            }
            Ok(Err(joined)) => Err(io::Error::other(joined)),
            Ok(Ok(answer)) => answer,
        }
    }

    /// Records the start of a pull; `present` is the image the runtime already has under that name.
    /// Concurrent pulls of one image share the file.
    ///
    /// # Errors
    /// The intent cannot be written; the pull must not start.
    pub async fn begin(&self, image: &str, present: Option<&str>) -> io::Result<Intent> {
        let (records, image, present) = (self.clone(), image.to_owned(), present.map(str::to_owned));
        // Created inside the job: a caller that stops waiting still removes the intent by the drop.
        let begin = move |inner: &mut RecordsInner| {
            inner.begin(&image, present.as_deref())?;
            Ok(Intent { records: Some(records), image })
        };
        self.run(begin).await
    }

    /// Reads the records of an image that is present.
    pub async fn known(&self, image: &str, image_ref: &str) -> KnownImage {
        let (image, image_ref) = (image.to_owned(), image_ref.to_owned());
        let read = self.run(move |inner| {
            let intent = inner.intents.get(&image).map(|found| found.is_some());
            // an unreadable intent counts as an intent
            Ok(KnownImage { record: inner.pulled.get(&image_ref).map_err(drop), intent: intent.unwrap_or(true) })
        });
        read.await.unwrap_or(KnownImage { record: Err(()), intent: true })
    }

    /// Records a credential that matches an image that is present, but is not recorded yet.
    pub async fn learn(&self, image_ref: &str, repository: &str, proof: Proof) {
        let (image_ref, repository) = (image_ref.to_owned(), repository.to_owned());
        let written = self.run(move |inner| inner.grant(&image_ref, &repository, Some(&proof)));
        if let Err(error) = written.await {
            warn!(err = %error, "Failed to update image pulled record");
        }
    }

    /// Recovery after a restart: images with a pull intent get a record without credentials.
    ///
    /// # Errors
    /// The intents cannot be listed.
    pub async fn recover(&self, images: Vec<cri::Image>) -> io::Result<()> {
        self.run(move |inner| inner.recover(&images)).await
    }

    /// Removes records of images that no longer exist and that were last changed before `before`.
    /// `images` is the complete list of remaining images.
    ///
    /// # Errors
    /// The records cannot be listed or removed.
    pub async fn prune(&self, images: Vec<cri::Image>, before: Timestamp) -> io::Result<()> {
        self.run(move |inner| inner.prune(&images, before)).await
    }
}

/// A started pull. Dropping it removes the intent: the pull was cancelled.
pub struct Intent {
    records: Option<Records>,
    image: String,
}

impl Intent {
    /// Records a successful pull, then removes the intent. If the record cannot be written the intent
    /// is kept, so that a restart still treats the image as pulled by this agent.
    pub async fn succeeded(mut self, pull: Pull) {
        let Some(records) = self.records.take() else { return };
        let written = records.run(move |inner| {
            inner.grant(&pull.image_ref, &pull.repository, Some(&pull.proof))?;
            inner.end(&pull.image)
        });
        if let Err(error) = written.await {
            warn!(image = %self.image, err = %error, "Failed to record image pull");
        }
    }

    /// Removes the intent of a failed pull, before the failure is returned.
    pub async fn failed(mut self) {
        let Some(records) = self.records.take() else { return };
        let image = self.image.clone();
        if let Err(error) = records.run(move |inner| inner.end(&image)).await {
            warn!(image = %self.image, err = %error, "Failed to remove image pull intent");
        }
    }
}

impl Drop for Intent {
    fn drop(&mut self) {
        let Some(records) = self.records.take() else { return };
        let image = std::mem::take(&mut self.image);
        // outside a Tokio runtime the process is ending, and the intent may remain
        if let Ok(runtime) = tokio::runtime::Handle::try_current() {
            runtime.spawn_blocking(move || {
                let ended = records.0.lock().unwrap_or_else(PoisonError::into_inner).end(&image);
                if let Err(error) = ended {
                    warn!(image = %image, err = %error, "Failed to remove image pull intent");
                }
            });
        }
    }
}

impl RecordsInner {
    fn begin(&mut self, image: &str, present: Option<&str>) -> io::Result<()> {
        if !self.counts.contains_key(image) {
            // Before the intent: a preloaded record without an intent has no effect after a crash in
            // between.
            match present.filter(|image_ref| matches!(self.pulled.get(image_ref), Ok(None))) {
                Some(image_ref) => self.preloaded.put(PreloadedImage::new(image, image_ref))?,
                None => self.preloaded.delete(image)?,
            }
            self.intents.put(image.to_owned())?;
        }
        *self.counts.entry(image.to_owned()).or_default() += 1;
        Ok(())
    }

    fn end(&mut self, image: &str) -> io::Result<()> {
        let left = match self.counts.get_mut(image) {
            Some(count) if *count > 1 => {
                *count -= 1;
                *count
            }
            _ => 0,
        };
        if left > 0 {
            return Ok(());
        }
        self.counts.remove(image);
        self.end_intent(image)
    }

    /// Removes an intent, then its preloaded record: a preloaded record without an intent has no
    /// effect.
    fn end_intent(&mut self, image: &str) -> io::Result<()> {
        self.intents.delete(image)?;
        self.preloaded.delete(image)
    }

    /// Merges a credential into the record; creates a record without grants if there is none.
    fn grant(&mut self, image_ref: &str, repository: &str, proof: Option<&Proof>) -> io::Result<()> {
        // an unreadable record is rewritten: it granted nothing
        let known = self.pulled.get(image_ref).unwrap_or_default();
        let now = self.clock.now();
        let mut record = known.clone().unwrap_or_else(|| PulledRecord::new(image_ref, now));
        let grants = record.grants.entry(repository.to_owned()).or_default();
        if let Some(proof) = proof {
            grants.add(proof);
        }
        if known.is_some_and(|known| known.grants == record.grants) {
            return Ok(());
        }
        record.updated = now;
        self.pulled.put(record)
    }

    fn recover(&mut self, images: &[cri::Image]) -> io::Result<()> {
        let mut by_name: HashMap<String, &cri::Image> = HashMap::new();
        for image in images {
            for name in image.repo_tags.iter().chain(&image.repo_digests) {
                by_name.insert(canonical(name), image);
            }
        }
        for intent in self.intents.all()? {
            let preloaded = self.preloaded.get(&intent).ok().flatten();
            let is_as_before =
                |image: &cri::Image| preloaded.as_ref().is_some_and(|before| before.image_ref == image.id);
            let image = by_name.get(&canonical(&intent)).filter(|image| !is_as_before(image));
            if let Some(image) = image {
                info!(image = %intent, imageRef = %image.id, "Image pull was interrupted by a restart, access to the image requires credentials");
                let repository = ImageReference::parse(&intent).map(|parsed| parsed.repository).unwrap_or_default();
                if let Err(error) = self.grant(&image.id, &repository, None) {
                    warn!(image = %intent, err = %error, "Failed to record image of an interrupted pull");
                    continue;
                }
            }
            self.end_intent(&intent)?;
        }
        Ok(())
    }

    fn prune(&mut self, images: &[cri::Image], before: Timestamp) -> io::Result<()> {
        let mut names: HashSet<&str> = HashSet::new();
        for image in images {
            names.insert(&image.id);
            names.extend(image.repo_tags.iter().chain(&image.repo_digests).map(String::as_str));
        }
        for record in self.pulled.all()? {
            if record.updated < before && !names.contains(record.image_ref.as_str()) {
                self.pulled.delete(&record.image_ref)?;
            }
        }
        Ok(())
    }
}

/// Canonical form of an image name.
fn canonical(name: &str) -> String {
    ImageReference::parse(name).map_or_else(|_| name.to_owned(), |parsed| parsed.canonical())
}

#[cfg(test)]
mod tests {
    use super::*;
    use berth_metrics::Registry;

    struct FixedClock(i64);

    impl Clock for FixedClock {
        fn now(&self) -> Timestamp {
            Timestamp::from_second(self.0).expect("in range")
        }
    }

    fn open(root: &Path, now: i64) -> Records {
        Records::open(root, 110, 1, Arc::new(FixedClock(now)), &Images::new(&Registry::new())).expect("opens")
    }

    fn image(id: &str, tag: &str) -> cri::Image {
        cri::Image { id: id.into(), repo_tags: vec![tag.into()], size: 1, ..Default::default() }
    }

    fn pull() -> Pull {
        Pull {
            image: "busybox".into(),
            image_ref: "sha256:1".into(),
            repository: "docker.io/library/busybox".into(),
            proof: Proof::Node,
        }
    }

    fn files(root: &Path, folder: &str) -> usize {
        std::fs::read_dir(root.join("image_manager").join(folder)).expect("there").count()
    }

    #[tokio::test]
    async fn an_abandoned_pull_leaves_no_intent() {
        use futures::FutureExt;
        let dir = tempfile::tempdir().expect("a directory");
        let records = open(dir.path(), 1000);
        for _ in 0..20 {
            // Dropped while the intent is being written, as for a pod that is deleted.
            let begun = records.begin("busybox", None).now_or_never();
            assert!(begun.is_none(), "it waits for the disk");
        }
        let done = async {
            while Arc::strong_count(&records.0) > 1 {
                tokio::time::sleep(Duration::from_millis(5)).await;
            }
        };
        tokio::time::timeout(Duration::from_secs(20), done).await.expect("all writes end");
        assert_eq!(files(dir.path(), "pulling"), 0);
    }

    #[tokio::test]
    async fn an_intent_becomes_a_record() {
        let dir = tempfile::tempdir().expect("a directory");
        let records = open(dir.path(), 1000);
        let (first, second) = (
            records.begin("busybox", None).await.expect("written"),
            records.begin("busybox", None).await.expect("written"),
        );
        assert_eq!(files(dir.path(), "pulling"), 1);
        first.succeeded(pull()).await;
        assert_eq!(files(dir.path(), "pulling"), 1, "another pull of it goes on");
        assert!(records.known("busybox", "sha256:1").await.intent);
        second.succeeded(pull()).await;
        assert_eq!((files(dir.path(), "pulling"), files(dir.path(), "pulled")), (0, 1));
        let known = open(dir.path(), 1000).known("busybox", "sha256:1").await;
        let record = known.record.expect("readable").expect("recorded");
        assert!(record.grants["docker.io/library/busybox"].node && !known.intent);
    }

    #[tokio::test]
    async fn a_crash_between_pull_and_record_is_noticed() {
        // AC-03b-19
        let dir = tempfile::tempdir().expect("a directory");
        for name in ["busybox", "r.io/gone:1"] {
            std::mem::forget(open(dir.path(), 1000).begin(name, None).await.expect("written"));
        }
        let records = open(dir.path(), 2000);
        records.recover(vec![image("sha256:1", "docker.io/library/busybox:latest")]).await.expect("recovers");
        assert_eq!((files(dir.path(), "pulling"), files(dir.path(), "pulled")), (0, 1));
        let record = records.known("busybox", "sha256:1").await.record.expect("readable").expect("recorded");
        assert_eq!(record.grants["docker.io/library/busybox"], Default::default());
    }

    #[tokio::test]
    async fn what_was_here_before_a_pull_that_was_cut_short_stays_what_it_was() {
        let recovered = async |begins: &[(&str, Option<&str>)], found: &str| {
            let dir = tempfile::tempdir().expect("a directory");
            let before = open(dir.path(), 1000);
            before.learn("sha256:pulled", "r.io/a", Proof::Node).await;
            for (name, present) in begins {
                std::mem::forget(before.begin(name, *present).await.expect("written"));
            }
            drop(before);
            let records = open(dir.path(), 2000);
            records.recover(vec![image(found, "r.io/a:1")]).await.expect("recovers");
            assert_eq!((files(dir.path(), "pulling"), files(dir.path(), "preloaded")), (0, 0));
            let record = records.known("r.io/a:1", found).await.record.expect("readable");
            record.map(|record| record.grants.get("r.io/a").is_some_and(|grants| grants.node))
        };
        let preloaded = [("r.io/a:1", Some("sha256:1"))];
        assert_eq!(recovered(&preloaded, "sha256:1").await, None, "it needs no credentials, as before");
        assert_eq!(recovered(&preloaded, "sha256:2").await, Some(false), "another image was pulled under its name");
        assert_eq!(recovered(&[("r.io/a:1", None)], "sha256:1").await, Some(false), "it came by the pull");
        let pulled = [("r.io/a:1", Some("sha256:pulled"))];
        assert_eq!(recovered(&pulled, "sha256:pulled").await, Some(true), "what its record grants stays");
    }

    #[tokio::test]
    async fn preloaded_records_belong_to_running_pulls() {
        let dir = tempfile::tempdir().expect("a directory");
        let records = open(dir.path(), 1000);
        let first = records.begin("busybox", Some("sha256:1")).await.expect("written");
        let second = records.begin("busybox", Some("sha256:2")).await.expect("written");
        assert_eq!(files(dir.path(), "preloaded"), 1);
        first.failed().await;
        assert_eq!(files(dir.path(), "preloaded"), 1, "another pull of it goes on");
        second.succeeded(pull()).await;
        assert_eq!(files(dir.path(), "preloaded"), 0);
        std::mem::forget(open(dir.path(), 1000).begin("busybox", Some("sha256:9")).await.expect("written"));
        let again = open(dir.path(), 1000).begin("busybox", None).await.expect("written");
        assert_eq!(files(dir.path(), "preloaded"), 0, "what an earlier pull left does not speak for this one");
        again.failed().await;
    }

    #[tokio::test]
    async fn records_go_with_their_images() {
        let dir = tempfile::tempdir().expect("a directory");
        let records = open(dir.path(), 1000);
        records.learn("sha256:1", "r.io/a", Proof::Node).await;
        records.learn("sha256:2", "r.io/b", Proof::Node).await;
        let survivor = vec![image("sha256:1", "r.io/a:1")];
        let at = |second| Timestamp::from_second(second).expect("in range");
        records.prune(survivor.clone(), at(1000)).await.expect("prunes");
        assert_eq!(files(dir.path(), "pulled"), 2, "nothing is older than the pass");
        records.prune(survivor, at(1001)).await.expect("prunes");
        assert_eq!(files(dir.path(), "pulled"), 1);
        assert!(records.known("x", "sha256:1").await.record.expect("readable").is_some());
    }
}
