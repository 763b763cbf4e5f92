//! Validation of the configuration: every rule of the reference. Pure. Spec 01 §4, §4.1.
//!
//! Reports all failures at once. The rules are in the reference's order, which is the order in the message.

mod limits;
mod logging;
mod memory;
mod policies;
pub mod startup;

use super::{fields::KubeletConfiguration, gates::FeatureGates, host::HostFacts};

/// Failures collected so far.
#[derive(Default)]
pub(super) struct Failures(Vec<String>);

impl Failures {
    /// Adds a failure with the common prefix.
    fn invalid(&mut self, text: impl std::fmt::Display) {
        self.0.push(format!("invalid configuration: {text}"));
    }

    /// Adds a failure without the common prefix.
    fn bare(&mut self, text: impl Into<String>) {
        self.0.push(text.into());
    }

    fn not_negative(&mut self, field: &str, flag: &str, value: impl Into<i64>) {
        let value = value.into();
        if value < 0 {
            self.invalid(format!("{field} (--{flag}) {value} must not be a negative number"));
        }
    }

    /// Checks that the value is within `bounds`, inclusive.
    fn within(&mut self, field: &str, flag: &str, value: i32, bounds: (i32, i32)) {
        let (low, high) = bounds;
        if !(low..=high).contains(&value) {
            self.invalid(format!("{field} (--{flag}) {value} must be between {low} and {high}, inclusive"));
        }
    }
}

/// Input of the rules.
#[derive(Clone, Copy)]
pub(super) struct ValidationInput<'a> {
    config: &'a KubeletConfiguration,
    gates: &'a FeatureGates,
    host: &'a HostFacts,
}

/// Validates a configuration. `gates` are those of the process; the configuration's own gates are applied on top.
///
/// # Errors
/// All distinct failures as one text: a single one as it is, several as `[e1, e2]`.
pub fn validate(config: &KubeletConfiguration, gates: &FeatureGates, host: &HostFacts) -> Result<(), String> {
    let mut gates = gates.clone();
    gates.set_from_map(&config.feature_gates).map_err(|e| e.to_string())?;
    let mut failures = Failures(gates.unmet_dependencies());
    let subject = ValidationInput { config, gates: &gates, host };
    limits::check(subject, &mut failures);
    policies::check(subject, &mut failures);
    memory::check(subject, &mut failures);
    logging::check(subject, &mut failures);
    limits::check_late(subject, &mut failures);
    aggregate(failures.0)
}

/// Returns the errors of the logging settings, which are validated before the others; empty if there are none.
pub fn log_settings(config: &KubeletConfiguration, gates: &FeatureGates) -> String {
    aggregate(logging::logging(&config.logging, gates)).err().unwrap_or_default()
}

/// Joins errors like the reference.
fn aggregate(errors: Vec<String>) -> Result<(), String> {
    let mut distinct: Vec<String> = Vec::new();
    for error in errors {
        if !distinct.contains(&error) {
            distinct.push(error);
        }
    }
    match &mut distinct[..] {
        [] => Ok(()),
        [one] => Err(std::mem::take(one)),
        several => Err(format!("[{}]", several.join(", "))),
    }
}

#[cfg(test)]
mod tests;
