//! CRI log format: splits container output into log records. Pure.
//!
//! A line is one record, without its newline and one `\r` before that. A line longer than the maximum record becomes
//! several, all but the last tagged partial; an unterminated line at the end of the stream is partial too. Bytes are
//! passed through unchanged. Implements spec 09a §13.

use std::time::Duration;

use memchr::memchr;

/// Maximum record length, bytes, if the plan sets no limit: a line is buffered until its end is known.
pub const NO_LIMIT: usize = 1 << 20;

/// Whether a record ends a line.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Tag {
    /// The record ends a line (`F`).
    Full,
    /// More of the line follows, or the stream ended in the middle of it (`P`).
    Partial,
}

/// Splitter of one stream. Buffers at most one record and one byte.
#[derive(Debug)]
pub struct Splitter {
    longest: usize,
    buffer: Vec<u8>,
}

impl Splitter {
    /// A splitter for records of at most `longest` bytes; 0 means whole lines up to [`NO_LIMIT`].
    pub fn new(longest: usize) -> Self {
        let longest = if longest == 0 { NO_LIMIT } else { longest.min(NO_LIMIT) };
        Self { longest, buffer: Vec::new() }
    }

    /// Adds a chunk of output and passes completed records to `out`.
    pub fn feed(&mut self, mut chunk: &[u8], out: &mut dyn FnMut(Tag, &[u8])) {
        while let Some(end) = memchr(b'\n', chunk) {
            let (line, rest) = chunk.split_at(end);
            chunk = rest.get(1..).unwrap_or_default();
            if self.buffer.is_empty() {
                // The common case: a whole line, not copied.
                let line = line.strip_suffix(b"\r").unwrap_or(line);
                let rest = partials(line, self.longest, out);
                out(Tag::Full, rest);
            } else {
                self.append(line, out);
                let line = self.buffer.strip_suffix(b"\r").unwrap_or(&self.buffer);
                let rest = partials(line, self.longest, out);
                out(Tag::Full, rest);
                self.buffer.clear();
            }
        }
        self.append(chunk, out);
    }

    /// Ends the stream; passes the remaining bytes as partial records.
    pub fn finish(&mut self, out: &mut dyn FnMut(Tag, &[u8])) {
        let rest = partials(&self.buffer, self.longest, out);
        if !rest.is_empty() {
            out(Tag::Partial, rest);
        }
        self.buffer = Vec::new();
    }

    /// Buffers a piece and passes on what cannot be the end of a line. The buffer may contain one byte more than a
    /// record: a `\r` that may belong to the end of the line.
    fn append(&mut self, mut piece: &[u8], out: &mut dyn FnMut(Tag, &[u8])) {
        loop {
            let room = (self.longest + 1).saturating_sub(self.buffer.len());
            let (now, later) = piece.split_at(room.min(piece.len()));
            self.buffer.extend_from_slice(now);
            piece = later;
            let may_end = self.buffer.len() <= self.longest || (self.buffer.ends_with(b"\r") && piece.is_empty());
            if may_end {
                return;
            }
            out(Tag::Partial, self.buffer.get(..self.longest).unwrap_or_default());
            self.buffer.drain(..self.longest);
        }
    }
}

/// Passes on all records but the last, and returns the last.
fn partials<'a>(mut line: &'a [u8], longest: usize, out: &mut dyn FnMut(Tag, &[u8])) -> &'a [u8] {
    while line.len() > longest {
        let (record, rest) = line.split_at(longest);
        out(Tag::Partial, record);
        line = rest;
    }
    line
}

/// Size of a record's header, bytes: time, stream, and tag, each with a blank.
pub const HEAD: usize = 30 + 1 + 6 + 1 + 1 + 1;

/// Header of a record: `2026-01-02T03:04:05.123456789Z stdout F `. `time` counts from the epoch.
pub fn head(time: Duration, stream: &[u8; 6], tag: Tag) -> [u8; HEAD] {
    let mut out = *b"0000-00-00T00:00:00.000000000Z ...... F ";
    let seconds = time.as_secs();
    let (days, of_day) = (seconds / 86_400, seconds % 86_400);
    let (year, month, day) = date(days);
    let mut at = 0;
    for (value, digits) in [
        (year, 4),
        (month, 2),
        (day, 2),
        (of_day / 3600, 2),
        (of_day / 60 % 60, 2),
        (of_day % 60, 2),
        (u64::from(time.subsec_nanos()), 9),
    ] {
        let mut value = value;
        for place in (at..at + digits).rev() {
            if let (Some(byte), Ok(digit)) = (out.get_mut(place), u8::try_from(value % 10)) {
                *byte = b'0' + digit;
            }
            value /= 10;
        }
        at += digits + 1;
    }
    for (place, byte) in out.iter_mut().skip(31).zip(stream) {
        *place = *byte;
    }
    if let (Tag::Partial, Some(place)) = (tag, out.get_mut(38)) {
        *place = b'P';
    }
    out
}

/// Year, month, and day of a day since the epoch (the Gregorian calendar, counted from a 1 March).
fn date(days: u64) -> (u64, u64, u64) {
    let shifted = days + 719_468;
    let (era, of_era) = (shifted / 146_097, shifted % 146_097);
    let year_of_era = (of_era - of_era / 1460 + of_era / 36_524 - of_era / 146_096) / 365;
    let day_of_year = of_era - (365 * year_of_era + year_of_era / 4 - year_of_era / 100);
    let march_month = (5 * day_of_year + 2) / 153;
    let day = day_of_year - (153 * march_month + 2) / 5 + 1;
    let month = if march_month < 10 { march_month + 3 } else { march_month - 9 };
    let year = year_of_era + era * 400 + u64::from(month <= 2);
    (year, month, day)
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn split(longest: usize, chunks: &[&[u8]]) -> Vec<(Tag, Vec<u8>)> {
        let mut out = Vec::new();
        let mut splitter = Splitter::new(longest);
        for chunk in chunks {
            splitter.feed(chunk, &mut |tag, record| out.push((tag, record.to_vec())));
        }
        splitter.finish(&mut |tag, record| out.push((tag, record.to_vec())));
        out
    }

    /// The specified behavior, computed for the whole text at once.
    fn reference(longest: usize, text: &[u8]) -> Vec<(Tag, Vec<u8>)> {
        let mut out = Vec::new();
        let mut lines: Vec<&[u8]> = text.split(|b| *b == b'\n').collect();
        let last = lines.pop().expect("splitting gives one part at least");
        let mut push = |line: &[u8], tag: Tag| {
            let mut pieces: Vec<&[u8]> = line.chunks(longest).collect();
            let end = pieces.pop().unwrap_or_default();
            out.extend(pieces.into_iter().map(|p| (Tag::Partial, p.to_vec())));
            out.push((tag, end.to_vec()));
        };
        for line in lines {
            push(line.strip_suffix(b"\r").unwrap_or(line), Tag::Full);
        }
        if !last.is_empty() {
            push(last, Tag::Partial);
        }
        out
    }

    #[test]
    fn lines_become_records() {
        use Tag::{Full as F, Partial as P};
        type Row = (&'static str, &'static [&'static [u8]], &'static [(Tag, &'static [u8])]);
        let rows: &[Row] = &[
            ("nothing", &[], &[]),
            ("an empty line", &[b"\n"], &[(F, b"")]),
            ("an empty line of Windows", &[b"\r\n"], &[(F, b"")]),
            ("two in one", &[b"a\nb\n"], &[(F, b"a"), (F, b"b")]),
            ("one in two", &[b"a", b"b\n"], &[(F, b"ab")]),
            ("no end", &[b"a\nbc"], &[(F, b"a"), (P, b"bc")]),
            ("exactly as long", &[b"abcd\n"], &[(F, b"abcd")]),
            ("exactly as long, in two", &[b"abcd", b"\n"], &[(F, b"abcd")]),
            ("exactly as long and \\r", &[b"abcd\r", b"\n"], &[(F, b"abcd")]),
            ("a \\r that is text", &[b"abcd\r", b"e\n"], &[(P, b"abcd"), (F, b"\re")]),
            ("two \\r", &[b"ab\r\r\n"], &[(F, b"ab\r")]),
            ("one too long", &[b"abcde\n"], &[(P, b"abcd"), (F, b"e")]),
            ("one too long, no end", &[b"abcde"], &[(P, b"abcd"), (P, b"e")]),
            ("as long, no end", &[b"abcd"], &[(P, b"abcd")]),
            ("twice too long", &[b"abcdefghi\n"], &[(P, b"abcd"), (P, b"efgh"), (F, b"i")]),
            ("a \\r at the end", &[b"ab\r"], &[(P, b"ab\r")]),
            ("bytes that are no text", &[b"\0\xff\n"], &[(F, b"\0\xff")]),
        ];
        for (name, chunks, expected) in rows {
            let expected: Vec<(Tag, Vec<u8>)> = expected.iter().map(|(t, r)| (*t, r.to_vec())).collect();
            assert_eq!(split(4, chunks), expected, "{name}");
        }
    }

    /// AC-09a-X12
    #[test]
    fn a_long_line_becomes_three_records() {
        let mut line = vec![b'x'; 40_000];
        line.push(b'\n');
        let chunks: Vec<&[u8]> = line.chunks(4096).collect();
        let lengths: Vec<(Tag, usize)> = split(16_384, &chunks).iter().map(|(tag, r)| (*tag, r.len())).collect();
        assert_eq!(lengths, [(Tag::Partial, 16_384), (Tag::Partial, 16_384), (Tag::Full, 7_232)]);
    }

    #[test]
    fn without_a_limit_lines_stay_whole_to_a_mebibyte() {
        let line = vec![b'x'; NO_LIMIT];
        assert_eq!(split(0, &[&line, b"\n"]).len(), 1);
        assert_eq!(split(0, &[&line, b"x\n"]).len(), 2);
    }

    #[test]
    fn times_are_written_to_the_nanosecond() {
        for (seconds, nanos, expected) in [
            (0, 0, "1970-01-01T00:00:00.000000000Z stdout F "),
            (951_782_400, 1, "2000-02-29T00:00:00.000000001Z stdout F "),
            (1_709_251_199, 999_999_999, "2024-02-29T23:59:59.999999999Z stdout F "),
            (1_709_251_200, 0, "2024-03-01T00:00:00.000000000Z stdout F "),
            (1_798_761_599, 120_000_000, "2026-12-31T23:59:59.120000000Z stdout F "),
            (4_107_542_400, 0, "2100-03-01T00:00:00.000000000Z stdout F "),
        ] {
            let head = head(Duration::new(seconds, nanos), b"stdout", Tag::Full);
            assert_eq!(String::from_utf8_lossy(&head), expected);
        }
        let head = head(Duration::ZERO, b"stderr", Tag::Partial);
        assert!(head.ends_with(b" stderr P "));
    }

    proptest! {
        #[test]
        fn however_it_is_cut_the_records_are_the_same(
            text in prop::collection::vec(prop_oneof![Just(b'\n'), Just(b'\r'), Just(b'a'), any::<u8>()], 0..200),
            cuts in prop::collection::vec(0_usize..200, 0..8),
            longest in 1_usize..20,
        ) {
            let mut cuts: Vec<usize> = cuts.into_iter().map(|c| c.min(text.len())).collect();
            cuts.extend([0, text.len()]);
            cuts.sort_unstable();
            let chunks: Vec<&[u8]> = cuts.windows(2).map(|w| &text[w[0]..w[1]]).collect();
            prop_assert_eq!(split(longest, &chunks), reference(longest, &text));
        }
    }
}
