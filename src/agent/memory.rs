//! Keeps the process small: after the start and after bursts, free memory goes back to the
//! kernel, and code that is not needed any more is unmapped.

use std::time::Duration;

use tokio::time::{MissedTickBehavior, interval};
use tokio_util::sync::CancellationToken;

use crate::sys::{heap, program};

/// How often the look is taken; it is one system call.
const PERIOD: Duration = Duration::from_secs(3);
/// Fewer new pages than this within a period are calm.
const CALM: u64 = 32;
/// New pages that are worth the effort. One of code brings fifteen neighbours along, so these are 4 MB.
const WORTH: u64 = 64;

/// Runs until stopped.
pub async fn keep_small(stop: CancellationToken) {
    let mut tick = interval(PERIOD);
    tick.set_missed_tick_behavior(MissedTickBehavior::Delay);
    // Not zero pages ago: the start itself leaves something to give back.
    let mut decided = Decision::default();
    loop {
        tokio::select! {
            () = stop.cancelled() => return,
            _ = tick.tick() => {}
        }
        if decided.look(heap::page_faults()) {
            heap::give_back();
            program::unmap_code();
        }
    }
}

/// Page faults at the last look, and at the last giving back.
#[derive(Debug, Default)]
struct Decision {
    looked: u64,
    given: u64,
}

impl Decision {
    /// Whether to give back now: enough was touched since the last time, and it is calm.
    fn look(&mut self, faults: u64) -> bool {
        let is_calm = faults.saturating_sub(self.looked) < CALM;
        self.looked = faults;
        let due = is_calm && faults.saturating_sub(self.given) >= WORTH;
        if due {
            self.given = faults;
        }
        due
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn memory_is_given_back_once_after_each_burst() {
        let mut decided = Decision::default();
        let looks = [1_000, 1_010, 1_020, 5_000, 9_000, 9_001, 9_002, 9_030, 9_060, 9_090, 9_120, 9_150];
        let given: Vec<u64> = looks.into_iter().filter(|faults| decided.look(*faults)).collect();
        assert_eq!(given, [1_010, 9_001, 9_090]);
    }
}
