//! YAML 1.1 parsing options and number conversion, like the reference (`sigs.k8s.io/yaml`). Pure.

use serde_json::Value;
use serde_saphyr::{
    Options,
    options::{DuplicateKeyPolicy, NonFiniteFloatPolicy},
};

/// Maximum number of values in a document, keys not counted. A pod or a configuration has hundreds.
pub const MAX_VALUES: usize = 200_000;

/// Lower bound of floats that JSON writes with an exponent.
const EXPONENT_FROM: f64 = 1e21;

/// Parser options: `0110` is octal, alias bombs and deep nesting are rejected.
pub fn options(duplicate_keys: DuplicateKeyPolicy) -> Options {
    serde_saphyr::options! {
        budget: serde_saphyr::budget! { max_documents: 64, max_depth: 64, max_nodes: MAX_VALUES },
        duplicate_keys: duplicate_keys,
        legacy_octal_numbers: true,
        non_finite_float_policy: NonFiniteFloatPolicy::Reject,
        with_snippet: false,
    }
}

/// Converts whole floats (`1e+06`, `4096.0`) to integers: the reference's JSON writes them without a decimal point.
pub fn whole_floats_to_integers(value: &mut Value) {
    match value {
        Value::Object(members) => members.values_mut().for_each(whole_floats_to_integers),
        Value::Array(items) => items.iter_mut().for_each(whole_floats_to_integers),
        Value::Number(number) => {
            let float = number.as_f64().filter(|float| float.fract() == 0.0 && float.abs() < EXPONENT_FROM);
            if let Some(float) = float.filter(|_| number.is_f64())
                && let Ok(whole) = format!("{float:.0}").parse::<i64>()
            {
                *number = whole.into();
            }
        }
        Value::Null | Value::Bool(_) | Value::String(_) => {}
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn numbers_are_read_as_gos_reader_does() {
        for (text, expected) in [
            ("1", json!(1)),
            ("1.0", json!(1)),
            ("1e0", json!(1)),
            ("1e+06", json!(1_000_000)),
            ("-4096.0", json!(-4096)),
            ("1.5", json!(1.5)),
            ("1e19", json!(1e19)),
            ("0400", json!(0o400)),
            ("0o400", json!(0o400)),
            ("0x100", json!(0x100)),
            ("0110", json!(72)),
            ("0089", json!(89)),
            ("\"1.0\"", json!("1.0")),
            ("[2.0, {a: 3.0}]", json!([2, {"a": 3}])),
        ] {
            let read = serde_saphyr::from_str_with_options(text, options(DuplicateKeyPolicy::Error));
            let mut value: Value = read.expect(text);
            whole_floats_to_integers(&mut value);
            assert_eq!(value, expected, "{text}");
        }
        for text in [".inf", ".nan", "1e400"] {
            let read = serde_saphyr::from_str_with_options::<Value>(text, options(DuplicateKeyPolicy::Error));
            assert!(read.is_err(), "{text}");
        }
    }
}
