//! Owner tasks with a scripted fake plugin.

use std::{
    collections::BTreeSet,
    path::{Path, PathBuf},
    sync::{Arc, Mutex},
    time::Duration,
};

use serde_json::{Value, json};
use tokio::{sync::watch, time::Instant};
use tokio_util::{sync::CancellationToken, task::TaskTracker};

use super::*;
use crate::{
    attachable::{AttachableVolumePlugin, OpError, Usage, VolumeTraits},
    blocking_pools,
    layout::PodLayout,
    operation::Operation,
    spec::{Mode, UniqueName, VolumeSpec},
    testing::{Answer, FakePlugin, FakeStorage},
};
use berth_metrics::{Registry, VolumeMetrics};
use berth_ports::{EventRecord, EventSink, NodeFacts};
use berth_types::{Pod, PodUid};

#[cfg(test)]
mod stuck_operations;

#[derive(Default)]
struct Events(Mutex<Vec<String>>);

impl EventSink for Events {
    fn record(&self, event: EventRecord) {
        self.0.lock().expect("not poisoned").push(format!("{} {}", event.reason, event.message));
    }
}

struct Bench {
    plugin: Arc<FakePlugin>,
    storage: Arc<FakeStorage>,
    board: Arc<ReconcilerRegistry>,
    events: Arc<Events>,
    in_use: watch::Receiver<Option<Vec<String>>>,
    reported: watch::Sender<Arc<BTreeSet<String>>>,
    spec: Value,
    label: Option<String>,
    registry: Registry,
}

const NAME: &str = "kubernetes.io/fake/pv";

fn bench(traits: VolumeTraits) -> Bench {
    let (plugin, storage, events) =
        (FakePlugin::new(traits), Arc::new(FakeStorage::default()), Arc::new(Events::default()));
    let (in_use_sender, in_use) = watch::channel(None);
    let reported = watch::Sender::default();
    let registry = Registry::new();
    let deps = ReconcilerDeps {
        root: PathBuf::from("/nowhere"),
        facts: watch::channel(Arc::new(NodeFacts::default())).1,
        storage: storage.clone(),
        reported: reported.subscribe(),
        events: events.clone(),
        metrics: VolumeMetrics::new(&registry),
        tasks: TaskTracker::new(),
        stop: CancellationToken::new(),
        pool: blocking_pools::operations(),
    };
    let board = ReconcilerRegistry::new(deps, in_use_sender);
    Bench { plugin, storage, board, events, in_use, reported, spec: json!({}), label: None, registry }
}

fn staged() -> VolumeTraits {
    VolumeTraits { stages: true, ..VolumeTraits::default() }
}

fn attached() -> VolumeTraits {
    VolumeTraits { attachable: true, stages: true, ..VolumeTraits::default() }
}

impl Bench {
    fn want(&self, name: &str, turn: u64) -> watch::Receiver<Arc<ObservedVolume>> {
        let object = json!({"metadata": {"name": name, "namespace": "n", "uid": name}, "spec": {"containers": []}});
        let pod = Arc::new(Pod::new(serde_json::from_value(object).expect("a pod")).expect("complete"));
        let volume = json!({"metadata": {"name": "pv"}, "spec": self.spec});
        let volume = serde_json::from_value(volume).expect("a volume");
        let spec = Arc::new(VolumeSpec::persistent(Arc::new(volume), Arc::default(), false));
        let layout = PodLayout::new(Path::new("/nowhere"), pod.uid()).expect("a good UID");
        let traits = VolumeTraits { volume: "pv".to_owned(), ..self.plugin.traits.clone() };
        let usage = Usage {
            label: self.label.clone(),
            unique: traits.unique(self.plugin.name(), pod.uid(), &spec),
            target: layout.volume("kubernetes.io~fake", "pv"),
            pod,
            spec,
            mode: Mode::Filesystem,
            layout,
            device: String::new(),
            group: None,
            user: None,
            has_other_users: false,
            is_republish: false,
            was_rebuilt: false,
            operation: Operation::default(),
        };
        let plugin: Arc<dyn AttachableVolumePlugin> = self.plugin.clone();
        self.board.add_desired(
            &plugin,
            DesiredVolume { usage, traits, turn, growth: None, since: Instant::now(), asked_label: None },
        )
    }

    async fn until_mounted(&self, name: &str, shown: &mut watch::Receiver<Arc<ObservedVolume>>) {
        let pod = PodUid::from(name);
        let is_there = |shown: &Arc<ObservedVolume>| {
            shown.pods.get(&pod).is_some_and(|own| own.presence == MountPresence::Present && own.published.is_some())
        };
        let waited = tokio::time::timeout(Duration::from_secs(600), shown.wait_for(is_there)).await;
        waited.expect("in time").expect("its owner lives");
    }

    async fn until_gone(&self, name: &str) {
        for (_, mut shown) in self.board.remove_desired(&PodUid::from(name)) {
            let gone = shown.wait_for(|shown| !shown.pods.contains_key(&PodUid::from(name)));
            let _ended = tokio::time::timeout(Duration::from_secs(600), gone).await.expect("in time");
        }
        // The owner runs on without the pod.
        for _ in 0..20 {
            tokio::task::yield_now().await;
        }
    }

    /// Number of successful operations with that name.
    fn counted(&self, name: &str) -> u64 {
        let families = self.registry.gather();
        let family = families.iter().find(|family| family.name() == "storage_operation_duration_seconds");
        let all = family.into_iter().flat_map(|family| family.get_metric());
        all.filter(|one| {
            [name, "success"].iter().all(|text| one.get_label().iter().any(|label| label.value() == *text))
        })
        .map(|one| one.get_histogram().get_sample_count())
        .sum()
    }

    fn recorded_events(&self) -> Vec<String> {
        self.events.0.lock().expect("not poisoned").clone()
    }
}

#[tokio::test(start_paused = true)]
async fn a_volume_is_staged_once_and_published_to_each() {
    let bench = bench(staged());
    let (mut one, mut other) = (bench.want("a", 1), bench.want("b", 1));
    bench.until_mounted("a", &mut one).await;
    bench.until_mounted("b", &mut other).await;
    assert_eq!(bench.plugin.calls(), ["stage a", "publish a", "publish b"]);
    bench.until_gone("a").await;
    bench.until_gone("b").await;
    assert_eq!(bench.plugin.calls()[3..], ["unpublish a", "unpublish b", "unstage"]);
    assert!(bench.board.shown(&UniqueName::shared("kubernetes.io/fake", "pv")).is_none(), "no entry remains");
    assert!(bench.recorded_events().is_empty());
}

#[tokio::test(start_paused = true)]
async fn a_failure_is_reported_and_retried() {
    let bench = bench(staged());
    bench.plugin.next(
        "stage",
        Answer::Fails(OpError::transient("driver name d not found in the list of registered CSI drivers")),
    );
    bench.plugin.next("publish", Answer::Fails(OpError::failed("no")));
    let (began, mut shown) = (Instant::now(), bench.want("a", 1));
    bench.until_mounted("a", &mut shown).await;
    assert_eq!(began.elapsed(), Duration::from_millis(1500), "half a second, a second");
    assert_eq!(bench.plugin.calls(), ["stage a", "stage a", "publish a", "publish a"]);
    assert_eq!(
        bench.recorded_events(),
        [
            "FailedMount MountVolume.MountDevice failed for volume \"pv\" : driver name d not found in the list of \
             registered CSI drivers",
            "FailedMount MountVolume.SetUp failed for volume \"pv\" : no"
        ]
    );
}

#[tokio::test(start_paused = true)]
async fn what_was_cured_is_tried_at_once() {
    let bench = bench(staged());
    for _ in 0..5 {
        bench.plugin.next("stage", Answer::Fails(OpError::transient("not registered")));
    }
    let mut shown = bench.want("a", 1);
    tokio::time::sleep(Duration::from_millis(15_600)).await; // five tries, sixteen seconds to the next
    let began = Instant::now();
    bench.plugin.cure();
    bench.until_mounted("a", &mut shown).await;
    assert_eq!(began.elapsed(), Duration::ZERO);
}

/// AC-07-17, AC-07-18.
#[tokio::test(start_paused = true)]
async fn a_stage_that_may_have_happened_is_undone() {
    for (answer, expected) in [
        (Answer::Fails(OpError::uncertain("DeadlineExceeded")), vec!["stage a", "unstage"]),
        (Answer::Hangs, vec!["stage a", "unstage"]),
        (Answer::Fails(OpError::failed("InvalidArgument")), vec!["stage a"]),
    ] {
        let bench = bench(staged());
        bench.plugin.next("stage", answer);
        let shown = bench.want("a", 1);
        let asked = bench.plugin.asked.notified();
        asked.await;
        bench.until_gone("a").await;
        drop(shown);
        tokio::time::sleep(Duration::from_secs(130)).await;
        assert_eq!(bench.plugin.calls(), expected);
    }
}

#[tokio::test(start_paused = true)]
async fn a_mount_waits_for_the_node_status() {
    // AC-07-15: nothing is reported for a volume that needs no attachment.
    let bench = bench(attached());
    bench.board.synced();
    let mut in_use = bench.in_use.clone();
    in_use.wait_for(Option::is_some).await.expect("received");
    let mut shown = bench.want("a", 1);
    tokio::time::sleep(Duration::from_secs(123)).await;
    assert!(bench.plugin.calls().is_empty() && bench.recorded_events().is_empty());
    assert_eq!(in_use.borrow().as_deref(), Some(&[NAME.to_owned()][..]), "reported in use at once");
    assert!(!shown.borrow().is_attached);
    bench.storage.attach(&[NAME]);
    tokio::time::sleep(Duration::from_secs(5)).await;
    assert!(bench.plugin.calls().is_empty(), "the API server does not know yet that it is in use");
    assert_eq!(bench.counted("verify_controller_attached_volume"), 0);
    bench.reported.send_replace(Arc::new([NAME.to_owned()].into()));
    bench.until_mounted("a", &mut shown).await;
    assert_eq!(bench.counted("verify_controller_attached_volume"), 1);
    bench.until_gone("a").await;
    assert_eq!(in_use.borrow().as_deref(), Some(&[][..]));
}

#[tokio::test(start_paused = true)]
async fn a_volume_for_one_pod_goes_from_one_to_the_next() {
    // AC-07-16
    let mut bench = bench(staged());
    bench.spec = json!({"accessModes": ["ReadWriteOncePod"]});
    let mut first = bench.want("a", 1);
    bench.until_mounted("a", &mut first).await;
    let mut second = bench.want("b", 1);
    tokio::time::sleep(Duration::from_secs(3)).await;
    let text = "FailedMount MountVolume.SetUp failed for volume \"pv\" : volume uses the ReadWriteOncePod access mode and \
                is already in use by another pod";
    assert!(
        bench.recorded_events().iter().all(|event| event == text) && bench.recorded_events().len() == 3,
        "{:?}",
        bench.recorded_events()
    );
    let began = Instant::now();
    bench.until_gone("a").await;
    bench.until_mounted("b", &mut second).await;
    assert_eq!(began.elapsed(), Duration::ZERO, "another operation ended the pause");
}

#[tokio::test(start_paused = true)]
async fn a_volume_goes_to_a_pod_of_another_label_when_it_is_mounted_again() {
    // Spec 07 §3.4 step 2, §11.
    let mut bench = bench(staged());
    bench.label = Some("a".to_owned());
    let mut first = bench.want("a", 1);
    bench.until_mounted("a", &mut first).await;
    bench.label = Some("b".to_owned());
    let mut second = bench.want("b", 1);
    let is_hindered =
        |shown: &Arc<ObservedVolume>| shown.pods.get(&PodUid::from("b")).is_some_and(|own| own.is_label_blocked);
    tokio::time::timeout(Duration::from_secs(600), second.wait_for(is_hindered))
        .await
        .expect("received")
        .expect("lives");
    bench.until_gone("a").await;
    bench.until_mounted("b", &mut second).await;
    let expected = ["stage a a", "publish a a", "unpublish a", "unstage", "stage b b", "publish b b"];
    assert_eq!(bench.plugin.calls(), expected);
    assert!(bench.recorded_events().is_empty());
}

#[tokio::test(start_paused = true)]
async fn it_is_published_again_with_every_turn_where_a_driver_wants_it() {
    let bench = bench(VolumeTraits { republishes: true, ..VolumeTraits::default() });
    let mut shown = bench.want("a", 1);
    bench.until_mounted("a", &mut shown).await;
    bench.plugin.next("publish", Answer::Fails(OpError::failed("no")));
    bench.want("a", 2);
    tokio::time::sleep(Duration::from_secs(2)).await;
    assert_eq!(bench.plugin.calls(), ["publish a"; 3]);
    bench.until_mounted("a", &mut shown).await;
}

#[tokio::test(start_paused = true)]
async fn what_an_earlier_agent_left_is_undone_once_the_node_was_read() {
    // AC-07-20, AC-07-21
    let bench = bench(attached());
    let plugin: Arc<dyn AttachableVolumePlugin> = bench.plugin.clone();
    let left = |pod: &str| {
        let found = crate::attachable::FoundVolume {
            pod: pod.into(),
            name: "pv".to_owned(),
            mode: Mode::Filesystem,
            path: PathBuf::from("/nowhere"),
        };
        let rebuilt = plugin.rebuild(&found).expect("understood");
        ReconstructedPodVolume {
            plugin: plugin.clone(),
            pod: pod.into(),
            path: found.path,
            mode: Mode::Filesystem,
            rebuilt,
        }
    };
    bench.board.adopt(vec![left("a"), left("b")], Vec::new(), true);
    bench.board.synced();
    tokio::time::sleep(Duration::from_secs(5)).await;
    assert!(bench.in_use.borrow().is_none() && bench.plugin.calls().is_empty());
    let mut kept = bench.want("a", 1);
    let gone = bench.board.remove_desired(&"b".into());
    assert_eq!(gone.len(), 1);
    tokio::time::sleep(Duration::from_secs(5)).await;
    assert!(bench.plugin.calls().is_empty(), "the node was not read");
    bench.reported.send_replace(Arc::new([NAME.to_owned()].into()));
    bench.storage.attach(&[NAME]);
    bench.until_mounted("a", &mut kept).await;
    assert_eq!(bench.plugin.calls(), ["unpublish b", "stage a", "publish a"]);
    assert_eq!(bench.in_use.borrow().as_deref(), Some(&[NAME.to_owned()][..]));
}
