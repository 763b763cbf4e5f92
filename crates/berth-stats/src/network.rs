//! Network interface counters of a network namespace, read through a process in it.
//!
//! The file is never kept open: an open file would keep the namespace alive after its pod is gone. Implements
//! spec 04b §7.2 and spec 04b §11.

use std::{
    fs::File,
    io::Read,
    path::{Path, PathBuf},
};

pub use berth_sys::netlink::counters::{DirectionCounters, LinkCounters};

/// Maximum number of bytes read of an interface or routing table.
const MAX_TABLE: u64 = 1 << 20;
/// Maximum number of interfaces reported per namespace.
const MAX_INTERFACES: usize = 256;

/// Reported interfaces of one namespace, and its primary interface.
#[derive(Clone, PartialEq, Eq, Debug, Default)]
pub struct NetworkInterfaces {
    /// Interfaces in the kernel's order.
    pub interfaces: Vec<LinkCounters>,
    /// Index of the primary interface: `eth0`, otherwise that of the default route.
    pub primary: Option<usize>,
}

/// Reads the network of a process; `None` if the process is gone. Blocking.
pub fn of_process(proc: &Path, pid: u32) -> Option<NetworkInterfaces> {
    let directory = proc.join(pid.to_string()).join("net");
    let table = read(&directory.join("dev"))?;
    let interfaces = interfaces(&table);
    let is_primary = |name: &str| interfaces.iter().position(|i| i.name == name);
    let primary = is_primary("eth0").or_else(|| {
        let routes = read(&directory.join("route"))?;
        default_interface(&routes).and_then(|name| is_primary(&name))
    });
    Some(NetworkInterfaces { interfaces, primary })
}

/// Network namespace as the kernel names it, `net:[4026531992]`.
pub type Namespace = PathBuf;

/// Reads the network of a pod through one of its processes, and the namespace if the kernel reports it; `None` if the
/// process is gone or is in the network namespace of the machine. The namespace is read before and after the counters:
/// a shim enters its pod's namespace for a moment, to set it up, and leaves it again. Blocking.
pub fn of_pods_process(proc: &Path, pid: u32) -> Option<(NetworkInterfaces, Option<Namespace>)> {
    let namespace_of = |pid: &str| std::fs::read_link(proc.join(pid).join("ns/net")).ok();
    // The namespaces of PID 1 are unreadable without its capabilities (in a container, for example); the agent's own
    // network namespace is the same.
    let machine = namespace_of("1").or_else(|| namespace_of("self"));
    let of_process = || namespace_of(&pid.to_string());
    let namespace = of_process();
    if namespace.is_some() && namespace == machine {
        return None;
    }
    let network = self::of_process(proc, pid)?;
    (of_process() == namespace).then_some((network, namespace))
}

fn read(path: &Path) -> Option<String> {
    let mut bytes = Vec::with_capacity(4096); // fits most tables, so that one read returns all and a second one the end
    File::open(path).ok()?.take(MAX_TABLE).read_to_end(&mut bytes).ok()?;
    String::from_utf8(bytes).ok()
}

/// Parses `/proc/<pid>/net/dev`, without interfaces that only connect containers.
pub fn interfaces(table: &str) -> Vec<LinkCounters> {
    table.lines().filter_map(interface).filter(|i| is_shown(&i.name)).take(MAX_INTERFACES).collect()
}

/// Parses ` eth0: bytes packets errs drop fifo frame compressed multicast | bytes packets errs drop …`
fn interface(line: &str) -> Option<LinkCounters> {
    let (name, numbers) = line.split_once(':')?;
    let mut numbers = numbers.split_ascii_whitespace().map(|number| number.parse().ok());
    let mut direction = |others: usize| -> Option<DirectionCounters> {
        let mut next = || numbers.next().flatten();
        let direction = DirectionCounters { bytes: next()?, packets: next()?, errors: next()?, dropped: next()? };
        (0..others).try_for_each(|_| next().map(drop))?;
        Some(direction)
    };
    Some(LinkCounters { name: name.trim().to_owned(), received: direction(4)?, sent: direction(0)? })
}

fn is_shown(name: &str) -> bool {
    let starts = |prefix: &str| name.get(..prefix.len()).is_some_and(|start| start.eq_ignore_ascii_case(prefix));
    !["lo", "veth", "docker", "nerdctl"].into_iter().any(starts)
}

/// Interface of the first default route in `/proc/<pid>/net/route`.
pub fn default_interface(routes: &str) -> Option<String> {
    routes.lines().skip(1).find_map(|line| {
        let mut fields = line.split_whitespace();
        let (name, destination) = (fields.next()?, fields.next()?);
        (destination == "00000000").then(|| name.to_owned())
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_process_back_in_the_machines_network_has_no_pod_counters() {
        let dir = tempfile::tempdir().expect("a directory");
        let proc = dir.path();
        let is_in = |pid: u32, namespace: &str| {
            let of = proc.join(pid.to_string());
            std::fs::create_dir_all(of.join("ns")).expect("made");
            std::fs::create_dir_all(of.join("net")).expect("made");
            std::fs::write(of.join("net/dev"), TABLE).expect("written");
            let _ = std::fs::remove_file(of.join("ns/net")); // absent the first time
            std::os::unix::fs::symlink(namespace, of.join("ns/net")).expect("linked");
        };
        is_in(1, "net:[1]");
        is_in(7, "net:[2]");
        let (_, namespace) = of_pods_process(proc, 7).expect("in its pod's");
        assert_eq!(namespace.as_deref(), Some(Path::new("net:[2]")));
        is_in(7, "net:[1]");
        assert!(of_pods_process(proc, 7).is_none() && of_process(proc, 7).is_some());
        assert!(of_pods_process(proc, 8).is_none(), "it is gone");
        // The namespace of PID 1 is unreadable: the agent's own is compared instead.
        std::fs::remove_file(proc.join("1/ns/net")).expect("there");
        assert!(of_pods_process(proc, 7).is_some());
        std::fs::create_dir_all(proc.join("self/ns")).expect("made");
        std::os::unix::fs::symlink("net:[1]", proc.join("self/ns/net")).expect("linked");
        assert!(of_pods_process(proc, 7).is_none());
    }

    const TABLE: &str = "Inter-|   Receive                                                |  Transmit
 face |bytes    packets errs drop fifo frame compressed multicast|bytes    packets errs drop fifo colls carrier compressed
    lo: 2776770   11307    0    0    0     0          0         0  2776770   11307    0    0    0     0       0          0
  eth0: 1215645    2751    1    2    0     0          0         0  1782404    4324    3    4    0     0       0          0
veth1a: 1 1 0 0 0 0 0 0 1 1 0 0 0 0 0 0
Docker0: 1 1 0 0 0 0 0 0 1 1 0 0 0 0 0 0
  net1:9 8 7 6 0 0 0 0 5 4 3 2 0 0 0 0
broken: 1 2 x
short: 1 2 3
";

    #[test]
    fn counters_are_read_and_container_ends_left_out() {
        let found = interfaces(TABLE);
        let names: Vec<&str> = found.iter().map(|i| i.name.as_str()).collect();
        assert_eq!(names, ["eth0", "net1"]);
        assert_eq!(found[0].received, DirectionCounters { bytes: 1_215_645, packets: 2751, errors: 1, dropped: 2 });
        assert_eq!(found[0].sent, DirectionCounters { bytes: 1_782_404, packets: 4324, errors: 3, dropped: 4 });
        assert_eq!(found[1].sent, DirectionCounters { bytes: 5, packets: 4, errors: 3, dropped: 2 });
    }

    #[test]
    fn the_default_route_speaks_where_there_is_no_eth0() {
        let routes = "Iface\tDestination\tGateway\nens3\t0000A8C0\t0\nens4\t00000000\t0101A8C0\t0003\n";
        assert_eq!(default_interface(routes).as_deref(), Some("ens4"));
        assert_eq!(default_interface("Iface\tDestination\n"), None);
        let proc = tempfile::tempdir().expect("a directory");
        let net = proc.path().join("7/net");
        std::fs::create_dir_all(&net).expect("made");
        std::fs::write(
            net.join("dev"),
            "ens3: 1 1 0 0 0 0 0 0 1 1 0 0 0 0 0 0\nens4: 2 1 0 0 0 0 0 0 1 1 0 0 0 0 0 0\n",
        )
        .expect("written");
        assert_eq!(of_process(proc.path(), 7).and_then(|n| n.primary), None);
        std::fs::write(net.join("route"), routes).expect("written");
        assert_eq!(of_process(proc.path(), 7).and_then(|n| n.primary), Some(1));
        assert_eq!(of_process(proc.path(), 8), None);
    }

    #[test]
    fn the_node_s_own_network_is_readable() {
        assert!(of_process(Path::new("/proc"), std::process::id()).is_some());
    }
}
