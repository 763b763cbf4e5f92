//! Test fakes: a scripted volume plugin that records its calls, and a small object store.

use std::{
    collections::{BTreeMap, BTreeSet, VecDeque},
    path::Path,
    sync::{Arc, Mutex, MutexGuard, PoisonError},
    time::Duration,
};

use async_trait::async_trait;
use k8s_openapi::api::storage::v1::{CSIDriver, VolumeAttachment};
use tokio::sync::{Notify, watch};

#[cfg(test)]
mod machine;

pub use machine::{FakeMachine, disk, removal, session, usage};

use super::{
    attachable::{
        AttachableVolumePlugin, Expansion, FoundVolume, OpError, PublishedVolume, ReconstructedVolume, Removal, Usage,
        VolumeTraits,
    },
    operation::Operation,
    spec::{Mode, VolumeSpec},
};
use berth_ports::{AttachedVolumes, StorageError, StorageObjects, VolumeStats};
use berth_types::{Pod, api};

fn locked<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Scripted result of a plugin call.
#[derive(Clone, Debug)]
pub enum Answer {
    /// Fails with this error.
    Fails(OpError),
    /// Never returns.
    Hangs,
    /// Panics inside the plugin call.
    Panics,
    /// Runs for this duration with progress, unless the operation is canceled.
    Works(Duration),
    /// Blocks until the channel has a message or no sender, then succeeds.
    Blocks(Arc<Mutex<std::sync::mpsc::Receiver<()>>>),
}

/// Fake plugin for volumes of type `nfs`, inline or claimed, which exist only in memory.
pub struct FakePlugin {
    pub traits: VolumeTraits,
    calls: Mutex<Vec<String>>,
    answers: Mutex<BTreeMap<&'static str, VecDeque<Answer>>>,
    /// UIDs of pods with a published volume, and `""` for the stage.
    pub there: Mutex<BTreeSet<String>>,
    /// Volumes staged by an earlier agent.
    pub staged: Mutex<Vec<(Mode, ReconstructedVolume)>>,
    limit: Mutex<Option<Duration>>,
    /// The node reached its attach limit.
    pub is_over: std::sync::atomic::AtomicBool,
    cured: watch::Sender<u64>,
    pub asked: Notify,
}

impl FakePlugin {
    pub fn new(traits: VolumeTraits) -> Arc<Self> {
        let label = "kubernetes.io/fake".to_owned();
        Arc::new(Self {
            traits: VolumeTraits { label, ..traits },
            calls: Mutex::default(),
            answers: Mutex::default(),
            there: Mutex::default(),
            staged: Mutex::default(),
            limit: Mutex::default(),
            is_over: Default::default(),
            cured: watch::Sender::default(),
            asked: Notify::new(),
        })
    }

    /// Sets the timeout of every call.
    pub fn limited(&self, limit: Duration) {
        *locked(&self.limit) = Some(limit);
    }

    /// Scripts the next call of that name, or of that name for that pod (`publish a`).
    pub fn next(&self, call: &'static str, answer: Answer) {
        locked(&self.answers).entry(call).or_default().push_back(answer);
    }

    /// Signals that failed operations may succeed now.
    pub fn cure(&self) {
        self.cured.send_modify(|times| *times += 1);
    }

    /// Returns every call so far, with its pod.
    pub fn calls(&self) -> Vec<String> {
        locked(&self.calls).clone()
    }

    async fn answer(&self, call: &'static str, pod: &str, operation: &Operation) -> Result<(), OpError> {
        locked(&self.calls).push(format!("{call} {pod}").trim_end().to_owned());
        self.asked.notify_waiters();
        let answer = {
            let mut answers = locked(&self.answers);
            let own = answers.get_mut(format!("{call} {pod}").as_str()).and_then(VecDeque::pop_front);
            own.or_else(|| answers.get_mut(call).and_then(VecDeque::pop_front))
        };
        match answer {
            None => Ok(()),
            Some(Answer::Fails(error)) => Err(error),
            Some(Answer::Hangs) => std::future::pending().await,
            Some(Answer::Panics) => panic!("on purpose"),
            Some(Answer::Works(long)) => {
                let until = tokio::time::Instant::now() + long;
                while tokio::time::Instant::now() < until {
                    if operation.is_canceled() {
                        return Err(OpError::uncertain("it was cancelled"));
                    }
                    operation.report_progress();
                    tokio::time::sleep(Duration::from_secs(10)).await;
                }
                Ok(())
            }
            Some(Answer::Blocks(until)) => {
                let blocks = operation.blocking(move || {
                    let _released = locked(&until).recv();
                    Ok(())
                });
                blocks.await
            }
        }
    }
}

/// Returns the pod name, followed by the SELinux label if there is one.
fn labelled(usage: &Usage) -> String {
    let label = usage.label.iter().map(String::as_str);
    [usage.pod.name()].into_iter().chain(label).collect::<Vec<_>>().join(" ")
}

#[async_trait]
impl AttachableVolumePlugin for FakePlugin {
    fn name(&self) -> &'static str {
        "kubernetes.io/fake"
    }

    fn supports(&self, spec: &VolumeSpec) -> bool {
        spec.as_inline().is_some_and(|volume| volume.nfs.is_some())
            || spec.volume().is_some_and(|volume| volume.nfs.is_some())
    }

    async fn describe(&self, _pod: &Pod, spec: &VolumeSpec) -> Result<VolumeTraits, OpError> {
        Ok(VolumeTraits { volume: spec.name.clone(), ..self.traits.clone() })
    }

    async fn stage(&self, usage: &Usage) -> Result<(), OpError> {
        self.answer("stage", &labelled(usage), &usage.operation).await?;
        locked(&self.there).insert(String::new());
        Ok(())
    }

    async fn publish(&self, usage: &Usage) -> Result<PublishedVolume, OpError> {
        self.answer("publish", &labelled(usage), &usage.operation).await?;
        locked(&self.there).insert(usage.pod.uid().to_string());
        Ok(PublishedVolume { path: usage.target.clone(), relabel: true })
    }

    async fn unpublish(&self, removal: &Removal) -> Result<(), OpError> {
        let pod = removal.pod.as_ref().map(|(pod, _)| pod.to_string()).unwrap_or_default();
        self.answer("unpublish", &pod, &removal.operation).await?;
        locked(&self.there).remove(&pod);
        Ok(())
    }

    async fn unstage(&self, removal: &Removal) -> Result<(), OpError> {
        self.answer("unstage", "", &removal.operation).await?;
        locked(&self.there).remove("");
        Ok(())
    }

    async fn expand(&self, expansion: &Expansion) -> Result<u64, OpError> {
        self.answer("expand", expansion.usage.pod.name(), &expansion.usage.operation).await?;
        Ok(expansion.to)
    }

    fn rebuild(&self, found: &FoundVolume) -> Result<ReconstructedVolume, String> {
        if found.name == "odd" {
            return Err("nobody knows what this is".to_owned());
        }
        assert_ne!(found.name, "breaks", "on purpose");
        let volume = api::Volume {
            name: found.name.clone(),
            nfs: Some(api::NFSVolumeSource::default()),
            ..api::Volume::default()
        };
        assert_eq!(found.mode, Mode::Filesystem);
        let traits = VolumeTraits { volume: found.name.clone(), ..self.traits.clone() };
        Ok(ReconstructedVolume { spec: VolumeSpec::inline(&volume), traits, label: None })
    }

    fn staged(&self) -> Result<Vec<(Mode, ReconstructedVolume)>, String> {
        Ok(locked(&self.staged).clone())
    }

    async fn fullness(&self, usage: &Usage, path: &Path) -> Result<VolumeStats, OpError> {
        self.answer("fullness", usage.pod.name(), &usage.operation).await?;
        assert_eq!(usage.target, path);
        Ok(VolumeStats { source: "fake".to_owned(), capacity: 100, ..VolumeStats::default() })
    }

    async fn is_over_limit(&self, _usage: &Usage) -> bool {
        self.is_over.load(std::sync::atomic::Ordering::Relaxed)
    }

    fn limit(&self) -> Duration {
        locked(&self.limit).unwrap_or(Duration::from_secs(120))
    }

    fn recovered(&self) -> watch::Receiver<u64> {
        self.cured.subscribe()
    }
}

/// Fake object store with the test's claims and volumes; `attached` is the node status.
pub struct FakeStorage {
    pub claims: Mutex<BTreeMap<String, Arc<api::PersistentVolumeClaim>>>,
    pub volumes: Mutex<BTreeMap<String, Arc<api::PersistentVolume>>>,
    pub attached: watch::Sender<AttachedVolumes>,
    pub reads: Mutex<usize>,
    pub patches: Mutex<Vec<String>>,
    moved: watch::Sender<u64>,
    pub is_away: std::sync::atomic::AtomicBool,
}

impl Default for FakeStorage {
    fn default() -> Self {
        Self {
            claims: Mutex::default(),
            volumes: Mutex::default(),
            attached: watch::Sender::new(None),
            reads: Mutex::default(),
            patches: Mutex::default(),
            moved: watch::Sender::default(),
            is_away: Default::default(),
        }
    }
}

impl FakeStorage {
    /// Sets the attached volumes of the node status.
    pub fn attach(&self, volumes: &[&str]) {
        let all = volumes.iter().map(|volume| ((*volume).to_owned(), String::new())).collect();
        self.attached.send_replace(Some(Arc::new(all)));
    }

    /// Adds a claim `c<name>` that is bound to a volume `<name>`.
    pub fn put(&self, name: &str, spec: &serde_json::Value) {
        use serde_json::json;
        let mut volume = json!({"metadata": {"name": name}, "spec": spec});
        volume["spec"]["claimRef"] = json!({"uid": format!("uid-{name}")});
        volume["spec"]["nfs"] = json!({"path": "/", "server": "s"});
        if volume["spec"]["volumeMode"].is_null() {
            volume["spec"]["volumeMode"] = json!("Filesystem");
        }
        let claim = json!({"metadata": {"name": format!("c{name}"), "namespace": "n", "uid": format!("uid-{name}")},
            "spec": {"volumeName": name}, "status": {"phase": "Bound", "capacity": {"storage": "1Gi"}}});
        let volume = serde_json::from_value(volume).expect("a volume");
        let claim = serde_json::from_value(claim).expect("a claim");
        locked(&self.volumes).insert(name.to_owned(), Arc::new(volume));
        locked(&self.claims).insert(format!("c{name}"), Arc::new(claim));
    }

    fn read<T: Clone>(&self, kind: &str, name: &str, all: &Mutex<BTreeMap<String, T>>) -> Result<T, StorageError> {
        *locked(&self.reads) += 1;
        if self.is_away.load(std::sync::atomic::Ordering::Relaxed) {
            return Err(StorageError::Other("connection refused".to_owned()));
        }
        locked(all).get(name).cloned().ok_or_else(|| StorageError::NotFound(format!("{kind} {name:?} not found")))
    }
}

#[async_trait]
impl StorageObjects for FakeStorage {
    async fn claim(&self, _: &str, name: &str) -> Result<Arc<api::PersistentVolumeClaim>, StorageError> {
        self.read("persistentvolumeclaims", name, &self.claims)
    }

    async fn volume(&self, name: &str) -> Result<Arc<api::PersistentVolume>, StorageError> {
        self.read("persistentvolumes", name, &self.volumes)
    }

    async fn attachment(&self, _: &str) -> Result<Arc<VolumeAttachment>, StorageError> {
        Err(StorageError::NoClient)
    }

    async fn secret(&self, _: &str, _: &str) -> Result<BTreeMap<String, Vec<u8>>, StorageError> {
        Err(StorageError::NoClient)
    }

    async fn driver(&self, _: &str) -> Result<Option<Arc<CSIDriver>>, StorageError> {
        Err(StorageError::NoClient)
    }

    async fn patch_claim(&self, _: &str, _: &str, patch: String) -> Result<(), StorageError> {
        locked(&self.patches).push(patch);
        Ok(())
    }

    fn attached(&self) -> watch::Receiver<AttachedVolumes> {
        self.attached.subscribe()
    }

    fn retry_signal(&self) -> watch::Receiver<u64> {
        self.moved.subscribe()
    }
}

/// Whether the test may mount; prints a note if it is skipped.
pub fn may_mount() -> bool {
    let may = rustix::process::geteuid().is_root();
    if !may {
        println!("skipped: needs root to mount");
    }
    may
}
