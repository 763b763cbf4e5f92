//! Fake [`ApiClient`] for tests: answers from a function, records calls, and plays watches.

use std::{
    sync::{Arc, Mutex, PoisonError},
    task::{Context, Poll},
};

use async_trait::async_trait;
use bytes::Bytes;
use serde_json::{Value, json};
use tokio::sync::mpsc;

use super::api::{ApiClient, ApiError, ApiStatus, Call, WatchStream};

type Answer = Box<dyn FnMut(&Call) -> Result<Value, ApiError> + Send>;
type Events = mpsc::UnboundedReceiver<Value>;

/// Fake client; a function answers its calls.
pub struct FakeApi {
    answer: Mutex<Answer>,
    calls: Mutex<Vec<Call>>,
    watches: Mutex<Vec<Result<Events, ApiError>>>,
    /// Number of calls and watches so far; changes with each.
    pub asked: tokio::sync::watch::Sender<usize>,
    /// Simulates a change of credentials when it is modified.
    pub credentials: tokio::sync::watch::Sender<u64>,
}

impl FakeApi {
    /// Returns a client whose calls `answer` answers.
    pub fn new(answer: impl FnMut(&Call) -> Result<Value, ApiError> + Send + 'static) -> Arc<Self> {
        Arc::new(Self {
            answer: Mutex::new(Box::new(answer)),
            calls: Mutex::default(),
            watches: Mutex::default(),
            asked: tokio::sync::watch::Sender::new(0),
            credentials: tokio::sync::watch::Sender::new(0),
        })
    }

    /// All calls and watches so far, in order.
    pub fn calls(&self) -> Vec<Call> {
        self.calls.lock().unwrap_or_else(PoisonError::into_inner).clone()
    }

    /// Prepares the next watch (after those prepared before): it yields the events sent to the returned channel, and
    /// ends when the sender is dropped.
    pub fn next_watch(&self) -> mpsc::UnboundedSender<Value> {
        let (send, events) = mpsc::unbounded_channel();
        self.watches.lock().unwrap_or_else(PoisonError::into_inner).push(Ok(events));
        send
    }

    /// Prepares a watch that fails to start.
    pub fn next_watch_fails(&self, error: ApiError) {
        self.watches.lock().unwrap_or_else(PoisonError::into_inner).push(Err(error));
    }

    fn keep(&self, call: &Call) {
        self.calls.lock().unwrap_or_else(PoisonError::into_inner).push(call.clone());
        self.asked.send_modify(|count| *count += 1);
    }
}

#[async_trait]
impl ApiClient for FakeApi {
    async fn call(&self, call: Call) -> Result<Bytes, ApiError> {
        self.keep(&call);
        let answer = {
            let mut answer = self.answer.lock().unwrap_or_else(PoisonError::into_inner);
            answer(&call)
        };
        // A timeout takes the whole deadline.
        if let Err(ApiError::Timeout(_)) = answer {
            tokio::time::sleep(call.deadline).await;
            return Err(ApiError::Timeout(call.deadline));
        }
        answer.map(|value| Bytes::from(value.to_string()))
    }

    fn credentials_changed(&self) -> tokio::sync::watch::Receiver<u64> {
        self.credentials.subscribe()
    }

    async fn watch(&self, call: Call) -> Result<Box<dyn WatchStream>, ApiError> {
        self.keep(&call);
        let mut watches = self.watches.lock().unwrap_or_else(PoisonError::into_inner);
        match (!watches.is_empty()).then(|| watches.remove(0)) {
            Some(Ok(events)) => Ok(Box::new(ScriptedWatch(events))),
            Some(Err(error)) => Err(error),
            None => Err(refused(503, "ServiceUnavailable", "no watch was prepared")),
        }
    }
}

struct ScriptedWatch(Events);

impl WatchStream for ScriptedWatch {
    fn poll_next(&mut self, context: &mut Context<'_>) -> Poll<Option<Result<Bytes, ApiError>>> {
        self.0.poll_recv(context).map(|event| event.map(|event| Ok(Bytes::from(event.to_string()))))
    }
}

/// Error with a status of the API.
pub fn refused(code: u16, reason: &str, message: &str) -> ApiError {
    let status = ApiStatus { code, reason: reason.to_owned(), message: message.to_owned(), ..ApiStatus::default() };
    ApiError::Refused(Box::new(status))
}

/// Watch event.
pub fn event(kind: &str, object: Value) -> Value {
    json!({"type": kind, "object": object})
}

/// Bookmark that ends the initial events.
pub fn marker(api_version: &str, kind: &str, version: &str) -> Value {
    event(
        "BOOKMARK",
        json!({"apiVersion": api_version, "kind": kind, "metadata": {
            "resourceVersion": version, "annotations": {"k8s.io/initial-events-end": "true"}}}),
    )
}
