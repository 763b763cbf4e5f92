//! Container runtime version, as reported in the node status. Pure.

/// Formats `<name>://<version>`: a semantic version in full, of others the leading numbers (Debian's `1.6.20~ds1` is
/// `1.6.20`), as `k8s.io/apimachinery/pkg/util/version` parses them. Empty if it is not a version.
pub fn runtime_version(name: &str, version: &str) -> String {
    parsed(version).map(|version| format!("{name}://{version}")).unwrap_or_default()
}

fn parsed(text: &str) -> Option<&str> {
    let text = text.trim();
    let text = text.strip_prefix('v').unwrap_or(text);
    let end = text.find(|c: char| !(c.is_ascii_digit() || c == '.')).unwrap_or(text.len());
    let (numbers, rest) = text.split_at(end);
    // A dot that is not followed by a number ends the version.
    let trimmed = numbers.trim_end_matches('.');
    let (numbers, rest) = if trimmed.len() < numbers.len() { (trimmed, "") } else { (numbers, rest) };
    let is_number = |part: &str| part == "0" || !(part.is_empty() || part.starts_with('0'));
    let mut parts = numbers.split('.');
    let count = parts.clone().count();
    if !parts.all(is_number) || count < 2 {
        return None;
    }
    let is_semantic = count == 3 && is_suffix(rest);
    Some(if is_semantic { text } else { numbers })
}

/// Whether the rest is a pre-release, build metadata, both, or empty.
fn is_suffix(rest: &str) -> bool {
    let are_names = |text: &str| {
        let is_name = |name: &str| !name.is_empty() && name.bytes().all(|b| b.is_ascii_alphanumeric() || b == b'-');
        text.split('.').all(is_name)
    };
    let (pre, build) = match rest.split_once('+') {
        Some((pre, build)) => (pre, Some(build)),
        None => (rest, None),
    };
    let is_pre = pre.is_empty() || pre.strip_prefix('-').is_some_and(are_names);
    is_pre && build.is_none_or(are_names)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn versions_are_parsed_as_kubelet_parses_them() {
        for (raw, expected) in [
            ("1.6.20~ds1", "1.6.20"),
            ("v1.7.0", "1.7.0"),
            ("1.7.0-rc.1", "1.7.0-rc.1"),
            ("2.1.0+unknown", "2.1.0+unknown"),
            ("2.1.0-beta+k3s1", "2.1.0-beta+k3s1"),
            ("1.30", "1.30"),
            ("1.2.3.4-x", "1.2.3.4"),
            ("1.2.", "1.2"),
            ("7", ""),
            ("01.2.3", ""),
            ("1..2", ""),
            ("main", ""),
            ("", ""),
        ] {
            let expected = if expected.is_empty() { String::new() } else { format!("containerd://{expected}") };
            assert_eq!(runtime_version("containerd", raw), expected, "{raw}");
        }
    }
}
