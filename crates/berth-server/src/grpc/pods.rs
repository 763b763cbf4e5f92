//! Local Pods gRPC API (feature gate `PodsAPI`): list, get, and watch of node pods (spec 04b §13).
//!
//! ```text
//!  pods, statuses ─► watch task: difference of snapshots ─► one queue per client ─► WatchPods
//! ```
//!
//! A client that does not read fills its queue and is disconnected; nothing waits for it.

use std::{
    collections::BTreeMap,
    pin::Pin,
    sync::{Arc, Mutex, PoisonError},
};

use bytes::Bytes;
use futures::{Stream, StreamExt, stream};
use serde_json::json;
use tokio::sync::mpsc;
use tokio_stream::wrappers::ReceiverStream;
use tokio_util::sync::CancellationToken;
use tonic::{Request, Response, Status, async_trait, service::Routes};
use tracing::warn;

use super::{RateLimit, pod_bytes};
use crate::ports::PodFeed;
use berth_metrics::PodWatchMetrics;
use berth_proto::v1alpha1::{
    EventType, GetPodRequest, GetPodResponse, ListPodsRequest, ListPodsResponse, WatchPodsEvent, WatchPodsRequest,
    pods_server::{Pods, PodsServer},
};
use berth_sys::grpc_deadline::Deadline;
use berth_types::{Pod, PodUid, api};

/// Capacity of a client's event queue.
const QUEUE: usize = 100;
/// Maximum number of watching clients.
const CLIENTS: usize = 64;

type Queue = mpsc::Sender<Result<WatchPodsEvent, Status>>;

/// Snapshot of a pod and its status; any change replaces one of the two `Arc`s.
#[derive(Clone)]
struct PodSnapshot {
    pod: Arc<Pod>,
    status: Option<Arc<api::PodStatus>>,
}

impl PodSnapshot {
    fn is(&self, other: &Self) -> bool {
        let same_status = match (&self.status, &other.status) {
            (Some(a), Some(b)) => Arc::ptr_eq(a, b),
            (None, None) => true,
            _ => false,
        };
        same_status && Arc::ptr_eq(&self.pod, &other.pod)
    }

    /// Encodes the pod with the status of this snapshot.
    fn bytes(&self) -> Bytes {
        let mut object = self.pod.to_object();
        if let Some(status) = &self.status {
            object.status = Some(api::PodStatus::clone(status));
        }
        pod_bytes::encode(&serde_json::to_value(object).unwrap_or_default()).into()
    }
}

/// Snapshots of all pods, ordered by UID.
fn snapshot(feed: &dyn PodFeed) -> BTreeMap<PodUid, PodSnapshot> {
    let pods = feed.pods();
    pods.iter()
        .map(|pod| (pod.uid().clone(), PodSnapshot { pod: pod.clone(), status: feed.status(pod.uid()) }))
        .collect()
}

/// Pods service, and the task that sends watch events.
pub struct PodsApi {
    feed: Arc<dyn PodFeed>,
    clients: Arc<Mutex<Vec<Queue>>>,
    metrics: PodWatchMetrics,
}

impl PodsApi {
    /// Creates the service; watchers get no change events before [`PodsApi::run`].
    pub fn new(feed: Arc<dyn PodFeed>, metrics: PodWatchMetrics) -> Self {
        Self { feed, clients: Arc::default(), metrics }
    }

    /// gRPC routes of the service.
    pub fn routes(&self) -> Routes {
        let service = Service { feed: self.feed.clone(), clients: self.clients.clone(), limit: RateLimit::default() };
        Routes::new(Deadline(PodsServer::new(service)))
    }

    /// Sends changes to the watching clients until stopped; their streams end then.
    pub async fn run(self, stop: CancellationToken) {
        let mut changes = self.feed.changes();
        let mut known = snapshot(&*self.feed);
        loop {
            tokio::select! {
                biased;
                () = stop.cancelled() => break,
                changed = changes.next() => if changed.is_none() { break },
            }
            let now = snapshot(&*self.feed);
            if self.has_clients() {
                difference(&known, &now).for_each(|event| self.publish(&event));
            }
            known = now;
        }
        self.clients.lock().unwrap_or_else(PoisonError::into_inner).clear();
    }

    fn has_clients(&self) -> bool {
        !self.clients.lock().unwrap_or_else(PoisonError::into_inner).is_empty()
    }

    fn publish(&self, event: &WatchPodsEvent) {
        let mut clients = self.clients.lock().unwrap_or_else(PoisonError::into_inner);
        clients.retain(|client| match client.try_send(Ok(event.clone())) {
            Ok(()) => true,
            Err(mpsc::error::TrySendError::Closed(_)) => false,
            Err(mpsc::error::TrySendError::Full(_)) => {
                self.metrics.dropped.inc();
                warn!("Dropped slow watch client, its event queue is full");
                false
            }
        });
    }
}

/// Events that lead from one snapshot to the next.
fn difference<'a>(
    before: &'a BTreeMap<PodUid, PodSnapshot>,
    now: &'a BTreeMap<PodUid, PodSnapshot>,
) -> impl Iterator<Item = WatchPodsEvent> + use<'a> {
    let gone = before.iter().filter(|(uid, _)| !now.contains_key(*uid)).map(|(_, seen)| {
        let id = seen.pod.id();
        let stub = json!({"metadata": {"name": &*id.name, "namespace": &*id.namespace, "uid": id.uid.as_str()}});
        event(EventType::Deleted, pod_bytes::encode(&stub).into())
    });
    let come = now.iter().filter_map(|(uid, seen)| match before.get(uid) {
        None => Some(event(EventType::Added, seen.bytes())),
        Some(known) if !known.is(seen) => Some(event(EventType::Modified, seen.bytes())),
        Some(_) => None,
    });
    gone.chain(come)
}

fn event(kind: EventType, pod: Bytes) -> WatchPodsEvent {
    WatchPodsEvent { r#type: kind.into(), pod }
}

struct Service {
    feed: Arc<dyn PodFeed>,
    clients: Arc<Mutex<Vec<Queue>>>,
    limit: RateLimit,
}

#[async_trait]
impl Pods for Service {
    type WatchPodsStream = Pin<Box<dyn Stream<Item = Result<WatchPodsEvent, Status>> + Send>>;

    async fn watch_pods(&self, _request: Request<WatchPodsRequest>) -> Result<Response<Self::WatchPodsStream>, Status> {
        let (queue, events) = mpsc::channel(QUEUE);
        {
            let mut clients = self.clients.lock().unwrap_or_else(PoisonError::into_inner);
            clients.retain(|client| !client.is_closed());
            if clients.len() >= CLIENTS {
                return Err(Status::resource_exhausted("too many watch clients"));
            }
            clients.push(queue);
        }
        // Read after registration: an event may repeat a pod, but none is missed.
        let there = snapshot(&*self.feed).into_values().map(|seen| Ok(event(EventType::Added, seen.bytes())));
        let complete = stream::iter([Ok(event(EventType::InitialSyncComplete, Bytes::new()))]);
        let end = stream::iter([Err(Status::resource_exhausted("watch client channel closed"))]);
        let all = stream::iter(there).chain(complete).chain(ReceiverStream::new(events)).chain(end);
        Ok(Response::new(Box::pin(all)))
    }

    async fn list_pods(&self, request: Request<ListPodsRequest>) -> Result<Response<ListPodsResponse>, Status> {
        self.limit.admit(request)?;
        let pods = snapshot(&*self.feed).into_values().map(|seen| seen.bytes()).collect();
        Ok(Response::new(ListPodsResponse { pods }))
    }

    async fn get_pod(&self, request: Request<GetPodRequest>) -> Result<Response<GetPodResponse>, Status> {
        let uid = self.limit.admit(request)?.into_inner().pod_uid;
        let found = self.feed.pods().iter().find(|pod| pod.uid().as_str() == uid).cloned();
        let pod = found.ok_or_else(|| Status::not_found(format!("pod with UID {uid} not found")))?;
        let status = self.feed.status(pod.uid());
        Ok(Response::new(GetPodResponse { pod: PodSnapshot { pod, status }.bytes() }))
    }
}
