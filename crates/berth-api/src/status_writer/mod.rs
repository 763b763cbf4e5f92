//! Pod status writer: patches pod statuses on the API server and deletes terminated pods.
//!
//! ```text
//!  StatusManager ──changes──► ┌────────┐ ──PATCH status, DELETE──► ApiClient
//!  store of pods ──changed──► │ writer │ ◄──────answers──────────┘
//!  delays ──────────────────► └────────┘ ──sent, forget──► StatusManager
//! ```
//!
//! One task. Nothing is read before a write: a status is compared with the watched object, or with the server's last
//! response while the watch lags behind, and the UID in the patch guards the write. Writes are sequential per pod and
//! concurrent across pods. Terminal statuses and readiness changes take precedence: other writes wait while [`CALM`]
//! writes are in flight, so that intermediate changes coalesce and the client's rate limit is left to what matters. A
//! status that the server already has causes no request.
//!
//! Implements spec 02b §8.3-8.5, 10 §4.3, §7, §11; [`next_step`] computes the next step, [`retry_policy`] classifies failures.

mod next_step;
mod pod_state;
mod retry_policy;
mod server_pod;
#[cfg(test)]
mod tests;

use std::{collections::HashMap, sync::Arc, time::Duration};

use bytes::Bytes;
use futures::{StreamExt, future::BoxFuture, stream::FuturesUnordered};
use tokio::time::Instant;
use tokio_util::sync::CancellationToken;
use tracing::{debug, error, warn};

use self::{
    next_step::{ComparedVersions, StatusStep},
    pod_state::PodStatusState,
    retry_policy::{WriteFailureAction, after_delete, after_patch, cause_of},
    server_pod::WriteResponse,
};
use super::{
    ReflectorStore,
    api::{ApiClient, ApiError, Call, Resource, parse},
};
use berth_metrics::ApiWriteMetrics;
use berth_ports::{Clock, EventRecord, EventSink, TaskLiveness};
use berth_status::StatusManager;
use berth_types::{Pod, PodRef, PodUid, api};

/// Maximum number of concurrent writes.
const IN_FLIGHT: usize = 16;
/// Writes in flight from which on only urgent writes start. With 110 pods starting at once, most intermediate states
/// are obsolete before their turn.
const CALM: usize = 2;
/// A write in flight for longer than this no longer counts towards [`CALM`], so that a stuck one delays no other.
const STUCK: Duration = Duration::from_secs(3);
/// Deadline of a write; the server's own is 34 s (spec 10 §9).
const DEADLINE: Duration = Duration::from_secs(35);

/// Callback for each status that was written.
pub type OnWritten = Arc<dyn Fn(&PodUid, &api::PodStatus) + Send + Sync>;

/// Dependencies of the status writer.
pub struct StatusWriterDeps {
    /// Source of the local statuses.
    pub status: Arc<StatusManager>,
    /// Client of the API server.
    pub api: Arc<dyn ApiClient>,
    /// Pods of this node, from the watch.
    pub pods: ReflectorStore<Pod>,
    /// Receives `StatusUpdateRejected`.
    pub events: Arc<dyn EventSink>,
    /// Wall clock.
    pub clock: Arc<dyn Clock>,
    /// Gauge of pending statuses, and counter of rejected status patches.
    pub metrics: ApiWriteMetrics,
    /// Called for each status that was written (startup latency, spec 02b §9).
    pub on_written: Option<OnWritten>,
    /// Reports liveness of the task.
    pub liveness: TaskLiveness,
}

/// Only writer of pod statuses; see the module's documentation.
pub struct StatusWriter {
    deps: StatusWriterDeps,
    /// Boxed, because a hash table has up to twice the capacity it needs.
    tracks: HashMap<PodUid, Box<PodStatusState>>,
    flights: FuturesUnordered<BoxFuture<'static, CompletedWrite>>,
}

/// Request of a write in flight.
#[derive(Clone, Debug)]
enum WriteRequest {
    Patch { versions: ComparedVersions, status: Arc<api::PodStatus> },
    Delete,
}

/// Response to a status patch or a pod deletion, with the request it answers.
struct CompletedWrite {
    pod: PodRef,
    asked: WriteRequest,
    answer: Result<Bytes, ApiError>,
}

impl StatusWriter {
    /// Returns a writer; [`StatusWriter::run`] starts it.
    pub fn new(deps: StatusWriterDeps) -> Self {
        Self { deps, tracks: HashMap::new(), flights: FuturesUnordered::new() }
    }

    /// Runs until stopped; writes in flight are cancelled then.
    pub async fn run(mut self, stop: CancellationToken) {
        let mut changes = self.deps.status.changes();
        let mut pods = self.deps.pods.clone();
        self.refresh();
        loop {
            self.deps.liveness.report_progress();
            let wake = self.launch();
            if self.flights.is_empty() {
                self.deps.liveness.mark_idle();
            }
            tokio::select! {
                biased;
                () = stop.cancelled() => return,
                Some(landing) = self.flights.next(), if !self.flights.is_empty() => self.landed(landing),
                changed = changes.changed() => match changed {
                    Ok(()) => self.refresh(),
                    Err(_) => return, // the status manager is gone
                },
                () = pods.changed() => self.refresh(),
                () = super::sleep_until(wake) => {}
            }
        }
    }

    /// Reads the local statuses and the watched pods; marks changed pods as due.
    fn refresh(&mut self) {
        let snapshot = self.deps.pods.snapshot();
        let room = HashMap::with_capacity(self.tracks.len());
        let mut before = std::mem::replace(&mut self.tracks, room);
        for kept in self.deps.status.all_cached() {
            let uid = kept.pod.uid.clone();
            let shown = snapshot.get(&kept.pod.namespace, &kept.pod.name).cloned();
            let mut track = before.remove(&uid).unwrap_or_else(|| Box::new(PodStatusState::new(kept.clone())));
            track.observe(kept, snapshot.synced, shown);
            self.tracks.insert(uid, track);
        }
    }

    /// Starts due writes while the limits allow; returns when the next write becomes due.
    fn launch(&mut self) -> Option<Instant> {
        let now = Instant::now();
        while self.flights.len() < IN_FLIGHT {
            let is_calm = self.under_way(now).count() < CALM;
            let ready = self.tracks.values_mut().filter(|track| track.is_ready(now));
            let ready = ready.filter(|track| is_calm || track.is_urgent());
            let Some(track) = ready.min_by_key(|track| track.rank()) else { break };
            let step = track.next(self.deps.clock.now());
            let (pod, status) = (track.kept.pod.clone(), track.kept.status.clone());
            match step {
                StatusStep::Rest(_) => {}
                StatusStep::AlreadySent(versions) => {
                    let version = versions.status;
                    track.memory.settled = Some(versions);
                    self.record_sent(&pod.uid, version);
                }
                StatusStep::Patch { body, versions } => {
                    track.launched(now);
                    let call = Call::patch(Resource::PODS, &pod.namespace, &pod.name, body).sub("status");
                    self.send(pod, call, WriteRequest::Patch { versions, status });
                }
                StatusStep::Delete { uid } => {
                    track.launched(now);
                    let call = Call::delete_now(Resource::PODS, &pod.namespace, &pod.name, &uid);
                    self.send(pod, call, WriteRequest::Delete);
                }
            }
        }
        let pending = self.tracks.values().filter(|track| track.is_pending()).count();
        self.deps.metrics.status_pending.set(i64::try_from(pending).unwrap_or(i64::MAX));
        if self.flights.len() == IN_FLIGHT {
            return None;
        }
        let has_ready = self.tracks.values().any(|track| track.is_ready(now));
        let relief = self.under_way(now).min().filter(|_| has_ready).map(|began| began + STUCK);
        self.tracks.values().filter_map(|track| track.wakes_at()).chain(relief).min()
    }

    /// Start times of the writes in flight that are not stuck.
    fn under_way(&self, now: Instant) -> impl Iterator<Item = Instant> {
        self.tracks
            .values()
            .filter_map(|track| track.in_flight())
            .filter(move |began| now.duration_since(*began) < STUCK)
    }

    fn send(&self, pod: PodRef, call: Call, asked: WriteRequest) {
        let api = self.deps.api.clone();
        let call = call.within(DEADLINE);
        self.flights.push(Box::pin(async move {
            let answer = match tokio::time::timeout(DEADLINE, api.call(call)).await {
                Ok(answer) => answer,
                Err(_) => Err(ApiError::Timeout(DEADLINE)),
            };
            CompletedWrite { pod, asked, answer }
        }));
    }

    /// Processes a completed write.
    fn landed(&mut self, landing: CompletedWrite) {
        let CompletedWrite { pod, asked, answer } = landing;
        match (asked, answer) {
            (WriteRequest::Patch { versions, status }, Ok(body)) => match parse::<WriteResponse>(&body) {
                Ok(answer) => self.written(&pod, versions, &status, answer),
                // A malformed response may come from a server that wrote nothing: the watch decides.
                Err(error) => self.not_written(&pod, versions, &error),
            },
            (WriteRequest::Patch { versions, .. }, Err(error)) => self.not_written(&pod, versions, &error),
            (WriteRequest::Delete, Ok(_)) => self.deleted(&pod),
            (WriteRequest::Delete, Err(error)) => self.not_deleted(&pod, &error),
        }
    }

    fn written(&mut self, pod: &PodRef, versions: ComparedVersions, status: &api::PodStatus, answer: WriteResponse) {
        let version = versions.status;
        debug!(pod = %pod.object_name(), podUID = %pod.uid, statusVersion = version, "Status for pod updated successfully");
        if let Some(track) = self.tracks.get_mut(&pod.uid) {
            track.landed();
            track.memory.settled = Some(ComparedVersions { server: answer.pod().version.to_owned(), ..versions });
            track.answered(answer);
        }
        self.record_sent(&pod.uid, version);
        if let Some(on_written) = &self.deps.on_written {
            on_written(&pod.uid, status);
        }
    }

    /// Records that the server has that version.
    fn record_sent(&mut self, uid: &PodUid, version: u64) {
        self.deps.status.mark_sent(uid, version, self.deps.clock.now());
        if let (Some(track), Some(kept)) = (self.tracks.get_mut(uid), self.deps.status.cached(uid)) {
            track.keep(kept);
        }
    }

    fn not_written(&mut self, pod: &PodRef, versions: ComparedVersions, error: &ApiError) {
        let Some(track) = self.tracks.get_mut(&pod.uid) else { return };
        match after_patch(error, track.holder()) {
            WriteFailureAction::Gone | WriteFailureAction::Done => {
                debug!(pod = %pod.object_name(), podUID = %pod.uid, err = %error, "Pod no longer exists on the server, skipping status update");
                track.landed();
                track.memory.gone = Some(versions.server);
            }
            WriteFailureAction::Refused => {
                track.landed();
                track.memory.settled = Some(versions);
                error!(pod = %pod.object_name(), podUID = %pod.uid, err = %error, "API server rejected pod status");
                self.deps.metrics.refused("pods/status", "patch", error.reason());
                self.deps.events.record(EventRecord::warning(pod, "StatusUpdateRejected", cause_of(error)));
            }
            WriteFailureAction::Retry(wait) => {
                let next = track.failed(wait, error, Instant::now());
                log_failure(pod, error, next, "Failed to update status for pod");
            }
        }
    }

    /// Forgets a pod that was deleted, or will be once its finalizers are removed.
    fn deleted(&mut self, pod: &PodRef) {
        debug!(pod = %pod.object_name(), podUID = %pod.uid, "Pod fully terminated and removed from the API server");
        if let Some(track) = self.tracks.get_mut(&pod.uid) {
            track.landed();
            track.memory.deleted = true;
        }
        self.deps.status.forget(&pod.uid);
    }

    fn not_deleted(&mut self, pod: &PodRef, error: &ApiError) {
        let Some(track) = self.tracks.get_mut(&pod.uid) else { return };
        match after_delete(error, track.holder()) {
            WriteFailureAction::Done | WriteFailureAction::Gone | WriteFailureAction::Refused => self.deleted(pod),
            WriteFailureAction::Retry(wait) => {
                let next = track.failed(wait, error, Instant::now());
                log_failure(pod, error, next, "Failed to delete pod");
            }
        }
    }
}

/// Logs a failure. The connection pool logs an outage once, so it is not repeated for each pod.
fn log_failure(pod: &PodRef, error: &ApiError, retry_in: Duration, text: &'static str) {
    if matches!(error, ApiError::Unreachable(_)) {
        debug!(pod = %pod.object_name(), podUID = %pod.uid, err = %error, retryIn = ?retry_in, "{text}");
    } else {
        warn!(pod = %pod.object_name(), podUID = %pod.uid, err = %error, retryIn = ?retry_in, "{text}");
    }
}
