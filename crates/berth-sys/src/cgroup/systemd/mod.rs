//! systemd cgroup driver: slices for pods and scopes for containers.
//!
//! ```text
//!  files of a cgroup ─► properties (pure) ─┐
//!  path of a cgroup  ─► names      (pure) ─┼─► Driver ─► Units ─► Bus ─► systemd
//!                                          └─► Hierarchy (the files themselves)
//! ```
//!
//! systemd creates and removes the directory and writes the values it supports; the driver then writes all values to
//! the files too, because systemd supports only some, and rounds a CPU quota. [`Units`] is the seam for tests. Every
//! call blocks: use the blocking pool. Implements spec 06a §7.

mod bus;
pub mod cgroup_watcher;
mod driver;
mod jobs;
pub mod names;
pub mod properties;

pub use bus::{Bus, is_running};
pub use driver::{Files, SystemdDriver};
pub use properties::{Property, PropertyValue, Release, rounded_quota};

/// Error text if systemd is not the init system.
pub const NOT_RUNNING: &str = "systemd not running on this host, cannot use systemd cgroups manager";

/// Failed operation on a systemd unit.
#[derive(Clone, PartialEq, Eq, Debug, thiserror::Error)]
pub enum UnitError {
    /// A unit of that name exists already.
    #[error("unit {0} already exists")]
    Exists(String),
    /// No unit of that name exists.
    #[error("unit {0} does not exist")]
    Missing(String),
    /// systemd refused the operation.
    #[error("{what} unit {unit}: {text}")]
    Refused {
        /// Operation: `start`, `stop`, `change`.
        what: &'static str,
        /// Unit name.
        unit: String,
        /// systemd's error text.
        text: String,
    },
    /// The job ended with a result other than `done`: `failed`, `timeout`, `canceled`, …
    #[error("{what} unit {unit}: the job ended with result {result:?}")]
    Job {
        /// Operation: `start`, `stop`.
        what: &'static str,
        /// Unit name.
        unit: String,
        /// systemd's job result.
        result: String,
    },
    /// systemd cannot be reached over D-Bus.
    #[error("D-Bus connection to systemd failed: {0}")]
    Bus(String),
    /// systemd did not reply before the timeout.
    #[error("systemd did not respond: {0}")]
    NoAnswer(String),
}

/// Transient units of the service manager. Every call blocks.
pub trait Units: Send + Sync + std::fmt::Debug {
    /// Release of systemd.
    ///
    /// # Errors
    /// If systemd cannot be reached.
    fn release(&self) -> Result<Release, UnitError>;

    /// Creates a transient unit and waits until it is started.
    ///
    /// # Errors
    /// [`UnitError::Exists`] if the unit exists; a refusal of systemd; a job that is not done in time.
    fn start(&self, unit: &str, properties: &[Property]) -> Result<(), UnitError>;

    /// Changes properties of a unit until the next boot.
    ///
    /// # Errors
    /// A refusal of systemd.
    fn set(&self, unit: &str, properties: &[Property]) -> Result<(), UnitError>;

    /// Stops a unit with all units below it, and waits for completion.
    ///
    /// # Errors
    /// [`UnitError::Missing`] if the unit does not exist; a job that is not done in time.
    fn stop(&self, unit: &str) -> Result<(), UnitError>;

    /// Resets the failed state of a unit, so that its name can be reused.
    ///
    /// # Errors
    /// [`UnitError::Missing`] if there is no failed state to reset.
    fn reset_failed(&self, unit: &str) -> Result<(), UnitError>;
}
