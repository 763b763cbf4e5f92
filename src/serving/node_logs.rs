//! Node logs: files below `/var/log`, opened without escaping it, and `journalctl` output.

use std::{
    fs::File,
    io,
    os::unix::fs::FileExt,
    path::{Path, PathBuf},
    pin::Pin,
    process::Stdio,
    task::{Context, Poll},
    time::Duration,
};

use async_trait::async_trait;
use tokio::{
    io::{AsyncRead, ReadBuf},
    net::unix::pipe,
    process::{Child, Command},
    time::timeout,
};

use berth_server::ports::{NodeDirectory, NodeEntry, NodeFile, NodeLogError, NodeLogs};
use berth_sys::beneath::{self, OpenedEntry};

/// Number of leading bytes from which the file type is detected.
const HEAD: usize = 512;
/// Maximum number of directory entries that are listed.
const MOST_NAMES: usize = 50_000;
/// Timeout of listing the journal's units.
const UNITS_LIMIT: Duration = Duration::from_secs(10);
/// Maximum size of that list in bytes.
const UNITS_BYTES: usize = 4 << 20;

/// [`NodeLogs`] of this machine: files below `/var/log`, and the journal through `journalctl`.
pub struct MachineLogs {
    root: PathBuf,
    journalctl: PathBuf,
}

impl MachineLogs {
    /// Files below `root`. `journalctl` is the program that reads the journal, searched in `PATH` if it is not a path.
    pub fn new(root: impl Into<PathBuf>, journalctl: impl Into<PathBuf>) -> Self {
        Self { root: root.into(), journalctl: journalctl.into() }
    }
}

impl Default for MachineLogs {
    fn default() -> Self {
        Self::new("/var/log", "journalctl")
    }
}

#[async_trait]
impl NodeLogs for MachineLogs {
    async fn open(&self, path: &str) -> Result<NodeEntry, NodeLogError> {
        let (root, path) = (self.root.clone(), PathBuf::from(path));
        let opened = tokio::task::spawn_blocking(move || entry(&root, &path)).await;
        opened.unwrap_or_else(|error| Err(NodeLogError::Other(error.to_string())))
    }

    async fn units(&self) -> Option<String> {
        let mut command = Command::new(&self.journalctl);
        command.args(["--field", "_SYSTEMD_UNIT"]).stdin(Stdio::null()).kill_on_drop(true);
        let output = timeout(UNITS_LIMIT, command.output()).await.ok()?.ok()?;
        let mut list = output.stdout;
        list.truncate(UNITS_BYTES);
        output.status.success().then(|| String::from_utf8_lossy(&list).into_owned())
    }

    fn journal(&self, arguments: &[String]) -> io::Result<Box<dyn AsyncRead + Send + Unpin>> {
        let (output, input) = io::pipe()?;
        let mut command = Command::new(&self.journalctl);
        command.args(arguments).stdin(Stdio::null()).stdout(input.try_clone()?).stderr(input).kill_on_drop(true);
        let child = command.spawn()?;
        Ok(Box::new(Journal { output: pipe::Receiver::from_owned_fd(output.into())?, _child: child }))
    }
}

fn entry(root: &Path, path: &Path) -> Result<NodeEntry, NodeLogError> {
    let to_error = |error: io::Error| {
        let shown = root.join(path);
        let shown = shown.display();
        match error.kind() {
            io::ErrorKind::NotFound => NodeLogError::Missing(format!("stat {shown}: no such file or directory")),
            io::ErrorKind::PermissionDenied => NodeLogError::Forbidden(format!("open {shown}: permission denied")),
            _ => NodeLogError::Other(format!("open {shown}: {error}")),
        }
    };
    match beneath::open(root, path).map_err(to_error)? {
        OpenedEntry::File(file) => read_head(file).map(NodeEntry::File).map_err(to_error),
        OpenedEntry::Directory(directory) => {
            let entries = beneath::list(&directory, MOST_NAMES).map_err(to_error)?;
            let modified = File::from(directory).metadata().and_then(|metadata| metadata.modified()).ok();
            Ok(NodeEntry::Directory(NodeDirectory { entries, modified }))
        }
    }
}

fn read_head(file: File) -> io::Result<NodeFile> {
    let metadata = file.metadata()?;
    let mut head = vec![0; HEAD];
    let read = file.read_at(&mut head, 0)?;
    head.truncate(read);
    Ok(NodeFile { bytes: metadata.len(), modified: metadata.modified().ok(), head, file })
}

/// Output of a running `journalctl`, which is killed on drop.
struct Journal {
    output: pipe::Receiver,
    _child: Child,
}

impl AsyncRead for Journal {
    fn poll_read(mut self: Pin<&mut Self>, cx: &mut Context<'_>, buffer: &mut ReadBuf<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.output).poll_read(cx, buffer)
    }
}
