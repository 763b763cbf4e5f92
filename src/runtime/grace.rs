//! Termination grace period of a container, and other facts needed to stop it. Pure.
//!
//! A pod may be known only by the annotations of its containers: after a restart of the agent they are
//! the only record (spec 03a §6.1, §9).

use std::{collections::HashMap, time::Duration};

use super::actions::ContainerKillReason;
use berth_types::{ContainerKind, Pod, api};

/// Minimum grace period, so that a signal can be handled at all.
pub const MINIMUM: Duration = Duration::from_secs(2);

/// Annotation with `deletionGracePeriodSeconds`.
pub const DELETION_GRACE: &str = "io.kubernetes.pod.deletionGracePeriod";
/// Annotation with `terminationGracePeriodSeconds`.
pub const TERMINATION_GRACE: &str = "io.kubernetes.pod.terminationGracePeriod";
/// Annotation with the preStop handler as JSON.
pub const PRE_STOP: &str = "io.kubernetes.container.preStopHandler";
/// Annotation with the container's ports as JSON.
pub const PORTS: &str = "io.kubernetes.container.ports";

/// Parts of a container's definition needed to stop it. Grace periods are in seconds.
#[derive(Clone, PartialEq, Debug, Default)]
pub struct StopFacts {
    /// `metadata.deletionGracePeriodSeconds`.
    pub deletion: Option<i64>,
    /// `spec.terminationGracePeriodSeconds`.
    pub termination: Option<i64>,
    /// `terminationGracePeriodSeconds` of the startup probe.
    pub startup_probe: Option<i64>,
    /// `terminationGracePeriodSeconds` of the liveness probe.
    pub liveness_probe: Option<i64>,
    /// The preStop hook.
    pub pre_stop: Option<api::LifecycleHandler>,
    /// Container ports, for hooks that refer to one by name.
    pub ports: Vec<api::ContainerPort>,
    /// Field path of the container in events.
    pub field_path: Option<String>,
}

impl StopFacts {
    /// From the definition; `None` if the pod has no container of that name.
    pub fn from_spec(pod: &Pod, container: &str) -> Option<Self> {
        let facts = Self {
            deletion: pod.metadata.deletion_grace_period_seconds,
            termination: pod.spec().termination_grace_period_seconds,
            ..Self::default()
        };
        if let Some((kind, found)) = pod.container(container) {
            let own = |probe: &Option<api::Probe>| probe.as_ref().and_then(|p| p.termination_grace_period_seconds);
            return Some(Self {
                startup_probe: own(&found.startup_probe),
                liveness_probe: own(&found.liveness_probe),
                pre_stop: found.lifecycle.as_ref().and_then(|l| l.pre_stop.clone()),
                ports: found.ports.clone().unwrap_or_default(),
                field_path: Some(kind.field_path(container)),
                ..facts
            });
        }
        let ephemeral = pod.ephemeral_containers().iter().any(|c| c.name == container);
        ephemeral.then(|| Self { field_path: Some(ContainerKind::Ephemeral.field_path(container)), ..facts })
    }

    /// From the annotations of a container; values that do not parse count as absent.
    pub fn from_annotations(annotations: &HashMap<String, String>) -> Self {
        let number = |key: &str| annotations.get(key).and_then(|text| text.parse().ok());
        Self {
            deletion: number(DELETION_GRACE),
            termination: number(TERMINATION_GRACE),
            pre_stop: annotations.get(PRE_STOP).and_then(|text| serde_json::from_str(text).ok()),
            ports: annotations.get(PORTS).and_then(|text| serde_json::from_str(text).ok()).unwrap_or_default(),
            ..Self::default()
        }
    }

    /// The grace period without an override (spec 03a §9).
    pub fn period(&self, cause: ContainerKillReason) -> Duration {
        let probe = match cause {
            ContainerKillReason::StartupProbe => self.startup_probe,
            ContainerKillReason::LivenessProbe => self.liveness_probe,
            ContainerKillReason::Unspecified | ContainerKillReason::FailedPostStartHook => None,
        };
        let seconds = match (self.deletion, self.termination) {
            (Some(deletion), _) => deletion,
            (None, Some(termination)) => probe.unwrap_or(termination),
            (None, None) => return MINIMUM,
        };
        Duration::from_secs(seconds.max(0).unsigned_abs())
    }
}

/// Rounds the rest of a grace period up to whole seconds.
pub fn whole_seconds(left: Duration) -> Duration {
    Duration::from_secs(left.as_secs() + u64::from(left.subsec_nanos() > 0))
}

/// The containers a sidecar waits for before it stops: all regular ones, and the sidecars that come
/// later in the specification. Other containers wait for none.
pub fn waits_for<'a>(pod: &'a Pod, container: &str) -> Vec<&'a str> {
    let all = pod.init_containers();
    let Some(index) = all.iter().position(|c| c.name == container && Pod::is_sidecar(c)) else { return Vec::new() };
    let later = all.iter().skip(index + 1).filter(|c| Pod::is_sidecar(c));
    pod.containers().iter().chain(later).map(|c| c.name.as_str()).collect()
}

#[cfg(test)]
mod tests {
    use serde_json::{Value, json};

    use super::*;

    fn pod(metadata: Value, spec: Value) -> Pod {
        let mut object = json!({"metadata": {"name": "p", "namespace": "n", "uid": "u"}, "spec": spec});
        for (key, value) in metadata.as_object().expect("an object") {
            object["metadata"][key] = value.clone();
        }
        Pod::new(serde_json::from_value(object).expect("a pod")).expect("complete")
    }

    fn seconds(metadata: Value, grace: Option<i64>, cause: ContainerKillReason) -> u64 {
        let probe = json!({"terminationGracePeriodSeconds": 5});
        let pod = pod(
            metadata,
            json!({"terminationGracePeriodSeconds": grace,
                "containers": [{"name": "c", "livenessProbe": probe}]}),
        );
        StopFacts::from_spec(&pod, "c").expect("a container").period(cause).as_secs()
    }

    #[test]
    fn the_most_special_grace_period_wins() {
        assert_eq!(seconds(json!({}), None, ContainerKillReason::Unspecified), 2);
        assert_eq!(seconds(json!({}), Some(60), ContainerKillReason::Unspecified), 60);
        // AC-03a-9
        assert_eq!(seconds(json!({}), Some(60), ContainerKillReason::LivenessProbe), 5);
        assert_eq!(seconds(json!({}), Some(60), ContainerKillReason::StartupProbe), 60);
        assert_eq!(seconds(json!({}), Some(3), ContainerKillReason::LivenessProbe), 5, "may be larger");
        assert_eq!(seconds(json!({}), None, ContainerKillReason::LivenessProbe), 2);
        // AC-03a-10
        assert_eq!(seconds(json!({"deletionGracePeriodSeconds": 0}), Some(60), ContainerKillReason::LivenessProbe), 0);
        assert_eq!(seconds(json!({"deletionGracePeriodSeconds": -4}), Some(60), ContainerKillReason::Unspecified), 0);
    }

    #[test]
    fn annotations_stand_in_for_a_lost_definition() {
        let annotations = HashMap::from([
            (DELETION_GRACE.to_owned(), "x".to_owned()),
            (TERMINATION_GRACE.to_owned(), "7".to_owned()),
            (PRE_STOP.to_owned(), r#"{"exec":{"command":["a"]}}"#.to_owned()),
            (PORTS.to_owned(), r#"[{"name":"http","containerPort":80}]"#.to_owned()),
        ]);
        let facts = StopFacts::from_annotations(&annotations);
        assert_eq!(facts.period(ContainerKillReason::Unspecified), Duration::from_secs(7));
        assert!(facts.pre_stop.is_some_and(|hook| hook.exec.is_some()));
        assert_eq!(facts.ports.len(), 1);
        assert_eq!(StopFacts::from_annotations(&HashMap::new()).period(ContainerKillReason::Unspecified), MINIMUM);
    }

    #[test]
    fn sidecars_stop_after_regular_containers_in_reverse_order() {
        let pod = pod(
            json!({}),
            json!({"initContainers": [
                {"name": "s1", "restartPolicy": "Always"}, {"name": "i"}, {"name": "s2", "restartPolicy": "Always"}],
                "containers": [{"name": "a"}, {"name": "b"}]}),
        );
        assert_eq!(waits_for(&pod, "s1"), ["a", "b", "s2"]);
        assert_eq!(waits_for(&pod, "s2"), ["a", "b"]);
        assert!(waits_for(&pod, "i").is_empty() && waits_for(&pod, "a").is_empty());
    }

    #[test]
    fn begun_seconds_are_still_there() {
        // AC-03a-11: 7.4 s of 10 s used.
        assert_eq!(whole_seconds(Duration::from_millis(2600)), Duration::from_secs(3));
        assert_eq!(whole_seconds(Duration::from_secs(3)), Duration::from_secs(3));
    }
}
