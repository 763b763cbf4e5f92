//! Adapts pod networks to the runtime's network port.

use std::{collections::BTreeMap, fs::File, os::fd::OwnedFd, path::Path, sync::Arc};

use async_trait::async_trait;
use tokio::{net::TcpStream, sync::watch};

use crate::{
    config::EmbeddedConfig,
    errors::{ErrorKind, RuntimeError, RuntimeResult},
    network::{
        Cidr, ConfiguredMode, NetworkError, NetworkManager as PodNetworks, NetworkSettings, PortMapping,
        SandboxNetwork, TransportProtocol,
    },
    ports::{AttachedNetwork, NetworkPod, PodNetworkProvider},
};
use berth_proto::cri;

/// The `PodNetworkProvider` port over this host's pod networks.
#[derive(Clone)]
pub struct HostNetworks(pub PodNetworks);

#[async_trait]
impl PodNetworkProvider for HostNetworks {
    async fn attach(&self, pod: NetworkPod, namespace: Option<OwnedFd>) -> RuntimeResult<AttachedNetwork> {
        let mut network = sandbox_network(&pod)?;
        network.netns = namespace.map(Arc::new);
        let attached = self.0.setup(&network).await?;
        let kept = serde_json::to_value(&attached).map_err(|error| RuntimeError::other(error.to_string()))?;
        let ips = attached.ips.iter().map(ToString::to_string).collect();
        Ok(AttachedNetwork { netns: self.0.namespace_file(&pod.id), ips, persisted: kept })
    }

    async fn detach(&self, pod: NetworkPod) -> RuntimeResult<()> {
        Ok(self.0.teardown(&self.known(&pod)?).await?)
    }

    async fn recover(&self, pods: Vec<NetworkPod>) -> RuntimeResult<Vec<String>> {
        let pods = pods.iter().map(|pod| self.known(pod)).collect::<RuntimeResult<Vec<_>>>()?;
        Ok(self.0.recover(&pods).await?)
    }

    async fn lost(&self, pods: Vec<NetworkPod>) -> RuntimeResult<Vec<String>> {
        let pods = pods.iter().map(|pod| self.known(pod)).collect::<RuntimeResult<Vec<_>>>()?;
        Ok(self.0.lost(&pods).await?)
    }

    fn disturbances(&self) -> watch::Receiver<u64> {
        self.0.disturbances()
    }

    async fn readiness_error(&self) -> Option<String> {
        self.0.status().await.err()
    }

    async fn warning(&self) -> Option<String> {
        self.0.warning().await
    }

    fn last_cni_load(&self) -> String {
        self.0.last_cni_load()
    }

    async fn set_ranges(&self, ranges: &str) -> RuntimeResult<()> {
        Ok(self.0.update_pod_cidr(ranges).await?)
    }

    async fn dial(&self, netns: Option<&Path>, sandbox: &str, port: u16) -> RuntimeResult<TcpStream> {
        Ok(self.0.dial(netns, sandbox, port).await?)
    }
}

impl HostNetworks {
    /// A pod that was attached before, with its network namespace if that still exists.
    fn known(&self, pod: &NetworkPod) -> RuntimeResult<SandboxNetwork> {
        let mut network = sandbox_network(pod)?;
        network.netns = File::open(self.0.namespace_file(&pod.id)).ok().map(|file| Arc::new(file.into()));
        // A record that is absent or unreadable counts as never attached.
        network.attached = serde_json::from_value(pod.persisted.clone()).ok();
        Ok(network)
    }
}

fn sandbox_network(pod: &NetworkPod) -> RuntimeResult<SandboxNetwork> {
    let (config, meta) = (&pod.config, pod.config.metadata.clone().unwrap_or_default());
    let dns = config.dns_config.clone().unwrap_or_default();
    Ok(SandboxNetwork {
        id: pod.id.clone(),
        name: meta.name,
        namespace: meta.namespace,
        uid: meta.uid,
        netns: None,
        ports: config.port_mappings.iter().map(port).collect::<RuntimeResult<_>>()?,
        annotations: config.annotations.clone().into_iter().collect::<BTreeMap<_, _>>(),
        dns: (dns.servers, dns.searches, dns.options),
        cgroup_parent: config.linux.as_ref().map(|linux| linux.cgroup_parent.clone()).unwrap_or_default(),
        attached: None,
    })
}

fn port(mapping: &cri::PortMapping) -> RuntimeResult<PortMapping> {
    let number = |port: i32| {
        u16::try_from(port)
            .map_err(|_| RuntimeError::invalid(format!("invalid port {port}: must be between 0 and 65535")))
    };
    let protocol = match cri::Protocol::try_from(mapping.protocol) {
        Ok(cri::Protocol::Tcp) => TransportProtocol::Tcp,
        Ok(cri::Protocol::Udp) => TransportProtocol::Udp,
        Ok(cri::Protocol::Sctp) => TransportProtocol::Sctp,
        Err(_) => return Err(RuntimeError::invalid(format!("unknown protocol {}", mapping.protocol))),
    };
    let (host_port, container_port) = (number(mapping.host_port)?, number(mapping.container_port)?);
    Ok(PortMapping { protocol, host_port, container_port, host_ip: mapping.host_ip.clone() })
}

/// Converts the configuration to network settings.
///
/// # Errors
/// The name of the invalid field.
pub fn settings(config: &EmbeddedConfig) -> RuntimeResult<NetworkSettings> {
    let asked = &config.network;
    let ranges = |name: &str, list: &mut dyn Iterator<Item = &str>| -> RuntimeResult<Vec<Cidr>> {
        let wrong = |error| RuntimeError::other(format!("embeddedRuntime.network.{name}: {error}"));
        list.filter(|text| !text.is_empty()).map(|text| text.parse().map_err(wrong)).collect()
    };
    let mut settings = NetworkSettings::usual(&config.state.join("net"));
    settings.wanted = match asked.mode.as_str() {
        "" | "auto" => ConfiguredMode::Auto,
        "builtin" => ConfiguredMode::Builtin,
        "cni" => ConfiguredMode::Cni,
        other => return Err(RuntimeError::other(format!("embeddedRuntime.network.mode: unknown mode {other:?}"))),
    };
    if !asked.bridge.is_empty() {
        settings.builtin.bridge.clone_from(&asked.bridge);
    }
    settings.builtin.mtu = asked.mtu;
    settings.builtin.masquerade = asked.masquerade;
    settings.builtin.host_ports = asked.host_ports;
    settings.builtin.nets = ranges("defaultPodCIDR", &mut asked.default_pod_cidr.split(','))?;
    settings.builtin.no_masquerade =
        ranges("nonMasqueradeCIDRs", &mut asked.non_masquerade_cidrs.iter().map(String::as_str))?;
    settings.cni_directory.clone_from(&asked.cni_conf_dir);
    settings.cni_programs.clone_from(&asked.cni_bin_dirs);
    settings.cni_limit = asked.cni_timeout;
    Ok(settings)
}

impl From<NetworkError> for RuntimeError {
    fn from(error: NetworkError) -> Self {
        let kind = match &error {
            NetworkError::Range(_) => ErrorKind::Invalid,
            NetworkError::TimedOut { .. } => ErrorKind::Deadline,
            _ => ErrorKind::Other,
        };
        RuntimeError::new(kind, error.to_string())
    }
}
