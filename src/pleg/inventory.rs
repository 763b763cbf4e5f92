//! Inventory of observed sandboxes and containers, compared with each runtime list. Pure.
//!
//! A list of a quiet node costs one lookup per object and no allocation. Only observations update the
//! inventory, so a pod whose query failed differs from the next list again and is queried again.

use std::collections::{HashMap, HashSet};

use berth_types::{
    PodUid,
    observation::{ContainerState, ObservedPod, SandboxState},
};

/// State of a sandbox or container.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum ObjectState {
    /// Sandbox with its CRI state.
    Sandbox(SandboxState),
    /// Container with its CRI state.
    Container(ContainerState),
}

impl ObjectState {
    /// Whether it was started and has not ended.
    pub fn is_up(self) -> bool {
        matches!(self, Self::Sandbox(SandboxState::Ready) | Self::Container(ContainerState::Running))
    }
}

/// One object of a list.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct ListedObject<'a> {
    /// The runtime's ID.
    pub id: &'a str,
    /// UID of the pod it belongs to.
    pub pod: &'a str,
    /// State of the object.
    pub state: ObjectState,
}

/// Totals for the metrics.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct Totals {
    /// Pods with at least one ready sandbox.
    pub running_pods: i64,
    /// Number of containers created, running, exited, unknown.
    pub containers: [i64; 4],
}

#[derive(Debug)]
struct KnownObject {
    pod: PodUid,
    state: ObjectState,
    audit: u64,
}

/// Objects by ID; see the module documentation.
#[derive(Debug, Default)]
pub struct Inventory {
    objects: HashMap<Box<str>, KnownObject>,
    totals: Totals,
    audit: u64,
}

impl Inventory {
    /// Replaces the objects of one pod by those of a new observation.
    pub fn replace(&mut self, old: Option<&ObservedPod>, new: &ObservedPod) {
        if let Some(old) = old {
            for (id, _) in objects(old) {
                self.objects.remove(id);
            }
            self.count(old, -1);
        }
        for (id, state) in objects(new) {
            let known = KnownObject { pod: new.id.uid.clone(), state, audit: self.audit };
            self.objects.insert(id.into(), known);
        }
        self.count(new, 1);
    }

    /// The pod an object belongs to.
    pub fn pod_of(&self, object: &str) -> Option<&PodUid> {
        self.objects.get(object).map(|k| &k.pod)
    }

    /// The state of an object.
    pub fn state_of(&self, object: &str) -> Option<ObjectState> {
        self.objects.get(object).map(|k| k.state)
    }

    /// Totals for the metrics.
    pub fn totals(&self) -> Totals {
        self.totals
    }

    /// The pods for which a complete list differs from the last observations.
    pub fn audit<'a>(&mut self, list: impl Iterator<Item = ListedObject<'a>>) -> HashSet<PodUid> {
        self.audit += 1;
        let mut differing = HashSet::new();
        let mut matched = 0;
        for item in list {
            match self.objects.get_mut(item.id) {
                Some(known) if known.pod.as_str() == item.pod => {
                    if known.audit != self.audit {
                        known.audit = self.audit;
                        matched += 1;
                    }
                    if known.state != item.state && !differing.contains(item.pod) {
                        differing.insert(known.pod.clone());
                    }
                }
                _ if differing.contains(item.pod) => {}
                _ => {
                    differing.insert(PodUid::from(item.pod));
                }
            }
        }
        if matched < self.objects.len() {
            let vanished = self.objects.values().filter(|k| k.audit != self.audit);
            differing.extend(vanished.map(|k| k.pod.clone()));
        }
        differing
    }

    fn count(&mut self, pod: &ObservedPod, by: i64) {
        if pod.sandboxes.iter().any(|s| s.state == SandboxState::Ready) {
            self.totals.running_pods += by;
        }
        for container in &pod.containers {
            let [created, running, exited, unknown] = &mut self.totals.containers;
            *match container.state {
                ContainerState::Created => created,
                ContainerState::Running => running,
                ContainerState::Exited => exited,
                ContainerState::Unknown => unknown,
            } += by;
        }
    }
}

fn objects(pod: &ObservedPod) -> impl Iterator<Item = (&str, ObjectState)> {
    let sandboxes = pod.sandboxes.iter().map(|s| (s.id.as_str(), ObjectState::Sandbox(s.state)));
    sandboxes.chain(pod.containers.iter().map(|c| (c.id.as_str(), ObjectState::Container(c.state))))
}

#[cfg(test)]
mod tests {
    use ContainerState::{Exited, Running};

    use super::*;
    use crate::pleg::cri_conversions::fixtures::{container, pod, sandbox};

    fn running(id: &'static str, uid: &'static str) -> ListedObject<'static> {
        ListedObject { id, pod: uid, state: ObjectState::Container(Running) }
    }

    fn audited(inventory: &mut Inventory, list: &[ListedObject<'static>]) -> Vec<String> {
        let mut found: Vec<String> = inventory.audit(list.iter().copied()).iter().map(ToString::to_string).collect();
        found.sort();
        found
    }

    #[test]
    fn only_pods_that_differ_are_marked() {
        let mut inventory = Inventory::default();
        let mut a = pod([container("a1", "main", Running)]);
        a.id.uid = "a".into();
        let mut b = pod([container("b1", "main", Running)]);
        b.id.uid = "b".into();
        inventory.replace(None, &a);
        inventory.replace(None, &b);

        let same = [running("a1", "a"), running("b1", "b")];
        assert!(audited(&mut inventory, &same).is_empty(), "nothing changed");
        assert_eq!(audited(&mut inventory, &same[..1]), ["b"], "vanished");
        assert_eq!(audited(&mut inventory, &same[..1]), ["b"], "until a list reports it");
        let exited = ListedObject { state: ObjectState::Container(Exited), ..same[1] };
        assert_eq!(audited(&mut inventory, &[same[0], exited]), ["b"], "another state");
        assert_eq!(audited(&mut inventory, &[same[0], same[1], running("c1", "c")]), ["c"], "new");
    }

    #[test]
    fn totals_follow_the_observations() {
        // AC-08-7: a state that empties goes back to 0.
        let mut inventory = Inventory::default();
        let mut first = pod([container("c1", "main", Running), container("c2", "side", Exited)]);
        first.sandboxes = vec![sandbox("s1", 0, SandboxState::Ready), sandbox("s2", 1, SandboxState::Ready)];
        inventory.replace(None, &first);
        assert_eq!(inventory.totals(), Totals { running_pods: 1, containers: [0, 1, 1, 0] });
        let second = pod([container("c1", "main", Running)]);
        inventory.replace(Some(&first), &second);
        assert_eq!(inventory.totals(), Totals { running_pods: 0, containers: [0, 1, 0, 0] });
        assert_eq!(inventory.pod_of("c2"), None);
        assert_eq!(inventory.state_of("c1"), Some(ObjectState::Container(Running)));
    }
}
