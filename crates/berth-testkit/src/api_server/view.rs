//! The seam between the core of the server (storage, verbs, watches, wire) and its rules (who may what,
//! what an object must be): what the core tells the rules, and what they answer. Rules see the store,
//! and never change it themselves.

use std::{collections::BTreeMap, sync::Arc, time::Duration};

use jiff::Timestamp;
use serde_json::Value;

use super::rules::{Job, Rules};
pub use super::{
    refusal::{Cause, Refusal},
    selectors::{Op, Requirement},
};

/// What the rules may know. Resources are named `pods` or `leases.coordination.k8s.io`; the namespace
/// of a cluster-scoped object is empty. Objects are complete: kind, apiVersion, metadata.
pub trait View {
    /// One object.
    fn get(&self, resource: &str, namespace: &str, name: &str) -> Option<Arc<Value>>;

    /// All of a resource, by namespace and name.
    fn list(&self, resource: &str) -> Vec<Arc<Value>>;

    /// All of a resource as they were then, as far as the ring of events reaches back: the graph's lag.
    fn list_at(&self, resource: &str, at: Timestamp) -> Vec<Arc<Value>>;

    /// The injected clock.
    fn now(&self) -> Timestamp;

    /// The next random number of the server's seed.
    fn random(&self) -> u64;

    /// Settings of the rules, and keys they hold.
    fn rules(&self) -> &Rules;
}

/// Who asks.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Caller {
    /// `system:node:n1`
    pub name: String,
    /// Mostly empty.
    pub uid: String,
    /// `system:authenticated` included.
    pub groups: Vec<String>,
    /// Bound pod and node of a token.
    pub extra: BTreeMap<String, Vec<String>>,
    /// The header; what stands before the first `/` manages fields.
    pub user_agent: String,
}

impl Caller {
    /// Whether he is of that group.
    pub fn is_in(&self, group: &str) -> bool {
        self.groups.iter().any(|g| g == group)
    }

    /// `n1` of `system:node:n1` in group `system:nodes`.
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

/// A request for a resource.
#[derive(Clone, Debug, Default)]
pub struct Request {
    /// Who asks.
    pub caller: Caller,
    /// get, list, watch, create, update, patch, delete or deletecollection.
    pub verb: &'static str,
    /// `pods`, `leases.coordination.k8s.io`
    pub resource: String,
    /// As in objects: `Pod`.
    pub kind: &'static str,
    /// `v1`, `coordination.k8s.io/v1`
    pub api_version: String,
    /// `status`, `token`, `resize`; mostly empty.
    pub subresource: String,
    /// Empty for cluster-scoped objects and for all namespaces.
    pub namespace: String,
    /// Empty for a create and for collections; after `generateName` the name it got.
    pub name: String,
    /// Decoded.
    pub query: Vec<(String, String)>,
    /// The object, patch or options as they came.
    pub body: Option<Value>,
    /// Without parameters: `application/strategic-merge-patch+json`.
    pub content_type: String,
    /// Of a list, watch or deletecollection.
    pub fields: Vec<Requirement>,
    /// Of a list, watch or deletecollection.
    pub labels: Vec<Requirement>,
    /// Of a DELETE.
    pub options: DeleteOptions,
}

impl Request {
    /// A parameter.
    pub fn query(&self, name: &str) -> Option<&str> {
        self.query.iter().find(|(key, _)| key == name).map(|(_, value)| value.as_str())
    }

    /// `coordination.k8s.io`; empty for the core group.
    pub fn group(&self) -> &str {
        super::refusal::split(&self.resource).1
    }

    /// `leases`
    pub fn plural(&self) -> &str {
        super::refusal::split(&self.resource).0
    }

    /// As `… is invalid` names it: `Pod`, `Lease.coordination.k8s.io`.
    pub fn group_kind(&self) -> String {
        if self.group().is_empty() { self.kind.to_owned() } else { format!("{}.{}", self.kind, self.group()) }
    }

    /// The value that the field selector demands with `=`: `spec.nodeName`.
    pub fn field(&self, key: &str) -> Option<&str> {
        let found = self.fields.iter().find(|r| r.key == key && r.op == Op::Equal);
        found.and_then(|r| r.values.first()).map(String::as_str)
    }
}

/// What a DELETE does to the object it names.
#[derive(Clone, Debug, PartialEq)]
pub enum DeleteEffect {
    /// Nothing; the answer is the stored object.
    Nothing,
    /// It stays, as this (a MODIFIED, unless nothing changed).
    Update(Value),
    /// It goes: stored as each of these first (a MODIFIED each), then removed (DELETED, with a new RV).
    Remove(Vec<Value>),
}

/// A change that needs nobody's permission.
#[derive(Clone, Debug, PartialEq)]
pub enum Write {
    /// The object as it shall be, made if it is not there; the core sets RV, and uid and
    /// creationTimestamp of new ones. What the store holds meanwhile is lost, so read it when you write.
    Put {
        /// `pods`
        resource: String,
        /// Its metadata names it.
        object: Value,
    },
    /// The object goes at once, finalizers or not.
    Remove {
        /// `pods`
        resource: String,
        /// Empty for cluster-scoped objects.
        namespace: String,
        /// Whose.
        name: String,
    },
}

/// The answer to a request that storage knows nothing of: a binding, an eviction, a token, a review.
#[derive(Clone, Debug, PartialEq)]
pub struct Reply {
    /// HTTP status.
    pub code: u16,
    /// The answer.
    pub body: Value,
    /// Done before it is answered, in order.
    pub writes: Vec<Write>,
}

/// A change that was committed.
#[derive(Clone, Debug)]
pub struct Change {
    /// `pods`
    pub resource: String,
    /// None of a new object.
    pub before: Option<Arc<Value>>,
    /// None of a removed object.
    pub after: Option<Arc<Value>>,
}

impl Change {
    /// The object as it last was.
    pub fn object(&self) -> &Value {
        self.after.as_deref().or(self.before.as_deref()).unwrap_or(&Value::Null)
    }
}

/// Something that a controller does later. When it is due, [`super::rules::run`] says what is written.
#[derive(Clone, Debug)]
pub struct Later {
    /// From now.
    pub after: Duration,
    /// What.
    pub job: Job,
}
