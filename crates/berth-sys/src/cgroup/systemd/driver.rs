//! Groups made, changed and removed as units, and their files with them. Behaviour: spec 06a §7.

use std::sync::Arc;

use super::{UnitError, Units, names, properties};
use crate::cgroup::{CgroupError, CgroupResult, GroupPath, Hierarchy};

/// Files of a group and what stands in them, in order.
pub type Files = [(String, String)];

/// Groups by way of systemd. Every call blocks.
#[derive(Clone, Debug)]
pub struct Driver {
    units: Arc<dyn Units>,
}

impl Driver {
    /// By way of these units.
    pub fn new(units: Arc<dyn Units>) -> Self {
        Self { units }
    }

    /// Starts the slice whose group this is, and sees to it that all controllers are on. Values are told to systemd, and not
    /// written. One that runs already is left as it is. Returns the groups above that were not there.
    ///
    /// # Errors
    /// It is no slice, systemd refuses, or a controller cannot be turned on.
    pub fn make_slice(&self, on: &Hierarchy, group: &GroupPath, files: &Files) -> CgroupResult<Vec<GroupPath>> {
        let slice = slice(group)?;
        let above = missing_above(on, group)?;
        let mut all = properties::of_slice(slice, &names::parent_of(slice), on.version() == 2);
        all.extend(self.of_files(files)?);
        match self.units.start(slice, &all) {
            Err(UnitError::Exists(_)) => {}
            other => other.map_err(told)?,
        }
        on.create(group)?;
        Ok(above)
    }

    /// Starts the scope whose group this is, with a process in it, and sees to it that all controllers are on. The process
    /// must be there; the scope ends with its last one.
    ///
    /// # Errors
    /// It is no scope in a slice, systemd refuses twice, or a controller cannot be turned on.
    pub fn make_scope(&self, on: &Hierarchy, group: &GroupPath, process: u32, files: &Files) -> CgroupResult<()> {
        let scope = names::unit_of(group).ok_or_else(|| nobodys(group))?;
        let parent = group.parent().filter(|parent| !parent.is_root());
        let parent = parent.as_ref().map_or(Ok(names::ROOT), slice)?;
        let mut all = properties::of_scope(scope, parent, process, on.version() == 2);
        all.extend(self.of_files(files)?);
        if let Err(first) = self.units.start(scope, &all) {
            // One of that name that has failed stands in the way until it is forgotten.
            let _ = self.units.reset_failed(scope);
            self.units.start(scope, &all).map_err(|_| told(first))?;
        }
        on.create(group).map(drop)
    }

    /// Tells systemd what is about to be written to a group's files. Nothing where the group is no unit's.
    ///
    /// # Errors
    /// systemd refuses.
    pub fn set(&self, group: &GroupPath, files: &Files) -> CgroupResult<()> {
        let Some(unit) = names::unit_of(group) else { return Ok(()) };
        self.units.set(unit, &self.of_files(files)?).map_err(told)
    }

    /// Kills what is left in the group, stops its unit and removes it. Nothing there is success.
    ///
    /// # Errors
    /// Processes survive, systemd does not stop it, or a directory stays busy.
    pub fn remove(&self, on: &Hierarchy, group: &GroupPath) -> CgroupResult<()> {
        let unit = names::unit_of(group).filter(|_| on.directories(group).iter().any(|directory| directory.exists()));
        if let Some(unit) = unit {
            // A scope whose processes are asked to end first takes as long as the slowest.
            on.kill(group)?;
            match self.units.stop(unit) {
                Err(UnitError::Missing(_)) => {}
                other => other.map_err(told)?,
            }
            // Gone, or never failed.
            let _ = self.units.reset_failed(unit);
        }
        on.remove(group)
    }

    fn of_files(&self, files: &Files) -> CgroupResult<Vec<properties::Property>> {
        let release = self.units.release().map_err(told)?;
        Ok(properties::of_files(files.iter().map(|(file, value)| (file.as_str(), value.as_str())), release))
    }
}

fn told(error: UnitError) -> CgroupError {
    CgroupError::Other(error.to_string())
}

fn nobodys(group: &GroupPath) -> CgroupError {
    CgroupError::Other(format!("{group} is not the group of a unit"))
}

/// The slice whose group this is; it lies where its name says, or it is another's.
fn slice(group: &GroupPath) -> CgroupResult<&str> {
    let unit = names::unit_of(group).ok_or_else(|| nobodys(group))?;
    let path = names::path_of(unit).map_err(|error| CgroupError::Other(error.to_string()))?;
    if path == *group { Ok(unit) } else { Err(nobodys(group)) }
}

/// Groups above that are not there: systemd makes them too.
fn missing_above(on: &Hierarchy, group: &GroupPath) -> CgroupResult<Vec<GroupPath>> {
    let mut missing = Vec::new();
    let mut next = group.parent();
    while let Some(above) = next.filter(|above| !above.is_root()) {
        if on.presence(&above)? == crate::cgroup::Presence::Absent {
            missing.insert(0, above.clone());
        }
        next = above.parent();
    }
    Ok(missing)
}
