//! Classifies the steps of pod workers into a closed set of waits for a metric label. Pure.

/// What a pod waits for.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug)]
pub enum Wait {
    /// An observation of the runtime.
    Look,
    /// Volumes to be mounted or unmounted.
    Volumes,
    /// The pod's cgroup.
    Cgroup,
    /// Image pull secrets or credentials.
    Secrets,
    /// The pod sandbox.
    Sandbox,
    /// An image.
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
    Turn,
    /// Preemption of other pods.
    Preemption,
    /// Node labels that the pod selects.
    NodeLabels,
    /// Any other step.
    Other,
}

/// Prefixes of step names and their waits; the first match wins.
const STEPS: &[(&str, Wait)] = &[
    ("runtime status", Wait::Look),
    ("PodSandboxStatus", Wait::Look),
    ("volumes", Wait::Volumes),
    ("unmount volumes", Wait::Volumes),
    ("pod cgroup", Wait::Cgroup),
    ("image pull secrets", Wait::Secrets),
    ("credentials for ", Wait::Secrets),
    ("RunPodSandbox", Wait::Sandbox),
    ("ImageStatus ", Wait::Image),
    ("image ", Wait::Image),
    ("configuration of ", Wait::Configuration),
    ("CreateContainer ", Wait::Create),
    ("StartContainer ", Wait::Start),
    ("postStart hook of ", Wait::Hook),
    ("preStop hook of ", Wait::Hook),
    ("kill", Wait::Stop),
    ("turn of ", Wait::Stop),
    ("StopContainer ", Wait::Stop),
    ("StopPodSandbox", Wait::Stop),
    ("remove ", Wait::Removal),
    ("RemoveContainer ", Wait::Removal),
    ("in-place resize", Wait::Resize),
    ("runtime", Wait::Runtime),
    ("network", Wait::Network),
    ("back-off", Wait::BackOff),
    ("next try", Wait::Retry),
    ("init container ", Wait::Init),
    ("startup of ", Wait::Startup),
    ("readiness of ", Wait::Readiness),
    ("readiness gate ", Wait::Gate),
    ("turn behind ", Wait::Turn),
    ("removal of ", Wait::Removal),
    ("preemption ", Wait::Preemption),
    ("labels of the node", Wait::NodeLabels),
];
/// The step of an idle worker.
pub const IDLE: &str = "idle";
/// Steps in which a worker waits for nothing.
const RESTS: &[&str] = &[IDLE, "finished"];

impl Wait {
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
            Self::Look => "look",
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
            Self::Turn => "turn",
            Self::Preemption => "preemption",
            Self::NodeLabels => "node_labels",
            Self::Other => "other",
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::engine::Line;

    #[test]
    fn every_stage_has_its_label() {
        for (step, expected) in [
            ("idle", None),
            ("finished", None),
            ("runtime status", Some("look")),
            ("runtime", Some("runtime")),
            ("image pull secrets", Some("secrets")),
            ("image busybox:1", Some("image")),
            ("preStop hook of main", Some("hook")),
            ("turn of main to stop", Some("stop")),
            ("remove pod directory", Some("removal")),
            ("RemoveContainer main", Some("removal")),
            ("back-off", Some("back_off")),
            ("back-off of image busybox:1", Some("back_off")),
            ("next try of volumes", Some("retry")),
            ("readiness gate example.com/up", Some("gate")),
            (Line::Name.name(), Some("turn")),
            (Line::Runtime.name(), Some("runtime")),
            (Line::Removal.name(), Some("removal")),
            (Line::Preemption.name(), Some("preemption")),
            (Line::NodeLabels.name(), Some("node_labels")),
            ("container runtime is down", Some("other")),
            ("", Some("other")),
        ] {
            assert_eq!(Wait::of(step).map(Wait::label), expected, "{step}");
        }
    }
}
