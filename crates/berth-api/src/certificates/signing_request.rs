//! Certificate signing request client: creates the CSR and waits until it is issued.
//!
//! The name of the CSR is derived from its key, so creation is idempotent: a caller that gave up waiting returns to the
//! same object (spec 10 §4.10).

use std::time::Duration;

use serde::Deserialize;
use serde_json::Value;
use tokio::time::sleep;
use tracing::{debug, info};

use super::{
    key::PrivateKey,
    progress::{CsrObject, SigningList, SigningProgress},
    request::{self, NamingScheme},
    template::Template,
};
use crate::api::{ApiClient, ApiError, Call, RequestClass, Resource, TypedClient, Verb, parse};
use berth_sys::backoff::Backoff;

/// CSR resource of older servers, which serve only `v1beta1`.
const BEFORE: Resource =
    Resource::new("certificates.k8s.io", "v1beta1", "certificatesigningrequests", "CertificateSigningRequest");
/// Deadline of one API request.
const CALL: Duration = Duration::from_secs(30);
/// Requested duration of a watch, in seconds.
const WATCH_SECONDS: &str = "600";
/// Pause between polls of the same CSR, and first back-off after a failed creation.
const PAUSE: Duration = Duration::from_secs(1);
/// Longest back-off while the server does not answer.
const LONGEST: Duration = Duration::from_secs(30);

/// Why no certificate was issued.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum SigningRequestError {
    /// The CSR could not be created.
    #[error("cannot create certificate signing request: {0}")]
    Create(ApiError),
    /// A foreign CSR has the name of ours.
    #[error("retrieved csr is not compatible: {0}")]
    Incompatible(String),
    /// The CSR was denied or failed, or the issued certificate is unusable.
    #[error("{0}")]
    Refused(String),
    /// The CSR was deleted.
    #[error("csr {0:?} was deleted")]
    Deleted(String),
    /// The CSR was deleted and recreated under another UID.
    #[error("csr {0:?} changed UIDs")]
    ChangedUid(String),
    /// Nobody approved or signed the CSR before the timeout.
    #[error("timed out waiting for the certificate signing request to be approved and signed")]
    TimedOut,
    /// Local error.
    #[error("{0}")]
    Own(String),
}

impl SigningRequestError {
    /// Whether the same CSR may still yield a certificate.
    pub fn is_retryable(&self) -> bool {
        match self {
            Self::TimedOut => true,
            Self::Create(error) => !error.is_invalid() && !matches!(error, ApiError::Malformed(_)),
            _ => false,
        }
    }
}

/// Signing request with its private key, which is kept until a certificate is issued or can no longer be issued.
#[derive(Debug)]
pub struct SigningRequest {
    /// Subject, names, and usages requested.
    pub template: Template,
    key: PrivateKey,
    text: String,
    naming: NamingScheme,
    name: String,
    /// API version and UID of the CSR; `None` until it is known to exist.
    made: Option<(Resource, String)>,
}

impl SigningRequest {
    /// Builds the request for a key.
    ///
    /// # Errors
    /// The template has a name that cannot be encoded.
    pub fn new(template: Template, key: PrivateKey, naming: NamingScheme) -> Result<Self, SigningRequestError> {
        let text = key.request(&template).map_err(|e| SigningRequestError::Own(e.to_string()))?;
        let name = request::name(naming, &key.public(), &template);
        Ok(Self { template, key, text, naming, name, made: None })
    }

    /// Private key, PEM.
    pub fn key(&self) -> String {
        self.key.to_pem()
    }

    /// Name of the CSR object.
    pub fn name(&self) -> &str {
        &self.name
    }

    /// Creates the CSR, or adopts a compatible one. Retries without limit while the server does not answer; the caller
    /// sets the timeout. `now` is in seconds since the epoch.
    ///
    /// # Errors
    /// The server refused the CSR, or has an incompatible one of that name.
    pub async fn make(&mut self, api: &dyn ApiClient, now: i64) -> Result<(), SigningRequestError> {
        if self.made.is_some() {
            return Ok(());
        }
        let (mut resource, mut backoff) = (Resource::SIGNING_REQUESTS, Backoff::new(PAUSE, LONGEST));
        let there = loop {
            match self.create(api, resource).await {
                Ok(there) => break there,
                Err(error) if error.code() == 404 && resource != BEFORE => resource = BEFORE,
                Err(error) if error.is_already_exists() => match self.existing(api, resource, now).await {
                    Err(SigningRequestError::Create(error)) if is_passing(&error) => sleep(PAUSE).await,
                    other => break other?,
                },
                Err(error) if is_passing(&error) => {
                    debug!(err = %error, name = self.name, "Failed to create certificate signing request, retrying");
                    let pause = backoff.next_delay();
                    sleep(error.retry_after().unwrap_or(pause)).await;
                }
                Err(error) => return Err(SigningRequestError::Create(error)),
            }
        };
        info!(name = self.name, signer = self.template.purpose.signer(), "Created certificate signing request");
        self.made = Some((resource, there.metadata.uid));
        Ok(())
    }

    async fn create(&self, api: &dyn ApiClient, resource: Resource) -> Result<CsrObject, ApiError> {
        let object = request::object(&resource, self.naming, &self.name, &self.text, &self.template);
        api.ask(Call::create(resource, "", object.to_string()).on(RequestClass::Certificates).within(CALL)).await
    }

    async fn existing(
        &self,
        api: &dyn ApiClient,
        resource: Resource,
        now: i64,
    ) -> Result<CsrObject, SigningRequestError> {
        let call = Call::get(resource, "", &self.name).on(RequestClass::Certificates).within(CALL);
        let there: CsrObject = api.ask(call).await.map_err(SigningRequestError::Create)?;
        request::compatible(&there, &self.text, &self.template, now).map_err(SigningRequestError::Incompatible)?;
        Ok(there)
    }

    /// Waits until the CSR has a certificate (PEM chain) or can no longer get one; the caller sets the timeout.
    ///
    /// # Errors
    /// No certificate will be issued.
    pub async fn wait(&self, api: &dyn ApiClient) -> Result<String, SigningRequestError> {
        let Some((resource, uid)) = &self.made else {
            return Err(SigningRequestError::Own("no certificate signing request was created".to_owned()));
        };
        let mut resource = *resource;
        loop {
            match self.list(api, resource).await {
                Ok(list) => {
                    let Some(there) = list.items.into_iter().find(|there| there.metadata.name == self.name) else {
                        return Err(SigningRequestError::Deleted(self.name.clone()));
                    };
                    if let Some(outcome) = self.judge(&there, uid) {
                        return outcome;
                    }
                    if let Some(outcome) = self.follow(api, resource, uid, &list.metadata.resource_version).await {
                        return outcome;
                    }
                }
                Err(error) => {
                    debug!(err = %error, name = self.name, "Failed to get certificate signing request, retrying");
                    if error.code() == 404 {
                        resource = if resource == BEFORE { Resource::SIGNING_REQUESTS } else { BEFORE };
                    }
                }
            }
            sleep(PAUSE).await;
        }
    }

    async fn list(&self, api: &dyn ApiClient, resource: Resource) -> Result<SigningList, ApiError> {
        api.ask(self.select(Verb::List, resource)).await
    }

    /// Watches the CSR until it has an outcome; `None` if the watch ended without one.
    async fn follow(
        &self,
        api: &dyn ApiClient,
        resource: Resource,
        uid: &str,
        version: &str,
    ) -> Option<Result<String, SigningRequestError>> {
        let call = self.select(Verb::Watch, resource).query("watch", "true").query("resourceVersion", version);
        let call = call.query("timeoutSeconds", WATCH_SECONDS).query("allowWatchBookmarks", "true");
        let mut events = api.watch(call).await.ok()?;
        while let Some(Ok(event)) = events.next().await {
            let event: RawWatchEvent = parse(&event).ok()?;
            match event.kind.as_str() {
                "ADDED" | "MODIFIED" => {
                    let there: CsrObject = serde_json::from_value(event.object).ok()?;
                    if let Some(outcome) = self.judge(&there, uid) {
                        return Some(outcome);
                    }
                }
                "DELETED" => return Some(Err(SigningRequestError::Deleted(self.name.clone()))),
                "BOOKMARK" => {}
                _ => return None,
            }
        }
        None
    }

    fn select(&self, verb: Verb, resource: Resource) -> Call {
        let call = Call::new(verb, resource, "", "").on(RequestClass::Certificates).within(CALL);
        call.query("fieldSelector", format!("metadata.name={}", self.name))
    }

    fn judge(&self, there: &CsrObject, uid: &str) -> Option<Result<String, SigningRequestError>> {
        if there.metadata.uid != uid {
            return Some(Err(SigningRequestError::ChangedUid(self.name.clone())));
        }
        match there.progress() {
            SigningProgress::Waiting => None,
            SigningProgress::Issued(pem) => Some(Ok(pem)),
            SigningProgress::Refused(text) => Some(Err(SigningRequestError::Refused(text))),
        }
    }
}

#[derive(Deserialize)]
struct RawWatchEvent {
    #[serde(rename = "type")]
    kind: String,
    object: Value,
}

/// Whether a retry may succeed: the server did not answer, or throttled the request.
fn is_passing(error: &ApiError) -> bool {
    match error {
        ApiError::Unreachable(_) | ApiError::Lost(_) | ApiError::Timeout(_) => true,
        ApiError::Refused(_) => error.is_throttled(),
        ApiError::Malformed(_) => false,
    }
}

#[cfg(test)]
mod tests;
