//! `$(NAME)` in commands, arguments, variables and sub-paths. Pure. Behaviour: spec 02b §10.3.

use std::collections::{BTreeSet, HashMap};

/// Most bytes that references may add to one text: no kernel takes a longer argument or variable
/// (`MAX_ARG_STRLEN`), and variables that double each other would take all memory of the node.
pub const LONGEST: usize = 128 << 10;
/// Most bytes of an environment, and of a command line: no runtime takes a longer message.
pub const LONGEST_LIST: usize = 16 << 20;

/// References make a text or a list too long.
#[derive(Clone, Copy, PartialEq, Eq, Debug, thiserror::Error)]
#[error("argument list too long: references to variables expand to more than {limit} bytes")]
pub struct TooLong {
    /// What is allowed.
    pub limit: usize,
}

/// Replaces each `$(NAME)` by what `lookup` knows; unknown references stay as they are, `$$`
/// becomes `$`, an unclosed `$(` and any other `$x` stay. One pass, no recursion.
///
/// # Errors
/// Where the values add up to more than [`LONGEST`].
pub fn expand<'v>(text: &str, lookup: impl Fn(&str) -> Option<&'v str>) -> Result<String, TooLong> {
    let mut out = String::with_capacity(text.len());
    let mut rest = text;
    let mut added = 0_usize;
    // Looked for no more once there is none: many open ones would each search to the end.
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

/// The final environment, for what is expanded against it: the last of equal names wins.
#[derive(Clone, Debug, Default)]
pub struct Variables<'a>(HashMap<&'a str, &'a str>);

impl<'a> Variables<'a> {
    /// From names and values in order.
    pub fn new(env: impl IntoIterator<Item = (&'a str, &'a str)>) -> Self {
        Self(env.into_iter().collect())
    }

    /// `command` or `args`, expanded.
    ///
    /// # Errors
    /// Where that makes one of them, or all together, too long.
    pub fn expand_all(&self, list: &[String]) -> Result<Vec<String>, TooLong> {
        let mut size = 0_usize;
        let one = |text: &String| {
            let text = expand(text, |name| self.0.get(name).copied())?;
            size = size.saturating_add(text.len());
            if size > LONGEST_LIST { Err(TooLong { limit: LONGEST_LIST }) } else { Ok(text) }
        };
        list.iter().map(one).collect()
    }

    /// `subPathExpr`, expanded.
    ///
    /// # Errors
    /// Where a variable is missing or empty, or the path gets too long.
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

/// Why a `subPathExpr` names no path.
#[derive(Clone, PartialEq, Eq, Debug, thiserror::Error)]
pub enum SubPathError {
    /// Variables it needs and does not find.
    #[error("missing value for {}", .0.iter().map(String::as_str).collect::<Vec<_>>().join(", "))]
    Missing(BTreeSet<String>),
    /// No path is that long.
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
