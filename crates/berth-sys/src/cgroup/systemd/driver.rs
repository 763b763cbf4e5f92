//! systemd cgroup driver: creates, updates, and removes cgroups as systemd units.
//!
//! Implements spec 06a §7.

use std::sync::Arc;

use super::{UnitError, Units, names, properties};
use crate::cgroup::{CgroupError, CgroupResult, GroupPath, Hierarchy};

/// Files of a cgroup and their values, in order.
pub type Files = [(String, String)];

/// Creates and removes cgroups through systemd. Every call blocks.
#[derive(Clone, Debug)]
pub struct SystemdDriver {
    units: Arc<dyn Units>,
}

impl SystemdDriver {
    /// A driver that uses this client.
    pub fn new(units: Arc<dyn Units>) -> Self {
        Self { units }
    }

    /// Starts the slice of this cgroup, and enables all controllers. Values are passed to systemd, not written to
    /// files. A running slice is left unchanged. Returns the ancestors that did not exist.
    ///
    /// # Errors
    /// If the cgroup is not a slice's, systemd refuses, or a controller cannot be enabled.
    pub fn make_slice(&self, on: &Hierarchy, group: &GroupPath, files: &Files) -> CgroupResult<Vec<GroupPath>> {
        let slice = slice(group)?;
        let above = missing_above(on, group)?;
        let mut all = properties::of_slice(slice, &names::parent_of(slice), on.version() == 2);
        all.extend(self.of_files(files)?);
        match self.units.start(slice, &all) {
            Err(UnitError::Exists(_)) => {}
            other => other.map_err(cgroup_error)?,
        }
        on.create(group)?;
        Ok(above)
    }

    /// Starts the scope of this cgroup with a process in it, and enables all controllers. The process must exist; the
    /// scope ends with its last process.
    ///
    /// # Errors
    /// If the cgroup is not a scope's in a slice, systemd refuses twice, or a controller cannot be enabled.
    pub fn make_scope(&self, on: &Hierarchy, group: &GroupPath, process: u32, files: &Files) -> CgroupResult<()> {
        let scope = names::unit_of(group).ok_or_else(|| no_unit_error(group))?;
        let parent = group.parent().filter(|parent| !parent.is_root());
        let parent = parent.as_ref().map_or(Ok(names::ROOT), slice)?;
        let mut all = properties::of_scope(scope, parent, process, on.version() == 2);
        all.extend(self.of_files(files)?);
        if let Err(first) = self.units.start(scope, &all) {
            // A failed unit of that name blocks it until it is reset.
            let _ = self.units.reset_failed(scope);
            self.units.start(scope, &all).map_err(|_| cgroup_error(first))?;
        }
        on.create(group).map(drop)
    }

    /// Passes values about to be written to a cgroup's files to systemd. Does nothing if the cgroup has no unit.
    ///
    /// # Errors
    /// If systemd refuses.
    pub fn set(&self, group: &GroupPath, files: &Files) -> CgroupResult<()> {
        let Some(unit) = names::unit_of(group) else { return Ok(()) };
        self.units.set(unit, &self.of_files(files)?).map_err(cgroup_error)
    }

    /// Kills all processes of the cgroup, stops its unit, and removes it. A missing cgroup is success.
    ///
    /// # Errors
    /// If processes survive, systemd does not stop the unit, or a directory stays busy.
    pub fn remove(&self, on: &Hierarchy, group: &GroupPath) -> CgroupResult<()> {
        let unit = names::unit_of(group).filter(|_| on.directories(group).iter().any(|directory| directory.exists()));
        if let Some(unit) = unit {
            // Otherwise systemd sends SIGTERM first, and stopping a scope takes as long as its slowest process.
            on.kill(group)?;
            match self.units.stop(unit) {
                Err(UnitError::Missing(_)) => {}
                other => other.map_err(cgroup_error)?,
            }
            // The unit is gone, or never failed.
            let _ = self.units.reset_failed(unit);
        }
        on.remove(group)
    }

    fn of_files(&self, files: &Files) -> CgroupResult<Vec<properties::Property>> {
        let release = self.units.release().map_err(cgroup_error)?;
        Ok(properties::of_files(files.iter().map(|(file, value)| (file.as_str(), value.as_str())), release))
    }
}

fn cgroup_error(error: UnitError) -> CgroupError {
    CgroupError::Other(error.to_string())
}

fn no_unit_error(group: &GroupPath) -> CgroupError {
    CgroupError::Other(format!("{group} is not the cgroup of a systemd unit"))
}

/// Slice of this cgroup; an error unless the cgroup's path is the one that the slice's name implies.
fn slice(group: &GroupPath) -> CgroupResult<&str> {
    let unit = names::unit_of(group).ok_or_else(|| no_unit_error(group))?;
    let path = names::path_of(unit).map_err(|error| CgroupError::Other(error.to_string()))?;
    if path == *group { Ok(unit) } else { Err(no_unit_error(group)) }
}

/// Missing ancestors: systemd creates them too.
fn missing_above(on: &Hierarchy, group: &GroupPath) -> CgroupResult<Vec<GroupPath>> {
    let mut missing = Vec::new();
    let mut next = group.parent();
    while let Some(above) = next.filter(|above| !above.is_root()) {
        if on.presence(&above)? == crate::cgroup::CgroupPresence::Absent {
            missing.insert(0, above.clone());
        }
        next = above.parent();
    }
    Ok(missing)
}
