//! Reads a container's log: from the tail or a time, with limits, following across rotation.
//!
//! One buffer of [`CHUNK`] bytes per reader, whatever the length of a line. While following, an
//! incomplete last line is held back until it ends, fills the buffer, or the container ends.
//! Before the next file is read, the old one is drained: what a runtime writes to it until it
//! has reopened its log is not lost (do better than spec 03b §10 "Upstream can lose bytes").

use std::{
    io,
    path::{Path, PathBuf},
    sync::Arc,
    time::Duration,
};

use tokio::{
    io::{AsyncReadExt, AsyncSeekExt, AsyncWrite, AsyncWriteExt},
    time::{Instant, sleep},
};
use tracing::debug;

use super::{
    filter::{Filter, LogFormatError, LogOptions},
    follow::{OpenLog, Watch},
    own::{Place, PlaceError},
    tail::tail_start,
};
use crate::{
    cri::{CriError, RuntimeService},
    pod::ContainerId,
    proto::cri,
};

/// Bytes read at once.
pub const CHUNK: usize = 64 * 1024;
/// Late writes to a file that was rotated may come within this time.
const LATE: Duration = Duration::from_millis(50);
/// How often a follower asks whether the container still runs.
const STATUS_PERIOD: Duration = Duration::from_secs(1);

/// Why a log could not be read (to its end).
#[derive(Debug, thiserror::Error)]
pub enum ReadError {
    /// The path leads nowhere, or to what is no log of the pod.
    #[error(transparent)]
    Place(#[from] PlaceError),
    /// The file cannot be opened.
    #[error("failed to open log file {path:?}: {source}")]
    Open {
        /// The log.
        path: PathBuf,
        /// Why.
        source: io::Error,
    },
    /// The file cannot be read.
    #[error("failed to read log file {path:?}: {source}")]
    Read {
        /// The log.
        path: PathBuf,
        /// Why.
        source: io::Error,
    },
    /// The first line is in no known format.
    #[error("failed to get parse function: {0}")]
    Format(#[from] LogFormatError),
    /// The reader of the output is gone.
    #[error("failed to write the log: {0}")]
    Write(#[source] io::Error),
    /// The runtime could not tell whether the container runs.
    #[error("{0}")]
    Runtime(#[from] CriError),
}

/// Reads logs.
#[derive(Clone)]
pub struct LogReader {
    cri: Arc<dyn RuntimeService>,
    /// `podLogsDir`.
    root: Arc<Path>,
}

impl LogReader {
    /// Over the runtime that tells whether a followed container still runs; only logs below
    /// `root`, which is `podLogsDir`, are read.
    pub fn new(cri: Arc<dyn RuntimeService>, root: &Path) -> Self {
        Self { cri, root: Arc::from(root) }
    }

    /// Where the runtime says the log of a container is.
    ///
    /// # Errors
    /// The runtime's; `NotFound` where it lost the container.
    pub async fn path_of(&self, id: &ContainerId) -> Result<PathBuf, CriError> {
        Ok(PathBuf::from(self.cri.container_status(id.as_str()).await?.log_path))
    }

    /// Writes what `options` ask for of the log at `path` to `out`. Writes nothing (zero bytes)
    /// first, so that headers are sent. Following ends when the container `id` has ended; drop
    /// the future when the client is gone.
    ///
    /// # Errors
    /// See [`ReadError`].
    pub async fn read(
        &self,
        path: &Path,
        id: &ContainerId,
        options: &LogOptions,
        out: &mut (dyn AsyncWrite + Unpin + Send),
    ) -> Result<(), ReadError> {
        let (root, log) = (self.root.clone(), path.to_owned());
        let found = tokio::task::spawn_blocking(move || Place::find(&root, &log)).await;
        let place = found.map_err(|e| ReadError::Open { path: path.to_owned(), source: io::Error::other(e) })??;
        let path = place.path.clone();
        out.write(&[]).await.map_err(ReadError::Write)?;
        out.flush().await.map_err(ReadError::Write)?;
        // The watch comes before the first look at the file, so no change falls between.
        let watch = options.follow.then(|| Watch::new(&path));
        let log = OpenLog::open(&place, &path).await;
        let log = log.map_err(|source| ReadError::Open { path: path.clone(), source })?;
        let mut reading = Reading {
            log,
            place,
            path,
            filter: Filter::new(options),
            bytes: vec![0; CHUNK],
            held: 0,
            chunk: Vec::new(),
            out,
        };
        reading.seek(options.tail).await?;
        match watch {
            Some(watch) => self.follow(&mut reading, watch, id).await?,
            None => {
                reading.drain().await?;
                reading.finish().await?;
            }
        }
        if reading.filter.malformed() > 0 {
            debug!(path = %reading.path.display(), lines = reading.filter.malformed(), "Failed when parsing lines in log file");
        }
        Ok(())
    }

    async fn follow(&self, reading: &mut Reading<'_>, mut watch: Watch, id: &ContainerId) -> Result<(), ReadError> {
        let mut has_ended = false;
        let mut asked: Option<Instant> = None;
        loop {
            reading.drain().await?;
            if reading.filter.is_done() {
                return Ok(());
            }
            if reading.log.successor(&reading.path).await.is_some() {
                sleep(LATE).await;
                reading.drain().await?;
                reading.finish().await?;
                reading.go_on().await?;
                continue;
            }
            if has_ended {
                return reading.finish().await;
            }
            if asked.is_none_or(|at| at.elapsed() >= STATUS_PERIOD) {
                asked = Some(Instant::now());
                has_ended = !self.is_running(id).await?;
                if has_ended {
                    continue; // one more read to the end
                }
            }
            watch.changed().await;
        }
    }

    /// A runtime that cannot be reached may be restarting: its containers run on.
    async fn is_running(&self, id: &ContainerId) -> Result<bool, CriError> {
        match self.cri.container_status(id.as_str()).await {
            Ok(status) => Ok(status.state == cri::ContainerState::ContainerRunning as i32),
            Err(error) if error.is_unavailable() => Ok(true),
            Err(error) => Err(error),
        }
    }
}

/// One reading under way.
struct Reading<'a> {
    log: OpenLog,
    place: Place,
    path: PathBuf,
    filter: Filter,
    bytes: Vec<u8>,
    /// How many bytes at the start of `bytes` are an incomplete line that is held back.
    held: usize,
    chunk: Vec<u8>,
    out: &'a mut (dyn AsyncWrite + Unpin + Send),
}

impl Reading<'_> {
    async fn seek(&mut self, tail: Option<u64>) -> Result<(), ReadError> {
        let Some(lines) = tail else { return Ok(()) };
        let file = self.log.file.try_clone().await.map_err(|e| self.unreadable(e))?.into_std().await;
        let found = tokio::task::spawn_blocking(move || tail_start(&file, lines)).await;
        let start = found.unwrap_or_else(|e| Err(io::Error::other(e))).map_err(|e| self.unreadable(e))?;
        self.log.file.seek(io::SeekFrom::Start(start)).await.map_err(|e| self.unreadable(e))?;
        Ok(())
    }

    /// Reads to the end of the file as it is now; a last line without newline is held back.
    async fn drain(&mut self) -> Result<(), ReadError> {
        while !self.filter.is_done() {
            let space = self.bytes.get_mut(self.held..).unwrap_or_default();
            let read = self.log.file.read(space).await;
            let read = read.map_err(|e| self.unreadable(e))?;
            if read == 0 {
                return Ok(());
            }
            let filled = self.held + read;
            let whole = self.bytes.get(..filled).unwrap_or_default();
            let complete = match whole.iter().rposition(|b| *b == b'\n') {
                Some(at) => at + 1,
                None if filled == self.bytes.len() => filled,
                None => 0,
            };
            self.pass(complete).await?;
            self.bytes.copy_within(complete..filled, 0);
            self.held = filled - complete;
        }
        Ok(())
    }

    /// Ends the file: an incomplete last line is written as it is.
    async fn finish(&mut self) -> Result<(), ReadError> {
        let held = std::mem::take(&mut self.held);
        self.pass(held).await?;
        self.filter.finish(&mut self.chunk)?;
        self.flush().await
    }

    /// Opens the file that comes after this one. A name that changes hands meanwhile is looked
    /// up again.
    async fn go_on(&mut self) -> Result<(), ReadError> {
        while let Some(next) = self.log.successor(&self.path).await {
            match OpenLog::open(&self.place, &next.path).await {
                Ok(opened) if opened.is(&next) => {
                    self.log = opened;
                    return Ok(());
                }
                Ok(_) => {}
                Err(error) if error.kind() == io::ErrorKind::NotFound => {}
                Err(source) => return Err(ReadError::Open { path: next.path, source }),
            }
        }
        Ok(())
    }

    async fn pass(&mut self, count: usize) -> Result<(), ReadError> {
        let bytes = self.bytes.get(..count).unwrap_or_default();
        self.filter.push(bytes, &mut self.chunk)?;
        self.flush().await
    }

    async fn flush(&mut self) -> Result<(), ReadError> {
        if !self.chunk.is_empty() {
            self.out.write_all(&self.chunk).await.map_err(ReadError::Write)?;
            self.out.flush().await.map_err(ReadError::Write)?;
            self.chunk.clear();
        }
        Ok(())
    }

    fn unreadable(&self, source: io::Error) -> ReadError {
        ReadError::Read { path: self.path.clone(), source }
    }
}
