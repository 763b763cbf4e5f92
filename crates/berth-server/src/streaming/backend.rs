//! The runtime's streaming server: dialling it, and asking it to change protocols.

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

use super::url::{self, Place, StreamUrl, UrlError};

/// How long a connection may take to come about.
const DIALLING: Duration = Duration::from_secs(30);

/// How a runtime that serves its streams over TLS is known; asked when it is needed.
pub type Tls = Arc<dyn Fn() -> Arc<rustls::ClientConfig> + Send + Sync>;

/// Dials the runtime.
#[derive(Clone)]
pub struct Dialer {
    /// Hosts that may be dialled beside this machine.
    pub allowed: Arc<[String]>,
    /// For `https` URLs.
    pub tls: Tls,
    /// How long the head of an answer may take.
    pub answer: Duration,
}

/// Why there is no answer of the runtime.
#[derive(Debug, thiserror::Error)]
pub enum BackendError {
    /// Its URL is not one we dial.
    #[error("error dialing backend: {0}")]
    Url(#[from] UrlError),
    /// It is not there.
    #[error("error dialing backend: {0}")]
    Dial(String),
    /// It is there and does not answer.
    #[error("error sending request: {0}")]
    Send(#[from] hyper::Error),
    /// It is there, and says nothing.
    #[error("error sending request: no answer within {0:?}")]
    Silent(Duration),
    /// The head cannot be sent.
    #[error("error sending request: {0}")]
    Head(#[from] http::Error),
}

impl BackendError {
    /// What happened, without where in our doing.
    pub fn cause(&self) -> String {
        match self {
            Self::Url(error) => error.to_string(),
            Self::Dial(text) => text.clone(),
            Self::Send(error) => error.to_string(),
            Self::Silent(limit) => format!("no answer within {limit:?}"),
            Self::Head(error) => error.to_string(),
        }
    }
}

/// An answer, and the task that keeps its connection going.
pub struct Answered {
    /// Head, and body or upgrade.
    pub response: Response<Incoming>,
    /// To be kept as long as the response is read.
    pub connection: AbortOnDropHandle<()>,
}

/// Any connection.
trait Io: AsyncRead + AsyncWrite + Send + Unpin {}
impl<T: AsyncRead + AsyncWrite + Send + Unpin> Io for T {}

impl Dialer {
    /// Sends a request to the runtime's URL and waits for the head of its answer.
    ///
    /// # Errors
    /// If the URL is not to be dialled, nobody is there, or there is no answer.
    pub async fn ask(&self, url: &str, method: Method, mut headers: HeaderMap) -> Result<Answered, BackendError> {
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
            let _ = connection.with_upgrades().await; // whoever reads the answer is told
        }));
        let answer = timeout(self.answer, sender.send_request(request)).await;
        let response = answer.map_err(|_| BackendError::Silent(self.answer))??;
        Ok(Answered { response, connection })
    }

    async fn dial(&self, url: &StreamUrl) -> Result<Box<dyn Io>, BackendError> {
        let failed = |error: &io::Error| BackendError::Dial(dialling(&url.place, &words(error)));
        let (host, port) = match &url.place {
            Place::Unix(path) => {
                return Ok(Box::new(UnixStream::connect(path).await.map_err(|error| failed(&error))?));
            }
            Place::Host { host, port, must_be_ours } => {
                if *must_be_ours && !is_ours(host).await {
                    return Err(UrlError::Foreign(host.clone()).into());
                }
                (host.as_str(), *port)
            }
        };
        let tcp = TcpStream::connect((host, port)).await.map_err(|error| failed(&error))?;
        let _ = tcp.set_nodelay(true); // slower, but it works
        if !url.tls {
            return Ok(Box::new(tcp));
        }
        let name = ServerName::try_from(host.to_owned()).map_err(|error| BackendError::Dial(error.to_string()))?;
        let connector = tokio_rustls::TlsConnector::from((self.tls)());
        let tls = connector.connect(name, tcp).await.map_err(|error| BackendError::Dial(error.to_string()))?;
        Ok(Box::new(tls))
    }
}

/// Whether an address is one of this machine: only then the kernel lets us use it.
async fn is_ours(host: &str) -> bool {
    let Ok(address) = host.parse::<IpAddr>() else { return false };
    UdpSocket::bind((address, 0)).await.is_ok()
}

fn dialling(place: &Place, why: &str) -> String {
    match place {
        Place::Unix(path) => format!("dial unix {path}: {why}"),
        Place::Host { host, port, .. } if host.contains(':') => format!("dial tcp [{host}]:{port}: {why}"),
        Place::Host { host, port, .. } => format!("dial tcp {host}:{port}: {why}"),
    }
}

/// As Go prints the errors that operators meet.
fn words(error: &io::Error) -> String {
    match error.kind() {
        io::ErrorKind::NotFound => "connect: no such file or directory".to_owned(),
        io::ErrorKind::ConnectionRefused => "connect: connection refused".to_owned(),
        _ => format!("connect: {error}"),
    }
}
