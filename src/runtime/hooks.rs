//! Container lifecycle hooks: execution and error messages (spec 03b §8).
//!
//! The caller sets the timeout: preStop by the grace period, postStart by the pod's termination.

use std::{net::IpAddr, time::Duration};

use super::{http_hook::HttpHook, manager::RuntimeManager};
use berth_cri::CriError;
use berth_ports::EventRecord;
use berth_types::{ContainerId, PodRef, api};

/// A hook to run.
#[derive(Clone, Copy)]
pub(super) struct LifecycleHook<'a> {
    pub(super) handler: &'a api::LifecycleHandler,
    pub(super) pod: &'a PodRef,
    pub(super) container: &'a str,
    pub(super) id: &'a ContainerId,
    /// Addresses of the pod.
    pub(super) ips: &'a [IpAddr],
    /// Ports of the container, to resolve named ports.
    pub(super) ports: &'a [api::ContainerPort],
    /// Field path of the container in events.
    pub(super) field_path: Option<&'a str>,
}

/// Maximum retained bytes of each output stream of a hook, as for probes.
const MOST_OUTPUT: usize = 10 << 10;

impl RuntimeManager {
    /// Runs a hook to completion.
    ///
    /// # Errors
    /// The message for the container's status or the log.
    pub(super) async fn run_hook(&self, hook: &LifecycleHook<'_>) -> Result<(), String> {
        let handler = hook.handler;
        let place = format!("for Container \"{}\" in Pod \"{}\" failed", hook.container, hook.pod);
        if let Some(exec) = &handler.exec {
            let command = exec.command.as_deref().unwrap_or_default();
            let run = self.deps.cri.exec_sync(hook.id.as_str(), command, Duration::ZERO, MOST_OUTPUT).await;
            return run.map(drop).map_err(|err| {
                let output = match &err {
                    CriError::Exit { stdout, stderr, .. } => format!("{stdout}{stderr}"),
                    _ => String::new(),
                };
                let command = command.join(" ");
                format!("Exec lifecycle hook ([{command}]) {place} - error: {err}, message: {output:?}")
            });
        }
        if let Some(http) = &handler.http_get {
            let path = http.path.as_deref().unwrap_or_default();
            return self
                .run_http(hook, http)
                .await
                .map_err(|err| format!("HTTP lifecycle hook ({path}) {place} - error: {err}"));
        }
        if let Some(sleep) = &handler.sleep {
            tokio::time::sleep(Duration::from_secs(sleep.seconds.max(0).unsigned_abs())).await;
            return Ok(());
        }
        Err("Cannot run handler: invalid handler: neither exec, httpGet nor sleep is set".to_owned())
    }

    async fn run_http(&self, hook: &LifecycleHook<'_>, action: &api::HTTPGetAction) -> Result<(), String> {
        let http = HttpHook::new(action, hook.ips, hook.ports)?;
        let fell_back = http.run().await?;
        if fell_back {
            self.deps.metrics.http_fallbacks.inc();
            let text = format!(
                "request to HTTPS lifecycle hook {} got HTTP response, retry with HTTP succeeded",
                http.authority()
            );
            let event = EventRecord::warning(hook.pod, "LifecycleHTTPFallback", text);
            self.deps.events.record(match hook.field_path {
                Some(path) => event.at(path),
                None => event,
            });
        }
        Ok(())
    }
}
