//! How full volumes behind claims are. Behaviour: spec 07 §15, 04b §7.2.

use std::path::Path;

use rustix::fs::statvfs;

use super::{device::OpError, operation::Operation};
use crate::engine::ports::Fullness;

/// As the file system says that is mounted there.
///
/// # Errors
/// It does not.
pub async fn of_filesystem(operation: &Operation, path: &Path) -> Result<Fullness, OpError> {
    let path = path.to_owned();
    let look = operation.blocking(move || {
        let stat = statvfs(&path).map_err(|error| OpError::transient(format!("statfs {}: {error}", path.display())))?;
        let bytes = |blocks: u64| blocks.saturating_mul(stat.f_frsize);
        Ok(Fullness {
            source: "statfs".to_owned(),
            capacity: bytes(stat.f_blocks),
            available: bytes(stat.f_bavail),
            used: bytes(stat.f_blocks.saturating_sub(stat.f_bfree)),
            inodes: stat.f_files,
            inodes_free: stat.f_ffree,
            inodes_used: stat.f_files.saturating_sub(stat.f_ffree),
        })
    });
    look.await
}
