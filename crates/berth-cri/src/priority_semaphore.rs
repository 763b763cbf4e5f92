//! Priority semaphore that limits concurrent heavy CRI calls.
//!
//! Creating a sandbox or starting a container costs the runtime processes, mounts, and database writes. A hundred
//! concurrent calls finish later than eight at a time, and none finishes early; therefore a burst passes a semaphore
//! with few permits, pods closest to completion first. A long call releases its permit while it continues: a hung call
//! delays others by at most [`HOLD`].

use std::{
    collections::VecDeque,
    sync::{Arc, Mutex, MutexGuard, PoisonError},
    time::Duration,
};

use tokio::{sync::oneshot, time::timeout};

/// Maximum time that a call keeps its permit.
pub(super) const HOLD: Duration = Duration::from_secs(1);
/// Permits per CPU: a runtime waits for disks and the kernel more than it computes.
const PER_PROCESSOR: usize = 4;
/// Minimum number of permits.
const LEAST: usize = 4;

/// Priority of a call; calls that complete a pod precede calls that begin another.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum Priority {
    /// Starts a created container.
    Start = 0,
    /// Creates a container in an existing sandbox.
    Create = 1,
    /// Creates a sandbox.
    Sandbox = 2,
}

const RANKS: usize = 3;

/// Priority semaphore. Cheap to clone.
#[derive(Clone)]
pub(super) struct PrioritySemaphore(Arc<Mutex<Queue>>);

struct Queue {
    free: usize,
    waiting: [VecDeque<oneshot::Sender<Permit>>; RANKS],
}

/// Permit; released when dropped.
struct Permit(Option<PrioritySemaphore>);

impl PrioritySemaphore {
    /// Creates a semaphore sized for this machine.
    pub(super) fn of_machine() -> Self {
        let processors = std::thread::available_parallelism().map_or(1, std::num::NonZero::get);
        Self::new((processors * PER_PROCESSOR).max(LEAST))
    }

    fn new(places: usize) -> Self {
        Self(Arc::new(Mutex::new(Queue { free: places.max(1), waiting: Default::default() })))
    }

    /// Runs the work once a permit is available. Dropping the future releases the permit or the position in the queue.
    /// The work is created only then: its future is large, and many may wait.
    pub(super) async fn pass<F: Future>(&self, rank: Priority, work: impl FnOnce() -> F) -> F::Output {
        let place = self.place(rank).await;
        let mut work = Box::pin(work());
        if let Ok(done) = timeout(HOLD, work.as_mut()).await {
            return done;
        }
        drop(place);
        work.await
    }

    async fn place(&self, rank: Priority) -> Permit {
        let turn = {
            let mut queue = self.lock();
            if queue.free > 0 {
                queue.free -= 1;
                return Permit(Some(self.clone()));
            }
            let (give, turn) = oneshot::channel();
            queue.waiting[rank as usize].push_back(give);
            turn
        };
        // The queue keeps the sender until it grants a permit, and `self` keeps the queue alive.
        turn.await.unwrap_or(Permit(None))
    }

    /// Passes the permit to the next waiter of the highest priority, or returns it to the semaphore.
    fn release(&self) {
        loop {
            let next = {
                let mut queue = self.lock();
                let next = queue.waiting.iter_mut().find_map(VecDeque::pop_front);
                if next.is_none() {
                    queue.free += 1;
                }
                next
            };
            let Some(next) = next else { return };
            match next.send(Permit(Some(self.clone()))) {
                Ok(()) => return,
                // That waiter was dropped; the permit goes to the next one.
                Err(mut place) => place.0 = None,
            }
        }
    }

    fn lock(&self) -> MutexGuard<'_, Queue> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Drop for Permit {
    fn drop(&mut self) {
        if let Some(gate) = self.0.take() {
            gate.release();
        }
    }
}

#[cfg(test)]
mod tests {
    use std::sync::{
        Mutex,
        atomic::{AtomicUsize, Ordering},
    };

    use futures::FutureExt;
    use tokio::time::{Instant, sleep};

    use super::*;

    #[tokio::test(start_paused = true)]
    async fn no_more_than_the_places_at_once_and_the_nearly_done_first() {
        let gate = PrioritySemaphore::new(1);
        let (busy, most, order) = (AtomicUsize::new(0), AtomicUsize::new(0), Mutex::new(Vec::new()));
        let ranks = [
            Priority::Sandbox,
            Priority::Sandbox,
            Priority::Sandbox,
            Priority::Create,
            Priority::Start,
            Priority::Sandbox,
        ];
        let works = ranks.into_iter().enumerate().map(|(i, rank)| {
            let (gate, busy, most, order) = (&gate, &busy, &most, &order);
            async move {
                let work = async {
                    most.fetch_max(busy.fetch_add(1, Ordering::SeqCst) + 1, Ordering::SeqCst);
                    order.lock().expect("no panic").push(i);
                    sleep(Duration::from_millis(10)).await;
                    busy.fetch_sub(1, Ordering::SeqCst);
                };
                gate.pass(rank, || work).await;
            }
        });
        futures::future::join_all(works).await;
        assert_eq!(most.into_inner(), 1);
        assert_eq!(order.into_inner().expect("no panic"), [0, 4, 3, 1, 2, 5]);
    }

    #[tokio::test(start_paused = true)]
    async fn a_hung_call_keeps_its_place_for_a_second_only() {
        let gate = PrioritySemaphore::new(1);
        let hung = gate.pass(Priority::Sandbox, std::future::pending::<()>);
        let began = Instant::now();
        let next = gate.pass(Priority::Sandbox, || async { began.elapsed() });
        tokio::select! {
            biased;
            () = hung => unreachable!(),
            waited = next => assert_eq!(waited, HOLD),
        }
    }

    #[tokio::test(start_paused = true)]
    async fn who_gives_up_takes_no_place_along() {
        let gate = PrioritySemaphore::new(1);
        let mut first = Box::pin(gate.pass(Priority::Start, || sleep(Duration::from_millis(10))));
        assert!(first.as_mut().now_or_never().is_none(), "has the place");
        let mut given_up = Box::pin(gate.pass(Priority::Start, || async {}));
        assert!(given_up.as_mut().now_or_never().is_none(), "waits");
        let mut later = Box::pin(gate.pass(Priority::Start, || async {}));
        assert!(later.as_mut().now_or_never().is_none(), "waits");
        drop(given_up);
        first.await;
        later.await;
        assert_eq!(gate.lock().free, 1);
    }

    #[tokio::test(start_paused = true)]
    async fn a_place_given_to_one_that_leaves_goes_on() {
        let gate = PrioritySemaphore::new(1);
        let first = gate.place(Priority::Start).await;
        let mut second = Box::pin(gate.place(Priority::Start));
        assert!(second.as_mut().now_or_never().is_none(), "waits");
        drop(first);
        drop(second);
        assert_eq!(gate.lock().free, 1);
    }
}
