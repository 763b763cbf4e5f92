//! Cgroups of sandboxes and containers as systemd scopes. Behavior: spec 09a §9.

use std::{fs, os::unix::fs::PermissionsExt, path::Path, sync::Arc};

use berth_proto::cri::LinuxContainerResources;
use berth_runtime::{
    groups::CgroupfsGroups,
    launch::inputs,
    ports::{CgroupLimits, Groups},
    systemd_scopes::Scopes,
};
use berth_sys::cgroup::systemd::SystemdDriver;

use crate::systemd::fake::{Fake, Fault};

/// Scopes whose placeholder program waits as the shim's does.
fn scopes(fake: &Fake) -> Arc<Scopes> {
    let program = fake.place.path().join("scope-placeholder");
    fs::write(&program, "#!/bin/sh\nexec cat\n").expect("written");
    fs::set_permissions(&program, fs::Permissions::from_mode(0o755)).expect("executable");
    let kernel = CgroupfsGroups::new(fake.hierarchy(), inputs::Groups::V2 { options: String::new() }, true);
    Arc::new(Scopes::new(kernel, SystemdDriver::new(fake.bus()), program))
}

async fn blocking<R: Send + 'static>(scopes: &Arc<Scopes>, work: impl FnOnce(&Scopes) -> R + Send + 'static) -> R {
    let scopes = scopes.clone();
    tokio::task::spawn_blocking(move || work(&scopes)).await.expect("no panic")
}

fn limits(quota: i64) -> CgroupLimits {
    CgroupLimits::Container(Some(LinuxContainerResources {
        cpu_period: 100_000,
        cpu_quota: quota,
        cpu_shares: 1024,
        memory_limit_in_bytes: 1 << 26,
        unified: [("pids.max".to_owned(), "32".to_owned())].into(),
        ..Default::default()
    }))
}

const GROUP: &str = "/kubepods.slice/kubepods-podx.slice/berth-c1.scope";

#[tokio::test]
async fn a_scope_is_kept_until_its_container_runs() {
    let fake = Fake::start();
    let scopes = scopes(&fake);
    let name = scopes.name("/kubepods.slice/kubepods-podx.slice", "c1").expect("a slice");
    assert_eq!(name, GROUP);
    let made = blocking(&scopes, |scopes| scopes.create(GROUP, &limits(41_700))).await.expect("made");
    assert_eq!(made, [fake.path(GROUP)]);
    let calls = fake.calls();
    let [placeholder] = *fake.processes().iter().copied().collect::<Vec<u32>>() else { panic!("one process") };
    // AC-06a-2, AC-06a-7: the container's weight is the quadratic one, the quota is rounded as the pod's.
    assert_eq!(
        calls,
        [format!(
            "StartTransientUnit berth-c1.scope Description=libcontainer container berth-c1.scope \
             Slice=kubepods-podx.slice Delegate=true PIDs=[{placeholder}] CollectMode=inactive-or-failed \
             MemoryAccounting=true CPUAccounting=true IOAccounting=true TasksAccounting=true \
             DefaultDependencies=false MemorySwapMax=0 MemoryMax=67108864 CPUWeight=100 TasksMax=32 \
             CPUQuotaPeriodUSec=100000 CPUQuotaPerSecUSec=420000"
        )]
    );
    let files = ["cpu.weight", "cpu.max", "memory.max", "memory.swap.max", "pids.max"];
    let standing = files.map(|file| fake.file(&format!("{GROUP}/{file}")));
    assert_eq!(standing, ["100", "42000 100000", "67108864", "0", "32"]);
    let alive = Path::new("/proc").join(placeholder.to_string());
    assert!(alive.exists());
    blocking(&scopes, |scopes| scopes.settle(GROUP)).await;
    assert!(!alive.exists());
    // AC-09a-X18
    blocking(&scopes, |scopes| scopes.limit(GROUP, &limits(80_000))).await.expect("changed");
    let calls = fake.calls();
    let expected = "CPUQuotaPeriodUSec=100000 CPUQuotaPerSecUSec=800000";
    assert!(calls.len() == 1 && calls[0].starts_with("SetUnitProperties berth-c1.scope "), "{calls:?}");
    assert!(calls[0].ends_with(expected), "{calls:?}");
    assert_eq!(fake.file(&format!("{GROUP}/cpu.max")), "80000 100000");
    blocking(&scopes, |scopes| scopes.remove(GROUP)).await.expect("removed");
    assert_eq!(fake.calls(), ["StopUnit berth-c1.scope", "ResetFailedUnit berth-c1.scope"]);
    assert!(!fake.path(GROUP).exists());
    blocking(&scopes, |scopes| scopes.remove(GROUP)).await.expect("gone already");
    assert_eq!(fake.calls(), Vec::<String>::new());
}

/// CPUs and memory nodes are properties too: a reload of systemd would remove them from the files.
#[tokio::test]
async fn a_scope_has_the_cpus_and_memory_nodes_of_its_container() {
    let fake = Fake::start();
    let scopes = scopes(&fake);
    let pinned = |cpus: &str| {
        CgroupLimits::Container(Some(LinuxContainerResources {
            cpu_period: 100_000,
            cpu_quota: -1,
            cpuset_cpus: cpus.to_owned(),
            cpuset_mems: "0".to_owned(),
            ..Default::default()
        }))
    };
    let cpusets = || ["cpuset.cpus", "cpuset.mems"].map(|file| fake.file(&format!("{GROUP}/{file}")));
    let quota = "CPUQuotaPeriodUSec=100000 CPUQuotaPerSecUSec=infinity";
    let limits = pinned("1");
    blocking(&scopes, move |scopes| scopes.create(GROUP, &limits)).await.expect("made");
    let calls = fake.calls();
    let expected = format!(" DefaultDependencies=false AllowedCPUs=[02] AllowedMemoryNodes=[01] {quota}");
    assert!(calls.len() == 1 && calls[0].ends_with(&expected), "{calls:?}");
    assert_eq!(cpusets(), ["1", "0"]);
    blocking(&scopes, |scopes| scopes.settle(GROUP)).await;
    let limits = pinned("0,3");
    blocking(&scopes, move |scopes| scopes.limit(GROUP, &limits)).await.expect("changed");
    let expected = format!("SetUnitProperties berth-c1.scope AllowedCPUs=[09] AllowedMemoryNodes=[01] {quota}");
    assert_eq!(fake.calls(), [expected]);
    assert_eq!(cpusets(), ["0,3", "0"]);
    blocking(&scopes, |scopes| scopes.remove(GROUP)).await.expect("removed");
}

#[tokio::test]
async fn what_fails_leaves_nothing() {
    let fake = Fake::start();
    let scopes = scopes(&fake);
    // A failed unit of that name exists: it is reset, and the start is retried once.
    fake.fault("berth-c1.scope", Fault::Ends("failed"));
    let error =
        blocking(&scopes, |scopes| scopes.create(GROUP, &CgroupLimits::Smallest)).await.expect_err("in the way");
    assert!(error.text.contains("the job ended with result \"failed\""), "{}", error.text);
    let calls: Vec<String> = fake.calls().iter().map(|c| c.split(' ').next().unwrap_or_default().to_owned()).collect();
    assert_eq!(calls[..3], ["StartTransientUnit", "ResetFailedUnit", "StartTransientUnit"]);
    assert!(!fake.path(GROUP).exists());
    blocking(&scopes, |scopes| scopes.create(GROUP, &CgroupLimits::Smallest)).await.expect("the second time");
    assert_eq!(fake.file(&format!("{GROUP}/cpu.weight")), "1");
    // The cgroup files cannot be written: systemd is set back to the values in effect.
    fs::remove_file(fake.path(&format!("{GROUP}/memory.max"))).expect("removed");
    fake.calls();
    blocking(&scopes, |scopes| scopes.limit(GROUP, &limits(50_000))).await.expect_err("a file is missing");
    let calls = fake.calls();
    assert_eq!(calls.len(), 2, "{calls:?}");
    assert!(calls[1].contains("CPUQuotaPerSecUSec=infinity"), "{calls:?}");
    assert!(fake.file(&format!("{GROUP}/cpu.max")).starts_with("max 100000"));
    blocking(&scopes, |scopes| scopes.remove(GROUP)).await.expect("removed");
    for pid in fake.processes() {
        assert!(!Path::new("/proc").join(pid.to_string()).exists(), "a scope placeholder is left");
    }
}

#[tokio::test]
async fn names_need_a_slice() {
    let fake = Fake::start();
    let scopes = scopes(&fake);
    assert_eq!(scopes.name("", "a").as_deref(), Ok("/system.slice/berth-a.scope"));
    assert_eq!(scopes.name("/test.slice", "a").as_deref(), Ok("/test.slice/berth-a.scope"));
    for parent in ["/kubepods/burstable", "/a--b.slice", "/a.slice/b"] {
        let error = scopes.name(parent, "a").expect_err("no slice");
        assert!(error.text.starts_with("invalid systemd slice"), "{}", error.text);
    }
}

#[tokio::test]
async fn groups_are_found_by_what_they_hold() {
    let fake = Fake::start();
    let scopes = scopes(&fake);
    blocking(&scopes, |scopes| scopes.create(GROUP, &CgroupLimits::Container(None))).await.expect("made");
    let found = blocking(&scopes, |scopes| scopes.find("c1")).await.expect("listed");
    assert_eq!(found, [GROUP]);
    blocking(&scopes, |scopes| scopes.remove(GROUP)).await.expect("removed");
}
