//! Finds the ELF interpreter (dynamic loader) of a program. Pure.

/// `PT_INTERP`: type of the program header that names the loader.
const INTERPRETER: u64 = 3;

/// Path of the program's loader, parsed from its first bytes; `None` if the program is static or no little-endian ELF
/// file.
pub fn loader(head: &[u8]) -> Option<String> {
    let is_wide = match head.get(..6)? {
        [0x7f, b'E', b'L', b'F', 2, 1] => true,
        [0x7f, b'E', b'L', b'F', 1, 1] => false,
        _ => return None,
    };
    let word = if is_wide { 8 } else { 4 };
    let (table, sizes) = if is_wide { (0x20, 0x36) } else { (0x1c, 0x2a) };
    let table = number(head, table, word)?;
    let (size, count) = (number(head, sizes, 2)?, number(head, sizes + 2, 2)?);
    (0..count).find_map(|index| {
        let at = usize::try_from(index.checked_mul(size)?.checked_add(table)?).ok()?;
        if number(head, at, 4)? != INTERPRETER {
            return None;
        }
        let (offset, length) = if is_wide { (8, 0x20) } else { (4, 0x10) };
        let from = usize::try_from(number(head, at.checked_add(offset)?, word)?).ok()?;
        let length = usize::try_from(number(head, at.checked_add(length)?, word)?).ok()?;
        let name = head.get(from..from.checked_add(length)?)?;
        let name = String::from_utf8(name.to_vec()).ok()?;
        Some(name.trim_end_matches('\0').to_owned())
    })
}

/// A little-endian number of `bytes` bytes at offset `at`.
fn number(head: &[u8], at: usize, bytes: usize) -> Option<u64> {
    let field = head.get(at..at.checked_add(bytes)?)?;
    Some(field.iter().rev().fold(0, |number, byte| (number << 8) | u64::from(*byte)))
}

#[cfg(test)]
mod tests {
    use super::*;

    /// An ELF file with one program header that names a loader.
    fn program(kind: u8, loader: &[u8]) -> Vec<u8> {
        let mut out = vec![0; 0x40];
        out[..6].copy_from_slice(&[0x7f, b'E', b'L', b'F', 2, 1]);
        (out[0x20], out[0x36], out[0x38]) = (0x40, 0x38, 1);
        let mut header = [0; 0x38];
        (header[0], header[8], header[0x20]) = (kind, 0x78, u8::try_from(loader.len()).expect("short"));
        out.extend_from_slice(&header);
        out.extend_from_slice(loader);
        out
    }

    #[test]
    fn programs_name_their_loader() {
        let cut = program(3, b"/lib64/ld.so\0");
        for (what, head, expected) in [
            ("dynamic", program(3, b"/lib64/ld.so\0"), Some("/lib64/ld.so")),
            ("static", program(1, b"/lib64/ld.so\0"), None),
            ("cut", cut[..cut.len() - 3].to_vec(), None),
            ("half a header", cut[..0x60].to_vec(), None),
            ("script", b"#!/bin/sh".to_vec(), None),
            ("nothing", Vec::new(), None),
        ] {
            assert_eq!(loader(&head).as_deref(), expected, "{what}");
        }
        let mut huge = program(3, b"x");
        huge[0x20..0x28].fill(0xff);
        huge[0x38..0x3a].fill(0xff);
        assert_eq!(loader(&huge), None, "numbers beyond everything");
    }
}
