//! Has a layer unpacked by a process of its own: what decompressing takes is never ours, and a decoder that is led astray
//! ends itself, not the agent.
//!
//! ```text
//!  stream ──► standard input of `berth unpack-layer JOB`
//!             standard output: a line for each warning, then what came of it
//! ```
//! Blocking. Behaviour: spec 09b §5.2.

use std::{
    io::{self, Read, Write},
    os::unix::process::{CommandExt, ExitStatusExt},
    path::{Path, PathBuf},
    process::{Child, ChildStdin, Command, ExitStatus, Stdio},
};

use serde::{Deserialize, Serialize};
use tracing::warn;

use super::{Applied, Policy};
use crate::embedded::images::error::{Attempt, ImageError, Kind};

/// The command that unpacks; nobody types it.
pub const VERB: &str = "unpack-layer";
/// What the program is called, whatever its file is.
const NAME: &str = "berth";
/// Bytes that are handed over at once.
const PIECE: usize = 256 << 10;
/// Bytes of the stream that may wait for the other process; more than the kernel allows is less.
const WAITING: usize = 1 << 20;
/// Longest answer, bytes.
const LONGEST: u64 = 64 << 10;

/// What is to be unpacked, and where.
#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub struct Job {
    /// An existing directory.
    pub into: PathBuf,
    /// A file that is made, which tells how the stream is put together again.
    pub recipe: PathBuf,
    /// Under which rules.
    pub policy: Policy,
    /// Whose child it must be: else it is too late.
    pub parent: u32,
}

/// A line of an answer.
#[derive(Serialize, Deserialize)]
pub(super) enum Line {
    /// Something was left out.
    Warning(String),
    /// What came of it.
    Outcome(Result<Applied, ImageError>),
}

/// Kills what is not waited for.
struct Running(Child);

impl Drop for Running {
    fn drop(&mut self) {
        let _has_ended = self.0.kill();
        let _ = self.0.wait();
    }
}

/// Unpacks a layer, packed in any way we know, by that program.
///
/// # Errors
/// Where the stream is broken, beyond the bounds, or something cannot be written; also where the program ends without
/// saying why. The directory is half filled then.
pub fn apply<R: Read>(packed: R, program: &Path, job: &Job) -> Result<Applied, ImageError> {
    let text = serde_json::to_string(job).map_err(|error| ImageError::bad_content(error.to_string()))?;
    let mut command = Command::new(program);
    command.arg0(NAME).args([VERB, &text]).env_clear().current_dir("/");
    command.stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::inherit());
    let mut running = Running(command.spawn().attempt(format!("start {} to unpack a layer", program.display()))?);
    let missing = || ImageError::bad_content("a pipe is missing");
    let (to, from) = (running.0.stdin.take().ok_or_else(missing)?, running.0.stdout.take().ok_or_else(missing)?);
    hand_over(packed, to)?;
    let mut answer = String::new();
    from.take(LONGEST).read_to_string(&mut answer).attempt("hear what came of unpacking a layer")?;
    let status = running.0.wait().attempt("wait for who unpacks a layer")?;
    outcome(&answer, status)
}

/// Who does not want the rest says why.
fn hand_over<R: Read>(mut packed: R, mut to: ChildStdin) -> Result<(), ImageError> {
    // A smaller pipe is only slower.
    let _refused = rustix::pipe::fcntl_setpipe_size(&to, WAITING);
    let mut buffer = vec![0; PIECE];
    loop {
        let count = match packed.read(&mut buffer) {
            Err(error) if error.kind() == io::ErrorKind::Interrupted => continue,
            read => read.map_err(|error| ImageError::bad_content(format!("invalid layer: {error}")))?,
        };
        let piece = buffer.get(..count).unwrap_or_default();
        match to.write_all(piece) {
            _ if piece.is_empty() => return Ok(()),
            Ok(()) => {}
            Err(error) if error.kind() == io::ErrorKind::BrokenPipe => return Ok(()),
            Err(error) => return Err(ImageError::io("hand a layer over", &error)),
        }
    }
}

fn outcome(answer: &str, status: ExitStatus) -> Result<Applied, ImageError> {
    let mut outcome = None;
    for line in answer.lines() {
        match serde_json::from_str(line) {
            Ok(Line::Warning(text)) => warn!(cause = text, "Something in a layer was left out"),
            Ok(Line::Outcome(told)) => outcome = Some(told),
            Err(_) => break,
        }
    }
    let silent = match (status.signal(), status.code()) {
        (Some(signal), _) => format!("it was killed by signal {signal}"),
        (None, code) => format!("it ended with code {}", code.unwrap_or_default()),
    };
    let silent =
        || ImageError::new(Kind::Unknown, format!("who unpacks the layer did not say what came of it: {silent}"));
    outcome.unwrap_or_else(|| Err(silent()))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::embedded::images::{
        apply::{Bounds, Form},
        digest::Digest,
    };

    fn job(folder: &Path) -> Job {
        Job {
            into: folder.to_owned(),
            recipe: folder.join("recipe"),
            policy: Policy { bounds: Bounds::default(), form: Form::Merged, keep_free: 0 },
            parent: std::process::id(),
        }
    }

    /// A program that does as it likes with its job.
    fn program(folder: &Path, script: &str) -> PathBuf {
        use std::os::unix::fs::PermissionsExt;
        let path = folder.join("program");
        std::fs::write(&path, format!("#!/bin/sh\n{script}\n")).expect("written");
        std::fs::set_permissions(&path, PermissionsExt::from_mode(0o755)).expect("set");
        path
    }

    #[test]
    fn whatever_becomes_of_the_other_process_is_told() {
        let dir = tempfile::tempdir().expect("a directory");
        let applied = Applied { diff_id: Digest::of(b"x"), bytes: 1, entries: 2, stream: 3, is_noted: true };
        let told = |line: &Line| serde_json::to_string(line).expect("JSON");
        let (good, bad) = (told(&Line::Outcome(Ok(applied))), told(&Line::Outcome(Err(ImageError::invalid("no")))));
        let warned = told(&Line::Warning("w".into()));
        for (script, expected) in [
            (format!("cat > /dev/null; echo '{warned}'; echo '{good}'"), Ok(applied)),
            // It has read nothing, and knows enough.
            (format!("echo '{bad}'; exit 1"), Err("no")),
            ("kill -9 $$".to_owned(), Err("it was killed by signal 9")),
            ("kill -SEGV $$".to_owned(), Err("it was killed by signal 11")),
            ("exit 3".to_owned(), Err("it ended with code 3")),
            ("echo nonsense".to_owned(), Err("it ended with code 0")),
            ("exec 0<&-; head -c 1000000 /dev/zero | tr '\\0' x".to_owned(), Err("did not say what came of it")),
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
        struct Broken;
        impl Read for Broken {
            fn read(&mut self, _: &mut [u8]) -> io::Result<usize> {
                Err(io::Error::other("broke off"))
            }
        }
        let dir = tempfile::tempdir().expect("a directory");
        let program = program(dir.path(), "exec sleep 600");
        let error = apply(Broken, &program, &job(dir.path())).expect_err("broken");
        assert_eq!(error.text, "invalid layer: broke off");
    }
}
