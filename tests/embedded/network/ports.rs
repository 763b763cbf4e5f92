//! Host ports of pods: reachability, conflicts, and recovery of a flushed packet filter.

use std::{
    io,
    net::UdpSocket,
    os::fd::AsFd,
    process::Command,
    thread,
    time::{Duration, Instant},
};

use berth_runtime::network::TransportProtocol;
use berth_sys::{
    net_namespace,
    netlink::{
        self, Socket,
        conntrack::{self, End},
        nf_tables,
    },
};

use super::machine::*;

#[test]
fn a_host_port_is_reached_from_everywhere() {
    on_a_machine("a_host_port_is_reached_from_everywhere", async |machine| {
        // AC-09b-N1, AC-09-E8: no external program is run.
        let network = machine.builtin("10.9.0.0/24,fd00:9::/64").await;
        let (mut one, two) = (pod(1), pod(2));
        one.ports = vec![port(TransportProtocol::Tcp, 8080, 80), port(TransportProtocol::Tcp, 0, 90)];
        network.setup(&one).await.expect("a network");
        network.setup(&two).await.expect("a network");
        serve(netns(&one), "[::]:80", "one");
        let from = |from, to: &str| ask(from, to).unwrap_or_else(|e| panic!("{to}: {e}\n{}", ruleset()));
        assert_eq!(from(None, "127.0.0.1:8080"), "one ::ffff:10.9.0.1");
        assert!(from(None, &format!("{NODE}:8080")).starts_with("one "));
        assert_eq!(from(Some(&machine.outside), &format!("{NODE}:8080")), format!("one ::ffff:{OUTSIDE}"));
        assert_eq!(from(Some(netns(&two)), &format!("{NODE}:8080")), "one ::ffff:10.9.0.1");
        assert_eq!(from(Some(netns(&one)), &format!("{NODE}:8080")), "one ::ffff:10.9.0.1");
        assert_eq!(from(Some(&machine.outside), "[fd99::1]:8080"), "one fd99::9");
        assert_eq!(from(Some(netns(&one)), "[fd99::1]:8080"), "one fd00:9::1");
        network.teardown(&one).await.expect("taken down");
        assert!(ask(None, "127.0.0.1:8080").is_err());
        network.teardown(&two).await.expect("taken down");
        assert_eq!(machine.left(), Vec::<String>::new());
    });
}

#[test]
fn the_second_pod_does_not_get_the_port() {
    on_a_machine("the_second_pod_does_not_get_the_port", async |machine| {
        // AC-09b-N7
        let network = machine.builtin("10.9.0.0/24").await;
        let (mut one, mut two) = (pod(1), pod(2));
        one.ports = vec![port(TransportProtocol::Tcp, 80, 80)];
        two.ports.clone_from(&one.ports);
        two.ports.push(port(TransportProtocol::Sctp, 80, 80));
        network.setup(&one).await.expect("a network");
        let refused = network.setup(&two).await.expect_err("taken").to_string();
        assert_eq!(refused, format!("hostPort 80/tcp is already in use by sandbox {}", one.id));
        assert_eq!(network.leased(), (1, 0));
        assert!(!network.namespace_file(&two.id).exists());
        network.teardown(&one).await.expect("taken down");
        network.setup(&two).await.expect("free now");
        network.teardown(&two).await.expect("taken down");
        assert_eq!(machine.left(), Vec::<String>::new());
    });
}

#[test]
fn a_flushed_filter_is_back_within_a_second() {
    on_a_machine("a_flushed_filter_is_back_within_a_second", async |machine| {
        // AC-09b-N2
        let network = machine.builtin("10.9.0.0/24").await;
        let watched = network.clone();
        let _watchers = tokio::spawn(async move { watched.run_watchers(Default::default()).await });
        let mut pod = pod(1);
        pod.ports = vec![port(TransportProtocol::Tcp, 8080, 80)];
        network.setup(&pod).await.expect("a network");
        serve(netns(&pod), "0.0.0.0:80", "pod");
        assert!(ask(None, "127.0.0.1:8080").is_ok());
        for round in 1..=3 {
            let (begin, end) = nf_tables::batch_messages();
            let mut socket = Socket::open(netlink::NetlinkFamily::Netfilter).expect("a socket");
            socket.transaction(begin, vec![nf_tables::delete_table("berth")], end).expect("flushed");
            let begun = Instant::now();
            let works = || ask_within(None, "127.0.0.1:8080", Duration::from_millis(100)).is_ok();
            while network.filter_reapplied() < round || !works() {
                assert!(begun.elapsed() < LIMIT, "still gone");
                tokio::time::sleep(Duration::from_millis(10)).await;
            }
        }
    });
}

#[test]
fn the_machines_loopback_is_not_exposed() {
    on_a_machine("the_machines_loopback_is_not_exposed", async |machine| {
        // AC-09b-N10: CVE-2020-8558.
        let network = machine.builtin("10.9.0.0/24").await;
        let evil = pod(1);
        network.setup(&evil).await.expect("a network");
        let agent = UdpSocket::bind("0.0.0.0:10250").expect("bound");
        agent.set_read_timeout(Some(Duration::from_millis(500))).expect("a limit");
        let reaches = |to: &str| {
            let sender = net_namespace::within(netns(&evil).as_fd(), || UdpSocket::bind("0.0.0.0:0")).expect("bound");
            sender.send_to(b"!", (to, 10250)).expect("sent");
            agent.recv_from(&mut [0; 8]).is_ok()
        };
        let prepared = net_namespace::within(netns(&evil).as_fd(), || {
            std::fs::write("/proc/sys/net/ipv4/conf/eth0/route_localnet", "1")?;
            let ip = |args: &str| Command::new("ip").args(args.split(' ')).status();
            let down = ip("link set lo down")?.success();
            // Without local routes, loopback addresses are routed over the other link.
            let _ = ip("route del local 127.0.0.1 table local");
            let _ = ip("route del local 127.0.0.0/8 table local");
            Ok(down && ip("route add 127.0.0.1/32 via 10.9.0.1 dev eth0")?.success())
        });
        match prepared {
            Err(e) if e.kind() == io::ErrorKind::NotFound => return eprintln!("skipped: needs ip"),
            prepared => assert!(prepared.expect("prepared"), "the route is there"),
        }
        assert!(reaches("10.9.0.1"), "the machine's own address");
        assert!(!reaches("127.0.0.1"), "the machine's loopback");
        let (begin, end) = nf_tables::batch_messages();
        let mut socket = Socket::open(netlink::NetlinkFamily::Netfilter).expect("a socket");
        socket.transaction(begin, vec![nf_tables::delete_table("berth")], end).expect("flushed");
        assert!(reaches("127.0.0.1"), "without the rule it would");
    });
}

#[test]
fn datagrams_find_the_new_pod() {
    on_a_machine("datagrams_find_the_new_pod", async |machine| {
        // AC-09b-N12
        let network = machine.builtin("10.9.0.0/24").await;
        let client = net_namespace::within(machine.outside.as_fd(), || UdpSocket::bind("0.0.0.0:5000")).expect("bound");
        client.set_read_timeout(Some(Duration::from_millis(500))).expect("a limit");
        let answer = || {
            client.send_to(b"?", (NODE, 53)).expect("sent");
            let mut bytes = [0; 16];
            let (length, _) = client.recv_from(&mut bytes)?;
            Ok::<_, io::Error>(String::from_utf8_lossy(&bytes[..length]).into_owned())
        };
        assert!(answer().is_err(), "nobody is there; the flow is tracked all the same");
        for (number, name) in [(1, "first"), (2, "second")] {
            let mut pod = pod(number);
            pod.ports = vec![port(TransportProtocol::Udp, 53, 5353)];
            let attached = network.setup(&pod).await.expect("a network");
            let server = net_namespace::within(netns(&pod).as_fd(), || UdpSocket::bind("0.0.0.0:5353")).expect("bound");
            server.set_read_timeout(Some(LIMIT)).expect("a limit");
            let serving = thread::spawn(move || {
                let mut bytes = [0; 16];
                let (_, from) = server.recv_from(&mut bytes).expect("a question");
                server.send_to(name.as_bytes(), from).expect("sent");
            });
            assert_eq!(answer().expect("an answer"), name);
            serving.join().expect("served");
            let mut socket = Socket::open(netlink::NetlinkFamily::Netfilter).expect("a socket");
            for (of, end) in [(address(OUTSIDE), End::Client), (attached.ips[0], End::Server)] {
                let found = socket.dump(&conntrack::list_of(of, end)).expect("listed");
                let found: Vec<_> = found.iter().filter_map(conntrack::connection).filter(|c| c.has(of)).collect();
                assert_eq!(found.len(), 1, "{found:?}");
                assert_eq!((found[0].original.port, found[0].reply.source), (53, attached.ips[0]));
            }
            network.teardown(&pod).await.expect("taken down");
        }
    });
}
