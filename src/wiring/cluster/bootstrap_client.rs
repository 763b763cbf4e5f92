//! API client that waits for the first client certificate (TLS bootstrap).
//!
//! Used where no request is possible before the certificate (`rotateCertificates` off, spec 01 §11.2).
//!
//! kubelet starts nothing before the certificate is issued. Here only the client waits: static pods run, and requests
//! wait as in an outage. Nor does the agent exit if the certificate is not signed: it retries.

use std::{sync::Arc, time::Duration};

use async_trait::async_trait;
use bytes::Bytes;
use tokio::{
    sync::watch,
    task::spawn_blocking,
    time::{sleep, timeout},
};
use tracing::error;

use super::{
    super::composition_root::{Base, BuildError, wrong},
    client::ClientFiles,
    client_factory::ClientFactory,
};
use berth_api::{
    TransportConfig,
    api::{ApiClient, ApiError, Call, Resource, WatchStream},
    certificates::{Bootstrap, Kubeconfig, bootstrap},
};
use berth_metrics::ApiClientMetrics;
use berth_ports::Clock;

/// Delay between attempts; systemd restarts kubelet after 10 s.
const PAUSE: Duration = Duration::from_secs(10);

/// Dependencies of the bootstrap.
pub(super) struct FirstCertificate {
    /// Opens clients.
    pub(super) opener: ClientFactory,
    /// Files of the client.
    pub(super) files: ClientFiles,
    /// Metrics of the node's client.
    pub(super) connections: ApiClientMetrics,
    /// Name of the node.
    pub(super) node: String,
}

impl FirstCertificate {
    /// Starts the bootstrap; returns the client that waits for its certificate.
    ///
    /// # Errors
    /// The bootstrap kubeconfig is invalid.
    pub(super) async fn start(self, base: &Base) -> Result<Arc<dyn ApiClient>, BuildError> {
        // Invalid files are reported immediately.
        self.setup(base.clock.clone()).await?;
        let (come, coming) = watch::channel(None);
        let (clock, stop) = (base.clock.clone(), base.stop.child_token());
        base.tasks.spawn(async move {
            stop.run_until_cancelled(self.get(clock, come)).await;
        });
        Ok(Arc::new(BootstrapGatedClient(coming)))
    }

    /// Retries until a certificate is issued.
    async fn get(self, clock: Arc<dyn Clock>, come: watch::Sender<Option<Arc<dyn ApiClient>>>) {
        loop {
            match self.attempt(clock.clone()).await {
                Ok(api) => {
                    come.send_replace(Some(api));
                    return;
                }
                Err(cause) => error!(err = %cause, "Failed to obtain the initial client certificate, retrying"),
            }
            sleep(PAUSE).await;
        }
    }

    async fn attempt(&self, clock: Arc<dyn Clock>) -> Result<Arc<dyn ApiClient>, BuildError> {
        bootstrap(self.setup(clock).await?).await.map_err(wrong)?;
        let config = TransportConfig::from_kubeconfig(&self.files.kubeconfig).await.map_err(wrong)?;
        Ok(self.opener.node_client(config, self.connections.clone()).await?)
    }

    /// Reads the files for each attempt: they may have been corrected meanwhile.
    async fn setup(&self, clock: Arc<dyn Clock>) -> Result<Bootstrap, BuildError> {
        let path = self.files.bootstrap.clone();
        let read = spawn_blocking(move || Kubeconfig::read(&path)).await.map_err(wrong)?;
        Ok(Bootstrap {
            directory: self.files.directory.clone(),
            node: self.node.clone(),
            cluster: read.map_err(wrong)?.cluster,
            kubeconfig: self.files.kubeconfig.clone(),
            api: self.opener.bootstrap_client(&self.files.bootstrap).await?,
            clock,
        })
    }
}

/// A client that waits for the opened one.
struct BootstrapGatedClient(watch::Receiver<Option<Arc<dyn ApiClient>>>);

/// Time that a call waits for the client: its own deadline. Reviews do not wait: a client of the server waits
/// meanwhile, and an immediate 401, as in an outage, is more useful than a late one (spec 04 §6.1).
fn client_timeout(call: &Call) -> Duration {
    let is_review = [Resource::TOKEN_REVIEWS, Resource::ACCESS_REVIEWS].contains(&call.resource);
    if is_review { Duration::ZERO } else { call.deadline }
}

impl BootstrapGatedClient {
    /// Waits for the client.
    async fn api(&self, call: &Call) -> Result<Arc<dyn ApiClient>, ApiError> {
        let mut coming = self.0.clone();
        let come = timeout(client_timeout(call), coming.wait_for(Option::is_some)).await;
        let api = come.ok().and_then(Result::ok).and_then(|api| api.clone());
        api.ok_or_else(|| ApiError::Unreachable("no client certificate issued yet".to_owned()))
    }
}

#[async_trait]
impl ApiClient for BootstrapGatedClient {
    async fn call(&self, call: Call) -> Result<Bytes, ApiError> {
        self.api(&call).await?.call(call).await
    }

    async fn watch(&self, call: Call) -> Result<Box<dyn WatchStream>, ApiError> {
        self.api(&call).await?.watch(call).await
    }
}

#[cfg(test)]
mod tests {
    use tokio::time::Instant;

    use super::*;
    use berth_api::{Reviews, testing::FakeApi};
    use berth_metrics::{Registry, ReviewMetrics};

    #[tokio::test(start_paused = true)]
    async fn who_asks_waits_for_the_client() {
        let (come, coming) = watch::channel(None);
        let client = Arc::new(BootstrapGatedClient(coming));
        let call = || Call::get(Resource::PODS, "ns", "p").within(Duration::from_secs(5));
        let began = Instant::now();
        let error = client.call(call()).await.expect_err("it has not come");
        assert_eq!(error, ApiError::Unreachable("no client certificate issued yet".to_owned()));
        assert_eq!(began.elapsed(), Duration::from_secs(5), "not longer than the call may take");
        let waiting = tokio::spawn({
            let client = client.clone();
            async move { client.call(call()).await }
        });
        tokio::task::yield_now().await;
        assert!(!waiting.is_finished());
        come.send_replace(Some(FakeApi::new(|_| Ok(serde_json::json!({}))) as Arc<dyn ApiClient>));
        waiting.await.expect("no panic").expect("answered");
        client.call(call()).await.expect("answered");
        drop(come);
        client.call(call()).await.expect("it stays");
    }

    #[tokio::test(start_paused = true)]
    async fn reviews_fail_at_once_until_the_client_exists() {
        let (come, coming) = watch::channel(None);
        let reviews = Reviews::new(Arc::new(BootstrapGatedClient(coming)), ReviewMetrics::new(&Registry::new()));
        let began = Instant::now();
        for result in [
            reviews.token("t").await.map(drop),
            reviews.access(k8s_openapi::api::authorization::v1::SubjectAccessReviewSpec::default()).await.map(drop),
        ] {
            let error = result.expect_err("no request was sent").to_string();
            assert!(error.ends_with("no client certificate issued yet"), "{error}");
        }
        assert_eq!(began.elapsed(), Duration::ZERO);
        let answer = serde_json::json!({"status": {"authenticated": true}});
        come.send_replace(Some(FakeApi::new(move |_| Ok(answer.clone())) as Arc<dyn ApiClient>));
        assert_eq!(reviews.token("t").await.expect("an answer").authenticated, Some(true));
    }

    #[tokio::test(start_paused = true)]
    async fn calls_fail_at_once_if_no_client_can_come() {
        let (come, coming) = watch::channel(None);
        drop(come);
        let began = Instant::now();
        let client = BootstrapGatedClient(coming);
        assert!(client.call(Call::get(Resource::PODS, "ns", "p")).await.is_err());
        assert_eq!(began.elapsed(), Duration::ZERO);
    }
}
