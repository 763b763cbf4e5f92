//! Minimal tar writer: root-owned files and links without times, so that output is reproducible.

use std::io::{self, Write};

use super::header::BLOCK;

/// Builds a ustar header, owned by root and without a time.
pub fn entry(name: &str, flag: u8, mode: u32, size: u64, link: &str) -> [u8; BLOCK] {
    let mut block = [0u8; BLOCK];
    let mut put = |at: usize, text: &[u8]| {
        if let Some(field) = block.get_mut(at..at.saturating_add(text.len())) {
            field.copy_from_slice(text);
        }
    };
    put(0, name.as_bytes().get(..100).unwrap_or(name.as_bytes()));
    put(100, format!("{mode:07o}").as_bytes());
    put(108, b"0000000");
    put(116, b"0000000");
    if size < 1 << 33 {
        put(124, format!("{size:011o}").as_bytes());
    } else {
        // Too large for eleven octal digits: GNU binary form.
        put(124, &[0x80, 0, 0, 0]);
        put(128, &size.to_be_bytes());
    }
    put(136, b"00000000000");
    put(156, &[flag]);
    put(157, link.as_bytes());
    put(257, b"ustar\x0000");
    put(148, b"        ");
    let sum: u32 = block.iter().map(|byte| u32::from(*byte)).sum();
    if let Some(field) = block.get_mut(148..155) {
        field.copy_from_slice(format!("{sum:06o}\0").as_bytes());
    }
    block
}

/// Writes the header of a file; its content and [`pad`] must follow.
///
/// # Errors
/// The write error.
pub fn header(into: &mut impl Write, name: &str, size: u64) -> io::Result<()> {
    into.write_all(&entry(name, b'0', 0o644, size, ""))
}

/// Writes the padding after content of this length.
///
/// # Errors
/// The write error.
pub fn pad(into: &mut impl Write, size: u64) -> io::Result<()> {
    let rest = usize::try_from(size % BLOCK as u64).unwrap_or(0);
    let zeros = [0u8; BLOCK];
    into.write_all(zeros.get(..(BLOCK - rest) % BLOCK).unwrap_or_default())
}

/// Writes a small file.
///
/// # Errors
/// The write error.
pub fn file(into: &mut impl Write, name: &str, content: &[u8]) -> io::Result<()> {
    header(into, name, content.len() as u64)?;
    into.write_all(content)?;
    pad(into, content.len() as u64)
}

/// Writes the end-of-archive marker.
///
/// # Errors
/// The write error.
pub fn end(into: &mut impl Write) -> io::Result<()> {
    into.write_all(&[0u8; 2 * BLOCK])
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::images::tar::reader::TarReader;

    #[test]
    fn what_is_written_is_read_by_us_and_by_others() {
        let mut out = Vec::new();
        file(&mut out, "a/b", b"hello").expect("in memory");
        file(&mut out, "empty", b"").expect("in memory");
        file(&mut out, "block", &[1; BLOCK]).expect("in memory");
        header(&mut out, "huge", 1 << 40).expect("in memory");
        let mut ours = TarReader::new(&out[..]);
        let mut seen = Vec::new();
        for _ in 0..4 {
            let entry = ours.next_entry().expect("whole").expect("an entry");
            seen.push((String::from_utf8_lossy(&entry.name).into_owned(), entry.size));
        }
        let expected = [("a/b", 5), ("empty", 0), ("block", 512), ("huge", 1 << 40)];
        assert_eq!(seen, expected.map(|(name, size)| (name.to_owned(), size)));
        let mut theirs = tar::Archive::new(&out[..]);
        let sizes: Vec<u64> = theirs.entries().expect("one").take(4).map(|entry| entry.expect("good").size()).collect();
        assert_eq!(sizes, [5, 0, 512, 1 << 40]);
    }
}
