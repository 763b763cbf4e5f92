//! Validates pod metadata: names, labels, annotations, owners, finalizers, managed fields. Pure.

use std::collections::BTreeMap;

use k8s_openapi::apimachinery::pkg::apis::meta::v1::{ManagedFieldsEntry, ObjectMeta, OwnerReference};

use super::{
    field::{FieldErrors, Path},
    names_and_numbers::name_prefix,
    tolerations,
};
use berth_types::names;

/// Maximum size of all annotation keys and values together, in bytes.
const ANNOTATIONS_LIMIT: usize = 256 * 1024;
/// Maximum length of a field manager's name, in bytes.
const FIELD_MANAGER_LIMIT: usize = 128;
/// Maximum length of a subresource's name, in bytes.
const SUBRESOURCE_LIMIT: usize = 256;
/// Finalizers that need no domain.
const STANDARD_FINALIZERS: [&str; 3] = ["foregroundDeletion", "kubernetes", "orphan"];
/// Annotation by which a ReplicaSet ranks its pods when it scales down.
const DELETION_COST: &str = "controller.kubernetes.io/pod-deletion-cost";

/// Checks an object's metadata.
pub fn check(meta: &ObjectMeta, errors: &mut FieldErrors) {
    let at = Path::root("metadata");
    let generated = meta.generate_name.as_deref().unwrap_or_default();
    if !generated.is_empty() {
        errors.complaints(&at.child("generateName"), generated, name_prefix(generated));
    }
    match meta.name.as_deref().unwrap_or_default() {
        "" => errors.required(&at.child("name"), "name or generateName is required"),
        name => errors.complaints(&at.child("name"), name, names::dns_subdomain(name)),
    }
    match meta.namespace.as_deref().unwrap_or_default() {
        "" => errors.required(&at.child("namespace"), ""),
        namespace => errors.complaints(&at.child("namespace"), namespace, names::dns_label(namespace)),
    }
    // The API server does not check it, but it becomes the name of directories.
    let uid = meta.uid.as_deref().unwrap_or_default();
    if matches!(uid, "." | "..") || uid.contains(['/', '\0']) {
        errors.invalid(&at.child("uid"), uid, "must not be '.' or '..' and must not contain '/'");
    }
    errors.not_negative(&at.child("generation"), meta.generation);
    labels(meta.labels.as_ref(), &at.child("labels"), errors);
    annotations(meta.annotations.as_ref(), &at.child("annotations"), errors);
    owner_references(meta.owner_references.as_deref().unwrap_or_default(), &at.child("ownerReferences"), errors);
    finalizers(meta.finalizers.as_deref().unwrap_or_default(), &at.child("finalizers"), errors);
    managed_fields(meta.managed_fields.as_deref().unwrap_or_default(), &at.child("managedFields"), errors);
}

/// Checks the keys and values of labels (or of a node selector).
pub fn labels(labels: Option<&BTreeMap<String, String>>, at: &Path, errors: &mut FieldErrors) {
    for (key, value) in labels.into_iter().flatten() {
        errors.complaints(at, key, names::qualified_name(key));
        errors.complaints(at, value, names::label_value(value));
    }
}

/// Checks keys, total size, and the values of annotations that are part of the pod API; profiles are in
/// `profiles.rs`.
fn annotations(annotations: Option<&BTreeMap<String, String>>, at: &Path, errors: &mut FieldErrors) {
    let mut size = 0_usize;
    for (key, value) in annotations.into_iter().flatten() {
        errors.complaints(at, key, names::qualified_name(&key.to_lowercase()));
        size = size.saturating_add(key.len()).saturating_add(value.len());
    }
    if size > ANNOTATIONS_LIMIT {
        errors.too_long(at, ANNOTATIONS_LIMIT);
    }
    let value = |key: &str| annotations.and_then(|all| all.get(key)).map(String::as_str);
    if let Some(text) = value(tolerations::ANNOTATION) {
        tolerations::annotation(text, at, errors);
    }
    if let Some(cost) = value(DELETION_COST).filter(|cost| !is_deletion_cost(cost)) {
        errors.invalid(&at.key(DELETION_COST), cost, "must be a 32bit integer");
    }
}

/// Whether the text is a 32-bit integer without a plus sign and without leading zeros.
fn is_deletion_cost(text: &str) -> bool {
    let starts_well = text == "0" || text.starts_with(|c: char| c == '-' || ('1'..='9').contains(&c));
    starts_well && text.parse::<i32>().is_ok()
}

fn owner_references(references: &[OwnerReference], at: &Path, errors: &mut FieldErrors) {
    let mut first_controller: Option<String> = None;
    for (i, one) in references.iter().enumerate() {
        let at_one = at.index(i);
        let (group, version) = match one.api_version.split_once('/') {
            None => ("", one.api_version.as_str()),
            Some((group, version)) if !version.contains('/') => (group, version),
            Some(_) => ("", ""),
        };
        if version.is_empty() {
            errors.invalid(&at_one.child("apiVersion"), &one.api_version, "version must not be empty");
        }
        for (member, value) in [("kind", &one.kind), ("name", &one.name), ("uid", &one.uid)] {
            if value.is_empty() {
                errors.invalid(&at_one.child(member), value, "must not be empty");
            }
        }
        if (group, version, one.kind.as_str()) == ("", "v1", "Event") {
            errors.invalid(&at_one, &one.name, "/v1, Kind=Event is disallowed from being an owner");
        }
        if one.controller == Some(true) {
            let controller = format!("{}/{}", one.kind, one.name);
            if let Some(first) = first_controller.as_deref() {
                let text = format!(
                    "Only one reference can have Controller set to true. Found \"true\" in references for {first} and \
                     {controller}"
                );
                errors.invalid(at, &controller, &text);
            } else {
                first_controller = Some(controller);
            }
        }
    }
}

fn finalizers(finalizers: &[String], at: &Path, errors: &mut FieldErrors) {
    for (i, one) in finalizers.iter().enumerate() {
        let at = at.index(i);
        errors.complaints(&at, one, names::qualified_name(one));
        if !(one.contains('/') || STANDARD_FINALIZERS.contains(&one.as_str())) {
            errors.invalid(&at, one, "name is neither a standard finalizer name nor is it fully qualified");
        }
    }
    let has = |name: &str| finalizers.iter().any(|one| one == name);
    if has("orphan") && has("foregroundDeletion") {
        errors.invalid(at, finalizers, "finalizer orphan and foregroundDeletion cannot be both set");
    }
}

fn managed_fields(entries: &[ManagedFieldsEntry], at: &Path, errors: &mut FieldErrors) {
    for (i, entry) in entries.iter().enumerate() {
        let at = at.index(i);
        let text = |value: &Option<String>| value.clone().unwrap_or_default();
        let operation = text(&entry.operation);
        if !matches!(operation.as_str(), "Apply" | "Update") {
            errors.invalid(&at.child("operation"), &operation, "must be `Apply` or `Update`");
        }
        let fields_type = text(&entry.fields_type);
        if !matches!(fields_type.as_str(), "" | "FieldsV1") {
            errors.invalid(&at.child("fieldsType"), &fields_type, "must be `FieldsV1`");
        }
        let manager = text(&entry.manager);
        if manager.len() > FIELD_MANAGER_LIMIT {
            errors.too_long(&at.child("manager"), FIELD_MANAGER_LIMIT);
        }
        for (position, c) in manager.char_indices().filter(|(_, c)| c.is_control()) {
            let text = format!("invalid character U+{:04X} (at position {position})", u32::from(c));
            errors.invalid(&at.child("manager"), &manager, &text);
        }
        if entry.subresource.as_ref().is_some_and(|name| name.len() > SUBRESOURCE_LIMIT) {
            errors.too_long(&at.child("subresource"), SUBRESOURCE_LIMIT);
        }
    }
}
