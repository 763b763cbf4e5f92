//! Allocation of a pod's devices: choice, calls of the plugin, and checkpoint (spec 06c §1.6).

use std::{collections::BTreeSet, sync::Arc};

use tokio::time::{Instant, timeout_at};
use tracing::{debug, info};

use super::{
    inventory::ResourceDevices,
    manager::DeviceManager,
    model::{DeviceAssignment, DeviceId, Devices},
    plugin_client::PluginClient,
    requests,
    reusable_devices::ReusableDevices,
    selection::{Selection, SelectionInput, select},
    state::ManagerState,
};
use berth_ports::AllocationRefusal;
use berth_types::{Pod, PodUid, api};

/// Resource of a container for which devices are chosen.
#[derive(Clone, Copy)]
struct DeviceRequest<'a> {
    pod: &'a PodUid,
    container: &'a str,
    resource: &'a str,
    required: usize,
    /// Devices that init containers of the pod left.
    reusable: &'a BTreeSet<DeviceId>,
    /// NUMA nodes from which the devices should come.
    affinity: Option<&'a BTreeSet<i64>>,
}

/// Devices reserved for a request until its allocation has ended.
struct DeviceReservation<'a> {
    manager: &'a DeviceManager,
    resource: String,
    ids: BTreeSet<DeviceId>,
}

impl Drop for DeviceReservation<'_> {
    fn drop(&mut self) {
        self.manager.change(|state| {
            if let Some(reserved) = state.reserved.get_mut(&self.resource) {
                reserved.retain(|id| !self.ids.contains(id));
                if reserved.is_empty() {
                    state.reserved.remove(&self.resource);
                }
            }
        });
    }
}

/// Devices that are reserved for a container until all calls of the pod's plugins have ended.
struct PlannedDevices<'a> {
    container: &'a str,
    client: PluginClient,
    reservation: DeviceReservation<'a>,
}

/// Next step of an allocation.
enum Step<'a> {
    Done,
    Prefer { client: PluginClient, available: BTreeSet<DeviceId>, must_include: BTreeSet<DeviceId>, size: usize },
    Allocate { client: PluginClient, reservation: DeviceReservation<'a> },
}

impl DeviceManager {
    /// Allocates all devices that a pod lacks and writes the checkpoint. A failure releases what this call has
    /// allocated. `number` is that of the pod's allocation: once the pod is released, nothing is assigned any more.
    ///
    /// # Errors
    /// The first failure.
    pub(super) async fn allocate(&self, pod: &Arc<Pod>, number: u64) -> Result<(), AllocationRefusal> {
        let before = self.state().assignments.get(pod.uid()).cloned();
        let outcome = match self.allocate_containers(pod, number).await {
            Ok(true) => self.save().await.map_err(AllocationRefusal::from),
            other => other.map(drop),
        };
        if outcome.is_err() {
            self.change(|state| match before {
                _ if !state.is_current(pod.uid(), number) => None,
                Some(before) => state.assignments.insert(pod.uid().clone(), before),
                None => state.assignments.remove(pod.uid()),
            });
        }
        outcome
    }

    async fn allocate_containers(&self, pod: &Arc<Pod>, number: u64) -> Result<bool, AllocationRefusal> {
        for (container, _) in requests::containers(pod) {
            for (resource, _) in requests::limits(pod, container) {
                self.wait_for_plugin(pod.uid(), &container.name, resource).await;
            }
        }
        let planned = {
            // One pod at a time chooses devices by NUMA nodes: another could take those of the merged hint. A plugin is
            // only asked for its preference meanwhile.
            let _permit = if self.alignment.merges_hints() { self.alignments.acquire().await.ok() } else { None };
            self.plan(pod, number).await?
        };
        for devices in &planned {
            self.allocate_planned(pod, number, devices).await?;
        }
        Ok(!planned.is_empty())
    }

    /// Allocates CPUs and memory to all containers, and chooses and reserves the devices that they lack.
    async fn plan<'a>(&'a self, pod: &'a Pod, number: u64) -> Result<Vec<PlannedDevices<'a>>, AllocationRefusal> {
        self.begin_alignment(pod)?;
        let mut left = ReusableDevices::default();
        let mut planned: Vec<PlannedDevices<'_>> = Vec::new();
        for (container, reuse) in requests::containers(pod) {
            let affinity = self.align(pod, number, container, &left)?;
            for (resource, required) in requests::limits(pod, container) {
                if !self.state().is_device_resource(resource) {
                    continue;
                }
                let request = DeviceRequest {
                    pod: pod.uid(),
                    container: &container.name,
                    resource,
                    required,
                    reusable: &left.of(resource),
                    affinity: affinity.as_ref(),
                };
                if let Some((client, reservation)) = self.reserve_devices(request).await? {
                    planned.push(PlannedDevices { container: &container.name, client, reservation });
                }
            }
            let mut devices = self.state().container_devices(pod.uid(), &container.name);
            for new in planned.iter().filter(|new| new.container == container.name) {
                devices.insert(new.reservation.resource.clone(), new.reservation.ids.clone());
            }
            left.add(devices, reuse);
        }
        Ok(planned)
    }

    /// Allocates CPUs and memory to a container that needs devices; returns the NUMA nodes for its devices.
    fn align(
        &self,
        pod: &Pod,
        number: u64,
        container: &api::Container,
        left: &ReusableDevices,
    ) -> Result<Option<BTreeSet<i64>>, AllocationRefusal> {
        let hints = || self.state().container_hints(pod, container, left, self.numa_nodes);
        let mask = self.alignment.allocate(pod, container, &hints)?;
        if !self.state().is_current(pod.uid(), number) {
            // Released while this was allocated.
            self.alignment.release(pod.uid());
            return Err(AllocationRefusal::from("the pod was released".to_owned()));
        }
        Ok(mask.map(|mask| mask.iter().map(i64::from).collect()))
    }

    /// Chooses and reserves devices of one resource for a container; `None` if it has them.
    async fn reserve_devices(
        &self,
        request: DeviceRequest<'_>,
    ) -> Result<Option<(PluginClient, DeviceReservation<'_>)>, String> {
        match self.step(request, None)? {
            Step::Done => Ok(None),
            Step::Allocate { client, reservation } => Ok(Some((client, reservation))),
            Step::Prefer { client, available, must_include, size } => {
                let preferred = client.preferred_allocation(&available, &must_include, size).await?;
                // Devices may have been taken during the call: the choice is made again, with the plugin's preference.
                match self.step(request, Some(&preferred))? {
                    Step::Allocate { client, reservation } => Ok(Some((client, reservation))),
                    Step::Done | Step::Prefer { .. } => Ok(None),
                }
            }
        }
    }

    /// Calls the plugin for reserved devices and assigns them.
    async fn allocate_planned(&self, pod: &Pod, number: u64, planned: &PlannedDevices<'_>) -> Result<(), String> {
        let PlannedDevices { container, client, reservation } = planned;
        let resource = reservation.resource.as_str();
        debug!(podUID = %pod.uid(), containerName = container, devices = ?reservation.ids, resource, "Allocating devices of device plugin");
        let began = Instant::now();
        let response = client.allocate(&reservation.ids).await;
        self.metrics.allocated(resource, began.elapsed());
        let response = response?;
        let is_assigned = self.change(|state| {
            let is_current = state.is_current(pod.uid(), number);
            if is_current {
                let none = Devices::new();
                let devices = state.inventory.get(resource).map_or(&none, |entry| &entry.devices);
                let assignment = DeviceAssignment::new(&reservation.ids, devices, response);
                state.assign(pod.uid(), container, resource, assignment);
            }
            is_current
        });
        if is_assigned { Ok(()) } else { Err("the pod was released".to_owned()) }
    }

    /// Chooses devices by the current state. `preferred` is the plugin's answer, once it was asked.
    fn step(&self, request: DeviceRequest<'_>, preferred: Option<&[DeviceId]>) -> Result<Step<'_>, String> {
        let DeviceRequest { resource, .. } = request;
        let mut state = self.state();
        let chosen = match choose(&state, request)? {
            Selection::Unchanged => return Ok(Step::Done),
            Selection::Take(ids) => ids,
            Selection::Preferred(selection) => match preferred {
                Some(preferred) => selection.resume(preferred).map_err(|error| error.to_string())?,
                None => {
                    let client = connected(&state, resource)?;
                    return Ok(Step::Prefer {
                        client,
                        available: selection.available.clone(),
                        must_include: selection.must_include.clone(),
                        size: selection.size,
                    });
                }
            },
        };
        let client = connected(&state, resource)?;
        state.reserved.entry(resource.to_owned()).or_default().extend(chosen.iter().cloned());
        let reservation = DeviceReservation { manager: self, resource: resource.to_owned(), ids: chosen };
        Ok(Step::Allocate { client, reservation })
    }

    /// Waits for a plugin that the checkpoint names and that has not reported its devices since the agent started.
    async fn wait_for_plugin(&self, pod: &PodUid, container: &str, resource: &str) {
        let is_missing =
            |manager: &Self| manager.state().inventory.get(resource).is_some_and(|entry| !entry.has_reported());
        if !is_missing(self) {
            return;
        }
        info!(podUID = %pod, containerName = container, resource, "Waiting for device plugin to register");
        let mut changes = self.changes();
        let registered = async { while is_missing(self) && changes.changed().await.is_ok() {} };
        // After the deadline the allocation fails with the reference's error.
        let _ = timeout_at(self.started_at + self.config.registration_wait, registered).await;
    }

    /// Calls `PreStartContainer` if the plugin requires it.
    ///
    /// # Errors
    /// The container has no devices of the resource, or the call failed.
    pub(super) async fn pre_start(&self, pod: &Pod, container: &str, resource: &str) -> Result<(), String> {
        let (client, ids) = {
            let state = self.state();
            let Some(assignment) = state.assignment(pod.uid(), container, resource) else {
                return Err(format!(
                    "no devices found allocated in local cache for pod {}, container {container}, resource {resource}",
                    pod.uid()
                ));
            };
            let is_required = state.inventory.get(resource).is_some_and(|entry| entry.options.pre_start_required);
            if !is_required {
                return Ok(());
            }
            (connected(&state, resource)?, assignment.ids())
        };
        client.pre_start(&ids).await
    }
}

fn choose(state: &ManagerState, request: DeviceRequest<'_>) -> Result<Selection, String> {
    let DeviceRequest { pod, container, resource, required, reusable, affinity, .. } = request;
    let entry = state.inventory.get(resource);
    let assigned = state.assignment(pod, container, resource).map(DeviceAssignment::ids);
    let devices: Option<&Devices> = entry.map(|entry: &ResourceDevices| &entry.devices);
    let input = SelectionInput {
        resource,
        pod,
        container,
        required,
        assigned: assigned.as_ref(),
        devices,
        in_use: &state.in_use(resource),
        reusable,
        affinity,
        plugin_prefers: entry.is_some_and(|entry| entry.options.preferred_allocation),
    };
    select(&input).map_err(|error| error.to_string())
}

/// The client of a connected plugin.
fn connected(state: &ManagerState, resource: &str) -> Result<PluginClient, String> {
    let plugin = state.plugins.get(resource).ok_or_else(|| format!("unknown Device Plugin {resource}"))?;
    match state.inventory.get(resource).is_some_and(ResourceDevices::is_connected) {
        true => Ok(plugin.client.clone()),
        false => Err(format!("endpoint {resource} has been stopped")),
    }
}
