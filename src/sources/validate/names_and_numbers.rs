//! Checks that many fields share: ports, paths, IDs, file modes. Pure.

use k8s_openapi::apimachinery::pkg::util::intstr::IntOrString;

use super::field::{FieldErrors, Path};
use crate::pod::names;

/// The text of a port number out of range.
const PORT_RANGE: &str = "must be between 1 and 65535, inclusive";

/// A port number.
pub fn port(number: i32, at: &Path, errors: &mut FieldErrors) {
    if !(1..=65535).contains(&number) {
        errors.invalid(at, number, PORT_RANGE);
    }
}

/// A port number or the name of a port.
pub fn port_or_name(value: &IntOrString, at: &Path, errors: &mut FieldErrors) {
    match value {
        IntOrString::Int(number) => port(*number, at, errors),
        IntOrString::String(name) => errors.complaints(at, name, names::port_name(name)),
    }
}

/// A relative path that stays below where it starts.
pub fn descending_path(path: &str, at: &Path, errors: &mut FieldErrors) {
    if path.starts_with('/') {
        errors.invalid(at, path, "must be a relative path");
    }
    no_backsteps(path, at, errors);
}

/// A path without `..`.
pub fn no_backsteps(path: &str, at: &Path, errors: &mut FieldErrors) {
    if path.split('/').any(|part| part == "..") {
        errors.invalid(at, path, "must not contain '..'");
    }
}

/// The path of a file in an atomic volume: descending, and not in the space of its own links.
pub fn projected_path(path: &str, at: &Path, errors: &mut FieldErrors) {
    if path.is_empty() {
        errors.required(at, "");
        return;
    }
    descending_path(path, at, errors);
    if path.starts_with("..") && !path.starts_with("../") {
        errors.invalid(at, path, "must not start with '..'");
    }
}

/// A file mode.
pub fn file_mode(mode: Option<i32>, at: &Path, errors: &mut FieldErrors) {
    if let Some(mode) = mode.filter(|mode| !(0..=0o777).contains(mode)) {
        errors.invalid(at, mode, "must be a number between 0 and 0777 (octal), both inclusive");
    }
}

/// A user or group ID.
pub fn id(id: Option<i64>, at: &Path, errors: &mut FieldErrors) {
    if let Some(id) = id.filter(|id| !(0..=i64::from(i32::MAX)).contains(id)) {
        errors.invalid(at, id, "must be between 0 and 2147483647, inclusive");
    }
}
