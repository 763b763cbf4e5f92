//! Network recovery after the daemon was killed at any point.

use berth_runtime::network::{NetworkManager, TransportProtocol};

use super::machine::*;

#[test]
fn networks_without_a_pod_are_removed() {
    on_a_machine("networks_without_a_pod_are_removed", async |machine| {
        // AC-09b-N5: killed between link and metadata; AC-09b-N4: a boot without pods.
        let mut settings = machine.settings();
        settings.builtin.nets = vec!["10.9.0.0/24".parse().expect("a net")];
        let before = ready(settings.clone()).await;
        let (mut kept, mut lost, stray) = (pod(1), pod(2), pod(3));
        kept.ports = vec![port(TransportProtocol::Tcp, 8080, 80)];
        lost.ports = vec![port(TransportProtocol::Tcp, 8081, 80)];
        serve(netns(&kept), "0.0.0.0:80", "kept");
        for pod in [&mut kept, &mut lost] {
            pod.attached = Some(before.setup(pod).await.expect("a network"));
        }
        before.setup(&stray).await.expect("a network");
        let mut twin = lost.clone();
        twin.attached = None;
        before.teardown(&twin).await.expect("its link is lost");
        drop(before);

        let after = NetworkManager::open(settings.clone()).await.expect("settings");
        let gone = after.recover(&[kept.clone(), lost.clone()]).await.expect("recovered");
        assert_eq!(gone, [lost.id.clone()]);
        assert_eq!(after.leased(), (2, 0));
        assert_eq!(links().iter().filter(|l| l.starts_with("veth") && *l != "vethup").count(), 1);
        assert!(after.namespace_file(&kept.id).is_file() && !after.namespace_file(&stray.id).exists());
        assert_eq!(ask(None, "127.0.0.1:8080").expect("an answer"), "kept 10.9.0.1");
        let next = after.setup(&pod(4)).await.expect("a network");
        assert_eq!(next.ips, [address("10.9.0.4")], "nobody's by now");
        drop(after);

        let rebooted = ready(settings).await;
        assert_eq!(machine.left(), Vec::<String>::new());
        assert_eq!(rebooted.leased(), (0, 0));
    });
}
