//! Images come in: from archives, and from registries. Behaviour: spec 09b §4, §7.

use std::{
    os::fd::{AsRawFd, OwnedFd},
    path::Path,
    sync::Arc,
};

use futures::{FutureExt, future::BoxFuture};

use super::{
    Choice, ImageStore, blocking,
    pull::{Asked, Pulls},
};
use crate::embedded::images::{
    builtin,
    error::ImageError,
    names::Name,
    progress::Progress,
    record::{Platform, Record},
    registry::Credentials,
};

/// A pull that goes on as long as somebody waits for it, and how far it is.
pub type WatchedPull = (BoxFuture<'static, Result<Arc<Record>, ImageError>>, Arc<Progress>);

impl ImageStore {
    /// Imports the images of an archive that are for this machine; `reference` names one that has no name.
    ///
    /// # Errors
    /// Where it is no archive, or something in it is not what it should be.
    pub async fn import(&self, path: &Path, reference: Option<&str>) -> Result<Vec<Arc<Record>>, ImageError> {
        let (inner, path) = (Arc::clone(&self.inner), path.to_owned());
        let choice = Choice { name: reference.map(Name::parse).transpose()?, ..Choice::default() };
        blocking(move || inner.import(&path, &choice, &Progress::default())).await
    }

    /// Like [`Self::import`] of what a descriptor is open for, and shows how far it is, image after image.
    ///
    /// # Errors
    /// Likewise; also where no image in it is for the machine that was asked for.
    pub async fn import_watched(
        &self,
        archive: OwnedFd,
        choice: Choice,
        progress: Arc<Progress>,
    ) -> Result<Vec<Arc<Record>>, ImageError> {
        let inner = Arc::clone(&self.inner);
        blocking(move || {
            // Held until the end: its number names it.
            let path = format!("/proc/self/fd/{}", archive.as_raw_fd());
            inner.import(Path::new(&path), &choice, &progress)
        })
        .await
    }

    /// Brings an image here. Built-in images are here; what another caller pulls with the same credentials is shared.
    ///
    /// # Errors
    /// Where the name is none, or the image cannot be had: the texts of spec 09b §4.3.
    pub async fn pull(&self, reference: &str, credentials: &Credentials) -> Result<Arc<Record>, ImageError> {
        if reference.is_empty() {
            return Err(ImageError::invalid("image reference is empty"));
        }
        let name = Name::parse(reference)?;
        if builtin::HOSTS.contains(&name.host.as_str()) {
            let missing = format!("failed to pull and unpack image \"{name}\": {name}: not found");
            let here = self.inner.catalogue().named(&name.to_string());
            return here.ok_or_else(|| ImageError::not_found(missing));
        }
        Pulls::join(&self.inner, Asked { name, credentials: credentials.clone(), machine: None }).0.await
    }

    /// Like [`Self::pull`], and shows how far it is; of an image for several machines the one for `machine`, which is this one
    /// where it is not said.
    ///
    /// # Errors
    /// Where the name is none, or it is that of a built-in image.
    pub fn pull_watched(
        &self,
        reference: &str,
        credentials: &Credentials,
        machine: Option<Platform>,
    ) -> Result<WatchedPull, ImageError> {
        let asked = Asked { name: Name::parse(reference)?, credentials: credentials.clone(), machine };
        let (pull, progress) = Pulls::join(&self.inner, asked);
        Ok((pull.boxed(), progress))
    }
}
