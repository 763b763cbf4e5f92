//! State file with start and end of the last node shutdown. Pure. Implements spec 05 §7.6.

use jiff::Timestamp;
use serde::{Deserialize, Serialize};

/// Go's zero time in JSON.
const NEVER: &str = "0001-01-01T00:00:00Z";

/// Start and end of the last shutdown; `None` if it did not happen.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct ShutdownRecord {
    /// Start time.
    pub start: Option<Timestamp>,
    /// End time.
    pub end: Option<Timestamp>,
}

#[derive(Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
struct StateFileContent {
    start_time: String,
    end_time: String,
}

impl ShutdownRecord {
    /// Decodes the file.
    ///
    /// # Errors
    /// The content is malformed.
    pub fn decode(content: &[u8]) -> Result<Self, String> {
        let written: StateFileContent = serde_json::from_slice(content).map_err(|error| error.to_string())?;
        let time = |text: &str| match text {
            NEVER => Ok(None),
            text => text.parse().map(Some).map_err(|error: jiff::Error| error.to_string()),
        };
        Ok(Self { start: time(&written.start_time)?, end: time(&written.end_time)? })
    }

    /// Encodes the file.
    pub fn encode(&self) -> Vec<u8> {
        let time = |time: Option<Timestamp>| time.map_or_else(|| NEVER.to_owned(), |time| time.to_string());
        let written = StateFileContent { start_time: time(self.start), end_time: time(self.end) };
        serde_json::to_vec(&written).unwrap_or_default() // two strings cannot fail
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_reference_s_file_is_read_and_written() {
        let begun = ShutdownRecord { start: Some("2026-01-01T00:00:00.5Z".parse().expect("a time")), end: None };
        let text = r#"{"startTime":"2026-01-01T00:00:00.5Z","endTime":"0001-01-01T00:00:00Z"}"#;
        assert_eq!((begun.encode(), ShutdownRecord::decode(text.as_bytes())), (text.as_bytes().to_vec(), Ok(begun)));
        let offset = r#"{"startTime":"2026-01-01T01:00:00.5+01:00","endTime":"0001-01-01T00:00:00Z"}"#;
        assert_eq!(ShutdownRecord::decode(offset.as_bytes()), Ok(begun));
        for garbage in ["", "{}", "[]", r#"{"startTime":"x","endTime":"y"}"#] {
            assert!(ShutdownRecord::decode(garbage.as_bytes()).is_err(), "{garbage}");
        }
    }
}
