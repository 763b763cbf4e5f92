//! Exit status of a command in each version of the stream protocol (spec 04b §3.1, §4.1). Pure.

use serde_json::json;

use crate::{ports::stream_targets::CommandKind, streaming::websocket};

/// Format of the exit status.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum StatusFormat {
    /// JSON `Status`: version 4.
    Json,
    /// Complete API `Status`, as kubelet sends it to version 5 clients.
    Whole,
    /// Text, and nothing on success: versions before 4.
    Text,
}

/// Message for a result: an exit code, or the reason why there is none. `None`: nothing is sent.
pub fn exit_message(style: StatusFormat, verb: CommandKind, end: &Result<i32, String>) -> Option<String> {
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
        (StatusFormat::Json, _) => Some(status.to_string()),
        (StatusFormat::Whole, Err(why)) => Some(websocket::status::internal(&format!("{}: {why}", failed(verb)))),
        (StatusFormat::Whole, Ok(_)) => Some(websocket::status::of_error_stream(status.to_string().as_bytes())),
        (StatusFormat::Text, Ok(0)) => None,
        (StatusFormat::Text, _) => Some(message),
    }
}

fn failed(verb: CommandKind) -> &'static str {
    match verb {
        CommandKind::Exec => "error executing command in container",
        CommandKind::Attach => "error attaching to container",
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_version_has_its_own_words() {
        let lost = || Err("the shim is gone".to_owned());
        let rows = [
            (StatusFormat::Json, Ok(0), Some(r#"{"metadata":{},"status":"Success"}"#)),
            // AC-04b-S5
            (
                StatusFormat::Json,
                Ok(7),
                Some(
                    r#"{"metadata":{},"status":"Failure","message":"command terminated with non-zero exit code: exit status 7","reason":"NonZeroExitCode","details":{"causes":[{"reason":"ExitCode","message":"7"}]}}"#,
                ),
            ),
            (
                StatusFormat::Json,
                lost(),
                Some(
                    r#"{"metadata":{},"status":"Failure","message":"Internal error occurred: error executing command in container: the shim is gone","reason":"InternalError","code":500}"#,
                ),
            ),
            (StatusFormat::Whole, Ok(0), Some(r#"{"metadata":{},"status":"Success"}"#)),
            (
                StatusFormat::Whole,
                Ok(137),
                Some(
                    r#"{"metadata":{},"status":"Failure","message":"command terminated with non-zero exit code: command terminated with exit code 137","reason":"NonZeroExitCode","details":{"causes":[{"reason":"ExitCode","message":"137"}]}}"#,
                ),
            ),
            (StatusFormat::Text, Ok(0), None),
            (StatusFormat::Text, Ok(7), Some("command terminated with non-zero exit code: exit status 7")),
            (
                StatusFormat::Text,
                lost(),
                Some("Internal error occurred: error executing command in container: the shim is gone"),
            ),
        ];
        for (style, end, expected) in rows {
            assert_eq!(exit_message(style, CommandKind::Exec, &end).as_deref(), expected, "{style:?} {end:?}");
        }
        let attach = exit_message(StatusFormat::Whole, CommandKind::Attach, &lost()).expect("a failure is reported");
        assert!(attach.contains("error attaching to container: the shim is gone"), "{attach}");
    }
}
