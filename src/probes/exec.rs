//! An exec probe: a command in the container. Behaviour: spec 05 §1.7.
//!
//! The runtime ends what takes too long; a runtime that does not answer costs this probe alone.

use std::time::Duration;

use super::{
    grpc::go,
    outcome::{Outcome, text_of},
};
use crate::{
    cri::{CriError, RuntimeService},
    pod::ContainerId,
};

/// Runs the command; its exit code is the verdict.
pub async fn probe(runtime: &dyn RuntimeService, id: &ContainerId, command: &[String], timeout: Duration) -> Outcome {
    match runtime.exec_sync(id.as_str(), command, timeout).await {
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
