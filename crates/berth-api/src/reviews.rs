//! TokenReview and SubjectAccessReview client: delegated authentication and authorization.
//!
//! Implements spec 04 §6, requests to the API server.

use std::{sync::Arc, time::Duration};

use bytes::Bytes;
use k8s_openapi::api::{
    authentication::v1::{TokenReview, TokenReviewSpec, TokenReviewStatus},
    authorization::v1::{SubjectAccessReview, SubjectAccessReviewSpec, SubjectAccessReviewStatus},
};
use serde::{Serialize, de::DeserializeOwned};
use tokio::time::{Instant, sleep, timeout};

use super::{
    api::{ApiClient, ApiError, Call, Resource},
    review_retry::{AttemptFailure, classify, pause},
};
use berth_metrics::{ReviewKind, ReviewMetrics};

/// Deadline of one attempt.
const ATTEMPT_LIMIT: Duration = Duration::from_secs(10);
/// Deadline of a review, including all attempts and back-offs.
const REVIEW_LIMIT: Duration = Duration::from_secs(30);
/// HTTP status of a successful review, for metrics.
const CREATED: u16 = 201;

/// A review failed; the text is its cause.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{0}")]
pub struct ReviewFailure(String);

/// Client for reviews.
#[derive(Clone)]
pub struct Reviews {
    client: Arc<dyn ApiClient>,
    metrics: ReviewMetrics,
}

impl Reviews {
    /// Returns a client; each attempt is recorded in `metrics`.
    pub fn new(client: Arc<dyn ApiClient>, metrics: ReviewMetrics) -> Self {
        Self { client, metrics }
    }

    /// Authenticates a token, without audiences; takes at most 30 s.
    ///
    /// # Errors
    /// No attempt succeeded, or the response is malformed.
    pub async fn token(&self, token: &str) -> Result<TokenReviewStatus, ReviewFailure> {
        let spec = TokenReviewSpec { token: token.to_owned(), audiences: None };
        let review = TokenReview { spec, ..TokenReview::default() };
        let answer: TokenReview = self.ask(ReviewKind::Token, Resource::TOKEN_REVIEWS, &review).await?;
        Ok(answer.status.unwrap_or_default())
    }

    /// Authorizes a request; takes at most 30 s.
    ///
    /// # Errors
    /// No attempt succeeded, or the response is malformed.
    pub async fn access(&self, spec: SubjectAccessReviewSpec) -> Result<SubjectAccessReviewStatus, ReviewFailure> {
        let review = SubjectAccessReview { spec, ..SubjectAccessReview::default() };
        let answer: SubjectAccessReview = self.ask(ReviewKind::Access, Resource::ACCESS_REVIEWS, &review).await?;
        Ok(answer.status.unwrap_or_default())
    }

    async fn ask<T: Serialize + DeserializeOwned>(
        &self,
        what: ReviewKind,
        resource: Resource,
        review: &T,
    ) -> Result<T, ReviewFailure> {
        let body = serde_json::to_vec(review).map_err(|e| ReviewFailure(e.to_string()))?;
        let call = Call::create(resource, "", body).within(ATTEMPT_LIMIT).once();
        let path = call.path();
        let late = |_| Err(ReviewFailure(format!("{path}: request timed out after {REVIEW_LIMIT:?}")));
        timeout(REVIEW_LIMIT, self.persist(what, &call)).await.unwrap_or_else(late)
    }

    async fn persist<T: DeserializeOwned>(&self, what: ReviewKind, call: &Call) -> Result<T, ReviewFailure> {
        let path = call.path();
        let mut attempt = 0;
        loop {
            let failure = match self.attempt(what, call.clone()).await {
                Ok(answer) => {
                    let wrong = |e: serde_json::Error| ReviewFailure(format!("{path}: invalid response: {e}"));
                    return serde_json::from_slice(&answer).map_err(wrong);
                }
                Err(failure) => failure,
            };
            match pause(attempt, rand::random(), failure.retry) {
                Some(pause) => sleep(pause).await,
                None => return Err(ReviewFailure(format!("{path}: {}", failure.text))),
            }
            attempt += 1;
        }
    }

    async fn attempt(&self, what: ReviewKind, call: Call) -> Result<Bytes, AttemptFailure> {
        let begun = Instant::now();
        let answer = self.client.call(call).await;
        let status = match &answer {
            Ok(_) => Some(CREATED),
            Err(ApiError::Refused(status)) => Some(status.code),
            Err(_) => None,
        };
        self.metrics.attempted(what, status, begun.elapsed());
        answer.map_err(|error| classify(&error))
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;
    use crate::testing::{FakeApi, refused};
    use berth_metrics::Registry;

    #[tokio::test(start_paused = true)]
    async fn what_may_pass_is_tried_again() {
        let mut answers = vec![
            Ok(json!({"status": {"authenticated": true}})),
            Err(ApiError::Lost("cut".to_owned())),
            Err(refused(500, "InternalError", "x")),
        ];
        let api = FakeApi::new(move |_| answers.pop().expect("no more"));
        let registry = Registry::new();
        let reviews = Reviews::new(api.clone(), ReviewMetrics::new(&registry));
        assert_eq!(reviews.token("t").await.expect("an answer").authenticated, Some(true));
        let calls = api.calls();
        assert!(calls.iter().all(|call| *call == calls[0]), "the same, each time");
        assert_eq!((calls.len(), calls[0].deadline), (3, ATTEMPT_LIMIT));
        let families = registry.gather();
        let total = families.iter().find(|f| f.name() == "apiserver_delegated_authn_request_total").expect("counted");
        let codes: Vec<&str> = total.get_metric().iter().map(|metric| metric.get_label()[0].value()).collect();
        assert_eq!(codes, ["201", "500", "<error>"]);
    }

    #[tokio::test(start_paused = true)]
    async fn a_permanent_failure_is_returned_without_a_retry() {
        for (error, expected) in [
            (refused(403, "Forbidden", "no"), "no"),
            (ApiError::Timeout(ATTEMPT_LIMIT), "request timed out after 10s"),
            (ApiError::Unreachable("dial tcp: connection refused".to_owned()), "dial tcp: connection refused"),
        ] {
            let api = FakeApi::new(move |_| Err(error.clone()));
            let reviews = Reviews::new(api.clone(), ReviewMetrics::new(&Registry::new()));
            let message = reviews.access(SubjectAccessReviewSpec::default()).await.expect_err(expected).to_string();
            assert_eq!(message, format!("{}: {expected}", Resource::ACCESS_REVIEWS.path("", "", "")));
            assert_eq!(api.calls().len(), 1);
        }
    }
}
