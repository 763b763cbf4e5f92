//! Signals by their numbers, real-time ones too: images name those to be stopped by.

use rustix::process::Signal;

/// The first and the last real-time signal a program may use: the C library keeps 32 and 33.
const REAL_TIME: std::ops::RangeInclusive<i32> = 34..=64;

/// The signal of a number; none where there is none, or where it is the C library's own.
pub fn by_number(number: i32) -> Option<Signal> {
    if REAL_TIME.contains(&number) {
        // SAFETY: the number is that of a signal, and of none the C library keeps for itself.
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
