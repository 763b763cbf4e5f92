//! What an earlier agent left of volumes that are more than files, read from the directories of pods without
//! looking at any volume. Blocking. Behaviour: spec 07 §6.

use std::{
    fs,
    path::{Path, PathBuf},
    sync::Arc,
};

use tracing::warn;

use super::{
    device::{DevicePlugin, Found},
    layout,
    owner::{Leftover, Staged},
    spec::Mode,
};
use crate::pod::PodUid;

/// What was found.
#[derive(Default)]
pub struct Left {
    /// Understood.
    pub volumes: Vec<Leftover>,
    /// Not understood.
    pub failed: usize,
    /// Staged, whether a pod has it or not.
    pub staged: Vec<Staged>,
}

/// Looks through the directories of all pods.
pub fn scan(root: &Path, plugins: &[Arc<dyn DevicePlugin>]) -> Left {
    let mut left = Left::default();
    for pod in children(&layout::pods(root)) {
        let Some(uid) = name_of(&pod) else { continue };
        for (folder, mode) in [("volumes", Mode::Filesystem), ("volumeDevices", Mode::Block)] {
            for place in children(&pod.join(folder)) {
                let name = name_of(&place).unwrap_or_default().replace('~', "/");
                let Some(plugin) = plugins.iter().find(|plugin| plugin.name() == name) else { continue };
                for path in children(&place) {
                    one(&mut left, plugin, &uid, path, mode);
                }
            }
        }
    }
    for plugin in plugins {
        let staged = plugin.staged().into_iter();
        left.staged.extend(staged.map(|(mode, rebuilt)| Staged { plugin: plugin.clone(), mode, rebuilt }));
    }
    if left.failed > 0 {
        // What is not understood may be one of these.
        left.staged.clear();
    }
    left
}

fn one(left: &mut Left, plugin: &Arc<dyn DevicePlugin>, uid: &str, path: PathBuf, mode: Mode) {
    let Some(name) = name_of(&path) else { return };
    let pod = PodUid::from(uid);
    match plugin.rebuild(&Found { pod: pod.clone(), name, mode, path: path.clone() }) {
        Ok(rebuilt) => left.volumes.push(Leftover { plugin: plugin.clone(), pod, path, mode, rebuilt }),
        Err(cause) => {
            warn!(podUID = %uid, path = %path.display(), err = %cause, "Could not construct volume information from its directory");
            left.failed += 1;
        }
    }
}

fn name_of(path: &Path) -> Option<String> {
    path.file_name()?.to_str().map(str::to_owned)
}

/// The entries of a directory. Their kinds are not asked for: that of a mount could hang.
fn children(path: &Path) -> Vec<PathBuf> {
    let mut all: Vec<PathBuf> = fs::read_dir(path).into_iter().flatten().flatten().map(|entry| entry.path()).collect();
    all.sort();
    all
}
