//! Template of a requested certificate: subject, alternative names, key usages, and signer. Pure.
//!
//! Implements spec 01 §11.3.

use std::{collections::BTreeSet, net::IpAddr};

use k8s_openapi::api::core::v1::NodeAddress;

/// Purpose of a certificate.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub enum Purpose {
    /// TLS client certificate for requests to the API server.
    Client,
    /// TLS server certificate of the node's own API.
    Serving,
}

impl Purpose {
    /// Signer name.
    pub fn signer(self) -> &'static str {
        match self {
            Self::Client => "kubernetes.io/kube-apiserver-client-kubelet",
            Self::Serving => "kubernetes.io/kubelet-serving",
        }
    }

    /// Key usages. Key encipherment is absent because the keys are elliptic.
    pub fn usages(self) -> [&'static str; 2] {
        ["digital signature", self.extended()]
    }

    /// Prefix of the file names.
    pub fn prefix(self) -> &'static str {
        match self {
            Self::Client => "kubelet-client",
            Self::Serving => "kubelet-server",
        }
    }

    fn extended(self) -> &'static str {
        match self {
            Self::Client => "client auth",
            Self::Serving => "server auth",
        }
    }
}

/// Names that a serving certificate request requires.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum NamesNeeded {
    /// At least one IP address.
    Ip,
    /// At least one IP address or DNS name (gate `AllowDNSOnlyNodeCSR`).
    Any,
}

/// Content of the requested certificate.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Template {
    /// Client or serving; it determines signer, key usages, and file names.
    pub purpose: Purpose,
    /// Name of the node.
    pub node: String,
    /// DNS names, sorted.
    pub dns: Vec<String>,
    /// IP addresses, sorted by their text form.
    pub ips: Vec<IpAddr>,
}

impl Template {
    /// Organization of the subject: the group of all nodes.
    pub const ORGANIZATION: &'static str = "system:nodes";

    /// Template of the client certificate.
    pub fn client(node: &str) -> Self {
        Self { purpose: Purpose::Client, node: node.to_owned(), dns: Vec::new(), ips: Vec::new() }
    }

    /// Template of the serving certificate; `None` while the required addresses are unknown.
    pub fn serving(node: &str, addresses: &[NodeAddress], needed: NamesNeeded) -> Option<Self> {
        let (mut dns, mut ips) = (BTreeSet::new(), BTreeSet::new());
        for address in addresses.iter().filter(|address| !address.address.is_empty()) {
            let text = address.address.as_str();
            match (address.type_.as_str(), text.parse::<IpAddr>()) {
                ("Hostname" | "ExternalIP" | "InternalIP", Ok(ip)) => {
                    ips.insert((ip.to_string(), ip));
                }
                ("Hostname" | "ExternalDNS" | "InternalDNS", _) => {
                    dns.insert(text.to_owned());
                }
                _ => {}
            }
        }
        let is_enough = !ips.is_empty() || (needed == NamesNeeded::Any && !dns.is_empty());
        is_enough.then(|| Self {
            purpose: Purpose::Serving,
            node: node.to_owned(),
            dns: dns.into_iter().collect(),
            ips: ips.into_iter().map(|(_, ip)| ip).collect(),
        })
    }

    /// Common name of the subject.
    pub fn common_name(&self) -> String {
        format!("system:node:{}", self.node)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_come_from_addresses() {
        let address = |type_: &str, address: &str| NodeAddress { type_: type_.to_owned(), address: address.to_owned() };
        let all = [
            address("InternalIP", "10.0.0.9"),
            address("InternalIP", "10.0.0.10"),
            address("ExternalIP", "not an address"),
            address("Hostname", "fd00::1"),
            address("Hostname", "node-1"),
            address("InternalDNS", "b.example"),
            address("ExternalDNS", "a.example"),
            address("ExternalDNS", ""),
        ];
        let made = Template::serving("n", &all, NamesNeeded::Ip).expect("enough");
        assert_eq!(made.dns, ["a.example", "b.example", "node-1"]);
        let ips: Vec<String> = made.ips.iter().map(ToString::to_string).collect();
        assert_eq!(ips, ["10.0.0.10", "10.0.0.9", "fd00::1"]);

        let named = [address("Hostname", "node-1")];
        assert_eq!(Template::serving("n", &named, NamesNeeded::Ip), None);
        assert!(Template::serving("n", &named, NamesNeeded::Any).is_some());
        assert_eq!(Template::serving("n", &[], NamesNeeded::Any), None);
    }
}
