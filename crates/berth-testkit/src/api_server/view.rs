//! Interface between the test API server's core and its rules: `View`, requests, replies, and writes.
//!
//! The core is storage, verbs, watches, and wire; the rules are authorization, validation, and controllers. Rules
//! read the store through [`View`] and never change it themselves.

use std::{collections::BTreeMap, sync::Arc, time::Duration};

use jiff::Timestamp;
use serde_json::Value;

use super::rules::{Job, Rules};
pub use super::{
    refusal::{Cause, Refusal},
    selectors::{Op, Requirement},
};

/// Read access of the rules to the server's state. Resources are named `pods` or `leases.coordination.k8s.io`; the
/// namespace of a cluster-scoped object is empty. Objects are complete: kind, apiVersion, metadata.
pub trait View {
    /// Reads one object.
    fn get(&self, resource: &str, namespace: &str, name: &str) -> Option<Arc<Value>>;

    /// All objects of a resource, sorted by namespace and name.
    fn list(&self, resource: &str) -> Vec<Arc<Value>>;

    /// All objects of a resource as of `at`, as far back as the event ring reaches: simulates the lag of the
    /// authorizer's graph.
    fn list_at(&self, resource: &str, at: Timestamp) -> Vec<Arc<Value>>;

    /// Current time of the server's injected clock.
    fn now(&self) -> Timestamp;

    /// The next random number of the server's seed.
    fn random(&self) -> u64;

    /// Settings and keys of the rules.
    fn rules(&self) -> &Rules;
}

/// Authenticated caller of a request.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Caller {
    /// User name: `system:node:n1`.
    pub name: String,
    /// User UID; mostly empty.
    pub uid: String,
    /// Groups, `system:authenticated` included.
    pub groups: Vec<String>,
    /// Extra attributes: bound pod and node of a token.
    pub extra: BTreeMap<String, Vec<String>>,
    /// `User-Agent` header; the part before the first `/` is the field manager.
    pub user_agent: String,
}

impl Caller {
    /// Whether the caller is a member of that group.
    pub fn is_in(&self, group: &str) -> bool {
        self.groups.iter().any(|g| g == group)
    }

    /// Node name of a node client: `n1` of `system:node:n1` in group `system:nodes`.
    pub fn node(&self) -> Option<&str> {
        self.name.strip_prefix("system:node:").filter(|name| !name.is_empty() && self.is_in("system:nodes"))
    }
}

/// Options of a DELETE, from body or query.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct DeleteOptions {
    /// `gracePeriodSeconds`
    pub grace: Option<i64>,
    /// `preconditions.uid`
    pub uid: Option<String>,
    /// `preconditions.resourceVersion`
    pub resource_version: Option<String>,
    /// `propagationPolicy`
    pub propagation: Option<String>,
}

/// Request for an API resource.
#[derive(Clone, Debug, Default)]
pub struct Request {
    /// Authenticated caller.
    pub caller: Caller,
    /// Verb: get, list, watch, create, update, patch, delete, or deletecollection.
    pub verb: &'static str,
    /// Resource name: `pods`, `leases.coordination.k8s.io`.
    pub resource: String,
    /// Kind as in objects: `Pod`.
    pub kind: &'static str,
    /// API version: `v1`, `coordination.k8s.io/v1`.
    pub api_version: String,
    /// Subresource: `status`, `token`, `resize`; mostly empty.
    pub subresource: String,
    /// Namespace; empty for cluster-scoped objects and for all namespaces.
    pub namespace: String,
    /// Object name; empty for a create and for collections; set once `generateName` has produced it.
    pub name: String,
    /// Query parameters, decoded.
    pub query: Vec<(String, String)>,
    /// Object, patch, or options as sent.
    pub body: Option<Value>,
    /// Media type without parameters: `application/strategic-merge-patch+json`.
    pub content_type: String,
    /// Field selector of a list, watch, or deletecollection.
    pub fields: Vec<Requirement>,
    /// Label selector of a list, watch, or deletecollection.
    pub labels: Vec<Requirement>,
    /// Options of a DELETE.
    pub options: DeleteOptions,
}

impl Request {
    /// First query parameter of that name.
    pub fn query(&self, name: &str) -> Option<&str> {
        self.query.iter().find(|(key, _)| key == name).map(|(_, value)| value.as_str())
    }

    /// API group: `coordination.k8s.io`; empty for the core group.
    pub fn group(&self) -> &str {
        super::refusal::split(&self.resource).1
    }

    /// Plural name of the resource: `leases`.
    pub fn plural(&self) -> &str {
        super::refusal::split(&self.resource).0
    }

    /// Kind with group, as in `… is invalid`: `Pod`, `Lease.coordination.k8s.io`.
    pub fn group_kind(&self) -> String {
        if self.group().is_empty() { self.kind.to_owned() } else { format!("{}.{}", self.kind, self.group()) }
    }

    /// Value that the field selector requires with `=` for a field such as `spec.nodeName`.
    pub fn field(&self, key: &str) -> Option<&str> {
        let found = self.fields.iter().find(|r| r.key == key && r.op == Op::Equal);
        found.and_then(|r| r.values.first()).map(String::as_str)
    }
}

/// Effect of a DELETE on its object.
#[derive(Clone, Debug, PartialEq)]
pub enum DeleteEffect {
    /// No effect; the response is the stored object.
    Nothing,
    /// The object stays, changed to this (MODIFIED, unless nothing changed).
    Update(Value),
    /// The object is stored as each of these first (a MODIFIED each), then removed (DELETED, with a new RV).
    Remove(Vec<Value>),
}

/// Write of rules or tests; bypasses authorization and validation.
#[derive(Clone, Debug, PartialEq)]
pub enum Write {
    /// Stores the object as given and creates it if absent; the core sets the RV, and uid and creationTimestamp of
    /// new objects. Overwrites the stored object: read it right before the write.
    Put {
        /// Resource name: `pods`.
        resource: String,
        /// The object; its metadata contains namespace and name.
        object: Value,
    },
    /// Removes the object at once, finalizers or not.
    Remove {
        /// Resource name: `pods`.
        resource: String,
        /// Namespace; empty for cluster-scoped objects.
        namespace: String,
        /// Object name.
        name: String,
    },
}

/// Response to a request that storage does not handle: binding, eviction, token, or review.
#[derive(Clone, Debug, PartialEq)]
pub struct Reply {
    /// HTTP status.
    pub code: u16,
    /// Response body.
    pub body: Value,
    /// Writes to commit before the response, in order.
    pub writes: Vec<Write>,
}

/// Committed change of one object.
#[derive(Clone, Debug)]
pub struct Change {
    /// Resource name: `pods`.
    pub resource: String,
    /// Object before the change; `None` if it is new.
    pub before: Option<Arc<Value>>,
    /// Object after the change; `None` if it was removed.
    pub after: Option<Arc<Value>>,
}

impl Change {
    /// The object after the change, or before its removal.
    pub fn object(&self) -> &Value {
        self.after.as_deref().or(self.before.as_deref()).unwrap_or(&Value::Null)
    }
}

/// Delayed controller job. When it is due, [`super::rules::run`] computes its writes.
#[derive(Clone, Debug)]
pub struct DelayedJob {
    /// Delay from now.
    pub after: Duration,
    /// Job to run.
    pub job: Job,
}
