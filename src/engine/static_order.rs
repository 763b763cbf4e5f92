//! Start order of static pods with the same full name: one at a time, first come, first served.
//!
//! Pure. A changed manifest is a new UID under the same full name; it starts only after the old pod is
//! fully terminated. Implements spec 02a §9.3.

use std::collections::{HashMap, VecDeque};

use berth_types::{PodFullName, PodUid};

/// Queues of waiting static pods by full name.
#[derive(Debug, Default)]
pub struct StaticOrder {
    names: HashMap<PodFullName, StartQueue>,
}

#[derive(Debug, Default)]
struct StartQueue {
    started: Option<PodUid>,
    waiting: VecDeque<PodUid>,
}

impl StaticOrder {
    /// Requests the start of a static pod. Returns true if it may start now; otherwise it is queued.
    pub fn enter(&mut self, name: &PodFullName, uid: &PodUid) -> bool {
        let line = self.names.entry(name.clone()).or_default();
        if line.started.as_ref() == Some(uid) {
            return true;
        }
        if line.started.is_none() && line.waiting.is_empty() {
            line.started = Some(uid.clone());
            return true;
        }
        if !line.waiting.contains(uid) {
            line.waiting.push_back(uid.clone());
        }
        false
    }

    /// Removes a pod that is terminated or was stopped before it started. Returns the UID that may
    /// start next.
    pub fn leave(&mut self, name: &PodFullName, uid: &PodUid) -> Option<PodUid> {
        let line = self.names.get_mut(name)?;
        line.waiting.retain(|waiting| waiting != uid);
        if line.started.as_ref() == Some(uid) {
            line.started = None;
        }
        if line.started.is_none() {
            line.started = line.waiting.pop_front();
            let next = line.started.clone();
            if next.is_none() {
                self.names.remove(name);
            }
            return next;
        }
        None
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn one_at_a_time_in_order() {
        // AC-02a-16
        let name = PodFullName::parse("web_default").expect("a name");
        let [a, b, c] = ["a", "b", "c"].map(PodUid::from);
        let mut order = StaticOrder::default();
        assert!(order.enter(&name, &a));
        assert!(order.enter(&name, &a), "again is the same");
        assert!(!order.enter(&name, &b) && !order.enter(&name, &c) && !order.enter(&name, &b));
        assert_eq!(order.leave(&name, &b), None, "who leaves the line lets nobody in");
        assert_eq!(order.leave(&name, &a), Some(c.clone()));
        assert!(!order.enter(&name, &a));
        assert_eq!(order.leave(&name, &c), Some(a.clone()));
        assert_eq!(order.leave(&name, &a), None);
        assert!(order.names.is_empty(), "nothing is kept");
    }
}
