//! Signals by number, including real-time signals: an image may name one as its stop signal.

use rustix::process::Signal;

/// Real-time signals available to programs: the C library reserves 32 and 33.
const REAL_TIME: std::ops::RangeInclusive<i32> = 34..=64;

/// Signal of a number; `None` if there is none, or if the C library reserves it.
pub fn by_number(number: i32) -> Option<Signal> {
    if REAL_TIME.contains(&number) {
        // SAFETY: the number is that of a signal, and not one that the C library reserves.
        return Some(unsafe { Signal::from_raw_unchecked(number) });
    }
    Signal::from_named_raw(number)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_signals_have_numbers() {
        for (number, expected) in [
            (0, false),
            (1, true),
            (9, true),
            (31, true),
            (32, false),
            (33, false),
            (34, true),
            (64, true),
            (65, false),
            (-1, false),
        ] {
            assert_eq!(by_number(number).map(Signal::as_raw).is_some(), expected, "{number}");
        }
    }
}
