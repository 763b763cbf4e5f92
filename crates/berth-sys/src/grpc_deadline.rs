//! Server-side gRPC deadlines: answers an expired `grpc-timeout` with `DEADLINE_EXCEEDED`.
//!
//! tonic ends a call whose `grpc-timeout` has expired with `CANCELLED`, and which status the client sees then depends
//! on whose timer fires first. This layer ends the call a moment earlier.

use std::{
    convert::Infallible,
    task::{Context, Poll},
    time::Duration,
};

use futures::{FutureExt, future::BoxFuture};
use http::{Request, Response};
use tokio::time::timeout;
use tonic::{Status, body::Body, codegen::Service, server::NamedService};

/// Time before tonic's timeout at which the call ends: more than one step of the timer.
const AHEAD: Duration = Duration::from_millis(5);

/// A gRPC service that enforces the deadlines of its clients.
#[derive(Clone, Debug)]
pub struct Deadline<S>(pub S);

impl<S: NamedService> NamedService for Deadline<S> {
    const NAME: &'static str = S::NAME;
}

impl<S> Service<Request<Body>> for Deadline<S>
where
    S: Service<Request<Body>, Response = Response<Body>, Error = Infallible>,
    S::Future: Send + 'static,
{
    type Response = Response<Body>;
    type Error = Infallible;
    type Future = BoxFuture<'static, Result<Response<Body>, Infallible>>;

    fn poll_ready(&mut self, context: &mut Context<'_>) -> Poll<Result<(), Infallible>> {
        self.0.poll_ready(context)
    }

    fn call(&mut self, request: Request<Body>) -> Self::Future {
        let requested = request.headers().get("grpc-timeout").and_then(|value| limit(value.to_str().ok()?));
        let answer = self.0.call(request);
        let Some(limit) = requested else { return answer.boxed() };
        // The timeout starts now, not at the first poll.
        let answer = timeout(limit - AHEAD.min(limit / 2), answer);
        async move {
            let passed = || Status::deadline_exceeded("context deadline exceeded").into_http();
            answer.await.unwrap_or_else(|_| Ok(passed()))
        }
        .boxed()
    }
}

/// Parses a `grpc-timeout`: at most eight digits and a unit; `None` if malformed.
fn limit(text: &str) -> Option<Duration> {
    let (digits, unit) = text.split_at_checked(text.len().checked_sub(1)?)?;
    let is_number = (1..=8).contains(&digits.len()) && digits.bytes().all(|b| b.is_ascii_digit());
    let count: u64 = digits.parse().ok().filter(|_| is_number)?;
    Some(match unit {
        "H" => Duration::from_secs(count * 3600),
        "M" => Duration::from_secs(count * 60),
        "S" => Duration::from_secs(count),
        "m" => Duration::from_millis(count),
        "u" => Duration::from_micros(count),
        "n" => Duration::from_nanos(count),
        _ => return None,
    })
}

#[cfg(test)]
mod tests {
    use tokio::time::{Instant, sleep};
    use tonic::Code;

    use super::*;

    /// Replies after one second.
    #[derive(Clone)]
    struct Slow;

    impl Service<Request<Body>> for Slow {
        type Response = Response<Body>;
        type Error = Infallible;
        type Future = BoxFuture<'static, Result<Response<Body>, Infallible>>;

        fn poll_ready(&mut self, _context: &mut Context<'_>) -> Poll<Result<(), Infallible>> {
            Poll::Ready(Ok(()))
        }

        fn call(&mut self, _request: Request<Body>) -> Self::Future {
            Box::pin(async {
                sleep(Duration::from_secs(1)).await;
                Ok(Status::ok("").into_http())
            })
        }
    }

    #[tokio::test(start_paused = true)]
    async fn a_call_ends_before_its_deadline_with_deadline_exceeded() {
        for (header, expected, after) in [
            (None, Code::Ok, 1000),
            (Some("2S"), Code::Ok, 1000),
            (Some("200m"), Code::DeadlineExceeded, 195),
            (Some("200000u"), Code::DeadlineExceeded, 195),
            (Some("4m"), Code::DeadlineExceeded, 2),
            (Some("1M"), Code::Ok, 1000),
            (Some("nonsense"), Code::Ok, 1000),
        ] {
            let mut request = Request::new(Body::empty());
            if let Some(header) = header {
                request.headers_mut().insert("grpc-timeout", header.parse().expect("a header"));
            }
            let begun = Instant::now();
            let answer = Deadline(Slow).call(request).await.expect("an answer");
            let status = Status::from_header_map(answer.headers()).map_or(Code::Unknown, |status| status.code());
            assert_eq!((status, begun.elapsed()), (expected, Duration::from_millis(after)), "{header:?}");
        }
    }

    #[test]
    fn limits_have_a_unit() {
        for (text, expected) in [
            ("1H", Some(3600)),
            ("2M", Some(120)),
            ("99999999S", Some(99_999_999)),
            ("999999999S", None),
            ("5", None),
            ("S", None),
            ("", None),
            ("+1S", None),
            ("1x", None),
            ("1é", None),
        ] {
            assert_eq!(limit(text), expected.map(Duration::from_secs), "{text}");
        }
    }
}
