//! Bandwidth limits of pods from annotations, and their token buckets. Pure.
//!
//! Implements spec 09b §11.4.

use std::collections::BTreeMap;

use berth_sys::netlink::rtnetlink::TokenBucket;

const INGRESS: &str = "kubernetes.io/ingress-bandwidth";
const EGRESS: &str = "kubernetes.io/egress-bandwidth";
/// Minimum and maximum of a limit, bits per second.
const BOUNDS: (u128, u128) = (1_000, 1_000_000_000_000_000);

/// Bandwidth limits of a pod, bits per second; `None`: unlimited.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct Bandwidth {
    /// Limit for traffic that the pod receives.
    pub ingress: Option<u64>,
    /// Limit for traffic that the pod sends.
    pub egress: Option<u64>,
}

/// An invalid bandwidth limit.
#[derive(Clone, PartialEq, Eq, Debug, thiserror::Error)]
pub enum BandwidthError {
    /// The limit is below the minimum.
    #[error("resource is unreasonably small (< 1kbit)")]
    Small,
    /// The limit is above the maximum.
    #[error("resource is unreasonably large (> 1Pbit)")]
    Large,
    /// The value is not a Kubernetes quantity.
    #[error("annotation {key}: invalid quantity {value:?}")]
    NoQuantity {
        /// Annotation key.
        key: &'static str,
        /// Annotation value.
        value: String,
    },
}

/// Reads the limits from a pod's annotations.
///
/// # Errors
/// A limit is invalid.
pub fn of(annotations: &BTreeMap<String, String>) -> Result<Bandwidth, BandwidthError> {
    let read = |key: &'static str| {
        let Some(value) = annotations.get(key) else { return Ok(None) };
        let bits = quantity(value).ok_or_else(|| BandwidthError::NoQuantity { key, value: value.clone() })?;
        match bits {
            bits if bits < BOUNDS.0 => Err(BandwidthError::Small),
            bits if bits > BOUNDS.1 => Err(BandwidthError::Large),
            bits => Ok(u64::try_from(bits).ok()),
        }
    };
    Ok(Bandwidth { ingress: read(INGRESS)?, egress: read(EGRESS)? })
}

/// Parses a Kubernetes quantity to whole units, rounded up; `None` if malformed. Negative values become 0.
fn quantity(text: &str) -> Option<u128> {
    let (digits, negative) = match text.strip_prefix('-') {
        Some(rest) => (rest, true),
        None => (text.strip_prefix('+').unwrap_or(text), false),
    };
    let end = digits.find(|c: char| !c.is_ascii_digit() && c != '.').unwrap_or(digits.len());
    let (number, suffix) = digits.split_at(end);
    let (whole, fraction) = number.split_once('.').unwrap_or((number, ""));
    if (whole.is_empty() && fraction.is_empty()) || fraction.contains('.') || number.len() > 30 {
        return None;
    }
    let (multiplier, divisor) = scale(suffix)?;
    let value: u128 = format!("{whole}{fraction}").parse().ok()?;
    let divisor = 10_u128.checked_pow(u32::try_from(fraction.len()).ok()?)?.checked_mul(divisor)?;
    // A value that overflows exceeds every bound.
    let scaled = value.checked_mul(multiplier).map_or(u128::MAX, |v| v.div_ceil(divisor));
    Some(if negative { 0 } else { scaled })
}

/// Multiplier and divisor of a quantity suffix.
fn scale(suffix: &str) -> Option<(u128, u128)> {
    let binary = ["", "Ki", "Mi", "Gi", "Ti", "Pi", "Ei"];
    let decimal = ["", "k", "M", "G", "T", "P", "E"];
    let place = |list: &[&str]| list.iter().position(|s| *s == suffix).and_then(|n| u32::try_from(n).ok());
    if let Some(power) = place(&decimal) {
        return Some((1_000_u128.pow(power), 1));
    }
    if let Some(power) = place(&binary) {
        return Some((1_u128 << (10 * power), 1));
    }
    if let Some(power) = place(&["", "m", "u", "n"]) {
        return Some((1, 1_000_u128.pow(power)));
    }
    let exponent: i32 = suffix.strip_prefix(['e', 'E'])?.parse().ok().filter(|e: &i32| e.abs() <= 18)?;
    let power = 10_u128.pow(exponent.unsigned_abs());
    Some(if exponent < 0 { (1, power) } else { (power, 1) })
}

/// The token bucket for a link with this MTU and a rate in bits per second.
pub fn bucket(bits: u64, mtu: u32) -> TokenBucket {
    const LATENCY_MS: u64 = 25;
    let rate = (bits / 8).max(1);
    let burst = (rate / 100).max(u64::from(mtu) * 4).min(u64::from(u32::MAX / 2));
    let waiting = rate.saturating_mul(LATENCY_MS) / 1_000;
    let limit = u32::try_from(burst.saturating_add(waiting)).unwrap_or(u32::MAX);
    TokenBucket { rate, burst: u32::try_from(burst).unwrap_or(u32::MAX), limit }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn egress(value: &str) -> Result<Option<u64>, String> {
        let annotations = BTreeMap::from([(EGRESS.to_owned(), value.to_owned())]);
        of(&annotations).map(|b| b.egress).map_err(|e| e.to_string())
    }

    #[test]
    fn annotations_are_quantities() {
        for (value, bits) in [
            ("1M", 1_000_000),
            ("10Mi", 10_485_760),
            ("1k", 1_000),
            ("1.5k", 1_500),
            ("1P", 1_000_000_000_000_000),
            ("1e6", 1_000_000),
            ("5000000m", 5_000),
        ] {
            assert_eq!(egress(value), Ok(Some(bits)), "{value}");
        }
        for (value, text) in [
            ("999", "resource is unreasonably small (< 1kbit)"),
            ("0", "resource is unreasonably small (< 1kbit)"),
            ("-1M", "resource is unreasonably small (< 1kbit)"),
            ("2P", "resource is unreasonably large (> 1Pbit)"),
            ("999999999999999E", "resource is unreasonably large (> 1Pbit)"),
            ("fast", "annotation kubernetes.io/egress-bandwidth: invalid quantity \"fast\""),
            ("", "annotation kubernetes.io/egress-bandwidth: invalid quantity \"\""),
            ("1.2.3M", "annotation kubernetes.io/egress-bandwidth: invalid quantity \"1.2.3M\""),
        ] {
            assert_eq!(egress(value), Err(text.to_owned()), "{value}");
        }
        assert_eq!(of(&BTreeMap::new()), Ok(Bandwidth::default()));
    }

    #[test]
    fn buckets_hold_a_hundredth_of_a_second() {
        assert_eq!(bucket(1_000_000, 1_500), TokenBucket { rate: 125_000, burst: 6_000, limit: 9_125 });
        let fast = bucket(1_000_000_000_000_000, 9_000);
        assert_eq!((fast.rate, fast.burst, fast.limit), (125_000_000_000_000, 1_250_000_000 + 897_483_647, u32::MAX));
    }
}
