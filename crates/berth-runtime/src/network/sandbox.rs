//! Input and output types of pod networks, and CNI arguments of a pod. Pure.

use std::{collections::BTreeMap, net::IpAddr, os::fd::OwnedFd, sync::Arc};

use serde::{Deserialize, Serialize};
use serde_json::{Map, Value, json};

use super::{
    bandwidth::{self, BandwidthError},
    host_ports::PortMapping,
    mode::Mode,
};

/// Burst value that CNI plugins treat as unlimited.
const NO_BURST: u64 = 4_294_967_295;

/// A pod with its own network namespace.
#[derive(Clone, Debug, Default)]
pub struct SandboxNetwork {
    /// Sandbox id.
    pub id: String,
    /// Pod name.
    pub name: String,
    /// Kubernetes namespace.
    pub namespace: String,
    /// Pod UID.
    pub uid: String,
    /// Network namespace; without it only the host's side can be removed.
    pub netns: Option<Arc<OwnedFd>>,
    /// Requested port mappings.
    pub ports: Vec<PortMapping>,
    /// Annotations of the sandbox.
    pub annotations: BTreeMap<String, String>,
    /// DNS servers, search domains, and options.
    pub dns: (Vec<String>, Vec<String>, Vec<String>),
    /// Cgroup parent of the pod.
    pub cgroup_parent: String,
    /// Result of the setup, stored with the sandbox; `None` before it.
    pub attached: Option<PodNetwork>,
}

/// A pod's network as created. Stored with the sandbox, so that the teardown uses the same mode.
#[derive(Clone, PartialEq, Debug, Serialize, Deserialize)]
pub struct PodNetwork {
    /// Mode that created it.
    pub mode: Mode,
    /// Pod addresses, the primary one first.
    pub ips: Vec<IpAddr>,
    /// Result of the CNI plugins, or the built-in network's in the same form.
    pub result: Value,
}

impl SandboxNetwork {
    /// `CNI_ARGS` of the pod.
    pub fn plugin_args(&self) -> Vec<(String, String)> {
        [
            ("IgnoreUnknown", "1"),
            ("K8S_POD_NAMESPACE", &self.namespace),
            ("K8S_POD_NAME", &self.name),
            ("K8S_POD_INFRA_CONTAINER_ID", &self.id),
            ("K8S_POD_UID", &self.uid),
        ]
        .map(|(key, value)| (key.to_owned(), value.to_owned()))
        .to_vec()
    }

    /// Whether the built-in network created it.
    pub fn is_builtin(&self) -> bool {
        self.attached.as_ref().is_some_and(|attached| attached.mode == Mode::Builtin)
    }

    /// Runtime configuration for CNI plugins, by capability; only what the pod specifies.
    ///
    /// # Errors
    /// A bandwidth limit is invalid.
    pub fn runtime_config(&self) -> Result<Map<String, Value>, BandwidthError> {
        let mut known = Map::new();
        let ports: Vec<Value> = self.ports.iter().filter(|p| p.host_port != 0).map(port).collect();
        if !ports.is_empty() {
            known.insert("portMappings".to_owned(), ports.into());
        }
        let speed = bandwidth::of(&self.annotations)?;
        let mut limits = Map::new();
        for (name, bits) in [("ingress", speed.ingress), ("egress", speed.egress)] {
            if let Some(bits) = bits {
                limits.insert(format!("{name}Rate"), bits.into());
                limits.insert(format!("{name}Burst"), NO_BURST.into());
            }
        }
        if !limits.is_empty() {
            known.insert("bandwidth".to_owned(), limits.into());
        }
        let (servers, searches, options) = &self.dns;
        if !(servers.is_empty() && searches.is_empty() && options.is_empty()) {
            let dns = json!({"servers": servers, "searches": searches, "options": options});
            known.insert("dns".to_owned(), dns);
        }
        if !self.annotations.is_empty() {
            known.insert("io.kubernetes.cri.pod-annotations".to_owned(), json!(self.annotations));
        }
        if !self.cgroup_parent.is_empty() {
            known.insert("cgroupPath".to_owned(), self.cgroup_parent.clone().into());
        }
        Ok(known)
    }
}

fn port(mapping: &PortMapping) -> Value {
    let inner = if mapping.container_port == 0 { mapping.host_port } else { mapping.container_port };
    json!({
        "hostPort": mapping.host_port,
        "containerPort": inner,
        "protocol": mapping.protocol.to_string(),
        "hostIP": mapping.host_ip,
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::network::host_ports::TransportProtocol;

    #[test]
    fn runtime_config_contains_the_fields_that_are_set() {
        let mut pod = SandboxNetwork {
            id: "s".into(),
            name: "p".into(),
            namespace: "n".into(),
            uid: "u".into(),
            ..Default::default()
        };
        assert!(pod.runtime_config().expect("fine").is_empty());
        pod.ports = [(80, 8080), (0, 9090)]
            .map(|(host_port, container_port)| PortMapping {
                protocol: TransportProtocol::Udp,
                host_port,
                container_port,
                host_ip: String::new(),
            })
            .to_vec();
        pod.annotations = BTreeMap::from([("kubernetes.io/egress-bandwidth".to_owned(), "1M".to_owned())]);
        pod.dns.0 = vec!["1.1.1.1".to_owned()];
        pod.cgroup_parent = "/pods/x".to_owned();
        let known = Value::from(pod.runtime_config().expect("fine"));
        assert_eq!(
            known["portMappings"],
            json!([{"hostPort": 80, "containerPort": 8080, "protocol": "udp", "hostIP": ""}])
        );
        assert_eq!(known["bandwidth"], json!({"egressRate": 1_000_000, "egressBurst": 4_294_967_295_u64}));
        assert_eq!((&known["dns"]["servers"], &known["cgroupPath"]), (&json!(["1.1.1.1"]), &json!("/pods/x")));
        let args: Vec<String> = pod.plugin_args().iter().map(|(k, v)| format!("{k}={v}")).collect();
        assert_eq!(
            args.join(";"),
            "IgnoreUnknown=1;K8S_POD_NAMESPACE=n;K8S_POD_NAME=p;K8S_POD_INFRA_CONTAINER_ID=s;K8S_POD_UID=u"
        );
    }
}
