//! List and watch requests of a selection. Pure.
//!
//! Implements spec 10 §3.1.

use std::{ops::RangeInclusive, time::Duration};

use super::state_machine::{ReflectorRequest, RefusalRetry};
use crate::api::{Call, Resource, Verb};

/// Objects per list page.
const PAGE: &str = "500";
/// Requested duration of a watch, in seconds.
const MANY_SECONDS: RangeInclusive<u32> = 300..=600;
/// Requested duration of a single-object watch, of which there are many, in seconds.
const ONE_SECONDS: RangeInclusive<u32> = 1800..=3600;
/// Deadline for a watch to be established: the server waits at most 3 s for a version that it does not have yet.
const BEGIN_LIMIT: Duration = Duration::from_secs(30);

/// Objects to list and watch.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Selection {
    resource: Resource,
    namespace: String,
    fields: String,
    patience: RefusalRetry,
    seconds: RangeInclusive<u32>,
}

impl Selection {
    /// Selects all objects of a resource, in all namespaces.
    pub fn all(resource: Resource) -> Self {
        Self::matching(resource, "")
    }

    /// Selects objects by a field selector, e.g. `spec.nodeName=n`.
    pub fn matching(resource: Resource, fields: &str) -> Self {
        Self {
            resource,
            namespace: String::new(),
            fields: fields.to_owned(),
            patience: RefusalRetry::Ordinary,
            seconds: MANY_SECONDS,
        }
    }

    /// Selects one ConfigMap or Secret that a pod references: a node is authorized to watch these only by name.
    pub fn one(resource: Resource, namespace: &str, name: &str) -> Self {
        Self {
            resource,
            namespace: namespace.to_owned(),
            fields: format!("metadata.name={name}"),
            patience: RefusalRetry::Quick,
            seconds: ONE_SECONDS,
        }
    }

    /// Resource type.
    pub fn resource(&self) -> Resource {
        self.resource
    }

    /// Retry policy of refusals.
    pub fn patience(&self) -> RefusalRetry {
        self.patience
    }

    /// Builds the request, and returns the requested duration of the watch (zero for a list); `chance` is in 0..1.
    pub fn call(&self, ask: &ReflectorRequest, chance: f64) -> (Call, Duration) {
        let seconds = spread(&self.seconds, chance);
        let watch = |call: Call| {
            let call = call.query("allowWatchBookmarks", "true").query("timeoutSeconds", seconds.to_string());
            (call.query("watch", "true").within(BEGIN_LIMIT), Duration::from_secs(u64::from(seconds)))
        };
        match ask {
            ReflectorRequest::Stream(version) => {
                let call = self.plain(Verb::Watch).query("resourceVersionMatch", "NotOlderThan");
                watch(with_version(call.query("sendInitialEvents", "true"), version))
            }
            ReflectorRequest::Watch(version) => watch(with_version(self.plain(Verb::Watch), version)),
            ReflectorRequest::List(version) => {
                let call = with_version(self.plain(Verb::List), version);
                let whole = !matches!(version.as_str(), "" | "0");
                (if whole { call } else { call.query("limit", PAGE) }, Duration::ZERO)
            }
        }
    }

    /// Builds the request for the next list page; the token determines the version.
    pub fn next_page(&self, token: &str) -> Call {
        self.plain(Verb::List).query("limit", PAGE).query("continue", token)
    }

    fn plain(&self, verb: Verb) -> Call {
        let call = Call::new(verb, self.resource, &self.namespace, "");
        if self.fields.is_empty() { call } else { call.query("fieldSelector", self.fields.as_str()) }
    }
}

fn with_version(call: Call, version: &str) -> Call {
    if version.is_empty() { call } else { call.query("resourceVersion", version) }
}

fn spread(range: &RangeInclusive<u32>, chance: f64) -> u32 {
    let width = range.end() - range.start();
    range.start() + ((f64::from(width) + 1.0) * chance.clamp(0.0, 1.0)) as u32 % (width + 1)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Query as sent, without percent-encoding.
    fn query(selection: &Selection, ask: ReflectorRequest) -> String {
        shown(selection.call(&ask, 0.0).0)
    }

    fn shown(call: Call) -> String {
        let mut query = call.query;
        query.sort();
        query.into_iter().map(|(name, value)| format!("{name}={value}")).collect::<Vec<_>>().join("&")
    }

    #[test]
    fn requests_are_those_of_the_reference() {
        let pods = Selection::matching(Resource::PODS, "spec.nodeName=n");
        for (ask, expected) in [
            (
                ReflectorRequest::Stream(String::new()),
                "allowWatchBookmarks=true&fieldSelector=spec.nodeName=n&resourceVersionMatch=NotOlderThan&\
                 sendInitialEvents=true&timeoutSeconds=300&watch=true",
            ),
            (
                ReflectorRequest::Stream("500".into()),
                "allowWatchBookmarks=true&fieldSelector=spec.nodeName=n&resourceVersion=500&\
                 resourceVersionMatch=NotOlderThan&sendInitialEvents=true&timeoutSeconds=300&watch=true",
            ),
            // AC-10-8
            (ReflectorRequest::List("0".into()), "fieldSelector=spec.nodeName=n&limit=500&resourceVersion=0"),
            (ReflectorRequest::List(String::new()), "fieldSelector=spec.nodeName=n&limit=500"),
            (ReflectorRequest::List("7".into()), "fieldSelector=spec.nodeName=n&resourceVersion=7"),
            (
                ReflectorRequest::Watch("7".into()),
                "allowWatchBookmarks=true&fieldSelector=spec.nodeName=n&resourceVersion=7&timeoutSeconds=300&watch=true",
            ),
        ] {
            assert_eq!(query(&pods, ask), expected);
        }
        assert_eq!(shown(pods.next_page("abc")), "continue=abc&fieldSelector=spec.nodeName=n&limit=500");
    }

    #[test]
    fn single_objects_are_watched_longer() {
        let one = Selection::one(Resource::SECRETS, "ns", "s");
        let (call, lasts) = one.call(&ReflectorRequest::Stream(String::new()), 0.5);
        assert_eq!((call.path().as_str(), lasts.as_secs()), ("/api/v1/namespaces/ns/secrets", 2700));
        assert!(call.query.contains(&("fieldSelector", "metadata.name=s".to_owned())));
        for chance in [0.0, 0.3, 0.999_999, 1.0] {
            let (_, lasts) = Selection::all(Resource::PODS).call(&ReflectorRequest::Watch("1".into()), chance);
            assert!((300..=600).contains(&lasts.as_secs()), "{lasts:?}");
        }
    }
}
