//! CRI services with fake ports: state machines, lists, idempotent requests, and events.

use std::{sync::Arc, time::Duration};

use berth_proto::cri::{self, image_service_client::ImageServiceClient, runtime_service_client::RuntimeServiceClient};
use berth_runtime::{cri as services, lost_networks, recovery::recover, runtime::Runtime};
use futures::StreamExt;
use hyper_util::rt::TokioIo;
use tokio_util::sync::CancellationToken;
use tonic::{
    Code, Status,
    transport::{Channel, Endpoint},
};

use super::fakes::{self, FakeState};
use berth_testkit::cri_calls::sandbox;

mod stats;

/// A runtime and its in-memory clients.
struct Fixture {
    world: Arc<FakeState>,
    runtime: Arc<Runtime>,
    rpc: RuntimeServiceClient<Channel>,
    images: ImageServiceClient<Channel>,
    stop: CancellationToken,
    directory: Option<tempfile::TempDir>,
}

impl Drop for Fixture {
    fn drop(&mut self) {
        // Shared memory is a mount if the test may mount.
        for pod in self.runtime.pods() {
            let path = self.runtime.shell.layout.shared_memory(pod.now().id());
            let _ = services::sandbox_files::unmount_shared_memory(&path);
        }
        self.stop.cancel();
    }
}

async fn set() -> Fixture {
    start(tempfile::tempdir().expect("a directory"), Arc::default(), "boot").await
}

async fn start(directory: tempfile::TempDir, world: Arc<FakeState>, boot_id: &str) -> Fixture {
    let runtime = fakes::runtime(directory.path(), &world, boot_id);
    recover(&runtime).await.expect("recovered");
    let stop = CancellationToken::new();
    let memory = services::over_memory(&runtime, stop.clone());
    let connector = tower::service_fn(move |_: http::Uri| {
        let memory = memory.clone();
        async move { memory.connect().await.map(TokioIo::new) }
    });
    let channel = Endpoint::from_static("http://memory").connect_with_connector_lazy(connector);
    let (rpc, images) = (RuntimeServiceClient::new(channel.clone()), ImageServiceClient::new(channel));
    Fixture { world, runtime, rpc, images, stop, directory: Some(directory) }
}

/// A pod in the host's IPC namespace, so that nothing is mounted.
fn pod(name: &str) -> cri::PodSandboxConfig {
    let options = cri::NamespaceOption { ipc: cri::NamespaceMode::Node.into(), ..Default::default() };
    cri::PodSandboxConfig { labels: [("app".to_owned(), name.to_owned())].into(), ..sandbox(name, options) }
}

fn container(name: &str) -> cri::ContainerConfig {
    cri::ContainerConfig {
        metadata: Some(cri::ContainerMetadata { name: name.to_owned(), attempt: 0 }),
        image: Some(cri::ImageSpec { image: "busybox:1".to_owned(), ..Default::default() }),
        command: vec!["run".to_owned()],
        ..Default::default()
    }
}

impl Fixture {
    /// Kills the daemon and starts it again.
    async fn restart(self, boot_id: &str) -> Self {
        self.restart_while(boot_id, || ()).await
    }

    /// Like [`Fixture::restart`], with a change between the two daemons.
    async fn restart_while(mut self, boot_id: &str, meanwhile: impl FnOnce()) -> Self {
        let (directory, world) = (self.directory.take().expect("there"), self.world.clone());
        let runtime = self.runtime.clone();
        drop(self);
        // The tasks that own the lock file have to end first; a killed process would release it.
        runtime.shell.tasks.close();
        tokio::time::timeout(Duration::from_secs(10), async {
            while Arc::strong_count(&runtime) > 1 {
                tokio::task::yield_now().await;
            }
        })
        .await
        .expect("the old services end");
        let tasks = runtime.shell.tasks.clone();
        drop(runtime);
        tokio::time::timeout(Duration::from_secs(10), tasks.wait()).await.expect("the owners end");
        meanwhile();
        start(directory, world, boot_id).await
    }

    async fn run(&self, config: cri::PodSandboxConfig) -> Result<String, Status> {
        let request = cri::RunPodSandboxRequest { config: Some(config), runtime_handler: String::new() };
        self.rpc.clone().run_pod_sandbox(request).await.map(|reply| reply.into_inner().pod_sandbox_id)
    }

    async fn create(&self, sandbox: &str, config: cri::ContainerConfig) -> Result<String, Status> {
        let request = cri::CreateContainerRequest {
            pod_sandbox_id: sandbox.to_owned(),
            config: Some(config),
            sandbox_config: None,
        };
        self.rpc.clone().create_container(request).await.map(|reply| reply.into_inner().container_id)
    }

    async fn start(&self, id: &str) -> Result<(), Status> {
        let request = cri::StartContainerRequest { container_id: id.to_owned() };
        self.rpc.clone().start_container(request).await.map(drop)
    }

    async fn stop(&self, id: &str, timeout: i64) -> Result<(), Status> {
        let request = cri::StopContainerRequest { container_id: id.to_owned(), timeout };
        self.rpc.clone().stop_container(request).await.map(drop)
    }

    async fn remove(&self, id: &str) -> Result<(), Status> {
        let request = cri::RemoveContainerRequest { container_id: id.to_owned() };
        self.rpc.clone().remove_container(request).await.map(drop)
    }

    async fn stop_pod(&self, id: &str) -> Result<(), Status> {
        let request = cri::StopPodSandboxRequest { pod_sandbox_id: id.to_owned() };
        self.rpc.clone().stop_pod_sandbox(request).await.map(drop)
    }

    async fn remove_pod(&self, id: &str) -> Result<(), Status> {
        let request = cri::RemovePodSandboxRequest { pod_sandbox_id: id.to_owned() };
        self.rpc.clone().remove_pod_sandbox(request).await.map(drop)
    }

    async fn status(&self, id: &str) -> cri::ContainerStatus {
        let request = cri::ContainerStatusRequest { container_id: id.to_owned(), verbose: true };
        let reply = self.rpc.clone().container_status(request).await.expect("known");
        reply.into_inner().status.expect("a status")
    }

    async fn pod_status(&self, id: &str) -> cri::PodSandboxStatusResponse {
        let request = cri::PodSandboxStatusRequest { pod_sandbox_id: id.to_owned(), verbose: true };
        self.rpc.clone().pod_sandbox_status(request).await.expect("known").into_inner()
    }

    async fn until_exited(&self, id: &str) -> cri::ContainerStatus {
        let (pod, whole) = self.runtime.container(id).expect("known");
        let is_over = |c: &berth_runtime::container::Container| c.finished().is_some();
        pod.wait_for(|sandbox| sandbox.container(&whole).is_ok_and(is_over)).await.expect("ends");
        self.status(id).await
    }

    fn shim(&self, sandbox: &str) -> Arc<fakes::FakeShim> {
        self.world.shims.lock().expect("whole").get(sandbox).cloned().expect("a shim")
    }

    fn left(&self) -> (usize, usize, usize, Vec<String>) {
        let names = |path: std::path::PathBuf| {
            let list = std::fs::read_dir(path).into_iter().flatten().flatten();
            list.map(|entry| entry.path().display().to_string()).collect::<Vec<_>>()
        };
        let layout = &self.runtime.shell.layout;
        let files = [layout.sandboxes(), layout.containers(), layout.snapshots(), layout.shims()];
        (
            self.world.groups.lock().expect("whole").len(),
            self.world.networks.lock().expect("whole").len(),
            self.world.pinned.lock().expect("whole").len(),
            files.into_iter().flat_map(names).collect(),
        )
    }
}

#[tokio::test]
async fn a_pod_lives_and_leaves_nothing() {
    let set = set().await;
    let mut events =
        set.rpc.clone().get_container_events(cri::GetEventsRequest {}).await.expect("a stream").into_inner();
    let sandbox = set.run(pod("a")).await.expect("runs");
    let status = set.pod_status(&sandbox).await.status.expect("a status");
    assert_eq!(status.state(), cri::PodSandboxState::SandboxReady);
    assert_eq!(status.network.expect("there").ip, "10.1.0.2");
    let id = set.create(&sandbox, container("c")).await.expect("made");
    let status = set.status(&id[..13]).await;
    assert_eq!((status.state(), status.started_at), (cri::ContainerState::ContainerCreated, 0));
    assert_eq!(status.image_ref, "docker.io/library/busybox@sha256:2");
    assert_eq!((status.image_id.as_str(), status.log_path.as_str()), ("sha256:1", "/log"));
    set.start(&id).await.expect("starts");
    assert_eq!(set.status(&id).await.state(), cri::ContainerState::ContainerRunning);
    let refused = set.start(&id).await.expect_err("runs already");
    assert_eq!(
        (refused.code(), refused.message()),
        (Code::FailedPrecondition, "container is in CONTAINER_RUNNING state")
    );
    set.shim(&sandbox).exit(&id, 3);
    let status = set.until_exited(&id).await;
    assert_eq!((status.exit_code, status.reason.as_str()), (3, "Error"));
    set.stop_pod(&sandbox).await.expect("stops");
    set.stop_pod(&sandbox).await.expect("twice");
    assert_eq!(set.pod_status(&sandbox).await.status.expect("there").network.expect("there").ip, "");
    set.remove_pod(&sandbox).await.expect("goes");
    set.remove_pod(&sandbox).await.expect("twice");
    assert_eq!(set.left(), (0, 0, 0, Vec::new()));
    let received: Vec<_> = (&mut events).take(8).map(|event| event.expect("an event")).collect().await;
    let kinds = |of: &str| -> Vec<_> {
        let of = received.iter().filter(|event| event.container_id == of);
        of.map(|event| event.container_event_type().as_str_name()).collect()
    };
    let all =
        ["CONTAINER_CREATED_EVENT", "CONTAINER_STARTED_EVENT", "CONTAINER_STOPPED_EVENT", "CONTAINER_DELETED_EVENT"];
    assert_eq!((kinds(&sandbox), kinds(&id)), (all.to_vec(), all.to_vec()));
    assert!(received.iter().all(|event| event.pod_sandbox_status.is_some()));
}

#[tokio::test]
async fn identical_requests_get_the_same() {
    // AC-09-E6
    let set = set().await;
    *set.world.slow_network.lock().expect("whole") = Duration::from_millis(50);
    let (one, other) = tokio::join!(set.run(pod("a")), set.run(pod("a")));
    let id = one.expect("runs");
    assert_eq!(other.expect("joins"), id);
    assert_eq!(set.run(pod("a")).await.expect("again"), id);
    let changed = cri::PodSandboxConfig { hostname: "other".to_owned(), ..pod("a") };
    let refused = set.run(changed).await.expect_err("another request");
    assert_eq!(refused.code(), Code::AlreadyExists);
    assert_eq!(refused.message(), format!("name \"a_ns_uid-a_0\" is reserved for \"{id}\""));
    let made = set.create(&id, container("c")).await.expect("made");
    assert_eq!(set.create(&id, container("c")).await.expect("again"), made);
    set.start(&made).await.expect("starts");
    let refused = set.create(&id, container("c")).await.expect_err("was started");
    assert_eq!(refused.message(), format!("name \"c_a_ns_uid-a_0\" is reserved for \"{made}\""));
    set.stop_pod(&id).await.expect("stops");
    assert_eq!(set.run(pod("a")).await.expect_err("not ready").code(), Code::AlreadyExists);
    set.remove_pod(&id).await.expect("goes");
    let again = set.run(pod("a")).await.expect("free again");
    assert_ne!(again, id);
}

#[tokio::test]
async fn a_caller_that_leaves_does_not_stop_the_work() {
    let set = set().await;
    *set.world.slow_network.lock().expect("whole") = Duration::from_millis(100);
    let early = tokio::time::timeout(Duration::from_millis(30), set.run(pod("a"))).await;
    assert!(early.is_err(), "left before it was done");
    let id = set.run(pod("a")).await.expect("joins");
    assert_eq!(set.world.networks.lock().expect("whole").as_slice(), std::slice::from_ref(&id));
}

#[tokio::test]
async fn other_handlers_mean_this_runtime_where_they_are_configured() {
    let set = set().await;
    let run = async |name: &str, handler: &str| {
        let request = cri::RunPodSandboxRequest { config: Some(pod(name)), runtime_handler: handler.to_owned() };
        set.rpc.clone().run_pod_sandbox(request).await
    };
    for handler in ["", "berth", "configured"] {
        run(&format!("pod-{handler}"), handler).await.expect("runs");
    }
    let refused = run("other", "other").await.expect_err("an unknown handler");
    assert_eq!(refused.message(), "no runtime for \"other\" is configured");
}

#[tokio::test]
async fn what_fails_is_undone() {
    let set = set().await;
    *set.world.no_network.lock().expect("whole") = Some("no bridge".to_owned());
    let failed = set.run(pod("a")).await.expect_err("no network");
    assert_eq!((failed.code(), failed.message()), (Code::Unknown, "no bridge"));
    assert_eq!(set.left(), (0, 0, 0, Vec::new()));
    let status = set.rpc.clone().status(cri::StatusRequest { verbose: true }).await.expect("received").into_inner();
    let network = &status.status.expect("there").conditions[1];
    assert_eq!(network.reason, "NetworkPluginNotReady");
    assert_eq!(network.message, "Network plugin returns error: no bridge");
    let handlers: Vec<&str> = status.runtime_handlers.iter().map(|handler| handler.name.as_str()).collect();
    assert_eq!(handlers, ["", "berth", "configured"]);
    *set.world.no_network.lock().expect("whole") = None;
    let sandbox = set.run(pod("a")).await.expect("the name is free");
    let absent = cri::ContainerConfig {
        image: Some(cri::ImageSpec { image: "absent".to_owned(), ..Default::default() }),
        ..container("c")
    };
    let failed = set.create(&sandbox, absent).await.expect_err("no image");
    assert_eq!((failed.code(), failed.message()), (Code::NotFound, "failed to resolve image \"absent\": not found"));
}

#[tokio::test]
async fn what_cannot_be_executed_has_ended() {
    // AC-09a-X6
    let set = set().await;
    let sandbox = set.run(pod("a")).await.expect("runs");
    let missing = cri::ContainerConfig { command: vec!["missing".to_owned()], ..container("c") };
    let id = set.create(&sandbox, missing).await.expect("made");
    let text = "exec: \"missing\": executable file not found in $PATH";
    assert_eq!(set.start(&id).await.expect_err("missing").message(), text);
    let status = set.status(&id).await;
    assert_eq!((status.state(), status.exit_code), (cri::ContainerState::ContainerExited, 128));
    assert_eq!((status.reason.as_str(), status.message.as_str(), status.started_at), ("StartError", text, 0));
    assert_eq!(set.world.groups.lock().expect("whole").len(), 1, "only the sandbox's");
}

#[tokio::test]
async fn a_stop_asks_once_and_a_shorter_one_kills_earlier() {
    // AC-09a-X5
    let set = set().await;
    let sandbox = set.run(pod("a")).await.expect("runs");
    let id = set.create(&sandbox, container("c")).await.expect("made");
    set.start(&id).await.expect("starts");
    let shim = set.shim(&sandbox);
    shim.state.lock().expect("whole").ignores_term = true;
    let begun = std::time::Instant::now();
    let (long, short) = tokio::join!(set.stop(&id, 600), set.stop(&id, 1));
    long.expect("stopped");
    short.expect("stopped");
    assert!(begun.elapsed() < Duration::from_secs(60), "{:?}", begun.elapsed());
    let signals: Vec<_> = shim.state.lock().expect("whole").signals.iter().map(|(_, signal, _)| *signal).collect();
    assert_eq!(signals, [15, 9]);
    let status = set.until_exited(&id).await;
    assert_eq!((status.exit_code, status.reason.as_str()), (137, "Error"));
    set.stop(&id, 0).await.expect("stopped already");
}

#[tokio::test]
async fn a_lost_shim_is_reported_within_a_second() {
    // AC-09-E3, with a fake shim
    let set = set().await;
    let sandbox = set.run(pod("a")).await.expect("runs");
    let id = set.create(&sandbox, container("c")).await.expect("made");
    set.start(&id).await.expect("starts");
    set.shim(&sandbox).die();
    let status = tokio::time::timeout(Duration::from_secs(10), set.until_exited(&id)).await.expect("in time");
    assert_eq!((status.exit_code, status.reason.as_str()), (255, "Unknown"));
    assert_eq!(set.pod_status(&sandbox).await.status.expect("there").state(), cri::PodSandboxState::SandboxNotready);
    let refused = set.create(&sandbox, container("d")).await.expect_err("not ready");
    assert_eq!(refused.message(), format!("sandbox container \"{sandbox}\" is not running"));
    set.remove_pod(&sandbox).await.expect("goes");
    assert_eq!(set.left(), (0, 0, 0, Vec::new()));
}

#[tokio::test]
async fn a_lost_connection_is_no_lost_shim() {
    let set = set().await;
    let sandbox = set.run(pod("a")).await.expect("runs");
    let id = set.create(&sandbox, container("c")).await.expect("made");
    set.start(&id).await.expect("starts");
    set.shim(&sandbox).exit_unseen(&id, 7);
    let status = set.until_exited(&id).await;
    assert_eq!((status.exit_code, status.reason.as_str()), (7, "Error"));
    assert_eq!(set.pod_status(&sandbox).await.status.expect("there").state(), cri::PodSandboxState::SandboxReady);
}

#[tokio::test]
async fn programs_are_executed_and_overdue_ones_killed() {
    let set = set().await;
    let sandbox = set.run(pod("a")).await.expect("runs");
    let id = set.create(&sandbox, container("c")).await.expect("made");
    let exec = |words: &[&str], timeout| {
        let cmd = words.iter().map(|&word| word.to_owned()).collect();
        let request = cri::ExecSyncRequest { container_id: id.clone(), cmd, timeout };
        let mut rpc = set.rpc.clone();
        async move { rpc.exec_sync(request).await.map(tonic::Response::into_inner) }
    };
    let refused = exec(&["true"], 0).await.expect_err("does not run");
    assert_eq!(
        (refused.code(), refused.message()),
        (Code::FailedPrecondition, "container is in CONTAINER_CREATED state")
    );
    set.start(&id).await.expect("starts");
    let reply = exec(&["echo", "hi"], 0).await.expect("runs");
    assert_eq!((reply.stdout.as_slice(), reply.exit_code), (&b"echo hi"[..], 0));
    assert_eq!(exec(&["false"], 0).await.expect("runs").exit_code, 1);
    assert_eq!(exec(&[], 0).await.expect_err("nothing").code(), Code::InvalidArgument);
    let overdue = exec(&["sleep", "100"], 1).await.expect_err("too long");
    assert_eq!(overdue.code(), Code::DeadlineExceeded);
    assert_eq!(overdue.message(), "failed to exec in container: timeout 1s exceeded: context deadline exceeded");
    assert_eq!(set.status(&id).await.state(), cri::ContainerState::ContainerRunning);
}

#[tokio::test]
async fn lists_are_filtered_and_newest_first() {
    let set = set().await;
    let (a, b) = (set.run(pod("a")).await.expect("runs"), set.run(pod("b")).await.expect("runs"));
    let (c, d) =
        (set.create(&a, container("c")).await.expect("made"), set.create(&b, container("d")).await.expect("made"));
    let pods = async |filter: cri::PodSandboxFilter| {
        let request = cri::ListPodSandboxRequest { filter: Some(filter) };
        let items = set.rpc.clone().list_pod_sandbox(request).await.expect("listed").into_inner().items;
        items.into_iter().map(|item| item.id).collect::<Vec<_>>()
    };
    assert_eq!(pods(cri::PodSandboxFilter::default()).await, [b.clone(), a.clone()]);
    assert_eq!(
        pods(cri::PodSandboxFilter { id: a[..13].to_owned(), ..Default::default() }).await,
        std::slice::from_ref(&a)
    );
    assert!(pods(cri::PodSandboxFilter { id: "x".to_owned(), ..Default::default() }).await.is_empty());
    let label = [("app".to_owned(), "b".to_owned())].into();
    assert_eq!(
        pods(cri::PodSandboxFilter { label_selector: label, ..Default::default() }).await,
        std::slice::from_ref(&b)
    );
    let state = Some(cri::PodSandboxStateValue { state: cri::PodSandboxState::SandboxNotready.into() });
    assert!(pods(cri::PodSandboxFilter { state, ..Default::default() }).await.is_empty());
    let containers = async |filter: cri::ContainerFilter| {
        let request = cri::StreamContainersRequest { filter: Some(filter) };
        let stream = set.rpc.clone().stream_containers(request).await.expect("listed").into_inner();
        let chunks: Vec<_> = stream.map(|chunk| chunk.expect("a chunk").containers).collect().await;
        chunks.into_iter().flatten().map(|item| item.id).collect::<Vec<_>>()
    };
    assert_eq!(containers(cri::ContainerFilter::default()).await, [d.clone(), c.clone()]);
    assert_eq!(
        containers(cri::ContainerFilter { pod_sandbox_id: a.clone(), ..Default::default() }).await,
        std::slice::from_ref(&c)
    );
    let both = cri::ContainerFilter { id: d.clone(), pod_sandbox_id: a.clone(), ..Default::default() };
    assert!(containers(both).await.is_empty());
    for unknown in ["", "nothing"] {
        let request = cri::ContainerStatusRequest { container_id: unknown.to_owned(), verbose: false };
        let code = set.rpc.clone().container_status(request).await.expect_err("unknown").code();
        assert_eq!(code, if unknown.is_empty() { Code::InvalidArgument } else { Code::NotFound });
    }
    set.stop("nothing", 1).await.expect("unknown is stopped");
    set.remove("nothing").await.expect("unknown is removed");
    set.images.clone().list_images(cri::ListImagesRequest::default()).await.expect("listed");
}

#[tokio::test]
async fn resources_are_kept_and_logs_opened_again() {
    // AC-09a-X18, AC-09a-X19
    let set = set().await;
    let sandbox = set.run(pod("a")).await.expect("runs");
    let id = set.create(&sandbox, container("c")).await.expect("made");
    let linux = Some(cri::LinuxContainerResources { cpu_quota: 5000, ..Default::default() });
    let request = cri::UpdateContainerResourcesRequest { container_id: id.clone(), linux, ..Default::default() };
    set.rpc.clone().update_container_resources(request).await.expect("kept");
    let quota = |status: cri::ContainerStatus| status.resources.and_then(|r| r.linux).map(|l| l.cpu_quota);
    assert_eq!(quota(set.status(&id).await), Some(5000));
    let reopen = || {
        let mut rpc = set.rpc.clone();
        let request = cri::ReopenContainerLogRequest { container_id: id.clone() };
        async move { rpc.reopen_container_log(request).await }
    };
    let refused = reopen().await.expect_err("does not run");
    assert_eq!((refused.code(), refused.message()), (Code::FailedPrecondition, "container is not running"));
    set.start(&id).await.expect("starts");
    reopen().await.expect("opened");
    assert_eq!(set.shim(&sandbox).state.lock().expect("whole").reopened, std::slice::from_ref(&id));
    let groups = format!("{:?}", set.world.groups.lock().expect("whole"));
    assert!(groups.contains("cpu_quota: 5000"), "{groups}");
    set.remove(&id).await.expect("killed and removed");
    assert!(set.world.pinned.lock().expect("whole").is_empty());
}

#[tokio::test]
async fn a_daemon_that_comes_back_finds_its_pods() {
    // AC-09-E2, with fake shims
    let set = set().await;
    let sandbox = set.run(pod("a")).await.expect("runs");
    let (ran_on, ended) = (
        set.create(&sandbox, container("on")).await.expect("made"),
        set.create(&sandbox, container("ended")).await.expect("made"),
    );
    let made = set.create(&sandbox, container("made")).await.expect("made");
    set.start(&ran_on).await.expect("starts");
    set.start(&ended).await.expect("starts");
    let before = set.status(&ran_on).await;
    let shim = set.shim(&sandbox);
    let set = set.restart_while("boot", || shim.exit_unseen(&ended, 42)).await;
    assert_eq!(set.status(&ran_on).await, before);
    let status = set.status(&ended).await;
    assert_eq!((status.state(), status.exit_code), (cri::ContainerState::ContainerExited, 42));
    assert_eq!(set.status(&made).await.state(), cri::ContainerState::ContainerCreated);
    assert_eq!(set.create(&sandbox, container("made")).await.expect("again"), made);
    assert_eq!(set.run(pod("a")).await.expect("again"), sandbox);
    set.start(&made).await.expect("starts");
    set.remove_pod(&sandbox).await.expect("goes");
    assert_eq!(set.left(), (0, 0, 0, Vec::new()));
}

#[tokio::test]
async fn a_reboot_ends_everything_and_can_be_cleaned_up() {
    // AC-09-E5, with fake shims
    let set = set().await;
    let sandbox = set.run(pod("a")).await.expect("runs");
    let id = set.create(&sandbox, container("c")).await.expect("made");
    set.start(&id).await.expect("starts");
    set.world.shims.lock().expect("whole").clear();
    let set = set.restart("another boot").await;
    assert_eq!(set.pod_status(&sandbox).await.status.expect("there").state(), cri::PodSandboxState::SandboxNotready);
    let status = set.status(&id).await;
    assert_eq!((status.exit_code, status.reason.as_str()), (255, "Unknown"));
    assert!(status.finished_at >= status.started_at);
    set.remove_pod(&sandbox).await.expect("goes");
    assert_eq!(set.left(), (0, 0, 0, Vec::new()));
}

#[tokio::test]
async fn broken_records_are_cleaned_up() {
    let set = set().await;
    let (good, bad) = (set.run(pod("a")).await.expect("runs"), set.run(pod("b")).await.expect("runs"));
    let id = set.create(&bad, container("c")).await.expect("made");
    let layout = set.runtime.shell.layout.clone();
    std::fs::write(layout.sandbox(&bad).join("meta.json"), "{").expect("writable");
    let set = set.restart("boot").await;
    let all = set.rpc.clone().list_pod_sandbox(cri::ListPodSandboxRequest { filter: None }).await.expect("listed");
    let all: Vec<_> = all.into_inner().items.into_iter().map(|item| item.id).collect();
    assert_eq!(all, [good]);
    assert!(!layout.sandbox(&bad).exists() && !layout.container(&id).exists());
    assert_eq!(set.runtime.shell.metrics.broken_objects.get(), 2);
}

#[tokio::test]
async fn streams_are_prepared_only_for_what_runs() {
    // 09a §4
    let set = set().await;
    let sandbox = set.run(pod("a")).await.expect("runs");
    let id = set.create(&sandbox, container("c")).await.expect("made");
    let exec = async |container: &str, [stdout, stderr, tty]: [bool; 3]| {
        let cmd = vec!["ls".to_owned()];
        let request = cri::ExecRequest { container_id: container.to_owned(), cmd, tty, stdin: false, stdout, stderr };
        set.rpc.clone().exec(request).await.map(|reply| reply.into_inner().url)
    };
    let attach = async |container: &str| {
        let request = cri::AttachRequest { container_id: container.to_owned(), stdout: true, ..Default::default() };
        set.rpc.clone().attach(request).await.map(|reply| reply.into_inner().url)
    };
    let forward = async |sandbox: &str, port: i32| {
        let request = cri::PortForwardRequest { pod_sandbox_id: sandbox.to_owned(), port: vec![port] };
        set.rpc.clone().port_forward(request).await.map(|reply| reply.into_inner().url)
    };
    let refusal = |refused: Result<String, Status>| {
        let status = refused.expect_err("refused");
        (status.code(), status.message().to_owned())
    };
    let out = [true, false, false];
    let row = |code, text: &str| (code, text.to_owned());
    let unknown = "an error occurred when try to find container \"nope\": not found";
    assert_eq!(refusal(exec("nope", out).await), row(Code::NotFound, unknown));
    assert_eq!(refusal(attach("nope").await), row(Code::NotFound, unknown));
    let created = row(Code::FailedPrecondition, "container is in CONTAINER_CREATED state");
    assert_eq!(refusal(exec(&id, out).await), created);
    assert_eq!(refusal(attach(&id).await), created);
    let both = row(Code::InvalidArgument, "tty and stderr cannot both be true");
    assert_eq!(refusal(exec(&id, [true; 3]).await), both);
    let none = row(Code::InvalidArgument, "one of stdin, stdout, or stderr must be set");
    assert_eq!(refusal(exec(&id, [false; 3]).await), none);
    assert_eq!(
        refusal(forward(&sandbox, 0).await),
        row(Code::InvalidArgument, "invalid port 0: must be between 1 and 65535")
    );
    let unknown = "an error occurred when try to find sandbox \"nope\": not found";
    assert_eq!(refusal(forward("nope", 80).await), row(Code::NotFound, unknown));
    set.start(&id).await.expect("starts");
    for (url, verb) in [
        (exec(&id[..13], out).await, "exec"),
        (attach(&id).await, "attach"),
        (forward(&sandbox, 80).await, "portforward"),
    ] {
        let url = url.expect("prepared");
        assert!(url.starts_with(&format!("in-process:///{verb}/")), "{url}");
    }
    // 04b §5: a thousand streams may be pending; three of them are already.
    for _ in 3..1000 {
        attach(&id).await.expect("room");
    }
    assert_eq!(
        refusal(attach(&id).await),
        row(Code::ResourceExhausted, "maximum number of in-flight requests exceeded")
    );
    set.stop_pod(&sandbox).await.expect("stops");
    let text = format!("sandbox container \"{sandbox}\" is not running");
    assert_eq!(refusal(forward(&sandbox, 80).await), row(Code::FailedPrecondition, &text));
}

#[tokio::test]
async fn a_pod_that_lost_its_network_is_not_ready() {
    let set = set().await;
    let (lost, kept) = (set.run(pod("lost")).await.expect("runs"), set.run(pod("kept")).await.expect("runs"));
    set.world.networks.lock().expect("whole").retain(|one| *one != lost);
    lost_networks::check(&set.runtime).await;
    let state = async |id: &str| set.pod_status(id).await.status.expect("a status").state();
    assert_eq!(state(&lost).await, cri::PodSandboxState::SandboxNotready);
    assert_eq!(state(&kept).await, cri::PodSandboxState::SandboxReady);
    set.world.networks.lock().expect("whole").clear();
    let set = set.restart("boot").await;
    let status = set.pod_status(&kept).await.status.expect("a status");
    assert_eq!(status.state(), cri::PodSandboxState::SandboxNotready, "missed at the start");
    for id in [&lost, &kept] {
        set.remove_pod(id).await.expect("goes");
    }
}
