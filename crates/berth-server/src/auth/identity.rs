//! Who asks. Pure. Spec 04 §6.1.

use std::collections::BTreeMap;

/// Group of everyone who proved who they are.
pub const AUTHENTICATED: &str = "system:authenticated";
/// Group of those who did not have to.
pub const UNAUTHENTICATED: &str = "system:unauthenticated";
/// Name of those who did not have to.
pub const ANONYMOUS: &str = "system:anonymous";
/// Group to which the API server allows everything.
pub const MASTERS: &str = "system:masters";

/// How somebody proved who they are.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub enum Via {
    /// By a client certificate of the TLS connection.
    X509,
    /// By a bearer token.
    Token,
    /// Not at all, which was allowed.
    Anonymous,
    /// Nobody was asked: a listener without authentication.
    None,
}

/// Who asks.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Identity {
    /// User name.
    pub name: String,
    /// Unique id, where there is one.
    pub uid: String,
    /// Groups, in the order they were told.
    pub groups: Vec<String>,
    /// What else the authenticator said.
    pub extra: BTreeMap<String, Vec<String>>,
    /// How it was proved.
    pub via: Via,
}

impl Identity {
    /// Nobody in particular, let in on purpose.
    pub fn anonymous() -> Self {
        Self { groups: vec![UNAUTHENTICATED.to_owned()], via: Via::Anonymous, ..Self::nobody() }
    }

    /// The caller of a listener that does not ask.
    pub fn unasked() -> Self {
        Self { name: String::new(), ..Self::nobody() }
    }

    fn nobody() -> Self {
        Self {
            name: ANONYMOUS.to_owned(),
            uid: String::new(),
            groups: Vec::new(),
            extra: BTreeMap::new(),
            via: Via::None,
        }
    }

    /// Puts who has proved themselves into the group of all who have, unless they are in it.
    pub fn authenticated(mut self) -> Self {
        let is_grouped = self.groups.iter().any(|group| group == AUTHENTICATED || group == UNAUTHENTICATED);
        if !is_grouped {
            self.groups.push(AUTHENTICATED.to_owned());
        }
        self
    }

    /// Whether they belong to a group of that name.
    pub fn is_in(&self, group: &str) -> bool {
        self.groups.iter().any(|mine| mine == group)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn who_has_proved_themselves_is_in_the_group_once() {
        let named = |groups: &[&str]| Identity {
            name: "kate".to_owned(),
            groups: groups.iter().map(|g| (*g).to_owned()).collect(),
            via: Via::Token,
            ..Identity::unasked()
        };
        for (groups, expected) in [
            (&[][..], &[AUTHENTICATED][..]),
            (&["dev"], &["dev", AUTHENTICATED]),
            (&[AUTHENTICATED, "dev"], &[AUTHENTICATED, "dev"]),
            (&[UNAUTHENTICATED], &[UNAUTHENTICATED]),
        ] {
            assert_eq!(named(groups).authenticated().groups, expected);
        }
        assert!(Identity::anonymous().is_in(UNAUTHENTICATED) && !Identity::unasked().is_in(UNAUTHENTICATED));
    }
}
