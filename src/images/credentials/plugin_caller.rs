//! For whom a plugin is asked: nobody in particular, or a pod's service account with its token (spec 03b §2.3).

use std::collections::BTreeMap;

use sha2::{Digest, Sha256};

use super::{hash::hex, plugin_config::TokenAttributes};
use crate::images::record::AccountRecord;
use berth_ports::{ObjectError, ObjectSource, TokenAsk};
use berth_types::Pod;

/// How long a token for a plugin is to live, seconds: the API server's own default.
const LIFETIME: i64 = 3600;

/// For whom a plugin is asked.
#[derive(Clone, Default)]
pub struct Caller {
    /// The service account; none where nobody is named.
    pub account: Option<AccountRecord>,
    /// Its token; empty for none.
    pub token: String,
    /// Those of its annotations that the plugin wants.
    pub annotations: BTreeMap<String, String>,
    /// Tells answers for it from those for others; empty for nobody.
    pub key: String,
    /// Tells questions for it from those for others.
    pub flight: String,
    /// Whether an answer may have the token for a password.
    pub may_echo: bool,
}

impl Caller {
    /// The pod's account, as far as the plugin wishes; `None` where the plugin is not for it: an annotation is missing.
    ///
    /// # Errors
    /// The account or its token cannot be had.
    pub async fn of(
        wish: &TokenAttributes,
        pod: &Pod,
        account: &str,
        objects: &dyn ObjectSource,
    ) -> Result<Option<Self>, ObjectError> {
        let found = objects.service_account(pod.namespace(), account).await?;
        let Some(annotations) = wish.chosen(&found.annotations) else { return Ok(None) };
        let ask = TokenAsk { audience: wish.audience().to_owned(), expiration_seconds: Some(LIFETIME) };
        let token = objects.token(pod, &ask).await?;
        let record = AccountRecord { uid: found.uid, namespace: pod.namespace().to_owned(), name: account.to_owned() };
        let of_token = hex(&Sha256::digest(&token));
        let cached_by = if wish.is_cached_by_token() { of_token.as_str() } else { "" };
        let key = digest(&[&record.namespace, &record.name, &record.uid, cached_by], &annotations);
        let flight = digest(&[&of_token], &annotations);
        let may_echo = wish.is_cached_by_token();
        Ok(Some(Self { account: Some(record), token, annotations, key, flight, may_echo }))
    }
}

/// One text for several; each with its length, so that none is taken for another.
fn digest(texts: &[&str], annotations: &BTreeMap<String, String>) -> String {
    let mut hasher = Sha256::new();
    let pairs = annotations.iter().flat_map(|(key, value)| [key.as_str(), value.as_str()]);
    for text in texts.iter().copied().chain(pairs) {
        hasher.update(u64::try_from(text.len()).unwrap_or(u64::MAX).to_be_bytes());
        hasher.update(text);
    }
    hex(&hasher.finalize())
}
