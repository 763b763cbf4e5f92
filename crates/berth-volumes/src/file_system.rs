//! File systems on block devices: probe, format if blank, check, mount, and grow.
//!
//! Runs the programs of util-linux and e2fsprogs. Implements spec 07 §14.

use std::{ffi::OsStr, fs::File, io::Read, path::Path, time::Duration};

use tokio::time::timeout;
use tracing::{info, warn};

use super::{
    attachable::{ErrorCause, OpError},
    machine::{self, KillPolicy, ProgramExit, Work},
};

/// Bytes read to check that a device is readable, and the timeout of that read.
const PROBED: usize = 4096;
const READING: Duration = Duration::from_secs(30);

/// File system or partition table that `blkid` reports; blank otherwise.
#[derive(Clone, PartialEq, Eq, Debug)]
enum DeviceContent {
    Nothing,
    Filesystem(String),
    Unknown,
}

/// Parses the result of `blkid -p -s TYPE -s PTTYPE -o export`.
fn content(ended: &ProgramExit) -> Result<DeviceContent, OpError> {
    if ended.code == Some(2) {
        return Ok(DeviceContent::Nothing);
    }
    if !ended.is_success() {
        return Err(OpError::failed(format!("blkid failed: {}", ended.how)));
    }
    let value =
        |key: &str| ended.output.lines().find_map(|line| line.strip_prefix(key)).filter(|value| !value.is_empty());
    Ok(match (value("TYPE="), value("PTTYPE=")) {
        (_, Some(_)) => DeviceContent::Unknown,
        (Some(kind), None) => DeviceContent::Filesystem(kind.to_owned()),
        // `blkid` found something that it cannot name: must not be formatted.
        (None, None) => DeviceContent::Unknown,
    })
}

async fn run<S: AsRef<OsStr>>(
    work: &Work,
    program: &str,
    arguments: impl IntoIterator<Item = S>,
) -> Result<ProgramExit, OpError> {
    let arguments: Vec<String> = arguments.into_iter().map(|one| one.as_ref().to_string_lossy().into_owned()).collect();
    let ended = work.run(program, &arguments, KillPolicy::Never).await;
    ended.map_err(|e| OpError::failed(format!("running {program}: {e}")))
}

fn text(ended: &ProgramExit) -> &str {
    berth_types::cut_at_char(&ended.output, 1024)
}

/// Checks that the device is readable: `blkid` reports an unreadable device as blank, and a blank device is formatted.
async fn readable(work: &Work, device: &Path) -> Result<(), OpError> {
    let (path, device_name) = (device.to_owned(), device.display().to_string());
    let cannot = move |cause: String| OpError::transient(format!("cannot read {device_name}: {cause}"));
    let fails = cannot.clone();
    let reading = work.operation().blocking(move || {
        let read = File::open(path).and_then(|mut file| file.read_exact(&mut [0; PROBED]));
        read.map_err(|error| fails(error.to_string()))
    });
    timeout(READING, reading).await.unwrap_or_else(|_| Err(cannot(format!("timed out after {READING:?}"))))
}

async fn detect_content(work: &Work, device: &Path) -> Result<DeviceContent, OpError> {
    readable(work, device).await?;
    let found = probe(work, device).await?;
    if found == DeviceContent::Nothing {
        readable(work, device).await?; // the device may have failed in between
    }
    Ok(found)
}

async fn probe(work: &Work, device: &Path) -> Result<DeviceContent, OpError> {
    let base = ["-p", "-s", "TYPE", "-s", "PTTYPE", "-o", "export"].map(OsStr::new);
    content(&run(work, "blkid", base.into_iter().chain([device.as_os_str()])).await?)
}

/// Mounts the device, after formatting it if it is blank. Never formats unknown content.
///
/// # Errors
/// With the message of the upstream kubelet.
pub async fn format_and_mount(
    work: &Work,
    device: &Path,
    target: &Path,
    kind: &str,
    given: &[String],
    read_only: bool,
) -> Result<(), OpError> {
    // The type becomes part of a program name.
    if kind.is_empty() || !kind.bytes().all(|b| b.is_ascii_alphanumeric() || b"._-".contains(&b)) {
        return Err(OpError::failed(format!("{kind:?} is not a valid file system type")));
    }
    let found = detect_content(work, device).await?;
    match &found {
        DeviceContent::Nothing if read_only => {
            let device = device.display();
            let cause = format!("cannot mount unformatted disk {device} as we are manipulating it in read-only mode");
            return Err(OpError::failed(cause));
        }
        DeviceContent::Nothing => make(work, device, kind).await?,
        DeviceContent::Filesystem(_) if !read_only => check(work, device).await?,
        DeviceContent::Filesystem(_) => {}
        DeviceContent::Unknown => {
            warn!(device = %device.display(), "Device contains unknown data, probably partitions; not formatting")
        }
    }
    let options = machine::options(given, if read_only { &["defaults", "ro"] } else { &["defaults"] });
    let arguments = machine::mount_arguments(kind, &options, &device.display().to_string(), target);
    let (program, arguments) = scoped(needs_scope(kind), target, arguments);
    let output = run(work, program, &arguments).await?;
    if output.is_success() {
        return Ok(());
    }
    let cause = machine::mount_failed(&output.how, program, &arguments, &output.output);
    match found {
        DeviceContent::Filesystem(other) if other != kind => {
            let cause =
                format!("failed to mount the volume as {kind:?}, it already contains {other}. Mount error: {cause}");
            Err(OpError::failed(cause).with_cause(ErrorCause::WrongFilesystem))
        }
        DeviceContent::Unknown => {
            let cause = format!(
                "failed to mount the volume as {kind:?}, it already contains unknown data, probably partitions. Mount error: {cause}"
            );
            Err(OpError::failed(cause).with_cause(ErrorCause::WrongFilesystem))
        }
        _ => Err(OpError::failed(cause)),
    }
}

/// Whether a userspace program may keep serving the mount: such a program must outlive this agent and therefore its
/// systemd unit. A kernel file system has no such program (spec 07 §14, §17).
fn needs_scope(kind: &str) -> bool {
    let is_helper = |folder: &str| Path::new(folder).join(format!("mount.{kind}")).exists();
    Path::new("/run/systemd/system").is_dir() && ["/sbin", "/usr/sbin", "/usr/bin"].into_iter().any(is_helper)
}

/// Returns the mount command, in a systemd scope of its own where needed. Pure.
fn scoped(needs_scope: bool, target: &Path, arguments: Vec<String>) -> (&'static str, Vec<String>) {
    if !needs_scope {
        return ("mount", arguments);
    }
    let description = format!("--description=Kubernetes transient mount for {}", target.display());
    let scope = [description, "--scope".to_owned(), "--".to_owned(), "mount".to_owned()];
    ("systemd-run", scope.into_iter().chain(arguments).collect())
}

async fn make(work: &Work, device: &Path, kind: &str) -> Result<(), OpError> {
    info!(device = %device.display(), fstype = kind, "Disk appears to be unformatted, attempting to format");
    let options: &[&str] = match kind {
        "ext3" | "ext4" => &["-F", "-m0"],
        "xfs" => &["-f"],
        _ => &[],
    };
    let arguments = options.iter().map(OsStr::new).chain([device.as_os_str()]);
    let output = run(work, &format!("mkfs.{kind}"), arguments).await?;
    if output.is_success() {
        return Ok(());
    }
    let cause = format!("format of disk {} failed: {}: {}", device.display(), output.how, text(&output));
    Err(OpError::failed(cause))
}

/// Runs `fsck -a`; errors that it corrected, and unknown exit codes, do not prevent the mount.
async fn check(work: &Work, device: &Path) -> Result<(), OpError> {
    let Ok(output) = run(work, "fsck", [OsStr::new("-a"), device.as_os_str()]).await else {
        warn!("'fsck' not found on system; continuing mount without running 'fsck'");
        return Ok(());
    };
    match output.code {
        Some(0) => Ok(()),
        Some(1) => {
            info!(device = %device.display(), "Device has errors which were corrected by fsck");
            Ok(())
        }
        Some(4) => {
            let cause = format!(
                "'fsck' found errors on device {} but could not correct them: {}",
                device.display(),
                text(&output)
            );
            Err(OpError::failed(cause))
        }
        code => {
            warn!(device = %device.display(), ?code, output = %text(&output), "`fsck` error");
            Ok(())
        }
    }
}

/// Grows the file system to the size of its device; a blank device needs nothing.
///
/// # Errors
/// If the file system type is not supported or cannot be grown.
pub async fn grow(work: &Work, device: &Path, mounted: &Path) -> Result<(), OpError> {
    let kind = match detect_content(work, device).await? {
        DeviceContent::Nothing => return Ok(()),
        DeviceContent::Filesystem(kind) => kind,
        DeviceContent::Unknown => "unknown data".to_owned(),
    };
    let (program, arguments): (&str, Vec<&OsStr>) = match kind.as_str() {
        "ext3" | "ext4" => ("resize2fs", vec![device.as_os_str()]),
        "xfs" => ("xfs_growfs", vec![OsStr::new("-d"), mounted.as_os_str()]),
        "btrfs" => {
            ("btrfs", vec![OsStr::new("filesystem"), OsStr::new("resize"), OsStr::new("max"), mounted.as_os_str()])
        }
        other => {
            let cause = format!(
                "resize of format {other} is not supported for device {} mounted at {}",
                device.display(),
                mounted.display()
            );
            return Err(OpError::failed(cause));
        }
    };
    let output = run(work, program, arguments).await?;
    if output.is_success() {
        return Ok(());
    }
    Err(OpError::failed(format!("resize of device {} failed: {}: {}", device.display(), output.how, text(&output))))
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use super::*;
    use crate::{
        machine::{HostOperations, ThisMachine},
        operation::Operation,
    };

    fn work() -> Work {
        let machine: Arc<dyn HostOperations> = Arc::new(ThisMachine::default());
        Work::new(&machine, &Operation::default())
    }

    #[test]
    fn what_is_not_known_is_never_called_blank() {
        for (code, output, expected) in [
            (2, "", Ok(DeviceContent::Nothing)),
            (0, "DEVNAME=/dev/x\nTYPE=ext4\n", Ok(DeviceContent::Filesystem("ext4".to_owned()))),
            (0, "PTTYPE=gpt\n", Ok(DeviceContent::Unknown)),
            (0, "TYPE=ext4\nPTTYPE=dos\n", Ok(DeviceContent::Unknown)),
            (0, "DEVNAME=/dev/x\n", Ok(DeviceContent::Unknown)),
            (4, "", Err(())),
        ] {
            let ended = ProgramExit { code: Some(code), how: String::new(), output: output.to_owned() };
            assert_eq!(content(&ended).map_err(drop), expected, "{code} {output}");
        }
    }

    #[tokio::test]
    async fn what_cannot_be_read_is_not_blank() {
        // `blkid` reports both as blank.
        let folder = tempfile::tempdir().expect("a folder");
        let error = detect_content(&work(), &folder.path().join("gone")).await.expect_err("there is none");
        assert!(error.class == crate::attachable::Class::Transient && error.text.starts_with("cannot read"), "{error}");
        let blank = folder.path().join("blank");
        File::create(&blank).and_then(|file| file.set_len(1 << 20)).expect("a file");
        // Without `blkid` the probe fails.
        if let Ok(found) = detect_content(&work(), &blank).await {
            assert_eq!(found, DeviceContent::Nothing);
        }
    }

    #[test]
    fn a_mount_that_is_served_by_a_program_gets_a_scope() {
        let arguments = || vec!["-t".to_owned(), "x".to_owned()];
        assert_eq!(scoped(false, Path::new("/t"), arguments()), ("mount", arguments()));
        let (program, scope) = scoped(true, Path::new("/t"), arguments());
        assert_eq!(program, "systemd-run");
        assert_eq!(scope.join(" "), "--description=Kubernetes transient mount for /t --scope -- mount -t x");
    }

    #[tokio::test]
    async fn a_type_is_no_path() {
        for kind in ["", "../x", "a b"] {
            let refused = format_and_mount(&work(), Path::new("/none"), Path::new("/none"), kind, &[], false).await;
            assert!(refused.expect_err("refused").text.ends_with("is not a valid file system type"), "{kind}");
        }
    }
}
