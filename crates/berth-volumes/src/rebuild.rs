//! Reconstruction of volumes that an earlier agent left, from pod directories. Blocking.
//!
//! Reads directories only, never a volume itself. An unreadable directory is not empty: it counts as not understood,
//! and then nothing that pods may share is unstaged. Implements spec 07 §6.

use std::{
    fs, io,
    os::unix::fs::DirBuilderExt,
    panic::{AssertUnwindSafe, catch_unwind},
    path::{Path, PathBuf},
    sync::Arc,
};

use tracing::warn;

use super::{
    attachable::{AttachableVolumePlugin, FoundVolume},
    block_mapper,
    layout::{self, PodLayout},
    reconciler::{ReconstructedPodVolume, ReconstructedStage},
    spec::Mode,
};
use berth_sys::panics::panic_message;
use berth_types::PodUid;

/// Volumes reconstructed from pod directories, staged volumes, and the number of failures.
#[derive(Default)]
pub struct ScanResult {
    /// Reconstructed volumes.
    pub volumes: Vec<ReconstructedPodVolume>,
    /// Number of volumes or directories that could not be understood or read.
    pub failed: usize,
    /// Staged volumes, whether or not a pod uses them.
    pub staged: Vec<ReconstructedStage>,
}

/// Scans the directories of all pods.
///
/// # Errors
/// If the list of pods cannot be read.
pub fn scan(root: &Path, plugins: &[Arc<dyn AttachableVolumePlugin>]) -> io::Result<ScanResult> {
    let mut left = ScanResult::default();
    for pod in children(&layout::pods(root))? {
        let Some(uid) = name_of(&pod) else { continue };
        for (folder, mode) in [("volumes", Mode::Filesystem), ("volumeDevices", Mode::Block)] {
            for place in left.children(&pod.join(folder)) {
                let name = name_of(&place).unwrap_or_default().replace('~', "/");
                let Some(plugin) = plugins.iter().find(|plugin| plugin.name() == name) else { continue };
                for path in left.children(&place) {
                    left.one(plugin, &uid, path, mode);
                }
            }
        }
    }
    for plugin in plugins {
        match catch_panic(|| plugin.staged()) {
            Ok(staged) => {
                let staged = staged.into_iter();
                left.staged.extend(staged.map(|(mode, rebuilt)| ReconstructedStage {
                    plugin: plugin.clone(),
                    mode,
                    rebuilt,
                }));
            }
            Err(cause) => {
                warn!(plugin = plugin.name(), err = %cause, "Failed to list staged volumes");
                left.failed += 1;
            }
        }
    }
    left.mapped(root);
    if left.failed > 0 {
        // A volume that was not understood may belong to one of these.
        left.staged.clear();
    }
    Ok(left)
}

impl ScanResult {
    /// Adds block devices that pods may have without a link: an agent ended before it was created or after it was
    /// removed.
    fn mapped(&mut self, root: &Path) {
        let mut found = Vec::new();
        for ReconstructedStage { plugin, mode, rebuilt } in &self.staged {
            if *mode != Mode::Block {
                continue;
            }
            let is_known = |pod: &PodUid, left: &ReconstructedPodVolume| {
                let same = (left.mode, left.plugin.name(), &left.rebuilt.traits.volume);
                left.pod == *pod && same == (*mode, plugin.name(), &rebuilt.traits.volume)
            };
            let directory = plugin.map_dir(root, &rebuilt.spec);
            let marks = match children(&directory) {
                Ok(marks) => marks,
                Err(error) => {
                    warn!(path = %directory.display(), err = %error, "Failed to list pods that map the device");
                    self.failed += 1;
                    continue;
                }
            };
            // A plugin may keep its own record in the directory too.
            let marks = marks.iter().filter(|mark| block_mapper::is_mark(mark)).filter_map(|mark| name_of(mark));
            for pod in marks.map(|uid| PodUid::from(uid.as_str())) {
                let Ok(layout) = PodLayout::new(root, &pod) else { continue };
                if self.volumes.iter().all(|left| !is_known(&pod, left)) {
                    // Cleanup finds only pods that have a directory.
                    let made = fs::DirBuilder::new().recursive(true).mode(0o750).create(layout.pod());
                    if let Err(error) = made {
                        warn!(podUID = %pod, err = %error, "Failed to create directory of a pod that may map the device");
                        self.failed += 1;
                    }
                    let path = layout.device(&plugin.name().replace('/', "~"), &rebuilt.spec.directory());
                    let (plugin, rebuilt) = (plugin.clone(), rebuilt.clone());
                    found.push(ReconstructedPodVolume { plugin, pod, path, mode: *mode, rebuilt });
                }
            }
        }
        self.volumes.extend(found);
    }

    fn one(&mut self, plugin: &Arc<dyn AttachableVolumePlugin>, uid: &str, path: PathBuf, mode: Mode) {
        let Some(name) = name_of(&path) else { return };
        let pod = PodUid::from(uid);
        let found = FoundVolume { pod: pod.clone(), name, mode, path: path.clone() };
        match catch_panic(|| plugin.rebuild(&found)) {
            Ok(rebuilt) => {
                self.volumes.push(ReconstructedPodVolume { plugin: plugin.clone(), pod, path, mode, rebuilt })
            }
            Err(cause) => {
                warn!(podUID = %uid, path = %path.display(), err = %cause, "Could not construct volume information from its directory");
                self.failed += 1;
            }
        }
    }

    fn children(&mut self, path: &Path) -> Vec<PathBuf> {
        children(path).unwrap_or_else(|error| {
            warn!(path = %path.display(), err = %error, "Failed to read volume directory");
            self.failed += 1;
            Vec::new()
        })
    }
}

/// Catches a panic of a plugin, so that one volume does not prevent the reconstruction of the others.
fn catch_panic<T>(work: impl FnOnce() -> Result<T, String>) -> Result<T, String> {
    catch_unwind(AssertUnwindSafe(work)).unwrap_or_else(|panic| Err(panic_message(&*panic)))
}

fn name_of(path: &Path) -> Option<String> {
    path.file_name()?.to_str().map(str::to_owned)
}

/// Returns the entries of a directory; none if it does not exist. Does not read their types: `stat` on a mount could
/// hang.
pub fn children(path: &Path) -> io::Result<Vec<PathBuf>> {
    let entries = match fs::read_dir(path) {
        Ok(entries) => entries,
        Err(e) if matches!(e.kind(), io::ErrorKind::NotFound | io::ErrorKind::NotADirectory) => return Ok(Vec::new()),
        Err(e) => return Err(e),
    };
    let mut all = entries.map(|entry| Ok(entry?.path())).collect::<io::Result<Vec<PathBuf>>>()?;
    all.sort();
    Ok(all)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{attachable::VolumeTraits, testing::FakePlugin};

    #[test]
    fn what_cannot_be_read_is_not_empty() {
        let root = tempfile::tempdir().expect("a directory");
        let plugin = FakePlugin::new(VolumeTraits::default());
        let found = FoundVolume { pod: "".into(), name: "pv".to_owned(), mode: Mode::Filesystem, path: PathBuf::new() };
        let staged = (Mode::Filesystem, plugin.rebuild(&found).expect("understood"));
        let plugins: Vec<Arc<dyn AttachableVolumePlugin>> = vec![plugin.clone()];
        let scan = || scan(root.path(), &plugins);
        assert!(scan().is_ok_and(|left| left.volumes.is_empty() && left.failed == 0), "there are no pods yet");
        let place = |pod: &str| root.path().join("pods").join(pod).join("volumes/kubernetes.io~fake");
        fs::create_dir_all(place("a").join("pv")).expect("directories");
        fs::create_dir_all(place("b")).expect("directories");
        plugin.staged.lock().expect("not poisoned").push(staged);
        let left = scan().expect("read");
        assert_eq!((left.volumes.len(), left.staged.len(), left.failed), (1, 1, 0));
        // A symlink to itself is unreadable even for root.
        fs::remove_dir(place("b")).expect("removed");
        std::os::unix::fs::symlink(place("b"), place("b")).expect("a link");
        let left = scan().expect("the pods are known");
        assert_eq!((left.volumes.len(), left.staged.len(), left.failed), (1, 0, 1), "what is shared stays");
        fs::remove_dir_all(root.path().join("pods")).expect("removed");
        std::os::unix::fs::symlink("pods", root.path().join("pods")).expect("a link");
        assert!(scan().is_err(), "nothing is known");
    }

    #[test]
    fn a_device_without_its_link_is_found_by_its_mark() {
        let root = tempfile::tempdir().expect("a directory");
        let plugin = FakePlugin::new(VolumeTraits { stages: true, ..VolumeTraits::default() });
        let found = FoundVolume { pod: "".into(), name: "pv".to_owned(), mode: Mode::Filesystem, path: PathBuf::new() };
        let rebuilt = plugin.rebuild(&found).expect("understood");
        let marks = plugin.map_dir(root.path(), &rebuilt.spec);
        plugin.staged.lock().expect("not poisoned").push((Mode::Block, rebuilt));
        let plugins: Vec<Arc<dyn AttachableVolumePlugin>> = vec![plugin];
        fs::create_dir_all(&marks).expect("directories");
        assert!(scan(root.path(), &plugins).expect("read").volumes.is_empty());
        fs::write(marks.join("u"), "").expect("a mark");
        fs::write(marks.join("record.json"), "{}").expect("no mark");
        let left = scan(root.path(), &plugins).expect("read");
        let found: Vec<_> = left.volumes.iter().map(|one| (one.pod.as_str(), one.mode, one.path.clone())).collect();
        let link = root.path().join("pods/u/volumeDevices/kubernetes.io~fake/pv");
        assert_eq!((found, left.staged.len(), left.failed), (vec![("u", Mode::Block, link)], 1, 0));
        assert!(root.path().join("pods/u").is_dir(), "somebody looks for it");
    }

    #[test]
    fn a_plugin_that_breaks_on_one_volume_knows_the_others() {
        let root = tempfile::tempdir().expect("a directory");
        let plugins: Vec<Arc<dyn AttachableVolumePlugin>> = vec![FakePlugin::new(VolumeTraits::default())];
        for name in ["breaks", "odd", "pv"] {
            let place = root.path().join("pods/a/volumes/kubernetes.io~fake").join(name);
            fs::create_dir_all(place).expect("directories");
        }
        let left = scan(root.path(), &plugins).expect("read");
        assert_eq!((left.volumes.len(), left.failed), (1, 2));
    }
}
