//! Checkpoint `memory_manager_state`: encoding, decoding, checksum. Pure. Spec 06b §2.3, 06 §4.1.
//!
//! Byte-compatible with the reference, so that a node can switch agents in both directions. Entries of pods with
//! pod-level resources (`podEntries`), which the reference writes behind a feature gate, are kept as they are.

use std::collections::BTreeMap;

use berth_types::{PodUid, fieldpath::quoted};
use serde_json::{Map, Value, json};

use super::{
    machine_state::{MachineState, MemoryAssignments, MemoryBlock, MemoryTable, NodeMemory},
    reserved_memory::MemoryPolicy,
};
use crate::{
    go_json::{
        Decoded, decode_field, decode_integer, decode_list, decode_members, decode_string, decode_unsigned, parse,
        to_text,
    },
    numa::{NumaMask, mask::MAX_NODES},
    typed_dump::{Pointer, TypedDump, checksum, dump_struct},
};

/// Content of the checkpoint.
#[derive(Clone, PartialEq, Eq, Debug, Default)]
pub struct MemoryCheckpoint {
    /// Name of the policy that wrote it.
    pub policy: String,
    /// Memory of all NUMA nodes; empty with policy `None`.
    pub machine: MachineState,
    /// Blocks of containers.
    pub assignments: MemoryAssignments,
    /// Blocks of pods with pod-level resources; the blocks of their containers are parts of these.
    pub pods: BTreeMap<PodUid, Vec<MemoryBlock>>,
}

/// Reason for which a checkpoint cannot be used; the agent does not start. The texts are the reference's.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum MemoryCheckpointError {
    /// The checksum does not match the content.
    #[error("checkpoint is corrupted")]
    Corrupted,
    /// The content is not JSON of this format.
    #[error("cannot be decoded: {0}")]
    Json(String),
    /// Another policy has written the checkpoint.
    #[error(
        "[memorymanager] configured policy {} differs from state checkpoint policy {}",
        quoted(.configured.as_str()),
        quoted(.stored)
    )]
    OtherPolicy {
        /// Policy of the configuration.
        configured: MemoryPolicy,
        /// Policy in the checkpoint.
        stored: String,
    },
}

impl MemoryCheckpoint {
    /// A checkpoint without any content.
    pub fn new(policy: MemoryPolicy) -> Self {
        Self { policy: policy.as_str().to_owned(), ..Self::default() }
    }

    /// Decodes the file that a policy finds at its start.
    ///
    /// # Errors
    /// As [`Self::decode`], or another policy has written the file.
    pub fn restore(content: &[u8], policy: MemoryPolicy) -> Result<Self, MemoryCheckpointError> {
        let checkpoint = Self::decode(content)?;
        if checkpoint.policy != policy.as_str() {
            let stored = checkpoint.policy;
            return Err(MemoryCheckpointError::OtherPolicy { configured: policy, stored });
        }
        Ok(checkpoint)
    }

    /// Encodes the checkpoint as a file, without a trailing newline.
    pub fn encode(&self) -> Vec<u8> {
        // The order of the fields is part of the format; serde_json's feature `preserve_order` keeps it.
        let mut file = Map::new();
        file.insert("policyName".to_owned(), json!(self.policy));
        file.insert("machineState".to_owned(), self.machine.to_json());
        if !self.assignments.is_empty() {
            let pods = self.assignments.iter().map(|(pod, containers)| {
                let containers = containers.iter().map(|(name, blocks)| (name.clone(), blocks_to_json(blocks)));
                (pod.to_string(), Value::Object(containers.collect()))
            });
            file.insert("entries".to_owned(), Value::Object(pods.collect()));
        }
        if !self.pods.is_empty() {
            let pod = |blocks: &Vec<MemoryBlock>| json!({ "memoryBlocks": blocks_to_json(blocks) });
            let pods = self.pods.iter().map(|(uid, blocks)| (uid.to_string(), pod(blocks)));
            file.insert("podEntries".to_owned(), Value::Object(pods.collect()));
        }
        let format = if self.pods.is_empty() { DumpFormat::Containers } else { DumpFormat::WithPods };
        file.insert("checksum".to_owned(), json!(self.checksum(format)));
        to_text(&Value::Object(file)).into_bytes()
    }

    /// Decodes a file. Unknown fields are ignored, and field names match without regard to case.
    ///
    /// # Errors
    /// The content is not JSON of this format, or the checksum does not match.
    pub fn decode(content: &[u8]) -> Result<Self, MemoryCheckpointError> {
        let file = parse(content).map_err(MemoryCheckpointError::Json)?;
        let checkpoint = Self::from_json(&file).map_err(MemoryCheckpointError::Json)?;
        let stored = decode_field(&file, "checksum", decode_unsigned).map_err(MemoryCheckpointError::Json)?;
        let matches = |format| stored == u64::from(checkpoint.checksum(format));
        // Files from before checksums were introduced have the checksum 0.
        let is_of_containers = checkpoint.pods.is_empty() && (stored == 0 || matches(DumpFormat::Containers));
        if !is_of_containers && !matches(DumpFormat::WithPods) {
            return Err(MemoryCheckpointError::Corrupted);
        }
        Ok(checkpoint)
    }

    fn from_json(file: &Value) -> Decoded<Self> {
        Ok(Self {
            policy: decode_field(file, "policyName", decode_string)?,
            machine: decode_field(file, "machineState", MachineState::from_json)?,
            assignments: decode_field(file, "entries", |pods| {
                let pods = decode_members(pods, |uid, containers| {
                    let containers =
                        decode_members(containers, |name, blocks| Ok((name.to_owned(), blocks_from_json(blocks)?)))?;
                    Ok((PodUid::from(uid), containers.into_iter().collect::<BTreeMap<_, _>>()))
                })?;
                Ok(pods.into_iter().collect())
            })?,
            pods: decode_field(file, "podEntries", |pods| {
                let pods = decode_members(pods, |uid, pod| {
                    Ok((PodUid::from(uid), decode_field(pod, "memoryBlocks", blocks_from_json)?))
                })?;
                Ok(pods.into_iter().collect())
            })?,
        })
    }

    fn checksum(&self, format: DumpFormat) -> u32 {
        checksum("*state.MemoryManagerCheckpoint", &CheckpointDump { checkpoint: self, format })
    }
}

/// Format of the checksummed text.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum DumpFormat {
    /// Without `podEntries`: the reference's default, readable with and without its gate.
    Containers,
    /// With `podEntries`, even if they are empty.
    WithPods,
}

/// The checksummed object.
struct CheckpointDump<'a> {
    checkpoint: &'a MemoryCheckpoint,
    format: DumpFormat,
}

impl TypedDump for CheckpointDump<'_> {
    fn dump(&self, text: &mut String) {
        let MemoryCheckpoint { policy, machine, assignments, pods } = self.checkpoint;
        let nodes: BTreeMap<u32, Pointer<&NodeMemory>> =
            machine.nodes.iter().map(|(id, node)| (*id, Pointer(node))).collect();
        let pods: BTreeMap<&PodUid, PodEntryDump<'_>> =
            pods.iter().map(|(uid, blocks)| (uid, PodEntryDump(blocks))).collect();
        let fields: [(&str, &str, &dyn TypedDump); 3] = [
            ("PolicyName", "string", policy),
            ("MachineState", "state.NUMANodeMap", &nodes),
            ("Entries", "state.ContainerMemoryAssignments", assignments),
        ];
        let mut fields = fields.to_vec();
        if self.format == DumpFormat::WithPods {
            fields.push(("PodEntries", "state.PodMemoryAssignments", &pods));
        }
        fields.push(("Checksum", "checksum.Checksum", &0_u64));
        dump_struct(text, &fields);
    }
}

/// An element of `podEntries`.
struct PodEntryDump<'a>(&'a Vec<MemoryBlock>);

impl TypedDump for PodEntryDump<'_> {
    fn dump(&self, text: &mut String) {
        dump_struct(text, &[("MemoryBlocks", "[]state.Block", self.0)]);
    }
}

impl TypedDump for NodeMemory {
    fn dump(&self, text: &mut String) {
        let tables: BTreeMap<&String, Pointer<&MemoryTable>> =
            self.tables.iter().map(|(resource, table)| (resource, Pointer(table))).collect();
        dump_struct(
            text,
            &[
                ("NumberOfAssignments", "int", &self.assignments),
                ("MemoryMap", "map[v1.ResourceName]*state.MemoryTable", &tables),
                ("Cells", "[]int", &self.group),
            ],
        );
    }
}

impl TypedDump for MemoryTable {
    fn dump(&self, text: &mut String) {
        dump_struct(
            text,
            &[
                ("TotalMemSize", "uint64", &self.total),
                ("SystemReserved", "uint64", &self.system_reserved),
                ("Allocatable", "uint64", &self.allocatable),
                ("Reserved", "uint64", &self.reserved),
                ("Free", "uint64", &self.free),
            ],
        );
    }
}

impl TypedDump for MemoryBlock {
    fn dump(&self, text: &mut String) {
        dump_struct(
            text,
            &[
                ("NUMAAffinity", "[]int", &self.nodes),
                ("Type", "v1.ResourceName", &self.resource),
                ("Size", "uint64", &self.size),
            ],
        );
    }
}

/// A list of node IDs in ascending order.
impl TypedDump for NumaMask {
    fn dump(&self, text: &mut String) {
        self.iter().collect::<Vec<u32>>().dump(text);
    }
}

impl MachineState {
    fn to_json(&self) -> Value {
        // Go sorts the keys of numbers as text.
        let nodes: BTreeMap<String, Value> =
            self.nodes.iter().map(|(id, node)| (id.to_string(), node.to_json())).collect();
        Value::Object(nodes.into_iter().collect())
    }

    fn from_json(value: &Value) -> Decoded<Self> {
        let nodes = decode_members(value, |id, node| {
            let known = id.parse::<u64>().ok().and_then(node_id);
            let number = known.ok_or_else(|| format!("the key {id:?} is not a NUMA node"))?;
            Ok((number, NodeMemory::from_json(node)?))
        })?;
        Ok(Self { nodes: nodes.into_iter().collect() })
    }
}

impl NodeMemory {
    fn to_json(&self) -> Value {
        let tables = self.tables.iter().map(|(resource, table)| (resource.clone(), table.to_json()));
        json!({
            "numberOfAssignments": self.assignments,
            "memoryMap": Value::Object(tables.collect()),
            "cells": mask_to_json(self.group),
        })
    }

    fn from_json(value: &Value) -> Decoded<Self> {
        Ok(Self {
            assignments: decode_field(value, "numberOfAssignments", decode_integer)?,
            tables: decode_field(value, "memoryMap", |tables| {
                let tables = decode_members(tables, |resource, table| {
                    Ok((resource.to_owned(), MemoryTable::from_json(table)?))
                })?;
                Ok(tables.into_iter().collect())
            })?,
            group: decode_field(value, "cells", mask_from_json)?,
        })
    }
}

impl MemoryTable {
    fn to_json(self) -> Value {
        json!({
            "total": self.total,
            "systemReserved": self.system_reserved,
            "allocatable": self.allocatable,
            "reserved": self.reserved,
            "free": self.free,
        })
    }

    fn from_json(value: &Value) -> Decoded<Self> {
        Ok(Self {
            total: decode_field(value, "total", decode_unsigned)?,
            system_reserved: decode_field(value, "systemReserved", decode_unsigned)?,
            allocatable: decode_field(value, "allocatable", decode_unsigned)?,
            reserved: decode_field(value, "reserved", decode_unsigned)?,
            free: decode_field(value, "free", decode_unsigned)?,
        })
    }
}

fn blocks_to_json(blocks: &[MemoryBlock]) -> Value {
    let block = |block: &MemoryBlock| json!({ "numaAffinity": mask_to_json(block.nodes), "type": block.resource, "size": block.size });
    Value::Array(blocks.iter().map(block).collect())
}

fn blocks_from_json(value: &Value) -> Decoded<Vec<MemoryBlock>> {
    decode_list(value, |block| {
        Ok(MemoryBlock {
            nodes: decode_field(block, "numaAffinity", mask_from_json)?,
            resource: decode_field(block, "type", decode_string)?,
            size: decode_field(block, "size", decode_unsigned)?,
        })
    })
}

fn mask_to_json(mask: NumaMask) -> Value {
    Value::Array(mask.iter().map(Value::from).collect())
}

fn mask_from_json(value: &Value) -> Decoded<NumaMask> {
    let nodes =
        decode_list(value, |id| node_id(decode_unsigned(id)?).ok_or_else(|| format!("{id} is not a NUMA node")))?;
    Ok(nodes.into_iter().collect())
}

/// The ID of a NUMA node; `None` if it is too large.
fn node_id(number: u64) -> Option<u32> {
    u32::try_from(number).ok().filter(|id| *id < MAX_NODES)
}

#[cfg(test)]
mod tests {
    use std::path::Path;

    use proptest::prelude::*;

    use super::*;
    use crate::drain_advice::drain_advice;
    use crate::memory::fixture::mask;

    /// Node 0 as in the reference's own checksums.
    const NODE: &str = concat!(
        r#"{"0":{"numberOfAssignments":0,"memoryMap":{"memory":"#,
        r#"{"total":2048,"systemReserved":512,"allocatable":1536,"reserved":512,"free":1024}},"cells":[]}}"#
    );
    const BLOCK: &str = r#"[{"numaAffinity":[0],"type":"memory","size":512}]"#;

    fn block(nodes: &[u32], resource: &str, size: u64) -> MemoryBlock {
        MemoryBlock { nodes: mask(nodes), resource: resource.to_owned(), size }
    }

    fn table(total: u64, system_reserved: u64, reserved: u64) -> MemoryTable {
        let allocatable = total - system_reserved;
        MemoryTable { total, system_reserved, allocatable, reserved, free: allocatable - reserved }
    }

    fn node(assignments: i64, group: &[u32], tables: &[(&str, MemoryTable)]) -> NodeMemory {
        let tables = tables.iter().map(|(resource, table)| ((*resource).to_owned(), *table)).collect();
        NodeMemory { assignments, tables, group: mask(group) }
    }

    /// One block of a container.
    fn small() -> MemoryCheckpoint {
        let containers = BTreeMap::from([("container1".to_owned(), vec![block(&[0], "memory", 512)])]);
        MemoryCheckpoint {
            policy: "static".to_owned(),
            machine: MachineState { nodes: BTreeMap::from([(0, node(0, &[], &[("memory", table(2048, 512, 512))]))]) },
            assignments: BTreeMap::from([("pod".into(), containers)]),
            pods: BTreeMap::new(),
        }
    }

    /// The same block as that of the pod.
    fn with_pod() -> MemoryCheckpoint {
        MemoryCheckpoint { pods: BTreeMap::from([("pod".into(), vec![block(&[0], "memory", 512)])]), ..small() }
    }

    fn small_text(pods: &str, checksum: u64) -> String {
        let entries = format!(r#"{{"pod":{{"container1":{BLOCK}}}}}"#);
        let state = format!(r#""policyName":"static","machineState":{NODE},"entries":{entries}"#);
        format!(r#"{{{state},{pods}"checksum":{checksum}}}"#)
    }

    fn pod_entries() -> String {
        format!(r#""podEntries":{{"pod":{{"memoryBlocks":{BLOCK}}}}},"#)
    }

    #[test]
    fn checkpoints_are_encoded_as_the_reference_encodes_them() {
        let none = MemoryCheckpoint::new(MemoryPolicy::None);
        for (checkpoint, text) in [
            // AC-06-7
            (none.clone(), r#"{"policyName":"None","machineState":{},"checksum":4236770233}"#.to_owned()),
            (small(), small_text("", 4_215_593_881)),
            (with_pod(), small_text(&pod_entries(), 1_278_640_530)),
        ] {
            assert_eq!(String::from_utf8(checkpoint.encode()).expect("UTF-8"), text);
            assert_eq!(MemoryCheckpoint::decode(text.as_bytes()), Ok(checkpoint), "{text}");
        }
    }

    #[test]
    fn keys_are_sorted_as_text_in_the_file_and_as_numbers_in_the_checksum() {
        let tables = [("memory", table(10, 1, 0)), ("hugepages-2Mi", table(0, 0, 0))];
        let nodes = [0, 2, 10].map(|id| (id, node(0, &[id], &tables)));
        let machine = MachineState { nodes: nodes.into() };
        let checkpoint = MemoryCheckpoint { machine, ..MemoryCheckpoint::new(MemoryPolicy::Static) };
        let node = |id: u32| {
            let zero = r#"{"total":0,"systemReserved":0,"allocatable":0,"reserved":0,"free":0}"#;
            let memory = r#"{"total":10,"systemReserved":1,"allocatable":9,"reserved":0,"free":9}"#;
            let tables = format!(r#"{{"hugepages-2Mi":{zero},"memory":{memory}}}"#);
            format!(r#""{id}":{{"numberOfAssignments":0,"memoryMap":{tables},"cells":[{id}]}}"#)
        };
        let nodes = [0, 10, 2].map(node).join(",");
        let text = format!(r#"{{"policyName":"Static","machineState":{{{nodes}}},"checksum":1729850333}}"#);
        assert_eq!(String::from_utf8(checkpoint.encode()).expect("UTF-8"), text);
        assert_eq!(MemoryCheckpoint::decode(text.as_bytes()), Ok(checkpoint));
    }

    #[test]
    fn files_of_other_writers_are_accepted() {
        for (text, expected) in [
            // With the reference's gate, but without pods that need it.
            (small_text("", 1_414_536_960), small()),
            (
                r#"{"policyName":"None","machineState":{},"checksum":512582496}"#.to_owned(),
                MemoryCheckpoint::new(MemoryPolicy::None),
            ),
            // From before checksums were introduced.
            (small_text("", 0), small()),
            // Other cases of field names, unknown fields, and white space.
            (
                r#" {"CHECKSUM": 4236770233, "later": [{}], "PolicyName": "None", "machineState": {} } "#.to_owned(),
                MemoryCheckpoint::new(MemoryPolicy::None),
            ),
        ] {
            assert_eq!(MemoryCheckpoint::decode(text.as_bytes()), Ok(expected), "{text}");
        }
    }

    #[test]
    fn wrong_checksums_are_refused() {
        for text in [
            small_text("", 4_215_593_880),
            small_text("", 4_215_593_881 + (1 << 32)),
            small_text(&pod_entries(), 4_215_593_881),
            small_text(&pod_entries(), 0),
            small_text("", 4_215_593_881).replace("512", "511"),
            small_text("", 4_215_593_881).replace("container1", "container2"),
        ] {
            assert_eq!(MemoryCheckpoint::decode(text.as_bytes()), Err(MemoryCheckpointError::Corrupted), "{text}");
        }
    }

    #[test]
    fn other_formats_are_refused() {
        for (text, error) in [
            ("[7]", "expected an object"),
            (r#"{"policyName":7}"#, "policyName: expected a string"),
            (r#"{"checksum":-1}"#, "checksum: expected an unsigned integer"),
            (r#"{"machineState":[]}"#, "machineState: expected an object"),
            (r#"{"machineState":{"x":{}}}"#, r#"machineState: the key "x" is not a NUMA node"#),
            (r#"{"machineState":{"64":{}}}"#, r#"machineState: the key "64" is not a NUMA node"#),
            (r#"{"machineState":{"0":{"cells":[64]}}}"#, "machineState: cells: 64 is not a NUMA node"),
            (
                r#"{"machineState":{"0":{"memoryMap":{"memory":{"free":-1}}}}}"#,
                "machineState: memoryMap: free: expected an unsigned integer",
            ),
            (r#"{"entries":{"p":[]}}"#, "entries: expected an object"),
            (r#"{"entries":{"p":{"c":{}}}}"#, "entries: expected an array"),
            (r#"{"entries":{"p":{"c":[{"size":"1"}]}}}"#, "entries: size: expected an unsigned integer"),
            (r#"{"podEntries":{"p":{"memoryBlocks":7}}}"#, "podEntries: memoryBlocks: expected an array"),
        ] {
            let expected = Err(MemoryCheckpointError::Json(error.to_owned()));
            assert_eq!(MemoryCheckpoint::decode(text.as_bytes()), expected, "{text}");
        }
        for text in ["", "{", "{}{}"] {
            let decoded = MemoryCheckpoint::decode(text.as_bytes());
            assert!(matches!(decoded, Err(MemoryCheckpointError::Json(_))), "{text}");
        }
    }

    #[test]
    fn the_policy_must_be_that_of_the_file() {
        let none = MemoryCheckpoint::new(MemoryPolicy::None);
        assert_eq!(MemoryCheckpoint::restore(&none.encode(), MemoryPolicy::None), Ok(none.clone()));
        let error = MemoryCheckpoint::restore(&none.encode(), MemoryPolicy::Static).expect_err("another policy");
        let text = "could not restore state from checkpoint: [memorymanager] configured policy \"Static\" differs from \
                    state checkpoint policy \"None\", please drain this node and delete the memory manager checkpoint \
                    file \"/r/memory_manager_state\" before restarting Kubelet";
        assert_eq!(drain_advice(&error, "memory manager", Path::new("/r/memory_manager_state")), text);
        let error = MemoryCheckpoint::restore(b"{}", MemoryPolicy::None).expect_err("policy and checksum are missing");
        let text = "[memorymanager] configured policy \"None\" differs from state checkpoint policy \"\"";
        assert_eq!(error.to_string(), text);
        let text = drain_advice(&MemoryCheckpointError::Corrupted, "memory manager", Path::new("/m"));
        assert!(text.starts_with("could not restore state from checkpoint: checkpoint is corrupted, please"), "{text}");
    }

    fn any_name() -> impl Strategy<Value = String> {
        "[<>&\"\\\\\u{2028}\u{0}\na-c0-2é]{0,4}"
    }

    fn any_mask() -> impl Strategy<Value = NumaMask> {
        prop_oneof![any::<u64>().prop_map(NumaMask::from_bits), (0..8_u64).prop_map(NumaMask::from_bits)]
    }

    fn any_blocks() -> impl Strategy<Value = Vec<MemoryBlock>> {
        let block = (any_mask(), any_name(), any::<u64>());
        let block = block.prop_map(|(nodes, resource, size)| MemoryBlock { nodes, resource, size });
        prop::collection::vec(block, 0..3)
    }

    fn any_checkpoint() -> impl Strategy<Value = MemoryCheckpoint> {
        let table = any::<[u64; 5]>().prop_map(|[total, system_reserved, allocatable, reserved, free]| MemoryTable {
            total,
            system_reserved,
            allocatable,
            reserved,
            free,
        });
        let tables = prop::collection::btree_map(any_name(), table, 0..3);
        let node = (any::<i64>(), tables, any_mask()).prop_map(|(assignments, tables, group)| NodeMemory {
            assignments,
            tables,
            group,
        });
        let machine = prop::collection::btree_map(0..MAX_NODES, node, 0..4).prop_map(|nodes| MachineState { nodes });
        let containers = prop::collection::btree_map(any_name(), any_blocks(), 0..3);
        let assignments = prop::collection::btree_map(any_name().prop_map(PodUid::from), containers, 0..3);
        let pods = prop::collection::btree_map(any_name().prop_map(PodUid::from), any_blocks(), 0..2);
        (any_name(), machine, assignments, pods).prop_map(|(policy, machine, assignments, pods)| MemoryCheckpoint {
            policy,
            machine,
            assignments,
            pods,
        })
    }

    proptest! {
        #[test]
        fn decoding_reverses_encoding(checkpoint in any_checkpoint()) {
            prop_assert_eq!(MemoryCheckpoint::decode(&checkpoint.encode()), Ok(checkpoint));
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
                let _ignored = MemoryCheckpoint::decode(content);
            }
        }
    }
}
