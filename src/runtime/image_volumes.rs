//! Image volumes: pulls images that the runtime mounts as volumes (spec 07 §7.9).
//!
//! A pull begins with the first container of a sync that mounts the volume, concurrently with the pull
//! of that container's own image; a failure is reported for each container that mounts it.

use std::{collections::HashMap, sync::Arc};

use tokio_util::task::AbortOnDropHandle;

use berth_cri::CriError;
use berth_ports::{EnsureImage, ImageError, ImageProvider, PullPolicy, ResolvedImage};
use berth_proto::cri;
use berth_types::{Pod, api};

/// Prefix of the runtime's error if a container cannot be created because of an image volume.
const MOUNT_FAILED: &str = "ImageVolumeMountFailed";

/// A running image pull.
pub(super) type ImageTask = AbortOnDropHandle<Result<ResolvedImage, ImageError>>;

/// Image specs for the runtime, by volume name.
pub(crate) type VolumeImages = HashMap<String, cri::ImageSpec>;

enum PullState {
    Pulling(ImageTask),
    Finished(Result<ResolvedImage, ImageError>),
}

/// The image volumes of one sync.
#[derive(Default)]
pub(super) struct ImageVolumes(HashMap<String, PullState>);

impl ImageVolumes {
    /// Starts pulls of the images that a container mounts, unless started before in this sync; `ask`
    /// contains the parameters common to all pulls of the pod.
    pub(super) fn begin(&mut self, images: &Arc<dyn ImageProvider>, container: &api::Container, ask: &EnsureImage) {
        for (name, source) in mounted(&ask.pod, container) {
            if self.0.contains_key(&name) {
                continue;
            }
            let request = EnsureImage {
                image: source.reference.clone().unwrap_or_default(),
                policy: PullPolicy::parse(source.pull_policy.as_deref()),
                field_path: None,
                ..ask.clone()
            };
            let images = images.clone();
            let pull = berth_otel::in_current_span(async move { images.ensure(request).await });
            let task = AbortOnDropHandle::new(tokio::spawn(pull));
            self.0.insert(name, PullState::Pulling(task));
        }
    }

    /// Waits for the images that a container mounts. Cancel-safe.
    pub(super) async fn of(&mut self, pod: &Pod, container: &api::Container) -> Result<VolumeImages, ImageError> {
        let mut all = VolumeImages::new();
        for (name, source) in mounted(pod, container) {
            let Some(state) = self.0.get_mut(&name) else { continue };
            if let PullState::Pulling(task) = state {
                let gone = |e: tokio::task::JoinError| ImageError {
                    reason: "ErrImagePull",
                    message: e.to_string(),
                    retry_at: None,
                };
                let done = task.await.unwrap_or_else(|e| Err(gone(e)));
                *state = PullState::Finished(done);
            }
            if let PullState::Finished(done) = state {
                let image = done.clone()?;
                let spec = cri::ImageSpec {
                    image: image.reference,
                    user_specified_image: source.reference.clone().unwrap_or_default(),
                    ..Default::default()
                };
                all.insert(name, spec);
            }
        }
        Ok(all)
    }
}

/// The image volumes that a container mounts.
fn mounted<'a>(pod: &'a Pod, container: &'a api::Container) -> impl Iterator<Item = (String, api::ImageVolumeSource)> {
    let is_mounted =
        |volume: &api::Volume| container.volume_mounts.iter().flatten().any(|mount| mount.name == volume.name);
    let volumes = pod.spec().volumes().filter(is_mounted);
    volumes.filter_map(|volume| Some((volume.name, volume.image?)))
}

/// Number of images in the container's mounts.
pub(super) fn count(config: &cri::ContainerConfig) -> u64 {
    u64::try_from(config.mounts.iter().filter(|mount| mount.image.is_some()).count()).unwrap_or(u64::MAX)
}

/// Whether an image volume caused the failure to create the container.
pub(super) fn is_mount_failure(error: &CriError) -> bool {
    matches!(error, CriError::Rpc { message, .. } if message.starts_with(MOUNT_FAILED))
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    #[test]
    fn only_image_volumes_that_are_mounted_are_wanted() {
        let pod = Pod::new(
            serde_json::from_value(json!({
                "metadata": {"name": "p", "namespace": "n", "uid": "u"},
                "spec": {"volumes": [
                    {"name": "model", "image": {"reference": "r/m:1"}}, {"name": "other", "image": {"reference": "r/o:1"}},
                    {"name": "plain", "emptyDir": {}}],
                "containers": [{"name": "c", "volumeMounts": [
                    {"name": "plain", "mountPath": "/p"}, {"name": "model", "mountPath": "/m"},
                    {"name": "model", "mountPath": "/again"}]}]}
            }))
            .expect("a pod"),
        )
        .expect("complete");
        let found: Vec<_> =
            mounted(&pod, &pod.containers()[0]).map(|(name, source)| (name, source.reference.clone())).collect();
        assert_eq!(found, [("model".to_owned(), Some("r/m:1".to_owned()))]);
    }
}
