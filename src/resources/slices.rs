//! systemd slices of the agent, and restoring of values that others change in them.
//!
//! systemd resets values on a reload or on request. Written values are kept, so that they can be
//! restored on a notification that a file was changed. Blocks: the manager calls it on the blocking
//! pool. Implements spec 06a §7.

use std::{
    collections::HashMap,
    fmt,
    sync::{Mutex, MutexGuard, PoisonError},
};

use tracing::{info, warn};

use super::{tree::controller, values::Write};
use berth_sys::cgroup::{
    CgroupError, CgroupResult, GroupPath, Hierarchy,
    systemd::{
        SystemdDriver,
        cgroup_watcher::{CgroupWatcher, WrittenCgroups},
    },
};

/// Slices, with the values of those that belong to the agent.
pub(super) struct Slices {
    driver: SystemdDriver,
    watch: Option<CgroupWatcher>,
    /// Content of the files after they were written. Locked while they are written, so that a restore
    /// never writes values from before a change.
    kept: Mutex<HashMap<GroupPath, Vec<Write>>>,
}

impl fmt::Debug for Slices {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Slices").field("driver", &self.driver).finish_non_exhaustive()
    }
}

impl Slices {
    /// Creates the set for this driver; without a watch nothing is restored.
    pub(super) fn new(driver: SystemdDriver, watch: Option<CgroupWatcher>) -> Self {
        Self { driver, watch, kept: Mutex::default() }
    }

    /// Starts a slice; returns the parent cgroups that had to be created.
    pub(super) fn make(&self, on: &Hierarchy, group: &GroupPath, writes: &[Write]) -> CgroupResult<Vec<GroupPath>> {
        self.driver.make_slice(on, group, &files(writes))
    }

    /// Adopts an existing slice, the first time this agent sees it.
    pub(super) fn adopt(&self, on: &Hierarchy, group: &GroupPath, writes: &[Write]) {
        if self.kept().contains_key(group) {
            return;
        }
        // It may be a plain directory, which systemd would not keep.
        if let Err(error) = self.driver.make_slice(on, group, &[]) {
            warn!(cgroupName = %group, err = %error, "Failed to start existing slice in systemd");
            return;
        }
        self.keep(on, group, writes);
    }

    /// Records the current content of these files.
    pub(super) fn keep(&self, on: &Hierarchy, group: &GroupPath, writes: &[Write]) {
        keep(&mut self.kept(), on, group, writes);
        let Some(watch) = &self.watch else { return };
        for directory in on.directories(group) {
            if let Err(error) = watch.add(group, &directory) {
                warn!(cgroupName = %group, err = %error, "Failed to watch slice");
            }
        }
    }

    /// Changes values: first through systemd, then in the files.
    pub(super) fn change(
        &self,
        on: &Hierarchy,
        group: &GroupPath,
        writes: &[Write],
        write: impl FnOnce() -> Vec<CgroupError>,
    ) -> Vec<CgroupError> {
        let mut kept = self.kept();
        let mut failures: Vec<_> = self.driver.set(group, &files(writes)).err().into_iter().collect();
        failures.extend(write());
        if kept.contains_key(group) {
            keep(&mut kept, on, group, writes);
        }
        failures
    }

    /// Restores values that differ from those recorded.
    pub(super) fn repair(
        &self,
        on: &Hierarchy,
        written: &WrittenCgroups,
        write: impl Fn(&GroupPath, &[Write]) -> Vec<CgroupError>,
    ) {
        let groups: Vec<GroupPath> = match written {
            WrittenCgroups::Groups(groups) => groups.iter().cloned().collect(),
            WrittenCgroups::Any => self.kept().keys().cloned().collect(),
        };
        for group in groups {
            let mut kept = self.kept();
            let Some(wanted) = kept.get(&group).cloned() else { continue };
            let is_changed = |wanted: &&Write| read(on, &group, wanted).is_some_and(|now| now.value != wanted.value);
            let changed: Vec<&str> = wanted.iter().filter(is_changed).map(|w| w.file.as_str()).collect();
            if changed.is_empty() {
                continue;
            }
            info!(cgroupName = %group, files = ?changed, "Restoring slice values changed by another process");
            let driver_error = self.driver.set(&group, &files(&wanted)).err();
            for error in driver_error.into_iter().chain(write(&group, &wanted)) {
                warn!(cgroupName = %group, err = %error, "Failed to restore slice value");
            }
            // Record the actual content, or the same difference would be repaired forever.
            keep(&mut kept, on, &group, &wanted);
        }
    }

    /// Stops a slice with everything in it, and removes its record.
    pub(super) fn remove(&self, on: &Hierarchy, group: &GroupPath) -> CgroupResult<()> {
        self.kept().remove(group);
        self.driver.remove(on, group)
    }

    fn kept(&self) -> MutexGuard<'_, HashMap<GroupPath, Vec<Write>>> {
        self.kept.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

fn keep(kept: &mut HashMap<GroupPath, Vec<Write>>, on: &Hierarchy, group: &GroupPath, writes: &[Write]) {
    let all = kept.entry(group.clone()).or_default();
    for now in writes.iter().filter_map(|write| read(on, group, write)) {
        match all.iter_mut().find(|earlier| earlier.file == now.file) {
            Some(earlier) => *earlier = now,
            None => all.push(now),
        }
    }
}

/// A file with its current content.
fn read(on: &Hierarchy, group: &GroupPath, write: &Write) -> Option<Write> {
    let value = on.read(group, controller(write.owner), &write.file).ok()?;
    Some(Write { value, ..write.clone() })
}

fn files(writes: &[Write]) -> Vec<(String, String)> {
    writes.iter().map(|write| (write.file.clone(), write.value.clone())).collect()
}
