//! Asks the API server for a certificate and waits for it (spec 10 §4.10).
//!
//! A request has a name that follows from its key, so what was asked for may be asked for again, and
//! whoever gave up waiting comes back to the same object.

use std::time::Duration;

use serde::Deserialize;
use serde_json::Value;
use tokio::time::sleep;
use tracing::{debug, info};

use super::{
    key::Key,
    progress::{Progress, Signing, SigningList},
    request::{self, Naming},
    template::Template,
};
use crate::api::{ApiClient, ApiError, Call, Line, Resource, Typed, Verb, parse};

/// Older servers know only this one.
const BEFORE: Resource =
    Resource::new("certificates.k8s.io", "v1beta1", "certificatesigningrequests", "CertificateSigningRequest");
/// How long one request may take.
const CALL: Duration = Duration::from_secs(30);
/// How long a watch is asked for, in seconds.
const WATCH_SECONDS: &str = "600";
/// Between two looks at the same object, and two attempts that came to nothing.
const PAUSE: Duration = Duration::from_secs(1);
/// Longest pause between attempts to ask while nobody answers.
const LONGEST: Duration = Duration::from_secs(30);

/// No certificate came of it.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum AskError {
    /// It could not be asked for.
    #[error("cannot create certificate signing request: {0}")]
    Create(ApiError),
    /// Somebody else's request has the name of ours.
    #[error("retrieved csr is not compatible: {0}")]
    Incompatible(String),
    /// There will be none.
    #[error("{0}")]
    Refused(String),
    /// The object is gone.
    #[error("csr {0:?} was deleted")]
    Deleted(String),
    /// The object is another.
    #[error("csr {0:?} changed UIDs")]
    ChangedUid(String),
    /// Nobody decided, or nobody signed.
    #[error("timed out waiting for the certificate signing request to be approved and signed")]
    TimedOut,
    /// Our own doing.
    #[error("{0}")]
    Own(String),
}

impl AskError {
    /// Whether another look at the same request could still bring a certificate.
    pub fn may_come_yet(&self) -> bool {
        match self {
            Self::TimedOut => true,
            Self::Create(error) => !error.is_invalid() && !matches!(error, ApiError::Malformed(_)),
            _ => false,
        }
    }
}

/// A request that was made: its key stays until there is a certificate or will never be one.
#[derive(Debug)]
pub struct Request {
    /// What is asked.
    pub template: Template,
    key: Key,
    text: String,
    naming: Naming,
    name: String,
    /// The object's API version and UID, once it is known to be there.
    made: Option<(Resource, String)>,
}

impl Request {
    /// For that key.
    ///
    /// # Errors
    /// The template has a name that cannot be written.
    pub fn new(template: Template, key: Key, naming: Naming) -> Result<Self, AskError> {
        let text = key.request(&template).map_err(|e| AskError::Own(e.to_string()))?;
        let name = request::name(naming, &key.public(), &template);
        Ok(Self { template, key, text, naming, name, made: None })
    }

    /// The key, PEM.
    pub fn key(&self) -> String {
        self.key.to_pem()
    }

    /// The object's name.
    pub fn name(&self) -> &str {
        &self.name
    }

    /// Makes the object, or finds it made. Whoever does not answer is asked again and again: the
    /// caller ends that. `now` is in seconds since the epoch.
    ///
    /// # Errors
    /// A server said no, or has another's request of that name.
    pub async fn make(&mut self, api: &dyn ApiClient, now: i64) -> Result<(), AskError> {
        if self.made.is_some() {
            return Ok(());
        }
        let (mut resource, mut pause) = (Resource::SIGNING_REQUESTS, PAUSE);
        let there = loop {
            match self.create(api, resource).await {
                Ok(there) => break there,
                Err(error) if error.code() == 404 && resource != BEFORE => resource = BEFORE,
                Err(error) if error.is_already_exists() => match self.existing(api, resource, now).await {
                    Err(AskError::Create(error)) if is_passing(&error) => sleep(PAUSE).await,
                    other => break other?,
                },
                Err(error) if is_passing(&error) => {
                    debug!(err = %error, name = self.name, "The signing request may not have arrived");
                    sleep(error.retry_after().unwrap_or(pause)).await;
                    pause = pause.saturating_mul(2).min(LONGEST);
                }
                Err(error) => return Err(AskError::Create(error)),
            }
        };
        info!(name = self.name, signer = self.template.purpose.signer(), "Asked for a certificate");
        self.made = Some((resource, there.metadata.uid));
        Ok(())
    }

    async fn create(&self, api: &dyn ApiClient, resource: Resource) -> Result<Signing, ApiError> {
        let object = request::object(&resource, self.naming, &self.name, &self.text, &self.template);
        api.ask(Call::create(resource, "", object.to_string()).on(Line::Certificates).within(CALL)).await
    }

    async fn existing(&self, api: &dyn ApiClient, resource: Resource, now: i64) -> Result<Signing, AskError> {
        let call = Call::get(resource, "", &self.name).on(Line::Certificates).within(CALL);
        let there: Signing = api.ask(call).await.map_err(AskError::Create)?;
        request::compatible(&there, &self.text, &self.template, now).map_err(AskError::Incompatible)?;
        Ok(there)
    }

    /// Waits until the object has a certificate (PEM chain) or never will; the caller sets the limit.
    ///
    /// # Errors
    /// There will be none.
    pub async fn wait(&self, api: &dyn ApiClient) -> Result<String, AskError> {
        let Some((resource, uid)) = &self.made else {
            return Err(AskError::Own("nothing was asked for".to_owned()));
        };
        let mut resource = *resource;
        loop {
            match self.look(api, resource).await {
                Ok(list) => {
                    let Some(there) = list.items.into_iter().find(|there| there.metadata.name == self.name) else {
                        return Err(AskError::Deleted(self.name.clone()));
                    };
                    if let Some(outcome) = self.judge(&there, uid) {
                        return outcome;
                    }
                    if let Some(outcome) = self.follow(api, resource, uid, &list.metadata.resource_version).await {
                        return outcome;
                    }
                }
                Err(error) => {
                    debug!(err = %error, name = self.name, "Cannot look at the signing request");
                    if error.code() == 404 {
                        resource = if resource == BEFORE { Resource::SIGNING_REQUESTS } else { BEFORE };
                    }
                }
            }
            sleep(PAUSE).await;
        }
    }

    async fn look(&self, api: &dyn ApiClient, resource: Resource) -> Result<SigningList, ApiError> {
        api.ask(self.select(Verb::List, resource)).await
    }

    /// Follows the object until it has come to something; `None` where the watch came to nothing.
    async fn follow(
        &self,
        api: &dyn ApiClient,
        resource: Resource,
        uid: &str,
        version: &str,
    ) -> Option<Result<String, AskError>> {
        let call = self.select(Verb::Watch, resource).query("watch", "true").query("resourceVersion", version);
        let call = call.query("timeoutSeconds", WATCH_SECONDS).query("allowWatchBookmarks", "true");
        let mut events = api.watch(call).await.ok()?;
        while let Some(Ok(event)) = events.next().await {
            let event: Event = parse(&event).ok()?;
            match event.kind.as_str() {
                "ADDED" | "MODIFIED" => {
                    let there: Signing = serde_json::from_value(event.object).ok()?;
                    if let Some(outcome) = self.judge(&there, uid) {
                        return Some(outcome);
                    }
                }
                "DELETED" => return Some(Err(AskError::Deleted(self.name.clone()))),
                "BOOKMARK" => {}
                _ => return None,
            }
        }
        None
    }

    fn select(&self, verb: Verb, resource: Resource) -> Call {
        let call = Call::new(verb, resource, "", "").on(Line::Certificates).within(CALL);
        call.query("fieldSelector", format!("metadata.name={}", self.name))
    }

    fn judge(&self, there: &Signing, uid: &str) -> Option<Result<String, AskError>> {
        if there.metadata.uid != uid {
            return Some(Err(AskError::ChangedUid(self.name.clone())));
        }
        match there.progress() {
            Progress::Waiting => None,
            Progress::Issued(pem) => Some(Ok(pem)),
            Progress::Refused(text) => Some(Err(AskError::Refused(text))),
        }
    }
}

#[derive(Deserialize)]
struct Event {
    #[serde(rename = "type")]
    kind: String,
    object: Value,
}

/// Whether asking again may help: nobody answered, or not now.
fn is_passing(error: &ApiError) -> bool {
    match error {
        ApiError::Unreachable(_) | ApiError::Lost(_) | ApiError::Timeout(_) => true,
        ApiError::Refused(_) => error.is_throttled(),
        ApiError::Malformed(_) => false,
    }
}

#[cfg(test)]
mod tests;
