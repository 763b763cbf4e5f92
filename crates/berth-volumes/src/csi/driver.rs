//! One registration of a driver.

use std::path::PathBuf;

use tokio::{sync::OnceCell, time::Instant};
use tokio_util::sync::CancellationToken;

use super::{
    client::{CallError, Capabilities, DriverClient},
    version::Version,
};

/// A driver as it registered.
#[derive(Debug)]
pub struct Driver {
    /// Its name.
    pub name: String,
    /// The socket it registered by.
    pub socket: PathBuf,
    /// The version of the contract.
    pub version: Version,
    /// Its node service.
    pub client: DriverClient,
    /// Ends what runs for this registration.
    pub gone: CancellationToken,
    capabilities: OnceCell<Capabilities>,
}

impl Driver {
    /// Nothing was asked yet.
    pub fn new(name: &str, socket: PathBuf, version: Version, client: DriverClient) -> Self {
        let (gone, capabilities) = (CancellationToken::new(), OnceCell::new());
        Self { name: name.to_owned(), socket, version, client, gone, capabilities }
    }

    /// What it can do: asked once per registration.
    ///
    /// # Errors
    /// It does not say; it is asked again next time.
    pub async fn capabilities(&self, until: Instant) -> Result<Capabilities, CallError> {
        self.capabilities.get_or_try_init(|| self.client.capabilities(until)).await.copied()
    }
}
