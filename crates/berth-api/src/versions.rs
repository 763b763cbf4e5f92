//! Comparison of resource versions. Pure.
//!
//! Implements spec 10 §3.

/// Whether resource version `a` is older than `b`: both are compared as numbers, by length and then by digits; a
/// version that is no number counts as not older.
pub fn is_older(a: &str, b: &str) -> bool {
    let is_number = |text: &str| !text.is_empty() && text.bytes().all(|byte| byte.is_ascii_digit());
    is_number(a) && is_number(b) && (a.len(), a) < (b.len(), b)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn versions_count_up() {
        for (a, b, older) in
            [("9", "10", true), ("10", "9", false), ("10", "10", false), ("", "1", false), ("x", "y", false)]
        {
            assert_eq!(is_older(a, b), older, "{a} {b}");
        }
    }
}
