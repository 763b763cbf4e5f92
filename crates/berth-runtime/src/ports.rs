//! Ports: traits through which the CRI services reach the host. Each has a fake with the same contract.

use std::{
    collections::{BTreeMap, BTreeSet},
    os::fd::OwnedFd,
    path::{Path, PathBuf},
    sync::Arc,
    time::Duration,
};

use async_trait::async_trait;
use tokio::{
    net::TcpStream,
    sync::{mpsc, watch},
};

use super::{
    errors::RuntimeResult,
    launch::devices::Rule,
    stats::{Depth, Reading},
};
use berth_proto::cri;
use berth_shim::plan::{ExecPlan, Exit, ExitEvent, Hello, LaunchPlan, NamespacePlan, Reply, ShimRequest};

/// Connection to a pod's shim.
#[async_trait]
pub trait Shim: Send + Sync {
    /// Sends a request with file descriptors, and waits for the reply until the timeout `limit`.
    ///
    /// # Errors
    /// The shim reports a failure, no reply arrives in time, or the connection is lost.
    async fn request(
        &self,
        request: ShimRequest,
        files: Vec<OwnedFd>,
        limit: Duration,
    ) -> RuntimeResult<(Reply, Vec<OwnedFd>)>;
}

/// A connected shim and its events.
pub struct ShimSession {
    /// Sends requests.
    pub shim: Arc<dyn Shim>,
    /// Process exits; the shim repeats them until they are acknowledged. Closes when the connection is lost.
    pub events: mpsc::Receiver<ExitEvent>,
}

/// Starts shims and connects to running ones.
#[async_trait]
pub trait Shims: Send + Sync {
    /// Starts the shim of a sandbox in these cgroups.
    ///
    /// # Errors
    /// The shim does not start or does not accept a connection.
    async fn spawn(&self, sandbox: &str, groups: &[PathBuf]) -> RuntimeResult<ShimSession>;

    /// Connects to the running shim of a sandbox.
    ///
    /// # Errors
    /// The shim does not respond.
    async fn find(&self, sandbox: &str) -> RuntimeResult<(ShimSession, Hello)>;

    /// The exit that a shim recorded for a container in its directory. Blocking: reads one small file.
    fn exit_record(&self, folder: &Path, container: &str) -> Option<Exit>;
}

/// An image, as containers need it.
#[derive(Clone, PartialEq, Eq, Debug, Default)]
pub struct Image {
    /// Image id, `sha256:…`.
    pub id: String,
    /// Full names with tags, sorted.
    pub tags: Vec<String>,
    /// Full names with digests, sorted.
    pub digests: Vec<String>,
    /// `StopSignal` of the image; empty: not specified.
    pub stop_signal: String,
}

/// Image service: CRI requests, and layers for containers.
#[async_trait]
pub trait Images: Send + Sync {
    /// Finds an image by name or id; `None` where it is not present.
    ///
    /// # Errors
    /// Several image ids begin with the text.
    async fn resolve(&self, name: &str) -> RuntimeResult<Option<Arc<Image>>>;

    /// Pins an image's layers for a container until [`Images::release`].
    async fn pin(&self, image: &str, container: &str) -> RuntimeResult<()>;

    /// Releases the image and the writable layer of a container.
    async fn release(&self, image: &str, container: &str);

    /// Releases the images of all containers except these.
    async fn release_others(&self, containers: &BTreeSet<String>);

    /// `ListImages`.
    async fn list(&self, filter: Option<cri::ImageFilter>) -> RuntimeResult<Vec<cri::Image>>;

    /// `ImageStatus`.
    async fn status(&self, request: cri::ImageStatusRequest) -> RuntimeResult<cri::ImageStatusResponse>;

    /// `PullImage`: returns the image id.
    async fn pull(&self, request: cri::PullImageRequest) -> RuntimeResult<String>;

    /// `RemoveImage`.
    async fn remove(&self, name: &str) -> RuntimeResult<()>;

    /// Bytes and inodes of a container's writable layer. Counts them on each call, so the duration grows with the size.
    async fn written(&self, container: &str) -> RuntimeResult<(u64, u64)>;

    /// `ImageFsInfo`.
    async fn file_systems(&self) -> RuntimeResult<cri::ImageFsInfoResponse>;
}

/// Inputs for planning a container.
#[derive(Clone, Debug)]
pub struct ContainerPlanRequest {
    /// Container id.
    pub id: String,
    /// Sandbox id.
    pub sandbox: String,
    /// CRI configuration of the sandbox.
    pub pod: Arc<cri::PodSandboxConfig>,
    /// CRI configuration of the container.
    pub config: Arc<cri::ContainerConfig>,
    /// Image id.
    pub image: String,
    /// Container whose PID namespace is shared, if the request names one.
    pub target: Option<TargetContainer>,
}

/// Container whose PID namespace another container shares.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct TargetContainer {
    /// Container id.
    pub id: String,
    /// Sandbox id.
    pub sandbox: String,
    /// State as CRI spells it.
    pub state: String,
    /// Process id of its first process, while it runs.
    pub pid: Option<u32>,
}

/// Result of [`Planner::container`]: a validated launch plan, without its cgroups.
#[derive(Clone, PartialEq, Debug)]
pub struct PlannedContainer {
    /// Plan that the shim executes; the start fills in its cgroups.
    pub plan: LaunchPlan,
    /// User, primary group, and all groups.
    pub user: (u32, u32, Vec<u32>),
    /// Device cgroup rules.
    pub devices: Vec<Rule>,
    /// Ids of the image volumes' images, by path in the container.
    pub mounted: BTreeMap<String, String>,
}

/// Builds the plans that shims execute.
#[async_trait]
pub trait Planner: Send + Sync {
    /// Plans the namespaces of a sandbox, and validates the request.
    ///
    /// # Errors
    /// The request is invalid or unsupported.
    fn namespaces(&self, pod: &cri::PodSandboxConfig) -> RuntimeResult<NamespacePlan>;

    /// Plans a container, and validates the request.
    ///
    /// # Errors
    /// The request is invalid or unsupported, or a resource it names cannot be resolved.
    async fn container(&self, ask: ContainerPlanRequest) -> RuntimeResult<PlannedContainer>;

    /// Plans an exec process of a container.
    ///
    /// # Errors
    /// The request is invalid.
    fn exec(&self, container: &LaunchPlan, exec: &str, args: &[String], terminal: bool) -> RuntimeResult<ExecPlan>;
}

/// A pod, as the network needs it.
#[derive(Clone, Debug)]
pub struct NetworkPod {
    /// Sandbox id.
    pub id: String,
    /// CRI configuration of the sandbox.
    pub config: Arc<cri::PodSandboxConfig>,
    /// [`AttachedNetwork::persisted`] of the pod's setup; null before it.
    pub persisted: serde_json::Value,
}

/// Network of a pod after its setup.
#[derive(Clone, PartialEq, Debug, Default)]
pub struct AttachedNetwork {
    /// Path of the network namespace file.
    pub netns: PathBuf,
    /// Pod addresses, the primary one first.
    pub ips: Vec<String>,
    /// Data for the teardown, stored with the sandbox.
    pub persisted: serde_json::Value,
}

/// Sets up, checks, and tears down the network of a pod.
#[async_trait]
pub trait PodNetworkProvider: Send + Sync {
    /// Sets up the network of a pod in its network namespace.
    ///
    /// # Errors
    /// The setup fails; it is rolled back.
    async fn attach(&self, pod: NetworkPod, namespace: Option<OwnedFd>) -> RuntimeResult<AttachedNetwork>;

    /// Tears down a pod's network; a missing network is success.
    ///
    /// # Errors
    /// The teardown fails; a retry continues with what remains.
    async fn detach(&self, pod: NetworkPod) -> RuntimeResult<()>;

    /// Recovers the networks after a start. `pods` are all pods of this boot that have a network: removes everything
    /// that belongs to none of them. Returns the ids of sandboxes whose network is lost.
    ///
    /// # Errors
    /// A kernel request fails.
    async fn recover(&self, pods: Vec<NetworkPod>) -> RuntimeResult<Vec<String>>;

    /// The ids of sandboxes whose network is lost.
    ///
    /// # Errors
    /// A kernel request fails.
    async fn lost(&self, pods: Vec<NetworkPod>) -> RuntimeResult<Vec<String>>;

    /// Changes whenever a pod may have lost its network.
    fn disturbances(&self) -> watch::Receiver<u64>;

    /// The reason why the network is not ready; `None` if it is.
    async fn readiness_error(&self) -> Option<String>;

    /// A limitation of an otherwise working network, for the node condition.
    async fn warning(&self) -> Option<String>;

    /// Error of the last CNI configuration load; `OK` if it is usable.
    fn last_cni_load(&self) -> String;

    /// Sets the node's pod CIDRs.
    ///
    /// # Errors
    /// A CIDR is malformed, or the network cannot be set up for it.
    async fn set_ranges(&self, ranges: &str) -> RuntimeResult<()>;

    /// Connects to a port on a pod's loopback, by its network namespace file; on the host if the pod has none.
    ///
    /// # Errors
    /// The connection fails.
    async fn dial(&self, netns: Option<&Path>, sandbox: &str, port: u16) -> RuntimeResult<TcpStream>;
}

/// Cgroups of sandboxes and containers. Every call blocks.
pub trait Groups: Send + Sync {
    /// Path of the cgroup for this id below its pod's cgroup (spec 09a §9.1).
    ///
    /// # Errors
    /// The parent is not a valid cgroup.
    fn name(&self, parent: &str, id: &str) -> RuntimeResult<String>;

    /// Finds cgroups by id, anywhere in the hierarchy.
    ///
    /// # Errors
    /// The cgroups cannot be listed.
    fn find(&self, id: &str) -> RuntimeResult<Vec<String>>;

    /// Creates a cgroup with limits. Returns its directories, one per hierarchy.
    ///
    /// # Errors
    /// The creation fails or a limit cannot be set; it is rolled back.
    fn create(&self, group: &str, limits: &CgroupLimits) -> RuntimeResult<Vec<PathBuf>>;

    /// Releases what keeps an empty cgroup alive: its process runs in it now, or never will.
    fn settle(&self, _group: &str) {}

    /// Sets the device rules of a cgroup.
    ///
    /// # Errors
    /// The kernel rejects them.
    fn allow_devices(&self, group: &str, rules: &[Rule]) -> RuntimeResult<()>;

    /// Sets limits, all or none.
    ///
    /// # Errors
    /// A limit cannot be set; the previous ones remain in force.
    fn limit(&self, group: &str, limits: &CgroupLimits) -> RuntimeResult<()>;

    /// Kills all processes in the cgroup and removes it; a missing cgroup is success.
    ///
    /// # Errors
    /// A process survives, or the removal fails.
    fn remove(&self, group: &str) -> RuntimeResult<()>;

    /// Resource usage of a cgroup; unreadable values are absent.
    fn read(&self, group: &str, depth: Depth) -> Reading;

    /// Process IDs in a cgroup; none if they cannot be read.
    fn processes(&self, group: &str) -> Vec<u32>;

    /// Whether the kernel reports pressure stall information (PSI) per cgroup.
    fn has_pressure_stats(&self) -> bool;
}

/// Resource limits of a cgroup.
#[derive(Clone, PartialEq, Debug)]
pub enum CgroupLimits {
    /// The minimum share, for a pod's infrastructure processes.
    Smallest,
    /// Resources of a container's configuration.
    Container(Option<cri::LinuxContainerResources>),
}

/// All ports of the runtime.
#[derive(Clone)]
pub struct Ports {
    /// Starts shims and connects to them.
    pub shims: Arc<dyn Shims>,
    /// Image service.
    pub images: Arc<dyn Images>,
    /// Builds launch plans.
    pub planner: Arc<dyn Planner>,
    /// Sets up, checks, and tears down the network of a pod.
    pub network: Arc<dyn PodNetworkProvider>,
    /// Cgroups.
    pub groups: Arc<dyn Groups>,
}
