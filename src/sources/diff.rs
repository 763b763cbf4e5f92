//! Difference between two full pod sets of one source. Pure. Implements spec 02a §2.2-2.4.
//!
//! A set is compared with the last one of this source, and becomes ordered, minimal operations: REMOVE,
//! ADD, UPDATE, DELETE, (an empty ADD for the first set of a source that adds nothing), RECONCILE. The
//! store keeps the pods as sent to the engine; of the source's own object it keeps only a weak pointer,
//! to detect an unchanged pod without a comparison.

use std::{
    collections::{BTreeMap, BTreeSet, HashSet},
    sync::{Arc, Weak},
};

use k8s_openapi::apimachinery::pkg::apis::meta::v1::ObjectMeta;

use berth_types::{
    Operation, Pod, PodChange, PodFullName, PodRef, PodSource, PodUid,
    spec::{ANNOTATION_MIRROR, ANNOTATION_SEEN, ANNOTATION_SOURCE, PodHead},
};

/// Annotations that only this agent writes, and that never count as a change.
const LOCAL_ANNOTATIONS: [&str; 3] = [ANNOTATION_SOURCE, ANNOTATION_MIRROR, ANNOTATION_SEEN];

/// A pod of a source as the engine knows it.
#[derive(Debug)]
struct KnownPod {
    /// The object from the source; only for a pointer comparison.
    sent: Weak<Pod>,
    /// The pod as sent to the engine.
    pod: Arc<Pod>,
}

/// A pod that is ignored because another one has its name (or its UID).
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Duplicate {
    /// The ignored pod.
    pub pod: PodRef,
    /// Message of the event.
    pub message: String,
}

/// Result of one merge.
#[derive(Debug, Default)]
pub struct MergeResult {
    /// The operations, in order.
    pub changes: Vec<PodChange>,
    /// Newly ignored pods; each is reported once.
    pub duplicates: Vec<Duplicate>,
}

/// The last set of one source.
#[derive(Debug)]
pub struct SourceStore {
    source: PodSource,
    seen: bool,
    pods: BTreeMap<PodUid, KnownPod>,
    reported_duplicates: HashSet<PodRef>,
}

impl SourceStore {
    /// Creates the store of a source that has not delivered a set yet.
    pub fn new(source: PodSource) -> Self {
        Self { source, seen: false, pods: BTreeMap::new(), reported_duplicates: HashSet::new() }
    }

    /// Merges a new full set; `seen` is the value of `kubernetes.io/config.seen` for new pods.
    pub fn merge(&mut self, set: Vec<Arc<Pod>>, seen: &str) -> MergeResult {
        let mut merged = MergeResult::default();
        let first = !std::mem::replace(&mut self.seen, true);
        let incoming = self.without_duplicates(set, &mut merged);

        let mut old = std::mem::take(&mut self.pods);
        let mut lists: BTreeMap<OperationOrder, Vec<Arc<Pod>>> = BTreeMap::new();
        for sent in incoming {
            let known = old.remove(sent.uid());
            let (known, renamed) = match known {
                Some(known_pod) if known_pod.pod.id() != sent.id() => (None, Some(known_pod)),
                known => (known, None),
            };
            if let Some(gone) = renamed {
                lists.entry(OperationOrder::Remove).or_default().push(gone.pod);
            }
            let (known_pod, emission) = match known {
                Some(known_pod) => compared(known_pod, &sent),
                None => {
                    let pod = Arc::new(new_pod(&sent, self.source, seen));
                    (KnownPod { sent: Arc::downgrade(&sent), pod }, Some(OperationOrder::Add))
                }
            };
            if let Some(emission) = emission {
                lists.entry(emission).or_default().push(known_pod.pod.clone());
            }
            self.pods.insert(sent.uid().clone(), known_pod);
        }
        let gone = old.into_values().map(|known_pod| known_pod.pod);
        lists.entry(OperationOrder::Remove).or_default().extend(gone);
        let has_changes =
            [OperationOrder::Add, OperationOrder::Update, OperationOrder::Delete].iter().any(|e| lists.contains_key(e));
        if first && !has_changes {
            lists.insert(OperationOrder::FirstAnswer, Vec::new());
        }
        merged.changes = lists
            .into_iter()
            .filter(|(emission, pods)| *emission == OperationOrder::FirstAnswer || !pods.is_empty())
            .map(|(emission, pods)| PodChange { operation: emission.operation(), source: self.source, pods })
            .collect();
        merged
    }

    /// Drops pods whose full name or UID is taken: by the pod that the engine already has, else by the
    /// first one of the set.
    fn without_duplicates(&mut self, incoming: Vec<Arc<Pod>>, merged: &mut MergeResult) -> Vec<Arc<Pod>> {
        let mut owners: BTreeMap<PodFullName, usize> = BTreeMap::new();
        let mut uids: BTreeSet<PodUid> = BTreeSet::new();
        let driven = |id: &PodRef| self.pods.get(&id.uid).is_some_and(|known_pod| known_pod.pod.id() == id);
        for (i, id) in incoming.iter().map(|pod| pod.id()).enumerate() {
            let owner = owners.entry(id.full_name()).or_insert(i);
            let taken = incoming.get(*owner).is_some_and(|owner| driven(owner.id()));
            if !taken && driven(id) {
                *owner = i;
            }
        }
        let mut duplicates = HashSet::new();
        let mut kept = Vec::with_capacity(incoming.len());
        for (i, sent) in incoming.into_iter().enumerate() {
            let id = sent.id();
            let what = match owners.get(&id.full_name()) {
                Some(owner) if *owner != i => format!("duplicate pod name {:?}", &*id.name),
                _ if !uids.insert(id.uid.clone()) => format!("duplicate pod UID {:?}", id.uid.as_str()),
                _ => {
                    kept.push(sent);
                    continue;
                }
            };
            if !self.reported_duplicates.contains(id) && duplicates.insert(id.clone()) {
                let message =
                    format!("Error validating pod {id} from {} due to {what}, ignoring", self.source.as_str());
                merged.duplicates.push(Duplicate { pod: id.clone(), message });
            } else {
                duplicates.insert(id.clone());
            }
        }
        self.reported_duplicates = duplicates;
        kept
    }
}

/// Order in which operations are sent.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
enum OperationOrder {
    Remove,
    Add,
    Update,
    Delete,
    FirstAnswer,
    Reconcile,
}

impl OperationOrder {
    fn operation(self) -> Operation {
        match self {
            Self::Remove => Operation::Remove,
            Self::Add | Self::FirstAnswer => Operation::Add,
            Self::Update => Operation::Update,
            Self::Delete => Operation::Delete,
            Self::Reconcile => Operation::Reconcile,
        }
    }
}

/// The pod as first sent: with source and time, without managed fields.
fn new_pod(sent: &Pod, source: PodSource, seen: &str) -> Pod {
    let mut metadata = ObjectMeta::clone(&sent.metadata);
    metadata.managed_fields = None; // not used on the node
    let annotations = metadata.annotations.get_or_insert_default();
    annotations.insert(ANNOTATION_SOURCE.to_owned(), source.as_str().to_owned());
    annotations.insert(ANNOTATION_SEEN.to_owned(), seen.to_owned());
    sent.with_head(PodHead { metadata: Arc::new(metadata), status: sent.status.clone() })
}

/// Compares a pod with its last version sent to the engine.
fn compared(known: KnownPod, sent: &Arc<Pod>) -> (KnownPod, Option<OperationOrder>) {
    if Weak::ptr_eq(&known.sent, &Arc::downgrade(sent)) {
        return (known, None);
    }
    let old = &known.pod;
    let differs = differs(old, sent);
    if !differs && old.status == sent.status {
        return (KnownPod { sent: Arc::downgrade(sent), pod: known.pod }, None);
    }
    let mut head = PodHead { metadata: old.metadata.clone(), status: sent.status.clone() };
    let (merged, emission) = if differs {
        let (into, from) = (Arc::make_mut(&mut head.metadata), &sent.metadata);
        into.labels.clone_from(&from.labels);
        into.deletion_timestamp.clone_from(&from.deletion_timestamp);
        into.deletion_grace_period_seconds = from.deletion_grace_period_seconds;
        into.generation = from.generation;
        let local = into.annotations.take().unwrap_or_default();
        let local = local.into_iter().filter(|(key, _)| LOCAL_ANNOTATIONS.contains(&key.as_str()));
        let mut annotations = from.annotations.clone().unwrap_or_default();
        annotations.extend(local);
        into.annotations = Some(annotations);
        let emission =
            if sent.metadata.deletion_timestamp.is_some() { OperationOrder::Delete } else { OperationOrder::Update };
        (sent.with_head(head), emission)
    } else {
        (old.with_head(head), OperationOrder::Reconcile)
    };
    (KnownPod { sent: Arc::downgrade(sent), pod: Arc::new(merged) }, Some(emission))
}

/// Whether anything that the engine uses differs, apart from the status.
fn differs(old: &Pod, new: &Pod) -> bool {
    let (was, is) = (&old.metadata, &new.metadata);
    // The specification is usually shared, which needs no comparison.
    let same_spec = Arc::ptr_eq(old.shared_spec(), new.shared_spec()) || old.spec() == new.spec();
    !same_spec
        || *old.labels() != is.labels.clone().unwrap_or_default()
        || was.deletion_timestamp != is.deletion_timestamp
        || was.deletion_grace_period_seconds != is.deletion_grace_period_seconds
        || foreign(was.annotations.as_ref()) != foreign(is.annotations.as_ref())
}

/// All annotations but the local ones.
fn foreign(annotations: Option<&BTreeMap<String, String>>) -> BTreeMap<&str, &str> {
    let all = annotations.into_iter().flatten().map(|(key, value)| (key.as_str(), value.as_str()));
    all.filter(|(key, _)| !LOCAL_ANNOTATIONS.contains(key)).collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::{Value, json};

    const SEEN: &str = "2026-01-02T03:04:05.000000000Z";

    fn pod(name: &str, uid: &str, extra: Value) -> Arc<Pod> {
        let mut json = json!({"metadata": {"name": name, "namespace": "n", "uid": uid},
                              "spec": {"containers": [{"name": "c"}]}});
        for (pointer, value) in extra.as_object().expect("an object") {
            let (at, key) = pointer.rsplit_once('/').expect("a pointer");
            json.pointer_mut(at).expect("a parent")[key] = value.clone();
        }
        Arc::new(serde_json::from_value(json).expect("a pod"))
    }

    fn plain(name: &str) -> Arc<Pod> {
        pod(name, name, json!({}))
    }

    fn operations(merged: &MergeResult) -> Vec<String> {
        merged
            .changes
            .iter()
            .map(|change| {
                let names: Vec<&str> = change.pods.iter().map(|pod| pod.name()).collect();
                format!("{:?} {}", change.operation, names.join(" ")).trim().to_owned()
            })
            .collect()
    }

    /// Operations of the second set after the first.
    fn after(first: Vec<Arc<Pod>>, second: Vec<Arc<Pod>>) -> Vec<String> {
        let mut store = SourceStore::new(PodSource::Api);
        store.merge(first, SEEN);
        operations(&store.merge(second, "later"))
    }

    #[test]
    fn the_first_empty_set_is_sent_once() {
        // AC-02a-5
        let mut store = SourceStore::new(PodSource::Api);
        let merged = store.merge(Vec::new(), SEEN);
        assert_eq!(operations(&merged), ["Add"]);
        assert_eq!(merged.changes[0].source, PodSource::Api);
        assert_eq!(operations(&store.merge(Vec::new(), SEEN)), Vec::<String>::new());
        let mut other = SourceStore::new(PodSource::File);
        assert_eq!(operations(&other.merge(vec![plain("a")], SEEN)), ["Add a"]);
    }

    #[test]
    fn operations_come_in_order() {
        // AC-02a-6
        let changed = pod("b", "b", json!({"/metadata/labels": {"x": "y"}}));
        assert_eq!(after(vec![plain("a"), plain("b")], vec![changed, plain("c")]), ["Remove a", "Add c", "Update b"]);
    }

    #[test]
    fn what_counts_as_which_change() {
        let status = json!({"/status": {"phase": "Running"}});
        let label = json!({"/metadata/labels": {"x": "y"}});
        let both = json!({"/metadata/labels": {"x": "y"}, "/status": {"phase": "Running"}});
        let deleted = json!({"/metadata/deletionTimestamp": "2026-01-02T03:04:05Z"});
        let local = json!({"/metadata/annotations": {ANNOTATION_SEEN: "x", ANNOTATION_SOURCE: "y"}});
        let applied = json!({"/metadata/annotations": {"kubectl.kubernetes.io/last-applied-configuration": "{}"}});
        let rest = json!({"/metadata/resourceVersion": "7", "/metadata/finalizers": ["f"], "/metadata/generation": 2});
        for (acceptance, change, expected) in [
            ("AC-02a-7", status, vec!["Reconcile a"]),
            ("AC-02a-8", both, vec!["Update a"]),
            ("", label, vec!["Update a"]),
            ("AC-02a-9", deleted, vec!["Delete a"]),
            ("", json!({"/spec/hostname": "h"}), vec!["Update a"]),
            ("", json!({"/metadata/annotations": {"k": "v"}}), vec!["Update a"]),
            ("", json!({"/metadata/deletionGracePeriodSeconds": 3}), vec!["Update a"]),
            ("", local, vec![]),
            ("applied again", applied, vec!["Update a"]),
            ("", rest, vec![]),
        ] {
            assert_eq!(after(vec![plain("a")], vec![pod("a", "a", change.clone())]), expected, "{acceptance} {change}");
        }
    }

    #[test]
    fn an_update_keeps_first_sight_and_takes_the_rest() {
        let mut store = SourceStore::new(PodSource::File);
        let first = pod(
            "a",
            "a",
            json!({"/metadata/creationTimestamp": "2026-01-01T00:00:00Z",
                                         "/metadata/annotations": {"old": "1"}}),
        );
        store.merge(vec![first], SEEN);
        let next = pod(
            "a",
            "a",
            json!({"/metadata/annotations": {"new": "2", ANNOTATION_SEEN: "forged"},
                                        "/metadata/generation": 4, "/metadata/creationTimestamp": "2027-01-01T00:00:00Z"}),
        );
        let merged = store.merge(vec![next], "later");
        let pod = &merged.changes[0].pods[0];
        assert_eq!(pod.annotation(ANNOTATION_SEEN), Some(SEEN));
        assert_eq!(pod.source(), Some(PodSource::File));
        assert_eq!((pod.annotation("old"), pod.annotation("new")), (None, Some("2")));
        assert_eq!(pod.generation(), 4);
        let created = pod.metadata.creation_timestamp.as_ref().map(|t| t.0.to_string());
        assert_eq!(created.as_deref(), Some("2026-01-01T00:00:00Z"));
    }

    #[test]
    fn a_status_change_is_sent_once() {
        let running = || pod("a", "a", json!({"/status": {"phase": "Running"}}));
        let mut store = SourceStore::new(PodSource::Api);
        store.merge(vec![plain("a")], SEEN);
        assert_eq!(operations(&store.merge(vec![running()], SEEN)), ["Reconcile a"]);
        assert_eq!(operations(&store.merge(vec![running()], SEEN)), Vec::<String>::new());
    }

    #[test]
    fn the_running_one_of_two_with_one_name_is_kept() {
        let mut store = SourceStore::new(PodSource::File);
        let (one, two) = (pod("a", "u1", json!({})), pod("a", "u2", json!({})));
        assert_eq!(operations(&store.merge(vec![two.clone()], SEEN)), ["Add a"]);
        // u1 is first in the set now, but u2 runs.
        let merged = store.merge(vec![one.clone(), two.clone()], SEEN);
        assert_eq!(operations(&merged), Vec::<String>::new());
        assert_eq!(
            merged.duplicates.iter().map(|d| d.message.as_str()).collect::<Vec<_>>(),
            ["Error validating pod a_n(u1) from file due to duplicate pod name \"a\", ignoring"]
        );
        assert_eq!(store.merge(vec![one.clone(), two.clone()], SEEN).duplicates, [], "reported once");
        assert_eq!(operations(&store.merge(vec![one.clone()], SEEN)), ["Remove a", "Add a"], "its turn comes");
        assert_eq!(store.merge(vec![one, two], SEEN).duplicates.len(), 1, "reported again after a change");
        let mut fresh = SourceStore::new(PodSource::File);
        let merged = fresh.merge(vec![pod("a", "u1", json!({})), pod("a", "u2", json!({}))], SEEN);
        assert_eq!((operations(&merged), merged.duplicates[0].pod.uid.as_str()), (vec!["Add a".to_owned()], "u2"));
    }

    #[test]
    fn one_uid_stands_for_one_pod() {
        let merged =
            SourceStore::new(PodSource::File).merge(vec![pod("a", "u", json!({})), pod("b", "u", json!({}))], SEEN);
        assert_eq!(operations(&merged), ["Add a"]);
        assert!(merged.duplicates[0].message.contains("duplicate pod UID \"u\""));
        assert_eq!(
            after(vec![pod("a", "u", json!({}))], vec![pod("b", "u", json!({}))]),
            ["Remove a", "Add b"],
            "renamed"
        );
    }

    #[test]
    fn unchanged_pods_cost_no_comparison() {
        let mut store = SourceStore::new(PodSource::File);
        let a = plain("a");
        store.merge(vec![a.clone()], SEEN);
        let before = store.pods[&PodUid::new("a")].pod.clone();
        store.merge(vec![a], SEEN);
        assert!(Arc::ptr_eq(&before, &store.pods[&PodUid::new("a")].pod));
    }
}
