//! Registration of a plugin with the device manager, and the task that follows its devices (spec 06c §1.3).

use std::{path::Path, sync::Arc, time::Duration};

use async_trait::async_trait;
use futures::FutureExt;
use rustix::fs::{Mode, OFlags};
use tokio::time::{Instant, sleep};
use tokio_util::task::AbortOnDropHandle;
use tracing::{info, warn};

use super::{
    inventory::Registration,
    manager::DeviceManager,
    plugin_client::{DeviceStream, PluginClient},
    registration_server::{RegistrationRequest, Registrations, validate_resource_name},
    state::ConnectedPlugin,
};
use berth_ports::{PluginHandler, PluginInfo};

/// Version of the device plugin API.
const VERSION: &str = "v1beta1";
/// Minimum interval between two device lists of a plugin that are processed: a plugin that floods the agent with lists
/// is slowed down by flow control.
const LIST_INTERVAL: Duration = Duration::from_millis(20);
/// Maximum number of lists that are skipped in favor of a newer one at a time.
const COALESCED: usize = 1000;
/// Maximum number of resources, which bounds tables and metric labels.
const MAX_RESOURCES: usize = 512;

/// Registers plugins of the registration socket and of the plugin watcher.
#[derive(Clone)]
pub struct PluginRegistry(pub Arc<DeviceManager>);

impl PluginRegistry {
    async fn connect(&self, resource: &str, socket: &Path) -> Result<(), String> {
        let manager = &self.0;
        let is_full = {
            let state = manager.state();
            state.inventory.get(resource).is_none() && state.inventory.resources().count() >= MAX_RESOURCES
        };
        if is_full {
            return Err(format!("at most {MAX_RESOURCES} resources can be registered"));
        }
        manager.metrics.registered(resource);
        let registration = manager.change(|state| state.inventory.begin_registration());
        let client = PluginClient::dial(socket).await?;
        let options = client.options().await?;
        let is_newest = manager.change_inventory(|state| {
            let is_newest = state.inventory.register(resource, registration, options);
            if is_newest {
                let plugin = ConnectedPlugin { client: client.clone(), registration, watch: None };
                // Dropping the previous plugin ends its task.
                state.plugins.insert(resource.to_owned(), plugin);
            }
            is_newest
        });
        if !is_newest {
            return Err(format!("another device plugin has registered for {resource} meanwhile"));
        }
        info!(resource, socket = %socket.display(), "Device plugin registered");
        let follower = manager.spawn(follow(manager.clone(), resource.to_owned(), client, registration));
        let follower = AbortOnDropHandle::new(follower);
        manager.change(|state| {
            let plugin = state.plugins.get_mut(resource).filter(|plugin| plugin.registration == registration);
            if let Some(plugin) = plugin {
                plugin.watch = Some(follower);
            }
        });
        Ok(())
    }
}

/// Reads device lists until the plugin ends or is replaced.
async fn follow(manager: Arc<DeviceManager>, resource: String, client: PluginClient, registration: Registration) {
    match client.list_and_watch().await {
        Ok(mut lists) => read_lists(&manager, &resource, registration, &mut lists).await,
        Err(err) => warn!(resource, err, "ListAndWatch of device plugin failed"),
    }
    disconnect(&manager, &resource, registration);
}

async fn read_lists(manager: &DeviceManager, resource: &str, registration: Registration, lists: &mut DeviceStream) {
    loop {
        let mut devices = match lists.next().await {
            Ok(Some(devices)) => devices,
            Ok(None) => return warn!(resource, "ListAndWatch of device plugin ended"),
            Err(err) => return warn!(resource, err, "ListAndWatch of device plugin failed"),
        };
        // Of lists that have arrived already only the newest counts. An end is seen again by the next read.
        for _ in 0..COALESCED {
            match lists.next().now_or_never() {
                Some(Ok(Some(newer))) => devices = newer,
                Some(_) | None => break,
            }
        }
        let change = manager.change_inventory(|state| {
            let assigned = state.assigned(resource);
            state.inventory.report(resource, registration, devices, &assigned)
        });
        let Some(change) = change else { return };
        if change.is_changed {
            manager.save_later();
            manager.report_health_change(resource, &change.health);
        }
        sleep(LIST_INTERVAL).await;
    }
}

fn disconnect(manager: &DeviceManager, resource: &str, registration: Registration) {
    let changed = manager.change_inventory(|state| state.inventory.disconnect(resource, registration, Instant::now()));
    if let Some(changed) = changed {
        info!(resource, "Device plugin disconnected, marking its devices as unhealthy");
        manager.save_later();
        manager.report_health_change(resource, &changed);
    }
}

#[async_trait]
impl Registrations for PluginRegistry {
    async fn register(&self, request: RegistrationRequest) -> Result<(), String> {
        self.connect(&request.resource, &request.endpoint).await
    }
}

#[async_trait]
impl PluginHandler for PluginRegistry {
    fn validate(&self, plugin: &PluginInfo) -> Result<(), String> {
        if !plugin.versions.iter().any(|version| version == VERSION) {
            let versions = plugin.versions.join(" ");
            return Err(format!("manager version, {VERSION}, is not among plugin supported versions [{versions}]"));
        }
        validate_resource_name(&plugin.name).map_err(|error| format!("invalid name of device plugin socket: {error}"))
    }

    async fn register(&self, plugin: &PluginInfo) -> Result<(), String> {
        mark_deprecated(&self.0.config.directory);
        self.connect(&plugin.name, &plugin.endpoint).await
    }

    async fn deregister(&self, plugin: &PluginInfo) {
        let registration = self.0.state().plugins.get(&plugin.name).map(|known| known.registration);
        if let Some(registration) = registration {
            disconnect(&self.0, &plugin.name, registration);
        }
    }
}

/// Creates the empty file by which the reference shows that device plugins use the plugin watcher.
fn mark_deprecated(directory: &Path) {
    let flags = OFlags::CREATE | OFlags::WRONLY | OFlags::NOFOLLOW | OFlags::CLOEXEC | OFlags::NONBLOCK;
    let created = rustix::fs::open(directory.join("DEPRECATION"), flags, Mode::from_raw_mode(0o644));
    if let Err(err) = created {
        warn!(directory = %directory.display(), %err, "Failed to create DEPRECATION file");
    }
}
