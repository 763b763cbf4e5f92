//! Volumes of pods: as they are kept, and what kind one is. Pure.

use serde::{Serialize, Serializer};

use super::api;

/// A volume as it is kept. The API's type has room for each of its thirty kinds, 3 KB in all, of which one is used.
#[derive(Clone, PartialEq, Debug)]
pub struct Volume {
    name: String,
    source: Source,
}

macro_rules! kept {
    ($($kind:ident: $member:ident of $source:ident,)*) => {
        #[derive(Clone, PartialEq, Debug)]
        enum Source {
            $($kind(Box<api::$source>),)*
            /// Any other, and what no server would take: none, or several. The name is not in it.
            Other(Box<api::Volume>),
        }

        impl From<api::Volume> for Volume {
            fn from(mut volume: api::Volume) -> Self {
                let name = std::mem::take(&mut volume.name);
                $(
                    if let Some(source) = volume.$member.take() {
                        if volume == api::Volume::default() {
                            return Self { name, source: Source::$kind(Box::new(source)) };
                        }
                        volume.$member = Some(source);
                    }
                )*
                Self { name, source: Source::Other(Box::new(volume)) }
            }
        }

        impl Volume {
            /// As the API has it (a deep copy).
            pub fn to_object(&self) -> api::Volume {
                let name = self.name.clone();
                match &self.source {
                    $(
                        Source::$kind(source) => {
                            api::Volume { name, $member: Some((**source).clone()), ..api::Volume::default() }
                        }
                    )*
                    Source::Other(volume) => api::Volume { name, ..(**volume).clone() },
                }
            }
        }
    };
}

kept! {
    ConfigMap: config_map of ConfigMapVolumeSource,
    Csi: csi of CSIVolumeSource,
    DownwardApi: downward_api of DownwardAPIVolumeSource,
    EmptyDir: empty_dir of EmptyDirVolumeSource,
    Ephemeral: ephemeral of EphemeralVolumeSource,
    HostPath: host_path of HostPathVolumeSource,
    Image: image of ImageVolumeSource,
    Nfs: nfs of NFSVolumeSource,
    PersistentVolumeClaim: persistent_volume_claim of PersistentVolumeClaimVolumeSource,
    Projected: projected of ProjectedVolumeSource,
    Secret: secret of SecretVolumeSource,
}

/// As the API writes it.
impl Serialize for Volume {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        self.to_object().serialize(serializer)
    }
}

/// The kinds a volume names, as the API spells them (`emptyDir`, `configMap`, …): one in a valid
/// pod, none or several in what a person wrote.
pub fn kinds(volume: &api::Volume) -> Vec<String> {
    // The API object has some thirty optional members; its own serialisation is their only list.
    match serde_json::to_value(volume) {
        Ok(serde_json::Value::Object(members)) => {
            members.into_iter().map(|(key, _)| key).filter(|key| key != "name").collect()
        }
        _ => Vec::new(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    #[test]
    fn kinds_are_the_members_that_are_set() {
        let kinds_of = |json: serde_json::Value| kinds(&serde_json::from_value(json).expect("a volume"));
        assert_eq!(kinds_of(json!({"name": "v"})), Vec::<String>::new());
        assert_eq!(kinds_of(json!({"name": "v", "emptyDir": {}})), ["emptyDir"]);
        assert_eq!(kinds_of(json!({"name": "v", "configMap": {}, "csi": {"driver": "d"}})), ["configMap", "csi"]);
    }

    #[test]
    fn a_volume_is_kept_as_what_it_is() {
        let token = json!({"serviceAccountToken": {"path": "token", "expirationSeconds": 3607}});
        let kept = |json: serde_json::Value| {
            let object: api::Volume = serde_json::from_value(json).expect("a volume");
            let kept = Volume::from(object.clone());
            assert_eq!(kept.to_object(), object);
            let text = serde_json::to_string(&kept).expect("JSON");
            assert_eq!(text, serde_json::to_string(&object).expect("JSON"));
            !matches!(kept.source, Source::Other(_))
        };
        for (json, is_lean) in [
            (json!({"name": "v", "configMap": {"name": "c", "defaultMode": 420}}), true),
            (json!({"name": "v", "projected": {"defaultMode": 420, "sources": [token]}}), true),
            (json!({"name": "v", "secret": {"secretName": "s", "optional": true}}), true),
            (json!({"name": "v", "emptyDir": {}}), true),
            (json!({"name": "v", "hostPath": {"path": "/"}}), true),
            (json!({"name": "v", "downwardAPI": {"items": []}}), true),
            (json!({"name": "v", "persistentVolumeClaim": {"claimName": "c"}}), true),
            (json!({"name": "v", "csi": {"driver": "d", "readOnly": true}}), true),
            (json!({"name": "v", "ephemeral": {}}), true),
            (json!({"name": "v", "image": {"reference": "r"}}), true),
            (json!({"name": "v", "nfs": {"path": "p", "server": "s"}}), true),
            (json!({"name": "v", "iscsi": {"iqn": "i", "lun": 1, "targetPortal": "t"}}), false),
            (json!({"name": "v"}), false),
            (json!({"name": "v", "emptyDir": {}, "hostPath": {"path": "/"}}), false),
            (json!({"name": "v", "nfs": {"path": "p", "server": "s"}, "rbd": {"image": "i", "monitors": []}}), false),
        ] {
            assert_eq!(kept(json.clone()), is_lean, "{json}");
        }
        assert!(size_of::<Volume>() <= 40, "{}", size_of::<Volume>());
    }
}
