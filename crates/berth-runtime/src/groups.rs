//! Cgroups of sandboxes and containers by direct writes to the kernel's hierarchies (cgroupfs driver).
//!
//! With the systemd driver, `systemd_scopes.rs` has systemd create them. Implements spec 09a §9.

use std::{
    os::fd::AsFd,
    path::{Path, PathBuf},
};

use tracing::warn;

use super::{
    config::NAME,
    errors::{RuntimeError, RuntimeResult},
    launch::{
        device_program,
        devices::Rule,
        inputs,
        limits::{Controllers, Write, writes},
    },
    ports::{CgroupLimits, Groups},
    stats::{self, Depth, Reading},
};
use berth_proto::cri;
use berth_sys::{
    cgroup::{CgroupError, Controller, GroupPath, Hierarchy},
    device_filter, mount_table,
};

/// Missing where the kernel does not account swap.
const SWAP: &str = "memory.swap.max";
/// Maximum depth of the search for cgroups of the runtime; cgroups made by containers are deeper.
const DEEPEST: u32 = 8;
/// Minimum CPU shares.
const SMALLEST_SHARES: i64 = 2;

/// Cgroups created without a service manager.
#[derive(Debug)]
pub struct CgroupfsGroups {
    hierarchy: Hierarchy,
    controllers: Controllers,
    /// Mount point of the cgroup v1 `devices` hierarchy.
    devices: Option<PathBuf>,
}

impl CgroupfsGroups {
    /// Cgroups on these hierarchies.
    pub fn new(hierarchy: Hierarchy, kind: inputs::Groups, tolerates_missing_hugetlb: bool) -> Self {
        let has_swap = has_swap(&hierarchy);
        let has_hugetlb = hierarchy.has(Controller::Hugetlb);
        let controllers = Controllers { groups: kind, has_swap, has_hugetlb, tolerates_missing_hugetlb };
        let devices = if hierarchy.version() == 1 { devices_hierarchy() } else { None };
        Self { hierarchy, controllers, devices }
    }

    /// The cgroup's directory in the v1 `devices` hierarchy.
    fn devices_of(&self, group: &GroupPath) -> Option<PathBuf> {
        let root = self.devices.as_ref()?;
        Some(root.join(group.to_string().trim_start_matches('/')))
    }

    /// The mounted hierarchies.
    pub fn hierarchy(&self) -> &Hierarchy {
        &self.hierarchy
    }

    /// The files and values that these limits are written as.
    ///
    /// # Errors
    /// The limits are not supported by this machine.
    pub fn rendered(&self, limits: &CgroupLimits) -> RuntimeResult<Vec<(String, String)>> {
        let files = self.files(limits)?.into_iter();
        Ok(files.filter(|file| self.is_ours(file)).map(|file| (file.file, file.value)).collect())
    }

    /// The current values of the files that these limits would be written to.
    ///
    /// # Errors
    /// The limits are not supported by this machine.
    pub fn current_values(&self, group: &GroupPath, limits: &CgroupLimits) -> RuntimeResult<Vec<(String, String)>> {
        let files = self.files(limits)?;
        let files = files.iter().filter(|file| self.is_ours(file)).filter_map(|file| self.old(group, file));
        Ok(files.map(|file| (file.file, file.value)).collect())
    }

    /// Whether the file's controller is available.
    fn is_ours(&self, file: &Write) -> bool {
        file.controller.is_none_or(|controller| self.hierarchy.has(controller))
    }

    fn files(&self, limits: &CgroupLimits) -> RuntimeResult<Vec<Write>> {
        let smallest;
        let resources = match limits {
            CgroupLimits::Smallest => {
                smallest = cri::LinuxContainerResources { cpu_shares: SMALLEST_SHARES, ..Default::default() };
                &smallest
            }
            CgroupLimits::Container(Some(resources)) => resources,
            CgroupLimits::Container(None) => return Ok(Vec::new()),
        };
        Ok(writes(resources, &self.controllers)?)
    }

    fn write(&self, group: &GroupPath, file: &Write) -> Result<(), CgroupError> {
        if !self.is_ours(file) {
            return Ok(());
        }
        // On cgroup v2 all files of a group are in one directory.
        let controller = file.controller.unwrap_or(Controller::Cpu);
        match self.hierarchy.write(group, controller, &file.file, &file.value) {
            Err(error) if (file.is_optional || file.file == SWAP) && error.is_missing() => Ok(()),
            other => other,
        }
    }

    fn old(&self, group: &GroupPath, file: &Write) -> Option<Write> {
        let controller = file.controller.unwrap_or(Controller::Cpu);
        let value = self.hierarchy.read(group, controller, &file.file).ok()?;
        Some(Write { value, ..file.clone() })
    }
}

fn devices_hierarchy() -> Option<PathBuf> {
    let mounts = mount_table::read().ok()?;
    let is_it =
        |mount: &&mount_table::Mount| mount.kind == "cgroup" && mount.options.split(',').any(|o| o == "devices");
    mounts.iter().find(is_it).map(|mount| mount.target.clone())
}

fn has_swap(hierarchy: &Hierarchy) -> bool {
    // The root of cgroup v2 has no such file, and there may be no other group yet: assume it, writes tolerate its
    // absence.
    let root = GroupPath::parse("/");
    let is_there = |root| hierarchy.read(&root, Controller::Memory, "memory.memsw.limit_in_bytes").is_ok();
    hierarchy.version() == 2 || root.is_some_and(is_there)
}

/// Parses a cgroup path.
pub(super) fn parse(group: &str) -> RuntimeResult<GroupPath> {
    GroupPath::parse(group).ok_or_else(|| RuntimeError::invalid(format!("invalid cgroup path {group:?}")))
}

pub(super) fn failed(error: &CgroupError) -> RuntimeError {
    RuntimeError::other(error.to_string())
}

impl Groups for CgroupfsGroups {
    fn name(&self, parent: &str, id: &str) -> RuntimeResult<String> {
        let default = format!("/{NAME}");
        let parent = parse(if parent.is_empty() { &default } else { parent })?;
        let group = parent.child(id).ok_or_else(|| RuntimeError::invalid(format!("invalid cgroup name {id:?}")))?;
        Ok(group.to_string())
    }

    fn find(&self, id: &str) -> RuntimeResult<Vec<String>> {
        let (mut found, mut next) = (Vec::new(), vec![parse("/")?]);
        for _ in 0..DEEPEST {
            let mut below = Vec::new();
            for group in next {
                let names = self.hierarchy.children(&group).map_err(|error| failed(&error))?;
                below.extend(names.iter().filter_map(|name| Some((name == id, group.child(name)?))));
            }
            let (ours, others): (Vec<_>, Vec<_>) = below.into_iter().partition(|(is_it, _)| *is_it);
            found.extend(ours.into_iter().map(|(_, group)| group.to_string()));
            next = others.into_iter().map(|(_, group)| group).collect();
        }
        Ok(found)
    }

    fn create(&self, group: &str, limits: &CgroupLimits) -> RuntimeResult<Vec<PathBuf>> {
        let (path, files) = (parse(group)?, self.files(limits)?);
        let directories = self.hierarchy.create_everywhere(&path).map_err(|error| failed(&error))?;
        for file in &files {
            if let Err(error) = self.write(&path, file) {
                if let Err(left) = self.hierarchy.remove(&path) {
                    warn!(cgroup = group, err = %left, "Failed to remove incomplete cgroup");
                }
                return Err(failed(&error));
            }
        }
        Ok(directories)
    }

    fn allow_devices(&self, group: &str, rules: &[Rule]) -> RuntimeResult<()> {
        let path = parse(group)?;
        if let Some(directory) = self.devices_of(&path) {
            return rules.iter().try_for_each(|rule| {
                let (file, line) = rule.line();
                let at = directory.join(file);
                std::fs::write(&at, &line).map_err(|e| RuntimeError::file(&format!("write {line:?} to"), &at, &e))
            });
        }
        if self.hierarchy.version() == 1 {
            return Ok(());
        }
        let directories = self.hierarchy.directories(&path);
        directories.iter().try_for_each(|directory| {
            let opened = std::fs::File::open(directory);
            let replaced = opened.and_then(|group| device_filter::replace(group.as_fd(), &device_program(rules)));
            match replaced {
                // In a nested container this is not permitted; the outer container's device rules apply.
                Err(error) if error.kind() == std::io::ErrorKind::PermissionDenied => {
                    warn!(cgroup = group, err = %error, "Device access rules not applied: permission denied");
                    Ok(())
                }
                other => other.map_err(|e| RuntimeError::file("set device filter of", directory, &e)),
            }
        })
    }

    fn limit(&self, group: &str, limits: &CgroupLimits) -> RuntimeResult<()> {
        let (path, files) = (parse(group)?, self.files(limits)?);
        let old: Vec<_> = files.iter().filter_map(|file| self.old(&path, file)).collect();
        // On cgroup v1 the memory+swap limit is raised before and lowered after the memory limit: try both orders.
        let forwards = files.iter().try_for_each(|file| self.write(&path, file));
        let Err(first) = forwards else { return Ok(()) };
        if files.iter().rev().try_for_each(|file| self.write(&path, file)).is_ok() {
            return Ok(());
        }
        for file in old.iter().chain(old.iter().rev()) {
            // Each value fits in one of the two orders.
            let _ = self.write(&path, file);
        }
        Err(failed(&first))
    }

    fn remove(&self, group: &str) -> RuntimeResult<()> {
        self.hierarchy.remove(&parse(group)?).map_err(|error| failed(&error))
    }

    fn read(&self, group: &str, depth: Depth) -> Reading {
        parse(group).map(|path| stats::read(&self.hierarchy, &path, depth)).unwrap_or_default()
    }

    fn processes(&self, group: &str) -> Vec<u32> {
        parse(group).map(|path| stats::processes(&self.hierarchy, &path)).unwrap_or_default()
    }

    fn has_pressure_stats(&self) -> bool {
        self.hierarchy.version() == 2 && Path::new("/proc/pressure/cpu").exists()
    }
}
