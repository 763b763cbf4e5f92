//! `cpu_manager_state`: which processors which container has alone. Nobody is given any here; what another agent has
//! given must not be forgotten without a word. Behaviour: spec 01 §17.2, §17.3, spec 06 §8.
//!
//! Byte-compatible with the reference, so that a node can change agents in both directions.

use std::{collections::BTreeMap, fmt::Write};

use serde::Deserialize;

use berth_ports::StateFile;
use berth_types::hash::fnv1a_32;

/// The one policy there is: every container runs wherever it likes.
pub const POLICY_NONE: &str = "none";
/// What the file says under it.
const NONE: &str = r#"{"policyName":"none","defaultCpuSet":"","checksum":1353318690}"#;

/// Processors by container, by UID of the pod.
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

/// Why the file stands in the way.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum Unusable {
    /// The checksum is not that of the content.
    #[error("checkpoint is corrupted")]
    Corrupt,
    /// It is not the JSON it should be.
    #[error("cannot be decoded: {0}")]
    Json(String),
    /// Containers may have been given processors under another policy.
    #[error("configured policy \"{POLICY_NONE}\" differs from state checkpoint policy \"{0}\"")]
    OtherPolicy(String),
}

/// Takes over the file of whoever was the agent before, and leaves it as the next one expects it.
///
/// # Errors
/// The reference's text, where containers may have been given processors of their own, or nobody can tell.
pub async fn take_over(file: &dyn StateFile) -> Result<(), String> {
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

/// Whether the file's text says that nobody was given anything.
///
/// # Errors
/// It does not, or nobody can tell.
pub fn check(bytes: &[u8]) -> Result<(), Unusable> {
    let state: State = serde_json::from_slice(bytes).map_err(|err| Unusable::Json(err.to_string()))?;
    // Zero stands for files from before there were checksums.
    if state.checksum != 0 && state.checksum != u64::from(fnv1a_32(dump(&state).as_bytes())) {
        return Err(Unusable::Corrupt);
    }
    if state.policy_name != POLICY_NONE {
        return Err(Unusable::OtherPolicy(state.policy_name));
    }
    Ok(())
}

/// What the checksum is of: the value as the reference's language prints it.
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
        let other = |policy: &str| Err(Unusable::OtherPolicy(policy.to_owned()));
        for (text, expected) in [
            // AC-01-38
            (r#"{"policyName":"none","defaultCpuSet":"4-6","entries":{},"checksum":354655845}"#, Ok(())),
            (r#"{"policyName":"none","defaultCpuSet":"4-6","checksum":354655845}"#, Ok(())),
            // AC-06-4
            (r#"{"policyName":"none","defaultCpuSet":"","checksum":1353318690}"#, Ok(())),
            (NONE, Ok(())),
            (r#"{"policyName":"none","defaultCpuSet":"0-3","checksum":0}"#, Ok(())),
            (r#"{"policyName":"none","defaultCpuSet":"4-7","checksum":354655845}"#, Err(Unusable::Corrupt)),
            (r#"{"policyName":"none","defaultCpuSet":"","checksum":4294967297}"#, Err(Unusable::Corrupt)),
            (
                r#"{"policyName":"static","defaultCpuSet":"0-1","entries":{"u":{"c":"2-3"}},"checksum":0}"#,
                other("static"),
            ),
            (r#"{"policyName":"static","entries":{"u":{"c":"2-3"}},"checksum":7}"#, Err(Unusable::Corrupt)),
            ("{}", other("")),
        ] {
            assert_eq!(check(text.as_bytes()), expected, "{text}");
        }
        for broken in ["", "[7]", "{\"policyName\":1}", "{\"checksum\":-1}"] {
            assert!(matches!(check(broken.as_bytes()), Err(Unusable::Json(_))), "{broken}");
        }
    }
}
