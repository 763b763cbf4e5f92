//! Meets the streams of a runtime that others call over its socket: HTTP on loopback, one-time URLs (spec 04b §5).

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

use super::{Manner, upgrade};
use crate::{ports::targets::Targets, streaming::answer::line};

/// Connections at once.
const CONNECTIONS: usize = 1024;
/// How long a client may take to say what it wants.
const HEAD: Duration = Duration::from_secs(10);
/// Pause after a connection that could not be taken.
const PAUSE: Duration = Duration::from_millis(100);
/// How long without a frame ends a stream.
const IDLE: Duration = Duration::from_secs(4 * 3600);
/// How often a WebSocket's client is asked whether it is there.
const HEARTBEAT: Duration = Duration::from_secs(30);

/// A listener on loopback that is not served yet.
#[derive(Debug)]
pub struct Listening(TcpListener, SocketAddr);

impl Listening {
    /// Binds an address, `127.0.0.1:0` for any port.
    ///
    /// # Errors
    /// It is no address of loopback, or taken.
    pub async fn bind(address: &str) -> io::Result<Self> {
        let wrong = || io::Error::new(io::ErrorKind::InvalidInput, format!("{address:?} is no address and port"));
        let address: SocketAddr = address.parse().map_err(|_| wrong())?;
        if !address.ip().is_loopback() {
            let text = format!("{address} is reached from other machines: streams are served on loopback only");
            return Err(io::Error::new(io::ErrorKind::InvalidInput, text));
        }
        let listener = TcpListener::bind(address).await?;
        let bound = listener.local_addr()?;
        Ok(Self(listener, bound))
    }

    /// What URLs of streams begin with: `http://127.0.0.1:40000`.
    pub fn url(&self) -> String {
        format!("http://{}", self.1)
    }

    /// Serves until told to stop; then all streams end.
    pub async fn serve(self, targets: Arc<dyn Targets>, stop: CancellationToken) {
        let (places, tasks) = (Arc::new(Semaphore::new(CONNECTIONS)), TaskTracker::new());
        let accepting = async {
            loop {
                // Never closed: waits until somebody leaves.
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
                        warn!(err = %cause, "A connection for a stream could not be taken");
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

/// Where streams run, and the place of their connection among those that are served.
type Room = (TaskTracker, Option<Arc<OwnedSemaphorePermit>>);

async fn connection(tcp: TcpStream, targets: &Arc<dyn Targets>, room: Room, stop: &CancellationToken) {
    let _ = tcp.set_nodelay(true); // slower, but it works
    let service = service_fn(|request: Request<hyper::body::Incoming>| {
        let response = meet(request.map(Body::new), &**targets, &room, stop);
        async move { Ok::<_, Infallible>(response) }
    });
    let mut http = http1::Builder::new();
    http.timer(TokioTimer::new()).header_read_timeout(HEAD);
    // Whoever asked is told, or has gone.
    let _ = http.serve_connection(TokioIo::new(tcp), service).with_upgrades().await;
}

fn meet(request: Request<Body>, targets: &dyn Targets, room: &Room, stop: &CancellationToken) -> Response {
    let Some(target) = targets.take(request.uri().path()) else {
        return unknown();
    };
    let manner = Manner { idle: Some(IDLE), heartbeat: HEARTBEAT, knows_newest: true };
    let upgrade::Answer { response, work, .. } = upgrade::answer(target, manner, request);
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

/// The answer to a token that was never given, was used, or is too old.
pub fn unknown() -> Response {
    line(StatusCode::NOT_FOUND, "unknown-stream", "404 page not found")
}
