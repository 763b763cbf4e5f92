//! Authorization policy for standalone mode: `system:masters`, and the rules of a YAML file. Pure.
//!
//! Replaces SubjectAccessReview where there is no API server.
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

use super::identity::{MASTERS, UserInfo};

/// Maximum size of a policy file, in bytes.
pub const LIMIT: u64 = 1 << 20;
const API_VERSION: &str = "berth/v1alpha1";
const KIND: &str = "StandaloneAuthorization";
const VERBS: [&str; 5] = ["create", "delete", "get", "patch", "update"];
const SUBRESOURCES: [&str; 9] =
    ["checkpoint", "configz", "healthz", "log", "metrics", "pods", "proxy", "stats", "statusz"];

/// Error of a policy file.
#[derive(Debug, PartialEq, Eq, thiserror::Error)]
pub enum PolicyError {
    /// Not YAML, or not of the expected structure.
    #[error("{0}")]
    Shape(String),
    /// Another `apiVersion` or `kind`.
    #[error(
        "unsupported apiVersion {version:?}, kind {kind:?}: expected apiVersion \"berth/v1alpha1\", kind \
             \"StandaloneAuthorization\""
    )]
    Kind {
        /// `apiVersion` of the file.
        version: String,
        /// `kind` of the file.
        kind: String,
    },
    /// A rule without subjects.
    #[error("allow[{0}]: at least one of users and groups is required")]
    NoSubject(usize),
    /// An empty user or group name.
    #[error("allow[{0}]: user or group name must not be empty")]
    Empty(usize),
    /// Unknown verb or subresource.
    #[error("allow[{rule}].{field}: unsupported value {value:?}: supported values are {known}")]
    Unknown {
        /// Index of the rule, from 0.
        rule: usize,
        /// `verbs` or `subresources`.
        field: &'static str,
        /// The unknown value.
        value: String,
        /// Known values, separated by commas.
        known: String,
    },
}

#[derive(Deserialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
struct PolicyDocument {
    #[serde(default)]
    api_version: String,
    #[serde(default)]
    kind: String,
    #[serde(default)]
    allow: Vec<Rule>,
}

/// Rule: subjects, and allowed verbs and subresources; an absent list allows all.
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

/// Rules of an authorization policy: who may do what.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct AuthorizationPolicy {
    rules: Vec<Rule>,
}

impl AuthorizationPolicy {
    /// Policy that allows only the group `system:masters`.
    pub fn masters_only() -> Self {
        Self::default()
    }

    /// Parses a policy file; its rules apply in addition to `system:masters`.
    ///
    /// # Errors
    /// The first problem of the file.
    pub fn parse(text: &str) -> Result<Self, PolicyError> {
        let document: PolicyDocument = serde_saphyr::from_str(text).map_err(|e| PolicyError::Shape(e.to_string()))?;
        if document.api_version != API_VERSION || document.kind != KIND {
            return Err(PolicyError::Kind { version: document.api_version, kind: document.kind });
        }
        for (index, rule) in document.allow.iter().enumerate() {
            rule.check(index)?;
        }
        Ok(Self { rules: document.allow })
    }

    /// Whether the policy allows the access.
    pub fn allows(&self, who: &UserInfo, verb: &str, subresource: &str) -> bool {
        who.is_in(MASTERS) || self.rules.iter().any(|rule| rule.allows(who, verb, subresource))
    }

    /// Number of rules, without the implicit one for `system:masters`.
    pub fn rules(&self) -> usize {
        self.rules.len()
    }
}

impl Rule {
    fn check(&self, rule: usize) -> Result<(), PolicyError> {
        if self.users.is_empty() && self.groups.is_empty() {
            return Err(PolicyError::NoSubject(rule));
        }
        if self.users.iter().chain(&self.groups).any(String::is_empty) {
            return Err(PolicyError::Empty(rule));
        }
        known(rule, "verbs", self.verbs.as_deref(), &VERBS)?;
        known(rule, "subresources", self.subresources.as_deref(), &SUBRESOURCES)
    }

    fn allows(&self, who: &UserInfo, verb: &str, subresource: &str) -> bool {
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

    fn who(name: &str, groups: &[&str]) -> UserInfo {
        UserInfo {
            name: name.to_owned(),
            groups: groups.iter().map(|g| (*g).to_owned()).collect(),
            ..UserInfo::unauthenticated_listener()
        }
    }

    #[test]
    fn masters_may_and_whom_the_file_names() {
        let text = format!(
            "{HEAD}allow:\n- groups: [operators]\n- users: [prometheus]\n  verbs: [get]\n  subresources: [metrics]\n"
        );
        let policy = AuthorizationPolicy::parse(&text).expect("a good file");
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
            assert_eq!(
                AuthorizationPolicy::masters_only().allows(&who, verb, subresource),
                none,
                "{name} {verb} {subresource}"
            );
        }
        assert!(!AuthorizationPolicy::parse(HEAD).expect("empty is good").allows(&who("kate", &[]), "get", "pods"));
    }

    #[test]
    fn parse_errors_name_the_problem() {
        let rule = |text: &str| format!("{HEAD}allow:\n- {text}\n");
        for (text, expected) in [
            (String::new(), "expected apiVersion"),
            ("apiVersion: v1\nkind: Pod\n".to_owned(), "apiVersion \"v1\", kind \"Pod\": expected"),
            (rule("{}"), "allow[0]: at least one of users and groups is required"),
            (rule("{users: ['']}"), "allow[0]: user or group name must not be empty"),
            (
                rule("{users: [a], verbs: [list]}"),
                "allow[0].verbs: unsupported value \"list\": supported values are create,",
            ),
            (rule("{users: [a], subresources: [exec]}"), "allow[0].subresources: unsupported value \"exec\""),
            (rule("{users: [a], namespaces: [b]}"), "namespaces"),
            (rule("{users: a}"), ""),
            ("a: [".to_owned(), ""),
            (format!("{HEAD}deny: []\n"), "deny"),
        ] {
            let error = AuthorizationPolicy::parse(&text).expect_err(&text).to_string();
            assert!(error.contains(expected) && !error.is_empty(), "{text}: {error}");
        }
    }
}
