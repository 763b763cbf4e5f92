//! What the services ask of the parts that touch the machine; each has a fake that keeps the contract.

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
use berth_shim::plan::{Event, ExecPlan, Exit, Hello, LaunchPlan, NamespacePlan, Reply, Request};

/// A pod's shim, connected.
#[async_trait]
pub trait Shim: Send + Sync {
    /// Asks, with descriptors beside the question, and waits for the answer at most so long.
    ///
    /// # Errors
    /// A failure the shim tells, no answer in time, or no shim any more.
    async fn ask(&self, request: Request, files: Vec<OwnedFd>, limit: Duration)
    -> RuntimeResult<(Reply, Vec<OwnedFd>)>;
}

/// A shim and what it tells. The channel closes when the shim is gone.
pub struct Connected {
    /// To ask.
    pub shim: Arc<dyn Shim>,
    /// Ends of processes; told again until acknowledged.
    pub events: mpsc::Receiver<Event>,
}

/// Starts shims, and finds those that run.
#[async_trait]
pub trait Shims: Send + Sync {
    /// Starts the shim of a sandbox, in these control groups.
    ///
    /// # Errors
    /// It does not come up.
    async fn spawn(&self, sandbox: &str, groups: &[PathBuf]) -> RuntimeResult<Connected>;

    /// Connects to the shim of a sandbox.
    ///
    /// # Errors
    /// It does not answer.
    async fn find(&self, sandbox: &str) -> RuntimeResult<(Connected, Hello)>;

    /// How a container ended, as its shim noted it in its folder before it went. Blocks, on one small file.
    fn noted(&self, folder: &Path, container: &str) -> Option<Exit>;
}

/// An image as containers need it.
#[derive(Clone, PartialEq, Eq, Debug, Default)]
pub struct Image {
    /// `sha256:…`
    pub id: String,
    /// Whole names with tags, sorted.
    pub tags: Vec<String>,
    /// Whole names with digests, sorted.
    pub digests: Vec<String>,
    /// The signal its containers are asked to stop with, as the image says it; empty: it does not.
    pub stop_signal: String,
}

/// Images: what the CRI asks of them, and what containers need.
#[async_trait]
pub trait Images: Send + Sync {
    /// The image that a name or identity stands for; `None` where it is not here.
    ///
    /// # Errors
    /// Several identities begin with that.
    async fn resolve(&self, name: &str) -> RuntimeResult<Option<Arc<Image>>>;

    /// Keeps an image's layers for a container, until [`Images::release`].
    async fn hold(&self, image: &str, container: &str) -> RuntimeResult<()>;

    /// A container does not need its image any more.
    async fn release(&self, image: &str, container: &str);

    /// Only these containers need images.
    async fn release_others(&self, containers: &BTreeSet<String>);

    /// `ListImages`.
    async fn list(&self, filter: Option<cri::ImageFilter>) -> RuntimeResult<Vec<cri::Image>>;

    /// `ImageStatus`.
    async fn status(&self, request: cri::ImageStatusRequest) -> RuntimeResult<cri::ImageStatusResponse>;

    /// `PullImage`: the image's identity.
    async fn pull(&self, request: cri::PullImageRequest) -> RuntimeResult<String>;

    /// `RemoveImage`.
    async fn remove(&self, name: &str) -> RuntimeResult<()>;

    /// Bytes and inodes a container wrote, counted now; takes as long as there is much.
    async fn written(&self, container: &str) -> RuntimeResult<(u64, u64)>;

    /// `ImageFsInfo`.
    async fn file_systems(&self) -> RuntimeResult<cri::ImageFsInfoResponse>;
}

/// What a container is planned from.
#[derive(Clone, Debug)]
pub struct ContainerAsk {
    /// Its identity.
    pub id: String,
    /// Its sandbox's.
    pub sandbox: String,
    /// The sandbox's configuration.
    pub pod: Arc<cri::PodSandboxConfig>,
    /// The request's configuration.
    pub config: Arc<cri::ContainerConfig>,
    /// The image's identity.
    pub image: String,
    /// The container whose processes it wants to see, where it names one.
    pub target: Option<TargetContainer>,
}

/// A container whose processes another wants to see.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct TargetContainer {
    /// Its identity.
    pub id: String,
    /// Its sandbox's.
    pub sandbox: String,
    /// Its state, as the CRI spells it.
    pub state: String,
    /// Its first process, while it runs.
    pub pid: Option<u32>,
}

/// A container that was planned.
#[derive(Clone, PartialEq, Debug)]
pub struct Planned {
    /// What the shim carries out; its control groups are filled in when it is started.
    pub plan: LaunchPlan,
    /// User, primary group, all groups.
    pub user: (u32, u32, Vec<u32>),
    /// What it may do with devices.
    pub devices: Vec<Rule>,
    /// Identities of the images that are mounted into it, by path.
    pub mounted: BTreeMap<String, String>,
}

/// Decides what shims carry out.
#[async_trait]
pub trait Planner: Send + Sync {
    /// A sandbox's namespaces; refuses what cannot be.
    ///
    /// # Errors
    /// The refusal.
    fn namespaces(&self, pod: &cri::PodSandboxConfig) -> RuntimeResult<NamespacePlan>;

    /// A container; refuses what cannot be.
    ///
    /// # Errors
    /// The refusal.
    async fn container(&self, ask: ContainerAsk) -> RuntimeResult<Planned>;

    /// Another process of a container.
    ///
    /// # Errors
    /// The refusal.
    fn exec(&self, container: &LaunchPlan, exec: &str, args: &[String], terminal: bool) -> RuntimeResult<ExecPlan>;
}

/// A pod, as its network is told of it.
#[derive(Clone, Debug)]
pub struct NetworkPod {
    /// The sandbox.
    pub id: String,
    /// Its configuration.
    pub config: Arc<cri::PodSandboxConfig>,
    /// What [`Attached::kept`] said when it was attached.
    pub kept: serde_json::Value,
}

/// A pod's network, set up.
#[derive(Clone, PartialEq, Debug, Default)]
pub struct Attached {
    /// The namespace's file.
    pub netns: PathBuf,
    /// Addresses, the main one first.
    pub ips: Vec<String>,
    /// What taking it down needs to know; kept with the sandbox.
    pub kept: serde_json::Value,
}

/// Networks of pods.
#[async_trait]
pub trait Network: Send + Sync {
    /// Connects a pod whose network namespace this is.
    ///
    /// # Errors
    /// Nothing is left of the attempt.
    async fn attach(&self, pod: NetworkPod, namespace: Option<OwnedFd>) -> RuntimeResult<Attached>;

    /// Takes a pod off; nothing there is success.
    ///
    /// # Errors
    /// What is left can be attempted again.
    async fn detach(&self, pod: NetworkPod) -> RuntimeResult<()>;

    /// Takes over after a start: told all pods of this boot that have a network, removes what belongs to none of them. Tells
    /// the sandboxes whose network is gone.
    ///
    /// # Errors
    /// What the kernel says.
    async fn recover(&self, pods: Vec<NetworkPod>) -> RuntimeResult<Vec<String>>;

    /// The sandboxes among these whose network is gone.
    ///
    /// # Errors
    /// What the kernel says.
    async fn lost(&self, pods: Vec<NetworkPod>) -> RuntimeResult<Vec<String>>;

    /// Changes whenever some network may be gone.
    fn disturbances(&self) -> watch::Receiver<u64>;

    /// Why pods cannot be connected; `None` where they can.
    async fn trouble(&self) -> Option<String>;

    /// What limits pods' networks although they work.
    async fn warning(&self) -> Option<String>;

    /// Why the configuration of plugins cannot be used; `OK` where it can.
    fn last_cni_load(&self) -> String;

    /// The node's range of addresses for pods.
    ///
    /// # Errors
    /// The ranges cannot be read.
    async fn set_ranges(&self, ranges: &str) -> RuntimeResult<()>;

    /// Connects to a port inside a pod, by the file that names its namespace; on the machine itself where it has none.
    ///
    /// # Errors
    /// What the pod's loopback said.
    async fn dial(&self, netns: Option<&Path>, sandbox: &str, port: u16) -> RuntimeResult<TcpStream>;
}

/// Control groups. Every call blocks.
pub trait Groups: Send + Sync {
    /// Where such a group lies below its pod's (spec 09a §9.1).
    ///
    /// # Errors
    /// The pod's group cannot be one.
    fn name(&self, parent: &str, id: &str) -> RuntimeResult<String>;

    /// Groups of that name, wherever they lie.
    ///
    /// # Errors
    /// They cannot be listed.
    fn find(&self, id: &str) -> RuntimeResult<Vec<String>>;

    /// Makes a group with limits; its directories, one for each hierarchy.
    ///
    /// # Errors
    /// It cannot be made, or a limit cannot be set; nothing is left then.
    fn create(&self, group: &str, limits: &Limits) -> RuntimeResult<Vec<PathBuf>>;

    /// What the group was made for runs in it, or never will: nothing is needed any more to keep it.
    fn settle(&self, _group: &str) {}

    /// Decides what processes of the group may do with devices.
    ///
    /// # Errors
    /// The kernel refuses.
    fn allow_devices(&self, group: &str, rules: &[Rule]) -> RuntimeResult<()>;

    /// Sets limits; all of them or none.
    ///
    /// # Errors
    /// One cannot be set; the old ones are in force.
    fn limit(&self, group: &str, limits: &Limits) -> RuntimeResult<()>;

    /// Kills what is in the group and removes it; nothing there is success.
    ///
    /// # Errors
    /// Something survives.
    fn remove(&self, group: &str) -> RuntimeResult<()>;

    /// What the group uses; what cannot be read is absent.
    fn read(&self, group: &str, depth: Depth) -> Reading;

    /// Whether the kernel tells how long groups waited.
    fn tells_pressure(&self) -> bool;
}

/// What a group is given.
#[derive(Clone, PartialEq, Debug)]
pub enum Limits {
    /// A pod's own processes: the smallest share.
    Smallest,
    /// What a container's configuration says.
    Container(Option<cri::LinuxContainerResources>),
}

/// The parts the services stand on.
#[derive(Clone)]
pub struct Ports {
    /// Starts shims.
    pub shims: Arc<dyn Shims>,
    /// Images.
    pub images: Arc<dyn Images>,
    /// Decides.
    pub planner: Arc<dyn Planner>,
    /// Networks.
    pub network: Arc<dyn Network>,
    /// Control groups.
    pub groups: Arc<dyn Groups>,
}
