//! Crashes of the agent between any two steps of an allocation (spec 06c §1.8, §1.9).

use std::collections::BTreeSet;

use berth_testkit::device_plugin::{PluginMethod, healthy};

use super::fixture::{Agent, EVER, GPU, Node, RecordedFile, count, no_options, pod};

/// IDs of all assigned devices; each must have one owner.
fn assigned(agent: &Agent) -> BTreeSet<String> {
    let owners = agent.owners();
    let ids: BTreeSet<String> = owners.iter().map(|[_, _, _, id]| id.clone()).collect();
    assert_eq!(ids.len(), owners.len(), "a device has two owners: {owners:?}");
    ids
}

/// The agent may be killed after any write of the checkpoint, or before the first one: whatever it finds then, all pods
/// get their devices, those in the checkpoint keep theirs without a call, and no device has two owners.
#[tokio::test]
async fn a_crash_between_any_two_writes_assigns_no_device_twice() {
    let node = Node::new();
    let mut plugin = node.plugin(GPU, no_options());
    let ids = ["d0", "d1", "d2", "d3", "d4", "d5"];
    plugin.set_devices(ids.map(healthy).into());
    let pods = [pod("a", 2), pod("b", 1), pod("c", 3)];
    let active: Vec<_> = pods.iter().collect();

    let file = RecordedFile::containing(None);
    let agent = node.start_with(file.clone(), EVER).await;
    agent.register(&mut plugin).await;
    agent.until_capacity(GPU, (6, 6)).await;
    for pod in &pods {
        agent.admit(pod, &active).await.expect("devices are free");
    }
    agent.stop().await;
    let contents = file.contents();
    assert!(contents.len() >= 4, "one write for the devices, one for each pod: {}", contents.len());

    for kept in std::iter::once(None).chain(contents.iter().map(Some)) {
        let agent = node.start_with(RecordedFile::containing(kept), EVER).await;
        let before = agent.owners();
        let calls = count(&plugin, PluginMethod::Allocate);
        agent.register(&mut plugin).await;
        agent.until_capacity(GPU, (6, 6)).await;
        // In another order than before: the choice of one must not depend on that of the others.
        for pod in pods.iter().rev() {
            agent.admit(pod, &active).await.expect("devices are free");
        }
        assert_eq!(assigned(&agent).len(), 6);
        let owners = agent.owners();
        assert!(before.iter().all(|owner| owners.contains(owner)), "{before:?} became {owners:?}");
        let known: BTreeSet<&String> = before.iter().map(|[pod, ..]| pod).collect();
        assert_eq!(count(&plugin, PluginMethod::Allocate) - calls, pods.len() - known.len());
        agent.stop().await;
    }
}
