//! Who may do what where there is no API server to ask: group `system:masters`, and whom a small
//! file names. Pure.
//!
//! ```yaml
//! apiVersion: berth/v1alpha1
//! kind: StandaloneAuthorization
//! allow:
//! - groups: [operators]          # everything
//! - users: [prometheus]          # only this
//!   verbs: [get]
//!   subresources: [metrics, stats]
//! ```

use serde::Deserialize;

use super::identity::{Identity, MASTERS};

/// The largest file that is read, in bytes.
pub const LIMIT: u64 = 1 << 20;
const API_VERSION: &str = "berth/v1alpha1";
const KIND: &str = "StandaloneAuthorization";
const VERBS: [&str; 5] = ["create", "delete", "get", "patch", "update"];
const SUBRESOURCES: [&str; 9] =
    ["checkpoint", "configz", "healthz", "log", "metrics", "pods", "proxy", "stats", "statusz"];

/// A policy file cannot be used.
#[derive(Debug, PartialEq, Eq, thiserror::Error)]
pub enum PolicyError {
    /// It is not YAML, or not of that shape.
    #[error("{0}")]
    Shape(String),
    /// It is about something else.
    #[error(
        "apiVersion {version:?}, kind {kind:?}: expected apiVersion \"berth/v1alpha1\", kind \
             \"StandaloneAuthorization\""
    )]
    Kind {
        /// Its version.
        version: String,
        /// Its kind.
        kind: String,
    },
    /// A rule that lets nobody in.
    #[error("allow[{0}]: names neither users nor groups")]
    Nobody(usize),
    /// An empty name.
    #[error("allow[{0}]: a name is empty")]
    Empty(usize),
    /// A verb or subresource that does not exist.
    #[error("allow[{rule}].{field}: {value:?} is unknown; known are {known}")]
    Unknown {
        /// Which rule, from 0.
        rule: usize,
        /// `verbs` or `subresources`.
        field: &'static str,
        /// What it says.
        value: String,
        /// What it could say.
        known: String,
    },
}

#[derive(Deserialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
struct Document {
    #[serde(default)]
    api_version: String,
    #[serde(default)]
    kind: String,
    #[serde(default)]
    allow: Vec<Rule>,
}

/// Whom a rule names, and what they may do: everything where it does not say.
#[derive(Clone, Debug, PartialEq, Eq, Deserialize)]
#[serde(deny_unknown_fields)]
struct Rule {
    #[serde(default)]
    users: Vec<String>,
    #[serde(default)]
    groups: Vec<String>,
    verbs: Option<Vec<String>>,
    subresources: Option<Vec<String>>,
}

/// Who may do what.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Policy {
    rules: Vec<Rule>,
}

impl Policy {
    /// Only group `system:masters`.
    pub fn masters_only() -> Self {
        Self::default()
    }

    /// What a file says, besides `system:masters`.
    ///
    /// # Errors
    /// What is wrong with it.
    pub fn parse(text: &str) -> Result<Self, PolicyError> {
        let document: Document = serde_saphyr::from_str(text).map_err(|e| PolicyError::Shape(e.to_string()))?;
        if document.api_version != API_VERSION || document.kind != KIND {
            return Err(PolicyError::Kind { version: document.api_version, kind: document.kind });
        }
        for (index, rule) in document.allow.iter().enumerate() {
            rule.check(index)?;
        }
        Ok(Self { rules: document.allow })
    }

    /// Whether somebody may do that.
    pub fn allows(&self, who: &Identity, verb: &str, subresource: &str) -> bool {
        who.is_in(MASTERS) || self.rules.iter().any(|rule| rule.allows(who, verb, subresource))
    }

    /// How many rules there are besides the one for `system:masters`.
    pub fn rules(&self) -> usize {
        self.rules.len()
    }
}

impl Rule {
    fn check(&self, rule: usize) -> Result<(), PolicyError> {
        if self.users.is_empty() && self.groups.is_empty() {
            return Err(PolicyError::Nobody(rule));
        }
        if self.users.iter().chain(&self.groups).any(String::is_empty) {
            return Err(PolicyError::Empty(rule));
        }
        known(rule, "verbs", self.verbs.as_deref(), &VERBS)?;
        known(rule, "subresources", self.subresources.as_deref(), &SUBRESOURCES)
    }

    fn allows(&self, who: &Identity, verb: &str, subresource: &str) -> bool {
        let named = self.users.contains(&who.name) || self.groups.iter().any(|group| who.is_in(group));
        let covers = |list: &Option<Vec<String>>, word: &str| list.as_ref().is_none_or(|l| l.iter().any(|i| i == word));
        named && covers(&self.verbs, verb) && covers(&self.subresources, subresource)
    }
}

fn known(rule: usize, field: &'static str, values: Option<&[String]>, known: &[&str]) -> Result<(), PolicyError> {
    match values.unwrap_or_default().iter().find(|value| !known.contains(&value.as_str())) {
        Some(value) => Err(PolicyError::Unknown { rule, field, value: value.clone(), known: known.join(", ") }),
        None => Ok(()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const HEAD: &str = "apiVersion: berth/v1alpha1\nkind: StandaloneAuthorization\n";

    fn who(name: &str, groups: &[&str]) -> Identity {
        Identity {
            name: name.to_owned(),
            groups: groups.iter().map(|g| (*g).to_owned()).collect(),
            ..Identity::unasked()
        }
    }

    #[test]
    fn masters_may_and_whom_the_file_names() {
        let text = format!(
            "{HEAD}allow:\n- groups: [operators]\n- users: [prometheus]\n  verbs: [get]\n  subresources: [metrics]\n"
        );
        let policy = Policy::parse(&text).expect("a good file");
        assert_eq!(policy.rules(), 2);
        for (name, groups, verb, subresource, file, none) in [
            ("root", &[MASTERS][..], "create", "proxy", true, true),
            ("root", &[MASTERS], "", "proxy", true, true),
            ("kate", &["operators"], "create", "proxy", true, false),
            ("kate", &["operator"], "create", "proxy", false, false),
            ("operators", &[], "get", "pods", false, false),
            ("prometheus", &[], "get", "metrics", true, false),
            ("prometheus", &[], "get", "pods", false, false),
            ("prometheus", &[], "create", "metrics", false, false),
            ("prometheus", &[], "", "metrics", false, false),
            ("system:anonymous", &["system:unauthenticated"], "get", "healthz", false, false),
            ("system:masters", &["system:authenticated"], "get", "healthz", false, false),
        ] {
            let who = who(name, groups);
            assert_eq!(policy.allows(&who, verb, subresource), file, "{name} {verb} {subresource}");
            assert_eq!(Policy::masters_only().allows(&who, verb, subresource), none, "{name} {verb} {subresource}");
        }
        assert!(!Policy::parse(HEAD).expect("empty is good").allows(&who("kate", &[]), "get", "pods"));
    }

    #[test]
    fn what_is_wrong_is_told() {
        let rule = |text: &str| format!("{HEAD}allow:\n- {text}\n");
        for (text, told) in [
            (String::new(), "expected apiVersion"),
            ("apiVersion: v1\nkind: Pod\n".to_owned(), "apiVersion \"v1\", kind \"Pod\": expected"),
            (rule("{}"), "allow[0]: names neither users nor groups"),
            (rule("{users: ['']}"), "allow[0]: a name is empty"),
            (rule("{users: [a], verbs: [list]}"), "allow[0].verbs: \"list\" is unknown; known are create,"),
            (rule("{users: [a], subresources: [exec]}"), "allow[0].subresources: \"exec\" is unknown"),
            (rule("{users: [a], namespaces: [b]}"), "namespaces"),
            (rule("{users: a}"), ""),
            ("a: [".to_owned(), ""),
            (format!("{HEAD}deny: []\n"), "deny"),
        ] {
            let error = Policy::parse(&text).expect_err(&text).to_string();
            assert!(error.contains(told) && !error.is_empty(), "{text}: {error}");
        }
    }
}
