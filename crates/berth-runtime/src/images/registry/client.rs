//! HTTP client of a registry endpoint: trust anchors, client certificates, connect timeout.
//!
//! Blocking: reads certificates. Implements spec 09b §4.1.

use std::{fmt::Display, path::Path, sync::Arc, time::Duration};

use bytes::Bytes;
use http_body_util::Full;
use hyper_rustls::{HttpsConnector, HttpsConnectorBuilder};
use hyper_util::{
    client::legacy::{Client, connect::HttpConnector},
    rt::TokioExecutor,
};
use rustls::{
    ClientConfig, RootCertStore, SignatureScheme,
    client::{ResolvesClientCert, danger::ServerCertVerifier},
    crypto::CryptoProvider,
    pki_types::{CertificateDer, PrivateKeyDer, pem::PemObject},
    sign::CertifiedKey,
};

use super::hosts::{Endpoint, KeyPair};
use crate::images::error::ImageError;
use berth_sys::tls::{ServerVerifier, SignatureOnly, provider};

/// Default connect timeout.
const CONNECT: Duration = Duration::from_secs(10);
/// How long an idle connection is kept open.
const IDLE: Duration = Duration::from_secs(30);

/// HTTP client for a registry.
pub type HttpClient = Client<HttpsConnector<HttpConnector>, Full<Bytes>>;

/// Creates a client for an endpoint; does not connect.
///
/// # Errors
/// The CA certificates or client certificates cannot be read.
pub fn of(endpoint: &Endpoint) -> Result<HttpClient, ImageError> {
    let tls = tls(endpoint).map_err(|error| ImageError::bad_content(format!("set up TLS: {error}")))?;
    let mut http = HttpConnector::new();
    http.enforce_http(false);
    http.set_connect_timeout(Some(endpoint.dial_timeout.unwrap_or(CONNECT)));
    http.set_nodelay(true);
    let connector =
        HttpsConnectorBuilder::new().with_tls_config(tls).https_or_http().enable_http1().wrap_connector(http);
    Ok(Client::builder(TokioExecutor::new()).pool_idle_timeout(IDLE).build(connector))
}

fn tls(endpoint: &Endpoint) -> Result<ClientConfig, String> {
    let provider = Arc::new(provider());
    let builder = ClientConfig::builder_with_provider(Arc::clone(&provider));
    let builder = builder.with_safe_default_protocol_versions().map_err(|error| error.to_string())?;
    let verifier: Arc<dyn ServerCertVerifier> = if endpoint.skips_verification {
        Arc::new(SignatureOnly::of_servers(&provider))
    } else {
        let roots = RootCertStore { roots: webpki_roots::TLS_SERVER_ROOTS.to_vec() };
        let mut known = rustls_native_certs::load_native_certs().certs;
        for path in &endpoint.authorities {
            for certificate in certificates(path)? {
                RootCertStore::empty().add(certificate.clone()).map_err(|error| file_error(path, &error))?;
                known.push(certificate);
            }
        }
        Arc::new(ServerVerifier::new(roots, known).map_err(|error| error.to_string())?)
    };
    let builder = builder.dangerous().with_custom_certificate_verifier(verifier);
    if endpoint.pairs.is_empty() {
        return Ok(builder.with_no_client_auth());
    }
    let pairs = endpoint.pairs.iter().map(|pair| certified(pair, &provider)).collect::<Result<_, _>>()?;
    Ok(builder.with_client_cert_resolver(Arc::new(ClientCertificates(pairs))))
}

fn certificates(path: &Path) -> Result<Vec<CertificateDer<'static>>, String> {
    let read = CertificateDer::pem_file_iter(path).map_err(|error| file_error(path, &error))?;
    read.collect::<Result<_, _>>().map_err(|error| file_error(path, &error))
}

fn certified(pair: &KeyPair, provider: &CryptoProvider) -> Result<Arc<CertifiedKey>, String> {
    let chain = certificates(&pair.certificate)?;
    let key = PrivateKeyDer::from_pem_file(&pair.key).map_err(|error| file_error(&pair.key, &error))?;
    let key = CertifiedKey::from_der(chain, key, provider).map_err(|error| file_error(&pair.certificate, &error))?;
    Ok(Arc::new(key))
}

fn file_error(path: &Path, error: &dyn Display) -> String {
    format!("{}: {error}", path.display())
}

/// Client certificates for an endpoint.
#[derive(Debug)]
struct ClientCertificates(Vec<Arc<CertifiedKey>>);

impl ResolvesClientCert for ClientCertificates {
    /// The first certificate of an issuer that the server accepts; otherwise the first with a supported signature
    /// scheme.
    fn resolve(&self, issuers: &[&[u8]], schemes: &[SignatureScheme]) -> Option<Arc<CertifiedKey>> {
        let mut usable = self.0.iter().filter(|pair| pair.key.choose_scheme(schemes).is_some());
        let first = usable.clone().next();
        let wanted = usable.find(|pair| pair.cert.iter().any(|certificate| is_of(certificate, issuers)));
        wanted.or(first).cloned()
    }

    fn has_certs(&self) -> bool {
        true
    }
}

fn is_of(certificate: &CertificateDer<'_>, issuers: &[&[u8]]) -> bool {
    let parsed = x509_parser::parse_x509_certificate(certificate);
    parsed.is_ok_and(|(_, certificate)| issuers.contains(&certificate.issuer().as_raw()))
}
