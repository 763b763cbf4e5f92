//! Transport configuration: server, trust, credentials, rate limits, and HTTP settings.

use std::{path::Path, sync::Arc, time::Duration};

use http::{
    Uri,
    uri::{Authority, Scheme},
};
use tokio_util::sync::CancellationToken;

use super::{
    dialer::Pings,
    identity::ClientIdentity,
    kubeconfig::{Cluster, ConnectError, InlineOrFile, Kubeconfig, User},
    proxy::{Proxy, proxy_of, proxy_url},
    rate_limiter::Rates,
    request::Address,
};
use berth_metrics::{ApiClientMetrics, RestClientMetrics};
use berth_ports::Clock;

/// Directory of the token and the CA bundle of a pod.
const IN_CLUSTER: &str = "/var/run/secrets/kubernetes.io/serviceaccount";

/// Configuration of a transport.
#[derive(Clone)]
pub struct TransportConfig {
    /// Server address and trust.
    pub cluster: Cluster,
    /// Credentials; ignored if `identity` is set.
    pub user: User,
    /// Client certificate managed elsewhere: by the certificate manager.
    pub identity: Option<ClientIdentity>,
    /// Rate limits.
    pub rates: Rates,
    /// `User-Agent`; its product name is the field manager of our writes.
    pub user_agent: String,
    /// HTTP version and keep-alive.
    pub http: Http,
}

/// HTTP version and keep-alive.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Http {
    /// Whether HTTP/2 is offered in ALPN.
    pub offers_http2: bool,
    /// Detection of dead connections.
    pub pings: Pings,
}

impl Http {
    /// Reads the environment variables `DISABLE_HTTP2`, `HTTP2_READ_IDLE_TIMEOUT_SECONDS`, and
    /// `HTTP2_PING_TIMEOUT_SECONDS`.
    pub fn of(variable: impl Fn(&str) -> Option<String>) -> Self {
        let seconds = |name: &str, usual| {
            let given = variable(name).and_then(|text| text.parse::<u64>().ok()).filter(|seconds| *seconds > 0);
            Duration::from_secs(given.unwrap_or(usual))
        };
        Self {
            offers_http2: variable("DISABLE_HTTP2").is_none_or(|text| text.is_empty()),
            pings: Pings {
                idle: seconds("HTTP2_READ_IDLE_TIMEOUT_SECONDS", 30),
                patience: seconds("HTTP2_PING_TIMEOUT_SECONDS", 15),
            },
        }
    }
}

/// Dependencies of a transport.
pub struct TransportDeps {
    /// Wall clock.
    pub clock: Arc<dyn Clock>,
    /// Metrics of requests.
    pub requests: RestClientMetrics,
    /// Metrics of connections; a separate instance for each transport that must be distinguished.
    pub connections: ApiClientMetrics,
    /// Stops the transport.
    pub stop: CancellationToken,
}

fn variable(name: &str) -> Option<String> {
    std::env::var(name).ok()
}

impl TransportConfig {
    /// Reads a kubeconfig. An empty file selects the in-cluster configuration if this process runs in a pod.
    ///
    /// # Errors
    /// The file, or a file it refers to, is unusable.
    pub async fn from_kubeconfig(path: &Path) -> Result<Self, ConnectError> {
        match Kubeconfig::read(path).await {
            Ok(Kubeconfig { cluster, user }) => Ok(Self::new(cluster, user)),
            Err(error) => match tokio::fs::metadata(path).await.is_ok_and(|file| file.len() == 0) {
                true => in_cluster(variable).map(|(cluster, user)| Self::new(cluster, user)).ok_or(error),
                false => Err(error),
            },
        }
    }

    /// Returns a configuration for a server and user, with default rate limits.
    pub fn new(cluster: Cluster, user: User) -> Self {
        Self {
            cluster,
            user,
            identity: None,
            rates: Rates::default(),
            user_agent: super::request::user_agent("", "v0.0.0", ""),
            http: Http::of(variable),
        }
    }

    /// Sets the rate limits.
    #[must_use]
    pub fn with_rates(mut self, rates: Rates) -> Self {
        self.rates = rates;
        self
    }

    /// Sets the user agent.
    #[must_use]
    pub fn with_user_agent(mut self, user_agent: String) -> Self {
        self.user_agent = user_agent;
        self
    }

    /// Uses a managed client certificate: tokens, passwords, and exec plugins of the kubeconfig are not used then
    /// (spec 01 §10.2). Its proxy is, unlike in the kubelet: the server may be unreachable without it.
    #[must_use]
    pub fn with_identity(mut self, identity: ClientIdentity) -> Self {
        self.identity = Some(identity);
        self.user = User::default();
        self
    }

    /// Request address, and its host and port.
    pub(super) fn address(&self) -> Result<(Address, String, u16), ConnectError> {
        let invalid = |cause: &dyn std::fmt::Display| {
            ConnectError::Invalid(format!("host must be a URL or a host:port pair: {:?}: {cause}", self.cluster.server))
        };
        let is_tls = self.cluster.authorities.is_some()
            || self.cluster.insecure_skip_tls_verify
            || self.user.pair.is_some()
            || self.identity.is_some();
        let text = match self.cluster.server.contains("://") {
            true => self.cluster.server.clone(),
            false => format!("{}://{}", if is_tls { "https" } else { "http" }, self.cluster.server),
        };
        let uri: Uri = text.parse().map_err(|e| invalid(&e))?;
        let scheme = match uri.scheme_str() {
            Some("https") => Scheme::HTTPS,
            Some("http") => Scheme::HTTP,
            other => return Err(invalid(&format!("scheme {other:?}"))),
        };
        let host = uri.host().filter(|host| !host.is_empty()).ok_or_else(|| invalid(&"no host"))?;
        let port = uri.port_u16().unwrap_or(if scheme == Scheme::HTTPS { 443 } else { 80 });
        // Without user information before an @: that is not meant for the server.
        let authority = uri.port_u16().map_or_else(|| host.to_owned(), |port| format!("{host}:{port}"));
        let authority = Authority::try_from(authority).map_err(|e| invalid(&e))?;
        let prefix = uri.path().trim_end_matches('/').to_owned();
        Ok((Address { scheme, authority, prefix }, host.to_owned(), port))
    }

    pub(super) fn proxy(&self, scheme: &Scheme, host: &str, port: u16) -> Result<Option<Proxy>, ConnectError> {
        let invalid = |cause| ConnectError::Invalid(format!("proxy: {cause}"));
        if !self.cluster.proxy_url.is_empty() {
            return proxy_url(&self.cluster.proxy_url).map(Some).map_err(invalid);
        }
        proxy_of(scheme == &Scheme::HTTPS, host, port, variable).map_err(invalid)
    }
}

/// In-cluster configuration; `None` if this process does not run in a pod.
fn in_cluster(variable: impl Fn(&str) -> Option<String>) -> Option<(Cluster, User)> {
    let host = variable("KUBERNETES_SERVICE_HOST").filter(|host| !host.is_empty())?;
    let port = variable("KUBERNETES_SERVICE_PORT").filter(|port| !port.is_empty())?;
    let token = Path::new(IN_CLUSTER).join("token");
    token.exists().then_some(())?;
    let host = if host.contains(':') { format!("[{host}]") } else { host };
    let authorities = Some(Path::new(IN_CLUSTER).join("ca.crt")).filter(|file| file.exists());
    let cluster = Cluster {
        server: format!("https://{host}:{port}"),
        authorities: authorities.map(InlineOrFile::File),
        ..Cluster::default()
    };
    Some((cluster, User { token_file: Some(token), ..User::default() }))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn address(server: &str, authorities: Option<InlineOrFile>) -> Result<(String, String, u16), String> {
        let cluster = Cluster { server: server.to_owned(), authorities, ..Cluster::default() };
        let (address, host, port) =
            TransportConfig::new(cluster, User::default()).address().map_err(|e| e.to_string())?;
        Ok((format!("{}://{}{}", address.scheme, address.authority, address.prefix), host, port))
    }

    #[test]
    fn servers_are_named_in_many_ways() {
        let ca = || Some(InlineOrFile::Text(Vec::new()));
        for (server, authorities, url, host, port) in [
            ("https://api:6443", None, "https://api:6443", "api", 6443),
            ("https://api/prefix/", None, "https://api/prefix", "api", 443),
            ("https://[::1]:6443", None, "https://[::1]:6443", "[::1]", 6443),
            ("http://api:8080/a/b", None, "http://api:8080/a/b", "api", 8080),
            ("api:6443", ca(), "https://api:6443", "api", 6443),
            ("api:8080", None, "http://api:8080", "api", 8080),
            ("https://user:secret@api:6443", None, "https://api:6443", "api", 6443),
        ] {
            assert_eq!(address(server, authorities), Ok((url.to_owned(), host.to_owned(), port)), "{server}");
        }
        for wrong in ["ftp://api", "https://", "a b"] {
            assert!(address(wrong, None).is_err(), "{wrong}");
        }
    }

    #[test]
    fn the_environment_configures_http2() {
        let of = |given: &[(&str, &str)]| {
            Http::of(|name| given.iter().find(|(key, _)| *key == name).map(|(_, value)| (*value).to_owned()))
        };
        let usual = of(&[]);
        assert_eq!((usual.offers_http2, usual.pings.idle.as_secs(), usual.pings.patience.as_secs()), (true, 30, 15));
        let other = of(&[
            ("HTTP2_READ_IDLE_TIMEOUT_SECONDS", "7"),
            ("HTTP2_PING_TIMEOUT_SECONDS", "x"),
            ("DISABLE_HTTP2", "1"),
        ]);
        // AC-10-41
        assert_eq!((other.offers_http2, other.pings.idle.as_secs(), other.pings.patience.as_secs()), (false, 7, 15));
        assert!(of(&[("DISABLE_HTTP2", "")]).offers_http2);
        assert!(in_cluster(|_| None).is_none());
    }
}
