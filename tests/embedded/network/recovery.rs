//! Network recovery after the daemon was killed at any point.

use berth_runtime::network::{Network, Protocol};

use super::machine::*;

#[test]
fn what_belongs_to_nobody_goes() {
    on_a_machine("what_belongs_to_nobody_goes", async |ground| {
        // AC-09b-N5: killed between link and metadata; AC-09b-N4: a boot without pods.
        let mut settings = ground.settings();
        settings.builtin.nets = vec!["10.9.0.0/24".parse().expect("a net")];
        let before = ready(settings.clone()).await;
        let (mut kept, mut lost, stray) = (pod(1), pod(2), pod(3));
        kept.ports = vec![port(Protocol::Tcp, 8080, 80)];
        lost.ports = vec![port(Protocol::Tcp, 8081, 80)];
        serve(netns(&kept), "0.0.0.0:80", "kept");
        for pod in [&mut kept, &mut lost] {
            pod.attached = Some(before.setup(pod).await.expect("a network"));
        }
        before.setup(&stray).await.expect("a network");
        let mut twin = lost.clone();
        twin.attached = None;
        before.teardown(&twin).await.expect("its link is lost");
        drop(before);

        let after = Network::open(settings.clone()).await.expect("settings");
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
        assert_eq!(ground.left(), Vec::<String>::new());
        assert_eq!(rebooted.leased(), (0, 0));
    });
}
