//! CSI migration: translates in-tree cloud volume sources to those of their CSI drivers. Pure.
//!
//! Implements spec 07 §3.3; the mapping of fields is the drivers' contract.

use std::collections::BTreeMap;

use super::spec::Mode;
use berth_types::api;

mod zones;

const EBS: &str = "ebs.csi.aws.com";
const GCE: &str = "pd.csi.storage.gke.io";
const AZURE_DISK: &str = "disk.csi.azure.com";
const AZURE_FILE: &str = "file.csi.azure.com";
const CINDER: &str = "cinder.csi.openstack.org";
const VSPHERE: &str = "csi.vsphere.vmware.com";
const PORTWORX: &str = "pxd.portworx.com";

/// Placeholder for a value that the driver determines itself.
const UNSPECIFIED: &str = "UNSPECIFIED";
/// The only disk kind that the driver supports.
const MANAGED: &str = "Managed";
const RESOURCE_GROUP: &str = "kubernetes.io/azure-file-resource-group";
const PORTWORX_SECRET: (&str, &str) = ("openstorage.io/auth-secret-name", "openstorage.io/auth-secret-namespace");

type Csi = api::CSIPersistentVolumeSource;

/// Translates a persistent volume; `None` if it is of another type.
///
/// # Errors
/// If it has a value that the driver does not support.
pub fn persistent(volume: &api::PersistentVolume) -> Result<Option<api::PersistentVolume>, String> {
    let Some(csi) =
        volume.spec.as_ref().map(|spec| csi_source(volume, spec)).transpose().map_err(translation_error)?.flatten()
    else {
        return Ok(None);
    };
    let mut volume = volume.clone();
    zones::translate(&mut volume, &csi.driver);
    let spec = volume.spec.get_or_insert_default();
    if csi.driver == GCE {
        spec.access_modes = spec.access_modes.take().map(|modes| once(&modes));
    }
    *spec = api::PersistentVolumeSpec {
        aws_elastic_block_store: None,
        azure_disk: None,
        azure_file: None,
        cinder: None,
        csi: Some(csi),
        gce_persistent_disk: None,
        portworx_volume: None,
        vsphere_volume: None,
        ..std::mem::take(spec)
    };
    Ok(Some(volume))
}

fn translation_error(error: String) -> String {
    format!("failed to translate in-tree pv to CSI: {error}")
}

/// Returns the CSI source of a persistent volume.
fn csi_source(volume: &api::PersistentVolume, spec: &api::PersistentVolumeSpec) -> Result<Option<Csi>, String> {
    if let Some(source) = &spec.aws_elastic_block_store {
        return ebs(source).map(Some);
    }
    if let Some(source) = &spec.gce_persistent_disk {
        return Ok(Some(gce(source, &gce_place(volume)?)));
    }
    if let Some(source) = &spec.azure_disk {
        return azure_disk(source).map(Some);
    }
    if let Some(source) = &spec.azure_file {
        return azure_file(volume, spec, source).map(Some);
    }
    if let Some(source) = &spec.cinder {
        return Ok(Some(plain(CINDER, &source.volume_id, source.fs_type.as_ref(), source.read_only)));
    }
    if let Some(source) = &spec.vsphere_volume {
        return Ok(Some(vsphere(source)));
    }
    Ok(spec.portworx_volume.as_ref().map(|source| portworx(volume, source)))
}

/// Translates an inline volume; returns it with its read-only flag, or `None` if it is of another type. Pods that name
/// the same disk share the volume.
///
/// # Errors
/// If it has a value that the driver does not support, or its name cannot be a directory name.
pub fn inline(volume: &api::Volume, namespace: &str) -> Result<Option<(api::PersistentVolume, bool)>, String> {
    let Some((name, mode, csi)) = inline_csi_source(volume, namespace).map_err(translation_error)? else {
        return Ok(None);
    };
    let read_only = csi.read_only == Some(true);
    let spec = api::PersistentVolumeSpec {
        access_modes: Some(vec![mode.to_owned()]),
        csi: Some(csi),
        volume_mode: Some(Mode::Filesystem.as_str().to_owned()),
        ..api::PersistentVolumeSpec::default()
    };
    if !is_directory(&name) {
        return Err(translation_error(format!("{name:?} is not a valid directory name")));
    }
    let mut volume = api::PersistentVolume { spec: Some(spec), ..api::PersistentVolume::default() };
    volume.metadata.name = Some(name);
    Ok(Some((volume, read_only)))
}

/// Whether a name from a manifest, with its slashes escaped, is a single directory name.
fn is_directory(name: &str) -> bool {
    !matches!(name, "" | "." | "..") && name.len() <= 255 && !name.contains('\0')
}

/// Returns name, access mode, and CSI source of an inline volume.
fn inline_csi_source(volume: &api::Volume, namespace: &str) -> Result<Option<(String, &'static str, Csi)>, String> {
    const ONCE: &str = "ReadWriteOnce";
    let of_driver = |csi: Csi, mode| Some((format!("{}-{}", csi.driver, csi.volume_handle), mode, csi));
    let read = |read_only: Option<bool>| if read_only == Some(true) { "ReadOnlyMany" } else { ONCE };
    if let Some(source) = &volume.aws_elastic_block_store {
        return Ok(of_driver(ebs(source)?, ONCE));
    }
    if let Some(source) = &volume.gce_persistent_disk {
        let csi = gce(source, &format!("zones/{UNSPECIFIED}"));
        return Ok(Some((format!("{GCE}-{}", source.pd_name), read(source.read_only), csi)));
    }
    if let Some(source) = &volume.azure_disk {
        return Ok(Some((source.disk_uri.clone(), ONCE, azure_disk(source)?)));
    }
    if let Some(source) = &volume.azure_file {
        let namespace = if namespace.is_empty() { "default" } else { namespace };
        let (secret, share) = (&source.secret_name, &source.share_name);
        let csi = azure_share("", secret, namespace, share, &volume.name, source.read_only);
        return Ok(Some((csi.volume_handle.clone(), "ReadWriteMany", csi)));
    }
    if let Some(source) = &volume.cinder {
        return Ok(of_driver(plain(CINDER, &source.volume_id, source.fs_type.as_ref(), source.read_only), ONCE));
    }
    if let Some(source) = &volume.vsphere_volume {
        return Ok(of_driver(vsphere(source), ONCE));
    }
    let portworx = volume.portworx_volume.as_ref().and_then(|source| {
        let csi = plain(PORTWORX, &source.volume_id, source.fs_type.as_ref(), source.read_only);
        of_driver(csi, read(source.read_only))
    });
    Ok(portworx)
}

fn plain(driver: &str, handle: &str, fs_type: Option<&String>, read_only: Option<bool>) -> Csi {
    Csi {
        driver: driver.to_owned(),
        volume_handle: handle.to_owned(),
        fs_type: fs_type.cloned(),
        read_only,
        volume_attributes: Some(BTreeMap::new()),
        ..Csi::default()
    }
}

fn with(mut csi: Csi, key: &str, value: &str) -> Csi {
    csi.volume_attributes.get_or_insert_default().insert(key.to_owned(), value.to_owned());
    csi
}

fn ebs(source: &api::AWSElasticBlockStoreVolumeSource) -> Result<Csi, String> {
    let handle = ebs_handle(&source.volume_id)?;
    let partition = source.partition.unwrap_or_default().to_string();
    Ok(with(plain(EBS, handle, source.fs_type.as_ref(), source.read_only), "partition", &partition))
}

/// Returns the volume ID at the end of `aws://<zone>/vol-…` or `aws:///vol-…`.
fn ebs_handle(name: &str) -> Result<&str, String> {
    let Some(rest) = name.strip_prefix("aws://") else { return Ok(name) };
    let id = rest.split_once('/').map_or("", |(_, path)| path).trim_matches('/');
    if id.starts_with("vol-") && !id.contains('/') {
        return Ok(id);
    }
    Err(format!("failed to translate Kubernetes ID to EBS Volume ID Invalid format for AWS volume ({name})"))
}

fn gce(source: &api::GCEPersistentDiskVolumeSource, place: &str) -> Csi {
    let handle = format!("projects/{UNSPECIFIED}/{place}/disks/{}", source.pd_name);
    let partition = source.partition.filter(|number| *number != 0).map(|number| number.to_string());
    let csi = plain(GCE, &handle, source.fs_type.as_ref(), source.read_only);
    with(csi, "partition", &partition.unwrap_or_default())
}

/// Returns the zone in the volume's labels, or the region if there are several zones.
fn gce_place(volume: &api::PersistentVolume) -> Result<String, String> {
    let zones = zones::labelled(volume);
    match zones.as_slice() {
        [] | [""] => Ok(format!("zones/{UNSPECIFIED}")),
        [zone] => Ok(format!("zones/{zone}")),
        [first, others @ ..] => {
            let region = gce_region(first)?;
            for other in others {
                if gce_region(other)? != region {
                    return Err(format!(
                        "failed to get region from zones: multiple or no regions gotten from zones, got: {zones:?}"
                    ));
                }
            }
            Ok(format!("regions/{region}"))
        }
    }
}

fn gce_region(zone: &str) -> Result<&str, String> {
    let region = zone.rsplit_once('-').map(|(region, _)| region).filter(|region| region.matches('-').count() == 1);
    region.ok_or_else(|| {
        format!(
            "failed to get region from zones: zone in unexpected format, expected: {{locale}}-{{region}}-{{zone}}, got: {zone}"
        )
    })
}

/// Reduces the access modes: an in-tree disk was attached to one node, whatever its modes were.
fn once(modes: &[String]) -> Vec<String> {
    let is_written = modes.iter().any(|mode| mode == "ReadWriteOnce" || mode == "ReadWriteMany");
    let is_read = !is_written && modes.iter().any(|mode| mode == "ReadOnlyMany");
    vec![if is_read { "ReadOnlyMany" } else { "ReadWriteOnce" }.to_owned()]
}

fn azure_disk(source: &api::AzureDiskVolumeSource) -> Result<Csi, String> {
    if let Some(kind) = source.kind.as_ref().filter(|kind| !kind.eq_ignore_ascii_case(MANAGED)) {
        return Err(format!("kind({kind}) is not supported in csi migration"));
    }
    let mut csi = with(plain(AZURE_DISK, &source.disk_uri, source.fs_type.as_ref(), source.read_only), "kind", MANAGED);
    for (key, value) in [("cachingmode", &source.caching_mode), ("fstype", &source.fs_type)] {
        if let Some(value) = value.as_ref().filter(|value| !value.is_empty()) {
            csi = with(csi, key, value);
        }
    }
    Ok(csi)
}

fn azure_file(
    volume: &api::PersistentVolume,
    spec: &api::PersistentVolumeSpec,
    source: &api::AzureFilePersistentVolumeSource,
) -> Result<Csi, String> {
    let of_claim = || spec.claim_ref.as_ref().and_then(|claim| claim.namespace.clone());
    let namespace = source.secret_namespace.clone().or_else(of_claim).filter(|namespace| !namespace.is_empty());
    let namespace = namespace.ok_or("could not find a secret namespace in PersistentVolumeSource or ClaimRef")?;
    let annotations = volume.metadata.annotations.as_ref();
    let group = annotations.and_then(|all| all.get(RESOURCE_GROUP)).map(String::as_str).unwrap_or_default();
    let name = volume.metadata.name.as_deref().unwrap_or_default();
    Ok(azure_share(group, &source.secret_name, &namespace, &source.share_name, name, source.read_only))
}

fn azure_share(group: &str, secret: &str, namespace: &str, share: &str, name: &str, read_only: Option<bool>) -> Csi {
    let handle = format!("{group}#{}#{share}#{name}#{namespace}", azure_account(secret));
    let secret = api::SecretReference { name: Some(secret.to_owned()), namespace: Some(namespace.to_owned()) };
    let csi = Csi { node_stage_secret_ref: Some(secret), ..plain(AZURE_FILE, &handle, None, read_only) };
    with(csi, "sharename", share)
}

/// Returns the storage account: part of the secret's name, or the whole name.
fn azure_account(secret: &str) -> &str {
    let after = secret.split_once("azure-storage-account-").map(|(_, rest)| rest);
    let account = after.and_then(|rest| rest.rsplit_once("-secret")).map(|(account, _)| account);
    account.filter(|account| !account.is_empty()).unwrap_or(secret)
}

fn vsphere(source: &api::VsphereVirtualDiskVolumeSource) -> Csi {
    let csi = plain(VSPHERE, &source.volume_path, source.fs_type.as_ref(), None);
    match source.storage_policy_name.as_ref().filter(|name| !name.is_empty()) {
        Some(policy) => with(csi, "storagepolicyname", policy),
        None => csi,
    }
}

fn portworx(volume: &api::PersistentVolume, source: &api::PortworxVolumeSource) -> Csi {
    let annotation = |key: &str| volume.metadata.annotations.as_ref()?.get(key).cloned();
    let secret = annotation(PORTWORX_SECRET.0).zip(annotation(PORTWORX_SECRET.1));
    let secret = secret.map(|(name, space)| api::SecretReference { name: Some(name), namespace: Some(space) });
    Csi {
        controller_expand_secret_ref: secret.clone(),
        controller_publish_secret_ref: secret.clone(),
        node_expand_secret_ref: secret.clone(),
        node_publish_secret_ref: secret.clone(),
        node_stage_secret_ref: secret,
        ..plain(PORTWORX, &source.volume_id, source.fs_type.as_ref(), None)
    }
}

#[cfg(test)]
mod tests;
