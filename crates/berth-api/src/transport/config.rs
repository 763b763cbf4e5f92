//! What a transport is made of: where the server is, whom we believe, who we are, how fast we ask.

use std::{path::Path, sync::Arc, time::Duration};

use http::{
    Uri,
    uri::{Authority, Scheme},
};
use tokio_util::sync::CancellationToken;

use super::{
    dial::Pings,
    identity::Identity,
    kubeconfig::{Cluster, ConnectError, Kubeconfig, Source, User},
    pace::Rates,
    proxy::{Proxy, proxy_of, proxy_url},
    request::Address,
};
use berth_metrics::{ApiClientMetrics, RestClientMetrics};
use berth_ports::Clock;

/// Where a pod in the cluster finds its token and its authorities.
const IN_CLUSTER: &str = "/var/run/secrets/kubernetes.io/serviceaccount";

/// What a transport is made of.
#[derive(Clone)]
pub struct TransportConfig {
    /// The server.
    pub cluster: Cluster,
    /// Who we are; not heeded with an `identity`.
    pub user: User,
    /// Who we are where somebody else sees to it: the certificate manager.
    pub identity: Option<Identity>,
    /// How fast we ask.
    pub rates: Rates,
    /// `User-Agent`; its first word owns the fields we write.
    pub user_agent: String,
    /// Which HTTP is spoken, and how dead connections are noticed.
    pub http: Http,
}

/// Which HTTP is spoken, and how dead connections are noticed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Http {
    /// HTTP/2 is offered.
    pub offers_http2: bool,
    /// How dead connections are noticed.
    pub pings: Pings,
}

impl Http {
    /// As the environment has it: `DISABLE_HTTP2`, `HTTP2_READ_IDLE_TIMEOUT_SECONDS`,
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

/// What a transport needs of the rest.
pub struct TransportDeps {
    /// Tells the time.
    pub clock: Arc<dyn Clock>,
    /// Counts requests.
    pub requests: RestClientMetrics,
    /// Counts connections; one per transport that is to be told apart.
    pub connections: ApiClientMetrics,
    /// Ends it.
    pub stop: CancellationToken,
}

fn variable(name: &str) -> Option<String> {
    std::env::var(name).ok()
}

impl TransportConfig {
    /// As a kubeconfig has it. An empty file means the cluster this process is a pod of, if it is.
    ///
    /// # Errors
    /// What is wrong with the file or with what it names.
    pub async fn from_kubeconfig(path: &Path) -> Result<Self, ConnectError> {
        match Kubeconfig::read(path).await {
            Ok(Kubeconfig { cluster, user }) => Ok(Self::new(cluster, user)),
            Err(error) => match tokio::fs::metadata(path).await.is_ok_and(|file| file.len() == 0) {
                true => in_cluster(variable).map(|(cluster, user)| Self::new(cluster, user)).ok_or(error),
                false => Err(error),
            },
        }
    }

    /// To that server as that user.
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

    /// At those rates.
    #[must_use]
    pub fn at(mut self, rates: Rates) -> Self {
        self.rates = rates;
        self
    }

    /// Saying that of us.
    #[must_use]
    pub fn called(mut self, user_agent: String) -> Self {
        self.user_agent = user_agent;
        self
    }

    /// As whoever that is at the time: tokens, passwords and programs of the kubeconfig are not used
    /// then (spec 01 §10.2). Its proxy is, unlike the reference's: without it there may be no way.
    #[must_use]
    pub fn identified(mut self, identity: Identity) -> Self {
        self.identity = Some(identity);
        self.user = User::default();
        self
    }

    /// Where requests go, and the host and port of that.
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
        // Without what may stand before an @: that is not for the server.
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

/// The cluster this process is a pod of.
fn in_cluster(variable: impl Fn(&str) -> Option<String>) -> Option<(Cluster, User)> {
    let host = variable("KUBERNETES_SERVICE_HOST").filter(|host| !host.is_empty())?;
    let port = variable("KUBERNETES_SERVICE_PORT").filter(|port| !port.is_empty())?;
    let token = Path::new(IN_CLUSTER).join("token");
    token.exists().then_some(())?;
    let host = if host.contains(':') { format!("[{host}]") } else { host };
    let authorities = Some(Path::new(IN_CLUSTER).join("ca.crt")).filter(|file| file.exists());
    let cluster = Cluster {
        server: format!("https://{host}:{port}"),
        authorities: authorities.map(Source::File),
        ..Cluster::default()
    };
    Some((cluster, User { token_file: Some(token), ..User::default() }))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn address(server: &str, authorities: Option<Source>) -> Result<(String, String, u16), String> {
        let cluster = Cluster { server: server.to_owned(), authorities, ..Cluster::default() };
        let (address, host, port) =
            TransportConfig::new(cluster, User::default()).address().map_err(|e| e.to_string())?;
        Ok((format!("{}://{}{}", address.scheme, address.authority, address.prefix), host, port))
    }

    #[test]
    fn servers_are_named_in_many_ways() {
        let ca = || Some(Source::Text(Vec::new()));
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
    fn the_environment_is_heard() {
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
