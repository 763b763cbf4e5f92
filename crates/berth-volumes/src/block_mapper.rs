//! Block volume mapping: symlink, bind mount, and loop device that keep a raw device for a pod.
//!
//! Runs on the blocking pool; the caller sets the timeout. The file on which the device is bound exists before any
//! other step for the pod and is removed last: it shows a later agent that there may be something to undo. Implements
//! spec 07 §4.4.

use std::{
    fs::{self, DirBuilder, OpenOptions},
    io,
    os::unix::fs::{DirBuilderExt, FileTypeExt, OpenOptionsExt, symlink},
    path::{Path, PathBuf},
};

use rustix::{
    io::Errno,
    mount::{UnmountFlags, mount_bind, unmount},
};
use tokio::process::Command;

use super::{attachable::OpError, operation::Operation, rebuild};
use berth_sys::failpoint;
use berth_types::PodUid;

/// Mapping of one device to one pod.
#[derive(Clone, Debug)]
pub struct Map {
    /// Device path; empty where unknown.
    pub device: PathBuf,
    /// Directory with an entry per pod that uses the device (`globalMapPath`).
    pub global: PathBuf,
    /// UID of the pod.
    pub pod: PodUid,
    /// Symlink of the pod below its `volumeDevices`.
    pub link: PathBuf,
    /// Operation in progress.
    pub operation: Operation,
}

fn io_error(action: &str, path: &Path) -> impl Fn(io::Error) -> String {
    let path = path.display().to_string();
    move |cause| format!("{action} {path}: {cause}")
}

async fn blocking<T: Send + 'static>(
    operation: &Operation,
    work: impl FnOnce() -> Result<T, String> + Send + 'static,
) -> Result<T, String> {
    let done = operation.blocking(move || work().map_err(OpError::uncertain)).await;
    done.map_err(|error| error.text)
}

impl Map {
    fn file(&self) -> PathBuf {
        self.global.join(self.pod.as_str())
    }
}

/// Creates the mark (an empty file) that the pod may get the device.
///
/// # Errors
/// If a directory or the file cannot be created.
pub async fn mark(map: &Map) -> Result<(), String> {
    let own = map.clone();
    blocking(&map.operation, move || {
        // Cleanup finds only pods that have a directory.
        for directory in own.link.parent().into_iter().chain([own.global.as_path()]) {
            let made = DirBuilder::new().recursive(true).mode(0o750).create(directory);
            made.map_err(io_error("creating", directory))?;
        }
        let file = own.file();
        if !is_device(&file) {
            let made = OpenOptions::new().create(true).append(true).mode(0o640).open(&file);
            made.map_err(io_error("creating", &file))?;
        }
        failpoint::reached("block.marked");
        Ok(())
    })
    .await
}

/// Maps the device to a pod that was [marked](mark); returns the device path with symlinks resolved.
///
/// # Errors
/// If a bind mount, symlink, or loop device cannot be created.
pub async fn map(map: &Map) -> Result<PathBuf, String> {
    let own = map.clone();
    let (device, file) = blocking(&map.operation, move || {
        let device = fs::canonicalize(&own.device).map_err(io_error("resolving", &own.device))?;
        let file = own.file();
        if !is_device(&file) {
            mount_bind(&device, &file).map_err(|e| io_error("bind mounting device at", &file)(e.into()))?;
        }
        failpoint::reached("block.bound");
        relink(&device, &own.link)?;
        failpoint::reached("block.linked");
        Ok((device, file))
    })
    .await?;
    if loop_of(&map.operation, file.clone()).await?.is_none() {
        run(&map.operation, "losetup", &["-f".as_ref(), file.as_os_str()]).await?;
    }
    failpoint::reached("block.pinned");
    Ok(device)
}

/// Whether the path is a pod's mark, with or without a device bound on it.
pub fn is_mark(path: &Path) -> bool {
    fs::symlink_metadata(path)
        .is_ok_and(|meta| meta.file_type().is_block_device() || (meta.is_file() && meta.len() == 0))
}

fn is_device(file: &Path) -> bool {
    fs::metadata(file).is_ok_and(|meta| meta.file_type().is_block_device())
}

/// Recreates the symlink: after a reboot the device may have another name.
fn relink(device: &Path, link: &Path) -> Result<(), String> {
    if let Some(parent) = link.parent() {
        DirBuilder::new().recursive(true).mode(0o750).create(parent).map_err(io_error("creating", parent))?;
    }
    ignore_not_found(fs::remove_file(link)).map_err(io_error("removing", link))?;
    symlink(device, link).map_err(io_error("linking", link))
}

/// A caller that found the volume only by its mark may not know the symlink's name; then `link` is no symlink.
fn unlink(link: &Path) -> Result<(), String> {
    if fs::symlink_metadata(link).is_ok_and(|meta| meta.is_symlink()) {
        ignore_not_found(fs::remove_file(link)).map_err(io_error("removing", link))?;
    }
    Ok(())
}

/// Unmaps the device from the pod; its mark stays until it is [removed](forget).
///
/// # Errors
/// If the loop device, symlink, or bind mount cannot be removed.
pub async fn unmap(map: &Map) -> Result<(), String> {
    let file = map.file();
    if let Some(device) = loop_of(&map.operation, file.clone()).await? {
        // The loop device may be detached already.
        let detached = run(&map.operation, "losetup", &["-d".as_ref(), device.as_os_str()]).await;
        if loop_of(&map.operation, file.clone()).await?.is_some() {
            detached?;
        }
    }
    failpoint::reached("block.released");
    let link = map.link.clone();
    blocking(&map.operation, move || {
        unlink(&link)?;
        failpoint::reached("block.unlinked");
        match unmount(&file, UnmountFlags::NOFOLLOW) {
            Ok(()) | Err(Errno::INVAL | Errno::NOENT) => {}
            Err(e) => return Err(io_error("unmounting", &file)(e.into())),
        }
        failpoint::reached("block.unbound");
        Ok(())
    })
    .await
}

/// Removes the pod's mark, the last trace of the device.
///
/// # Errors
/// If the file cannot be removed.
pub async fn forget(map: &Map) -> Result<(), String> {
    let file = map.file();
    blocking(&map.operation, move || ignore_not_found(fs::remove_file(&file)).map_err(io_error("removing", &file)))
        .await?;
    failpoint::reached("block.forgotten");
    Ok(())
}

/// Fails while any pod still has the device bound.
///
/// # Errors
/// Names the pods' entries.
pub async fn check_unmapped(operation: &Operation, global: &Path) -> Result<(), String> {
    let global = global.to_owned();
    blocking(operation, move || {
        let entries = match fs::read_dir(&global) {
            Ok(entries) => entries,
            Err(e) if e.kind() == io::ErrorKind::NotFound => return Ok(()),
            Err(e) => return Err(io_error("listing", &global)(e)),
        };
        let mut users = Vec::new();
        for entry in entries {
            let entry = entry.map_err(io_error("listing", &global))?;
            match entry.metadata() {
                Ok(meta) if meta.file_type().is_block_device() => users.push(entry.path().display().to_string()),
                Err(e) if e.kind() != io::ErrorKind::NotFound => return Err(io_error("stat", &entry.path())(e)),
                Ok(_) | Err(_) => {}
            }
        }
        if users.is_empty() {
            return Ok(());
        }
        let device = global.display().to_string();
        Err(format!("the device {device:?} is still referenced from other Pods [{}]", users.join(" ")))
    })
    .await
}

/// Removes marks of pods that never got the device.
///
/// # Errors
/// If a mark cannot be removed.
pub async fn clear_marks(operation: &Operation, global: &Path) -> Result<(), String> {
    let global = global.to_owned();
    blocking(operation, move || {
        for entry in rebuild::children(&global).map_err(io_error("listing", &global))? {
            let is_mark = fs::symlink_metadata(&entry).is_ok_and(|meta| meta.is_file() && meta.len() == 0);
            if is_mark {
                ignore_not_found(fs::remove_file(&entry)).map_err(io_error("removing", &entry))?;
            }
        }
        Ok(())
    })
    .await
}

/// Removes the directory with the entries of all pods (`globalMapPath`).
///
/// # Errors
/// If the directory is not empty.
pub async fn remove_dir(operation: &Operation, global: &Path) -> Result<(), String> {
    let global = global.to_owned();
    blocking(operation, move || ignore_not_found(fs::remove_dir(&global)).map_err(io_error("removing", &global))).await
}

/// Fails while the device is open (exclusive open returns `EBUSY`).
///
/// # Errors
/// If the device is in use.
pub async fn check_not_open(operation: &Operation, device: &str) -> Result<(), String> {
    if device.is_empty() {
        return Ok(());
    }
    let device = PathBuf::from(device);
    blocking(operation, move || {
        if !fs::metadata(&device).is_ok_and(|meta| meta.file_type().is_block_device()) {
            return Ok(());
        }
        let exclusive = i32::try_from(rustix::fs::OFlags::EXCL.bits()).unwrap_or_default();
        match OpenOptions::new().read(true).custom_flags(exclusive).open(&device) {
            Err(e) if e.raw_os_error() == Some(Errno::BUSY.raw_os_error()) => {
                Err("the device is in use when it was no longer expected to be in use".to_owned())
            }
            _ => Ok(()),
        }
    })
    .await
}

/// Finds the loop device that is backed by a file.
async fn loop_of(operation: &Operation, file: PathBuf) -> Result<Option<PathBuf>, String> {
    blocking(operation, move || Ok(loop_on(Path::new("/sys/block"), &file))).await
}

fn loop_on(blocks: &Path, file: &Path) -> Option<PathBuf> {
    let mut found: Vec<PathBuf> = fs::read_dir(blocks).ok()?.flatten().map(|entry| entry.path()).collect();
    found.sort();
    found.into_iter().find_map(|entry| {
        let name = entry.file_name()?.to_str()?.to_owned();
        let backing = fs::read_to_string(entry.join("loop/backing_file")).ok()?;
        let backing = backing.trim_end_matches('\n');
        let backing = backing.strip_suffix(" (deleted)").unwrap_or(backing);
        (name.starts_with("loop") && Path::new(backing) == file).then(|| Path::new("/dev").join(name))
    })
}

async fn run(operation: &Operation, program: &str, arguments: &[&std::ffi::OsStr]) -> Result<(), String> {
    let mut command = Command::new(program);
    command.args(arguments);
    let done = operation.run(command).await;
    let output = done.map_err(|e| format!("running {program}: {e}"))?;
    if output.status.success() {
        return Ok(());
    }
    Err(format!("{program} failed: {}: {}", output.status, String::from_utf8_lossy(&output.stderr).trim()))
}

fn ignore_not_found(removed: io::Result<()>) -> io::Result<()> {
    match removed {
        Err(e) if e.kind() == io::ErrorKind::NotFound => Ok(()),
        other => other,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_loop_device_is_found_by_its_file() {
        let dir = tempfile::tempdir().expect("a directory");
        for (name, backing) in
            [("loop0", Some("/other\n")), ("loop1", None), ("loop2", Some("/map/pod (deleted)\n")), ("sda", None)]
        {
            let folder = dir.path().join(name).join("loop");
            fs::create_dir_all(&folder).expect("a directory");
            if let Some(backing) = backing {
                fs::write(folder.join("backing_file"), backing).expect("a file");
            }
        }
        let found = |file: &str| loop_on(dir.path(), Path::new(file));
        assert_eq!(found("/map/pod"), Some(PathBuf::from("/dev/loop2")));
        assert_eq!(found("/other"), Some(PathBuf::from("/dev/loop0")));
        assert_eq!(found("/none"), None);
    }

    #[tokio::test]
    async fn a_link_always_leads_to_the_device_of_now() {
        let dir = tempfile::tempdir().expect("a directory");
        let link = dir.path().join("volumeDevices/p/v");
        relink(Path::new("/dev/one"), &link).expect("linked");
        relink(Path::new("/dev/two"), &link).expect("linked again");
        assert_eq!(fs::read_link(&link).expect("a link"), PathBuf::from("/dev/two"));
        unlink(&dir.path().join("volumeDevices/p/")).expect("a directory is no link");
        for _ in 0..2 {
            unlink(&link).expect("it goes, and may have gone");
            assert!(fs::symlink_metadata(&link).is_err());
        }
        let operation = Operation::default();
        let marks = dir.path().join("dev");
        fs::create_dir(&marks).expect("a directory");
        fs::write(marks.join("uid"), "").expect("a mark");
        fs::write(marks.join("record.json"), "{}").expect("a record");
        assert!(is_mark(&marks.join("uid")) && !is_mark(&marks.join("record.json")) && !is_mark(&marks));
        clear_marks(&operation, &marks).await.expect("cleared");
        assert_eq!(rebuild::children(&marks).expect("listed"), [marks.join("record.json")]);
        clear_marks(&operation, &dir.path().join("none")).await.expect("nothing there");
        check_unmapped(&operation, &dir.path().join("none")).await.expect("nobody");
        remove_dir(&operation, &dir.path().join("none")).await.expect("nothing there");
        check_not_open(&operation, "/dev/null").await.expect("not a block device");
    }
}
