//! Removes old rotated logs, and compresses them as streams. Blocking. Implements spec 03b §11.

use std::{
    fs::{self, File},
    io,
    os::unix::fs::{OpenOptionsExt, PermissionsExt},
    path::{Path, PathBuf},
};

use flate2::{Compression, write::GzEncoder};
use rustix::fs::OFlags;

use super::{
    dirs,
    log_rotation::{RotateError, failed},
    retention,
};

/// Removes old files after a rotation. While files of the log are being compressed, those are skipped.
pub(super) fn tidy(log: &Path, max_files: usize, is_packing: bool) -> Result<(), RotateError> {
    let names = dirs::rotated_files(log).map_err(failed("list", log))?;
    let packing: Vec<String> = match is_packing {
        true => names.iter().filter_map(|name| Some(name.strip_suffix(".tmp")?.to_owned())).collect(),
        false => Vec::new(),
    };
    let is_touched = |name: &str| packing.iter().any(|packed| name.starts_with(packed.as_str()));
    for name in retention::plan(names, max_files.saturating_add(1)).remove.into_iter().filter(|name| !is_touched(name))
    {
        let path = log.with_file_name(name);
        dirs::remove(&path).map_err(failed("remove", &path))?;
    }
    Ok(())
}

/// Compresses all rotated files but the newest, one at a time.
pub(super) fn pack(log: &Path, max_files: usize) -> Result<(), RotateError> {
    loop {
        let names = dirs::rotated_files(log).map_err(failed("list", log))?;
        let Some(name) = retention::to_compress(names, max_files) else { return Ok(()) };
        let path = log.with_file_name(name);
        match compress(&path) {
            // A log that grows so fast that this file was already removed.
            Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(()),
            other => other.map_err(failed("compress", &path))?,
        }
    }
}

/// `<path>` with a suffix.
pub(super) fn with_suffix(path: &Path, suffix: &str) -> PathBuf {
    let mut name = path.as_os_str().to_owned();
    name.push(suffix);
    PathBuf::from(name)
}

/// Compresses `<f>` to `<f>.tmp`, renames it to `<f>.gz`, and removes `<f>`; the mode is kept.
fn compress(path: &Path) -> io::Result<()> {
    let (tmp, packed) = (with_suffix(path, ".tmp"), with_suffix(path, ".gz"));
    // A container may write to the directory: links are not followed, and a FIFO does not block.
    let flags = (OFlags::NOFOLLOW | OFlags::NONBLOCK).bits().cast_signed();
    let mut source = File::options().read(true).custom_flags(flags).open(path)?;
    let metadata = source.metadata()?;
    if !metadata.is_file() {
        return Err(io::Error::new(io::ErrorKind::InvalidInput, "not a regular file"));
    }
    let mode = metadata.permissions().mode();
    let written = (|| {
        dirs::remove(&tmp)?;
        let target = File::options().write(true).create_new(true).custom_flags(flags).open(&tmp)?;
        target.set_permissions(fs::Permissions::from_mode(mode))?;
        let mut encoder = GzEncoder::new(io::BufWriter::with_capacity(64 * 1024, target), Compression::default());
        io::copy(&mut source, &mut encoder)?;
        encoder.finish()?.into_inner().map_err(io::IntoInnerError::into_error)?;
        fs::rename(&tmp, &packed)
    })();
    if written.is_err() {
        // The first error is reported; the next round removes leftovers too.
        let _ = fs::remove_file(&tmp);
    }
    written?;
    dirs::remove(path)
}

#[cfg(test)]
mod tests {
    use rustix::fs::{CWD, FileType, Mode, mknodat};

    use super::*;

    fn fifo(path: &Path) {
        mknodat(CWD, path, FileType::Fifo, Mode::RWXU, 0).expect("a FIFO");
    }

    /// A container that can write to the log directory cannot block rotation by what it creates there.
    #[test]
    fn fifos_and_directories_of_rotated_names_block_nothing() {
        let root = tempfile::tempdir().expect("a directory");
        let at = |name: &str| root.path().join(name);
        let log = at("0.log");
        for name in ["0.log.20260101-000000", "0.log.20260101-000001", "0.log.20260101-000002"] {
            fs::write(at(name), "text").expect("written");
        }
        fifo(&at("0.log.20250101-000000"));
        fifo(&at("0.log.20260101-000000.tmp"));
        fs::create_dir_all(at("0.log.20250101-000001/below")).expect("made");
        fs::create_dir(at("0.log.20270101-000000")).expect("made");
        pack(&log, 10).expect("packed");
        assert!(at("0.log.20260101-000000.gz").is_file() && at("0.log.20260101-000001.gz").is_file());
        assert!(at("0.log.20260101-000002").is_file(), "the newest stays as it is");
        tidy(&log, 2, false).expect("tidied");
        assert!(!at("0.log.20260101-000000.gz").exists());
        assert!(compress(&at("0.log.20250101-000000")).is_err(), "a FIFO is not read");
        dirs::remove_log(&log).expect("removed");
        assert_eq!(fs::read_dir(root.path()).expect("listed").count(), 0);
    }
}
