//! Last-known pods as a source until the API server responds: settings, and the feed.

use std::{path::PathBuf, sync::Arc, time::Duration};

use async_trait::async_trait;
use serde::Deserialize;
use tokio::time::{Instant, sleep_until};

use crate::sources::ports::PodSourceFeed;
use berth_api::Offline;
use berth_types::Pod;

/// Section `offlinePods` of the agent's own settings (`/etc/berth/config.yaml`); without it nothing is persisted.
#[derive(Clone, Debug, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
pub struct OfflineSettings {
    /// Encryption key: 32 bytes, or 64 hexadecimal digits; readable by its owner only.
    pub key_file: PathBuf,
    /// Time after the start during which the API server is waited for, in seconds; default 20.
    #[serde(default = "patience")]
    patience_seconds: u64,
}

fn patience() -> u64 {
    20
}

impl OfflineSettings {
    /// Parses the section.
    ///
    /// # Errors
    /// Names the field.
    pub fn read(section: serde_json::Value) -> Result<Self, String> {
        serde_json::from_value(section).map_err(|error| format!("offlinePods: {error}"))
    }

    /// Time after the start during which the API server is waited for.
    pub fn patience(&self) -> Duration {
        Duration::from_secs(self.patience_seconds)
    }
}

/// Feed of last-known pods, followed by those of the API server.
pub struct OfflineFeed {
    inner: Box<dyn PodSourceFeed>,
    offline: Arc<Offline>,
    patience: Duration,
    /// Deadline for the API server's first set; set at the first request.
    until: Option<Instant>,
    has_decided: bool,
}

impl OfflineFeed {
    /// Creates the feed. It returns the last-known pods once if `inner` returns nothing for that long after the start.
    pub fn new(inner: Box<dyn PodSourceFeed>, offline: Arc<Offline>, patience: Duration) -> Self {
        Self { inner, offline, patience, until: None, has_decided: false }
    }
}

#[async_trait]
impl PodSourceFeed for OfflineFeed {
    async fn next_set(&mut self) -> Option<Vec<Arc<Pod>>> {
        if !self.has_decided {
            let until = *self.until.get_or_insert_with(|| Instant::now() + self.patience);
            let set = tokio::select! {
                biased;
                set = self.inner.next_set() => Some(set),
                () = sleep_until(until) => None,
            };
            self.has_decided = true;
            match set {
                Some(set) => return self.record_set(set),
                None => {
                    if let Some(pods) = self.offline.last_known_pods() {
                        return Some(pods);
                    }
                }
            }
        }
        let set = self.inner.next_set().await;
        self.record_set(set)
    }
}

impl OfflineFeed {
    fn record_set(&self, set: Option<Vec<Arc<Pod>>>) -> Option<Vec<Arc<Pod>>> {
        if let Some(pods) = &set {
            self.offline.record_pods(pods);
        }
        set
    }
}

#[cfg(test)]
mod tests {
    use tokio::sync::mpsc;
    use tokio_util::{sync::CancellationToken, task::TaskTracker};

    use super::*;
    use berth_api::OfflineConfig;

    struct Sets(mpsc::UnboundedReceiver<Vec<Arc<Pod>>>);

    #[async_trait]
    impl PodSourceFeed for Sets {
        async fn next_set(&mut self) -> Option<Vec<Arc<Pod>>> {
            self.0.recv().await
        }
    }

    fn pod(name: &str) -> Arc<Pod> {
        let object = serde_json::json!({
            "metadata": {"name": name, "namespace": "ns", "uid": name},
            "spec": {"containers": [{"name": "c", "image": "i"}]},
        });
        Arc::new(serde_json::from_value(object).expect("a pod"))
    }

    fn names(set: Option<Vec<Arc<Pod>>>) -> Vec<String> {
        set.expect("a set").iter().filter_map(|pod| pod.metadata.name.clone()).collect()
    }

    #[test]
    fn settings_are_read() {
        let read = |text: &str| OfflineSettings::read(serde_json::from_str(text).expect("JSON"));
        let all = read("{\"keyFile\": \"/k\"}").expect("settings");
        assert_eq!((all.key_file.as_path(), all.patience()), (std::path::Path::new("/k"), Duration::from_secs(20)));
        assert_eq!(read("{\"keyFile\": \"/k\", \"patienceSeconds\": 5}").expect("settings").patience().as_secs(), 5);
        for (text, expected) in [
            ("{}", "offlinePods: missing field `keyFile`"),
            ("{\"keyFile\": \"/k\", \"x\": 1}", "offlinePods: unknown field `x`"),
        ] {
            let error = read(text).expect_err(expected);
            assert!(error.starts_with(expected), "{error}");
        }
    }

    /// One run of the agent: its feed, the sender of the API server's pods, and its end.
    async fn run(folder: &std::path::Path) -> (OfflineFeed, mpsc::UnboundedSender<Vec<Arc<Pod>>>, impl AsyncFnOnce()) {
        let (tasks, stop) = (TaskTracker::new(), CancellationToken::new());
        let config =
            OfflineConfig { file: folder.join("offline/pods"), key_file: folder.join("key"), node: "n".to_owned() };
        let offline = Offline::start(config, &tasks, stop.clone()).await.expect("a key");
        let (sender, sets) = mpsc::unbounded_channel();
        let feed = OfflineFeed::new(Box::new(Sets(sets)), offline, Duration::from_secs(20));
        let end = async move || {
            stop.cancel();
            tasks.close();
            tasks.wait().await;
        };
        (feed, sender, end)
    }

    #[tokio::test(start_paused = true)]
    async fn last_known_pods_run_until_the_api_server_delivers_others() {
        use std::os::unix::fs::PermissionsExt;
        let folder = tempfile::tempdir().expect("a folder");
        let key = folder.path().join("key");
        std::fs::write(&key, [7; 32]).expect("written");
        std::fs::set_permissions(&key, std::fs::Permissions::from_mode(0o600)).expect("changed");

        let (mut feed, sender, end) = run(folder.path()).await;
        sender.send(vec![pod("a"), pod("b")]).expect("listening");
        assert_eq!(names(feed.next_set().await), ["a", "b"]);
        tokio::task::yield_now().await;
        end().await;

        // A reboot while the API server is unavailable.
        let (mut feed, sender, end) = run(folder.path()).await;
        let began = Instant::now();
        let early = tokio::time::timeout(Duration::from_secs(5), feed.next_set()).await;
        assert!(early.is_err(), "it is waited for, and the wait goes on where it was dropped");
        assert_eq!(names(feed.next_set().await), ["a", "b"]);
        assert_eq!(began.elapsed(), Duration::from_secs(20));
        let more = tokio::time::timeout(Duration::from_secs(3600), feed.next_set()).await;
        assert!(more.is_err(), "they are offered once");
        sender.send(vec![pod("b")]).expect("listening");
        assert_eq!(names(feed.next_set().await), ["b"], "what is gone is gone");
        tokio::task::yield_now().await;
        end().await;

        // The API server responds immediately: no last-known pods are returned.
        let (mut feed, sender, end) = run(folder.path()).await;
        sender.send(Vec::new()).expect("listening");
        assert!(names(feed.next_set().await).is_empty());
        tokio::task::yield_now().await;
        end().await;

        // No pods were known: none are returned, however long the API server is unavailable.
        let (mut feed, _sender, _end) = run(folder.path()).await;
        assert!(tokio::time::timeout(Duration::from_secs(3600), feed.next_set()).await.is_err());
    }
}
