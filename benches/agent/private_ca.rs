//! Certificates of a private CA for the agent's main port, and an admin client.

use std::{path::PathBuf, sync::Arc};

use anyhow::{Result, ensure};
use berth::certificates::{Authority, CertificatePairPaths, Validity};
use jiff::Timestamp;
use rustls::{
    CipherSuite, ClientConfig, RootCertStore,
    client::Resumption,
    pki_types::{CertificateDer, PrivateKeyDer, ServerName, pem::PemObject},
};
use serde_json::{Value, json};
use tokio::{
    io::{AsyncRead, AsyncReadExt, AsyncWrite, AsyncWriteExt},
    net::TcpStream,
};
use tokio_rustls::{TlsConnector, client::TlsStream};

/// Certificates on disk.
pub struct Secure {
    dir: tempfile::TempDir,
}

impl Secure {
    /// Creates CA, serving, and admin certificates.
    pub fn new() -> Result<Self> {
        let dir = tempfile::tempdir()?;
        let valid = Validity::days(Timestamp::now(), 2);
        let authority = Authority::create("bench", valid)?;
        let serving = authority.serving("localhost", &["127.0.0.1".to_owned()], valid)?;
        CertificatePairPaths::of(dir.path(), "server").write(&serving)?;
        CertificatePairPaths::of(dir.path(), "admin").write(&authority.client(
            "admin",
            &["system:masters"],
            valid,
        )?)?;
        std::fs::write(dir.path().join("ca.crt"), &authority.own().certificate)?;
        Ok(Self { dir })
    }

    /// Path of the CA certificate.
    pub fn ca(&self) -> PathBuf {
        self.dir.path().join("ca.crt")
    }

    /// Kubelet configuration fields that use these certificates.
    pub fn fields(&self) -> Value {
        let server = CertificatePairPaths::of(self.dir.path(), "server");
        json!({
            "tlsCertFile": server.certificate,
            "tlsPrivateKeyFile": server.key,
            "authentication": {
                "anonymous": {"enabled": false}, "webhook": {"enabled": false}, "x509": {"clientCAFile": self.ca()},
            },
        })
    }

    /// Certificate and key of the admin client.
    pub fn admin(&self) -> CertificatePairPaths {
        CertificatePairPaths::of(self.dir.path(), "admin")
    }

    /// TLS configuration of the admin client; `resumes` enables session resumption.
    pub fn client(&self, resumes: bool) -> Result<Arc<ClientConfig>> {
        let admin = CertificatePairPaths::of(self.dir.path(), "admin");
        let mut roots = RootCertStore::empty();
        roots.add(CertificateDer::from_pem_file(self.ca())?)?;
        let chain = CertificateDer::pem_file_iter(&admin.certificate)?.collect::<Result<_, _>>()?;
        let key = PrivateKeyDer::from_pem_file(&admin.key)?;
        // The cipher suite that the API server prefers on such a machine.
        let mut provider = rustls::crypto::ring::default_provider();
        provider.cipher_suites.sort_by_key(|suite| suite.suite() != CipherSuite::TLS13_AES_128_GCM_SHA256);
        let mut config = ClientConfig::builder_with_provider(Arc::new(provider))
            .with_safe_default_protocol_versions()?
            .with_root_certificates(roots)
            .with_client_auth_cert(chain, key)?;
        config.resumption = if resumes { Resumption::in_memory_sessions(256) } else { Resumption::disabled() };
        Ok(Arc::new(config))
    }
}

/// Opens a TLS connection to an agent's main port.
pub async fn connect(port: u16, config: &Arc<ClientConfig>) -> Result<TlsStream<TcpStream>> {
    let tcp = TcpStream::connect(("127.0.0.1", port)).await?;
    tcp.set_nodelay(true)?;
    let name = ServerName::IpAddress(std::net::IpAddr::from([127, 0, 0, 1]).into());
    Ok(TlsConnector::from(config.clone()).connect(name, tcp).await?)
}

/// Sends a request head and reads the response head; returns the bytes behind it if the status is `status`.
pub async fn ask<T>(io: &mut T, head: &str, status: u16) -> Result<Vec<u8>>
where
    T: AsyncRead + AsyncWrite + Unpin,
{
    io.write_all(format!("{head}\r\nHost: node\r\n\r\n").as_bytes()).await?;
    io.flush().await?;
    let mut answer = Vec::with_capacity(4096);
    loop {
        let end = answer.windows(4).position(|four| four == b"\r\n\r\n");
        if let Some(end) = end {
            let text = String::from_utf8_lossy(&answer[..end]).into_owned();
            ensure!(text.starts_with(&format!("HTTP/1.1 {status}")), "{head}: {text}");
            return Ok(answer.split_off(end + 4));
        }
        ensure!(io.read_buf(&mut answer).await? > 0, "{head}: connection closed: {}", String::from_utf8_lossy(&answer));
    }
}
