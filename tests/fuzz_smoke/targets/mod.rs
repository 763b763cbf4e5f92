//! Fuzz targets: one per parser of foreign bytes, with the invariants that any input must keep.
//!
//! The only copy of each target: `fuzz/` runs it under a coverage-guided fuzzer, `main.rs` beside this folder on a
//! small corpus and seeded mutations. A target panics on a violation: the parser panicked, a round trip changed a
//! value, or an output is unbounded. The caller limits time and size.
#![allow(dead_code, reason = "each fuzz program uses one target")]

mod config;
mod cpu_memory;
mod devices;
mod embedded;
mod images;
mod kernel;
mod logs;
mod pods;
mod runtimes;
mod server;
mod sources;

use std::{borrow::Cow, sync::LazyLock};

use berth_types::Pod;

pub use config::{command_line, go_duration, kubelet_config, kubelet_dropin};
pub use cpu_memory::{cpu_manager_state, memory_manager_state};
pub use devices::{allocate_response, device_checkpoint, device_list, dra_checkpoint, dra_health_state};
pub use embedded::{filter_profile, image_users, layer_entries, shim_exit_record, shim_message, shim_output};
pub use images::{docker_config, image_pattern, image_reference, plugin_response, plugins, pull_record};
pub use kernel::{cgroup_files, cpu_set, kernel_log, mounts};
pub use logs::{log_cri, log_docker, log_filter};
pub use pods::{env_file, expansion, field_path, host_names, quantity, resources_on_disk};
pub use runtimes::{containerd_event, cri_endpoint, cri_status, resolv_conf};
pub use server::{log_query, spdy_frames, websocket_tunnel};
pub use sources::{manifest_file, manifest_http};

/// A target: takes bytes, panics on a violation.
pub type Target = fn(&[u8]);

/// All targets; names equal those of the programs in `fuzz/` and of the corpus directories.
pub const TARGETS: &[(&str, Target)] = &[
    ("allocate_response", allocate_response),
    ("cgroup_files", cgroup_files),
    ("command_line", command_line),
    ("containerd_event", containerd_event),
    ("cpu_manager_state", cpu_manager_state),
    ("cpu_set", cpu_set),
    ("cri_endpoint", cri_endpoint),
    ("cri_status", cri_status),
    ("device_checkpoint", device_checkpoint),
    ("device_list", device_list),
    ("docker_config", docker_config),
    ("dra_checkpoint", dra_checkpoint),
    ("dra_health_state", dra_health_state),
    ("env_file", env_file),
    ("expansion", expansion),
    ("field_path", field_path),
    ("filter_profile", filter_profile),
    ("go_duration", go_duration),
    ("host_names", host_names),
    ("image_pattern", image_pattern),
    ("image_reference", image_reference),
    ("image_users", image_users),
    ("kernel_log", kernel_log),
    ("kubelet_config", kubelet_config),
    ("kubelet_dropin", kubelet_dropin),
    ("layer_entries", layer_entries),
    ("log_cri", log_cri),
    ("log_docker", log_docker),
    ("log_filter", log_filter),
    ("log_query", log_query),
    ("manifest_file", manifest_file),
    ("manifest_http", manifest_http),
    ("memory_manager_state", memory_manager_state),
    ("mount_table", mounts),
    ("plugin_config", plugins),
    ("plugin_response", plugin_response),
    ("pull_record", pull_record),
    ("quantity", quantity),
    ("resolv_conf", resolv_conf),
    ("resource_state", resources_on_disk),
    ("shim_exit_record", shim_exit_record),
    ("shim_message", shim_message),
    ("shim_output", shim_output),
    ("spdy_frames", spdy_frames),
    ("websocket_tunnel", websocket_tunnel),
];

/// Foreign bytes as text, invalid UTF-8 replaced.
fn text(data: &[u8]) -> Cow<'_, str> {
    String::from_utf8_lossy(data)
}

/// Splits off the first line.
fn first_line(data: &[u8]) -> (Cow<'_, str>, &[u8]) {
    let end = data.iter().position(|b| *b == b'\n').unwrap_or(data.len());
    let (line, rest) = data.split_at(end);
    (text(line), rest.get(1..).unwrap_or_default())
}

/// A pod for targets that need one.
static POD: LazyLock<Pod> = LazyLock::new(|| {
    let pod = serde_json::json!({
        "metadata": {"name": "web", "namespace": "shop", "uid": "u-1", "labels": {"app": "web", "x": "a\"b"},
            "annotations": {"example.com/Note": "two\nlines"}},
        "spec": {"restartPolicy": "Always", "enableServiceLinks": true, "containers": [
            {"name": "main", "image": "web:1", "resources": {"limits": {"cpu": "1500m", "memory": "64Mi"}}},
            {"name": "side", "image": "side"}]},
    });
    Pod::new(serde_json::from_value(pod).expect("an API object")).expect("a pod")
});
