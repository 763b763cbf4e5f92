//! Unpacks a layer in a child process: its memory use or crash does not affect the agent.
//!
//! ```text
//!  stream ──► standard input of `berth unpack-layer JOB`
//!             standard output: one line per warning, periodic keep-alive lines, then the outcome
//! ```
//! A process that neither reads nor writes for two minutes is killed. Blocking. Implements spec 09b §5.2.

use std::{
    io::{self, Read, Write},
    os::unix::process::{CommandExt, ExitStatusExt},
    path::{Path, PathBuf},
    process::{Child, ChildStdin, ChildStdout, Command, ExitStatus, Stdio},
    thread,
    time::Duration,
};

use rustix::{
    event::{PollFd, PollFlags, Timespec, poll},
    io::Errno,
    process::{Pid, PidfdFlags, pidfd_open},
};
use serde::{Deserialize, Serialize};
use tracing::warn;

use super::{LayerSummary, UnpackPolicy};
use crate::images::error::{ImageError, ImageErrorKind, IoContext};

/// Internal subcommand that unpacks a layer.
pub const VERB: &str = "unpack-layer";
/// `argv[0]` of the process, independent of the file's name.
const NAME: &str = "berth";
/// Buffer for the stream, bytes.
const PIECE: usize = 256 << 10;
/// Requested pipe size, bytes; the kernel may grant less.
const WAITING: usize = 1 << 20;
/// Maximum length of the output, bytes.
const LONGEST: usize = 64 << 10;
/// Timeout without reads and writes by the process: a disk hung for that long does not recover.
const PATIENCE: Duration = Duration::from_secs(120);
/// How long a killed process may take to exit: one blocked on a disk exits only with the I/O.
const DYING: Duration = Duration::from_secs(5);

/// Request to unpack one layer.
#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub struct UnpackJob {
    /// Existing target directory.
    pub into: PathBuf,
    /// File to create for the recipe that restores the tar stream.
    pub recipe: PathBuf,
    /// Limits and format.
    pub policy: UnpackPolicy,
    /// Expected PID of the parent; with another parent the process exits.
    pub parent: u32,
}

/// JSON line on the standard output of the unpack process.
#[derive(Serialize, Deserialize)]
pub(super) enum OutputLine {
    /// Something of the layer was omitted.
    Warning(String),
    /// Keep-alive.
    Alive,
    /// Result of the job.
    Outcome(Result<LayerSummary, ImageError>),
}

/// The child process; killed on drop unless it was waited for.
struct ChildProcess(Option<Child>);

impl ChildProcess {
    /// Waits for the exit; `None` on timeout.
    fn wait(&mut self, limit: Duration) -> io::Result<Option<ExitStatus>> {
        let Some(child) = &mut self.0 else { return Ok(None) };
        let pid = i32::try_from(child.id()).ok().and_then(Pid::from_raw);
        let pid = pid.ok_or_else(|| io::Error::other("child PID out of range"))?;
        let handle = pidfd_open(pid, PidfdFlags::empty())?;
        match ready(&mut [PollFd::new(&handle, PollFlags::IN)], limit)? {
            false => Ok(None),
            true => {
                let status = child.wait()?;
                self.0 = None; // its PID may be reused from here on
                Ok(Some(status))
            }
        }
    }
}

impl Drop for ChildProcess {
    fn drop(&mut self) {
        let _has_ended = self.0.as_mut().map(Child::kill);
        if matches!(self.wait(DYING), Ok(Some(_))) {
            return;
        }
        if let Some(mut child) = self.0.take() {
            warn!(pid = child.id(), "Unpack process does not exit after SIGKILL");
            // Reap it in a thread once it exits; otherwise it remains a zombie.
            let _ = thread::Builder::new().name("reap".to_owned()).spawn(move || child.wait());
        }
    }
}

/// Whether a descriptor becomes ready within the limit.
fn ready(wanted: &mut [PollFd<'_>], limit: Duration) -> io::Result<bool> {
    let limit = Timespec::try_from(limit).map_err(io::Error::other)?;
    loop {
        match poll(wanted, Some(&limit)) {
            Err(Errno::INTR) => {}
            polled => return Ok(polled? > 0),
        }
    }
}

/// Unpacks a layer of any known compression with the given program.
///
/// # Errors
/// The stream is invalid or exceeds the limits, a write fails, or the program exits without an outcome or hangs. The
/// directory is partially filled then.
pub fn apply<R: Read>(packed: R, program: &Path, job: &UnpackJob) -> Result<LayerSummary, ImageError> {
    apply_within(PATIENCE, packed, program, job)
}

fn apply_within<R: Read>(
    patience: Duration,
    packed: R,
    program: &Path,
    job: &UnpackJob,
) -> Result<LayerSummary, ImageError> {
    let text = serde_json::to_string(job).map_err(|error| ImageError::bad_content(error.to_string()))?;
    let mut command = Command::new(program);
    command.arg0(NAME).args([VERB, &text]).env_clear().current_dir("/");
    command.stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::inherit());
    let mut child = command.spawn().attempt(format!("start {} to unpack a layer", program.display()))?;
    let pipes = child.stdin.take().zip(child.stdout.take());
    let mut running = ChildProcess(Some(child));
    let (to, from) = pipes.ok_or_else(|| ImageError::bad_content("pipe to the unpack process is missing"))?;
    let mut talk = ProcessPipes::new(to, from, patience).attempt("set up pipes to the unpack process")?;
    talk.write_input(packed)?;
    while talk.from.is_some() {
        talk.wait()?;
    }
    let status = running.wait(patience).attempt("wait for the unpack process")?;
    outcome(&String::from_utf8_lossy(&talk.output), status.ok_or_else(|| timed_out(patience))?)
}

fn timed_out(patience: Duration) -> ImageError {
    ImageError::new(
        ImageErrorKind::DeadlineExceeded,
        format!("unpack process made no progress for {patience:?} and was killed"),
    )
}

/// Both pipes, in non-blocking mode.
struct ProcessPipes {
    /// Open while there is input to write.
    to: Option<ChildStdin>,
    /// Open until the output is read.
    from: Option<ChildStdout>,
    output: Vec<u8>,
    patience: Duration,
}

impl ProcessPipes {
    fn new(to: ChildStdin, from: ChildStdout, patience: Duration) -> io::Result<Self> {
        // A smaller pipe is only slower.
        let _refused = rustix::pipe::fcntl_setpipe_size(&to, WAITING);
        rustix::io::ioctl_fionbio(&to, true)?;
        rustix::io::ioctl_fionbio(&from, true)?;
        Ok(Self { to: Some(to), from: Some(from), output: Vec::new(), patience })
    }

    /// Writes the stream to the process; one that closes its input early reports the reason as its outcome.
    fn write_input<R: Read>(&mut self, mut packed: R) -> Result<(), ImageError> {
        let mut buffer = vec![0; PIECE];
        while self.to.is_some() {
            let count = match packed.read(&mut buffer) {
                Err(error) if error.kind() == io::ErrorKind::Interrupted => continue,
                read => read.map_err(|error| ImageError::bad_content(format!("invalid layer: {error}")))?,
            };
            let mut rest = buffer.get(..count).unwrap_or_default();
            if rest.is_empty() {
                self.to = None;
            }
            while let (Some(to), [_, ..]) = (&mut self.to, rest) {
                match to.write(rest) {
                    Ok(count) => rest = rest.get(count..).unwrap_or_default(),
                    Err(error) if error.kind() == io::ErrorKind::BrokenPipe => self.to = None,
                    Err(error) if error.kind() == io::ErrorKind::WouldBlock => self.wait()?,
                    Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                    Err(error) => return Err(ImageError::io("write layer to the unpack process", &error)),
                }
            }
        }
        Ok(())
    }

    /// Waits until the pipe is writable or output has been read.
    fn wait(&mut self) -> Result<(), ImageError> {
        let mut wanted = Vec::with_capacity(2);
        wanted.extend(self.from.iter().map(|from| PollFd::new(from, PollFlags::IN)));
        wanted.extend(self.to.iter().map(|to| PollFd::new(to, PollFlags::OUT)));
        if !ready(&mut wanted, self.patience).attempt("wait for the unpack process")? {
            return Err(timed_out(self.patience));
        }
        self.read_output().attempt("read output of the unpack process")
    }

    fn read_output(&mut self) -> io::Result<()> {
        let mut buffer = [0; 4096];
        while let Some(from) = &mut self.from {
            match from.read(&mut buffer) {
                Ok(0) => self.from = None,
                Ok(count) => {
                    self.output.extend_from_slice(buffer.get(..count).unwrap_or_default());
                    if self.output.len() >= LONGEST {
                        self.from = None;
                    }
                }
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => return Ok(()),
                Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                Err(error) => return Err(error),
            }
        }
        Ok(())
    }
}

fn outcome(answer: &str, status: ExitStatus) -> Result<LayerSummary, ImageError> {
    let mut outcome = None;
    for line in answer.lines() {
        match serde_json::from_str(line) {
            Ok(OutputLine::Warning(text)) => warn!(cause = text, "Skipped part of a layer"),
            Ok(OutputLine::Outcome(result)) => outcome = Some(result),
            Ok(OutputLine::Alive) => {}
            Err(_) => break,
        }
    }
    let silent = match (status.signal(), status.code()) {
        (Some(signal), _) => format!("killed by signal {signal}"),
        (None, code) => format!("exit code {}", code.unwrap_or_default()),
    };
    let silent =
        || ImageError::new(ImageErrorKind::Unknown, format!("unpack process exited without a result: {silent}"));
    outcome.unwrap_or_else(|| Err(silent()))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::images::{
        digest::Digest,
        unpacker::{LayerFormat, LayerLimits},
    };

    fn job(folder: &Path) -> UnpackJob {
        UnpackJob {
            into: folder.to_owned(),
            recipe: folder.join("recipe"),
            policy: UnpackPolicy { bounds: LayerLimits::default(), form: LayerFormat::Merged, keep_free: 0 },
            parent: std::process::id(),
        }
    }

    /// A script in place of the program.
    fn program(folder: &Path, script: &str) -> PathBuf {
        use std::os::unix::fs::PermissionsExt;
        let path = folder.join("program");
        std::fs::write(&path, format!("#!/bin/sh\n{script}\n")).expect("written");
        std::fs::set_permissions(&path, PermissionsExt::from_mode(0o755)).expect("set");
        path
    }

    #[test]
    fn every_outcome_of_the_unpack_process_is_reported() {
        let dir = tempfile::tempdir().expect("a directory");
        let applied = LayerSummary { diff_id: Digest::of(b"x"), bytes: 1, entries: 2, stream: 3, is_noted: true };
        let encode = |line: &OutputLine| serde_json::to_string(line).expect("JSON");
        let (good, bad) =
            (encode(&OutputLine::Outcome(Ok(applied))), encode(&OutputLine::Outcome(Err(ImageError::invalid("no")))));
        let warned = encode(&OutputLine::Warning("w".into()));
        for (script, expected) in [
            (format!("cat > /dev/null; echo '{warned}'; echo '{good}'"), Ok(applied)),
            // It rejects the layer without reading it.
            (format!("echo '{bad}'; exit 1"), Err("no")),
            ("kill -9 $$".to_owned(), Err("killed by signal 9")),
            ("kill -SEGV $$".to_owned(), Err("killed by signal 11")),
            ("exit 3".to_owned(), Err("exit code 3")),
            ("echo nonsense".to_owned(), Err("exit code 0")),
            ("exec 0<&-; head -c 1000000 /dev/zero | tr '\\0' x".to_owned(), Err("exited without a result")),
        ] {
            let program = program(dir.path(), &script);
            let stream = io::repeat(7).take(3 << 20);
            match (apply(stream, &program, &job(dir.path())), expected) {
                (Ok(got), Ok(expected)) => assert_eq!(got, expected, "{script}"),
                (Err(error), Err(text)) => assert!(error.text.ends_with(text) || error.text.contains(text), "{error}"),
                (got, _) => panic!("{script}: {got:?}"),
            }
        }
        let error = apply(io::empty(), Path::new("/nowhere"), &job(dir.path())).expect_err("there is none");
        assert!(error.text.starts_with("start /nowhere to unpack a layer"), "{error}");
    }

    #[test]
    fn a_stream_that_breaks_off_ends_the_other_process() {
        struct BrokenReader;
        impl Read for BrokenReader {
            fn read(&mut self, _: &mut [u8]) -> io::Result<usize> {
                Err(io::Error::other("broke off"))
            }
        }
        let dir = tempfile::tempdir().expect("a directory");
        let program = program(dir.path(), "exec sleep 600");
        let error = apply(BrokenReader, &program, &job(dir.path())).expect_err("broken");
        assert_eq!(error.text, "invalid layer: broke off");
    }

    #[test]
    fn an_exited_process_is_not_waited_for_again() {
        let mut running = ChildProcess(Some(Command::new("true").spawn().expect("a process")));
        assert!(running.wait(PATIENCE).expect("asked").expect("in time").success());
        assert!(running.0.is_none(), "its number may be another's");
    }

    #[test]
    fn a_process_that_hangs_is_killed() {
        let dir = tempfile::tempdir().expect("a directory");
        let patience = Duration::from_secs(1);
        let alive = serde_json::to_string(&OutputLine::Alive).expect("JSON");
        let good = LayerSummary { diff_id: Digest::of(b"x"), bytes: 1, entries: 2, stream: 3, is_noted: true };
        let outcome_line = serde_json::to_string(&OutputLine::Outcome(Ok(good))).expect("JSON");
        for (script, expected) in [
            // Reads nothing; reads everything and stays silent; reports success and does not exit.
            ("exec sleep 600".to_owned(), None),
            ("cat > /dev/null; exec sleep 600".to_owned(), None),
            (format!("cat > /dev/null; echo '{outcome_line}'; exec > /dev/null; exec sleep 600"), None),
            // A keep-alive line suffices, even if nothing is read.
            (
                format!(
                    "for i in 1 2 3 4 5 6 7 8; do echo '{alive}'; sleep 0.2; done; cat > /dev/null; echo '{outcome_line}'"
                ),
                Some(good),
            ),
        ] {
            let program = program(dir.path(), &script);
            match (apply_within(patience, io::repeat(7).take(3 << 20), &program, &job(dir.path())), expected) {
                (Ok(got), Some(expected)) => assert_eq!(got, expected, "{script}"),
                (Err(error), None) => {
                    assert_eq!(error.kind, ImageErrorKind::DeadlineExceeded, "{script}: {error}");
                    assert_eq!(error.text, "unpack process made no progress for 1s and was killed");
                }
                (got, _) => panic!("{script}: {got:?}"),
            }
        }
    }
}
