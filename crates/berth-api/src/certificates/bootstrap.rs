//! The first client certificate, where nothing else may begin before it is there: without rotation
//! the kubeconfig must be complete first (spec 01 §11.2).

use std::{
    path::{Path, PathBuf},
    sync::Arc,
    time::Duration,
};

use jiff::{Timestamp, tz::TimeZone};
use tokio::time::{Instant, sleep, timeout};
use tracing::{info, warn};

use super::{
    ask::{AskError, Request},
    key::{Key, KeyError},
    kubeconfig::{self, Cluster, KubeconfigError},
    pair::Pair,
    request::Naming,
    store::{Store, StoreError},
    template::{Purpose, Template},
};
use crate::api::{ApiClient, ApiError, Call, Line, Resource};
use berth_ports::Clock;
use berth_sys::atomic_file;

/// How long somebody may take to approve and sign.
const LIMIT: Duration = Duration::from_secs(3600);
/// How long a server is waited for before it is asked all the same.
const HEALTHY: Duration = Duration::from_secs(60);
/// Between two looks at its health, how much longer that may be as a share, and how long one may take.
const LOOK: Duration = Duration::from_secs(2);
const JITTER: f64 = 0.2;
const LOOK_LIMIT: Duration = Duration::from_secs(1);
/// Readable by us.
const MODE: u32 = 0o600;

/// There is no first certificate.
#[derive(Debug, thiserror::Error)]
pub enum BootstrapError {
    /// None was signed.
    #[error(transparent)]
    Ask(#[from] AskError),
    /// A key cannot be made.
    #[error(transparent)]
    Key(#[from] KeyError),
    /// It cannot be kept.
    #[error(transparent)]
    Store(#[from] StoreError),
    /// The kubeconfig cannot be written.
    #[error(transparent)]
    Kubeconfig(#[from] KubeconfigError),
    /// The key cannot be kept while it is waited.
    #[error("cannot write {path}: {cause}")]
    KeepKey {
        /// The file.
        path: String,
        /// Why.
        cause: std::io::Error,
    },
    /// The pool of threads is gone.
    #[error("{0}")]
    Task(#[from] tokio::task::JoinError),
}

/// What a bootstrap needs.
pub struct Bootstrap {
    /// The certificate directory.
    pub directory: PathBuf,
    /// The node's name.
    pub node: String,
    /// The cluster, as the bootstrap's kubeconfig has it.
    pub cluster: Cluster,
    /// The kubeconfig to write.
    pub kubeconfig: PathBuf,
    /// Whom to ask, with the bootstrap's credentials.
    pub api: Arc<dyn ApiClient>,
    /// The wall time.
    pub clock: Arc<dyn Clock>,
}

/// Gets a first certificate and writes the kubeconfig that names it. Takes up to an hour; may be dropped,
/// and goes on with the same key and request when it is asked again.
///
/// # Errors
/// There is none.
pub async fn bootstrap(setup: Bootstrap) -> Result<(), BootstrapError> {
    info!("Using bootstrap kubeconfig to generate TLS client cert, key and kubeconfig file");
    let store = Store::new(&setup.directory, Purpose::Client, None);
    let (of, own) = (store.clone(), temporary(&setup.directory));
    let key = tokio::task::spawn_blocking(move || key(&of, &own)).await??;
    wait_until_healthy(&*setup.api).await;
    let mut request = Request::new(Template::client(&setup.node), key, Naming::Bootstrap)?;
    let now = setup.clock.now();
    let asked = timeout(LIMIT, async {
        request.make(&*setup.api, now.as_second()).await?;
        info!(name = request.name(), "Waiting for client certificate to be issued");
        request.wait(&*setup.api).await
    });
    let chain = asked.await.unwrap_or(Err(AskError::TimedOut))?;
    let pair = Pair::join(&chain, &request.key()).map_err(AskError::Refused)?;
    tokio::task::spawn_blocking(move || keep(&setup, &store, &pair)).await?
}

fn keep(setup: &Bootstrap, store: &Store, pair: &Pair) -> Result<(), BootstrapError> {
    let now: Timestamp = setup.clock.now();
    store.update(pair, &now.to_zoned(TimeZone::system()))?;
    // The pair is kept; a key left behind would only be used once more.
    let _ = std::fs::remove_file(temporary(&setup.directory));
    kubeconfig::write(&setup.kubeconfig, &setup.cluster, &store.link())?;
    Ok(())
}

fn temporary(directory: &Path) -> PathBuf {
    directory.join("kubelet-client.key.tmp")
}

/// The key to ask with: of the current pair, else the one of an attempt before, else a new one. What is
/// there and no key is replaced; the reference refuses to start.
fn key(store: &Store, own: &Path) -> Result<Key, BootstrapError> {
    let read = |path: &Path| Key::read(&std::fs::read_to_string(path).ok()?);
    if let Some(key) = read(&store.link()).or_else(|| read(own)) {
        return Ok(key);
    }
    let key = Key::generate()?;
    let wrong = |cause| BootstrapError::KeepKey { path: own.display().to_string(), cause };
    if let Some(directory) = own.parent() {
        std::fs::create_dir_all(directory).map_err(wrong)?;
    }
    atomic_file::replace(own, key.to_pem().as_bytes(), MODE).map_err(wrong)?;
    Ok(key)
}

/// Waits a minute at most; a server that is ill is asked all the same.
async fn wait_until_healthy(api: &dyn ApiClient) {
    let until = Instant::now() + HEALTHY;
    while Instant::now() < until {
        let call = Call::get(Resource::HEALTHZ, "", "").on(Line::Certificates).within(LOOK_LIMIT);
        match timeout(LOOK_LIMIT, api.call(call)).await {
            // It says "ok", which is no object.
            Ok(Ok(_) | Err(ApiError::Malformed(_))) => return,
            Ok(Err(error)) => warn!(err = %error, "The API server is not healthy yet"),
            Err(_) => warn!("The API server has not told its health in time"),
        }
        sleep(LOOK.mul_f64(1.0 + JITTER * rand::random::<f64>())).await;
    }
}

#[cfg(test)]
mod tests {
    use std::{fs, sync::Mutex};

    use serde_json::{Value, json};

    use super::*;
    use crate::{
        api::Verb,
        certificates::testing::{Authority, DAY, list, stored},
        testing::{FakeApi, refused},
    };

    struct At(i64);

    impl Clock for At {
        fn now(&self) -> Timestamp {
            Timestamp::from_second(self.0).expect("a time")
        }
    }

    fn setup(folder: &Path, api: Arc<FakeApi>) -> Bootstrap {
        let cluster = Cluster { server: "https://10.0.0.1:6443".to_owned(), ..Cluster::default() };
        Bootstrap {
            directory: folder.join("pki"),
            node: "n".to_owned(),
            cluster,
            kubeconfig: folder.join("kubelet.conf"),
            api,
            clock: Arc::new(At(DAY)),
        }
    }

    /// An API server that signs at once and keeps what was created.
    fn signing(authority: Authority, kept: Arc<Mutex<Vec<Value>>>) -> Arc<FakeApi> {
        FakeApi::new(move |call| {
            let mut kept = kept.lock().expect("not poisoned");
            match call.verb {
                Verb::Get if call.resource == Resource::HEALTHZ => {
                    Err(ApiError::Malformed("unsupported content type: text/plain".to_owned()))
                }
                Verb::Create => {
                    let made = stored(call, "u");
                    if kept.iter().any(|there| there["metadata"]["name"] == made["metadata"]["name"]) {
                        return Err(refused(409, "AlreadyExists", "exists"));
                    }
                    kept.push(authority.answer(&made, 0, 2 * DAY));
                    Ok(made)
                }
                Verb::Get => Ok(kept[0].clone()),
                Verb::List => Ok(list(&kept)),
                _ => Err(ApiError::Unreachable("no".to_owned())),
            }
        })
    }

    #[tokio::test(start_paused = true)]
    async fn a_first_certificate_comes_before_all_else() {
        let folder = tempfile::tempdir().expect("a folder");
        let kept = Arc::default();
        let api = signing(Authority::new(), Arc::clone(&kept));
        bootstrap(setup(folder.path(), api.clone())).await.expect("a certificate");
        let name = kept.lock().expect("not poisoned")[0]["metadata"]["name"].as_str().unwrap_or_default().to_owned();
        assert!(name.starts_with("node-csr-"), "{name}");
        let asked: Vec<(Verb, String)> = api.calls().iter().map(|call| (call.verb, call.path())).collect();
        let path = "/apis/certificates.k8s.io/v1/certificatesigningrequests".to_owned();
        assert_eq!(asked, [(Verb::Get, "/healthz".to_owned()), (Verb::Create, path.clone()), (Verb::List, path)]);
        assert!(!temporary(&folder.path().join("pki")).exists());
        let now = Timestamp::from_second(DAY).expect("a time");
        assert_eq!(kubeconfig::look(&folder.path().join("kubelet.conf"), now), super::super::Found::Valid);

        // Again: the same key, so the same request, whose certificate still holds.
        bootstrap(setup(folder.path(), api)).await.expect("a certificate");
        assert_eq!(kept.lock().expect("not poisoned").len(), 1);
    }

    #[tokio::test(start_paused = true)]
    async fn an_attempt_goes_on_with_the_key_of_the_last() {
        let folder = tempfile::tempdir().expect("a folder");
        let denied = FakeApi::new(|call| match call.verb {
            Verb::Create => Err(refused(403, "Forbidden", "no")),
            _ => Err(refused(500, "InternalError", "ill")),
        });
        let began = Instant::now();
        let told = bootstrap(setup(folder.path(), denied.clone())).await.expect_err("refused").to_string();
        assert_eq!(told, "cannot create certificate signing request: no");
        assert!(began.elapsed() >= HEALTHY && began.elapsed() < HEALTHY + LOOK * 2, "ill servers are asked as well");
        let own = temporary(&folder.path().join("pki"));
        let first = fs::read_to_string(&own).expect("a key");
        bootstrap(setup(folder.path(), denied.clone())).await.expect_err("refused");
        assert_eq!(fs::read_to_string(&own).expect("a key"), first);
        fs::write(&own, "garbage").expect("written");
        bootstrap(setup(folder.path(), denied)).await.expect_err("refused");
        assert!(fs::read_to_string(&own).expect("a key").starts_with("-----BEGIN EC PRIVATE KEY-----"));
    }

    #[tokio::test(start_paused = true)]
    async fn nobody_signs_within_an_hour() {
        let folder = tempfile::tempdir().expect("a folder");
        let api = FakeApi::new(|call| match call.verb {
            Verb::Create => Ok(stored(call, "u")),
            Verb::List => Ok(list(&[json!({"metadata": {"name": "other"}})])),
            _ => Ok(json!("ok")),
        });
        let told = bootstrap(setup(folder.path(), api)).await.expect_err("gone").to_string();
        assert!(told.starts_with("csr \"node-csr-") && told.ends_with("\" was deleted"), "{told}");

        let open = Arc::new(Mutex::new(Value::Null));
        let api = FakeApi::new(move |call| match call.verb {
            Verb::Create => {
                *open.lock().expect("not poisoned") = stored(call, "u");
                Ok(stored(call, "u"))
            }
            Verb::List => Ok(list(&[open.lock().expect("not poisoned").clone()])),
            _ => Ok(json!("ok")),
        });
        let began = Instant::now();
        let told = bootstrap(setup(folder.path(), api)).await.expect_err("nobody").to_string();
        assert_eq!(told, AskError::TimedOut.to_string());
        assert!(began.elapsed() >= LIMIT);
    }
}
