//! Complete list of the runtime's sandboxes and containers: audits observations and events.

use std::{
    collections::{HashMap, HashSet},
    sync::Arc,
    time::Duration,
};

use jiff::Timestamp;
use tokio::time::{Instant, timeout};

use super::{
    cri_conversions,
    inventory::{ListedObject, ObjectState},
};
use berth_cri::{CriError, RuntimeService};
use berth_proto::cri;
use berth_types::{
    PodRef, PodUid,
    observation::{Generation, ObservedPod},
};

/// Start of a list, by all relevant clocks.
#[derive(Clone, Copy, Debug)]
pub(super) struct ListStart {
    /// Sequence number among all queries and lists.
    pub seq: u64,
    /// Generation of observations.
    pub generation: Generation,
    /// Monotonic time.
    pub at: Instant,
    /// Wall time.
    pub wall: Timestamp,
}

/// Result of a list.
pub(super) struct ListEnd {
    pub start: ListStart,
    pub result: Result<List, CriError>,
}

/// All sandboxes and containers of the runtime.
pub(super) struct List {
    pub sandboxes: Vec<cri::PodSandbox>,
    pub containers: Vec<cri::Container>,
}

/// Lists without filter, with timeout `limit`.
pub(super) async fn list(cri: Arc<dyn RuntimeService>, start: ListStart, limit: Duration) -> ListEnd {
    let both = async { tokio::try_join!(cri.list_pod_sandbox(None), cri.list_containers(None)) };
    let result = match timeout(limit, both).await {
        Ok(Ok((sandboxes, containers))) => Ok(List { sandboxes, containers }),
        Ok(Err(error)) => Err(error),
        Err(_) => Err(CriError::TimedOut { op: "list_podsandbox", limit }),
    };
    ListEnd { start, result }
}

impl List {
    /// All objects that belong to a pod. Objects without a pod UID are foreign.
    pub fn objects(&self) -> impl Iterator<Item = ListedObject<'_>> {
        let sandboxes = self.sandboxes.iter().map(|s| ListedObject {
            id: &s.id,
            pod: cri_conversions::sandbox_uid(s),
            state: ObjectState::Sandbox(cri_conversions::sandbox_state(s.state)),
        });
        let containers = self.containers.iter().map(|c| ListedObject {
            id: &c.id,
            pod: cri_conversions::container_uid(c),
            state: ObjectState::Container(cri_conversions::container_state(c.state)),
        });
        sandboxes.chain(containers).filter(|item| !item.pod.is_empty())
    }

    /// UIDs of all pods in the runtime.
    pub fn pod_uids(&self) -> HashSet<&str> {
        self.objects().map(|item| item.pod).collect()
    }

    /// Observations of some pods from the list, with the details of `last` for known objects.
    pub fn pods(
        &self,
        wanted: &HashSet<PodUid>,
        start: ListStart,
        last: impl Fn(&PodUid) -> Option<Arc<ObservedPod>>,
    ) -> Vec<Arc<ObservedPod>> {
        if wanted.is_empty() {
            return Vec::new();
        }
        let mut pods: HashMap<&str, (Option<Arc<ObservedPod>>, ObservedPod)> = wanted
            .iter()
            .map(|uid| {
                let last = last(uid);
                let id = last.as_ref().map_or_else(|| unnamed(uid), |pod| pod.id.clone());
                (uid.as_str(), (last, ObservedPod::empty(id, start.generation, start.wall)))
            })
            .collect();
        for sandbox in &self.sandboxes {
            let Some((last, pod)) = pods.get_mut(cri_conversions::sandbox_uid(sandbox)) else { continue };
            if pod.id.name.is_empty() {
                pod.id = cri_conversions::pod_of_sandbox(sandbox).unwrap_or_else(|| pod.id.clone());
            }
            let state = cri_conversions::sandbox_state(sandbox.state);
            let known = last.as_ref().and_then(|l| l.sandboxes.iter().find(|k| k.id.as_str() == sandbox.id));
            let mut seen = known.cloned().unwrap_or_else(|| cri_conversions::listed_sandbox(sandbox));
            seen.state = state;
            pod.sandboxes.push(seen);
        }
        for container in &self.containers {
            let Some((last, pod)) = pods.get_mut(cri_conversions::container_uid(container)) else { continue };
            if pod.id.name.is_empty() {
                pod.id = cri_conversions::pod_of_container(container).unwrap_or_else(|| pod.id.clone());
            }
            let state = cri_conversions::container_state(container.state);
            let known = last.as_ref().and_then(|l| l.containers.iter().find(|k| k.id.as_str() == container.id));
            let same = known.filter(|k| k.state == state).cloned();
            pod.containers.push(same.unwrap_or_else(|| cri_conversions::listed_container(container)));
        }
        let finish = |(last, mut pod): (Option<Arc<ObservedPod>>, ObservedPod)| {
            pod.sort();
            pod.ips = last.map(|l| l.ips.clone()).unwrap_or_default();
            Arc::new(pod)
        };
        pods.into_values().map(finish).collect()
    }
}

fn unnamed(uid: &PodUid) -> PodRef {
    PodRef { uid: uid.clone(), name: "".into(), namespace: "".into() }
}
