//! Checkpoint of the resources last applied to containers: the baseline of in-place resizes.
//!
//! State is in memory; a writer persists batched changes after a debounce, so that neither a container
//! start nor the runtime on the same disk waits for an fsync. Changes lost in a crash are applied again
//! (spec 03a §10).

use std::{
    collections::{BTreeMap, HashSet},
    sync::{Arc, Mutex, MutexGuard, PoisonError},
    time::Duration,
};

use tokio::sync::watch;
use tokio_util::sync::CancellationToken;
use tracing::error;

use berth_ports::StateFile;
use berth_types::{
    PodUid, api,
    resource_state::{self, PodResources, ResourceEntries},
};

/// Debounce from the first unwritten change to the write: longer than a container takes to start,
/// because a runtime on the same disk would wait for our fsync.
const GATHER: Duration = Duration::from_secs(1);
/// Retry delay after a failed write.
const RETRY: Duration = Duration::from_secs(10);

/// Applied resources by pod; see the module documentation.
pub struct ActuatedStore {
    file: Option<Arc<dyn StateFile>>,
    entries: Mutex<ResourceEntries>,
    changes: watch::Sender<u64>,
}

impl ActuatedStore {
    /// Creates a store without a file: its content is lost when the agent ends.
    pub fn volatile() -> Self {
        Self { file: None, entries: Mutex::new(BTreeMap::new()), changes: watch::channel(0).0 }
    }

    /// Restores the store from the file (`<root>/actuated_pods_state`).
    ///
    /// # Errors
    /// Names the file, if it cannot be read or is corrupt; the agent must not start.
    pub async fn open(file: Arc<dyn StateFile>) -> Result<Self, String> {
        let failed =
            |what: String| format!("failed to read the actuated resources from {}: {what}", file.path().display());
        let entries = match file.read().await.map_err(|e| failed(e.to_string()))? {
            Some(bytes) => resource_state::decode(&bytes).map_err(|e| failed(e.to_string()))?,
            None => BTreeMap::new(),
        };
        Ok(Self { entries: Mutex::new(entries), changes: watch::channel(0).0, file: Some(file) })
    }

    /// The resources applied to a pod; `None` without a record.
    pub fn get(&self, pod: &PodUid) -> Option<PodResources> {
        self.entries().get(pod).cloned()
    }

    /// Records the resources applied to a container.
    pub fn set_container(&self, pod: &PodUid, container: &str, resources: api::ResourceRequirements) {
        self.change(|entries| {
            let known = &mut entries.entry(pod.clone()).or_default().containers;
            known.insert(container.to_owned(), resources.clone()).as_ref() != Some(&resources)
        });
    }

    /// Records the pod-level resources applied to a pod.
    pub fn set_pod_level(&self, pod: &PodUid, resources: Option<api::ResourceRequirements>) {
        self.change(|entries| {
            let known = &mut entries.entry(pod.clone()).or_default().pod_level;
            let differs = *known != resources;
            *known = resources;
            differs
        });
    }

    /// Removes the record of a pod.
    pub fn remove(&self, pod: &PodUid) {
        self.change(|entries| entries.remove(pod).is_some());
    }

    /// Removes the records of all other pods.
    pub fn retain(&self, pods: &HashSet<PodUid>) {
        self.change(|entries| {
            let before = entries.len();
            entries.retain(|pod, _| pods.contains(pod));
            entries.len() != before
        });
    }

    /// Writes after each change until stopped, then flushes pending changes.
    pub(super) async fn run(&self, stop: &CancellationToken) {
        let Some(file) = &self.file else { return };
        let mut changes = self.changes.subscribe();
        changes.mark_unchanged();
        let mut written = 0;
        loop {
            let current = *changes.borrow_and_update();
            if current != written {
                match self.write(file).await {
                    Ok(()) => written = current,
                    Err(err) => {
                        error!(%err, path = %file.path().display(), "Failed to write the actuated resources");
                        if tokio::time::timeout(RETRY, stop.cancelled()).await.is_ok() {
                            return;
                        }
                        continue;
                    }
                }
            }
            tokio::select! {
                biased;
                _ = changes.changed() => {}
                () = stop.cancelled() => return,
            }
            let _stopped = tokio::time::timeout(GATHER, stop.cancelled()).await; // write in either case
        }
    }

    async fn write(&self, file: &Arc<dyn StateFile>) -> std::io::Result<()> {
        let bytes = resource_state::encode(&self.entries());
        file.replace(bytes).await
    }

    fn entries(&self) -> MutexGuard<'_, ResourceEntries> {
        self.entries.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn change(&self, with: impl FnOnce(&mut ResourceEntries) -> bool) {
        if with(&mut self.entries()) {
            self.changes.send_modify(|version| *version += 1);
        }
    }
}

#[cfg(test)]
mod tests {
    use std::{io, path::Path};

    use async_trait::async_trait;

    use super::*;

    /// An in-memory file whose first writes can fail.
    struct Fake {
        content: watch::Sender<Option<Vec<u8>>>,
        failures: Mutex<u32>,
    }

    impl Fake {
        fn new(content: Option<&[u8]>, failures: u32) -> Arc<Self> {
            let content = watch::channel(content.map(<[u8]>::to_vec)).0;
            Arc::new(Self { content, failures: Mutex::new(failures) })
        }

        async fn holds(&self, wanted: impl Fn(&ResourceEntries) -> bool) {
            let read = |bytes: &Option<Vec<u8>>| {
                let entries = bytes.as_ref().map(|b| resource_state::decode(b).expect("sound"));
                wanted(&entries.unwrap_or_default())
            };
            self.content.subscribe().wait_for(read).await.expect("the file stays");
        }
    }

    #[async_trait]
    impl StateFile for Fake {
        fn path(&self) -> &Path {
            Path::new("/root/actuated_pods_state")
        }
        async fn read(&self) -> io::Result<Option<Vec<u8>>> {
            Ok(self.content.borrow().clone())
        }
        async fn replace(&self, content: Vec<u8>) -> io::Result<()> {
            {
                let mut left = self.failures.lock().unwrap_or_else(PoisonError::into_inner);
                if *left > 0 {
                    *left -= 1;
                    return Err(io::Error::other("disk full"));
                }
            }
            self.content.send_replace(Some(content));
            Ok(())
        }
    }

    fn requests(cpu: &str) -> api::ResourceRequirements {
        serde_json::from_value(serde_json::json!({"requests": {"cpu": cpu}})).expect("resources")
    }

    #[tokio::test(start_paused = true)]
    async fn changes_reach_the_file_even_after_a_failure_and_are_read_again() {
        let file = Fake::new(None, 1);
        let store = Arc::new(ActuatedStore::open(file.clone()).await.expect("no file is no error"));
        let stop = CancellationToken::new();
        let (writer, token) = (store.clone(), stop.clone());
        let task = tokio::spawn(async move { writer.run(&token).await });
        store.set_container(&"u".into(), "c", requests("1"));
        file.holds(|e| e.get("u").is_some_and(|p| p.containers.get("c") == Some(&requests("1")))).await;
        let reopened = ActuatedStore::open(file.clone()).await.expect("sound");
        assert_eq!(reopened.get(&"u".into()), store.get(&"u".into()));
        store.remove(&"u".into());
        file.holds(BTreeMap::is_empty).await;
        store.set_container(&"v".into(), "c", requests("1"));
        store.set_container(&"w".into(), "c", requests("1"));
        store.retain(&HashSet::from(["w".into()]));
        file.holds(|e| e.contains_key("w") && !e.contains_key("v")).await;
        stop.cancel();
        task.await.expect("it ends");
    }

    #[tokio::test(start_paused = true)]
    async fn what_was_changed_last_is_written_when_the_agent_stops() {
        let file = Fake::new(None, 0);
        let store = ActuatedStore::open(file.clone()).await.expect("no file is no error");
        store.set_pod_level(&"u".into(), Some(requests("2")));
        let stop = CancellationToken::new();
        stop.cancel();
        store.run(&stop).await;
        file.holds(|e| e.contains_key("u")).await;
    }

    #[tokio::test(start_paused = true)]
    async fn a_corrupt_file_is_named() {
        let refused = ActuatedStore::open(Fake::new(Some(b"{"), 0)).await.err().expect("refused");
        assert!(refused.contains("/root/actuated_pods_state"), "{refused}");
    }
}
