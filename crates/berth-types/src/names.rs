//! Validation of Kubernetes names (DNS labels, qualified names, label values, ports). Pure.
//!
//! Each check returns the validation errors; an empty list means that the name is valid. The texts are those of the
//! reference (`k8s.io/apimachinery/pkg/api/validate/content`).

const LABEL_FORMAT: &str = "[a-z0-9]([-a-z0-9]*[a-z0-9])?";
const LABEL_RULE: &str = "a lowercase RFC 1123 label must consist of lower case alphanumeric characters or '-', and must \
                          start and end with an alphanumeric character";
const SUBDOMAIN_FORMAT: &str = "[a-z0-9]([-a-z0-9]*[a-z0-9])?(\\.[a-z0-9]([-a-z0-9]*[a-z0-9])?)*";
const SUBDOMAIN_RULE: &str = "a lowercase RFC 1123 subdomain must consist of lower case alphanumeric characters, '-' or \
                              '.', and must start and end with an alphanumeric character";
const QUALIFIED_FORMAT: &str = "([A-Za-z0-9][-A-Za-z0-9_.]*)?[A-Za-z0-9]";
const QUALIFIED_RULE: &str =
    "must consist of alphanumeric characters, '-', '_' or '.', and must start and end with an alphanumeric character";
const LABEL_VALUE_FORMAT: &str = "(([A-Za-z0-9][-A-Za-z0-9_.]*)?[A-Za-z0-9])?";
const LABEL_VALUE_RULE: &str = "a valid label must be an empty string or consist of alphanumeric characters, '-', '_' or \
                                '.', and must start and end with an alphanumeric character";

/// Maximum length of a DNS label, bytes.
pub const LABEL_MAX: usize = 63;
/// Maximum length of a DNS subdomain, bytes.
pub const SUBDOMAIN_MAX: usize = 253;

/// Validates a DNS-1123 label: container, volume, and namespace names.
pub fn dns_label(text: &str) -> Vec<String> {
    let mut complaints = too_long(text, LABEL_MAX);
    if !is_label(text) {
        complaints.push(if is_subdomain(text) {
            "must not contain dots".to_owned()
        } else {
            regex_complaint(LABEL_RULE, LABEL_FORMAT, &["my-name", "123-abc"])
        });
    }
    complaints
}

/// Validates a DNS-1123 subdomain: pod names.
pub fn dns_subdomain(text: &str) -> Vec<String> {
    let mut complaints = too_long(text, SUBDOMAIN_MAX);
    if !is_subdomain(text) {
        complaints.push(regex_complaint(SUBDOMAIN_RULE, SUBDOMAIN_FORMAT, &["example.com"]));
    }
    complaints
}

/// Validates a qualified name: keys of labels and annotations (the caller lowercases the latter).
pub fn qualified_name(text: &str) -> Vec<String> {
    let mut complaints = Vec::new();
    let name = match text.split_once('/') {
        None => text,
        Some((_, name)) if name.contains('/') => {
            let rule = regex_complaint(QUALIFIED_RULE, QUALIFIED_FORMAT, &["MyName", "my.name", "123-abc"]);
            return vec![format!(
                "a qualified name {rule} with an optional DNS subdomain prefix and '/' (e.g. 'example.com/MyName')"
            )];
        }
        Some(("", name)) => {
            complaints.push("prefix part must be non-empty".to_owned());
            name
        }
        Some((prefix, name)) => {
            complaints.extend(dns_subdomain(prefix).into_iter().map(|c| format!("prefix part {c}")));
            name
        }
    };
    if name.is_empty() {
        complaints.push("name part must be non-empty".to_owned());
    }
    complaints.extend(too_long(name, LABEL_MAX).into_iter().map(|c| format!("name part {c}")));
    if !is_qualified_part(name) {
        let rule = regex_complaint(QUALIFIED_RULE, QUALIFIED_FORMAT, &["MyName", "my.name", "123-abc"]);
        complaints.push(format!("name part {rule}"));
    }
    complaints
}

/// Validates a label value.
pub fn label_value(text: &str) -> Vec<String> {
    let mut complaints = too_long(text, LABEL_MAX);
    if !(text.is_empty() || is_qualified_part(text)) {
        complaints.push(regex_complaint(LABEL_VALUE_RULE, LABEL_VALUE_FORMAT, &["MyValue", "my_value", "12345"]));
    }
    complaints
}

/// Validates an environment variable name (relaxed rule: printable ASCII without `=`).
pub fn env_name(text: &str) -> Vec<String> {
    if text.is_empty() {
        return vec!["environment variable name must be non-empty".to_owned()];
    }
    if text.bytes().all(|b| (b' '..=b'~').contains(&b) && b != b'=') {
        return Vec::new();
    }
    vec!["a valid environment variable name must consist only of printable ASCII characters other than '='".to_owned()]
}

/// Validates a port name (IANA service name).
pub fn port_name(text: &str) -> Vec<String> {
    let mut complaints = too_long(text, 15);
    if text.is_empty() || !text.bytes().all(|b| b.is_ascii_lowercase() || b.is_ascii_digit() || b == b'-') {
        complaints.push("must contain only alpha-numeric characters (a-z, 0-9), and hyphens (-)".to_owned());
    }
    if !text.bytes().any(|b| b.is_ascii_lowercase()) {
        complaints.push("must contain at least one letter (a-z)".to_owned());
    }
    if text.contains("--") {
        complaints.push("must not contain consecutive hyphens".to_owned());
    }
    if text.starts_with('-') || text.ends_with('-') {
        complaints.push("must not begin or end with a hyphen".to_owned());
    }
    complaints
}

fn too_long(text: &str, limit: usize) -> Vec<String> {
    if text.len() > limit { vec![format!("must be no more than {limit} bytes")] } else { Vec::new() }
}

fn is_label(text: &str) -> bool {
    let alphanumeric = |b: u8| b.is_ascii_lowercase() || b.is_ascii_digit();
    bounded_by(text, alphanumeric) && text.bytes().all(|b| alphanumeric(b) || b == b'-')
}

fn is_subdomain(text: &str) -> bool {
    text.split('.').all(is_label)
}

fn is_qualified_part(text: &str) -> bool {
    bounded_by(text, |b| b.is_ascii_alphanumeric())
        && text.bytes().all(|b| b.is_ascii_alphanumeric() || matches!(b, b'-' | b'_' | b'.'))
}

fn bounded_by(text: &str, good: impl Fn(u8) -> bool) -> bool {
    let bytes = text.as_bytes();
    matches!((bytes.first(), bytes.last()), (Some(&first), Some(&last)) if good(first) && good(last))
}

fn regex_complaint(rule: &str, format: &str, examples: &[&str]) -> String {
    let examples: Vec<String> = examples.iter().map(|e| format!("'{e}', ")).collect();
    format!("{rule} (e.g. {}regex used for validation is '{format}')", examples.join(" or "))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn good_names_have_no_complaints() {
        for name in ["a", "web-1", "0", "a".repeat(63).as_str()] {
            assert_eq!(dns_label(name), Vec::<String>::new(), "{name}");
        }
        assert_eq!(dns_subdomain("a.b-c.d0"), Vec::<String>::new());
        for name in ["MyName", "example.com/MyName", "a_b.c"] {
            assert_eq!(qualified_name(name), Vec::<String>::new(), "{name}");
        }
        assert_eq!(env_name("my.name 1"), Vec::<String>::new());
        assert_eq!(port_name("http-8080"), Vec::<String>::new());
        assert_eq!(label_value(""), Vec::<String>::new());
    }

    #[test]
    fn invalid_names_have_the_reference_texts() {
        assert_eq!(
            dns_label("Web"),
            ["a lowercase RFC 1123 label must consist of lower case alphanumeric characters or '-', and must start \
                 and end with an alphanumeric character (e.g. 'my-name',  or '123-abc', regex used for validation is \
                 '[a-z0-9]([-a-z0-9]*[a-z0-9])?')"]
        );
        assert_eq!(dns_label("a.b"), ["must not contain dots"]);
        for bad in ["", "-a", "a-", "a..b", "ä"] {
            assert_eq!(dns_subdomain(bad).len(), 1, "{bad}");
        }
        assert_eq!(dns_subdomain(&"a".repeat(254)), ["must be no more than 253 bytes"]);
        assert_eq!(qualified_name("a/b/c").len(), 1);
        assert_eq!(qualified_name("/b"), ["prefix part must be non-empty"]);
        assert_eq!(qualified_name("").len(), 2);
        assert_eq!(env_name("A=B").len(), 1);
        assert_eq!(port_name("80"), ["must contain at least one letter (a-z)"]);
        assert_eq!(port_name("a--b-").len(), 2);
        assert_eq!(label_value("a b").len(), 1);
    }
}
