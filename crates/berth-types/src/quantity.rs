//! Kubernetes resource quantities: parsing, rounding, arithmetic, and canonical formatting. Pure.
//!
//! A quantity is stored in nano units as `i128`, enough for every value the API allows (magnitude up to 2^63-1). At
//! most nine decimal places are kept; finer ones round up.

use k8s_openapi::apimachinery::pkg::api::resource::Quantity;

const NANO: i128 = 1_000_000_000;

/// Error of parsing a quantity.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum QuantityError {
    /// The text is not of the form `<number><suffix>`.
    #[error("quantities must match the regular expression '^([+-]?[0-9.]+)([eEinumkKMGTP]*[-+]?[0-9]*)$'")]
    Format,
    /// The suffix is unknown.
    #[error("unable to parse quantity's suffix")]
    Suffix,
    /// The number has no digits or is out of range.
    #[error("unable to parse numeric part of quantity")]
    Number,
}

/// Notation of a quantity, kept for formatting.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum QuantityFormat {
    /// Decimal suffixes: `m`, none, `k`, `M`, …
    DecimalSi,
    /// Binary suffixes: `Ki`, `Mi`, …
    BinarySi,
    /// `e3`, `E-3`: power of ten.
    DecimalExponent,
}

/// A parsed quantity; compares by value, whatever its notation.
#[derive(Clone, Copy, Debug)]
pub struct Amount {
    nano: i128,
    format: QuantityFormat,
}

impl PartialEq for Amount {
    fn eq(&self, other: &Self) -> bool {
        self.nano == other.nano
    }
}
impl Eq for Amount {}
impl PartialOrd for Amount {
    fn partial_cmp(&self, other: &Self) -> Option<std::cmp::Ordering> {
        Some(self.cmp(other))
    }
}
impl Ord for Amount {
    fn cmp(&self, other: &Self) -> std::cmp::Ordering {
        self.nano.cmp(&other.nano)
    }
}

impl Amount {
    /// Parses a quantity such as `100m`, `1.5Gi`, `1e3`.
    ///
    /// # Errors
    /// The malformed part, with the API's error text.
    pub fn parse(text: &str) -> Result<Self, QuantityError> {
        let text = text.trim();
        if text.is_empty() {
            return Err(QuantityError::Format);
        }
        let digits_end = text
            .char_indices()
            .find(|&(i, c)| !(c.is_ascii_digit() || c == '.' || (i == 0 && (c == '+' || c == '-'))))
            .map_or(text.len(), |(i, _)| i);
        let (number, suffix) = text.split_at(digits_end);
        let (multiplier, divisor, format) = scale(suffix)?;
        let (negative, digits) = match number.strip_prefix('-') {
            Some(rest) => (true, rest),
            None => (false, number.strip_prefix('+').unwrap_or(number)),
        };
        let (whole, fraction) = digits.split_once('.').unwrap_or((digits, ""));
        if (whole.is_empty() && fraction.is_empty()) || fraction.contains('.') || digits.len() > 40 {
            return Err(QuantityError::Number);
        }
        let mut value: i128 = 0;
        for c in whole.chars().chain(fraction.chars()) {
            let digit = c.to_digit(10).ok_or(QuantityError::Number)?;
            value =
                value.checked_mul(10).and_then(|v| v.checked_add(i128::from(digit))).ok_or(QuantityError::Number)?;
        }
        let places = 10_i128.checked_pow(fraction.len() as u32).ok_or(QuantityError::Number)?;
        let over = places.checked_mul(divisor).ok_or(QuantityError::Number)?;
        let scaled = value.checked_mul(multiplier).ok_or(QuantityError::Number)?;
        let nano = scaled / over + i128::from(scaled % over != 0);
        let cap = i128::from(i64::MAX) * NANO;
        let nano = nano.min(cap);
        Ok(Self { nano: if negative { -nano } else { nano }, format })
    }

    /// Creates a quantity of whole base units.
    pub fn from_value(value: i64, format: QuantityFormat) -> Self {
        Self { nano: i128::from(value) * NANO, format }
    }

    /// Creates a quantity of thousandths.
    pub fn from_milli(milli: i64, format: QuantityFormat) -> Self {
        Self { nano: i128::from(milli) * (NANO / 1000), format }
    }

    /// Value in base units, rounded up (away from zero for positive values).
    pub fn value(self) -> i64 {
        clamp(ceil_div(self.nano, NANO))
    }

    /// Value in thousandths, rounded up.
    pub fn milli(self) -> i64 {
        clamp(ceil_div(self.nano, NANO / 1000))
    }

    /// Whether the value is exactly zero.
    pub fn is_zero(self) -> bool {
        self.nano == 0
    }

    /// Whether the value is below zero.
    pub fn is_negative(self) -> bool {
        self.nano < 0
    }

    /// Returns the sum, in this quantity's notation.
    #[must_use]
    pub fn plus(self, other: Self) -> Self {
        Self { nano: self.nano.saturating_add(other.nano), format: self.format }
    }

    /// Returns the difference, in this quantity's notation.
    #[must_use]
    pub fn minus(self, other: Self) -> Self {
        Self { nano: self.nano.saturating_sub(other.nano), format: self.format }
    }

    /// Returns the value rounded up to whole thousandths (API defaulting, spec 02a §1.3).
    #[must_use]
    pub fn rounded_to_milli(self) -> Self {
        let step = NANO / 1000;
        Self { nano: ceil_div(self.nano, step) * step, format: self.format }
    }

    /// Formats the value canonically: no fraction, and the largest suffix that loses no precision.
    pub fn canonical(self) -> String {
        if self.nano == 0 {
            return "0".to_owned();
        }
        let whole = self.nano % NANO == 0;
        if self.format == QuantityFormat::BinarySi && whole && (self.nano / NANO).abs() >= 1024 {
            let mut value = self.nano / NANO;
            let mut suffix = "";
            for next in ["Ki", "Mi", "Gi", "Ti", "Pi", "Ei"] {
                if value % 1024 != 0 {
                    break;
                }
                value /= 1024;
                suffix = next;
            }
            return format!("{value}{suffix}");
        }
        let mut value = self.nano;
        let mut exponent: i32 = -9;
        while value % 1000 == 0 && exponent < 18 {
            value /= 1000;
            exponent += 3;
        }
        if self.format == QuantityFormat::DecimalExponent {
            return if exponent == 0 { value.to_string() } else { format!("{value}e{exponent}") };
        }
        let suffix = match exponent {
            -9 => "n",
            -6 => "u",
            -3 => "m",
            0 => "",
            3 => "k",
            6 => "M",
            9 => "G",
            12 => "T",
            15 => "P",
            _ => "E",
        };
        format!("{value}{suffix}")
    }
}

impl TryFrom<&Quantity> for Amount {
    type Error = QuantityError;

    fn try_from(quantity: &Quantity) -> Result<Self, QuantityError> {
        Self::parse(&quantity.0)
    }
}

impl From<Amount> for Quantity {
    fn from(amount: Amount) -> Self {
        Self(amount.canonical())
    }
}

fn clamp(value: i128) -> i64 {
    i64::try_from(value).unwrap_or(if value < 0 { i64::MIN } else { i64::MAX })
}

fn ceil_div(value: i128, by: i128) -> i128 {
    value.div_euclid(by) + i128::from(value.rem_euclid(by) != 0)
}

/// Multiplier to nano units, divisor, and notation of a suffix.
fn scale(suffix: &str) -> Result<(i128, i128, QuantityFormat), QuantityError> {
    const DECIMAL: [(&str, i128); 10] = [
        ("n", 1),
        ("u", 1_000),
        ("m", 1_000_000),
        ("", NANO),
        ("k", NANO * 1_000),
        ("M", NANO * 1_000_000),
        ("G", NANO * 1_000_000_000),
        ("T", NANO * 1_000_000_000_000),
        ("P", NANO * 1_000_000_000_000_000),
        ("E", NANO * 1_000_000_000_000_000_000),
    ];
    const BINARY: [&str; 6] = ["Ki", "Mi", "Gi", "Ti", "Pi", "Ei"];
    if let Some((_, multiplier)) = DECIMAL.iter().find(|(s, _)| *s == suffix) {
        return Ok((*multiplier, 1, QuantityFormat::DecimalSi));
    }
    if let Some(power) = BINARY.iter().position(|s| *s == suffix) {
        return Ok((NANO << (10 * (power + 1)), 1, QuantityFormat::BinarySi));
    }
    let exponent = suffix.strip_prefix(['e', 'E']).ok_or(QuantityError::Suffix)?;
    let exponent: i32 = exponent.parse().map_err(|_| QuantityError::Suffix)?;
    if !(-18..=18).contains(&exponent) {
        return Err(QuantityError::Suffix);
    }
    let power = 10_i128.pow(exponent.unsigned_abs());
    Ok(if exponent < 0 {
        (NANO, power, QuantityFormat::DecimalExponent)
    } else {
        (NANO * power, 1, QuantityFormat::DecimalExponent)
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn quantities_are_read_and_rounded_up() {
        for (text, value, milli) in [
            ("0", 0, 0),
            ("1", 1, 1000),
            ("100m", 1, 100),
            ("1500m", 2, 1500),
            ("1.5", 2, 1500),
            (".5", 1, 500),
            ("1Ki", 1024, 1_024_000),
            ("1.5Gi", 1_610_612_736, 1_610_612_736_000),
            ("1e3", 1000, 1_000_000),
            ("5E-1", 1, 500),
            ("2M", 2_000_000, 2_000_000_000),
            ("1n", 1, 1),
            ("-3", -3, -3000),
            ("+7", 7, 7000),
        ] {
            let amount = Amount::parse(text).expect(text);
            assert_eq!((amount.value(), amount.milli()), (value, milli), "{text}");
        }
    }

    #[test]
    fn what_is_no_quantity_is_refused() {
        for text in ["", " ", "abc", "1.2.3", "1KiB", "1e", "1e99", "--1", ".", "1 Gi", "9".repeat(50).as_str()] {
            assert!(Amount::parse(text).is_err(), "{text:?}");
        }
    }

    #[test]
    fn canonical_text_keeps_the_family_of_suffixes() {
        for (text, canonical) in [
            ("1000m", "1"),
            ("1024Ki", "1Mi"),
            ("1536Mi", "1536Mi"),
            ("100000", "100k"),
            ("0.5", "500m"),
            ("1e6", "1e6"),
            ("512", "512"),
            ("0.5Gi", "512Mi"),
            ("0Mi", "0"),
        ] {
            assert_eq!(Amount::parse(text).expect(text).canonical(), canonical, "{text}");
        }
    }
}
