//! A pod on this machine's kernel: shim, namespaces, overlay, control groups, log.
//!
//! Needs root, busybox-static and the shim's program beside the test; says so where it is skipped. Every test has a network
//! namespace of its own, so that bridge, packet filter and settings of this machine stay as they are, and what a test that
//! failed has left is cleaned up.

use std::{
    fs,
    path::{Path, PathBuf},
    sync::Arc,
    time::Duration,
};

use berth::{
    embedded::{
        config::{EmbeddedConfig, NetworkConfig},
        cri as services,
        images::ImageStore,
        parts::{self, Surroundings},
    },
    proto::cri::{self, runtime_service_client::RuntimeServiceClient},
    sys::{
        cgroup::{GroupPath, Hierarchy},
        net_namespace,
        netlink::{Protocol, Socket, filter, route},
    },
};
use hyper_util::rt::TokioIo;
use nix::{
    sys::signal::{Signal, kill},
    unistd::Pid,
};
use tokio_util::{sync::CancellationToken, task::TaskTracker};
use tonic::transport::{Channel, Endpoint};

#[path = "../kit/image.rs"]
#[allow(dead_code, reason = "only the archive is made here")]
mod image;

mod changes;
mod full_disk;
mod network;
mod stats;

/// Why this machine cannot run it.
pub fn obstacle() -> Option<&'static str> {
    let shim = std::env::current_exe().ok().and_then(|own| {
        let places = own.ancestors().skip(1).take(2).map(|folder| folder.join("berth-shim")).collect::<Vec<_>>();
        places.into_iter().find(|path| path.is_file())
    });
    if !nix::unistd::geteuid().is_root() {
        return Some("needs root: containers are started");
    }
    if !Path::new("/bin/busybox").exists() {
        return Some("needs busybox-static");
    }
    if shim.is_none() { Some("needs berth-shim beside the test") } else { None }
}

/// Directories of a test; mounts, shims, groups and namespaces go with them.
pub struct Place(pub tempfile::TempDir);

impl Place {
    pub fn path(&self) -> &Path {
        self.0.path()
    }
}

impl Drop for Place {
    fn drop(&mut self) {
        for sandbox in names(&self.path().join("state/s")) {
            if let Some(shim) = shim_of(&self.path().join("state/s").join(&sandbox)) {
                let _ = kill(Pid::from_raw(shim), Signal::SIGKILL);
            }
            let _ = net_namespace::unbind_file(&namespace_file(self.path(), &sandbox));
        }
        if let (Ok(all), Some(group)) = (Hierarchy::detect(), GroupPath::parse(&format!("/{}", group(self.path())))) {
            let _ = all.remove(&group);
        }
        drop_parent_group(self.path());
        remove_network(&bridge(self.path()));
        let mounts = fs::read_to_string("/proc/self/mounts").unwrap_or_default();
        let below = self.path().display().to_string();
        let ours = mounts.lines().filter_map(|line| line.split(' ').nth(1)).filter(|path| path.starts_with(&below));
        for path in ours.collect::<Vec<_>>().into_iter().rev() {
            let _ = nix::mount::umount2(path, nix::mount::MntFlags::MNT_DETACH);
        }
    }
}

/// Removes bridge and table: not every test has a namespace of its own.
fn remove_network(bridge: &str) {
    if let Ok(mut socket) = Socket::open(Protocol::Route)
        && let Ok(Some(told)) = socket.ask(route::get_link(bridge))
        && let Some(link) = route::link(&told)
    {
        let _ = socket.request(route::delete_link(link.index));
    }
    let (begin, end) = filter::marks();
    if let Ok(mut socket) = Socket::open(Protocol::Netfilter) {
        let _ = socket.transaction(begin, vec![filter::delete_table(bridge)], end);
    }
}

/// Names in a directory.
fn names(folder: &Path) -> Vec<String> {
    let entries = fs::read_dir(folder).into_iter().flatten().flatten();
    entries.map(|entry| entry.file_name().to_string_lossy().into_owned()).collect()
}

/// Runs a test in a network namespace of its own; says so where it cannot.
pub fn on_a_machine<F: Future<Output = ()>>(test: &str, body: impl FnOnce(Place) -> F + Send) {
    if let Some(why) = obstacle() {
        assert!(std::env::var_os("CI").is_none(), "{test}: {why}");
        println!("skipped {test}: {why}");
        return;
    }
    std::thread::scope(|scope| {
        let run = || {
            nix::sched::unshare(nix::sched::CloneFlags::CLONE_NEWNET).expect("a namespace");
            Socket::open(Protocol::Route).and_then(|mut socket| socket.request(route::up(1))).expect("loopback");
            let place = Place(tempfile::tempdir().expect("a directory"));
            // Its threads, and the shims they start, begin in this one's namespace.
            let runtime = tokio::runtime::Builder::new_multi_thread().worker_threads(2).enable_all().build();
            runtime.expect("a runtime").block_on(body(place));
        };
        let thread = std::thread::Builder::new().name(test.to_owned()).spawn_scoped(scope, run).expect("a thread");
        thread.join().expect("the test");
    });
}

pub struct Daemon {
    pub rpc: RuntimeServiceClient<Channel>,
    pub runtime: Arc<berth::embedded::runtime::Runtime>,
    pub images: ImageStore,
    pub stop: CancellationToken,
}

pub async fn daemon(place: &Path) -> Daemon {
    daemon_with(place, Builtin::Missing).await
}

/// Whether the built-in images are made.
#[derive(PartialEq, Eq)]
pub enum Builtin {
    Made,
    Missing,
}

pub async fn daemon_with(place: &Path, builtin: Builtin) -> Daemon {
    let network = NetworkConfig { mode: "builtin".to_owned(), bridge: bridge(place), ..NetworkConfig::default() };
    let (root, state) = (place.join("root"), place.join("state"));
    let config =
        EmbeddedConfig { root, state, network, import_dir: place.join("archives"), ..EmbeddedConfig::default() };
    let stop = CancellationToken::new();
    let around = Surroundings {
        hostname: "node".to_owned(),
        has_builtin_images: builtin == Builtin::Made,
        tasks: TaskTracker::new(),
        stop: stop.clone(),
    };
    let (runtime, images) = parts::open(config, around).await.expect("opened");
    if builtin == Builtin::Missing && images.status(image::BUSYBOX).expect("asked").is_none() {
        let archive = place.join("busybox.tar");
        image::write_archive(&[image::Image::busybox(image::BUSYBOX)], &archive).expect("written");
        images.import(&archive, None).await.expect("imported");
    }
    parts::start(&runtime);
    let memory = services::over_memory(&runtime, stop.clone());
    let connector = tower::service_fn(move |_: http::Uri| {
        let memory = memory.clone();
        async move { memory.connect().await.map(TokioIo::new) }
    });
    let channel = Endpoint::from_static("http://memory").connect_with_connector_lazy(connector);
    Daemon { rpc: RuntimeServiceClient::new(channel), runtime, images, stop }
}

pub fn pod(place: &Path, name: &str) -> cri::PodSandboxConfig {
    let node = cri::NamespaceMode::Node.into();
    let options = cri::NamespaceOption {
        network: node,
        pid: cri::NamespaceMode::Container.into(),
        ..cri::NamespaceOption::default()
    };
    let context = cri::LinuxSandboxSecurityContext { namespace_options: Some(options), ..Default::default() };
    cri::PodSandboxConfig {
        metadata: Some(cri::PodSandboxMetadata {
            name: name.to_owned(),
            namespace: "ns".to_owned(),
            uid: format!("uid-{name}"),
            attempt: 0,
        }),
        log_directory: place.join("logs").display().to_string(),
        linux: Some(cri::LinuxPodSandboxConfig {
            cgroup_parent: format!("/{}", group(place)),
            security_context: Some(context),
            ..Default::default()
        }),
        ..Default::default()
    }
}

pub fn container(name: &str, script: &str) -> cri::ContainerConfig {
    let options = cri::NamespaceOption { pid: cri::NamespaceMode::Container.into(), ..Default::default() };
    let context = cri::LinuxContainerSecurityContext { namespace_options: Some(options), ..Default::default() };
    cri::ContainerConfig {
        metadata: Some(cri::ContainerMetadata { name: name.to_owned(), attempt: 0 }),
        image: Some(cri::ImageSpec { image: image::BUSYBOX.to_owned(), ..Default::default() }),
        command: ["/bin/sh", "-c", script].map(str::to_owned).to_vec(),
        log_path: format!("{name}.log"),
        linux: Some(cri::LinuxContainerConfig {
            resources: Some(cri::LinuxContainerResources { cpu_shares: 100, ..Default::default() }),
            security_context: Some(context),
        }),
        ..Default::default()
    }
}

impl Daemon {
    pub async fn run(&self, config: cri::PodSandboxConfig) -> String {
        let request = cri::RunPodSandboxRequest { config: Some(config), runtime_handler: String::new() };
        self.rpc.clone().run_pod_sandbox(request).await.expect("runs").into_inner().pod_sandbox_id
    }

    pub async fn start(&self, sandbox: &str, config: cri::ContainerConfig) -> String {
        let (pod_sandbox_id, config) = (sandbox.to_owned(), Some(config));
        let request = cri::CreateContainerRequest { pod_sandbox_id, config, sandbox_config: None };
        let id = self.rpc.clone().create_container(request).await.expect("made").into_inner().container_id;
        let request = cri::StartContainerRequest { container_id: id.clone() };
        self.rpc.clone().start_container(request).await.expect("starts");
        id
    }

    pub async fn exec(&self, id: &str, script: &str) -> (String, i32) {
        let cmd = ["/bin/sh", "-c", script].map(str::to_owned).to_vec();
        let request = cri::ExecSyncRequest { container_id: id.to_owned(), cmd, timeout: 20 };
        let reply = self.rpc.clone().exec_sync(request).await.expect("executed").into_inner();
        (String::from_utf8_lossy(&reply.stdout).into_owned(), reply.exit_code)
    }

    pub async fn status(&self, id: &str) -> cri::ContainerStatus {
        let request = cri::ContainerStatusRequest { container_id: id.to_owned(), verbose: false };
        self.rpc.clone().container_status(request).await.expect("known").into_inner().status.expect("a status")
    }

    pub async fn exited(&self, id: &str) -> cri::ContainerStatus {
        let (pod, id) = self.runtime.container(id).expect("known");
        let over = pod.wait_for(|sandbox| sandbox.container(&id).is_ok_and(|c| c.finished().is_some()));
        tokio::time::timeout(Duration::from_secs(20), over).await.expect("in time").expect("ends");
        self.status(&id).await
    }

    pub async fn remove(&self, id: &str) {
        let request = cri::RemovePodSandboxRequest { pod_sandbox_id: id.to_owned() };
        self.rpc.clone().remove_pod_sandbox(request).await.expect("goes");
    }
}

/// What is left on the machine of a test below this place.
pub fn left(place: &Path) -> Vec<String> {
    let mut left = Vec::new();
    let mounts = fs::read_to_string("/proc/self/mounts").expect("readable");
    let below = place.display().to_string();
    let of_pods = |line: &&str| line.contains(&below) && !line.contains("/state/exe/");
    left.extend(mounts.lines().filter(of_pods).map(str::to_owned));
    let group = group(place);
    for root in ["cpu", "memory", "pids", "devices", "systemd", "unified", ""] {
        let parent = Path::new("/sys/fs/cgroup").join(root).join(&group);
        for entry in fs::read_dir(parent).into_iter().flatten().flatten() {
            if entry.path().is_dir() {
                left.push(entry.path().display().to_string());
            }
        }
    }
    for folder in ["root/sandboxes", "root/containers", "root/snap", "state/s"] {
        left.extend(names(&place.join(folder)).iter().map(|name| format!("{folder}/{name}")));
    }
    left
}

/// What a test's own things are called.
fn own_name(place: &Path) -> String {
    place.file_name().unwrap_or_default().to_string_lossy().trim_start_matches('.').to_owned()
}

/// The control group of a test's pods.
fn group(place: &Path) -> String {
    format!("berth-test-{}", own_name(place))
}

/// The bridge of a test's pods: files of namespaces are called after it, which other tests would take for theirs else.
fn bridge(place: &Path) -> String {
    format!("bt{}", own_name(place))
}

/// The file that names a pod's network namespace.
fn namespace_file(place: &Path, sandbox: &str) -> PathBuf {
    Path::new("/run/netns").join(format!("{}-{}", bridge(place), sandbox.get(..16).unwrap_or_default()))
}

pub fn drop_parent_group(place: &Path) {
    let group = group(place);
    for root in ["cpu", "cpuacct", "cpuset", "memory", "pids", "devices", "systemd", "hugetlb", ""] {
        let _ = fs::remove_dir(Path::new("/sys/fs/cgroup").join(root).join(&group));
    }
}

#[test]
fn a_pod_of_busybox_runs_logs_executes_stops_and_leaves_nothing() {
    on_a_machine("a_pod_of_busybox_runs_logs_executes_stops_and_leaves_nothing", async |place| {
        let daemon = daemon(place.path()).await;
        let sandbox = daemon.run(pod(place.path(), "a")).await;
        let id = daemon
            .start(
                &sandbox,
                container("c", "echo hello; echo oops >&2; trap 'exit 3' TERM; while :; do sleep 0.1; done"),
            )
            .await;
        let status = daemon.status(&id).await;
        assert_eq!(status.state(), cri::ContainerState::ContainerRunning);
        let (out, code) = daemon.exec(&id, "cat /proc/1/cmdline | tr '\\0' ' '; hostname; exit 5").await;
        assert!(out.starts_with("/bin/sh -c echo hello") && code == 5, "{out:?} {code}");
        // AC-09a-X7
        let begun = std::time::Instant::now();
        assert_eq!(daemon.exec(&id, "sleep 300 & echo hi").await, ("hi\n".to_owned(), 0));
        assert!(begun.elapsed() < Duration::from_secs(10), "{:?}", begun.elapsed());
        let (out, _) = daemon.exec(&id, "mknod /tmp/sda b 8 0 && head -c 1 /tmp/sda; echo done").await;
        assert_eq!(out, "done\n", "devices of the host are out of reach");
        let log = fs::read_to_string(&status.log_path).expect("a log");
        assert!(log.contains(" stdout F hello\n") && log.contains(" stderr F oops\n"), "{log:?}");
        let request = cri::StopContainerRequest { container_id: id.clone(), timeout: 10 };
        daemon.rpc.clone().stop_container(request).await.expect("stops");
        let status = daemon.exited(&id).await;
        assert_eq!((status.exit_code, status.reason.as_str()), (3, "Error"));
        // AC-09a-X6
        let missing = cri::ContainerConfig { command: vec!["/nowhere".to_owned()], ..container("m", "") };
        let request = cri::CreateContainerRequest {
            pod_sandbox_id: sandbox.clone(),
            config: Some(missing),
            sandbox_config: None,
        };
        let missing = daemon.rpc.clone().create_container(request).await.expect("made").into_inner().container_id;
        let request = cri::StartContainerRequest { container_id: missing.clone() };
        let refused = daemon.rpc.clone().start_container(request).await.expect_err("missing");
        assert!(refused.message().contains("/nowhere"), "{refused:?}");
        let status = daemon.status(&missing).await;
        assert_eq!((status.exit_code, status.reason.as_str()), (128, "StartError"));
        daemon.remove(&sandbox).await;
        assert_eq!(left(place.path()), Vec::<String>::new());
        daemon.stop.cancel();
    });
}

#[test]
fn pods_outlive_the_daemon_and_a_killed_shim_is_noticed() {
    on_a_machine("pods_outlive_the_daemon_and_a_killed_shim_is_noticed", async |place| {
        // AC-09-E2, small
        let at = place.path().to_owned();
        let first = std::thread::spawn(move || {
            let runtime = tokio::runtime::Runtime::new().expect("a runtime");
            let told = runtime.block_on(async {
                let daemon = daemon(&at).await;
                let sandbox = daemon.run(pod(&at, "b")).await;
                let on = daemon.start(&sandbox, container("on", "while :; do echo tick; sleep 0.05; done")).await;
                let ends = daemon.start(&sandbox, container("ends", "sleep 0.5; exit 42")).await;
                (sandbox, daemon.status(&on).await, ends)
            });
            // As if it was killed: nothing is told to stop.
            runtime.shutdown_timeout(Duration::from_millis(100));
            told
        });
        let (sandbox, on, ends) = first.join().expect("ran");
        tokio::time::sleep(Duration::from_millis(700)).await;
        let daemon = daemon(place.path()).await;
        assert_eq!(daemon.status(&on.id).await, on);
        assert_eq!(daemon.exited(&ends).await.exit_code, 42);
        assert_eq!(daemon.exec(&on.id, "echo hi").await, ("hi\n".to_owned(), 0));
        // AC-09-E3
        let shim = shim_of(&place.path().join("state/s").join(&sandbox)).expect("a shim");
        kill(Pid::from_raw(shim), Signal::SIGKILL).expect("killed");
        let begun = std::time::Instant::now();
        let status = daemon.exited(&on.id).await;
        assert_eq!((status.exit_code, status.reason.as_str()), (255, "Unknown"));
        assert!(begun.elapsed() < Duration::from_secs(2), "{:?}", begun.elapsed());
        daemon.remove(&sandbox).await;
        assert_eq!(left(place.path()), Vec::<String>::new());
        daemon.stop.cancel();
    });
}

/// The process whose argument is that folder.
fn shim_of(folder: &Path) -> Option<i32> {
    let wanted = folder.display().to_string();
    let pids = fs::read_dir("/proc").ok()?.flatten().filter_map(|e| e.file_name().to_str()?.parse::<i32>().ok());
    pids.into_iter().find(|pid| {
        let line = fs::read(format!("/proc/{pid}/cmdline")).unwrap_or_default();
        String::from_utf8_lossy(&line).split('\0').nth(1) == Some(&wanted)
    })
}
