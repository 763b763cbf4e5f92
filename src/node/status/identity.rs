//! Identity setters: labels, versions, endpoint, runtime handlers. Pure.
//!
//! Implements spec 05 §4.3 rows 3, 4, 6-8.

use super::StatusBuilder;
use crate::node::architecture;
use berth_types::api;

/// Sets the labels that every update enforces.
pub(super) fn labels(work: &mut StatusBuilder<'_>) {
    let labels = work.node.metadata.labels.get_or_insert_default();
    for (key, value) in [("kubernetes.io/os", "linux"), ("kubernetes.io/arch", architecture())] {
        labels.insert(key.to_owned(), value.to_owned());
    }
}

/// Sets versions, platform, and the kubelet endpoint's port.
pub(super) fn set(work: &mut StatusBuilder<'_>) {
    let (machine, known) = (&work.settings.machine, work.known);
    let runtime = if known.runtime_version.is_empty() { "Unknown" } else { &known.runtime_version };
    let info = work.status.node_info.get_or_insert_default();
    info.kernel_version.clone_from(&machine.kernel_release);
    info.os_image.clone_from(&machine.os_image);
    info.container_runtime_version = runtime.to_owned();
    info.kubelet_version.clone_from(&work.settings.kubelet_version);
    info.kube_proxy_version.clear();
    "linux".clone_into(&mut info.operating_system);
    architecture().clone_into(&mut info.architecture);
    let endpoint = api::DaemonEndpoint { port: work.settings.port };
    work.status.daemon_endpoints = Some(api::NodeDaemonEndpoints { kubelet_endpoint: Some(endpoint) });
}

/// Sets the runtime handlers and features. Before the runtime has reported them, the previous values stay.
pub(super) fn runtime(work: &mut StatusBuilder<'_>) {
    let runtime = &work.known.runtime;
    if !runtime.handlers.is_empty() || runtime.runtime_error.is_none() {
        let handlers = runtime.handlers.iter().map(|(name, features)| api::NodeRuntimeHandler {
            name: Some(name.clone()),
            features: Some(api::NodeRuntimeHandlerFeatures {
                recursive_read_only_mounts: Some(features.recursive_read_only_mounts),
                user_namespaces: Some(features.user_namespaces),
            }),
        });
        work.status.runtime_handlers = Some(handlers.collect());
    }
    // Runtimes that report handlers report features, too; older ones report neither.
    if runtime.supplemental_groups_policy || !runtime.handlers.is_empty() {
        let supplemental_groups_policy = Some(runtime.supplemental_groups_policy);
        work.status.features = Some(api::NodeFeatures { supplemental_groups_policy });
    }
}
