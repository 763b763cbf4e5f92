//! cgroup v1 hierarchies, one tree per controller, and hybrid mode.
//!
//! In hybrid mode a cgroup v2 hierarchy without controllers is mounted beside them. Implements spec 06a §6.2.

use std::{
    collections::{BTreeMap, BTreeSet},
    path::{Path, PathBuf},
};

use rustix::io::Errno;

use super::{
    CgroupError, CgroupPresence, CgroupResult, Controller, GroupPath,
    group::{self, DirectoryCreation},
    process_killer,
};
use crate::mount_table::Mount;

/// Mount points of the hierarchies.
#[derive(Clone, PartialEq, Eq, Debug, Default)]
pub struct Hierarchies {
    /// Hierarchies in which this program creates cgroups.
    ours: BTreeMap<Controller, PathBuf>,
    /// The other hierarchies: a runtime creates cgroups below ours there, which are removed with ours.
    others: BTreeSet<PathBuf>,
    /// The `devices` hierarchy, which is one of the others; it lists the processes of a cgroup.
    devices: Option<PathBuf>,
}

impl Hierarchies {
    /// Finds the hierarchies; `None` if neither `cpu` nor `memory` is mounted as v1. Of several mounts of a hierarchy
    /// it takes the shortest path.
    pub fn from_mounts(mounts: &[Mount]) -> Option<Self> {
        let mut found = Self::default();
        for mount in mounts.iter().filter(|m| matches!(m.kind.as_str(), "cgroup" | "cgroup2")) {
            let options: Vec<&str> = mount.options.split(',').collect();
            let mut is_ours = false;
            for controller in Controller::ALL.into_iter().filter(|c| options.contains(&c.as_str())) {
                is_ours = true;
                let shortest = found.ours.entry(controller).or_insert_with(|| mount.target.clone());
                if mount.target.as_os_str().len() < shortest.as_os_str().len() {
                    shortest.clone_from(&mount.target);
                }
            }
            if options.contains(&"devices") {
                let shortest = found.devices.get_or_insert_with(|| mount.target.clone());
                if mount.target.as_os_str().len() < shortest.as_os_str().len() {
                    shortest.clone_from(&mount.target);
                }
            }
            if !is_ours {
                found.others.insert(mount.target.clone());
            }
        }
        let usable = found.has(Controller::Cpu) || found.has(Controller::Memory);
        usable.then_some(found)
    }

    pub(super) fn has(&self, controller: Controller) -> bool {
        self.ours.contains_key(&controller)
    }

    pub(super) fn directory(&self, group: &GroupPath, controller: Controller) -> CgroupResult<PathBuf> {
        let root = self.ours.get(&controller);
        root.map(|root| group.below(root))
            .ok_or_else(|| CgroupError::Other(format!("controller {} is not mounted", controller.as_str())))
    }

    /// Directory of the cgroup in the `devices` hierarchy.
    pub(super) fn devices(&self, group: &GroupPath) -> CgroupResult<PathBuf> {
        let root = self.devices.as_deref();
        root.map(|root| group.below(root))
            .ok_or_else(|| CgroupError::Other("controller devices is not mounted".to_owned()))
    }

    /// Roots of our hierarchies, without duplicates for shared mounts.
    fn roots(&self) -> BTreeSet<&Path> {
        self.ours.values().map(PathBuf::as_path).collect()
    }

    pub(super) fn directories(&self, group: &GroupPath) -> Vec<PathBuf> {
        self.roots().into_iter().map(|root| group.below(root)).collect()
    }

    /// All roots. Ours come last: they identify a cgroup whose removal is incomplete.
    fn all_roots(&self) -> impl Iterator<Item = &Path> {
        self.others.iter().map(PathBuf::as_path).chain(self.roots())
    }

    pub(super) fn presence(&self, group: &GroupPath) -> CgroupPresence {
        let missing: Vec<String> = self
            .ours
            .iter()
            .filter(|(_, root)| !group.below(root).is_dir())
            .map(|(controller, _)| controller.as_str().to_owned())
            .collect();
        match missing.len() {
            0 => CgroupPresence::Complete,
            n if n == self.ours.len() => CgroupPresence::Absent,
            _ => CgroupPresence::Partial(missing),
        }
    }

    pub(super) fn create(&self, group: &GroupPath) -> CgroupResult<Vec<GroupPath>> {
        let mut above = BTreeSet::new();
        let cpuset = self.ours.get(&Controller::Cpuset).map(PathBuf::as_path);
        for root in self.roots() {
            make_in(root, group, &mut above, cpuset == Some(root))?;
        }
        above.remove(group);
        Ok(above.into_iter().collect())
    }

    /// As [`Self::create`], and in all other mounted hierarchies, like runc: a process in the root cgroup of one
    /// (`freezer`, `blkio`, …) could mount it and act on cgroups of the host. Skips a hierarchy that is not writable
    /// here. Returns the cgroup's directories.
    pub(super) fn create_everywhere(&self, group: &GroupPath) -> CgroupResult<Vec<PathBuf>> {
        self.create(group)?;
        let mut directories = self.directories(group);
        for root in &self.others {
            match make_in(root, group, &mut BTreeSet::new(), false) {
                Ok(()) => directories.push(group.below(root)),
                Err(error) if is_not_ours(&error) => {}
                Err(error) => return Err(error),
            }
        }
        Ok(directories)
    }

    pub(super) fn children(&self, group: &GroupPath) -> CgroupResult<Vec<String>> {
        let mut names = BTreeSet::new();
        for root in self.roots() {
            names.extend(group::children(&group.below(root))?);
        }
        Ok(names.into_iter().collect())
    }

    pub(super) fn kill(&self, group: &GroupPath) -> CgroupResult<()> {
        if let Ok(directory) = self.directory(group, Controller::Pids) {
            // Stops forks faster than the kill; the kill continues without the file, or the cgroup.
            let _ = group::write(&directory.join("pids.max"), "0");
        }
        for root in self.all_roots() {
            thaw(&group.below(root));
        }
        process_killer::all(&group.to_string(), || {
            let mut pids = BTreeSet::new();
            for root in self.all_roots() {
                processes(&group.below(root), &mut pids)?;
            }
            Ok(pids)
        })
    }

    pub(super) fn remove(&self, group: &GroupPath) -> CgroupResult<()> {
        self.kill(group)?;
        for root in self.all_roots() {
            group::remove_tree(&group.below(root))?;
        }
        Ok(())
    }
}

/// Creates the cgroup in one hierarchy; creates its ancestors only if they are missing.
fn make_in(root: &Path, group: &GroupPath, made: &mut BTreeSet<GroupPath>, cpuset: bool) -> CgroupResult<()> {
    let directory = group.below(root);
    let result = match (group::make(&directory), group.parent()) {
        (Err(e), Some(parent)) if e.is_missing() => {
            make_in(root, &parent, made, cpuset)?;
            group::make(&directory)?
        }
        (result, _) => result?,
    };
    if cpuset {
        inherit_cpuset(root, group)?;
    }
    if result == DirectoryCreation::Now {
        made.insert(group.clone());
    }
    Ok(())
}

/// Whether a hierarchy is read-only or not permitted, as inside a container.
fn is_not_ours(error: &CgroupError) -> bool {
    let refusals = [Errno::ROFS, Errno::ACCESS, Errno::PERM].map(|errno| Some(errno.raw_os_error()));
    refusals.contains(&error.errno())
}

/// Copies the CPUs and memory nodes of the parent, which may be empty too: a new cpuset is empty, and no process can
/// join it.
fn inherit_cpuset(root: &Path, group: &GroupPath) -> CgroupResult<()> {
    let Some(parent) = group.parent() else { return Ok(()) };
    for file in ["cpuset.cpus", "cpuset.mems"] {
        let own = group.below(root).join(file);
        if group::read(&own)?.is_empty() {
            inherit_cpuset(root, &parent)?;
            group::write(&own, &group::read(&parent.below(root).join(file))?)?;
        }
    }
    Ok(())
}

/// Thaws a cgroup and its descendants: killed processes of a frozen cgroup do not exit.
fn thaw(directory: &Path) {
    if group::write(&directory.join("freezer.state"), "THAWED").is_ok() {
        for child in group::children(directory).unwrap_or_default() {
            thaw(&directory.join(child));
        }
    }
}

fn processes(directory: &Path, out: &mut BTreeSet<i32>) -> CgroupResult<()> {
    match group::read(&directory.join("cgroup.procs")) {
        Ok(text) => out.extend(process_killer::parse(&text)),
        Err(e) if e.is_missing() => return Ok(()),
        // A threaded cgroup of v2; the parent cgroup lists its processes.
        Err(e) if e.errno() == Some(Errno::OPNOTSUPP.raw_os_error()) => {}
        Err(e) => return Err(e),
    }
    for child in group::children(directory)? {
        processes(&directory.join(child), out)?;
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use std::fs;

    use super::*;
    use crate::{cgroup::Hierarchy, mount_table};

    #[test]
    fn hierarchies_are_found_by_their_controllers() {
        let text = "31 23 0:28 / /c rw - tmpfs tmpfs rw\n\
                    32 31 0:29 / /c/cpu,cpuacct rw - cgroup cgroup rw,cpu,cpuacct\n\
                    33 31 0:30 / /c/memory rw - cgroup cgroup rw,memory\n\
                    34 31 0:30 / /other/place/memory rw - cgroup cgroup rw,memory\n\
                    35 31 0:31 / /c/freezer rw - cgroup cgroup rw,freezer\n\
                    36 31 0:32 / /c/systemd rw - cgroup cgroup rw,xattr,name=systemd\n\
                    37 31 0:33 / /c/unified rw - cgroup2 cgroup2 rw\n";
        let found = Hierarchies::from_mounts(&mount_table::parse(text.as_bytes())).expect("mounted");
        let group = GroupPath::parse("/k").expect("plain");
        let directory = |c| found.directory(&group, c).map(|p| p.to_string_lossy().into_owned()).ok();
        assert_eq!(directory(Controller::Cpu).as_deref(), Some("/c/cpu,cpuacct/k"));
        assert_eq!(directory(Controller::Cpuacct).as_deref(), Some("/c/cpu,cpuacct/k"));
        assert_eq!(directory(Controller::Memory).as_deref(), Some("/c/memory/k"));
        assert_eq!(directory(Controller::Systemd).as_deref(), Some("/c/systemd/k"));
        assert_eq!(directory(Controller::Pids), None);
        assert_eq!(found.roots().len(), 3);
        assert_eq!(found.others.len(), 2);
        let unified = "37 31 0:33 / /c rw - cgroup2 cgroup2 rw\n";
        assert_eq!(Hierarchies::from_mounts(&mount_table::parse(unified.as_bytes())), None);
    }

    #[test]
    fn a_process_moves_in_every_hierarchy() {
        let root = tempfile::tempdir().expect("a directory");
        let mut table = String::new();
        for (number, name) in ["cpu", "devices", "freezer"].iter().enumerate() {
            let group = root.path().join(name).join("a");
            fs::create_dir_all(&group).expect("makeable");
            fs::write(group.join("cgroup.procs"), "").expect("writable");
            let target = root.path().join(name).display().to_string();
            table += &format!("3{number} 23 0:2{number} / {target} rw - cgroup cgroup rw,{name}\n");
        }
        let found = Hierarchies::from_mounts(&mount_table::parse(table.as_bytes())).expect("mounted");
        let (hierarchy, group) = (Hierarchy::V1(found), GroupPath::parse("/a").expect("plain"));
        hierarchy.attach(&group, 42).expect("moved");
        for name in ["cpu", "devices", "freezer"] {
            let text = fs::read_to_string(root.path().join(name).join("a/cgroup.procs")).expect("readable");
            assert_eq!(text, "42", "{name}");
        }
        fs::write(root.path().join("cpu/a/cgroup.procs"), "7\n").expect("writable");
        assert_eq!(hierarchy.processes(&group).expect("readable"), [42], "of the devices hierarchy");
        let without = Hierarchies::from_mounts(&mount_table::parse(table.lines().next().expect("cpu").as_bytes()));
        let error = Hierarchy::V1(without.expect("mounted")).processes(&group).expect_err("no devices");
        assert_eq!(error.to_string(), "controller devices is not mounted");
    }
}
