//! Kernel log reader (`/dev/kmsg`), record by record.
//!
//! Implements spec 05 §8, `Documentation/ABI/testing/dev-kmsg`.

use std::{
    fs::OpenOptions,
    io,
    os::{fd::OwnedFd, unix::fs::OpenOptionsExt},
    path::Path,
};

use rustix::{
    fs::OFlags,
    io::{Errno, read},
};

use super::polled_fd::PolledFd;

/// Device of the kernel log.
const LOG: &str = "/dev/kmsg";
/// Maximum size of a record, bytes.
const RECORD: usize = 8192;
/// Maximum immediate retries of a reader that was overrun.
const OVERRUNS: u32 = 16;

/// A reader that starts at the oldest available record.
#[derive(Debug)]
pub struct KernelLog {
    log: PolledFd,
    record: Vec<u8>,
}

impl KernelLog {
    /// Opens the kernel log. Must be called within a runtime.
    ///
    /// # Errors
    /// If it does not exist, or permission is denied.
    pub fn open() -> io::Result<Self> {
        Self::at(Path::new(LOG))
    }

    fn at(path: &Path) -> io::Result<Self> {
        let nonblock = i32::try_from(OFlags::NONBLOCK.bits()).unwrap_or_default();
        let file = OpenOptions::new().read(true).custom_flags(nonblock).open(path)?;
        Ok(Self { log: PolledFd::new(OwnedFd::from(file))?, record: vec![0; RECORD] })
    }

    /// Next record; `None` if there is none yet. Skips records that were overwritten before they were read: their
    /// sequence numbers are missing.
    ///
    /// # Errors
    /// If the read fails.
    pub fn next_record(&mut self) -> io::Result<Option<&[u8]>> {
        let log = self.log.get_ref();
        let length = catch_up(|record| read(log, record), &mut self.record)?;
        Ok(length.and_then(|length| self.record.get(..length)))
    }

    /// Waits until there may be a record. Cancel-safe.
    ///
    /// # Errors
    /// If the descriptor can no longer be polled.
    pub async fn wait(&self) -> io::Result<()> {
        // Cleared before the read: a record that arrives meanwhile sets it again.
        self.log.readable().await?.clear_ready();
        Ok(())
    }
}

/// Reads a record, and retries after an overrun; returns its length, `None` if there is none yet.
fn catch_up(mut read: impl FnMut(&mut [u8]) -> Result<usize, Errno>, record: &mut [u8]) -> io::Result<Option<usize>> {
    for _ in 0..OVERRUNS {
        match read(record) {
            Ok(0) | Err(Errno::AGAIN) => return Ok(None),
            Ok(length) => return Ok(Some(length)),
            Err(Errno::PIPE | Errno::INTR) => {}
            Err(error) => return Err(error.into()),
        }
    }
    Ok(None)
}

#[cfg(test)]
mod tests {
    use std::io::Write;

    use super::*;

    #[test]
    fn a_reader_that_was_overrun_goes_on_with_the_oldest_there_is() {
        let many = [Err(Errno::PIPE); OVERRUNS as usize];
        for (answers, expected, left) in [
            (&[Err(Errno::PIPE), Ok(7), Ok(8)][..], Ok(Some(7)), 1),
            (&[Err(Errno::PIPE), Err(Errno::PIPE), Err(Errno::AGAIN), Ok(8)], Ok(None), 1),
            (&[Err(Errno::INTR), Ok(8)], Ok(Some(8)), 0),
            (&[Err(Errno::PIPE), Err(Errno::NODEV), Ok(8)], Err(Errno::NODEV.raw_os_error()), 1),
            (&many, Ok(None), 0),
        ] {
            let mut rest = answers.iter().copied();
            let read = catch_up(|_| rest.next().expect("it stops in time"), &mut []);
            assert_eq!(read.map_err(|error| error.raw_os_error().unwrap_or_default()), expected, "{answers:?}");
            assert_eq!(rest.len(), left, "{answers:?}");
        }
    }

    #[tokio::test]
    async fn records_come_one_by_one() {
        let test = "records_come_one_by_one";
        let (Ok(mut log), Ok(mut kernel)) = (KernelLog::open(), OpenOptions::new().write(true).open(LOG)) else {
            println!("skipped: {test}: needs root and {LOG}");
            return;
        };
        let mark = format!("berth test {} {test}", std::process::id());
        // The kernel shows a record without a newline only when the next one begins.
        if kernel.write_all(format!("{mark}\n").as_bytes()).is_err() {
            println!("skipped: {test}: {LOG} cannot be written");
            return;
        }
        let found = async {
            loop {
                while let Some(record) = log.next_record().expect("readable") {
                    if String::from_utf8_lossy(record).contains(&mark) {
                        return;
                    }
                }
                log.wait().await.expect("watched");
            }
        };
        tokio::time::timeout(std::time::Duration::from_secs(60), found).await.expect("received in time");
    }
}
