//! From settings to the two clients. Connecting is lazy: nothing here talks to the runtime.

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
    connector::{memory_channel, memory_pipe, socket_channel, socket_pipe},
    deadlines::Caller,
    direct::Direct,
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
    /// Gate `CRIListStreaming`.
    pub list_streaming: bool,
}

/// Connects to services in this process.
pub type Dial = Arc<dyn Fn() -> BoxFuture<'static, io::Result<DuplexStream>> + Send + Sync>;

/// Where a service is reached.
#[derive(Clone)]
pub(super) struct Place {
    /// As the operator wrote it, for texts.
    pub(super) endpoint: String,
    way: Way,
}

#[derive(Clone)]
enum Way {
    Socket(PathBuf),
    Memory(Dial),
}

impl Place {
    /// The socket; `None` for services in this process.
    pub(super) fn socket(&self) -> Option<&Path> {
        match &self.way {
            Way::Socket(path) => Some(path),
            Way::Memory(_) => None,
        }
    }

    fn channel(&self) -> Channel {
        match &self.way {
            Way::Socket(path) => socket_channel(path.clone()),
            Way::Memory(dial) => memory_channel(dial.clone()),
        }
    }

    fn direct(&self) -> Direct {
        Direct::new(match &self.way {
            Way::Socket(path) => socket_pipe(path.clone()),
            Way::Memory(dial) => memory_pipe(dial.clone()),
        })
    }

    fn runtime(&self, caller: Caller, list_streaming: bool) -> Arc<RuntimeClient> {
        Arc::new(RuntimeClient::new(self.channel(), self.direct(), caller, list_streaming))
    }
}

/// The two clients, each on a channel of its own; commands in containers have another connection.
#[derive(Clone)]
pub struct Connection {
    /// Sandboxes and containers.
    pub runtime: Arc<RuntimeClient>,
    /// Images.
    pub images: Arc<ImageClient>,
    pub(super) runtime_place: Place,
    pub(super) image_place: Place,
    caller: Caller,
    list_streaming: bool,
}

/// Prepares the clients; registers the metrics of runtime operations.
///
/// # Errors
/// Endpoints that are no unix sockets.
pub fn connect(config: &CriConfig, registry: &Registry) -> Result<Connection, EndpointError> {
    let place = |endpoint: &str| -> Result<Place, EndpointError> {
        Ok(Place { endpoint: endpoint.to_owned(), way: Way::Socket(socket_path(endpoint)?) })
    };
    let runtime_place = place(&config.endpoint)?;
    let image_place = place(if config.image_endpoint.is_empty() { &config.endpoint } else { &config.image_endpoint })?;
    Ok(between(runtime_place, image_place, config, registry))
}

/// Prepares the clients of services in this process; registers the metrics of runtime operations.
pub fn connect_over(dial: Dial, config: &CriConfig, registry: &Registry) -> Connection {
    let place = Place { endpoint: config.endpoint.clone(), way: Way::Memory(dial) };
    between(place.clone(), place, config, registry)
}

fn between(runtime_place: Place, image_place: Place, config: &CriConfig, registry: &Registry) -> Connection {
    let caller = Caller { timeout: config.request_timeout, metrics: Arc::new(RuntimeOperations::new(registry)) };
    Connection {
        runtime: runtime_place.runtime(caller.clone(), config.list_streaming),
        images: Arc::new(ImageClient::new(image_place.channel(), caller.clone(), config.list_streaming)),
        runtime_place,
        image_place,
        caller,
        list_streaming: config.list_streaming,
    }
}

impl Connection {
    /// Another client with connections of its own, whose tasks run where this is called. Its calls are counted with all
    /// others, but do not take turns with them.
    pub fn another_runtime(&self) -> Arc<RuntimeClient> {
        self.runtime_place.runtime(self.caller.clone(), self.list_streaming)
    }

    /// Another channel to the runtime's socket, for services beside the CRI (containerd's own
    /// events). Connects when it is first used, and again when it must.
    pub fn runtime_channel(&self) -> Channel {
        self.runtime_place.channel()
    }
}
