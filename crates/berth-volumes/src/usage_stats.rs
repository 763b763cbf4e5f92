//! Usage statistics of mounted volumes (`statfs`). Implements spec 07 §15, 04b §7.2.

use std::{path::Path, time::Duration};

use rustix::fs::statvfs;

use super::{
    attachable::OpError,
    machine::{KillPolicy, Work},
    operation::Operation,
};
use berth_ports::VolumeStats;
use berth_types::cut_at_char;

/// Maximum bytes of program output in an error message.
const SHOWN: usize = 512;
/// Timeout of the `stat` program.
const STAT_TIMEOUT: Duration = Duration::from_secs(8);
/// Block size, blocks, free blocks, blocks available to users, inodes, and free inodes.
const FORMAT: &str = "%S %b %f %a %c %d";

/// Queries the statistics of a network share in a separate program: if the server never answers, the program is killed
/// and no thread hangs.
///
/// # Errors
/// If the query fails or times out.
pub async fn of_share(work: &Work, path: &Path) -> Result<VolumeStats, OpError> {
    let failed = |cause: &str| OpError::transient(format!("statfs {}: {cause}", path.display()));
    let arguments = ["-f", "-c", FORMAT, "--"].map(str::to_owned).into_iter().chain([path.display().to_string()]);
    let arguments: Vec<String> = arguments.collect();
    let ended = work.run("stat", &arguments, KillPolicy::Within(STAT_TIMEOUT)).await;
    let ended = ended.map_err(|error| failed(&error.to_string()))?;
    if !ended.is_success() {
        return Err(failed(cut_at_char(&ended.output, SHOWN)));
    }
    parse(&ended.output).ok_or_else(|| failed("unexpected output of stat"))
}

fn parse(output: &str) -> Option<VolumeStats> {
    let numbers: Vec<u64> = output.split_whitespace().map(|word| word.parse().ok()).collect::<Option<_>>()?;
    let [size, blocks, free, available, inodes, inodes_free] = numbers.try_into().ok()?;
    let bytes = |blocks: u64| blocks.saturating_mul(size);
    Some(VolumeStats {
        source: "statfs".to_owned(),
        capacity: bytes(blocks),
        available: bytes(available),
        used: bytes(blocks.saturating_sub(free)),
        inodes,
        inodes_free,
        inodes_used: inodes.saturating_sub(inodes_free),
        condition: None,
    })
}

/// Queries the statistics of a local file system.
///
/// # Errors
/// If `statvfs` fails.
pub async fn of_filesystem(operation: &Operation, path: &Path) -> Result<VolumeStats, OpError> {
    let path = path.to_owned();
    let reading = operation.blocking(move || {
        let stat = statvfs(&path).map_err(|error| OpError::transient(format!("statfs {}: {error}", path.display())))?;
        let bytes = |blocks: u64| blocks.saturating_mul(stat.f_frsize);
        Ok(VolumeStats {
            source: "statfs".to_owned(),
            capacity: bytes(stat.f_blocks),
            available: bytes(stat.f_bavail),
            used: bytes(stat.f_blocks.saturating_sub(stat.f_bfree)),
            inodes: stat.f_files,
            inodes_free: stat.f_ffree,
            inodes_used: stat.f_files.saturating_sub(stat.f_ffree),
            condition: None,
        })
    });
    reading.await
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_output_of_stat_is_parsed() {
        let stats = parse("4096 100 40 30 50 20\n").expect("numbers");
        assert_eq!((stats.capacity, stats.used, stats.available), (409_600, 245_760, 122_880));
        assert_eq!((stats.inodes, stats.inodes_free, stats.inodes_used), (50, 20, 30));
        // A server may report fewer blocks than free blocks, or no inodes.
        assert_eq!(parse("1 1 2 2 0 0").map(|stats| (stats.used, stats.inodes_used)), Some((0, 0)));
        for output in ["", "1 2 3", "1 2 3 4 5 x", "1 2 3 4 5 6 7", "-1 2 3 4 5 6"] {
            assert_eq!(parse(output), None, "{output}");
        }
    }
}
