//! Images setter: images reported to the scheduler. Pure. Implements spec 05 §4.3 row 5.

use super::StatusBuilder;
use berth_types::api;

/// Maximum names reported per image.
const NAMES: usize = 5;

/// Image of the runtime.
#[derive(Clone, PartialEq, Eq, Debug, Default)]
pub struct NodeImage {
    /// Image id in the runtime.
    pub id: String,
    /// Size in bytes.
    pub size: u64,
    /// Names of the form `repository@digest`.
    pub digests: Vec<String>,
    /// Names of the form `repository:tag`.
    pub tags: Vec<String>,
}

pub(super) fn set(work: &mut StatusBuilder<'_>) {
    let Some(images) = &work.known.images else { return };
    let mut images: Vec<&NodeImage> = images.iter().collect();
    images.sort_by(|a, b| (b.size, &b.id).cmp(&(a.size, &a.id)));
    let most = usize::try_from(work.settings.max_images).unwrap_or(usize::MAX);
    work.status.images = Some(images.into_iter().take(most).map(container_image).collect());
}

fn container_image(image: &NodeImage) -> api::ContainerImage {
    let names = image.digests.iter().chain(&image.tags).take(NAMES).cloned().collect();
    api::ContainerImage { names: Some(names), size_bytes: Some(i64::try_from(image.size).unwrap_or(i64::MAX)) }
}
