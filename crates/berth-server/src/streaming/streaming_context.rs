//! Shared state of the streaming endpoints: settings, per-caller limits, and stream tasks.

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
    error_response::{busy, line},
    runtime_dialer::{Dialer, Tls},
    stream_limit::{CallerLimit, Permit},
    upgrade_protocol::{self, CredentialKind},
};
use crate::{
    RequestMetricsGuard,
    auth::{AuthenticatedBy, UserInfo},
    ports::{
        stream_targets::{StreamTarget, StreamTargets},
        streams::StreamProvider,
    },
};
use berth_metrics::StreamingMetrics;

/// Settings of the streaming endpoints.
#[derive(Clone, Debug)]
pub struct StreamingConfig {
    /// Feature gate `ExtendWebSocketsToKubelet`.
    pub terminate_web_sockets: bool,
    /// `streamingConnectionIdleTimeout`; `None` disables it.
    pub idle: Option<Duration>,
    /// Maximum number of open streams per caller.
    pub most_per_caller: usize,
    /// Timeout for the runtime's response to a stream request.
    pub answer: Duration,
    /// Grace period of open streams when the agent stops.
    pub grace: Duration,
    /// Ping interval of WebSockets that are terminated here.
    pub heartbeat: Duration,
    /// Hosts beyond this machine that the runtime's streaming URLs may name.
    pub allowed_hosts: Vec<String>,
    /// User names of callers that proxy requests of others, i.e. API servers. Web pages cannot send requests through
    /// them.
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

/// Shared state of the streaming endpoints; cheap to clone.
#[derive(Clone)]
pub struct StreamingContext(Arc<StreamingInner>);

struct StreamingInner {
    config: StreamingConfig,
    pods: Arc<dyn StreamProvider>,
    dialer: Dialer,
    caps: Arc<CallerLimit>,
    metrics: StreamingMetrics,
    tasks: TaskTracker,
    stop: CancellationToken,
    /// URL prefix of the in-process runtime, and its targets.
    here: OnceLock<(&'static str, Arc<dyn StreamTargets>)>,
}

impl StreamingContext {
    /// Creates the shared state. When `stop` is canceled, open streams get [`StreamingConfig::grace`] to end;
    /// [`Self::closed`] waits for them.
    pub fn new(
        config: StreamingConfig,
        pods: Arc<dyn StreamProvider>,
        tls: Tls,
        metrics: StreamingMetrics,
        stop: CancellationToken,
    ) -> Self {
        let dialer = Dialer { allowed: config.allowed_hosts.clone().into(), tls, answer: config.answer };
        let caps = CallerLimit::new(config.most_per_caller);
        Self(Arc::new(StreamingInner {
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

    /// Registers the targets of an in-process runtime, whose URLs begin with `prefix`. Call it only once.
    pub fn serve_here(&self, prefix: &'static str, targets: Arc<dyn StreamTargets>) {
        let result = self.0.here.set((prefix, targets));
        debug_assert!(result.is_ok(), "there is one runtime");
    }

    /// Takes the target of an in-process URL, or the response where it is gone. `None` for other URLs.
    pub(crate) fn here(&self, url: &str) -> Option<Result<StreamTarget, Box<Response>>> {
        let (prefix, targets) = self.0.here.get()?;
        let path = url.strip_prefix(prefix)?;
        Some(targets.take(path).ok_or_else(|| Box::new(super::server::listener::unknown())))
    }

    /// Number of open streams.
    pub fn open(&self) -> usize {
        self.0.tasks.len()
    }

    /// Waits until all streams have ended; closes the tracker for new ones.
    pub async fn closed(&self) {
        self.0.tasks.close();
        self.0.tasks.wait().await;
    }

    pub(crate) fn config(&self) -> &StreamingConfig {
        &self.0.config
    }

    pub(crate) fn pods(&self) -> &dyn StreamProvider {
        &*self.0.pods
    }

    pub(super) fn dialer(&self) -> &Dialer {
        &self.0.dialer
    }

    pub(super) fn metrics(&self) -> &StreamingMetrics {
        &self.0.metrics
    }

    /// Runs a stream in a task of its own, beyond the request that opened it.
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

    /// Takes a permit for one more stream of the caller.
    ///
    /// # Errors
    /// The response where the caller has too many streams, or a web page uses a browser's certificate.
    #[allow(clippy::result_large_err, reason = "an answer is sent at once")]
    pub(crate) fn admit(&self, request: &Request<Body>) -> Result<Permit, Response> {
        let identity = request.extensions().get::<UserInfo>();
        let name = identity.map_or("", |identity| identity.name.as_str());
        let by_browser = identity.is_some_and(|identity| identity.via == AuthenticatedBy::X509)
            && !self.0.config.proxies.iter().any(|proxy| proxy == name);
        let proof = if by_browser { CredentialKind::Certificate } else { CredentialKind::Other };
        if upgrade_protocol::is_cross_site(request.headers(), proof) {
            return Err(line(StatusCode::FORBIDDEN, "cross-site", "cross-site requests are not allowed"));
        }
        let most = self.0.config.most_per_caller;
        let metered = request.extensions().get::<RequestMetricsGuard>().cloned();
        self.0.caps.take(name).map(|permit| permit.counting(metered)).ok_or_else(|| {
            let text = format!("too many open streams: limit of {name:?} is {most}");
            busy(line(StatusCode::TOO_MANY_REQUESTS, "too-many-streams", &text))
        })
    }
}
