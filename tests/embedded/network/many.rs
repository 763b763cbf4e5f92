//! Network setup and teardown of hundreds of pods, with latencies.

use std::time::{Duration, Instant};

use berth_runtime::network::TransportProtocol;

use super::machine::*;

/// Default number of pods; `BERTH_MANY_PODS` sets another.
const QUICK: usize = 40;

#[test]
fn many_pods_leave_nothing() {
    on_a_machine("many_pods_leave_nothing", async |machine| {
        let count: usize = std::env::var("BERTH_MANY_PODS").ok().and_then(|n| n.parse().ok()).unwrap_or(QUICK);
        let network = machine.builtin("10.9.0.0/16,fd00:9::/64").await;
        let before = links().len();
        let (mut up, mut down): (Vec<Duration>, Vec<Duration>) = (Vec::new(), Vec::new());
        // As many concurrent pods as on a node.
        for batch in (0..count).collect::<Vec<_>>().chunks(100) {
            let mut pods = Vec::new();
            for number in batch {
                let mut pod = pod(*number);
                let host_port = 10_000 + u16::try_from(*number).expect("few");
                pod.ports =
                    vec![port(TransportProtocol::Tcp, host_port, 80), port(TransportProtocol::Udp, host_port, 80)];
                let begun = Instant::now();
                network.setup(&pod).await.expect("a network");
                up.push(begun.elapsed());
                pods.push(pod);
            }
            for pod in pods {
                let begun = Instant::now();
                network.teardown(&pod).await.expect("taken down");
                down.push(begun.elapsed());
            }
        }
        assert_eq!(machine.left(), Vec::<String>::new());
        assert_eq!((links().len(), network.leased()), (before, (0, 0)));
        let rules = ruleset();
        assert!(!rules.contains("udp ."), "{rules}");
        up.sort();
        down.sort();
        let of = |all: &[Duration], percent: usize| all[(all.len() - 1) * percent / 100];
        eprintln!(
            "{count} pods: set up p50 {:?} p99 {:?}, taken down p50 {:?} p99 {:?}",
            of(&up, 50),
            of(&up, 99),
            of(&down, 50),
            of(&down, 99)
        );
    });
}
