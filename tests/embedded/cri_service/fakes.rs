//! Fakes of `berth_runtime::ports`: shims, images, plans, networks, and cgroups, without changing the machine.

use std::{
    collections::{BTreeMap, BTreeSet},
    os::fd::OwnedFd,
    path::{Path, PathBuf},
    sync::{
        Arc, Mutex,
        atomic::{AtomicBool, Ordering},
    },
    time::Duration,
};

use async_trait::async_trait;
use berth_proto::cri;
use berth_runtime::{
    config::EmbeddedConfig,
    errors::{ErrorKind, RuntimeError, RuntimeResult},
    launch::devices::Rule,
    ports::{
        AttachedNetwork, CgroupLimits, ContainerPlanRequest, Groups, Image, Images, NetworkPod, PlannedContainer,
        Planner, PodNetworkProvider, Ports, Shim, ShimSession, Shims,
    },
    runtime::{HostFacts, Runtime, now_ns},
    stats::{CgroupMemory, Cpu, CpuTimes, Depth, MemoryStat, Reading},
};
use berth_shim::plan::{
    ContainerRecord, ExecPlan, Exit, ExitEvent, Hello, LaunchPlan, Namespace, NamespacePlan, ProcessTarget, Reply,
    Scope, ShimRequest, StartedProcess,
};
use tokio::{
    net::TcpStream,
    sync::{mpsc, watch},
};
use tokio_util::{sync::CancellationToken, task::TaskTracker};

use berth_testkit::plans;

/// State and records that all fakes of a test share.
#[derive(Default)]
pub struct FakeState {
    /// Shims by sandbox id.
    pub shims: Mutex<BTreeMap<String, Arc<FakeShim>>>,
    /// Existing cgroups and their last limits.
    pub groups: Mutex<BTreeMap<String, CgroupLimits>>,
    /// Existing networks.
    pub networks: Mutex<Vec<String>>,
    /// Error of network setup, if it fails.
    pub no_network: Mutex<Option<String>>,
    /// Notifies that a network may be lost.
    pub disturbances: watch::Sender<u64>,
    /// Latency of network setup.
    pub slow_network: Mutex<Duration>,
    /// Image references: image and container.
    pub pinned: Mutex<Vec<(String, String)>>,
}

/// A shim whose processes are map entries.
pub struct FakeShim {
    pub state: Mutex<ShimState>,
    events: Mutex<Option<mpsc::Sender<ExitEvent>>>,
    is_dead: AtomicBool,
}

#[derive(Default)]
pub struct ShimState {
    pub containers: BTreeMap<String, ContainerRecord>,
    pub signals: Vec<(ProcessTarget, i32, Scope)>,
    pub plans: Vec<LaunchPlan>,
    pub reopened: Vec<String>,
    /// Processes ignore the termination signal.
    pub ignores_term: bool,
    events: Vec<ExitEvent>,
    number: u64,
    next_pid: u32,
}

impl FakeShim {
    fn send_exit(&self, state: &mut ShimState, of: ProcessTarget, exit: Exit) {
        state.number += 1;
        if let (ProcessTarget::Container(id), number) = (&of, state.number) {
            let _ = number;
            if let Some(record) = state.containers.get_mut(id) {
                record.exit = Some(exit);
            }
        }
        let event = ExitEvent { number: state.number, of, exit };
        state.events.push(event.clone());
        if let Some(events) = &*self.events.lock().expect("whole") {
            let _ = events.try_send(event);
        }
    }

    /// A container exits.
    pub fn exit(&self, id: &str, code: i32) {
        let mut state = self.state.lock().expect("whole");
        self.send_exit(&mut state, ProcessTarget::Container(id.to_owned()), exit(code));
    }

    /// Drops the connection; the shim stays alive.
    pub fn disconnect(&self) {
        self.events.lock().expect("whole").take();
    }

    /// A container exits while no daemon is connected.
    pub fn exit_unseen(&self, id: &str, code: i32) {
        self.disconnect();
        self.exit(id, code);
    }

    /// The shim dies.
    pub fn die(&self) {
        self.is_dead.store(true, Ordering::Release);
        self.events.lock().expect("whole").take();
    }

    fn connect(self: &Arc<Self>) -> (ShimSession, Hello) {
        let (sender, events) = mpsc::channel(64);
        *self.events.lock().expect("whole") = Some(sender);
        let state = self.state.lock().expect("whole");
        let hello = Hello {
            version: 1,
            pid: 1000,
            namespaces: Vec::new(),
            init: None,
            containers: state.containers.values().cloned().collect(),
            starting: Vec::new(),
            events: state.events.clone(),
        };
        (ShimSession { shim: self.clone(), events }, hello)
    }
}

fn exit(code: i32) -> Exit {
    Exit { code, is_signal: code > 128, at_ns: now_ns(), is_oom: false, oom_kills: 0, lost_lines: 0 }
}

#[async_trait]
impl Shim for FakeShim {
    async fn request(
        &self,
        request: ShimRequest,
        files: Vec<OwnedFd>,
        _: Duration,
    ) -> RuntimeResult<(Reply, Vec<OwnedFd>)> {
        if self.events.lock().expect("whole").is_none() {
            return Err(RuntimeError::other("the shim is gone"));
        }
        let mut state = self.state.lock().expect("whole");
        let unknown = || RuntimeError::new(ErrorKind::NotFound, "unknown");
        let reply = match request {
            ShimRequest::MakeNamespaces(plan) => {
                let made: Vec<_> = plan.made;
                let files = made.iter().map(|_| std::fs::File::open("/dev/null").expect("there").into()).collect();
                return Ok((Reply::Namespaces { made, init: None }, files));
            }
            ShimRequest::Launch(plan) => {
                if plan.process.args == ["missing"] {
                    let text = "exec: \"missing\": executable file not found in $PATH";
                    return Err(RuntimeError::other(text));
                }
                state.next_pid += 1;
                let started = StartedProcess {
                    pid: state.next_pid,
                    start_ticks: 1,
                    at_ns: now_ns(),
                    ..StartedProcess::default()
                };
                let record = ContainerRecord { id: plan.container.clone(), started, exit: None };
                state.containers.insert(plan.container.clone(), record);
                state.plans.push(*plan);
                Reply::Started(started)
            }
            ShimRequest::Exec(plan) => {
                let ExecPlan { container, exec, process, .. } = *plan;
                state.containers.get(&container).ok_or_else(unknown)?;
                use std::io::Write;
                let mut files = files.into_iter().skip(1).map(std::fs::File::from);
                let (mut out, _err) = (files.next().expect("stdout"), files.next().expect("stderr"));
                let _ = out.write_all(process.args.join(" ").as_bytes());
                let code = if process.args[0] == "false" { 1 } else { 0 };
                if process.args[0] != "sleep" {
                    self.send_exit(&mut state, ProcessTarget::Exec(container, exec), exit(code));
                }
                Reply::Started(StartedProcess { pid: 99, start_ticks: 1, at_ns: now_ns(), ..StartedProcess::default() })
            }
            ShimRequest::Signal { to, signal, scope } => {
                state.signals.push((to.clone(), signal, scope));
                let dies = signal == 9 || !state.ignores_term;
                match &to {
                    ProcessTarget::Container(id) => {
                        let record = state.containers.get(id).ok_or_else(unknown)?;
                        if record.exit.is_none() && dies {
                            self.send_exit(&mut state, to, exit(128 + signal));
                        }
                    }
                    ProcessTarget::Exec(..) => self.send_exit(&mut state, to, exit(128 + signal)),
                    ProcessTarget::Init => {}
                }
                Reply::Done
            }
            ShimRequest::ReopenLog(id) => {
                state.reopened.push(id);
                Reply::Done
            }
            ShimRequest::Forget(id) => {
                state.containers.remove(&id);
                Reply::Done
            }
            ShimRequest::Acknowledge(number) => {
                state.events.retain(|event| event.number > number);
                Reply::Done
            }
            ShimRequest::Shutdown => {
                drop(state);
                self.die();
                Reply::Done
            }
            _ => Reply::Done,
        };
        Ok((reply, Vec::new()))
    }
}

#[derive(Clone)]
pub struct Fakes(pub Arc<FakeState>);

#[async_trait]
impl Shims for Fakes {
    async fn spawn(&self, sandbox: &str, _: &[PathBuf]) -> RuntimeResult<ShimSession> {
        let shim =
            Arc::new(FakeShim { state: Mutex::default(), events: Mutex::default(), is_dead: AtomicBool::default() });
        self.0.shims.lock().expect("whole").insert(sandbox.to_owned(), shim.clone());
        Ok(shim.connect().0)
    }

    async fn find(&self, sandbox: &str) -> RuntimeResult<(ShimSession, Hello)> {
        let shim = self.0.shims.lock().expect("whole").get(sandbox).cloned();
        let shim = shim.filter(|shim| !shim.is_dead.load(Ordering::Acquire));
        shim.map(|shim| shim.connect()).ok_or_else(|| RuntimeError::other("nobody answers"))
    }

    fn exit_record(&self, _: &Path, _: &str) -> Option<Exit> {
        None
    }
}

#[async_trait]
impl Images for Fakes {
    async fn resolve(&self, name: &str) -> RuntimeResult<Option<Arc<Image>>> {
        if name == "absent" {
            return Ok(None);
        }
        Ok(Some(Arc::new(Image {
            id: "sha256:1".to_owned(),
            tags: vec!["docker.io/library/busybox:1".to_owned()],
            digests: vec!["docker.io/library/busybox@sha256:2".to_owned()],
            stop_signal: String::new(),
        })))
    }

    async fn pin(&self, image: &str, container: &str) -> RuntimeResult<()> {
        self.release(image, container).await;
        self.0.pinned.lock().expect("whole").push((image.to_owned(), container.to_owned()));
        Ok(())
    }

    async fn release(&self, _: &str, container: &str) {
        self.0.pinned.lock().expect("whole").retain(|(_, pinned)| pinned != container);
    }

    async fn release_others(&self, containers: &BTreeSet<String>) {
        self.0.pinned.lock().expect("whole").retain(|(_, pinned)| containers.contains(pinned));
    }

    async fn list(&self, _: Option<cri::ImageFilter>) -> RuntimeResult<Vec<cri::Image>> {
        Ok(Vec::new())
    }

    async fn status(&self, _: cri::ImageStatusRequest) -> RuntimeResult<cri::ImageStatusResponse> {
        Ok(cri::ImageStatusResponse::default())
    }

    async fn pull(&self, _: cri::PullImageRequest) -> RuntimeResult<String> {
        Ok("sha256:1".to_owned())
    }

    async fn remove(&self, _: &str) -> RuntimeResult<()> {
        Ok(())
    }

    async fn written(&self, container: &str) -> RuntimeResult<(u64, u64)> {
        let pinned = self.0.pinned.lock().expect("whole").iter().any(|(_, pinned)| pinned == container);
        if pinned { Ok((4096, 3)) } else { Err(RuntimeError::no_container(container)) }
    }

    async fn file_systems(&self) -> RuntimeResult<cri::ImageFsInfoResponse> {
        Ok(cri::ImageFsInfoResponse::default())
    }
}

#[async_trait]
impl Planner for Fakes {
    fn namespaces(&self, pod: &cri::PodSandboxConfig) -> RuntimeResult<NamespacePlan> {
        let hostname = pod.hostname.clone();
        Ok(NamespacePlan { made: vec![Namespace::Network, Namespace::Uts], hostname, ..NamespacePlan::default() })
    }

    async fn container(&self, ask: ContainerPlanRequest) -> RuntimeResult<PlannedContainer> {
        let args: Vec<&str> = ask.config.command.iter().map(String::as_str).collect();
        let plan = LaunchPlan { log: Some("/log".into()), ..plans::plain(&ask.id, &args) };
        let images = ask.config.mounts.iter().filter(|mount| mount.image.is_some());
        let mounted = images.map(|mount| (mount.container_path.clone(), "sha256:1".to_owned())).collect();
        Ok(PlannedContainer { plan, user: (0, 0, vec![0]), devices: Vec::new(), mounted })
    }

    fn exec(&self, container: &LaunchPlan, exec: &str, args: &[String], _: bool) -> RuntimeResult<ExecPlan> {
        let args: Vec<&str> = args.iter().map(String::as_str).collect();
        Ok(plans::exec(&container.container, exec, &args))
    }
}

#[async_trait]
impl PodNetworkProvider for Fakes {
    async fn attach(&self, pod: NetworkPod, namespace: Option<OwnedFd>) -> RuntimeResult<AttachedNetwork> {
        assert!(namespace.is_some(), "a pod's network needs its namespace");
        let slow = *self.0.slow_network.lock().expect("whole");
        tokio::time::sleep(slow).await;
        if let Some(cause) = self.0.no_network.lock().expect("whole").clone() {
            return Err(RuntimeError::other(cause));
        }
        self.0.networks.lock().expect("whole").push(pod.id);
        Ok(AttachedNetwork { netns: "/run/netns/x".into(), ips: vec!["10.1.0.2".to_owned()], persisted: "kept".into() })
    }

    async fn detach(&self, pod: NetworkPod) -> RuntimeResult<()> {
        assert!(pod.persisted.is_null() || pod.persisted == "kept", "{:?}", pod.persisted);
        self.0.networks.lock().expect("whole").retain(|one| *one != pod.id);
        Ok(())
    }

    async fn recover(&self, pods: Vec<NetworkPod>) -> RuntimeResult<Vec<String>> {
        self.0.networks.lock().expect("whole").retain(|one| pods.iter().any(|pod| pod.id == *one));
        self.lost(pods).await
    }

    async fn lost(&self, pods: Vec<NetworkPod>) -> RuntimeResult<Vec<String>> {
        let there = self.0.networks.lock().expect("whole");
        Ok(pods.into_iter().map(|pod| pod.id).filter(|id| !there.contains(id)).collect())
    }

    fn disturbances(&self) -> watch::Receiver<u64> {
        self.0.disturbances.subscribe()
    }

    async fn readiness_error(&self) -> Option<String> {
        self.0.no_network.lock().expect("whole").clone()
    }

    async fn warning(&self) -> Option<String> {
        Some("a warning".to_owned())
    }

    fn last_cni_load(&self) -> String {
        "OK".to_owned()
    }

    async fn set_ranges(&self, _: &str) -> RuntimeResult<()> {
        Ok(())
    }

    async fn dial(&self, _: Option<&Path>, _: &str, port: u16) -> RuntimeResult<TcpStream> {
        TcpStream::connect(("127.0.0.1", port)).await.map_err(|error| RuntimeError::other(error.to_string()))
    }
}

impl Groups for Fakes {
    fn name(&self, parent: &str, id: &str) -> RuntimeResult<String> {
        Ok(format!("{}/{id}", if parent.is_empty() { "/berth" } else { parent }))
    }

    fn find(&self, id: &str) -> RuntimeResult<Vec<String>> {
        let groups = self.0.groups.lock().expect("whole");
        Ok(groups.keys().filter(|group| group.rsplit('/').next() == Some(id)).cloned().collect())
    }

    fn create(&self, group: &str, limits: &CgroupLimits) -> RuntimeResult<Vec<PathBuf>> {
        self.0.groups.lock().expect("whole").insert(group.to_owned(), limits.clone());
        Ok(vec![Path::new("/sys/fs/cgroup").join(group.trim_start_matches('/'))])
    }

    fn allow_devices(&self, _: &str, _: &[Rule]) -> RuntimeResult<()> {
        Ok(())
    }

    fn limit(&self, group: &str, limits: &CgroupLimits) -> RuntimeResult<()> {
        self.0.groups.lock().expect("whole").insert(group.to_owned(), limits.clone());
        Ok(())
    }

    fn remove(&self, group: &str) -> RuntimeResult<()> {
        self.0.groups.lock().expect("whole").remove(group);
        Ok(())
    }

    fn read(&self, group: &str, _: Depth) -> Reading {
        if !self.0.groups.lock().expect("whole").contains_key(group) && !group.ends_with("pods") {
            return Reading::default();
        }
        let times = CpuTimes { usage_ns: 2_000_000_000, ..CpuTimes::default() };
        let stat = MemoryStat { inactive_file: 30, ..MemoryStat::default() };
        Reading {
            at: now_ns(),
            cpu: Some(Cpu { times, ..Cpu::default() }),
            memory: Some(CgroupMemory { usage: 100, stat, limit: u64::MAX, ..CgroupMemory::default() }),
            threads: Some((2, 0)),
            ..Reading::default()
        }
    }

    fn processes(&self, group: &str) -> Vec<u32> {
        Vec::from_iter(self.0.groups.lock().expect("whole").contains_key(group).then_some(1))
    }

    fn has_pressure_stats(&self) -> bool {
        false
    }
}

/// A runtime of fakes, with that boot id.
pub fn runtime(directory: &Path, world: &Arc<FakeState>, boot_id: &str) -> Arc<Runtime> {
    let fakes = Arc::new(Fakes(world.clone()));
    let ports = Ports {
        shims: fakes.clone(),
        images: fakes.clone(),
        planner: fakes.clone(),
        network: fakes.clone(),
        groups: fakes,
    };
    let config = EmbeddedConfig {
        root: directory.join("root"),
        state: directory.join("state"),
        exec_io_drain: Duration::from_millis(50),
        runtime_handlers: vec!["configured".to_owned()],
        ..EmbeddedConfig::default()
    };
    let host = HostFacts {
        boot_id: boot_id.into(),
        hostname: "node".to_owned(),
        driver: cri::CgroupDriver::Cgroupfs,
        has_recursive_read_only: true,
        has_user_namespaces: false,
    };
    Runtime::open(config, ports, host, (TaskTracker::new(), CancellationToken::new())).expect("a fresh directory")
}
