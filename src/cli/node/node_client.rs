//! HTTPS client of the node's API: local administrator's certificate, one connection per request.

use std::{
    path::{Path, PathBuf},
    sync::Arc,
    time::Duration,
};

use anyhow::{Context, Result, bail};
use bytes::Bytes;
use clap::Args;
use http::{Request, Response, StatusCode, header};
use http_body_util::{BodyExt, Empty, Limited};
use hyper::{
    body::Incoming,
    client::conn::http1::{self, SendRequest},
};
use hyper_util::rt::TokioIo;
use rustls::{
    ClientConfig,
    crypto::ring,
    pki_types::{CertificateDer, PrivateKeyDer, ServerName, pem::PemObject},
};
use serde::de::DeserializeOwned;
use tokio::{net::TcpStream, time::timeout};
use tokio_rustls::TlsConnector;

use berth_sys::tls::PinnedServer;

/// Default address of the node's API.
const HERE: &str = "127.0.0.1:10250";
const PORT: u16 = 10250;
/// Default certificate directory.
const CERTIFICATES: &str = "/var/lib/kubelet/pki";
/// Timeouts: of connecting, and of the response headers, an error body, and a document.
const CONNECT: Duration = Duration::from_secs(10);
const ANSWER: Duration = Duration::from_secs(60);
/// Maximum size of a document, in bytes.
const DOCUMENT: usize = 256 << 20;
/// Maximum size of an error body that is shown, in bytes.
const REFUSAL: usize = 4 << 10;

/// Hints for a default certificate file that does not exist, and for a server with another certificate.
const NO_NODE: &str =
    "check that --cert-dir is the agent's; for a configured or cluster-issued serving certificate, use --cacert";
const NO_ADMINISTRATOR: &str =
    "check that --cert-dir is the agent's; a cluster node has no local administrator certificate: use --cert and --key";
const STRANGER: &str = "the server's certificate is not the node's: check --server and --cert-dir";

/// Response with an error status.
#[derive(Debug, thiserror::Error)]
#[error("{text}")]
pub(super) struct ErrorResponse {
    status: StatusCode,
    text: String,
}

/// Whether the node responded with 404.
pub(super) fn is_not_found(error: &anyhow::Error) -> bool {
    error.downcast_ref::<ErrorResponse>().is_some_and(|refused| refused.status == StatusCode::NOT_FOUND)
}

/// Where the node is, and who asks.
#[derive(Args, Clone, Debug, Default)]
pub(in crate::cli) struct ConnectionArguments {
    /// Address of the node's API [default: $BERTH_SERVER, or 127.0.0.1:10250]
    #[arg(long, value_name = "HOST[:PORT]", help_heading = "Connection")]
    server: Option<String>,
    /// Certificate directory of the agent [default: $BERTH_CERT_DIR, or /var/lib/kubelet/pki]
    #[arg(long, value_name = "DIR", help_heading = "Connection")]
    cert_dir: Option<PathBuf>,
    /// CA or serving certificate to verify the node with [default: kubelet.crt in the certificate directory]
    #[arg(long, value_name = "FILE", help_heading = "Connection")]
    cacert: Option<PathBuf>,
    /// Client certificate [default: berth-admin.crt in the certificate directory]
    #[arg(long, value_name = "FILE", requires = "key", help_heading = "Connection")]
    cert: Option<PathBuf>,
    /// Private key of the client certificate [default: berth-admin.key in the certificate directory]
    #[arg(long, value_name = "FILE", requires = "cert", help_heading = "Connection")]
    key: Option<PathBuf>,
}

/// Client of a node's API.
pub(super) struct NodeClient {
    address: String,
    name: ServerName<'static>,
    tls: TlsConnector,
}

impl NodeClient {
    /// Reads the certificates; does not connect yet.
    pub(super) fn open(arguments: &ConnectionArguments) -> Result<Self> {
        let server = arguments.server.clone().or_else(|| std::env::var("BERTH_SERVER").ok());
        let (host, address) = address(server.as_deref().unwrap_or(HERE))?;
        let from_environment = || std::env::var_os("BERTH_CERT_DIR").map(PathBuf::from);
        let directory = arguments.cert_dir.clone().or_else(from_environment);
        let directory = directory.unwrap_or_else(|| PathBuf::from(CERTIFICATES));
        let of = |given: &Option<PathBuf>, name| given.clone().unwrap_or_else(|| directory.join(name));
        let hint = |given: &Option<PathBuf>, hint| if given.is_some() { "" } else { hint };
        let believed = certificates(&of(&arguments.cacert, "kubelet.crt"), hint(&arguments.cacert, NO_NODE))?;
        let client = certificates(&of(&arguments.cert, "berth-admin.crt"), hint(&arguments.cert, NO_ADMINISTRATOR))?;
        let key_file = of(&arguments.key, "berth-admin.key");
        let key = PrivateKeyDer::from_pem_file(&key_file)
            .with_context(|| cannot_read(&key_file, hint(&arguments.key, NO_ADMINISTRATOR)))?;
        let provider = Arc::new(ring::default_provider());
        let config = ClientConfig::builder_with_provider(provider.clone())
            .with_safe_default_protocol_versions()?
            .dangerous()
            .with_custom_certificate_verifier(Arc::new(PinnedServer::verifier(believed, &provider)))
            .with_client_auth_cert(client, key)?;
        let name = ServerName::try_from(host.clone()).with_context(|| format!("--server: invalid host {host:?}"))?;
        Ok(Self { address, name, tls: Arc::new(config).into() })
    }

    async fn connect(&self) -> Result<SendRequest<Empty<Bytes>>> {
        let connecting = async {
            let stream = TcpStream::connect(&self.address).await?;
            stream.set_nodelay(true)?;
            let stream = self.tls.connect(self.name.clone(), stream).await?;
            anyhow::Ok(http1::handshake(TokioIo::new(stream)).await?)
        };
        let connected = timeout(CONNECT, connecting).await.unwrap_or_else(|_| bail!("timed out after {CONNECT:?}"));
        let (sender, connection) = connected.map_err(|error| {
            let stranger =
                error.chain().filter_map(|cause| cause.downcast_ref::<std::io::Error>()).any(is_certificate_error);
            let error = error.context(format!("cannot connect to the node at {}", self.address));
            if stranger { error.context(STRANGER) } else { error }
        })?;
        // A connection error also reaches the pending request.
        tokio::spawn(connection.with_upgrades());
        Ok(sender)
    }

    /// Sends a GET request; an error status is an error. The response body has no timeout.
    pub(super) async fn get(&self, path: &str, headers: &[(header::HeaderName, &str)]) -> Result<Response<Incoming>> {
        let mut sender = self.connect().await?;
        let mut request = Request::get(path).header(header::HOST, &self.address);
        for (name, value) in headers {
            request = request.header(name, *value);
        }
        let answer = timeout(ANSWER, sender.send_request(request.body(Empty::new())?)).await;
        let answer =
            answer.map_err(|_| anyhow::anyhow!("timed out waiting for the node's response after {ANSWER:?}"))?;
        let answer = answer.context("the node closed the connection; it may have rejected the client certificate")?;
        let status = answer.status();
        if status.is_success() || status == StatusCode::SWITCHING_PROTOCOLS {
            return Ok(answer);
        }
        let body = timeout(ANSWER, Limited::new(answer.into_body(), REFUSAL).collect()).await;
        let text = body.ok().and_then(Result::ok).map(|body| body.to_bytes()).unwrap_or_default();
        let text = super::super::table::sanitize(String::from_utf8_lossy(&text).trim());
        let text = match status {
            StatusCode::UNAUTHORIZED => format!("the node rejected the client certificate ({text})"),
            _ if text.is_empty() => format!("the node responded with status {status}"),
            _ => text,
        };
        Err(ErrorResponse { status, text }.into())
    }

    /// Reads the whole response body.
    pub(super) async fn bytes(&self, path: &str) -> Result<Bytes> {
        let answer = self.get(path, &[]).await?;
        let body = timeout(ANSWER, Limited::new(answer.into_body(), DOCUMENT).collect()).await;
        let body = body.with_context(|| format!("{path}: timed out reading the response body after {ANSWER:?}"))?;
        Ok(body.map_err(|error| anyhow::anyhow!("{path}: {error}"))?.to_bytes())
    }

    /// Reads and parses a JSON document.
    pub(super) async fn document<T: DeserializeOwned>(&self, path: &str) -> Result<T> {
        let bytes = self.bytes(path).await?;
        serde_json::from_slice(&bytes).with_context(|| format!("{path}: cannot parse the node's response"))
    }
}

/// Splits `--server` into the host (for TLS) and the address to dial.
fn address(server: &str) -> Result<(String, String)> {
    let server = server.trim_start_matches("https://").trim_end_matches('/');
    let (host, port) = match server.rsplit_once(':') {
        _ if server.parse::<std::net::Ipv6Addr>().is_ok() => (server, PORT),
        Some((host, port)) if !host.ends_with(':') && !port.ends_with(']') => {
            (host, port.parse().with_context(|| format!("--server: invalid port {port:?}"))?)
        }
        _ => (server, PORT),
    };
    let host = host.trim_start_matches('[').trim_end_matches(']');
    if host.is_empty() {
        bail!("--server: no host in {server:?}");
    }
    let shown = if host.contains(':') { format!("[{host}]") } else { host.to_owned() };
    Ok((host.to_owned(), format!("{shown}:{port}")))
}

/// Whether the handshake failed because of the server's certificate.
fn is_certificate_error(error: &std::io::Error) -> bool {
    let inner = error.get_ref().and_then(|inner| inner.downcast_ref::<rustls::Error>());
    matches!(inner, Some(rustls::Error::InvalidCertificate(_)))
}

/// Error text of a file that cannot be read; includes the hint if the file does not exist.
fn cannot_read(path: &Path, hint: &str) -> String {
    let shown = path.display();
    match std::fs::metadata(path) {
        Err(error) if error.kind() == std::io::ErrorKind::NotFound && !hint.is_empty() => {
            format!("cannot read {shown} ({hint})")
        }
        Err(error) if error.kind() == std::io::ErrorKind::PermissionDenied => {
            format!("cannot read {shown} (root privileges are required)")
        }
        _ => format!("cannot read {shown}"),
    }
}

fn certificates(path: &Path, hint: &str) -> Result<Vec<CertificateDer<'static>>> {
    let read = CertificateDer::pem_file_iter(path).and_then(Iterator::collect::<Result<Vec<_>, _>>);
    let read = read.with_context(|| cannot_read(path, hint))?;
    if read.is_empty() {
        bail!("{}: no certificate found in file", path.display());
    }
    Ok(read)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn hints_fit_what_is_wrong() {
        let directory = tempfile::tempdir().expect("a directory");
        let error_of = |arguments: &ConnectionArguments| {
            format!("{:#}", NodeClient::open(arguments).map(drop).expect_err("there is no certificate"))
        };
        let nothing =
            ConnectionArguments { cert_dir: Some(directory.path().to_owned()), ..ConnectionArguments::default() };
        assert!(
            error_of(&nothing).contains("kubelet.crt (check that --cert-dir is the agent's; for a configured"),
            "no node's"
        );
        let node = rcgen::generate_simple_self_signed(["n".to_owned()]).expect("a certificate");
        std::fs::write(directory.path().join("kubelet.crt"), node.cert.pem()).expect("written");
        let text = error_of(&nothing);
        assert!(text.contains("berth-admin.crt (check that --cert-dir is the agent's; a cluster node"), "{text}");
        let mine = directory.path().join("mine.crt");
        let given = ConnectionArguments { cert: Some(mine.clone()), key: Some(mine), ..nothing };
        let text = error_of(&given);
        assert!(text.contains("cannot read") && !text.contains("local administrator"), "{text}");
    }

    #[test]
    fn servers_have_names_and_ports() {
        for (server, expected) in [
            ("node", Some(("node", "node:10250"))),
            ("node:7", Some(("node", "node:7"))),
            ("https://10.0.0.1:7/", Some(("10.0.0.1", "10.0.0.1:7"))),
            ("::1", Some(("::1", "[::1]:10250"))),
            ("[::1]", Some(("::1", "[::1]:10250"))),
            ("[::1]:7", Some(("::1", "[::1]:7"))),
            ("node:x", None),
            (":7", None),
            ("", None),
        ] {
            let expected = expected.map(|(host, address)| (host.to_owned(), address.to_owned()));
            assert_eq!(address(server).ok(), expected, "{server}");
        }
    }
}
