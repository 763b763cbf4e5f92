//! Keeps the process small: after the start and after bursts, free memory goes back to the
//! kernel, and code that is not needed any more is unmapped.
//!
//! The two have different prices. Code comes back from the page cache sixteen pages at a time, two hundred faults of
//! a microsecond if all of it is needed, so it is let go whenever no burst is under way. Each page of the heap has to
//! be zeroed again, which costs a page of statistics milliseconds; the heap waits until nobody seems to be asking.

use std::time::Duration;

use tokio::time::{MissedTickBehavior, interval};
use tokio_util::sync::CancellationToken;

use crate::sys::{heap, program};

/// How often the look is taken; it is one system call.
const PERIOD: Duration = Duration::from_secs(1);
/// Code is let go after a period with fewer new pages than `calm`, if at least `worth` came since the last time. One
/// page of code brings fifteen neighbours along, so these are 4 MB. A node of hundreds of pods is never calmer than
/// this: some pod is looked at in each second.
const CODE: Habit = Habit { calm: 512, patience: 1, worth: 64 };
/// Code that comes back after it was let go is calm enough for the heap.
const HEAP: Habit = Habit { calm: 256, patience: 6, worth: 512 };

/// Runs until stopped.
pub async fn keep_small(stop: CancellationToken) {
    let mut tick = interval(PERIOD);
    tick.set_missed_tick_behavior(MissedTickBehavior::Delay);
    // Not zero pages ago: the start itself leaves something to give back.
    let (mut of_code, mut of_heap) = (Decision::of(CODE), Decision::of(HEAP));
    loop {
        tokio::select! {
            () = stop.cancelled() => return,
            _ = tick.tick() => {}
        }
        let faults = heap::page_faults();
        if of_heap.look(faults) {
            heap::give_back();
        }
        if of_code.look(faults) {
            program::unmap_code();
        }
    }
}

/// When something is given back.
#[derive(Clone, Copy, Debug)]
struct Habit {
    /// Fewer new pages than this within a period are calm.
    calm: u64,
    /// Calm periods in a row that are waited for.
    patience: u32,
    /// New pages since the last time that are worth the effort.
    worth: u64,
}

/// What a habit has seen.
#[derive(Debug)]
struct Decision {
    habit: Habit,
    /// Page faults at the last look.
    looked: u64,
    /// Page faults when it was given back last.
    given: u64,
    /// Calm periods in a row.
    calm: u32,
}

impl Decision {
    fn of(habit: Habit) -> Self {
        Self { habit, looked: 0, given: 0, calm: 0 }
    }

    /// Whether to give back now: enough was touched since the last time, and it has been calm for long enough.
    fn look(&mut self, faults: u64) -> bool {
        let is_calm = faults.saturating_sub(self.looked) < self.habit.calm;
        self.calm = if is_calm { self.calm.saturating_add(1) } else { 0 };
        self.looked = faults;
        let due = self.calm >= self.habit.patience && faults.saturating_sub(self.given) >= self.habit.worth;
        if due {
            self.given = faults;
        }
        due
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn given(habit: Habit, looks: &[u64]) -> Vec<u64> {
        let mut decided = Decision::of(habit);
        looks.iter().copied().filter(|faults| decided.look(*faults)).collect()
    }

    #[test]
    fn code_is_let_go_once_at_the_first_calm_look_after_each_burst() {
        let looks = [1_000, 1_010, 1_020, 5_000, 9_000, 9_001, 9_002, 9_030, 9_060, 9_090, 9_120, 9_150, 9_400, 9_700];
        assert_eq!(given(CODE, &looks), [1_010, 9_001, 9_090, 9_400, 9_700]);
    }

    #[test]
    fn the_heap_waits_for_six_calm_looks_and_code_that_comes_back_does_not_disturb_it() {
        let calm = |since: u64| (0..8).map(move |look| since + 100 * look);
        let looks: Vec<u64> = calm(4_000).chain([6_000, 6_100]).chain(calm(8_000)).collect();
        assert_eq!(given(HEAP, &looks), [4_600, 8_600]);
    }
}
