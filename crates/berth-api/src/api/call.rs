//! One call. Pure. Spec 10 §2.1, §4.

use std::time::Duration;

use bytes::Bytes;

use super::Resource;

/// What is done, as authorisation spells it.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub enum Verb {
    /// One object.
    Get,
    /// All that match.
    List,
    /// Changes as they happen.
    Watch,
    /// A new object (POST).
    Create,
    /// The whole object (PUT).
    Update,
    /// Parts of it (PATCH, strategic merge).
    Patch,
    /// One object goes.
    Delete,
    /// All that match go.
    DeleteCollection,
}

/// Whose call it is: each has a rate and a deadline of its own (spec 10 §2.1).
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub enum Line {
    /// All but the below.
    Main,
    /// Node status and lease; no rate, and a connection of its own.
    Heartbeat,
    /// Events.
    Events,
    /// Certificate signing requests.
    Certificates,
}

/// Whether the client asks again by itself.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug, Default)]
pub enum Retries {
    /// As spec 10 §2.6 has it.
    #[default]
    Usual,
    /// Never: who asks has rules of its own.
    None,
}

/// A body and its type.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Body {
    /// `Content-Type`.
    pub content_type: &'static str,
    /// JSON.
    pub bytes: Bytes,
}

/// What is asked.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Call {
    /// Whose it is.
    pub line: Line,
    /// What is done.
    pub verb: Verb,
    /// To what.
    pub resource: Resource,
    /// Where; empty for cluster-scoped objects and for all namespaces.
    pub namespace: String,
    /// To which one; empty for all.
    pub name: String,
    /// `status`, `token`; mostly empty.
    pub subresource: &'static str,
    /// Decoded; the client encodes and sorts by name.
    pub query: Vec<(&'static str, String)>,
    /// What is sent along.
    pub body: Option<Body>,
    /// How long the whole call may take, retries and waits included; for a watch, until it begins.
    pub deadline: Duration,
    /// Whether the client asks again by itself.
    pub retries: Retries,
}

/// Deadline of a call that nobody gave one: the server's own for a write is 34 s, for a read 60 s.
const DEADLINE: Duration = Duration::from_secs(60);
/// Content type of an object.
const JSON: &str = "application/json";
/// Content type of a patch.
const PATCH: &str = "application/strategic-merge-patch+json";

impl Call {
    /// A call without a body on the main line.
    pub fn new(verb: Verb, resource: Resource, namespace: &str, name: &str) -> Self {
        Self {
            line: Line::Main,
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

    /// Reads one object.
    pub fn get(resource: Resource, namespace: &str, name: &str) -> Self {
        Self::new(Verb::Get, resource, namespace, name)
    }

    /// Makes an object.
    pub fn create(resource: Resource, namespace: &str, object: impl Into<Bytes>) -> Self {
        Self::new(Verb::Create, resource, namespace, "").with_body(JSON, object)
    }

    /// Replaces an object.
    pub fn update(resource: Resource, namespace: &str, name: &str, object: impl Into<Bytes>) -> Self {
        Self::new(Verb::Update, resource, namespace, name).with_body(JSON, object)
    }

    /// Changes an object; `patch` is a strategic merge patch.
    pub fn patch(resource: Resource, namespace: &str, name: &str, patch: impl Into<Bytes>) -> Self {
        Self::new(Verb::Patch, resource, namespace, name).with_body(PATCH, patch)
    }

    /// Deletes an object now, if it still is the one of that UID.
    pub fn delete_now(resource: Resource, namespace: &str, name: &str, uid: &str) -> Self {
        let options = serde_json::json!({"gracePeriodSeconds": 0, "preconditions": {"uid": uid}});
        Self::new(Verb::Delete, resource, namespace, name).with_body(JSON, options.to_string())
    }

    /// On that line.
    #[must_use]
    pub fn on(mut self, line: Line) -> Self {
        self.line = line;
        self
    }

    /// That subresource.
    #[must_use]
    #[allow(clippy::should_implement_trait, reason = "nobody subtracts from a call")]
    pub fn sub(mut self, subresource: &'static str) -> Self {
        self.subresource = subresource;
        self
    }

    /// One more parameter.
    #[must_use]
    pub fn query(mut self, name: &'static str, value: impl Into<String>) -> Self {
        self.query.push((name, value.into()));
        self
    }

    /// That deadline.
    #[must_use]
    pub fn within(mut self, deadline: Duration) -> Self {
        self.deadline = deadline;
        self
    }

    /// Asked once, whatever comes of it.
    #[must_use]
    pub fn once(mut self) -> Self {
        self.retries = Retries::None;
        self
    }

    /// Path below the server's prefix, without the query.
    pub fn path(&self) -> String {
        self.resource.path(&self.namespace, &self.name, self.subresource)
    }

    /// What stands in messages: `pods "p"`.
    pub fn object(&self) -> String {
        format!("{} {:?}", self.resource.plural, self.name)
    }

    fn with_body(mut self, content_type: &'static str, bytes: impl Into<Bytes>) -> Self {
        self.body = Some(Body { content_type, bytes: bytes.into() });
        self
    }
}
