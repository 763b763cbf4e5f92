//! Status of a `VolumeAttachment`. Pure. Implements spec 07 §12.4.

use std::collections::BTreeMap;

use k8s_openapi::api::storage::v1::VolumeAttachment;

/// Checks that the volume is attached.
///
/// # Errors
/// If it is not, with the message of the upstream kubelet.
pub fn verify(attachment: &VolumeAttachment, handle: &str) -> Result<(), String> {
    if attachment.metadata.deletion_timestamp.is_some() {
        return Err("volume attachment is being deleted".to_owned());
    }
    let status = attachment.status.as_ref();
    if status.is_some_and(|status| status.attached) {
        return Ok(());
    }
    if let Some(error) = status.and_then(|status| status.attach_error.as_ref()) {
        return Err(error.message.clone().unwrap_or_default());
    }
    let name = attachment.metadata.name.as_deref().unwrap_or_default();
    Err(format!("volume {handle} is not attached for volume attachment {name}"))
}

/// gRPC code `ResourceExhausted`.
const EXHAUSTED: i32 = 8;

/// Whether the attach failed because the node reached its attach limit (spec 07 §5.1).
pub fn is_exhausted(attachment: &VolumeAttachment) -> bool {
    let error = attachment.status.as_ref().and_then(|status| status.attach_error.as_ref());
    error.and_then(|error| error.error_code) == Some(EXHAUSTED)
}

/// Returns the publish context from the driver's controller plugin.
pub fn metadata(attachment: &VolumeAttachment) -> BTreeMap<String, String> {
    let status = attachment.status.as_ref();
    status.and_then(|status| status.attachment_metadata.clone()).unwrap_or_default()
}

#[cfg(test)]
mod tests {
    use serde_json::{Value, json};

    use super::*;

    #[test]
    fn an_unusable_attachment_fails_with_the_reason() {
        let of = |metadata: Value, status: Value| {
            let spec = json!({"attacher": "d", "nodeName": "n", "source": {}});
            let attachment = json!({"metadata": metadata, "spec": spec, "status": status});
            verify(&serde_json::from_value(attachment).expect("an attachment"), "h")
        };
        let name = json!({"name": "csi-1"});
        assert_eq!(of(name.clone(), json!({"attached": true})), Ok(()));
        let deleted = json!({"name": "csi-1", "deletionTimestamp": "2026-01-01T00:00:00Z"});
        assert_eq!(of(deleted, json!({"attached": true})), Err("volume attachment is being deleted".to_owned()));
        let failed = json!({"attached": false, "attachError": {"message": "no disk"}});
        assert_eq!(of(name.clone(), failed), Err("no disk".to_owned()));
        let text = "volume h is not attached for volume attachment csi-1".to_owned();
        assert_eq!(of(name.clone(), json!({"attached": false})), Err(text.clone()));
        assert_eq!(of(name, Value::Null), Err(text));
    }
}
