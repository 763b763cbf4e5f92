//! Downward API: fields and resources of a pod as text. Pure. Implements spec 02b §10.2, 07 §7.4.
//!
//! Serves environment variables ([`env_field`]) and volume files ([`volume_field`]); files support fewer fields, but
//! whole maps.

use std::{collections::BTreeMap, net::IpAddr};

use super::{Pod, api, names, quantity::Amount};

/// Error of reading a field or resource.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum FieldError {
    /// The API version is not `v1`.
    #[error("unsupported pod version: {0}")]
    Version(String),
    /// Environment variables do not support the field.
    #[error("field label not supported: {0}")]
    Label(String),
    /// The field does not support a subscript.
    #[error("field label does not support subscript: {0}")]
    Subscript(String),
    /// Volumes do not support the field.
    #[error("unsupported fieldPath: {0}")]
    Path(String),
    /// The subscript is not a valid key of a label or annotation.
    #[error("invalid key subscript in {path}: {complaints}")]
    Key {
        /// Complete field path.
        path: String,
        /// Validation errors, joined by `;`.
        complaints: String,
    },
    /// The node's addresses are unknown.
    #[error("host IP unknown; known addresses: []")]
    NoHostIp,
    /// The selected container does not exist.
    #[error("container {0} not found")]
    NoContainer(String),
    /// The resource is not supported.
    #[error("unsupported container resource : {0}")]
    Resource(String),
    /// A quantity in the pod or node, or the divisor, is malformed.
    #[error("invalid quantity of {0}")]
    Quantity(String),
}

/// Addresses and node name, which are not part of the pod spec.
#[derive(Clone, Copy, Debug, Default)]
pub struct NodeAddresses<'a> {
    /// Name of this node, for pods whose spec has none.
    pub node_name: &'a str,
    /// Host addresses, primary first.
    pub host_ips: &'a [IpAddr],
    /// Pod addresses in the order of spec 02b §6.1; empty where unknown.
    pub pod_ips: &'a [IpAddr],
}

/// Returns the value of an environment variable's `fieldRef`; empty for an absent label or annotation.
///
/// # Errors
/// The field or API version is not supported, the subscript is invalid, or the host addresses are unknown.
pub fn env_field(pod: &Pod, selector: &api::ObjectFieldSelector, at: NodeAddresses<'_>) -> Result<String, FieldError> {
    let path = selector.field_path.as_str();
    if let Some(version) = selector.api_version.as_deref().filter(|v| !matches!(*v, "" | "v1")) {
        return Err(FieldError::Version(version.to_owned()));
    }
    if let Some((map, _)) = split_subscript(path) {
        if !matches!(map, "metadata.annotations" | "metadata.labels") {
            return Err(FieldError::Subscript(path.to_owned()));
        }
        return volume_field(pod, path);
    }
    let spec = pod.spec();
    Ok(match path {
        "spec.nodeName" | "spec.host" => {
            spec.node_name.clone().filter(|name| !name.is_empty()).unwrap_or_else(|| at.node_name.to_owned())
        }
        "spec.serviceAccountName" => spec.service_account_name.clone().unwrap_or_default(),
        "status.hostIP" => at.host_ips.first().ok_or(FieldError::NoHostIp)?.to_string(),
        "status.hostIPs" if at.host_ips.is_empty() => return Err(FieldError::NoHostIp),
        "status.hostIPs" => joined(at.host_ips),
        "status.podIP" => at.pod_ips.first().map(IpAddr::to_string).unwrap_or_default(),
        "status.podIPs" => joined(at.pod_ips),
        "metadata.annotations" | "metadata.labels" | "metadata.name" | "metadata.namespace" | "metadata.uid" => {
            return volume_field(pod, path);
        }
        "spec.restartPolicy" | "spec.schedulerName" | "status.phase" => return Err(FieldError::Path(path.to_owned())),
        _ => return Err(FieldError::Label(path.to_owned())),
    })
}

/// Returns the value of a downwardAPI volume's `fieldRef`; empty for an absent label or annotation. Maps become sorted
/// `key="value"` lines without a trailing newline.
///
/// # Errors
/// The field is not supported, or the subscript is invalid.
pub fn volume_field(pod: &Pod, path: &str) -> Result<String, FieldError> {
    if let Some((map, key)) = split_subscript(path) {
        let (entries, complaints) = match map {
            "metadata.annotations" => (pod.annotations(), names::qualified_name(&key.to_lowercase())),
            "metadata.labels" => (pod.labels(), names::qualified_name(key)),
            _ => return Err(FieldError::Path(path.to_owned())),
        };
        if !complaints.is_empty() {
            return Err(FieldError::Key { path: path.to_owned(), complaints: complaints.join(";") });
        }
        return Ok(entries.get(key).cloned().unwrap_or_default());
    }
    Ok(match path {
        "metadata.name" => pod.name().to_owned(),
        "metadata.namespace" => pod.namespace().to_owned(),
        "metadata.uid" => pod.uid().to_string(),
        "metadata.labels" => lines(pod.labels()),
        "metadata.annotations" => lines(pod.annotations()),
        _ => return Err(FieldError::Path(path.to_owned())),
    })
}

/// Returns the value of a `resourceFieldRef` in units of its divisor, rounded up.
///
/// `own` is the container that an empty `containerName` refers to (environment variables have one, volumes do not).
/// Limits of cpu, memory, and ephemeral storage that are unset or zero are the pod's, else the node's allocatable
/// amount.
///
/// # Errors
/// The container or resource does not exist, or a quantity is malformed.
pub fn resource_value(
    pod: &Pod,
    selector: &api::ResourceFieldSelector,
    own: Option<&api::Container>,
    allocatable: &BTreeMap<String, String>,
) -> Result<String, FieldError> {
    let name = selector.container_name.as_deref().unwrap_or_default();
    let container = match own {
        Some(own) if name.is_empty() || own.name == name => own,
        _ => pod.container(name).ok_or_else(|| FieldError::NoContainer(name.to_owned()))?.1,
    };
    let unsupported = || FieldError::Resource(selector.resource.clone());
    let (side, resource) = selector.resource.split_once('.').ok_or_else(unsupported)?;
    let standard = matches!(resource, "cpu" | "memory" | "ephemeral-storage");
    if !(standard || resource.starts_with("hugepages-")) {
        return Err(unsupported());
    }
    let amount = match side {
        "requests" => own_amount(container, Side::Requests, resource)?,
        "limits" => match own_amount(container, Side::Limits, resource)?.filter(|a| !a.is_zero()) {
            None if standard => fallback_limit(pod, resource, allocatable)?,
            own => own,
        },
        _ => return Err(unsupported()),
    };
    let divisor = match selector.divisor.as_ref() {
        None => None,
        Some(text) => Some(Amount::try_from(text).map_err(|_| FieldError::Quantity("divisor".to_owned()))?)
            .filter(|d| !d.is_zero()),
    };
    Ok(divided(amount, divisor, resource == "cpu").to_string())
}

#[derive(Clone, Copy)]
enum Side {
    Requests,
    Limits,
}

fn own_amount(container: &api::Container, side: Side, resource: &str) -> Result<Option<Amount>, FieldError> {
    amount_in(container.resources.as_ref(), side, resource)
}

fn amount_in(
    resources: Option<&api::ResourceRequirements>,
    side: Side,
    resource: &str,
) -> Result<Option<Amount>, FieldError> {
    let list = resources.and_then(|r| match side {
        Side::Requests => r.requests.as_ref(),
        Side::Limits => r.limits.as_ref(),
    });
    list.and_then(|l| l.get(resource))
        .map(|q| Amount::try_from(q).map_err(|_| FieldError::Quantity(resource.to_owned())))
        .transpose()
}

fn fallback_limit(
    pod: &Pod,
    resource: &str,
    allocatable: &BTreeMap<String, String>,
) -> Result<Option<Amount>, FieldError> {
    let of_pod = amount_in(pod.spec().resources.as_ref(), Side::Limits, resource)?.filter(|a| !a.is_zero());
    if of_pod.is_some() {
        return Ok(of_pod);
    }
    allocatable
        .get(resource)
        .map(|text| Amount::parse(text).map_err(|_| FieldError::Quantity(resource.to_owned())))
        .transpose()
}

/// Divides an amount, rounding up; cpu in thousandths, everything else in whole units.
fn divided(amount: Option<Amount>, divisor: Option<Amount>, in_milli: bool) -> i64 {
    let unit = |a: Amount| i128::from(if in_milli { a.milli() } else { a.value() });
    let value = amount.map_or(0, unit);
    let by = divisor.map_or(if in_milli { 1000 } else { 1 }, unit).max(1);
    let up = value.div_euclid(by) + i128::from(value.rem_euclid(by) != 0);
    i64::try_from(up).unwrap_or(i64::MAX)
}

/// Splits `path['key']` into path and key.
fn split_subscript(path: &str) -> Option<(&str, &str)> {
    let (map, key) = path.strip_suffix("']")?.split_once("['")?;
    if map.is_empty() { None } else { Some((map, key)) }
}

fn joined(ips: &[IpAddr]) -> String {
    ips.iter().map(IpAddr::to_string).collect::<Vec<_>>().join(",")
}

fn lines(map: &BTreeMap<String, String>) -> String {
    map.iter().map(|(key, value)| format!("{key}={}", quoted(value))).collect::<Vec<_>>().join("\n")
}

/// Quotes a text as Go's `%q` does, for error texts and downward API files.
pub fn quoted(text: &str) -> String {
    let mut out = String::with_capacity(text.len() + 2);
    out.push('"');
    for c in text.chars() {
        match c {
            '"' | '\\' => {
                out.push('\\');
                out.push(c);
            }
            '\u{7}' => out.push_str("\\a"),
            '\u{8}' => out.push_str("\\b"),
            '\u{c}' => out.push_str("\\f"),
            '\n' => out.push_str("\\n"),
            '\r' => out.push_str("\\r"),
            '\t' => out.push_str("\\t"),
            '\u{b}' => out.push_str("\\v"),
            c if is_printable(c) => out.push(c),
            c if c < ' ' || c == '\u{7f}' => out.push_str(&format!("\\x{:02x}", u32::from(c))),
            c if u32::from(c) < 0x1_0000 => out.push_str(&format!("\\u{:04x}", u32::from(c))),
            c => out.push_str(&format!("\\U{:08x}", u32::from(c))),
        }
    }
    out.push('"');
    out
}

/// Whether a character is printable: a letter, mark, number, punctuation, symbol, or the ASCII space. The standard
/// library reveals this only by its escapes, and escapes a combining mark only at the start of a text.
fn is_printable(c: char) -> bool {
    c == '\'' || ["a", c.encode_utf8(&mut [0; 4])].concat().escape_debug().count() == 2
}

#[cfg(test)]
mod tests {
    use super::*;

    fn pod() -> Pod {
        Pod::new(
            serde_json::from_value(serde_json::json!({
                "metadata": {"name": "p", "namespace": "n", "uid": "u", "labels": {"b": "x\"y", "a": "1\n2"},
                             "annotations": {"Some/Key": "v"}},
                "spec": {
                    "serviceAccountName": "sa",
                    "containers": [{"name": "c", "resources": {
                        "limits": {"cpu": "1500m", "hugepages-2Mi": "4Mi"}, "requests": {"memory": "100Mi"}}}],
                    "initContainers": [{"name": "i", "resources": {"requests": {"cpu": "250m"}}}],
                },
            }))
            .expect("a pod"),
        )
        .expect("complete")
    }

    fn env(path: &str) -> Result<String, String> {
        let ips: Vec<IpAddr> = ["10.0.0.1", "fd00::1"].map(|ip| ip.parse().expect("an address")).into();
        let at = NodeAddresses { node_name: "node", host_ips: &ips[..1], pod_ips: &ips };
        let selector = api::ObjectFieldSelector { api_version: None, field_path: path.to_owned() };
        env_field(&pod(), &selector, at).map_err(|e| e.to_string())
    }

    #[test]
    fn fields_of_environment_variables() {
        for (path, value) in [
            ("metadata.name", "p"),
            ("metadata.namespace", "n"),
            ("metadata.uid", "u"),
            ("metadata.labels['b']", "x\"y"),
            ("metadata.labels['missing']", ""),
            ("metadata.annotations['Some/Key']", "v"),
            ("spec.nodeName", "node"),
            ("spec.host", "node"),
            ("spec.serviceAccountName", "sa"),
            ("status.hostIP", "10.0.0.1"),
            ("status.hostIPs", "10.0.0.1"),
            ("status.podIP", "10.0.0.1"),
            ("status.podIPs", "10.0.0.1,fd00::1"),
        ] {
            assert_eq!(env(path), Ok(value.to_owned()), "{path}");
        }
    }

    #[test]
    fn unknown_fields_are_refused_by_name() {
        for (path, text) in [
            ("spec.foo", "field label not supported: spec.foo"),
            ("spec.nodeName['x']", "field label does not support subscript: spec.nodeName['x']"),
            ("status.phase", "unsupported fieldPath: status.phase"),
        ] {
            assert_eq!(env(path), Err(text.to_owned()));
        }
        assert!(
            env("metadata.labels['a b']").unwrap_err().starts_with("invalid key subscript in metadata.labels['a b']: ")
        );
        assert_eq!(volume_field(&pod(), "status.podIP"), Err(FieldError::Path("status.podIP".to_owned())));
        let other =
            api::ObjectFieldSelector { api_version: Some("v2".to_owned()), field_path: "metadata.name".to_owned() };
        assert_eq!(env_field(&pod(), &other, NodeAddresses::default()), Err(FieldError::Version("v2".to_owned())));
        assert_eq!(
            env_field(
                &pod(),
                &api::ObjectFieldSelector { api_version: None, field_path: "status.hostIP".to_owned() },
                NodeAddresses::default()
            ),
            Err(FieldError::NoHostIp)
        );
    }

    #[test]
    fn maps_are_sorted_quoted_lines() {
        assert_eq!(volume_field(&pod(), "metadata.labels").as_deref(), Ok("a=\"1\\n2\"\nb=\"x\\\"y\""));
    }

    #[test]
    fn texts_are_quoted_as_the_reference_does() {
        assert_eq!(
            quoted("a'b\u{1}\u{7f}\u{85}\u{200b}é\u{301}\u{1f600}\u{e0001}"),
            "\"a'b\\x01\\x7f\\u0085\\u200bé\u{301}\u{1f600}\\U000e0001\""
        );
    }

    fn resource(container: &str, resource: &str, divisor: &str) -> Result<String, String> {
        let selector = serde_json::from_value(
            serde_json::json!({"containerName": container, "resource": resource, "divisor": divisor}),
        )
        .expect("a selector");
        let pod = pod();
        let allocatable = [("memory", "8Gi"), ("cpu", "4"), ("ephemeral-storage", "10k")]
            .map(|(k, v)| (k.to_owned(), v.to_owned()))
            .into();
        resource_value(&pod, &selector, pod.containers().first(), &allocatable).map_err(|e| e.to_string())
    }

    #[test]
    fn resources_are_divided_and_rounded_up() {
        for (container, name, divisor, value) in [
            ("", "limits.cpu", "1", "2"), // AC-02b-20
            ("c", "limits.cpu", "1m", "1500"),
            ("c", "limits.cpu", "0", "2"),
            ("c", "requests.memory", "1Mi", "100"),
            ("c", "requests.memory", "1Gi", "1"),
            ("c", "limits.memory", "1Gi", "8"),
            ("c", "limits.ephemeral-storage", "1k", "10"),
            ("c", "limits.hugepages-2Mi", "1Mi", "4"),
            ("c", "requests.hugepages-2Mi", "1", "0"),
            ("i", "requests.cpu", "1", "1"),
            ("i", "requests.cpu", "1m", "250"),
            ("i", "limits.cpu", "1", "4"),
        ] {
            assert_eq!(resource(container, name, divisor), Ok(value.to_owned()), "{container} {name} {divisor}");
        }
        assert_eq!(resource("x", "limits.cpu", "1"), Err("container x not found".to_owned()));
        for bad in ["limits.gpu", "cpu", "other.cpu"] {
            assert_eq!(resource("c", bad, "1"), Err(format!("unsupported container resource : {bad}")));
        }
    }
}
