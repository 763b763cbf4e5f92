//! Images come in: from archives, and from registries. Behaviour: spec 09b §4, §7.

use std::{
    io::Read,
    os::fd::{AsRawFd, OwnedFd},
    path::Path,
    sync::Arc,
};

use futures::{FutureExt, future::BoxFuture};

use super::{
    ImageStore, Inner, blocking,
    pull::{Asked, Pulls},
};
use crate::images::{
    archive::Archive,
    builtin,
    error::ImageError,
    names::Name,
    platform::Wanted,
    progress::Progress,
    record::{Origin, Platform, Record},
    registry::Credentials,
};

/// A pull that goes on as long as somebody waits for it, and how far it is.
pub type WatchedPull = (BoxFuture<'static, Result<Arc<Record>, ImageError>>, Arc<Progress>);

/// Which images of an archive are imported, and what they are called.
#[derive(Clone, Debug, Default)]
pub struct Choice {
    /// What an image is called, whatever the archive says.
    pub name: Option<Name>,
    /// Images of which machines.
    pub platforms: Wanted,
}

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

impl Inner {
    pub(super) fn import(
        &self,
        path: &Path,
        choice: &Choice,
        progress: &Progress,
    ) -> Result<Vec<Arc<Record>>, ImageError> {
        let archive = Archive::open(path, &self.content)?;
        let found = archive.images(&choice.platforms, choice.name.as_ref())?;
        progress.begin(found.iter().flat_map(|image| &image.parsed.layers));
        let mut out = Vec::new();
        for image in &found {
            let _hold = self.settings.keeps_packed.then(|| self.hold_packed(&image.parsed.layers));
            out.push(self.commit(image, Origin::Import, progress, |at| -> Result<Box<dyn Read>, ImageError> {
                let name = image.layers.get(at).map(String::as_str).unwrap_or_default();
                let missing = || ImageError::not_found(format!("layer {name:?} is not in the archive: not found"));
                let file = archive.file(name)?.ok_or_else(missing)?;
                match image.parsed.layers.get(at).filter(|_| self.settings.keeps_packed) {
                    None => Ok(Box::new(file)),
                    Some(layer) => {
                        self.content.keep(file, layer)?;
                        Ok(Box::new(self.content.open_blob(&layer.digest)?))
                    }
                }
            })?);
        }
        Ok(out)
    }
}
