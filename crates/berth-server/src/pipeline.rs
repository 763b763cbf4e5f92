//! Request pipeline: redirects and 404, authentication, authorization, routing, handler.
//!
//! Also request metrics and the HTTP access log (spec 04 §3, §6, §8).

use std::{
    net::SocketAddr,
    panic::AssertUnwindSafe,
    pin::Pin,
    sync::{Arc, OnceLock},
    task::{Context, Poll},
    time::Instant,
};

use async_trait::async_trait;
use axum::{
    body::Body,
    http::{HeaderValue, Method, Request, StatusCode, Version, header, request},
    response::{IntoResponse, Response},
};
use bytes::Bytes;
use futures::{FutureExt, future::BoxFuture};
use rustls::pki_types::CertificateDer;
use tracing::{debug, error};

use super::{
    auth::{UserInfo, attributes},
    connection_budget::ConnectionSlot,
    endpoints::Endpoints,
    routes::text,
    routing::{self, EnabledEndpoints, PathRoute, PlainEndpoint, ServiceRoute},
    server_span,
};
use berth_metrics::ServerMetrics;
use berth_otel::Span;

/// Peer of a connection.
#[derive(Clone, Debug)]
pub struct Peer {
    /// Remote address and port.
    pub address: SocketAddr,
    /// Certificates sent by the client, leaf first; not verified yet.
    pub certificates: Arc<[CertificateDer<'static>]>,
    /// Slot of the connection in the listener's connection budget.
    pub slot: Arc<ConnectionSlot>,
}

/// Authenticates and authorizes requests of a protected listener.
#[async_trait]
pub trait RequestAuthorizer: Send + Sync + 'static {
    /// Authenticates the request; removes credentials from its headers that handlers must not see.
    ///
    /// # Errors
    /// The response to a request that is not authenticated.
    async fn authenticate(
        &self,
        parts: &mut request::Parts,
        certificates: &[CertificateDer<'static>],
    ) -> Result<UserInfo, Response>;

    /// Authorizes the request: access to any of the subresources is sufficient.
    ///
    /// # Errors
    /// The response to a request that is not authorized.
    async fn authorize(&self, who: &UserInfo, verb: &str, subresources: &[&str]) -> Result<(), Response>;
}

/// Access control of a protected listener.
pub struct AuthLayer {
    /// Authenticator and authorizer.
    pub authorizer: Arc<dyn RequestAuthorizer>,
    /// Whether a GET that opens a stream also needs the verb `create` (spec 04 §10; differs from kubelet).
    pub streaming_requires_create: bool,
}

/// Configuration of a listener: endpoints and access control.
pub struct ListenerContext {
    /// Enabled endpoints.
    pub switches: EnabledEndpoints,
    /// Access control; `None` on a listener without authentication.
    pub guard: Option<AuthLayer>,
    /// Handlers of the endpoints.
    pub endpoints: Arc<Endpoints>,
    /// Request metrics.
    pub metrics: ServerMetrics,
}

impl ListenerContext {
    fn kind(&self) -> &'static str {
        if self.guard.is_some() { "readwrite" } else { "readonly" }
    }

    /// Handles a request; a panic in a handler becomes a 500.
    pub fn answer(self: Arc<Self>, request: Request<Body>) -> BoxFuture<'static, Response> {
        self.answer_metered(request).boxed()
    }

    async fn answer_metered(self: Arc<Self>, mut request: Request<Body>) -> Response {
        let path = routing::decode(request.uri().path()).unwrap_or_default();
        let bucket = routing::bucket(&path);
        let metered = RequestMetricsGuard::new(&self, routing::method_label(request.method().as_str()), bucket);
        let entry = AccessLogEntry::of(&request, bucket);
        request.extensions_mut().insert(metered.clone());
        let response = AssertUnwindSafe(self.clone().route(request).boxed()).catch_unwind().await;
        let response = response.unwrap_or_else(|_| {
            self.metrics.panics.inc();
            error!(path = bucket, "Request handler panicked");
            text::plain_error(StatusCode::INTERNAL_SERVER_ERROR, "500 Internal Server Error")
        });
        if let Some(span) = metered.last.span.get() {
            server_span::record_status(span, response.status());
        }
        if let Some(entry) = entry {
            entry.log(&response, metered.begun);
        }
        response.map(|body| Body::new(MeteredBody { body, _metered: metered }))
    }

    async fn route(self: Arc<Self>, request: Request<Body>) -> Response {
        if let Some(why) = host_refusal(&request) {
            let body = format!("400 Bad Request: {why}");
            let close = [(header::CONTENT_TYPE, "text/plain; charset=utf-8"), (header::CONNECTION, "close")];
            return (StatusCode::BAD_REQUEST, close, body).into_response();
        }
        let uri = request.uri();
        match routing::outer(uri.path(), uri.query(), &self.switches, self.endpoints.health.names()) {
            PathRoute::Redirect(location) => redirect(&location, request.method().as_str()),
            PathRoute::Unknown => text::plain_error(StatusCode::NOT_FOUND, "404 page not found"),
            PathRoute::Malformed => text::plain_error(StatusCode::BAD_REQUEST, "400 Bad Request"),
            PathRoute::Plain(plain) => match self.admit(request).await {
                Ok(request) => handle_in_span(request, |request| self.plain(plain, request)).await,
                Err(refusal) => refusal,
            },
            PathRoute::Service(path) => match self.admit(request).await {
                Ok(request) => handle_in_span(request, |request| self.service(&path, request)).await,
                Err(refusal) => refusal,
            },
        }
    }

    /// Authenticates and authorizes the request, and stores the identity in its extensions.
    async fn admit(&self, request: Request<Body>) -> Result<Request<Body>, Response> {
        let peer = request.extensions().get::<Peer>().cloned();
        let Some(guard) = &self.guard else {
            peer.iter().for_each(|peer| peer.slot.authenticated()); // no authentication on this listener
            return Ok(request);
        };
        let (mut parts, body) = request.into_parts();
        let chain = peer.as_ref().map_or(&[][..], |peer| &peer.certificates);
        let identity = guard.authorizer.authenticate(&mut parts, chain).await?;
        peer.iter().for_each(|peer| peer.slot.authenticated());
        let path = routing::decode(parts.uri.path()).unwrap_or_default();
        let verb = attributes::verb(&parts.method);
        guard.authorizer.authorize(&identity, verb, attributes::subresources(&path)).await?;
        parts.extensions.insert(identity);
        Ok(Request::from_parts(parts, body))
    }

    async fn plain(&self, plain: PlainEndpoint, request: Request<Body>) -> Response {
        match plain {
            PlainEndpoint::Disabled(text) => text::plain_error(StatusCode::METHOD_NOT_ALLOWED, text),
            plain => self.endpoints.clone().plain(plain, request).await,
        }
    }

    async fn service(&self, path: &str, request: Request<Body>) -> Response {
        let accept = request.headers().get(header::ACCEPT).and_then(|value| value.to_str().ok());
        match routing::service(request.method().as_str(), path, accept) {
            ServiceRoute::NotFound => text::router_error(StatusCode::NOT_FOUND, "404: Page Not Found"),
            ServiceRoute::MethodNotAllowed(allow) => {
                let mut response = text::router_error(StatusCode::METHOD_NOT_ALLOWED, "405: Method Not Allowed");
                response.headers_mut().insert(header::ALLOW, HeaderValue::from_static(allow));
                response
            }
            ServiceRoute::NotAcceptable(list) => {
                let body = format!("406: Not Acceptable\n\nAvailable representations: {list}");
                text::router_error(StatusCode::NOT_ACCEPTABLE, &body)
            }
            ServiceRoute::Found(endpoint) => {
                if let Some(guard) = &self.guard
                    && guard.streaming_requires_create
                    && request.method() == Method::GET
                    && routing::opens_a_stream(&endpoint)
                    && let Some(who) = request.extensions().get::<UserInfo>().cloned()
                    && let Err(refusal) =
                        guard.authorizer.authorize(&who, "create", attributes::subresources(path)).await
                {
                    return refusal;
                }
                self.endpoints.clone().service(endpoint, request).await
            }
        }
    }
}

/// Handles an admitted request in its span, which ends with the response's body or stream. Requests that are not admitted
/// have none: strangers must not fill the queue of spans.
async fn handle_in_span<F: Future<Output = Response>>(
    request: Request<Body>,
    handle: impl FnOnce(Request<Body>) -> F,
) -> Response {
    let Some(metered) = request.extensions().get::<RequestMetricsGuard>().cloned() else {
        return handle(request).await;
    };
    let span = metered.last.span.get_or_init(|| {
        let path = routing::decode(request.uri().path()).unwrap_or_default();
        server_span::start(&request, &path)
    });
    span.run(handle(request)).await
}

/// Reason why the Host header violates HTTP/1.1 (RFC 9112 §3.2), with the texts of Go's server.
fn host_refusal(request: &Request<Body>) -> Option<&'static str> {
    if request.version() != Version::HTTP_11 {
        return None;
    }
    match request.headers().get_all(header::HOST).iter().count() {
        0 if request.method() != Method::CONNECT => Some("missing required Host header"),
        0 | 1 => None,
        _ => Some("too many Host headers"),
    }
}

/// 307, with the HTML page that Go's `http.Redirect` writes for a GET.
fn redirect(location: &str, method: &str) -> Response {
    let page = format!("<a href=\"{}\">Temporary Redirect</a>.\n\n", text::escaped(location));
    let html = [(header::CONTENT_TYPE, "text/html; charset=utf-8")];
    let mut response = match method {
        "GET" => (StatusCode::TEMPORARY_REDIRECT, html, page).into_response(),
        "HEAD" => (StatusCode::TEMPORARY_REDIRECT, html).into_response(),
        _ => StatusCode::TEMPORARY_REDIRECT.into_response(),
    };
    match HeaderValue::try_from(location) {
        Ok(location) => {
            response.headers_mut().insert(header::LOCATION, location);
            response
        }
        Err(_) => text::plain_error(StatusCode::BAD_REQUEST, "400 Bad Request"),
    }
}

/// Request metrics guard: counts the request as in flight until the last clone is dropped.
#[derive(Clone)]
pub struct RequestMetricsGuard {
    begun: Instant,
    last: Arc<Gauge>,
}

struct Gauge {
    begun: Instant,
    /// Span of an admitted request; it ends when the request is no longer in flight.
    span: OnceLock<Span>,
    inflight: prometheus::IntGauge,
    duration: prometheus::Histogram,
}

impl Drop for Gauge {
    fn drop(&mut self) {
        self.inflight.dec();
        self.duration.observe(self.begun.elapsed().as_secs_f64());
    }
}

impl RequestMetricsGuard {
    fn new(site: &ListenerContext, method: &str, bucket: &str) -> Self {
        let long = if routing::is_long_running(bucket) { "true" } else { "false" };
        let labels = [method, bucket, site.kind(), long];
        site.metrics.requests.with_label_values(&labels).inc();
        let inflight = site.metrics.inflight.with_label_values(&labels);
        inflight.inc();
        let begun = Instant::now();
        let duration = site.metrics.duration.with_label_values(&labels);
        Self { begun, last: Arc::new(Gauge { begun, span: OnceLock::new(), inflight, duration }) }
    }
}

/// Response body that keeps the metrics guard until it is sent or dropped.
struct MeteredBody {
    body: Body,
    _metered: RequestMetricsGuard,
}

impl axum::body::HttpBody for MeteredBody {
    type Data = Bytes;
    type Error = axum::Error;

    fn poll_frame(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
    ) -> Poll<Option<Result<http_body::Frame<Bytes>, axum::Error>>> {
        Pin::new(&mut self.body).poll_frame(context)
    }

    fn is_end_stream(&self) -> bool {
        self.body.is_end_stream()
    }

    fn size_hint(&self) -> http_body::SizeHint {
        self.body.size_hint()
    }
}

/// Access log entry of a request. Command arguments and tokens must not be logged: the query is omitted for streams
/// (spec 04 §10), and for unknown paths, because `//exec/` may have been meant for one.
struct AccessLogEntry {
    verb: String,
    uri: String,
    agent: String,
    source: String,
    audit: String,
}

impl AccessLogEntry {
    /// `None` where the log level is off: kubelets get many requests, and most log few of them.
    fn of(request: &Request<Body>, bucket: &str) -> Option<Self> {
        if !tracing::enabled!(tracing::Level::DEBUG, v) {
            return None;
        }
        let header = |name: &str| {
            request.headers().get(name).and_then(|value| value.to_str().ok()).unwrap_or_default().to_owned()
        };
        let (path, query) = (request.uri().path(), request.uri().query());
        let is_private = matches!(bucket, "exec" | "run" | "attach" | "other");
        let uri = match query {
            Some(query) if !is_private => format!("{path}?{query}"),
            _ => path.to_owned(),
        };
        Some(Self {
            verb: request.method().to_string(),
            uri,
            agent: header("user-agent"),
            source: request.extensions().get::<Peer>().map(|p| p.address.to_string()).unwrap_or_default(),
            audit: header("audit-id"),
        })
    }

    fn log(self, response: &Response, begun: Instant) {
        let Self { verb, uri, agent, source, audit } = self;
        let (resp, latency) = (response.status().as_u16(), begun.elapsed());
        if response.status() == StatusCode::SWITCHING_PROTOCOLS {
            let hijacked = true;
            return debug!(
                v = 3,
                verb,
                URI = uri,
                ?latency,
                userAgent = agent,
                "audit-ID" = audit,
                srcIP = source,
                hijacked,
                "HTTP"
            );
        }
        debug!(v = 3, verb, URI = uri, ?latency, userAgent = agent, "audit-ID" = audit, srcIP = source, resp, "HTTP");
    }
}
