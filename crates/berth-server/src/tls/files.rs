//! Reads the TLS files: serving certificate and key, and client CA bundle.

use std::{fs::File, io::Read, path::Path, time::Duration};

use rustls::{
    Error, InconsistentKeys,
    pki_types::{CertificateDer, PrivateKeyDer, pem::PemObject},
    sign::CertifiedKey,
};
use tokio::time::timeout;

use super::TlsSettings;
use berth_sys::blocking_pool::{BlockingError, BlockingPool};

/// Maximum file size, in bytes.
const LIMIT: u64 = 4 << 20;
/// Timeout of a read; a hung file system must not stop reloads.
const PATIENCE: Duration = Duration::from_secs(10);

/// Certificate chain and private key, PEM.
#[derive(Clone, PartialEq, Eq)]
pub struct ServingPair {
    /// Certificate chain, leaf first.
    pub certificate: Vec<u8>,
    /// Private key.
    pub key: Vec<u8>,
}

/// Contents of the files in use.
pub struct LoadedFiles {
    /// Serving pair; `None` until it exists.
    pub serving: Option<ServingPair>,
    /// Client CA bundle, if configured.
    pub client_ca: Option<Vec<u8>>,
}

/// Contents of the files, each with an error text of its own.
pub struct FileReadResult {
    /// Serving pair; `None` if it may appear later and does not exist yet.
    pub serving: Result<Option<ServingPair>, String>,
    /// Client CA bundle, if configured.
    pub client_ca: Result<Option<Vec<u8>>, String>,
}

/// Reads all files on a blocking thread with a timeout. `pool` has a single thread, which a hung read keeps.
pub async fn read(settings: &TlsSettings, pool: &BlockingPool) -> FileReadResult {
    let failed = |cause: String| FileReadResult { serving: Err(cause.clone()), client_ca: Err(cause) };
    let settings = settings.clone();
    let reading = pool.run(Duration::ZERO, move || FileReadResult {
        serving: pair(&settings),
        client_ca: settings.client_ca_file.as_deref().map(file).transpose(),
    });
    match timeout(PATIENCE, reading).await {
        Ok(Ok(outcome)) => outcome,
        Ok(Err(BlockingError::PoolExhausted(_))) => {
            failed("a previous read of the files is still in progress".to_owned())
        }
        _ => failed(format!("timed out reading the files after {PATIENCE:?}")),
    }
}

fn pair(settings: &TlsSettings) -> Result<Option<ServingPair>, String> {
    if settings.awaits_pair && !settings.cert_file.exists() {
        return Ok(None);
    }
    Ok(Some(ServingPair { certificate: file(&settings.cert_file)?, key: file(&settings.key_file)? }))
}

fn file(path: &Path) -> Result<Vec<u8>, String> {
    let failed = |e: std::io::Error| format!("open {}: {e}", path.display());
    let mut content = Vec::new();
    File::open(path).and_then(|file| file.take(LIMIT + 1).read_to_end(&mut content)).map_err(failed)?;
    if u64::try_from(content.len()).unwrap_or(u64::MAX) > LIMIT {
        return Err(format!("{} is larger than {LIMIT} bytes", path.display()));
    }
    Ok(content)
}

/// Parses the pair for serving.
///
/// # Errors
/// The pair is unusable; the cause is in kubelet's words if kubelet has a text for it.
pub fn certified_key(pair: &ServingPair) -> Result<CertifiedKey, String> {
    let chain: Result<Vec<CertificateDer<'static>>, _> = CertificateDer::pem_slice_iter(&pair.certificate).collect();
    let chain = chain.map_err(|e| format!("tls: failed to parse the certificate: {e}"))?;
    if chain.is_empty() {
        return Err("tls: failed to find any PEM data in certificate input".to_owned());
    }
    let key = PrivateKeyDer::from_pem_slice(&pair.key)
        .map_err(|_| "tls: failed to find any PEM data in key input".to_owned())?;
    CertifiedKey::from_der(chain, key, &rustls::crypto::ring::default_provider()).map_err(|error| match error {
        Error::InconsistentKeys(InconsistentKeys::KeyMismatch) => {
            "tls: private key does not match public key".to_owned()
        }
        error => format!("tls: {error}"),
    })
}
