//! `Authorization` header of requests: static token, token file, basic auth, or exec plugin.
//!
//! Used without a client certificate (spec 01 §10.1). Sent only to servers behind TLS.

use std::{
    path::PathBuf,
    sync::{Mutex, PoisonError},
    time::Duration,
};

use base64::{Engine, engine::general_purpose::STANDARD};
use http::HeaderValue;
use tokio::time::{Instant, timeout};
use tracing::warn;

use super::{exec_plugin::ExecPlugin, kubeconfig::read_limited};

/// How long a token that was read is cached: a minute, minus a margin of ten seconds.
const GOOD: Duration = Duration::from_secs(50);
/// Timeout of a token read.
const PATIENCE: Duration = Duration::from_secs(5);

/// Source of the `Authorization` header.
pub enum CredentialSource {
    /// No header.
    None,
    /// Constant header.
    Fixed(HeaderValue),
    /// Token in a file.
    File(TokenFile),
    /// Exec plugin.
    Exec(Box<ExecPlugin>),
}

impl CredentialSource {
    /// Uses a static token.
    ///
    /// # Errors
    /// The token contains characters that a header cannot have.
    pub fn token(token: &str) -> Result<Self, String> {
        bearer(token).map(Self::Fixed)
    }

    /// Uses user name and password.
    ///
    /// # Errors
    /// None in practice: base64 is valid in a header.
    pub fn basic(user: &str, password: &str) -> Result<Self, String> {
        let encoded = STANDARD.encode(format!("{user}:{password}"));
        secret(&format!("Basic {encoded}")).map(Self::Fixed)
    }

    /// Header for the next request; `None` if there are no credentials for a header.
    ///
    /// # Errors
    /// The token file or the exec plugin provides no credentials.
    pub async fn header(&self) -> Result<Option<HeaderValue>, String> {
        match self {
            Self::None => Ok(None),
            Self::Fixed(header) => Ok(Some(header.clone())),
            Self::File(file) => file.header().await.map(Some),
            Self::Exec(plugin) => plugin.header().await,
        }
    }

    /// Invalidates cached credentials after the server rejected them.
    pub fn refused(&self) {
        match self {
            Self::None | Self::Fixed(_) => {}
            Self::File(file) => file.forget(),
            Self::Exec(plugin) => plugin.forget(),
        }
    }
}

/// Token file that another process renews.
pub struct TokenFile {
    path: PathBuf,
    known: Mutex<Option<(HeaderValue, Instant)>>,
}

impl TokenFile {
    /// Reads from that file; `first` is used while it cannot be read.
    pub fn new(path: PathBuf, first: Option<HeaderValue>) -> Self {
        // Due at once: the file has precedence.
        let known = first.map(|header| (header, Instant::now()));
        Self { path, known: Mutex::new(known) }
    }

    async fn header(&self) -> Result<HeaderValue, String> {
        let known = self.known.lock().unwrap_or_else(PoisonError::into_inner).clone();
        if let Some((header, due)) = &known
            && Instant::now() < *due
        {
            return Ok(header.clone());
        }
        match (self.read().await, known) {
            (Ok(header), _) => {
                let fresh = (header.clone(), Instant::now() + GOOD);
                *self.known.lock().unwrap_or_else(PoisonError::into_inner) = Some(fresh);
                Ok(header)
            }
            (Err(cause), Some((header, _))) => {
                warn!(path = %self.path.display(), err = %cause, "Failed to read token, using the previous one");
                Ok(header)
            }
            (Err(cause), None) => Err(format!("failed to read token file {:?}: {cause}", self.path.display())),
        }
    }

    async fn read(&self) -> Result<HeaderValue, String> {
        let path = self.path.clone();
        let reading = tokio::task::spawn_blocking(move || read_limited(&path));
        let late = |_| format!("timed out after {PATIENCE:?}");
        let text = timeout(PATIENCE, reading).await.map_err(late)?.map_err(|e| e.to_string())?;
        let text = String::from_utf8(text.map_err(|e| e.to_string())?).map_err(|e| e.to_string())?;
        match text.trim() {
            "" => Err("read empty token".to_owned()),
            token => bearer(token),
        }
    }

    fn forget(&self) {
        if let Some((_, due)) = self.known.lock().unwrap_or_else(PoisonError::into_inner).as_mut() {
            *due = Instant::now();
        }
    }
}

/// Bearer token header.
///
/// # Errors
/// The token contains characters that a header cannot have.
pub fn bearer(token: &str) -> Result<HeaderValue, String> {
    secret(&format!("Bearer {token}"))
}

fn secret(text: &str) -> Result<HeaderValue, String> {
    let mut header = HeaderValue::from_str(text)
        .map_err(|_| "the token contains characters that are not allowed in an HTTP header".to_owned())?;
    header.set_sensitive(true);
    Ok(header)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn a_token_file_is_followed() {
        tokio::time::pause();
        let folder = tempfile::tempdir().expect("a folder");
        let path = folder.path().join("token");
        let credentials = CredentialSource::File(TokenFile::new(path.clone(), None));
        let header_text =
            || async { credentials.header().await.expect("a header").expect("one").to_str().expect("text").to_owned() };
        assert!(credentials.header().await.expect_err("missing").contains("failed to read token file"));
        std::fs::write(&path, "one\n").expect("written");
        assert_eq!(header_text().await, "Bearer one");
        std::fs::write(&path, "two\n").expect("written");
        assert_eq!(header_text().await, "Bearer one", "it is known for 50 s");
        tokio::time::advance(GOOD).await;
        assert_eq!(header_text().await, "Bearer two");
        std::fs::write(&path, " \n").expect("written");
        credentials.refused();
        assert_eq!(header_text().await, "Bearer two", "the last one that could be read");
    }

    #[tokio::test]
    async fn basic_credentials_are_sensitive() {
        let basic = CredentialSource::basic("u", "p").expect("a header").header().await.expect("said").expect("one");
        assert_eq!((basic.to_str().expect("text"), basic.is_sensitive()), ("Basic dTpw", true));
        assert!(CredentialSource::token("a\nb").is_err());
    }
}
