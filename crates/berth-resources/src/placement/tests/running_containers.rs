//! CPU sets of running containers: after allocations and releases, with a runtime that fails or hangs.

use std::{sync::Arc, time::Duration};

use tokio::{sync::mpsc, time::Instant};

use super::fixture::{
    Agent, FakeNode, PERIOD, StateDirectory, UpdateFault, machine_of, pod, static_cpus, with_option, with_static_memory,
};
use crate::{placement::PlacementSettings, topology::machines::machine_a};
use berth_ports::ContainerPlacements;
use berth_types::{ContainerId, Pod};

/// Resolution of tokio's clock, rounded up.
const TICK: Duration = Duration::from_millis(10);

/// An agent on machine A with the reserved CPU 0, two running containers of the shared pool, and an idle reconciler.
struct SharedPool {
    agent: Agent,
    node: Arc<FakeNode>,
    ids: [ContainerId; 2],
    /// Reports changed pods.
    changed: mpsc::UnboundedSender<()>,
    _files: StateDirectory,
}

impl SharedPool {
    async fn start(settings: &PlacementSettings) -> Self {
        let (files, node) = (StateDirectory::new(), FakeNode::new(&machine_a()));
        let agent = files.start(settings, machine_of(machine_a())).await;
        let changed = agent.reconcile(&node);
        agent.next_pass().await;
        let shared = pod("shared", &["a=500m", "b=500m"]);
        node.activate(&[&shared]);
        agent.admit(&shared).expect("the shared pool has no limit");
        let ids = [agent.start_container(&node, &shared, "a").await, agent.start_container(&node, &shared, "b").await];
        Self { agent, node, ids, changed, _files: files }
    }

    /// CPUs of both containers.
    fn cpus(&self) -> [String; 2] {
        let records = self.node.records();
        self.ids.each_ref().map(|id| records.cpus(id))
    }

    /// Activates and admits a pod, and prepares its container `c`; returns how long that took.
    async fn allocate(&self, pinned: &Pod) -> Duration {
        self.node.activate(&[pinned]);
        self.agent.admit(pinned).expect("CPUs are free");
        let began = Instant::now();
        self.agent.manager.prepare(pinned.uid(), "c").await.expect("written");
        began.elapsed()
    }
}

#[tokio::test(start_paused = true)]
async fn containers_leave_exclusive_cpus_before_their_owner_starts() {
    let pool = SharedPool::start(&static_cpus("1")).await;
    assert_eq!(pool.cpus(), ["0-7", "0-7"]);
    let (first, second) = (pod("first", &["c=2"]), pod("second", &["c=1"]));
    assert!(pool.allocate(&first).await < Duration::from_secs(1));
    assert_eq!(pool.cpus(), ["0,2-4,6-7", "0,2-4,6-7"]);
    assert!(pool.allocate(&second).await < Duration::from_secs(1));
    assert_eq!(pool.cpus(), ["0,2-3,6-7", "0,2-3,6-7"]);
    assert_eq!(pool.node.records().updates_of(&pool.ids[0]), ["0,2-4,6-7", "0,2-3,6-7"]);
    pool.agent.stop().await;
}

#[tokio::test(start_paused = true)]
async fn cpus_of_ended_pods_return_to_running_containers() {
    // AC-06b-17
    let pool = SharedPool::start(&static_cpus("1")).await;
    let pinned = pod("pinned", &["c=2"]);
    for has_event in [true, false] {
        pool.allocate(&pinned).await;
        let id = pool.agent.start_container(&pool.node, &pinned, "c").await;
        assert_eq!(pool.node.records().cpus(&id), "1,5");
        pool.node.end(&pinned);
        let began = Instant::now();
        if has_event {
            pool.changed.send(()).expect("the reconciler runs");
        }
        pool.node.until_cpus(&pool.ids[0], "0-7").await;
        pool.node.until_cpus(&pool.ids[1], "0-7").await;
        // Without an event the periodic pass notices the end.
        let limit = if has_event { Duration::ZERO } else { PERIOD } + TICK;
        assert!(began.elapsed() <= limit, "{has_event}: {:?}", began.elapsed());
        assert!(pool.agent.manager.snapshot().exclusive.is_empty());
    }
    pool.agent.stop().await;
}

#[tokio::test(start_paused = true)]
async fn no_pod_loses_its_cpus_while_a_source_is_not_ready() {
    let pool = SharedPool::start(&static_cpus("1")).await;
    let pinned = pod("pinned", &["c=2"]);
    pool.allocate(&pinned).await;
    pool.node.lose_sources();
    pool.changed.send(()).expect("the reconciler runs");
    pool.agent.next_pass().await;
    pool.agent.next_pass().await;
    assert_eq!(pool.agent.cpus(&pinned, "c"), "1,5");
    pool.agent.stop().await;
}

/// The set of active pods can be older than an admission.
#[tokio::test(start_paused = true)]
async fn a_pod_keeps_its_cpus_until_it_was_active_once() {
    let pool = SharedPool::start(&static_cpus("1")).await;
    let pinned = pod("pinned", &["c=2"]);
    pool.agent.admit(&pinned).expect("CPUs are free");
    for _ in 0..2 {
        pool.agent.next_pass().await;
        assert_eq!((pool.agent.cpus(&pinned, "c").as_str(), pool.cpus()[0].as_str()), ("1,5", "0,2-4,6-7"));
    }
    pool.node.activate(&[&pinned]);
    pool.agent.next_pass().await;
    assert_eq!(pool.agent.cpus(&pinned, "c"), "1,5");
    pool.node.end(&pinned);
    pool.node.until_cpus(&pool.ids[0], "0-7").await;
    assert!(pool.agent.manager.snapshot().exclusive.is_empty());
    pool.agent.stop().await;
}

#[tokio::test(start_paused = true)]
async fn an_empty_pool_is_not_applied() {
    let pool = SharedPool::start(&with_option(static_cpus("1"), "strict-cpu-reservation")).await;
    assert_eq!(pool.cpus(), ["1-7", "1-7"]);
    let all = pod("all", &["c=7"]);
    pool.allocate(&all).await;
    pool.agent.next_pass().await;
    assert_eq!((pool.agent.cpus(&all, "c").as_str(), pool.agent.shared().as_str()), ("1-7", ""));
    assert_eq!((pool.cpus(), pool.node.records().updates()), (["1-7".to_owned(), "1-7".to_owned()], 0));
    pool.agent.stop().await;
}

#[tokio::test(start_paused = true)]
async fn a_failed_update_is_repeated_by_the_next_periodic_pass() {
    let pool = SharedPool::start(&static_cpus("1")).await;
    let [failing, other] = &pool.ids;
    pool.node.set_fault(failing, Some(UpdateFault::Refuse));
    assert!(pool.allocate(&pod("pinned", &["c=2"])).await < Duration::from_secs(1));
    assert_eq!(pool.cpus(), ["0-7", "0,2-4,6-7"]);
    pool.agent.next_pass().await;
    assert_eq!(pool.node.records().updates_of(failing), ["0,2-4,6-7", "0,2-4,6-7"]);
    pool.node.set_fault(failing, None);
    let began = Instant::now();
    pool.node.until_cpus(failing, "0,2-4,6-7").await;
    assert!(began.elapsed() <= PERIOD + TICK, "{:?}", began.elapsed());
    assert_eq!(pool.node.records().updates_of(other), ["0,2-4,6-7"], "what succeeded is not repeated");
    pool.agent.stop().await;
}

#[tokio::test(start_paused = true)]
async fn a_runtime_that_hangs_delays_a_container_by_two_seconds() {
    let pool = SharedPool::start(&static_cpus("1")).await;
    pool.node.set_fault(&pool.ids[0], Some(UpdateFault::Hang));
    let took = pool.allocate(&pod("pinned", &["c=2"])).await;
    assert_eq!(took.as_secs(), 2, "{took:?}");
    // The other container is updated side by side.
    assert_eq!(pool.cpus(), ["0-7", "0,2-4,6-7"]);
    // Containers of the shared pool do not wait.
    let began = Instant::now();
    let late = pod("late", &["c=500m"]);
    let placement = pool.agent.manager.prepare(late.uid(), "c").await.expect("written");
    assert_eq!((placement.cpus.to_string().as_str(), began.elapsed()), ("0,2-4,6-7", Duration::ZERO));
    pool.agent.stop().await;
}

/// The pool changes between the request to create a container and the first observation of it.
#[tokio::test(start_paused = true)]
async fn a_container_that_was_created_with_an_older_pool_is_updated() {
    let pool = SharedPool::start(&static_cpus("1")).await;
    let (late, pinned) = (pod("late", &["c=500m"]), pod("pinned", &["c=2"]));
    pool.node.activate(&[&late]);
    pool.agent.admit(&late).expect("the shared pool has no limit");
    let placement = pool.agent.manager.prepare(late.uid(), "c").await.expect("written");
    pool.allocate(&pinned).await;
    let id = pool.node.run(&late, "c", placement.cpus);
    pool.agent.manager.created(&late, "c", &id);
    assert_eq!(pool.node.records().cpus(&id), "0-7");
    pool.changed.send(()).expect("the reconciler runs");
    pool.node.until_cpus(&id, "0,2-4,6-7").await;
    pool.agent.stop().await;
}

/// What the agent before has applied is unknown, except for exclusive CPUs.
#[tokio::test(start_paused = true)]
async fn the_first_pass_updates_each_container_of_the_shared_pool_once() {
    let pool = SharedPool::start(&static_cpus("1")).await;
    let pinned = pod("pinned", &["c=2"]);
    pool.node.set_fault(&pool.ids[0], Some(UpdateFault::Refuse));
    pool.allocate(&pinned).await;
    let own = pool.agent.start_container(&pool.node, &pinned, "c").await;
    let SharedPool { agent, node, ids, _files: files, .. } = pool;
    agent.stop().await;

    node.set_fault(&ids[0], None);
    node.clear_updates();
    let agent = files.start(&static_cpus("1"), machine_of(machine_a())).await;
    let _changed = agent.reconcile(&node);
    for _ in 0..3 {
        agent.next_pass().await;
    }
    let records = node.records();
    for id in &ids {
        assert_eq!((records.cpus(id).as_str(), records.updates_of(id)), ("0,2-4,6-7", vec!["0,2-4,6-7"]));
    }
    assert_eq!((records.cpus(&own).as_str(), records.updates_of(&own)), ("1,5", Vec::new()));
    agent.stop().await;
}

#[tokio::test(start_paused = true)]
async fn without_the_static_policy_no_container_is_updated() {
    for settings in [PlacementSettings::default(), with_static_memory(PlacementSettings::default())] {
        let (files, node) = (StateDirectory::new(), FakeNode::new(&machine_a()));
        let agent = files.start(&settings, machine_of(machine_a())).await;
        let changed = agent.reconcile(&node);
        let shared = pod("shared", &["c=1"]);
        node.activate(&[&shared]);
        agent.admit(&shared).expect("nothing is missing");
        let id = agent.start_container(&node, &shared, "c").await;
        assert_eq!(node.records().cpus(&id), "");
        // Without any static policy the reconciler has ended.
        let is_running = changed.send(()).is_ok();
        assert_eq!(is_running, settings.memory_policy == "Static");
        if is_running {
            agent.next_pass().await;
            node.end(&shared);
            agent.next_pass().await;
            assert!(agent.manager.memory(shared.uid(), "c").is_empty());
        }
        assert_eq!(node.records().updates(), 0);
        agent.stop().await;
    }
}
