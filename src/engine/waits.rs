//! What pods wait for, in few words: the label of a metric, whatever the stage is called. Pure.

/// A wait.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug)]
pub enum Wait {
    /// A look at what runs.
    Look,
    /// Volumes, to come or to go.
    Volumes,
    /// The pod's control group.
    Cgroup,
    /// Secrets for its images.
    Secrets,
    /// Its sandbox.
    Sandbox,
    /// An image.
    Image,
    /// What a container is made of.
    Configuration,
    /// A container that is made.
    Create,
    /// A container that is started.
    Start,
    /// A hook of a container.
    Hook,
    /// A container that ends.
    Stop,
    /// What is removed.
    Removal,
    /// A resize.
    Resize,
    /// The runtime.
    Runtime,
    /// The network.
    Network,
    /// The end of a back-off.
    BackOff,
    /// The next try after an error.
    Retry,
    /// An init container to end.
    Init,
    /// A startup probe to succeed.
    Startup,
    /// A readiness probe to succeed.
    Readiness,
    /// A readiness gate to open.
    Gate,
    /// Another pod of its name to be gone.
    Turn,
    /// Others to make room for it.
    Preemption,
    /// Labels of the node that it selects.
    NodeLabels,
    /// Something else.
    Other,
}

/// How stages begin, and what that is.
const STAGES: &[(&str, Wait)] = &[
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
/// The stage of a worker that has nothing to do.
pub const IDLE: &str = "idle";
/// Stages in which nothing is waited for.
const RESTS: &[&str] = &[IDLE, "finished"];

impl Wait {
    /// What a stage is; `None` where nothing is waited for.
    pub fn of(stage: &str) -> Option<Self> {
        if RESTS.contains(&stage) {
            return None;
        }
        let found = STAGES.iter().find(|(begins, _)| stage.starts_with(begins));
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
        for (stage, expected) in [
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
            assert_eq!(Wait::of(stage).map(Wait::label), expected, "{stage}");
        }
    }
}
