//! Parser of terminal sizes: consecutive JSON objects on the resize stream (spec 04b §3.1). Pure.

use serde::Deserialize;

use crate::ports::stream_targets::Size;

/// Maximum length of an object, in bytes.
const LONGEST: usize = 4 << 10;

#[derive(Deserialize)]
struct ResizeMessage {
    #[serde(rename = "Width", alias = "width", default)]
    width: u16,
    #[serde(rename = "Height", alias = "height", default)]
    height: u16,
}

/// Incremental parser of terminal sizes.
#[derive(Debug, Default)]
pub struct ResizeParser {
    begun: Vec<u8>,
    is_broken: bool,
}

impl ResizeParser {
    /// Adds bytes; returns the last completed size, which supersedes earlier ones. After invalid input all further
    /// input is ignored.
    pub fn push(&mut self, bytes: &[u8]) -> Option<Size> {
        if self.is_broken {
            return None;
        }
        self.begun.extend_from_slice(bytes);
        let mut objects = serde_json::Deserializer::from_slice(&self.begun).into_iter::<ResizeMessage>();
        let mut last = None;
        self.is_broken = loop {
            match objects.next() {
                Some(Ok(ResizeMessage { width, height })) if width > 0 && height > 0 => {
                    last = Some(Size { columns: width, rows: height });
                }
                Some(Ok(_)) => {}
                None => break false,
                Some(Err(error)) => break !error.is_eof(),
            }
        };
        let read = objects.byte_offset().min(self.begun.len());
        self.begun.drain(..read);
        self.is_broken |= self.begun.len() > LONGEST;
        last
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sizes_in_pieces_and_in_crowds() {
        let size = |columns, rows| Some(Size { columns, rows });
        let rows: [(&[&str], &[Option<Size>]); 8] = [
            (&[r#"{"Width":80,"Height":24}"#], &[size(80, 24)]),
            (&[r#"{"Width":80,"#, r#""Height":24}"#, "\n"], &[None, size(80, 24), None]),
            (&[r#"{"Width":1,"Height":2}{"Width":3,"Height":4}"#], &[size(3, 4)]),
            (&[r#"{"width":3,"height":4}"#], &[size(3, 4)]),
            (&[r#"{"Width":0,"Height":4}"#, r#"{"Width":5}"#], &[None, None]),
            (&[r#"{"Width":70000,"Height":4}"#, r#"{"Width":3,"Height":4}"#], &[None, None]),
            (&["garbage", r#"{"Width":3,"Height":4}"#], &[None, None]),
            (&[r#"{"Width":3,"Height":4}{"#], &[size(3, 4)]),
        ];
        for (pieces, expected) in rows {
            let mut sizes = ResizeParser::default();
            let got: Vec<_> = pieces.iter().map(|piece| sizes.push(piece.as_bytes())).collect();
            assert_eq!(got, expected, "{pieces:?}");
        }
        let mut sizes = ResizeParser::default();
        sizes.push(b"{\"x\":\"");
        for _ in 0..2000 {
            sizes.push(b"xxxxxxxx");
        }
        assert!(sizes.is_broken && sizes.begun.len() < 2 * LONGEST, "a name without an end is not kept");
    }
}
