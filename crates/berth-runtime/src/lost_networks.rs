//! Marks sandboxes whose network is lost as not ready.
//!
//! A network is lost when somebody removes the pod's link or the file of its network namespace. Such a pod is
//! unreachable, so the sandbox becomes not ready and the kubelet recreates it. Implements spec 09b §14.

use std::sync::Arc;

use futures::future::join_all;
use tracing::{error, warn};

use super::{errors::ErrorKind, ports::NetworkPod, runtime::Runtime, store::objects::SandboxPhase};

/// The ready pods that have their own network namespace.
pub fn connected(runtime: &Runtime) -> Vec<NetworkPod> {
    let pods = runtime.pods().into_iter().map(|pod| pod.now());
    let connected = pods.filter(|sandbox| sandbox.is_ready() && sandbox.meta.netns.is_some());
    connected.map(|sandbox| sandbox.network()).collect()
}

/// Checks for lost networks after each network disturbance, until the runtime stops.
pub async fn watch(runtime: &Arc<Runtime>) {
    let mut news = runtime.ports.network.disturbances();
    loop {
        tokio::select! {
            () = runtime.shell.stop.cancelled() => return,
            changed = news.changed() => if changed.is_err() {
                return;
            },
        }
        let task_runtime = runtime.clone();
        // The check waits for the lock of a pod that is being stopped: a task of its own keeps that from delaying
        // others.
        runtime.shell.spawn(async move { check(&task_runtime).await });
    }
}

/// Finds the pods whose network is lost, and marks them as not ready.
pub async fn check(runtime: &Runtime) {
    let connected = connected(runtime);
    if connected.is_empty() {
        return;
    }
    match runtime.ports.network.lost(connected).await {
        Ok(lost) => mark_not_ready(runtime, &lost).await,
        Err(cause) => warn!(err = %cause, "Failed to check the networks of running sandboxes"),
    }
}

/// Marks these pods as not ready.
pub async fn mark_not_ready(runtime: &Runtime, lost: &[String]) {
    join_all(lost.iter().map(|id| mark_one_not_ready(runtime, id))).await;
}

async fn mark_one_not_ready(runtime: &Runtime, id: &str) {
    let Ok(pod) = runtime.pod(id) else { return };
    // A pod that is being stopped loses its network as intended.
    let _lane = pod.lane.lock().await;
    let update = pod.turn(|sandbox| {
        let was_ready = sandbox.is_ready();
        if was_ready {
            sandbox.phase = SandboxPhase::NotReady;
        }
        was_ready
    });
    match update.await {
        Ok(true) => error!(podSandboxID = id, "Sandbox network is gone, marking the sandbox not ready"),
        Ok(false) => {}
        // A sandbox that was removed in the meantime has no network to lose.
        Err(cause) if cause.kind == ErrorKind::NotFound => {}
        // The sandbox is not ready whether or not the record could be written.
        Err(cause) => {
            warn!(podSandboxID = id, err = %cause, "Failed to record that the sandbox network is gone")
        }
    }
}
