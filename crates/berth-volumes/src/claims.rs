//! Resolution of a pod's volume to its claim and persistent volume.
//!
//! Reads are live; pure functions check the objects. Implements spec 07 §3.3, §7.10, spec 10 §4.8.

use std::sync::Arc;

use super::{
    desired_volumes, migration,
    spec::{Mode, VolumeSpec},
};
use berth_ports::StorageObjects;
use berth_types::{Pod, api};

/// Finalizer that keeps a deleted claim while pods use it.
const PROTECTION: &str = "kubernetes.io/pvc-protection";

/// Type of a claim reference.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum ClaimKind {
    /// Existing claim by name.
    Named,
    /// Claim created for the pod (generic ephemeral volume).
    Ephemeral,
}

/// Claim that a volume refers to.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct ClaimReference {
    kind: ClaimKind,
    /// Name of the claim, in the pod's namespace.
    pub name: String,
    read_only: bool,
}

/// Returns the claim that a volume refers to, if any.
pub fn reference(pod: &Pod, volume: &api::Volume) -> Option<ClaimReference> {
    if let Some(claim) = &volume.persistent_volume_claim {
        let read_only = claim.read_only == Some(true);
        return Some(ClaimReference { kind: ClaimKind::Named, name: claim.claim_name.clone(), read_only });
    }
    volume.ephemeral.as_ref()?;
    Some(ClaimReference {
        kind: ClaimKind::Ephemeral,
        name: format!("{}-{}", pod.name(), volume.name),
        read_only: false,
    })
}

/// Resolves a volume of a pod.
///
/// # Errors
/// Message for the pod, if the claim cannot be used.
pub async fn resolve(storage: &dyn StorageObjects, pod: &Pod, volume: &api::Volume) -> Result<VolumeSpec, String> {
    let Some(reference) = reference(pod, volume) else { return resolve_inline(volume, pod.namespace()) };
    let namespace = pod.namespace();
    let wrapped = |error: String| format!("error processing PVC {namespace}/{}: {error}", reference.name);
    let read = storage.claim(namespace, &reference.name).await;
    let claim = read.map_err(|e| wrapped(format!("failed to fetch PVC from API server: {e}")))?;
    if reference.kind == ClaimKind::Ephemeral {
        made_for(&claim, pod)?;
    }
    let name = bound_volume(&claim).map_err(wrapped)?;
    let read = storage.volume(name).await;
    let persistent = read.map_err(|e| wrapped(format!("failed to fetch PV {name} from API server: {e}")))?;
    belongs(&persistent, &claim).map_err(wrapped)?;
    let spec = match migration::persistent(&persistent)? {
        Some(of_driver) => VolumeSpec::persistent(Arc::new(of_driver), claim, reference.read_only).migrated(),
        None => VolumeSpec::persistent(persistent, claim, reference.read_only),
    };
    fits(pod, &volume.name, &spec)?;
    Ok(spec)
}

/// Resolves a volume without a claim, for a pod in that namespace.
///
/// # Errors
/// If an in-tree cloud volume cannot be translated to CSI, or its name cannot be a directory name.
pub fn resolve_inline(volume: &api::Volume, namespace: &str) -> Result<VolumeSpec, String> {
    let Some((of_driver, read_only)) = migration::inline(volume, namespace)? else {
        return Ok(VolumeSpec::inline(volume));
    };
    Ok(VolumeSpec::persistent(Arc::new(of_driver), unknown_claim(), read_only).migrated())
}

/// Returns the name of the volume that the claim is bound to.
fn bound_volume(claim: &api::PersistentVolumeClaim) -> Result<&str, String> {
    let is_protected = claim.metadata.finalizers.iter().flatten().any(|finalizer| finalizer == PROTECTION);
    if claim.metadata.deletion_timestamp.is_some() && !is_protected {
        return Err("PVC is being deleted".to_owned());
    }
    let phase = claim.status.as_ref().and_then(|status| status.phase.as_deref());
    if phase != Some("Bound") {
        return Err("PVC is not bound".to_owned());
    }
    let name = claim.spec.as_ref().and_then(|spec| spec.volume_name.as_deref()).unwrap_or_default();
    if name.is_empty() { Err("PVC has empty pvc.Spec.VolumeName".to_owned()) } else { Ok(name) }
}

/// Checks that the volume refers back to this claim.
fn belongs(volume: &api::PersistentVolume, claim: &api::PersistentVolumeClaim) -> Result<(), String> {
    let name = volume.metadata.name.as_deref().unwrap_or_default();
    let Some(reference) = volume.spec.as_ref().and_then(|spec| spec.claim_ref.as_ref()) else {
        return Err(format!(
            "found PV object {name} but it has a nil pv.Spec.ClaimRef indicating it is not yet bound to the claim"
        ));
    };
    let (theirs, ours) =
        (reference.uid.as_deref().unwrap_or_default(), claim.metadata.uid.as_deref().unwrap_or_default());
    if theirs == ours {
        return Ok(());
    }
    Err(format!("found PV object {name} but its pv.Spec.ClaimRef.UID {theirs} does not point to claim.UID {ours}"))
}

/// Checks that the claim was created for this pod, and not for another pod of the same name.
fn made_for(claim: &api::PersistentVolumeClaim, pod: &Pod) -> Result<(), String> {
    let mut owners = claim.metadata.owner_references.iter().flatten();
    if owners.any(|owner| owner.controller == Some(true) && owner.uid == pod.uid().as_str()) {
        return Ok(());
    }
    let metadata = &claim.metadata;
    Err(format!(
        "PVC {}/{} was not created for pod {}/{} (pod is not owner)",
        metadata.namespace.as_deref().unwrap_or_default(),
        metadata.name.as_deref().unwrap_or_default(),
        pod.namespace(),
        pod.name(),
    ))
}

/// Checks that containers use the volume according to its volume mode.
fn fits(pod: &Pod, volume: &str, spec: &VolumeSpec) -> Result<(), String> {
    let Some(mode) = spec.volume().and_then(|of| of.volume_mode.as_deref()) else {
        return Err(format!("cannot get volumeMode for volume: {}", spec.name));
    };
    let used = desired_volumes::usage(pod, volume);
    if used.as_directory && mode != Mode::Filesystem.as_str() {
        return Err(format!("volume {volume} has volumeMode {mode}, but is specified in volumeMounts"));
    }
    if used.as_device && mode != Mode::Block.as_str() {
        return Err(format!("volume {volume} has volumeMode {mode}, but is specified in volumeDevices"));
    }
    Ok(())
}

/// Returns the sizes in bytes of the volume on the node (claim status) and of the persistent volume; `None` if no
/// growth is needed or a size is unknown.
pub fn growth(spec: &VolumeSpec) -> Option<(u64, u64)> {
    let bytes = |text: &str| {
        let amount = berth_types::quantity::Amount::parse(text).ok()?;
        u64::try_from(amount.value()).ok()
    };
    let persistent = spec.as_persistent()?;
    let to = bytes(&persistent.volume.spec.as_ref()?.capacity.as_ref()?.get("storage")?.0)?;
    let from = bytes(&persistent.claim.status.as_ref()?.capacity.as_ref()?.get("storage")?.0)?;
    (from < to).then_some((from, to))
}

/// Returns an empty claim for a volume without one, or with an unknown one.
pub fn unknown_claim() -> Arc<api::PersistentVolumeClaim> {
    Arc::default()
}

#[cfg(test)]
mod tests;
