//! Eviction message, event annotations, and metric label of an evicted pod. Pure.
//!
//! Implements spec 05 §3.7.

use super::{
    signals::{Observations, resource},
    usage::{Candidate, ContainerUse},
};
use berth_config::eviction::Threshold;
use berth_types::{
    Pod,
    quantity::{Amount, QuantityFormat},
    resources::{EPHEMERAL_STORAGE, MEMORY, request_of, zero},
};

/// Why and how a pod is evicted.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct EvictionVerdict {
    /// Message of status and event.
    pub message: String,
    /// Annotations of the event.
    pub annotations: Vec<(&'static str, String)>,
    /// Label of the eviction metric.
    pub signal: &'static str,
    /// Whether node pressure is the reason, and not the pod's own limit: the pod then gets the condition
    /// `DisruptionTarget`.
    pub is_disruption: bool,
    /// Grace period, in seconds.
    pub grace: i64,
}

/// Builds the verdict for the first threshold of `due`, which is sorted; `None` if `due` is empty.
pub fn verdict(candidate: &Candidate, due: &[Threshold], seen: &Observations, grace: i64) -> Option<EvictionVerdict> {
    let signal = due.first()?.signal;
    let starved = resource(signal);
    let mut message = format!("The node was low on resource: {starved}. ");
    let matching = due.iter().filter(|threshold| resource(threshold.signal) == starved);
    let shortage = matching.filter_map(|threshold| Some((threshold, seen.get(&threshold.signal)?))).next();
    if let Some((threshold, seen)) = shortage {
        let quantity = threshold.below.of(seen.capacity).canonical();
        message += &format!("Threshold quantity: {quantity}, available: {}. ", seen.available.canonical());
    }
    let annotations = offenders(candidate, starved, &mut message);
    Some(EvictionVerdict { message, annotations, signal: signal.as_str(), is_disruption: true, grace })
}

/// Appends to `message` who uses more than it requests; returns the annotations of the event.
fn offenders(candidate: &Candidate, starved: &str, message: &mut String) -> Vec<(&'static str, String)> {
    let (pod, Some(usage)) = (&candidate.pod, &candidate.usage) else { return Vec::new() };
    let mut annotations = Vec::new();
    let at_pod_level = usage.memory.zip(pod_level_memory(pod)).filter(|_| starved == MEMORY);
    if let Some((used, request)) = at_pod_level
        && bytes(used) > request
    {
        let used = bytes(used).canonical();
        *message += &larger("Pod", pod.name(), &used, request, starved);
        annotations.push(("offending_pod", pod.name().to_owned()));
        annotations.push(("offending_pod_usage", used));
    }
    let (mut names, mut usages) = (Vec::new(), Vec::new());
    for container in &usage.containers {
        let Some((_, spec)) = pod.container(&container.name) else { continue };
        let request = request_of(spec, starved).unwrap_or_else(zero);
        let Some(used) = taken(container, starved).filter(|used| *used > request) else { continue };
        *message += &larger("Container", &container.name, &used.canonical(), request, starved);
        names.push(container.name.clone());
        usages.push(used.canonical());
    }
    annotations.push(("offending_containers", names.join(",")));
    annotations.push(("offending_containers_usage", usages.join(",")));
    annotations.push(("starved_resource", starved.to_owned()));
    annotations
}

fn larger(what: &str, name: &str, used: &str, request: Amount, starved: &str) -> String {
    let request = request.canonical();
    format!("{what} {name} was using {used}, request is {request}, has larger consumption of {starved}. ")
}

fn pod_level_memory(pod: &Pod) -> Option<Amount> {
    let requests = pod.spec().resources.as_ref()?.requests.as_ref()?;
    Amount::try_from(requests.get(MEMORY)?).ok()
}

fn taken(container: &ContainerUse, starved: &str) -> Option<Amount> {
    match starved {
        MEMORY => container.memory.map(bytes),
        EPHEMERAL_STORAGE => {
            let (rootfs, logs) = container.rootfs.zip(container.logs)?;
            Some(bytes(rootfs.bytes.saturating_add(logs.bytes)))
        }
        _ => None,
    }
}

fn bytes(number: u64) -> Amount {
    Amount::from_value(i64::try_from(number).unwrap_or(i64::MAX), QuantityFormat::BinarySi)
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use serde_json::{Value, json};

    use super::{
        super::{
            signals::{SignalObservation, Uptime},
            usage::{DiskUse, PodUse},
        },
        *,
    };
    use berth_config::eviction::{Signal, ThresholdValue};

    fn amount(text: &str) -> Amount {
        Amount::parse(text).expect("a quantity")
    }

    fn candidate(spec: Value, usage: Option<PodUse>) -> Candidate {
        let object = json!({"metadata": {"name": "web", "namespace": "n", "uid": "u"}, "spec": spec});
        Candidate { pod: Arc::new(Pod::new(serde_json::from_value(object).expect("a pod")).expect("complete")), usage }
    }

    fn container(name: &str, memory: u64, rootfs: Option<u64>, logs: Option<u64>) -> ContainerUse {
        let disk = |bytes: Option<u64>| bytes.map(|bytes| DiskUse { bytes, inodes: 1 });
        ContainerUse { name: name.to_owned(), memory: Some(memory), rootfs: disk(rootfs), logs: disk(logs) }
    }

    fn message_and_annotations(
        candidate: &Candidate,
        thresholds: &[(Signal, ThresholdValue)],
        available: &str,
    ) -> (String, Vec<String>) {
        let due: Vec<Threshold> = thresholds
            .iter()
            .map(|(signal, below)| Threshold { signal: *signal, below: *below, grace: None, min_reclaim: None })
            .collect();
        let seen = |(signal, _): &(Signal, ThresholdValue)| {
            (*signal, SignalObservation { available: amount(available), capacity: 8 << 30, at: Uptime::ZERO })
        };
        let seen: Observations = thresholds.iter().map(seen).collect();
        let verdict = verdict(candidate, &due, &seen, 1).expect("a threshold");
        (verdict.message, verdict.annotations.iter().map(|(key, value)| format!("{key}={value}")).collect())
    }

    fn two_gi() -> ThresholdValue {
        ThresholdValue::Quantity(amount("2Gi"))
    }

    #[test]
    fn containers_that_take_more_than_they_request_are_named() {
        // AC-05-14
        let spec = json!({
            "containers": [
                {"name": "main", "resources": {"requests": {"memory": "64Mi"}}}, {"name": "side"},
                {"name": "modest", "resources": {"requests": {"memory": "1Gi"}}}],
            "initContainers": [{"name": "proxy", "restartPolicy": "Always"}]});
        let containers = vec![
            container("main", 1536 << 20, None, None),
            container("modest", 1 << 20, None, None),
            container("proxy", 100, None, None),
            container("side", 0, None, None),
            container("debugger", 1 << 30, None, None),
        ];
        let usage = PodUse { containers, ..PodUse::default() };
        let (message, annotations) =
            message_and_annotations(&candidate(spec, Some(usage)), &[(Signal::Memory, two_gi())], "1500Mi");
        assert_eq!(
            message,
            "The node was low on resource: memory. Threshold quantity: 2Gi, available: 1500Mi. Container main was using \
             1536Mi, request is 64Mi, has larger consumption of memory. Container proxy was using 100, request is 0, has \
             larger consumption of memory. "
        );
        assert_eq!(
            annotations,
            ["offending_containers=main,proxy", "offending_containers_usage=1536Mi,100", "starved_resource=memory"]
        );
    }

    #[test]
    fn pods_that_ask_for_themselves_are_named_too() {
        let spec = json!({"containers": [{"name": "c"}], "resources": {"requests": {"memory": "1Gi"}}});
        let used = |memory| Some(PodUse { memory: Some(memory), ..PodUse::default() });
        let (message, annotations) = message_and_annotations(
            &candidate(spec.clone(), used(3 << 30)),
            &[(Signal::AllocatableMemory, two_gi())],
            "0",
        );
        assert_eq!(
            message,
            "The node was low on resource: memory. Threshold quantity: 2Gi, available: 0. Pod web was using 3Gi, request \
             is 1Gi, has larger consumption of memory. "
        );
        assert_eq!(annotations[..2], ["offending_pod=web", "offending_pod_usage=3Gi"]);
        let (_, annotations) = message_and_annotations(&candidate(spec, used(1)), &[(Signal::Memory, two_gi())], "0");
        assert_eq!(annotations[0], "offending_containers=");
    }

    #[test]
    fn disks_count_layers_and_logs_where_both_are_known() {
        let spec = json!({"containers": [{"name": "a"}, {"name": "b"}]});
        let containers = vec![container("a", 0, Some(1 << 20), Some(1 << 20)), container("b", 0, Some(1 << 30), None)];
        let pod = candidate(spec, Some(PodUse { containers, ..PodUse::default() }));
        let (message, annotations) =
            message_and_annotations(&pod, &[(Signal::NodeFs, ThresholdValue::Share(0.1))], "1Gi");
        assert_eq!(
            message,
            "The node was low on resource: ephemeral-storage. Threshold quantity: 858993472, available: 1Gi. Container a \
             was using 2Mi, request is 0, has larger consumption of ephemeral-storage. "
        );
        assert_eq!(annotations[0], "offending_containers=a");
        let (message, annotations) =
            message_and_annotations(&pod, &[(Signal::NodeFsInodes, ThresholdValue::Share(0.5))], "7");
        assert_eq!(message, "The node was low on resource: inodes. Threshold quantity: 4Gi, available: 7. ");
        assert_eq!(annotations[2], "starved_resource=inodes");
    }

    #[test]
    fn a_pod_without_usage_is_reported_without_annotations() {
        let unknown = candidate(json!({"containers": [{"name": "a"}]}), None);
        let (message, annotations) = message_and_annotations(&unknown, &[(Signal::Pid, two_gi())], "3");
        assert_eq!(message, "The node was low on resource: pids. Threshold quantity: 2Gi, available: 3. ");
        assert!(annotations.is_empty());
        assert_eq!(verdict(&unknown, &[], &Observations::new(), 1), None);
    }
}
