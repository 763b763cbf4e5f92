//! Creates the CRI clients from configuration. Connections are lazy: nothing here calls the runtime.

use std::{
    io,
    path::{Path, PathBuf},
    sync::Arc,
    time::Duration,
};

use futures::future::BoxFuture;
use tokio::io::DuplexStream;
use tonic::transport::Channel;

use super::{
    client::RuntimeClient,
    connector::{memory_channel, socket_channel},
    deadlines::Caller,
    endpoint::EndpointError,
    endpoint::socket_path,
    image_client::ImageClient,
};
use berth_metrics::{Registry, RuntimeOperations};

/// Settings of the CRI client.
#[derive(Clone, Debug)]
pub struct CriConfig {
    /// `containerRuntimeEndpoint`.
    pub endpoint: String,
    /// `imageServiceEndpoint`; empty for the same as `endpoint`.
    pub image_endpoint: String,
    /// `runtimeRequestTimeout`: T of spec 03a §2.2.
    pub request_timeout: Duration,
    /// Feature gate `CRIListStreaming`.
    pub list_streaming: bool,
}

/// Dials services in this process.
pub type Dial = Arc<dyn Fn() -> BoxFuture<'static, io::Result<DuplexStream>> + Send + Sync>;

/// Address of a CRI service.
#[derive(Clone)]
pub(super) struct ServiceAddress {
    /// Configured endpoint, for error texts.
    pub(super) endpoint: String,
    way: Transport,
}

#[derive(Clone)]
enum Transport {
    Socket(PathBuf),
    Memory(Dial),
}

impl ServiceAddress {
    /// Socket path; `None` for services in this process.
    pub(super) fn socket(&self) -> Option<&Path> {
        match &self.way {
            Transport::Socket(path) => Some(path),
            Transport::Memory(_) => None,
        }
    }

    fn channel(&self) -> Channel {
        match &self.way {
            Transport::Socket(path) => socket_channel(path.clone()),
            Transport::Memory(dial) => memory_channel(dial.clone()),
        }
    }

    fn runtime(&self, caller: Caller, list_streaming: bool) -> Arc<RuntimeClient> {
        Arc::new(RuntimeClient::new(self.channel(), caller, list_streaming))
    }
}

/// The two CRI clients, each with its own channel.
#[derive(Clone)]
pub struct CriClients {
    /// Client for sandboxes and containers.
    pub runtime: Arc<RuntimeClient>,
    /// Client for images.
    pub images: Arc<ImageClient>,
    pub(super) runtime_place: ServiceAddress,
    pub(super) image_place: ServiceAddress,
}

/// Creates the clients, and registers the metrics of runtime operations.
///
/// # Errors
/// If an endpoint is not a Unix socket.
pub fn connect(config: &CriConfig, registry: &Registry) -> Result<CriClients, EndpointError> {
    let place = |endpoint: &str| -> Result<ServiceAddress, EndpointError> {
        Ok(ServiceAddress { endpoint: endpoint.to_owned(), way: Transport::Socket(socket_path(endpoint)?) })
    };
    let runtime_place = place(&config.endpoint)?;
    let image_place = place(if config.image_endpoint.is_empty() { &config.endpoint } else { &config.image_endpoint })?;
    Ok(between(runtime_place, image_place, config, registry))
}

/// Creates the clients for services in this process, and registers the metrics of runtime operations.
pub fn connect_over(dial: Dial, config: &CriConfig, registry: &Registry) -> CriClients {
    let place = ServiceAddress { endpoint: config.endpoint.clone(), way: Transport::Memory(dial) };
    between(place.clone(), place, config, registry)
}

fn between(
    runtime_place: ServiceAddress,
    image_place: ServiceAddress,
    config: &CriConfig,
    registry: &Registry,
) -> CriClients {
    let caller = Caller { timeout: config.request_timeout, metrics: Arc::new(RuntimeOperations::new(registry)) };
    CriClients {
        runtime: runtime_place.runtime(caller.clone(), config.list_streaming),
        images: Arc::new(ImageClient::new(image_place.channel(), caller, config.list_streaming)),
        runtime_place,
        image_place,
    }
}

impl CriClients {
    /// Another channel to the runtime's socket, for services besides the CRI (containerd's events). Connects on first
    /// use, and reconnects when needed.
    pub fn runtime_channel(&self) -> Channel {
        self.runtime_place.channel()
    }
}
