//! Pages of the read-only port, `/pods` and `/metrics`, and the health checks of the agent.
//!
//! The JSON of a pod is cached with the pod and the status it was built from; the page is the concatenation and is
//! cached until a pod or a status changes. Entries of deleted pods are removed, whether or not the page is read again.

use std::{
    collections::{HashMap, HashSet},
    io::Write,
    pin::pin,
    sync::{Arc, Mutex, PoisonError, Weak},
    time::{Duration, Instant},
};

use bytes::{BufMut, Bytes, BytesMut};
use flate2::{Compression, write::GzEncoder};
use futures::StreamExt;
use serde::Serialize;
use tokio::sync::watch;
use tokio_util::sync::CancellationToken;
use tracing::{error, info};

use super::task_liveness::TaskLivenessRegistry;
use crate::{
    engine::{PodReader, SyncLoopLiveness},
    logging::LogHandle,
};
use berth_metrics::{Registry, SliMetrics, exposition::ExpositionFormat};
use berth_server::ports::{Health, SnapshotPages};
use berth_status::StatusManager;
use berth_types::{Pod, PodSpec, PodUid, api};

/// Lifetime of a cached metrics page: concurrent scrapes share one page (spec 04b §8).
const FRESH: Duration = Duration::from_secs(1);
/// Debounce between a change of the pods and the removal of cache entries of deleted pods.
const SETTLING: Duration = Duration::from_secs(1);

/// Serves `/pods` and `/metrics`.
pub struct AgentPages {
    pods: PodReader,
    status: Arc<StatusManager>,
    changes: watch::Receiver<u64>,
    registry: Registry,
    started: u64,
    written: Mutex<PodPageCache>,
    kept: Mutex<Vec<CachedMetricsPage>>,
}

/// Encoded metrics page, plain or gzip-compressed, shared by scrapes for 1 s.
struct CachedMetricsPage {
    format: ExpositionFormat,
    is_zipped: bool,
    made: Instant,
    bytes: Bytes,
}

/// Cached JSON: per pod, and of the whole page.
#[derive(Default)]
struct PodPageCache {
    each: HashMap<PodUid, CachedPodJson>,
    page: Option<Page>,
}

/// Cached `/pods` page, valid for this list of pods and this number of status changes.
struct Page {
    pods: Weak<Vec<Arc<Pod>>>,
    changes: u64,
    bytes: Bytes,
}

struct CachedPodJson {
    pod: Arc<Pod>,
    status: Option<Arc<api::PodStatus>>,
    json: Bytes,
}

/// Item of a `PodList`: the object without kind and version, as kubelet lists it.
#[derive(Serialize)]
struct Item<'a> {
    metadata: &'a k8s_openapi::apimachinery::pkg::apis::meta::v1::ObjectMeta,
    spec: &'a PodSpec,
    status: &'a api::PodStatus,
}

impl AgentPages {
    /// `started` is the process start in Unix seconds.
    pub fn new(pods: PodReader, status: Arc<StatusManager>, registry: Registry, started: u64) -> Self {
        let changes = status.changes();
        Self { pods, status, changes, registry, started, written: Mutex::default(), kept: Mutex::default() }
    }

    /// Removes cache entries of deleted pods, debounced, until stopped.
    pub async fn evict_deleted_pods(self: Arc<Self>, stop: CancellationToken) {
        let mut changes = pin!(self.pods.changes());
        let forget = async {
            while changes.next().await.is_some() {
                // Pods are created and deleted in bursts.
                tokio::time::sleep(SETTLING).await;
                let left: HashSet<PodUid> = self.pods.desired().iter().map(|pod| pod.uid().clone()).collect();
                let mut written = self.written.lock().unwrap_or_else(PoisonError::into_inner);
                written.page = None;
                written.each.retain(|uid, _| left.contains(uid));
                if written.each.capacity() > 4 * written.each.len() {
                    written.each.shrink_to_fit();
                }
            }
        };
        tokio::select! {
            () = stop.cancelled() => {}
            () = forget => {}
        }
    }

    fn item(&self, pod: &Arc<Pod>, written: &mut HashMap<PodUid, CachedPodJson>) -> Bytes {
        // API pods show the status last received from the API server; only static pods show the status manager's.
        let status = if pod.is_static() { self.status.status(pod.uid()) } else { None };
        if let Some(known) = written.get(pod.uid())
            && Arc::ptr_eq(&known.pod, pod)
            && same(known.status.as_ref(), status.as_ref())
        {
            return known.json.clone();
        }
        let unset = api::PodStatus::default();
        let shown = status.as_deref().or(pod.status.as_deref()).unwrap_or(&unset);
        let item = Item { metadata: &pod.metadata, spec: pod.spec(), status: shown };
        let json = Bytes::from(serde_json::to_vec(&item).unwrap_or_else(|_| b"null".to_vec()));
        written.insert(pod.uid().clone(), CachedPodJson { pod: pod.clone(), status, json: json.clone() });
        json
    }
}

fn same(a: Option<&Arc<api::PodStatus>>, b: Option<&Arc<api::PodStatus>>) -> bool {
    match (a, b) {
        (Some(a), Some(b)) => Arc::ptr_eq(a, b),
        (None, None) => true,
        _ => false,
    }
}

impl SnapshotPages for AgentPages {
    fn pods(&self) -> Bytes {
        // Read before the pods and statuses: a status that changes meanwhile invalidates the page.
        let changes = *self.changes.borrow();
        let pods = self.pods.desired();
        let mut written = self.written.lock().unwrap_or_else(PoisonError::into_inner);
        let is_same = |page: &&Page| page.changes == changes && std::ptr::eq(page.pods.as_ptr(), &*pods);
        if let Some(page) = written.page.as_ref().filter(is_same) {
            return page.bytes.clone();
        }
        let last = written.page.take().map_or(0, |page| page.bytes.len());
        let mut page = BytesMut::with_capacity(last);
        page.put_slice(br#"{"kind":"PodList","apiVersion":"v1","metadata":{},"items":"#);
        if pods.is_empty() {
            page.put_slice(b"null");
        } else {
            for (i, pod) in pods.iter().enumerate() {
                page.put_u8(if i == 0 { b'[' } else { b',' });
                page.put_slice(&self.item(pod, &mut written.each));
            }
            page.put_u8(b']');
        }
        page.put_slice(b"}\n");
        let bytes = page.freeze();
        written.page = Some(Page { pods: Arc::downgrade(&pods), changes, bytes: bytes.clone() });
        bytes
    }

    fn metrics(&self, format: ExpositionFormat, is_zipped: bool) -> Result<Bytes, String> {
        // Concurrent requests wait for this lock and share the page (single-flight).
        let mut kept = self.kept.lock().unwrap_or_else(PoisonError::into_inner);
        kept.retain(|page| page.made.elapsed() < FRESH);
        let found = |kept: &[CachedMetricsPage], zipped| {
            kept.iter().find(|page| page.format == format && page.is_zipped == zipped).map(|page| page.bytes.clone())
        };
        if let Some(bytes) = found(&kept, is_zipped) {
            return Ok(bytes);
        }
        let plain = found(&kept, false).unwrap_or_else(|| {
            let mut page = Vec::with_capacity(64 << 10);
            format.encode(self.registry.gather(), &mut page);
            let bytes = Bytes::from(page);
            kept.push(CachedMetricsPage { format, is_zipped: false, made: Instant::now(), bytes: bytes.clone() });
            bytes
        });
        if !is_zipped {
            return Ok(plain);
        }
        let mut zip = GzEncoder::new(Vec::with_capacity(plain.len() / 8), Compression::fast());
        let bytes = zip.write_all(&plain).and_then(|()| zip.finish()).map_err(|e| e.to_string())?;
        let bytes = Bytes::from(bytes);
        kept.push(CachedMetricsPage { format, is_zipped, made: Instant::now(), bytes: bytes.clone() });
        Ok(bytes)
    }

    fn process_start(&self) -> u64 {
        self.started
    }
}

/// Maximum time without a successful flush of the log before its check fails (spec 01 §8.2).
const LOG_LIMIT: Duration = Duration::from_secs(120);

/// Period in which all checks run to update their metrics.
const COUNTING: Duration = Duration::from_secs(10);

/// Inputs of the health checks.
pub struct HealthDeps {
    /// Heartbeat of the sync loop.
    pub heartbeat: SyncLoopLiveness,
    /// `syncFrequency`.
    pub sync_frequency: Duration,
    /// Log, checked for its last successful flush.
    pub log: LogHandle,
    /// Liveness of all other long-running tasks.
    pub liveness: TaskLivenessRegistry,
    /// Why the registration server of device plugins has failed; `None` while it works.
    pub device_plugins: watch::Receiver<Option<String>>,
    /// SLI metrics that count the check results.
    pub slis: SliMetrics,
}

/// Name of the check of the device plugin registration server (spec 06c §1.10).
const DEVICE_PLUGIN: &str = "device-plugin";
const DEVICE_PLUGIN_FAILED: &str = "device registration error: device plugin registration gRPC server failed and no \
                                    device plugins can register";

/// Checks behind `/healthz` on the main and the read-only port, and behind the systemd watchdog. kubelet's checks come
/// first, then one per task with registered liveness (spec 05 §11).
pub struct AgentHealth {
    deps: HealthDeps,
    names: Vec<&'static str>,
}

impl AgentHealth {
    /// Creates checks for the tasks that are registered so far.
    pub fn new(deps: HealthDeps) -> Self {
        let names = ["log", "syncloop", DEVICE_PLUGIN].into_iter().chain(deps.liveness.names()).collect();
        Self { deps, names }
    }

    /// Runs and counts all checks periodically until stopped, so that the metrics do not depend on requests to
    /// `/healthz` (spec 08 §7).
    pub async fn keep_counting(self: Arc<Self>, stop: CancellationToken) {
        let mut ticks = tokio::time::interval(COUNTING);
        let mut failing = HashSet::new();
        loop {
            tokio::select! {
                () = stop.cancelled() => return,
                _ = ticks.tick() => {}
            }
            self.checked("ping", true);
            for name in &self.names {
                let why = self.check(name);
                self.checked(name, why.is_none());
                match why {
                    Some(err) if failing.insert(*name) => {
                        error!(check = name, err, "Health check failed");
                    }
                    None if failing.remove(name) => info!(check = name, "Health check recovered"),
                    Some(_) | None => {}
                }
            }
        }
    }
}

impl Health for AgentHealth {
    fn names(&self) -> &[&'static str] {
        &self.names
    }

    fn check(&self, name: &str) -> Option<String> {
        match name {
            "syncloop" => self.deps.heartbeat.check(self.deps.sync_frequency).map(str::to_owned),
            DEVICE_PLUGIN => self.deps.device_plugins.borrow().is_some().then(|| DEVICE_PLUGIN_FAILED.to_owned()),
            "log" => (self.deps.log.since_flush() >= LOG_LIMIT).then(|| "logging blocked".to_owned()),
            other => {
                let silent = self.deps.liveness.overdue_for(other)?;
                Some(format!("no heartbeat for {} s", silent.as_secs()))
            }
        }
    }

    fn checked(&self, name: &str, passed: bool) {
        self.deps.slis.checked(name, passed);
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;
    use crate::engine::PodSnapshot;
    use berth_metrics::StatusMetrics;

    fn pod(uid: &str) -> Arc<Pod> {
        let object = json!({"metadata": {"uid": uid, "name": uid, "namespace": "default"}, "spec": {"containers": []}});
        let object = serde_json::from_value(object).expect("a pod");
        Arc::new(Pod::new(object).expect("complete"))
    }

    #[tokio::test]
    async fn a_status_that_changes_is_shown() {
        let registry = Registry::default();
        let status = Arc::new(StatusManager::new(StatusMetrics::new(&registry)));
        let own = {
            let object = json!({"metadata": {"uid": "a", "name": "a", "namespace": "default", "annotations":
                {"kubernetes.io/config.source": "file"}}, "spec": {"containers": []}});
            Arc::new(Pod::new(serde_json::from_value(object).expect("a pod")).expect("complete"))
        };
        let pods = PodReader::fixed(vec![own.clone()]);
        let pages = AgentPages::new(pods, status.clone(), registry, 0);
        let before = pages.pods();
        assert_eq!(pages.pods().as_ptr(), before.as_ptr(), "the same page");
        let running = api::PodStatus { phase: Some("Running".to_owned()), ..api::PodStatus::default() };
        status.set(&own, running, jiff::Timestamp::now());
        let after = pages.pods();
        assert!(String::from_utf8_lossy(&after).contains("\"phase\":\"Running\""), "{after:?}");
        assert_ne!(after, before);
    }

    #[tokio::test(start_paused = true)]
    async fn the_page_keeps_nothing_of_pods_that_are_gone() {
        let registry = Registry::default();
        let status = Arc::new(StatusManager::new(StatusMetrics::new(&registry)));
        let of = |desired| Arc::new(PodSnapshot { desired: Arc::new(desired), ..PodSnapshot::default() });
        let (published, snapshots) = watch::channel(of(vec![pod("a"), pod("b")]));
        let pages = Arc::new(AgentPages::new(PodReader::new(snapshots), status, registry, 0));
        let stop = CancellationToken::new();
        let task = tokio::spawn(pages.clone().evict_deleted_pods(stop.clone()));
        let page = pages.pods();
        let again = pages.pods();
        assert_eq!((again.as_ptr(), pages.written.lock().expect("whole").each.len()), (page.as_ptr(), 2));
        drop((again, page));
        let gone = Arc::downgrade(&published.borrow().desired[0]);
        let left = published.borrow().desired[1].clone();
        published.send_replace(of(vec![left]));
        tokio::time::sleep(SETTLING * 2).await;
        assert_eq!((gone.upgrade().is_none(), pages.written.lock().expect("whole").each.len()), (true, 1));
        assert!(pages.written.lock().expect("whole").page.is_none());
        stop.cancel();
        task.await.expect("no panic");
    }
}
