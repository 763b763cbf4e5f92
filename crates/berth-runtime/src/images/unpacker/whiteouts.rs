//! Whiteout names (`.wh.`) in a layer. Pure.

const PREFIX: &[u8] = b".wh.";
const OPAQUE: &[u8] = b".wh..wh..opq";
const RESERVED: &[u8] = b".wh..wh.";

/// Meaning of an entry's last component.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum NameKind<'a> {
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
pub fn classify(name: &[u8]) -> NameKind<'_> {
    match name.strip_prefix(PREFIX) {
        None => NameKind::Ordinary,
        Some(_) if name == OPAQUE => NameKind::Opaque,
        Some(_) if name.starts_with(RESERVED) => NameKind::Ignored,
        Some(b"" | b"." | b"..") => NameKind::Ignored,
        Some(rest) => NameKind::Removed(rest),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn whiteouts_are_classified_by_name() {
        for (name, expected) in [
            (&b"file"[..], NameKind::Ordinary),
            (b".wh", NameKind::Ordinary),
            (b".wh.file", NameKind::Removed(b"file")),
            (b".wh..wh..opq", NameKind::Opaque),
            (b".wh..wh.plnk", NameKind::Ignored),
            (b".wh..wh.aufs", NameKind::Ignored),
            (b".wh.", NameKind::Ignored),
            (b".wh...", NameKind::Ignored),
            (b".wh..hidden", NameKind::Removed(b".hidden")),
        ] {
            assert_eq!(classify(name), expected);
        }
    }
}
