//! In-process streaming server: protocol upgrade and response of a stream request (spec 04b §3, §4.1).

use std::time::Duration;

use axum::{
    body::Body,
    http::{HeaderMap, HeaderName, HeaderValue, Request, StatusCode, header},
    response::{IntoResponse, Response},
};
use futures::future::BoxFuture;
use hyper::upgrade::OnUpgrade;
use hyper_util::rt::TokioIo;

use super::{codec::ChannelProtocol, socket_command, socket_forward, spdy_command, spdy_forward};
use crate::{
    ports::stream_targets::{CommandKind, PodPorts, StreamTarget},
    streaming::{
        error_response::{bare, line},
        query::PortsError,
        spdy::handshake::{self, UpgradeRejection, negotiate},
        upgrade_protocol::{is_web_socket, subprotocols, tunnel_of, tunnelled},
        websocket::{
            handshake::Handshake,
            tunnel::{copy, toward_runtime},
        },
    },
};

/// Buffer of a tunnel per direction, in bytes.
const TUNNEL: usize = 64 << 10;

/// Options of the in-process streaming server.
#[derive(Clone, Copy, Debug)]
pub struct ServeOptions {
    /// Idle timeout: a stream is closed after this long without a frame; `None` for never.
    pub idle: Option<Duration>,
    /// Ping interval of WebSockets.
    pub heartbeat: Duration,
    /// Whether channel protocol version 5 and SPDY in WebSocket are enabled.
    pub knows_newest: bool,
}

/// Response, and the stream to run afterwards.
pub struct UpgradeResponse {
    /// HTTP response.
    pub response: Response,
    /// Future that serves the stream; `None` after a refusal.
    pub work: Option<BoxFuture<'static, ()>>,
    /// Metric label for a WebSocket with version 5 or a tunnel: `exec`, `attach`, `portforward`.
    pub counts_as: Option<&'static str>,
}

impl From<Response> for UpgradeResponse {
    fn from(response: Response) -> Self {
        Self { response, work: None, counts_as: None }
    }
}

type Forward = (Vec<u16>, Box<dyn PodPorts>);

/// Responds to a stream request for a prepared target.
pub fn respond(target: StreamTarget, manner: ServeOptions, request: Request<Body>) -> UpgradeResponse {
    let answered = match (target, is_web_socket(request.headers())) {
        (StreamTarget::Command { verb, set, process }, false) => {
            spdy(request, handshake::COMMAND, move |io, protocol| {
                Box::pin(spdy_command::serve(
                    io,
                    spdy_command::SpdyCommandRequest { verb, set, process, protocol },
                    manner,
                ))
            })
        }
        (StreamTarget::Forward { pod, .. }, false) => {
            spdy(request, handshake::FORWARD, move |io, _| Box::pin(spdy_forward::serve(io, pod, manner)))
        }
        (StreamTarget::Command { verb, set, process }, true) => command(request, manner, (verb, set, process)),
        (StreamTarget::Forward { ports, pod }, true) => forward(request, manner, (ports, pod)),
    };
    answered.unwrap_or_else(|refusal| (*refusal).into())
}

/// The refusal is boxed because it is rare and large.
type UpgradeResult = Result<UpgradeResponse, Box<Response>>;

type UpgradedIo = TokioIo<hyper::upgrade::Upgraded>;

fn spdy(
    mut request: Request<Body>,
    accepted: &'static [&'static str],
    serve: impl FnOnce(UpgradedIo, &'static str) -> BoxFuture<'static, ()> + Send + 'static,
) -> UpgradeResult {
    let protocol = negotiate(request.headers(), accepted).map_err(|no| Box::new(refused(no, accepted)))?;
    let Some(upgrade) = request.extensions_mut().remove::<OnUpgrade>() else {
        let text = "connection does not support upgrade";
        return Err(Box::new(line(StatusCode::INTERNAL_SERVER_ERROR, "no-upgrade", text)));
    };
    let mut response = StatusCode::SWITCHING_PROTOCOLS.into_response();
    let headers = response.headers_mut();
    headers.insert(header::CONNECTION, HeaderValue::from_static("Upgrade"));
    headers.insert(header::UPGRADE, HeaderValue::from_static(handshake::SPDY));
    headers.insert(HeaderName::from_static(handshake::PROTOCOL), HeaderValue::from_static(protocol));
    let work = async move {
        // The client disconnected before the upgrade.
        if let Ok(upgraded) = upgrade.await {
            serve(TokioIo::new(upgraded), protocol).await;
        }
    };
    Ok(UpgradeResponse { response, work: Some(Box::pin(work)), counts_as: None })
}

fn refused(refusal: UpgradeRejection, accepted: &[&'static str]) -> Response {
    let UpgradeRejection { status, text, lists_accepted } = refusal;
    let mut response = line(status, "no-protocol", text.trim_end());
    for protocol in accepted.iter().filter(|_| lists_accepted) {
        let name = HeaderName::from_static(handshake::ACCEPTED);
        response.headers_mut().append(name, HeaderValue::from_static(protocol));
    }
    response
}

type Command = (CommandKind, crate::ports::streams::StreamSet, Box<dyn crate::ports::stream_targets::ProcessTarget>);

fn command(mut request: Request<Body>, manner: ServeOptions, (verb, set, process): Command) -> UpgradeResult {
    let offered = offered(request.headers());
    let protocol = ChannelProtocol::for_command(&strs(&offered), manner.knows_newest).ok_or_else(no_protocol)?;
    let (response, socket) = Handshake::of(&mut request).map_err(Box::new)?.complete(protocol.name);
    let work = async move {
        if let Some(socket) = socket.await {
            socket_command::serve(
                socket,
                socket_command::SocketCommandRequest { verb, set, process, protocol },
                manner,
            )
            .await;
        }
    };
    let kind = if verb == CommandKind::Exec { "exec" } else { "attach" };
    let counts_as = protocol.closes_channels().then_some(kind);
    Ok(UpgradeResponse { response, work: Some(Box::pin(work)), counts_as })
}

fn forward(mut request: Request<Body>, manner: ServeOptions, (ports, pod): Forward) -> UpgradeResult {
    let offered = offered(request.headers());
    let inner: Vec<String> = offered.iter().filter_map(|name| tunnelled(name)).map(str::to_owned).collect();
    if manner.knows_newest && !inner.is_empty() {
        return tunnel(request, &inner, pod, manner);
    }
    if ports.is_empty() {
        return Err(Box::new(bare(StatusCode::BAD_REQUEST, "bad-port", &PortsError::Missing.to_string())));
    }
    if ports.len() > socket_forward::MOST_PORTS {
        let text = format!("too many ports: must be at most {}", socket_forward::MOST_PORTS);
        return Err(Box::new(bare(StatusCode::BAD_REQUEST, "bad-port", &text)));
    }
    let protocol = ChannelProtocol::for_ports(&strs(&offered)).ok_or_else(no_protocol)?;
    let (response, socket) = Handshake::of(&mut request).map_err(Box::new)?.complete(protocol.name);
    let work = async move {
        if let Some(socket) = socket.await {
            socket_forward::serve(socket, pod, (protocol, ports), manner).await;
        }
    };
    Ok(UpgradeResponse { response, work: Some(Box::pin(work)), counts_as: None })
}

/// SPDY tunneled in a WebSocket: the inner protocol is negotiated as without a tunnel.
fn tunnel(mut request: Request<Body>, inner: &[String], pod: Box<dyn PodPorts>, manner: ServeOptions) -> UpgradeResult {
    let handshake = Handshake::of(&mut request).map_err(Box::new)?;
    let headers = toward_runtime(std::mem::take(request.headers_mut()), inner);
    let accepted = handshake::FORWARD;
    let protocol = negotiate(&headers, accepted).map_err(|no| Box::new(refused(no, accepted)))?;
    let (response, socket) = handshake.complete(&tunnel_of(protocol));
    let work = async move {
        if let Some(socket) = socket.await {
            let (ours, theirs) = tokio::io::duplex(TUNNEL);
            tokio::join!(copy(socket, theirs), spdy_forward::serve(ours, pod, manner));
        }
    };
    Ok(UpgradeResponse { response, work: Some(Box::pin(work)), counts_as: Some("portforward") })
}

fn offered(headers: &HeaderMap) -> Vec<String> {
    subprotocols(headers).into_iter().filter(|name| !name.is_empty()).map(str::to_owned).collect()
}

fn strs(owned: &[String]) -> Vec<&str> {
    owned.iter().map(String::as_str).collect()
}

fn no_protocol() -> Box<Response> {
    Box::new(StatusCode::FORBIDDEN.into_response())
}
