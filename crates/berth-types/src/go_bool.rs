//! Booleans in the grammar of Go's `strconv.ParseBool`. Pure. Spec 01 §2.2, 06b §1.2.

/// Parses `1`, `t`, `T`, `true`, `TRUE`, `True`, and their opposites; `None` for any other text.
pub fn parse(text: &str) -> Option<bool> {
    match text {
        "1" | "t" | "T" | "true" | "TRUE" | "True" => Some(true),
        "0" | "f" | "F" | "false" | "FALSE" | "False" => Some(false),
        _ => None,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_the_spellings_of_go_are_booleans() {
        for (texts, expected) in [
            (&["1", "t", "T", "true", "TRUE", "True"][..], Some(true)),
            (&["0", "f", "F", "false", "FALSE", "False"], Some(false)),
            (&["", "yes", "on", "tRUE", "2", " true", "true\n", "01"], None),
        ] {
            for text in texts {
                assert_eq!(parse(text), expected, "{text:?}");
            }
        }
    }
}
