//! Exit status of a command in each version of the stream protocol (spec 04b §3.1, §4.1). Pure.

use serde_json::json;

use crate::{ports::targets::Verb, streaming::websocket};

/// Format of the exit status.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Style {
    /// JSON `Status`: version 4.
    Json,
    /// Complete API `Status`, as kubelet sends it to version 5 clients.
    Whole,
    /// Text, and nothing on success: versions before 4.
    Text,
}

/// Message for a result: an exit code, or the reason why there is none. `None`: nothing is sent.
pub fn told(style: Style, verb: Verb, end: &Result<i32, String>) -> Option<String> {
    let message = match end {
        Ok(0) => String::new(),
        Ok(code) => format!("command terminated with non-zero exit code: exit status {code}"),
        Err(why) => format!("Internal error occurred: {}: {why}", failed(verb)),
    };
    let status = match end {
        Ok(0) => json!({"metadata": {}, "status": "Success"}),
        Ok(code) => json!({
            "metadata": {},
            "status": "Failure",
            "message": message,
            "reason": "NonZeroExitCode",
            "details": {"causes": [{"reason": "ExitCode", "message": code.to_string()}]},
        }),
        Err(_) => {
            json!({"metadata": {}, "status": "Failure", "message": message, "reason": "InternalError", "code": 500})
        }
    };
    match (style, end) {
        (Style::Json, _) => Some(status.to_string()),
        (Style::Whole, Err(why)) => Some(websocket::status::internal(&format!("{}: {why}", failed(verb)))),
        (Style::Whole, Ok(_)) => Some(websocket::status::of_error_stream(status.to_string().as_bytes())),
        (Style::Text, Ok(0)) => None,
        (Style::Text, _) => Some(message),
    }
}

fn failed(verb: Verb) -> &'static str {
    match verb {
        Verb::Exec => "error executing command in container",
        Verb::Attach => "error attaching to container",
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_version_has_its_own_words() {
        let lost = || Err("the shim is gone".to_owned());
        let rows = [
            (Style::Json, Ok(0), Some(r#"{"metadata":{},"status":"Success"}"#)),
            // AC-04b-S5
            (
                Style::Json,
                Ok(7),
                Some(
                    r#"{"metadata":{},"status":"Failure","message":"command terminated with non-zero exit code: exit status 7","reason":"NonZeroExitCode","details":{"causes":[{"reason":"ExitCode","message":"7"}]}}"#,
                ),
            ),
            (
                Style::Json,
                lost(),
                Some(
                    r#"{"metadata":{},"status":"Failure","message":"Internal error occurred: error executing command in container: the shim is gone","reason":"InternalError","code":500}"#,
                ),
            ),
            (Style::Whole, Ok(0), Some(r#"{"metadata":{},"status":"Success"}"#)),
            (
                Style::Whole,
                Ok(137),
                Some(
                    r#"{"metadata":{},"status":"Failure","message":"command terminated with non-zero exit code: command terminated with exit code 137","reason":"NonZeroExitCode","details":{"causes":[{"reason":"ExitCode","message":"137"}]}}"#,
                ),
            ),
            (Style::Text, Ok(0), None),
            (Style::Text, Ok(7), Some("command terminated with non-zero exit code: exit status 7")),
            (
                Style::Text,
                lost(),
                Some("Internal error occurred: error executing command in container: the shim is gone"),
            ),
        ];
        for (style, end, expected) in rows {
            assert_eq!(told(style, Verb::Exec, &end).as_deref(), expected, "{style:?} {end:?}");
        }
        let attach = told(Style::Whole, Verb::Attach, &lost()).expect("a failure is told");
        assert!(attach.contains("error attaching to container: the shim is gone"), "{attach}");
    }
}
