//! Whiteout names (`.wh.`) in a layer. Pure.

const PREFIX: &[u8] = b".wh.";
const OPAQUE: &[u8] = b".wh..wh..opq";
const RESERVED: &[u8] = b".wh..wh.";

/// Meaning of an entry's last component.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Mark<'a> {
    /// An ordinary name.
    Ordinary,
    /// A whiteout: deletes this name in lower layers.
    Removed(&'a [u8]),
    /// An opaque marker: hides the directory's content in lower layers.
    Opaque,
    /// A reserved name of other tools.
    Ignored,
}

/// The meaning of a name; `.wh.` alone and names that are no valid component are ignored.
pub fn mark(name: &[u8]) -> Mark<'_> {
    match name.strip_prefix(PREFIX) {
        None => Mark::Ordinary,
        Some(_) if name == OPAQUE => Mark::Opaque,
        Some(_) if name.starts_with(RESERVED) => Mark::Ignored,
        Some(b"" | b"." | b"..") => Mark::Ignored,
        Some(rest) => Mark::Removed(rest),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn marks_are_told_by_name() {
        for (name, expected) in [
            (&b"file"[..], Mark::Ordinary),
            (b".wh", Mark::Ordinary),
            (b".wh.file", Mark::Removed(b"file")),
            (b".wh..wh..opq", Mark::Opaque),
            (b".wh..wh.plnk", Mark::Ignored),
            (b".wh..wh.aufs", Mark::Ignored),
            (b".wh.", Mark::Ignored),
            (b".wh...", Mark::Ignored),
            (b".wh..hidden", Mark::Removed(b".hidden")),
        ] {
            assert_eq!(mark(name), expected);
        }
    }
}
