//! Fixture: a TLS server on loopback made of the agent's TLS parts, and its clients.

use std::{net::SocketAddr, path::Path, sync::Arc};

use berth::certificates::{Authority, CertificatePair, CertificatePairPaths, Validity};
use berth_server::tls::{Tls, TlsSettings};
use jiff::Timestamp;
use rustls::{
    ClientConfig, HandshakeKind, RootCertStore, SupportedProtocolVersion,
    client::ResolvesClientCert,
    pki_types::{CertificateDer, PrivateKeyDer, ServerName, pem::PemObject},
    sign::CertifiedKey,
};
use tokio::{
    io::{AsyncReadExt, AsyncWriteExt},
    net::{TcpListener, TcpStream},
    sync::mpsc,
};
use tokio_util::sync::CancellationToken;

/// Validity of all certificates in these tests.
pub fn valid() -> Validity {
    Validity::days(Timestamp::now(), 30)
}

pub fn authority(name: &str) -> Authority {
    Authority::create(name, valid()).expect("an authority")
}

pub fn serving(authority: &Authority) -> CertificatePair {
    authority.serving("node", &["localhost".to_owned()], valid()).expect("a certificate")
}

/// A connection as the server saw it.
#[derive(Debug)]
pub struct ObservedConnection {
    pub chain: Vec<CertificateDer<'static>>,
    pub alpn: Option<Vec<u8>>,
}

/// A TLS server with its files in a directory.
pub struct Server {
    pub folder: tempfile::TempDir,
    pub address: SocketAddr,
    pub tls: Tls,
    pub seen: mpsc::UnboundedReceiver<ObservedConnection>,
    stop: CancellationToken,
}

impl Server {
    /// Starts a server with that serving pair, that client CA, and changed settings.
    pub async fn start(
        serving: &CertificatePair,
        client_ca: Option<&str>,
        change: impl FnOnce(&mut TlsSettings),
    ) -> Self {
        let folder = tempfile::tempdir().expect("a folder");
        let files = CertificatePairPaths::of(folder.path(), "serving");
        files.write(serving).expect("written");
        let ca = folder.path().join("ca.crt");
        if let Some(pem) = client_ca {
            std::fs::write(&ca, pem).expect("written");
        }
        let mut settings = TlsSettings {
            cert_file: files.certificate,
            key_file: files.key,
            client_ca_file: client_ca.map(|_| ca),
            ..TlsSettings::default()
        };
        change(&mut settings);
        let tls = Tls::new(settings).await.expect("TLS");
        let stop = CancellationToken::new();
        tokio::spawn(tls.clone().run(None, stop.clone()));
        let listener = TcpListener::bind("127.0.0.1:0").await.expect("a port");
        let address = listener.local_addr().expect("an address");
        let (sender, seen) = mpsc::unbounded_channel();
        let accepting = tls.clone();
        tokio::spawn(async move {
            while let Ok((stream, _)) = listener.accept().await {
                let (acceptor, sender) = (accepting.acceptor(), sender.clone());
                tokio::spawn(async move {
                    let Ok(mut stream) = acceptor.accept(stream).await else { return };
                    let (_, session) = stream.get_ref();
                    let chain = session.peer_certificates().unwrap_or_default();
                    let chain = chain.iter().map(|c| c.clone().into_owned()).collect();
                    let _ =
                        sender.send(ObservedConnection { chain, alpn: session.alpn_protocol().map(<[u8]>::to_vec) });
                    let _ = stream.write_all(b"x").await; // makes the client read its session tickets
                    let _ = stream.shutdown().await;
                });
            }
        });
        Self { folder, address, tls, seen, stop }
    }

    pub fn path(&self, name: &str) -> std::path::PathBuf {
        self.folder.path().join(name)
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        self.stop.cancel();
    }
}

/// A TLS client.
pub struct Client {
    config: ClientConfig,
}

impl Client {
    /// Trusts that CA; has no certificate.
    pub fn new(authority: &Authority) -> Self {
        Self::with_versions(authority, rustls::ALL_VERSIONS)
    }

    pub fn with_versions(authority: &Authority, versions: &[&'static SupportedProtocolVersion]) -> Self {
        let mut roots = RootCertStore::empty();
        let ca = CertificateDer::from_pem_slice(authority.own().certificate.as_bytes()).expect("a certificate");
        roots.add(ca).expect("an authority");
        let provider = Arc::new(rustls::crypto::ring::default_provider());
        let config = ClientConfig::builder_with_provider(provider).with_protocol_versions(versions).expect("versions");
        Self { config: config.with_root_certificates(roots).with_no_client_auth() }
    }

    /// Presents that certificate and key, whether they match or not, and whichever CAs the server names.
    pub fn showing(mut self, certificate: &str, key: &str) -> Self {
        let chain: Result<Vec<_>, _> = CertificateDer::pem_slice_iter(certificate.as_bytes()).collect();
        let key = PrivateKeyDer::from_pem_slice(key.as_bytes()).expect("a key");
        let key = rustls::crypto::ring::sign::any_supported_type(&key).expect("a key");
        let shown = CertifiedKey::new(chain.expect("a chain"), key);
        self.config.client_auth_cert_resolver = Arc::new(Shows(Arc::new(shown)));
        self
    }

    pub fn speaking(mut self, protocols: &[&str]) -> Self {
        self.config.alpn_protocols = protocols.iter().map(|p| p.as_bytes().to_vec()).collect();
        self
    }

    /// Connects and reads to the end.
    pub async fn connect(&self, server: &Server) -> std::io::Result<HandshakeKind> {
        let stream = TcpStream::connect(server.address).await?;
        let connector = tokio_rustls::TlsConnector::from(Arc::new(self.config.clone()));
        let name = ServerName::try_from("localhost").expect("a name");
        let mut stream = connector.connect(name, stream).await?;
        let mut rest = Vec::new();
        stream.read_to_end(&mut rest).await?;
        Ok(stream.get_ref().1.handshake_kind().expect("done"))
    }
}

#[derive(Debug)]
struct Shows(Arc<CertifiedKey>);

impl ResolvesClientCert for Shows {
    fn resolve(&self, _hints: &[&[u8]], _schemes: &[rustls::SignatureScheme]) -> Option<Arc<CertifiedKey>> {
        Some(self.0.clone())
    }

    fn has_certs(&self) -> bool {
        true
    }
}

/// Replaces a file atomically.
pub fn replace(path: &Path, content: &str) {
    let other = path.with_extension("new");
    std::fs::write(&other, content).expect("written");
    std::fs::rename(&other, path).expect("renamed");
}
