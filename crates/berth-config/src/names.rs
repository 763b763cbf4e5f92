//! Validation of label keys and values, with the reference's error texts. Pure.

const QUALIFIED: &str = "must consist of alphanumeric characters, '-', '_' or '.', and must start and end with an alphanumeric character (e.g. 'MyName',  or 'my.name',  or '123-abc', regex used for validation is '([A-Za-z0-9][-A-Za-z0-9_.]*)?[A-Za-z0-9]')";
const VALUE: &str = "a valid label must be an empty string or consist of alphanumeric characters, '-', '_' or '.', and must start and end with an alphanumeric character (e.g. 'MyValue',  or 'my_value',  or '12345', regex used for validation is '(([A-Za-z0-9][-A-Za-z0-9_.]*)?[A-Za-z0-9])?')";
const SUBDOMAIN: &str = "a lowercase RFC 1123 subdomain must consist of lower case alphanumeric characters, '-' or '.', and must start and end with an alphanumeric character (e.g. 'example.com', regex used for validation is '[a-z0-9]([-a-z0-9]*[a-z0-9])?(\\.[a-z0-9]([-a-z0-9]*[a-z0-9])?)*')";

fn is_word(text: &str) -> bool {
    let edge = |b: Option<u8>| b.is_some_and(|b| b.is_ascii_alphanumeric());
    edge(text.bytes().next())
        && edge(text.bytes().next_back())
        && text.bytes().all(|b| b.is_ascii_alphanumeric() || matches!(b, b'-' | b'_' | b'.'))
}

/// Returns why `text` is not a DNS subdomain; empty if it is one.
pub fn subdomain(text: &str) -> Vec<String> {
    let mut reasons = Vec::new();
    if text.len() > 253 {
        reasons.push("must be no more than 253 bytes".to_owned());
    }
    let part =
        |part: &str| is_word(part) && part.bytes().all(|b| b.is_ascii_lowercase() || b.is_ascii_digit() || b == b'-');
    if !text.split('.').all(part) {
        reasons.push(SUBDOMAIN.to_owned());
    }
    reasons
}

/// Returns why `text` is not a label key; empty if it is one.
pub fn qualified_name(text: &str) -> Vec<String> {
    let mut reasons = Vec::new();
    let name = match text.split('/').collect::<Vec<_>>()[..] {
        [name] => name,
        [prefix, name] => {
            if prefix.is_empty() {
                reasons.push("prefix part must be non-empty".to_owned());
            } else {
                reasons.extend(subdomain(prefix).into_iter().map(|reason| format!("prefix part {reason}")));
            }
            name
        }
        _ => {
            return vec![format!(
                "a qualified name {QUALIFIED} with an optional DNS subdomain prefix and '/' (e.g. 'example.com/MyName')"
            )];
        }
    };
    if name.is_empty() {
        reasons.push("name part must be non-empty".to_owned());
    } else if name.len() > 63 {
        reasons.push("name part must be no more than 63 bytes".to_owned());
    }
    if !is_word(name) {
        reasons.push(format!("name part {QUALIFIED}"));
    }
    reasons
}

/// Returns why `text` is not a label value; empty if it is one.
pub fn label_value(text: &str) -> Vec<String> {
    let mut reasons = Vec::new();
    if text.len() > 63 {
        reasons.push("must be no more than 63 bytes".to_owned());
    }
    if !text.is_empty() && !is_word(text) {
        reasons.push(VALUE.to_owned());
    }
    reasons
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn invalid_keys_and_values_are_rejected() {
        let long = "x".repeat(64);
        for (text, good) in [
            ("a", true),
            ("a.b/c_d", true),
            ("", false),
            ("/a", false),
            ("a/", false),
            ("a/b/c", false),
            ("-a", false),
            ("A.b/c", false),
            ("a b", false),
            (long.as_str(), false),
        ] {
            assert_eq!(qualified_name(text).is_empty(), good, "{text:?}");
        }
        for (text, good) in [("", true), ("a_b", true), ("a/b", false), ("-", false), (long.as_str(), false)] {
            assert_eq!(label_value(text).is_empty(), good, "{text:?}");
        }
    }
}
