//! Host port assignments of pods. Pure.
//!
//! One pod owns a key at a time: a second pod fails with an error that names the owner, where other runtimes let the
//! newest pod take over silently. Implements spec 09b §12.

use std::{collections::BTreeMap, fmt, net::IpAddr};

/// A transport protocol with ports.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug)]
pub enum TransportProtocol {
    /// IP protocol 6.
    Tcp,
    /// IP protocol 17.
    Udp,
    /// IP protocol 132.
    Sctp,
}

impl TransportProtocol {
    /// IP protocol number.
    pub fn number(self) -> u8 {
        match self {
            Self::Tcp => 6,
            Self::Udp => 17,
            Self::Sctp => 132,
        }
    }
}

impl fmt::Display for TransportProtocol {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Tcp => "tcp",
            Self::Udp => "udp",
            Self::Sctp => "sctp",
        })
    }
}

/// A requested port mapping of a pod.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct PortMapping {
    /// Transport protocol.
    pub protocol: TransportProtocol,
    /// Host port; 0: no mapping.
    pub host_port: u16,
    /// Pod port; 0: same as the host port.
    pub container_port: u16,
    /// Host address; empty, `0.0.0.0`, or `::` for all.
    pub host_ip: String,
}

/// Match of a host port entry.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug)]
pub struct HostPortKey {
    /// Whether the entry is for IPv6.
    pub is_v6: bool,
    /// Host address; `None`: all.
    pub address: Option<IpAddr>,
    /// Transport protocol.
    pub protocol: TransportProtocol,
    /// Host port.
    pub port: u16,
}

/// A host port entry that redirects to a pod.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct HostPortEntry {
    /// Match on incoming traffic.
    pub key: HostPortKey,
    /// Pod address.
    pub pod: IpAddr,
    /// Pod port.
    pub port: u16,
}

/// An unavailable or invalid host port.
#[derive(Clone, PartialEq, Eq, Debug, thiserror::Error)]
pub enum PortError {
    /// Another pod owns the port.
    #[error("hostPort {port}/{protocol} is already in use by sandbox {by}")]
    Taken {
        /// Host port.
        port: u16,
        /// Transport protocol.
        protocol: TransportProtocol,
        /// Sandbox id of the owner.
        by: String,
    },
    /// The host IP is not an IP address.
    #[error("hostPort {port}/{protocol}: invalid host IP {address:?}")]
    NoAddress {
        /// Host port.
        port: u16,
        /// Transport protocol.
        protocol: TransportProtocol,
        /// The invalid text.
        address: String,
    },
}

/// Host port assignments by pod.
#[derive(Debug, Default)]
pub struct HostPorts {
    taken: BTreeMap<HostPortKey, (String, HostPortEntry)>,
}

impl HostPorts {
    /// The entries of a pod's port mappings; one per IP version for a dual-stack pod.
    ///
    /// # Errors
    /// A host IP is not an IP address.
    pub fn entries(mappings: &[PortMapping], pod: &[IpAddr]) -> Result<Vec<HostPortEntry>, PortError> {
        let mut entries: Vec<HostPortEntry> = Vec::new();
        for mapping in mappings.iter().filter(|m| m.host_port != 0) {
            let (address, only) = bound(mapping)?;
            for pod in pod.iter().filter(|a| only.is_none_or(|is_v6| is_v6 == a.is_ipv6())) {
                let key =
                    HostPortKey { is_v6: pod.is_ipv6(), address, protocol: mapping.protocol, port: mapping.host_port };
                let port = if mapping.container_port == 0 { mapping.host_port } else { mapping.container_port };
                if entries.iter().all(|e| e.key != key) {
                    entries.push(HostPortEntry { key, pod: *pod, port });
                }
            }
        }
        Ok(entries)
    }

    /// Assigns entries to a pod, all or none.
    ///
    /// # Errors
    /// Another pod owns one of them.
    pub fn take(&mut self, pod: &str, entries: &[HostPortEntry]) -> Result<(), PortError> {
        for entry in entries {
            if let Some((by, _)) = self.taken.get(&entry.key).filter(|(by, _)| by != pod) {
                let HostPortKey { port, protocol, .. } = entry.key;
                return Err(PortError::Taken { port, protocol, by: by.clone() });
            }
        }
        self.taken.extend(entries.iter().map(|e| (e.key, (pod.to_owned(), *e))));
        Ok(())
    }

    /// Releases all entries of a pod, and returns them.
    pub fn release(&mut self, pod: &str) -> Vec<HostPortEntry> {
        let had: Vec<HostPortEntry> = self.taken.values().filter(|(by, _)| by == pod).map(|(_, e)| *e).collect();
        self.taken.retain(|_, (by, _)| by != pod);
        had
    }

    /// All entries.
    pub fn all(&self) -> Vec<HostPortEntry> {
        self.taken.values().map(|(_, entry)| *entry).collect()
    }

    /// Releases all entries.
    pub fn clear(&mut self) {
        self.taken.clear();
    }
}

/// Host address of a mapping (`None`: all), and the IP version it is limited to (true: IPv6).
fn bound(mapping: &PortMapping) -> Result<(Option<IpAddr>, Option<bool>), PortError> {
    if mapping.host_ip.is_empty() {
        return Ok((None, None));
    }
    let address: IpAddr = mapping.host_ip.parse().map_err(|_| PortError::NoAddress {
        port: mapping.host_port,
        protocol: mapping.protocol,
        address: mapping.host_ip.clone(),
    })?;
    Ok(((!address.is_unspecified()).then_some(address), Some(address.is_ipv6())))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn mapping(host_ip: &str, host_port: u16, container_port: u16) -> PortMapping {
        PortMapping { protocol: TransportProtocol::Tcp, host_port, container_port, host_ip: host_ip.to_owned() }
    }

    fn addresses() -> [IpAddr; 2] {
        ["10.9.0.2".parse().expect("an address"), "fd00::2".parse().expect("an address")]
    }

    #[test]
    fn mappings_become_entries() {
        let cases: [(&str, u16, &[&str]); 6] = [
            ("", 80, &["* 10.9.0.2", "* fd00::2"]),
            ("0.0.0.0", 80, &["* 10.9.0.2"]),
            ("::", 80, &["* fd00::2"]),
            ("127.0.0.1", 80, &["127.0.0.1 10.9.0.2"]),
            ("fd01::1", 80, &["fd01::1 fd00::2"]),
            ("", 0, &[]),
        ];
        for (host_ip, host_port, expected) in cases {
            let entries = HostPorts::entries(&[mapping(host_ip, host_port, 8080)], &addresses()).expect("well-formed");
            let formatted: Vec<String> = entries
                .iter()
                .map(|e| format!("{} {}", e.key.address.map_or("*".to_owned(), |a| a.to_string()), e.pod))
                .collect();
            assert_eq!(formatted, expected, "{host_ip}");
            assert!(entries.iter().all(|e| e.port == 8080));
        }
        assert!(HostPorts::entries(&[mapping("localhost", 80, 80)], &addresses()).is_err());
    }

    #[test]
    fn a_port_conflict_names_the_sandbox_that_has_the_port() {
        // AC-09b-N7
        let mut ports = HostPorts::default();
        let entries = HostPorts::entries(&[mapping("", 80, 0)], &addresses()).expect("well-formed");
        ports.take("first", &entries).expect("free");
        ports.take("first", &entries).expect("its own");
        let refused = ports.take("second", &entries).expect_err("taken").to_string();
        assert_eq!(refused, "hostPort 80/tcp is already in use by sandbox first");
        let narrow = HostPorts::entries(&[mapping("127.0.0.1", 80, 0)], &addresses()).expect("well-formed");
        ports.take("second", &narrow).expect("another key");
        assert_eq!(ports.release("first").len(), 2);
        ports.take("second", &entries).expect("free again");
        assert_eq!(ports.all().len(), 3);
    }
}
