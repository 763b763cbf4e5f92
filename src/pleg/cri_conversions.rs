//! Converts CRI responses to observations. No I/O.
//!
//! Untrusted data: missing or malformed fields become an error of the item or a documented default,
//! never a panic (spec 03a §2.2, §12).

use std::{net::IpAddr, path::PathBuf, sync::Arc};

use jiff::Timestamp;

use berth_ports::{ContainerExit, LogPolicy};
use berth_proto::cri;
use berth_types::{
    ContainerId, PodRef, PodUid, SandboxId,
    observation::{
        ContainerState, NetworkMode, ObservedContainer, ObservedResources, ObservedSandbox, ObservedUser, SandboxState,
    },
};

/// Label of sandboxes and containers with the pod's UID.
pub const UID_LABEL: &str = "io.kubernetes.pod.uid";
const NAME_LABEL: &str = "io.kubernetes.pod.name";
const NAMESPACE_LABEL: &str = "io.kubernetes.pod.namespace";
const HASH: &str = "io.kubernetes.container.hash";
const RESTART_COUNT: &str = "io.kubernetes.container.restartCount";
const MESSAGE_PATH: &str = "io.kubernetes.container.terminationMessagePath";
const MESSAGE_POLICY: &str = "io.kubernetes.container.terminationMessagePolicy";

/// Converts the state of a container.
pub fn container_state(raw: i32) -> ContainerState {
    match cri::ContainerState::try_from(raw) {
        Ok(cri::ContainerState::ContainerCreated) => ContainerState::Created,
        Ok(cri::ContainerState::ContainerRunning) => ContainerState::Running,
        Ok(cri::ContainerState::ContainerExited) => ContainerState::Exited,
        Ok(cri::ContainerState::ContainerUnknown) | Err(_) => ContainerState::Unknown,
    }
}

/// Converts the state of a sandbox.
pub fn sandbox_state(raw: i32) -> SandboxState {
    match cri::PodSandboxState::try_from(raw) {
        Ok(cri::PodSandboxState::SandboxReady) => SandboxState::Ready,
        Ok(cri::PodSandboxState::SandboxNotready) | Err(_) => SandboxState::NotReady,
    }
}

/// UID of the pod a listed sandbox belongs to; `""` if it has none.
pub fn sandbox_uid(sandbox: &cri::PodSandbox) -> &str {
    sandbox.metadata.as_ref().map_or("", |m| &m.uid)
}

/// UID of the pod a listed container belongs to; `""` if it has no UID label.
pub fn container_uid(container: &cri::Container) -> &str {
    container.labels.get(UID_LABEL).map_or("", String::as_str)
}

/// The pod of a sandbox, by its metadata.
pub fn pod_of_sandbox(sandbox: &cri::PodSandbox) -> Option<PodRef> {
    let meta = sandbox.metadata.as_ref()?;
    Some(PodRef {
        uid: PodUid::from(meta.uid.as_str()),
        name: meta.name.as_str().into(),
        namespace: meta.namespace.as_str().into(),
    })
}

/// The pod of a container, by its labels.
pub fn pod_of_container(container: &cri::Container) -> Option<PodRef> {
    let label = |key: &str| container.labels.get(key).map(String::as_str);
    Some(PodRef {
        uid: PodUid::from(label(UID_LABEL)?),
        name: label(NAME_LABEL)?.into(),
        namespace: label(NAMESPACE_LABEL)?.into(),
    })
}

/// Converts a listed sandbox, without network.
pub fn listed_sandbox(sandbox: &cri::PodSandbox) -> ObservedSandbox {
    ObservedSandbox {
        id: SandboxId::from(sandbox.id.as_str()),
        attempt: sandbox.metadata.as_ref().map_or(0, |m| m.attempt),
        state: sandbox_state(sandbox.state),
        created_at: instant(sandbox.created_at),
        network_mode: NetworkMode::Pod,
        has_network: false,
        ips: Vec::new(),
        runtime_handler: sandbox.runtime_handler.clone(),
    }
}

/// Converts a sandbox with its status.
///
/// # Errors
/// The status lacks a required field.
pub fn sandbox(status: &cri::PodSandboxStatus) -> Result<ObservedSandbox, String> {
    let meta = status.metadata.as_ref().ok_or("status.Metadata is not set")?;
    if status.id.is_empty() {
        return Err("status.Id is not set".to_owned());
    }
    if status.created_at == 0 {
        return Err("status.CreatedAt is not set".to_owned());
    }
    let options = status.linux.as_ref().and_then(|l| l.namespaces.as_ref()).and_then(|n| n.options.as_ref());
    let is_node = options.is_some_and(|o| o.network == cri::NamespaceMode::Node as i32);
    Ok(ObservedSandbox {
        id: SandboxId::from(status.id.as_str()),
        attempt: meta.attempt,
        state: sandbox_state(status.state),
        created_at: instant(status.created_at),
        network_mode: if is_node { NetworkMode::Node } else { NetworkMode::Pod },
        has_network: status.network.is_some(),
        ips: status.network.as_ref().map(addresses).unwrap_or_default(),
        runtime_handler: status.runtime_handler.clone(),
    })
}

/// Primary address first; empty if any address does not parse (spec 03a §4).
fn addresses(network: &cri::PodSandboxNetworkStatus) -> Vec<IpAddr> {
    let primary = (!network.ip.is_empty()).then_some(&network.ip);
    let all = primary.into_iter().chain(network.additional_ips.iter().map(|a| &a.ip));
    all.map(|ip| ip.parse()).collect::<Result<_, _>>().unwrap_or_default()
}

/// Converts a listed container: sufficient to know that it exists and whether it runs.
pub fn listed_container(container: &cri::Container) -> ObservedContainer {
    let state = container_state(container.state);
    let created_at = instant(container.created_at);
    ObservedContainer {
        id: ContainerId::from(container.id.as_str()),
        name: container.metadata.as_ref().map_or("", |m| &m.name).into(),
        sandbox: SandboxId::from(container.pod_sandbox_id.as_str()),
        state,
        created_at,
        started_at: (state != ContainerState::Created).then_some(created_at),
        finished_at: None,
        exit_code: 0,
        reason: String::new(),
        message: String::new(),
        image: container.image.as_ref().map_or_else(String::new, |i| i.image.clone()),
        image_ref: container.image_ref.clone(),
        image_id: or_else(&container.image_id, &container.image_ref),
        hash: hash(container.annotations.get(HASH)),
        restart_count: restart_count(container.annotations.get(RESTART_COUNT)),
        log_path: String::new(),
        resources: None,
        user: None,
    }
}

/// Converts a container with its status; `message` is only the runtime's so far.
///
/// # Errors
/// The status lacks a required field.
pub fn container(listed: &cri::Container, status: &cri::ContainerStatus) -> Result<ObservedContainer, String> {
    let meta = status.metadata.as_ref().ok_or("status.Metadata is not set")?;
    let image = status.image.as_ref().ok_or("status.Image is not set")?;
    if status.id.is_empty() {
        return Err("status.Id is not set".to_owned());
    }
    if status.created_at == 0 {
        return Err("status.CreatedAt is not set".to_owned());
    }
    let state = container_state(status.state);
    let has_exited = state == ContainerState::Exited;
    let when_exited = |text: &String| if has_exited { text.clone() } else { String::new() };
    Ok(ObservedContainer {
        id: ContainerId::from(status.id.as_str()),
        name: meta.name.as_str().into(),
        sandbox: SandboxId::from(listed.pod_sandbox_id.as_str()),
        state,
        created_at: instant(status.created_at),
        started_at: (state != ContainerState::Created).then(|| instant(status.started_at)),
        finished_at: has_exited.then(|| instant(status.finished_at)),
        exit_code: if has_exited { status.exit_code } else { 0 },
        reason: when_exited(&status.reason),
        message: when_exited(&status.message),
        image: image.image.clone(),
        image_ref: status.image_ref.clone(),
        image_id: or_else(&status.image_id, &status.image_ref),
        hash: hash(status.annotations.get(HASH)),
        restart_count: restart_count(status.annotations.get(RESTART_COUNT)),
        log_path: status.log_path.clone(),
        resources: status.resources.as_ref().and_then(|r| r.linux.as_ref()).and_then(resources),
        user: status.user.as_ref().and_then(|u| u.linux.as_ref()).map(|u| ObservedUser {
            uid: u.uid,
            gid: u.gid,
            supplemental_groups: u.supplemental_groups.clone(),
        }),
    })
}

/// Data of an exited container needed to read its termination message (spec 03b §9).
pub fn exit(status: &cri::ContainerStatus) -> ContainerExit {
    let wanted = status.annotations.get(MESSAGE_PATH).map(String::as_str).filter(|p| !p.is_empty());
    let mount = wanted.and_then(|wanted| {
        let is_it = |m: &&cri::Mount| m.container_path == wanted || m.container_path.strip_prefix('/') == Some(wanted);
        status.mounts.iter().find(is_it)
    });
    let falls_back = status.annotations.get(MESSAGE_POLICY).is_some_and(|p| p == "FallbackToLogsOnError");
    ContainerExit {
        message_file: mount.map(|m| PathBuf::from(&m.host_path)),
        policy: if falls_back { LogPolicy::FallbackToLogsOnError } else { LogPolicy::File },
        log_path: PathBuf::from(&status.log_path),
        exit_code: status.exit_code,
        reason: status.reason.clone(),
        message: status.message.clone(),
    }
}

fn resources(linux: &cri::LinuxContainerResources) -> Option<ObservedResources> {
    let quota =
        (linux.cpu_period > 0 && linux.cpu_quota > 0).then(|| linux.cpu_quota.saturating_mul(1000) / linux.cpu_period);
    let shares = (linux.cpu_shares > 0).then(|| linux.cpu_shares.saturating_mul(1000).saturating_add(1023) / 1024);
    let found = ObservedResources {
        cpu_request_milli: shares,
        cpu_limit_milli: quota.filter(|milli| *milli > 0),
        memory_limit_bytes: Some(linux.memory_limit_in_bytes).filter(|bytes| *bytes > 0),
    };
    (found != ObservedResources::default()).then_some(found)
}

fn or_else(first: &str, second: &str) -> String {
    if first.is_empty() { second.to_owned() } else { first.to_owned() }
}

fn hash(text: Option<&String>) -> Option<u32> {
    u32::from_str_radix(text?, 16).ok()
}

fn restart_count(text: Option<&String>) -> i32 {
    text.and_then(|t| t.parse().ok()).unwrap_or(0)
}

/// Nanoseconds since the epoch; every `i64` is in range.
fn instant(nanos: i64) -> Timestamp {
    Timestamp::from_nanosecond(i128::from(nanos)).unwrap_or(Timestamp::UNIX_EPOCH)
}

/// Replaces the name by a shared one, so that a new observation reuses the allocation of the last one.
pub fn share_name(container: &mut ObservedContainer, known: Option<&Arc<str>>) {
    if let Some(known) = known.filter(|known| **known == container.name) {
        container.name = known.clone();
    }
}

#[cfg(test)]
pub mod fixtures {
    //! Small observations for table tests of PLEG.

    use super::*;
    use berth_types::observation::{Generation, ObservedPod};

    /// A pod `web` in `default` with these containers.
    pub fn pod(containers: impl IntoIterator<Item = ObservedContainer>) -> ObservedPod {
        let id = PodRef { uid: "u1".into(), name: "web".into(), namespace: "default".into() };
        let mut pod = ObservedPod::empty(id, Generation(0), Timestamp::UNIX_EPOCH);
        pod.containers = containers.into_iter().collect();
        pod
    }

    /// A container in that state.
    pub fn container(id: &str, name: &str, state: ContainerState) -> ObservedContainer {
        listed_container(&cri::Container {
            id: id.to_owned(),
            metadata: Some(cri::ContainerMetadata { name: name.to_owned(), attempt: 0 }),
            state: match state {
                ContainerState::Created => 0,
                ContainerState::Running => 1,
                ContainerState::Exited => 2,
                ContainerState::Unknown => 3,
            },
            ..Default::default()
        })
    }

    /// A sandbox in that state.
    pub fn sandbox(id: &str, attempt: u32, state: SandboxState) -> ObservedSandbox {
        ObservedSandbox {
            id: id.into(),
            attempt,
            state,
            created_at: Timestamp::UNIX_EPOCH,
            network_mode: NetworkMode::Pod,
            has_network: true,
            ips: Vec::new(),
            runtime_handler: String::new(),
        }
    }
}

#[cfg(test)]
mod tests {
    use std::collections::HashMap;

    use super::*;

    fn status() -> cri::ContainerStatus {
        cri::ContainerStatus {
            id: "c1".into(),
            metadata: Some(cri::ContainerMetadata { name: "main".into(), attempt: 2 }),
            state: cri::ContainerState::ContainerExited as i32,
            created_at: 1,
            started_at: 2,
            finished_at: 3,
            exit_code: 7,
            image: Some(cri::ImageSpec { image: "busybox:1".into(), ..Default::default() }),
            image_ref: "busybox@sha256:1".into(),
            reason: "Error".into(),
            message: "oh".into(),
            annotations: HashMap::from([
                (HASH.to_owned(), "91edee8f".to_owned()),
                (RESTART_COUNT.to_owned(), "2".to_owned()),
                (MESSAGE_PATH.to_owned(), "/dev/termination-log".to_owned()),
                (MESSAGE_POLICY.to_owned(), "FallbackToLogsOnError".to_owned()),
            ]),
            mounts: vec![cri::Mount {
                container_path: "/dev/termination-log".into(),
                host_path: "/var/lib/x".into(),
                ..Default::default()
            }],
            log_path: "/var/log/pods/p/main/2.log".into(),
            ..Default::default()
        }
    }

    #[test]
    fn an_exited_container_keeps_its_end() {
        let seen = container(&cri::Container::default(), &status()).expect("complete");
        assert_eq!((seen.exit_code, seen.reason.as_str(), seen.message.as_str()), (7, "Error", "oh"));
        assert_eq!((seen.hash, seen.restart_count), (Some(0x91ed_ee8f), 2));
        assert_eq!(seen.image_id, "busybox@sha256:1", "image_ref where the runtime has no id");
        assert_eq!(seen.finished_at, Timestamp::from_nanosecond(3).ok());
        let exit = exit(&status());
        assert_eq!(exit.message_file, Some(PathBuf::from("/var/lib/x")));
        assert_eq!(exit.policy, LogPolicy::FallbackToLogsOnError);
    }

    #[test]
    fn what_belongs_to_an_exit_is_dropped_before_it() {
        let running = cri::ContainerStatus { state: cri::ContainerState::ContainerRunning as i32, ..status() };
        let seen = container(&cri::Container::default(), &running).expect("complete");
        assert_eq!((seen.exit_code, seen.reason.as_str(), seen.finished_at), (0, "", None));
        let created = cri::ContainerStatus { state: 0, ..status() };
        assert_eq!(container(&cri::Container::default(), &created).expect("complete").started_at, None);
    }

    #[test]
    fn incomplete_answers_are_errors() {
        for (broken, text) in [
            (cri::ContainerStatus { created_at: 0, ..status() }, "status.CreatedAt is not set"),
            (cri::ContainerStatus { metadata: None, ..status() }, "status.Metadata is not set"),
            (cri::ContainerStatus { id: String::new(), ..status() }, "status.Id is not set"),
            (cri::ContainerStatus { image: None, ..status() }, "status.Image is not set"),
        ] {
            assert_eq!(container(&cri::Container::default(), &broken), Err(text.to_owned()));
        }
        assert!(sandbox(&cri::PodSandboxStatus::default()).is_err());
    }

    #[test]
    fn malformed_annotations_read_as_unknown_or_zero() {
        let mut odd = status();
        odd.annotations.insert(HASH.to_owned(), "xyz".to_owned());
        odd.annotations.insert(RESTART_COUNT.to_owned(), "many".to_owned());
        let seen = container(&cri::Container::default(), &odd).expect("complete");
        assert_eq!((seen.hash, seen.restart_count), (None, 0));
    }

    #[test]
    fn one_bad_address_voids_all() {
        let network = |ip: &str, more: &str| cri::PodSandboxNetworkStatus {
            ip: ip.to_owned(),
            additional_ips: vec![cri::PodIp { ip: more.to_owned() }],
        };
        assert_eq!(addresses(&network("10.0.0.1", "fd00::1")).len(), 2);
        assert!(addresses(&network("10.0.0.1", "nonsense")).is_empty());
        assert_eq!(addresses(&network("", "fd00::1")).len(), 1);
    }

    #[test]
    fn resources_come_back_from_shares_and_quota() {
        let linux = cri::LinuxContainerResources {
            cpu_period: 100_000,
            cpu_quota: 25_000,
            cpu_shares: 102,
            memory_limit_in_bytes: 1 << 20,
            ..Default::default()
        };
        let found = resources(&linux).expect("some");
        assert_eq!((found.cpu_request_milli, found.cpu_limit_milli), (Some(100), Some(250)));
        assert_eq!(found.memory_limit_bytes, Some(1 << 20));
        let unlimited = cri::LinuxContainerResources { cpu_period: 100_000, cpu_quota: -1, ..Default::default() };
        assert_eq!(resources(&unlimited), None);
    }
}
