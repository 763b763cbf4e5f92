//! hostPath volumes: an existing or created path of the node, checked against its declared type.
//!
//! Implements spec 07 §7.2.

use std::{
    fs::{self, DirBuilder, FileType, OpenOptions},
    io,
    os::unix::fs::{DirBuilderExt, FileTypeExt, OpenOptionsExt, PermissionsExt},
    path::{Component, Path, PathBuf},
};

use super::{SetUp, SetUpError};
use berth_ports::MountedVolume;

/// Mode of sub-path directories where the path's mode cannot be read.
const FALLBACK_MODE: u32 = 0o750;

/// Checks the path, and creates it if its type requires that. Nothing is mounted or torn down.
pub fn set_up(request: &SetUp<'_>) -> Result<MountedVolume, SetUpError> {
    let source = request.volume.host_path.clone().unwrap_or_default();
    let path = PathBuf::from(&source.path);
    if path.components().any(|part| part == Component::ParentDir) {
        return Err(SetUpError::HostPathBackstep(source.path));
    }
    check(&path, source.type_.as_deref().unwrap_or_default())?;
    let mode = fs::metadata(&path).map_or(FALLBACK_MODE, |meta| meta.permissions().mode() & 0o7777);
    Ok(MountedVolume { host_path: Some(path), read_only: false, relabel: false, sub_path_mode: mode })
}

fn check(path: &Path, kind: &str) -> Result<(), SetUpError> {
    let is = |good: fn(FileType) -> bool, expected: &'static str| match fs::metadata(path) {
        Ok(meta) if good(meta.file_type()) => Ok(()),
        _ => Err(SetUpError::HostPathType { path: path.display().to_string(), expected }),
    };
    // As upstream, every path that is not a directory passes as a file, including devices.
    let directory = || is(|found| found.is_dir(), "is not a directory");
    let file = || is(|found| !found.is_dir(), "is not a file");
    match kind {
        "" => Ok(()),
        "Directory" => directory(),
        "File" => file(),
        "Socket" => is(|found| found.is_socket(), "is not a socket file"),
        "CharDevice" => is(|found| found.is_char_device(), "is not a character device"),
        "BlockDevice" => is(|found| found.is_block_device(), "is not a block device"),
        "DirectoryOrCreate" => {
            if is_missing(path) {
                let made = DirBuilder::new().recursive(true).mode(0o755).create(path);
                made.map_err(SetUpError::io("creating", path))?;
            }
            directory()
        }
        "FileOrCreate" => {
            if is_missing(path) {
                let made = OpenOptions::new().create(true).append(true).mode(0o644).open(path);
                made.map_err(SetUpError::io("creating", path))?;
            }
            file()
        }
        other => Err(SetUpError::HostPathUnknown(other.to_owned())),
    }
}

fn is_missing(path: &Path) -> bool {
    fs::metadata(path).is_err_and(|e| e.kind() == io::ErrorKind::NotFound)
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::os::unix::{fs::symlink, net::UnixListener};

    fn check_error(path: &Path, kind: &str) -> String {
        check(path, kind).map_or_else(|e| e.to_string(), |()| String::new())
    }

    #[test]
    fn each_type_wants_its_kind() {
        let dir = tempfile::tempdir().expect("a directory");
        let at = |name: &str| dir.path().join(name);
        fs::create_dir(at("dir")).expect("a directory");
        fs::write(at("file"), "").expect("a file");
        let _listening = UnixListener::bind(at("socket")).expect("a socket");
        symlink(at("file"), at("link")).expect("a link");
        symlink("nowhere", at("dangling")).expect("a link");
        for (path, kind, expected) in [
            ("missing", "", ""),
            ("dir", "Directory", ""),
            ("file", "Directory", "is not a directory"),
            ("missing", "Directory", "is not a directory"),
            ("file", "File", ""),
            ("link", "File", ""),
            ("/dev/null", "File", ""),
            ("dangling", "File", "is not a file"),
            ("dir", "File", "is not a file"), // AC-07-4
            ("socket", "Socket", ""),
            ("file", "Socket", "is not a socket file"),
            ("/dev/null", "CharDevice", ""),
            ("file", "CharDevice", "is not a character device"),
            ("/dev/null", "BlockDevice", "is not a block device"),
            ("dir", "DirectoryOrCreate", ""),
            ("file", "DirectoryOrCreate", "is not a directory"),
            ("file", "FileOrCreate", ""),
            ("dir", "FileOrCreate", "is not a file"),
        ] {
            let path = if path.starts_with('/') { path.into() } else { at(path) };
            let text = match expected {
                "" => String::new(),
                what => format!("hostPath type check failed: {} {what}", path.display()),
            };
            assert_eq!(check_error(&path, kind), text, "{kind}");
        }
        assert_eq!(check_error(&at("dir"), "Teapot"), "Teapot is an invalid volume type");
    }

    #[test]
    fn what_may_be_made_is_made() {
        let dir = tempfile::tempdir().expect("a directory");
        let at = |name: &str| dir.path().join(name);
        assert_eq!(check_error(&at("a/b/c"), "DirectoryOrCreate"), "");
        assert!(at("a/b/c").is_dir());
        assert_eq!(check_error(&at("f"), "FileOrCreate"), "");
        assert_eq!(fs::metadata(at("f")).expect("metadata").permissions().mode() & 0o133, 0);
        let parents = check_error(&at("no/such/f"), "FileOrCreate");
        assert!(parents.starts_with("creating ") && !at("no").exists(), "{parents}");
    }
}
