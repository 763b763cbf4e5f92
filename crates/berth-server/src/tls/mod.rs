//! TLS of the main listener: protocol settings, serving certificate, client CA bundle, and reload.
//!
//! ```text
//!  tlsCertFile, tlsPrivateKeyFile ─┐             ┌─► acceptor, loaded for each connection
//!  clientCAFile ───────────────────┼─► reload ───┤
//!  one inotify watch, one minute ──┘             └─► client roots, read by the authenticator
//! ```
//!
//! One task owns the loaded files; all others read snapshots. Files that cannot be used leave the previous ones in use
//! and are logged once. The handshake requests client certificates without verifying them: it only proves that the
//! client has the key, `auth` verifies the chain. One certificate serves all names (spec 04 §7).

mod files;
mod protocol_settings;

use std::{
    path::PathBuf,
    sync::{Arc, Mutex, PoisonError},
    time::Duration,
};

use arc_swap::ArcSwap;
use rustls::{
    ServerConfig,
    server::{ClientHello, ResolvesServerCert, WebPkiClientVerifier},
    sign::{CertifiedKey, SingleCertAndKey},
};
use tokio::time::{MissedTickBehavior, interval};
use tokio_rustls::TlsAcceptor;
use tokio_util::sync::CancellationToken;
use tracing::{error, info, warn};

pub use protocol_settings::OfferError;

use self::{
    files::{LoadedFiles, read},
    protocol_settings::ProtocolSettings,
};
use super::auth::{ClientCas, ClientRoots};
use berth_metrics::WorkQueue;
use berth_sys::{blocking_pool::BlockingPool, file_watch::FileWatch, tls::SignatureOnly};

/// Interval of the periodic reload.
const PERIOD: Duration = Duration::from_secs(60);
/// Debounce after a file change: waits for the related changes.
const SETTLE: Duration = Duration::from_millis(100);

/// Certificate paths and protocol settings, as spelled in the configuration.
#[derive(Clone, Debug, Default)]
pub struct TlsSettings {
    /// Path of the serving certificate and its chain, PEM.
    pub cert_file: PathBuf,
    /// Path of the private key of the serving certificate, PEM.
    pub key_file: PathBuf,
    /// Whether the first loaded pair is never replaced (feature gate `ReloadKubeletServerCertificateFile` off).
    pub keeps_pair: bool,
    /// Whether the first pair may appear later, signed by the cluster; until then every handshake fails.
    pub awaits_pair: bool,
    /// Path of the client CA bundle, PEM; `None`: no client certificate is requested.
    pub client_ca_file: Option<PathBuf>,
    /// Minimum version, `VersionTLS10` to `VersionTLS13`; empty means TLS 1.2.
    pub min_version: String,
    /// Cipher suites by Go's names; empty means all supported ones.
    pub cipher_suites: Vec<String>,
    /// Curves by number; empty means all supported ones.
    pub curves: Vec<i32>,
}

impl TlsSettings {
    fn files(&self) -> Vec<PathBuf> {
        [Some(&self.cert_file), Some(&self.key_file), self.client_ca_file.as_ref()]
            .into_iter()
            .flatten()
            .cloned()
            .collect()
    }
}

/// Error of the TLS setup.
#[derive(Debug, thiserror::Error)]
pub enum TlsError {
    /// No usable protocol settings remain.
    #[error(transparent)]
    Offer(#[from] OfferError),
    /// The serving certificate or its key cannot be used.
    #[error("failed to initialize file based certificate manager: {0}")]
    Serving(String),
    /// The client CA bundle cannot be used.
    #[error("unable to load client CA file {path}: {cause}")]
    ClientCa {
        /// Path of the bundle.
        path: String,
        /// Text of the read error or of the parse error.
        cause: String,
    },
}

/// TLS configuration of a listener. Cheap to clone; all clones share their state.
#[derive(Clone)]
pub struct Tls(Arc<TlsInner>);

struct TlsInner {
    settings: TlsSettings,
    offer: ProtocolSettings,
    current: ArcSwap<ServerConfig>,
    client_roots: ClientRoots,
    state: Mutex<ReloadState>,
    /// Serializes reads of the files.
    reading: BlockingPool,
}

/// Files in use, and the last logged error.
struct ReloadState {
    used: LoadedFiles,
    key: Option<Arc<CertifiedKey>>,
    complaint: Option<String>,
}

impl Tls {
    /// Reads the files and logs the offered protocol settings.
    ///
    /// # Errors
    /// The setting or file that cannot be used; the server does not start then.
    pub async fn new(settings: TlsSettings) -> Result<Self, TlsError> {
        let offer = ProtocolSettings::choose(&settings.min_version, &settings.cipher_suites, &settings.curves)?;
        for name in &offer.refused {
            warn!(setting = name, "Ignoring unsupported TLS setting");
        }
        let (suites, version) = (offer.names(), offer.min_version());
        info!(cipherSuites = ?suites, minVersion = version, curves = ?offer.group_names(), "Configured TLS");
        let reading = BlockingPool::new("TLS files", 1);
        let read = read(&settings, &reading).await;
        let used = LoadedFiles {
            serving: read.serving.map_err(TlsError::Serving)?,
            client_ca: read.client_ca.map_err(|cause| client_ca_error(&settings, cause))?,
        };
        let key = used.serving.as_ref().map(|pair| usable(&settings, pair)).transpose().map_err(TlsError::Serving)?;
        if key.is_none() {
            info!(file = %settings.cert_file.display(), "No serving certificate available yet");
        }
        let cas = match &used.client_ca {
            Some(pem) => {
                let wrong = |e: super::auth::BundleError| client_ca_error(&settings, e.to_string());
                Some(Arc::new(ClientCas::from_pem(pem).map_err(wrong)?))
            }
            None => None,
        };
        let config = configure(&offer, key.as_ref(), cas.as_deref()).map_err(|e| TlsError::Serving(e.to_string()))?;
        Ok(Self(Arc::new(TlsInner {
            settings,
            offer,
            current: ArcSwap::from_pointee(config),
            client_roots: Arc::new(cas.into()),
            state: Mutex::new(ReloadState { used, key, complaint: None }),
            reading,
        })))
    }

    /// Acceptor with the current certificate, for one new connection.
    pub fn acceptor(&self) -> TlsAcceptor {
        TlsAcceptor::from(self.0.current.load_full())
    }

    /// The current client CAs; the snapshot changes with the file.
    pub fn client_roots(&self) -> ClientRoots {
        self.0.client_roots.clone()
    }

    /// The offered cipher suites, by Go's names.
    pub fn cipher_suites(&self) -> Vec<&'static str> {
        self.0.offer.names()
    }

    /// Reloads the files on changes and periodically until stopped; `queue` feeds the metrics of kubelet's work queue
    /// for the client CA bundle.
    pub async fn run(self, queue: Option<WorkQueue>, stop: CancellationToken) {
        let mut watch = FileWatch::new(self.0.settings.files());
        let mut ticks = interval(PERIOD);
        ticks.set_missed_tick_behavior(MissedTickBehavior::Delay);
        loop {
            let mut queued = Duration::ZERO;
            tokio::select! {
                biased;
                () = stop.cancelled() => return,
                _ = ticks.tick() => queue.iter().for_each(WorkQueue::added),
                () = watch.changed() => {
                    queue.iter().for_each(WorkQueue::added);
                    tokio::select! {
                        () = stop.cancelled() => return,
                        () = tokio::time::sleep(SETTLE) => queued = SETTLE,
                    }
                }
            }
            watch.arm();
            queue.iter().for_each(|queue| queue.started(queued));
            let is_client_ca_bad = self.reload().await;
            queue.iter().for_each(|queue| queue.finished(is_client_ca_bad));
        }
    }

    /// Reads the files and applies new valid ones; returns whether the client CA bundle is invalid.
    async fn reload(&self) -> bool {
        let read = read(&self.0.settings, &self.0.reading).await;
        let mut state = self.0.state.lock().unwrap_or_else(PoisonError::into_inner);
        let (mut complaints, mut is_client_ca_bad) = (Vec::new(), false);
        let (mut is_new, mut cas) = (false, self.0.client_roots.load_full());
        let serving = if self.0.settings.keeps_pair { Ok(state.used.serving.clone()) } else { read.serving };
        match new_key(&self.0.settings, serving, &state) {
            Ok(Some((pair, key))) => {
                (state.used.serving, state.key) = (Some(pair), Some(key));
                is_new = true;
                info!(file = %self.0.settings.cert_file.display(), "Loaded a new serving certificate");
            }
            Ok(None) => {}
            Err(cause) => complaints.push(format!("serving certificate: {cause}")),
        }
        match new_roots(read.client_ca, &state) {
            Ok(Some((pem, roots))) => {
                state.used.client_ca = Some(pem);
                cas = Some(Arc::new(roots));
                is_new = true;
                info!("Loaded a new client CA bundle");
            }
            Ok(None) => {}
            Err(cause) => {
                is_client_ca_bad = true;
                complaints.push(format!("client CA bundle: {cause}"));
            }
        }
        if is_new {
            match configure(&self.0.offer, state.key.as_ref(), cas.as_deref()) {
                Ok(config) => self.0.current.store(Arc::new(config)),
                Err(cause) => complaints.push(cause.to_string()),
            }
        }
        // Stored last: a caller that reads the new roots also gets the matching TLS configuration.
        self.0.client_roots.store(cas);
        let complaint = (!complaints.is_empty()).then(|| complaints.join("; "));
        if complaint != state.complaint
            && let Some(cause) = &complaint
        {
            error!(err = cause, "Failed to reload TLS files, using previous ones");
        }
        state.complaint = complaint;
        is_client_ca_bad
    }
}

fn client_ca_error(settings: &TlsSettings, cause: String) -> TlsError {
    let path = settings.client_ca_file.as_deref().map(|path| path.display().to_string()).unwrap_or_default();
    TlsError::ClientCa { path, cause }
}

type ReloadResult<T> = Result<T, String>;

fn new_key(
    settings: &TlsSettings,
    read: ReloadResult<Option<files::ServingPair>>,
    state: &ReloadState,
) -> ReloadResult<Option<(files::ServingPair, Arc<CertifiedKey>)>> {
    match read? {
        Some(pair) if state.used.serving.as_ref() != Some(&pair) => {
            usable(settings, &pair).map(|key| Some((pair, key)))
        }
        _ => Ok(None),
    }
}

/// Parses the pair; the error names the cause and both files.
fn usable(settings: &TlsSettings, pair: &files::ServingPair) -> ReloadResult<Arc<CertifiedKey>> {
    let (certificate, key) = (settings.cert_file.display(), settings.key_file.display());
    files::certified_key(pair).map(Arc::new).map_err(|cause| format!("{cause} (certificate {certificate}, key {key})"))
}

fn new_roots(read: ReloadResult<Option<Vec<u8>>>, state: &ReloadState) -> ReloadResult<Option<(Vec<u8>, ClientCas)>> {
    match read? {
        Some(pem) if state.used.client_ca.as_ref() != Some(&pem) => {
            let cas = ClientCas::from_pem(&pem).map_err(|e| e.to_string())?;
            Ok(Some((pem, cas)))
        }
        _ => Ok(None),
    }
}

/// Sessions are resumed by tickets, so that a scraper that connects every few seconds costs little; every configuration
/// generates a new ticket key.
fn configure(
    offer: &ProtocolSettings,
    key: Option<&Arc<CertifiedKey>>,
    cas: Option<&ClientCas>,
) -> Result<ServerConfig, rustls::Error> {
    let provider = Arc::new(offer.provider());
    let verifier = match cas {
        Some(cas) => Arc::new(SignatureOnly::of_clients(cas.subjects(), &provider)),
        None => WebPkiClientVerifier::no_client_auth(),
    };
    let pair: Arc<dyn ResolvesServerCert> = match key {
        Some(key) => Arc::new(SingleCertAndKey::from(key.clone())),
        None => Arc::new(NoServingCertificate),
    };
    let mut config = ServerConfig::builder_with_provider(provider)
        .with_protocol_versions(&offer.versions())?
        .with_client_cert_verifier(verifier)
        .with_cert_resolver(pair);
    config.alpn_protocols = vec![b"h2".to_vec(), b"http/1.1".to_vec()];
    config.ticketer = rustls::crypto::ring::Ticketer::new()?;
    Ok(config)
}

/// Certificate resolver without a certificate: every handshake fails.
#[derive(Debug)]
struct NoServingCertificate;

impl ResolvesServerCert for NoServingCertificate {
    fn resolve(&self, _client: ClientHello<'_>) -> Option<Arc<CertifiedKey>> {
        None
    }
}
