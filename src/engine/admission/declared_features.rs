//! Admission handler for node declared features: refuses pods that need an undeclared feature.
//!
//! Pure. Implements spec 02a §6.1, §4.

use std::collections::BTreeSet;

use super::{Admission, AdmissionRejection, AdmitInput};
use berth_types::{Pod, api, resource_state::same};

const RESTART_ALL: &str = "RestartAllContainersOnContainerExits";
const USERNS_HOST_NETWORK: &str = "UserNamespacesHostNetworkSupport";
const POD_LEVEL_RESIZE: &str = "InPlacePodLevelResourcesVerticalScaling";
const INIT_RESIZE: &str = "InPlacePodVerticalScalingInitContainers";

pub(super) fn check(input: &AdmitInput<'_>, _: &mut Admission) -> Result<(), AdmissionRejection> {
    if !input.rules.node_declared_features {
        return Ok(());
    }
    match missing(&needed(input.pod), &input.node.declared_features) {
        None => Ok(()),
        Some(message) => Err(AdmissionRejection::new("PodFeatureUnsupported", message)),
    }
}

/// The message of the event `FailedNodeDeclaredFeaturesCheck` if an update of a pod needs features that
/// the node does not declare; the update is applied nevertheless.
pub fn missing_for_update(old: &Pod, new: &Pod, declared: &[String]) -> Option<String> {
    let mut features = BTreeSet::new();
    let level = |pod: &Pod| pod.spec().resources.clone().unwrap_or_default();
    if !same(&level(old), &level(new)) {
        features.insert(POD_LEVEL_RESIZE);
    }
    let changed = new.init_containers().iter().filter(|c| !Pod::is_sidecar(c)).any(|c| {
        let before = old.init_containers().iter().find(|b| b.name == c.name);
        let of = |c: &api::Container| c.resources.clone().unwrap_or_default();
        before.is_some_and(|b| !same(&of(b), &of(c)))
    });
    if changed {
        features.insert(INIT_RESIZE);
    }
    missing(&features, declared)
}

fn needed(pod: &Pod) -> BTreeSet<&'static str> {
    let mut features = BTreeSet::new();
    let mut rules = pod.init_containers().iter().chain(pod.containers()).flat_map(|c| c.restart_policy_rules.iter());
    if rules.any(|list| list.iter().any(|rule| rule.action == "RestartAllContainers")) {
        features.insert(RESTART_ALL);
    }
    if pod.is_host_network() && pod.spec().host_users == Some(false) {
        features.insert(USERNS_HOST_NETWORK);
    }
    features
}

fn missing(needed: &BTreeSet<&'static str>, declared: &[String]) -> Option<String> {
    let absent: Vec<&str> = needed.iter().copied().filter(|f| !declared.iter().any(|d| d == f)).collect();
    (!absent.is_empty()).then(|| format!("Pod requires node features that are not available: {}", absent.join(", ")))
}
