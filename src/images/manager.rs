//! Image manager: makes an image available to a pod by status, verification, and pull (spec 03b §1.1).
//!
//! The decisions are in `policy.rs` and `credential_verification.rs`; this module makes the calls.

use std::{
    io,
    sync::{Arc, Mutex, PoisonError},
    time::Duration,
};

use async_trait::async_trait;
use sha2::{Digest, Sha256};
use tokio::{
    sync::{OnceCell, watch},
    time::Instant,
};
use tokio_util::sync::CancellationToken;
use tracing::{debug, warn};

use super::{
    backoff::{Key, LastPullFailure, PullBackoff},
    credential_verification::{self, CheckResult, InitialDecision, PresentImage},
    credentials::{Credential, CredentialLookup, docker::DockerConfigError},
    gc::{Collector, CollectorDeps, CollectorHandle, GcError},
    policy::{self, ImagePresence, PullDecision, Verification},
    puller::{Parallelism, PullFailure, PullRequest, Puller},
    records::Records,
    reference::{ImageReference, with_default_tag},
    settings::{ImagesConfig, ImagesDeps, ImagesError, OnPull, PullMoment},
};
use berth_config::{GoDuration, text::quote};
use berth_cri::{CriError, ImageService};
use berth_metrics::Images as Metrics;
use berth_ports::{
    Clock, ConcurrentStep, EnsureImage, EventRecord, EventSink, ImageError, ImageProvider, ImageUser, PullPolicy,
    PullSecret, ResolvedImage,
};
use berth_proto::cri;
use berth_sys::single_flight::Role;
use berth_types::PodUid;

/// How long a failed pull is shown as `ErrImagePull` before it is shown as `ImagePullBackOff`, as users
/// expect; the back-off itself is not affected.
const ERR_IMAGE_PULL_PERIOD: Duration = Duration::from_secs(3);

/// Image manager: pulls, verification, back-off, and garbage collection of images.
pub struct ImageManager {
    images: Arc<dyn ImageService>,
    events: Arc<dyn EventSink>,
    clock: Arc<dyn Clock>,
    metrics: Arc<Metrics>,
    on_pull: OnPull,
    config: ImagesConfig,
    credentials: CredentialLookup,
    records: Option<Records>,
    puller: Puller,
    backoff: Mutex<PullBackoff>,
    collector: CollectorHandle,
    idle_collector: Mutex<Option<Collector>>,
}

/// A request with derived data.
struct ParsedRequest<'a> {
    request: &'a EnsureImage,
    spec: cri::ImageSpec,
    reference: ImageReference,
    /// Looked up at most once, and only when needed.
    credentials: OnceCell<Result<Arc<[Credential]>, DockerConfigError>>,
    /// Step shown while the request is processed.
    step: ConcurrentStep,
}

/// Labels of the metric of image requests.
struct RequestLabels {
    presence: ImagePresence,
    pull: &'static str,
}

impl ImageManager {
    /// Opens the pull records, and recovers pulls interrupted by a crash (spec 03b §3.3 item 3).
    ///
    /// # Errors
    /// The records cannot be opened, the images cannot be listed, or the plugin configuration is
    /// invalid.
    pub async fn new(deps: ImagesDeps, config: ImagesConfig) -> Result<Arc<Self>, ImagesError> {
        let credentials = CredentialLookup::open(
            config.docker.clone(),
            config.plugins.clone(),
            &deps.registry,
            deps.accounts.clone(),
        )
        .await?;
        let metrics = Arc::new(Metrics::new(&deps.registry));
        let records = match config.verification {
            Some(_) => Some(open_records(&deps, &config, &metrics).await?),
            None => None,
        };
        let puller = Puller::new(
            deps.images.clone(),
            config.parallelism,
            (config.registry_qps, config.registry_burst),
            records.clone(),
            metrics.clone(),
        );
        let collector_deps = CollectorDeps {
            images: deps.images.clone(),
            runtime: deps.runtime,
            events: deps.events.clone(),
            clock: deps.clock.clone(),
            metrics: metrics.clone(),
            records: records.clone(),
            room: deps.room,
        };
        let state_file = config.root.join("image_manager").join("ages.json");
        let (idle, collector) = Collector::new(collector_deps, config.gc, state_file);
        Ok(Arc::new(Self {
            images: deps.images,
            events: deps.events,
            clock: deps.clock,
            metrics,
            on_pull: deps.on_pull,
            credentials,
            config,
            records,
            puller,
            backoff: Mutex::default(),
            collector,
            idle_collector: Mutex::new(Some(idle)),
        }))
    }

    /// Runs image garbage collection and refreshes the image list until stopped. A second call returns
    /// at once.
    pub async fn run(&self, stop: CancellationToken) {
        let idle = self.idle_collector.lock().unwrap_or_else(PoisonError::into_inner).take();
        if let Some(collector) = idle {
            collector.run(stop).await;
        }
    }

    /// All images, largest first; refreshed every 30 s while [`ImageManager::run`] runs.
    pub fn listed(&self) -> watch::Receiver<Arc<[cri::Image]>> {
        self.collector.listed()
    }

    /// Removes every image that is neither in use, pinned, nor younger than the minimum age; returns
    /// the bytes freed. Called by eviction; requires that [`ImageManager::run`] is running.
    ///
    /// # Errors
    /// Images could not be listed or removed.
    pub async fn delete_unused(&self) -> Result<u64, GcError> {
        self.collector.delete_unused().await
    }

    fn record_event(&self, request: &EnsureImage, event: EventRecord) {
        self.events.record(match &request.field_path {
            Some(path) => event.at(path.clone()),
            None => event,
        });
    }

    fn normal(&self, request: &EnsureImage, reason: &'static str, message: String) {
        self.record_event(request, EventRecord::normal(request.pod.id(), reason, message));
    }

    fn warning(&self, request: &EnsureImage, reason: &'static str, message: String) {
        self.record_event(request, EventRecord::warning(request.pod.id(), reason, message));
    }

    async fn resolve(&self, request: &EnsureImage, labels: &mut RequestLabels) -> Result<ResolvedImage, ImageError> {
        let asked = self.parse(request)?;
        let resolved = self.ask(&asked, labels).await;
        let name = format!("image {}", request.image);
        match &resolved {
            // Another request may have pulled it.
            Ok(_) => asked.step.clear_failure(&name),
            Err(_) => asked.step.fail_operation(name),
        }
        resolved
    }

    async fn ask(&self, asked: &ParsedRequest<'_>, labels: &mut RequestLabels) -> Result<ResolvedImage, ImageError> {
        let request = asked.request;
        let image = if policy::checks_presence(request.policy) { self.inspect(asked).await? } else { None };
        labels.presence = match (&image, policy::checks_presence(request.policy)) {
            (Some(_), _) => ImagePresence::Present,
            (None, true) => ImagePresence::Absent,
            (None, false) => ImagePresence::Unknown,
        };
        let verification = match &image {
            Some(image) if policy::verifies(request.policy, labels.presence) => self.verify(asked, image).await?,
            _ => Verification::Off,
        };
        let step = policy::decide(request.policy, labels.presence, verification);
        labels.pull = step.label();
        match (step, image) {
            (PullDecision::Use { event_text: words }, Some(image)) => {
                self.normal(request, "Pulled", format!("Container image {} {words}", quote(&request.image)));
                Ok(self.usable(image.id.clone(), &image))
            }
            (PullDecision::Refuse, _) => {
                let message =
                    format!("Container image {} is not present with pull policy of Never", quote(&request.image));
                self.warning(request, "ErrImageNeverPull", message.clone());
                Err(ImageError { reason: "ErrImageNeverPull", message, retry_at: None })
            }
            _ => self.pull(asked).await,
        }
    }

    fn parse<'a>(&self, request: &'a EnsureImage) -> Result<ParsedRequest<'a>, ImageError> {
        let (image, name) = (&request.image, quote(&request.image));
        let (tagged, reference) = with_default_tag(image).map_err(|error| {
            let message =
                format!("Failed to apply default image tag {name}: couldn't parse image name {name}: {error}");
            self.warning(request, "InspectFailed", message.clone());
            ImageError { reason: "InvalidImageName", message, retry_at: None }
        })?;
        let spec = cri::ImageSpec {
            image: tagged,
            annotations: request.pod.annotations().clone().into_iter().collect(),
            runtime_handler: if self.config.handler_in_calls { request.handler.clone() } else { String::new() },
            ..Default::default()
        };
        let first = if policy::checks_presence(request.policy) { "ImageStatus" } else { "credentials for" };
        let step = request.progress.start_concurrent(format!("{first} {image}"));
        Ok(ParsedRequest { request, spec, reference, credentials: OnceCell::new(), step })
    }

    async fn inspect(&self, asked: &ParsedRequest<'_>) -> Result<Option<cri::Image>, ImageError> {
        self.images.image_status(asked.spec.clone()).await.map_err(|error| {
            let message = format!("Failed to inspect image {}: {error}", quote(&asked.request.image));
            self.warning(asked.request, "InspectFailed", message.clone());
            ImageError { reason: "ImageInspectError", message, retry_at: None }
        })
    }

    fn usable(&self, reference: String, image: &cri::Image) -> ResolvedImage {
        self.collector.used(&image.id, self.clock.now());
        let user = match &image.uid {
            Some(uid) => ImageUser::Uid(uid.value),
            None if image.username.is_empty() => ImageUser::Unset,
            None => ImageUser::Name(image.username.clone()),
        };
        ResolvedImage { reference, user }
    }

    /// Looked up at most once per request, shared by verification and pull.
    async fn find_credentials(&self, asked: &ParsedRequest<'_>) -> Result<Arc<[Credential]>, ImageError> {
        let find = || {
            asked.step.enter(format!("credentials for {}", asked.request.image));
            self.credentials.find(&asked.request.pod, &asked.reference.repository, &asked.request.secrets)
        };
        let found = asked.credentials.get_or_init(find).await.clone();
        found.map_err(|error| ImageError { reason: "ErrImagePull", message: error.to_string(), retry_at: None })
    }

    async fn verify(&self, asked: &ParsedRequest<'_>, image: &cri::Image) -> Result<Verification, ImageError> {
        let (Some(records), Some(policy)) = (&self.records, &self.config.verification) else {
            return Ok(Verification::Off);
        };
        let repository = asked.reference.repository.as_str();
        let stored = records.known(&asked.request.image, &image.id).await;
        let known = PresentImage {
            image_ref: &image.id,
            record: match &stored.record {
                Ok(record) => Ok(record.as_ref()),
                Err(()) => Err(()),
            },
            intent: stored.intent,
            repository: Some(repository),
        };
        let grants = match credential_verification::begin(policy, known) {
            InitialDecision::Done { pull, result } => {
                if let Some(result) = result {
                    self.metrics.checked(result.label());
                }
                return Ok(if pull { Verification::Needed } else { Verification::NotNeeded });
            }
            InitialDecision::Compare(grants) => grants,
        };
        let credentials = match self.find_credentials(asked).await {
            Ok(credentials) => credentials,
            Err(error) => {
                self.metrics.checked(CheckResult::Error.label());
                return Err(error);
            }
        };
        let proofs: Vec<_> = credentials.iter().map(Credential::proof).collect();
        let compared = credential_verification::compare(&grants, &proofs);
        if let Some(proof) = compared.remember {
            records.learn(&image.id, repository, proof).await;
        }
        let (result, verification) = if compared.pull {
            (CheckResult::MustAuthenticate, Verification::Needed)
        } else {
            (CheckResult::RecordFound, Verification::NotNeeded)
        };
        self.metrics.checked(result.label());
        Ok(verification)
    }

    async fn pull(&self, asked: &ParsedRequest<'_>) -> Result<ResolvedImage, ImageError> {
        let request = asked.request;
        let key: Key = (request.pod.uid().clone(), request.image.clone());
        let secrets = fingerprint(&request.secrets);
        self.check_backoff(request, &key, &secrets)?;
        let credentials = self.find_credentials(asked).await?;
        self.backoff.lock().unwrap_or_else(PoisonError::into_inner).began(&key);
        self.normal(request, "Pulling", format!("Pulling image {}", quote(&request.image)));
        (self.on_pull)(request.pod.uid(), PullMoment::Began);
        let _ended = PullEndGuard(self, request.pod.uid());
        asked.step.enter(format!("image {}", request.image));
        let began = Instant::now();
        let pull = PullRequest {
            image: request.image.clone(),
            spec: asked.spec.clone(),
            repository: asked.reference.repository.clone(),
            credentials,
            sandbox: request.sandbox.clone(),
        };
        let (answer, role) = self.puller.pull(pull).await;
        match answer {
            Ok(pulled) => {
                let waited = began.elapsed();
                let image = self.images.image_status(asked.spec.clone()).await;
                let size = image.as_ref().map_or(0, |image| image.as_ref().map_or(0, |image| image.size));
                if role == Role::First {
                    self.metrics.pulled(waited, size);
                }
                let message = format!(
                    "Successfully pulled image {} in {} ({} including waiting). Image size: {size} bytes.",
                    quote(&request.image),
                    millis(pulled.took.min(waited)),
                    millis(waited)
                );
                self.normal(request, "Pulled", message);
                self.inspected(request, pulled.image_ref, image)
            }
            Err(failure) => Err(self.pull_failed(request, key, secrets, failure)),
        }
    }

    /// The image's user determines the user of the container, so an image that cannot be inspected
    /// after its pull is not used.
    fn inspected(
        &self,
        request: &EnsureImage,
        image_ref: String,
        image: Result<Option<cri::Image>, CriError>,
    ) -> Result<ResolvedImage, ImageError> {
        let problem = match image {
            Ok(Some(image)) => return Ok(self.usable(image_ref, &image)),
            Ok(None) => "image not found after pull".to_owned(),
            Err(error) => error.to_string(),
        };
        let message = format!("Failed to inspect image {}: {problem}", quote(&request.image));
        self.warning(request, "InspectFailed", message.clone());
        Err(ImageError { reason: "ImageInspectError", message, retry_at: None })
    }

    fn check_backoff(&self, request: &EnsureImage, key: &Key, secrets: &[u8; 32]) -> Result<(), ImageError> {
        let now = Instant::now().into_std();
        let active = self.backoff.lock().unwrap_or_else(PoisonError::into_inner).active(key, secrets, now);
        let Some(active) = active else { return Ok(()) };
        let mut message = format!("Back-off pulling image {}", quote(&request.image));
        self.normal(request, "BackOff", message.clone());
        if let Some(previous) = active.previous {
            message = format!("{message}: {}: {}", previous.reason, previous.message);
        }
        Err(ImageError { reason: "ImagePullBackOff", message, retry_at: Some(Instant::from_std(active.until)) })
    }

    fn pull_failed(&self, request: &EnsureImage, key: Key, secrets: [u8; 32], failure: PullFailure) -> ImageError {
        let (image, name) = (&request.image, quote(&request.image));
        let (reason, message) = match failure {
            PullFailure::Intent(error) => {
                let message = format!("Failed to record image pull intent for container image {name}: {error}");
                warn!(image = %image, err = %error, "Failed to record an image pull intent");
                return ImageError { reason: "ErrImagePull", message, retry_at: None };
            }
            PullFailure::Call(error) => {
                self.warning(request, "Failed", format!("Failed to pull image {name}: {error}"));
                policy::pull_failure(image, &error)
            }
        };
        let previous = LastPullFailure { reason, message: message.clone() };
        let now = Instant::now().into_std();
        let retry = self.backoff.lock().unwrap_or_else(PoisonError::into_inner).failed(key, secrets, previous, now);
        ImageError { reason, message, retry_at: Some(Instant::from_std(retry.min(now + ERR_IMAGE_PULL_PERIOD))) }
    }
}

/// Reports the end of a pull when dropped, whatever its result.
struct PullEndGuard<'a>(&'a ImageManager, &'a PodUid);

impl Drop for PullEndGuard<'_> {
    fn drop(&mut self) {
        (self.0.on_pull)(self.1, PullMoment::Ended);
    }
}

async fn open_records(
    deps: &ImagesDeps,
    config: &ImagesConfig,
    metrics: &Arc<Metrics>,
) -> Result<Records, ImagesError> {
    let failed = |source| ImagesError::Records { root: config.root.clone(), source };
    let (root, clock, metrics) = (config.root.clone(), deps.clock.clone(), metrics.clone());
    let max_pods = usize::try_from(config.max_pods).unwrap_or(usize::MAX);
    let parallel = match config.parallelism {
        Parallelism::Limited(limit) => usize::try_from(limit.get()).unwrap_or(usize::MAX),
        _ => 1,
    };
    let opening = tokio::task::spawn_blocking(move || Records::open(&root, max_pods, parallel, clock, &metrics));
    let records = opening.await.map_err(|e| failed(io::Error::other(e)))?.map_err(failed)?;
    let images = deps.images.list_images().await.map_err(ImagesError::List)?;
    records.recover(images).await.map_err(failed)?;
    Ok(records)
}

/// Truncates to milliseconds, in Go's short form.
fn millis(duration: Duration) -> GoDuration {
    GoDuration::from_millis(i64::try_from(duration.as_millis()).unwrap_or(i64::MAX))
}

/// Fingerprint of a pod's secrets, to detect changes since the last attempt.
fn fingerprint(secrets: &[PullSecret]) -> [u8; 32] {
    let mut hasher = Sha256::new();
    for secret in secrets {
        let (namespace, name, uid) = &secret.coordinates;
        for part in [namespace, name, uid, &secret.kind] {
            hasher.update(part.len().to_be_bytes());
            hasher.update(part);
        }
        hasher.update(secret.data.len().to_be_bytes());
        hasher.update(&secret.data);
    }
    hasher.finalize().into()
}

#[async_trait]
impl ImageProvider for ImageManager {
    async fn ensure(&self, request: EnsureImage) -> Result<ResolvedImage, ImageError> {
        let mut labels = RequestLabels { presence: ImagePresence::Unknown, pull: "unknown" };
        let answer = self.resolve(&request, &mut labels).await;
        let policy = match request.policy {
            PullPolicy::Always => "always",
            PullPolicy::IfNotPresent => "ifnotpresent",
            PullPolicy::Never => "never",
        };
        self.metrics.ensured(policy, labels.presence.label(), labels.pull);
        debug!(image = %request.image, present = labels.presence.label(), pull = labels.pull, "Finished ensuring image");
        answer
    }

    fn forget(&self, pod: &PodUid) {
        self.backoff.lock().unwrap_or_else(PoisonError::into_inner).forget(pod);
    }
}
