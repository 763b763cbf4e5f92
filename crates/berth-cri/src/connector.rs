//! Lazy gRPC channels over Unix sockets and in-process pipes: fail-fast connect with back-off.
//!
//! The channel requests a connection whenever a call finds none. During the back-off it gets the last error, so that a
//! dead runtime causes neither waiting nor a storm of attempts (spec 03a §2.1 "Reconnect", "Calls").

use std::{
    io,
    path::{Path, PathBuf},
    sync::{Arc, Mutex, PoisonError},
    time::Duration,
};

use hyper_util::rt::TokioIo;
use tokio::{
    net::UnixStream,
    time::{Instant, timeout},
};
use tonic::transport::{Channel, Endpoint};

use super::client_factory::Dial;
use berth_sys::backoff::Backoff;

/// Longest back-off, before the jitter.
const CAP: Duration = Duration::from_secs(3);
/// Back-off of failed attempts.
const BACKOFF: Backoff = Backoff::new(Duration::from_millis(100), CAP).with_factor(1.6).with_jitter(0.8, 1.2);
const ATTEMPT: Duration = Duration::from_secs(5);

/// Dial error, with the text of gRPC's Go library.
#[derive(Debug, Clone, thiserror::Error)]
#[error("connection error: desc = \"transport: Error while dialing: dial unix {path}: {cause}\"")]
struct DialError {
    path: String,
    cause: String,
}

struct Pause {
    backoff: Backoff,
    until: Instant,
    error: DialError,
}

/// Channel to the socket that connects on first use, and reconnects when needed.
pub fn socket_channel(socket: PathBuf) -> Channel {
    let pause: Arc<Mutex<Option<Pause>>> = Arc::default();
    let connector = tower::service_fn(move |_: http::Uri| {
        let (socket, pause) = (socket.clone(), pause.clone());
        async move { connect(&socket, &pause).await.map(TokioIo::new) }
    });
    Endpoint::from_static("http://localhost").connect_with_connector_lazy(connector)
}

/// Channel to services in this process.
pub(super) fn memory_channel(dial: Dial) -> Channel {
    let connector = tower::service_fn(move |_: http::Uri| {
        let connecting = dial();
        async move { connecting.await.map(TokioIo::new) }
    });
    Endpoint::from_static("http://localhost").connect_with_connector_lazy(connector)
}

async fn connect(socket: &Path, pause: &Mutex<Option<Pause>>) -> Result<UnixStream, DialError> {
    let pending_error = |pause: &Mutex<Option<Pause>>| {
        let guard = pause.lock().unwrap_or_else(PoisonError::into_inner);
        guard.as_ref().filter(|p| Instant::now() < p.until).map(|p| p.error.clone())
    };
    if let Some(error) = pending_error(pause) {
        return Err(error);
    }
    let answer = match timeout(ATTEMPT, UnixStream::connect(socket)).await {
        Ok(answer) => answer,
        Err(_) => Err(io::Error::from(io::ErrorKind::TimedOut)),
    };
    let mut slot = pause.lock().unwrap_or_else(PoisonError::into_inner);
    match answer {
        Ok(stream) => {
            *slot = None;
            Ok(stream)
        }
        Err(error) => {
            let error = DialError { path: socket.display().to_string(), cause: words(&error) };
            let mut backoff = slot.as_ref().map_or(BACKOFF, |pause| pause.backoff);
            let until = Instant::now() + backoff.next_delay();
            *slot = Some(Pause { backoff, until, error: error.clone() });
            Err(error)
        }
    }
}

/// Error texts as Go prints them, for the errors that operators encounter.
fn words(error: &io::Error) -> String {
    match error.kind() {
        io::ErrorKind::NotFound => "connect: no such file or directory".to_owned(),
        io::ErrorKind::ConnectionRefused => "connect: connection refused".to_owned(),
        io::ErrorKind::PermissionDenied => "connect: permission denied".to_owned(),
        io::ErrorKind::TimedOut => "i/o timeout".to_owned(),
        _ => format!("connect: {error}"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test(start_paused = true)]
    async fn attempts_wait_for_the_back_off() {
        let dir = tempfile::tempdir().expect("a directory");
        let socket = dir.path().join("cri.sock");
        let pause = Mutex::new(None);
        let error = connect(&socket, &pause).await.expect_err("no socket");
        assert_eq!(
            error.to_string(),
            format!(
                "connection error: desc = \"transport: Error while dialing: dial unix {}: connect: no such file or directory\"",
                socket.display()
            )
        );
        let _listener = tokio::net::UnixListener::bind(&socket).expect("a socket");
        connect(&socket, &pause).await.expect_err("within the back-off the last error is the answer");
        tokio::time::advance(Duration::from_millis(121)).await;
        connect(&socket, &pause).await.expect("connects once the back-off is over");
    }

    #[tokio::test(start_paused = true)]
    async fn the_back_off_grows_to_its_cap() {
        let pause = Mutex::new(None);
        let mut delays = Vec::new();
        for _ in 0..12 {
            connect(Path::new("/nowhere/at/all"), &pause).await.expect_err("no socket");
            let until = pause.lock().expect("lock").as_ref().expect("held").until;
            delays.push(until - Instant::now());
            tokio::time::advance(CAP * 2).await;
        }
        assert!(delays[0] >= Duration::from_millis(80) && delays[0] <= Duration::from_millis(120), "{delays:?}");
        assert!(delays[1] >= Duration::from_millis(128) && delays[1] <= Duration::from_millis(192), "{delays:?}");
        assert!(delays[11] >= Duration::from_millis(2400) && delays[11] <= Duration::from_millis(3600), "{delays:?}");
    }
}
