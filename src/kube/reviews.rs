//! TokenReview and SubjectAccessReview: whose a token is, what somebody may do (spec 04 §6).

use std::{io, time::Duration};

use ::kube::{Client, client::Body};
use http::Request;
use http_body_util::{BodyExt, Limited};
use k8s_openapi::api::{
    authentication::v1::{TokenReview, TokenReviewSpec, TokenReviewStatus},
    authorization::v1::{SubjectAccessReview, SubjectAccessReviewSpec, SubjectAccessReviewStatus},
};
use serde::{Serialize, de::DeserializeOwned};
use tokio::time::{Instant, sleep, timeout};

use super::{
    attempt::{Failure, Retry, pause, refused},
    client::chain,
};
use crate::metrics::{ReviewMetrics, Reviewed};

/// Longest attempt.
const ATTEMPT_LIMIT: Duration = Duration::from_secs(10);
/// Longest review, attempts and pauses together.
const REVIEW_LIMIT: Duration = Duration::from_secs(30);
/// The largest answer that is read, in bytes.
const ANSWER_LIMIT: usize = 4 << 20;
const TOKENS: &str = "/apis/authentication.k8s.io/v1/tokenreviews";
const ACCESSES: &str = "/apis/authorization.k8s.io/v1/subjectaccessreviews";

/// There is no answer.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{0}")]
pub struct ReviewFailure(String);

/// Asks the API server.
#[derive(Clone)]
pub struct Reviews {
    client: Client,
    metrics: ReviewMetrics,
}

impl Reviews {
    /// With that client; attempts are counted.
    pub fn new(client: Client, metrics: ReviewMetrics) -> Self {
        Self { client, metrics }
    }

    /// Whose a token is, without audiences; within 30 s.
    ///
    /// # Errors
    /// There is no answer.
    pub async fn token(&self, token: &str) -> Result<TokenReviewStatus, ReviewFailure> {
        let spec = TokenReviewSpec { token: token.to_owned(), audiences: None };
        let review = TokenReview { spec, ..TokenReview::default() };
        let answer: TokenReview = self.ask(Reviewed::Token, TOKENS, &review).await?;
        Ok(answer.status.unwrap_or_default())
    }

    /// What somebody may do; within 30 s.
    ///
    /// # Errors
    /// There is no answer.
    pub async fn access(&self, spec: SubjectAccessReviewSpec) -> Result<SubjectAccessReviewStatus, ReviewFailure> {
        let review = SubjectAccessReview { spec, ..SubjectAccessReview::default() };
        let answer: SubjectAccessReview = self.ask(Reviewed::Access, ACCESSES, &review).await?;
        Ok(answer.status.unwrap_or_default())
    }

    async fn ask<T: Serialize + DeserializeOwned>(
        &self,
        what: Reviewed,
        path: &str,
        review: &T,
    ) -> Result<T, ReviewFailure> {
        let body = serde_json::to_vec(review).map_err(|e| ReviewFailure(e.to_string()))?;
        let late = |_| Err(ReviewFailure(format!("{path}: no answer within {REVIEW_LIMIT:?}")));
        timeout(REVIEW_LIMIT, self.persist(what, path, body)).await.unwrap_or_else(late)
    }

    async fn persist<T: DeserializeOwned>(
        &self,
        what: Reviewed,
        path: &str,
        body: Vec<u8>,
    ) -> Result<T, ReviewFailure> {
        let mut attempt = 0;
        loop {
            let failure = match self.attempt(what, path, body.clone()).await {
                Ok(answer) => {
                    let wrong = |e: serde_json::Error| ReviewFailure(format!("{path}: the answer makes no sense: {e}"));
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

    async fn attempt(&self, what: Reviewed, path: &str, body: Vec<u8>) -> Result<Vec<u8>, Failure> {
        let begun = Instant::now();
        let mut status = None;
        let sending = timeout(ATTEMPT_LIMIT, self.send(path, body, &mut status)).await;
        self.metrics.attempted(what, status, begun.elapsed());
        let late = |_| Err(Failure { text: format!("no answer within {ATTEMPT_LIMIT:?}"), retry: Retry::Never });
        sending.unwrap_or_else(late)
    }

    async fn send(&self, path: &str, body: Vec<u8>, status: &mut Option<u16>) -> Result<Vec<u8>, Failure> {
        let never = |text: String| Failure { text, retry: Retry::Never };
        let request = Request::post(path)
            .header("content-type", "application/json")
            .header("accept", "application/json")
            .body(Body::from(body))
            .map_err(|e| never(e.to_string()))?;
        let response = self.client.send(request).await.map_err(|e| unreached(&e))?;
        let (head, body) = response.into_parts();
        *status = Some(head.status.as_u16());
        let read = Limited::new(body, ANSWER_LIMIT).collect().await.map_err(|e| unreached(&*e))?;
        let bytes = read.to_bytes().to_vec();
        if head.status.is_success() { Ok(bytes) } else { Err(refused(head.status, &head.headers, &bytes)) }
    }
}

/// A connection that was lost may be had again; one that was refused is not worth waiting for.
fn unreached(error: &(dyn std::error::Error + 'static)) -> Failure {
    let retry = if is_lost(error) { Retry::Soon } else { Retry::Never };
    Failure { text: chain(error), retry }
}

fn is_lost(error: &(dyn std::error::Error + 'static)) -> bool {
    let mut cause = Some(error);
    while let Some(error) = cause {
        if let Some(error) = error.downcast_ref::<hyper::Error>()
            && (error.is_incomplete_message() || error.is_canceled() || error.is_closed())
        {
            return true;
        }
        if let Some(error) = error.downcast_ref::<io::Error>() {
            use io::ErrorKind::{BrokenPipe, ConnectionAborted, ConnectionReset, UnexpectedEof};
            if matches!(error.kind(), BrokenPipe | ConnectionAborted | ConnectionReset | UnexpectedEof) {
                return true;
            }
        }
        cause = error.source();
    }
    false
}
