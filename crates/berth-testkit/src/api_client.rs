//! API client of the agent (`berth_api::Transport`) for tests.

use std::{path::Path, sync::Arc};

use berth_api::{Transport, TransportConfig, TransportDeps};
use berth_metrics::{ApiClientMetrics, Registry, RestClientMetrics};
use berth_ports::SystemClock;
use tokio_util::sync::CancellationToken;

/// Opens a transport to the server of a kubeconfig; it runs until the test ends.
pub async fn connect(kubeconfig: &Path) -> Arc<Transport> {
    let config = TransportConfig::from_kubeconfig(kubeconfig).await.expect("failed to load kubeconfig");
    let registry = Registry::new();
    let deps = TransportDeps {
        clock: Arc::new(SystemClock),
        requests: RestClientMetrics::new(&registry),
        connections: ApiClientMetrics::new(&registry),
        stop: CancellationToken::new(),
    };
    let (transport, task) = Transport::open(config, deps).await.expect("failed to open the API client");
    tokio::spawn(task);
    transport
}
