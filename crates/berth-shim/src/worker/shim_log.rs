//! Log of the shim itself on stderr: a bounded file that drops its older half when full.

use std::{
    fs::File,
    io::{self, Read, Seek, SeekFrom, Write},
    os::fd::AsFd,
    time::{SystemTime, UNIX_EPOCH},
};

/// Maximum size of the log file, bytes. Spec 09a §14.
const MOST: u64 = 64 << 10;

/// Logs a line. A line that cannot be written is lost: there is no other output.
pub fn log(text: &str) {
    let now = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
    let head = super::log_record::head(now, b"shim  ", super::log_record::Tag::Full);
    let time = String::from_utf8_lossy(head.get(..30).unwrap_or_default()).into_owned();
    let _ = io::stderr().write_all(format!("{time} {text}\n").as_bytes());
    if let Ok(fd) = io::stderr().as_fd().try_clone_to_owned() {
        let _ = shorten(&mut File::from(fd));
    }
}

/// Truncates a file that is too long to its newer half. The file must be open for appending.
fn shorten(file: &mut File) -> io::Result<()> {
    let metadata = file.metadata()?;
    if !metadata.is_file() || metadata.len() <= MOST {
        return Ok(());
    }
    let mut newer = Vec::new();
    file.seek(SeekFrom::Start(metadata.len() - MOST / 2))?;
    file.read_to_end(&mut newer)?;
    let start = newer.iter().position(|b| *b == b'\n').map_or(0, |at| at + 1);
    file.set_len(0)?;
    file.write_all(newer.get(start..).unwrap_or_default())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_newer_half_is_kept() {
        let folder = tempfile::tempdir().expect("a folder");
        let path = folder.path().join("shim.log");
        let mut file = File::options().read(true).append(true).create(true).open(&path).expect("opened");
        for number in 0..MOST / 8 {
            writeln!(file, "{number:07}").expect("written");
        }
        shorten(&mut file).expect("short enough");
        assert_eq!(file.metadata().expect("metadata").len(), MOST);
        writeln!(file, "the last").expect("written");
        shorten(&mut file).expect("shortened");
        let text = std::fs::read_to_string(&path).expect("readable");
        assert!(text.len() <= 32 << 10 && text.ends_with("8191\nthe last\n"), "{}", text.len());
        assert_eq!(text.lines().next().map(str::len), Some(7), "whole lines");
    }
}
