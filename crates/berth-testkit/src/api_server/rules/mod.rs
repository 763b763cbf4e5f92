//! API machinery rules of a real server: authentication, authorization, admission, validation, patches.
//!
//! Also the effect of a DELETE, and controllers. Functions over JSON values and a read-only view of the store; they
//! know nothing of connections, storage rules of verbs, or watches. Written from the specification alone; shares no
//! code with the agent. Implements spec 10 §5 and §6, spec 10a §4 and §6-8.

pub mod access;
pub mod authentication;
pub mod authorizer;
pub mod controllers;
pub mod csr;
pub mod deletion;
pub mod fields;
pub mod graph;
pub mod merge_keys;
pub mod merge_patch;
pub mod node_restriction;
pub mod objects;
pub mod pod_defaults;
pub mod pod_verbs;
pub mod pods;
pub mod qos;
pub mod quantities;
pub mod service_accounts;
pub mod settings;
pub mod tokens;
pub mod type_decoding;

use serde_json::{Value, json};

use self::merge_patch::PatchError;
pub use self::{
    authentication::authenticate,
    authorizer::{Grant, authorize},
    controllers::{Job, react as controllers, run},
    settings::Rules,
};
use super::view::{Cause, DeleteEffect, Refusal, Reply, Request, View, Write};

/// Prepares a new object for storage: admission, defaults, strategy, validation. Name, namespace, uid, and
/// creationTimestamp are already set.
///
/// # Errors
/// 400, 403, 404, 422: the object is refused.
pub fn prepare_create(view: &dyn View, request: &Request, object: &mut Value) -> Result<(), Refusal> {
    let refuse = |why: String| {
        let (kind, version) = (request.kind, &request.api_version);
        Refusal::bad_request(format!("{kind} in version \"{version}\" cannot be handled as a {kind}: {why}"))
    };
    check_strictly(request).map_err(refuse)?;
    fit(view, request, object).map_err(refuse)?;
    if request.kind == "Pod" {
        service_accounts::admit(view, object)?;
    }
    node_restriction::create(view, request, object)?;
    if request.kind == "Pod" { pods::create(object) } else { objects::create(request, object) }
}

/// Prepares a changed object (PUT or PATCH, subresources included) for storage. The core has done what holds for all
/// resources: immutable metadata is `old`'s, a write to `status` has `old`'s spec, any other has `old`'s status.
///
/// # Errors
/// 403, 422: the change is refused.
pub fn prepare_update(view: &dyn View, request: &Request, old: &Value, new: &mut Value) -> Result<(), Refusal> {
    let refuse = |why: String| {
        let patch = request.body.as_ref().map(ToString::to_string).unwrap_or_default();
        Refusal::invalid("", "", vec![Cause::invalid("patch", &json!(patch), &why)])
    };
    check_strictly(request).map_err(refuse)?;
    fit(view, request, new).map_err(refuse)?;
    admit_update(request, old, new)?;
    if request.kind == "Pod" {
        pods::print_times(new);
    }
    match (request.kind, request.subresource.as_str()) {
        ("Pod", "status") => pods::status(old, new),
        ("Pod", "resize") => pods::resize(old, new),
        ("Pod", "ephemeralcontainers") => pods::debug(old, new),
        ("Pod", _) => pods::update(old, new),
        _ => objects::update(request, old, new),
    }
}

/// Converts the object to its API type and back; keeps unknown fields if the rules simulate a newer server.
fn fit(view: &dyn View, request: &Request, object: &mut Value) -> Result<(), String> {
    let shaped = type_decoding::shape(request.kind, object)?;
    if !view.rules().is_newer {
        *object = shaped;
    }
    Ok(())
}

/// Refuses unknown fields if the request asks for strict field validation.
fn check_strictly(request: &Request) -> Result<(), String> {
    let unknown = if request.query("fieldValidation") == Some("Strict") { warnings(request) } else { Vec::new() };
    if unknown.is_empty() { Ok(()) } else { Err(format!("strict decoding error: {}", unknown.join(", "))) }
}

/// Runs admission on the object as the request would have it, including spec changes that a status write must not
/// make.
fn admit_update(request: &Request, old: &Value, new: &Value) -> Result<(), Refusal> {
    if request.caller.node().is_none() {
        return Ok(());
    }
    let requested = match (request.verb, &request.body) {
        ("patch", Some(patch)) => apply_patch(old, patch, request.kind, &request.content_type)?,
        ("update", Some(body)) => body.clone(),
        _ => new.clone(),
    };
    node_restriction::update(request, old, &type_decoding::shape(request.kind, &requested).unwrap_or(requested))
}

/// Applies a patch to an object of that kind.
///
/// # Errors
/// 400, 415, 422, 500: the patch is invalid.
pub fn apply_patch(original: &Value, patch: &Value, kind: &str, content_type: &str) -> Result<Value, Refusal> {
    match content_type {
        "application/merge-patch+json" => Ok(merge_patch::json_merge(original, patch)),
        "application/strategic-merge-patch+json" => {
            merge_patch::strategic(kind, original, patch).map_err(|err| match err {
                PatchError::Malformed(why) => Refusal::bad_request(why),
                PatchError::Unfit(why) => Refusal::new(422, "", why),
                PatchError::Plain(why) => Refusal::plain(why),
            })
        }
        _ => {
            let text = "the body of the request was in an unknown format - accepted media types include: \
                application/merge-patch+json, application/strategic-merge-patch+json";
            Err(Refusal::new(415, "UnsupportedMediaType", text))
        }
    }
}

/// Warnings about unknown fields of a write; none for reads and for `fieldValidation=Ignore`.
pub fn warnings(request: &Request) -> Vec<String> {
    let is_write = ["create", "update", "patch"].contains(&request.verb);
    let Some(mut body) = request.body.clone().filter(|body| is_write && body.is_object()) else { return Vec::new() };
    if request.query("fieldValidation") == Some("Ignore")
        || ["binding", "eviction", "token"].contains(&&*request.subresource)
    {
        return Vec::new();
    }
    fields::fill(&mut body, "kind", request.kind);
    fields::fill(&mut body, "apiVersion", request.api_version.clone());
    let unknown = type_decoding::unknown_fields(request.kind, &body).into_iter();
    unknown.filter(|field| !field.contains('$')).map(|field| format!("unknown field \"{field}\"")).collect()
}

/// Effect of a DELETE, admission and preconditions included.
///
/// # Errors
/// 403, 404, 409: the request is refused.
pub fn delete(view: &dyn View, request: &Request, old: &Value) -> Result<DeleteEffect, Refusal> {
    node_restriction::delete(request, old)?;
    deletion::check_preconditions(request.kind, old, &request.options)?;
    Ok(match request.kind {
        "Pod" => deletion::pod(old, &request.options, view.now()),
        "Namespace" => deletion::namespace(old, view.now()),
        _ => deletion::other(old, view.now()),
    })
}

/// Handles requests without storage: pods/binding, pods/eviction, serviceaccounts/token, reviews. `None` for all
/// others.
pub fn special(view: &dyn View, request: &Request) -> Option<Result<Reply, Refusal>> {
    match (request.verb, request.resource.as_str(), request.subresource.as_str()) {
        ("create", "pods", "binding") => Some(pod_verbs::bind(view, request)),
        ("create", "pods", "eviction") => {
            Some(node_restriction::evict(view, request).and_then(|()| pod_verbs::evict(view, request)))
        }
        ("create", "serviceaccounts", "token") => Some(tokens::request(view, request)),
        ("create", "tokenreviews.authentication.k8s.io", "") => Some(access::token_review(view, request)),
        ("create", "subjectaccessreviews.authorization.k8s.io", "") => {
            Some(access::subject_access_review(view, request))
        }
        _ => None,
    }
}

/// Initial objects: namespaces, with root CA config map and default service account.
pub fn first_objects(view: &dyn View) -> Vec<Write> {
    let namespace = |name: &str| Write::Put {
        resource: "namespaces".to_owned(),
        object: json!({"kind": "Namespace", "apiVersion": "v1", "metadata": {"name": name},
                       "spec": {"finalizers": ["kubernetes"]}, "status": {"phase": "Active"}}),
    };
    let names = ["default", "kube-system", "kube-public", "kube-node-lease"];
    let published = names.into_iter().flat_map(|name| controllers::publish(view, name));
    names.into_iter().map(namespace).chain(published).collect()
}

#[cfg(test)]
pub mod tests {
    //! Immutable in-memory [`View`] for the table tests of the rules.

    use std::{cell::Cell, sync::Arc};

    use berth::certificates::CertificatePair;
    use jiff::Timestamp;

    use super::{super::view::Caller, *};

    /// View with fixed objects, clock, and rules.
    pub struct FixedView {
        objects: Vec<(&'static str, Arc<Value>)>,
        /// Current time.
        pub now: Timestamp,
        /// Time from which `list_at` returns the objects.
        pub since: Timestamp,
        /// Rules under test.
        pub rules: Rules,
        random: Cell<u64>,
    }

    impl FixedView {
        /// Creates a view of these objects, by resource.
        pub fn with(objects: &[(&'static str, Value)]) -> Self {
            let objects = objects.iter().map(|(resource, object)| (*resource, Arc::new(object.clone()))).collect();
            let now = "2026-01-01T00:00:00Z".parse().expect("a time");
            Self { objects, now, since: Timestamp::MIN, rules: Rules::new(authority()), random: Cell::new(1) }
        }
    }

    impl View for FixedView {
        fn get(&self, resource: &str, namespace: &str, name: &str) -> Option<Arc<Value>> {
            let matches = |object: &Value| {
                fields::text(object, "/metadata/name") == name
                    && fields::text(object, "/metadata/namespace") == namespace
            };
            self.list(resource).into_iter().find(|object| matches(object))
        }

        fn list(&self, resource: &str) -> Vec<Arc<Value>> {
            self.objects.iter().filter(|(of, _)| *of == resource).map(|(_, object)| object.clone()).collect()
        }

        fn list_at(&self, resource: &str, at: Timestamp) -> Vec<Arc<Value>> {
            if at < self.since { Vec::new() } else { self.list(resource) }
        }

        fn now(&self) -> Timestamp {
            self.now
        }

        fn random(&self) -> u64 {
            self.random.set(self.random.get().wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1));
            self.random.get()
        }

        fn rules(&self) -> &Rules {
            &self.rules
        }
    }

    /// Certificate authority, valid from 2026-01-01.
    pub fn authority() -> CertificatePair {
        use berth::certificates::{Authority, Validity};
        let now = "2026-01-01T00:00:00Z".parse().expect("a time");
        Authority::create("test", Validity::days(now, 3650)).expect("an authority").own().clone()
    }

    /// Caller of a node's agent.
    pub fn node(name: &str) -> Caller {
        let groups = ["system:nodes", "system:authenticated"].map(str::to_owned).into();
        Caller { name: format!("system:node:{name}"), groups, ..Caller::default() }
    }

    #[test]
    fn a_writer_is_warned_of_unknown_fields() {
        let patch = json!({"status": {"foo": 1, "$setElementOrder/conditions": [{"type": "A"}], "conditions": [{"type": "A", "$patch": "delete"}]}});
        let request = Request {
            verb: "patch",
            kind: "Pod",
            api_version: "v1".to_owned(),
            body: Some(patch),
            ..Request::default()
        };
        assert_eq!(warnings(&request), ["unknown field \"status.foo\""]);
        let strict = Request { query: vec![("fieldValidation".to_owned(), "Strict".to_owned())], ..request.clone() };
        let pod = json!({"metadata": {"name": "p"}, "spec": {"containers": [{"name": "c", "image": "i"}], "newer": 1}});
        let made = |view: &FixedView, request: &Request| {
            let mut pod = pod.clone();
            prepare_create(view, &Request { verb: "create", body: Some(pod.clone()), ..request.clone() }, &mut pod)
                .map(|()| pod)
        };
        let refusal = made(&FixedView::with(&[]), &strict).expect_err("unknown");
        let text =
            "Pod in version \"v1\" cannot be handled as a Pod: strict decoding error: unknown field \"spec.newer\"";
        assert_eq!((refusal.code, refusal.message.as_str()), (400, text));
        let mut view = FixedView::with(&[]);
        assert_eq!(made(&view, &request).expect("fine")["spec"]["newer"], Value::Null);
        view.rules.is_newer = true;
        assert_eq!(made(&view, &request).expect("fine")["spec"]["newer"], 1);
        let quiet = Request { query: vec![("fieldValidation".to_owned(), "Ignore".to_owned())], ..request.clone() };
        assert!(warnings(&quiet).is_empty());
        assert!(warnings(&Request { verb: "delete", ..request }).is_empty());
    }

    /// AC-10a-18 and the other codes of spec 10 §5.5.
    #[test]
    fn patches_that_cannot_be_have_their_codes() {
        let stored = json!({"status": {"conditions": [{"type": "Ready"}]}});
        const SMP: &str = "application/strategic-merge-patch+json";
        for (patch, content_type, code) in [
            (
                json!({"status": {"$setElementOrder/conditions": [{"type": "Ready"}], "conditions": [{"type": "A"}]}}),
                SMP,
                500,
            ),
            (json!({"status": {"conditions": [{"status": "A"}]}}), SMP, 500),
            (json!({"status": {"$setElementOrder": []}}), SMP, 400),
            (json!({"status": {"conditions": [[]]}}), SMP, 422),
            (json!({}), "application/json", 415),
        ] {
            let refusal = apply_patch(&stored, &patch, "Pod", content_type).expect_err("refused");
            assert_eq!((refusal.code, refusal.reason.is_empty()), (code, code == 500 || code == 422), "{patch}");
        }
    }
}
