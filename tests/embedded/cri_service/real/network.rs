//! Pod networks through the CRI services. Spec 09a §2, 09b §11, §14.

use std::{
    io::Read,
    net::{SocketAddr, TcpStream},
    process::Command,
    time::{Duration, Instant},
};

use berth_proto::cri;
use berth_sys::{
    net_namespace,
    netlink::{NetlinkFamily, Socket, rtnetlink},
};

use berth_testkit::embedded::{
    fixture::{in_network_namespace, namespace_file},
    in_process::{container, daemon, pod},
};

/// Timeout of a step.
const LIMIT: Duration = Duration::from_secs(30);

/// The same pod with its own network namespace.
pub fn with_network(mut pod: cri::PodSandboxConfig) -> cri::PodSandboxConfig {
    let context = pod.linux.as_mut().and_then(|linux| linux.security_context.as_mut()).expect("there");
    context.namespace_options.as_mut().expect("there").network = cri::NamespaceMode::Pod.into();
    pod
}

/// A container that responds with a word to every connection on a port.
fn server(word: &str) -> cri::ContainerConfig {
    container(word, &format!("while :; do echo {word} | busybox nc -l -p 80; done"))
}

/// The response of an address; retries until it accepts connections.
async fn asked(to: &str) -> String {
    let (to, begun): (SocketAddr, Instant) = (to.parse().expect("an address"), Instant::now());
    tokio::task::spawn_blocking(move || {
        loop {
            let mut answer = String::new();
            let read = TcpStream::connect_timeout(&to, LIMIT).and_then(|mut stream| {
                stream.set_read_timeout(Some(LIMIT))?;
                stream.read_to_string(&mut answer)
            });
            match read {
                Ok(_) if !answer.is_empty() => return answer,
                other => assert!(begun.elapsed() < LIMIT, "{to}: {other:?}"),
            }
            std::thread::sleep(Duration::from_millis(20));
        }
    })
    .await
    .expect("asked")
}

/// Links, packet filter elements, and files that pods left behind.
fn left_of_networks() -> Vec<String> {
    let links =
        Socket::open(NetlinkFamily::Route).and_then(|mut socket| socket.dump(&rtnetlink::get_links())).expect("links");
    let mut left: Vec<_> = links.iter().filter_map(rtnetlink::link).map(|link| link.name).collect();
    left.retain(|name| name.starts_with("veth"));
    let rules = Command::new("nft").args(["list", "ruleset"]).output();
    let rules = rules.map(|output| String::from_utf8_lossy(&output.stdout).into_owned()).unwrap_or_default();
    left.extend(rules.lines().filter(|line| line.contains("elements = { tcp")).map(str::to_owned));
    left
}

#[test]
fn pods_reach_each_other_and_are_reached() {
    in_network_namespace("pods_reach_each_other_and_are_reached", async |place| {
        // AC-09b-N1, N14 and AC-09-E8, through the services
        let daemon = daemon(place.path()).await;
        let mut config = with_network(pod(place.path(), "one"));
        config.port_mappings = vec![cri::PortMapping { host_port: 8080, container_port: 80, ..Default::default() }];
        let one = daemon.run(config).await;
        let two = daemon.run(with_network(pod(place.path(), "two"))).await;
        daemon.start(&one, server("first")).await;
        let client = daemon.start(&two, container("client", "while :; do sleep 1; done")).await;
        let (first, second) = (daemon.address(&one).await, daemon.address(&two).await);
        assert!(first.starts_with("10.") && second.starts_with("10.") && first != second, "{first} {second}");
        assert_eq!(asked(&format!("{first}:80")).await, "first\n");
        assert_eq!(asked("127.0.0.1:8080").await, "first\n");
        let script = format!("until busybox nc -w 2 {first} 80 </dev/null; do sleep 0.05; done");
        assert_eq!(daemon.exec(&client, &script).await, ("first\n".to_owned(), 0));
        let (out, _) = daemon.exec(&client, "busybox ip -o addr show dev eth0").await;
        assert!(out.contains(&format!("inet {second}/")), "{out}");
        for sandbox in [&one, &two] {
            assert!(namespace_file(place.path(), sandbox).exists());
            daemon.remove(sandbox).await;
            assert!(!namespace_file(place.path(), sandbox).exists());
        }
        place.assert_clean();
        assert_eq!(left_of_networks(), Vec::<String>::new());
        daemon.stop.cancel();
    });
}

/// Concurrent pod starts and stops share the address pool, the packet filter, and the bridge. Takes about ten seconds:
/// such a race affected four pods of 277.
#[test]
fn bursts_of_pods_come_and_go_without_a_failure() {
    const BURST: usize = 40;
    let bursts = std::env::var("BERTH_BURSTS").ok().and_then(|count| count.parse().ok()).unwrap_or(3);
    in_network_namespace("bursts_of_pods_come_and_go_without_a_failure", async |place| {
        let daemon = daemon(place.path()).await;
        for burst in 0..bursts {
            let one = async |number: usize| {
                let config = with_network(pod(place.path(), &format!("b{burst}-{number}")));
                let sandbox = daemon.calls.run(&config).await?;
                daemon.calls.stop(&sandbox).await?;
                daemon.calls.remove(&sandbox).await
            };
            let ended = futures::future::join_all((0..BURST).map(one)).await;
            let failed: Vec<_> = ended.into_iter().filter_map(Result::err).collect();
            assert!(failed.is_empty(), "{failed:#?}");
        }
        place.assert_clean();
        assert_eq!(left_of_networks(), Vec::<String>::new());
        daemon.stop.cancel();
    });
}

#[test]
fn a_pod_that_lost_its_network_is_not_ready() {
    in_network_namespace("a_pod_that_lost_its_network_is_not_ready", async |place| {
        let daemon = daemon(place.path()).await;
        let (file, link, kept) = (
            daemon.run(with_network(pod(place.path(), "file"))).await,
            daemon.run(with_network(pod(place.path(), "link"))).await,
            daemon.run(with_network(pod(place.path(), "kept"))).await,
        );
        let runs = daemon.start(&link, container("c", "while :; do sleep 1; done")).await;
        // As `ip netns del` does.
        net_namespace::unbind_file(&namespace_file(place.path(), &file)).expect("removed");
        daemon.until_not_ready(&file).await;
        let mut socket = Socket::open(NetlinkFamily::Route).expect("a socket");
        let links = socket.dump(&rtnetlink::get_links()).expect("links");
        let end = links.iter().filter_map(rtnetlink::link).find(|end| end.alias == link).expect("the pod's link");
        socket.request(rtnetlink::delete_link(end.index)).expect("removed");
        daemon.until_not_ready(&link).await;
        assert_eq!(daemon.status(&runs).await.state(), cri::ContainerState::ContainerRunning, "the kubelet ends it");
        assert_eq!(daemon.pod_status(&kept).await.state(), cri::PodSandboxState::SandboxReady);
        for sandbox in [&file, &link, &kept] {
            daemon.remove(sandbox).await;
        }
        place.assert_clean();
        assert_eq!(left_of_networks(), Vec::<String>::new());
        daemon.stop.cancel();
    });
}

#[test]
fn a_network_lost_without_a_daemon_is_detected_at_start() {
    in_network_namespace("a_network_lost_without_a_daemon_is_detected_at_start", async |place| {
        let at = place.path().to_owned();
        let first = std::thread::spawn(move || {
            let runtime = tokio::runtime::Runtime::new().expect("a runtime");
            let sandboxes = runtime.block_on(async {
                let daemon = daemon(&at).await;
                (daemon.run(with_network(pod(&at, "lost"))).await, daemon.run(with_network(pod(&at, "kept"))).await)
            });
            // As if the daemon was killed.
            runtime.shutdown_timeout(Duration::from_millis(100));
            sandboxes
        });
        let (lost, kept) = first.join().expect("ran");
        net_namespace::unbind_file(&namespace_file(place.path(), &lost)).expect("removed");
        let daemon = daemon(place.path()).await;
        assert_eq!(daemon.pod_status(&lost).await.state(), cri::PodSandboxState::SandboxNotready);
        assert_eq!(daemon.pod_status(&kept).await.state(), cri::PodSandboxState::SandboxReady);
        for sandbox in [&lost, &kept] {
            daemon.remove(sandbox).await;
        }
        place.assert_clean();
        assert_eq!(left_of_networks(), Vec::<String>::new());
        daemon.stop.cancel();
    });
}
