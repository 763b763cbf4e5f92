//! Parser that looks up one key of an env file (`valueFrom.fileKeyRef`). Pure.
//! Implements spec 02b §10.5.
//!
//! The format is a strict subset of shell syntax: `KEY='value'`, literal between the quotes, possibly over several
//! lines. Parsing stops at the requested key, so errors after it go unnoticed.

/// Syntax error of an env file, with its line; the first line is 1.
#[derive(Clone, Copy, PartialEq, Eq, Debug, thiserror::Error)]
#[error("line {line}: {fault}")]
pub struct EnvFileError {
    /// Line in which the faulty entry begins, or which contains its closing quote.
    pub line: usize,
    /// The syntax error.
    pub fault: EnvFileFault,
}

/// Syntax error of an entry.
#[derive(Clone, Copy, PartialEq, Eq, Debug, thiserror::Error)]
pub enum EnvFileFault {
    /// The `=` is missing.
    #[error("missing '='")]
    NoEquals,
    /// The name before the `=` is empty.
    #[error("empty variable name")]
    NoName,
    /// A blank precedes the `=`.
    #[error("whitespace before '=' is not allowed")]
    BlankBeforeEquals,
    /// The value does not start with a single quote.
    #[error("value must be enclosed in single quotes")]
    Unquoted,
    /// The closing quote is followed by something other than a comment.
    #[error("unexpected content after closing quote")]
    TextAfterQuote,
    /// The closing quote is missing.
    #[error("unclosed single quote")]
    Unclosed,
}

const BLANKS: [char; 2] = [' ', '\t'];

/// Returns the value of `key`; `None` if the file lacks the key, `Some("")` if its value is empty.
///
/// # Errors
/// The first syntax error before the key.
pub fn lookup(text: &str, key: &str) -> Result<Option<String>, EnvFileError> {
    let mut lines = text.lines().enumerate().map(|(i, line)| (i + 1, line));
    while let Some((number, line)) = lines.next() {
        let line = line.trim_start_matches(BLANKS);
        if line.is_empty() || line.starts_with('#') {
            continue;
        }
        let fault = |fault| EnvFileError { line: number, fault };
        let (name, value) = line.split_once('=').ok_or(fault(EnvFileFault::NoEquals))?;
        if name.trim_end_matches(BLANKS).is_empty() {
            return Err(fault(EnvFileFault::NoName));
        }
        if name.ends_with(BLANKS) {
            return Err(fault(EnvFileFault::BlankBeforeEquals));
        }
        let value = if value.starts_with(BLANKS) {
            // As in a shell: an empty assignment; the rest of the line is not part of it.
            String::new()
        } else {
            let open = value.strip_prefix('\'').ok_or(fault(EnvFileFault::Unquoted))?;
            quoted(open, number, &mut lines)?
        };
        if name == key {
            return Ok(Some(value));
        }
    }
    Ok(None)
}

/// Reads the text up to the closing quote, which may be in a later line.
fn quoted<'a>(
    first: &'a str,
    number: usize,
    lines: &mut impl Iterator<Item = (usize, &'a str)>,
) -> Result<String, EnvFileError> {
    let mut value = String::new();
    let (mut at, mut rest) = (number, first);
    loop {
        if let Some((inside, after)) = rest.split_once('\'') {
            value.push_str(inside);
            let after = after.trim_start_matches(BLANKS);
            if after.is_empty() || after.starts_with('#') {
                return Ok(value);
            }
            return Err(EnvFileError { line: at, fault: EnvFileFault::TextAfterQuote });
        }
        value.push_str(rest);
        value.push('\n');
        (at, rest) = lines.next().ok_or(EnvFileError { line: number, fault: EnvFileFault::Unclosed })?;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn values_are_literal_between_single_quotes() {
        let file = "# a comment\n\n  A='x y' # why\nB='$(A) \\n \"'\nC= 'x'\nD='one\n two # in\n'\t\nE=''\n";
        for (key, value) in [
            ("A", Some("x y")),
            ("B", Some("$(A) \\n \"")),
            ("C", Some("")),
            ("D", Some("one\n two # in\n")),
            ("E", Some("")),
            ("F", None),
        ] {
            assert_eq!(lookup(file, key), Ok(value.map(str::to_owned)), "{key}");
        }
    }

    #[test]
    fn faults_name_their_line() {
        use EnvFileFault::*;
        for (file, line, fault) in [
            ("\nA", 2, NoEquals),
            ("A ='x'", 1, BlankBeforeEquals),
            ("='x'", 1, NoName),
            ("  ='x'", 1, NoName),
            ("A=x", 1, Unquoted),
            ("A=", 1, Unquoted),
            ("A=\"x\"", 1, Unquoted),
            ("A='x\ny' z", 2, TextAfterQuote),
            ("A='x''y'", 1, TextAfterQuote),
            ("B='1'\nA='x\ny", 2, Unclosed),
        ] {
            assert_eq!(lookup(file, "wanted"), Err(EnvFileError { line, fault }), "{file:?}");
        }
        let text = EnvFileError { line: 3, fault: Unquoted }.to_string();
        assert_eq!(text, "line 3: value must be enclosed in single quotes");
    }

    #[test]
    fn what_follows_the_wanted_key_is_not_read() {
        assert_eq!(lookup("A='1'\nnonsense", "A"), Ok(Some("1".to_owned())));
    }
}
