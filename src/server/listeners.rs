//! Plain-HTTP listeners with limits, and their orderly end.

use std::{
    io,
    net::{IpAddr, SocketAddr},
    time::Duration,
};

use axum::Router;
use hyper_util::{
    rt::{TokioIo, TokioTimer},
    server::graceful::GracefulShutdown,
    service::TowerToHyperService,
};
use tokio::net::TcpListener;
use tokio_util::sync::CancellationToken;
use tracing::{debug, error};

/// Longest wait for the head of a request; also ends idle keep-alive connections (spec 04 §2).
const HEAD_LIMIT: Duration = Duration::from_secs(90);
/// Largest request head.
const HEAD_BYTES: usize = 1 << 20;
/// How long open requests may take once the agent stops.
const SHUTDOWN_LIMIT: Duration = Duration::from_secs(5);
/// Pause between tries to open the healthz port.
const RETRY: Duration = Duration::from_secs(5);

/// A bound listener.
#[derive(Debug)]
pub struct Listening(TcpListener);

impl Listening {
    /// The address it listens on, with the port the kernel chose where 0 was asked for.
    pub fn address(&self) -> io::Result<SocketAddr> {
        self.0.local_addr()
    }
}

/// Binds a TCP port.
///
/// # Errors
/// The kernel's error.
pub async fn bind(address: IpAddr, port: u16) -> io::Result<Listening> {
    TcpListener::bind((address, port)).await.map(Listening)
}

/// Serves until cancelled, then lets open requests finish up to a limit.
pub async fn serve(listening: Listening, router: Router, cancel: CancellationToken) {
    let graceful = GracefulShutdown::new();
    loop {
        let accepted = tokio::select! {
            biased;
            () = cancel.cancelled() => break,
            accepted = listening.0.accept() => accepted,
        };
        let stream = match accepted {
            Ok((stream, _)) => stream,
            Err(error) => {
                // Out of descriptors, or a connection that died in the queue: neither ends the listener.
                debug!(err = %error, "Cannot accept a connection");
                tokio::time::sleep(Duration::from_millis(50)).await;
                continue;
            }
        };
        let mut http = hyper::server::conn::http1::Builder::new();
        http.timer(TokioTimer::new()).header_read_timeout(HEAD_LIMIT).max_buf_size(HEAD_BYTES);
        let service = TowerToHyperService::new(router.clone());
        let connection = graceful.watch(http.serve_connection(TokioIo::new(stream), service));
        tokio::spawn(async move {
            if let Err(error) = connection.await {
                debug!(err = %error, "HTTP connection ended");
            }
        });
    }
    let _ = tokio::time::timeout(SHUTDOWN_LIMIT, graceful.shutdown()).await; // who is slower is cut off
}

/// Like [`serve`], binding again every 5 s where the port cannot be had: the healthz port is
/// never fatal (spec 01 §7.1).
pub async fn serve_persistently(address: IpAddr, port: u16, router: Router, cancel: CancellationToken) {
    loop {
        match bind(address, port).await {
            Ok(listening) => return serve(listening, router, cancel).await,
            Err(error) => error!(err = %error, "Failed to start healthz server"),
        }
        tokio::select! {
            () = cancel.cancelled() => return,
            () = tokio::time::sleep(RETRY) => {}
        }
    }
}
