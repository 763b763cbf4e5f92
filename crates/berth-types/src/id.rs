//! Newtypes of pod, container, and sandbox identities, so that they cannot be confused. Pure.

use std::{fmt, sync::Arc};

macro_rules! identity {
    ($(#[$doc:meta])* $name:ident) => {
        $(#[$doc])*
        #[derive(Clone, PartialEq, Eq, Hash, PartialOrd, Ord)]
        pub struct $name(Arc<str>);

        impl $name {
            /// Wraps a text without validation.
            pub fn new(text: impl Into<Arc<str>>) -> Self {
                Self(text.into())
            }

            /// Returns the text.
            pub fn as_str(&self) -> &str {
                &self.0
            }
        }

        impl fmt::Display for $name {
            fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str(&self.0)
            }
        }

        impl fmt::Debug for $name {
            fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                fmt::Debug::fmt(&*self.0, f)
            }
        }

        impl From<&str> for $name {
            fn from(text: &str) -> Self {
                Self::new(text)
            }
        }

        impl From<String> for $name {
            fn from(text: String) -> Self {
                Self::new(text)
            }
        }

        impl AsRef<str> for $name {
            fn as_ref(&self) -> &str {
                &self.0
            }
        }

        impl std::borrow::Borrow<str> for $name {
            fn borrow(&self) -> &str {
                &self.0
            }
        }
    };
}

identity! {
    /// `metadata.uid` of a pod; not necessarily a UUID (spec 02a §1.2).
    PodUid
}
identity! {
    /// Container ID of the runtime, without the `containerd://` scheme.
    ContainerId
}
identity! {
    /// ID of a pod sandbox in the runtime.
    SandboxId
}

/// Full name `<name>_<namespace>`, which identifies static pods (spec 02 §2).
#[derive(Clone, PartialEq, Eq, Hash, PartialOrd, Ord, Debug)]
pub struct PodFullName {
    /// `metadata.name`.
    pub name: Arc<str>,
    /// `metadata.namespace`.
    pub namespace: Arc<str>,
}

impl PodFullName {
    /// Parses `<name>_<namespace>`; `None` unless it splits into exactly two non-empty parts.
    pub fn parse(text: &str) -> Option<Self> {
        let (name, namespace) = text.split_once('_')?;
        if name.is_empty() || namespace.is_empty() || namespace.contains('_') {
            return None;
        }
        Some(Self { name: name.into(), namespace: namespace.into() })
    }
}

impl fmt::Display for PodFullName {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}_{}", self.name, self.namespace)
    }
}

/// Identity of a pod, without its spec. Displays as the *pod description* `<name>_<namespace>(<uid>)` of events and
/// error texts (spec 02 §2).
#[derive(Clone, PartialEq, Eq, Hash, Debug)]
pub struct PodRef {
    /// `metadata.uid`.
    pub uid: PodUid,
    /// `metadata.name`.
    pub name: Arc<str>,
    /// `metadata.namespace`.
    pub namespace: Arc<str>,
}

impl PodRef {
    /// Returns `<namespace>/<name>`, the object name in logs and events.
    pub fn object_name(&self) -> String {
        format!("{}/{}", self.namespace, self.name)
    }

    /// Returns the full name, without the UID.
    pub fn full_name(&self) -> PodFullName {
        PodFullName { name: self.name.clone(), namespace: self.namespace.clone() }
    }
}

impl fmt::Display for PodRef {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}_{}({})", self.name, self.namespace, self.uid)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_full_name_has_exactly_two_parts() {
        assert_eq!(PodFullName::parse("web_default").map(|n| n.to_string()).as_deref(), Some("web_default"));
        for bad in ["web", "_default", "web_", "a_b_c", ""] {
            assert_eq!(PodFullName::parse(bad), None, "{bad}");
        }
    }
}
