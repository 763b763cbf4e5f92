//! CPU manager checkpoint `cpu_manager_state` for the policy `none`.
//!
//! No exclusive CPUs are assigned; but a file in which another agent has assigned some must not be
//! silently discarded. Implements spec 01 §17.2, §17.3, spec 06 §8.
//!
//! Byte-compatible with upstream, so that a node can switch agents in both directions.

use std::{collections::BTreeMap, fmt::Write};

use serde::Deserialize;

use berth_ports::StateFile;
use berth_types::hash::fnv1a_32;

/// The only supported policy: containers run on all CPUs.
pub const POLICY_NONE: &str = "none";
/// Content of the file under this policy.
const NONE: &str = r#"{"policyName":"none","defaultCpuSet":"","checksum":1353318690}"#;

/// CPU sets by pod UID and container.
type Entries = BTreeMap<String, BTreeMap<String, String>>;

#[derive(Deserialize)]
#[serde(rename_all = "camelCase")]
struct State {
    #[serde(default)]
    policy_name: String,
    #[serde(default)]
    default_cpu_set: String,
    #[serde(default)]
    entries: Option<Entries>,
    #[serde(default)]
    checksum: u64,
}

/// Why the file is rejected.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum CpuStateError {
    /// The checksum does not match the content.
    #[error("checkpoint is corrupted")]
    Corrupt,
    /// The JSON is malformed.
    #[error("cannot be decoded: {0}")]
    Json(String),
    /// The file has another policy, under which CPUs may have been assigned exclusively.
    #[error("configured policy \"{POLICY_NONE}\" differs from state checkpoint policy \"{0}\"")]
    OtherPolicy(String),
}

/// Checks the file of a previous agent; creates it if it is missing.
///
/// # Errors
/// Upstream's text, if CPUs may have been assigned exclusively, or the file cannot be read or written.
pub async fn check_or_create(file: &dyn StateFile) -> Result<(), String> {
    let path = file.path().display();
    let found = file.read().await.map_err(|err| format!("start cpu manager error: cannot read {path}: {err}"))?;
    if let Some(bytes) = &found {
        check(bytes).map_err(|cause| {
            format!(
                "start cpu manager error: could not restore state from checkpoint: {cause}, please drain this node and \
                 delete the CPU manager checkpoint file \"{path}\" before restarting Kubelet"
            )
        })?;
        return Ok(());
    }
    let written = file.replace(NONE.as_bytes().to_vec()).await;
    written.map_err(|err| format!("start cpu manager error: cannot write {path}: {err}"))
}

/// Checks that the content has policy `none`, under which no CPUs are assigned exclusively.
///
/// # Errors
/// Another policy, a wrong checksum, or malformed JSON.
pub fn check(bytes: &[u8]) -> Result<(), CpuStateError> {
    let state: State = serde_json::from_slice(bytes).map_err(|err| CpuStateError::Json(err.to_string()))?;
    // Zero: files from before checksums were introduced.
    if state.checksum != 0 && state.checksum != u64::from(fnv1a_32(dump(&state).as_bytes())) {
        return Err(CpuStateError::Corrupt);
    }
    if state.policy_name != POLICY_NONE {
        return Err(CpuStateError::OtherPolicy(state.policy_name));
    }
    Ok(())
}

/// The text that is checksummed: the value as Go prints it.
fn dump(state: &State) -> String {
    let map = |text: &mut String, entries: &BTreeMap<String, String>| {
        let pairs: Vec<String> = entries.iter().map(|(key, value)| format!("{key}:{value}")).collect();
        let _infallible = write!(text, "map[{}]", pairs.join(" "));
    };
    let mut entries = Vec::new();
    for (pod, containers) in state.entries.iter().flatten() {
        let mut text = format!("{pod}:");
        map(&mut text, containers);
        entries.push(text);
    }
    format!(
        "(*state.CPUManagerCheckpoint){{PolicyName:(string){} DefaultCPUSet:(string){} \
         Entries:(map[string]map[string]string)map[{}] Checksum:(checksum.Checksum)0}}",
        state.policy_name,
        state.default_cpu_set,
        entries.join(" ")
    )
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn files_of_the_reference_are_read() {
        let other = |policy: &str| Err(CpuStateError::OtherPolicy(policy.to_owned()));
        for (text, expected) in [
            // AC-01-38
            (r#"{"policyName":"none","defaultCpuSet":"4-6","entries":{},"checksum":354655845}"#, Ok(())),
            (r#"{"policyName":"none","defaultCpuSet":"4-6","checksum":354655845}"#, Ok(())),
            // AC-06-4
            (r#"{"policyName":"none","defaultCpuSet":"","checksum":1353318690}"#, Ok(())),
            (NONE, Ok(())),
            (r#"{"policyName":"none","defaultCpuSet":"0-3","checksum":0}"#, Ok(())),
            (r#"{"policyName":"none","defaultCpuSet":"4-7","checksum":354655845}"#, Err(CpuStateError::Corrupt)),
            (r#"{"policyName":"none","defaultCpuSet":"","checksum":4294967297}"#, Err(CpuStateError::Corrupt)),
            (
                r#"{"policyName":"static","defaultCpuSet":"0-1","entries":{"u":{"c":"2-3"}},"checksum":0}"#,
                other("static"),
            ),
            (r#"{"policyName":"static","entries":{"u":{"c":"2-3"}},"checksum":7}"#, Err(CpuStateError::Corrupt)),
            ("{}", other("")),
        ] {
            assert_eq!(check(text.as_bytes()), expected, "{text}");
        }
        for broken in ["", "[7]", "{\"policyName\":1}", "{\"checksum\":-1}"] {
            assert!(matches!(check(broken.as_bytes()), Err(CpuStateError::Json(_))), "{broken}");
        }
    }
}
