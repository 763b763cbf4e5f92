//! Registration of one plugin socket, with retries; deregistration when the socket disappears.
//!
//! Spec 06c §2.

use std::{path::PathBuf, sync::Arc, time::Duration};

use tokio::{sync::watch, time::sleep};
use tracing::{info, warn};

use super::{registrant::Registrant, watcher::Handlers};
use berth_cri::plugin_socket::truncated;
use berth_metrics::{PluginMetrics, World};
use berth_ports::{PluginHandler, PluginInfo};
use berth_sys::backoff::Backoff;

/// Delays between registration attempts.
const BACKOFF: Backoff = Backoff::new(Duration::from_millis(500), Duration::from_secs(122));

/// A plugin socket; each socket created under its path has a number of its own.
pub struct Socket {
    /// Path of the socket.
    pub path: PathBuf,
    /// Handlers by plugin type.
    pub handlers: Handlers,
    /// Metrics of the plugin manager.
    pub metrics: PluginMetrics,
}

/// A registered plugin with its handler.
struct RegisteredPlugin {
    plugin: PluginInfo,
    handler: Arc<dyn PluginHandler>,
}

impl Socket {
    /// Follows the number of the current socket at this path until there is none. Also ends when the
    /// sender is dropped: plugins then stay registered, because they outlive the agent.
    pub async fn run(self, mut wanted: watch::Receiver<Option<u64>>) {
        let label = self.path.display().to_string();
        while wanted.borrow_and_update().is_some() {
            self.metrics.add(&label, World::Desired);
            let Some(registered) = self.until_registered(&mut wanted).await else {
                if wanted.has_changed().is_err() {
                    return;
                }
                continue;
            };
            self.metrics.add(&label, World::Actual);
            if wanted.changed().await.is_err() {
                return;
            }
            info!(path = %label, plugin = %registered.plugin.name, "Plugin socket was removed, deregistering plugin");
            registered.handler.deregister(&registered.plugin).await;
            self.metrics.remove(&label, World::Actual);
        }
        self.metrics.remove(&label, World::Desired);
    }

    /// Retries until the registration succeeds; `None` if the socket was replaced or removed.
    async fn until_registered(&self, wanted: &mut watch::Receiver<Option<u64>>) -> Option<RegisteredPlugin> {
        let mut backoff = BACKOFF;
        loop {
            let asked = tokio::select! {
                biased;
                _ = wanted.changed() => return None,
                asked = self.ask() => asked,
            };
            // Not cancelled from here: the state of an interrupted registration would be unknown.
            let done = match asked {
                Ok((mut registrant, plugin)) => self.register(&mut registrant, plugin).await,
                Err(error) => Err(error),
            };
            match done {
                Ok(registered) => return Some(registered),
                Err(error) => {
                    warn!(path = %self.path.display(), durationBeforeRetry = ?backoff.peek(), err = truncated(&error), "Failed to register plugin");
                }
            }
            tokio::select! {
                biased;
                _ = wanted.changed() => return None,
                () = sleep(backoff.next_delay()) => {}
            }
        }
    }

    async fn ask(&self) -> Result<(Registrant, PluginInfo), String> {
        let mut registrant = Registrant::dial(&self.path).await?;
        let plugin = registrant.info().await?;
        Ok((registrant, plugin))
    }

    async fn register(&self, registrant: &mut Registrant, plugin: PluginInfo) -> Result<RegisteredPlugin, String> {
        let taken = self.take(&plugin).await;
        let notification = registrant.notify(taken.as_ref().map(drop).map_err(String::as_str)).await;
        let handler = taken?;
        if let Err(error) = notification {
            handler.deregister(&plugin).await;
            let socket = self.path.display();
            return Err(format!(
                "RegisterPlugin error -- failed to send registration status at socket {socket}, err: {error}"
            ));
        }
        info!(path = %self.path.display(), plugin = %plugin.name, kind = %plugin.kind, "Plugin registered");
        Ok(RegisteredPlugin { plugin, handler })
    }

    async fn take(&self, plugin: &PluginInfo) -> Result<Arc<dyn PluginHandler>, String> {
        let Some(handler) = self.handlers.get(plugin.kind.as_str()) else {
            let (kind, socket) = (&plugin.kind, self.path.display());
            return Err(format!(
                "RegisterPlugin error -- no handler registered for plugin type: {kind} at socket {socket}"
            ));
        };
        let wrong =
            |what: &str, error: String| format!("RegisterPlugin error -- plugin {what} failed with err: {error}");
        handler.validate(plugin).map_err(|error| wrong("validation", error))?;
        handler.register(plugin).await.map_err(|error| wrong("registration", error))?;
        Ok(handler.clone())
    }
}
