//! Agent exit: signals, the lock file, and pods that keep running.

use std::{fs::OpenOptions, time::Duration};

use nix::sys::signal::Signal;
use tokio::{io::AsyncWriteExt, net::TcpStream};

use crate::agent::ScriptedServer;
use berth_testkit::process::{manifest, skips};

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_signal_ends_the_agent_and_leaves_the_pods() {
    if skips("a_signal_ends_the_agent_and_leaves_the_pods") {
        return;
    }
    // AC-01-30
    for signal in [Signal::SIGTERM, Signal::SIGINT] {
        let runtime = ScriptedServer::new().await;
        let home = runtime.home();
        home.put_pod(&manifest("one"));
        let mut agent = home.start().await;
        agent.until_ready("one").await;
        let running = runtime.cri.running("one-test-node", "main");
        runtime.cri.clear_calls();
        agent.signal(signal);
        assert_eq!(agent.end().await.code(), Some(0), "{}", agent.log_end());
        assert_eq!(runtime.cri.running("one-test-node", "main"), running);
        for op in ["stop_container", "remove_container", "stop_podsandbox", "remove_podsandbox"] {
            assert_eq!(runtime.cri.count(op), 0, "{op}");
        }
        assert!(!agent.log().contains("Timed out waiting for tasks to stop"), "{}", agent.log_end());
    }
}

/// A client that never completes its request delays the exit a little; a second signal skips the wait.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_second_signal_ends_it_at_once() {
    if skips("a_second_signal_ends_it_at_once") {
        return;
    }
    // AC-01-30
    let runtime = ScriptedServer::new().await;
    let home = runtime.home();
    home.put_pod(&manifest("one"));
    let mut agent = home.start().await;
    agent.until_ready("one").await;
    let mut slow = TcpStream::connect(("127.0.0.1", home.read_only_port())).await.expect("connected");
    slow.write_all(b"GET /pods HTTP/1.1\r\nHost: ").await.expect("sent");
    agent.get("/healthz").await.expect("the listener has taken what came before");
    agent.signal(Signal::SIGTERM);
    agent.until_log("Stopping; pods keep running").await;
    agent.signal(Signal::SIGTERM);
    assert_eq!(agent.end().await.code(), Some(1), "{}", agent.log_end());
    assert_eq!(runtime.cri.running("one-test-node", "main").len(), 1);
}

/// Also before any pod runs.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_signal_ends_an_agent_that_still_waits() {
    if skips("a_signal_ends_an_agent_that_still_waits") {
        return;
    }
    let runtime = ScriptedServer::unserved();
    let home = runtime.home();
    let mut agent = home.spawn();
    agent.until_log("Waiting for the container runtime's socket").await;
    agent.signal(Signal::SIGTERM);
    assert_eq!(agent.end().await.code(), Some(0), "{}", agent.log_end());

    let lock = home.path().join("lock");
    let runtime = ScriptedServer::new().await;
    let first = runtime.home().flag(format!("--lock-file={}", lock.display()));
    let _holder = first.start().await;
    let second = runtime.home().flag(format!("--lock-file={}", lock.display()));
    let mut waiting = second.spawn();
    waiting.until_log("Acquiring file lock").await;
    waiting.signal(Signal::SIGTERM);
    assert_eq!(waiting.end().await.code(), Some(0), "{}", waiting.log_end());
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn the_lock_is_handed_over() {
    if skips("the_lock_is_handed_over") {
        return;
    }
    // AC-01-40
    let runtime = ScriptedServer::new().await;
    let dir = tempfile::tempdir().expect("a folder");
    let lock = dir.path().join("lock");
    let flag = format!("--lock-file={}", lock.display());
    let home = runtime.home().flag(&flag).flag("--exit-on-lock-contention");
    home.put_pod(&manifest("one"));
    let mut agent = home.start().await;
    agent.until_ready("one").await;
    drop(OpenOptions::new().read(true).open(&lock).expect("the lock file is there"));
    assert_eq!(agent.end().await.code(), Some(0), "{}", agent.log_end());
    assert_eq!(runtime.cri.running("one-test-node", "main").len(), 1);

    // Without the flag the second agent waits until the first one exits.
    let first = runtime.home().flag(&flag);
    let second = runtime.home().flag(&flag);
    let holder = first.start().await;
    let mut waiting = second.spawn();
    waiting.until_log("Acquiring file lock").await;
    tokio::time::timeout(Duration::from_millis(300), waiting.healthy()).await.expect_err("the lock is taken");
    assert_eq!(holder.stop().await, Some(0));
    waiting.healthy().await;

    // Contention cannot be detected without a lock file.
    let mut agent = runtime.home().flag("--exit-on-lock-contention").spawn();
    assert_eq!(agent.end().await.code(), Some(1));
    assert!(agent.log().contains("cannot exit on lock file contention: no lock file specified"), "{}", agent.log());
}
