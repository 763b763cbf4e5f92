//! What a certificate is to say: the subject, the names, what it may be used for. Pure. Spec 01 §11.3.

use std::{collections::BTreeSet, net::IpAddr};

use k8s_openapi::api::core::v1::NodeAddress;

/// What a certificate is for.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub enum Purpose {
    /// We show it to the API server.
    Client,
    /// We serve with it.
    Serving,
}

impl Purpose {
    /// Who signs.
    pub fn signer(self) -> &'static str {
        match self {
            Self::Client => "kubernetes.io/kube-apiserver-client-kubelet",
            Self::Serving => "kubernetes.io/kubelet-serving",
        }
    }

    /// What it may be used for; our keys are elliptic, which encipher nothing.
    pub fn usages(self) -> [&'static str; 2] {
        ["digital signature", self.extended()]
    }

    /// How its files are called.
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

/// Which names a serving certificate cannot be asked for without.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum NamesNeeded {
    /// An address.
    Ip,
    /// An address or a DNS name (gate `AllowDNSOnlyNodeCSR`).
    Any,
}

/// What is wanted.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Template {
    /// What for.
    pub purpose: Purpose,
    /// Of which node.
    pub node: String,
    /// DNS names, sorted.
    pub dns: Vec<String>,
    /// Addresses, sorted as texts.
    pub ips: Vec<IpAddr>,
}

impl Template {
    /// The group of all nodes.
    pub const ORGANIZATION: &'static str = "system:nodes";

    /// By which a node is known.
    pub fn client(node: &str) -> Self {
        Self { purpose: Purpose::Client, node: node.to_owned(), dns: Vec::new(), ips: Vec::new() }
    }

    /// What a node serves with; `None` while too few names are known.
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
