//! API request descriptor: verb, resource, body, deadline, and retry policy. Pure.
//!
//! Implements spec 10 §2.1, §4.

use std::time::Duration;

use bytes::Bytes;

use super::Resource;

/// API verb, as RBAC authorization names it.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub enum Verb {
    /// Reads one object (GET).
    Get,
    /// Reads all objects that match (GET on the collection).
    List,
    /// Streams changes (GET with `watch=true`).
    Watch,
    /// Creates an object (POST).
    Create,
    /// Replaces the whole object (PUT).
    Update,
    /// Changes parts of an object (PATCH, strategic merge).
    Patch,
    /// Deletes one object (DELETE).
    Delete,
    /// Deletes all objects that match (DELETE on the collection).
    DeleteCollection,
}

/// Request class: each has its own rate limit and deadline (spec 10 §2.1).
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub enum RequestClass {
    /// Every request that belongs to no other class.
    Main,
    /// Node status and lease: no rate limit, and a connection of its own.
    Heartbeat,
    /// Event writes, limited by `eventRecordQPS` and `eventBurst`.
    Events,
    /// Certificate signing requests.
    Certificates,
}

/// Retry policy of the client for one call.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug, Default)]
pub enum Retries {
    /// Retries as spec 10 §2.6 defines.
    #[default]
    Usual,
    /// Never retries: the caller has its own retry policy.
    None,
}

/// Request body and its media type.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Body {
    /// Value of `Content-Type`.
    pub content_type: &'static str,
    /// JSON bytes.
    pub bytes: Bytes,
}

/// One API request, independent of the connection that carries it.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Call {
    /// Request class, which selects rate limiter and connection.
    pub line: RequestClass,
    /// API verb; it determines the HTTP method.
    pub verb: Verb,
    /// Resource type.
    pub resource: Resource,
    /// Namespace; empty for cluster-scoped objects and for all namespaces.
    pub namespace: String,
    /// Object name; empty for collections.
    pub name: String,
    /// Subresource (`status`, `token`); empty for the object itself.
    pub subresource: &'static str,
    /// Query parameters, decoded; the client encodes them and sorts them by name.
    pub query: Vec<(&'static str, String)>,
    /// Request body; `None` for reads.
    pub body: Option<Body>,
    /// Limit for the whole call, including retries and rate-limiter waits; for a watch, until the watch is established.
    pub deadline: Duration,
    /// Retry policy.
    pub retries: Retries,
}

/// Default deadline of a call. The server's own limit is 34 s for a write and 60 s for a read.
const DEADLINE: Duration = Duration::from_secs(60);
/// Media type of an object.
const JSON: &str = "application/json";
/// Media type of a strategic merge patch.
const PATCH: &str = "application/strategic-merge-patch+json";

impl Call {
    /// Returns a call without a body, in class [`RequestClass::Main`], with the default deadline of 60 s.
    pub fn new(verb: Verb, resource: Resource, namespace: &str, name: &str) -> Self {
        Self {
            line: RequestClass::Main,
            verb,
            resource,
            namespace: namespace.to_owned(),
            name: name.to_owned(),
            subresource: "",
            query: Vec::new(),
            body: None,
            deadline: DEADLINE,
            retries: Retries::Usual,
        }
    }

    /// Returns a GET of one object.
    pub fn get(resource: Resource, namespace: &str, name: &str) -> Self {
        Self::new(Verb::Get, resource, namespace, name)
    }

    /// Returns a POST of a JSON object.
    pub fn create(resource: Resource, namespace: &str, object: impl Into<Bytes>) -> Self {
        Self::new(Verb::Create, resource, namespace, "").with_body(JSON, object)
    }

    /// Returns a PUT of a JSON object.
    pub fn update(resource: Resource, namespace: &str, name: &str, object: impl Into<Bytes>) -> Self {
        Self::new(Verb::Update, resource, namespace, name).with_body(JSON, object)
    }

    /// Returns a PATCH; `patch` is a strategic merge patch.
    pub fn patch(resource: Resource, namespace: &str, name: &str, patch: impl Into<Bytes>) -> Self {
        Self::new(Verb::Patch, resource, namespace, name).with_body(PATCH, patch)
    }

    /// Returns a DELETE with grace period 0 and a UID precondition.
    pub fn delete_now(resource: Resource, namespace: &str, name: &str, uid: &str) -> Self {
        let options = serde_json::json!({"gracePeriodSeconds": 0, "preconditions": {"uid": uid}});
        Self::new(Verb::Delete, resource, namespace, name).with_body(JSON, options.to_string())
    }

    /// Sets the request class.
    #[must_use]
    pub fn on(mut self, line: RequestClass) -> Self {
        self.line = line;
        self
    }

    /// Sets the subresource.
    #[must_use]
    #[allow(clippy::should_implement_trait, reason = "it sets a subresource and subtracts nothing")]
    pub fn sub(mut self, subresource: &'static str) -> Self {
        self.subresource = subresource;
        self
    }

    /// Adds a query parameter.
    #[must_use]
    pub fn query(mut self, name: &'static str, value: impl Into<String>) -> Self {
        self.query.push((name, value.into()));
        self
    }

    /// Sets the deadline.
    #[must_use]
    pub fn within(mut self, deadline: Duration) -> Self {
        self.deadline = deadline;
        self
    }

    /// Disables the client's retries.
    #[must_use]
    pub fn once(mut self) -> Self {
        self.retries = Retries::None;
        self
    }

    /// Path below the server's prefix, without the query.
    pub fn path(&self) -> String {
        self.resource.path(&self.namespace, &self.name, self.subresource)
    }

    /// Object as messages name it: `pods "p"`.
    pub fn object(&self) -> String {
        format!("{} {:?}", self.resource.plural, self.name)
    }

    fn with_body(mut self, content_type: &'static str, bytes: impl Into<Bytes>) -> Self {
        self.body = Some(Body { content_type, bytes: bytes.into() });
        self
    }
}
