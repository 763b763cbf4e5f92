//! Termination messages: the end of the message file, or of the log (spec 03b §9).

use std::{
    fs::File,
    io::{self, Read},
    os::unix::fs::{FileExt, OpenOptionsExt},
    path::Path,
};

use super::{
    confined_path::LogLocation,
    filter::{Filter, LogOptions},
    tail::tail_start,
};
use berth_ports::{ContainerExit, LogPolicy};

/// Maximum bytes read from the end of the message file.
const FILE_BYTES: u64 = 4096;
/// Maximum lines read from the end of the log.
const LOG_LINES: u64 = 80;
/// Maximum bytes kept of these lines.
const LOG_BYTES: usize = 2048;

/// The message of an exited container: that of the runtime, and that of the container; its log is below
/// `root`.
pub fn message(exit: &ContainerExit, root: &Path) -> String {
    let falls_back =
        exit.policy == LogPolicy::FallbackToLogsOnError && exit.exit_code != 0 && exit.reason != "ContainerCannotRun";
    let left = match exit.message_file.as_deref().map(|path| (path, end_of(path))) {
        Some((path, Err(error))) if error.kind() != io::ErrorKind::NotFound => {
            format!("Error on reading termination log {}: {error}", path.display())
        }
        Some((_, Ok(text))) if !text.is_empty() => text,
        _ if falls_back => end_of_log(&exit.log_path, root)
            .unwrap_or_else(|error| format!("Error on reading termination message from logs: {error}")),
        _ => String::new(),
    };
    match (exit.message.is_empty(), left.is_empty()) {
        (false, false) => format!("{}: {left}", exit.message),
        (true, _) => left,
        (_, true) => exit.message.clone(),
    }
}

/// Opens without following a link and without waiting for the writer of a FIFO: the container controls
/// this file.
fn open(path: &Path) -> io::Result<File> {
    let flags = rustix::fs::OFlags::NONBLOCK | rustix::fs::OFlags::NOFOLLOW;
    let file = File::options().read(true).custom_flags(flags.bits().cast_signed()).open(path)?;
    if !file.metadata()?.is_file() {
        return Err(io::Error::new(io::ErrorKind::InvalidInput, "not a regular file"));
    }
    Ok(file)
}

fn end_of(path: &Path) -> io::Result<String> {
    let file = open(path)?;
    let size = file.metadata()?.len();
    let mut bytes = Vec::new();
    let start = size.saturating_sub(FILE_BYTES);
    bytes.resize(usize::try_from(size - start).unwrap_or_default(), 0);
    file.read_exact_at(&mut bytes, start)?;
    Ok(text(&bytes))
}

/// Drops the rest of a truncated UTF-8 character at the start.
fn text(bytes: &[u8]) -> String {
    let broken = bytes.iter().take(3).take_while(|b| **b & 0xc0 == 0x80).count();
    String::from_utf8_lossy(bytes.get(broken..).unwrap_or_default()).into_owned()
}

fn end_of_log(path: &Path, root: &Path) -> Result<String, Box<dyn std::error::Error>> {
    let place = LogLocation::find(root, path)?;
    let mut file = place.open(&place.path)?;
    let start = tail_start(&file, LOG_LINES)?;
    io::Seek::seek(&mut file, io::SeekFrom::Start(start))?;
    let mut filter = Filter::new(&LogOptions { tail: Some(LOG_LINES), ..LogOptions::default() });
    let mut chunk = vec![0; super::log_reader::CHUNK];
    let mut kept = Vec::new();
    loop {
        let read = file.read(&mut chunk)?;
        if read == 0 || filter.is_done() {
            break;
        }
        filter.push(chunk.get(..read).unwrap_or_default(), &mut kept)?;
        keep_end(&mut kept);
    }
    filter.finish(&mut kept)?;
    keep_end(&mut kept);
    Ok(text(&kept))
}

fn keep_end(bytes: &mut Vec<u8>) {
    bytes.drain(..bytes.len().saturating_sub(LOG_BYTES));
}

#[cfg(test)]
mod tests {
    use std::path::PathBuf;

    use super::*;

    struct Case {
        directory: tempfile::TempDir,
    }

    impl Case {
        fn new() -> Self {
            Self { directory: tempfile::tempdir().expect("a directory") }
        }

        fn file(&self, name: &str, content: &[u8]) -> PathBuf {
            let path = self.directory.path().join(name);
            std::fs::write(&path, content).expect("written");
            path
        }

        fn exit(&self, file: &[u8], policy: LogPolicy) -> ContainerExit {
            let log: String = (0..100).map(|n| format!("2026-01-01T00:00:00Z stdout F line {n}\n")).collect();
            ContainerExit {
                message_file: Some(self.file("message", file)),
                policy,
                log_path: self.file("0.log", log.as_bytes()),
                exit_code: 1,
                reason: "Error".into(),
                message: String::new(),
            }
        }
    }

    use LogPolicy::{FallbackToLogsOnError, File as OnlyFile};

    /// The message, with each test's directory as that of a pod.
    fn message(exit: &ContainerExit) -> String {
        super::message(exit, exit.log_path.ancestors().nth(2).expect("two directories"))
    }

    #[test]
    fn the_file_comes_first() {
        let case = Case::new();
        let exit = case.exit(b"gone", FallbackToLogsOnError);
        assert_eq!(message(&exit), "gone");
        assert_eq!(message(&ContainerExit { message: "oh".into(), ..exit.clone() }), "oh: gone");
        let long = [vec![b'x'; 100], vec![b'y'; 4096]].concat();
        assert_eq!(message(&case.exit(&long, OnlyFile)), "y".repeat(4096));
        let absent = ContainerExit { message_file: Some(case.directory.path().join("absent")), ..exit };
        assert_eq!(message(&ContainerExit { policy: OnlyFile, message: "oh".into(), ..absent }), "oh");
    }

    #[test]
    fn a_failure_without_message_shows_the_log() {
        // AC-03b-31
        let case = Case::new();
        let lines = |from: usize| (from..100).map(|n| format!("line {n}\n")).collect::<String>();
        let exit = case.exit(b"", FallbackToLogsOnError);
        assert_eq!(message(&exit), lines(20), "the last 80 lines");
        let wide: String = (0..100).map(|n| format!("2026-01-01T00:00:00Z stdout F {n:0100}\n")).collect();
        std::fs::write(&exit.log_path, wide).expect("written");
        assert_eq!(message(&exit).len(), 2048);
        // AC-03b-32
        for (name, quiet) in [
            ("AC-03b-32 success", ContainerExit { exit_code: 0, ..exit.clone() }),
            ("cannot run", ContainerExit { reason: "ContainerCannotRun".into(), ..exit.clone() }),
            ("policy", ContainerExit { policy: OnlyFile, ..exit.clone() }),
        ] {
            assert_eq!(message(&quiet), "", "{name}");
        }
        let lost = ContainerExit { log_path: case.directory.path().join("absent"), message_file: None, ..exit };
        assert!(message(&lost).starts_with("Error on reading termination message from logs: "));
    }

    #[test]
    fn what_is_no_file_is_not_read() {
        let case = Case::new();
        let mut exit = case.exit(b"", OnlyFile);
        exit.message_file = Some(case.directory.path().to_owned());
        assert!(message(&exit).starts_with("Error on reading termination log "));
        let link = case.directory.path().join("link");
        std::os::unix::fs::symlink("/etc/hostname", &link).expect("linked");
        exit.message_file = Some(link);
        assert!(message(&exit).starts_with("Error on reading termination log "), "links are not followed");
    }

    #[test]
    fn a_cut_character_is_dropped() {
        assert_eq!(text("ä".as_bytes().get(1..).unwrap_or_default()), "");
        assert_eq!(text(b"a\xff"), "a\u{fffd}");
    }
}
