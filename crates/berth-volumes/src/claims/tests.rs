//! Usable and unusable claims.

use async_trait::async_trait;
use k8s_openapi::api::storage::v1::{CSIDriver, VolumeAttachment};
use serde_json::{Value, json};
use tokio::sync::watch;

use super::*;
use berth_ports::{AttachedVolumes, StorageError};

/// API server with one claim and one volume.
struct World {
    claim: Value,
    volume: Value,
}

fn parsed<T: serde::de::DeserializeOwned>(value: &Value) -> Result<Arc<T>, StorageError> {
    if value.is_null() {
        return Err(StorageError::NotFound("not found".to_owned()));
    }
    Ok(Arc::new(serde_json::from_value(value.clone()).expect("an object")))
}

#[async_trait]
impl StorageObjects for World {
    async fn claim(&self, _: &str, _: &str) -> Result<Arc<api::PersistentVolumeClaim>, StorageError> {
        parsed(&self.claim)
    }
    async fn volume(&self, _: &str) -> Result<Arc<api::PersistentVolume>, StorageError> {
        parsed(&self.volume)
    }
    async fn attachment(&self, _: &str) -> Result<Arc<VolumeAttachment>, StorageError> {
        Err(StorageError::NoClient)
    }
    async fn secret(&self, _: &str, _: &str) -> Result<std::collections::BTreeMap<String, Vec<u8>>, StorageError> {
        Err(StorageError::NoClient)
    }
    async fn driver(&self, _: &str) -> Result<Option<Arc<CSIDriver>>, StorageError> {
        Err(StorageError::NoClient)
    }
    async fn patch_claim(&self, _: &str, _: &str, _: String) -> Result<(), StorageError> {
        Err(StorageError::NoClient)
    }
    fn attached(&self) -> watch::Receiver<AttachedVolumes> {
        watch::channel(None).1
    }
    fn retry_signal(&self) -> watch::Receiver<u64> {
        watch::channel(0).1
    }
}

fn claim() -> Value {
    json!({"metadata": {"name": "c", "namespace": "ns", "uid": "cu"}, "spec": {"volumeName": "pv"},
        "status": {"phase": "Bound"}})
}

fn volume() -> Value {
    json!({"metadata": {"name": "pv"}, "spec": {"claimRef": {"uid": "cu"}, "volumeMode": "Filesystem"}})
}

fn with(mut object: Value, pointer: &str, value: Value) -> Value {
    let (parent, key) = pointer.rsplit_once('/').expect("a path");
    let parent = object.pointer_mut(parent).and_then(Value::as_object_mut).expect("a parent");
    if value.is_null() {
        parent.remove(key);
    } else {
        parent.insert(key.to_owned(), value);
    }
    object
}

async fn resolve_volume(
    volume: Value,
    container: Value,
    claim: Value,
    persistent: Value,
) -> Result<VolumeSpec, String> {
    let mut container = container;
    container["name"] = json!("main");
    let object = json!({"metadata": {"name": "p", "namespace": "ns", "uid": "u"},
        "spec": {"containers": [container], "volumes": [volume]}});
    let pod = Pod::new(serde_json::from_value(object).expect("a pod")).expect("complete");
    let volume = pod.spec().volumes().next().expect("a volume");
    resolve(&World { claim, volume: persistent }, &pod, &volume).await
}

fn named() -> Value {
    json!({"name": "v", "persistentVolumeClaim": {"claimName": "c", "readOnly": true}})
}

fn mounts() -> Value {
    json!({"volumeMounts": [{"name": "v", "mountPath": "/v"}]})
}

#[tokio::test]
async fn unusable_claims_fail_with_the_reason() {
    // AC-07-14
    let deleted = with(claim(), "/metadata/deletionTimestamp", json!("2026-01-01T00:00:00Z"));
    let protected = with(deleted.clone(), "/metadata/finalizers", json!([PROTECTION]));
    for (claim, persistent, expected) in [
        (Value::Null, volume(), "failed to fetch PVC from API server: not found"),
        (deleted, volume(), "PVC is being deleted"),
        (with(claim(), "/status/phase", json!("Pending")), volume(), "PVC is not bound"),
        (with(claim(), "/status/phase", Value::Null), volume(), "PVC is not bound"),
        (with(claim(), "/spec/volumeName", Value::Null), volume(), "PVC has empty pvc.Spec.VolumeName"),
        (claim(), Value::Null, "failed to fetch PV pv from API server: not found"),
        (
            claim(),
            with(volume(), "/spec/claimRef", Value::Null),
            "found PV object pv but it has a nil pv.Spec.ClaimRef indicating it is not yet bound to the claim",
        ),
        (
            claim(),
            with(volume(), "/spec/claimRef/uid", json!("x")),
            "found PV object pv but its pv.Spec.ClaimRef.UID x does not point to claim.UID cu",
        ),
    ] {
        let got = resolve_volume(named(), mounts(), claim, persistent).await.expect_err(expected);
        assert_eq!(got, format!("error processing PVC ns/c: {expected}"));
    }
    let spec = resolve_volume(named(), mounts(), protected, volume()).await.expect("still protected");
    assert_eq!((spec.name.as_str(), spec.read_only(), spec.claim()), ("pv", true, Some(("ns", "c"))));
}

#[tokio::test]
async fn a_volume_is_used_as_what_it_is() {
    let devices = json!({"volumeDevices": [{"name": "v", "devicePath": "/dev/v"}]});
    let block = || with(volume(), "/spec/volumeMode", json!("Block"));
    for (container, persistent, expected) in [
        (mounts(), with(volume(), "/spec/volumeMode", Value::Null), Some("cannot get volumeMode for volume: pv")),
        (mounts(), block(), Some("volume v has volumeMode Block, but is specified in volumeMounts")),
        (devices.clone(), volume(), Some("volume v has volumeMode Filesystem, but is specified in volumeDevices")),
        (devices, block(), None),
        (mounts(), volume(), None),
    ] {
        assert_eq!(resolve_volume(named(), container, claim(), persistent).await.err().as_deref(), expected);
    }
}

#[tokio::test]
async fn a_claim_made_for_a_pod_is_that_pods() {
    let ephemeral = || json!({"name": "v", "ephemeral": {}});
    let owned = |uid: &str| {
        with(
            claim(),
            "/metadata/ownerReferences",
            json!([{"apiVersion": "v1", "kind": "Pod", "name": "p", "uid": uid, "controller": true}]),
        )
    };
    resolve_volume(ephemeral(), mounts(), owned("u"), volume()).await.expect("its own");
    let other = resolve_volume(ephemeral(), mounts(), owned("other"), volume()).await.expect_err("another's");
    assert_eq!(other, "PVC ns/c was not created for pod ns/p (pod is not owner)");
    let missing = resolve_volume(ephemeral(), mounts(), Value::Null, volume()).await.expect_err("missing");
    assert_eq!(missing, "error processing PVC ns/p-v: failed to fetch PVC from API server: not found");
}

#[tokio::test]
async fn growth_is_from_the_claim_size_to_the_volume_size() {
    let sized = |claimed: Option<&str>, has: Option<&str>| {
        let claim = match claimed {
            Some(size) => with(claim(), "/status/capacity", json!({"storage": size})),
            None => claim(),
        };
        let volume = match has {
            Some(size) => with(volume(), "/spec/capacity", json!({"storage": size})),
            None => volume(),
        };
        resolve_volume(named(), mounts(), claim, volume)
    };
    for (claimed, has, expected) in [
        (Some("1Gi"), Some("2Gi"), Some((1 << 30, 2 << 30))),
        (Some("2Gi"), Some("2Gi"), None),
        (Some("3Gi"), Some("2Gi"), None),
        (None, Some("2Gi"), None),
        (Some("1Gi"), None, None),
    ] {
        let spec = sized(claimed, has).await.expect("resolved");
        assert_eq!(growth(&spec), expected);
    }
}

#[tokio::test]
async fn disks_of_clouds_are_volumes_of_drivers() {
    let disk = json!({"awsElasticBlockStore": {"volumeID": "vol-1"}, "claimRef": {"uid": "cu"},
        "volumeMode": "Filesystem"});
    let driver = |spec: &VolumeSpec| spec.volume().and_then(|of| of.csi.as_ref()).map(|csi| csi.driver.clone());
    let spec = resolve_volume(named(), mounts(), claim(), with(volume(), "/spec", disk)).await.expect("resolved");
    assert_eq!(driver(&spec).as_deref(), Some("ebs.csi.aws.com"));
    assert_eq!((spec.is_migrated, spec.name.as_str(), spec.claim()), (true, "pv", Some(("ns", "c"))));
    let own = json!({"name": "v", "azureDisk": {"diskName": "d", "diskURI": "/s/d", "readOnly": true}});
    let spec = resolve_volume(own, mounts(), claim(), volume()).await.expect("resolved");
    assert_eq!(driver(&spec).as_deref(), Some("disk.csi.azure.com"));
    assert_eq!((spec.is_migrated, spec.directory().as_str(), spec.read_only()), (true, "~s~d", true));
    let plain =
        resolve_volume(json!({"name": "v", "emptyDir": {}}), mounts(), claim(), volume()).await.expect("resolved");
    assert!(!plain.is_migrated && plain.as_inline().is_some());
}
