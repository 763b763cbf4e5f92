//! Pod source of the API server: sets for the mux, from the reflector's store (spec 02a §1.8).

mod offline;

use std::sync::Arc;

use async_trait::async_trait;

pub use offline::{OfflineFeed, OfflineSettings};

use crate::sources::ports::PodSourceFeed;
use berth_api::ReflectorStore;
use berth_types::Pod;

/// Returns all pods of a store whenever one of them has changed.
pub struct PodFeed {
    pods: ReflectorStore<Pod>,
    is_first: bool,
}

impl PodFeed {
    /// Creates the feed of that store.
    pub fn new(pods: ReflectorStore<Pod>) -> Self {
        Self { pods, is_first: true }
    }
}

#[async_trait]
impl PodSourceFeed for PodFeed {
    async fn next_set(&mut self) -> Option<Vec<Arc<Pod>>> {
        if self.is_first {
            self.pods.synced().await;
        } else {
            self.pods.changed().await;
        }
        self.is_first = false;
        Some(self.pods.snapshot().objects.values().cloned().collect())
    }
}

#[cfg(test)]
mod tests {
    use futures::FutureExt;
    use tokio::sync::watch;

    use super::*;
    use berth_api::Snapshot;

    fn snapshot(synced: bool, names: &[&str]) -> Arc<Snapshot<Pod>> {
        let pod = |name: &str| -> Arc<Pod> {
            let object = serde_json::json!({"metadata": {"name": name, "namespace": "ns", "uid": name},
                "spec": {"containers": []}});
            Arc::new(serde_json::from_value(object).expect("a pod"))
        };
        let objects = names.iter().map(|name| (("ns".to_owned(), (*name).to_owned()), pod(name))).collect();
        Arc::new(Snapshot { synced, objects, ..Snapshot::default() })
    }

    #[tokio::test]
    async fn nothing_is_handed_in_before_the_first_full_set() {
        let (send, pods) = watch::channel(snapshot(false, &[]));
        let mut feed = PodFeed::new(ReflectorStore::new(pods));
        assert!(feed.next_set().now_or_never().is_none());
        send.send_replace(snapshot(false, &["a"]));
        assert!(feed.next_set().now_or_never().is_none(), "half a set removes pods");
        send.send_replace(snapshot(true, &[]));
        assert_eq!(feed.next_set().await.map(|set| set.len()), Some(0), "an empty set is a set");
        assert!(feed.next_set().now_or_never().is_none(), "once");
        send.send_replace(snapshot(true, &["a", "b"]));
        assert_eq!(feed.next_set().await.map(|set| set.len()), Some(2));
        drop(send);
        assert!(feed.next_set().now_or_never().is_none(), "an outage is no empty set");
    }
}
