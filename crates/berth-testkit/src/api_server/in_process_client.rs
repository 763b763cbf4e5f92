//! In-process API client for tests: same verbs and rules as over HTTP, but unrecorded.

use std::{collections::BTreeMap, sync::Arc};

use serde_json::{Value, json};

use super::{
    ApiServer,
    resources::{self, Kind, named},
    selectors::{parse_fields, parse_labels},
    store::key,
    view::{Caller, DeleteOptions, Refusal, Request, View},
};

/// Client that acts as one user.
pub struct User<'a> {
    server: &'a ApiServer,
    caller: Caller,
}

type Outcome = Result<Arc<Value>, Refusal>;

impl User<'_> {
    /// Creates an object; its kind and apiVersion select the resource.
    ///
    /// # Errors
    /// The refusal of the server.
    pub fn create(&self, object: Value) -> Outcome {
        self.write("create", "", object)
    }

    /// Replaces an object.
    ///
    /// # Errors
    /// The refusal of the server.
    pub fn update(&self, object: Value) -> Outcome {
        self.write("update", "", object)
    }

    /// Replaces an object's `status`, `resize`, or `approval`.
    ///
    /// # Errors
    /// The refusal of the server.
    pub fn update_sub(&self, subresource: &str, object: Value) -> Outcome {
        self.write("update", subresource, object)
    }

    /// Applies a strategic merge patch to an object.
    ///
    /// # Errors
    /// The refusal of the server.
    pub fn patch(&self, resource: &str, namespace: &str, name: &str, patch: Value) -> Outcome {
        self.patch_sub(resource, namespace, name, "", patch)
    }

    /// Applies a strategic merge patch to a subresource.
    ///
    /// # Errors
    /// The refusal of the server.
    pub fn patch_sub(&self, resource: &str, namespace: &str, name: &str, subresource: &str, patch: Value) -> Outcome {
        let content_type = "application/strategic-merge-patch+json".to_owned();
        let subresource = subresource.to_owned();
        self.ask(
            resource,
            namespace,
            name,
            Request { verb: "patch", subresource, content_type, body: Some(patch), ..Request::default() },
        )
    }

    /// Creates a subresource: `binding`, `eviction`, or `token`.
    ///
    /// # Errors
    /// The refusal of the server.
    pub fn post_sub(&self, resource: &str, namespace: &str, name: &str, subresource: &str, body: Value) -> Outcome {
        let subresource = subresource.to_owned();
        self.ask(
            resource,
            namespace,
            name,
            Request { verb: "create", subresource, body: Some(body), ..Request::default() },
        )
    }

    /// Deletes an object; the grace period is in seconds.
    ///
    /// # Errors
    /// The refusal of the server.
    pub fn delete(&self, resource: &str, namespace: &str, name: &str, grace: Option<i64>) -> Outcome {
        let options = DeleteOptions { grace, ..DeleteOptions::default() };
        self.ask(resource, namespace, name, Request { verb: "delete", options, ..Request::default() })
    }

    /// Reads an object.
    ///
    /// # Errors
    /// The refusal of the server.
    pub fn read(&self, resource: &str, namespace: &str, name: &str) -> Outcome {
        self.ask(resource, namespace, name, Request { verb: "get", ..Request::default() })
    }

    /// Lists objects by field and label selector.
    ///
    /// # Errors
    /// The refusal of the server.
    pub fn list(&self, resource: &str, namespace: &str, fields: &str, labels: &str) -> Outcome {
        let (fields, labels) = (parse_fields(fields)?, parse_labels(labels)?);
        self.ask(resource, namespace, "", Request { verb: "list", fields, labels, ..Request::default() })
    }

    fn write(&self, verb: &'static str, subresource: &str, object: Value) -> Outcome {
        let kind = resources::of(&object).unwrap_or_else(|| panic!("no resource found for object {object}"));
        let (namespace, name) = key(&object);
        let namespace = if kind.is_namespaced && namespace.is_empty() { "default".to_owned() } else { namespace };
        let name = if verb == "create" { String::new() } else { name };
        let subresource = subresource.to_owned();
        self.ask(kind.id, &namespace, &name, Request { verb, subresource, body: Some(object), ..Request::default() })
    }

    fn ask(&self, resource: &str, namespace: &str, name: &str, request: Request) -> Outcome {
        let kind: &'static Kind = named(resource).unwrap_or_else(|| panic!("unknown resource {resource}"));
        let mut request = Request {
            caller: self.caller.clone(),
            resource: resource.to_owned(),
            kind: kind.kind,
            api_version: kind.api_version(),
            namespace: namespace.to_owned(),
            name: name.to_owned(),
            ..request
        };
        self.server.with(|core| core.handle(&mut request, kind)).map(|answer| answer.body)
    }
}

impl ApiServer {
    /// Client of a user in these groups and in `system:authenticated`.
    pub fn user(&self, name: &str, groups: &[&str]) -> User<'_> {
        let groups = groups.iter().copied().chain(["system:authenticated"]).map(str::to_owned).collect();
        let caller = Caller {
            name: name.to_owned(),
            uid: String::new(),
            groups,
            extra: BTreeMap::new(),
            user_agent: "kubectl/v1.36.2 (linux/amd64)".to_owned(),
        };
        User { server: self, caller }
    }

    /// Client of the administrator, who may do everything.
    pub fn admin(&self) -> User<'_> {
        self.user("admin", &["system:masters"])
    }

    /// Creates an object as administrator.
    ///
    /// # Panics
    /// The server refuses the request.
    pub fn create(&self, object: Value) -> Arc<Value> {
        self.admin().create(object).unwrap_or_else(|refusal| panic!("request rejected: {refusal:?}"))
    }

    /// Replaces an object as administrator.
    ///
    /// # Panics
    /// The server refuses the request.
    pub fn update(&self, object: Value) -> Arc<Value> {
        self.admin().update(object).unwrap_or_else(|refusal| panic!("request rejected: {refusal:?}"))
    }

    /// Applies a strategic merge patch as administrator.
    ///
    /// # Panics
    /// The server refuses the request.
    pub fn patch(&self, resource: &str, namespace: &str, name: &str, patch: Value) -> Arc<Value> {
        let outcome = self.admin().patch(resource, namespace, name, patch);
        outcome.unwrap_or_else(|refusal| panic!("request rejected: {refusal:?}"))
    }

    /// Deletes an object as administrator; the grace period is in seconds.
    ///
    /// # Panics
    /// The server refuses the request.
    pub fn delete(&self, resource: &str, namespace: &str, name: &str, grace: Option<i64>) -> Arc<Value> {
        let outcome = self.admin().delete(resource, namespace, name, grace);
        outcome.unwrap_or_else(|refusal| panic!("request rejected: {refusal:?}"))
    }

    /// Reads a stored object, without authorization.
    pub fn get(&self, resource: &str, namespace: &str, name: &str) -> Option<Arc<Value>> {
        self.shared.core().get(resource, namespace, name)
    }

    /// All stored objects of a resource.
    pub fn all(&self, resource: &str) -> Vec<Arc<Value>> {
        self.shared.core().list(resource)
    }

    /// Latest resource version.
    pub fn rv(&self) -> u64 {
        self.shared.core().store.rv()
    }

    /// Binds a pod to a node, as the scheduler does.
    ///
    /// # Panics
    /// The server refuses the request.
    pub fn bind(&self, namespace: &str, pod: &str, node: &str) {
        let binding = json!({"kind": "Binding", "apiVersion": "v1", "metadata": {"name": pod, "namespace": namespace},
                             "target": {"kind": "Node", "apiVersion": "v1", "name": node}});
        let outcome = self.admin().post_sub("pods", namespace, pod, "binding", binding);
        outcome.unwrap_or_else(|refusal| panic!("request rejected: {refusal:?}"));
    }
}
