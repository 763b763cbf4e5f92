//! Retry policy of failed status patches and pod deletions. Pure.
//!
//! Implements spec 10 §7, rows "pod status PATCH" and "pod DELETE".

use std::time::Duration;

use crate::api::ApiError;

/// Action after a failed write.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum WriteFailureAction {
    /// None: the desired state is reached.
    Done,
    /// None: the pod no longer exists.
    Gone,
    /// No retry with this version against that object.
    Refused,
    /// Retry after that delay, or after the pod's own back-off.
    Retry(Option<Duration>),
}

/// Pod that the watch shows under the name.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum NameOwner {
    /// The same pod, or its mirror.
    Same,
    /// Another pod.
    Another,
    /// 404: the pod does not exist.
    NoPod,
}

/// Classifies a failed PATCH of the status.
pub fn after_patch(error: &ApiError, holder: NameOwner) -> WriteFailureAction {
    match error.code() {
        404 => WriteFailureAction::Gone,
        // Access to objects that do not exist is forbidden too (spec 10 §6.1): the watch distinguishes the cases.
        403 if holder != NameOwner::Same => WriteFailureAction::Gone,
        422 if is_other_uid(error) => WriteFailureAction::Gone,
        400 | 413 | 415 | 422 => WriteFailureAction::Refused,
        _ => WriteFailureAction::Retry(error.retry_after()),
    }
}

/// Classifies a failed final DELETE. The request has a UID precondition, so a retry is safe.
pub fn after_delete(error: &ApiError, holder: NameOwner) -> WriteFailureAction {
    match error.code() {
        404 => WriteFailureAction::Done,
        409 if holder != NameOwner::Same => WriteFailureAction::Done,
        _ => WriteFailureAction::Retry(error.retry_after()),
    }
}

/// Whether the server refused because another pod has the name now (spec 10 §6.4).
fn is_other_uid(error: &ApiError) -> bool {
    error.status().is_some_and(|status| {
        status.causes.iter().any(|cause| cause.field == "metadata.uid") || status.message.contains("metadata.uid:")
    })
}

/// Text for the event: the causes of the refusal, or else its message.
pub fn cause_of(error: &ApiError) -> String {
    let causes: Vec<String> = error
        .status()
        .map(|status| status.causes.iter().map(|cause| format!("{}: {}", cause.field, cause.message)).collect())
        .unwrap_or_default();
    if causes.is_empty() { error.to_string() } else { causes.join(", ") }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{
        api::{ApiStatus, ApiStatusCause},
        testing::refused,
    };

    fn invalid(field: &str) -> ApiError {
        let cause = ApiStatusCause { reason: "FieldValueInvalid".into(), message: "no".into(), field: field.into() };
        let status = ApiStatus { code: 422, reason: "Invalid".into(), causes: vec![cause], ..ApiStatus::default() };
        ApiError::Refused(Box::new(status))
    }

    fn throttled() -> ApiError {
        let wait = Some(Duration::from_secs(3));
        ApiError::Refused(Box::new(ApiStatus { code: 429, retry_after: wait, ..ApiStatus::default() }))
    }

    fn code(code: u16) -> ApiError {
        refused(code, "", "")
    }

    #[test]
    fn a_patch_by_its_answer() {
        use NameOwner::{Another, NoPod, Same};
        use WriteFailureAction::{Gone, Refused, Retry};
        for (error, holder, verdict) in [
            (code(401), Same, Retry(None)),
            (code(403), Same, Retry(None)),
            (code(403), Another, Gone), // AC-10-21
            (code(403), NoPod, Gone),
            (code(404), Same, Gone), // AC-10-21
            (code(409), Same, Retry(None)),
            (invalid("metadata.uid"), Same, Gone), // AC-10-20
            (invalid("status.containerStatuses[0].state"), Same, Refused), // AC-10-22
            (code(422), Same, Refused),
            (code(400), Same, Refused),
            (throttled(), Same, Retry(Some(Duration::from_secs(3)))), // AC-10-35
            (code(500), Same, Retry(None)),
            (code(503), Same, Retry(None)),
            (ApiError::Lost("reset".into()), Same, Retry(None)),
            (ApiError::Timeout(Duration::from_secs(1)), Same, Retry(None)),
        ] {
            assert_eq!(after_patch(&error, holder), verdict, "{error:?} {holder:?}");
        }
    }

    #[test]
    fn a_delete_by_its_answer() {
        use NameOwner::{Another, NoPod, Same};
        use WriteFailureAction::{Done, Retry};
        for (error, holder, verdict) in [
            (code(404), Same, Done), // AC-10-26
            (code(409), Another, Done),
            (code(409), NoPod, Done),
            (code(409), Same, Retry(None)),
            (code(401), Same, Retry(None)),
            (code(403), Same, Retry(None)),
            (code(500), Same, Retry(None)),
            (ApiError::Lost("reset".into()), Same, Retry(None)), // AC-10-26
        ] {
            assert_eq!(after_delete(&error, holder), verdict, "{error:?} {holder:?}");
        }
    }

    #[test]
    fn the_cause_is_the_message_with_its_field() {
        assert_eq!(cause_of(&invalid("status.qosClass")), "status.qosClass: no");
        assert_eq!(cause_of(&refused(422, "Invalid", "bad")), "bad");
    }
}
