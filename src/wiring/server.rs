//! HTTP(S) listeners of the server, and their endpoints.

use std::{
    net::{IpAddr, Ipv4Addr, Ipv6Addr},
    path::Path,
    sync::Arc,
};

use bytes::Bytes;
use tokio::time::timeout;
use tracing::{info, warn};

use super::{
    allocators::Allocators,
    composition_root::{Base, BuildError, SETTLE, wrong},
    server_auth::ServerAuth,
    server_grpc,
};
use crate::{
    diagnostics::{self, DiagnosticsProvider},
    engine::EngineHandle,
    logs::LogReader,
    probes,
    serving::{
        RuntimeStreams,
        checkpoint::{CheckpointDeps, RuntimeCheckpoints},
        debug_endpoints::{self, DebugEndpointDeps},
        devices::NodeDevices,
        logs::{PodLogs, RuntimePodList},
        pages::{AgentHealth, AgentPages, HealthDeps},
        pods::EnginePods,
        runtime_tls,
        topology::{NodeTopology, configured_policies},
    },
};
use berth_config::{LoadedConfig, configz, fields::KubeletConfiguration};
use berth_cri::RuntimeService;
use berth_metrics::{ServerMetrics, SliMetrics, StreamingMetrics};
use berth_ports::{Clock, PodObserver};
use berth_runtime::streams::IN_PROCESS;
use berth_server::{
    AuthFilter, AuthLayer, CallerLimit, Endpoints, FOLLOWS, ListenerContext, ListenerService, TlsSource,
    ports::{Health, Statistics, stream_targets::StreamTargets},
    routing::EnabledEndpoints,
    streaming::{StreamingConfig, StreamingContext},
};
use berth_status::StatusManager;

/// Parts of the agent that the server exposes.
pub(super) struct Parts {
    pub(super) engine: EngineHandle,
    pub(super) status: Arc<StatusManager>,
    pub(super) observer: Arc<dyn PodObserver>,
    pub(super) cri: Arc<dyn RuntimeService>,
    pub(super) statistics: Arc<dyn Statistics>,
    /// Name of the runtime.
    pub(super) runtime: Arc<str>,
    /// Streaming targets of the embedded runtime.
    pub(super) targets: Option<Arc<dyn StreamTargets>>,
    /// Probe manager, for histories.
    pub(super) probes: Arc<probes::ProbeManagerHandle>,
    /// Devices and resource claims.
    pub(super) allocators: Allocators,
}

impl Parts {
    fn pods(&self) -> EnginePods {
        let (engine, status) = (&self.engine, self.status.clone());
        EnginePods { pods: engine.pods.clone(), status }
    }

    fn diagnostics(&self, clock: Arc<dyn Clock>) -> DiagnosticsProvider {
        DiagnosticsProvider {
            pods: self.engine.pods.clone(),
            status: self.status.clone(),
            probes: self.probes.clone(),
            placements: self.allocators.placement.clone(),
            clock,
        }
    }
}

/// Starts the main port if `auth` is given, the read-only port if configured (errors of both are fatal), and the
/// healthz port (never fatal if it cannot listen); returns the health checks.
pub(super) async fn start(
    loaded: &LoadedConfig,
    base: &Base,
    parts: Parts,
    auth: Option<ServerAuth>,
) -> Result<Arc<dyn Health>, BuildError> {
    let config = &loaded.config;
    let endpoints = Arc::new(endpoints(loaded, base, &parts, configz_body(config, auth.as_ref())));
    server_grpc::open(
        loaded,
        base,
        parts.pods(),
        parts.allocators.devices.manager.clone(),
        parts.allocators.claims.manager.clone(),
        parts.allocators.placement.clone(),
    );
    let health = endpoints.health.clone();
    let metrics = ServerMetrics::new(&base.registry);
    let parts = Arc::new(parts);
    if let Some(auth) = auth {
        start_main(loaded, base, &parts, auth, (endpoints.clone(), metrics.clone())).await?;
    }
    let port = |number: i32| u16::try_from(number).ok().filter(|port| *port != 0);
    if let Some(port) = port(config.read_only_port) {
        let address = read_only_address(loaded)?;
        let site = ListenerContext { switches: EnabledEndpoints::READ_ONLY, guard: None, endpoints, metrics };
        let listening = berth_server::bind(address, port)
            .await
            .map_err(|error| BuildError(format!("failed to listen on the read-only port {address}:{port}: {error}")))?;
        info!(address = %address, port, "Starting to listen read-only");
        let (stop, site) = (base.stop.child_token(), ListenerService::Site(Arc::new(site)));
        base.tasks.spawn(async move {
            tokio::select! {
                () = stop.cancelled() => return,
                () = first_statuses(&parts.engine, &parts.status) => {}
            }
            berth_server::serve(listening, site, None, stop).await;
        });
    }
    // Last: a client that reads healthy here may use the main port.
    if let Some(port) = port(config.healthz_port) {
        let address = listen_address("healthzBindAddress", &config.healthz_bind_address)?;
        let router = ListenerService::Router(berth_server::healthz_router(health.clone()));
        let serving = berth_server::serve_persistently(address, port, router, base.stop.child_token()).await;
        base.tasks.spawn(serving);
    }
    Ok(health)
}

/// Address of the read-only port. It exposes pod specs without authentication, so it listens beyond loopback only if an
/// address is configured (spec 04 §10).
fn read_only_address(loaded: &LoadedConfig) -> Result<IpAddr, BuildError> {
    let configured = listen_address("address", &loaded.config.address)?;
    if loaded.flags.is_address_set {
        return Ok(configured);
    }
    let loopback = if configured.is_ipv4() { IpAddr::from(Ipv4Addr::LOCALHOST) } else { Ipv6Addr::LOCALHOST.into() };
    warn!(address = %loopback, "Read-only port listens on loopback only, since `address` is not set");
    Ok(loopback)
}

fn listen_address(field: &str, text: &str) -> Result<IpAddr, BuildError> {
    berth_config::sloppy_ip(text).ok_or_else(|| BuildError(format!("{field}: {text:?} is not an IP address")))
}

/// Starts the main port, with TLS, authentication, and authorization.
async fn start_main(
    loaded: &LoadedConfig,
    base: &Base,
    parts: &Arc<Parts>,
    auth: ServerAuth,
    (endpoints, metrics): (Arc<Endpoints>, ServerMetrics),
) -> Result<(), BuildError> {
    let config = &loaded.config;
    let ServerAuth { authenticator, authorizer, tls, startup_hint: try_this } = auth;
    let site = ListenerContext {
        switches: switches(loaded),
        guard: Some(AuthLayer {
            authorizer: Arc::new(AuthFilter::new(authenticator, authorizer)),
            streaming_requires_create: loaded.flags.streaming_requires_create,
        }),
        endpoints,
        metrics,
    };
    let address = listen_address("address", &config.address)?;
    let port = u16::try_from(config.port).map_err(wrong)?;
    let listening = berth_server::bind(address, port)
        .await
        .map_err(|error| BuildError(format!("failed to listen on port {address}:{port}: {error}")))?;
    info!(address = %address, port, "Starting to listen");
    let (stop, parts) = (base.stop.child_token(), parts.clone());
    base.tasks.spawn(async move {
        tokio::select! {
            () = stop.cancelled() => return,
            () = first_statuses(&parts.engine, &parts.status) => {}
        }
        if let Some(command) = try_this {
            info!(command, "List the pods with this command");
        }
        let secured: TlsSource = Arc::new(move || tls.acceptor());
        berth_server::serve(listening, ListenerService::Site(Arc::new(site)), Some(secured), stop).await;
    });
    Ok(())
}

fn switches(loaded: &LoadedConfig) -> EnabledEndpoints {
    let (config, gates) = (&loaded.config, &loaded.gates);
    EnabledEndpoints {
        debugging: config.enable_debugging_handlers,
        system_log: config.enable_system_log_handler,
        profiling: config.enable_profiling_handler,
        debug_flags: config.enable_debug_flags_handler,
        checkpoint: gates.enabled("ContainerCheckpoint"),
        flagz: gates.enabled("ComponentFlagz"),
        statusz: gates.enabled("ComponentStatusz"),
    }
}

/// Content of `/configz`, with the cipher suites that are really offered (spec 04 §9, CIS 4.2.12). Those of TLS 1.3 are
/// not configurable and not part of the setting.
fn configz_body(config: &KubeletConfiguration, auth: Option<&ServerAuth>) -> String {
    let mut config = config.clone();
    if let Some(auth) = auth {
        let offered = auth.tls.cipher_suites();
        config.tls_cipher_suites =
            offered.into_iter().filter(|name| name.contains("_WITH_")).map(str::to_owned).collect();
    }
    configz::body(&config)
}

fn endpoints(loaded: &LoadedConfig, base: &Base, parts: &Parts, configz: String) -> Endpoints {
    let config = &loaded.config;
    let started = berth_metrics::start_time_seconds().unwrap_or_default() as u64;
    let (pods, status) = (parts.engine.pods.clone(), parts.status.clone());
    let pages = Arc::new(AgentPages::new(pods.clone(), status.clone(), base.registry.clone(), started));
    base.tasks.spawn(pages.clone().evict_deleted_pods(base.stop.child_token()));
    diagnostics::register_wait_metrics(&base.registry, &parts.engine, status.clone(), base.clock.clone());
    let slis = SliMetrics::new(berth_metrics::start_time_seconds().unwrap_or_default());
    let health = Arc::new(AgentHealth::new(HealthDeps {
        heartbeat: parts.engine.heartbeat.clone(),
        sync_frequency: config.sync_frequency.std(),
        log: base.log.clone(),
        liveness: base.liveness.clone(),
        device_plugins: parts.allocators.devices.failure.clone(),
        slis: slis.clone(),
    }));
    base.tasks.spawn(health.clone().keep_counting(base.stop.child_token()));
    Endpoints {
        health,
        pages,
        running: Arc::new(RuntimePodList { observer: parts.observer.clone() }),
        logs: Arc::new(PodLogs {
            pods,
            status,
            reader: LogReader::new(parts.cri.clone(), Path::new(&config.pod_logs_dir)),
            observer: parts.observer.clone(),
            clock: base.clock.clone(),
            runtime: parts.runtime.clone(),
        }),
        follows: CallerLimit::new(FOLLOWS),
        statistics: parts.statistics.clone(),
        split_streams: loaded.gates.enabled("PodLogsQuerySplitStreams"),
        configz: Bytes::from(configz),
        tools: debug_endpoints::tools(
            loaded,
            DebugEndpointDeps {
                log: base.log.clone(),
                slis,
                started: i64::try_from(started).unwrap_or_default(),
                pods: Arc::new(parts.pods()),
                checkpoints: Arc::new(checkpoints(loaded, base, parts)),
                why: Arc::new(parts.diagnostics(base.clock.clone())),
                devices: Arc::new(NodeDevices {
                    manager: parts.allocators.devices.manager.clone(),
                    pods: parts.engine.pods.clone(),
                }),
                topology: Arc::new(NodeTopology {
                    manager: parts.allocators.placement.clone(),
                    pods: parts.engine.pods.clone(),
                    policies: configured_policies(config),
                }),
            },
        ),
        streams: streams(loaded, base, parts),
    }
}

fn checkpoints(loaded: &LoadedConfig, base: &Base, parts: &Parts) -> RuntimeCheckpoints {
    RuntimeCheckpoints::new(CheckpointDeps {
        cri: parts.cri.clone(),
        observer: parts.observer.clone(),
        clock: base.clock.clone(),
        root: loaded.root_directory(),
        request_timeout: loaded.config.runtime_request_timeout.std(),
        tasks: base.tasks.tracker().clone(),
        stop: base.stop.child_token(),
    })
}

fn streams(loaded: &LoadedConfig, base: &Base, parts: &Parts) -> StreamingContext {
    let idle = loaded.config.streaming_connection_idle_timeout.std();
    let settings = StreamingConfig {
        terminate_web_sockets: loaded.gates.enabled("ExtendWebSocketsToKubelet"),
        idle: Some(idle).filter(|idle| !idle.is_zero()),
        allowed_hosts: loaded.flags.streaming_allowed_hosts.clone(),
        ..StreamingConfig::default()
    };
    let runtime = RuntimeStreams::new(parts.engine.pods.clone(), parts.observer.clone(), parts.cri.clone());
    let metrics = StreamingMetrics::new(&base.registry);
    let streams = StreamingContext::new(settings, Arc::new(runtime), runtime_tls(), metrics, base.stop.child_token());
    if let Some(targets) = &parts.targets {
        streams.serve_here(IN_PROCESS, targets.clone());
    }
    let (stop, open) = (base.stop.child_token(), streams.clone());
    base.tasks.spawn(async move {
        stop.cancelled().await;
        open.closed().await;
    });
    streams
}

/// Waits for the first status of every pod, with a timeout: running pods must not appear pending only because the agent
/// has just started.
async fn first_statuses(engine: &EngineHandle, status: &StatusManager) {
    let all = async {
        engine.pods.sources_ready().await;
        let (pods, mut changes) = (engine.pods.desired(), status.changes());
        while pods.iter().any(|pod| status.status(pod.uid()).is_none()) && changes.changed().await.is_ok() {}
    };
    let _ = timeout(SETTLE, all).await; // after the timeout, statuses are served as they are
}
