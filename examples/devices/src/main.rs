//! Sample device plugin: offers one device node of this machine as devices of an extended resource.
//!
//! Serves `v1beta1.DevicePlugin` on a socket beside the agent's `kubelet.sock`, and registers there. At its start the
//! agent deletes all sockets of the directory and creates its own, so the plugin serves and registers again whenever
//! `kubelet.sock` is another one. Works with Berth and with kubelet, as a process and in a static pod: handles SIGTERM,
//! because the kernel ignores unhandled signals to the first process of a container.

#![forbid(unsafe_code)]

use std::{
    fs,
    os::unix::fs::MetadataExt,
    path::{Path, PathBuf},
    pin::Pin,
    sync::Arc,
    time::Duration,
};

use anyhow::{Context, Result};
use clap::Parser;
use tokio::{
    net::UnixListener,
    signal::unix::{SignalKind, signal},
    sync::watch,
    task::JoinSet,
    time::sleep,
};
use tokio_stream::{
    Stream, StreamExt,
    wrappers::{UnixListenerStream, WatchStream},
};
use tonic::{
    Request, Response, Status,
    transport::{Endpoint, Server},
};

use berth_proto::device_plugin::{
    AllocateRequest, AllocateResponse, ContainerAllocateRequest, ContainerAllocateResponse, Device,
    DevicePluginOptions, DeviceSpec, Empty, ListAndWatchResponse, PreStartContainerRequest, PreStartContainerResponse,
    PreferredAllocationRequest, PreferredAllocationResponse, RegisterRequest,
    device_plugin_server::{DevicePlugin, DevicePluginServer},
    registration_client::RegistrationClient,
};

/// Interval between checks of the registration socket and of the device node.
const POLL_INTERVAL: Duration = Duration::from_secs(1);
/// Timeout of the registration, during which the agent calls the plugin.
const REGISTRATION_TIMEOUT: Duration = Duration::from_secs(30);

/// Sample device plugin: offers a device node as devices of an extended resource
#[derive(Parser, Debug)]
#[command(name = "sample-device-plugin")]
struct Arguments {
    /// Name of the extended resource
    #[arg(long, value_name = "DOMAIN/NAME")]
    resource: String,
    /// Absolute path of the device node; containers have it at the same path
    #[arg(long, value_name = "PATH")]
    device: String,
    /// Number of devices: the node can be requested that many times
    #[arg(long, value_name = "NUMBER", default_value_t = 1)]
    count: u16,
    /// Directory of the registration socket kubelet.sock
    #[arg(long, value_name = "DIR", default_value = "/var/lib/kubelet/device-plugins")]
    directory: PathBuf,
}

#[tokio::main(flavor = "current_thread")]
async fn main() -> Result<()> {
    let (mut terminate, mut interrupt) = (signal(SignalKind::terminate())?, signal(SignalKind::interrupt())?);
    let arguments = Arguments::parse();
    let kubelet_socket = arguments.directory.join("kubelet.sock");
    let plugin = Arc::new(SamplePlugin::new(&arguments));
    let (mut server, mut registered_with, mut last_error) = (JoinSet::new(), None, String::new());
    loop {
        plugin.update_health();
        let current = socket_identity(&kubelet_socket);
        if current.is_some() && current != registered_with {
            match plugin.clone().start(&arguments.directory, &kubelet_socket, &mut server).await {
                Ok(()) => {
                    println!("registered {} devices of {}", arguments.count, arguments.resource);
                    registered_with = current;
                    last_error.clear();
                }
                Err(error) => {
                    let text = format!("{error:#}");
                    if text != last_error {
                        eprintln!("error: {text}; retrying");
                        last_error = text;
                    }
                }
            }
        }
        tokio::select! {
            () = sleep(POLL_INTERVAL) => {}
            _ = terminate.recv() => break,
            _ = interrupt.recv() => break,
        }
    }
    server.shutdown().await;
    let _ = fs::remove_file(arguments.directory.join(plugin.endpoint())); // absent if the plugin never served
    Ok(())
}

/// File system, inode, and change time of a socket; an inode number alone may be reused.
fn socket_identity(socket: &Path) -> Option<(u64, u64, i64, i64)> {
    let metadata = fs::symlink_metadata(socket).ok()?;
    Some((metadata.dev(), metadata.ino(), metadata.ctime(), metadata.ctime_nsec()))
}

/// Service of the plugin, with the devices that it currently reports.
struct SamplePlugin {
    resource: String,
    device: String,
    devices: watch::Sender<Vec<Device>>,
}

impl SamplePlugin {
    fn new(arguments: &Arguments) -> Self {
        let name = arguments.resource.rsplit('/').next().unwrap_or_default();
        let device = |index| Device { id: format!("{name}{index}"), ..Device::default() };
        let devices = watch::Sender::new((0..arguments.count).map(device).collect());
        Self { resource: arguments.resource.clone(), device: arguments.device.clone(), devices }
    }

    /// Name of the plugin's socket in the directory.
    fn endpoint(&self) -> String {
        format!("{}.sock", self.resource.replace('/', "_"))
    }

    /// Reports all devices as healthy while the device node exists; a change is sent to the agent.
    fn update_health(&self) {
        let health = if Path::new(&self.device).exists() { "Healthy" } else { "Unhealthy" };
        self.devices.send_if_modified(|devices| {
            let is_changed = devices.iter().any(|device| device.health != health);
            devices.iter_mut().for_each(|device| health.clone_into(&mut device.health));
            is_changed
        });
    }

    /// Serves on a new socket instead of the previous one, and registers it.
    async fn start(self: Arc<Self>, directory: &Path, kubelet_socket: &Path, server: &mut JoinSet<()>) -> Result<()> {
        server.shutdown().await;
        let endpoint = self.endpoint();
        let request = RegisterRequest {
            version: "v1beta1".to_owned(),
            endpoint: endpoint.clone(),
            resource_name: self.resource.clone(),
            options: Some(DevicePluginOptions::default()),
        };
        let socket = directory.join(endpoint);
        let _ = fs::remove_file(&socket); // exists if an earlier plugin or agent was killed
        let listener = UnixListener::bind(&socket).with_context(|| format!("cannot listen on {}", socket.display()))?;
        server.spawn(async move {
            let router = Server::builder().add_service(DevicePluginServer::from_arc(self));
            if let Err(error) = router.serve_with_incoming(UnixListenerStream::new(listener)).await {
                eprintln!("error: cannot serve: {error}");
            }
        });
        let agent = Endpoint::from_shared(format!("unix://{}", kubelet_socket.display()))?;
        let channel = agent.timeout(REGISTRATION_TIMEOUT).connect().await.context("cannot connect to kubelet.sock")?;
        RegistrationClient::new(channel).register(request).await.context("cannot register")?;
        Ok(())
    }

    /// The device node, and the allocated IDs in a variable: `EXAMPLE_COM_NULL_DEVICES` for `example.com/null`.
    fn container_response(&self, request: &ContainerAllocateRequest) -> ContainerAllocateResponse {
        let name = self.resource.to_ascii_uppercase().replace(|c: char| !c.is_ascii_alphanumeric(), "_");
        let node = DeviceSpec {
            container_path: self.device.clone(),
            host_path: self.device.clone(),
            permissions: "rw".to_owned(),
        };
        ContainerAllocateResponse {
            envs: [(format!("{name}_DEVICES"), request.devices_ids.join(","))].into(),
            devices: vec![node],
            ..ContainerAllocateResponse::default()
        }
    }
}

#[tonic::async_trait]
impl DevicePlugin for SamplePlugin {
    type ListAndWatchStream = Pin<Box<dyn Stream<Item = Result<ListAndWatchResponse, Status>> + Send>>;

    async fn get_device_plugin_options(&self, _: Request<Empty>) -> Result<Response<DevicePluginOptions>, Status> {
        Ok(Response::new(DevicePluginOptions::default()))
    }

    /// Sends the devices now and after each change; the stream stays open.
    async fn list_and_watch(&self, _: Request<Empty>) -> Result<Response<Self::ListAndWatchStream>, Status> {
        let lists = WatchStream::new(self.devices.subscribe());
        let messages: Self::ListAndWatchStream = Box::pin(lists.map(|devices| Ok(ListAndWatchResponse { devices })));
        Ok(Response::new(messages))
    }

    async fn allocate(&self, request: Request<AllocateRequest>) -> Result<Response<AllocateResponse>, Status> {
        let containers = request.into_inner().container_requests;
        let container_responses = containers.iter().map(|container| self.container_response(container)).collect();
        Ok(Response::new(AllocateResponse { container_responses }))
    }

    async fn get_preferred_allocation(
        &self,
        _: Request<PreferredAllocationRequest>,
    ) -> Result<Response<PreferredAllocationResponse>, Status> {
        Err(Status::unimplemented("not among the options of this plugin"))
    }

    async fn pre_start_container(
        &self,
        _: Request<PreStartContainerRequest>,
    ) -> Result<Response<PreStartContainerResponse>, Status> {
        Err(Status::unimplemented("not among the options of this plugin"))
    }
}
