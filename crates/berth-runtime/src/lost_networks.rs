//! Pods whose network went: somebody removed their link, or the file that names their namespace. Nothing can be reached in
//! them any more, so they are not ready, and the kubelet makes others. Behaviour: spec 09b §14.

use std::sync::Arc;

use futures::future::join_all;
use tracing::{error, warn};

use super::{errors::ErrorKind, ports::NetworkPod, runtime::Runtime, store::objects::SandboxPhase};

/// The pods that have a network of their own.
pub fn connected(runtime: &Runtime) -> Vec<NetworkPod> {
    let pods = runtime.pods().into_iter().map(|pod| pod.now());
    let connected = pods.filter(|sandbox| sandbox.is_ready() && sandbox.meta.netns.is_some());
    connected.map(|sandbox| sandbox.network()).collect()
}

/// Looks whenever some network may be gone, until we end.
pub async fn keep(runtime: &Arc<Runtime>) {
    let mut news = runtime.ports.network.disturbances();
    loop {
        tokio::select! {
            () = runtime.shell.stop.cancelled() => return,
            changed = news.changed() => if changed.is_err() {
                return;
            },
        }
        let looking = runtime.clone();
        // A pod that is being stopped is waited for, and must not keep others from being told.
        runtime.shell.spawn(async move { look(&looking).await });
    }
}

/// Finds the pods whose network is gone.
pub async fn look(runtime: &Runtime) {
    let connected = connected(runtime);
    if connected.is_empty() {
        return;
    }
    match runtime.ports.network.lost(connected).await {
        Ok(lost) => tell(runtime, &lost).await,
        Err(cause) => warn!(err = %cause, "It cannot be told whether pods have lost their networks"),
    }
}

/// These pods have lost their network.
pub async fn tell(runtime: &Runtime, lost: &[String]) {
    join_all(lost.iter().map(|id| tell_one(runtime, id))).await;
}

async fn tell_one(runtime: &Runtime, id: &str) {
    let Ok(pod) = runtime.pod(id) else { return };
    // One that is being stopped loses its network as it should.
    let _lane = pod.lane.lock().await;
    let told = pod.turn(|sandbox| {
        let was_ready = sandbox.is_ready();
        if was_ready {
            sandbox.phase = SandboxPhase::NotReady;
        }
        was_ready
    });
    match told.await {
        Ok(true) => error!(podSandboxID = id, "The network of a sandbox is gone; it is not ready any more"),
        Ok(false) => {}
        // A sandbox that was removed meanwhile has no network to lose.
        Err(cause) if cause.kind == ErrorKind::NotFound => {}
        // Written or not, it holds.
        Err(cause) => {
            warn!(podSandboxID = id, err = %cause, "That the network of a sandbox is gone is not written down")
        }
    }
}
