//! Parser of container log lines: `<time> <stream> <tags> <content>`. Pure.
//!
//! The head of a line is parsed as soon as it is complete, the content is passed on as it arrives, so
//! that a line may have any length. Docker's JSON lines are supported too (spec 03b §10).

use serde::Deserialize;

/// Output stream of a line.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum LineStream {
    /// Standard output.
    Stdout,
    /// Standard error.
    Stderr,
}

/// Why a line is malformed.
#[derive(Clone, Copy, PartialEq, Eq, Debug, thiserror::Error)]
pub enum LineError {
    /// No space after the timestamp.
    #[error("timestamp is not found")]
    NoTime,
    /// The timestamp is not RFC 3339.
    #[error("unexpected timestamp format")]
    BadTime,
    /// No space after the stream.
    #[error("stream type is not found")]
    NoStream,
    /// The stream is neither `stdout` nor `stderr`.
    #[error("unexpected stream type")]
    BadStream,
    /// No space after the tags.
    #[error("log tag is not found")]
    NoTag,
    /// The line is not a JSON line either.
    #[error("not a JSON log line")]
    BadJson,
}

/// A timestamp with its spelling in the log.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Stamp<'a> {
    /// Whole seconds since the epoch.
    since_epoch: i64,
    /// ASCII, as the next two fields.
    whole: &'a [u8],
    fraction: &'a [u8],
    zone: &'a [u8],
}

/// Parsed head of a CRI line.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Header<'a> {
    /// Timestamp of the line.
    pub time: Stamp<'a>,
    /// Output stream of the line.
    pub stream: LineStream,
    /// Whether the line continues in the next one of this stream: its newline is not part of the
    /// content.
    pub is_partial: bool,
    /// Index of the content.
    pub content: usize,
}

/// Result of parsing the head of a line.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Head<'a> {
    /// The head is complete.
    Parsed(Header<'a>),
    /// More bytes are needed.
    Incomplete,
    /// The head is malformed.
    Malformed(LineError),
}

/// Maximum length of a head.
pub const LONGEST_HEAD: usize = 256;

/// Cache of the last parsed second: many lines have the same one.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Second {
    text: [u8; 19],
    since_epoch: i64,
}

impl Default for Second {
    /// Empty: no timestamp contains these bytes.
    fn default() -> Self {
        Self { text: [0xff; 19], since_epoch: 0 }
    }
}

/// Parses the head of a CRI line from the available bytes (including the line's newline, if available).
pub fn head(bytes: &[u8]) -> Head<'_> {
    head_near(bytes, &mut Second::default())
}

/// Like [`head`], but faster for a timestamp within the cached second.
pub fn head_near<'a>(bytes: &'a [u8], second: &mut Second) -> Head<'a> {
    plain_head(bytes, second).map_or_else(|| any_head(bytes, second), Head::Parsed)
}

/// Parses a head as all runtimes write it; `None` if the general parser is needed. The parts contain no
/// newline and end within [`LONGEST_HEAD`], so the result is the same.
fn plain_head<'a>(bytes: &'a [u8], second: &mut Second) -> Option<Header<'a>> {
    const LONGEST_TIME: usize = 64;
    const REST: usize = b"stdout F ".len();
    let end = memchr::memchr(b' ', bytes.get(..LONGEST_TIME)?)?;
    let rest = bytes.get(end + 1..end + 1 + REST)?;
    let (stream, is_partial) = match rest {
        b"stdout F " => (LineStream::Stdout, false),
        b"stderr F " => (LineStream::Stderr, false),
        b"stdout P " => (LineStream::Stdout, true),
        b"stderr P " => (LineStream::Stderr, true),
        _ => return None,
    };
    let time = Stamp::parse_near(bytes.get(..end)?, second)?;
    Some(Header { time, stream, is_partial, content: end + 1 + REST })
}

fn any_head<'a>(bytes: &'a [u8], second: &mut Second) -> Head<'a> {
    // Limit the bytes considered, or the result would depend on how many are available.
    let bytes = bytes.get(..LONGEST_HEAD).unwrap_or(bytes);
    let line_end = bytes.iter().position(|b| *b == b'\n');
    let line = &bytes[..line_end.unwrap_or(bytes.len())];
    let is_final = line_end.is_some() || line.len() >= LONGEST_HEAD;
    let missing = |error| if is_final { Head::Malformed(error) } else { Head::Incomplete };
    let Some((time, rest)) = split(line) else { return missing(LineError::NoTime) };
    let Some(time) = Stamp::parse_near(time, second) else {
        return Head::Malformed(LineError::BadTime);
    };
    let Some((stream, rest)) = split(rest) else { return missing(LineError::NoStream) };
    let stream = match stream {
        b"stdout" => LineStream::Stdout,
        b"stderr" => LineStream::Stderr,
        _ => return Head::Malformed(LineError::BadStream),
    };
    let Some((tags, rest)) = split(rest) else { return missing(LineError::NoTag) };
    let is_partial = tags.split(|b| *b == b':').next() == Some(b"P");
    Head::Parsed(Header { time, stream, is_partial, content: line.len() - rest.len() })
}

/// The parts before and after the first space.
fn split(line: &[u8]) -> Option<(&[u8], &[u8])> {
    let at = line.iter().position(|b| *b == b' ')?;
    Some((line.get(..at)?, line.get(at + 1..)?))
}

/// A line of Docker's `json-file` driver.
#[derive(Clone, PartialEq, Eq, Debug, Deserialize)]
pub struct DockerLine {
    /// Content, with its newline if the line is complete.
    #[serde(default)]
    pub log: String,
    /// `stdout` or `stderr`.
    #[serde(default)]
    stream: String,
    /// RFC 3339.
    #[serde(default)]
    time: String,
}

impl DockerLine {
    /// Timestamp and stream.
    ///
    /// # Errors
    /// The malformed part.
    pub fn origin(&self) -> Result<(Stamp<'_>, LineStream), LineError> {
        let stream = match self.stream.as_str() {
            "stdout" => LineStream::Stdout,
            "stderr" => LineStream::Stderr,
            _ => return Err(LineError::BadStream),
        };
        Ok((Stamp::parse(&self.time).ok_or(LineError::BadTime)?, stream))
    }
}

/// Parses a complete JSON line.
///
/// # Errors
/// It is not JSON, or its stream or timestamp is malformed.
pub fn docker(line: &[u8]) -> Result<DockerLine, LineError> {
    let parsed: DockerLine = serde_json::from_slice(line).map_err(|_| LineError::BadJson)?;
    parsed.origin()?;
    Ok(parsed)
}

impl<'a> Stamp<'a> {
    /// Parses an RFC 3339 timestamp with any number of decimals.
    pub fn parse(text: &'a str) -> Option<Self> {
        Self::parse_near(text.as_bytes(), &mut Second::default())
    }

    fn parse_near(text: &'a [u8], second: &mut Second) -> Option<Self> {
        let (whole, rest) = text.split_first_chunk::<19>()?;
        if *whole != second.text {
            *second = Second { text: *whole, since_epoch: seconds(whole)? };
        }
        let (fraction, zone) = match rest.split_first() {
            Some((b'.', rest)) => {
                let end = rest.iter().position(|b| !b.is_ascii_digit()).unwrap_or(rest.len());
                if end == 0 {
                    return None;
                }
                rest.split_at(end)
            }
            _ => (&[][..], rest),
        };
        let offset = offset(zone)?;
        let zone = if offset == 0 { b"Z".as_slice() } else { zone };
        Some(Self { since_epoch: second.since_epoch - offset, whole, fraction, zone })
    }

    /// Nanoseconds since the epoch.
    pub fn nanos(&self) -> i128 {
        i128::from(self.since_epoch) * 1_000_000_000 + i128::from(nine_digits(self.fraction))
    }

    /// Writes the timestamp with nine decimals and its original zone.
    pub fn write(&self, out: &mut Vec<u8>) {
        out.extend_from_slice(self.whole);
        out.push(b'.');
        out.extend(self.fraction.iter().copied().chain(std::iter::repeat(b'0')).take(9));
        out.extend_from_slice(self.zone);
    }
}

/// Seconds since the epoch of `2016-10-06T00:17:09`, interpreted as UTC.
fn seconds(whole: &[u8; 19]) -> Option<i64> {
    let marks = [(4, b'-'), (7, b'-'), (10, b'T'), (13, b':'), (16, b':')];
    if marks.iter().any(|(at, mark)| whole.get(*at) != Some(mark)) {
        return None;
    }
    let number = |from: usize, to: usize| digits(whole.get(from..to)?);
    let (year, month, day) = (number(0, 4)?, number(5, 7)?, number(8, 10)?);
    let (hour, minute, second) = (number(11, 13)?, number(14, 16)?, number(17, 19)?);
    let is_time = hour < 24 && minute < 60 && second < 60;
    let is_date = (1..=12).contains(&month) && (1..=days_in(year, month)).contains(&day);
    (is_time && is_date).then(|| days_from_civil(year, month, day) * 86_400 + hour * 3600 + minute * 60 + second)
}

fn digits(text: &[u8]) -> Option<i64> {
    text.iter().try_fold(0_i64, |n, b| b.is_ascii_digit().then(|| n * 10 + i64::from(b - b'0')))
}

fn nine_digits(fraction: &[u8]) -> i64 {
    fraction
        .iter()
        .copied()
        .chain(std::iter::repeat(b'0'))
        .take(9)
        .fold(0, |n, b| n * 10 + i64::from(b.wrapping_sub(b'0')))
}

/// Seconds east of UTC.
fn offset(zone: &[u8]) -> Option<i64> {
    if zone == b"Z" {
        return Some(0);
    }
    let sign = match zone.first()? {
        b'+' => 1,
        b'-' => -1,
        _ => return None,
    };
    if zone.len() != 6 || zone.get(3) != Some(&b':') {
        return None;
    }
    let (hours, minutes) = (digits(zone.get(1..3)?)?, digits(zone.get(4..6)?)?);
    (hours <= 24 && minutes < 60).then_some(sign * (hours * 3600 + minutes * 60))
}

fn days_in(year: i64, month: i64) -> i64 {
    match month {
        2 if year % 4 == 0 && (year % 100 != 0 || year % 400 == 0) => 29,
        2 => 28,
        4 | 6 | 9 | 11 => 30,
        _ => 31,
    }
}

/// Days since 1970-01-01 in the Gregorian calendar.
fn days_from_civil(year: i64, month: i64, day: i64) -> i64 {
    let year = if month <= 2 { year - 1 } else { year };
    let era = year.div_euclid(400);
    let of_era = year - era * 400;
    let of_year = (153 * ((month + 9) % 12) + 2) / 5 + day - 1;
    era * 146_097 + of_era * 365 + of_era / 4 - of_era / 100 + of_year - 719_468
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn shown(text: &str) -> Option<String> {
        let mut out = Vec::new();
        Stamp::parse(text)?.write(&mut out);
        String::from_utf8(out).ok()
    }

    #[test]
    fn times_are_written_with_nine_digits() {
        for (read, written) in [
            ("2016-10-06T00:17:09.669794202Z", Some("2016-10-06T00:17:09.669794202Z")),
            ("2016-10-06T00:17:09Z", Some("2016-10-06T00:17:09.000000000Z")),
            ("2016-10-06T00:17:09.5+02:00", Some("2016-10-06T00:17:09.500000000+02:00")),
            ("2016-10-06T00:17:09.5+00:00", Some("2016-10-06T00:17:09.500000000Z")),
            ("2016-02-29T00:00:00Z", Some("2016-02-29T00:00:00.000000000Z")),
            ("2015-02-29T00:00:00Z", None),
            ("2016-10-06T24:17:09Z", None),
            ("2016-10-06T00:17:09.Z", None),
            ("2016-10-06T00:17:09", None),
            ("2016-10-06 00:17:09Z", None),
            ("", None),
        ] {
            assert_eq!(shown(read).as_deref(), written, "{read}");
        }
    }

    #[test]
    fn times_are_ordered_across_zones() {
        let nanos = |text| Stamp::parse(text).expect("a time").nanos();
        assert_eq!(nanos("1970-01-01T00:00:00.000000001Z"), 1);
        assert_eq!(nanos("2016-10-06T02:17:09+02:00"), nanos("2016-10-06T00:17:09Z"));
        assert_eq!(nanos("2000-03-01T00:00:00Z"), 951_868_800_000_000_000);
    }

    #[test]
    fn heads_of_lines() {
        let time = "2016-10-06T00:17:09.669794202Z";
        for (line, wanted) in [
            ("stdout F hello\n", Ok((LineStream::Stdout, false, "hello\n"))),
            ("stderr P half\n", Ok((LineStream::Stderr, true, "half\n"))),
            ("stdout P:more:tags half\n", Ok((LineStream::Stdout, true, "half\n"))),
            ("stdout F \n", Ok((LineStream::Stdout, false, "\n"))),
            ("stdin F x\n", Err(LineError::BadStream)),
            ("stdout F\n", Err(LineError::NoTag)),
            ("stdout\n", Err(LineError::NoStream)),
        ] {
            let line = format!("{time} {line}");
            let found = match head(line.as_bytes()) {
                Head::Parsed(h) => Ok((h.stream, h.is_partial, &line[h.content..])),
                Head::Malformed(error) => Err(error),
                Head::Incomplete => panic!("complete: {line}"),
            };
            assert_eq!(found, wanted, "{line}");
        }
        assert_eq!(head(b"nonsense\n"), Head::Malformed(LineError::NoTime));
        assert_eq!(head(b"non sense\n"), Head::Malformed(LineError::BadTime));
        assert_eq!(head(b"2016-10-06T00"), Head::Incomplete);
        assert_eq!(head(&[b'x'; 300]), Head::Malformed(LineError::NoTime), "bounded");
    }

    #[test]
    fn docker_lines() {
        let line = br#"{"log":"hello\n","stream":"stdout","time":"2016-10-20T18:39:20.57606443Z"}"#;
        let parsed = docker(line).expect("a line");
        assert_eq!((parsed.log.as_str(), parsed.origin().map(|o| o.1)), ("hello\n", Ok(LineStream::Stdout)));
        assert_eq!(docker(b"{}"), Err(LineError::BadStream));
        assert_eq!(docker(b"nonsense"), Err(LineError::BadJson));
    }

    proptest! {
        #[test]
        fn the_quick_way_finds_what_the_long_way_finds(
            zone in "(Z|[+]02:00|x|\\n)", rest in "(stdout|stderr|x)[ \n](F|P|P:x)[ \n][a \n]{0,80}", seconds in 0..3_u8,
        ) {
            let line = format!("2016-10-06T00:17:0{seconds}.669{zone} {rest}");
            let mut second = Second::default();
            head_near(b"2016-10-06T00:17:01Z stdout F x\n", &mut second);
            let quick = plain_head(line.as_bytes(), &mut second).map(Head::Parsed);
            let long = any_head(line.as_bytes(), &mut Second::default());
            prop_assert!(quick.is_none_or(|quick| quick == long), "{line:?}: {long:?}");
            prop_assert_eq!(head_near(line.as_bytes(), &mut second), long);
        }

        #[test]
        fn foreign_bytes_never_panic(bytes in proptest::collection::vec(any::<u8>(), 0..400)) {
            let _ = (head(&bytes), docker(&bytes));
        }

        #[test]
        fn foreign_times_never_panic(text in "[0-9TZ:.+-]{0,40}") {
            let _ = shown(&text);
        }
    }
}
