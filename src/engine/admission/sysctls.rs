//! Admission handler for sysctls: allowlist of safe and explicitly allowed unsafe sysctls.
//!
//! Pure. Implements spec 02a §6.1, 06 §6.

use std::{collections::BTreeMap, sync::LazyLock};

use regex_lite::Regex;

use super::{Admission, AdmissionRejection, AdmitInput};

/// Longest sysctl name that the API accepts, in characters.
const MAX_LENGTH: usize = 253;
const PATTERN: &str = r"([a-z0-9]([-_a-z0-9]*[a-z0-9])?[\./])*([a-z0-9][-_a-z0-9]*)?[a-z0-9*]";

/// Safe sysctls, each with the kernel version since which it is namespaced.
const SAFE: &[(&str, Option<(u32, u32)>)] = &[
    ("kernel.shm_rmid_forced", None),
    ("net.ipv4.ip_local_port_range", None),
    ("net.ipv4.tcp_syncookies", None),
    ("net.ipv4.ping_group_range", None),
    ("net.ipv4.ip_unprivileged_port_start", None),
    ("net.ipv4.ip_local_reserved_ports", Some((3, 16))),
    ("net.ipv4.tcp_keepalive_time", Some((4, 5))),
    ("net.ipv4.tcp_keepalive_intvl", Some((4, 5))),
    ("net.ipv4.tcp_keepalive_probes", Some((4, 5))),
    ("net.ipv4.tcp_fin_timeout", Some((4, 6))),
    ("net.ipv4.tcp_rmem", Some((4, 15))),
    ("net.ipv4.tcp_wmem", Some((4, 15))),
];

#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Namespace {
    Ipc,
    Net,
}

/// A pattern of `allowedUnsafeSysctls` is invalid; the agent does not start.
#[derive(Clone, PartialEq, Eq, Debug, thiserror::Error)]
pub enum SysctlError {
    /// The pattern is too long or malformed.
    #[error("sysctl {0:?} must have at most {MAX_LENGTH} characters and match regex {PATTERN}")]
    Malformed(String),
    /// The sysctl is not namespaced: setting it in a pod would change it for the whole machine.
    #[error("the sysctls {0:?} are not known to be namespaced")]
    NotNamespaced(String),
}

/// Allowlist of sysctls: the safe ones and those that the operator allowed.
#[derive(Clone, PartialEq, Eq, Debug, Default)]
pub struct Allowlist {
    exact: BTreeMap<String, Namespace>,
    prefixes: Vec<(String, Namespace)>,
}

impl Allowlist {
    /// Builds the allowlist from the kernel version (major, minor; `None` if it cannot be read) and
    /// `allowedUnsafeSysctls`.
    ///
    /// # Errors
    /// Names the first pattern that is malformed or not namespaced.
    pub fn new(kernel: Option<(u32, u32)>, allowed: &[String]) -> Result<Self, SysctlError> {
        let is_safe = |since: Option<(u32, u32)>| since.is_none_or(|min| kernel.is_some_and(|own| own >= min));
        let safe = SAFE.iter().filter(|(_, since)| is_safe(*since));
        let exact = safe.filter_map(|(name, _)| Some(((*name).to_owned(), namespace(name)?))).collect();
        let mut list = Self { exact, prefixes: Vec::new() };
        for pattern in allowed {
            list.add(pattern)?;
        }
        Ok(list)
    }

    fn add(&mut self, pattern: &str) -> Result<(), SysctlError> {
        static VALID: LazyLock<Regex> =
            LazyLock::new(|| Regex::new(&format!("^{PATTERN}$")).expect("constant pattern is a valid regex"));
        if pattern.len() > MAX_LENGTH || !VALID.is_match(pattern) {
            return Err(SysctlError::Malformed(pattern.to_owned()));
        }
        let name = normalize(pattern);
        let unknown = || SysctlError::NotNamespaced(pattern.to_owned());
        match name.split_once('*') {
            Some((stem, _)) => self.prefixes.push((stem.to_owned(), namespace(stem).ok_or_else(unknown)?)),
            None => {
                let namespace = namespace(&name).filter(|_| !is_stem(&name)).ok_or_else(unknown)?;
                self.exact.insert(name, namespace);
            }
        }
        Ok(())
    }

    fn find(&self, name: &str) -> Option<Namespace> {
        let by_prefix = || self.prefixes.iter().find(|(stem, _)| name.starts_with(stem)).map(|(_, ns)| *ns);
        self.exact.get(name).copied().or_else(by_prefix)
    }
}

/// Converts a sysctl name to dots as separators: where the first separator is a slash, slashes become
/// dots and dots become slashes (`net/ipv4/conf/eth0.1/x` → `net.ipv4.conf.eth0/1.x`).
pub fn normalize(name: &str) -> String {
    match name.find(['.', '/']).and_then(|i| name.get(i..)) {
        Some(rest) if rest.starts_with('/') => name
            .chars()
            .map(|c| {
                if c == '/' {
                    '.'
                } else if c == '.' {
                    '/'
                } else {
                    c
                }
            })
            .collect(),
        _ => name.to_owned(),
    }
}

pub(super) fn check(input: &AdmitInput<'_>, _: &mut Admission) -> Result<(), AdmissionRejection> {
    let spec = input.pod.spec();
    let forbidden = |text: String| Err(AdmissionRejection::new("SysctlForbidden", format!("forbidden sysctl: {text}")));
    for sysctl in spec.security_context.iter().flat_map(|s| s.sysctls.iter().flatten()) {
        let name = normalize(&sysctl.name);
        let shared = match input.rules.sysctls.find(&name) {
            None => return forbidden(format!("{name:?} not allowlisted")),
            Some(Namespace::Net) => (spec.host_network == Some(true)).then_some("Net"),
            Some(Namespace::Ipc) => (spec.host_ipc == Some(true)).then_some("IPC"),
        };
        if let Some(shared) = shared {
            return forbidden(format!("{name:?} not allowed with host {shared} enabled"));
        }
    }
    Ok(())
}

/// Whether the name is the stem of the pattern `kernel.shm*` or `kernel.msg*`.
fn is_stem(name: &str) -> bool {
    matches!(name, "kernel.shm" | "kernel.msg")
}

fn namespace(name: &str) -> Option<Namespace> {
    const IPC: &[&str] = &[
        "kernel.sem",
        "kernel.shmall",
        "kernel.shmmax",
        "kernel.shmmni",
        "kernel.shm_rmid_forced",
        "kernel.msgmax",
        "kernel.msgmnb",
        "kernel.msgmni",
    ];
    if name.starts_with("net.") {
        Some(Namespace::Net)
    } else if IPC.contains(&name) || is_stem(name) || name.starts_with("fs.mqueue.") {
        Some(Namespace::Ipc)
    } else {
        None
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn allowed(kernel: Option<(u32, u32)>, patterns: &[&str], name: &str) -> bool {
        let patterns: Vec<String> = patterns.iter().map(|p| (*p).to_owned()).collect();
        Allowlist::new(kernel, &patterns).expect("sound patterns").find(name).is_some()
    }

    #[test]
    fn the_safe_list_grows_with_the_kernel() {
        for (kernel, name, safe) in [
            (Some((6, 1)), "net.ipv4.tcp_rmem", true),
            (Some((4, 14)), "net.ipv4.tcp_rmem", false), // AC-06-12
            (Some((4, 15)), "net.ipv4.tcp_wmem", true),
            (Some((4, 5)), "net.ipv4.tcp_fin_timeout", false),
            (Some((4, 5)), "net.ipv4.tcp_keepalive_time", true),
            (Some((3, 16)), "net.ipv4.ip_local_reserved_ports", true),
            (None, "net.ipv4.ip_local_reserved_ports", false),
            (None, "kernel.shm_rmid_forced", true),
            (Some((6, 1)), "kernel.msgmax", false),
        ] {
            assert_eq!(allowed(kernel, &[], name), safe, "{kernel:?} {name}");
        }
    }

    #[test]
    fn patterns_allow_more() {
        assert!(allowed(None, &["kernel.msg*"], "kernel.msgmax"));
        assert!(allowed(None, &["net.core.somaxconn"], "net.core.somaxconn"));
        assert!(!allowed(None, &["net.core.somaxconn"], "net.core.somaxconn2"));
        assert!(allowed(None, &["net/ipv4/conf/*"], "net.ipv4.conf.eth0/1.x"));
        assert!(allowed(None, &["fs.mqueue.*"], "fs.mqueue.msg_max"));
    }

    #[test]
    fn patterns_must_be_namespaced_and_well_formed() {
        let error = |pattern: &str| Allowlist::new(None, &[pattern.to_owned()]).map(|_| ()).map_err(|e| e.to_string());
        let unknown = |p: &str| Err(format!("the sysctls {p:?} are not known to be namespaced"));
        assert_eq!(error("kernel.shm_x"), unknown("kernel.shm_x"));
        assert_eq!(error("kernel.*"), unknown("kernel.*"));
        assert_eq!(error("vm.swappiness"), unknown("vm.swappiness"));
        for pattern in ["", "Net.x", "net.*.x", "net..x", "-a", &"a".repeat(254)] {
            let text = error(pattern).expect_err(pattern);
            assert!(text.ends_with(&format!("must have at most 253 characters and match regex {PATTERN}")), "{text}");
        }
        for pattern in ["kernel.shm*", "net.*", "net/ipv4/conf/eth0.1/x"] {
            assert_eq!(error(pattern), Ok(()), "{pattern}");
        }
    }

    #[test]
    fn names_are_normalised_to_dots() {
        for (name, normal) in [
            ("kernel.shm_rmid_forced", "kernel.shm_rmid_forced"),
            ("kernel/shm_rmid_forced", "kernel.shm_rmid_forced"),
            ("net/ipv4/conf/eth0.1/x", "net.ipv4.conf.eth0/1.x"),
            ("net.ipv4.conf.eth0/1.x", "net.ipv4.conf.eth0/1.x"),
            ("plain", "plain"),
        ] {
            assert_eq!(normalize(name), normal);
        }
    }
}
