//! Table tests of volume sources.

use serde_json::{Value, json};

use super::{spec_refused, volume_refused};

#[test]
fn of_several_types_the_first_counts() {
    volume_refused(
        json!({"configMap": {"name": "m"}, "emptyDir": {}}),
        &["configMap: Forbidden: may not specify more than 1 volume type"],
    );
    spec_refused(json!({"volumes": [{"name": "", "emptyDir": {}}]}), &["volumes[0].name: Required value"]);
    volume_refused(
        json!({"image": {"reference": "b", "pullPolicy": "X"}}),
        &["image.pullPolicy: Unsupported value: \"X\": supported values: \"Always\", \"IfNotPresent\", \"Never\""],
    );
}

#[test]
fn files_of_objects() {
    let items = |key: &str, path: &str| json!([{"key": key, "path": path, "mode": 512}]);
    let mode = "mode: Invalid value: 512: must be a number between 0 and 0777 (octal), both inclusive";
    for (member, name) in [("configMap", "name"), ("secret", "secretName")] {
        volume_refused(json!({member: {}}), &[&format!("{member}.{name}: Required value")]);
        volume_refused(
            json!({member: {name: "a", "defaultMode": -1, "items": items("", "")}}),
            &[
                &format!("{member}.defaultMode: Invalid value: -1: must be a number between 0 and 0777"),
                &format!("{member}.items[0].key: Required value"),
                &format!("{member}.items[0].path: Required value"),
                &format!("{member}.items[0].{mode}"),
            ],
        );
    }
    for member in ["configMap", "secret"] {
        volume_refused(
            json!({"projected": {"sources": [{member: {"name": "", "items": items("k", "/a")}}]}}),
            &[
                &format!("projected.sources[0].{member}.name: Required value"),
                &format!("projected.sources[0].{member}.items[0].path: Invalid value: \"/a\": must be a relative path"),
                &format!("projected.sources[0].{member}.items[0].{mode}"),
            ],
        );
    }
}

#[test]
fn files_of_the_downward_api() {
    let check = |item: Value, texts: &[&str]| {
        let texts: Vec<String> = texts.iter().map(|text| format!("downwardAPI.items[0]{text}")).collect();
        let texts: Vec<&str> = texts.iter().map(String::as_str).collect();
        volume_refused(json!({"downwardAPI": {"items": [item]}}), &texts);
    };
    let resource = json!({"containerName": "c", "resource": "limits.cpu"});
    check(json!({"path": "a", "resourceFieldRef": resource}), &[]);
    check(json!({"path": "a", "fieldRef": {"fieldPath": "metadata.labels"}}), &[]);
    check(json!({"path": "", "resourceFieldRef": resource}), &[".path: Required value"]);
    check(
        json!({"path": "a", "resourceFieldRef": {"resource": "limits.cpu"}}),
        &[".resourceFieldRef.containerName: Required value"],
    );
    check(
        json!({"path": "a", "fieldRef": {"fieldPath": "spec.host"}}),
        &[".fieldRef.fieldPath: Unsupported value: \"spec.nodeName\": supported values: \"metadata.annotations\""],
    );
    check(
        json!({"path": "a", "fieldRef": {"fieldPath": "metadata.name"}, "resourceFieldRef": resource}),
        &[": Invalid value: \"resource\": fieldRef and resourceFieldRef can not be specified simultaneously"],
    );
}

#[test]
fn projected_sources() {
    let check = |sources: Value, texts: &[&str]| {
        let texts: Vec<String> = texts.iter().map(|text| format!("projected.{text}")).collect();
        let texts: Vec<&str> = texts.iter().map(String::as_str).collect();
        volume_refused(json!({"projected": {"sources": sources}}), &texts);
    };
    let account = "sources[0].serviceAccountToken: Forbidden: must not be specified when serviceAccountName is not set";
    check(json!([{"serviceAccountToken": {"path": "t"}}]), &[account]);
    let at = "sources[0].serviceAccountToken.expirationSeconds: Invalid value:";
    check(
        json!([{"serviceAccountToken": {"path": "t", "expirationSeconds": 599}}]),
        &[&format!("{at} 599: may not specify a duration less than 10 minutes"), account],
    );
    check(
        json!([{"serviceAccountToken": {"path": "", "expirationSeconds": 4_294_967_297_i64}}]),
        &[
            &format!("{at} 4294967297: may not specify a duration larger than 2^32 seconds"),
            "sources[0].serviceAccountToken.path: Required value",
            account,
        ],
    );
    check(
        json!([{"downwardAPI": {}, "secret": {"name": "s"}}]),
        &["sources[0]: Forbidden: may not specify more than 1 volume type per source"],
    );
    volume_refused(
        json!({"projected": {"defaultMode": 512, "sources": []}}),
        &["projected.defaultMode: Invalid value: 512: must be a number between 0 and 0777"],
    );
    let item = json!({"items": [{"key": "k", "path": "a"}], "name": "m"});
    volume_refused(
        json!({"projected": {"sources": [{"configMap": item}, {"secret": item}]}}),
        &["projected: Invalid value: \"m\": conflicting duplicate paths"],
    );
    check(json!([{"serviceAccountToken": {"path": "a"}}, {"configMap": item}]), &[account]);
}

#[test]
fn members_that_must_be_set() {
    for (source, member) in [
        (json!({"nfs": {"path": "/p"}}), "nfs.server"),
        (json!({"nfs": {"server": "s"}}), "nfs.path"),
        (json!({"gitRepo": {}}), "gitRepo.repository"),
        (json!({"gcePersistentDisk": {}}), "gcePersistentDisk.pdName"),
        (json!({"awsElasticBlockStore": {}}), "awsElasticBlockStore.volumeID"),
        (json!({"glusterfs": {"path": "p"}}), "glusterfs.endpoints"),
        (json!({"glusterfs": {"endpoints": "e"}}), "glusterfs.path"),
        (json!({"persistentVolumeClaim": {}}), "persistentVolumeClaim.claimName"),
        (json!({"rbd": {"image": "i"}}), "rbd.monitors"),
        (json!({"rbd": {"monitors": ["m"]}}), "rbd.image"),
        (json!({"cinder": {}}), "cinder.volumeID"),
        (json!({"cinder": {"volumeID": "v", "secretRef": {}}}), "cinder.secretRef.name"),
        (json!({"cephfs": {}}), "cephfs.monitors"),
        (json!({"flexVolume": {}}), "flexVolume.driver"),
        (json!({"azureFile": {"shareName": "s"}}), "azureFile.secretName"),
        (json!({"azureFile": {"secretName": "s"}}), "azureFile.shareName"),
        (json!({"azureDisk": {"diskURI": "https://a"}}), "azureDisk.diskName"),
        (json!({"vsphereVolume": {}}), "vsphereVolume.volumePath"),
        (json!({"photonPersistentDisk": {}}), "photonPersistentDisk.pdID"),
        (json!({"portworxVolume": {}}), "portworxVolume.volumeID"),
        (json!({"scaleIO": {"system": "s", "volumeName": "v"}}), "scaleIO.gateway"),
        (json!({"scaleIO": {"gateway": "g", "volumeName": "v"}}), "scaleIO.system"),
        (json!({"scaleIO": {"gateway": "g", "system": "s"}}), "scaleIO.volumeName"),
        (json!({"storageos": {}}), "storageos.volumeName"),
        (json!({"storageos": {"volumeName": "v", "secretRef": {}}}), "storageos.secretRef.name"),
        (json!({"csi": {}}), "csi.driver"),
        (json!({"csi": {"driver": "d", "nodePublishSecretRef": {}}}), "csi.nodePublishSecretRef.name"),
        (json!({"ephemeral": {}}), "ephemeral.volumeClaimTemplate"),
        (json!({"iscsi": {"iqn": "iqn.2001-04.com.example:a"}}), "iscsi.targetPortal"),
        (json!({"iscsi": {"targetPortal": "t"}}), "iscsi.iqn"),
        (json!({"quobyte": {"volume": "v"}}), "quobyte.registry"),
        (json!({"quobyte": {"registry": "r:1"}}), "quobyte.volume"),
        (json!({"fc": {}}), "fc.targetWWNs"),
        (json!({"fc": {"targetWWNs": ["w"]}}), "fc.lun"),
        (json!({"flocker": {}}), "flocker"),
    ] {
        volume_refused(source, &[&format!("{member}: Required value")]);
    }
}

#[test]
fn sources_of_networks_and_clouds() {
    for source in [
        json!({"gcePersistentDisk": {"pdName": "d", "partition": 255}}),
        json!({"fc": {"targetWWNs": ["w"], "lun": 0}}),
        json!({"fc": {"wwids": ["w"]}}),
        json!({"flocker": {"datasetName": "d"}}),
        json!({"quobyte": {"registry": "r:1,[::1]:2", "volume": "v"}}),
        json!({"azureDisk": {"diskName": "d", "diskURI": "/subscriptions/s", "kind": "Managed"}}),
        json!({"csi": {"driver": "Example.com"}}),
        json!({"flexVolume": {"driver": "d", "options": {"example.com/a": "b"}}}),
    ] {
        volume_refused(source, &[]);
    }
    for (source, text) in [
        (
            json!({"gitRepo": {"repository": "r", "directory": "../a"}}),
            "gitRepo.directory: Invalid value: \"../a\": must not contain '..'",
        ),
        (
            json!({"awsElasticBlockStore": {"volumeID": "v", "partition": 256}}),
            "awsElasticBlockStore.partition: Invalid value: 256: must be between 1 and 255, inclusive",
        ),
        (
            json!({"fc": {"targetWWNs": ["w"], "lun": 256}}),
            "fc.lun: Invalid value: 256: must be between 0 and 255, inclusive",
        ),
        (
            json!({"fc": {"targetWWNs": ["w"], "lun": 0, "wwids": ["i"]}}),
            "fc.targetWWNs: Invalid value: [\"w\"]: targetWWNs and wwids can not be specified simultaneously",
        ),
        (
            json!({"flocker": {"datasetName": "d", "datasetUUID": "u"}}),
            "flocker: Invalid value: \"resource\": datasetName and datasetUUID can not be specified simultaneously",
        ),
        (
            json!({"flocker": {"datasetName": "a/b"}}),
            "flocker.datasetName: Invalid value: \"a/b\": must not contain '/'",
        ),
        (
            json!({"quobyte": {"registry": "r", "volume": "v"}}),
            "quobyte.registry: Invalid value: \"r\": must be a host:port pair or multiple pairs separated by commas",
        ),
        (
            json!({"quobyte": {"registry": "r:1", "volume": "v", "tenant": "t".repeat(65)}}),
            "quobyte.tenant: Required value: must be a UUID and may not exceed a length of 64 characters",
        ),
        (
            json!({"flexVolume": {"driver": "d", "options": {"A.K8s.io/x": "y"}}}),
            "flexVolume.options[A.K8s.io/x]: Invalid value: \"A.K8s.io/x\": kubernetes.io and k8s.io namespaces are reserved",
        ),
        (
            json!({"azureDisk": {"diskName": "d", "diskURI": "https://a", "cachingMode": "X"}}),
            "azureDisk.cachingMode: Unsupported value: \"X\": supported values: \"None\", \"ReadOnly\", \"ReadWrite\"",
        ),
        (
            json!({"azureDisk": {"diskName": "d", "diskURI": "https://a", "kind": "X"}}),
            "azureDisk.kind: Unsupported value: \"X\": supported values: \"Dedicated\", \"Managed\", \"Shared\"",
        ),
        (
            json!({"azureDisk": {"diskName": "d", "diskURI": "https://a", "kind": "Managed"}}),
            "azureDisk.diskURI: Unsupported value: \"https://a\": supported values: \"/subscriptions/{sub-id}/",
        ),
        (
            json!({"azureDisk": {"diskName": "d", "diskURI": "/a"}}),
            "azureDisk.diskURI: Unsupported value: \"/a\": supported values: \"https://{account-name}.blob",
        ),
        (json!({"storageos": {"volumeName": "A"}}), "storageos.volumeName: Invalid value: \"A\": a lowercase RFC 1123"),
        (
            json!({"storageos": {"volumeName": "a", "volumeNamespace": "A"}}),
            "storageos.volumeNamespace: Invalid value: \"A\": a lowercase RFC 1123",
        ),
        (json!({"csi": {"driver": "a_b"}}), "csi.driver: Invalid value: \"a_b\": a lowercase RFC 1123 subdomain"),
        (json!({"csi": {"driver": "a".repeat(64)}}), "csi.driver: Too long: may not be more than 63 bytes"),
        (
            json!({"csi": {"driver": "d", "nodePublishSecretRef": {"name": "A"}}}),
            "csi.nodePublishSecretRef.name: Invalid value: \"A\": a lowercase RFC 1123 subdomain",
        ),
    ] {
        volume_refused(source, &[text]);
    }
}

#[test]
fn iscsi() {
    let check = |changes: Value, texts: &[&str]| {
        let mut source = json!({"targetPortal": "10.0.0.1", "iqn": "iqn.2001-04.com.example:disk1", "lun": 0});
        super::merge(&mut source, changes);
        volume_refused(json!({"iscsi": source}), texts);
    };
    for name in ["iqn.2001-04.com.example:a:b", "eui.0123456789abcdef", "naa.0123456789abcdef0123456789abcdef"] {
        check(json!({"iqn": name, "initiatorName": name}), &[]);
    }
    for name in ["iqn.2001-04.com", "iqn.200-04.com:a", "iqn.2001-04.com:a b", "eui.0", "naa.0123456789abcdef"] {
        let text = format!("iscsi.iqn: Invalid value: \"{name}\": must be valid format");
        check(json!({"iqn": name}), &[&text]);
    }
    check(
        json!({"iqn": "disk"}),
        &["iscsi.iqn: Invalid value: \"disk\": must be valid format starting with iqn, eui, or naa"],
    );
    check(json!({"initiatorName": "eui.0"}), &["iscsi.initiatorName: Invalid value: \"eui.0\": must be valid format"]);
    check(json!({"lun": 256}), &["iscsi.lun: Invalid value: 256: must be between 0 and 255, inclusive"]);
    check(json!({"chapAuthSession": true}), &["iscsi.secretRef: Required value"]);
    check(
        json!({"initiatorName": "eui.0123456789abcdef", "targetPortal": "p".repeat(63)}),
        &["name: Invalid value: \"v\": Total length of <volume name>:<iscsi.targetPortal> must be under 64 characters"],
    );
}
