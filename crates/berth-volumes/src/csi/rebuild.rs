//! Reconstruction of CSI volumes that an earlier agent left. Blocking.
//!
//! Reads records and the mount table, never a volume. Implements spec 07 §6, §12.4, §12.7, §17.

use std::{
    path::{Path, PathBuf},
    sync::Arc,
};

use tracing::{debug, warn};

use super::{
    block::clear_block,
    disk::{clear, mounted},
    node_publish::mount_point,
    paths::{BLOCK, CsiLayout, PLUGIN},
    record::{CsiVolumeRecord, Lifecycle},
    source::CsiVolume,
};
use crate::{
    attachable::{FoundVolume, ReconstructedVolume, VolumeTraits},
    rebuild::children,
    spec::{Mode, VolumeSpec},
};
use berth_types::{PodUid, api};

/// Maximum number of staged volumes that are listed.
const MOST: usize = 4096;

/// Reconstructs the volume of a directory.
///
/// # Errors
/// If its record is missing or invalid, and something may be mounted there.
pub fn rebuild(layout: &CsiLayout, found: &FoundVolume) -> Result<ReconstructedVolume, String> {
    let directory = match found.mode {
        Mode::Filesystem => found.path.clone(),
        Mode::Block => layout.block(&found.name).map_err(|error| error.to_string())?.data,
    };
    match CsiVolumeRecord::read(&directory) {
        Ok(Some(record)) => Ok(of_record(&record, found)),
        read => {
            let cause = read.err().map_or_else(|| "no such file".to_owned(), |error| error.to_string());
            let is_empty = found.mode == Mode::Filesystem && matches!(mounted(&mount_point(&found.path)), Ok(None));
            if is_empty {
                // The set-up was just starting, or the teardown almost complete, when the agent ended.
                return Ok(empty_volume(found));
            }
            let path = directory.join(super::paths::RECORD);
            Err(format!("{PLUGIN}: failed to load volume data file [{}]: {cause}", path.display()))
        }
    }
}

fn of_record(record: &CsiVolumeRecord, found: &FoundVolume) -> ReconstructedVolume {
    if record.lifecycle == Some(Lifecycle::Ephemeral) {
        let csi = api::CSIVolumeSource { driver: record.driver.clone(), ..api::CSIVolumeSource::default() };
        let volume = api::Volume { name: found.name.clone(), csi: Some(csi), ..api::Volume::default() };
        return with_traits(VolumeSpec::inline(&volume), &found.pod).labelled(record);
    }
    with_traits(persistent(record, &found.name, found.mode), &found.pod).labelled(record)
}

/// Returns a volume of which only its directory is left.
fn empty_volume(found: &FoundVolume) -> ReconstructedVolume {
    let csi = Some(api::CSIVolumeSource::default());
    let volume = api::Volume { name: found.name.clone(), csi, ..api::Volume::default() };
    with_traits(VolumeSpec::inline(&volume), &found.pod)
}

fn persistent(record: &CsiVolumeRecord, name: &str, mode: Mode) -> VolumeSpec {
    let csi = api::CSIPersistentVolumeSource {
        driver: record.driver.clone(),
        volume_handle: record.handle.clone(),
        ..api::CSIPersistentVolumeSource::default()
    };
    let mut volume = api::PersistentVolume::default();
    volume.metadata.name = Some(name.to_owned());
    volume.spec = Some(api::PersistentVolumeSpec {
        csi: Some(csi),
        volume_mode: Some(mode.as_str().to_owned()),
        ..api::PersistentVolumeSpec::default()
    });
    VolumeSpec::persistent(Arc::new(volume), Arc::default(), false)
}

fn with_traits(spec: VolumeSpec, pod: &PodUid) -> ReconstructedVolume {
    let volume = CsiVolume::of(&spec, "", pod).unwrap_or_default();
    let traits = VolumeTraits {
        volume: volume.name(),
        label: volume.label(),
        is_migrated: false,
        // The `CSIDriver` object decides whether attachment is required, and is not available here.
        attachable: !volume.is_inline,
        stages: !volume.is_inline,
        mount_options: true,
        republishes: false,
        expands: !volume.is_inline,
        supports_mount_label: false,
    };
    ReconstructedVolume { spec, traits, label: None }
}

impl ReconstructedVolume {
    /// Adds the SELinux label of the record.
    fn labelled(self, record: &CsiVolumeRecord) -> Self {
        Self { label: Some(record.label.clone()).filter(|label| !label.is_empty()), ..self }
    }
}

/// Lists the staged volumes, whether or not a pod uses them: one without a pod was left by an agent that ended before
/// it completed the stage or unstage.
///
/// # Errors
/// If a directory or record cannot be read, so that its state is unknown.
pub fn staged(layout: &CsiLayout) -> Result<Vec<(Mode, ReconstructedVolume)>, String> {
    let mut found = Vec::new();
    for driver in listed(layout.root())? {
        let is_block = driver.file_name().is_some_and(|name| name == BLOCK);
        for path in listed(&driver)? {
            found.extend(if is_block { staged_block(layout, &path)? } else { staged_filesystem(&path)? });
        }
        if found.len() >= MOST {
            break;
        }
    }
    Ok(found)
}

fn staged_filesystem(directory: &Path) -> Result<Option<(Mode, ReconstructedVolume)>, String> {
    let Some(record) = read_record(directory)? else {
        // The directory was created but not recorded yet, or its record is removed and the directory not yet.
        log_not_cleared(directory, clear(&directory.join("globalmount"), ["", "", ""]));
        return Ok(None);
    };
    if record.driver.is_empty() {
        return Ok(None);
    }
    // The name is not needed for the teardown, but appears in messages.
    let spec = persistent(&record, &record.handle, Mode::Filesystem);
    Ok(Some((Mode::Filesystem, with_traits(spec, &"".into()).labelled(&record))))
}

fn staged_block(layout: &CsiLayout, directory: &Path) -> Result<Option<(Mode, ReconstructedVolume)>, String> {
    let Some(name) = directory.file_name().and_then(|name| name.to_str()) else { return Ok(None) };
    let Ok(block) = layout.block(name) else { return Ok(None) };
    if matches!(name, "staging" | "publish") {
        return Ok(None);
    }
    let Some(record) = read_record(&block.data)? else {
        log_not_cleared(directory, clear_block(&block));
        return Ok(None);
    };
    if record.driver.is_empty() {
        return Ok(None);
    }
    Ok(Some((Mode::Block, with_traits(persistent(&record, name, Mode::Block), &"".into()))))
}

/// An invalid record describes nothing that could be undone; an unreadable one may.
fn read_record(directory: &Path) -> Result<Option<CsiVolumeRecord>, String> {
    match CsiVolumeRecord::read(directory) {
        Err(error) if error.raw_os_error().is_none() => {
            warn!(path = %directory.display(), err = %error, "Volume data file of staged volume is invalid");
            Ok(Some(CsiVolumeRecord::default()))
        }
        Err(error) => Err(format!("{PLUGIN}: reading volume data file in {}: {error}", directory.display())),
        Ok(read) => Ok(read),
    }
}

fn listed(directory: &Path) -> Result<Vec<PathBuf>, String> {
    let found = children(directory).map_err(|error| format!("{PLUGIN}: listing {}: {error}", directory.display()))?;
    Ok(found.into_iter().take(MOST).collect())
}

/// Keeps a directory that cannot be cleared: it may contain data.
fn log_not_cleared(directory: &Path, done: Result<(), impl std::fmt::Display>) {
    if let Err(error) = done {
        debug!(path = %directory.display(), err = %error, "Leaving directory without volume data file in place");
    }
}

#[cfg(test)]
mod tests {
    use std::fs;

    use super::*;
    use crate::csi::{disk::make, paths::inline_handle};

    fn record(lifecycle: Option<Lifecycle>) -> CsiVolumeRecord {
        let (driver, handle, spec) = ("d".to_owned(), "h".to_owned(), "pv".to_owned());
        CsiVolumeRecord { driver, handle, spec, lifecycle, ..CsiVolumeRecord::default() }
    }

    fn found(root: &Path, mode: Mode) -> FoundVolume {
        let path = root.join("pods/u/volumes/kubernetes.io~csi/pv");
        FoundVolume { pod: "u".into(), name: "pv".to_owned(), mode, path }
    }

    #[test]
    fn a_volume_is_reconstructed_from_its_record() {
        // AC-07-20
        let root = tempfile::tempdir().expect("a directory");
        let (layout, volume) = (CsiLayout::new(root.path()), found(root.path(), Mode::Filesystem));
        make(&volume.path).expect("made");
        record(Some(Lifecycle::Persistent)).write(&volume.path).expect("written");
        let known = rebuild(&layout, &volume).expect("known");
        assert_eq!((known.spec.name.as_str(), known.traits.volume.as_str()), ("pv", "d^h"));
        assert!(known.traits.stages && known.traits.attachable && known.spec.as_persistent().is_some());
        assert_eq!(known.label, None);
        let label = "u:r:t:s0".to_owned();
        let labelled = CsiVolumeRecord { label: label.clone(), ..record(Some(Lifecycle::Persistent)) };
        labelled.write(&volume.path).expect("written");
        assert_eq!(rebuild(&layout, &volume).expect("known").label, Some(label));

        record(Some(Lifecycle::Ephemeral)).write(&volume.path).expect("written");
        let known = rebuild(&layout, &volume).expect("known");
        assert_eq!(known.traits.volume, format!("d^{}", inline_handle(&"u".into(), "pv")));
        assert!(!known.traits.is_shared());

        let block = found(root.path(), Mode::Block);
        let text = rebuild(&layout, &block).expect_err("no record");
        assert!(text.contains("volumeDevices/pv/data/vol_data.json]: no such file"), "{text}");
        let data = layout.block("pv").expect("a good name").data;
        make(&data).expect("made");
        record(None).write(&data).expect("written");
        assert_eq!(rebuild(&layout, &block).expect("known").spec.mode(), Mode::Block);
    }

    #[test]
    fn a_directory_without_a_valid_record_does_not_fail_the_reconstruction() {
        let root = tempfile::tempdir().expect("a directory");
        let (layout, volume) = (CsiLayout::new(root.path()), found(root.path(), Mode::Filesystem));
        make(&volume.path).expect("made");
        for text in [None, Some(""), Some("{")] {
            if let Some(text) = text {
                fs::write(volume.path.join("vol_data.json"), text).expect("written");
            }
            let known = rebuild(&layout, &volume).expect("nothing is mounted there");
            assert!(!known.traits.is_shared(), "{text:?}");
        }
    }

    #[test]
    fn what_no_pod_has_is_found_too() {
        let root = tempfile::tempdir().expect("a directory");
        let layout = CsiLayout::new(root.path());
        let staged = |layout: &CsiLayout| staged(layout).expect("readable");
        assert!(staged(&layout).is_empty());
        let staging = layout.staging("d", "h").expect("a good name");
        make(&staging).expect("made");
        assert!(staged(&layout).is_empty(), "nothing was begun");
        assert!(!staging.exists(), "and nothing is left of it");
        make(&staging).expect("made");
        record(None).write(staging.parent().expect("a parent")).expect("written");
        let data = layout.block("pv").expect("a good name").data;
        make(&data).expect("made");
        record(None).write(&data).expect("written");
        fs::write(layout.root().join("stray"), "x").expect("written");
        let all: Vec<_> = staged(&layout).into_iter().map(|(mode, known)| (mode, known.traits.volume)).collect();
        assert_eq!(all, [(Mode::Filesystem, "d^h".to_owned()), (Mode::Block, "d^h".to_owned())]);
    }
}
