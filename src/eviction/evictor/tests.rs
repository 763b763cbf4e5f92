//! Tests of watcher and evictor on a simulated node under resource pressure.

use std::time::Duration;

use serde_json::json;

use super::super::{
    ports::UsageScope,
    testing::Fixture,
    usage::{DiskUse, PodUse},
};

const GI: u64 = 1 << 30;

fn disk(storage: u64) -> PodUse {
    PodUse { storage: Some(storage), ..PodUse::default() }
}

#[tokio::test(start_paused = true)]
async fn one_pod_goes_where_one_suffices() {
    // AC-05-14, AC-10a-34
    let world = Fixture::new(&json!({"hard": {"memory.available": "2Gi"}}));
    world.pod("large", 2 * GI, &json!({}));
    world.pod("small", GI / 2, &json!({}));
    world.pod("static", 3 * GI, &json!({"priority": 2_000_000_000}));
    world.wait(60.0).await;
    assert_eq!(world.conditions(), ["MemoryPressure"], "6.5 of 8 GiB are in use");
    let message = "The node was low on resource: memory. Threshold quantity: 2Gi, available: 1536Mi. ";
    assert_eq!(
        world.take_log(),
        [
            "event EvictionThresholdMet: Attempting to reclaim memory",
            &format!("event Evicted: {message}"),
            "evict large in 1s for memory.available",
            "large is gone",
        ]
    );
    assert_eq!((world.evicted("memory.available"), world.evicted("nodefs.available")), (1, 0));
    world.wait(300.0).await;
    assert_eq!(world.conditions(), Vec::<&str>::new());
    assert_eq!(world.take_log(), Vec::<String>::new());
}

#[tokio::test(start_paused = true)]
async fn pages_of_files_go_before_pods_do() {
    let world = Fixture::new(&json!({"hard": {"memory.available": "2Gi"}, "reclaims": {"memory.available": "512Mi"}}));
    world.pod("large", 2 * GI, &json!({}));
    world.pod("static", 3 * GI, &json!({"priority": 2_000_000_000}));
    // 1.5 GiB is left.
    world.page_cache(3 * GI / 2, 3 * GI / 2);
    world.wait(60.0).await;
    assert_eq!(
        world.take_log(),
        [
            "event EvictionThresholdMet: Attempting to reclaim memory",
            &format!("take back {} of large first, until {} are left", GI, 5 * GI / 2),
        ]
    );
    assert_eq!(world.conditions(), ["MemoryPressure"], "what is reported is what it is");
    // Less page cache than is missing does not help.
    world.page_cache(3 * GI / 2, GI / 2);
    world.wait(60.0).await;
    assert!(world.take_log().contains(&"evict large in 1s for memory.available".to_owned()));
}

#[tokio::test(start_paused = true)]
async fn a_shortage_is_met_within_a_second() {
    let world = Fixture::new(&json!({"hard": {"memory.available": "1Gi"}}));
    world.pod("grows", GI, &json!({}));
    world.wait(20.0).await;
    for used in [2, 4, 5] {
        world.memory_used(used * GI);
        world.wait(0.9).await;
    }
    assert_eq!(world.take_log(), Vec::<String>::new());
    world.memory_used(6 * GI + GI / 2);
    world.wait(0.9).await;
    assert_eq!(world.conditions(), ["MemoryPressure"]);
    assert_eq!(world.evicted("memory.available"), 1);
}

#[tokio::test(start_paused = true)]
async fn two_pods_go_one_after_the_other() {
    let world = Fixture::new(&json!({"hard": {"memory.available": "2Gi"}}));
    for name in ["a", "b", "c"] {
        world.pod(name, GI, &json!({}));
    }
    world.memory_used(5 * GI);
    world.wait(60.0).await;
    let log: Vec<String> = world.take_log().into_iter().filter(|line| !line.starts_with("event")).collect();
    assert_eq!(
        log,
        ["evict a in 1s for memory.available", "a is gone", "evict b in 1s for memory.available", "b is gone"]
    );
}

#[tokio::test(start_paused = true)]
async fn a_soft_threshold_leaves_time() {
    // AC-05-15, AC-05-16
    let fields = json!({"soft": {"memory.available": "2Gi"}, "graces": {"memory.available": "2m"}});
    let world = Fixture::new(&fields);
    world.pod("web", 6 * GI, &json!({}));
    world.wait(60.0).await;
    assert_eq!((world.conditions(), world.take_log()), (vec!["MemoryPressure"], Vec::new()));
    world.wait(120.0).await;
    assert!(world.take_log().contains(&"evict web in 5s for memory.available".to_owned()));
}

#[tokio::test(start_paused = true)]
async fn a_pod_with_time_has_none_left_once_a_hard_threshold_is_met() {
    let fields = json!({"soft": {"memory.available": "2Gi"}, "graces": {"memory.available": "10s"},
        "hard": {"memory.available": "1Gi"}});
    let world = Fixture::new(&fields);
    let usage = PodUse { memory: Some(6 * GI - GI / 4), ..PodUse::default() };
    world.running("slow", usage, &json!({}), Duration::from_secs(9));
    world.wait(15.0).await;
    assert!(world.take_log().contains(&"evict slow in 5s for memory.available".to_owned()));
    world.memory_used(2 * GI);
    world.wait(1.0).await;
    assert_eq!(world.take_log(), ["evict slow in 1s for memory.available"]);
}

#[tokio::test(start_paused = true)]
async fn a_soft_threshold_with_time_left_costs_no_pod_its_pages_would_save() {
    let fields = json!({"soft": {"memory.available": "4Gi"}, "graces": {"memory.available": "5m"},
        "hard": {"memory.available": "2Gi"}});
    let world = Fixture::new(&fields);
    world.pod("web", 5 * GI, &json!({}));
    world.page_cache(3 * GI / 2, GI);
    world.wait(60.0).await;
    let log = world.take_log();
    assert_eq!(log.last(), Some(&format!("take back {} of web first, until {} are left", GI / 2, 2 * GI)));
    assert_eq!(world.evicted("memory.available"), 0, "{log:?}");
}

#[tokio::test(start_paused = true)]
async fn pages_that_were_enough_cost_no_pod_for_the_disk_before_images_went() {
    let fields = json!({"hard": {"memory.available": "2Gi", "nodefs.available": "10Gi", "imagefs.available": "10Gi"}});
    let world = Fixture::new(&fields);
    world.pod("web", 5 * GI, &json!({}));
    world.page_cache(3 * GI / 2, GI);
    world.disk_used(60 * GI, 35 * GI);
    world.wait(60.0).await;
    let log = world.take_log();
    assert!(log.iter().any(|entry| entry.starts_with("take back ")), "{log:?}");
    assert!(log.contains(&"remove images".to_owned()), "{log:?}");
    assert!(!log.iter().any(|entry| entry.starts_with("evict")), "{log:?}");
}

#[tokio::test(start_paused = true)]
async fn a_shortage_that_cannot_be_relieved_hides_no_other() {
    let fields = json!({"hard": {"memory.available": "2Gi", "nodefs.available": "10Gi", "imagefs.available": "10Gi"}});
    let world = Fixture::new(&fields);
    world.pod("static", 7 * GI, &json!({"priority": 2_000_000_000}));
    world.disk_used(60 * GI, 35 * GI);
    world.wait(5.0).await;
    assert!(world.take_log().contains(&"remove images".to_owned()));
    world.wait(35.0).await;
    assert!(world.take_log().len() <= 4, "and it is not tried more often for that");
}

#[tokio::test(start_paused = true)]
async fn unused_images_go_before_pods() {
    // AC-05-18
    let world = Fixture::new(&json!({"hard": {"nodefs.available": "10%"}, "reclaims": {"nodefs.available": "5Gi"}}));
    world.running("web", disk(10 * GI), &json!({}), Duration::ZERO);
    world.disk_used(70 * GI, 15 * GI);
    world.wait(60.0).await;
    assert_eq!(world.conditions(), ["DiskPressure"]);
    let freed =
        ["event EvictionThresholdMet: Attempting to reclaim ephemeral-storage", "remove containers", "remove images"];
    assert_eq!(world.take_log(), freed);
    // Too little for what is to be free: 10 % and 5 GiB.
    world.disk_used(77 * GI, 4 * GI);
    world.wait(60.0).await;
    let log = world.take_log();
    assert_eq!(log[..3], freed);
    assert_eq!((log.last().map(String::as_str), world.evicted("nodefs.available")), (Some("web is gone"), 1));
}

#[tokio::test(start_paused = true)]
async fn critical_pods_stay_and_the_shortage_is_reported_again() {
    // AC-05-20
    let world = Fixture::new(&json!({"hard": {"memory.available": "2Gi"}}));
    world.pod("static", 7 * GI, &json!({"priority": 2_000_000_000}));
    world.wait(35.0).await;
    let log = world.take_log();
    assert_eq!(log.len(), 4, "every ten seconds: {log:?}");
    assert!(log.iter().all(|entry| entry == "event EvictionThresholdMet: Attempting to reclaim memory"), "{log:?}");
    world.pod("late", 1, &json!({}));
    world.wait(10.0).await;
    assert!(world.take_log().contains(&"late is gone".to_owned()));
}

#[tokio::test(start_paused = true)]
async fn a_pod_that_does_not_terminate_delays_other_evictions_for_a_bounded_time() {
    let world = Fixture::new(&json!({"hard": {"memory.available": "2Gi"}}));
    let usage = |memory| PodUse { memory: Some(memory), ..PodUse::default() };
    world.running("hangs", usage(4 * GI), &json!({}), Duration::from_secs(3600));
    world.running("ends", usage(3 * GI), &json!({}), Duration::from_secs(2));
    world.wait(39.0).await;
    let log = world.take_log();
    assert!(log.iter().any(|entry| entry.starts_with("event ExceededGracePeriod: ")), "{log:?}");
    assert!(!log.iter().any(|entry| entry.starts_with("evict ends")), "{log:?}");
    world.wait(10.0).await;
    assert!(world.take_log().contains(&"ends is gone".to_owned()));
    assert_eq!(world.evicted("memory.available"), 2, "it counts all the same");
}

#[tokio::test(start_paused = true)]
async fn pods_over_their_own_limits_are_evicted() {
    // AC-05-19
    let world = Fixture::new(&json!({}));
    let spec = json!({"volumes": [{"name": "data", "emptyDir": {"sizeLimit": "1Gi"}}]});
    let volume =
        |bytes| PodUse { volumes: vec![("data".to_owned(), DiskUse { bytes, inodes: 1 })], ..PodUse::default() };
    for (name, used) in [("a", GI + 1), ("b", GI + 1), ("fits", GI)] {
        world.running(name, volume(used), &spec, Duration::ZERO);
    }
    world.wait(25.0).await;
    let message = "event Evicted: Usage of EmptyDir volume \"data\" exceeds the limit \"1Gi\". ";
    let log = world.take_log();
    assert_eq!(log.iter().filter(|entry| *entry == message).count(), 2, "{log:?}");
    assert_eq!((log.len(), world.evicted("emptydirfs.limit")), (6, 2), "{log:?}");
    assert!(world.conditions().is_empty());
}

fn at_work(world: &Fixture) -> Vec<String> {
    world.take_log().into_iter().filter(|entry| !entry.starts_with("event")).collect()
}

/// A pod with an emptyDir that may use 1 GiB, and its spec.
fn limited(bytes: u64) -> (PodUse, serde_json::Value) {
    let volumes = vec![("data".to_owned(), DiskUse { bytes, inodes: 1 })];
    let spec = json!({"volumes": [{"name": "data", "emptyDir": {"sizeLimit": "1Gi"}}]});
    (PodUse { volumes, ..disk(bytes) }, spec)
}

#[tokio::test(start_paused = true)]
async fn who_goes_for_its_own_limit_may_be_all_that_was_too_much() {
    let world = Fixture::new(&json!({"hard": {"nodefs.available": "10Gi"}}));
    // Node-level reclaim does not help here: no observation is awaited after it.
    world.images_apart(GI);
    world.disk_used(65 * GI, 0);
    let (usage, spec) = limited(20 * GI);
    world.running("large", usage, &spec, Duration::ZERO);
    world.running("web", disk(10 * GI), &json!({}), Duration::ZERO);
    world.wait(60.0).await;
    let log = at_work(&world);
    assert_eq!(log, ["evict large in 1s for emptydirfs.limit", "large is gone"]);
}

#[tokio::test(start_paused = true)]
async fn a_disk_that_images_do_not_lie_on_is_not_freed_by_their_removal() {
    // AC-05-18
    let world = Fixture::new(&json!({"hard": {"nodefs.available": "10Gi", "imagefs.available": "10Gi"}}));
    world.images_apart(50 * GI);
    world.disk_used(80 * GI, 0);
    world.running("web", disk(15 * GI), &json!({}), Duration::ZERO);
    world.wait(60.0).await;
    assert_eq!(at_work(&world), ["evict web in 1s for nodefs.available", "web is gone"]);
    world.images_apart(95 * GI);
    world.wait(9.0).await;
    assert_eq!(at_work(&world), ["remove containers", "remove images"], "for where they do lie");
}

#[tokio::test(start_paused = true)]
async fn who_has_most_processes_goes_where_they_are_few() {
    let world = Fixture::new(&json!({"hard": {"pid.available": "100"}}));
    let usage = |processes| PodUse { processes: Some(processes), ..PodUse::default() };
    for (name, processes) in [("few", 50), ("many", 400)] {
        world.running(name, usage(processes), &json!({}), Duration::ZERO);
    }
    world.processes(1000, 500);
    world.wait(60.0).await;
    assert_eq!(world.conditions(), ["PIDPressure"]);
    assert_eq!(at_work(&world), ["evict many in 1s for pid.available", "many is gone"]);
    let asked = world.asked();
    assert!(asked.contains(&UsageScope::Processes), "{asked:?}");
    assert!(asked.iter().all(|needs| *needs == UsageScope::Processes), "no disk is measured for that: {asked:?}");
}

#[tokio::test(start_paused = true)]
async fn static_pods_stay() {
    // AC-05-20
    let world = Fixture::new(&json!({"hard": {"memory.available": "2Gi"}}));
    world.static_pod("etcd", 7 * GI);
    world.wait(35.0).await;
    let log = world.take_log();
    assert_eq!(log.len(), 4, "every ten seconds: {log:?}");
    assert!(log.iter().all(|entry| entry == "event EvictionThresholdMet: Attempting to reclaim memory"), "{log:?}");
}

#[tokio::test(start_paused = true)]
async fn pods_discovered_late_are_not_waited_for_twice() {
    let world = Fixture::new(&json!({"hard": {"memory.available": "2Gi"}}));
    world.memory_used(5 * GI);
    world.pod("static", 2 * GI, &json!({"priority": 2_000_000_000}));
    world.wait(35.0).await;
    assert_eq!(world.take_log().len(), 4);
    let world = Fixture::new(&json!({"hard": {"memory.available": "2Gi"}}));
    world.memory_used(7 * GI);
    world.wait(4.0).await;
    assert_eq!(world.take_log().len(), 1, "nothing is tried every second for that");
    world.pod("web", GI / 2, &json!({}));
    world.wait(1.5).await;
    assert!(world.take_log().contains(&"web is gone".to_owned()));
}

#[tokio::test(start_paused = true)]
async fn static_pods_discovered_first_do_not_delay_eviction_of_others() {
    for priority in [0, 2_000_000_000] {
        let world = Fixture::new(&json!({"hard": {"memory.available": "2Gi"}}));
        world.static_pod("etcd", 7 * GI);
        world.wait(1.0).await;
        assert_eq!(world.take_log().len(), 1);
        world.pod("late", GI / 2, &json!({"priority": priority}));
        world.wait(2.0).await;
        let log = world.take_log();
        assert_eq!(log.contains(&"late is gone".to_owned()), priority == 0, "{log:?}");
        assert_eq!(log.is_empty(), priority != 0, "{log:?}");
    }
}

#[tokio::test(start_paused = true)]
async fn memory_that_could_not_be_relieved_for_a_moment_waits_for_no_disk_either() {
    let fields = json!({"hard": {"memory.available": "2Gi", "nodefs.available": "10Gi", "imagefs.available": "10Gi"}});
    let world = Fixture::new(&fields);
    world.pod("web", GI, &json!({}));
    world.memory_used(6 * GI);
    world.disk_used(95 * GI, 0);
    world.slow_removal(Duration::from_secs(120));
    world.refuses_once(UsageScope::Memory);
    world.wait(0.5).await;
    assert_eq!(at_work(&world), ["remove containers"]);
    world.wait(2.5).await;
    assert_eq!(at_work(&world)[..2], ["evict web in 1s for memory.available", "web is gone"]);
}

#[tokio::test(start_paused = true)]
async fn a_pod_that_has_time_is_hurried_for_what_could_not_be_asked_for_a_moment() {
    let fields = json!({"soft": {"memory.available": "4Gi"}, "graces": {"memory.available": "10s"},
        "hard": {"pid.available": "100"}});
    let world = Fixture::new(&fields);
    let usage = PodUse { memory: Some(4 * GI), ..PodUse::default() };
    world.running("slow", usage, &json!({}), Duration::from_secs(4));
    world.processes(1000, 500);
    world.wait(9.6).await;
    world.refuses_once(UsageScope::Processes);
    world.processes(1000, 950);
    world.wait(0.3).await;
    assert_eq!(world.asked(), [UsageScope::Processes]);
    world.wait(0.6).await;
    assert_eq!(at_work(&world), ["evict slow in 5s for memory.available"], "nothing is tried for processes now");
    world.wait(1.0).await;
    assert_eq!(at_work(&world), ["evict slow in 1s for memory.available"], "but that was for a second");
}

#[tokio::test(start_paused = true)]
async fn memory_pressure_does_not_wait_for_a_limit_check() {
    let world = Fixture::new(&json!({"hard": {"memory.available": "2Gi"}}));
    let (usage, spec) = limited(GI);
    world.running("web", PodUse { memory: Some(GI), ..usage }, &spec, Duration::ZERO);
    world.slow_measuring(Duration::from_secs(60));
    world.wait(11.0).await;
    assert_eq!((world.asked(), at_work(&world)), (vec![UsageScope::Disks], Vec::new()));
    world.memory_used(6 * GI);
    world.notify();
    world.wait(1.0).await;
    assert_eq!(at_work(&world), ["evict web in 1s for memory.available", "web is gone"]);
}

const SOFT_MEMORY_HARD_DISK: &str = r#"{"soft": {"memory.available": "2Gi"}, "graces": {"memory.available": "10s"},
    "hard": {"nodefs.available": "10Gi", "imagefs.available": "10Gi"}}"#;

#[tokio::test(start_paused = true)]
async fn a_hard_shortage_does_not_wait_for_a_pod_that_has_time_for_another() {
    let world = Fixture::new(&serde_json::from_str(SOFT_MEMORY_HARD_DISK).expect("fields"));
    let usage = PodUse { memory: Some(6 * GI - GI / 4), ..PodUse::default() };
    world.running("slow", usage, &json!({}), Duration::from_secs(9));
    world.wait(11.0).await;
    assert_eq!(at_work(&world), ["evict slow in 5s for memory.available"]);
    world.disk_used(95 * GI, 0);
    world.wait(2.0).await;
    assert_eq!(at_work(&world), ["evict slow in 1s for memory.available"]);
}

#[tokio::test(start_paused = true)]
async fn a_shortage_that_cannot_be_relieved_does_not_shorten_the_grace_period() {
    let world = Fixture::new(&serde_json::from_str(SOFT_MEMORY_HARD_DISK).expect("fields"));
    world.memory_used(6 * GI + GI / 2);
    world.pod("static", 1, &json!({"priority": 2_000_000_000}));
    world.disk_used(95 * GI, 0);
    world.wait(15.0).await;
    world.take_log();
    let usage = PodUse { memory: Some(GI), ..PodUse::default() };
    world.running("slow", usage, &json!({}), Duration::from_secs(4));
    world.wait(10.0).await;
    let log: Vec<String> = at_work(&world).into_iter().filter(|line| line.contains("slow")).collect();
    assert_eq!(log, ["evict slow in 5s for memory.available", "slow is gone"]);
}

#[tokio::test(start_paused = true)]
async fn memory_that_gets_short_does_not_wait_for_a_disk_that_is_slow() {
    let fields = json!({"hard": {"memory.available": "2Gi", "nodefs.available": "10Gi", "imagefs.available": "10Gi"}});
    let world = Fixture::new(&fields);
    world.pod("web", GI, &json!({}));
    world.slow_removal(Duration::from_secs(120));
    world.disk_used(95 * GI, 0);
    world.wait(20.0).await;
    assert_eq!(at_work(&world), ["remove containers"]);
    world.memory_used(6 * GI);
    world.wait(1.0).await;
    assert_eq!(at_work(&world)[..2], ["evict web in 1s for memory.available", "web is gone"]);
}

#[tokio::test(start_paused = true)]
async fn a_hard_shortage_waits_for_pages_of_files_for_a_moment_only() {
    let fields = json!({"hard": {"memory.available": "2Gi"}});
    let world = Fixture::new(&fields);
    world.pod("web", 5 * GI, &json!({}));
    world.slow_taking(Duration::from_secs(3600));
    world.page_cache(3 * GI / 2, GI);
    world.wait(2.5).await;
    assert_eq!(at_work(&world), ["evict web in 1s for memory.available", "web is gone"]);
    // A kernel that needs most of the deadline is slow, but helps.
    let world = Fixture::new(&fields);
    world.pod("web", 5 * GI, &json!({}));
    world.slow_taking(Duration::from_millis(1900));
    world.page_cache(3 * GI / 2, GI);
    world.wait(60.0).await;
    assert!(!at_work(&world).iter().any(|entry| entry.starts_with("evict")));
}

#[tokio::test(start_paused = true)]
async fn pages_that_come_back_at_once_are_taken_a_few_times_only() {
    let soft = json!({"soft": {"memory.available": "2Gi"}, "graces": {"memory.available": "1s"}});
    for (fields, expected) in [(json!({"hard": {"memory.available": "2Gi"}}), 2), (soft, 4)] {
        let world = Fixture::new(&fields);
        world.pod("web", 5 * GI, &json!({}));
        world.page_cache(3 * GI / 2, 100 * GI);
        world.fills();
        world.wait(60.0).await;
        let log = at_work(&world);
        let taken = log.iter().take_while(|entry| entry.starts_with("take back ")).count();
        assert_eq!((taken, log.last().map(String::as_str)), (expected, Some("web is gone")), "{log:?}");
    }
}

#[tokio::test(start_paused = true)]
async fn what_cannot_be_seen_is_no_shortage() {
    let world = Fixture::new(&json!({"hard": {"memory.available": "2Gi"}}));
    world.wait(1.0).await;
    world.hang();
    world.pod("web", 8 * GI, &json!({}));
    world.wait(100.0).await;
    assert_eq!((world.conditions(), world.take_log()), (Vec::new(), Vec::new()));
}

#[tokio::test(start_paused = true)]
async fn a_word_of_the_kernel_is_heeded_at_once_and_a_flood_of_them_is_not() {
    let world = Fixture::new(&json!({"hard": {"memory.available": "1Mi"}}));
    world.wait(0.5).await;
    world.memory_used(8 * GI);
    world.notify();
    world.wait(0.05).await;
    assert_eq!(world.conditions(), ["MemoryPressure"], "the next look was due after a second and more");
    world.memory_used(GI);
    world.wait(400.0).await;
    let before = world.read_count();
    for _ in 0..1000 {
        world.notify();
        world.wait(0.001).await;
    }
    let reads = world.read_count() - before;
    assert!((5..=11).contains(&reads), "{reads} looks in a second");
}

#[tokio::test(start_paused = true)]
async fn thresholds_that_cannot_be_met_or_left_cause_no_busy_loop() {
    let world = Fixture::new(&json!({"hard": {"memory.available": "0.0%"}}));
    world.pod("all", 7 * GI, &json!({}));
    world.wait(60.0).await;
    assert_eq!((world.take_log(), world.conditions()), (Vec::<String>::new(), Vec::new()));
    for fields in [
        json!({"hard": {"memory.available": "100.0%"}}),
        json!({"hard": {"memory.available": "7.5Gi"}, "reclaims": {"memory.available": "100Gi"}}),
    ] {
        let world = Fixture::new(&fields);
        world.pod("static", GI, &json!({"priority": 2_000_000_000}));
        world.pod("web", GI, &json!({}));
        world.wait(35.0).await;
        let log = world.take_log();
        assert!(log.contains(&"web is gone".to_owned()), "{log:?}");
        assert!(log.len() < 12, "{log:?}");
        assert_eq!(world.conditions(), ["MemoryPressure"]);
    }
}
