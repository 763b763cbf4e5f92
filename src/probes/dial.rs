//! Connections to what is probed, each with a deadline, none of them kept. Behaviour: spec 05 §1.7, §1.8.
//!
//! The reference lets its sockets linger for a second. We do not: Linux then holds the thread that closes one for as
//! long as the peer does not answer, and the time a closed socket waits is the same either way.

use std::{
    io,
    net::{IpAddr, SocketAddr, ToSocketAddrs},
    sync::Arc,
};

use rustix::{
    io::Errno,
    net::{AddressFamily, SocketFlags, SocketType, socket_with},
};
use rustls::{ClientConfig, crypto::ring, pki_types::ServerName};
use tokio::{
    net::TcpStream,
    sync::Semaphore,
    time::{Instant, timeout_at},
};
use tokio_rustls::{TlsConnector, client::TlsStream};
use tokio_util::sync::{CancellationToken, DropGuard};

use crate::sys::any_certificate::AnyCertificate;

/// Names that are looked up at a time: a lookup that hangs cannot be called off.
pub const LOOKUPS: usize = 16;

/// Dials what is probed.
pub struct Dialler {
    lookups: Arc<Semaphore>,
    tls: Arc<ClientConfig>,
}

/// Why there is no connection.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct DialError {
    /// In Go's words.
    pub text: String,
    /// The deadline passed.
    pub is_timeout: bool,
}

impl Dialler {
    /// One for all probes.
    ///
    /// # Errors
    /// TLS cannot be set up.
    pub fn new() -> Result<Self, String> {
        let provider = Arc::new(ring::default_provider());
        let mut tls = ClientConfig::builder_with_provider(provider.clone())
            .with_safe_default_protocol_versions()
            .map_err(|e| e.to_string())?
            .dangerous()
            .with_custom_certificate_verifier(Arc::new(AnyCertificate(provider)))
            .with_no_client_auth();
        tls.alpn_protocols = vec![b"h2".to_vec(), b"http/1.1".to_vec()];
        // Each connection is the only one to its server.
        tls.resumption = rustls::client::Resumption::disabled();
        Ok(Self { lookups: Arc::new(Semaphore::new(LOOKUPS)), tls: Arc::new(tls) })
    }

    /// Connects to the first address of a host that takes it.
    ///
    /// # Errors
    /// None does in time.
    pub async fn tcp(&self, host: &str, port: u16, deadline: Instant) -> Result<TcpStream, DialError> {
        let connected = self.knock(host, port, deadline).await?.followed();
        connected.map_err(|error| DialError { text: words(&error), is_timeout: false })
    }

    /// As [`Dialler::tcp`], for those who write more than once: nothing they write is held back.
    ///
    /// # Errors
    /// None does in time.
    pub async fn prompt(&self, host: &str, port: u16, deadline: Instant) -> Result<TcpStream, DialError> {
        let stream = self.tcp(host, port, deadline).await?;
        // It only makes the probe a little slower.
        let _ = stream.set_nodelay(true);
        Ok(stream)
    }

    /// As [`Dialler::tcp`], for those who only want to know whether they could.
    ///
    /// # Errors
    /// None does in time.
    pub async fn knock(&self, host: &str, port: u16, deadline: Instant) -> Result<Connected, DialError> {
        let mut failed = None;
        for address in self.addresses(host, port, deadline).await? {
            match timeout_at(deadline, connect(address)).await {
                Ok(Ok(connected)) => return Ok(connected),
                Ok(Err(error)) => {
                    let text = format!("dial tcp {address}: connect: {}", words(&error));
                    failed.get_or_insert(DialError { text, is_timeout: false });
                }
                Err(_) => return Err(DialError { text: format!("dial tcp {address}: i/o timeout"), is_timeout: true }),
            }
        }
        Err(failed.unwrap_or_else(|| DialError { text: no_such_host(host), is_timeout: false }))
    }

    /// As [`Dialler::tcp`], with TLS on it; whoever answers is believed.
    ///
    /// # Errors
    /// There is no connection, or no TLS on it.
    pub async fn tls(&self, host: &str, port: u16, deadline: Instant) -> Result<TlsStream<TcpStream>, DialError> {
        let stream = self.prompt(host, port, deadline).await?;
        let name = match ServerName::try_from(host.to_owned()) {
            Ok(name) => name,
            // A name that may not be told is not told.
            Err(_) => ServerName::IpAddress(stream.peer_addr().map_err(other)?.ip().into()),
        };
        match timeout_at(deadline, TlsConnector::from(self.tls.clone()).connect(name, stream)).await {
            Ok(Ok(stream)) => Ok(stream),
            Ok(Err(error)) => Err(other(error)),
            Err(_) => Err(DialError { text: "net/http: TLS handshake timeout".to_owned(), is_timeout: true }),
        }
    }

    async fn addresses(&self, host: &str, port: u16, deadline: Instant) -> Result<Vec<SocketAddr>, DialError> {
        if let Ok(ip) = host.parse::<IpAddr>() {
            return Ok(vec![SocketAddr::new(ip, port)]);
        }
        let late = |_| DialError { text: format!("dial tcp: lookup {host}: i/o timeout"), is_timeout: true };
        let lookups = self.lookups.clone();
        let name = host.to_owned();
        let lookup = async move {
            let permit = lookups.acquire_owned().await;
            let found = tokio::task::spawn_blocking(move || {
                let _held = permit; // until the lookup has really ended
                (name.as_str(), port).to_socket_addrs().map(Iterator::collect::<Vec<_>>)
            });
            found.await.map_err(io::Error::other).flatten()
        };
        let found = timeout_at(deadline, lookup).await.map_err(late)?;
        found.map_err(|_| DialError { text: no_such_host(host), is_timeout: false })
    }
}

/// A connection, with which the runtime may not have been bothered yet.
pub enum Connected {
    /// It was there at once.
    AtOnce(std::net::TcpStream),
    /// It was waited for.
    Later(TcpStream),
}

impl Connected {
    /// To be read and written.
    fn followed(self) -> io::Result<TcpStream> {
        match self {
            Self::AtOnce(stream) => TcpStream::from_std(stream),
            Self::Later(stream) => Ok(stream),
        }
    }
}

/// Connects. A pod of this node has answered before the kernel returns: then there is nothing to wait for, and most
/// probes are of such.
async fn connect(address: SocketAddr) -> io::Result<Connected> {
    let family = if address.is_ipv4() { AddressFamily::INET } else { AddressFamily::INET6 };
    let flags = SocketFlags::NONBLOCK | SocketFlags::CLOEXEC;
    let socket = socket_with(family, SocketType::STREAM, flags, None)?;
    let mut is_decided = begun(rustix::net::connect(&socket, &address))?;
    if !is_decided {
        // Whoever connects again is told how it went.
        is_decided = begun(rustix::net::connect(&socket, &address))?;
    }
    let stream = std::net::TcpStream::from(socket);
    if is_decided {
        return Ok(Connected::AtOnce(stream));
    }
    let stream = TcpStream::from_std(stream)?;
    stream.writable().await?;
    stream.take_error()?.map_or(Ok(Connected::Later(stream)), Err)
}

/// Whether a connection that is being made is there already.
fn begun(told: rustix::io::Result<()>) -> io::Result<bool> {
    match told {
        Ok(()) | Err(Errno::ISCONN) => Ok(true),
        Err(Errno::INPROGRESS | Errno::ALREADY | Errno::INTR) => Ok(false),
        Err(error) => Err(error.into()),
    }
}

fn no_such_host(host: &str) -> String {
    format!("dial tcp: lookup {host}: no such host")
}

fn other(error: io::Error) -> DialError {
    let source = error.get_ref().and_then(|inner| inner.downcast_ref::<rustls::Error>());
    let text = match source {
        // What begins a TLS record is no letter.
        Some(rustls::Error::InvalidMessage(rustls::InvalidMessage::InvalidContentType)) => {
            "tls: first record does not look like a TLS handshake (is it a server of plain HTTP?)".to_owned()
        }
        Some(error) => format!("tls: {error}"),
        None if error.kind() == io::ErrorKind::UnexpectedEof => "EOF".to_owned(),
        None => words(&error),
    };
    DialError { text, is_timeout: false }
}

/// An error of the kernel as Go words it.
pub fn words(error: &io::Error) -> String {
    let text = error.to_string();
    let text = text.split(" (os error").next().unwrap_or_default();
    let mut letters = text.chars();
    let first = letters.next().map(|c| c.to_ascii_lowercase());
    first.into_iter().chain(letters).collect()
}

/// Runs what a connection spawns, until the guard is dropped: nothing of a probe outlives it.
#[derive(Clone)]
pub struct Spawner(CancellationToken);

impl Spawner {
    /// With the guard that ends everything.
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
