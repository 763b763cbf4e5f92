//! Checkpoint `kubelet_internal_checkpoint`: encoding, decoding, checksum. Pure. Spec 06c §1.8, 06 §4.1.
//!
//! Byte-compatible with the reference, so that a node can switch agents in both directions. The reference writes lists
//! in random order, and the checksum depends on the order: it is verified over the lists as read.

use std::collections::{BTreeMap, BTreeSet};

use base64::{Engine, engine::general_purpose::STANDARD};
use serde_json::{Value, json};

use super::model::{DeviceAssignment, DeviceId, PodAssignments};
use crate::{
    go_json::{Decoded, as_object, decode_field, decode_string, decode_unsigned, parse, to_text},
    typed_dump::{TypedDump, checksum, dump_struct},
};

/// Content of the checkpoint.
#[derive(Clone, PartialEq, Eq, Debug, Default)]
pub struct Checkpoint {
    /// Assignments of all pods.
    pub pods: PodAssignments,
    /// Healthy devices by resource name.
    pub registered: BTreeMap<String, BTreeSet<DeviceId>>,
}

/// Reason for which a checkpoint cannot be used.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum CheckpointError {
    /// The checksum does not match the content.
    #[error("checkpoint is corrupted")]
    Corrupted,
    /// The content is not JSON of this format.
    #[error("cannot be decoded: {0}")]
    Json(String),
}

impl Checkpoint {
    /// Encodes the checkpoint as a file, without a trailing newline. Lists are in the order of [`DeviceId`].
    ///
    /// Containers without assignments are omitted.
    pub fn encode(&self) -> Vec<u8> {
        let data = CheckpointData::from(self);
        // The order of the fields is part of the format; serde_json's feature `preserve_order` keeps it.
        let file = json!({ "Data": data.to_json(), "Checksum": data.checksum() });
        to_text(&file).into_bytes()
    }

    /// Decodes a file. Unknown fields are ignored, and field names match without regard to case.
    ///
    /// # Errors
    /// The content is not JSON of this format, or the checksum does not match.
    pub fn decode(content: &[u8]) -> Result<Self, CheckpointError> {
        match Self::decode_unverified(content)? {
            (checkpoint, true) => Ok(checkpoint),
            (_, false) => Err(CheckpointError::Corrupted),
        }
    }

    /// Decodes a file, and returns whether its checksum matches the content.
    ///
    /// # Errors
    /// The content is not JSON of this format.
    pub fn decode_unverified(content: &[u8]) -> Result<(Self, bool), CheckpointError> {
        let file = parse(content).map_err(CheckpointError::Json)?;
        let data = decode_field(&file, "Data", CheckpointData::from_json).map_err(CheckpointError::Json)?;
        let stored = decode_field(&file, "Checksum", decode_unsigned).map_err(CheckpointError::Json)?;
        let is_intact = stored == u64::from(data.checksum());
        Ok((data.into(), is_intact))
    }
}

/// List of device IDs in the order of the file; `None` is JSON's null and Go's nil, as in all types below.
type IdList = Option<Vec<String>>;

/// The checksummed part of the file, as read or to be written.
struct CheckpointData {
    entries: Option<Vec<Entry>>,
    registered: Option<BTreeMap<String, IdList>>,
}

/// Devices of one resource that a container has.
struct Entry {
    pod_uid: String,
    container: String,
    resource: String,
    by_node: Option<BTreeMap<i64, IdList>>,
    response: Option<Vec<u8>>,
}

impl CheckpointData {
    fn checksum(&self) -> u32 {
        checksum("checkpoint.checkpointData", self)
    }

    fn to_json(&self) -> Value {
        let entries: Option<Vec<Value>> =
            self.entries.as_ref().map(|entries| entries.iter().map(Entry::to_json).collect());
        json!({ "PodDeviceEntries": entries, "RegisteredDevices": self.registered })
    }

    fn from_json(value: &Value) -> Decoded<Self> {
        Ok(Self {
            entries: decode_field(value, "PodDeviceEntries", |entries| decode_list(entries, Entry::from_json))?,
            registered: decode_field(value, "RegisteredDevices", |lists| {
                decode_map(lists, |resource| Ok(resource.to_owned()))
            })?,
        })
    }
}

impl Entry {
    fn to_json(&self) -> Value {
        // Go sorts the keys of numbers as text.
        let by_node: Option<BTreeMap<String, &IdList>> =
            self.by_node.as_ref().map(|lists| lists.iter().map(|(node, ids)| (node.to_string(), ids)).collect());
        json!({
            "PodUID": self.pod_uid,
            "ContainerName": self.container,
            "ResourceName": self.resource,
            "DeviceIDs": by_node,
            "AllocResp": self.response.as_ref().map(|bytes| STANDARD.encode(bytes)),
        })
    }

    fn from_json(value: &Value) -> Decoded<Self> {
        let node = |key: &str| key.parse::<i64>().map_err(|_| format!("the key {key:?} is not a NUMA node"));
        Ok(Self {
            pod_uid: decode_field(value, "PodUID", decode_string)?,
            container: decode_field(value, "ContainerName", decode_string)?,
            resource: decode_field(value, "ResourceName", decode_string)?,
            by_node: decode_field(value, "DeviceIDs", |lists| decode_map(lists, node))?,
            response: decode_field(value, "AllocResp", decode_bytes)?,
        })
    }
}

impl TypedDump for CheckpointData {
    fn dump(&self, text: &mut String) {
        dump_struct(
            text,
            &[
                ("PodDeviceEntries", "[]checkpoint.PodDevicesEntry", &self.entries),
                ("RegisteredDevices", "map[string][]string", &self.registered),
            ],
        );
    }
}

impl TypedDump for Entry {
    fn dump(&self, text: &mut String) {
        dump_struct(
            text,
            &[
                ("PodUID", "string", &self.pod_uid),
                ("ContainerName", "string", &self.container),
                ("ResourceName", "string", &self.resource),
                ("DeviceIDs", "checkpoint.DevicesPerNUMA", &self.by_node),
                ("AllocResp", "[]uint8", &self.response),
            ],
        );
    }
}

impl From<&Checkpoint> for CheckpointData {
    fn from(checkpoint: &Checkpoint) -> Self {
        let mut entries = Vec::new();
        for (pod_uid, containers) in &checkpoint.pods {
            for (container, resources) in containers {
                entries.extend(resources.iter().map(|(resource, assignment)| Entry {
                    pod_uid: pod_uid.to_string(),
                    container: container.clone(),
                    resource: resource.clone(),
                    by_node: Some(assignment.by_node.iter().map(|(node, ids)| (*node, id_list(ids))).collect()),
                    response: assignment.response.clone(),
                }));
            }
        }
        let registered = checkpoint.registered.iter().map(|(resource, ids)| (resource.clone(), id_list(ids)));
        Self { entries: (!entries.is_empty()).then_some(entries), registered: Some(registered.collect()) }
    }
}

/// Of entries of the same pod, container, and resource, the last one counts.
impl From<CheckpointData> for Checkpoint {
    fn from(data: CheckpointData) -> Self {
        let mut pods = PodAssignments::new();
        for entry in data.entries.into_iter().flatten() {
            let by_node = entry.by_node.into_iter().flatten().map(|(node, ids)| (node, id_set(ids))).collect();
            let assignment = DeviceAssignment { by_node, response: entry.response };
            let containers = pods.entry(entry.pod_uid.into()).or_default();
            containers.entry(entry.container).or_default().insert(entry.resource, assignment);
        }
        let registered = data.registered.into_iter().flatten().map(|(resource, ids)| (resource, id_set(ids)));
        Self { pods, registered: registered.collect() }
    }
}

fn id_list(ids: &BTreeSet<DeviceId>) -> IdList {
    Some(ids.iter().map(DeviceId::to_string).collect())
}

fn id_set(ids: IdList) -> BTreeSet<DeviceId> {
    ids.into_iter().flatten().map(DeviceId::from).collect()
}

/// Decodes a map of ID lists.
fn decode_map<K: Ord>(value: &Value, key: impl Fn(&str) -> Decoded<K>) -> Decoded<Option<BTreeMap<K, IdList>>> {
    let Some(members) = as_object(value)? else { return Ok(None) };
    let pairs = members.iter().map(|(name, ids)| Ok((key(name)?, decode_list(ids, decode_string)?)));
    pairs.collect::<Decoded<_>>().map(Some)
}

fn decode_list<T>(value: &Value, element: impl Fn(&Value) -> Decoded<T>) -> Decoded<Option<Vec<T>>> {
    match value {
        Value::Null => Ok(None),
        Value::Array(elements) => elements.iter().map(element).collect::<Decoded<_>>().map(Some),
        _ => Err("expected an array".to_owned()),
    }
}

fn decode_bytes(value: &Value) -> Decoded<Option<Vec<u8>>> {
    match value {
        Value::Null => Ok(None),
        Value::String(text) => STANDARD.decode(text).map(Some).map_err(|error| error.to_string()),
        _ => Err("expected a string".to_owned()),
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    const RESOURCE: &str = "example.com/res";

    fn ids(ids: &[&str]) -> BTreeSet<DeviceId> {
        ids.iter().copied().map(DeviceId::from).collect()
    }

    fn registered(devices: &[&str]) -> Checkpoint {
        Checkpoint { registered: [(RESOURCE.to_owned(), ids(devices))].into(), ..Checkpoint::default() }
    }

    /// Two registered devices, and an assignment of the container `con1` of the pod `pod1`.
    fn assigned(by_node: &[(i64, &[&str])], response: Option<&[u8]>) -> Checkpoint {
        let by_node = by_node.iter().map(|(node, devices)| (*node, ids(devices))).collect();
        let assignment = DeviceAssignment { by_node, response: response.map(<[u8]>::to_vec) };
        let container = BTreeMap::from([(RESOURCE.to_owned(), assignment)]);
        let pods = BTreeMap::from([("pod1".into(), BTreeMap::from([("con1".to_owned(), container)]))]);
        Checkpoint { pods, ..registered(&["dev1", "dev2"]) }
    }

    fn file(entries: &str, registered: &str, checksum: u64) -> String {
        format!(r#"{{"Data":{{"PodDeviceEntries":{entries},"RegisteredDevices":{registered}}},"Checksum":{checksum}}}"#)
    }

    fn entry(by_node: &str, response: &str) -> String {
        let names = r#""PodUID":"pod1","ContainerName":"con1","ResourceName":"example.com/res""#;
        format!(r#"[{{{names},"DeviceIDs":{by_node},"AllocResp":{response}}}]"#)
    }

    #[test]
    fn checkpoints_are_encoded_as_the_reference_encodes_them() {
        let two = r#"{"example.com/res":["dev1","dev2"]}"#;
        let response: &[u8] = &[0x0a, 0x04, 0x0a, 0x00, 0x12, 0x00];
        let nodes: &[(i64, &[&str])] = &[(-1, &["a"]), (2, &["b"]), (10, &["c"])];
        for (checkpoint, text) in [
            // AC-06c-13
            (Checkpoint::default(), file("null", "{}", 3_467_439_661)),
            (registered(&["dev2", "dev1"]), file("null", two, 2_068_760_492)),
            (assigned(&[(-1, &["dev1"])], None), file(&entry(r#"{"-1":["dev1"]}"#, "null"), two, 3_084_563_155)),
            (assigned(&[(-1, &["dev1"])], Some(&[])), file(&entry(r#"{"-1":["dev1"]}"#, r#""""#), two, 1_207_807_334)),
            (
                assigned(&[(0, &["dev1", "dev2"])], Some(response)),
                file(&entry(r#"{"0":["dev1","dev2"]}"#, r#""CgQKABIA""#), two, 3_054_300_064),
            ),
            // Keys are sorted as text in the file and as numbers in the dump.
            (assigned(nodes, None), file(&entry(r#"{"-1":["a"],"10":["c"],"2":["b"]}"#, "null"), two, 1_325_241_768)),
            // The dump has the text without escapes.
            (registered(&["<a&b>"]), file("null", r#"{"example.com/res":["\u003ca\u0026b\u003e"]}"#, 3_736_554_594)),
            (
                registered(&["\u{2028}\u{2029}\n\u{1f}\"\\"]),
                file("null", r#"{"example.com/res":["\u2028\u2029\n\u001f\"\\"]}"#, 834_004_429),
            ),
        ] {
            assert_eq!(String::from_utf8(checkpoint.encode()).expect("UTF-8"), text);
            assert_eq!(Checkpoint::decode(text.as_bytes()), Ok(checkpoint), "{text}");
        }
    }

    #[test]
    fn files_of_other_writers_are_accepted() {
        let two = registered(&["dev1", "dev2"]);
        for (text, expected) in [
            // Random order, as the reference writes it, and a device that is listed twice.
            (file("null", r#"{"example.com/res":["dev2","dev1"]}"#, 3_014_933_578), two.clone()),
            (file("null", r#"{"example.com/res":["dev1","dev2","dev1"]}"#, 32_828_700), two.clone()),
            // Null and empty differ in the checksum.
            (file("null", "null", 1_944_006_890), Checkpoint::default()),
            (file("[]", "{}", 2_932_075_448), Checkpoint::default()),
            (file("null", r#"{"example.com/res":null}"#, 124_590_402), registered(&[])),
            (file("null", r#"{"example.com/res":[]}"#, 2_727_115_895), registered(&[])),
            // Other cases of field names, unknown fields, and white space.
            (
                r#" {"later":[{}],"checksum":2068760492,
                     "data":{"REGISTEREDDEVICES":{"example.com/res":["dev1","dev2"]},"x":1}} "#
                    .to_owned(),
                two,
            ),
        ] {
            assert_eq!(Checkpoint::decode(text.as_bytes()), Ok(expected), "{text}");
        }
    }

    #[test]
    fn wrong_checksums_are_refused() {
        // AC-06c-12
        for text in [
            file("null", "{}", 1),
            file("null", "{}", 0),
            file("null", "{}", 3_467_439_661 + (1 << 32)),
            file("null", "{}", 1_944_006_890),
            file("null", r#"{"example.com/res":["dev2","dev1"]}"#, 2_068_760_492),
            "{}".to_owned(),
            "null".to_owned(),
        ] {
            assert_eq!(Checkpoint::decode(text.as_bytes()), Err(CheckpointError::Corrupted), "{text}");
        }
    }

    #[test]
    fn other_formats_are_refused() {
        for (text, error) in [
            ("[7]".to_owned(), "expected an object"),
            (r#"{"Data":[]}"#.to_owned(), "Data: expected an object"),
            (r#"{"Checksum":-1}"#.to_owned(), "Checksum: expected an unsigned integer"),
            (r#"{"Checksum":"1"}"#.to_owned(), "Checksum: expected an unsigned integer"),
            (file("{}", "{}", 1), "Data: PodDeviceEntries: expected an array"),
            (file("[7]", "{}", 1), "Data: PodDeviceEntries: expected an object"),
            (file(r#"[{"PodUID":7}]"#, "{}", 1), "Data: PodDeviceEntries: PodUID: expected a string"),
            (
                file(&entry(r#"{"x":[]}"#, "null"), "{}", 1),
                r#"Data: PodDeviceEntries: DeviceIDs: the key "x" is not a NUMA node"#,
            ),
            (file(&entry("{}", "7"), "{}", 1), "Data: PodDeviceEntries: AllocResp: expected a string"),
            (file("null", r#"{"r":[7]}"#, 1), "Data: RegisteredDevices: expected a string"),
        ] {
            assert_eq!(Checkpoint::decode(text.as_bytes()), Err(CheckpointError::Json(error.to_owned())), "{text}");
        }
        for text in [String::new(), "{".to_owned(), "{}{}".to_owned(), file(&entry("{}", r#""?""#), "{}", 1)] {
            assert!(matches!(Checkpoint::decode(text.as_bytes()), Err(CheckpointError::Json(_))), "{text}");
        }
    }

    fn any_name() -> impl Strategy<Value = String> {
        "[<>&\"\\\\\u{2028}\u{0}\na-c0-2é]{0,4}"
    }

    fn any_ids() -> impl Strategy<Value = BTreeSet<DeviceId>> {
        prop::collection::btree_set(any_name().prop_map(DeviceId::from), 0..4)
    }

    fn any_checkpoint() -> impl Strategy<Value = Checkpoint> {
        let by_node = prop::collection::btree_map(any::<i64>(), any_ids(), 0..3);
        let response = prop::option::of(prop::collection::vec(any::<u8>(), 0..8));
        let assignment = (by_node, response).prop_map(|(by_node, response)| DeviceAssignment { by_node, response });
        let container = prop::collection::btree_map(any_name(), assignment, 1..3);
        let pod = prop::collection::btree_map(any_name(), container, 1..3);
        let pods = prop::collection::btree_map(any_name().prop_map(berth_types::PodUid::from), pod, 0..3);
        let registered = prop::collection::btree_map(any_name(), any_ids(), 0..3);
        (pods, registered).prop_map(|(pods, registered)| Checkpoint { pods, registered })
    }

    proptest! {
        #[test]
        fn decoding_reverses_encoding(checkpoint in any_checkpoint()) {
            prop_assert_eq!(Checkpoint::decode(&checkpoint.encode()), Ok(checkpoint));
        }

        #[test]
        fn garbage_never_panics(
            garbage in prop::collection::vec(any::<u8>(), 0..200),
            checkpoint in any_checkpoint(),
            at in any::<prop::sample::Index>(),
            byte in any::<u8>(),
        ) {
            let mut content = checkpoint.encode();
            let at = at.index(content.len());
            content[at] = byte;
            for content in [&garbage[..], &content[..], &content[..at]] {
                let _ignored = Checkpoint::decode(content);
            }
        }
    }
}
