//! Content of a pod's hosts file. Pure. Implements spec 03a §6.3.

use std::net::IpAddr;

use berth_types::{api, hostname::HostName};

/// Path of the hosts file in containers.
pub const PATH: &str = "/etc/hosts";

const FIXED: &str = "127.0.0.1\tlocalhost\n\
    ::1\tlocalhost ip6-localhost ip6-loopback\n\
    fe00::0\tip6-localnet\n\
    fe00::0\tip6-mcastprefix\n\
    fe00::1\tip6-allnodes\n\
    fe00::2\tip6-allrouters\n";

/// Whether a container gets the managed file: it does not mount that path itself, and addresses are
/// known or it uses the host network.
pub fn is_wanted(host_network: bool, pod_ips: &[IpAddr], container: &api::Container) -> bool {
    let own = container.volume_mounts.iter().flatten().any(|m| m.mount_path == PATH);
    !own && (host_network || !pod_ips.is_empty())
}

/// Content for a pod with its own network.
pub fn of_pod(name: &HostName, ips: &[IpAddr], aliases: &[api::HostAlias]) -> String {
    let mut text = format!("# Kubernetes-managed hosts file.\n{FIXED}");
    for ip in ips {
        match name.domain.as_deref().filter(|d| !d.is_empty()) {
            Some(domain) => text.push_str(&format!("{ip}\t{0}.{domain}\t{0}\n", name.name)),
            None => text.push_str(&format!("{ip}\t{}\n", name.name)),
        }
    }
    append_aliases(&mut text, aliases);
    text
}

/// Content for a pod with host network: the node's own file, byte for byte, between header and aliases.
pub fn of_node(node_file: &[u8], aliases: &[api::HostAlias]) -> Vec<u8> {
    let mut bytes = b"# Kubernetes-managed hosts file (host network).\n".to_vec();
    bytes.extend_from_slice(node_file);
    let mut text = String::new();
    append_aliases(&mut text, aliases);
    bytes.extend_from_slice(text.as_bytes());
    bytes
}

fn append_aliases(text: &mut String, aliases: &[api::HostAlias]) {
    if aliases.is_empty() {
        return;
    }
    text.push_str("\n# Entries added by HostAliases.\n");
    for alias in aliases {
        let names = alias.hostnames.as_deref().unwrap_or_default().join("\t");
        text.push_str(&format!("{}\t{names}\n", alias.ip));
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn aliases() -> Vec<api::HostAlias> {
        vec![api::HostAlias { ip: "1.2.3.4".into(), hostnames: Some(vec!["a".into(), "b.c".into()]) }]
    }

    #[test]
    fn a_pod_with_its_own_network() {
        let ips = ["10.0.0.5".parse().expect("an address"), "fd00::5".parse().expect("an address")];
        let name = HostName { name: "web".into(), domain: Some("sub.ns.svc.c.l".into()) };
        assert_eq!(
            of_pod(&name, &ips, &aliases()),
            "# Kubernetes-managed hosts file.\n127.0.0.1\tlocalhost\n::1\tlocalhost ip6-localhost ip6-loopback\n\
             fe00::0\tip6-localnet\nfe00::0\tip6-mcastprefix\nfe00::1\tip6-allnodes\nfe00::2\tip6-allrouters\n\
             10.0.0.5\tweb.sub.ns.svc.c.l\tweb\nfd00::5\tweb.sub.ns.svc.c.l\tweb\n\
             \n# Entries added by HostAliases.\n1.2.3.4\ta\tb.c\n"
        );
        let plain = HostName { name: "web".into(), domain: None };
        assert!(of_pod(&plain, &ips[..1], &[]).ends_with("ip6-allrouters\n10.0.0.5\tweb\n"));
    }

    #[test]
    fn a_pod_in_the_nodes_network() {
        assert_eq!(
            of_node(b"127.0.0.1 \xff\n", &aliases()),
            b"# Kubernetes-managed hosts file (host network).\n127.0.0.1 \xff\n\n\
              # Entries added by HostAliases.\n1.2.3.4\ta\tb.c\n"
        );
    }

    #[test]
    fn who_mounts_the_path_or_has_no_address_gets_none() {
        let ip = ["10.0.0.5".parse().expect("an address")];
        let mount = |path: &str| api::Container {
            volume_mounts: Some(vec![api::VolumeMount { mount_path: path.into(), ..Default::default() }]),
            ..Default::default()
        };
        assert!(is_wanted(false, &ip, &mount("/data")));
        assert!(is_wanted(true, &[], &mount("/data")));
        assert!(!is_wanted(false, &[], &mount("/data")));
        assert!(!is_wanted(false, &ip, &mount("/etc/hosts")));
    }
}
