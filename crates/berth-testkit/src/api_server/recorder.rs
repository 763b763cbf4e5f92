//! Request log of the test API server, and waiting for conditions on requests and objects.
//!
//! Implements spec 10a §10.

use std::{cell::RefCell, collections::VecDeque, fmt, ops::Deref, sync::Arc, time::Duration};

use http::{HeaderMap, Method};
use jiff::Timestamp;
use serde_json::Value;
use tokio::time::Instant;

use super::{ApiServer, ServerState, view::View};

/// Maximum number of recorded requests; the oldest are dropped.
const REMEMBERED: usize = 200_000;

/// Recorded request and its outcome.
#[derive(Clone, Debug)]
pub struct RecordedRequest {
    /// ID, from 1 in the order of arrival.
    pub id: u64,
    /// HTTP method.
    pub method: Method,
    /// Path and query.
    pub path: String,
    /// Request headers.
    pub headers: HeaderMap,
    /// Request body; null if it is not JSON.
    pub body: Value,
    /// Time of arrival on the server's clock.
    pub at: Timestamp,
    /// Time of arrival on tokio's clock.
    pub begun: Instant,
    /// End of the response; `None` while it lasts. For a watch, its last byte.
    pub ended: Option<Instant>,
    /// Number of the connection, from 1.
    pub connection: u64,
    /// Negotiated protocol: `h2` or `http/1.1`.
    pub alpn: &'static str,
    /// Serial number of the client certificate, hexadecimal; mostly empty.
    pub serial: String,
    /// Name of the authenticated user.
    pub user: String,
    /// Verb as in authorization; empty for non-resource paths.
    pub verb: &'static str,
    /// Resource name: `pods`, `leases.coordination.k8s.io`.
    pub resource: String,
    /// Subresource; empty for the object itself.
    pub subresource: String,
    /// Namespace; empty for cluster-scoped objects.
    pub namespace: String,
    /// Object name; for a list or watch, the name in its field selector.
    pub name: String,
    /// HTTP status of the response; `None` while there is none.
    pub code: Option<u16>,
    /// Resource version that the request committed, if any.
    pub rv: Option<u64>,
    /// Size of the response body, in bytes.
    pub bytes: usize,
    /// Number of events sent by a watch, bookmarks included.
    pub events: usize,
    /// Reason for the end of a watch: `deadline`, `shutdown`, `slow`, `fault`, `client`, …
    pub end: Option<&'static str>,
    /// Effect of a fault on the request, as text.
    pub fault: Option<String>,
}

impl RecordedRequest {
    /// The value of a header; empty if it is absent.
    pub fn header(&self, name: &str) -> &str {
        self.headers.get(name).and_then(|value| value.to_str().ok()).unwrap_or_default()
    }

    /// The `User-Agent` header.
    pub fn agent(&self) -> &str {
        self.header("user-agent")
    }

    /// A parameter of the query.
    pub fn query(&self, name: &str) -> Option<String> {
        let query = self.path.split_once('?').map_or("", |(_, query)| query);
        form_urlencoded::parse(query.as_bytes()).find(|(key, _)| key == name).map(|(_, value)| value.into_owned())
    }
}

impl fmt::Display for RecordedRequest {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let code = self.code.map_or_else(|| "-".to_owned(), |code| code.to_string());
        write!(
            f,
            "#{} {} c{} {} {} {} -> {code}",
            self.id, self.at, self.connection, self.user, self.method, self.path
        )?;
        if let Some(rv) = self.rv {
            write!(f, " rv {rv}")?;
        }
        if self.verb == "watch" {
            write!(f, " events {} end {}", self.events, self.end.unwrap_or("-"))?;
        }
        if let Some(fault) = &self.fault {
            write!(f, " fault {fault}")?;
        }
        if !self.body.is_null() {
            let body: String = self.body.to_string().chars().take(400).collect();
            write!(f, " {body}")?;
        }
        Ok(())
    }
}

/// Selection of recorded requests, in order of arrival.
#[derive(Clone, Debug, Default)]
pub struct Requests(Vec<Arc<RecordedRequest>>);

impl Deref for Requests {
    type Target = [Arc<RecordedRequest>];

    fn deref(&self) -> &Self::Target {
        &self.0
    }
}

impl Requests {
    /// The requests that `keep` accepts.
    pub fn filter(&self, keep: impl Fn(&RecordedRequest) -> bool) -> Self {
        Self(self.0.iter().filter(|logged| keep(logged)).cloned().collect())
    }

    /// The requests for this resource, subresources included.
    pub fn of(&self, resource: &str) -> Self {
        self.filter(|logged| logged.resource == resource)
    }

    /// The requests for this object.
    pub fn at(&self, resource: &str, namespace: &str, name: &str) -> Self {
        self.of(resource).filter(|logged| logged.namespace == namespace && logged.name == name)
    }

    /// The requests to this subresource.
    pub fn sub(&self, subresource: &str) -> Self {
        self.filter(|logged| logged.subresource == subresource)
    }

    /// The requests with this verb.
    pub fn verb(&self, verb: &str) -> Self {
        self.filter(|logged| logged.verb == verb)
    }

    /// The requests of this user.
    pub fn by(&self, user: &str) -> Self {
        self.filter(|logged| logged.user == user)
    }

    /// The requests with a greater ID.
    pub fn since(&self, id: u64) -> Self {
        self.filter(|logged| logged.id > id)
    }

    /// The verbs of the requests, in their order.
    pub fn verbs(&self) -> Vec<&'static str> {
        self.0.iter().map(|logged| logged.verb).collect()
    }

    /// Status codes of the responses; 0 if there is none.
    pub fn codes(&self) -> Vec<u16> {
        self.0.iter().map(|logged| logged.code.unwrap_or_default()).collect()
    }

    /// Number of distinct connections of the requests.
    pub fn connections(&self) -> usize {
        let mut ids: Vec<u64> = self.0.iter().map(|logged| logged.connection).collect();
        ids.sort_unstable();
        ids.dedup();
        ids.len()
    }
}

impl fmt::Display for Requests {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.iter().try_for_each(|logged| writeln!(f, "{logged}"))
    }
}

/// Bounded log of requests.
#[derive(Default)]
pub(super) struct Recorder {
    log: VecDeque<Arc<RecordedRequest>>,
    last: u64,
}

impl Recorder {
    /// Records a new request; returns its ID.
    pub fn begin(&mut self, mut logged: RecordedRequest) -> u64 {
        self.last += 1;
        logged.id = self.last;
        self.log.push_back(Arc::new(logged));
        if self.log.len() > REMEMBERED {
            self.log.pop_front();
        }
        self.last
    }

    pub fn change(&mut self, id: u64, change: impl FnOnce(&mut RecordedRequest)) {
        let first = self.log.front().map_or(0, |logged| logged.id);
        let at = id.checked_sub(first).and_then(|at| usize::try_from(at).ok());
        if let Some(logged) = at.and_then(|at| self.log.get_mut(at)) {
            change(Arc::make_mut(logged));
        }
    }

    pub fn get(&self, id: u64) -> Option<Arc<RecordedRequest>> {
        let first = self.log.front().map_or(0, |logged| logged.id);
        self.log.get(usize::try_from(id.checked_sub(first)?).ok()?).cloned()
    }

    pub fn all(&self) -> Requests {
        Requests(self.log.iter().cloned().collect())
    }

    pub fn last(&self) -> u64 {
        self.last
    }
}

/// State that a condition reads; records the objects it reads, for the failure message.
pub struct ConditionContext<'a> {
    shared: &'a ServerState,
    log: &'a Requests,
    reads: &'a RefCell<Vec<(String, String, String)>>,
}

impl ConditionContext<'_> {
    /// Reads an object from the store.
    pub fn object(&self, resource: &str, namespace: &str, name: &str) -> Option<Arc<Value>> {
        let place = (resource.to_owned(), namespace.to_owned(), name.to_owned());
        let mut reads = self.reads.borrow_mut();
        if !reads.contains(&place) {
            reads.push(place);
        }
        self.shared.core().get(resource, namespace, name)
    }

    /// All objects of a resource in the store.
    pub fn all(&self, resource: &str) -> Vec<Arc<Value>> {
        self.shared.core().list(resource)
    }

    /// All recorded requests.
    pub fn log(&self) -> &Requests {
        self.log
    }
}

impl ApiServer {
    /// The recorded requests for that path and query.
    pub fn requests(&self, path: &str) -> Vec<RecordedRequest> {
        self.log().filter(|logged| logged.path == path).iter().map(|logged| RecordedRequest::clone(logged)).collect()
    }

    /// All recorded requests.
    pub fn log(&self) -> Requests {
        self.shared.recorder().all()
    }

    /// ID of the last request, for [`Requests::since`].
    pub fn last(&self) -> u64 {
        self.shared.recorder().last()
    }

    /// Waits until `holds` returns true; evaluates it after each request, response, and commit.
    ///
    /// # Panics
    /// The deadline passed: the message contains the requests about the objects that were read, and the objects.
    pub async fn wait_until(&self, what: &str, deadline: Duration, holds: impl Fn(&ConditionContext<'_>) -> bool) {
        let end = Instant::now() + deadline;
        let mut changes = self.shared.changed.subscribe();
        loop {
            changes.mark_unchanged();
            let reads = RefCell::default();
            let log = self.log();
            if holds(&ConditionContext { shared: &self.shared, log: &log, reads: &reads }) {
                return;
            }
            if tokio::time::timeout_at(end, changes.changed()).await.is_err() {
                panic!(
                    "timed out after {deadline:?} waiting for: {what}\n{}",
                    self.failure_report(&log, &reads.into_inner())
                );
            }
        }
    }

    fn failure_report(&self, log: &Requests, reads: &[(String, String, String)]) -> String {
        let is_meant = |logged: &RecordedRequest| {
            let is_it = |(resource, namespace, name): &(String, String, String)| {
                logged.resource == *resource
                    && logged.namespace == *namespace
                    && [name.as_str(), ""].contains(&logged.name.as_str())
            };
            reads.is_empty() || reads.iter().any(is_it)
        };
        let meant = log.filter(is_meant);
        let tail = Requests(meant.0.iter().skip(meant.len().saturating_sub(60)).cloned().collect());
        let core = self.shared.core();
        let object = |(resource, namespace, name): &(String, String, String)| {
            let found = core.get(resource, namespace, name);
            format!("{resource} {namespace}/{name}: {}", found.map_or_else(|| "none".to_owned(), |o| o.to_string()))
        };
        let objects: Vec<String> = reads.iter().map(object).collect();
        format!("{} of {} requests:\n{tail}{}", tail.len(), log.len(), objects.join("\n"))
    }
}
