//! Exit status of a command as the last message of a WebSocket (spec 04b §3.1, §4.2). Pure.
//!
//! A `Status` of the Kubernetes API with an empty `metadata`; clients read its reason and causes.

use serde_json::{Map, Value, json};

/// Status of a successful command.
pub fn success() -> String {
    json!({"metadata": {}, "status": "Success"}).to_string()
}

/// Status of a command that exited with a code other than 0.
fn exited(code: u8) -> String {
    json!({
        "metadata": {},
        "status": "Failure",
        "message": format!("command terminated with non-zero exit code: command terminated with exit code {code}"),
        "reason": "NonZeroExitCode",
        "details": {"causes": [{"reason": "ExitCode", "message": code.to_string()}]},
    })
    .to_string()
}

/// Status of an internal error.
pub fn internal(why: &str) -> String {
    json!({
        "metadata": {},
        "status": "Failure",
        "message": format!("Internal error occurred: {why}"),
        "reason": "InternalError",
        "details": {"causes": [{"message": why}]},
        "code": 500,
    })
    .to_string()
}

/// Converts the content of the runtime's error stream; an empty stream means success.
pub fn of_error_stream(content: &[u8]) -> String {
    if content.is_empty() {
        return success();
    }
    let Ok(status) = serde_json::from_slice::<Map<String, Value>>(content) else {
        let shown = String::from_utf8_lossy(content);
        return internal(&format!("error stream protocol error: not a status in {shown:?}"));
    };
    let text = |name: &str| status.get(name).and_then(Value::as_str).unwrap_or_default();
    match text("status") {
        "Success" => success(),
        "Failure" if text("reason") == "NonZeroExitCode" => match exit_code(&status) {
            Ok(code) => exited(code),
            Err(why) => internal(&format!("error stream protocol error: {why}")),
        },
        "Failure" => internal(text("message")),
        _ => internal("error stream protocol error: unknown error"),
    }
}

fn exit_code(status: &Map<String, Value>) -> Result<u8, String> {
    let details = status.get("details").ok_or("details must be set")?;
    let causes = details.get("causes").and_then(Value::as_array).map(Vec::as_slice).unwrap_or_default();
    let cause = causes.iter().find(|cause| cause.get("reason").is_some_and(|reason| reason == "ExitCode"));
    let cause = cause.ok_or("no ExitCode cause given")?;
    let text = cause.get("message").and_then(Value::as_str).unwrap_or_default();
    text.parse().map_err(|_| format!("invalid exit code value {text:?}"))
}

/// Converts the runtime's error response to a status: its own `Status`, or any text.
pub fn of_refusal(body: &[u8]) -> String {
    if let Ok(mut status) = serde_json::from_slice::<Map<String, Value>>(body)
        && status.get("kind").is_some_and(|kind| kind == "Status")
        && status.get("status").is_some_and(|status| status == "Failure")
    {
        status.shift_remove("kind");
        status.shift_remove("apiVersion");
        status.entry("metadata").or_insert_with(|| json!({}));
        return Value::Object(status).to_string();
    }
    internal(&format!("unable to upgrade connection: {}", String::from_utf8_lossy(body)))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn how_it_ended() {
        let wrong = |why: &str| internal(&format!("error stream protocol error: {why}"));
        // AC-04b-S5
        let seven = r#"{"status":"Failure","message":"x","reason":"NonZeroExitCode","details":{"causes":[{"reason":"ExitCode","message":"7"}]}}"#;
        let rows = [
            ("", success()),
            (r#"{"status":"Success"}"#, success()),
            (seven, exited(7)),
            (
                r#"{"metadata":{},"status":"Failure","message":"no","reason":"InternalError","code":500}"#,
                internal("no"),
            ),
            (r#"{"status":"Failure","reason":"NonZeroExitCode"}"#, wrong("details must be set")),
            (r#"{"status":"Failure","reason":"NonZeroExitCode","details":{}}"#, wrong("no ExitCode cause given")),
            (&seven.replace("\"7\"", "\"256\""), wrong("invalid exit code value \"256\"")),
            (r#"{"status":"Odd"}"#, wrong("unknown error")),
            ("boom", wrong("not a status in \"boom\"")),
        ];
        for (content, expected) in rows {
            assert_eq!(of_error_stream(content.as_bytes()), expected, "{content}");
        }
        assert_eq!(success(), r#"{"metadata":{},"status":"Success"}"#);
        assert_eq!(
            exited(7),
            r#"{"metadata":{},"status":"Failure","message":"command terminated with non-zero exit code: command terminated with exit code 7","reason":"NonZeroExitCode","details":{"causes":[{"reason":"ExitCode","message":"7"}]}}"#
        );
        assert_eq!(
            internal("x"),
            r#"{"metadata":{},"status":"Failure","message":"Internal error occurred: x","reason":"InternalError","details":{"causes":[{"message":"x"}]},"code":500}"#
        );
    }

    #[test]
    fn why_it_never_began() {
        assert_eq!(of_refusal(b"404 page not found\n"), internal("unable to upgrade connection: 404 page not found\n"));
        let own = r#"{"kind":"Status","apiVersion":"v1","metadata":{},"status":"Failure","message":"m","code":404}"#;
        assert_eq!(of_refusal(own.as_bytes()), r#"{"metadata":{},"status":"Failure","message":"m","code":404}"#);
    }
}
