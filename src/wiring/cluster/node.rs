//! Node object and lease: their configuration, and the data from other modules.
//!
//! Implements the node status and the lease (spec 05 §4, spec 01 §12).

use std::sync::Arc;

use futures::FutureExt;
use serde::Deserialize;
use tokio::sync::watch;

use super::{
    super::{
        composition_root::{Base, BuildError, wrong},
        kernel, node_addresses, settings,
    },
    Cluster,
};
use crate::{
    images,
    node::{
        self, KernelNetwork, MachineInfo, RegistrationSettings,
        cluster_tasks::{ClusterConfig, NodeDeps, NodeLiveness, StopTokens, VolumesReported},
        pod_cidr::follow_pod_cidr,
        reservations::Reservations,
        status::{DevicePluginResources, NodeImage, StatusSettings},
    },
};
use berth_config::LoadedConfig;
use berth_cri::{RuntimeInfo, RuntimeService};
use berth_metrics::NodeMetrics;
use berth_ports::{NodeFacts, RuntimeState};
use berth_proto::cri;

/// Section `node` of the agent's own settings (`/etc/berth/config.yaml`).
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields, default)]
struct NodeSettings {
    /// Re-creates a Node object that was deleted; default false, as in kubelet.
    reregister_deleted_node: bool,
}

impl NodeSettings {
    /// Reads the section from the settings file; defaults if it is missing.
    ///
    /// # Errors
    /// Names the file or the field.
    fn read() -> Result<Self, BuildError> {
        let Some(section) = berth_runtime::settings::section("node").map_err(BuildError)? else {
            return Ok(Self::default());
        };
        Self::of(section).map_err(BuildError)
    }

    fn of(section: serde_json::Value) -> Result<Self, String> {
        serde_json::from_value(section).map_err(|error| format!("node: {error}"))
    }
}

/// Volumes in use, and those of them that the API server knows.
pub(in crate::wiring) struct VolumesInUse {
    /// Volumes in use, to report.
    pub(in crate::wiring) in_use: watch::Receiver<Option<Vec<String>>>,
    /// Receives the volumes that the API server knows to be in use.
    pub(in crate::wiring) reported: VolumesReported,
}

/// Data that other modules provide for the Node object.
pub(in crate::wiring) struct NodeParts {
    /// Facts that admission and statuses read.
    pub(in crate::wiring) facts: watch::Sender<Arc<NodeFacts>>,
    /// State from the runtime check.
    pub(in crate::wiring) runtime: watch::Receiver<Arc<RuntimeState>>,
    /// Image manager.
    pub(in crate::wiring) images: Arc<images::ImageManager>,
    /// Volumes in use, and those of them that the API server knows.
    pub(in crate::wiring) volumes: VolumesInUse,
    /// Resources of device plugins.
    pub(in crate::wiring) devices: watch::Receiver<Arc<DevicePluginResources>>,
    /// Whether no device assignments were restored: amounts in an existing Node object are not valid.
    pub(in crate::wiring) devices_lost: bool,
}

impl Cluster {
    /// Registers the node, and keeps its object and lease up to date from then on.
    ///
    /// # Errors
    /// The configuration does not fit the machine.
    pub(in crate::wiring) fn keep_node(
        &self,
        loaded: &LoadedConfig,
        base: &Base,
        machine: &MachineInfo,
        info: &RuntimeInfo,
        parts: NodeParts,
    ) -> Result<watch::Receiver<String>, BuildError> {
        let config = ClusterConfig { devices_lost: parts.devices_lost, ..cluster_config(loaded, machine, &self.name)? };
        let (pod_cidr, ranges) = watch::channel(String::new());
        let listed = parts.images.listed();
        let deps = NodeDeps {
            api: self.api.clone(),
            nodes: self.nodes.clone(),
            facts: parts.facts,
            runtime: parts.runtime,
            runtime_version: watch::channel(node::runtime_version(&info.name, &info.version)).1,
            images: Arc::new(move || images_of(&listed.borrow())),
            devices: parts.devices,
            volumes_in_use: parts.volumes.in_use,
            volumes_reported: parts.volumes.reported,
            pod_cidr,
            network: Arc::new(KernelNetwork::default()),
            events: base.events.clone(),
            clock: base.clock.clone(),
            random: Arc::new(rand::random::<f64>),
            metrics: NodeMetrics::new(&base.registry),
            liveness: NodeLiveness { lease: base.liveness.of("lease"), status: base.liveness.of("node-status") },
        };
        let stops = StopTokens { work: base.stop.child_token(), lease: base.stop.child_token() };
        for (name, task) in node::cluster_tasks::start(config, deps, &stops) {
            base.tasks.spawn(task.map(move |()| tracing::debug!(task = name, "Ended")));
        }
        Ok(ranges)
    }

    /// Returns a function that deletes, in the background, the ResourceSlices of a driver that is gone.
    pub(in crate::wiring) fn slice_cleanup(&self, base: &Base) -> impl Fn(String) + Send + Sync + use<> {
        let (api, nodes, name) = (self.api.clone(), self.nodes.clone(), self.name.clone());
        let (tasks, stop) = (base.tasks.tracker().clone(), base.stop.child_token());
        move |driver| {
            let random = Arc::new(rand::random::<f64>);
            let (api, nodes, name, stop) = (api.clone(), nodes.clone(), name.clone(), stop.clone());
            tasks.spawn(node::delete_resource_slices(api, nodes, name, Some(driver), random, stop));
        }
    }

    /// Updates the runtime's pod CIDR whenever it changes.
    pub(in crate::wiring) fn follow_pod_cidr(
        &self,
        base: &Base,
        ranges: watch::Receiver<String>,
        cri: Arc<dyn RuntimeService>,
    ) {
        base.tasks.spawn(follow_pod_cidr(ranges, node_addresses::cidr_sender(cri), base.stop.child_token()));
    }
}

fn cluster_config(loaded: &LoadedConfig, machine: &MachineInfo, name: &str) -> Result<ClusterConfig, BuildError> {
    let config = &loaded.config;
    let own = settings::node(loaded);
    let capacity = node::capacity(&own, machine);
    let reserved = Reservations::new(&own.reserved, &machine.cpus, &capacity).map_err(wrong)?;
    let hostname = node::identity::hostname(&own.hostname_override, &machine.hostname).map_err(wrong)?;
    Ok(ClusterConfig {
        status: StatusSettings {
            name: name.to_owned(),
            hostname,
            node: own,
            machine: machine.clone(),
            reserved,
            node_ips: node_addresses::configured(loaded)?,
            max_images: config.node_status_max_images,
            port: if config.enable_server { config.port } else { 0 },
            kubelet_version: loaded.version.clone(),
            soft_problem: kernel::soft_problem(),
        },
        origin: RegistrationSettings {
            provider_id: config.provider_id.clone(),
            attach_detach: config.enable_controller_attach_detach,
        },
        register: config.register_node,
        reregister: NodeSettings::read()?.reregister_deleted_node,
        update_frequency: config.node_status_update_frequency.std(),
        report_frequency: config.node_status_report_frequency.std(),
        lease_seconds: config.node_lease_duration_seconds,
        devices_lost: false,
        wipes_slices: loaded.gates.enabled("DynamicResourceAllocation"),
    })
}

fn node_image(image: &cri::Image) -> NodeImage {
    NodeImage {
        id: image.id.clone(),
        size: image.size,
        digests: image.repo_digests.clone(),
        tags: image.repo_tags.clone(),
    }
}

/// `None` before the first list of images.
fn images_of(listed: &[cri::Image]) -> Option<Vec<NodeImage>> {
    (!listed.is_empty()).then(|| listed.iter().map(node_image).collect())
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn settings_of_the_node_are_few() {
        for (section, expected) in [
            (json!({}), Ok(NodeSettings::default())),
            (json!({"reregisterDeletedNode": true}), Ok(NodeSettings { reregister_deleted_node: true })),
        ] {
            assert_eq!(NodeSettings::of(section), expected);
        }
        let error = NodeSettings::of(json!({"reregister": true})).expect_err("unknown");
        assert!(error.starts_with("node: unknown field `reregister`"), "{error}");
    }
}
