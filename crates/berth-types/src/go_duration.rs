//! Durations in the grammar and canonical format of Go's `time.Duration`. Pure.
//!
//! `1m` is parsed and formatted as `1m0s`, `90s` as `1m30s`, `100ms` unchanged. Spec 01, notation.

use std::{fmt, str::FromStr, time::Duration};

use serde::{Deserialize, Deserializer, Serialize, Serializer, de};

use crate::fieldpath::quoted;

/// Nanoseconds per unit, longest first.
const UNITS: [(&str, i64); 8] = [
    ("ns", 1),
    ("us", 1_000),
    ("µs", 1_000),
    ("μs", 1_000),
    ("ms", 1_000_000),
    ("s", 1_000_000_000),
    ("m", 60_000_000_000),
    ("h", 3_600_000_000_000),
];

/// A signed duration in nanoseconds, formatted and parsed like Go's `time.Duration`.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Default, Hash)]
pub struct GoDuration(i64);

/// Error of parsing a duration, with the reference's text.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum DurationError {
    /// The text is not of the form `[+-](number unit)+`.
    #[error("time: invalid duration {}", quoted(.0))]
    Invalid(String),
    /// A number has no unit.
    #[error("time: missing unit in duration {}", quoted(.0))]
    MissingUnit(String),
    /// The unit is none of `ns`, `us`, `µs`, `μs`, `ms`, `s`, `m`, and `h`.
    #[error("time: unknown unit {} in duration {}", quoted(.unit), quoted(.text))]
    UnknownUnit {
        /// The unknown unit.
        unit: String,
        /// The whole text.
        text: String,
    },
}

impl GoDuration {
    /// Zero; in the configuration mostly "unset".
    pub const ZERO: Self = Self(0);

    /// Creates a duration from nanoseconds.
    pub const fn from_nanos(nanos: i64) -> Self {
        Self(nanos)
    }

    /// Creates a duration from milliseconds.
    pub const fn from_millis(millis: i64) -> Self {
        Self(millis.saturating_mul(1_000_000))
    }

    /// Creates a duration from seconds.
    pub const fn from_secs(secs: i64) -> Self {
        Self(secs.saturating_mul(1_000_000_000))
    }

    /// Nanoseconds, possibly negative.
    pub const fn nanos(self) -> i64 {
        self.0
    }

    /// Seconds, with a fraction.
    pub fn as_secs_f64(self) -> f64 {
        self.0 as f64 / 1e9
    }

    /// Whether the duration is exactly zero.
    pub const fn is_zero(self) -> bool {
        self.0 == 0
    }

    /// Whether the duration is below zero; in the configuration mostly "off".
    pub const fn is_negative(self) -> bool {
        self.0 < 0
    }

    /// Converts to a standard duration; negative ones become zero.
    pub fn std(self) -> Duration {
        Duration::from_nanos(u64::try_from(self.0).unwrap_or(0))
    }
}

impl From<GoDuration> for Duration {
    fn from(duration: GoDuration) -> Self {
        duration.std()
    }
}

impl From<Duration> for GoDuration {
    /// Durations above 292 years become the longest that Go has.
    fn from(duration: Duration) -> Self {
        Self(i64::try_from(duration.as_nanos()).unwrap_or(i64::MAX))
    }
}

impl FromStr for GoDuration {
    type Err = DurationError;

    fn from_str(text: &str) -> Result<Self, DurationError> {
        let invalid = || DurationError::Invalid(text.to_owned());
        let (negative, mut rest) = match text.strip_prefix(['-', '+']) {
            Some(rest) => (text.starts_with('-'), rest),
            None => (false, text),
        };
        if rest == "0" {
            return Ok(Self::ZERO);
        }
        if rest.is_empty() {
            return Err(invalid());
        }
        let mut total: i128 = 0;
        while !rest.is_empty() {
            let number_end = rest.find(|c: char| !(c.is_ascii_digit() || c == '.')).unwrap_or(rest.len());
            let (number, tail) = rest.split_at(number_end);
            let unit_end = tail.find(|c: char| c.is_ascii_digit() || c == '.').unwrap_or(tail.len());
            let (unit, next) = tail.split_at(unit_end);
            let (whole, fraction) = number.split_once('.').unwrap_or((number, ""));
            if (whole.is_empty() && fraction.is_empty()) || fraction.contains('.') {
                return Err(invalid());
            }
            if unit.is_empty() {
                return Err(DurationError::MissingUnit(text.to_owned()));
            }
            let scale = UNITS
                .iter()
                .find(|(name, _)| *name == unit)
                .map(|(_, scale)| i128::from(*scale))
                .ok_or_else(|| DurationError::UnknownUnit { unit: unit.to_owned(), text: text.to_owned() })?;
            total += part(whole, fraction, scale).ok_or_else(invalid)?;
            if total > i128::from(i64::MAX) + i128::from(negative) {
                return Err(invalid());
            }
            rest = next;
        }
        let signed = if negative { -total } else { total };
        i64::try_from(signed).map(Self).map_err(|_| invalid())
    }
}

/// `whole.fraction` units in nanoseconds; `None` if they do not fit.
fn part(whole: &str, fraction: &str, scale: i128) -> Option<i128> {
    let whole: i128 = if whole.is_empty() { 0 } else { whole.parse::<u64>().ok()?.into() };
    let mut nanos = whole.checked_mul(scale)?;
    let mut place = scale;
    for digit in fraction.chars().filter_map(|c| c.to_digit(10)).take(18) {
        // Digits below a nanosecond are dropped, as in the reference.
        nanos += i128::from(digit) * place / 10;
        place /= 10;
        if place == 0 {
            break;
        }
    }
    Some(nanos)
}

impl fmt::Display for GoDuration {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if self.0 == 0 {
            return f.write_str("0s");
        }
        let sign = if self.0 < 0 { "-" } else { "" };
        let nanos = self.0.unsigned_abs();
        let (unit, scale) = match nanos {
            0..1_000 => ("ns", 1),
            1_000..1_000_000 => ("µs", 1_000),
            1_000_000..1_000_000_000 => ("ms", 1_000_000),
            _ => return long(f, sign, nanos),
        };
        write!(f, "{sign}{}{unit}", decimal(nanos, scale))
    }
}

/// Formats a duration of at least one second: hours, minutes, and seconds, the smaller ones always included.
fn long(f: &mut fmt::Formatter<'_>, sign: &str, nanos: u64) -> fmt::Result {
    let (minutes, below) = (nanos / 60_000_000_000, nanos % 60_000_000_000);
    let seconds = decimal(below, 1_000_000_000);
    match (minutes / 60, minutes % 60) {
        (0, 0) => write!(f, "{sign}{seconds}s"),
        (0, minutes) => write!(f, "{sign}{minutes}m{seconds}s"),
        (hours, minutes) => write!(f, "{sign}{hours}h{minutes}m{seconds}s"),
    }
}

/// Formats `nanos / scale` with as many decimal places as needed.
fn decimal(nanos: u64, scale: u64) -> String {
    let fraction = nanos % scale;
    if fraction == 0 {
        return (nanos / scale).to_string();
    }
    let width = scale.ilog10() as usize;
    let digits = format!("{fraction:0width$}");
    format!("{}.{}", nanos / scale, digits.trim_end_matches('0'))
}

impl fmt::Debug for GoDuration {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Display::fmt(self, f)
    }
}

impl Serialize for GoDuration {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.collect_str(self)
    }
}

/// Type name by which the decoder accepts only a string (spec 01 §3.2).
pub const DURATION_TYPE: &str = "Duration";

impl<'de> Deserialize<'de> for GoDuration {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        struct Visitor;
        impl<'de> de::Visitor<'de> for Visitor {
            type Value = GoDuration;

            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str("a duration such as \"1m30s\"")
            }

            fn visit_str<E: de::Error>(self, text: &str) -> Result<GoDuration, E> {
                text.parse().map_err(E::custom)
            }

            fn visit_newtype_struct<D: Deserializer<'de>>(self, inner: D) -> Result<GoDuration, D::Error> {
                inner.deserialize_str(self)
            }
        }
        deserializer.deserialize_newtype_struct(DURATION_TYPE, Visitor)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn texts_are_read_and_printed_canonically() {
        for (text, printed) in [
            ("0", "0s"),
            ("1m", "1m0s"),
            ("90s", "1m30s"),
            ("100ms", "100ms"),
            ("1h", "1h0m0s"),
            ("4h30m", "4h30m0s"),
            ("1.5h", "1h30m0s"),
            ("1.5s", "1.5s"),
            ("-1.5s", "-1.5s"),
            ("+5s", "5s"),
            (".5m", "30s"),
            ("1ns", "1ns"),
            ("1500us", "1.5ms"),
            ("7µs", "7µs"),
            ("2562047h47m16.854775807s", "2562047h47m16.854775807s"),
        ] {
            assert_eq!(text.parse::<GoDuration>().map(|d| d.to_string()), Ok(printed.to_owned()), "{text}");
        }
    }

    #[test]
    fn durations_print_as_in_go() {
        for (nanos, text) in [
            (0, "0s"),
            (15, "15ns"),
            (1_500, "1.5µs"),
            (15_000_000, "15ms"),
            (1_000_000_000, "1s"),
            (180_104_000_000, "3m0.104s"),
            (3_600_000_000_001, "1h0m0.000000001s"),
            (3_723_500_000_000, "1h2m3.5s"),
            (u64::MAX, "2562047h47m16.854775807s"),
        ] {
            assert_eq!(GoDuration::from(Duration::from_nanos(nanos)).to_string(), text);
        }
    }

    #[test]
    fn durations_print_as_in_the_reference() {
        for (seconds, text) in [(0, "0s"), (10, "10s"), (80, "1m20s"), (300, "5m0s"), (3600, "1h0m0s")] {
            assert_eq!(GoDuration::from(Duration::from_secs(seconds)).to_string(), text);
        }
    }

    #[test]
    fn deadlines_are_written_as_go_does() {
        let millis = |millis| GoDuration::from(Duration::from_millis(millis)).to_string();
        assert_eq!([500, 10_000, 1500, 90_000].map(millis), ["500ms", "10s", "1.5s", "1m30s"]);
    }

    #[test]
    fn what_is_no_duration_is_refused_in_the_reference_s_words() {
        for (text, error) in [
            ("", "time: invalid duration \"\""),
            ("abc", "time: invalid duration \"abc\""),
            ("60", "time: missing unit in duration \"60\""),
            ("5x", "time: unknown unit \"x\" in duration \"5x\""),
            ("1.2.3s", "time: invalid duration \"1.2.3s\""),
            ("9999999999h", "time: invalid duration \"9999999999h\""),
            ("-", "time: invalid duration \"-\""),
            (".s", "time: invalid duration \".s\""),
        ] {
            assert_eq!(text.parse::<GoDuration>().map_err(|e| e.to_string()), Err(error.to_owned()), "{text}");
        }
    }
}
