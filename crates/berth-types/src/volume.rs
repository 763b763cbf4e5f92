//! Compact in-memory form of pod volumes, and their kinds. Pure.

use serde::{Serialize, Serializer};

use super::api;

/// A volume in compact form. The API type has a member for each of its thirty kinds, 3 KB in all, of which one is
/// used.
#[derive(Clone, PartialEq, Debug)]
pub struct Volume {
    name: String,
    source: CompactSource,
}

#[derive(Clone, PartialEq, Debug)]
enum CompactSource {
    Projected(Box<ProjectedVolume>),
    Plain(Plain),
}

/// A projected volume: every pod has one for its service account.
#[derive(Clone, PartialEq, Debug)]
struct ProjectedVolume {
    default_mode: Option<i32>,
    sources: Option<Box<[Projection]>>,
}

/// Generates an enum that stores an API object with a single set member as that member.
macro_rules! kept {
    ($object:ident as $kept:ident: $($kind:ident: $member:ident of $source:ident,)*) => {
        #[derive(Clone, PartialEq, Debug)]
        enum $kept {
            $($kind(Box<api::$source>),)*
            /// Any other kind, and objects that an API server would reject: no member, or several.
            Other(Box<api::$object>),
        }

        impl From<api::$object> for $kept {
            fn from(mut object: api::$object) -> Self {
                $(
                    if let Some(source) = object.$member.take() {
                        if object == api::$object::default() {
                            return Self::$kind(Box::new(source));
                        }
                        object.$member = Some(source);
                    }
                )*
                Self::Other(Box::new(object))
            }
        }

        impl $kept {
            fn to_object(&self) -> api::$object {
                match self {
                    $(
                        Self::$kind(source) => {
                            api::$object { $member: Some((**source).clone()), ..api::$object::default() }
                        }
                    )*
                    Self::Other(object) => (**object).clone(),
                }
            }
        }
    };
}

kept! {
    Volume as Plain:
    ConfigMap: config_map of ConfigMapVolumeSource,
    Csi: csi of CSIVolumeSource,
    DownwardApi: downward_api of DownwardAPIVolumeSource,
    EmptyDir: empty_dir of EmptyDirVolumeSource,
    Ephemeral: ephemeral of EphemeralVolumeSource,
    HostPath: host_path of HostPathVolumeSource,
    Image: image of ImageVolumeSource,
    Nfs: nfs of NFSVolumeSource,
    PersistentVolumeClaim: persistent_volume_claim of PersistentVolumeClaimVolumeSource,
    Secret: secret of SecretVolumeSource,
}

kept! {
    VolumeProjection as Projection:
    ConfigMap: config_map of ConfigMapProjection,
    DownwardApi: downward_api of DownwardAPIProjection,
    Secret: secret of SecretProjection,
    ServiceAccountToken: service_account_token of ServiceAccountTokenProjection,
}

impl From<api::ProjectedVolumeSource> for ProjectedVolume {
    fn from(source: api::ProjectedVolumeSource) -> Self {
        let sources = source.sources.map(|all| all.into_iter().map(Projection::from).collect());
        Self { default_mode: source.default_mode, sources }
    }
}

impl ProjectedVolume {
    fn to_object(&self) -> api::ProjectedVolumeSource {
        let sources = self.sources.as_ref().map(|all| all.iter().map(Projection::to_object).collect());
        api::ProjectedVolumeSource { default_mode: self.default_mode, sources }
    }
}

impl From<api::Volume> for Volume {
    fn from(mut volume: api::Volume) -> Self {
        let name = std::mem::take(&mut volume.name);
        let source = match volume.projected.take() {
            Some(projected) if volume == api::Volume::default() => CompactSource::Projected(Box::new(projected.into())),
            projected => CompactSource::Plain(api::Volume { projected, ..volume }.into()),
        };
        Self { name, source }
    }
}

impl Volume {
    /// Returns the API object (a deep copy).
    pub fn to_object(&self) -> api::Volume {
        let name = self.name.clone();
        match &self.source {
            CompactSource::Projected(source) => {
                api::Volume { name, projected: Some(source.to_object()), ..api::Volume::default() }
            }
            CompactSource::Plain(source) => api::Volume { name, ..source.to_object() },
        }
    }
}

/// Serializes as the API object.
impl Serialize for Volume {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        self.to_object().serialize(serializer)
    }
}

/// Returns the kinds of a volume in API spelling (`emptyDir`, `configMap`, …): one in a valid pod, none or several in
/// a manifest with errors.
pub fn kinds(volume: &api::Volume) -> Vec<String> {
    // The API object has some thirty optional members; its own serialization is their only list.
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
        let items = json!([{"key": "ca.crt", "path": "ca.crt"}]);
        let root = json!({"configMap": {"name": "kube-root-ca.crt", "items": items}});
        let field = json!({"path": "namespace", "fieldRef": {"apiVersion": "v1", "fieldPath": "metadata.namespace"}});
        let sources = json!([token, root, {"downwardAPI": {"items": [field]}}, {"secret": {"name": "s"}}]);
        let bundle = json!({"clusterTrustBundle": {"path": "p", "name": "b"}});
        let both = json!({"secret": {"name": "s"}, "configMap": {"name": "c"}});
        let kept = |json: serde_json::Value| {
            let object: api::Volume = serde_json::from_value(json).expect("a volume");
            let kept = Volume::from(object.clone());
            assert_eq!(kept.to_object(), object);
            let text = serde_json::to_string(&kept).expect("JSON");
            assert_eq!(text, serde_json::to_string(&object).expect("JSON"));
            !matches!(kept.source, CompactSource::Plain(Plain::Other(_)))
        };
        for (json, is_lean) in [
            (json!({"name": "v", "configMap": {"name": "c", "defaultMode": 420}}), true),
            (json!({"name": "v", "projected": {"defaultMode": 420, "sources": sources}}), true),
            (json!({"name": "v", "projected": {"sources": [bundle, both, {}]}}), true),
            (json!({"name": "v", "projected": {"sources": []}}), true),
            (json!({"name": "v", "projected": {}}), true),
            (json!({"name": "v", "projected": {}, "emptyDir": {}}), false),
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
        let sizes = [size_of::<Volume>(), size_of::<Projection>()];
        assert!(sizes[0] <= 40 && sizes[1] <= 16, "{sizes:?}");
    }
}
