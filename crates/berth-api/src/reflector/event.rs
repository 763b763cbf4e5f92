//! Parser of watch events and list pages. Pure.
//!
//! An object that cannot be parsed is reported by name and does not affect others: its event is parsed once more for
//! the metadata alone. Implements spec 10 §3, §8.4.

use k8s_openapi::{Metadata, apimachinery::pkg::apis::meta::v1::ObjectMeta};
use serde::{Deserialize, de::DeserializeOwned};

use super::managed_fields_filter::WithoutManagedFields;
use crate::api::{ApiError, ApiStatus, ApiStatusCause};
use berth_types::{Pod, api};
use k8s_openapi::api::{
    certificates::{
        v1alpha1,
        v1beta1::{self, PodCertificateRequest},
    },
    core::v1::{ConfigMap, Namespace, Node, Secret, Service},
    node::v1::RuntimeClass,
    storage::v1::{CSIDriver, CSINode},
};

/// Object type that a reflector can follow.
pub trait ReflectedObject: DeserializeOwned + Send + Sync + 'static {
    /// Object metadata.
    fn meta(&self) -> &ObjectMeta;

    /// Shares equal parts with an older version of the object, to save memory.
    fn share(&mut self, _older: &Self) {}
}

macro_rules! kept {
    ($($kind:ty)*) => {
        $(impl ReflectedObject for $kind {
            fn meta(&self) -> &ObjectMeta {
                self.metadata()
            }
        })*
    };
}

kept! { ConfigMap v1alpha1::ClusterTrustBundle v1beta1::ClusterTrustBundle Namespace Node api::Pod Secret Service CSIDriver CSINode PodCertificateRequest RuntimeClass }

impl ReflectedObject for Pod {
    fn meta(&self) -> &ObjectMeta {
        &self.metadata
    }

    fn share(&mut self, older: &Self) {
        self.share(older);
    }
}

/// Namespace (may be empty) and name.
pub type Key = (String, String);

/// Prefixes of the events that carry an object to store.
const PUT: [&[u8]; 2] = [br#"{"type":"ADDED","#, br#"{"type":"MODIFIED","#];

/// Parsed watch event.
#[derive(Debug)]
pub enum WatchEvent<T> {
    /// The object was added or modified.
    Put(Key, T),
    /// The object was deleted, or no longer matches the selection.
    Gone(Key),
    /// All changes up to the event's version were sent; `true` at the end of the initial events.
    Bookmark(bool),
    /// The server ended the watch with this error.
    Error(ApiError),
    /// Event of an unknown type.
    Unknown(String),
    /// Name of an object that cannot be parsed, and the cause.
    Broken(String, String),
}

/// Page of a list.
#[derive(Debug)]
pub struct Page<T> {
    /// Resource version of the list.
    pub version: String,
    /// Continue token; empty on the last page.
    pub next: String,
    /// Objects by key.
    pub items: Vec<(Key, T)>,
    /// Names of objects that cannot be parsed, and the causes.
    pub broken: Vec<(String, String)>,
}

#[derive(Deserialize)]
struct Peek {
    #[serde(rename = "type", default)]
    kind: String,
    #[serde(default)]
    object: Head,
}

#[derive(Deserialize, Default)]
struct Head {
    #[serde(default)]
    metadata: Meta,
}

#[derive(Deserialize, Default)]
#[serde(rename_all = "camelCase")]
struct Meta {
    name: Option<String>,
    namespace: Option<String>,
    resource_version: Option<String>,
    annotations: Option<Marks>,
}

/// The only annotation that is read.
#[derive(Deserialize)]
struct Marks {
    #[serde(rename = "k8s.io/initial-events-end")]
    initial_events_end: Option<String>,
}

#[derive(Deserialize)]
struct Whole<O> {
    object: O,
}

/// Parses a watch event; also returns its resource version (empty if it has none).
///
/// # Errors
/// The line is not a watch event.
pub fn event<T: ReflectedObject>(line: &[u8]) -> Result<(WatchEvent<T>, String), ApiError> {
    // Fast path: nearly all events, as servers write them, are parsed once.
    if PUT.iter().any(|start| line.starts_with(start))
        && let Ok((key, object)) = object::<T>(line)
    {
        let version = object.meta().resource_version.clone().unwrap_or_default();
        return Ok((WatchEvent::Put(key, object), version));
    }
    let peek: Peek = serde_json::from_slice(line).map_err(|e| malformed("event", &e))?;
    let meta = peek.object.metadata;
    let version = meta.resource_version.unwrap_or_default();
    let name = meta.name.unwrap_or_default();
    let event = match peek.kind.as_str() {
        "ADDED" | "MODIFIED" => match object(line) {
            Ok((key, object)) => WatchEvent::Put(key, object),
            Err(cause) => WatchEvent::Broken(name, cause),
        },
        "DELETED" => WatchEvent::Gone((meta.namespace.unwrap_or_default(), name)),
        "BOOKMARK" => {
            let end = meta.annotations.and_then(|marks| marks.initial_events_end);
            WatchEvent::Bookmark(end.as_deref() == Some("true"))
        }
        "ERROR" => WatchEvent::Error(status(line)),
        _ => WatchEvent::Unknown(peek.kind),
    };
    Ok((event, version))
}

fn object<T: ReflectedObject>(line: &[u8]) -> Result<(Key, T), String> {
    let whole: Whole<WithoutManagedFields<T>> = serde_json::from_slice(line).map_err(|e| e.to_string())?;
    keyed(whole.object.0)
}

fn keyed<T: ReflectedObject>(object: T) -> Result<(Key, T), String> {
    let meta = object.meta();
    let name = meta.name.clone().filter(|name| !name.is_empty()).ok_or("metadata.name is empty")?;
    Ok(((meta.namespace.clone().unwrap_or_default(), name), object))
}

#[derive(Deserialize)]
struct ListOf<O> {
    metadata: ListMeta,
    /// May be null but must be present: to accept an unrelated response as an empty list would stop all pods.
    #[serde(deserialize_with = "Option::deserialize", bound(deserialize = "O: Deserialize<'de>"))]
    items: Option<Vec<O>>,
}

#[derive(Deserialize)]
#[serde(rename_all = "camelCase")]
struct ListMeta {
    resource_version: String,
    #[serde(default, rename = "continue")]
    next: String,
}

/// Parses a page of a list.
///
/// # Errors
/// The text is not a list.
pub fn page<T: ReflectedObject>(text: &[u8]) -> Result<Page<T>, ApiError> {
    let mut page = match serde_json::from_slice::<ListOf<WithoutManagedFields<T>>>(text) {
        Ok(list) => Page::of(
            list.metadata,
            list.items.unwrap_or_default().into_iter().map(|WithoutManagedFields(object)| Ok(object)),
        ),
        // Rare and expensive: parses the items one by one, to lose only the broken ones.
        Err(_) => {
            let list: ListOf<serde_json::Value> = serde_json::from_slice(text).map_err(|e| malformed("list", &e))?;
            let read = |value: serde_json::Value| {
                let name = value["metadata"]["name"].as_str().unwrap_or_default().to_owned();
                serde_json::from_value::<WithoutManagedFields<T>>(value)
                    .map(|WithoutManagedFields(object)| object)
                    .map_err(|e| (name, e.to_string()))
            };
            Page::of(list.metadata, list.items.unwrap_or_default().into_iter().map(read))
        }
    };
    page.items.shrink_to_fit();
    Ok(page)
}

impl<T: ReflectedObject> Page<T> {
    fn of(meta: ListMeta, objects: impl Iterator<Item = Result<T, (String, String)>>) -> Self {
        let mut page = Self { version: meta.resource_version, next: meta.next, items: Vec::new(), broken: Vec::new() };
        for object in objects {
            match object.and_then(|object| keyed(object).map_err(|cause| (String::new(), cause))) {
                Ok(item) => page.items.push(item),
                Err(broken) => page.broken.push(broken),
            }
        }
        page
    }
}

#[derive(Deserialize, Default)]
#[serde(default)]
struct Status {
    code: u16,
    reason: String,
    message: String,
    details: Option<Details>,
}

#[derive(Deserialize, Default)]
#[serde(default, rename_all = "camelCase")]
struct Details {
    causes: Option<Vec<StatusCause>>,
    retry_after_seconds: u32,
}

#[derive(Deserialize, Default)]
#[serde(default)]
struct StatusCause {
    reason: String,
    message: String,
    field: String,
}

/// Parses the status of an ERROR event.
fn status(line: &[u8]) -> ApiError {
    let status = match serde_json::from_slice::<Whole<Status>>(line) {
        Ok(whole) => whole.object,
        Err(e) => return malformed("status", &e),
    };
    let details = status.details.unwrap_or_default();
    let seconds = u64::from(details.retry_after_seconds);
    ApiError::Refused(Box::new(ApiStatus {
        code: status.code,
        reason: status.reason,
        message: status.message,
        causes: details
            .causes
            .unwrap_or_default()
            .into_iter()
            .map(|cause| ApiStatusCause { reason: cause.reason, message: cause.message, field: cause.field })
            .collect(),
        retry_after: (seconds > 0).then(|| std::time::Duration::from_secs(seconds)),
    }))
}

fn malformed(what: &str, error: &serde_json::Error) -> ApiError {
    ApiError::Malformed(format!("unexpected {what}: {error}"))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::testing;
    use serde_json::{Value, json};

    fn read(value: &Value) -> (WatchEvent<api::ConfigMap>, String) {
        event(value.to_string().as_bytes()).expect("an event")
    }

    fn config_map(name: &str, version: &str) -> Value {
        json!({"apiVersion": "v1", "kind": "ConfigMap", "data": {"k": "v"},
            "metadata": {"name": name, "namespace": "ns", "resourceVersion": version}})
    }

    #[test]
    fn what_is_no_whole_pod_is_named() {
        let whole = json!({"metadata": {"name": "p", "namespace": "ns", "uid": "u"}, "spec": {"containers": []}});
        for (gone, text) in [("/metadata/uid", "metadata.uid is required"), ("/spec", "spec is required")] {
            let mut object = whole.clone();
            let (at, key) = gone.rsplit_once('/').expect("a pointer");
            object.pointer_mut(at).and_then(Value::as_object_mut).expect("an object").remove(key);
            let line = testing::event("ADDED", object).to_string();
            let (parsed, _) = event::<Pod>(line.as_bytes()).expect("an event");
            assert!(
                matches!(&parsed, WatchEvent::Broken(name, cause) if name == "p" && cause.contains(text)),
                "{parsed:?}"
            );
        }
        let line = testing::event("ADDED", whole.clone()).to_string();
        let (WatchEvent::Put(_, first), _) = event::<Pod>(line.as_bytes()).expect("an event") else { panic!("a pod") };
        let (WatchEvent::Put(_, mut again), _) = event::<Pod>(line.as_bytes()).expect("an event") else {
            panic!("a pod")
        };
        assert!(!std::sync::Arc::ptr_eq(first.shared_spec(), again.shared_spec()));
        again.share(&first);
        assert!(std::sync::Arc::ptr_eq(first.shared_spec(), again.shared_spec()), "kept once");
    }

    #[test]
    fn events_are_parsed_by_type() {
        let key = ("ns".to_owned(), "a".to_owned());
        for kind in ["ADDED", "MODIFIED"] {
            let (event, version) = read(&testing::event(kind, config_map("a", "7")));
            assert!(matches!(&event, WatchEvent::Put(k, _) if *k == key), "{event:?}");
            assert_eq!(version, "7");
        }
        let (event, version) = read(&json!({"object": config_map("a", "7"), "type": "ADDED"}));
        assert!(matches!(&event, WatchEvent::Put(k, _) if *k == key) && version == "7", "in any order: {event:?}");
        let (event, version) = read(&testing::event("DELETED", config_map("a", "8")));
        assert!(matches!(&event, WatchEvent::Gone(k) if *k == key) && version == "8");
        let (event, _) = read(&testing::event("RENAMED", json!({"what": "ever"})));
        assert!(matches!(&event, WatchEvent::Unknown(kind) if kind == "RENAMED"));
        let (event, version) = read(&testing::marker("v1", "ConfigMap", "9"));
        assert!(matches!(event, WatchEvent::Bookmark(true)) && version == "9");
        // AC-10-10: no other value ends the initial events.
        let mut other = testing::marker("v1", "ConfigMap", "9");
        other["object"]["metadata"]["annotations"]["k8s.io/initial-events-end"] = json!("false");
        assert!(matches!(read(&other).0, WatchEvent::Bookmark(false)));
    }

    #[test]
    fn broken_objects_are_reported_by_name() {
        let mut broken = config_map("bad", "7");
        broken["data"] = json!({"k": 3});
        let (event, version) = read(&testing::event("ADDED", broken.clone()));
        assert!(matches!(&event, WatchEvent::Broken(name, _) if name == "bad") && version == "7", "{event:?}");
        let nameless = testing::event("ADDED", json!({"metadata": {"resourceVersion": "1"}}));
        assert!(matches!(read(&nameless).0, WatchEvent::Broken(..)));
        let list = json!({"metadata": {"resourceVersion": "9", "continue": "next"},
            "items": [config_map("a", "1"), broken, config_map("b", "2"), {}]});
        let page = page::<api::ConfigMap>(list.to_string().as_bytes()).expect("a list");
        let names: Vec<&str> = page.items.iter().map(|((_, name), _)| name.as_str()).collect();
        assert_eq!((names, page.version.as_str(), page.next.as_str()), (vec!["a", "b"], "9", "next"));
        assert_eq!(page.broken.iter().map(|(name, _)| name.as_str()).collect::<Vec<_>>(), ["bad", ""]);
    }

    #[test]
    fn errors_carry_their_status() {
        let (event, _) = read(&testing::event(
            "ERROR",
            json!({"kind": "Status", "apiVersion": "v1", "metadata": {}, "status": "Failure", "code": 504,
                "reason": "Timeout", "message": "Too large resource version: 9, current: 5",
                "details": {"causes": [{"reason": "ResourceVersionTooLarge", "message": "m"}], "retryAfterSeconds": 1}}),
        ));
        let WatchEvent::Error(error) = event else { panic!("{event:?}") };
        assert!(error.is_version_too_large() && error.code() == 504);
        assert_eq!(error.retry_after(), Some(std::time::Duration::from_secs(1)));
    }

    #[test]
    fn what_is_no_event_is_an_error() {
        for text in [&b""[..], b"\x00\xff", b"k8s\x00", b"7", br#"{"type":"ADDED","object":{"met"#] {
            assert!(event::<api::Pod>(text).is_err(), "{text:?}");
            assert!(page::<api::Pod>(text).is_err(), "{text:?}");
        }
        let empty = page::<api::Pod>(br#"{"metadata":{"resourceVersion":"3"},"items":null}"#).expect("a list");
        assert!(empty.items.is_empty() && empty.version == "3");
        for none in [
            r#"{"kind":"Status","status":"Success"}"#,
            r#"{"kind":"Status","metadata":{},"status":"Success"}"#,
            r#"{"metadata":{"resourceVersion":"3"}}"#,
            r#"{"metadata":{},"items":[]}"#,
            "{}",
            "[]",
            "null",
        ] {
            assert!(page::<api::Pod>(none.as_bytes()).is_err(), "{none}");
        }
    }

    #[test]
    fn reading_many_pods_is_cheap() {
        // Spec 10 §8.6: 500 pods of 8 KiB in 40 ms in a release build. The test only checks that it does not take
        // seconds without optimization.
        let fields: Vec<Value> =
            (0..40).map(|n| json!({"manager": format!("m{n}"), "fieldsV1": {"f:a": {"f:b": {}}}})).collect();
        let pod = json!({"metadata": {"name": "p", "namespace": "n", "managedFields": fields},
            "spec": {"containers": [{"name": "c", "args": vec!["x".repeat(64); 64]}]}});
        let list = json!({"metadata": {"resourceVersion": "1"}, "items": vec![pod; 500]}).to_string();
        let began = std::time::Instant::now();
        let page = page::<api::Pod>(list.as_bytes()).expect("a list");
        assert!(page.items.iter().all(|(_, pod)| pod.metadata.managed_fields.is_none()));
        assert!(began.elapsed() < std::time::Duration::from_secs(10), "{:?}", began.elapsed());
    }
}
