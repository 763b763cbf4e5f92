//! emptyDir on disk. Behaviour: spec 07 §7.1.
//!
//! A marker beside the volume says that it is complete; without it, or without the directory, it
//! is made again.

use std::{
    fs::{self, DirBuilder, OpenOptions, Permissions},
    io,
    os::unix::fs::{DirBuilderExt, PermissionsExt},
    path::Path,
};

use tracing::warn;

use super::{SetUp, SetUpError};
use crate::{
    engine::ports::MountedVolume,
    volumes::{
        layout::EMPTY_DIR,
        ownership::{self, GroupAccess},
        remove,
    },
};

/// Everybody may write.
const MODE: u32 = 0o777;

/// Makes the directory.
pub fn set_up(request: &SetUp<'_>) -> Result<MountedVolume, SetUpError> {
    let medium = request.volume.empty_dir.as_ref().and_then(|e| e.medium.as_deref()).unwrap_or_default();
    match medium {
        "" => {}
        "Memory" | "HugePages" => return Err(SetUpError::Unsupported { kind: format!("emptyDir medium {medium}") }),
        huge if huge.starts_with("HugePages-") => {
            return Err(SetUpError::Unsupported { kind: format!("emptyDir medium {huge}") });
        }
        other => return Err(SetUpError::Medium(other.to_owned())),
    }
    let name = &request.volume.name;
    let dir = request.layout.volume(EMPTY_DIR, name);
    backing(&dir, &request.layout.marker(EMPTY_DIR, name), || {
        if let Some(group) = ownership::group_of(request.pod)
            && let Err(e) = ownership::apply(&dir, group, GroupAccess::ReadWrite)
        {
            warn!(volume = %name, err = %e, "Changing the owner of an emptyDir failed");
        }
    })?;
    Ok(MountedVolume { host_path: Some(dir), read_only: false, relabel: true, sub_path_mode: MODE })
}

/// Makes the directory that a volume lies in, unless its marker says that it is complete.
pub fn backing(dir: &Path, marker: &Path, own: impl FnOnce()) -> Result<(), SetUpError> {
    let ready = marker.join("ready");
    if ready.exists() {
        if dir.is_dir() {
            return Ok(());
        }
        remove::tree(marker).map_err(SetUpError::io("removing", marker))?;
    }
    make(dir, MODE).map_err(SetUpError::io("creating", dir))?;
    fs::set_permissions(dir, Permissions::from_mode(MODE)).map_err(SetUpError::io("changing the mode of", dir))?;
    own();
    make(marker, 0o750).map_err(SetUpError::io("creating", marker))?;
    let made = OpenOptions::new().create(true).write(true).truncate(false).open(&ready);
    made.map(drop).map_err(SetUpError::io("creating", &ready))
}

fn make(dir: &Path, mode: u32) -> io::Result<()> {
    DirBuilder::new().recursive(true).mode(mode).create(dir)
}
