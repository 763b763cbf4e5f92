//! Confined child process that unpacks one layer.
//!
//! Before it reads the first byte it gives up other files, the network, and privileges; it dies with its parent. Its
//! root is the layer's directory. Features that the kernel lacks (Landlock, network namespaces) are skipped; every path
//! is resolved beneath the directory in any case ([`super::root`]). Implements spec 09b §5.2.

use std::{
    fs::File,
    io::{self, Write},
    os::fd::AsFd,
    process::ExitCode,
    sync::Mutex,
    time::{Duration, Instant},
};

use nix::{
    libc,
    sched::{CloneFlags, unshare},
    sys::{prctl, signal::Signal},
};
use rustix::thread::CapabilitySet;
use tracing::warn;

use super::{
    LayerSummary, UnpackTarget, apply_in, decompressor,
    root::{PathMode, RootDir},
    unpack_process::{OutputLine, UnpackJob},
};
use crate::images::error::{ImageError, IoContext};
use berth_sys::{
    child_process::{self, SingleThreaded},
    landlock,
    mount_api::{self, MountScope},
    privileges,
};

/// Capabilities needed to unpack.
const KEPT: CapabilitySet = CapabilitySet::CHOWN
    .union(CapabilitySet::DAC_OVERRIDE)
    .union(CapabilitySet::FOWNER)
    .union(CapabilitySet::FSETID)
    .union(CapabilitySet::MKNOD)
    .union(CapabilitySet::SETFCAP)
    .union(CapabilitySet::SYS_ADMIN);
/// Resource number and limit: open files, core dumps, data segment. A decoder's window is 128 MiB at most; names and
/// times of directories need the rest.
const LIMITS: [(u32, u64); 3] = [(7, 256), (4, 0), (2, 1 << 30)];
/// Maximum bytes of warnings in the output, so that all of it stays below the length the parent reads.
const WARNINGS: usize = 16 << 10;
/// Interval of keep-alive lines.
const ALIVE_EVERY: Duration = Duration::from_secs(10);

/// Runs the job and writes its outcome to standard output.
pub fn main(job: &str) -> ExitCode {
    let warnings = tracing_subscriber::fmt().with_ansi(false).without_time().with_level(false).with_target(false);
    // A subscriber that is already set is as good.
    let _ = warnings.with_writer(Mutex::new(Warnings { left: WARNINGS })).try_init();
    let outcome = serde_json::from_str(job)
        .map_err(|error| ImageError::invalid(format!("invalid unpack job: {error}")))
        .and_then(|job| unpack(&job));
    let code = if outcome.is_ok() { ExitCode::SUCCESS } else { ExitCode::FAILURE };
    match write_line(&OutputLine::Outcome(outcome)) {
        Ok(()) => code,
        Err(_) => ExitCode::FAILURE, // no reader
    }
}

fn unpack(job: &UnpackJob) -> Result<LayerSummary, ImageError> {
    prctl::set_pdeathsig(Signal::SIGKILL).attempt("set parent death signal")?;
    if nix::unistd::getppid().as_raw() != i32::try_from(job.parent).unwrap_or_default() {
        return Err(ImageError::bad_content("parent process exited"));
    }
    let alone = SingleThreaded::check().attempt("check for other threads")?;
    let root = RootDir::open(&job.into).attempt("open layer directory")?;
    let recipe = File::create_new(&job.recipe).attempt("create layer")?;
    confine(&root)?;
    // Bypass the buffer of standard input.
    let stream = File::from(io::stdin().as_fd().try_clone_to_owned().attempt("open input stream")?);
    // A thread spawned now has the reduced privileges; it opens no files.
    let stream = decompressor::decompress_ahead(stream)?;
    let mut last_alive = Instant::now();
    let mut alive = || {
        if last_alive.elapsed() >= ALIVE_EVERY {
            last_alive = Instant::now();
            // A parent that no longer reads kills this process or is gone.
            let _ = write_line(&OutputLine::Alive);
        }
    };
    apply_in(stream, UnpackTarget { root, way: PathMode::Fchdir(alone), alive: &mut alive }, &job.policy, Some(recipe))
}

fn confine(root: &RootDir) -> Result<(), ImageError> {
    for (resource, limit) in LIMITS {
        let limit = child_process::hard_limit(resource).map_or(limit, |hard| hard.min(limit));
        child_process::set_limit(resource, limit, limit).attempt("set resource limits")?;
    }
    unshare(CloneFlags::CLONE_NEWNS).attempt("create mount namespace")?;
    mount_api::change_root(libc::MS_SLAVE, MountScope::Tree).attempt("set mount propagation to slave")?;
    if let Err(error) = unshare(CloneFlags::CLONE_NEWNET) {
        warn!("failed to create network namespace: {error}");
    }
    rustix::process::fchdir(root.fd()).attempt("change to layer directory")?;
    rustix::process::chroot(".").attempt("chroot to layer directory")?;
    match landlock::change_only_beneath(root.fd()) {
        // The layer's directory is the only tree that can be named.
        Err(error) if error.kind() == io::ErrorKind::Unsupported => {}
        restricted => restricted.attempt("apply Landlock rules")?,
    }
    prctl::set_no_new_privs().attempt("set no_new_privs")?;
    privileges::keep_only(KEPT).attempt("drop capabilities")
}

fn write_line(line: &OutputLine) -> io::Result<()> {
    let mut text = serde_json::to_string(line).map_err(io::Error::other)?;
    text.push('\n');
    let mut out = io::stdout().lock();
    out.write_all(text.as_bytes())?;
    out.flush()
}

/// Writes warnings to the output, up to a total length.
struct Warnings {
    left: usize,
}

impl Write for Warnings {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        let text = String::from_utf8_lossy(bytes);
        // A byte takes at most six when escaped.
        let length = text.len().saturating_mul(6);
        if length <= self.left {
            self.left -= length;
            write_line(&OutputLine::Warning(text.trim_end().to_owned()))?;
        }
        Ok(bytes.len())
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}
