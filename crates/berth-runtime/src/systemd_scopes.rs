//! Systemd cgroup driver: sandboxes and containers as systemd scopes. Implements spec 09a §9, 06a §7.
//!
//! ```text
//!  placeholder process ─► scope (systemd) ─► files, devices (runtime) ─► shim's process ─► placeholder exits
//! ```
//!
//! Cgroups that are not scopes, created earlier with the other driver, are handled as plain cgroups.

use std::{
    collections::HashMap,
    path::PathBuf,
    sync::{Mutex, MutexGuard, PoisonError},
};

use super::{
    config::NAME,
    errors::{RuntimeError, RuntimeResult},
    groups::{CgroupfsGroups, failed, parse},
    launch::devices::Rule,
    ports::{CgroupLimits, Groups},
    stats::{Depth, Reading},
};
use berth_shim::scope_placeholder::ScopePlaceholder;
use berth_sys::cgroup::{
    GroupPath,
    systemd::{SystemdDriver, names, rounded_quota},
};

/// Suffix of scope units.
const SCOPE: &str = ".scope";
/// The kernel's default CPU quota period, microseconds.
const PERIOD_US: u64 = 100_000;

/// The `Groups` port over systemd scopes.
#[derive(Debug)]
pub struct Scopes {
    kernel: CgroupfsGroups,
    driver: SystemdDriver,
    /// Shim binary, which also runs as placeholder.
    program: PathBuf,
    /// Placeholder processes of scopes in which nothing else runs yet.
    placeholders: Mutex<HashMap<String, ScopePlaceholder>>,
}

impl Scopes {
    /// Creates scopes through this driver, with placeholders of the shim binary.
    pub fn new(kernel: CgroupfsGroups, driver: SystemdDriver, program: PathBuf) -> Self {
        Self { kernel, driver, program, placeholders: Mutex::default() }
    }

    fn lock_placeholders(&self) -> MutexGuard<'_, HashMap<String, ScopePlaceholder>> {
        self.placeholders.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn make(&self, group: &str, path: &GroupPath, limits: &CgroupLimits) -> RuntimeResult<Vec<PathBuf>> {
        let files = self.kernel.rendered(limits)?;
        let placeholder = ScopePlaceholder::start(&self.program);
        let placeholder = placeholder.map_err(|e| RuntimeError::file("execute", &self.program, &e))?;
        let made = self.driver.make_scope(self.kernel.hierarchy(), path, placeholder.process(), &files);
        made.map_err(|error| failed(&error))?;
        self.lock_placeholders().insert(group.to_owned(), placeholder);
        self.kernel.create(group, limits)
    }
}

fn is_scope(group: &str) -> bool {
    group.ends_with(SCOPE)
}

/// Rounds the CPU quota as systemd does, so that systemd and the cgroup files agree.
fn rounded(limits: &CgroupLimits) -> CgroupLimits {
    let CgroupLimits::Container(Some(resources)) = limits else { return limits.clone() };
    let mut resources = resources.clone();
    let period = u64::try_from(resources.cpu_period).ok().filter(|period| *period > 0).unwrap_or(PERIOD_US);
    resources.cpu_quota = rounded_quota(resources.cpu_quota, period);
    CgroupLimits::Container(Some(resources))
}

impl Groups for Scopes {
    fn name(&self, parent: &str, id: &str) -> RuntimeResult<String> {
        let invalid = || RuntimeError::invalid(format!("invalid systemd slice {parent:?}"));
        let slice = names::slice_of(parent).ok_or_else(invalid)?;
        let slice = names::path_of(slice).map_err(|_| invalid())?;
        let scope = slice.child(&format!("{NAME}-{id}{SCOPE}"));
        scope.map(|scope| scope.to_string()).ok_or_else(|| RuntimeError::invalid(format!("invalid cgroup name {id:?}")))
    }

    fn find(&self, id: &str) -> RuntimeResult<Vec<String>> {
        let mut found = self.kernel.find(&format!("{NAME}-{id}{SCOPE}"))?;
        found.extend(self.kernel.find(id)?);
        Ok(found)
    }

    fn create(&self, group: &str, limits: &CgroupLimits) -> RuntimeResult<Vec<PathBuf>> {
        if !is_scope(group) {
            return self.kernel.create(group, limits);
        }
        let made = self.make(group, &parse(group)?, &rounded(limits));
        if made.is_err()
            && let Err(left) = self.remove(group)
        {
            tracing::warn!(cgroup = group, err = %left, "Failed to remove incomplete systemd scope");
        }
        made
    }

    fn settle(&self, group: &str) {
        let placeholder = self.lock_placeholders().remove(group);
        drop(placeholder);
    }

    fn allow_devices(&self, group: &str, rules: &[Rule]) -> RuntimeResult<()> {
        self.kernel.allow_devices(group, rules)
    }

    fn limit(&self, group: &str, limits: &CgroupLimits) -> RuntimeResult<()> {
        let (path, limits) = (parse(group)?, rounded(limits));
        if !is_scope(group) {
            return self.kernel.limit(group, &limits);
        }
        let before = self.kernel.current_values(&path, &limits)?;
        self.driver.set(&path, &self.kernel.rendered(&limits)?).map_err(|error| failed(&error))?;
        self.kernel.limit(group, &limits).inspect_err(|_| {
            // The files were restored; systemd must have the same values.
            if let Err(error) = self.driver.set(&path, &before) {
                tracing::warn!(cgroup = group, err = %error, "Failed to restore resource limits of the systemd scope");
            }
        })
    }

    fn remove(&self, group: &str) -> RuntimeResult<()> {
        self.settle(group);
        if !is_scope(group) {
            return self.kernel.remove(group);
        }
        self.driver.remove(self.kernel.hierarchy(), &parse(group)?).map_err(|error| failed(&error))
    }

    fn read(&self, group: &str, depth: Depth) -> Reading {
        self.kernel.read(group, depth)
    }

    fn processes(&self, group: &str) -> Vec<u32> {
        self.kernel.processes(group)
    }

    fn has_pressure_stats(&self) -> bool {
        self.kernel.has_pressure_stats()
    }
}
