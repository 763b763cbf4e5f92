//! gRPC sockets: pod resources API, and pods API.

use std::sync::Arc;

use super::composition_root::Base;
use crate::serving::pods::{EnginePods, NodeResources};
use berth_config::LoadedConfig;
use berth_metrics::{PodResourcesMetrics, PodWatchMetrics};
use berth_ports::ContainerPlacements;
use berth_resources::{devices::DeviceManager, dra::DraManager};
use berth_server::grpc::{self, PodResourcesDeps, PodsApi, Socket};

/// Opens the sockets; they close with the agent.
pub(super) fn open(
    loaded: &LoadedConfig,
    base: &Base,
    pods: EnginePods,
    devices: Arc<DeviceManager>,
    claims: Arc<DraManager>,
    placement: Arc<dyn ContainerPlacements>,
) {
    let (root, pods) = (loaded.root_directory(), Arc::new(pods));
    let routes = grpc::pod_resources(PodResourcesDeps {
        pods: pods.clone(),
        exclusive: Arc::new(NodeResources { devices, claims, placement }),
        metrics: PodResourcesMetrics::new(&base.registry),
        active_only: loaded.gates.enabled("KubeletPodResourcesListUseActivePods"),
    });
    let (socket, _) = Socket::new(root.join("pod-resources/kubelet.sock"), routes);
    base.tasks.spawn(socket.run(base.stop.child_token()));
    if loaded.gates.enabled("PodsAPI") {
        let api = PodsApi::new(pods, PodWatchMetrics::new(&base.registry));
        let (socket, _) = Socket::new(root.join("pods-api/pods-api.sock"), api.routes());
        base.tasks.spawn(socket.run(base.stop.child_token()));
        base.tasks.spawn(api.run(base.stop.child_token()));
    }
}
