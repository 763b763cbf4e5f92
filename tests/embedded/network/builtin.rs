//! Built-in bridge network: setup, teardown, addresses, bandwidth limits, and dialing into a pod.

use std::{
    io::{Read, Write},
    net::{TcpListener, TcpStream},
    os::fd::AsFd,
    time::{Duration, Instant},
};

use berth_runtime::network::NetworkManager;
use berth_sys::net_namespace;

use super::machine::*;

#[test]
fn a_pod_has_a_network_and_leaves_nothing() {
    on_a_machine("a_pod_has_a_network_and_leaves_nothing", async |machine| {
        // AC-09b-N14: no pod CIDR is configured.
        let network = ready(machine.settings()).await;
        let (one, two) = (pod(1), pod(2));
        let first = network.setup(&one).await.expect("a network");
        let second = network.setup(&two).await.expect("a network");
        assert_eq!((first.ips[0], second.ips[0]), (address("10.87.0.2"), address("10.87.0.3")));
        serve(netns(&one), "0.0.0.0:80", "one");
        serve(&machine.outside, "0.0.0.0:80", "outside");
        assert_eq!(ask(Some(netns(&two)), "10.87.0.2:80").expect("an answer"), "one 10.87.0.3");
        assert_eq!(ask(None, "10.87.0.2:80").expect("an answer"), "one 10.87.0.1");
        assert_eq!(ask(Some(netns(&two)), &format!("{OUTSIDE}:80")).expect("an answer"), format!("outside {NODE}"));
        assert_eq!(
            ask(Some(netns(&two)), "127.0.0.1:80").map_err(|e| e.kind()),
            Err(std::io::ErrorKind::ConnectionRefused)
        );
        assert!(network.namespace_file(&one.id).is_file());
        for pod in [&one, &two, &one] {
            network.teardown(pod).await.expect("taken down, also twice");
        }
        assert_eq!(machine.left(), Vec::<String>::new());
        let third = network.setup(&pod(3)).await.expect("a network");
        assert_eq!(third.ips, [address("10.87.0.4")], "the others rest");
        assert_eq!(network.warning().await, None);
    });
}

#[test]
fn router_advertisements_of_pods_are_not_accepted() {
    on_a_machine("router_advertisements_of_pods_are_not_accepted", async |machine| {
        // CVE-2020-10749: also if no pod has an IPv6 address
        let before = links();
        let network = ready(machine.settings()).await;
        let one = pod(1);
        network.setup(&one).await.expect("a network");
        let accepted = |link: &str| {
            let key = format!("/proc/sys/net/ipv6/conf/{link}/accept_ra");
            std::fs::read_to_string(key).unwrap_or_else(|_| "0".to_owned()).trim().to_owned()
        };
        let made: Vec<String> = links().into_iter().filter(|link| !before.contains(link)).collect();
        assert_eq!(made.len(), 2, "the bridge and the pod's end here: {made:?}");
        for link in made {
            assert_eq!(accepted(&link), "0", "{link}");
        }
        let inside = net_namespace::within(netns(&one).as_fd(), || Ok(accepted("eth0"))).expect("entered");
        assert_eq!(inside, "0");
    });
}

#[test]
fn both_versions_are_usable_at_once() {
    on_a_machine("both_versions_are_usable_at_once", async |machine| {
        // AC-09b-N6
        let network = machine.builtin("10.9.0.0/24,fd00:9::/64").await;
        let one = pod(1);
        let first = network.setup(&one).await.expect("a network");
        assert_eq!(first.ips, [address("10.9.0.2"), address("fd00:9::2")]);
        serve(netns(&one), "[::]:80", "one");
        assert_eq!(ask(None, "[fd00:9::2]:80").expect("an answer"), "one fd00:9::1");
        let mut took = Vec::new();
        for number in 2..6 {
            let pod = pod(number);
            let begun = Instant::now();
            network.setup(&pod).await.expect("a network");
            let from = format!("one fd00:9::{}", number + 1);
            assert_eq!(ask(Some(netns(&pod)), "[fd00:9::2]:80").expect("an answer"), from);
            took.push(begun.elapsed());
        }
        // Duplicate address detection takes a second; a busy machine may take as long occasionally.
        assert!(took.iter().any(|took| took.as_millis() < 900), "nobody looked for duplicates: {took:?}");
        serve(&machine.outside, "[::]:80", "outside");
        assert_eq!(ask(Some(netns(&one)), "[fd99::9]:80").expect("an answer"), "outside fd99::1");
    });
}

#[test]
fn a_small_range_is_used_up() {
    on_a_machine("a_small_range_is_used_up", async |machine| {
        // AC-09b-N3; the table of `ipam` covers the reuse delay of addresses.
        let network = machine.builtin("10.9.0.0/29").await;
        for number in 1..=5 {
            network.setup(&pod(number)).await.expect("a network");
        }
        let refused = network.setup(&pod(6)).await.expect_err("none left").to_string();
        assert_eq!(refused, "no IP addresses available in range set: 10.9.0.1-10.9.0.6");
        assert!(!network.namespace_file(&pod(6).id).exists());
        assert_eq!(network.leased(), (5, 0));
    });
}

#[test]
fn another_range_leaves_old_pods_alone() {
    on_a_machine("another_range_leaves_old_pods_alone", async |machine| {
        let network = machine.builtin("10.9.0.0/24").await;
        let (old, new) = (pod(1), pod(2));
        network.setup(&old).await.expect("a network");
        serve(netns(&old), "0.0.0.0:80", "old");
        network.update_pod_cidr("10.10.0.0/24,fd00:10::/64").await.expect("another range");
        let attached = network.setup(&new).await.expect("a network");
        assert_eq!(attached.ips, [address("10.10.0.2"), address("fd00:10::2")]);
        assert_eq!(ask(Some(netns(&new)), "10.9.0.2:80").expect("an answer"), "old 10.10.0.2");
        assert_eq!(ask(None, "10.9.0.2:80").expect("an answer"), "old 10.9.0.1");
        network.teardown(&old).await.expect("taken down");
        assert!(!ruleset().contains("10.9.0.0/24"), "nobody uses it: {}", ruleset());
        assert!(network.update_pod_cidr("nonsense").await.is_err());
    });
}

#[test]
fn a_pod_is_as_fast_as_it_may_be() {
    on_a_machine("a_pod_is_as_fast_as_it_may_be", async |machine| {
        // AC-09b-N13
        let network = machine.builtin("10.9.0.0/24").await;
        let slow = annotated(pod(1), "kubernetes.io/egress-bandwidth", "1M");
        network.setup(&slow).await.expect("a network");
        let rate = sent(&network, &machine, &slow);
        assert!((600_000.0..1_100_000.0).contains(&rate), "{rate} bit/s");
        let refused = network.setup(&annotated(pod(2), "kubernetes.io/ingress-bandwidth", "5")).await;
        assert_eq!(refused.expect_err("too slow").to_string(), "resource is unreasonably small (< 1kbit)");
        assert_eq!(network.leased(), (1, 0));
        let limited = annotated(pod(3), "kubernetes.io/ingress-bandwidth", "10M");
        network.setup(&limited).await.expect("a network");
    });
}

fn sent(_: &NetworkManager, machine: &TestMachine, pod: &berth_runtime::network::SandboxNetwork) -> f64 {
    const BYTES: usize = 200_000;
    let listener =
        net_namespace::within(machine.outside.as_fd(), || TcpListener::bind("0.0.0.0:90")).expect("listening");
    let stream = net_namespace::within(netns(pod).as_fd(), || TcpStream::connect((OUTSIDE, 90))).expect("connected");
    let writer = std::thread::spawn(move || {
        // The reader may close early.
        let _ = (&stream).write_all(&[0; BYTES * 4]);
    });
    let (mut from, _) = listener.accept().expect("a connection");
    let mut bytes = vec![0; BYTES / 4];
    // The first bytes may pass in a burst.
    from.read_exact(&mut bytes).expect("bytes");
    let begun = Instant::now();
    let mut bytes = vec![0; BYTES];
    from.read_exact(&mut bytes).expect("bytes");
    let rate = BYTES as f64 * 8.0 / begun.elapsed().as_secs_f64();
    drop((from, listener));
    writer.join().expect("the writer");
    rate
}

#[test]
fn a_port_inside_a_pod_is_reached() {
    on_a_machine("a_port_inside_a_pod_is_reached", async |machine| {
        // AC-09b-N11
        let network = machine.builtin("10.9.0.0/24").await;
        let pod = pod(1);
        network.setup(&pod).await.expect("a network");
        let file = network.namespace_file(&pod.id);
        serve(netns(&pod), "[::1]:80", "six");
        serve(netns(&pod), "127.0.0.1:81", "four");
        for (port, expected) in [(80, "six ::1"), (81, "four 127.0.0.1")] {
            let mut stream = network.dial(Some(&file), &pod.id, port).await.expect("connected");
            let mut answer = String::new();
            tokio::io::AsyncReadExt::read_to_string(&mut stream, &mut answer).await.expect("an answer");
            assert_eq!(answer, expected);
        }
        let refused = network.dial(Some(&file), &pod.id, 82).await.expect_err("nobody listens").to_string();
        let expected = format!("failed to connect to localhost:82 inside namespace {:?}, IPv4: ", pod.id);
        assert!(refused.starts_with(&expected) && refused.contains(" IPv6 "), "{refused}");
    });
}

#[test]
fn a_bridge_that_was_removed_is_made_again() {
    on_a_machine("a_bridge_that_was_removed_is_made_again", async |machine| {
        use berth_sys::netlink::{NetlinkFamily, Socket, rtnetlink};
        let network = machine.builtin("10.9.0.0/24").await;
        let watched = network.clone();
        let _watchers = tokio::spawn(async move { watched.run_watchers(Default::default()).await });
        let pod = pod(1);
        network.setup(&pod).await.expect("a network");
        serve(netns(&pod), "0.0.0.0:80", "pod");
        let mut socket = Socket::open(NetlinkFamily::Route).expect("a socket");
        let bridge = rtnetlink::link(&socket.query(rtnetlink::get_link("berth0")).expect("there").expect("received"))
            .expect("a link");
        tokio::task::yield_now().await;
        socket.request(rtnetlink::delete_link(bridge.index)).expect("removed");
        let begun = Instant::now();
        while ask_within(None, "10.9.0.2:80", Duration::from_millis(100)).is_err() {
            assert!(begun.elapsed() < LIMIT, "the pod is cut off");
            tokio::time::sleep(Duration::from_millis(10)).await;
        }
    });
}
