//! Dynamic resource allocation (DRA): claims of pods, prepared by drivers before containers start.
//!
//! Implements spec 06c §3.

pub mod checkpoint;
mod claim_error;
mod claim_health;
mod claim_plan;
mod driver_client;
mod driver_table;
mod drivers;
pub mod health;
mod manager;
mod model;

pub use checkpoint::DraCheckpointError;
pub use claim_plan::ContainerClaim;
pub use driver_client::DriverClient;
pub use drivers::{DriverRegistration, Drivers, DriversDeps};
pub use health::{DeviceHealth, DeviceReport};
pub use manager::{DraManager, DraManagerDeps, DraStartError, PodClaimPreparer};
pub use model::{ClaimKey, ClaimState, Claims, PreparedDevice};
