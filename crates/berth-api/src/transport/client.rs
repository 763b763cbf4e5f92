//! HTTP client of the API server: rate limit, connection pool, retries, and heartbeat hedging.
//!
//! Sends a call on a connection of its pool, as often as spec 10 §2.6 allows.

use std::{
    sync::{
        Arc, Mutex, PoisonError,
        atomic::{AtomicU32, AtomicU64, Ordering},
    },
    time::Duration,
};

use async_trait::async_trait;
use bytes::Bytes;
use http::{
    HeaderMap, HeaderValue, Response, StatusCode,
    header::{AUTHORIZATION, CONTENT_TYPE},
};
use hyper::body::Incoming;
use tokio::{
    sync::{Notify, watch},
    time::{Instant, sleep, sleep_until, timeout, timeout_at},
};
use tokio_util::sync::CancellationToken;
use tracing::{debug, warn};

use super::{
    body::read,
    connection::{ApiConnection, SendError},
    connection_choice::TrafficType,
    credentials::CredentialSource,
    error_response::{check_content_type, refusal},
    keep_alive_pinger::KeepAlivePinger,
    pool::{Pool, PoolSlot, SPREAD, SlotRequirements, Unavailable},
    rate_limiter::{DeadlineExceeded, RateLimiter},
    request::{self, Address, Compression, OutgoingRequest},
    request_metrics::RequestTimer,
    retry_policy::pause,
    warning_dedup::WarningDedup,
    watch_stream::{EmptyWatchStream, HttpWatchStream},
};
use crate::api::{
    ApiClient, ApiError, Call, LIST_LIMIT, OBJECT_LIMIT, RequestClass, Resource, Retries, Verb, WatchStream,
};
use berth_metrics::{ApiClientMetrics, OpenTransport, RestClientMetrics};
use berth_otel::{KeyValue, Scope, Span};
use berth_ports::Clock;

/// Time without a response to a heartbeat after which all connections are pinged; a ping costs the server next to
/// nothing.
const DOUBT: Duration = Duration::from_millis(500);
/// Time without a response to a heartbeat after which it is also sent on a second connection.
const HEDGE: Duration = Duration::from_secs(3);
/// Consecutive failed heartbeats after which the next uses a new connection.
const FAILURES: u32 = 2;
/// How long errors are withheld after shutdown began: the caller is stopped at the same moment, and its reaction would
/// be noise.
pub const SHUTDOWN_ERROR_DELAY: Duration = Duration::from_secs(1);
/// Maximum number of resends of a request that the server has not processed.
const RESENT: u32 = 3;
/// Largest error body that is read, in bytes.
const REFUSAL_LIMIT: usize = 1 << 20;

/// API client over HTTP; see [`super`].
pub struct Transport {
    pub(super) address: Address,
    pub(super) agent: HeaderValue,
    /// Impersonation headers.
    pub(super) acting: HeaderMap,
    pub(super) compression: Compression,
    pub(super) credentials: CredentialSource,
    pub(super) pace: RateLimiter,
    pub(super) pools: Pools,
    pub(super) epoch: watch::Receiver<u64>,
    pub(super) reached: watch::Receiver<u64>,
    pub(super) pinger: KeepAlivePinger,
    pub(super) stop: CancellationToken,
    pub(super) reload: Arc<Notify>,
    pub(super) clock: Arc<dyn Clock>,
    pub(super) requests: RestClientMetrics,
    pub(super) connections: ApiClientMetrics,
    pub(super) warnings: Mutex<WarningDedup>,
    pub(super) begun: Instant,
    /// Consecutive failed heartbeats.
    pub(super) failed_heartbeats: AtomicU32,
    /// Counts this transport in the metrics while it exists.
    pub(super) _open: OpenTransport,
}

/// Connection pools by traffic type.
pub struct Pools {
    pub(super) beat: Pool,
    pub(super) unary: Pool,
    pub(super) watch: Pool,
}

/// Call in progress.
struct CallContext<'a> {
    call: &'a Call,
    pool: &'a Pool,
    want: SlotRequirements,
    /// Deadline of the call.
    latest: Instant,
    /// ID of the connection it was last sent on; 0 before the first send.
    on: AtomicU64,
}

impl Transport {
    /// Whether the server has responded at least once and no pool is failing to connect.
    pub fn is_reachable(&self) -> bool {
        self.last_contact().is_some() && self.all().iter().all(|pool| pool.trouble().is_none())
    }

    /// Time since the server's last response; `None` if it never responded.
    pub fn last_contact(&self) -> Option<Duration> {
        self.all().iter().filter_map(|pool| pool.contact.age()).min()
    }

    /// Rereads credential and CA files, which may have changed.
    pub fn reload_identity(&self) {
        self.reload.notify_one();
    }

    fn all(&self) -> [&Pool; 3] {
        [&self.pools.beat, &self.pools.unary, &self.pools.watch]
    }

    fn pool(&self, call: &Call) -> &Pool {
        match call.line {
            _ if call.verb == Verb::Watch => &self.pools.watch,
            RequestClass::Heartbeat => &self.pools.beat,
            RequestClass::Main | RequestClass::Events | RequestClass::Certificates => &self.pools.unary,
        }
    }

    fn way<'a>(&'a self, call: &'a Call, avoid: Option<u64>, latest: Instant) -> CallContext<'a> {
        // Pods wait for these; other watches are spread after a reconnect.
        let is_first = call.resource == Resource::NODES || call.resource == Resource::PODS;
        CallContext {
            call,
            pool: self.pool(call),
            want: SlotRequirements { avoid, is_first },
            latest,
            on: AtomicU64::new(0),
        }
    }

    /// Span of one request (spec 08 §13, 10 §10). `retry` is the number of earlier attempts.
    fn span(&self, call: &Call, retry: u32) -> Span {
        let method = request::method(call.verb);
        berth_otel::client_span(Scope::HttpClient, request::span_name(call.verb), || {
            vec![
                KeyValue::new("http.request.method", method.to_string()),
                KeyValue::new("server.address", self.address.authority.host().to_owned()),
                KeyValue::new("k8s.verb", request::verb(call.verb)),
                KeyValue::new("k8s.resource", call.resource.plural),
                KeyValue::new("retry", i64::from(retry)),
            ]
        })
    }

    /// Sends a call until it succeeds or fails with an error that is not retried.
    async fn call_with_retries(&self, way: &CallContext<'_>) -> Result<Bytes, ApiError> {
        let mut attempt = 0;
        loop {
            let span = self.span(way.call, attempt);
            let answer = record_outcome(&span, self.answer(way, &span).await);
            drop(span); // the pause before a retry is not part of the request
            let error = match answer {
                Ok(answer) => return Ok(answer),
                Err(error) => error,
            };
            self.pause(way, error, attempt).await?;
            attempt += 1;
        }
    }

    /// Waits before a retry.
    ///
    /// # Errors
    /// The given error, if it is not retried.
    async fn pause(&self, way: &CallContext<'_>, error: ApiError, attempt: u32) -> Result<(), ApiError> {
        let pause = pause(way.call.verb, &error, attempt).filter(|_| way.call.retries == Retries::Usual);
        match pause {
            Some(pause) if Instant::now() + pause < way.latest => {
                let method = request::method(way.call.verb);
                self.requests.retried(self.address.authority.as_str(), method.as_str(), error.code());
                sleep(pause).await;
                Ok(())
            }
            _ => Err(error),
        }
    }

    /// Sends the call once and reads the response.
    async fn answer(&self, way: &CallContext<'_>, span: &Span) -> Result<Bytes, ApiError> {
        let (mut slot, response, mut asked) = self.exchange(way, span).await?;
        let (head, body) = response.into_parts();
        let limit = match way.call.verb {
            _ if !head.status.is_success() => REFUSAL_LIMIT,
            Verb::List => LIST_LIMIT,
            _ => OBJECT_LIMIT,
        };
        let bytes = read(&head.headers, body, limit).await?;
        asked.received(bytes.len());
        slot.was_read();
        if !head.status.is_success() {
            return Err(self.refused(way.call, head.status, &head.headers, &bytes));
        }
        let kind = head.headers.get(CONTENT_TYPE).and_then(|value| value.to_str().ok());
        check_content_type(kind).map_err(ApiError::Malformed)?;
        Ok(bytes)
    }

    fn refused(&self, call: &Call, code: StatusCode, headers: &HeaderMap, body: &[u8]) -> ApiError {
        let status = refusal(call, code, headers, body, self.clock.now());
        let header_text = |name: &str| headers.get(name).and_then(|value| value.to_str().ok()).unwrap_or_default();
        // The priority level identifies the queue in which a throttled request waited.
        let queue = |name: &str| if status.code == 429 { header_text(name) } else { "" };
        debug!(
            verb = request::verb(call.verb),
            path = call.path(),
            code = status.code,
            auditID = header_text("audit-id"),
            flowSchema = queue("x-kubernetes-pf-flowschema-uid"),
            priorityLevel = queue("x-kubernetes-pf-prioritylevel-uid"),
            err = %status,
            "API server rejected request"
        );
        ApiError::Refused(Box::new(status))
    }

    /// Sends a call and waits for the response head; resends it if the server has not processed it.
    async fn exchange(
        &self,
        way: &CallContext<'_>,
        span: &Span,
    ) -> Result<(PoolSlot, Response<Incoming>, RequestTimer), ApiError> {
        let begun = Instant::now();
        if way.call.verb != Verb::Watch {
            let turn = self.pace.acquire(way.call.line, way.latest, &way.call.resource).await;
            turn.map_err(|DeadlineExceeded| ApiError::Timeout(way.call.deadline))?;
            let method = request::method(way.call.verb);
            self.requests.limited(self.address.authority.as_str(), method.as_str(), begun.elapsed());
        }
        let mut resent = 0;
        loop {
            let outgoing = self.outgoing(way.call).await?;
            let mut slot =
                way.pool.take(way.want, way.latest).await.map_err(|Unavailable(why)| ApiError::Unreachable(why))?;
            way.on.store(slot.connection().id, Ordering::Relaxed);
            sleep_until(slot.not_before).await;
            self.connections.waited(way.pool.kind.label(), begun.elapsed());
            let sent = self.send(&outgoing, way, span, &mut slot).await;
            match sent {
                Ok((response, asked)) if !self.is_outdated(&response, &slot) => return Ok((slot, response, asked)),
                // The connection has outdated credentials; the refusal does not apply to the current ones.
                Ok(_) if resent < RESENT => slot.connection().closed.cancel(),
                Ok((response, asked)) => return Ok((slot, response, asked)),
                Err(SendError::Lost(why)) => return Err(ApiError::Lost(why)),
                Err(SendError::NotSent) if resent < RESENT => {}
                Err(SendError::NotSent) => {
                    return Err(ApiError::Lost(
                        "the server closed the connection before it processed the request".to_owned(),
                    ));
                }
            }
            resent += 1;
        }
    }

    async fn send(
        &self,
        outgoing: &OutgoingRequest,
        way: &CallContext<'_>,
        span: &Span,
        slot: &mut PoolSlot,
    ) -> Result<(Response<Incoming>, RequestTimer), SendError> {
        let connection: Arc<ApiConnection> = slot.connection().clone();
        let mut request = outgoing.made(&self.address, connection.is_http2());
        span.inject(request.headers_mut());
        span.set_attribute("url.full", || outgoing.url(&self.address).into());
        // A heartbeat that is cancelled has found the connection dead.
        slot.suspect(way.pool.kind == TrafficType::Beat);
        let mut asked = RequestTimer::new(&self.requests, &self.address, request.method(), outgoing.length());
        let response = match connection.send(request, &mut slot.turn).await {
            Ok(response) => response,
            Err(error) => {
                if error == SendError::NotSent {
                    asked.discard();
                }
                return Err(error);
            }
        };
        asked.answered(response.status());
        span.set_attribute("http.response.status_code", || i64::from(response.status().as_u16()).into());
        way.pool.contact.record();
        self.warn(response.headers());
        if response.status() == StatusCode::UNAUTHORIZED {
            self.credentials.refused();
        }
        Ok((response, asked))
    }

    /// Whether the response refuses outdated credentials.
    fn is_outdated(&self, response: &Response<Incoming>, slot: &PoolSlot) -> bool {
        response.status() == StatusCode::UNAUTHORIZED && slot.connection().epoch != *self.epoch.borrow()
    }

    async fn outgoing(&self, call: &Call) -> Result<OutgoingRequest, ApiError> {
        let outgoing = OutgoingRequest::new(&self.address, call, &self.agent, self.compression);
        let mut outgoing = outgoing.map_err(ApiError::Unreachable)?.with(&self.acting);
        if let Some(header) = self.credentials.header().await.map_err(ApiError::Unreachable)? {
            outgoing = outgoing.with(&HeaderMap::from_iter([(AUTHORIZATION, header)]));
        }
        Ok(outgoing)
    }

    fn warn(&self, headers: &HeaderMap) {
        if !headers.contains_key("warning") {
            return;
        }
        let mut warnings = self.warnings.lock().unwrap_or_else(PoisonError::into_inner);
        for text in warnings.fresh(headers, self.begun.elapsed()) {
            warn!(text, "Warning from the API server");
        }
    }

    /// Sends a heartbeat. A dead connection must not delay it: after 3 s it is also sent on another connection, and the
    /// first response counts.
    async fn send_heartbeat(&self, call: &Call, latest: Instant) -> Result<Bytes, ApiError> {
        let way = self.way(call, None, latest);
        let mut first = Box::pin(self.call_with_retries(&way));
        if let Ok(outcome) = timeout(DOUBT, &mut first).await {
            return outcome;
        }
        if way.on.load(Ordering::Relaxed) != 0 {
            self.pinger.trigger();
        }
        if let Ok(outcome) = timeout(HEDGE - DOUBT, &mut first).await {
            return outcome;
        }
        let avoid = way.on.load(Ordering::Relaxed);
        if avoid == 0 {
            return first.await; // no connection was used that could be dead
        }
        debug!(path = call.path(), id = avoid, "No response to heartbeat, sending it on a second connection");
        let other = self.way(call, Some(avoid), latest);
        let mut second = Box::pin(self.call_with_retries(&other));
        tokio::select! {
            biased;
            outcome = &mut first => if is_answer(&outcome) { outcome } else { better(second.await, outcome) },
            outcome = &mut second => if is_answer(&outcome) { outcome } else { better(first.await, outcome) },
        }
    }

    async fn unless_stopped<T>(&self, outcome: Result<T, ApiError>) -> Result<T, ApiError> {
        if outcome.is_err() && self.stop.is_cancelled() {
            sleep(SHUTDOWN_ERROR_DELAY).await;
        }
        outcome
    }

    /// Counts failed heartbeats, and replaces the connection after too many.
    async fn beat_counted(&self, call: &Call, latest: Instant) -> Result<Bytes, ApiError> {
        let outcome = self.send_heartbeat(call, latest).await;
        let is_fine = outcome.as_ref().map_or_else(|error| matches!(error.code(), 400..500), |_| true);
        if is_fine {
            self.failed_heartbeats.store(0, Ordering::Relaxed);
        } else if self.failed_heartbeats.fetch_add(1, Ordering::Relaxed) + 1 >= FAILURES {
            self.failed_heartbeats.store(0, Ordering::Relaxed);
            self.pools.beat.renew();
        }
        outcome
    }

    /// Starts a watch.
    async fn begin(&self, way: &CallContext<'_>) -> Result<Box<dyn WatchStream>, ApiError> {
        let mut attempt = 0;
        loop {
            let span = self.span(way.call, attempt);
            let begun = record_outcome(&span, self.begun(way, &span).await);
            drop(span); // the pause before a retry is not part of the request
            let error = match begun {
                Ok(stream) => return Ok(stream),
                Err(error) => error,
            };
            match self.pause(way, error, attempt).await {
                Ok(()) => attempt += 1,
                Err(ApiError::Lost(_)) => return Ok(Box::new(EmptyWatchStream)),
                Err(error) => return Err(error),
            }
        }
    }

    async fn begun(&self, way: &CallContext<'_>, span: &Span) -> Result<Box<dyn WatchStream>, ApiError> {
        let (mut slot, response, asked) = self.exchange(way, span).await?;
        let (head, body) = response.into_parts();
        drop(asked); // the duration of a watch is measured until it is established
        if !head.status.is_success() {
            let bytes = read(&head.headers, body, REFUSAL_LIMIT).await?;
            slot.was_read();
            return Err(self.refused(way.call, head.status, &head.headers, &bytes));
        }
        let kind = head.headers.get(CONTENT_TYPE).and_then(|value| value.to_str().ok());
        check_content_type(kind).map_err(ApiError::Malformed)?;
        let lingers = if way.want.is_first { Duration::ZERO } else { SPREAD.mul_f64(rand::random()) };
        Ok(Box::new(HttpWatchStream::new(body, slot, way.pool.contact.clone(), lingers, self.stop.clone())))
    }
}

/// Records the outcome of a request. A request that reaches its deadline is dropped before, and counts as cancelled.
fn record_outcome<T>(span: &Span, outcome: Result<T, ApiError>) -> Result<T, ApiError> {
    match &outcome {
        Ok(_) => span.set_ok(),
        // The status code is an attribute; the server's message is the caller's to report.
        Err(error) if error.code() >= 400 => span.set_error(String::new),
        Err(error) => span.set_error(|| error.to_string()),
    }
    outcome
}

/// Whether the server responded, successfully or with a refusal.
fn is_answer(outcome: &Result<Bytes, ApiError>) -> bool {
    matches!(outcome, Ok(_) | Err(ApiError::Refused(_)))
}

fn better(later: Result<Bytes, ApiError>, sooner: Result<Bytes, ApiError>) -> Result<Bytes, ApiError> {
    if is_answer(&later) { later } else { sooner }
}

#[async_trait]
impl ApiClient for Transport {
    async fn call(&self, call: Call) -> Result<Bytes, ApiError> {
        let latest = Instant::now() + call.deadline;
        let late = |_| {
            self.pinger.trigger();
            Err(ApiError::Timeout(call.deadline))
        };
        let outcome = match call.line {
            RequestClass::Heartbeat => timeout_at(latest, self.beat_counted(&call, latest)).await,
            RequestClass::Main | RequestClass::Events | RequestClass::Certificates => {
                let way = self.way(&call, None, latest);
                timeout_at(latest, self.call_with_retries(&way)).await
            }
        };
        self.unless_stopped(outcome.unwrap_or_else(late)).await
    }

    async fn watch(&self, call: Call) -> Result<Box<dyn WatchStream>, ApiError> {
        let latest = Instant::now() + call.deadline;
        let way = self.way(&call, None, latest);
        let late = |_| Err(ApiError::Timeout(call.deadline));
        self.unless_stopped(timeout_at(latest, self.begin(&way)).await.unwrap_or_else(late)).await
    }

    fn reached(&self) -> watch::Receiver<u64> {
        self.reached.clone()
    }

    fn credentials_changed(&self) -> watch::Receiver<u64> {
        self.epoch.clone()
    }
}
