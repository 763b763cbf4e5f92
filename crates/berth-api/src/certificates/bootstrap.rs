//! Blocking TLS bootstrap: obtains the first client certificate and writes the kubeconfig.
//!
//! Used without certificate rotation, where the kubeconfig must be complete before anything else starts
//! (spec 01 §11.2).

use std::{
    path::{Path, PathBuf},
    sync::Arc,
    time::Duration,
};

use jiff::{Timestamp, tz::TimeZone};
use tokio::time::{Instant, sleep, timeout};
use tracing::{info, warn};

use super::{
    key::{KeyError, PrivateKey},
    kubeconfig::{self, Cluster, KubeconfigError},
    pair::Pair,
    request::NamingScheme,
    signing_request::{SigningRequest, SigningRequestError},
    store::{CertificateStore, StoreError},
    template::{Purpose, Template},
};
use crate::api::{ApiClient, ApiError, Call, RequestClass, Resource};
use berth_ports::Clock;
use berth_sys::atomic_file;

/// Timeout for approval and signing.
const LIMIT: Duration = Duration::from_secs(3600);
/// How long bootstrap waits for a healthy API server before it sends the request anyway.
const HEALTHY: Duration = Duration::from_secs(60);
/// Interval of health checks, its maximum jitter as a share, and the timeout of one check.
const HEALTH_CHECK_INTERVAL: Duration = Duration::from_secs(2);
const JITTER: f64 = 0.2;
const HEALTH_CHECK_TIMEOUT: Duration = Duration::from_secs(1);
/// Readable by the agent's user only.
const MODE: u32 = 0o600;

/// Why bootstrap failed.
#[derive(Debug, thiserror::Error)]
pub enum BootstrapError {
    /// No certificate was issued.
    #[error(transparent)]
    Ask(#[from] SigningRequestError),
    /// The key cannot be generated.
    #[error(transparent)]
    Key(#[from] KeyError),
    /// The pair cannot be stored.
    #[error(transparent)]
    Store(#[from] StoreError),
    /// The kubeconfig cannot be written.
    #[error(transparent)]
    Kubeconfig(#[from] KubeconfigError),
    /// The key cannot be stored while the CSR is pending.
    #[error("cannot write {path}: {cause}")]
    KeepKey {
        /// Path of the key file.
        path: String,
        /// I/O error of creating the directory or writing the key.
        cause: std::io::Error,
    },
    /// A blocking task panicked or was cancelled.
    #[error("{0}")]
    Task(#[from] tokio::task::JoinError),
}

/// Dependencies of [`bootstrap`].
pub struct Bootstrap {
    /// Certificate directory.
    pub directory: PathBuf,
    /// Name of this node.
    pub node: String,
    /// Cluster of the bootstrap kubeconfig.
    pub cluster: Cluster,
    /// Path of the kubeconfig to write.
    pub kubeconfig: PathBuf,
    /// Client that uses the bootstrap credentials.
    pub api: Arc<dyn ApiClient>,
    /// Wall clock.
    pub clock: Arc<dyn Clock>,
}

/// Obtains the first client certificate and writes a kubeconfig that refers to it. Takes up to an hour. Cancel-safe:
/// the next call continues with the same key and CSR.
///
/// # Errors
/// No certificate was issued, or the result cannot be written.
pub async fn bootstrap(setup: Bootstrap) -> Result<(), BootstrapError> {
    info!("Using bootstrap kubeconfig to generate TLS client cert, key and kubeconfig file");
    let store = CertificateStore::new(&setup.directory, Purpose::Client, None);
    let (of, own) = (store.clone(), temporary(&setup.directory));
    let key = tokio::task::spawn_blocking(move || key(&of, &own)).await??;
    wait_until_healthy(&*setup.api).await;
    let mut request = SigningRequest::new(Template::client(&setup.node), key, NamingScheme::Bootstrap)?;
    let now = setup.clock.now();
    let asked = timeout(LIMIT, async {
        request.make(&*setup.api, now.as_second()).await?;
        info!(name = request.name(), "Waiting for client certificate to be issued");
        request.wait(&*setup.api).await
    });
    let chain = asked.await.unwrap_or(Err(SigningRequestError::TimedOut))?;
    let pair = Pair::join(&chain, &request.key()).map_err(SigningRequestError::Refused)?;
    tokio::task::spawn_blocking(move || keep(&setup, &store, &pair)).await?
}

fn keep(setup: &Bootstrap, store: &CertificateStore, pair: &Pair) -> Result<(), BootstrapError> {
    let now: Timestamp = setup.clock.now();
    store.update(pair, &now.to_zoned(TimeZone::system()))?;
    // The pair is stored; a key left behind would only be reused by the next bootstrap.
    let _ = std::fs::remove_file(temporary(&setup.directory));
    kubeconfig::write(&setup.kubeconfig, &setup.cluster, &store.link())?;
    Ok(())
}

fn temporary(directory: &Path) -> PathBuf {
    directory.join("kubelet-client.key.tmp")
}

/// Returns the key of the current pair, else that of an interrupted bootstrap, else a new one. Replaces a file that
/// contains no key; the kubelet refuses to start then.
fn key(store: &CertificateStore, own: &Path) -> Result<PrivateKey, BootstrapError> {
    let read = |path: &Path| PrivateKey::read(&std::fs::read_to_string(path).ok()?);
    if let Some(key) = read(&store.link()).or_else(|| read(own)) {
        return Ok(key);
    }
    let key = PrivateKey::generate()?;
    let wrong = |cause| BootstrapError::KeepKey { path: own.display().to_string(), cause };
    if let Some(directory) = own.parent() {
        std::fs::create_dir_all(directory).map_err(wrong)?;
    }
    atomic_file::replace(own, key.to_pem().as_bytes(), MODE).map_err(wrong)?;
    Ok(key)
}

/// Waits at most a minute; bootstrap proceeds even if the server is unhealthy.
async fn wait_until_healthy(api: &dyn ApiClient) {
    let until = Instant::now() + HEALTHY;
    while Instant::now() < until {
        let call = Call::get(Resource::HEALTHZ, "", "").on(RequestClass::Certificates).within(HEALTH_CHECK_TIMEOUT);
        match timeout(HEALTH_CHECK_TIMEOUT, api.call(call)).await {
            // The body is "ok", which is not JSON.
            Ok(Ok(_) | Err(ApiError::Malformed(_))) => return,
            Ok(Err(error)) => warn!(err = %error, "API server is not healthy yet"),
            Err(_) => warn!("Timed out waiting for the health check of the API server"),
        }
        sleep(HEALTH_CHECK_INTERVAL.mul_f64(1.0 + JITTER * rand::random::<f64>())).await;
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

    /// Fake API server that signs at once and stores what was created.
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
        assert_eq!(
            kubeconfig::classify(&folder.path().join("kubelet.conf"), now),
            super::super::KubeconfigState::Valid
        );

        // Second run: the same key yields the same CSR, whose certificate is still valid.
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
        let message = bootstrap(setup(folder.path(), denied.clone())).await.expect_err("refused").to_string();
        assert_eq!(message, "cannot create certificate signing request: no");
        assert!(
            began.elapsed() >= HEALTHY && began.elapsed() < HEALTHY + HEALTH_CHECK_INTERVAL * 2,
            "unhealthy servers are called as well"
        );
        let own = temporary(&folder.path().join("pki"));
        let first = fs::read_to_string(&own).expect("a key");
        bootstrap(setup(folder.path(), denied.clone())).await.expect_err("refused");
        assert_eq!(fs::read_to_string(&own).expect("a key"), first);
        fs::write(&own, "garbage").expect("written");
        bootstrap(setup(folder.path(), denied)).await.expect_err("refused");
        assert!(fs::read_to_string(&own).expect("a key").starts_with("-----BEGIN EC PRIVATE KEY-----"));
    }

    #[tokio::test(start_paused = true)]
    async fn bootstrap_fails_if_the_csr_is_deleted_or_not_signed_within_an_hour() {
        let folder = tempfile::tempdir().expect("a folder");
        let api = FakeApi::new(|call| match call.verb {
            Verb::Create => Ok(stored(call, "u")),
            Verb::List => Ok(list(&[json!({"metadata": {"name": "other"}})])),
            _ => Ok(json!("ok")),
        });
        let message = bootstrap(setup(folder.path(), api)).await.expect_err("gone").to_string();
        assert!(message.starts_with("csr \"node-csr-") && message.ends_with("\" was deleted"), "{message}");

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
        let message = bootstrap(setup(folder.path(), api)).await.expect_err("nobody").to_string();
        assert_eq!(message, SigningRequestError::TimedOut.to_string());
        assert!(began.elapsed() >= LIMIT);
    }
}
