//! Resource quantities: parsing and canonical form. Pure.

use serde_json::Value;

/// Value of each suffix, in billionths.
const UNITS: &[(&str, i128)] = &[
    ("E", 1_000_000_000_000_000_000_000_000_000),
    ("P", 1_000_000_000_000_000_000_000_000),
    ("T", 1_000_000_000_000_000_000_000),
    ("G", 1_000_000_000_000_000_000),
    ("M", 1_000_000_000_000_000),
    ("k", 1_000_000_000_000),
    ("", 1_000_000_000),
    ("m", 1_000_000),
    ("u", 1_000),
    ("n", 1),
];
const BINARY: &[(&str, i128)] = &[
    ("Ei", 1_000_000_000 << 60),
    ("Pi", 1_000_000_000 << 50),
    ("Ti", 1_000_000_000 << 40),
    ("Gi", 1_000_000_000 << 30),
    ("Mi", 1_000_000_000 << 20),
    ("Ki", 1_000_000_000 << 10),
];

/// Parses a quantity, in billionths of its unit; `None` if it is malformed.
pub fn quantity(value: &Value) -> Option<i128> {
    let text = match value {
        Value::String(text) => text.clone(),
        Value::Number(number) => number.to_string(),
        _ => return None,
    };
    let (digits, suffix) = split(&text);
    let unit = match UNITS.iter().chain(BINARY).find(|(name, _)| *name == suffix) {
        Some((_, unit)) => *unit,
        None => 10_i128.checked_pow(suffix.strip_prefix(['e', 'E'])?.parse().ok()?)?.checked_mul(1_000_000_000)?,
    };
    let (whole, fraction) = digits.split_once('.').unwrap_or((digits, ""));
    let scale = 10_i128.checked_pow(u32::try_from(fraction.len()).ok()?)?;
    let parsed: i128 = format!("{whole}{fraction}").parse().ok()?;
    Some(parsed.checked_mul(unit)? / scale)
}

fn split(text: &str) -> (&str, &str) {
    let at = text.find(|c: char| !(c.is_ascii_digit() || "+-.".contains(c))).unwrap_or(text.len());
    text.split_at(at)
}

/// Canonical form of a quantity: the largest unit that needs no fraction. Exponents stay as they are.
pub fn canonical(value: &Value) -> Option<String> {
    let amount = quantity(value)?;
    let text = value.as_str().map_or_else(|| value.to_string(), str::to_owned);
    let suffix = split(&text).1;
    if amount == 0 || suffix.starts_with(['e']) || suffix.starts_with('E') && suffix.len() > 2 {
        return Some(if amount == 0 { "0".to_owned() } else { text });
    }
    let fits = |(_, unit): &&(&str, i128)| amount % unit == 0;
    let found = match suffix.ends_with('i') {
        true => BINARY.iter().find(fits).or_else(|| UNITS.iter().skip(6).find(fits)),
        false => UNITS.iter().find(fits),
    };
    found.map(|(name, unit)| format!("{}{name}", amount / unit))
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn quantities_are_numbers() {
        for (text, nano) in [
            ("1", 1_000_000_000),
            ("100m", 100_000_000),
            ("0.5", 500_000_000),
            ("1e3", 1_000_000_000_000),
            ("1Ki", 1_024_000_000_000),
        ] {
            assert_eq!(quantity(&json!(text)), Some(nano), "{text}");
        }
        assert_eq!(quantity(&json!("x")), None);
        assert_eq!(quantity(&json!("1Q")), None);
    }

    #[test]
    fn each_quantity_has_one_text() {
        for (value, expected) in [
            (json!("1000m"), "1"),
            (json!("1.5"), "1500m"),
            (json!("1000"), "1k"),
            (json!(2), "2"),
            (json!("1024Mi"), "1Gi"),
            (json!("0.5Gi"), "512Mi"),
            (json!("1500Ki"), "1500Ki"),
            (json!("0.5Ki"), "512"),
            (json!("0m"), "0"),
            (json!("1e3"), "1e3"),
            (json!("100M"), "100M"),
            (json!("-1500m"), "-1500m"),
        ] {
            assert_eq!(canonical(&value).as_deref(), Some(expected), "{value}");
        }
    }
}
