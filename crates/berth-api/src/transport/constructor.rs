//! Constructor of the transport: builds TLS, pools, credentials, and reloader from the configuration.

use std::sync::{
    Arc, Mutex,
    atomic::{AtomicU32, AtomicU64},
};

use futures::future::join4;
use http::{HeaderMap, HeaderValue, uri::Scheme};
use rustls::{ClientConfig, pki_types::ServerName};
use tokio::{
    sync::{Notify, watch},
    time::Instant,
};
use tokio_util::{sync::CancellationToken, task::TaskTracker};

use super::{
    client::{Pools, Transport},
    config::{TransportConfig, TransportDeps},
    connection_choice::TrafficType,
    credentials::{CredentialSource, TokenFile, bearer},
    dialer::Dialer,
    exec_plugin::ExecPlugin,
    identity::{CertifiedPair, ClientIdentity},
    keep_alive_pinger::KeepAlivePinger,
    kubeconfig::{Cluster, ConnectError, InlineOrFile, User},
    pool::{PoolTask, SharedPoolState, pool},
    proxy::{Proxy, ProxyKind},
    rate_limiter::RateLimiter,
    request::{self, Compression},
    tls_file_reloader::TlsFileReloader,
    trust::ServerTrust,
    tunnel::Tunnel,
    warning_dedup::WarningDedup,
};
use berth_metrics::CertRotation;
use berth_sys::tls::{Verifier, provider};

fn invalid(cause: impl std::fmt::Display) -> ConnectError {
    ConnectError::Invalid(cause.to_string())
}

impl Transport {
    /// Opens a transport, which connects on first use, and returns the task that must run for it: it ends when stopped,
    /// with all connections.
    ///
    /// # Errors
    /// The configuration, or a file it refers to, is unusable.
    pub async fn open(
        config: TransportConfig,
        deps: TransportDeps,
    ) -> Result<(Arc<Self>, impl Future<Output = ()> + Send + 'static), ConnectError> {
        let (address, host, port) = config.address()?;
        let is_tls = address.scheme == Scheme::HTTPS;
        let files = TlsFiles::read(&config, is_tls).await?;
        let identity = config.identity.clone().unwrap_or_else(ClientIdentity::anonymous);
        if let Some(pair) = files.pair {
            identity.set(Some(pair));
        }
        // Subscribed before anything connects: every later change replaces connections.
        let is_other = identity.changes();
        let trust = Arc::new(files.trust);
        let tasks = TaskTracker::new();
        let (epoch, changes) = watch::channel(0);
        let pinger = KeepAlivePinger::default();
        let proxy = config.proxy(&address.scheme, &host, port)?;
        // A server in cleartext has no trust configuration, so the proxy is verified by the system's authorities.
        let of_proxy = if is_tls { trust.clone() } else { machine(proxy.as_ref()).await? };
        let dialer = Dialer {
            tls: is_tls.then(|| tls(&config, &identity, &trust, &host)).transpose()?,
            proxy: proxy.map(|proxy| Tunnel::new(proxy, of_proxy)).transpose().map_err(invalid)?,
            host,
            port,
            pings: config.http.pings,
            pinger: pinger.clone(),
            tasks: tasks.clone(),
            stop: deps.stop.child_token(),
            attempts: AtomicU64::new(0),
        };
        let shared = SharedPoolState {
            dialer: Arc::new(dialer),
            metrics: deps.connections.clone(),
            epoch: changes.clone(),
            reached: watch::Sender::new(0),
            missed: watch::Sender::new(None),
        };
        let make = |kind| pool(kind, shared.clone());
        let ((beat, first), (unary, second), (watch, third)) =
            (make(TrafficType::Beat), make(TrafficType::Unary), make(TrafficType::Watch));
        let pools = Pools { beat, unary, watch };
        deps.connections.contacts(
            [&pools.beat, &pools.unary, &pools.watch].map(|pool| (pool.kind.label(), pool.contact.clone())).into(),
        );
        let reload = Arc::new(Notify::new());
        let follower = TlsFileReloader {
            pair: config.user.pair.clone().filter(|_| is_tls),
            authorities: config.cluster.authorities.clone().filter(|_| is_tls),
            identity: identity.clone(),
            changes: is_other,
            trust,
            epoch,
            reload: reload.clone(),
            authorities_in_use: files.bundle,
            metrics: deps.requests.transports.clone(),
        };
        let follows =
            if follower.pair.is_some() || config.identity.is_some() { CertRotation::Yes } else { CertRotation::No };
        let transport = Self {
            agent: HeaderValue::from_str(&config.user_agent).map_err(invalid)?,
            acting: impersonation(&config, is_tls)?,
            compression: if config.cluster.disable_compression { Compression::None } else { Compression::Gzip },
            credentials: credentials(&config, is_tls, identity, &deps).map_err(invalid)?,
            pace: RateLimiter::new(config.rates),
            address,
            pools,
            epoch: changes,
            reached: shared.reached.subscribe(),
            pinger,
            stop: deps.stop.clone(),
            reload,
            clock: deps.clock,
            _open: deps.requests.transports.opened(follows),
            requests: deps.requests,
            connections: deps.connections,
            warnings: Mutex::new(WarningDedup::default()),
            begun: Instant::now(),
            failed_heartbeats: AtomicU32::new(0),
        };
        Ok((Arc::new(transport), run([first, second, third], follower, tasks, deps.stop)))
    }
}

/// System trust, if there is an HTTPS proxy to verify.
async fn machine(proxy: Option<&Proxy>) -> Result<Arc<ServerTrust>, ConnectError> {
    if proxy.is_none_or(|proxy| proxy.kind != ProxyKind::Https) {
        return Ok(Arc::new(ServerTrust::no_verification()));
    }
    let read = tokio::task::spawn_blocking(ServerTrust::machine).await.map_err(invalid)?;
    read.map(Arc::new).map_err(invalid)
}

async fn run(pools: [PoolTask; 3], follower: TlsFileReloader, tasks: TaskTracker, stop: CancellationToken) {
    let [beat, unary, watch] = pools.map(|pool| pool.run(stop.child_token()));
    join4(beat, unary, watch, follower.run(stop.child_token())).await;
    stop.cancelled().await;
    tasks.close();
    tasks.wait().await;
}

/// Content of the TLS files at start.
struct TlsFiles {
    pair: Option<CertifiedPair>,
    trust: ServerTrust,
    /// CA bundle, PEM.
    bundle: Vec<u8>,
}

impl TlsFiles {
    async fn read(config: &TransportConfig, is_tls: bool) -> Result<Self, ConnectError> {
        if !is_tls {
            return Ok(Self { pair: None, trust: ServerTrust::no_verification(), bundle: Vec::new() });
        }
        let (cluster, user) = (config.cluster.clone(), config.user.clone());
        let reading = tokio::task::spawn_blocking(move || Self::read_now(&cluster, &user));
        reading.await.map_err(invalid)?.map_err(invalid)
    }

    fn read_now(cluster: &Cluster, user: &User) -> Result<Self, String> {
        let text = |source: &InlineOrFile| {
            source.read().map_err(|e| match source.file() {
                Some(file) => format!("open {}: {e}", file.display()),
                None => e.to_string(),
            })
        };
        let pair = match &user.pair {
            Some((certificate, key)) => {
                Some(CertifiedPair::from_pem(&text(certificate)?, &text(key)?).map_err(|e| e.to_string())?)
            }
            None => None,
        };
        let bundle = cluster.authorities.as_ref().map(text).transpose()?;
        let trust = match &bundle {
            _ if cluster.insecure_skip_tls_verify => ServerTrust::no_verification(),
            Some(bundle) => ServerTrust::bundle(bundle)?,
            None => ServerTrust::machine()?,
        };
        Ok(Self { pair, trust, bundle: bundle.unwrap_or_default() })
    }
}

fn tls(
    config: &TransportConfig,
    identity: &ClientIdentity,
    trust: &Arc<ServerTrust>,
    host: &str,
) -> Result<(Arc<ClientConfig>, ServerName<'static>), ConnectError> {
    let provider = Arc::new(provider());
    let verifier = Verifier::with(trust.clone(), &provider);
    let mut tls = ClientConfig::builder_with_provider(provider)
        .with_safe_default_protocol_versions()
        .map_err(invalid)?
        .dangerous()
        .with_custom_certificate_verifier(Arc::new(verifier))
        .with_client_cert_resolver(Arc::new(identity.clone()));
    tls.alpn_protocols = match config.http.offers_http2 {
        true => vec![b"h2".to_vec(), b"http/1.1".to_vec()],
        false => vec![b"http/1.1".to_vec()],
    };
    // A resumed session would present the old client certificate.
    tls.resumption = rustls::client::Resumption::disabled();
    let name = match config.cluster.tls_server_name.as_str() {
        "" => host.trim_start_matches('[').trim_end_matches(']'),
        name => name,
    };
    Ok((Arc::new(tls), ServerName::try_from(name.to_owned()).map_err(invalid)?))
}

/// Chooses the credentials: a token precedes an exec plugin, which precedes a password, as in client-go.
fn credentials(
    config: &TransportConfig,
    is_tls: bool,
    identity: ClientIdentity,
    deps: &TransportDeps,
) -> Result<CredentialSource, String> {
    let User { token, token_file, basic, exec, .. } = &config.user;
    if !is_tls {
        return Ok(CredentialSource::None);
    }
    if let Some(file) = token_file {
        let first = (!token.is_empty()).then(|| bearer(token)).transpose()?;
        return Ok(CredentialSource::File(TokenFile::new(file.clone(), first)));
    }
    if !token.is_empty() {
        return CredentialSource::token(token);
    }
    if let Some(exec) = exec {
        let counted = (deps.clock.clone(), deps.requests.transports.clone());
        let plugin = ExecPlugin::new(exec.clone(), Some(cluster_info(&config.cluster)), identity, counted);
        return Ok(CredentialSource::Exec(Box::new(plugin)));
    }
    match basic {
        Some((user, password)) => CredentialSource::basic(user, password),
        None => Ok(CredentialSource::None),
    }
}

/// Cluster information for an exec plugin.
fn cluster_info(cluster: &Cluster) -> serde_json::Value {
    use base64::{Engine, engine::general_purpose::STANDARD};
    let authorities = match &cluster.authorities {
        Some(source) => source.read().unwrap_or_default(),
        None => Vec::new(),
    };
    serde_json::json!({
        "server": cluster.server,
        "tls-server-name": cluster.tls_server_name,
        "insecure-skip-tls-verify": cluster.insecure_skip_tls_verify,
        "certificate-authority-data": STANDARD.encode(authorities),
        "config": cluster.exec_config,
    })
}

/// Impersonation headers; none in cleartext, where nobody is authenticated.
fn impersonation(config: &TransportConfig, is_tls: bool) -> Result<HeaderMap, ConnectError> {
    if is_tls { request::impersonation_headers(&config.user.acting).map_err(invalid) } else { Ok(HeaderMap::new()) }
}
