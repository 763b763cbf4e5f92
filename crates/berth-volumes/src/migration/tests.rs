//! Translation of each in-tree volume type, and values that no driver supports.

use serde_json::{Value, json};

use super::*;

fn of_claim(object: Value) -> Result<Option<Value>, String> {
    let volume: api::PersistentVolume = serde_json::from_value(object).expect("a volume");
    let before = volume.clone();
    let translated = persistent(&volume)?;
    assert_eq!(volume, before);
    Ok(translated.map(|volume| serde_json::to_value(volume).expect("JSON")))
}

fn of_pod(object: Value) -> Result<Option<(Value, bool)>, String> {
    let volume = serde_json::from_value(object).expect("a volume");
    let translated = inline(&volume, "ns")?;
    Ok(translated.map(|(volume, read_only)| (serde_json::to_value(volume).expect("JSON"), read_only)))
}

#[test]
#[allow(clippy::too_many_lines, reason = "a table")]
fn volumes_of_claims_are_those_of_drivers() {
    type Row = (Value, Value, Value);
    let rows: [Row; 11] = [
        (
            json!({"awsElasticBlockStore": {"volumeID": "aws://us-east-1a/vol-1/", "fsType": "xfs", "readOnly": true}}),
            json!({}),
            json!({"driver": "ebs.csi.aws.com", "volumeHandle": "vol-1", "fsType": "xfs", "readOnly": true,
                "volumeAttributes": {"partition": "0"}}),
        ),
        (
            json!({"awsElasticBlockStore": {"volumeID": "vol-2", "partition": 3}}),
            json!({}),
            json!({"driver": "ebs.csi.aws.com", "volumeHandle": "vol-2", "volumeAttributes": {"partition": "3"}}),
        ),
        (
            json!({"gcePersistentDisk": {"pdName": "d"}}),
            json!({}),
            json!({"driver": "pd.csi.storage.gke.io", "volumeAttributes": {"partition": ""},
                "volumeHandle": "projects/UNSPECIFIED/zones/UNSPECIFIED/disks/d"}),
        ),
        (
            json!({"gcePersistentDisk": {"pdName": "d", "partition": 1}}),
            json!({"labels": {"topology.kubernetes.io/zone": "us-central1-a"}}),
            json!({"driver": "pd.csi.storage.gke.io", "volumeAttributes": {"partition": "1"},
                "volumeHandle": "projects/UNSPECIFIED/zones/us-central1-a/disks/d"}),
        ),
        (
            json!({"gcePersistentDisk": {"pdName": "d"}}),
            json!({"labels": {"failure-domain.beta.kubernetes.io/zone": "us-central1-a__us-central1-b",
                "topology.kubernetes.io/zone": "x"}}),
            json!({"driver": "pd.csi.storage.gke.io", "volumeAttributes": {"partition": ""},
                "volumeHandle": "projects/UNSPECIFIED/regions/us-central1/disks/d"}),
        ),
        (
            json!({"azureDisk": {"diskName": "d", "diskURI": "/subscriptions/s/d", "kind": "managed",
                "cachingMode": "None", "fsType": "ext4", "readOnly": false}}),
            json!({}),
            json!({"driver": "disk.csi.azure.com", "volumeHandle": "/subscriptions/s/d", "fsType": "ext4",
                "readOnly": false, "volumeAttributes": {"kind": "Managed", "cachingmode": "None", "fstype": "ext4"}}),
        ),
        (
            json!({"azureFile": {"secretName": "azure-storage-account-a-secret", "shareName": "s"},
                "claimRef": {"namespace": "of-claim"}}),
            json!({"annotations": {"kubernetes.io/azure-file-resource-group": "g"}}),
            json!({"driver": "file.csi.azure.com", "volumeHandle": "g#a#s#pv#of-claim",
                "nodeStageSecretRef": {"name": "azure-storage-account-a-secret", "namespace": "of-claim"},
                "volumeAttributes": {"sharename": "s"}}),
        ),
        (
            json!({"azureFile": {"secretName": "x", "secretNamespace": "own", "shareName": "s"},
                "claimRef": {"namespace": "of-claim"}}),
            json!({}),
            json!({"driver": "file.csi.azure.com", "volumeHandle": "#x#s#pv#own",
                "nodeStageSecretRef": {"name": "x", "namespace": "own"}, "volumeAttributes": {"sharename": "s"}}),
        ),
        (
            json!({"cinder": {"volumeID": "v", "fsType": "ext3"}}),
            json!({}),
            json!({"driver": "cinder.csi.openstack.org", "volumeHandle": "v", "fsType": "ext3", "volumeAttributes": {}}),
        ),
        (
            json!({"vsphereVolume": {"volumePath": "[ds] a/b.vmdk", "storagePolicyName": "gold"}}),
            json!({}),
            json!({"driver": "csi.vsphere.vmware.com", "volumeHandle": "[ds] a/b.vmdk",
                "volumeAttributes": {"storagepolicyname": "gold"}}),
        ),
        (
            json!({"portworxVolume": {"volumeID": "v", "readOnly": true}}),
            json!({"annotations": {"openstorage.io/auth-secret-name": "s",
                "openstorage.io/auth-secret-namespace": "n"}}),
            {
                let secret = json!({"name": "s", "namespace": "n"});
                json!({"driver": "pxd.portworx.com", "volumeHandle": "v", "volumeAttributes": {},
                    "controllerExpandSecretRef": secret, "controllerPublishSecretRef": secret,
                    "nodeExpandSecretRef": secret, "nodePublishSecretRef": secret, "nodeStageSecretRef": secret})
            },
        ),
    ];
    for (source, metadata, expected) in rows {
        let mut object = json!({"metadata": metadata, "spec": source});
        object["metadata"]["name"] = json!("pv");
        object["spec"]["capacity"] = json!({"storage": "1Gi"});
        let translated = of_claim(object).expect("translated").expect("of a cloud");
        assert_eq!(translated["spec"]["csi"], expected, "{source}");
        let left = translated["spec"].as_object().expect("members").keys();
        let left: Vec<&String> =
            left.filter(|key| !["capacity", "claimRef", "csi", "nodeAffinity"].contains(&key.as_str())).collect();
        assert!(left.is_empty(), "{left:?} of {source}");
    }
    for other in [json!({"nfs": {"server": "s", "path": "/"}}), json!({"csi": {"driver": "d", "volumeHandle": "h"}})] {
        assert_eq!(of_claim(json!({"metadata": {"name": "pv"}, "spec": other})), Ok(None));
    }
    assert_eq!(of_claim(json!({"metadata": {"name": "pv"}})), Ok(None));
}

#[test]
fn modes_are_those_of_one_node() {
    for (modes, expected) in [
        (json!(["ReadWriteMany"]), "ReadWriteOnce"),
        (json!(["ReadWriteOnce", "ReadOnlyMany"]), "ReadWriteOnce"),
        (json!(["ReadOnlyMany"]), "ReadOnlyMany"),
        (json!([]), "ReadWriteOnce"),
    ] {
        let disk = json!({"gcePersistentDisk": {"pdName": "d"}, "accessModes": modes});
        let translated = of_claim(json!({"metadata": {"name": "pv"}, "spec": disk})).expect("translated");
        assert_eq!(translated.expect("a disk")["spec"]["accessModes"], json!([expected]), "{modes}");
    }
    let disk = json!({"cinder": {"volumeID": "d"}, "accessModes": ["ReadWriteMany"]});
    let translated = of_claim(json!({"metadata": {"name": "pv"}, "spec": disk})).expect("translated");
    assert_eq!(translated.expect("a disk")["spec"]["accessModes"], json!(["ReadWriteMany"]));
}

#[test]
fn zones_are_those_of_drivers() {
    let (new, old) = ("topology.kubernetes.io", "failure-domain.beta.kubernetes.io");
    let required = |key: String| json!([{"matchExpressions": [{"key": key, "operator": "In", "values": ["z"]}]}]);
    let (ebs, vsphere) =
        (json!({"awsElasticBlockStore": {"volumeID": "v"}}), json!({"vsphereVolume": {"volumePath": "p"}}));
    let labelled =
        |generation: &str| json!({format!("{generation}/zone"): "b__a__ ", format!("{generation}/region"): "r"});
    let one = |key: &str, values: Value| json!({"key": key, "operator": "In", "values": values});
    let driver = "topology.ebs.csi.aws.com/zone";
    let rows = [
        (&ebs, json!({}), required(format!("{new}/zone")), required(driver.to_owned())),
        (&ebs, labelled(new), required(format!("{old}/zone")), required(driver.to_owned())),
        (&ebs, labelled(old), json!([]), json!([{"matchExpressions": [one(driver, json!(["a", "b"]))]}])),
        (
            &ebs,
            labelled(new),
            json!([{"matchFields": []}, {"matchExpressions": [one("x", json!(["y"]))]}]),
            json!([{"matchExpressions": [one(driver, json!(["a", "b"]))], "matchFields": []},
                {"matchExpressions": [one("x", json!(["y"])), one(driver, json!(["a", "b"]))]}]),
        ),
        (
            &ebs,
            json!({}),
            json!([{"matchExpressions": [one(&format!("{old}/zone"), json!(["z"])), one(&format!("{old}/region"), json!(["r"]))]}]),
            json!([{"matchExpressions": [one(driver, json!(["z"])), one(&format!("{new}/region"), json!(["r"]))]}]),
        ),
        (
            &vsphere,
            labelled(new),
            json!([]),
            json!([{"matchExpressions": [one("topology.csi.vmware.com/zone", json!(["b__a__"])),
                one("topology.csi.vmware.com/region", json!(["r"]))]}]),
        ),
    ];
    for (source, labels, terms, expected) in rows {
        let mut spec = source.clone();
        if terms != json!([]) {
            spec["nodeAffinity"] = json!({"required": {"nodeSelectorTerms": terms}});
        }
        let object = json!({"metadata": {"name": "pv", "labels": labels}, "spec": spec});
        let translated = of_claim(object).expect("translated").expect("of a cloud");
        assert_eq!(translated["spec"]["nodeAffinity"]["required"]["nodeSelectorTerms"], expected, "{source} {terms}");
    }
    let plain = json!({"metadata": {"name": "pv"}, "spec": ebs});
    assert_eq!(of_claim(plain).expect("translated").expect("a disk")["spec"]["nodeAffinity"], json!(null));
}

#[test]
fn volumes_of_pods_are_those_of_drivers() {
    let rows = [
        (
            json!({"awsElasticBlockStore": {"volumeID": "aws:///vol-1"}}),
            "ebs.csi.aws.com-vol-1",
            "ReadWriteOnce",
            "vol-1",
        ),
        (
            json!({"gcePersistentDisk": {"pdName": "d"}}),
            "pd.csi.storage.gke.io-d",
            "ReadWriteOnce",
            "projects/UNSPECIFIED/zones/UNSPECIFIED/disks/d",
        ),
        (
            json!({"gcePersistentDisk": {"pdName": "d", "readOnly": true}}),
            "pd.csi.storage.gke.io-d",
            "ReadOnlyMany",
            "projects/UNSPECIFIED/zones/UNSPECIFIED/disks/d",
        ),
        (json!({"azureDisk": {"diskName": "d", "diskURI": "/s/d"}}), "/s/d", "ReadWriteOnce", "/s/d"),
        (json!({"azureFile": {"secretName": "x", "shareName": "s"}}), "#x#s#v#ns", "ReadWriteMany", "#x#s#v#ns"),
        (json!({"cinder": {"volumeID": "c"}}), "cinder.csi.openstack.org-c", "ReadWriteOnce", "c"),
        (
            json!({"vsphereVolume": {"volumePath": "[ds] a"}}),
            "csi.vsphere.vmware.com-[ds] a",
            "ReadWriteOnce",
            "[ds] a",
        ),
        (json!({"portworxVolume": {"volumeID": "p", "readOnly": true}}), "pxd.portworx.com-p", "ReadOnlyMany", "p"),
    ];
    for (source, name, mode, handle) in rows {
        let is_read = source.to_string().contains("readOnly");
        let mut volume = source.clone();
        volume["name"] = json!("v");
        let (translated, read_only) = of_pod(volume).expect("translated").expect("of a cloud");
        assert_eq!((&translated["metadata"]["name"], read_only), (&json!(name), is_read), "{source}");
        let spec = &translated["spec"];
        assert_eq!((&spec["accessModes"], &spec["volumeMode"]), (&json!([mode]), &json!("Filesystem")), "{source}");
        assert_eq!(spec["csi"]["volumeHandle"], json!(handle), "{source}");
    }
    assert_eq!(of_pod(json!({"name": "v", "emptyDir": {}})), Ok(None));
}

#[test]
fn untranslatable_volumes_are_rejected() {
    let claim = |spec: Value, labels: Value| {
        of_claim(json!({"metadata": {"name": "pv", "labels": labels}, "spec": spec})).expect_err("refused")
    };
    let prefix = "failed to translate in-tree pv to CSI: ";
    for (spec, labels, expected) in [
        (
            json!({"awsElasticBlockStore": {"volumeID": "aws://z/disk"}}),
            json!({}),
            "failed to translate Kubernetes ID to EBS Volume ID Invalid format for AWS volume (aws://z/disk)",
        ),
        (
            json!({"gcePersistentDisk": {"pdName": "d"}}),
            json!({"topology.kubernetes.io/zone": "a__b"}),
            "failed to get region from zones: zone in unexpected format, expected: {locale}-{region}-{zone}, got: a",
        ),
        (
            json!({"gcePersistentDisk": {"pdName": "d"}}),
            json!({"topology.kubernetes.io/zone": "a-b-c__d-e-f"}),
            "failed to get region from zones: multiple or no regions gotten from zones, got: [\"a-b-c\", \"d-e-f\"]",
        ),
        (
            json!({"azureDisk": {"diskName": "d", "diskURI": "u", "kind": "Dedicated"}}),
            json!({}),
            "kind(Dedicated) is not supported in csi migration",
        ),
        (
            json!({"azureFile": {"secretName": "x", "shareName": "s"}}),
            json!({}),
            "could not find a secret namespace in PersistentVolumeSource or ClaimRef",
        ),
    ] {
        assert_eq!(claim(spec, labels), format!("{prefix}{expected}"));
    }
    for uri in ["", ".", "..", "a\0b", &"x".repeat(300)] {
        let refused = of_pod(json!({"name": "v", "azureDisk": {"diskName": "d", "diskURI": uri}}));
        assert_eq!(refused, Err(format!("{prefix}{uri:?} is not a valid directory name")));
    }
}
