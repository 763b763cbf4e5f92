//! What runs on the machine that a real systemd runs. Behaviour: spec 06a §7, 09a §9.

use std::{
    fs,
    path::{Path, PathBuf},
    process::Command,
    sync::Arc,
    thread,
    time::{Duration, Instant},
};

use berth::{
    embedded::{
        groups::KernelGroups,
        launch::facts,
        ports::{Groups, Limits},
        scopes::Scopes,
    },
    sys::cgroup::{
        GroupPath, Hierarchy,
        systemd::{Bus, Driver, Units},
    },
};

/// All of them.
pub const NAMES: [&str; 2] =
    ["inside::slices_have_what_systemd_was_told", "inside::a_scope_lives_as_long_as_somebody_is_in_it"];
const LIMIT: Duration = Duration::from_secs(60);
const GROUPS: &str = "/sys/fs/cgroup";

/// Whether this is the machine.
fn is_inside() -> bool {
    let inside = std::env::var_os("BERTH_INSIDE").is_some();
    if !inside {
        println!("skipped: runs on the machine that a_machine_that_systemd_runs boots");
    }
    inside
}

fn until<T>(what: &str, mut look: impl FnMut() -> Option<T>) -> T {
    let begun = Instant::now();
    loop {
        if let Some(found) = look() {
            return found;
        }
        assert!(begun.elapsed() < LIMIT, "not within {LIMIT:?}: {what}");
        thread::sleep(Duration::from_millis(50));
    }
}

fn at(group: &str) -> PathBuf {
    Path::new(GROUPS).join(group.trim_start_matches('/'))
}

fn file(group: &str, name: &str) -> String {
    let path = at(group).join(name);
    fs::read_to_string(&path).unwrap_or_else(|e| panic!("{}: {e}", path.display())).trim().to_owned()
}

fn files<const N: usize>(group: &str, names: [&str; N]) -> [String; N] {
    names.map(|name| file(group, name))
}

fn path(text: &str) -> GroupPath {
    GroupPath::parse(text).expect("plain")
}

fn pairs(files: &[(&str, &str)]) -> Vec<(String, String)> {
    files.iter().map(|(file, value)| ((*file).to_owned(), (*value).to_owned())).collect()
}

fn systemctl(arguments: &[&str]) -> String {
    let said = Command::new("/bin/systemctl").args(arguments).output().expect("systemctl");
    format!("{}{}", String::from_utf8_lossy(&said.stdout), String::from_utf8_lossy(&said.stderr)).trim().to_owned()
}

/// A runtime that lives as long as its tasks are needed, and the driver on this machine's systemd.
fn driver() -> (tokio::runtime::Runtime, Driver, Hierarchy) {
    // What is warned of is shown where the test fails; another one may have seen to that.
    let _ = tracing_subscriber::fmt().with_test_writer().try_init();
    let runtime =
        tokio::runtime::Builder::new_multi_thread().worker_threads(1).enable_all().build().expect("a runtime");
    let bus = {
        let _inside = runtime.enter();
        Bus::of_this_machine().expect("systemd runs")
    };
    assert!(bus.release().expect("told").0 > 200);
    (runtime, Driver::new(Arc::new(bus)), Hierarchy::detect().expect("unified"))
}

#[test]
#[ignore = "runs inside"]
fn slices_have_what_systemd_was_told() {
    if !is_inside() {
        return;
    }
    let (_runtime, driver, on) = driver();
    let slice = path("/tests.slice/tests-a.slice");
    let values = [("pids.max", "64"), ("memory.max", "67108864"), ("cpu.weight", "39"), ("cpu.max", "42000 100000")];
    let above = driver.make_slice(&on, &slice, &pairs(&values)).expect("made");
    assert_eq!(above, [path("/tests.slice")]);
    // Nobody but systemd wrote them.
    let names = ["pids.max", "memory.max", "cpu.weight", "cpu.max"];
    assert_eq!(files("/tests.slice/tests-a.slice", names), ["64", "67108864", "39", "42000 100000"]);
    let controllers = file("/tests.slice/tests-a.slice", "cgroup.controllers");
    for controller in ["cpu", "cpuset", "memory", "pids"] {
        assert!(controllers.split(' ').any(|c| c == controller), "{controllers}");
    }
    assert_eq!(driver.make_slice(&on, &slice, &[]).expect("there"), []);
    let values = [("memory.max", "max"), ("memory.low", "4096"), ("cpu.max", "max 100000"), ("cpuset.cpus", "0")];
    driver.set(&slice, &pairs(&values)).expect("changed");
    let names = ["memory.max", "memory.low", "cpu.max", "cpuset.cpus", "cpu.weight"];
    assert_eq!(files("/tests.slice/tests-a.slice", names), ["max", "4096", "max 100000", "0", "39"]);
    driver.remove(&on, &slice).expect("removed");
    assert!(!at("/tests.slice/tests-a.slice").exists());
    assert_eq!(systemctl(&["is-active", "tests-a.slice"]), "inactive");
    driver.remove(&on, &slice).expect("gone already");
    driver.remove(&on, &path("/tests.slice")).expect("removed");
}

#[test]
#[ignore = "runs inside"]
fn a_scope_lives_as_long_as_somebody_is_in_it() {
    if !is_inside() {
        return;
    }
    let (_runtime, driver, on) = driver();
    let kernel = KernelGroups::new(on.clone(), facts::Groups::V2 { options: String::new() }, true);
    let scopes = Scopes::new(kernel, driver.clone(), "/t/berth-shim".into());
    // Made on demand, as critest wants it.
    let group = scopes.name("/test.slice", "c1").expect("a slice");
    assert_eq!(group, "/test.slice/berth-c1.scope");
    let resources = berth::proto::cri::LinuxContainerResources {
        cpu_period: 100_000,
        cpu_quota: 41_700,
        cpu_shares: 1024,
        memory_limit_in_bytes: 1 << 26,
        ..Default::default()
    };
    let limits = Limits::Container(Some(resources));
    let directories = scopes.create(&group, &limits).expect("made");
    assert_eq!(directories, [at(&group)]);
    assert_eq!(files(&group, ["cpu.max", "cpu.weight", "memory.max"]), ["42000 100000", "100", "67108864"]);
    let show = |name| systemctl(&["show", "--property", name, "--value", "berth-c1.scope"]);
    let shown = ["Slice", "Delegate", "CPUQuotaPerSecUSec", "MemoryMax", "CollectMode"].map(show);
    assert_eq!(shown, ["test.slice", "yes", "420ms", "67108864", "inactive-or-failed"]);
    let mut sleeper = Command::new("/bin/busybox").args(["sleep", "1000"]).spawn().expect("a process");
    fs::write(at(&group).join("cgroup.procs"), sleeper.id().to_string()).expect("moved");
    scopes.settle(&group);
    assert_eq!(file(&group, "cgroup.procs"), sleeper.id().to_string());
    scopes.remove(&group).expect("killed and removed");
    assert!(!at(&group).exists());
    sleeper.wait().expect("killed");
    // One in which nothing ever ran ends with its keeper.
    scopes.create(&group, &Limits::Smallest).expect("the same name again");
    scopes.settle(&group);
    until("systemd removes an empty scope", || (!at(&group).exists()).then_some(()));
    until("and forgets it", || (show("LoadState") == "not-found").then_some(()));
    let foreign = scopes.create("/test.slice/berth-c2.scope", &Limits::Container(None)).expect("made");
    assert!(foreign[0].exists());
    driver.remove(&on, &path("/test.slice")).expect("with all that is in it");
    assert!(!at("/test.slice").exists());
}
