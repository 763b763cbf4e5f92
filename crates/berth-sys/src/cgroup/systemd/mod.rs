//! Groups as units of systemd, where it is this machine's service manager: slices for pods, scopes for containers.
//!
//! ```text
//!  files of a group ─► properties (pure) ─┐
//!  path of a group  ─► names      (pure) ─┼─► Driver ─► Units ─► Bus ─► systemd
//!                                         └─► Hierarchy (the files themselves)
//! ```
//!
//! systemd makes and removes the directory and writes the values it knows; all values are then written to the files too,
//! because it knows only some, and keeps a processor quota in steps. [`Units`] is the seam. Every call blocks: use the
//! blocking pool. Behaviour: spec 06a §7.

mod bus;
mod driver;
mod jobs;
pub mod names;
pub mod properties;
pub mod watch;

pub use bus::{Bus, is_running};
pub use driver::{Driver, Files};
pub use properties::{Property, Release, Value, rounded_quota};

/// What is said where a machine is run by something else.
pub const NOT_RUNNING: &str = "systemd not running on this host, cannot use systemd cgroups manager";

/// What became of a question about a unit.
#[derive(Clone, PartialEq, Eq, Debug, thiserror::Error)]
pub enum UnitError {
    /// There is one of that name already.
    #[error("unit {0} exists already")]
    Exists(String),
    /// There is none of that name.
    #[error("unit {0} does not exist")]
    Missing(String),
    /// systemd refuses.
    #[error("{what} unit {unit}: {text}")]
    Refused {
        /// `start`, `stop`, `change`.
        what: &'static str,
        /// The unit.
        unit: String,
        /// What it says.
        text: String,
    },
    /// The job ended otherwise than by being done: `failed`, `timeout`, `canceled`, …
    #[error("{what} unit {unit}: the job ended with result {result:?}")]
    Job {
        /// `start`, `stop`.
        what: &'static str,
        /// The unit.
        unit: String,
        /// systemd's word for it.
        result: String,
    },
    /// It cannot be asked.
    #[error("systemd cannot be reached: {0}")]
    Bus(String),
    /// It does not answer in time.
    #[error("systemd does not answer: {0}")]
    NoAnswer(String),
}

/// The service manager's units. Every call blocks.
pub trait Units: Send + Sync + std::fmt::Debug {
    /// Which release it is.
    ///
    /// # Errors
    /// It cannot be asked.
    fn release(&self) -> Result<Release, UnitError>;

    /// Makes a transient unit and waits until it is started.
    ///
    /// # Errors
    /// [`UnitError::Exists`] where there is one; what systemd refuses; a job that is not done in time.
    fn start(&self, unit: &str, properties: &[Property]) -> Result<(), UnitError>;

    /// Changes properties of a unit until the next boot.
    ///
    /// # Errors
    /// What systemd refuses.
    fn set(&self, unit: &str, properties: &[Property]) -> Result<(), UnitError>;

    /// Stops a unit with all below it, and waits for that.
    ///
    /// # Errors
    /// [`UnitError::Missing`] where there is none; a job that is not done in time.
    fn stop(&self, unit: &str) -> Result<(), UnitError>;

    /// Forgets that a unit has failed, so that its name can be used again.
    ///
    /// # Errors
    /// [`UnitError::Missing`] where there is nothing to forget.
    fn reset_failed(&self, unit: &str) -> Result<(), UnitError>;
}
