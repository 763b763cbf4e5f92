//! Local storage limits: finds pods that exceed them. Pure.
//!
//! Implements spec 05 §3.6.

use super::{
    message::EvictionVerdict,
    signals::Layout,
    usage::{Candidate, PodUse},
};
use berth_types::{
    Pod,
    quantity::{Amount, QuantityFormat},
    resources::{EPHEMERAL_STORAGE, Overhead, pod_limits},
};

/// Returns whether a pod has a limit on local storage: usage is only measured for these.
pub fn has_limits(pod: &Pod) -> bool {
    empty_dirs(pod).next().is_some() || total(pod).is_some()
}

/// Why a pod is evicted for its own limits: the first limit that it exceeds. `None` if it exceeds none, or if its usage
/// is unknown.
pub fn exceeded(candidate: &Candidate, layout: Layout) -> Option<EvictionVerdict> {
    let (pod, usage) = (&candidate.pod, candidate.usage.as_ref()?);
    let (signal, message) = empty_dir(pod, usage)
        .map(|message| ("emptydirfs.limit", message))
        .or_else(|| Some(("ephemeralpodfs.limit", whole_pod(pod, usage)?)))
        .or_else(|| Some(("ephemeralcontainerfs.limit", container(pod, usage, layout)?)))?;
    Some(EvictionVerdict { message, annotations: Vec::new(), signal, is_disruption: false, grace: 1 })
}

fn empty_dir(pod: &Pod, usage: &PodUse) -> Option<String> {
    let used = |name: &str| usage.volumes.iter().find(|(known, _)| known == name).map(|(_, used)| bytes(used.bytes));
    let (name, limit) = empty_dirs(pod).find(|(name, limit)| used(name).is_some_and(|used| used > *limit))?;
    Some(format!("Usage of EmptyDir volume {name:?} exceeds the limit {:?}. ", limit.canonical()))
}

/// `emptyDir` volumes with a positive size limit, and the limit.
fn empty_dirs(pod: &Pod) -> impl Iterator<Item = (String, Amount)> {
    pod.spec().volumes().filter_map(|volume| {
        let limit = Amount::try_from(volume.empty_dir.as_ref()?.size_limit.as_ref()?).ok()?;
        (!limit.is_zero() && !limit.is_negative()).then_some((volume.name, limit))
    })
}

fn total(pod: &Pod) -> Option<Amount> {
    pod_limits(pod.spec(), Overhead::Included).get(EPHEMERAL_STORAGE).copied()
}

fn whole_pod(pod: &Pod, usage: &PodUse) -> Option<String> {
    let limit = total(pod)?;
    let text =
        || format!("Pod ephemeral local storage usage exceeds the total limit of containers {}. ", limit.canonical());
    (bytes(usage.storage?) > limit).then(text)
}

fn container(pod: &Pod, usage: &PodUse, layout: Layout) -> Option<String> {
    usage.containers.iter().find_map(|container| {
        let spec = pod.containers().iter().find(|spec| spec.name == container.name)?;
        let limit = spec.resources.as_ref()?.limits.as_ref()?.get(EPHEMERAL_STORAGE)?;
        let limit = Amount::try_from(limit).ok().filter(|limit| !limit.is_zero())?;
        let rootfs = container.rootfs.filter(|_| layout != Layout::DedicatedImages);
        let used =
            [rootfs, container.logs].into_iter().flatten().fold(0_u64, |sum, used| sum.saturating_add(used.bytes));
        let (name, text) = (&container.name, limit.canonical());
        (bytes(used) > limit).then(|| format!("Container {name} exceeded its local ephemeral storage limit {text:?}. "))
    })
}

fn bytes(number: u64) -> Amount {
    Amount::from_value(i64::try_from(number).unwrap_or(i64::MAX), QuantityFormat::BinarySi)
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use serde_json::{Value, json};

    use super::{
        super::usage::{ContainerUse, DiskUse},
        *,
    };

    const GI: u64 = 1 << 30;

    fn pod(spec: Value) -> Arc<Pod> {
        let object = json!({"metadata": {"name": "p", "namespace": "n", "uid": "u"}, "spec": spec});
        Arc::new(Pod::new(serde_json::from_value(object).expect("a pod")).expect("complete"))
    }

    fn limited(limit: &str) -> Value {
        json!({"name": "c", "resources": {"limits": {"ephemeral-storage": limit}}})
    }

    fn signal_and_message(spec: Value, usage: PodUse, layout: Layout) -> Option<(&'static str, String)> {
        let verdict = exceeded(&Candidate { pod: pod(spec), usage: Some(usage) }, layout)?;
        assert!(!verdict.is_disruption && verdict.annotations.is_empty() && verdict.grace == 1);
        Some((verdict.signal, verdict.message))
    }

    fn volume(used: u64) -> PodUse {
        PodUse { volumes: vec![("data".to_owned(), DiskUse { bytes: used, inodes: 1 })], ..PodUse::default() }
    }

    #[test]
    fn an_empty_dir_that_is_too_large() {
        // AC-05-19
        let spec =
            |limit: &str| json!({"containers": [], "volumes": [{"name": "data", "emptyDir": {"sizeLimit": limit}}]});
        let message = "Usage of EmptyDir volume \"data\" exceeds the limit \"1Gi\". ".to_owned();
        assert_eq!(
            signal_and_message(spec("1Gi"), volume(GI + 1), Layout::Single),
            Some(("emptydirfs.limit", message))
        );
        for (limit, used) in [("1Gi", GI), ("0", GI)] {
            assert_eq!(signal_and_message(spec(limit), volume(used), Layout::Single), None, "{limit} {used}");
        }
        assert_eq!(signal_and_message(spec("1Gi"), PodUse::default(), Layout::Single), None, "not measured yet");
    }

    #[test]
    fn a_pod_that_takes_more_than_its_containers_may() {
        let using = |storage| PodUse { storage: Some(storage), ..PodUse::default() };
        let spec = json!({"containers": [limited("1Gi"), {"name": "free"}, limited("512Mi")]});
        let message = "Pod ephemeral local storage usage exceeds the total limit of containers 1536Mi. ".to_owned();
        let result_for = |spec: &Value, used| signal_and_message(spec.clone(), using(used), Layout::Single);
        assert_eq!(result_for(&spec, GI * 3 / 2 + 1), Some(("ephemeralpodfs.limit", message)));
        assert_eq!(result_for(&spec, GI * 3 / 2), None);
        assert_eq!(
            result_for(&json!({"containers": [limited("0")]}), 1).map(|(signal, _)| signal),
            Some("ephemeralpodfs.limit")
        );
        assert_eq!(result_for(&json!({"containers": [{"name": "c"}]}), u64::MAX), None);
    }

    #[test]
    fn a_container_that_takes_more_than_it_may() {
        let disk = |bytes| Some(DiskUse { bytes, inodes: 1 });
        let using = |rootfs, logs| {
            let container = ContainerUse { name: "c".to_owned(), rootfs: disk(rootfs), logs: disk(logs), memory: None };
            PodUse { containers: vec![container], ..PodUse::default() }
        };
        let spec = json!({"containers": [limited("1Gi")], "initContainers": []});
        let message = "Container c exceeded its local ephemeral storage limit \"1Gi\". ".to_owned();
        assert_eq!(
            signal_and_message(spec.clone(), using(GI, 1), Layout::Single),
            Some(("ephemeralcontainerfs.limit", message))
        );
        assert_eq!(signal_and_message(spec.clone(), using(GI, 1), Layout::DedicatedImages), None);
        assert_eq!(signal_and_message(spec.clone(), using(GI - 1, 1), Layout::Single), None);
        assert_eq!(signal_and_message(json!({"containers": [limited("0")]}), using(1, 1), Layout::Single), None);
    }

    #[test]
    fn only_pods_with_limits_are_measured() {
        for (spec, expected) in [
            (json!({"containers": [{"name": "c"}]}), false),
            (json!({"containers": [limited("1Gi")]}), true),
            (json!({"containers": [], "volumes": [{"name": "d", "emptyDir": {}}]}), false),
            (json!({"containers": [], "volumes": [{"name": "d", "emptyDir": {"sizeLimit": "1"}}]}), true),
        ] {
            assert_eq!(has_limits(&pod(spec.clone())), expected, "{spec}");
        }
    }
}
