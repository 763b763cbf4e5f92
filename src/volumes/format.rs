//! File systems on devices: made where a device is blank, checked, mounted, grown. The programs of util-linux
//! and e2fsprogs do it. Behaviour: spec 07 §14.

use std::{
    ffi::OsStr,
    fs::File,
    io::Read,
    path::Path,
    process::{ExitStatus, Output},
    time::Duration,
};

use tokio::{process::Command, time::timeout};
use tracing::{info, warn};

use super::{
    device::{OpError, Trouble},
    operation::Operation,
};

/// Bytes that are read to see whether a device can be read, and how long that may take.
const PROBED: usize = 4096;
const READING: Duration = Duration::from_secs(30);

/// What is on a device.
#[derive(Clone, PartialEq, Eq, Debug)]
enum Content {
    Nothing,
    Filesystem(String),
    Unknown,
}

/// What `blkid -p -s TYPE -s PTTYPE -o export` says.
fn content(status: ExitStatus, output: &str) -> Result<Content, OpError> {
    if status.code() == Some(2) {
        return Ok(Content::Nothing);
    }
    if !status.success() {
        return Err(OpError::failed(format!("blkid failed: {status}")));
    }
    let value = |key: &str| output.lines().find_map(|line| line.strip_prefix(key)).filter(|value| !value.is_empty());
    Ok(match (value("TYPE="), value("PTTYPE=")) {
        (_, Some(_)) => Content::Unknown,
        (Some(kind), None) => Content::Filesystem(kind.to_owned()),
        // It found something and cannot say what: nobody's to format.
        (None, None) => Content::Unknown,
    })
}

/// Options as they are given to `mount`: none twice, sorted.
pub fn options(given: &[String], ours: &[&str]) -> Vec<String> {
    let all = given.iter().cloned().chain(ours.iter().map(|option| (*option).to_owned()));
    let all: std::collections::BTreeSet<String> = all.filter(|option| !option.is_empty()).collect();
    all.into_iter().collect()
}

async fn run<S: AsRef<OsStr>>(
    operation: &Operation,
    program: &str,
    arguments: impl IntoIterator<Item = S>,
) -> Result<Output, OpError> {
    let mut command = Command::new(program);
    command.args(arguments);
    operation.run(command).await.map_err(|e| OpError::failed(format!("running {program}: {e}")))
}

fn text(output: &Output) -> String {
    let both = [&output.stdout[..], &output.stderr[..]].concat();
    let text = String::from_utf8_lossy(&both);
    crate::pod::cut_at_char(text.trim(), 1024).to_owned()
}

/// That it can be read: `blkid` says of a device that it cannot read what it says of a blank one, and what is taken
/// for blank is formatted.
async fn readable(operation: &Operation, device: &Path) -> Result<(), OpError> {
    let (path, told) = (device.to_owned(), device.display().to_string());
    let cannot = move |cause: String| OpError::transient(format!("cannot read {told}: {cause}"));
    let fails = cannot.clone();
    let reading = operation.blocking(move || {
        let read = File::open(path).and_then(|mut file| file.read_exact(&mut [0; PROBED]));
        read.map_err(|error| fails(error.to_string()))
    });
    timeout(READING, reading).await.unwrap_or_else(|_| Err(cannot(format!("no answer within {READING:?}"))))
}

async fn look(operation: &Operation, device: &Path) -> Result<Content, OpError> {
    readable(operation, device).await?;
    let found = probe(operation, device).await?;
    if found == Content::Nothing {
        readable(operation, device).await?; // it may have gone in between
    }
    Ok(found)
}

async fn probe(operation: &Operation, device: &Path) -> Result<Content, OpError> {
    let base = ["-p", "-s", "TYPE", "-s", "PTTYPE", "-o", "export"].map(OsStr::new);
    let output = run(operation, "blkid", base.into_iter().chain([device.as_os_str()])).await?;
    content(output.status, &String::from_utf8_lossy(&output.stdout))
}

/// Mounts what is on the device, and makes a file system first where nothing is. Never formats what it does not know.
///
/// # Errors
/// In the reference's words.
pub async fn format_and_mount(
    operation: &Operation,
    device: &Path,
    target: &Path,
    kind: &str,
    given: &[String],
    read_only: bool,
) -> Result<(), OpError> {
    let found = look(operation, device).await?;
    match &found {
        Content::Nothing if read_only => {
            let device = device.display();
            let cause = format!("cannot mount unformatted disk {device} as we are manipulating it in read-only mode");
            return Err(OpError::failed(cause));
        }
        Content::Nothing => make(operation, device, kind).await?,
        Content::Filesystem(_) if !read_only => check(operation, device).await?,
        Content::Filesystem(_) => {}
        Content::Unknown => warn!(device = %device.display(), "Unknown data, probably partitions: not formatted"),
    }
    let options = options(given, if read_only { &["defaults", "ro"] } else { &["defaults"] }).join(",");
    let arguments = ["-t", kind, "-o", &options].map(OsStr::new);
    let output = run(operation, "mount", arguments.into_iter().chain([device.as_os_str(), target.as_os_str()])).await?;
    if output.status.success() {
        return Ok(());
    }
    let shown = format!("-t {kind} -o {options} {} {}", device.display(), target.display());
    let cause = format!(
        "mount failed: {}\nMounting command: mount\nMounting arguments: {shown}\nOutput: {}",
        output.status,
        text(&output)
    );
    match found {
        Content::Filesystem(other) if other != kind => {
            let cause =
                format!("failed to mount the volume as {kind:?}, it already contains {other}. Mount error: {cause}");
            Err(OpError::failed(cause).because(Trouble::WrongFilesystem))
        }
        Content::Unknown => {
            let cause = format!(
                "failed to mount the volume as {kind:?}, it already contains unknown data, probably partitions. Mount error: {cause}"
            );
            Err(OpError::failed(cause).because(Trouble::WrongFilesystem))
        }
        _ => Err(OpError::failed(cause)),
    }
}

async fn make(operation: &Operation, device: &Path, kind: &str) -> Result<(), OpError> {
    info!(device = %device.display(), fstype = kind, "Disk appears to be unformatted, attempting to format");
    let options: &[&str] = match kind {
        "ext3" | "ext4" => &["-F", "-m0"],
        "xfs" => &["-f"],
        _ => &[],
    };
    let arguments = options.iter().map(OsStr::new).chain([device.as_os_str()]);
    let output = run(operation, &format!("mkfs.{kind}"), arguments).await?;
    if output.status.success() {
        return Ok(());
    }
    let cause = format!("format of disk {} failed: {}: {}", device.display(), output.status, text(&output));
    Err(OpError::failed(cause))
}

/// Errors that it fixed, or that are none, do not stand in the way.
async fn check(operation: &Operation, device: &Path) -> Result<(), OpError> {
    let Ok(output) = run(operation, "fsck", [OsStr::new("-a"), device.as_os_str()]).await else {
        warn!("'fsck' not found on system; continuing mount without running 'fsck'");
        return Ok(());
    };
    match output.status.code() {
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

/// Lets the file system fill its device; a blank device has none.
///
/// # Errors
/// It cannot be grown.
pub async fn grow(operation: &Operation, device: &Path, mounted: &Path) -> Result<(), OpError> {
    let kind = match look(operation, device).await? {
        Content::Nothing => return Ok(()),
        Content::Filesystem(kind) => kind,
        Content::Unknown => "unknown data".to_owned(),
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
    let output = run(operation, program, arguments).await?;
    if output.status.success() {
        return Ok(());
    }
    Err(OpError::failed(format!("resize of device {} failed: {}: {}", device.display(), output.status, text(&output))))
}

#[cfg(test)]
mod tests {
    use std::os::unix::process::ExitStatusExt;

    use super::*;

    #[test]
    fn what_is_not_known_is_never_called_blank() {
        for (code, output, expected) in [
            (2, "", Ok(Content::Nothing)),
            (0, "DEVNAME=/dev/x\nTYPE=ext4\n", Ok(Content::Filesystem("ext4".to_owned()))),
            (0, "PTTYPE=gpt\n", Ok(Content::Unknown)),
            (0, "TYPE=ext4\nPTTYPE=dos\n", Ok(Content::Unknown)),
            (0, "DEVNAME=/dev/x\n", Ok(Content::Unknown)),
            (4, "", Err(())),
        ] {
            assert_eq!(content(ExitStatus::from_raw(code << 8), output).map_err(drop), expected, "{code} {output}");
        }
    }

    #[tokio::test]
    async fn what_cannot_be_read_is_not_blank() {
        // blkid says the same of both.
        let folder = tempfile::tempdir().expect("a folder");
        let error = look(&Operation::default(), &folder.path().join("gone")).await.expect_err("there is none");
        assert!(
            error.class == crate::volumes::device::Class::Transient && error.text.starts_with("cannot read"),
            "{error}"
        );
        let blank = folder.path().join("blank");
        File::create(&blank).and_then(|file| file.set_len(1 << 20)).expect("a file");
        // Where there is no blkid nothing is said.
        if let Ok(found) = look(&Operation::default(), &blank).await {
            assert_eq!(found, Content::Nothing);
        }
    }

    #[test]
    fn options_are_told_once() {
        let given = ["noatime".to_owned(), "ro".to_owned(), "bind".to_owned()];
        assert_eq!(options(&given, &["bind", "ro"]), ["bind", "noatime", "ro"]);
    }
}
