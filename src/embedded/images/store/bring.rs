//! Images come in: from archives, and from registries. Behaviour: spec 09b §4, §7.

use std::{
    os::fd::{AsRawFd, OwnedFd},
    path::Path,
    sync::Arc,
};

use futures::{FutureExt, future::BoxFuture};

use super::{ImageStore, blocking, pull::Pulls};
use crate::embedded::images::{
    builtin, error::ImageError, names::Name, progress::Progress, record::Record, registry::Credentials,
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
        let reference = reference.map(Name::parse).transpose()?;
        blocking(move || inner.import(&path, reference.as_ref(), &Progress::default())).await
    }

    /// Like [`Self::import`] of what a descriptor is open for, and shows how far it is, image after image.
    ///
    /// # Errors
    /// Likewise.
    pub async fn import_watched(
        &self,
        archive: OwnedFd,
        reference: Option<&str>,
        progress: Arc<Progress>,
    ) -> Result<Vec<Arc<Record>>, ImageError> {
        let inner = Arc::clone(&self.inner);
        let reference = reference.map(Name::parse).transpose()?;
        blocking(move || {
            // Held until the end: its number names it.
            let path = format!("/proc/self/fd/{}", archive.as_raw_fd());
            inner.import(Path::new(&path), reference.as_ref(), &progress)
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
        Pulls::join(&self.inner, &name, credentials).0.await
    }

    /// Like [`Self::pull`], and shows how far it is.
    ///
    /// # Errors
    /// Where the name is none, or it is that of a built-in image.
    pub fn pull_watched(&self, reference: &str, credentials: &Credentials) -> Result<WatchedPull, ImageError> {
        let name = Name::parse(reference)?;
        let (pull, progress) = Pulls::join(&self.inner, &name, credentials);
        Ok((pull.boxed(), progress))
    }
}
