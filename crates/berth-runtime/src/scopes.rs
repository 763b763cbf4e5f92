//! Control groups of sandboxes and containers as systemd's scopes. Behaviour: spec 09a §9, 06a §7.
//!
//! ```text
//!  keeper ─► scope (systemd) ─► files, devices (ourselves) ─► process of the shim's ─► the keeper goes
//! ```
//!
//! Groups that are no scopes, of a life before with the other driver, are handled as they were made.

use std::{
    collections::HashMap,
    path::PathBuf,
    sync::{Mutex, MutexGuard, PoisonError},
};

use super::{
    config::NAME,
    errors::{RuntimeError, RuntimeResult},
    groups::{KernelGroups, failed, parse},
    launch::devices::Rule,
    ports::{Groups, Limits},
    stats::{Depth, Reading},
};
use berth_shim::keeper::Keeper;
use berth_sys::cgroup::{
    GroupPath,
    systemd::{Driver, names, rounded_quota},
};

/// What a scope's name ends with.
const SCOPE: &str = ".scope";
/// The kernel's own period of processor quotas, microseconds.
const PERIOD_US: u64 = 100_000;

/// Groups that systemd makes.
#[derive(Debug)]
pub struct Scopes {
    kernel: KernelGroups,
    driver: Driver,
    /// The shim's program.
    program: PathBuf,
    /// Of scopes in which nothing else runs yet.
    keepers: Mutex<HashMap<String, Keeper>>,
}

impl Scopes {
    /// Scopes by way of this driver, with keepers of the shim's program.
    pub fn new(kernel: KernelGroups, driver: Driver, program: PathBuf) -> Self {
        Self { kernel, driver, program, keepers: Mutex::default() }
    }

    fn keepers(&self) -> MutexGuard<'_, HashMap<String, Keeper>> {
        self.keepers.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn make(&self, group: &str, path: &GroupPath, limits: &Limits) -> RuntimeResult<Vec<PathBuf>> {
        let files = self.kernel.said(limits)?;
        let keeper = Keeper::start(&self.program);
        let keeper = keeper.map_err(|e| RuntimeError::file("execute", &self.program, &e))?;
        let made = self.driver.make_scope(self.kernel.hierarchy(), path, keeper.process(), &files);
        made.map_err(|error| failed(&error))?;
        self.keepers().insert(group.to_owned(), keeper);
        self.kernel.create(group, limits)
    }
}

fn is_scope(group: &str) -> bool {
    group.ends_with(SCOPE)
}

/// What is told to systemd and what is written are the same, and systemd keeps quotas in steps.
fn rounded(limits: &Limits) -> Limits {
    let Limits::Container(Some(resources)) = limits else { return limits.clone() };
    let mut resources = resources.clone();
    let period = u64::try_from(resources.cpu_period).ok().filter(|period| *period > 0).unwrap_or(PERIOD_US);
    resources.cpu_quota = rounded_quota(resources.cpu_quota, period);
    Limits::Container(Some(resources))
}

impl Groups for Scopes {
    fn name(&self, parent: &str, id: &str) -> RuntimeResult<String> {
        let invalid = || RuntimeError::invalid(format!("invalid systemd slice {parent:?}"));
        let slice = names::slice_of(parent).ok_or_else(invalid)?;
        let slice = names::path_of(slice).map_err(|_| invalid())?;
        let scope = slice.child(&format!("{NAME}-{id}{SCOPE}"));
        scope.map(|scope| scope.to_string()).ok_or_else(|| RuntimeError::invalid(format!("{id:?} is no control group")))
    }

    fn find(&self, id: &str) -> RuntimeResult<Vec<String>> {
        let mut found = self.kernel.find(&format!("{NAME}-{id}{SCOPE}"))?;
        found.extend(self.kernel.find(id)?);
        Ok(found)
    }

    fn create(&self, group: &str, limits: &Limits) -> RuntimeResult<Vec<PathBuf>> {
        if !is_scope(group) {
            return self.kernel.create(group, limits);
        }
        let made = self.make(group, &parse(group)?, &rounded(limits));
        if made.is_err()
            && let Err(left) = self.remove(group)
        {
            tracing::warn!(cgroup = group, err = %left, "A scope that was not finished cannot be removed");
        }
        made
    }

    fn settle(&self, group: &str) {
        let keeper = self.keepers().remove(group);
        drop(keeper);
    }

    fn allow_devices(&self, group: &str, rules: &[Rule]) -> RuntimeResult<()> {
        self.kernel.allow_devices(group, rules)
    }

    fn limit(&self, group: &str, limits: &Limits) -> RuntimeResult<()> {
        let (path, limits) = (parse(group)?, rounded(limits));
        if !is_scope(group) {
            return self.kernel.limit(group, &limits);
        }
        let before = self.kernel.standing(&path, &limits)?;
        self.driver.set(&path, &self.kernel.said(&limits)?).map_err(|error| failed(&error))?;
        self.kernel.limit(group, &limits).inspect_err(|_| {
            // The files are as before; systemd is to know the same.
            if let Err(error) = self.driver.set(&path, &before) {
                tracing::warn!(cgroup = group, err = %error, "systemd cannot be told what limits a scope has");
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

    fn tells_pressure(&self) -> bool {
        self.kernel.tells_pressure()
    }
}
