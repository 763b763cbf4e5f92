//! Deserializer that skips `metadata.managedFields`. Pure.
//!
//! Managed fields are often half of an object and unused here. The API types would parse them into trees of values only
//! to drop them; this deserializer skips them as text. Implements spec 10 §8.4: memory.

use std::{borrow::Cow, fmt, marker::PhantomData};

use serde::{
    Deserialize, Deserializer,
    de::{DeserializeSeed, IgnoredAny, IntoDeserializer, MapAccess, Visitor, value::CowStrDeserializer},
    forward_to_deserialize_any,
};

/// Object deserialized without its managed fields.
#[derive(Debug)]
pub struct WithoutManagedFields<T>(pub T);

impl<'de, T: Deserialize<'de>> Deserialize<'de> for WithoutManagedFields<T> {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        T::deserialize(Sieve { inner: deserializer, depth: Depth::Object }).map(Self)
    }
}

#[derive(Clone, Copy, PartialEq, Eq)]
enum Depth {
    /// The object itself.
    Object,
    /// Value of the object's `metadata`, whose `managedFields` are skipped.
    Metadata,
}

/// Deserializer and visitor wrapper that drops the unwanted map entries of its depth.
struct Sieve<I> {
    inner: I,
    depth: Depth,
}

impl<'de, D: Deserializer<'de>> Deserializer<'de> for Sieve<D> {
    type Error = D::Error;

    fn deserialize_any<V: Visitor<'de>>(self, visitor: V) -> Result<V::Value, D::Error> {
        self.inner.deserialize_any(Sieve { inner: visitor, depth: self.depth })
    }

    fn deserialize_option<V: Visitor<'de>>(self, visitor: V) -> Result<V::Value, D::Error> {
        self.inner.deserialize_option(Sieve { inner: visitor, depth: self.depth })
    }

    forward_to_deserialize_any! {
        bool i8 i16 i32 i64 i128 u8 u16 u32 u64 u128 f32 f64 char str string bytes byte_buf unit
        unit_struct newtype_struct seq tuple tuple_struct map struct enum identifier ignored_any
    }
}

impl<'de, V: Visitor<'de>> Visitor<'de> for Sieve<V> {
    type Value = V::Value;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.inner.expecting(f)
    }

    fn visit_unit<E: serde::de::Error>(self) -> Result<V::Value, E> {
        self.inner.visit_unit()
    }

    fn visit_none<E: serde::de::Error>(self) -> Result<V::Value, E> {
        self.inner.visit_none()
    }

    fn visit_some<D: Deserializer<'de>>(self, deserializer: D) -> Result<V::Value, D::Error> {
        self.inner.visit_some(Sieve { inner: deserializer, depth: self.depth })
    }

    fn visit_map<A: MapAccess<'de>>(self, map: A) -> Result<V::Value, A::Error> {
        let map = Members { inner: map, depth: self.depth, at_metadata: false };
        self.inner.visit_map(map)
    }
}

struct Members<A> {
    inner: A,
    depth: Depth,
    /// Whether the next value is the metadata.
    at_metadata: bool,
}

#[derive(Deserialize)]
struct MemberKey<'a>(#[serde(borrow)] Cow<'a, str>);

impl<'de, A: MapAccess<'de>> MapAccess<'de> for Members<A> {
    type Error = A::Error;

    fn next_key_seed<K: DeserializeSeed<'de>>(&mut self, seed: K) -> Result<Option<K::Value>, A::Error> {
        while let Some(MemberKey(key)) = self.inner.next_key()? {
            if self.depth == Depth::Metadata && key == "managedFields" {
                self.inner.next_value::<IgnoredAny>()?;
                continue;
            }
            self.at_metadata = self.depth == Depth::Object && key == "metadata";
            let key: CowStrDeserializer<'de, A::Error> = key.into_deserializer();
            return seed.deserialize(key).map(Some);
        }
        Ok(None)
    }

    fn next_value_seed<S: DeserializeSeed<'de>>(&mut self, seed: S) -> Result<S::Value, A::Error> {
        if self.at_metadata {
            self.inner.next_value_seed(Metadata(seed, PhantomData))
        } else {
            self.inner.next_value_seed(seed)
        }
    }
}

struct Metadata<'de, S>(S, PhantomData<&'de ()>);

impl<'de, S: DeserializeSeed<'de>> DeserializeSeed<'de> for Metadata<'de, S> {
    type Value = S::Value;

    fn deserialize<D: Deserializer<'de>>(self, deserializer: D) -> Result<S::Value, D::Error> {
        self.0.deserialize(Sieve { inner: deserializer, depth: Depth::Metadata })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use berth_types::api;
    use serde_json::json;

    fn pod() -> serde_json::Value {
        json!({"apiVersion": "v1", "kind": "Pod", "metadata": {
            "name": "p", "labels": {"managedFields": "a label"}, "annotations": {"a\"b": "c\n"},
            "managedFields": [{"manager": "kubectl", "fieldsV1": {"f:spec": {"f:containers": {}}}}], "uid": "u"},
            "spec": {"containers": [{"name": "c", "env": [{"name": "metadata", "value": "managedFields"}]}]}, "more": 1})
    }

    #[test]
    fn only_managed_fields_are_lost() {
        let mut expected = pod();
        expected["metadata"].as_object_mut().expect("an object").remove("managedFields");
        let expected: api::Pod = serde_json::from_value(expected).expect("a pod");
        let WithoutManagedFields(read) =
            serde_json::from_str::<WithoutManagedFields<api::Pod>>(&pod().to_string()).expect("a pod");
        assert_eq!(read, expected);
        let WithoutManagedFields(whole) =
            serde_json::from_str::<WithoutManagedFields<serde_json::Value>>(&pod().to_string()).expect("a value");
        assert!(
            whole["metadata"].get("managedFields").is_none()
                && whole["metadata"]["labels"]["managedFields"] == "a label"
        );
    }

    #[test]
    fn what_lacks_metadata_is_read_too() {
        for text in [r#"{"kind":"Pod"}"#, r#"{"metadata":null}"#, r#"{"metadata":{}}"#] {
            assert!(serde_json::from_str::<WithoutManagedFields<api::Pod>>(text).is_ok(), "{text}");
        }
        for text in [r#"{"metadata":{"managedFields":"#, r#"{"metadata":[]}"#, "[]", "3", r#"{"kind":"Node"}"#] {
            assert!(serde_json::from_str::<WithoutManagedFields<api::Pod>>(text).is_err(), "{text}");
        }
    }
}
