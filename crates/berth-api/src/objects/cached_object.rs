//! Cached data of a ConfigMap or Secret: key-value pairs and version. Pure.
//!
//! There are thousands of these; the API types need a kilobyte even for an object without data.

use std::{collections::BTreeMap, marker::PhantomData};

use berth_types::api::{ConfigMap, Secret};

/// Cached ConfigMap or Secret.
#[derive(Debug)]
pub struct CachedObject<T> {
    uid: Box<str>,
    version: Box<str>,
    kind: Box<str>,
    items: Box<[Item]>,
    is_immutable: bool,
    of: PhantomData<fn() -> T>,
}

/// Key-value pair.
#[derive(Debug)]
struct Item {
    key: Box<str>,
    value: CachedValue,
}

#[derive(Debug)]
enum CachedValue {
    Text(Box<str>),
    Bytes(Box<[u8]>),
}

impl CachedValue {
    fn bytes(&self) -> &[u8] {
        match self {
            Self::Text(text) => text.as_bytes(),
            Self::Bytes(bytes) => bytes,
        }
    }
}

impl<T> CachedObject<T> {
    /// UID; empty if the server sent none.
    pub fn uid(&self) -> &str {
        &self.uid
    }

    /// `type` of a Secret; empty if unset.
    pub fn kind(&self) -> &str {
        &self.kind
    }

    /// Whether `immutable` is set.
    pub fn is_immutable(&self) -> bool {
        self.is_immutable
    }

    /// Whether both are the same version of the same object.
    pub fn is_same(&self, other: &Self) -> bool {
        !self.version.is_empty() && self.version == other.version && self.uid == other.uid
    }

    /// Whether this is an older version of the same object.
    pub fn is_older(&self, other: &Self) -> bool {
        let number = |object: &Self| object.version.parse::<u64>().unwrap_or(0);
        self.uid == other.uid && number(self) < number(other)
    }

    /// Value of a key.
    pub fn get(&self, key: &str) -> Option<&[u8]> {
        self.items.iter().find(|item| &*item.key == key).map(|item| item.value.bytes())
    }

    /// Values that are text (`data` of a ConfigMap).
    pub fn texts(&self) -> BTreeMap<String, String> {
        let text = |item: &Item| match &item.value {
            CachedValue::Text(text) => Some((item.key.to_string(), text.to_string())),
            CachedValue::Bytes(_) => None,
        };
        self.items.iter().filter_map(text).collect()
    }

    /// All values, as bytes.
    pub fn files(&self) -> BTreeMap<String, Vec<u8>> {
        self.items.iter().map(|item| (item.key.to_string(), item.value.bytes().to_vec())).collect()
    }
}

impl From<ConfigMap> for CachedObject<ConfigMap> {
    fn from(object: ConfigMap) -> Self {
        let texts = object.data.into_iter().flatten().map(|(key, value)| (key, CachedValue::Text(value.into())));
        let bytes = object.binary_data.into_iter().flatten();
        let bytes = bytes.map(|(key, value)| (key, CachedValue::Bytes(value.0.into())));
        Self {
            uid: boxed(object.metadata.uid),
            version: boxed(object.metadata.resource_version),
            kind: Box::default(),
            items: texts.chain(bytes).map(|(key, value)| Item { key: key.into(), value }).collect(),
            is_immutable: object.immutable == Some(true),
            of: PhantomData,
        }
    }
}

impl From<Secret> for CachedObject<Secret> {
    fn from(object: Secret) -> Self {
        let bytes = object.data.into_iter().flatten();
        Self {
            uid: boxed(object.metadata.uid),
            version: boxed(object.metadata.resource_version),
            kind: boxed(object.type_),
            items: bytes
                .map(|(key, value)| Item { key: key.into(), value: CachedValue::Bytes(value.0.into()) })
                .collect(),
            is_immutable: object.immutable == Some(true),
            of: PhantomData,
        }
    }
}

fn boxed(text: Option<String>) -> Box<str> {
    text.unwrap_or_default().into()
}

#[cfg(test)]
mod tests {
    use serde_json::{Value as Json, json};

    use super::*;

    fn config_map(more: &Json) -> CachedObject<ConfigMap> {
        let mut object = json!({"metadata": {"name": "a", "namespace": "ns", "uid": "u", "resourceVersion": "9"}});
        for (path, value) in more.as_object().into_iter().flatten() {
            match path.strip_prefix("metadata.") {
                Some(field) => object["metadata"][field] = value.clone(),
                None => object[path] = value.clone(),
            }
        }
        serde_json::from_value::<ConfigMap>(object).expect("a ConfigMap").into()
    }

    #[test]
    fn the_data_is_all_there() {
        let object = config_map(&json!({"data": {"k": "v", "b": "text"}, "binaryData": {"b": "AAE=", "c": ""}}));
        assert_eq!(object.texts(), [("k".into(), "v".into()), ("b".into(), "text".into())].into());
        // For a key in both `data` and `binaryData`, which the server rejects, the bytes win.
        let expected = [("b", &[0, 1][..]), ("c", &[]), ("k", b"v")].map(|(key, value)| (key.into(), value.to_vec()));
        assert_eq!(object.files(), expected.into());
        let secret = json!({"metadata": {"uid": "u"}, "type": "Opaque", "data": {"k": "AAE="}, "immutable": true});
        let secret: CachedObject<Secret> = serde_json::from_value::<Secret>(secret).expect("a Secret").into();
        assert_eq!((secret.kind(), secret.uid(), secret.get("k")), ("Opaque", "u", Some(&[0, 1][..])));
        assert!(secret.is_immutable() && secret.get("l").is_none() && secret.texts().is_empty());
        assert!(!object.is_immutable() && !config_map(&json!({"immutable": false})).is_immutable());
    }

    #[test]
    fn versions_are_compared() {
        let known = config_map(&json!({}));
        for (more, is_same, is_older) in [
            (json!({}), true, false),
            (json!({"metadata.resourceVersion": "10"}), false, true),
            (json!({"metadata.resourceVersion": "8"}), false, false),
            (json!({"metadata.uid": "v", "metadata.resourceVersion": "10"}), false, false),
            (json!({"metadata.uid": "v"}), false, false),
        ] {
            let other = config_map(&more);
            assert_eq!((known.is_same(&other), known.is_older(&other)), (is_same, is_older), "{more}");
        }
        let nameless = || config_map(&json!({"metadata.resourceVersion": ""}));
        assert!(!nameless().is_same(&nameless()), "what has no version may have changed");
    }
}
