//! Checkpoint of probe results, so that a restart of the agent turns no pod unready. Pure.
//!
//! The file is optional: one that cannot be read is ignored.

use std::collections::{BTreeMap, HashMap};

use serde::{Deserialize, Serialize};

use berth_ports::{ProbeResult, ProbeResults};
use berth_types::ContainerId;

/// Maximum number of containers; a file with more is invalid.
const MOST: usize = 100_000;

/// Content of the file.
#[derive(Clone, PartialEq, Eq, Debug, Default, Serialize, Deserialize)]
pub struct ResultsCheckpoint {
    /// Results by container ID.
    containers: BTreeMap<String, SavedResult>,
}

#[derive(Clone, Copy, PartialEq, Eq, Debug, Default, Serialize, Deserialize)]
struct SavedResult {
    #[serde(default, skip_serializing_if = "Option::is_none")]
    started: Option<bool>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    ready: Option<bool>,
}

impl ResultsCheckpoint {
    /// Collects the results to save; a later one of the same container supplements an earlier one.
    pub fn of<'a>(results: impl IntoIterator<Item = (&'a ContainerId, &'a ProbeResults)>) -> Self {
        let passed = |result: Option<ProbeResult>| result.map(|r| r == ProbeResult::Success);
        let mut saved = Self::default();
        for (id, results) in results {
            let result = SavedResult { started: passed(results.startup), ready: passed(results.readiness) };
            if result != SavedResult::default() {
                let known = saved.containers.entry(id.to_string()).or_default();
                *known = SavedResult { started: result.started.or(known.started), ready: result.ready.or(known.ready) };
            }
        }
        saved
    }

    /// Converts the content to results.
    pub fn into_results(self) -> HashMap<ContainerId, ProbeResults> {
        let result = |passed: Option<bool>| passed.map(|p| if p { ProbeResult::Success } else { ProbeResult::Failure });
        let one = |saved: SavedResult| ProbeResults {
            startup: result(saved.started),
            readiness: result(saved.ready),
            liveness: None,
        };
        self.containers.into_iter().map(|(id, saved)| (ContainerId::from(id), one(saved))).collect()
    }

    /// Parses the file.
    ///
    /// # Errors
    /// The file is damaged.
    pub fn decode(content: &[u8]) -> Result<Self, String> {
        let saved: Self = serde_json::from_slice(content).map_err(|e| e.to_string())?;
        let count = saved.containers.len();
        if count > MOST { Err(format!("too many containers: {count}")) } else { Ok(saved) }
    }

    /// Serializes the file.
    pub fn encode(&self) -> Vec<u8> {
        serde_json::to_vec(self).unwrap_or_default() // maps with texts as keys always have a JSON form
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_file_survives_a_round_trip_and_damage_is_detected() {
        let results = ProbeResults { startup: Some(ProbeResult::Success), readiness: None, liveness: None };
        let id: ContainerId = "c".into();
        let saved = ResultsCheckpoint::of([(&id, &results), (&"none".into(), &ProbeResults::default())]);
        assert_eq!(saved.encode(), br#"{"containers":{"c":{"started":true}}}"#);
        assert_eq!(ResultsCheckpoint::decode(&saved.encode()), Ok(saved.clone()));
        assert_eq!(saved.into_results(), HashMap::from([(id, results)]));
        for bad in ["", "{", "[]", r#"{"containers":{"c":3}}"#, "\u{0}"] {
            assert!(ResultsCheckpoint::decode(bad.as_bytes()).is_err(), "{bad:?}");
        }
    }
}
