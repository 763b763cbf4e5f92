//! Proxy tunnel to the server: HTTP `CONNECT`, in cleartext or within TLS, or SOCKS 5 (spec 01 §10.1).
//!
//! The proxy resolves the server's name, as in client-go: the node may not be able to. It is verified by the same
//! authorities as the server, and receives no client certificate.

use std::sync::Arc;

use base64::{Engine, engine::general_purpose::STANDARD};
use rustls::{ClientConfig, pki_types::ServerName};
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio_rustls::TlsConnector;
use tokio_socks::tcp::Socks5Stream;

use super::{
    connection::chain,
    dialer::{ByteStream, race},
    proxy::{Proxy, ProxyKind},
    trust::ServerTrust,
};
use berth_sys::tls::{Verifier, provider};

/// Largest response head of a proxy, in bytes.
const PROXY_HEAD: usize = 8 << 10;

/// Proxy and its TLS configuration.
pub struct Tunnel {
    proxy: Proxy,
    /// TLS to the proxy; `None` unless it is an HTTPS proxy.
    tls: Option<(Arc<ClientConfig>, ServerName<'static>)>,
}

impl Tunnel {
    /// Returns a tunnel through a proxy; `trust` verifies its certificate.
    ///
    /// # Errors
    /// Its host name is not valid in a certificate, or TLS cannot be configured.
    pub fn new(proxy: Proxy, trust: Arc<ServerTrust>) -> Result<Self, String> {
        let tls = match proxy.kind {
            ProxyKind::Https => {
                let provider = Arc::new(provider());
                let verifier = Verifier::with(trust, &provider);
                let mut config = ClientConfig::builder_with_provider(provider)
                    .with_safe_default_protocol_versions()
                    .map_err(|e| e.to_string())?
                    .dangerous()
                    .with_custom_certificate_verifier(Arc::new(verifier))
                    .with_no_client_auth();
                config.alpn_protocols = vec![b"http/1.1".to_vec()];
                let name = ServerName::try_from(bare(&proxy.host).to_owned()).map_err(|e| e.to_string())?;
                Some((Arc::new(config), name))
            }
            ProxyKind::Http | ProxyKind::Socks5 => None,
        };
        Ok(Self { proxy, tls })
    }

    /// Connects to a server through the proxy.
    ///
    /// # Errors
    /// Human-readable cause.
    pub async fn http_connect(&self, host: &str, port: u16) -> Result<Box<dyn ByteStream>, String> {
        let stream = race(&self.proxy.host, self.proxy.port).await?;
        match (self.proxy.kind, &self.tls) {
            (ProxyKind::Socks5, _) => self.socks(stream, host, port).await,
            (_, None) => self.connect(stream, host, port).await,
            (_, Some((config, name))) => {
                let shaking = TlsConnector::from(config.clone()).connect(name.clone(), stream);
                let stream = shaking.await.map_err(|e| format!("proxyconnect tcp: tls: {}", chain(&e)))?;
                self.connect(stream, host, port).await
            }
        }
    }

    async fn socks(
        &self,
        stream: impl ByteStream + 'static,
        host: &str,
        port: u16,
    ) -> Result<Box<dyn ByteStream>, String> {
        let target = (bare(host), port);
        let connected = match &self.proxy.credentials {
            None => Socks5Stream::connect_with_socket(stream, target).await,
            Some((user, password)) => {
                Socks5Stream::connect_with_password_and_socket(stream, target, user, password).await
            }
        };
        let stream =
            connected.map_err(|e| format!("socks connect tcp {}:{}: {e}", self.proxy.host, self.proxy.port))?;
        Ok(Box::new(stream.into_inner()))
    }

    async fn connect(
        &self,
        mut stream: impl ByteStream + 'static,
        host: &str,
        port: u16,
    ) -> Result<Box<dyn ByteStream>, String> {
        let failed = |e: std::io::Error| format!("proxyconnect tcp: {e}");
        let mut request = format!("CONNECT {host}:{port} HTTP/1.1\r\nHost: {host}:{port}\r\n");
        if let Some((user, password)) = &self.proxy.credentials {
            let encoded = STANDARD.encode(format!("{user}:{password}"));
            request.push_str(&format!("Proxy-Authorization: Basic {encoded}\r\n"));
        }
        request.push_str("\r\n");
        stream.write_all(request.as_bytes()).await.map_err(failed)?;
        stream.flush().await.map_err(failed)?;
        let mut head = Vec::new();
        // Byte by byte: the bytes after the head belong to the server.
        while !head.ends_with(b"\r\n\r\n") {
            if head.len() >= PROXY_HEAD {
                return Err("proxyconnect tcp: response of the proxy is too long".to_owned());
            }
            head.push(stream.read_u8().await.map_err(failed)?);
        }
        let head = String::from_utf8_lossy(&head);
        let status = head.lines().next().unwrap_or_default();
        match status.split(' ').nth(1) {
            Some("200") => Ok(Box::new(stream)),
            _ => Err(format!("proxyconnect tcp: unexpected response from the proxy: {status:?}")),
        }
    }
}

/// Strips the brackets that an IPv6 address has in URLs.
fn bare(host: &str) -> &str {
    host.trim_start_matches('[').trim_end_matches(']')
}
