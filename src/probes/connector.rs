//! Connections to probe targets, each with a deadline and none of them reused.
//!
//! Implements spec 05 §1.7, §1.8.
//!
//! kubelet sets SO_LINGER to one second. Berth does not: Linux then blocks the closing thread while the peer does not
//! respond, and the time that a closed socket waits is the same either way.

use std::{
    io,
    net::{IpAddr, SocketAddr},
    sync::Arc,
};

use rustls::{ClientConfig, pki_types::ServerName};
use tokio::{
    net::TcpStream,
    time::{Instant, timeout_at},
};
use tokio_rustls::TlsConnector;
use tokio_util::sync::{CancellationToken, DropGuard};

use super::{
    lookup::HostResolver,
    outcome::Outcome,
    stream::{LenientTlsStream, LimitedStream},
};
use berth_sys::tls::{self, NoVerification};
use berth_types::PodUid;

/// Connects to probe targets.
pub struct Connector {
    lookups: HostResolver,
    tls: Arc<ClientConfig>,
}

/// [`Connector`] for the probes of one pod.
#[derive(Clone, Copy)]
pub struct PodConnector<'a> {
    all: &'a Connector,
    pod: &'a PodUid,
}

/// Connection error.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct DialError {
    /// Error text in Go's wording.
    pub text: String,
    /// Cause of the error.
    pub why: ConnectErrorKind,
}

/// Cause of a connection error.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum ConnectErrorKind {
    /// The peer refused, or there is no peer.
    Refused,
    /// The deadline passed.
    TimedOut,
    /// A local limit: it is no statement about the target.
    LocalLimit,
}

impl DialError {
    /// Outcome of a probe that only connects.
    pub fn outcome(self) -> Outcome {
        if self.why == ConnectErrorKind::LocalLimit { Outcome::unknown(self.text) } else { Outcome::Failure(self.text) }
    }
}

impl Connector {
    /// Creates the dialer of all probes.
    ///
    /// # Errors
    /// TLS cannot be set up.
    pub fn new() -> Result<Self, String> {
        let provider = Arc::new(tls::provider());
        let mut tls = ClientConfig::builder_with_provider(provider.clone())
            .with_safe_default_protocol_versions()
            .map_err(|e| e.to_string())?
            .dangerous()
            .with_custom_certificate_verifier(Arc::new(NoVerification::new(&provider)))
            .with_no_client_auth();
        tls.alpn_protocols = vec![b"h2".to_vec(), b"http/1.1".to_vec()];
        // Each connection is the only one to its server.
        tls.resumption = rustls::client::Resumption::disabled();
        Ok(Self { lookups: HostResolver::new(), tls: Arc::new(tls) })
    }

    /// Dialer for the probes of that pod, which share the pod's limit of concurrent lookups.
    pub fn of<'a>(&'a self, pod: &'a PodUid) -> PodConnector<'a> {
        PodConnector { all: self, pod }
    }
}

impl PodConnector<'_> {
    /// Connects to the first address of a host that accepts.
    ///
    /// # Errors
    /// No address accepts before `deadline`.
    pub async fn tcp(&self, host: &str, port: u16, deadline: Instant) -> Result<LimitedStream, DialError> {
        self.connect(host, port, deadline).await.map(LimitedStream::new)
    }

    /// Like [`Self::tcp`], for callers that write more than once: disables Nagle's algorithm.
    ///
    /// # Errors
    /// No address accepts before `deadline`.
    pub async fn tcp_nodelay(&self, host: &str, port: u16, deadline: Instant) -> Result<LimitedStream, DialError> {
        let stream = self.tcp(host, port, deadline).await?;
        // A failure only makes the probe slightly slower.
        let _ = stream.socket().set_nodelay(true);
        Ok(stream)
    }

    /// Like [`Self::tcp`], for callers that read nothing.
    ///
    /// # Errors
    /// No address accepts before `deadline`.
    pub async fn connect(&self, host: &str, port: u16, deadline: Instant) -> Result<TcpStream, DialError> {
        let addresses = self.addresses(host, port, deadline).await?;
        let mut failed = None;
        for (left, address) in (1..=u32::try_from(addresses.len()).unwrap_or(u32::MAX)).rev().zip(addresses) {
            // An address that does not respond leaves the others their share of the time.
            let share = deadline.saturating_duration_since(Instant::now()) / left;
            let error = match timeout_at(Instant::now() + share, TcpStream::connect(address)).await {
                Ok(Ok(connected)) => return Ok(connected),
                Ok(Err(error)) => {
                    let text = format!("dial tcp {address}: connect: {}", go_error_text(&error));
                    DialError { text, why: ConnectErrorKind::Refused }
                }
                Err(_) => {
                    DialError { text: format!("dial tcp {address}: i/o timeout"), why: ConnectErrorKind::TimedOut }
                }
            };
            failed.get_or_insert(error);
        }
        let none =
            || DialError { text: format!("dial tcp: lookup {host}: no such host"), why: ConnectErrorKind::Refused };
        Err(failed.unwrap_or_else(none))
    }

    /// Like [`Self::tcp`], with TLS; the server's certificate is not verified.
    ///
    /// # Errors
    /// No connection, or no TLS handshake on it, before `deadline`.
    pub async fn tls(&self, host: &str, port: u16, deadline: Instant) -> Result<LenientTlsStream, DialError> {
        let stream = self.tcp_nodelay(host, port, deadline).await?;
        let name = match ServerName::try_from(host.to_owned()) {
            Ok(name) => name,
            // A host that is no valid server name is not sent (SNI).
            Err(_) => {
                let peer = stream.socket().peer_addr();
                let peer =
                    peer.map_err(|error| DialError { text: go_error_text(&error), why: ConnectErrorKind::Refused })?;
                ServerName::IpAddress(peer.ip().into())
            }
        };
        let shaken = TlsConnector::from(self.all.tls.clone()).connect(name, stream).into_fallible();
        match timeout_at(deadline, shaken).await {
            Ok(Ok(stream)) => Ok(LenientTlsStream::new(stream)),
            Ok(Err((error, stream))) => {
                Err(DialError { text: no_tls(&error, stream.first()), why: ConnectErrorKind::Refused })
            }
            Err(_) => {
                Err(DialError { text: "net/http: TLS handshake timeout".to_owned(), why: ConnectErrorKind::TimedOut })
            }
        }
    }

    async fn addresses(&self, host: &str, port: u16, deadline: Instant) -> Result<Vec<SocketAddr>, DialError> {
        if let Ok(ip) = host.parse::<IpAddr>() {
            return Ok(vec![SocketAddr::new(ip, port)]);
        }
        let found = self.all.lookups.resolve(host, self.pod, deadline).await?;
        let at_port = |mut address: SocketAddr| {
            address.set_port(port);
            address
        };
        Ok(found.iter().copied().map(at_port).collect())
    }
}

/// Text of a failed TLS handshake; `first` are the first bytes that the peer sent.
fn no_tls(error: &io::Error, first: &[u8; 5]) -> String {
    match error.get_ref().and_then(|inner| inner.downcast_ref::<rustls::Error>()) {
        // A TLS record does not begin with a letter.
        Some(rustls::Error::InvalidMessage(rustls::InvalidMessage::InvalidContentType)) if first == b"HTTP/" => {
            "http: server gave HTTP response to HTTPS client".to_owned()
        }
        Some(rustls::Error::InvalidMessage(rustls::InvalidMessage::InvalidContentType)) => {
            "tls: first record does not look like a TLS handshake".to_owned()
        }
        Some(error) => format!("tls: {error}"),
        None if error.kind() == io::ErrorKind::UnexpectedEof => "EOF".to_owned(),
        None => go_error_text(error),
    }
}

/// Text of an operating system error in Go's wording.
pub fn go_error_text(error: &io::Error) -> String {
    let text = error.to_string();
    let text = text.split(" (os error").next().unwrap_or_default();
    let mut letters = text.chars();
    let first = letters.next().map(|c| c.to_ascii_lowercase());
    first.into_iter().chain(letters).collect()
}

/// Executor of the tasks of a connection. They end when the guard is dropped: nothing of a probe outlives it.
#[derive(Clone)]
pub struct Spawner(CancellationToken);

impl Spawner {
    /// Creates an executor, and the guard that ends its tasks.
    pub fn new() -> (Self, DropGuard) {
        let over = CancellationToken::new();
        (Self(over.clone()), over.drop_guard())
    }
}

impl<F> hyper::rt::Executor<F> for Spawner
where
    F: Future + Send + 'static,
    F::Output: Send + 'static,
{
    fn execute(&self, future: F) {
        let over = self.0.clone();
        tokio::spawn(async move { over.run_until_cancelled(future).await.map(drop) });
    }
}

#[cfg(test)]
mod tests {
    use std::{
        net::{Ipv6Addr, SocketAddrV6},
        time::Duration,
    };

    use tokio::net::{TcpListener, TcpSocket};

    use super::*;

    /// A listener with a full backlog: it neither accepts nor refuses connections.
    async fn deaf(address: SocketAddr) -> (TcpListener, Vec<TcpStream>) {
        let socket = TcpSocket::new_v4().expect("a socket");
        socket.bind(address).expect("free");
        let listener = socket.listen(0).expect("listens");
        let mut waiting = Vec::new();
        while let Ok(made) = tokio::time::timeout(Duration::from_millis(100), TcpStream::connect(address)).await {
            waiting.push(made.expect("there is room"));
        }
        (listener, waiting)
    }

    #[tokio::test]
    async fn an_address_that_does_not_answer_leaves_the_others_their_share() {
        let listener = TcpListener::bind("127.0.0.3:0").await.expect("a port");
        let port = listener.local_addr().expect("bound").port();
        let _deaf = deaf(SocketAddr::from(([127, 0, 0, 2], port))).await;
        let dialler = |last: &[[u8; 4]]| {
            let mut dialler = Connector::new().expect("TLS");
            let all: Vec<_> = last.iter().map(|ip| SocketAddr::from((*ip, 0))).collect();
            dialler.lookups = HostResolver::by(move |_| all.clone());
            dialler
        };
        let begun = Instant::now();
        let soon = || Instant::now() + Duration::from_secs(4);
        let both = dialler(&[[127, 0, 0, 2], [127, 0, 0, 3]]);
        assert!(both.of(&"u".into()).connect("host", port, soon()).await.is_ok());
        assert!(begun.elapsed() < Duration::from_millis(3500), "half of it each: {:?}", begun.elapsed());
        let one = dialler(&[[127, 0, 0, 2]]);
        let Err(error) = one.of(&"u".into()).connect("host", port, soon()).await else { panic!("it is deaf") };
        let expected =
            DialError { text: format!("dial tcp 127.0.0.2:{port}: i/o timeout"), why: ConnectErrorKind::TimedOut };
        assert_eq!(error, expected);
    }

    #[tokio::test]
    async fn an_address_keeps_its_scope() {
        let mut dialler = Connector::new().expect("TLS");
        let found = SocketAddrV6::new(Ipv6Addr::LOCALHOST, 0, 0, 7);
        dialler.lookups = HostResolver::by(move |_| vec![found.into()]);
        let deadline = Instant::now() + Duration::from_secs(60);
        let addresses = dialler.of(&"u".into()).addresses("host", 80, deadline).await.expect("found");
        assert_eq!(addresses, [SocketAddr::from(SocketAddrV6::new(Ipv6Addr::LOCALHOST, 80, 0, 7))]);
    }

    #[test]
    fn what_is_our_own_fault_is_not_counted() {
        for (why, counts) in [
            (ConnectErrorKind::Refused, true),
            (ConnectErrorKind::TimedOut, true),
            (ConnectErrorKind::LocalLimit, false),
        ] {
            let outcome = DialError { text: String::new(), why }.outcome();
            assert_eq!(outcome.result().is_some(), counts, "{why:?}");
        }
    }
}
