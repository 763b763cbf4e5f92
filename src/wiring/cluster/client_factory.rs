//! Factory of API server clients: user agent, rate limits, and metrics.

use std::{path::Path, sync::Arc};

use tokio_util::{sync::CancellationToken, task::TaskTracker};

use super::super::composition_root::{Base, BuildError, wrong};
use berth_api::{
    Rate, RateLimitScope, Rates, Transport, TransportConfig, TransportDeps, api::ApiClient,
    certificates::scoped_client, user_agent,
};
use berth_config::LoadedConfig;
use berth_metrics::{ApiClientMetrics, Registry, RestClientMetrics};
use berth_ports::Clock;

/// Rate limit of certificate requests with a bootstrap token, which many nodes may share: requests per second and
/// burst (spec 10 §2.1).
const BOOTSTRAP_RATE: (i32, i32) = (5, 10);

/// Creates clients.
#[derive(Clone)]
pub(super) struct ClientFactory {
    agent: String,
    rates: Rates,
    requests: RestClientMetrics,
    tasks: TaskTracker,
    stop: CancellationToken,
    clock: Arc<dyn Clock>,
}

impl ClientFactory {
    /// Creates the factory with the configured rate limits.
    pub(super) fn new(loaded: &LoadedConfig, base: &Base) -> Self {
        let config = &loaded.config;
        let program = std::env::args().next().unwrap_or_default();
        Self {
            agent: user_agent(&program, &loaded.version, ""),
            rates: Rates {
                main: Rate::of(config.kube_api_qps, config.kube_api_burst),
                sharing: RateLimitScope::of(config.kube_api_qps),
                events: Rate::of_events(config.event_record_qps, config.event_burst),
                certificates: None,
            },
            requests: RestClientMetrics::new(&base.registry),
            tasks: base.tasks.tracker().clone(),
            stop: base.stop.clone(),
            clock: base.clock.clone(),
        }
    }

    /// Opens the node's own client.
    ///
    /// # Errors
    /// `config` is invalid.
    pub(super) async fn node_client(
        &self,
        config: TransportConfig,
        connections: ApiClientMetrics,
    ) -> Result<Arc<Transport>, BuildError> {
        self.open(config.with_rates(self.rates), connections, self.stop.child_token()).await
    }

    /// Opens a client for certificate requests from a kubeconfig; its connections end when it is dropped.
    ///
    /// # Errors
    /// The kubeconfig is invalid.
    pub(super) async fn bootstrap_client(&self, kubeconfig: &Path) -> Result<Arc<dyn ApiClient>, BuildError> {
        let rate = Rate::of(BOOTSTRAP_RATE.0, BOOTSTRAP_RATE.1);
        let config = TransportConfig::from_kubeconfig(kubeconfig).await.map_err(wrong)?;
        let config = config.with_rates(Rates { certificates: Some(rate), ..Rates::default() });
        // Not exported: its connections are few and short-lived, and the registered metrics are those of the node's own
        // client.
        let connections = ApiClientMetrics::new(&Registry::new());
        let stop = self.stop.child_token();
        Ok(scoped_client(self.open(config, connections, stop.clone()).await?, stop))
    }

    async fn open(
        &self,
        config: TransportConfig,
        connections: ApiClientMetrics,
        stop: CancellationToken,
    ) -> Result<Arc<Transport>, BuildError> {
        let deps = TransportDeps { clock: self.clock.clone(), requests: self.requests.clone(), connections, stop };
        let (api, task) = Transport::open(config.with_user_agent(self.agent.clone()), deps).await.map_err(wrong)?;
        self.tasks.spawn(task);
        Ok(api)
    }
}
