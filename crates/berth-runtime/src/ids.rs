//! IDs of sandboxes, containers, and executed processes; lookup by unique prefix.
//!
//! Implements spec 09a §1.

use std::collections::BTreeMap;

use super::errors::RuntimeError;

/// Length of an ID, hexadecimal digits.
const DIGITS: usize = 64;

/// Generates an ID: 32 random bytes as 64 lowercase hexadecimal digits.
pub fn new_id() -> String {
    let bytes: [u8; DIGITS / 2] = rand::random();
    hex::encode(bytes)
}

/// The item with this ID or unique ID prefix; `None` if there is none.
///
/// # Errors
/// The prefix is empty or ambiguous.
pub fn find<'a, T>(all: &'a BTreeMap<String, T>, prefix: &str) -> Result<Option<&'a T>, RuntimeError> {
    if prefix.is_empty() {
        return Err(RuntimeError::invalid("an ID must not be empty"));
    }
    if let Some(exact) = all.get(prefix) {
        return Ok(Some(exact));
    }
    let mut with = all.range(prefix.to_owned()..).take_while(|(id, _)| id.starts_with(prefix));
    match (with.next(), with.next()) {
        (Some((_, one)), None) => Ok(Some(one)),
        (None, _) => Ok(None),
        (Some(_), Some(_)) => Err(RuntimeError::invalid(format!("multiple IDs found with provided prefix: {prefix}"))),
    }
}

/// Whether the text is an ID of the runtime; other files in a directory of objects are not.
pub fn is_id(text: &str) -> bool {
    text.len() == DIGITS && text.bytes().all(|b| b.is_ascii_digit() || (b'a'..=b'f').contains(&b))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn identities_differ_and_are_hexadecimal() {
        let (one, other) = (new_id(), new_id());
        assert!(is_id(&one) && is_id(&other) && one != other, "{one} {other}");
        assert!(!is_id("short") && !is_id(&"G".repeat(64)) && !is_id(&"A".repeat(64)));
    }

    #[test]
    fn beginnings_stand_for_what_only_one_has() {
        let all: BTreeMap<String, u8> = [("ab12".to_owned(), 1), ("ab34".to_owned(), 2), ("ab".to_owned(), 3)].into();
        let found = |prefix: &str| find(&all, prefix).map(|one| one.copied()).map_err(|e| e.to_string());
        assert_eq!(found("ab1"), Ok(Some(1)));
        assert_eq!(found("ab"), Ok(Some(3)), "a whole name wins over beginnings");
        assert_eq!(found("x"), Ok(None));
        assert_eq!(found("a"), Err("multiple IDs found with provided prefix: a".to_owned()));
        assert_eq!(found(""), Err("an ID must not be empty".to_owned()));
    }
}
