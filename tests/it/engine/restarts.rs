//! Agent restarts: running pods are not affected.

use std::{sync::Arc, time::Duration};

use berth_ports::ProbeResults;
use berth_types::{PodSource, api};
use serde_json::json;

use berth_testkit::{
    agent::{Machine, Setup},
    pods::{pod, simple},
    scripted_cri::{Behaviour, Fault},
};

const SOON: Duration = Duration::from_secs(2);

#[tokio::test(start_paused = true)]
async fn kill_minus_nine_changes_nothing_for_pods() {
    let machine = Machine::new();
    let agent = machine.start().await;
    machine.cri.behave("prepare", [Behaviour::exits(0, Duration::from_millis(10))]);
    machine.cri.behave("crashy", [Behaviour::exits(1, Duration::from_millis(50)), Behaviour::default()]);
    let web = pod(
        "web",
        json!({
            "initContainers": [{"name": "prepare"}, {"name": "side", "restartPolicy": "Always"}],
            "containers": [{"name": "main"}, {"name": "crashy"}],
        }),
    );
    agent.only_static([&web]).await;
    let before = agent
        .until(web.uid(), "ready after a crash", Duration::from_secs(15), |s| {
            let ready = s.conditions.iter().flatten().any(|c| c.type_ == "Ready" && c.status == "True");
            ready && s.container_statuses.iter().flatten().any(|c| c.restart_count == 1)
        })
        .await;
    agent.kill();
    tokio::time::sleep(Duration::from_secs(30)).await;
    machine.cri.clear_calls();
    let agent = machine.start().await;
    let mut events = agent.status.events();
    agent.only_static([&web]).await;
    tokio::time::sleep(Duration::from_secs(90)).await;
    let reads = ["list", "status", "version", "get_"];
    let acts = machine.cri.calls().into_iter().filter(|c| !reads.iter().any(|read| c.op.contains(read)));
    assert_eq!(acts.map(|c| c.op).collect::<Vec<_>>(), Vec::<&str>::new(), "nothing is done to what runs well");
    let after = agent.status.status(web.uid()).expect("a status");
    assert_eq!(after.container_statuses, before.container_statuses);
    assert_eq!(after.init_container_statuses, before.init_container_statuses);
    while let Ok(berth_status::StatusEvent::Updated(_, status) | berth_status::StatusEvent::Added(_, status)) =
        events.try_recv()
    {
        assert_eq!(status.phase.as_deref(), Some("Running"), "never less than it was");
        let ready = |s: &berth_types::api::PodStatus| s.container_statuses.iter().flatten().all(|c| c.ready);
        assert!(ready(&status), "{status:#?}");
    }
    agent.stop(SOON).await;
}

#[tokio::test(start_paused = true)]
async fn a_static_pod_continues_from_the_status_of_its_mirror_pod() {
    // AC-10a-38: row 7
    let machine = Machine::new();
    let agent = machine.start().await;
    let web = pod("web", json!({"containers": [{"name": "main", "startupProbe": {}, "readinessProbe": {}}]}));
    agent.only_static([&web]).await;
    let before = agent.until_ready(web.uid(), SOON).await;
    agent.kill();
    tokio::time::sleep(Duration::from_secs(30)).await;
    let agent = machine.start().await;
    let id = before.container_statuses.as_ref().expect("a list")[0].container_id.as_ref().expect("an id");
    agent.probes.set_results(id.split_once("://").expect("a runtime's").1, ProbeResults::default());
    agent.files([&web]).await;
    let is_ready = |s: &api::PodStatus| s.container_statuses.iter().flatten().all(|c| c.ready);
    let alone = agent.until(web.uid(), "told from what is seen", SOON, |_| true).await;
    assert!(!is_ready(&alone) && alone.start_time > before.start_time, "nobody knows better yet: {alone:#?}");
    let mut object = web.to_object();
    let annotations = [("kubernetes.io/config.mirror", web.uid().as_str()), ("kubernetes.io/config.source", "api")];
    object.metadata.annotations = Some(annotations.map(|(key, value)| (key.to_owned(), value.to_owned())).into());
    object.metadata.uid = Some("mirror".to_owned());
    object.status = Some((*before).clone());
    agent.submit(PodSource::Api, [Arc::new(object.clone())]).await;
    let after = agent.until(web.uid(), "as the mirror tells", SOON, is_ready).await;
    assert_eq!(after, before);
    // The mirror pod's status equals the published status: it causes no further update.
    let mut changes = agent.status.changes();
    changes.mark_unchanged();
    object.metadata.resource_version = Some("2".to_owned());
    object.status.as_mut().expect("a status").message = Some("by somebody else".to_owned());
    agent.submit(PodSource::Api, [Arc::new(object)]).await;
    tokio::time::sleep(Duration::from_secs(5)).await;
    assert!(!changes.has_changed().expect("alive"), "{:#?}", agent.status.status(web.uid()));
    agent.stop(SOON).await;
}

#[tokio::test(start_paused = true)]
async fn a_static_pod_reports_that_it_waits_for_a_hung_runtime() {
    let machine = Machine::new();
    machine.cri.fault("list_podsandbox", "", Fault::Hang, None);
    let agent = machine.start().await;
    let web = simple("web");
    agent.only_static([&web]).await;
    let reported = async {
        while agent.waits_for(web.uid()).as_deref() != Some("runtime pod list") {
            tokio::time::sleep(Duration::from_millis(100)).await;
        }
    };
    tokio::time::timeout(Duration::from_secs(30), reported).await.expect("received in time");
    agent.kill();
}

#[tokio::test(start_paused = true)]
async fn one_source_does_not_wait_for_another() {
    // AC-02a-22
    let machine = Machine::with(Setup { sources: vec![PodSource::File, PodSource::Api], ..Setup::default() });
    let agent = machine.start().await;
    let (a, b) = (simple("a"), simple("b"));
    agent.files([&a, &b]).await;
    agent.until_ready(a.uid(), SOON).await;
    agent.files([&a]).await;
    machine.cri.until("b is gone", SOON, |c| c.sandboxes().len() == 1).await;
    agent.stop(SOON).await;
    let agent = machine.start().await;
    agent.files([]).await; // a path that does not exist is an empty set
    agent.api([]).await;
    machine.cri.until("a is gone", Duration::from_secs(5), |c| c.sandboxes().is_empty()).await;
    agent.stop(SOON).await;
}

#[tokio::test(start_paused = true)]
async fn a_reboot_starts_everything_again() {
    let machine = Machine::new();
    let agent = machine.start().await;
    let web = simple("web");
    agent.only_static([&web]).await;
    agent.until_ready(web.uid(), SOON).await;
    agent.kill();
    machine.cri.reboot();
    machine.disk.reboot();
    let agent = machine.start().await;
    agent.only_static([&web]).await;
    agent
        .until(web.uid(), "restarted", Duration::from_secs(5), |s| {
            s.container_statuses.iter().flatten().any(|c| c.restart_count == 1 && c.ready)
        })
        .await;
    agent.stop(SOON).await;
}

#[tokio::test(start_paused = true)]
async fn pods_that_went_while_the_agent_was_away_are_forgotten() {
    let machine = Machine::new();
    let agent = machine.start().await;
    let cpu = json!({"requests": {"cpu": "100m"}});
    let [stays, goes] = ["stays", "goes"].map(|name| {
        let containers = json!({"containers": [{"name": "main", "resources": cpu}]});
        pod(name, containers)
    });
    agent.only_static([&stays, &goes]).await;
    agent.until_ready(goes.uid(), SOON).await;
    tokio::time::sleep(SOON).await; // both state files are written a second after a change
    let both = machine.stored_uids();
    assert!(both.iter().all(|pods| pods.len() == 2), "{both:?}");
    agent.stop(SOON).await;
    machine.cri.reboot();
    machine.cri.forget_objects();
    let agent = machine.start().await;
    agent.only_static([&stays]).await;
    agent.until_ready(stays.uid(), Duration::from_secs(10)).await;
    tokio::time::sleep(Duration::from_secs(5)).await;
    agent.stop(SOON).await;
    let [allocated, actuated] = machine.stored_uids();
    assert_eq!((allocated.as_slice(), actuated.as_slice()), (&[stays.uid().clone()][..], &[stays.uid().clone()][..]));
}

#[tokio::test(start_paused = true)]
async fn a_pod_that_comes_back_waits_for_the_removal_of_its_own_leftovers_only() {
    let machine = Machine::new();
    let agent = machine.start().await;
    let [stuck, web] = ["stuck", "web"].map(simple);
    agent.only_static([&stuck, &web]).await;
    agent.until_ready(web.uid(), SOON).await;
    agent.until_ready(stuck.uid(), SOON).await;
    agent.kill();
    machine.cri.forget_objects();
    machine.disk.hang_removal(stuck.uid());
    let agent = machine.start().await;
    agent.only_static([]).await;
    let swept = async {
        while machine.disk.cgroups().contains(web.uid()) {
            tokio::time::sleep(Duration::from_millis(100)).await;
        }
    };
    tokio::time::timeout(Duration::from_secs(5), swept).await.expect("one does not wait for the other");
    agent.files([&web, &stuck]).await;
    agent.until_ready(web.uid(), SOON).await;
    assert!(machine.cri.running("stuck", "main").is_empty(), "its own directory is being removed");
    assert_eq!(agent.waits_for(stuck.uid()).as_deref(), Some("removal of leftovers of the pod"));
    agent.kill();
}
