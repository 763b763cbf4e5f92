//! In-memory state of a sandbox, its record, and the CRI events of a state change. Pure.
//! Implements spec 09a §2, §5.

use std::{collections::BTreeMap, sync::Arc};

use super::{
    container::{Container, Phase},
    errors::RuntimeError,
    ports::NetworkPod,
    store::objects::{SandboxMeta, SandboxPhase, SandboxState, VERSION, pack, unpack},
};
use berth_proto::cri;

/// A sandbox and its containers.
#[derive(Clone, Debug)]
pub struct Sandbox {
    /// Metadata; immutable once the sandbox is ready.
    pub meta: Arc<SandboxMeta>,
    /// CRI configuration of the request.
    pub config: Arc<cri::PodSandboxConfig>,
    /// Lifecycle phase.
    pub phase: SandboxPhase,
    /// Id of the boot in which the sandbox was created.
    pub boot_id: Arc<str>,
    /// Resources from the last `UpdatePodSandboxResources`.
    pub resources: Option<cri::LinuxContainerResources>,
    /// Overhead from the last `UpdatePodSandboxResources`.
    pub overhead: Option<cri::LinuxContainerResources>,
    /// Containers by id.
    pub containers: BTreeMap<String, Container>,
    /// Whether the sandbox was removed.
    pub is_removed: bool,
}

impl Sandbox {
    /// Sandbox id.
    pub fn id(&self) -> &str {
        &self.meta.id
    }

    /// Whether containers can run in it.
    pub fn is_ready(&self) -> bool {
        self.phase == SandboxPhase::Ready
    }

    /// Checks that the sandbox is ready.
    ///
    /// # Errors
    /// The sandbox is not ready.
    pub fn ready(&self) -> Result<(), RuntimeError> {
        if self.is_ready() { Ok(()) } else { Err(RuntimeError::not_ready(self.id())) }
    }

    /// A container by its full id.
    ///
    /// # Errors
    /// There is none with this id.
    pub fn container(&self, id: &str) -> Result<&Container, RuntimeError> {
        self.containers.get(id).ok_or_else(|| RuntimeError::no_container(id))
    }

    /// Mutable access to a container by its full id.
    ///
    /// # Errors
    /// There is none with this id.
    pub fn container_mut(&mut self, id: &str) -> Result<&mut Container, RuntimeError> {
        self.containers.get_mut(id).ok_or_else(|| RuntimeError::no_container(id))
    }

    /// The sandbox, as its network needs it.
    pub fn network(&self) -> NetworkPod {
        NetworkPod { id: self.id().to_owned(), config: self.config.clone(), persisted: self.meta.network.clone() }
    }

    /// The persistent record of the sandbox.
    pub fn record(&self) -> SandboxState {
        SandboxState {
            v: VERSION,
            state: self.phase,
            boot_id: self.boot_id.to_string(),
            resources: self.resources.as_ref().map(pack),
            overhead: self.overhead.as_ref().map(pack),
        }
    }

    /// Restores a sandbox from its record; `None` where its configuration is malformed.
    pub fn from_record(meta: SandboxMeta, state: Option<SandboxState>) -> Option<Self> {
        let config: cri::PodSandboxConfig = unpack(&meta.config)?;
        let message = |text: Option<String>| text.as_deref().and_then(unpack);
        Some(Self {
            config: Arc::new(config),
            phase: state.as_ref().map_or(SandboxPhase::Creating, |s| s.state),
            boot_id: state.as_ref().map_or("", |s| s.boot_id.as_str()).into(),
            resources: message(state.as_ref().and_then(|s| s.resources.clone())),
            overhead: message(state.and_then(|s| s.overhead)),
            meta: Arc::new(meta),
            containers: BTreeMap::new(),
            is_removed: false,
        })
    }
}

/// Object id and type of a CRI container event.
pub type SandboxEvent = (String, cri::ContainerEventType);

/// The events between two snapshots of a sandbox, in publication order.
pub fn events_between(old: &Sandbox, new: &Sandbox) -> Vec<SandboxEvent> {
    use cri::ContainerEventType as Kind;
    let mut events: Vec<SandboxEvent> = Vec::new();
    let id = || new.id().to_owned();
    match (old.phase, new.phase) {
        (SandboxPhase::Creating, SandboxPhase::Ready) => {
            events.push((id(), Kind::ContainerCreatedEvent));
            events.push((id(), Kind::ContainerStartedEvent));
        }
        (SandboxPhase::Ready, SandboxPhase::NotReady) => events.push((id(), Kind::ContainerStoppedEvent)),
        _ => {}
    }
    for (id, container) in &new.containers {
        let before = old.containers.get(id).map(|c| &c.phase);
        if before.is_none() {
            events.push((id.clone(), Kind::ContainerCreatedEvent));
        }
        match (before, &container.phase) {
            (None | Some(Phase::Created | Phase::Starting), Phase::Running(_)) => {
                events.push((id.clone(), Kind::ContainerStartedEvent));
            }
            (Some(Phase::Exited(_)), _) => {}
            (_, Phase::Exited(_)) => events.push((id.clone(), Kind::ContainerStoppedEvent)),
            _ => {}
        }
    }
    let gone = old.containers.keys().filter(|id| !new.containers.contains_key(*id));
    events.extend(gone.map(|id| (id.clone(), Kind::ContainerDeletedEvent)));
    if new.is_removed && !old.is_removed {
        events.push((id(), Kind::ContainerDeletedEvent));
    }
    events
}

/// The name to reserve for a sandbox.
///
/// # Errors
/// The configuration has no metadata.
pub fn sandbox_name(config: &cri::PodSandboxConfig) -> Result<String, RuntimeError> {
    let meta = config.metadata.as_ref();
    let meta = meta.ok_or_else(|| RuntimeError::invalid("sandbox config must include metadata"))?;
    Ok(format!("{}_{}_{}_{}", meta.name, meta.namespace, meta.uid, meta.attempt))
}

/// The name to reserve for a container.
///
/// # Errors
/// A configuration has no metadata.
pub fn container_name(config: &cri::ContainerConfig, pod: &cri::PodSandboxConfig) -> Result<String, RuntimeError> {
    let meta = config.metadata.as_ref();
    let meta = meta.ok_or_else(|| RuntimeError::invalid("container config must include metadata"))?;
    let of = pod.metadata.as_ref();
    let of = of.ok_or_else(|| RuntimeError::invalid("pod sandbox config must include metadata"))?;
    Ok(format!("{}_{}_{}_{}_{}", meta.name, of.name, of.namespace, of.uid, meta.attempt))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::fixture::{container, sandbox};

    fn short_events(old: &Sandbox, new: &Sandbox) -> Vec<(String, &'static str)> {
        let short = |kind: cri::ContainerEventType| {
            let name = kind.as_str_name();
            name.strip_prefix("CONTAINER_").and_then(|n| n.strip_suffix("_EVENT")).unwrap_or(name)
        };
        events_between(old, new).into_iter().map(|(id, kind)| (id, short(kind))).collect()
    }

    #[test]
    fn changes_become_events_in_order() {
        let creating = Sandbox { phase: SandboxPhase::Creating, ..sandbox("s") };
        let ready = sandbox("s");
        let s = |word| ("s".to_owned(), word);
        let c = |word| ("c".to_owned(), word);
        assert_eq!(short_events(&creating, &ready), [s("CREATED"), s("STARTED")]);
        let mut with = ready.clone();
        with.containers.insert("c".to_owned(), container("c"));
        assert_eq!(short_events(&ready, &with), [c("CREATED")]);
        let mut runs = with.clone();
        let one = runs.container_mut("c").expect("there");
        one.begin_start().expect("created");
        let starting = runs.clone();
        assert_eq!(short_events(&with, &starting), []);
        runs.container_mut("c").expect("there").mark_started(berth_shim::plan::StartedProcess {
            pid: 1,
            start_ticks: 1,
            at_ns: 1,
            ..Default::default()
        });
        assert_eq!(short_events(&starting, &runs), [c("STARTED")]);
        let mut ended = runs.clone();
        assert!(ended.container_mut("c").expect("there").mark_lost(9));
        ended.phase = SandboxPhase::NotReady;
        assert_eq!(short_events(&runs, &ended), [s("STOPPED"), c("STOPPED")]);
        let mut gone = ended.clone();
        gone.containers.clear();
        gone.is_removed = true;
        assert_eq!(short_events(&ended, &gone), [c("DELETED"), s("DELETED")]);
        assert_eq!(short_events(&gone, &gone), []);
    }

    #[test]
    fn names_need_metadata() {
        let error = sandbox_name(&cri::PodSandboxConfig::default()).expect_err("none");
        assert_eq!(error.text, "sandbox config must include metadata");
        let (none, some) = (cri::ContainerConfig::default(), sandbox("s").config);
        assert_eq!(container_name(&none, &some).expect_err("none").text, "container config must include metadata");
        let one = container("c").config;
        let error = container_name(&one, &cri::PodSandboxConfig::default()).expect_err("none");
        assert_eq!(error.text, "pod sandbox config must include metadata");
        assert_eq!(container_name(&one, &some).expect("both"), "c_p_ns_u_0");
    }
}
