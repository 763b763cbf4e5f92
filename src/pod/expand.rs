//! `$(NAME)` in commands, arguments, variables and sub-paths. Pure. Behaviour: spec 02b §10.3.

use std::collections::{BTreeSet, HashMap};

/// Replaces each `$(NAME)` by what `lookup` knows; unknown references stay as they are, `$$`
/// becomes `$`, an unclosed `$(` and any other `$x` stay. One pass, no recursion.
pub fn expand<'v>(text: &str, lookup: impl Fn(&str) -> Option<&'v str>) -> String {
    let mut out = String::with_capacity(text.len());
    let mut rest = text;
    while let Some(at) = rest.find('$') {
        let (before, found) = rest.split_at(at);
        out.push_str(before);
        let after = found.strip_prefix('$').unwrap_or_default();
        rest = if let Some(more) = after.strip_prefix('$') {
            out.push('$');
            more
        } else if let Some((name, more)) = after.strip_prefix('(').and_then(|open| open.split_once(')')) {
            match lookup(name) {
                Some(value) => out.push_str(value),
                None => out.extend(["$(", name, ")"]),
            }
            more
        } else {
            out.push('$');
            after
        };
    }
    out.push_str(rest);
    out
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
    pub fn expand_all(&self, list: &[String]) -> Vec<String> {
        list.iter().map(|text| expand(text, |name| self.0.get(name).copied())).collect()
    }

    /// `subPathExpr`, expanded.
    ///
    /// # Errors
    /// Where a variable is missing or empty.
    pub fn expand_sub_path(&self, text: &str) -> Result<String, MissingVariables> {
        let missing = std::cell::RefCell::new(BTreeSet::new());
        let expanded = expand(text, |name| {
            let value = self.0.get(name).copied().unwrap_or_default();
            if value.is_empty() {
                missing.borrow_mut().insert(name.to_owned());
            }
            Some(value)
        });
        let missing = missing.into_inner();
        if missing.is_empty() { Ok(expanded) } else { Err(MissingVariables(missing)) }
    }
}

/// Variables a `subPathExpr` needs and does not find.
#[derive(Clone, PartialEq, Eq, Debug, thiserror::Error)]
#[error("missing value for {}", .0.iter().map(String::as_str).collect::<Vec<_>>().join(", "))]
pub struct MissingVariables(pub BTreeSet<String>);

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
            assert_eq!(known.expand_all(&[text.to_owned()]), [expected], "{text}");
        }
    }

    #[test]
    fn a_sub_path_needs_every_variable() {
        let known = Variables::new([("A", "old"), ("EMPTY", ""), ("A", "new")]);
        assert_eq!(known.expand_sub_path("p/$(A)"), Ok("p/new".to_owned()));
        let error = known.expand_sub_path("$(Z)/$(EMPTY)/$(A)/$(Z)").unwrap_err();
        assert_eq!(error.to_string(), "missing value for EMPTY, Z");
    }
}
