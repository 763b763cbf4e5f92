//! Client of the runtime's streaming server: dialing, and HTTP upgrade requests.

use std::{io, net::IpAddr, sync::Arc, time::Duration};

use bytes::Bytes;
use http::{HeaderMap, HeaderValue, Method, Request, Response, header};
use http_body_util::Empty;
use hyper::body::Incoming;
use hyper_util::rt::TokioIo;
use rustls::pki_types::ServerName;
use tokio::{
    io::{AsyncRead, AsyncWrite},
    net::{TcpStream, UdpSocket, UnixStream},
    time::timeout,
};
use tokio_util::task::AbortOnDropHandle;

use super::url::{self, DialTarget, StreamUrl, UrlError};

/// Timeout for establishing a connection.
const DIALLING: Duration = Duration::from_secs(30);

/// Returns the TLS configuration for runtimes that serve streams over TLS; called on demand.
pub type Tls = Arc<dyn Fn() -> Arc<rustls::ClientConfig> + Send + Sync>;

/// Dials the runtime's streaming server.
#[derive(Clone)]
pub struct Dialer {
    /// Hosts that may be dialed besides this machine.
    pub allowed: Arc<[String]>,
    /// TLS configuration for `https` URLs.
    pub tls: Tls,
    /// Timeout for the response head.
    pub answer: Duration,
}

/// Reason why there is no response from the runtime.
#[derive(Debug, thiserror::Error)]
pub enum BackendError {
    /// The URL is invalid or not allowed.
    #[error("error dialing backend: {0}")]
    Url(#[from] UrlError),
    /// The connection could not be established.
    #[error("error dialing backend: {0}")]
    Dial(String),
    /// The HTTP exchange failed.
    #[error("error sending request: {0}")]
    Send(#[from] hyper::Error),
    /// No response within the timeout.
    #[error("error sending request: no response within {0:?}")]
    Silent(Duration),
    /// The request head is invalid.
    #[error("error sending request: {0}")]
    Head(#[from] http::Error),
}

impl BackendError {
    /// The cause, without the prefix that names the failed step.
    pub fn cause(&self) -> String {
        match self {
            Self::Url(error) => error.to_string(),
            Self::Dial(text) => text.clone(),
            Self::Send(error) => error.to_string(),
            Self::Silent(limit) => format!("no response within {limit:?}"),
            Self::Head(error) => error.to_string(),
        }
    }
}

/// Response, and the task that drives its connection.
pub struct RuntimeResponse {
    /// Response head, and body or upgrade.
    pub response: Response<Incoming>,
    /// Must stay alive while the response is read; dropping it aborts the connection.
    pub connection: AbortOnDropHandle<()>,
}

/// Any bidirectional transport.
trait Io: AsyncRead + AsyncWrite + Send + Unpin {}
impl<T: AsyncRead + AsyncWrite + Send + Unpin> Io for T {}

impl Dialer {
    /// Sends a request to the runtime's URL and waits for the response head.
    ///
    /// # Errors
    /// If the URL is rejected, the connection fails, or no response arrives in time.
    pub async fn send_request(
        &self,
        url: &str,
        method: Method,
        mut headers: HeaderMap,
    ) -> Result<RuntimeResponse, BackendError> {
        let url = url::read(url, &self.allowed)?;
        let io = match timeout(DIALLING, self.dial(&url)).await {
            Ok(io) => io?,
            Err(_) => return Err(BackendError::Dial(dialling(&url.place, "i/o timeout"))),
        };
        headers.insert(header::HOST, HeaderValue::from_str(&url.authority).map_err(http::Error::from)?);
        let mut request = Request::builder().method(method).uri(url.path).body(Empty::<Bytes>::new())?;
        *request.headers_mut() = headers;
        let (mut sender, connection) = hyper::client::conn::http1::handshake(TokioIo::new(io)).await?;
        let connection = AbortOnDropHandle::new(tokio::spawn(async move {
            let _ = connection.with_upgrades().await; // the reader of the response gets the error
        }));
        let answer = timeout(self.answer, sender.send_request(request)).await;
        let response = answer.map_err(|_| BackendError::Silent(self.answer))??;
        Ok(RuntimeResponse { response, connection })
    }

    async fn dial(&self, url: &StreamUrl) -> Result<Box<dyn Io>, BackendError> {
        let failed = |error: &io::Error| BackendError::Dial(dialling(&url.place, &words(error)));
        let (host, port) = match &url.place {
            DialTarget::Unix(path) => {
                return Ok(Box::new(UnixStream::connect(path).await.map_err(|error| failed(&error))?));
            }
            DialTarget::Host { host, port, must_be_local: must_be_ours } => {
                if *must_be_ours && !is_ours(host).await {
                    return Err(UrlError::Foreign(host.clone()).into());
                }
                (host.as_str(), *port)
            }
        };
        let tcp = TcpStream::connect((host, port)).await.map_err(|error| failed(&error))?;
        let _ = tcp.set_nodelay(true); // best effort: only latency depends on it
        if !url.tls {
            return Ok(Box::new(tcp));
        }
        let name = ServerName::try_from(host.to_owned()).map_err(|error| BackendError::Dial(error.to_string()))?;
        let connector = tokio_rustls::TlsConnector::from((self.tls)());
        let tls = connector.connect(name, tcp).await.map_err(|error| BackendError::Dial(error.to_string()))?;
        Ok(Box::new(tls))
    }
}

/// Whether the address is local: the kernel allows bind only to local addresses.
async fn is_ours(host: &str) -> bool {
    let Ok(address) = host.parse::<IpAddr>() else { return false };
    UdpSocket::bind((address, 0)).await.is_ok()
}

fn dialling(place: &DialTarget, why: &str) -> String {
    match place {
        DialTarget::Unix(path) => format!("dial unix {path}: {why}"),
        DialTarget::Host { host, port, .. } if host.contains(':') => format!("dial tcp [{host}]:{port}: {why}"),
        DialTarget::Host { host, port, .. } => format!("dial tcp {host}:{port}: {why}"),
    }
}

/// Error texts as Go prints them, for the errors that operators encounter.
fn words(error: &io::Error) -> String {
    match error.kind() {
        io::ErrorKind::NotFound => "connect: no such file or directory".to_owned(),
        io::ErrorKind::ConnectionRefused => "connect: connection refused".to_owned(),
        _ => format!("connect: {error}"),
    }
}
