//! systemd notifications: READY, watchdog keep-alives, and a missing service manager.

use std::{
    os::unix::net::UnixDatagram,
    path::PathBuf,
    time::{Duration, Instant},
};

use crate::agent::ScriptedServer;
use berth_testkit::process::{PATIENCE, manifest, skips};

/// Receiver at `NOTIFY_SOCKET`.
struct NotifySocket {
    socket: UnixDatagram,
    path: PathBuf,
    _dir: tempfile::TempDir,
}

impl NotifySocket {
    fn new() -> Self {
        let dir = tempfile::tempdir().expect("a folder");
        let path = dir.path().join("notify");
        let socket = UnixDatagram::bind(&path).expect("a socket");
        socket.set_read_timeout(Some(PATIENCE)).expect("a limit");
        Self { socket, path, _dir: dir }
    }

    /// The next message and its arrival time.
    async fn receive(&self) -> (String, Instant) {
        let socket = self.socket.try_clone().expect("a handle");
        let receiving = tokio::task::spawn_blocking(move || {
            let mut message = [0; 128];
            let length = socket.recv(&mut message).expect("a message in time");
            (String::from_utf8_lossy(message.get(..length).unwrap_or_default()).into_owned(), Instant::now())
        });
        receiving.await.expect("no panic")
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn it_notifies_when_it_is_ready() {
    if skips("it_notifies_when_it_is_ready") {
        return;
    }
    let runtime = ScriptedServer::new().await;
    let notify_socket = NotifySocket::new();
    let home = runtime.home().environment("NOTIFY_SOCKET", notify_socket.path.to_string_lossy());
    let mut agent = home.spawn();
    assert_eq!(notify_socket.receive().await.0, "READY=1");
    agent.healthy().await;
    assert_eq!(agent.stop().await, Some(0));
    notify_socket.socket.set_nonblocking(true).expect("set");
    notify_socket.socket.recv(&mut [0; 8]).expect_err("no log at the end");
}

/// The first watchdog keep-alive precedes everything else, even while the runtime is down; then one every half of the
/// watchdog interval.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn it_gives_signs_of_life() {
    if skips("it_gives_signs_of_life") {
        return;
    }
    // AC-01-29
    let mut runtime = ScriptedServer::unserved();
    let notify_socket = NotifySocket::new();
    let home = runtime
        .home()
        .environment("NOTIFY_SOCKET", notify_socket.path.to_string_lossy())
        .environment("WATCHDOG_USEC", "2000000");
    home.put_pod(&manifest("one"));
    let agent = home.spawn();
    let (first, begun) = notify_socket.receive().await;
    assert_eq!(first, "WATCHDOG=1");
    assert_eq!(notify_socket.receive().await.0, "WATCHDOG=1");
    runtime.serve().await;
    let mut messages = Vec::new();
    while messages.len() < 4 {
        messages.push(notify_socket.receive().await.0);
    }
    assert!(messages.contains(&"READY=1".to_owned()), "{messages:?}");
    // Keep-alives after the first, one second apart or (on a busy machine) more.
    let beats = messages.iter().filter(|message| *message == "WATCHDOG=1").count();
    assert_eq!(beats, 3, "{messages:?}");
    assert!(begun.elapsed() >= Duration::from_millis(3500), "{:?}", begun.elapsed());
    agent.until_ready("one").await;
}

/// A watchdog interval that cannot be kept fails the start.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_watchdog_that_cannot_be_kept_is_fatal() {
    if skips("a_watchdog_that_cannot_be_kept_is_fatal") {
        return;
    }
    let runtime = ScriptedServer::new().await;
    let rows = [
        ("1000000", "configure watchdog timeout too small: 1s"), // AC-01-28
        ("500000", "configure watchdog timeout too small: 500ms"), // AC-05-33
        ("0", "error WATCHDOG_USEC must be a positive number"),
        ("soon", "error converting WATCHDOG_USEC"),
    ];
    for (microseconds, words) in rows {
        let mut agent = runtime.home().environment("WATCHDOG_USEC", microseconds).spawn();
        assert_eq!(agent.end().await.code(), Some(1));
        let log = agent.log();
        assert!(log.contains("failed to run Kubelet: create health checker: ") && log.contains(words), "{log}");
    }
    // Meant for another process: ignored.
    let home = runtime.home().environment("WATCHDOG_USEC", "1000000").environment("WATCHDOG_PID", "1");
    home.start().await;
}

/// A missing service manager does not fail the start.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_missing_service_manager_is_logged() {
    if skips("a_missing_service_manager_is_logged") {
        return;
    }
    let runtime = ScriptedServer::new().await;
    let home = runtime.home().environment("NOTIFY_SOCKET", "/nowhere/at/all").environment("WATCHDOG_USEC", "2000000");
    home.put_pod(&manifest("one"));
    let agent = home.start().await;
    agent.until_log("Failed to connect to the service manager at NOTIFY_SOCKET").await;
    agent.until_ready("one").await;
}
