//! Device manager: devices of device plugins, their allocation to containers, and its checkpoint.
//!
//! ```text
//!  plugin ──Register──► registration server ─┐
//!  plugins_registry ──► plugin watcher ──────┴► DeviceManager ◄─ admit ─ sync loop
//!  plugin ◄─ListAndWatch─ one task per plugin ─► inventory        ◄─ container devices ─ pod worker
//!  plugin ◄─Allocate──── one task per pod ─────► assignments ─► kubelet_internal_checkpoint
//! ```
//!
//! Implements spec 06c §1.

pub mod alignment;
mod allocation;
pub mod checkpoint;
pub mod container_options;
mod hints;
mod inventory;
mod manager;
mod model;
pub mod plugin_client;
mod plugin_task;
mod registration_server;
mod requests;
mod reusable_devices;
mod selection;
mod state;

pub use manager::{
    DeviceManager, DeviceManagerConfig, DeviceManagerDeps, DeviceOwner, ListedDevice, PodDeviceAllocator,
};
pub use model::{
    ContainerAssignments, Device, DeviceAssignment, DeviceId, Devices, NO_NODE, PluginOptions, PodAssignments,
};
pub use plugin_task::PluginRegistry;
pub use registration_server::{RegistrationRequest, Registrations, serve as serve_registration};
