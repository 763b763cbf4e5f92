//! Output streams of the log: one for all records, or separate ones for info and errors.

use std::{
    io::{self, BufWriter, Write},
    sync::{Mutex, PoisonError},
    time::{Duration, Instant},
};

type Stream = Mutex<Box<dyn Write + Send>>;

/// Output streams of the log.
pub struct OutputStreams {
    info: Option<Stream>,
    all: Stream,
    flushed: Mutex<Instant>,
}

impl OutputStreams {
    /// Writes all records to standard error.
    pub fn standard_error() -> Self {
        Self::single(Box::new(io::stderr()))
    }

    /// Writes info and warning records to standard output through a buffer of that many bytes (0: unbuffered), errors
    /// to standard error.
    pub fn split(buffer: usize) -> Self {
        let info: Box<dyn Write + Send> = match buffer {
            0 => Box::new(io::stdout()),
            size => Box::new(BufWriter::with_capacity(size, io::stdout())),
        };
        Self { info: Some(Mutex::new(info)), ..Self::standard_error() }
    }

    /// Writes all records to `stream`.
    pub fn single(stream: Box<dyn Write + Send>) -> Self {
        Self { info: None, all: Mutex::new(stream), flushed: Mutex::new(Instant::now()) }
    }

    /// Writes info and warning records to `info`, errors to `errors`.
    pub fn pair(info: Box<dyn Write + Send>, errors: Box<dyn Write + Send>) -> Self {
        Self { info: Some(Mutex::new(info)), ..Self::single(errors) }
    }

    /// Writes a line. A failed write cannot be logged and is ignored.
    pub(super) fn write(&self, is_error: bool, line: &str) {
        let stream = self.info.as_ref().filter(|_| !is_error).unwrap_or(&self.all);
        let _ = stream.lock().unwrap_or_else(PoisonError::into_inner).write_all(line.as_bytes());
    }

    pub(super) fn flush(&self) -> io::Result<()> {
        for stream in self.info.iter().chain([&self.all]) {
            stream.lock().unwrap_or_else(PoisonError::into_inner).flush()?;
        }
        *self.flushed.lock().unwrap_or_else(PoisonError::into_inner) = Instant::now();
        Ok(())
    }

    pub(super) fn since_flush(&self) -> Duration {
        self.flushed.lock().unwrap_or_else(PoisonError::into_inner).elapsed()
    }
}
