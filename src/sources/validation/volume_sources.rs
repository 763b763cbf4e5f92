//! Validates volume sources of networks, clouds, and plugins. Pure.

use super::{
    field::{FieldErrors, Path},
    names_and_numbers::descending_path,
};
use berth_types::{api, names};

/// Error text of a partition out of range.
const PARTITION_RANGE: &str = "must be between 1 and 255, inclusive";
/// Error text of a logical unit number out of range.
const LUN_RANGE: &str = "must be between 0 and 255, inclusive";
/// Maximum length of volume name and portal of an iSCSI volume with an initiator name, in bytes.
const MAX_ISCSI_SESSION: usize = 64;
/// Maximum length of a CSI driver's name, in bytes.
const MAX_CSI_DRIVER: usize = 63;
/// Maximum length of a Quobyte volume's tenant, in bytes.
const MAX_QUOBYTE_TENANT: usize = 64;

/// Checks the volume sources that other machines serve.
pub fn check(one: &api::Volume, at: &Path, errors: &mut FieldErrors) {
    must_be_set(one, at, errors);
    if let Some(source) = one.nfs.as_ref().filter(|source| !source.path.is_empty() && !source.path.starts_with('/')) {
        errors.invalid(&at.child("nfs").child("path"), &source.path, "must be an absolute path");
    }
    if let Some(source) = one.git_repo.as_ref() {
        let directory = source.directory.as_deref().unwrap_or_default();
        descending_path(directory, &at.child("gitRepo").child("directory"), errors);
    }
    for (member, partition) in [
        ("gcePersistentDisk", one.gce_persistent_disk.as_ref().and_then(|source| source.partition)),
        ("awsElasticBlockStore", one.aws_elastic_block_store.as_ref().and_then(|source| source.partition)),
    ] {
        if let Some(partition) = partition.filter(|partition| !(0..=255).contains(partition)) {
            errors.invalid(&at.child(member).child("partition"), partition, PARTITION_RANGE);
        }
    }
    if let Some(source) = one.iscsi.as_ref() {
        iscsi(source, &one.name, at, errors);
    }
    if let Some(source) = one.fc.as_ref() {
        fibre_channel(source, &at.child("fc"), errors);
    }
    if let Some(source) = one.flocker.as_ref() {
        flocker(source, &at.child("flocker"), errors);
    }
    if let Some(source) = one.quobyte.as_ref() {
        quobyte(source, &at.child("quobyte"), errors);
    }
    if let Some(source) = one.flex_volume.as_ref() {
        for key in source.options.iter().flatten().map(|(key, _)| key) {
            let domain = key.split_once('/').map_or(key.as_str(), |(domain, _)| domain);
            let domain = format!(".{}", domain.to_lowercase());
            if domain.ends_with(".kubernetes.io") || domain.ends_with(".k8s.io") {
                let at = at.child("flexVolume").child("options").key(key);
                errors.invalid(&at, key, "kubernetes.io and k8s.io namespaces are reserved");
            }
        }
    }
    if let Some(source) = one.azure_disk.as_ref() {
        azure_disk(source, &at.child("azureDisk"), errors);
    }
    if let Some(source) = one.storageos.as_ref() {
        storage_os(source, &at.child("storageos"), errors);
    }
    if let Some(source) = one.csi.as_ref() {
        csi(source, &at.child("csi"), errors);
    }
}

/// Checks members that must not be empty.
fn must_be_set(one: &api::Volume, at: &Path, errors: &mut FieldErrors) {
    let text = |value: Option<&String>| value.is_some_and(|text| !text.is_empty());
    let mut members: Vec<(&str, &str, bool)> = Vec::new();
    let mut must = |source: &'static str, member: &'static str, is_set: bool| members.push((source, member, is_set));
    if let Some(s) = one.nfs.as_ref() {
        must("nfs", "server", text(Some(&s.server)));
        must("nfs", "path", text(Some(&s.path)));
    }
    if let Some(s) = one.git_repo.as_ref() {
        must("gitRepo", "repository", text(Some(&s.repository)));
    }
    if let Some(s) = one.gce_persistent_disk.as_ref() {
        must("gcePersistentDisk", "pdName", text(Some(&s.pd_name)));
    }
    if let Some(s) = one.aws_elastic_block_store.as_ref() {
        must("awsElasticBlockStore", "volumeID", text(Some(&s.volume_id)));
    }
    if let Some(s) = one.glusterfs.as_ref() {
        must("glusterfs", "endpoints", text(Some(&s.endpoints)));
        must("glusterfs", "path", text(Some(&s.path)));
    }
    if let Some(s) = one.persistent_volume_claim.as_ref() {
        must("persistentVolumeClaim", "claimName", text(Some(&s.claim_name)));
    }
    if let Some(s) = one.rbd.as_ref() {
        must("rbd", "monitors", !s.monitors.is_empty());
        must("rbd", "image", text(Some(&s.image)));
    }
    if let Some(s) = one.cinder.as_ref() {
        must("cinder", "volumeID", text(Some(&s.volume_id)));
        must("cinder", "secretRef.name", s.secret_ref.as_ref().is_none_or(|secret| !secret.name.is_empty()));
    }
    if let Some(s) = one.cephfs.as_ref() {
        must("cephfs", "monitors", !s.monitors.is_empty());
    }
    if let Some(s) = one.flex_volume.as_ref() {
        must("flexVolume", "driver", text(Some(&s.driver)));
    }
    if let Some(s) = one.azure_file.as_ref() {
        must("azureFile", "secretName", text(Some(&s.secret_name)));
        must("azureFile", "shareName", text(Some(&s.share_name)));
    }
    if let Some(s) = one.azure_disk.as_ref() {
        must("azureDisk", "diskName", text(Some(&s.disk_name)));
        must("azureDisk", "diskURI", text(Some(&s.disk_uri)));
    }
    if let Some(s) = one.vsphere_volume.as_ref() {
        must("vsphereVolume", "volumePath", text(Some(&s.volume_path)));
    }
    if let Some(s) = one.photon_persistent_disk.as_ref() {
        must("photonPersistentDisk", "pdID", text(Some(&s.pd_id)));
    }
    if let Some(s) = one.portworx_volume.as_ref() {
        must("portworxVolume", "volumeID", text(Some(&s.volume_id)));
    }
    if let Some(s) = one.scale_io.as_ref() {
        must("scaleIO", "gateway", text(Some(&s.gateway)));
        must("scaleIO", "system", text(Some(&s.system)));
        must("scaleIO", "volumeName", text(s.volume_name.as_ref()));
    }
    if let Some(s) = one.ephemeral.as_ref() {
        must("ephemeral", "volumeClaimTemplate", s.volume_claim_template.is_some());
    }
    for (source, member, _) in members.iter().filter(|(_, _, is_set)| !is_set) {
        errors.required(&at.child(source).child(member), "");
    }
}

fn iscsi(source: &api::ISCSIVolumeSource, volume: &str, at_volume: &Path, errors: &mut FieldErrors) {
    let at = at_volume.child("iscsi");
    if source.target_portal.is_empty() {
        errors.required(&at.child("targetPortal"), "");
    }
    if source.iqn.is_empty() {
        errors.required(&at.child("iqn"), "");
    } else {
        iscsi_name(&source.iqn, &at.child("iqn"), errors);
    }
    lun(source.lun, &at, errors);
    let needs_secret = source.chap_auth_discovery == Some(true) || source.chap_auth_session == Some(true);
    if needs_secret && source.secret_ref.is_none() {
        errors.required(&at.child("secretRef"), "");
    }
    if let Some(initiator) = source.initiator_name.as_deref() {
        iscsi_name(initiator, &at.child("initiatorName"), errors);
        if volume.len() + 1 + source.target_portal.len() > MAX_ISCSI_SESSION {
            let text = "Total length of <volume name>:<iscsi.targetPortal> must be under 64 characters if \
                        iscsi.initiatorName is specified.";
            errors.invalid(&at_volume.child("name"), volume, text);
        }
    }
}

/// Checks the name of an iSCSI target or initiator: `iqn.2001-04.com.example:disk`, or `eui.` or `naa.`
/// with digits.
fn iscsi_name(name: &str, at: &Path, errors: &mut FieldErrors) {
    let is_valid = match name.get(..3) {
        Some("iqn") => is_iqn(name),
        Some("eui") => has_digits(name, 16),
        Some("naa") => has_digits(name, 32),
        _ => {
            errors.invalid(at, name, "must be valid format starting with iqn, eui, or naa");
            return;
        }
    };
    if !is_valid {
        errors.invalid(at, name, "must be valid format");
    }
}

fn is_iqn(name: &str) -> bool {
    let Some((authority, target)) = name.strip_prefix("iqn.").and_then(|rest| rest.split_once(':')) else {
        return false;
    };
    let Some((date, authority)) = authority.split_once('.') else { return false };
    let is_date = |(i, b): (usize, u8)| if i == 4 { b == b'-' } else { b.is_ascii_digit() };
    date.len() == 7
        && date.bytes().enumerate().all(is_date)
        && !authority.is_empty()
        && authority.bytes().all(|b| b.is_ascii_alphanumeric() || matches!(b, b'-' | b'.'))
        && !target.is_empty()
        && !target.contains(|c: char| ",;*&$|".contains(c) || c.is_ascii_whitespace())
}

/// Whether exactly `count` letters and digits follow the three-letter prefix and one separator.
fn has_digits(name: &str, count: usize) -> bool {
    let mut rest = name.chars();
    let has_separator = rest.nth(3).is_some_and(|c| c != '\n');
    let digits = rest.as_str();
    has_separator && digits.len() == count && digits.bytes().all(|b| b.is_ascii_alphanumeric())
}

fn lun(number: i32, at: &Path, errors: &mut FieldErrors) {
    if !(0..=255).contains(&number) {
        errors.invalid(&at.child("lun"), number, LUN_RANGE);
    }
}

fn fibre_channel(source: &api::FCVolumeSource, at: &Path, errors: &mut FieldErrors) {
    let names = source.target_wwns.as_deref().unwrap_or_default();
    let has_ids = source.wwids.as_ref().is_some_and(|ids| !ids.is_empty());
    let at_names = at.child("targetWWNs");
    match (names.is_empty(), has_ids) {
        (true, false) => errors.required(&at_names, "must specify either targetWWNs or wwids, but not both"),
        (false, true) => {
            errors.invalid(&at_names, names, "targetWWNs and wwids can not be specified simultaneously");
        }
        _ => {}
    }
    match source.lun {
        _ if names.is_empty() => {}
        None => errors.required(&at.child("lun"), "lun is required if targetWWNs is specified"),
        Some(number) => lun(number, at, errors),
    }
}

fn flocker(source: &api::FlockerVolumeSource, at: &Path, errors: &mut FieldErrors) {
    let name = source.dataset_name.as_deref().unwrap_or_default();
    let has_uuid = source.dataset_uuid.as_ref().is_some_and(|uuid| !uuid.is_empty());
    match (name.is_empty(), has_uuid) {
        (true, false) => errors.required(at, "one of datasetName and datasetUUID is required"),
        (false, true) => {
            errors.invalid(at, "resource", "datasetName and datasetUUID can not be specified simultaneously");
        }
        _ => {}
    }
    if name.contains('/') {
        errors.invalid(&at.child("datasetName"), name, "must not contain '/'");
    }
}

fn quobyte(source: &api::QuobyteVolumeSource, at: &Path, errors: &mut FieldErrors) {
    let text = "must be a host:port pair or multiple pairs separated by commas";
    let tenant = source.tenant.as_deref().unwrap_or_default();
    if source.registry.is_empty() {
        errors.required(&at.child("registry"), text);
    } else if tenant.len() > MAX_QUOBYTE_TENANT {
        errors.required(&at.child("tenant"), "must be a UUID and may not exceed a length of 64 characters");
    } else if !source.registry.split(',').all(is_host_and_port) {
        errors.invalid(&at.child("registry"), &source.registry, text);
    }
    if source.volume.is_empty() {
        errors.required(&at.child("volume"), "");
    }
}

/// Whether the text is `host:port`, with an IPv6 address in brackets.
fn is_host_and_port(text: &str) -> bool {
    match text.strip_prefix('[') {
        Some(rest) => rest.split_once("]:").is_some_and(|(_, port)| !port.contains([':', '[', ']'])),
        None => text.matches(':').count() == 1 && !text.contains(['[', ']']),
    }
}

fn azure_disk(source: &api::AzureDiskVolumeSource, at: &Path, errors: &mut FieldErrors) {
    if let Some(mode) = source.caching_mode.as_deref() {
        errors.supported(&at.child("cachingMode"), mode, &["None", "ReadOnly", "ReadWrite"]);
    }
    // Default of the API.
    let kind = source.kind.as_deref().unwrap_or("Shared");
    errors.supported(&at.child("kind"), kind, &["Dedicated", "Managed", "Shared"]);
    let (start, example) = if kind == "Managed" {
        let example = "/subscriptions/{sub-id}/resourcegroups/{group-name}/providers/microsoft.compute/disks/{disk-id}";
        ("/subscriptions/", example)
    } else {
        ("https://", "https://{account-name}.blob.core.windows.net/{container-name}/{disk-name}.vhd")
    };
    if !source.disk_uri.starts_with(start) {
        errors.unsupported(&at.child("diskURI"), &source.disk_uri, &[example]);
    }
}

fn storage_os(source: &api::StorageOSVolumeSource, at: &Path, errors: &mut FieldErrors) {
    match source.volume_name.as_deref().unwrap_or_default() {
        "" => errors.required(&at.child("volumeName"), ""),
        name => errors.complaints(&at.child("volumeName"), name, names::dns_label(name)),
    }
    if let Some(namespace) = source.volume_namespace.as_deref().filter(|name| !name.is_empty()) {
        errors.complaints(&at.child("volumeNamespace"), namespace, names::dns_label(namespace));
    }
    if source.secret_ref.as_ref().is_some_and(|secret| secret.name.is_empty()) {
        errors.required(&at.child("secretRef").child("name"), "");
    }
}

fn csi(source: &api::CSIVolumeSource, at: &Path, errors: &mut FieldErrors) {
    let at_driver = at.child("driver");
    if source.driver.is_empty() {
        errors.required(&at_driver, "");
    } else {
        if source.driver.len() > MAX_CSI_DRIVER {
            errors.too_long(&at_driver, MAX_CSI_DRIVER);
        }
        errors.complaints(&at_driver, &source.driver, names::dns_subdomain(&source.driver.to_lowercase()));
    }
    if let Some(secret) = source.node_publish_secret_ref.as_ref() {
        let at = at.child("nodePublishSecretRef").child("name");
        match secret.name.as_str() {
            "" => errors.required(&at, ""),
            name => errors.complaints(&at, name, names::dns_subdomain(name)),
        }
    }
}
