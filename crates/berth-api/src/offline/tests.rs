//! Observations of one run are served in the next.

use std::{collections::BTreeMap, os::unix::fs::PermissionsExt, path::Path, sync::Mutex, time::Duration};

use async_trait::async_trait;
use serde_json::json;
use tokio::time::Instant;

use super::*;
use berth_ports::{ObjectError, ObjectSource, PullSecret, TokenRequest};
use berth_types::{Pod, api};

/// Server that answers, fails (at once, or after ten seconds of silence), or has no objects.
#[derive(Clone, Copy, PartialEq)]
enum Server {
    There,
    Away,
    Silent,
    Empty,
}

struct Source(Mutex<Server>);

impl Source {
    /// Delays like the watches.
    async fn patient_answer<T>(&self, there: T) -> Result<T, ObjectError> {
        if *self.0.lock().expect("not poisoned") == Server::Silent {
            tokio::time::sleep(Duration::from_secs(10)).await;
        }
        self.answer(there)
    }

    fn answer<T>(&self, there: T) -> Result<T, ObjectError> {
        match *self.0.lock().expect("not poisoned") {
            Server::There => Ok(there),
            Server::Away | Server::Silent => Err(ObjectError::Other("timed out".to_owned())),
            Server::Empty => Err(ObjectError::NotFound { kind: "secrets", name: "s".to_owned() }),
        }
    }
}

#[async_trait]
impl ObjectSource for Source {
    async fn config_map(&self, _: &str, _: &str) -> Result<Arc<BTreeMap<String, String>>, ObjectError> {
        self.patient_answer(Arc::new([("k".to_owned(), "v".to_owned())].into())).await
    }
    async fn secret(&self, _: &str, _: &str) -> Result<Arc<BTreeMap<String, Vec<u8>>>, ObjectError> {
        self.patient_answer(Arc::new([("p".to_owned(), b"hidden".to_vec())].into())).await
    }
    fn services(&self, _: &str) -> Option<Vec<Arc<api::Service>>> {
        self.answer(vec![Arc::default()]).ok()
    }
    async fn runtime_handler(&self, class: Option<&str>) -> Result<String, ObjectError> {
        self.patient_answer(class.map(|_| "handler".to_owned()).unwrap_or_default()).await
    }
    async fn pull_secrets(&self, _: &Pod) -> (Vec<PullSecret>, Vec<String>) {
        match self.patient_answer(pull_secret()).await {
            Ok(secret) => (vec![secret], Vec::new()),
            Err(_) => (Vec::new(), vec!["pull".to_owned()]),
        }
    }
    async fn token(&self, _: &Pod, _: &TokenRequest) -> Result<String, ObjectError> {
        self.answer("token".to_owned())
    }
}

fn pull_secret() -> PullSecret {
    let coordinates = ("ns".to_owned(), "pull".to_owned(), "uid-of-pull".to_owned());
    PullSecret { coordinates, kind: "kubernetes.io/dockerconfigjson".to_owned(), data: b"{}".to_vec() }
}

fn pod() -> Arc<Pod> {
    let object = json!({
        "metadata": {"name": "p", "namespace": "ns", "uid": "u"},
        "spec": {"runtimeClassName": "fast", "imagePullSecrets": [{"name": "pull"}], "containers": [{"name": "c", "image": "i", "envFrom": [
            {"configMapRef": {"name": "m"}}, {"secretRef": {"name": "s"}}]}]},
    });
    Arc::new(serde_json::from_value(object).expect("a pod"))
}

async fn start(folder: &Path, tasks: &TaskTracker, stop: &CancellationToken) -> Arc<Offline> {
    let key_file = folder.join("key");
    std::fs::write(&key_file, [7; 32]).expect("written");
    std::fs::set_permissions(&key_file, std::fs::Permissions::from_mode(0o600)).expect("changed");
    let config = OfflineConfig { file: folder.join("pods"), key_file, node: "n".to_owned() };
    Offline::start(config, tasks, stop.clone()).await.expect("a key")
}

/// Reads every object; returns the results, and whether the token is non-empty.
async fn read(source: &OfflineObjects) -> Vec<Result<String, String>> {
    let message = |e: ObjectError| e.to_string();
    let ask = TokenRequest { audience: String::new(), expiration_seconds: None };
    let known = pod();
    vec![
        source.config_map("ns", "m").await.map(|data| data["k"].clone()).map_err(message),
        source.config_map_files("ns", "m").await.map(|data| format!("{:?}", data["k"])).map_err(message),
        source.secret("ns", "s").await.map(|data| String::from_utf8_lossy(&data["p"]).into_owned()).map_err(message),
        source.runtime_handler(Some("fast")).await.map_err(message),
        match source.pull_secrets(&known).await {
            (found, missing) if missing.is_empty() => {
                Ok(found.iter().map(|s| format!("{:?} {} {:?}", s.coordinates, s.kind, s.data)).collect())
            }
            (_, missing) => Err(missing.join(" ")),
        },
        source.token(&known, &ask).await.map_err(message),
        source.services("ns").map(|list| list.len().to_string()).ok_or_else(|| "none".to_owned()),
    ]
}

#[tokio::test(start_paused = true)]
async fn recorded_objects_are_served_while_the_server_is_unreachable() {
    let folder = tempfile::tempdir().expect("a folder");
    let (tasks, stop) = (TaskTracker::new(), CancellationToken::new());
    let offline = start(folder.path(), &tasks, &stop).await;
    let source = OfflineObjects::new(Arc::new(Source(Mutex::new(Server::There))), offline.clone());
    offline.record_pods(&[pod()]);
    let first = read(&source).await;
    assert!(first.iter().all(Result::is_ok), "{first:?}");
    tokio::time::sleep(checkpoint_writer::COLLECT * 2).await;
    let file = std::fs::read(folder.path().join("pods")).expect("written");
    assert!(!file.windows(6).any(|part| part == b"hidden"), "encrypted");
    stop.cancel();

    let stop = CancellationToken::new();
    let offline = start(folder.path(), &tasks, &stop).await;
    let inner = Arc::new(Source(Mutex::new(Server::Away)));
    let source = OfflineObjects::new(inner.clone(), offline.clone());
    let away = read(&source).await;
    assert!(away.iter().all(Result::is_err), "no objects are restored for pods that were not restored: {away:?}");
    assert_eq!(offline.last_known_pods().expect("pods").len(), 1);
    let again = read(&source).await;
    assert_eq!(again[5], Ok(String::new()), "tokens are not kept");
    assert_eq!((&again[..5], &again[6]), (&first[..5], &first[6]));
    *inner.0.lock().expect("not poisoned") = Server::Silent;
    let began = Instant::now();
    assert_eq!(read(&source).await, again, "it is published even without a response");
    assert_eq!(began.elapsed(), Duration::from_secs(5), "a second for each of five");
    *inner.0.lock().expect("not poisoned") = Server::Empty;
    let results = read(&source).await;
    assert!(results[..4].iter().chain(&results[5..6]).all(Result::is_err), "the server's response counts: {results:?}");
    *inner.0.lock().expect("not poisoned") = Server::Away;
    offline.record_pods(&[pod()]);
    assert!(read(&source).await.iter().all(Result::is_err), "as without this");
    stop.cancel();
}

#[tokio::test(start_paused = true)]
async fn a_file_that_cannot_be_used_counts_as_none() {
    let folder = tempfile::tempdir().expect("a folder");
    let (tasks, stop) = (TaskTracker::new(), CancellationToken::new());
    for content in [&b""[..], b"BERTHOFF\x01garbage garbage garbage garbage garbage", b"BERTHOFF\x09"] {
        std::fs::write(folder.path().join("pods"), content).expect("written");
        let offline = start(folder.path(), &tasks, &stop).await;
        assert!(offline.last_known_pods().is_none());
    }
    let config =
        OfflineConfig { file: folder.path().join("pods"), key_file: folder.path().join("none"), node: "n".to_owned() };
    assert!(Offline::start(config, &tasks, stop.clone()).await.is_err(), "without a key nothing is promised");
    stop.cancel();
}
