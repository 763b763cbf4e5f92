//! Reference counts of ConfigMaps and Secrets per pod. Pure.
//!
//! References are counted per pod UID; a repeated registration changes only the difference. Implements spec 02b §11:
//! reference counting.

use std::{
    collections::{BTreeSet, HashMap},
    sync::Arc,
};

use berth_types::PodUid;

/// Namespace and name in one string, shared by all clones.
#[derive(Clone, PartialEq, Eq, PartialOrd, Ord, Hash, Debug)]
pub struct ObjectKey(Arc<str>);

impl ObjectKey {
    /// Returns the key of an object.
    pub fn new(namespace: &str, name: &str) -> Self {
        Self(format!("{namespace}/{name}").into())
    }

    /// Namespace of the object.
    pub fn namespace(&self) -> &str {
        self.parts().0
    }

    /// Name of the object.
    pub fn name(&self) -> &str {
        self.parts().1
    }

    fn parts(&self) -> (&str, &str) {
        // A namespace contains no slash.
        self.0.split_once('/').unwrap_or_default()
    }
}

/// References from pods to objects, in both directions.
#[derive(Clone, PartialEq, Eq, Debug, Default)]
pub struct ReferenceCounts {
    /// Keys are sorted.
    pods: HashMap<PodUid, Box<[ObjectKey]>>,
    objects: HashMap<ObjectKey, Vec<PodUid>>,
}

/// Difference that a registration made.
#[derive(Clone, PartialEq, Eq, Debug, Default)]
pub struct ReferenceChange {
    /// Objects that this pod did not reference before, whether or not other pods do.
    pub added: Vec<ObjectKey>,
    /// Objects without references.
    pub unused: Vec<ObjectKey>,
}

impl ReferenceCounts {
    /// Replaces the references of a pod.
    pub fn register(&mut self, pod: &PodUid, namespace: &str, names: BTreeSet<String>) -> ReferenceChange {
        let wanted: Box<[ObjectKey]> = names.iter().map(|name| self.known(ObjectKey::new(namespace, name))).collect();
        let before = match wanted.is_empty() {
            true => self.pods.remove(pod),
            false => self.pods.insert(pod.clone(), wanted.clone()),
        };
        let before = before.unwrap_or_default();
        let added: Vec<ObjectKey> = wanted.iter().filter(|key| before.binary_search(key).is_err()).cloned().collect();
        for key in &added {
            self.objects.entry(key.clone()).or_insert_with(|| Vec::with_capacity(1)).push(pod.clone());
        }
        let left = before.iter().filter(|key| wanted.binary_search(key).is_err());
        let unused = left.filter(|key| self.leave(key, pod)).cloned().collect();
        ReferenceChange { added, unused }
    }

    /// Removes the references of a pod; returns the objects left without references.
    pub fn unregister(&mut self, pod: &PodUid) -> Vec<ObjectKey> {
        self.register(pod, "", BTreeSet::new()).unused
    }

    /// Pods that reference an object.
    pub fn of(&self, key: &ObjectKey) -> impl Iterator<Item = &PodUid> {
        self.objects.get(key).into_iter().flatten()
    }

    /// Returns the existing shared key if there is one, to save memory.
    fn known(&self, key: ObjectKey) -> ObjectKey {
        self.objects.get_key_value(&key).map_or(key, |(known, _)| known.clone())
    }

    /// Removes a reference; returns whether it was the last.
    fn leave(&mut self, key: &ObjectKey, pod: &PodUid) -> bool {
        let Some(users) = self.objects.get_mut(key) else { return false };
        users.retain(|user| user != pod);
        let is_last = users.is_empty();
        if is_last {
            self.objects.remove(key);
        }
        is_last
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn objects_go_with_their_last_user() {
        let mut users = ReferenceCounts::default();
        let mut register = |pod: &str, names: &[&str]| {
            let names = names.iter().map(|name| (*name).to_owned()).collect();
            let change = users.register(&pod.into(), "ns", names);
            let list = |keys: Vec<ObjectKey>| keys.iter().map(ObjectKey::name).collect::<Vec<_>>().join(" ");
            (list(change.added), list(change.unused))
        };
        for (pod, names, added, unused) in [
            ("u", &["a", "b"][..], "a b", ""),
            ("u", &["a", "b"], "", ""),
            ("v", &["b", "c"], "b c", ""),
            ("u", &["a", "d"], "d", ""),
            ("v", &["c"], "", "b"),
            ("u", &[], "", "a d"),
            ("v", &["c"], "", ""),
        ] {
            assert_eq!(register(pod, names), (added.to_owned(), unused.to_owned()), "{pod} {names:?}");
        }
        assert_eq!(users.of(&ObjectKey::new("ns", "c")).map(PodUid::as_str).collect::<Vec<_>>(), ["v"]);
        assert_eq!(users.unregister(&"v".into()), [ObjectKey::new("ns", "c")]);
        assert_eq!(users, ReferenceCounts::default(), "no entry remains for an unregistered pod");
    }

    #[test]
    fn a_key_is_kept_once() {
        let mut users = ReferenceCounts::default();
        let mut register = |pod: &str| users.register(&pod.into(), "ns", ["a".to_owned()].into()).added;
        let (first, second) = (register("u"), register("v"));
        assert!(Arc::ptr_eq(&first[0].0, &second[0].0));
        assert_eq!((first[0].namespace(), first[0].name()), ("ns", "a"));
    }
}
