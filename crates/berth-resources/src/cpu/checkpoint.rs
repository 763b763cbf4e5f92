//! Checkpoint `cpu_manager_state`: encoding, decoding, checksum. Pure. Spec 06b §1.4, 06 §4.1.
//!
//! Byte-compatible with the reference, so that a node can switch agents in both directions. A file has one of three
//! formats; an agent writes the oldest one that can express the state.
//!
//! | Format | Entries | Checksum 0 |
//! |---|---|---|
//! | oldest, read only | container ID → CPUs | accepted |
//! | current | pod UID → container → CPUs | accepted |
//! | newest | as current, and `podEntries`: pod UID → CPUs (feature gate `PodLevelResourceManagers`) | refused |
//!
//! Entries of pods are read and written whether the feature gate is enabled or not, so that none is lost.

use std::collections::{BTreeMap, BTreeSet};

use berth_types::{ContainerId, CpuSet, CpuSetError, PodUid, fieldpath::quoted};
use serde_json::{Map, Value, json};

use super::state::{ContainerCpus, CpuState};
use crate::{
    go_json::{Decoded, decode_field, decode_members, decode_string, decode_unsigned, parse, to_text},
    typed_dump::{TypedDump, checksum, dump_struct},
};

/// Pod and name of each container that the runtime reports at the start, by container ID.
pub type InitialContainers = BTreeMap<ContainerId, (PodUid, String)>;

/// Reason for which a checkpoint cannot be used. The agent does not start then: CPUs may be assigned exclusively.
#[derive(Clone, PartialEq, Eq, Debug, thiserror::Error)]
pub enum CpuCheckpointError {
    /// The checksum does not match the content.
    #[error("checkpoint is corrupted")]
    Corrupted,
    /// The content is not JSON of any of the formats.
    #[error("cannot be decoded: {0}")]
    Json(String),
    /// The file was written under another policy.
    #[error("configured policy {} differs from state checkpoint policy {}", quoted(.configured), quoted(.stored))]
    OtherPolicy {
        /// Policy of the configuration.
        configured: String,
        /// Policy in the file.
        stored: String,
    },
    /// A container of the oldest format is not known to the runtime.
    #[error("failed to migrate checkpoint from v1 to v2: containerID '{0}' not found in initial containers list")]
    UnknownContainer(String),
    /// The shared pool is not a CPU list.
    #[error("could not parse default cpu set {}: {cause}", quoted(.text))]
    DefaultSet {
        /// Content of `defaultCpuSet`.
        text: String,
        /// What is wrong with it.
        cause: CpuSetError,
    },
    /// The set of a container is not a CPU list.
    #[error(
        "could not parse cpuset {} for container {} in pod {}: {cause}",
        quoted(.text),
        quoted(.container),
        quoted(.pod)
    )]
    Entry {
        /// Content of the entry.
        text: String,
        /// Name of the container.
        container: String,
        /// UID of the pod.
        pod: String,
        /// What is wrong with it.
        cause: CpuSetError,
    },
}

/// Encodes a state as a file, without a trailing newline.
pub fn encode(policy: &str, state: &CpuState) -> Vec<u8> {
    let texts = |containers: &ContainerCpus| -> ContainerTexts {
        containers.iter().map(|(container, cpus)| (container.clone(), cpus.to_string())).collect()
    };
    let (policy, default) = (policy.to_owned(), state.default.to_string());
    let entries: PodTexts = state.assignments.iter().map(|(pod, all)| (pod.to_string(), texts(all))).collect();
    let pods: PodCpuEntries =
        state.pod_entries.iter().map(|(pod, cpus)| (pod.to_string(), PodCpuEntry(cpus.clone()))).collect();
    let pods = (!pods.is_empty()).then_some(pods);

    // The order of the fields is part of the format; serde_json's feature `preserve_order` keeps it.
    let mut file = Map::new();
    file.insert("policyName".to_owned(), json!(policy));
    file.insert("defaultCpuSet".to_owned(), json!(default));
    if !entries.is_empty() {
        file.insert("entries".to_owned(), json!(entries));
    }
    if let Some(pods) = &pods {
        let pods: Map<String, Value> = pods.iter().map(|(pod, entry)| (pod.clone(), entry.to_json())).collect();
        file.insert("podEntries".to_owned(), Value::Object(pods));
    }
    let sum = ChecksumInput::new(&policy, &default, &entries, PODS_TYPE, pods.as_ref()).checksum();
    file.insert("checksum".to_owned(), json!(sum));
    to_text(&Value::Object(file)).into_bytes()
}

/// Decodes a file of any format. Unknown fields are ignored, and field names match without regard to case.
///
/// # Errors
/// The content is not JSON of a format, the checksum does not match, the file is of a policy other than `policy`, or
/// its CPU sets or containers cannot be resolved.
pub fn decode(content: &[u8], policy: &str, containers: &InitialContainers) -> Result<CpuState, CpuCheckpointError> {
    let file = FileTexts::decode(content, containers)?;
    if file.policy != policy {
        return Err(CpuCheckpointError::OtherPolicy { configured: policy.to_owned(), stored: file.policy });
    }
    let default = CpuSet::parse(&file.default)
        .map_err(|cause| CpuCheckpointError::DefaultSet { text: file.default.clone(), cause })?;
    let mut state = CpuState { default, ..CpuState::default() };
    for (pod, entries) in file.entries {
        let mut cpus = ContainerCpus::new();
        for (container, text) in entries {
            match CpuSet::parse(&text) {
                Ok(set) => cpus.insert(container, set),
                Err(cause) => return Err(CpuCheckpointError::Entry { text, container, pod, cause }),
            };
        }
        state.assignments.insert(pod.into(), cpus);
    }
    state.pod_entries = file.pods.into_iter().map(|(pod, entry)| (pod.into(), entry.0)).collect();
    Ok(state)
}

/// Pods with CPUs in a file of any policy; `None` if the file cannot be decoded.
pub fn recorded_pods(content: &[u8], containers: &InitialContainers) -> Option<BTreeSet<PodUid>> {
    let file = FileTexts::decode(content, containers).ok()?;
    Some(file.entries.into_keys().chain(file.pods.into_keys()).map(PodUid::from).collect())
}

/// CPU lists by container name, or by container ID in the oldest format.
type ContainerTexts = BTreeMap<String, String>;
/// CPU lists by pod UID and container name.
type PodTexts = BTreeMap<String, ContainerTexts>;
/// CPUs of whole pods by pod UID.
type PodCpuEntries = BTreeMap<String, PodCpuEntry>;

/// Type of [`PodTexts`] in the dump.
const PODS_TYPE: &str = "map[string]map[string]string";
/// Type of [`ContainerTexts`] in the dump.
const CONTAINERS_TYPE: &str = "map[string]string";

/// Verified content of a file.
struct FileTexts {
    policy: String,
    default: String,
    entries: PodTexts,
    pods: PodCpuEntries,
}

impl FileTexts {
    /// Decodes the newest format whose checksum matches.
    fn decode(content: &[u8], containers: &InitialContainers) -> Result<Self, CpuCheckpointError> {
        let file = parse(content).map_err(CpuCheckpointError::Json)?;
        let string = |name: &str| decode_field(&file, name, decode_string).map_err(CpuCheckpointError::Json);
        let (policy, default) = (string("policyName")?, string("defaultCpuSet")?);
        let stored = decode_field(&file, "checksum", decode_unsigned).map_err(CpuCheckpointError::Json)?;
        let pods = decode_field(&file, "podEntries", PodCpuEntry::decode_all);
        // Zero is the checksum of files from before checksums were introduced; entries of pods are newer.
        let is_unverified = stored == 0 && pods.as_ref().is_ok_and(BTreeMap::is_empty);
        let matches = |input: ChecksumInput<'_>| stored == u64::from(input.checksum());

        let nested = decode_field(&file, "entries", |entries| decode_map(entries, decode_texts));
        if let Ok(entries) = &nested {
            let input = |pods| ChecksumInput::new(&policy, &default, entries, PODS_TYPE, pods);
            if let Ok(pods) = &pods
                && matches(input(Some(pods)))
            {
                return Ok(Self { policy, default, entries: entries.clone(), pods: pods.clone() });
            }
            if is_unverified || matches(input(None)) {
                return Ok(Self { policy, default, entries: entries.clone(), pods: PodCpuEntries::new() });
            }
        }
        let flat = decode_field(&file, "entries", decode_texts);
        if let Ok(by_id) = &flat
            && (is_unverified || matches(ChecksumInput::new(&policy, &default, by_id, CONTAINERS_TYPE, None)))
        {
            let entries = entries_by_pod(by_id, containers)?;
            return Ok(Self { policy, default, entries, pods: PodCpuEntries::new() });
        }
        match (nested, flat) {
            (Err(error), Err(_)) => Err(CpuCheckpointError::Json(error)),
            _ => Err(CpuCheckpointError::Corrupted),
        }
    }
}

/// Translates entries of the oldest format.
fn entries_by_pod(by_id: &ContainerTexts, containers: &InitialContainers) -> Result<PodTexts, CpuCheckpointError> {
    let mut entries = PodTexts::new();
    for (id, cpus) in by_id {
        let container = containers.get(id.as_str()).ok_or_else(|| CpuCheckpointError::UnknownContainer(id.clone()))?;
        let (pod, name) = container;
        entries.entry(pod.to_string()).or_default().insert(name.clone(), cpus.clone());
    }
    Ok(entries)
}

fn decode_map<T>(value: &Value, decode: impl Fn(&Value) -> Decoded<T>) -> Decoded<BTreeMap<String, T>> {
    let members = decode_members(value, |name, member| Ok((name.to_owned(), decode(member)?)))?;
    Ok(members.into_iter().collect())
}

fn decode_texts(value: &Value) -> Decoded<ContainerTexts> {
    decode_map(value, decode_string)
}

/// CPUs that a pod has as a whole, `{"cpuSet":"4-6"}`.
#[derive(Clone, PartialEq, Eq, Debug)]
struct PodCpuEntry(CpuSet);

impl PodCpuEntry {
    fn to_json(&self) -> Value {
        if self.0.is_empty() { json!({}) } else { json!({ "cpuSet": self.0.to_string() }) }
    }

    fn decode_all(value: &Value) -> Decoded<PodCpuEntries> {
        decode_map(value, |entry| {
            let text = decode_field(entry, "cpuSet", decode_string)?;
            CpuSet::parse(&text).map(Self).map_err(|error| error.to_string())
        })
    }
}

/// The object that is checksummed.
struct ChecksumInput<'a> {
    policy: &'a dyn TypedDump,
    default: &'a dyn TypedDump,
    entries: &'a dyn TypedDump,
    entries_type: &'static str,
    pods: Option<&'a PodCpuEntries>,
}

impl<'a> ChecksumInput<'a> {
    fn new(
        policy: &'a dyn TypedDump,
        default: &'a dyn TypedDump,
        entries: &'a dyn TypedDump,
        entries_type: &'static str,
        pods: Option<&'a PodCpuEntries>,
    ) -> Self {
        Self { policy, default, entries, entries_type, pods }
    }

    fn checksum(&self) -> u32 {
        checksum("*state.CPUManagerCheckpoint", self)
    }
}

impl TypedDump for ChecksumInput<'_> {
    fn dump(&self, text: &mut String) {
        let mut fields = vec![
            ("PolicyName", "string", self.policy),
            ("DefaultCPUSet", "string", self.default),
            ("Entries", self.entries_type, self.entries),
        ];
        if let Some(pods) = self.pods {
            let pods: &dyn TypedDump = pods;
            fields.push(("PodEntries", "state.PodCPUAssignments", pods));
        }
        let own: &dyn TypedDump = &0_i64;
        fields.push(("Checksum", "checksum.Checksum", own));
        dump_struct(text, &fields);
    }
}

impl TypedDump for PodCpuEntry {
    fn dump(&self, text: &mut String) {
        dump_struct(text, &[("CPUSet", "cpuset.CPUSet", &self.0)]);
    }
}

/// Go's set is a struct with a map of its elements to nothing.
impl TypedDump for CpuSet {
    fn dump(&self, text: &mut String) {
        let elements: BTreeMap<i64, EmptyStruct> = self.iter().map(|cpu| (i64::from(cpu), EmptyStruct)).collect();
        dump_struct(text, &[("elems", "map[int]struct {}", &elements)]);
    }
}

/// Go's `struct {}`.
struct EmptyStruct;

impl TypedDump for EmptyStruct {
    fn dump(&self, text: &mut String) {
        dump_struct(text, &[]);
    }
}

#[cfg(test)]
mod tests;
