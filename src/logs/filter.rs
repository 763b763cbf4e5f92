//! Log filter: converts the bytes of a log file to the output a reader requested. Pure.
//!
//! Bytes arrive in pieces of any size and are written at once: the head of a line decides about it, its
//! content is copied through. Memory is bounded by the longest head (CRI) or JSON line (Docker).

use jiff::{SignedDuration, Timestamp};

use super::line::{Head, LONGEST_HEAD, LineError, LineStream, Second, Stamp, docker, head_near};

/// Streams to read.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub enum LogStreams {
    /// Both streams.
    #[default]
    All,
    /// One of the streams.
    Only(LineStream),
}

/// Options of a log reader (spec 03b §10).
#[derive(Clone, PartialEq, Eq, Debug, Default)]
pub struct LogOptions {
    /// Start that many lines before the end; without `follow` also stop after them.
    pub tail: Option<u64>,
    /// Only lines with this timestamp or later.
    pub since: Option<Timestamp>,
    /// Stop after that many bytes, timestamps included.
    pub limit_bytes: Option<u64>,
    /// Prepend the timestamp to each logical line.
    pub timestamps: bool,
    /// Streams to read.
    pub streams: LogStreams,
    /// Follow the log until the container exits.
    pub follow: bool,
}

/// Start time of reading: `seconds` before `now`, or `time` if that is later.
pub fn since(now: Timestamp, seconds: Option<i64>, time: Option<Timestamp>) -> Option<Timestamp> {
    let ago = seconds.map(|s| now.saturating_sub(SignedDuration::from_secs(s)).unwrap_or(now));
    ago.max(time)
}

/// The first line has no known format; contains that line.
#[derive(Clone, PartialEq, Eq, Debug, thiserror::Error)]
#[error("unsupported log format: {0:?}")]
pub struct LogFormatError(pub String);

/// Maximum length of a JSON line; Docker splits content at 16 KiB, each byte is escaped to at most 6.
const LONGEST_JSON: usize = 256 * 1024;
/// Maximum bytes of an unknown line in the error.
const SHOWN: usize = 1024;

#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum LineFormat {
    Unknown,
    Cri,
    Docker,
}

#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum LinePosition {
    /// In the head, or (JSON) anywhere in a line.
    Head,
    /// In the content of a wanted line; `partial` drops its newline.
    Content { partial: bool },
    /// In a line that is filtered out.
    Unwanted,
    /// In a malformed line, which does not count.
    Malformed,
}

/// Streaming filter; see the module documentation.
#[derive(Debug)]
pub struct Filter {
    since: Option<i128>,
    timestamps: bool,
    streams: LogStreams,
    bytes_left: Option<u64>,
    lines_left: Option<u64>,
    format: LineFormat,
    place: LinePosition,
    second: Second,
    /// Start of a line whose head is incomplete.
    pending: Vec<u8>,
    /// Whether the next output begins a logical line.
    at_start: bool,
    malformed: u64,
}

impl Filter {
    /// Creates the filter of one reading.
    pub fn new(options: &LogOptions) -> Self {
        Self {
            since: options.since.map(Timestamp::as_nanosecond),
            timestamps: options.timestamps,
            streams: options.streams,
            bytes_left: options.limit_bytes,
            lines_left: if options.follow { None } else { options.tail },
            format: LineFormat::Unknown,
            place: LinePosition::Head,
            second: Second::default(),
            pending: Vec::new(),
            at_start: true,
            malformed: 0,
        }
    }

    /// Whether nothing more will be written.
    pub fn is_done(&self) -> bool {
        self.bytes_left == Some(0) || self.lines_left == Some(0)
    }

    /// Number of skipped malformed lines.
    pub fn malformed(&self) -> u64 {
        self.malformed
    }

    /// Processes the next bytes and appends the output to `out`.
    ///
    /// # Errors
    /// The first line has no known format.
    pub fn push(&mut self, mut bytes: &[u8], out: &mut Vec<u8>) -> Result<(), LogFormatError> {
        while !bytes.is_empty() && !self.is_done() {
            bytes = match self.place {
                LinePosition::Head => self.take_head(bytes, out)?,
                LinePosition::Content { partial } => self.take_content(bytes, partial, out),
                LinePosition::Unwanted | LinePosition::Malformed => self.skip(bytes),
            };
        }
        Ok(())
    }

    /// Processes the end of the file: the rest of an incomplete line is written as is.
    ///
    /// # Errors
    /// The only line has no known format.
    pub fn finish(&mut self, out: &mut Vec<u8>) -> Result<(), LogFormatError> {
        if !self.pending.is_empty() && !self.is_done() {
            let line = std::mem::take(&mut self.pending);
            self.whole_line(&line, out)?;
        }
        self.place = LinePosition::Head;
        self.pending.clear();
        Ok(())
    }

    fn take_head<'b>(&mut self, bytes: &'b [u8], out: &mut Vec<u8>) -> Result<&'b [u8], LogFormatError> {
        let is_no_head = self.format == LineFormat::Unknown && self.pending.len() >= LONGEST_HEAD;
        if self.format == LineFormat::Docker || is_no_head {
            return self.take_json(bytes, out);
        }
        if self.pending.is_empty() {
            return self.parse_head(bytes, 0, bytes, out);
        }
        let had = self.pending.len();
        let mut joined = std::mem::take(&mut self.pending);
        let more = bytes.len().min(LONGEST_HEAD.saturating_sub(had).max(1));
        joined.extend_from_slice(bytes.get(..more).unwrap_or_default());
        self.parse_head(&joined, had, bytes, out)
    }

    /// Parses the head of `line`, of which `had` bytes came before `bytes`. Returns the rest of
    /// `bytes`.
    fn parse_head<'b>(
        &mut self,
        line: &[u8],
        had: usize,
        bytes: &'b [u8],
        out: &mut Vec<u8>,
    ) -> Result<&'b [u8], LogFormatError> {
        match head_near(line, &mut self.second) {
            Head::Parsed(header) => {
                self.format = LineFormat::Cri;
                let is_wanted = self.wants(header.time, header.stream);
                if is_wanted && self.at_start {
                    self.stamp(header.time, out);
                }
                self.passed(header.stream, header.is_partial);
                self.place = if is_wanted {
                    LinePosition::Content { partial: header.is_partial }
                } else {
                    LinePosition::Unwanted
                };
                // The pending part ended within the head, so the content is in `bytes`.
                Ok(bytes.get(header.content.saturating_sub(had)..).unwrap_or_default())
            }
            Head::Incomplete => {
                self.pending = line.to_vec();
                Ok(bytes.get(line.len().saturating_sub(had)..).unwrap_or_default())
            }
            Head::Malformed(_) if self.format == LineFormat::Unknown => {
                self.pending = line.get(..had).unwrap_or_default().to_vec();
                self.take_json(bytes, out)
            }
            Head::Malformed(_) => {
                self.malformed += 1;
                self.place = LinePosition::Malformed;
                Ok(bytes)
            }
        }
    }

    /// Collects a JSON line (or a first line that is not a CRI line).
    fn take_json<'b>(&mut self, bytes: &'b [u8], out: &mut Vec<u8>) -> Result<&'b [u8], LogFormatError> {
        let end = memchr::memchr(b'\n', bytes).map(|at| at + 1);
        let (line, rest) = bytes.split_at(end.unwrap_or(bytes.len()));
        if self.pending.len() + line.len() > LONGEST_JSON {
            return match self.format {
                LineFormat::Docker => {
                    self.pending.clear();
                    self.malformed += 1;
                    self.place = LinePosition::Malformed;
                    Ok(bytes)
                }
                _ => Err(self.unsupported(line)),
            };
        }
        self.pending.extend_from_slice(line);
        if end.is_some() {
            let line = std::mem::take(&mut self.pending);
            self.whole_line(&line, out)?;
        }
        Ok(rest)
    }

    /// Processes a complete line: JSON, or a first line of unknown format, or the last line.
    fn whole_line(&mut self, line: &[u8], out: &mut Vec<u8>) -> Result<(), LogFormatError> {
        let parsed = match self.format {
            LineFormat::Cri => Err(LineError::NoTag),
            LineFormat::Docker | LineFormat::Unknown => docker(line),
        };
        let Ok(parsed) = parsed else {
            if self.format == LineFormat::Unknown {
                return Err(self.unsupported(line));
            }
            self.malformed += 1;
            return Ok(());
        };
        self.format = LineFormat::Docker;
        if let Ok((time, stream)) = parsed.origin() {
            if self.wants(time, stream) {
                if self.at_start {
                    self.stamp(time, out);
                }
                self.write(parsed.log.as_bytes(), out);
            }
            self.passed(stream, !parsed.log.is_empty() && !parsed.log.ends_with('\n'));
        }
        self.counted();
        Ok(())
    }

    fn take_content<'b>(&mut self, bytes: &'b [u8], partial: bool, out: &mut Vec<u8>) -> &'b [u8] {
        let Some(end) = memchr::memchr(b'\n', bytes) else {
            self.write(bytes, out);
            return &[];
        };
        let (line, rest) = bytes.split_at(end + 1);
        let content = if partial { line.get(..end).unwrap_or_default() } else { line };
        self.write(content, out);
        self.place = LinePosition::Head;
        self.counted();
        rest
    }

    fn skip<'b>(&mut self, bytes: &'b [u8]) -> &'b [u8] {
        let Some(end) = memchr::memchr(b'\n', bytes) else { return &[] };
        if self.place == LinePosition::Unwanted {
            self.counted();
        }
        self.place = LinePosition::Head;
        bytes.get(end + 1..).unwrap_or_default()
    }

    fn wants(&self, time: Stamp<'_>, stream: LineStream) -> bool {
        self.streams_want(stream) && self.since.is_none_or(|since| time.nanos() >= since)
    }

    fn streams_want(&self, stream: LineStream) -> bool {
        self.streams == LogStreams::All || self.streams == LogStreams::Only(stream)
    }

    /// Pieces of a filtered-out stream do not break the lines of the other stream.
    fn passed(&mut self, stream: LineStream, is_partial: bool) {
        if self.streams_want(stream) {
            self.at_start = !is_partial;
        }
    }

    fn counted(&mut self) {
        if let Some(left) = &mut self.lines_left {
            *left = left.saturating_sub(1);
        }
    }

    fn stamp(&mut self, time: Stamp<'_>, out: &mut Vec<u8>) {
        if self.timestamps {
            let mut prefix = Vec::with_capacity(40);
            time.write(&mut prefix);
            prefix.push(b' ');
            self.write(&prefix, out);
        }
    }

    fn write(&mut self, bytes: &[u8], out: &mut Vec<u8>) {
        let limit =
            self.bytes_left.map_or(bytes.len(), |left| bytes.len().min(usize::try_from(left).unwrap_or(usize::MAX)));
        out.extend_from_slice(bytes.get(..limit).unwrap_or_default());
        if let Some(left) = &mut self.bytes_left {
            *left -= limit as u64;
        }
    }

    fn unsupported(&self, line: &[u8]) -> LogFormatError {
        let whole: Vec<u8> = self.pending.iter().chain(line).copied().take(SHOWN).collect();
        LogFormatError(String::from_utf8_lossy(&whole).into_owned())
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    const LOG: &str = "2026-01-01T00:00:01.5Z stdout F one\n\
                       2026-01-01T00:00:02Z stderr F two\n\
                       2026-01-01T00:00:03Z stdout P thr\n\
                       2026-01-01T00:00:03Z stdout P e\n\
                       2026-01-01T00:00:03Z stdout F e\n\
                       garbage\n\
                       2026-01-01T00:00:04Z stdout F four\n";

    fn read(
        options: &LogOptions,
        pieces: impl IntoIterator<Item = impl AsRef<[u8]>>,
    ) -> Result<String, LogFormatError> {
        let (mut filter, mut out) = (Filter::new(options), Vec::new());
        for piece in pieces {
            filter.push(piece.as_ref(), &mut out)?;
        }
        filter.finish(&mut out)?;
        Ok(String::from_utf8(out).expect("text"))
    }

    fn options() -> LogOptions {
        LogOptions::default()
    }

    #[test]
    fn what_readers_ask_for() {
        let at = |text: &str| Some(text.parse().expect("a time"));
        for (name, options, wanted) in [
            ("all", options(), "one\ntwo\nthree\nfour\n"),
            ("stdout", LogOptions { streams: LogStreams::Only(LineStream::Stdout), ..options() }, "one\nthree\nfour\n"),
            ("stderr", LogOptions { streams: LogStreams::Only(LineStream::Stderr), ..options() }, "two\n"),
            ("equal times are kept", LogOptions { since: at("2026-01-01T00:00:03Z"), ..options() }, "three\nfour\n"),
            ("bytes", LogOptions { limit_bytes: Some(6), ..options() }, "one\ntw"),
            ("no bytes", LogOptions { limit_bytes: Some(0), ..options() }, ""),
            (
                "bytes of unwanted streams do not count",
                LogOptions { limit_bytes: Some(3), streams: LogStreams::Only(LineStream::Stderr), ..options() },
                "two",
            ),
            ("physical lines of a tail", LogOptions { tail: Some(3), ..options() }, "one\ntwo\nthr"),
            ("no lines", LogOptions { tail: Some(0), ..options() }, ""),
            (
                "a tail while following goes on",
                LogOptions { tail: Some(1), follow: true, ..options() },
                "one\ntwo\nthree\nfour\n",
            ),
            // AC-03b-34
            (
                "AC-03b-34 one timestamp per logical line",
                LogOptions { timestamps: true, since: at("2026-01-01T00:00:03Z"), ..options() },
                "2026-01-01T00:00:03.000000000Z three\n2026-01-01T00:00:04.000000000Z four\n",
            ),
            (
                "timestamps count",
                LogOptions { timestamps: true, limit_bytes: Some(33), ..options() },
                "2026-01-01T00:00:01.500000000Z on",
            ),
        ] {
            assert_eq!(read(&options, [LOG]).as_deref(), Ok(wanted), "{name}");
        }
    }

    #[test]
    fn the_later_of_two_starts_counts() {
        let at = |second| Timestamp::from_second(second).expect("in range");
        for (seconds, time, wanted) in [
            (None, None, None),
            (Some(10), None, Some(at(90))),
            (Some(10), Some(at(80)), Some(at(90))),
            (Some(10), Some(at(95)), Some(at(95))),
            (None, Some(at(5)), Some(at(5))),
        ] {
            assert_eq!(since(at(100), seconds, time), wanted);
        }
        assert!(since(at(100), Some(i64::MAX), None).is_some(), "any number of seconds");
    }

    #[test]
    fn the_first_line_decides_the_format() {
        let error = read(&options(), ["hello world\n"]).expect_err("no format");
        assert_eq!(error.to_string(), "unsupported log format: \"hello world\\n\"");
        assert!(read(&options(), ["hello"]).is_err(), "incomplete");
        assert!(read(&options(), [vec![b'x'; LONGEST_JSON + 1]]).is_err(), "too long");
        assert_eq!(read(&options(), [""]).as_deref(), Ok(""));
        let docker = "{\"log\":\"a\\n\",\"stream\":\"stdout\",\"time\":\"2016-10-20T18:39:20Z\"}\n";
        let log = format!("{docker}nonsense\n{docker}");
        assert_eq!(read(&options(), [&log]).as_deref(), Ok("a\na\n"));
        let stamped = LogOptions { timestamps: true, ..options() };
        assert_eq!(read(&stamped, [docker]).as_deref(), Ok("2016-10-20T18:39:20.000000000Z a\n"));
    }

    #[test]
    fn an_incomplete_last_line_is_written_as_it_is() {
        assert_eq!(read(&options(), ["2026-01-01T00:00:01Z stdout F half"]).as_deref(), Ok("half"));
    }

    proptest! {
        #[test]
        fn pieces_do_not_matter(cuts in proptest::collection::vec(0..LOG.len(), 0..12), stamps in any::<bool>()) {
            let mut cuts = cuts;
            cuts.extend([0, LOG.len()]);
            cuts.sort_unstable();
            let pieces = cuts.windows(2).map(|w| &LOG[w[0]..w[1]]);
            let options = LogOptions { timestamps: stamps, ..LogOptions::default() };
            prop_assert_eq!(read(&options, pieces), read(&options, [LOG]));
        }

        #[test]
        fn foreign_bytes_never_panic(bytes in proptest::collection::vec(any::<u8>(), 0..600), first in any::<bool>()) {
            let mut out = Vec::new();
            let mut filter = Filter::new(&LogOptions { limit_bytes: Some(50), ..LogOptions::default() });
            if first {
                filter.push(b"2026-01-01T00:00:01Z stdout F x\n", &mut out).expect("a line");
            }
            let _ = filter.push(&bytes, &mut out);
            let _ = filter.finish(&mut out);
            prop_assert!(out.len() <= 50);
        }
    }
}
