//! The agent's own way to the server.

use std::{path::Path, sync::Arc};

use berth_api::{Transport, TransportConfig, TransportDeps};
use berth_metrics::{ApiClientMetrics, Registry, RestClientMetrics};
use berth_ports::SystemClock;
use tokio_util::sync::CancellationToken;

/// To the server of that kubeconfig, until the test ends.
pub async fn connect(kubeconfig: &Path) -> Arc<Transport> {
    let config = TransportConfig::from_kubeconfig(kubeconfig).await.expect("a kubeconfig");
    let registry = Registry::new();
    let deps = TransportDeps {
        clock: Arc::new(SystemClock),
        requests: RestClientMetrics::new(&registry),
        connections: ApiClientMetrics::new(&registry),
        stop: CancellationToken::new(),
    };
    let (transport, task) = Transport::open(config, deps).await.expect("a transport");
    tokio::spawn(task);
    transport
}
