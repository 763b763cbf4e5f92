//! CRI call deadlines, metrics, and timeout mapping (spec 03a §2.2, column "Deadline").
//!
//! [`Caller`] is the only place where calls are timed, counted, and bounded.

use std::{future::Future, pin::pin, sync::Arc, time::Duration};

use tokio::time::Instant;
use tonic::{Code, Request, Response, Status};

use super::{CriError, CriResult, errors::code_name};
use berth_metrics::{RuntimeOperation, RuntimeOperations};
use berth_otel::{KeyValue, Scope, Span};

/// Deadline of a call, in terms of `runtimeRequestTimeout` (T).
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum Limit {
    /// T.
    Once,
    /// 2T: creating a sandbox includes the setup of its network.
    Twice,
    /// T plus the timeout that is passed to the runtime.
    Plus(Duration),
    /// T, or the timeout that is passed to the runtime where that is longer.
    AtLeast(Duration),
    /// None: the call ends by itself, or when the caller drops it.
    Never,
}

impl Limit {
    /// The deadline as a duration; `None` for none.
    pub(super) fn of(self, timeout: Duration) -> Option<Duration> {
        match self {
            Self::Once => Some(timeout),
            Self::Twice => Some(timeout.saturating_mul(2)),
            Self::Plus(more) => Some(timeout.saturating_add(more)),
            Self::AtLeast(least) => Some(timeout.max(least)),
            Self::Never => None,
        }
    }
}

/// Times, counts, and bounds calls.
#[derive(Clone)]
pub(super) struct Caller {
    pub(super) timeout: Duration,
    pub(super) metrics: Arc<RuntimeOperations>,
}

impl Caller {
    /// Makes a call. The deadline is also sent to the runtime (`grpc-timeout`), so that it can abort abandoned work;
    /// dropping the future cancels the call.
    pub(super) async fn call<M, T, F>(
        &self,
        operation: RuntimeOperation,
        limit: Limit,
        message: M,
        send: impl FnOnce(Request<M>) -> F,
    ) -> CriResult<T>
    where
        F: Future<Output = Result<Response<T>, Status>>,
    {
        let limit = limit.of(self.timeout);
        let (span, mut request) = request_with_span(operation.full_method(), message);
        if let Some(limit) = limit {
            request.set_timeout(limit.min(MAX_DEADLINE));
        }
        // Pinned here: a future passed by value is copied into each layer's future, for the duration of the call.
        let sent = pin!(send(request));
        let answer = self.bounded(operation, limit, async { Ok(sent.await?.into_inner()) }).await;
        record_status(&span, answer.as_ref().err());
        answer
    }

    /// Times, counts, and bounds any work of one operation.
    pub(super) async fn bounded<T>(
        &self,
        operation: RuntimeOperation,
        limit: Option<Duration>,
        work: impl Future<Output = CriResult<T>>,
    ) -> CriResult<T> {
        let began = Instant::now();
        let answer = match limit {
            None => work.await,
            Some(limit) => {
                let timed_out = CriError::TimedOut { op: operation.label(), limit };
                match tokio::time::timeout(limit, work).await {
                    Err(_) => Err(timed_out),
                    // The runtime or the channel detected the same deadline slightly earlier.
                    Ok(Err(CriError::Rpc { code: Code::DeadlineExceeded | Code::Cancelled, .. }))
                        if began.elapsed() + SLACK >= limit =>
                    {
                        Err(timed_out)
                    }
                    Ok(answer) => answer,
                }
            }
        };
        self.metrics.ended(operation, began.elapsed(), answer.is_err());
        answer
    }
}

/// A request with the trace context of its span.
pub(super) fn request_with_span<M>(method: &'static str, message: M) -> (Span, Request<M>) {
    let span = berth_otel::client_span(Scope::GrpcClient, method, || {
        vec![KeyValue::new("rpc.system.name", "grpc"), KeyValue::new("rpc.method", method)]
    });
    let (mut metadata, extensions, message) = Request::new(message).into_parts();
    span.inject(metadata.as_mut());
    (span, Request::from_parts(metadata, extensions, message))
}

/// Records the status of the answer; every error is an error of the call's span.
pub(super) fn record_status(span: &Span, error: Option<&CriError>) {
    let code = match error {
        None => Code::Ok,
        Some(CriError::Rpc { code, .. }) => *code,
        Some(CriError::TimedOut { .. } | CriError::ExecTimedOut { .. }) => Code::DeadlineExceeded,
        Some(CriError::Invalid(_) | CriError::Exit { .. }) => Code::Unknown,
    };
    span.set_attribute("rpc.response.status_code", || code_name(code).into());
    match error {
        None => span.set_ok(),
        Some(error) => span.set_error(|| error.to_string()),
    }
}

/// Longest deadline sent to the runtime: `grpc-timeout` has eight digits, and longer ones (a grace period may be any
/// number of seconds) are clamped to this.
const MAX_DEADLINE: Duration = Duration::from_secs(10 * 365 * 24 * 3600);

/// Tolerance for a deadline that another clock detects earlier.
const SLACK: Duration = Duration::from_millis(10);

#[cfg(test)]
mod tests {
    use super::*;
    use berth_metrics::Registry;

    #[test]
    fn limits_in_terms_of_the_request_timeout() {
        let t = Duration::from_secs(120);
        assert_eq!(Limit::Once.of(t), Some(t));
        assert_eq!(Limit::Twice.of(t), Some(t * 2));
        assert_eq!(Limit::Plus(Duration::from_secs(30)).of(t), Some(Duration::from_secs(150)));
        assert_eq!(Limit::Plus(Duration::MAX).of(t), Some(Duration::MAX));
        assert_eq!(Limit::AtLeast(Duration::from_secs(30)).of(t), Some(t));
        assert_eq!(Limit::AtLeast(t * 3).of(t), Some(t * 3));
        assert_eq!(Limit::Never.of(t), None);
    }

    #[tokio::test(start_paused = true)]
    async fn a_hang_becomes_a_timeout() {
        let registry = Registry::new();
        let caller = Caller { timeout: Duration::from_secs(2), metrics: Arc::new(RuntimeOperations::new(&registry)) };
        let never = std::future::pending::<Result<Response<()>, Status>>;
        let began = Instant::now();
        let answer = caller.call(RuntimeOperation::RunPodSandbox, Limit::Twice, (), |_| never()).await;
        assert_eq!(answer, Err(CriError::TimedOut { op: "run_podsandbox", limit: Duration::from_secs(4) }));
        assert_eq!(began.elapsed().as_secs(), 4);
    }

    #[tokio::test]
    async fn a_deadline_of_any_length_can_be_sent() {
        let registry = Registry::new();
        let caller = Caller { timeout: Duration::from_secs(2), metrics: Arc::new(RuntimeOperations::new(&registry)) };
        let echo_timeout = |request: Request<()>| async move {
            Ok(Response::new(
                request.metadata().get("grpc-timeout").and_then(|value| value.to_str().ok()?.parse().ok()),
            ))
        };
        for (seconds, expected) in [(3, "5000000u"), (i64::MAX.unsigned_abs(), "5256000M")] {
            let limit = Limit::Plus(Duration::from_secs(seconds));
            let answer: CriResult<Option<String>> =
                caller.call(RuntimeOperation::StopContainer, limit, (), echo_timeout).await;
            assert_eq!(answer, Ok(Some(expected.to_owned())));
        }
    }

    #[tokio::test(start_paused = true)]
    async fn a_refusal_before_the_deadline_keeps_its_code() {
        let registry = Registry::new();
        let caller = Caller { timeout: Duration::from_secs(2), metrics: Arc::new(RuntimeOperations::new(&registry)) };
        let early = || async { Err::<Response<()>, _>(Status::deadline_exceeded("inner")) };
        let answer = caller.call(RuntimeOperation::Status, Limit::Once, (), |_| early()).await;
        assert_eq!(answer, Err(CriError::Rpc { code: Code::DeadlineExceeded, message: "inner".to_owned() }));
    }
}
