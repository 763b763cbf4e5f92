//! Mount points of the cgroup hierarchies, and paths of cgroups below them. Pure.

use std::path::{Path, PathBuf};

pub use berth_cadvisor::control_files::Tree;
use berth_cadvisor::control_files::{self, ControlFile};
use berth_sys::mount_table::Mount;

/// Mount points of the cgroup hierarchies.
#[derive(Clone, PartialEq, Eq, Debug)]
pub enum Mounts {
    /// Cgroup v1, also in hybrid mode; `None` where a hierarchy is absent. In the order of [`Tree`].
    Old([Option<PathBuf>; 5]),
    /// Cgroup v2.
    Unified(PathBuf),
}

impl Mounts {
    /// Finds the mounts. V1 takes precedence, because the v2 hierarchy has no controllers in hybrid mode. Of a
    /// hierarchy that is mounted several times, the shortest path is used.
    pub fn find(mounts: &[Mount]) -> Option<Self> {
        let tree = |tree: Tree| {
            let of_tree =
                mounts.iter().filter(|m| m.kind == "cgroup" && m.options.split(',').any(|o| o == tree.as_str()));
            of_tree.map(|m| m.target.clone()).min_by_key(|target| target.as_os_str().len())
        };
        let old = Tree::ALL.map(tree);
        if old.iter().any(Option::is_some) {
            return Some(Self::Old(old));
        }
        mounts.iter().find(|m| m.kind == "cgroup2").map(|m| Self::Unified(m.target.clone()))
    }

    /// Returns the table of cgroup files.
    pub fn files(&self) -> &'static [ControlFile] {
        control_files::files(self.is_unified())
    }

    /// Path of a cgroup's file; `None` where its hierarchy is not mounted.
    pub fn place(&self, group: &str, file: &ControlFile) -> Option<PathBuf> {
        Some(self.directory(group, file.tree)?.join(file.name))
    }

    /// Existing directories of a cgroup that contain settings.
    pub fn directories_of_settings(&self, group: &str) -> Vec<PathBuf> {
        let trees: &[Tree] = match self {
            Self::Unified(_) => &[Tree::Cpu],
            Self::Old(_) => &[Tree::Cpu, Tree::Memory, Tree::Pids],
        };
        trees.iter().filter_map(|tree| self.directory(group, *tree)).filter(|directory| directory.is_dir()).collect()
    }

    /// Directory of a cgroup.
    pub fn directory(&self, group: &str, tree: Tree) -> Option<PathBuf> {
        let root: &Path = match self {
            Self::Unified(root) => root,
            Self::Old(trees) => trees.get(tree as usize)?.as_deref()?,
        };
        Some(root.join(group.trim_start_matches('/')))
    }

    /// Whether this is cgroup v2.
    pub fn is_unified(&self) -> bool {
        matches!(self, Self::Unified(_))
    }
}

/// Candidate paths of the cgroup of a container or sandbox below its pod, by cgroup driver and runtime: containerd,
/// CRI-O, Berth.
pub fn container_places(pod: &str, id: &str) -> [String; 5] {
    let pod = pod.trim_end_matches('/');
    [
        format!("{pod}/{id}"),
        format!("{pod}/cri-containerd-{id}.scope"),
        format!("{pod}/crio-{id}.scope"),
        format!("{pod}/crio-{id}"),
        format!("{pod}/berth-{id}.scope"),
    ]
}

#[cfg(test)]
mod tests {
    use super::*;

    fn mount(target: &str, kind: &str, options: &str) -> Mount {
        Mount {
            device: String::new(),
            target: target.into(),
            kind: kind.into(),
            is_shared: false,
            is_slave: false,
            options: options.into(),
        }
    }

    #[test]
    fn hierarchies_are_found() {
        let unified = [mount("/", "ext4", "rw"), mount("/sys/fs/cgroup", "cgroup2", "rw")];
        assert_eq!(Mounts::find(&unified), Some(Mounts::Unified("/sys/fs/cgroup".into())));
        assert_eq!(Mounts::find(&unified[..1]), None);
        let hybrid = [
            mount("/mnt/longer/than/cpu", "cgroup", "rw,cpu,cpuacct"),
            mount("/c/cpu,cpuacct", "cgroup", "rw,cpu,cpuacct"),
            mount("/c/memory", "cgroup", "rw,memory"),
            mount("/c/unified", "cgroup2", "rw"),
        ];
        let found = Mounts::find(&hybrid).expect("old ones");
        let place = |name: &str| {
            let file = found.files().iter().find(|f| f.name == name).expect("in the table");
            found.place("/kubepods/podx", file)
        };
        assert_eq!(place("cpuacct.usage"), Some("/c/cpu,cpuacct/kubepods/podx/cpuacct.usage".into()));
        assert_eq!(place("memory.stat"), Some("/c/memory/kubepods/podx/memory.stat".into()));
        assert_eq!(place("pids.max"), None);
        assert!(!found.is_unified());
    }

    #[test]
    fn containers_have_their_places() {
        let places = container_places("/kubepods/podx", "c1");
        assert_eq!(
            places,
            ["c1", "cri-containerd-c1.scope", "crio-c1.scope", "crio-c1", "berth-c1.scope"]
                .map(|name| format!("/kubepods/podx/{name}"))
        );
    }
}
