//! From settings to the two clients. Connecting is lazy: nothing here talks to the runtime.

use std::{path::PathBuf, sync::Arc, time::Duration};

use super::{
    client::RuntimeClient, connector::channel, deadlines::Caller, endpoint::EndpointError, endpoint::socket_path,
    image_client::ImageClient,
};
use crate::metrics::{Registry, RuntimeOperations};

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

/// Where a service is reached.
#[derive(Clone, Debug)]
pub(super) struct Place {
    /// As the operator wrote it, for texts.
    pub(super) endpoint: String,
    pub(super) socket: PathBuf,
}

/// The two clients, each on a channel of its own.
#[derive(Clone)]
pub struct Connection {
    /// Sandboxes and containers.
    pub runtime: Arc<RuntimeClient>,
    /// Images.
    pub images: Arc<ImageClient>,
    pub(super) runtime_place: Place,
    pub(super) image_place: Place,
}

/// Prepares the clients; registers the metrics of runtime operations.
///
/// # Errors
/// Endpoints that are no unix sockets.
pub fn connect(config: &CriConfig, registry: &Registry) -> Result<Connection, EndpointError> {
    let place = |endpoint: &str| -> Result<Place, EndpointError> {
        Ok(Place { endpoint: endpoint.to_owned(), socket: socket_path(endpoint)? })
    };
    let runtime_place = place(&config.endpoint)?;
    let image_place = place(if config.image_endpoint.is_empty() { &config.endpoint } else { &config.image_endpoint })?;
    let caller = Caller { timeout: config.request_timeout, metrics: Arc::new(RuntimeOperations::new(registry)) };
    Ok(Connection {
        runtime: Arc::new(RuntimeClient::new(
            channel(runtime_place.socket.clone()),
            caller.clone(),
            config.list_streaming,
        )),
        images: Arc::new(ImageClient::new(channel(image_place.socket.clone()), caller, config.list_streaming)),
        runtime_place,
        image_place,
    })
}

impl Connection {
    /// Another channel to the runtime's socket, for services beside the CRI (containerd's own
    /// events). Connects when it is first used, and again when it must.
    pub fn runtime_channel(&self) -> tonic::transport::Channel {
        channel(self.runtime_place.socket.clone())
    }
}
