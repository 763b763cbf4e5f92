//! Selects the pods and containers that appear in statistics, from runtime observations. Pure.
//! Implements spec 04b §7.2 "pods list".

use std::{
    collections::{BTreeMap, HashSet},
    sync::Arc,
};

use jiff::Timestamp;

use berth_types::{
    ContainerId, PodRef, SandboxId,
    observation::{ContainerState, NetworkMode, ObservedContainer, ObservedPod, ObservedSandbox, SandboxState},
};

/// A pod that appears in statistics, with one of its sandboxes.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct ReportedPod {
    /// UID, name, and namespace.
    pub id: PodRef,
    /// ID of the selected sandbox.
    pub sandbox: SandboxId,
    /// Runtime handler of the sandbox.
    pub handler: String,
    /// Creation time of the sandbox.
    pub started_at: Timestamp,
    /// Whether the sandbox is ready.
    pub is_ready: bool,
    /// Whether the sandbox uses its own network namespace or the node's.
    pub network: NetworkMode,
    /// Running containers of the sandbox, sorted by name; the newest instance of each name.
    pub containers: Vec<ReportedContainer>,
}

/// A running container of a [`ReportedPod`].
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct ReportedContainer {
    /// Container ID of the runtime.
    pub id: ContainerId,
    /// Container name.
    pub name: Arc<str>,
    /// Image as requested; the resolved image reference where the runtime reports no requested image.
    pub image: String,
    /// Creation time.
    pub created_at: Timestamp,
    /// Start time; the creation time where the runtime reports none.
    pub started_at: Timestamp,
}

/// Returns the pods sorted by namespace, name, and UID. Of several sandboxes that share namespace and name, the ready
/// ones are selected, one per UID; without a ready one, the newest.
pub fn reported_pods<'a>(pods: impl IntoIterator<Item = &'a Arc<ObservedPod>>) -> Vec<ReportedPod> {
    type SandboxesByName<'a> = BTreeMap<(&'a str, &'a str), Vec<(&'a ObservedPod, &'a ObservedSandbox)>>;
    let mut named = SandboxesByName::new();
    for pod in pods {
        let sandboxes = pod.sandboxes.iter().map(|sandbox| (&**pod, sandbox));
        named.entry((&pod.id.namespace, &pod.id.name)).or_default().extend(sandboxes);
    }
    let mut shown: Vec<ReportedPod> =
        named.into_values().flat_map(chosen).map(|(pod, sandbox)| one(pod, sandbox)).collect();
    shown.sort_by(|a, b| key(a).cmp(&key(b)));
    shown
}

fn key(pod: &ReportedPod) -> (&str, &str, &str) {
    (&pod.id.namespace, &pod.id.name, pod.id.uid.as_str())
}

fn chosen<'a>(all: Vec<(&'a ObservedPod, &'a ObservedSandbox)>) -> Vec<(&'a ObservedPod, &'a ObservedSandbox)> {
    let mut seen = HashSet::new();
    // The sandboxes of a pod are sorted newest first.
    let ready = all.iter().filter(|(pod, sandbox)| sandbox.state == SandboxState::Ready && seen.insert(&pod.id.uid));
    let ready: Vec<_> = ready.copied().collect();
    if ready.is_empty() {
        return all.into_iter().max_by_key(|(_, sandbox)| sandbox.created_at).into_iter().collect();
    }
    ready
}

fn one(pod: &ObservedPod, sandbox: &ObservedSandbox) -> ReportedPod {
    let running = |c: &&ObservedContainer| c.state == ContainerState::Running && c.sandbox == sandbox.id;
    let mut names = HashSet::new();
    let newest = pod.containers.iter().filter(running).filter(|c| names.insert(&c.name));
    let mut containers: Vec<ReportedContainer> = newest.map(container).collect();
    containers.sort_by(|a, b| a.name.cmp(&b.name));
    ReportedPod {
        id: pod.id.clone(),
        sandbox: sandbox.id.clone(),
        handler: sandbox.runtime_handler.clone(),
        started_at: sandbox.created_at,
        is_ready: sandbox.state == SandboxState::Ready,
        network: sandbox.network_mode,
        containers,
    }
}

fn container(container: &ObservedContainer) -> ReportedContainer {
    let image = if container.image.is_empty() { &container.image_ref } else { &container.image };
    ReportedContainer {
        id: container.id.clone(),
        name: container.name.clone(),
        image: image.clone(),
        created_at: container.created_at,
        started_at: container.started_at.unwrap_or(container.created_at),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use berth_types::observation::Generation;

    fn at(second: i64) -> Timestamp {
        Timestamp::from_second(second).expect("in range")
    }

    fn sandbox(id: &str, second: i64, state: SandboxState) -> ObservedSandbox {
        ObservedSandbox {
            id: id.into(),
            attempt: 0,
            state,
            created_at: at(second),
            network_mode: NetworkMode::Pod,
            has_network: true,
            ips: Vec::new(),
            runtime_handler: String::new(),
        }
    }

    fn container(id: &str, name: &str, sandbox: &str, state: ContainerState) -> ObservedContainer {
        ObservedContainer {
            id: id.into(),
            name: name.into(),
            sandbox: sandbox.into(),
            state,
            created_at: at(50),
            started_at: Some(at(51)),
            finished_at: None,
            exit_code: 0,
            reason: String::new(),
            message: String::new(),
            image: "img".to_owned(),
            image_ref: String::new(),
            image_id: String::new(),
            hash: None,
            restart_count: 0,
            log_path: String::new(),
            resources: None,
            user: None,
        }
    }

    fn pod(
        uid: &str,
        name: &str,
        sandboxes: Vec<ObservedSandbox>,
        containers: Vec<ObservedContainer>,
    ) -> Arc<ObservedPod> {
        let id = PodRef { uid: uid.into(), name: name.into(), namespace: "ns".into() };
        let pod = ObservedPod::empty(id, Generation(0), at(0));
        Arc::new(ObservedPod { sandboxes, containers, ..pod })
    }

    fn lines(pods: &[Arc<ObservedPod>]) -> Vec<String> {
        let line = |pod: ReportedPod| {
            let containers: Vec<&str> = pod.containers.iter().map(|c| c.id.as_str()).collect();
            format!("{} {} {} [{}]", pod.id.name, pod.id.uid, pod.sandbox, containers.join(" "))
        };
        reported_pods(pods).into_iter().map(line).collect()
    }

    #[test]
    fn the_right_sandbox_speaks_for_a_pod() {
        use ContainerState::{Exited, Running};
        use SandboxState::{NotReady, Ready};
        let alone = pod("u1", "alone", vec![sandbox("s1", 1, NotReady)], vec![container("c", "a", "s1", Running)]);
        let restarted = pod(
            "u2",
            "restarted",
            vec![sandbox("s3", 3, Ready), sandbox("s2", 2, NotReady)],
            vec![
                container("c4", "b", "s3", Running),
                container("c3", "a", "s3", Running),
                container("c2", "a", "s3", Running),
                container("c1", "x", "s3", Exited),
                container("c0", "old", "s2", Running),
            ],
        );
        let dead = pod("u3", "dead", vec![sandbox("s5", 5, NotReady), sandbox("s4", 4, NotReady)], vec![]);
        let again = pod("u4", "restarted", vec![sandbox("s6", 1, Ready)], vec![]);
        assert_eq!(
            lines(&[dead, restarted, again, alone]),
            ["alone u1 s1 [c]", "dead u3 s5 []", "restarted u2 s3 [c3 c4]", "restarted u4 s6 []"]
        );
    }

    #[test]
    fn never_two_of_one_pod() {
        let both = vec![sandbox("s2", 2, SandboxState::Ready), sandbox("s1", 1, SandboxState::Ready)];
        assert_eq!(lines(&[pod("u", "p", both, vec![])]), ["p u s2 []"]);
    }
}
