//! Image import from archives, and pulls from registries. Implements spec 09b §4, §7.

use std::{
    io::Read,
    os::fd::{AsRawFd, OwnedFd},
    path::Path,
    sync::Arc,
};

use futures::{FutureExt, future::BoxFuture};

use super::{
    ImageStore, ImageStoreInner, blocking,
    pull::{PullGroup, PullRequest},
};
use crate::images::{
    archive::Archive,
    builtin,
    error::ImageError,
    names::Name,
    platform::PlatformSelection,
    progress::ImageProgress,
    record::{ImageOrigin, ImageRecord, Platform},
    registry::RegistryCredentials,
};

/// A pull that runs as long as any caller waits for it, and its progress.
pub type PullWithProgress = (BoxFuture<'static, Result<Arc<ImageRecord>, ImageError>>, Arc<ImageProgress>);

/// Which images of an archive to import, and their name.
#[derive(Clone, Debug, Default)]
pub struct ImportOptions {
    /// Name of the image: replaces the names in an OCI layout, added to those in a Docker archive; none: the archive's
    /// names.
    pub name: Option<Name>,
    /// Platforms to import.
    pub platforms: PlatformSelection,
}

impl ImageStore {
    /// Imports the images of an archive for this machine; `reference` is the image's name, as [`ImportOptions::name`].
    ///
    /// # Errors
    /// It is no image archive, or its content is invalid.
    pub async fn import(&self, path: &Path, reference: Option<&str>) -> Result<Vec<Arc<ImageRecord>>, ImageError> {
        let (inner, path) = (Arc::clone(&self.inner), path.to_owned());
        let choice = ImportOptions { name: reference.map(Name::parse).transpose()?, ..ImportOptions::default() };
        blocking(move || inner.import(&path, &choice, &ImageProgress::default())).await
    }

    /// Like [`Self::import`] for an open descriptor, with progress.
    ///
    /// # Errors
    /// As for [`Self::import`]; also if no image is for the requested platform.
    pub async fn import_watched(
        &self,
        archive: OwnedFd,
        choice: ImportOptions,
        progress: Arc<ImageProgress>,
    ) -> Result<Vec<Arc<ImageRecord>>, ImageError> {
        let inner = Arc::clone(&self.inner);
        blocking(move || {
            // The descriptor stays open until the end, because the path names it.
            let path = format!("/proc/self/fd/{}", archive.as_raw_fd());
            inner.import(Path::new(&path), &choice, &progress)
        })
        .await
    }

    /// Pulls an image. Built-in images are never pulled; concurrent pulls with the same credentials are shared.
    ///
    /// # Errors
    /// The reference is invalid, or the pull fails: the texts of spec 09b §4.3.
    pub async fn pull(
        &self,
        reference: &str,
        credentials: &RegistryCredentials,
    ) -> Result<Arc<ImageRecord>, ImageError> {
        if reference.is_empty() {
            return Err(ImageError::invalid("image reference is empty"));
        }
        let name = Name::parse(reference)?;
        if builtin::HOSTS.contains(&name.host.as_str()) {
            let missing = format!("failed to pull and unpack image \"{name}\": {name}: not found");
            let here = self.inner.catalogue().named(&name.to_string());
            return here.ok_or_else(|| ImageError::not_found(missing));
        }
        PullGroup::join(&self.inner, PullRequest { name, credentials: credentials.clone(), machine: None }).0.await
    }

    /// Like [`Self::pull`], with progress; of a multi-platform image, selects the one for `machine`, by default this
    /// machine.
    ///
    /// # Errors
    /// The reference is invalid.
    pub fn pull_watched(
        &self,
        reference: &str,
        credentials: &RegistryCredentials,
        machine: Option<Platform>,
    ) -> Result<PullWithProgress, ImageError> {
        let asked = PullRequest { name: Name::parse(reference)?, credentials: credentials.clone(), machine };
        let (pull, progress) = PullGroup::join(&self.inner, asked);
        Ok((pull.boxed(), progress))
    }
}

impl ImageStoreInner {
    pub(super) fn import(
        &self,
        path: &Path,
        choice: &ImportOptions,
        progress: &ImageProgress,
    ) -> Result<Vec<Arc<ImageRecord>>, ImageError> {
        let archive = Archive::open(path, &self.content)?;
        let found = archive.images(&choice.platforms, choice.name.as_ref())?;
        progress.begin(found.iter().flat_map(|image| &image.parsed.layers));
        let mut out = Vec::new();
        for image in &found {
            let _hold = self.settings.keeps_compressed.then(|| self.hold_packed(&image.parsed.layers));
            out.push(self.commit(image, ImageOrigin::Import, progress, |at| -> Result<Box<dyn Read>, ImageError> {
                let name = image.layers.get(at).map(String::as_str).unwrap_or_default();
                let missing = || ImageError::not_found(format!("layer {name:?} is not in the archive: not found"));
                let file = archive.file(name)?.ok_or_else(missing)?;
                match image.parsed.layers.get(at).filter(|_| self.settings.keeps_compressed) {
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
