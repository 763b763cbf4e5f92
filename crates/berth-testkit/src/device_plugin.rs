//! Sample device plugin on a real Unix socket, with recorded calls and fault injection.
//!
//! Serves `v1beta1.DevicePlugin` and registers with the agent, by `kubelet.sock` or by the plugin watcher. As the
//! contract demands, each `ListAndWatch` stream starts with the current devices. Spec 06c §1.

use std::{
    fs, iter,
    path::{self, Path, PathBuf},
    sync::Arc,
};

use futures::{StreamExt, stream, stream::BoxStream};
use hyper_util::rt::TokioIo;
use tokio::{net::UnixStream, sync::watch};
use tokio_stream::wrappers::WatchStream;
use tonic::{
    Request, Response, Status,
    service::Routes,
    transport::{Channel, Endpoint},
};

use berth_proto::device_plugin::{
    AllocateRequest, AllocateResponse, ContainerAllocateRequest, ContainerAllocateResponse,
    ContainerPreferredAllocationRequest, ContainerPreferredAllocationResponse, Device, DevicePluginOptions, DeviceSpec,
    Empty, ListAndWatchResponse, NumaNode, PreStartContainerRequest, PreStartContainerResponse,
    PreferredAllocationRequest, PreferredAllocationResponse, RegisterRequest, TopologyInfo,
    device_plugin_server::{DevicePlugin, DevicePluginServer},
    registration_client::RegistrationClient,
};

use crate::{
    csi::{Plugin, RegistrationBehavior},
    plugin_server::{PluginFault, PluginServer, ServiceScript},
};

/// Version of the device plugin API.
pub const VERSION: &str = "v1beta1";

/// Method of `v1beta1.DevicePlugin`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
#[allow(missing_docs, reason = "named as in the API")]
pub enum PluginMethod {
    GetDevicePluginOptions,
    ListAndWatch,
    GetPreferredAllocation,
    Allocate,
    PreStartContainer,
}

/// Recorded call with its request; recorded on arrival, so hanging and failing calls are included.
#[derive(Clone, Debug, PartialEq)]
#[allow(missing_docs, reason = "named as in the API")]
pub enum PluginCall {
    GetDevicePluginOptions,
    ListAndWatch,
    GetPreferredAllocation(PreferredAllocationRequest),
    Allocate(AllocateRequest),
    PreStartContainer(PreStartContainerRequest),
}

impl PluginCall {
    /// Method without the request, for counting and faults.
    pub fn method(&self) -> PluginMethod {
        match self {
            Self::GetDevicePluginOptions => PluginMethod::GetDevicePluginOptions,
            Self::ListAndWatch => PluginMethod::ListAndWatch,
            Self::GetPreferredAllocation(_) => PluginMethod::GetPreferredAllocation,
            Self::Allocate(_) => PluginMethod::Allocate,
            Self::PreStartContainer(_) => PluginMethod::PreStartContainer,
        }
    }
}

/// Function from the device IDs of a container to its `Allocate` response.
pub type AllocateResponder = Arc<dyn Fn(&[String]) -> ContainerAllocateResponse + Send + Sync>;

/// Answers of a plugin; changeable while it runs.
#[derive(Clone)]
pub struct PluginBehavior {
    /// Answer of `GetDevicePluginOptions`, and options of the registration request.
    pub options: DevicePluginOptions,
    /// Builds the `Allocate` response of a container; [`default_response`] at first.
    pub allocate: AllocateResponder,
    /// Number of container responses to `Allocate`; `None` is one per container request.
    pub container_responses: Option<usize>,
    /// Answer of `GetPreferredAllocation`; `None` prefers the devices that must be included, then the first available.
    pub preferred: Option<Vec<String>>,
    /// Number of additional messages, all with the current devices, at the start of each `ListAndWatch` stream.
    pub flood: usize,
}

/// Healthy device without topology.
pub fn healthy(id: &str) -> Device {
    Device { id: id.to_owned(), health: "Healthy".to_owned(), topology: None }
}

/// Unhealthy device without topology.
pub fn unhealthy(id: &str) -> Device {
    Device { health: "Unhealthy".to_owned(), ..healthy(id) }
}

/// Healthy device on a NUMA node.
pub fn on_node(id: &str, node: i64) -> Device {
    Device { topology: Some(TopologyInfo { nodes: vec![NumaNode { id: node }] }), ..healthy(id) }
}

/// Healthy devices `dev0`, `dev1`, …: long lists for size limits.
pub fn numbered(count: usize) -> Vec<Device> {
    (0..count).map(|number| healthy(&format!("dev{number}"))).collect()
}

/// Name of the environment variable with the allocated IDs: `EXAMPLE_COM_GPU_DEVICES` for `example.com/gpu`.
pub fn devices_variable(resource: &str) -> String {
    let name = resource.to_ascii_uppercase().replace(|c: char| !c.is_ascii_alphanumeric(), "_");
    format!("{name}_DEVICES")
}

/// Response with the comma-separated IDs in [`devices_variable`], and `/dev/<id>` as a clone of `/dev/null` per device.
pub fn default_response(resource: &str, ids: &[String]) -> ContainerAllocateResponse {
    let device = |id: &String| DeviceSpec {
        container_path: format!("/dev/{id}"),
        host_path: "/dev/null".to_owned(),
        permissions: "rw".to_owned(),
    };
    ContainerAllocateResponse {
        envs: [(devices_variable(resource), ids.join(","))].into(),
        devices: ids.iter().map(device).collect(),
        ..Default::default()
    }
}

/// State that the gRPC service and the test share.
struct PluginContext {
    script: ServiceScript<PluginMethod, PluginCall, PluginBehavior>,
    devices: watch::Sender<Vec<Device>>,
}

/// Running device plugin; drop loses its connections and removes its socket.
pub struct SamplePlugin {
    context: Arc<PluginContext>,
    /// Path of the plugin socket.
    pub socket: PathBuf,
    /// Resource name, such as `example.com/gpu`.
    pub resource: String,
    server: PluginServer,
}

impl SamplePlugin {
    /// Starts a plugin without devices that serves on `<directory>/<socket_name>`.
    ///
    /// # Panics
    /// The socket cannot be created.
    pub fn start(directory: &Path, socket_name: &str, resource: &str, options: DevicePluginOptions) -> Self {
        fs::create_dir_all(directory).expect("failed to create directory");
        let name = resource.to_owned();
        let behavior = PluginBehavior {
            options,
            allocate: Arc::new(move |ids: &[String]| default_response(&name, ids)),
            container_responses: None,
            preferred: None,
            flood: 0,
        };
        let context =
            Arc::new(PluginContext { script: ServiceScript::new(behavior), devices: watch::Sender::default() });
        let socket = directory.join(socket_name);
        let server = PluginServer::default();
        let mut plugin = Self { context, socket, resource: resource.to_owned(), server };
        plugin.restart();
        plugin
    }

    /// Stops serving if necessary, and serves on a new socket at the same path. Devices, behavior, and calls persist.
    ///
    /// # Panics
    /// The socket cannot be created.
    pub fn restart(&mut self) {
        let routes = Routes::new(DevicePluginServer::from_arc(self.context.clone()));
        self.server.start(&self.socket, routes);
    }

    /// Removes the socket and loses all connections, as the end of the plugin's process does. Idempotent.
    pub fn stop(&mut self) {
        self.server.stop();
    }

    /// Registers with the agent.
    pub async fn register(&self, kubelet_socket: &Path) -> Result<(), Status> {
        let endpoint = self.socket.file_name().unwrap_or_default().to_string_lossy();
        self.register_as(kubelet_socket, VERSION, &endpoint, &self.resource).await
    }

    /// Registers with the agent under other names, which may be invalid.
    pub async fn register_as(
        &self,
        kubelet_socket: &Path,
        version: &str,
        endpoint: &str,
        resource: &str,
    ) -> Result<(), Status> {
        let request = RegisterRequest {
            version: version.to_owned(),
            endpoint: endpoint.to_owned(),
            resource_name: resource.to_owned(),
            options: Some(self.context.script.behavior().options),
        };
        let mut client = RegistrationClient::new(connect(kubelet_socket).await?);
        client.register(request).await.map(drop)
    }

    /// Serves a registration socket for the plugin watcher: `<registry_dir>/<socket stem>-reg.sock`.
    ///
    /// The returned plugin records the calls; drop removes that socket. Must be called within a tokio runtime.
    pub fn serve_registration(&self, registry_dir: &Path) -> Plugin {
        let stem = self.socket.file_stem().unwrap_or_default().to_string_lossy();
        let socket = registry_dir.join(format!("{stem}-reg.sock"));
        let endpoint = path::absolute(&self.socket).expect("failed to make the path absolute").display().to_string();
        Plugin::start(&socket, "DevicePlugin", &self.resource, endpoint, &[VERSION], RegistrationBehavior::Good)
    }

    /// Replaces the devices; open `ListAndWatch` streams send the new list. Lists in quick succession coalesce.
    pub fn set_devices(&self, devices: Vec<Device>) {
        self.context.devices.send_replace(devices);
    }

    /// Ends the open `ListAndWatch` streams without an error; the plugin still serves.
    pub fn end_streams(&self) {
        self.context.script.end_streams();
    }

    /// Changes answers.
    pub fn change_behavior(&self, change: impl FnOnce(&mut PluginBehavior)) {
        self.context.script.change_behavior(change);
    }

    /// Injects a fault into all later calls of a method until [`SamplePlugin::heal`].
    pub fn fail(&self, method: PluginMethod, fault: PluginFault) {
        self.context.script.fail(method, fault);
    }

    /// Removes all faults; hanging calls continue.
    pub fn heal(&self) {
        self.context.script.heal();
    }

    /// All recorded calls, in order of arrival.
    pub fn calls(&self) -> Vec<PluginCall> {
        self.context.script.calls()
    }

    /// Waits until a method has been called at least `count` times since the start; returns its calls.
    ///
    /// # Panics
    /// There are fewer calls after 60 seconds.
    pub async fn wait_for_calls(&self, method: PluginMethod, count: usize) -> Vec<PluginCall> {
        self.context.script.wait_for_calls(method, count).await
    }
}

async fn connect(socket: &Path) -> Result<Channel, Status> {
    let socket = socket.to_owned();
    let connector = tower::service_fn(move |_: http::Uri| {
        let socket = socket.clone();
        async move { UnixStream::connect(socket).await.map(TokioIo::new) }
    });
    let channel = Endpoint::from_static("http://localhost").connect_with_connector(connector).await;
    channel.map_err(|error| Status::from_error(Box::new(error)))
}

impl PluginContext {
    async fn enter(&self, call: PluginCall) -> Result<PluginBehavior, Status> {
        self.script.enter(call.method(), call).await
    }
}

/// Devices that must be included, then the first available ones.
fn default_preference(request: ContainerPreferredAllocationRequest) -> Vec<String> {
    let mut ids = request.must_include_device_i_ds;
    let others = request.available_device_i_ds.into_iter().filter(|id| !ids.contains(id)).collect::<Vec<_>>();
    ids.extend(others);
    ids.truncate(usize::try_from(request.allocation_size).unwrap_or_default());
    ids
}

#[tonic::async_trait]
impl DevicePlugin for PluginContext {
    type ListAndWatchStream = BoxStream<'static, Result<ListAndWatchResponse, Status>>;

    async fn get_device_plugin_options(&self, _: Request<Empty>) -> Result<Response<DevicePluginOptions>, Status> {
        let behavior = self.enter(PluginCall::GetDevicePluginOptions).await?;
        Ok(Response::new(behavior.options))
    }

    async fn list_and_watch(&self, _: Request<Empty>) -> Result<Response<Self::ListAndWatchStream>, Status> {
        // Subscribes first: a test that observes the call may end the streams at once.
        let end = self.script.stream_end();
        let behavior = self.enter(PluginCall::ListAndWatch).await?;
        let current = self.devices.borrow().clone();
        let flood = stream::iter(iter::repeat_n(current, behavior.flood));
        let lists = flood.chain(WatchStream::new(self.devices.subscribe()));
        let messages = lists.take_until(end).map(|devices| Ok(ListAndWatchResponse { devices }));
        Ok(Response::new(messages.boxed()))
    }

    async fn get_preferred_allocation(
        &self,
        request: Request<PreferredAllocationRequest>,
    ) -> Result<Response<PreferredAllocationResponse>, Status> {
        let request = request.into_inner();
        let behavior = self.enter(PluginCall::GetPreferredAllocation(request.clone())).await?;
        let answer = |container| ContainerPreferredAllocationResponse {
            device_i_ds: behavior.preferred.clone().unwrap_or_else(|| default_preference(container)),
        };
        let container_responses = request.container_requests.into_iter().map(answer).collect();
        Ok(Response::new(PreferredAllocationResponse { container_responses }))
    }

    async fn allocate(&self, request: Request<AllocateRequest>) -> Result<Response<AllocateResponse>, Status> {
        let request = request.into_inner();
        let behavior = self.enter(PluginCall::Allocate(request.clone())).await?;
        let answer = |container: &ContainerAllocateRequest| (behavior.allocate)(&container.devices_ids);
        let mut container_responses: Vec<_> = request.container_requests.iter().map(answer).collect();
        if let Some(count) = behavior.container_responses {
            let last = container_responses.last().cloned().unwrap_or_default();
            container_responses.resize(count, last);
        }
        Ok(Response::new(AllocateResponse { container_responses }))
    }

    async fn pre_start_container(
        &self,
        request: Request<PreStartContainerRequest>,
    ) -> Result<Response<PreStartContainerResponse>, Status> {
        self.enter(PluginCall::PreStartContainer(request.into_inner())).await?;
        Ok(Response::new(PreStartContainerResponse {}))
    }
}
