//! What users do to the cluster while a test runs: the same verbs and rules, without a connection, and not in the log.

use std::{collections::BTreeMap, sync::Arc};

use serde_json::{Value, json};

use super::{
    ApiServer,
    resources::{self, Kind, named},
    selectors::{parse_fields, parse_labels},
    store::key,
    view::{Caller, DeleteOptions, Refusal, Request, View},
};

/// Somebody who acts.
pub struct User<'a> {
    server: &'a ApiServer,
    caller: Caller,
}

type Outcome = Result<Arc<Value>, Refusal>;

impl User<'_> {
    /// Makes an object; its kind says where.
    ///
    /// # Errors
    /// As the server refuses.
    pub fn create(&self, object: Value) -> Outcome {
        self.write("create", "", object)
    }

    /// Replaces an object.
    ///
    /// # Errors
    /// As the server refuses.
    pub fn update(&self, object: Value) -> Outcome {
        self.write("update", "", object)
    }

    /// Replaces an object's `status`, `resize`, `approval`.
    ///
    /// # Errors
    /// As the server refuses.
    pub fn update_sub(&self, subresource: &str, object: Value) -> Outcome {
        self.write("update", subresource, object)
    }

    /// Strategic merge patch of an object.
    ///
    /// # Errors
    /// As the server refuses.
    pub fn patch(&self, resource: &str, namespace: &str, name: &str, patch: Value) -> Outcome {
        self.patch_sub(resource, namespace, name, "", patch)
    }

    /// Strategic merge patch of an object's subresource.
    ///
    /// # Errors
    /// As the server refuses.
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

    /// Creates below an object: `binding`, `eviction`, `token`.
    ///
    /// # Errors
    /// As the server refuses.
    pub fn post_sub(&self, resource: &str, namespace: &str, name: &str, subresource: &str, body: Value) -> Outcome {
        let subresource = subresource.to_owned();
        self.ask(
            resource,
            namespace,
            name,
            Request { verb: "create", subresource, body: Some(body), ..Request::default() },
        )
    }

    /// Deletes an object; the grace is in seconds.
    ///
    /// # Errors
    /// As the server refuses.
    pub fn delete(&self, resource: &str, namespace: &str, name: &str, grace: Option<i64>) -> Outcome {
        let options = DeleteOptions { grace, ..DeleteOptions::default() };
        self.ask(resource, namespace, name, Request { verb: "delete", options, ..Request::default() })
    }

    /// Reads an object.
    ///
    /// # Errors
    /// As the server refuses.
    pub fn read(&self, resource: &str, namespace: &str, name: &str) -> Outcome {
        self.ask(resource, namespace, name, Request { verb: "get", ..Request::default() })
    }

    /// Reads a list by selectors.
    ///
    /// # Errors
    /// As the server refuses.
    pub fn list(&self, resource: &str, namespace: &str, fields: &str, labels: &str) -> Outcome {
        let (fields, labels) = (parse_fields(fields)?, parse_labels(labels)?);
        self.ask(resource, namespace, "", Request { verb: "list", fields, labels, ..Request::default() })
    }

    fn write(&self, verb: &'static str, subresource: &str, object: Value) -> Outcome {
        let kind = resources::of(&object).unwrap_or_else(|| panic!("no resource has such objects: {object}"));
        let (namespace, name) = key(&object);
        let namespace = if kind.is_namespaced && namespace.is_empty() { "default".to_owned() } else { namespace };
        let name = if verb == "create" { String::new() } else { name };
        let subresource = subresource.to_owned();
        self.ask(kind.id, &namespace, &name, Request { verb, subresource, body: Some(object), ..Request::default() })
    }

    fn ask(&self, resource: &str, namespace: &str, name: &str, request: Request) -> Outcome {
        let kind: &'static Kind = named(resource).unwrap_or_else(|| panic!("there are no {resource}"));
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
    /// Somebody of these groups.
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

    /// Who may do everything.
    pub fn admin(&self) -> User<'_> {
        self.user("admin", &["system:masters"])
    }

    /// Makes an object, as administrator.
    ///
    /// # Panics
    /// It is refused.
    pub fn create(&self, object: Value) -> Arc<Value> {
        self.admin().create(object).unwrap_or_else(|refusal| panic!("refused: {refusal:?}"))
    }

    /// Replaces an object, as administrator.
    ///
    /// # Panics
    /// It is refused.
    pub fn update(&self, object: Value) -> Arc<Value> {
        self.admin().update(object).unwrap_or_else(|refusal| panic!("refused: {refusal:?}"))
    }

    /// Strategic merge patch, as administrator.
    ///
    /// # Panics
    /// It is refused.
    pub fn patch(&self, resource: &str, namespace: &str, name: &str, patch: Value) -> Arc<Value> {
        let outcome = self.admin().patch(resource, namespace, name, patch);
        outcome.unwrap_or_else(|refusal| panic!("refused: {refusal:?}"))
    }

    /// Deletes an object, as administrator.
    ///
    /// # Panics
    /// It is refused.
    pub fn delete(&self, resource: &str, namespace: &str, name: &str, grace: Option<i64>) -> Arc<Value> {
        let outcome = self.admin().delete(resource, namespace, name, grace);
        outcome.unwrap_or_else(|refusal| panic!("refused: {refusal:?}"))
    }

    /// What is stored.
    pub fn get(&self, resource: &str, namespace: &str, name: &str) -> Option<Arc<Value>> {
        self.shared.core().get(resource, namespace, name)
    }

    /// All that is stored of a resource.
    pub fn all(&self, resource: &str) -> Vec<Arc<Value>> {
        self.shared.core().list(resource)
    }

    /// The last resource version.
    pub fn rv(&self) -> u64 {
        self.shared.core().store.rv()
    }

    /// What a scheduler does.
    ///
    /// # Panics
    /// It is refused.
    pub fn bind(&self, namespace: &str, pod: &str, node: &str) {
        let binding = json!({"kind": "Binding", "apiVersion": "v1", "metadata": {"name": pod, "namespace": namespace},
                             "target": {"kind": "Node", "apiVersion": "v1", "name": node}});
        let outcome = self.admin().post_sub("pods", namespace, pod, "binding", binding);
        outcome.unwrap_or_else(|refusal| panic!("refused: {refusal:?}"));
    }
}
