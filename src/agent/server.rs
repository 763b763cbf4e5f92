//! The listeners, and what stands behind them.

use std::{net::IpAddr, sync::Arc};

use bytes::Bytes;
use tokio::time::timeout;
use tracing::info;

use super::{
    build::{Base, BuildError, SETTLE, wrong},
    pages::{AgentHealth, AgentPages},
    server_logs::{PodLogs, RuntimePodList},
};
use crate::{
    config::{Loaded, configz},
    cri::RuntimeService,
    engine::{EngineHandle, ports::PodObserver},
    logs::LogReader,
    metrics::{self, ServerMetrics},
    server::{self, Endpoints, Serves, Site, ports::Health, routing::Switches},
    status::StatusManager,
};

/// The parts of the agent that the server shows.
pub(super) struct Parts {
    pub(super) engine: EngineHandle,
    pub(super) status: Arc<StatusManager>,
    pub(super) observer: Arc<dyn PodObserver>,
    pub(super) cri: Arc<dyn RuntimeService>,
    /// The runtime's name.
    pub(super) runtime: Arc<str>,
}

/// The read-only port where it is asked for (a failure is fatal), and the healthz port (never fatal); returns
/// the checks behind the former.
pub(super) async fn start(loaded: &Loaded, base: &Base, parts: Parts) -> Result<Arc<dyn Health>, BuildError> {
    let config = &loaded.config;
    let endpoints = endpoints(loaded, base, &parts);
    let health = endpoints.health.clone();
    let metrics = ServerMetrics::new(&base.registry);
    let port = |number: i32| u16::try_from(number).ok().filter(|port| *port != 0);
    if let Some(port) = port(config.read_only_port) {
        let address: IpAddr = config.address.parse().map_err(wrong)?;
        let site = Site { switches: Switches::READ_ONLY, guard: None, endpoints, metrics };
        let listening = server::bind(address, port)
            .await
            .map_err(|error| BuildError(format!("failed to listen on the read-only port {address}:{port}: {error}")))?;
        info!(address = %address, port, "Starting to listen read-only");
        let (stop, site) = (base.stop.child_token(), Serves::Site(Arc::new(site)));
        base.tasks.spawn(async move {
            tokio::select! {
                () = stop.cancelled() => return,
                () = first_statuses(&parts.engine, &parts.status) => {}
            }
            server::serve(listening, site, None, stop).await;
        });
    }
    // Last: who is told that all is well may ask the other port.
    if let Some(port) = port(config.healthz_port) {
        let address: IpAddr = config.healthz_bind_address.parse().map_err(wrong)?;
        let router = Serves::Router(server::healthz_router());
        base.tasks.spawn(server::serve_persistently(address, port, router, base.stop.child_token()));
    }
    Ok(health)
}

fn endpoints(loaded: &Loaded, base: &Base, parts: &Parts) -> Endpoints {
    let config = &loaded.config;
    let started = metrics::start_time_seconds().unwrap_or_default() as u64;
    let (pods, status) = (parts.engine.pods.clone(), parts.status.clone());
    let pages = Arc::new(AgentPages::new(pods.clone(), status.clone(), base.registry.clone(), started));
    base.tasks.spawn(pages.clone().forget_gone(base.stop.child_token()));
    Endpoints {
        health: Arc::new(AgentHealth {
            heartbeat: parts.engine.heartbeat.clone(),
            sync_frequency: config.sync_frequency.std(),
            log: base.log.clone(),
        }),
        pages,
        running: Arc::new(RuntimePodList { observer: parts.observer.clone() }),
        logs: Arc::new(PodLogs {
            pods,
            status,
            reader: LogReader::new(parts.cri.clone()),
            clock: base.clock.clone(),
            runtime: parts.runtime.clone(),
        }),
        split_streams: loaded.gates.enabled("PodLogsQuerySplitStreams"),
        configz: Bytes::from(configz::body(config)),
    }
}

/// Waits until the first status of every pod is there: nobody shall see pods that run as pending
/// only because the agent has just started.
async fn first_statuses(engine: &EngineHandle, status: &StatusManager) {
    let all = async {
        engine.fates.sources_told().await;
        let (pods, mut changes) = (engine.pods.borrow().clone(), status.changes());
        while pods.iter().any(|pod| status.status(pod.uid()).is_none()) && changes.changed().await.is_ok() {}
    };
    let _ = timeout(SETTLE, all).await; // what is slower than that is shown as it is
}
