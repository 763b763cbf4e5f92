//! Status of a pod, built from the shared context of the workers and one observation.

use std::{collections::BTreeMap, sync::Arc};

use super::WorkerContext;
use berth_ports::ProbeResult;
use berth_status::BuildKind;
use berth_types::{
    ContainerId, Pod, api,
    observation::{Generation, ObservedPod},
};

/// Inputs of one status, beside the shared context.
pub(super) struct StatusParts<'a> {
    pub pod: &'a Pod,
    pub observed: &'a ObservedPod,
    pub failures: &'a BTreeMap<String, berth_status::StartFailure>,
    pub kind: BuildKind,
    pub eviction: Option<berth_status::Eviction>,
    pub cgroup: Option<berth_status::PodCgroup>,
    pub sandbox_ready: bool,
}

/// Builds the status of a pod.
pub(super) fn build_status(context: &WorkerContext, parts: &StatusParts<'_>) -> api::PodStatus {
    let previous = context.status.previous(parts.pod);
    let node = context.node.borrow().clone();
    let runtime_name = context.runtime.name();
    let resize = context.allocations.conditions(parts.pod.uid());
    let handler = parts.observed.sandboxes.first().map_or("", |sandbox| sandbox.runtime_handler.as_str());
    let recursive_read_only = context
        .runtime_state
        .borrow()
        .handlers
        .get(handler)
        .is_some_and(|features| features.recursive_read_only_mounts);
    let devices = |container: &str| {
        if !context.config.resource_health {
            return Vec::new();
        }
        let mut health = context.devices.health(parts.pod.uid(), container);
        health.extend(context.claims.health(parts.pod, container));
        health
    };
    let passed = |result: Option<ProbeResult>| result.map(|r| r == ProbeResult::Success);
    let probes = |container: &ContainerId| {
        let results = context.probes.results(container);
        berth_status::ProbeOutcome { startup: passed(results.startup), readiness: passed(results.readiness) }
    };
    berth_status::build(&berth_status::StatusInput {
        pod: parts.pod,
        observed: parts.observed,
        previous: previous.as_deref(),
        kind: parts.kind,
        start_failures: parts.failures,
        probes: &probes,
        devices: &devices,
        eviction: parts.eviction.as_ref(),
        resize: &resize,
        cgroup: parts.cgroup,
        recursive_read_only,
        sandbox_ready: parts.sandbox_ready,
        node: berth_status::NodeFacts {
            runtime_name: &runtime_name,
            host_ips: &node.host_ips,
            prefer_v6: context.config.prefer_ipv6,
            api_client: context.config.api_client,
            agent_started: context.config.started_at,
        },
    })
}

/// Status of a pod that is not admitted yet: its containers wait for that reason.
pub(in crate::engine) fn waiting_status(
    context: &WorkerContext,
    pod: &Pod,
    reason: &str,
    message: &str,
) -> api::PodStatus {
    let empty = || ObservedPod::empty(pod.id().clone(), Generation::default(), context.clock.now());
    let observed = context.observer.known_pod(pod.uid()).unwrap_or_else(|| Arc::new(empty()));
    let failure = berth_status::StartFailure { reason: reason.to_owned(), message: message.to_owned() };
    let failures = pod.containers().iter().map(|container| (container.name.clone(), failure.clone())).collect();
    let parts = StatusParts {
        pod,
        observed: &observed,
        failures: &failures,
        kind: BuildKind::Ongoing,
        eviction: None,
        cgroup: None,
        sandbox_ready: false,
    };
    build_status(context, &parts)
}
