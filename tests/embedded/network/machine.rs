//! Test machine: a network namespace, a mount namespace, and an uplink to an outside machine.

use std::{
    collections::BTreeMap,
    io::{self, Read, Write},
    net::{IpAddr, SocketAddr, TcpListener, TcpStream},
    os::fd::{AsFd, AsRawFd, OwnedFd},
    path::PathBuf,
    sync::Arc,
    thread,
    time::Duration,
};

use berth_runtime::network::{NetworkManager, NetworkSettings, PortMapping, SandboxNetwork, TransportProtocol};
use berth_sys::{
    net_namespace,
    netlink::{
        NetlinkFamily as Netlink, Socket,
        rtnetlink::{self, VethPair},
    },
};
use nix::{
    mount::{MsFlags, mount},
    sched::{CloneFlags, unshare},
};

/// This machine's address on its uplink.
pub const NODE: &str = "192.0.2.1";
/// Address of the outside machine.
pub const OUTSIDE: &str = "192.0.2.9";
/// Timeout of a step.
pub const LIMIT: Duration = Duration::from_secs(30);

/// Directory and outside machine of a test.
pub struct TestMachine {
    pub dir: tempfile::TempDir,
    /// Network namespace of the outside machine.
    pub outside: Arc<OwnedFd>,
}

/// Runs a test on a machine of its own; reports where it is skipped.
pub fn on_a_machine<F: Future<Output = ()>>(test: &str, body: impl FnOnce(TestMachine) -> F + Send) {
    if !nix::unistd::geteuid().is_root() {
        assert!(std::env::var_os("CI").is_none(), "{test} needs root");
        eprintln!("skipped: {test} needs root: it makes network namespaces");
        return;
    }
    thread::scope(|scope| {
        let run = || {
            unshare(CloneFlags::CLONE_NEWNET | CloneFlags::CLONE_NEWNS).expect("namespaces");
            let none: Option<&str> = None;
            mount(none, "/", none, MsFlags::MS_REC | MsFlags::MS_PRIVATE, none).expect("private mounts");
            let outside = namespace();
            uplink(&outside);
            let machine = TestMachine { dir: tempfile::tempdir().expect("a directory"), outside };
            // Its threads inherit the namespaces of this thread.
            let runtime = tokio::runtime::Builder::new_multi_thread().worker_threads(1).enable_all().build();
            runtime.expect("a runtime").block_on(body(machine));
        };
        thread::Builder::new()
            .name(test.to_owned())
            .spawn_scoped(scope, run)
            .expect("a thread")
            .join()
            .expect("the test");
    });
}

impl TestMachine {
    /// Settings with all paths below the test's directory.
    pub fn settings(&self) -> NetworkSettings {
        let mut settings = NetworkSettings::usual(&self.dir.path().join("net"));
        settings.namespaces = self.dir.path().join("netns");
        settings.cni_directory = self.dir.path().join("net.d");
        settings.cni_cache = self.dir.path().join("results");
        settings
    }

    /// The built-in network with these ranges, ready.
    pub async fn builtin(&self, nets: &str) -> NetworkManager {
        let mut settings = self.settings();
        settings.builtin.nets = nets.split(',').map(|net| net.parse().expect("a net")).collect();
        ready(settings).await
    }

    /// Leftovers of pods: links, leases, packet filter elements, and files.
    pub fn left(&self) -> Vec<String> {
        let mut left: Vec<String> = links().into_iter().filter(|l| l.starts_with("veth") && l != "vethup").collect();
        let files = std::fs::read_dir(self.dir.path().join("netns")).into_iter().flatten().flatten();
        left.extend(files.map(|f| f.file_name().to_string_lossy().into_owned()));
        let results = std::fs::read_dir(self.dir.path().join("results")).into_iter().flatten().flatten();
        left.extend(results.map(|f| f.file_name().to_string_lossy().into_owned()));
        let leases = std::fs::read_to_string(self.dir.path().join("net/leases.json")).unwrap_or_default();
        left.extend(leases.contains("address").then_some(leases));
        let rules = ruleset();
        left.extend(rules.contains("elements = { tcp").then_some(rules));
        left
    }
}

/// Opens a network, recovers it without pods, and waits until it is ready.
pub async fn ready(settings: NetworkSettings) -> NetworkManager {
    let network = NetworkManager::open(settings).await.expect("settings");
    assert!(network.recover(&[]).await.expect("recovered").is_empty());
    network.status().await.expect("ready");
    network
}

/// Names of the machine's links.
pub fn links() -> Vec<String> {
    let all = Socket::open(Netlink::Route).expect("a socket").dump(&rtnetlink::get_links()).expect("links");
    all.iter().filter_map(rtnetlink::link).map(|l| l.name).collect()
}

/// The nftables ruleset as text; empty without `nft`.
pub fn ruleset() -> String {
    let output = std::process::Command::new("nft").args(["list", "ruleset"]).output();
    output.map(|o| String::from_utf8_lossy(&o.stdout).into_owned()).unwrap_or_default()
}

/// Creates a network namespace.
pub fn namespace() -> Arc<OwnedFd> {
    let made = thread::spawn(|| {
        unshare(CloneFlags::CLONE_NEWNET).expect("a namespace");
        OwnedFd::from(std::fs::File::open("/proc/thread-self/ns/net").expect("its file"))
    });
    Arc::new(made.join().expect("a namespace"))
}

fn uplink(outside: &OwnedFd) {
    let mut socket = Socket::open(Netlink::Route).expect("a socket");
    socket
        .request_all(vec![rtnetlink::up(1), rtnetlink::new_bridge("up0", [2, 0, 0, 0, 0, 1], 1500)])
        .expect("a bridge");
    let index = |socket: &mut Socket, name| {
        rtnetlink::link(&socket.query(rtnetlink::get_link(name)).expect("a link").expect("an answer"))
            .expect("a link")
            .index
    };
    let bridge = index(&mut socket, "up0");
    let mac = [2, 0, 0, 0, 0, 9];
    let pair = VethPair { name: "vethup", bridge, peer: "eth0", mac, namespace: outside.as_raw_fd(), mtu: 1500 };
    socket
        .request_all(vec![
            rtnetlink::set_bridge(bridge, [2, 0, 0, 0, 0, 1], 1500),
            rtnetlink::new_address(bridge, address(NODE), 24),
            rtnetlink::new_address(bridge, address("fd99::1"), 64),
            rtnetlink::new_veth_pair(&pair),
            rtnetlink::set_port("vethup", "uplink"),
            rtnetlink::new_default_route(bridge, address(OUTSIDE)),
        ])
        .expect("an uplink");
    net_namespace::within(outside.as_fd(), || {
        let mut socket = Socket::open(Netlink::Route)?;
        let link = index(&mut socket, "eth0");
        let all = vec![
            rtnetlink::up(1),
            rtnetlink::up(link),
            rtnetlink::new_address(link, address(OUTSIDE), 24),
            rtnetlink::new_address(link, address("fd99::9"), 64),
        ];
        Ok(socket.request_all(all)?)
    })
    .expect("an outside");
}

pub fn address(text: &str) -> IpAddr {
    text.parse().expect("an address")
}

/// A pod with its own network.
pub fn pod(number: usize) -> SandboxNetwork {
    SandboxNetwork {
        id: format!("{number:064x}").chars().rev().collect(),
        name: format!("pod-{number}"),
        namespace: "default".to_owned(),
        uid: format!("uid-{number}"),
        netns: Some(namespace()),
        ..SandboxNetwork::default()
    }
}

pub fn port(protocol: TransportProtocol, host_port: u16, container_port: u16) -> PortMapping {
    PortMapping { protocol, host_port, container_port, host_ip: String::new() }
}

pub fn annotated(mut pod: SandboxNetwork, key: &str, value: &str) -> SandboxNetwork {
    pod.annotations = BTreeMap::from([(key.to_owned(), value.to_owned())]);
    pod
}

/// Responds to every connection on a port in a namespace with a name and the client's address.
pub fn serve(at: &OwnedFd, on: &str, name: &'static str) {
    let on: SocketAddr = on.parse().expect("an address");
    let listener = net_namespace::within(at.as_fd(), || TcpListener::bind(on)).expect("listening");
    thread::spawn(move || {
        for stream in listener.incoming().flatten() {
            let from = stream.peer_addr().map(|a| a.ip().to_string()).unwrap_or_default();
            // A client may have disconnected.
            let _ = (&stream).write_all(format!("{name} {from}").as_bytes());
        }
    });
}

/// The response at an address, from a namespace or from the machine itself.
pub fn ask(from: Option<&OwnedFd>, to: &str) -> io::Result<String> {
    ask_within(from, to, LIMIT)
}

pub fn ask_within(from: Option<&OwnedFd>, to: &str, limit: Duration) -> io::Result<String> {
    let to: SocketAddr = to.parse().expect("an address");
    let talk = || {
        let mut stream = TcpStream::connect_timeout(&to, limit)?;
        stream.set_read_timeout(Some(limit))?;
        let mut answer = String::new();
        stream.read_to_string(&mut answer)?;
        Ok(answer)
    };
    match from {
        Some(from) => net_namespace::within(from.as_fd(), talk),
        None => talk(),
    }
}

pub fn netns(pod: &SandboxNetwork) -> &OwnedFd {
    pod.netns.as_ref().expect("a namespace")
}

/// Writes an executable script, for CNI plugins.
pub fn script(path: &PathBuf, text: &str) {
    use std::os::unix::fs::PermissionsExt;
    std::fs::create_dir_all(path.parent().expect("a directory")).expect("creatable");
    std::fs::write(path, text).expect("writable");
    std::fs::set_permissions(path, std::fs::Permissions::from_mode(0o755)).expect("executable");
}
