//! Path names of layer entries, split and normalized as if the layer's root were `/`. Pure.
//!
//! `..` is resolved here lexically; the kernel resolves links on the path (`RESOLVE_IN_ROOT`).

use crate::images::error::ImageError;

/// Maximum length of an entry's name, bytes.
const LONGEST: usize = 4096;
/// Maximum length of a component, bytes.
const LONGEST_PART: usize = 255;
/// Maximum number of components.
const DEEPEST: usize = 1024;

/// The components of a name below the root; empty: the root itself.
///
/// # Errors
/// The name contains a NUL, or is too long or too deep.
pub fn parts(name: &[u8]) -> Result<Vec<&[u8]>, ImageError> {
    let wrong = |what: &str| {
        let shown = String::from_utf8_lossy(name.get(..80).unwrap_or(name)).into_owned();
        Err(ImageError::bad_content(format!("invalid path {shown:?} in layer: {what}")))
    };
    if name.contains(&0) {
        return wrong("contains a NUL byte");
    }
    if name.len() > LONGEST {
        return wrong("longer than 4096 bytes");
    }
    let mut out: Vec<&[u8]> = Vec::new();
    for part in name.split(|byte| *byte == b'/') {
        match part {
            b"" | b"." => {}
            b".." => drop(out.pop()),
            part if part.len() > LONGEST_PART => return wrong("component longer than 255 bytes"),
            part => out.push(part),
        }
    }
    if out.len() > DEEPEST { wrong("deeper than 1024 directories") } else { Ok(out) }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_stay_below_the_root() {
        let long = "x".repeat(256);
        let deep = "d/".repeat(1025);
        for (name, expected) in [
            ("a/b", Some("a/b")),
            ("/a/b/", Some("a/b")),
            ("./a//b/.", Some("a/b")),
            ("../../etc/x", Some("etc/x")),
            ("a/../../b", Some("b")),
            ("./", Some("")),
            ("", Some("")),
            ("a\0b", None),
            (&long, None),
            (&deep, None),
        ] {
            let read = parts(name.as_bytes()).ok().map(|parts| parts.join(&b'/'));
            assert_eq!(read, expected.map(|text| text.as_bytes().to_vec()), "{name:?}");
        }
        assert!(parts(&b"a/".repeat(2049)).is_err());
    }
}
