//! Observes one pod: lists its sandboxes and containers, and queries the status of changed ones.
//!
//! Two filtered lists, then as few status calls as possible: an exited container is queried once, a
//! running one when it is new or after an action (its resources may have changed), a sandbox until it
//! has an address. Objects that the runtime removed in between are skipped.

use std::{collections::HashMap, sync::Arc};

use futures::future::try_join_all;
use jiff::Timestamp;

use super::cri_conversions;
use berth_cri::{CriError, RuntimeService};
use berth_ports::TerminationMessages;
use berth_proto::cri;
use berth_types::{
    PodRef,
    observation::{
        ContainerState, Generation, NetworkMode, ObservedContainer, ObservedPod, ObservedSandbox, SandboxState,
    },
};

/// Parameters of one observation.
pub(super) struct QueryParams<'a> {
    /// The pod, as far as known.
    pub pod: &'a PodRef,
    /// The last successful observation.
    pub last: Option<&'a ObservedPod>,
    /// Whether an action preceded it: running containers are queried again.
    pub acted: bool,
    /// The generation at its start.
    pub generation: Generation,
    /// Wall time at its start.
    pub began_at: Timestamp,
}

/// Observes pods through the CRI.
pub(super) struct PodQuerier {
    pub cri: Arc<dyn RuntimeService>,
    pub messages: Arc<dyn TerminationMessages>,
}

impl PodQuerier {
    /// Observes one pod. No timeout beyond those of the calls.
    pub async fn observe(&self, at: QueryParams<'_>) -> Result<ObservedPod, CriError> {
        let labels = HashMap::from([(cri_conversions::UID_LABEL.to_owned(), at.pod.uid.to_string())]);
        let (sandboxes, containers) = tokio::try_join!(
            self.cri
                .list_pod_sandbox(Some(cri::PodSandboxFilter { label_selector: labels.clone(), ..Default::default() })),
            self.cri.list_containers(Some(cri::ContainerFilter { label_selector: labels, ..Default::default() })),
        )?;
        let id = sandboxes.iter().find_map(cri_conversions::pod_of_sandbox);
        let id = id.or_else(|| containers.iter().find_map(cri_conversions::pod_of_container));
        let id = id.filter(|found| found.uid == at.pod.uid).unwrap_or_else(|| at.pod.clone());
        let mut pod = ObservedPod::empty(id, at.generation, at.began_at);
        let (seen_sandboxes, seen_containers) =
            tokio::try_join!(self.sandboxes(&at, &sandboxes), self.containers(&at, &containers))?;
        pod.sandboxes = seen_sandboxes;
        pod.containers = seen_containers;
        pod.sort();
        pod.ips = ips(&pod, at.last);
        Ok(pod)
    }

    async fn sandboxes(
        &self,
        at: &QueryParams<'_>,
        listed: &[cri::PodSandbox],
    ) -> Result<Vec<ObservedSandbox>, CriError> {
        let attempt = |s: &cri::PodSandbox| (s.metadata.as_ref().map_or(0, |m| m.attempt), s.created_at);
        let newest = listed.iter().max_by_key(|s| attempt(s)).map(|s| s.id.as_str());
        let known: &[ObservedSandbox] = at.last.map_or(&[], |pod| &pod.sandboxes);
        let mut seen = Vec::with_capacity(listed.len());
        for sandbox in listed {
            let state = cri_conversions::sandbox_state(sandbox.state);
            let last = known.iter().find(|k| k.id.as_str() == sandbox.id);
            if let Some(last) = last.filter(|last| is_settled(last, state)) {
                seen.push(ObservedSandbox { state, ..last.clone() });
            } else if newest == Some(sandbox.id.as_str()) {
                seen.extend(self.sandbox(&sandbox.id).await?);
            } else {
                seen.push(cri_conversions::listed_sandbox(sandbox));
            }
        }
        Ok(seen)
    }

    async fn sandbox(&self, id: &str) -> Result<Option<ObservedSandbox>, CriError> {
        match self.cri.pod_sandbox_status(id).await {
            Ok(reply) => {
                let status = reply.status.ok_or_else(|| CriError::Invalid("pod sandbox status is nil".to_owned()))?;
                cri_conversions::sandbox(&status).map(Some).map_err(CriError::Invalid)
            }
            Err(gone) if gone.is_not_found() => Ok(None),
            Err(error) => Err(error),
        }
    }

    async fn containers(
        &self,
        at: &QueryParams<'_>,
        listed: &[cri::Container],
    ) -> Result<Vec<ObservedContainer>, CriError> {
        let seen = try_join_all(listed.iter().map(|container| self.container(at, container))).await?;
        let mut seen: Vec<_> = seen.into_iter().flatten().collect();
        // Kept as long as the pod; a list of one would keep the capacity for four.
        seen.shrink_to_fit();
        Ok(seen)
    }

    async fn container(
        &self,
        at: &QueryParams<'_>,
        listed: &cri::Container,
    ) -> Result<Option<ObservedContainer>, CriError> {
        let known: &[ObservedContainer] = at.last.map_or(&[], |pod| &pod.containers);
        let last = known.iter().find(|k| k.id.as_str() == listed.id);
        let state = cri_conversions::container_state(listed.state);
        if let Some(last) = last.filter(|last| last.state == state)
            && (state == ContainerState::Exited || (!at.acted && state != ContainerState::Unknown))
        {
            return Ok(Some(last.clone()));
        }
        let status = match self.cri.container_status(&listed.id).await {
            Ok(status) => status,
            Err(gone) if gone.is_not_found() => return Ok(None),
            Err(error) => return Err(error),
        };
        let mut seen = cri_conversions::container(listed, &status).map_err(CriError::Invalid)?;
        if seen.state == ContainerState::Exited {
            seen.message = self.messages.message(cri_conversions::exit(&status)).await;
        }
        let name = last.or_else(|| known.iter().find(|k| *k.name == *seen.name)).map(|k| &k.name);
        cri_conversions::share_name(&mut seen, name);
        Ok(Some(seen))
    }
}

/// Whether a sandbox needs no status query. For one that is no longer ready only the state matters; a
/// ready one may still be waiting for its address.
fn is_settled(last: &ObservedSandbox, now: SandboxState) -> bool {
    match now {
        SandboxState::NotReady => true,
        SandboxState::Ready => last.state == now && (!last.ips.is_empty() || last.network_mode == NetworkMode::Node),
    }
}

/// Addresses of the newest sandbox if it is ready; the previous ones while none is (spec 03b §6 step
/// 5).
fn ips(pod: &ObservedPod, last: Option<&ObservedPod>) -> Vec<std::net::IpAddr> {
    if let Some(newest) = pod.sandboxes.first().filter(|s| s.state == SandboxState::Ready) {
        return newest.ips.clone();
    }
    if pod.is_absent() || pod.sandboxes.iter().any(|s| s.state == SandboxState::Ready) {
        return Vec::new();
    }
    last.map(|l| l.ips.clone()).unwrap_or_default()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::pleg::cri_conversions::fixtures::{pod, sandbox};

    #[test]
    fn addresses_outlive_the_sandbox() {
        let ip: std::net::IpAddr = "10.0.0.1".parse().expect("an address");
        let with = |sandboxes: Vec<ObservedSandbox>| {
            let mut made = pod([]);
            made.sandboxes = sandboxes;
            made
        };
        let mut last = with(vec![]);
        last.ips = vec![ip];
        let ready = ObservedSandbox { ips: vec![ip], ..sandbox("s1", 1, SandboxState::Ready) };
        let dead = ObservedSandbox { ips: vec![ip], ..sandbox("s2", 2, SandboxState::NotReady) };
        assert_eq!(ips(&with(vec![ready.clone()]), None), [ip], "the newest is ready");
        assert_eq!(ips(&with(vec![dead.clone()]), Some(&last)), [ip], "kept");
        assert!(ips(&with(vec![dead.clone()]), None).is_empty(), "never known");
        assert!(ips(&with(vec![dead, ready]), Some(&last)).is_empty(), "only an older one is ready");
        assert!(ips(&with(vec![]), Some(&last)).is_empty(), "nothing left");
    }

    #[test]
    fn a_settled_sandbox_is_not_asked_for_again() {
        let ready = sandbox("s1", 0, SandboxState::Ready);
        assert!(!is_settled(&ready, SandboxState::Ready), "no address yet");
        assert!(is_settled(&ready, SandboxState::NotReady));
        let node = ObservedSandbox { network_mode: NetworkMode::Node, ..ready };
        assert!(is_settled(&node, SandboxState::Ready));
    }
}
