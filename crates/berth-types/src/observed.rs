//! What a runtime showed of one pod, with the generation at which the look began. Pure.
//!
//! Each action on a pod bumps the pod's generation; a decision uses only observations that
//! began after the last action. This replaces sleeping, polling and "newer than" timestamps.

use std::{cmp::Reverse, net::IpAddr, sync::Arc};

use jiff::Timestamp;

use super::{ContainerId, PodRef, SandboxId};

/// Counts the actions on one pod; an observation carries the count at which it *began*.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Default, Debug)]
pub struct Generation(pub u64);

/// State of a sandbox.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum SandboxState {
    /// `SANDBOX_READY`.
    Ready,
    /// `SANDBOX_NOTREADY`.
    NotReady,
}

/// Whose network namespace a sandbox uses.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum NetworkMode {
    /// Its own.
    Pod,
    /// The node's.
    Node,
}

/// One sandbox of a pod.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct ObservedSandbox {
    /// The runtime's id.
    pub id: SandboxId,
    /// `metadata.attempt`.
    pub attempt: u32,
    /// Ready or not.
    pub state: SandboxState,
    /// Creation time as the runtime reports it.
    pub created_at: Timestamp,
    /// Wanted network namespace, as the sandbox was created.
    pub network_mode: NetworkMode,
    /// Whether the status carried a `network` message at all.
    pub has_network: bool,
    /// Primary address first, then the additional ones; empty where one did not parse.
    pub ips: Vec<IpAddr>,
    /// The runtime handler it runs under.
    pub runtime_handler: String,
}

/// State of a container.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub enum ContainerState {
    /// Created, not started.
    Created,
    /// Running.
    Running,
    /// Exited.
    Exited,
    /// The runtime does not know.
    Unknown,
}

/// Resources as the runtime reports them; `None` where it does not.
#[derive(Clone, PartialEq, Eq, Debug, Default)]
pub struct ObservedResources {
    /// CPU request in milli-CPU (from shares).
    pub cpu_request_milli: Option<i64>,
    /// CPU limit in milli-CPU (from quota and period).
    pub cpu_limit_milli: Option<i64>,
    /// Memory limit in bytes.
    pub memory_limit_bytes: Option<i64>,
}

/// The user a container runs as.
#[derive(Clone, PartialEq, Eq, Debug, Default)]
pub struct ObservedUser {
    /// UID.
    pub uid: i64,
    /// GID.
    pub gid: i64,
    /// Supplemental groups.
    pub supplemental_groups: Vec<i64>,
}

/// One instance of a container.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct ObservedContainer {
    /// The runtime's id.
    pub id: ContainerId,
    /// `metadata.name`.
    pub name: Arc<str>,
    /// The sandbox it was created in.
    pub sandbox: SandboxId,
    /// State.
    pub state: ContainerState,
    /// Creation time.
    pub created_at: Timestamp,
    /// Start time; `None` while created.
    pub started_at: Option<Timestamp>,
    /// Finish time; only when exited.
    pub finished_at: Option<Timestamp>,
    /// Exit code; 0 unless exited.
    pub exit_code: i32,
    /// Reason as the runtime reports it; only when exited.
    pub reason: String,
    /// Runtime message and termination message joined (spec 03b §9); only when exited.
    pub message: String,
    /// `image.image` of the status.
    pub image: String,
    /// `image_ref` of the status: the API's `imageID`.
    pub image_ref: String,
    /// `image_id`, or `image_ref` where the runtime does not tell.
    pub image_id: String,
    /// Spec hash from the annotation; `None` where absent or malformed.
    pub hash: Option<u32>,
    /// Restart count from the annotation, 0 where absent or malformed.
    pub restart_count: i32,
    /// Full path of the log, as the runtime reports it.
    pub log_path: String,
    /// Resources, where the runtime reports them.
    pub resources: Option<ObservedResources>,
    /// User, where the runtime reports it.
    pub user: Option<ObservedUser>,
}

/// One look at one pod.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct ObservedPod {
    /// Who it is, from the runtime's metadata or from who asked.
    pub id: PodRef,
    /// The generation at which the look began.
    pub generation: Generation,
    /// Wall time at which the look began.
    pub began_at: Timestamp,
    /// Newest first: attempt descending, then creation descending, then id.
    pub sandboxes: Vec<ObservedSandbox>,
    /// Every instance, newest first: those of the newest sandbox, then the higher restart count, then the later
    /// creation, then id. Times come last, because clocks are set back.
    pub containers: Vec<ObservedContainer>,
    /// Addresses of the newest sandbox where that is ready; kept from before when no sandbox is ready.
    pub ips: Vec<IpAddr>,
}

impl ObservedPod {
    /// A look that found nothing.
    pub fn empty(id: PodRef, generation: Generation, began_at: Timestamp) -> Self {
        Self { id, generation, began_at, sandboxes: Vec::new(), containers: Vec::new(), ips: Vec::new() }
    }

    /// Whether the runtime holds nothing of this pod.
    pub fn is_gone(&self) -> bool {
        self.sandboxes.is_empty() && self.containers.is_empty()
    }

    /// Newest instance of a container.
    pub fn newest(&self, name: &str) -> Option<&ObservedContainer> {
        self.containers.iter().find(|c| &*c.name == name)
    }

    /// All running containers.
    pub fn running(&self) -> impl Iterator<Item = &ObservedContainer> {
        self.containers.iter().filter(|c| c.state == ContainerState::Running)
    }

    /// Whether any container runs or any sandbox is ready.
    pub fn is_alive(&self) -> bool {
        self.running().next().is_some() || self.sandboxes.iter().any(|s| s.state == SandboxState::Ready)
    }

    /// The containers of the newest sandbox.
    pub fn active(&self) -> impl Iterator<Item = &ObservedContainer> {
        let newest = self.sandboxes.first().map(|s| &s.id);
        self.containers.iter().filter(move |c| Some(&c.sandbox) == newest)
    }

    /// Puts sandboxes and containers into the documented order.
    pub fn sort(&mut self) {
        self.sandboxes
            .sort_by(|a, b| (b.attempt, b.created_at).cmp(&(a.attempt, a.created_at)).then_with(|| a.id.cmp(&b.id)));
        let sandboxes = &self.sandboxes;
        // What is left of a sandbox that is gone is older than any that is there.
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
    fn the_newest_instance_is_the_newest_whatever_the_clock_said() {
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
