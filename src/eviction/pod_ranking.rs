//! Ranks pods for eviction. Pure.
//!
//! Implements spec 05 §3.5, §3.7.

use std::cmp::Reverse;

use super::{signals::Layout, usage::Candidate};
use berth_config::eviction::Signal;

/// Sorts pods by eviction order for that signal.
///
/// Memory and disks: pods that exceed their request first, then lower priority, then larger excess over the request.
/// Processes: lower priority, then more processes. Pods of unknown usage precede their equals.
pub fn rank(candidates: &mut [Candidate], signal: Signal, layout: Layout) {
    let key = |candidate: &Candidate| {
        let priority = candidate.pod.spec().priority.unwrap_or_default();
        let (taken, requested) = (candidate.used(signal, layout), candidate.requested(signal));
        let over = i128::from(taken).saturating_sub(i128::from(requested));
        let is_known = candidate.usage.is_some();
        // Processes have no requests: using some is no excess.
        let (first, is_within) = if signal == Signal::Pid { (true, true) } else { (is_known, over <= 0) };
        (first, is_within, priority, is_known, Reverse(over))
    };
    candidates.sort_by_cached_key(key);
}

/// Returns whether a pod is never evicted (critical pods).
pub fn is_exempt(candidate: &Candidate) -> bool {
    candidate.pod.is_critical()
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use serde_json::{Value, json};

    use super::{
        super::usage::{ContainerUse, DiskUse, PodUse},
        *,
    };
    use berth_types::Pod;

    fn pod(name: &str, spec: &Value) -> Arc<Pod> {
        let mut object = json!({"metadata": {"name": name, "namespace": "n", "uid": name}, "spec": {
            "containers": [{"name": "c"}]}});
        for (key, value) in spec.as_object().expect("an object") {
            object["spec"][key] = value.clone();
        }
        Arc::new(Pod::new(serde_json::from_value(object).expect("a pod")).expect("complete"))
    }

    fn requesting(resource: &str, amount: &str) -> Value {
        json!({"containers": [{"name": "c", "resources": {"requests": {resource: amount}}}]})
    }

    fn using(name: &str, spec: &Value, usage: Option<PodUse>) -> Candidate {
        Candidate { pod: pod(name, spec), usage }
    }

    fn memory(bytes: u64) -> Option<PodUse> {
        Some(PodUse { memory: Some(bytes), ..PodUse::default() })
    }

    fn order(mut candidates: Vec<Candidate>, signal: Signal, layout: Layout) -> Vec<String> {
        rank(&mut candidates, signal, layout);
        candidates.iter().map(|candidate| candidate.pod.name().to_owned()).collect()
    }

    #[test]
    fn memory_of_who_takes_too_much() {
        let important = |mut spec: Value| {
            spec["priority"] = json!(1000);
            spec
        };
        let candidates = vec![
            using("within", &requesting("memory", "1k"), memory(1000)),
            using("over-a-little", &requesting("memory", "1k"), memory(1001)),
            using("important", &important(requesting("memory", "1")), memory(9999)),
            using("over-much", &requesting("memory", "1k"), memory(5000)),
            using("best-effort", &json!({}), memory(100)),
            using("unknown", &json!({}), None),
            using("at-pod-level", &json!({"resources": {"requests": {"memory": "10k"}}}), memory(9000)),
            using("overhead", &json!({"overhead": {"memory": "1M"}}), memory(50)),
        ];
        assert_eq!(
            order(candidates, Signal::Memory, Layout::Single),
            ["unknown", "over-much", "best-effort", "overhead", "over-a-little", "important", "within", "at-pod-level"]
        );
    }

    fn on_disk(rootfs: u64, logs: u64, volume: u64) -> Option<PodUse> {
        let used = |number: u64| DiskUse { bytes: number, inodes: number / 10 };
        let container = ContainerUse {
            name: "c".to_owned(),
            rootfs: Some(used(rootfs)),
            logs: Some(used(logs)),
            ..ContainerUse::default()
        };
        let volumes = vec![("data".to_owned(), used(volume)), ("elsewhere".to_owned(), used(1 << 40))];
        Some(PodUse { containers: vec![container], volumes, ..PodUse::default() })
    }

    #[test]
    fn disks_count_what_lies_on_them() {
        let spec = json!({"volumes": [{"name": "data", "emptyDir": {}},
                                      {"name": "elsewhere", "emptyDir": {"medium": "Memory"}}]});
        let candidates = || {
            vec![
                using("layers", &spec, on_disk(500, 10, 10)),
                using("logs", &spec, on_disk(10, 400, 10)),
                using("volumes", &spec, on_disk(10, 10, 450)),
            ]
        };
        let all = ["layers", "volumes", "logs"];
        let of_node = ["volumes", "logs", "layers"];
        let layers = ["layers", "logs", "volumes"];
        for (signal, layout, expected) in [
            (Signal::NodeFs, Layout::Single, all),
            (Signal::ImageFs, Layout::Single, all),
            (Signal::ContainerFs, Layout::Single, all),
            (Signal::NodeFs, Layout::DedicatedImages, of_node),
            (Signal::ImageFs, Layout::DedicatedImages, layers),
            (Signal::ContainerFsInodes, Layout::DedicatedImages, layers),
            (Signal::NodeFsInodes, Layout::Split, all),
            (Signal::ContainerFs, Layout::Split, all),
            // No data of a pod is on that file system: the order stays.
            (Signal::ImageFs, Layout::Split, ["layers", "logs", "volumes"]),
        ] {
            assert_eq!(order(candidates(), signal, layout), expected, "{} {layout:?}", signal.as_str());
        }
    }

    #[test]
    fn requests_count_in_bytes_only() {
        let request = requesting("ephemeral-storage", "1000");
        let candidates =
            || vec![using("modest", &json!({}), on_disk(300, 0, 0)), using("asks", &request, on_disk(900, 0, 0))];
        assert_eq!(order(candidates(), Signal::NodeFs, Layout::Single), ["modest", "asks"]);
        assert_eq!(order(candidates(), Signal::NodeFsInodes, Layout::Single), ["asks", "modest"]);
    }

    #[test]
    fn processes_of_who_matters_least() {
        let processes = |count| Some(PodUse { processes: Some(count), ..PodUse::default() });
        let candidates = vec![
            using("few", &json!({}), processes(1)),
            using("important", &json!({"priority": 5}), processes(900)),
            using("many", &json!({}), processes(100)),
            using("unknown", &json!({}), None),
            using("humble", &json!({"priority": -1}), processes(1)),
        ];
        assert_eq!(order(candidates, Signal::Pid, Layout::Single), ["humble", "unknown", "many", "few", "important"]);
    }

    #[test]
    fn critical_pods_stay() {
        // AC-05-20
        assert!(!is_exempt(&using("plain", &json!({"priority": 1_999_999_999}), None)));
        assert!(is_exempt(&using("critical", &json!({"priority": 2_000_000_000}), None)));
        for annotation in ["kubernetes.io/config.source", "kubernetes.io/config.mirror"] {
            let object = json!({"metadata": {"name": "s", "namespace": "n", "uid": "u",
                "annotations": {annotation: "file"}}, "spec": {"containers": []}});
            let pod = Arc::new(Pod::new(serde_json::from_value(object).expect("a pod")).expect("complete"));
            assert!(is_exempt(&Candidate { pod, usage: None }), "{annotation}");
        }
    }
}
