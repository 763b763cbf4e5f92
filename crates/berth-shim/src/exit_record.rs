//! Exit record of a container on disk, read by an agent that was not running at the exit.
//!
//! `exits/<container>` in a shim's directory, replaced by rename and not synced: after a power loss none of the
//! processes exists. The agent deletes it once it has stored the state. Implements spec 09a §12.

use std::{
    fs::{self, File},
    io::{self, Write},
    path::Path,
};

use super::plan::{Exit, StartedProcess};

/// Name of the directory of exit records in a shim's directory.
pub const FOLDER: &str = "exits";
/// Maximum size of a record that is read, bytes.
const LONGEST: u64 = 4096;

/// An exit record: the process and its exit.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct ExitRecord {
    /// PID on the host.
    pub pid: u32,
    /// Start time (field 22 of `/proc/<pid>/stat`).
    pub start_ticks: u64,
    /// Wall-clock start time, nanoseconds since the epoch.
    pub started_ns: i64,
    /// Exit of the process.
    pub exit: Exit,
}

impl ExitRecord {
    /// Record of a started process and its exit.
    pub fn of(started: StartedProcess, exit: Exit) -> Self {
        Self { pid: started.pid, start_ticks: started.start_ticks, started_ns: started.at_ns, exit }
    }

    /// JSON text of the record.
    pub fn text(&self) -> String {
        let Self { pid, start_ticks, started_ns, exit } = self;
        let Exit { code, is_signal, at_ns, is_oom, oom_kills, lost_lines } = exit;
        format!(
            "{{\"v\":1,\"pid\":{pid},\"start_ticks\":{start_ticks},\"started_ns\":{started_ns},\"code\":{code},\
             \"signaled\":{is_signal},\"finished_ns\":{at_ns},\"oom\":{is_oom},\"oom_kills\":{oom_kills},\
             \"lost_lines\":{lost_lines}}}\n"
        )
    }

    /// Parses the output of [`text`](Self::text); `None` if malformed or of another version.
    pub fn parse(text: &[u8]) -> Option<Self> {
        let value: serde_json::Value = serde_json::from_slice(text).ok()?;
        if value.get("v")?.as_u64()? != 1 {
            return None;
        }
        let exit = Exit {
            code: i32::try_from(value.get("code")?.as_i64()?).ok()?,
            is_signal: value.get("signaled")?.as_bool()?,
            at_ns: value.get("finished_ns")?.as_i64()?,
            is_oom: value.get("oom")?.as_bool()?,
            oom_kills: value.get("oom_kills")?.as_u64()?,
            lost_lines: value.get("lost_lines")?.as_u64()?,
        };
        Some(Self {
            pid: u32::try_from(value.get("pid")?.as_u64()?).ok()?,
            start_ticks: value.get("start_ticks")?.as_u64()?,
            started_ns: value.get("started_ns")?.as_i64()?,
            exit,
        })
    }

    /// Writes the record of a container into the shim's directory.
    ///
    /// # Errors
    /// The file system's error; a previous record is unchanged then.
    pub fn write(&self, folder: &Path, container: &str) -> io::Result<()> {
        let exits = folder.join(FOLDER);
        let temporary = exits.join(format!(".{container}"));
        File::create(&temporary)?.write_all(self.text().as_bytes())?;
        fs::rename(&temporary, exits.join(container))
    }

    /// Reads the record of a container from the shim's directory; `None` if it is missing or malformed.
    ///
    /// # Errors
    /// The file system's error.
    pub fn read(folder: &Path, container: &str) -> io::Result<Option<Self>> {
        let file = match File::open(folder.join(FOLDER).join(container)) {
            Ok(file) => file,
            Err(e) if e.kind() == io::ErrorKind::NotFound => return Ok(None),
            Err(e) => return Err(e),
        };
        let mut text = Vec::new();
        io::Read::read_to_end(&mut io::Read::take(file, LONGEST), &mut text)?;
        Ok(Self::parse(&text))
    }

    /// Deletes the record of a container from the shim's directory; a missing record is success.
    ///
    /// # Errors
    /// The file system's error.
    pub fn delete(folder: &Path, container: &str) -> io::Result<()> {
        match fs::remove_file(folder.join(FOLDER).join(container)) {
            Err(e) if e.kind() != io::ErrorKind::NotFound => Err(e),
            _ => Ok(()),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_record_is_read_as_it_was_written() {
        let exit = Exit { code: 137, is_signal: true, at_ns: 5, is_oom: true, oom_kills: 2, lost_lines: 3 };
        let record = ExitRecord { pid: 7, start_ticks: 9, started_ns: -1, exit };
        assert_eq!(ExitRecord::parse(record.text().as_bytes()), Some(record));
        let folder = tempfile::tempdir().expect("a folder");
        fs::create_dir(folder.path().join(FOLDER)).expect("a folder");
        assert_eq!(ExitRecord::read(folder.path(), "c").expect("readable"), None);
        record.write(folder.path(), "c").expect("written");
        assert_eq!(ExitRecord::read(folder.path(), "c").expect("readable"), Some(record));
        ExitRecord::delete(folder.path(), "c").expect("deleted");
        ExitRecord::delete(folder.path(), "c").expect("nothing to delete");
    }

    #[test]
    fn what_is_no_record_is_none() {
        for text in ["", "{}", "{\"v\":2}", "[1]", "{\"v\":1,\"pid\":-1}"] {
            assert_eq!(ExitRecord::parse(text.as_bytes()), None, "{text}");
        }
    }
}
