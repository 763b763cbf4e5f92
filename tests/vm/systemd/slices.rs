//! Cgroups of pods as systemd slices. Behavior: spec 06a §3-§7.

use std::{
    fs,
    sync::{Arc, Mutex},
    time::Duration,
};

use berth::resources::{
    Amounts, CgroupDriver, IdRanges, IdSpace, ManagerConfig, ManagerDeps, PodCgroupManager, PodRules,
};
use berth_metrics::{CgroupMetrics, Registry};
use berth_ports::{EventRecord, EventSink, NoPlacements, PodCgroupValues, ResourceManager};
use berth_sys::cgroup::systemd::Units;
use berth_types::{Pod, memory_qos::MemoryReservationPolicy};
use serde_json::json;
use tokio_util::sync::CancellationToken;

use crate::systemd::fake::{Fake, Fault};
use berth_testkit::pods;

#[derive(Default)]
struct Events(Mutex<Vec<EventRecord>>);

impl EventSink for Events {
    fn record(&self, event: EventRecord) {
        self.0.lock().expect("whole").push(event);
    }
}

async fn manager(fake: &Fake) -> Arc<PodCgroupManager> {
    manager_with(fake, None).await
}

async fn manager_with(fake: &Fake, memory_qos: Option<MemoryReservationPolicy>) -> Arc<PodCgroupManager> {
    let config = ManagerConfig {
        cgroup_root: String::new(),
        cgroups_per_qos: true,
        rules: PodRules {
            cpu_cfs_quota: true,
            cpu_period_us: 100_000,
            pids_limit: 1024,
            hugepage_sizes: vec![],
            driver: CgroupDriver::Systemd,
            memory_qos,
        },
        capacity: Amounts { cpu_milli: Some(2000), memory_bytes: Some(8 << 30), ..Amounts::default() },
        reservations: vec![],
        enforce_pods: true,
        online_cpus: Some("0-1".to_owned()),
        qos_reserved_memory: None,
    };
    let ids = IdRanges::open(fake.place.path(), IdSpace::whole(65_536)).await.expect("nothing there");
    let deps = ManagerDeps {
        events: Arc::<Events>::default(),
        metrics: CgroupMetrics::new(&Registry::new()),
        ids: Arc::new(ids),
        units: Some(fake.bus() as Arc<dyn Units>),
        placements: Arc::new(NoPlacements),
    };
    PodCgroupManager::new(config, Some(fake.hierarchy()), deps).expect("a manager")
}

fn burstable(name: &str) -> Arc<Pod> {
    let resources =
        json!({"requests": {"cpu": "250m", "memory": "64Mi"}, "limits": {"cpu": "417m", "memory": "128Mi"}});
    pods::pod(name, json!({"containers": [{"name": "c", "resources": resources}]}))
}

const SLICE: &str = "kubepods-burstable-poduid_b.slice";
const PATH: &str = "/kubepods.slice/kubepods-burstable.slice/kubepods-burstable-poduid_b.slice";

fn values(fake: &Fake) -> Vec<String> {
    ["cpu.weight", "cpu.max", "memory.max", "pids.max"].map(|file| fake.file(&format!("{PATH}/{file}"))).into()
}

const ACCOUNTING: &str = "MemoryAccounting=true CPUAccounting=true IOAccounting=true TasksAccounting=true \
                          DefaultDependencies=false";

#[tokio::test]
async fn pods_are_slices_below_their_class() {
    let fake = Fake::start();
    let manager = manager(&fake).await;
    manager.start().await.expect("started");
    let calls = fake.calls();
    let began = |slice: &str, parent: &str| {
        format!("StartTransientUnit {slice} Description=libcontainer container {slice} Wants=[{parent}] {ACCOUNTING}")
    };
    let kubepods = format!("{} MemoryMax=8589934592 CPUWeight=79 AllowedCPUs=[03]", began("kubepods.slice", "-.slice"));
    assert_eq!(calls[0], kubepods);
    assert_eq!(calls[1], format!("{} CPUWeight=1", began("kubepods-burstable.slice", "kubepods.slice")));
    assert_eq!(calls[2], format!("{} CPUWeight=1", began("kubepods-besteffort.slice", "kubepods.slice")));
    assert_eq!(fake.file("/kubepods.slice/cpuset.cpus"), "0-1");
    // AC-06a-1: the runtime's cgroup parent is the path.
    let pod = burstable("b");
    let ensured = manager.ensure(&pod).await.expect("made");
    assert_eq!((ensured.parent.as_str(), ensured.created), (PATH, true));
    // AC-06a-7, AC-06a-9: the values in the D-Bus call equal the written ones.
    let expected = format!(
        "{} TasksMax=1024 MemoryMax=134217728 CPUWeight=10 CPUQuotaPeriodUSec=100000 CPUQuotaPerSecUSec=420000",
        began(SLICE, "kubepods-burstable.slice")
    );
    let calls = fake.calls();
    assert!(calls.contains(&expected), "{calls:#?}");
    assert!(calls.contains(&"SetUnitProperties kubepods-burstable.slice CPUWeight=10".to_owned()), "{calls:#?}");
    assert_eq!(values(&fake), ["10", "42000 100000", "134217728", "1024"]);
    assert!(manager.exists(&pod).await);
    assert_eq!(manager.pods().await, [pod.uid().clone()]);
    // An existing slice causes no further call.
    assert!(!manager.ensure(&pod).await.expect("there").created);
    assert_eq!(fake.calls(), Vec::<String>::new());
    // AC-06a-12
    manager.remove(pod.id()).await.expect("removed");
    let calls = fake.calls();
    let expected = [format!("StopUnit {SLICE}"), format!("ResetFailedUnit {SLICE}")];
    assert_eq!(calls[..2], expected);
    assert_eq!(calls[2..], ["SetUnitProperties kubepods-burstable.slice CPUWeight=1"]);
    assert!(!fake.path(PATH).exists() && !manager.exists(&pod).await);
}

#[tokio::test]
async fn protected_memory_requests_are_set_in_systemd_and_written() {
    let fake = Fake::start();
    let memory = |slices: &str| [format!("{slices}/memory.min"), format!("{slices}/memory.low")].map(|f| fake.file(&f));
    let (kubepods, burstables) = ("/kubepods.slice", "/kubepods.slice/kubepods-burstable.slice");
    let tiered = Some(MemoryReservationPolicy::TieredReservation);
    let first = manager_with(&fake, tiered).await;
    first.start().await.expect("started");
    let pod = burstable("b");
    first.ensure(&pod).await.expect("made");
    // AC-06a-26, AC-06a-27
    let calls = fake.calls();
    let contains = |text: &str| calls.iter().any(|call| call.contains(text));
    assert!(contains(&format!("{SLICE} ")) && contains(" MemoryLow=67108864"), "{calls:#?}");
    assert!(contains("SetUnitProperties kubepods.slice MemoryMin=67108864"), "{calls:#?}");
    assert_eq!(memory(PATH), ["0", "67108864"]);
    assert_eq!(
        (memory(kubepods), memory(burstables)),
        (["67108864".into(), "0".into()], ["0".into(), "67108864".into()])
    );
    // A restarted manager knows the requests from the pod's cgroup, and protects them before the pod's first sync.
    manager_with(&fake, tiered).await.start().await.expect("started");
    assert_eq!(
        (memory(kubepods), memory(burstables)),
        (["67108864".into(), "0".into()], ["0".into(), "67108864".into()])
    );
    // AC-06a-28: another policy resets the QoS cgroups, and leaves those of pods.
    fake.calls();
    manager_with(&fake, Some(MemoryReservationPolicy::None)).await.start().await.expect("started");
    let calls = fake.calls();
    for reset in ["kubepods.slice MemoryMin=0", "kubepods-burstable.slice MemoryLow=0 CPUWeight=9"] {
        assert!(calls.contains(&format!("SetUnitProperties {reset}")), "{reset}: {calls:#?}");
    }
    assert_eq!(memory(PATH), ["0", "67108864"]);
}

#[tokio::test]
async fn a_resize_is_set_in_systemd_and_written() {
    let fake = Fake::start();
    let manager = manager(&fake).await;
    manager.start().await.expect("started");
    let pod = burstable("b");
    manager.ensure(&pod).await.expect("made");
    fake.calls();
    // AC-06a-20
    let wanted = PodCgroupValues { cpu_quota: Some(100_000), cpu_period: Some(100_000), ..PodCgroupValues::default() };
    manager.apply_pod_values(&pod, wanted).await.expect("changed");
    assert_eq!(
        fake.calls(),
        [format!("SetUnitProperties {SLICE} CPUQuotaPeriodUSec=100000 CPUQuotaPerSecUSec=1000000")]
    );
    assert_eq!(values(&fake), ["10", "100000 100000", "134217728", "1024"]);
    assert_eq!(manager.current_pod_values(&pod).await.expect("readable").cpu_quota, Some(100_000));
    // systemd returns an error: the files are written nevertheless, and the failure is returned.
    fake.fault(SLICE, Fault::Refused("DBus.Error.InvalidArgs", "no such thing"));
    let wanted = PodCgroupValues { memory_limit: Some(1 << 28), ..PodCgroupValues::default() };
    let error = manager.apply_pod_values(&pod, wanted).await.expect_err("refused");
    assert!(error.0.contains(&format!("change unit {SLICE}: ")) && error.0.contains("no such thing"), "{error}");
    assert_eq!(fake.file(&format!("{PATH}/memory.max")), "268435456");
}

/// The deviation of 06a §7.
#[tokio::test]
async fn what_is_set_back_is_written_again() {
    let fake = Fake::start();
    let first = manager(&fake).await;
    first.start().await.expect("started");
    let pod = burstable("b");
    first.ensure(&pod).await.expect("made");
    drop(first);
    // A restarted agent adopts existing slices.
    let second = manager(&fake).await;
    second.start().await.expect("started");
    second.ensure(&pod).await.expect("there");
    let stop = CancellationToken::new();
    let running = tokio::spawn(second.clone().run(stop.clone()));
    fake.until_called("SetUnitProperties kubepods.slice").await;
    fake.calls();
    for (file, value) in [("cpu.max", "max 100000"), ("memory.max", "max")] {
        fs::write(fake.path(&format!("{PATH}/{file}")), value).expect("written");
    }
    let again =
        tokio::time::timeout(Duration::from_secs(5), fake.until_called(&format!("SetUnitProperties {SLICE}"))).await;
    assert_eq!(
        again.expect("within a moment"),
        format!(
            "SetUnitProperties {SLICE} TasksMax=1024 MemoryMax=134217728 CPUWeight=10 CPUQuotaPeriodUSec=100000 \
             CPUQuotaPerSecUSec=420000"
        )
    );
    stop.cancel();
    running.await.expect("ended");
    // `run` awaits a repair in progress; the removal must work after it.
    second.remove(pod.id()).await.expect("removed");
    assert!(!fake.path(PATH).exists());
}

#[tokio::test]
async fn failures_of_jobs_and_connections_are_reported_or_retried() {
    let fake = Fake::start();
    let manager = manager(&fake).await;
    fake.fault("kubepods.slice", Fault::EndsEarly);
    fake.fault("kubepods-burstable.slice", Fault::HangsUp);
    manager.start().await.expect("on a new connection");
    let pod = burstable("b");
    fake.fault(SLICE, Fault::Ends("failed"));
    let error = manager.ensure(&pod).await.expect_err("failed");
    assert_eq!(error.0, format!("start unit {SLICE}: the job ended with result \"failed\""));
    manager.ensure(&pod).await.expect("there after all");
    fake.fault(SLICE, Fault::Ends("timeout"));
    let error = manager.remove(pod.id()).await.expect_err("failed");
    assert!(error.0.contains(&format!("stop unit {SLICE}: the job ended with result \"timeout\"")), "{error}");
    manager.remove(pod.id()).await.expect("gone");
}

#[tokio::test]
async fn a_missing_systemd_is_reported() {
    let fake = Fake::start();
    let manager = manager(&fake).await;
    fs::remove_file(fake.place.path().join("private")).expect("removed");
    let error = manager.start().await.expect_err("nobody");
    assert!(error.0.contains("D-Bus connection to systemd failed"), "{error}");
}
