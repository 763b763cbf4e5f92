//! Graceful node shutdown: inhibitor lock, drain socket, and pods of the engine.

use std::{sync::Arc, time::Duration};

use async_trait::async_trait;
use serde::Deserialize;
use tokio::{
    sync::{mpsc, watch},
    time::sleep,
};

use super::composition_root::{Base, BuildError};
use crate::{
    engine::{
        EngineHandle, PodReader, SyncLoopCommand, kill_and_wait,
        lifecycle::{StatusOverride, StopCause},
    },
    shutdown::{Drain, DrainDeps, DrainSocket, InhibitorLock, LogindOverride, PodTimeLimits, Pods, ShutdownPlan},
};
use berth_config::LoadedConfig;
use berth_metrics::ShutdownMetrics;
use berth_ports::{DiskStateFile, EventRecord, EventSink, NodeFacts};
use berth_status::StatusManager;
use berth_sys::logind::Logind;
use berth_types::{Pod, PodUid};

/// Status reason of a pod that was terminated by node shutdown.
const REASON: &str = "Terminated";
const MESSAGE: &str = "Pod was terminated in response to imminent node shutdown.";
const CONDITION: &str = "TerminationByKubelet";
/// Polling interval while final statuses are unsent.
const POLL_INTERVAL: Duration = Duration::from_millis(20);

/// Section `shutdown` of the agent's own settings (`/etc/berth/config.yaml`).
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields, default)]
struct ShutdownSettings {
    /// A signal that stops the agent also terminates its pods; default false, as in kubelet.
    on_termination: bool,
}

/// Dependencies of node shutdown.
pub(super) struct ShutdownParts<'a> {
    pub(super) engine: &'a EngineHandle,
    pub(super) status: Arc<StatusManager>,
    pub(super) node: watch::Sender<Arc<NodeFacts>>,
    /// Whether statuses are reported to an API server.
    pub(super) reports_statuses: bool,
}

/// Starts the shutdown inhibitor and the drain socket if graceful shutdown is configured; with `onTermination`, a
/// signal drains pods as well.
///
/// # Errors
/// The settings are invalid, or `onTermination` is set without a grace period.
pub(super) async fn open(loaded: &LoadedConfig, base: &Base, parts: ShutdownParts<'_>) -> Result<(), BuildError> {
    let section =
        berth_runtime::settings::section("shutdown").map_err(BuildError)?.unwrap_or_else(|| serde_json::json!({}));
    let own: ShutdownSettings =
        serde_json::from_value(section).map_err(|error| BuildError(format!("shutdown: {error}")))?;
    let metrics = ShutdownMetrics::new(&base.registry);
    let plan = ShutdownPlan::of(&loaded.config).filter(|_| loaded.gates.enabled("GracefulNodeShutdown"));
    let Some(plan) = plan else {
        if own.on_termination {
            return Err(BuildError(
                "shutdown.onTermination requires shutdownGracePeriod or shutdownGracePeriodByPodPriority".to_owned(),
            ));
        }
        base.tasks.spawn(LogindOverride::default().remove());
        return Ok(());
    };
    let pods = EnginePods {
        pods: parts.engine.pods.clone(),
        commands: parts.engine.commands.clone(),
        status: parts.status,
        events: base.events.clone(),
        node: parts.node,
        reports_statuses: parts.reports_statuses,
    };
    let deps = DrainDeps {
        pods: Arc::new(pods),
        events: base.events.clone(),
        clock: base.clock.clone(),
        file: Arc::new(DiskStateFile::shown(loaded.root_directory().join("graceful_node_shutdown_state"))),
        metrics,
    };
    let drain = Arc::new(Drain::open(plan, deps).await);
    let inhibitor = InhibitorLock::new(Box::new(Logind::of_this_machine()), drain.clone(), LogindOverride::default());
    base.tasks.spawn(inhibitor.run(base.stop.child_token()));
    let socket = DrainSocket::new(loaded.root_directory().join(DrainSocket::NAME), drain.clone());
    base.tasks.spawn(socket.run(base.stop.child_token()));
    if own.on_termination {
        let _ = base.drain.set(drain); // set only here
    }
    Ok(())
}

struct EnginePods {
    pods: PodReader,
    commands: mpsc::Sender<SyncLoopCommand>,
    status: Arc<StatusManager>,
    events: Arc<dyn EventSink>,
    node: watch::Sender<Arc<NodeFacts>>,
    reports_statuses: bool,
}

#[async_trait]
impl Pods for EnginePods {
    async fn known(&self) {
        // The sync loop processes pods only after it has observed the runtime.
        self.pods.sources_ready().await;
    }

    fn active(&self) -> Vec<Arc<Pod>> {
        self.pods.desired().iter().filter(|pod| self.pods.is_active(pod.uid())).cloned().collect()
    }

    async fn end(&self, pod: &Arc<Pod>, given: PodTimeLimits) -> Result<(), String> {
        let disruption = Some((CONDITION.to_owned(), MESSAGE.to_owned()));
        let status = StatusOverride {
            reason: REASON.to_owned(),
            message: MESSAGE.to_owned(),
            disruption,
            keeps_success: true,
            // It must not receive traffic while it terminates.
            is_unready: true,
            status_reserve: given.words,
        };
        let killed = kill_and_wait(&self.commands, pod, StopCause::NodeShutdown, Some(given.grace), Some(status)).await;
        if killed.is_err() && !self.commands.is_closed() {
            self.report_late(pod);
        }
        killed?;
        self.pods.finished(pod.uid()).await;
        Ok(())
    }

    fn report_late(&self, pod: &Pod) {
        // A pod without running containers only waits for its volumes.
        if self.pods.is_active(pod.uid()) {
            let text = "Container runtime did not kill the pod within specified grace period.";
            self.events.record(EventRecord::warning(pod.id(), "ExceededGracePeriod", text));
        }
    }

    async fn wait_until_published(&self, pods: &[PodUid]) {
        let is_unsent = |uid: &PodUid| self.status.cached(uid).is_some_and(|kept| kept.unsent_since.is_some());
        while self.reports_statuses && pods.iter().any(is_unsent) {
            sleep(POLL_INTERVAL).await;
        }
    }

    fn set_shutting_down(&self, is: bool) {
        self.node.send_if_modified(|facts| {
            let news = facts.shutting_down != is;
            if news {
                Arc::make_mut(facts).shutting_down = is;
            }
            news
        });
    }
}
