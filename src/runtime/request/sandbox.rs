//! CRI sandbox configuration. Pure. Implements spec 03a §5.

use std::{collections::HashMap, path::Path};

use super::{container::pod_labels, ports, security, security::SecurityError};
use berth_proto::cri;
use berth_types::{
    Pod,
    hostname::{HostName, HostNameError},
};

/// Inputs of a sandbox configuration.
pub struct SandboxParts<'a> {
    /// Pod whose sandbox is configured.
    pub pod: &'a Pod,
    /// `metadata.attempt`.
    pub attempt: u32,
    /// `clusterDomain`.
    pub cluster_domain: &'a str,
    /// Log directory of the pod.
    pub log_directory: &'a Path,
    /// DNS configuration.
    pub dns: cri::DnsConfig,
    /// The pod's cgroup in the notation of the cgroup driver.
    pub cgroup_parent: &'a str,
    /// The pod's user namespace.
    pub userns: cri::UserNamespace,
    /// Supplemental groups of the pod's volumes.
    pub volume_groups: &'a [i64],
    /// Pod totals without overhead.
    pub resources: cri::LinuxContainerResources,
    /// Pod overhead.
    pub overhead: cri::LinuxContainerResources,
}

/// Why a sandbox cannot be configured.
#[derive(Clone, PartialEq, Eq, Debug, thiserror::Error)]
pub enum SandboxError {
    /// The host name is invalid.
    #[error(transparent)]
    HostName(#[from] HostNameError),
    /// The security context is invalid.
    #[error(transparent)]
    Security(#[from] SecurityError),
}

/// Builds the configuration of a sandbox.
///
/// # Errors
/// The pod's host name or security context is invalid.
pub fn config(parts: SandboxParts<'_>) -> Result<cri::PodSandboxConfig, SandboxError> {
    let pod = parts.pod;
    let as_map = |map: &std::collections::BTreeMap<String, String>| -> HashMap<String, String> {
        map.iter().map(|(key, value)| (key.clone(), value.clone())).collect()
    };
    let mut labels = as_map(pod.labels());
    labels.extend(pod_labels(pod));
    let userns = parts.userns;
    let security = security::of_sandbox(pod, parts.volume_groups, || security::namespaces(pod, None, userns))?;
    Ok(cri::PodSandboxConfig {
        metadata: Some(cri::PodSandboxMetadata {
            name: pod.name().to_owned(),
            uid: pod.uid().to_string(),
            namespace: pod.namespace().to_owned(),
            attempt: parts.attempt,
        }),
        hostname: hostname(pod, parts.cluster_domain)?,
        log_directory: parts.log_directory.to_string_lossy().into_owned(),
        dns_config: Some(parts.dns),
        port_mappings: ports::of_pod(pod),
        labels,
        annotations: as_map(pod.annotations()),
        linux: Some(cri::LinuxPodSandboxConfig {
            cgroup_parent: parts.cgroup_parent.to_owned(),
            security_context: Some(security),
            sysctls: sysctls(pod),
            overhead: Some(parts.overhead),
            resources: Some(parts.resources),
        }),
        windows: None,
    })
}

fn hostname(pod: &Pod, cluster_domain: &str) -> Result<String, HostNameError> {
    if pod.is_host_network() {
        return Ok(String::new());
    }
    HostName::of(pod, cluster_domain)?.kernel_name(pod.spec().set_hostname_as_fqdn == Some(true))
}

fn sysctls(pod: &Pod) -> HashMap<String, String> {
    let wanted = pod.spec().security_context.iter().flat_map(|c| c.sysctls.iter().flatten());
    wanted.map(|s| (sysctl_name(&s.name), s.value.clone())).collect()
}

/// Converts a sysctl name to dots as separators: `net/ipv4/conf/eth0.1/x` becomes
/// `net.ipv4.conf.eth0/1.x`.
pub fn sysctl_name(name: &str) -> String {
    if name.chars().find(|c| matches!(c, '.' | '/')) != Some('/') {
        return name.to_owned();
    }
    let swap = |c| match c {
        '.' => '/',
        '/' => '.',
        other => other,
    };
    name.chars().map(swap).collect()
}

#[cfg(test)]
mod tests {
    use serde_json::{Value, json};

    use super::*;

    fn made(spec: Value) -> Result<cri::PodSandboxConfig, String> {
        let mut spec = spec;
        spec.as_object_mut().expect("an object").entry("containers").or_insert(json!([{"name": "c"}]));
        let object = json!({"metadata": {"name": "web", "namespace": "ns", "uid": "u1", "labels": {"a": "b"},
            "annotations": {"x": "y"}}, "spec": spec});
        let pod = Pod::new(serde_json::from_value(object).expect("a pod")).expect("complete");
        config(SandboxParts {
            pod: &pod,
            attempt: 2,
            cluster_domain: "c.l",
            log_directory: Path::new("/var/log/pods/ns_web_u1"),
            dns: cri::DnsConfig::default(),
            cgroup_parent: "/kubepods/podu1",
            userns: crate::runtime::request::userns::options(None),
            volume_groups: &[],
            resources: cri::LinuxContainerResources { cpu_shares: 5, ..Default::default() },
            overhead: cri::LinuxContainerResources::default(),
        })
        .map_err(|e| e.to_string())
    }

    #[test]
    fn a_sandbox_carries_the_pods_identity() {
        let got =
            made(json!({"securityContext": {"sysctls": [{"name": "kernel/sem", "value": "1"}]}})).expect("a sandbox");
        let metadata = got.metadata.expect("metadata");
        assert_eq!((metadata.name.as_str(), metadata.uid.as_str()), ("web", "u1"));
        assert_eq!((metadata.namespace.as_str(), metadata.attempt), ("ns", 2));
        assert_eq!(got.labels.len(), 4);
        assert_eq!(got.labels.get("a").map(String::as_str), Some("b"));
        assert_eq!(got.labels.get("io.kubernetes.pod.uid").map(String::as_str), Some("u1"));
        assert_eq!(got.annotations, HashMap::from([("x".to_owned(), "y".to_owned())]));
        assert_eq!(got.log_directory, "/var/log/pods/ns_web_u1");
        let linux = got.linux.expect("linux");
        assert_eq!(
            (linux.cgroup_parent.as_str(), linux.sysctls.get("kernel.sem").map(String::as_str)),
            ("/kubepods/podu1", Some("1"))
        );
        assert_eq!(linux.resources.map(|r| r.cpu_shares), Some(5));
        assert_eq!(linux.overhead, Some(cri::LinuxContainerResources::default()));
    }

    #[test]
    fn the_host_name_is_the_nodes_or_the_pods() {
        for (spec, expected) in [
            (json!({}), Ok("web")),
            (json!({"hostNetwork": true}), Ok("")),
            (json!({"hostname": "h", "subdomain": "s"}), Ok("h")),
            (json!({"hostname": "h", "subdomain": "s", "setHostnameAsFQDN": true}), Ok("h.s.ns.svc.c.l")),
            (
                json!({"hostname": "h".repeat(60), "subdomain": "s", "setHostnameAsFQDN": true}),
                Err("is too long (64 characters is the max, 73 characters requested)"),
            ),
        ] {
            match (made(spec.clone()).map(|c| c.hostname), expected) {
                (Ok(got), Ok(expected)) => assert_eq!(got, expected, "{spec}"),
                (Err(got), Err(expected)) => assert!(got.ends_with(expected), "{got}"),
                (got, _) => panic!("{spec}: {got:?}"),
            }
        }
    }

    #[test]
    fn sysctl_names_have_dots() {
        for (name, expected) in [
            ("kernel.sem", "kernel.sem"),
            ("kernel/sem", "kernel.sem"),
            ("net/ipv4/conf/eth0.1/x", "net.ipv4.conf.eth0/1.x"),
            ("net.ipv4.conf.eth0/1.x", "net.ipv4.conf.eth0/1.x"),
            ("plain", "plain"),
        ] {
            assert_eq!(sysctl_name(name), expected);
        }
    }
}
