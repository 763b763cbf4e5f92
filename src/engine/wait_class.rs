//! Classifies the steps of pod workers into a closed set of waits for a metric label. Pure.

/// What a pod waits for.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug)]
pub enum WaitClass {
    /// An observation of the runtime.
    Observation,
    /// Volumes to be mounted or unmounted.
    Volumes,
    /// The pod's cgroup.
    Cgroup,
    /// Image pull secrets or credentials.
    Secrets,
    /// The pod sandbox.
    Sandbox,
    /// Check or pull of a container's image.
    Image,
    /// The configuration of a container.
    Configuration,
    /// Creation of a container.
    Create,
    /// Start of a container.
    Start,
    /// A lifecycle hook of a container.
    Hook,
    /// A container to stop.
    Stop,
    /// Removal of containers, sandboxes, or leftovers.
    Removal,
    /// An in-place resize.
    Resize,
    /// The runtime to be ready.
    Runtime,
    /// The network to be ready.
    Network,
    /// The end of a back-off.
    BackOff,
    /// The next retry after an error.
    Retry,
    /// An init container to exit.
    Init,
    /// A startup probe to succeed.
    Startup,
    /// A readiness probe to succeed.
    Readiness,
    /// A readiness gate to become true.
    Gate,
    /// Another pod of the same full name to terminate.
    FullName,
    /// Preemption of other pods.
    Preemption,
    /// Node labels that the pod selects.
    NodeLabels,
    /// Devices to be allocated, or their plugin to register.
    Devices,
    /// Any other step.
    Other,
}

/// Prefixes of step names and their waits; the first match wins.
const STEPS: &[(&str, WaitClass)] = &[
    ("runtime status", WaitClass::Observation),
    ("PodSandboxStatus", WaitClass::Observation),
    ("volumes", WaitClass::Volumes),
    ("unmount volumes", WaitClass::Volumes),
    ("pod cgroup", WaitClass::Cgroup),
    ("image pull secrets", WaitClass::Secrets),
    ("credentials for ", WaitClass::Secrets),
    ("RunPodSandbox", WaitClass::Sandbox),
    ("ImageStatus ", WaitClass::Image),
    ("image ", WaitClass::Image),
    ("configuration of ", WaitClass::Configuration),
    ("CreateContainer ", WaitClass::Create),
    ("StartContainer ", WaitClass::Start),
    ("postStart hook of ", WaitClass::Hook),
    ("preStop hook of ", WaitClass::Hook),
    ("kill", WaitClass::Stop),
    ("termination ordering of ", WaitClass::Stop),
    ("StopContainer ", WaitClass::Stop),
    ("StopPodSandbox", WaitClass::Stop),
    ("remove ", WaitClass::Removal),
    ("RemoveContainer ", WaitClass::Removal),
    ("in-place resize", WaitClass::Resize),
    ("runtime", WaitClass::Runtime),
    ("network", WaitClass::Network),
    ("back-off", WaitClass::BackOff),
    ("retry", WaitClass::Retry),
    ("init container ", WaitClass::Init),
    ("startup of ", WaitClass::Startup),
    ("readiness of ", WaitClass::Readiness),
    ("readiness gate ", WaitClass::Gate),
    ("termination of ", WaitClass::FullName),
    ("removal of ", WaitClass::Removal),
    ("preemption ", WaitClass::Preemption),
    ("node labels", WaitClass::NodeLabels),
    ("devices", WaitClass::Devices),
    ("resource claims", WaitClass::Devices),
    ("release of resource claims", WaitClass::Stop),
];
/// The step of an idle worker.
pub const IDLE: &str = "idle";
/// Steps in which a worker waits for nothing.
const RESTS: &[&str] = &[IDLE, "finished"];

impl WaitClass {
    /// Classifies a step; `None` if the worker waits for nothing.
    pub fn of(step: &str) -> Option<Self> {
        if RESTS.contains(&step) {
            return None;
        }
        let found = STEPS.iter().find(|(begins, _)| step.starts_with(begins));
        Some(found.map_or(Self::Other, |(_, wait)| *wait))
    }

    /// The label's value.
    pub fn label(self) -> &'static str {
        match self {
            Self::Observation => "observation",
            Self::Volumes => "volumes",
            Self::Cgroup => "cgroup",
            Self::Secrets => "secrets",
            Self::Sandbox => "sandbox",
            Self::Image => "image",
            Self::Configuration => "configuration",
            Self::Create => "create",
            Self::Start => "start",
            Self::Hook => "hook",
            Self::Stop => "stop",
            Self::Removal => "removal",
            Self::Resize => "resize",
            Self::Runtime => "runtime",
            Self::Network => "network",
            Self::BackOff => "back_off",
            Self::Retry => "retry",
            Self::Init => "init",
            Self::Startup => "startup",
            Self::Readiness => "readiness",
            Self::Gate => "gate",
            Self::FullName => "full_name",
            Self::Preemption => "preemption",
            Self::NodeLabels => "node_labels",
            Self::Devices => "devices",
            Self::Other => "other",
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::engine::StartWait;

    #[test]
    fn every_stage_has_its_label() {
        for (step, expected) in [
            ("idle", None),
            ("finished", None),
            ("runtime status", Some("observation")),
            ("runtime", Some("runtime")),
            ("image pull secrets", Some("secrets")),
            ("image busybox:1", Some("image")),
            ("preStop hook of main", Some("hook")),
            ("termination ordering of main", Some("stop")),
            ("remove pod directory", Some("removal")),
            ("RemoveContainer main", Some("removal")),
            ("back-off", Some("back_off")),
            ("back-off of image busybox:1", Some("back_off")),
            ("retry of volumes", Some("retry")),
            ("readiness gate example.com/up", Some("gate")),
            (StartWait::Name.name(), Some("full_name")),
            (StartWait::Runtime.name(), Some("runtime")),
            (StartWait::Removal.name(), Some("removal")),
            (StartWait::Preemption.name(), Some("preemption")),
            (StartWait::NodeLabels.name(), Some("node_labels")),
            (StartWait::Devices.name(), Some("devices")),
            ("container runtime is down", Some("other")),
            ("", Some("other")),
        ] {
            assert_eq!(WaitClass::of(step).map(WaitClass::label), expected, "{step}");
        }
    }
}
