//! Keeps the process small: code that a burst needed is unmapped as soon as the burst is over, and free pages of the heap
//! go back to the kernel when their time has come.
//!
//! Code comes from the page cache sixteen pages at a time, so a few calls bring megabytes along, and they come back for
//! a microsecond each: all that counts is not to do it while it is needed. Workers tell before they wait (a hook of
//! tokio's), so that an agent to which nothing happens is not woken for this.

use std::{
    sync::atomic::{AtomicU64, Ordering},
    time::Duration,
};

use tokio::{
    sync::Notify,
    time::{Instant, MissedTickBehavior, interval, sleep},
};
use tokio_util::sync::CancellationToken;

use berth_sys::{
    heap::{self, Used},
    program,
};

/// New pages that are worth the effort: one megabyte, each brings fifteen neighbours along.
const WORTH: u64 = 16;
/// How long nothing new must have been needed.
const CALM: Duration = Duration::from_millis(20);
/// Work since code was let go last after which that is done again, microseconds of a processor. It costs some
/// milliseconds with all that has to be mapped again: a thirtieth of all the work at most…
const WORK: u64 = 120_000;
/// … and more where the rest of the process is large already. At rest time counts, and no work.
const LITTLE_WORK: u64 = 3_000;
/// What is large without its code, in bytes: a node of some hundred pods is not.
const LARGE: u64 = 20 << 20;
/// How long after a burst what came along since is let go…
const FIRST_PAUSE: Duration = Duration::from_secs(2);
/// … and, twice as long each time, at most: what a node at rest does needs its code, too.
const LONGEST_PAUSE: Duration = Duration::from_secs(16);
/// Within which so much work is a burst; a process at rest takes longer for it.
const BURST: Duration = Duration::from_secs(4);
/// How often free pages of the heap are looked at. What is free for three seconds goes (`sys/heap.rs`), but it is seen
/// only when memory is asked for.
const PERIOD: Duration = Duration::from_secs(1);

/// Who notices that a burst has brought code along.
#[derive(Debug, Default)]
pub struct Keeper {
    /// What the process had used when code was let go last.
    page_faults: AtomicU64,
    processor: AtomicU64,
    /// What was left of the process then, in bytes.
    left: AtomicU64,
    worthwhile: Notify,
}

impl Keeper {
    /// To be called when a worker is about to wait. Takes one system call.
    pub fn before_waiting(&self) {
        if self.is_due(&heap::used(), true) {
            self.worthwhile.notify_one();
        }
    }

    /// Whether there is anything to let go; where work is the reason (`told`), whether there was so much of it since.
    fn is_due(&self, used: &Used, told: bool) -> bool {
        let work = if told { work(self.left.load(Ordering::Relaxed)) } else { 0 };
        let since = |now: u64, then: &AtomicU64| now.saturating_sub(then.load(Ordering::Relaxed));
        since(used.page_faults, &self.page_faults) >= WORTH && since(used.processor, &self.processor) >= work
    }

    /// Runs until stopped.
    pub async fn keep_small(&self, stop: CancellationToken) {
        let mut tick = interval(PERIOD);
        tick.set_missed_tick_behavior(MissedTickBehavior::Delay);
        let mut pause = Pause::after_burst(Instant::now());
        loop {
            let told = tokio::select! {
                () = stop.cancelled() => return,
                _ = tick.tick() => {
                    heap::give_back_what_rests();
                    if !pause.is_over(Instant::now()) {
                        continue;
                    }
                    false
                }
                () = self.worthwhile.notified() => true,
            };
            let went = tokio::select! {
                () = stop.cancelled() => return,
                went = self.let_go(told) => went,
            };
            pause = pause.next(told, went, Instant::now());
        }
    }

    /// Returns whether any was.
    async fn let_go(&self, told: bool) -> bool {
        until_calm().await;
        // Told twice of the same, or next to nothing came.
        if !self.is_due(&heap::used(), told) {
            return false;
        }
        program::unmap_code();
        self.left.store(program::resident(), Ordering::Relaxed);
        let used = heap::used();
        self.page_faults.store(used.page_faults, Ordering::Relaxed);
        self.processor.store(used.processor, Ordering::Relaxed);
        true
    }
}

/// When a process at rest lets code go.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
struct Pause {
    began: Instant,
    long: Duration,
}

impl Pause {
    fn after_burst(now: Instant) -> Self {
        Self { began: now, long: FIRST_PAUSE }
    }

    /// The one after this; `told` is whether work was the reason to look, `went` whether code was let go then. Several
    /// workers tell of the same work: who tells of it when code has been let go already tells of no burst.
    fn next(self, told: bool, went: bool, now: Instant) -> Self {
        if told && !went {
            return self;
        }
        if told && now - self.began < BURST {
            return Self::after_burst(now);
        }
        Self { began: now, long: (self.long * 2).min(LONGEST_PAUSE) }
    }

    fn is_over(self, now: Instant) -> bool {
        now - self.began >= self.long
    }
}

/// The work after which code is let go again, by what was left of the process without it.
fn work(left: u64) -> u64 {
    if left >= LARGE { LITTLE_WORK } else { WORK }
}

/// Waits until nothing new was needed for that long.
async fn until_calm() {
    let mut before = heap::used().page_faults;
    loop {
        sleep(CALM).await;
        let now = heap::used().page_faults;
        if now.saturating_sub(before) < WORTH {
            return;
        }
        before = now;
    }
}

#[cfg(test)]
mod tests {
    use tokio::time::timeout;

    use super::*;

    #[test]
    fn a_large_process_lets_go_sooner() {
        for (left, expected) in [(0, WORK), (LARGE - 1, WORK), (LARGE, LITTLE_WORK), (u64::MAX, LITTLE_WORK)] {
            assert_eq!(work(left), expected, "{left}");
        }
    }

    #[test]
    fn a_process_at_rest_lets_go_more_and_more_seldom() {
        let mut now = Instant::now();
        let mut pause = Pause::after_burst(now);
        // Whether work was the reason, after how many seconds, and how long the next pause is.
        for (told, after, expected) in
            [(false, 2, 4), (false, 4, 8), (true, 7, 16), (true, 12, 16), (true, 1, 2), (true, 3, 2), (true, 4, 4)]
        {
            now += Duration::from_secs(after);
            pause = pause.next(told, true, now);
            assert_eq!((pause.began, pause.long), (now, Duration::from_secs(expected)), "{told} {after}");
            assert_eq!(pause.next(true, false, now), pause, "told twice of the same");
        }
        assert_eq!(pause.next(false, false, now).long, Duration::from_secs(8), "next to nothing came");
        assert!(!pause.is_over(now + Duration::from_millis(3_999)) && pause.is_over(now + Duration::from_secs(4)));
    }

    #[test]
    fn who_tells_of_work_after_code_was_let_go_tells_of_no_more_than_came_since() {
        let keeper = Keeper::default();
        keeper.page_faults.store(1_000, Ordering::Relaxed);
        keeper.processor.store(7_000_000, Ordering::Relaxed);
        for (page_faults, work, due, due_when_told) in [
            (WORTH, WORK, true, true),
            (WORTH, WORK - 1, true, false),
            (WORTH, LITTLE_WORK, true, false),
            (WORTH - 1, WORK, false, false),
        ] {
            let used = Used { page_faults: 1_000 + page_faults, processor: 7_000_000 + work };
            assert_eq!(
                (keeper.is_due(&used, false), keeper.is_due(&used, true)),
                (due, due_when_told),
                "{page_faults} {work}"
            );
        }
    }

    #[tokio::test]
    async fn a_worker_that_waits_tells_of_a_burst_and_of_nothing_else() {
        let keeper = Keeper::default();
        let told = || timeout(Duration::from_millis(1), keeper.worthwhile.notified());
        while heap::used().processor < WORK || heap::used().page_faults < WORTH {
            std::hint::black_box(vec![1_u8; 1 << 20]);
        }
        keeper.before_waiting();
        assert!(told().await.is_ok());
        assert!(told().await.is_err(), "once");
        for (name, fresh) in [("nothing new", &keeper.page_faults), ("little work", &keeper.processor)] {
            fresh.store(u64::MAX, Ordering::Relaxed);
            keeper.before_waiting();
            assert!(told().await.is_err(), "{name}");
            fresh.store(0, Ordering::Relaxed);
        }
    }
}
