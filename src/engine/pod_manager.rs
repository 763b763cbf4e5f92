//! Pod manager: the desired pods of this node and their mirror pods.
//!
//! Owned by the sync loop alone; all other components read the snapshot that it publishes. Implements
//! spec 02a §5.

use std::{collections::HashMap, sync::Arc};

use berth_status::previous_status::is_active;
use berth_types::{Pod, PodFullName, PodUid, api, spec::ANNOTATION_MIRROR};

/// Desired pods and mirror pods, by UID and by full name.
#[derive(Debug, Default)]
pub struct PodManager {
    pods: HashMap<PodUid, Arc<Pod>>,
    by_name: HashMap<PodFullName, PodUid>,
    mirrors: HashMap<PodUid, Arc<Pod>>,
    mirror_by_name: HashMap<PodFullName, PodUid>,
}

impl PodManager {
    /// Adds or replaces a pod or mirror pod.
    pub fn upsert(&mut self, pod: Arc<Pod>) {
        let (pods, names) = if pod.is_mirror() {
            (&mut self.mirrors, &mut self.mirror_by_name)
        } else {
            (&mut self.pods, &mut self.by_name)
        };
        names.insert(pod.full_name(), pod.uid().clone());
        pods.insert(pod.uid().clone(), pod);
    }

    /// Removes a pod or mirror pod; the name index keeps a newer pod of the same name.
    pub fn remove(&mut self, pod: &Pod) {
        let (pods, names) = if pod.is_mirror() {
            (&mut self.mirrors, &mut self.mirror_by_name)
        } else {
            (&mut self.pods, &mut self.by_name)
        };
        pods.remove(pod.uid());
        let name = pod.full_name();
        if names.get(&name) == Some(pod.uid()) {
            names.remove(&name);
        }
    }

    /// The pod of that UID (mirror pods excluded).
    pub fn pod(&self, uid: &PodUid) -> Option<&Arc<Pod>> {
        self.pods.get(uid)
    }

    /// Whether a pod of that UID is desired.
    pub fn contains(&self, uid: &PodUid) -> bool {
        self.pods.contains_key(uid)
    }

    /// All pods, mirror pods excluded, unordered.
    pub fn pods(&self) -> impl Iterator<Item = &Arc<Pod>> {
        self.pods.values()
    }

    /// All mirror pods, unordered.
    pub fn mirrors(&self) -> impl Iterator<Item = &Arc<Pod>> {
        self.mirrors.values()
    }

    /// The status of a static pod's mirror pod, if that has started and not ended; `None` for other
    /// pods and for mirror pods of an earlier version of the manifest.
    pub fn mirror_status(&self, pod: &Pod) -> Option<&api::PodStatus> {
        let mirror = self.mirrors.get(self.mirror_by_name.get(&pod.full_name())?)?;
        let is_own = pod.is_static() && mirror.annotation(ANNOTATION_MIRROR) == Some(pod.uid().as_str());
        mirror.status.as_deref().filter(|status| is_own && is_active(status))
    }

    /// The static pod of a mirror pod.
    pub fn pod_of_mirror(&self, mirror: &Pod) -> Option<&Arc<Pod>> {
        self.pods.get(self.by_name.get(&mirror.full_name())?)
    }
}

#[cfg(test)]
mod tests {
    use serde_json::{Value, json};

    use super::*;

    fn pod(name: &str, uid: &str, mirror: bool) -> Arc<Pod> {
        let annotations = if mirror { json!({"kubernetes.io/config.mirror": ""}) } else { json!({}) };
        object(json!({"name": name, "namespace": "n", "uid": uid, "annotations": annotations}), json!({}))
    }

    fn object(metadata: Value, status: Value) -> Arc<Pod> {
        let object = json!({"metadata": metadata, "spec": {"containers": []}, "status": status});
        Arc::new(Pod::new(serde_json::from_value(object).expect("a pod")).expect("complete"))
    }

    #[test]
    fn mirrors_and_pods_find_each_other() {
        let mut manager = PodManager::default();
        let (web, mirror) = (pod("web", "u1", false), pod("web", "m1", true));
        manager.upsert(web.clone());
        manager.upsert(mirror.clone());
        assert_eq!(manager.pod_of_mirror(&mirror), Some(&web));
        assert_eq!((manager.pods().count(), manager.mirrors().count()), (1, 1));
        manager.remove(&mirror);
        assert_eq!((manager.pods().count(), manager.mirrors().count()), (1, 0));
    }

    #[test]
    fn a_mirror_status_counts_for_its_own_running_pod_only() {
        let of = |hash: &str, status: Value| {
            let annotations = json!({"kubernetes.io/config.mirror": hash});
            let metadata = json!({"name": "web", "namespace": "n", "uid": "m", "annotations": annotations});
            object(metadata, status)
        };
        let running = json!({"phase": "Running", "startTime": "2026-01-01T00:00:00Z"});
        let ended = json!({"phase": "Failed", "startTime": "2026-01-01T00:00:00Z"});
        let annotations = json!({"kubernetes.io/config.source": "file"});
        let web = object(json!({"name": "web", "namespace": "n", "uid": "u1", "annotations": annotations}), json!({}));
        for (case, mirror, expected) in [
            ("its own", of("u1", running.clone()), true),
            ("of the manifest before", of("u0", running), false),
            ("its own, just made", of("u1", json!({"phase": "Pending"})), false),
            ("its own, of a life that ended", of("u1", ended), false),
        ] {
            let mut manager = PodManager::default();
            manager.upsert(web.clone());
            assert!(manager.mirror_status(&web).is_none(), "no mirror yet");
            manager.upsert(mirror);
            assert_eq!(manager.mirror_status(&web).is_some(), expected, "{case}");
        }
    }

    #[test]
    fn a_name_stays_with_the_newer_pod() {
        let mut manager = PodManager::default();
        let (old, new) = (pod("web", "u1", false), pod("web", "u2", false));
        manager.upsert(old.clone());
        manager.upsert(new.clone());
        manager.remove(&old);
        assert_eq!(manager.pod_of_mirror(&pod("web", "m", true)), Some(&new));
    }
}
