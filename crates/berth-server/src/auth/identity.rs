//! Authenticated user of a request: name, UID, groups, extra. Pure. Spec 04 §6.1.

use std::collections::BTreeMap;

/// Group of all authenticated users.
pub const AUTHENTICATED: &str = "system:authenticated";
/// Group of anonymous users.
pub const UNAUTHENTICATED: &str = "system:unauthenticated";
/// User name of anonymous requests.
pub const ANONYMOUS: &str = "system:anonymous";
/// Group with access to everything.
pub const MASTERS: &str = "system:masters";

/// Authentication method.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub enum AuthenticatedBy {
    /// Client certificate of the TLS connection.
    X509,
    /// Bearer token.
    Token,
    /// None, with anonymous access enabled.
    Anonymous,
    /// None: the listener has no authentication.
    None,
}

/// User information of a request.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct UserInfo {
    /// User name.
    pub name: String,
    /// UID; empty where there is none.
    pub uid: String,
    /// Groups, in the order of the authenticator.
    pub groups: Vec<String>,
    /// Extra attributes of the authenticator.
    pub extra: BTreeMap<String, Vec<String>>,
    /// Method that authenticated the user.
    pub via: AuthenticatedBy,
}

impl UserInfo {
    /// Anonymous user.
    pub fn anonymous() -> Self {
        Self { groups: vec![UNAUTHENTICATED.to_owned()], via: AuthenticatedBy::Anonymous, ..Self::without_groups() }
    }

    /// User of a listener without authentication; all fields are empty.
    pub fn unauthenticated_listener() -> Self {
        Self { name: String::new(), ..Self::without_groups() }
    }

    fn without_groups() -> Self {
        Self {
            name: ANONYMOUS.to_owned(),
            uid: String::new(),
            groups: Vec::new(),
            extra: BTreeMap::new(),
            via: AuthenticatedBy::None,
        }
    }

    /// Adds the group `system:authenticated`, unless that or `system:unauthenticated` is present.
    pub fn authenticated(mut self) -> Self {
        let is_grouped = self.groups.iter().any(|group| group == AUTHENTICATED || group == UNAUTHENTICATED);
        if !is_grouped {
            self.groups.push(AUTHENTICATED.to_owned());
        }
        self
    }

    /// Whether the user is in the group.
    pub fn is_in(&self, group: &str) -> bool {
        self.groups.iter().any(|mine| mine == group)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn who_has_proved_themselves_is_in_the_group_once() {
        let named = |groups: &[&str]| UserInfo {
            name: "kate".to_owned(),
            groups: groups.iter().map(|g| (*g).to_owned()).collect(),
            via: AuthenticatedBy::Token,
            ..UserInfo::unauthenticated_listener()
        };
        for (groups, expected) in [
            (&[][..], &[AUTHENTICATED][..]),
            (&["dev"], &["dev", AUTHENTICATED]),
            (&[AUTHENTICATED, "dev"], &[AUTHENTICATED, "dev"]),
            (&[UNAUTHENTICATED], &[UNAUTHENTICATED]),
        ] {
            assert_eq!(named(groups).authenticated().groups, expected);
        }
        assert!(
            UserInfo::anonymous().is_in(UNAUTHENTICATED)
                && !UserInfo::unauthenticated_listener().is_in(UNAUTHENTICATED)
        );
    }
}
