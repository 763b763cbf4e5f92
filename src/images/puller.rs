//! Image puller: bounded parallelism, single-flight, rate limit (spec 03b §1.1-1.2, §15 item 3).
//!
//! Pulls of one image with the same credentials are one call that all waiters share; when the last
//! waiter is gone the call is canceled. There is no timeout: a large image on a slow connection takes
//! as long as needed, and only its own pods wait.

use std::{
    num::NonZeroU32,
    sync::{Arc, Mutex, PoisonError},
    time::Duration,
};

use tokio::{sync::Semaphore, time::Instant};
use tracing::{debug, info};

use super::{
    credentials::Credential,
    policy::aggregate,
    record_documents::Proof,
    records::{Intent, Pull, Records},
};
use berth_cri::ImageService;
use berth_metrics::Images;
use berth_proto::cri;
use berth_sys::{
    single_flight::{Role, SingleFlight},
    token_bucket::TokenBucket,
};

/// Maximum number of concurrent pulls.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Parallelism {
    /// One pull at a time (`serializeImagePulls`).
    Serial,
    /// A fixed limit (`maxParallelImagePulls`).
    Limited(NonZeroU32),
    /// No limit.
    Unlimited,
}

impl Parallelism {
    fn permits(self) -> usize {
        match self {
            Self::Serial => 1,
            Self::Limited(limit) => usize::try_from(limit.get()).unwrap_or(Semaphore::MAX_PERMITS),
            Self::Unlimited => Semaphore::MAX_PERMITS,
        }
        .min(Semaphore::MAX_PERMITS)
    }
}

/// An image to pull.
#[derive(Clone, Debug)]
pub struct PullRequest {
    /// The image as the pod writes it.
    pub image: String,
    /// Image spec of the CRI call.
    pub spec: cri::ImageSpec,
    /// Normalized name without tag and digest.
    pub repository: String,
    /// Credentials to try in order; anonymous if empty.
    pub credentials: Arc<[Credential]>,
    /// Sandbox configuration passed with the CRI call.
    pub sandbox: Option<Arc<cri::PodSandboxConfig>>,
}

/// Result of a pull: the image reference, and the duration.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct PulledImage {
    /// The runtime's image reference.
    pub image_ref: String,
    /// Duration of the pull, without the time in the queue.
    pub took: Duration,
}

/// Why a pull failed, with the error text.
#[derive(Clone, PartialEq, Eq, Debug)]
pub enum PullFailure {
    /// The pull intent could not be written: no pull was attempted.
    Intent(String),
    /// The call failed, or the rate limit was exceeded.
    Call(String),
}

type Answer = Result<PulledImage, PullFailure>;
/// Image, runtime handler, and credentials.
type PullKey = (String, String, Vec<(String, String)>);

/// Pulls images.
pub struct Puller {
    service: Arc<dyn ImageService>,
    turns: Arc<Semaphore>,
    /// Rate limit of pulls; `None` if there is no limit.
    limit: Arc<Mutex<RateLimit>>,
    pulls: SingleFlight<PullKey, Answer>,
    metrics: Arc<Images>,
    /// Pull records; `None` if verification is off.
    records: Option<Records>,
}

impl Puller {
    /// Creates a puller for `service`. `qps` 0 means no limit.
    pub fn new(
        service: Arc<dyn ImageService>,
        parallelism: Parallelism,
        (qps, burst): (u32, u32),
        records: Option<Records>,
        metrics: Arc<Images>,
    ) -> Self {
        Self {
            service,
            turns: Arc::new(Semaphore::new(parallelism.permits())),
            limit: Arc::new(Mutex::new(RateLimit::new(qps, burst, Instant::now().into_std()))),
            pulls: SingleFlight::default(),
            metrics,
            records,
        }
    }

    /// Pulls, or joins a running pull of the same image with the same credentials. Cancel by dropping.
    pub async fn pull(&self, request: PullRequest) -> (Answer, Role) {
        let logins = |c: &Credential| (c.login.username.clone(), super::credentials::hash::credential_hash(&c.login));
        let key = (
            request.spec.image.clone(),
            request.spec.runtime_handler.clone(),
            request.credentials.iter().map(logins).collect(),
        );
        let image = request.image.clone();
        let (pull, role) = self.pulls.join_or_start(key, || berth_otel::in_current_span(self.start(request)));
        if role == Role::Joined {
            debug!(image, "Joined image pull in progress");
        }
        (pull.await.unwrap_or_else(|panicked| Err(PullFailure::Call(panicked.to_string()))), role)
    }

    fn start(&self, request: PullRequest) -> impl Future<Output = Answer> + Send + 'static {
        let (service, records) = (self.service.clone(), self.records.clone());
        let (turns, limit, metrics) = (self.turns.clone(), self.limit.clone(), self.metrics.clone());
        async move {
            let waiting = GaugeGuard::new(&metrics.pull_queue_depth);
            if turns.available_permits() == 0 {
                info!(image = %request.image, ahead = waiting.0.get() - 1, "Image pull is queued");
            }
            let turn = turns.acquire().await;
            drop(waiting);
            let _inflight = GaugeGuard::new(&metrics.pulls_inflight);
            let answer = attempt(&*service, records.as_ref(), &limit, request).await;
            drop(turn);
            answer
        }
    }
}

/// Increments a gauge while it lives.
struct GaugeGuard(prometheus::IntGauge);

impl GaugeGuard {
    fn new(gauge: &prometheus::IntGauge) -> Self {
        gauge.inc();
        Self(gauge.clone())
    }
}

impl Drop for GaugeGuard {
    fn drop(&mut self) {
        self.0.dec();
    }
}

async fn attempt(
    service: &dyn ImageService,
    records: Option<&Records>,
    limit: &Mutex<RateLimit>,
    request: PullRequest,
) -> Answer {
    let began = Instant::now();
    let intent = match records {
        Some(records) => Some(begin(service, records, &request).await?),
        None => None,
    };
    let allowed = limit.lock().unwrap_or_else(PoisonError::into_inner).try_take(began.into_std());
    let called = if allowed { call(service, &request).await } else { Err("pull QPS exceeded".to_owned()) };
    let took = began.elapsed();
    match (called, intent) {
        (Ok((image_ref, proof)), Some(intent)) => {
            let PullRequest { image, repository, .. } = request;
            intent.succeeded(Pull { image, image_ref: image_ref.clone(), repository, proof }).await;
            Ok(PulledImage { image_ref, took })
        }
        (Ok((image_ref, _)), None) => Ok(PulledImage { image_ref, took }),
        (Err(error), intent) => {
            if let Some(intent) = intent {
                intent.failed().await;
            }
            Err(PullFailure::Call(error))
        }
    }
}

/// Writes the pull intent. If the runtime's image status fails, the image counts as not present.
async fn begin(service: &dyn ImageService, records: &Records, request: &PullRequest) -> Result<Intent, PullFailure> {
    let present = service.image_status(request.spec.clone()).await.ok().flatten();
    let present = present.as_ref().map(|image| image.id.as_str());
    records.begin(&request.image, present).await.map_err(|error| PullFailure::Intent(error.to_string()))
}

/// Pulls anonymously without credentials; otherwise with each in order, and never anonymously.
async fn call(service: &dyn ImageService, request: &PullRequest) -> Result<(String, Proof), String> {
    let sandbox = || request.sandbox.as_deref().cloned();
    if request.credentials.is_empty() {
        let pulled = service.pull_image(request.spec.clone(), None, sandbox()).await;
        return pulled.map(|image_ref| (image_ref, Proof::Node)).map_err(|e| e.to_string());
    }
    let mut failures = Vec::new();
    for credential in request.credentials.iter() {
        match service.pull_image(request.spec.clone(), Some(credential.auth()), sandbox()).await {
            Ok(image_ref) => return Ok((image_ref, credential.proof())),
            Err(error) => failures.push(error.to_string()),
        }
    }
    Err(aggregate(&failures))
}

/// Rate limit of pulls (`registryPullQPS`, `registryBurst`); `None` if the rate is 0.
struct RateLimit(Option<TokenBucket>);

impl RateLimit {
    fn new(qps: u32, burst: u32, now: std::time::Instant) -> Self {
        Self((qps > 0).then(|| TokenBucket::per_second(qps, burst, now)))
    }

    fn try_take(&mut self, now: std::time::Instant) -> bool {
        self.0.as_mut().is_none_or(|bucket| bucket.try_take(now))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_rate_of_zero_is_no_limit() {
        let start = std::time::Instant::now();
        let mut unlimited = RateLimit::new(0, 0, start);
        assert!((0..1000).all(|_| unlimited.try_take(start)));
        let mut limited = RateLimit::new(5, 10, start);
        assert_eq!((0..12).filter(|_| limited.try_take(start)).count(), 10);
    }
}
