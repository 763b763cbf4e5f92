//! Registration of one CSI driver: socket, version, client, and cached capabilities.

use std::path::PathBuf;

use tokio::{sync::OnceCell, time::Instant};
use tokio_util::sync::CancellationToken;

use super::{
    client::{CallError, Capabilities, DriverClient},
    version::CsiVersion,
};

/// Registered CSI driver.
#[derive(Debug)]
pub struct RegisteredDriver {
    /// Name of the driver.
    pub name: String,
    /// Registration socket.
    pub socket: PathBuf,
    /// CSI version.
    pub version: CsiVersion,
    /// Client of its node service.
    pub client: DriverClient,
    /// Canceled when the registration ends or is replaced.
    pub gone: CancellationToken,
    capabilities: OnceCell<Capabilities>,
}

impl RegisteredDriver {
    /// Creates the registration; makes no call yet.
    pub fn new(name: &str, socket: PathBuf, version: CsiVersion, client: DriverClient) -> Self {
        let (gone, capabilities) = (CancellationToken::new(), OnceCell::new());
        Self { name: name.to_owned(), socket, version, client, gone, capabilities }
    }

    /// Returns the capabilities of the node service, read once per registration.
    ///
    /// # Errors
    /// If the call fails; the next request retries it.
    pub async fn capabilities(&self, until: Instant) -> Result<Capabilities, CallError> {
        self.capabilities.get_or_try_init(|| self.client.capabilities(until)).await.copied()
    }
}
