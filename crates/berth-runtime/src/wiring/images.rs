//! Adapts the image store to the CRI image service.
//! Implements spec 09b §3.

use std::{
    collections::{BTreeSet, HashMap},
    sync::Arc,
};

use async_trait::async_trait;
use serde_json::json;
use tracing::warn;

use crate::{
    errors::{ErrorKind, RuntimeError, RuntimeResult},
    images::{
        FsUsage, ImageError, ImageErrorKind, ImageStore,
        record::{ImageRecord, User},
        registry::auth::RegistryCredentials,
    },
    ports::{Image, Images},
    runtime::now_ns,
};
use berth_proto::cri;

/// The `Images` port over an image store.
#[derive(Clone)]
pub struct StoredImages(pub ImageStore);

#[async_trait]
impl Images for StoredImages {
    async fn resolve(&self, name: &str) -> RuntimeResult<Option<Arc<Image>>> {
        let record = self.0.status(name)?;
        Ok(record.map(|record| {
            Arc::new(Image {
                id: record.id(),
                tags: record.repo_tags(),
                digests: record.repo_digests(),
                stop_signal: record.config.stop_signal.clone(),
            })
        }))
    }

    async fn pin(&self, image: &str, container: &str) -> RuntimeResult<()> {
        if self.0.root_for(container).is_some() {
            return Ok(());
        }
        self.0.prepare_root(container, image).await.map(drop).map_err(RuntimeError::from)
    }

    async fn release(&self, _: &str, container: &str) {
        if let Err(cause) = self.0.release_root(container).await {
            warn!(containerID = container, err = %cause, "Failed to delete writable layer of the container");
        }
    }

    async fn release_others(&self, containers: &BTreeSet<String>) {
        for container in self.0.roots().iter().filter(|container| !containers.contains(*container)) {
            self.release("", container).await;
        }
    }

    async fn list(&self, filter: Option<cri::ImageFilter>) -> RuntimeResult<Vec<cri::Image>> {
        let name = filter.and_then(|filter| filter.image).map(|image| image.image).unwrap_or_default();
        let records = self.0.list(&name)?;
        Ok(records.iter().map(|record| image(record)).collect())
    }

    async fn status(&self, request: cri::ImageStatusRequest) -> RuntimeResult<cri::ImageStatusResponse> {
        let name = request.image.map(|image| image.image).unwrap_or_default();
        let found = if name.is_empty() { None } else { self.0.status(&name)? };
        let mut info = HashMap::new();
        if let Some(record) = found.as_ref().filter(|_| request.verbose) {
            let chain = record.chain_id.as_ref().map(ToString::to_string);
            let spec = self.0.spec(record).await?.unwrap_or_else(|| json!({"config": record.config}));
            let details = json!({"chainID": chain, "imageSpec": spec});
            info.insert("info".to_owned(), details.to_string());
        }
        Ok(cri::ImageStatusResponse { image: found.map(|record| image(&record)), info })
    }

    async fn pull(&self, request: cri::PullImageRequest) -> RuntimeResult<String> {
        let name = request.image.map(|image| image.image).unwrap_or_default();
        let auth = request.auth.unwrap_or_default();
        let credentials = RegistryCredentials {
            username: auth.username,
            password: auth.password,
            auth: auth.auth,
            server_address: auth.server_address,
            identity_token: auth.identity_token,
            registry_token: auth.registry_token,
        };
        Ok(self.0.pull(&name, &credentials).await?.id())
    }

    async fn remove(&self, name: &str) -> RuntimeResult<()> {
        Ok(self.0.remove(name).await?)
    }

    async fn written(&self, container: &str) -> RuntimeResult<(u64, u64)> {
        Ok(self.0.writable_usage(container).await?)
    }

    async fn file_systems(&self) -> RuntimeResult<cri::ImageFsInfoResponse> {
        let info = self.0.fs_info();
        Ok(cri::ImageFsInfoResponse {
            image_filesystems: vec![usage(&info.images)],
            container_filesystems: info.containers.as_ref().map(usage).into_iter().collect(),
        })
    }
}

fn image(record: &ImageRecord) -> cri::Image {
    let (uid, username) = match record.user() {
        User::Unset => (None, String::new()),
        User::Id(value) => (Some(cri::Int64Value { value }), String::new()),
        User::Name(name) => (None, name),
    };
    cri::Image {
        id: record.id(),
        repo_tags: record.repo_tags(),
        repo_digests: record.repo_digests(),
        size: record.size,
        uid,
        username,
        pinned: record.pinned,
        ..Default::default()
    }
}

fn usage(of: &FsUsage) -> cri::FilesystemUsage {
    cri::FilesystemUsage {
        timestamp: now_ns(),
        fs_id: Some(cri::FilesystemIdentifier { mountpoint: of.mountpoint.display().to_string() }),
        used_bytes: Some(cri::UInt64Value { value: of.used_bytes }),
        inodes_used: Some(cri::UInt64Value { value: of.inodes_used }),
    }
}

impl From<ImageError> for RuntimeError {
    fn from(error: ImageError) -> Self {
        let kind = match error.kind {
            ImageErrorKind::NotFound => ErrorKind::NotFound,
            ImageErrorKind::InvalidArgument => ErrorKind::Invalid,
            ImageErrorKind::ResourceExhausted => ErrorKind::Exhausted,
            ImageErrorKind::AlreadyExists => ErrorKind::Taken,
            ImageErrorKind::DeadlineExceeded => ErrorKind::Deadline,
            ImageErrorKind::Cancelled
            | ImageErrorKind::DataLoss
            | ImageErrorKind::Unavailable
            | ImageErrorKind::Unknown => ErrorKind::Other,
        };
        RuntimeError::new(kind, error.text)
    }
}
