//! Names of pod links, network namespace files, and tables, and MAC addresses. Pure.

use std::{os::unix::ffi::OsStrExt, path::Path};

use sha2::{Digest, Sha256};

/// Name of the nf_tables table; prefix of the bridge and of namespace files.
pub const NAME: &str = "berth";
/// Interface name in the pod.
pub const POD_LINK: &str = "eth0";
/// Number of candidate names for the host end of a veth pair; the first free one is used.
const CHOICES: usize = 8;

/// Default bridge name.
pub fn bridge() -> String {
    let mut name = format!("{NAME}0");
    // The kernel limits interface names to 15 characters.
    name.truncate(15);
    name
}

/// Candidate names for the host end of a pod's veth pair, in order.
pub fn host_ends(sandbox: &str) -> Vec<String> {
    let digest = hex::encode(Sha256::digest(sandbox.as_bytes()));
    (0..CHOICES).filter_map(|n| digest.get(n * 8..n * 8 + 8)).map(|part| format!("veth{part}")).collect()
}

/// Whether an interface name has the form of a pod's host end.
pub fn is_host_end(link: &str) -> bool {
    link.strip_prefix("veth").is_some_and(|rest| rest.len() == 8 && rest.bytes().all(|b| b.is_ascii_hexdigit()))
}

/// Owner prefix that separates several runtimes in one network namespace: [`NAME`], or the bridge's name if another
/// bridge is configured. Tables and namespace files begin with it.
pub fn owner(bridge: &str) -> &str {
    if bridge == self::bridge() { NAME } else { bridge }
}

/// Naming scheme of network namespace files. Runtimes in different network namespaces of a host may have equal bridges
/// and share the directory of these files, so the names contain a tag of the runtime's own directory.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct NamespaceFiles {
    owner: String,
    tag: String,
}

impl NamespaceFiles {
    /// The scheme of the runtime with this owner (see [`owner`]) and state directory.
    pub fn new(owner: &str, directory: &Path) -> Self {
        let mut tag = hex::encode(Sha256::digest(directory.as_os_str().as_bytes()));
        tag.truncate(6);
        Self { owner: owner.to_owned(), tag }
    }

    /// File name of a sandbox.
    pub fn name(&self, sandbox: &str) -> String {
        format!("{}-{}-{}", self.owner, self.tag, short(sandbox))
    }

    /// File name of a sandbox in versions before the tag.
    pub fn untagged(&self, sandbox: &str) -> String {
        format!("{}-{}", self.owner, short(sandbox))
    }

    /// Whether a file in the namespace directory belongs to this runtime.
    pub fn is_ours(&self, name: &str) -> bool {
        let prefix = format!("{}-{}-", self.owner, self.tag);
        let id = name.strip_prefix(&prefix);
        id.is_some_and(|id| (1..=16).contains(&id.len()) && id.bytes().all(|byte| byte.is_ascii_alphanumeric()))
    }
}

fn short(sandbox: &str) -> String {
    sandbox.chars().filter(char::is_ascii_alphanumeric).take(16).collect()
}

/// MAC address of the bridge, derived from the machine id, so that it does not change with its ports.
pub fn bridge_mac(machine_id: &str, bridge: &str) -> [u8; 6] {
    let digest = Sha256::digest(format!("{} {bridge}", machine_id.trim()).as_bytes());
    // Locally administered unicast address.
    [0x0a, digest[0], digest[1], digest[2], digest[3], digest[4]]
}

/// MAC address of a pod, from its first IPv4 address, else from a hash of its addresses.
pub fn pod_mac(addresses: &[std::net::IpAddr]) -> [u8; 6] {
    let v4 = addresses.iter().find_map(|a| match a {
        std::net::IpAddr::V4(v4) => Some(v4.octets()),
        std::net::IpAddr::V6(_) => None,
    });
    let last = v4.unwrap_or_else(|| {
        let text: Vec<String> = addresses.iter().map(ToString::to_string).collect();
        let digest = Sha256::digest(text.join(",").as_bytes());
        [digest[0], digest[1], digest[2], digest[3]]
    });
    [0x0a, 0x58, last[0], last[1], last[2], last[3]]
}

/// Solicited-node multicast group of an IPv6 address, as the kernel prints it; `None` for IPv4.
pub fn solicited_group(address: std::net::IpAddr) -> Option<String> {
    let std::net::IpAddr::V6(v6) = address else { return None };
    Some(format!("ff0200000000000000000001ff{}", hex::encode(&v6.octets()[13..])))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_fit_and_differ() {
        let (a, b) = (host_ends("a"), host_ends("b"));
        assert_eq!(a[0], "vethca978112");
        assert!(a.len() == 8 && a.iter().all(|name| name.len() <= 15 && is_host_end(name) && !b.contains(name)));
        assert!(!is_host_end("veth0") && !is_host_end("vethzzzzzzzz") && !is_host_end("eth0"));
        let files = NamespaceFiles::new(NAME, Path::new("/run/berth/net"));
        let id = "0123456789abcdef".repeat(4);
        assert_eq!(files.name(&id), "berth-60fd9d-0123456789abcdef");
        assert_eq!(files.untagged(&id), "berth-0123456789abcdef");
        assert!(files.is_ours(&files.name(&id)) && !files.is_ours(&files.untagged(&id)));
        assert!(!files.is_ours("cni-1") && !files.is_ours("berth-") && !files.is_ours("berth-60fd9d-2-01"));
        let other = NamespaceFiles::new(NAME, Path::new("/run/other/net"));
        assert!(!files.is_ours(&other.name(&id)), "equal bridges in two networks of a machine");
        assert_eq!(NamespaceFiles::new("pods1", Path::new("/")).untagged("../../x"), "pods1-x");
        assert_eq!((owner(&bridge()), owner("pods1")), (NAME, "pods1"));
    }

    #[test]
    fn hardware_addresses_follow_addresses() {
        let v4 = "10.9.0.2".parse().expect("an address");
        let v6 = "fd00::2".parse().expect("an address");
        assert_eq!(pod_mac(&[v6, v4]), [0x0a, 0x58, 10, 9, 0, 2]);
        assert_eq!(pod_mac(&[v6])[..2], [0x0a, 0x58]);
        assert_eq!(solicited_group(v6).expect("a group"), "ff0200000000000000000001ff000002");
        assert_eq!(solicited_group(v4), None);
        assert_eq!(bridge_mac("x\n", "b"), bridge_mac("x", "b"));
        assert_eq!(bridge_mac("x", "b")[0] & 3, 2);
    }
}
