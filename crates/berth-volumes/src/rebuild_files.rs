//! File-based volumes that an earlier agent left complete, counted in the metrics from startup on.
//!
//! Otherwise they would count only after the first sync of their pods. Blocking. Implements spec 07 §6.

use std::{fs, path::Path};

use super::{
    layout::{self, CONFIG_MAP, DOWNWARD_API, EMPTY_DIR, PROJECTED, PodLayout, SECRET},
    state_of_world::PluginName,
};
use berth_types::PodUid;

/// Directories of file-based volumes, with the names of their plugins.
const OWN: [(&str, PluginName); 5] = [
    (EMPTY_DIR, "kubernetes.io/empty-dir"),
    (DOWNWARD_API, "kubernetes.io/downward-api"),
    (CONFIG_MAP, "kubernetes.io/configmap"),
    (SECRET, "kubernetes.io/secret"),
    (PROJECTED, "kubernetes.io/projected"),
];

/// Complete volumes of one pod, by name.
pub type Complete = Vec<(String, PluginName)>;

/// Returns the complete volumes of all pods that have any. Ignores what cannot be read.
pub fn complete(root: &Path) -> Vec<(PodUid, Complete)> {
    let pods = names(&layout::pods(root)).into_iter().filter_map(|name| {
        let pod = PodUid::from(name);
        let layout = PodLayout::new(root, &pod).ok()?;
        let all: Complete = OWN.iter().flat_map(|(directory, plugin)| of(&layout, directory, plugin)).collect();
        (!all.is_empty()).then_some((pod, all))
    });
    pods.collect()
}

fn of(layout: &PodLayout, directory: &str, plugin: PluginName) -> Complete {
    let all = names(&layout.volumes().join(directory)).into_iter();
    let complete = all.filter(|name| layout.marker(directory, name).join("ready").exists());
    complete.map(|name| (name, plugin)).collect()
}

fn names(directory: &Path) -> Vec<String> {
    let entries = fs::read_dir(directory).into_iter().flatten().flatten();
    entries.filter_map(|entry| entry.file_name().into_string().ok()).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_complete_is_found() {
        let root = tempfile::tempdir().expect("a directory");
        assert_eq!(complete(root.path()), [], "no pods");
        let layout = PodLayout::new(root.path(), &"u".into()).expect("a good name");
        for (plugin, name, is_ready) in
            [(EMPTY_DIR, "cache", true), (SECRET, "half", false), (PROJECTED, "token", true), ("other~kind", "x", true)]
        {
            fs::create_dir_all(layout.volume(plugin, name)).expect("writable");
            if is_ready {
                let marker = layout.marker(plugin, name);
                fs::create_dir_all(&marker).expect("writable");
                fs::write(marker.join("ready"), "").expect("writable");
            }
        }
        fs::create_dir_all(layout::pods(root.path()).join("foreign")).expect("writable");
        let all = [("cache".to_owned(), "kubernetes.io/empty-dir"), ("token".to_owned(), "kubernetes.io/projected")];
        assert_eq!(complete(root.path()), [(PodUid::from("u"), all.to_vec())]);
    }
}
