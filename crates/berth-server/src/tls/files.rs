//! The files: a certificate with its key, and the bundle of client authorities.

use std::{fs::File, io::Read, path::Path, sync::Arc, time::Duration};

use rustls::{
    Error, InconsistentKeys,
    pki_types::{CertificateDer, PrivateKeyDer, pem::PemObject},
    sign::CertifiedKey,
};
use tokio::sync::Semaphore;

use super::TlsSettings;

/// The largest file that is read, in bytes.
const LIMIT: u64 = 4 << 20;
/// Longest read; a file system that hangs must not stop the reloads.
const PATIENCE: Duration = Duration::from_secs(10);

/// A certificate (with its chain) and its key, as PEM.
#[derive(Clone, PartialEq, Eq)]
pub struct Pair {
    /// The certificate, leaf first.
    pub certificate: Vec<u8>,
    /// The key.
    pub key: Vec<u8>,
}

/// What the files said.
pub struct Texts {
    /// The serving pair; none where it has not come yet.
    pub serving: Option<Pair>,
    /// The client authorities, if any are configured.
    pub client_ca: Option<Vec<u8>>,
}

/// What reading came to.
pub struct Outcome {
    /// The serving pair; none where it may come later and is not there.
    pub serving: Result<Option<Pair>, String>,
    /// The client authorities, if any are configured.
    pub client_ca: Result<Option<Vec<u8>>, String>,
}

/// Reads all files, off the async threads and within a limit. `one` has a single permit: a read
/// that hangs is not joined by others, each of which would hold a thread.
pub async fn read(settings: &TlsSettings, one: &Arc<Semaphore>) -> Outcome {
    let failed = |cause: String| Outcome { serving: Err(cause.clone()), client_ca: Err(cause) };
    let Ok(permit) = one.clone().try_acquire_owned() else {
        return failed("an earlier read of the files has not come back".to_owned());
    };
    let settings = settings.clone();
    let reading = tokio::task::spawn_blocking(move || {
        let outcome =
            Outcome { serving: pair(&settings), client_ca: settings.client_ca_file.as_deref().map(file).transpose() };
        drop(permit);
        outcome
    });
    match tokio::time::timeout(PATIENCE, reading).await {
        Ok(Ok(outcome)) => outcome,
        _ => failed(format!("the files cannot be read within {PATIENCE:?}")),
    }
}

fn pair(settings: &TlsSettings) -> Result<Option<Pair>, String> {
    if settings.awaits_pair && !settings.cert_file.exists() {
        return Ok(None);
    }
    Ok(Some(Pair { certificate: file(&settings.cert_file)?, key: file(&settings.key_file)? }))
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

/// The key to serve with.
///
/// # Errors
/// What is wrong with the pair, in the reference's words where it has some.
pub fn certified_key(pair: &Pair) -> Result<CertifiedKey, String> {
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
