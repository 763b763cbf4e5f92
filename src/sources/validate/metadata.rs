//! Names, labels and annotations. Pure.

use std::collections::BTreeMap;

use k8s_openapi::apimachinery::pkg::apis::meta::v1::ObjectMeta;

use super::field::{FieldErrors, Path};
use crate::pod::names;

/// Keys and values of all annotations together, bytes.
const ANNOTATIONS_LIMIT: usize = 256 * 1024;

/// Checks an object's metadata.
pub fn check(meta: &ObjectMeta, errors: &mut FieldErrors) {
    let at = Path::root("metadata");
    let required = |errors: &mut FieldErrors,
                    field: &str,
                    value: &Option<String>,
                    complaints: fn(&str) -> Vec<String>| {
        match value.as_deref().unwrap_or_default() {
            "" => errors.required(&at.child(field), ""),
            value => errors.complaints(&at.child(field), value, complaints(value)),
        }
    };
    required(errors, "name", &meta.name, names::dns_subdomain);
    required(errors, "namespace", &meta.namespace, names::dns_label);
    // The reference does not look at it, but it becomes the name of directories.
    let uid = meta.uid.as_deref().unwrap_or_default();
    if matches!(uid, "." | "..") || uid.contains(['/', '\0']) {
        errors.invalid(&at.child("uid"), uid, "must not be '.' or '..' and must not contain '/'");
    }
    errors.not_negative(&at.child("generation"), meta.generation);
    labels(meta.labels.as_ref(), &at.child("labels"), errors);
    annotations(meta.annotations.as_ref(), &at.child("annotations"), errors);
}

/// Checks the keys and values of labels (or of a node selector).
pub fn labels(labels: Option<&BTreeMap<String, String>>, at: &Path, errors: &mut FieldErrors) {
    for (key, value) in labels.into_iter().flatten() {
        errors.complaints(at, key, names::qualified_name(key));
        errors.complaints(at, value, names::label_value(value));
    }
}

fn annotations(annotations: Option<&BTreeMap<String, String>>, at: &Path, errors: &mut FieldErrors) {
    let mut size = 0_usize;
    for (key, value) in annotations.into_iter().flatten() {
        errors.complaints(at, key, names::qualified_name(&key.to_lowercase()));
        size = size.saturating_add(key.len()).saturating_add(value.len());
    }
    if size > ANNOTATIONS_LIMIT {
        errors.too_long(at, ANNOTATIONS_LIMIT);
    }
}
