//! cgroup v2 (unified hierarchy): create, enable controllers, kill, and remove.
//!
//! Implements spec 06a §6.1.

use std::{
    collections::BTreeSet,
    path::{Path, PathBuf},
    thread,
    time::{Duration, Instant},
};

use super::{
    CgroupError, CgroupPresence, CgroupResult, Controller, GroupPath,
    group::{self, DirectoryCreation},
    process_killer,
};
use crate::backoff::Backoff;

/// Controllers to use, of those that the kernel offers.
const WANTED: [Controller; 5] =
    [Controller::Cpu, Controller::Cpuset, Controller::Memory, Controller::Hugetlb, Controller::Pids];
/// Maximum time for killed processes to exit.
const EMPTY_LIMIT: Duration = Duration::from_secs(10);

/// The cgroup v2 hierarchy with its available controllers.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct UnifiedHierarchy {
    root: PathBuf,
    available: BTreeSet<Controller>,
}

impl UnifiedHierarchy {
    /// The hierarchy mounted at `root`.
    ///
    /// # Errors
    /// If its controllers cannot be read.
    pub fn at(root: PathBuf) -> CgroupResult<Self> {
        let offered = controllers(&root)?;
        let available = WANTED.into_iter().filter(|c| offered.contains(c.as_str())).collect();
        Ok(Self { root, available })
    }

    pub(super) fn has(&self, controller: Controller) -> bool {
        self.available.contains(&controller)
    }

    pub(super) fn directory(&self, group: &GroupPath) -> PathBuf {
        group.below(&self.root)
    }

    pub(super) fn presence(&self, group: &GroupPath) -> CgroupResult<CgroupPresence> {
        let offered = match controllers(&self.directory(group)) {
            Err(e) if e.is_missing() => return Ok(CgroupPresence::Absent),
            other => other?,
        };
        let missing = self.available.iter().filter(|c| !offered.contains(c.as_str()));
        let missing: Vec<String> = missing.map(|c| c.as_str().to_owned()).collect();
        Ok(if missing.is_empty() { CgroupPresence::Complete } else { CgroupPresence::Partial(missing) })
    }

    pub(super) fn create(&self, group: &GroupPath) -> CgroupResult<Vec<GroupPath>> {
        let mut made = Vec::new();
        self.make(group, &mut made)?;
        if let CgroupPresence::Partial(_) = self.presence(group)? {
            self.enable_above(group)?;
        }
        made.retain(|g| g != group);
        Ok(made)
    }

    fn make(&self, group: &GroupPath, made: &mut Vec<GroupPath>) -> CgroupResult<()> {
        let directory = self.directory(group);
        let result = match (group::make(&directory), group.parent()) {
            (Err(e), Some(parent)) if e.is_missing() => {
                self.make(&parent, made)?;
                group::make(&directory)?
            }
            (result, _) => result?,
        };
        self.check_type(&directory)?;
        if result == DirectoryCreation::Now {
            made.push(group.clone());
        }
        Ok(())
    }

    fn check_type(&self, directory: &Path) -> CgroupResult<()> {
        if self.available.is_empty() {
            return Ok(());
        }
        let kind = match group::read(&directory.join("cgroup.type")) {
            // The root cgroup has no such file.
            Err(e) if e.is_missing() => return Ok(()),
            other => other?,
        };
        let state = match kind.as_str() {
            "domain invalid" => "an invalid state",
            "threaded" | "domain threaded" => "threaded mode",
            _ => return Ok(()),
        };
        let directory = directory.display().to_string();
        Err(CgroupError::Other(format!(
            "cannot enter cgroupv2 {directory:?} with domain controllers -- it is in {state}"
        )))
    }

    /// Enables the controllers in every ancestor, from the root down.
    fn enable_above(&self, group: &GroupPath) -> CgroupResult<()> {
        let Some(parent) = group.parent() else { return Ok(()) };
        self.enable_above(&parent)?;
        let file = self.directory(&parent).join("cgroup.subtree_control");
        let all: Vec<String> = self.available.iter().map(|c| format!("+{}", c.as_str())).collect();
        if group::write(&file, &all.join(" ")).is_err() {
            for one in all {
                // A controller that cannot be enabled must not block the others; `presence` reports the missing ones.
                let _ = group::write(&file, &one);
            }
        }
        Ok(())
    }

    pub(super) fn children(&self, group: &GroupPath) -> CgroupResult<Vec<String>> {
        group::children(&self.directory(group))
    }

    pub(super) fn remove(&self, group: &GroupPath) -> CgroupResult<()> {
        self.kill(group)?;
        group::remove_tree(&self.directory(group))
    }

    /// Kills the processes by `cgroup.kill`, which includes concurrent forks, or one by one before kernel 5.14.
    pub(super) fn kill(&self, group: &GroupPath) -> CgroupResult<()> {
        let directory = self.directory(group);
        if self.is_populated(&directory)? {
            match group::write(&directory.join("cgroup.kill"), "1") {
                // Before kernel 5.14.
                Err(e) if e.is_missing() => process_killer::all(&group.to_string(), || {
                    let mut pids = BTreeSet::new();
                    processes(&directory, &mut pids)?;
                    Ok(pids)
                })?,
                other => other?,
            }
            self.wait_until_empty(group, &directory)?;
        }
        Ok(())
    }

    fn is_populated(&self, directory: &Path) -> CgroupResult<bool> {
        match group::read(&directory.join("cgroup.events")) {
            Ok(text) => Ok(text.lines().any(|line| line == "populated 1")),
            Err(e) if e.is_missing() => Ok(false),
            Err(e) => Err(e),
        }
    }

    fn wait_until_empty(&self, group: &GroupPath, directory: &Path) -> CgroupResult<()> {
        let began = Instant::now();
        let mut backoff = Backoff::new(Duration::from_millis(1), Duration::from_millis(100));
        while self.is_populated(directory)? {
            if began.elapsed() > EMPTY_LIMIT {
                return Err(CgroupError::Other(format!(
                    "failed to kill all the processes attached to the {group} cgroups : still populated after \
                     {EMPTY_LIMIT:?}"
                )));
            }
            thread::sleep(backoff.next_delay());
        }
        Ok(())
    }
}

fn controllers(directory: &Path) -> CgroupResult<BTreeSet<String>> {
    let text = group::read(&directory.join("cgroup.controllers"))?;
    Ok(text.split_whitespace().map(str::to_owned).collect())
}

fn processes(directory: &Path, out: &mut BTreeSet<i32>) -> CgroupResult<()> {
    match group::read(&directory.join("cgroup.procs")) {
        Ok(text) => out.extend(process_killer::parse(&text)),
        Err(e) if e.is_missing() => return Ok(()),
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
    use crate::cgroup::Hierarchy;

    /// A directory that imitates a hierarchy, with hand-written interface files.
    fn lookalike(controllers: &str) -> (tempfile::TempDir, UnifiedHierarchy) {
        let root = tempfile::tempdir().expect("a directory");
        for file in ["cgroup.controllers", "cgroup.subtree_control"] {
            fs::write(root.path().join(file), controllers).expect("writable");
        }
        let unified = UnifiedHierarchy::at(root.path().to_owned()).expect("readable");
        (root, unified)
    }

    fn path(text: &str) -> GroupPath {
        GroupPath::parse(text).expect("plain")
    }

    #[test]
    fn only_wanted_controllers_are_used() {
        let (_root, unified) = lookalike("cpuset cpu io memory rdma\n");
        assert!(unified.has(Controller::Cpu) && unified.has(Controller::Memory) && unified.has(Controller::Cpuset));
        assert!(!unified.has(Controller::Pids) && !unified.has(Controller::Hugetlb));
        let (_root, none) = lookalike("");
        assert!(!none.has(Controller::Cpu));
    }

    #[test]
    fn presence_lists_missing_controllers() {
        let (root, unified) = lookalike("cpu memory pids");
        assert_eq!(unified.presence(&path("/a")).expect("readable"), CgroupPresence::Absent);
        fs::create_dir(root.path().join("a")).expect("makeable");
        fs::write(root.path().join("a/cgroup.controllers"), "cpu").expect("writable");
        let missing = CgroupPresence::Partial(vec!["memory".into(), "pids".into()]);
        assert_eq!(unified.presence(&path("/a")).expect("readable"), missing);
        fs::write(root.path().join("a/cgroup.controllers"), "cpu io memory pids").expect("writable");
        assert_eq!(unified.presence(&path("/a")).expect("readable"), CgroupPresence::Complete);
    }

    #[test]
    fn missing_controllers_are_turned_on_above() {
        let (root, unified) = lookalike("cpu memory");
        fs::create_dir(root.path().join("a")).expect("makeable");
        fs::write(root.path().join("a/cgroup.controllers"), "cpu").expect("writable");
        unified.create(&path("/a")).expect("made");
        let on = fs::read_to_string(root.path().join("cgroup.subtree_control")).expect("readable");
        assert!(on.starts_with("+cpu +memory"), "{on}");
    }

    #[test]
    fn groups_in_the_wrong_mode_are_refused() {
        let (root, unified) = lookalike("cpu");
        fs::create_dir(root.path().join("a")).expect("makeable");
        for (kind, fine) in [("domain", true), ("domain invalid", false), ("threaded", false)] {
            fs::write(root.path().join("a/cgroup.type"), kind).expect("writable");
            fs::write(root.path().join("a/cgroup.controllers"), "cpu").expect("writable");
            assert_eq!(unified.create(&path("/a")).is_ok(), fine, "{kind}");
        }
    }

    #[test]
    fn a_process_moves_and_is_listed_where_it_is() {
        let (root, unified) = lookalike("cpu");
        let hierarchy = Hierarchy::V2(unified);
        fs::create_dir(root.path().join("a")).expect("makeable");
        // A real cgroup has the file from the start, and no write creates it.
        let error = hierarchy.attach(&path("/a"), 42).expect_err("no file");
        assert!(error.is_missing() && error.to_string().starts_with("write \"42\" to "), "{error}");
        fs::write(root.path().join("a/cgroup.procs"), "").expect("writable");
        hierarchy.attach(&path("/a"), 42).expect("moved");
        fs::write(root.path().join("cgroup.procs"), "1\n0\n\n7\n").expect("writable");
        assert_eq!(hierarchy.processes(&path("/")).expect("readable"), [1, 0, 7]);
        assert_eq!(hierarchy.processes(&path("/a")).expect("readable"), [42]);
        assert!(hierarchy.processes(&path("/b")).expect_err("no such cgroup").is_missing());
        for pid in [0, -1] {
            let error = hierarchy.attach(&path("/a"), pid).expect_err("not a process");
            assert_eq!(error.to_string(), format!("invalid process id {pid}"));
        }
    }
}
