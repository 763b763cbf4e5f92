//! Checks on a machine with a real systemd: the driver, and an agent on its embedded runtime.
//!
//! Behavior: spec 06a §7, 09a §9.

use std::{
    fs,
    io::{Read, Write},
    net::TcpStream,
    path::{Path, PathBuf},
    process::{Child, Command, Stdio},
    sync::Arc,
    thread,
    time::{Duration, Instant},
};

use berth_runtime::{
    groups::CgroupfsGroups,
    launch::inputs,
    ports::{CgroupLimits, Groups},
    systemd_scopes::Scopes,
};
use berth_sys::cgroup::{
    GroupPath, Hierarchy,
    systemd::{Bus, SystemdDriver, Units},
};

use berth_testkit::machine::Root;

/// Names of all checks.
pub const NAMES: [&str; 3] = [
    "systemd::inside::slices_have_the_values_set_in_systemd",
    "systemd::inside::a_scope_lives_as_long_as_it_has_processes",
    "systemd::inside::an_agent_runs_pods_in_slices_and_scopes",
];
const LIMIT: Duration = Duration::from_secs(60);
const GROUPS: &str = "/sys/fs/cgroup";
const POD: &str = "/kubepods.slice/kubepods-burstable.slice/kubepods-burstable-pod0123_abcd.slice";
const MANIFEST: &str = "
apiVersion: v1
kind: Pod
metadata: {name: one, namespace: default, uid: 0123-abcd}
spec:
  hostNetwork: true
  terminationGracePeriodSeconds: 1
  containers:
    - name: c
      image: builtin.local/pause
      resources:
        requests: {cpu: 250m, memory: 32Mi}
        limits: {cpu: 417m, memory: 64Mi}
";
/// AC-06-1: the agent takes the cgroup driver of the runtime; its own setting is the default, cgroupfs.
const KUBELET: &str = "
apiVersion: kubelet.config.k8s.io/v1beta1
kind: KubeletConfiguration
staticPodPath: /tmp/pods
fileCheckFrequency: 1s
readOnlyPort: 10255
podPidsLimit: 100
failSwapOn: false
enforceNodeAllocatable: [pods]
";
const BERTH: &str = "
embeddedRuntime:
  root: /tmp/runtime
  state: /run/berth/runtime
  cgroupDriver: systemd
  network: {mode: builtin}
";

/// Writes the files of the checks.
pub fn lay_down(root: &Root) {
    for (name, text) in [("pod.yaml", MANIFEST), ("kubelet.yaml", KUBELET), ("berth.yaml", BERTH)] {
        root.file(&format!("t/{name}"), text);
    }
}

/// Whether this is the virtual machine.
fn is_inside() -> bool {
    let inside = std::env::var_os("BERTH_INSIDE").is_some();
    if !inside {
        println!("skipped: runs on the machine that a_machine_that_systemd_runs boots");
    }
    inside
}

fn until<T>(what: &str, mut poll: impl FnMut() -> Option<T>) -> T {
    let begun = Instant::now();
    loop {
        if let Some(found) = poll() {
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
    let output = Command::new("/bin/systemctl").args(arguments).output().expect("systemctl");
    format!("{}{}", String::from_utf8_lossy(&output.stdout), String::from_utf8_lossy(&output.stderr)).trim().to_owned()
}

/// An async runtime for the driver's tasks, and the driver on this machine's systemd.
fn driver() -> (tokio::runtime::Runtime, SystemdDriver, Hierarchy) {
    // Warnings are printed if the test fails; another test may have set the subscriber.
    let _ = tracing_subscriber::fmt().with_test_writer().try_init();
    let runtime =
        tokio::runtime::Builder::new_multi_thread().worker_threads(1).enable_all().build().expect("a runtime");
    let bus = {
        let _inside = runtime.enter();
        Bus::of_this_machine().expect("systemd runs")
    };
    assert!(bus.release().expect("received").0 > 200);
    (runtime, SystemdDriver::new(Arc::new(bus)), Hierarchy::detect().expect("unified"))
}

#[test]
#[ignore = "runs inside"]
fn slices_have_the_values_set_in_systemd() {
    if !is_inside() {
        return;
    }
    let (_runtime, driver, on) = driver();
    let slice = path("/tests.slice/tests-a.slice");
    let values = [("pids.max", "64"), ("memory.max", "67108864"), ("cpu.weight", "39"), ("cpu.max", "42000 100000")];
    let above = driver.make_slice(&on, &slice, &pairs(&values)).expect("made");
    assert_eq!(above, [path("/tests.slice")]);
    // Only systemd wrote these files.
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
fn a_scope_lives_as_long_as_it_has_processes() {
    if !is_inside() {
        return;
    }
    let (_runtime, driver, on) = driver();
    let kernel = CgroupfsGroups::new(on.clone(), inputs::Groups::V2 { options: String::new() }, true);
    let scopes = Scopes::new(kernel, driver.clone(), "/t/berth-shim".into());
    // The slice is created on demand, as critest requires.
    let group = scopes.name("/test.slice", "c1").expect("a slice");
    assert_eq!(group, "/test.slice/berth-c1.scope");
    let resources = berth_proto::cri::LinuxContainerResources {
        cpu_period: 100_000,
        cpu_quota: 41_700,
        cpu_shares: 1024,
        memory_limit_in_bytes: 1 << 26,
        cpuset_cpus: "1".to_owned(),
        cpuset_mems: "0".to_owned(),
        ..Default::default()
    };
    let shared = berth_proto::cri::LinuxContainerResources { cpuset_cpus: "0-1".to_owned(), ..resources.clone() };
    let limits = CgroupLimits::Container(Some(resources));
    let directories = scopes.create(&group, &limits).expect("made");
    assert_eq!(directories, [at(&group)]);
    assert_eq!(files(&group, ["cpu.max", "cpu.weight", "memory.max"]), ["42000 100000", "100", "67108864"]);
    let show = |name| systemctl(&["show", "--property", name, "--value", "berth-c1.scope"]);
    let shown = ["Slice", "Delegate", "CPUQuotaPerSecUSec", "MemoryMax", "CollectMode"].map(show);
    assert_eq!(shown, ["test.slice", "yes", "420ms", "67108864", "inactive-or-failed"]);
    let cpusets = ["cpuset.cpus", "cpuset.mems"];
    assert_eq!((files(&group, cpusets), show("AllowedCPUs")), (["1", "0"].map(str::to_owned), "1".to_owned()));
    assert_eq!(show("AllowedMemoryNodes"), "0");
    scopes.limit(&group, &CgroupLimits::Container(Some(shared))).expect("changed");
    assert_eq!((files(&group, cpusets), show("AllowedCPUs")), (["0-1", "0"].map(str::to_owned), "0-1".to_owned()));
    let mut sleeper = Command::new("/bin/busybox").args(["sleep", "1000"]).spawn().expect("a process");
    fs::write(at(&group).join("cgroup.procs"), sleeper.id().to_string()).expect("moved");
    scopes.settle(&group);
    assert_eq!(file(&group, "cgroup.procs"), sleeper.id().to_string());
    scopes.remove(&group).expect("killed and removed");
    assert!(!at(&group).exists());
    sleeper.wait().expect("killed");
    // A scope without any container process ends with its placeholder.
    scopes.create(&group, &CgroupLimits::Smallest).expect("the same name again");
    scopes.settle(&group);
    until("systemd removes an empty scope", || (!at(&group).exists()).then_some(()));
    until("and forgets it", || (show("LoadState") == "not-found").then_some(()));
    let foreign = scopes.create("/test.slice/berth-c2.scope", &CgroupLimits::Container(None)).expect("made");
    assert!(foreign[0].exists());
    driver.remove(&on, &path("/test.slice")).expect("with all that is in it");
    assert!(!at("/test.slice").exists());
}

/// An agent process, killed when dropped.
struct Agent(Child);

impl Drop for Agent {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
        if thread::panicking() {
            println!("{}", fs::read_to_string("/tmp/berth.log").unwrap_or_default());
        }
    }
}

fn agent() -> Agent {
    let log = fs::OpenOptions::new().create(true).append(true).open("/tmp/berth.log").expect("a file");
    let mut command = Command::new("/t/berth");
    command.args(["run", "--config", "/t/kubelet.yaml", "--root-dir", "/tmp/kubelet", "--hostname-override", "node"]);
    command.env("BERTH_CONFIG", "/t/berth.yaml").stdin(Stdio::null());
    command.stdout(log.try_clone().expect("a file")).stderr(log);
    Agent(command.spawn().expect("an agent"))
}

/// Body of a page of the read-only port; `None` if nobody responds.
fn page(of: &str) -> Option<serde_json::Value> {
    let mut stream = TcpStream::connect(("127.0.0.1", 10255)).ok()?;
    stream.set_read_timeout(Some(Duration::from_secs(10))).ok()?;
    stream.write_all(format!("GET {of} HTTP/1.0\r\nHost: x\r\n\r\n").as_bytes()).ok()?;
    let mut answer = String::new();
    stream.read_to_string(&mut answer).ok()?;
    serde_json::from_str(answer.split_once("\r\n\r\n")?.1).ok()
}

fn phase() -> Option<String> {
    let pods = page("/pods")?;
    Some(pods["items"][0]["status"]["phase"].as_str()?.to_owned())
}

fn scopes_of_pod() -> Vec<String> {
    let entries = fs::read_dir(at(POD)).into_iter().flatten().flatten();
    let names = entries.filter_map(|entry| entry.file_name().into_string().ok());
    names.filter(|name| name.starts_with("berth-") && name.ends_with(".scope")).collect()
}

#[test]
#[ignore = "runs inside"]
fn an_agent_runs_pods_in_slices_and_scopes() {
    if !is_inside() {
        return;
    }
    fs::create_dir_all("/tmp/pods").expect("made");
    fs::copy("/t/pod.yaml", "/tmp/pods/pod.yaml").expect("copied");
    let mut agent = agent();
    until("the pod runs", || {
        assert!(agent.0.try_wait().expect("a child").is_none(), "the agent has ended");
        (phase().as_deref() == Some("Running")).then_some(())
    });
    // AC-06a-1, AC-06a-7, AC-06a-9
    let names = ["cpu.weight", "cpu.max", "memory.max", "pids.max"];
    let pod = ["10", "42000 100000", "67108864", "100"];
    assert_eq!(files(POD, names), pod);
    assert_eq!(file("/kubepods.slice/kubepods-burstable.slice", "cpu.weight"), "10");
    assert_ne!(file("/kubepods.slice", "memory.max"), "max");
    let scopes = scopes_of_pod();
    assert_eq!(scopes.len(), 2, "the sandbox's and the container's: {scopes:?}");
    // AC-06a-2: the container's weight is quadratic.
    let mut weights: Vec<_> =
        scopes.iter().map(|scope| files(&format!("{POD}/{scope}"), ["cpu.weight", "cpu.max"])).collect();
    weights.sort();
    assert_eq!(weights, [["1".to_owned(), "max 100000".to_owned()], ["35".to_owned(), "42000 100000".to_owned()]]);
    for scope in &scopes {
        assert_eq!(systemctl(&["is-active", scope]), "active");
    }
    // Changed values are written again, also those that systemd changes by itself.
    let slice = POD.rsplit('/').next().expect("a name");
    assert_eq!(systemctl(&["set-property", "--runtime", slice, "CPUWeight=77", "MemoryMax=1G"]), "");
    until("values are written again", || (files(POD, names) == pod).then_some(()));
    assert_eq!(systemctl(&["daemon-reload"]), "");
    until("values are there after a reload", || (files(POD, names) == pod).then_some(()));
    // An agent that exits keeps its pods running, and the next one recovers them.
    let before = processes();
    agent.0.kill().expect("killed");
    agent.0.wait().expect("killed");
    drop(std::mem::replace(&mut agent, self::agent()));
    until("the next agent sees the pod", || (phase().as_deref() == Some("Running")).then_some(()));
    assert_eq!(processes(), before);
    fs::remove_file("/tmp/pods/pod.yaml").expect("removed");
    until("the slice is gone", || (!at(POD).exists()).then_some(()));
    let left = || systemctl(&["list-units", "--all", "--plain", "--no-legend", "berth-*.scope", slice]);
    until("systemd has forgotten all of it", || left().is_empty().then_some(()));
    until("its weight is given back", || {
        (file("/kubepods.slice/kubepods-burstable.slice", "cpu.weight") == "1").then_some(())
    });
}

/// Processes of the pod, by container.
fn processes() -> Vec<String> {
    let mut all: Vec<_> = scopes_of_pod().iter().map(|scope| file(&format!("{POD}/{scope}"), "cgroup.procs")).collect();
    all.sort();
    all
}
