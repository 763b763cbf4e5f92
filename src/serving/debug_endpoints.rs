//! Wiring of the debugging endpoints: health metrics, logs, checkpoints, devices, topology, profiles.

use std::sync::Arc;

use jiff::Timestamp;

use super::{node_logs::MachineLogs, pprof::ProcessProfiles};
use crate::logging::LogHandle;
use berth_config::{LoadedConfig, configz};
use berth_metrics::SliMetrics;
use berth_server::{
    Tools,
    ports::{Checkpoints, DeviceList, PodDiagnostics, PodDirectory, TopologyMapSource, Verbosity},
    routes::statusz::Statusz,
};

/// Dependencies of the debugging endpoints.
pub struct DebugEndpointDeps {
    /// Log, whose verbosity the endpoints change.
    pub log: LogHandle,
    /// SLI metrics that count health checks.
    pub slis: SliMetrics,
    /// Process start in seconds since the epoch.
    pub started: i64,
    /// Desired pods.
    pub pods: Arc<dyn PodDirectory>,
    /// Container checkpoints.
    pub checkpoints: Arc<dyn Checkpoints>,
    /// Pod diagnostics.
    pub why: Arc<dyn PodDiagnostics>,
    /// Devices of device plugins.
    pub devices: Arc<dyn DeviceList>,
    /// CPUs and memory by NUMA node.
    pub topology: Arc<dyn TopologyMapSource>,
}

/// Builds the debugging endpoints.
pub fn tools(loaded: &LoadedConfig, parts: DebugEndpointDeps) -> Tools {
    let DebugEndpointDeps { log, slis, started, pods, checkpoints, why, devices, topology } = parts;
    let flags = loaded.flag_values.iter();
    Tools {
        slis,
        pods,
        checkpoints,
        why,
        devices,
        topology,
        statusz: Arc::new(Statusz {
            started: Timestamp::from_second(started).unwrap_or_default(),
            compiler: "rustc".to_owned(),
            version: loaded.version.trim_start_matches('v').to_owned(),
            emulated: "1.36".to_owned(),
        }),
        flags: Arc::new(flags.map(|(name, value)| ((*name).to_owned(), configz::masked_flag(name, value))).collect()),
        verbosity: Arc::new(log),
        node_logs: Arc::new(MachineLogs::default()),
        log_queries: loaded.config.enable_system_log_query,
        profiles: Arc::new(ProcessProfiles),
    }
}

impl Verbosity for LogHandle {
    fn set(&self, level: u32) {
        self.set_verbosity(level);
    }
}
