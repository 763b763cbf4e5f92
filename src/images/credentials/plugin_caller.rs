//! Identity for credential plugin requests: none, or the pod's service account (spec 03b §2.3).

use std::collections::BTreeMap;

use sha2::{Digest, Sha256};

use super::plugin_config::TokenAttributes;
use crate::images::record_documents::AccountRecord;
use berth_ports::{ObjectError, ObjectSource, TokenRequest};
use berth_types::Pod;

/// Requested lifetime of a plugin's token in seconds: the API server's default.
const LIFETIME: i64 = 3600;

/// Identity that a plugin is called with.
#[derive(Clone, Default)]
pub struct Caller {
    /// The service account; `None` for a call without identity.
    pub account: Option<AccountRecord>,
    /// Token of the service account; empty for none.
    pub token: String,
    /// Annotations of the service account that the plugin requests.
    pub annotations: BTreeMap<String, String>,
    /// Cache key of the identity; empty for a call without identity.
    pub key: String,
    /// Single-flight key of the identity.
    pub flight: String,
    /// Whether a response may contain the token as a password.
    pub may_echo: bool,
}

impl Caller {
    /// The pod's service account as requested by the plugin; `None` if a required annotation is missing
    /// and the plugin does not apply.
    ///
    /// # Errors
    /// The service account or its token cannot be fetched.
    pub async fn of(
        attributes: &TokenAttributes,
        pod: &Pod,
        account: &str,
        objects: &dyn ObjectSource,
    ) -> Result<Option<Self>, ObjectError> {
        let found = objects.service_account(pod.namespace(), account).await?;
        let Some(annotations) = attributes.chosen(&found.annotations) else { return Ok(None) };
        let ask = TokenRequest { audience: attributes.audience().to_owned(), expiration_seconds: Some(LIFETIME) };
        let token = objects.token(pod, &ask).await?;
        let record = AccountRecord { uid: found.uid, namespace: pod.namespace().to_owned(), name: account.to_owned() };
        let of_token = hex::encode(Sha256::digest(&token));
        let cached_by = if attributes.is_cached_by_token() { of_token.as_str() } else { "" };
        let key = digest(&[&record.namespace, &record.name, &record.uid, cached_by], &annotations);
        let flight = digest(&[&of_token], &annotations);
        let may_echo = attributes.is_cached_by_token();
        Ok(Some(Self { account: Some(record), token, annotations, key, flight, may_echo }))
    }
}

/// Hashes several texts; each is length-prefixed so that different lists never collide.
fn digest(texts: &[&str], annotations: &BTreeMap<String, String>) -> String {
    let mut hasher = Sha256::new();
    let pairs = annotations.iter().flat_map(|(key, value)| [key.as_str(), value.as_str()]);
    for text in texts.iter().copied().chain(pairs) {
        hasher.update(u64::try_from(text.len()).unwrap_or(u64::MAX).to_be_bytes());
        hasher.update(text);
    }
    hex::encode(hasher.finalize())
}
