//! `Version`, `Status`, and `RuntimeConfig` of CRI. Implements spec 09a §5.

use std::collections::HashMap;

use rustix::system::uname;
use serde_json::json;

use crate::{config::NAME, runtime::Runtime};
use berth_proto::cri;

/// Version of the kubelet's runtime API.
const KUBE_API: &str = "0.1.0";
/// Version of CRI.
const API: &str = "v1";

/// Response to `Version`.
pub fn version() -> cri::VersionResponse {
    cri::VersionResponse {
        version: KUBE_API.to_owned(),
        runtime_name: NAME.to_owned(),
        runtime_version: env!("CARGO_PKG_VERSION").to_owned(),
        runtime_api_version: API.to_owned(),
    }
}

/// Response to `Status`.
pub async fn status(runtime: &Runtime, verbose: bool) -> cri::StatusResponse {
    let features = cri::RuntimeHandlerFeatures {
        recursive_read_only_mounts: runtime.host.has_recursive_read_only,
        user_namespaces: runtime.host.has_user_namespaces,
    };
    // With the host network, /sys is the host's, which must be mounted recursively read-only (spec 09a §8.1).
    let user_namespaces_host_network = features.user_namespaces && features.recursive_read_only_mounts;
    let handler = |name: &str| cri::RuntimeHandler { name: name.to_owned(), features: Some(features) };
    let others = runtime.shell.config.runtime_handlers.iter().map(String::as_str);
    let trouble = runtime.ports.network.readiness_error().await;
    let warning = if trouble.is_none() { runtime.ports.network.warning().await } else { None };
    let conditions = vec![ready(runtime.is_ready()), network(trouble, warning)];
    cri::StatusResponse {
        status: Some(cri::RuntimeStatus { conditions }),
        info: if verbose { info(runtime) } else { HashMap::new() },
        runtime_handlers: ["", NAME].into_iter().chain(others).map(handler).collect(),
        features: Some(cri::RuntimeFeatures { supplemental_groups_policy: true, user_namespaces_host_network }),
    }
}

fn ready(is_ready: bool) -> cri::RuntimeCondition {
    let reason = if is_ready { "" } else { "Recovering" };
    cri::RuntimeCondition {
        r#type: "RuntimeReady".to_owned(),
        status: is_ready,
        reason: reason.to_owned(),
        message: String::new(),
    }
}

fn network(trouble: Option<String>, warning: Option<String>) -> cri::RuntimeCondition {
    let (reason, message) = match &trouble {
        None => ("", warning.unwrap_or_default()),
        Some(cause) => ("NetworkPluginNotReady", format!("Network plugin returns error: {cause}")),
    };
    cri::RuntimeCondition {
        r#type: "NetworkReady".to_owned(),
        status: trouble.is_none(),
        reason: reason.to_owned(),
        message,
    }
}

fn info(runtime: &Runtime) -> HashMap<String, String> {
    let (config, driver) = (&runtime.shell.config, runtime.host.driver);
    let config_json = json!({
        "stateDir": config.state,
        "rootDir": config.root,
        "cgroupDriver": driver.as_str_name().to_lowercase(),
        "snapshotter": config.snapshotter,
        "network": config.network,
    });
    HashMap::from([
        ("config".to_owned(), config_json.to_string()),
        ("version".to_owned(), json!(env!("CARGO_PKG_VERSION")).to_string()),
        ("lastCNILoadStatus".to_owned(), json!(runtime.ports.network.last_cni_load()).to_string()),
        ("kernel".to_owned(), json!(uname().release().to_string_lossy()).to_string()),
    ])
}

/// Response to `RuntimeConfig`.
pub fn config(runtime: &Runtime) -> cri::RuntimeConfigResponse {
    let linux = cri::LinuxRuntimeConfiguration { cgroup_driver: runtime.host.driver.into() };
    cri::RuntimeConfigResponse { linux: Some(linux) }
}
