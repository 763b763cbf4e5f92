//! Image archive files: import sources and export targets as file descriptors for the runtime.

use std::{
    fs::{self, File, OpenOptions},
    io::{self, IsTerminal},
    os::{
        fd::OwnedFd,
        unix::fs::{FileTypeExt, OpenOptionsExt},
    },
    path::{Path, PathBuf},
    thread::JoinHandle,
};

use anyhow::{Context, Result, bail};
use rustix::{
    fs::{Mode, OFlags},
    pipe::PipeFlags,
};

use berth_runtime::config::EmbeddedConfig;

/// Opens an archive or directory. Pipes are copied to a file first: the importer must not wait for a pipe.
pub(super) fn archive(path: &Path, config: &EmbeddedConfig) -> Result<File> {
    if path != Path::new("-") {
        let file = OpenOptions::new().read(true).custom_flags(nix::libc::O_NONBLOCK).open(path)?;
        let kind = file.metadata()?.file_type();
        return match kind {
            _ if kind.is_dir() || kind.is_file() => Ok(file),
            _ if kind.is_fifo() => copied(&mut File::open(path)?, config),
            _ => bail!("not a regular file, directory, or pipe"),
        };
    }
    let stdin = io::stdin();
    if stdin.is_terminal() {
        bail!("cannot read an archive from stdin: it is a terminal");
    }
    copied(&mut stdin.lock(), config)
}

/// Copies to an unnamed temporary file, which is deleted with the process.
fn copied(from: &mut impl io::Read, config: &EmbeddedConfig) -> Result<File> {
    let temporary = std::env::temp_dir();
    let flags = OFlags::TMPFILE | OFlags::RDWR | OFlags::CLOEXEC;
    let open = |folder: &Path| rustix::fs::open(folder, flags, Mode::RUSR | Mode::WUSR);
    let file = open(&config.root).or_else(|_| open(&temporary));
    let mut file =
        File::from(file.with_context(|| format!("cannot create a temporary file in {}", temporary.display()))?);
    io::copy(from, &mut file).context("cannot copy the archive")?;
    Ok(file)
}

/// File or standard output to which an archive is written.
pub(super) enum ExportTarget {
    /// A file that is renamed to its final name once complete.
    File(PartialFile),
    /// Standard output, if it is a regular file.
    Output,
    /// Standard output, through a non-blocking pipe and a copying thread.
    Pipe(OwnedFd, JoinHandle<io::Result<u64>>),
}

/// Partial file; deleted on drop unless finished.
pub(super) struct PartialFile {
    file: File,
    path: PathBuf,
    target: PathBuf,
    is_finished: bool,
}

impl Drop for PartialFile {
    fn drop(&mut self) {
        if !self.is_finished {
            // The error that prevented completion is reported instead.
            let _ = fs::remove_file(&self.path);
        }
    }
}

impl ExportTarget {
    /// Opens a file, or standard output unless it is a terminal.
    pub(super) fn open(path: Option<&Path>) -> Result<Self> {
        if let Some(path) = path.filter(|path| *path != Path::new("-")) {
            return unfinished(path).map(Self::File).with_context(|| path.display().to_string());
        }
        let stdout = io::stdout();
        if stdout.is_terminal() {
            bail!("cannot write an archive to a terminal: use -o or redirect stdout");
        }
        let is_file = File::from(rustix::io::dup(&stdout)?).metadata()?.is_file();
        if is_file {
            return Ok(Self::Output);
        }
        let (read, write) = rustix::pipe::pipe_with(PipeFlags::CLOEXEC)?;
        // Only our end must be non-blocking: the other is read by its own thread.
        rustix::fs::fcntl_setfl(&write, OFlags::NONBLOCK)?;
        let copy = std::thread::spawn(move || io::copy(&mut File::from(read), &mut io::stdout().lock()));
        Ok(Self::Pipe(write, copy))
    }

    /// File to write the archive to.
    pub(super) fn file(&self) -> Result<File> {
        Ok(match self {
            Self::File(unfinished) => unfinished.file.try_clone()?,
            Self::Output => File::from(rustix::io::dup(io::stdout())?),
            Self::Pipe(write, _) => File::from(write.try_clone()?),
        })
    }

    /// Completes the export: renames the file, or waits for the copying thread.
    pub(super) fn finish(self) -> Result<()> {
        match self {
            Self::File(mut unfinished) => {
                let (from, to) = (&unfinished.path, &unfinished.target);
                fs::rename(from, to).with_context(|| to.display().to_string())?;
                unfinished.is_finished = true;
            }
            Self::Output => {}
            Self::Pipe(write, copy) => {
                drop(write);
                let copied = copy.join().map_err(|_| anyhow::anyhow!("the thread copying the archive panicked"))?;
                copied.context("cannot write to stdout")?;
            }
        }
        Ok(())
    }
}

fn unfinished(target: &Path) -> Result<PartialFile> {
    if target.is_dir() {
        bail!("is a directory");
    }
    let name = target.file_name().context("not a file name")?.to_string_lossy().into_owned();
    let path = target.with_file_name(format!(".{name}.{}", std::process::id()));
    let file = OpenOptions::new().write(true).create(true).truncate(true).mode(0o600).open(&path)?;
    Ok(PartialFile { file, path, target: target.to_owned(), is_finished: false })
}
