//! Decodes a JSON value into a typed value with the semantics of Go's JSON library. Pure.
//!
//! Works for any `Deserialize` type, so the structs of `fields` are the only schema. Beside the value it reports the
//! fields that the type does not have (strict errors), and the fields that were present, so that defaulting distinguishes
//! "unset" from "zero". A `null` counts as absent. Type errors have the reference's texts (spec 01 §3.2).

use std::{cell::RefCell, collections::BTreeSet, fmt};

use serde::{
    Deserializer,
    de::{self, DeserializeOwned, DeserializeSeed, Visitor},
    forward_to_deserialize_any,
};
use serde_json::{Map, Value};

use berth_types::go_duration::DURATION_TYPE;

use super::{
    document::MAX_STRICT_ERRORS,
    fields::{FLUSH_FREQUENCY_TYPE, QUANTITY_TYPE},
    text::excerpt,
};

/// Maximum number of unknown fields for which the nearest known one is searched; a document with more is of another
/// type altogether.
const HINTS: usize = 50;

/// Matching of field names.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Names {
    /// Exact: the main file.
    Exact,
    /// Case-insensitive: merged drop-ins.
    AnyCase,
}

/// Result of a decoding.
#[derive(Debug)]
pub struct DecodedValue<T> {
    /// The value; fields absent from the document are zero.
    pub value: T,
    /// Fields of the document that the type does not have, in document order; the first hundred.
    pub unknown: Vec<UnknownField>,
    /// Paths of the fields that are present and not `null`.
    pub present: PresentFields,
}

/// A field that the type does not have.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct UnknownField {
    /// Path of the field: `authentication.foo`, `reservedMemory[0].foo`.
    pub path: String,
    /// The most similar field of the type there, if one is similar enough; for the first fifty only.
    pub nearest: Option<String>,
}

/// Paths of the fields that a document sets, such as `authentication.webhook.enabled`.
#[derive(Clone, PartialEq, Eq, Debug, Default)]
pub struct PresentFields(BTreeSet<String>);

impl PresentFields {
    /// Whether the document sets the field.
    pub fn has(&self, path: &str) -> bool {
        self.0.contains(path)
    }

    /// Iterates over all paths, sorted.
    pub fn iter(&self) -> impl Iterator<Item = &str> {
        self.0.iter().map(String::as_str)
    }
}

/// The document does not match the type.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("{0}")]
pub struct TypeError(String);

impl de::Error for TypeError {
    fn custom<T: fmt::Display>(text: T) -> Self {
        Self(text.to_string())
    }
}

/// Decodes a document.
///
/// # Errors
/// The first type mismatch, with the reference's text.
pub fn decode<T: DeserializeOwned>(document: &Value, names: Names) -> Result<DecodedValue<T>, TypeError> {
    let state = RefCell::new(DecodeState { names, unknown: Vec::new(), present: BTreeSet::new() });
    let node = Node { value: document, place: FieldPath::default(), state: &state };
    let value = T::deserialize(node)?;
    let DecodeState { unknown, present, .. } = state.into_inner();
    Ok(DecodedValue { value, unknown, present: PresentFields(present) })
}

struct DecodeState {
    names: Names,
    unknown: Vec<UnknownField>,
    present: BTreeSet<String>,
}

/// Position of a value: its struct, and the path of its field.
#[derive(Clone, Default)]
struct FieldPath {
    owner: &'static str,
    /// Field names joined by dots, without list positions, as in type errors.
    fields: String,
    /// The same with list positions, as in strict errors.
    path: String,
}

impl FieldPath {
    fn field(&self, owner: &'static str, name: &str) -> Self {
        let join = |prefix: &str| if prefix.is_empty() { name.to_owned() } else { format!("{prefix}.{name}") };
        Self { owner, fields: join(&self.fields), path: join(&self.path) }
    }

    fn item(&self, index: usize) -> Self {
        Self { owner: self.owner, fields: self.fields.clone(), path: format!("{}[{index}]", self.path) }
    }
}

#[derive(Clone)]
struct Node<'a> {
    value: &'a Value,
    place: FieldPath,
    state: &'a RefCell<DecodeState>,
}

impl Node<'_> {
    fn mismatch(&self, wanted: &str) -> TypeError {
        let found = kind_of(self.value);
        if self.place.owner.is_empty() {
            return TypeError(format!("json: cannot unmarshal {found} into Go value of type {wanted}"));
        }
        let FieldPath { owner, fields, .. } = &self.place;
        let wanted = named_type(fields).unwrap_or(wanted);
        TypeError(format!("json: cannot unmarshal {found} into Go struct field {owner}.{fields} of type {wanted}"))
    }

    /// Error of a number that does not fit; it contains the number, as in the reference.
    fn misfit(&self, wanted: &str) -> TypeError {
        let TypeError(text) = self.mismatch(wanted);
        TypeError(text.replacen("unmarshal number", &format!("unmarshal number {}", self.value), 1))
    }

    fn integer<T: TryFrom<i64>>(&self, wanted: &str) -> Result<T, TypeError> {
        let Value::Number(number) = self.value else { return Err(self.mismatch(wanted)) };
        number.as_i64().and_then(|n| T::try_from(n).ok()).ok_or_else(|| self.misfit(wanted))
    }

    fn text(&self, wanted: &str) -> Result<&str, TypeError> {
        self.value.as_str().ok_or_else(|| self.mismatch(wanted))
    }
}

/// Go's name for the kind of a JSON value.
fn kind_of(value: &Value) -> &'static str {
    match value {
        Value::Null => "null",
        Value::Bool(_) => "bool",
        Value::Number(_) => "number",
        Value::String(_) => "string",
        Value::Array(_) => "array",
        Value::Object(_) => "object",
    }
}

/// Go type of fields with a named type, or whose element type depends on the field.
fn named_type(fields: &str) -> Option<&'static str> {
    Some(match fields {
        "authorization.mode" => "v1beta1.KubeletAuthorizationMode",
        "imagePullCredentialsVerificationPolicy" => "v1beta1.ImagePullCredentialsVerificationPolicy",
        "configMapAndSecretChangeDetectionStrategy" => "v1beta1.ResourceChangeDetectionStrategy",
        "memoryReservationPolicy" => "v1beta1.MemoryReservationPolicy",
        "featureGates" => "map[string]bool",
        "staticPodURLHeader" => "map[string][]string",
        "reservedMemory.limits" => "v1.ResourceList",
        "tlsCurvePreferences" => "[]int32",
        "shutdownGracePeriodByPodPriority" => "[]v1beta1.ShutdownGracePeriodByPodPriority",
        "reservedMemory" => "[]v1beta1.MemoryReservation",
        "registerWithTaints" => "[]v1.Taint",
        "registerWithTaints.effect" => "v1.TaintEffect",
        "logging.vmodule" => "v1.VModuleConfiguration",
        "logging.verbosity" | "logging.vmodule.verbosity" => "v1.VerbosityLevel",
        _ => return None,
    })
}

/// Package-qualified Go name of a struct.
fn struct_type(name: &str) -> String {
    let package = match name {
        "LoggingConfiguration"
        | "FormatOptions"
        | "OutputRoutingOptions"
        | "VModuleItem"
        | "Taint"
        | "TracingConfiguration" => "v1",
        _ => "v1beta1",
    };
    format!("{package}.{name}")
}

impl<'de> Deserializer<'de> for Node<'_> {
    type Error = TypeError;

    fn deserialize_any<V: Visitor<'de>>(self, visitor: V) -> Result<V::Value, TypeError> {
        match self.value {
            Value::Null => visitor.visit_unit(),
            Value::Bool(value) => visitor.visit_bool(*value),
            Value::Number(number) => match (number.as_i64(), number.as_f64()) {
                (Some(value), _) => visitor.visit_i64(value),
                (None, Some(value)) => visitor.visit_f64(value),
                (None, None) => Err(self.mismatch("float64")),
            },
            Value::String(text) => visitor.visit_str(text),
            Value::Array(_) => self.deserialize_seq(visitor),
            Value::Object(_) => self.deserialize_map(visitor),
        }
    }

    fn deserialize_bool<V: Visitor<'de>>(self, visitor: V) -> Result<V::Value, TypeError> {
        visitor.visit_bool(self.value.as_bool().ok_or_else(|| self.mismatch("bool"))?)
    }

    fn deserialize_i32<V: Visitor<'de>>(self, visitor: V) -> Result<V::Value, TypeError> {
        visitor.visit_i32(self.integer("int32")?)
    }

    fn deserialize_i64<V: Visitor<'de>>(self, visitor: V) -> Result<V::Value, TypeError> {
        visitor.visit_i64(self.integer("int64")?)
    }

    fn deserialize_u32<V: Visitor<'de>>(self, visitor: V) -> Result<V::Value, TypeError> {
        visitor.visit_u32(self.integer("uint32")?)
    }

    fn deserialize_f64<V: Visitor<'de>>(self, visitor: V) -> Result<V::Value, TypeError> {
        visitor.visit_f64(self.value.as_f64().ok_or_else(|| self.mismatch("float64"))?)
    }

    fn deserialize_str<V: Visitor<'de>>(self, visitor: V) -> Result<V::Value, TypeError> {
        visitor.visit_str(self.text("string")?)
    }

    fn deserialize_string<V: Visitor<'de>>(self, visitor: V) -> Result<V::Value, TypeError> {
        self.deserialize_str(visitor)
    }

    fn deserialize_option<V: Visitor<'de>>(self, visitor: V) -> Result<V::Value, TypeError> {
        if self.value.is_null() { visitor.visit_none() } else { visitor.visit_some(self) }
    }

    /// Decodes types with their own unmarshaling upstream, with their own error texts.
    fn deserialize_newtype_struct<V: Visitor<'de>>(
        self,
        name: &'static str,
        visitor: V,
    ) -> Result<V::Value, TypeError> {
        let found = kind_of(self.value);
        match (name, self.value) {
            (DURATION_TYPE, Value::String(text)) => visitor.visit_str(text),
            (DURATION_TYPE, _) => {
                Err(TypeError(format!("json: cannot unmarshal {found} into Go value of type string")))
            }
            (FLUSH_FREQUENCY_TYPE, Value::String(text)) => visitor.visit_str(text),
            (FLUSH_FREQUENCY_TYPE, value) => match value.as_i64() {
                Some(nanos) => visitor.visit_i64(nanos),
                None => Err(TypeError(format!(
                    "invalid duration {}: json: cannot unmarshal {found} into Go value of type time.Duration",
                    super::text::quote(&value.to_string())
                ))),
            },
            (QUANTITY_TYPE, Value::String(text)) => visitor.visit_str(text),
            (QUANTITY_TYPE, value) => visitor.visit_str(&value.to_string()),
            _ => visitor.visit_newtype_struct(self),
        }
    }

    fn deserialize_seq<V: Visitor<'de>>(self, visitor: V) -> Result<V::Value, TypeError> {
        let Value::Array(items) = self.value else { return Err(self.mismatch("[]string")) };
        visitor.visit_seq(Items { items: items.iter().enumerate(), node: &self })
    }

    fn deserialize_map<V: Visitor<'de>>(self, visitor: V) -> Result<V::Value, TypeError> {
        let Value::Object(entries) = self.value else { return Err(self.mismatch("map[string]string")) };
        visitor.visit_map(Entries { entries: entries.iter(), current: None, node: &self })
    }

    fn deserialize_struct<V: Visitor<'de>>(
        self,
        name: &'static str,
        fields: &'static [&'static str],
        visitor: V,
    ) -> Result<V::Value, TypeError> {
        let Value::Object(entries) = self.value else { return Err(self.mismatch(&struct_type(name))) };
        visitor.visit_map(Fields {
            all: entries,
            entries: entries.iter(),
            current: None,
            owner: name,
            known: fields,
            node: &self,
        })
    }

    fn deserialize_ignored_any<V: Visitor<'de>>(self, visitor: V) -> Result<V::Value, TypeError> {
        visitor.visit_unit()
    }

    forward_to_deserialize_any! {
        i8 i16 i128 u8 u16 u64 u128 f32 char bytes byte_buf unit unit_struct tuple tuple_struct enum identifier
    }
}

struct Items<'n, 'a> {
    items: std::iter::Enumerate<std::slice::Iter<'a, Value>>,
    node: &'n Node<'a>,
}

impl<'de> de::SeqAccess<'de> for Items<'_, '_> {
    type Error = TypeError;

    fn next_element_seed<T: DeserializeSeed<'de>>(&mut self, seed: T) -> Result<Option<T::Value>, TypeError> {
        let Some((index, value)) = self.items.next() else { return Ok(None) };
        seed.deserialize(Node { value, place: self.node.place.item(index), state: self.node.state }).map(Some)
    }
}

struct Entries<'n, 'a> {
    entries: serde_json::map::Iter<'a>,
    current: Option<&'a Value>,
    node: &'n Node<'a>,
}

impl<'de> de::MapAccess<'de> for Entries<'_, '_> {
    type Error = TypeError;

    fn next_key_seed<K: DeserializeSeed<'de>>(&mut self, seed: K) -> Result<Option<K::Value>, TypeError> {
        let Some((key, value)) = self.entries.next() else { return Ok(None) };
        self.current = Some(value);
        seed.deserialize(de::value::StrDeserializer::new(key)).map(Some)
    }

    fn next_value_seed<V: DeserializeSeed<'de>>(&mut self, seed: V) -> Result<V::Value, TypeError> {
        let value = self.current.take().unwrap_or(&Value::Null);
        // The type error of an element names the element's type, never the map's.
        let place = FieldPath { fields: format!("{}.", self.node.place.fields), ..self.node.place.clone() };
        let node = Node { value, place, state: self.node.state };
        seed.deserialize(node).map_err(|TypeError(text)| TypeError(text.replacen(". of type", " of type", 1)))
    }
}

struct Fields<'n, 'a> {
    all: &'a Map<String, Value>,
    entries: serde_json::map::Iter<'a>,
    current: Option<(&'a Value, FieldPath)>,
    owner: &'static str,
    known: &'static [&'static str],
    node: &'n Node<'a>,
}

impl Fields<'_, '_> {
    fn known_as(&self, key: &str) -> Option<&'static str> {
        let exact = self.known.iter().copied().find(|name| *name == key);
        match self.node.state.borrow().names {
            Names::Exact => exact,
            Names::AnyCase => exact.or_else(|| self.known.iter().copied().find(|name| name.eq_ignore_ascii_case(key))),
        }
    }
}

impl<'de> de::MapAccess<'de> for Fields<'_, '_> {
    type Error = TypeError;

    fn next_key_seed<K: DeserializeSeed<'de>>(&mut self, seed: K) -> Result<Option<K::Value>, TypeError> {
        loop {
            let Some((key, value)) = self.entries.next() else { return Ok(None) };
            let Some(name) = self.known_as(key) else {
                let unknown = &mut self.node.state.borrow_mut().unknown;
                if unknown.len() == MAX_STRICT_ERRORS {
                    continue;
                }
                let path = self.node.place.field(self.owner, &excerpt(key)).path;
                let nearest = (unknown.len() < HINTS).then(|| nearest(key, self.known)).flatten().map(str::to_owned);
                unknown.push(UnknownField { path, nearest });
                continue;
            };
            let place = self.node.place.field(self.owner, name);
            // The exact name takes precedence over one in another case, whatever their order.
            let outdone = key != name && self.all.get(name).is_some_and(|exact| !exact.is_null());
            if value.is_null() || outdone || self.node.state.borrow().present.contains(&place.path) {
                continue;
            }
            self.node.state.borrow_mut().present.insert(place.path.clone());
            self.current = Some((value, place));
            return seed.deserialize(de::value::StrDeserializer::new(name)).map(Some);
        }
    }

    fn next_value_seed<V: DeserializeSeed<'de>>(&mut self, seed: V) -> Result<V::Value, TypeError> {
        let Some((value, place)) = self.current.take() else {
            return seed.deserialize(de::value::UnitDeserializer::new());
        };
        seed.deserialize(Node { value, place, state: self.node.state })
    }
}

/// Returns the known name that differs least from `key`, if it is similar enough.
fn nearest<'k>(key: &str, known: &[&'k str]) -> Option<&'k str> {
    let limit = (key.len() / 4).max(1);
    let lower = key.to_ascii_lowercase();
    let length = lower.chars().count();
    known
        .iter()
        .filter(|name| name.len().abs_diff(length) <= limit)
        .map(|name| (distance(&lower, &name.to_ascii_lowercase()), *name))
        .filter(|(distance, _)| *distance <= limit)
        .min()
        .map(|(_, name)| name)
}

/// Edit distance of two names; names longer than any field name are all far.
fn distance(a: &str, b: &str) -> usize {
    let (a, b): (Vec<char>, Vec<char>) = (a.chars().take(80).collect(), b.chars().collect());
    let mut row: Vec<usize> = (0..=b.len()).collect();
    for (i, x) in a.iter().enumerate() {
        let mut next = vec![i + 1];
        for ((j, y), pair) in b.iter().enumerate().zip(row.windows(2)) {
            let changed = pair[0] + usize::from(x != y);
            let left = next.get(j).copied().unwrap_or(usize::MAX - 1);
            next.push(changed.min(pair[1] + 1).min(left + 1));
        }
        row = next;
    }
    row.last().copied().unwrap_or(usize::MAX)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::fields::KubeletConfiguration;
    use serde_json::json;

    fn typed(document: &Value) -> Result<DecodedValue<KubeletConfiguration>, TypeError> {
        decode(document, Names::Exact)
    }

    #[test]
    fn a_wrong_type_is_reported_with_the_reference_text() {
        for (document, error) in [
            (
                json!({"port": "x"}),
                "json: cannot unmarshal string into Go struct field KubeletConfiguration.port of type int32",
            ),
            (
                json!({"port": 99_999_999_999_i64}),
                "json: cannot unmarshal number 99999999999 into Go struct field KubeletConfiguration.port of type int32",
            ),
            (
                json!({"enableServer": 1}),
                "json: cannot unmarshal number into Go struct field KubeletConfiguration.enableServer of type bool",
            ),
            (
                json!({"authentication": {"anonymous": {"enabled": "no"}}}),
                "json: cannot unmarshal string into Go struct field \
                 KubeletAnonymousAuthentication.authentication.anonymous.enabled of type bool",
            ),
            (
                json!({"authentication": []}),
                "json: cannot unmarshal array into Go struct field KubeletConfiguration.authentication of type \
                 v1beta1.KubeletAuthentication",
            ),
            (
                json!({"clusterDNS": "10.0.0.1"}),
                "json: cannot unmarshal string into Go struct field KubeletConfiguration.clusterDNS of type []string",
            ),
            (
                json!({"clusterDNS": [1]}),
                "json: cannot unmarshal number into Go struct field KubeletConfiguration.clusterDNS of type string",
            ),
            (
                json!({"featureGates": {"A": "true"}}),
                "json: cannot unmarshal string into Go struct field KubeletConfiguration.featureGates of type bool",
            ),
            (
                json!({"featureGates": true}),
                "json: cannot unmarshal bool into Go struct field KubeletConfiguration.featureGates of type map[string]bool",
            ),
            // AC-01-7
            (json!({"syncFrequency": 60}), "json: cannot unmarshal number into Go value of type string"),
            (json!({"syncFrequency": "60"}), "time: missing unit in duration \"60\""),
            (
                json!({"logging": {"flushFrequency": true}}),
                "invalid duration \"true\": json: cannot unmarshal bool into Go value of type time.Duration",
            ),
        ] {
            assert_eq!(typed(&document).map(|t| t.value.port).map_err(|e| e.0), Err(error.to_owned()), "{document}");
        }
    }

    #[test]
    fn unknown_fields_are_listed_with_path_and_nearest_name() {
        let document =
            json!({"MaxPods": 3, "authentication": {"foo": 1}, "reservedMemory": [{"numaNode": 0, "bar": 1}]});
        let outcome = typed(&document).expect("only strict errors");
        let unknown: Vec<_> = outcome.unknown.iter().map(|u| (u.path.as_str(), u.nearest.as_deref())).collect();
        assert_eq!(
            unknown,
            [("MaxPods", Some("maxPods")), ("authentication.foo", None), ("reservedMemory[0].bar", None)]
        );
        assert_eq!(outcome.value.max_pods, 0, "a field in the wrong case is not the field");
        let merged: DecodedValue<KubeletConfiguration> = decode(&document, Names::AnyCase).expect("only strict errors");
        assert_eq!(merged.value.max_pods, 3);
    }

    #[test]
    fn null_is_absent_and_zero_is_present() {
        let outcome =
            typed(&json!({"healthzPort": 0, "resolvConf": null, "authentication": {"webhook": {"enabled": false}}}))
                .expect("well typed");
        assert!(outcome.present.has("healthzPort") && outcome.present.has("authentication.webhook.enabled"));
        assert!(!outcome.present.has("resolvConf") && !outcome.present.has("enableServer"));
    }
}
