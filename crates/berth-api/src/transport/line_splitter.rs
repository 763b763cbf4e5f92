//! Line splitter for watch streams. Pure.
//!
//! Implements spec 10 §2.3, §8.1.

use bytes::{Buf, Bytes, BytesMut};

/// Splits chunks into lines; skips empty lines.
#[derive(Debug, Default)]
pub struct Lines {
    rest: BytesMut,
    /// Prefix length that is known to contain no line feed.
    seen: usize,
}

/// A line exceeds the limit.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct TooLong;

impl Lines {
    /// Appends a chunk of the body.
    pub fn add(&mut self, piece: &[u8]) {
        self.rest.extend_from_slice(piece);
    }

    /// Next complete line; `None` until one is complete.
    ///
    /// # Errors
    /// It is longer than `limit` bytes.
    pub fn next(&mut self, limit: usize) -> Result<Option<Bytes>, TooLong> {
        loop {
            let unseen = self.rest.get(self.seen..).unwrap_or_default();
            let Some(at) = memchr::memchr(b'\n', unseen) else {
                self.seen = self.rest.len();
                // Most watches are idle for long: releases the buffer.
                if self.rest.is_empty() {
                    self.rest = BytesMut::new();
                }
                return if self.seen > limit { Err(TooLong) } else { Ok(None) };
            };
            let line = self.rest.split_to(self.seen + at);
            self.rest.advance(1);
            self.seen = 0;
            match line.len() {
                length if length > limit => return Err(TooLong),
                _ if line.trim_ascii().is_empty() => {}
                _ => return Ok(Some(line.freeze())),
            }
        }
    }

    /// Whether an incomplete line remains at the end of the body.
    pub fn is_cut(&self) -> bool {
        !self.rest.trim_ascii().is_empty()
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    #[test]
    fn lines_end_where_they_end() {
        let mut lines = Lines::default();
        lines.add(b"one\n\n \ntw");
        assert_eq!(lines.next(5), Ok(Some(Bytes::from_static(b"one"))));
        assert_eq!(lines.next(5), Ok(None));
        assert!(lines.is_cut());
        lines.add(b"o\nthree");
        assert_eq!(lines.next(5), Ok(Some(Bytes::from_static(b"two"))));
        assert_eq!(lines.next(5), Ok(None));
        lines.add(b"!");
        assert_eq!(lines.next(5), Err(TooLong));
        let mut long = Lines::default();
        long.add(b"123456\n");
        assert_eq!(long.next(5), Err(TooLong));
    }

    proptest! {
        #[test]
        fn pieces_do_not_matter(text in "[ab\n]{0,40}", cut in 0usize..40) {
            let text = text.as_bytes();
            let (first, second) = text.split_at(cut.min(text.len()));
            let mut lines = Lines::default();
            let mut got = Vec::new();
            for piece in [first, second] {
                lines.add(piece);
                while let Ok(Some(line)) = lines.next(100) {
                    got.push(line.to_vec());
                }
            }
            let mut expected: Vec<Vec<u8>> = text.split(|b| *b == b'\n').map(<[u8]>::to_vec).collect();
            let rest = expected.pop().unwrap_or_default();
            expected.retain(|line| !line.is_empty());
            prop_assert_eq!((got, lines.is_cut()), (expected, !rest.is_empty()));
        }
    }
}
