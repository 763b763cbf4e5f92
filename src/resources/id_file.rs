//! Document of a pod's `userns` file with its ID mappings. Pure. Implements spec 06 §5.1, §5.3.
//!
//! Byte-compatible with upstream, so that a node can switch agents in both directions.

use serde::{Deserialize, Serialize};

#[derive(Serialize, Deserialize)]
struct File {
    #[serde(rename = "uidMappings", default)]
    uids: Option<Vec<Mapping>>,
    #[serde(rename = "gidMappings", default)]
    gids: Option<Vec<Mapping>>,
}

#[derive(Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
struct Mapping {
    #[serde(rename = "hostId")]
    host: u32,
    #[serde(rename = "containerId")]
    container: u32,
    length: u32,
}

/// Why a file is invalid.
#[derive(Clone, PartialEq, Eq, Debug, thiserror::Error)]
pub enum IdFileError {
    /// The JSON is malformed.
    #[error("invalid user namespace mappings file: {0}")]
    Json(String),
    /// There is not exactly one UID mapping.
    #[error("invalid user namespace configuration: no more than one mapping allowed.")]
    Count,
    /// The number of GID mappings differs.
    #[error("invalid user namespace configuration: GID and UID mappings should be identical.")]
    GidCount,
    /// The GID mapping differs from the UID mapping.
    #[error("invalid user namespace configuration: GID and UID mapping should be identical")]
    Gid,
    /// The mapping does not begin at ID 0.
    #[error("invalid user namespace configuration: UID 0 must be mapped")]
    NoRoot,
}

/// Encodes the file of a pod with this host ID range.
pub fn encode(first: u32, length: u32) -> Vec<u8> {
    let mappings = Some(vec![Mapping { host: first, container: 0, length }]);
    let file = File { uids: mappings.clone(), gids: mappings };
    serde_json::to_vec(&file).expect("numbers always serialize")
}

/// Decodes the first host ID and the number of IDs.
///
/// # Errors
/// The mappings are malformed; whether the range fits the node is checked by the ID table.
pub fn decode(bytes: &[u8]) -> Result<(u32, u32), IdFileError> {
    let file: File = serde_json::from_slice(bytes).map_err(|e| IdFileError::Json(e.to_string()))?;
    let (uids, gids) = (file.uids.unwrap_or_default(), file.gids.unwrap_or_default());
    let [uid] = uids.as_slice() else { return Err(IdFileError::Count) };
    let [gid] = gids.as_slice() else { return Err(IdFileError::GidCount) };
    if uid != gid {
        return Err(IdFileError::Gid);
    }
    if uid.container != 0 {
        return Err(IdFileError::NoRoot);
    }
    Ok((uid.host, uid.length))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_text_is_that_of_the_reference() {
        let text = r#"{"uidMappings":[{"hostId":65536,"containerId":0,"length":65536}],"gidMappings":[{"hostId":65536,"containerId":0,"length":65536}]}"#;
        assert_eq!(encode(65_536, 65_536), text.as_bytes());
        assert_eq!(decode(text.as_bytes()), Ok((65_536, 65_536)));
    }

    #[test]
    fn malformed_files_have_distinct_errors() {
        let one = |host: u32, container: u32| format!(r#"{{"hostId":{host},"containerId":{container},"length":1}}"#);
        let file = |uids: &str, gids: &str| format!(r#"{{"uidMappings":[{uids}],"gidMappings":[{gids}]}}"#);
        let two = format!("{},{}", one(1, 0), one(1, 0));
        for (text, expected) in [
            ("{".to_owned(), "invalid user namespace mappings file: "),
            (file("", ""), "no more than one mapping allowed."),
            ("{}".to_owned(), "no more than one mapping allowed."),
            (file(&two, &one(1, 0)), "no more than one mapping allowed."),
            (file(&one(1, 0), &two), "GID and UID mappings should be identical."),
            (file(&one(1, 0), &one(2, 0)), "GID and UID mapping should be identical"),
            (file(&one(1, 1), &one(1, 1)), "UID 0 must be mapped"),
        ] {
            let error = decode(text.as_bytes()).unwrap_err().to_string();
            assert!(error.contains(expected), "{text}: {error}");
        }
    }
}
