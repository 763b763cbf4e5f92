//! Validation rules shared by many fields: names, ports, addresses, paths, IDs, file modes. Pure.

use std::net::{IpAddr, Ipv4Addr};

use k8s_openapi::apimachinery::pkg::util::intstr::IntOrString;

use super::field::{FieldErrors, Path};
use berth_types::names;

/// Error text of a port number out of range.
const PORT_RANGE: &str = "must be between 1 and 65535, inclusive";
const SEARCH_DOMAIN: &str = "a lowercase RFC 1123 subdomain must consist of lower case alphanumeric characters, '_', '-' \
                             or '.', and must start and end with an alphanumeric character (e.g. 'example.com', regex \
                             used for validation is \
                             '_?[a-z0-9]([-_a-z0-9]*[a-z0-9])?(\\._?[a-z0-9]([-_a-z0-9]*[a-z0-9])?)*')";
const CONFIG_MAP_KEY: &str = "a valid config key must consist of alphanumeric characters, '-', '_' or '.' (e.g. \
                              'key.name',  or 'KEY_NAME',  or 'key-name', regex used for validation is \
                              '[-._a-zA-Z0-9]+')";

/// Checks a port number.
pub fn port(number: i32, at: &Path, errors: &mut FieldErrors) {
    if !(1..=65535).contains(&number) {
        errors.invalid(at, number, PORT_RANGE);
    }
}

/// Checks a port number or the name of a port.
pub fn port_or_name(value: &IntOrString, at: &Path, errors: &mut FieldErrors) {
    match value {
        IntOrString::Int(number) => port(*number, at, errors),
        IntOrString::String(name) => errors.complaints(at, name, names::port_name(name)),
    }
}

/// Checks an IP address by the strict rules (gate `StrictIPCIDRValidation`, on by default).
pub fn ip_address(text: &str, at: &Path, errors: &mut FieldErrors) {
    match text.parse::<IpAddr>() {
        Ok(IpAddr::V6(address)) if address.to_ipv4_mapped().is_some() => {
            errors.invalid(at, text, "must not be an IPv4-mapped IPv6 address");
        }
        Ok(_) => {}
        Err(_) if is_ipv4_with_leading_zeros(text) => errors.invalid(at, text, "must not have leading 0s"),
        Err(_) => errors.invalid(at, text, "must be a valid IP address, (e.g. 10.9.8.7 or 2001:db8::ffff)"),
    }
}

fn is_ipv4_with_leading_zeros(text: &str) -> bool {
    let octet = |octet: &str| match octet.trim_start_matches('0') {
        "" if !octet.is_empty() => "0".to_owned(),
        rest => rest.to_owned(),
    };
    let plain: Vec<String> = text.split('.').map(octet).collect();
    plain.join(".").parse::<Ipv4Addr>().is_ok()
}

/// Complaints about the prefix of a generated name: a DNS subdomain that may end with a dash.
pub fn name_prefix(text: &str) -> Vec<String> {
    match text.strip_suffix('-').filter(|rest| !rest.is_empty()) {
        Some(rest) => {
            let mut kept = rest.chars();
            kept.next_back();
            names::dns_subdomain(&format!("{}a", kept.as_str()))
        }
        None => names::dns_subdomain(text),
    }
}

/// Complaints about a search domain: a DNS subdomain that may contain underscores.
pub fn search_domain(text: &str) -> Vec<String> {
    let mut complaints = Vec::new();
    if text.len() > names::SUBDOMAIN_MAX {
        complaints.push(format!("must be no more than {} bytes", names::SUBDOMAIN_MAX));
    }
    let alphanumeric = |b: u8| b.is_ascii_lowercase() || b.is_ascii_digit();
    let is_label = |label: &str| {
        let bytes = label.strip_prefix('_').unwrap_or(label).as_bytes();
        let ends = matches!((bytes.first(), bytes.last()), (Some(&a), Some(&b)) if alphanumeric(a) && alphanumeric(b));
        ends && bytes.iter().all(|&b| alphanumeric(b) || matches!(b, b'-' | b'_'))
    };
    if !text.split('.').all(is_label) {
        complaints.push(SEARCH_DOMAIN.to_owned());
    }
    complaints
}

/// Complaints about a key of a ConfigMap or Secret.
pub fn config_map_key(key: &str) -> Vec<String> {
    let mut complaints = Vec::new();
    if key.len() > names::SUBDOMAIN_MAX {
        complaints.push(format!("must be no more than {} bytes", names::SUBDOMAIN_MAX));
    }
    let is_allowed = |b: u8| b.is_ascii_alphanumeric() || matches!(b, b'-' | b'.' | b'_');
    if key.is_empty() || !key.bytes().all(is_allowed) {
        complaints.push(CONFIG_MAP_KEY.to_owned());
    }
    match key {
        "." => complaints.push("must not be '.'".to_owned()),
        ".." => complaints.push("must not be '..'".to_owned()),
        _ if key.starts_with("..") => complaints.push("must not start with '..'".to_owned()),
        _ => {}
    }
    complaints
}

/// Checks a relative path that does not leave its base.
pub fn descending_path(path: &str, at: &Path, errors: &mut FieldErrors) {
    if path.starts_with('/') {
        errors.invalid(at, path, "must be a relative path");
    }
    no_backsteps(path, at, errors);
}

/// Checks a path without `..`.
pub fn no_backsteps(path: &str, at: &Path, errors: &mut FieldErrors) {
    if has_backsteps(path) {
        errors.invalid(at, path, "must not contain '..'");
    }
}

/// Whether `..` is an element of the path.
pub fn has_backsteps(path: &str) -> bool {
    path.split('/').any(|part| part == "..")
}

/// Checks the path of a file in an atomic volume: descending, and not in the namespace of its own
/// links.
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

/// Checks a file mode.
pub fn file_mode(mode: Option<i32>, at: &Path, errors: &mut FieldErrors) {
    if let Some(mode) = mode.filter(|mode| !(0..=0o777).contains(mode)) {
        errors.invalid(at, mode, "must be a number between 0 and 0777 (octal), both inclusive");
    }
}

/// Checks a user or group ID.
pub fn id(id: Option<i64>, at: &Path, errors: &mut FieldErrors) {
    if let Some(id) = id.filter(|id| !(0..=i64::from(i32::MAX)).contains(id)) {
        errors.invalid(at, id, "must be between 0 and 2147483647, inclusive");
    }
}
