//! ConfigMaps and Secrets from manifests in a local directory, for a node without an API server.
//!
//! Opt-in: section `standaloneObjects` of the agent's own settings names the directory. Each request for an object
//! reads it, so that the next sync of a pod sees the current content; a poll twice a second resyncs the pods when it
//! changed. kubelet has no equivalent.

use std::{
    collections::BTreeMap,
    fs, io,
    path::{Path, PathBuf},
    sync::{Arc, Mutex, PoisonError},
    time::{Duration, SystemTime},
};

use async_trait::async_trait;
use serde::Deserialize;
use tokio::{
    sync::{Semaphore, mpsc},
    task::spawn_blocking,
    time::timeout,
};
use tokio_util::sync::CancellationToken;
use tracing::warn;

use super::NoObjects;
use crate::{engine::SyncLoopCommand, sources::manifest_decoder};
use berth_ports::{ObjectError, ObjectSource, PullSecret};
use berth_types::{Pod, PodUid, api};

/// Maximum number of files that are read; a log record reports that there are more.
const FILES: usize = 1000;
/// Maximum size of a file in bytes, the API server's limit for an object.
const LONGEST: u64 = 3 << 20;
/// Timeout of reading the directory.
const LIMIT: Duration = Duration::from_secs(10);
/// Poll interval for changes.
const POLL_INTERVAL: Duration = Duration::from_millis(500);

/// Section `standaloneObjects`.
#[derive(Clone, Debug, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
struct StandaloneObjectSettings {
    /// Directory of the manifests.
    directory: PathBuf,
}

/// Source of the objects that pods refer to, and the directory to poll for changes, if there is one.
pub type StandaloneObjects = (Arc<dyn ObjectSource>, Option<Arc<ManifestObjects>>);

/// Opens the source of objects for a node without an API server: the configured directory, or an empty source.
///
/// # Errors
/// The settings are invalid; the error names the field.
pub fn open() -> Result<StandaloneObjects, String> {
    Ok(match directory()?.map(ManifestObjects::new) {
        Some(beside) => (Arc::new(ManifestSource(beside.clone())), Some(beside)),
        None => (Arc::new(NoObjects), None),
    })
}

/// Configured directory of the manifests; `None` if there is none.
fn directory() -> Result<Option<PathBuf>, String> {
    let Some(section) = berth_runtime::settings::section("standaloneObjects")? else {
        return Ok(None);
    };
    let read: Result<StandaloneObjectSettings, _> = serde_json::from_value(section);
    read.map(|settings| Some(settings.directory)).map_err(|error| format!("standaloneObjects: {error}"))
}

/// Objects of the directory, by namespace and name.
#[derive(Clone, Debug, Default, PartialEq)]
struct Objects {
    config_maps: BTreeMap<(String, String), api::ConfigMap>,
    secrets: BTreeMap<(String, String), api::Secret>,
}

/// Path, size, and modification time of each file; a difference means that the content changed.
type DirectoryFingerprint = Vec<(PathBuf, u64, Option<SystemTime>)>;

/// Objects of a directory, cached until a file changes.
pub struct ManifestObjects {
    directory: PathBuf,
    known: Mutex<(DirectoryFingerprint, Arc<Objects>)>,
    pods: Mutex<BTreeMap<PodUid, ()>>,
    /// Permits one read at a time: a directory that hangs blocks one thread only.
    read_permit: Arc<Semaphore>,
}

fn locked<T>(mutex: &Mutex<T>) -> std::sync::MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

impl ManifestObjects {
    /// Creates the cache without reading the directory.
    pub fn new(directory: PathBuf) -> Arc<Self> {
        let semaphore = Arc::new(Semaphore::new(1));
        Arc::new(Self { directory, known: Mutex::default(), pods: Mutex::default(), read_permit: semaphore })
    }

    /// Current objects of the directory.
    async fn objects(self: &Arc<Self>) -> Result<Arc<Objects>, ObjectError> {
        let own = self.clone();
        let reading = async {
            let permit = self.read_permit.clone().acquire_owned().await.ok()?;
            let task = spawn_blocking(move || {
                let _permit = permit;
                own.refresh()
            });
            task.await.ok()
        };
        let to_error = |cause: String| ObjectError::Other(format!("{}: {cause}", self.directory.display()));
        match timeout(LIMIT, reading).await {
            Ok(Some(found)) => found.map_err(|error| to_error(error.to_string())),
            Ok(None) | Err(_) => Err(to_error("timed out reading the directory".to_owned())),
        }
    }

    fn refresh(&self) -> io::Result<Arc<Objects>> {
        let mark = mark(&self.directory)?;
        let (before, known) = locked(&self.known).clone();
        if before == mark {
            return Ok(known);
        }
        let objects = Arc::new(read(&mark));
        *locked(&self.known) = (mark, objects.clone());
        Ok(objects)
    }

    /// Polls the directory and resyncs the registered pods when it changes, until stopped.
    pub async fn follow(self: Arc<Self>, commands: mpsc::Sender<SyncLoopCommand>, stop: CancellationToken) {
        // Shutdown of the agent does not wait for a directory that hangs.
        let _stopped = stop.run_until_cancelled(self.resync_on_change(commands)).await;
    }

    async fn resync_on_change(self: &Arc<Self>, commands: mpsc::Sender<SyncLoopCommand>) {
        let mut before = self.objects().await.ok();
        loop {
            tokio::time::sleep(POLL_INTERVAL).await;
            let now = self.objects().await.ok();
            let is_same = match (&before, &now) {
                (Some(before), Some(now)) => Arc::ptr_eq(before, now) || before == now,
                (before, now) => before.is_none() == now.is_none(),
            };
            before = now;
            if is_same {
                continue;
            }
            let pods: Vec<PodUid> = locked(&self.pods).keys().cloned().collect();
            for pod in pods {
                if commands.send(SyncLoopCommand::Resync(pod)).await.is_err() {
                    return;
                }
            }
        }
    }
}

fn mark(directory: &Path) -> io::Result<DirectoryFingerprint> {
    let mut found = Vec::new();
    for entry in fs::read_dir(directory)? {
        let path = entry?.path();
        let is_hidden = path.file_name().is_some_and(|name| name.to_string_lossy().starts_with('.'));
        let is_manifest =
            path.extension().is_some_and(|ending| ending == "yaml" || ending == "yml" || ending == "json");
        if is_hidden || !is_manifest {
            continue;
        }
        if found.len() == FILES {
            warn!(directory = %directory.display(), limit = FILES, "Too many object manifests, ignoring the rest");
            break;
        }
        let Ok(meta) = fs::metadata(&path) else { continue };
        if meta.is_file() {
            found.push((path, meta.len(), meta.modified().ok()));
        }
    }
    found.sort();
    Ok(found)
}

/// Reads the manifests. An invalid file is logged once per change of the directory and does not affect others.
fn read(mark: &DirectoryFingerprint) -> Objects {
    let mut objects = Objects::default();
    for (path, length, _) in mark {
        let read = if *length > LONGEST {
            Err(format!("file exceeds the limit of {LONGEST} bytes"))
        } else {
            fs::read(path).map_err(|e| e.to_string()).and_then(|bytes| objects.add(&bytes))
        };
        if let Err(cause) = read {
            warn!(path = %path.display(), err = %cause, "Failed to load object manifest");
        }
    }
    objects
}

impl Objects {
    fn add(&mut self, bytes: &[u8]) -> Result<(), String> {
        for document in manifest_decoder::documents(bytes).map_err(|e| e.to_string())? {
            let key = |metadata: &k8s_openapi::apimachinery::pkg::apis::meta::v1::ObjectMeta| {
                let namespace = metadata.namespace.clone().filter(|text| !text.is_empty());
                let name =
                    metadata.name.clone().filter(|text| !text.is_empty()).ok_or("metadata.name: required value")?;
                Ok::<_, String>((namespace.unwrap_or_else(|| "default".to_owned()), name))
            };
            match (document["apiVersion"].as_str(), document["kind"].as_str()) {
                (Some("v1"), Some("ConfigMap")) => {
                    let object: api::ConfigMap = manifest_decoder::typed(document)?;
                    self.config_maps.insert(key(&object.metadata)?, object);
                }
                (Some("v1"), Some("Secret")) => {
                    let object: api::Secret = manifest_decoder::typed(document)?;
                    self.secrets.insert(key(&object.metadata)?, object);
                }
                (version, kind) => {
                    let (version, kind) = (version.unwrap_or_default(), kind.unwrap_or_default());
                    return Err(format!("unsupported object {version:?} {kind:?}: expected a v1 ConfigMap or Secret"));
                }
            }
        }
        Ok(())
    }

    fn config_map(&self, namespace: &str, name: &str) -> Result<&api::ConfigMap, ObjectError> {
        let found = self.config_maps.get(&(namespace.to_owned(), name.to_owned()));
        found.ok_or_else(|| ObjectError::NotFound { kind: "configmap", name: name.to_owned() })
    }
}

/// Merges `data` and `stringData` as the API server does.
fn data_of(secret: &api::Secret) -> BTreeMap<String, Vec<u8>> {
    let plain = secret.string_data.iter().flatten().map(|(key, text)| (key.clone(), text.clone().into_bytes()));
    let data = secret.data.iter().flatten().map(|(key, bytes)| (key.clone(), bytes.0.clone()));
    data.chain(plain).collect()
}

/// Implements [`ObjectSource`]; wraps an `Arc` because blocking reads need an owned reference.
pub struct ManifestSource(pub Arc<ManifestObjects>);

#[async_trait]
impl ObjectSource for ManifestSource {
    async fn config_map(&self, namespace: &str, name: &str) -> Result<Arc<BTreeMap<String, String>>, ObjectError> {
        let objects = self.0.objects().await?;
        Ok(Arc::new(objects.config_map(namespace, name)?.data.clone().unwrap_or_default()))
    }

    async fn config_map_files(
        &self,
        namespace: &str,
        name: &str,
    ) -> Result<Arc<BTreeMap<String, Vec<u8>>>, ObjectError> {
        let objects = self.0.objects().await?;
        let object = objects.config_map(namespace, name)?;
        let plain = object.data.iter().flatten().map(|(key, text)| (key.clone(), text.clone().into_bytes()));
        let binary = object.binary_data.iter().flatten().map(|(key, bytes)| (key.clone(), bytes.0.clone()));
        Ok(Arc::new(plain.chain(binary).collect()))
    }

    async fn secret(&self, namespace: &str, name: &str) -> Result<Arc<BTreeMap<String, Vec<u8>>>, ObjectError> {
        let objects = self.0.objects().await?;
        let found = objects.secrets.get(&(namespace.to_owned(), name.to_owned()));
        let found = found.ok_or_else(|| ObjectError::NotFound { kind: "secret", name: name.to_owned() })?;
        Ok(Arc::new(data_of(found)))
    }

    fn services(&self, namespace: &str) -> Option<Vec<Arc<api::Service>>> {
        NoObjects.services(namespace)
    }

    async fn runtime_handler(&self, class: Option<&str>) -> Result<String, ObjectError> {
        NoObjects.runtime_handler(class).await
    }

    async fn pull_secrets(&self, pod: &Pod) -> (Vec<PullSecret>, Vec<String>) {
        let named = pod.spec().image_pull_secrets.iter().flatten().map(|secret| secret.name.clone());
        let objects = self.0.objects().await.unwrap_or_default();
        let (mut found, mut missing) = (Vec::new(), Vec::new());
        for name in named.filter(|name| !name.is_empty()) {
            let Some(secret) = objects.secrets.get(&(pod.namespace().to_owned(), name.clone())) else {
                missing.push(name);
                continue;
            };
            let kind = secret.type_.clone().unwrap_or_default();
            let key = match kind.as_str() {
                "kubernetes.io/dockerconfigjson" => ".dockerconfigjson",
                "kubernetes.io/dockercfg" => ".dockercfg",
                _ => continue,
            };
            if let Some(data) = data_of(secret).remove(key) {
                let coordinates = (pod.namespace().to_owned(), name, String::new());
                found.push(PullSecret { coordinates, kind, data });
            }
        }
        (found, missing)
    }

    fn register(&self, pod: &Pod) {
        locked(&self.0.pods).insert(pod.uid().clone(), ());
    }

    fn unregister(&self, pod: &PodUid) {
        locked(&self.0.pods).remove(pod);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const BOTH: &str = "apiVersion: v1
kind: ConfigMap
metadata: {name: settings}
data: {colour: blue}
binaryData: {raw: AAE=}
---
apiVersion: v1
kind: Secret
metadata: {name: key, namespace: other}
data: {a: c2VjcmV0}
stringData: {b: plain}
";

    #[tokio::test]
    async fn manifests_beside_the_pods_are_objects() {
        let folder = tempfile::tempdir().expect("a folder");
        fs::write(folder.path().join("both.yaml"), BOTH).expect("written");
        fs::write(folder.path().join("bad.yaml"), "apiVersion: v1\nkind: Pod\nmetadata: {name: p}\n").expect("written");
        fs::write(folder.path().join("notes.txt"), "not a manifest").expect("written");
        let source = ManifestSource(ManifestObjects::new(folder.path().to_owned()));
        let files = source.config_map_files("default", "settings").await.expect("there");
        assert_eq!(files.get("colour").map(Vec::as_slice), Some(&b"blue"[..]));
        assert_eq!(files.get("raw").map(Vec::as_slice), Some(&[0, 1][..]));
        let secret = source.secret("other", "key").await.expect("there");
        assert_eq!(secret.values().map(Vec::as_slice).collect::<Vec<_>>(), [&b"secret"[..], b"plain"]);
        let missing = source.secret("default", "key").await.expect_err("of another namespace");
        assert_eq!(missing.to_string(), "secret \"key\" not found");
        fs::remove_file(folder.path().join("both.yaml")).expect("removed");
        assert!(source.config_map("default", "settings").await.is_err(), "gone with its file");
        drop(folder);
        let gone = source.config_map("default", "settings").await.expect_err("no directory");
        assert!(gone.to_string().contains("No such file"), "{gone}");
    }

    #[tokio::test(start_paused = true)]
    async fn a_directory_that_hangs_takes_one_thread() {
        let folder = tempfile::tempdir().expect("a folder");
        let objects = ManifestObjects::new(folder.path().to_owned());
        let (release, hangs) = std::sync::mpsc::channel::<()>();
        let permit = objects.read_permit.clone().acquire_owned().await.expect("free");
        let own = objects.clone();
        // A thread of the blocking pool would stop the paused clock of the test.
        let stuck = std::thread::spawn(move || {
            let _permit = permit;
            let _released = hangs.recv();
            own.refresh()
        });
        for _ in 0..3 {
            let error = objects.objects().await.expect_err("it hangs").to_string();
            assert!(error.ends_with("timed out reading the directory"), "{error}");
        }
        let (stop, began) = (CancellationToken::new(), tokio::time::Instant::now());
        let (commands, _receiver) = mpsc::channel(1);
        let following = tokio::spawn(objects.clone().follow(commands, stop.clone()));
        tokio::task::yield_now().await;
        stop.cancel();
        following.await.expect("no panic");
        assert!(began.elapsed() < LIMIT, "the agent ends while it hangs");
        drop(release);
        stuck.join().expect("it ends").expect("readable");
        objects.objects().await.expect("read again");
    }
}
