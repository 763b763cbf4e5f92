//! Checkpoint format of `allocated_pods_state` and `actuated_pods_state`. Pure.
//! Implements spec 02a §8.1.
//!
//! Byte-compatible with the reference, so that a node can switch agents in both directions:
//! `{"data":"<json>","checksum":<FNV-1a-32 over "(string)" + data>}`.

use std::collections::BTreeMap;

use serde::{Deserialize, Serialize, Serializer};

use super::{Pod, PodSpec, PodUid, api, hash::fnv1a_32};

/// Allocated or actuated resources of one pod.
#[derive(Clone, PartialEq, Debug, Default)]
pub struct PodResources {
    /// Resources of regular and init containers by name.
    pub containers: ByName,
    /// Pod-level resources.
    pub pod_level: Option<api::ResourceRequirements>,
}

/// Resources of containers, sorted by name. A slice, because pods have few containers and a map reserves eleven
/// entries.
#[derive(Clone, PartialEq, Debug, Default)]
pub struct ByName(Box<[(String, api::ResourceRequirements)]>);

impl ByName {
    /// Returns the resources of a container.
    pub fn get(&self, name: &str) -> Option<&api::ResourceRequirements> {
        self.iter().find(|(known, _)| *known == name).map(|(_, own)| own)
    }

    /// Sets the resources of a container; returns the previous ones.
    pub fn insert(&mut self, name: String, own: api::ResourceRequirements) -> Option<api::ResourceRequirements> {
        if let Some((_, known)) = self.0.iter_mut().find(|(known, _)| *known == name) {
            return Some(std::mem::replace(known, own));
        }
        *self = std::mem::take(&mut self.0).into_iter().chain([(name, own)]).collect();
        None
    }

    /// Iterates over names and resources.
    pub fn iter(&self) -> impl Iterator<Item = (&String, &api::ResourceRequirements)> {
        self.0.iter().map(|(name, own)| (name, own))
    }
}

/// Of entries with the same name, the last one counts.
impl FromIterator<(String, api::ResourceRequirements)> for ByName {
    fn from_iter<I: IntoIterator<Item = (String, api::ResourceRequirements)>>(all: I) -> Self {
        Self(all.into_iter().collect::<BTreeMap<_, _>>().into_iter().collect())
    }
}

impl PodResources {
    /// Returns the resources in the pod spec, of all regular and init containers and of the pod level.
    pub fn of(pod: &Pod) -> Self {
        let all = pod.containers().iter().chain(pod.init_containers());
        Self {
            containers: all.map(|c| (c.name.clone(), c.resources.clone().unwrap_or_default())).collect(),
            pod_level: pod.spec().resources.clone(),
        }
    }

    /// Returns the pod spec with these resources in place of its own; `None` if nothing differs. Containers that are
    /// not listed keep their resources.
    pub fn applied_to(&self, pod: &Pod) -> Option<PodSpec> {
        if !self.differs_from(pod) {
            return None;
        }
        let mut spec = pod.spec().clone();
        for container in spec.containers.iter_mut().chain(spec.init_containers.iter_mut().flatten()) {
            if let Some(own) = self.containers.get(&container.name) {
                container.resources = Some(own.clone());
            }
        }
        if self.pod_level.is_some() {
            spec.resources.clone_from(&self.pod_level);
        }
        Some(spec)
    }

    /// Whether the resources of a listed container or of the pod level differ from the pod spec.
    pub fn differs_from(&self, pod: &Pod) -> bool {
        let mut all = pod.containers().iter().chain(pod.init_containers());
        let container = all.any(|c| {
            let none = api::ResourceRequirements::default();
            self.containers.get(&c.name).is_some_and(|own| !same(own, c.resources.as_ref().unwrap_or(&none)))
        });
        let none = api::ResourceRequirements::default();
        container
            || self.pod_level.as_ref().is_some_and(|own| !same(own, pod.spec().resources.as_ref().unwrap_or(&none)))
    }
}

/// Whether two requirements have equal amounts, whatever their notation (`1` = `1000m`).
pub fn same(a: &api::ResourceRequirements, b: &api::ResourceRequirements) -> bool {
    use super::resources::amounts;
    amounts(a.requests.as_ref()) == amounts(b.requests.as_ref())
        && amounts(a.limits.as_ref()) == amounts(b.limits.as_ref())
}

/// Entries of one checkpoint file by pod UID.
pub type ResourceEntries = BTreeMap<PodUid, PodResources>;

/// Reason for which a checkpoint file cannot be used.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum CorruptState {
    /// The JSON is malformed.
    #[error("cannot be decoded: {0}")]
    Json(String),
    /// The checksum does not match the content.
    #[error("checkpoint is corrupted")]
    Checksum {
        /// Checksum in the file.
        stored: u32,
        /// Checksum of the content.
        computed: u32,
    },
}

/// Encodes the entries as a checkpoint file, without a trailing newline.
pub fn encode(entries: &ResourceEntries) -> Vec<u8> {
    let data = Data {
        entries: entries
            .iter()
            .map(|(uid, pod)| {
                let containers =
                    pod.containers.iter().map(|(name, r)| (name.clone(), Requirements(r.clone()))).collect();
                let level = pod.pod_level.clone().map(Requirements);
                (uid.as_str().to_owned(), PodResourceInfo { containers, level })
            })
            .collect(),
    };
    let data = serde_json::to_string(&data).expect("maps with text keys serialise");
    let checksum = checksum(&data);
    serde_json::to_vec(&Envelope { data, checksum }).expect("text and a number serialise")
}

/// Decodes a checkpoint file.
///
/// # Errors
/// The JSON is malformed, or the checksum does not match.
pub fn decode(bytes: &[u8]) -> Result<ResourceEntries, CorruptState> {
    let json = |e: serde_json::Error| CorruptState::Json(e.to_string());
    let envelope: Envelope = serde_json::from_slice(bytes).map_err(json)?;
    let computed = checksum(&envelope.data);
    if computed != envelope.checksum {
        return Err(CorruptState::Checksum { stored: envelope.checksum, computed });
    }
    let data: Data = serde_json::from_str(&envelope.data).map_err(json)?;
    let entry = |e: PodResourceInfo| PodResources {
        containers: e.containers.into_iter().map(|(name, r)| (name, r.0)).collect(),
        pod_level: e.level.map(|r| r.0),
    };
    Ok(data.entries.into_iter().map(|(uid, e)| (PodUid::from(uid), entry(e))).collect())
}

fn checksum(data: &str) -> u32 {
    fnv1a_32(format!("(string){data}").as_bytes())
}

#[derive(Serialize, Deserialize)]
struct Envelope {
    data: String,
    checksum: u32,
}

#[derive(Serialize, Deserialize)]
struct Data {
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    entries: BTreeMap<String, PodResourceInfo>,
}

#[derive(Serialize, Deserialize)]
struct PodResourceInfo {
    #[serde(rename = "ContainerResources", default, deserialize_with = "null_is_default")]
    containers: BTreeMap<String, Requirements>,
    #[serde(rename = "PodLevelResources", default)]
    level: Option<Requirements>,
}

/// Requirements, serialized in the reference's field order: limits, requests, claims.
#[derive(Deserialize)]
struct Requirements(api::ResourceRequirements);

impl Serialize for Requirements {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        #[derive(Serialize)]
        struct OrderedRequirements<'a> {
            #[serde(skip_serializing_if = "Option::is_none")]
            limits: &'a Option<super::resources::Quantities>,
            #[serde(skip_serializing_if = "Option::is_none")]
            requests: &'a Option<super::resources::Quantities>,
            #[serde(skip_serializing_if = "Option::is_none")]
            claims: &'a Option<Vec<api::ResourceClaim>>,
        }
        OrderedRequirements { limits: &self.0.limits, requests: &self.0.requests, claims: &self.0.claims }
            .serialize(serializer)
    }
}

fn null_is_default<'de, D, T>(deserializer: D) -> Result<T, D::Error>
where
    D: serde::Deserializer<'de>,
    T: Deserialize<'de> + Default,
{
    Ok(Option::deserialize(deserializer)?.unwrap_or_default())
}

#[cfg(test)]
mod tests {
    use k8s_openapi::apimachinery::pkg::api::resource::Quantity;
    use proptest::prelude::*;

    use super::*;

    fn text(entries: &ResourceEntries) -> String {
        String::from_utf8(encode(entries)).expect("JSON is UTF-8")
    }

    #[test]
    fn the_text_equals_that_of_the_reference() {
        assert_eq!(text(&ResourceEntries::new()), r#"{"data":"{}","checksum":694314937}"#);
        let resources: api::ResourceRequirements =
            serde_json::from_str(r#"{"requests":{"memory":"1Ki","cpu":"1Ki"},"limits":{"cpu":"2"}}"#)
                .expect("resources");
        let pod = PodResources { containers: [("c".to_owned(), resources)].into_iter().collect(), pod_level: None };
        let expected = r#"{"data":"{\"entries\":{\"u\":{\"ContainerResources\":{\"c\":{\"limits\":{\"cpu\":\"2\"},\"requests\":{\"cpu\":\"1Ki\",\"memory\":\"1Ki\"}}},\"PodLevelResources\":null}}}","#;
        assert!(text(&[("u".into(), pod)].into()).starts_with(expected));
    }

    #[test]
    fn files_of_the_reference_are_read() {
        // The vectors of spec 06 §4.1.
        let file = r#"{"data":"{\"entries\":{\"pod1\":{\"ContainerResources\":{\"container1\":{\"requests\":{\"cpu\":\"1Ki\",\"memory\":\"1Ki\"}}}}}}","checksum":1178570812}"#;
        let entries = decode(file.as_bytes()).expect("sound");
        let container = entries["pod1"].containers.get("container1").expect("listed");
        assert_eq!(container.requests.as_ref().map(|r| r["cpu"].0.as_str()), Some("1Ki"));
        assert!(decode(br#"{"data":"{}","checksum":694314937}"#).expect("sound").is_empty());
    }

    #[test]
    fn damage_is_noticed() {
        for (file, expected) in [
            (r#"{"data":"{}","checksum":1}"#, "checkpoint is corrupted"),
            ("", "cannot be decoded: EOF while parsing a value at line 1 column 0"),
            ("{}", "cannot be decoded: missing field `data` at line 1 column 2"),
        ] {
            assert_eq!(decode(file.as_bytes()).expect_err(file).to_string(), expected);
        }
    }

    #[test]
    fn allocated_values_replace_those_of_the_specification() {
        let pod = Pod::new(
            serde_json::from_value(serde_json::json!({
                "metadata": {"name": "p", "namespace": "n", "uid": "u"},
                "spec": {"containers": [{"name": "a", "resources": {"requests": {"cpu": "2"}}}, {"name": "b"}]},
            }))
            .expect("a pod"),
        )
        .expect("complete");
        let mut allocated = PodResources::of(&pod);
        let one = |q: &str| Some([("cpu".to_owned(), Quantity(q.to_owned()))].into());
        allocated.containers.0[0].1.requests = one("2000m");
        assert_eq!(allocated.applied_to(&pod), None, "the same amount, written differently");
        allocated.containers.0[0].1.requests = one("1");
        let spec = allocated.applied_to(&pod).expect("differs");
        assert_eq!(spec.containers[0].resources.as_ref().and_then(|r| r.requests.clone()), one("1"));
        assert_eq!(spec.containers[1].resources.as_ref().and_then(|r| r.requests.clone()), None);
    }

    fn requirements() -> impl Strategy<Value = api::ResourceRequirements> {
        let list = || prop::option::of(prop::collection::btree_map("[a-z/]{1,8}", "[0-9]{1,4}(m|Ki)?", 0..4));
        (list(), list()).prop_map(|(limits, requests)| {
            let typed = |list: Option<BTreeMap<String, String>>| {
                list.map(|l| l.into_iter().map(|(k, v)| (k, Quantity(v))).collect::<BTreeMap<_, _>>())
                    .filter(|l| !l.is_empty())
            };
            api::ResourceRequirements { claims: None, limits: typed(limits), requests: typed(requests) }
        })
    }

    proptest! {
        #[test]
        fn what_is_written_is_read_again(
            entries in prop::collection::btree_map(".{1,12}", (
                prop::collection::btree_map("[a-z]{1,5}", requirements(), 0..3),
                prop::option::of(requirements()),
            ), 0..4),
        ) {
            let entries: ResourceEntries = entries.into_iter()
                .map(|(uid, (containers, pod_level))| {
                    let containers = containers.into_iter().collect();
                    (PodUid::from(uid), PodResources { containers, pod_level })
                })
                .collect();
            prop_assert_eq!(decode(&encode(&entries)), Ok(entries));
        }

        #[test]
        fn any_bytes_are_refused_or_read(bytes in prop::collection::vec(any::<u8>(), 0..64)) {
            let _either = decode(&bytes);
        }
    }
}
