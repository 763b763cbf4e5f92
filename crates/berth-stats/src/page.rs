//! Byte-level writer for the Prometheus text format.
//!
//! Formats numbers exactly as [`metrics::text_encoder`] does. Integers and durations, which are nearly all values on these
//! pages, take a fast path without floating point.
//!
//! [`metrics::text_encoder`]: berth_metrics::text_encoder

/// A 64-bit float writes integers below this bound exactly, whatever power of ten they are divided by.
const EXACT: u64 = 1_000_000_000_000_000;
const POWERS: [u64; 10] = [1, 10, 100, 1000, 10_000, 100_000, 1_000_000, 10_000_000, 100_000_000, 1_000_000_000];

/// Writes the `HELP` and `TYPE` lines of a family.
pub fn push_family(out: &mut Vec<u8>, name: &str, help: &str, kind: &str) {
    for part in ["# HELP ", name, " ", help, "\n# TYPE ", name, " ", kind, "\n"] {
        out.extend_from_slice(part.as_bytes());
    }
}

/// Writes the escaped content of a label value, without its quotes.
pub fn push_label_value(out: &mut Vec<u8>, value: &str) {
    let mut rest = value.as_bytes();
    while let Some(at) = memchr::memchr3(b'\\', b'\n', b'"', rest) {
        let (plain, special) = rest.split_at(at);
        out.extend_from_slice(plain);
        out.extend_from_slice(match special.first() {
            Some(b'\\') => b"\\\\",
            Some(b'\n') => b"\\n",
            _ => b"\\\"",
        });
        rest = special.get(1..).unwrap_or_default();
    }
    out.extend_from_slice(rest);
}

/// Writes an integer in full decimal digits, never with an exponent.
pub fn push_integer(out: &mut Vec<u8>, number: u64) {
    let mut digits = [0; 20];
    out.extend_from_slice(decimal(number, &mut digits));
}

/// Writes an unsigned sample value, with an exponent from a million on.
pub fn push_count(out: &mut Vec<u8>, number: u64) {
    if number < 1_000_000 {
        push_integer(out, number);
    } else {
        push_scaled(out, number, 0);
    }
}

/// Writes a signed sample value.
pub fn push_signed(out: &mut Vec<u8>, number: i64) {
    if number < 0 {
        out.push(b'-');
    }
    push_count(out, number.unsigned_abs());
}

/// Writes `number / 10^decimals` as a sample value; 9 decimals turn nanoseconds into seconds.
pub fn push_scaled(out: &mut Vec<u8>, number: u64, decimals: usize) {
    let Some(unit) = POWERS.get(decimals).filter(|_| number < EXACT) else {
        return push_float(out, number, decimals);
    };
    if number == 0 {
        return out.push(b'0');
    }
    let mut digits = [0; 20];
    let digits = decimal(number, &mut digits);
    let significant = trimmed(digits);
    if number / unit >= 1_000_000 {
        let exponent = digits.len() - 1 - decimals;
        return push_exponent(out, significant, exponent);
    }
    if number / unit == 0 && number.saturating_mul(10_000) < *unit {
        return push_float(out, number, decimals);
    }
    let whole = digits.len().saturating_sub(decimals);
    let (before, after) = digits.split_at(whole);
    let after = after.get(..significant.len().saturating_sub(whole)).unwrap_or_default();
    out.extend_from_slice(if before.is_empty() { b"0" } else { before });
    if !after.is_empty() {
        out.push(b'.');
        out.resize(out.len() + decimals.saturating_sub(digits.len()), b'0');
        out.extend_from_slice(after);
    }
}

fn push_exponent(out: &mut Vec<u8>, significant: &[u8], exponent: usize) {
    let Some((first, rest)) = significant.split_first() else { return };
    out.push(*first);
    if !rest.is_empty() {
        out.push(b'.');
        out.extend_from_slice(rest);
    }
    out.extend_from_slice(b"e+");
    if exponent < 10 {
        out.push(b'0');
    }
    push_integer(out, u64::try_from(exponent).unwrap_or_default());
}

#[allow(clippy::cast_precision_loss, reason = "the format has no integers; the reference loses the same digits")]
fn push_float(out: &mut Vec<u8>, number: u64, decimals: usize) {
    let mut text = String::new();
    let unit = POWERS.get(decimals).copied().unwrap_or(1);
    berth_metrics::text_encoder::push_number(&mut text, number as f64 / unit as f64);
    out.extend_from_slice(text.as_bytes());
}

fn decimal(mut number: u64, digits: &mut [u8; 20]) -> &[u8] {
    let mut at = digits.len();
    for (place, digit) in digits.iter_mut().enumerate().rev() {
        *digit = b'0' + u8::try_from(number % 10).unwrap_or_default();
        number /= 10;
        at = place;
        if number == 0 {
            break;
        }
    }
    digits.get(at..).unwrap_or_default()
}

/// Strips trailing zeros.
fn trimmed(digits: &[u8]) -> &[u8] {
    let end = digits.iter().rposition(|digit| *digit != b'0').map_or(0, |last| last + 1);
    digits.get(..end).unwrap_or_default()
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn scaled(number: u64, decimals: usize) -> String {
        let mut out = Vec::new();
        push_scaled(&mut out, number, decimals);
        String::from_utf8(out).expect("text")
    }

    #[allow(clippy::cast_precision_loss, reason = "what is compared with")]
    fn by_float(number: u64, decimals: u32) -> String {
        let mut text = String::new();
        berth_metrics::text_encoder::push_number(&mut text, number as f64 / 10_f64.powi(decimals.cast_signed()));
        text
    }

    #[test]
    fn numbers_read_as_they_should() {
        for (number, decimals, expected) in [
            (0, 9, "0"),
            (10_000_000_000, 9, "10"),
            (1_500_000_000, 9, "1.5"),
            (1_000_000, 9, "0.001"),
            (100_000, 9, "0.0001"),
            (99_999, 9, "9.9999e-05"),
            (999_999_999_999_999, 9, "999999.999999999"),
            (1_000_000_000_000_000, 9, "1e+06"),
            (1_624_396_278, 0, "1.624396278e+09"),
            (1_000_000, 0, "1e+06"),
            (999_999, 0, "999999"),
            (u64::MAX, 0, "1.8446744073709552e+19"),
        ] {
            assert_eq!(scaled(number, decimals), expected, "{number}/10^{decimals}");
        }
        let mut out = Vec::new();
        push_signed(&mut out, -1);
        push_signed(&mut out, i64::MIN);
        push_label_value(&mut out, "a\\b\"c\nd");
        push_integer(&mut out, u64::MAX);
        assert_eq!(
            String::from_utf8(out).expect("text"),
            "-1-9.223372036854776e+18a\\\\b\\\"c\\nd18446744073709551615"
        );
    }

    proptest! {
        #[test]
        fn the_short_way_and_the_long_way_agree(number: u64, shift in 0_u32..64, decimals in prop::sample::select(vec![0_u32, 3, 6, 9])) {
            let number = number >> shift;
            let places = usize::try_from(decimals).expect("small");
            prop_assert_eq!(scaled(number, places), by_float(number, decimals));
        }
    }
}
