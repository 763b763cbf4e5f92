//! State of the test API server: objects, rules, clock, and switches, behind one lock.
//!
//! Every request is atomic: it sees the state before or after another request, never between. Implements
//! spec 10a §1-3.

use std::{collections::HashMap, sync::Arc, time::Duration};

use jiff::{SignedDuration, Timestamp};
use serde_json::{Value, json};

use super::{
    clock::{Chance, Clock, text, uuid},
    conformance::TransitionChecker,
    lists::Pages,
    resources::{Kind, named},
    reviews::ScriptedReviews,
    rules::{self, Rules},
    selectors::check_fields,
    store::{Key, Store, key},
    verbs,
    view::{Caller, DelayedJob, Refusal, Reply, Request, View, Write},
};

/// Lifetime of events after their last write.
const EVENTS_LIVE: SignedDuration = SignedDuration::from_hours(1);

/// Server behavior that tests switch.
#[derive(Clone, Debug)]
pub struct Switches {
    /// Whether streaming lists (feature gate WatchList) are served; otherwise they are refused with 422.
    pub watch_list: bool,
    /// Whether watches that request bookmarks get them.
    pub bookmarks: bool,
    /// Delay of the bookmark that ends the initial events of a streaming list.
    pub marker_after: Duration,
    /// Interval of bookmarks.
    pub bookmark_every: Duration,
    /// Whether namespaces are created on first use.
    pub namespaces_on_use: bool,
    /// Age of the state that reads at resource version 0 show; `None` shows the current state.
    pub stale: Option<Duration>,
    /// Whether limited lists at resource version 0 are paged, as by a server without watch cache.
    pub pages_at_zero: bool,
    /// API groups, with or without version, that are not served: `certificates.k8s.io/v1beta1`.
    pub absent: Vec<String>,
    /// Number of bytes to add to the managedFields of written objects.
    pub padding: usize,
}

impl Default for Switches {
    fn default() -> Self {
        Self {
            watch_list: true,
            bookmarks: true,
            marker_after: Duration::ZERO,
            bookmark_every: Duration::from_secs(60),
            namespaces_on_use: true,
            stale: None,
            pages_at_zero: false,
            absent: Vec::new(),
            padding: 0,
        }
    }
}

/// Complete state of the server.
pub struct Core {
    /// The stored objects.
    pub store: Store,
    /// Authorization, validation, defaults, and controllers.
    pub rules: Rules,
    /// Behavior that tests switch on and off.
    pub switches: Switches,
    /// Scripted answers to reviews.
    pub reviews: ScriptedReviews,
    /// Clock of the server, which tests can adjust.
    pub clock: Arc<Clock>,
    pub(super) pages: Pages,
    pub(super) witness: TransitionChecker,
    chance: Chance,
    /// Time of the last write of each event.
    events: HashMap<Key, Timestamp>,
    purged: Timestamp,
}

/// Successful outcome of a request: HTTP status and object.
#[derive(Clone, Debug)]
pub struct Answer {
    /// HTTP status.
    pub code: u16,
    /// JSON body.
    pub body: Arc<Value>,
}

impl Answer {
    /// Creates an answer with this status and body.
    pub fn new(code: u16, body: impl Into<Arc<Value>>) -> Self {
        Self { code, body: body.into() }
    }
}

impl View for Core {
    fn get(&self, resource: &str, namespace: &str, name: &str) -> Option<Arc<Value>> {
        self.store.get(resource, &(namespace.to_owned(), name.to_owned())).cloned()
    }

    fn list(&self, resource: &str) -> Vec<Arc<Value>> {
        self.store.list(resource)
    }

    fn list_at(&self, resource: &str, at: Timestamp) -> Vec<Arc<Value>> {
        self.store.list_at(resource, self.store.rv_at(resource, at))
    }

    fn now(&self) -> Timestamp {
        self.clock.now()
    }

    fn random(&self) -> u64 {
        self.chance.next()
    }

    fn rules(&self) -> &Rules {
        &self.rules
    }
}

impl Core {
    /// Creates the state with the initial objects; `seed` determines its random numbers.
    pub fn new(rules: Rules, seed: u64) -> Self {
        let clock = Arc::new(Clock::default());
        let purged = clock.now();
        let mut core = Self {
            store: Store::new(),
            rules,
            switches: Switches::default(),
            reviews: ScriptedReviews::default(),
            clock,
            pages: Pages::default(),
            witness: TransitionChecker::default(),
            chance: Chance::new(seed),
            events: HashMap::new(),
            purged,
        };
        let first = rules::first_objects(&core);
        core.apply(first);
        core
    }

    /// Handles a request of an authenticated caller.
    ///
    /// # Errors
    /// The request is forbidden, its object is missing, or it is invalid.
    pub fn handle(&mut self, request: &mut Request, kind: &'static Kind) -> Result<Answer, Refusal> {
        self.admit(request, kind)?;
        if let Some(reply) = self.special(request) {
            let Reply { code, body, writes } = reply?;
            self.apply(writes);
            return Ok(Answer::new(code, body));
        }
        match request.verb {
            "get" => self.read(request),
            "list" => self.page(request, kind).map(|body| Answer::new(200, body)),
            "create" => verbs::create(self, request, kind),
            "update" => verbs::update(self, request, kind),
            "patch" => verbs::patch(self, request, kind),
            "delete" => verbs::delete(self, request, kind),
            "deletecollection" => verbs::delete_collection(self, request, kind),
            _ => Err(method_not_allowed()),
        }
    }

    /// Authorization, event expiry, and field selector check; precedes every request, watches included.
    pub(super) fn admit(&mut self, request: &Request, kind: &Kind) -> Result<(), Refusal> {
        rules::authorize(self, request)?;
        self.purge();
        check_fields(&request.fields, kind.fields)
    }

    fn special(&self, request: &Request) -> Option<Result<Reply, Refusal>> {
        let scripted =
            self.reviews.scripted_answer(request).map(|body| Ok(Reply { code: 201, body, writes: Vec::new() }));
        scripted.or_else(|| rules::special(self, request)).or_else(|| {
            let unanswered = request.verb == "create" && named(&request.resource).is_some_and(|kind| !kind.is_stored);
            unanswered.then(|| Ok(Reply { code: 201, body: ScriptedReviews::refused(request), writes: Vec::new() }))
        })
    }

    fn read(&self, request: &Request) -> Result<Answer, Refusal> {
        let key = (request.namespace.clone(), request.name.clone());
        let at = self.base(&request.resource, request.query("resourceVersion"));
        let is_past = at < self.store.rv();
        let found = if is_past {
            self.store.list_at(&request.resource, at).into_iter().find(|object| self::key(object) == key)
        } else {
            self.store.get(&request.resource, &key).cloned()
        };
        let missing = || Refusal::not_found(&request.resource, &request.name);
        found.map(|object| Answer::new(200, object)).ok_or_else(missing)
    }

    /// Resource version that a read shows: the latest, unless it asks for 0 and the switch `stale` is set.
    pub fn base(&self, resource: &str, asked: Option<&str>) -> u64 {
        let past = self.switches.stale.filter(|_| asked == Some("0"));
        let then = past.and_then(|by| SignedDuration::try_from(by).ok()).map(|by| self.now() - by);
        then.map_or(self.store.rv(), |then| self.store.rv_at(resource, then))
    }

    /// Commits the object unless nothing changed; returns the stored object.
    pub fn store(&mut self, resource: &str, old: Option<&Value>, new: Value) -> Arc<Value> {
        let key = key(&new);
        let now = self.now();
        if resource == "events" {
            self.events.insert(key.clone(), now);
        }
        if let (Some(old), Some(stored)) = (old, self.store.get(resource, &key))
            && is_same(old, &new)
        {
            return stored.clone();
        }
        self.store.commit(resource, &key, Some(new), now)
    }

    /// Removes an object; returns its last state.
    pub fn remove(&mut self, resource: &str, key: &Key) -> Arc<Value> {
        let now = self.now();
        self.store.commit(resource, key, None, now)
    }

    /// Commits writes of rules and tests, without authorization or validation.
    pub fn apply(&mut self, writes: Vec<Write>) {
        for write in writes {
            match write {
                Write::Put { resource, object } => self.put(&resource, object),
                Write::Remove { resource, namespace, name } => {
                    let key = (namespace, name);
                    if self.store.get(&resource, &key).is_some() {
                        self.remove(&resource, &key);
                    }
                }
            }
        }
    }

    fn put(&mut self, resource: &str, mut object: Value) {
        let old = self.store.get(resource, &key(&object)).cloned();
        let (uid, now) = (self.uid(), self.now());
        let metadata = &mut object["metadata"];
        match &old {
            Some(old) => {
                for field in ["uid", "creationTimestamp"] {
                    metadata[field] = old["metadata"][field].clone();
                }
            }
            None => {
                if metadata["uid"].is_null() {
                    metadata["uid"] = json!(uid);
                }
                if metadata["creationTimestamp"].is_null() {
                    metadata["creationTimestamp"] = json!(text(now));
                }
            }
        }
        self.store(resource, old.as_deref(), object);
    }

    /// Generates a UID.
    pub fn uid(&self) -> String {
        uuid(self.random(), self.random())
    }

    /// Controller jobs for the changes since the last call.
    pub fn controllers(&mut self) -> Vec<DelayedJob> {
        let changes = self.store.take_changes();
        changes.iter().for_each(|change| self.witness.check(change));
        changes.iter().flat_map(|change| rules::controllers(self, change)).collect()
    }

    /// Removes events that were not written for an hour; runs at most once a second.
    fn purge(&mut self) {
        let now = self.now();
        if now.duration_since(self.purged) < SignedDuration::from_secs(1) {
            return;
        }
        self.purged = now;
        let is_old = |at: &Timestamp| now.duration_since(*at) > EVENTS_LIVE;
        let old: Vec<Key> = self.events.iter().filter(|(_, at)| is_old(at)).map(|(key, _)| key.clone()).collect();
        for key in old {
            self.events.remove(&key);
            if self.store.get("events", &key).is_some() {
                self.remove("events", &key);
            }
        }
    }

    /// Records the writer in the object's managedFields.
    pub fn manage(&self, caller: &Caller, request: &Request, object: &mut Value) {
        let manager = caller.user_agent.split('/').next().unwrap_or_default();
        let mut entry = json!({"manager": manager, "operation": "Update", "apiVersion": request.api_version,
                               "time": text(self.now()), "fieldsType": "FieldsV1", "fieldsV1": {}});
        if self.switches.padding > 0 {
            entry["fieldsV1"] = json!({"f:padding": "x".repeat(self.switches.padding)});
        }
        if !request.subresource.is_empty() {
            entry["subresource"] = json!(request.subresource);
        }
        let is_his = |e: &Value| e["manager"] == entry["manager"] && e["subresource"] == entry["subresource"];
        let mut entries = object["metadata"]["managedFields"].as_array().cloned().unwrap_or_default();
        entries.retain(|e| !is_his(e));
        entries.push(entry);
        object["metadata"]["managedFields"] = entries.into();
    }
}

/// 405: the resource does not support the method.
pub fn method_not_allowed() -> Refusal {
    Refusal::new(405, "MethodNotAllowed", "the server does not allow this method on the requested resource")
}

/// Whether two objects are equal except for resourceVersion, managedFields, and null metadata fields.
pub fn is_same(old: &Value, new: &Value) -> bool {
    let (Some(old), Some(new)) = (old.as_object(), new.as_object()) else { return false };
    let bare = |value: &Value| {
        let mut metadata = value.clone();
        if let Some(fields) = metadata.as_object_mut() {
            fields.retain(|field, value| {
                !["managedFields", "resourceVersion"].contains(&field.as_str()) && !value.is_null()
            });
        }
        metadata
    };
    old.len() == new.len()
        && old.iter().all(|(field, value)| match (field.as_str(), new.get(field)) {
            ("metadata", Some(other)) => bare(value) == bare(other),
            (_, other) => other == Some(value),
        })
}
