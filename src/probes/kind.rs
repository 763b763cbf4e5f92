//! Probe kinds, handlers, and timing, read from the container spec. Pure.
//!
//! Implements spec 05 §1.1.

use std::time::Duration;

use berth_types::{ContainerKind, Pod, api};

/// Liveness, readiness, or startup.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub enum ProbeKind {
    /// Determines whether the container has started; the other probes wait for it.
    Startup,
    /// Determines whether the container may receive requests.
    Readiness,
    /// Determines whether the container has to be restarted.
    Liveness,
}

impl ProbeKind {
    /// All kinds, in the order in which their probes are started.
    pub const ALL: [Self; 3] = [Self::Startup, Self::Readiness, Self::Liveness];

    /// Name in messages and metric labels.
    pub fn label(self) -> &'static str {
        match self {
            Self::Startup => "Startup",
            Self::Readiness => "Readiness",
            Self::Liveness => "Liveness",
        }
    }

    /// The probe of that kind that a container declares.
    pub fn of(self, container: &api::Container) -> Option<&api::Probe> {
        match self {
            Self::Startup => container.startup_probe.as_ref(),
            Self::Readiness => container.readiness_probe.as_ref(),
            Self::Liveness => container.liveness_probe.as_ref(),
        }
    }
}

/// Handler of a probe.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Handler {
    /// `httpGet`: an HTTP request.
    Http,
    /// `grpc`: a health check.
    Grpc,
    /// `exec`: a command in the container.
    Exec,
    /// `tcpSocket`: a connection.
    Tcp,
}

impl Handler {
    /// Name in metric labels.
    pub fn label(self) -> &'static str {
        match self {
            Self::Http => "http",
            Self::Grpc => "grpc",
            Self::Exec => "exec",
            Self::Tcp => "tcp",
        }
    }

    /// The handler that a probe declares; [`Self::Tcp`] if it declares none of the others.
    pub fn of(probe: &api::Probe) -> Self {
        if probe.exec.is_some() {
            Self::Exec
        } else if probe.http_get.is_some() {
            Self::Http
        } else if probe.grpc.is_some() {
            Self::Grpc
        } else {
            Self::Tcp
        }
    }
}

/// Maximum period: a longer one is equivalent to never, and exceeds the range of the timer wheel.
const LONGEST_PERIOD: Duration = Duration::from_secs(365 * 24 * 3600);

/// Timing and thresholds of a probe; missing or out-of-range values have their defaults.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct ProbeTiming {
    /// Delay from the container's start to the first attempt, in whole seconds; default 0.
    pub initial_delay: u64,
    /// Interval between attempts; default 10 s, at most a year.
    pub period: Duration,
    /// Timeout of one attempt; default 1 s.
    pub timeout: Duration,
    /// Consecutive successes after which the result becomes success; default 1.
    pub success_threshold: u32,
    /// Consecutive failures after which the result becomes failure; default 3.
    pub failure_threshold: u32,
}

impl ProbeTiming {
    /// Reads timing and thresholds from the spec.
    pub fn of(probe: &api::Probe) -> Self {
        let at_least_one = |value: Option<i32>, default: u32| {
            value.and_then(|v| u32::try_from(v).ok()).filter(|v| *v > 0).unwrap_or(default)
        };
        let seconds = |value, default| Duration::from_secs(u64::from(at_least_one(value, default)));
        Self {
            initial_delay: probe.initial_delay_seconds.and_then(|v| u64::try_from(v).ok()).unwrap_or_default(),
            period: seconds(probe.period_seconds, 10).min(LONGEST_PERIOD),
            timeout: seconds(probe.timeout_seconds, 1),
            success_threshold: at_least_one(probe.success_threshold, 1),
            failure_threshold: at_least_one(probe.failure_threshold, 3),
        }
    }
}

/// One probe that a pod declares.
#[derive(Clone, Copy, Debug)]
pub struct DeclaredProbe<'a> {
    /// Container of the probe.
    pub container: &'a api::Container,
    /// Whether the container is a regular one or a sidecar (`Init`).
    pub container_kind: ContainerKind,
    /// Kind of the probe.
    pub kind: ProbeKind,
    /// Spec of the probe.
    pub probe: &'a api::Probe,
}

/// All probes of a pod, those of regular containers and of sidecars, in the order in which they are started.
pub fn declared(pod: &Pod) -> impl Iterator<Item = DeclaredProbe<'_>> {
    let regular = pod.containers().iter().map(|c| (ContainerKind::Regular, c));
    let sidecars = pod.init_containers().iter().filter(|c| Pod::is_sidecar(c)).map(|c| (ContainerKind::Init, c));
    regular.chain(sidecars).flat_map(|(place, container)| {
        ProbeKind::ALL.into_iter().filter_map(move |kind| {
            Some(DeclaredProbe { container, container_kind: place, kind, probe: kind.of(container)? })
        })
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::probes::testing::pod;
    use serde_json::json;

    #[test]
    fn what_is_missing_has_its_default() {
        let pace = |value| ProbeTiming::of(&serde_json::from_value(value).expect("a probe"));
        let default = ProbeTiming {
            initial_delay: 0,
            period: Duration::from_secs(10),
            timeout: Duration::from_secs(1),
            success_threshold: 1,
            failure_threshold: 3,
        };
        assert_eq!(pace(json!({})), default);
        let odd = json!({"periodSeconds": 0, "timeoutSeconds": -1, "successThreshold": 0, "failureThreshold": -3,
            "initialDelaySeconds": -5});
        assert_eq!(pace(odd), default, "never a period of nothing");
        let all = json!({"periodSeconds": 2, "timeoutSeconds": 3, "successThreshold": 4, "failureThreshold": 5,
            "initialDelaySeconds": 6});
        let timing = pace(all);
        assert_eq!((timing.period.as_secs(), timing.timeout.as_secs()), (2, 3));
        assert_eq!((timing.success_threshold, timing.failure_threshold, timing.initial_delay), (4, 5, 6));
    }

    #[test]
    fn regular_containers_and_sidecars_have_probes() {
        let probe = json!({"tcpSocket": {"port": 1}});
        let pod = pod(json!({
            "initContainers": [
                {"name": "plain", "startupProbe": probe},
                {"name": "side", "restartPolicy": "Always", "livenessProbe": probe},
            ],
            "containers": [
                {"name": "a", "livenessProbe": probe, "readinessProbe": probe, "startupProbe": probe},
                {"name": "b"},
            ],
        }));
        let all: Vec<_> = declared(&pod).map(|d| (d.container.name.as_str(), d.kind)).collect();
        assert_eq!(
            all,
            [
                ("a", ProbeKind::Startup),
                ("a", ProbeKind::Readiness),
                ("a", ProbeKind::Liveness),
                ("side", ProbeKind::Liveness)
            ]
        );
    }
}
