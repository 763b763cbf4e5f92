//! What all stream endpoints share, and the task a stream runs in.

use std::{
    sync::{Arc, OnceLock},
    time::Duration,
};

use axum::{
    body::Body,
    http::{Request, StatusCode},
    response::Response,
};
use tokio_util::{sync::CancellationToken, task::TaskTracker};

use super::{
    answer::{busy, line},
    backend::{Dialer, Tls},
    caps::{Caps, Permit},
    decide::{self, Proof},
};
use crate::{
    Metered,
    auth::{Identity, Via},
    ports::{
        streams::Streams,
        targets::{Target, Targets},
    },
};
use berth_metrics::StreamingMetrics;

/// Settings of the stream endpoints.
#[derive(Clone, Debug)]
pub struct StreamingConfig {
    /// Gate `ExtendWebSocketsToKubelet`.
    pub terminate_web_sockets: bool,
    /// `streamingConnectionIdleTimeout`; `None` for none.
    pub idle: Option<Duration>,
    /// Streams one caller may hold at once.
    pub most_per_caller: usize,
    /// How long the runtime may take to answer when a stream is met.
    pub answer: Duration,
    /// How long open streams may go on once the agent ends.
    pub grace: Duration,
    /// How often a client whose WebSocket ends here is asked whether it is there.
    pub heartbeat: Duration,
    /// Hosts beyond this machine to which the runtime may send us.
    pub allowed_hosts: Vec<String>,
    /// Callers that pass on other people's requests, by name: the API server. Web pages cannot
    /// speak through them.
    pub proxies: Vec<String>,
}

impl Default for StreamingConfig {
    fn default() -> Self {
        Self {
            terminate_web_sockets: true,
            idle: Some(Duration::from_secs(4 * 3600)),
            most_per_caller: 64,
            answer: Duration::from_secs(30),
            grace: Duration::from_secs(5),
            heartbeat: Duration::from_secs(30),
            allowed_hosts: Vec::new(),
            proxies: ["kube-apiserver-kubelet-client", "kube-apiserver", "system:kube-apiserver", "system:apiserver"]
                .map(str::to_owned)
                .to_vec(),
        }
    }
}

/// What the stream endpoints need; cheap to share.
#[derive(Clone)]
pub struct Streaming(Arc<Inner>);

struct Inner {
    config: StreamingConfig,
    pods: Arc<dyn Streams>,
    dialer: Dialer,
    caps: Arc<Caps>,
    metrics: StreamingMetrics,
    tasks: TaskTracker,
    stop: CancellationToken,
    /// What the URLs begin with that are met here, and what stands behind them.
    here: OnceLock<(&'static str, Arc<dyn Targets>)>,
}

impl Streaming {
    /// Streams have [`StreamingConfig::grace`] to end once `stop` is cancelled; [`Self::closed`] waits until they have.
    pub fn new(
        config: StreamingConfig,
        pods: Arc<dyn Streams>,
        tls: Tls,
        metrics: StreamingMetrics,
        stop: CancellationToken,
    ) -> Self {
        let dialer = Dialer { allowed: config.allowed_hosts.clone().into(), tls, answer: config.answer };
        let caps = Caps::new(config.most_per_caller);
        Self(Arc::new(Inner {
            config,
            pods,
            dialer,
            caps,
            metrics,
            tasks: TaskTracker::new(),
            stop,
            here: OnceLock::new(),
        }))
    }

    /// Tells where the streams of a runtime in this process are: behind URLs that begin so. Once.
    pub fn serve_here(&self, prefix: &'static str, targets: Arc<dyn Targets>) {
        let told = self.0.here.set((prefix, targets));
        debug_assert!(told.is_ok(), "there is one runtime");
    }

    /// What is behind a URL that is met here; or the answer where that is gone. `None` for other URLs.
    pub(crate) fn here(&self, url: &str) -> Option<Result<Target, Box<Response>>> {
        let (prefix, targets) = self.0.here.get()?;
        let path = url.strip_prefix(prefix)?;
        Some(targets.take(path).ok_or_else(|| Box::new(super::serve::listener::unknown())))
    }

    /// Open streams.
    pub fn open(&self) -> usize {
        self.0.tasks.len()
    }

    /// Waits until all streams have ended; no new ones are counted afterwards.
    pub async fn closed(&self) {
        self.0.tasks.close();
        self.0.tasks.wait().await;
    }

    pub(crate) fn config(&self) -> &StreamingConfig {
        &self.0.config
    }

    pub(crate) fn pods(&self) -> &dyn Streams {
        &*self.0.pods
    }

    pub(super) fn dialer(&self) -> &Dialer {
        &self.0.dialer
    }

    pub(super) fn metrics(&self) -> &StreamingMetrics {
        &self.0.metrics
    }

    /// Lets a stream run beside the request it came with.
    pub(super) fn spawn(&self, work: impl Future<Output = ()> + Send + 'static) {
        let (stop, grace) = (self.0.stop.clone(), self.0.config.grace);
        let over = async move {
            stop.cancelled().await;
            tokio::time::sleep(grace).await;
        };
        self.0.tasks.spawn(async move {
            tokio::select! {
                biased;
                () = over => {}
                () = work => {}
            }
        });
    }

    /// The caller's right to one more stream.
    ///
    /// # Errors
    /// The answer for a caller that has too many, and for a web page that uses a browser's certificate.
    #[allow(clippy::result_large_err, reason = "an answer is sent at once")]
    pub(crate) fn admit(&self, request: &Request<Body>) -> Result<Permit, Response> {
        let identity = request.extensions().get::<Identity>();
        let name = identity.map_or("", |identity| identity.name.as_str());
        let by_browser = identity.is_some_and(|identity| identity.via == Via::X509)
            && !self.0.config.proxies.iter().any(|proxy| proxy == name);
        let proof = if by_browser { Proof::Certificate } else { Proof::Other };
        if decide::is_cross_site(request.headers(), proof) {
            return Err(line(StatusCode::FORBIDDEN, "cross-site", "requests of other sites are not allowed"));
        }
        let most = self.0.config.most_per_caller;
        let metered = request.extensions().get::<Metered>().cloned();
        self.0.caps.take(name).map(|permit| permit.counting(metered)).ok_or_else(|| {
            let text = format!("too many open streams: {name:?} may have {most} at once");
            busy(line(StatusCode::TOO_MANY_REQUESTS, "too-many-streams", &text))
        })
    }
}
