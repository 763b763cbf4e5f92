//! Hostname and domain of a pod, as its containers see them. Pure. Implements spec 02b §10.6, 03a §5.1.

use super::{Pod, names};

/// Maximum length of a hostname, bytes: the kernel's 64 less the terminating zero.
const HOSTNAME_MAX: usize = 63;
/// Maximum length of a fully qualified name that fits the kernel's node name, bytes.
const FQDN_MAX: usize = 64;

/// Hostname and domain of a pod.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct HostName {
    /// Hostname, at most 63 bytes.
    pub name: String,
    /// Domain `<subdomain>.<namespace>.svc.<cluster domain>`; `None` without a subdomain.
    pub domain: Option<String>,
}

/// Error of determining a pod's hostname.
#[derive(Clone, PartialEq, Eq, Debug, thiserror::Error)]
pub enum HostNameError {
    /// A field of the pod spec is not a DNS name.
    #[error("pod {field} {value:?} is not a valid DNS {kind}: {complaints}")]
    Invalid {
        /// `HostnameOverride`, `Hostname` or `Subdomain`.
        field: &'static str,
        /// Value of the field.
        value: String,
        /// `label` or `subdomain`.
        kind: &'static str,
        /// Validation errors, joined by `;`.
        complaints: String,
    },
    /// The hostname is empty after truncation.
    #[error("hostname for pod {pod:?} was invalid: {name:?}")]
    Empty {
        /// Name of the pod.
        pod: String,
        /// Hostname before truncation.
        name: String,
    },
    /// The fully qualified name is too long.
    #[error(
        "failed to construct FQDN from pod hostname and cluster domain, FQDN {0} is too long (64 characters is the \
         max, {len} characters requested)",
        len = .0.len()
    )]
    FqdnTooLong(String),
}

impl HostName {
    /// Determines hostname and domain of a pod.
    ///
    /// # Errors
    /// A name in the pod spec is not a DNS name, or the hostname is empty after truncation.
    pub fn of(pod: &Pod, cluster_domain: &str) -> Result<Self, HostNameError> {
        let spec = pod.spec();
        if let Some(name) = spec.hostname_override.as_deref() {
            check("HostnameOverride", name, "subdomain", names::dns_subdomain(name))?;
            return Ok(Self { name: cut(pod, name)?, domain: None });
        }
        let name = match spec.hostname.as_deref().filter(|n| !n.is_empty()) {
            Some(name) => {
                check("Hostname", name, "label", names::dns_label(name))?;
                name
            }
            None => pod.name(),
        };
        let domain = match spec.subdomain.as_deref().filter(|s| !s.is_empty()) {
            Some(subdomain) => {
                check("Subdomain", subdomain, "label", names::dns_label(subdomain))?;
                Some(format!("{subdomain}.{}.svc.{cluster_domain}", pod.namespace()))
            }
            None => None,
        };
        Ok(Self { name: cut(pod, name)?, domain })
    }

    /// Returns the hostname to set in the sandbox's kernel: the fully qualified name if the pod requests it
    /// (`setHostnameAsFQDN`) and has a domain.
    ///
    /// # Errors
    /// The fully qualified name is longer than 64 bytes.
    pub fn kernel_name(&self, set_as_fqdn: bool) -> Result<String, HostNameError> {
        match &self.domain {
            Some(domain) if set_as_fqdn => {
                let full = format!("{}.{domain}", self.name);
                if full.len() > FQDN_MAX { Err(HostNameError::FqdnTooLong(full)) } else { Ok(full) }
            }
            _ => Ok(self.name.clone()),
        }
    }
}

fn check(field: &'static str, value: &str, kind: &'static str, complaints: Vec<String>) -> Result<(), HostNameError> {
    if complaints.is_empty() {
        return Ok(());
    }
    Err(HostNameError::Invalid { field, value: value.to_owned(), kind, complaints: complaints.join(";") })
}

/// Truncates to 63 bytes; a truncated name does not end with `-` or `.`.
fn cut(pod: &Pod, name: &str) -> Result<String, HostNameError> {
    if name.len() <= HOSTNAME_MAX {
        return Ok(name.to_owned());
    }
    let short = super::cut_at_char(name, HOSTNAME_MAX).trim_end_matches(['-', '.']);
    if short.is_empty() {
        return Err(HostNameError::Empty { pod: pod.name().to_owned(), name: name.to_owned() });
    }
    Ok(short.to_owned())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn of(name: &str, spec: serde_json::Value) -> Result<(String, Option<String>), String> {
        let mut spec = spec;
        spec["containers"] = serde_json::json!([]);
        let object = serde_json::json!({"metadata": {"name": name, "namespace": "ns", "uid": "u"}, "spec": spec});
        let pod = Pod::new(serde_json::from_value(object).expect("a pod")).expect("complete");
        HostName::of(&pod, "cluster.local").map(|h| (h.name, h.domain)).map_err(|e| e.to_string())
    }

    #[test]
    fn names_come_from_the_override_the_field_or_the_pod() {
        use serde_json::json;
        let long = format!("{}-.x", "a".repeat(61));
        for (name, spec, host, domain) in [
            ("web", json!({}), "web", None),
            ("web", json!({"hostname": "h"}), "h", None),
            ("web", json!({"hostname": "h", "subdomain": "s"}), "h", Some("s.ns.svc.cluster.local")),
            ("web", json!({"hostname": "h", "subdomain": "s", "hostnameOverride": "a.b"}), "a.b", None),
            (long.as_str(), json!({}), &long[..61], None),
        ] {
            assert_eq!(of(name, spec.clone()), Ok((host.to_owned(), domain.map(str::to_owned))), "{name} {spec}");
        }
    }

    #[test]
    fn bad_names_are_refused() {
        use serde_json::json;
        for (spec, start) in [
            (json!({"hostname": "A"}), "pod Hostname \"A\" is not a valid DNS label: a lowercase RFC 1123 label must"),
            (json!({"subdomain": "a.b"}), "pod Subdomain \"a.b\" is not a valid DNS label: must not contain dots"),
            (json!({"hostnameOverride": "-"}), "pod HostnameOverride \"-\" is not a valid DNS subdomain: a lowercase"),
        ] {
            let error = of("web", spec.clone()).unwrap_err();
            assert!(error.starts_with(start), "{spec}: {error}");
        }
    }

    #[test]
    fn the_kernel_takes_64_bytes() {
        let host = HostName { name: "h".into(), domain: Some("d".repeat(62)) };
        assert_eq!(host.kernel_name(false).as_deref(), Ok("h"));
        assert_eq!(host.kernel_name(true).map(|n| n.len()), Ok(64));
        let host = HostName { name: "hh".into(), ..host };
        let error = host.kernel_name(true).unwrap_err().to_string();
        assert!(error.ends_with("is too long (64 characters is the max, 65 characters requested)"), "{error}");
    }
}
