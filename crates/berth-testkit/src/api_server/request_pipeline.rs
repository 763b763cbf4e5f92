//! Request pipeline of the test API server: authentication, recording, faults, handling, response.
//!
//! Implements spec 10a §3, §6.

use std::{sync::Arc, time::Duration};

use bytes::Bytes;
use futures::StreamExt;
use http::{HeaderMap, HeaderValue, Method, Request as HttpRequest, Response, StatusCode, header, request::Parts};
use http_body_util::{BodyExt, Full, LengthLimitError, Limited, StreamBody, combinators::UnsyncBoxBody};
use hyper::body::{Frame, Incoming};
use serde_json::{Value, json};
use tokio::time::Instant;

use super::{
    ServerState,
    clock::uuid,
    faults::Effect,
    lists::version,
    openapi, proxy,
    recorder::RecordedRequest,
    refusal::Refusal,
    resources::{self, Kind, ObjectPath},
    rules,
    selectors::{parse_fields, parse_labels},
    tables,
    view::{Caller, DeleteOptions, Request, View},
    watch::{Feed, WatchSession},
    wire::{AbortError, Connection},
};

/// Response body.
pub(super) type Body = UnsyncBoxBody<Bytes, AbortError>;

/// Maximum size of a request body, in bytes.
const LONGEST: usize = 3 << 20;
/// Time that a list waits for a future resource version.
const FUTURE: Duration = Duration::from_secs(3);
/// Send interval of throttled responses.
const TICK: Duration = Duration::from_millis(100);

/// Handles a request and returns its response.
///
/// # Errors
/// The connection has to be cut.
pub(super) async fn answer(
    shared: Arc<ServerState>,
    connection: Arc<Connection>,
    request: HttpRequest<Incoming>,
) -> Result<Response<Body>, AbortError> {
    let (head, body) = request.into_parts();
    let found = resources::at(head.uri.path()).filter(|(kind, place)| shared.serves(kind, place));
    let mut logged = begin(&shared, &connection, &head, found.as_ref());
    let leaf = connection.certificates.get().and_then(|all| all.first()).map(AsRef::as_ref);
    let bearer = header_text(&head.headers, "authorization").strip_prefix("Bearer ");
    let caller = rules::authenticate(&*shared.core(), leaf, bearer, header_text(&head.headers, "user-agent"));
    logged.user = caller.as_ref().map(|caller| caller.name.clone()).unwrap_or_default();
    if let (Some((_, place)), Ok(caller)) = (&found, &caller)
        && proxy::is_meant(place)
    {
        let id = shared.recorder().begin(logged);
        let answer = proxy::pass(&shared, caller, place, HttpRequest::from_parts(head, body)).await;
        return Ok(finish(&shared, id, answer.unwrap_or_else(|refusal| refused(&refusal))));
    }
    let body = Limited::new(body, LONGEST).collect().await.map(http_body_util::Collected::to_bytes);
    let body = match body {
        Err(error) if !error.is::<LengthLimitError>() => return Err(AbortError),
        body => {
            body.map_err(|_| Refusal::new(413, "RequestEntityTooLarge", "Request entity too large: limit is 3145728"))
        }
    };
    logged.body = body.as_deref().ok().and_then(|body| serde_json::from_slice(body).ok()).unwrap_or_default();
    let id = shared.recorder().begin(logged);
    shared.notify();
    if let Some(answer) = fault(&shared, &connection, id, false).await? {
        return Ok(finish(&shared, id, answer));
    }
    let asked = caller.and_then(|caller| Ok((caller, body?)));
    let answer = match asked {
        Err(refusal) => refused(&refusal),
        Ok(_) if shared.ending().is_cancelled() => {
            refused(&Refusal::new(503, "ServiceUnavailable", "apiserver is shutting down").after(1))
        }
        Ok((caller, body)) => match found {
            None => page(&shared, &head),
            Some((kind, place)) => respond(&shared, id, kind, place, caller, &head, &body).await,
        },
    };
    match fault(&shared, &connection, id, true).await? {
        Some(instead) => Ok(finish(&shared, id, instead)),
        None => Ok(finish(&shared, id, shaped(&shared, &connection, id, answer))),
    }
}

fn begin(
    shared: &ServerState,
    connection: &Connection,
    head: &Parts,
    found: Option<&(&'static Kind, ObjectPath)>,
) -> RecordedRequest {
    let path = head.uri.path_and_query().map(ToString::to_string).unwrap_or_default();
    let mut logged = RecordedRequest {
        id: 0,
        method: head.method.clone(),
        path,
        headers: head.headers.clone(),
        body: Value::Null,
        at: shared.core().now(),
        begun: Instant::now(),
        ended: None,
        connection: connection.id,
        alpn: connection.alpn.get().copied().unwrap_or_default(),
        serial: connection.certificates.get().and_then(|all| all.first()).map(|leaf| serial(leaf)).unwrap_or_default(),
        user: String::new(),
        verb: "",
        resource: String::new(),
        subresource: String::new(),
        namespace: String::new(),
        name: String::new(),
        code: None,
        rv: None,
        bytes: 0,
        events: 0,
        end: None,
        fault: None,
    };
    if let Some((kind, place)) = found {
        let selected = logged.query("fieldSelector").and_then(|text| parse_fields(&text).ok()).unwrap_or_default();
        let named = selected.iter().find(|r| r.key == "metadata.name").and_then(|r| r.values.first());
        logged.verb = verb(head, place);
        kind.id.clone_into(&mut logged.resource);
        logged.subresource.clone_from(&place.subresource);
        logged.namespace.clone_from(&place.namespace);
        logged.name = named.filter(|_| place.name.is_empty()).unwrap_or(&place.name).clone();
    }
    logged
}

fn serial(leaf: &[u8]) -> String {
    use x509_parser::prelude::FromDer;
    let parsed = x509_parser::certificate::X509Certificate::from_der(leaf);
    parsed.map(|(_, certificate)| format!("{:x}", certificate.serial)).unwrap_or_default()
}

fn header_text<'a>(headers: &'a HeaderMap, name: &str) -> &'a str {
    headers.get(name).and_then(|value| value.to_str().ok()).unwrap_or_default()
}

fn pairs(head: &Parts) -> Vec<(String, String)> {
    form_urlencoded::parse(head.uri.query().unwrap_or_default().as_bytes()).into_owned().collect()
}

fn verb(head: &Parts, place: &ObjectPath) -> &'static str {
    let watches = pairs(head).iter().any(|(key, value)| key == "watch" && ["true", "1"].contains(&value.as_str()));
    match (&head.method, place.name.is_empty()) {
        (&Method::GET, _) if watches && place.subresource.is_empty() => "watch",
        (&Method::GET, true) => "list",
        (&Method::GET, false) => "get",
        (&Method::POST, is_new) if is_new || !place.subresource.is_empty() => "create",
        (&Method::PUT, false) => "update",
        (&Method::PATCH, false) => "patch",
        (&Method::DELETE, true) => "deletecollection",
        (&Method::DELETE, false) => "delete",
        _ => "",
    }
}

/// Applies the first matching fault before or after handling; returns a response that replaces the regular one.
async fn fault(
    shared: &ServerState,
    connection: &Connection,
    id: u64,
    is_after: bool,
) -> Result<Option<Response<Body>>, AbortError> {
    let Some(logged) = shared.recorder().get(id) else { return Ok(None) };
    let Some((effect, cleared)) = shared.faults().due(&logged, is_after) else { return Ok(None) };
    shared.recorder().change(id, |logged| logged.fault = Some(format!("{effect:?}")));
    shared.notify();
    match effect {
        Effect::Delay(by) => tokio::time::sleep(by).await,
        Effect::Hang => cleared.cancelled().await,
        Effect::Refuse(refusal) => return Ok(Some(refused(&refusal))),
        Effect::Answer(code, after, content_type, body) => {
            let mut answer = reply(code, content_type, body.into());
            answer.headers_mut().extend(after.map(|seconds| (header::RETRY_AFTER, seconds.into())));
            return Ok(Some(answer));
        }
        Effect::Reset => connection.reset(),
        Effect::Close => connection.close(),
        Effect::Goaway => connection.go_away(),
        Effect::Blackhole => {
            connection.set_black_hole(true);
            if !is_after {
                connection.closed().await; // as if the request had not been read
            }
        }
        shaping => shared.shape(id, shaping),
    }
    if connection.is_ended() { Err(AbortError) } else { Ok(None) }
}

/// Shapes the response body as the faults of the request require.
fn shaped(shared: &Arc<ServerState>, connection: &Arc<Connection>, id: u64, answer: Response<Body>) -> Response<Body> {
    let Some(effect) = shared.take_shape(id) else { return answer };
    shared.recorder().change(id, |logged| logged.end = Some("fault"));
    let (head, body) = answer.into_parts();
    let cutter = connection.clone();
    let frames = body.into_data_stream().filter_map(async |frame| frame.ok());
    let body = match effect {
        Effect::CutBody(most) => {
            let cut = frames.scan(most, move |left, bytes| {
                let part = bytes.slice(..bytes.len().min(*left));
                let is_over = *left == 0;
                *left -= part.len();
                std::future::ready(if is_over { None } else { Some(part) })
            });
            broken_off(cut, cutter)
        }
        Effect::Truncate(events, bytes) => {
            let cut = frames
                .enumerate()
                .map(move |(at, line)| (at, line))
                .take_while(move |(at, _)| std::future::ready(*at < events || (*at == events && bytes > 0)));
            broken_off(
                cut.map(move |(at, line)| if at == events { line.slice(..bytes.min(line.len())) } else { line }),
                cutter,
            )
        }
        Effect::CutBeforeMarker => {
            let is_marker = |line: &Bytes| String::from_utf8_lossy(line).contains("k8s.io/initial-events-end");
            broken_off(frames.take_while(move |line| std::future::ready(!is_marker(line))), cutter)
        }
        Effect::EndWatch(events) => {
            BodyExt::boxed_unsync(StreamBody::new(frames.take(events).map(|line| Ok(Frame::data(line)))))
        }
        Effect::Slow(per_second) => {
            let most = (per_second / 10).max(1);
            let pieces = frames.flat_map(move |bytes| {
                let count = bytes.len().div_ceil(most);
                let piece = move |at: usize| bytes.slice(at * most..bytes.len().min((at + 1) * most));
                futures::stream::iter((0..count).map(piece)).then(async |piece| {
                    tokio::time::sleep(TICK).await;
                    piece
                })
            });
            BodyExt::boxed_unsync(StreamBody::new(pieces.map(|piece| Ok(Frame::data(piece)))))
        }
        _ => {
            return Response::from_parts(
                head,
                BodyExt::boxed_unsync(StreamBody::new(frames.map(|f| Ok(Frame::data(f))))),
            );
        }
    };
    let mut answer = Response::from_parts(head, body);
    answer.headers_mut().remove(header::CONTENT_LENGTH);
    answer
}

/// Body that closes the connection after its frames.
fn broken_off(frames: impl futures::Stream<Item = Bytes> + Send + 'static, connection: Arc<Connection>) -> Body {
    let end = futures::stream::once(async move {
        // Lets written data leave before the connection closes.
        tokio::time::sleep(TICK).await;
        connection.close();
        Err(AbortError)
    });
    BodyExt::boxed_unsync(StreamBody::new(frames.map(|frame| Ok(Frame::data(frame))).chain(end)))
}

/// Adds the common headers and records the response.
fn finish(shared: &Arc<ServerState>, id: u64, mut answer: Response<Body>) -> Response<Body> {
    let audit = {
        let core = shared.core();
        uuid(core.random(), core.random())
    };
    let headers = answer.headers_mut();
    for (name, value) in [
        ("audit-id", audit.as_str()),
        ("cache-control", "no-cache, private"),
        ("x-kubernetes-pf-flowschema-uid", "6c3d1c2e-5a0f-4d3b-9c2a-000000000001"),
        ("x-kubernetes-pf-prioritylevel-uid", "6c3d1c2e-5a0f-4d3b-9c2a-000000000002"),
    ] {
        headers.insert(name, HeaderValue::from_str(value).expect("plain"));
    }
    let (code, size) = (answer.status().as_u16(), hyper::body::Body::size_hint(answer.body()).exact());
    shared.recorder().change(id, |logged| {
        logged.code = Some(code);
        // A watch ends later.
        if let Some(size) = size {
            logged.ended = Some(Instant::now());
            logged.bytes = usize::try_from(size).unwrap_or(usize::MAX);
        }
    });
    shared.notify();
    answer
}

/// Responds to a non-resource path: health, version, discovery, OpenAPI.
fn page(shared: &ServerState, head: &Parts) -> Response<Body> {
    let path = head.uri.path();
    match path {
        "/healthz" | "/livez" | "/readyz" => reply(200, "text/plain; charset=utf-8", "ok".into()),
        "/version" => json_reply(
            200,
            &json!({"major": "1", "minor": "36", "gitVersion": "v1.36.2", "gitCommit": "",
            "gitTreeState": "clean", "buildDate": "2026-01-01T00:00:00Z", "goVersion": "", "compiler": "",
            "platform": "linux/amd64"}),
        ),
        _ => match resources::discovery(path.trim_end_matches('/'))
            .or_else(|| openapi::page(path))
            .filter(|_| !shared.is_absent(path))
        {
            Some(page) => json_reply(200, &page),
            None => reply(404, "text/plain; charset=utf-8", "404 page not found\n".into()),
        },
    }
}

/// Handles a resource request against the state.
async fn respond(
    shared: &Arc<ServerState>,
    id: u64,
    kind: &'static Kind,
    place: ObjectPath,
    caller: Caller,
    head: &Parts,
    body: &Bytes,
) -> Response<Body> {
    match request(kind, place, caller, head, body) {
        Err(refusal) => refused(&refusal),
        Ok(request) if request.verb == "watch" => open(shared, id, kind, request, head).await,
        Ok(mut request) => {
            if request.verb == "list" {
                wait_for_version(shared, &request).await;
            }
            let (before, outcome, after) = shared.act(|core| {
                let before = core.store.rv();
                let outcome = core.handle(&mut request, kind);
                (before, outcome, core.store.rv())
            });
            if after > before {
                shared.recorder().change(id, |logged| logged.rv = Some(after));
            }
            match outcome {
                Ok(answer) => {
                    let tables = tables(head, &request);
                    let table = tables.map(|tables| tables.answer(kind, &answer.body, shared.core().now()));
                    let mut reply = json_reply(answer.code, table.as_ref().unwrap_or(&answer.body));
                    for warning in rules::warnings(&request) {
                        let text = format!("299 - {}", json!(warning));
                        reply
                            .headers_mut()
                            .extend(HeaderValue::from_str(&text).ok().map(|text| (header::WARNING, text)));
                    }
                    reply
                }
                Err(refusal) => refused(&refusal),
            }
        }
    }
}

/// Parses the HTTP request into a resource request.
fn request(
    kind: &'static Kind,
    place: ObjectPath,
    caller: Caller,
    head: &Parts,
    body: &Bytes,
) -> Result<Request, Refusal> {
    let accepted = header_text(&head.headers, "accept");
    if !accepted.is_empty() && !["json", "*/*", "application/*"].iter().any(|fine| accepted.contains(fine)) {
        let text = "only the following media types are accepted: application/json, application/json;stream=watch";
        return Err(Refusal::new(406, "NotAcceptable", text));
    }
    let content_type = header_text(&head.headers, "content-type");
    let content_type = content_type.split(';').next().unwrap_or_default().trim().to_owned();
    if !body.is_empty() && content_type.contains("protobuf") {
        return Err(Refusal::new(
            415,
            "UnsupportedMediaType",
            "the body of the request was in an unknown format - accepted media types include: application/json",
        ));
    }
    let mut request = Request {
        caller,
        verb: verb(head, &place),
        resource: kind.id.to_owned(),
        kind: kind.kind,
        api_version: kind.api_version(),
        subresource: place.subresource,
        namespace: place.namespace,
        name: place.name,
        query: pairs(head),
        content_type,
        ..Request::default()
    };
    if !body.is_empty() && head.method != Method::GET {
        let parsed = serde_json::from_slice(body);
        let wrong = |e: serde_json::Error| {
            Refusal::bad_request(format!("the object provided is unrecognized (must be JSON): {e}"))
        };
        request.body = Some(parsed.map_err(wrong)?);
    }
    request.options = options(&request);
    request.fields = parse_fields(request.query("fieldSelector").unwrap_or_default())?;
    request.labels = parse_labels(request.query("labelSelector").unwrap_or_default())?;
    if request.verb == "watch" && !request.name.is_empty() {
        let name = std::mem::take(&mut request.name);
        request.fields.extend(parse_fields(&format!("metadata.name={name}"))?);
    }
    Ok(request)
}

fn options(request: &Request) -> DeleteOptions {
    let body = request.body.as_ref().unwrap_or(&Value::Null);
    let word = |value: &Value, query: &str| {
        value.as_str().map(str::to_owned).or_else(|| request.query(query).map(str::to_owned))
    };
    DeleteOptions {
        grace: body["gracePeriodSeconds"].as_i64().or_else(|| request.query("gracePeriodSeconds")?.parse().ok()),
        uid: body["preconditions"]["uid"].as_str().map(str::to_owned),
        resource_version: body["preconditions"]["resourceVersion"].as_str().map(str::to_owned),
        propagation: word(&body["propagationPolicy"], "propagationPolicy"),
    }
}

/// Waits for a resource version that does not exist yet, at most three seconds.
async fn wait_for_version(shared: &ServerState, request: &Request) {
    let Ok(Some(asked)) = version(request) else { return };
    let mut changes = shared.changed.subscribe();
    let current = || shared.core().store.rv();
    let reached = async {
        while current() < asked {
            let _ = changes.changed().await; // never fails: `shared` owns the sender
        }
    };
    let _ = tokio::time::timeout(FUTURE, reached).await; // the caller's read reports a version that is still too large
}

/// Requested table format, if the response is to be a table.
fn tables(head: &Parts, request: &Request) -> Option<tables::TableFormat> {
    let reads = ["get", "list", "watch"].contains(&request.verb) && request.subresource.is_empty();
    let wanted = || tables::wanted(header_text(&head.headers, "accept"), request.query("includeObject"));
    if reads { wanted() } else { None }
}

async fn open(
    shared: &Arc<ServerState>,
    id: u64,
    kind: &'static Kind,
    request: Request,
    head: &Parts,
) -> Response<Body> {
    if request.query("sendInitialEvents") == Some("true") {
        wait_for_version(shared, &request).await;
    }
    let opened: Result<WatchSession, Refusal> = shared.act(|core| core.watch(&request, kind));
    match opened {
        Err(refusal) => refused(&refusal),
        Ok(opened) => {
            let feed = Feed::new(shared, kind, &request, opened, id).with_tables(tables(head, &request));
            let lines = futures::stream::unfold(feed, async |mut feed| feed.next().await.map(|line| (line, feed)));
            let body = StreamBody::new(lines.map(|line| Ok(Frame::data(line))));
            let builder = Response::builder().header(header::CONTENT_TYPE, "application/json");
            builder.body(BodyExt::boxed_unsync(body)).expect("invalid response")
        }
    }
}

/// HTTP response of a refusal.
pub(super) fn refused(refusal: &Refusal) -> Response<Body> {
    let mut answer = if refusal.is_text {
        reply(refusal.code, "text/plain; charset=utf-8", refusal.message.clone().into())
    } else {
        json_reply(refusal.code, &refusal.status())
    };
    answer.headers_mut().extend(refusal.retry_after.map(|seconds| (header::RETRY_AFTER, seconds.into())));
    answer
}

fn json_reply(code: u16, body: &Value) -> Response<Body> {
    reply(code, "application/json", body.to_string().into())
}

fn reply(code: u16, content_type: &'static str, body: Bytes) -> Response<Body> {
    let body = Full::new(body).map_err(|never| match never {});
    let status = StatusCode::from_u16(code).expect("invalid status code");
    let builder = Response::builder().status(status).header(header::CONTENT_TYPE, content_type);
    builder.body(BodyExt::boxed_unsync(body)).expect("invalid response")
}
