//! What the CRI says of a pod, in the network's words. Pure.

use std::{os::fd::OwnedFd, sync::Arc};

use super::{
    host_ports::{PortMapping, Protocol},
    sandbox::{Attached, SandboxNetwork},
};
use crate::proto::cri;

impl SandboxNetwork {
    /// A sandbox's network, by its configuration; with what was told when it was set up, where it was.
    ///
    /// # Errors
    /// A port that is none: for people.
    pub fn from_cri(
        id: &str,
        config: &cri::PodSandboxConfig,
        netns: Option<OwnedFd>,
        attached: Option<Attached>,
    ) -> Result<Self, String> {
        let metadata = config.metadata.clone().unwrap_or_default();
        let dns = config.dns_config.clone().unwrap_or_default();
        Ok(Self {
            id: id.to_owned(),
            name: metadata.name,
            namespace: metadata.namespace,
            uid: metadata.uid,
            netns: netns.map(Arc::new),
            ports: config.port_mappings.iter().map(mapping).collect::<Result<_, _>>()?,
            annotations: config.annotations.clone().into_iter().collect(),
            dns: (dns.servers, dns.searches, dns.options),
            cgroup_parent: config.linux.as_ref().map(|l| l.cgroup_parent.clone()).unwrap_or_default(),
            attached,
        })
    }
}

fn mapping(port: &cri::PortMapping) -> Result<PortMapping, String> {
    let number = |what: &str, number: i32| u16::try_from(number).map_err(|_| format!("{what} {number} is no port"));
    let protocol = match cri::Protocol::try_from(port.protocol) {
        Ok(cri::Protocol::Tcp) => Protocol::Tcp,
        Ok(cri::Protocol::Udp) => Protocol::Udp,
        Ok(cri::Protocol::Sctp) => Protocol::Sctp,
        Err(_) => return Err(format!("unknown protocol {}", port.protocol)),
    };
    Ok(PortMapping {
        protocol,
        host_port: number("hostPort", port.host_port)?,
        container_port: number("containerPort", port.container_port)?,
        host_ip: port.host_ip.clone(),
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_configuration_is_told() {
        let port = cri::PortMapping { protocol: 1, container_port: 53, host_port: 5353, host_ip: "::".to_owned() };
        let mut config = cri::PodSandboxConfig {
            metadata: Some(cri::PodSandboxMetadata {
                name: "p".into(),
                uid: "u".into(),
                namespace: "n".into(),
                attempt: 1,
            }),
            port_mappings: vec![port],
            linux: Some(cri::LinuxPodSandboxConfig { cgroup_parent: "/pods".to_owned(), ..Default::default() }),
            ..Default::default()
        };
        let pod = SandboxNetwork::from_cri("s", &config, None, None).expect("well-formed");
        assert_eq!(
            (pod.id.as_str(), pod.name.as_str(), pod.namespace.as_str(), pod.uid.as_str()),
            ("s", "p", "n", "u")
        );
        assert_eq!(
            (pod.ports[0].protocol, pod.ports[0].host_port, pod.cgroup_parent.as_str()),
            (Protocol::Udp, 5353, "/pods")
        );
        for (change, text) in [(70_000, "hostPort 70000 is no port"), (-1, "hostPort -1 is no port")] {
            config.port_mappings[0].host_port = change;
            assert_eq!(SandboxNetwork::from_cri("s", &config, None, None).expect_err("no port"), text);
        }
        config.port_mappings[0].protocol = 9;
        assert_eq!(SandboxNetwork::from_cri("s", &config, None, None).expect_err("unknown"), "unknown protocol 9");
    }
}
