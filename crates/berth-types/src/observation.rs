//! Runtime observation of one pod: sandboxes, containers, addresses, and its generation. Pure.
//!
//! Each action on a pod increments the pod's generation; a decision uses only observations that began after the last
//! action. This replaces sleeping, polling, and comparisons of timestamps.

use std::{cmp::Reverse, net::IpAddr, sync::Arc};

use jiff::Timestamp;

use super::{ContainerId, PodRef, SandboxId};

/// Number of actions on one pod; an observation carries the number at which it *began*.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Default, Debug)]
pub struct Generation(pub u64);

/// CRI `PodSandboxState`.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum SandboxState {
    /// `SANDBOX_READY`.
    Ready,
    /// `SANDBOX_NOTREADY`.
    NotReady,
}

/// Network namespace of a sandbox.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum NetworkMode {
    /// The sandbox has its own.
    Pod,
    /// The sandbox uses the node's.
    Node,
}

/// Observation of one sandbox of a pod.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct ObservedSandbox {
    /// ID of the sandbox in the runtime.
    pub id: SandboxId,
    /// `metadata.attempt`.
    pub attempt: u32,
    /// Whether the sandbox is ready.
    pub state: SandboxState,
    /// Creation time, as the runtime reports it.
    pub created_at: Timestamp,
    /// Requested network namespace, as of the creation of the sandbox.
    pub network_mode: NetworkMode,
    /// Whether the status contained a `network` message.
    pub has_network: bool,
    /// Primary address first, then the additional ones; empty if one of them did not parse.
    pub ips: Vec<IpAddr>,
    /// Runtime handler of the sandbox.
    pub runtime_handler: String,
}

/// CRI `ContainerState`.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub enum ContainerState {
    /// Created, but not started.
    Created,
    /// The process of the container is running.
    Running,
    /// The process of the container has exited.
    Exited,
    /// The runtime reports an unknown state.
    Unknown,
}

/// Resources of a container as the runtime reports them; `None` where it does not.
#[derive(Clone, PartialEq, Eq, Debug, Default)]
pub struct ObservedResources {
    /// CPU request in milli-CPU, derived from the CPU shares.
    pub cpu_request_milli: Option<i64>,
    /// CPU limit in milli-CPU, derived from quota and period.
    pub cpu_limit_milli: Option<i64>,
    /// Memory limit in bytes; `None` if the runtime reports 0 or less.
    pub memory_limit_bytes: Option<i64>,
}

/// User that a container runs as.
#[derive(Clone, PartialEq, Eq, Debug, Default)]
pub struct ObservedUser {
    /// Numeric user ID of `user.linux.uid` in the CRI container status.
    pub uid: i64,
    /// Numeric primary group ID of `user.linux.gid` in the CRI container status.
    pub gid: i64,
    /// Numeric IDs of `user.linux.supplemental_groups` in the CRI container status, in its order.
    pub supplemental_groups: Vec<i64>,
}

/// Observation of one container instance.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct ObservedContainer {
    /// Container ID of the runtime.
    pub id: ContainerId,
    /// `metadata.name`.
    pub name: Arc<str>,
    /// Sandbox in which the container was created.
    pub sandbox: SandboxId,
    /// State of the instance.
    pub state: ContainerState,
    /// Creation time.
    pub created_at: Timestamp,
    /// Start time; `None` in state `Created`.
    pub started_at: Option<Timestamp>,
    /// Finish time; only in state `Exited`.
    pub finished_at: Option<Timestamp>,
    /// Exit code; 0 unless exited.
    pub exit_code: i32,
    /// Reason, as the runtime reports it; only in state `Exited`.
    pub reason: String,
    /// Runtime message and termination message joined (spec 03b §9); only in state `Exited`.
    pub message: String,
    /// `image.image` of the container status.
    pub image: String,
    /// `image_ref` of the container status: the API's `imageID`.
    pub image_ref: String,
    /// `image_id` of the container status; `image_ref` where the runtime does not report it.
    pub image_id: String,
    /// Spec hash from the annotation; `None` if absent or malformed.
    pub hash: Option<u32>,
    /// Restart count from the annotation; 0 if absent or malformed.
    pub restart_count: i32,
    /// Full path of the log file, as the runtime reports it.
    pub log_path: String,
    /// Resources, where the runtime reports them.
    pub resources: Option<ObservedResources>,
    /// User, where the runtime reports it.
    pub user: Option<ObservedUser>,
}

/// Observation of one pod.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct ObservedPod {
    /// Identity, from the runtime's metadata or from the caller.
    pub id: PodRef,
    /// Generation at which the observation began.
    pub generation: Generation,
    /// Wall time at which the observation began.
    pub began_at: Timestamp,
    /// Sandboxes, newest first: attempt descending, then creation time descending, then ID.
    pub sandboxes: Vec<ObservedSandbox>,
    /// All container instances, newest first: those of the newest sandbox, then by restart count, creation time (both
    /// descending), and ID. Times are compared last, because clocks may be set back.
    pub containers: Vec<ObservedContainer>,
    /// Addresses of the newest sandbox if it is ready; the previous addresses if no sandbox is ready.
    pub ips: Vec<IpAddr>,
}

impl ObservedPod {
    /// Creates an observation without sandboxes and containers.
    pub fn empty(id: PodRef, generation: Generation, began_at: Timestamp) -> Self {
        Self { id, generation, began_at, sandboxes: Vec::new(), containers: Vec::new(), ips: Vec::new() }
    }

    /// Whether the runtime has no sandbox and no container of the pod.
    pub fn is_absent(&self) -> bool {
        self.sandboxes.is_empty() && self.containers.is_empty()
    }

    /// Returns the newest instance of a container.
    pub fn newest(&self, name: &str) -> Option<&ObservedContainer> {
        self.containers.iter().find(|c| &*c.name == name)
    }

    /// Returns all running containers.
    pub fn running(&self) -> impl Iterator<Item = &ObservedContainer> {
        self.containers.iter().filter(|c| c.state == ContainerState::Running)
    }

    /// Whether any container is running or any sandbox is ready.
    pub fn is_alive(&self) -> bool {
        self.running().next().is_some() || self.sandboxes.iter().any(|s| s.state == SandboxState::Ready)
    }

    /// Returns the containers of the newest sandbox.
    pub fn active(&self) -> impl Iterator<Item = &ObservedContainer> {
        let newest = self.sandboxes.first().map(|s| &s.id);
        self.containers.iter().filter(move |c| Some(&c.sandbox) == newest)
    }

    /// Sorts sandboxes and containers into the documented order.
    pub fn sort(&mut self) {
        self.sandboxes
            .sort_by(|a, b| (b.attempt, b.created_at).cmp(&(a.attempt, a.created_at)).then_with(|| a.id.cmp(&b.id)));
        let sandboxes = &self.sandboxes;
        // Containers of a removed sandbox are older than those of any existing one.
        let place = |c: &ObservedContainer| sandboxes.iter().position(|s| s.id == c.sandbox).unwrap_or(usize::MAX);
        let age = |c: &ObservedContainer| (Reverse(place(c)), c.restart_count, c.created_at);
        self.containers.sort_by(|a, b| age(b).cmp(&age(a)).then_with(|| a.id.cmp(&b.id)));
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn sandbox(id: &str, attempt: u32, at: i64) -> ObservedSandbox {
        ObservedSandbox {
            id: id.into(),
            attempt,
            state: SandboxState::Ready,
            created_at: Timestamp::from_second(at).expect("in range"),
            network_mode: NetworkMode::Pod,
            has_network: false,
            ips: Vec::new(),
            runtime_handler: String::new(),
        }
    }

    fn container(id: &str, sandbox: &str, restart_count: i32, at: i64) -> ObservedContainer {
        ObservedContainer {
            id: id.into(),
            name: "main".into(),
            sandbox: sandbox.into(),
            state: ContainerState::Running,
            created_at: Timestamp::from_second(at).expect("in range"),
            started_at: None,
            finished_at: None,
            exit_code: 0,
            reason: String::new(),
            message: String::new(),
            image: String::new(),
            image_ref: String::new(),
            image_id: String::new(),
            hash: None,
            restart_count,
            log_path: String::new(),
            resources: None,
            user: None,
        }
    }

    #[test]
    fn the_newest_instance_does_not_depend_on_the_clock() {
        let id = PodRef { uid: "u".into(), name: "p".into(), namespace: "n".into() };
        let mut pod = ObservedPod::empty(id, Generation(0), Timestamp::UNIX_EPOCH);
        pod.sandboxes = vec![sandbox("s0", 0, 500), sandbox("s1", 1, 100)];
        pod.containers = vec![
            container("gone", "s", 9, 900),
            container("first", "s0", 3, 600),
            container("before", "s1", 4, 300),
            container("after", "s1", 5, 200),
            container("unmarked", "s1", 0, 150),
            container("unmarked-later", "s1", 0, 160),
        ];
        pod.sort();
        let order: Vec<&str> = pod.containers.iter().map(|c| c.id.as_str()).collect();
        assert_eq!(order, ["after", "before", "unmarked-later", "unmarked", "first", "gone"]);
    }
}
