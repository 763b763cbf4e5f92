//! Which pods use which objects. Pure. Spec 02b §11: references are counted per pod UID, and who
//! registers again changes only the difference.

use std::collections::{BTreeSet, HashMap};

use crate::pod::PodUid;

/// Namespace and name.
pub type Key = (String, String);

/// Who uses what.
#[derive(Clone, PartialEq, Eq, Debug, Default)]
pub struct Users {
    pods: HashMap<PodUid, BTreeSet<Key>>,
    objects: HashMap<Key, BTreeSet<PodUid>>,
}

/// What a registration changed.
#[derive(Clone, PartialEq, Eq, Debug, Default)]
pub struct Change {
    /// Objects that this pod did not use before, used by others or not.
    pub added: Vec<Key>,
    /// Objects that nobody uses any more.
    pub unused: Vec<Key>,
}

impl Users {
    /// The pod uses these, and no others.
    pub fn register(&mut self, pod: &PodUid, namespace: &str, names: BTreeSet<String>) -> Change {
        let wanted: BTreeSet<Key> = names.into_iter().map(|name| (namespace.to_owned(), name)).collect();
        let before = self.pods.get(pod).cloned().unwrap_or_default();
        let added: Vec<Key> = wanted.difference(&before).cloned().collect();
        for key in &added {
            self.objects.entry(key.clone()).or_default().insert(pod.clone());
        }
        let unused = before.difference(&wanted).filter(|key| self.leave(key, pod)).cloned().collect();
        if wanted.is_empty() {
            self.pods.remove(pod);
        } else {
            self.pods.insert(pod.clone(), wanted);
        }
        Change { added, unused }
    }

    /// The pod is gone; tells what nobody uses any more.
    pub fn unregister(&mut self, pod: &PodUid) -> Vec<Key> {
        self.register(pod, "", BTreeSet::new()).unused
    }

    /// Who uses that object.
    pub fn of(&self, key: &Key) -> impl Iterator<Item = &PodUid> {
        self.objects.get(key).into_iter().flatten()
    }

    /// Whether the pod was the last user.
    fn leave(&mut self, key: &Key, pod: &PodUid) -> bool {
        let Some(users) = self.objects.get_mut(key) else { return false };
        users.remove(pod);
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
        let mut users = Users::default();
        let mut register = |pod: &str, names: &[&str]| {
            let names = names.iter().map(|name| (*name).to_owned()).collect();
            let change = users.register(&pod.into(), "ns", names);
            let list = |keys: Vec<Key>| keys.into_iter().map(|(_, name)| name).collect::<Vec<_>>().join(" ");
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
        assert_eq!(users.of(&("ns".into(), "c".into())).map(PodUid::as_str).collect::<Vec<_>>(), ["v"]);
        assert_eq!(users.unregister(&"v".into()), [("ns".to_owned(), "c".to_owned())]);
        assert_eq!(users, Users::default(), "nothing is kept of who is gone");
    }
}
