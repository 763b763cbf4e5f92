//! Mirror pod writer: reconciles one mirror pod per static pod on the API server.
//!
//! ```text
//!  workers ─want──►  ┌─────────┐ ──POST, DELETE──► ApiClient
//!  housekeeping ─keep►│ mirrors │
//!  watches ─────────►└─────────┘
//! ```
//!
//! Requests never block. One task compares the desired mirrors with the watch; writes are sequential per name,
//! concurrent across names. A mirror is created only after the watch has shown that its predecessor is deleted.
//! [`next_step`] computes the next step.
//!
//! Implements spec 02a §5, 10 §4.4, §7.

mod next_step;
#[cfg(test)]
mod tests;

use std::{
    collections::{HashMap, HashSet},
    sync::{Arc, Mutex, MutexGuard, PoisonError},
    time::Duration,
};

use bytes::Bytes;
use futures::{StreamExt, future::BoxFuture, stream::FuturesUnordered};
use serde::Deserialize;
use tokio::{sync::Notify, time::Instant};
use tokio_util::sync::CancellationToken;
use tracing::{error, info, warn};

use self::next_step::{
    CreateFailure, DesiredMirror, MirrorHistory, MirrorStep, ObservedMirror, Owner, after_create, hash_of, mirror_of,
    next,
};
use super::{
    ReflectorStore, Snapshot,
    api::{ApiClient, ApiError, Call, Resource, parse},
    backoff,
};
use berth_metrics::ApiWriteMetrics;
use berth_ports::{EventRecord, EventSink, MirrorPodState, MirrorPods};
use berth_types::{Pod, PodFullName, api};

/// Deadline of a write.
const DEADLINE: Duration = Duration::from_secs(35);
/// Retry interval of a refused mirror when nothing changed.
const REFUSED: Duration = Duration::from_secs(3600);
/// Minimum time between two creations of one name, whatever the watch shows.
const AGAIN: Duration = Duration::from_secs(1);
/// Interval at which the watch is reevaluated while it lags behind a creation.
const LAG_RECHECK: Duration = Duration::from_secs(5);
/// Maximum back-off if the name is taken or the namespace is missing.
const LATER: Duration = Duration::from_secs(60);

/// Dependencies of the mirror pod writer.
pub struct MirrorDeps {
    /// Name of this node.
    pub node: String,
    /// Client of the API server.
    pub api: Arc<dyn ApiClient>,
    /// Pods of this node, from the watch.
    pub pods: ReflectorStore<Pod>,
    /// This node's object, from the watch: owner of the mirrors.
    pub nodes: ReflectorStore<api::Node>,
    /// Receives `APIWriteRefused`.
    pub events: Arc<dyn EventSink>,
    /// Counter of mirror pod creations that the API server rejected.
    pub metrics: ApiWriteMetrics,
}

#[derive(Default)]
struct DesiredMirrors {
    wanted: HashMap<PodFullName, Arc<Pod>>,
    /// `None` until every source has delivered its pods.
    kept: Option<HashMap<PodFullName, MirrorPodState>>,
}

#[derive(Default)]
struct SharedDesiredMirrors {
    desired: Mutex<DesiredMirrors>,
    more: Notify,
}

impl SharedDesiredMirrors {
    fn lock(&self) -> MutexGuard<'_, DesiredMirrors> {
        self.desired.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Receives the desired mirrors; see the module's documentation.
pub struct Mirrors(Arc<SharedDesiredMirrors>);

impl MirrorPods for Mirrors {
    fn ensure(&self, pod: &Arc<Pod>) {
        let mut desired = self.0.lock();
        let before = desired.wanted.insert(pod.full_name(), pod.clone());
        if before.is_none_or(|before| before.uid() != pod.uid()) {
            self.0.more.notify_one();
        }
    }

    fn set_desired(&self, names: HashMap<PodFullName, MirrorPodState>) {
        let mut desired = self.0.lock();
        if desired.kept.as_ref() == Some(&names) {
            return;
        }
        desired.wanted.retain(|name, pod| names.get(name) == Some(&MirrorPodState::Desired(pod.uid().clone())));
        desired.kept = Some(names);
        self.0.more.notify_one();
    }
}

/// Reconciliation state of one name.
#[derive(Default)]
struct MirrorState {
    memory: MirrorHistory,
    in_flight: bool,
    failures: u32,
    not_before: Option<Instant>,
    refused_until: Option<Instant>,
    created_at: Option<Instant>,
    recheck_at: Option<Instant>,
}

#[derive(Debug)]
enum WriteRequest {
    Create { hash: String, owner: String },
    Delete { uid: String },
}

struct CompletedWrite {
    name: PodFullName,
    asked: WriteRequest,
    answer: Result<Bytes, ApiError>,
}

/// Task that writes mirror pods.
pub struct MirrorWriter {
    deps: MirrorDeps,
    shared: Arc<SharedDesiredMirrors>,
    tracks: HashMap<PodFullName, MirrorState>,
    flights: FuturesUnordered<BoxFuture<'static, CompletedWrite>>,
}

/// Returns the receiver of desired mirrors, and the task that reconciles them.
pub fn mirrors(deps: MirrorDeps) -> (Mirrors, MirrorWriter) {
    let shared = Arc::<SharedDesiredMirrors>::default();
    let writer =
        MirrorWriter { deps, shared: shared.clone(), tracks: HashMap::new(), flights: FuturesUnordered::new() };
    (Mirrors(shared), writer)
}

impl MirrorWriter {
    /// Runs until stopped; mirrors stay then.
    pub async fn run(mut self, stop: CancellationToken) {
        let (mut pods, mut nodes) = (self.deps.pods.clone(), self.deps.nodes.clone());
        let shared = self.shared.clone();
        loop {
            self.launch();
            let wake = self.wakes_at();
            tokio::select! {
                biased;
                () = stop.cancelled() => return,
                Some(landing) = self.flights.next(), if !self.flights.is_empty() => self.complete(landing),
                () = shared.more.notified() => {}
                () = pods.changed() => {}
                () = nodes.changed() => {}
                () = super::sleep_until(wake) => {}
            }
        }
    }

    /// Starts the writes that are due.
    fn launch(&mut self) {
        let snapshot = self.deps.pods.snapshot();
        if !snapshot.synced {
            return;
        }
        let (owner, now) = (self.owner(), Instant::now());
        let shared = self.shared.clone();
        let desired = shared.lock();
        let names = names(&desired, &snapshot);
        self.tracks.retain(|name, track| names.contains(name) || track.in_flight);
        for name in names {
            let track = self.tracks.entry(name.clone()).or_default();
            if track.refused_until.is_some_and(|at| at <= now) {
                (track.memory.refused, track.refused_until) = (None, None);
            }
            if track.in_flight || track.not_before.is_some_and(|at| at > now) {
                continue;
            }
            (track.not_before, track.recheck_at) = (None, None);
            let shown = snapshot.get(&name.namespace, &name.name);
            let target = desired_mirror(&desired, &name);
            let step = next(
                target,
                shown.map(|pod| ObservedMirror::of(pod)),
                &snapshot.version,
                owner.as_ref(),
                &track.memory,
            );
            let (call, asked) = match (step, target, &owner) {
                (MirrorStep::Delete(uid), ..) => {
                    let call = Call::delete_now(Resource::PODS, &name.namespace, &name.name, &uid);
                    (call, WriteRequest::Delete { uid })
                }
                (MirrorStep::Await, ..) => {
                    track.recheck_at = Some(now + LAG_RECHECK); // a relist without changes causes no wake-up
                    continue;
                }
                (MirrorStep::Create, ..) if track.created_at.is_some_and(|at| now < at + AGAIN) => {
                    track.not_before = track.created_at.map(|at| at + AGAIN);
                    continue;
                }
                (MirrorStep::Create, DesiredMirror::Mirror(pod), Some(owner)) => match create(pod, owner) {
                    Some(made) => made,
                    None => continue,
                },
                _ => continue,
            };
            track.in_flight = true;
            let api = self.deps.api.clone();
            self.flights.push(Box::pin(async move {
                let answer = match tokio::time::timeout(DEADLINE, api.call(call.within(DEADLINE))).await {
                    Ok(answer) => answer,
                    Err(_) => Err(ApiError::Timeout(DEADLINE)),
                };
                CompletedWrite { name, asked, answer }
            }));
        }
    }

    fn wakes_at(&self) -> Option<Instant> {
        let idle = self.tracks.values().filter(|track| !track.in_flight);
        idle.flat_map(|track| [track.not_before, track.refused_until, track.recheck_at]).flatten().min()
    }

    /// Owner of the mirrors; `None` while the node's object is missing or being deleted.
    fn owner(&self) -> Option<Owner> {
        let node = self.deps.nodes.get("", &self.deps.node)?;
        let meta = &node.metadata;
        let uid = meta.uid.clone().filter(|_| meta.deletion_timestamp.is_none())?;
        Some(Owner { name: self.deps.node.clone(), uid })
    }

    fn complete(&mut self, landing: CompletedWrite) {
        let CompletedWrite { name, asked, answer } = landing;
        let Some(track) = self.tracks.get_mut(&name) else { return };
        track.in_flight = false;
        match (asked, answer) {
            (WriteRequest::Create { .. }, Ok(body)) => {
                info!(pod = %object(&name), "Created a mirror pod for static pod");
                track.succeeded();
                track.created_at = Some(Instant::now());
                track.memory.created = parse::<CreateResponse>(&body).ok().map(|made| made.metadata.resource_version);
            }
            (WriteRequest::Delete { uid }, answer) => match answer {
                Err(error) if !(matches!(error.code(), 404 | 409)) => {
                    let wait = track.failed(error.retry_after());
                    warn!(pod = %object(&name), err = %error, retryIn = ?wait, "Failed deleting a mirror pod");
                }
                _ => {
                    info!(pod = %object(&name), podUID = %uid, "Deleted mirror pod");
                    track.succeeded();
                    track.memory.deleted = Some(uid);
                }
            },
            (WriteRequest::Create { hash, owner }, Err(error)) => {
                let wait = match after_create(&error) {
                    CreateFailure::OfNode => track.refused(hash, Some(owner)),
                    CreateFailure::OfManifest => track.refused(hash, None),
                    CreateFailure::Later => track.failed(Some((backoff(track.failures + 1) * 6).min(LATER))),
                    CreateFailure::Retry(wait) => track.failed(wait),
                };
                error!(pod = %object(&name), err = %error, retryIn = ?wait, "Failed creating a mirror pod");
                if track.memory.refused.is_some() {
                    self.deps.metrics.refused("pods", "create", error.reason());
                    let text = format!("create pods {}: {error}", object(&name));
                    self.deps.events.record(EventRecord::node_warning("APIWriteRefused", text));
                }
            }
        }
    }
}

impl MirrorState {
    fn succeeded(&mut self) {
        (self.failures, self.not_before) = (0, None);
        (self.memory.refused, self.refused_until) = (None, None);
    }

    fn failed(&mut self, wait: Option<Duration>) -> Duration {
        self.failures = self.failures.saturating_add(1);
        let wait = wait.unwrap_or_else(|| backoff(self.failures));
        self.not_before = Some(Instant::now() + wait);
        wait
    }

    fn refused(&mut self, hash: String, owner: Option<String>) -> Duration {
        self.memory.refused = Some((hash, owner));
        self.refused_until = Some(Instant::now() + REFUSED);
        REFUSED
    }
}

/// Fields of the response to a POST.
#[derive(Deserialize)]
struct CreateResponse {
    metadata: CreateResponseMetadata,
}

#[derive(Deserialize)]
#[serde(rename_all = "camelCase")]
struct CreateResponseMetadata {
    resource_version: String,
}

fn create(pod: &Pod, owner: &Owner) -> Option<(Call, WriteRequest)> {
    // An object that was parsed from JSON can be serialized.
    let body = serde_json::to_vec(&mirror_of(pod, owner)).ok()?;
    let call = Call::create(Resource::PODS, pod.namespace(), body);
    Some((call, WriteRequest::Create { hash: hash_of(pod).to_owned(), owner: owner.uid.clone() }))
}

/// Names that have a mirror or should have one.
fn names(desired: &DesiredMirrors, snapshot: &Snapshot<Pod>) -> HashSet<PodFullName> {
    let mirrors = snapshot.objects.iter().filter(|(_, pod)| ObservedMirror::of(pod).hash.is_some());
    let mirrors = mirrors
        .map(|((namespace, name), _)| PodFullName { name: name.as_str().into(), namespace: namespace.as_str().into() });
    desired.wanted.keys().cloned().chain(mirrors).collect()
}

fn desired_mirror<'a>(desired: &'a DesiredMirrors, name: &PodFullName) -> DesiredMirror<'a> {
    match (desired.wanted.get(name), &desired.kept) {
        (Some(pod), _) => DesiredMirror::Mirror(pod),
        (None, Some(kept)) if !kept.contains_key(name) => DesiredMirror::Remove,
        (None, _) => DesiredMirror::Leave,
    }
}

fn object(name: &PodFullName) -> String {
    format!("{}/{}", name.namespace, name.name)
}
