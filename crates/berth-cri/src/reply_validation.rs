//! Validation of CRI replies before use (spec 03a §2.2 "Reply validation"). Pure.

use super::{CriError, CriResult};
use berth_proto::cri;

fn invalid<T>(text: impl Into<String>) -> CriResult<T> {
    Err(CriError::Invalid(text.into()))
}

/// Requires all four fields; the error text names the missing ones.
pub(super) fn version(reply: &cri::VersionResponse) -> CriResult<()> {
    let fields = [
        ("version", &reply.version),
        ("runtime_name", &reply.runtime_name),
        ("runtime_version", &reply.runtime_version),
        ("runtime_api_version", &reply.runtime_api_version),
    ];
    let missing: Vec<&str> = fields.iter().filter(|(_, value)| value.is_empty()).map(|(name, _)| *name).collect();
    if missing.is_empty() {
        return Ok(());
    }
    invalid(format!("not all fields are set in VersionResponse (missing {})", missing.join(", ")))
}

/// Requires at least the two mandatory conditions, `RuntimeReady` and `NetworkReady` (checks only their number).
pub(super) fn status(reply: cri::StatusResponse) -> CriResult<cri::StatusResponse> {
    match &reply.status {
        Some(status) if status.conditions.len() >= 2 => Ok(reply),
        _ => invalid("RuntimeReady or NetworkReady condition are not set"),
    }
}

/// Requires the ID of a new sandbox.
pub(super) fn sandbox_id(id: String, name: &str) -> CriResult<String> {
    if id.is_empty() { invalid(format!("PodSandboxId is not set for sandbox {name:?}")) } else { Ok(id) }
}

/// Requires the ID of a new container.
pub(super) fn container_id(id: String, name: &str) -> CriResult<String> {
    if id.is_empty() { invalid(format!("ContainerId is not set for container {name:?}")) } else { Ok(id) }
}

/// Requires the ID, metadata, and creation time of a sandbox status.
pub(super) fn sandbox_status(reply: cri::PodSandboxStatusResponse) -> CriResult<cri::PodSandboxStatusResponse> {
    let Some(status) = &reply.status else { return invalid("pod sandbox status is nil") };
    if status.id.is_empty() {
        return invalid("status.Id is not set");
    }
    let Some(meta) = &status.metadata else { return invalid("status.Metadata is not set") };
    if meta.name.is_empty() || meta.namespace.is_empty() || meta.uid.is_empty() {
        return invalid("metadata.Name, metadata.Namespace or metadata.Uid is not in metadata");
    }
    if status.created_at == 0 {
        return invalid("status.CreatedAt is not set");
    }
    Ok(reply)
}

/// Requires the ID, name, creation time, and image of a container status.
pub(super) fn container_status(reply: cri::ContainerStatusResponse) -> CriResult<cri::ContainerStatus> {
    let Some(status) = reply.status else { return invalid("container status is nil") };
    if status.id.is_empty() {
        return invalid("status.Id is not set");
    }
    match &status.metadata {
        None => return invalid("status.Metadata is not set"),
        Some(meta) if meta.name.is_empty() => return invalid("metadata.Name is not in metadata"),
        Some(_) => {}
    }
    if status.created_at == 0 {
        return invalid("status.CreatedAt is not set");
    }
    if status.image.as_ref().is_none_or(|image| image.image.is_empty()) {
        return invalid("status.Image is not set");
    }
    if status.image_ref.is_empty() {
        return invalid("status.ImageRef is not set");
    }
    Ok(status)
}

/// Requires the ID and size of an image, if it exists.
pub(super) fn image(image: Option<cri::Image>, name: &str) -> CriResult<Option<cri::Image>> {
    match image {
        Some(image) if image.id.is_empty() || image.size == 0 => {
            invalid(format!("Id or size of image {name:?} is not set"))
        }
        image => Ok(image),
    }
}

/// Requires the reference of a pulled image.
pub(super) fn image_ref(reference: String, name: &str) -> CriResult<String> {
    if reference.is_empty() { invalid(format!("imageRef of image {name:?} is not set")) } else { Ok(reference) }
}

/// Requires the URL of a streaming endpoint.
pub(super) fn url(url: String) -> CriResult<String> {
    if url.is_empty() { invalid("URL is not set") } else { Ok(url) }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn text<T>(answer: CriResult<T>) -> String {
        answer.err().map(|e| e.to_string()).unwrap_or_default()
    }

    fn container() -> cri::ContainerStatus {
        cri::ContainerStatus {
            id: "c".into(),
            metadata: Some(cri::ContainerMetadata { name: "web".into(), attempt: 0 }),
            created_at: 1,
            image: Some(cri::ImageSpec { image: "busybox".into(), ..Default::default() }),
            image_ref: "sha256:1".into(),
            ..Default::default()
        }
    }

    #[test]
    fn containers_name_what_they_lack() {
        let check = |change: fn(&mut cri::ContainerStatus), expected: &str| {
            let mut status = container();
            change(&mut status);
            let reply = cri::ContainerStatusResponse { status: Some(status), ..Default::default() };
            assert_eq!(text(container_status(reply)), expected);
        };
        check(|_| (), "");
        check(|s| s.id.clear(), "status.Id is not set");
        check(|s| s.metadata = None, "status.Metadata is not set");
        check(|s| s.metadata = Some(Default::default()), "metadata.Name is not in metadata");
        check(|s| s.created_at = 0, "status.CreatedAt is not set");
        check(|s| s.image = None, "status.Image is not set");
        check(|s| s.image_ref.clear(), "status.ImageRef is not set");
        assert_eq!(text(container_status(cri::ContainerStatusResponse::default())), "container status is nil");
    }

    #[test]
    fn sandboxes_name_what_they_lack() {
        let meta = cri::PodSandboxMetadata { name: "n".into(), namespace: "ns".into(), uid: "u".into(), attempt: 0 };
        let full = cri::PodSandboxStatus { id: "s".into(), metadata: Some(meta), created_at: 1, ..Default::default() };
        let check = |change: fn(&mut cri::PodSandboxStatus), expected: &str| {
            let mut status = full.clone();
            change(&mut status);
            let reply = cri::PodSandboxStatusResponse { status: Some(status), ..Default::default() };
            assert_eq!(text(sandbox_status(reply)), expected);
        };
        check(|_| (), "");
        check(|s| s.id.clear(), "status.Id is not set");
        check(|s| s.metadata = None, "status.Metadata is not set");
        check(
            |s| s.metadata = Some(Default::default()),
            "metadata.Name, metadata.Namespace or metadata.Uid is not in metadata",
        );
        check(|s| s.created_at = 0, "status.CreatedAt is not set");
    }

    #[test]
    fn the_rest() {
        let condition = |kind: &str| cri::RuntimeCondition { r#type: kind.into(), status: true, ..Default::default() };
        let with =
            |conditions| cri::StatusResponse { status: Some(cri::RuntimeStatus { conditions }), ..Default::default() };
        assert!(status(with(vec![condition("RuntimeReady"), condition("NetworkReady")])).is_ok());
        assert_eq!(
            text(status(with(vec![condition("RuntimeReady")]))),
            "RuntimeReady or NetworkReady condition are not set"
        );
        assert_eq!(text(sandbox_id(String::new(), "web")), "PodSandboxId is not set for sandbox \"web\"");
        assert_eq!(text(container_id(String::new(), "web")), "ContainerId is not set for container \"web\"");
        assert_eq!(text(image_ref(String::new(), "x")), "imageRef of image \"x\" is not set");
        assert_eq!(text(image(Some(cri::Image::default()), "x")), "Id or size of image \"x\" is not set");
        assert_eq!(image(None, "x"), Ok(None));
        assert_eq!(text(url(String::new())), "URL is not set");
        assert_eq!(
            text(version(&cri::VersionResponse { version: "0.1.0".into(), ..Default::default() })),
            "not all fields are set in VersionResponse (missing runtime_name, runtime_version, runtime_api_version)"
        );
    }
}
