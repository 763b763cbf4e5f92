//! Finds the start of the last lines of a file.

use std::{fs::File, io, os::unix::fs::FileExt};

const BLOCK: u64 = 16 * 1024;

/// Offset of the last `lines` newline-terminated lines, found by searching backwards in blocks. An
/// incomplete last line is not counted (spec 03b §10).
///
/// # Errors
/// The file cannot be read.
pub fn tail_start(file: &File, lines: u64) -> io::Result<u64> {
    let mut right = file.metadata()?.len();
    let mut found = 0_u64;
    let mut block = vec![0; usize::try_from(BLOCK).unwrap_or(usize::MAX)];
    while right > 0 {
        let left = right.saturating_sub(BLOCK);
        let size = usize::try_from(right - left).unwrap_or(usize::MAX);
        let bytes = block.get_mut(..size).unwrap_or_default();
        file.read_exact_at(bytes, left)?;
        for at in bytes.iter().enumerate().rev().filter(|(_, b)| **b == b'\n').map(|(at, _)| at as u64) {
            found += 1;
            if found > lines {
                return Ok(left + at + 1);
            }
        }
        right = left;
    }
    Ok(0)
}

#[cfg(test)]
mod tests {
    use std::io::Write;

    use super::*;

    fn start(content: &[u8], lines: u64) -> u64 {
        let mut file = tempfile::tempfile().expect("a file");
        file.write_all(content).expect("written");
        tail_start(&file, lines).expect("read")
    }

    #[test]
    fn the_last_lines() {
        for (content, lines, wanted) in [
            ("", 0, 0),
            ("", 5, 0),
            ("a\nb\nc\n", 0, 6),
            ("a\nb\nc\n", 1, 4),
            ("a\nb\nc\n", 3, 0),
            ("a\nb\nc\n", 9, 0),
            ("a\nb\nhalf", 0, 4),
            ("a\nb\nhalf", 1, 2),
            ("half", 1, 0),
        ] {
            assert_eq!(start(content.as_bytes(), lines), wanted, "{content:?} {lines}");
        }
    }

    #[test]
    fn lines_across_blocks() {
        let long = vec![b'x'; 40_000];
        let content = [&long[..], b"\n", &long[..], b"\n"].concat();
        assert_eq!(start(&content, 1), 40_001);
        assert_eq!(start(&content, 2), 0);
    }
}
