//! Expansion of `$(NAME)` references in commands, arguments, environment, and subpaths. Pure.
//! Implements spec 02b §10.3.

use std::collections::{BTreeSet, HashMap};

/// Maximum number of bytes that references may add to one text: no kernel accepts a longer argument or variable
/// (`MAX_ARG_STRLEN`), and variables that double each other could exhaust the node's memory.
pub const LONGEST: usize = 128 << 10;
/// Maximum size of an environment or command line, bytes: no runtime accepts a longer message.
pub const LONGEST_LIST: usize = 16 << 20;

/// The expansion of references exceeds a size limit.
#[derive(Clone, Copy, PartialEq, Eq, Debug, thiserror::Error)]
#[error("argument list too long: references to variables expand to more than {limit} bytes")]
pub struct TooLong {
    /// The limit, bytes.
    pub limit: usize,
}

/// Replaces each `$(NAME)` that `lookup` resolves. Unresolved references remain, `$$` becomes `$`, and an unclosed
/// `$(` or any other `$x` remains. One pass, no recursion.
///
/// # Errors
/// The inserted values exceed [`LONGEST`] bytes.
pub fn expand<'v>(text: &str, lookup: impl Fn(&str) -> Option<&'v str>) -> Result<String, TooLong> {
    let mut out = String::with_capacity(text.len());
    let mut rest = text;
    let mut added = 0_usize;
    // Cleared once no `)` is left: otherwise each of many open references would scan to the end.
    let mut may_close = true;
    while let Some(at) = rest.find('$') {
        let (before, found) = rest.split_at(at);
        out.push_str(before);
        let after = found.strip_prefix('$').unwrap_or_default();
        let open = after.strip_prefix('(').filter(|_| may_close);
        let closed = open.and_then(|open| open.split_once(')'));
        may_close = may_close && (open.is_none() || closed.is_some());
        rest = if let Some(more) = after.strip_prefix('$') {
            out.push('$');
            more
        } else if let Some((name, more)) = closed {
            match lookup(name) {
                Some(value) => {
                    added = added.saturating_add(value.len());
                    out.push_str(Some(value).filter(|_| added <= LONGEST).ok_or(TooLong { limit: LONGEST })?);
                }
                None => out.extend(["$(", name, ")"]),
            }
            more
        } else {
            out.push('$');
            after
        };
    }
    out.push_str(rest);
    Ok(out)
}

/// The complete environment against which texts are expanded; of equal names the last one counts.
#[derive(Clone, Debug, Default)]
pub struct Variables<'a>(HashMap<&'a str, &'a str>);

impl<'a> Variables<'a> {
    /// Creates the environment from names and values in order.
    pub fn new(env: impl IntoIterator<Item = (&'a str, &'a str)>) -> Self {
        Self(env.into_iter().collect())
    }

    /// Expands `command` or `args`.
    ///
    /// # Errors
    /// An expanded text, or all of them together, exceed the size limit.
    pub fn expand_all(&self, list: &[String]) -> Result<Vec<String>, TooLong> {
        let mut size = 0_usize;
        let one = |text: &String| {
            let text = expand(text, |name| self.0.get(name).copied())?;
            size = size.saturating_add(text.len());
            if size > LONGEST_LIST { Err(TooLong { limit: LONGEST_LIST }) } else { Ok(text) }
        };
        list.iter().map(one).collect()
    }

    /// Expands `subPathExpr`.
    ///
    /// # Errors
    /// A variable is missing or empty, or the path exceeds the size limit.
    pub fn expand_sub_path(&self, text: &str) -> Result<String, SubPathError> {
        let missing = std::cell::RefCell::new(BTreeSet::new());
        let expanded = expand(text, |name| {
            let value = self.0.get(name).copied().unwrap_or_default();
            if value.is_empty() {
                missing.borrow_mut().insert(name.to_owned());
            }
            Some(value)
        })?;
        let missing = missing.into_inner();
        if missing.is_empty() { Ok(expanded) } else { Err(SubPathError::Missing(missing)) }
    }
}

/// Error of expanding a `subPathExpr`.
#[derive(Clone, PartialEq, Eq, Debug, thiserror::Error)]
pub enum SubPathError {
    /// Referenced variables that are missing or empty.
    #[error("missing value for {}", .0.iter().map(String::as_str).collect::<Vec<_>>().join(", "))]
    Missing(BTreeSet<String>),
    /// The path exceeds the size limit.
    #[error(transparent)]
    TooLong(#[from] TooLong),
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn references_are_replaced_once() {
        let known = Variables::new([("A", "1"), ("B", "$(A)"), ("EMPTY", ""), ("x(y", "odd")]);
        for (text, expected) in [
            ("", ""),
            ("$(A)", "1"),
            ("a$(A)b$(A)", "a1b1"),
            ("$(B)", "$(A)"),
            ("$$(A)", "$(A)"),
            ("$$$(A)", "$1"),
            ("$$$$", "$$"),
            ("$(NONE)", "$(NONE)"),
            ("$(EMPTY)", ""),
            ("$(A", "$(A"),
            ("$x $ä $", "$x $ä $"),
            ("$()", "$()"),
            ("$(x(y)", "odd"),
            ("$($(A)", "$($(A)"),
        ] {
            assert_eq!(known.expand_all(&[text.to_owned()]), Ok(vec![expected.to_owned()]), "{text}");
        }
    }

    #[test]
    fn what_grows_without_end_is_refused() {
        let half = "x".repeat(LONGEST / 2);
        let known = Variables::new([("HALF", half.as_str())]);
        let whole = known.expand_all(&["$(HALF)$(HALF)".to_owned()]).expect("as long as the kernel allows");
        assert_eq!(whole.concat().len(), LONGEST);
        let too_long = known.expand_all(&["$(HALF)$(HALF)$(HALF)".to_owned()]).unwrap_err();
        assert_eq!(too_long.limit, LONGEST);
        assert_eq!(known.expand_sub_path("$(HALF)$(HALF)$(HALF)"), Err(SubPathError::TooLong(too_long)));
        let many = vec!["$(HALF)$(HALF)".to_owned(); LONGEST_LIST / LONGEST + 1];
        assert_eq!(known.expand_all(&many), Err(TooLong { limit: LONGEST_LIST }));
        assert_eq!(known.expand_all(&["y".repeat(LONGEST * 2)]).map(|l| l.concat().len()), Ok(LONGEST * 2), "its own");
    }

    #[test]
    fn a_sub_path_needs_every_variable() {
        let known = Variables::new([("A", "old"), ("EMPTY", ""), ("A", "new")]);
        assert_eq!(known.expand_sub_path("p/$(A)"), Ok("p/new".to_owned()));
        let error = known.expand_sub_path("$(Z)/$(EMPTY)/$(A)/$(Z)").unwrap_err();
        assert_eq!(error.to_string(), "missing value for EMPTY, Z");
    }
}
