//! Create, update, patch, and delete: behavior common to all resources.
//!
//! The rules of a resource add what is specific to it. Implements spec 10a §2, §3.

use std::sync::Arc;

use serde_json::{Value, json};

use super::{
    clock::{suffix, text},
    core::{Answer, Core, is_same},
    resources::Kind,
    rules,
    store::{Filter, Key, key},
    view::{Cause, DeleteEffect, Refusal, Request, View},
};

/// Maximum length of a generated name, without its five random characters.
const GENERATED: usize = 58;
/// Number of attempts to generate a unique name.
const TRIES: usize = 8;
/// Metadata fields that a write cannot change.
const GUARDED: [&str; 7] =
    ["creationTimestamp", "deletionTimestamp", "deletionGracePeriodSeconds", "uid", "name", "namespace", "generation"];

/// Handles POST.
///
/// # Errors
/// See the documentation of the module `rules`; also 400, 403 (terminating namespace), 404 (namespace), 409, 422.
pub fn create(core: &mut Core, request: &mut Request, kind: &'static Kind) -> Result<Answer, Refusal> {
    if !request.subresource.is_empty() {
        return Err(super::core::method_not_allowed());
    }
    let mut object = body(request, kind)?;
    let metadata = &mut object["metadata"];
    if kind.is_namespaced {
        if metadata["namespace"]
            .as_str()
            .is_some_and(|namespace| !namespace.is_empty() && namespace != request.namespace)
        {
            let text = "the namespace of the provided object does not match the namespace sent on the request";
            return Err(Refusal::bad_request(text));
        }
        metadata["namespace"] = json!(request.namespace);
    }
    if metadata["resourceVersion"].as_str().is_some_and(|rv| !rv.is_empty() && rv != "0") {
        return Err(Refusal::plain("resourceVersion should not be set on objects to be created"));
    }
    request.name = name(core, request, metadata)?;
    namespace(core, request, kind)?;
    let metadata = &mut object["metadata"];
    metadata["name"] = json!(request.name);
    metadata["uid"] = json!(core.uid());
    metadata["creationTimestamp"] = json!(text(core.now()));
    if let Some(fields) = metadata.as_object_mut() {
        let unwanted = [
            "resourceVersion",
            "deletionTimestamp",
            "deletionGracePeriodSeconds",
            "generation",
            "managedFields",
            "selfLink",
        ];
        fields.retain(|field, value| !unwanted.contains(&field.as_str()) && !value.is_null());
    }
    rules::prepare_create(core, request, &mut object)?;
    let key = key(&object);
    if core.store.get(&request.resource, &key).is_some() {
        return Err(Refusal::already_exists(&request.resource, &request.name));
    }
    core.manage(&request.caller, request, &mut object);
    Ok(Answer::new(201, core.store(&request.resource, None, object)))
}

/// Request body as an object; fills in kind, apiVersion, and metadata.
fn body(request: &Request, kind: &Kind) -> Result<Value, Refusal> {
    let mut object = request.body.clone().filter(Value::is_object);
    let object = object.take().ok_or_else(|| Refusal::bad_request("the body of the request is not an object"));
    let mut object = object?;
    let version = kind.api_version();
    for (field, expected) in [("kind", kind.kind), ("apiVersion", &version)] {
        match object[field].as_str() {
            None | Some("") => object[field] = json!(expected),
            Some(value) if value == expected => {}
            Some(value) => {
                let message = format!("{field} of the object ({value}) does not match the URL's ({expected})");
                return Err(Refusal::bad_request(message));
            }
        }
    }
    if !object["metadata"].is_object() {
        object["metadata"] = json!({});
    }
    Ok(object)
}

/// Name of a new object, given or generated.
fn name(core: &Core, request: &Request, metadata: &Value) -> Result<String, Refusal> {
    let given = metadata["name"].as_str().unwrap_or_default();
    if !given.is_empty() {
        let wrong = "a lowercase RFC 1123 subdomain must consist of lower case alphanumeric characters, '-' or '.', and \
                     must start and end with an alphanumeric character (e.g. 'example.com', regex used for validation is \
                     '[a-z0-9]([-a-z0-9]*[a-z0-9])?(\\.[a-z0-9]([-a-z0-9]*[a-z0-9])?)*')";
        let cause = || vec![Cause::invalid("metadata.name", &json!(given), wrong)];
        let refuse = || Refusal::invalid(&request.group_kind(), given, cause());
        // A server accepts any name of a certificate signing request that is a valid path segment.
        let is_fine = match request.resource.as_str() {
            "certificatesigningrequests.certificates.k8s.io" => !given.contains(['/', '%']),
            _ => is_subdomain(given),
        };
        return is_fine.then(|| given.to_owned()).ok_or_else(refuse);
    }
    let base: String = metadata["generateName"].as_str().unwrap_or_default().chars().take(GENERATED).collect();
    if base.is_empty() {
        let cause = Cause::required("metadata.name", "name or generateName is required");
        return Err(Refusal::invalid(&request.group_kind(), "", vec![cause]));
    }
    let mut tried = String::new();
    for _ in 0..TRIES {
        tried = format!("{base}{}", suffix(core.random()));
        if core.get(&request.resource, &request.namespace, &tried).is_none() {
            return Ok(tried);
        }
    }
    let mut refusal = Refusal::already_exists(&request.resource, &tried);
    refusal.message.push_str(", the server was not able to generate a unique name for the object");
    Err(refusal)
}

/// Whether the name is a DNS subdomain; names with colons, such as cluster roles, are not stored here.
fn is_subdomain(name: &str) -> bool {
    let is_plain = |c: char| c.is_ascii_lowercase() || c.is_ascii_digit();
    let label = |label: &str| {
        label.starts_with(is_plain) && label.ends_with(is_plain) && label.chars().all(|c| is_plain(c) || c == '-')
    };
    name.len() <= 253 && name.split('.').all(label)
}

/// Checks that the namespace exists, or creates it, and that it is not terminating.
fn namespace(core: &mut Core, request: &Request, kind: &Kind) -> Result<(), Refusal> {
    if !kind.is_namespaced {
        return Ok(());
    }
    let Some(namespace) = core.get("namespaces", "", &request.namespace) else {
        if !core.switches.namespaces_on_use {
            return Err(Refusal::not_found("namespaces", &request.namespace));
        }
        let object = json!({"kind": "Namespace", "apiVersion": "v1", "metadata": {"name": request.namespace},
                            "spec": {"finalizers": ["kubernetes"]}, "status": {"phase": "Active"}});
        core.apply(vec![super::view::Write::Put { resource: "namespaces".to_owned(), object }]);
        return Ok(());
    };
    if namespace["status"]["phase"] != "Terminating" {
        return Ok(());
    }
    let name = &request.namespace;
    let why = format!("unable to create new content in namespace {name} because it is being terminated");
    let text = format!("namespace {name} is being terminated");
    let cause = Cause::new("NamespaceTerminating", "metadata.namespace", text);
    Err(Refusal::forbidden(&request.resource, &request.name, &why).because(cause))
}

/// Handles PUT.
///
/// # Errors
/// 400, 404, 409, 422, and the refusals of the rules.
pub fn update(core: &mut Core, request: &mut Request, kind: &'static Kind) -> Result<Answer, Refusal> {
    let mut new = body(request, kind)?;
    same_place(request, &mut new)?;
    let Some(old) = core.get(&request.resource, &request.namespace, &request.name) else {
        return put_missing(core, request, kind, &new);
    };
    let metadata = |field: &str| new["metadata"][field].as_str().filter(|text| !text.is_empty());
    if let Some(uid) = metadata("uid")
        && old["metadata"]["uid"] != uid
    {
        return Err(precondition(request, kind, uid, old["metadata"]["uid"].as_str().unwrap_or_default()));
    }
    match metadata("resourceVersion").filter(|rv| *rv != "0") {
        Some(rv) if old["metadata"]["resourceVersion"] != rv => {
            return Err(Refusal::modified(&request.resource, &request.name));
        }
        None if !kind.is_unconditional => {
            let mut cause = Cause::invalid("metadata.resourceVersion", &json!(0), "must be specified for an update");
            cause.message = "Invalid value: 0: must be specified for an update".to_owned();
            return Err(Refusal::invalid(&request.group_kind(), &request.name, vec![cause]));
        }
        _ => {}
    }
    change(core, request, kind, &old, new)
}

/// Checks that name and namespace of the body match the path; fills in a missing namespace.
fn same_place(request: &Request, new: &mut Value) -> Result<(), Refusal> {
    let metadata = &mut new["metadata"];
    let value = |field: &str| metadata[field].as_str().unwrap_or_default().to_owned();
    let (name, namespace) = (value("name"), value("namespace"));
    if name != request.name {
        let text = format!("the name of the object ({name}) does not match the name on the URL ({})", request.name);
        return Err(Refusal::bad_request(text));
    }
    if !namespace.is_empty() && namespace != request.namespace {
        let text = format!(
            "the namespace of the object ({namespace}) does not match the namespace on the request ({})",
            request.namespace
        );
        return Err(Refusal::bad_request(text));
    }
    if !request.namespace.is_empty() {
        metadata["namespace"] = json!(request.namespace);
    }
    Ok(())
}

fn put_missing(core: &mut Core, request: &mut Request, kind: &'static Kind, new: &Value) -> Result<Answer, Refusal> {
    if !kind.is_made_by_put || !request.subresource.is_empty() {
        return Err(Refusal::not_found(&request.resource, &request.name));
    }
    if let Some(uid) = new["metadata"]["uid"].as_str().filter(|uid| !uid.is_empty()) {
        return Err(precondition(request, kind, uid, ""));
    }
    let mut new = new.clone();
    if let Some(metadata) = new["metadata"].as_object_mut() {
        metadata.shift_remove("resourceVersion");
    }
    request.body = Some(new);
    create(core, request, kind)
}

fn precondition(request: &Request, kind: &Kind, requested: &str, stored: &str) -> Refusal {
    let parts = [kind.plural(), &request.namespace, &request.name];
    let place: Vec<&str> = parts.into_iter().filter(|part| !part.is_empty()).collect();
    let why = format!(
        "StorageError: invalid object, Code: 4, Key: /registry/{}, ResourceVersion: 0, AdditionalErrorMsg: Precondition \
         failed: UID in precondition: {requested}, UID in object meta: {stored}",
        place.join("/")
    );
    Refusal::conflict(&request.resource, &request.name, &why)
}

/// Handles PATCH.
///
/// # Errors
/// 400, 404, 409, 415, 422, 500, and the refusals of the rules.
pub fn patch(core: &mut Core, request: &mut Request, kind: &'static Kind) -> Result<Answer, Refusal> {
    let missing = || Refusal::not_found(&request.resource, &request.name);
    let old = core.get(&request.resource, &request.namespace, &request.name).ok_or_else(missing)?;
    let patch = request.body.as_ref().ok_or_else(|| Refusal::bad_request("the patch is not valid JSON"))?;
    let new = rules::apply_patch(&old, patch, kind.kind, &request.content_type)?;
    let (is, was) = (&new["metadata"], &old["metadata"]);
    if is["resourceVersion"] != was["resourceVersion"] && !is["resourceVersion"].is_null() {
        return Err(Refusal::modified(&request.resource, &request.name));
    }
    let mut causes = Vec::new();
    for field in ["name", "namespace", "uid", "deletionGracePeriodSeconds"] {
        if is[field] != was[field] && !is[field].is_null() {
            causes.push(Cause::invalid(&format!("metadata.{field}"), &is[field], "field is immutable"));
        }
    }
    if !causes.is_empty() {
        return Err(Refusal::invalid(&request.group_kind(), &request.name, causes));
    }
    change(core, request, kind, &old, new)
}

/// Common part of PUT and PATCH: guarded fields, rules, no-op check, removal after the last finalizer.
fn change(
    core: &mut Core,
    request: &Request,
    kind: &'static Kind,
    old: &Arc<Value>,
    mut new: Value,
) -> Result<Answer, Refusal> {
    guard(&request.subresource, kind, old, &mut new);
    rules::prepare_update(core, request, old, &mut new)?;
    new["metadata"]["resourceVersion"] = old["metadata"]["resourceVersion"].clone();
    let key: Key = (request.namespace.clone(), request.name.clone());
    if is_final(&new) && old["metadata"]["deletionGracePeriodSeconds"] == 0 {
        return Ok(Answer::new(200, core.remove(&request.resource, &key)));
    }
    if !is_same(old, &new) {
        core.manage(&request.caller, request, &mut new);
    }
    Ok(Answer::new(200, core.store(&request.resource, Some(old), new)))
}

/// Restores the fields that the request cannot change.
fn guard(subresource: &str, kind: &Kind, old: &Value, new: &mut Value) {
    if subresource == "status" {
        let (metadata, status) = (new["metadata"].take(), new.get("status").cloned());
        new.clone_from(old);
        new["metadata"] = metadata;
        set(new, "status", status);
    } else if kind.subresources.contains(&"status") && subresource != "approval" {
        set(new, "status", old.get("status").cloned());
    }
    for field in GUARDED {
        set(&mut new["metadata"], field, old["metadata"].get(field).cloned());
    }
    // Only the server writes managedFields.
    set(&mut new["metadata"], "managedFields", old["metadata"].get("managedFields").cloned());
}

fn set(object: &mut Value, field: &str, value: Option<Value>) {
    match (value, object.as_object_mut()) {
        (Some(value), Some(object)) => drop(object.insert(field.to_owned(), value)),
        (None, Some(object)) => drop(object.shift_remove(field)),
        (_, None) => {}
    }
}

/// Whether the object is being deleted and has no finalizers.
fn is_final(object: &Value) -> bool {
    let metadata = &object["metadata"];
    !metadata["deletionTimestamp"].is_null() && metadata["finalizers"].as_array().is_none_or(Vec::is_empty)
}

/// Handles DELETE of one object.
///
/// # Errors
/// 404, 409, and the refusals of the rules.
pub fn delete(core: &mut Core, request: &mut Request, kind: &'static Kind) -> Result<Answer, Refusal> {
    let missing = || Refusal::not_found(&request.resource, &request.name);
    let old = core.get(&request.resource, &request.namespace, &request.name).ok_or_else(missing)?;
    let effect = rules::delete(core, request, &old)?;
    let (last, is_gone) = carry_out(core, request, &old, effect);
    if kind.returns_deleted || !is_gone {
        return Ok(Answer::new(200, last));
    }
    let mut details = json!({"name": request.name, "kind": kind.plural(), "uid": old["metadata"]["uid"]});
    if !kind.group().is_empty() {
        details["group"] = json!(kind.group());
    }
    let status = json!({"kind": "Status", "apiVersion": "v1", "metadata": {}, "status": "Success", "details": details});
    Ok(Answer::new(200, status))
}

fn carry_out(core: &mut Core, request: &Request, old: &Arc<Value>, effect: DeleteEffect) -> (Arc<Value>, bool) {
    match effect {
        DeleteEffect::Nothing => (old.clone(), false),
        DeleteEffect::Update(new) => (core.store(&request.resource, Some(old), new), false),
        DeleteEffect::Remove(before) => {
            let mut last = old.clone();
            for object in before {
                last = core.store(&request.resource, Some(&last), object);
            }
            core.remove(&request.resource, &key(&last));
            (last, true)
        }
    }
}

/// Handles DELETE of a collection.
///
/// # Errors
/// The first refusal of a single DELETE.
pub fn delete_collection(core: &mut Core, request: &mut Request, kind: &'static Kind) -> Result<Answer, Refusal> {
    let filter =
        Filter { namespace: request.namespace.clone(), fields: request.fields.clone(), labels: request.labels.clone() };
    let mut items = Vec::new();
    for object in core.list(&request.resource).into_iter().filter(|object| filter.takes(object)) {
        let (namespace, name) = key(&object);
        let mut one = Request { verb: "delete", namespace, name, ..request.clone() };
        delete(core, &mut one, kind)?;
        items.push(object);
    }
    Ok(Answer::new(200, super::lists::envelope(kind, core.store.rv(), &items)))
}
