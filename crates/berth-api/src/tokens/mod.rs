//! Service account token cache: requests tokens for pods and renews them in time.
//!
//! A token belongs to one pod, one audience, and one lifetime. It is renewed after four fifths of its lifetime, or
//! after a day; a token that cannot be renewed is used until it expires. A caller that writes tokens to files learns
//! from [`Tokens::due`] when to read again, and need not poll.
//!
//! Tokens from before the agent's start are in the pods' volumes: [`Tokens::adopt`] reuses them if their claims permit
//! it (`stored_token`), so that a restart requests only tokens that are due.
//!
//! Implements spec 07 §9.2, spec 10 §4.7.

mod stored_token;

use std::{
    collections::HashMap,
    sync::{Arc, Mutex, MutexGuard, PoisonError},
    time::Duration,
};

use jiff::Timestamp;
use serde::Deserialize;
use serde_json::json;
use tokio::{
    sync::Notify,
    time::{Instant, sleep},
};
use tracing::{debug, warn};

use super::{
    api::{ApiClient, ApiError, Call, Resource, TypedClient},
    reflector::QuickRetry,
};
use berth_ports::{Clock, ServiceAccount, TokenRequest};
use berth_types::{Pod, PodUid, api};
use stored_token::{ExpectedClaims, validate};

/// Deadline of one request.
const ASK_LIMIT: Duration = Duration::from_secs(10);
/// How long a first request is retried while the server fails.
const TROUBLE: Duration = Duration::from_secs(2);
/// Maximum age of a token before renewal, in seconds.
const DAY: i64 = 24 * 3600;
/// Jitter of renewals, in seconds (exclusive); at most a twentieth of the lifetime.
const SPREAD: i64 = 10;
/// First and longest back-off between failed renewals, in seconds.
const PAUSE: (i64, i64) = (1, 60);
/// Longest interval between reads of the wall clock, which may jump.
const RECHECK: Duration = Duration::from_secs(60);

/// Why there is no token.
#[derive(Clone, PartialEq, Eq, Debug, thiserror::Error)]
pub enum TokenError {
    /// The first request failed.
    #[error("failed to fetch token: {0}")]
    Fetch(String),
    /// The last token has expired, and its renewal failed.
    #[error("token {account} expired and refresh failed: {cause}")]
    Expired {
        /// Name of the service account.
        account: String,
        /// Cause of the failed renewal.
        cause: String,
    },
}

#[derive(Clone, PartialEq, Eq, Hash)]
struct TokenKey {
    pod: PodUid,
    account: String,
    audience: String,
    seconds: Option<i64>,
}

impl TokenKey {
    fn new(pod: &Pod, ask: &TokenRequest) -> Self {
        let account = pod.spec().service_account_name.clone().filter(|name| !name.is_empty());
        let account = account.unwrap_or_else(|| "default".to_owned());
        Self { pod: pod.uid().clone(), account, audience: ask.audience.clone(), seconds: ask.expiration_seconds }
    }
}

struct TokenEntry {
    token: Arc<str>,
    /// Expiry, in seconds of wall time like the fields below.
    expires: i64,
    /// When to renew; `None` for never.
    due: Option<i64>,
    /// When the pod is next notified that renewal is due.
    notify_at: Option<i64>,
    failures: u32,
}

/// Tokens of all pods.
pub struct Tokens {
    api: Arc<dyn ApiClient>,
    clock: Arc<dyn Clock>,
    entries: Mutex<HashMap<TokenKey, TokenEntry>>,
    /// Notified when the earliest notification time may have changed.
    changed: Notify,
}

#[derive(Deserialize)]
struct Answer {
    #[serde(default)]
    spec: AnswerSpec,
    status: AnswerStatus,
}

#[derive(Deserialize, Default)]
#[serde(rename_all = "camelCase")]
struct AnswerSpec {
    expiration_seconds: Option<i64>,
}

#[derive(Deserialize)]
#[serde(rename_all = "camelCase")]
struct AnswerStatus {
    token: String,
    expiration_timestamp: Timestamp,
}

impl Tokens {
    /// Returns an empty cache.
    pub fn new(api: Arc<dyn ApiClient>, clock: Arc<dyn Clock>) -> Self {
        Self { api, clock, entries: Mutex::default(), changed: Notify::new() }
    }

    /// Returns the pod's token; the cached one until renewal is due.
    ///
    /// # Errors
    /// There is no valid token, and the request for a new one failed.
    pub async fn token(&self, pod: &Pod, ask: &TokenRequest) -> Result<String, TokenError> {
        let key = TokenKey::new(pod, ask);
        let now = self.now();
        let known = self.locked().get(&key).map(|entry| (entry.token.clone(), entry.expires, entry.due));
        let usable = known.as_ref().filter(|(_, expires, _)| now <= *expires).map(|(token, ..)| token.clone());
        if let (Some(token), Some((.., due))) = (&usable, &known)
            && due.is_none_or(|at| now < at)
        {
            return Ok(token.to_string());
        }
        match self.fetch(pod, &key, usable.is_some()).await {
            Ok(answer) => Ok(self.keep(key, answer)),
            Err(error) => match (usable, known) {
                (Some(token), _) => {
                    self.note_failure(&key, &error);
                    Ok(token.to_string())
                }
                (None, Some(_)) => {
                    self.note_failure(&key, &error);
                    Err(TokenError::Expired { account: key.account, cause: cause(&error) })
                }
                (None, None) => Err(TokenError::Fetch(cause(&error))),
            },
        }
    }

    /// Reads a service account.
    ///
    /// # Errors
    /// It does not exist or cannot be read.
    pub async fn account(&self, namespace: &str, name: &str) -> Result<ServiceAccount, ApiError> {
        let call = Call::get(Resource::SERVICE_ACCOUNTS, namespace, name).within(ASK_LIMIT);
        let found: api::ServiceAccount = self.api.ask(call).await?;
        let (uid, annotations) = (found.metadata.uid, found.metadata.annotations);
        Ok(ServiceAccount { uid: uid.unwrap_or_default(), annotations: annotations.unwrap_or_default() })
    }

    /// Adopts a token from the pod's volume, unless a token is already cached or its claims make it unusable
    /// (spec 10 §11).
    pub fn adopt(&self, pod: &Pod, ask: &TokenRequest, token: &str) {
        let key = TokenKey::new(pod, ask);
        let TokenKey { account, audience, seconds, .. } = &key;
        let (namespace, pod) = (pod.namespace(), pod.uid().as_str());
        let life = match validate(
            token,
            &ExpectedClaims { namespace, account, pod, audience, seconds: *seconds },
            self.now(),
        ) {
            Ok(life) => life,
            Err(unfit) => {
                debug!(podUID = pod, serviceAccount = %account, err = %unfit, "Ignoring service account token on disk");
                return;
            }
        };
        let due = Some(renewal(life.expires, life.seconds, earlier(life.seconds)));
        let adopted = TokenEntry { token: Arc::from(token), expires: life.expires, due, notify_at: due, failures: 0 };
        self.locked().entry(key).or_insert(adopted);
        self.changed.notify_one();
    }

    /// Drops the tokens of a pod.
    pub fn forget(&self, pod: &PodUid) {
        self.locked().retain(|key, _| key.pod != *pod);
    }

    /// Waits until tokens are due, and returns their pods. Repeats a pod after a minute if its token was not renewed.
    /// Cancel-safe.
    pub async fn due(&self) -> Vec<PodUid> {
        loop {
            let changed = self.changed.notified();
            let now = self.now();
            let (mut pods, mut next) = (Vec::new(), None);
            for (key, entry) in &mut *self.locked() {
                if entry.notify_at.is_some_and(|at| at <= now) {
                    entry.notify_at = Some(now.saturating_add(PAUSE.1));
                    pods.push(key.pod.clone());
                }
                next = [next, entry.notify_at].into_iter().flatten().min();
            }
            if !pods.is_empty() {
                return pods;
            }
            let left = next.map(|at| u64::try_from(at.saturating_sub(now)).unwrap_or(0));
            tokio::select! {
                () = sleep_some(left) => {}
                () = changed => {}
            }
        }
    }

    fn now(&self) -> i64 {
        self.clock.now().as_second()
    }

    fn locked(&self) -> MutexGuard<'_, HashMap<TokenKey, TokenEntry>> {
        self.entries.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn keep(&self, key: TokenKey, answer: Answer) -> String {
        let expires = answer.status.expiration_timestamp.as_second();
        let seconds = answer.spec.expiration_seconds.or(key.seconds);
        let due = seconds.map(|seconds| renewal(expires, seconds, earlier(seconds)));
        let token = Arc::from(answer.status.token.as_str());
        self.locked().insert(key, TokenEntry { token, expires, due, notify_at: due, failures: 0 });
        self.changed.notify_one();
        answer.status.token
    }

    fn note_failure(&self, key: &TokenKey, error: &ApiError) {
        let now = self.now();
        let mut entries = self.locked();
        let Some(entry) = entries.get_mut(key) else { return };
        let pause = PAUSE.0.saturating_mul(2_i64.saturating_pow(entry.failures.min(10))).min(PAUSE.1);
        entry.failures = entry.failures.saturating_add(1);
        entry.due = Some(now.saturating_add(pause));
        entry.notify_at = entry.due;
        let (account, left) = (&key.account, entry.expires.saturating_sub(now));
        warn!(podUID = %key.pod, serviceAccount = %account, err = %error, secondsLeft = left, "Couldn't update token");
        drop(entries);
        self.changed.notify_one();
    }

    /// Requests a new token; retries only if no valid one is left.
    async fn fetch(&self, pod: &Pod, key: &TokenKey, has_old: bool) -> Result<Answer, ApiError> {
        let began = Instant::now();
        let (mut authorizer, mut trouble) = (QuickRetry::default(), QuickRetry::default());
        loop {
            let error = match self.api.ask::<Answer>(request(pod, key)).await {
                Ok(answer) => return Ok(answer),
                Err(error) if has_old => return Err(error),
                Err(error) => error,
            };
            let passed = began.elapsed();
            let pause = match error.code() {
                403 => authorizer.pause(passed),
                0 | 429 | 500.. => trouble.pause(passed).map(|p| p.max(error.retry_after().unwrap_or_default())),
                _ => None,
            };
            match pause {
                Some(pause) if error.is_forbidden() || passed + pause <= TROUBLE => sleep(pause).await,
                _ => return Err(error),
            }
        }
    }
}

async fn sleep_some(seconds: Option<u64>) {
    match seconds {
        Some(seconds) => sleep(Duration::from_secs(seconds).min(RECHECK)).await,
        None => std::future::pending().await,
    }
}

fn request(pod: &Pod, key: &TokenKey) -> Call {
    let audiences: Vec<&str> = Some(key.audience.as_str()).filter(|a| !a.is_empty()).into_iter().collect();
    let mut spec = json!({"audiences": audiences,
        "boundObjectRef": {"kind": "Pod", "apiVersion": "v1", "name": pod.name(), "uid": pod.uid().as_str()}});
    if let Some(seconds) = key.seconds {
        spec["expirationSeconds"] = seconds.into();
    }
    let object =
        json!({"apiVersion": "authentication.k8s.io/v1", "kind": "TokenRequest", "metadata": {}, "spec": spec});
    let mut call = Call::create(Resource::SERVICE_ACCOUNTS, pod.namespace(), object.to_string());
    call.name.clone_from(&key.account);
    call.sub("token").within(ASK_LIMIT)
}

/// Renewal time of a token in seconds of wall time: after a day, or with a fifth of its lifetime left.
fn renewal(expires: i64, lifetime: i64, earlier: i64) -> i64 {
    let day = expires.saturating_sub(lifetime).saturating_add(DAY);
    let last_fifth = expires.saturating_sub(lifetime.saturating_mul(20) / 100);
    day.min(last_fifth).saturating_sub(earlier)
}

/// Random number of seconds by which a renewal is advanced, so that renewals do not coincide.
fn earlier(lifetime: i64) -> i64 {
    rand::random_range(0..SPREAD.min(lifetime / 20).max(1))
}

/// Error text of a failed request. Distinguishes a server without the endpoint from a missing service account.
fn cause(error: &ApiError) -> String {
    let text = error.to_string();
    let no_path = text.contains("could not find the requested resource") || text.contains("page not found");
    if error.code() == 404 && no_path {
        return "the API server does not have TokenRequest endpoints enabled".to_owned();
    }
    text
}

#[cfg(test)]
mod tests;
