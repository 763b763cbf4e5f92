//! The signs of life of the agent's lasting tasks, by name (spec 05 §11).

use std::{
    sync::{Arc, Mutex, PoisonError},
    time::Duration,
};

use berth_ports::Pulse;

/// Of whom something is to be heard. Cheap to share.
#[derive(Clone, Debug, Default)]
pub struct Pulses(Arc<Mutex<Vec<(&'static str, Pulse)>>>);

impl Pulses {
    /// For a task of that name, which is a check's from now on.
    pub fn of(&self, name: &'static str) -> Pulse {
        let pulse = Pulse::default();
        self.0.lock().unwrap_or_else(PoisonError::into_inner).push((name, pulse.clone()));
        pulse
    }

    /// Everybody's name.
    pub fn names(&self) -> Vec<&'static str> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner).iter().map(|(name, _)| *name).collect()
    }

    /// How long nothing was heard of that task, where something should have been.
    pub fn silent_for(&self, name: &str) -> Option<Duration> {
        let all = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        all.iter().find(|(known, _)| *known == name)?.1.silent_for()
    }
}
