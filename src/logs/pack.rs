//! Removes old rotated files, and compresses them as streams. Blocking. Behaviour: spec 03b §11.

use std::{
    fs::{self, File},
    io,
    os::unix::fs::{OpenOptionsExt, PermissionsExt},
    path::{Path, PathBuf},
};

use flate2::{Compression, write::GzEncoder};

use super::{
    dirs,
    rotate::{RotateError, failed},
    rotated,
};

/// Removes what is too old after a rotation. While files of the log are being compressed, those are left alone.
pub(super) fn tidy(log: &Path, max_files: usize, is_packing: bool) -> Result<(), RotateError> {
    let names = dirs::beside(log, ".").map_err(failed("list", log))?;
    let packing: Vec<String> = match is_packing {
        true => names.iter().filter_map(|name| Some(name.strip_suffix(".tmp")?.to_owned())).collect(),
        false => Vec::new(),
    };
    let is_touched = |name: &str| packing.iter().any(|packed| name.starts_with(packed.as_str()));
    for name in rotated::plan(names, max_files.saturating_add(1)).remove.into_iter().filter(|name| !is_touched(name)) {
        let path = log.with_file_name(name);
        dirs::remove(&path).map_err(failed("remove", &path))?;
    }
    Ok(())
}

/// Compresses all rotated files but the newest, one after the other.
pub(super) fn pack(log: &Path, max_files: usize) -> Result<(), RotateError> {
    loop {
        let names = dirs::beside(log, ".").map_err(failed("list", log))?;
        let Some(name) = rotated::to_compress(names, max_files) else { return Ok(()) };
        let path = log.with_file_name(name);
        match compress(&path) {
            // Whoever wrote so fast that it had to make room already.
            Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(()),
            other => other.map_err(failed("compress", &path))?,
        }
    }
}

/// `<path>` and a suffix.
pub(super) fn with_suffix(path: &Path, suffix: &str) -> PathBuf {
    let mut name = path.as_os_str().to_owned();
    name.push(suffix);
    PathBuf::from(name)
}

/// `<f>` → `<f>.tmp` → `<f>.gz`, then `<f>` goes; the mode stays.
fn compress(path: &Path) -> io::Result<()> {
    let (tmp, packed) = (with_suffix(path, ".tmp"), with_suffix(path, ".gz"));
    // A container may have its hands on the directory: links are not followed.
    let no_links = rustix::fs::OFlags::NOFOLLOW.bits().cast_signed();
    let mut source = File::options().read(true).custom_flags(no_links).open(path)?;
    let mode = source.metadata()?.permissions().mode();
    let written = (|| {
        let target = File::options().write(true).create(true).truncate(true).custom_flags(no_links).open(&tmp)?;
        target.set_permissions(fs::Permissions::from_mode(mode))?;
        let mut encoder = GzEncoder::new(io::BufWriter::with_capacity(64 * 1024, target), Compression::default());
        io::copy(&mut source, &mut encoder)?;
        encoder.finish()?.into_inner().map_err(io::IntoInnerError::into_error)?;
        fs::rename(&tmp, &packed)
    })();
    if written.is_err() {
        // The error that is reported is the first one; the next round removes leftovers too.
        let _ = fs::remove_file(&tmp);
    }
    written?;
    dirs::remove(path)
}
