//! The agent's gRPC sockets with real clients over Unix sockets: pod resources and pods API.

mod pod_resources;
mod pods;

use std::{path::PathBuf, time::Duration};

use hyper_util::rt::TokioIo;
use tokio::{net::UnixStream, time::timeout};
use tonic::transport::{Channel, Endpoint};

/// Timeout of a step.
const PATIENCE: Duration = Duration::from_secs(60);

/// Connects a channel to an existing socket.
async fn connect(socket: PathBuf) -> Channel {
    let connector = tower::service_fn(move |_: http::Uri| {
        let socket = socket.clone();
        async move { UnixStream::connect(socket).await.map(TokioIo::new) }
    });
    Endpoint::from_static("http://localhost").connect_with_connector(connector).await.expect("connectable")
}

/// Waits until a socket is served.
async fn opened(mut trouble: tokio::sync::watch::Receiver<Option<String>>) {
    let open = timeout(PATIENCE, trouble.wait_for(Option::is_none)).await;
    open.expect("in time").expect("it lives");
}
