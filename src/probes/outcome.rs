//! Outcome of one probe attempt, its result and event. Pure.
//!
//! Implements spec 05 §1.1, §1.9.

use super::kind::ProbeKind;
use berth_ports::ProbeResult;

/// Maximum size of a response that is retained, in bytes.
pub const MOST_OUTPUT: usize = 10 * 1024;

/// Outcome of one attempt.
#[derive(Clone, PartialEq, Eq, Debug)]
pub enum Outcome {
    /// The probe passed.
    Success,
    /// The probe passed with a warning.
    Warning(String),
    /// The probe failed; the text is its output.
    Failure(String),
    /// The attempt has no result: it is retried, and never counted.
    Error {
        /// State in kubelet's message.
        state: ErrorState,
        /// Error text.
        text: String,
    },
}

/// State that results from an attempt with an error; only used in messages.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum ErrorState {
    /// `failure`
    Failure,
    /// `unknown`
    Unknown,
}

impl ErrorState {
    /// Name in messages.
    pub fn as_str(self) -> &'static str {
        match self {
            Self::Failure => "failure",
            Self::Unknown => "unknown",
        }
    }
}

impl Outcome {
    /// An error before anything was requested.
    pub fn unknown(text: impl Into<String>) -> Self {
        Self::Error { state: ErrorState::Unknown, text: text.into() }
    }

    /// Result that counts; `None` for errors.
    pub fn result(&self) -> Option<ProbeResult> {
        match self {
            Self::Success | Self::Warning(_) => Some(ProbeResult::Success),
            Self::Failure(_) => Some(ProbeResult::Failure),
            Self::Error { .. } => None,
        }
    }

    /// Reason and message of the warning event; `None` for a success.
    pub fn event(&self, kind: ProbeKind) -> Option<(&'static str, String)> {
        let kind = kind.label();
        match self {
            Self::Success => None,
            Self::Warning(output) => Some(("ProbeWarning", format!("{kind} probe warning: {output}"))),
            Self::Failure(output) => Some(("Unhealthy", format!("{kind} probe failed: {output}"))),
            Self::Error { state, text } => {
                let state = state.as_str();
                Some(("Unhealthy", format!("{kind} probe errored and resulted in {state} state: {text}")))
            }
        }
    }
}

/// Text of bytes, at most [`MOST_OUTPUT`] of them, invalid UTF-8 replaced.
pub fn text_of(bytes: &[u8]) -> String {
    String::from_utf8_lossy(bytes.get(..MOST_OUTPUT).unwrap_or(bytes)).into_owned()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ac_05_5_a_warning_counts_as_a_success_and_an_error_not_at_all() {
        for (outcome, expected) in [
            (Outcome::Success, Some(ProbeResult::Success)),
            (Outcome::Warning("w".to_owned()), Some(ProbeResult::Success)),
            (Outcome::Failure("f".to_owned()), Some(ProbeResult::Failure)),
            (Outcome::unknown("e"), None),
        ] {
            assert_eq!(outcome.result(), expected, "{outcome:?}");
        }
    }

    #[test]
    fn each_outcome_has_its_word() {
        for (outcome, kind, expected) in [
            (Outcome::Success, ProbeKind::Startup, None),
            (
                Outcome::Warning("w".to_owned()),
                ProbeKind::Readiness,
                Some(("ProbeWarning", "Readiness probe warning: w")),
            ),
            (
                Outcome::Failure("HTTP probe failed with statuscode: 500".to_owned()),
                ProbeKind::Liveness, // AC-05-1
                Some(("Unhealthy", "Liveness probe failed: HTTP probe failed with statuscode: 500")),
            ),
            (
                Outcome::unknown("e"),
                ProbeKind::Startup,
                Some(("Unhealthy", "Startup probe errored and resulted in unknown state: e")),
            ),
            (
                Outcome::Error { state: ErrorState::Failure, text: "e".to_owned() },
                ProbeKind::Startup,
                Some(("Unhealthy", "Startup probe errored and resulted in failure state: e")),
            ),
        ] {
            let event = outcome.event(kind);
            assert_eq!(event.as_ref().map(|(reason, text)| (*reason, text.as_str())), expected);
        }
    }

    #[test]
    fn an_answer_is_cut() {
        assert_eq!(text_of(b"short"), "short");
        assert_eq!(text_of(&vec![b'x'; MOST_OUTPUT + 1]).len(), MOST_OUTPUT);
        assert_eq!(text_of(&[b'a', 0xff]), "a\u{fffd}");
    }
}
