//! Exec probe: runs a command in the container.
//!
//! Implements spec 05 §1.7.
//!
//! The runtime enforces the timeout; a runtime that does not answer blocks this probe alone.

use std::time::Duration;

use super::{
    grpc::go,
    outcome::{MOST_OUTPUT, Outcome, text_of},
};
use berth_cri::{CriError, CriResult, RuntimeService};
use berth_types::ContainerId;

/// Runs the command; its exit code determines the outcome.
pub async fn probe(runtime: &dyn RuntimeService, id: &ContainerId, command: &[String], timeout: Duration) -> Outcome {
    verdict(runtime.exec_sync(id.as_str(), command, timeout, MOST_OUTPUT).await)
}

fn verdict<T>(answer: CriResult<T>) -> Outcome {
    match answer {
        Ok(_) => Outcome::Success,
        Err(CriError::Exit { stdout, stderr, .. }) => {
            let mut output = stdout.into_bytes();
            output.extend(stderr.into_bytes());
            Outcome::Failure(text_of(&output))
        }
        Err(CriError::ExecTimedOut { command, limit }) => {
            Outcome::Failure(format!("command timed out: {command:?} timed out after {}", go(limit)))
        }
        Err(error) => Outcome::unknown(error.to_string()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn ended(code: i32, stdout: &str, stderr: &str) -> CriResult<()> {
        let (stdout, stderr) = (stdout.to_owned(), stderr.to_owned());
        Err(CriError::Exit { command: "x y".to_owned(), code, stdout, stderr })
    }

    #[test]
    fn the_exit_code_determines_the_outcome_and_the_output_its_message() {
        let late = CriError::ExecTimedOut { command: "x y".to_owned(), limit: Duration::from_secs(1) };
        let long = "o".repeat(MOST_OUTPUT - 2);
        for (answer, expected) in [
            (Ok(()), Outcome::Success),
            (ended(1, "out\n", "err\n"), Outcome::Failure("out\nerr\n".to_owned())),
            (ended(137, &long, "errors"), Outcome::Failure(format!("{long}er"))),
            (ended(1, &"o".repeat(2 * MOST_OUTPUT), "e"), Outcome::Failure("o".repeat(MOST_OUTPUT))),
            (Err(late), Outcome::Failure("command timed out: \"x y\" timed out after 1s".to_owned())),
        ] {
            assert_eq!(verdict(answer), expected);
        }
        assert_eq!(verdict::<()>(Err(CriError::Invalid("odd".to_owned()))).result(), None, "the command did not run");
    }
}
