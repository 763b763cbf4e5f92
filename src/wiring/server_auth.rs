//! Server authentication, authorization, and TLS: certificates, reviews, and policy.
//!
//! Builds what `server::auth` and `server::tls` need (spec 01 §9 step 7, spec 04 §6, §7).

use std::{
    fs::File,
    io::Read,
    path::{Path, PathBuf},
    sync::Arc,
    time::Duration,
};

use async_trait::async_trait;
use k8s_openapi::api::authorization::v1::{ResourceAttributes, SubjectAccessReviewSpec};
use tokio_util::{sync::CancellationToken, task::TaskTracker};
use tracing::info;

use super::composition_root::BuildError;
use crate::{
    certificates::{Admin, CertificatePairPaths, ServingCertificate, ensure_admin},
    serving::startup_hint::{HintInput, startup_hint},
};
use berth_api::{Reviews, api::ApiClient, certificates::ServingCertificates};
use berth_config::LoadedConfig;
use berth_metrics::{AuthMetrics, Registry, ReviewMetrics, WorkQueueMetrics};
use berth_ports::Clock;
use berth_server::{
    auth::{
        AccessCache, AccessTtls, Anonymous, Authenticator, AuthenticatorDeps, AuthorizationPolicy, Authorizer,
        POLICY_LIMIT, TokenCache,
    },
    ports::{AccessRequest, AccessReviewer, AccessVerdict, ReviewError, TokenReviewer, TokenVerdict},
    tls::{Tls, TlsSettings},
};

/// Time for which a cached authorization of metrics and health stays valid while the API server is unavailable, if
/// enabled (spec 04 §10).
const STALE: Duration = Duration::from_secs(60);

/// Dependencies of server authentication.
pub(super) struct AuthDeps<'a> {
    /// Loaded configuration and flags.
    pub(super) loaded: &'a LoadedConfig,
    /// Client of the API server; `None` in standalone mode.
    pub(super) api: Option<Arc<dyn ApiClient>>,
    /// Registry of metrics.
    pub(super) registry: &'a Registry,
    /// Tracker of spawned tasks.
    pub(super) tasks: &'a TaskTracker,
    /// Ends the tasks.
    pub(super) stop: &'a CancellationToken,
    /// Wall clock.
    pub(super) clock: Arc<dyn Clock>,
    /// Name of the node.
    pub(super) node: &'a str,
}

/// Authentication, authorization, and TLS of the main listener.
pub(super) struct ServerAuth {
    /// Authenticates requests.
    pub(super) authenticator: Authenticator,
    /// Authorizes requests.
    pub(super) authorizer: Authorizer,
    /// TLS configuration; reloads by itself.
    pub(super) tls: Tls,
    /// Example command for the local user, in standalone mode with its own authority; it works once the port is open.
    pub(super) startup_hint: Option<String>,
}

/// Loads or creates certificates, and starts their reloads.
///
/// # Errors
/// Why they cannot be loaded or created, with kubelet's texts.
pub(super) async fn open(deps: AuthDeps<'_>) -> Result<ServerAuth, BuildError> {
    let loaded = deps.loaded;
    let reviews = |api| Arc::new(ApiReviews(Reviews::new(api, ReviewMetrics::new(deps.registry))));
    let reviews = deps.api.clone().map(reviews);
    let certificates = certificates(&deps).await?;
    let tls = Tls::new(tls_settings(loaded, &certificates)).await.map_err(wrong)?;
    // kubelet's name of the work queue that reloads the client CA bundle.
    let queues = WorkQueueMetrics::new(deps.registry);
    let has_client_ca = !loaded.config.authentication.x509.client_ca_file.is_empty();
    let queue = has_client_ca.then(|| queues.queue("DynamicCABundle-client-ca-bundle"));
    deps.tasks.spawn(tls.clone().run(queue, deps.stop.child_token()));
    let clock = deps.clock.clone();
    let metrics = AuthMetrics::new(deps.registry);
    let config = &loaded.config.authentication;
    let tokens = match &reviews {
        Some(reviews) if config.webhook.enabled => {
            let (ttl, tasks, stop) = (config.webhook.cache_ttl.std(), deps.tasks.clone(), deps.stop.child_token());
            Some(TokenCache::new(reviews.clone(), ttl, metrics.clone(), tasks, stop))
        }
        None if config.webhook.enabled && !loaded.flags.is_its_own_authority() => {
            return Err(BuildError("no client provided, cannot use webhook authentication".to_owned()));
        }
        _ => None,
    };
    let authenticator = Authenticator::new(AuthenticatorDeps {
        client_roots: tls.client_roots(),
        tokens,
        anonymous: if config.anonymous.enabled { Anonymous::Allow } else { Anonymous::Reject },
        metrics,
        now: Arc::new(move || clock.now()),
    });
    let authorizer = authorizer(&deps, reviews)?;
    let try_this = certificates.admin.as_ref().map(|admin| {
        let call = HintInput { address: &loaded.config.address, port: loaded.config.port, now: deps.clock.now() };
        startup_hint(&call, &certificates.serving, admin)
    });
    Ok(ServerAuth { authenticator, authorizer, tls, startup_hint: try_this })
}

fn wrong(error: impl std::fmt::Display) -> BuildError {
    BuildError(error.to_string())
}

fn authorizer(deps: &AuthDeps<'_>, reviews: Option<Arc<ApiReviews>>) -> Result<Authorizer, BuildError> {
    let config = &deps.loaded.config.authorization;
    match (config.mode.as_str(), reviews) {
        ("AlwaysAllow", _) => Ok(Authorizer::always_allow()),
        ("Webhook", Some(reviews)) => {
            let ttls = AccessTtls {
                authorized: config.webhook.cache_authorized_ttl.std(),
                unauthorized: config.webhook.cache_unauthorized_ttl.std(),
                stale: if deps.loaded.flags.stale_authorization { STALE } else { Duration::ZERO },
            };
            let cache = AccessCache::new(reviews, ttls, deps.tasks.clone(), deps.stop.child_token());
            Ok(Authorizer::webhook(cache, deps.node))
        }
        ("Webhook", None) if deps.loaded.flags.is_its_own_authority() => {
            let policy = policy(&deps.loaded.flags.standalone_authorization)?;
            info!(
                rules = policy.rules(),
                "No API server: authorizing group system:masters and the subjects of the policy"
            );
            Ok(Authorizer::standalone(policy))
        }
        ("Webhook", None) => Err(BuildError("no client provided, cannot use webhook authorization".to_owned())),
        ("", _) => Err(BuildError("no authorization mode specified".to_owned())),
        (other, _) => Err(BuildError(format!("unknown authorization mode {other}"))),
    }
}

fn policy(path: &str) -> Result<AuthorizationPolicy, BuildError> {
    if path.is_empty() {
        return Ok(AuthorizationPolicy::masters_only());
    }
    let failed = |cause: String| BuildError(format!("--standalone-authorization {path}: {cause}"));
    let mut text = String::new();
    let file = File::open(path).map_err(|e| failed(e.to_string()))?;
    file.take(POLICY_LIMIT + 1).read_to_string(&mut text).map_err(|e| failed(e.to_string()))?;
    if u64::try_from(text.len()).unwrap_or(u64::MAX) > POLICY_LIMIT {
        return Err(failed(format!("larger than {POLICY_LIMIT} bytes")));
    }
    AuthorizationPolicy::parse(&text).map_err(|e| failed(e.to_string()))
}

/// Files of the serving certificate, the client CA, and the local administrator.
struct Certificates {
    serving: CertificatePairPaths,
    client_ca: Option<PathBuf>,
    admin: Option<Admin>,
}

async fn certificates(deps: &AuthDeps<'_>) -> Result<Certificates, BuildError> {
    let (config, flags) = (&deps.loaded.config, &deps.loaded.flags);
    let directory = PathBuf::from(&flags.cert_dir);
    let serving = serving(deps, &directory).await?;
    let configured = &config.authentication.x509.client_ca_file;
    if !configured.is_empty() || !flags.is_its_own_authority() {
        let client_ca = (!configured.is_empty()).then(|| PathBuf::from(configured));
        return Ok(Certificates { serving, client_ca, admin: None });
    }
    let (user, now) = (local_user(), deps.clock.now());
    let admin = tokio::task::spawn_blocking(move || ensure_admin(&directory, &user, now));
    let admin = admin.await.map_err(wrong)?.map_err(wrong)?;
    Ok(Certificates { serving, client_ca: Some(admin.authority.certificate.clone()), admin: Some(admin) })
}

/// The configured key pair, else a self-made one that is renewed.
async fn serving(deps: &AuthDeps<'_>, directory: &Path) -> Result<CertificatePairPaths, BuildError> {
    let config = &deps.loaded.config;
    if is_signed_by_cluster(deps.loaded) {
        // File changes are watched through their directory: it must exist before the first key pair.
        let own = |error| BuildError(format!("cannot create directory {}: {error}", directory.display()));
        tokio::fs::create_dir_all(directory).await.map_err(own)?;
        let file = ServingCertificates::file(directory);
        return Ok(CertificatePairPaths { certificate: file.clone(), key: file });
    }
    let (certificate, key) = (&config.tls_cert_file, &config.tls_private_key_file);
    let half = |missing: &str| {
        BuildError(format!("tlsCertFile and tlsPrivateKeyFile must be set together: {missing} is empty"))
    };
    match (certificate.is_empty(), key.is_empty()) {
        (false, false) => {
            return Ok(CertificatePairPaths { certificate: PathBuf::from(certificate), key: PathBuf::from(key) });
        }
        (true, false) => return Err(half("tlsCertFile")),
        (false, true) => return Err(half("tlsPrivateKeyFile")),
        (true, true) => {}
    }
    let also = if deps.loaded.flags.is_its_own_authority() { local_names(&config.address) } else { Vec::new() };
    let serving = ServingCertificate::new(directory, deps.node, also);
    let (making, now) = (serving.clone(), deps.clock.now());
    tokio::task::spawn_blocking(move || making.ensure(now)).await.map_err(wrong)?.map_err(wrong)?;
    let (files, clock) = (serving.files().clone(), deps.clock.clone());
    deps.tasks.spawn(serving.renew_periodically(move || clock.now(), deps.stop.child_token()));
    Ok(files)
}

/// Returns whether the API server signs the serving certificate.
fn is_signed_by_cluster(loaded: &LoadedConfig) -> bool {
    loaded.config.server_tls_bootstrap && !loaded.is_standalone()
}

/// Names by which a standalone node is reached locally.
fn local_names(address: &str) -> Vec<String> {
    let mut names: Vec<String> = ["localhost", "127.0.0.1", "::1"].map(str::to_owned).to_vec();
    let own = berth_config::sloppy_ip(address).filter(|address| !address.is_unspecified() && !address.is_loopback());
    names.extend(own.map(|address| address.to_string()));
    names
}

/// Name of the user that the agent runs as.
fn local_user() -> String {
    let id = nix::unistd::geteuid();
    let user = nix::unistd::User::from_uid(id).ok().flatten();
    user.map_or_else(|| format!("uid-{id}"), |user| user.name)
}

fn tls_settings(loaded: &LoadedConfig, certificates: &Certificates) -> TlsSettings {
    let config = &loaded.config;
    // Self-made certificates are renewed, and renewals have to be reloaded.
    let is_given = !config.tls_cert_file.is_empty() && !config.tls_private_key_file.is_empty();
    TlsSettings {
        cert_file: certificates.serving.certificate.clone(),
        key_file: certificates.serving.key.clone(),
        keeps_pair: is_given && !loaded.gates.enabled("ReloadKubeletServerCertificateFile"),
        awaits_pair: is_signed_by_cluster(loaded),
        client_ca_file: certificates.client_ca.clone(),
        min_version: config.tls_min_version.clone(),
        cipher_suites: config.tls_cipher_suites.clone(),
        curves: config.tls_curve_preferences.clone(),
    }
}

/// Token and access reviews by the API server.
struct ApiReviews(Reviews);

#[async_trait]
impl TokenReviewer for ApiReviews {
    async fn review(&self, token: &str) -> Result<TokenVerdict, ReviewError> {
        let status = self.0.token(token).await.map_err(|e| ReviewError(e.to_string()))?;
        if status.authenticated != Some(true) {
            let why = status.error.filter(|error| !error.is_empty());
            return Ok(why.map_or(TokenVerdict::Rejected, TokenVerdict::Invalid));
        }
        let user = status.user.unwrap_or_default();
        let Some(name) = user.username.filter(|name| !name.is_empty()) else {
            return Err(ReviewError("the TokenReview authenticated the token but has no user".to_owned()));
        };
        Ok(TokenVerdict::Accepted {
            name,
            uid: user.uid.unwrap_or_default(),
            groups: user.groups.unwrap_or_default(),
            extra: user.extra.unwrap_or_default(),
        })
    }
}

#[async_trait]
impl AccessReviewer for ApiReviews {
    async fn review(&self, request: &AccessRequest) -> Result<AccessVerdict, ReviewError> {
        let status = self.0.access(access(request)).await.map_err(|e| ReviewError(e.to_string()))?;
        Ok(AccessVerdict { allowed: status.allowed, denied: status.denied.unwrap_or_default() })
    }
}

fn access(request: &AccessRequest) -> SubjectAccessReviewSpec {
    let AccessRequest { identity, verb, subresource, node } = request;
    let some = |text: &str| (!text.is_empty()).then(|| text.to_owned());
    SubjectAccessReviewSpec {
        user: some(&identity.name),
        uid: some(&identity.uid),
        groups: (!identity.groups.is_empty()).then(|| identity.groups.clone()),
        extra: (!identity.extra.is_empty()).then(|| identity.extra.clone()),
        resource_attributes: Some(ResourceAttributes {
            verb: some(verb),
            version: Some("v1".to_owned()),
            resource: Some("nodes".to_owned()),
            subresource: some(subresource),
            name: some(node),
            ..ResourceAttributes::default()
        }),
        ..SubjectAccessReviewSpec::default()
    }
}
