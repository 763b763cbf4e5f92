//! Cumulative container log counters of all pods, including deleted ones.
//! Implements spec 09 §13.

use std::{
    collections::BTreeSet,
    sync::{Mutex, MutexGuard, PoisonError},
};

use super::store::Layout;
use berth_shim::log_tally::LogTally;

/// Sums over all pods. A deleted pod leaves its share in the sum.
#[derive(Debug, Default)]
pub struct LogTotals {
    gone: Mutex<DeletedPods>,
}

#[derive(Debug, Default)]
struct DeletedPods {
    sum: LogTally,
    /// Pods that are already in the sum while their directories may still exist.
    pods: BTreeSet<String>,
}

impl LogTotals {
    fn gone(&self) -> MutexGuard<'_, DeletedPods> {
        self.gone.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Adds a pod that is about to be deleted to the sum; its shim has ended. Idempotent per pod. Blocking: reads a
    /// file on a tmpfs.
    pub fn add_deleted_pod(&self, layout: &Layout, pod: &str) {
        let mut gone = self.gone();
        if gone.pods.insert(pod.to_owned()) {
            gone.sum = gone.sum.plus(LogTally::read(&layout.shim(pod)));
        }
    }

    /// The sum over deleted pods and `pods`, the existing ones. Blocking: reads a file on a tmpfs per pod.
    pub fn sum<'a>(&self, layout: &Layout, pods: impl Iterator<Item = &'a str>) -> LogTally {
        let mut gone = self.gone();
        let pods: BTreeSet<&str> = pods.collect();
        let here = pods.iter().filter(|pod| !gone.pods.contains(**pod)).map(|pod| LogTally::read(&layout.shim(pod)));
        let sum = here.fold(gone.sum, LogTally::plus);
        // Pod ids are never reused: ids that no longer exist need not be kept.
        gone.pods.retain(|pod| pods.contains(pod.as_str()));
        sum
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use berth_shim::log_tally::TallyWriter;

    #[test]
    fn a_pod_that_goes_leaves_its_part() {
        let folder = tempfile::tempdir().expect("a folder");
        let layout = Layout { root: folder.path().join("r"), state: folder.path().join("s") };
        let write = |pod: &str, bytes| {
            std::fs::create_dir_all(layout.shim(pod)).expect("made");
            let tally = LogTally { bytes, dropped: 1, errors: 1 };
            TallyWriter::default().publish(&layout.shim(pod), tally).expect("received");
        };
        let logs = LogTotals::default();
        let sum = |pods: &[&str]| logs.sum(&layout, pods.iter().copied()).bytes;
        assert_eq!(sum(&["a", "b"]), 0, "no tally is published");
        write("a", 5);
        write("b", 7);
        assert_eq!(sum(&["a", "b"]), 12);
        logs.add_deleted_pod(&layout, "a");
        assert_eq!(sum(&["a", "b"]), 12, "it is still there");
        logs.add_deleted_pod(&layout, "a");
        std::fs::remove_dir_all(layout.shim("a")).expect("deleted");
        assert_eq!((sum(&["b"]), sum(&["b"])), (12, 12));
    }
}
