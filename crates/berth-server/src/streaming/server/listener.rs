//! Loopback HTTP listener for one-time stream URLs of the embedded runtime (spec 04b §5).
//!
//! Used where other clients call the runtime over its socket.

use std::{convert::Infallible, io, net::SocketAddr, sync::Arc, time::Duration};

use axum::{
    body::Body,
    http::{Request, StatusCode},
    response::Response,
};
use hyper::{server::conn::http1, service::service_fn};
use hyper_util::rt::{TokioIo, TokioTimer};
use tokio::{
    net::{TcpListener, TcpStream},
    sync::{OwnedSemaphorePermit, Semaphore},
    time::sleep,
};
use tokio_util::{sync::CancellationToken, task::TaskTracker};
use tracing::warn;

use super::{ServeOptions, upgrade};
use crate::{ports::stream_targets::StreamTargets, streaming::error_response::line};

/// Maximum number of connections.
const CONNECTIONS: usize = 1024;
/// Timeout of the request head.
const HEAD: Duration = Duration::from_secs(10);
/// Pause after a failed accept.
const PAUSE: Duration = Duration::from_millis(100);
/// Idle timeout of a stream.
const IDLE: Duration = Duration::from_secs(4 * 3600);
/// Ping interval of WebSockets.
const HEARTBEAT: Duration = Duration::from_secs(30);

/// Bound loopback listener that does not serve yet.
#[derive(Debug)]
pub struct BoundListener(TcpListener, SocketAddr);

impl BoundListener {
    /// Binds an address; `127.0.0.1:0` selects any port.
    ///
    /// # Errors
    /// If the address is not loopback, or in use.
    pub async fn bind(address: &str) -> io::Result<Self> {
        let wrong = || {
            io::Error::new(
                io::ErrorKind::InvalidInput,
                format!("invalid streaming address {address:?}: expected <IP address>:<port>"),
            )
        };
        let address: SocketAddr = address.parse().map_err(|_| wrong())?;
        if !address.ip().is_loopback() {
            let text = format!("invalid streaming address {address}: must be a loopback address");
            return Err(io::Error::new(io::ErrorKind::InvalidInput, text));
        }
        let listener = TcpListener::bind(address).await?;
        let bound = listener.local_addr()?;
        Ok(Self(listener, bound))
    }

    /// Prefix of stream URLs: `http://127.0.0.1:40000`.
    pub fn url(&self) -> String {
        format!("http://{}", self.1)
    }

    /// Serves until `stop` is canceled, which also ends all streams.
    pub async fn serve(self, targets: Arc<dyn StreamTargets>, stop: CancellationToken) {
        let (places, tasks) = (Arc::new(Semaphore::new(CONNECTIONS)), TaskTracker::new());
        let accepting = async {
            loop {
                // The semaphore is never closed: waits until a connection ends.
                let place = places.clone().acquire_owned().await.ok().map(Arc::new);
                match self.0.accept().await {
                    Ok((tcp, _)) => {
                        let (targets, stop, served) = (targets.clone(), stop.clone(), tasks.clone());
                        tasks.spawn(async move {
                            tokio::select! {
                                () = connection(tcp, &targets, (served, place), &stop) => {}
                                () = stop.cancelled() => {}
                            }
                        });
                    }
                    Err(cause) => {
                        warn!(err = %cause, "Failed to accept streaming connection");
                        sleep(PAUSE).await;
                    }
                }
            }
        };
        tokio::select! {
            () = accepting => {}
            () = stop.cancelled() => {}
        }
        tasks.close();
        tasks.wait().await;
    }
}

/// Tracker of stream tasks, and the connection's permit.
type StreamTaskSlot = (TaskTracker, Option<Arc<OwnedSemaphorePermit>>);

async fn connection(tcp: TcpStream, targets: &Arc<dyn StreamTargets>, room: StreamTaskSlot, stop: &CancellationToken) {
    let _ = tcp.set_nodelay(true); // best effort: only latency depends on it
    let service = service_fn(|request: Request<hyper::body::Incoming>| {
        let response = handle(request.map(Body::new), &**targets, &room, stop);
        async move { Ok::<_, Infallible>(response) }
    });
    let mut http = http1::Builder::new();
    http.timer(TokioTimer::new()).header_read_timeout(HEAD);
    // The client got the error, or has disconnected.
    let _ = http.serve_connection(TokioIo::new(tcp), service).with_upgrades().await;
}

fn handle(
    request: Request<Body>,
    targets: &dyn StreamTargets,
    room: &StreamTaskSlot,
    stop: &CancellationToken,
) -> Response {
    let Some(target) = targets.take(request.uri().path()) else {
        return unknown();
    };
    let manner = ServeOptions { idle: Some(IDLE), heartbeat: HEARTBEAT, knows_newest: true };
    let upgrade::UpgradeResponse { response, work, .. } = upgrade::respond(target, manner, request);
    if let Some(work) = work {
        let (stop, (tasks, place)) = (stop.clone(), room.clone());
        tasks.spawn(async move {
            tokio::select! {
                () = work => {}
                () = stop.cancelled() => {}
            }
            drop(place);
        });
    }
    response
}

/// 404 for a token that is unknown, used, or expired.
pub fn unknown() -> Response {
    line(StatusCode::NOT_FOUND, "unknown-stream", "404 page not found")
}
