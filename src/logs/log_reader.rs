//! Container log reader: tail, since, limits, and following across rotation.
//!
//! One buffer of at most [`CHUNK`] bytes per reader, whatever the length of a line; a follower of an
//! idle log has none. While following, an incomplete last line is held back until it ends, fills the
//! buffer, or the container exits. Before the next file is read, the old one is drained: bytes that a
//! runtime writes to it until it has reopened its log are not lost (an improvement: spec 03b §10
//! "Upstream can lose bytes").

use std::{
    io,
    path::{Path, PathBuf},
    sync::Arc,
    time::Duration,
};

use futures::{Sink, SinkExt};
use tokio::time::{Instant, sleep};
use tracing::debug;

use super::{
    confined_path::{LogLocation, PlaceError},
    filter::{Filter, LogFormatError, LogOptions},
    log_watcher::{Watch, Watches},
    open_log::OpenLog,
};
use berth_cri::{CriError, RuntimeService};
use berth_proto::cri;
use berth_types::ContainerId;

/// Maximum bytes per read.
pub const CHUNK: usize = 64 * 1024;
/// Bytes of the first read: sufficient for a log that grows by lines.
const SMALL: usize = 4 * 1024;
/// Delay for late writes to a rotated file.
const LATE: Duration = Duration::from_millis(50);
/// Period of container status calls by a follower.
const STATUS_PERIOD: Duration = Duration::from_secs(1);
/// The same period while the observed state shows the container running: hundreds of followers must not
/// load the runtime.
const OBSERVED_STATUS_PERIOD: Duration = Duration::from_secs(10);

/// Why a log could not be read (to its end).
#[derive(Debug, thiserror::Error)]
pub enum ReadError {
    /// The path cannot be resolved, or leads out of the pod's log directory.
    #[error(transparent)]
    Place(#[from] PlaceError),
    /// The file cannot be opened.
    #[error("failed to open log file {path:?}: {source}")]
    Open {
        /// Path of the log.
        path: PathBuf,
        /// The I/O error.
        source: io::Error,
    },
    /// The file cannot be read.
    #[error("failed to read log file {path:?}: {source}")]
    Read {
        /// Path of the log.
        path: PathBuf,
        /// The I/O error.
        source: io::Error,
    },
    /// The first line has no known format.
    #[error("failed to get parse function: {0}")]
    Format(#[from] LogFormatError),
    /// The receiver of the output is gone.
    #[error("failed to write the log: {0}")]
    Write(#[source] io::Error),
    /// The runtime returned no container status.
    #[error("{0}")]
    Runtime(#[from] CriError),
}

/// Sink of log output in owned pieces, so that large logs are not copied again.
pub type Pieces<'a> = dyn Sink<Vec<u8>, Error = io::Error> + Unpin + Send + 'a;

/// Callback for the observed state of a container: whether it runs, `None` if unknown.
pub type ObservedRunning = Arc<dyn Fn(&ContainerId) -> Option<bool> + Send + Sync>;

/// Reads logs.
#[derive(Clone)]
pub struct LogReader {
    cri: Arc<dyn RuntimeService>,
    observed_running: Option<ObservedRunning>,
    watches: Watches,
    /// `podLogsDir`.
    root: Arc<Path>,
}

impl LogReader {
    /// Creates a reader that uses the runtime to check whether a followed container still runs; only
    /// logs below `root`, which is `podLogsDir`, are read.
    pub fn new(cri: Arc<dyn RuntimeService>, root: &Path) -> Self {
        Self { cri, observed_running: None, watches: Watches::default(), root: Arc::from(root) }
    }

    /// Sets the callback for the observed state of containers.
    #[must_use]
    pub fn with_observed_state(mut self, observed_running: ObservedRunning) -> Self {
        self.observed_running = Some(observed_running);
        self
    }

    /// Path of a container's log, from the runtime.
    ///
    /// # Errors
    /// The error of the runtime; `NotFound` if the container is gone.
    pub async fn path_of(&self, id: &ContainerId) -> Result<PathBuf, CriError> {
        Ok(PathBuf::from(self.cri.container_status(id.as_str()).await?.log_path))
    }

    /// Writes the log at `path` to `out`, as requested by `options`. Following ends when the container
    /// `id` has exited; drop the future when the client is gone.
    ///
    /// # Errors
    /// See [`ReadError`].
    pub async fn read(
        &self,
        path: &Path,
        id: &ContainerId,
        options: &LogOptions,
        out: &mut Pieces<'_>,
    ) -> Result<(), ReadError> {
        let (root, log) = (self.root.clone(), path.to_owned());
        let found = tokio::task::spawn_blocking(move || LogLocation::find(&root, &log)).await;
        let place = found.map_err(|e| ReadError::Open { path: path.to_owned(), source: io::Error::other(e) })??;
        let path = place.path.clone();
        // The watch is added before the first read, so no change is missed.
        let watch = options.follow.then(|| self.watches.watch(&path));
        let log = OpenLog::open(&place, &path).await;
        let log = log.map_err(|source| ReadError::Open { path: path.clone(), source })?;
        let mut reading = ReadSession::new(log, (place, path), Filter::new(options), out);
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

    async fn follow(&self, reading: &mut ReadSession<'_>, mut watch: Watch, id: &ContainerId) -> Result<(), ReadError> {
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
            let observed = self.observed_running.as_ref().and_then(|observe| observe(id));
            let period = if observed == Some(true) { OBSERVED_STATUS_PERIOD } else { STATUS_PERIOD };
            has_ended = observed == Some(false);
            if !has_ended && asked.is_none_or(|at| at.elapsed() >= period) {
                asked = Some(Instant::now());
                has_ended = !self.is_running(id).await?;
            }
            if has_ended {
                continue; // read once more to the end
            }
            watch.changed().await;
        }
    }

    /// An unavailable runtime may be restarting: its containers keep running.
    async fn is_running(&self, id: &ContainerId) -> Result<bool, CriError> {
        match self.cri.container_status(id.as_str()).await {
            Ok(status) => Ok(status.state == cri::ContainerState::ContainerRunning as i32),
            Err(error) if error.is_unavailable() => Ok(true),
            Err(error) => Err(error),
        }
    }
}

/// One reading in progress.
struct ReadSession<'a> {
    log: OpenLog,
    place: LogLocation,
    path: PathBuf,
    filter: Filter,
    /// File offset of the next bytes.
    offset: u64,
    bytes: Vec<u8>,
    /// Length of the incomplete line held back at the start of `bytes`.
    incomplete: usize,
    chunk: Vec<u8>,
    out: &'a mut Pieces<'a>,
}

impl<'a> ReadSession<'a> {
    fn new(log: OpenLog, (place, path): (LogLocation, PathBuf), filter: Filter, out: &'a mut Pieces<'a>) -> Self {
        Self { log, place, path, filter, offset: 0, bytes: Vec::new(), incomplete: 0, chunk: Vec::new(), out }
    }

    async fn seek(&mut self, tail: Option<u64>) -> Result<(), ReadError> {
        if let Some(lines) = tail {
            self.offset = self.log.tail(lines).await.map_err(|e| self.unreadable(e))?;
        }
        Ok(())
    }

    /// Reads to the current end of the file; a last line without newline is held back.
    async fn drain(&mut self) -> Result<(), ReadError> {
        let mut size = SMALL;
        while !self.filter.is_done() {
            self.bytes.resize((self.incomplete + size).min(CHUNK), 0);
            let read = self.fill().await?;
            if read == 0 {
                break;
            }
            let filled = self.incomplete + read;
            if filled == self.bytes.len() {
                size = CHUNK;
            }
            let whole = self.bytes.get(..filled).unwrap_or_default();
            let complete = match memchr::memrchr(b'\n', whole) {
                Some(at) => at + 1,
                None if filled == CHUNK => filled,
                None => 0,
            };
            if !self.pass(complete).await? {
                tokio::task::yield_now().await; // do not starve other tasks on a long way to the first wanted line
            }
            self.bytes.copy_within(complete..filled, 0);
            self.incomplete = filled - complete;
        }
        self.rest();
        Ok(())
    }

    /// Reads into the buffer after the held-back bytes.
    async fn fill(&mut self) -> Result<usize, ReadError> {
        let (bytes, read) = self.log.read_at(std::mem::take(&mut self.bytes), self.incomplete, self.offset).await;
        self.bytes = bytes;
        let read = read.map_err(|e| self.unreadable(e))?;
        self.offset += read as u64;
        Ok(read)
    }

    /// Releases all memory but the held-back bytes: the log may be idle for days.
    fn rest(&mut self) {
        self.bytes.truncate(self.incomplete);
        self.bytes.shrink_to_fit();
        self.chunk = Vec::new();
    }

    /// Ends the file: an incomplete last line is written as is.
    async fn finish(&mut self) -> Result<(), ReadError> {
        let incomplete = std::mem::take(&mut self.incomplete);
        self.pass(incomplete).await?;
        self.filter.finish(&mut self.chunk)?;
        self.flush().await?;
        Ok(())
    }

    /// Opens the successor of this file. If its name is reused in the meantime the lookup is repeated.
    async fn go_on(&mut self) -> Result<(), ReadError> {
        while let Some(next) = self.log.successor(&self.path).await {
            match OpenLog::open(&self.place, &next.path).await {
                Ok(opened) if opened.is(&next) => {
                    self.log = opened;
                    self.offset = 0;
                    return Ok(());
                }
                Ok(_) => {}
                Err(error) if error.kind() == io::ErrorKind::NotFound => {}
                Err(source) => return Err(ReadError::Open { path: next.path, source }),
            }
        }
        Ok(())
    }

    /// Filters and writes the first `count` bytes; returns whether anything was written.
    async fn pass(&mut self, count: usize) -> Result<bool, ReadError> {
        let bytes = self.bytes.get(..count).unwrap_or_default();
        self.chunk.reserve(count);
        self.filter.push(bytes, &mut self.chunk)?;
        self.flush().await
    }

    async fn flush(&mut self) -> Result<bool, ReadError> {
        if self.chunk.is_empty() {
            return Ok(false);
        }
        let mut piece = std::mem::take(&mut self.chunk);
        if piece.len() < piece.capacity() / 2 {
            piece.shrink_to_fit(); // it may be queued for long
        }
        self.out.send(piece).await.map_err(ReadError::Write)?;
        Ok(true)
    }

    fn unreadable(&self, source: io::Error) -> ReadError {
        ReadError::Read { path: self.path.clone(), source }
    }
}
